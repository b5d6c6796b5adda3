"""The planner's distance from its proven bound: models x machines x budgets x clipping, as tables.

    python benchmarks/planner/zoo.py --models gpt-124m hf-bert-large --machines cpu rtx4090 --out zoo_NAME_YYYYMM

Models are only captured, so any machine of the catalog can be planned for on any host. Times are predicted. A run
writes each case into ``--out`` (.json) as soon as it is planned, in the place of an earlier one of the same case, and
all tables (.md) are made of what is there: a zoo can be planned in several runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
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
from lading.ir.machine import Machine
from lading.ir.program import COMPUTE_STREAM, slot_bytes
from lading.memory.lifetime import lifetimes
from lading.planner.api import Planned, make_plan, step_costs, tier_limits
from lading.planner.forms import head_forms, lesser_forms
from lading.planner.lower import fixed_bytes
from lading.planner.residency import StepProblem
from lading.units import format_bytes, format_seconds, share_or_bytes
from models import cases

_HEAD = (
    "| model | clipping | machine | budget | step | bound | above it | recomputed | deferred | late | form | "
    "on host | busiest | compute waits for | other policies | planned in |"
)
_SUMMARY = (
    "| machine | budget | cases | cannot | none found | within 10% | median above | 90th percentile | CPU seconds |"
)
#: Share of the bound that a plan is to be within.
_NEAR = 0.10


@dataclass(frozen=True)
class Row:
    """Case of the zoo, as planned.

    Attributes:
        step_s, bound_s: Seconds of the step and of its bound; 0 where there is no plan, or no bound.
        seconds: CPU seconds of planning.
        recompute_s: Seconds of the step that compute again.
        deferred, late, hosted: Updates deferred and late, operations on the host.
        loss_parts, head_parts: Parts in which the loss, and the head with it, are computed.
        gradient_pieces: Least bytes of pieces of gradients.
        busiest, waits: Stream that runs longest, and those that compute waits for, with shares of the step.
        others: Other policies, with their steps.
        missing_bytes: Bytes by which the smallest plan found is above the budget, where there is none within it.
        cannot: Why no plan can exist: one operation's operands are more than the budget leaves for tensors.
    """

    model: str
    clip_norm: float
    machine: str
    budget: str
    seconds: float
    step_s: float = 0.0
    bound_s: float = 0.0
    recompute_s: float = 0.0
    deferred: int = 0
    late: int = 0
    loss_parts: int = 0
    hosted: int = 0
    busiest: str = ""
    waits: str = ""
    others: str = ""
    missing_bytes: int = 0
    cannot: str = ""
    head_parts: int = 0
    gradient_pieces: int = 0

    @property
    def gap(self) -> float | None:
        """Share of the bound by which the plan is above it; None where there is no plan."""
        return self.step_s / self.bound_s - 1 if self.bound_s else None

    @property
    def form(self) -> str:
        """Form of the step that is planned: "whole", or what is in parts or pieces."""
        parts = [
            f"{name} in {count}" for name, count in (("loss", self.loss_parts), ("head", self.head_parts)) if count
        ]
        return ", ".join((*parts, *(["pieces"] if self.gradient_pieces else []))) or "whole"

    @property
    def key(self) -> tuple[str, float, str, str]:
        """Identify the case."""
        return self.model, self.clip_norm, self.machine, self.budget

    @property
    def line(self) -> str:
        """Line of the table of all cases."""
        start = f"| {self.model} | {self.clip_norm:g} | {self.machine} | {self.budget} "
        end = f"| {self.seconds:.1f} s |"
        if not self.step_s:
            why = f"cannot: {self.cannot}" if self.cannot else f"none found: {self.missing_bytes} bytes missing"
            return f"{start}| {why} " + "| " * (_HEAD.count("|") - 7) + end
        bound, gap = (format_seconds(self.bound_s), f"{self.gap:.1%}") if self.bound_s else ("none", "-")
        return (
            f"{start}| {format_seconds(self.step_s)} | {bound} | {gap} | {self.recompute_s / self.step_s:.0%} | "
            f"{self.deferred} | {self.late} | {self.form} | {self.hosted or '-'} | {self.busiest} | "
            f"{self.waits} | {self.others} {end}"
        )

    @property
    def cell(self) -> str:
        """Cell of the table of distances: how far above the bound, and CPU seconds of planning."""
        if self.gap is None:
            return f"{'cannot' if self.cannot else 'none found'}, {self.seconds:.0f} s"
        return f"{self.gap:.1%}, {self.seconds:.0f} s"


def rows(name: str, graph: StepGraph, machine: Machine, budgets: Sequence[str], clip_norm: float) -> Iterator[Row]:
    """One row a budget, a share of what keep-all needs (which may be more than the machine has)."""
    wide = dataclasses.replace(machine, device=dataclasses.replace(machine.device, memory_bytes=1 << 45))
    step = expand(graph, clip_norm=clip_norm)
    for budget in budgets:
        begin = time.process_time()
        try:
            planned = make_plan(step, wide, budget=budget)
        except PlanInfeasible as error:
            seconds = time.process_time() - begin
            cannot = _cannot(step, wide, budget)
            yield Row(name, clip_norm, machine.name, budget, seconds, missing_bytes=error.missing_bytes, cannot=cannot)
            continue
        plan, choices = planned.plan, planned.plan.choices
        seconds = time.process_time() - begin
        chosen = next(row for row in plan.policies if row.policy == plan.request.policy)
        others = [
            f"{row.policy} {format_seconds(row.step_s) if row.step_s else 'does not fit'}"
            for row in plan.policies
            if row is not chosen
        ]
        yield Row(
            name, clip_norm, machine.name, budget, seconds, plan.step_s, plan.lower_bound_s, chosen.recompute_s or 0.0,
            choices.deferred, len(choices.late_updates), choices.loss_parts, len(choices.hosted), _busiest(planned),
            _waits(planned), ", ".join(others), head_parts=choices.head_parts, gradient_pieces=choices.gradient_pieces,
        )  # fmt: skip


def _cannot(step: StepGraph, machine: Machine, budget: str) -> str:
    """Operation that needs more bytes at once than a budget has, in every form of the step; "" where none does."""
    limits = {DEVICE: 1 << 60, **tier_limits(machine, {})}
    free = StepProblem(step, lifetimes(step), machine, step_costs(step, machine), limits)
    budgets = {**limits, DEVICE: share_or_bytes(budget, free.needs({}))}
    whole = dataclasses.replace(free, budgets=budgets)
    least = min(map(_largest, (*lesser_forms(whole), *head_forms(whole))))
    if least[0] <= whole.arena_bytes:
        return ""
    size, name = least
    return (
        f"{name} needs {format_bytes(size)} at once and the process {format_bytes(fixed_bytes(machine, free.costs))}, "
        f"of {format_bytes(budgets[DEVICE])}"
    )


def _largest(form: StepProblem) -> tuple[int, str]:
    """Most bytes that an operation of a step has at once, and which one that is."""
    graph = form.graph
    sizes = [
        sum(slot_bytes(graph.storages[s].size_bytes) for s in {*reads, *writes})
        for reads, writes in zip(graph.op_reads, graph.op_writes, strict=True)
    ]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    return sizes[largest], f"{graph.ops[largest].name} of {graph.ops[largest].module or 'the loss'}"


def summary(rows: Sequence[Row]) -> list[str]:
    """Table of how far plans are from their bounds, a line for each machine and budget."""
    lines = [_SUMMARY, "|" + "---|" * (_SUMMARY.count("|") - 1)]
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.machine, row.budget].append(row)
    for (machine, budget), group in groups.items():
        gaps = sorted(row.gap for row in group if row.gap is not None)
        cannot = sum(bool(row.cannot) for row in group)
        middle, high = (f"{median(gaps):.1%}", f"{gaps[-(-9 * len(gaps) // 10) - 1]:.1%}") if gaps else ("-", "-")
        lines.append(
            f"| {machine} | {budget} | {len(group)} | {cannot} | {len(group) - cannot - len(gaps)} | "
            f"{sum(gap <= _NEAR for gap in gaps)} of {len(group) - cannot} | {middle} | {high} | "
            f"{sum(row.seconds for row in group):.0f} |"
        )
    return lines


def distances(rows: Sequence[Row]) -> list[str]:
    """Table of the cases without clipping: above the bound, and CPU seconds of planning."""
    plain = {(row.model, row.machine, row.budget): row.cell for row in rows if not row.clip_norm}
    columns = list(dict.fromkeys((machine, budget) for _, machine, budget in plain))
    lines = ["| model | " + " | ".join(f"{machine} {budget}" for machine, budget in columns) + " |"]
    lines.append("|" + "---|" * (len(columns) + 1))
    for model in dict.fromkeys(model for model, _, _ in plain):
        cells = (plain.get((model, *column), "not run") for column in columns)
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return lines


def tables(rows: Sequence[Row]) -> str:
    """All tables, in Markdown."""
    lines = [f"Lading {__version__}; predicted times; planned in: CPU seconds of one thread.", ""]
    lines += [*summary(rows), "", *distances(rows), "", _HEAD, "|" + "---|" * (_HEAD.count("|") - 1)]
    return "\n".join([*lines, *(row.line for row in rows)]) + "\n"


def _known(path: Path) -> dict[tuple[str, float, str, str], Row]:
    """Cases that earlier runs planned."""
    rows = [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []
    return {row.key: row for row in rows}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", help="names of benchmarks/planner/models.py; all by default")
    parser.add_argument("--machines", nargs="*", default=["rtx4090", "h100", "l4", "apple-m4"])
    parser.add_argument("--budgets", nargs="*", default=["50%", "25%"])
    parser.add_argument("--clip", nargs="*", type=float, default=[0.0])
    parser.add_argument("--out", type=Path, help="write results here as .json and .md, beside those of other cases")
    parser.add_argument("--missing", action="store_true", help="leave out cases that --out has")
    chosen = parser.parse_args()
    planned: dict[tuple[str, float, str, str], Row] = {}
    if chosen.out:
        planned = _known(chosen.out.with_suffix(".json"))
    print(_HEAD)
    for case in cases():
        if chosen.models and case.name not in chosen.models:
            continue
        graph = case.graph()
        for machine in map(load_machine, chosen.machines):
            for clip_norm in chosen.clip:
                known = (b for b in chosen.budgets if (case.name, clip_norm, machine.name, b) in planned)
                left_out = set(known) if chosen.missing else set[str]()
                budgets = [budget for budget in chosen.budgets if budget not in left_out]
                for row in rows(case.name, graph, machine, budgets, clip_norm):
                    print(row.line, flush=True)
                    planned[row.key] = row
                    if chosen.out:
                        every = [dataclasses.asdict(each) for each in planned.values()]
                        chosen.out.with_suffix(".json").write_text(json.dumps(every, indent=1) + "\n")
    text = tables(list(planned.values()))
    print(text)
    if chosen.out:
        chosen.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
