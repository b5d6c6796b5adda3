"""The contest of ``contest.py`` on this host: every side's program is executed, one step each in turn.

    lading probe --out machine.toml
    python benchmarks/planner/measured.py plan machine.toml decisions.json --models gpt-small --budgets 50%
    python benchmarks/planner/measured.py run decisions.json --rounds 15

Planning takes many times what the steps take, so it is a command of its own that a host may be busy during. All sides
live in one process, each with its own arena and swap file; turns rotate, and ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from contest import MODELS, RIVALS, Case, batch_of, best_of, step_within

from lading import __version__
from lading.catalog.load import load_machine
from lading.errors import PlanInfeasible
from lading.ir.graph import StepGraph
from lading.ir.machine import Machine
from lading.ir.plan import Option, Plan, plan_from_dict
from lading.ir.program import Program
from lading.memory.restore import program_of, step_of
from lading.memory.verify import verify
from lading.optim.adamw import AdamW
from lading.planner.residency import StepProblem
from lading.prepare import plan
from lading.runtime.resident import trim
from lading.trainer import Trainer

_WARM_UP = 3
_OURS = "Lading"


def _step(graph: StepGraph, machine: Machine, made: Plan) -> StepProblem:
    """Make the problem that rivals decide: the step, budgets and memory besides tensors of Lading's plan."""
    step = step_of(graph, machine, clip_norm=0.0, master_weights=False)
    return step_within(step, machine, made.budgets, made.request.settings)


def planned(case: Case, machine_file: Path, budget: str, limit_s: float) -> dict[str, Any]:
    """Lading's plan and each rival's choices, as JSON."""
    machine = load_machine(machine_file)
    made = plan(case.graph, machine, budget=budget)
    step = _step(case.graph, machine, made)
    row: dict[str, Any] = {"model": case.name, "budget": budget, "plan": made.to_dict(), "rivals": {}}
    row |= {"machine": str(machine_file), "room_bytes": step.arena_bytes}
    for name, rival in RIVALS.items():
        found = best_of(step, rival(step, limit_s))
        if found is None:
            continue
        choices = [[storage, start, option] for (storage, start), option in found.choices.items()]
        row["rivals"][name] = {"predicted_s": found.step_s, "retimed": found.retimed, "choices": choices}
    print(f"{case.name} {budget}: {_OURS} {made.step_s:.4g} s, " + ", ".join(
        f"{name} {rival['predicted_s']:.4g} s" for name, rival in row["rivals"].items()), flush=True)  # fmt: skip
    return row


def programs(case: Case, row: dict[str, Any]) -> tuple[Plan, dict[str, Program]]:
    """Every side's program, lowered again from what ``planned`` wrote."""
    made = plan_from_dict(json.loads(json.dumps(row["plan"])), "decisions")
    machine = load_machine(Path(row["machine"]))
    step = _step(case.graph, machine, made)
    sides = {_OURS: program_of(made, case.graph)}
    for name, rival in row["rivals"].items():
        choices = {(storage, start): Option(option) for storage, start, option in rival["choices"]}
        program = step.lower(choices, rival["retimed"]).program
        assert program is not None, "it fitted when it was decided"
        verify(program)
        sides[name] = program
    return made, sides


def run(row: dict[str, Any], rounds: int, threads: int, folder: Path) -> dict[str, Any]:
    """Steps of all sides in turn; medians, and ratios to Lading's round by round."""
    case = Case.of(row["model"])
    made, sides = programs(case, row)
    trainers: dict[str, Trainer] = {}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    try:
        for number, (name, program) in enumerate(sides.items()):
            own = folder / str(number)
            own.mkdir()
            trainers[name] = Trainer(
                made, case.graph, None, optimizer=AdamW(lr=1e-3), folder=own, threads=threads, program=program
            )
            case.initial.materialize(0, trainers[name].set_value)
            trim()
        names = list(sides)
        for turn in range(_WARM_UP + rounds):
            shift = turn % len(names)
            batch = batch_of(row["model"], turn)
            for name in names[shift:] + names[:shift]:
                torch.manual_seed(turn)
                started = time.perf_counter()
                losses[name].append(trainers[name].step(batch))
                if turn >= _WARM_UP:
                    seconds[name].append(time.perf_counter() - started)
    finally:
        for trainer in trainers.values():
            trainer.close()
    predicted = {_OURS: made.step_s, **{name: rival["predicted_s"] for name, rival in row["rivals"].items()}}
    return {
        "model": row["model"], "budget": row["budget"], "device_bytes": made.budgets["device"], "seconds": seconds,
        "predicted_s": predicted, "equal": len({tuple(values) for values in losses.values()}) == 1,
    }  # fmt: skip


def lines(result: dict[str, Any]) -> list[str]:
    """Rows of the table."""
    ours = result["seconds"][_OURS]
    rows: list[str] = []
    for name, values in result["seconds"].items():
        ratios = sorted(value / our for value, our in zip(values, ours, strict=True))
        cut = len(ratios) // 10
        ratio = f"{statistics.median(ratios):.3f} ({ratios[cut]:.3f} to {ratios[-1 - cut]:.3f})"
        middle, predicted = statistics.median(values), result["predicted_s"][name]
        rows.append(
            f"| {result['model']} | {result['budget']} | {name} | {predicted * 1e3:.1f} ms | {middle * 1e3:.1f} ms | "
            f"{'-' if name == _OURS else ratio} | {'equal' if result['equal'] else 'DIFFERENT'} |"
        )
    return rows


def main() -> None:
    """Decide, or run what was decided."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    decide = commands.add_parser("plan", help="decide, and write the decisions")
    decide.add_argument("machine", type=Path, help="from lading probe")
    decide.add_argument("--models", nargs="*", default=["gpt-small", "llama-small"], choices=MODELS)
    decide.add_argument("--budgets", nargs="*", default=["75%", "50%", "25%"])
    decide.add_argument("--ilp-seconds", type=float, default=10.0, help="time limit of each of torch's programs")
    execute = commands.add_parser("run", help="run decisions")
    execute.add_argument("--rounds", type=int, default=15)
    execute.add_argument("--threads", type=int, default=2)
    execute.add_argument("--only", type=int, help="the decision with this number, from 0")
    execute.add_argument("--folder", type=Path, help="for swap files; a temporary one by default")
    execute.add_argument("--out", type=Path, help="append the rows here")
    for command in (decide, execute):
        command.add_argument("decisions", type=Path)
    options = parser.parse_args()
    if options.command == "plan":
        rows: list[dict[str, Any]] = []
        for case in map(Case.of, options.models):
            for budget in options.budgets:
                try:
                    rows.append(planned(case, options.machine, budget, options.ilp_seconds))
                except PlanInfeasible as error:
                    print(f"{case.name} {budget}: does not fit, {error.missing_bytes} bytes are missing")
        options.decisions.write_text(json.dumps(rows))
        return
    decided = json.loads(options.decisions.read_text())
    print(f"Lading {__version__}, torch {torch.__version__}, {options.threads} threads")
    print(
        "| model | budget | side | predicted | measured | side / Lading, 80% of rounds | losses |\n" + "|---" * 7 + "|"
    )
    for row in decided if options.only is None else decided[options.only : options.only + 1]:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            table = lines(run(row, options.rounds, options.threads, Path(folder)))
        print("\n".join(table), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
