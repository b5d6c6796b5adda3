"""Reporting of plans to those who show them: how far it is, policies side by side, and memory as a tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class PlanProgress(Protocol):
    """Receiver of what the search for a plan tells about itself."""

    def update(self, share: float, doing: str) -> None:
        """Show that ``share`` of the search, in [0, 1], is done at most, and what is being done."""
        ...

    def note(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        ...


class Silent:
    """A PlanProgress that shows nothing."""

    def update(self, share: float, doing: str) -> None:
        """Show no progress."""

    def note(self, text: str) -> None:
        """Print no line."""


SILENT: PlanProgress = Silent()


@dataclass(frozen=True)
class UnshardRow:
    """Step, memory and gathers of one policy that chooses what stays unsharded.

    Attributes:
        fill: Share of the budget that is used; above 1 where the policy does not fit.
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
        """Whether the policy's peak is within the budget."""
        return self.fill <= 1


@dataclass(frozen=True)
class Branch:
    """Branch of a tree of memory: a module, an operation or a tensor, with its bytes at one moment.

    Attributes:
        kind: "module", "operation" or "tensor".
        note: Text behind the name: a shape, how long a group stays.
        states: Bytes of its own by state; those of branches below it come on top.
        num_equal: Number of equal branches that it stands for; its bytes are those of one.
    """

    name: str
    kind: str
    note: str = ""
    states: Mapping[str, int] = field(default_factory=lambda: {})
    children: tuple[Branch, ...] = ()
    num_equal: int = 1

    @property
    def total(self) -> dict[str, int]:
        """Bytes by state with all branches below, times the branches that are alike."""
        sizes = {state: size * self.num_equal for state, size in self.states.items()}
        for branch in self.children:
            for state, size in branch.total.items():
                sizes[state] = sizes.get(state, 0) + size * self.num_equal
        return sizes
