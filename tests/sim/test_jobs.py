"""A simulated step on all its ranks: equal ones take as long, unequal ones longer, and failures cost what they do."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from itertools import pairwise

import pytest
from tools.pipelines import pipeline_of

from lading.clusters import step_of
from lading.errors import ConfigError
from lading.ir.request import Request
from lading.sim.cluster import simulate_cluster
from lading.sim.goodput import best_interval_s, goodput
from lading.sim.jobs import checkpoint_bytes, failures_of, job_of
from lading.sim.noise import DEVICE_SPREAD, Noise, largest_of, waiting_share
from lading.sim.simulate import WAITING, Simulated, simulate
from lading.sim.traces import COMPUTE, NETWORK, SEND_DOWN, step_timeline


@lru_cache
def simulated(model: str, machine: str, devices: int, layout: str, stack: str = "default") -> Simulated:
    question = Request(model=model, machine=machine, devices=devices, layout=layout, stack=stack)
    return simulate(*step_of(question))


CASES = [
    ("llama3-405b", "h100", 1024, "tp8,pp16,gb512,zero1", "megatron-bridge"),
    ("llama3-405b", "h100", 2048, "tp8,cp2,pp16,vpp4,gb512", "default"),
    ("gpt3-175b", "a100", 512, "tp8,pp8,gb256", "megatron-2022"),
    ("llama3-8b", "h100", 64, "zero1,tp2,gb256", "default"),
    ("llama3-8b", "h100", 64, "zero3", "torchtitan-compile"),
    ("llama3-8b", "h100", 64, "zbv,pp4,vpp2,gb512", "default"),
]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_equal_ranks_take_as_long_as_the_step(case: tuple[str, str, int, str, str]) -> None:
    found = simulated(*case)
    job = job_of(found)
    assert job.ranks == case[2]
    equal_s = found.step.step_s - found.step.shares_s[WAITING]
    assert simulate_cluster(job, Noise()).step_s[0] == pytest.approx(equal_s, rel=0.02)


@pytest.mark.long
def test_unequal_ranks_take_longer() -> None:
    found = simulated(*CASES[0])
    job = job_of(found)
    calm, jittery, straggling, linked = (
        simulate_cluster(job, noise).step_s[0]
        for noise in (
            Noise(),
            Noise(jitter=0.03),
            Noise(jitter=0.03, slow_ranks={100: 1.3}),
            Noise(slow_links={100: 2.0}),
        )
    )
    assert calm * 1.01 < jittery < calm * 1.1
    assert jittery * 1.05 < straggling < calm * 1.3
    assert calm * 1.001 < linked < calm * 1.5


def test_larger_clusters_wait_longer_for_the_slowest() -> None:
    shares = [
        found.shares_s[WAITING] / found.step_s
        for devices in (8, 64, 512)
        for found in [simulated("llama3-8b", "h100", devices, "zero1,tp2", "default").step]
    ]
    assert shares[0] == 0
    assert 0.02 < shares[1] < shares[2] < 0.06
    assert waiting_share(512, every_block=True) > 2 * waiting_share(512, every_block=False)
    # Waiting as much as devices of that spread would: all ranks one by one, meeting at the end of a step.
    assert waiting_share(512, every_block=False) == DEVICE_SPREAD * (largest_of(512) - largest_of(8))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_the_timeline_is_as_long_as_the_step(case: tuple[str, str, int, str, str]) -> None:
    found = simulated(*case)
    timeline = step_timeline(found)
    assert timeline.duration_s == pytest.approx(found.step.step_s)
    assert max(e.end_s for e in timeline.events) == timeline.duration_s
    streams = {event.stream for event in timeline.events}
    if found.step.schedule is not None:
        overlaps = found.request.stack.overlap_grad_reduce
        assert {COMPUTE, SEND_DOWN, *([NETWORK] if overlaps else [])} <= streams
        assert timeline.flows
        assert {e.rank_class for e in timeline.events} >= {0, found.request.layout.pp - 1}
        assert timeline.peak_bytes > 0
    else:
        assert streams == {COMPUTE, NETWORK}
    assert len({e.action for e in timeline.events if e.stream == NETWORK}) == sum(
        e.stream == NETWORK for e in timeline.events
    )
    for stream in streams:
        mine = [e for e in timeline.events if e.stream == stream and e.rank_class == 0]
        assert all(b.start_s >= a.end_s - 1e-9 for a, b in pairwise(mine))


def test_checkpoints_hold_every_parameter_once() -> None:
    # Llama 3 8B has 8.03e9 parameters: 2 bytes to compute with, 12 of states, or 4 and 8 where those are one.
    whole = 8.03e9
    assert checkpoint_bytes(simulated(*CASES[3])) == pytest.approx(14 * whole, rel=0.002)
    assert checkpoint_bytes(simulated(*CASES[4])) == pytest.approx(12 * whole, rel=0.002)
    assert checkpoint_bytes(simulated(*CASES[5])) == pytest.approx(14 * whole, rel=0.002)
    experts = simulated("mixtral-8x7b", "h100", 64, "dp32,tp2,ep4,zero1,gb256")
    assert checkpoint_bytes(experts) == pytest.approx(14 * 46.7e9, rel=0.002)


def test_failures_of_a_large_job() -> None:
    found = simulated("llama3-405b", "h100", 16384, "tp8,cp2,pp16,vpp4,gb2048")
    job = failures_of(found, device_mtbf_hours=50676, restart_s=600, storage_bytes_per_s=2e12)
    assert job.checkpoint_s == pytest.approx(405.9e9 * 14 / 2e12, rel=0.01)
    assert 0.9 < goodput(job, best_interval_s(job)).useful < 0.95
    beside = failures_of(found, device_mtbf_hours=50676, restart_s=600, storage_bytes_per_s=1e11, standstill_s=2.0)
    assert beside.write_s == pytest.approx(job.checkpoint_s * 20)
    blocking = dataclasses.replace(beside, checkpoint_s=beside.write_s, write_s=0.0)
    assert goodput(beside, best_interval_s(beside)).useful > goodput(blocking, best_interval_s(blocking)).useful
    with pytest.raises(ConfigError, match="more than 0 bytes"):
        failures_of(found, device_mtbf_hours=50676, restart_s=600, storage_bytes_per_s=0)


def test_sends_cut_over_tensor_parallel_ranks_are_shorter() -> None:
    cut, whole, same = (
        pipeline_of(simulated("gpt3-175b", "a100", 512, f"tp8,pp8,gb256{sp}", stack).step)
        for sp, stack in (("", "megatron-2022"), ("", "megatron-2023"), (",sp", "megatron-2022"))
    )
    # An eighth over the network, and the whole gathered over NVLink; with sequence parallel there is nothing to gather.
    assert whole.send_s / 8 < same.send_s < cut.send_s < whole.send_s / 2
