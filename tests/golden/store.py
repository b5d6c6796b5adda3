"""Goldens: what the code said when they were written, kept as data beside this file, and how to compare with it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
#: Seconds may differ by so much: sums may be taken in another order.
TOLERANCE = 1e-9
_LIST, _BREAK = re.compile(r"\[\s+([^\[\]{}]*?)\s+\]"), re.compile(r",\s+")


def read_json(name: str) -> dict[str, Any]:
    """A stored table."""
    return json.loads((FOLDER / name).read_text())


def write_json(name: str, table: dict[str, Any]) -> None:
    """Store a table; lists of plain values stand in one line."""
    text = json.dumps(table, indent=1)
    flat = _LIST.sub(lambda found: f"[{_BREAK.sub(', ', found[1])}]", text)
    (FOLDER / name).write_text(flat + "\n")


def read_text(name: str) -> str:
    """A stored text."""
    return (FOLDER / name).read_text()


def write_text(name: str, text: str) -> None:
    """Store a text."""
    path = FOLDER / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def differences(golden: Any, now: Any, where: str = "") -> list[str]:
    """Where two tables differ: numbers with a point by more than ``TOLERANCE``, all else at all."""
    if isinstance(golden, dict) and isinstance(now, dict):
        missing = [f"{where}: {key!r} is in one only" for key in golden.keys() ^ now.keys()]
        shared = (key for key in golden if key in now)
        return missing + [line for key in shared for line in differences(golden[key], now[key], f"{where}/{key}")]
    if isinstance(golden, list) and isinstance(now, list | tuple):
        if len(golden) != len(now):
            return [f"{where}: {len(golden)} values were stored, {len(now)} are there"]
        pairs = enumerate(zip(golden, now, strict=True))
        return [line for at, (old, new) in pairs for line in differences(old, new, f"{where}[{at}]")]
    if isinstance(golden, float) and isinstance(now, float):
        same = math.isclose(golden, now, rel_tol=TOLERANCE, abs_tol=1e-15) or (math.isnan(golden) and math.isnan(now))
        return [] if same else [f"{where}: {golden!r} was stored, {now!r} is there"]
    return [] if golden == now and type(golden) is type(now) else [f"{where}: {golden!r} was stored, {now!r} is there"]


def check(golden: Any, now: Any) -> None:
    """Fail with every difference, the first forty of them.

    Raises:
        AssertionError: there is one.
    """
    found = differences(golden, now)
    more = f"\n... and {len(found) - 40} more" if len(found) > 40 else ""
    assert not found, (
        "\n".join(found[:40]) + more + "\nif that is meant, write the goldens again and say why in the commit: "
        "python -m tests.golden.regenerate"
    )
