"""What a block's pass costs beside kernels in Megatron's Python: the host's seconds, and what devices wait.

Two fits, each on rows whose id has an even hash, judged on the others: vTrain's single-node rows (small GPTs that the
host bounds), and BLOOM's tuning, where the host waits for each kernel (CUDA_LAUNCH_BLOCKING) and ranks therefore come
to their collectives far apart. A launch is held at 8 us, as it cannot be told from a pass: all rows have the same
kernels.

    python benchmarks/calibrate/host.py [--write]
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares
from tools.validate.requests import request_of
from tools.validate.rows import Row, read_rows

from lading.ir.request import StepRequest
from lading.sim.simulate import Priced, priced, simulate

FOLDER = Path(__file__).parents[1] / "validation"
STACKS = Path(__file__).parents[2] / "src" / "lading" / "catalog" / "stacks"
_ROWS = 120


@dataclasses.dataclass(frozen=True)
class Fit:
    """A fit: rows of a file and family, settings with where they start in seconds, and the stacks they are for."""

    file: str
    family: str
    settings: dict[str, float]
    stacks: tuple[str, ...]


FITS = (
    Fit("measurements_vtrain_single_node.jsonl", "vtrain-single", {"block_s": 6e-4},
        ("megatron-deepspeed-traced", "megatron-deepspeed", "megatron-deepspeed-bigscience")),
    Fit("measurements_vtrain_single_node.jsonl", "vtrain-single", {"block_wait_s": 3e-4, "collective_wait_s": 2e-4},
        ("megatron-deepspeed-traced",)),
    Fit("measurements.jsonl", "bloom-tuning", {"collective_wait_s": 2e-4}, ("megatron-deepspeed-bigscience",)),
)  # fmt: skip

Known = tuple[StepRequest, Priced, float]


def is_even(row: Row) -> bool:
    """Whether a row's id has an even hash: a fixed half of the rows."""
    return hashlib.sha256(row.id.encode()).digest()[0] % 2 == 0


def known(rows: list[Row]) -> list[Known]:
    """Priced requests with what was measured, without factors fitted on whole steps."""
    found: list[Known] = []
    for row in rows:
        request = request_of(row)
        request = dataclasses.replace(request, stack=dataclasses.replace(request.stack, in_situ={}))
        assert row.step_s is not None
        if row.family == "bloom-tuning" and not request.stack.launch_blocking:
            continue
        found.append((request, priced(request), row.step_s))
    return found


def logs(rows: list[Known], names: Iterable[str], settings: np.ndarray) -> np.ndarray:
    """Logarithms of predicted over measured."""
    named = dict(zip(names, map(float, settings), strict=True))
    found: list[float] = []
    for request, parts, measured in rows:
        stack = dataclasses.replace(request.stack, **named)
        found.append(simulate(dataclasses.replace(request, stack=stack), parts=parts).step.step_s / measured)
    return np.log(found)


def fitted(rows: list[Known], settings: dict[str, float]) -> np.ndarray:
    """Settings of least log errors, large ones counted linearly."""
    start = np.array(list(settings.values()))
    best = least_squares(
        lambda scale: logs(rows, settings, start * scale) / 0.05, np.ones(len(start)), loss="soft_l1",
        diff_step=0.02, bounds=(0, 10),
    )  # fmt: skip
    return np.array(best.x * start)


def write(stack: str, name: str, value: float) -> None:
    """Put a setting into a stack's file."""
    path = STACKS / f"{stack}.toml"
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(rf"(?m)^{name} = [\d.e-]+$", f"{name} = {value:.3g}", text), encoding="utf-8")


def main() -> None:
    """Fit on one half, print the error on both; what shares a file is fitted together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the settings into the catalog's stacks")
    options = parser.parse_args()
    for family in dict.fromkeys(fit.family for fit in FITS):
        fits = [fit for fit in FITS if fit.family == family]
        rows = [r for r in read_rows([FOLDER / fits[0].file])[0] if r.family == family and r.tier == "A" and r.step_s]
        halves = [[r for r in rows if is_even(r)], [r for r in rows if not is_even(r)]]
        even, odd = (known(half[:: max(1, len(half) // _ROWS)]) for half in halves)
        settings = {name: value for fit in fits for name, value in fit.settings.items()}
        best = fitted(even, settings)
        for name, value in zip(settings, best, strict=True):
            stacks = [stack for fit in fits if name in fit.settings for stack in fit.stacks]
            print(f"{name} = {value:.3g}: {', '.join(stacks)}")
            for stack in stacks if options.write else ():
                write(stack, name, value)
        for title, half in (("fitted", even), ("kept back", odd)):
            off = np.exp(logs(half, settings, best)) - 1
            print(f"{family}, {title}: {np.mean(np.abs(off)):.1%} of {len(off)} rows, bias {np.mean(off):+.1%}")


if __name__ == "__main__":
    main()
