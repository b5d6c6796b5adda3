"""A model family of the zoo: how to build a tiny random one, an example batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]
VOCABULARY, ROWS, LENGTH = 64, 2, 10


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the zoo.

    Attributes:
        kind: What it is: decoder, encoder, vision...
        build: The model in training mode; deterministic after ``torch.manual_seed``.
        batch: Example inputs, always the same.
        loss: ``loss(model, batch)``, a scalar.
    """

    name: str
    kind: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Any], torch.Tensor]


def hugging_face(name: str, kind: str, model: str, config: str, batch: Callable[[], Batch], **sizes: Any) -> Family:
    """A model of transformers from its configuration class."""

    def build() -> nn.Module:
        found = import_module("transformers")
        return getattr(found, model)(getattr(found, config)(**sizes)).train()

    return Family(name=name, kind=kind, build=build, batch=batch, loss=output_loss)


def diffuser(name: str, kind: str, model: str, batch: Callable[[], Batch], **sizes: Any) -> Family:
    """A model of diffusers from its constructor's arguments."""

    def build() -> nn.Module:
        return getattr(import_module("diffusers.models"), model)(**sizes).train()

    return Family(name=name, kind=kind, build=build, batch=batch, loss=output_loss)


def output_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The model's own loss where it has one, else the mean square of its first output."""
    out = model(**batch)
    loss = getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.mean()
    values = [v for v in (out.values() if hasattr(out, "values") else out) if isinstance(v, torch.Tensor)]
    if not values:  # an autoencoder's distribution
        return out.latent_dist.sample().float().square().mean()
    return values[0].float().square().mean()


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(*shape: int, high: int = VOCABULARY, low: int = 3, seed: int = 1) -> torch.Tensor:
    """Token ids above the special ones."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def tokens() -> Batch:
    """For a decoder."""
    found = ids(ROWS, LENGTH)
    return {"input_ids": found, "labels": found}


def masked_tokens() -> Batch:
    """For an encoder or decoder with padding."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[1, -3:] = 0
    return tokens() | {"attention_mask": mask}
