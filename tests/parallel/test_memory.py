"""Peaks of a block against what torch's own tracker sees while the block runs in eager."""

from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from lading.catalog.tables import family_table
from lading.cost.fusion import merge_siblings
from lading.ir.layout import Layout
from lading.models.gpt import GptBlock, GptConfig
from lading.parallel.memory import SegmentMemory, saved_bytes, segment_memory, weight_shapes
from lading.parallel.ranks import rank_segment
from lading.parallel.recompute import recomputed

B, S, H, N = 2, 256, 128, 8


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _total(snapshot: Any) -> int:
    return sum(kinds["Total"] for kinds in snapshot.values())


def eager(full: bool) -> SegmentMemory:
    """Bytes of activations of one block, its parameters left out; gradients of weights go as soon as they are made."""
    block = GptBlock(GptConfig(dim=H, num_heads=N, vocab_size=100, max_seq_len=S, num_layers=1)).to(torch.bfloat16)
    for parameter in block.parameters():
        parameter.register_post_accumulate_grad_hook(_drop)
    x = torch.zeros(B, S, H, dtype=torch.bfloat16, requires_grad=True)
    coming = torch.zeros(B, S, H, dtype=torch.bfloat16)
    rest = sum(p.nbytes for p in block.parameters()) + coming.nbytes
    tracker = MemTracker()
    tracker.track_external(block, x, coming)
    with tracker:
        y = checkpoint(block, x, use_reentrant=False) if full else block(x)
        forward, saved = (_total(tracker.get_tracker_snapshot(kind)) - rest for kind in ("peak", "current"))
        y.backward(coming)
        backward = _total(tracker.get_tracker_snapshot("peak")) - rest + coming.nbytes
    return SegmentMemory(saved - y.nbytes, forward, backward - y.nbytes)


@pytest.mark.filterwarnings("ignore:Expected a tensor")
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_block_takes_what_torch_measures(mode: str):
    table = family_table("gpt", layers=1, h=H, n=N, v=100)
    segment = rank_segment(table.segments[1], {**table.symbols, "s": S, "b": B}, Layout())
    ours, theirs = segment_memory(segment, recomputed(segment, mode, early_stop=True)), eager(mode == "full")
    assert ours.saved == pytest.approx(theirs.saved, rel=0.02)
    assert ours.backward_peak == pytest.approx(theirs.backward_peak, rel=0.02)
    assert ours.forward_peak == pytest.approx(theirs.forward_peak, rel=0.02)


def test_a_fused_cross_entropy_keeps_the_logits_only():
    vocabulary = 512
    table = family_table("gpt", layers=1, h=H, n=N, v=vocabulary)
    segment = rank_segment(table.segments[2], {**table.symbols, "s": S, "b": B}, Layout())
    logit, tokens = B * S * vocabulary, B * S
    rest = 4 * tokens * H + 8 * tokens + 8 * tokens + 8  # the norm and its statistics, targets, two numbers
    ways = {
        "written": (saved_bytes(segment), segment_memory(segment)),
        "megatron": (saved_bytes(segment, fusion="fused"), segment_memory(segment, fusion="fused")),
        "engine": (
            saved_bytes(segment, fusion="fused", fused_loss=True),
            segment_memory(segment, fusion="fused", fused_loss=True),
        ),
        "compiled": (saved_bytes(segment, fusion="compiled"), segment_memory(segment, fusion="compiled")),
        "flash": (saved_bytes(segment, fused_loss=True), segment_memory(segment, fused_loss=True)),
    }
    assert {way: saved - rest for way, (saved, _) in ways.items() if way != "compiled"} == {
        "written": 4 * logit,
        "megatron": 4 * logit,
        "engine": 2 * logit,
        "flash": 2 * logit,
    }
    # Bytes for each logit, and one more for what the norm keeps: the head is 4 times as wide as the model.
    peaks = {way: memory.backward_peak // logit for way, (_, memory) in ways.items()}
    assert peaks == {"written": 12 + 1, "megatron": 6 + 1, "engine": 2 + 1, "compiled": 4 + 1, "flash": 4 + 1}


def test_parts_of_a_merged_product_stay_together():
    sizes = {"h": H, "n": N, "k": 2, "d": 16, "f": 384, "v": 100}
    table = family_table("llama", layers=1, **sizes)
    segment = rank_segment(table.segments[1], {**table.symbols, "s": S, "b": B}, Layout())
    merged = merge_siblings(segment)
    queries_and_keys = 2 * B * S * (N + 2) * 16  # before they are turned; values are kept as they are
    assert saved_bytes(merged, fusion="fused") - saved_bytes(segment, fusion="fused") == queries_and_keys


def test_placeholders_are_one_for_each_shape():
    table = family_table("moe", layers=1, h=H, n=N, k=4, d=16, v=100, e=8, a=2, g=96)
    segment = rank_segment(table.segments[1], {**table.symbols, "s": S, "b": B}, Layout(dp=4, ep=4))
    shapes = {(256, H), (H, H), (8, H), (H, 192), (96, H)}
    assert weight_shapes(segment) == {shape: 2 * shape[0] * shape[1] for shape in shapes}


def test_a_compiler_keeps_nothing_that_is_not_read():
    """The last product only adds to the stream: eager caches its result where products are marked."""
    table = family_table("llama", layers=1, h=H, n=N, k=2, d=16, f=384, v=100)
    segment = rank_segment(table.segments[1], {**table.symbols, "s": S, "b": B}, Layout())
    marked = recomputed(segment, "selective", ["op"])
    queries, gate, values, attended, sums = H, 384, 2 * 16, H, 2 * N
    elements = H + queries + gate + values + attended + sums  # sums in fp32 are two elements each
    assert saved_bytes(segment, marked, "compiled") == 2 * B * S * elements
    assert saved_bytes(segment, marked, "eager") == 2 * B * S * (elements + H)
