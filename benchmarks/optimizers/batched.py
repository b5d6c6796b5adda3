"""Muon of many experts' matrices on one process: one by one, and equal shapes in batched products (``batched=True``).

    python benchmarks/optimizers/batched.py [--device cuda]

On a CPU processor seconds are counted, elsewhere seconds with the device waited for; arms are interleaved, medians of
steps printed. "differs" is the largest difference of weights over the largest movement of one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lading.matrices import Muon

CASES = ((64, 256), (256, 64), (1024, 32))
STEPS = 7


def _timed_s(step: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.process_time()
        step()
        return time.process_time() - start
    module = torch.get_device_module(device)
    module.synchronize(device)
    start = time.perf_counter()
    step()
    module.synchronize(device)
    return time.perf_counter() - start


def _print_case(experts: int, side: int, dtype: str, device: torch.device) -> None:
    torch.manual_seed(0)
    initial, grad = (torch.randn(experts, side, side).to(device) for _ in range(2))
    weights: dict[bool, nn.Parameter] = {}
    steps: dict[bool, Callable[[], object]] = {}
    times: dict[bool, list[float]] = {False: [], True: []}
    for batched in times:
        weights[batched] = nn.Parameter(initial.clone())
        weights[batched].grad = grad.clone()
        settings: dict[str, Any] = {"dtype": dtype, "batched": batched}
        optimizer = Muon([("experts", weights[batched])], lr=0.02, **settings)
        steps[batched] = optimizer.step
    for number in range(STEPS + 1):
        for batched, seconds in times.items():
            taken_s = _timed_s(steps[batched], device)
            if number:
                seconds.append(taken_s)
    alone_s, batched_s = (statistics.median(times[batched]) for batched in (False, True))
    alone, together = (weights[batched].detach() for batched in (False, True))
    differs = float((together - alone).abs().max() / (alone - initial).abs().max())
    print(
        f"{experts:5} of {side}x{side}, {dtype:8}: {alone_s * 1e3:8.1f} ms one by one, {batched_s * 1e3:8.1f} batched, "
        f"{alone_s / batched_s:.2f}x; differs by {differs:.1g}",
        flush=True,
    )


def main() -> None:
    """Print a line for each number and size of experts and each number format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {device}, one thread")
    for experts, side in CASES:
        for dtype in ("bfloat16", "float32"):
            _print_case(experts, side, dtype, device)


if __name__ == "__main__":
    main()
