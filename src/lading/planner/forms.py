"""Forms of a step that a plan may choose: other operations, or another order of them, that do the same.

Each gives a step that is planned by itself: its loss or its head in parts, its large gradients in pieces, its updates
late.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import islice

from lading.cost.compute import device_costs
from lading.ir.cross_entropy import cross_entropies
from lading.ir.gradient_pieces import with_gradient_pieces
from lading.ir.graph import Role, StepGraph
from lading.ir.guess import guess_of
from lading.ir.head_parts import heads, with_head_parts
from lading.ir.late_updates import Move, covered_moves, even_moves, paced_moves, with_late_updates
from lading.ir.loss_parts import with_loss_parts
from lading.ir.weight_pieces import with_weight_pieces
from lading.memory.lifetime import lifetimes
from lading.planner.residency import StepProblem

#: Parts of a loss that is computed in parts. That is tried where what is needed at once is this share of the arena at
#: least, and less than this share of it with the loss in parts.
_LOSS_PARTS, _LARGE_SHARE, _LESS = 16, 0.3, 0.9
#: Pieces of the largest gradient, or bytes of one by the arena, and at least; they are tried where the gradient is this
#: share of the arena or more.
_PIECES, _PIECES_OF_ARENA, _LEAST_PIECE, _LARGE_GRADIENT = 16, 64, 1 << 20, 0.1
#: Weights are tried in pieces where the largest is this share of the arena or more; a piece is one of ``_PIECES`` of
#: the largest, or of so many of the arena where that is less.
_LARGE_WEIGHT, _WEIGHT_OF_ARENA = 0.1, 32
#: Parts of a head that are tried where no plan fits that computes it whole.
_HEAD_PARTS = (8, 16, 32)
#: How many times faster than evenly late updates run.
_HURRIES = (1.0, 2.0)
#: Parts of an even share of the updates that are deferred where only those are that have the time.
_COVERED = (0.7,)


def lesser_forms(step: StepProblem) -> list[StepProblem]:
    """Step as it is and in forms that need less at once, those that need least last."""
    losses = [step, *(form for form in (_loss_parts(step),) if form is not None)]
    forms = [*losses, *(form for each in losses for form in _gradient_pieces(each))]
    return forms if any(not form.is_hopeless for form in forms) else [*forms, *_weight_pieces(forms[-1])]


def _loss_parts(step: StepProblem) -> StepProblem | None:
    """Step with its loss in parts; None where that spares little of what is needed at once, or cannot be done."""
    whole = int(step.bound_problem.base.max(initial=0))
    if whole < _LARGE_SHARE * step.arena_bytes or not cross_entropies(step.graph):
        return None
    parts = dataclasses.replace(_rewritten(step, *with_loss_parts(step.graph, _LOSS_PARTS)), loss_parts=_LOSS_PARTS)
    return parts if int(parts.bound_problem.base.max(initial=0)) < _LESS * whole else None


def _gradient_pieces(step: StepProblem) -> list[StepProblem]:
    """Step with its largest gradients in pieces, and with late products too, where there are any.

    [] where these gradients are small beside the memory, or cannot be cut.
    """
    gradients = [s.size_bytes for s in step.graph.storages if s.role is Role.GRADIENT]
    largest = max(gradients, default=0)
    if largest < _LARGE_GRADIENT * step.arena_bytes:
        return []
    min_piece_bytes = max(_LEAST_PIECE, min(largest // _PIECES, step.arena_bytes // _PIECES_OF_ARENA))
    pieces, origins = with_gradient_pieces(step.graph, min_piece_bytes)
    if pieces is step.graph:
        return []
    early = dataclasses.replace(_rewritten(step, pieces, origins), gradient_pieces=min_piece_bytes)
    pieces, late = with_gradient_pieces(step.graph, min_piece_bytes, late_products=True)
    if late == origins:
        return [early]
    return [
        early,
        dataclasses.replace(_rewritten(step, pieces, late), gradient_pieces=min_piece_bytes, late_products=True),
    ]


def _weight_pieces(step: StepProblem) -> list[StepProblem]:
    """Step with its largest weights in pieces; [] where these are small beside the memory, or cannot be cut."""
    weights = [s.size_bytes for s in step.graph.storages if s.role is Role.PARAMETER]
    largest = max(weights, default=0)
    if largest < _LARGE_WEIGHT * step.arena_bytes or guess_of(step.graph) is not None:
        return []
    min_piece_bytes = max(_LEAST_PIECE, min(largest // _PIECES, step.arena_bytes // _WEIGHT_OF_ARENA))
    graph = with_weight_pieces(step.graph, min_piece_bytes)
    if graph is step.graph:
        return []
    return [dataclasses.replace(step, graph=graph, lives=lifetimes(graph), weight_pieces=min_piece_bytes)]


def head_forms(step: StepProblem) -> list[StepProblem]:
    """Step with its head in parts, with whole gradients and with pieces; [] where it has no such head.

    Late products are left out: GPT-2 in a quarter of an H100 has the same plan with them, planned a third longer. So
    are weights in pieces, but where nothing else could fit (``weight_pieces``).
    """
    if not heads(step.graph):
        return []
    made = [
        dataclasses.replace(_rewritten(step, *with_head_parts(step.graph, parts)), head_parts=parts)
        for parts in _HEAD_PARTS
    ]
    forms = [*made, *(form for each in made for form in _gradient_pieces(each)[:1])]
    if any(not form.is_hopeless for form in forms):
        return forms
    late = (form for each in made for form in weight_pieces(each, step) if not form.is_hopeless)
    return [*forms, *islice(late, 1)]


def weight_pieces(planned: StepProblem, step: StepProblem) -> list[StepProblem]:
    """Forms that have been planned with their largest weights in pieces; [] where these are small or cannot be cut.

    Where the head is in parts, its gradient is made behind all of them (late products): its weight may go by then.
    Elsewhere a second form has late products, where the planned one has none, and its loss in parts: the weight then
    goes and comes by pieces with its states, and no gradient does.

    Args:
        planned: Form of ``step``.
    """
    if not planned.head_parts:
        forms = _weight_pieces(planned)
        late = [] if planned.late_products or not forms else _gradient_pieces(_loss_parts(step) or step)[1:]
        return [*forms, *(form for each in late for form in _weight_pieces(each))]
    parts = planned.head_parts
    head = dataclasses.replace(_rewritten(step, *with_head_parts(step.graph, parts)), head_parts=parts)
    return _weight_pieces((_gradient_pieces(head) or [head])[-1])


def late_forms(step: StepProblem) -> list[StepProblem]:
    """Step with its updates spread, evenly over the backward and over all of the step.

    None where no operation could run between them. Of a step that speculates, none runs in the next step.
    """
    guesses = guess_of(step.graph) is not None
    if not ((step.defers or guesses) and step.machine.tiers):
        return []
    seconds = step.costs.op_seconds
    paces = [(even_moves(step.graph, seconds, hurry), 0) for hurry in _HURRIES]
    paces.insert(1, paced_moves(step.graph, seconds))
    paces += [covered_moves(step.graph, seconds, part) for part in _COVERED]
    return [_paced(step, moves, deferrals) for moves, deferrals in paces if moves and not (guesses and deferrals)]


def _paced(step: StepProblem, moves: tuple[Move, ...], deferrals: int) -> StepProblem:
    """Step with updates that run behind later operations, the last of which may be there to be deferred."""
    made = _reordered(step, *with_late_updates(step.graph, moves))
    return dataclasses.replace(made, late_updates=moves, deferrals=deferrals)


def _rewritten(step: StepProblem, graph: StepGraph, origins: Sequence[int]) -> StepProblem:
    """Step of other operations, each of which does a part of its origin and costs what it does."""
    made = _reordered(step, graph, origins)
    costs = dataclasses.replace(made.costs, op_seconds=tuple(device_costs(graph, step.machine)))
    return dataclasses.replace(made, costs=costs)


def _reordered(step: StepProblem, graph: StepGraph, origins: Sequence[int]) -> StepProblem:
    """Step of other operations, each of which costs what its origin did."""
    seconds, scratch = step.costs.op_seconds, step.costs.workspace_bytes
    costs = dataclasses.replace(
        step.costs,
        op_seconds=tuple(seconds[index] for index in origins),
        workspace_bytes=tuple(scratch[index] for index in origins),
    )
    return dataclasses.replace(step, graph=graph, lives=lifetimes(graph), costs=costs)
