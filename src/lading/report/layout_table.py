"""Layouts that were found, as lines for the terminal and as figures by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from textwrap import wrap
from typing import Any

from lading.units import format_bytes, format_seconds

_BUBBLE = "bubble"
#: Share of what takes longer that is named, and above which what takes less is.
_NAMED = 0.9


@dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """Row of a table of layouts.

    Attributes:
        spread: Half width of the interval that nine of ten steps lie in, in logarithms of seconds.
        interval: Bounds of that interval, as factors of the seconds.
        shares_s: Seconds of the step by cause.
        peaks: Bytes by moment and tier.
        over: "" where it fits, else what does not and by how much.
        like: Number of layouts that this one stands for, and how they differ; "" where there are none.
    """

    layout: str
    step_s: float
    spread: float
    interval: tuple[float, float]
    bound_s: float
    mfu: float
    tokens_per_s_per_device: float
    shares_s: Mapping[str, float]
    peaks: Mapping[str, Mapping[str, int]]
    binding: tuple[str, str, float]
    over: str = ""
    like: str = ""
    price_per_billion_tokens: float | None = None

    @property
    def exposed_s(self) -> float:
        """Seconds in which computing waits for communication."""
        return sum(max(0.0, s) for cause, s in self.shares_s.items() if cause.endswith("communication"))

    @property
    def bubble_s(self) -> float:
        """Seconds in which a rank of the pipeline waits for another."""
        return self.shares_s.get(_BUBBLE, 0.0)

    def uncertain_s(self, other: LayoutRow) -> float:
        """Half width of the interval of the seconds between two layouts.

        What both have in common is wrong in both alike and falls out; causes that differ are taken to be wrong
        independently, each by ``spread`` of the difference.
        """
        causes = {*self.shares_s, *other.shares_s}
        return self.spread * hypot(*(self.shares_s.get(c, 0.0) - other.shares_s.get(c, 0.0) for c in sorted(causes)))

    def is_told_apart(self, other: LayoutRow) -> bool:
        """Whether the seconds between two layouts are more than the prediction may be wrong by."""
        return abs(self.step_s - other.step_s) > self.uncertain_s(other)

    def peak_bytes_of(self, tier: str) -> int:
        """Bytes of a tier at the moment that needs most."""
        return max(tiers.get(tier, 0) for tiers in self.peaks.values())


def loses_because(row: LayoutRow, winner: LayoutRow) -> str:
    """Say why a layout is not the winner.

    Where it does not fit: what, and by how much. Else by how much it is slower, the causes that take longer, largest
    first until they are nine tenths of all that does, and the cause that takes less.
    """
    slower = row.step_s / winner.step_s - 1
    if row.over:
        speed = f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}" if abs(slower) >= 5e-4 else "as fast"
        return f"{speed}, but does not fit: {row.over}"
    if row.layout == winner.layout:
        return "fastest"
    causes = sorted({*row.shares_s, *winner.shares_s})
    more = {cause: row.shares_s.get(cause, 0.0) - winner.shares_s.get(cause, 0.0) for cause in causes}
    longer = sorted(((seconds, cause) for cause, seconds in more.items() if seconds > 0), reverse=True)
    total = sum(seconds for seconds, _ in longer)
    if slower < 1e-6 or not longer:
        return "as fast; a tie goes to less memory, then by name"
    named: list[str] = []
    covered = 0.0
    for seconds, cause in longer:
        named.append(f"{cause} +{format_seconds(seconds)}")
        covered += seconds
        if covered >= _NAMED * total:
            break
    apart = (
        "" if row.is_told_apart(winner) else f" (within {row.uncertain_s(winner) / winner.step_s:.1%} not told apart)"
    )
    share = f" ({covered / total:.0%} of what takes longer)" if len(named) < len(longer) else ""
    less, saved = min((seconds, cause) for cause, seconds in more.items())
    instead = f"; {saved} -{format_seconds(-less)}" if -less > (1 - _NAMED) * total else ""
    return f"{slower:.1%} slower{apart}: {', '.join(named)}{share}{instead}"


def layouts_lines(rows: Sequence[LayoutRow], over: Sequence[LayoutRow], width: int) -> list[str]:
    """Describe the fastest layouts that fit, then faster ones that do not: figures, and why each loses.

    Args:
        width: Columns of a line.
    """
    all_rows = [*rows, *over]
    shared = _shared([row.layout for row in all_rows])
    tiers = list(
        dict.fromkeys(tier for row in all_rows for bytes_by_tier in row.peaks.values() for tier in bytes_by_tier)
    )
    priced = ("a billion",) if rows[0].price_per_billion_tokens is not None else ()
    table = [("", "step", "MFU", "tokens/s", *tiers, "exposed", "bubble", "binding", *priced)]
    table += [(str(number), *_cells(row, tiers)) for number, row in enumerate(all_rows, start=1)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        _aligned(table[0], widths),
        *_wrapped("layout: why it loses; variants of it among the best", width, " " * (widths[0] + 1)),
    ]
    for cells, row in zip(table[1:], all_rows, strict=True):
        distinct = ",".join(part for part in row.layout.split(",") if part not in shared) or "nothing more"
        lines.append(_aligned(cells, widths))
        like = f"; {row.like}" if row.like else ""
        lines += _wrapped(f"{distinct}: {loses_because(row, rows[0])}{like}", width, " " * (widths[0] + 1))
    title = "Layouts, the fastest first" + (f"; all have {','.join(shared)}" if shared and len(all_rows) > 1 else "")
    return [*_wrapped(title, width), *lines]


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _shared(layouts: Sequence[str]) -> list[str]:
    """List the parts that all of several layouts have; none of one alone."""
    first, *others = (layout.split(",") for layout in layouts)
    return [part for part in first if all(part in parts for parts in others)] if others else []


def _cells(row: LayoutRow, tiers: Sequence[str]) -> tuple[str, ...]:
    price = row.price_per_billion_tokens
    return (
        format_seconds(row.step_s),
        f"{row.mfu:.1%}",
        f"{row.tokens_per_s_per_device:,.0f}",
        *(format_bytes(row.peak_bytes_of(tier)) if row.peak_bytes_of(tier) else "-" for tier in tiers),
        f"{row.exposed_s / row.step_s:.1%}",
        f"{row.bubble_s / row.step_s:.1%}",
        f"{row.binding[0]} {row.binding[2]:.0%}",
        *([f"{price:,.0f}"] if price is not None else []),
    )


def layout_figures(row: LayoutRow, winner: LayoutRow) -> dict[str, Any]:
    """Figures of a layout beside the winner's, for JSON."""
    return {
        "layout": row.layout,
        "step_s": row.step_s,
        "low_s": row.step_s * row.interval[0],
        "high_s": row.step_s * row.interval[1],
        "told_apart": row.is_told_apart(winner),
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
