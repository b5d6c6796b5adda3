"""Nearest: where no layout fits, the asks like it that some layout fits, each planned, with what it costs.

With q an ask and d_k(q', q) how far another is from it in one kind k of change (a pin less, more devices, a smaller
batch, shorter sequences, a larger budget, other checkpoints, narrower states),

    minimise    d_k(q', q)   for each k on its own                                         ``_first``, ``nearest``
    subject to  q' differs from q in k only                                                ``_unpinned``, ``_budgets``,
                                                          ``_more_devices``, ``_smaller``, ``_shorter``, ``_saved``, ...
                the least that any layout of q' needs fits                                 ``hopeless``
                a layout of q' was found that fits at all five moments                     ``_met``

The least budget is that of the layout that needs least: layouts are simulated in the order of their bounds of bytes
until no bound left is below what the best one needs (``_lightest``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from lading.errors import ConfigError, PlanInfeasible
from lading.ir.graph import DTYPE_BYTES
from lading.planner.least import Least
from lading.planner.peaks import budget_for, room_of
from lading.planner.refine import Proof, Refined, refine, refined
from lading.planner.search import LayoutSearch, Tell
from lading.planner.space import Ask
from lading.sim.simulate import MEMORY_SPREAD
from lading.units import format_bytes, format_seconds

#: How often devices are doubled, and batch and sequence halved, before giving up.
_DOUBLINGS, _HALVINGS = 8, 3
#: Other numbers of devices, one by one, where none of this number divides.
_STEPS = 8
#: Layouts simulated to find the one that needs least.
_TRIED = 256
#: Narrower moments of the optimizer, with one scale a tensor: ``exp_avg_dtype`` of Transformer Engine's FusedAdam.
_MOMENTS = {"bfloat16": "16", "uint8": "8"}


@dataclass(frozen=True)
class Near:
    """An ask that can be met.

    Attributes:
        change: What is different, in words.
        tokens_per_s: Of all devices.
        devices: How many.
    """

    change: str
    layout: str
    step_s: float
    tokens_per_s: float
    devices: int

    def __str__(self) -> str:
        hours = self.devices * 1e9 / self.tokens_per_s / 3600
        digits = 0 if hours >= 100 else 1
        return (
            f"{self.change}: {self.layout}, step {format_seconds(self.step_s)}, {self.tokens_per_s:,.0f} tokens/s, "
            f"{self.tokens_per_s / self.devices:,.1f} a device, {hours:,.{digits}f} device-hours a billion tokens"
        )


def nearest(ask: Ask, budget: int, tell: Tell) -> list[Near]:
    """The least change of each kind with which something fits, as planned.

    Args:
        ask: Which nothing fits.
        budget: Bytes of a device with which there is a plan; 0 for none.
    """
    kinds = (_unpinned, _offloaded, _more_devices, _smaller, _shorter, _saved, _narrower)
    found = [_first(_budgets(ask, budget), tell), *(_first(kind(ask), tell) for kind in kinds)]
    return [near for near in found if near is not None]


_Asks = Iterator[tuple[str, Ask]]


def _unpinned(ask: Ask) -> _Asks:
    """Without one of the pins, those that cost memory first; without all."""
    first = ("offload", "recompute", "zero", "micro_batch", "schedule")
    for key in sorted(ask.pins, key=lambda key: first.index(key) if key in first else len(first)):
        pins = {name: value for name, value in ask.pins.items() if name != key}
        yield f"{key} not pinned to {_pinned(ask.pins[key])}", replace(ask, pins=pins)
    if len(ask.pins) > 1:
        yield "nothing pinned", replace(ask, pins={})


def _offloaded(ask: Ask) -> _Asks:
    """With the optimizer's states, or the pieces of parameters too, behind the device; on its host, then on disk."""
    if "offload" in ask.pins or ask.machine.host_device is None or ask.request.moves_matrices:
        return
    for what, tier in (("parameters", "host"), ("optimizer", "disk"), ("parameters", "disk")):
        if ask.machine.tier(tier) is not None:
            names = "optimizer states" if what == "optimizer" else "optimizer states and pieces of parameters"
            pins = {**ask.pins, "offload": (what,), "offload_to": tier}
            yield f"{names} on the {tier} (offload={what}, offload_to={tier})", replace(ask, pins=pins)


def _pinned(value: Any) -> str:
    return ("+".join(cast("tuple[str, ...]", value)) or "none") if isinstance(value, tuple) else str(value)


def _budgets(ask: Ask, budget: int) -> _Asks:
    """The least budget for which there is a plan, or all that the device has, where it has more."""
    whole = ask.machine.device.memory_bytes
    if 0 < ask.budget_bytes < whole:
        if ask.budget_bytes < budget < whole:
            yield f"a budget of {budget} bytes instead of {ask.budget_bytes}", replace(ask, budget_bytes=budget)
        yield f"all {whole} bytes of the device instead of {ask.budget_bytes}", replace(ask, budget_bytes=0)


def _devices(number: int) -> str:
    return f"{number:,} device{'s' if number > 1 else ''}"


def _more_devices(ask: Ask) -> _Asks:
    """Twice as many again and again, and between the last two half as many more."""
    pins = {key: value for key, value in ask.pins.items() if key != "dp"}
    for power in range(1, _DOUBLINGS + 1):
        for devices in (3 * ask.devices << power >> 2, ask.devices << power):
            if devices > ask.devices:
                yield f"{_devices(devices)} instead of {ask.devices:,}", replace(ask, devices=devices, pins=pins)


def _fewer_devices(ask: Ask) -> _Asks:
    """One by one."""
    for devices in range(ask.devices - 1, max(0, ask.devices - _STEPS - 1), -1):
        yield f"{_devices(devices)} instead of {ask.devices:,}", replace(ask, devices=devices)


def _some_devices_more(ask: Ask) -> _Asks:
    """One by one."""
    for devices in range(ask.devices + 1, ask.devices + _STEPS + 1):
        yield f"{_devices(devices)} instead of {ask.devices:,}", replace(ask, devices=devices)


def _larger(ask: Ask) -> _Asks:
    """The next multiples of 2, 4, ..., and of what is pinned."""
    each = ask.pins.get("dp", 1) * ask.pins.get("micro_batch", 1)
    for power in range(_DOUBLINGS):
        batch = -(-ask.global_batch // (each << power)) * (each << power)
        if batch > ask.global_batch:
            yield f"a global batch of {batch:,} instead of {ask.global_batch:,}", replace(ask, global_batch=batch)


def _smaller(ask: Ask) -> _Asks:
    for power in range(1, _HALVINGS + 1):
        batch = ask.global_batch >> power
        if batch << power == ask.global_batch and batch:
            yield f"a global batch of {batch:,} instead of {ask.global_batch:,}", replace(ask, global_batch=batch)


def _shorter(ask: Ask) -> _Asks:
    whole = ask.request.seq_len
    for power in range(1, _HALVINGS + 1):
        tokens = whole >> power
        request = replace(ask.request, seq_len=tokens)
        if not tokens:
            return
        longest = f", the longest of {ask.longest >> power:,}" if ask.longest else ""
        what = f"sequences of {tokens:,} tokens instead of {whole:,}{longest}"
        yield what, replace(ask, request=request, longest=ask.longest >> power)


def _saved(ask: Ask) -> _Asks:
    if ask.save != "sharded":
        yield f"checkpoints in pieces (--save sharded) instead of {ask.save}", replace(ask, save="sharded")


def _narrower(ask: Ask) -> _Asks:
    stack = ask.request.stack
    for dtype, bits in _MOMENTS.items():
        if stack.moments and DTYPE_BYTES[dtype] < DTYPE_BYTES[stack.moments_dtype]:
            request = replace(ask.request, stack=replace(stack, moments_dtype=dtype))
            what = f"a stack whose optimizer keeps moments of {bits} bits (moments_dtype {dtype}; other numbers)"
            yield what, replace(ask, request=request)


def _first(asks: _Asks, tell: Tell) -> Near | None:
    """The first ask that can be met."""
    for change, ask in asks:
        one = _met(replace(ask, top=1, proven=1), tell)
        if one is not None:
            return Near(
                change, str(one.layout), one.step_s, one.simulated.request.tokens / one.step_s, one.layout.devices
            )
    return None


def _met(ask: Ask, tell: Tell) -> Refined | None:
    """The best layout of an ask; None where it cannot be met."""
    try:
        if hopeless(ask):
            return None
        good, _, _ = refined(LayoutSearch(ask), room_of(ask), tell)
    except ConfigError:  # no layout of it can be
        return None
    return good[0] if good else None


def _lightest(search: LayoutSearch) -> Refined | None:
    """The layout that needs least of the device, of those whose host suffices; None where it never does.

    Layouts are simulated in the order of their bounds, until no bound left is below what the best needs.
    """
    best: Refined | None = None
    room = room_of(search.ask)
    for found in search.lightest(_TRIED):
        if best is not None and found.peak_bytes >= best.most("device"):
            return best
        one = refine(search, found, room)
        if one.most("host") <= room.host_bytes and (best is None or one.most("device") < best.most("device")):
            best = one
    return best


def hopeless(ask: Ask) -> str:
    """Why no layout can fit, whatever it is; "" where one may (``Least``)."""
    layout = replace(ask.request.layout, precision=ask.pins.get("precision", ask.request.layout.precision))
    least = Least.of(replace(ask.request, layout=layout), ask.table, ask.devices)
    room, hosted = room_of(ask), ask.pins.get("offload")
    if ask.pins.get("offload_to", "host") != "host" and hosted != ():
        return ""
    here = (
        f"parameters, gradients and optimizer states, spread over all devices, take {format_bytes(least.device_bytes)} "
        f"of each, which has {format_bytes(room.device_bytes)}"
    )
    there = (
        f"with the optimizer on the host they take {format_bytes(least.host_bytes)} of each device's part of the "
        f"host's memory, which is {format_bytes(room.host_bytes)}"
    )
    can_host = ask.machine.host_device is not None and ask.machine.tier("host") is not None and hosted != ()
    reasons: list[str] = []
    if not hosted:
        reasons.append(here if least.device_bytes > room.device_bytes else "")
    if can_host:
        reasons.append(there if least.host_bytes > room.host_bytes else "")
    return "; ".join(reasons) if all(reasons) else ""


def infeasible(
    search: LayoutSearch, over: Sequence[Refined], proof: Proof | None, tell: Tell
) -> PlanInfeasible | ConfigError:
    """Why nothing fits, how far that is proven, and what would.

    Args:
        over: All layouts that were simulated.
        proof: None where nothing was searched as it is ``hopeless``.
    Raises:
        ConfigError: no layout can be.
    """
    ask, room = search.ask, room_of(search.ask)
    if proof is None:
        list(search.families(tell))  # raises where none can be
    one = lightest = _lightest(search)
    if one is None:
        tried = list(over) or [refine(search, found, room) for found in search.lightest(1)]
        if not tried:
            return impossible(ask, search.none_can_be(), tell)
        one = min(tried, key=lambda each: (each.over_bytes, each.order))
    budget = budget_for(lightest.most("device"), ask.machine) if lightest is not None else 0
    moment, tier, _ = one.binding
    there, needed = room.device_bytes if tier == "device" else room.host_bytes, one.peaks[moment][tier]
    kept = f", {MEMORY_SPREAD:.0%} kept for what a prediction may miss" if tier == "device" else ""
    lines = [
        f"{_verdict(search, proof)}: the one that needs least, {one.layout}, needs {format_bytes(needed)} of the "
        f"{tier} at moment {moment!r}, {format_bytes(one.over_bytes)} more than there are ({format_bytes(there)}{kept})"
    ]
    if proof is None:
        lines.append(f"none can: {hopeless(ask)}")
    near = nearest(ask, budget, tell)
    lines += ["nearest plans that fit:"] if near else ["nothing near it fits either: pin less, or take another machine"]
    lines += [f"  {each}" for each in near]
    return PlanInfeasible("\n".join(lines), missing_bytes=one.over_bytes, smallest_budget_bytes=budget)


def impossible(ask: Ask, why: str, tell: Tell) -> ConfigError:
    """That no layout of an ask can be, and what is near it and can.

    Args:
        why: What the search says.
    """
    kinds = (_unpinned, _fewer_devices, _some_devices_more, _larger)
    near = [each for each in (_first(kind(ask), tell) for kind in kinds) if each is not None]
    return ConfigError("\n".join([why, *(["nearest plans:"] if near else []), *(f"  {each}" for each in near)]))


def _verdict(search: LayoutSearch, proof: Proof | None) -> str:
    devices = _devices(search.ask.devices)
    if proof is None:
        return f"no layout of {devices} fits"
    if proof.is_whole:
        simulated = f", {proof.simulated:,} of them simulated" if proof.simulated else ", by their bounds"
        return f"no layout of {devices} fits, proven for all {search.counted:,} of the space{simulated}"
    return (
        f"no layout of {devices} was found that fits, which is not proven: of {search.counted:,}, {proof.simulated:,} "
        "were simulated, the fastest and those that need least memory first"
    )
