"""Steps with a matrix optimizer: what replaces AdamW's seconds and states of the blocks' matrices in a simulated step.

The update by owners (``lading.cost.owned``) takes the place of AdamW's update of these matrices; AdamW updates the
rest. A rule that updates every parameter needs none of this: its states are the stack's (``lading.ir.request``).
Nothing else of the step changes: gradients are reduced and parameters gathered as before. The memory in which owners
compute, a few matrices at a time, is not counted, as activations are freed by then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lading.cost.owned import Update, assumed_of_updates, matrix_s, update_of
from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES, Role
from lading.ir.layout import Layout
from lading.ir.machine import Machine
from lading.ir.request import StepRequest
from lading.ir.stack import Stack
from lading.ir.table import ModelTable
from lading.memory.rank_bytes import shards
from lading.optim.registry import matrix_rule
from lading.optim.rule import MatrixRule
from lading.parallel.block_matrices import BlockMatrix, matrices_of
from lading.parallel.ranks import DENSE, EXPERTS
from lading.sim.prices import MachinePrices
from lading.sim.step import SimulatedStage, Step, host_s, trained_of
from lading.sim.storage import stages_of_ranks


@dataclass(frozen=True)
class RankUpdate:
    """The update of one pipeline rank.

    Attributes:
        seconds: Seconds of the update of matrices and of the other parameters.
        host_s: Seconds that the host takes in a step beside it.
        fewer_bytes: Bytes of AdamW's moments on a device that the rule does not keep, less the rule's whole states.
        saved_fewer_bytes: Bytes by which a checkpoint of all devices that share the matrices is smaller.
    """

    seconds: float
    host_s: float
    update: Update
    fewer_bytes: float
    saved_fewer_bytes: int

    def states(self, roles: Mapping[Role, int]) -> dict[Role, int]:
        """Bytes by role, from those with AdamW."""
        return {**roles, Role.OPTIMIZER_STATE: int(roles[Role.OPTIMIZER_STATE] - self.fewer_bytes)}


@dataclass(frozen=True)
class Updated:
    """A step under a matrix optimizer.

    Attributes:
        memory: Bytes by role of each pipeline rank.
        update: Update of the pipeline rank on which it takes longest.
        saved_fewer_bytes: Bytes by which a checkpoint of all ranks is smaller than with AdamW; below 0 if it is larger.
        assumed: Sentences on what the prediction assumes.
    """

    step: Step
    memory: tuple[dict[Role, int], ...]
    update: Update
    saved_fewer_bytes: int
    assumed: tuple[str, ...]


def updated(
    request: StepRequest, machine: Machine, table: ModelTable, step: Step, memory: Sequence[dict[Role, int]]
) -> Updated:
    """Replace AdamW by the request's optimizer in a simulated step.

    Raises:
        ConfigError: the model has no matrices in its blocks, or the request keeps states behind the device or trains
            adapters.
    """
    of_segment = block_matrices(request, table)
    rows = [
        rank_update(rank_stages, of_segment, request, machine) for rank_stages in stages_of_ranks(step.stages, step)
    ]
    slowest = max(rows, key=lambda row: row.seconds)
    shares = {**step.shares_s, "optimizer": slowest.seconds}
    if machine.processes is None:
        shares["host"] = max(row.host_s for row in rows)
    longer = sum(shares.values()) - sum(step.shares_s.values())
    names = dict.fromkeys(m.name for segment in of_segment for m in segment)
    return Updated(
        dataclasses.replace(step, step_s=step.step_s + longer, shares_s=shares),
        tuple(row.states(roles) for row, roles in zip(rows, memory, strict=True)),
        slowest.update,
        sum(row.saved_fewer_bytes for row in rows),
        assumed_of_updates(request.optimizer, _rule(request), list(names), machine.device),
    )


def block_matrices(request: StepRequest, table: ModelTable) -> list[tuple[BlockMatrix, ...]]:
    """List the matrices of each segment of a table."""
    sizes = {**table.symbols, "s": request.seq_len}
    return [matrices_of(segment, sizes) for segment in table.segments]


def segment_directions_s(request: StepRequest, table: ModelTable, machine: Machine) -> list[tuple[float, float]]:
    """Seconds of directions of each segment on one device: of all its matrices, and of the longest; 0 without
    a rule for matrices."""
    directions_s = [(0.0, 0.0) for _ in table.segments]
    if not request.moves_matrices:
        return directions_s
    rule = _rule(request)
    for place, matrices in enumerate(block_matrices(request, table)):
        each = [(matrix_s(m.rows, m.columns, rule, request.stack, machine), m.count) for m in matrices]
        if each:
            directions_s[place] = sum(seconds * count for seconds, count in each), max(seconds for seconds, _ in each)
    return directions_s


def rank_update(
    rank_stages: Sequence[SimulatedStage],
    of_variant: Sequence[tuple[BlockMatrix, ...]],
    request: StepRequest,
    machine: Machine,
) -> RankUpdate:
    """Price the update of a pipeline rank.

    Args:
        rank_stages: Stages of the rank.
        of_variant: Matrices of each variant of a segment to which runs of stages refer; repeated after the last.
    Raises:
        ConfigError: as ``updated``.
    """
    _check(request)
    layout, stack = request.layout, request.stack
    matrices = _counted(rank_stages, of_variant)
    if not matrices:
        raise ConfigError(
            f"--optimizer {request.optimizer}: expected matrices in the blocks of every pipeline rank, found none on "
            "one; take fewer pipeline ranks, or adamw"
        )
    on_rank, trained = _on_rank(matrices, layout), trained_of(rank_stages)
    updated_elements = sum(number / shards(axes, layout) for axes, number in on_rank.items())
    update = update_of(matrices, updated_elements, _rule(request), layout, stack, machine)
    rest = {axes: max(0, number - on_rank.get(axes, 0)) for axes, number in trained.items()}
    seconds = update.seconds + _adamw_s(rest, request, machine)
    host = host_s(rank_stages, stack, seconds)
    moment = DTYPE_BYTES[stack.moments_dtype]
    fewer = (stack.moments * updated_elements - update.cut_elements) * moment - update.directions.state_bytes
    return RankUpdate(seconds, host, update, fewer, _saved_fewer(matrices, request, moment))


def _rule(request: StepRequest) -> MatrixRule:
    """The request's rule for matrices, with its default settings."""
    return matrix_rule(request.optimizer)()


def _check(request: StepRequest) -> None:
    if request.task in ("lora", "qlora"):
        raise ConfigError(
            f"--optimizer {request.optimizer}: expected all weights trained, got {request.task}; take adamw"
        )
    if request.layout.offload and request.layout.updates_on_host:
        raise ConfigError(
            f"--optimizer {request.optimizer}: expected states on the device, got offload="
            f"{'+'.join(request.layout.offload)}: the host has no update of whole matrices; take adamw"
        )


def _adamw_s(elements: Mapping[str, int], request: StepRequest, machine: Machine) -> float:
    """Seconds of AdamW over a rank's part of some parameters."""
    if not sum(elements.values()):
        return 0.0
    return MachinePrices(machine, request.layout, request.stack).optimizer_s(elements)


def _counted(
    rank_stages: Sequence[SimulatedStage], of_variant: Sequence[tuple[BlockMatrix, ...]]
) -> dict[BlockMatrix, int]:
    """Matrices of a pipeline rank, each as often as its block is repeated."""
    counts: dict[BlockMatrix, int] = {}
    for stage in rank_stages:
        for variant, times in stage.run:
            for matrix in of_variant[variant % len(of_variant)]:
                counts[matrix] = counts.get(matrix, 0) + int(times)
    return counts


def _on_rank(matrices: Mapping[BlockMatrix, int], layout: Layout) -> dict[str, int]:
    """Number of elements of a rank's matrices, by the axes over which they are replicated."""
    by_axes: dict[str, int] = {}
    for matrix, times in matrices.items():
        axes, ways = (EXPERTS, layout.ep * layout.expert_tp) if matrix.is_expert else (DENSE, layout.tp)
        by_axes[axes] = by_axes.get(axes, 0) + matrix.elements * times // ways
    return by_axes


def _saved_fewer(matrices: Mapping[BlockMatrix, int], request: StepRequest, moment: int) -> int:
    """Bytes of AdamW's moments of these matrices, less those of the rule's states."""
    rule, saved_bytes = _rule(request), 0
    for matrix, times in matrices.items():
        cut, whole = rule.state_elements(matrix.rows, matrix.columns)
        adamw = request.stack.moments * matrix.rows * matrix.columns
        saved_bytes += matrix.count * times * ((adamw - cut) * moment - 4 * whole)
    return saved_bytes


def least_stack(request: StepRequest) -> Stack:
    """Stack for lower bounds of bytes and seconds under the request's optimizer, with the fewest possible moments."""
    if not request.moves_matrices:
        return request.stack
    return dataclasses.replace(request.stack, moments=min(request.stack.moments, _rule(request).cut_states))
