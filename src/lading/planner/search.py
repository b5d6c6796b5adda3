"""Search: every block of a space priced once, and all its layouts bounded.

Blocks come in the order of the least that any layout of them can take (``_ideal_s``), so that those which cannot be
among the wanted are counted and never looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from lading.errors import ConfigError
from lading.ir.layout import Layout
from lading.ir.request import Request
from lading.planner.bounds import Rows, peak_bounds, priced_block, step_bounds
from lading.planner.exchanges import Exchanges, exchanges
from lading.planner.pipes import Bools, PipeTable, pipe_table, valid, watched_rows
from lading.planner.space import Ask, Block, Cut, Mesh, Pipe, Space, divisors
from lading.planner.stages import Floats, Ints, StageRows
from lading.sim.noise import waiting_share
from lading.sim.phases import Phases
from lading.sim.prices import MachinePrices
from lading.sim.simulate import Priced as Segments
from lading.sim.simulate import segments_by_mode
from lading.sim.step import stage_of

#: Layouts of one block and mode that are kept by name; the next one's bound is kept for the rest.
_KEPT = 256
#: Blocks whose least step is so many times the slowest wanted are not looked into.
_SLACK = 1.25
#: What rounding may add to a bound.
_ROUNDING = 1 - 1e-9
Tell = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Bounded:
    """A layout with its bounds."""

    step_s: float
    peak_bytes: float
    block: Block
    mode: str
    pipe: Pipe
    cut: Cut


@dataclass
class Search:
    """One search: what its blocks share, and the prices of each.

    Attributes:
        counted: Layouts of the space that can be; ``evaluated``: of them, those bounded one by one.
        rest_s: No layout that is left out of ``fitting()`` and may fit is faster.
        refused: Why blocks cannot be, with how many.
        lightest: The layout that needs least memory, of those looked into.
    """

    ask: Ask
    counted: int = 0
    evaluated: int = 0
    rest_s: float = float("inf")
    refused: dict[str, int] = field(default_factory=lambda: {})
    lightest: Bounded | None = None
    _segments: dict[Block, dict[str, tuple[Phases, ...]]] = field(default_factory=lambda: {})
    _exchanges: dict[Mesh, Exchanges] = field(default_factory=lambda: {})
    _tables: dict[bool, PipeTable] = field(default_factory=lambda: {})
    _kept: dict[bool, list[tuple[Block, str, Floats]]] = field(default_factory=lambda: {True: [], False: []})
    _best: Floats = field(default_factory=lambda: np.zeros(0))

    @cached_property
    def space(self) -> Space:
        """What is searched."""
        return Space(self.ask)

    @cached_property
    def rows(self) -> StageRows:
        """Stages of all pipes."""
        return StageRows(self.ask.request, self.ask.table)

    def table(self, mode: str) -> PipeTable:
        """Pipes of a recompute mode.

        Raises:
            ConfigError: there is none.
        """
        partial = mode == "full" or "recompute_layers" in self.ask.pins
        if partial not in self._tables:
            pipes = self.space.pipes(partial=partial)
            if not pipes:
                raise ConfigError(
                    f"expected a pipeline that {self.ask.devices} devices, {self.space.layers} layers and the pins "
                    "allow, found none; change pp, vpp, schedule or recompute_layers"
                )
            self._tables[partial] = pipe_table(pipes, self.rows)
        return self._tables[partial]

    def request(self, layout: Layout) -> Request:
        """What is asked, for a layout."""
        return replace(self.ask.request, layout=layout)

    def layout(self, found: Bounded) -> Layout:
        """Of a bounded layout."""
        return self.space.layout(found.block, found.mode, found.pipe, found.cut)

    def segments(self, found: Bounded) -> Segments:
        """Of a bounded layout, for ``simulate``."""
        return Segments(self.ask.machine, self.ask.table, self._segments[found.block][found.mode])

    def fitting(self) -> Iterator[Bounded]:
        """Layouts that may fit, by their bounds."""
        return self._named(fits=True)

    def over(self) -> Iterator[Bounded]:
        """Layouts that cannot fit, by their bounds."""
        return self._named(fits=False)

    def run(self, budget_bytes: float, tell: Tell) -> None:
        """Bound every layout of the space.

        Args:
            budget_bytes: Of the tensors of a device.
            tell: Called with what is done, of how many, and what it is.
        Raises:
            ConfigError: no block can be; the message is that of most.
        """
        modes = self.space.modes()
        for mode in modes:
            self.table(mode)
        order = self._priced(modes, tell)
        if not order:
            why = max(self.refused.items(), key=lambda row: row[1])[0] if self.refused else "no degree divides"
            raise ConfigError(f"no layout of {self.ask.devices} devices can be: {why}")
        stages = self.rows.arrays()
        for number, (ideal_s, block) in enumerate(order):
            tell(number, len(order), "layouts bounded")
            for mode in modes:
                good, micro_batches = self._good(block, mode)
                rows = self._rows(block, mode, good, micro_batches)
                self.counted += len(rows.pipe)
                if len(self._best) >= self.ask.top and ideal_s > _SLACK * self._best[-1]:
                    self.rest_s = min(self.rest_s, ideal_s)
                elif len(rows.pipe):
                    segments = self._segments[block][mode]
                    self._bound(block, mode, rows, (segments, stages), budget_bytes)

    def _priced(self, modes: list[str], tell: Tell) -> list[tuple[float, Block]]:
        """All blocks that can be, with the least seconds of a step of any layout of them, the least first."""
        blocks = [block for mesh in self.space.meshes() for block in self.space.blocks(mesh)]
        order: list[tuple[float, Block]] = []
        for number, block in enumerate(blocks):
            tell(number, len(blocks), "blocks priced")
            try:
                prices = self._prices(block)
                request = self.request(prices.layout)
                found = segments_by_mode(request, self.ask.table, prices, modes)
            except ConfigError as error:
                self.refused[str(error)] = self.refused.get(str(error), 0) + 1
                continue
            self._segments[block] = found
            order.append((self._ideal_s(block, prices, found[modes[0]]), block))
        return sorted(order)

    def _ideal_s(self, block: Block, prices: MachinePrices, segments: tuple[Phases, ...]) -> float:
        """Least seconds of a step of a block: all its work without recompute, spread evenly and never waiting."""
        stage = stage_of(list(enumerate(self.ask.table.counts)), segments[len(segments) // 2 :], prices, prices.stack)
        work = stage.forward.seconds + stage.backward_s
        ranks = self.ask.devices / (block.mesh.tp * block.mesh.cp)
        least = self.ask.global_batch / block.micro_batch / ranks * work
        return least * (1 + waiting_share(self.ask.devices, every_block=False)) * _ROUNDING

    def _prices(self, block: Block, pp: int = 1) -> MachinePrices:
        """Prices of a block over all devices, in a pipeline of some length."""
        plain = self.space.layout(block, "none", Pipe(pp, 1, "1f1b", -1), Cut(0, 0), global_batch=0)
        layout = replace(plain, recompute_modules=self.ask.pins.get("recompute_modules", ()))
        return MachinePrices(self.ask.machine, layout, self.ask.request.stack, self.ask.table.symbols.get("a", 1))

    def _good(self, block: Block, mode: str) -> tuple[Bools, Floats]:
        """Which pipes a block can have, and the micro-batches of each."""
        table, mesh, ask = self.table(mode), block.mesh, self.ask
        replicas = ask.devices / (mesh.tp * mesh.cp) / table.pp
        micro_batches = ask.global_batch / (replicas * block.micro_batch)
        good = valid(table, replicas, micro_batches, ask.request.stack)
        good &= np.mod(replicas * mesh.tp * mesh.cp, mesh.expert_ways) == 0
        if "dp" in ask.pins:
            good &= replicas == ask.pins["dp"]
        return good, micro_batches

    def _rows(self, block: Block, mode: str, good: Bools, micro_batches: Floats) -> Rows:
        if block.mesh not in self._exchanges:
            table = self.table(self.space.modes()[0])
            segments = self._segments[block][self.space.modes()[0]]
            watched = watched_rows(table, self.rows)
            self._exchanges[block.mesh] = exchanges(self.space, block, watched, table, segments)
        found = self._exchanges[block.mesh]
        return Rows(self.table(mode), found, micro_batches, *found.rows(self.table(mode), good))

    def _bound(
        self, block: Block, mode: str, rows: Rows, of: tuple[tuple[Phases, ...], tuple[Ints, Floats]], budget: float
    ) -> None:
        """Bound the layouts of a block, and keep the best."""
        segments, stages = of
        ask, prices = self.ask, self._prices(block)
        ways = next((n for n in divisors(prices.layout.dp) if n > 1), 1)
        priced = priced_block(segments, stages, ask.table.counts, (prices, self._prices(block, ways)))
        steps = step_bounds(rows, priced, ask.request.stack, ask.devices) * _ROUNDING
        peaks = peak_bounds(rows, priced, ask.request.stack) * _ROUNDING
        self.evaluated += len(steps)
        fits = peaks <= budget
        self._lighter(block, mode, rows, steps, peaks)
        for kind, most in ((True, _KEPT), (False, 2)):
            places = np.flatnonzero(fits == kind)
            if len(places) > most:
                order = np.argpartition(steps[places], most)
                if kind:
                    self.rest_s = min(self.rest_s, float(steps[places[order[most]]]))
                places = places[order[:most]]
            if len(places):
                columns: list[Any] = [steps[places], peaks[places], rows.pipe[places], rows.number[places]]
                kept: Floats = np.stack(columns, axis=1).astype(np.float64)
                self._kept[kind].append((block, mode, kept))
                if kind:
                    self._best = np.sort(np.append(self._best, steps[places]))[: ask.top]

    def _lighter(self, block: Block, mode: str, rows: Rows, steps: Floats, peaks: Floats) -> None:
        place = int(np.argmin(peaks))
        if self.lightest is None or peaks[place] < self.lightest.peak_bytes:
            pipe, number = int(rows.pipe[place]), int(rows.number[place])
            self.lightest = Bounded(
                float(steps[place]), float(peaks[place]), block, mode, rows.table.pipes[pipe], rows.found.cuts[number]
            )

    def _named(self, *, fits: bool) -> Iterator[Bounded]:
        parts = self._kept[fits]
        if not parts:
            return
        every = np.concatenate([kept for _, _, kept in parts])
        part = np.repeat(np.arange(len(parts)), [len(kept) for _, _, kept in parts])
        for place in np.lexsort((every[:, 3], every[:, 2], part, every[:, 0])).tolist():
            block, mode, _ = parts[part[place]]
            step_s, peak, pipe, number = every[place].tolist()
            cut = self._exchanges[block.mesh].cuts[int(number)]
            yield Bounded(step_s, peak, block, mode, self.table(mode).pipes[int(pipe)], cut)
