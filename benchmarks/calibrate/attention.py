"""Fit the constants of attention kernels to published figures and to SimuMax's tables.

python -m benchmarks.calibrate.attention [--write]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from benchmarks.calibrate.tables import replace, rows
from scipy.optimize import least_squares

from lading.catalog.kernel_rates import KernelRates, PassRates, kernel_rates
from lading.catalog.load import load_machine
from lading.cost import fused_attention as model
from lading.cost.product import power_slowdown
from lading.ir.machine import Device
from lading.ir.work import Attention

_FIGURES = Path(__file__).with_name("published_attention.json")
_CUDNN = Path(__file__).with_name("published_cudnn.json")
#: Attention shorter than this is at full clock when it is measured with a pause after each run.
_BURST_S = 10e-3
#: What a constant should be about, and how far off (in logarithms) is no surprise; then a reach for each head size.
_PRIORS = {"prologue_keys": (96.0, 0.7), "tail": (0.6, 0.3), "power_share": (0.5, 0.5)}
_REACH = (0.6, 0.5)
#: The first FlashAttention was only timed forward and backward together: both passes are taken to reach about as much.
_REACH_TOGETHER = (0.3, 0.2)
#: Heads from which on all multiprocessors have work to the end.
_MANY = 64
_FORWARD, _BACKWARD = "forward", "backward"


@dataclasses.dataclass(frozen=True)
class Measured:
    """One measurement: passes that were timed together."""

    passes: tuple[Attention, ...]
    seconds: float
    pauses: bool
    label: str


def figures(machine: str, kernel: str) -> list[Measured]:
    """Bars of published figures."""
    data = json.loads(_FIGURES.read_text(encoding="utf-8"))
    found: list[Measured] = []
    for series in data["series"]:
        if (series["machine"], series["kernel"]) != (machine, kernel):
            continue
        for length, tflops in zip(data["lengths"], series["tflops"], strict=True):
            heads, dim, causal = 2048 // series["dim"], series["dim"], series["causal"]
            names = (_FORWARD, _BACKWARD) if series["pass"] == "both" else (series["pass"],)
            passes = tuple(
                Attention(16384 // length, heads, heads, length, length, dim, dim, causal, name == _BACKWARD)
                for name in names
            )
            full = 4.0 * 16384 * length * 2048 / (2 if causal else 1)
            flops = full * sum(2.5 if name == _BACKWARD else 1.0 for name in names)
            label = f"{kernel} {series['pass']} {dim} {'causal' if causal else 'full'} {length}"
            found.append(Measured(passes, flops / (tflops * 1e12), False, label))
    return found


def table(hardware: str) -> list[Measured]:
    """SimuMax's rows: causal, the full square counted, five products backward."""
    found: list[Measured] = []
    for kind, backward in (("sdp_fwd", False), ("sdp_bwd", True)):
        for row in rows(kind, hardware):
            text = row["shape"]
            if text["qkv_contiguous"] != "True":
                continue
            batch, length, heads, kv_heads = (int(text[k]) for k in ("batch", "seq_len", "head_num", "kv_head_num"))
            qk_dim, v_dim = int(text["qk_head_dim"]), int(text["v_head_dim"])
            attention = Attention(batch, heads, kv_heads, length, length, qk_dim, v_dim, True, backward)
            flops = (5 if backward else 2) * batch * length**2 * heads * (qk_dim + v_dim)
            label = f"{hardware} {kind} {length} {heads}/{kv_heads} {qk_dim}"
            found.append(Measured((attention,), flops / (row["achieved_tflops"] * 1e12), True, label))
    return found


def cudnn(machine: str, dtype: str) -> list[Measured]:
    """cuDNN's own benchmark of training shapes."""
    data = json.loads(_CUDNN.read_text(encoding="utf-8"))
    found: list[Measured] = []
    for values in data["rows"]:
        row = dict(zip(data["columns"], values, strict=True))
        if (row["machine"], row["dtype"]) != (machine, dtype):
            continue
        sizes = (row["batch"], row["heads"], row["kv_heads"], row["tokens"], row["tokens"], row["qk_dim"], row["v_dim"])
        for name in (_FORWARD, _BACKWARD):
            attention = Attention(*sizes, row["causal"], name == _BACKWARD, row["window"])
            label = f"{machine} {dtype} {name} {row['qk_dim']} {'causal' if row['causal'] else 'full'} {row['tokens']}"
            found.append(Measured((attention,), row[f"{name}_ms"] / 1e3, True, label + f" {row['window'] or ''}"))
    return found


def fit_newest() -> dict[str, dict[str, PassRates]]:
    """cuDNN 9.22 on GB200, and how much faster it is on GB300, where exponentials take half as long."""
    made: dict[str, dict[str, PassRates]] = {}
    plain, fast = load_machine("gb200").device, load_machine("gb300").device
    rates = kernel_rates("blackwell")
    for kernel, dtype in (("cudnn9", "bfloat16"), ("cudnn9-mxfp8", "mxfp8")):
        found, newer = cudnn("gb200", dtype), cudnn("gb300", dtype)
        passes = fit(found, plain, (256, 128), skips=dtype == "bfloat16")
        for name in (_FORWARD, _BACKWARD):
            own = [m for m in newer if m.passes[0].backward == (name == _BACKWARD)]
            slow = dataclasses.replace(passes[name], exponentials=1.0)
            gains = [predicted(m, {name: slow}, fast, rates) / m.seconds for m in own]
            passes[name] = dataclasses.replace(passes[name], exponentials=float(np.exp(np.mean(np.log(gains)))))
        for title, rows_, device in ((f"gb200 {kernel}", found, plain), (f"gb300 {kernel}", newer, fast)):
            report(title, rows_, np.array([predicted(m, passes, device, rates) / m.seconds - 1 for m in rows_]))
        made[kernel] = passes
    return made


def predicted(measured: Measured, passes: dict[str, PassRates], device: Device, rates: KernelRates) -> float:
    """Seconds of what was timed together."""
    whole = dataclasses.replace(rates, attention={"fitted": passes})
    share = 1 / (1 + (_BURST_S / measured.seconds) ** 2) if measured.pauses else 1.0
    return sum(model.seconds(a, "bfloat16", device, whole, "fitted", sustained=share) for a in measured.passes)


def head_sizes(found: Sequence[Measured], backward: bool) -> tuple[float, ...]:
    """Means of the head sizes of keys and values that were measured in a pass."""
    return tuple(sorted({(a.qk_dim + a.v_dim) / 2 for m in found for a in m.passes if a.backward == backward}))


def fit(
    found: Sequence[Measured], device: Device, blocks: tuple[int, int], *, skips: bool = True
) -> dict[str, PassRates]:
    """Both passes of a kernel; a pass without measurements is left out.

    Args:
        skips: Whether backward leaves out blocks outside of a window.
    """
    assert device.gpu is not None
    rates = kernel_rates(device.gpu.architecture)
    limited = power_slowdown(device.gpu, rates, "bfloat16", device.peak_flops_per_s["bfloat16"]) > 1.05
    names = [n for n in (_FORWARD, _BACKWARD) if any(a.backward == (n == _BACKWARD) for m in found for a in m.passes)]
    sizes = {name: head_sizes(found, name == _BACKWARD) for name in names}
    prior = _REACH_TOGETHER if all(len(m.passes) == 2 for m in found) else _REACH
    each = {name: [*_PRIORS.values(), *(prior for _ in sizes[name])] for name in names}
    if all(m.passes[0].batch * m.passes[0].query_tokens == 16384 or m.passes[0].heads >= _MANY for m in found):
        # Many heads leave no multiprocessor idle: the tail is that of the parts measured with few.
        each = {name: [values[0], (0.6, 0.05), *values[2:]] for name, values in each.items()}
    start = np.log([value for name in names for value, _ in each[name]])
    width = np.array([sigma for name in names for _, sigma in each[name]])

    def of(point: np.ndarray) -> dict[str, PassRates]:
        made: dict[str, PassRates] = {}
        values = [float(v) for v in np.exp(point)]
        for name in names:
            own, values = values[: len(each[name])], values[len(each[name]) :]
            fields = dict(zip(_PRIORS, own, strict=False))
            fields["power_share"] = fields["power_share"] if limited else 0.5
            reach = tuple(own[len(_PRIORS) :])
            block, skipped = blocks[name == _BACKWARD], skips or name == _FORWARD
            made[name] = PassRates(block=block, head_sizes=sizes[name], reach=reach, skips=skipped, **fields)
        return made

    def residuals(point: np.ndarray) -> np.ndarray:
        off = [np.log(predicted(m, of(point), device, rates) / m.seconds) / 0.03 for m in found]
        return np.array([*off, *((point - start) / width)])

    best = least_squares(residuals, start, loss="soft_l1", diff_step=1e-3)
    return of(best.x)


def report(name: str, found: Sequence[Measured], off: np.ndarray) -> None:
    """Print errors and the worst rows."""
    size = np.abs(off)
    print(f"{name:24s} {len(found):3d} rows  mean {size.mean():.3f}  median {np.median(size):.3f}  "
          f"p90 {np.quantile(size, 0.9):.3f}  bias {off.mean():+.3f}")  # fmt: skip
    for index in np.argsort(-size)[:4]:
        print(f"    {off[index]:+.3f} {found[index].label}")


def left_out(found: Sequence[Measured], device: Device, blocks: tuple[int, int]) -> np.ndarray:
    """Errors of each length under constants fitted without it."""
    assert device.gpu is not None
    rates = kernel_rates(device.gpu.architecture)
    lengths = {m.passes[0].query_tokens for m in found}
    off = np.zeros(len(found))
    for length in lengths:
        inside = [m for m in found if m.passes[0].query_tokens != length]
        if len(inside) < 8:
            continue
        made = fit(inside, device, blocks)
        for index, m in enumerate(found):
            if m.passes[0].query_tokens == length:
                off[index] = predicted(m, made, device, rates) / m.seconds - 1
    return off


def written(passes: PassRates) -> dict[str, object]:
    """Fields that a file holds: those that are as usual are left out."""
    usual = {f.name: f.default for f in dataclasses.fields(PassRates)}
    return {key: value for key, value in dataclasses.asdict(passes).items() if value != usual[key]}


def with_small_heads(passes: dict[str, PassRates], like: dict[str, PassRates]) -> dict[str, PassRates]:
    """Heads of 64, not measured on the newer part, at the share of those of 128 that they have on the older one."""
    made: dict[str, PassRates] = {}
    for name, rates in passes.items():
        share = like[name].reach_at(64) / like[name].reach_at(128)
        reach = (rates.reach_at(128) * share, *rates.reach)
        made[name] = dataclasses.replace(rates, head_sizes=(64.0, *rates.head_sizes), reach=reach)
    return made


def on_newer(
    passes: dict[str, PassRates], like: dict[str, PassRates], newer: dict[str, PassRates]
) -> dict[str, PassRates]:
    """A kernel that was not measured on the newer part: it gains as much as another of its time did, pass by pass."""
    made: dict[str, PassRates] = {}
    for name, rates in passes.items():
        gains = [newer[name].reach_at(size) / like[name].reach_at(size) for size in rates.head_sizes]
        reach = tuple(own * gain for own, gain in zip(rates.reach, gains, strict=True))
        made[name] = dataclasses.replace(rates, reach=reach)
    return made


def main() -> None:
    """Fit every kernel of every architecture that was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the constants into the catalog")
    arguments = parser.parse_args()
    narrow = (128, 128)
    jobs = [("a100", "flash2", narrow), ("a100", "flash1", narrow), ("a100", "triton", narrow),
            ("h100", "flash1", narrow), ("h100", "flash2", narrow), ("h100", "flash3", narrow),
            ("h100", "cudnn", narrow), ("b200", "cudnn", (256, 128))]  # fmt: skip
    before: dict[str, PassRates] = {}
    fitted: dict[tuple[str, str], dict[str, PassRates]] = {}
    for machine, kernel, blocks in jobs:
        device = load_machine(machine).device
        assert device.gpu is not None
        found = table("B200") if machine == "b200" else figures(machine, kernel)
        if (machine, kernel) == ("h100", "cudnn"):
            found += cudnn("h200", "bfloat16")
        if (machine, kernel) == ("a100", "flash2"):
            found += [m for m in table("A100") if m.passes[0].heads in (4, 16, 64)]  # as fast on PCIe as on SXM
        made, rates = fit(found, device, blocks), kernel_rates(device.gpu.architecture)
        report(
            f"{machine} {kernel}", found, np.array([predicted(m, made, device, rates) / m.seconds - 1 for m in found])
        )
        report(f"{machine} {kernel} left out", found, left_out(found, device, blocks))
        if (machine, kernel) == ("a100", "flash2"):
            pcie, other = load_machine("a100-pcie").device, table("A100")
            off = np.array([predicted(m, made, pcie, rates) / m.seconds - 1 for m in other])
            report("all of a100-pcie", other, off)
        fitted[machine, kernel] = made
        if (machine, kernel) == ("h100", "flash1") and arguments.write:
            for name, passes in on_newer(fitted["a100", "triton"], fitted["a100", "flash1"], made).items():
                replace("hopper", f"attention.triton.{name}", written(passes))
        if machine == "b200":
            made = with_small_heads(made, before)
        before = made
        for name, passes in made.items():
            print("   ", name, written(passes))
            if arguments.write:
                replace(device.gpu.architecture, f"attention.{kernel}.{name}", written(passes))
    for kernel, passes in fit_newest().items():
        for name, values in passes.items():
            print("   ", kernel, name, written(values))
            if arguments.write:
                replace("blackwell", f"attention.{kernel}.{name}", written(values))


if __name__ == "__main__":
    main()
