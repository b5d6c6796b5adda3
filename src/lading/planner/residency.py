"""The ``residency`` policy: the linear program of ``relaxation``, rounded, lowered, repaired and simulated.

The relaxation does not see queues of transfers, nor what packing loses. So it is solved as several aims say, each
solution is rounded (a gap that is not wholly kept is not kept), lowered against the true budget, and tightened where
the lowering says it does not fit. Every candidate is simulated and the fastest wins; plain policies that fit are
candidates too, so ``residency`` is never slower than they are.

[Note: aims]
A transfer waits for those before it on its stream, and a storage keeps its place on the device until it has left; where
both directions of a tier are busy all the time, each delay adds to the next. What a plan can rely on lies between two
beliefs: that a tier reaches all of its rates, or only a part of them. Which is nearer depends on the step, so several
are tried and simulated (``aims``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from lading.errors import ConfigError, PlanInfeasible
from lading.ir.action import DEVICE, ActionKind
from lading.ir.graph import Phase, StepGraph
from lading.ir.machine import Machine, Tier
from lading.ir.plan import Option
from lading.ir.program import COMPUTE_STREAM, PAGE_BYTES, Program
from lading.ir.timeline import Timeline
from lading.memory.lifetime import Lifetimes
from lading.planner.emission import emit
from lading.planner.fluid import FlowProgram
from lading.planner.host_staging import taken_by_host
from lading.planner.linear import Relaxation, dual_bound_s, solve
from lading.planner.lower import Lowered, Lowering, StepCosts, fixed_bytes, lower, unlimited_bytes
from lading.planner.relaxation import RelaxedResidency, ResidencyProblem, build, fold
from lading.planner.schedule import base_profile, item_seconds
from lading.planner.single_changes import improve, tries
from lading.sim.device_step import simulate, step_times
from lading.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Aim:
    """Settings of one linear program that is solved for a plan ([Note: aims]).

    Attributes:
        reserve: Share of the arena left to what the program does not see, such as fragmentation.
        windows: Windows that it cuts the step into.
        moving: Whether a storage takes its place while it moves (``planner.relaxation``: held).
        careful: Whether to rely on a share of each tier's rates only.
        across: Whether recomputation may lead from block to block.
        settled: Whether large storages are decided one after another (``Relaxation.settled``).
    """

    reserve: float
    windows: int
    moving: bool = False
    careful: bool = False
    settled: bool = False
    across: bool = False


#: Shares of rates that leave room for queues, of the host's memory and of what lies behind it, whose transfers are
#: long, so that one that waits holds much for long.
_CAREFUL_NEAR, _CAREFUL_FAR = 0.85, 0.5
_ROOMY, _TIGHT = (0.15, 0.05, 0.3), (0.02, 0.0)
_WINDOWS = (4, 16, 1)
#: Operations of a step that is small enough for every combination, and of one that is too large for more than a few.
SMALL_OPS, _LARGE_OPS = 200, 6000
_CAREFUL_FIRST = (
    Aim(0.05, 16, moving=True, careful=True, settled=True),
    Aim(0.05, 16, moving=True, careful=True, settled=True, across=True),
    Aim(0.02, 4, moving=True),
    Aim(0.05, 16, moving=True, settled=True),
)
_LATER = (
    Aim(0.15, 16),
    Aim(0.15, 4, moving=True, careful=True, settled=True),
    Aim(0.05, 16),
    Aim(0.3, 16),
    Aim(0.15, 4),
    Aim(0.15, 1),
)


def aims(num_ops: int) -> tuple[tuple[Aim, ...], tuple[Aim, ...]]:
    """List the aims to try for a step of so many operations, likeliest first; and those for when none of these fits."""
    windows = _WINDOWS if num_ops <= SMALL_OPS else (16, 4, 1)
    tight = tuple(Aim(reserve, count) for reserve in _TIGHT for count in windows)
    if num_ops > _LARGE_OPS:  # of which few are tried: both beliefs at least
        return (_LATER[0], *_CAREFUL_FIRST, *_LATER[1:]), tight
    if num_ops > SMALL_OPS:
        return _CAREFUL_FIRST + _LATER, tight
    every = tuple(Aim(reserve, count) for reserve in _ROOMY for count in windows)
    across = tuple(Aim(reserve, count, across=True) for reserve in (0.15, 0.0) for count in windows)
    return every + _CAREFUL_FIRST + across, tight


def careful(machine: Machine) -> Machine:
    """Copy a machine with its tiers' rates lowered to the shares that leave room for queues."""
    tiers = (slower(tier, _CAREFUL_NEAR if tier.host_computes else _CAREFUL_FAR) for tier in machine.tiers)
    return dataclasses.replace(machine, tiers=tuple(tiers))


def slower(tier: Tier, share: float) -> Tier:
    """Copy a tier with all of its rates lowered to a share."""
    return dataclasses.replace(
        tier,
        read_bytes_per_s=share * tier.read_bytes_per_s,
        write_bytes_per_s=share * tier.write_bytes_per_s,
        mixed_read_bytes_per_s=share * tier.mixed_read_bytes_per_s,
        mixed_write_bytes_per_s=share * tier.mixed_write_bytes_per_s,
    )


_REPAIRS = 6
#: Operations lowered in one search, and the least number of lowerings.
_LOWERED, _FEWEST_TRIES = 15_000, 2
#: Gaps that are decided one by one; of a larger step, alike layers are decided together.
_CLASSES = 1500
#: Plans in a row that gain less than this share end the search of a step that is too large to change single choices,
#: but not where transfers have to be given less room.
_PATIENCE, _LEAST_GAIN = 3, 2e-3
#: A plan this close to the bound ends the search.
GOOD_ENOUGH = 0.005
#: Times that the best plan's transfers are scheduled again, where more than this share of the step is spent waiting.
MOST_RETIMED, _WAITING = 3, 0.01
#: Operations scheduled again for one plan: that is done once at least.
_RETIMED_OPS = 15_000
#: Gaps of storages smaller than the first share of the arena are always kept, unless what is alive anyway leaves less
#: than the second.
_SMALLEST_SHARE, _LITTLE_ROOM = 1 / 4000, 0.02
#: How the line of an error begins that says the smallest budget.
SMALLEST = "The smallest budget a plan was found for is "


@dataclass(frozen=True)
class StepProblem:
    """Problem of the residency planner: a step, its machine, its costs and the budgets in bytes by tier.

    Attributes:
        sparing: Give transfers less room than is free where what they lead to cannot be packed (``planner.lower``).
        both_ways: Give each transfer the time that it takes beside the other direction of its tier.
        defers: Whether updates may wait for the next step.
        loss_parts, head_parts: Parts in which ``graph`` computes loss and head (``lading.ir``); 0 where they are whole.
        gradient_pieces, late_products, weight_pieces: As of the passes of these names; 0 where all is whole.
        late_updates: Updates that wait inside ``graph`` (``lading.ir.late_updates``), before others are deferred.
        deferrals: Updates, the last ones of ``graph``, that were put there to be deferred; 0 where any number may be.
    """

    graph: StepGraph
    lives: Lifetimes
    machine: Machine
    costs: StepCosts
    budgets: dict[str, int]
    sparing: bool = False
    both_ways: bool = False
    defers: bool = True
    loss_parts: int = 0
    head_parts: int = 0
    gradient_pieces: int = 0
    late_products: bool = False
    weight_pieces: int = 0
    late_updates: tuple[tuple[int, int], ...] = ()
    deferrals: int = 0

    @property
    def arena_bytes(self) -> int:
        """Bytes of the device's budget that tensors may use."""
        return self.budgets["device"] - fixed_bytes(self.machine, self.costs)

    @cached_property
    def bound_problem(self) -> ResidencyProblem:
        """Problem that offers every choice, of which a bound on all plans is made."""
        return residency_problem(self, every=True)

    @cached_property
    def orders(self) -> dict[int, StepProblem]:
        """Steps with so many of the last updates deferred (``planner.orders``), each made once."""
        return {}

    @cached_property
    def relaxations(self) -> Relaxations:
        """Linear programs of this step, and what they led to, for all searches of it."""
        return Relaxations(self)

    @cached_property
    def bound_s(self) -> float:
        """Value of ``lower_bound_s``, worked out once."""
        problem = self.bound_problem
        folding = fold(self.graph, problem.candidates, _CLASSES)
        if folding is not None:
            return dual_bound_s(problem, folding, self.arena_bytes)
        relaxed = solve(problem, self.arena_bytes)
        return relaxed.step_s if relaxed is not None else 0.0

    @cached_property
    def slower(self) -> float:
        """How many times longer than all its operations the step takes at least."""
        beside = self.graph.off_compute_ops
        computing_s = sum(seconds for op, seconds in enumerate(self.costs.op_seconds) if op not in beside)
        return max(1.0, self.bound_s / computing_s) if computing_s else 1.0

    @property
    def is_hopeless(self) -> bool:
        """Whether an operation needs more bytes at once than the arena has, whatever is chosen: no plan fits."""
        return int(self.bound_problem.base.max(initial=0)) > self.arena_bytes

    def lower(self, choices: dict[tuple[int, int], Option], retimed: int = 0, pace: tuple[float, ...] = ()) -> Lowered:
        """Lower choices against the budgets of all tiers.

        Args:
            retimed: How often the transfers are scheduled again, by the times of the program simulated before.
            pace: How many times longer than it computes each operation takes as the first schedule believes it. Without
                it nothing is waited for, and a write is given the memory of too many operations.
        """
        seconds: list[float] | None = None
        while True:
            lowered = self.within_tiers(self._lowered(choices, seconds, pace))
            program = lowered.program
            if program is None or retimed == 0:
                return lowered
            seconds, retimed = item_seconds(program, *self.times(program)), retimed - 1

    def _lowered(
        self, choices: dict[tuple[int, int], Option], seconds: Sequence[float] | None, pace: tuple[float, ...] = ()
    ) -> Lowered:
        return lower(
            self.graph, self.lives, self.machine, self.costs, choices, self.budgets,
            item_seconds=seconds, pace=pace, sparing=self.sparing, both_ways=self.both_ways,
        )  # fmt: skip

    def within_tiers(self, lowered: Lowered) -> Lowered:
        """Result of a lowering without a Program that takes more of a lower tier than its budget."""
        program = lowered.program
        if program is None or all(program.tier_bytes(tier) <= self.budgets[tier] for tier in program.slots):
            return lowered
        return dataclasses.replace(lowered, program=None)

    def retimed(self, found: Found, most: int) -> Found:
        """Schedule a plan's transfers again by its simulated times while that helps; returns the fastest version.

        Args:
            most: Most times in all that transfers are scheduled again.
        """
        best = last = found
        most = min(most, max(1, _RETIMED_OPS // len(self.graph.ops)))
        while last.waits and last.retimed < most:
            seconds = item_seconds(last.program, *last.times)
            again = self.within_tiers(self._lowered(found.choices, seconds)).program
            if again is None:
                break
            last = dataclasses.replace(found, program=again, step=self, retimed=last.retimed + 1)
            if last.step_s >= best.step_s:
                break
            best = last
        return best

    def needs(self, choices: dict[tuple[int, int], Option]) -> int:
        """Device bytes that choices take where every transfer has its time."""
        emission = emit(self.graph, self.lives, choices, self.machine.host_tier)
        arena_bytes = unlimited_bytes(self.graph, self.machine, self.costs, emission)
        return arena_bytes + fixed_bytes(self.machine, self.costs)

    def simulate(self, program: Program) -> Timeline:
        """Predict the timeline of a Program on this machine."""
        return simulate(program, self.machine, op_seconds=self.costs.op_seconds)

    def times(self, program: Program) -> tuple[float, Sequence[float]]:
        """Predict the program's seconds and the second at which each action starts, quicker than a timeline."""
        return step_times(program, self.machine, op_seconds=self.costs.op_seconds)

    def seconds(self, program: Program) -> float:
        """Predict the seconds of a Program on this machine."""
        return self.times(program)[0]


@dataclass(frozen=True)
class Found:
    """Plan that fits: choices, their Program and what it leads to; times are predicted when they are asked for.

    Attributes:
        retimed: How often its transfers were scheduled again (``StepProblem.lower``).
        pace: Pace by which they were scheduled first.
        device_s: Seconds of the step with nothing on the host, where something is; else 0.
    """

    choices: dict[tuple[int, int], Option]
    program: Program
    step: StepProblem
    retimed: int = 0
    device_s: float = 0.0
    pace: tuple[float, ...] = ()

    @cached_property
    def times(self) -> tuple[float, Sequence[float]]:
        """Seconds of the step and when each action starts."""
        return self.step.times(self.program)

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.times[0]

    @cached_property
    def timeline(self) -> Timeline:
        """Predict the timeline of the whole step."""
        return self.step.simulate(self.program)

    @property
    def waits(self) -> bool:
        """Whether more than a small share of the step is not spent on operations."""
        return self.step_s > (1 + _WAITING) * self.computing_s

    @property
    def computing_s(self) -> float:
        """Seconds of the step that are spent on operations of the device."""
        seconds, actions = self.step.costs.op_seconds, self.program.actions
        return sum(seconds[a.op] for a in actions if a.op is not None and a.stream == COMPUTE_STREAM)


#: Takes the share of some work that is done, in [0, 1], and what is being done.
Tell = Callable[[float, str], None]


def good_enough(found: Found, bound_s: float) -> bool:
    """Whether a plan is so near the bound that a longer search gains little."""
    return found.step_s <= (1 + GOOD_ENOUGH) * bound_s


class ResidencySearch:
    """Search for the fastest plan of one step, which can be left after its first plan.

    Nothing is searched of a step that is hopeless: ``finish`` then says what it needs.

    Attributes:
        best: The fastest plan so far.
        looked_at: Candidates looked at, of ``num_candidates`` at most where one of them fits.
    """

    def __init__(self, step: StepProblem, others: Iterable[Found]) -> None:
        self.step = step
        self.looked_at, self.num_candidates = 0, len(aims(len(step.graph.ops))[0])
        self.best: Found | None = min(others, key=lambda found: found.step_s, default=None)
        self._candidates = iter(() if step.is_hopeless else _candidates(step))

    def advance(self) -> bool:
        """Look at one more candidate; False if there is none left."""
        plan = next(self._candidates, None)
        self.looked_at += 1
        self.offer(plan)
        return plan is not None

    def best_s(self) -> float:
        """Seconds of the fastest plan found so far."""
        return float("inf") if self.best is None else self.best.step_s

    def offer(self, found: Found | None) -> None:
        """Take a plan that another policy made if it is the fastest so far."""
        if found is not None and found.step_s < self.best_s():
            self.best = found

    def searched(self, bound_s: float, tell: Tell, patience: float) -> Found | None:
        """Look at candidates until one is good enough, or so many in a row gained little; returns the fastest plan."""
        idle = 0
        while self.best is None or not (good_enough(self.best, bound_s) or idle >= patience):
            best = "none fits yet" if self.best is None else f"the fastest takes {format_seconds(self.best.step_s)}"
            done = min(self.looked_at, self.num_candidates - 1)
            tell(done / (self.num_candidates + 1), f"plan {done + 1} of {self.num_candidates}, {best}")
            before_s = self.best_s()
            if not self.advance():
                break
            idle = 0 if self.best_s() < (1 - _LEAST_GAIN) * before_s else idle + 1
        return self.best

    def finish(self, bound_s: float, tell: Tell = lambda share, doing: None) -> Found:
        """Search on until a plan is good enough or none is left; returns the fastest.

        Args:
            bound_s: Seconds that no plan is below.
            tell: Is told the share of the candidates looked at and what is being done.

        Raises:
            PlanInfeasible: not even moving or recomputing everything fits.
            ConfigError: what fits the device does not fit a lower tier's budget.
        """
        small = tries(len(self.step.graph.ops)) > 0
        self.searched(bound_s, tell, float("inf") if small else _PATIENCE)
        if self.best is None and not (self.step.sparing or self.step.is_hopeless):
            tell(self.num_candidates / (self.num_candidates + 1), "plans with less room for transfers, as none fits")
            again = ResidencySearch(dataclasses.replace(self.step, sparing=True), ())
            # a small step has single choices changed from the first plan on; of a large one all are looked at
            self.best = again.searched(bound_s, tell, 0 if small else float("inf"))
        if self.best is None:
            self.best = _smallest(self.step)
        return self.best


def polished(found: Found, bound_s: float) -> Found:
    """Improve a plan that is not good enough: retime it to the end and, on a small step, change single choices."""
    if good_enough(found, bound_s):
        return found
    step = found.step
    if found.retimed:
        found = step.retimed(found, MOST_RETIMED)
    return _improved(step, found) if tries(len(step.graph.ops)) else found


def _improved(step: StepProblem, found: Found) -> Found:
    def seconds_of(choices: dict[tuple[int, int], Option]) -> float | None:
        program = step.lower(choices, found.retimed, found.pace).program
        return None if program is None else step.seconds(program)

    choices = improve(found.choices, found.step_s, step.bound_problem, seconds_of)
    if choices is found.choices:
        return found
    program = step.lower(choices, found.retimed, found.pace).program
    assert program is not None, "the search keeps what fits"
    return Found(choices, program, step, found.retimed, pace=found.pace)


def lower_bound_s(step: StepProblem) -> float:
    """Lower bound, in seconds, over all plans within the budget, as modelled; 0.0 where no plan exists."""
    return step.bound_s


def flow_bound_s(step: StepProblem, windows: int) -> float:
    """Lower bound in seconds over all plans within the budget, sharper than ``lower_bound_s`` with windows enough.

    0.0 where no plan fits; the bound without windows where the solver gives no answer.
    """
    program = FlowProgram(step.bound_problem, step.arena_bytes, windows)
    flowing = program.solve()
    if flowing is None:
        return step.bound_s if program.is_unsolved else 0.0
    return flowing.step_s


def smallest_budget_bytes(step: StepProblem) -> tuple[int, Lowering]:
    """Find the smallest device budget in bytes that there is a plan for: all that can leave the device leaves it.

    Returns:
        Bytes, and the choices of the plan, emitted.
    """
    size, _, lowering = _tightest(step)
    return size, lowering


def _tightest(step: StepProblem) -> tuple[int, dict[tuple[int, int], Option], Lowering]:
    """Smallest device budget in bytes that a plan is found for, with its choices and what they are emitted to."""
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES)
    fixed = fixed_bytes(step.machine, step.costs)
    best: tuple[int, dict[tuple[int, int], Option], Lowering] | None = None
    for last in (-1, 1):
        choices = {(c.gap.storage, c.gap.start): c.options[last] for c in problem.candidates}
        lowering = Lowering(step.graph, step.lives, step.machine, step.costs, choices)
        if best is not None and lowering.peak_bytes + fixed >= best[0]:
            continue  # what it holds at once is no less
        size = lowering.smallest_arena_bytes() + fixed
        if best is None or size < best[0]:
            best = size, choices, lowering
    assert best is not None
    return best


def smallest_bytes(arena_bytes: int) -> int:
    """Bytes of a storage below which it is always kept, in an arena of so many."""
    return max(PAGE_BYTES, int(arena_bytes * _SMALLEST_SHARE))


def residency_problem(
    step: StepProblem, *, every: bool = False, moving: float = 0.0, across: bool = False
) -> ResidencyProblem:
    """Collect the choices of a step within its budgets, small storages left out; the options are those of ``build``."""
    least, (graph, costs) = smallest_bytes(step.arena_bytes), (step.graph, step.costs)
    problem = build(graph, step.lives, step.machine, costs, least, every=every, moving=moving, across=across)
    if problem.base.max(initial=0) > (1 - _LITTLE_ROOM) * step.arena_bytes:  # then small storages are much of the rest
        problem = build(graph, step.lives, step.machine, costs, PAGE_BYTES, every=every, moving=moving, across=across)
    folding = None if every else fold(step.graph, problem.candidates, _CLASSES)
    taken = taken_by_host(step.graph, step.lives, step.budgets, step.machine.host_tier, least=every)
    capacity = {tier: size - taken.get(tier, 0) for tier, size in step.budgets.items()}
    return dataclasses.replace(problem, capacity_bytes=capacity, folding=folding)


def _candidates(step: StepProblem) -> Iterable[Found]:
    """Lower the solutions of all aims; tight aims only where no roomier one fits.

    Of a large step fewer are lowered, the likeliest first.
    """
    left, roomy = max(_FEWEST_TRIES, _LOWERED // len(step.graph.ops)), False
    for some in aims(len(step.graph.ops)):
        fits = False
        for aim in some:
            if fits and left <= 0:
                return
            candidate, tried = step.relaxations.repaired(aim)
            left -= tried
            if candidate is not None:
                fits, roomy = True, roomy or aim not in step.relaxations.eased
                yield candidate
        if roomy:
            return


def first_plan(step: StepProblem, below_s: float = float("inf"), *, tight: bool) -> Found | None:
    """Make the first plan that fits, by roomy aims or by tight ones; None where there is none.

    Args:
        below_s: Seconds that a plan has to be below to be of use: what is aimed at is not repaired beyond.
    """
    some = () if step.is_hopeless else aims(len(step.graph.ops))[tight]
    return next((made for aim in some if (made := step.relaxations.repaired(aim, below_s)[0]) is not None), None)


#: How many times longer than its operations a step is taken to be where storages take room while they move (0: they do
#: not), whether blocks are recomputed in chains, and whether rates are shared.
_Beliefs = tuple[float, bool, bool]
#: How many times longer than its bound a step is taken to be, in turn, where what moves has no room otherwise.
_LONGER = (1.0, 2.0, 4.0)


class Relaxations:
    """Cache of a step's linear programs, each built once, and of what their choices lead to, each lowered once."""

    def __init__(self, step: StepProblem) -> None:
        self._step = step
        self._problems: dict[_Beliefs, ResidencyProblem] = {}
        self._solved: dict[tuple[_Beliefs, int], Relaxation] = {}
        self._lowered: dict[frozenset[tuple[tuple[int, int], Option]], Found | np.ndarray] = {}
        self._repaired: dict[Aim, tuple[Found | None, int]] = {}
        self._slower = [1.0]  # the last is what counts
        self._eases = not tries(len(step.graph.ops))  # else single choices are changed from the best on
        #: Aims without a solution but for a slower step or for reserving less than was missing.
        self.eased: set[Aim] = set()

    def of(self, aim: Aim) -> Relaxation:
        """Build or look up the linear program of an aim."""
        what = self._slower[-1] if aim.moving else 0.0, aim.across, aim.careful
        if what not in self._problems:
            machine = careful(self._step.machine) if aim.careful else self._step.machine
            step = dataclasses.replace(self._step, machine=machine)
            self._problems[what] = residency_problem(step, moving=what[0], across=aim.across)
        if (what, aim.windows) not in self._solved:
            self._solved[what, aim.windows] = Relaxation(self._problems[what], aim.windows)
        return self._solved[what, aim.windows]

    def repaired(self, aim: Aim, below_s: float = float("inf")) -> tuple[Found | None, int]:
        """Solve as aimed; where the lowering needs more than the relaxation thought, reserve that and retry.

        Args:
            below_s: Seconds that a plan has to be below to be of use; it may be above.

        Returns:
            The plan, None where there is none, and the number of lowerings.
        """
        if aim not in self._repaired:
            made, tried, reached = self._repair(aim, below_s)
            while made is None and not (tried or reached) and self._eases and self._can_ease(aim):
                # what moves has no room, so compute will wait and the step take longer
                before_s = self._slower[-1]
                self._slower.append(self._step.slower * _LONGER[len(self._slower) - 1])
                if self._slower[-1] > before_s:
                    made, tried, reached = self._repair(aim, below_s)
            if aim.moving and len(self._slower) > 1:
                self.eased.add(aim)
            if reached:
                return None, tried
            self._repaired[aim] = made, tried
        return self._repaired[aim]

    def _can_ease(self, aim: Aim) -> bool:
        return aim.moving and len(self._slower) <= len(_LONGER)

    def _repair(self, aim: Aim, below_s: float) -> tuple[Found | None, int, bool]:
        """Repair a relaxation until it fits: the plan, the number of lowerings, and whether it reached ``below_s``.

        With rates that are not all there are it may take longer than its plan, so it has no limit then.
        """
        relaxation, target = self.of(aim), int(self._step.arena_bytes * (1.0 - aim.reserve))
        problem = relaxation.problem
        extra = np.zeros(problem.num_ops, dtype=np.int64)
        for tried in range(_REPAIRS):
            relaxed = relaxation.solve(target, extra)
            if relaxed is None:
                return None, tried, False
            if relaxed.step_s > below_s and not aim.careful:
                return None, tried, True
            choices = rounded(problem, relaxation.settled(relaxed) if aim.settled else relaxed)
            made = self.lowered(choices)
            if isinstance(made, Found):
                return made, tried + 1, False
            before, extra, most = extra, extra + made, np.maximum(target - problem.base, 0)
            if self._eases and (extra > most).any():
                extra = np.minimum(extra, most)
                self.eased.add(aim)
            if (extra == before).all():  # no more can be reserved, so the solution is the same
                return None, tried + 1, False
        return None, _REPAIRS, False

    def lowered(self, choices: dict[tuple[int, int], Option]) -> Found | np.ndarray:
        """Lower choices into a plan; where they do not fit, the bytes to reserve at each position next time."""
        key = frozenset(choices.items())
        if key not in self._lowered:
            step, made = self._step, self._step.lower(choices)
            if made.program is None:
                self._lowered[key] = missing_bytes(step, made)
            else:
                self._lowered[key] = step.retimed(Found(choices, made.program, step), 1)
        return self._lowered[key]


def rounded(problem: ResidencyProblem, relaxed: RelaxedResidency) -> dict[tuple[int, int], Option]:
    """Round shares to choices: a gap that is not wholly kept takes its largest other option, and a storage one tier.

    In a class of several gaps (``problem.folding``), as many as the shares say take an option, by their seats.
    """
    choices: dict[tuple[int, int], Option] = {}
    seats = _seats(problem)
    tiers = _within_capacity(problem, _tier_of_storage(problem, relaxed, seats))
    for candidate, shares, (seat, count) in zip(problem.candidates, relaxed.shares, seats, strict=True):
        keeping = shares[Option.KEEP] * count
        if seat + 1 <= keeping + 1e-6 * count:
            continue
        tier = tiers.get(candidate.gap.storage)
        others = [option for option in candidate.options if option in (Option.RECOMPUTE, tier)]
        if not others:  # too short a gap for the tier that its storage has a place in
            continue
        away = 1.0 - shares.get(Option.RECOMPUTE, 0.0) - shares[Option.KEEP]
        chosen = max(others, key=lambda o: shares[o])
        if count > 1 and len(others) > 1 and tier is not None:
            chosen = tier if seat + 0.5 >= count * (1.0 - away) else Option.RECOMPUTE
        choices[candidate.gap.storage, candidate.gap.start] = chosen
    return choices


def _seats(problem: ResidencyProblem) -> list[tuple[int, int]]:
    """Seat of each candidate in its class, and the number of seats there."""
    if problem.folding is None:
        return [(0, 1)] * len(problem.candidates)
    return list(zip(problem.folding.seat.tolist(), problem.folding.seats.tolist(), strict=True))


def _tier_of_storage(
    problem: ResidencyProblem, relaxed: RelaxedResidency, seats: list[tuple[int, int]]
) -> dict[int, Option]:
    """Pick for each storage the tier in which most of its gaps are spent, as a storage has a place in one tier only.

    The storages of a class share out the tiers: the last seats take the farthest one, and the first ones never move.
    """
    shares: dict[int, list[Counter[Option]]] = {}
    seat_of: dict[int, tuple[int, int]] = {}
    for candidate, chosen, seat in zip(problem.candidates, relaxed.shares, seats, strict=True):
        moved = Counter({o: s for o, s in chosen.items() if o not in (Option.KEEP, Option.RECOMPUTE)})
        shares.setdefault(candidate.gap.storage, []).append(moved)
        seat_of[candidate.gap.storage] = seat
    tiers: dict[int, Option] = {}
    order = [Option(tier.name) for tier in problem.tiers]
    for storage, gaps in shares.items():
        (seat, count), kept = seat_of[storage], 1.0 - max(moved.total() for moved in gaps)
        every = Counter({o: sum(moved[o] for moved in gaps) for o in order})  # not all gaps are long enough for all
        if every.total() > _NONE and seat + 1 > count * kept + 1e-6 * count:  # else it has no place there
            tiers[storage] = _at_seat(every, len(gaps) * kept, seat, count)
    return tiers


def _within_capacity(problem: ResidencyProblem, tiers: dict[int, Option]) -> dict[int, Option]:
    """Move storages that are too much for a tier, the last ones first, to the tier behind it."""
    size = {candidate.gap.storage: candidate.size_bytes for candidate in problem.candidates}
    options = {candidate.gap.storage: candidate.options for candidate in problem.candidates}
    order = [Option(tier.name) for tier in problem.tiers]
    for near, far in pairwise(order):
        if near not in problem.capacity_bytes:
            continue
        there = [s for s, tier in tiers.items() if tier == near and s not in problem.placed]
        excess = sum(size[s] for s in there) - problem.capacity_bytes[near]
        for storage in sorted((s for s in there if far in options[s]), reverse=True):
            if excess <= 0:
                break
            tiers[storage], excess = far, excess - size[storage]
    return tiers


def _at_seat(shares: Counter[Option], never: float, seat: int, count: int) -> Option:
    """Option at one of ``count`` seats that are given out by shares; the largest share where there is one seat.

    Args:
        never: Share of those that take none, which have the first seats.
    """
    if count == 1:
        return max(shares, key=lambda o: shares[o])
    left = (1.0 - (seat + 0.5) / count) * (never + shares.total())
    for option in reversed(shares):
        if left <= shares[option]:
            return option
        left -= shares[option]
    return next(iter(shares))


def missing_bytes(step: StepProblem, lowered: Lowered) -> np.ndarray:
    """Count bytes to reserve so that the next solution fits: the lowering's excess around its items.

    Returns:
        Array of [position].
    """
    extra = np.zeros(len(step.graph.ops), dtype=np.int64)
    over = base_profile(step.graph, lowered.emission) - step.arena_bytes
    if over.max() <= 0:  # alive bytes fit, their addresses do not
        return extra + lowered.excess_bytes
    position = 0
    for item, excess in zip(lowered.emission.items, over, strict=True):
        if item.op is not None and item.kind is not ActionKind.RECOMPUTE:
            position = item.op
        if excess > 0:
            near = slice(max(0, position - 2), position + 3)
            extra[near] = np.maximum(extra[near], excess)
    return extra


def _smallest(step: StepProblem) -> Found:
    """Make the plan that needs least memory.

    Raises:
        PlanInfeasible: it does not fit; says what binds.
    """
    size, choices, lowering = _tightest(step)
    if size > step.budgets["device"]:
        raise infeasible(step, size, lowering)
    again = lower(step.graph, step.lives, step.machine, step.costs, choices, step.budgets, sparing=True)
    if again.program is None:
        raise infeasible(step, size, lowering)
    _check_tiers(again.program)
    return step.retimed(Found(choices, again.program, step), MOST_RETIMED)


def _check_tiers(program: Program) -> None:
    for tier in program.slots:
        if program.tier_bytes(tier) > program.budgets[tier]:
            raise ConfigError(
                f"the plan puts {format_bytes(program.tier_bytes(tier))} on {tier}, its budget is "
                f"{format_bytes(program.budgets[tier])} (a run's is half of what is free); raise that, or the device's"
            )


def infeasible(step: StepProblem, smallest: int, lowered: Lowered | Lowering) -> PlanInfeasible:
    """Error that names the moment that binds, what is alive there, and the smallest budget that would do.

    Args:
        smallest: Bytes of the smallest budget that a plan was found for.
    """
    item = lowered.emission.items[lowered.peak_item]
    op = step.graph.ops[item.op] if item.op is not None else None
    moment = f"{op.name} in {op.module or 'the loss'} ({op.phase.value})" if op is not None else "a move of the batch"
    alive = sorted(
        ((step.graph.storages[r.storage].size_bytes, step.graph.storages[r.storage].name)
         for r in lowered.emission.residencies if r.first <= lowered.peak_item <= r.last),
        reverse=True,
    )  # fmt: skip
    rows = [f"  {format_bytes(size):>12}  {name}" for size, name in alive[:8]]
    if len(alive) > 8:
        rows.append(f"  {format_bytes(sum(size for size, _ in alive[8:])):>12}  {len(alive) - 8} more")
    fixed = fixed_bytes(step.machine, step.costs)
    missing = smallest - step.budgets["device"]
    if 2 * fixed > smallest:
        advice = "Most of that is the process, which no plan makes smaller: raise the budget."
    elif op is not None and op.phase is Phase.OPTIMIZER:
        advice = "Raise the budget: a smaller micro-batch leaves an update as large as it is."
    else:
        advice = "Raise the budget, or make the micro-batch or the sequence smaller."
    lines = [
        f"no plan fits a device budget of {format_bytes(step.budgets['device'])}: {format_bytes(missing)} are missing.",
        f"Even with everything else moved away or recomputed, {moment} needs at once:",
        *rows,
        f"  {format_bytes(fixed):>12}  the process besides tensors (overhead and scratch)",
        f"{SMALLEST}{smallest} bytes ({format_bytes(smallest)}); less may do.",
        advice,
        *_full_tiers(step),
    ]
    return PlanInfeasible("\n".join(lines), missing_bytes=missing, smallest_budget_bytes=smallest)


def _full_tiers(step: StepProblem) -> Iterator[str]:
    """Say that lower tiers have too little room for the values of the step, where they do."""
    rooms = {name: size for name, size in step.budgets.items() if name != DEVICE}
    values = sum(step.graph.storages[storage].size_bytes for storage in step.graph.persistent)
    if rooms and sum(rooms.values()) < values:
        said = ", ".join(f"{format_bytes(size)} on the {name}" for name, size in rooms.items())
        yield (
            f"There is room for only {said}, and values between steps take {format_bytes(values)}: make room there, or "
            "give it a larger budget, and less memory will do."
        )


#: A share that is none.
_NONE = 1e-9
