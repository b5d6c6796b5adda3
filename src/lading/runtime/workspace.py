"""Workspace: scratch bytes of each operation on a device that is here, measured by running it once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from lading.ir.graph import Op, StepGraph
from lading.ir.update_ops import always_due, step_of
from lading.runtime.accelerator import Api
from lading.runtime.host_arena import view_of
from lading.runtime.kernel_calls import Rate, View, bind
from lading.runtime.scratch import by_signature, extent


def measured_workspace(graph: StepGraph, api: Api) -> list[int]:
    """Measure the scratch bytes of each operation, in program order, by what the device's allocator gives out.

    Operations that differ only in which tensors they take run once, on zeros, with room for their own tensors alone;
    those that decompose matrices now and then run as at the first update and as when that is due.

    Raises:
        StorageError: the device has not enough for one operation.
    """
    meter = api.meter()

    def transient_bytes(run: Callable[[], object]) -> int:
        run()  # loads code, and what libraries keep
        _settle(api)
        before = meter.now_bytes()
        meter.reset()
        run()
        _settle(api)
        return max(0, meter.peak_bytes() - before)

    def scratch(op: Op) -> int:
        return max(map(transient_bytes, runs_of(op, _zeros(graph, api), api.kind)))

    with torch.inference_mode():
        return by_signature(graph, scratch)


def runs_of(op: Op, view: View, kind: str) -> list[Callable[[], object]]:
    """Make calls that show all that an operation takes: two for an update that decomposes now and then, else one."""
    step = step_of(op)
    kernel = bind(always_due(op), view, kind=kind, rate=Rate(0.0))
    counted = None if step is None else view(step)
    if counted is None:
        return [kernel.run]

    def run(update: int) -> None:
        counted.fill_(update - (step in op.mutates))
        kernel.run()

    return [partial(run, update) for update in (1, 2)]


def _zeros(graph: StepGraph, api: Api) -> View:
    """View that makes each tensor of the graph on first use, of zeros in memory of its own."""
    zeros_by_tensor: dict[int, torch.Tensor] = {}

    def view(tensor: int) -> torch.Tensor:
        if tensor not in zeros_by_tensor:
            t = graph.tensors[tensor]
            item = getattr(torch, t.dtype).itemsize
            zeros_by_tensor[tensor] = view_of(api.zeros(max(1, (t.offset + extent(t)) * item)), t)
        return zeros_by_tensor[tensor]

    return view


def _settle(api: Api) -> None:
    event = api.event()
    event.record(api.current())
    event.synchronize()
