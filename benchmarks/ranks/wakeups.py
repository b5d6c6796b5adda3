"""What does it cost that gloo's threads interrupt each other? Reductions between two processes of this host.

    torchrun --nproc-per-node 2 benchmarks/ranks/wakeups.py

Half a minute. Two groups of the same processes take turns: one as torch makes it, and one whose threads are batch work
(``lading.runtime.batch_threads``), as a job's groups are. Each reduction comes after some milliseconds of computing, as
in a step, and is timed on the process that comes last; then it runs beside computing that lasts longer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import fmean, median, quantiles

import torch
import torch.distributed as dist

from lading.runtime.batch_threads import batch_threads
from lading.runtime.probe_cases import product_and_pass

_SIZES = (16 << 10, 3 << 19, 16 << 20)
_ROUNDS = 100
#: Calls of a product and a pass before a reduction, and beside one.
_BEFORE, _BESIDE = 3, 30


def exposed_s(values: torch.Tensor, group: dist.ProcessGroup, work: Callable[[], object]) -> float:
    """Seconds of a reduction that nothing runs beside, on the process that comes last."""
    for _ in range(_BEFORE):
        work()
    started = time.perf_counter()
    dist.all_reduce(values, group=group)
    took = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MIN, group=group)
    return float(took)


def beside_s(values: torch.Tensor, group: dist.ProcessGroup, work: Callable[[], object]) -> float:
    """Seconds of computing with a reduction beside it, to the end of both."""
    dist.barrier(group)
    started = time.perf_counter()
    handle = dist.all_reduce(values, group=group, async_op=True)
    for _ in range(_BESIDE):
        work()
    assert handle is not None, "this process is of the group"
    handle.wait()
    return time.perf_counter() - started


def main() -> None:
    """Print a line for each size and kind of threads."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with batch_threads():
        batch = dist.new_group()
    groups = {"as torch makes them": dist.group.WORLD, "batch work": batch}
    work = product_and_pass()
    for size in _SIZES:
        values = torch.rand(size // 4)
        exposed: dict[str, list[float]] = {name: [] for name in groups}
        beside: dict[str, list[float]] = {name: [] for name in groups}
        for turn in range(_ROUNDS):
            for name, group in groups.items():
                exposed[name].append(exposed_s(values, group, work))
                if turn % 10 == 0:
                    beside[name].append(beside_s(values, group, work))
        for name in groups:
            times = sorted(exposed[name])
            tenth = quantiles(times, n=10)[-1]
            if dist.get_rank() == 0:
                print(
                    f"{size >> 10:6} KiB, {name:19}: mean {fmean(times) * 1e3:6.2f} ms, median "
                    f"{median(times) * 1e3:6.2f}, slowest tenth from {tenth * 1e3:6.2f}; with computing beside "
                    f"{median(beside[name]) * 1e3:6.1f}",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
