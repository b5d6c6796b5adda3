"""Schedules beside published steps: one step of one schedule predicts the other schedules and micro-batches.

The rows are of a pipeline alone (no tensor or data parallel), so what differs between them is the schedule. The first
and the last stage have one layer less, for the embedding and the head: all stages count as equal here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.sim.pipeline_bounds import alive_peaks
from tools.pipelines import PipelineSeconds, simulate_pipeline

from lading.ir.schedules import schedule

ROWS = Path(__file__).parents[2] / "benchmarks" / "validation" / "measurements.jsonl"
KINDS = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zero-bubble"}


def steps() -> dict[str, list[tuple[str, int, int, int, float]]]:
    """(schedule, ranks, chunks, micro-batches, seconds) of each model of Qi 2023, tables 3 and 4."""
    found: dict[str, list[tuple[str, int, int, int, float]]] = {}
    for line in ROWS.read_text().splitlines():
        row = json.loads(line)
        layout = row["layout"]
        if row["source_family"] == "zerobubble" and layout["pp_schedule"] in KINDS:
            sizes = (layout["pp"], layout["vpp"] or 1, layout["n_microbatches"])
            found.setdefault(row["model"]["name"], []).append(
                (KINDS[layout["pp_schedule"]], *sizes, row["measured"]["iteration_s"])
            )
    return found


def shape_s(kind: str, ranks: int, chunks: int, micro_batches: int) -> float:
    """Seconds if a stage's forward and both gradients take 1 in all.

    Weight gradients are matrix products alone, with no norms, softmax or dropout: two eighths against three each.
    """
    seconds = PipelineSeconds(
        forward=3 / 8 / chunks, backward=5 / 8 / chunks, backward_input=3 / 8 / chunks, backward_weight=2 / 8 / chunks
    )
    return simulate_pipeline(schedule(kind, ranks, chunks, micro_batches), seconds).makespan_s


@pytest.mark.parametrize("model", sorted(steps()))
def test_one_published_step_of_1f1b_predicts_the_others(model: str) -> None:
    rows = steps()[model]
    anchor = next(row for row in rows if row[0] == "1f1b")
    unit_s = anchor[4] / shape_s(*anchor[:4])
    others = [row for row in rows if row is not anchor]
    assert len(others) >= 2
    for row in others:
        assert unit_s * shape_s(*row[:4]) == pytest.approx(row[4], rel=0.04), row


def test_zero_bubble_needs_no_more_than_1f1b() -> None:
    # The same tables: 30 to 32 GB beside 30, 42 beside 39, 33 beside 32.
    for ranks in (8, 16, 32):
        plain = alive_peaks(schedule("1f1b", ranks, 1, 4 * ranks), 1).max()
        assert alive_peaks(schedule("zero-bubble", ranks, 1, 4 * ranks), 1, 0.5).max() == plain == ranks
