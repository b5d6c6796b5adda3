"""Nearest: where no layout fits, the asks like it that some layout fits, each with what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lading.errors import ConfigError, PlanInfeasible
from lading.planner.refine import Refined, refine, refined, room_of
from lading.planner.search import Search, Tell
from lading.planner.space import Ask
from lading.sim.simulate import MEMORY_SPREAD
from lading.units import format_bytes, format_seconds

#: How often devices are doubled, and batch and sequence halved, before giving up.
_DOUBLINGS, _HALVINGS = 8, 3


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


def nearest(ask: Ask, tell: Tell) -> list[Near]:
    """The least change of each kind with which something fits.

    Args:
        ask: Which nothing fits.
    """
    found = [
        _first(_unpinned(ask), tell),
        _first(_more_devices(ask), tell),
        _first(_smaller(ask), tell),
        _first(_shorter(ask), tell),
    ]
    return [near for near in found if near is not None]


def _unpinned(ask: Ask) -> Iterator[tuple[str, Ask]]:
    """Without one of the pins that cost memory."""
    for key in ("offload", "recompute", "zero", "micro_batch", "schedule"):
        if key in ask.pins:
            pins = {name: value for name, value in ask.pins.items() if name != key}
            yield f"{key} not pinned to {ask.pins[key] or 'none'}", replace(ask, pins=pins)


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
        if not tokens:
            return
        longest = f", the longest of {ask.longest >> power:,}" if ask.longest else ""
        what = f"sequences of {tokens:,} tokens instead of {whole:,}{longest}"
        yield what, replace(ask, request=request, longest=ask.longest >> power)


def _first(asks: Iterator[tuple[str, Ask]], tell: Tell) -> Near | None:
    """The first ask that can be met."""
    for change, ask in asks:
        one = _met(replace(ask, top=1, proven=1), tell)
        if one is not None:
            rate = one.simulated.request.tokens / one.step_s / one.layout.devices
            return Near(change, str(one.layout), one.step_s, rate)
    return None


def _met(ask: Ask, tell: Tell) -> Refined | None:
    try:
        good, _, _ = refined(Search(ask), room_of(ask), tell)
    except ConfigError:
        return None
    return good[0] if good else None


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
    near = nearest(ask, tell)
    lines += ["nearest plans that fit:"] if near else ["nothing near it fits either: pin less, or take another machine"]
    lines += [f"  {each}" for each in near]
    return PlanInfeasible("\n".join(lines), missing_bytes=one.over_bytes, smallest_budget_bytes=needed)
