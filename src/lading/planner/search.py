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
from math import inf
from operator import add

import numpy as np

from lading.errors import ConfigError
from lading.ir.graph import Role
from lading.ir.layout import Layout
from lading.ir.request import Request
from lading.planner.bounds import HIDDEN, Rows, peak_bounds, priced_block, step_bounds
from lading.planner.exchanges import Exchanges, Known, exchanges
from lading.planner.pipes import Bools
from lading.planner.shares import Shares
from lading.planner.sieve import Sieved
from lading.planner.space import Ask, Block, Cut, Mesh, Pipe, Space, divisors
from lading.planner.stages import Floats, features_of
from lading.sim.noise import waiting_share
from lading.sim.phases import Phases
from lading.sim.pipeline import PipelineRun
from lading.sim.prices import MachinePrices
from lading.sim.simulate import Priced as Segments
from lading.sim.simulate import Simulated, segments_by_mode
from lading.sim.step import stage_of

#: What rounding may add to a bound, and the unevenness of tiles to that of a family.
_ROUNDING, _UNEVEN = 1 - 1e-9, 0.97
#: Layouts that do not fit are shown if they are no more than so many times over.
_NEARLY = 1.3
Tell = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Bounded:
    """A layout with its bounds; ``span_s`` is that of its pipeline alone, ``states`` the bytes of its watched ranks."""

    step_s: float
    span_s: float
    peak_bytes: float
    block: Block
    mode: str
    pipe: Pipe
    cut: Cut
    states: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Opened:
    """A block in a recompute mode, priced, and what is known of its pipes; ``bound_s``: of a step of any of these."""

    bound_s: float
    block: Block
    mode: str
    sieved: Sieved


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
    _known: Known = field(default_factory=lambda: {})
    _runs: dict[tuple[Block, str, Pipe], PipelineRun] = field(default_factory=lambda: {})
    _kept: dict[tuple[Block, str, Pipe], tuple[int, ...]] = field(default_factory=lambda: {})
    _out: list[Opened] = field(default_factory=lambda: [])

    @cached_property
    def shares(self) -> Shares:
        """What blocks have in common."""
        return Shares(self.ask)

    @property
    def space(self) -> Space:
        """What is searched."""
        return self.shares.space

    def request(self, layout: Layout) -> Request:
        """What is asked, for a layout."""
        return replace(self.ask.request, layout=layout)

    def layout(self, found: Bounded) -> Layout:
        """Of a bounded layout."""
        return self.space.layout(found.block, found.mode, found.pipe, found.cut)

    def segments(self, found: Bounded) -> Segments:
        """Of a bounded layout, for ``simulate``."""
        run = self._runs.get((found.block, found.mode, found.pipe))
        return Segments(self.ask.machine, self.ask.table, self._segments[found.block][found.mode], run)

    def span_s(self, found: Bounded) -> float | None:
        """Seconds of a layout's pipeline; None if none was simulated that differs in who keeps which states only."""
        run = self._runs.get((found.block, found.mode, found.pipe))
        return run.makespan_s if run else None

    def peak_bytes(self, found: Bounded) -> float:
        """Least bytes of a layout, with activations as simulated where that was done for the same pipeline."""
        kept = self._kept.get((found.block, found.mode, found.pipe))
        if kept is None or not found.states:
            return found.peak_bytes
        return max(found.peak_bytes, max(map(add, kept, found.states)) * _ROUNDING)

    def learn(self, found: Bounded, simulated: Simulated) -> None:
        """What a simulation has shown of a pipeline, whoever keeps its states: when it runs, and what it keeps."""
        run, key = simulated.step.pipeline, (found.block, found.mode, found.pipe)
        if run is None:
            return
        ranks = len(simulated.memory)
        watched = (0, min(1, ranks - 1), ranks - 1)
        self._kept[key] = tuple(simulated.memory[rank].get(Role.ACTIVATION, 0) for rank in watched)
        if found.cut.zero < 2:  # gathers of cut parameters may hold a pipeline up
            self._runs[key] = run

    def families(self, tell: Tell) -> Iterator[tuple[float, Family]]:
        """All blocks that can be in families, with a bound of each ([Note: three bounds]).

        Raises:
            ConfigError: no block can be; the message is that of most.
        """
        for mode in self.space.modes():
            self.shares.table(mode)
        families: dict[tuple[object, ...], list[Block]] = {}
        for mesh in self.space.meshes():
            for block in self.space.blocks(mesh):
                key = (mesh.tp, mesh.cp, mesh.etp, mesh.ep > 1, block.sp, block.cp_comm, block.precision)
                families.setdefault(key, []).append(block)
        found = False
        for number, blocks in enumerate(families.values()):
            tell(number, len(families), "blocks priced")
            family = Family(tuple(sorted(blocks, key=lambda block: (block.micro_batch, block.mesh.ep))))
            bound_s = self._family_s(family)
            if bound_s is not None:
                found = True
                self.counted += sum(map(self.shares.count, blocks))
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
            self.counted -= sum(map(self.shares.count, family.blocks))
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

    def opened(self, block: Block, budget_bytes: float) -> list[Opened]:
        """A block in each recompute mode in which some of its pipelines may fit; it is priced if it is not.

        Args:
            budget_bytes: Of the tensors of a device.
        """
        prices = self._price(block, self.space.modes())
        found: list[Opened] = []
        for mode, segments in self._segments[block].items():
            plain = len(segments) // 2
            ideal_s = self._ideal_s(block, prices, segments[plain if self.shares.partial(mode) else 0 :])
            sieved = self._sieved(block, mode, prices, budget_bytes)
            one = Opened(max(ideal_s, sieved.step_s), block, mode, sieved)
            (found if sieved.step_s < inf else self._out).append(one)
        return found

    def _sieved(self, block: Block, mode: str, prices: MachinePrices, budget_bytes: float) -> Sieved:
        segments, share = self._segments[block][mode], self.shares.share(block, mode)
        states = self.shares.least_bytes(block, segments)[self.shares.table(mode).geometry]
        saved = np.array([float(s.saved_bytes) for s in segments])
        peaks = np.max(share.kept @ saved + states, axis=1) * _ROUNDING
        peaks[~self.shares.good(block, mode)] = inf
        fits, nearly = peaks <= budget_bytes, peaks <= _NEARLY * budget_bytes
        seconds = np.full(len(peaks), inf)
        if np.any(nearly):
            features = features_of(segments, prices, prices.stack)
            seconds = self.shares.sieve(mode).seconds(features, prices, share.micro_batches)
            seconds *= (1 + waiting_share(self.ask.devices, every_block=False)) * _ROUNDING
        return Sieved(
            pipes=fits,
            step_s=float(np.min(seconds, where=fits, initial=inf)),
            over_s=float(np.min(seconds, where=nearly & ~fits, initial=inf)),
            peak_bytes=float(np.min(peaks)),
        )

    def nearly(self, most: int, limit_s: float, budget_bytes: float) -> list[Bounded]:
        """The fastest layouts that are a little too large, of those that may take less than ``limit_s``."""
        for one in sorted(self._out, key=lambda each: each.sieved.over_s)[:most]:
            if one.sieved.over_s < limit_s:
                self._look_into(one, budget_bytes)
        return sorted(self.over, key=lambda found: (found.step_s, str(self.layout(found))))[:most]

    def _look_into(self, one: Opened, budget_bytes: float) -> None:
        """Bound the layouts of a block of which none fits."""
        everything = replace(one.sieved, pipes=np.ones_like(one.sieved.pipes))
        next(self.bounded(replace(one, sieved=everything), budget_bytes), None)

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

    def _prices(self, block: Block, pp: int = 1) -> MachinePrices:
        """Prices of a block over all devices, in a pipeline of some length."""
        plain = self.space.layout(block, "none", Pipe(pp, 1, "1f1b", -1), Cut(0, 0), global_batch=0)
        layout = replace(plain, recompute_modules=self.ask.pins.get("recompute_modules", ()))
        return MachinePrices(self.ask.machine, layout, self.ask.request.stack, self.ask.table.symbols.get("a", 1))

    def _rows(self, block: Block, mode: str, pipes: Bools) -> Rows:
        """All layouts of a block in some pipes."""
        shares, share = self.shares, self.shares.share(block, mode)
        if block.mesh not in self._exchanges:
            table = shares.table(self.space.modes()[0])
            segments = self._segments[block][self.space.modes()[0]]
            self._exchanges[block.mesh] = exchanges(self.space, block, shares.watched, table, segments, self._known)
        found, good = self._exchanges[block.mesh], shares.good(block, mode) & pipes
        table = shares.table(mode)
        return Rows(table, found, share.micro_batches, share.alive, *found.rows(table, good))

    def bounded(self, opened: Opened, budget_bytes: float) -> Iterator[Bounded]:
        """Layouts of a block that may fit, by their bounds.

        Args:
            budget_bytes: Of the tensors of a device.
        """
        found = self._bounds(opened)
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
                opened = self.opened(block, inf)
            except ConfigError:  # a block that cannot be; the search has counted it
                continue
            for one in opened:
                if len(found) == most and one.sieved.peak_bytes > found[-1].peak_bytes:
                    continue
                if (bounds := self._bounds(one)) is not None:
                    first = np.lexsort((bounds.steps, bounds.peaks))[:most].tolist()
                    found += map(bounds.at, first)
            found.sort(key=_memory_first)
            del found[most:]
        return found

    def _bounds(self, opened: Opened) -> _BlockBounds | None:
        """Of a block's layouts in the pipes that are left of it; None if there is none."""
        block, mode, ask = opened.block, opened.mode, self.ask
        rows, prices = self._rows(block, mode, opened.sieved.pipes), self._prices(block)
        if not len(rows.pipe):
            return None
        ways = next((n for n in divisors(prices.layout.dp) if n > 1), 1)
        alone = replace(block, mesh=replace(block.mesh, ep=1, etp=0))  # sends do not depend on experts
        both = (prices, self._prices(alone, ways))
        priced = priced_block(self._segments[block][mode], self.shares.rows.arrays(), ask.table.counts, both)
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
        states = tuple(rows.found.bytes[int(rows.number[place])].tolist())
        return Bounded(*bounds, self.block, self.mode, pipe, cut, states)


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
