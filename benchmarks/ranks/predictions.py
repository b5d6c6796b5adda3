"""Is the peak of every rank predicted, its budget kept, and the step's time predicted? Models over ranks of this host.

    lading probe --ranks 4 --out machine.toml
    python benchmarks/ranks/predictions.py machine.toml [--only "llama pp2"] [--json FILE]

Twenty minutes for all. Each case is a launch of torchrun with a thread a rank: it plans for a share of what keeping
everything needs on a rank in that layout, and trains. A budget is a rank's, so that of a pipeline's stages is the same.

A host that others share is faster now and slower then, by a third within minutes, its caches more than its products. So
each case has before it a launch of as many processes as it has ranks, each of which trains for itself and keeps
everything. They tell how many times longer products, other operations and the disk take now than the machine file says
(``lading.ir.host_speed``), and what is predicted at that speed stands beside the first prediction. A launch during
which others took more than a tenth of the processors is made again, three times at most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tools.batches import random_batch

import lading
from lading.catalog.load import machine_from_dict
from lading.ir.host_speed import measured_speed
from lading.ir.layout import parse_layout
from lading.ir.machine import HostSpeed
from lading.ir.timeline import Timeline
from lading.memory.restore import program_of
from lading.models.reference import build_model, model_class
from lading.runtime.probe import QUIET, LoadMeter
from lading.runtime.probe_disk import probe_disk
from lading.sim.device_step import job_step_s, simulate
from lading.units import MiB

_LLAMA = {"num_layers": 6, "dim": 384, "num_heads": 6, "num_kv_heads": 6, "hidden_dim": 1024, "vocab_size": 4096}
_GPT = {"num_layers": 6, "dim": 384, "num_heads": 6, "vocab_size": 4096}
_MOE = {
    "num_layers": 4, "dim": 256, "num_heads": 4, "num_kv_heads": 4, "hidden_dim": 512, "num_experts": 8,
    "num_active": 2, "vocab_size": 2048,
}  # fmt: skip
_DIT = {"num_layers": 4, "dim": 256, "num_heads": 4}
#: Sizes, sequences of a rank's micro-batch, and tokens of a sequence.
_MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "llama": (_LLAMA, 4, 64), "gpt": (_GPT, 4, 64), "moe": (_MOE, 4, 64), "dit": (_DIT, 4, 64)
}  # fmt: skip
#: Model, layout, micro-batches of a replica, share of what keeping everything needs.
CASES: tuple[tuple[str, str, int, str], ...] = (
    ("gpt", "dp1", 2, "100%"), ("llama", "dp1", 2, "50%"),
    ("llama", "dp2", 2, "100%"), ("gpt", "dp2", 1, "60%"), ("moe", "dp2", 2, "100%"), ("dit", "dp2", 1, "60%"),
    ("llama", "dp2,zero1", 2, "100%"), ("gpt", "dp2,zero2", 1, "100%"), ("moe", "dp2,zero2", 1, "60%"),
    ("gpt", "dp2,zero3", 1, "100%"), ("llama", "dp2,zero3", 2, "60%"), ("dit", "dp2,zero3", 2, "80%"),
    ("gpt", "pp2", 4, "100%"), ("llama", "pp2", 4, "60%"), ("dit", "pp2", 4, "100%"),
    ("llama", "pp2,vpp2,interleaved", 4, "100%"), ("gpt", "pp2,zero-bubble", 4, "100%"),
    ("llama", "tp2", 2, "100%"), ("gpt", "tp2,sp", 2, "60%"),
    ("llama", "cp2", 2, "100%"), ("moe", "dp2,ep2", 2, "100%"),
    ("llama", "dp4,zero3", 1, "80%"), ("gpt", "pp4", 8, "100%"), ("llama", "dp2,pp2", 4, "100%"),
)  # fmt: skip
_STEPS, _WARM_UP = 10, 3
#: Seconds in which the disk is measured beside a case.
_DISK_S = 2.0
#: Seconds that a case may take.
_LONGEST_S = 180
#: Launches of a case at most, while others load the host.
_LAUNCHES = 3


@dataclass(frozen=True)
class Row:
    """Result of one case; bytes by rank, seconds those of the slowest rank.

    ``now_s`` is predicted at the host's ``speed``, which processes without each other told just before; their own row
    has what they found. ``load`` is the largest share of the processors that others took meanwhile.
    """

    case: str
    predicted_s: float
    step_s: float
    predicted_bytes: list[int]
    peak_bytes: list[int]
    budget_bytes: list[int]
    now_s: float
    speed: dict[str, Any]
    load: float = 0.0

    @property
    def error(self) -> float:
        """Error of the predicted step, as a share of the measured one, at the host's speed just before."""
        return self.now_s / self.step_s - 1

    @property
    def worst(self) -> float:
        """Error of the predicted peak on the rank where it is largest, as a share of the measured one."""
        pairs = zip(self.predicted_bytes, self.peak_bytes, strict=True)
        return max((predicted / peak - 1 for predicted, peak in pairs), key=abs)

    @property
    def within(self) -> bool:
        """Whether every rank kept its budget."""
        return all(peak <= budget for peak, budget in zip(self.peak_bytes, self.budget_bytes, strict=True))

    def __str__(self) -> str:
        peak, budget = max(zip(self.peak_bytes, self.budget_bytes, strict=True), key=lambda pair: pair[0] / pair[1])
        return (
            f"{self.case:34} peak {peak / MiB:6.1f} of {budget / MiB:6.1f} MiB {'kept' if self.within else 'ABOVE':5} "
            f"predicted {self.worst:+6.1%}   step {self.step_s * 1e3:7.1f} ms, predicted {self.predicted_s * 1e3:7.1f} "
            f"({self.predicted_s / self.step_s - 1:+.0%}), now {self.now_s * 1e3:7.1f} ({self.error:+.0%})"
            + (f"   others took {self.load:.0%}" if self.load > QUIET else "")
        )


def train(case: tuple[str, str, int, str], machine: str, speed: HostSpeed | None) -> Row:
    """Plan and train one case; called on all ranks.

    Args:
        speed: Speed of the host; None where processes that train for themselves are to tell it.
    """
    name, layout, micro_batches, share = case
    sizes, rows, tokens = _MODELS[name]
    sizes = sizes if name == "dit" else {**sizes, "max_seq_len": tokens}
    replica = parse_layout(layout).replica(dist.get_rank())

    def batches(step: int) -> list[Any]:
        seeds = (1000 * step + 10 * replica + number for number in range(micro_batches))
        return [random_batch(name, sizes, rows=rows, tokens=tokens, seed=seed) for seed in seeds]

    torch.manual_seed(0)
    model = build_model(name, **sizes)
    graph = lading.capture(model, batches(0)[0], model_class(name).loss, accumulation=micro_batches)
    plan = lading.plan(graph, machine, budget=share, cache=False, layout=layout)
    apart = {"threads": 1, "optimizer": lading.AdamW(lr=1e-3), "independent": speed is None}
    mine = plan if speed is None else plan.of_rank(dist.get_rank())
    seconds, timelines = list[float](), list[Timeline]()
    with (
        tempfile.TemporaryDirectory() as folder,
        lading.Trainer(plan, graph, model, folder=folder, **apart) as trainer,
    ):
        for step in range(_STEPS):
            given = batches(step)
            dist.barrier()
            started = time.perf_counter()
            trainer.step(given)
            seconds.append(time.perf_counter() - started)
            timelines.append(trainer.rank_timeline().timeline)
        if speed is None:
            shared = lading.load_machine(machine).with_threads(1).shared_by(dist.get_world_size())
            told = measured_speed(trainer.program, simulate(trainer.program, shared), timelines[_WARM_UP:])
            speed = _mean(replace(told, tiers=_disk_now(shared, Path(folder))))
        measured = [mine.peak_bytes["device"], trainer.peak_bytes, mine.budgets["device"]]
    every = _of_all(measured)
    step_s = statistics.median(max(ranks) for ranks in zip(*_of_all(seconds[_WARM_UP:]), strict=True))
    predicted, peaks, budgets = ([int(values[index]) for values in every] for index in range(3))
    now = machine_from_dict(plan.request.machine_table, "the plan's machine").at_speed(speed)
    now_s = job_step_s([program_of(each, graph) for each in (plan, *plan.peers)], now)
    label = f"{name} {layout} mb{micro_batches} {share}"
    return Row(label, plan.step_s, step_s, predicted, peaks, budgets, now_s, asdict(speed))


def _mean(speed: HostSpeed) -> HostSpeed:
    """Average what the processes found."""
    every: list[HostSpeed] = _of_all(speed)
    return HostSpeed(
        products=statistics.fmean(each.products for each in every),
        others=statistics.fmean(each.others for each in every),
        tiers={name: statistics.fmean(each.tiers[name] for each in every) for name in speed.tiers},
    )


def _disk_now(machine: lading.Machine, folder: Path) -> dict[str, float]:
    """Measure how many times longer the disk takes now to read and to write than the machine file says."""
    a, out = torch.rand(512, 512), torch.empty(512, 512)
    now, tier = probe_disk(folder, _DISK_S, lambda: torch.mm(a, a, out=out)).tier, machine.tier(machine.swap_tier)
    assert tier is not None, "lading probe measures the disk"
    rates = {"read": "mixed_read_bytes_per_s", "write": "mixed_write_bytes_per_s"}
    return {f"{tier.name}.{way}": getattr(tier, rate) / getattr(now, rate) for way, rate in rates.items()}


def _of_all(values: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, values)
    return every


def quiet(
    case: tuple[str, str, int, str], machine: str, folder: Path, ranks: int, speed: dict[str, Any] | None
) -> Row | None:
    """Run one case while the host is quiet, else as quietly as in three launches; None where one failed."""
    rows: list[Row] = []
    while not rows or (rows[-1].load > QUIET and len(rows) < _LAUNCHES):
        row = launched(case, machine, folder, ranks, speed)
        if row is None:
            return None
        rows.append(row)
    return min(rows, key=lambda row: row.load)


def launched(
    case: tuple[str, str, int, str], machine: str, folder: Path, ranks: int, speed: dict[str, Any] | None
) -> Row | None:
    """Run one case in ranks of its own; None, with what they said on stderr, where they failed."""
    out = folder / "row.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    given = [machine, "--case", json.dumps([case, speed]), "--json", str(out)]
    meter = LoadMeter()
    try:
        done = subprocess.run([*command, *given], check=False, capture_output=True, text=True, timeout=_LONGEST_S)
    except subprocess.TimeoutExpired:
        print(f"{' '.join(map(str, case))}: not done after {_LONGEST_S} s", file=sys.stderr)
        return None
    if done.returncode or not out.exists():
        print(f"{' '.join(map(str, case))}: failed\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return replace(Row(**json.loads(out.read_text())), load=meter.share() or 0.0)


def main() -> None:
    """Run the cases and print a table, or one case as a rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine")
    parser.add_argument("--only", default="", help="cases whose line contains this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        case, speed = args.case
        row = train(tuple(case), args.machine, None if speed is None else HostSpeed(**speed))
        if dist.get_rank() == 0:
            args.json.write_text(json.dumps(asdict(row)))
        dist.destroy_process_group()
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in (each for each in CASES if args.only in " ".join(map(str, each))):
            ranks = parse_layout(case[1]).devices
            alone = quiet((case[0], "dp1", 2, "100%"), args.machine, Path(folder), ranks, None)
            row = alone and quiet(case, args.machine, Path(folder), ranks, alone.speed)
            if alone and row:
                rows.append(replace(row, load=max(alone.load, row.load)))
                print(rows[-1], flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if rows:
        errors = [abs(row.error) for row in rows]
        kept, near = sum(row.within for row in rows), sum(abs(row.worst) <= 0.05 for row in rows)
        print(
            f"{len(rows)} of {len(CASES)} cases: budget kept in {kept}, peak within 5% in {near}, step as "
            f"the host is within 10% in {sum(e <= 0.1 for e in errors)}, median error {statistics.median(errors):.0%}"
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
