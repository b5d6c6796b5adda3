"""Does a run fit a machine: planned for all the memory the machine has, shown by role and tier."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lading.config import MemoryConfig, RunConfig
from lading.errors import PlanInfeasible
from lading.ir.machine import TIERS, Machine
from lading.prepare import Prepared, machine_of, plan_run
from lading.units import format_bytes, format_seconds

_ROWS = {
    "parameters": ("parameter", "buffer", "constant"),
    "gradients": ("gradient",),
    "optimizer state": ("optimizer_state",),
    "activations": ("activation", "input", "workspace"),
}


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a run needs on a machine; prints as a table.

    Attributes:
        rows: For each kind of memory, bytes in each tier at that tier's peak; they add up to what the plan takes.
        allowed: Bytes each tier has; a tier that the machine lacks is not there.
        error: Why it does not fit; the rows are then those of the smallest budget that would do. None if it fits.
    """

    machine: str
    rows: dict[str, dict[str, int]]
    allowed: dict[str, int]
    step_s: float
    assumptions: tuple[str, ...] = ()
    error: PlanInfeasible | None = None

    def __str__(self) -> str:
        total = {tier: sum(row.get(tier, 0) for row in self.rows.values()) for tier in TIERS}
        lines = [f"{'at the peak':<18}" + "".join(f"{tier:>14}" for tier in TIERS)]
        for name, row in {**self.rows, "together": total, "allowed": self.allowed}.items():
            cells = (format_bytes(row[tier]) if tier in self.allowed and tier in row else "-" for tier in TIERS)
            lines.append(f"{name:<18}" + "".join(f"{cell:>14}" for cell in cells))
        lines += [f"assumption: {text}" for text in self.assumptions]
        if self.error is None:
            return "\n".join([*lines, f"FITS {self.machine}, predicted step {format_seconds(self.step_s)}"])
        smallest = format_bytes(self.error.smallest_budget_bytes)
        at_smallest = f"the table and a predicted step of {format_seconds(self.step_s)} are for the smallest budget"
        return "\n".join([*lines, f"DOES NOT FIT {self.machine}: {at_smallest} that would do, {smallest}"])


def fit_run(run: RunConfig, machine: str) -> FitResult:
    """Plan a run for all the memory of a machine.

    Args:
        run: Its own machine, budgets and folder play no part.
        machine: A name in the catalog, the path of a machine file, or "probe" for this host.

    Raises:
        ConfigError: no such machine, or the run cannot be built.
        CaptureError: the model cannot be captured.
    """
    found = machine_of(dataclasses.replace(run, machine=machine))
    try:
        return _result(_planned(run, found, found.device.memory_bytes), found, None)
    except PlanInfeasible as error:
        memory = dataclasses.replace(run.memory, policy="residency")  # whose smallest budget the error names
        smallest = dataclasses.replace(run, memory=memory)
        device = dataclasses.replace(found.device, memory_bytes=error.smallest_budget_bytes)
        larger = dataclasses.replace(found, device=device)
        return _result(_planned(smallest, larger, error.smallest_budget_bytes), found, error)


def _planned(run: RunConfig, machine: Machine, budget_bytes: int) -> Prepared:
    disk = machine.tier("disk")
    memory = MemoryConfig(budget=budget_bytes, disk_budget=disk.capacity_bytes if disk else 0, policy=run.memory.policy)
    return plan_run(dataclasses.replace(run, memory=memory), machine)


def _result(prepared: Prepared, machine: Machine, error: PlanInfeasible | None) -> FitResult:
    return FitResult(
        machine=machine.name,
        rows=_rows(prepared),
        allowed={"device": machine.device.memory_bytes, **{tier.name: tier.capacity_bytes for tier in machine.tiers}},
        step_s=prepared.plan.step_s,
        assumptions=prepared.plan.assumptions,
        error=error,
    )


def _rows(prepared: Prepared) -> dict[str, dict[str, int]]:
    """Bytes of each kind of memory in each tier when that tier is fullest."""
    program = prepared.program
    fullest: dict[str, dict[str, int]] = {}
    for tier in ("device", *program.slots):
        samples = (sample for sample in prepared.predicted.memory if sample.tier == tier)
        fullest[tier] = max(samples, key=lambda sample: sample.total_bytes).bytes_by_role
    rows = {
        name: {tier: sum(roles.get(role, 0) for role in wanted) for tier, roles in fullest.items()}
        for name, wanted in _ROWS.items()
    }
    rows["process overhead"] = {"device": program.overhead_bytes + program.workspace_bytes}
    taken = {"device": program.peak_bytes, **{tier: program.tier_bytes(tier) for tier in program.slots}}
    rows["gaps"] = {tier: size - sum(row.get(tier, 0) for row in rows.values()) for tier, size in taken.items()}
    return rows
