"""Search: what the blocks of a space cost, and the bounds of all layouts of a block.

[Note: bounds, one behind the other]
What has the least bound is looked into next. A family of blocks has the least bound of its members. A member is bounded
by its kernels (``bounds.KernelBounds``): first of the whole model, never waiting, then of the pipelines that may fit
(``prefilter.py``). What is left is priced by the simulator's own code and filtered again; then each layout has a bound
(``bounds.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import numpy as np

from lading.errors import ConfigError
from lading.ir.layout import Layout
from lading.ir.request import StepRequest
from lading.parallel.ranks import check_segment
from lading.parallel.weight_passes import CUT, weight_passes
from lading.planner.bounds import KernelBounds, Rows, peak_bounds, priced_block, step_bounds
from lading.planner.exchanges import Exchanges, Known, exchanges, least_bytes, watched_segments
from lading.planner.pipes import Bools, PipeTable, alive_of, pipe_table, valid
from lading.planner.prefilter import Prefilter, Prefiltered, SegmentCosts, costs_of
from lading.planner.space import LayoutBlock, Mesh, Pipe, RecomputeMode, Space, StateLayout, divisors
from lading.planner.stages import Floats, Ints, StageRows
from lading.sim.noise import waiting_share
from lading.sim.phases import Phases
from lading.sim.prices import MachinePrices
from lading.sim.simulate import Priced as Segments
from lading.sim.simulate import listed_step, segments_by_mode
from lading.sim.storage import least_bytes_in_order


@dataclass(frozen=True, eq=False)
class Share:
    """Facts common to blocks with as many ranks inside a stage and the same micro-batch, by pipe.

    Attributes:
        good: [pipe]: whether it can be, experts apart.
        micro_batches: [pipe]: of a step.
        alive: Micro-batches alive on watched ranks, and the stages that run (``pipes.alive_of``).
        kept_counts: [pipe, watched rank, segment]: how often the rank keeps its activations.
    """

    good: Bools
    micro_batches: Floats
    alive: tuple[Floats, Ints]
    kept_counts: Floats


@dataclass
class Shares:
    """Facts that blocks of a search have in common, each computed when it is first asked for."""

    space: Space
    _tables: dict[bool, PipeTable] = field(default_factory=lambda: {})
    _prefilters: dict[bool, Prefilter] = field(default_factory=lambda: {})
    _shares: dict[tuple[int, int, bool], Share] = field(default_factory=lambda: {})
    _least: dict[Mesh, tuple[Floats, Floats]] = field(default_factory=lambda: {})
    _counts: dict[tuple[int, int, int, int], int] = field(default_factory=lambda: {})

    @cached_property
    def rows(self) -> StageRows:
        """Distinct stages of all pipes of the search, a row each."""
        return StageRows(self.space.request, self.space.table)

    @cached_property
    def watched(self) -> Floats:
        """Count how often each watched rank has each segment: an array of [pipeline shape, watched rank, segment]."""
        return watched_segments(self.table(self.space.modes[0]), self.rows)

    def partial(self, mode: RecomputeMode) -> bool:
        """Whether only some layers of a chunk may be recomputed in a mode."""
        return mode.name == "full" or "recompute_layers" in self.space.wanted_request.pins

    def table(self, mode: RecomputeMode) -> PipeTable:
        """Lay out the pipes of a recompute mode.

        Raises:
            ConfigError: there is none.
        """
        partial = self.partial(mode)
        if partial not in self._tables:
            pipes = self.space.pipes(partial=partial)
            if not pipes:
                raise ConfigError(
                    f"expected a pipeline that {self.space.wanted_request.devices} devices, {self.space.layers} layers "
                    "and the pins allow, found none; change pp, vpp, schedule or recompute_layers"
                )
            self._tables[partial] = pipe_table(pipes, self.rows)
        return self._tables[partial]

    def prefilter(self, mode: RecomputeMode) -> Prefilter:
        """Prefilter of the pipes of a recompute mode; stages of all modes must have been laid out."""
        partial = self.partial(mode)
        if partial not in self._prefilters:
            self._prefilters[partial] = Prefilter.of(self.table(mode), self.rows.arrays()[2])
        return self._prefilters[partial]

    def share(self, block: LayoutBlock, mode: RecomputeMode) -> Share:
        """Facts that a block has in common with others."""
        key = (block.mesh.tp * block.mesh.cp, block.micro_batch, self.partial(mode))
        if key not in self._shares:
            table, stack = self.table(mode), self.space.request.stack
            replicas = self.space.wanted_request.devices / key[0] / table.pp
            micro_batches = self.space.wanted_request.global_batch / (replicas * block.micro_batch)
            good = valid(table, replicas, micro_batches, stack)
            if "dp" in self.space.wanted_request.pins:
                good &= replicas == self.space.wanted_request.pins["dp"]
            alive = alive_of(table, np.maximum(1.0, micro_batches), stack)
            self._shares[key] = Share(good, micro_batches, alive, self.prefilter(mode).kept_activation_counts(alive[0]))
        return self._shares[key]

    def good(self, block: LayoutBlock, mode: RecomputeMode) -> Bools:
        """[pipe]: whether a block can have it."""
        ranks = self.space.wanted_request.devices / self.table(mode).pp
        return self.share(block, mode).good & (np.mod(ranks, block.mesh.expert_ways) == 0)

    def least_bytes(self, block: LayoutBlock, segments: Sequence[Phases], elements: Floats) -> tuple[Floats, Floats]:
        """[pipeline shape, watched rank]: least bytes of states of a block, however they are kept."""
        if block.mesh not in self._least:
            table = self.table(self.space.modes[0])
            self._least[block.mesh] = least_bytes(self.space, block, self.watched, table, segments, elements)
        return self._least[block.mesh]

    def count(self, block: LayoutBlock) -> int:
        """Count the layouts of a block."""
        mesh = block.mesh
        key = (mesh.tp, mesh.cp, mesh.expert_ways, block.micro_batch)
        if key not in self._counts:
            ranks, total = self.space.wanted_request.devices // (mesh.tp * mesh.cp), 0
            for mode in self.space.modes:
                table, good = self.table(mode), self.good(block, mode)
                ways = np.unique(np.where(table.flat, 0, table.pp)[good], return_counts=True)
                for pp, count in zip(*(part.tolist() for part in ways), strict=True):
                    total += count * len(self.space.cuts(ranks // max(1, pp) * mesh.cp, 2 if pp else 1))
            self._counts[key] = total
        return self._counts[key]


#: What rounding may add to a bound.
_ROUNDING = 1 - 1e-9
#: Layouts that do not fit are shown if they are no more than so many times over.
_NEARLY = 1.3
Tell = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Bounded:
    """Layout with lower bounds of its step in seconds and of its fullest rank in bytes.

    Attributes:
        span_s: Least seconds of its pipeline.
        mode: Recompute mode.
    """

    step_s: float
    span_s: float
    peak_bytes: float
    block: LayoutBlock
    mode: RecomputeMode
    pipe: Pipe
    cut: StateLayout


@dataclass(frozen=True, eq=False)
class FamilyMember:
    """Block of a family, with the least seconds of a step.

    Attributes:
        kernel_bounds: Those of its family; None where the block is the whole family.
    """

    bound_s: float
    block: LayoutBlock
    kernel_bounds: KernelBounds | None


@dataclass(frozen=True, eq=False)
class Family:
    """Blocks that are alike but in the micro-batch and in the ways of expert parallel."""

    members: tuple[FamilyMember, ...]

    @property
    def bound_s(self) -> float:
        """Least seconds of a step of any member."""
        return min(member.bound_s for member in self.members)


@dataclass(frozen=True, eq=False)
class UnpricedBlock:
    """Block in a recompute mode, not priced yet, with the pipes that its kernel bounds leave."""

    block: LayoutBlock
    mode: RecomputeMode
    prefiltered: Prefiltered


@dataclass(frozen=True, eq=False)
class Opened:
    """Block in a recompute mode, priced, with the pipes that its prices leave."""

    block: LayoutBlock
    mode: RecomputeMode
    prefiltered: Prefiltered


@dataclass
class LayoutSearch:
    """State of one search: what its blocks share, and the prices of each.

    Attributes:
        counted: Number of layouts of the space that can be.
        evaluated: Number of these that were bounded one by one.
        refused: Reasons why blocks cannot be, with how many each.
        over: Layouts that are a little too large: the fastest of each opened block, and those that turned out to be.
    """

    space: Space
    counted: int = 0
    evaluated: int = 0
    refused: dict[str, int] = field(default_factory=lambda: {})
    over: list[Bounded] = field(default_factory=lambda: [])
    _segments: dict[LayoutBlock, dict[RecomputeMode, tuple[Phases, ...]]] = field(default_factory=lambda: {})
    _exchanges: dict[Mesh, Exchanges] = field(default_factory=lambda: {})
    _priced_blocks: Known = field(default_factory=lambda: {})
    _with_passes: dict[tuple[LayoutBlock, RecomputeMode, tuple[bool, bool]], tuple[Phases, ...]] = field(
        default_factory=lambda: {}
    )
    _alone_s: dict[tuple[LayoutBlock, RecomputeMode, Pipe], float] = field(default_factory=lambda: {})
    _out: list[UnpricedBlock | Opened] = field(default_factory=lambda: [])
    _families: list[Family] = field(default_factory=lambda: [])
    _never: set[LayoutBlock] = field(default_factory=set[LayoutBlock])

    @cached_property
    def shares(self) -> Shares:
        """Pipelines, their micro-batches and memory, which blocks of the space have in common."""
        return Shares(self.space)

    def request(self, layout: Layout) -> StepRequest:
        """Build the request for a layout."""
        return replace(self.space.request, layout=layout)

    def layout(self, found: Bounded) -> Layout:
        """Build the layout of a bounded one."""
        return self.space.layout(found.block, found.mode, found.pipe, found.cut)

    def segments(self, found: Bounded) -> Segments:
        """Priced segments of a bounded layout, without passes over weights, so that none takes less."""
        return Segments(self.space.machine, self.space.table, self._segments[found.block][found.mode])

    def segments_with_passes(self, found: Bounded) -> Segments:
        """Priced segments of a bounded layout with its passes over weights, for ``simulate``.

        Who keeps the states, and whether there are several micro-batches, decides them (``parallel.weight_passes``).
        """
        layout = self.layout(found)
        passes = weight_passes(layout, self.space.request.stack)
        if not any(passes):
            return self.segments(found)
        key = (found.block, found.mode, passes)
        if key not in self._with_passes:
            request, prices = self.request(layout), self._prices(found.block)
            self._with_passes[key] = segments_by_mode(request, self.space.table, prices, [found.mode])[0]
        return Segments(self.space.machine, self.space.table, self._with_passes[key])

    def span_s(self, found: Bounded) -> float | None:
        """Least seconds of a layout's pipeline, whoever keeps its states; None where there is none."""
        request, key = self.request(self.layout(found)), (found.block, found.mode, found.pipe)
        if not request.layout.is_pipeline:
            return None
        if key not in self._alone_s:
            self._alone_s[key] = listed_step(request, self.segments(found)).pipeline_s
        return self._alone_s[key] * _ROUNDING

    def peak_bytes(self, found: Bounded) -> float:
        """Least bytes of a layout, by the order of its pipeline's actions where it has one."""
        request = self.request(self.layout(found))
        if not request.layout.is_pipeline or request.stack.drops_gradients:
            return found.peak_bytes
        return max(found.peak_bytes, least_bytes_in_order(listed_step(request, self.segments(found))) * _ROUNDING)

    def families(self, tell: Tell) -> list[Family]:
        """List all families of blocks that can be.

        Raises:
            ConfigError: no block can be; the message is that of most.
        """
        for mode in self.space.modes:
            self.shares.table(mode)
        family_blocks: dict[tuple[object, ...], list[LayoutBlock]] = {}
        for mesh in self.space.meshes():
            for block in self.space.blocks(mesh):
                key = (mesh.tp, mesh.cp, mesh.etp, mesh.ep > 1, block.sp, block.cp_comm, block.precision)
                family_blocks.setdefault(key, []).append(block)
        for number, blocks in enumerate(family_blocks.values()):
            tell(number, len(family_blocks), "blocks priced")
            blocks.sort(key=lambda block: (block.micro_batch, block.mesh.ep))
            family = self._family(blocks)
            if family is not None and len(blocks) > 1 and not self._all_can_be(blocks):
                self._families += filter(None, (self._family([block]) for block in blocks))
            elif family is not None:
                self._families.append(family)
        if not self._families:
            raise ConfigError(self.none_can_be())
        self.counted = sum(self.shares.count(m.block) for family in self._families for m in family.members)
        return self._families

    def _all_can_be(self, blocks: Sequence[LayoutBlock]) -> bool:
        """Whether all blocks of a family can be if the last can, and have kernel bounds."""
        if self.space.machine.device.gpu is None:
            return False
        space, layout = self.space, self._prices(blocks[0]).layout
        try:
            for segment in space.table.segments:
                sizes = {**space.table.symbols, "s": space.request.seq_len}
                check_segment(segment, sizes, layout, regather=space.request.stack.regathers)
        except ConfigError:
            return False
        return True

    def _family(self, blocks: Sequence[LayoutBlock]) -> Family | None:
        """Bound a family of blocks by its leader, the last; None if the leader cannot be."""
        leader, mode = blocks[-1], self.space.modes[0]
        try:
            prices = self._price(leader, mode)
        except ConfigError as error:
            self.refused[str(error)] = self.refused.get(str(error), 0) + len(blocks)
            return None
        plain = self._plain(leader, mode)
        if len(blocks) == 1:
            bound_s = self._ideal_s(leader, costs_of(plain, prices, len(plain)))
            return Family((FamilyMember(bound_s, leader, None),))
        outer = [
            one.precise or not (s.segment.enters and s.segment.leaves)
            for s, one in zip(plain, self.space.table.segments, strict=True)
        ]
        kernel_bounds = KernelBounds(leader, plain, prices, outer)
        bounds = [self._ideal_s(block, kernel_bounds.plain(block, self._prices(block))) for block in blocks]
        return Family(
            tuple(FamilyMember(bound_s, block, kernel_bounds) for bound_s, block in zip(bounds, blocks, strict=True))
        )

    def _plain(self, block: LayoutBlock, mode: RecomputeMode) -> tuple[Phases, ...]:
        segments = self._segments[block][mode]
        return segments[len(segments) // 2 :]

    def none_can_be(self) -> str:
        """Say why there is no layout: the reason of most blocks, or that numbers do not divide."""
        asked = self.space.wanted_request
        pins = ", ".join(f"{key}={value}" for key, value in sorted(asked.pins.items()))
        each = "tp x cp x pp x dp = devices, dp x micro-batch that divides the batch, shard that divides dp x cp"
        why = f"expected {each}, no more stages pp x vpp than layers, and micro-batches and vpp that the schedule takes"
        if self.refused and not self.counted:
            why = max(self.refused.items(), key=lambda row: row[1])[0]
        return (
            f"no layout of {asked.devices:,} devices with a global batch of {asked.global_batch:,}"
            + (f" and {pins} pinned" if pins else "")
            + f" can be: {why}"
        )

    def unpriced(self, member: FamilyMember, budget_bytes: float) -> list[UnpricedBlock]:
        """List the recompute modes of a member in which some of its pipes may fit, as far as kernel bounds tell.

        Args:
            budget_bytes: Bytes for the tensors of a device.
        """
        modes = [self._unpriced(member, mode, budget_bytes) for mode in self.space.modes]
        self._out += [one for one in modes if one.prefiltered.step_s == inf]
        return [one for one in modes if one.prefiltered.step_s < inf]

    def _unpriced(self, member: FamilyMember, mode: RecomputeMode, budget_bytes: float) -> UnpricedBlock:
        block = member.block
        if member.kernel_bounds is None:
            return UnpricedBlock(block, mode, self._opened(block, mode, budget_bytes).prefiltered)
        costs = self.least_costs(member, mode)
        segments = self._segments[member.kernel_bounds.leader][mode]
        return UnpricedBlock(block, mode, self._prefiltered(block, mode, costs, segments, budget_bytes))

    def least_costs(self, member: FamilyMember, mode: RecomputeMode) -> SegmentCosts:
        """Least costs of a member in a recompute mode; its own prices where it has no kernel bounds."""
        kernel_bounds = member.kernel_bounds
        if kernel_bounds is None:
            return self.costs(member.block, mode)
        if not kernel_bounds.knows(mode):
            self._price(kernel_bounds.leader, mode)
            segments = self._segments[kernel_bounds.leader][mode]
            kernel_bounds.learn(mode, segments[: len(segments) // 2])
        return kernel_bounds.costs(member.block, mode, self._prices(member.block))

    def costs(self, block: LayoutBlock, mode: RecomputeMode) -> SegmentCosts:
        """Costs of a block's segments in a recompute mode, priced by the simulator."""
        prices = self._price(block, mode)
        segments = self._segments[block][mode]
        return costs_of(segments, prices, len(segments) // 2)

    def opened(self, unpriced: UnpricedBlock, budget_bytes: float) -> Opened | None:
        """Price a block; None if none of its pipes may fit."""
        try:
            one = self._opened(unpriced.block, unpriced.mode, budget_bytes)
        except ConfigError as error:  # of the leader's family, but not as it is
            if unpriced.block not in self._never:
                self._never.add(unpriced.block)
                self.counted -= self.shares.count(unpriced.block)
                self.refused[str(error)] = self.refused.get(str(error), 0) + 1
            return None
        if one.prefiltered.step_s < inf:
            return one
        self._out.append(one)
        return None

    def _opened(self, block: LayoutBlock, mode: RecomputeMode, budget_bytes: float) -> Opened:
        costs = self.costs(block, mode)
        return Opened(block, mode, self._prefiltered(block, mode, costs, self._segments[block][mode], budget_bytes))

    def _prefiltered(
        self,
        block: LayoutBlock,
        mode: RecomputeMode,
        costs: SegmentCosts,
        segments: Sequence[Phases],
        budget_bytes: float,
    ) -> Prefiltered:
        """Filter the pipes of a block by least bytes and seconds.

        Args:
            segments: Priced for any block of the family.
            budget_bytes: Bytes for the tensors of a device.
        """
        share, stack = self.shares.share(block, mode), self.space.request.stack
        table = self.shares.table(mode)
        every, forwards_first = self.shares.least_bytes(block, segments, costs.elements)
        states = np.where(table.gpipe[:, None], forwards_first[table.geometry], every[table.geometry])
        peaks = np.max(share.kept_counts @ costs.saved + states, axis=1) * _ROUNDING
        peaks[~self.shares.good(block, mode)] = inf
        fits, nearly = peaks <= budget_bytes, peaks <= _NEARLY * budget_bytes
        seconds = np.full(len(peaks), inf)
        if np.any(nearly):
            prefilter = self.shares.prefilter(mode)
            seconds = prefilter.seconds(costs, share.micro_batches, blocking=stack.launch_blocking)
            seconds *= (1 + waiting_share(self.space.wanted_request.devices, every_block=False)) * _ROUNDING
        return Prefiltered(
            pipes=fits,
            step_s=float(np.min(seconds, where=fits, initial=inf)),
            over_s=float(np.min(seconds, where=nearly & ~fits, initial=inf)),
            peak_bytes=float(np.min(peaks)),
        )

    def nearly(self, most: int, limit_s: float, budget_bytes: float) -> list[Bounded]:
        """Find the fastest layouts that are a little too large, one of each pipeline, of those under ``limit_s``."""
        for one in sorted(self._out, key=lambda each: each.prefiltered.over_s)[:most]:
            if one.prefiltered.over_s < limit_s:
                self._look_into(one, budget_bytes)
        fastest: dict[tuple[LayoutBlock, RecomputeMode, Pipe], Bounded] = {}
        for one in sorted(self.over, key=lambda found: (found.step_s, str(self.layout(found)))):
            fastest.setdefault((one.block, one.mode, one.pipe), one)
        return [*fastest.values()][:most]

    def _look_into(self, one: UnpricedBlock | Opened, budget_bytes: float) -> None:
        """Bound the layouts of a block of which none fits."""
        opened = self.opened(UnpricedBlock(one.block, one.mode, one.prefiltered), inf)
        if opened is not None:
            next(self.bounded(opened, budget_bytes), None)

    def _price(self, block: LayoutBlock, mode: RecomputeMode) -> MachinePrices:
        prices, known = self._prices(block), self._segments.setdefault(block, {})
        if mode not in known:
            before = next(iter(known.values()), ())
            plain = before[len(before) // 2 :]
            request = self.request(replace(prices.layout, zero=CUT))
            known[mode] = segments_by_mode(request, self.space.table, prices, [mode], plain)[0]
        return prices

    def _ideal_s(self, block: LayoutBlock, costs: SegmentCosts) -> float:
        """Least seconds of a step of a block: all its work spread evenly, nothing recomputed and never waiting."""
        counts = np.zeros((1, costs.device.shape[1]))
        counts[0, -len(self.space.table.counts) :] = self.space.table.counts
        work = float(np.sum(costs.spans(counts, blocking=self.space.request.stack.launch_blocking)))
        ranks = self.space.wanted_request.devices / (block.mesh.tp * block.mesh.cp)
        waits = waiting_share(self.space.wanted_request.devices, every_block=False)
        return self.space.wanted_request.global_batch / block.micro_batch / ranks * work * (1 + waits) * _ROUNDING

    def _prices(self, block: LayoutBlock, pp: int = 1) -> MachinePrices:
        """Prices of a block over all devices, in a pipeline of ``pp`` ranks."""
        mode, pipe = RecomputeMode("none"), Pipe(pp, 1, "1f1b", -1)
        layout = self.space.layout(block, mode, pipe, StateLayout(0, 0), global_batch=0)
        return MachinePrices(self.space.machine, layout, self.space.request.stack, self.space.table.symbols.get("a", 1))

    def _rows(self, block: LayoutBlock, mode: RecomputeMode, pipes: Bools) -> Rows:
        """Collect all layouts of a block in the pipes that are marked."""
        shares, share = self.shares, self.shares.share(block, mode)
        if block.mesh not in self._exchanges:
            table = shares.table(self.space.modes[0])
            segments = self._segments[block][mode]
            self._exchanges[block.mesh] = exchanges(
                self.space, block, shares.watched, table, segments, self._priced_blocks
            )
        exchanged, good = self._exchanges[block.mesh], shares.good(block, mode) & pipes
        table = shares.table(mode)
        return Rows(table, exchanged, share.micro_batches, share.alive, *exchanged.rows(table, good))

    def bounded(self, opened: Opened, budget_bytes: float) -> Iterator[Bounded]:
        """Yield the layouts of a block that may fit, those of least bound first.

        Args:
            budget_bytes: Bytes for the tensors of a device.
        """
        bounds = self._bounds(opened)
        if bounds is None:
            return
        steps, peaks = bounds.steps, bounds.peaks
        self.evaluated += len(steps)
        nearly = np.flatnonzero((peaks > budget_bytes) & (peaks <= _NEARLY * budget_bytes))
        if len(nearly):
            self.over.append(bounds.at(int(nearly[np.argmin(steps[nearly])])))
        places = np.flatnonzero(peaks <= budget_bytes)
        order: list[int] = places[np.argsort(steps[places], kind="stable")].tolist()
        yield from map(bounds.at, order)

    def lightest(self, most: int) -> list[Bounded]:
        """Find the layouts of the space that need least memory as bounded, lightest first, then the faster first.

        Args:
            most: Number of layouts.
        """
        lightest: list[Bounded] = []
        members = [member for family in self._families or self.families(_silent) for member in family.members]
        unpriced = [self._unpriced(member, mode, inf) for member in members for mode in self.space.modes]
        for one in sorted(unpriced, key=lambda each: each.prefiltered.peak_bytes):
            if one.prefiltered.peak_bytes > (lightest[-1].peak_bytes if len(lightest) == most else inf):
                break
            opened = self.opened(one, inf)
            if opened is not None and (bounds := self._bounds(opened)) is not None:
                first = np.lexsort((bounds.steps, bounds.peaks))[:most].tolist()
                lightest = sorted([*lightest, *map(bounds.at, first)], key=_memory_first)[:most]
        return lightest

    def _bounds(self, opened: Opened) -> _BlockBounds | None:
        """Bound the layouts of a block in the pipes that are left of it; None if there is none."""
        block, mode, space = opened.block, opened.mode, self.space
        rows, prices = self._rows(block, mode, opened.prefiltered.pipes), self._prices(block)
        if not len(rows.pipe):
            return None
        ways = next((n for n in divisors(prices.layout.dp) if n > 1), 1)
        alone = replace(block, mesh=replace(block.mesh, ep=1, etp=0))  # sends do not depend on experts
        both = (prices, self._prices(alone, ways))
        priced = priced_block(self._segments[block][mode], self.shares.rows.arrays(), space.table.counts, both)
        steps, spans = step_bounds(rows, priced, space.request.stack, space.wanted_request.devices)
        peaks = peak_bounds(rows, priced)
        return _BlockBounds(block, mode, rows, steps * _ROUNDING, spans * _ROUNDING, peaks * _ROUNDING)


@dataclass(frozen=True, eq=False)
class _BlockBounds:
    """Bounds of the layouts of a block in one recompute mode, each an array over ``rows``."""

    block: LayoutBlock
    mode: RecomputeMode
    rows: Rows
    steps: Floats
    spans: Floats
    peaks: Floats

    def at(self, place: int) -> Bounded:
        """Take out one layout by its place in ``rows``."""
        rows = self.rows
        pipe, cut = rows.table.pipes[int(rows.pipe[place])], rows.exchanges.cuts[int(rows.number[place])]
        bounds = float(self.steps[place]), float(self.spans[place]), float(self.peaks[place])
        return Bounded(*bounds, self.block, self.mode, pipe, cut)


def _memory_first(bounded: Bounded) -> tuple[float, float]:
    return bounded.peak_bytes, bounded.step_s


def _silent(done: int, of: int, what: str) -> None:
    """Take a report of progress and do nothing."""
