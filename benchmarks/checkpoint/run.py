"""Steps during a save: Lading's, waited for and beside training, and torch.distributed.checkpoint's, in turns.

    lading probe --ranks 2 --out machine.toml
    python benchmarks/checkpoint/run.py machine.toml                                 # one process
    torchrun --nproc-per-node 2 benchmarks/checkpoint/run.py machine.toml [--json FILE]

One Trainer makes all steps, of replicas where there are several ranks. DCP saves tensors that lie in the Trainer's own
memory, so every way saves the same bytes beside the same step. A round goes through all ways, each after steps in which
nothing is saved, until each has seen ``--steps`` steps. What a way costs is told in three figures: the seconds for
which its call keeps training, the median step while it saves, and all the seconds by which training came later.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tools.batches import random_batch
from torch.distributed.checkpoint import state_dict_saver as dcp

import lading
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
    tensors: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        for part, storage in enumerate(value.storages):
            assert executor.homes[storage] == DEVICE, "all is kept in memory"
            data = executor._arena.bytes_at(resident[storage], graph.storages[storage].size_bytes)
            tensors[f"{name}#{part}"] = data.view(getattr(torch, value.dtype))
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


def measure(machine: str, layers: int, steps: int, limit_s: float, folder: Path) -> dict[str, Any]:
    """Measure all ways on the ranks of this job; called on each."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    sizes: dict[str, Any] = {
        "num_layers": layers, "dim": 2048, "num_heads": 16, "num_kv_heads": 16, "hidden_dim": 5632, "vocab_size": 4096,
        "max_seq_len": _TOKENS,
    }  # fmt: skip

    def batch(step: int) -> Any:
        return random_batch(_MODEL, sizes, rows=1, tokens=_TOKENS, seed=1000 * step + rank)

    torch.manual_seed(0)
    model = build_model(_MODEL, **sizes)
    graph = lading.capture(model, batch(0), model_class(_MODEL).loss)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    asked: dict[str, Any] = {"policy": "keep-all", "cache": False, "layout": f"dp{ranks}" if ranks > 1 else ""}
    least = lading.plan(graph, machine, budget="100%", **asked)
    state_bytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    plan = lading.plan(graph, machine, budget=least.budgets["device"] + state_bytes + (64 << 20), **asked)
    own = folder / f"rank-{rank}"
    own.mkdir(parents=True)
    with Trainer(plan, graph, model, folder=own) as trainer:
        rounds = Rounds(trainer, folder, batch)
        for _ in range(_WARM_UP):
            rounds.step(None)
        for name in (BESIDE, DCP_ASYNC):  # what is made once, and started
            rounds.run(name, 2)
            rounds.ways[name] = Way()
        started = time.perf_counter()
        while min(len(rounds.ways[name].steps) for name in (NONE, BESIDE, DCP_ASYNC)) < steps:
            if trainer.largest(time.perf_counter() - started)[0] > limit_s:
                break
            for name in (WAITED, BESIDE, DCP, DCP_ASYNC):
                for _ in range(3):
                    rounds.step(rounds.ways[NONE])
                rounds.run(name, steps)
    return {
        "ranks": ranks,
        "threads": torch.get_num_threads(),
        "state_bytes": state_bytes,
        "torch": torch.__version__,
        "raw": {name: asdict(way) for name, way in rounds.ways.items()},
    }


def summed_up(told: dict[str, Any], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Add the measurements of an earlier run of the same case, and tell what all of them say."""
    if earlier is not None:
        if any(earlier[key] != told[key] for key in ("ranks", "threads", "state_bytes", "torch")):
            raise SystemExit("expected --json to be of the same case, found another; name another file")
        for name, way in told["raw"].items():
            for key, seconds in way.items():
                seconds[:0] = earlier["raw"][name][key]
    alone_s = statistics.median(told["raw"][NONE]["steps"])
    return {**told, "ways": {name: Way(**way).summary(alone_s) for name, way in told["raw"].items()}}


def main() -> None:
    """Print a table, and write all figures where ``--json`` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which no round begins")
    parser.add_argument("--folder", default="", help="where checkpoints go; a new temporary folder without")
    parser.add_argument("--json", type=Path, help="file of all figures; those of an earlier run there count, too")
    given = parser.parse_args()
    is_job = "RANK" in os.environ
    if is_job:
        dist.init_process_group("gloo")
    torch.set_num_threads(1 if is_job else torch.get_num_threads())
    with tempfile.TemporaryDirectory(dir=given.folder or None) as made:
        folders = [made]
        if is_job:
            dist.broadcast_object_list(folders, 0)
        told = measure(given.machine, given.layers, given.steps, given.limit, Path(folders[0]) / "run")
        if is_job:
            dist.barrier()
    if not is_job or dist.get_rank() == 0:
        path: Path | None = given.json
        earlier = json.loads(path.read_text()) if path is not None and path.exists() else None
        told = summed_up(told, earlier)
        print(f"{told['ranks']} ranks of {told['threads']} threads, state of {told['state_bytes'] / 1e9:.2f} GB")
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
