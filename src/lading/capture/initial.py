"""Initial values without the memory of a whole model.

A model is built on fake tensors while the operations that would initialise it are recorded. Running them again, in
the same order on the same generator, gives the same bits as building the model for real; each parameter is handed on
and freed as soon as nothing writes or reads it any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lading.capture.interpret import Interpreter
from lading.capture.trace import Tracer
from lading.ir.graph import Op, Storage, Tensor


@dataclass(frozen=True)
class Deferred:
    """A model on fake tensors, and how to make its values.

    Attributes:
        named: Graph tensor of each parameter and buffer, by its first name.
    """

    model: torch.nn.Module
    named: dict[str, int]
    storages: tuple[Storage, ...]
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]

    def materialize(self, seed: int, sink: Callable[[str, torch.Tensor], None]) -> None:
        """Make every parameter and buffer as ``torch.manual_seed(seed)`` and building the model would.

        Args:
            sink: Called with each name and value, in the order they become final; it must copy what it keeps.
        """
        values = Interpreter(self.storages, self.tensors)
        names: dict[int, list[str]] = {}
        for name, tensor in self.named.items():
            names.setdefault(self.tensors[tensor].storage, []).append(name)
        ending = self._last_uses()
        torch.manual_seed(seed)
        with torch.no_grad():
            for index, op in enumerate(self.ops):
                values.run(op)
                for storage in ending.get(index, ()):
                    for name in names.pop(storage, ()):
                        sink(name, values.tensor(self.named[name]))
                    values.bytes.pop(storage, None)
            for storage in sorted(names):  # constants, which no operation makes
                for name in names[storage]:
                    sink(name, values.tensor(self.named[name]))

    def _last_uses(self) -> dict[int, list[int]]:
        """Op index -> storages that nothing touches after it."""
        last: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            for tensor in (*op.inputs, *op.outputs, *op.mutates):
                last[self.tensors[tensor].storage] = index
        ending: dict[int, list[int]] = {}
        for storage, index in last.items():
            ending.setdefault(index, []).append(storage)
        return ending


def defer(build: Callable[[], torch.nn.Module]) -> Deferred:
    """Build a model on fake CPU tensors.

    Raises:
        CaptureError: the constructor needs tensor values or an operation that has no fake rule.
    """
    tracer = Tracer()
    with FakeTensorMode(allow_non_fake_inputs=True), tracer:
        model = build()
    named = {n: tracer.tensor_id(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
    return Deferred(model, named, tuple(tracer.storages), tuple(tracer.tensors), tuple(tracer.ops))
