"""Parameters and states on disk: Lading's Trainer and DeepSpeed ZeRO-3 with NVMe, on the same ranks of this host.

    lading probe --ranks 2 --out machine.toml
    python benchmarks/ranks/nvme.py machine.toml --deepspeed /path/to/its/python [--model gpt-110m] [--json FILE]

Four minutes a model on a quiet host. DeepSpeed lies in an environment of its own, which needs, once:

    apt-get install libaio-dev ninja-build g++     # its asynchronous reads and writes, built at first use
    python -m venv DIR && DIR/bin/pip install torch==2.13.0 deepspeed==0.19.8 numpy

A first use that is killed leaves a file ``lock`` under ~/.cache/torch_extensions, for which the next waits forever.

Both train the same model from the same values on the same batches: two gloo ranks of a thread each, float32, AdamW. Of
Lading it is ``dp2,zero3`` in a budget so low that the shards of all parameters and states lie on disk between two uses,
which is checked; of DeepSpeed stage 3 with both offloads on NVMe, in the settings of ``SETTINGS``, of which the fastest
counts. A side is a job of its own and all are alive at once. They take turns of a few steps, of which the first does
not count: what a step leaves to be written behind its end falls into the next one's time, as it does in a long run.
Memory is the highest resident set of a rank in those steps above that before its model was built, by the kernel's mark;
bytes are those of /proc/self/io, which the disk was asked for. Losses are compared at every step with those of plain
PyTorch in one process. A setting that fails is left out, and its error printed: with 24 GiB give the large model two
settings at a time (``--only pipelined plain``).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from tools.batches import random_batch

from lading.models.reference import build_model, model_class
from lading.runtime.resident import PeakMeter, resident_bytes, trim
from lading.units import MiB

_RANKS, _LR, _WEIGHT_DECAY = 2, 1e-4, 0.01
#: Steps of a turn, of which the first does not count; steps before the first turn; seconds that writes have to end.
_TURN, _WARM_UP, _PAUSE_S = 3, 2, 1.0
#: Largest difference to plain PyTorch's losses as a share: kernels of AdamW and sums over ranks may round otherwise.
_TOLERANCE = 1e-4
#: Share of parameters and states that is to lie on disk; DeepSpeed keeps what is below 1 MiB in memory.
_ON_DISK = 0.9
#: Seconds that a side may take to be ready, or for a turn.
_LONGEST_S = 280


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model with its rank's batch, and the budget of Lading, a share of what keeping everything needs."""

    name: str
    sizes: dict[str, Any]
    rows: int
    tokens: int
    budget: str
    sub_group: int

    def made(self) -> torch.nn.Module:
        """Build the model, with the same values each time."""
        torch.manual_seed(0)
        return build_model(self.name, **self.sizes, max_seq_len=self.tokens)

    def batch(self, step: int, rank: int) -> Any:
        """Draw a rank's batch of a step."""
        sizes = {**self.sizes, "max_seq_len": self.tokens}
        return random_batch(self.name, sizes, rows=self.rows, tokens=self.tokens, seed=1000 * step + rank)


_LLAMA = {"num_layers": 6, "dim": 384, "num_heads": 6, "num_kv_heads": 6, "hidden_dim": 1024, "vocab_size": 4096}
_GPT = {"num_layers": 6, "dim": 384, "num_heads": 6, "vocab_size": 4096}
_LARGE = {"num_layers": 12, "dim": 768, "num_heads": 12, "vocab_size": 16384, "tied": False}
MODELS = {
    "llama": Model(name="llama", sizes=_LLAMA, rows=4, tokens=64, budget="40%", sub_group=2_000_000),
    "gpt": Model(name="gpt", sizes=_GPT, rows=4, tokens=64, budget="40%", sub_group=2_000_000),
    "gpt-110m": Model(name="gpt", sizes=_LARGE, rows=1, tokens=256, budget="28%", sub_group=7_000_000),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Setting of DeepSpeed; the rest is in ``_configuration``.

    Attributes:
        pipeline: Whether the optimizer's states are read and written while others are updated.
        parameters: Whether parameters are on NVMe, too; else they stay in memory.
        ahead: Whether parameters are gathered, and read, before they are used.
        buffers: Buffers of the optimizer's states, each of the largest sub-group; pipelined takes 12 or more.
    """

    pipeline: bool
    buffers: int
    parameters: bool = True
    ahead: bool = True


#: Settings in turns with Lading.
SETTINGS = {
    "pipelined": Setting(pipeline=True, buffers=12),
    "pipelined, not ahead": Setting(pipeline=True, buffers=12, ahead=False),
    "plain": Setting(pipeline=False, buffers=5),
    "states only": Setting(pipeline=True, buffers=12, parameters=False),
}


def _configuration(model: Model, setting: Setting, folder: Path, largest: int) -> dict[str, Any]:
    """Configure DeepSpeed; parameters' buffers take the largest of them, and none stays in memory that can leave it."""
    nvme = {"device": "nvme", "nvme_path": str(folder), "pin_memory": False}
    states = {"buffer_count": setting.buffers, "pipeline_read": setting.pipeline, "pipeline_write": setting.pipeline}
    on_disk = {**nvme, "buffer_count": 8, "buffer_size": largest, "max_in_cpu": 0}
    return {
        "train_micro_batch_size_per_gpu": model.rows,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": _LR, "weight_decay": _WEIGHT_DECAY}},
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "overlap_comm": False,
            "reduce_bucket_size": 5_000_000,
            "sub_group_size": model.sub_group,
            "stage3_param_persistence_threshold": 10_000,
            "stage3_prefetch_bucket_size": 10_000_000 if setting.ahead else 0,
            "stage3_max_live_parameters": 50_000_000,
            "stage3_max_reuse_distance": 50_000_000,
            **({"offload_param": on_disk} if setting.parameters else {}),
            "offload_optimizer": {**nvme, **states, "fast_init": False},
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 16,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


Step = Callable[[Any], float]


def _deepspeed(model: Model, setting: Setting, folder: Path) -> tuple[Step, int]:
    """Make the step of DeepSpeed; returns it with the bytes that were resident before the model."""
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.init_distributed("gloo")
    before, module = _resident_now(), model.made()
    largest = max(-(-each.numel() // _RANKS) for each in module.parameters())
    largest += -largest % 4096
    configuration = _configuration(model, setting, folder, largest)
    # Given a module with whole parameters, 0.19.8 makes them bfloat16 on a CPU without float16, whatever is configured.
    deepspeed.zero.Init(module=module, config_dict_or_path=configuration)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=configuration)
    loss_fn = model_class(model.name).loss

    def step(given: Any) -> float:
        loss = loss_fn(engine, given)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step, before


def _lading(model: Model, plan: Path, folder: Path) -> tuple[Step, int]:
    """Make the step of Lading by a plan; returns it with the bytes that were resident before the model."""
    lading: Any = importlib.import_module("lading")
    trainer_class, capture = lading.Trainer, lading.capture
    dist.init_process_group("gloo")
    before, module = _resident_now(), model.made()
    graph = capture(module, model.batch(0, dist.get_rank()), model_class(model.name).loss)
    rule = lading.AdamW(lr=_LR, weight_decay=_WEIGHT_DECAY)
    place = folder / f"rank{dist.get_rank()}"
    place.mkdir()
    trainer = trainer_class(plan, graph, module, folder=place, threads=1, optimizer=rule)
    return trainer.step, before


def _resident_now() -> int:
    trim()
    return resident_bytes()


def _disk_bytes() -> tuple[int, int]:
    """Read the bytes that this process had the disk read and write so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def serve(given: dict[str, Any]) -> None:
    """Train as one rank of a side: a line of steps comes in, a line of what they took goes out."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the libraries print goes to the log
    torch.set_num_threads(1)
    model, folder, rank = MODELS[given["model"]], Path(given["folder"]), int(os.environ["RANK"])
    if given["plan"]:
        step, before = _lading(model, Path(given["plan"]), folder)
    else:
        step, before = _deepspeed(model, Setting(**given["setting"]), folder)
    meter = PeakMeter()
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        numbers = json.loads(line)
        batches = [model.batch(number, rank) for number in numbers]
        if numbers[0] == _WARM_UP:  # building it does not count
            trim()
            meter.reset()
        seconds, losses = list[float](), list[float]()
        dist.barrier()
        for batch in batches:
            started = time.perf_counter()
            losses.append(step(batch))
            seconds.append(time.perf_counter() - started)
        answer = {"seconds": seconds, "losses": losses, "disk": _disk_bytes(), "peak": meter.peak_bytes() - before}
        print(json.dumps(answer), file=answers)


class SideError(RuntimeError):
    """Failure of a side, by its name."""


@dataclass
class Side:
    """A way to train, in ranks of its own, and what its counted steps took."""

    name: str
    log: IO[str]
    ranks: list[subprocess.Popen[str]]
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    disk: list[tuple[int, int]] = field(default_factory=list)
    peak_bytes: int = 0

    def receive(self) -> list[dict[str, Any]]:
        """Take one answer of each rank.

        Raises:
            SideError: a rank has died or takes too long; the end of the log is given.
        """
        lines = list[str]()
        for rank in self.ranks:
            assert rank.stdout is not None
            for _ in range(_LONGEST_S):
                if select.select([rank.stdout], [], [], 1.0)[0] or any(each.poll() is not None for each in self.ranks):
                    break
            lines.append(rank.stdout.readline() if select.select([rank.stdout], [], [], 0.0)[0] else "")
        if not all(lines):
            text = Path(self.log.name).read_text()[-1500:]
            raise SideError(f"{self.name}: expected an answer of each rank, got none; the log ends with\n{text}")
        return [json.loads(line) for line in lines]

    def train(self, numbers: list[int], counted: bool = True) -> None:
        """Train the steps of these numbers; the first of them does not count."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(numbers) + "\n")
            rank.stdin.flush()
        answers = self.receive()
        self.losses += [statistics.fmean(losses) for losses in zip(*(each["losses"] for each in answers), strict=True)]
        read, written = (sum(each["disk"][way] for each in answers) for way in (0, 1))
        self.disk.append((read, written))
        if counted:
            self.seconds += [max(ranks) for ranks in zip(*(each["seconds"][1:] for each in answers), strict=True)]
            self.peak_bytes = max(each["peak"] for each in answers)

    def end(self) -> None:
        """End the ranks."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def started(name: str, python: str, given: dict[str, Any], folder: Path) -> Side:
    """Start the ranks of a side."""
    root = Path(__file__).parents[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (folder / "log.txt").open("w")
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(_RANKS)}
    place |= {"LOCAL_WORLD_SIZE": str(_RANKS), "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root / 'src'}:{root}"}
    place |= {"DS_ACCELERATOR": "cpu", "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    command = [python, __file__, "-", "--serve", json.dumps({**given, "folder": str(folder)})]
    ranks = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(_RANKS)
    ]  # fmt: skip
    return Side(name, log, ranks)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Result of one side; bytes of the disk are for each parameter and step, both ranks together."""

    side: str
    median_s: float
    fastest_s: float
    slowest_s: float
    peak_bytes: int
    read: float
    written: float

    def __str__(self) -> str:
        spread = f"({self.fastest_s * 1e3:.0f} to {self.slowest_s * 1e3:.0f})"
        return (
            f"{self.side:31} {self.median_s * 1e3:6.0f} ms {spread:16} "
            f"peak {self.peak_bytes / MiB:7.1f} MiB a rank   disk {self.read:5.1f} read, {self.written:5.1f} written"
        )


def row(side: Side, parameters: int) -> Row:
    """Sum up a side."""
    steps = _TURN * (len(side.disk) - 1)
    (read, written), (read_last, written_last) = side.disk[0], side.disk[-1]
    return Row(
        side=side.name,
        median_s=statistics.median(side.seconds),
        fastest_s=min(side.seconds),
        slowest_s=max(side.seconds),
        peak_bytes=side.peak_bytes,
        read=(read_last - read) / steps / parameters,
        written=(written_last - written) / steps / parameters,
    )


def planned(model: Model, machine: str, file: Path, parameters: int, budget: str) -> None:
    """Plan Lading's side, check that all of it goes by the disk, and say what is predicted.

    Raises:
        SystemExit: something stays in memory in that budget.
    """
    lading: Any = importlib.import_module("lading")
    graph = lading.capture(model.made(), model.batch(0, 0), model_class(model.name).loss)
    rule = lading.AdamW(lr=_LR, weight_decay=_WEIGHT_DECAY)
    layout = f"dp{_RANKS},zero3"
    plan = lading.plan(graph, machine, budget=budget, cache=False, layout=layout, devices=_RANKS, optimizer=rule)
    plan.save(file)
    allowed, peak, disk = plan.budgets["device"], plan.peak_bytes["device"], plan.peak_bytes.get("disk", 0)
    all_bytes = 3 * 4 * parameters / _RANKS
    print(
        f"Lading, {layout}: budget {allowed / MiB:.1f} MiB a rank, predicted {plan.step_s * 1e3:.0f} ms, "
        f"{peak / MiB:.1f} MiB; on disk {disk / MiB:.1f}, shard and states of a rank are {all_bytes / MiB:.1f}",
        flush=True,
    )
    if disk < _ON_DISK * all_bytes:
        raise SystemExit(
            "expected a budget that puts parameters and states on disk, got one that keeps some; lower it (--budget)"
        )


def versions(python: str) -> str:
    """Name DeepSpeed and its torch.

    Raises:
        SystemExit: it is not installed there, or with another torch.
    """
    code = "import torch, deepspeed; print(f'VERSIONS {deepspeed.__version__} {torch.__version__}')"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([python, "-c", code], check=False, capture_output=True, text=True, env=environment)
    words = next((line.split() for line in done.stdout.splitlines() if line.startswith("VERSIONS ")), None)
    need = "--deepspeed: expected the python of an environment with DeepSpeed and torch"
    how = f"pip install torch=={torch.__version__.split('+')[0]} deepspeed==0.19.8 numpy, apt-get install libaio-dev"
    if words is None:
        raise SystemExit(f"{need}, got {python}, which says: {done.stderr.strip()[-300:]}\ninstall it: {how}")
    if words[2] != torch.__version__:
        raise SystemExit(f"{need} {torch.__version__}, got torch {words[2]} there; {how}")
    return f"DeepSpeed {words[1]}, torch {words[2]}"


def reference_losses(model: Model, steps: int) -> list[float]:
    """Train the same steps in plain PyTorch, in memory and in this process, and return the losses."""
    torch.set_num_threads(1)
    module, loss_fn = model.made(), model_class(model.name).loss
    optimizer = torch.optim.AdamW(module.parameters(), lr=_LR, weight_decay=_WEIGHT_DECAY, fused=True)
    losses = list[float]()
    for step in range(steps):
        each = list[float]()
        for rank in range(_RANKS):
            loss = loss_fn(module, model.batch(step, rank)) / _RANKS
            loss.backward()
            each.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(each))
    return losses


Way = tuple[str, str, dict[str, Any]]


def in_turns(ways: list[Way], turns: int, folder: Path, until: float) -> list[Side]:
    """Train all ways in turns, each a name with a python and what its ranks are given.

    Args:
        until: Moment by the monotonic clock after which no turn begins, once there was one.

    Returns:
        Those that did not fail, ended; why others did is printed.
    """
    sides: list[Side] = []

    def failed(side: Side, error: SideError) -> None:
        side.end()
        sides.remove(side)
        print(f"{error}\n{side.name}: left out, as it failed", flush=True)

    try:
        for name, python, what in ways:
            place = folder / name.replace(",", "").replace(" ", "-")
            place.mkdir()
            sides.append(started(name, python, what, place))
        for side in list(sides):
            try:
                side.receive()
            except SideError as error:
                failed(side, error)
        steps = [list(range(_WARM_UP))]
        steps += [list(range(first, first + _TURN)) for first in range(_WARM_UP, _WARM_UP + _TURN * turns, _TURN)]
        for turn, numbers in enumerate(steps):
            if not sides or (turn > 1 and time.monotonic() > until):
                break
            for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
                time.sleep(_PAUSE_S)
                try:
                    side.train(numbers, counted=turn > 0)
                except SideError as error:
                    failed(side, error)
    finally:
        for side in sides:
            side.end()
    return sides


def compared(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train one model in all ways in turns, and print what they took."""
    model = MODELS[args.model]
    parameters = sum(each.numel() for each in model.made().parameters())
    size = f"{parameters / 1e6:.1f} M parameters, {model.rows} x {model.tokens} tokens a rank"
    print(f"{args.model}: {size}; {args.versions}", flush=True)
    ways: list[Way] = [
        (f"DeepSpeed, {name}", args.deepspeed, {"model": args.model, "plan": "", "setting": asdict(each)})
        for name, each in SETTINGS.items()
        if not args.only or name in args.only
    ]
    plan = folder / "plan.json"
    planned(model, args.machine, plan, parameters, args.budget or model.budget)
    ways = [("Lading", sys.executable, {"model": args.model, "plan": str(plan)}), *ways]
    sides = in_turns(ways, args.turns, folder, args.until)
    if not sides or sides[0].name != "Lading":
        raise SystemExit("expected Lading's side to compare with, but it failed")
    rows = [row(side, parameters) for side in sides]
    print("\n".join(map(str, rows)), flush=True)
    reference = reference_losses(model, len(sides[0].losses))
    differences = dict[str, float]()
    for side in sides:
        worst = max(abs(a / b - 1) for a, b in zip(side.losses, reference, strict=True))
        differences[side.name] = worst
        alike = "alike" if worst <= _TOLERANCE else f"not alike within {_TOLERANCE:.0e}"
        print(
            f"{side.name}: losses differ from plain PyTorch's by {worst:.1e} at most in {len(reference)} steps, {alike}"
        )
    for other in rows[1:]:
        print(f"{other.side} takes {other.median_s / rows[0].median_s:.2f} times as long as Lading")
    return {
        "model": args.model,
        "versions": args.versions,
        "loss_differences": differences,
        "losses": {"plain": reference} | {side.name: side.losses for side in sides},
        "rows": [*map(asdict, rows)],
    }


def main() -> None:
    """Compare the sides, or be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine")
    parser.add_argument("--deepspeed", default=sys.executable, help="python of the environment that has DeepSpeed")
    parser.add_argument("--model", default="gpt-110m", choices=tuple(MODELS))
    parser.add_argument("--budget", default="", help="another budget for Lading")
    parser.add_argument("--turns", type=int, default=4, help=f"turns of {_TURN} steps")
    parser.add_argument("--folder", type=Path, help="folder on the disk to train from; a temporary one if left out")
    only = "settings of DeepSpeed, where memory lacks for all"
    parser.add_argument("--only", nargs="*", default=[], choices=tuple(SETTINGS), help=only)
    parser.add_argument("--seconds", type=float, default=240, help="seconds after which no turn begins")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve)
        return
    args.until = time.monotonic() + args.seconds
    args.versions = versions(args.deepspeed)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = compared(args, Path(folder))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
