"""Shares: what blocks of a search have in common: pipelines, how many micro-batches run in them, what ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lading.errors import ConfigError
from lading.planner.exchanges import least_bytes, watched_segments
from lading.planner.pipes import Bools, PipeTable, alive_of, pipe_table, valid
from lading.planner.prefilter import Prefilter
from lading.planner.space import LayoutBlock, Mesh, Space
from lading.planner.stages import Floats, Ints, StageRows
from lading.sim.phases import Phases


@dataclass(frozen=True, eq=False)
class Share:
    """Of blocks with as many ranks inside a stage and the same micro-batch, by pipe.

    Attributes:
        good: Which can be, experts apart.
        alive: Of ``alive_of``.
        kept: (pipe, watched rank, segment): how many are alive.
    """

    good: Bools
    micro_batches: Floats
    alive: tuple[Floats, Ints]
    kept: Floats


@dataclass
class Shares:
    """Computed when they are first asked for."""

    space: Space
    _tables: dict[bool, PipeTable] = field(default_factory=lambda: {})
    _prefilters: dict[bool, Prefilter] = field(default_factory=lambda: {})
    _shares: dict[tuple[int, int, bool], Share] = field(default_factory=lambda: {})
    _least: dict[Mesh, Floats] = field(default_factory=lambda: {})
    _counts: dict[tuple[int, int, int, int], int] = field(default_factory=lambda: {})

    @cached_property
    def rows(self) -> StageRows:
        """Stages of all pipes."""
        return StageRows(self.space.request, self.space.table)

    @cached_property
    def watched(self) -> Floats:
        """What watched ranks of each pipeline shape hold."""
        return watched_segments(self.table(self.space.modes()[0]), self.rows)

    def partial(self, mode: str) -> bool:
        """Whether only some layers of a chunk may be recomputed."""
        return mode == "full" or "recompute_layers" in self.space.asked.pins

    def table(self, mode: str) -> PipeTable:
        """Pipes of a recompute mode.

        Raises:
            ConfigError: there is none.
        """
        partial = self.partial(mode)
        if partial not in self._tables:
            pipes = self.space.pipes(partial=partial)
            if not pipes:
                raise ConfigError(
                    f"expected a pipeline that {self.space.asked.devices} devices, {self.space.layers} layers and the "
                    "pins allow, found none; change pp, vpp, schedule or recompute_layers"
                )
            self._tables[partial] = pipe_table(pipes, self.rows)
        return self._tables[partial]

    def prefilter(self, mode: str) -> Prefilter:
        """Of the pipes of a recompute mode; stages of all modes must have been laid out."""
        partial = self.partial(mode)
        if partial not in self._prefilters:
            self._prefilters[partial] = Prefilter.of(self.table(mode), self.rows.arrays()[2])
        return self._prefilters[partial]

    def share(self, block: LayoutBlock, mode: str) -> Share:
        """What a block has in common with others."""
        key = (block.mesh.tp * block.mesh.cp, block.micro_batch, self.partial(mode))
        if key not in self._shares:
            table, stack = self.table(mode), self.space.request.stack
            replicas = self.space.asked.devices / key[0] / table.pp
            micro_batches = self.space.asked.global_batch / (replicas * block.micro_batch)
            good = valid(table, replicas, micro_batches, stack)
            if "dp" in self.space.asked.pins:
                good &= replicas == self.space.asked.pins["dp"]
            alive = alive_of(table, np.maximum(1.0, micro_batches), stack)
            self._shares[key] = Share(good, micro_batches, alive, self.prefilter(mode).kept(alive[0]))
        return self._shares[key]

    def good(self, block: LayoutBlock, mode: str) -> Bools:
        """Which pipes a block can have."""
        ranks = self.space.asked.devices / self.table(mode).pp
        return self.share(block, mode).good & (np.mod(ranks, block.mesh.expert_ways) == 0)

    def least_bytes(self, block: LayoutBlock, segments: Sequence[Phases], elements: Floats) -> Floats:
        """(pipeline shape, watched rank): least bytes of states; arguments as ``exchanges.least_bytes``."""
        if block.mesh not in self._least:
            table = self.table(self.space.modes()[0])
            self._least[block.mesh] = least_bytes(self.space, block, self.watched, table, segments, elements)
        return self._least[block.mesh]

    def count(self, block: LayoutBlock) -> int:
        """Layouts of a block."""
        mesh = block.mesh
        key = (mesh.tp, mesh.cp, mesh.expert_ways, block.micro_batch)
        if key not in self._counts:
            ranks, total = self.space.asked.devices // (mesh.tp * mesh.cp), 0
            for mode in self.space.modes():
                table, good = self.table(mode), self.good(block, mode)
                ways = np.unique(np.where(table.flat, 0, table.pp)[good], return_counts=True)
                for pp, count in zip(*(part.tolist() for part in ways), strict=True):
                    total += count * len(self.space.cuts(ranks // max(1, pp) * mesh.cp, 2 if pp else 1))
            self._counts[key] = total
        return self._counts[key]
