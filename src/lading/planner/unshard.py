"""Selective unsharding: which parameters stay gathered, in which buckets they are gathered, and how early.

[Note: unsharding as optimisation]
Parameters are atoms a = 1..n in the order of forward, each with x_a gathered bytes. Chosen are a partition of them into
buckets of atoms in a row, and of each bucket g how long it stays, k_g, and how many behind it are asked for as it
begins, e_g:

    minimise   T(buckets, k, e)                                       seconds of a step
    subject to P(buckets, k, e) <= budget                             bytes at the worst moment
               every atom is in one bucket, buckets are atoms in a row
               k_g in {release, backward, forward, step},  e_g in {1, 2, 3}

T and P are the seconds and the bytes of the list of such a step (``sim.gathers.gathered_step``): one device, one
network, in the order in which FSDP2 asks. The search evaluates them without a list (``unshardwalk.walked_step``).
Constraints: ``sim.buckets.Costs.courses`` refuses what is no partition; ``_Search.fits`` has the budget;
``bucketing.partition`` has the buckets that are tried (half a block, and 1 to 8 blocks; a small one first, if that is
faster), ``_orders`` the orders in which they are kept. In one order the bytes at the peak rise with each bucket that is
kept, so that the most that fit are found by bisection (``_Search.fill``); of those that do not fit, the atoms at the
end or the start are kept, down to single modules. From the fastest found, borders are moved, put in and left out and
stays and distances (1 to 3) changed, one at a time, while that makes the step faster (``_Search._nearby``); what is
left of the budget is filled by modules that fit (``_Search._topped``). The fastest found wins; of those within a
millionth of it, or within half a percent where they leave more than 2% of the budget, the fullest (``_best``);
``_Search.why`` says why no more is used. ZeRO-3, ZeRO-2 and reverse-greedy are among those tried, so the plan is never
slower than any of them that fits. ``unshardbound`` has the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lading.errors import ConfigError, PlanInfeasible
from lading.ir.action import DEVICE
from lading.ir.plan import Choices, Plan, Predictions, ShardedUnit, UnitResidency
from lading.ir.reporting import UnshardRow
from lading.ir.request import Request, StepRequest
from lading.ir.table import ModelTable
from lading.memory.verify_ranks import verify_ranks
from lading.planner.bucketing import borders, children, halves, keeping, neighbors, partition, runs
from lading.planner.unshardbound import lower_bound
from lading.planner.unshardwalk import Walked, walked_step
from lading.sim.buckets import Bucket, Costs, names_of
from lading.sim.gathers import Gathered, gathered_step
from lading.sim.modules import Modules, modules_of
from lading.sim.simulate import Priced
from lading.units import format_bytes

POLICIES = ("zero3", "zero2", "reverse-greedy", "residency")
#: Plans whose times differ by less are as fast; where they do not fill the budget to ``_FULL``, by less than the next.
_ALIKE, _FULL = (1e-6, 1e-3, 5e-3), 0.98
#: Blocks of a bucket; 0 for half a block.
_SIZES = (1, 0, 2, 3, 4, 6, 8)
#: Buckets in a row of which a part is tried, when filling what is left of the budget.
_TRIED = 16
#: Buckets and blocks that are walked through in search of a faster plan nearby.
_WORK = 30_000


@dataclass(frozen=True)
class Chosen:
    """Groups of gathered parameters that a policy chooses.

    Attributes:
        budget_bytes: Bytes of a device.
        rows: Comparison of all policies.
        gathered: Step, with what is there at its peak.
        peak_bytes: Bytes at the peak of each rank.
        why: Why no more of the budget is used; "" for policies that do not try to.
    """

    policy: str
    budget_bytes: int
    units: tuple[ShardedUnit, ...]
    step_s: float
    bound_s: float
    peak_bytes: int
    rows: tuple[UnshardRow, ...]
    gathered: Gathered
    buckets: tuple[Bucket, ...]
    modules: Modules
    why: str = ""


def choose_groups(
    request: StepRequest,
    table: ModelTable,
    budget_bytes: int = 0,
    policy: str = "residency",
    *,
    parts: Priced | None = None,
) -> Chosen:
    """Choose which parameters stay gathered under a budget, and in which groups.

    Args:
        request: A step with a layout of zero3 and no pipeline.
        budget_bytes: Bytes of each device; 0 for all that it has.
        policy: One of ``POLICIES``.
        parts: Segments that ``priced`` gave for the request, if they are there.
    Raises:
        ConfigError: no such policy, or groups of such a layout are not chosen.
        PlanInfeasible: the policy's choice does not fit.

    Example:
        ``choose_groups(request, table, 40 * 10**9).units``
    """
    if policy not in POLICIES:
        raise ConfigError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
    modules = modules_of(request, table, parts)
    device = modules.machine.device
    budget = budget_bytes or device.memory_bytes - device.overhead_bytes
    search = _Search(modules, budget)
    bound = lower_bound(modules, budget)
    plans = {name: search.best_of_policy(name) for name in POLICIES}
    steps = {name: gathered_step(search.costs, plan) for name, (plan, _) in plans.items()}
    rows = tuple(_row(name, plans[name][0], step, budget, bound) for name, step in steps.items())
    buckets, step = plans[policy][0], steps[policy]
    verify_ranks(step.program)
    if step.peak_bytes > budget:
        missing = step.peak_bytes - budget
        raise PlanInfeasible(
            f"unsharding by {policy}: expected at most {budget:,} bytes, got {step.peak_bytes:,}, of which "
            f"{modules.state_bytes:,} are states; raise the budget by {missing:,}, recompute more, or cut over more "
            "devices",
            missing_bytes=missing,
            smallest_budget_bytes=min(each.peak_bytes for _, each in plans.values()),
        )
    units = tuple(_unit(modules, search.costs, bucket) for bucket in buckets)
    why = search.why(plans[policy]) if policy == "residency" else ""
    return Chosen(policy, budget, units, step.step_s, bound, step.peak_bytes, rows, step, buckets, modules, why)


def neighbor_peaks(request: StepRequest, table: ModelTable) -> tuple[int, int]:
    """Bytes at the peak of ZeRO-3 and of ZeRO-2, with a group for each block."""
    search = _Search(modules_of(request, table), 0)
    low, high = (search.best_of_policy(policy)[1].peak_bytes for policy in POLICIES[:2])
    return low, high


def plan_of(chosen: Chosen, version: str) -> Plan:
    """Make the plan that ``lading.apply`` takes.

    Args:
        version: Version of Lading.
    """
    modules = chosen.modules
    step, layout = modules.request, modules.request.layout
    again = tuple(path for block, path in modules.order if modules.blocks[block].is_recomputed)
    low = "" if layout.precision == "fp32" else "float16" if layout.precision == "fp16" else "bfloat16"
    request = Request(
        model=step.name,
        machine=step.machine,
        machine_fingerprint=modules.machine.fingerprint,
        devices=layout.devices,
        budgets={DEVICE: chosen.budget_bytes},
        global_batch=layout.global_batch,
        seq_len=step.seq_len,
        layout=str(layout),
        stack=step.stack.name,
        network=step.network,
        optimizer=step.optimizer,
        policy=chosen.policy,
    )
    choices = Choices(
        units=chosen.units,
        recomputed=again if layout.recompute == "full" else (),
        gather_dtype=step.stack.gather_dtype or low,
        reduce_dtype=step.stack.gradient_dtype,
    )
    peaks = {"step": {DEVICE: chosen.peak_bytes}}
    return Plan(
        version=version,
        request=request,
        layout=str(layout),
        choices=choices,
        predictions=Predictions(step_s=chosen.step_s, lower_bound_s=chosen.bound_s, peaks=peaks),
        assumptions=step.assumed,
    )


def _row(policy: str, buckets: Sequence[Bucket], step: Gathered, budget: int, bound: float) -> UnshardRow:
    return UnshardRow(
        policy=policy,
        step_s=step.step_s,
        exposed_s=step.exposed_s,
        peak_bytes=step.peak_bytes,
        fill=step.peak_bytes / budget,
        gathers=(sum(step.forward), sum(step.backward)),
        buckets=len(buckets),
        gap=step.step_s / bound - 1 if step.peak_bytes <= budget else None,
    )


def _unit(modules: Modules, costs: Costs, bucket: Bucket) -> ShardedUnit:
    return ShardedUnit(
        modules=names_of(modules, bucket),
        reshard_after_forward=not bucket.keep.until_backward,
        reshard_after_backward=not bucket.keep.until_forward,
        unshard_in_backward=bucket.gather_again,
        prefetch_forward=bucket.ahead_forward,
        prefetch_backward=bucket.ahead_backward,
        offload="parameters" in modules.request.layout.offload,
        unsharded_bytes=costs.of(bucket).gathered,
    )


#: Buckets of a plan, and the step they make.
_WalkedBuckets = tuple[tuple[Bucket, ...], Walked]


class _Search:
    """Search over plans of one model under one budget; a plan is evaluated once."""

    def __init__(self, modules: Modules, budget: int) -> None:
        self.modules = modules
        self.budget = budget
        self.costs = Costs(modules)
        self.keep = UnitResidency.STEP if modules.request.layout.micro_batches > 1 else UnitResidency.BACKWARD
        self.stays = (
            tuple(UnitResidency) if self.keep is UnitResidency.STEP else (UnitResidency.RELEASE, UnitResidency.BACKWARD)
        )
        self._steps: dict[tuple[Bucket, ...], Walked] = {}
        self._peaks: dict[tuple[Bucket, ...], int] = {}
        self.fuller: list[float] = []

    def step(self, buckets: Sequence[Bucket]) -> Walked:
        """Evaluate a step with these buckets, or look it up."""
        key = tuple(buckets)
        if key not in self._steps:
            self._steps[key] = walked_step(self.costs, key)
        return self._steps[key]

    def peak(self, buckets: Sequence[Bucket]) -> int:
        """Bytes at the peak of a plan.

        It comes by the second micro-batch, or the next if buckets stay between them.
        """
        key = tuple(buckets)
        if key in self._steps:
            return self._steps[key].peak_bytes
        if key not in self._peaks:
            walked = 3 if any(bucket.keep is UnitResidency.FORWARD for bucket in key) else 2
            self._peaks[key] = walked_step(self.costs, key, walked=walked).peak_bytes
        return self._peaks[key]

    def fits(self, buckets: Sequence[Bucket]) -> bool:
        """Whether the budget holds a plan."""
        return self.peak(buckets) <= self.budget

    def best_of_policy(self, policy: str) -> _WalkedBuckets:
        """Find the buckets that a policy comes to, and their step."""
        if policy == "residency":
            tried = list(self._residency())
            fitting = [each for each in tried if each[1].peak_bytes <= self.budget]
            if not fitting:
                return min(tried, key=lambda each: each[1].peak_bytes)
            plain = [step.step_s for _, step in tried[:3] if step.peak_bytes <= self.budget]
            fitting += self._nearby(min(fitting, key=lambda each: each[1].step_s))
            best = _best(fitting, self.budget, min(plain, default=float("inf")))
            fitting += self._topped(best)
            best = _best(fitting, self.budget, min(plain, default=float("inf")))
            self.fuller = [step.step_s for _, step in fitting if step.peak_bytes > best[1].peak_bytes]
            return best
        whole = self.zero3(partition(self.modules, 1))
        if policy == "zero2":
            whole = tuple(replace(bucket, keep=self.keep) for bucket in whole)
        if policy == "reverse-greedy":
            whole = self.greedy(whole)
        return whole, self.step(whole)

    def zero3(self, spans: Sequence[tuple[int, int]], ahead: int = 1) -> tuple[Bucket, ...]:
        """Make buckets that are all gathered again in backward, but for the last, which backward begins with."""
        buckets = [Bucket(first, last, UnitResidency.RELEASE, ahead, ahead) for first, last in spans]
        return (*buckets[:-1], replace(buckets[-1], keep=UnitResidency.BACKWARD))

    def greedy(self, whole: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
        """Keep buckets from the last to the first; of the first that does not fit, its modules in the same way."""
        todo = [(bucket.first, bucket.last) for bucket in whole]
        current = whole
        while todo:
            first, last = todo.pop()
            tried = keeping(current, first, last, self.keep)
            if self.fits(tried):
                current = tried
            elif any(bucket.first == first and bucket.last == last for bucket in whole):
                todo = children(self.modules, first, last)
            else:
                todo += children(self.modules, first, last)
        return current

    def fill(self, base: tuple[Bucket, ...], order: Sequence[int]) -> Iterator[tuple[Bucket, ...]]:
        """Keep as many buckets as fit in an order, then parts of those that follow: their end, or else their start."""

        def keep_first(count: int) -> tuple[Bucket, ...]:
            chosen = set(order[:count])
            return tuple(replace(b, keep=self.keep) if n in chosen else b for n, b in enumerate(base))

        sizes = [self._size(base[n].first, base[n].last) for n in order]
        count = _bisect_largest_count(sizes, self.budget - self.peak(base), lambda n: self.fits(keep_first(n)))
        if count < 0:
            yield base
            return
        current = keep_first(count)
        yield current
        for number in order[count : count + _TRIED]:
            left = self.budget - self.peak(current)
            if left < (1 - _FULL) / 4 * self.budget:
                return
            for at_end in (True, False):
                tried = self._with_part(current, base[number], left, at_end)
                if tried != current:
                    current = tried
                    yield current
                    break

    def _between(self, buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
        """Keep as many more buckets, from the first on, from backward to the next forward as fit."""
        released = [n for n, bucket in enumerate(buckets) if bucket.keep is UnitResidency.RELEASE]

        def keep_first(count: int) -> tuple[Bucket, ...]:
            chosen = set(released[:count])
            return tuple(replace(b, keep=UnitResidency.FORWARD) if n in chosen else b for n, b in enumerate(buckets))

        return keep_first(
            max(0, _bisect_largest_count([0] * len(released), 0, lambda count: self.fits(keep_first(count))))
        )

    def _with_part(self, buckets: tuple[Bucket, ...], bucket: Bucket, left: int, at_end: bool) -> tuple[Bucket, ...]:
        """Keep as many atoms of a bucket's end, or of its start, as fit."""
        atoms = list(range(bucket.first, bucket.last + 1))
        atoms = atoms[::-1] if at_end else atoms
        sizes = [self._size(atom, atom) for atom in atoms]
        if sizes[0] > left:
            return buckets

        def part(count: int) -> tuple[Bucket, ...]:
            kept_atoms = sorted(atoms[:count])
            return keeping(buckets, kept_atoms[0], kept_atoms[-1], self.keep) if kept_atoms else buckets

        count = _bisect_largest_count(sizes, left, lambda n: self.fits(part(n)))
        return part(count) if count > 0 else buckets

    def _nearby(self, start: _WalkedBuckets) -> list[_WalkedBuckets]:
        """Walk to faster and faster plans, each a neighbor of the one before, as long as ``_WORK`` lasts."""
        cuts = borders(self.modules)
        work, steps = 0, [start]
        best, seconds = start[0], start[1].step_s
        left = True
        while left:
            left = False
            for plan in neighbors(best, cuts, self.stays):
                tried = tuple(replace(b, gather_again=self._is_read_again(b)) for b in plan)
                work += len(tried) + len(self.modules.order)
                if work > _WORK:
                    return steps
                if self.step(tried).step_s < seconds * (1 - _ALIKE[0]) and self.fits(tried):
                    best, seconds, left = tried, self.step(tried).step_s, True
                    steps.append((best, self.step(best)))
                    break
        return steps

    def _topped(self, start_plan: _WalkedBuckets) -> list[_WalkedBuckets]:
        """Fill what is left of the budget with rows of modules that fit, the last first, apart from the rest."""
        current, tried = start_plan[0], list[_WalkedBuckets]()
        for start, last in reversed(self._rows(current)):
            left = self.budget - self.peak(current)
            if left < (1 - _FULL) * self.budget:
                break
            first = next((n for n in range(start, last) if self._size(n, last) <= left), last)
            more = keeping(current, first, last, self.keep)
            if self._size(first, last) <= left and self.fits(more):
                current = more
                tried.append((current, self.step(current)))
        return tried

    def _rows(self, buckets: Sequence[Bucket]) -> list[tuple[int, int]]:
        """List rows of atoms that could stay longer and each fit what is left of the budget."""
        left, fitting_rows = self.budget - self.peak(buckets), list[tuple[int, int]]()
        for bucket in buckets:
            for atom in range(bucket.first, bucket.last + 1) if self._can_stay(bucket) else ():
                if self._size(atom, atom) > left:
                    continue
                if fitting_rows and fitting_rows[-1][1] == atom - 1 >= bucket.first:
                    fitting_rows[-1] = (fitting_rows[-1][0], atom)
                else:
                    fitting_rows.append((atom, atom))
        return fitting_rows

    def _can_stay(self, bucket: Bucket) -> bool:
        """Whether a bucket would be gathered less often if it stayed longer."""
        return bucket.keep is not self.keep and (
            self.keep is UnitResidency.STEP or (bucket.keep is UnitResidency.RELEASE and bucket.gather_again)
        )

    def why(self, chosen: _WalkedBuckets) -> str:
        """Say why no more of the budget is used."""
        left = self.budget - chosen[1].peak_bytes
        released = [bucket for bucket in chosen[0] if self._can_stay(bucket)]
        if left <= (1 - _FULL) * self.budget:
            return "full"
        if not released:
            return f"{format_bytes(left)} left: nothing is gathered twice"
        if self.fuller:
            slower = min(self.fuller) / chosen[1].step_s - 1
            return f"{format_bytes(left)} left: of the fuller plans tried, the fastest takes {slower:.2%} longer"
        atoms = (n for bucket in released for n in range(bucket.first, bucket.last + 1))
        size, atom = min((self._size(n, n), n) for n in atoms)
        name = names_of(self.modules, Bucket(atom, atom))[0]
        return f"{format_bytes(left)} left: no module more fits that is gathered twice, the least is {name} of " + (
            format_bytes(size)
        )

    def _with_small_start(self, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Split off a small bucket of blocks as the first, if that is faster: it is waited for, and reduced last."""
        place = next((n for n, (first, _) in enumerate(spans) if self._path(first)), None)
        if place is None:
            return spans
        first, last = spans[place]
        homes = [self.modules.atoms[n][0] - self.modules.atoms[first][0] for n in range(first, last + 1)]
        whole = {first + homes.index(n) - 1 for n in (1, 2, 3) if n in homes}
        half = halves(self.modules, first, min(whole, default=last))[0][1]
        cuts = [cut for cut in sorted({half, *whole}) if cut < last]
        tried = [[*spans[:place], (first, cut), (cut + 1, last), *spans[place + 1 :]] for cut in cuts]
        return min([spans, *tried], key=lambda each: self.step(self.zero3(each)).step_s)

    def _path(self, atom: int) -> str:
        return self.modules.order[self.modules.atoms[atom][0]][1]

    def _is_read_again(self, bucket: Bucket) -> bool:
        """Whether backward reads any parameter of a bucket."""
        return any(self.modules.atom(n).read_again for n in range(bucket.first, bucket.last + 1))

    def _size(self, first: int, last: int) -> int:
        return self.costs.of(Bucket(first, last)).gathered

    def _residency(self) -> Iterator[_WalkedBuckets]:
        """Yield every plan that is tried; the plain policies first."""
        for policy in POLICIES[:3]:
            yield self.best_of_policy(policy)
        blocks = max(runs(self.modules))
        for size in _SIZES[: 2 + sum(size < blocks for size in _SIZES[2:])]:
            spans = self._with_small_start(partition(self.modules, size))
            before = float("inf")
            for ahead in (1, 2):
                base = tuple(replace(b, gather_again=self._is_read_again(b)) for b in self.zero3(spans, ahead))
                if self.step(base).step_s >= before * (1 - _ALIKE[0]):
                    break  # asking earlier gains nothing
                before = self.step(base).step_s
                for order in _orders(self.step(base)):
                    plan = base
                    for plan in self.fill(base, order):
                        yield plan, self.step(plan)
                    if self.keep is UnitResidency.STEP:
                        plan = self._between(plan)
                        yield plan, self.step(plan)


def _best(plans: Sequence[_WalkedBuckets], budget: int, plain: float) -> _WalkedBuckets:
    """Pick the fastest plan; of those as fast the fullest; never slower than the plain policies."""
    fastest = min(step.step_s for _, step in plans)

    def fullest(nearly: float) -> _WalkedBuckets:
        as_fast = [each for each in plans if each[1].step_s <= min(plain, fastest * (1 + nearly))]
        return max(as_fast, key=lambda each: each[1].peak_bytes)

    tried = [fullest(nearly) for nearly in _ALIKE]
    return next((each for each in tried if each[1].peak_bytes >= _FULL * budget), tried[1])


def _bisect_largest_count(sizes: Sequence[int], left: int, holds: Callable[[int], bool]) -> int:
    """Find the largest number for which ``holds`` is true, as it is for all below it; -1 if for none.

    Args:
        sizes: Bytes by which each makes it worse, as far as is known; where to look first.
        left: Bytes that are left for them.
    """
    count = len(sizes)
    guess = next((n for n, total in enumerate(accumulate(sizes)) if total > left), count)
    low, high, step = -1, count + 1, 1
    while high - low > 1:
        middle = guess if low < guess < high else (low + high) // 2
        if holds(middle):
            low, guess = middle, middle + step
        else:
            high, guess = middle, middle - step
        step *= 2
    return low


def _orders(step: Walked) -> Iterator[list[int]]:
    """Yield orders in which to keep buckets: from the last, spread evenly, and first those backward waits for most."""
    count = len(step.waits_s)
    yield list(range(count - 1, -1, -1))
    yield sorted(range(count), key=lambda n: (-((n + 1) & -(n + 1)), -n))
    yield sorted(range(count), key=lambda n: (-step.waits_s[n], -n))
