"""Squares of scores and masks of dropout are kept where attention is not fused, in every family."""

from __future__ import annotations

import dataclasses

import pytest

from lading.catalog.stacks import stack_by_name
from lading.ir.layout import parse_layout
from lading.ir.request import Architecture, StepRequest
from lading.sim.simulate import Simulated, simulate

LLAMA = {"h": 1024, "f": 2816, "n": 16, "k": 4, "d": 64, "v": 32000}


def step(layout: str = "mb2,gb2", *, dropout: float = 0.0, **settings: object) -> Simulated:
    stack = dataclasses.replace(stack_by_name("fsdp1"), **settings)
    model = Architecture(family="llama", symbols=LLAMA, blocks=(("block", 4),))
    request = StepRequest(
        name="scores",
        model=model,
        seq_len=2048,
        machine="a100",
        layout=parse_layout(layout),
        stack=stack,
        dropout=dropout,
    )
    return simulate(request)


def kept(simulated: Simulated) -> int:
    return simulated.step.stages[0].saved_bytes


SQUARE = 2 * 16 * 2048 * 2048


@pytest.mark.parametrize(("fusion", "each"), [("eager", 6), ("fused", 2)])
def test_attention_in_parts_keeps_its_scores(fusion: str, each: int) -> None:
    fused, parts = step(fusion=fusion, attention="flash2"), step(fusion=fusion, attention="unfused")
    assert kept(parts) - kept(fused) == 4 * each * SQUARE
    assert parts.step.step_s > fused.step.step_s
    dropped = step(fusion=fusion, attention="unfused", dropout=0.1)
    masks = 4 * 2 * 2 * 2048 * 1024
    assert kept(dropped) - kept(parts) == 4 * 3 * SQUARE + masks


def test_operations_one_by_one_take_longer_than_kernels_over_scores() -> None:
    taken = {
        fusion: step(fusion=fusion, attention="unfused").step.step_s - step(fusion=fusion).step.step_s
        for fusion in ("eager", "fused")
    }
    assert taken["eager"] > 1.5 * taken["fused"]


def test_attention_that_is_computed_again_keeps_none_of_them() -> None:
    again = step("mb2,gb2,recompute=selective", attention="unfused", fusion="fused")
    assert kept(again) == kept(step("mb2,gb2,recompute=selective", attention="flash2", fusion="fused"))


def test_dropout_of_the_stream_costs_its_masks_and_passes() -> None:
    plain, dropped = step(), step(dropout=0.1)
    assert kept(dropped) - kept(plain) == 4 * 2 * 2 * 2048 * 1024
    assert dropped.step.step_s > plain.step.step_s
