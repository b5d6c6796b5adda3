"""A model by name on a fleet: the placement problem of what is asked, from its table or captured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lading.catalog.models import model_names, named_model
from lading.errors import ConfigError
from lading.ir.fleet import Fleet
from lading.ir.placement import Problem


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
                f"expected a batch and micro-batches of 1 or more and units of 0 or more, got {self.batch}, "
                f"{self.micro_batches} and {self.units}"
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
    return _captured(asked, fleet)


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
