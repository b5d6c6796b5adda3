"""The memory manager, measured: what is written, what is allocated, what is in flight, and what another future costs.

    python benchmarks/out_of_core/memory_manager.py --folder F --json RESULTS.json          under two minutes

A small GPT trains in a quarter of what keep-all needs: on the CPU with a disk, and on the stand-in device (streams are
threads, ``--driver``) with half of what it puts away in host memory and the rest on the disk. Every transfer of the
Program is recorded as it happens, with its time, its buffers and a checksum of its bytes:

    clean copies     a write of bytes that the tier has at that place already, against all evictions
    allocations      page faults of a step and of its transfers, torch's allocations, the heap, mappings and buffers
    directions       seconds in which reads, writes and both were in flight, and bytes a second of each
    futures          a second shape and a step with a layer left out: planned, planned again, opened, switched to

``--machine`` names a probed machine; without it rates are made up, on which neither bytes nor allocations depend.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from sides import LR, Side, disk_bytes, stock_step
from torch.profiler import ProfilerActivity, profile

import lading
from lading.catalog.load import load_machine
from lading.ir.action import DEVICE, ActionKind
from lading.ir.graph import StepGraph
from lading.ir.machine import MEMORY, Device, Machine, Tier
from lading.ir.plan import Plan
from lading.models.loss import next_byte_loss
from lading.runtime import binding
from lading.runtime.resident import resident_bytes
from lading.tracing.initial import defer

SMALL = {"num_layers": 8, "dim": 384, "num_heads": 6, "vocab_size": 8192}
SMALLER = {"num_layers": 4, "dim": 384, "num_heads": 6, "vocab_size": 4096}
TINY = {"num_layers": 3, "dim": 256, "num_heads": 4, "vocab_size": 1024}
TOKENS, WARM_UP = 128, 3


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer that ended: by tier and direction, where it was, when, and a checksum of its bytes (0: none)."""

    tier: int
    reads: bool
    offset: int
    buffer: int
    size_bytes: int
    began_s: float
    ended_s: float
    faults: int
    checksum: int


@dataclass
class Recorder:
    """Records transfers of executors that are made while ``on``; ``sums`` takes checksums, which takes time."""

    transfers: list[Transfer] = field(default_factory=list)
    sums: bool = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Wrap the transfers of each Program that is bound inside."""
        bound_move = binding.bound_move

        def recorded(tier: Any, offset: int, memory: torch.Tensor, *, reads: bool) -> Callable[[], None]:
            run = bound_move(tier, offset, memory, reads=reads)
            return lambda: self._run(run, id(tier), offset, memory, reads=reads)

        with mock.patch.object(binding, "bound_move", recorded):
            yield

    def _run(self, run: Callable[[], None], tier: int, offset: int, memory: torch.Tensor, *, reads: bool) -> None:
        checksum = zlib.crc32(memory.numpy().data) if self.sums and not reads else 0
        faults, began_s = _thread_faults(), time.perf_counter()
        run()
        ended_s, faults = time.perf_counter(), _thread_faults() - faults
        if self.sums and reads:
            checksum = zlib.crc32(memory.numpy().data)
        place = (tier, reads, offset, memory.data_ptr(), len(memory))
        self.transfers.append(Transfer(*place, began_s, ended_s, faults, checksum))

    def taken(self) -> list[Transfer]:
        """Transfers since this was called last, in the order in which they ended."""
        taken, self.transfers = self.transfers, []
        return taken


def _thread_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def made_up() -> Machine:
    """A host with a disk, at round rates."""
    device = Device(
        name="made up", kind="cpu", memory_bytes=16 << 30, memory_bandwidth_bytes_per_s=2e10, op_overhead_s=5e-6,
        peak_flops_per_s={"float32": 1e11, "bfloat16": 1e11}, optimizer_elements_per_s=5e8, overhead_bytes=12 << 20,
    )  # fmt: skip
    disk = Tier(
        name="disk", kind="file", persistent=True, capacity_bytes=64 << 30, read_bytes_per_s=1.5e9,
        write_bytes_per_s=1.5e9, mixed_read_bytes_per_s=9e8, mixed_write_bytes_per_s=9e8, latency_s=1e-4,
    )  # fmt: skip
    return Machine(name="made up", date="2026-11-29", source="made up", device=device, tiers=(disk,))


def with_host(machine: Machine, driver: str) -> Machine:
    """The machine as a stand-in device behind a host."""
    disk = machine.tiers[-1]
    host = dataclasses.replace(disk, name="host", kind=MEMORY, persistent=False, capacity_bytes=4 << 30)
    device = dataclasses.replace(machine.device, kind=driver, overhead_bytes=0)
    return dataclasses.replace(machine, device=device, tiers=(host, disk))


def moved(plan: Plan) -> Mapping[str, int]:
    """Bytes that a plan moves in a step, by tier and direction."""
    return next(row for row in plan.policies if row.policy == plan.request.policy).moved_bytes


def evicted_bytes(trainer: lading.Trainer) -> int:
    """Bytes of all copies that leave the device in a step to come back, whether they are written or dropped.

    A storage that is fetched was evicted before, in this step or in the one before it.
    """
    program = trainer.program
    fetches = [a.storage for a in program.actions if a.kind is ActionKind.MOVE and a.target == DEVICE]
    away = {storage for slots in program.slots.values() for storage, _ in slots}
    return sum(binding.slot_bytes(program.graph.storages[s].size_bytes) for s in fetches if s in away)


def steady(trainer: lading.Trainer, recorder: Recorder, side: Side, steps: int) -> dict[str, Any]:
    """Bytes, faults, buffers and growth of the steps behind the first ones."""
    for number in range(WARM_UP):
        trainer.step(side.batch(number))
    first = {(each.buffer, each.size_bytes) for each in recorder.taken()}
    before = resident_bytes(), _mappings()
    rows: list[dict[str, int]] = []
    for number in range(WARM_UP, WARM_UP + steps):
        disk, faults, batch = disk_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt, side.batch(number)
        trainer.step(batch)
        after, transfers = disk_bytes(), recorder.taken()
        rows.append(
            {
                "read": after[0] - disk[0],
                "written": after[1] - disk[1],
                "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
                "transfer faults": sum(each.faults for each in transfers),
                "transfers": len(transfers),
                "new buffers": len({(each.buffer, each.size_bytes) for each in transfers} - first),
            }
        )
    growth = {"resident_bytes": resident_bytes() - before[0], "mappings": _mappings() - before[1]}
    return {
        "steps": steps,
        "buffers": len(first),
        **{key: _min_median_max([row[key] for row in rows]) for key in rows[0]},
        "growth over these steps": growth,
    }


def _min_median_max(values: Sequence[int]) -> Any:
    """One number where all are equal, else least, median and most."""
    return values[0] if len({*values}) == 1 else [min(values), statistics.median(values), max(values)]


def _mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def clean_writes(trainer: lading.Trainer, recorder: Recorder, side: Side, steps: int) -> dict[str, Any]:
    """Writes of bytes that the tier had already, by checksums of what was last there."""
    recorder.sums, known, writes, clean, clean_bytes = True, dict[tuple[int, int], int](), 0, 0, 0
    for number in range(steps):
        trainer.step(side.batch(100 + number))
        for each in recorder.taken():
            place = each.tier, each.offset
            if not each.reads and number:  # the first step tells what is where
                writes += 1
                clean += known.get(place) == each.checksum
                clean_bytes += each.size_bytes * (known.get(place) == each.checksum)
            known[place] = each.checksum
    recorder.sums = False
    return {"steps": steps - 1, "writes": writes, "of clean copies": clean, "bytes of clean copies": clean_bytes}


def directions(trainer: lading.Trainer, recorder: Recorder, side: Side, steps: int) -> dict[str, Any]:
    """Seconds of a step in which reads, writes and both were in flight, and the bytes a second of each."""
    seconds = dict.fromkeys(("reads alone", "writes alone", "both", "neither"), 0.0)
    carried = {name: [0.0, 0.0] for name in seconds}
    for number in range(steps):
        began_s, batch = time.perf_counter(), side.batch(200 + number)
        trainer.step(batch)
        transfers = recorder.taken()
        moments = sorted({began_s, time.perf_counter(), *(m for t in transfers for m in (t.began_s, t.ended_s))})
        for low, high in pairwise(moments):
            now = [t for t in transfers if t.began_s <= low and t.ended_s >= high and t.ended_s > t.began_s]
            reads, writes = any(t.reads for t in now), any(not t.reads for t in now)
            name = ("neither", "writes alone", "reads alone", "both")[2 * reads + writes]
            seconds[name] += high - low
            for t in now:
                carried[name][not t.reads] += t.size_bytes * (high - low) / (t.ended_s - t.began_s)
    return {
        name: {
            "seconds of a step": seconds[name] / steps,
            "bytes/s read, written": [size / max(seconds[name], 1e-9) for size in carried[name]],
        }
        for name in seconds
        if name != "neither"
    } | {"neither, seconds of a step": seconds["neither"] / steps}


def torch_allocations(step: Callable[[dict[str, torch.Tensor]], float], batch: dict[str, torch.Tensor]) -> list[int]:
    """Count and bytes of what torch's allocator gave to the thread that computes, in one step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(batch)
    results: Any = profiled.profiler
    sizes = [each.nbytes() for each in results.kineto_results.events() if each.name() == "[memory]"]
    return [sum(size > 0 for size in sizes), sum(size for size in sizes if size > 0)]


def trained(machine: Machine, side: Side, options: argparse.Namespace, **budgets: str) -> dict[str, Any]:
    """Plan a quarter of the memory, train, and record; ``budgets`` are those of tiers."""
    graph = lading.capture(defer(side.module).model, side.batch(0), next_byte_loss)
    began = time.perf_counter()
    optimizer, recorder = lading.AdamW(lr=LR), Recorder()
    plan = lading.plan(graph, machine, budget=options.budget, cache=False, optimizer=optimizer, budgets=budgets)
    found: dict[str, Any] = {"plan": repr(plan), "planned_s": time.perf_counter() - began}
    with tempfile.TemporaryDirectory(dir=options.folder) as swap, recorder.on():
        trainer = lading.Trainer(plan, graph, side.module(), folder=swap, threads=side.threads, optimizer=optimizer)
        with trainer:
            found |= {"predicted": dict(moved(plan)), "evicted": evicted_bytes(trainer)}
            found |= {"steady": steady(trainer, recorder, side, options.steps)}
            found |= {"clean": clean_writes(trainer, recorder, side, 4)}
            found |= {"directions": directions(trainer, recorder, side, options.steps)}
            found |= {"torch allocations of a step": torch_allocations(trainer.step, side.batch(300))}
    return found


Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


def skipping(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Loss of the GPT without its second layer."""
    gpt: Any = model
    tokens_BT, wanted_BT = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    x_BTD = gpt.tokens(tokens_BT) + gpt.positions.weight[: tokens_BT.shape[1]]
    for number, layer in enumerate(gpt.layers):
        x_BTD = x_BTD if number == 1 else layer(x_BTD)
    return torch.nn.functional.cross_entropy(gpt.head(gpt.norm(x_BTD)).flatten(0, 1), wanted_BT.flatten())


def timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """Result of a call, and its seconds."""
    began = time.perf_counter()
    made = make()
    return made, time.perf_counter() - began


@contextmanager
def fresh_cache(folder: Path) -> Iterator[None]:
    """Make plans in a cache of their own, empty at first."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as cache,
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(Path(cache).resolve())}),
    ):
        yield


def futures(machine: Machine, side: Side, options: argparse.Namespace) -> dict[str, Any]:
    """Costs of a second shape and of a step with a layer left out: planned, opened, and switched to."""
    optimizer, module = lading.AdamW(lr=LR), defer(side.module).model
    short = dataclasses.replace(side, tokens=side.tokens // 2)
    graph, smaller = (lading.capture(module, each.batch(0), next_byte_loss) for each in (side, short))
    other = lading.capture(module, side.batch(0), skipping)
    found: dict[str, Any] = {}

    def plan(graph: StepGraph, others: Sequence[StepGraph] = ()) -> Plan:
        return lading.plan(graph, machine, budget=options.future_budget, optimizer=optimizer, others=others)

    with fresh_cache(options.folder):
        for name, call in {
            "the shape": lambda: plan(graph),
            "another shape, planned by itself": lambda: plan(smaller),
            "and a layer left out": lambda: plan(graph, [other]),
        }.items():
            (_, first), (_, second) = timed(call), timed(call)
            found[name] = {"planned first, s": first, "again, s": second}
        made = plan(graph, [other])
    steps: list[tuple[str, Side, Loss]] = [
        ("the shape", side, next_byte_loss),
        ("a smaller shape", short, next_byte_loss),
        ("a layer left out", side, skipping),
    ]
    settings: dict[str, Any] = {"threads": side.threads, "optimizer": optimizer, "others": [other]}
    seconds = list[float]()
    for shapes in ([], [smaller]):
        with tempfile.TemporaryDirectory(dir=options.folder) as swap:
            opened = lambda: lading.Trainer(made, graph, side.module(), folder=swap, shapes=shapes, **settings)  # noqa: B023, E731
            trainer, opening_s = timed(opened)
            seconds.append(opening_s)
            with trainer:
                if shapes:
                    found["switched"] = switched(trainer, steps, options.switches)
    found["opened, s"] = {"without another shape": seconds[0], "with": seconds[1]}
    found["switched"]["losses equal to plain PyTorch's"] = found["switched"].pop("losses") == plain_losses(
        side, steps, options.switches
    )
    return found


def in_order(steps: Sequence[Any], switches: int) -> Iterator[tuple[int, bool, Any]]:
    """Number of each step, whether it is another than the one before, and which: runs of two of each."""
    for number in range(2 * len(steps) * switches):
        yield number, number % 2 == 0, steps[number // 2 % len(steps)]


def switched(trainer: lading.Trainer, steps: Sequence[tuple[str, Side, Loss]], switches: int) -> dict[str, Any]:
    """Median seconds of steps of each kind, behind one of another kind and behind one of its own; and all losses."""
    seconds: dict[tuple[str, bool], list[float]] = {}
    losses = list[float]()
    for number, is_other, (name, side, loss) in in_order(steps, switches):
        batch = side.batch(number)
        value, took = timed(lambda: trainer.step(batch, loss=loss))  # noqa: B023
        losses.append(value)
        if number >= 2 * len(steps):
            seconds.setdefault((name, is_other), []).append(took)
    rows = {
        name: {
            "behind another, s": statistics.median(seconds[name, True]),
            "behind its own, s": statistics.median(seconds[name, False]),
        }
        for name, *_ in steps
    }
    return {**rows, "losses": losses}


def plain_losses(side: Side, steps: Sequence[tuple[str, Side, Loss]], switches: int) -> list[float]:
    """Losses of plain PyTorch in the same order."""
    module = side.module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=lading.AdamW().weight_decay, fused=True)
    return [
        stock_step(module, optimizer, loss_of)(each.batch(number))
        for number, _, (_, each, loss_of) in in_order(steps, switches)
    ]


def main() -> None:
    """Measure all of it, print it, and write it to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--driver", default="tests.test_open_tiers:stand_in")
    parser.add_argument("--budget", default="25%")
    parser.add_argument("--host-budget", default="30MB")
    parser.add_argument("--future-budget", default="50%")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--switches", type=int, default=8)
    parser.add_argument("--only", default="", choices=("", "disk", "device", "futures"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = made_up() if options.machine is None else load_machine(options.machine)
    side = Side(
        kind="lading", model="gpt", sizes=SMALL, tokens=TOKENS, precision="fp32", threads=options.threads,
        folder=str(options.folder),
    )  # fmt: skip
    began, found = time.perf_counter(), dict[str, Any]()
    behind = with_host(machine, options.driver)
    for name, measure in {
        "disk": lambda: trained(machine, side, options),
        "device": lambda: trained(behind, dataclasses.replace(side, sizes=SMALLER), options, host=options.host_budget),
        "futures": lambda: futures(machine, dataclasses.replace(side, sizes=TINY), options),
    }.items():
        if options.only and name != options.only:
            continue
        found[name] = measure()
        print(f"{time.perf_counter() - began:.0f} s", json.dumps({name: found[name]}, indent=1), flush=True)
    found |= {"seconds": time.perf_counter() - began, "torch": torch.__version__, "threads": options.threads}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
