"""Layouts: the fastest way to spread a training step over devices, found in the whole joint space.

The optimisation. A layout x = (block, pipe, cut) has a block (tp, cp, ep, etp, sp, micro-batch, how keys and values
meet, precision, recompute mode), a pipe (pp, vpp, schedule, layers recomputed) and a cut (zero, shard); dp follows.
With T(x) the seconds of a step by events and M_k(x) the bytes at moment k,

    minimize    T(x)
    subject to  tp cp pp dp = devices                              Space.meshes, Space.pipes, pipes.valid
                dp * micro-batch divides the global batch          pipes.valid
                micro-batches and chunks as the schedule wants     pipes.valid
                lengths divide as the model's cut needs            parallel.ranks.rank_segment, of each block
                M_k(x) <= budget, k over the five moments          moments.moments_of, refine.refined
                pinned choices                                     Space
                precisions that stack and device have              space.precisions_of

How it is solved. T and M are bounded from below by closed forms on the same table of costs (``bounds.step_bounds``,
``bounds.peak_bounds``): a block is priced once by the simulator's own code, its pipes and cuts are arrays. In the order
of their bounds the layouts are then simulated by events (``refine.refined``) until ``top`` fit and no bound of what is
left is below the slowest of these: the best is then proven within the model, with a bucket of gradients a block. Of
equally fast layouts what needs least memory comes first, then the first by name (``Refined.order``): every process
finds the same.

[Note: size of buckets]
Of the fastest layout other sizes of gradient buckets are tried last (``best_bucket``). Gradients of G bytes come evenly
while the last backward runs for B seconds, and t(x) is what reducing x bytes takes, latency included. In n buckets the
step is longer by

    E(n) = max(t(G / n), n t(G / n) - (1 - 1 / n) B)

as the last bucket waits for the last gradient, or all buckets for the network: few are late, many cost latency. ``E``
is convex in n but for steps of t and for how full the last bucket is, so sizes a factor of two apart are tried from the
middle on as long as the next one is better, then quarters of that around the best (``best_bucket``). Each is timed with
the units as they are (``lading.sim.step``) or the stages (``lading.program.emit``); in a pipeline with two rounds of
micro-batches, as more before them change nothing. The best is simulated. A size is taken if it saves a share worth
having of the step; else a block is a bucket, as the stacks have it.

[Note: nearest]
Where no layout fits, requests like it that some layout fits are planned, each with what it costs. With q a request and
d_k(q', q) how far another is from it in one kind k of change (a pin less, more devices, a smaller batch, shorter
sequences, a larger budget, other checkpoints, narrower states),

    minimise    d_k(q', q)   for each k on its own                                      ``_first_feasible``, ``nearest``
    subject to  q' differs from q in k only                                                ``_unpinned``, ``_budgets``,
                                                          ``_more_devices``, ``_smaller``, ``_shorter``, ``_saved``, ...
                the least that any layout of q' needs fits                                 ``hopeless``
                a layout of q' was found that fits at all five moments                     ``_met``

The least budget is that of the layout that needs least: layouts are simulated in the order of their bounds of bytes
until no bound left is below what the best one needs (``_lightest``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from lading.errors import ConfigError, PlanInfeasible
from lading.ir.action import DEVICE
from lading.ir.graph import DTYPE_BYTES
from lading.ir.plan import Choices, Plan, Predictions
from lading.memory.verify import verify
from lading.planner.least import Least
from lading.planner.peaks import budget_for, room_of
from lading.planner.refine import Proof, Refined, refine, refined
from lading.planner.search import LayoutSearch, Tell
from lading.planner.space import Space
from lading.sim.simulate import MEMORY_SPREAD, Priced, Simulated, seconds_until_reduced, simulate
from lading.units import format_bytes, format_capacity, format_seconds

#: Actions of the longest Program that is saved; a longer one is emitted again from the layout.
_MOST_ACTIONS = 20_000
#: Faster layouts that do not fit, shown beside those that do.
_OVER = 4


@dataclass(frozen=True)
class Layouts:
    """Result of a search for layouts.

    Attributes:
        best: Layouts that fit, the fastest first.
        over: Layouts faster than the best that do not fit.
        counted: Number of layouts of the space.
        evaluated: Number of these that were bounded one by one.
        left_out: Layouts that were not searched, in words.
        bucket: Effect of other sizes of the winner's buckets; None where it has none.
    """

    space: Space
    best: tuple[Refined, ...]
    over: tuple[Refined, ...]
    counted: int
    evaluated: int
    proof: Proof
    left_out: tuple[str, ...]
    bucket: BucketComparison | None = None

    @property
    def chosen(self) -> Simulated:
        """Fastest layout, simulated with the size of its buckets."""
        return self.bucket.simulated if self.bucket and self.bucket.is_worth else self.winner.simulated

    @property
    def winner(self) -> Refined:
        """Fastest layout that fits."""
        return self.best[0]

    @property
    def proven(self) -> int:
        """Number of the best layouts that no other layout of the space comes before."""
        return sum(one.step_s <= self.proof.rest_s for one in self.best)

    @property
    def bound_s(self) -> float:
        """Seconds that no layout of the space that fits is below."""
        return min(self.winner.step_s, self.proof.rest_s)


def find_layouts(space: Space, tell: Tell = lambda done, of, what: None) -> Layouts:
    """Find the fastest layouts: search, bound and simulate.

    Args:
        tell: Called with the number done, of how many, and what they are.
    Raises:
        ConfigError: no layout can be.
        PlanInfeasible: none fits; it names the binding moment, by how much, and the nearest plans that fit.
    """
    search, room = LayoutSearch(space), room_of(space)
    if hopeless(space):
        raise infeasible(search, [], None, tell)
    try:
        best, over, proof = refined(search, room, tell)
    except ConfigError as error:
        raise impossible(space, str(error), tell) from error
    if not best:
        raise infeasible(search, over, proof, tell)
    faster = [refine(search, bounded, room) for bounded in search.nearly(2 * _OVER, best[0].step_s, room[DEVICE])]
    rejected = sorted((one for one in (*over, *faster) if one.step_s < best[0].step_s), key=lambda one: one.order)
    return Layouts(
        space,
        tuple(best[: space.wanted_request.top]),
        tuple(rejected[:_OVER]),
        search.counted,
        search.evaluated,
        proof,
        space.left_out(),
        best_bucket(best[0].simulated),
    )


def cluster_plan(found: Layouts, version: str) -> Plan:
    """Make the plan of the winning layout, to be saved, and prove its lists.

    Raises:
        ProgramError: ranks would wait for each other, or use what is not gathered: a fault of Lading's own.
    """
    winner, space = found.winner, found.space
    if (listed := found.chosen.step.listed) is not None:
        verify(listed.program)
    request = replace(
        space.wanted_request,
        machine_fingerprint=space.machine.fingerprint,
        seq_len=space.request.seq_len,
        budgets={DEVICE: space.wanted_request.budget_bytes or space.machine.device.memory_bytes},
        policy="layout search",
    )
    step_s = found.chosen.step.step_s
    return Plan(
        version=version,
        request=request,
        layout=str(found.chosen.request.layout),
        choices=Choices(),
        program=_program_lines(found.chosen),
        predictions=Predictions(step_s=step_s, lower_bound_s=min(found.bound_s, step_s), peaks=winner.peaks),
        assumptions=winner.simulated.assumed,
    )


def _program_lines(simulated: Simulated) -> tuple[str, ...]:
    """Write the Program of a step as text, line by line; () where it is too long to be saved."""
    listed = simulated.step.listed
    if listed is None or sum(map(len, listed.program.ranks)) > _MOST_ACTIONS:
        return ()
    return tuple(listed.program.text().splitlines())


#: Sizes that are tried: so many bytes, and twice as many again and again; of more buckets the latencies add up. Less of
#: a step than the share is not taken.
_LEAST_BYTES, _MOST_BUCKETS, _WORTH = 1 << 20, 512, 1e-3


@dataclass(frozen=True)
class BucketComparison:
    """Effect of the size of gradient buckets on a layout.

    Attributes:
        block_bytes: Bytes of the gradients of the largest block, as stacks reduce them.
        best_bytes: Best of the other sizes.
        simulated: Step with that size.
        saves_s: Seconds it saves of a step; negative where none is better than a block each.
        is_worth: Whether that is a share worth having.
    """

    block_bytes: int
    best_bytes: int
    simulated: Simulated
    saves_s: float
    is_worth: bool

    def __str__(self) -> str:
        sentence = f"gradients: reduced a block at a time, up to {format_capacity(self.block_bytes)}"
        share = self.saves_s / (self.simulated.step.step_s + self.saves_s)
        size = f"buckets of {format_capacity(self.best_bytes)}"
        if self.is_worth:
            return f"gradients: reduced in {size}, which saves {share:.1%} of the step against a block at a time"
        return f"{sentence}; {size}, the best of other sizes, would change the step by {-share:+.2%}"


def best_bucket(found: Simulated) -> BucketComparison | None:
    """Find the best size of gradient buckets for a simulated layout; None where nothing is reduced beside backward."""
    layout, stack = found.request.layout, found.request.stack
    alone = layout.dp * layout.cp == 1 or layout.zero >= (2 if layout.is_pipeline else 3)
    if alone or not stack.overlap_grad_reduce or found.machine.processes is not None:
        return None
    width = DTYPE_BYTES[stack.gradient_dtype]
    priced = Priced(found.machine, found.table, found.segments)
    whole = width * max(sum(stage.trained.values()) for stage in found.step.stages)
    blocks = [each for each in found.segments if each.segment.enters and each.segment.leaves]
    block = width * max(sum(each.trained.values()) for each in blocks or found.segments)
    tried: dict[int, float] = {}

    def step_s(size: int) -> float:
        if size not in tried:
            tried[size] = seconds_until_reduced(found, replace(layout, bucket_bytes=size))
        return tried[size]

    size = _LEAST_BYTES
    while size * _MOST_BUCKETS < whole:
        size *= 2
    octaves = [size]
    while octaves[-1] < whole:
        octaves.append(2 * octaves[-1])
    first = _descend(octaves, len(octaves) // 2, step_s)
    size = _descend([round(first * 2 ** (quarter / 4)) for quarter in range(-3, 4)], 3, step_s)
    best = simulate(replace(found.request, layout=replace(layout, bucket_bytes=size)), found.table, priced)
    saves_s = found.step.step_s - best.step.step_s
    return BucketComparison(block, size, best, saves_s, saves_s > _WORTH * found.step.step_s)


def _descend(sizes: Sequence[int], start: int, step_s: Callable[[int], float]) -> int:
    """Go from a size to the next as long as that is better, or smaller and as good; returns the last."""
    at = start
    while at > 0 and step_s(sizes[at - 1]) <= step_s(sizes[at]):
        at -= 1
    if at == start:
        while at < len(sizes) - 1 and step_s(sizes[at + 1]) < step_s(sizes[at]):
            at += 1
    return sizes[at]


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
    """Request that can be met.

    Attributes:
        change: Difference from what was asked, in words.
        tokens_per_s: Tokens a second of all devices.
        devices: Number of devices.
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


def nearest(space: Space, budget: int, tell: Tell) -> list[Near]:
    """Find the least change of each kind with which some layout fits, as planned.

    Args:
        space: Space in which nothing fits.
        budget: Bytes of a device with which there is a plan; 0 for none.
    """
    kinds = (_unpinned, _offloaded, _more_devices, _smaller, _shorter, _saved, _narrower)
    candidates = [
        _first_feasible(_budgets(space, budget), tell),
        *(_first_feasible(kind(space), tell) for kind in kinds),
    ]
    return [near for near in candidates if near is not None]


_Spaces = Iterator[tuple[str, Space]]


def _unpinned(space: Space) -> _Spaces:
    """Yield spaces without one of the pins, those that cost memory first; then without all."""
    first = ("offload", "recompute", "zero", "micro_batch", "schedule")
    for key in sorted(space.wanted_request.pins, key=lambda key: first.index(key) if key in first else len(first)):
        pins = {name: value for name, value in space.wanted_request.pins.items() if name != key}
        yield f"{key} not pinned to {_pinned(space.wanted_request.pins[key])}", space.asking(pins=pins)
    if len(space.wanted_request.pins) > 1:
        yield "nothing pinned", space.asking(pins={})


def _offloaded(space: Space) -> _Spaces:
    """Yield spaces with the optimizer's states, or pieces of parameters too, on each tier of the machine."""
    if "offload" in space.wanted_request.pins or space.machine.host_device is None or space.request.moves_matrices:
        return
    for tier in (tier.name for tier in space.machine.tiers):
        for what in ("parameters",) if tier == space.machine.host_tier else ("optimizer", "parameters"):
            names = "optimizer states" if what == "optimizer" else "optimizer states and pieces of parameters"
            pins = {**space.wanted_request.pins, "offload": (what,), "offload_to": tier}
            yield f"{names} on the {tier} (offload={what}, offload_to={tier})", space.asking(pins=pins)


def _pinned(value: Any) -> str:
    return ("+".join(cast("tuple[str, ...]", value)) or "none") if isinstance(value, tuple) else str(value)


def _budgets(space: Space, budget: int) -> _Spaces:
    """Yield spaces of a larger budget: the least that there is a plan for, then all that the device has."""
    whole = space.machine.device.memory_bytes
    if 0 < space.wanted_request.budget_bytes < whole:
        if space.wanted_request.budget_bytes < budget < whole:
            yield (
                f"a budget of {budget} bytes instead of {space.wanted_request.budget_bytes}",
                space.asking(budgets={DEVICE: budget}),
            )
        yield (
            f"all {whole} bytes of the device instead of {space.wanted_request.budget_bytes}",
            space.asking(budgets={}),
        )


def _devices(number: int) -> str:
    return f"{number:,} device{'s' if number > 1 else ''}"


def _more_devices(space: Space) -> _Spaces:
    """Yield spaces of 3/2, 2, 3, 4, 6, 8, ... times as many devices."""
    pins = {key: value for key, value in space.wanted_request.pins.items() if key != "dp"}
    for power in range(1, _DOUBLINGS + 1):
        for devices in (3 * space.wanted_request.devices << power >> 2, space.wanted_request.devices << power):
            if devices > space.wanted_request.devices:
                yield (
                    f"{_devices(devices)} instead of {space.wanted_request.devices:,}",
                    space.asking(devices=devices, pins=pins),
                )


def _fewer_devices(space: Space) -> _Spaces:
    """Yield spaces of fewer devices, one by one."""
    for devices in range(space.wanted_request.devices - 1, max(0, space.wanted_request.devices - _STEPS - 1), -1):
        yield f"{_devices(devices)} instead of {space.wanted_request.devices:,}", space.asking(devices=devices)


def _some_devices_more(space: Space) -> _Spaces:
    """Yield spaces of more devices, one by one."""
    for devices in range(space.wanted_request.devices + 1, space.wanted_request.devices + _STEPS + 1):
        yield f"{_devices(devices)} instead of {space.wanted_request.devices:,}", space.asking(devices=devices)


def _larger(space: Space) -> _Spaces:
    """Yield spaces of larger global batches: the next multiples of 1, 2, 4, ... times what is pinned."""
    each = space.wanted_request.pins.get("dp", 1) * space.wanted_request.pins.get("micro_batch", 1)
    for power in range(_DOUBLINGS):
        batch = -(-space.wanted_request.global_batch // (each << power)) * (each << power)
        if batch > space.wanted_request.global_batch:
            yield (
                f"a global batch of {batch:,} instead of {space.wanted_request.global_batch:,}",
                space.asking(global_batch=batch),
            )


def _smaller(space: Space) -> _Spaces:
    for power in range(1, _HALVINGS + 1):
        batch = space.wanted_request.global_batch >> power
        if batch << power == space.wanted_request.global_batch and batch:
            yield (
                f"a global batch of {batch:,} instead of {space.wanted_request.global_batch:,}",
                space.asking(global_batch=batch),
            )


def _shorter(space: Space) -> _Spaces:
    whole = space.request.seq_len
    for power in range(1, _HALVINGS + 1):
        tokens = whole >> power
        request = replace(space.request, seq_len=tokens)
        if not tokens:
            return
        longest = f", the longest of {space.wanted_request.longest >> power:,}" if space.wanted_request.longest else ""
        what = f"sequences of {tokens:,} tokens instead of {whole:,}{longest}"
        asked = replace(space.wanted_request, seq_len=tokens, longest=space.wanted_request.longest >> power)
        yield what, replace(space, wanted_request=asked, request=request)


def _saved(space: Space) -> _Spaces:
    if space.wanted_request.save != "sharded":
        yield (
            f"checkpoints in pieces (--save sharded) instead of {space.wanted_request.save}",
            space.asking(save="sharded"),
        )


def _narrower(space: Space) -> _Spaces:
    stack = space.request.stack
    for dtype, bits in _MOMENTS.items():
        if stack.moments and DTYPE_BYTES[dtype] < DTYPE_BYTES[stack.moments_dtype]:
            request = replace(space.request, stack=replace(stack, moments_dtype=dtype))
            what = f"a stack whose optimizer keeps moments of {bits} bits (moments_dtype {dtype}; other numbers)"
            yield what, replace(space, request=request)


def _first_feasible(spaces: _Spaces, tell: Tell) -> Near | None:
    """Find the first space whose request can be met."""
    for change, space in spaces:
        one = _met(space.asking(top=1, proven=1), tell)
        if one is not None:
            return Near(
                change, str(one.layout), one.step_s, one.simulated.request.tokens / one.step_s, one.layout.devices
            )
    return None


def _met(space: Space, tell: Tell) -> Refined | None:
    """Plan the best layout of a space; None where none fits."""
    try:
        if hopeless(space):
            return None
        good, _, _ = refined(LayoutSearch(space), room_of(space), tell)
    except ConfigError:  # no layout of it can be
        return None
    return good[0] if good else None


def _lightest(search: LayoutSearch) -> Refined | None:
    """Find the layout that needs least of the device, of those whose host suffices; None where it never does.

    Layouts are simulated in the order of their bounds, until no bound left is below what the best needs.
    """
    best: Refined | None = None
    room = room_of(search.space)
    for bounded in search.lightest(_TRIED):
        if best is not None and bounded.peak_bytes >= best.peak_bytes_of(DEVICE):
            return best
        one = refine(search, bounded, room)
        if _fits_behind(one) and (best is None or one.peak_bytes_of(DEVICE) < best.peak_bytes_of(DEVICE)):
            best = one
    return best


def _fits_behind(one: Refined) -> bool:
    """Whether all fits that a layout needs of the tiers behind the device."""
    return all(one.peak_bytes_of(tier) <= size for tier, size in one.room.items() if tier != DEVICE)


def hopeless(space: Space) -> str:
    """Say why no layout can fit, whatever it is; "" where one may (``Least``)."""
    layout = replace(
        space.request.layout, precision=space.wanted_request.pins.get("precision", space.request.layout.precision)
    )
    min_needs = Least.of(replace(space.request, layout=layout), space.table, space.wanted_request.devices)
    room, hosted = room_of(space), space.wanted_request.pins.get("offload")
    if not space.offloads_to_host and hosted != ():
        return ""
    device_text = (
        f"parameters, gradients and optimizer states, spread over all devices, take "
        f"{format_bytes(min_needs.device_bytes)} of each, which has {format_bytes(room[DEVICE])}"
    )
    host_text = (
        f"with the optimizer on the host they take {format_bytes(min_needs.host_bytes)} of each device's part of the "
        f"host's memory, which is {format_bytes(room.get(space.machine.host_tier, 0))}"
    )
    can_host = space.machine.host_device is not None and bool(space.machine.host_tier) and hosted != ()
    reasons: list[str] = []
    if not hosted:
        reasons.append(device_text if min_needs.device_bytes > room[DEVICE] else "")
    if can_host:
        reasons.append(host_text if min_needs.host_bytes > room.get(space.machine.host_tier, 0) else "")
    return "; ".join(reasons) if all(reasons) else ""


def infeasible(
    search: LayoutSearch, over: Sequence[Refined], proof: Proof | None, tell: Tell
) -> PlanInfeasible | ConfigError:
    """Make the error that says why nothing fits, how far that is proven, and what would.

    Args:
        over: All layouts that were simulated.
        proof: None where nothing was searched as it is ``hopeless``.
    Raises:
        ConfigError: no layout can be.
    """
    space, room = search.space, room_of(search.space)
    if proof is None:
        list(search.families(tell))  # raises where none can be
    one = lightest = _lightest(search)
    if one is None:
        tried = list(over) or [refine(search, bounded, room) for bounded in search.lightest(1)]
        if not tried:
            return impossible(space, search.none_can_be(), tell)
        one = min(tried, key=lambda each: (each.over_bytes, each.order))
    budget = budget_for(lightest.peak_bytes_of(DEVICE), space.machine) if lightest is not None else 0
    moment, tier, _ = one.binding
    room_bytes, needed = room[tier], one.peaks[moment][tier]
    margin_text = f", {MEMORY_SPREAD:.0%} kept for what a prediction may miss" if tier == DEVICE else ""
    lines = [
        f"{_verdict(search, proof)}: the one that needs least, {one.layout}, needs {format_bytes(needed)} of the "
        f"{tier} at moment {moment!r}, {format_bytes(one.over_bytes)} more than there are "
        f"({format_bytes(room_bytes)}{margin_text})"
    ]
    if proof is None:
        lines.append(f"none can: {hopeless(space)}")
    near = nearest(space, budget, tell)
    lines += ["nearest plans that fit:"] if near else ["nothing near it fits either: pin less, or take another machine"]
    lines += [f"  {each}" for each in near]
    return PlanInfeasible("\n".join(lines), missing_bytes=one.over_bytes, smallest_budget_bytes=budget)


def impossible(space: Space, why: str, tell: Tell) -> ConfigError:
    """Make the error that says that no layout of a space can be, and what is near it and can.

    Args:
        why: Reason that the search gives.
    """
    kinds = (_unpinned, _fewer_devices, _some_devices_more, _larger)
    near = [each for each in (_first_feasible(kind(space), tell) for kind in kinds) if each is not None]
    return ConfigError("\n".join([why, *(["nearest plans:"] if near else []), *(f"  {each}" for each in near)]))


def _verdict(search: LayoutSearch, proof: Proof | None) -> str:
    devices = _devices(search.space.wanted_request.devices)
    if proof is None:
        return f"no layout of {devices} fits"
    if proof.is_whole:
        simulated = f", {proof.simulated:,} of them simulated" if proof.simulated else ", by their bounds"
        return f"no layout of {devices} fits, proven for all {search.counted:,} of the space{simulated}"
    return (
        f"no layout of {devices} was found that fits, which is not proven: of {search.counted:,}, {proof.simulated:,} "
        "were simulated, the fastest and those that need least memory first"
    )
