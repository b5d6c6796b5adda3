"""Least: bytes that every layout needs, from the number of parameters alone, before anything is priced.

Whatever the layout, some rank holds each parameter, its gradient and its optimizer state at the start of a run
(``lading.memory.moments``). A rank therefore needs no less, in the mean of all ranks and so on the fullest one, than
the
sum of all divided by the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from lading.catalog.architectures import table_parameters
from lading.ir.graph import DTYPE_BYTES
from lading.ir.request import StepRequest
from lading.ir.table import ModelTable
from lading.memory.rank_bytes import kept_state_bytes, parameter_width
from lading.sim.updates import least_stack


@dataclass(frozen=True)
class Least:
    """Bytes that the fullest device needs at the least.

    Attributes:
        device_bytes: Bytes of its memory, with the optimizer's states there.
        host_bytes: Bytes of its share of the host's memory, with the states, and the gradients that update them, there.
    """

    device_bytes: int
    host_bytes: int

    @staticmethod
    def of(request: StepRequest, table: ModelTable, devices: int) -> Least:
        """Count the least bytes of a request whose layout has the precision.

        Args:
            devices: Number of devices that all can be spread over.
        """
        stack = least_stack(request)
        number, states = table_parameters(table, request.seq_len), kept_state_bytes(stack)
        parameter, gradient = parameter_width(request.layout, stack), DTYPE_BYTES[stack.gradient_dtype]
        stored = parameter if stack.parameters_dtype else gradient
        return Least(number * (parameter + stored + states) // devices, number * (states + gradient) // devices)
