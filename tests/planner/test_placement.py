"""Placement on unlike devices: exact where it says so, never below its bound, as brute force where that is possible."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, permutations, product
from math import inf
from random import Random

import pytest
from benchmarks.planner.listing import favorites, placed
from tests.planner.placements import chain, graph, tied, training

from lading.errors import ConfigError, PlanInfeasible
from lading.ir.fleet import Join, network_of
from lading.ir.placement import Placement, PlacementProblem, Task, TaskFlow
from lading.planner.placement.chain import best_cut, crossings, place_chain
from lading.planner.placement.contest import contest, place
from lading.planner.placement.relaxed import relax, repaired
from lading.planner.placement.trial import Trial

SEEDS = range(5)


def _contiguous(problem: PlacementProblem) -> Iterator[list[int]]:
    """Every cut into parts with every choice and order of devices."""
    n, devices = len(problem.groups), range(len(problem.network.devices))
    for parts in range(1, len(devices) + 1):
        for cuts in combinations(range(1, n), parts - 1):
            for order in permutations(devices, parts):
                ends = (*cuts, n)
                starts = (0, *cuts)
                yield [d for d, a, b in zip(order, starts, ends, strict=True) for _ in range(a, b)]


def _best(trial: Trial, assignments: Iterator[list[int]] | product[tuple[int, ...]]) -> Placement | None:
    placed = (trial.of(devices) for devices in assignments)
    return min((p for p in placed if p.fits), key=lambda p: p.step_s, default=None)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("memory", [0.3, 0.45, 1.0])
def test_the_cut_of_a_chain_is_the_best_of_all_cuts(seed: int, memory: float) -> None:
    problem = chain(seed, memory=memory)
    best = _best(Trial(problem), _contiguous(problem))
    if best is None:
        with pytest.raises(PlanInfeasible):
            place(problem, "chain")
        return
    cut = best_cut(problem, problem.network.memory_bytes)
    found = place(problem, "chain")
    assert cut is not None
    assert cut.latency_s == pytest.approx(best.step_s, rel=1e-9)
    assert found.step_s == pytest.approx(best.step_s, rel=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", [training, tied])
@pytest.mark.parametrize("memory", [0.5, 0.75, 1.0])
def test_the_cut_of_a_training_chain_is_the_best_of_all_cuts(make, seed: int, memory: float) -> None:
    problem = make(seed, memory=memory)
    best = _best(Trial(problem), _contiguous(problem))
    if best is None:
        with pytest.raises(PlanInfeasible):
            place(problem, "chain")
        return
    assert place(problem, "chain").step_s == pytest.approx(best.step_s, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS[:3])
@pytest.mark.parametrize("make", [chain, training, graph, tied])
@pytest.mark.parametrize("memory", [0.5, 1.0])
def test_no_placement_is_below_the_bound_and_lp_is_near_the_best(make, seed: int, memory: float) -> None:
    copies = 1 + 2 * (seed % 2)
    problem = make(seed, count=5, memory=memory, micro_batches=copies)
    best = _best(Trial(problem), product(range(3), repeat=len(problem.groups)))
    if best is None:
        with pytest.raises(PlanInfeasible):
            contest(problem)
        return
    found, rough = contest(problem), _leaving_only(problem)
    assert 0 < rough <= found.bound_s * (1 + 1e-6)
    assert found.bound_s <= best.step_s * (1 + 1e-9)
    assert relax(problem).bound_s <= found.bound_s  # pyright: ignore[reportOptionalMemberAccess]
    by_name = {p.policy: p for p in found.placements}
    assert found.best.fits
    assert found.best.step_s == min(p.step_s for p in found.placements)
    assert best.step_s * (1 - 1e-9) <= found.best.step_s <= best.step_s * 1.04
    assert by_name["lp"].step_s <= best.step_s * 1.04


def _leaving_only(problem: PlacementProblem) -> float:
    """The bound as of a problem with many columns, where transfers count by where they leave."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lading.planner.placement.relaxed._MOST_COLUMNS", 0)
        rough = relax(problem)
    assert rough is not None
    return rough.bound_s


@pytest.mark.parametrize("seed", SEEDS)
def test_without_limits_the_bound_of_a_chain_is_its_best_placement(seed: int) -> None:
    problem = chain(seed, count=6, memory=5.0)
    best = _best(Trial(problem), product(range(3), repeat=6))
    assert best is not None
    assert relax(problem).bound_s == pytest.approx(best.step_s, rel=1e-4)  # pyright: ignore[reportOptionalMemberAccess]


def _objective(problem: PlacementProblem, devices: list[int]) -> float:
    """L + (M - 1) B of a contiguous placement of a chain, added up here; infinite where a part does not fit."""
    starts = [0, *(n for n in range(1, len(devices)) if devices[n] != devices[n - 1]), len(devices)]
    latency_s = period_s = 0.0
    for part, (a, b) in enumerate(pairwise(starts)):
        own, d = problem.groups[a:b], devices[a]
        window = min(problem.micro_batches, len(starts) - 1 - part)
        need = sum(g.resident_bytes + window * g.kept_bytes for g in own) + max(g.working_bytes for g in own)
        if need > problem.network.memory_bytes[d]:
            return inf
        spent = [sum(g.seconds[d] for g in own)]
        if b < len(devices):
            crossing = [(f, problem.group_of[f.source] < b) for f in problem.flows
                        if (problem.group_of[f.source] < b) != (problem.group_of[f.targets[0]] < b)]  # fmt: skip
            way = (d, devices[b])
            spent.append(
                sum(problem.network.transfer_s(*(way if on else way[::-1]), f.size_bytes) for f, on in crossing)
            )
        latency_s, period_s = latency_s + sum(spent), max(period_s, *spent)
    return latency_s + (problem.micro_batches - 1) * period_s


@pytest.mark.parametrize("make", [chain, training])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_cut_of_a_pipeline_is_the_best_of_all_cuts(make, seed: int) -> None:
    problem = make(seed, count=6, memory=0.7, micro_batches=4)
    best = min(_objective(problem, devices) for devices in _contiguous(problem))
    cut = best_cut(problem, problem.network.memory_bytes, once=False)
    assert cut is not None
    assert cut.total_s(4) == pytest.approx(best, rel=2e-4)
    assert _objective(problem, cut.assignment(len(problem.groups))) == pytest.approx(cut.total_s(4))


@pytest.mark.long
@pytest.mark.parametrize("make", [chain, training, tied])
@pytest.mark.parametrize("seed", SEEDS[:3])
@pytest.mark.parametrize("memory", [0.5, 0.8])
def test_a_pipeline_is_as_fast_as_the_fastest_cut_simulated(make, seed: int, memory: float) -> None:
    problem = make(seed, memory=memory, micro_batches=4)
    best = _best(Trial(problem), _contiguous(problem))
    if best is None:
        with pytest.raises(PlanInfeasible):
            place(problem, "chain")
        return
    assert place(problem, "chain").step_s == pytest.approx(best.step_s, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 5])
def test_cuts_too_many_to_try_are_refined_where_that_helps(seed: int) -> None:
    """By moves alone, with less effort than every cut would take, where the program's own cut is not the fastest."""
    problem = training(seed, count=14, memory=0.6, micro_batches=6)
    trial = Trial(problem)
    rough = place_chain(trial)
    assert rough is not None
    found = place_chain(trial, 1.0)
    assert found is not None
    best = _best(Trial(problem), _contiguous(problem))
    assert best is not None
    assert rough.step_s > best.step_s * 1.002
    assert found.step_s == pytest.approx(best.step_s, rel=1e-9)


def test_of_alike_devices_no_order_is_lost() -> None:
    """Two pairs of equal devices: as good as with devices that differ by nothing to speak of."""
    slow = Random(1)
    work = [slow.uniform(1e-3, 1e-2) for _ in range(9)]

    def problem(differ: float) -> PlacementProblem:
        speeds = (1.0, 1.0 + differ, 2.0, 2.0 + differ)
        tasks = tuple(Task(f"t{n}", tuple(w * s for s in speeds), 10) for n, w in enumerate(work))
        pairs = combinations("abcd", 2)
        rate = {("a", "b"): 1e9, ("c", "d"): 1e8}
        net = network_of(dict.fromkeys("abcd", 55), [_wire(*p, bandwidth=rate.get(p, 1e7)) for p in pairs])
        return PlacementProblem(
            "pairs", tasks, tuple(TaskFlow(n, (n + 1,), 10) for n in range(8)), net, micro_batches=6
        )

    alike, unlike = (best_cut(problem(d), (55,) * 4) for d in (0.0, 1e-7))
    assert alike is not None
    assert unlike is not None
    assert len(alike.devices) >= 3
    assert alike.total_s(6) == pytest.approx(unlike.total_s(6), rel=2e-4)


def test_a_pipeline_of_many_micro_batches_balances_its_parts() -> None:
    """Two equal devices, eight equal layers, transfers that cost nothing to speak of: half and half."""
    net = network_of({"a": 10**9, "b": 10**9}, [_wire("a", "b", bandwidth=1e12)])
    tasks = tuple(Task(f"t{n}", (1e-2, 1e-2)) for n in range(8))
    problem = PlacementProblem("even", tasks, tuple(TaskFlow(n, (n + 1,), 8) for n in range(7)), net, micro_batches=20)
    cut = best_cut(problem, net.memory_bytes)
    assert cut is not None
    assert cut.starts == (0, 4)
    assert place(problem, "chain").step_s == pytest.approx(0.08 + 19 * 0.04, rel=1e-4)


def test_memory_forces_a_part_onto_the_slow_device() -> None:
    net = network_of({"fast": 25, "slow": 1000}, [_wire("fast", "slow", bandwidth=1e3)])
    tasks = tuple(Task(f"t{n}", (1.0, 4.0), resident_bytes=10) for n in range(4))
    problem = PlacementProblem("tight", tasks, tuple(TaskFlow(n, (n + 1,), 1) for n in range(3)), net)
    found = place(problem)
    assert found.devices.count(0) == 2
    assert len(found.parts) == 2
    assert found.step_s == pytest.approx(2 * 1.0 + 2 * 4.0 + 1e-3)
    assert found.peak_bytes[0] <= 25


def test_what_fits_nowhere_says_what_is_missing() -> None:
    net = network_of({"a": 25, "b": 15}, [_wire("a", "b", bandwidth=1e3)])
    one = PlacementProblem("one", (Task("big", (1.0, 1.0), resident_bytes=30),), (), net)
    with pytest.raises(PlanInfeasible, match="big alone needs 30 B, the largest device has 25 B") as caught:
        place(one)
    assert caught.value.missing_bytes == 5
    tasks = tuple(Task(f"t{n}", (1.0, 1.0), resident_bytes=9) for n in range(5))
    with pytest.raises(PlanInfeasible, match="all parts need 45 B, the devices have 40 B together"):
        place(PlacementProblem("all", tasks, (), net))
    with pytest.raises(ConfigError, match="expected a policy among"):
        place(one, "guess")


def test_named_policies_do_what_their_papers_say() -> None:
    net = network_of({"a": 10**6, "b": 10**6}, [_wire("a", "b", bandwidth=1e6)])
    fork = (
        Task("root", (1.0, 1.0), 10), Task("left", (2.0, 2.0), 10), Task("right", (2.0, 2.0), 10),
        Task("join", (1.0, 1.0), 10),
    )  # fmt: skip
    near = (TaskFlow(0, (1, 2), 1000), TaskFlow(1, (3,), 900_000), TaskFlow(2, (3,), 1000))
    problem = PlacementProblem("fork", fork, near, net)
    loved = favorites(problem)
    assert loved[1] == 3  # its bytes are the many
    assert loved[0] in (1, 2)
    made = placed(problem)
    assert set(made) == {"m-topo", "m-etf", "m-sct", "heft"}
    assert all(placement.fits for placement in made.values())
    for name in ("m-etf", "m-sct", "heft"):
        devices = made[name].devices
        assert devices[1] != devices[2]  # both branches at once
        assert made[name].step_s < 6.0
    for name in ("m-sct", "heft"):
        assert made[name].devices[3] == made[name].devices[1]
    assert made["m-topo"].devices == (0, 0, 0, 1)  # 40 bytes on two devices: 20 and one task's more


def test_repair_moves_what_costs_least_a_byte() -> None:
    net = network_of({"a": 20, "b": 100}, [_wire("a", "b", bandwidth=1e6)])
    tasks = (Task("dear", (1.0, 9.0), 10), Task("cheap", (1.0, 1.5), 10), Task("mean", (1.0, 3.0), 10))
    problem = PlacementProblem("p", tasks, (), net)
    assert repaired(problem, [0, 0, 0], (20, 100), crossings(problem)) == [0, 1, 0]


def test_the_same_problem_gets_the_same_placement() -> None:
    first, second = (contest(graph(3, count=9, memory=0.6), effort=1) for _ in range(2))
    assert first.placements == second.placements


def _wire(a: str, b: str, *, bandwidth: float) -> Join:
    return Join(
        name=f"{a}-{b}", devices=(a, b), medium="wire", bandwidth_bytes_per_s=bandwidth, efficiency=1.0, latency_s=0.0
    )
