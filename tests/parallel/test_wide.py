"""Segments captured in 16 bits that run in fp32: the kernels and bytes of a capture in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tools.batches import random_batch

from lading.clusters import step_of
from lading.ir.graph import Role
from lading.ir.layout import parse_layout
from lading.ir.request import Request
from lading.ir.table import ModelTable
from lading.ir.work import RankSegment
from lading.models.reference import build_model, model_class
from lading.parallel.ranks import rank_segment
from lading.sim.simulate import Simulated, simulate
from lading.tracing.tabulate import module_table

GPT = {"num_layers": 2, "dim": 128, "num_heads": 4, "vocab_size": 512, "max_seq_len": 64, "tied": False}
LLAMA = {
    "num_layers": 2, "dim": 128, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 352, "vocab_size": 512,
    "max_seq_len": 64,
}  # fmt: skip


def captured(name: str, sizes: dict[str, Any], dtype: torch.dtype) -> ModelTable:
    batch = random_batch(name, sizes, rows=3, tokens=64, seed=0)
    model = build_model(name, **sizes).to(dtype)
    return module_table(model, batch, model_class(name).loss, name, tokens=64, whole=False)


def work_of(segment: RankSegment) -> list[tuple[object, ...]]:
    """Kernels in any order: operations that do not wait for each other stand in another one."""
    return sorted((k.name, k.dtype, k.bytes_read, k.bytes_written, str(k.detail)) for k in segment.kernels)


@pytest.mark.long
@pytest.mark.parametrize(("name", "sizes"), [("llama", LLAMA), pytest.param("gpt", GPT, marks=pytest.mark.slow)])
def test_sixteen_bits_widened_are_a_capture_in_thirty_two(name: str, sizes: dict[str, Any]) -> None:
    wide, half = (captured(name, sizes, dtype) for dtype in (torch.float32, torch.bfloat16))
    for layout in ("fp32,mb2", "fp32,tp2,mb2"):
        pairs = zip(wide.segments, half.segments, strict=True)
        for a, b in pairs:
            ours, theirs = (rank_segment(s, {**wide.symbols, "s": 64}, parse_layout(layout)) for s in (b, a))
            assert work_of(ours) == work_of(theirs)
            kept = [{s.tensors[t].storage: s.tensors[t].size_bytes for t in s.saved}.values() for s in (ours, theirs)]
            assert sum(kept[0]) == sum(kept[1]) > 0


def step(layout: str, **others: Any) -> Simulated:
    asked = {"model": "llama3-8b", "machine": "h100", "devices": 8, "seq_len": 4096, **others}
    return simulate(*step_of(Request(**asked, layout=layout)))


def test_nothing_of_a_step_in_fp32_has_fewer_bits() -> None:
    """No master beside a parameter of 4 bytes; all that is kept is twice as large but for masks and sums in fp32."""
    half, wide = step("tp8,gb8"), step("tp8,gb8,fp32")
    for role, times in ((Role.PARAMETER, 2), (Role.GRADIENT, 1), (Role.OPTIMIZER_STATE, 8 / 12)):
        assert wide.memory[0][role] == pytest.approx(times * half.memory[0][role])
    blocks = [s.segments[1].saved_bytes for s in (half, wide)]
    assert 1.9 < blocks[1] / blocks[0] <= 2
    assert wide.model_flops == half.model_flops
    assert wide.model_flops / wide.step.step_s / 8 < wide.peak_flops_per_s < half.peak_flops_per_s
    assert any("fp32" in text for text in wide.assumed)


def test_adapters_of_weights_in_fp32() -> None:
    half, wide = (step(f"gb8{p}", lora=16, stack="torchtitan-eager") for p in ("", ",fp32"))
    for role in (Role.PARAMETER, Role.GRADIENT):
        assert wide.memory[0][role] == pytest.approx(2 * half.memory[0][role], rel=1e-3)
