"""Lading's own reference models."""

from __future__ import annotations

import torch
from benchmarks.capture.family import LENGTH, ROWS, VOCABULARY, Batch, Family, drawn, ids
from torch import nn

from lading.models.reference import build_model, model_class

_SIZES = {"vocab_size": VOCABULARY, "max_seq_len": 32, "num_layers": 2, "dim": 32, "num_heads": 4}


def _bytes() -> Batch:
    return {"tokens": ids(ROWS, LENGTH + 1)}


def _latents() -> Batch:
    return {"latents": drawn(ROWS, 4, 16, 16), "labels": ids(ROWS, low=0, high=10)}


def _decoder(name: str, model: str, **sizes: float | bool) -> Family:
    return Family(
        name=name,
        kind="own",
        build=lambda: build_model(model, **_SIZES | sizes),
        batch=_bytes,
        loss=model_class(model).loss,
    )


def _dit() -> nn.Module:
    model = build_model("dit", num_layers=2, dim=32, dropout=0.1)
    for parameter in model.parameters():  # a fresh one is the identity, and most gradients zero
        torch.nn.init.normal_(parameter, std=0.1)
    return model


OWN: list[Family] = [
    _decoder("own gpt", "gpt"),
    _decoder("own gpt, dropout, untied", "gpt", dropout=0.1, tied=False),
    _decoder("own llama", "llama", num_kv_heads=2),
    _decoder("own moe", "moe", num_kv_heads=2),
    Family(name="own dit", kind="own", build=_dit, batch=_latents, loss=model_class("dit").loss),
]
