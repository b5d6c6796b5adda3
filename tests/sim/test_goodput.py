"""Goodput: formulas beside drawn runs, known optima, and what Llama 3's run says."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lading.errors import ConfigError
from lading.sim.goodput import (
    Failures,
    best_interval_s,
    best_interval_steps,
    cost_per_billion_tokens,
    goodput,
)

DAY_S = 86400.0

# The Llama 3 Herd of Models (arXiv 2407.21783) section 3.3.4 and table 5: in 54 days on 16,384 devices 466
# interruptions, 419 of them unexpected, and more than 90% effective training time; section 3.3.1: storage of 2 TB/s
# sustained.
LLAMA3_HOURS = 16384 * 54 * 24 / 419


def failures(**changes: float) -> Failures:
    values = {"devices": 1024, "device_mtbf_hours": 50000.0, "restart_s": 600.0, "checkpoint_s": 30.0} | changes
    return Failures(**values)  # type: ignore[arg-type]


def draw_runs(
    failures: Failures, interval_s: float, *, run_s: float, runs: int, seed: int = 0
) -> npt.NDArray[np.float64]:
    """Goodput of each of many drawn runs, all failures drawn one by one.

    Args:
        run_s: Length of each.
        runs: How many.
    Returns:
        Shares of useful time; work begun and not lost when the run ends counts.
    """
    random = np.random.Generator(np.random.SFC64(seed))
    segment = interval_s + failures.checkpoint_s
    clock, useful, ready = np.zeros(runs), np.zeros(runs), np.zeros(runs)
    open_runs = np.arange(runs)
    while len(open_runs):
        up = random.exponential(failures.mtbf_s, len(open_runs))
        left = run_s - clock[open_runs]
        ends = up >= left
        worked = np.minimum(up, left) - ready[open_runs]
        saved = np.maximum(np.floor((worked - failures.write_s) / segment), 0.0) * interval_s
        begun = np.maximum(worked, 0.0)
        done = np.floor(begun / segment) * interval_s + np.minimum(begun % segment, interval_s)
        useful[open_runs] += np.where(ends, done, saved)
        clock[open_runs] += up
        ready[open_runs] = failures.restart_s
        open_runs = open_runs[~ends]
    return useful / run_s


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"devices": 16384},
        {"devices": 16384, "write_s": 300.0},
        {"restart_s": 0.0, "checkpoint_s": 5.0},
        {"devices": 65536, "restart_s": 900.0, "write_s": 120.0},
    ],
)
@pytest.mark.parametrize("interval_s", [300.0, 1800.0])
def test_drawn_runs_agree_with_the_formula(changes: dict[str, float], interval_s: float) -> None:
    job = failures(**changes)
    run_s = 200 * max(job.mtbf_s, interval_s)
    drawn = draw_runs(job, interval_s, run_s=run_s, runs=400, seed=1)
    expected = goodput(job, interval_s, run_s=run_s)
    assert drawn.mean() == pytest.approx(expected.useful, abs=4 * drawn.std() / 20 + 0.002)
    assert drawn.std() == pytest.approx(expected.deviation, rel=0.15)


def test_drawn_runs_are_the_same_for_the_same_seed() -> None:
    one, two, other = (draw_runs(failures(), 600, run_s=10 * DAY_S, runs=50, seed=seed) for seed in (1, 1, 2))
    assert one.tolist() == two.tolist() != other.tolist()


def test_shares_add_up_and_come_from_somewhere() -> None:
    found = goodput(failures(devices=16384), 600)
    assert found.useful + found.checkpoint + found.restart + found.redone == pytest.approx(1)
    assert found.checkpoint / found.useful == pytest.approx(30 / 600)
    assert found.restart == pytest.approx(1 - math.exp(-600 / failures(devices=16384).mtbf_s))
    assert found.redone > 0.02
    calm = goodput(failures(device_mtbf_hours=1e12), 600)
    assert calm.useful == pytest.approx(600 / 630)
    assert calm.redone < 1e-6


@given(st.integers(1, 100_000), st.floats(1, 1e6), st.floats(0, 3600), st.floats(0.1, 600), st.floats(0, 600))
@settings(max_examples=60, deadline=None)
def test_no_other_interval_is_better(
    devices: int, hours: float, restart: float, checkpoint: float, write: float
) -> None:
    job = Failures(devices=devices, device_mtbf_hours=hours, restart_s=restart, checkpoint_s=checkpoint, write_s=write)
    best = best_interval_s(job)
    most = goodput(job, best).useful
    for factor in (0.5, 0.9, 1.1, 2.0):
        if best * factor + checkpoint >= write:
            assert goodput(job, best * factor).useful <= most + 1e-6


def test_the_best_interval_beside_youngs() -> None:
    job = failures(devices=16384, checkpoint_s=60.0)
    rate = 1 / job.mtbf_s
    best = best_interval_s(job)
    # The optimum solves f t = 1 - exp(-f (t + c)), whatever a restart takes.
    assert rate * best == pytest.approx(1 - math.exp(-rate * (best + 60)), rel=1e-9)
    young_s = math.sqrt(2.0 * job.checkpoint_s * job.mtbf_s)
    assert best < young_s == pytest.approx(best, rel=0.06)
    hopeless = failures(devices=10_000_000, checkpoint_s=60.0)
    assert goodput(hopeless, best_interval_s(hopeless)).useful < 1e-9


def test_intervals_are_whole_steps() -> None:
    job = failures(devices=16384)
    best = best_interval_s(job)
    for step_s in (1.0, 7.5, 100.0, 5000.0):
        steps = best_interval_steps(job, step_s)
        share = goodput(job, steps * step_s).useful
        assert steps >= 1
        for other in (steps - 1, steps + 1):
            assert other < 1 or goodput(job, other * step_s).useful <= share
        assert step_s > 100 or steps * step_s == pytest.approx(best, rel=0.2)
    slow_disk = failures(write_s=4000.0)
    assert best_interval_steps(slow_disk, 100.0) * 100 + 30 >= 4000


def test_llama_3_ran_as_well_as_it_could_with_restarts_of_minutes() -> None:
    # 405e9 parameters of 14 bytes (bf16 and fp32 states) at 2 TB/s.
    checkpoint_s = 405e9 * 14 / 2e12
    assert Failures(
        devices=16384, device_mtbf_hours=LLAMA3_HOURS, restart_s=0, checkpoint_s=checkpoint_s
    ).mtbf_s == pytest.approx(3.09 * 3600, rel=0.01)
    shares = []
    for restart_s in (300.0, 720.0, 1800.0):
        job = Failures(devices=16384, device_mtbf_hours=LLAMA3_HOURS, restart_s=restart_s, checkpoint_s=checkpoint_s)
        shares.append(goodput(job, best_interval_s(job), run_s=54 * DAY_S))
    assert shares[0].useful > shares[1].useful > 0.90 > shares[2].useful
    # What one run of 54 days differs by is small beside that: the 90% are no luck.
    assert shares[1].deviation < 0.01
    drawn = draw_runs(job, best_interval_s(job), run_s=54 * DAY_S, runs=200)
    interruptions = 54 * DAY_S / job.mtbf_s
    assert interruptions == pytest.approx(419)
    assert drawn.mean() == pytest.approx(shares[2].useful, abs=0.003)
    # The published 90% leave each of 466 interruptions 1,001 s in all.
    assert pytest.approx(1001, abs=1) == 54 * DAY_S * 0.1 / 466


def test_cost_follows_goodput() -> None:
    # 16,384 devices at 2 an hour give 32,768 an hour; 11.5 million tokens a second at 90% are 37.3 billion an hour.
    cost = cost_per_billion_tokens(tokens_per_s=11.5e6, price_per_device_hour=2.0, devices=16384, useful=0.9)
    assert cost == pytest.approx(32768 / 37.26, rel=1e-3)
    assert np.isclose(cost_per_billion_tokens(tokens_per_s=1e6, price_per_device_hour=3.6, devices=1), 1.0)


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(ConfigError, match="devices >= 1"):
        failures(devices=0)
    with pytest.raises(ConfigError, match="seconds >= 0"):
        failures(restart_s=-1)
    with pytest.raises(ConfigError, match="take longer intervals"):
        goodput(failures(write_s=700.0), 600)
    with pytest.raises(ConfigError, match="more than 0 s"):
        goodput(failures(), 0)
    with pytest.raises(ConfigError, match="every step"):
        best_interval_s(failures(checkpoint_s=0.0))
    with pytest.raises(ConfigError, match="above 0"):
        cost_per_billion_tokens(tokens_per_s=0, price_per_device_hour=1, devices=1)
