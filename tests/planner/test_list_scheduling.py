"""Placed tasks, simulated: times and bytes worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from tests.planner.placements import chain, graph, training

from lading.errors import ConfigError, SimulationError
from lading.ir.fleet import Join, Network, network_of
from lading.ir.placement import PlacementProblem, Shared, Task, TaskFlow
from lading.planner.placement.list_scheduling import PlacedSimulator


def _net(medium: str = "wire", count: int = 2) -> Network:
    names = [f"d{n}" for n in range(count)]
    link = Join(
        name="n", devices=tuple(names), medium=medium, bandwidth_bytes_per_s=100.0, efficiency=1.0, latency_s=0.5
    )
    return network_of(dict.fromkeys(names, 10_000), [link])


def test_a_chain_adds_up() -> None:
    tasks = (Task("a", (1.0, 2.0), 10, working_bytes=7), Task("b", (3.0, 4.0), 20), Task("c", (5.0, 6.0), 30))
    problem = PlacementProblem("chain", tasks, (TaskFlow(0, (1,), 100), TaskFlow(1, (2,), 200)), _net())
    run = PlacedSimulator(problem).run((0, 1, 0), (1, 1), record=True)
    assert run.step_s == 1 + (0.5 + 1) + 4 + (0.5 + 2) + 5
    assert run.busy_s == (6.0, 4.0)
    assert sum(run.channel_s) == 3.0
    assert run.peak_bytes == (40 + 200, 20 + 100 + 200)  # what c takes; what b takes and gives
    assert [(s, label, a, b) for s, label, a, b in run.events if s.startswith("d")] == [
        ("d0", "a", 0.0, 1.0), ("d1", "b", 2.5, 6.5), ("d0", "c", 9.0, 14.0),
    ]  # fmt: skip
    assert run.timeline().duration_s == 14.0


@pytest.mark.parametrize(("medium", "step_s"), [("wire", 4.5), ("switch", 5.5), ("shared", 5.5)])
def test_two_transfers_share_what_the_medium_says(medium: str, step_s: float) -> None:
    """From d0 to d1 and to d2 at once: a wire each, else one port or one air."""
    tasks = (Task("a", (1.0,) * 3), Task("b", (2.0,) * 3), Task("c", (2.0,) * 3))
    problem = PlacementProblem("fork", tasks, (TaskFlow(0, (1,), 100), TaskFlow(0, (2,), 100)), _net(medium, 3))
    assert PlacedSimulator(problem).run((0, 1, 2), (1, 1, 1)).step_s == step_s


def test_bytes_for_two_targets_of_a_device_are_sent_once() -> None:
    tasks = (Task("a", (1.0, 1.0)), Task("b", (1.0, 1.0)), Task("c", (1.0, 1.0)))
    problem = PlacementProblem("fork", tasks, (TaskFlow(0, (1, 2), 100),), _net())
    run = PlacedSimulator(problem).run((0, 1, 1), (1, 1))
    assert run.step_s == 1 + 1.5 + 2
    assert run.channel_s == (1.0, 0.0)
    assert run.peak_bytes == (100, 100)


def test_what_has_most_behind_it_goes_first() -> None:
    tasks = (Task("short", (1.0,)), Task("long", (1.0,)), Task("after", (5.0,)))
    problem = PlacementProblem("two", tasks, (TaskFlow(1, (2,), 0),), network_of({"d0": 1}, []))
    run = PlacedSimulator(problem).run((0, 0, 0), (1,), record=True)
    assert [label for _, label, _, _ in run.events] == ["long", "after", "short"]


def _pipeline(copies: int) -> PlacementProblem:
    """Two layers forward and backward, and an update of each."""
    tasks = (
        Task("f0", (1.0, 1.0), 8, 5, group="l0"), Task("f1", (1.0, 1.0), 8, 5, group="l1"),
        Task("b1", (2.0, 2.0), group="l1", backward=True), Task("b0", (2.0, 2.0), group="l0", backward=True),
        Task("u0", (1.0, 1.0), group="l0", once_per_step=True), Task("u1", (1.0, 1.0), group="l1", once_per_step=True),
    )  # fmt: skip
    flows = (
        TaskFlow(0, (1,), 0),
        TaskFlow(1, (2,), 5),
        TaskFlow(0, (3,), 5),
        TaskFlow(2, (3,), 0),
        TaskFlow(3, (4,), 0),
        TaskFlow(2, (5,), 0),
    )
    link = Join(name="n", devices=("d0", "d1"), medium="wire", bandwidth_bytes_per_s=1.0, efficiency=1.0, latency_s=0.0)
    return PlacementProblem("pipe", tasks, flows, network_of({"d0": 99, "d1": 99}, [link]), copies)


def test_a_pipeline_is_one_forward_one_backward() -> None:
    run = PlacedSimulator(_pipeline(4)).run((0, 1), (2, 1), record=True)
    first = [label for stream, label, _, _ in run.events if stream == "d0"]
    assert first == [
        "f0 [0]", "f0 [1]", "b0 [0]", "f0 [2]", "b0 [1]", "f0 [3]", "b0 [2]", "b0 [3]", "u0",
    ]  # fmt: skip
    second = [label for stream, label, _, _ in run.events if stream == "d1"]
    assert second == [f"{what}1 [{n}]" for n in range(4) for what in "fb"] + ["u1"]
    assert run.step_s == 1 + 4 * 3 + 2 + 1
    assert run.peak_bytes == (8 + 2 * 5, 8 + 5)  # two micro-batches under way on the first, one on the last


def test_a_window_of_one_waits_for_the_whole_micro_batch() -> None:
    run = PlacedSimulator(_pipeline(3)).run((0, 1), (1, 1))
    assert run.step_s == 3 * 6 + 1
    assert run.peak_bytes == (13, 13)


@pytest.mark.parametrize("make", [chain, training, graph])
@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_placed_nothing_is_overbooked(make: Callable[..., PlacementProblem], seed: int) -> None:
    problem = make(seed, count=6, micro_batches=1 + seed % 3)
    random = Random(seed)
    devices = [random.randrange(3) for _ in problem.groups]
    simulator = PlacedSimulator(problem)
    run = simulator.run(devices, (2, 1, 3), record=True)
    assert simulator.run(devices, (2, 1, 3), record=True) == run
    for stream in {stream for stream, *_ in run.events}:
        spans = sorted((a, b) for name, _, a, b in run.events if name == stream)
        assert all(a <= b for a, b in spans)
        assert all(end <= begin + 1e-12 for (_, end), (begin, _) in pairwise(spans))
    assert max(*run.busy_s, *run.channel_s) <= run.step_s * (1 + 1e-12)
    assert run.step_s >= _longest_way(problem, devices) * (1 - 1e-12)
    alone = [sum(g.resident_bytes for g, d in zip(problem.groups, devices, strict=True) if d == n) for n in range(3)]
    assert all(peak >= size for peak, size in zip(run.peak_bytes, alone, strict=True))
    assert sum(run.busy_s) == pytest.approx(
        problem.micro_batches * sum(g.seconds[d] for g, d in zip(problem.groups, devices, strict=True))
    )


def _longest_way(problem: PlacementProblem, devices: list[int]) -> float:
    """Seconds of one micro-batch where nothing waits for anything but its inputs."""
    ends: list[float] = []
    for number, task in enumerate(problem.tasks):
        own = devices[problem.group_of[number]]
        ready = [
            ends[f.source] + problem.network.transfer_s(devices[problem.group_of[f.source]], own, f.size_bytes)
            for f in problem.flows
            if number in f.targets
        ]
        ends.append(max(ready, default=0.0) + task.seconds[own])
    return max(ends)


def test_what_cannot_be_is_an_error() -> None:
    tasks = (Task("a", (1.0, float("inf"))), Task("b", (1.0, 1.0)))
    problem = PlacementProblem("p", tasks, (TaskFlow(0, (1,), 1),), _net())
    with pytest.raises(SimulationError, match="task a cannot run on d1"):
        PlacedSimulator(problem).run((1, 1), (1, 1))
    with pytest.raises(ConfigError, match="expected a flow of >= 0 bytes to later tasks"):
        PlacementProblem("p", tasks, (TaskFlow(1, (0,), 1),), _net())
    with pytest.raises(ConfigError, match="expected 2 seconds >= 0"):
        PlacementProblem("p", (Task("a", (1.0,)),), (), _net())
    with pytest.raises(ConfigError, match="no device can"):
        PlacementProblem("p", (Task("a", (float("inf"), float("inf"))),), (), _net())
    once = (Task("a", (1.0, 1.0), once_per_step=True), Task("b", (1.0, 1.0)))
    with pytest.raises(SimulationError, match="runs once a step and feeds one that"):
        PlacedSimulator(PlacementProblem("p", once, (TaskFlow(0, (1,), 1),), _net()))


def _tied() -> PlacementProblem:
    """Two layers and a weight of theirs: each makes 100 bytes of gradient, sends them to the other, and updates."""
    tasks = (
        Task("a", (1.0, 1.0), 10, group="a"), Task("b", (1.0, 1.0), 20, group="b"),
        Task("at a", (3.0, 4.0), group="a", once_per_step=True),
        Task("at b", (3.0, 4.0), group="b", once_per_step=True),
    )  # fmt: skip
    gradients = (TaskFlow(0, (3,), 100, resident_at_source=True), TaskFlow(1, (2,), 100, resident_at_source=True))
    flows = (TaskFlow(0, (1,), 0), TaskFlow(0, (2,), 0), TaskFlow(1, (3,), 0), *gradients)
    return PlacementProblem("tied", tasks, flows, _net(), 2, (), (Shared((2, 3), 400),))


def test_what_is_tied_is_there_once_and_updated_once_on_one_device() -> None:
    run = PlacedSimulator(_tied()).run((0, 0), (2, 1), record=True)
    assert run.step_s == 2 * 2 + 3
    assert run.peak_bytes == (10 + 20 + 400, 0)
    assert run.busy_s == (7.0, 0.0)


def test_what_is_tied_over_two_devices_is_on_both_and_exchanged_once_a_step() -> None:
    run = PlacedSimulator(_tied()).run((0, 1), (2, 1), record=True)
    sent = [(label, start) for _, label, start, _ in run.events if " to " in label]
    assert sent == [
        ("a to d1", 1.0),
        ("a to d1", 2.0),
        ("a to d1", 2.0),
        ("b to d0", 3.5),
    ]  # two activations, gradients
    assert run.peak_bytes == (10 + 400 + 100, 20 + 400 + 100)  # the other's gradient while it is added
    assert run.step_s == 3.5 + 1.5 + 3  # the gradient from d1, then the update on d0
    assert run.busy_s == (2 + 3.0, 2 + 4.0)


def test_sharing_names_tasks_of_different_groups() -> None:
    tasks = (Task("a", (1.0, 1.0), group="g"), Task("b", (1.0, 1.0), group="g"))
    with pytest.raises(ConfigError, match="expected >= 0 shared bytes of tasks in different groups"):
        PlacementProblem("twice", tasks, (), _net(), 1, (), (Shared((0, 1), 5),))
