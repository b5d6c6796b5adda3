"""Plan: the bill of lading. What goes where between two uses, what that should cost, and for whom it was made."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from lading.files import read_json, write_text
from lading.ir.reading import check_plan, read_as
from lading.units import format_bytes, format_seconds

#: Raised whenever what a saved plan means changes.
PLAN_FORMAT = 2


class Option(StrEnum):
    """Where a storage is between two uses."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    HOST = "host"
    DISK = "disk"


#: Words for what happens in a gap that is not kept.
_DONE = {Option.RECOMPUTE: "recomputed", Option.HOST: "on the host", Option.DISK: "on disk"}


@dataclass(frozen=True, slots=True)
class Choice:
    """What happens to ``storage`` between its uses at op positions ``start`` and ``end``.

    A gap with ``end <= start`` passes over the step's boundary.
    """

    storage: int
    start: int
    end: int
    option: Option


@dataclass(frozen=True, kw_only=True)
class PolicyRow:
    """One policy's line in the comparison.

    Attributes:
        step_s: Predicted step time; None if the policy does not fit.
        peak_bytes: Predicted device peak, or what the policy would need when it does not fit.
        stall_s: Part of ``step_s`` in which compute waits for a move.
    """

    policy: str
    fits: bool
    peak_bytes: int
    step_s: float | None = None
    recompute_s: float = 0.0
    stall_s: float = 0.0
    moved_bytes: dict[str, int] = field(default_factory=lambda: {})
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Choices for every gap that is not KEEP, with predictions.

    Attributes:
        graph_fingerprint, machine_fingerprint, host_id: What the plan was made for; it is refused for any other.
        budgets: Bytes allowed per tier.
        settings: Knobs of the lowering that reproduce ``program_fingerprint`` exactly; and ``compile``: 1.0 to fuse.
        lower_bound_s: No plan within the budgets, with the same operations on the host, takes less, as modelled.
        hosted: Operations that run on the host's processors, as numbered in the step with its updates deferred.
        bytes_by_role: Bytes of each role at the predicted peak.
        machine: The whole machine, as its TOML would say it.
        run: The configuration of the run, when the plan was made from one.
        matrices: ``lading.grouping.Matrices`` as a table, where a rule moves matrices.
    """

    version: str
    graph_fingerprint: str
    machine_fingerprint: str
    host_id: str
    program_fingerprint: str
    policy: str
    budgets: dict[str, int]
    choices: tuple[Choice, ...]
    settings: dict[str, float]
    step_s: float
    lower_bound_s: float
    peak_bytes: dict[str, int]
    bytes_by_role: dict[str, int]
    policies: tuple[PolicyRow, ...]
    assumptions: tuple[str, ...]
    machine: dict[str, Any]
    run: dict[str, Any] | None = None
    matrices: dict[str, Any] | None = None
    hosted: tuple[int, ...] = ()
    format: int = PLAN_FORMAT

    def __repr__(self) -> str:
        options = Counter(choice.option for choice in self.choices)
        chosen = "".join(f", {options[o]} gaps {_DONE[o]}" for o in _DONE if options[o])
        step = f"step {format_seconds(self.step_s)}, {self.gap:.1%} above the bound"
        memory = f"device {format_bytes(self.peak_bytes['device'])} of {format_bytes(self.budgets['device'])}"
        return f"Plan({self.policy} on {self.machine.get('name', 'a machine')}: {step}; {memory}{chosen})"

    @property
    def gap(self) -> float:
        """How far above the lower bound the plan is, as a share of the bound."""
        return self.step_s / self.lower_bound_s - 1.0 if self.lower_bound_s else 0.0

    @property
    def compiled(self) -> bool:
        """Whether runs of light operations are compiled into one call each."""
        return bool(self.settings.get("compile", 0.0))

    def save(self, path: Path | str) -> None:
        """Write as JSON, whole or not at all; raises as ``lading.files.write_aside``."""
        write_text(Path(path), json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path | str) -> Plan:
        """Read what ``save`` wrote.

        Raises:
            ConfigError: not a plan, of another format, or with a field missing, unknown or of the wrong type.
        """
        return plan_from_dict(read_json(path, "a plan", "make one with: lading plan RUN.toml"), str(path))


def plan_from_dict(data: Any, origin: str) -> Plan:
    """A Plan from parsed JSON; ``origin`` is named in errors.

    Raises:
        ConfigError: another format, or a field is missing, unknown or of the wrong type.
    """
    check_plan(data, "plan of a run", PLAN_FORMAT, origin, "plan again")
    return read_as(Plan, data, origin)
