"""Memory of a step's kernels beside its tensors: measured on the host itself, worked out for another machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from lading.errors import StorageError
from lading.ir.graph import StepGraph
from lading.ir.machine import Machine
from lading.ir.reporting import SILENT, PlanProgress
from lading.ir.together import one_after_another
from lading.planner.api import KEPT_BYTES, OTHER_OPS, SAVE_BYTES, SPARE_BYTES
from lading.planner.cache import cache_folder
from lading.runtime.cuda import Cuda
from lading.runtime.host import host_id
from lading.runtime.kernel_calls import workspace_of
from lading.runtime.kernel_memory import kernel_memory
from lading.runtime.workspace import measured_workspace


@dataclass(frozen=True)
class KernelScratch:
    """Memory that a step's kernels take beside its tensors, measured or worked out.

    Attributes:
        scratch_bytes: Bytes of each operation while it runs, in program order.
        kept_bytes: Bytes that stay in the process once the step has run; None where that was not measured.
        spare_bytes: Part of the largest scratch that some of equal runs take and others do not.
        assumption: Sentence on what was not measured; "" where all was.
        other_ops: Operations of other steps that the process is ready to run too.
    """

    scratch_bytes: Sequence[int]
    kept_bytes: int | None = None
    assumption: str = ""
    spare_bytes: int = 0
    other_ops: int = 0

    def settings(self, save_bytes: int) -> dict[str, float]:
        """Settings of a plan that counts what stays, and ``save_bytes`` that saving takes."""
        saving = {SAVE_BYTES: float(save_bytes)}
        if self.other_ops:
            saving[OTHER_OPS] = float(self.other_ops)
        if self.kept_bytes is None:
            return saving
        return {KEPT_BYTES: float(self.kept_bytes), SPARE_BYTES: float(self.spare_bytes), **saving}


def memory_of_kernels(graph: StepGraph, machine: Machine, progress: PlanProgress = SILENT) -> KernelScratch:
    """Measure kernels' memory where the machine is this host; else work it out from the bindings of the operations."""
    kind, is_this_host = machine.device.kind, machine.host_id == host_id()
    if kind == "cuda" and is_this_host and torch.cuda.is_available():
        return KernelScratch(measured_workspace(graph, Cuda()))
    if kind != "cpu" or not is_this_host:
        return KernelScratch(workspace_of(graph, kind))
    progress.update(0.0, "measuring what kernels take beside tensors")
    plans = cache_folder()
    try:
        measured = kernel_memory(
            graph, machine.device.num_threads or torch.get_num_threads(), cache=plans and plans.with_name("kernels")
        )
    except StorageError as error:
        assumption = f"memory of kernels beside tensors is worked out by cause, not measured: {error}"
        return KernelScratch(workspace_of(graph), assumption=assumption)
    names = ", ".join(measured.unmeasured)
    assumption = (
        f"scratch of {names} is worked out from shapes, as they could not be run by themselves" if names else ""
    )
    scratch = (measured.workspace_bytes, *measured.scratch_bytes[1:])  # of which plans ask for the largest
    return KernelScratch(scratch, measured.kept_bytes, assumption, measured.spare_bytes)


def memory_by_turns(
    step: StepGraph, rest: Sequence[StepGraph], machine: Machine, progress: PlanProgress
) -> tuple[KernelScratch, list[tuple[StepGraph, Sequence[int]]]]:
    """Kernels' memory of a process that runs several steps by turns; returns the others with the scratch of each, too.

    All are measured together, as what one leaves behind serves the next.
    """
    memory = memory_of_kernels(one_after_another([step, *rest]), machine, progress)
    if not rest:
        return memory, []
    scratch, largest = iter(memory.scratch_bytes), max(memory.scratch_bytes, default=0)
    mine, *others = ([largest, *list(islice(scratch, len(graph.ops)))[1:]] for graph in (step, *rest))
    memory = dataclasses.replace(memory, scratch_bytes=mine, other_ops=sum(len(graph.ops) for graph in rest))
    return memory, list(zip(rest, others, strict=True))
