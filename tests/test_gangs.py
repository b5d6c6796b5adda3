"""Several ranks that compute one matrix: the bits of one rank that takes its products by the same blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lading import AdamW
from lading.matrices import MatrixOptimizer, Muon
from lading.optim.muon import row_blocks
from tests.ranks import run_ranks
from tests.test_matrices import give
from tests.test_overlap import cut_by, weights

SHAPES = {"wide": (320, 400), "tall": (500, 130), "small": (20, 30)}


class Few(nn.Module):
    """Fewer matrices than ranks, and one that is not worth sharing."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.norm = nn.Parameter(torch.ones(30))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((p * x).sum() for p in self.parameters())  # type: ignore[return-value]


def optimizer_of(model: nn.Module, **options: Any) -> MatrixOptimizer:
    named = dict(model.named_parameters())
    norm = [("norm", named.pop("norm"))]
    return Muon([{"params": list(named.items())}, {"params": norm, "rule": AdamW()}], lr=0.02, **options)


def moved(model: nn.Module, optimizer: MatrixOptimizer) -> list[torch.Tensor]:
    """Two updates by whole numbers, whose mean over any number of ranks rounds nowhere."""
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        give(model, [torch.randint(-9, 9, p.shape, generator=generator).float() for p in model.parameters()])
        optimizer.step()
    return weights(model, optimizer)


def alone(**options: Any) -> list[torch.Tensor]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = Few()
    found = moved(model, optimizer_of(model, **options))
    torch.set_num_threads(threads)
    return found


def _equal(rank: int, ranks: int, expected: dict[str, list[torch.Tensor]]) -> None:
    for dtype, whole in expected.items():
        for mode in ("fsdp", "own") if dtype == "float32" else ("fsdp",):
            model = cut_by(Few(), mode, ranks)
            optimizer = optimizer_of(model, share=True, groups=2, dtype=dtype, reduces=mode == "own")
            assert optimizer.owners is not None
            gangs = [len(gang) for gang in optimizer.owners.ranks]
            assert max(gangs) > 1, gangs
            assert gangs[2] == 1
            for ours, theirs in zip(moved(model, optimizer), whole, strict=True):
                assert torch.equal(ours, theirs), (dtype, mode, gangs)


@pytest.mark.parametrize("ranks", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 8))])
def test_the_bits_of_one_rank(ranks: int):
    run_ranks(_equal, ranks, ranks, {dtype: alone(share=True, dtype=dtype) for dtype in ("float32", "bfloat16")})


def test_blocks_round_as_whole_products_do():
    """Within five units in the last place of products that a step of 0.02 is made of."""
    for ours, theirs in zip(alone(share=True, dtype="float32"), alone(dtype="float32"), strict=True):
        assert float((ours - theirs).abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("rows", "count", "largest"),
    [(20, 1, 20), (64, 1, 64), (130, 3, 64), (1024, 16, 64), (5120, 16, 320), (1100, 9, 128)],
)
def test_blocks_depend_on_rows_alone(rows: int, count: int, largest: int):
    blocks = row_blocks(rows)
    assert len(blocks) == count
    assert max(block.stop - block.start for block in blocks) == largest
    assert [block.start for block in blocks[1:]] == [block.stop for block in blocks[:-1]]
    assert blocks[-1].stop == rows
