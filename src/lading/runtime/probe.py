"""Probe: measure this host in about a minute and write it down as a Machine.

Everything is timed as the executor runs it (kernels bound to memory that exists, one reading and one writing disk
thread), in rounds over all cases. While others load the host, kernels are measured again; what stays loaded goes by the
lower quartile and says so in ``sources``, and so do the plans for it.

Timings of products and attention are fitted to a peak, an efficiency curve and ``skinny_dim`` (``ProductFit``).
"""

from __future__ import annotations

import datetime
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lading.errors import ConfigError, StorageError
from lading.ir.machine import (
    COLD_PRODUCT,
    EVEN_COLUMNS,
    KERNEL_BYTES,
    ODD_COLUMNS,
    WHOLE,
    Curve,
    Device,
    HostDevice,
    Machine,
    Tier,
)
from lading.runtime.cuda import CudaMeter, check_available
from lading.runtime.host import host_id, memory_bytes
from lading.runtime.kernel_calls import Call
from lading.runtime.probe_cases import (
    Case,
    Pool,
    StepWork,
    Stopwatch,
    bind_call,
    cold_cases,
    flush_bytes,
    low_cases,
    rate_cases,
    rounded,
    runs_case,
)
from lading.runtime.probe_disk import DiskMeter, DiskProbe
from lading.runtime.probe_host import HOST_SHARE, host_tier, processor_cases, processors_of
from lading.runtime.resident import reuse_pages, trim

_STAT = Path("/proc/stat")
#: Columns of a processor's line in /proc/stat that count as work: user, nice, system, irq, softirq and steal.
_WORK = (1, 2, 3, 6, 7, 8)
#: The system counts in hundredths of a second: less says nothing.
_SHORTEST_S = 0.2
Progress = Callable[[str], None]
#: A rate counts at most this often the bytes of a launch: below it the clock sees only the overhead.
_LEAST_SHARE = 0.1
#: Share of the time for the disk before and again after the kernels, as what shares it changes within a minute.
_DISK_SHARE = 0.15
_SCRATCH_TIMEOUT_S = 120
#: Share of the processors that others may take before the kernels are measured again, and how often they are at most.
QUIET = 0.1
_TRIES = 3
#: Wire of a GPU, over which a disk's bytes come too, by way of the host's memory; share of the time for its processors.
_HOST_LINK, _BESIDE_SHARE = "host_link", 0.1
#: Share of the kernels' time for operands from memory; products so large take them at no time that stands out.
_COLD_SHARE = 0.25
_COLD_FLOPS = 3e8
#: Samples of a short one in a round, fewer than of others: before each a copy of more than the cache is made.
_COLD_REPEATS = 2


def probe(
    *,
    folder: Path | str = ".",
    threads: int | None = None,
    seconds: float = 50.0,
    device: str | None = None,
    progress: Progress | None = None,
) -> Machine:
    """Measure this host: products, memory-bound operations, attention, AdamW, copies, disk and process overhead.

    Args:
        folder: Where the disk tier would be; 288 MiB are used there meanwhile.
        threads: Intra-op threads to measure with; None keeps torch's setting.
        seconds: Time to spend, > 0, on a GPU about a sixth more; more gives steadier figures. One round of everything
            is done at least.
        device: "cpu" or "cuda"; None takes the GPU where there is one.
        progress: Called with one line per stage.

    Raises:
        ConfigError: seconds or threads out of range.
        StorageError: the folder cannot be written or lacks space.
    """
    if seconds <= 0 or (threads is not None and threads < 1):
        raise ConfigError(f"expected seconds > 0 and threads >= 1, got {seconds} and {threads}")
    say = progress or (lambda line: None)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_available(target.type)
    folder = Path(folder)
    reuse_pages()  # as the executor does: temporaries find their pages touched
    with _threads(threads) as used:
        say(f"disk under {folder}")
        with DiskMeter(folder, StepWork() if target.type == "cpu" else None) as meter:
            meter.run(_DISK_SHARE * seconds)
            say(f"kernels with {used} threads")
            measured, host, rounds, load = _probe_device(target, 0.7 * seconds, used, say)
            beside = None if host is None else _probe_beside(_BESIDE_SHARE * seconds, used, say)
            meter.run(_DISK_SHARE * seconds)
            disk = meter.median_probe()
    trim()
    today = datetime.date.today().isoformat()
    if disk.note:
        say(disk.note)
    sources = _sources(target, _how(today, rounds, used, load), today, disk, host is not None)
    if beside is not None:
        sources["host_device"], load = _how(today, beside[1], used, beside[2]), max(load, beside[2])
    if load > QUIET:
        sources["device.load"] = _busy_sentence(load)
        say(sources["device.load"])
    return _machine_of(measured, host, beside and beside[0], disk.tier, today, f"lading probe, {seconds:g} s", sources)


def _machine_of(
    device: Device,
    host: Tier | None,
    processors: HostDevice | None,
    disk: Tier,
    today: str,
    source: str,
    sources: dict[str, str],
) -> Machine:
    """Put a machine together.

    Args:
        host: The host's memory as a tier of a GPU.
        processors: The host's processors beside a GPU.
        sources: How each number came about, by its name.
    """
    return Machine(
        name="this host",
        date=today,
        source=source,
        device=device,
        tiers=(disk,) if host is None else tuple(replace(tier, wire=_HOST_LINK) for tier in (host, disk)),
        host_device=processors,
        host_id=host_id(),
        sources=sources,
    )


def _probe_beside(seconds: float, threads: int, say: Progress) -> tuple[HostDevice, int, float]:
    """Measure the processors beside a device, where they compute in the host's memory.

    Returns:
        The processors, the most samples of a case, and the share of them that others took meanwhile.
    """
    say(f"processors of the host with {threads} threads")
    cases = processor_cases()
    with torch.no_grad():
        watch = Stopwatch(cases, torch.device("cpu"))
        rounds, load = _quiet_rounds(watch, seconds, say)
    return processors_of(cases, watch.seconds(quiet=load <= QUIET), threads), rounds, load


def probe_processors(threads: int, seconds: float, progress: Progress | None = None) -> tuple[Device, str]:
    """Measure the host's processors with so many threads, as ``probe`` does those of a CPU.

    Returns:
        The processors, and the assumption that others who loaded them meanwhile make necessary; "" where none did.

    Args:
        threads: Intra-op threads to measure with, >= 1.
        seconds: Time to spend on kernels, > 0.
        progress: Called with one line per stage.
    """
    say = progress or (lambda line: None)
    reuse_pages()
    with _threads(threads) as used:
        say(f"kernels with {used} threads")
        measured, _, _, load = _probe_device(torch.device("cpu"), seconds, used, say)
    trim()
    return measured, _busy_sentence(load) if load > QUIET else ""


def _how(today: str, rounds: int, threads: int, load: float) -> str:
    """Say how the kernels were measured."""
    statistic = "mean" if load <= QUIET else "lower quartile"
    return f"measured {today}, {statistic} of up to {rounds} samples, {threads} threads, torch {torch.__version__}"


def _busy_sentence(load: float) -> str:
    """Sentence that every plan for a machine measured under load repeats, with the share of processors others took."""
    return (
        f"assumption: the host was busy while it was measured, others took {load:.0%} of its processors: a step may "
        f"take anything from {1 - load:.0%} of the predicted time to all of it; measure again when it is quiet: lading "
        "probe"
    )


def _sources(target: torch.device, how: str, today: str, disk: DiskProbe, with_host: bool) -> dict[str, str]:
    """Say how each number of the machine came about, by the number's name."""
    host = {
        "tiers.host": how,
        "tiers.host.capacity_bytes": f"{HOST_SHARE:.0%} of the memory that the process may have",
    }
    return {
        "device": how,
        "tiers.disk": f"measured {today}, median of {disk.rounds} rounds. {disk.note}".rstrip(". "),
        "device.overhead_bytes": f"measured {today}: {_OVERHEAD[target.type]}",
        "device.packing_bytes": f"measured {today}: growth of a fresh process over one wide product",
        KERNEL_BYTES: f"measured {today}: mean growth of a fresh process over distinct bfloat16 products",
        "device.memory_bytes": "the operating system",
        **(host if with_host else {}),
    }


@contextmanager
def _threads(threads: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _rated_cases(target: torch.device, pool: Pool) -> list[Case]:
    """Make the cases whose rate against their size is kept, of a CPU those in bfloat16, too."""
    rated = [*rate_cases(pool), runs_case(pool), *batched_cases(pool), *attention_cases(pool)]
    if target.type == "cpu":
        low = Pool(target, torch.bfloat16)
        rated += columns_cases(pool)
        rated += [*low_cases(low, pool), *low_product_cases(low), *batched_cases(low, "bmm.bfloat16")]
        rated += attention_cases(low, ".bfloat16")
    return rated


def _probe_device(
    target: torch.device, seconds: float, threads: int, say: Progress
) -> tuple[Device, Tier | None, int, float]:
    """Measure the device.

    Returns:
        The device; the host's memory as a tier of a GPU, else None; the most samples that a case has; the share of the
        processors that others took meanwhile.
    """
    pool = Pool(target)
    shaped, typed, rated = product_cases(pool), list(dtype_cases(pool)), _rated_cases(target, pool)
    tiny = bind_call("aten.mul.Tensor", (pool.cut("a", 16), pool.cut("b", 16)), (pool.cut("o", 16),))
    cases = [Case("overhead", 1.0, 1.0, tiny), *(case for _, case in shaped), *(case for _, case in typed), *rated]
    with torch.no_grad():
        watch, cold = Stopwatch(cases, target), _ColdWatch(cases if target.type == "cpu" else [])
        cold.run(_COLD_SHARE / 2 * seconds)
        rounds, load = _quiet_rounds(watch, (1 - _COLD_SHARE) * seconds, say)
        cold.run(_COLD_SHARE / 2 * seconds)
    times = watch.seconds(quiet=load <= QUIET)
    overhead = times[0] if target.type == "cpu" else _launch_seconds(tiny)
    split, end = 1 + len(shaped), 1 + len(shaped) + len(typed)
    products = [TimedProduct(*shape, t) for (shape, _), t in zip(shaped, times[1:split], strict=True)]
    fit = fit_products(products, overhead)
    say(f"products: {fit.peak / 1e9:.1f} GFLOP/s at best, fitted within {100 * fit.mean_error:.0f}% on average")
    rates = _rates(rated, times[end:], overhead)
    if target.type == "cpu":
        rates["matmul.bfloat16"] = _in_any_layout([rates[f"matmul.{layout}.bfloat16"] for layout in LAYOUTS])
    grown, packing, compiled = scratch_bytes(threads) if target.type == "cpu" else (_gpu_overhead_bytes(), 0, 0)
    cold_rates = cold.rates(dict(zip(map(id, cases), times, strict=True)), overhead, quiet=load <= QUIET)
    device = Device(
        name=_device_name(target),
        kind=target.type,
        memory_bytes=_device_memory(target),
        memory_bandwidth_bytes_per_s=rates["copy"].rate[-1],
        op_overhead_s=rounded(overhead),
        peak_flops_per_s=_peaks(fit.peak, base_dtype(target), [name for name, _ in typed], times[split:end]),
        optimizer_elements_per_s=rounded(rates["step"].rate[-1] / _BYTES_PER_UPDATE),
        num_threads=threads,
        overhead_bytes=grown,
        packing_bytes=packing,
        kernel_bytes=compiled,
        skinny_dim=rounded(fit.skinny_dim),
        product_efficiency=_rounded_curve(fit.efficiency),
        rates=rates,
        cache_bytes=cold.cache_bytes,
        cold_rates=cold_rates,
    )
    return device, host_tier(seconds / 10) if target.type == "cuda" else None, rounds, load


class _ColdWatch:
    """Times passes and products whose operands come from memory, in as many periods as it is told to.

    Args:
        cases: All cases, of which some are timed so; none where a device has no cache to speak of.

    Attributes:
        cache_bytes: Bytes of the cache; 0 without cases, or where the system says nothing of a cache.
    """

    def __init__(self, cases: Sequence[Case]) -> None:
        cache, flush = flush_bytes()
        self.cache_bytes = cache if cases else 0
        cases = cases if self.cache_bytes else ()
        self._passes = cold_cases(cases)
        self._products = [case for case in cases if case.key == "mm" and case.work <= _COLD_FLOPS]
        both = [*self._passes, *self._products]
        self._watch = Stopwatch(both, torch.device("cpu"), flush) if both else None

    def run(self, seconds: float) -> None:
        """Time rounds until ``seconds`` are over; again while others load the host, and of these the last are kept."""
        if (watch := self._watch) is None:
            return
        for attempt in range(_TRIES):
            meter, earlier = LoadMeter(), watch.samples()
            watch.run(seconds, repeats=_COLD_REPEATS)
            if (meter.share() or 0.0) <= QUIET:
                break
            if attempt < _TRIES - 1:
                watch.resume_from(earlier)

    def rates(self, warm: Mapping[int, float], overhead: float, *, quiet: bool) -> dict[str, Curve]:
        """Rates from memory, ``Device.cold_rates``; none without a cache.

        Args:
            warm: Seconds of each case with its operands in cache, by its ``id``.
            overhead: Seconds that any operation takes.
            quiet: Whether nobody else loaded the host meanwhile.
        """
        if self._watch is None:
            return {}
        seconds = self._watch.seconds(quiet=quiet)
        count = len(self._passes)
        rates = _rates(self._passes, seconds[:count], overhead)
        extra = [max(0.0, cold - warm[id(case)]) for case, cold in zip(self._products, seconds[count:], strict=True)]
        if sum(extra) > 0:
            size = sum(case.touched for case in self._products)
            rates[COLD_PRODUCT] = _curve({rounded(size / len(self._products)): rounded(size / sum(extra))})
        return rates


def _quiet_rounds(watch: Stopwatch, seconds: float, say: Progress) -> tuple[int, float]:
    """Time all cases, and again for half as long while others load the host; keep what was measured most quietly.

    Returns:
        The most samples of a case, and the share of the processors that others took meanwhile (0 where nobody says).
    """
    quietest: tuple[float, int, list[list[float]]] | None = None
    for attempt in range(_TRIES):
        meter = LoadMeter()
        rounds = watch.run(seconds if attempt == 0 else seconds / 2)
        load = meter.share() or 0.0
        samples = watch.begin_again()
        if quietest is None or load < quietest[0]:
            quietest = load, rounds, samples
        if load <= QUIET:
            break
        if attempt < _TRIES - 1:
            say(f"others took {load:.0%} of the processors meanwhile: measuring again")
    assert quietest is not None
    watch.resume_from(quietest[2])
    return quietest[1], quietest[0]


_OVERHEAD = {
    "cpu": "growth of a fresh process's resident set after one pass",
    "cuda": "context, code, and what libraries keep for a stream, after one pass, without what nvidia-smi lists of "
    "other processes (it lists none in a container: there theirs is in it)",
}


def _launch_seconds(run: Call, count: int = 1000) -> float:
    """Seconds the host needs to launch one operation, many in a row: below it no operation of a step ends."""
    torch.cuda.synchronize()
    samples: list[float] = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(count):
            run()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / count)
    return sorted(samples)[len(samples) // 4]


def _gpu_overhead_bytes() -> int:
    """Bytes this process takes on the GPU besides tensors, once one more thread has run products on its own stream.

    So does the thread that computes in a run: cuBLAS keeps a handle for each thread, and a workspace for each stream.
    """
    before = torch.cuda.memory_allocated()
    a = torch.rand(256, 256, device="cuda")

    def product() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.mm(a, a)
        torch.cuda.synchronize()

    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(product).result()
    workspace_bytes = torch.cuda.memory_allocated() - before - a.numel() * a.element_size()
    torch.cuda.empty_cache()
    return CudaMeter(torch.cuda.current_device()).beside_bytes() + max(0, workspace_bytes)


#: Weight, gradient and two moments read, all but the gradient written, in fp32.
_BYTES_PER_UPDATE = 28


def _rates(cases: Sequence[Case], times: Sequence[float], overhead: float) -> dict[str, Curve]:
    points: dict[str, dict[float, float]] = {}
    for case, seconds in zip(cases, times, strict=True):
        net = max(seconds - overhead, _LEAST_SHARE * seconds)
        points.setdefault(case.key, {})[rounded(case.size)] = rounded(case.work / net)
    return {key: _curve(curve_points) for key, curve_points in points.items()}


def _in_any_layout(curves: Sequence[Curve]) -> Curve:
    """Rate of products whose layout is not known: as many in each layout, at the sizes that all were measured at."""
    sizes = min((curve.size for curve in curves), key=len)
    return _curve({size: rounded(len(curves) / sum(1.0 / curve.at(size) for curve in curves)) for size in sizes})


def _curve(points: Mapping[float, float]) -> Curve:
    sizes = tuple(sorted(points))
    return Curve(size=sizes, rate=tuple(points[size] for size in sizes))


def _rounded_curve(curve: Curve) -> Curve:
    return Curve(size=tuple(map(rounded, curve.size)), rate=tuple(map(rounded, curve.rate)))


def _peaks(peak: float, base_name: str, names: Sequence[str], times: Sequence[float]) -> dict[str, float]:
    """Peak FLOP/s of each dtype: that of the base, scaled by how long the same product took."""
    base = times[names.index(base_name)]
    return {name: rounded(peak * base / seconds) for name, seconds in zip(names, times, strict=True)}


def _device_name(target: torch.device) -> str:
    return torch.cuda.get_device_name(target) if target.type == "cuda" else host_id().split(" | ")[0]


def _device_memory(target: torch.device) -> int:
    return torch.cuda.get_device_properties(target).total_memory if target.type == "cuda" else memory_bytes()


def scratch_bytes(threads: int) -> tuple[int, int, int]:
    """Bytes a process needs on top of its tensors, to pack products, and for each distinct 16-bit product.

    Raises:
        StorageError: the child process failed; its last words are in the message.
    """
    command = [sys.executable, "-P", "-m", "lading.runtime.probe_scratch", str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCRATCH_TIMEOUT_S, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        words = str(getattr(error, "stderr", "") or "")[-500:]
        raise StorageError(f"cannot measure the process overhead in another process: {error} {words}") from error
    grown, packing, compiled = map(int, done.stdout.split())
    return grown, packing, compiled


class LoadMeter:
    """Measures what share of this process's processors others take, from its creation on.

    What a hypervisor gives to other guests counts too, as far as it says so.

    Args:
        beside: Numbers of processes that are no others either.
    """

    def __init__(self, beside: Sequence[int] = ()) -> None:
        self._beside = beside
        self._cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._begun = self._read()

    def share(self, worked_s: float | None = None) -> float | None:
        """Share in [0, 1] of the processors' time since then that others took than this process and its children, or
        than those that worked ``worked_s`` seconds; None where nobody says.
        """
        if self._begun is None or (readings := self._read()) is None:
            return None
        wall_s, busy_s, own_s = (after - before for after, before in zip(readings, self._begun, strict=True))
        own_s = own_s if worked_s is None else worked_s
        if wall_s < _SHORTEST_S or busy_s <= 0:
            return None
        return min(1.0, max(0.0, busy_s - own_s) / (wall_s * len(self._cpus)))

    def _read(self) -> tuple[float, float, float] | None:
        """Seconds on the clock, of work of the processors, and of this process, those beside it, and their children."""
        try:
            lines = _STAT.read_text().splitlines()
        except OSError:
            return None
        busy = busy_seconds(lines, self._cpus)
        own_s = sum(os.times()[:4]) + sum(map(worked_seconds, filter(self._is_on_them, self._beside)))
        return None if busy is None else (time.monotonic(), busy, own_s)

    def _is_on_them(self, process: int) -> bool:
        """Whether a process runs on no other processors than this one's."""
        try:
            return set(self._cpus).issuperset(os.sched_getaffinity(process))
        except OSError:  # it is gone
            return False


def worked_seconds(process: int) -> float:
    """Seconds that a process has worked, with its children that have ended; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def busy_seconds(lines: list[str], cpus: list[int]) -> float | None:
    """Seconds that processors worked since the system started, by the lines of /proc/stat; None if one is missing."""
    rows = {words[0]: words for words in map(str.split, lines) if words}
    if not cpus or any(len(rows.get(f"cpu{cpu}", ())) < 9 for cpu in cpus):
        return None
    ticks = sum(int(rows[f"cpu{cpu}"][column]) for cpu in cpus for column in _WORK)
    return ticks / os.sysconf("SC_CLK_TCK")


#: m, k, n of the timed products: squares from launch-bound to large, and shapes with one or two short dims.
SHAPES = (
    (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024),
    (16, 1024, 1024), (64, 1024, 1024), (256, 1024, 1024), (1024, 16, 1024), (1024, 64, 1024), (1024, 1024, 64),
    (512, 128, 128), (512, 128, 512), (2048, 256, 256), (512, 768, 3072), (512, 3072, 768), (256, 512, 8192),
)  # fmt: skip
#: As SHAPES, for a GPU: the sizes of models that are trained on one.
CUDA_SHAPES = (
    (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192),
    (16, 4096, 4096), (128, 4096, 4096), (1024, 4096, 4096), (8192, 4096, 4096), (8192, 1024, 4096),
    (8192, 4096, 128), (8192, 128, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (4096, 4096, 32768),
)  # fmt: skip
#: Which operands are transposed: x W^T forward, dy W and dy^T x backward.
LAYOUTS = ("NT", "NN", "TN")
_BATCHED = (16, 32, 64, 128, 256)
#: Batch, heads, tokens and width of a head of the timed attentions, causal and whole.
_ATTENTION = ((4, 4, 64, 32), (2, 8, 128, 64), (1, 8, 512, 64), (1, 8, 1024, 64), (1, 4, 2048, 128))
_WHOLE_ATTENTION = ((8, 6, 64, 64), (1, 8, 512, 64))
_CUDA_ATTENTION = ((8, 8, 128, 64), (8, 16, 512, 64), (4, 16, 1024, 64), (2, 16, 2048, 128), (1, 32, 4096, 128))
_KNOTS_PER_DECADE = 1


@dataclass(frozen=True, slots=True)
class TimedProduct:
    """One timed product of fp32 matrices, m x k by k x n."""

    m: int
    k: int
    n: int
    seconds: float

    @property
    def flops(self) -> float:
        """FLOP of the product; a multiply-add counts two."""
        return 2.0 * self.m * self.k * self.n


def base_dtype(device: torch.device) -> str:
    """Name of the dtype in which products are timed: what a device multiplies fastest and is trained in."""
    if device.type == "cpu":
        return "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"


def product_cases(pool: Pool) -> list[tuple[tuple[int, int, int], Case]]:
    """Make a case for every shape (m, k, n) in every layout; returned with the shape."""
    cases: list[tuple[tuple[int, int, int], Case]] = []
    shapes = SHAPES if pool.device.type == "cpu" else CUDA_SHAPES
    place = _matrices(pool, shapes)
    for m, k, n in shapes:
        for layout in LAYOUTS:
            run = _product(place, m, k, n, layout)
            flops = 2.0 * m * k * n
            cases.append(((m, k, n), Case("mm", flops, flops, run, 4 * (m * k + k * n + m * n))))
    return cases


#: (region, rows, columns) -> a matrix.
_Place = Callable[[str, int, int], torch.Tensor]


def _matrices(pool: Pool, shapes: Sequence[tuple[int, int, int]]) -> _Place:
    """Make a function that cuts a matrix of the base dtype from region "a", "b" or "o" of the pool."""
    if pool.device.type == "cpu":
        return pool.cut
    sizes = {"a": max(m * k for m, k, _ in shapes), "b": max(k * n for _, k, n in shapes)}
    sizes["o"] = max(m * n for m, _, n in shapes)
    dtype = getattr(torch, base_dtype(pool.device))
    regions = {name: torch.randn(size, device=pool.device, dtype=dtype) for name, size in sizes.items()}
    return lambda region, rows, columns: regions[region][: rows * columns].view(rows, columns)


#: Rows, sum and columns of products that are timed with one column more, too.
_COLUMNS = ((256, 448, 1024), (256, 448, 4096), (256, 448, 16384))


def columns_cases(pool: Pool) -> Iterator[Case]:
    """Make cases of products whose rows of results begin at whole vectors, and of such that do not."""
    for m, k, columns in _COLUMNS:
        for key, n in ((EVEN_COLUMNS, columns), (ODD_COLUMNS, columns + 1)):
            flops = 2.0 * m * k * n
            yield Case(key, float(n), flops, _product(pool.cut, m, k, n, "NT"))


#: m, k, n of the products timed in bfloat16 too, the smallest first.
_LOW_SHAPES = ((64, 64, 64), (256, 256, 256), (512, 512, 512), (256, 512, 2048), (1024, 1024, 1024))
#: A product that takes so long is the largest of its layout that is timed in every round: in larger ones the time would
#: go. One more is timed once, with the long sums of a step's largest: at 512 x 512 a sum of 512 came at 1.2 GFLOP/s,
#: one of 1408 at 0.87 and one of 8192 at 0.84.
_SLOW_PRODUCT_S, _LOW_DEEP = 0.05, (512, 2048, 512)


def low_product_cases(pool: Pool) -> Iterator[Case]:
    """Make cases of products in the pool's dtype by layout: FLOP/s against the FLOP of one, up to where it is slow."""
    for layout in LAYOUTS:
        for shape in _LOW_SHAPES:
            yield (case := _low_product(pool, shape, layout))
            case.run()  # compiles the kernel
            start = time.perf_counter()
            case.run()
            if time.perf_counter() - start > _SLOW_PRODUCT_S:
                yield _low_product(pool, _LOW_DEEP, layout)
                break


def _low_product(pool: Pool, shape: tuple[int, int, int], layout: str) -> Case:
    flops = 2.0 * math.prod(shape)
    key = f"matmul.{layout}.{str(pool.dtype).removeprefix('torch.')}"
    return Case(key, flops, flops, _product(pool.cut, *shape, layout))


def _product(place: _Place, m: int, k: int, n: int, layout: str) -> Callable[[], object]:
    left = place("a", m, k) if layout[0] == "N" else place("a", k, m).t()
    right = place("b", k, n) if layout[1] == "N" else place("b", n, k).t()
    return bind_call("aten.mm.default", (left, right), (place("o", m, n),))


def batched_cases(pool: Pool, key: str = "bmm") -> Iterator[Case]:
    """Make cases of products of many small matrices: FLOP/s against the FLOP of one."""
    for side in _BATCHED:
        count = max(4, min(64, (1 << 20) // side**2))
        operands = (pool.cut("a", count, side, side), pool.cut("b", count, side, side))
        each = 2.0 * side**3
        yield Case(
            key, each, each * count, bind_call("aten.bmm.default", operands, (pool.cut("o", count, side, side),))
        )


def attention_cases(pool: Pool, suffix: str = "") -> Iterator[Case]:
    """Make cases of attention, forward and backward: FLOP/s of what is not masked, by the FLOP of one head."""
    if pool.device.type != "cpu":
        yield from _cuda_attention_cases(pool)
        return
    for is_causal, form in ((True, ""), (False, f".{WHOLE}")):
        for shape in _ATTENTION if is_causal else _WHOLE_ATTENTION:
            yield from _cpu_attention(pool, shape, is_causal, f"{form}{suffix}")


def _cpu_attention(pool: Pool, shape: tuple[int, int, int, int], is_causal: bool, suffix: str) -> Iterator[Case]:
    batch, heads, length, dim = shape
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    q, k, v, grad = pool.cut("a", 4, batch, length, heads, dim).transpose(2, 3)
    places = list(pool.cut("o", 3, batch, length, heads, dim).transpose(2, 3))
    stats = torch.empty(batch, length, heads).transpose(1, 2)
    each = (2.0 if is_causal else 4.0) * length * length * dim
    forward = bind_call(f"{name}.default", (q, k, v, 0.0, is_causal), (places[0], stats))
    forward()
    out = pool.cut("b", batch, length, heads, dim).transpose(1, 2).copy_(places[0])
    backward = bind_call(f"{name}_backward.default", (grad, q, k, v, out, stats, 0.0, is_causal), places)
    yield Case(f"attention{suffix}", each, each * batch * heads, forward)
    yield Case(f"attention_backward{suffix}", 2.5 * each, 2.5 * each * batch * heads, backward)


def _heads(
    batch: int, heads: int, length: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Draw q, k, v and a gradient, each [batch, heads, length, dim] as a projection leaves it."""
    drawn = torch.rand(4, batch, length, heads, dim, dtype=dtype, device=device)
    return tuple(t.transpose(1, 2) for t in drawn)


def _cuda_attention_cases(pool: Pool) -> Iterator[Case]:
    """Make cases of the kernels ``lading.ir.retarget`` takes: flash in 16 bits, memory-efficient in float32."""
    flash, efficient = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
    half = getattr(torch, base_dtype(pool.device))
    if torch.cuda.get_device_capability(pool.device) >= (8, 0):  # flash attention needs Ampere
        for shape in _CUDA_ATTENTION:
            yield from _cuda_attention(pool, shape, flash, half, ("attention", "attention_backward"))
        for shape in _CUDA_ATTENTION:
            yield from _cuda_attention(pool, shape, efficient, torch.float32, (efficient, f"{efficient}_backward"))
        return
    for shape in _CUDA_ATTENTION:
        yield from _cuda_attention(pool, shape, efficient, half, ("attention", "attention_backward"))


def _cuda_attention(
    pool: Pool, shape: tuple[int, int, int, int], name: str, dtype: torch.dtype, keys: tuple[str, str]
) -> Iterator[Case]:
    batch, heads, length, dim = shape
    q, k, v, grad = _heads(*shape, dtype, pool.device)
    places = [torch.empty_like(q) for _ in range(3)]
    is_flash = "flash" in name
    rows = length if is_flash else -(-length // 32) * 32
    stats = torch.empty(batch, heads, rows, device=pool.device)
    kind = torch.uint64 if is_flash else torch.int64
    zeros = torch.zeros(2, dtype=torch.int64, device=pool.device).view(kind)
    state = (zeros, zeros[0])
    args = (q, k, v, 0.0, True, False) if is_flash else (q, k, v, None, True, 0.0, True)
    outs = (places[0], stats, *(None,) * (7 if is_flash else 2))
    forward = bind_call(f"aten.{name}.default", args, outs)
    forward()
    out = places[0].clone()
    back = (
        (grad, q, k, v, out, stats, None, None, length, length, 0.0, True, *state)
        if is_flash
        else (grad, q, k, v, None, out, stats, state[1], state[1], 0.0, (True, True, True, False), True)
    )
    backward = bind_call(f"aten.{name}_backward.default", back, (*places, *(() if is_flash else (None,))))
    each = 2.0 * length * length * dim
    yield Case(keys[0], each, each * batch * heads, forward)
    yield Case(keys[1], 2.5 * each, 2.5 * each * batch * heads, backward)


def dtype_cases(pool: Pool) -> Iterator[tuple[str, Case]]:
    """Make cases of one product in each floating dtype, for the ratio of their peaks; returned with the dtype."""
    side = 256 if pool.device.type == "cpu" else 4096
    names = ("float32", "float64", "bfloat16", "float16")
    emulated = {"bfloat16"} - {base_dtype(pool.device)} if pool.device.type == "cuda" else set[str]()
    for name in (n for n in names if n not in emulated):
        a, b, out = (torch.rand(3, side, side, device=pool.device).to(getattr(torch, name))).unbind()
        flops = 2.0 * side**3
        yield name, Case(name, flops, flops, bind_call("aten.mm.default", (a, b), (out,)))


@dataclass(frozen=True, slots=True)
class ProductFit:
    """Model ``seconds = overhead + flops / (peak * efficiency(flops) * prod d / (d + skinny_dim))``, with its error."""

    peak: float
    efficiency: Curve
    skinny_dim: float
    mean_error: float


def fit_products(products: Sequence[TimedProduct], overhead_s: float) -> ProductFit:
    """Fit timed products by least squares on the logarithm of the rate; takes the best of all candidates of skinny_dim.

    Args:
        overhead_s: Seconds that any operation takes.
    Raises:
        ConfigError: fewer products than the curve has points.
    """
    if len(products) < 4:
        raise ConfigError(f"expected at least 4 timed products, got {len(products)}")
    fits = [_fit(products, overhead_s, skinny) for skinny in (0.0, *(0.5 * 1.25**i for i in range(26)))]
    return min(fits, key=lambda fit: fit.mean_error)


def _fit(products: Sequence[TimedProduct], overhead_s: float, skinny: float) -> ProductFit:
    target: list[float] = []
    weight: list[float] = []
    for p in products:
        seconds = max(p.seconds - overhead_s, 0.05 * p.seconds)
        share = math.prod(d / (d + skinny) for d in (p.m, p.k, p.n))
        target.append(math.log(p.flops / seconds / share))
        weight.append(seconds / p.seconds)
    knots = _knots([p.flops for p in products])
    hats = torch.tensor([_hat(math.log(p.flops), knots) for p in products], dtype=torch.float64)
    scale = torch.tensor(weight, dtype=torch.float64).unsqueeze(1)
    wanted = torch.tensor(target, dtype=torch.float64).unsqueeze(1)
    values = torch.linalg.lstsq(hats * scale, wanted * scale).solution
    error = (((hats @ values - wanted) * scale).abs().sum() / scale.sum()).item()
    peak = max(p.flops / p.seconds for p in products)
    rates = [math.exp(v) for v in values.squeeze(1).tolist()]
    curve = Curve(size=tuple(math.exp(k) for k in knots), rate=tuple(r / peak for r in rates))
    return ProductFit(peak, curve, skinny, error)


def _knots(flops: Sequence[float]) -> list[float]:
    """Logarithms of evenly spaced sizes, each with a product within its reach."""
    low, high = math.log(min(flops)), math.log(max(flops))
    count = max(2, round((high - low) / math.log(10) * _KNOTS_PER_DECADE) + 1)
    return [low + (high - low) * i / (count - 1) for i in range(count)]


def _hat(x: float, knots: Sequence[float]) -> list[float]:
    """Weights of linear interpolation at ``x``, one for each knot."""
    step = knots[1] - knots[0]
    return [max(0.0, 1.0 - abs(x - knot) / step) for knot in knots]
