"""The planner's distance from its proven bound: models x machines x budgets x clipping, as a table.

    python benchmarks/planner/zoo.py --models gpt-124m hf-bert-large --machines cpu rtx4090 --out results.md

Models are only captured, so any machine of the catalog can be planned for on any host. Times are predicted.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from lading import __version__
from lading.catalog.load import load_machine
from lading.errors import PlanInfeasible
from lading.ir.expand import expand
from lading.ir.graph import StepGraph
from lading.ir.machine import Machine
from lading.ir.program import COMPUTE_STREAM
from lading.planner.api import Planned, make_plan
from lading.units import format_seconds
from models import cases

_HEAD = (
    "| model | clipping | machine | budget | step | bound | gap | deferred | busiest | compute waits for | "
    "other policies | planned in |"
)


def rows(name: str, graph: StepGraph, machine: Machine, budgets: list[str], clip_norm: float) -> Iterator[str]:
    """One line a budget, a share of what keep-all needs (which may be more than the machine has)."""
    wide = dataclasses.replace(machine, device=dataclasses.replace(machine.device, memory_bytes=1 << 45))
    step = expand(graph, clip_norm=clip_norm)
    for budget in budgets:
        begin = time.process_time()
        start = f"| {name} | {clip_norm:g} | {machine.name} | {budget} "
        try:
            planned = make_plan(step, wide, budget=budget)
            plan = planned.plan
        except PlanInfeasible as error:
            yield f"{start}| does not fit: {error.missing_bytes} bytes missing | | | | | | | |"
            continue
        others = [
            f"{row.policy} {format_seconds(row.step_s) if row.step_s else 'does not fit'}"
            for row in plan.policies
            if row.policy != plan.request.policy
        ]
        bound, gap = (format_seconds(plan.lower_bound_s), f"{plan.gap:.1%}") if plan.lower_bound_s else ("none", "-")
        seconds = time.process_time() - begin
        yield (
            f"{start}| {format_seconds(plan.step_s)} | {bound} | {gap} | {plan.choices.deferred} | "
            f"{_busiest(planned)} | {_waits(planned)} | {', '.join(others)} | {seconds:.1f} s |"
        )


def _busiest(planned: Planned) -> str:
    """The stream that runs longest, with its share of the step."""
    busy: dict[str, float] = defaultdict(float)
    for event in planned.predicted.events:
        busy[event.stream] += event.end_s - event.start_s
    stream, seconds = max(busy.items(), key=lambda row: row[1])
    return f"{stream} {seconds / planned.plan.step_s:.0%}"


def _waits(planned: Planned) -> str:
    """Shares of the step in which compute waits, by the stream whose action ended last before it went on."""
    ends = {event.action: event.end_s for event in planned.predicted.events}
    waited: dict[str, float] = defaultdict(float)
    ended_s = 0.0
    for event in planned.predicted.events:
        if event.stream != COMPUTE_STREAM:
            continue
        waits = planned.program.actions[event.action].waits
        if event.start_s > ended_s and waits:
            last = max(waits, key=lambda action: ends[action])
            waited[planned.program.actions[last].stream] += event.start_s - ended_s
        ended_s = event.end_s
    shares = {stream: seconds / planned.plan.step_s for stream, seconds in waited.items()}
    largest = sorted(shares.items(), key=lambda row: -row[1])
    return ", ".join(f"{stream} {share:.0%}" for stream, share in largest if share >= 0.005) or "-"


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", help="names of benchmarks/planner/models.py; all by default")
    parser.add_argument("--machines", nargs="*", default=["cpu", "rtx4090"])
    parser.add_argument("--budgets", nargs="*", default=["75%", "50%", "25%"])
    parser.add_argument("--clip", nargs="*", type=float, default=[0.0, 1.0])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    lines = [f"Lading {__version__}; predicted times; planned in: CPU seconds of one thread.", "", _HEAD]
    lines.append("|" + "---|" * (_HEAD.count("|") - 1))
    print("\n".join(lines))
    for case in cases():
        if chosen.models and case.name not in chosen.models:
            continue
        graph = case.graph()
        for machine in map(load_machine, chosen.machines):
            for clip_norm in chosen.clip:
                for line in rows(case.name, graph, machine, chosen.budgets, clip_norm):
                    print(line, flush=True)
                    lines.append(line)
    if chosen.out:
        chosen.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
