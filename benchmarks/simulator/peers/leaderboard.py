"""The leaderboard in Markdown: Lading's scores, and every simulator on the rows that it can express.

python benchmarks/simulator/peers/run.py lading --out benchmarks/simulator/peers/results
python benchmarks/simulator/peers/leaderboard.py --write
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

from tools.validate.rows import Row, read_rows
from tools.validate.scoring import Pair, grouped, outcomes_of, step_pairs

from lading.errors import ConfigError
from lading.ir.request import Prediction, StepRequest

RESULTS = Path(__file__).parent / "results"
ROWS = Path(__file__).parents[2] / "validation"
FILES = [ROWS / "measurements.jsonl", ROWS / "measurements_vtrain_single_node.jsonl"]
BEGIN, END = "<!-- written by peers/leaderboard.py --write -->", "<!-- end -->"
HEADLINE = {
    "step_time": "with the factors of stacks as they ship",
    "step_time_anchored": "no factor fitted on whole steps, one run of each stack known",
    "step_time_left_out": "each source scored by what other sources say",
    "step_time_framework_left_out": "software not known: each framework, with all its sources, left out",
    "step_time_framework_anchored": "the same, one run of the framework known",
    "step_time_tier_b": "tier B",
    "memory": "allocated bytes",
}
PEERS = ("calculon", "llm-analysis", "simumax", "constant")


class Recorded:
    """Predictions that were written down."""

    def __init__(self, file: Path) -> None:
        self._seconds: dict[str, float] = {}
        for line in file.read_text().splitlines():
            found = json.loads(line)
            if "step_s" in found:
                self._seconds[found["id"]] = found["step_s"]

    def predict(self, request: StepRequest) -> Prediction:
        """Prediction that was written for the row.

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


def headline(scores: Mapping[str, Any]) -> str:
    """Errors averaged over sources, with what each line knows."""
    lines = ["| | rows | error | bias | median | p90 | in the interval | its width |", "|---" + 7 * "|---:" + "|"]
    for key, title in HEADLINE.items():
        found = scores[key]
        shares = (found[name] for name in ("macro_abs_error", "median", "p90", "coverage", "width"))
        error, median, p90, coverage, width = ("-" if share is None else f"{share:.1%}" for share in shares)
        bias = f"{found['bias'] or 0:+.1%}"
        lines.append(f"| {title} | {found['rows']} | {error} | {bias} | {median} | {p90} | {coverage} | {width} |")
    return "\n".join(lines)


def frameworks_table(scores: Mapping[str, Any]) -> str:
    """Errors, bias and coverage of each framework where it is left out, and where one run of it is known."""
    left, near = (scores[f"step_time_framework_{name}"]["frameworks"] for name in ("left_out", "anchored"))
    lines = [
        "| framework | rows | left out | bias | in the interval | its width | one run known | in the interval |",
        "|---" + 7 * "|---:" + "|",
    ]
    for name, found in left.items():
        cells = [f"{found[key]:.1%}" for key in ("abs_error", "coverage", "width")]
        cells.insert(1, f"{found['bias']:+.1%}")
        known = [f"{near[name][key]:.1%}" for key in ("abs_error", "coverage")] if name in near else ["-", "-"]
        lines.append(f"| {name} | {found['rows']} | {' | '.join([*cells, *known])} |")
    return "\n".join(lines)


def order_table(scores: Mapping[str, Any]) -> str:
    """Regret and Kendall's tau."""
    groups = dict(scores["order"])
    groups |= {f"{name}, any batch": x for name, x in scores["order_any_batch"].items() if name not in groups}
    lines = ["| | groups | rows | mean regret | max regret | Kendall's tau |", "|---|---:|---:|---:|---:|---:|"]
    for name, found in groups.items():
        regrets = f"{found['mean_regret']:.1%} | {found['max_regret']:.1%}"
        lines.append(f"| {name} | {found['groups']} | {found['rows']} | {regrets} | {found['kendall_tau']:.2f} |")
    return "\n".join(lines)


def section(scores: Mapping[str, Any], board: str) -> str:
    """Text of the leaderboard in the README."""
    noise = scores["noise"]
    spread, third, floor = (f"{noise[name]:.1%}" for name in ("median", "p75", "floor"))
    return f"""{date.today():%d %B %Y}, {scores["rows"]} rows, {scores["rows_skipped"]} could not be simulated.
Errors are of seconds a step, of tier A, of repeats the newest, averaged over sources; the rules are in
[../validation/README.md](../validation/README.md).

{headline(scores)}

The first line is not blind: a factor for each architecture, and one for each stack seen on it, are fitted on these rows
(`benchmarks/calibrate/stacks.py`), and host times of some stacks. The third is the one to expect of a new source, the
fourth of software that nobody measured: defaults of its class and what its rows say, no name and no fit of its own. The
width of an interval is what lies between its ends, as a share of the prediction; the median is given.

{frameworks_table(scores)}

{noise["configurations"]} configurations were published more than once, all stated fields equal: slowest over fastest
differs by {spread} at the median and {third} at the third quartile, so a prediction of their middle would err by
{floor}.

Each simulator on the rows that it can express, and Lading on just those in brackets
([how each was run](peers/README.md)); "constant" is 45% of the peak for all:

{board}

Order within groups of one model, machine, number of devices and batch (at least three layouts); "any batch": of one
model and machine, by device-seconds of a token:

{order_table(scores)}
"""


def main() -> None:
    """Print the section, or write it into the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into benchmarks/simulator/README.md")
    rows = read_rows(FILES)[0]
    theirs = {peer: families(rows, RESULTS / f"{peer}.rows.jsonl") for peer in PEERS}
    board = table(families(rows, RESULTS / "lading.rows.jsonl"), theirs)
    text = section(json.loads((RESULTS / "lading.json").read_text()), board)
    if not parser.parse_args().write:
        print(text)
        return
    readme = RESULTS.parents[1] / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
