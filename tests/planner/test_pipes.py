"""Bounds of pipelines against four alike stages worked out by hand."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from lading.catalog.stacks import stack_by_name
from lading.planner.pipes import PipeTable, alive_of, makespans, pipe_table
from lading.planner.prefilter import Prefilter, SegmentCosts
from lading.planner.space import Pipe
from lading.planner.stages import Ints, StageCosts, StageRows

#: Seconds of a stage: forward, gradients of activations, gradients of weights; and of a send.
FORWARD, INPUTS, WEIGHTS, SEND = 1.0, 1.5, 2.0, 0.25
RANKS = 4
STACK = stack_by_name("default")


class _Alike:
    """Rows of stages of which there is one."""

    def of(self, stages: int, layers: int) -> Ints:
        return np.zeros(stages, np.int64)


def table(schedule: str) -> PipeTable:
    return pipe_table([Pipe(RANKS, 1, schedule, -1)], cast("StageRows", _Alike()))


def test_one_micro_batch_goes_there_and_back() -> None:
    one, none = np.ones(1), np.zeros(1)
    costs = StageCosts(FORWARD * one, none, INPUTS * one, WEIGHTS * one, one, none, none, one)
    step_s, _ = makespans(table("gpipe"), costs, SEND, one, STACK)
    assert step_s.tolist() == pytest.approx([RANKS * (FORWARD + INPUTS + WEIGHTS) + 2 * (RANKS - 1) * SEND])


def test_a_rank_waits_with_a_micro_batch_for_each_rank_behind_it() -> None:
    """One of its own included: four, three and one on the first two ranks and the last."""
    alive, _ = alive_of(table("1f1b"), np.array([8.0]), STACK)
    assert alive.tolist() == [4, 3, 1]
    few, _ = alive_of(table("1f1b"), np.array([2.0]), STACK)
    assert few.tolist() == [2, 2, 1]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_first_look_is_no_longer_than_what_one_micro_batch_takes(schedule: str) -> None:
    """Where backward is split, other ranks' gradients of weights are made while the first one's inputs' are."""
    device = np.array([[FORWARD], [0.0], [INPUTS], [WEIGHTS]])
    costs = SegmentCosts(device, np.zeros((4, 1)), np.ones(1), np.ones((1, 1)))
    bound_s = Prefilter.of(table(schedule), np.ones((1, 1))).seconds(costs, np.ones(1), blocking=False)
    split = schedule == "zero-bubble"
    takes_s = RANKS * (FORWARD + INPUTS) + (WEIGHTS if split else RANKS * WEIGHTS)
    assert FORWARD < bound_s[0] <= takes_s
    assert split or bound_s[0] == pytest.approx(takes_s)
