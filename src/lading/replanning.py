"""Planning a run again while it trains: in a process of its own, whose memory is none of the run's."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lading.catalog.load import machine_from_dict
from lading.config import run_from_dict, run_to_dict
from lading.ir.machine import Machine
from lading.ir.plan import Plan
from lading.ir.program import Program
from lading.memory.restore import programs_of
from lading.run import Prepared
from lading.trainer import Trainer

#: For each router, by its module, the share of steps in which each expert gets tokens, or pairs (share, mean tokens).
Loads = Mapping[str, Sequence[float | tuple[float, float]]]
#: Seconds that the process which plans may take.
_PLANNING_S = 600.0
_PLAN = "import sys; sys.path[:] = {path!r}; from lading.replanning import plan_for; plan_for(sys.argv[1])"


def plan_apart(before: Prepared, machine: Machine, loads: Loads | None = None) -> Plan | str:
    """Plan a run within the budgets that it has, in a process of its own.

    Args:
        before: The run by its plan of now.
        machine: Machine to plan for.
        loads: Shares of steps in which experts get tokens, of a run that leaves them out, or with the mean tokens of
            each (``lading.plan(experts=)``).
    Returns:
        The plan, or why there is none.
    """
    budgets = dict(before.plan.budgets)
    memory = dataclasses.replace(before.run.memory, budget=budgets.pop("device")).with_tier_budgets(budgets)
    run = dataclasses.replace(before.run, memory=memory)
    with tempfile.TemporaryDirectory(prefix="lading-") as folder:
        asked, made = Path(folder) / "asked.json", Path(folder) / "plan.json"
        table = dataclasses.asdict(machine)
        what = {"run": run_to_dict(run), "machine": table, "loads": dict(loads or {}), "out": str(made)}
        asked.write_text(json.dumps(what))
        command = [sys.executable, "-P", "-c", _PLAN.format(path=sys.path), str(asked)]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_PLANNING_S)
        except (subprocess.TimeoutExpired, OSError) as error:
            return f"{error}"
        error_lines = done.stderr.strip().splitlines()
        return (
            Plan.load(made)
            if done.returncode == 0
            else (error_lines[-1] if error_lines else f"it ended with {done.returncode}")
        )


def plan_for(path: str) -> None:
    """Plan the run that a file asks for; run by the process that plans apart from a run that trains."""
    from lading.prepare import plan_run

    asked = json.loads(Path(path).read_text())
    machine = machine_from_dict(asked["machine"], "the machine as it is now")
    plan_run(run_from_dict(asked["run"]), machine, loads=asked["loads"]).plan.save(Path(asked["out"]))


def restored(plan: Plan, before: Prepared) -> Program:
    """Program of another plan of a run, whose further steps are proven as well.

    Raises:
        ConfigError: the plan is of another run or machine.
    """
    return programs_of(plan, before.step.captured, before.step.others)[0]


def go_on_by(plan: Plan, before: Prepared, trainer: Trainer) -> Prepared:
    """Let a run go on by another plan between two steps; returns the run by it.

    Raises:
        ConfigError: as ``restored``; the trainer is as it was.
    """
    prepared = dataclasses.replace(before, plan=plan, program=restored(plan, before))
    trainer.pause()
    trainer.resume(plan, before.step.captured, others=before.step.others)
    plan.save(Path(before.run.out) / "plan.json")  # of the steps that reports are about from now on
    return prepared
