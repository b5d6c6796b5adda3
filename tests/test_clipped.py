"""``lading.plan(clipped=)``: a step whose updates do not wait for the norm of all gradients, by the public names."""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch

import lading
from lading.errors import ConfigError
from lading.ir.graph import StepGraph
from lading.ir.guess import SPECULATES
from lading.ir.plan import Plan
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.planner.speculating import check_clipped
from tests.machines import small_machine

SIZES = {"num_layers": 3, "dim": 128, "num_heads": 4, "vocab_size": 256, "max_seq_len": 32}
#: Norm that gradients of some of the steps here are above.
CLIP = 2.9


@cache
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model("gpt", **SIZES, dropout=0.1).train()


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return [{"tokens": torch.randint(0, 256, (4, 33))} for _ in range(count)]


@cache
def captured() -> StepGraph:
    return lading.capture(model(), batches(1)[0], next_byte_loss)


@cache
def planned(clipped: float | None, share: float = 0.4) -> Plan:
    made = lading.plan(captured(), small_machine(), budget=share, clip_norm=CLIP)
    if clipped is None:
        return made
    size = made.budgets["device"]
    return lading.plan(captured(), small_machine(), budget=size, clip_norm=CLIP, clipped=clipped)


def plain(steps: list[dict[str, torch.Tensor]]) -> tuple[list[float], torch.nn.Module, list[float]]:
    """Losses, the model and norms of plain PyTorch."""
    reference = copy.deepcopy(model())
    optimizer = lading.AdamW().plain(reference.parameters())
    losses, norms = list[float](), list[float]()
    torch.manual_seed(2)
    for batch in steps:
        loss = next_byte_loss(reference, batch)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(reference.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, reference, norms


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.long
def test_few_clipped_steps_make_updates_run_early_and_many_do_not() -> None:
    waits, guesses, often = planned(None), planned(0.0), planned(0.95)
    assert SPECULATES in guesses.request.settings
    assert guesses.step_s < waits.step_s
    assert "do not wait for the norm of all gradients" in guesses.assumptions[-1]
    assert SPECULATES not in often.request.settings
    assert often.step_s == waits.step_s
    assert "with 95% of them clipped and run twice" in often.assumptions[-1]
    assert len(guesses.choices.waiting) < len(captured().parameters)


@pytest.mark.long
def test_numbers_are_plain_pytorchs_and_clipped_steps_are_counted(tmp_path: Path) -> None:
    """Saved and loaded as a file, and gone on with from a checkpoint by a plan whose updates all wait."""
    steps = batches(8)
    losses, reference, norms = plain(steps)
    clipped = [norm > CLIP for norm in norms]
    assert 0 < sum(clipped[:5]) < 5, norms
    planned(0.0).save(tmp_path / "plan.json")
    ours = copy.deepcopy(model())
    torch.manual_seed(2)
    with lading.Trainer(tmp_path / "plan.json", captured(), ours, folder=tmp_path) as trainer:
        assert [trainer.step(batch) for batch in steps[:5]] == losses[:5]
        assert trainer.gradient_norm == norms[4]
        assert trainer.speculation is not None
        assert trainer.speculation.again == sum(clipped[:5])
        saved = trainer.save(tmp_path / "checkpoints")
    other = copy.deepcopy(model())
    with lading.Trainer(planned(None), captured(), other, folder=tmp_path) as trainer:
        trainer.load(saved)
        assert [trainer.step(batch) for batch in steps[5:7]] == losses[5:7]
        saved = trainer.save(tmp_path / "checkpoints")
    third = copy.deepcopy(model())
    with lading.Trainer(planned(0.0), captured(), third, folder=tmp_path) as trainer:
        trainer.load(saved)
        assert trainer.step(steps[7]) == losses[7]
    assert same(third, reference)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_norm_that_is_no_number_gives_plain_pytorchs_bits(tmp_path: Path, number: float) -> None:
    steps = batches(2)
    reference, ours = copy.deepcopy(model()), copy.deepcopy(model())
    for each in (reference, ours):
        with torch.no_grad():
            next(each.parameters()).view(-1)[int(steps[0]["tokens"][0, 0]) * SIZES["dim"]] = (
                number  # which is looked up
            )
    optimizer = lading.AdamW().plain(reference.parameters())
    torch.manual_seed(2)
    for batch in steps:
        next_byte_loss(reference, batch).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(2)
    with lading.Trainer(planned(0.0), captured(), ours, folder=tmp_path) as trainer:
        for batch in steps:
            trainer.step(batch)
        assert trainer.gradient_norm is not None
        assert isnan(trainer.gradient_norm)
        assert trainer.speculation is not None
        assert trainer.speculation.again == 2
    for one, other in zip(reference.state_dict().values(), ours.state_dict().values(), strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_a_pause_goes_on_with_the_values_that_count(tmp_path: Path) -> None:
    steps = batches(6)
    losses, reference, _ = plain(steps)
    ours = copy.deepcopy(model())
    torch.manual_seed(2)
    with lading.Trainer(planned(0.0), captured(), ours, folder=tmp_path) as trainer:
        assert [trainer.step(batch) for batch in steps[:3]] == losses[:3]
        trainer.pause()
        trainer.resume(planned(None), captured())
        assert trainer.speculation is None
        assert trainer.step(steps[3]) == losses[3]
        trainer.pause()
        trainer.resume(planned(0.0), captured())
        assert [trainer.step(batch) for batch in steps[4:]] == losses[4:]
    assert same(ours, reference)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"clipped": 1.5}, "clipped: expected a number >= 0 and < 1, got 1.5"),
        ({"clipped": True}, "clipped: expected a number"),
        ({"clipped": 0.1, "clip_norm": 0.0}, "got clip_norm=0; leave clipped out"),
        ({"clipped": 0.1, "compile": True}, "got compile=True; leave clipped out"),
        ({"clipped": 0.1, "layout": "dp2"}, "got several ranks; leave clipped out"),
    ],
)
def test_what_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        lading.plan(captured(), small_machine(), **{"budget": "50%", "clip_norm": CLIP, **asked})


def test_experts_and_further_steps_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"got further steps \(others=, or validation\); leave"):
        lading.plan(captured(), small_machine(), budget="50%", clip_norm=CLIP, clipped=0.1, others=[captured()])
    with pytest.raises(ConfigError, match=r"got experts that are left out \(experts=\); leave clipped out"):
        check_clipped(0.1, CLIP, 1, compile=False, others=False, experts=True)


def test_a_model_that_changes_buffers_is_refused_by_name() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"]).square().mean()

    graph = lading.capture(net, {"x": torch.zeros(4, 8)}, loss)
    with pytest.raises(ConfigError, match="clipped: expected a step that changes parameters and states alone"):
        lading.plan(graph, small_machine(), budget="100%", clip_norm=1.0, clipped=0.1)


def test_without_a_tier_all_wait() -> None:
    machine = dataclasses.replace(small_machine(), tiers=())
    made = lading.plan(captured(), machine, budget="100%", clip_norm=CLIP, clipped=0.0)
    assert SPECULATES not in made.request.settings
    assert "no plan was found in which some do not" in made.assumptions[-1]
