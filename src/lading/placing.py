"""A model by name on a fleet: the placement problem of what is asked, from its table or captured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lading.catalog.models import model_names, named_model
from lading.errors import ConfigError, PlanInfeasible
from lading.ir.fleet import Fleet
from lading.ir.placement import Problem

if TYPE_CHECKING:
    from lading.planner.placement.api import Contest

#: Micro-batches of a step that are tried, where they divide it; and one sequence each.
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True, kw_only=True)
class Placing:
    """What ``lading place`` is asked.

    Attributes:
        seq_len: Tokens of a sequence; 0 for the catalog's.
        batch: Sequences of a micro-batch.
        latency: One forward pass; else a training step.
        units: Most modules that a captured model is cut in; 0 for single operations.
        captured: Captured though the catalog has a table.
        precision: Of a captured model, "fp32" or "bf16".
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

    def __post_init__(self) -> None:
        if min(self.batch, self.micro_batches) < 1 or min(self.units, self.seq_len) < 0:
            raise ConfigError(
                f"expected a batch and micro-batches of 1 or more, units and a sequence length of 0 or more, got "
                f"{self.batch}, {self.micro_batches}, {self.units} and {self.seq_len}"
            )


def problem_on(asked: Placing, fleet: Fleet) -> Problem:
    """The problem; a model of the catalog goes by its table unless asked otherwise, others are captured.

    Raises:
        ConfigError: a name is not known, or nothing there can run the model.
        CaptureError: the model cannot be captured.
    """
    if asked.model in model_names() and not asked.captured and asked.units:
        from lading.catalog.stacks import stack_by_name
        from lading.catalog.tables import model_table
        from lading.planner.placement.tables import chain_of

        return chain_of(
            model_table(asked.model),
            fleet,
            stack_by_name(asked.stack),
            seq_len=asked.seq_len or named_model(asked.model).default_tokens,
            batch=asked.batch,
            micro_batches=asked.micro_batches,
            training=not asked.latency,
        )
    if not any(mark in asked.model for mark in ":/."):
        named_model(asked.model)  # says what there is, before anything is imported to capture
    return _captured(asked, fleet)


def best_of(asked: Placing, fleet: Fleet, batch: int) -> tuple[Contest, dict[int, float | None]]:
    """The fastest placement of a step of ``batch`` sequences, over numbers of micro-batches that divide it.

    Each number is searched briefly, the best one in full.

    Returns:
        The placement beside the other policies', and what each number came to, seconds; None: it does not fit.

    Raises:
        ConfigError: the batch is below 1.
        PlanInfeasible: none fits.
    """
    from lading.planner.placement.api import contest

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
    problem = problem_on(dataclasses.replace(asked, batch=batch // count, micro_batches=count), fleet)
    return contest(problem), tried


def _captured(asked: Placing, fleet: Fleet) -> Problem:
    """From a capture on fake tensors; this imports torch."""
    from lading.capture.initial import defer
    from lading.capture.trace import capture
    from lading.catalog.models import resolved
    from lading.fit import run_of_model
    from lading.planner.placement.build import Grain, problem_of
    from lading.prepare import build, example_batch, loss_of

    run = resolved(run_of_model(asked.model, asked.seq_len or None))
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, batch_size=asked.batch))
    module = defer(lambda: build(run.model, asked.precision)).model
    graph = capture(module, example_batch(run), loss_of(run.model))
    grain = Grain(operations=not asked.units, most=max(1, asked.units), training=not asked.latency)
    return problem_of(graph, fleet, grain=grain, micro_batches=asked.micro_batches, name=asked.model)
