"""Refine: layouts of least bounds, simulated by events with the bytes of all moments, until the best is proven."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES, Role
from lading.ir.layout import Layout
from lading.memory.moments import Held, Room, binding, moments_of, over_bytes
from lading.memory.ranks import shards
from lading.planner.search import Bounded, Search
from lading.planner.space import Ask
from lading.sim.simulate import MEMORY_SPREAD, Simulated, segments_of, simulate

#: Layouts simulated before the search gives up proving: so many times as are wanted.
_PATIENCE = 4


@dataclass(frozen=True)
class Refined:
    """A layout by events.

    Attributes:
        bound_s: What no run of it is faster than.
        peaks: Bytes by moment and tier of the rank that needs most.
        room: What there is.
    """

    simulated: Simulated
    bound_s: float
    peaks: dict[str, dict[str, int]]
    room: Room

    @property
    def layout(self) -> Layout:
        """Where everything goes."""
        return self.simulated.request.layout

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.simulated.step.step_s

    @cached_property
    def binding(self) -> tuple[str, str, float]:
        """(moment, tier, share of the room) of the need nearest to it."""
        return binding(self.peaks, self.room)

    @property
    def fits(self) -> bool:
        """Whether all moments do."""
        return self.binding[2] <= 1.0

    @property
    def over_bytes(self) -> int:
        """By which it does not fit."""
        return max(0, over_bytes(self.peaks, self.room))

    @property
    def order(self) -> tuple[float, str]:
        """Of the table: faster first."""
        return self.step_s, str(self.layout)


@dataclass(frozen=True)
class Proof:
    """How much of the space the best layouts are proven for.

    Attributes:
        rest_s: No layout that was not simulated and may fit takes less.
        simulated: How many were.
    """

    rest_s: float
    simulated: int


def room_of(ask: Ask) -> Room:
    """What a device has for tensors, less what a prediction may be wrong by, and what its host has for it."""
    device = ask.machine.device
    whole = ask.budget_bytes or device.memory_bytes
    if whole <= device.overhead_bytes:
        raise ConfigError(
            f"expected a budget of more than the {device.overhead_bytes} bytes that a process needs on "
            f"{device.name}, got {whole}"
        )
    host = ask.machine.tier("host")
    return Room(
        device_bytes=int((whole - device.overhead_bytes) / (1 + MEMORY_SPREAD)),
        host_bytes=host.capacity_bytes if host else 0,
    )


def refined(
    search: Search, room: Room, tell: Callable[[int, int, str], None]
) -> tuple[list[Refined], list[Refined], Proof]:
    """The fastest layouts that fit, those among them that turned out not to, and how far that is proven."""
    top = search.ask.top
    good: list[Refined] = []
    over: list[Refined] = []
    rest = search.fitting()
    for number, found in enumerate(rest):
        good.sort(key=lambda one: one.order)
        if (len(good) >= top and found.step_s >= good[top - 1].step_s) or number >= _PATIENCE * top:
            rest_s = min(found.step_s, search.rest_s)
            return good[:top], over, Proof(rest_s, number)
        tell(min(number, top), top, "layouts simulated")
        one = refine(search, found, room)
        (good if one.fits else over).append(one)
    good.sort(key=lambda one: one.order)
    return good[:top], over, Proof(search.rest_s, len(good) + len(over))


def refine(search: Search, found: Bounded, room: Room) -> Refined:
    """One layout, simulated."""
    request = search.request(search.layout(found))
    simulated = simulate(request, search.ask.table, search.segments(found))
    return Refined(simulated, found.step_s, peaks_of(simulated, search.ask), room)


def peaks_of(simulated: Simulated, ask: Ask) -> dict[str, dict[str, int]]:
    """Bytes by moment and tier of the rank of a step that needs most."""
    request = simulated.request
    memory = longest = simulated.memory
    if ask.longest > request.seq_len:
        longest = simulate(replace(request, seq_len=ask.longest), simulated.table).memory
    layout, local, whole = request.layout, *_largest(simulated)
    pieces = max(local * _width(simulated) // (shards("dp", layout) if layout.zero else 1), _kept(simulated, local))
    peaks: dict[str, dict[str, int]] = {}
    on_host = request.layout.offload_to == "host"
    for roles, long, behind in zip(memory, longest, simulated.behind, strict=True):
        held = Held(
            roles=roles,
            longest_bytes=sum(long.values()),
            piece_bytes=pieces,
            whole_bytes=whole * _width(simulated),
            ranks=layout.devices // layout.pp,
            host_bytes=sum(behind.values()) if on_host else 0,
        )
        for moment, tiers in moments_of(held, ask.save).items():
            most = peaks.setdefault(moment, dict.fromkeys(tiers, 0))
            most.update({tier: max(most[tier], size) for tier, size in tiers.items()})
    return peaks


def _largest(simulated: Simulated) -> tuple[int, int]:
    """Elements of the largest parameter on a rank, and whole."""
    request, table = simulated.request, simulated.table
    ranked = segments_of(request, table)
    local = max(prod(t.shape) for s in ranked for t in s.tensors if t.role is Role.PARAMETER)
    sizes: dict[str, Any] = {**table.symbols, "s": request.seq_len, "b": request.layout.micro_batch}
    whole = max(
        prod(int(dim.at(sizes)) for dim in t.dims)
        for s in table.segments
        for t in s.tensors
        if t.role is Role.PARAMETER
    )
    return local, whole


def _width(simulated: Simulated) -> int:
    """Bytes of the widest state of an element."""
    stack = simulated.request.stack
    return 4 if stack.master_weights else DTYPE_BYTES[stack.moments_dtype]


def _kept(simulated: Simulated, local: int) -> int:
    """Bytes of a parameter as a rank keeps it."""
    layout, stack = simulated.request.layout, simulated.request.stack
    width = DTYPE_BYTES.get(stack.parameters_dtype, 4 if layout.precision == "fp32" else 2)
    return local * width // (shards("dp", layout) if layout.zero == 3 else 1)
