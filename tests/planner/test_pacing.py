"""Paced flows: a flow that a plan can take, above the bound, and the schedule that follows from it."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from tests.machines import machine_with_host, small_machine
from tests.planner.steps import captured, needs, slower_disk, within

from lading.ir.host_ops import light_groups
from lading.ir.machine import Tier
from lading.ir.opkinds import PRODUCT_KINDS
from lading.ir.plan import Option
from lading.ir.program import COMPUTE_STREAM, PAGE_BYTES
from lading.memory.verify import verify
from lading.planner import pacing
from lading.planner.fluid import FlowProgram
from lading.planner.host_balance import hosted_step
from lading.planner.lower import Lowered, Lowering, fixed_bytes
from lading.planner.pacing import PacedFlow, PacedResidency, paced
from lading.planner.relaxation import Candidate, RelaxedResidency, build, seated
from lading.planner.residency import StepProblem, residency_problem


def half() -> StepProblem:
    step = captured("llama", num_layers=2, clip_norm=1.0, machine=slower_disk(small_machine(), 5))
    fixed = fixed_bytes(step.machine, step.costs)
    return within(step, fixed + (needs(step, {}) - fixed) // 2)


def test_a_paced_flow_takes_longer_than_the_bound_and_its_pace_adds_up() -> None:
    step = half()
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES)
    solved, bound = (
        PacedFlow(problem, step.arena_bytes, 16).solved(),
        FlowProgram(problem, step.arena_bytes, 16).solve(),
    )
    assert solved is not None
    assert bound is not None
    assert solved.relaxed.step_s >= bound.step_s * (1 - 1e-6)
    assert min(solved.pace) >= 1.0
    again = [
        (c, shares.get(Option.RECOMPUTE, 0.0))
        for c, shares in zip(problem.candidates, solved.relaxed.shares, strict=True)
    ]
    paced_s = sum(pace * seconds for pace, seconds in zip(solved.pace, problem.op_seconds, strict=True))
    paced_s += sum(solved.pace[c.gap.end] * share * c.recompute_s for c, share in again)
    assert paced_s == pytest.approx(solved.relaxed.step_s, rel=1e-3)


def test_what_transfers_take_from_computing_makes_a_flow_longer() -> None:
    """Each byte takes its share of the seconds of what computes beside it, and less of products."""
    step = half()
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES)
    (disk,) = step.machine.tiers
    slowing = dataclasses.replace(disk, read_slowdown=0.3, write_slowdown=0.3)
    of_passes = dataclasses.replace(slowing, read_slowdown_of_passes=0.9, write_slowdown_of_passes=0.9)
    preparing = dataclasses.replace(slowing, latency_s=1e-4, latency_slowdown=0.8)
    products = np.array([op.kind in PRODUCT_KINDS for op in step.graph.ops])

    def seconds(tier: Tier, products: np.ndarray | None = None) -> float:
        return PacedFlow(dataclasses.replace(problem, tiers=(tier,)), step.arena_bytes, 16, 4, products).seconds

    assert seconds(disk) < seconds(slowing) < seconds(of_passes, products) < seconds(of_passes)
    assert seconds(slowing) < seconds(preparing)
    assert seconds(slowing, products) == pytest.approx(seconds(slowing)), "all operations are slowed alike"


def test_large_storages_move_whole_or_not_at_all() -> None:
    step = half()
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES)
    solved = PacedFlow(problem, step.arena_bytes, 16).solved()
    assert solved is not None
    shares = solved.relaxed.shares
    largest = max(candidate.size_bytes for candidate in problem.candidates)
    rows = [row for c, row in zip(problem.candidates, shares, strict=True) if c.size_bytes == largest]
    assert all(max(row.values()) > 0.999 for row in rows)
    moved = sum(1 - row[Option.KEEP] for row in shares)
    assert moved > 0


def test_a_pace_makes_operations_and_what_runs_again_behind_them_slower() -> None:
    step = half()
    choices = {(c.gap.storage, c.gap.start): c.options[-1] for c in step.bound_problem.candidates}
    ops = len(step.graph.ops)
    once, twice = (
        Lowering(step.graph, step.lives, step.machine, step.costs, choices, pace=(times,) * ops) for times in (1.0, 2.0)
    )
    plain = Lowering(step.graph, step.lives, step.machine, step.costs, choices)
    assert once.seconds == plain.seconds
    first = next(i for i, item in enumerate(plain.emission.items) if item.op is not None)
    assert twice.seconds == plain.seconds[:first] + [2.0 * seconds for seconds in plain.seconds[first:]]


@pytest.mark.long
def test_paced_plans_fit_are_proven_and_are_made_again_from_their_choices() -> None:
    step = half()
    plans = list(paced(step))
    assert plans
    for found in plans:
        verify(found.program)
        assert found.program.predicted_bytes <= step.budgets["device"]
        assert found.step_s >= step.bound_s * (1 - 1e-6)
        again = found.step.lower(found.choices, found.retimed, found.pace).program
        assert again is not None
        assert step.seconds(again) == pytest.approx(found.step_s, rel=1e-9)
        assert any(action.stream != COMPUTE_STREAM for action in found.program.actions)


def test_nothing_leaves_over_the_end_of_a_step_that_could_not_be_back_in_time() -> None:
    step = half()
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES)
    flow_of = PacedFlow(problem, step.arena_bytes, 4)
    begun_s = np.concatenate([[0.0], np.cumsum(problem.op_seconds)])
    disk, may_move = step.machine.tiers[0], Counter[bool]()
    for each in flow_of.classes:
        gap, size = each.leader.gap, each.leader.size_bytes
        column = flow_of.flows[flow_of.classes.index(each)][Option(disk.name)].share if gap.wraps else -1
        passing_s = begun_s[-1] - begun_s[gap.start + 1] + begun_s[gap.end]
        near = flow_of.window[gap.end] + 4 - flow_of.window[gap.start] <= 1
        short = near and passing_s < size / disk.read_bytes_per_s + size / disk.write_bytes_per_s
        if gap.wraps:
            assert (flow_of.upper[column] == 0.0) == short
            may_move[not short] += 1
    assert may_move[True]
    assert may_move[False]


def test_what_is_recomputed_finds_its_weights_brought_back() -> None:
    step = captured("llama", num_layers=2, machine=slower_disk(small_machine(), 20))
    fixed = fixed_bytes(step.machine, step.costs)
    step = within(step, fixed + (needs(step, {}) - fixed) // 3)
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES)
    flow_of = PacedFlow(problem, step.arena_bytes, 64, 1)
    values = flow_of.initial_values
    assert values is not None
    class_of = {index: number for number, each in enumerate(flow_of.classes) for index in each.members}
    both = 0.0
    for index, candidate in enumerate(problem.candidates):
        again, back = flow_of.again[class_of[index]], made_again(candidate)
        for other, weight in enumerate(problem.candidates):
            gap = weight.gap
            if again is None or gap.storage not in candidate.needs or gap.wraps or not gap.start < back < gap.end:
                continue
            moves = [*flow_of.flows[class_of[other]].values()]
            read = [
                values[column] for each in moves for at, column in enumerate(each.reads, each.first_read)
                if at <= flow_of.window[back]
            ]  # fmt: skip
            moved = sum(values[each.share] for each in moves)
            assert values[again] + moved - sum(read) < 1 + 1e-6
            both = max(both, values[again] * moved)
    assert both > 0.5


def test_a_flow_with_no_room_has_no_solution() -> None:
    step = half()
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES)
    short = dataclasses.replace(problem, base=problem.base + step.arena_bytes)
    assert PacedFlow(short, step.arena_bytes, 4).solved() is None


def test_what_is_recomputed_starts_from_what_is_there() -> None:
    """Of two of which one is made of the other, both dropped, the second would have to wait for the first."""
    step = half()
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES, across=True)
    candidates = [without_tiers(each) for each in problem.candidates if Option.RECOMPUTE in each.options]
    base = np.zeros(problem.num_ops, dtype=np.int64)
    none = dataclasses.replace(problem, tiers=(), candidates=tuple(candidates), base=base)
    change = np.zeros(problem.num_ops + 1)
    for each in candidates:
        change[each.gap.start + 1] += each.size_bytes
        change[each.gap.end] -= each.size_bytes
    solved = PacedFlow(none, int(0.5 * np.cumsum(change).max()), 8).solved()
    assert solved is not None
    again: dict[int, list[tuple[Candidate, float]]] = {}
    for candidate, shares in zip(none.candidates, solved.relaxed.shares, strict=True):
        again.setdefault(candidate.gap.storage, []).append((candidate, shares.get(Option.RECOMPUTE, 0.0)))
    pairs = [
        (share, source_share)
        for candidate, share in (row for rows in again.values() for row in rows)
        for storage in candidate.sources
        for source, source_share in again.get(storage, ())
        if source.gap.start < made_again(candidate) < made_again(source)
    ]
    assert sum(share + other > 0.5 for share, other in pairs) > 0
    assert all(share + other < 1 + 1e-6 for share, other in pairs)


def without_tiers(candidate: Candidate) -> Candidate:
    return dataclasses.replace(candidate, options=tuple(o for o in candidate.options if not o.tier))


def made_again(candidate: Candidate) -> int:
    held = candidate.resident_ranges.get(Option.RECOMPUTE, ())
    return held[0][0] if held else candidate.gap.end


def test_both_states_of_a_parameter_are_of_one_class_and_rounded_one_by_one() -> None:
    step = half()
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES)
    flow_of = PacedFlow(problem, step.arena_bytes, 16)
    assert len(flow_of.classes) < 0.8 * len(problem.candidates)
    solved = flow_of.solved()
    assert solved is not None
    counts = Counter(solved.folding.class_of.tolist())
    assert max(counts.values()) > 1
    for number, each in enumerate(flow_of.classes):
        assert len({problem.candidates[i].size_bytes for i in each.members}) == 1
        assert sorted(solved.folding.seat[list(each.members)].tolist()) == list(range(counts[number]))


def test_a_flow_that_reserves_bytes_is_the_flow_of_less_memory() -> None:
    step = half()
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES)
    size, less = step.arena_bytes, step.arena_bytes // 20
    once, fresh = PacedFlow(problem, size, 16), PacedFlow(problem, size - less, 16)
    assert once.solved() is not None  # with columns settled, which have to be free again
    again = once.reserving(np.full(problem.num_ops, less))
    assert again is not None
    assert fresh.initial_values is not None
    assert once.initial_values is not None
    assert np.dot(once.costs, again) == pytest.approx(np.dot(fresh.costs, fresh.initial_values), rel=1e-6)
    assert np.dot(once.costs, again) > np.dot(once.costs, once.initial_values) * (1 + 1e-6)


def test_what_cannot_be_packed_reserves_no_more_than_is_missing_without_transfers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Addresses miss 900 bytes with room for transfers and 50 without: more is not reserved, which all would pay."""
    step = half()
    reserved = list[int]()

    class Flow:
        problem, iterations = residency_problem(step), 0

        def solved(self, extra: np.ndarray | None) -> PacedResidency:
            reserved.append(0 if extra is None else int(extra.max()))
            kept = tuple({Option.KEEP: 1.0} for _ in self.problem.candidates)
            folding = seated(np.arange(len(kept)), np.zeros(len(kept), dtype=np.int64))
            return PacedResidency(RelaxedResidency(kept, 1.0), (), folding)

    def lower(self: StepProblem, choices: object, retimed: int = 0, pace: tuple[float, ...] = ()) -> Lowered:
        emission = Lowering(step.graph, step.lives, step.machine, step.costs, {}).emission
        return Lowered(None, emission, 50 if self.sparing else 900, 0, self.arena_bytes)

    monkeypatch.setattr(StepProblem, "lower", lower)
    monkeypatch.setattr(pacing, "base_profile", lambda graph, emission: np.zeros(1))
    monkeypatch.setattr(
        pacing, "missing_bytes", lambda step, lowered: np.full(len(step.graph.ops), lowered.excess_bytes)
    )
    found, tried = pacing._plan(step, Flow(), 1)  # pyright: ignore[reportPrivateUsage, reportArgumentType]
    assert found is None
    assert tried == 2 * len(reserved)
    assert reserved == [0, 50, 100, 150]


def test_a_flow_knows_what_the_host_works_on_and_how_long() -> None:
    """Gradients go down and parameters come up in windows of their own, and the host works behind the gradients."""
    machine = machine_with_host(elements_per_s=2e7)
    whole = captured("llama", machine=machine, num_layers=2, dim=256, vocab_size=4000)
    made = hosted_step(whole, (op for group in light_groups(whole.graph) for op in group))
    made = within(made, int(0.8 * needs(made, {})))
    problem = residency_problem(made)
    flow = PacedFlow(problem, made.arena_bytes, 16)
    solved = flow.solved()
    assert solved is not None
    assert len(solved.relaxed.shares) == len(problem.candidates)
    assert len(flow.candidates) - len(problem.candidates) == len(problem.beside_host) > 0
    work = problem.host_work
    until_s = float(problem.op_seconds[flow.window < flow.window[min(work.since)]].sum())
    assert flow.seconds > until_s + sum(work.seconds)
    alone = dataclasses.replace(problem, host_work=dataclasses.replace(work, seconds=(0.0,) * len(work.ops)))
    assert PacedFlow(alone, made.arena_bytes, 16).seconds < flow.seconds
