"""Fit the constants of matrix products to measured shapes, and say how well shapes left out of the fit are predicted.

python -m benchmarks.calibrate.products [--write]
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from benchmarks.calibrate.tables import replace, rows
from scipy.optimize import least_squares

from lading.catalog.kernel_rates import ProductRates, kernel_rates
from lading.catalog.load import load_machine
from lading.cost import product as model
from lading.ir.machine import Device
from lading.ir.work import Product

#: Products shorter than this run at full clock when measured one hundred times in a row after an idle pause.
_BURST_S = 250e-6
#: Constant, what it should be about, and how far off (a factor, in logarithms) is no surprise.
_PRIORS: dict[str, tuple[float, float]] = {
    "reach": (0.85, 0.1),
    "operand_columns": (16.0, 0.5),
    "wave_share": (0.5, 0.5),
    "prologue_k": (64.0, 0.7),
    "epilogue_share": (0.3, 0.5),
    "memory_share": (0.85, 0.1),
    "fixed_s": (4e-6, 0.5),
    "joule": (1.15e12, 0.2),
}
_TILES = {
    "ampere": ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64)),
    "blackwell": ((256, 256), (256, 192), (192, 256), (256, 128), (128, 256), (128, 128), (256, 64), (64, 256),
                  (128, 64), (64, 128)),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Shape:
    """A measured product."""

    product: Product
    out_bytes: float
    seconds: float


def shapes(hardware: str) -> list[Shape]:
    """Measured single products in bfloat16."""
    found: list[Shape] = []
    for row in rows("matmul", hardware):
        text = row["shape"]
        product = Product(
            m=int(text["m"]), n=int(text["n"]), k=int(text["k"]), accumulates=text["accumulate"] == "True"
        )
        seconds = product.flops / (row["achieved_tflops"] * 1e12)
        found.append(Shape(product, 4.0 if text["out_dtype"] == "fp32" else 2.0, seconds))
    return found


def rates_of(values: Sequence[float], architecture: str) -> ProductRates:
    """Constants as data."""
    named = dict(zip(_PRIORS, (float(v) for v in values), strict=True))
    joule = named.pop("joule")
    return ProductRates(
        tiles=_TILES[architecture],
        group_s=0.0,
        group_reach=1.0,
        flops_per_joule={"bfloat16": joule} if architecture != "ampere" else {},
        **named,
    )


def predicted(shape: Shape, rates: ProductRates, device: Device) -> float:
    """Seconds as measured: at the power limit as far as the product is long."""
    assert device.gpu is not None
    peak = model.peak_flops(device, "bfloat16") * device.gpu.speed
    joule = rates.flops_per_joule.get("bfloat16")
    slow = max(1.0, peak * rates.reach / (joule * device.gpu.power_w)) if joule else 1.0
    share = 1 / (1 + (_BURST_S / shape.seconds) ** 2)
    bytes_ = (2.0, shape.out_bytes)
    return on(device, shape.product, bytes_, peak / (1 + share * (slow - 1)), rates)


def on(device: Device, product: Product, element_bytes: tuple[float, float], peak: float, rates: ProductRates) -> float:
    """Seconds under rates that are being fitted."""
    assert device.gpu is not None
    bandwidth = device.memory_bandwidth_bytes_per_s
    return model.seconds(product, element_bytes, peak, bandwidth, device.gpu.num_sms, rates)


def fit(found: Sequence[Shape], device: Device, architecture: str) -> ProductRates:
    """Least squares of log ratios, large ones counted linearly, drawn to the priors."""
    start = np.log([value for value, _ in _PRIORS.values()])
    width = np.array([sigma for _, sigma in _PRIORS.values()])

    def residuals(point: np.ndarray) -> np.ndarray:
        rates = rates_of(np.exp(point), architecture)
        ratios = [np.log(predicted(shape, rates, device) / shape.seconds) / 0.03 for shape in found]
        return np.array([*ratios, *((point - start) / width)])

    upper = np.log([1.0 if name.endswith(("share", "reach")) else np.inf for name in _PRIORS])
    bounds = (np.full(len(start), -np.inf), np.where(upper > start, upper + 1e-9, np.inf))
    best = least_squares(residuals, start, bounds=bounds, loss="soft_l1", diff_step=1e-3)
    return rates_of(np.exp(best.x), architecture)


def errors(found: Sequence[Shape], rates: ProductRates, device: Device) -> np.ndarray:
    """Relative errors, signed."""
    return np.array([predicted(shape, rates, device) / shape.seconds - 1 for shape in found])


def report(name: str, found: Sequence[Shape], off: np.ndarray) -> None:
    """Print errors, all and by how long the product is."""
    seconds = np.array([shape.seconds for shape in found])
    for low, high in ((0.0, 1.0), (0.0, 1e-4), (1e-4, 1e-3), (1e-3, 1.0)):
        chosen = np.abs(off[(seconds > low) & (seconds <= high)])
        if chosen.size:
            print(
                f"{name:34s} {low * 1e6:6.0f} to {high * 1e6:8.0f} us {chosen.size:4d} shapes  mean {chosen.mean():.3f}"
                f"  median {np.median(chosen):.3f}  p90 {np.quantile(chosen, 0.9):.3f}"
            )


def left_out(found: Sequence[Shape], device: Device, architecture: str, key: Callable[[Product], int]) -> np.ndarray:
    """Errors of each shape under constants fitted without the shapes that share its dim (in five folds of dims)."""
    values = sorted({key(shape.product) for shape in found})
    fold_of = {value: index % 5 for index, value in enumerate(values)}
    off = np.zeros(len(found))
    for fold in range(5):
        inside = [s for s in found if fold_of[key(s.product)] != fold]
        rates = fit(inside, device, architecture)
        for index, shape in enumerate(found):
            if fold_of[key(shape.product)] == fold:
                off[index] = predicted(shape, rates, device) / shape.seconds - 1
    return off


def groups(hardware: str) -> list[Shape]:
    """Measured grouped products in bfloat16, launched group by group on several streams."""
    found: list[Shape] = []
    for row in rows("group_matmul", hardware):
        text = row["shape"]
        number, m, n, k = (int(text[key]) for key in ("ng", "M", "N", "K"))
        if text["stage"] == "bwd_grad_act":
            n, k = k, n
        elif text["stage"] == "bwd_grad_w":
            m, n, k = n, k, m
        product = Product(m=m, n=n, k=k, groups=number, accumulates=text["stage"] == "bwd_grad_w")
        wide = product.accumulates and text["main_grad_dtype"] == "fp32"
        found.append(Shape(product, 4.0 if wide else 2.0, product.flops / (row["achieved_tflops"] * 1e12)))
    return found


def predicted_groups(shape: Shape, rates: ProductRates, device: Device) -> float:
    """Seconds of a grouped product: the device's or the host's, whichever is longer."""
    host = rates.group_s * shape.product.groups
    return (predicted(shape, rates, device) ** 4 + host**4) ** 0.25


def fit_groups(found: Sequence[Shape], rates: ProductRates, device: Device) -> ProductRates:
    """Fit what groups add, everything else being as fitted on single products."""

    def of(point: np.ndarray) -> ProductRates:
        return dataclasses.replace(
            rates, group_s=float(np.exp(point[0])), group_reach=min(1.0, float(np.exp(point[1])))
        )

    def residuals(point: np.ndarray) -> np.ndarray:
        return np.array([np.log(predicted_groups(s, of(point), device) / s.seconds) / 0.05 for s in found])

    best = least_squares(residuals, np.log([8e-6, 0.9]), loss="soft_l1", diff_step=1e-3)
    return of(best.x)


#: Hopper: (m, n, k, TFLOP/s in 16 bits, whether at the power limit, trust). Of H100 unless said: squares,
#: zzc0721/torch-performance-test-data#79 (torch 2.7); few rows, vllm-project/vllm#17126; best, gemm_max of
#: operators_collectives.jsonl; ten in a row on an H200, October 2026; two hundred in a row of normal numbers,
#: 720 TFLOP/s: SemiAnalysis, MI300X vs H100 vs H200 benchmark part 1, December 2024.
_HOPPER = (
    (1024, 1024, 1024, 176.6, False, 0.1), (2048, 2048, 2048, 676.6, False, 0.05),
    (4096, 4096, 4096, 788.7, False, 0.05), (8192, 8192, 8192, 797.5, False, 0.05), (64, 6144, 4096, 160.6, False, 0.1),
    (128, 6144, 4096, 307.9, False, 0.1), (256, 6144, 4096, 544.3, False, 0.1), (2048, 2048, 13312, 794.5, False, 0.05),
    (8192, 8192, 8192, 788.0, False, 0.05),
    (10240, 10240, 10240, 719.7, True, 0.03), (8192, 8192, 8192, 720.0, True, 0.03),
)  # fmt: skip
#: Side of the squares that these are.
_LARGE = {"hopper": 8192, "blackwell": 32768}
#: What large products of 8 and 4 bits reach at the power limit, TFLOP/s: H100 as above by SemiAnalysis; 32768 x 32768 x
#: 32768 with cuBLAS on B200 (triton-lang/triton#9697).
_LOW = {"hopper": {"float8_e4m3fn": 1280.0}, "blackwell": {"float8_e4m3fn": 2587.0, "float4_e2m1fn_x2": 4933.4}}


def hopper(ampere: ProductRates, blackwell: ProductRates) -> ProductRates:
    """Between its neighbors: geometric means, drawn to the few products that are published."""

    def mean(name: str) -> float:
        return float(np.sqrt(getattr(ampere, name) * getattr(blackwell, name)))

    names = ("operand_columns", "wave_share", "prologue_k", "epilogue_share", "memory_share", "fixed_s")
    base = dataclasses.replace(
        blackwell, tiles=_TILES["ampere"][:-1], **{name: mean(name) for name in (*names, "group_reach")}
    )
    device = load_machine("h100").device
    found = [(Shape(Product(m, n, k), 2.0, 2e-12 * m * n * k / rate), *rest) for m, n, k, rate, *rest in _HOPPER]
    free = {"reach": (0.95, 0.05), "joule": (1.15e12, 0.2), **{name: (getattr(base, name), 0.3) for name in names}}
    start, width = (np.array(column) for column in zip(*free.values(), strict=True))

    def of(point: np.ndarray) -> ProductRates:
        values = dict(zip(free, (float(v) for v in np.exp(point)), strict=True))
        values.update(reach=min(1.0, values["reach"]), memory_share=min(0.9, values["memory_share"]))
        return dataclasses.replace(base, flops_per_joule={"bfloat16": values.pop("joule")}, **values)

    def residuals(point: np.ndarray) -> np.ndarray:
        off = [np.log(in_state(s, of(point), device, limit) / s.seconds) / trust for s, limit, trust in found]
        return np.array([*off, *((point - np.log(start)) / width)])

    rates = of(least_squares(residuals, np.log(start), loss="soft_l1", diff_step=1e-3).x)
    for shape, limit, _ in found:
        off = in_state(shape, rates, device, limit) / shape.seconds - 1
        print(f"H100 {shape.product.m} x {shape.product.n} x {shape.product.k}, at the limit {limit}: {off:+.3f}")
    return rates


def in_state(shape: Shape, rates: ProductRates, device: Device, limit: bool) -> float:
    """Seconds at the power limit or at full clock."""
    assert device.gpu is not None
    peak = model.peak_flops(device, "bfloat16") * device.gpu.speed
    slow = max(1.0, peak * rates.reach / (rates.flops_per_joule["bfloat16"] * device.gpu.power_w)) if limit else 1.0
    return on(device, shape.product, (2.0, shape.out_bytes), peak / slow, rates)


def with_low(rates: ProductRates, architecture: str, machine: str) -> ProductRates:
    """Work of a joule in 8 and 4 bits, such that large products reach their measured rate at the power limit."""
    device = load_machine(machine).device
    assert device.gpu is not None
    side = _LARGE[architecture]
    large, low = Product(side, side, side), dict[str, float]()
    for dtype, rate in _LOW[architecture].items():
        peak, seconds = device.peak_flops_per_s[dtype], large.flops / (rate * 1e12)
        slow = 1.0
        for _ in range(20):
            bytes_ = (0.5 if dtype.startswith("float4") else 1.0, 2.0)
            slow *= seconds / on(device, large, bytes_, peak / slow, rates)
        low[dtype] = peak * rates.reach / (max(1.0, slow) * device.gpu.power_w)
    return dataclasses.replace(rates, flops_per_joule={**rates.flops_per_joule, **low})


def main() -> None:
    """Fit each architecture that has a table of shapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the constants into the catalog")
    parser.add_argument("--folds", action="store_true", help="also errors of shapes left out by n and by k")
    arguments = parser.parse_args()
    fitted: dict[str, ProductRates] = {}
    for architecture, machine, hardware in (("ampere", "a100-pcie", "A100"), ("blackwell", "b200", "B200")):
        device, found, grouped = load_machine(machine).device, shapes(hardware), groups(hardware)
        rates = fit_groups(grouped, fit(found, device, architecture), device)
        rates = dataclasses.replace(rates, unaligned=kernel_rates(architecture).product.unaligned)  # unaligned.py
        report(f"{hardware} fitted", found, errors(found, rates, device))
        off = np.array([predicted_groups(s, rates, device) / s.seconds - 1 for s in grouped])
        report(f"{hardware} groups fitted", grouped, off)
        if arguments.folds:
            report(f"{hardware} left out by n", found, left_out(found, device, architecture, lambda p: p.n))
            report(f"{hardware} left out by k", found, left_out(found, device, architecture, lambda p: p.k))
        fitted[architecture] = rates
    fitted["ampere"] = dataclasses.replace(fitted["ampere"], group_s=fitted["blackwell"].group_s)
    fitted["hopper"] = with_low(hopper(fitted["ampere"], fitted["blackwell"]), "hopper", "h100")
    fitted["blackwell"] = with_low(fitted["blackwell"], "blackwell", "b200")
    for architecture, rates in fitted.items():
        values: dict[str, Any] = dataclasses.asdict(rates)
        print(architecture, {k: v for k, v in values.items() if k != "tiles"})
        if arguments.write:
            replace(architecture, "product", values)


if __name__ == "__main__":
    main()
