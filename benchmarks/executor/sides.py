"""The sides of the comparison, each in a process of its own: what a user would write, and Lading.

A side is made, told to step, and asked for figures by ``serve``, which runs in the side's process.
"""

from __future__ import annotations

import gc
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tools.batches import random_batch
from torch.utils.checkpoint import checkpoint

from lading.catalog.load import machine_from_dict
from lading.config import SYNTHETIC, DataConfig, MemoryConfig, ModelConfig, Optimization, RunConfig
from lading.ir.graph import PERSISTENT
from lading.ir.plan import Plan
from lading.models.reference import build_model, model_class
from lading.optim.adamw import AdamW
from lading.prepare import plan_run
from lading.run import initial_values, prepare_plan
from lading.runtime.resident import PeakMeter, resident_bytes, trim
from lading.trainer import Trainer

LR, SEED = 1e-3, 0


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison: a way to train.

    Attributes:
        kind: "plain", "plain-compiled", "by-hand", "by-hand-in-backward", "lading" or "lading-compiled".
        budget: Budget of a Lading side: "100%" keeps everything.
        plan: File of a Lading side's plan, written if it is not there.
        limit_bytes: Bytes that the process may add from before its model on, page cache included; 0 for no limit.
    """

    kind: str
    model: str
    sizes: dict[str, int | float | bool]
    batch: int
    tokens: int
    threads: int
    machine: str
    folder: str
    plan: str
    budget: str = "100%"
    limit_bytes: int = 0


Step = Callable[[dict[str, torch.Tensor]], float]


def serve(side: Side, connection: Connection) -> None:
    """Make the side, say what it is, then run a step for every batch that comes; None ends it."""
    torch.set_num_threads(side.threads)
    try:
        step, facts, close = _planned(side) if side.kind.startswith("lading") else _plain(side)
        connection.send(facts)
    except Exception as error:
        connection.send({"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
        return
    while (seed := connection.recv()) is not None:
        batch = batch_of(side, seed)
        started, used = time.perf_counter(), time.process_time()
        loss = step(batch)
        seconds = time.perf_counter() - started
        connection.send({"seconds": seconds, "cpu": time.process_time() - used, "loss": loss})
    connection.send(close())


def batch_of(side: Side, seed: int) -> dict[str, torch.Tensor]:
    """A random batch, the same for the same seed."""
    return random_batch(side.model, side.sizes, rows=side.batch, tokens=side.tokens, seed=seed)


def _source(side: Side) -> dict[str, Any]:
    return {"source": SYNTHETIC} if side.model == "dit" else {}


def _sizes(side: Side) -> dict[str, Any]:
    return {**side.sizes} if side.model == "dit" else {**side.sizes, "max_seq_len": side.tokens}


class Cage:
    """A memory limit on this process from now on, by a control group; also what counts its memory.

    Attributes:
        holds: Whether there is one: it needs cgroup v1 and the right to make groups.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.holds = False
        self._before, self._meter = resident_bytes(), PeakMeter()
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next((line.split(":", 2)[2] for line in lines if ":memory:" in line), None)
        if own is None or not limit_bytes:
            return
        self.group = Path("/sys/fs/cgroup/memory") / own.strip("/") / f"lading-benchmark-{os.getpid()}"
        try:
            self.group.mkdir()
            (self.group / "memory.limit_in_bytes").write_text(str(limit_bytes))
            (self.group / "cgroup.procs").write_text(str(os.getpid()))
            self.holds = True
        except OSError:
            self.leave()

    def figures(self) -> dict[str, Any]:
        """Highest resident set above that at the start, and highest memory of the group (page cache included)."""
        peak = self._meter.peak_bytes() - self._before
        group = int((self.group / "memory.max_usage_in_bytes").read_text()) if self.holds else None
        return {"peak_rss_bytes": peak, "peak_group_bytes": group}

    def leave(self) -> None:
        """Back to the group above; the own one goes away."""
        (self.group.parent / "cgroup.procs").write_text(str(os.getpid()))
        self.group.rmdir()


def _planned(side: Side) -> tuple[Step, dict[str, Any], Callable[[], dict[str, Any]]]:
    """Lading: planned first, as ``lading train`` does, then the limit, then the values."""
    run = RunConfig(
        model=ModelConfig(name=side.model, sizes=_sizes(side)),
        data=DataConfig(sequence_length=side.tokens, batch_size=side.batch, **_source(side)),
        optimization=Optimization(steps=1, optimizer=AdamW(lr=LR), compile=side.kind == "lading-compiled"),
        memory=MemoryConfig(budget=side.budget, policy="keep-all" if side.budget == "100%" else "residency"),
        machine=side.machine,
        threads=side.threads,
        seed=SEED,
        out=side.folder,
    )
    if Path(side.plan).is_file():
        prepared = prepare_plan(Plan.load(Path(side.plan)), to_run=True)
    else:
        prepared = plan_run(run)
        prepared.plan.save(Path(side.plan))
    plan, graph = prepared.plan, prepared.program.graph
    machine = machine_from_dict(plan.request.machine_table, "the plan's machine")
    trim()
    limit = plan.budgets["device"] if side.limit_bytes else 0
    cage = None if plan.compiled else Cage(limit)
    trainer = Trainer(
        plan, prepared.step.captured, None, optimizer=AdamW(lr=LR), folder=side.folder, threads=side.threads,
        program=prepared.program,
    )  # fmt: skip
    cage = cage or Cage(limit)  # what the compiler takes belongs to the start of the process
    trainer.initialize(partial(initial_values, run, prepared.step.initial))
    held = sum(s.size_bytes for s in graph.storages if s.role in PERSISTENT)
    disk = next(t for t in machine.tiers if t.name == "disk")
    facts = {
        "predicted_s": plan.step_s, "bound_s": plan.lower_bound_s, "flops": graph.flops,
        "peak_flops_per_s": machine.device.peak_flops_per_s["float32"], "disk": asdict(disk),
        "persistent_bytes": held, "budget_bytes": plan.budgets["device"],
        "keep_all_bytes": plan.predictions.keep_all_bytes,
        "confined": cage.holds, "predicted_peak_bytes": plan.peak_bytes["device"],
        "num_regions": trainer.compiled[0], "num_compiled": trainer.compiled[1],
    }  # fmt: skip

    def close() -> dict[str, Any]:
        figures = cage.figures()
        trainer.close()
        if cage.holds:
            cage.leave()
        return figures

    return trainer.step, facts, close


def _plain(side: Side) -> tuple[Step, dict[str, Any], Callable[[], dict[str, Any]]]:
    """PyTorch, with the limit from before the model on: what the process loads for a first step does not count."""
    if side.limit_bytes:
        small = {"dim": 64, "num_heads": 1, "num_kv_heads": 1, "num_layers": 1, "vocab_size": 64}
        tiny = replace(side, batch=1, sizes={name: small.get(name, size) for name, size in side.sizes.items()})
        _step_of(tiny)(batch_of(tiny, 0))
    gc.collect()
    trim()
    cage = Cage(side.limit_bytes)
    step = _step_of(side)

    def close() -> dict[str, Any]:
        figures = cage.figures()
        if cage.holds:
            cage.leave()
        return figures

    return step, {"confined": cage.holds}, close


def _step_of(side: Side) -> Step:
    """A training step as in PyTorch's tutorials, compiled, or with the memory saved by hand."""
    torch.manual_seed(SEED)
    model = build_model(side.model, **_sizes(side))
    by_hand = side.kind.startswith("by-hand")
    loss_of = model_class(side.model).loss
    if side.kind == "plain-compiled":
        loss_of = torch.compile(loss_of)
    update = _optimizer(model, side) if by_hand else _whole(model)
    if by_hand:
        for layer in model.layers:  # pyright: ignore[reportGeneralTypeIssues]
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def step(batch: dict[str, torch.Tensor]) -> float:
        loss = loss_of(model, batch)
        loss.backward()
        update()
        return loss.item()

    return step


def _whole(model: torch.nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def _optimizer(model: torch.nn.Module, side: Side) -> Callable[[], None]:
    """AdamW whose states are a file mapped into memory; in the backward pass, one parameter at a time, or after it."""
    mapped = _Mapped([*model.parameters()], Path(side.folder) / f"states-{os.getpid()}")
    if side.kind == "by-hand":
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        for parameter in model.parameters():
            optimizer.state[parameter] = mapped.state(parameter)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return update
    optimizers = {p: torch.optim.AdamW([p], lr=LR, fused=True) for p in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        mapped.will_need_after(parameter)
        optimizers[parameter].step()
        parameter.grad = None

    for parameter, optimizer in optimizers.items():
        optimizer.state[parameter] = mapped.state(parameter)
        parameter.register_post_accumulate_grad_hook(hook)
    return lambda: None


class _Mapped:
    """Both moments of every parameter in one file, mapped shared; the next parameter's are asked for ahead."""

    def __init__(self, parameters: list[torch.Tensor], path: Path) -> None:
        page = mmap.PAGESIZE
        self._spans: dict[torch.Tensor, tuple[int, int]] = {}
        end = 0
        for parameter in parameters[::-1]:  # the order of the backward pass
            size = -(-8 * parameter.numel() // page) * page
            self._spans[parameter] = (end, size)
            end += size
        with path.open("w+b") as file:
            file.truncate(end)
            self._map = mmap.mmap(file.fileno(), end)
        path.unlink()
        self._next = dict(zip(parameters[:0:-1], parameters[-2::-1], strict=True))

    def state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        start, _ = self._spans[parameter]
        count = parameter.numel()
        moments = torch.frombuffer(self._map, dtype=torch.float32, count=2 * count, offset=start)
        first, second = (m.view(parameter.shape) for m in moments.split(count))
        return {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}

    def will_need_after(self, parameter: torch.Tensor) -> None:
        if parameter in self._next:
            start, size = self._spans[self._next[parameter]]
            self._map.madvise(mmap.MADV_WILLNEED, start, size)
