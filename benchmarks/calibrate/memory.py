"""Fit what operations that only move bytes reach of the memory bandwidth, and how kinds of them differ.

    python -m benchmarks.calibrate.memory [--write]

Measurements were made with a cold last level of cache. What that cache saves is an assumption.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.calibrate.tables import replace
from scipy.optimize import least_squares

from lading.catalog.load import load_machine

_ROWS = Path(__file__).with_name("published_memory.jsonl")
#: Simple kernels: what a copy would take.
_PLAIN = ("elementwise.fused", "norm.fused", "copy", "step")
#: What an empty kernel takes between the two events it is timed with: no part of a kernel in a running step.
_EMPTY_S = 4e-6
#: Time over that of a copy where nothing was measured; the shares of catalog/bases/gpu.toml over that of a copy.
_ASSUMED = {"transcendental": 1.04, "reduction": 1.1, "softmax": 1.17, "random": 1.47, "scatter": 2.9, "sort": 17.6}
#: Where an architecture was measured by itself. Blackwell: cross-entropy of Transformer Engine moves its 8 bytes a
#: logit at 0.2795, Megatron's its 52 at 0.3246 of 8.59 TB/s on a B200 (MooreThreads/SimuMax
#: configs/system/b200_bf16_ceperm.json @4dcaae51); here 12 and 60 bytes are counted.
_OWN = {"blackwell": {"softmax": 1.84, "softmax.fused": 1.84}}


def load() -> list[dict[str, Any]]:
    """Measured operations, with the bandwidth of their machine."""
    found = [json.loads(line) for line in _ROWS.read_text(encoding="utf-8").splitlines()]
    for row in found:
        device = load_machine(row["machine"]).device
        assert device.gpu is not None
        row["architecture"] = device.gpu.architecture
        row["bandwidth"] = device.memory_bandwidth_bytes_per_s
    return found


def copy_s(row: dict[str, Any], share: float, fixed_s: float) -> float:
    """Seconds of a copy of as many bytes."""
    return fixed_s + row["bytes"] / (row["bandwidth"] * share)


def fit(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Share of the bandwidth and least time of the simple kernels, those of large rows counted as outliers."""
    start = np.log([0.88, 4e-6])

    def residuals(point: np.ndarray) -> np.ndarray:
        share, fixed_s = np.exp(point)
        off = [np.log(copy_s(row, share, fixed_s) / row["seconds"]) / 0.03 for row in rows]
        return np.array([*off, *((point - start) / np.array([0.05, 0.4]))])

    share, fixed_s = np.exp(least_squares(residuals, start, loss="soft_l1").x)
    return min(0.95, float(share)), float(fixed_s)


def main() -> None:
    """Fit each architecture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the constants into the catalog")
    arguments = parser.parse_args()
    rows = load()
    fitted: dict[str, tuple[float, float]] = {}
    ratios: dict[str, list[float]] = defaultdict(list)
    for architecture in ("ampere", "hopper", "blackwell"):
        own = [row for row in rows if row["architecture"] == architecture]
        plain = [row for row in own if row["class"] in _PLAIN and "group_norm" not in row["label"]]
        # Blackwell has no simple kernels measured: forward norms of rows that fit a block are the nearest.
        plain = plain or [row for row in own if row["class"] == "norm" and row["label"].endswith("x 4096")]
        fitted[architecture] = fit(plain)
        share, fixed_s = fitted[architecture]
        off = np.array([copy_s(row, share, fixed_s) / row["seconds"] - 1 for row in plain])
        print(f"{architecture:10s} share {share:.3f} fixed {fixed_s * 1e6:.1f} us: {len(plain)} rows, "
              f"median error {np.median(np.abs(off)):.3f}, p90 {np.quantile(np.abs(off), 0.9):.3f}")  # fmt: skip
        for row in own:
            if row["class"] not in _PLAIN and row["bytes"] > 6e7:
                ratios[row["class"]].append(row["seconds"] / copy_s(row, share, fixed_s))
    classes = {name: round(float(np.median(values)), 2) for name, values in sorted(ratios.items())}
    for name, values in sorted(ratios.items()):
        print(f"{name:20s} {len(values):3d} rows, over a copy: {min(values):.2f} to {max(values):.2f}")
    classes = {**_ASSUMED, **classes}
    if arguments.write:
        for architecture, (share, fixed_s) in fitted.items():
            values = {
                "share": share,
                "fixed_s": fixed_s - _EMPTY_S,
                "cache_speed": 2.5,
                "cache_share": 0.4,
                "classes": classes,
            }
            own = {**classes, **_OWN.get(architecture, {})}
            replace(architecture, "memory", {**values, "classes": {json.dumps(k): v for k, v in own.items()}})


if __name__ == "__main__":
    main()
