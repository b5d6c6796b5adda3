"""What is left of each software stack: how much longer its kernels take in a running step than the same kernels alone.

    python benchmarks/calibrate/stacks.py benchmarks/validation/*.jsonl            prints the factors
    python benchmarks/calibrate/stacks.py benchmarks/validation/*.jsonl --write    and writes them into the stacks

Everything else is fitted on micro-measurements; this is the only fit on whole steps. For each stack and architecture
there are four factors, of products in 16 bits and below, attention and memory-bound kernels, held to their common
factor by a ridge, and that to 1 by another: a stack with few rows keeps to 1. Rows of tier A, newest of equal
configurations; a row counts less the more rows its source has.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np

from lading.catalog.load import load_machine
from lading.errors import LadingError
from lading.ir.request import Request
from lading.sim.parts import ATTENTION, LOW, MEMORY, PRODUCTS
from lading.sim.simulate import Priced, priced, simulate
from lading.validate.requests import request_of
from lading.validate.rows import read_rows
from lading.validate.scoring import Outcome, newest

CAUSES = (PRODUCTS, LOW, ATTENTION, MEMORY)
STACKS = Path(__file__).parents[2] / "src" / "lading" / "catalog" / "stacks"
#: Ridges, in rows: how many rows a departure of one is worth, of the common factor and of a cause from it.
COMMON, APART = 3.0, 20.0
_ROUNDS, _PROBE, _WORST = 4, 0.05, 0.12


@dataclasses.dataclass
class Row:
    """A measured step and what is asked for it."""

    request: Request
    measured_s: float
    architecture: str
    parts: Priced
    weight: float = 1.0


def rows_of(files: list[Path], most: int, only: str = "") -> list[Row]:
    """Rows that can be simulated, of stacks matching ``only``; of a source with more than ``most`` every so manieth."""
    found: dict[str, list[Row]] = defaultdict(list)
    rows, _ = read_rows(files)
    for row in (outcome.row for outcome in newest(Outcome(row) for row in rows if row.tier == "A" and row.step_s)):
        assert row.step_s is not None
        try:
            request = request_of(row)
            if not re.search(only, request.stack.name):
                continue
            parts = priced(request)
            simulate(request, parts=parts)
        except LadingError:
            continue
        gpu = load_machine(request.machine).device.gpu
        found[row.family].append(Row(request, row.step_s, gpu.architecture if gpu else "", parts))
    kept: list[Row] = []
    for group in found.values():
        thinned = group[:: max(1, len(group) // most)]
        for row in thinned:
            row.weight = 1 / len(thinned) ** 0.5
        kept += thinned
    return kept


def predicted(row: Row, factors: np.ndarray) -> float:
    """Seconds with these factors."""
    names = {f"{row.architecture}.{cause}": float(f) for cause, f in zip(CAUSES, factors, strict=True)}
    stack = dataclasses.replace(row.request.stack, in_situ={**row.request.stack.in_situ, **names})
    return simulate(dataclasses.replace(row.request, stack=stack), parts=row.parts).step.step_s


def fitted(rows: list[Row]) -> np.ndarray:
    """Factors of ``CAUSES``: damped Gauss-Newton on logarithms, outliers held."""
    factors = np.ones(len(CAUSES))
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
        logs += [COMMON * mean * 0.3 * float(np.mean(np.log(factors)))]
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


def main() -> None:
    """Fit each stack and architecture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="write the factors into the catalog's stacks")
    parser.add_argument("--most", type=int, default=40, help="rows of a source and stack at most")
    parser.add_argument("--only", default="", help="fit stacks whose names match this regular expression")
    options = parser.parse_args()
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows_of(options.files, options.most, options.only):
        clean = dataclasses.replace(row.request.stack, in_situ={})
        row.request = dataclasses.replace(row.request, stack=clean)
        groups[row.request.stack.name, row.architecture].append(row)
    factors: dict[str, dict[str, float]] = defaultdict(dict)
    print(f"stack, architecture, rows: {', '.join(CAUSES)}; mean absolute error before, after (bias)")
    for (stack, architecture), rows in sorted(groups.items()):
        found = fitted(rows)
        before = [predicted(row, np.ones(len(CAUSES))) / row.measured_s - 1 for row in rows]
        after = [predicted(row, found) / row.measured_s - 1 for row in rows]
        print(
            f"{stack}, {architecture}, {len(rows)}: {', '.join(f'{f:.3f}' for f in found)}; "
            f"{_mean(before):.1%}, {_mean(after):.1%} ({statistics.mean(after):+.1%})",
            flush=True,
        )
        for cause, factor in zip(CAUSES, found, strict=True):
            factors[stack][f"{architecture}.{cause}"] = round(float(factor), 3)
    if options.write:
        for stack, table in factors.items():
            write(STACKS / f"{stack}.toml", table)


def _mean(errors: list[float]) -> float:
    return statistics.mean(map(abs, errors))


def write(path: Path, table: dict[str, float]) -> None:
    """Put the factors into a stack's file, in place of those that are there."""
    text = re.sub(r"\n\[in_situ\][^\[]*", "\n", path.read_text())
    lines = "\n".join(f'"{key}" = {value}' for key, value in sorted(table.items()))
    source = "# benchmarks/calibrate/stacks.py, on whole steps of benchmarks/validation"
    path.write_text(text.rstrip("\n") + f"\n\n[in_situ]  {source}\n{lines}\n")


if __name__ == "__main__":
    main()
