"""Collectives measured over gloo, by operation, number of ranks and size, among processes of this host or of a job."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from lading.alone import num_ranks
from lading.errors import ConfigError
from lading.ir.machine import Curve
from lading.runtime.job import start_job
from lading.runtime.probe_cases import product_and_pass
from lading.runtime.probe_processes import PROBE_AGAIN, group_of, in_processes, write_measured
from lading.runtime.resident import reuse_pages
from lading.runtime.shard_exchange import gather_shards, sum_shards

#: Operations of torch's, and those of Lading's own shards (``lading.runtime.job``).
OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send",
    "gather_shards",
    "sum_shards",
)
#: Bytes, as ``lading.ir.work.Collective.size_bytes`` counts them.
SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 25)
#: Bytes of the collectives whose processors are counted.
_BUSY_BYTES = 8 << 20
#: Operations in which a rank may be done before another has begun.
_ONE_WAY = ("broadcast", "send")
#: Calls that are timed, at least.
_FEWEST = 8


def probe_ranks(ranks: int, seconds: float = 5.0, sizes: tuple[int, ...] = SIZES) -> dict[str, Curve]:
    """Measure bytes/s of each operation among 2, ... ``ranks`` processes of this host over gloo.

    Args:
        ranks: Most processes, >= 2; each gets its part of the processors.
        seconds: Time to measure for, in all; starting processes comes on top.
        sizes: Ascending bytes; each a multiple of 4 bytes for every rank.

    Returns:
        Curves for ``Machine.collectives``, such as "all_reduce.4". A send is measured between two.

    Raises:
        ConfigError: fewer than two ranks, no time, or no size.
    """
    if ranks < 2 or seconds <= 0 or not sizes:
        raise ConfigError(f"expected ranks >= 2, seconds > 0 and a size, got {ranks}, {seconds} and {sizes}")
    curves: dict[str, Curve] = {}
    for count in range(2, ranks + 1):
        times = json.loads(in_processes(_run, count, sizes, seconds / (ranks - 1), advice=PROBE_AGAIN))
        curves |= _curves(times, count, sizes)
    return curves


def probe_job(seconds: float = 5.0, sizes: tuple[int, ...] = SIZES) -> tuple[dict[str, Curve], dict[str, float]]:
    """Measure bytes/s of each operation among the ranks of this job, over the network that joins them.

    Args:
        seconds, sizes: As ``probe_ranks``.

    Returns:
        Curves for ``Machine.collectives``, and the processors that all ranks together keep busy for
        ``Processes.busy``; the same on all ranks.
    """
    count = num_ranks()[0]
    start_job(count)
    times = _times(dist.get_rank(), count, sizes, seconds)
    busy = {f"{op}.{count}": busy_processors(op, dist.get_rank(), count) for op in OPS if op != "send" or count == 2}
    return _curves(times, count, sizes), busy


def _curves(times: dict[str, list[float]], count: int, sizes: tuple[int, ...]) -> dict[str, Curve]:
    """Curves of what so many ranks took, by operation; a send is one between two, however many there are."""
    curves: dict[str, Curve] = {}
    for op, each_s in times.items():
        rates = tuple(size / seconds for size, seconds in zip(sizes, each_s, strict=True))
        curves[f"{op}.{2 if op == 'send' else count}"] = Curve(size=tuple(map(float, sizes)), rate=rates)
    return curves


def _run(rank: int, count: int, folder: str, sizes: tuple[int, ...], seconds: float) -> None:
    """Run one process: every operation at every size; the first process writes the times of all."""
    torch.set_num_threads(max(1, (os.cpu_count() or count) // count))
    reuse_pages()
    with group_of(rank, count, folder):
        write_measured(folder, json.dumps(_times(rank, count, sizes, seconds)))


def _times(rank: int, count: int, sizes: tuple[int, ...], seconds: float) -> dict[str, list[float]]:
    """Seconds of every operation at every size, the same on all ranks."""
    share = seconds / len(OPS) / len(sizes)
    return {op: [_seconds(op, call_of(op, size, rank, count), share) for size in sizes] for op in OPS}


def call_of(op: str, size: int, rank: int, count: int) -> Callable[[], object]:
    """Make the call of one collective of ``size`` bytes on rank ``rank`` of ``count``."""
    whole = torch.rand(max(count, size // 4 // count * count))  # of pages of its own: those never written are one
    part = torch.rand(whole.numel() // count)
    other = torch.rand(whole.numel())
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renames both
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather(whole, part),
        "reduce_scatter": lambda: scatter(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send": lambda: _send(whole, rank),
        "gather_shards": lambda: gather_shards(whole, part),
        "sum_shards": lambda: sum_shards(part, whole),
    }
    return calls[op]


def busy_processors(op: str, rank: int, count: int, times: int = 12) -> float:
    """Number of processors that all ranks together keep busy in a collective."""
    call = call_of(op, _BUSY_BYTES, rank, count)
    for _ in range(2):
        call()
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    for _ in range(times):
        call()
    spent = torch.tensor([time.process_time() - used], dtype=torch.float64)
    elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    dist.all_reduce(spent)
    return float(spent / elapsed)


def _send(tensor: torch.Tensor, rank: int) -> None:
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)


def _seconds(op: str, call: Callable[[], object], share_s: float) -> float:
    """Mean seconds of a call, the slowest tenth left out, each after some computing as in a step.

    It takes the time of the rank that came last, which waits for nobody; of an operation in which ranks do not all wait
    for each other, that of the slowest from a barrier on. The number of calls is agreed on.
    """
    compute, waits = product_and_pass(), op not in _ONE_WAY
    call()
    start = time.perf_counter()
    compute()
    call()
    once = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(once, dist.ReduceOp.MAX)
    rounds = max(_FEWEST, min(200, int(share_s / max(float(once), 1e-6))))
    times = torch.zeros(rounds, dtype=torch.float64)
    for index in range(rounds):
        compute()
        if not waits:
            dist.barrier()
        start = time.perf_counter()
        call()
        times[index] = time.perf_counter() - start
        if not waits:
            dist.barrier()  # nobody computes while others still wait
    dist.all_reduce(times, dist.ReduceOp.MIN if waits else dist.ReduceOp.MAX)
    return float(times.sort().values[: rounds - rounds // 10].mean())
