"""Fit how much longer products take where rows start at multiples of few bytes.

python -m benchmarks.calibrate.unaligned [--write]

The factors are those of ``ProductRates.unaligned``, on top of the constants that were fitted on aligned shapes; errors
of every second shape are printed under factors of the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.calibrate.tables import replace
from scipy.optimize import least_squares

from lading.catalog.kernel_rates import ProductRates, kernel_rates
from lading.catalog.load import load_machine
from lading.cost import product as model
from lading.ir.machine import Device
from lading.ir.work import Product

DATA = Path(__file__).parent / "published_unaligned.json"
#: Multiples of bytes at which rows start: 2, of 4 and 8 together (they take equally long), 16.
_START = (3.0, 1.6, 1.1)


def shapes() -> list[tuple[Product, float]]:
    """Measured products and their seconds."""
    rows: list[dict[str, Any]] = json.loads(DATA.read_text(encoding="utf-8"))["rows"]
    found: list[tuple[Product, float]] = []
    for row in rows:
        product = Product(row["m"], row["n"], row["k"], row["groups"])
        found.append((product, product.flops / (row["tflops"] * 1e12)))
    return found


def predicted(product: Product, rates: ProductRates, device: Device) -> float:
    """Seconds in fp16 on a cool device, which the A100's power never limits."""
    assert device.gpu is not None
    slow = model.unaligned(product, 2.0, rates)
    peak = model.peak_flops(device, "float16") * device.gpu.speed / slow
    return model.seconds(product, (2.0, 2.0), peak, device.memory_bandwidth_bytes_per_s, device.gpu.num_sms, rates)


def fit(found: Sequence[tuple[Product, float]], rates: ProductRates, device: Device) -> ProductRates:
    """Least squares of log ratios, large ones counted linearly.

    How far batched products are off at any alignment is a constant of its own, which is not kept.
    """

    def of(point: np.ndarray) -> ProductRates:
        two, four, sixteen = (max(1.0, float(np.exp(value))) for value in point[:3])
        return dataclasses.replace(rates, unaligned=(two, four, four, sixteen))

    def residuals(point: np.ndarray) -> np.ndarray:
        fitted, batched = of(point), point[3]
        return np.array(
            [(np.log(predicted(p, fitted, device) / s) + batched * (p.groups > 1)) / 0.05 for p, s in found]
        )

    return of(least_squares(residuals, [*np.log(_START), 0.1], loss="soft_l1", diff_step=1e-3).x)


def errors(found: Sequence[tuple[Product, float]], rates: ProductRates, device: Device) -> np.ndarray:
    """Relative errors, signed."""
    return np.array([predicted(product, rates, device) / seconds - 1 for product, seconds in found])


def main() -> None:
    """Fit the A100's, and say what shapes left out make of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the factors into the catalog")
    arguments = parser.parse_args()
    device, found = load_machine("a100").device, shapes()
    before = dataclasses.replace(kernel_rates("ampere").product, unaligned=())
    rates = fit(found, before, device)
    halves = [errors(found[i::2], fit(found[1 - i :: 2], before, device), device) for i in (0, 1)]
    for name, off in (
        ("without", errors(found, before, device)), ("fitted", errors(found, rates, device)),
        ("left out", np.concatenate(halves)),
    ):  # fmt: skip
        off_abs = np.abs(off)
        print(f"{name:9s} {len(off)} shapes, median {np.median(off_abs):.3f}, p90 {np.quantile(off_abs, 0.9):.3f}")
    print("times as long at multiples of 2, 4, 8, 16 bytes:", ", ".join(f"{f:.3f}" for f in rates.unaligned))
    if arguments.write:
        replace("ampere", "product", dataclasses.asdict(rates))


if __name__ == "__main__":
    main()
