"""The planner's distance from its proven bound: models x machines x budgets x clipping, as a table.

    python benchmarks/planner/zoo.py --models gpt-124m hf-bert-large --machines cpu rtx4090 --out results.md

Models are only captured, so any machine of the catalog can be planned for on any host. Times are predicted.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from lading import __version__
from lading.catalog.load import load_machine
from lading.errors import PlanInfeasible
from lading.ir.action import DEVICE
from lading.ir.expand import expand
from lading.ir.graph import StepGraph
from lading.ir.loss_parts import cross_entropies, with_loss_parts
from lading.ir.machine import Machine
from lading.ir.program import COMPUTE_STREAM, slot_bytes
from lading.memory.lifetime import lifetimes
from lading.planner.api import Planned, make_plan, step_costs, tier_limits
from lading.planner.lower import fixed_bytes
from lading.planner.residency import StepProblem
from lading.units import format_bytes, format_seconds, share_or_bytes
from models import cases

_HEAD = (
    "| model | clipping | machine | budget | step | bound | gap | deferred | loss in parts | busiest | "
    "compute waits for | other policies | planned in |"
)
_SUMMARY = (
    "| machine | budget | cases | cannot | none found | within 10% | median gap | 90th percentile | CPU seconds |"
)
#: Share of the bound that a plan is to be within.
_NEAR = 0.10


@dataclass(frozen=True)
class Row:
    """Case of the zoo: its line of the table, and what the summary counts.

    Attributes:
        gap: Share of the bound by which the plan is above it; None where there is no plan.
        cannot: Whether no plan can exist: one operation's operands are more than the budget leaves for tensors.
        seconds: CPU seconds of planning.
    """

    machine: str
    budget: str
    line: str
    gap: float | None
    cannot: bool
    seconds: float


def rows(name: str, graph: StepGraph, machine: Machine, budgets: list[str], clip_norm: float) -> Iterator[Row]:
    """One row a budget, a share of what keep-all needs (which may be more than the machine has)."""
    wide = dataclasses.replace(machine, device=dataclasses.replace(machine.device, memory_bytes=1 << 45))
    step = expand(graph, clip_norm=clip_norm)
    for budget in budgets:
        begin = time.process_time()
        start = f"| {name} | {clip_norm:g} | {machine.name} | {budget} "
        try:
            planned = make_plan(step, wide, budget=budget)
            plan = planned.plan
        except PlanInfeasible as error:
            seconds = time.process_time() - begin
            reason = _cannot(step, wide, budget)
            text = f"cannot: {reason}" if reason else f"none found: {error.missing_bytes} bytes missing"
            yield Row(
                machine.name, budget, f"{start}| {text} | | | | | | | | {seconds:.1f} s |", None, bool(reason), seconds
            )
            continue
        others = [
            f"{row.policy} {format_seconds(row.step_s) if row.step_s else 'does not fit'}"
            for row in plan.policies
            if row.policy != plan.request.policy
        ]
        bound, gap = (format_seconds(plan.lower_bound_s), f"{plan.gap:.1%}") if plan.lower_bound_s else ("none", "-")
        seconds = time.process_time() - begin
        line = (
            f"{start}| {format_seconds(plan.step_s)} | {bound} | {gap} | {plan.choices.deferred} | "
            f"{plan.choices.loss_parts or '-'} | {_busiest(planned)} | {_waits(planned)} | {', '.join(others)} | "
            f"{seconds:.1f} s |"
        )
        yield Row(machine.name, budget, line, plan.gap if plan.lower_bound_s else None, False, seconds)


def _cannot(step: StepGraph, machine: Machine, budget: str) -> str:
    """Operation that needs more bytes at once than a budget has, even with the loss in parts; "" where none does."""
    limits = {DEVICE: 1 << 60, **tier_limits(machine, {})}
    free = StepProblem(step, lifetimes(step), machine, step_costs(step, machine), limits)
    budgets = {**limits, DEVICE: share_or_bytes(budget, free.needs({}))}
    parts, origins = with_loss_parts(step, 16 if cross_entropies(step) else 0)
    costs = dataclasses.replace(free.costs, workspace_bytes=tuple(free.costs.workspace_bytes[i] for i in origins))
    whole = dataclasses.replace(free, graph=parts, lives=lifetimes(parts), costs=costs, budgets=budgets)
    sizes = [
        sum(slot_bytes(parts.storages[s].size_bytes) for s in {*reads, *writes})
        for reads, writes in zip(parts.op_reads, parts.op_writes, strict=True)
    ]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    if sizes[largest] <= whole.arena_bytes:
        return ""
    op, fixed = parts.ops[largest], fixed_bytes(machine, free.costs)
    return (
        f"{op.name} of {op.module or 'the loss'} needs {format_bytes(sizes[largest])} at once and the process "
        f"{format_bytes(fixed)}, of {format_bytes(budgets[DEVICE])}"
    )


def summary(rows: Sequence[Row]) -> list[str]:
    """Table of how far plans are from their bounds, a line for each machine and budget."""
    lines = [_SUMMARY, "|" + "---|" * (_SUMMARY.count("|") - 1)]
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.machine, row.budget].append(row)
    for (machine, budget), group in groups.items():
        gaps = sorted(row.gap for row in group if row.gap is not None)
        cannot = sum(row.cannot for row in group)
        middle, high = (f"{median(gaps):.1%}", f"{gaps[-(-9 * len(gaps) // 10) - 1]:.1%}") if gaps else ("-", "-")
        lines.append(
            f"| {machine} | {budget} | {len(group)} | {cannot} | {len(group) - cannot - len(gaps)} | "
            f"{sum(gap <= _NEAR for gap in gaps)} of {len(group) - cannot} | {middle} | {high} | "
            f"{sum(row.seconds for row in group):.0f} |"
        )
    return lines


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
    parser.add_argument("--machines", nargs="*", default=["rtx4090", "h100", "l4", "apple-m4"])
    parser.add_argument("--budgets", nargs="*", default=["50%", "25%"])
    parser.add_argument("--clip", nargs="*", type=float, default=[0.0])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    lines = [f"Lading {__version__}; predicted times; planned in: CPU seconds of one thread.", "", _HEAD]
    lines.append("|" + "---|" * (_HEAD.count("|") - 1))
    print("\n".join(lines))
    found: list[Row] = []
    for case in cases():
        if chosen.models and case.name not in chosen.models:
            continue
        graph = case.graph()
        for machine in map(load_machine, chosen.machines):
            for clip_norm in chosen.clip:
                for row in rows(case.name, graph, machine, chosen.budgets, clip_norm):
                    print(row.line, flush=True)
                    found.append(row)
    ended = ["", *summary(found)]
    print("\n".join(ended))
    lines += [row.line for row in found] + ended
    if chosen.out:
        chosen.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
