"""Policies of what stays gathered, side by side for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lading.report.table import figures_table
from lading.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class UnshardRow:
    """What one policy comes to.

    Attributes:
        fill: Of the budget; above 1 where it does not fit.
        gathers: All-gathers of one step, in forward and in backward.
        gap: How far above the bound, as a share of it; None where it does not fit, as the bound is of those that do.
    """

    policy: str
    step_s: float
    exposed_s: float
    peak_bytes: int
    fill: float
    gathers: tuple[int, int]
    buckets: int
    gap: float | None

    @property
    def fits(self) -> bool:
        """Whether the budget holds it."""
        return self.fill <= 1


def unshard_table(rows: Sequence[UnshardRow], chosen: str, bound_s: float, budget_bytes: int) -> Table:
    """Policies side by side, the chosen one marked."""
    title = f"What stays gathered in {format_bytes(budget_bytes)}; no choice is faster than {format_seconds(bound_s)}"
    table = figures_table(title, "policy", "step", "waits", "peak", "of budget", "groups", "gathers", "above bound")
    for row in rows:
        above = f"{row.gap:.1%}" if row.gap is not None else "does not fit"
        table.add_row(
            f"{row.policy} *" if row.policy == chosen else row.policy,
            format_seconds(row.step_s),
            format_seconds(row.exposed_s),
            format_bytes(row.peak_bytes),
            f"{row.fill:.1%}",
            str(row.buckets),
            f"{row.gathers[0]} + {row.gathers[1]}",
            above,
            style="bold" if row.policy == chosen else None,
        )
    return table
