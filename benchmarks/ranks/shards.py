"""Shards on the ranks of this host: Lading's Trainer with ZeRO 2 and 3 beside stock FSDP2, memory and seconds.

    lading probe --ranks 2 --out machine.toml
    torchrun --nproc-per-node 2 benchmarks/ranks/shards.py machine.toml [--steps N]        # seconds, all ways in turns
    torchrun --nproc-per-node 2 benchmarks/ranks/shards.py machine.toml --peak "gpt zero3 100%"   # memory, one way

FSDP2 gathers a block at a time and drops it after forward, or keeps it ("never"), with AdamW's fused kernel, which
Lading has too. Seconds are of all ways in turns of one step, so that they meet the same moments of the host. Memory is
measured in a launch for each way, as what one has freed would hide what the next takes: the highest resident set above
that before, of the rank with more; of FSDP2 once its parameters are cut, so that the whole model does not count.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
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
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {"llama": (_LLAMA, 4, 64), "gpt": (_GPT, 4, 64)}
#: Layouts, and shares of the memory that keeping everything needs in them.
PLANS = (("zero2", "100%"), ("zero3", "100%"), ("zero3", "80%"), ("zero3", "60%"))
_WARM_UP = 3


def _most(value: float) -> float:
    highest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return float(highest)


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


class _Model:
    """A model of ``MODELS``, its batches, and its plans by the name of the way."""

    def __init__(self, name: str, machine: str) -> None:
        self.name, self.machine = name, machine
        self.sizes, self.rows, self.tokens = MODELS[name]
        self.graph = lading.capture(self.made(), self.batch(0), model_class(name).loss)

    def made(self) -> torch.nn.Module:
        """Build the model, with the same values each time."""
        torch.manual_seed(0)
        return build_model(self.name, **self.sizes, max_seq_len=self.tokens)

    def batch(self, step: int) -> Any:
        """Draw this rank's batch of a step."""
        sizes = {**self.sizes, "max_seq_len": self.tokens}
        return random_batch(self.name, sizes, rows=self.rows, tokens=self.tokens, seed=1000 * step + dist.get_rank())

    def plan(self, layout: str, share: str) -> lading.Plan:
        """Plan it in a layout for a share of what keeping everything needs there."""
        spread = f"dp{dist.get_world_size()},{layout}"
        return lading.plan(self.graph, self.machine, budget=share, cache=False, layout=spread)

    def trainer(self, plan: lading.Plan, folder: str) -> lading.Trainer:
        """Make the Trainer of a plan."""
        rule = lading.AdamW(lr=1e-3)
        return lading.Trainer(plan, self.graph, self.made(), folder=folder, threads=1, optimizer=rule)


def peak(model: _Model, way: str) -> str:
    """Train one way for a few steps; returns its memory in words."""
    batches = [model.batch(step) for step in range(_WARM_UP)]
    plan = None if way.startswith("FSDP2") else model.plan(*way.split())
    gc.collect()
    trim()
    if plan is None:
        meter, before = PeakMeter(), resident_bytes()
        step = _fsdp(model.name, model.made(), way == "FSDP2")
        gc.collect()
        trim()
        meter.reset()
        for given in batches:
            step(given)
        return f"peak {_most(meter.peak_bytes() - before) / MiB:.1f} MiB"
    with tempfile.TemporaryDirectory() as folder, model.trainer(plan, folder) as trainer:
        for given in batches:
            trainer.step(given)
        measured = _most(trainer.peak_bytes)
    predicted, budget = plan.peak_bytes["device"], plan.budgets["device"]
    again = sum("RECOMPUTE network" in line for line in plan.program)
    return (
        f"peak {measured / MiB:.1f} MiB, predicted {predicted / MiB:.1f} ({predicted / measured - 1:+.1%}) of "
        f"{budget / MiB:.1f}, {again} unsharded again"
    )


def seconds(model: _Model, steps: int) -> dict[str, str]:
    """Train all ways in turns of one step; returns the median of each in words."""
    with ExitStack() as stack:
        ways = {way: _fsdp(model.name, model.made(), way == "FSDP2") for way in ("FSDP2", "FSDP2 never")}
        predicted: dict[str, float] = {}
        for layout, share in PLANS:
            plan, room = model.plan(layout, share), stack.enter_context(tempfile.TemporaryDirectory())
            way = f"{layout} {share}"
            ways[way], predicted[way] = stack.enter_context(model.trainer(plan, room)).step, plan.step_s
        spent: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(steps):
            given = model.batch(number)
            for way, step in ways.items():
                dist.barrier()
                started = time.perf_counter()
                step(given)
                spent[way].append(time.perf_counter() - started)
    medians = {way: statistics.median(times[2:]) for way, times in spent.items()}
    return {
        way: f"{median * 1e3:.0f} ms" + (f", predicted {predicted[way] * 1e3:.0f}" if way in predicted else "")
        for way, median in medians.items()
    }


def main() -> None:
    """Print the seconds of all ways, or the memory of one, on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--peak", default="", help='a model and a way: "llama FSDP2", "gpt zero3 60%%"')
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if args.peak:
        name, _, way = args.peak.partition(" ")
        rows = {args.peak: peak(_Model(name, args.machine), way)}
    else:
        rows = {
            f"{name} {way}": said
            for name in MODELS
            for way, said in seconds(_Model(name, args.machine), args.steps).items()
        }
    for name, said in rows.items() if dist.get_rank() == 0 else ():
        print(f"{name:22} {said}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
