"""Memory of the fullest moment as a tree: modules, operations, and the state of every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lading.cost.kernels import operand_share
from lading.ir.graph import DTYPE_BYTES
from lading.ir.reporting import Branch
from lading.ir.table import ModelTable
from lading.ir.work import Kernel, RankSegment, Stage
from lading.parallel.memory import kept_sizes
from lading.parallel.recompute import recomputed
from lading.planner.unshard import Chosen
from lading.sim.modules import is_in
from lading.sim.simulate import segments_of


@dataclass(frozen=True)
class _BlockMemory:
    """Memory of one block at the fullest moment.

    Attributes:
        keeps: Bytes of each storage that its forward kept, if they are there.
        scales: Bytes of one element by state, for each module with parameters.
        notes: How long each module's group stays.
    """

    segment: RankSegment
    keeps: Mapping[int, int]
    scales: Mapping[str, Mapping[str, float]]
    notes: Mapping[str, str]


def tree_of(chosen: Chosen, table: ModelTable) -> Branch:
    """Draw the memory of every module, operation and tensor at the peak of a step as a tree, in bytes.

    Blocks in a row that are alike are one branch. What the operation that runs at the moment has of its own, and the
    buffers it needs, are the root's.

    Args:
        table: Table of the model that the groups were chosen for.
    """
    modules, moment = chosen.modules, chosen.gathered.peak
    ranked = segments_of(modules.request, table)
    segments = [ranked[place] for place, count in enumerate(table.counts) for _ in range(count)]
    buckets = {atom: n for n, bucket in enumerate(chosen.buckets) for atom in range(bucket.first, bucket.last + 1)}
    first = 0
    branches: list[Branch] = []
    for at, ((number, path), segment) in enumerate(zip(modules.order, segments, strict=True)):
        block = modules.blocks[number]
        homes = {atom.module: buckets[first + n] for n, atom in enumerate(block.atoms)}
        first += len(block.atoms)
        is_reached = at < moment.place or (moment.is_backward and at == moment.place)
        whole = _BlockMemory(
            segment,
            _keeps(chosen, segment, block.is_recomputed) if is_reached else {},
            {module: _scales(chosen, home) for module, home in homes.items()},
            {module: f"group {home}, {chosen.buckets[home].keep}" for module, home in homes.items()},
        )
        below = _branches("", whole)
        branches += [replace(below, name=path)] if path else below.children
    kept_bytes = sum(branch.total.get("kept", 0) for branch in branches)
    return Branch(
        _title(chosen), "module", "", {"kept": max(0, moment.activation_bytes - kept_bytes)}, tuple(_folded(branches))
    )


def _title(chosen: Chosen) -> str:
    moment = chosen.gathered.peak
    where = chosen.modules.order[moment.place][1] or ("the start" if moment.place == 0 else "the end")
    phase = "backward" if moment.is_backward else "forward"
    return f"{chosen.modules.request.name} at its peak: {phase} of micro-batch {moment.micro_batch}, {where}"


def _scales(chosen: Chosen, home: int) -> dict[str, float]:
    """Bytes of one element of a bucket's parameters in each state."""
    modules, moment, bucket = chosen.modules, chosen.gathered.peak, chosen.buckets[home]
    count = sum(modules.elements(range(bucket.first, bucket.last + 1)).values())
    whole = sum(modules.elements(range(len(modules.atoms))).values())
    states = {
        "gathered": moment.gathered,
        "coming": moment.coming,
        "gradients": moment.gradients,
        "in reduction": moment.reduced,
    }
    gathered = {state: sizes[home] / count for state, sizes in states.items() if home in sizes}
    state = "moved" if "parameters" in modules.request.layout.offload else "sharded"
    return {state: moment.state_bytes / whole, **gathered}


def _keeps(chosen: Chosen, segment: RankSegment, again: bool) -> dict[int, int]:
    layout, stack = chosen.modules.request.layout, chosen.modules.request.stack
    mode = layout.recompute if again else "none"
    again_run = recomputed(segment, mode, layout.recompute_modules, early_stop=stack.early_stop)
    share = operand_share(layout.precision, stack)
    return kept_sizes(segment, again_run, stack.fusion, fused_loss=stack.fused_loss, operand_share=share)


def _branches(module: str, block: _BlockMemory) -> Branch:
    """Draw a module with its operations of forward, and the modules in it, in order."""
    depth = module.count(".") + 1 if module else 0
    below: list[Branch] = []
    seen: set[str] = set()
    for kernel in block.segment.kernels:
        if kernel.stage is not Stage.FORWARD or not is_in(kernel.module, module):
            continue
        if kernel.module == module:
            below.append(_operation(kernel, block))
            continue
        child = ".".join(kernel.module.split(".")[: depth + 1])
        if child not in seen:
            seen.add(child)
            below.append(_branches(child, block))
    return Branch(module, "module", block.notes.get(module, ""), {}, tuple(_as_one(below)))


def _operation(kernel: Kernel, block: _BlockMemory) -> Branch:
    """Draw an operation with its parameters and the results that are kept."""
    tensors = block.segment.tensors
    parameters = {tensor for tensor, _ in block.segment.parameters}
    storages = {tensors[t].storage: t for t in parameters}
    below: list[Branch] = []
    for t in dict.fromkeys(kernel.inputs):
        parameter = storages.get(tensors[t].storage)
        if parameter is None:
            continue
        tensor = tensors[parameter]
        elements = tensor.size_bytes // DTYPE_BYTES[tensor.dtype]
        scales = block.scales[tensor.name.rpartition(".")[0]]
        sizes = {state: round(each * elements) for state, each in scales.items()}
        below.append(Branch(tensor.name, "tensor", _shape(tensor.dtype, tensor.shape), sizes))
    made = {tensors[t].storage: t for t in kernel.outputs if tensors[t].storage in block.keeps}
    below += [
        Branch("result", "tensor", _shape(tensors[t].dtype, tensors[t].shape), {"kept": block.keeps[storage]})
        for storage, t in made.items()
    ]
    return Branch(
        kernel.name.removeprefix("aten.").rpartition(".")[0] or kernel.name, "operation", children=tuple(below)
    )


def _shape(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {' x '.join(map(str, shape))}"


def _as_one(branches: list[Branch]) -> list[Branch]:
    """Leave out operations that have no tensor in memory."""
    return [branch for branch in branches if branch.kind == "module" or branch.children]


def _folded(branches: list[Branch]) -> list[Branch]:
    """Merge blocks in a row that differ in their place only into one branch."""
    rows: list[list[Branch]] = []
    for branch in branches:
        if rows and _same_contents(rows[-1][0], branch):
            rows[-1].append(branch)
        else:
            rows.append([branch])
    return [
        replace(row[0], name=f"{row[0].name} to {row[-1].name}", num_equal=len(row)) if len(row) > 1 else row[0]
        for row in rows
    ]


def _same_contents(one: Branch, other: Branch) -> bool:
    """Whether two blocks have the same, whichever groups they are in."""
    return _bare(one, top=True) == _bare(other, top=True)


def _bare(branch: Branch, *, top: bool = False) -> tuple[object, ...]:
    name = "" if top else branch.name
    note = branch.note.rpartition(", ")[2]
    return name, branch.kind, note, tuple(branch.states.items()), tuple(_bare(below) for below in branch.children)
