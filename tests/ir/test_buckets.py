"""Buckets of gradients: software that makes its own has them in every step, unless others were chosen."""

from __future__ import annotations

import pytest

from lading.catalog.stacks import stack_by_name
from lading.ir.layout import parse_layout
from lading.ir.request import Architecture, StepRequest

SIZES = {"h": 1024, "f": 2816, "n": 16, "k": 16, "d": 64, "v": 32000}


@pytest.mark.parametrize(
    ("stack", "layout", "bucket_bytes"),
    [
        ("nemo", "dp8,zero1", 2 * 40_000_000),
        ("nemo", "dp96,zero1", 2 * 96_000_000),
        ("nemo", "dp48,cp2,zero1", 2 * 96_000_000),
        ("nemo", "dp8,zero1,bucket_bytes=1000000", 1_000_000),
        ("nemo", "dp8,zero3", 0),
        ("nemo", "tp8", 0),
        ("torchtitan-compile", "dp96,zero1", 0),
        ("megatron-2022", "dp96,zero1", 0),
    ],
)
def test_megatron_reduces_in_buckets_that_grow_with_the_ranks(stack: str, layout: str, bucket_bytes: int) -> None:
    request = StepRequest(
        name="buckets",
        model=Architecture(family="llama", symbols=SIZES, blocks=(("block", 4),)),
        seq_len=2048,
        machine="h100",
        layout=parse_layout(layout),
        stack=stack_by_name(stack),
    )
    assert request.layout.bucket_bytes == bucket_bytes
