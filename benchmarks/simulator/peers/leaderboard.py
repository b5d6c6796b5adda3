"""Every simulator on the rows that it can express, and Lading on the same rows, as a table in Markdown.

lading validate benchmarks/validation/measurements*.jsonl --rows lading.rows.jsonl
python benchmarks/simulator/peers/leaderboard.py lading.rows.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from lading.errors import ConfigError
from lading.ir.request import Prediction, Request
from lading.validate.rows import Row, read_rows
from lading.validate.scoring import Pair, grouped, outcomes_of, step_pairs

RESULTS = Path(__file__).parent / "results"
ROWS = Path(__file__).parents[2] / "validation"
FILES = [ROWS / "measurements.jsonl", ROWS / "measurements_vtrain_single_node.jsonl"]
PEERS = ("calculon", "llm-analysis", "simumax", "constant")


class Recorded:
    """Predictions that were written down."""

    def __init__(self, file: Path) -> None:
        self._seconds: dict[str, float] = {}
        for line in file.read_text().splitlines():
            found = json.loads(line)
            if "step_s" in found:
                self._seconds[found["id"]] = found["step_s"]

    def predict(self, request: Request) -> Prediction:
        """What was written for the row.

        Raises:
            ConfigError: nothing was.
        """
        if request.name not in self._seconds:
            raise ConfigError("no prediction was written")
        step_s = self._seconds[request.name]
        return Prediction(step_s=step_s, low_s=step_s, high_s=step_s)


def families(rows: list[Row], file: Path) -> dict[str, dict[str, Pair]]:
    """Pairs of tier A, one for each configuration, by family and row."""
    pairs = grouped(step_pairs(outcomes_of(rows, Recorded(file))), lambda pair: pair.outcome.row.family)
    return {name: {pair.outcome.row.id: pair for pair in group} for name, group in sorted(pairs.items())}


def error(pairs: Mapping[str, Pair], rows: Mapping[str, Pair]) -> str:
    """Mean absolute error on the rows that both have."""
    common = [abs(pair.error) for name, pair in pairs.items() if name in rows]
    return f"{fmean(common):.1%}" if common else "-"


def table(ours: dict[str, dict[str, Pair]], theirs: dict[str, dict[str, dict[str, Pair]]]) -> str:
    """The table: error of each with its number of rows, and ours on the same rows."""
    lines = ["| source | rows | Lading | " + " | ".join(f"{peer} (Lading there)" for peer in theirs) + " |"]
    lines.append("|---" * (3 + len(theirs)) + "|")
    for family, own in ours.items():
        cells = [family, str(len(own)), error(own, own)]
        for found in theirs.values():
            other = found.get(family, {})
            cells.append(f"{error(other, own)} of {len(other)} ({error(own, other)})" if other else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    rows = read_rows(FILES)[0]
    theirs = {peer: families(rows, RESULTS / f"{peer}.rows.jsonl") for peer in PEERS}
    print(table(families(rows, RESULTS / "lading.rows.jsonl"), theirs))


if __name__ == "__main__":
    main()
