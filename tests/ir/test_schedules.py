"""Schedules: every list equals the one that torch.distributed.pipelining makes, and what cannot be is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tests.sim.pipeline_bounds import alive_peaks
from torch.distributed.pipelining.schedules import get_schedule_class

from lading.errors import ConfigError
from lading.ir.action import Work
from lading.ir.layout import parse_layout
from lading.ir.schedules import Schedule, schedule, schedule_of

SINGLE = {"gpipe": "GPipe", "1f1b": "1F1B"}
MULTI = {
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
COMPUTED = ("F", "B", "I", "W", "OVERLAP_F_B")


class Recorder:
    """A stage that computes nothing and writes down what it is asked for."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.is_last, self.texts = rank, ranks, False, list[str]()

    def forward_one_chunk(self, micro_batch: int, *_: object, **__: object) -> None:
        self.texts.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch: int, **_: object) -> None:
        self.texts.append(f"{self.stage_index}B{micro_batch}")

    def no_transfers(self, _: int) -> list[object]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_transfers

    def perform_reduce_grad(self, _: int) -> None:
        pass


def run_single(kind: str, ranks: int, micro_batches: int) -> list[list[str]]:
    """What torch's own loop over micro-batches runs, rank by rank."""
    stages = [Recorder(rank, ranks) for rank in range(ranks)]
    for stage in stages:
        made = get_schedule_class(SINGLE[kind])(stage, micro_batches)  # type: ignore[arg-type]
        made._initialize_stage = lambda *_: None  # type: ignore[attr-defined]
        made._step_microbatches([()] * micro_batches, [{}] * micro_batches)
    return [stage.texts for stage in stages]


def torch_orders(kind: str, ranks: int, chunks: int, micro_batches: int) -> list[list[str]]:
    """What torch executes on each rank, communication left out."""
    if kind in SINGLE:
        return run_single(kind, ranks, micro_batches)
    size = {"group_size": ranks, "num_stages": ranks * chunks, "submod": None}
    stages = [SimpleNamespace(group_rank=0, stage_index=i * ranks, is_last=False, **size) for i in range(chunks)]
    orders = get_schedule_class(MULTI[kind])(stages, micro_batches).pipeline_order_with_comms  # type: ignore[arg-type]
    return [[str(a) for a in orders[rank] if a.computation_type.value in COMPUTED] for rank in range(ranks)]


GRID = [
    *((kind, ranks, 1, m) for kind in SINGLE for ranks in (1, 2, 3, 4, 8) for m in (ranks, ranks + 1, 2 * ranks, 19)),
    *(
        (kind, ranks, chunks, m)
        for kind in ("interleaved", "zero-bubble")
        for ranks in (2, 3, 4, 8)
        for chunks in (1, 2, 3)
        for m in (ranks, 2 * ranks, 3 * ranks, 2 * ranks + 2)
        if m % max(1, m // ranks) == 0
    ),
    *(("interleaved", ranks, 2, ranks - 1) for ranks in (3, 4)),
    *(("zbv", ranks, 2, m) for ranks in (1, 2, 3, 4, 6) for m in (1, ranks, 2 * ranks - 1, 2 * ranks, 13)),
    *(("dualpipe-v", ranks, 2, m) for ranks in (1, 2, 3, 4, 5, 8) for m in (2 * ranks, 2 * ranks + 1, 3 * ranks)),
]


@pytest.mark.parametrize(("kind", "ranks", "chunks", "micro_batches"), GRID)
def test_orders_are_those_that_torch_executes(kind: str, ranks: int, chunks: int, micro_batches: int) -> None:
    ours = schedule(kind, ranks, chunks, micro_batches)
    assert [ours.texts(rank) for rank in range(ranks)] == torch_orders(kind, ranks, chunks, micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_few_micro_batches_by_megatrons_rules(micro_batches: int) -> None:
    plan = schedule("1f1b", 8, 1, micro_batches, rules="megatron")
    check_complete(plan)
    assert [t[1] for t in plan.texts(7)] == ["F", "B"] * micro_batches


def test_megatrons_last_group_is_as_it_comes() -> None:
    # Megatron-LM's table for 10 micro-batches in groups of 4 over 2 chunks ends with a group of two, which it refuses
    # because pp is 4; 13 in groups of 8 leaves 5. Warm-up of the last rank: (chunks - 1) groups, then two a hop.
    with pytest.raises(ConfigError, match="at least pp"):
        schedule("interleaved", 4, 2, 10, rules="megatron")
    plan = schedule("interleaved", 4, 2, 13, rules="megatron", group=8)
    check_complete(plan)
    last, before = plan.texts(3), plan.texts(2)
    assert last[:10] == [*(f"3F{m}" for m in range(8)), "7F0", "7B0"]
    assert [t for t in last if "F" in t][16:] == [*(f"3F{m}" for m in range(8, 13)), *(f"7F{m}" for m in range(8, 13))]
    assert before.index("6B0") == last.index("7B0") + 2
    equal = schedule("interleaved", 4, 2, 12, rules="megatron")
    assert [equal.texts(r) for r in range(4)] == [schedule("interleaved", 4, 2, 12).texts(r) for r in range(4)]


def check_complete(plan: Schedule) -> None:
    """Each chunk has each micro-batch once forward and once backward, whole or in both halves, in a possible order."""
    for order in plan.orders:
        at = {tuple(row[:3]): i for i, row in enumerate(order.tolist())}
        assert len(at) == len(order)
        for chunk in range(plan.chunks):
            for m in range(plan.micro_batches):
                forward = at[Work.FORWARD, chunk, m]
                if (Work.BACKWARD, chunk, m) in at:
                    assert forward < at[Work.BACKWARD, chunk, m]
                else:
                    assert forward < at[Work.BACKWARD_INPUT, chunk, m] < at[Work.BACKWARD_WEIGHT, chunk, m]
        halves = sum(1 for row in order.tolist() if row[0] >= Work.BACKWARD_INPUT)
        assert len(order) == 2 * plan.chunks * plan.micro_batches + halves // 2


@pytest.mark.parametrize(("kind", "ranks", "chunks", "micro_batches"), GRID[::7])
def test_every_micro_batch_once(kind: str, ranks: int, chunks: int, micro_batches: int) -> None:
    check_complete(schedule(kind, ranks, chunks, max(micro_batches, ranks)))


@pytest.mark.parametrize("kind", ["interleaved", "zbv"])
def test_stages_and_ranks_are_each_others_inverse(kind: str) -> None:
    plan = schedule(kind, 4, 2, 8)
    places = {plan.stage(rank, chunk): rank for rank in range(4) for chunk in range(2)}
    assert places == {stage: plan.rank_of(stage) for stage in range(8)}
    assert plan.stages_of(0) == ((0, 7) if kind == "zbv" else (0, 4))


def test_layouts_name_their_schedule() -> None:
    plan = schedule_of(parse_layout("pp4,vpp2,mb1,gb8"))
    assert (plan.kind, plan.ranks, plan.chunks, plan.micro_batches) == ("interleaved", 4, 2, 8)
    assert schedule_of(parse_layout("pp4,vpp2,mb2,gb32,dp2,zbv")).kind == "zbv"
    assert schedule_of(parse_layout("pp8,mb1,gb4"), rules="megatron").micro_batches == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1b", 4, 2, 8), "one chunk, got vpp 2"),
        (("1f1b", 8, 1, 4), "as many micro-batches as stages"),
        (("zbv", 4, 1, 8), "two chunks"),
        (("dualpipe-v", 4, 2, 7), r"as many micro-batches as stages \(8\), got 7"),
        (("interleaved", 4, 2, 9), "multiple of the rounds"),
        (("zero-bubble", 4, 2, 9), "multiple of the rounds"),
        (("eager", 4, 2, 8), "expected one of gpipe"),
        (("gpipe", 0, 1, 8), "must be >= 1"),
    ],
)
def test_what_cannot_be_names_its_rule(arguments: tuple[str, int, int, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        schedule(*arguments)


def test_what_is_alive_is_known_without_times() -> None:
    assert alive_peaks(schedule("gpipe", 4, 1, 9), 1).tolist() == [9] * 4
    assert alive_peaks(schedule("1f1b", 4, 1, 9), 1).tolist() == [4, 3, 2, 1]
    # Narayanan 2021: interleaving holds (1 + (p - 1) / (p v)) times the first rank's activations of 1F1B.
    interleaved = alive_peaks(schedule("interleaved", 4, 3, 8), 1 / 3)
    assert interleaved[0] == pytest.approx(4 * (1 + 3 / 12))
    # Qi 2023: ZB-H1 holds no more than 1F1B's first rank does; ZB-V as much on every rank (two chunks of half a stage).
    assert alive_peaks(schedule("zero-bubble", 4, 1, 12), 1, 0.5).max() == 4
    assert np.ptp(alive_peaks(schedule("zbv", 4, 2, 12), 0.5, 0.25)) == 0
    assert alive_peaks(schedule("1f1b", 2, 1, 4), [10, 1], spike=[0, 5]).tolist() == [20, 6]
