"""Placements run for real: a small GPT in parts on processes of this host that are made unlike, predicted and measured.

    python benchmarks/planner/placed.py --machine MACHINE.toml --out benchmarks/planner/results/placed_NAME_YYYYMM

MACHINE.toml is this host as ``lading probe`` measured it with one thread. A device is a process of one thread, so many
times slower: after each forward, backward and update it sleeps until as many times the processor seconds of it have
passed (``Slow``). That leaves processors to the others, and neighbors on the host cost it nothing while it would sleep.
Links are the loopback, measured by sending there and back. Each device has less memory than the model needs.

A case is planned (``lading place``'s policy chain), saved, and run by ``lading.place`` on as many gloo ranks as it has
parts. Compared: wall seconds of a step or pass, the most bytes of tensors alive on each rank, and losses with those of
one process. The machine file's error on this model, one process, is taken out in "at the speed of the day".
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tools.recorder import Recorder
from torch import nn
from torch.multiprocessing.spawn import start_processes

import lading
from lading.catalog.load import load_machine
from lading.ir.fleet import Fleet, Join, Member
from lading.ir.machine import Machine
from lading.ir.placement import Placement, PlacementProblem
from lading.ir.plan import Plan, PlanKind
from lading.ir.request import Request
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.placing import saved
from lading.planner.placement.contest import place
from lading.planner.placement.from_graph import Grain, problem_of
from lading.tracing.trace import capture
from lading.units import MiB

SIZES: dict[str, Any] = {"vocab_size": 1024, "max_seq_len": 128, "dim": 192, "num_heads": 4, "num_layers": 6}
TOKENS, ROWS, STEPS = 128, 2, 8
#: Transfers that are timed: bytes and how often.
_PINGS = ((8, 200), (1 << 20, 60))


@dataclass(frozen=True, kw_only=True)
class Case:
    """Devices by how many times slower than a core they are.

    Attributes:
        share: Memory of each device, as a share of what the model needs.
    """

    name: str
    slower: tuple[float, ...]
    share: float
    micro_batches: int = 8
    training: bool = True


CASES = (
    Case(name="two alike", slower=(20.0, 20.0), share=0.75),
    Case(name="two unlike", slower=(20.0, 40.0), share=0.75),
    Case(name="two unlike, little memory", slower=(20.0, 40.0), share=0.62),
    Case(name="three unlike", slower=(20.0, 30.0, 60.0), share=0.5),
    Case(name="three unlike, one pass", slower=(20.0, 30.0, 60.0), share=0.6, micro_batches=1, training=False),
    Case(name="two unlike, one pass", slower=(20.0, 40.0), share=0.85, micro_batches=1, training=False),
)


def model_of() -> nn.Module:
    """Build the model, alike in every process."""
    torch.manual_seed(0)
    return build_model("gpt", **SIZES)


def loss_of(logits_BTV: torch.Tensor, next_BT: torch.Tensor) -> torch.Tensor:
    """Mean over a micro-batch."""
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), next_BT.flatten())


def tokens_of(count: int) -> torch.Tensor:
    """Draw the tokens of so many micro-batches."""
    return torch.randint(0, SIZES["vocab_size"], (count * ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(1))


class Slow:
    """A device so many times slower than it is."""

    def __init__(self, times: float) -> None:
        self.times = times

    def __call__(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap work so that it sleeps afterwards."""

        def slowed(*args: Any, **kwargs: Any) -> Any:
            began, used = time.perf_counter(), time.process_time()
            result = work(*args, **kwargs)
            rest = self.times * (time.process_time() - used) - (time.perf_counter() - began)
            time.sleep(max(0.0, rest))
            return result

        return slowed


def planned(case: Case, machine: Machine, link: tuple[float, float]) -> tuple[PlacementProblem, Placement, Plan]:
    """The case's problem and what is placed; ``link``: bytes a second and seconds."""
    graph = capture(model_of(), {"tokens": torch.zeros(ROWS, TOKENS + 1, dtype=torch.int64)}, next_byte_loss)
    grain = Grain(max_units=16, training=case.training)
    one = Fleet(name="one", date="", source="", devices=(_member("one", machine, None),))
    need = problem_of(graph, one, grain=grain).least_bytes
    names = [f"device {n}, {times:g} times slower" for n, times in enumerate(case.slower)]
    members = tuple(_member(name, machine, int(case.share * need)) for name in names)
    links = tuple(
        Join(name=f"{a}-{b}", devices=(names[a], names[b]), medium="wire", bandwidth_bytes_per_s=link[0],
             efficiency=1.0, latency_s=link[1])
        for a, b in combinations(range(len(names)), 2)
    )  # fmt: skip
    fleet = Fleet(name=case.name, date="", source="", devices=members, links=links)
    problem = problem_of(graph, fleet, grain=grain, micro_batches=case.micro_batches, name=case.name)
    tasks = tuple(
        dataclasses.replace(t, seconds=tuple(s * x for s, x in zip(t.seconds, case.slower, strict=True)))
        for t in problem.tasks
    )
    problem = dataclasses.replace(problem, tasks=tasks)
    found = place(problem, "chain")
    asked = Request(
        model="gpt", machine=case.name, seq_len=TOKENS, layout=f"mb{ROWS}", global_batch=ROWS * case.micro_batches,
        training=case.training, units=16,
    )  # fmt: skip
    return problem, found, saved(asked, fleet, problem, found)


def _member(name: str, machine: Machine, usable_bytes: int | None) -> Member:
    device = machine.device
    size = device.memory_bytes if usable_bytes is None else device.overhead_bytes + usable_bytes
    return Member(name=name, machine=machine, memory_bytes=size)


def alone(steps: int, micro_batches: int, *, training: bool) -> dict[str, Any]:
    """One process: losses of each step, and processor seconds of one micro-batch and of an update."""
    model, tokens = model_of(), tokens_of(micro_batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    each: list[float] = []
    update: list[float] = []
    for _ in range(steps):
        total = 0.0
        for rows in tokens.split(ROWS):
            used = time.process_time()
            with torch.set_grad_enabled(training):
                loss = loss_of(model(rows[:, :-1]), rows[:, 1:]) / micro_batches
            if training:
                loss.backward()
            each.append(time.process_time() - used)
            total += loss.item()
        losses.append(total)
        used = time.process_time()
        if training:
            optimizer.step()
            optimizer.zero_grad()
        update.append(time.process_time() - used)
    return {"losses": losses, "each_s": median(each), "update_s": median(update)}


def _ranks(function: Callable[..., None], count: int, *args: Any) -> list[Any]:
    """Call a function in processes of their own; returns what each rank writes."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (function, count, folder, args), nprocs=count, start_method="spawn")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(count)]


def _rank(rank: int, function: Callable[..., Any], count: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count)
    try:
        Path(folder, f"{rank}.json").write_text(json.dumps(function(rank, *args)))
    finally:
        dist.destroy_process_group()


def ping(rank: int) -> list[float]:
    """Seconds of a transfer one way, the least, for each size."""
    found: list[float] = []
    for size, count in _PINGS:
        data, taken = torch.zeros(size, dtype=torch.uint8), list[float]()
        for _ in range(count):
            began = time.perf_counter()
            for sender in (0, 1):
                (dist.send if rank == sender else dist.recv)(data, 1 - rank)
            taken.append((time.perf_counter() - began) / 2)
        found.append(min(taken))
    return found


def part(rank: int, file: str, slower: list[float], steps: int, record: bool) -> dict[str, Any]:
    """A rank of a case: seconds of steps and the losses; or, recorded, the most bytes alive in the third step."""
    plan = Plan.load(file, PlanKind.PLACEMENT)
    recorder = Recorder({})
    if record:
        recorder.__enter__()
    tokens = tokens_of(plan.micro_batches)
    model = model_of()
    own = lading.place(plan, model, (tokens[:ROWS, :-1],), loss_of if plan.request.training else None)
    del model
    gc.collect()
    slow = Slow(1.0 if record else slower[rank])
    own.stage.forward_one_chunk = slow(own.stage.forward_one_chunk)
    own.stage.backward_one_chunk = slow(own.stage.backward_one_chunk)
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    updated = slow(update)
    walls: list[float] = []
    losses: list[float] = []
    for turn in range(steps):
        if record and turn == 2:
            gc.collect()
            recorder.peak_bytes = recorder.live_bytes
        dist.barrier()
        began = time.perf_counter()
        if plan.request.training:
            found = own.step(tokens[:, :-1], target=tokens[:, 1:])
            updated()
            losses += [sum(loss.item() for loss in found) / plan.micro_batches] if found else []
        else:
            logits = own.run(tokens[:, :-1])
            losses += [] if logits is None else [loss_of(logits, tokens[:, 1:]).item()]
            del logits
        dist.barrier()
        walls.append(time.perf_counter() - began)
    if record:
        recorder.__exit__(None, None, None)
    return {"walls_s": walls[2:], "losses": losses, "peak_bytes": recorder.peak_bytes}


def run(case: Case, machine: Machine, link: tuple[float, float], steps: int) -> dict[str, Any]:
    """One case, predicted and measured."""
    problem, found, plan = planned(case, machine, link)
    plain = alone(3 if case.training else 12, case.micro_batches, training=case.training)
    twice = problem.spared([0] * len(problem.groups))
    tasks = [task for number, task in enumerate(problem.tasks) if number not in twice]
    own = [sum(t.seconds[0] for t in tasks if t.once_per_step is late) / case.slower[0] for late in (False, True)]
    drift = (plain["each_s"] * case.micro_batches + plain["update_s"]) / (own[0] * case.micro_batches + own[1])
    names = list(plan.choices.in_flight)
    order = [names.index(stage.device) for stage in plan.stages]
    slower = [case.slower[d] for d in order]
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "placement.json")
        plan.save(Path(file))
        timed = _ranks(part, len(order), file, slower, 2 + steps, False)
        held = _ranks(part, len(order), file, slower, 3, True)
    walls = [max(walls) for walls in zip(*(rank["walls_s"] for rank in timed), strict=True)]
    losses = timed[-1]["losses"]
    expected = plain["losses"] if case.training else plain["losses"][:1] * len(losses)
    differ = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=False))
    return {
        "case": case.name,
        "slower": list(case.slower),
        "micro_batches": case.micro_batches,
        "training": case.training,
        "parts": [f"{stage.device}: from {stage.begins}" for stage in plan.stages],
        "predicted_s": found.step_s,
        "bound_s": found.bound_s,
        "drift": drift,
        "measured_s": median(walls),
        "walls_s": walls,
        "predicted_bytes": [found.peak_bytes[d] for d in order],
        "memory_bytes": [problem.network.memory_bytes[d] for d in order],
        "measured_bytes": [rank["peak_bytes"] for rank in held],
        "losses": losses,
        "loss_difference": differ,
    }


def lines(rows: list[dict[str, Any]], about: str) -> list[str]:
    """Markdown."""
    text = [about, "", "| case | parts | predicted | at the speed of the day | measured | error | peak, predicted and"
            " measured, MiB | has | losses differ by |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        today = row["predicted_s"] * row["drift"]
        peaks = ", ".join(
            f"{a / MiB:.1f} / {b / MiB:.1f} ({a / b - 1:+.1%})"
            for a, b in zip(row["predicted_bytes"], row["measured_bytes"], strict=True)
        )
        cells = [row["case"], "; ".join(row["parts"]), f"{row['predicted_s']:.3f} s", f"{today:.3f} s"]
        cells += [f"{row['measured_s']:.3f} s", f"{today / row['measured_s'] - 1:+.1%}", peaks]
        cells += [", ".join(f"{size / MiB:.1f}" for size in row["memory_bytes"]), f"{row['loss_difference']:.1e}"]
        text.append("| " + " | ".join(cells) + " |")
    return text


def main() -> None:
    """Run all cases, printing each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="this host, by lading probe with one thread")
    parser.add_argument("--only", nargs="+", type=int, default=range(len(CASES)), help="numbers of cases")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, help="writes OUT.json and OUT.md")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    machine = load_machine(asked.machine)
    latency_s, large_s = _ranks(ping, 2)[0]
    link = (_PINGS[1][0] / max(large_s - latency_s, 1e-9), latency_s)
    rows: list[dict[str, Any]] = []
    about = (
        f"{machine.host_id}, one thread a device, torch {torch.__version__}, gloo; loopback {link[0] / 1e9:.2f} GB/s "
        f"and {link[1] * 1e6:.0f} us; GPT {SIZES}, {ROWS} rows of {TOKENS} tokens"
    )
    for number in asked.only:
        rows.append(run(CASES[number], machine, link, asked.steps))
        text = lines(rows, about)
        print(text[-1], flush=True)
        if asked.out is not None:
            asked.out.with_suffix(".json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
            asked.out.with_suffix(".md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
