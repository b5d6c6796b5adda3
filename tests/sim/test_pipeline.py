"""Pipelines: times by hand, closed forms, and what must hold of every run."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.pipeline_bounds import alive_peaks, closed_form_s, lower_bound_s
from tools.pipelines import PipelineRun, PipelineSeconds, simulate_pipeline

from lading.errors import SimulationError
from lading.ir.action import Work
from lading.ir.schedules import KINDS, V_SHAPED, Schedule, schedule
from lading.sim.rank_engine import end_beside

TINY = 1e-9


def halves(forward: float = 1.0, inputs: float = 1.0, weights: float = 1.0, send: float = 0.0) -> PipelineSeconds:
    return PipelineSeconds(
        forward=forward,
        backward=inputs + weights,
        backward_input=inputs,
        backward_weight=weights,
        send_forward=send,
        send_backward=send,
    )


def chunks_of(kind: str) -> int:
    return 2 if kind in V_SHAPED else 3 if kind == "interleaved" else 1


def test_two_stages_by_hand() -> None:
    # rank 0: F0 0-1, F1 1-2, then waits for B0; rank 1: F0 1.5-3.5, B0 3.5-6.5, F1 6.5-8.5, B1 8.5-11.5.
    seconds = PipelineSeconds(forward=[1, 2], backward=[2, 3], send_forward=0.5, send_backward=0.25)
    run = simulate_pipeline(schedule("1f1b", 2, 1, 2), seconds)
    assert run.schedule.texts(0) == ["0F0", "0F1", "0B0", "0B1"]
    assert run.start_s[0].tolist() == [0, 1, 6.75, 11.75]
    assert run.end_s[1].tolist() == [3.5, 6.5, 8.5, 11.5]
    assert run.arrived_s[0][:2].tolist() == [1.5, 2.5]
    assert np.isnan(run.arrived_s[0][2:]).all()
    assert run.makespan_s == 13.75
    assert run.busy_s.tolist() == [6, 10]
    assert run.bubble == pytest.approx([1 - 6 / 13.75, 1 - 10 / 13.75])
    assert run.gradients_ready_s.tolist() == [13.75, 11.5]


def test_a_rank_that_does_not_overlap_computes_nothing_while_it_sends() -> None:
    seconds = PipelineSeconds(forward=1, backward=2, send_forward=0.5, send_backward=0.5)
    run = simulate_pipeline(schedule("1f1b", 2, 1, 2), seconds, overlap=False)
    assert run.start_s[0].tolist() == [0, 1.5, 5.0, 8.5]
    assert run.end_s[1].tolist() == [2.5, 4.5, 6.0, 8.0]


def test_sends_of_one_direction_follow_each_other() -> None:
    seconds = PipelineSeconds(forward=1, backward=2, send_forward=3)
    run = simulate_pipeline(schedule("gpipe", 2, 1, 3), seconds)
    assert run.sent_s[0][:3].tolist() == [1, 4, 7]
    assert run.start_s[1][:3].tolist() == [4, 7, 10]


def test_neighbors_on_one_rank_hand_over_without_a_send() -> None:
    run = simulate_pipeline(schedule("zbv", 1, 2, 2), halves(send=5.0))
    assert run.makespan_s == run.busy_s[0] == 12
    assert np.isnan(run.sent_s[0]).all()


def test_pairs_take_their_share_and_are_counted_once() -> None:
    plan = schedule("dualpipe-v", 2, 2, 8)
    plain = simulate_pipeline(plan, halves())
    shared = simulate_pipeline(
        plan, PipelineSeconds(forward=1, backward=2, backward_input=1, backward_weight=1, joint=0.5)
    )
    assert plain.busy_s.tolist() == [48, 48]
    pairs = int(plan.orders[0][:, 3].sum())
    assert pairs > 0
    assert shared.busy_s[0] == 48 - 1.5 * pairs
    first = np.flatnonzero(plan.orders[0][:, 3])[0]
    assert shared.start_s[0][first] == shared.start_s[0][first + 1]
    assert shared.end_s[0][first] == shared.end_s[0][first + 1]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_stages_take_what_the_closed_form_says(kind: str, ranks: int) -> None:
    for forward, inputs, weights in ((1, 1, 1), (1, 1.2, 0.8), (1, 1.1, 0.9)):
        for rounds in (2, 5):
            plan = schedule(kind, ranks, chunks_of(kind), 2 * ranks * rounds)
            seconds = halves(forward, inputs, weights)
            found, expected = simulate_pipeline(plan, seconds).makespan_s, closed_form_s(plan, seconds)
            tolerance = 0.0 if kind in ("gpipe", "1f1b", "interleaved") else 0.03
            assert found == pytest.approx(expected, rel=tolerance + TINY), (forward, inputs, weights, rounds)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("send", [0.02, 0.1, 0.3])
def test_the_closed_form_knows_what_sends_cost(kind: str, send: float) -> None:
    for ranks in (2, 4, 8):
        plan = schedule(kind, ranks, chunks_of(kind), 4 * ranks)
        seconds = halves(send=send)
        assert simulate_pipeline(plan, seconds).makespan_s == pytest.approx(closed_form_s(plan, seconds), rel=0.03)


def test_bubbles_are_the_published_ones() -> None:
    # Narayanan 2021, section 2.2: (p - 1) / (m v) of the ideal time; Qi 2023: a third of that for ZB-H1 with F = I = W.
    for kind, chunks, share in (("1f1b", 1, 1.0), ("interleaved", 4, 0.25), ("zero-bubble", 1, 1 / 3)):
        run = simulate_pipeline(schedule(kind, 8, chunks, 32), halves(1 / chunks, 1 / chunks, 1 / chunks))
        assert run.makespan_s / (32 * 3) - 1 == pytest.approx(share * 7 / 32)
    # DualPipe's table: (PP / 2 - 1) (F&B + B - 3 W), PP counting stages.
    run = simulate_pipeline(schedule("dualpipe-v", 4, 2, 32), halves())
    assert run.makespan_s - 32 * 6 == pytest.approx((8 / 2 - 1) * (3 + 2 - 3))


def test_missing_seconds_and_wrong_shapes_are_named() -> None:
    with pytest.raises(SimulationError, match="needs the seconds of backward_input"):
        simulate_pipeline(schedule("zero-bubble", 2, 1, 4), PipelineSeconds(forward=1, backward=2))
    with pytest.raises(SimulationError, match=r"one a stage \(2\)"):
        simulate_pipeline(schedule("1f1b", 2, 1, 4), PipelineSeconds(forward=[1, 2, 3], backward=2))
    with pytest.raises(SimulationError, match="seconds >= 0"):
        simulate_pipeline(schedule("1f1b", 2, 1, 4), PipelineSeconds(forward=-1, backward=2))


def test_orders_that_wait_for_each_other_are_named() -> None:
    plan = schedule("1f1b", 2, 1, 2)
    turned = Schedule("1f1b", 2, 1, 2, (plan.orders[0][::-1], plan.orders[1]))
    with pytest.raises(SimulationError, match="waits forever"):
        simulate_pipeline(turned, halves())


@st.composite
def runs(draw: st.DrawFn) -> tuple[PipelineRun, PipelineSeconds]:
    kind = draw(st.sampled_from(KINDS))
    ranks = draw(st.integers(1, 5))
    micro_batches = 2 * ranks * draw(st.integers(1, 2))
    plan = schedule(kind, ranks, chunks_of(kind), micro_batches)
    some = st.floats(0, 3, allow_subnormal=False)

    def layer() -> np.ndarray:
        values = draw(st.lists(some, min_size=plan.stages, max_size=plan.stages))
        return np.array(values)[:, None] * draw(st.sampled_from([1.0, 1.0 + np.arange(micro_batches) / 7]))

    forward, inputs, weights, down, up = (layer() for _ in range(5))
    seconds = PipelineSeconds(
        forward=forward,
        backward=inputs + weights,
        backward_input=inputs,
        backward_weight=weights,
        send_forward=down,
        send_backward=up,
        joint=draw(st.sampled_from([1.0, 0.75])),
    )
    return simulate_pipeline(plan, seconds, overlap=draw(st.booleans())), seconds


@given(runs())
@settings(max_examples=60, deadline=None)
def test_what_holds_of_every_run(drawn: tuple[PipelineRun, PipelineSeconds]) -> None:
    run, seconds = drawn
    plan = run.schedule
    arrived: dict[tuple[bool, int, int], float] = {}
    for rank, order in enumerate(plan.orders):
        for row, at in zip(order.tolist(), run.arrived_s[rank].tolist(), strict=True):
            if row[0] != Work.BACKWARD_WEIGHT:
                arrived[row[0] == Work.FORWARD, plan.stage(rank, row[1]), row[2]] = at
    for rank, order in enumerate(plan.orders):
        start, end = run.start_s[rank], run.end_s[rank]
        assert (end >= start).all()
        alone = order[:-1, 3] == 0
        assert (start[1:][alone] >= end[:-1][alone]).all(), "two actions at once on one rank"
        for row, at in zip(order.tolist(), start.tolist(), strict=True):
            forward, before = row[0] == Work.FORWARD, plan.stage(rank, row[1]) + (-1 if row[0] == Work.FORWARD else 1)
            if row[0] != Work.BACKWARD_WEIGHT and 0 <= before < plan.stages and plan.rank_of(before) != rank:
                assert at >= arrived[forward, before, row[2]]
    assert run.makespan_s >= run.busy_s.max() * (1 - TINY)
    if seconds.joint == 1.0:
        assert run.makespan_s >= lower_bound_s(plan, seconds) * (1 - TINY)


@given(runs())
@settings(max_examples=20, deadline=None)
def test_the_same_input_gives_the_same_log(drawn: tuple[PipelineRun, PipelineSeconds]) -> None:
    run, seconds = drawn
    overlap = simulate_pipeline(run.schedule, seconds)
    again = simulate_pipeline(run.schedule, seconds)
    assert [e.tobytes() for e in overlap.end_s] == [e.tobytes() for e in again.end_s]


@given(runs())
@settings(max_examples=20, deadline=None)
def test_what_is_alive_over_time_peaks_where_the_order_says(drawn: tuple[PipelineRun, PipelineSeconds]) -> None:
    run, _ = drawn
    peaks = alive_peaks(run.schedule, 1.0, 1.0)
    for rank in range(run.schedule.ranks):
        times, counts = run.alive(rank)
        assert (np.diff(times) >= 0).all()
        assert counts[-1] == 0
        assert counts.max() <= peaks[rank]


def test_unequal_stages_are_paced_by_the_slowest() -> None:
    plan = schedule("1f1b", 4, 1, 64)
    run = simulate_pipeline(plan, PipelineSeconds(forward=[1, 1, 1, 1.5], backward=[2, 2, 2, 3]))
    assert run.makespan_s == pytest.approx(64 * 4.5 + 3 * 3)
    assert run.makespan_s == lower_bound_s(plan, PipelineSeconds(forward=[1, 1, 1, 1.5], backward=[2, 2, 2, 3]))


def test_reductions_follow_each_other_on_a_rank() -> None:
    run = simulate_pipeline(schedule("interleaved", 2, 2, 4), PipelineSeconds(forward=1, backward=2))
    ready = run.gradients_ready_s
    assert ready[2] < ready[0]
    for seconds in (0.5, 20.0):
        start, end = run.reductions(seconds)
        assert end - start == pytest.approx(np.full(4, seconds))
        assert (start >= ready).all()
        assert start[0] == max(ready[0], end[2])
        assert start[1] == max(ready[1], end[3])
    start, end = run.reductions([0.0, 0.0, 3.0, 0.0])
    assert start[0] == max(ready[0], ready[2] + 3.0)


@pytest.mark.parametrize(
    ("busy", "end_s"),
    [
        ([(0.0, 100.0)], 15.0),  # all of it beside the network
        ([(5.0, 8.0)], 11.0),  # 5 s alone, 3 that do 2, and 3 more
        ([(2.0, 5.0), (6.0, 100.0)], 13.5),  # 2 alone, 3 that do 2, 1 alone, and 5 that take 7.5
        ([(-9.0, -1.0), (10.0, 11.0)], 10.0),  # before and behind it
    ],
)
def test_computing_is_slower_as_long_as_the_network_is_busy(busy: list[tuple[float, float]], end_s: float) -> None:
    """Computing of 10 s takes half as long again there."""
    assert end_beside(busy, 0.0, 10.0, 0.5) == pytest.approx(end_s)


def test_a_large_pipeline_is_quick() -> None:
    seconds = PipelineSeconds(forward=1, backward=2, send_forward=0.01, send_backward=0.01)
    began = time.process_time()
    run = simulate_pipeline(schedule("interleaved", 16, 8, 128), seconds)
    took_s = time.process_time() - began
    assert sum(len(end) for end in run.end_s) == 2 * 16 * 8 * 128
    assert took_s < 2.0
