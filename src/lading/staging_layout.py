"""Staging layout: what each rank copies to stage a checkpoint, where, and how many bytes that is.

The Trainer stages by it, and a plan counts by it, before there is a job. A rank stages the storages whose bytes lie in
memory in the order of their elements, of values that it is the first to have, or of its shards. The first rank gathers
the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from lading.checkpoint.staging import staged_bytes
from lading.ir.action import DEVICE
from lading.ir.graph import DTYPE_BYTES, StepGraph, Storage
from lading.ir.layout import Layout
from lading.ir.machine import MEMORY
from lading.ir.program import Program
from lading.memory.tier_layout import home_tiers
from lading.runtime.parameter_groups import GROUPS, most_bytes
from lading.runtime.value_layout import NumberedRank, Value, values_here, values_of, values_of_ranks
from lading.runtime.values import lies_in_order, named_tensors

#: Room for names of parameters that are in groups and that no step reads.
_UNREAD_NAMES_BYTES = 4096
#: Bytes of a value: (first of them, storage, first byte there, how many).
Run = tuple[int, int, int, int]


class RankOfJob(NumberedRank, Protocol):
    """Rank of a job, which knows the others'."""

    @property
    def rank(self) -> int:
        """Number of this one."""
        ...

    def first_of(self, number: int | None, over: str) -> int:
        """First rank of the job that has this number among those over some axes; of all without one."""
        ...


@dataclass(frozen=True)
class RankOfLayout:
    """Rank of a layout, whether or not a job runs in it."""

    layout: Layout
    rank: int

    def number(self, over: str) -> int:
        """Number of this one among the ranks that lie along some axes."""
        return _number(self.layout, self.rank, over)

    def first_of(self, number: int | None, over: str) -> int:
        """First rank of the layout that has this number among those over some axes; of all without one."""
        ranks = range(self.layout.devices)
        return next(rank for rank in ranks if _number(self.layout, rank, over) == (number or 0))


@cache
def _number(layout: Layout, rank: int, over: str) -> int:
    return layout.group(rank, over).index(rank)


@dataclass(frozen=True)
class StagingLayout:
    """Contents of one rank's staging memory.

    Attributes:
        places: First byte of each storage that is copied there.
        runs: Runs of values by name: (first byte of the value, first byte here, bytes).
        gathered: First byte of each tensor that is gathered first, by name.
        size_bytes: Bytes of all.
    """

    places: Mapping[int, int]
    runs: Mapping[str, Sequence[tuple[int, int, int]]]
    gathered: Mapping[str, int]
    size_bytes: int

    @staticmethod
    def of(
        storages: Sequence[Storage], runs: Mapping[str, list[Run]], gathered: Iterable[tuple[str, int]]
    ) -> StagingLayout:
        """Lay out what a rank stages.

        Args:
            gathered: Names and bytes of the tensors that it gathers.
        """
        places, starts, end = dict[int, int](), dict[str, int](), 0
        for storage in dict.fromkeys(storage for name_runs in runs.values() for _, storage, _, _ in name_runs):
            places[storage], end = end, end + staged_bytes(storages[storage].size_bytes)
        for name, size in gathered:
            starts[name], end = end, end + staged_bytes(size)
        laid = {
            name: [(at, places[s] + start, size) for at, s, start, size in name_runs]
            for name, name_runs in runs.items()
        }
        return StagingLayout(places, laid, starts, end)


def staged_runs(
    values: Mapping[str, Value],
    storages: Sequence[Storage],
    can_stage: Callable[[int], bool],
    rank: RankOfJob | None,
) -> tuple[dict[str, list[Run]], list[str]]:
    """Find what a rank stages: runs of bytes of values by name, and the values that have to be gathered.

    Args:
        can_stage: Whether a storage's bytes lie in memory in the order of its elements.
        rank: The rank; None alone.
    """
    runs, gathered = dict[str, list[Run]](), list[str]()
    for name, value in values.items():
        if not _stages(value, rank):
            continue
        value_runs = _runs_of(value, storages, rank)
        if value_runs is None or not all(can_stage(storage) for _, storage, _, _ in value_runs):
            gathered.append(name)
        else:
            runs[name] = value_runs
    return runs, gathered


def _stages(value: Value, rank: RankOfJob | None) -> bool:
    """Whether a rank is the first that has a value, or this shard of it."""
    if rank is None:
        return True
    if not is_spread(value):
        return rank.rank == 0
    if value.owner is not None:
        return rank.first_of(value.owner, value.owners) == rank.rank
    return rank.first_of(rank.number(value.over), value.over) == rank.rank


def _runs_of(value: Value, storages: Sequence[Storage], rank: RankOfJob | None) -> list[Run] | None:
    """Runs of bytes of a value that lie in a rank's storages; None where that is not how it lies."""
    if value.placement is not None or (value.owner is not None and value.ranks > 1):
        return None
    item, runs = DTYPE_BYTES[value.dtype], list[Run]()
    sizes = [storages[storage].size_bytes for storage in value.storages]
    if value.start is None and sum(sizes) != value.size_bytes:
        return None
    first = (value.start or 0) * item
    begin = 0
    if value.ranks > 1:
        assert rank is not None, "a plan for one process has no shards"
        begin = rank.number(value.over) * sum(sizes)
    for storage, size in zip(value.storages, sizes, strict=True):
        low, high = max(begin, first), min(begin + size, first + value.size_bytes)
        if low < high:
            runs.append((low - first, storage, low - begin, high - low))
        begin += size
    return runs


def is_spread(value: Value) -> bool:
    """Whether ranks have a value in parts that are runs of its bytes, or one of them has all of it."""
    if value.placement is not None:
        return False
    return (value.owner is not None) != (value.ranks > 1)


def planned_staging_bytes(
    programs: Sequence[Program], layout: Layout, beside: Sequence[tuple[str, int]], *, is_one_host: bool = True
) -> list[int]:
    """Bytes that each rank of a layout will stage a checkpoint in, in order.

    Args:
        programs: Program of each rank along a pipeline; one for all ranks without.
        beside: Names and bytes of the tensors that a checkpoint has beside the values.
        is_one_host: Whether the ranks share a host; if not, the first one gathers what is spread over them, too.
    """
    graphs = [program.graph for program in programs]
    values_by_stage = [
        values_of_ranks(graphs, n) if len(graphs) > 1 else values_of(graphs[0]) for n in range(len(graphs))
    ]
    staged_storages = [_storages_to_stage(program) for program in programs]
    rows = list[tuple[Program, dict[str, list[Run]], list[str]]]()
    for number in range(layout.devices):
        rank = None if layout.devices == 1 else RankOfLayout(layout, number)
        stage = layout.place(number)["pp"]
        values, program = values_here(values_by_stage[stage], rank), programs[stage]
        rows.append((program, *staged_runs(values, program.graph.storages, staged_storages[stage].__contains__, rank)))
    values = values_here(values_by_stage[0], None if layout.devices == 1 else RankOfLayout(layout, 0))
    spread = [] if is_one_host else [name for name, value in values.items() if is_spread(value)]
    gathered = dict.fromkeys([*(name for _, _, names in rows for name in names), *spread])
    sizes = [*((name, values[name].size_bytes) for name in gathered), *beside]
    staging_bytes = list[int]()
    for program, runs, _ in rows:
        mine = {name: name_runs for name, name_runs in runs.items() if name not in gathered}
        staging_bytes.append(StagingLayout.of(program.graph.storages, mine, [] if staging_bytes else sizes).size_bytes)
    return staging_bytes


def _storages_to_stage(program: Program) -> set[int]:
    """Storages whose bytes lie in memory between steps, in the order of their elements."""
    in_memory = {DEVICE, *(tier.name for tier in program.tiers if tier.kind == MEMORY)}
    graph, views = program.graph, named_tensors(program.graph)
    return {s for s, tier in home_tiers(program).items() if tier in in_memory and lies_in_order(graph, views, s)}


def saved_beside(captured: StepGraph, optimizer: torch.optim.Optimizer | None = None) -> list[tuple[str, int]]:
    """Names and bytes of what a checkpoint has beside values.

    They are the generator's state, the names of what is frozen, and numbers of groups.

    Args:
        optimizer: Optimizer of torch whose groups are saved; None for a rule of Lading.
    """
    frozen = [p.names[0] for p in captured.parameters if p.gradient is None]
    names = (name for p in captured.parameters for name in p.names)
    groups = (
        [] if optimizer is None else [(GROUPS, most_bytes(names, len(optimizer.param_groups)) + _UNREAD_NAMES_BYTES)]
    )
    return [("random", torch.get_rng_state().numel()), ("frozen", len("\n".join(frozen).encode())), *groups]
