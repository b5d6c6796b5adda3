"""Steps during a save: Lading's, waited for and beside training, and torch.distributed.checkpoint's, in turns.

    lading probe --ranks 2 --out machine.toml
    python benchmarks/checkpoint/run.py machine.toml                                 # one process
    torchrun --nproc-per-node 2 benchmarks/checkpoint/run.py machine.toml [--json FILE]
    python benchmarks/checkpoint/run.py --busy                                       # no processor is ever idle

One Trainer makes all steps, of replicas where there are several ranks. DCP saves tensors that lie in the Trainer's own
memory, so every way saves the same bytes beside the same step. A round goes through all ways, each after steps in which
nothing is saved, until each has seen ``--steps`` steps and ``--saves`` saves. What a way costs is told in three
figures: the seconds for which its call keeps training, the median step while it saves, and all the seconds by which
training came later. ``--layers`` and ``--dim`` say how large the state is: 0.6 GB for a layer of the usual 2048.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tools.batches import random_batch
from torch.distributed.checkpoint import state_dict_saver as dcp

import lading
from lading.checkpoint.saver import SaveOrder, Saver, StagedTensor
from lading.checkpoint.staging import StagingMemory
from lading.ir.action import DEVICE
from lading.models.reference import build_model, model_class
from lading.trainer import Trainer

_MODEL, _TOKENS, _WARM_UP = "llama", 32, 2
#: Ways of saving, "none" beside which they are judged.
NONE, WAITED, BESIDE, DCP, DCP_ASYNC = "none", "lading, waited", "lading, beside", "dcp.save", "dcp.async_save"


@dataclass
class Way:
    """Measurements of one way of saving, in seconds.

    Attributes:
        calls: For which the call kept training.
        steps: Of the steps while a save was under way.
        saves: From the call until the checkpoint was whole.
    """

    calls: list[float] = field(default_factory=lambda: [])
    steps: list[float] = field(default_factory=lambda: [])
    saves: list[float] = field(default_factory=lambda: [])

    def summary(self, alone_s: float) -> dict[str, float]:
        """Medians, and the seconds by which one save delays training, beside a step of ``alone_s`` without."""
        count = max(1, len(self.calls))
        lost = (sum(self.calls) + sum(each - alone_s for each in self.steps)) / count
        median = statistics.median(self.steps) if self.steps else 0.0
        return {
            "call_s": statistics.median(self.calls) if self.calls else 0.0,
            "step_s": median,
            "longer": median / alone_s - 1 if median else 0.0,
            "longest_s": max(self.steps, default=0.0),
            "lost_s": lost,
            "save_s": statistics.median(self.saves) if self.saves else 0.0,
            "num_steps": len(self.steps),
            "num_saves": len(self.calls),
        }


def views_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Values of a trainer as tensors on the memory in which they lie, by name."""
    executor: Any = trainer._executor
    graph, values = trainer.program.graph, dict(trainer._values)
    resident = dict(trainer.program.resident)
    tensors, seen = dict[str, torch.Tensor](), set[int]()
    for name, value in values.items():
        of = f"rank {dist.get_rank()}, " if value.is_shared else ""  # what all have DCP saves once, by its name
        for part, storage in enumerate(value.storages):
            assert executor.homes[storage] == DEVICE, "all is kept in memory"
            if storage in seen:  # several values share a unit
                continue
            seen.add(storage)
            data = executor._arena.bytes_at(resident[storage], graph.storages[storage].size_bytes)
            tensors[f"{of}{name}#{part}"] = data.view(getattr(torch, value.dtype))
    return tensors


class Rounds:
    """Turns of all ways of saving over one trainer.

    Args:
        folder: Where checkpoints go; the same on all ranks.
        batch: Batch of a step.
    """

    def __init__(self, trainer: Trainer, folder: Path, batch: Callable[[int], Any]) -> None:
        self._trainer, self._folder, self._batch = trainer, folder, batch
        self.ways = {name: Way() for name in (NONE, WAITED, BESIDE, DCP, DCP_ASYNC)}
        self._views = views_of(trainer)
        self._first = not dist.is_initialized() or dist.get_rank() == 0

    def has(self, steps: int, saves: int) -> bool:
        """Whether each way has been seen beside so many steps, and has made so many saves."""
        beside = all(len(self.ways[name].steps) >= steps for name in (NONE, BESIDE, DCP_ASYNC))
        return beside and all(len(way.calls) >= saves for name, way in self.ways.items() if name != NONE)

    def step(self, way: Way | None) -> None:
        """Run one step, timed for a way."""
        started = time.perf_counter()
        self._trainer.step(self._batch(self._trainer.steps))
        if way is not None:
            way.steps.append(time.perf_counter() - started)

    def run(self, name: str, steps: int) -> None:
        """Save once in one way, and step until the checkpoint is whole, ``steps`` times at most."""
        way, started = self.ways[name], time.perf_counter()
        done = self._begin(name)
        way.calls.append(time.perf_counter() - started)
        taken = 0
        while name in (BESIDE, DCP_ASYNC) and taken < steps and self._trainer.largest(not done())[0]:
            self.step(way)
            taken += 1
        self._end()
        way.saves.append(time.perf_counter() - started)
        if self._first:
            shutil.rmtree(self._folder / "dcp", ignore_errors=True)
        self._trainer.largest(0)

    def _begin(self, name: str) -> Callable[[], bool]:
        """Begin a save; returns what tells whether it has ended on this rank."""
        self._future: Future[Any] | None = None
        settings: dict[str, Any] = {"checkpoint_id": self._folder / "dcp", "no_dist": not dist.is_initialized()}
        if name == WAITED:
            self._trainer.save(self._folder / "lading", keep=1)
        elif name == BESIDE:
            self._trainer.save(self._folder / "lading", keep=1, wait=False)
            return lambda: not self._trainer.is_saving
        elif name == DCP:
            dcp.save(self._views, **settings)
        elif name == DCP_ASYNC:
            given: Any = dcp.async_save(self._views, **settings)
            self._future = given
            return given.done
        return lambda: True

    def _end(self) -> None:
        self._trainer.wait_saved()
        if self._future is not None:
            self._future.result()


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure all ways on the ranks of this job; called on each."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    dim = given.dim
    sizes: dict[str, Any] = {
        "num_layers": given.layers, "dim": dim, "num_heads": dim // 128, "num_kv_heads": dim // 128,
        "hidden_dim": dim * 11 // 4, "vocab_size": 2 * dim, "max_seq_len": _TOKENS,
    }  # fmt: skip

    def batch(step: int) -> Any:
        return random_batch(_MODEL, sizes, rows=1, tokens=_TOKENS, seed=1000 * step + rank)

    torch.manual_seed(0)
    model = build_model(_MODEL, **sizes)
    graph = lading.capture(model, batch(0), model_class(_MODEL).loss)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    layout = given.layout or (f"dp{ranks}" if ranks > 1 else "")
    asked: dict[str, Any] = {"policy": "keep-all", "cache": False, "layout": layout}
    least = lading.plan(graph, given.machine, budget="100%", **asked)
    state_bytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    most = lading.load_machine(given.machine).shared_by(ranks).device.memory_bytes  # ranks stage parts of the state
    budget = min(most, least.budgets["device"] + state_bytes + (64 << 20))
    plan = lading.plan(graph, given.machine, budget=budget, stage_saves=True, **asked)
    own = folder / f"rank-{rank}"
    own.mkdir(parents=True)
    with Trainer(plan, graph, model, folder=own) as trainer:
        rounds = Rounds(trainer, folder, batch)
        for _ in range(_WARM_UP):
            rounds.step(None)
        without = trainer.peak_bytes
        rounds.run(BESIDE, 2)  # what is made once, and started
        peaks = {"without": without, "beside": trainer.peak_bytes, "staged": trainer.program.staging_bytes}
        rounds.run(DCP_ASYNC, 2)
        rounds.ways |= {BESIDE: Way(), DCP_ASYNC: Way()}
        started = time.perf_counter()
        while not rounds.has(given.steps, given.saves):
            if trainer.largest(time.perf_counter() - started)[0] > given.limit:
                break
            for name in (WAITED, BESIDE, DCP, DCP_ASYNC):
                for _ in range(3):
                    rounds.step(rounds.ways[NONE])
                rounds.run(name, given.steps)
    return {
        "ranks": ranks,
        "layout": str(plan.parsed_layout),
        "peak_bytes": peaks,
        "threads": torch.get_num_threads(),
        "state_bytes": state_bytes,
        "torch": torch.__version__,
        "raw": {name: asdict(way) for name, way in rounds.ways.items()},
    }


def summed_up(told: dict[str, Any], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Add the measurements of an earlier run of the same case, and tell what all of them say."""
    if earlier is not None:
        if any(earlier.get(key) != told[key] for key in ("ranks", "layout", "threads", "state_bytes", "torch")):
            raise SystemExit("expected --json to be of the same case, found another; name another file")
        for name, way in told["raw"].items():
            for key, seconds in way.items():
                seconds[:0] = earlier["raw"][name][key]
    alone_s = statistics.median(told["raw"][NONE]["steps"])
    return {**told, "ways": {name: Way(**way).summary(alone_s) for name, way in told["raw"].items()}}


def busy(layers: int, folder: Path) -> None:
    """Print how long saves last while a thread that never pauses is on every processor, which no pause gives away."""
    memory = StagingMemory(layers * (600 << 20))
    for start in range(0, memory.size_bytes, 1 << 20):  # pages are there, and differ
        memory.memory[start : start + 8] = start.to_bytes(8, "little")
    tensor = StagedTensor("state", "uint8", (memory.size_bytes,), ((0, 0, memory.size_bytes),))
    saver = Saver(memory)
    with tempfile.TemporaryDirectory(dir=folder) as made, ExitStack() as stack:
        for step, name in enumerate(("idle processors", "no idle processor", "no idle processor, again"), 1):
            if step == 2:
                for _ in os.sched_getaffinity(0):
                    spinning = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
                    stack.callback(spinning.wait)
                    stack.callback(spinning.kill)
            started = time.perf_counter()
            told = saver.save(SaveOrder(made, step, {}, 1, (tensor,)))
            size, took_s = memory.size_bytes / 1e9, time.perf_counter() - started
            print(f"{size:.2f} GB, {name}: {took_s:.1f} s {' '.join(told)}", flush=True)
    saver.close()
    memory.close()


def main() -> None:
    """Print a table, and write all figures where ``--json`` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", nargs="?", default="", help="machine file of lading probe --ranks")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dim", type=int, default=2048, help="a multiple of 128")
    parser.add_argument("--layout", default="", help="as dp2,zero3; replicas without")
    parser.add_argument("--steps", type=int, default=20, help="steps to see beside saves, at least")
    parser.add_argument("--saves", type=int, default=20, help="saves of each way, at least")
    parser.add_argument("--busy", action="store_true", help="measure saves while no processor is ever idle")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which no round begins")
    parser.add_argument("--folder", default="", help="where checkpoints go; a new temporary folder without")
    parser.add_argument("--json", type=Path, help="file of all figures; those of an earlier run there count, too")
    given = parser.parse_args()
    is_job = "RANK" in os.environ
    if given.busy:
        return busy(given.layers, Path(given.folder or tempfile.gettempdir()))
    if not given.machine:
        parser.error("expected a machine file, got none; make one with: lading probe --ranks 2 --out machine.toml")
    if is_job:
        dist.init_process_group("gloo")
    torch.set_num_threads(1 if is_job else torch.get_num_threads())
    with tempfile.TemporaryDirectory(dir=given.folder or None) as made:
        folders = [made]
        if is_job:
            dist.broadcast_object_list(folders, 0)
        told = measure(given, Path(folders[0]) / "run")
        if is_job:
            dist.barrier()
    if not is_job or dist.get_rank() == 0:
        path: Path | None = given.json
        earlier = json.loads(path.read_text()) if path is not None and path.exists() else None
        told = summed_up(told, earlier)
        state, peaks = told["state_bytes"] / 1e9, {key: size / 1e9 for key, size in told["peak_bytes"].items()}
        print(f"{told['ranks']} ranks of {told['threads']} threads, {told['layout']}, state of {state:.2f} GB")
        print(
            "peak of the first rank {without:.2f} GB, with a save {beside:.2f}; planned {staged:.2f} more".format(
                **peaks
            )
        )
        print(f"{'':16}{'call s':>8}{'step s':>8}{'longer':>8}{'longest':>9}{'lost s':>8}{'save s':>8}")
        for name, row in told["ways"].items():
            figures = (f"{row['call_s']:8.2f}{row['step_s']:8.2f}{row['longer']:8.1%}{row['longest_s']:9.2f}", "")
            print(f"{name:16}{figures[0]}{row['lost_s']:8.2f}{row['save_s']:8.2f}")
        if path is not None:
            path.write_text(json.dumps(told, indent=1) + "\n")
    if is_job:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
