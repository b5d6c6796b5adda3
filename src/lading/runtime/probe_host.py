"""Measures what a host has beside a device: its memory as a tier, and its processors where they compute in it.

Processors are measured by what a plan has them do: updates of parameters that lie in the host's memory, and products of
the few rows of tokens that chose an expert (``lading.runtime.expert_computing``), whose weights come from memory and
whose gradients are memory that is touched for the first time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, product
from statistics import median

import torch

from lading.ir.machine import MEMORY, UPDATE_NUMBERS, Curve, HostDevice, Tier
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
ROWS = (1, 2, 4, 16, 64, 256)
_WEIGHT = (4096, 1024)
#: Products with a weight: x W^T of the forward pass, dy W and dy^T x of the backward pass.
LAYOUTS = ("NT", "NN", "TN")
_ROW_KEY = "rows."


def processor_cases(shape: tuple[int, int] = _WEIGHT) -> list[Case]:
    """Make cases of what a host's processors do beside a device: passes over memory, updates, and products of few rows.

    Products have their rows as ``size``. Each call takes another weight, so that it comes from memory; a gradient goes
    to memory that was touched before.

    Args:
        shape: Rows and columns of the weights.
    """
    passes = [case for case in rate_cases(Pool(torch.device("cpu"))) if case.key in ("copy", "step")]
    largest = max(case.work for case in passes if case.key == "copy")
    return [*(case for case in passes if case.work >= largest / 2), *_row_cases(shape)]


def _row_cases(shape: tuple[int, int]) -> Iterator[Case]:
    rows, columns = shape
    weights = cycle([torch.rand(shape) for _ in range(2 + 2 * flush_bytes()[1] // (4 * rows * columns))])
    for layout, count in product(LAYOUTS, ROWS):
        x, gradient = torch.rand(count, columns), torch.rand(count, rows)
        calls: dict[str, Callable[[], object]] = {
            "NT": lambda x=x: torch.mm(x, next(weights).t()),
            "NN": lambda gradient=gradient: torch.mm(gradient, next(weights)),
            "TN": lambda x=x, gradient=gradient: torch.mm(gradient.t(), x, out=next(weights)),
        }
        yield Case(f"{_ROW_KEY}{layout}", float(count), 2.0 * count * rows * columns, calls[layout])


def processors_of(cases: Sequence[Case], seconds: Sequence[float], threads: int) -> HostDevice:
    """Make the host's processors of what ``processor_cases`` took.

    Args:
        seconds: Seconds of each case.
        threads: Threads that they were timed with.
    """
    timed = list(zip(cases, seconds, strict=True))
    rates = {case.key: case.work / each for case, each in timed if not case.key.startswith(_ROW_KEY)}
    return HostDevice(
        name=host_id().split(" | ")[0],
        num_threads=threads,
        memory_bandwidth_bytes_per_s=rounded(rates["copy"]),
        optimizer_elements_per_s=rounded(rates["step"] / (4 * UPDATE_NUMBERS)),
        row_flops_per_s=row_rates([row for row in timed if row[0].key.startswith(_ROW_KEY)]),
    )


def row_rates(timed: Sequence[tuple[Case, float]]) -> Curve:
    """Rate of products of rows against their number, of as many in each layout.

    Their FLOP grow with the rows, and the bytes of their weights do not; but from 2 rows to those of a kernel's tile
    neither tells the time, and one row has a kernel of its own. On an AMD EPYC, a sum of both at two rates missed 4 of
    256 rows by two fifths (3.8 ms for 6.3, two threads).
    """
    together: dict[float, tuple[float, float]] = {}
    for case, seconds in timed:
        flops, total = together.get(case.size, (0.0, 0.0))
        together[case.size] = flops + case.work, total + seconds
    sizes = tuple(sorted(together))
    return Curve(size=sizes, rate=tuple(rounded(together[size][0] / together[size][1]) for size in sizes))


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
