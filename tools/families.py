"""Families of models whose tables lie in ``catalog/tables``: how each is built small, at several sizes, to be captured.

``python -m tools.families [name ...]`` captures and writes them again.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from lading.catalog.tables import SEGMENT_ENDS, TABLES, StoredTable
from lading.errors import CaptureError
from lading.ir.graph import Arg, Literal, Op, Ref
from lading.ir.sizes import Power, Size
from lading.ir.table import Segment, SegmentTensor
from lading.models.gpt import GPT, GptConfig
from lading.models.llama import Llama, LlamaConfig
from lading.tracing.tabulate import table_over
from tools.models.decoder import PartsConfig, PartsDecoder
from tools.models.mamba import MambaConfig
from tools.models.patches import PatchConfig, PatchDiT, patch_loss
from tools.models.unfused import UnfusedConfig, UnfusedGPT

Sizes = Mapping[str, int]


#: Weight of the losses of tokens further ahead (DeepSeek-V3, section 4.2).
_AHEAD_WEIGHT = 0.1


def token_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of the targets in float32, and of those ahead; ``{"tokens": (B, T), "targets": (B, T)}``."""
    logits = model(batch["tokens"])
    every = logits if isinstance(logits, tuple) else (logits,)
    losses = [
        F.cross_entropy(
            logits_BTV.float().flatten(0, 1),
            batch["targets"].roll(-at, 1).flatten() if at else batch["targets"].flatten(),
        )
        for at, logits_BTV in enumerate(every)
    ]
    total = losses[0]
    for loss in losses[1:]:
        total = total + _AHEAD_WEIGHT * loss
    return total


def _token_batch(at: Sizes) -> dict[str, torch.Tensor]:
    shape = (at["b"], at["s"])
    return {name: torch.zeros(shape, dtype=torch.int64, device="meta") for name in ("tokens", "targets")}


@dataclass(frozen=True)
class Family:
    """Recipe for capturing a family of models.

    Attributes:
        build: Makes a model of two layers of each kind, of these sizes.
        options: Values that each symbol takes in the captures; two symbols never take one.
        counts: Number of times each segment stands, in the names of counts; checked against a capture.
        source: Publication or code that the structure is from.
        batch: Makes a batch of ``b`` sequences.
        loss: Loss of the model on the batch.
        layers: Counts that the model is built with.
    """

    build: Callable[[Sizes], nn.Module]
    options: Mapping[str, tuple[int, ...]]
    counts: tuple[str, ...]
    source: str
    batch: Callable[[Sizes], Any] = _token_batch
    loss: Callable[[nn.Module, Any], Any] = token_loss
    layers: Mapping[str, int] = field(default_factory=lambda: {"layers": 2})


def _patch_batch(at: Sizes) -> dict[str, torch.Tensor]:
    shape = (at["b"], at["s"], at["p"])
    text = (at["b"], at["t"], at["c"]) if "c" in at else None
    told = torch.zeros(text) if text else torch.zeros(at["b"], dtype=torch.int64)
    steps = torch.zeros(at["b"], dtype=torch.int64)
    return {"patches": torch.zeros(shape), "targets": torch.zeros(shape), "steps": steps, "told": told}


def _patches(at: Sizes, num_layers: int = 2) -> nn.Module:
    sizes = {"dim": at["h"], "num_heads": at["n"], "head_size": at["d"], "hidden_dim": at["f"]}
    told = {"text_dim": at["c"]} if "c" in at else {"num_labels": at["v"]}
    return PatchDiT(PatchConfig(patch_dim=at["p"], num_patches=at["s"], num_layers=num_layers, **sizes, **told))


def _gpt(at: Sizes) -> nn.Module:
    return GPT(GptConfig(**_decoder(at), hidden_dim=at["f"]))


def _flash_dropping(at: Sizes) -> nn.Module:
    return GPT(GptConfig(**_decoder(at), hidden_dim=at["f"], dropout=0.1))


def _in_parts(at: Sizes) -> nn.Module:
    return UnfusedGPT(UnfusedConfig(**_decoder(at), hidden_dim=at["f"]))


def _dropping(at: Sizes) -> nn.Module:
    return UnfusedGPT(UnfusedConfig(**_decoder(at), hidden_dim=at["f"], dropout=0.1))


def _bloom(at: Sizes) -> nn.Module:
    return UnfusedGPT(UnfusedConfig(**_decoder(at), hidden_dim=at["f"], dropout=0.1, alibi=True))


def _llama(at: Sizes) -> nn.Module:
    return Llama(LlamaConfig(**_decoder(at), num_kv_heads=at["k"], hidden_dim=at["f"], tied=True))


def _parts(at: Sizes, **parts: Any) -> nn.Module:
    """Make a decoder of parts: heads grouped or plain, an MLP, experts, as far as there are sizes for them."""
    sizes = {field: at[symbol] for field, symbol in _PART_SIZES.items() if symbol in at}
    base = {**_decoder({"d": 2, "n": 8, **at}), "num_layers": parts.pop("num_layers", 2)}
    if "mg" in at:
        heads = at["mg"] * at["mr"]
        parts["mamba"] = MambaConfig(dim=at["h"], groups=at["mg"], heads=heads, head_size=at["md"], state=at["ms"])
    return PartsDecoder(PartsConfig(**base, **sizes, **{"tied": True, **parts}))


def _decoder(at: Sizes) -> dict[str, Any]:
    sizes = {"vocab_size": at["v"], "max_seq_len": at["s"], "num_layers": 2}
    return {**sizes, "dim": at["h"], "num_heads": at["n"], "head_size": at["d"]}


_PART_SIZES = {
    "num_kv_heads": "k",
    "hidden_dim": "f",
    "num_experts": "e",
    "num_active": "a",
    "expert_dim": "g",
    "shared_dim": "fs",
    "experts_dim": "latent",
    "query_rank": "qr",
    "latent_rank": "kr",
    "nope_size": "dn",
    "rope_size": "dr",
    "value_size": "dv",
}
_TOKENS = {"b": (3, 5, 7), "s": (34, 38, 46, 58), "v": (211, 223, 227, 229)}
_HEADS = {"n": (8, 16, 24), "d": (26, 22, 62, 74), "h": (7 * 48, 11 * 48, 13 * 48)}
_GROUPED = {**_HEADS, "k": (2, 4, 8)}
_MLP = {"f": (83, 89, 97, 101)}
_EXPERTS = {"e": (6, 9, 10, 14), "a": (2, 3, 4), "g": (8 * 19, 8 * 23, 8 * 29)}
_SHARED = {"fs": (103, 107, 109)}
_LATENT = {
    "h": (7 * 48, 11 * 48, 13 * 48),
    "n": (8, 16, 24),
    "kr": (113, 127, 131),
    "dn": (17, 41, 43),
    "dr": (62, 82, 86),
    "dv": (47, 53, 61),
}
_STATE = {"mg": (2, 3, 6), "mr": (4, 5, 7), "md": (11, 17, 23), "ms": (37, 41, 47)}
_PATCHES = {"b": (3, 5, 7), "s": (34, 38, 46, 58), "p": (151, 157, 179), **_HEADS, **_MLP}
_ONE_BLOCK = ("1", "layers", "1")
_AHEAD = ("1", "dense_layers", "layers - dense_layers", "1", "1")
_DENSE_FIRST = ("1", "dense_layers", "layers - dense_layers", "1")

FAMILIES: dict[str, Family] = {
    "gpt": Family(
        _gpt,
        {**_TOKENS, **_HEADS, **_MLP},
        _ONE_BLOCK,
        "models/gpt.py: Radford et al. 2019 (GPT-2), with fused attention and no dropout",
    ),
    "gpt-dropout": Family(
        _dropping,
        {**_TOKENS, **_HEADS, **_MLP},
        _ONE_BLOCK,
        "models/unfused.py: attention in parts, dropout 0.1 of its weights and of what joins the stream; Megatron-LM's "
        "defaults for pretrain_gpt.py in 2021 and 2022",
    ),
    "gpt-flash-dropout": Family(
        _flash_dropping,
        {**_TOKENS, **_HEADS, **_MLP},
        _ONE_BLOCK,
        "models/gpt.py: gpt with dropout 0.1 of what joins the stream; a fused attention drops weights inside",
    ),
    "gpt-parts": Family(
        _in_parts,
        {**_TOKENS, **_HEADS, **_MLP},
        _ONE_BLOCK,
        "models/unfused.py: attention in parts, no dropout",
    ),
    "gpt-unfused": Family(
        _bloom,
        {**_TOKENS, **_HEADS, **_MLP},
        _ONE_BLOCK,
        "models/unfused.py: as gpt-dropout, with ALiBi and a norm of the embeddings; BLOOM's "
        "train/tr11-176B-ml/tr11-176B-ml.slurm sets --position-embedding-type alibi and --embed-layernorm and leaves "
        "dropout at Megatron's default",
    ),
    "llama": Family(
        _llama,
        {**_TOKENS, **_GROUPED, **_MLP},
        _ONE_BLOCK,
        "models/llama.py: Touvron et al. 2023 (Llama), grouped-query attention and SwiGLU",
    ),
    "llama-fused": Family(
        _parts,
        {**_TOKENS, **_GROUPED, **_MLP},
        _ONE_BLOCK,
        "models/decoder.py: llama with one product for queries, keys and values and one for gate and value, as "
        "Megatron-Core lays it out",
    ),
    "qwen3": Family(
        partial(_parts, qk_norm=True),
        {**_TOKENS, **_GROUPED, **_MLP},
        _ONE_BLOCK,
        "models/decoder.py: llama-fused with norms of queries and keys, Yang et al. 2025 (Qwen3)",
    ),
    "nemotron": Family(
        partial(_parts, norm="layer", norm_bias=True, mlp="relu2"),
        {**_TOKENS, **_GROUPED, **_MLP},
        _ONE_BLOCK,
        "models/decoder.py: Parmar et al. 2024 (Nemotron-4): LayerNorm, squared ReLU, no gate, grouped-query attention",
    ),
    "mpt": Family(
        partial(_parts, norm="layer", mlp="gelu", rotary=False),
        {**_TOKENS, **_HEADS, **_MLP},
        _ONE_BLOCK,
        "models/decoder.py: MosaicML 2023 (MPT): no biases, fused attention that adds ALiBi itself",
    ),
    "moe": Family(
        partial(_parts, parts=("attention", "experts")),
        {**_TOKENS, **_GROUPED, **_EXPERTS},
        _ONE_BLOCK,
        "models/decoder.py: Jiang et al. 2024 (Mixtral), tokens dispatched to experts in grouped products",
    ),
    "qwen3-moe": Family(
        partial(_parts, parts=("attention", "experts"), qk_norm=True),
        {**_TOKENS, **_GROUPED, **_EXPERTS},
        _ONE_BLOCK,
        "models/decoder.py: moe with norms of queries and keys, Yang et al. 2025 (Qwen3)",
    ),
    "moe-shared": Family(
        partial(_parts, parts=("attention", "experts"), dense_layers=2, num_layers=4),
        {**_TOKENS, **_GROUPED, **_MLP, **_EXPERTS, **_SHARED},
        _DENSE_FIRST,
        "models/decoder.py: moe with an expert that every token uses and first blocks without experts",
        layers={"layers": 4, "dense_layers": 2},
    ),
    "mla-moe": Family(
        partial(_parts, parts=("attention", "experts"), dense_layers=2, num_layers=4, sigmoid_router=True),
        {**_TOKENS, **_LATENT, "qr": (137, 139, 149), **_MLP, **_EXPERTS, **_SHARED},
        _DENSE_FIRST,
        "models/decoder.py: DeepSeek-AI 2024 (DeepSeek-V2, V3): latent attention, shared expert, first blocks dense",
        layers={"layers": 4, "dense_layers": 2},
    ),
    "mla-moe-lite": Family(
        partial(_parts, parts=("attention", "experts"), dense_layers=2, num_layers=4, sigmoid_router=True),
        {**_TOKENS, **_LATENT, **_MLP, **_EXPERTS, **_SHARED},
        _DENSE_FIRST,
        "models/decoder.py: mla-moe without a rank of the queries (DeepSeek-V2-Lite, Moonlight)",
        layers={"layers": 4, "dense_layers": 2},
    ),
    "dit": Family(
        _patches,
        {**_PATCHES, "v": (211, 223, 227, 229)},
        _ONE_BLOCK,
        "models/patches.py: Peebles and Xie 2023 (DiT, adaLN-Zero)",
        batch=_patch_batch,
        loss=patch_loss,
    ),
    "wan": Family(
        partial(_patches, num_layers=3),
        {**_PATCHES, "t": (19, 29, 31), "c": (163, 167, 173)},
        ("1", "layers - 1", "1", "1"),  # the last block's backward is the first, and has no gradients of text to add to
        "models/patches.py: Wan Team 2025 (Wan 2.1), text by cross-attention",
        batch=_patch_batch,
        loss=patch_loss,
        layers={"layers": 3},
    ),
    "hybrid-attention": Family(
        partial(_parts, parts=("attention",), rotary=False),
        {**_TOKENS, **_GROUPED},
        _ONE_BLOCK,
        "models/decoder.py: attention alone in a block, no positions; Blakeman et al. 2025 (Nemotron-H)",
    ),
    "hybrid-mlp": Family(
        partial(_parts, parts=("mlp",), mlp="relu2", rotary=False),
        {**_TOKENS, "h": _HEADS["h"], **_MLP},
        _ONE_BLOCK,
        "models/decoder.py: an MLP alone in a block, squared ReLU; Blakeman et al. 2025 (Nemotron-H)",
    ),
    "hybrid-moe": Family(
        partial(_parts, parts=("experts",), mlp="relu2", rotary=False, sigmoid_router=True),
        {**_TOKENS, "h": _HEADS["h"], **_EXPERTS, **_SHARED},
        _ONE_BLOCK,
        "models/decoder.py: experts alone in a block, squared ReLU, one of them shared; NVIDIA 2025 (Nemotron 3)",
    ),
    "hybrid-moe-latent": Family(
        partial(_parts, parts=("experts",), mlp="relu2", rotary=False, sigmoid_router=True),
        {**_TOKENS, "h": _HEADS["h"], **_EXPERTS, **_SHARED, "latent": (8 * 31, 8 * 37, 8 * 43)},
        _ONE_BLOCK,
        "models/decoder.py: as hybrid-moe, experts work in a width of their own; NVIDIA 2025 (Nemotron 3 Super)",
    ),
    "mamba2": Family(
        partial(_parts, parts=("mamba",), rotary=False),
        {**_TOKENS, "s": (128 * 2, 128 * 3, 128 * 5), "h": _HEADS["h"], **_STATE},
        _ONE_BLOCK,
        "models/mamba.py: Dao and Gu 2024 (Mamba-2), chunks of 128 tokens",
    ),
    "moe-shared-ahead1": Family(
        partial(_parts, parts=("attention", "experts"), dense_layers=2, num_layers=4, ahead=1),
        {**_TOKENS, **_GROUPED, **_MLP, **_EXPERTS, **_SHARED},
        _AHEAD,
        "models/decoder.py: moe-shared with a block that predicts one token further",
        layers={"layers": 4, "dense_layers": 2},
    ),
    "mla-moe-ahead1": Family(
        partial(_parts, parts=("attention", "experts"), dense_layers=2, num_layers=4, sigmoid_router=True, ahead=1),
        {**_TOKENS, **_LATENT, "qr": (137, 139, 149), **_MLP, **_EXPERTS, **_SHARED},
        _AHEAD,
        "models/decoder.py: mla-moe with a block that predicts one token further (DeepSeek-V3)",
        layers={"layers": 4, "dense_layers": 2},
    ),
    "hybrid-moe-ahead2": Family(
        partial(_parts, parts=("attention", "experts"), mlp="relu2", rotary=False, sigmoid_router=True, ahead=2),
        {**_TOKENS, **_GROUPED, **_EXPERTS, **_SHARED},
        ("1", "layers", "1", "1", "1"),
        "models/decoder.py: attention and experts in a block as Nemotron 3 has them to predict two tokens further",
    ),
    "hybrid-moe-latent-ahead2": Family(
        partial(_parts, parts=("attention", "experts"), mlp="relu2", rotary=False, sigmoid_router=True, ahead=2),
        {**_TOKENS, **_GROUPED, **_EXPERTS, **_SHARED, "latent": (8 * 31, 8 * 37, 8 * 43)},
        ("1", "layers", "1", "1", "1"),
        "models/decoder.py: as hybrid-moe-ahead2, experts work in a width of their own",
    ),
}


def captured_family(name: str, observations: int = 8) -> StoredTable:
    """Capture the table of a family.

    Args:
        observations: Sizes to capture at; the last are checked, not fitted.
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
    """Build a model of a family in bfloat16, without memory, and a batch for it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return FAMILIES[name].build(at), FAMILIES[name].batch(at)
    finally:
        torch.set_default_dtype(before)


def sizes_of(family: Family, count: int) -> list[dict[str, int]]:
    """Choose values of the symbols ``count`` times, always alike; each symbol goes through all of its values."""
    columns: dict[str, list[int]] = {}
    for name, values in sorted(family.options.items()):
        draw = random.Random(name)
        columns[name] = [value for _ in range(count) for value in draw.sample(values, len(values))][:count]
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def write_table(table: StoredTable) -> str:
    """Write a family as JSON, one tensor or operation in a line."""
    head: dict[str, Any] = {
        "name": table.name,
        "source": table.source,
        "symbols": " ".join(table.symbols),
        "counts": list(table.counts),
        "tied": table.tied,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    segments = ",\n".join(map(_write_segment, table.segments))
    return "{" + ",\n".join(lines) + ',\n"segments": [\n' + segments + "\n]}\n"


def _write_segment(segment: Segment) -> str:
    lines = [f'"name": {json.dumps(segment.name)}']
    lines += [f'"{end}": {json.dumps(getattr(segment, end))}' for end in SEGMENT_ENDS]
    lines.append(f'"gradients": {json.dumps(segment.gradients)}')
    for key, rows in (
        ("tensors", [_tensor_row(t) for t in segment.tensors]),
        ("ops", [_op_row(op) for op in segment.ops]),
    ):
        text = ",\n  ".join(json.dumps(row) for row in rows)
        lines.append(f'"{key}": [\n  {text}\n]')
    return "{" + ",\n".join(lines) + "}"


def _tensor_row(tensor: SegmentTensor[Size]) -> list[Any]:
    dims = ",".join(map(str, tensor.dims)).replace(" ", "")
    row = [tensor.storage, tensor.dtype, dims, tensor.role.value[:3], tensor.name, list(tensor.repeats)]
    return _trimmed(row)


def _op_row(op: Op) -> list[Any]:
    args, kwargs = [_write_arg(arg) for arg in op.args], {key: _write_arg(arg) for key, arg in op.kwargs}
    settings = {key: _write_setting(value) for key, value in op.settings}
    row = [op.name, op.kind.value, op.phase.value[:3], op.module, args, list(op.results)]
    return _trimmed([*row, settings, kwargs, list(op.mutates), op.random])


def _write_arg(arg: Arg) -> Any:
    if isinstance(arg, Ref):
        return f"#{arg.tensor}"
    if isinstance(arg, Literal):
        return {arg.kind: arg.value}
    if isinstance(arg, Size):
        return {"size": str(arg)}
    if isinstance(arg, Power):
        return {"size": str(arg.size), "exponent": arg.exponent}
    return [_write_arg(item) for item in arg] if isinstance(arg, tuple) else arg


def _trimmed(row: list[Any]) -> list[Any]:
    """Drop what is empty at the end of a row."""
    while row and row[-1] in ("", [], {}, False):
        row.pop()
    return row


def _write_setting(value: object) -> Any:
    if isinstance(value, Size):
        return {"size": str(value)}
    return [_write_setting(item) for item in cast("tuple[object, ...]", value)] if isinstance(value, tuple) else value


def main() -> None:
    """Capture families and write their tables."""
    for name in sys.argv[1:] or FAMILIES:
        path = TABLES / f"{name}.json"
        path.write_text(write_table(captured_family(name)), encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
