"""The HTML report: one file, no network, readable on any screen and on paper.

Reading order: verdict, memory, streams, seconds, ranks, loss, policies, placement, assumptions, reproduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any

from lading.files import write_text
from lading.ir.plan import Plan
from lading.ir.program import COMPUTE_STREAM, Program
from lading.ir.timeline import Timeline
from lading.report.charts import memory_bars, memory_figure, metric_figure, role_class
from lading.report.figures import (
    SliceKind,
    compute_seconds,
    grouped_storages,
    peak_storages,
    placement,
    role_title,
    seconds_by_kind,
    tiers_of,
)
from lading.report.gantt import gantt_figure
from lading.report.plan_table import policy_cells
from lading.report.promises import (
    RunSummary,
    error_words,
    limit_words,
    relative_error,
    remarks,
    sentence_of,
    verdict,
    wear_words,
)
from lading.report.rank_section import RankReport, ranks_section
from lading.report.svg import el, table, text, unbroken_options
from lading.units import format_bytes, format_seconds

_LIGHT = """
--paper:#ffffff;--panel:#f6f7f9;--ink:#1c2430;--muted:#5a6676;--line:#d9dee5;--grid:#e6eaef;--lane:#f1f3f6;
--shade:#00000038;--band:#c9cfd7;--good:#1f7a4d;--bad:#b3261e;--open:#8a5a00;--accent:#2f5f98;--tint:#eef4fb;
--r-parameter:#3f6fa8;--r-optimizer_state:#7f63aa;--r-buffer:#7b8795;--r-constant:#a9b2bd;--r-input:#93a9bd;
--r-gradient:#d59a3c;--r-activation:#4aa394;--r-workspace:#bd6474;--r-other:#9a9a94;
--k-forward:#7eaede;--k-backward:#3768a6;--k-recompute:#d9902f;--k-step:#3f9b6b;--k-read:#8f74bd;--k-write:#c0627f;
--k-communication:#6f7c8b;--k-wait:#e3b3a8;--k-free:#a9b2bd;
"""
_DARK = """
--paper:#14181e;--panel:#1c222a;--ink:#e6eaf0;--muted:#9aa7b6;--line:#343d49;--grid:#272e38;--lane:#1f262f;
--shade:#ffffff38;--band:#4b5664;--good:#5fc790;--bad:#ff8a80;--open:#e5b55a;--accent:#7fb0e6;--tint:#1d2a3a;
--r-parameter:#5f92cf;--r-optimizer_state:#9d80cb;--r-buffer:#8693a3;--r-constant:#66717e;--r-input:#7a90a6;
--r-gradient:#dfa850;--r-activation:#56b3a3;--r-workspace:#cf7787;--r-other:#82827c;
--k-forward:#93bfec;--k-backward:#4a80c4;--k-recompute:#e2a04a;--k-step:#6fd3a0;--k-read:#a48bd3;--k-write:#d27a95;
--k-communication:#8693a3;--k-wait:#7d4f45;--k-free:#66717e;
"""
_COLOURED = (
    *(f"r-{role}" for role in (
        "parameter", "optimizer_state", "buffer", "constant", "input", "gradient", "activation", "workspace", "other",
    )),
    *(f"k-{kind}" for kind in (
        "forward", "backward", "recompute", "step", "read", "write", "communication", "wait", "free",
    )),
)  # fmt: skip

_RULES = """
*{box-sizing:border-box}
html{color-scheme:light dark}
body{margin:0;background:var(--paper);color:var(--ink);
 font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"DejaVu Sans",sans-serif}
main{max-width:1088px;margin:0 auto;padding:48px 24px 96px}
h1{font-size:28px;line-height:1.2;margin:0 0 6px;font-weight:650;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:19px;margin:56px 0 14px;font-weight:650;letter-spacing:-.005em}
p{margin:0 0 8px;max-width:78ch}
.muted{color:var(--muted)}
.subtitle{color:var(--muted);margin:0;overflow-wrap:anywhere}
.verdict{margin:28px 0 12px;padding:16px 20px;border-left:4px solid var(--tone);background:var(--panel);
 border-radius:0 6px 6px 0;font-size:17px;line-height:1.5}
.verdict p{max-width:none}.verdict p:last-child{margin:0}.verdict .muted{font-size:14px}
.verdict b{color:var(--tone)}
.kept{--tone:var(--good)}.broken{--tone:var(--bad)}.open{--tone:var(--open)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0 8px}
.tile{border:1px solid var(--line);border-radius:6px;padding:12px 14px}
.tile span{display:block;font-size:13px;color:var(--muted)}
.tile b{display:block;font-size:20px;line-height:1.35;font-weight:600;font-variant-numeric:tabular-nums}
figure{margin:20px 0 28px}
figcaption{display:flex;flex-wrap:wrap;gap:2px 14px;align-items:baseline;margin:0 0 8px;font-size:14px}
figcaption .muted{font-size:13px}
.scroll{overflow-x:auto;
 background:linear-gradient(to right,var(--paper) 60%,transparent) 0 0/20px 100% no-repeat local,
 linear-gradient(to left,var(--paper) 60%,transparent) 100% 0/20px 100% no-repeat local,
 linear-gradient(to right,var(--shade),transparent) 0 0/12px 100% no-repeat,
 linear-gradient(to left,var(--shade),transparent) 100% 0/12px 100% no-repeat}
svg{display:block;width:100%;height:auto;font-family:inherit}
svg.wide{min-width:820px}
svg.phone{display:none}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:0 32px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:8px 0 0 0;font-size:13px;color:var(--muted)}
.key{display:inline-flex;align-items:center;gap:7px;white-space:nowrap}
.swatch{width:12px;height:12px;border-radius:2px;flex:none}
i.tracked,i.resident,i.series,i.behind,i.budget,i.forecast{
 height:0;width:20px;border-radius:0;border-top:2px solid var(--ink)}
i.resident{border-top-style:dotted;border-top-width:3px}
i.series{border-top-color:var(--accent)}
i.behind{border-top:5px solid var(--band)}
i.budget{border-top:2px dashed var(--bad)}
i.forecast{border-top:2px dotted var(--ink)}
text{font-size:12px;fill:var(--ink)}
text.tick,text.note{font-size:11.5px}
text.tick{fill:var(--muted);font-variant-numeric:tabular-nums}
text.label{font-size:13px}
text.strong{font-weight:600}
text.end{text-anchor:end}
text.mid{text-anchor:middle}
text.note,text.halo-text{paint-order:stroke;stroke:var(--paper);stroke-width:4px;stroke-linejoin:round}
.axis{stroke:var(--muted);stroke-width:1}
.grid{stroke:var(--grid);stroke-width:1}
.lane{fill:var(--lane)}
line.budget{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:6 4}
text.budget-text{fill:var(--bad);font-weight:600}
line.forecast{stroke:var(--ink);stroke-width:1;stroke-dasharray:1.5 3}
path.halo{fill:none;stroke:var(--paper);stroke-width:4;stroke-linejoin:round;opacity:.75}
path.tracked{fill:none;stroke:var(--ink);stroke-width:1.4}
path.resident{fill:none;stroke:var(--ink);stroke-width:2;stroke-dasharray:1 3;stroke-linecap:round}
path.series{fill:none;stroke:var(--accent);stroke-width:1.8;stroke-linejoin:round}
path.behind{fill:none;stroke:var(--band);stroke-width:5;stroke-linejoin:round}
circle.bad{fill:var(--bad)}circle.series{fill:var(--accent)}circle.behind{fill:var(--band)}
.bars{display:grid;grid-template-columns:max-content max-content 1fr;gap:8px 16px;align-items:center;font-size:14px}
.bars b{text-align:right;font-weight:600;font-variant-numeric:tabular-nums}
.track{position:relative;height:20px}.track.head{grid-column:3;height:18px}
.bar{position:absolute;inset:0 auto 0 0;min-width:1px;border-radius:0 2px 2px 0}
.mark{position:absolute;top:-5px;bottom:-5px;border-left:2px dashed var(--bad)}
.flag{position:absolute;white-space:nowrap;color:var(--bad);font-size:12px;font-weight:600}
.flag.left{transform:translateX(-100%)}
.b-plain{background:var(--r-constant)}.b-predicted{background:var(--k-forward)}
.b-measured{background:var(--k-backward)}.b-over{background:var(--bad)}
rect[data-a]:hover,rect.twin{stroke:var(--ink);stroke-width:1.5}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th{font-weight:600;font-size:13px;color:var(--muted);border-bottom:1px solid var(--muted);vertical-align:bottom}
th,td{padding:7px 14px 7px 0;text-align:right;white-space:nowrap}
th.l,td.l{text-align:left}
td.wrap{white-space:pre-line;min-width:150px}
td.wrap,th.wrap{padding-left:20px}
td.name{white-space:normal;overflow-wrap:anywhere;min-width:180px}
td{border-bottom:1px solid var(--grid)}
tr.chosen td{background:var(--tint);font-weight:600}
tr.chosen td:first-child{box-shadow:inset 3px 0 var(--accent)}
td:first-child,th:first-child{padding-left:10px}
tr.total td{border-top:1px solid var(--muted);font-weight:600}
td.marked{position:relative;padding-left:30px}td.marked .swatch{position:absolute;left:10px;top:12px}
.word{white-space:nowrap}
td.no{color:var(--bad)}
.under{margin-top:10px;font-size:14px;color:var(--muted)}
ul{margin:0;padding-left:20px;max-width:90ch}li{margin:0 0 5px;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 24px;margin:0;font-size:14px}
dt{color:var(--muted)}dd{margin:0;overflow-wrap:anywhere}
code,pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre{background:var(--panel);border-radius:6px;padding:12px 16px;white-space:pre-wrap;overflow-wrap:anywhere}
#tip{position:fixed;z-index:9;pointer-events:none;display:none;max-width:420px;padding:9px 12px;border-radius:6px;
 background:var(--ink);color:var(--paper);font-size:13px;line-height:1.45;white-space:pre-line;overflow-wrap:anywhere}
.timed{position:relative}
.cursor{position:absolute;top:0;bottom:0;width:1px;background:var(--ink);opacity:.35;pointer-events:none;display:none}
details{margin-top:12px}summary{cursor:pointer;color:var(--muted);font-size:14px;margin-bottom:8px}
footer{margin-top:56px;font-size:13px;color:var(--muted)}
@media screen and (max-width:640px){.both svg.wide{display:none}svg.phone{display:block}
 .bars{grid-template-columns:1fr max-content;gap:2px 12px}.track{grid-column:1/-1;height:16px;
 margin-bottom:8px}.track.head{grid-column:1/-1;margin:0}
 main{padding:28px 16px 64px}h2{margin-top:40px}.verdict{padding:12px 14px;font-size:16px}
 dl{grid-template-columns:1fr;gap:0 0}
 dd{margin-bottom:8px}}
@media print{main{padding:0;max-width:none}figure,tr,.tile,.verdict{break-inside:avoid}h2,h2+p{break-after:avoid}
 .charts{grid-template-columns:1fr 1fr}
 h2{margin-top:28px}.scroll{overflow:visible}svg.wide{min-width:0}th,td{padding-right:8px}table{font-size:12px}
 *{print-color-adjust:exact;-webkit-print-color-adjust:exact}#tip,.cursor{display:none!important}}
"""

#: Follows the viewer's setting on screens, is light on paper; ``data-theme`` on the root element overrules it.
CSS = (
    f":root{{{_LIGHT}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{_DARK}}}}}"
    f"@media screen{{:root[data-theme=dark]{{color-scheme:dark;{_DARK}}}}}"
    + _RULES
    + "".join(f"path.{c},rect.{c}{{fill:var(--{c})}}.swatch.{c}{{background:var(--{c})}}" for c in _COLOURED)
)  # fmt: skip

#: Tooltips of the timeline, its twin slices, and one time cursor over all charts that share the axis.
SCRIPT = """
(() => {
  const data = {sources: [], actions: {}};
  document.querySelectorAll("script.actions").forEach(each => {
    const {sources, actions} = JSON.parse(each.textContent);
    data.sources = sources;
    Object.assign(data.actions, actions);
  });
  const tip = document.getElementById("tip");
  const time = s => s == null ? "not run" : s >= 1 ? s.toFixed(3) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(2) + " ms"
    : (s * 1e6).toFixed(1) + " us";
  const describe = rect => {
    const id = rect.dataset.a, [label, ...seconds] = data.actions[id], lines = [];
    const {n, s} = rect.dataset;
    if (n) lines.push(n + " short actions, " + time(+s) + " in all; the longest:");
    lines.push(label, "action " + id.split(":").pop());
    data.sources.forEach((source, i) => lines.push(source + " " + time(seconds[i])));
    if (seconds.length > 1 && seconds[0] && seconds[1])
      lines.push("predicted / measured " + (seconds[0] / seconds[1]).toFixed(2));
    return lines.join("\\n");
  };
  const show = event => {
    document.querySelectorAll("rect.twin").forEach(rect => rect.classList.remove("twin"));
    const rect = event.target.closest && event.target.closest("rect[data-a]");
    tip.style.display = rect ? "block" : "none";
    if (!rect) return;
    document.querySelectorAll('rect[data-a="' + rect.dataset.a + '"]').forEach(twin => twin.classList.add("twin"));
    tip.textContent = describe(rect);
    const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
    tip.style.left = Math.max(8, x) + "px";
    tip.style.top = (below ? event.clientY + 18 : event.clientY - 12 - tip.offsetHeight) + "px";
  };
  document.addEventListener("mousemove", show);
  document.addEventListener("click", show);
  const timed = [...document.querySelectorAll(".timed")];
  const cursors = timed.map(box => {
    const cursor = document.createElement("div");
    cursor.className = "cursor";
    box.append(cursor);
    return cursor;
  });
  timed.forEach(box => {
    box.addEventListener("mousemove", event => {
      const x = event.clientX - box.getBoundingClientRect().left;
      cursors.forEach(cursor => { cursor.style.display = "block"; cursor.style.left = x + "px"; });
    });
    box.addEventListener("mouseleave", () => cursors.forEach(cursor => { cursor.style.display = "none"; }));
  });
})();
"""


#: The table of what fills the peak goes on until its rows cover this share of it, but has at most ``MOST_ROWS``.
COVERED_SHARE = 0.9
MOST_ROWS = 24
#: Kinds of action that take less of every step than this are one row together.
SMALLEST_SHARE = 0.01
#: A step whose time is off by more than this share is given the kind of action that is off most.
WORTH_A_REASON = 0.1


def write_report(
    path: Path,
    *,
    plan: Plan,
    program: Program,
    predicted: Timeline,
    measured: Timeline | None,
    metrics: Sequence[Mapping[str, Any]],
    summary: RunSummary,
    ranks: RankReport | None = None,
) -> None:
    """Write the report of a plan, and of the run made from it when ``measured`` is given.

    Args:
        path: File to write; replaced if it exists.
        plan: Its policies, choices and assumptions are tabled.
        program: Program that the action ids of both timelines refer to.
        predicted: Timeline of one step as simulated.
        measured: Timeline of one step as executed, or None if the plan has not run.
        metrics: Records of metrics.jsonl; "step" with "loss", "validation_loss", "step_s" or "memory_bytes" are drawn.
        summary: The numbers at the top.
        ranks: All ranks of the run, of which ``predicted`` and ``measured`` are the first's; None for one alone.
    """
    lines = [predicted] if measured is None else [predicted, measured]
    duration_s = max(line.duration_s for line in lines)
    sections = [
        _heading(summary, compute_seconds(program, predicted)),
        _memory(plan, lines, duration_s),
        el("h2", "Time"),
        gantt_figure(program, lines, duration_s, rank=None if ranks is None else 0),
        _seconds(program, lines),
        *([] if ranks is None else [ranks_section(ranks)]),
        _training(metrics, summary),
        _policies(plan),
        _placement(plan, program),
        _fullest(plan, program, predicted),
        _assumptions(plan),
        _reproduction(plan, program, summary),
    ]
    write_text(path, page(summary.title, "\n".join(sections)))


def page(title: str, body: str) -> str:
    """Write a whole document around ``body``, with style and script."""
    head = (
        '<meta charset="utf-8"/><meta name="viewport" content="width=device-width,initial-scale=1"/>'
        + el("title", text(title))
        + el("style", CSS)
    )
    page_body = el("body", el("main", body), el("div", id="tip"), el("script", SCRIPT))
    return "<!doctype html>\n" + el("html", el("head", head), page_body, lang="en") + "\n"


def _heading(summary: RunSummary, compute_s: float) -> str:
    mood, explanation = verdict(summary).split(":", 1)
    tiles = [("Budget", format_bytes(summary.budget_bytes), "of device memory")]
    tiles.append(_tile("Peak memory", summary.predicted_peak_bytes, summary.measured_peak_bytes, format_bytes))
    tiles.append(_tile("Step time", summary.predicted_step_s, summary.measured_step_s, format_seconds))
    tiles.append(_plain_tile(summary, compute_s))
    spread = summary.measured_step_spread_s
    if summary.measured_step_s is not None and spread > 0:  # one step alone has no spread
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
            el("p", el("b", text(mood)), text(":" + explanation)),
            el("p", unbroken_options(" ".join(remarks(summary))), class_="muted"),
            class_=f"verdict {summary.promise.value}",
        ),
        el("div", *boxes, class_="tiles"),
        memory_bars(summary),
    ))  # fmt: skip


def _tile(title: str, predicted: float, measured: float | None, show: Any) -> tuple[str, str, str]:
    if measured is None:
        return title, show(predicted), "predicted"
    return title, show(measured), f"predicted {show(predicted)}, {error_words(predicted, measured)}"


def _plain_tile(summary: RunSummary, compute_s: float) -> tuple[str, str, str]:
    """Seconds of a step without a budget: plain PyTorch's as measured, else those of computing as predicted."""
    step_s = summary.measured_step_s or summary.predicted_step_s
    if summary.plain_step_s is not None:
        factor = f"this run takes {step_s / summary.plain_step_s:.2f} times as long"
        return "Plain PyTorch's step", format_seconds(summary.plain_step_s), f"measured; {factor}"
    note = "predicted, for computing alone; plain PyTorch was not run"
    return "Step without a budget", format_seconds(compute_s), note


def _memory(plan: Plan, lines: Sequence[Timeline], duration_s: float) -> str:
    figures = [memory_figure(tier, duration_s, plan.budgets.get(tier), lines) for tier in tiers_of(*lines)]
    note = "Areas are predicted, stacked by role" + ("; lines are measured." if len(lines) > 1 else ".")
    return el("h2", "Memory") + el("p", note, class_="muted") + "".join(figures)


def _seconds(program: Program, lines: Sequence[Timeline]) -> str:
    """Table of the busy seconds of each kind in each timeline, and how much of the step compute waits."""
    columns = [seconds_by_kind(program, line) for line in lines]
    for column, line in zip(columns, lines, strict=True):
        column["compute stream waits"] = line.duration_s - line.busy_s(COMPUTE_STREAM)
    names = list(dict.fromkeys(name for column in columns for name in column))
    shares = {
        name: max(c.get(name, 0.0) / (line.duration_s or 1.0) for c, line in zip(columns, lines, strict=True))
        for name in names
    }
    small = [name for name in names if shares[name] < SMALLEST_SHARE]
    rows = [
        _seconds_row(_kind_title(name), [column.get(name, 0.0) for column in columns])
        for name in names
        if name not in small
    ]
    if small:
        sums = [sum(column.get(name, 0.0) for name in small) for column in columns]
        cells = ["0 us" if s == 0 else format_seconds(s) for s in sums]
        rows.append([f"below {SMALLEST_SHARE:.0%} of the step each", *cells, *(["-"] if len(lines) > 1 else [])])
    step = _seconds_row("whole step", [line.duration_s for line in lines])
    head = ["kind of action", *(line.source for line in lines)] + (["prediction"] if len(lines) > 1 else [])
    left_out = f" Below {SMALLEST_SHARE:.0%}: {', '.join(map(_kind_title, small))}." if small else ""
    note = f"Streams run side by side: their seconds do not add up to the step.{left_out}"
    drawn = lines[-1].source if len(lines) > 1 else ""
    drawn_note = f" The step {drawn} here is the last one; the time at the top is the median of all." if drawn else ""
    why = _time_difference(columns, lines) if len(lines) > 1 else ""
    return table(head, rows, total=step) + el("p", text(note + drawn_note + why), class_="under")


def _time_difference(columns: Sequence[Mapping[str, float]], lines: Sequence[Timeline]) -> str:
    """Say which kind of action differs most from its prediction, if the whole step is off by a tenth or more."""
    predicted, measured = columns
    if abs(relative_error(lines[0].duration_s, lines[1].duration_s)) < WORTH_A_REASON:
        return ""
    slower = lines[1].duration_s > lines[0].duration_s
    names = [*predicted, *(name for name in measured if name not in predicted)]
    late = {name: measured.get(name, 0.0) - predicted.get(name, 0.0) for name in names}
    name = max(late, key=lambda n: late[n] if slower else -late[n])
    return (
        f" The measured step is {'longer' if slower else 'shorter'} than predicted by "
        f"{format_seconds(abs(lines[1].duration_s - lines[0].duration_s))}; what is off most is "
        f"{_kind_title(name)}, by {format_seconds(abs(late[name]))}."
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
    """Draw loss, seconds and memory against the step, as far as the run recorded them."""
    loss = list(summary.losses) or metric_series(metrics, "loss")
    drawn: list[str] = []
    if loss:
        drawn.append(metric_figure("Loss", loss, unit="", behind=summary.plain_losses))
    if validated := metric_series(metrics, "validation_loss"):
        lowest, step = min((loss if isfinite(loss) else inf, step) for step, loss in validated)
        mark = (lowest, f"lowest, {lowest:.4f} after step {step:g}", "forecast") if lowest < inf else None
        drawn.append(metric_figure("Validation loss", validated, unit="", mark=mark))
    if steps := metric_series(metrics, "step_s"):
        mark = (summary.predicted_step_s, f"predicted {format_seconds(summary.predicted_step_s)}", "forecast")
        drawn.append(metric_figure("Time of a step", steps, unit="seconds", mark=mark))
    if sizes := metric_series(metrics, "memory_bytes"):
        mark = (float(summary.budget_bytes), f"budget {format_bytes(summary.budget_bytes)}", "budget")
        drawn.append(metric_figure("Peak memory", sizes, unit="bytes", mark=mark))
    if not drawn:
        return ""
    return el("h2", "Training") + el("div", *drawn, class_="charts")


def metric_series(metrics: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """List (step, value) where a record has the key; the first step is 1, as on the terminal."""
    return [
        (float(r["step"]) + 1, float(r[key])) for r in metrics if "step" in r and isinstance(r.get(key), int | float)
    ]


def _policies(plan: Plan) -> str:
    predictions, policy = plan.predictions, plan.request.policy
    rows = [[row.policy, *policy_cells(row)] for row in predictions.policies]
    chosen = next((i for i, row in enumerate(predictions.policies) if row.policy == policy), None)
    head = ("policy", "fits", "step", "peak", "recompute", "stall", "moved", "note")
    bound = (
        f"No plan within the budgets takes less than {format_seconds(plan.lower_bound_s)} (lower bound, as "
        f"modelled); this one takes {format_seconds(plan.step_s)}, {plan.gap:.1%} above it."
    )
    if not plan.lower_bound_s:
        bound = f"This plan takes {format_seconds(plan.step_s)}; no lower bound is known."
    body = table(head, rows, chosen=chosen, left=(0, 6, 7))
    body += el("p", text(f"Chosen: {policy}. {bound}"), class_="under")
    return el("h2", "Policies compared") + body + _limits(plan)


def _limits(plan: Plan) -> str:
    """Table of the limit of a step by resource; "" where none is known."""
    limits = plan.limits
    if not limits:
        return ""
    rows = [
        [
            limit.resource,
            format_bytes(limit.size_bytes) if limit.size_bytes else "-",
            format_seconds(limit.seconds),
            f"{plan.step_s / limit.seconds - 1.0:.1%}",
        ]
        for limit in limits
    ]
    body = table(("resource", "has to move", "at least", "planned above it"), rows, chosen=0, left=(0,))
    words = [sentence_of(words_of) for words_of in (limit_words(plan), wear_words(plan)) if words_of]
    return el("h2", "Limit of a step") + body + el("p", text(" ".join(words)), class_="under")


def _placement(plan: Plan, program: Program) -> str:
    placed = placement(plan, program.graph)
    rows: list[list[str]] = []
    for role, options in placed.items():
        role_bytes = program.graph.bytes_of_role(role)
        count = sum(s.role == role for s in program.graph.storages)
        cells = [format_bytes(p.size_bytes) if p.num_storages else "-" for p in options.values()]
        rows.append([role_title(role), f"{count:,}", format_bytes(role_bytes), *cells])
    head = ("role", "storages", "bytes", *plan.options)
    note = "Where bytes are between two uses; a storage whose gaps differ counts under each of its options."
    swatches = [role_class(role) for role in placed]
    return el("h2", "What goes where") + table(head, rows, swatches=swatches) + el("p", note, class_="under")


def _fullest(plan: Plan, program: Program, predicted: Timeline) -> str:
    """Table of what fills the device at the predicted peak, storages of one name in all layers as one row."""
    peak_s, present = peak_storages(program, predicted)
    storages = program.graph.storages
    total = sum(storages[s].size_bytes for s in present)
    groups = grouped_storages(program, present)
    options: dict[int, list[str]] = {}
    for choice in plan.choices.gaps:
        options.setdefault(choice.storage, []).append(choice.option)
    rows: list[list[str]] = []
    swatches: list[str] = []
    covered = 0
    for (role, name), members in groups[:MOST_ROWS]:
        if covered >= COVERED_SHARE * total:
            break
        size = sum(storages[s].size_bytes for s in members)
        covered += size
        between = ", ".join(dict.fromkeys(option for s in members for option in options.get(s, ["keep"])))
        rows.append([name, role_title(role), f"{len(members):,}", format_bytes(size), f"{size / total:.1%}", between])
        swatches.append(role_class(role))
    if (num_more := len(groups) - len(rows)) > 0:
        share = f"{(total - covered) / total:.1%}" if total else "-"
        rows.append([f"{num_more:,} more rows like these", "", "", format_bytes(total - covered), share, ""])
        swatches.append("")
    note = (
        f"{len(present):,} storages, {format_bytes(total)}, at {format_seconds(peak_s)} of the predicted step. "
        "A star stands for the number of a layer: one row is what all layers hold under one name. Shares are of "
        "tensors: kernels and the process take "
        f"{format_bytes(program.overhead_bytes + program.workspace_bytes)} besides."
    )
    head = ("what", "role", "storages", "bytes", "share", "between uses")
    body = table(head, rows, left=(0, 1, 5), swatches=swatches)
    return el("h2", "Tensors on the device at the peak") + body + el("p", text(note), class_="under")


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
        "Chosen": f"{len(choices.gaps)} gaps, {choices.deferred} updates deferred, {len(choices.late_updates)} late, "
        f"{len(choices.hosted)} operations on the host"
        + (f", the loss in {choices.loss_parts} parts" if choices.loss_parts else "")
        + (f", the head in {choices.head_parts} parts" if choices.head_parts else "")
        + (f", gradients in pieces of {format_bytes(choices.gradient_pieces)}" if choices.gradient_pieces else "")
        + (", made late" if choices.late_products else "")
        + (f", weights in pieces of {format_bytes(choices.weight_pieces)}" if choices.weight_pieces else ""),
        "Versions": ", ".join(f"{k} {v}" for k, v in summary.versions.items()) or "not recorded",
    }
    items = "".join(el("dt", text(k)) + el("dd", el("code", text(v))) for k, v in rows.items())
    command = el("pre", text(summary.command)) if summary.command else ""
    details = el("details", el("summary", "Fingerprints, settings and versions"), el("dl", items))
    return el("h2", "Reproduction") + command + details
