"""Share of the fp32 peak that decompositions of symmetric matrices reach on this CPU, by their rows.

    python benchmarks/calibrate/eigen.py

Prints what ``lading.cost.matrix_updates`` takes beside it; 9 n^3 FLOP each, processor time of one thread, best of five.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lading.cost.matrix_updates import eigen_share
from lading.ir.machine import Device

_ROUNDS, _SECONDS = 5, 0.3


def _seconds(call: Callable[[], object]) -> float:
    """Processor seconds of a call, the best of several rounds."""
    best = float("inf")
    for _ in range(_ROUNDS):
        count, start = 0, time.process_time()
        while time.process_time() - start < _SECONDS:
            call()
            count += 1
        best = min(best, (time.process_time() - start) / count)
    return best


def main() -> None:
    """Measure, and print beside what is assumed."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    square = torch.randn(1024, 1024, generator=generator)
    peak = 2 * 1024**3 / _seconds(lambda: square @ square)
    here = Device(
        name="here", kind="cpu", memory_bytes=1, memory_bandwidth_bytes_per_s=1.0, op_overhead_s=0.0,
        peak_flops_per_s={"float32": peak}, optimizer_elements_per_s=1.0,
    )  # fmt: skip
    print(f"float32 products of 1024 rows: {peak / 1e9:.1f} GFLOP/s")
    for rows in (64, 128, 256, 512, 1024):
        factor = torch.randn(rows, rows, generator=generator)
        factor = factor @ factor.T
        seconds = _seconds(lambda factor=factor: torch.linalg.eigh(factor))
        share = 9 * rows**3 / seconds / peak
        print(f"{rows:5} rows: {seconds * 1e3:8.2f} ms, share {share:.2f}, taken {eigen_share(rows, here):.2f}")


if __name__ == "__main__":
    main()
