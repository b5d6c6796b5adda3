"""Shards on the ranks of this host: Lading's Trainer with ZeRO 2 and 3 beside stock FSDP2, memory and seconds.

    lading probe --ranks 2 --out machine.toml
    torchrun --nproc-per-node 2 benchmarks/ranks/shards.py machine.toml [--steps N] [--json FILE]

Every rank trains the same model each way, one after another for its peak, then all in turns of one step, so that they
meet the same moments of the host. FSDP2 gathers a block at a time and drops it after forward, or keeps it ("never"),
with AdamW's fused kernel, which Lading has too. The peak is the highest resident set above that before, of the rank
with more: of FSDP2 once its parameters are cut, so that the whole model does not count, of a Trainer what it takes.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tools.batches import random_batch
from torch.distributed.fsdp import fully_shard

import lading
from lading.models.reference import build_model, model_class
from lading.runtime.resident import PeakMeter, resident_bytes, trim
from lading.units import MiB

_LLAMA = {"num_layers": 6, "dim": 384, "num_heads": 6, "num_kv_heads": 6, "hidden_dim": 1024, "vocab_size": 4096}
_GPT = {"num_layers": 6, "dim": 384, "num_heads": 6, "vocab_size": 4096}
#: Name, sizes, sequences and tokens of a rank's batch.
MODELS = (("llama", _LLAMA, 4, 64), ("gpt", _GPT, 4, 64))
#: Layouts, and shares of the memory that keeping everything needs in them.
PLANS = (("zero2", "100%"), ("zero3", "100%"), ("zero3", "80%"), ("zero3", "60%"))
_WARM_UP = 3


@dataclass(frozen=True)
class Row:
    """Way to train a model: median seconds of a step, bytes of the rank with more; 0 where nothing is predicted."""

    model: str
    way: str
    step_s: float
    peak_bytes: int
    budget_bytes: int = 0
    predicted_bytes: int = 0
    predicted_s: float = 0.0
    unsharded_again: int = 0
    loss: float = 0.0


def _most(value: float) -> float:
    highest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return float(highest)


def _clean() -> None:
    """Give memory of what ran before back to the system."""
    gc.collect()
    trim()
    dist.barrier()


def _fsdp(name: str, model: torch.nn.Module, reshard: bool) -> Callable[[Any], float]:
    """Cut a model over the ranks as anyone would, and return what makes a step."""
    for block in model.get_submodule("layers").children():
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    optimizer, loss_fn = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), model_class(name).loss

    def step(given: Any) -> float:
        loss = loss_fn(model, given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def _fsdp_peak_bytes(name: str, made: Callable[[], torch.nn.Module], reshard: bool, batches: list[Any]) -> int:
    _clean()
    meter, before = PeakMeter(), resident_bytes()
    step = _fsdp(name, made(), reshard)
    _clean()
    meter.reset()
    for given in batches:
        step(given)
    peak = meter.peak_bytes() - before
    meter.close()
    return int(_most(peak))


def _peak_bytes(
    plan: lading.Plan, graph: lading.StepGraph, made: Callable[[], torch.nn.Module], folder: str, batches: list[Any]
) -> int:
    _clean()
    with lading.Trainer(plan, graph, made(), folder=folder, threads=1) as trainer:
        for given in batches:
            trainer.step(given)
        return int(_most(trainer.peak_bytes))


def run_model(name: str, sizes: dict[str, Any], rows: int, tokens: int, machine: str, steps: int) -> list[Row]:
    """Train one model each way; called on all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def batch(step: int) -> Any:
        return random_batch(name, {**sizes, "max_seq_len": tokens}, rows=rows, tokens=tokens, seed=1000 * step + rank)

    def made() -> torch.nn.Module:
        torch.manual_seed(0)
        return build_model(name, **sizes, max_seq_len=tokens)

    graph = lading.capture(made(), batch(0), model_class(name).loss)
    plans = {
        f"{zero} {share}": lading.plan(graph, machine, budget=share, cache=False, layout=f"dp{ranks},{zero}")
        for zero, share in PLANS
    }
    batches = [batch(step) for step in range(_WARM_UP)]
    peaks: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way, plan in plans.items():
            peaks[way] = _peak_bytes(plan, graph, made, folder, batches)
        for way, reshard in (("FSDP2", True), ("FSDP2 never", False)):
            peaks[way] = _fsdp_peak_bytes(name, made, reshard, batches)
        with ExitStack() as stack:
            ways = {way: _fsdp(name, made(), way == "FSDP2") for way in ("FSDP2", "FSDP2 never")}
            for way, plan in plans.items():
                rule = lading.AdamW(lr=1e-3)
                room = stack.enter_context(tempfile.TemporaryDirectory())
                opened = lading.Trainer(plan, graph, made(), folder=room, threads=1, optimizer=rule)
                ways[way] = stack.enter_context(opened).step
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            loss: dict[str, float] = {}
            for number in range(steps):
                given = batch(number)
                for way, step in ways.items():
                    dist.barrier()
                    started = time.perf_counter()
                    loss[way] = step(given)
                    seconds[way].append(time.perf_counter() - started)
    return [_row(name, way, seconds[way], peaks[way], plans.get(way), loss[way]) for way in ways]


def _row(name: str, way: str, seconds: list[float], peak: int, plan: lading.Plan | None, loss: float) -> Row:
    row = Row(name, way, statistics.median(seconds[2:]), peak, loss=loss)
    if plan is None:
        return row
    return dataclasses.replace(
        row,
        budget_bytes=plan.budgets["device"],
        predicted_bytes=plan.peak_bytes["device"],
        predicted_s=plan.step_s,
        unsharded_again=sum("RECOMPUTE network" in line for line in plan.program),
    )


def main() -> None:
    """Run all models and print a table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows: list[Row] = []
    for name, sizes, count, tokens in MODELS:
        made = run_model(name, sizes, count, tokens, args.machine, args.steps)
        rows += made
        for row in made if dist.get_rank() == 0 else ():
            said = f"predicted {row.predicted_s * 1e3:7.1f} ms, {row.predicted_bytes / MiB:6.1f} MiB "
            said += f"({row.predicted_bytes / row.peak_bytes - 1:+.1%}) of {row.budget_bytes / MiB:6.1f}, "
            said += f"{row.unsharded_again} unsharded again"
            print(
                f"{row.model:6} {row.way:12} {row.step_s * 1e3:7.1f} ms  peak {row.peak_bytes / MiB:6.1f} MiB  "
                f"{said if row.budget_bytes else ''}",
                flush=True,
            )
    if args.json is not None and dist.get_rank() == 0:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
