"""Sharing: measure what processes of this host that train together take from each other, and PyTorch's own overhead.

1, 2, ... processes run the same kernels at once, and each round lasts until the last of them is done, as it does in a
step. Rounds are longer than a scheduler's turn, and numbers of processes take turns, round by round: a host that
others share is faster now and slower then, and what is asked is how many times longer two take than one. Then each
process reads and writes the disk under its kernels.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lading.errors import ConfigError
from lading.ir.machine import TIER_SPEEDS, Processes
from lading.runtime.probe_disk import probe_disk
from lading.runtime.probe_processes import PROBE_AGAIN, group_of, in_processes, write_measured
from lading.runtime.probe_ranks import OPS, busy_processors
from lading.units import MiB

#: Longer than a scheduler takes to spread three processes over two processors; rounds at least.
_ROUND_S, _LEAST_ROUNDS = 0.1, 5
#: Seconds of computing between two meetings, and how many of these are measured.
_STRETCH_S, _MEETINGS = 0.01, 80
#: Rows, columns and depth of the product that stands for all.
PRODUCT = (512, 1408, 512)
#: Elements of each tensor of the pass that stands for all that memory bounds: 1 MiB, as in steps of small models.
#: Measured on 2 cores: beside another process tensors of 1/4 MiB took 1.6 times as long, of 1 1.3, of 4 2.4, of 16 1.5.
_PASS_ELEMENTS = 1 << 18
#: Bytes of the file of each process, and the least seconds in which its speed is measured.
_FILE_BYTES, _DISK_S = 64 * MiB, 2.0
#: Layers of the tiny models, and kernels of one: a product with its bias and a GELU, and four on the way back.
_LAYERS, _KERNELS = 12, 6


def probe_sharing(ranks: int, folder: Path, seconds: float = 12.0, threads: int = 1) -> Processes:
    """Measure slowdowns of kernels and disk, what collectives keep busy, and seconds that PyTorch takes on the host.

    Args:
        ranks: Most processes, >= 2.
        folder: Where the disk is measured, as tier "disk".
        seconds: Time to measure for, in all; starting processes and the disk come on top.
        threads: Threads of each process.
    Raises:
        ConfigError: fewer than two ranks, or no time.
        StorageError: as ``probe_disk``.
    """
    if ranks < 2 or seconds <= 0:
        raise ConfigError(f"expected ranks >= 2 and seconds > 0, got {ranks} and {seconds}")
    slowdown: dict[str, tuple[float, ...]] = {}
    skew: tuple[float, ...] = ()
    busy: dict[str, float] = {}
    overhead: dict[str, float] = {}
    tiers: dict[str, list[float]] = {}
    for count in range(1, ranks + 1):
        given = (threads, folder, seconds / ranks, count == ranks)
        lines = in_processes(_run, count, *given, advice=PROBE_AGAIN).splitlines()
        for line in lines:
            what, name, text = line.split()
            if what == "kernels":
                slowdown[name] = tuple(map(float, text.split(",")))
            elif what == "skew":
                skew = tuple(map(float, text.split(",")))
            elif what == "busy":
                busy[f"{name}.{count}"] = float(text)
            elif what == "disk":
                tiers.setdefault(f"disk.{name}", []).append(float(text))
            else:
                overhead[name] = float(text)
    measured = {name: tuple(each) for name, each in tiers.items()}
    return Processes(
        cores=os.cpu_count() or 1, slowdown=slowdown, busy=busy, tiers=measured, overhead_s=overhead, skew=skew
    )


def _run(rank: int, count: int, made: str, threads: int, folder: Path, seconds: float, kernels: bool) -> None:
    """Run one of the processes that share the host; the first of them writes the times of all.

    Args:
        kernels: Whether slowdowns of kernels are measured among these processes, in their part of all the time.
    """
    torch.set_num_threads(threads)
    with group_of(rank, count, made):
        slowdowns = kernel_slowdowns(0.6 * seconds * count) if kernels else {}
        lines = [f"kernels {name} {','.join(map(repr, each))}" for name, each in slowdowns.items()]
        lines += [f"skew processes {','.join(map(repr, arrival_skew()))}"] if kernels else []
        if count > 1:
            busy = {op: busy_processors(op, rank, count) for op in OPS if op != "send" or count == 2}
            lines += [f"busy {op} {share!r}" for op, share in busy.items()]
        if count == 1:
            lines.append(f"overhead operation {_operation_s()!r}")
        if count == 2:
            lines += [f"overhead {name} {each!r}" for name, each in _hooks().items()]
        lines += [f"disk {name} {each!r}" for name, each in disk_speeds(folder, max(_DISK_S, 0.3 * seconds)).items()]
        write_measured(made, "\n".join(lines))


def kernel_slowdowns(seconds: float) -> dict[str, tuple[float, ...]]:
    """Factors on the seconds of a kernel while 1, 2, ... of the processes run it, by what slows it.

    Each number of processes is compared with one alone in the same round, and the median of rounds counts. More
    processes are never faster.

    Args:
        seconds: Time to measure for; a process group is there.
    """
    m, n, k = PRODUCT
    a, b, out = torch.rand(m, k), torch.rand(k, n), torch.empty(m, n)
    wide, other, made = (torch.rand(_PASS_ELEMENTS) for _ in range(3))
    calls: dict[str, Callable[[], object]] = {
        "products": lambda: torch.mm(a, b, out=out),
        "memory-bound": lambda: torch.mul(wide, other, out=made),
    }
    numbers, count = {name: _repeats(call) for name, call in calls.items()}, dist.get_world_size()
    turns_s = sum(max(1.0, each / (os.cpu_count() or 1)) for each in range(1, count + 1)) * _ROUND_S
    rounds = max(_LEAST_ROUNDS, int(seconds / len(calls) / turns_s))
    ratios = {name: [[1.0] * rounds for _ in range(count)] for name in calls}
    for round_ in range(rounds):
        for name, call in calls.items():
            took = [_among(each, call, numbers[name]) for each in range(1, count + 1)]
            for each, times in zip(took, ratios[name], strict=True):
                times[round_] = each / took[0]
    return {name: tuple(accumulate(map(statistics.median, times), max)) for name, times in ratios.items()}


def arrival_skew() -> tuple[float, ...]:
    """Seconds by which the last of 1, 2, ... processes comes late after a second of computing (``Processes.skew``).

    They compute for a hundredth of a second and meet, again and again; the latest twentieth of the meetings of each
    number of processes is left out, as something outside of the job held them up. A process group is there.
    """
    m, n, k = PRODUCT
    a, b, out = torch.rand(m, k), torch.rand(k, n), torch.empty(m, n)

    def call() -> object:
        return torch.mm(a, b, out=out)

    number = max(1, round(_repeats(call) * _STRETCH_S / _ROUND_S))
    late_s = [[0.0] * _MEETINGS for _ in range(dist.get_world_size())]
    between_s = [[1.0] * _MEETINGS for _ in late_s]
    for meeting in range(_MEETINGS):
        for processes in range(2, len(late_s) + 1):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(number if dist.get_rank() < processes else 0):
                call()
            arrived = [torch.zeros(2, dtype=torch.float64) for _ in late_s]
            dist.all_gather(arrived, torch.tensor([start, time.perf_counter()], dtype=torch.float64))
            starts, ends = zip(*(pair.tolist() for pair in arrived[:processes]), strict=True)
            late_s[processes - 1][meeting] = max(ends) - statistics.fmean(ends)
            between_s[processes - 1][meeting] = max(ends) - min(starts)
    num_kept = _MEETINGS * 19 // 20
    return tuple(
        statistics.fmean(sorted(late)[:num_kept]) / statistics.fmean(between) ** 0.5
        for late, between in zip(late_s, between_s, strict=True)
    )


def _among(processes: int, call: Callable[[], object], number: int) -> float:
    """Seconds until the last of the first processes has made so many calls, while the others wait."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(number if dist.get_rank() < processes else 0):
        call()
    return _slowest(time.perf_counter() - start)


def disk_speeds(folder: Path, seconds: float) -> dict[str, float]:
    """Speeds of the disk as each process has it while all compute and move: their mean, by attribute of ``Tier``.

    Raises:
        StorageError: as ``probe_disk``.
    """
    m, n, k = PRODUCT
    a, b, out = torch.rand(m, k), torch.rand(k, n), torch.empty(m, n)
    dist.barrier()
    tier = probe_disk(folder, seconds, lambda: torch.mm(a, b, out=out), _FILE_BYTES).tier
    speeds = torch.tensor([getattr(tier, name) for name in TIER_SPEEDS], dtype=torch.float64)
    dist.all_reduce(speeds)
    means: list[float] = (speeds / dist.get_world_size()).tolist()
    return {name: float(f"{mean:.4g}") for name, mean in zip(TIER_SPEEDS, means, strict=True)}


def _repeats(call: Callable[[], object]) -> int:
    """Number of calls that make a round, the same on all processes."""
    call()
    start = time.perf_counter()
    call()
    return max(1, round(_ROUND_S / _slowest(time.perf_counter() - start)))


def _slowest(seconds: float) -> float:
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _tiny() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(_LAYERS)))


def _pass_s(model: nn.Module, times: int = 40) -> float:
    """Processor seconds of a thread that runs a tiny model forward and back: waiting for others is not in it."""
    x, samples = torch.rand(4, 32), list[float]()
    for _ in range(times + 5):
        start = time.thread_time()
        model(x).sum().backward()
        samples.append(time.thread_time() - start)
        model.zero_grad(set_to_none=True)
    return statistics.median(samples[5:])


def _operation_s() -> float:
    """Seconds to launch a kernel in eager, forward and back alike."""
    return _pass_s(_tiny()) / (_LAYERS * _KERNELS)


def _hooks() -> dict[str, float]:
    """Seconds of the host for each linear layer of DTensors, and for each unit of FSDP2, beyond plain ones."""
    from torch.distributed.device_mesh import init_device_mesh  # seconds to load: here only
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    plain = _pass_s(_tiny())
    styles: dict[str, ParallelStyle] = {
        f"{i}.0": ColwiseParallel() if i % 2 == 0 else RowwiseParallel() for i in range(_LAYERS)
    }
    cut = parallelize_module(_tiny(), mesh, styles)
    sharded: Any = _tiny()
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    return {
        "tensor-parallel": max(0.0, (_pass_s(cut) - plain) / _LAYERS),
        "unit": max(0.0, (_pass_s(sharded) - plain) / _LAYERS),
    }
