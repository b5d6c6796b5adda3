"""Layouts that were found, as a table for the terminal and as figures by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lading.report.table import figures_table
from lading.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

_BUBBLE = "bubble"


@dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """One layout.

    Attributes:
        shares_s: Seconds of the step by cause.
        peaks: Bytes by moment and tier.
        over: "" where it fits, else what does not and by how much.
    """

    layout: str
    step_s: float
    bound_s: float
    mfu: float
    tokens_per_s_per_device: float
    shares_s: Mapping[str, float]
    peaks: Mapping[str, Mapping[str, int]]
    binding: tuple[str, str, float]
    over: str = ""
    price_per_billion_tokens: float | None = None

    @property
    def exposed_s(self) -> float:
        """Seconds in which computing waits for communication."""
        return sum(max(0.0, s) for cause, s in self.shares_s.items() if cause.endswith("communication"))

    @property
    def bubble_s(self) -> float:
        """Seconds in which a rank of the pipeline waits for another."""
        return self.shares_s.get(_BUBBLE, 0.0)

    def most(self, tier: str) -> int:
        """Bytes of a tier at the moment that needs most."""
        return max(tiers[tier] for tiers in self.peaks.values())


def loses_because(row: LayoutRow, winner: LayoutRow) -> str:
    """Why a layout is not the winner: what it takes longer for, the two largest, or what does not fit."""
    if row.over:
        return f"does not fit: {row.over}"
    if row.layout == winner.layout:
        return "fastest"
    causes = sorted({*row.shares_s, *winner.shares_s})
    more = [(row.shares_s.get(cause, 0.0) - winner.shares_s.get(cause, 0.0), cause) for cause in causes]
    slower = row.step_s - winner.step_s
    found = [(seconds, cause) for seconds, cause in sorted(more, reverse=True) if seconds > slower / 10][:2]
    if slower < 1e-6 * winner.step_s or not found:
        return "as fast; a tie goes by the layout's name"
    return ", ".join(f"{cause} +{format_seconds(seconds)}" for seconds, cause in found)


def layouts_table(rows: Sequence[LayoutRow], over: Sequence[LayoutRow]) -> Table:
    """The fastest that fit, then faster ones that do not."""
    from rich.markup import escape

    priced = any(row.price_per_billion_tokens is not None for row in rows)
    columns = ["layout", "step", "MFU", "tokens/s", "device", "host", "exposed", "bubble", "binding"]
    table = figures_table("Layouts, the fastest first", *columns, *(["a billion"] if priced else []), "loses because")
    table.columns[-1].justify = "left"
    table.columns[0].no_wrap = table.columns[-1].no_wrap = False
    for number, row in enumerate([*rows, *over]):
        cells = [
            row.layout,
            format_seconds(row.step_s),
            f"{row.mfu:.1%}",
            f"{row.tokens_per_s_per_device:,.0f}",
            format_bytes(row.most("device")),
            format_bytes(row.most("host")),
            format_seconds(row.exposed_s),
            format_seconds(row.bubble_s),
            f"{row.binding[0]} {row.binding[2]:.0%}",
            *([f"{row.price_per_billion_tokens or 0:,.0f}"] if priced else []),
            loses_because(row, rows[0]),
        ]
        table.add_row(*map(escape, cells), style="bold" if not number else None)
    return table


def layout_figures(row: LayoutRow, winner: LayoutRow) -> dict[str, Any]:
    """For JSON."""
    return {
        "layout": row.layout,
        "step_s": row.step_s,
        "bound_s": row.bound_s,
        "mfu": row.mfu,
        "tokens_per_s_per_device": row.tokens_per_s_per_device,
        "exposed_communication_s": row.exposed_s,
        "bubble_s": row.bubble_s,
        "price_per_billion_tokens": row.price_per_billion_tokens,
        "peaks": {moment: dict(tiers) for moment, tiers in row.peaks.items()},
        "binding": {"moment": row.binding[0], "tier": row.binding[1], "share": row.binding[2]},
        "fits": not row.over,
        "shares_s": dict(row.shares_s),
        "loses_because": loses_because(row, winner),
    }
