"""The diffusion transformer: its parts against their formulas, and that it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lading.config import MODELS
from lading.errors import ConfigError
from lading.models.dit import DiT, DitConfig, noise_loss
from lading.models.reference import build_model, model_class

SMALL: dict[str, Any] = {"image_size": 8, "channels": 3, "num_layers": 2, "dim": 32, "num_heads": 2, "num_classes": 4}


def small(**sizes: Any) -> DiT:
    torch.manual_seed(0)
    return DiT(DitConfig(**SMALL | sizes))


def batch(rows: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(rows, 3, 8, 8, generator=generator)
    return {"latents": latents, "labels": torch.randint(4, (rows,), generator=generator)}


def woken(model: DiT) -> DiT:
    """All weights random: a fresh model is the identity and predicts zero."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def test_patches_are_cut_and_put_together_again() -> None:
    model, x = small(), batch()["latents"]
    patches = model.patchify(x)
    assert patches.shape == (4, 16, 12)
    assert torch.equal(patches[1, 6], x[1, :, 2:4, 4:6].flatten())  # second row, third column
    assert torch.equal(model.unpatchify(patches), x)


def test_a_fresh_model_predicts_no_noise_and_its_blocks_do_nothing() -> None:
    model, x = small(), torch.randn(2, 5, 32)
    assert torch.equal(model.layers[0](x, torch.randn(2, 32)), x)
    assert not model(batch()["latents"], torch.zeros(4, dtype=torch.int64), batch()["labels"]).any()


def test_step_and_label_steer_the_prediction() -> None:
    model, data = woken(small()).eval(), batch()
    steps = torch.tensor([0, 10, 500, 999])
    base = model(data["latents"], steps, data["labels"])
    for other in ((steps + 1) % 1000, data["labels"]), (steps, (data["labels"] + 1) % 4):
        changed = (model(data["latents"], *other) - base).abs().amax(dim=(1, 2, 3))
        assert changed.min() > 1e-6


def test_the_tables_are_those_of_the_papers() -> None:
    model = small()
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    torch.testing.assert_close(model.signal_S.double(), torch.cumprod(1 - betas, 0), rtol=1e-6, atol=0)
    row, column, k = 2, 3, 5  # of 4 x 4 patches, frequency 5 of 8
    angle = torch.tensor([row, column], dtype=torch.float64) * 10_000 ** (-k / 8)
    wanted = torch.stack((angle[0].sin(), angle[0].cos(), angle[1].sin(), angle[1].cos()))
    torch.testing.assert_close(model.positions_TD[4 * row + column].double()[[k, k + 8, k + 16, k + 24]], wanted)


def test_the_loss_is_that_of_the_noise() -> None:
    model, data = woken(small(label_dropout=0.0)), batch()
    torch.manual_seed(3)
    got = noise_loss(model, data)
    torch.manual_seed(3)
    steps, noise = torch.randint(1000, (4,)), torch.randn(4, 3, 8, 8)
    signal = model.signal_S[steps].view(4, 1, 1, 1)
    noisy = signal.sqrt() * data["latents"] + (1 - signal).sqrt() * noise
    assert torch.equal(got, (model(noisy, steps, data["labels"]) - noise).square().mean())


def test_labels_are_dropped_in_training_only() -> None:
    model, data, steps = woken(small(label_dropout=0.5)), batch(), torch.zeros(4, dtype=torch.int64)
    outputs = {model(data["latents"], steps, data["labels"]).sum().item() for _ in range(8)}
    assert len(outputs) > 1
    model.eval()
    assert torch.equal(*(model(data["latents"], steps, data["labels"]) for _ in range(2)))


def test_a_few_steps_lower_the_loss() -> None:
    model, data = small(dropout=0.05), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    for step in range(40):
        torch.manual_seed(step % 4)
        loss = noise_loss(model, data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_a_model_built_without_memory_has_the_same_weights_after_init() -> None:
    with torch.device("meta"):
        model = DiT(DitConfig(**SMALL))
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.init_weights()
    reference = small()
    torch.manual_seed(3)
    reference.init_weights()
    named = dict((*reference.named_parameters(), *reference.named_buffers()))
    assert all(torch.equal(t, named[n]) for n, t in (*model.named_parameters(), *model.named_buffers()))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dim": 30}, "multiple of num_heads and of 4, got 30 and 2"),
        ({"patch_size": 3}, "image_size must be a multiple of patch_size, got 8 and 3"),
        ({"channels": 0}, "channels must be a positive integer, got 0"),
        ({"label_dropout": 1.0}, r"label_dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_what_means_nothing_is_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model("dit", **SMALL | sizes)


def test_a_wrong_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"latents must have shape \(batch, \(3, 8, 8\)\), got \(4, 3, 8, 6\)"):
        noise_loss(small(), batch() | {"latents": torch.zeros(4, 3, 8, 6)})
    with pytest.raises(ConfigError, match=r"expected a batch with 'latents' and 'labels', got \['tokens'\]"):
        noise_loss(small(), {"tokens": torch.zeros(2)})


def test_every_model_in_the_table_has_a_class_sizes_and_a_loss() -> None:
    for name in MODELS:
        found = model_class(name)
        assert isinstance(build_model(name, dim=16, num_heads=2, num_layers=1), nn.Module)
        assert callable(found.loss)
