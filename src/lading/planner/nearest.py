"""Nearest: where no layout fits, the asks like it that some layout fits, each with what it costs.

[Note: optimizer on the host]
Moments and master weights lie in host memory, whose processors update them: gradients go down in fp32 and 16-bit
parameters come up after the step, and nothing runs beside. That is the most such a step can take, as ZeRO-Offload hides
part of it (Ren et al. 2021, arXiv 2101.06840, section 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from lading.errors import ConfigError, PlanInfeasible
from lading.ir.graph import Role
from lading.memory.moments import Room, over_bytes
from lading.memory.ranks import shards
from lading.planner.refine import Refined, refine, refined, room_of
from lading.planner.search import Search, Tell
from lading.planner.space import Ask
from lading.sim.simulate import MEMORY_SPREAD
from lading.units import format_bytes, format_seconds

#: How often devices are doubled, and batch and sequence halved, before giving up.
_DOUBLINGS, _HALVINGS = 8, 3
#: Layouts that nearly fit, tried with the optimizer on the host.
_TRIED = 16


@dataclass(frozen=True)
class Near:
    """An ask that can be met.

    Attributes:
        change: What is different, in words.
        tokens_per_s_per_device: What it does with it.
    """

    change: str
    layout: str
    step_s: float
    tokens_per_s_per_device: float

    def __str__(self) -> str:
        return (
            f"{self.change}: {self.layout}, step {format_seconds(self.step_s)}, "
            f"{self.tokens_per_s_per_device:,.0f} tokens/s a device"
        )


def nearest(ask: Ask, search: Search, over: Iterable[Refined], tell: Tell) -> list[Near]:
    """The least change of each kind with which something fits.

    Args:
        search, over: Of the ask itself, which nothing fits.
    """
    found = [
        _offloaded(ask, search, over),
        _first(_more_devices(ask), tell),
        _first(_smaller(ask), tell),
        _first(_shorter(ask), tell),
    ]
    return [near for near in found if near is not None]


def _more_devices(ask: Ask) -> Iterator[tuple[str, Ask]]:
    pins = {key: value for key, value in ask.pins.items() if key != "dp"}
    for power in range(1, _DOUBLINGS + 1):
        devices = ask.devices << power
        yield f"{devices:,} devices instead of {ask.devices:,}", replace(ask, devices=devices, pins=pins)


def _smaller(ask: Ask) -> Iterator[tuple[str, Ask]]:
    for power in range(1, _HALVINGS + 1):
        batch = ask.global_batch >> power
        if batch << power == ask.global_batch and batch:
            yield f"a global batch of {batch:,} instead of {ask.global_batch:,}", replace(ask, global_batch=batch)


def _shorter(ask: Ask) -> Iterator[tuple[str, Ask]]:
    whole = ask.request.seq_len
    for power in range(1, _HALVINGS + 1):
        tokens = whole >> power
        request = replace(ask.request, seq_len=tokens)
        yield f"sequences of {tokens:,} tokens instead of {whole:,}", replace(ask, request=request, longest=0)


def _first(asks: Iterator[tuple[str, Ask]], tell: Tell) -> Near | None:
    """The first ask that can be met."""
    for change, ask in asks:
        one = _met(replace(ask, top=1, proven=1), tell)
        if one is not None:
            return _near(change, one, one.step_s)
    return None


def _met(ask: Ask, tell: Tell) -> Refined | None:
    try:
        good, _, _ = refined(Search(ask), room_of(ask), tell)
    except ConfigError:
        return None
    return good[0] if good else None


def _near(change: str, one: Refined, step_s: float) -> Near:
    rate = one.simulated.request.tokens / step_s / one.layout.devices
    return Near(change, str(one.layout), step_s, rate)


def _offloaded(ask: Ask, search: Search, over: Iterable[Refined]) -> Near | None:
    """The fastest layout that fits once the optimizer's states are on the host ([Note: optimizer on the host])."""
    room, host = room_of(ask), ask.machine.host_device
    if host is None or not room.host_bytes:
        return None
    named = [*sorted(search.over, key=lambda found: found.step_s)[:_TRIED], *filter(None, [search.lightest])]
    tried = [*list(over)[:_TRIED], *(refine(search, found, room) for found in named)]
    fits = [(one.step_s + _update_s(one, ask), str(one.layout), one) for one in tried if _fits_offloaded(one, room)]
    if not fits:
        return None
    step_s, _, one = min(fits, key=lambda row: row[:2])
    return _near("optimizer's states in host memory, updated there", one, step_s)


def _states(one: Refined) -> int:
    return max(roles[Role.OPTIMIZER_STATE] for roles in one.simulated.memory)


def _fits_offloaded(one: Refined, room: Room) -> bool:
    states = _states(one)
    least = min(roles[Role.OPTIMIZER_STATE] for roles in one.simulated.memory)
    moved = {
        moment: {"device": tiers["device"] - least, "host": tiers["host"] + states}
        for moment, tiers in one.peaks.items()
    }
    return over_bytes(moved, room) <= 0


def _update_s(one: Refined, ask: Ask) -> float:
    """Seconds that the host's part takes longer than the device's."""
    host, tier = ask.machine.host_device, ask.machine.tier("host")
    if host is None or tier is None:
        raise ConfigError(f"machine {ask.machine.name}: expected a host with memory and processors; add [host_device]")
    stages = one.simulated.step.stages
    ranks = len(one.simulated.memory)
    held: list[float] = [0.0] * ranks
    for number, stage in enumerate(stages):
        held[number % ranks] += sum(count / shards(axes, one.layout) for axes, count in stage.elements.items())
    most = max(held)
    moves = 4 * most / tier.write_bytes_per_s + 2 * most / tier.read_bytes_per_s
    return moves + most / host.optimizer_elements_per_s


def infeasible(ask: Ask, search: Search, over: list[Refined], tell: Tell) -> PlanInfeasible | ConfigError:
    """Why nothing fits, and what would."""
    room, lightest = room_of(ask), search.lightest
    if over:
        one = min(over, key=lambda each: (each.over_bytes, each.order))
    elif lightest is not None:
        one = refine(search, lightest, room)
    else:
        batch = ask.global_batch
        return ConfigError(f"no layout of {ask.devices} devices divides a global batch of {batch}; change either")
    moment, tier, _ = one.binding
    there, needed = room.device_bytes if tier == "device" else room.host_bytes, one.peaks[moment][tier]
    lines = [
        f"no layout of {ask.devices} devices fits: the lightest, {one.layout}, needs {format_bytes(needed)} of the "
        f"{tier} at moment {moment!r}, {format_bytes(one.over_bytes)} more than there are ({format_bytes(there)}, "
        f"{MEMORY_SPREAD:.0%} kept for what a prediction may miss)"
    ]
    near = nearest(ask, search, over, tell)
    lines += ["nearest plans that fit:"] if near else ["nothing near it fits either: pin less, or take another machine"]
    lines += [f"  {each}" for each in near]
    return PlanInfeasible("\n".join(lines), missing_bytes=one.over_bytes, smallest_budget_bytes=needed)
