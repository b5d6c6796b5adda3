"""What is left of each software stack: how much longer its kernels take in a running step than the same kernels alone.

    python benchmarks/calibrate/stacks.py benchmarks/validation/*.jsonl            prints the factors
    python benchmarks/calibrate/stacks.py benchmarks/validation/*.jsonl --write    and writes them into the stacks

Everything else is fitted on micro-measurements; this is the only fit on whole steps. For each stack and architecture
there are four factors, of products in 16 bits and below, attention and memory-bound kernels, held to their common
factor by a ridge, and that by another to what all other stacks let expect (``tools.validate.shrinkage``): a stack
with few rows keeps to that. What is to be expected of a stack never seen goes into the default, whose factors hold
wherever a stack has none. Rows of tier A, newest of equal configurations; a row counts less the more rows its source
has. Beside the factors stands how wide errors spread.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tools.validate import rows as validated
from tools.validate.requests import request_of
from tools.validate.rows import read_rows
from tools.validate.scoring import Outcome, newest
from tools.validate.shrinkage import Cell, expected

from lading.catalog.load import load_machine
from lading.catalog.stacks import DEFAULT
from lading.errors import LadingError
from lading.ir.request import StepRequest
from lading.sim.parts import ATTENTION, LOW, MEMORY, PRODUCTS
from lading.sim.simulate import Priced, priced, simulate

CAUSES = (PRODUCTS, LOW, ATTENTION, MEMORY)
STACKS = Path(__file__).parents[2] / "src" / "lading" / "catalog" / "stacks"
#: Ridges, in rows: how many rows a departure of one is worth, of the common factor and of a cause from it.
COMMON, APART = 3.0, 20.0
_ROUNDS, _PROBE, _WORST = 4, 0.05, 0.12
#: Spread of a stack: at the quantile, a little more as these rows were fitted, and as if so many rows had another.
_WITHIN, _FITTED, _OTHER_ROWS, _OTHER = 0.9, 1.1, 10, 0.15


@dataclasses.dataclass
class Row:
    """A measured step and what is asked for it."""

    request: StepRequest
    measured_s: float
    architecture: str
    parts: Priced
    source: str
    weight: float = 1.0


def rows_of(files: list[Path], most: int) -> list[Row]:
    """Rows that can be simulated; of a source with more than ``most`` every so manieth."""
    families: dict[str, list[validated.Row]] = defaultdict(list)
    for outcome in newest(Outcome(row) for row in read_rows(files)[0] if row.tier == "A" and row.step_s):
        families[outcome.row.family].append(outcome.row)
    kept: list[Row] = []
    for group in families.values():
        thinned = [found for row in group[:: max(1, len(group) // most)] if (found := _known(row))]
        for row in thinned:
            row.weight = 1 / len(thinned) ** 0.5
        kept += thinned
    return kept


def _known(row: validated.Row) -> Row | None:
    """A row with its request, priced; None if it cannot be simulated."""
    assert row.step_s is not None
    try:
        request = request_of(row)
        parts = priced(request)
        simulate(request, parts=parts)
    except LadingError:
        return None
    gpu = load_machine(request.machine).device.gpu
    return Row(request, row.step_s, gpu.architecture if gpu else "", parts, row.family)


def predicted(row: Row, factors: np.ndarray) -> float:
    """Seconds with these factors."""
    names = {f"{row.architecture}.{cause}": float(f) for cause, f in zip(CAUSES, factors, strict=True)}
    stack = dataclasses.replace(row.request.stack, in_situ={**row.request.stack.in_situ, **names})
    return simulate(dataclasses.replace(row.request, stack=stack), parts=row.parts).step.step_s


def fitted(rows: list[Row], center: float) -> np.ndarray:
    """Factors of ``CAUSES``: damped Gauss-Newton on logarithms, outliers held.

    Args:
        center: Logarithm of the factor that the common one is drawn to.
    """
    factors = np.full(len(CAUSES), np.exp(center))
    for _ in range(_ROUNDS):
        logs, slopes, weights = [], [], []
        for row in rows:
            base = predicted(row, factors)
            moved = [
                predicted(row, factors * np.where(np.arange(len(CAUSES)) == i, 1 + _PROBE, 1.0))
                for i in range(len(CAUSES))
            ]
            error = float(np.log(base / row.measured_s))
            logs.append(error)
            slopes.append([float(np.log(m / base)) / np.log(1 + _PROBE) for m in moved])
            weights.append(row.weight * min(1.0, _WORST / max(abs(error), 1e-9)))
        mean = float(np.mean(weights))
        logs += [COMMON * mean * 0.3 * (float(np.mean(np.log(factors))) - center)]
        slopes += [[COMMON * mean * 0.3 / len(CAUSES)] * len(CAUSES)]
        weights += [1.0]
        for i in range(len(CAUSES)):
            apart = np.full(len(CAUSES), -1 / len(CAUSES)) + np.where(np.arange(len(CAUSES)) == i, 1.0, 0.0)
            logs.append(APART * mean * 0.1 * float(apart @ np.log(factors)))
            slopes.append(list(APART * mean * 0.1 * apart))
            weights.append(1.0)
        scale = np.array(weights) ** 0.5
        move, *_ = np.linalg.lstsq(np.array(slopes) * scale[:, None], -np.array(logs) * scale, rcond=None)
        factors = factors * np.exp(np.clip(move, -0.3, 0.3))
    return factors


def cells_of(rows: Iterable[Row]) -> list[Cell]:
    """How far rows are off without factors, by source, stack and architecture."""
    groups: dict[Cell, list[float]] = defaultdict(list)
    for row in rows:
        cell = Cell(row.source, row.request.stack.name, row.architecture)
        groups[cell].append(float(np.log(row.measured_s / predicted(row, np.ones(len(CAUSES))))))
    return [dataclasses.replace(c, median=float(np.median(found)), rows=len(found)) for c, found in groups.items()]


def spread_of(errors: list[float]) -> float:
    """Half width of the interval that holds nine of ten errors."""
    own, rows = _FITTED * float(np.quantile(np.abs(errors), _WITHIN)), len(errors)
    return (rows * own + _OTHER_ROWS * _OTHER) / (rows + _OTHER_ROWS)


def fit_group(stack: str, architecture: str, rows: list[Row], cells: list[Cell]) -> tuple[np.ndarray, float]:
    """Factors of a stack on an architecture, printed with what they do to its errors, and the spread of these."""
    others = [cell for cell in cells if (cell.stack, cell.architecture) != (stack, architecture)]
    center = expected(others, Cell("", stack, architecture))
    found = fitted(rows, center)
    before = [predicted(row, np.ones(len(CAUSES))) / row.measured_s - 1 for row in rows]
    after = [predicted(row, found) / row.measured_s - 1 for row in rows]
    spread = spread_of([row.measured_s / predicted(row, found) - 1 for row in rows])
    print(
        f"{stack}, {architecture}, {len(rows)}: {', '.join(f'{f:.3f}' for f in found)}; expected "
        f"{np.exp(center):.3f}; {_mean(before):.1%}, {_mean(after):.1%} ({statistics.mean(after):+.1%}) +-{spread:.1%}",
        flush=True,
    )
    return found, spread


def main() -> None:
    """Fit each stack and architecture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="write the factors into the catalog's stacks")
    parser.add_argument("--most", type=int, default=40, help="rows of a source and stack at most")
    parser.add_argument("--only", default="", help="fit stacks whose names match this regular expression")
    options = parser.parse_args()
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows_of(options.files, options.most):
        clean = dataclasses.replace(row.request.stack, in_situ={})
        row.request = dataclasses.replace(row.request, stack=clean)
        groups[row.request.stack.name, row.architecture].append(row)
    cells = cells_of(row for rows in groups.values() for row in rows)
    tables: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: {"in_situ": {}, "spread": {}})
    print(
        f"stack, architecture, rows: {', '.join(CAUSES)}; expected; mean absolute error before, after (bias) +-spread"
    )
    for (stack, architecture), rows in sorted(groups.items()):
        if not re.search(options.only, stack):
            continue
        found, spread = fit_group(stack, architecture, rows, cells)
        tables[stack]["in_situ"] |= _named(architecture, found)
        tables[stack]["spread"][architecture] = round(spread, 3)
    tables[DEFAULT] = {"in_situ": {}}
    for architecture in sorted({cell.architecture for cell in cells}):
        factor = float(np.exp(expected(cells, Cell("", "", architecture))))
        print(f"a stack never seen, {architecture}: {factor:.3f}")
        tables[DEFAULT]["in_situ"] |= _named(architecture, np.full(len(CAUSES), factor))
    for stack, values in tables.items() if options.write else ():
        write(STACKS / f"{stack}.toml", values)


def _named(architecture: str, factors: np.ndarray) -> dict[str, float]:
    return {f"{architecture}.{cause}": round(float(f), 3) for cause, f in zip(CAUSES, factors, strict=True)}


def _mean(errors: list[float]) -> float:
    return statistics.mean(map(abs, errors))


def write(path: Path, tables: dict[str, dict[str, float]]) -> None:
    """Put tables into a stack's file, in place of those that are there."""
    text = path.read_text(encoding="utf-8")
    for name, values in tables.items():
        text = re.sub(rf"\n\[{name}\][^\[]*", "\n", text)
        lines = "\n".join(f'"{key}" = {value}' for key, value in sorted(values.items()))
        source = "# benchmarks/calibrate/stacks.py, on whole steps of benchmarks/validation"
        text = text.rstrip("\n") + f"\n\n[{name}]  {source}\n{lines}\n"
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
