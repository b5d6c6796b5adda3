"""What no cause explains: how much longer kernels take in a running step than the same kernels alone.

    python benchmarks/calibrate/stacks.py benchmarks/validation/*.jsonl            prints the factors
    python benchmarks/calibrate/stacks.py benchmarks/validation/*.jsonl --write    and writes them into the stacks

Everything else is fitted on micro-measurements; this is the only fit on whole steps. Each architecture has one factor,
which holds for software that was not seen, and each stack seen on it one that is drawn to that
(``tools.validate.shrinkage``): a stack with few rows keeps to what the others let expect. Kinds of kernels have factors
that are drawn to their stack's (``benchmarks.calibrate.causes``). Rows of tier A, newest of equal configurations.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.calibrate.causes import cause_factors, with_causes
from tools.validate.protocols import cells_of
from tools.validate.rows import read_rows
from tools.validate.scoring import Pair, Simulator, outcomes_of, step_pairs
from tools.validate.shrinkage import Cell, expected

from lading.catalog.load import load_machine
from lading.catalog.stacks import DEFAULT

STACKS = Path(__file__).parents[2] / "src" / "lading" / "catalog" / "stacks"


def pairs_of(files: Sequence[Path]) -> dict[tuple[str, str], list[Pair]]:
    """Steps measured and predicted without factors, by stack and architecture; those of no known kernels left out."""
    groups: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in step_pairs(outcomes_of(read_rows(files)[0], Simulator(), fitted=False)):
        request = pair.outcome.request
        assert request is not None
        gpu = load_machine(request.machine).device.gpu
        if gpu is not None and request.stack.framework:
            groups[request.stack.name, gpu.architecture].append(pair)
    return groups


def main() -> None:
    """Fit each architecture, and each stack on it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="write the factors into the catalog's stacks")
    options = parser.parse_args()
    groups = pairs_of(options.files)
    cells = cells_of(pair for pairs in groups.values() for pair in pairs)
    tables: dict[str, dict[str, float]] = defaultdict(dict)
    print("stack, architecture, rows: factor; mean absolute error without and with it (bias with it)")
    for (stack, architecture), pairs in sorted(groups.items()):
        factor = math.exp(expected(cells, Cell("", stack, architecture)))
        kinds = cause_factors(pairs, factor)
        tables[stack][architecture] = round(factor, 3)
        tables[stack] |= {f'"{architecture}.{kind}"': round(own, 3) for kind, own in kinds.items()}
        before = [pair.error for pair in pairs]
        after = [pair.predicted * with_causes(pair, factor, kinds) / pair.measured - 1 for pair in pairs]
        said = ", ".join(f"{kind} {own:.3f}" for kind, own in kinds.items())
        print(
            f"{stack}, {architecture}, {len(pairs)}: {factor:.3f} ({said}); {_mean(before):.1%}, {_mean(after):.1%} "
            f"({statistics.mean(after):+.1%})"
        )
    seen = {stack: sorted(key for key in table if "." not in key) for stack, table in tables.items()}
    for architecture in sorted({cell.architecture for cell in cells}):
        factor = math.exp(expected(cells, Cell("", "", architecture)))
        print(f"software that was not seen, {architecture}: {factor:.3f}")
        tables[DEFAULT][architecture] = round(factor, 3)
    for stack, table in tables.items() if options.write else ():
        write(STACKS / f"{stack}.toml", table, seen.get(stack, []))


def _mean(errors: Sequence[float]) -> float:
    return statistics.mean(map(abs, errors))


def write(path: Path, factors: dict[str, float], seen: Sequence[str]) -> None:
    """Put factors into a stack's file, in place of those that are there, and where its steps were seen."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"\n\[in_situ\][^\[]*", "\n", text)
    text = re.sub(r"(?m)^fitted = .*\n", "", text)
    if seen:
        names = ", ".join(f'"{name}"' for name in seen)
        text = re.sub(r"(?m)^(framework = .*)$", rf"\1\nfitted = [{names}]", text, count=1)
    lines = "\n".join(f"{name} = {factor}" for name, factor in sorted(factors.items()))
    source = "# benchmarks/calibrate/stacks.py, on whole steps of benchmarks/validation"
    path.write_text(f"{text.rstrip()}\n\n[in_situ]  {source}\n{lines}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
