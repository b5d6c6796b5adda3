"""Timelines of ranks: pauses of computing are told apart, waits have a cost and who was late, slow ranks a name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tests.rank_steps import RECV, REDUCE, SEND, Row, job_of, rank_of, replica

from lading.errors import ConfigError
from lading.ir.action import ActionKind
from lading.ir.job_timeline import JobTimeline, RankTimeline, Stall
from lading.units import MiB


def test_a_collective_is_waited_for_until_its_last_rank_has_come() -> None:
    job = job_of(replica(0, 1.0, 4.0), replica(1, 2.0, 3.5, start_s=0.5))
    first, second = job.waits
    assert (first.rank, first.action, first.label, first.late) == (0, 1, "made_up layers.0", 1)
    assert (first.waited_s, first.waiting_s, first.transfer_s) == pytest.approx(
        (1.5, 0.5, 1.5)
    )  # it computed meanwhile
    assert (second.rank, second.late, second.waited_s) == (1, 1, 0.0)
    assert (second.waiting_s, second.transfer_s) == pytest.approx((0.0, 0.5))
    assert [times.waited_for for times in job.times] == [1, None]
    for times in job.times:
        assert times.computing_s + times.transfer_s + times.waiting_s == pytest.approx(times.step_s)
    assert job.step_s == pytest.approx(5.0)
    assert "rank 0" in str(job)
    assert "most for rank 1" in str(job)


@pytest.mark.parametrize("simulated", [False, True])
def test_a_receive_waits_for_its_sender(simulated: bool) -> None:
    """As simulated a receive has no length, and ends with the send."""
    sent: list[Row] = [("compute", ActionKind.COMPUTE, (), 0.0, 3.0), ("send_3", SEND, (0,), 3.0, 4.0)]
    received: list[Row] = [
        ("compute", ActionKind.COMPUTE, (), 0.0, 1.0),
        ("receive_3", RECV, (), 4.0 if simulated else 0.0, 4.0),
        ("compute", ActionKind.COMPUTE, (1,), 4.0, 5.0),
    ]
    job = job_of(rank_of(0, "pp2", sent, peer=1), rank_of(1, "pp2", received, peer=0))
    wait = job.waits[0]
    assert (wait.rank, wait.late, wait.waited_s, wait.waiting_s, wait.transfer_s) == (1, 0, 3.0, 2.0, 1.0)
    assert [wait.transfer_s for wait in job.waits[1:]] == [1.0]  # the first stage's step ends with what it sends
    with pytest.raises(ConfigError, match="expected a send for each receive, found none for that of rank 1"):
        _ = job_of(rank_of(0, "pp2", sent[:1]), job.ranks[1]).waits


def test_a_pause_is_told_back_to_where_it_began() -> None:
    """The last of a chain is waited for; what it waited for itself has cost the rest, a move among it nothing."""
    rows: list[Row] = [
        ("compute", ActionKind.COMPUTE, (), 0.0, 1.0),
        ("network", ActionKind.UNSHARD, (), 0.5, 3.0),
        ("disk_read", ActionKind.MOVE, (1,), 3.0, 5.0),
        ("network", REDUCE, (2,), 5.0, 6.0),
        ("compute", ActionKind.COMPUTE, (3,), 6.5, 7.0),
    ]
    made = rank_of(0, "dp2", rows)
    assert made.stalls == (Stall(3, 5.0, 6.0), Stall(1, 1.0, 3.0))
    other = rank_of(1, "dp2", rows)
    assert [(w.rank, w.action, w.transfer_s) for w in job_of(made, other).waits[::2]] == [(0, 1, 2.0), (0, 3, 1.0)]


def test_who_came_last_to_the_step_was_waited_for() -> None:
    ranks = [dataclasses.replace(replica(rank, 1.0, 2.0), came_s=came_s) for rank, came_s in ((0, -0.5), (1, -0.25))]
    wait = next(wait for wait in job_of(*ranks).waits if wait.action < 0)
    assert (wait.rank, wait.late, wait.waiting_s, wait.label) == (0, 1, 0.25, "before the step")


def noted(rank: int, computing_s: tuple[float, ...], predicted_s: float = 1.0) -> RankTimeline:
    return dataclasses.replace(replica(rank, 1.0, 2.0), computing_s=computing_s, predicted_computing_s=predicted_s)


def test_a_rank_that_is_slow_step_after_step_is_named() -> None:
    slow = job_of(noted(0, (1.0, 1.1, 1.0)), noted(1, (1.5, 1.6, 1.5))).slow
    assert slow is not None
    assert (slow.rank, slow.steps, slow.of_steps) == (1, 3, 3)
    assert slow.factor == pytest.approx(1.5)
    assert job_of(noted(0, (1.0, 1.0, 1.0, 1.0)), noted(1, (1.0, 9.0, 1.0, 1.0))).slow is None  # once is not always
    assert job_of(noted(0, (1.0, 2.0, 1.0, 2.0, 1.0)), noted(1, (2.0, 1.0, 2.0, 1.0, 2.0))).slow is None  # by turns
    assert job_of(noted(0, (1.0,)), noted(1, (1.05,))).slow is None
    assert job_of(noted(0, (0.0,)), noted(1, (1.0,))).slow is None  # steps were not timed
    # Stages are compared by what was predicted for each, and less strictly.
    assert job_of(noted(0, (2.0,), 2.0), noted(1, (1.2,), 1.0)).slow is None
    stage = job_of(noted(0, (2.0,), 2.0), noted(1, (1.5,), 1.0)).slow
    assert stage is not None
    assert stage.rank == 1


def test_what_is_saved_is_read_back_and_nothing_else(tmp_path: Path) -> None:
    job, path = job_of(replica(0, 1.0, 4.0), replica(1, 2.0, 3.5, start_s=0.5)), tmp_path / "ranks.json"
    job.save(path)
    assert JobTimeline.load(path) == job
    saved = json.loads(path.read_text())

    def refused(words: str) -> None:
        path.write_text(json.dumps(saved))
        with pytest.raises(ConfigError, match=words) as caught:
            JobTimeline.load(path)
        assert str(path) in str(caught.value)

    saved["ranks"][1]["rank"] = 2
    refused("expected timelines of ranks from 0 on, in order, found")
    saved["ranks"][1]["rank"] = 1
    communications, saved["ranks"][1]["communications"] = (
        saved["ranks"][1]["communications"],
        [[99, "collective", "x", 0.0]],
    )
    refused("found none of action 99")
    saved["ranks"][1]["communications"] = communications
    saved["ranks"][0]["communications"] = [[1, "receive", "x", 0.0]]
    refused("expected a send for each receive")
    saved["ranks"] = []
    refused("expected timelines of ranks from 0 on")


def test_bytes_and_seconds_are_said_of_each_rank() -> None:
    ranks = [
        dataclasses.replace(
            replica(rank, 1.0, 2.0), peak_bytes=(3 + rank) * MiB, predicted_bytes=4 * MiB, budget_bytes=8 * MiB
        )
        for rank in range(2)
    ]
    text = str(job_of(*ranks))
    assert "rank 0: peak 3.00 MiB of 8.00 MiB (predicted 4.00 MiB)" in text
    assert "rank 1: peak 4.00 MiB of 8.00 MiB (predicted 4.00 MiB)" in text
