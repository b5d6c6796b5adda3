"""Placements of a model by name on a fleet, a list of unlike devices: the problem of what is asked, and its answers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lading import __version__
from lading.catalog.models import model_names, named_model
from lading.errors import ConfigError, PlanInfeasible
from lading.ir.fleet import Fleet
from lading.ir.placement import Placement, PlacementProblem
from lading.ir.plan import Choices, Plan, Predictions
from lading.ir.request import Request

if TYPE_CHECKING:
    from lading.planner.placement.contest import Contest

#: Micro-batches of a step that are tried, where they divide it; and one sequence each.
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


#: Most modules that a captured model is cut in, where nothing is said.
UNITS = 96


def _from_table(asked: Request) -> bool:
    """Whether a model goes by the catalog's table."""
    return asked.model in model_names() and asked.units is None


def _tokens(asked: Request) -> int:
    """Number of tokens of a sequence, as it is placed."""
    if asked.seq_len:
        return asked.seq_len
    if _from_table(asked):
        return named_model(asked.model).default_tokens
    from lading.catalog.models import resolved
    from lading.fit import run_of_model

    return resolved(run_of_model(asked.model)).data.sequence_length


def problem_on(asked: Request, fleet: Fleet) -> PlacementProblem:
    """Make the problem; a model of the catalog goes by its table unless asked otherwise, others are captured.

    Raises:
        ConfigError: a name is not known, or nothing there can run the model.
        CaptureError: the model cannot be captured.
    """
    layout = asked.asked_layout
    if _from_table(asked):
        from lading.catalog.stacks import stack_by_name
        from lading.catalog.tables import model_table
        from lading.planner.placement.from_table import chain_of

        return chain_of(
            model_table(asked.model),
            fleet,
            stack_by_name(asked.stack),
            seq_len=_tokens(asked),
            batch=layout.micro_batch,
            micro_batches=layout.micro_batches,
            training=asked.training,
        )
    if not any(mark in asked.model for mark in ":/."):
        named_model(asked.model)  # says what there is, before anything is imported to capture
    return _captured(asked, fleet)


def best_of(asked: Request, fleet: Fleet, batch: int) -> tuple[Request, Contest, dict[int, float | None]]:
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
        problem = problem_on(dataclasses.replace(asked, layout=f"mb{batch // count}", global_batch=batch), fleet)
        try:
            tried[count] = contest(problem, effort=0).best.step_s
        except PlanInfeasible as infeasible:
            tried[count], error = None, infeasible
    fits = {count: seconds for count, seconds in tried.items() if seconds is not None}
    if not fits:
        assert error is not None
        raise error
    count = min(fits, key=fits.__getitem__)
    chosen = dataclasses.replace(asked, layout=f"mb{batch // count}", global_batch=batch)
    return chosen, contest(problem_on(chosen, fleet)), tried


def saved(asked: Request, fleet: Fleet, problem: PlacementProblem, placement: Placement) -> Plan:
    """Make a plan of a placement, to be written to a file."""
    network = problem.network
    request = dataclasses.replace(
        asked,
        machine_fingerprint=fleet.fingerprint,
        budgets=dict(zip(network.devices, network.memory_bytes, strict=True)),
        seq_len=_tokens(asked),
        units=None if _from_table(asked) else _units(asked),
        policy=placement.policy,
    )
    return Plan(
        version=__version__,
        request=request,
        layout=str(asked.asked_layout),
        choices=Choices(
            placement=tuple(
                (group.name, network.devices[device])
                for group, device in zip(problem.groups, placement.devices, strict=True)
            ),
            in_flight=dict(zip(network.devices, placement.windows, strict=True)),
        ),
        predictions=Predictions(
            step_s=placement.step_s,
            lower_bound_s=placement.bound_s,
            peaks={"step": dict(zip(network.devices, placement.peak_bytes, strict=True))},
        ),
        assumptions=problem.assumed,
    )


def replayed(plan: Plan, fleet: Fleet) -> tuple[PlacementProblem, Placement]:
    """Simulate a saved placement on a fleet: the one it was made for, or another with devices of the same names.

    Raises:
        ConfigError: the fleet lacks a device, or the model is taken apart otherwise than when the plan was made.
    """
    from lading.planner.placement.trial import Trial

    model, parts = plan.request.model, plan.choices.placement
    problem = problem_on(plan.request, fleet)
    names = problem.network.devices
    if missing := sorted({device for _, device in parts} - set(names)):
        raise ConfigError(f"expected a list with the placement's device {missing[0]!r}, got {', '.join(names)}")
    if [group.name for group in problem.groups] != [name for name, _ in parts]:
        raise ConfigError(
            f"expected {model} in the {len(parts)} parts of the placement, got {len(problem.groups)}, or "
            "others: the model is another now; place it again"
        )
    trial, devices = Trial(problem), [names.index(device) for _, device in parts]
    if not trial.can_run(devices):
        raise ConfigError(f"expected devices that can run their parts; {'; '.join(problem.assumed)}")
    return problem, trial.of(devices, "as saved")


def _units(asked: Request) -> int:
    return UNITS if asked.units is None else asked.units


def _captured(asked: Request, fleet: Fleet) -> PlacementProblem:
    """Make the problem from a capture on fake tensors; this imports torch."""
    from lading.catalog.models import resolved
    from lading.fit import run_of_model
    from lading.planner.placement.from_graph import Grain, problem_of
    from lading.run import build, example_batch, loss_of
    from lading.tracing.initial import defer
    from lading.tracing.trace import capture

    layout = asked.asked_layout
    run = resolved(run_of_model(asked.model, asked.seq_len or None))
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, batch_size=layout.micro_batch))
    module = defer(lambda: build(run.model, next(iter(asked.precisions), "fp32"))).model
    graph = capture(module, example_batch(run), loss_of(run.model))
    grain = Grain(operations=not _units(asked), max_units=max(1, _units(asked)), training=asked.training)
    return problem_of(graph, fleet, grain=grain, micro_batches=layout.micro_batches, name=asked.model)
