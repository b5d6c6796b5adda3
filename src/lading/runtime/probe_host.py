"""Measures what a host has beside a device: its memory as a tier, and its processors where they compute in it.

Processors are measured by what a plan has them do: updates of parameters that lie in the host's memory, and products of
the few rows of tokens that chose an expert (``lading.runtime.expert_computing``), whose weights come from memory and
whose gradients are memory that is touched for the first time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, product
from math import inf
from statistics import median

import torch

from lading.ir.machine import MEMORY, UPDATE_NUMBERS, HostDevice, Tier
from lading.ir.program import PAGE_BYTES
from lading.runtime.host import host_id, usable_bytes
from lading.runtime.probe_cases import Case, Pool, flush_bytes, rate_cases, rounded
from lading.units import MiB

#: Of the host's memory, what may be page-locked for the host tier.
HOST_SHARE = 0.7
_COPY_BYTES = 256 * MiB
#: Copies of a page in a row, each behind another stream's event as in a run: one by itself is mostly the host's wait.
_PAGES = 64
#: Rows of the timed products, and rows and columns of their float32 weights.
ROWS = (1, 4, 16, 64, 256)
_WEIGHT = (4096, 1024)
#: Seconds of a FLOP or a byte that takes none beside the other.
_NO_TIME = 1e-18
#: Products with a weight: x W^T of the forward pass, dy W and dy^T x of the backward pass.
LAYOUTS = ("NT", "NN", "TN")


def processor_cases(shape: tuple[int, int] = _WEIGHT) -> list[Case]:
    """Make cases of what a host's processors do beside a device: passes over memory, updates, and products of few rows.

    Products have their FLOP as ``work`` and the bytes of operands and result as ``size``. Each call takes another
    weight, so that it comes from memory; a gradient goes to memory that was touched before.

    Args:
        shape: Rows and columns of the weights.
    """
    passes = [case for case in rate_cases(Pool(torch.device("cpu"))) if case.key in ("copy", "step")]
    largest = max(case.work for case in passes if case.key == "copy")
    return [*(case for case in passes if case.work >= largest / 2), *_row_cases(shape)]


def _row_cases(shape: tuple[int, int]) -> Iterator[Case]:
    rows, columns = shape
    size = 4 * rows * columns
    weights = cycle([torch.rand(rows, columns) for _ in range(2 + 2 * flush_bytes()[1] // size)])
    for layout, count in product(LAYOUTS, ROWS):
        x, gradient = torch.rand(count, columns), torch.rand(count, rows)
        calls: dict[str, Callable[[], object]] = {
            "NT": lambda x=x: torch.mm(x, next(weights).t()),
            "NN": lambda gradient=gradient: torch.mm(gradient, next(weights)),
            "TN": lambda x=x, gradient=gradient: torch.mm(gradient.t(), x, out=next(weights)),
        }
        moved = float(size + 4 * count * (rows + columns))
        yield Case(f"rows.{layout}", moved, 2.0 * count * rows * columns, calls[layout])


def processors_of(cases: Sequence[Case], seconds: Sequence[float], threads: int) -> tuple[HostDevice, float]:
    """Make the host's processors of what ``processor_cases`` took; returns the mean error of products of rows, too.

    Args:
        seconds: Seconds of each case.
        threads: Threads that they were timed with.
    """
    timed = list(zip(cases, seconds, strict=True))
    rates = {case.key: case.work / each for case, each in timed if not case.key.startswith("rows.")}
    flops_per_s, bytes_per_s, error = fit_rows([row for row in timed if row[0].key.startswith("rows.")])
    processors = HostDevice(
        name=host_id().split(" | ")[0],
        num_threads=threads,
        memory_bandwidth_bytes_per_s=rounded(rates["copy"]),
        optimizer_elements_per_s=rounded(rates["step"] / (4 * UPDATE_NUMBERS)),
        row_flops_per_s=rounded(flops_per_s),
        row_bytes_per_s=rounded(bytes_per_s),
    )
    return processors, error


def fit_rows(timed: Sequence[tuple[Case, float]]) -> tuple[float, float, float]:
    """Fit ``seconds = bytes / bytes_per_s + flops / flops_per_s`` to products of a few rows.

    An expert has as many products of each layout, so what those of one number of rows take together is fitted, by the
    least squares of relative errors.

    Args:
        timed: Products and the seconds of each, of two numbers of rows at least.
    Returns:
        FLOP/s, bytes/s, and the mean relative error.
    """
    together: dict[float, tuple[float, float, float]] = {}
    for case, seconds in timed:
        flops, size, total = together.get(case.work, (0.0, 0.0, 0.0))
        together[case.work] = flops + case.work, size + case.size, total + seconds
    parts = torch.tensor([[flops / s, size / s] for flops, size, s in together.values()], dtype=torch.float64)
    best, found = inf, torch.zeros(2, dtype=torch.float64)
    ones = torch.ones(len(parts), 1, dtype=torch.float64)
    for kept in ([0, 1], [0], [1]):  # neither takes less than no time
        values = torch.linalg.lstsq(parts[:, kept], ones).solution
        missed = (parts[:, kept] @ values - ones).square().sum().item()
        if values.min() > 0 and missed < best:
            best, found = missed, torch.zeros(2, dtype=torch.float64)
            found[kept] = values.squeeze(1)
    error = (parts @ found - 1).abs().mean().item()
    flop_s, byte_s = found.tolist()
    return 1 / max(flop_s, _NO_TIME), 1 / max(byte_s, _NO_TIME), error


def host_tier(seconds: float) -> Tier:
    """Measure copies between page-locked host memory and the device, alone and both ways at once."""
    near = [torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    far = [torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def read(size: int = _COPY_BYTES) -> None:
        with torch.cuda.stream(streams[0]):
            near[0][:size].copy_(far[0][:size], non_blocking=True)

    def write() -> None:
        with torch.cuda.stream(streams[1]):
            far[1].copy_(near[1], non_blocking=True)

    def read_and_write() -> None:
        read()
        write()

    read_done = torch.cuda.Event()

    def pages() -> None:
        for _ in range(_PAGES):
            read_done.record(streams[1])
            streams[0].wait_event(read_done)
            read(PAGE_BYTES)

    runs = {"read": read, "write": write, "both": read_and_write, "page": pages}
    samples: dict[str, list[float]] = {key: [] for key in runs}
    end = time.monotonic() + seconds
    while not samples["page"] or (time.monotonic() < end and len(samples["page"]) < 15):
        for key, run in runs.items():
            samples[key].append(_seconds_of(run))
    times = {key: median(seconds_each) for key, seconds_each in samples.items()}
    return Tier(
        name="host",
        kind=MEMORY,
        host_computes=True,
        capacity_bytes=int(HOST_SHARE * usable_bytes()),
        read_bytes_per_s=rounded(_COPY_BYTES / times["read"]),
        write_bytes_per_s=rounded(_COPY_BYTES / times["write"]),
        mixed_read_bytes_per_s=rounded(_COPY_BYTES / max(times["both"], times["read"])),
        mixed_write_bytes_per_s=rounded(_COPY_BYTES / max(times["both"], times["write"])),
        latency_s=rounded(times["page"] / _PAGES),
    )


def _seconds_of(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start
