"""What stays gathered under a budget: never slower than its neighbours, full, above the bound, and as handed over."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from itertools import pairwise, product
from random import Random

import pytest

from lading.clusters import step_of
from lading.errors import ConfigError, PlanInfeasible
from lading.ir.plan import UnitResidency
from lading.ir.request import Request
from lading.memory.verify_ranks import verify_ranks
from lading.planner.unshard import POLICIES, Chosen, _bisect_largest_count, choose_groups, neighbor_peaks, plan_of
from lading.planner.unshardbound import lower_bound
from lading.planner.unshardwalk import walked_step
from lading.sim.buckets import Bucket, Costs
from lading.sim.gathers import gathered_step
from lading.sim.modules import Modules, modules_of

CASES = {
    "gpt2": ("gpt2", "zero3", 64, "default"),
    "many micro-batches": ("llama3.2-1b", "zero3,gb256", 64, "torchtitan-compile"),
    "slow network": ("llama3.2-3b", "zero3,recompute=full", 512, "torchtitan-compile"),
    "experts": ("qwen3-30b-a3b", "zero3,ep8", 64, "default"),
}


@cache
def chosen(case: str, share: float, policy: str = "residency") -> Chosen:
    model, layout, devices, stack = CASES[case]
    asked = Request(model=model, machine="h100", devices=devices, layout=layout, seq_len=4096, stack=stack)
    request, table = step_of(asked)
    low, high = peaks(case)
    return choose_groups(request, table, int(low + share * (high - low)), policy)


#: Cases that take seconds.
SLOW = ("experts", "many micro-batches")


@cache
def peaks(case: str) -> tuple[int, int]:
    """Of ZeRO-3 and of ZeRO-2."""
    model, layout, devices, stack = CASES[case]
    asked = Request(model=model, machine="h100", devices=devices, layout=layout, seq_len=4096, stack=stack)
    request, table = step_of(asked)
    return neighbor_peaks(request, table)


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES]
)
def test_between_its_neighbours(case: str) -> None:
    """Never slower than what fits, faster with more memory, which is used to within 2%; never below the bound."""
    shares = (0.0, 0.4, 1.0)
    for share in shares:
        found = chosen(case, share)
        rows = {row.policy: row for row in found.rows}
        assert tuple(rows) == POLICIES
        assert rows["zero3"].fits
        for row in rows.values():
            assert found.step_s <= row.step_s or not row.fits
            assert row.gap is None or row.gap >= 0
        assert 0.98 <= found.peak_bytes / found.budget_bytes <= 1
        assert found.gathered.step_s == found.step_s
        assert rows["zero2"].fits == (share == 1.0)
    for less, more in pairwise(shares):
        assert chosen(case, more).step_s <= chosen(case, less).step_s * (1 + 5e-3)


def test_groups_have_every_parameter_once() -> None:
    found = chosen("many micro-batches", 0.3)
    of = found.modules
    assert [n for b in found.buckets for n in range(b.first, b.last + 1)] == list(range(len(of.atoms)))
    assert sum(unit.unsharded_bytes for unit in found.units) == 2 * sum(of.elements(range(len(of.atoms))).values())
    names = [name for unit in found.units for name in unit.modules]
    assert len(names) == len(set(names))
    stays = {(unit.reshard_after_forward, unit.reshard_after_backward) for unit in found.units}
    assert stays == {(True, False), (False, False)}


def _tiny() -> Modules:
    """Four atoms: before, two blocks as they are, after."""
    asked = Request(model="gpt2", machine="h100", devices=16, layout="zero3,gb32", seq_len=512)
    request, table = step_of(asked)
    return modules_of(request, dataclasses.replace(table, counts=(1, 2, 1)))


def test_bound_is_below_everything_that_can_be() -> None:
    """All ways to keep and to merge the buckets of a small model, under several budgets."""
    of = _tiny()
    costs = Costs(of)
    starts = [0, *(n for n in range(1, len(of.atoms)) if of.atoms[n][0] != of.atoms[n - 1][0])]
    ends = [*(n - 1 for n in starts[1:]), len(of.atoms) - 1]
    steps = []
    for cuts in product((False, True), repeat=len(starts) - 1):
        spans = [(starts[0], ends[0])]
        for cut, first, last in zip(cuts, starts[1:], ends[1:], strict=True):
            spans[-1:] = [spans[-1], (first, last)] if cut else [(spans[-1][0], last)]
        for keeps, ahead in product(product(UnitResidency, repeat=len(spans)), (1, 2)):
            plan = [Bucket(a, b, keep, ahead, ahead) for (a, b), keep in zip(spans, keeps, strict=True)]
            steps.append(walked_step(costs, plan))
    assert len(steps) > 200
    for budget in sorted({step.peak_bytes for step in steps}):
        fastest = min(step.step_s for step in steps if step.peak_bytes <= budget)
        assert lower_bound(of, budget) <= fastest


@pytest.mark.parametrize(
    ("model", "layout", "stack"),
    [
        ("gpt2", "zero3,gb640", "default"),
        ("llama3-8b", "zero3,gb512", "torchtitan-eager"),
        ("llama3-8b", "tp8,sp,zero3,recompute=full", "torchtitan-compile"),
        ("qwen3-30b-a3b", "zero3,ep8,gb192", "torchtitan-compile"),
        ("llama3.2-1b", "zero3,gb128,recompute=full,recompute_layers=2", "deepspeed-zero3"),
        ("llama3-8b", "zero3,gb256,recompute=full,offload=parameters", "torchtitan-eager"),
        ("llama3.2-1b", "zero3,gb128", "megatron-2023"),
    ],
)
def test_walk_is_what_the_list_takes(model: str, layout: str, stack: str) -> None:
    """Any borders, stays and distances: seconds to rounding, bytes exactly; and the list is proven."""
    asked = Request(model=model, machine="h100", devices=64, layout=layout, seq_len=2048, stack=stack)
    request, table = step_of(asked)
    counts = tuple(min(count, 4) for count in table.counts)
    of = modules_of(request, dataclasses.replace(table, counts=counts))
    costs, draw = Costs(of), Random(7)
    for _ in range(20):
        plan = _random(of, draw)
        walked, listed = walked_step(costs, plan), gathered_step(costs, plan)
        assert walked.step_s == pytest.approx(listed.step_s, rel=1e-12)
        assert walked.peak_bytes == listed.peak_bytes
        verify_ranks(listed.program)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "layout", "stack"),
    [
        ("gpt2", "zero3", "torchtitan-compile"),
        ("llama3-8b", "zero3,gb256", "torchtitan-compile"),
        ("qwen3-30b-a3b", "zero3,ep8,gb256", "default"),
        ("llama3.2-1b", "zero3,gb128,recompute=full,recompute_layers=2", "deepspeed-zero3"),
        ("llama3.2-1b", "zero3,gb128", "megatron-2023"),
    ],
)
def test_bound_is_below_random_plans(model: str, layout: str, stack: str) -> None:
    """Any borders, stays and distances, under the budget that each needs; the closest come within 10% of it."""
    asked = Request(model=model, machine="h100", devices=64, layout=layout, seq_len=2048, stack=stack)
    request, table = step_of(asked)
    counts = tuple(min(count, 5) for count in table.counts)
    of = modules_of(request, dataclasses.replace(table, counts=counts))
    costs, draw, steps = Costs(of), Random(3), []
    for _ in range(300):
        steps.append(walked_step(costs, _random(of, draw)))
    fastest, least = float("inf"), float("inf")
    for step in sorted(steps, key=lambda each: (each.peak_bytes, each.step_s)):
        if step.step_s < fastest:
            fastest = step.step_s
            least = min(least, fastest / lower_bound(of, step.peak_bytes) - 1)
    assert -1e-9 <= least < 0.1


def _random(of: Modules, draw: Random) -> list[Bucket]:
    atoms = range(1, len(of.atoms))
    starts = [n for n in atoms if of.atoms[n][0] != of.atoms[n - 1][0]] if draw.random() < 0.7 else list(atoms)
    cuts = [0, *sorted(draw.sample(starts, min(len(starts), draw.choice((0, 1, 2, 4, 8))))), len(of.atoms)]
    share, found = draw.choice((0.0, 0.3, 0.7, 1.0)), []
    for first, end in pairwise(cuts):
        stays, others = (UnitResidency.STEP, UnitResidency.BACKWARD), (UnitResidency.RELEASE, UnitResidency.FORWARD)
        keep = draw.choice(stays if draw.random() < share else others)
        again = any(of.atom(n).read_again for n in range(first, end))
        found.append(Bucket(first, end - 1, keep, draw.choice((1, 1, 2, 5)), draw.choice((1, 1, 2, 5)), again))
    return found


def test_why_the_budget_is_not_full() -> None:
    full, all_there = chosen("gpt2", 0.4), chosen("gpt2", 1.5)
    assert full.why == "full"
    assert all_there.why.endswith(" left: nothing is gathered twice")
    assert sum(all_there.gathered.backward) == 0
    asked = Request(model="gpt2", machine="h100", devices=64, layout="zero3", seq_len=1024, stack="torchtitan-compile")
    request, table = step_of(asked)
    low, high = neighbor_peaks(request, table)
    found = choose_groups(request, table, int(low + 0.65 * (high - low)))
    assert found.peak_bytes < 0.98 * found.budget_bytes
    assert re.search(r"MiB left: (of the fuller plans tried, the fastest takes \d|no module more fits)", found.why)


def test_guesses_are_near_or_found_in_few_steps() -> None:
    """The most that holds is found from any guess, wrong ones too, in about twice the steps of a bisection."""
    for most in range(-1, 200, 7):
        for guess in (0, 60, 199):
            asked: list[int] = []

            def holds(count: int, most: int = most, asked: list[int] = asked) -> bool:
                asked.append(count)
                return count <= most

            assert _bisect_largest_count([1] * 199, guess, holds) == most if most < 199 else 199
            assert len(asked) <= 17


@pytest.mark.long
def test_plan_is_saved_as_chosen(tmp_path) -> None:
    plan = plan_of(chosen("slow network", 0.3), "1")
    plan.save(tmp_path / "plan.json")
    assert plan.load(tmp_path / "plan.json") == plan
    assert plan.choices.recomputed == tuple(f"layers.{n}" for n in range(28))
    assert plan.gap == pytest.approx(plan.step_s / plan.lower_bound_s - 1)


def test_refused() -> None:
    request, table = step_of(Request(model="gpt2", machine="h100", devices=8, layout="zero3"))
    with pytest.raises(ConfigError, match="expected one of zero3, zero2, reverse-greedy, residency, got 'zero1'"):
        choose_groups(request, table, 0, "zero1")
    with pytest.raises(PlanInfeasible, match="expected at most 1,000,000 bytes, got ") as caught:
        choose_groups(request, table, 10**6)
    assert caught.value.missing_bytes > 0
