"""Tables of architectures: as large as published, put together from blocks whose borders fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tools.validate.architecture import architecture_of

from lading.catalog.architectures import architecture_table, table_parameters
from lading.catalog.tables import family_table
from lading.errors import ConfigError
from lading.ir.graph import OpKind
from lading.ir.request import Architecture
from lading.ir.table import ModelTable

_ROWS = Path(__file__).parents[2] / "benchmarks" / "validation" / "measurements.jsonl"
#: Whose printed size is rounded to one digit, or which have blocks of another kind than any table.
_OTHERWISE = {"BLOOM-family GPT 20B", "NeMo DiT 7B (cross-attention)", "GPT 1.7B"}


def _models() -> dict[str, tuple[dict[str, Any], str]]:
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for line in _ROWS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        model = {key: value for key, value in row["model"].items() if value is not None}
        if model.get("params_b") and model["name"] not in _OTHERWISE:
            found[json.dumps(model, sort_keys=True)] = (model, row.get("notes") or "")
    return found


def _without_ahead(table: ModelTable, model: Architecture) -> ModelTable:
    """Published sizes leave out the blocks that predict further ahead."""
    ahead = range(len(table.counts) - 1 - model.predict_ahead, len(table.counts) - 1)
    counts = tuple(0 if i in ahead else n for i, n in enumerate(table.counts))
    return table if table.assumed else dataclasses.replace(table, counts=counts)


def test_blocks_ahead_share_the_embedding() -> None:
    symbols = {
        "h": 64,
        "n": 4,
        "v": 100,
        "e": 8,
        "a": 2,
        "g": 32,
        "fs": 16,
        "qr": 12,
        "kr": 10,
        "dn": 6,
        "dr": 4,
        "dv": 5,
    }
    blocks = (("dense", 1), ("moe", 3))
    plain = Architecture(family="mla-moe", symbols={**symbols, "f": 80}, blocks=blocks)
    one = architecture_table(dataclasses.replace(plain, predict_ahead=1))
    assert one.counts == (1, 1, 3, 1, 1)
    assert one.tied == (((0, "tokens.weight"), (3, "tokens.weight")),)
    assert table_parameters(one) > table_parameters(architecture_table(plain))
    two = architecture_table(dataclasses.replace(plain, predict_ahead=2))
    assert (two.counts, two.assumed) == (one.counts, ("without 1 of 2 blocks that predict tokens further ahead",))
    gpt = Architecture(family="gpt", symbols={"h": 64, "n": 4, "v": 100}, blocks=(("block", 3),), predict_ahead=1)
    assert architecture_table(gpt).assumed == ("without 1 of 1 blocks that predict tokens further ahead",)


def test_every_published_model_has_its_parameters() -> None:
    models = _models()
    assert len(models) > 90
    for model, notes in models.values():
        architecture, _ = architecture_of(model, notes, 1)
        table = architecture_table(architecture)
        total = table_parameters(_without_ahead(table, architecture), model["seq_len"]) / 1e9
        assert total == pytest.approx(model["params_b"], rel=0.016), model["name"]
        for before, after in zip(table.segments, table.segments[1:], strict=False):
            sides = ((before, before.leaves), (after, after.enters))
            assert len({tuple(s.tensors[t].dims for t in ends) for s, ends in sides}) == 1, model["name"]
        extra = 0 if table.assumed else architecture.predict_ahead
        assert sum(table.counts) == architecture.layers + 2 + extra, model["name"]


def test_gpt_has_a_table_for_each_way_of_attention_and_dropout() -> None:
    model = Architecture(family="gpt", symbols={"h": 64, "n": 4, "v": 100}, blocks=(("block", 3),), tied=True)
    names = {
        (unfused, dropout, alibi): architecture_table(model, unfused=unfused, dropout=dropout, alibi=alibi).source
        for unfused in (False, True)
        for dropout in (0.0, 0.1)
        for alibi in (False, True)
    }
    assert len(set(names.values())) == 6  # with ALiBi dropout is as the family has it
    table = architecture_table(model, unfused=True, dropout=0.1)
    kinds = {op.kind for op in table.segments[1].ops}
    assert OpKind.ATTENTION not in kinds
    assert OpKind.RANDOM in kinds
    assert table.tied == (((0, "tokens.weight"), (2, "head.weight")),)


def test_windows_are_told_to_attention_alone() -> None:
    symbols = {"h": 64, "n": 4, "k": 2, "v": 100, "e": 8, "a": 2, "g": 32, "window": 128}
    model = Architecture(family="moe", symbols=symbols, blocks=(("window", 1), ("full", 1)) * 2)
    table = architecture_table(model)
    told = [[dict(op.settings).get("window") for op in s.ops if op.kind is OpKind.ATTENTION] for s in table.segments]
    assert told == [[], [128, 128], [None, None], [128, 128], [None, None], []]
    with pytest.raises(ConfigError, match="window"):
        architecture_table(Architecture(family="moe", symbols={**symbols, "window": 0}, blocks=model.blocks))


def test_korthikanti_counts_the_same_activations() -> None:
    """Korthikanti et al. 2022, equation 1: s b h (34 + 5 a s / h) bytes of a layer, norms' statistics aside."""
    table = family_table("gpt-dropout", layers=1, h=12288, n=96, v=51200)
    block, sizes = table.segments[1], {**table.symbols, "b": 2, "s": 2048}
    kept: dict[int, int] = {}
    for t in block.saved:
        tensor = block.tensors[t]
        if tensor.role == "activation" and tensor.dtype != "float32":
            storage = [x for x in block.tensors if x.storage == tensor.storage]
            size = max(x.elements.at(sizes) for x in storage) * (1 if tensor.dtype == "bool" else 2)
            kept[tensor.storage] = size
    assert sum(kept.values()) == 2048 * 2 * 12288 * 34 + 5 * 96 * 2048**2 * 2


@pytest.mark.parametrize(
    ("family", "kind"), [("mamba2", "window"), ("llama", "dense"), ("dit", "moe"), ("mla-moe", "window")]
)
def test_blocks_that_no_family_has_are_refused(family: str, kind: str) -> None:
    symbols = {"h": 64, "n": 4, "v": 100, "fs": 4, "qr": 3}
    with pytest.raises(ConfigError, match=f"{family}.*{kind}"):
        architecture_table(Architecture(family=family, symbols=symbols, blocks=((kind, 2),)))
