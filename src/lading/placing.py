"""Placements of a model by name on a fleet, a list of unlike devices: the problem of what is asked, and its answers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lading import __version__
from lading.catalog.models import model_names, named_model
from lading.errors import ConfigError, PlanInfeasible
from lading.ir.fleet import Fleet
from lading.ir.placedplan import PlacedDevice, PlacedGroup, PlacedPlan
from lading.ir.placement import Placement, PlacementProblem

if TYPE_CHECKING:
    from lading.planner.placement.contest import Contest

#: Micro-batches of a step that are tried, where they divide it; and one sequence each.
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True, kw_only=True)
class Placing:
    """Question that ``lading place`` is asked.

    Attributes:
        seq_len: Tokens of a sequence; 0 for the catalog's.
        batch: Sequences of a micro-batch.
        latency: One forward pass; else a training step.
        units: Most modules that a captured model is cut in; 0 for single operations.
        captured: Captured though the catalog has a table.
        precision: Precision of a captured model, "fp32" or "bf16".
    """

    model: str
    seq_len: int = 0
    batch: int = 1
    micro_batches: int = 1
    latency: bool = False
    units: int = 96
    captured: bool = False
    precision: str = "fp32"
    stack: str = "default"

    @property
    def from_table(self) -> bool:
        """Whether the problem is made from the catalog's table."""
        return self.model in model_names() and not self.captured and bool(self.units)

    @property
    def tokens(self) -> int:
        """Number of tokens of a sequence, as it is placed."""
        if self.seq_len:
            return self.seq_len
        if self.from_table:
            return named_model(self.model).default_tokens
        from lading.catalog.models import resolved
        from lading.fit import run_of_model

        return resolved(run_of_model(self.model)).data.sequence_length

    def __post_init__(self) -> None:
        if min(self.batch, self.micro_batches) < 1 or min(self.units, self.seq_len) < 0:
            raise ConfigError(
                f"expected a batch and micro-batches of 1 or more, units and a sequence length of 0 or more, got "
                f"{self.batch}, {self.micro_batches}, {self.units} and {self.seq_len}"
            )


def problem_on(asked: Placing, fleet: Fleet) -> PlacementProblem:
    """Make the problem; a model of the catalog goes by its table unless asked otherwise, others are captured.

    Raises:
        ConfigError: a name is not known, or nothing there can run the model.
        CaptureError: the model cannot be captured.
    """
    if asked.from_table:
        from lading.catalog.stacks import stack_by_name
        from lading.catalog.tables import model_table
        from lading.planner.placement.from_table import chain_of

        return chain_of(
            model_table(asked.model),
            fleet,
            stack_by_name(asked.stack),
            seq_len=asked.tokens,
            batch=asked.batch,
            micro_batches=asked.micro_batches,
            training=not asked.latency,
        )
    if not any(mark in asked.model for mark in ":/."):
        named_model(asked.model)  # says what there is, before anything is imported to capture
    return _captured(asked, fleet)


def best_of(asked: Placing, fleet: Fleet, batch: int) -> tuple[Placing, Contest, dict[int, float | None]]:
    """Find the fastest placement of a step of ``batch`` sequences, over numbers of micro-batches that divide it.

    Each number is searched briefly, the best one in full.

    Returns:
        The question with the micro-batches chosen; the placement beside the other policies'; and what each number came
        to, seconds (None: it does not fit).

    Raises:
        ConfigError: the batch is below 1.
        PlanInfeasible: none fits.
    """
    from lading.planner.placement.contest import contest

    if batch < 1:
        raise ConfigError(f"expected a batch of 1 sequence or more, got {batch}")
    tried: dict[int, float | None] = {}
    error: PlanInfeasible | None = None
    for count in sorted(n for n in {*_COUNTS, batch} if batch % n == 0):
        problem = problem_on(dataclasses.replace(asked, batch=batch // count, micro_batches=count), fleet)
        try:
            tried[count] = contest(problem, effort=0).best.step_s
        except PlanInfeasible as infeasible:
            tried[count], error = None, infeasible
    fits = {count: seconds for count, seconds in tried.items() if seconds is not None}
    if not fits:
        assert error is not None
        raise error
    count = min(fits, key=fits.__getitem__)
    chosen = dataclasses.replace(asked, batch=batch // count, micro_batches=count)
    return chosen, contest(problem_on(chosen, fleet)), tried


def saved(asked: Placing, fleet: Fleet, machine: str, problem: PlacementProblem, placement: Placement) -> PlacedPlan:
    """Make a plan of a placement, to be written to a file.

    Args:
        machine: Name or path by which the fleet was asked for.
    """
    network = problem.network
    return PlacedPlan(
        version=__version__,
        model=asked.model,
        machine=machine,
        machine_fingerprint=fleet.fingerprint,
        seq_len=asked.tokens,
        batch=asked.batch,
        micro_batches=asked.micro_batches,
        training=not asked.latency,
        units=asked.units,
        captured=not asked.from_table,
        precision=asked.precision,
        stack=asked.stack,
        devices=tuple(
            PlacedDevice(name=name, under_way=w, peak_bytes=peak, memory_bytes=size)
            for name, w, peak, size in zip(
                network.devices, placement.windows, placement.peak_bytes, network.memory_bytes, strict=True
            )
        ),
        groups=tuple(
            PlacedGroup(name=group.name, device=network.devices[device])
            for group, device in zip(problem.groups, placement.devices, strict=True)
        ),
        step_s=placement.step_s,
        bound_s=placement.bound_s,
        policy=placement.policy,
        assumptions=problem.assumed,
    )


def replayed(plan: PlacedPlan, fleet: Fleet) -> tuple[PlacementProblem, Placement]:
    """Simulate a saved placement on a fleet: the one it was made for, or another with devices of the same names.

    Raises:
        ConfigError: the fleet lacks a device, or the model is taken apart otherwise than when the plan was made.
    """
    from lading.planner.placement.trial import Trial

    asked = Placing(
        model=plan.model,
        seq_len=plan.seq_len,
        batch=plan.batch,
        micro_batches=plan.micro_batches,
        latency=not plan.training,
        units=plan.units,
        captured=plan.captured,
        precision=plan.precision,
        stack=plan.stack,
    )
    problem = problem_on(asked, fleet)
    names = problem.network.devices
    if missing := sorted({group.device for group in plan.groups} - set(names)):
        raise ConfigError(f"expected a list with the placement's device {missing[0]!r}, got {', '.join(names)}")
    if [group.name for group in problem.groups] != [group.name for group in plan.groups]:
        raise ConfigError(
            f"expected {plan.model} in the {len(plan.groups)} parts of the placement, got {len(problem.groups)}, or "
            "others: the model is another now; place it again"
        )
    trial, devices = Trial(problem), [names.index(group.device) for group in plan.groups]
    if not trial.can_run(devices):
        raise ConfigError(f"expected devices that can run their parts; {'; '.join(problem.assumed)}")
    return problem, trial.of(devices, "as saved")


def _captured(asked: Placing, fleet: Fleet) -> PlacementProblem:
    """Make the problem from a capture on fake tensors; this imports torch."""
    from lading.catalog.models import resolved
    from lading.fit import run_of_model
    from lading.planner.placement.from_graph import Grain, problem_of
    from lading.run import build, example_batch, loss_of
    from lading.tracing.initial import defer
    from lading.tracing.trace import capture

    run = resolved(run_of_model(asked.model, asked.seq_len or None))
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, batch_size=asked.batch))
    module = defer(lambda: build(run.model, asked.precision)).model
    graph = capture(module, example_batch(run), loss_of(run.model))
    grain = Grain(operations=not asked.units, most=max(1, asked.units), training=not asked.latency)
    return problem_of(graph, fleet, grain=grain, micro_batches=asked.micro_batches, name=asked.model)
