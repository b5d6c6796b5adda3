"""Refine: layouts of least bounds, simulated by events with the bytes of all moments, until the best is proven.

With B(x) <= T(x) the bound of a layout's seconds, b(x) <= M(x) that of its bytes, and F those that turned out to fit,

    minimise    T(x)                                                                       ``refine``
    subject to  M_k(x) <= room, k over the five moments and tiers                          ``Refined.fits``
    in order    of B(x), layouts with b(x) over the room left out                          ``LayoutSearch.bounded``
    until       B of the next >= the slowest wanted T in F: proven                         ``refined``
                or so many were simulated since the first that fits: not proven            ``_Queue.is_tired``
    if F is {}  those of least b(x) are simulated; what is left unseen is said             ``_Queue.take_lightest``
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush

from lading.ir.action import DEVICE
from lading.ir.layout import Layout
from lading.memory.moments import binding, over_bytes
from lading.planner.peaks import peaks_of
from lading.planner.search import Bounded, Family, FamilyMember, LayoutSearch, Opened, Tell, UnpricedBlock
from lading.sim.noise import waiting_share
from lading.sim.simulate import Simulated, simulate

#: Layouts simulated from the first that fits on, before the search gives up proving: so many times as are wanted, and
#: so many at least.
_PATIENCE, _LEAST = 4, 64
#: So many times as are wanted, before it gives up finding one that fits by bounds of time, and then by those of memory.
_MOST, _LIGHTEST = 16, 64


@dataclass(frozen=True)
class Refined:
    """Layout simulated by events.

    Attributes:
        bound_s: Seconds that no run of it is below.
        peaks: Bytes by moment and tier of the rank that needs most.
        room: Bytes that there are for tensors, by tier.
    """

    simulated: Simulated
    bound_s: float
    peaks: dict[str, dict[str, int]]
    room: Mapping[str, int]

    @property
    def layout(self) -> Layout:
        """Layout that was simulated."""
        return self.simulated.request.layout

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.simulated.step.step_s

    @cached_property
    def binding(self) -> tuple[str, str, float]:
        """Name the need nearest to its room: (moment, tier, share of the room)."""
        return binding(self.peaks, self.room)

    @property
    def fits(self) -> bool:
        """Whether the bytes of all moments fit into every tier."""
        return self.binding[2] <= 1.0

    @property
    def over_bytes(self) -> int:
        """Bytes by which it does not fit; 0 where it does."""
        return max(0, over_bytes(self.peaks, self.room))

    def peak_bytes_of(self, tier: str) -> int:
        """Bytes of a tier at the moment that needs most of it."""
        return max(tiers.get(tier, 0) for tiers in self.peaks.values())

    @property
    def order(self) -> tuple[float, int, str]:
        """Sort key: faster first; of equally fast layouts, to eleven digits, what needs less of the device first."""
        return float(f"{self.step_s:.11g}"), self.peak_bytes_of(DEVICE), str(self.layout)


@dataclass(frozen=True)
class Proof:
    """Proof of how much of the space the best layouts are best of.

    Attributes:
        rest_s: Seconds that no layout is below that was not simulated and may fit; infinite where there is none.
        simulated: Number of layouts that were simulated.
    """

    rest_s: float
    simulated: int

    @property
    def is_whole(self) -> bool:
        """Whether the proof covers the whole space: no layout not simulated can fit, by its bound of memory."""
        return self.rest_s == float("inf")


def refined(search: LayoutSearch, room: Mapping[str, int], tell: Tell) -> tuple[list[Refined], list[Refined], Proof]:
    """Find the fastest layouts that fit, with those simulated that turned out not to, and how far that is proven.

    Always what has the least bound comes next: a family is divided, a block opened, a layout simulated. Once a pipeline
    has been simulated, what it takes longer than its bound is added to all layouts with it. Where none of very many
    fits, those that need least memory are simulated too.
    """
    queue = _Queue(search, room, tell)
    while (entry := queue.next()) is not None:
        bound_s, item = entry
        if (queue.is_full and bound_s >= queue.worst_s) or queue.is_tired:
            if not queue.good:
                queue.take_lightest()
            return queue.good, queue.over, Proof(bound_s, queue.simulated)
        queue.take(bound_s, item)
    return queue.good, queue.over, Proof(float("inf"), queue.simulated)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Entry of the queue: a layout, and those of its block behind it.

    ``exact``: the bound has its pipeline's own seconds.
    """

    bounded: Bounded
    rest_of_block: Iterator[Bounded]
    exact: bool = False


_Item = Family | FamilyMember | UnpricedBlock | Opened | _Layout


class _Queue:
    """Queue of what is left of a search, by bounds; ties go by the order in which entries came."""

    def __init__(self, search: LayoutSearch, room: Mapping[str, int], tell: Tell) -> None:
        self.search, self.room, self.tell = search, room, tell
        self.good: list[Refined] = []
        self.over: list[Refined] = []
        self._before = 0
        self._heap: list[tuple[float, int, _Item]] = []
        self._serial = 0
        for family in search.families(tell):
            self._push(family.bound_s, family)

    @property
    def simulated(self) -> int:
        """Number of layouts simulated so far."""
        return len(self.good) + len(self.over)

    @property
    def is_full(self) -> bool:
        """Whether as many layouts fit as are wanted."""
        return len(self.good) >= self.search.space.wanted_request.top

    @property
    def worst_s(self) -> float:
        """Seconds of the slowest of those layouts that are to be proven."""
        return self.good[min(self.search.space.wanted_request.proven, self.search.space.wanted_request.top) - 1].step_s

    @property
    def is_tired(self) -> bool:
        """Whether as many have been simulated as may be, since the first that fits or before it."""
        times = _PATIENCE if self.good else _MOST
        return self.simulated - self._before >= max(_LEAST, times * self.search.space.wanted_request.top)

    def next(self) -> tuple[float, _Item] | None:
        """Take out the entry of least bound: (seconds, entry); None if nothing is left."""
        if not self._heap:
            return None
        bound_s, _, item = heappop(self._heap)
        return bound_s, item

    def _push(self, bound_s: float, item: _Item) -> None:
        self._serial += 1
        heappush(self._heap, (bound_s, self._serial, item))

    def take(self, bound_s: float, item: _Item) -> None:
        """Look closer at an entry: divide a family, filter a member, open a block, or simulate a layout."""
        if isinstance(item, Family):
            for member in item.members:
                self._push(member.bound_s, member)
        elif isinstance(item, FamilyMember):
            for unpriced in self.search.unpriced(item, self.room[DEVICE]):
                self._push(max(bound_s, unpriced.prefiltered.step_s), unpriced)
        elif isinstance(item, UnpricedBlock):
            opened = self.search.opened(item, self.room[DEVICE])
            if opened is not None:
                self._push(max(bound_s, opened.prefiltered.step_s), opened)
        elif isinstance(item, Opened):
            self._following(self.search.bounded(item, self.room[DEVICE]))
        else:
            if not item.exact:
                self._following(item.rest_of_block)
            self._simulate(item)

    def take_lightest(self) -> None:
        """Simulate the layouts with the least bounds of memory, where none that was simulated fits."""
        known = {str(one.layout) for one in self.over}
        for bounded in self.search.lightest(_LIGHTEST):
            may_fit = bounded.peak_bytes <= self.room[DEVICE]
            if may_fit and str(self.search.layout(bounded)) not in known:
                self._keep(refine(self.search, bounded, self.room))

    def _following(self, rest: Iterator[Bounded]) -> None:
        bounded = next(rest, None)
        if bounded is not None:
            self._push(bounded.step_s, _Layout(bounded, rest))

    def _simulate(self, item: _Layout) -> None:
        bounded = item.bounded
        if not item.exact and self.search.peak_bytes(bounded) > self.room[DEVICE]:
            self.search.over.append(bounded)
            return None
        if not item.exact and (span_s := self.search.span_s(bounded)) is not None:
            waits = waiting_share(
                self.search.space.wanted_request.devices, every_block=bounded.cut.zero >= 2 and bounded.pipe.stages == 1
            )
            later = (span_s - bounded.span_s) * (1 + waits)
            if later > 0:
                return self._push(bounded.step_s + later, replace(item, exact=True))
        top = self.search.space.wanted_request.top
        self.tell(min(self.simulated, top), top, "layouts simulated")
        one = refine(self.search, bounded, self.room)
        self._keep(one)

    def _keep(self, one: Refined) -> None:
        if one.fits and not self.good:
            self._before = self.simulated
        insort(self.good if one.fits else self.over, one, key=lambda layout: layout.order)


def refine(search: LayoutSearch, found: Bounded, room: Mapping[str, int]) -> Refined:
    """Simulate one bounded layout, and count its bytes at all moments."""
    request = search.request(search.layout(found))
    simulated = simulate(request, search.space.table, search.segments_with_passes(found))
    return Refined(simulated, found.step_s, peaks_of(simulated, search.space.wanted_request), room)
