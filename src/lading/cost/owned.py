"""Seconds and bytes of a step of a matrix optimizer, on ranks that share a model's matrices.

[Note: step of owners]
Every rank prepares its pieces of matrices for sending (``pre``), owners compute directions, and every rank updates its
pieces with them (``post``). Matrices travel in G groups that overlap: the first comes in alone and the last goes out
alone, and between them the longer of computing and of both ways counts. With c seconds of directions on the fullest
rank and w for one way of all matrices,

    seconds = pre and post + w / G + (G - 1) max(c / G, 2 w / G) + c / G + w / G

``lading.cost.patterns.spread`` chooses the owners. With sharded states (zero 1 to 3) pieces travel: each rank sends and
gets its part of all matrices. Without, every replica has every gradient: only the shards of tensor-parallel ranks
travel to owners, and a direction goes to all replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lading.cost.collective import collective_s
from lading.cost.kernels import adam_bytes, step_s
from lading.cost.matrix_updates import direction_s, eigen_share, precision_of
from lading.cost.patterns import Kind, Spread, spread
from lading.cost.topology import Group, group_of, group_of_ranks
from lading.ir.graph import DTYPE_BYTES
from lading.ir.layout import Layout
from lading.ir.machine import Device, Machine
from lading.ir.stack import Stack
from lading.optim.registry import default_rule
from lading.optim.rule import MatrixRule
from lading.parallel.block_matrices import BlockMatrix

#: All-to-alls in each direction (``groups`` of ``lading.optim.Muon``).
GROUPS = 4
#: Kernels of ``pre`` and ``post`` of one parameter: momentum, a step ahead, rounding; decay, moving; two copies.
_KERNELS = 7


@dataclass(frozen=True)
class Update:
    """A step of a matrix optimizer on the ranks that share a pipeline stage.

    Attributes:
        seconds: Seconds of the update.
        exposed_s: Seconds among these in which ranks wait for matrices that travel.
        directions: Spread of the matrices over owners.
        ranks: Number of ranks that share the matrices.
        matrices: Number of matrices.
        moved_bytes: Bytes that one rank receives, to owners and back.
        cut_elements: Elements of matrices on one rank whose states are sharded.
    """

    seconds: float
    exposed_s: float
    directions: Spread
    ranks: int
    matrices: int
    moved_bytes: float
    cut_elements: float

    @property
    def load_ratio(self) -> float:
        """Seconds of the owner with most work over the mean of all owners; 1 where work is even."""
        return self.directions.seconds / self.directions.mean_s

    @property
    def gap(self) -> float:
        """Share by which the busiest owner takes longer than the bound; 0.05 for 5%."""
        return max(0.0, self.directions.seconds / self.directions.bound_s - 1)


def update_of(
    matrices: Mapping[BlockMatrix, int],
    num_elements: float,
    rule: MatrixRule,
    layout: Layout,
    stack: Stack,
    machine: Machine,
) -> Update:
    """Price a step on the matrices of a pipeline rank ([Note: step of owners]).

    Args:
        matrices: Matrices of blocks, each as often as the rank has its block.
        num_elements: Number of their elements that one device updates.
    Raises:
        ConfigError: the machine has no rate or no link that it takes.
    """
    ranks = layout.devices // layout.pp
    directions = _spread(_kinds(matrices, rule, layout, stack, machine), ranks)
    ways = _ways_s(matrices, rule, layout, stack, machine)
    first, last, both = ways[0] / GROUPS, ways[1] / GROUPS, sum(ways) / GROUPS
    computed = directions.seconds / GROUPS
    exposed = first + last + (GROUPS - 1) * max(0.0, both - computed)
    elementwise_s = step_s(num_elements, _elementwise_bytes(rule, stack), machine.device)
    if machine.processes is not None:
        elementwise_s *= machine.processes.slower("memory-bound", layout.devices)
    number = sum(m.count * n for m, n in matrices.items())
    tensors = sum(n for (_, n) in {(m.name, n) for m, n in matrices.items()})
    launched = _KERNELS * tensors * stack.launch_s
    cut = num_elements * rule.cut_states
    seconds = directions.seconds + exposed + max(elementwise_s, launched)
    return Update(seconds, exposed, directions, ranks, number, _moved_bytes(matrices, rule, layout, stack), cut)


def matrix_s(rows: int, columns: int, rule: MatrixRule, stack: Stack, machine: Machine) -> float:
    """Seconds of the direction of one matrix, alone on its device; a product and its transpose are alike."""
    short, long = sorted((rows, columns))
    return direction_s(rule.work(short, long), short * long, machine.device, precision_of(rule), stack.launch_s)


def _kinds(
    matrices: Mapping[BlockMatrix, int], rule: MatrixRule, layout: Layout, stack: Stack, machine: Machine
) -> tuple[Kind, ...]:
    """Group equal matrices into kinds, the longest update first."""
    counts: dict[tuple[float, int], int] = {}
    shared = machine.processes
    slower = shared.slower("products", layout.devices) if shared is not None else 1.0
    for matrix, times in matrices.items():
        seconds = matrix_s(matrix.rows, matrix.columns, rule, stack, machine) * slower
        key = seconds, 4 * rule.state_elements(matrix.rows, matrix.columns)[1]
        counts[key] = counts.get(key, 0) + matrix.count * times
    return tuple(Kind(seconds, size, (), count) for (seconds, size), count in sorted(counts.items(), reverse=True))


@lru_cache(maxsize=4096)
def _spread(kinds: tuple[Kind, ...], ranks: int) -> Spread:
    """Spread matrices over owners; cached, as pipeline ranks and layouts often have the same matrices and ranks."""
    return spread(kinds, ranks)


def _elementwise_bytes(rule: MatrixRule, stack: Stack) -> float:
    """Bytes that ``pre`` and ``post`` touch for each element: those of Adam with its sharded states, and of sends."""
    cut_stack = replace(stack, moments=rule.cut_states)
    return adam_bytes(cut_stack) + 2 * _width(rule, stack)


def _width(rule: MatrixRule, stack: Stack) -> int:
    """Bytes of an element that travels."""
    return DTYPE_BYTES[rule.travels or stack.gradient_dtype]


def _group(layout: Layout, machine: Machine) -> Group:
    """Ranks of one pipeline stage."""
    if layout.pp == 1:
        return group_of(layout, "world", machine)
    return group_of_ranks(layout.devices // layout.pp, machine, devices=layout.devices)


def _ways_s(
    matrices: Mapping[BlockMatrix, int], rule: MatrixRule, layout: Layout, stack: Stack, machine: Machine
) -> tuple[float, float]:
    """Seconds to owners and seconds back if all matrices were one group, with the launches of all groups."""
    ranks = layout.devices // layout.pp
    if ranks == 1:
        return 0.0, 0.0
    group = _group(layout, machine)
    size = sum(m.elements * n for m, n in matrices.items()) * _width(rule, stack)
    part = size / ranks / GROUPS
    if layout.zero or layout.dp * layout.cp == 1:
        way = GROUPS * collective_s("all_to_all", part, group, machine)
        return way, way
    across_tp_s = (
        GROUPS * collective_s("all_to_all", part * (1 - 1 / layout.tp), group, machine) if layout.tp > 1 else 0.0
    )
    replicas = group_of(layout, "dp", machine)
    back = GROUPS * collective_s("all_gather", size / layout.tp / GROUPS, replicas, machine)
    return across_tp_s, back


def _moved_bytes(matrices: Mapping[BlockMatrix, int], rule: MatrixRule, layout: Layout, stack: Stack) -> float:
    """Bytes that one rank receives in a step: pieces of matrices that it owns, and directions of its own pieces."""
    ranks = layout.devices // layout.pp
    size = sum(m.elements * n for m, n in matrices.items()) * _width(rule, stack)
    if layout.zero or layout.dp * layout.cp == 1:
        return 2 * size / ranks * (1 - 1 / ranks)
    return size / ranks * (1 - 1 / layout.tp) + size / layout.tp * (1 - 1 / ranks)


def assumed_of_updates(name: str, rule: MatrixRule, parameters: Sequence[str], device: Device) -> tuple[str, ...]:
    """List what is assumed of an optimizer of whole matrices.

    Args:
        parameters: Parameters that are matrices, by name within their block.
    """
    sentences = [
        f"{name} moves {', '.join(parameters)} of every block, parts of fused ones and experts apart; "
        f"{type(default_rule()).__name__} the rest",
        f"{name}: owners among all ranks of a pipeline stage, {GROUPS} overlapping groups of all-to-alls; no such step "
        "was measured on a cluster",
    ]
    if rule.work(2, 2).eigen:
        sentences.append(f"{name}: decompositions reach {eigen_share(4096, device):.0%} of the fp32 peak")
    return tuple(sentences)
