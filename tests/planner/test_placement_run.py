"""A placement, run: its parts are stages of torch's own pipeline on two processes, with the whole model's losses."""

from __future__ import annotations

import dataclasses
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn

from lading.capture.trace import capture
from lading.catalog.load import load_machine
from lading.errors import ConfigError
from lading.ir.fleet import Fleet, Join, Member
from lading.ir.placement import Placement, Problem, split_points
from lading.models.loss import next_byte_loss
from lading.models.registry import build_model
from lading.planner.placement.api import place
from lading.planner.placement.build import Grain, problem_of
from lading.planner.placement.trial import Trial

MICRO_BATCHES, ROWS, TOKENS = 4, 2, 32


def _model() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "max_seq_len": TOKENS, "dim": 64, "num_heads": 2, "num_layers": 6}
    return build_model("gpt", **sizes, tied=False)


@cache
def _problem() -> Problem:
    """Two computers of which neither holds the model's states."""
    graph = capture(_model(), {"tokens": torch.zeros(ROWS, TOKENS + 1, dtype=torch.int64)}, next_byte_loss)
    machine = load_machine("cpu-laptop")
    whole = problem_of(
        graph, Fleet(name="f", date="", source="", devices=(_member("one", machine.device.memory_bytes),))
    )
    need = sum(g.resident_bytes + g.kept_bytes for g in whole.groups)
    half = machine.device.overhead_bytes + int(0.8 * need)
    link = Join(
        name="wire", devices=("a", "b"), medium="wire", bandwidth_bytes_per_s=1e9, efficiency=1.0, latency_s=1e-4
    )
    fleet = Fleet(name="f", date="", source="", devices=(_member("a", half), _member("b", half)), links=(link,))
    return problem_of(graph, fleet, grain=Grain(most=10), micro_batches=MICRO_BATCHES)


def _member(name: str, memory_bytes: int) -> Member:
    return Member(name=name, machine=load_machine("cpu-laptop"), memory_bytes=memory_bytes)


def _placed() -> Placement:
    return place(_problem(), "chain")


def test_the_parts_of_a_chain_are_split_points() -> None:
    problem, found = _problem(), _placed()
    points = split_points(problem, found)
    assert len(points) == 1
    assert points[0].startswith("layers.")
    mixed = Trial(problem).of([n % 2 for n in range(len(problem.groups))])
    with pytest.raises(ConfigError, match="expected one part on each device, got parts on a, b, a"):
        split_points(problem, dataclasses.replace(mixed, policy="own"))


@pytest.mark.slow
def test_a_pipeline_of_the_parts_has_the_losses_and_gradients_of_the_whole_model() -> None:
    run_ranks(_stage, 2, split_points(_problem(), _placed()))


def _loss(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def _stage(rank: int, points: tuple[str, ...]) -> None:
    from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

    torch.manual_seed(1)
    tokens = torch.randint(0, 64, (MICRO_BATCHES * ROWS, TOKENS + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        split = dict.fromkeys(points, SplitPoint.BEGINNING)
        pipe = pipeline(_model(), mb_args=(inputs[:ROWS],), split_spec=split)
        stage = pipe.build_stage(rank, torch.device("cpu"))
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=_loss)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
    plain = _model()
    own = [_loss(plain(x), y) for x, y in zip(inputs.split(ROWS), targets.split(ROWS), strict=True)]
    torch.stack(own).mean().backward()
    if losses:
        torch.testing.assert_close(torch.stack(losses), torch.stack(own).detach(), rtol=1e-5, atol=1e-6)
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    held = dict(stage.submod.named_parameters())
    assert held
    for name, parameter in held.items():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
