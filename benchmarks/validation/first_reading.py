"""How far steps of a source lie from what is predicted of them before anybody has looked at its rows.

    python benchmarks/validation/first_reading.py

``blind_predictions.jsonl`` has the seconds that were predicted of nine sets of rows when they came, each by the commit
that it names, before anything was changed for them. They are held against the intervals that the rows have today, as
of a source that was looked at and as of one that is read for the first time; rows of tier A and B. How much further
the latter should reach is chosen anew without each set, for as many rows and sources of the others as are held.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import hypot, log
from pathlib import Path
from statistics import mean, median

from tools.validate.rows import read_rows
from tools.validate.scoring import outcomes_of, step_pairs

from lading.ir.request import Prediction, StepRequest
from lading.sim.interval import FIRST_READING
from lading.sim.simulate import simulate

_FOLDER = Path(__file__).parent
#: Share of rows, and of sources that count alike, in the mean of both, that an interval is to hold.
_HELD = 0.89
_STEPS = [number / 20 for number in range(30)]


@dataclass(frozen=True)
class Miss:
    """How a step came out before its source was looked at, in logarithms.

    Attributes:
        longer: Measured over predicted.
        down, up: How far the interval of a source that was looked at reaches.
    """

    source: str
    longer: float
    down: float
    up: float


class LookedAt:
    """Predictor for which every source was looked at."""

    def predict(self, request: StepRequest) -> Prediction:
        """The step's time and memory."""
        return simulate(dataclasses.replace(request, first_reading=False)).prediction


def misses(rows: Path, blind: Mapping[str, float]) -> list[Miss]:
    """Compare what was predicted of a file's rows with what was measured; ``blind``: seconds by row."""
    found, notes = read_rows([rows])
    print(*notes, sep="\n", end="\n" if notes else "", file=sys.stderr)
    outcomes = outcomes_of(found, LookedAt())
    pairs = [*step_pairs(outcomes), *step_pairs(outcomes, "B")]
    return [
        Miss(
            pair.outcome.row.family,
            log(pair.measured / blind[pair.outcome.row.id]),
            log(pair.predicted / pair.low),
            log(pair.high / pair.predicted),
        )
        for pair in pairs
        if pair.outcome.row.id in blind
    ]


def interval_coverage(each: Sequence[Miss], further: tuple[float, float]) -> tuple[float, float, float]:
    """Share of rows and of sources whose steps are in intervals that reach further, and the median ln(high/low)."""
    sides = [(hypot(miss.down, further[0]), hypot(miss.up, further[1])) for miss in each]
    inside = [-down <= miss.longer <= up for miss, (down, up) in zip(each, sides, strict=True)]
    by_source: dict[str, list[bool]] = {}
    for miss, is_in in zip(each, inside, strict=True):
        by_source.setdefault(miss.source, []).append(is_in)
    return mean(inside), mean(mean(group) for group in by_source.values()), median(sum(side) for side in sides)


def chosen(each: Sequence[Miss]) -> tuple[float, float]:
    """Least reach, down and up, that holds enough."""
    enough = (further for further in product(_STEPS, _STEPS) if mean(interval_coverage(each, further)[:2]) >= _HELD)
    return min(enough, key=lambda further: interval_coverage(each, further)[2])


def _words(figures: tuple[float, float, float]) -> str:
    return f"{figures[0]:.0%}, {figures[1]:.0%}, {figures[2]:.2f}"


def _every(groups: Iterable[Sequence[Miss]]) -> list[Miss]:
    return [miss for group in groups for miss in group]


def main() -> None:
    """Print the table."""
    blind: dict[str, dict[str, float]] = {}
    for text in (_FOLDER / "blind_predictions.jsonl").read_text().splitlines():
        row = json.loads(text)
        blind.setdefault(row["file"], {})[row["id"]] = row["step_s"]
    sets = {name: misses(_FOLDER / f"{name}.jsonl", steps) for name, steps in blind.items()}
    print("rows, sources alike, ln(high/low): in the interval of a source that was looked at, that is read for the")
    print("first time, and of the latter as chosen without the set\n")
    print(
        "| set | sources | runs | measured over predicted | looked at | read for the first time | chosen without it |"
    )
    print("|---|---:|---:|---:|---|---|---|")
    for name, each in {**sets, "all": _every(sets.values())}.items():
        others = _every(group for other, group in sets.items() if other != name)
        further = chosen(others)
        counts = f"{len({miss.source for miss in each})} | {len(each)} | {median(m.longer for m in each):+.2f}"
        columns = (
            interval_coverage(each, (0.0, 0.0)),
            interval_coverage(each, FIRST_READING),
            interval_coverage(each, further),
        )
        print(
            f"| {name} | {counts} | {' | '.join(map(_words, columns))} ({further[0]:.2f} down, {further[1]:.2f} up) |"
        )


if __name__ == "__main__":
    main()
