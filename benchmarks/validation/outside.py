"""Errors of software that was never fitted, over its published runs.

    python benchmarks/validation/outside.py [ROWS.jsonl ...]

``python -m tools.validate`` scores rows of tier A, which state everything. A stranger's rows seldom do, so those of
tier B count here alike, and only those that lack something material (C) do not. Without files it is those of this
folder that no constant is fitted on, each alone and all together. The second table has their sources of two runs and
more, before and after one run of each is known (``tools.validate.protocols.source_anchored``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import log
from pathlib import Path
from statistics import median

from tools.validate.protocols import source_anchored
from tools.validate.rows import read_rows
from tools.validate.scoring import Pair, Simulator, outcomes_of, step_pairs, summary

_FOLDER = Path(__file__).parent
_SETS = ("", *(f"_{number}" for number in range(2, 9)))
_NAMES = ("other_frameworks", "unseen_frameworks", *(f"blind_frameworks{end}" for end in _SETS))


def line(name: str, pairs: Sequence[Pair]) -> str:
    """One row of the table."""
    scores = summary(pairs)
    inside = sum(pair.in_interval for pair in pairs)
    width = median(log(pair.high / pair.low) for pair in pairs)
    error, bias, coverage = (scores[key] for key in ("macro_abs_error", "bias", "coverage"))
    counts = f"{len(scores['families'])} | {len(pairs)}"
    return f"| {name} | {counts} | {error:.1%} | {bias:+.1%} | {inside} | {coverage:.0%} | {width:.2f} |"


def main(files: Sequence[Path]) -> None:
    """Print the tables."""
    heads = (
        "sources | runs | error | bias | in the interval | of sources alike | ln(high/low) |",
        "|---" + 7 * "|---:" + "|",
    )
    print(f"| file | {heads[0]}\n{heads[1]}")
    found: list[Pair] = []
    for path in files or [_FOLDER / f"{name}.jsonl" for name in _NAMES]:
        rows, notes = read_rows([path])
        outcomes = outcomes_of(rows, Simulator())
        print(*notes, sep="\n", end="\n" if notes else "", file=sys.stderr)
        pairs = [*step_pairs(outcomes), *step_pairs(outcomes, "B")]
        print(line(path.stem, pairs), flush=True)
        found += pairs
    print(line("all", found))
    before, after = source_anchored(found)
    print(f"\n| one run of each source | {heads[0]}\n{heads[1]}")
    print(line("not known", before), line("known", after), sep="\n")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
