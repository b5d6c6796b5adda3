"""The table of an architecture: each of its blocks by kind, taken from the families that have such a block.

A hybrid of state-space, attention and expert blocks, or one whose attention alternates between windows and all tokens,
is a row of segments of several families; what is before the blocks and after them is the same in all of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import prod

from lading.catalog.tables import StoredTable, family_symbols, stored_table, table_families
from lading.errors import ConfigError
from lading.ir.graph import Op, OpKind
from lading.ir.request import Architecture
from lading.ir.table import ModelTable, Segment

#: Where blocks of a kind are: the family, and the place among its blocks.
Place = tuple[str, int]
#: Families of which a diffusion transformer of given sizes says no more than its blocks need.
_DEFAULTS: Mapping[str, Mapping[str, int]] = {"dit": {"p": 16, "v": 1001}, "wan": {"p": 64}}


def architecture_table(
    model: Architecture, *, unfused: bool = False, dropout: float = 0.0, alibi: bool = False, name: str = ""
) -> ModelTable:
    """Build the table of operations of an architecture.

    Args:
        unfused: Attention is two products and a softmax; of GPT there are such tables only.
        dropout: Above 0: what joins the stream is dropped with some probability; of GPT only.
        alibi: Attention adds a bias by distance; of GPT only.
        name: Name of the table.
    Raises:
        ConfigError: no family has blocks of a kind, or a size is missing.
    """
    plain = _base(model, unfused=unfused, dropout=dropout, alibi=alibi)
    base, ahead = _with_ahead(model, plain)
    places = {kind: _place(model, base, kind) for kind, _ in model.blocks}
    stored = stored_table(base)
    families = {family: stored_table(family) for family in (base, *(family for family, _ in places.values()))}
    symbols = _symbols(model, base, families)
    runs = [(_blocks(families[places[kind][0]])[places[kind][1]], kind, count) for kind, count in model.blocks]
    if base == "wan":
        runs = _last_apart(runs, families[base])
    segments = tuple(_biased(_masked(segment, kind, model), model) for segment, kind, _ in runs)
    counts = (1, *(count for *_, count in runs), *(1 for _ in range(ahead)), 1)
    shift = len(counts) - len(stored.segments)
    missing = model.predict_ahead - ahead
    return ModelTable(
        name=name or model.family,
        segments=(stored.segments[0], *segments, *stored.segments[-1 - ahead :]),
        counts=counts,
        symbols=symbols,
        tied=tuple(
            (first, (place + shift, second))
            for first, (place, second) in stored.tied
            if model.tied or place < len(stored.segments) - 1
        ),
        source=stored.source,
        assumed=(f"without {missing} of {model.predict_ahead} blocks that predict tokens further ahead",)
        if missing
        else (),
    )


def _with_ahead(model: Architecture, base: str) -> tuple[str, int]:
    """Find the family whose last segments predict further tokens too, and how many of them it has."""
    if not model.predict_ahead:
        return base, 0
    stem = base
    if base == "mamba2" and any(kind == "moe" for kind, _ in model.blocks):
        stem = "hybrid-moe-latent" if model.symbols.get("latent") else "hybrid-moe"
    for ahead in range(model.predict_ahead, 0, -1):
        if f"{stem}-ahead{ahead}" in table_families():
            return f"{stem}-ahead{ahead}", ahead
    return base, 0


def _base(model: Architecture, *, unfused: bool, dropout: float, alibi: bool) -> str:
    """Find the family whose first and last segment are taken, and its blocks where it has the kind."""
    has_shared = bool(model.symbols.get("fs"))
    if model.family == "gpt":
        if unfused:
            return "gpt-unfused" if alibi else "gpt-dropout" if dropout else "gpt-parts"
        return "mpt" if alibi else "gpt-flash-dropout" if dropout else "gpt"
    if model.family == "moe":
        return "moe-shared" if has_shared or any(kind == "dense" for kind, _ in model.blocks) else "moe"
    if model.family == "mla-moe":
        if not has_shared:
            raise ConfigError("expected a shared expert (fs) beside latent attention: no table has other blocks")
        return "mla-moe" if model.symbols.get("qr") else "mla-moe-lite"
    return model.family


def _place(model: Architecture, base: str, kind: str) -> Place:
    if model.family == "mamba2":
        hybrid = {
            "mamba": "mamba2",
            "attention": "hybrid-attention",
            "mlp": "hybrid-mlp",
            "moe": "hybrid-moe-latent" if model.symbols.get("latent") else "hybrid-moe",
        }
        if kind in hybrid:
            return hybrid[kind], 0
    if model.family == "mla-moe" and kind in ("dense", "moe"):
        return base, ("dense", "moe").index(kind)
    if model.family == "moe" and kind in ("dense", "moe", "window", "full"):
        if kind == "dense":
            return "moe-shared", 0
        return ("moe-shared", 1) if model.symbols.get("fs") else ("moe", 0)
    if kind in ("block", "window", "full") and model.family not in ("mamba2", "mla-moe"):
        return base, 0
    raise ConfigError(f"expected blocks that family {model.family!r} has a table of, got {kind!r}")


def _blocks(stored: StoredTable) -> tuple[Segment, ...]:
    return stored.segments[1:-1]


def _symbols(model: Architecture, base: str, families: Mapping[str, StoredTable]) -> dict[str, int]:
    sizes = dict(model.symbols)
    if sizes.get("mh"):
        if sizes["mh"] % sizes.get("mg", 1):
            raise ConfigError(f"expected state-space heads (mh) a multiple of groups (mg), got {sizes}")
        sizes["mr"] = sizes["mh"] // sizes.get("mg", 1)
    for key, value in _DEFAULTS.get(base, {}).items():
        sizes.setdefault(key, value)
    if model.family == "moe" and not sizes.get("fs"):
        sizes["fs"] = 1  # of a table whose dense blocks are taken, and none that has a shared expert
    symbols: dict[str, int] = {}
    for family, stored in families.items():
        symbol_sizes = {key: value for key, value in sizes.items() if key in stored.symbols}
        symbols |= family_symbols(family, stored, symbol_sizes)
    return symbols


def _last_apart(runs: list[tuple[Segment, str, int]], stored: StoredTable) -> list[tuple[Segment, str, int]]:
    """Split off the last block, whose backward comes first and has no gradients of text to add to."""
    *before, (segment, kind, count) = runs
    repeated = [(segment, kind, count - 1)] if count > 1 else []
    return [*before, *repeated, (_blocks(stored)[-1], kind, 1)]


def _masked(segment: Segment, kind: str, model: Architecture) -> Segment:
    """Make a block's attention see all tokens, as an encoder's does, or a window of them, if the kind says so."""
    if model.symbols.get("whole"):
        return dataclasses.replace(segment, ops=tuple(map(_unmasked, segment.ops)))
    if kind != "window":
        return segment
    if not model.symbols.get("window"):
        raise ConfigError("expected the tokens that a windowed block sees (symbol 'window'), got none")
    window = (("window", model.symbols["window"]),)
    ops = tuple(
        dataclasses.replace(op, settings=(*op.settings, *window)) if op.kind is OpKind.ATTENTION else op
        for op in segment.ops
    )
    return dataclasses.replace(segment, name="window", ops=ops)


def _unmasked(op: Op) -> Op:
    """The operation without a causal mask, where it is an attention."""
    if op.kind is not OpKind.ATTENTION:
        return op
    settings = tuple((key, value) for key, value in op.settings if key != "is_causal")
    return dataclasses.replace(op, settings=(*settings, ("is_causal", False)))


def _biased(segment: Segment, model: Architecture) -> Segment:
    """Give a block's experts biases and clamped gates, if the architecture says so: a name for costs."""
    if not model.symbols.get("biased"):
        return segment
    ops = tuple(
        dataclasses.replace(op, name="aten._grouped_mm.biased") if op.name.startswith("aten._grouped_mm.") else op
        for op in segment.ops
    )
    return dataclasses.replace(segment, ops=ops)


def with_precise_layers(table: ModelTable, first: int, last: int, layers: int) -> ModelTable:
    """Set a table's first and last blocks apart, with products that stay in 16 bits.

    Args:
        layers: Blocks of the model; those that predict further tokens stand behind them.
    """
    parts: list[tuple[int, Segment, int]] = []
    at = 0
    for place, (segment, count) in enumerate(zip(table.segments, table.counts, strict=True)):
        if not 0 < place < len(table.segments) - 1 or at >= layers:
            parts.append((place, segment, count))
            continue
        ahead = max(0, min(count, first - at))
        behind = max(0, min(count - ahead, at + count - (layers - last)))
        kinds = ((ahead, True), (count - ahead - behind, False), (behind, True))
        parts += [(place, dataclasses.replace(segment, precise=True) if high else segment, n) for n, high in kinds if n]
        at += count
    new_places = {place: index for index, (place, _, _) in reversed(list(enumerate(parts)))}
    tied = tuple(((new_places[a], place_a), (new_places[b], place_b)) for (a, place_a), (b, place_b) in table.tied)
    segments, counts = tuple(segment for _, segment, _ in parts), tuple(count for _, _, count in parts)
    return dataclasses.replace(table, segments=segments, counts=counts, tied=tied)


def table_parameters(table: ModelTable, seq_len: int = 1) -> int:
    """Number of parameters of a model, tied ones once; positions that are learned go by ``seq_len``."""
    sizes = {**table.symbols, "s": seq_len}
    tied = {second for _, second in table.tied}
    total = 0
    for index, (segment, count) in enumerate(zip(table.segments, table.counts, strict=True)):
        for parameter, _ in segment.gradients:
            tensor = segment.tensors[parameter]
            if (index, tensor.name) not in tied:
                total += count * prod(dim.at(sizes) for dim in tensor.dims)
    return total
