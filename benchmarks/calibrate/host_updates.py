"""Elements a second that AdamW updates on a host, by implementation, number formats and threads.

    python benchmarks/calibrate/host_updates.py --threads 1 2 --out benchmarks/calibrate/results/host_updates_HOST.json

Each update is over ``ELEMENTS`` elements in ``TENSORS`` tensors, far beyond the caches, of torch's AdamW: one fused
kernel, its operations over lists of tensors ("foreach"), or one after another ("loop"). Beside it a copy says what the
memory allows with as many threads, so that a share of it can be told: bytes that the update must move (values and
moments read and written, gradients read) a second, over bytes that the copy moves. The median of ``REPEATS`` counts,
after two updates to warm up.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

ELEMENTS, TENSORS, REPEATS = 40_000_000, 20, 7
#: Number formats of parameters, gradients and moments (torch keeps them in the parameters' own).
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False, "fused": False},
}


def timed(work: Callable[[], object]) -> float:
    """Median seconds of a piece of work, after two times to warm up."""
    seconds: list[float] = []
    for _ in range(REPEATS + 2):
        start = perf_counter()
        work()
        seconds.append(perf_counter() - start)
    return median(seconds[2:])


def copy_rate() -> float:
    """Bytes a second, read and written ones together, of copying a large tensor."""
    source = torch.ones(2 * ELEMENTS)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source))


def update_rate(dtype: torch.dtype, settings: dict[str, bool]) -> float:
    """Elements a second that AdamW updates."""
    parameters = [torch.nn.Parameter(torch.ones(ELEMENTS // TENSORS, dtype=dtype)) for _ in range(TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    return ELEMENTS / timed(torch.optim.AdamW(parameters, **settings).step)


def main() -> None:
    """Measure every implementation with every number of threads, print a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        memory = copy_rate()
        for name, dtype in FORMATS.items():
            moved = 7 * dtype.itemsize
            for implementation, settings in IMPLEMENTATIONS.items():
                rate = update_rate(dtype, settings)
                row = {"threads": threads, "format": name, "implementation": implementation, "elements_per_s": rate}
                row |= {"bytes_per_element": moved, "copy_bytes_per_s": memory, "share": rate * moved / memory}
                rows.append(row)
                print(
                    f"{threads} {name:9} {implementation:8} {rate / 1e6:8.0f} M/s  {row['share']:.2f} of a copy",
                    flush=True,
                )
    if arguments.out:
        arguments.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
