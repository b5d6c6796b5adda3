"""Scores on the terminal: short tables, percent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_COLUMNS = (("rows", "rows"), ("abs_error", "error"), ("bias", "bias"), ("median", "median"), ("p90", "p90"))


def show(document: Mapping[str, Any], notes: Sequence[str], console: Console) -> None:
    """Print the document's headline, then errors by family, device, ..., then the worst rows and what was skipped."""
    for note in notes:
        console.print(Text(f"note: {note}"))
    _headline(document, console)
    console.print(_families("Seconds of a step, by source", document["step_time"]))
    for title, key in (("left out", "step_time_framework_left_out"), ("one run known", "step_time_framework_anchored")):
        if document[key]["rows"]:
            console.print(_figures(f"by framework, {title}", document[key]["frameworks"], coverage=True))
    for title in ("device", "kind", "recompute", "precision", "parallelism", "stack"):
        console.print(_figures(f"by {title}", document["by"][title]))
    if document["memory"]["rows"]:
        console.print(_families("Allocated bytes, by source", document["memory"]))
    _order("Order: one model, machine, number of devices and batch, several layouts", document["order"], console)
    _order("Order: one model and machine, device-seconds of a token", document["order_any_batch"], console)
    console.print(_worst(document["worst"]))
    _skipped(document, console)


def _percent(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def _headline(document: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"{document['rows']} rows, {document['rows_skipped']} could not be simulated", box=None)
    for column in ("", "rows", "error, mean over sources", "bias", "median", "p90", "in the interval", "its width"):
        table.add_column(column, justify="left" if not column else "right", overflow="fold")
    named = {
        "seconds of a step, no anchor": "step_time",
        "one run of each stack known": "step_time_anchored",
        "only other sources known": "step_time_left_out",
        "software not known: its framework left out": "step_time_framework_left_out",
        "the same, one run of it known": "step_time_framework_anchored",
        "tier B": "step_time_tier_b",
        "allocated bytes": "memory",
    }
    for title, key in named.items():
        scores = document[key]
        if scores["rows"]:
            numbers = (_percent(scores[name], name == "bias") for name in ("macro_abs_error", "bias", "median", "p90"))
            table.add_row(title, str(scores["rows"]), *numbers, _percent(scores["coverage"]), _percent(scores["width"]))
    for kind, scores in document["memory_by_kind"].items():
        if kind != "allocated" and scores["rows"]:
            numbers = (_percent(scores[name], name == "bias") for name in ("macro_abs_error", "bias", "median", "p90"))
            table.add_row(
                f"{kind} bytes", str(scores["rows"]), *numbers, _percent(scores["coverage"]), _percent(scores["width"])
            )
    console.print(table)
    noise = document["noise"]
    if noise["configurations"]:
        text = f"Noise: {noise['configurations']} configurations were published more than once; slowest over fastest "
        text += (
            f"differs by {_percent(noise['median'])} at the median, {_percent(noise['p75'])} at the third quartile: "
        )
        text += f"a prediction of their middle would err by {_percent(noise['floor'])}."
        console.print(Text(text))


def _families(title: str, found: Mapping[str, Any]) -> Table:
    return _figures(title, found["family_details"], coverage=True)


def _figures(title: str, groups: Mapping[str, Mapping[str, Any]], coverage: bool = False) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("", overflow="fold")
    for _, column in (*_COLUMNS, ("max", "max")):
        table.add_column(column, justify="right")
    if coverage:
        table.add_column("in the interval", justify="right")
    for label, figures in groups.items():
        numbers = [_percent(figures[name], name == "bias") for name, _ in _COLUMNS[1:]]
        cells = [Text(label), str(figures["rows"]), *numbers, _percent(figures["max"])]
        table.add_row(*cells, *([_percent(figures["coverage"])] if coverage else []))
    return table


def _order(title: str, families: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    if not families:
        return
    table = Table(title=title, title_justify="left", box=None)
    for column in ("", "groups", "rows", "mean regret", "max regret", "Kendall's tau"):
        table.add_column(column, justify="left" if not column else "right", overflow="fold")
    for family, scores in families.items():
        regrets = (_percent(scores["mean_regret"]), _percent(scores["max_regret"]))
        table.add_row(
            Text(family), str(scores["groups"]), str(scores["rows"]), *regrets, f"{scores['kendall_tau']:.2f}"
        )
    console.print(table)


def _worst(found: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Worst rows", title_justify="left", box=None)
    for column in ("", "error", "measured", "predicted", "machine", "layout"):
        figures = column in ("error", "measured", "predicted")
        table.add_column(column, justify="right" if figures else "left", no_wrap=figures, overflow="fold")
    for pair in found:
        seconds = (f"{pair['measured']:.4g} s", f"{pair['predicted']:.4g} s")
        names = (Text(pair["machine"]), Text(pair["layout"]))
        table.add_row(Text(pair["id"]), _percent(pair["error"], signed=True), *seconds, *names)
    return table


def _skipped(document: Mapping[str, Any], console: Console) -> None:
    reasons = Counter(skipped["reason"] for skipped in document["skipped"])
    for reason, count in reasons.most_common():
        rows = [skipped["id"] for skipped in document["skipped"] if skipped["reason"] == reason]
        console.print(Text(f"not simulated: {count} ({', '.join(rows[:3])}{', ...' if count > 3 else ''}): {reason}"))
