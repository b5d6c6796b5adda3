"""Is the budget kept, and the peak predicted, as another process sees it? Models of 10 M to 400 M parameters.

Each case plans, trains and saves in a process of its own, and goes on from what it saved in another; the parent reads
their high-water marks every 5 ms, from the moment before the first byte of the model. Memory does not depend on other
load, so cases may run side by side.

    python benchmarks/predictions/budgets.py --json benchmarks/predictions/results/NAME.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tools.batches import random_batch
from torch import nn
from torch.nn import functional as F

from lading.catalog.load import load_machine, save_machine
from lading.checkpoint.store import latest_checkpoint
from lading.config import ModelConfig
from lading.grouping import Matrices
from lading.memory.restore import program_of
from lading.models.reference import model_class
from lading.prepare import plan
from lading.run import build
from lading.runtime.probe import probe
from lading.runtime.resident import trim
from lading.tracing.initial import defer
from lading.tracing.trace import capture
from lading.trainer import Trainer
from lading.units import GiB, MiB

_STEPS, _STEPS_AFTER = 4, 2


@dataclass(frozen=True)
class Model:
    """A module to train, with its batch for a seed, its loss, and settings of the plan."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], torch.Tensor]
    settings: dict[str, Any] = dataclasses.field(default_factory=lambda: {})


def _reference(name: str, sizes: dict[str, Any], rows: int, tokens: int, precision: str = "fp32") -> Model:
    return Model(
        lambda: build(ModelConfig(name=name, sizes=sizes), precision),
        lambda seed: random_batch(name, sizes, rows=rows, tokens=tokens, seed=seed),
        model_class(name).loss,
        {"master_weights": precision == "bf16"},
    )


class _Residual(nn.Module):
    """Two convolutions beside a shortcut, batch norm in training mode."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _residual_net(rows: int = 32) -> Model:
    def make() -> nn.Module:
        widths, layers = (64, 64, 128, 128, 256, 256, 512, 512), list[nn.Module]([nn.Conv2d(3, 64, 3, 1, 1)])
        for before, width in zip((64, *widths), widths, strict=False):
            layers.append(_Residual(before, width, 1 + (width > before)))
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))

    def batch(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return (
            torch.rand(rows, 3, 32, 32, generator=generator), torch.randint(10, (rows,), generator=generator),
        )  # fmt: skip

    return Model(make, batch, lambda model, given: F.cross_entropy(model(given[0]), given[1]))


def _tables(words: int = 60_000, width: int = 256) -> Model:
    """A recommender: nearly all of it are two tables."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(words, width), nn.Embedding(words, width)
            self.head = nn.Sequential(nn.Linear(2 * width, 512), nn.ReLU(), nn.Linear(512, 1))

        def forward(self, pairs: torch.Tensor) -> torch.Tensor:
            return self.head(torch.cat([self.users(pairs[:, 0]), self.items(pairs[:, 1])], 1))

    def batch(seed: int) -> Any:
        return torch.randint(words, (2048, 2), generator=torch.Generator().manual_seed(seed))

    return Model(Net, batch, lambda model, pairs: model(pairs).square().mean())


def _hugging_face() -> Model:
    """DistilGPT-2's sizes, of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel  # heavy: only where asked

    config = GPT2Config(n_layer=6, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)

    def batch(seed: int) -> Any:
        ids = torch.randint(config.vocab_size, (2, 256), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "labels": ids}

    return Model(lambda: GPT2LMHeadModel(config), batch, lambda model, given: model(**given).loss)


_GPT = {"num_layers": 4, "dim": 512, "num_heads": 8, "vocab_size": 8192, "max_seq_len": 256}
_GPT2 = {"num_layers": 12, "dim": 768, "num_heads": 12, "vocab_size": 50257, "max_seq_len": 512}
_LLAMA = {"num_layers": 4, "dim": 512, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 8192, "max_seq_len": 256}
_LONG = {"num_layers": 6, "dim": 384, "num_heads": 6, "num_kv_heads": 2, "vocab_size": 512, "max_seq_len": 4096}
_LARGE = {"num_layers": 20, "dim": 1024, "num_heads": 16, "num_kv_heads": 4, "vocab_size": 32000, "max_seq_len": 256}
_MOE = {"num_layers": 2, "dim": 256, "num_heads": 4, "vocab_size": 4096, "max_seq_len": 256}
_DIT = {"num_layers": 6, "dim": 384, "num_heads": 6}
MODELS: dict[str, Callable[[], Model]] = {
    "gpt": lambda: _reference("gpt", _GPT, 2, 256),
    "gpt-muon": lambda: dataclasses.replace(
        _reference("gpt", _GPT, 2, 256), settings={"matrices": Matrices(rule="muon", lr=1e-3)}
    ),
    "gpt2": lambda: _reference("gpt", _GPT2, 2, 512),
    "llama": lambda: _reference("llama", _LLAMA, 2, 256),
    "llama-bf16": lambda: _reference("llama", _LLAMA, 2, 256, "bf16"),
    "llama-long": lambda: _reference("llama", _LONG, 1, 4096),
    "llama-large": lambda: _reference("llama", _LARGE, 1, 256),
    "moe": lambda: _reference("moe", _MOE, 2, 256),
    "dit": lambda: _reference("dit", _DIT, 8, 64),
    "residual": _residual_net,
    "tables": _tables,
    "transformers": _hugging_face,
}
#: Model, share of what keeping everything takes, threads.
CASES = (
    ("gpt", 1.0, 1), ("gpt", 0.35, 2), ("gpt-muon", 0.6, 1), ("gpt-muon", 0.35, 2),
    ("llama", 0.6, 2), ("llama", 0.4, 1), ("llama-bf16", 0.6, 1), ("llama-bf16", 0.35, 2),
    ("llama-long", 1.0, 1), ("llama-long", 0.35, 2), ("moe", 0.6, 1), ("moe", 0.35, 2),
    ("dit", 1.0, 2), ("dit", 0.25, 1), ("residual", 1.0, 2), ("residual", 0.6, 1), ("residual", 0.35, 2),
    ("tables", 0.6, 1), ("tables", 0.35, 2), ("transformers", 0.6, 1), ("transformers", 0.35, 2),
    ("gpt2", 0.6, 2), ("gpt2", 0.25, 1), ("llama-large", 0.6, 2), ("llama-large", 0.25, 1),
)  # fmt: skip


def child(name: str, share: float, threads: int, machine: Path, folder: Path) -> None:
    """Plan, train and save, or go on from what was saved; says when it begins, and what it saw itself."""
    torch.set_num_threads(threads)
    model = MODELS[name]()
    initial = defer(model.make)
    graph = capture(initial.model, model.batch(0), model.loss)
    made = plan(graph, load_machine(machine), budget=f"{share:.0%}", disk_budget=40 * GiB, **model.settings)
    program = program_of(made, graph)
    trim()
    print("ready", flush=True)
    sys.stdin.readline()
    with Trainer(made, graph, None, folder=folder, threads=threads, program=program) as trainer:
        saved = latest_checkpoint(folder / "saved")
        if saved is None:
            initial.materialize(0, trainer.set_value)
        else:
            trainer.load(saved)
        for step in range(_STEPS if saved is None else _STEPS_AFTER):
            trainer.step(model.batch(step))
        trainer.save(folder / "saved", keep=1)
        seen, excess = trainer.peak_bytes, list(trainer.excess)
    result = {
        "parameters": sum(p.numel() for p in initial.model.parameters()),
        "budget_bytes": made.budgets["device"],
        "predicted_bytes": program.predicted_bytes,
        "seen_inside_bytes": seen,
        "said": excess,
    }
    print(json.dumps(result), flush=True)


def _status(pid: int, key: str) -> int:
    """A line of a process's status, bytes; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(key)), 0)


def watch(case: tuple[str, float, int], machine: Path) -> dict[str, Any]:
    """Run a case, in a process that starts and one that goes on, and look at them from here."""
    with tempfile.TemporaryDirectory(prefix="lading-budgets-") as folder:
        first = _watched(case, machine, folder)
        row = first if "failed" in first else _watched(case, machine, folder)
    if "failed" in row:
        return {"case": case, **row}
    keys = ("measured_bytes", "seen_inside_bytes")
    return {
        "case": case,
        **row,
        **{key: max(first[key], row[key]) for key in keys},
        "said": first["said"] + row["said"],
    }


def _watched(case: tuple[str, float, int], machine: Path, folder: str) -> dict[str, Any]:
    name, share, threads = case
    command = [sys.executable, __file__, "--child", name, str(share), str(threads), str(machine), folder]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline().strip() != "ready":
            return {"failed": process.stderr.read()[-800:]}
        before, highest, ended = _status(process.pid, "VmRSS:"), [0], threading.Event()

        def look() -> None:
            while not ended.wait(0.005):
                highest[0] = max(highest[0], _status(process.pid, "VmHWM:"))

        Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # planning had a peak of its own
        watcher = threading.Thread(target=look)
        watcher.start()
        process.stdin.write("go\n")
        process.stdin.flush()
        said = process.stdout.readline()
        ended.set()
        watcher.join()
        if not said:
            return {"failed": process.stderr.read()[-800:]}
    return {**json.loads(said), "measured_bytes": highest[0] - before}


def main() -> None:
    """Run the cases and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, help="a probed machine, instead of probing now")
    parser.add_argument("--jobs", type=int, default=1, help="cases side by side")
    parser.add_argument("--only", nargs="*", default=[], help="models")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, share, threads, machine, folder = args.child
        child(name, float(share), int(threads), Path(machine), Path(folder))
        return
    with tempfile.TemporaryDirectory(prefix="lading-budgets-") as folder:
        probed = load_machine(args.machine) if args.machine else probe(folder=Path(folder), threads=1, progress=print)
        files: dict[int, Path] = {}
        for threads in (1, 2):
            device = dataclasses.replace(probed.device, num_threads=threads)
            files[threads] = Path(folder) / f"machine-{threads}.toml"
            save_machine(dataclasses.replace(probed, device=device), files[threads])
        cases = [case for case in CASES if not args.only or case[0] in args.only]
        with ThreadPoolExecutor(args.jobs) as pool:
            rows = list(pool.map(lambda case: _print_row(watch(case, files[case[2]])), cases))
    good = [row for row in rows if "failed" not in row]
    errors = [abs(row["predicted_bytes"] / row["measured_bytes"] - 1) for row in good]
    broken = sum(row["measured_bytes"] > row["budget_bytes"] for row in good)
    print(
        f"{len(good)} of {len(rows)} cases ran, {broken} above their budget; predicted peak within "
        f"{max(errors):.1%}, median {median(errors):.1%}, {sum(e <= 0.03 for e in errors)} within 3%"
    )
    if args.json:
        args.json.write_text(
            json.dumps({"machine": probed.device.name, "torch": torch.__version__, "rows": rows}, indent=1)
        )


def _print_row(row: dict[str, Any]) -> dict[str, Any]:
    name, share, threads = row["case"]
    if "failed" in row:
        print(f"{name:13}{share:5.0%} {threads} threads  FAILED: {row['failed']}", flush=True)
        return row
    budget, predicted, measured = (row[f"{key}_bytes"] / MiB for key in ("budget", "predicted", "measured"))
    print(
        f"{name:13}{share:5.0%} {threads} threads {row['parameters'] / 1e6:6.1f} M  budget {budget:8.1f}  predicted "
        f"{predicted:8.1f}  measured {measured:8.1f} MiB  {predicted / measured - 1:+6.1%}  "
        f"{'kept' if measured <= budget else 'ABOVE'}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
