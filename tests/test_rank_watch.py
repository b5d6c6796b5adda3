"""A run on ranks says which of them is slow, and whether its computing, its disk or a transfer is."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import pytest

from lading.config import load_run
from lading.host_watch import Comparison
from lading.ir.machine import HostSpeed
from lading.ir.plan import Plan
from lading.prepare import plan_run
from lading.rank_watch import RankComparison, job_words
from lading.train import train_run
from tests.ranks import run_ranks
from tests.test_train_ranks import written

pytestmark = pytest.mark.usefixtures("one_thread")


def compared(step_s: float = 0.1, before_s: float = 0.0, **speed: Any) -> RankComparison:
    work_s = {"products": 0.04, "others": 0.01, "disk.write": 0.06, "disk.read": 0.001}
    return RankComparison(Comparison(step_s, before_s, 0.1, HostSpeed(**speed), ""), work_s, {"dp of 0": 0.01})


def test_the_rank_whose_disk_is_slow_is_named_and_nothing_else() -> None:
    by_rank = [compared(0.3), compared(0.3, tiers={"disk.write": 4.0, "disk.read": 1.1}), compared(0.3)]
    by_rank[0] = compared(0.3, tiers={"disk.write": 1.0, "disk.read": 1.0})
    assert job_words(by_rank, {"dp of 0": {0: 0.01, 1: 0.01, 2: 0.01}}) == (
        "steps take 300.0 ms, 100.0 ms were predicted: rank 1 is slow: writes of the disk 4.00 times as long as "
        "predicted, 1.00 on the others"
    )


def test_what_is_a_small_part_of_the_step_names_no_rank() -> None:
    by_rank = [compared(0.3, others=2.0), compared(0.3, others=3.0, tiers={"disk.read": 9.0})]
    assert "is slow" not in job_words(by_rank, {})
    assert "rank 1 is slow: products 2.50 times as long" in job_words([compared(0.3), compared(0.3, products=2.5)], {})


def test_what_is_slow_on_all_ranks_names_none() -> None:
    by_rank = [compared(0.3, products=2.0, others=2.1) for _ in range(3)]
    assert job_words(by_rank, {}) == (
        "steps take 300.0 ms, 100.0 ms were predicted: beside the machine file, products 2.00, other operations 2.10 "
        "times as long"
    )


def test_transfers_that_take_long_are_named_by_their_ranks() -> None:
    by_rank = [compared(0.3) for _ in range(4)]
    assert "transfers among ranks 0 and 1 take 60.0 ms, 10.0 ms were predicted" in job_words(
        by_rank, {"dp of 0": {0: 0.06, 1: 0.06}, "dp of 2": {2: 0.01, 3: 0.01}}
    )
    sent = [*by_rank[:1], dataclasses.replace(by_rank[1], transfers_s={"1 to 2": 0.02}), *by_rank[2:]]
    words = job_words(sent, {"1 to 2": {2: 0.05}})
    assert words.endswith(": transfers from rank 1 to rank 2 take 50.0 ms, 20.0 ms were predicted"), words
    assert "transfers from" not in job_words(sent, {"1 to 2": {2: 0.02}})


def test_nothing_is_said_of_steps_as_predicted_and_something_of_any_other() -> None:
    assert job_words([compared(0.11), compared(0.11)], {"dp of 0": {0: 0.012, 1: 0.012}}) == ""
    assert "explain it" in job_words([compared(0.2), compared(0.2)], {})
    assert job_words([compared(0.1, 0.3)] * 2, {}) == (
        "steps take 100.0 ms now, 300.0 ms before, 100.0 ms were predicted"
    )


def _slow_disk(rank: int, plan: str, log: str) -> None:
    """Train a plan; each write to the second rank's disk takes 20 ms more."""
    write = os.pwritev

    def slow(file: int, pieces: Any, offset: int) -> int:
        time.sleep(0.02)
        return write(file, pieces, offset)

    if rank == 1:
        os.pwritev = slow
    os.dup2(os.open(f"{log}-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    train_run(Plan.load(plan))


@pytest.mark.long
def test_a_slow_disk_of_another_rank_than_the_first_is_told(tmp_path: Path) -> None:
    asked = ("model.sizes.num_layers=2", "optimization.steps=14", "layout=dp2", "checkpoint.at_end=false")
    run = load_run(written(tmp_path), [*asked, "checkpoint.every_steps=0", "memory.budget=99%"])
    made = plan_run(run, devices=2).plan
    assert any(gap for gap in made.choices.gaps), "nothing is moved to the disk"
    made.save(tmp_path / "plan.json")
    run_ranks(_slow_disk, 2, str(tmp_path / "plan.json"), str(tmp_path / "log"))
    said = " ".join((tmp_path / "log-0").read_text().split())
    assert "rank 1 is slow:" in said
    assert "writes of the disk" in said.partition("rank 1 is slow:")[2]
    assert "rank 0 is slow" not in said
