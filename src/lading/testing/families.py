"""Families of models whose tables lie in ``catalog/tables``: how each is built small, at several sizes, to be captured.

``python -m lading.testing.families [name ...]`` captures and writes them again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lading.capture.table import table_over
from lading.catalog.tables import TABLES, StoredTable, write_table
from lading.errors import CaptureError
from lading.ir.sizes import Size
from lading.models.gpt import GPT, GptConfig
from lading.models.llama import Llama, LlamaConfig

Sizes = Mapping[str, int]


def token_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of the targets in float32; ``{"tokens": (B, T), "targets": (B, T)}``."""
    logits_BTV = model(batch["tokens"])
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), batch["targets"].flatten())


def _token_batch(at: Sizes) -> dict[str, torch.Tensor]:
    shape = (at["b"], at["s"])
    return {name: torch.zeros(shape, dtype=torch.int64, device="meta") for name in ("tokens", "targets")}


@dataclass(frozen=True)
class Family:
    """How a family is captured.

    Attributes:
        build: A model of two layers of each kind, of these sizes.
        options: Values that each symbol takes in the captures; two symbols never take one.
        counts: How often each segment stands, in the names of counts; checked against a capture.
        source: Where the structure is from.
        batch: A batch of ``b`` sequences.
        loss: Of the model on it.
        layers: Counts that the model is built with.
    """

    build: Callable[[Sizes], nn.Module]
    options: Mapping[str, tuple[int, ...]]
    counts: tuple[str, ...]
    source: str
    batch: Callable[[Sizes], Any] = _token_batch
    loss: Callable[[nn.Module, Any], Any] = token_loss
    layers: Mapping[str, int] = field(default_factory=lambda: {"layers": 2})


def _gpt(at: Sizes) -> nn.Module:
    return GPT(GptConfig(**_decoder(at), hidden_dim=at["f"]))


def _llama(at: Sizes) -> nn.Module:
    return Llama(LlamaConfig(**_decoder(at), num_kv_heads=at["k"], hidden_dim=at["f"], tied=True))


def _decoder(at: Sizes) -> dict[str, Any]:
    sizes = {"vocab_size": at["v"], "max_seq_len": at["s"], "num_layers": 2}
    return {**sizes, "dim": at["h"], "num_heads": at["n"], "head_size": at["d"]}


_TOKENS = {"b": (3, 5, 7), "s": (34, 38, 46, 58), "v": (211, 223, 227, 229)}
_HEADS = {"n": (8, 16, 24), "d": (26, 22, 62, 74), "h": (7 * 48, 11 * 48, 13 * 48)}
_GROUPED = {**_HEADS, "k": (2, 4, 8)}
_MLP = {"f": (83, 89, 97, 101)}
_ONE_BLOCK = ("1", "layers", "1")

FAMILIES: dict[str, Family] = {
    "gpt": Family(
        _gpt,
        {**_TOKENS, **_HEADS, **_MLP},
        _ONE_BLOCK,
        "models/gpt.py: Radford et al. 2019 (GPT-2), with fused attention and no dropout",
    ),
    "llama": Family(
        _llama,
        {**_TOKENS, **_GROUPED, **_MLP},
        _ONE_BLOCK,
        "models/llama.py: Touvron et al. 2023 (Llama), grouped-query attention and SwiGLU",
    ),
}


def captured_family(name: str, observations: int = 7) -> StoredTable:
    """A family's table, captured.

    Args:
        observations: Sizes to capture at; the last is checked, not fitted.
    Raises:
        CaptureError: a length is no simple polynomial of the sizes.
    """
    family = FAMILIES[name]
    sizes = sizes_of(family, observations)
    table = table_over(sizes, partial(build_at, name), family.loss, name, largest=16)
    counts = tuple(Size.of(text).at(family.layers) for text in family.counts)
    if counts != table.counts:
        raise CaptureError(f"family {name!r}: expected segments {counts} times, captured {table.counts}")
    return StoredTable(name, table.segments, family.counts, table.tied, tuple(sorted(family.options)), family.source)


def build_at(name: str, at: Sizes) -> tuple[nn.Module, Any]:
    """A model of a family in bfloat16, without memory, and a batch for it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return FAMILIES[name].build(at), FAMILIES[name].batch(at)
    finally:
        torch.set_default_dtype(before)


def sizes_of(family: Family, count: int) -> list[dict[str, int]]:
    """So many choices of values, each symbol's varying on its own; the same every time."""
    draw = random.Random(0)
    chosen: list[dict[str, int]] = []
    while len(chosen) < count:
        at = {name: draw.choice(values) for name, values in sorted(family.options.items())}
        if at not in chosen and all(at["n"] % at[k] == 0 for k in ("k",) if k in at):
            chosen.append(at)
    return chosen


def main() -> None:
    """Capture families and write their tables."""
    for name in sys.argv[1:] or FAMILIES:
        path = TABLES / f"{name}.json"
        path.write_text(write_table(captured_family(name)), encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
