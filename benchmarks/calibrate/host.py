"""Host seconds of a launch and of a block's pass in Megatron's Python, on small models that wait for the host.

vTrain's single-node rows (small GPTs, Megatron-DeepSpeed, full recompute): fitted on ids of an even hash,
judged on the others.

    python benchmarks/calibrate/host.py
"""

from __future__ import annotations

import dataclasses
import hashlib
from itertools import product
from pathlib import Path

import numpy as np

from lading.errors import LadingError
from lading.sim.simulate import simulate
from lading.validate.requests import request_of
from lading.validate.rows import Row, read_rows

FILE = Path(__file__).parents[1] / "validation" / "measurements_vtrain_single_node.jsonl"
LAUNCHES_S = (4e-6, 8e-6, 1.2e-5, 1.6e-5, 2e-5)
BLOCKS_S = (5e-4, 6e-4, 7e-4, 8e-4)


def is_even(row: Row) -> bool:
    """By the hash of its id: a fixed half."""
    return hashlib.sha256(row.id.encode()).digest()[0] % 2 == 0


def errors(rows: list[Row], launch_s: float, block_s: float) -> np.ndarray:
    """Signed errors of the rows."""
    found: list[float] = []
    for row in rows:
        request = request_of(row)
        stack = dataclasses.replace(request.stack, launch_s=launch_s, block_s=block_s)
        try:
            predicted = simulate(dataclasses.replace(request, stack=stack)).step.step_s
        except LadingError as error:
            print(f"{row.id} is left out: {error}")
            continue
        assert row.step_s is not None
        found.append(predicted / row.step_s - 1)
    return np.array(found)


def main() -> None:
    """Print the error of each pair, the best pair, and its error on the rows kept back."""
    rows = read_rows([FILE])[0]
    fitted, kept = [r for r in rows if is_even(r)], [r for r in rows if not is_even(r)]
    sample = fitted[:: max(1, len(fitted) // 60)]
    scores = {pair: float(np.mean(np.abs(errors(sample, *pair)))) for pair in product(LAUNCHES_S, BLOCKS_S)}
    for (launch_s, block_s), score in sorted(scores.items(), key=lambda item: item[1])[:8]:
        print(f"launch {launch_s * 1e6:.0f} us, pass {block_s * 1e6:.0f} us: {score:.1%} on {len(sample)} rows")
    best = min(scores, key=lambda pair: scores[pair])
    judged = errors(kept[::3], *best)
    print(f"kept back: {np.mean(np.abs(judged)):.1%} of {len(judged)} rows, bias {np.mean(judged):+.1%}")


if __name__ == "__main__":
    main()
