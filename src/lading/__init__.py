"""Lading plans, simulates and runs training steps inside a memory budget.

    graph = lading.capture(model, batch, loss)              # the step as data; nothing runs
    plan = lading.plan(graph, "machine.toml", budget=0.5)   # where every tensor is between two uses
    with lading.Trainer(plan, graph, model) as trainer:     # runs exactly that
        loss = trainer.step(batch)

Names resolve on first use, so ``import lading`` is quick and imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lading.catalog.load import load_machine
    from lading.errors import (
        BudgetExceeded,
        BudgetWarning,
        CaptureError,
        ConfigError,
        DamagedCheckpoint,
        LadingError,
        PlanInfeasible,
        ProgramError,
        SimulationError,
        StorageError,
    )
    from lading.freezing import Freezing, PrefixCache
    from lading.grouping import Matrices
    from lading.ir.graph import StepGraph
    from lading.ir.machine import Machine
    from lading.ir.plan import Plan
    from lading.ir.program import Program
    from lading.ir.timeline import Timeline
    from lading.optim.adamw import AdamW
    from lading.optim.registry import optimizer
    from lading.prepare import plan
    from lading.runtime.apply import apply
    from lading.runtime.place import place
    from lading.runtime.probe import probe
    from lading.sim.device_step import simulate
    from lading.tracing.trace import capture
    from lading.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "AdamW",
    "BudgetExceeded",
    "BudgetWarning",
    "CaptureError",
    "ConfigError",
    "DamagedCheckpoint",
    "Freezing",
    "LadingError",
    "Machine",
    "Matrices",
    "Plan",
    "PlanInfeasible",
    "PrefixCache",
    "Program",
    "ProgramError",
    "SimulationError",
    "StepGraph",
    "StorageError",
    "Timeline",
    "Trainer",
    "__version__",
    "apply",
    "capture",
    "load_machine",
    "optimizer",
    "place",
    "plan",
    "probe",
    "simulate",
]

#: Module that defines each public name.
_DEFINED_IN = MappingProxyType(
    {
        "AdamW": "lading.optim.adamw",
        "BudgetExceeded": "lading.errors",
        "BudgetWarning": "lading.errors",
        "CaptureError": "lading.errors",
        "ConfigError": "lading.errors",
        "DamagedCheckpoint": "lading.errors",
        "Freezing": "lading.freezing",
        "LadingError": "lading.errors",
        "Machine": "lading.ir.machine",
        "Matrices": "lading.grouping",
        "Plan": "lading.ir.plan",
        "PlanInfeasible": "lading.errors",
        "PrefixCache": "lading.freezing",
        "Program": "lading.ir.program",
        "ProgramError": "lading.errors",
        "SimulationError": "lading.errors",
        "StepGraph": "lading.ir.graph",
        "StorageError": "lading.errors",
        "Timeline": "lading.ir.timeline",
        "Trainer": "lading.trainer",
        "apply": "lading.runtime.apply",
        "capture": "lading.tracing.trace",
        "load_machine": "lading.catalog.load",
        "optimizer": "lading.optim.registry",
        "place": "lading.runtime.place",
        "plan": "lading.prepare",
        "probe": "lading.runtime.probe",
        "simulate": "lading.sim.device_step",
    }
)


def __getattr__(name: str) -> object:
    """Import the module that defines a public name."""
    if name == "optim":
        return import_module("lading.optim")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module 'lading' has no attribute {name!r}")
    return getattr(import_module(_DEFINED_IN[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
