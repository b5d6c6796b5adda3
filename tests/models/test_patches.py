"""Diffusion transformers on patches: what steers a block changes it, and the sizes are those published."""

from __future__ import annotations

import pytest
import torch
from tools.models.patches import PatchConfig, PatchDiT, patch_loss

from lading.errors import ConfigError

_SIZES = {
    "patch_dim": 4,
    "num_patches": 6,
    "num_layers": 2,
    "dim": 16,
    "num_heads": 2,
    "head_size": 8,
    "hidden_dim": 24,
}


@pytest.mark.parametrize("own", [{"num_labels": 5}, {"text_dim": 7}])
def test_step_and_text_or_label_steer_every_patch(own: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = PatchDiT(PatchConfig(**_SIZES, **own))
    patches, steps = torch.randn(3, 6, 4), torch.tensor([1, 50, 900])
    told = torch.tensor([0, 1, 4]) if "num_labels" in own else torch.randn(3, 9, 7)
    out = model(patches, steps, told)
    assert out.shape == (3, 6, 4)
    other = told.flip(0)
    for changed in (model(patches, steps + 7, told), model(patches, steps, other), model(patches * 2, steps, told)):
        assert not torch.allclose(changed, out)
    batch = {"patches": patches, "steps": steps, "told": told, "targets": torch.zeros_like(out)}
    loss = patch_loss(model, batch)
    torch.testing.assert_close(loss, out.square().mean())
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_sizes_of_wan_and_dit_give_their_parameters() -> None:
    with torch.device("meta"):
        wan = PatchDiT(PatchConfig(patch_dim=64, num_patches=16, num_layers=40, dim=5120, num_heads=40, head_size=128,
                                   hidden_dim=13824, text_dim=4096))  # fmt: skip
        dit = PatchDiT(PatchConfig(patch_dim=16, num_patches=256, num_layers=28, dim=1152, num_heads=16, head_size=72,
                                   hidden_dim=4608, num_labels=1001))  # fmt: skip
    assert sum(p.numel() for p in wan.parameters()) == pytest.approx(14.288e9, rel=1e-3)
    assert sum(p.numel() for p in dit.parameters()) == pytest.approx(675e6, rel=0.01)  # DiT-XL/2


def test_neither_label_nor_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_labels or text_dim"):
        PatchConfig(**_SIZES)
