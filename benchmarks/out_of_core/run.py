"""Out of core on a CPU with a disk: Lading beside other ways to train what does not fit, each with its limit.

    python benchmarks/out_of_core/run.py probe --folder F                       a minute
    python benchmarks/out_of_core/run.py plan --folder F --model gpt-124m --tokens 256
    python benchmarks/out_of_core/run.py measure --folder F --model gpt-124m --tokens 256 --json RESULTS.json
    python benchmarks/out_of_core/run.py show --json RESULTS.json               the tables
    python benchmarks/out_of_core/run.py largest --folder F --resident 2GB --tokens 128
    python benchmarks/out_of_core/run.py run-largest --folder F --depths DEPTH --tokens 128 --json RESULTS.json

Only ``probe``, ``measure`` and ``run-largest`` need a quiet host. A cell is a model, its number format, tokens of a
step and shares of what keep-all needs (``--budgets``); its sides (``--sides``) take turns, each in a process of its own
with all of the threads. A turn is a few steps, of which the first does not count: what a step leaves to be written
behind its end falls into the next one's time, as it does in a long run. Results are added to those in the file.

DeepSpeed lies in an environment of its own (``--deepspeed PYTHON``), made as benchmarks/ranks/nvme.py says.

``measure --probe`` probes the host right before the sides' turns and right behind them, a minute each, as its speed
drifts by a fifth within an hour: the bytes and operations of each plan's limit have the mean of the seconds that the
two probes say. What is predicted, and what no plan is below, are still those of the machine that was planned for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from sides import LR, MAKERS, Side, control_group

from lading.catalog.load import load_machine, machine_from_dict, save_machine
from lading.cost.compute import device_costs
from lading.errors import LadingError
from lading.ir.graph import StepGraph
from lading.ir.machine import Machine
from lading.ir.plan import Plan, ResourceLimit
from lading.memory.restore import program_of
from lading.models.reference import model_class
from lading.optim.adamw import AdamW
from lading.planner.linear import facets
from lading.prepare import plan
from lading.report.promises import limit_words
from lading.runtime.host import host_id
from lading.runtime.probe import probe
from lading.tracing.initial import defer
from lading.tracing.trace import capture
from lading.units import MiB, format_bytes, parse_bytes

_GPT = {"vocab_size": 50257}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("gpt", {"num_layers": 2, "dim": 128, "num_heads": 4, "vocab_size": 1024}),
    "gpt-30m": ("gpt", {"num_layers": 6, "dim": 384, "num_heads": 6, **_GPT}),
    "gpt-124m": ("gpt", {"num_layers": 12, "dim": 768, "num_heads": 12, **_GPT}),
    "gpt-350m": ("gpt", {"num_layers": 24, "dim": 1024, "num_heads": 16, **_GPT}),
    "llama-1b": (
        "llama",
        {"num_layers": 22, "dim": 2048, "num_heads": 32, "num_kv_heads": 4, "hidden_dim": 5632, "vocab_size": 32000},
    ),
}
BUDGETS = ("50%", "25%", "12%")
_WARM_UP, _PAUSE_S, _LONGEST_S = 2, 1.0, 1800


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What the sides of one comparison train."""

    model: str
    precision: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.model} {self.precision} {self.tokens}"

    def side(self, kind: str, folder: Path, threads: int, budget: str = "") -> Side:
        """Describe a side of the cell; Lading's plan lies in the folder."""
        name, sizes = MODELS[self.model]
        return Side(
            kind=kind,
            model=name,
            sizes=sizes,
            tokens=self.tokens,
            precision=self.precision,
            threads=threads,
            folder=str(folder),
            plan=str(self.plan_file(folder, threads, budget)) if budget else "",
        )

    def plan_file(self, folder: Path, threads: int, budget: str) -> Path:
        """Name the file of a plan of the cell."""
        return folder / f"{self.model}-{self.precision}-{self.tokens}-{budget.rstrip('%')}-{threads}.json"


def machine_file(folder: Path, threads: int) -> Path:
    """Name the file of this host as measured with so many threads."""
    return folder / f"machine-{threads}.toml"


def captured(side: Side) -> StepGraph:
    """Capture a side's step."""
    return capture(defer(side.module).model, side.batch(0), model_class(side.model).loss)


def planned(side: Side, budget: str, machine: Path) -> Plan:
    """Plan a side of Lading, without what was planned before."""
    torch.set_num_threads(side.threads)  # kernels are run to see what memory they take
    return plan(
        captured(side),
        load_machine(machine),
        budget=budget,
        cache=False,
        master_weights=side.precision == "bf16",
        optimizer=AdamW(lr=LR),
    )


def cell_options(page: str, budget: str, **numbers: int) -> argparse.ArgumentParser:
    """Options of a benchmark of one cell: its folder, model, budget, and whole numbers by name."""
    parser = argparse.ArgumentParser(description=page.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", default="gpt-124m")
    parser.add_argument("--budget", default=budget)
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--only-plan", action="store_true", help="plan, into the cache, and measure nothing")
    parser.add_argument("--json", type=Path)
    return parser


def add_to(options: argparse.Namespace, cell: Cell, **found: Any) -> None:
    """Print what was found of a cell, and add it to the results, if any are to be kept."""
    print(json.dumps(found, indent=1))
    if options.json is not None and not options.only_plan:
        known = json.loads(options.json.read_text()) if options.json.is_file() else []
        sizes = {"cell": str(cell), "budget": options.budget, "threads": options.threads, "torch": torch.__version__}
        options.json.write_text(json.dumps([*known, {**sizes, **found}], indent=1) + "\n")


def machine_now(options: argparse.Namespace) -> Machine:
    """Measure the host as it is."""
    return probe(folder=options.folder, threads=options.threads, seconds=40, device="cpu")


def limits_on(made: Plan, graph: StepGraph, now: Sequence[Machine]) -> list[dict[str, Any]]:
    """Limits of a plan's step by what the host was measured to do, in the mean of several measurements.

    Args:
        graph: Step as captured.
    """
    then, step = machine_from_dict(made.request.machine_table, "the plan's machine"), program_of(made, graph).graph
    size = {each.resource: each.size_bytes for each in made.predictions.limits}

    def seconds(limit: ResourceLimit, machine: Machine) -> float:
        (disk,) = machine.tiers
        read, written = (size.get(f"{way} disk", 0) for way in ("reads from", "writes to"))
        moves = {
            "reads from disk": read / disk.read_bytes_per_s,
            "writes to disk": written / disk.write_bytes_per_s,
            "disk both ways": max(a * read + b * written for a, b in facets(disk)),
        }
        computing = sum(device_costs(step, machine)) / sum(device_costs(step, then))
        return moves.get(limit.resource, limit.seconds * computing)

    return [
        {**asdict(limit), "seconds": statistics.mean(seconds(limit, machine) for machine in now)}
        for limit in made.predictions.limits
    ]


def num_parameters(side: Side) -> int:
    """Count the numbers that are trained."""
    return sum(each.numel() for each in defer(side.module).model.parameters())


def predicted(made: Plan, parameters: int) -> dict[str, Any]:
    """Figures of a plan: what it predicts, its limit by resource, and what it moves for each parameter."""
    row = next(each for each in made.policies if each.policy == made.request.policy)
    ways = {way: sum(size for name, size in row.moved_bytes.items() if name.endswith(way)) for way in ("read", "write")}
    return {
        "step_s": made.step_s,
        "bound_s": made.lower_bound_s,
        "limits": [asdict(each) for each in made.predictions.limits],
        "budget_bytes": made.budgets["device"],
        "peak_bytes": made.peak_bytes["device"],
        "keep_all_bytes": made.predictions.keep_all_bytes,
        "read": ways["read"] / parameters,
        "written": ways["write"] / parameters,
        "recompute_s": row.recompute_s,
        "stall_s": row.stall_s,
    }


class SideError(RuntimeError):
    """Failure of a side, by its name."""


@dataclass
class Running:
    """A side in its process, with what its counted steps took."""

    name: str
    log: IO[str]
    process: subprocess.Popen[str]
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    disk: list[tuple[int, int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    process_bytes: int = 0

    def receive(self) -> dict[str, Any]:
        """Take an answer.

        Raises:
            SideError: the process has died or takes too long; the end of its log is given.
        """
        assert self.process.stdout is not None
        for _ in range(_LONGEST_S):
            if select.select([self.process.stdout], [], [], 1.0)[0] or self.process.poll() is not None:
                break
        ready = select.select([self.process.stdout], [], [], 0.0)[0]
        if line := self.process.stdout.readline() if ready else "":
            return json.loads(line)
        late = not ready and self.process.poll() is None
        self.process.kill()
        code = self.process.wait()
        if late:
            raise SideError(f"{self.name}: no answer in {_LONGEST_S} s")
        last = [text for text in Path(self.log.name).read_text().splitlines() if text.strip()][-1:]
        why = "killed" if code == -9 and not last else f"exit code {code}: {(last or ['nothing said'])[0][-300:]}"
        raise SideError(f"{self.name}: {why}")

    def train(self, numbers: list[int], *, counted: bool, skipped: int = 1) -> None:
        """Train the steps of these numbers; the first ``skipped`` of them do not count."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(numbers) + "\n")
        self.process.stdin.flush()
        answer = self.receive()
        self.losses += answer["losses"]
        self.disk.append(tuple(answer["disk"]))
        self.steps.append(len(numbers))
        self.seconds += answer["seconds"][skipped:] if counted else []
        if counted:
            self.peak_bytes, self.process_bytes = answer["peak"], answer["process"]

    def end(self) -> None:
        """End the process, and its control group if it made one."""
        self.process.kill()
        self.process.wait()
        if (group := control_group(self.process.pid)) is not None and group.is_dir():
            group.rmdir()

    def figures(self, parameters: int) -> dict[str, Any]:
        """Sum up the counted steps; bytes of the disk are for each parameter and step."""
        moved = [(b - a) / sum(self.steps[1:]) / parameters for a, b in zip(self.disk[0], self.disk[-1], strict=True)]
        return {
            "median_s": statistics.median(self.seconds),
            "fastest_s": min(self.seconds),
            "slowest_s": max(self.seconds),
            "steps": len(self.seconds),
            "peak_bytes": self.peak_bytes,
            "process_bytes": self.process_bytes,
            "read": moved[0],
            "written": moved[1],
            "losses": self.losses,
        }


def started(name: str, side: Side, python: str) -> Running:
    """Start the process of a side."""
    root = Path(__file__).parents[2]
    log = (Path(side.folder) / "log.txt").open("w")
    place = {"OMP_NUM_THREADS": str(side.threads), "PYTHONPATH": f"{root / 'src'}:{root}", "DS_ACCELERATOR": "cpu"}
    place |= {"PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    command = [python, str(Path(__file__).parent / "sides.py"), json.dumps(asdict(side))]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **place}
    )
    return Running(name, log, process)


def in_turns(sides: dict[str, tuple[Side, str]], turns: int, length: int, until: float) -> tuple[list[Running], Any]:
    """Train sides in turns, by name, each with the python that runs it.

    Args:
        length: Steps of a turn, of which the first does not count.
        until: Moment by the monotonic clock after which no turn begins.

    Returns:
        Sides that ended well, and why others did not, by name.
    """
    running: list[Running] = []
    begun: list[Running] = []
    failed: dict[str, str] = {}

    def attempt(one: Running, numbers: list[int] | None, *, counted: bool = False) -> None:
        try:
            if numbers is None:
                one.receive()
            else:
                one.train(numbers, counted=counted)
        except SideError as error:
            failed[one.name] = str(error)
            running.remove(one)
            print(f"{error}; left out", flush=True)

    try:
        for name, (side, python) in sides.items():
            running.append(started(name, side, python))
            begun.append(running[-1])
            attempt(running[-1], None)
        plans = [list(range(_WARM_UP))]
        plans += [list(range(first, first + length)) for first in range(_WARM_UP, _WARM_UP + length * turns, length)]
        for turn, numbers in enumerate(plans):
            if turn > 1 and time.monotonic() > until:
                break
            shift = turn % max(1, len(running))
            for one in running[shift:] + running[:shift]:
                time.sleep(_PAUSE_S)
                attempt(one, numbers, counted=turn > 0)
    finally:
        for one in begun:
            one.end()
    return running, failed


def measure(cell: Cell, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the sides of a cell in turns."""
    sides: dict[str, tuple[Side, str]] = {}
    plans: dict[str, Plan] = {}
    for kind in options.sides:
        for budget in options.budgets if kind in ("lading", "paging") else ("",):
            name = f"{kind} {budget}".strip()
            place = folder / name.replace(" ", "-").rstrip("%")
            place.mkdir()
            side = cell.side(kind, options.folder, options.threads, budget)
            if budget and not Path(side.plan).is_file():
                print(f"{name}: left out, as it has no plan: {side.plan}")
                continue
            if budget:
                plans[name] = Plan.load(side.plan)
                side = dataclasses.replace(side, limit_bytes=plans[name].budgets["device"])
            python = options.deepspeed if kind.startswith("deepspeed") else sys.executable
            sides[name] = (dataclasses.replace(side, folder=str(place)), python)
    any_side = next(iter(sides.values()))[0]
    parameters = num_parameters(any_side)
    now = [machine_now(options)] if options.probe else []
    running, failed = in_turns(sides, options.turns, options.steps, time.monotonic() + options.seconds)
    now += [machine_now(options)] if options.probe else []
    rows = {one.name: one.figures(parameters) for one in running}
    for name, made in plans.items():
        if name in rows and name.startswith("lading"):
            rows[name]["plan"] = predicted(made, parameters)
            if now:
                rows[name]["limits"] = limits_on(made, captured(any_side), now)
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    for row in rows.values():
        row |= {"when": when, "turns_with": sorted(sides)}
        row["of_plain"] = row["median_s"] / rows["plain"]["median_s"] if "plain" in rows else None
    return {"parameters": parameters, "sides": rows, "failed": failed}


def keep(file: Path, key: str, found: dict[str, Any]) -> dict[str, Any]:
    """Put what was found among the results of this host; returns the cell with what it had before."""
    here = {"host": host_id(), "torch": torch.__version__, "python": platform.python_version()}
    results = json.loads(file.read_text()) if file.is_file() else {**here, "cells": {}}
    if there := {k: results.get(k) for k in here if results.get(k) != here[k]}:
        raise SystemExit(f"{file}: expected results of {here}, found {there}; give another --json")
    cell = results["cells"].setdefault(key, {"sides": {}, "failed": {}})
    cell |= {name: value for name, value in found.items() if name not in ("sides", "failed")}
    for name in found["sides"]:
        cell["failed"].pop(name, None)
    cell["sides"] |= found["sides"]
    cell["failed"] |= found["failed"]
    file.write_text(json.dumps(results, indent=1) + "\n")
    return cell


#: Begins the name of the limit that is no resource by itself: what moving takes from computing.
_BESIDE = "computing beside"
_COLUMNS = (
    *("cell", "side", "step, s", "steps", "limit, s", "binds", "above it", "with the disk's cost", "no plan below, s"),
    *("predicted, s", "of all in memory"),
    *("peak, MiB", "process, MiB", "read", "predicted", "written", "predicted", "losses"),
)


def _cells(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def table(cells: dict[str, Any]) -> list[str]:
    """Table of all sides, in Markdown; bytes read and written are for each parameter and step."""
    lines = [_cells(*_COLUMNS), "|" + "---|" * len(_COLUMNS)]
    for key, cell in cells.items():
        for name, row in cell["sides"].items():
            lines.append(_line(key, name, row, cell["sides"].get("plain")))
        empty = [""] * (len(_COLUMNS) - 3)
        lines += [_cells(key, name, why[:120], *empty) for name, why in cell["failed"].items()]
    return lines


def _line(key: str, name: str, row: dict[str, Any], plain: dict[str, Any] | None) -> str:
    made = row.get("plan")
    step = row["median_s"]
    limit, binds, above, beside_it, least, said, read, written = ("-",) * 8
    if made:
        seconds = {each["resource"]: each["seconds"] for each in row.get("limits", made["limits"])}
        binds = max((name for name in seconds if not name.startswith(_BESIDE)), key=lambda name: seconds[name])
        limit, above = f"{seconds[binds]:.2f}", f"{step / seconds[binds] - 1:+.0%}"
        beside_it = f"{step / max(seconds.values()) - 1:+.0%}"
        least = f"{made['bound_s']:.2f}"
        said, read, written = f"{made['step_s']:.2f}", f"{made['read']:.1f}", f"{made['written']:.1f}"
    beside = f"{row['of_plain']:.2f}" if row.get("of_plain") else "-"
    spread = f"{step:.2f} ({row['fastest_s']:.2f} to {row['slowest_s']:.2f})"
    sizes = [f"{row[key] / MiB:.0f}" for key in ("peak_bytes", "process_bytes")]
    disk = f"{row['read']:.1f}", read, f"{row['written']:.1f}", written
    limits = limit, binds, above, beside_it, least
    return _cells(key, name, spread, row["steps"], *limits, said, beside, *sizes, *disk, _compare_losses(row, plain))


def _compare_losses(row: dict[str, Any], plain: dict[str, Any] | None) -> str:
    if plain is None or plain is row:
        return "-"
    pairs = [*zip(row["losses"], plain["losses"], strict=False)]
    if all(a == b for a, b in pairs):
        return f"equal in {len(pairs)}"
    return f"within {max(abs(a / b - 1) for a, b in pairs):.0e}"


def make_plans(cells: Iterable[Cell], options: argparse.Namespace) -> None:
    """Plan the cells' budgets, each unless it was planned before."""
    for cell in cells:
        for budget in options.budgets:
            file = cell.plan_file(options.folder, options.threads, budget)
            if file.is_file():
                continue
            side, begin = cell.side("lading", options.folder, options.threads, budget), time.perf_counter()
            try:
                made = planned(side, budget, machine_file(options.folder, options.threads))
            except LadingError as error:
                print(f"{cell} {budget}: {error}", flush=True)
                continue
            made.save(file)
            print(f"{cell} {budget}: {limit_words(made)}; in {time.perf_counter() - begin:.0f} s", flush=True)


def shape_of(depth: int) -> dict[str, Any]:
    """Sizes of a Llama whose width grows with its depth, as published ones do."""
    dim = 128 * depth
    return {"num_layers": depth, "dim": dim, "num_heads": depth, "num_kv_heads": depth, "vocab_size": 32000}


def largest(options: argparse.Namespace) -> None:
    """Find the largest Llama that a plan for so much resident memory exists for, and train it."""
    resident = parse_bytes(options.resident, "--resident")
    machine = machine_file(options.folder, options.threads)
    best: tuple[int, Path] | None = None
    for depth in options.depths:
        MODELS["largest"] = ("llama", shape_of(depth))
        cell = Cell(model="largest", precision=options.precision, tokens=options.tokens)
        side = cell.side("lading", options.folder, options.threads, "100%")
        count, begin = num_parameters(side), time.perf_counter()
        try:
            made = planned(side, str(resident - options.process_mib * MiB), machine)
        except LadingError as error:
            print(f"depth {depth}, {count / 1e9:.2f} G parameters: {str(error)[:300]}", flush=True)
            break
        file = options.folder / f"largest-{depth}.json"
        made.save(file)
        best = depth, file
        print(f"depth {depth}, {count / 1e9:.2f} G parameters: {limit_words(made)}; planned in "
              f"{time.perf_counter() - begin:.0f} s", flush=True)  # fmt: skip
    if best is None:
        raise SystemExit("expected a depth that fits, found none; give smaller --depths")


def run_largest(options: argparse.Namespace) -> None:
    """Train a few steps by the plan of ``largest``."""
    depth = options.depths[0]
    MODELS["largest"] = ("llama", shape_of(depth))
    cell = Cell(model="largest", precision=options.precision, tokens=options.tokens)
    file = options.folder / f"largest-{depth}.json"
    made = Plan.load(file)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        side = dataclasses.replace(cell.side("lading", Path(place), options.threads), plan=str(file))
        one = started("largest", side, sys.executable)
        try:
            built_bytes = one.receive()["built"]
            one.train([0], counted=False)
            one.train([1, 2], counted=True, skipped=0)
        finally:
            one.end()
    count = num_parameters(side)
    row = {**one.figures(count), "plan": predicted(made, count)}
    row |= {"when": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "turns_with": [], "built_bytes": built_bytes}
    sizes = f"{format_bytes(one.process_bytes)} in the steps and {format_bytes(built_bytes)} before them"
    print(f"{count / 1e9:.2f} G parameters, the process took {sizes}; losses {one.losses}, seconds {one.seconds}")
    if options.json:
        keep(options.json, f"largest-{depth} {options.precision} {options.tokens}",
             {"parameters": count, "sides": {"lading": row}, "failed": {}})  # fmt: skip


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["probe", "plan", "measure", "show", "largest", "run-largest"])
    parser.add_argument("--model", nargs="+", default=["gpt-124m"], choices=[*MODELS])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[256])
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), help="shares of what keep-all needs")
    parser.add_argument("--sides", nargs="+", default=["plain", "lading"], choices=[*MAKERS])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, help="for the machine file, plans and what sides keep on the disk")
    parser.add_argument("--deepspeed", default=sys.executable, help="python of the environment that has DeepSpeed")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a turn, of which the first does not count")
    parser.add_argument("--seconds", type=float, default=240.0, help="after which no turn begins")
    parser.add_argument("--probe", action="store_true", help="measure: limits of the host as probed in the window")
    parser.add_argument("--json", type=Path, help="results, to which those of the cell are added")
    parser.add_argument("--resident", default="2GB", help="largest: bytes of the whole process")
    parser.add_argument("--process-mib", type=int, default=320, help="largest: what the process has before training")
    parser.add_argument("--depths", nargs="+", type=int, default=[16, 20, 24, 28, 32], help="largest: layers to try")
    return parser.parse_args(arguments)


def main() -> None:
    """Do one part of the work."""
    options = parsed()
    if options.do == "show":
        print("\n".join(table(json.loads(options.json.read_text())["cells"])))
        return
    if options.folder is None:
        raise SystemExit("expected --folder, for the machine file, plans and files of the sides; got none")
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.do == "probe":
        machine = machine_now(options)
        save_machine(machine, machine_file(options.folder, options.threads))
        print(machine)
        return
    if options.do in ("largest", "run-largest"):
        options.tokens = options.tokens[0]
        return largest(options) if options.do == "largest" else run_largest(options)
    cells = [Cell(model=m, precision=options.precision, tokens=t) for m in options.model for t in options.tokens]
    if options.do == "plan":
        return make_plans(cells, options)
    for cell in cells:
        with tempfile.TemporaryDirectory(dir=options.folder) as place:
            found = measure(cell, options, Path(place))
        shown = keep(options.json, str(cell), found) if options.json else found
        print("\n".join(table({str(cell): shown})), flush=True)


if __name__ == "__main__":
    main()
