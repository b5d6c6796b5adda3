"""Peaks of a block against what torch's own tracker sees while the block runs in eager."""

from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from lading.catalog.tables import family_table
from lading.ir.layout import Layout
from lading.models.gpt import GptBlock, GptConfig
from lading.parallel.memory import SegmentMemory, segment_memory
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
