"""Clusters: equal ranks do what one pipeline does, unequal ones wait for the slowest as order statistics say."""

from __future__ import annotations

import time

import numpy as np
import pytest
from benchmarks.simulator.stages import job_of
from tests.sim.waiting import largest_factor, stalled_share
from tools.pipelines import PipelineSeconds, simulate_pipeline

from lading.errors import ConfigError, SimulationError
from lading.ir.action import Work
from lading.ir.schedules import schedule
from lading.sim.cluster import Job, Stretches, simulate_cluster
from lading.sim.noise import Jitter, Noise, largest_of

CALM = Noise()


def work(pieces: int = 4, collective_s: float = 0.01) -> dict[Work, Stretches]:
    """Forward of one second and more in pieces, backward of two."""
    meets = (collective_s,) * pieces
    return {
        Work.FORWARD: Stretches((1 / pieces,) * pieces, meets),
        Work.BACKWARD: Stretches((2 / pieces,) * pieces, meets),
        Work.BACKWARD_INPUT: Stretches((1.1 / pieces,) * pieces, meets),
        Work.BACKWARD_WEIGHT: Stretches((0.9,), (0.0,)),
    }


def alone(pieces: int, *, group: int, replicas: int, collective_s: float = 1e-9) -> Job:
    """One pipeline rank, four micro-batches of one second forward and two back."""
    plan = schedule("1f1b", 1, 1, 4)
    return job_of(plan, work(pieces, collective_s), group=group, replicas=replicas)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("kind", "ranks", "chunks"),
    [("gpipe", 4, 1), ("1f1b", 4, 1), ("interleaved", 4, 3), ("zero-bubble", 4, 1), ("zbv", 3, 2)],
)
def test_equal_ranks_do_what_the_pipeline_does(kind: str, ranks: int, chunks: int, overlap: bool) -> None:
    plan = schedule(kind, ranks, chunks, 12)
    job = job_of(plan, work(), send_s=(0.3, 0.2), overlap=overlap, group=2, replicas=3)
    totals = {name: stretches.total_s for name, stretches in work().items()}
    seconds = PipelineSeconds(
        forward=totals[Work.FORWARD],
        backward=totals[Work.BACKWARD],
        backward_input=totals[Work.BACKWARD_INPUT],
        backward_weight=totals[Work.BACKWARD_WEIGHT],
        send_forward=0.3,
        send_backward=0.2,
    )
    run = simulate_cluster(job, CALM)
    assert run.step_s[0] == pytest.approx(simulate_pipeline(plan, seconds, overlap=overlap).makespan_s)
    assert len(run.busy_s) == job.ranks == 6 * ranks


def test_pairs_run_one_after_the_other() -> None:
    plan = schedule("dualpipe-v", 3, 2, 8)
    run = simulate_cluster(job_of(plan, work(collective_s=0.0)), CALM)
    seconds = PipelineSeconds(forward=1, backward=2, backward_input=1.1, backward_weight=0.9)
    assert run.step_s[0] <= simulate_pipeline(plan, seconds).makespan_s + 1e-9
    assert run.busy_s == pytest.approx(np.full(3, 48.0))


def test_reductions_run_beside_the_backwards_of_other_chunks() -> None:
    plan = schedule("interleaved", 2, 2, 4)
    plain = job_of(plan, work(collective_s=0.0), replicas=2)
    late = simulate_cluster(plain, CALM).step_s[0]
    ready = simulate_pipeline(plan, PipelineSeconds(forward=1, backward=2)).gradients_ready_s
    for reduce_s in (0.5, 5.0):
        job = job_of(plan, work(collective_s=0.0), replicas=2, reduce_s=reduce_s, end_s=0.25)
        found = simulate_cluster(job, CALM).step_s[0]
        ends = [max(ready[2 + r] + reduce_s, ready[r]) + reduce_s for r in range(2)]
        assert found == pytest.approx(max(late, *ends) + 0.25)


def test_the_same_seed_gives_the_same_log_and_another_does_not() -> None:
    job = job_of(schedule("1f1b", 4, 1, 8), work(), group=2, replicas=4, steps=2)
    noise = {"jitter": 0.05, "spread": 0.02}
    runs = [simulate_cluster(job, Noise(**noise, seed=seed)) for seed in (1, 1, 2)]
    assert runs[0].digest == runs[1].digest != runs[2].digest
    assert runs[0].step_s.tolist() == runs[1].step_s.tolist()
    assert len(runs[0].step_s) == 2
    assert runs[0].events == 2 * job.ranks * 8 * 2 * (4 + 4)
    with Jitter(0.3, 7, 1 << 20) as one, Jitter(0.3, 7, 1 << 20) as two:
        for count in (1 << 19, 1 << 20, 5):
            assert (one.take(count) == two.take(count)).all()


@pytest.mark.parametrize(("group", "replicas"), [(1, 64), (8, 1), (8, 64), (4, 256)])
@pytest.mark.parametrize("noise", [{"jitter": 0.05}, {"spread": 0.02}, {"jitter": 0.05, "spread": 0.02}])
def test_losses_are_those_of_the_largest_of_n(noise: dict[str, float], group: int, replicas: int) -> None:
    job = alone(10, group=group, replicas=replicas)
    found = np.mean([simulate_cluster(job, Noise(**noise, seed=seed)).step_s[0] for seed in range(12)]) / 12 - 1
    pieces = (0.1,) * 40 + (0.2,) * 40
    expected = stalled_share(pieces, group=group, replicas=replicas, **noise)
    assert found == pytest.approx(expected, rel=0.1)


def test_the_largest_of_n_is_that_of_draws() -> None:
    draws = np.random.default_rng(0).standard_normal((20000, 8)).max(axis=1)
    assert largest_of(8) == pytest.approx(draws.mean(), rel=0.01)
    assert largest_of(10240) == pytest.approx(3.852, abs=0.01)
    with Jitter(0.2, 0, 1 << 20) as jitter:
        factors = jitter.take(1 << 20).reshape(-1, 16)
    assert factors.mean() == pytest.approx(1, abs=1e-3)
    assert largest_factor(0.2, 16) == pytest.approx((factors.max(axis=1).mean(), factors.max(axis=1).std()), rel=0.01)


def test_pipelines_lose_more_than_their_ranks_alone_and_less_than_meeting_each_time() -> None:
    plan = schedule("1f1b", 8, 1, 32)
    stretches = {Work.FORWARD: Stretches((1.0,), (0.0,)), Work.BACKWARD: Stretches((2.0,), (0.0,))}
    calm, jittery = (
        simulate_cluster(job_of(plan, stretches, replicas=32), noise).step_s[0] for noise in (CALM, Noise(jitter=0.1))
    )
    apart = stalled_share([1.0, 2.0] * 32, group=1, replicas=256, jitter=0.1)
    together = stalled_share([1.0, 2.0] * 32, group=8, replicas=32, jitter=0.1)
    assert apart < jittery / calm - 1 < together * 1.1


def test_a_straggler_slows_all_who_meet_it() -> None:
    job = alone(1, group=4, replicas=8, collective_s=0.01)
    calm = simulate_cluster(job, CALM)
    slow = simulate_cluster(job, Noise(slow_ranks={13: 1.25}))
    assert slow.step_s[0] == pytest.approx(calm.step_s[0] + 0.25 * 12)
    assert slow.waiting[13] < 0.01 < slow.waiting[12]
    assert np.argmax(slow.busy_s) == 13


def test_a_slow_link_slows_sends_collectives_and_reductions() -> None:
    job = job_of(schedule("1f1b", 1, 1, 4), work(1, 0.01), group=2, replicas=2, reduce_s=1.0)
    calm, slow = (simulate_cluster(job, noise).step_s[0] for noise in (CALM, Noise(slow_links={3: 3.0})))
    assert slow == pytest.approx(calm + 2 * 8 * 0.01 + 2 * 1.0)
    piped = job_of(schedule("gpipe", 2, 1, 1), work(1, 0.0), send_s=(1.0, 1.0))
    assert simulate_cluster(piped, CALM).step_s[0] == 2 * 3 + 2
    assert simulate_cluster(piped, Noise(slow_links={0: 3.0})).step_s[0] == 2 * 3 + 3 + 1


def test_what_cannot_be_is_named() -> None:
    job = alone(1, group=2, replicas=2)
    with pytest.raises(ConfigError, match="ranks 0 to 3, got 4"):
        simulate_cluster(job, Noise(slow_ranks={4: 2.0}))
    with pytest.raises(ConfigError, match="from 0 to below 1"):
        Noise(jitter=1.5)
    with pytest.raises(ConfigError, match="factors above 0"):
        Noise(slow_links={0: 0.0})
    with pytest.raises(SimulationError, match="a collective each"):
        Stretches((1.0,), ())


@pytest.mark.slow
def test_ten_thousand_ranks_of_twenty_thousand_events_within_ten_seconds() -> None:
    job = job_of(schedule("interleaved", 16, 8, 32), work(20), group=8, replicas=80, reduce_s=0.1)
    noise = Noise(jitter=0.05, spread=0.01, slow_ranks={77: 1.2}, slow_links={5: 3.0}, seed=1)
    began = time.process_time()
    run = simulate_cluster(job, noise)
    assert job.ranks == 10240
    assert run.events / job.ranks >= 20000
    assert time.process_time() - began < 10
