"""Exchanges: seconds and bytes that depend on who keeps which state, for every pipeline shape and cut of a mesh.

The prices are the simulator's own (``lading.sim.prices.MachinePrices``), asked with arrays: parameters of all pipeline
shapes of one number of stages at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from lading.cost.hosting import host_step_s
from lading.ir.graph import DTYPE_BYTES, Role
from lading.ir.layout import Layout
from lading.ir.request import StepRequest
from lading.ir.stack import Stack
from lading.memory.rank_bytes import gathered_width, kept_state_bytes, shards, state_bytes
from lading.planner.pipes import WATCHED, PipeTable, watched_rows
from lading.planner.space import LayoutBlock, Space, StateLayout
from lading.planner.stages import Floats, Ints, StageRows
from lading.program.emit import GATHERED_AT_ONCE
from lading.sim.phases import Phases
from lading.sim.prices import MachinePrices
from lading.sim.updates import least_stack

_KINDS = ("dp", "dp/ep")
#: Places of a shape's rows behind its watched ranks: the first stage, and what every stage has at least.
FIRST, LEAST = WATCHED, WATCHED + 1
#: Seconds of gathers and of reductions by (tp, cp, ways of experts, pp, cut at all, shard, what is copied meanwhile).
Known = dict[tuple[int, int, int, int, bool, int, str], tuple[Floats, Floats]]


@dataclass(frozen=True, eq=False)
class Exchanges:
    """Seconds and bytes of each (pipeline shape, way to keep states) of a mesh, in a row.

    Attributes:
        start: [shape]: where its entries begin.
        cuts: [number]: way to keep states.
        zero: [number]: ZeRO stage.
        gather_s, optimizer_s: [number]: seconds that the slowest watched rank waits for.
        reduce_s: [number]: seconds of reducing the gradients of the first stage.
        reduce_all_s: [number]: seconds of all stages of a watched rank, the slowest.
        reduce_least_s: [number]: least seconds of any stage.
        reduce_ranks_s: [number, watched rank]: seconds of all its stages.
        bytes: [number, watched rank]: states, gathered parameters, whole gradients and placeholders.
        gradients: [number, watched rank]: of these, whole gradients: not there when activations are most where all
            forwards run first.
        segment_gather_s, segment_reduce_s: [number, segment]: seconds of each alone, where there is no pipeline.
    """

    start: Ints
    cuts: tuple[StateLayout, ...]
    zero: Ints
    gather_s: Floats
    optimizer_s: Floats
    reduce_s: Floats
    reduce_all_s: Floats
    reduce_least_s: Floats
    reduce_ranks_s: Floats
    bytes: Floats
    gradients: Floats
    segment_gather_s: Floats
    segment_reduce_s: Floats

    def rows(self, table: PipeTable, good: Any) -> tuple[Ints, Ints]:
        """List the layouts of some pipes: each with every way of dividing its states over ranks.

        Returns:
            Number of the pipe in ``table``, and of the way in the arrays of this class, each an array of [layout].
        """
        pipes = np.flatnonzero(good)
        geometry = table.geometry[pipes]
        counts = np.append(self.start[1:], len(self.cuts))[geometry] - self.start[geometry]
        begins = np.cumsum(counts) - counts
        number = np.arange(int(counts.sum())) - np.repeat(begins, counts) + np.repeat(self.start[geometry], counts)
        return np.repeat(pipes, counts), number


def exchanges(
    space: Space, block: LayoutBlock, watched: Floats, table: PipeTable, segments: Sequence[Phases], known: Known
) -> Exchanges:
    """Price all (pipeline shape, way to keep states) of a block's mesh.

    Args:
        watched: Result of ``watched_segments``.
        segments: Priced for any block of the mesh.
        known: Seconds that meshes before it have priced; added to.
    """
    plain = segments[len(segments) // 2 :]
    alone = alone_of(plain)
    shapes = list(_all_shapes(space, block, watched, table, plain, alone))
    untied = alone - np.array([[held.tied, 0.0] for held in plain])  # of each alone, where there is no pipeline
    columns_by_shape = [_priced(space, block, shape, untied, known) for shape in shapes]
    counts = [len(shape.cuts) for shape in shapes for _ in shape.rank_counts]
    cuts = tuple(cut for shape in shapes for _ in shape.rank_counts for cut in shape.cuts)
    arrays = [np.concatenate(column) for column in zip(*columns_by_shape, strict=True)]
    start: Ints = np.cumsum(np.array(counts, np.int64)) - np.array(counts, np.int64)
    return Exchanges(start, cuts, np.array([cut.zero for cut in cuts], np.int64), *arrays)


def watched_segments(table: PipeTable, rows: StageRows) -> Floats:
    """Count the segments of watched ranks.

    Returns:
        [pipeline shape, watched rank, then the first stage, then the least of any stage; segment of the model].
    """
    plain = rows.plain
    watched = watched_rows(table, rows)
    counts = np.zeros((len(watched), WATCHED + 2, plain))
    for number, runs in enumerate(watched):
        for place, run in enumerate(runs):
            for segment, count in run:
                counts[number, place, segment % plain] += count
    weights = rows.arrays()[2]
    each = weights[:, :plain] + weights[:, plain:]
    for number in range(len(watched)):
        pipe = int(np.argmax(table.geometry == number))
        begin = int(table.first[pipe])
        stages = table.row[begin : begin + int(table.pp[pipe] * table.vpp[pipe])]
        counts[number, LEAST] = each[stages].min(axis=0)
    return counts


def least_bytes(
    space: Space, block: LayoutBlock, watched: Floats, table: PipeTable, segments: Sequence[Phases], elements: Floats
) -> tuple[Floats, Floats]:
    """Least bytes of states, however they are kept; inf where they cannot be.

    Both results are arrays of [pipeline shape, watched rank]; the second leaves whole gradients out, for schedules that
    run all forwards first.

    Args:
        watched: Result of ``watched_segments``.
        segments: Priced for any block of the family.
        elements: [segment, kind]: parameters, of this block.
    """
    min_by_shape: list[tuple[Floats, Floats]] = []
    for shape in _all_shapes(space, block, watched, table, segments[len(segments) // 2 :], elements):
        widest: dict[tuple[int, tuple[str, ...]], StateLayout] = {}  # more ranks that share states keep fewer each
        for cut in shape.cuts:
            kind = cut.zero, cut.offload
            if kind not in widest or (widest[kind].shard and (not cut.shard or cut.shard > widest[kind].shard)):
                widest[kind] = cut
        min_bytes = forwards_first = np.full(shape.placeholders.shape, np.inf)
        for cut in widest.values():
            layout = _layout(space, block, shape, cut)
            size = _bytes(shape, layout, space.request)
            min_bytes = np.minimum(min_bytes, size)
            gradients = _whole_gradients(shape, layout, space.request.stack)
            forwards_first = np.minimum(forwards_first, size - gradients)
        min_by_shape.append((min_bytes, forwards_first))
    every, first = zip(*min_by_shape, strict=True)
    return np.concatenate(every), np.concatenate(first)


def alone_of(plain: Sequence[Phases]) -> Floats:
    """Parameters; an array of [segment, kind]."""
    return np.array([[float(s.elements.get(kind, 0)) for kind in _KINDS] for s in plain])


@dataclass(frozen=True, eq=False)
class Shapes:
    """Pipeline shapes of ``pp`` ranks.

    Attributes:
        chunks: [shape]: chunks of a rank; 0 of the shape without a pipeline.
        cuts: Ways to keep states.
        rank_counts: [shape, watched rank, ``FIRST`` or ``LEAST``; dense and expert parameters, segments]: counts.
        placeholders: [shape, watched rank]: bytes.
        directions: [shape, watched rank]: least seconds of a matrix optimizer: the mean of who shares the matrices, or
            the longest of them.
    """

    pp: int
    chunks: list[int]
    cuts: list[StateLayout]
    rank_counts: Floats
    placeholders: Floats
    directions: Floats


def _all_shapes(
    space: Space, block: LayoutBlock, watched: Floats, table: PipeTable, plain: Sequence[Phases], elements: Floats
) -> Iterator[Shapes]:
    """Yield the shapes of each number of pipeline ranks, in the order of the table."""
    weights = np.concatenate([elements, np.ones((len(plain), 1))], axis=1)
    rank_counts, placeholders = watched @ weights, _all_placeholders(watched[:, :WATCHED], plain)
    rank_counts[..., 0] -= (watched[..., 0] > 0) * (watched @ np.array([float(one.tied) for one in plain]))
    total, longest = np.array(space.directions_s).T
    present = watched[:, :WATCHED]
    total, longest = present @ total, np.max((present > 0) * longest, axis=2)
    mesh, begin = block.mesh, 0
    devices = space.wanted_request.devices // (mesh.tp * mesh.cp)
    for pp, group in groupby(table.geometries, key=lambda shape: shape[0]):
        shapes = list(group)
        can = devices % pp == 0 and devices // pp * mesh.cp * mesh.tp % mesh.expert_ways == 0
        single = pp == 1 and shapes[0][1] == 1
        cuts = space.cuts(devices // pp * mesh.cp, 1 if single else 2) if can else []
        chunks = [0 if single else vpp for _, vpp, _ in shapes]
        shape_rows = slice(begin, begin + len(shapes))
        begin += len(shapes)
        min_directions_s = np.maximum(
            total[shape_rows] / max(1, space.wanted_request.devices // pp), longest[shape_rows]
        )
        yield Shapes(pp, chunks, cuts, rank_counts[shape_rows], placeholders[shape_rows], min_directions_s)


def _all_placeholders(watched: Floats, plain: Sequence[Phases]) -> Floats:
    """Bytes of gradients that are tensors in name only; an array of [pipeline shape, watched rank]."""
    if not any(s.placeholders for s in plain):
        return np.zeros(watched.shape[:2])
    distinct, which = np.unique(watched.reshape(-1, len(plain)) > 0, axis=0, return_inverse=True)
    each = np.array([_placeholders(row, plain) for row in distinct.tolist()], np.float64)
    return each[which].reshape(watched.shape[:2])


def _placeholders(is_present: Sequence[bool], plain: Sequence[Phases]) -> int:
    """Bytes of gradients that are tensors in name only, of the segments that are marked."""
    shapes = {
        k: size for s, present in zip(plain, is_present, strict=True) if present for k, size in s.placeholders.items()
    }
    return sum(shapes.values())


def _layout(space: Space, block: LayoutBlock, shape: Shapes, cut: StateLayout) -> Layout:
    mesh, pp = block.mesh, shape.pp
    dp = space.wanted_request.devices // (mesh.tp * mesh.cp * pp)
    return Layout(
        dp=dp, pp=pp, vpp=max(1, *shape.chunks), tp=mesh.tp, cp=mesh.cp, ep=mesh.ep, etp=mesh.etp,
        zero=cut.zero, shard=cut.shard, precision=block.precision, offload=cut.offload,
        offload_to=cut.tier,
    )  # fmt: skip


def _priced(space: Space, block: LayoutBlock, shape: Shapes, alone: Floats, known: Known) -> list[Floats]:
    """Price the columns of ``Exchanges``: all ways to keep states of the first shape, then of the second."""
    number, wide = len(shape.rank_counts), len(shape.cuts)
    if not wide:
        empty = np.zeros((0, len(alone)))
        return [*(np.zeros(0) for _ in range(5)), *(np.zeros((0, WATCHED)) for _ in range(3)), empty, empty]
    overlap = space.request.stack.overlap_param_gather
    every = np.concatenate([shape.rank_counts.reshape(-1, 3)[:, :2], alone])
    gather, reduce, optimizer, size, gradients = _by_cut(space, block, shape, every, known)
    per_shape = (wide, number, WATCHED + 2)
    gathers, reduces = (part[:, : -len(alone)].reshape(per_shape) for part in (gather, reduce))
    # Nothing runs before the first forward of the first stage, which waits for its first unit, or for the whole stage
    # where units are not gathered one by one. What other stages wait for may be hidden while they wait for the first.
    first, unit = gathers[..., FIRST], gather[:, -len(alone)][:, None]
    cut = np.array([cut.zero >= 2 for cut in shape.cuts])[:, None] & (np.array(shape.chunks) > 0)
    whole = np.where(np.where(cut, np.array(shape.chunks) > 1, not overlap), first, unit)
    updates = optimizer[:, : -len(alone)].reshape(per_shape)[..., :WATCHED] + shape.directions
    of_shapes = [
        whole,
        updates.max(axis=2),
        reduces[..., FIRST],
        reduces[..., :WATCHED].max(axis=2),
        reduces[..., LEAST],
        reduces[..., :WATCHED],
        size,
        gradients,
    ]
    columns = [np.swapaxes(part, 0, 1).reshape(number * wide, *part.shape[2:]) for part in of_shapes]
    return [*columns, *(np.tile(part[:, -len(alone) :], (number, 1)) for part in (gather, reduce))]


def _by_cut(
    space: Space, block: LayoutBlock, shape: Shapes, every: Floats, known: Known
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Price rows of (dense, expert) parameters for each way to keep states.

    Who exchanges an expert's does not depend on ``shard``, and who exchanges the others not on the experts.

    Returns:
        [cut, row]: seconds of gathers, of reductions, of updates; [cut, shape, watched rank]: bytes, and of
        these whole gradients.
    """
    mesh, stack = block.mesh, space.request.stack
    rows: list[list[Floats]] = [[], [], [], [], []]
    for cut in shape.cuts:
        layout = _layout(space, block, shape, cut)
        prices = MachinePrices(space.machine, layout, stack)
        moved = ("down " if cut.offload and cut.zero >= 2 else "") + (cut.tier if "parameters" in cut.offload else "")
        dense = (mesh.tp, mesh.cp, 0, shape.pp, cut.zero > 0, cut.shard, moved)
        expert = (mesh.tp, mesh.cp, mesh.expert_ways, shape.pp, cut.zero > 0, 0, moved)
        exchange_s = [0.0, 0.0]
        for place, key in enumerate((dense, expert)):
            if key not in known:
                part = every * np.eye(2)[place]
                known[key] = (_seconds_by_row(prices.gather_s, part), _seconds_by_row(prices.reduce_s, part))
            exchange_s = [total + part_s for total, part_s in zip(exchange_s, known[key], strict=True)]
        ways = np.array([shards(kind, layout) for kind in _KINDS], np.float64)
        rows[0].append(np.asarray(exchange_s[0]))
        rows[1].append(np.asarray(exchange_s[1]))
        rows[2].append(every @ (1 / ways))
        rows[3].append(_bytes(shape, layout, space.request))
        rows[4].append(_whole_gradients(shape, layout, stack))
    kept_elements = np.stack(rows[2])
    min_stack = least_stack(space.request)
    updates = _optimizer(
        MachinePrices(space.machine, _layout(space, block, shape, StateLayout(0, 0)), min_stack), kept_elements
    )
    for place, cut in enumerate(shape.cuts):
        if cut.offload:
            updates[place] = _on_host(space, _layout(space, block, shape, cut), kept_elements[place])
    return np.stack(rows[0]), np.stack(rows[1]), updates, np.stack(rows[3]), np.stack(rows[4])


def _on_host(space: Space, layout: Layout, kept_elements: Floats) -> Floats:
    """Least seconds of the optimizer on the host: what the largest number takes, scaled, as all of it is affine."""
    stack, max_elements = space.request.stack, float(np.max(kept_elements))
    states = kept_state_bytes(stack)
    return kept_elements / max_elements * host_step_s(max_elements, layout, stack, space.machine, state_bytes=states)


def _seconds_by_row(seconds: Any, elements: Floats) -> Floats:
    """Seconds of an exchange of [row, kind] elements; 0 where there are none of a kind; an array of [row]."""
    whole = elements.astype(np.int64)
    total = np.zeros(len(elements))
    for place, kind in enumerate(_KINDS):
        some = whole[:, place] > 0
        if np.any(some):
            total[some] += seconds({kind: whole[some, place]})
    return total


def _optimizer(prices: MachinePrices, kept_elements: Floats) -> Floats:
    """Seconds of the optimizer over numbers of parameters that a rank keeps; ``prices`` are of an uncut layout."""
    seconds: Any = prices.optimizer_s
    if prices.machine.device.gpu is None:  # whose rates are a curve
        return np.array([seconds({"dp": number}) for number in kept_elements.reshape(-1).tolist()]).reshape(
            kept_elements.shape
        )
    return seconds({"dp": kept_elements})


def _bytes(shape: Shapes, layout: Layout, request: StepRequest) -> Floats:
    """Bytes of states, and of placeholders of gradients; an array of [shape, watched rank].

    Where parameters are cut, gradients come with backward, and gathered ones go with their unit: neither is counted, as
    they need not be there when activations are most; nor are gradients where a stack drops them, or cut ones where the
    host updates. What a pipeline keeps whole of them is.
    """
    many, stack = 1 << 40, least_stack(request)
    gradients = not layout.cuts_parameters and not (layout.zero == 2 and layout.offload) and not stack.drops_gradients
    roles = [Role.GRADIENT] if gradients else []
    roles += [] if "parameters" in layout.offload else [Role.PARAMETER]
    roles += [] if layout.offload else [Role.OPTIMIZER_STATE]
    each = [state_bytes({kind: many}, layout, stack) for kind in _KINDS]
    bytes_per_element = np.array([sum(found[role] for role in roles) / many for found in each])
    rank_counts = shape.rank_counts[:, :WATCHED, :2]
    return rank_counts @ bytes_per_element + shape.placeholders + _whole_bytes(shape, layout, stack)


def _whole_bytes(shape: Shapes, layout: Layout, stack: Stack) -> Floats:
    """Least bytes of cut parameters and gradients that are whole in a pipeline; an array of [shape, watched rank].

    These are gradients of all chunks; parameters of all of up to three chunks, of more those of the largest.
    """
    if not layout.is_pipeline or layout.zero < 2 or stack.drops_gradients:
        return np.zeros((len(shape.rank_counts), WATCHED))
    chunks = np.array(shape.chunks)
    each = gathered_width(layout, stack) / np.where(chunks > GATHERED_AT_ONCE, chunks, 1)
    parameters = shape.rank_counts[:, :WATCHED, :2].sum(axis=2) * each[:, None]
    return parameters + _whole_gradients(shape, layout, stack)


def _whole_gradients(shape: Shapes, layout: Layout, stack: Stack) -> Floats:
    """Bytes of cut gradients that are whole in a pipeline from the first backward on.

    Returns:
        Array of [shape, watched rank].
    """
    if not layout.is_pipeline or layout.zero < 2 or stack.drops_gradients:
        return np.zeros((len(shape.rank_counts), WATCHED))
    return shape.rank_counts[:, :WATCHED, :2].sum(axis=2) * DTYPE_BYTES[stack.gradient_dtype]
