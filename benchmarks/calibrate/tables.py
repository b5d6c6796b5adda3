"""Writing fitted numbers into src/lading/catalog/kernels/<architecture>.toml, one table at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "src" / "lading" / "catalog" / "kernels"
OPERATORS = ROOT / "benchmarks" / "validation" / "operators_collectives.jsonl"


def rows(kind: str, hardware: str) -> Iterator[dict[str, Any]]:
    """Measured operators of a kind on hardware whose name starts so."""
    for line in OPERATORS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == kind and row["hardware"].startswith(hardware):
            yield row


def replace(architecture: str, table: str, values: Mapping[str, Any]) -> None:
    """Put ``[table]`` with these values in place of the one the file has; tables below it are left."""
    path = KERNELS / f"{architecture}.toml"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    block = f"[{table}]\n" + "".join(f"{key} = {_value(value)}\n" for key, value in values.items()) + "\n"
    pattern = re.compile(rf"^\[{re.escape(table)}\]\n(?:(?!\[).*\n)*", re.MULTILINE)
    text = pattern.sub(lambda _: block, text) if pattern.search(text) else text + block
    path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, float):
        return f"{value:.4g}" if "." in f"{value:.4g}" or "e" in f"{value:.4g}" else f"{value:.4g}.0"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return json.dumps(value)
