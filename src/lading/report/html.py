"""The HTML report: one file, no network, readable on any screen and on paper.

Reading order: verdict, memory, streams, seconds, loss, policies, placement, assumptions, reproduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lading.files import write_text
from lading.ir.plan import Plan
from lading.ir.program import COMPUTE_STREAM, Program
from lading.ir.timeline import Timeline
from lading.report.charts import memory_bars, memory_figure, metric_figure, role_class
from lading.report.figures import SliceKind, peak_storages, placement, role_title, seconds_by_kind, tiers_of
from lading.report.gantt import gantt_figure
from lading.report.plan_table import policy_cells
from lading.report.promises import RunSummary, error_words, relative_error, remarks, verdict
from lading.report.style import CSS, SCRIPT
from lading.report.svg import el, text
from lading.units import format_bytes, format_seconds

#: Rows of the table of largest storages.
NUM_LARGEST = 12


def write_report(
    path: Path,
    *,
    plan: Plan,
    program: Program,
    predicted: Timeline,
    measured: Timeline | None,
    metrics: Sequence[Mapping[str, Any]],
    summary: RunSummary,
) -> None:
    """Write the report of a plan, and of the run made from it when ``measured`` is given.

    Args:
        path: File to write; replaced if it exists.
        plan: Its policies, choices and assumptions are tabled.
        program: What the action ids of both timelines refer to.
        predicted: One step as simulated.
        measured: One step as executed, or None if the plan has not run.
        metrics: Records of metrics.jsonl; "step" with "loss", "step_s", "tokens_per_s" or "memory_bytes" are drawn.
        summary: The numbers at the top.
    """
    lines = [predicted] if measured is None else [predicted, measured]
    duration_s = max(line.duration_s for line in lines)
    sections = [
        _heading(summary),
        _memory(plan, lines, duration_s),
        el("h2", "Time"),
        gantt_figure(program, lines, duration_s),
        _seconds(program, lines),
        _training(metrics, summary),
        _policies(plan),
        _placement(plan, program),
        _largest(plan, program, predicted),
        _assumptions(plan),
        _reproduction(plan, program, summary),
    ]
    write_text(path, page(summary.title, "\n".join(sections)))


def page(title: str, body: str) -> str:
    """A whole document around ``body``, with style and script."""
    head = (
        '<meta charset="utf-8"/><meta name="viewport" content="width=device-width,initial-scale=1"/>'
        + el("title", text(title))
        + el("style", CSS)
    )
    whole = el("body", el("main", body), el("div", id="tip"), el("script", SCRIPT))
    return "<!doctype html>\n" + el("html", el("head", head), whole, lang="en") + "\n"


def _heading(summary: RunSummary) -> str:
    mood, rest = verdict(summary).split(":", 1)
    tiles = [("Budget", format_bytes(summary.budget_bytes), "of device memory")]
    tiles.append(_tile("Peak memory", summary.predicted_peak_bytes, summary.measured_peak_bytes, format_bytes))
    tiles.append(_tile("Step time", summary.predicted_step_s, summary.measured_step_s, format_seconds))
    if summary.measured_step_s is not None:
        spread = summary.measured_step_spread_s
        tiles.append(("Spread of steps", format_seconds(spread), f"{spread / summary.measured_step_s:.1%} of a step"))
    saved = 1 - summary.predicted_peak_bytes / summary.keep_all_bytes if summary.keep_all_bytes else 0.0
    tiles.append(
        (
            "Memory saved",
            f"{saved:.0%}",
            f"of the {format_bytes(summary.keep_all_bytes)} that keeping everything takes, predicted",
        )
    )
    boxes = [el("div", el("span", text(a)), el("b", text(b)), el("span", text(c)), class_="tile") for a, b, c in tiles]
    return "\n".join((
        el("h1", text(summary.title)),
        el("p", text(f"{summary.model} on {summary.machine}, {summary.date}"), class_="subtitle"),
        el(
            "div",
            el("p", el("b", text(mood)), text(":" + rest)),
            el("p", text(" ".join(remarks(summary))), class_="muted"),
            class_=f"verdict {summary.promise.value}",
        ),
        el("div", *boxes, class_="tiles"),
        memory_bars(summary),
    ))  # fmt: skip


def _tile(title: str, predicted: float, measured: float | None, show: Any) -> tuple[str, str, str]:
    if measured is None:
        return title, show(predicted), "predicted"
    return title, show(measured), f"predicted {show(predicted)}, {error_words(predicted, measured)}"


def _memory(plan: Plan, lines: Sequence[Timeline], duration_s: float) -> str:
    figures = [memory_figure(tier, duration_s, plan.budgets.get(tier), lines) for tier in tiers_of(*lines)]
    what = "Areas are predicted, stacked by role" + ("; lines are measured." if len(lines) > 1 else ".")
    return el("h2", "Memory") + el("p", what, class_="muted") + "".join(figures)


def _seconds(program: Program, lines: Sequence[Timeline]) -> str:
    """Busy seconds of each kind in each timeline, and how much of the step compute waits."""
    columns = [seconds_by_kind(program, line) for line in lines]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [_seconds_row(_kind_title(name), [column.get(name, 0.0) for column in columns]) for name in names]
    idle = [line.duration_s - line.busy_s(COMPUTE_STREAM) for line in lines]
    rows.append(_seconds_row("compute stream waits", idle))
    step = _seconds_row("whole step", [line.duration_s for line in lines])
    head = ["kind of action", *(line.source for line in lines)] + (["prediction"] if len(lines) > 1 else [])
    return table(head, rows, total=step) + el(
        "p", "Streams run side by side: their seconds do not add up to the step.", class_="under"
    )


def _kind_title(name: str) -> str:
    return "optimizer step" if name == SliceKind.STEP else name


def _seconds_row(name: str, seconds: Sequence[float]) -> list[str]:
    cells = [name, *("0 us" if s == 0 else format_seconds(s) for s in seconds)]
    if len(seconds) > 1:
        error = relative_error(*seconds)
        cells.append("-" if abs(error) == float("inf") else error_words(*seconds))
    return cells


def _training(metrics: Sequence[Mapping[str, Any]], summary: RunSummary) -> str:
    """Loss, seconds and memory against the step, as far as the run recorded them."""
    loss = list(summary.losses) or _series(metrics, "loss")
    drawn: list[str] = []
    if loss:
        drawn.append(metric_figure("Loss", loss, unit="", behind=summary.plain_losses))
    if steps := _series(metrics, "step_s"):
        mark = (summary.predicted_step_s, f"predicted {format_seconds(summary.predicted_step_s)}", "forecast")
        drawn.append(metric_figure("Time of a step", steps, unit="seconds", mark=mark))
    if sizes := _series(metrics, "memory_bytes"):
        mark = (float(summary.budget_bytes), f"budget {format_bytes(summary.budget_bytes)}", "budget")
        drawn.append(metric_figure("Peak memory", sizes, unit="bytes", mark=mark))
    if rates := _series(metrics, "tokens_per_s"):
        drawn.append(metric_figure("Tokens per second", rates, unit=""))
    if not drawn:
        return ""
    return el("h2", "Training") + el("div", *drawn, class_="charts")


def _series(metrics: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(float(r["step"]), float(r[key])) for r in metrics if "step" in r and isinstance(r.get(key), int | float)]


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    chosen: int | None = None,
    total: Sequence[str] | None = None,
    left: Sequence[int] = (0,),
    swatches: Sequence[str] = (),
) -> str:
    """A table of text.

    Args:
        chosen: Row to mark.
        total: A last row, set off.
        left: Columns of words (left-aligned, wrapping); the others are figures.
        swatches: CSS class of a colour for each row.
    """

    def cells(name: str, row: Sequence[str], swatch: str = "") -> str:
        mark = el("i", class_=f"swatch {swatch}") if swatch else ""
        classes = [("l wrap" if i else "l name") if i in left else None for i in range(len(row))]
        return "".join(el(name, mark if not i else "", text(cell), class_=classes[i]) for i, cell in enumerate(row))

    body = [
        el("tr", cells("td", row, swatches[i] if swatches else ""), class_="chosen" if i == chosen else None)
        for i, row in enumerate(rows)
    ]
    if total is not None:
        body.append(el("tr", cells("td", total), class_="total"))
    inner = el("thead", el("tr", cells("th", head))) + el("tbody", *body)
    return el("div", el("table", inner), class_="scroll")


def _policies(plan: Plan) -> str:
    predictions, policy = plan.predictions, plan.request.policy
    rows = [[row.policy, *policy_cells(row)] for row in predictions.policies]
    chosen = next((i for i, row in enumerate(predictions.policies) if row.policy == policy), None)
    head = ("policy", "fits", "step", "peak", "recompute", "stall", "moved", "note")
    bound = (
        f"No plan within the budgets takes less than {format_seconds(predictions.lower_bound_s)} (lower bound, as "
        f"modelled); this one takes {format_seconds(plan.step_s)}, {plan.gap:.1%} above it."
    )
    if not predictions.lower_bound_s:
        bound = f"This plan takes {format_seconds(plan.step_s)}; no lower bound is known."
    body = table(head, rows, chosen=chosen, left=(0, 6, 7))
    return el("h2", "Policies compared") + body + el("p", text(f"Chosen: {policy}. {bound}"), class_="under")


def _placement(plan: Plan, program: Program) -> str:
    placed = placement(plan, program.graph)
    rows: list[list[str]] = []
    for role, options in placed.items():
        whole = sum(s.size_bytes for s in program.graph.storages if s.role == role)
        count = sum(s.role == role for s in program.graph.storages)
        cells = [format_bytes(p.size_bytes) if p.num_storages else "-" for p in options.values()]
        rows.append([role_title(role), f"{count:,}", format_bytes(whole), *cells])
    head = ("role", "storages", "bytes", *plan.options)
    note = "Where bytes are between two uses; a storage whose gaps differ counts under each of its options."
    swatches = [role_class(role) for role in placed]
    return el("h2", "What goes where") + table(head, rows, swatches=swatches) + el("p", note, class_="under")


def _largest(plan: Plan, program: Program, predicted: Timeline) -> str:
    peak_s, present = peak_storages(program, predicted)
    sizes = [program.graph.storages[s].size_bytes for s in present]
    whole = sum(sizes)
    options: dict[int, list[str]] = {}
    for choice in plan.choices.gaps:
        options.setdefault(choice.storage, []).append(choice.option)
    rows: list[list[str]] = []
    for storage in present[:NUM_LARGEST]:
        item = program.graph.storages[storage]
        elsewhere = ", ".join(dict.fromkeys(options.get(storage, []))) or "keep"
        share = f"{item.size_bytes / whole:.1%}" if whole else "-"
        rows.append([item.name, role_title(item.role), format_bytes(item.size_bytes), share, elsewhere])
    rest = whole - sum(sizes[:NUM_LARGEST])
    if len(present) > NUM_LARGEST:
        share = f"{rest / whole:.1%}" if whole else "-"
        rows.append([f"{len(present) - NUM_LARGEST:,} more", "", format_bytes(rest), share, ""])
    swatches = [role_class(program.graph.storages[s].role) for s in present[:NUM_LARGEST]] + [""]
    note = f"{len(present):,} storages, {format_bytes(whole)}, at {format_seconds(peak_s)} of the predicted step."
    head = ("storage", "role", "bytes", "share", "between uses")
    body = table(head, rows, left=(0, 1, 4), swatches=swatches)
    return el("h2", "Largest storages at the peak") + body + el("p", text(note), class_="under")


def _assumptions(plan: Plan) -> str:
    items = [el("li", text(a)) for a in plan.assumptions]
    return el("h2", "Assumptions") + (el("ul", *items) if items else el("p", "None."))


def _reproduction(plan: Plan, program: Program, summary: RunSummary) -> str:
    request, choices = plan.request, plan.choices
    rows = {
        "Lading": plan.version,
        "Graph": request.graph_fingerprint,
        "Machine": request.machine_fingerprint,
        "Plan": plan.fingerprint,
        "Program": program.fingerprint,
        "Host": request.host_id or "any (catalog entry)",
        "Settings": ", ".join(f"{k} {v:g}" for k, v in request.settings.items()) or "default",
        "Chosen": f"{len(choices.gaps)} gaps, {choices.deferred} updates deferred, {len(choices.hosted)} operations "
        "on the host",
        "Versions": ", ".join(f"{k} {v}" for k, v in summary.versions.items()) or "not recorded",
    }
    items = "".join(el("dt", text(k)) + el("dd", el("code", text(v))) for k, v in rows.items())
    command = el("pre", text(summary.command)) if summary.command else ""
    return el("h2", "Reproduction") + command + el("dl", items)
