"""Plan: the bill of lading. What was asked, what goes where between two uses, the Program that does it, and its cost.

A saved plan is all that training needs beside the captured graph: its Program is in it, as text, and so is what the
simulator predicted of every action (docs/plan-json.md). What a Program means is known to the graph it was made for;
``lading.memory.restore`` puts the two together and proves the result again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

from lading.errors import ConfigError
from lading.files import read_json, write_text
from lading.ir.action import DEVICE
from lading.ir.reading import check_plan, read_as
from lading.units import format_bytes, format_seconds

#: Raised whenever what a saved plan means changes.
PLAN_FORMAT = 4


class Option(str):
    """Place of a storage between two uses: ``Option.KEEP``, ``Option.RECOMPUTE``, or in the tier it names."""

    __slots__ = ()
    KEEP: ClassVar[Option]
    RECOMPUTE: ClassVar[Option]

    @property
    def tier(self) -> str:
        """Name of the tier in which the storage waits; "" where it is kept or recomputed."""
        return "" if self in (Option.KEEP, Option.RECOMPUTE) else str(self)


Option.KEEP, Option.RECOMPUTE = Option("keep"), Option("recompute")


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice for a gap: what happens to ``storage`` between its uses at op positions ``start`` and ``end``.

    A gap with ``end <= start`` passes over the step's boundary.
    """

    storage: int
    start: int
    end: int
    option: Option


@dataclass(frozen=True, kw_only=True)
class PolicyRow:
    """Row of one policy in the comparison of policies.

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
class Choices:
    """Choices of a plan about the step.

    Attributes:
        gaps: Choice for each gap between two uses of a storage; a gap that is not listed is KEEP.
        deferred: Number of updates, the last ones of the step, that run in the next step's forward
            (``lading.ir.defer``).
        hosted: Operations that the host's processors run, as numbered in the step with its updates deferred.
        retimed: Number of times that transfers were scheduled again, by the times simulated.
    """

    gaps: tuple[Choice, ...] = ()
    deferred: int = 0
    retimed: int = 0
    hosted: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Request for a plan: a step, a machine, and what may be used of it.

    Attributes:
        graph_fingerprint: Fingerprint of the whole step, no update deferred and nothing on the host.
        machine: The whole machine, as its TOML would say it; ``machine_fingerprint`` is the hash of its costs.
        host_id: The computer that the machine was measured on; "" for one of the catalog, which may be any.
        budgets: Bytes allowed per tier.
        policy: Name of the policy that chose.
        settings: ``clip_norm``, ``master_weights`` and ``compile`` (1.0 or 0.0), and what was measured of this step's
            kernels and of saving it, bytes.
        optimizer: Rule that moves parameters, as a table of its name and settings; None for AdamW with its defaults.
        matrices: ``lading.grouping.Matrices`` as a table, where a rule moves matrices.
        run: The configuration of the run, when the plan was made from one.
    """

    graph_fingerprint: str
    machine: dict[str, Any]
    machine_fingerprint: str
    host_id: str
    budgets: dict[str, int]
    policy: str
    settings: dict[str, float]
    optimizer: dict[str, Any] | None = None
    matrices: dict[str, Any] | None = None
    run: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Predictions of the simulator for a plan, and for the policies it was compared with.

    Attributes:
        lower_bound_s: Seconds that no plan within the budgets, with the same operations on the host, is below, as
            modelled; 0.0 where no bound is known.
        keep_all_bytes: Device bytes that keeping everything needs; 0 where that was not asked.
        host_saves_s: Seconds by which running operations on the host makes the step shorter.
        peak_bytes: Bytes at the peak of each tier. ``bytes_by_role`` says what fills the device at its peak.
        actions: For each action its start and its seconds, both as decimal microseconds: "12.500 3.250".
    """

    step_s: float
    lower_bound_s: float
    keep_all_bytes: int
    host_saves_s: float
    peak_bytes: dict[str, int]
    bytes_by_role: dict[str, int]
    policies: tuple[PolicyRow, ...]
    actions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a step: the request, the choices, the Program that does it, and what that should cost.

    Attributes:
        version: Version of Lading.
        layout: How the step is spread over devices, as ``lading.ir.layout.Layout`` prints; None on one device.
        program: ``Program.text``, line by line.
        assumptions: Assumptions, a sentence each.
    """

    version: str
    request: PlanRequest
    layout: str | None = None
    choices: Choices
    program: tuple[str, ...]
    predictions: Predictions
    assumptions: tuple[str, ...]
    format: int = PLAN_FORMAT

    def __repr__(self) -> str:
        options = Counter(choice.option for choice in self.choices.gaps)
        done = {Option.RECOMPUTE: "recomputed", **{tier: f"on {tier}" for tier in self.options[2:]}}
        chosen = "".join(f", {options[o]} gaps {done[o]}" for o in done if options[o])
        step = f"step {format_seconds(self.step_s)}, {self.gap:.1%} above the bound"
        memory = f"device {format_bytes(self.peak_bytes[DEVICE])} of {format_bytes(self.budgets[DEVICE])}"
        machine = self.request.machine.get("name", "a machine")
        return f"Plan({self.request.policy} on {machine}: {step}; {memory}{chosen})"

    @property
    def budgets(self) -> dict[str, int]:
        """Bytes allowed per tier."""
        return self.request.budgets

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.predictions.step_s

    @property
    def lower_bound_s(self) -> float:
        """Seconds of a step that no plan within the budgets takes less than, as modelled; 0.0 where none is known."""
        return self.predictions.lower_bound_s

    @property
    def policies(self) -> tuple[PolicyRow, ...]:
        """Policies that were compared, a row each."""
        return self.predictions.policies

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Predicted peak of each tier, bytes."""
        return self.predictions.peak_bytes

    @property
    def options(self) -> tuple[Option, ...]:
        """Options for a gap: keep, recompute, and the tiers of the machine, nearest first."""
        return Option.KEEP, Option.RECOMPUTE, *(Option(tier) for tier in self.budgets if tier != DEVICE)

    @property
    def gap(self) -> float:
        """Share of the lower bound by which the plan is above it."""
        return self.step_s / self.lower_bound_s - 1.0 if self.lower_bound_s else 0.0

    @property
    def compiled(self) -> bool:
        """Whether runs of light operations are compiled into one call each."""
        return bool(self.request.settings.get("compile", 0.0))

    def of_run(self, run: dict[str, Any]) -> Plan:
        """Copy the plan for a run of this configuration."""
        return dataclasses.replace(self, request=dataclasses.replace(self.request, run=run))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all but the run's configuration; a file whose content has another is refused."""
        table = dataclasses.asdict(self)
        del table["request"]["run"]
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """JSON form, with the fingerprint; ``plan_from_dict`` reads it back."""
        return {**dataclasses.asdict(self), "fingerprint": self.fingerprint}

    def save(self, path: Path | str) -> None:
        """Write as JSON, whole or not at all; raises as ``lading.files.write_aside``."""
        write_text(Path(path), json.dumps(self.to_dict(), indent=1) + "\n")

    @staticmethod
    def load(path: Path | str) -> Plan:
        """Read the plan that ``save`` wrote.

        Raises:
            ConfigError: not a plan, of another format, changed by hand or damaged, or with a field missing, unknown or
                of the wrong type.
        """
        return plan_from_dict(read_json(path, "a plan", "make one with: lading plan RUN.toml"), str(path))


def plan_from_dict(data: Any, origin: str) -> Plan:
    """Build a Plan from parsed JSON; ``origin`` is named in errors.

    Raises:
        ConfigError: another format, a field is missing, unknown or of the wrong type, or something but the run's
            configuration was changed since the plan was saved.
    """
    check_plan(data, "plan of a run", PLAN_FORMAT, origin, "plan again")
    table = dict(cast("dict[str, Any]", data))
    saved = table.pop("fingerprint", None)
    plan: Plan = read_as(Plan, table, origin)
    for index, choice in enumerate(plan.choices.gaps):
        if choice.option not in plan.options:
            raise ConfigError(
                f"{origin}.choices.gaps[{index}].option: expected one of {', '.join(plan.options)}, found "
                f"{choice.option[:40]!r}; plan again"
            )
    if saved != plan.fingerprint:
        raise ConfigError(
            f"{origin}: expected a plan as it was saved, fingerprint {saved!r}, found one that was changed or damaged, "
            f"fingerprint {plan.fingerprint!r} (request.run may be changed by hand, nothing else); plan again"
        )
    return plan
