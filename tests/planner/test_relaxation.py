"""The linear program: its rows hold, its optimum falls with the budget, and it is below every plan."""

from __future__ import annotations

import dataclasses
from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.machines import small_machine
from tests.planner.steps import NO_LIMIT, bytes_machine, captured, needs, random_choices, step_of, tiny, within
from tests.programs import GraphBuilder

from lading.ir.action import ActionKind
from lading.ir.graph import OpKind, Phase, Role
from lading.ir.plan import Option
from lading.ir.program import PAGE_BYTES, slot_bytes
from lading.planner.linear import Relaxation, facets, solve
from lading.planner.lower import StepCosts, fixed_bytes
from lading.planner.relaxation import RelaxedResidency, ResidencyProblem, build, seated, spans
from lading.planner.residency import StepProblem, lower_bound_s, rounded


def problem_of(step: StepProblem) -> ResidencyProblem:
    return build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES)


def kept_bytes(problem: ResidencyProblem, relaxed: RelaxedResidency) -> np.ndarray:
    """Bytes at each position: what is always there, and the kept share of every gap over it."""
    total = problem.base.astype(float)
    for candidate, shares in zip(problem.candidates, relaxed.shares, strict=True):
        for first, last in spans(candidate.gap, problem.num_ops):
            total[first : last + 1] += shares[Option.KEEP] * candidate.size_bytes
    return total


def arena_of(step: StepProblem, share: float) -> int:
    """A share of what keep-all needs for tensors."""
    return int(share * (needs(step, {}) - fixed_bytes(step.machine, step.costs)))


@pytest.mark.parametrize("windows", [0, 1, 4, 16])
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_memory_and_shares(windows: int, share: float) -> None:
    step = captured("llama", num_layers=2)
    problem = problem_of(step)
    budget = arena_of(step, share)
    relaxed = solve(problem, budget, windows=windows)
    assert relaxed is not None
    assert kept_bytes(problem, relaxed).max() <= budget * (1 + 1e-4)
    for candidate, shares in zip(problem.candidates, relaxed.shares, strict=True):
        assert shares.keys() == set(candidate.options)
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-6)
        assert min(shares.values()) >= -1e-9
    assert relaxed.step_s >= sum(step.costs.op_seconds) * (1 - 1e-9)


def test_what_is_kept_from_one_step_to_the_next_is_there_at_both_ends() -> None:
    step = tiny(0)
    problem = problem_of(step)
    total = problem.base.copy()
    for candidate in problem.candidates:
        for first, last in spans(candidate.gap, problem.num_ops):
            total[first : last + 1] += candidate.size_bytes
    lasting = sum(slot_bytes(step.graph.storages[s].size_bytes) for s in step.graph.persistent)
    assert 0 < lasting <= total.min()


def test_a_tier_that_moves_no_more_both_ways_than_one_takes_turns() -> None:
    disk = dataclasses.replace(bytes_machine().tiers[0], mixed_read_bytes_per_s=5e8, mixed_write_bytes_per_s=5e8)
    for read, written in ((3e9, 0.0), (0.0, 2e9), (3e9, 2e9)):
        assert max(a * read + b * written for a, b in facets(disk)) == pytest.approx((read + written) / 1e9)


@given(st.integers(1, 1 << 24), st.integers(1, 1 << 24), st.floats(0.3, 1.0), st.floats(0.3, 1.0))
def test_no_sizes_of_moves_reach_rates_that_the_bound_does_not_allow(
    read_bytes: int, write_bytes: int, read_share: float, write_share: float
) -> None:
    disk = dataclasses.replace(
        bytes_machine().tiers[0], read_bytes_per_s=2e9, write_bytes_per_s=5e9, turn_bytes=8 << 20,
        mixed_read_bytes_per_s=read_share * 2e9, mixed_write_bytes_per_s=write_share * 5e9,
    )  # fmt: skip
    read, written = disk.rates_together(read_bytes, write_bytes)
    assert read > 0
    assert written > 0
    if read_share + write_share >= 1.0:  # less than taking turns: the bound allows turns in which each has the tier
        assert max(a * read + b * written for a, b in facets(disk)) == pytest.approx(1.0)
    assert disk.rates_together(8 << 20, 8 << 20) == pytest.approx((read_share * 2e9, write_share * 5e9))
    assert disk.rates_together(read_bytes, 8 << 20)[1] >= disk.rates_together(8 << 20, 8 << 20)[1] * (1 - 1e-9)


def test_memory_is_full_where_something_has_to_leave() -> None:
    step = captured("llama", num_layers=2)
    problem, budget = problem_of(step), arena_of(step, 0.6)
    relaxed = solve(problem, budget, windows=4)
    assert relaxed is not None
    assert kept_bytes(problem, relaxed).max() >= 0.95 * budget


def test_less_memory_takes_no_less_time() -> None:
    step = captured("llama", num_layers=2)
    problem = problem_of(step)
    solved = [solve(problem, arena_of(step, share)) for share in (1.1, 0.9, 0.7, 0.5, 0.4)]
    times = [r.step_s for r in solved if r is not None]
    assert len(times) >= 4
    assert times == sorted(times)
    assert times[0] == pytest.approx(sum(step.costs.op_seconds))
    assert times[-1] > times[0]
    assert solve(problem, int(problem.base.max()) - 1) is None


def test_bytes_reserved_are_not_used() -> None:
    step = captured("llama", num_layers=2)
    problem, budget = problem_of(step), arena_of(step, 0.8)
    reserve = np.zeros(problem.num_ops, dtype=np.int64)
    reserve[problem.num_ops // 3 : problem.num_ops // 2] = budget // 10
    relaxed = solve(problem, budget, windows=4, extra=reserve)
    assert relaxed is not None
    assert (kept_bytes(problem, relaxed) + reserve).max() <= budget * (1 + 1e-4)


def test_what_no_choice_changes_is_what_an_operation_touches() -> None:
    step = captured("gpt", num_layers=1)
    problem = problem_of(step)
    for position, op in enumerate(step.graph.ops):
        touched = {*step.graph.reads(op), *step.graph.writes(op)}
        assert problem.base[position] >= sum(slot_bytes(step.graph.storages[s].size_bytes) for s in touched)


def test_rounding_keeps_only_what_is_wholly_kept() -> None:
    step = captured("llama", num_layers=2)
    problem = problem_of(step)
    relaxed = solve(problem, arena_of(step, 0.6), windows=4)
    assert relaxed is not None
    choices = rounded(problem, relaxed)
    assert choices
    for candidate, shares in zip(problem.candidates, relaxed.shares, strict=True):
        option = choices.get((candidate.gap.storage, candidate.gap.start), Option.KEEP)
        assert (option == Option.KEEP) == (shares[Option.KEEP] >= 1.0 - 1e-6)
        assert option in candidate.options


def two_tiers(problem: ResidencyProblem) -> ResidencyProblem:
    """Problem in which what has a choice may go to a near and to a far tier."""
    (tier,) = problem.tiers
    options = (Option.KEEP, Option("near"), Option("far"))
    candidates = tuple(dataclasses.replace(each, options=options) for each in problem.candidates)
    tiers = tuple(dataclasses.replace(tier, name=name) for name in ("near", "far"))
    return dataclasses.replace(problem, candidates=candidates, tiers=tiers)


def test_what_never_moves_takes_no_room_of_a_tier() -> None:
    problem = two_tiers(problem_of(captured("llama", num_layers=2)))
    moved = problem.candidates[0].gap.storage
    room = {"near": problem.candidates[0].size_bytes}
    shares = tuple(
        {o: float(o == ("near" if c.gap.storage == moved else Option.KEEP)) for o in c.options}
        for c in problem.candidates
    )
    choices = rounded(dataclasses.replace(problem, capacity_bytes=room), RelaxedResidency(shares, 0.0))
    assert {storage for storage, _ in choices} == {moved}
    assert set(choices.values()) == {Option("near")}


def test_a_storage_whose_first_gap_is_too_short_for_a_tier_moves_in_its_later_ones() -> None:
    problem = two_tiers(problem_of(captured("llama", num_layers=2)))
    first: dict[int, int] = {}
    for candidate in problem.candidates:
        first.setdefault(candidate.gap.storage, candidate.gap.start)
    short = (Option.KEEP,)
    candidates = tuple(
        dataclasses.replace(c, options=short) if first[c.gap.storage] == c.gap.start else c for c in problem.candidates
    )
    later = {(c.gap.storage, c.gap.start) for c in candidates if c.options != short}
    assert later
    shares = tuple(
        {Option.KEEP: 1.0} if c.options == short else {Option.KEEP: 0.0, Option("near"): 1.0, Option("far"): 0.0}
        for c in candidates
    )
    choices = rounded(dataclasses.replace(problem, candidates=candidates), RelaxedResidency(shares, 0.0))
    assert choices == dict.fromkeys(later, Option("near"))


def test_a_class_shares_out_its_tiers_to_those_that_move() -> None:
    problem = two_tiers(problem_of(captured("llama", num_layers=2)))
    alone = [[c for c in problem.candidates if c.gap.storage == storage] for storage in range(1000)]
    once = tuple(gaps[0] for gaps in alone if len(gaps) == 1)[:20]
    assert len(once) == 20
    order = np.arange(20)
    problem = dataclasses.replace(problem, candidates=once, folding=seated(np.zeros(20, dtype=np.int64), order))
    shares = ({Option.KEEP: 0.5, Option("near"): 0.3, Option("far"): 0.2},) * 20
    counts = Counter(rounded(problem, RelaxedResidency(shares, 0.0)).values())
    assert counts == {Option("near"): 6, Option("far"): 4}


def test_settled_shares_are_whole_and_within_the_budget() -> None:
    step = captured("llama", num_layers=2)
    problem, budget = problem_of(step), arena_of(step, 0.6)
    relaxation = Relaxation(problem, 4)
    relaxed = relaxation.solve(budget)
    assert relaxed is not None
    settled = relaxation.settled(relaxed)

    def split_bytes(found: RelaxedResidency) -> int:
        rows = zip(problem.candidates, found.shares, strict=True)
        return sum(c.size_bytes for c, shares in rows if max(shares.values()) < 1 - 1e-6)

    assert split_bytes(settled) < 0.5 * split_bytes(relaxed)
    assert kept_bytes(problem, settled).max() <= budget * (1 + 1e-4)
    assert settled.step_s >= relaxed.step_s * (1 - 1e-6)
    again = relaxation.solve(budget)
    assert again is not None
    assert again.step_s == pytest.approx(relaxed.step_s, rel=1e-6), "settling leaves the program as it was"


def test_what_moves_takes_its_place_until_it_is_gone_and_from_its_return_on() -> None:
    step = captured("llama", num_layers=2)
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES, moving=True)
    disk, clock = step.machine.tiers[0], np.concatenate([[0.0], np.cumsum(step.costs.op_seconds)])
    away = 0
    for candidate in problem.candidates:
        gap, size = candidate.gap, candidate.size_bytes
        if gap.wraps or Option("disk") not in candidate.options:
            continue
        held = {t for first, last in candidate.resident_ranges[Option("disk")] for t in range(first, last + 1)}
        assert held <= set(range(gap.start + 1, gap.end))
        for t in set(range(gap.start + 1, gap.end)) - held:
            assert clock[t + 1] <= clock[gap.end] - size / disk.read_bytes_per_s + 1e-9
            away += 1
        length = clock[gap.end] - clock[gap.start + 1]
        assert length > size / disk.read_bytes_per_s or len(held) == gap.end - gap.start - 1
    assert away > 0


def assert_bounded(step: StepProblem, choices: dict[tuple[int, int], Option]) -> None:
    """What these choices take, in the memory they need, is no less than the bound for that memory."""
    program = within(step, NO_LIMIT).lower(choices).program
    assert program is not None
    took = step.simulate(program).duration_s
    tight = within(step, program.peak_bytes)
    assert lower_bound_s(tight) <= took * (1 + 1e-9)
    assert tight.lower(choices).program is not None


def test_the_bound_of_a_step_that_fits_is_what_it_takes() -> None:
    """Batches taken and losses handed over included, which every plan does."""
    step = captured("gpt", num_layers=1, accumulation=2, clip_norm=1.0)
    slow = dataclasses.replace(step.machine.device, op_overhead_s=1e-3)
    step = dataclasses.replace(step, machine=dataclasses.replace(step.machine, device=slow))
    program = step.lower({}).program
    assert program is not None
    assert lower_bound_s(step) == pytest.approx(step.seconds(program), rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_is_below_random_plans_of_a_chain(seed: int) -> None:
    rng = Random(seed)
    step = tiny(seed, depth=rng.choice((1, 2, 3)))
    assert_bounded(step, random_choices(step, rng))


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_is_below_random_plans_of_a_captured_step(seed: int) -> None:
    step = captured("llama", num_layers=1)
    assert_bounded(step, random_choices(step, Random(seed)))


@pytest.mark.parametrize("seed", range(6))
def test_no_random_plan_recomputes_less_than_a_bound_counts(seed: int) -> None:
    """Also where it drops what nothing reads any more, and where several recomputations share what they start from."""
    rng = Random(seed)
    step = captured(("gpt", "llama", "moe")[seed % 3], num_layers=2)
    choices = random_choices(step, rng)
    program = within(step, NO_LIMIT).lower(choices).program
    assert program is not None
    again = [a.op for a in program.actions if a.kind is ActionKind.RECOMPUTE and a.op is not None]
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES, every=True)
    dropped = [c for c in problem.candidates if choices.get((c.gap.storage, c.gap.start)) == Option.RECOMPUTE]
    counted_s = sum(c.own_recompute_s for c in dropped)
    assert 0 < counted_s <= sum(step.costs.op_seconds[op] for op in again) * (1 + 1e-9)
    tight = within(step, program.peak_bytes)
    assert tight.bound_s <= step.seconds(program) * (1 + 1e-9)


def test_a_bound_counts_what_nothing_reads_any_more() -> None:
    step = captured("gpt", num_layers=2)
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES, every=True)
    made = [(c, step.lives.producer[c.gap.storage]) for c in problem.candidates if Option.RECOMPUTE in c.options]
    more = [c for c, op in made if op is not None and c.own_recompute_s > step.costs.op_seconds[op] * (1 + 1e-9)]
    assert more, "a projection that only the sum behind it reads runs again with that sum"


@pytest.mark.parametrize(("bias_s", "offered"), [(1e-5, True), (1e-3, False)])
def test_what_all_blocks_share_is_made_again_with_a_block_if_that_takes_little(bias_s: float, offered: bool) -> None:
    """The first block makes a bias, both add it to their scores, and the backward needs the scores alone."""
    made = GraphBuilder()
    batch = made.storage("x", 64 * PAGE_BYTES, Role.INPUT)
    weights = [made.storage(f"w{i}", 64 * PAGE_BYTES, Role.PARAMETER) for i in range(2)]
    bias = made.storage("bias", 64 * PAGE_BYTES, Role.ACTIVATION)
    scores = [made.storage(f"s{i}", 64 * PAGE_BYTES, Role.ACTIVATION) for i in range(2)]
    loss = made.storage("loss", 4, Role.ACTIVATION)
    gradients = [made.storage(f"g{i}", 64 * PAGE_BYTES, Role.GRADIENT) for i in range(2)]
    made.losses.append(loss)
    made.op([weights[0]], [bias])
    made.op([batch, bias, weights[0]], [scores[0]])
    made.op([batch, bias, weights[1]], [scores[1]])
    made.op([batch], [loss])
    made.op([scores[1], batch], [gradients[1]])
    made.op([scores[0], batch, gradients[1]], [gradients[0]])
    modules = ("layers.0", "layers.0", "layers.1", "", "layers.1", "layers.0")
    phases = (*[Phase.FORWARD] * 3, Phase.LOSS, *[Phase.BACKWARD] * 2)
    graph = made.graph()
    ops = tuple(
        dataclasses.replace(op, module=module, phase=phase)
        for op, module, phase in zip(graph.ops, modules, phases, strict=True)
    )
    costs = StepCosts((bias_s, *[1e-3] * 5), (0,) * len(ops))
    step = step_of(dataclasses.replace(graph, ops=ops), small_machine(), costs)
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES, across=True)
    (second,) = (c for c in problem.candidates if c.gap.storage == scores[1])
    assert (Option.RECOMPUTE in second.options) == offered
    assert second.recompute_s == pytest.approx(1e-3 + bias_s if offered else 0.0)


@pytest.mark.parametrize("updated_first", [False, True])
def test_what_an_update_would_have_to_wait_for_is_not_recomputed_for_a_plan(updated_first: bool) -> None:
    """What a weight makes is read once more behind the weight's update, or in front of it."""
    made = GraphBuilder()
    batch = made.storage("x", 64 * PAGE_BYTES, Role.INPUT)
    weight = made.storage("w", 64 * PAGE_BYTES, Role.PARAMETER)
    output = made.storage("y", 64 * PAGE_BYTES, Role.ACTIVATION)
    loss = made.storage("loss", 4, Role.ACTIVATION)
    gradient = made.storage("g", 64 * PAGE_BYTES, Role.GRADIENT)
    last = made.storage("z", 64 * PAGE_BYTES, Role.ACTIVATION)
    made.losses.append(loss)
    made.op([batch, weight], [output])
    made.op([batch], [loss])
    made.op([batch, loss], [gradient])
    ends = [lambda: made.op([gradient], mutates=[weight], kind=OpKind.STEP), lambda: made.op([output, batch], [last])]
    for end in ends if updated_first else reversed(ends):
        end()
    graph = made.graph()
    step = step_of(graph, small_machine(), StepCosts((1e-3,) * len(graph.ops), (0,) * len(graph.ops)))
    for every, offered in ((False, not updated_first), (True, True)):  # a bound is below plans that do
        problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES, every=every, across=True)
        (gap,) = (c for c in problem.candidates if c.gap.storage == output)
        assert (Option.RECOMPUTE in gap.options) == offered
