"""Weights are cast, and gradients added up, in each micro-batch, by software that does so and no other."""

from __future__ import annotations

import dataclasses

import pytest

from lading.catalog.stacks import stack_by_name
from lading.ir.layout import parse_layout
from lading.ir.request import Architecture, StepRequest
from lading.ir.work import Stage
from lading.sim.simulate import segments_of, table_of

LLAMA = {"h": 1024, "f": 2816, "n": 16, "k": 4, "d": 64, "v": 32000}
#: Elements of a block's weights: projections, MLP, two norms.
PRODUCTS = 1024 * 1024 * 2 + 2 * 1024 * 256 + 3 * 1024 * 2816
BLOCK = PRODUCTS + 2 * 1024


def moved(layout: str, name: str, **settings: object) -> dict[Stage, int]:
    """Bytes that passes over a block's weights move, by stage."""
    stack = dataclasses.replace(stack_by_name("eager-torch"), **settings)
    model = Architecture(family="llama", symbols=LLAMA, blocks=(("block", 4),))
    request = StepRequest(
        name="passes", model=model, seq_len=512, machine="a100", layout=parse_layout(layout), stack=stack
    )
    block = segments_of(request, table_of(request))[1]
    found: dict[Stage, int] = {}
    for kernel in block.kernels:
        if kernel.name == name:
            found[kernel.stage] = found.get(kernel.stage, 0) + kernel.bytes_read + kernel.bytes_written
    return found


def test_autocast_makes_copies_of_weights_and_of_their_gradients() -> None:
    assert moved("mb1,gb1", "weight_cast") == {Stage.FORWARD: 6 * PRODUCTS, Stage.BACKWARD_WEIGHT: 6 * PRODUCTS}
    assert not moved("mb1,gb1", "weight_cast", parameters_dtype="", master_weights=True)
    assert not moved("mb1,gb1,fp32", "weight_cast")


@pytest.mark.parametrize(
    ("layout", "settings", "each"),
    [
        ("mb1,gb4", {}, 12),
        ("mb1,gb1", {}, 0),
        ("mb1,gb4", {"parameters_dtype": "", "master_weights": True, "gradient_dtype": "bfloat16"}, 6),
        ("mb1,gb4", {"parameters_dtype": "", "master_weights": True, "gradient_dtype": "float32"}, 10),
        ("mb1,gb4", {"fusion": "fused"}, 0),
        ("mb1,gb4", {"fusion": "fused", "unfused": ("gradients",)}, 12),
        ("dp2,zero1,mb1,gb4", {}, 12),
        ("dp2,zero2,mb1,gb4", {}, 0),
        ("dp2,zero3,mb1,gb4", {}, 0),
    ],
)
def test_gradients_are_added_up_where_no_product_does_it(layout: str, settings: dict[str, object], each: int) -> None:
    assert sum(moved(layout, "accumulate", **settings).values()) == each * BLOCK
