"""The zoo's own check: a slice by default, all families when slow tests run."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from benchmarks.capture.zoo import FAMILIES, Row, examine, examine_all, report

SLICE = (
    "own moe", "deberta-v2", "t5", "gpt_oss", "mamba", "llava", "unet2d",
)  # fmt: skip
quiet = pytest.mark.filterwarnings("ignore")


@pytest.mark.long
@quiet
@pytest.mark.parametrize("name", SLICE)
def test_a_family_is_exact(name: str) -> None:
    row = examine(FAMILIES[name])
    assert row.verdict == "exact", row
    assert row.ops > 50


@quiet
def test_a_family_that_cannot_be_captured_is_refused() -> None:
    row = examine(FAMILIES["switch_transformers"])
    assert row.verdict == "refused"
    assert "nonzero" in row.detail


@quiet
def test_wrong_numbers_and_broken_families_are_seen() -> None:
    family = FAMILIES["own llama"]
    calls = iter((1.0, 2.0)).__next__  # eager, then capture
    unsteady = dataclasses.replace(family, loss=lambda m, b: family.loss(m, b) * calls())
    row = examine(unsteady)
    assert row.verdict == "WRONG"
    assert "loss" in row.detail
    broken = dataclasses.replace(family, batch=lambda: {"tokens": torch.zeros(2, 99, dtype=torch.int64)})
    assert examine(broken).verdict == "eager fails"
    assert report([row]).startswith("0 of 1 exact (0.0%), 0 refused, 1 WRONG")


@pytest.mark.slow
@quiet
def test_the_whole_zoo() -> None:
    rows: list[Row] = examine_all(FAMILIES)
    assert not [row for row in rows if row.verdict not in ("exact", "refused")]
    assert sum(row.verdict == "exact" for row in rows) >= 0.9 * len(rows) >= 0.9 * 150
