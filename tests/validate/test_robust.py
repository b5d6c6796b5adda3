"""A row that lacks any one field is a request that says what it assumed, or an error with a reason: never a fault."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.validate.requests import request_of
from tools.validate.rows import read_rows

from lading.errors import ConfigError
from tests.validate.test_rows import FILES

LINES = [line for line in FILES[0].read_text().splitlines() if line]
#: Every third of one row of each source and task: kinds of models, stacks and layouts.
SAMPLE = list(
    {(r["source_family"], r["model"]["kind"], r["layout"].get("task")): r for r in map(json.loads, LINES)}.values()
)[::3]

EMPTY: dict[type, tuple[Any, ...]] = {int: (0,), float: (0,), str: ("",)}


def without(row: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for part in ("model", "hardware", "layout", "measured"):
        for name in row[part]:
            for value in (None, *EMPTY.get(type(row[part][name]), ())):
                changed = copy.deepcopy(row)
                changed[part][name] = value
                yield f"{part}.{name}={value!r}", changed


@pytest.mark.long
@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row["id"])
def test_rows_without_a_field(row: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    refused: set[str] = set()
    for name, changed in without(row):
        file.write_text(json.dumps(changed))
        try:
            request = request_of(read_rows([file])[0][0])
        except ConfigError:
            refused.add(name.partition("=")[0])
            continue
        assert request.layout.devices == changed["hardware"]["gpus"]
    needed = {"model.layers", "model.hidden", "model.heads", "model.seq_len", "hardware.gpu", "hardware.gpus"}
    degrees = {f"layout.{name}" for name in ("dp", "tp", "pp", "cp", "ep", "etp")}
    experts = {
        f"model.{name}" for name in ("topk", "moe_ffn_hidden", "head_dim", "attention", "arch", "first_dense_layers")
    }
    state = {f"model.mamba_{name}" for name in ("heads", "head_dim", "state", "groups")}
    values = {f"measured.{name}" for name in row["measured"]}
    assert refused <= needed | degrees | experts | state | values, refused
