"""The probe: a short one gives a whole machine; the fit recovers what made the times; disks fail with advice."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.machines import unsourced
from tests.runtime.cases import DISK

from lading.catalog.load import machine_from_dict, machine_to_toml
from lading.errors import ConfigError, StorageError
from lading.ir.graph import OpKind
from lading.ir.machine import COLD_PRODUCT, Machine
from lading.prepare import plan
from lading.runtime import probe as runtime_probe
from lading.runtime import probe_cases, probe_disk
from lading.runtime.host import host_id
from lading.runtime.probe import (
    SHAPES,
    LoadMeter,
    TimedProduct,
    _quiet_rounds,
    busy_seconds,
    fit_products,
    low_product_cases,
    probe,
    worked_seconds,
)
from lading.runtime.probe_cases import (
    _DISTURBANCE_BYTES,
    _GPU_MAKERS,
    Case,
    Pool,
    Stopwatch,
    _disturbance_bytes,
    flush_bytes,
)
from lading.runtime.tiers import PIECE_BYTES
from lading.tracing.trace import capture
from lading.units import KiB, MiB


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """One round of everything, of small sizes: bfloat16 takes long where the processor does not multiply it."""
    folder = tmp_path_factory.mktemp("disk")
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, sizes in (("_ATTENTION", 2), ("_LOW_SHAPES", 2), ("_BATCHED", 3), ("SHAPES", 4)):
            patch.setattr(runtime_probe, name, getattr(runtime_probe, name)[:sizes])
        patch.setitem(_DISTURBANCE_BYTES, "cpu", MiB)
        patch.setattr(runtime_probe, "_TRIES", 1)  # other tests load the host
        patch.setattr(runtime_probe, "DiskMeter", partial(probe_disk.DiskMeter, file_bytes=32 * MiB))
        found = probe(folder=folder, threads=1, seconds=0.5, progress=lines.append)
    assert list(folder.iterdir()) == []
    assert len(lines) >= 3
    return found


@pytest.mark.parametrize(
    ("own", "shared", "disturbed"),
    [(1, 32, 8), (2, 260, 24), (16, 32, 24), (4, 16, 8), (1, 0, 24)],
)
def test_what_runs_before_a_sample_leaves_most_of_the_shared_cache(
    own: int, shared: int, disturbed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_cases, "cache_bytes", lambda level: {2: own, 3: shared}[level] * MiB)
    assert _disturbance_bytes("cpu") == disturbed * MiB
    assert _disturbance_bytes("cuda") == _DISTURBANCE_BYTES["cuda"]


@pytest.mark.long
def test_a_probe_is_a_complete_machine(machine: Machine) -> None:
    computed = {OpKind.MATMUL, OpKind.CONVOLUTION, OpKind.COLLECTIVE, OpKind.VIEW}
    assert {kind.value for kind in OpKind if kind not in computed} <= machine.device.rates.keys()
    assert machine.host_id == host_id()
    assert machine.device.num_threads == 1
    assert {"float32", "bfloat16"} <= machine.device.peak_flops_per_s.keys()
    assert unsourced(machine) == ()
    assert machine_from_dict(tomllib.loads(machine_to_toml(machine)), "probe") == machine


def test_cold_operands_are_measured_where_the_system_says_what_caches_there_are(machine: Machine) -> None:
    device = machine.device
    assert device.cache_bytes == flush_bytes()[0]
    assert bool(device.cold_rates) == bool(device.cache_bytes)
    if device.cold_rates:
        assert {"elementwise", "copy", "step", "norm"} <= device.cold_rates.keys() <= {*device.rates, COLD_PRODUCT}


@pytest.mark.parametrize(("shared", "cache", "copied"), [(32, 32, 40), (260, 64, 80), (0, 2, 2.5)])
def test_what_makes_operands_cold_overwrites_the_cache(
    shared: int, cache: int, copied: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_cases, "cache_bytes", lambda level: {2: 2, 3: shared}[level] * MiB)
    assert flush_bytes() == (cache * MiB, copied * MiB)


def test_a_step_meets_the_mean_and_beside_others_the_lower_quartile_is_kept() -> None:
    """The slowest sample counts as the one before it; of two samples both count."""
    watch = Stopwatch([Case("x", 1.0, 1.0, lambda: None)], torch.device("cpu"))
    watch.resume_from([[50.0, 1.0, 4.0, 2.0, 3.0]])
    assert watch.seconds(quiet=True) == [(1 + 2 + 3 + 4 + 4) / 5]
    assert watch.seconds(quiet=False) == [2.0]
    watch.resume_from([[1.0, 5.0]])
    assert watch.seconds(quiet=True) == [3.0]
    watch.resume_from([[1.0] * 38 + [100.0, 200.0]])
    assert watch.seconds(quiet=True) == [1.0], "of 40 samples two are the slowest twentieth"


def test_a_sample_that_lost_its_processor_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    losses = iter([0, 1, 1, 1])  # before and after: lost one, then none
    watch = Stopwatch([Case("x", 1.0, 1.0, lambda: calls.append(1))], torch.device("cpu"))
    calls.clear()
    monkeypatch.setattr(probe_cases, "_lost_processors", lambda: next(losses))
    watch._sample_on_cpu(watch.cases[0])
    assert len(calls) == 2


def test_probed_numbers_are_of_this_world(machine: Machine) -> None:
    device, disk = machine.device, machine.tiers[-1]
    assert 1e-7 < device.op_overhead_s < 1e-3
    assert 1e9 < device.peak_flops_per_s["float32"] < 1e13
    assert 1e8 < device.memory_bandwidth_bytes_per_s < 1e12
    assert 1 * MiB < device.overhead_bytes < 2000 * MiB
    assert 0 <= device.skinny_dim < 200
    assert disk.name == "disk"
    assert disk.mixed_read_bytes_per_s <= disk.read_bytes_per_s


def test_the_probe_leaves_the_thread_count_alone(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    with pytest.raises(StorageError):
        probe(folder=tmp_path / "missing", threads=before + 1, seconds=0.1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("seconds", "threads"), [(0.0, 1), (-1.0, None), (1.0, 0)])
def test_nonsense_is_refused(tmp_path: Path, seconds: float, threads: int | None) -> None:
    with pytest.raises(ConfigError, match="expected seconds > 0"):
        probe(folder=tmp_path, seconds=seconds, threads=threads)


def test_the_fit_recovers_the_model_that_made_the_times() -> None:
    overhead, peak, skinny = 5e-6, 1e11, 0.5 * 1.25**14

    def seconds(m: int, k: int, n: int) -> float:
        share = math.prod(d / (d + skinny) for d in (m, k, n))
        return overhead + 2 * m * k * n / (peak * share)

    fit = fit_products([TimedProduct(*shape, seconds(*shape)) for shape in SHAPES], overhead)
    assert fit.skinny_dim == pytest.approx(skinny)
    assert fit.mean_error < 1e-6
    for rate in fit.efficiency.rate:
        assert fit.peak * rate == pytest.approx(peak, rel=1e-3)


def test_of_a_layout_that_is_slow_one_product_of_a_long_sum_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_probe, "_LOW_SHAPES", ((8, 8, 8), (16, 16, 16), (32, 32, 32)))
    monkeypatch.setattr(runtime_probe, "_LOW_DEEP", (16, 64, 16))
    pool = Pool(torch.device("cpu"), torch.bfloat16)
    monkeypatch.setattr(runtime_probe, "_SLOW_PRODUCT_S", 60.0)
    assert [case.size for case in low_product_cases(pool)] == 3 * [2 * 8**3, 2 * 16**3, 2 * 32**3]
    monkeypatch.setattr(runtime_probe, "_SLOW_PRODUCT_S", 0.0)
    assert [case.size for case in low_product_cases(pool)] == 3 * [2 * 8**3, 2 * 16 * 64 * 16]


def test_a_case_that_takes_very_long_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"short": 0, "long": 0}

    def count(name: str) -> Case:
        def run() -> None:
            calls[name] += 1

        return Case(name, 1.0, 1.0, run)

    watch = Stopwatch([count("short"), count("long")], torch.device("cpu"), MiB)
    watch.resume_from([[1e-6], [1.0]])
    before = dict(calls)
    watch.run(60.0, max_rounds=2, repeats=3)
    assert calls["long"] == before["long"]
    assert calls["short"] >= before["short"] + 6  # a sample in which a processor was lost is taken again


def test_too_few_products_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 4"):
        fit_products([TimedProduct(8, 8, 8, 1.0)], 0.0)


def test_a_missing_folder_says_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="create it or choose another"):
        probe_disk.probe_disk(tmp_path / "missing", 0.1)


def test_a_full_disk_says_how_much_is_missing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="are free; free some space"):
        probe_disk.probe_disk(tmp_path, 0.1, file_bytes=1 << 60)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_the_file_is_removed_when_the_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError, match="it is full; choose a writable folder"):
        probe_disk.probe_disk(tmp_path, 0.1, file_bytes=32 * MiB)
    assert list(tmp_path.iterdir()) == []


def test_what_a_latency_takes_from_computing_is_what_small_moves_take_beyond_their_bytes() -> None:
    disk = dataclasses.replace(DISK, read_bytes_per_s=256 * KiB / 1e-3, latency_s=1e-3, read_slowdown=0.1)
    assert probe_disk._latency_slowdown(disk, 0.3) == pytest.approx(0.5)  # 0.6 ms of 2, of which the bytes take 0.1
    assert probe_disk._latency_slowdown(disk, 0.0) == 0.0


def test_work_beside_transfers_is_compared_with_the_same_work_before_and_after_them() -> None:
    """A host that became twice as slow meanwhile is not taken for one that transfers slow down."""
    samples, spent = probe_disk._Samples(idle=probe_disk._Spent(1.0, 0.1)), probe_disk._Spent
    samples.compare("write", spent(1.5, 0.3), spent(2.0, 0.2))
    samples.compare("read", spent(3.0), spent(2.0))  # of work that does not time its passes
    samples.compare("small_read", spent(2.1), spent(2.0), moving=0.25)  # in three quarters of it nothing was moved
    assert samples.times_longer["write"] == [1.0]
    assert samples.times_longer["passes beside writes"] == [pytest.approx(2.0)]
    assert samples.times_longer["read"] == [1.5]
    assert samples.times_longer["passes beside reads"] == []
    assert samples.times_longer["small_read"] == [pytest.approx(1.2)]
    assert probe_disk._slowdown([1.0, 9.0, 1.2]) == 0.2
    assert probe_disk._slowdown([0.8]) == probe_disk._slowdown([]) == 0.0


def _seconds(latency_s: float, rates: dict[str, float]) -> probe_disk._Samples:
    """Samples of a disk whose moves take a latency and their bytes at these rates."""
    samples = probe_disk._Samples()
    for key, times in samples.seconds.items():
        size = PIECE_BYTES if key in ("read", "write", "mixed_read", "mixed_write") else 256 * KiB
        times.append(latency_s + size / rates.get(key, 2e9))
    return samples


def test_a_move_is_its_latency_and_its_bytes() -> None:
    tier = probe_disk._tier(_seconds(1e-4, {"write": 5e9, "mixed_read": 1.5e9, "mixed_write": 3e9}))
    assert tier.latency_s == pytest.approx(1e-4)
    assert tier.read_bytes_per_s == pytest.approx(2e9, rel=1e-3)
    assert tier.write_bytes_per_s == pytest.approx(5e9, rel=1e-3)
    assert (tier.mixed_read_bytes_per_s, tier.mixed_write_bytes_per_s) == (pytest.approx(1.5e9), pytest.approx(3e9))


def test_a_small_move_is_never_faster_than_its_bytes_and_never_all_latency() -> None:
    """Where whole pieces came faster than small ones, and where small ones took no longer than their bytes."""
    samples = _seconds(1e-3, {"read": 1e12})
    tier = probe_disk._tier(samples)
    assert tier.latency_s == pytest.approx(0.9 * samples.seconds["small_read"][0], rel=1e-2)
    tier = probe_disk._tier(_seconds(0.0, {}))
    assert tier.latency_s == 1e-6


def test_directions_take_turns_where_small_reads_come_slowly_beside_whole_writes() -> None:
    disk = dataclasses.replace(DISK, read_bytes_per_s=2e9, mixed_read_bytes_per_s=1.5e9, latency_s=1e-5)
    assert probe_disk._turn_bytes(1.5e8, disk) == PIECE_BYTES
    assert probe_disk._turn_bytes(1.2e9, disk) == 0
    assert probe_disk._turn_bytes(1.5e8, dataclasses.replace(disk, latency_s=1.5e-3)) == 0  # that is its latency


def test_a_file_system_without_direct_access_is_measured_buffered_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(22, os.strerror(22))
        return real(path, flags, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    found = probe_disk.probe_disk(tmp_path, 0.1, file_bytes=32 * MiB)
    assert found.note.startswith("assumption: no O_DIRECT")
    assert found.tier.read_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


class Watch:
    """Stands for the stopwatch: each run has one sample, its number."""

    def __init__(self) -> None:
        self.runs: list[float] = []
        self.samples: list[list[float]] = [[]]

    def run(self, seconds: float) -> int:
        self.runs.append(seconds)
        self.samples = [[float(len(self.runs))]]
        return len(self.runs)

    def begin_again(self) -> list[list[float]]:
        return self.samples

    def resume_from(self, samples: list[list[float]]) -> None:
        self.samples = samples


@pytest.mark.parametrize(
    ("loads", "runs", "chosen", "load"),
    [
        ([0.05], [4.0], 1, 0.05),
        ([None], [4.0], 1, 0.0),
        ([0.5, 0.02], [4.0, 2.0], 2, 0.02),
        ([0.6, 0.3, 0.4], [4.0, 2.0, 2.0], 2, 0.3),
    ],
)
def test_a_loaded_host_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, loads: list[float | None], runs: list[float], chosen: int, load: float
) -> None:
    """The quietest of up to three tries counts."""
    left = iter(loads)
    monkeypatch.setattr(LoadMeter, "share", lambda self: next(left))
    watch, lines = Watch(), []
    assert _quiet_rounds(watch, 4.0, lines.append) == (chosen, load)  # pyright: ignore[reportArgumentType]
    assert watch.runs == runs
    assert watch.samples == [[float(chosen)]]
    assert len(lines) == len(runs) - 1


@pytest.mark.parametrize(("loads", "runs"), [([0.0], [1]), ([0.5, 0.0], [2]), ([0.5, 0.5, 0.5], [3])])
def test_what_is_timed_from_memory_while_others_load_the_host_is_timed_again(
    monkeypatch: pytest.MonkeyPatch, loads: list[float], runs: list[int]
) -> None:
    """Samples of a loaded period go, those of an earlier one stay."""
    left, count = iter([0.0, *loads]), iter(range(9))
    monkeypatch.setattr(LoadMeter, "share", lambda self: next(left))
    monkeypatch.setattr(Stopwatch, "_warm_sample", lambda self, case: [])
    monkeypatch.setattr(
        Stopwatch, "run", lambda self, seconds, repeats: [each.append(float(next(count))) for each in self._samples]
    )
    monkeypatch.setattr(runtime_probe, "flush_bytes", lambda: (MiB, MiB))
    watch = runtime_probe._ColdWatch([Case("mm", 8.0, 8.0, lambda: None, 64)])
    watch.run(1.0)
    watch.run(1.0)
    assert watch._watch is not None
    assert watch._watch.samples() == [[0.0, *map(float, runs)]]


@pytest.mark.long
def test_a_machine_that_stays_loaded_says_so_in_every_plan(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lading.runtime.probe._probe_device", lambda *_: (machine.device, None, 3, 0.6))
    monkeypatch.setattr(runtime_probe, "DiskMeter", partial(probe_disk.DiskMeter, file_bytes=32 * MiB))
    lines: list[str] = []
    found = probe(folder=tmp_path, threads=1, seconds=0.1, progress=lines.append)
    assert any("the host was busy" in line for line in lines)
    assert machine_from_dict(tomllib.loads(machine_to_toml(found)), "probe") == found
    graph = capture(torch.nn.Linear(4, 4), torch.zeros(2, 4), lambda model, batch: model(batch).sum())
    said = next(text for text in plan(graph, found, budget="100%").assumptions if "device.load" in text)
    assert "others took 60% of its processors: a step may take anything from 40% of the predicted time" in said


def test_load_is_what_others_work() -> None:
    """Idle time, waiting for a disk and other processors do not count; what a hypervisor took does."""
    lines = ["cpu  9 9 9 9 9 9 9 9 0 0", "cpu0 100 20 30 9999 999 4 5 6 0 0", "cpu1 1 0 0 0 0 0 0 0 0 0", "intr 5"]
    tick = os.sysconf("SC_CLK_TCK")
    assert busy_seconds(lines, [0]) == pytest.approx(165 / tick)
    assert busy_seconds(lines, [0, 1]) == pytest.approx(166 / tick)
    assert busy_seconds(lines, [2]) is None
    meter = LoadMeter()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    share = meter.share()
    assert share is None or 0.0 <= share <= 1.0


def test_processes_of_the_same_job_are_no_others() -> None:
    code = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        meter = LoadMeter((process.pid,))
        before_s = meter._read()
        end = time.monotonic() + 60
        while worked_seconds(process.pid) < 0.3 and time.monotonic() < end:
            time.sleep(0.01)
        after_s = meter._read()
        process.communicate(b"\n")
    if before_s is not None and after_s is not None:  # where the system tells
        assert after_s[2] - before_s[2] > 0.2
    assert worked_seconds(process.pid) == 0.0  # it is gone


@pytest.mark.parametrize("key", _GPU_MAKERS)
def test_kernels_of_a_gpu_alone_are_timed_with_places_for_their_results(key: str) -> None:
    name, args, outs = _GPU_MAKERS[key](Pool(torch.device("cpu")), 64 * KiB)

    def on_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    call = getattr(getattr(torch.ops.aten, name.split(".")[1]), name.split(".")[2])
    found = call(*map(on_meta, args))
    assert [(r.shape, r.dtype) for r in found] == [(out.shape, out.dtype) for out in outs]
