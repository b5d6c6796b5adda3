"""Replicas on the ranks of this host: Lading's Trainer beside DistributedDataParallel, and its predictions beside both.

    lading probe --ranks 2 --out machine.toml
    torchrun --nproc-per-node 2 benchmarks/ranks/replicas.py machine.toml [--steps N] [--json FILE]

Every rank trains the same model by both, in turns of a few steps, so that both meet the same moments of the host. Both
reduce in buckets, over gloo; DDP has torch's defaults and AdamW's fused kernel, as Lading's has. The peak is what a
Trainer takes beforehand, alone in its process, of the rank with more. A model with a share of its memory is trained by
Lading alone, where plain replicas need all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tools.batches import random_batch
from torch.nn.parallel import DistributedDataParallel

import lading
from lading.models.reference import build_model, model_class
from lading.units import MiB

_LLAMA = {"num_layers": 6, "dim": 384, "num_heads": 6, "num_kv_heads": 6, "hidden_dim": 1024, "vocab_size": 4096}
_GPT = {"num_layers": 6, "dim": 384, "num_heads": 6, "vocab_size": 4096}
_MOE = {
    "num_layers": 4, "dim": 256, "num_heads": 4, "num_kv_heads": 4, "hidden_dim": 512, "num_experts": 8,
    "num_active": 2, "vocab_size": 2048,
}  # fmt: skip
#: Name, sizes, sequences and tokens of a rank's batch, share of the memory that keeping everything needs.
CASES: tuple[tuple[str, dict[str, Any], int, int, str], ...] = (
    ("llama", _LLAMA, 4, 128, "100%"),
    ("llama", _LLAMA, 4, 128, "60%"),
    ("gpt", _GPT, 8, 64, "100%"),
    ("gpt", _GPT, 8, 64, "60%"),
    ("moe", _MOE, 4, 64, "100%"),
)


@dataclass(frozen=True)
class Row:
    """A case: medians of seconds, bytes of the rank with more."""

    model: str
    share: str
    buckets: int
    ddp_s: float
    lading_s: float
    predicted_s: float
    peak_bytes: int
    predicted_bytes: int
    budget_bytes: int
    same_loss: bool


def run_case(name: str, sizes: dict[str, Any], rows: int, tokens: int, share: str, machine: str, steps: int) -> Row:
    """Train one case by both; called on all ranks."""
    rank = dist.get_rank()

    def batch(step: int) -> Any:
        return random_batch(name, {**sizes, "max_seq_len": tokens}, rows=rows, tokens=tokens, seed=1000 * step + rank)

    def made() -> torch.nn.Module:
        torch.manual_seed(0)
        return build_model(name, **sizes, max_seq_len=tokens)

    loss_fn = model_class(name).loss
    graph = lading.capture(made(), batch(0), loss_fn)
    plan = lading.plan(graph, machine, budget=share, cache=False)
    peak = _peak_bytes(plan, graph, made(), [batch(step) for step in range(4)])
    ddp = _ddp(made()) if share == "100%" else None
    seconds: dict[str, list[float]] = {"ddp": [], "lading": []}
    losses: dict[str, list[float]] = {"ddp": [], "lading": []}
    with tempfile.TemporaryDirectory() as folder, _trainer(plan, graph, made(), folder) as trainer:
        for step in range(steps):
            given = batch(step)
            dist.barrier()
            started = time.perf_counter()
            losses["lading"].append(trainer.step(given))
            seconds["lading"].append(time.perf_counter() - started)
            if ddp is None:
                continue
            dist.barrier()
            started = time.perf_counter()
            loss = _ddp_step(*ddp, loss_fn, given)
            seconds["ddp"].append(time.perf_counter() - started)
            dist.all_reduce(loss)
            losses["ddp"].append(float(loss) / dist.get_world_size())
    same = all(abs(a - b) < 1e-4 for a, b in zip(losses["lading"], losses["ddp"], strict=False))
    return Row(
        name, share, sum("REDUCE_GRAD" in line for line in plan.program),
        statistics.median(seconds["ddp"][2:] or [0.0]), statistics.median(seconds["lading"][2:]), plan.step_s, peak,
        plan.peak_bytes["device"], plan.budgets["device"], same,
    )  # fmt: skip


def _trainer(plan: lading.Plan, graph: lading.StepGraph, model: torch.nn.Module, folder: str) -> lading.Trainer:
    return lading.Trainer(plan, graph, model, folder=folder, threads=1, optimizer=lading.AdamW(lr=1e-3))


def _peak_bytes(plan: lading.Plan, graph: lading.StepGraph, model: torch.nn.Module, batches: Sequence[Any]) -> int:
    """Most bytes that any rank's Trainer takes over a few steps."""
    with tempfile.TemporaryDirectory() as folder, _trainer(plan, graph, model, folder) as trainer:
        for given in batches:
            trainer.step(given)
        peak = torch.tensor(float(trainer.peak_bytes), dtype=torch.float64)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def _ddp(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    wrapped = DistributedDataParallel(model)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-3, fused=True)


def _ddp_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any, given: Any) -> torch.Tensor:
    """Run one step as anyone would write it; returns the rank's loss in float64."""
    loss = loss_fn(model, given)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach().double()


def main() -> None:
    """Run all cases and print a table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows: list[Row] = []
    for name, sizes, count, tokens, share in CASES:
        row = run_case(name, sizes, count, tokens, share, args.machine, args.steps)
        rows.append(row)
        if dist.get_rank() == 0:
            ddp = f"{row.ddp_s * 1e3:7.1f}" if row.ddp_s else "      -"
            print(
                f"{row.model:6} {row.share:>4}  buckets {row.buckets}  DDP {ddp} ms  "
                f"Lading {row.lading_s * 1e3:7.1f} ms  "
                f"predicted {row.predicted_s * 1e3:7.1f} ({row.predicted_s / row.lading_s - 1:+.0%})  "
                f"peak {row.peak_bytes / MiB:6.1f} of {row.budget_bytes / MiB:6.1f} MiB "
                f"(predicted {row.predicted_bytes / MiB:6.1f}, {row.predicted_bytes / row.peak_bytes - 1:+.1%})  "
                f"losses {'as DDP' if row.same_loss else 'DIFFER'}",
                flush=True,
            )
    if args.json is not None and dist.get_rank() == 0:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
