"""Search: what the blocks of a space cost, and the bounds of all layouts of a block.

[Note: three bounds]
What has the least bound is looked into next. Of a family of blocks, which differ in the micro-batch and in the ways of
expert parallel only (none is a family of its own), the one with most of both is priced: more tokens at once, and fewer
experts a rank, make products no slower but for the unevenness of their tiles, so its seconds without what the experts'
ranks send, less a margin, are a bound for the others (tests compare). A priced block takes at least all its work
without recompute, spread evenly and never waiting. An opened one has a bound for each layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from lading.errors import ConfigError
from lading.ir.layout import Layout
from lading.ir.request import Request
from lading.planner.bounds import HIDDEN, Rows, peak_bounds, priced_block, step_bounds
from lading.planner.exchanges import Exchanges, Known, exchanges
from lading.planner.pipes import Bools, PipeTable, alive_of, pipe_table, valid, watched_rows
from lading.planner.space import Ask, Block, Cut, Mesh, Pipe, Space, divisors
from lading.planner.stages import Floats, Ints, StageRows
from lading.sim.noise import waiting_share
from lading.sim.phases import Phases
from lading.sim.prices import MachinePrices
from lading.sim.simulate import Priced as Segments
from lading.sim.simulate import segments_by_mode
from lading.sim.step import stage_of

#: What rounding may add to a bound, and the unevenness of tiles to that of a family.
_ROUNDING, _UNEVEN = 1 - 1e-9, 0.97
#: Layouts that do not fit are shown if they are no more than so many times over.
_NEARLY = 1.3
Tell = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Bounded:
    """A layout with its bounds; ``span_s`` is that of its pipeline alone."""

    step_s: float
    span_s: float
    peak_bytes: float
    block: Block
    mode: str
    pipe: Pipe
    cut: Cut


@dataclass(frozen=True, slots=True)
class Family:
    """Blocks with one bound; the last is its leader, or the family is that block alone."""

    blocks: tuple[Block, ...]

    @property
    def is_many(self) -> bool:
        """Whether it can be divided."""
        return len(self.blocks) > 1


@dataclass
class Search:
    """One search: what its blocks share, and the prices of each.

    Attributes:
        counted: Layouts of the space that can be; ``evaluated``: of them, those bounded one by one.
        refused: Why blocks cannot be, with how many.
        over: The fastest of each block opened that are a little too large.
    """

    ask: Ask
    counted: int = 0
    evaluated: int = 0
    refused: dict[str, int] = field(default_factory=lambda: {})
    over: list[Bounded] = field(default_factory=lambda: [])
    _segments: dict[Block, dict[str, tuple[Phases, ...]]] = field(default_factory=lambda: {})
    _exchanges: dict[Mesh, Exchanges] = field(default_factory=lambda: {})
    _tables: dict[bool, PipeTable] = field(default_factory=lambda: {})
    _known: Known = field(default_factory=lambda: {})
    _counts: dict[tuple[int, int, int, int], int] = field(default_factory=lambda: {})
    _alive: dict[tuple[int, int, bool], tuple[Floats, Ints]] = field(default_factory=lambda: {})

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

    def families(self, tell: Tell) -> Iterator[tuple[float, Family]]:
        """All blocks that can be in families, with a bound of each ([Note: three bounds]).

        Raises:
            ConfigError: no block can be; the message is that of most.
        """
        for mode in self.space.modes():
            self.table(mode)
        families: dict[tuple[object, ...], list[Block]] = {}
        for mesh in self.space.meshes():
            for block in self.space.blocks(mesh):
                key = (mesh.tp, mesh.cp, mesh.etp, mesh.ep > 1, block.sp, block.cp_comm)
                families.setdefault(key, []).append(block)
        found = False
        for number, blocks in enumerate(families.values()):
            tell(number, len(families), "blocks priced")
            family = Family(tuple(sorted(blocks, key=lambda block: (block.micro_batch, block.mesh.ep))))
            bound_s = self._family_s(family)
            if bound_s is not None:
                found = True
                self.counted += sum(map(self._count, blocks))
                yield bound_s, family
        if not found:
            raise ConfigError(self.none_can_be())

    def none_can_be(self) -> str:
        """Why there is no layout: the reason of most blocks, or that numbers do not divide."""
        ask = self.ask
        pins = ", ".join(f"{key}={value}" for key, value in sorted(ask.pins.items()))
        each = "tp x cp x pp x dp = devices, dp x micro-batch that divides the batch, shard that divides dp x cp"
        why = f"expected {each}, and no more stages pp x vpp than layers"
        if self.refused and not self.counted:
            why = max(self.refused.items(), key=lambda row: row[1])[0]
        return (
            f"no layout of {ask.devices:,} devices with a global batch of {ask.global_batch:,}"
            + (f" and {pins} pinned" if pins else "")
            + f" can be: {why}"
        )

    def divided(self, family: Family) -> list[Family]:
        """Smaller families of one: by micro-batch, then block by block."""
        batches = dict.fromkeys(block.micro_batch for block in family.blocks)
        if len(batches) > 1:
            return [Family(tuple(b for b in family.blocks if b.micro_batch == batch)) for batch in batches]
        return [Family((block,)) for block in family.blocks]

    def bound_of(self, family: Family) -> float | None:
        """Least seconds of a step of any block of a family; None if they cannot be."""
        bound_s = self._family_s(family)
        if bound_s is None:
            self.counted -= sum(map(self._count, family.blocks))
        return bound_s

    def _family_s(self, family: Family) -> float | None:
        """Least seconds of a step of any block of a family; None if its leader cannot be."""
        leader = family.blocks[-1]
        try:
            prices = self._price(leader, self.space.modes()[:1])
        except ConfigError as error:
            self.refused[str(error)] = self.refused.get(str(error), 0) + len(family.blocks)
            return None
        segments = self._segments[leader][self.space.modes()[0]]
        plain = segments[len(segments) // 2 :]
        if len(family.blocks) == 1:
            return self._ideal_s(leader, prices, plain)
        free = [_without(phases, "ep") for phases in plain]
        return self._ideal_s(leader, prices, free) * _UNEVEN

    def opened(self, block: Block) -> list[tuple[float, str]]:
        """(bound, mode) of a block, which is priced if it is not."""
        prices = self._price(block, self.space.modes())
        found: list[tuple[float, str]] = []
        for mode, segments in self._segments[block].items():
            plain = len(segments) // 2
            partial = mode == "full" or "recompute_layers" in self.ask.pins
            found.append((self._ideal_s(block, prices, segments[plain if partial else 0 :]), mode))
        return found

    def _price(self, block: Block, modes: Sequence[str]) -> MachinePrices:
        prices, known = self._prices(block), self._segments.setdefault(block, {})
        if missing := [mode for mode in modes if mode not in known]:
            known.update(segments_by_mode(self.request(prices.layout), self.ask.table, prices, missing))
        return prices

    def _ideal_s(self, block: Block, prices: MachinePrices, segments: Sequence[Phases]) -> float:
        """Least seconds of a step of a block: all its work spread evenly and never waiting.

        Args:
            segments: Of which the model's are the first.
        """
        stage = stage_of(list(enumerate(self.ask.table.counts)), segments, prices, prices.stack)
        ranks = self.ask.devices / (block.mesh.tp * block.mesh.cp)
        least = self.ask.global_batch / block.micro_batch / ranks * (stage.forward.seconds + stage.backward_s)
        return (
            least
            * (1 + waiting_share(self.ask.devices, every_block=False))
            * (HIDDEN if prices.stack.hidden else _ROUNDING)
        )

    def _count(self, block: Block) -> int:
        """Layouts of a block."""
        mesh = block.mesh
        key = (mesh.tp, mesh.cp, mesh.expert_ways, block.micro_batch)
        if key not in self._counts:
            ranks, total = self.ask.devices // (mesh.tp * mesh.cp), 0
            for mode in self.space.modes():
                table, (good, _) = self.table(mode), self._good(block, mode)
                ways = np.unique(np.where(table.flat, 0, table.pp)[good], return_counts=True)
                for pp, count in zip(*(part.tolist() for part in ways), strict=True):
                    total += count * len(self.space.cuts(ranks // max(1, pp) * mesh.cp, 2 if pp else 1))
            self._counts[key] = total
        return self._counts[key]

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

    def _rows(self, block: Block, mode: str) -> Rows:
        if block.mesh not in self._exchanges:
            table = self.table(self.space.modes()[0])
            segments = self._segments[block][self.space.modes()[0]]
            watched = watched_rows(table, self.rows)
            self._exchanges[block.mesh] = exchanges(self.space, block, watched, table, segments, self._known)
        found, table = self._exchanges[block.mesh], self.table(mode)
        good, micro_batches = self._good(block, mode)
        key = (block.mesh.tp * block.mesh.cp, block.micro_batch, table is self._tables.get(True))
        if key not in self._alive:
            self._alive[key] = alive_of(table, np.maximum(1.0, micro_batches), self.ask.request.stack)
        return Rows(table, found, micro_batches, self._alive[key], *found.rows(table, good))

    def bounded(self, block: Block, mode: str, budget_bytes: float) -> Iterator[Bounded]:
        """Layouts of a block that may fit, by their bounds.

        Args:
            budget_bytes: Of the tensors of a device.
        """
        found = self._bounds(block, mode)
        if found is None:
            return
        steps, peaks = found.steps, found.peaks
        self.evaluated += len(steps)
        nearly = np.flatnonzero((peaks > budget_bytes) & (peaks <= _NEARLY * budget_bytes))
        if len(nearly):
            self.over.append(found.at(int(nearly[np.argmin(steps[nearly])])))
        places = np.flatnonzero(peaks <= budget_bytes)
        order: list[int] = places[np.argsort(steps[places], kind="stable")].tolist()
        yield from map(found.at, order)

    def lightest(self, most: int) -> list[Bounded]:
        """The layouts of the space that need least memory as bounded, lightest first, the faster of equal ones first.

        Args:
            most: How many.
        """
        found: list[Bounded] = []
        for block in (block for mesh in self.space.meshes() for block in self.space.blocks(mesh)):
            try:
                modes = [mode for _, mode in self.opened(block)]
            except ConfigError:  # a block that cannot be; the search has counted it
                continue
            for bounds in filter(None, (self._bounds(block, mode) for mode in modes)):
                first = np.lexsort((bounds.steps, bounds.peaks))[:most].tolist()
                found += map(bounds.at, first)
            found.sort(key=_memory_first)
            del found[most:]
        return found

    def _bounds(self, block: Block, mode: str) -> _BlockBounds | None:
        """Of all layouts of a block; None if there is none."""
        rows = self._rows(block, mode)
        if not len(rows.pipe):
            return None
        ask, prices = self.ask, self._prices(block)
        ways = next((n for n in divisors(prices.layout.dp) if n > 1), 1)
        alone = replace(block, mesh=replace(block.mesh, ep=1, etp=0))  # sends do not depend on experts
        both = (prices, self._prices(alone, ways))
        priced = priced_block(self._segments[block][mode], self.rows.arrays(), ask.table.counts, both)
        steps, spans = step_bounds(rows, priced, ask.request.stack, ask.devices)
        peaks = peak_bounds(rows, priced)
        return _BlockBounds(block, mode, rows, steps * _ROUNDING, spans * _ROUNDING, peaks * _ROUNDING)


@dataclass(frozen=True, eq=False)
class _BlockBounds:
    """Bounds of the layouts of a block in one recompute mode, each an array over ``rows``."""

    block: Block
    mode: str
    rows: Rows
    steps: Floats
    spans: Floats
    peaks: Floats

    def at(self, place: int) -> Bounded:
        """One of them."""
        rows = self.rows
        pipe, cut = rows.table.pipes[int(rows.pipe[place])], rows.found.cuts[int(rows.number[place])]
        bounds = float(self.steps[place]), float(self.spans[place]), float(self.peaks[place])
        return Bounded(*bounds, self.block, self.mode, pipe, cut)


def _memory_first(found: Bounded) -> tuple[float, float]:
    return found.peak_bytes, found.step_s


def _without(phases: Phases, axis: str) -> Phases:
    """A segment whose collectives of an axis cost nothing."""
    names = ("forward", "again", "backward_input", "backward_weight")
    parts = {name: getattr(phases, name) for name in names}
    free = {
        name: replace(part, comm_s={key: s for key, s in part.comm_s.items() if key != axis})
        for name, part in parts.items()
    }
    return replace(phases, **free)
