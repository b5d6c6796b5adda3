"""Bytes of two gloo ranks at the five moments: FSDP2 and torch.distributed.checkpoint measured, beside what is planned.

    python benchmarks/planner/moments.py --out benchmarks/planner/results/moments_NAME_YYYYMM.md

Each rank's resident set is read at its highest (``VmHWM``, reset before each moment) less what the process had before
there was a model. A CPU rank has its device's and its host's bytes in one memory, so their predicted sum is compared,
in the mean of the ranks. Moving from the device to the host copies nothing here, so the pieces on the host of "start"
and "save sharded" are predicted and not there.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tools.batches import random_batch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

from lading.catalog.stacks import stack_by_name
from lading.ir.layout import parse_layout
from lading.ir.request import Architecture, Request, StepRequest
from lading.models.reference import build_model, model_class
from lading.planner.peaks import peaks_of
from lading.sim.simulate import simulate
from lading.tracing.tabulate import module_table
from lading.units import MiB

SIZES: dict[str, Any] = {
    "num_layers": 4, "dim": 512, "num_heads": 8, "num_kv_heads": 8, "hidden_dim": 1408, "vocab_size": 8192,
    "max_seq_len": 64,
}  # fmt: skip
SMALL = {**SIZES, "num_layers": 1, "dim": 64, "vocab_size": 512, "hidden_dim": 96}
TOKENS, LAYOUT = 64, "fp32,dp2,zero3,mb1,gb4"
#: Of a state dict that one rank has whole.
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def predicted(save: str) -> dict[str, int]:
    """Bytes of a rank by moment, of device and host."""
    module, loss = build_model("llama", **SIZES), model_class("llama").loss
    table = module_table(
        module, random_batch("llama", SIZES, rows=3, tokens=TOKENS, seed=0), loss, "llama", tokens=TOKENS, whole=False
    )
    request = StepRequest(
        name="llama",
        model=Architecture(family="llama", symbols={}, blocks=(("block", SIZES["num_layers"]),)),
        seq_len=TOKENS,
        machine="h100",  # only bytes count, and they do not depend on it
        layout=parse_layout(LAYOUT),
        stack=stack_by_name("torch-eager-cpu"),
    )
    asked = Request(model="llama", machine="h100", save=save)
    return {moment: sum(tiers.values()) for moment, tiers in peaks_of(simulate(request, table), asked).items()}


class Rank:
    """A model cut over two ranks, its optimizer, and where checkpoints go."""

    def __init__(self, sizes: dict[str, Any], folder: Path) -> None:
        with torch.device("meta"):
            model: Any = build_model("llama", **sizes)
        mesh = init_device_mesh("cpu", (2,))
        for unit in (*model.layers, model.tokens, [model.norm, model.head]):
            fully_shard(unit, mesh=mesh)
        self.model, self.sizes, self.folder = fully_shard(model, mesh=mesh), sizes, folder
        self.model.to_empty(device="cpu")
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        for buffer in self.model.buffers():
            buffer.zero_()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        get_optimizer_state_dict(self.model, self.optimizer)  # makes the states, with gradients of zeros

    @property
    def states(self) -> dict[str, Any]:
        """States that a checkpoint has, by name."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def step(self) -> None:
        """Two micro-batches and an update; gradients stay until the next step, as torchtitan has them."""
        self.optimizer.zero_grad()
        for seed in range(2):
            batch = random_batch("llama", self.sizes, rows=1, tokens=TOKENS, seed=seed)
            model_class("llama").loss(self.model, batch).backward()
        self.optimizer.step()

    def save(self) -> None:
        """In pieces."""
        save(self.states, checkpoint_id=self.folder / "pieces")

    def save_beside(self) -> None:
        """In pieces, staged first."""
        beside: Any = async_save(self.states, checkpoint_id=self.folder / "beside")
        beside.result()

    def save_whole(self) -> None:
        """Save everything by the first rank."""
        states = get_state_dict(self.model, self.optimizer, options=WHOLE)
        if dist.get_rank() == 0:
            torch.save(states, self.folder / "whole.pt")
        dist.barrier()

    def load(self) -> None:
        """Pieces into states that are there."""
        states = self.states
        load(states, checkpoint_id=self.folder / "pieces")
        set_state_dict(
            self.model, self.optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )

    def load_whole(self) -> None:
        """From the first rank."""
        model, optimizer = torch.load(self.folder / "whole.pt") if dist.get_rank() == 0 else ({}, {})
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.model, model, options=options)
        set_optimizer_state_dict(self.model, self.optimizer, optimizer, options=options)


def resident(key: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def highest(act: Callable[[], Any], before: int) -> tuple[int, Any]:
    """Most bytes while a moment lasts, over those before, and what it gives."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    given = act()
    return resident("VmHWM") - before, given


def rank_of(number: int, folder: str, out: str) -> None:
    """All moments on one rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    path = Path(folder)
    warm = Rank(SMALL, path / "warm")
    (path / "warm").mkdir(exist_ok=True)
    for act in (warm.step, warm.save, warm.save_beside, warm.save_whole, warm.load, warm.load_whole):
        act()
    del warm, act
    found: dict[str, int] = {}
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident("VmRSS")
    found["start"], rank = highest(lambda: Rank(SIZES, path), before)
    found["step"], _ = highest(rank.step, before)
    found["save sharded"], _ = highest(rank.save, before)
    found["save async"], _ = highest(rank.save_beside, before)
    found["save gathered"], _ = highest(rank.save_whole, before)
    for name in ("load", "load_whole"):
        rank = None  # the old states go first
        moment = "resume gathered" if name == "load_whole" else "resume sharded"
        found[moment], rank = highest(partial(_resumed, path, name), before)
    Path(f"{out}.{number}").write_text(json.dumps(found))
    dist.destroy_process_group()


def _resumed(path: Path, name: str) -> Rank:
    rank = Rank(SIZES, path)
    getattr(rank, name)()
    return rank


def measured() -> dict[str, list[int]]:
    """Most bytes of each rank by moment, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/found"
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1",
        }  # fmt: skip
        command = [sys.executable, "-W", "ignore", __file__, "--ranks", folder, "--out", out]
        subprocess.run(command, check=True, env=environment, timeout=600)
        each = [json.loads(Path(f"{out}.{number}").read_text()) for number in range(2)]
    return {moment: [found[moment] for found in each] for moment in each[0]}


def report() -> str:
    """The table as markdown."""
    saves = {save: predicted(save) for save in ("sharded", "async", "gathered")}
    lines = [
        f"Llama of {SIZES['num_layers']} layers of {SIZES['dim']}, fp32, AdamW, FSDP2 over two gloo ranks of one CPU "
        f"host, torch {torch.__version__}. MiB over the process before; the mean of the ranks.",
        "",
        "| moment | measured, rank 0 | rank 1 | mean | predicted, device + host | error |",
        "|---|---|---|---|---|---|",
    ]
    for name, (first, second) in measured().items():
        moment, _, save = name.partition(" ")
        most, mean = saves[save or "sharded"][moment], (first + second) / 2
        cells = (first / MiB, second / MiB, mean / MiB, most / MiB)
        lines.append(f"| {name} | " + " | ".join(f"{cell:.1f}" for cell in cells) + f" | {most / mean - 1:+.1%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, predict, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.ranks:
        start_processes(rank_of, (asked.ranks, str(asked.out)), nprocs=2, start_method="fork")
        return
    text = report()
    print(text)
    if asked.out:
        asked.out.write_text(text)


if __name__ == "__main__":
    main()
