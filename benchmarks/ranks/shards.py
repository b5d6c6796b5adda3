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
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from tools.batches import random_batch
from torch.distributed.fsdp import fully_shard

import lading
from lading.ir.machine import Machine
from lading.models.reference import build_model, model_class
from lading.runtime.resident import PeakMeter, resident_bytes, trim
from lading.units import MiB

_LLAMA = {"num_layers": 6, "dim": 384, "num_heads": 6, "num_kv_heads": 6, "hidden_dim": 1024, "vocab_size": 4096}
_MOE = {**_LLAMA, "num_experts": 4, "hidden_dim": 512}
_GPT = {"num_layers": 6, "dim": 384, "num_heads": 6, "vocab_size": 4096}
#: Name, sizes, sequences and tokens of a rank's batch.
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "llama": (_LLAMA, 4, 64),
    "gpt": (_GPT, 4, 64),
    "moe": (_MOE, 4, 64),
}
#: Layouts, and shares of the memory that keeping everything needs in them.
PLANS = (("zero2", "100%"), ("zero3", "100%"), ("zero3", "80%"), ("zero3", "60%"))
#: Settings of FSDP2: the share of blocks that stay whole, and those gathered ahead.
FSDP = {"FSDP2": (0.0, 0), "FSDP2 never": (1.0, 0), "FSDP2 half": (0.5, 2), "FSDP2 ahead": (0.0, 2)}
_WARM_UP = 3


def max_over_ranks(value: float) -> float:
    """Find the largest value of all ranks."""
    highest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return float(highest)


def fsdp(name: str, model: torch.nn.Module, kept: float = 0.0, ahead: int = 0) -> Callable[[Any], float]:
    """Cut a model over the ranks as anyone would, and return what makes a step.

    Args:
        kept: Share of the blocks, the last ones, that are not resharded after forward; 1.0 for never.
        ahead: Blocks that are gathered before the one at work, forward and back; 0 leaves that to FSDP2.
    """
    blocks = list(model.get_submodule("layers").children())
    for number, block in enumerate(blocks, 1):
        fully_shard(block, reshard_after_forward=number <= len(blocks) * (1 - kept))
    fully_shard(model, reshard_after_forward=kept < 1)
    for order, prefetch in ((blocks, "forward"), (blocks[::-1], "backward")) if ahead else ():
        for number, block in enumerate(order):
            getattr(block, f"set_modules_to_{prefetch}_prefetch")(order[number + 1 : number + 1 + ahead])
    optimizer, loss_fn = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), model_class(name).loss

    def step(given: Any) -> float:
        loss = loss_fn(model, given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


class Model:
    """A model of ``MODELS``, its batches, and its plans by the name of the way."""

    def __init__(self, name: str, machine: str | Machine) -> None:
        self.name, self.machine = name, machine
        self.sizes, self.rows, self.tokens = MODELS[name]

    @cached_property
    def graph(self) -> lading.StepGraph:
        """Capture the model."""
        return lading.capture(self.made(), self.batch(0), model_class(self.name).loss)

    def made(self) -> torch.nn.Module:
        """Build the model, with the same values each time."""
        torch.manual_seed(0)
        return build_model(self.name, **self.sizes, max_seq_len=self.tokens)

    def batch(self, step: int) -> Any:
        """Draw this rank's batch of a step."""
        sizes = {**self.sizes, "max_seq_len": self.tokens}
        return random_batch(self.name, sizes, rows=self.rows, tokens=self.tokens, seed=1000 * step + dist.get_rank())

    def plan(self, layout: str, budget: str | int, **others: Any) -> lading.Plan:
        """Plan it in a layout for bytes, or a share of what keeping everything needs there."""
        spread = f"dp{dist.get_world_size()},{layout}"
        return lading.plan(self.graph, self.machine, budget=budget, cache=False, layout=spread, **others)

    def trainer(self, plan: lading.Plan, folder: str) -> lading.Trainer:
        """Make the Trainer of a plan."""
        rule = lading.AdamW(lr=1e-3)
        return lading.Trainer(plan, self.graph, self.made(), folder=folder, threads=1, optimizer=rule)


def peak(model: Model, way: str | lading.Plan) -> str:
    """Train one setting of FSDP2, or a plan, for a few steps; returns its memory in words."""
    batches = [model.batch(step) for step in range(_WARM_UP)]
    gc.collect()
    trim()
    if isinstance(way, str):
        meter, before = PeakMeter(), resident_bytes()
        step = fsdp(model.name, model.made(), *FSDP[way])
        gc.collect()
        trim()
        meter.reset()
        for given in batches:
            step(given)
        return f"peak {max_over_ranks(meter.peak_bytes() - before) / MiB:.1f} MiB"
    with tempfile.TemporaryDirectory() as folder, model.trainer(way, folder) as trainer:
        for given in batches:
            trainer.step(given)
        measured = max_over_ranks(trainer.peak_bytes)
    predicted, budget = way.peak_bytes["device"], way.budgets["device"]
    again = sum("RECOMPUTE network" in line for line in way.program)
    return (
        f"peak {measured / MiB:.1f} MiB, predicted {predicted / MiB:.1f} ({predicted / measured - 1:+.1%}) of "
        f"{budget / MiB:.1f}, {again} unsharded again"
    )


def in_turns(model: Model, ways: dict[str, Callable[[Any], Any]], steps: int, first: int = 2) -> dict[str, list[float]]:
    """Train all ways in turns of one step; returns the seconds of each step of each way, without the first steps."""
    spent: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(steps):
        given = model.batch(number)
        for way, step in ways.items():
            dist.barrier()
            started = time.perf_counter()
            step(given)
            spent[way].append(time.perf_counter() - started)
    return {way: times[first:] for way, times in spent.items()}


def seconds(model: Model, steps: int) -> dict[str, str]:
    """Train all ways in turns of one step; returns the median of each in words."""
    with ExitStack() as stack:
        ways = {way: fsdp(model.name, model.made(), *FSDP[way]) for way in ("FSDP2", "FSDP2 never")}
        predicted: dict[str, float] = {}
        for layout, share in PLANS:
            plan, room = model.plan(layout, share), stack.enter_context(tempfile.TemporaryDirectory())
            way = f"{layout} {share}"
            ways[way], predicted[way] = stack.enter_context(model.trainer(plan, room)).step, plan.step_s
        spent = in_turns(model, ways, steps)
    medians = {way: statistics.median(times) for way, times in spent.items()}
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
        model = Model(name, args.machine)
        rows = {args.peak: peak(model, way if way in FSDP else model.plan(*way.split()))}
    else:
        rows = {
            f"{name} {way}": said
            for name in MODELS
            for way, said in seconds(Model(name, args.machine), args.steps).items()
        }
    for name, said in rows.items() if dist.get_rank() == 0 else ():
        print(f"{name:22} {said}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
