"""The spine: a planned run computes the numbers of plain PyTorch, to the bit, at any budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lading.checkpoint.store import open_checkpoint
from lading.config import ModelConfig
from lading.memory.restore import program_of
from lading.models.dit import noise_loss
from lading.models.loss import next_byte_loss
from lading.optim.adafactor import Adafactor
from lading.optim.adam import Adam
from lading.optim.adamw import AdamW
from lading.optim.lion import Lion
from lading.optim.master import MasterWeights
from lading.optim.rule import ParameterRule
from lading.optim.sgd import SGD
from lading.prepare import plan
from lading.run import build
from lading.tracing.trace import capture
from lading.trainer import Trainer
from tests.machines import small_machine
from tests.optim.toy import Toy

SIZES: dict[str, dict[str, int | float | bool]] = {
    "llama": {"dim": 96, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2},
    "gpt": {"dim": 96, "num_layers": 4, "num_heads": 4, "dropout": 0.1},
    "moe": {"dim": 64, "num_layers": 3, "num_heads": 2},
    "dit": {"dim": 64, "num_layers": 3, "num_heads": 2, "image_size": 16, "dropout": 0.1},
    "wide": {"dim": 128, "num_heads": 2, "vocab_size": 24_000},  # a table in three parts
}
MODELS = ("llama", "gpt", "moe", "dit")
DEFAULT = AdamW(lr=1e-3)
RULES: tuple[ParameterRule, ...] = (
    Adam(weight_decay=0.1),
    SGD(lr=0.05, momentum=0.9, nesterov=True),
    Lion(weight_decay=0.1),
    Adafactor(),
    Toy(),
)


@dataclass(frozen=True)
class Case:
    """A run: ``precision`` "autocast" is float32 parameters and a loss under autocast."""

    name: str
    accumulation: int = 1
    clip_norm: float = 0.0
    precision: str = "fp32"
    steps: int = 50
    num_layers: int = 0
    shares: tuple[float, ...] = (1.0, 0.5, 0.25)
    optimizer: ParameterRule = DEFAULT


pytestmark = pytest.mark.usefixtures("one_thread")


def _model(case: Case) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = {"num_layers": case.num_layers} if case.num_layers else {}
    model = ModelConfig(name="gpt" if case.name == "wide" else case.name, sizes=SIZES[case.name] | layers)
    return build(model, "bf16" if case.precision == "bf16" else "fp32")


def _loss_of(case: Case) -> Any:
    loss = noise_loss if case.name == "dit" else next_byte_loss

    def autocast_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    return autocast_loss if case.precision == "autocast" else loss


def _batches(case: Case, step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    if case.name == "dit":
        latents = torch.randn(case.accumulation, 4, 4, 16, 16, generator=generator)
        labels = torch.randint(0, 10, (case.accumulation, 4), generator=generator)
        return [{"latents": x, "labels": y} for x, y in zip(latents, labels, strict=True)]
    shape = (1, 17) if case.name == "wide" else (8, 65)
    return [{"tokens": torch.randint(0, 256, shape, generator=generator)} for _ in range(case.accumulation)]


def _plain(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, loss_fn = _model(case), _loss_of(case)
    masters = MasterWeights(model)
    optimizer = case.optimizer.plain(masters.parameters)
    losses: list[float] = []
    for step in range(case.steps):
        total = 0.0
        for batch in _batches(case, step):
            loss = loss_fn(model, batch)
            if case.accumulation > 1:
                loss = loss / case.accumulation
            loss.backward()
            masters.add_gradients()
            total += loss.item()
        losses.append(total)
        if case.clip_norm:
            torch.nn.utils.clip_grad_norm_(masters.parameters, case.clip_norm)
        optimizer.step()
        masters.write_back()
        optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def _planned(case: Case, share: float, folder: Path) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Train with ``share`` of the tensor bytes that keeping all needs (a small process is mostly its fixed part)."""
    model = _model(case)
    graph = capture(model, _batches(case, 0)[0], _loss_of(case), accumulation=case.accumulation)
    settings: dict[str, Any] = {"clip_norm": case.clip_norm, "master_weights": case.precision == "bf16"}
    settings["optimizer"] = case.optimizer
    made = plan(graph, small_machine(), budget="100%", **settings)
    if share < 1:
        arena = program_of(made, graph).arena_bytes
        budget = made.peak_bytes["device"] - int((1 - share) * arena)
        made = plan(graph, small_machine(), budget=budget, **settings)
    with Trainer(made, graph, model, folder=folder) as trainer:
        losses = [trainer.step(_batches(case, step)) for step in range(case.steps)]
    return losses, {name: p.detach() for name, p in model.named_parameters()}, made


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt", 2, 0.5, "fp32", 5, 1, (1.0, 0.4)),  # of one layer less than 0.37 cannot be planned
        Case("gpt", 2, 0.5, "bf16", 4, 1, (0.5,)),
        Case("llama", 1, 0.5, "autocast", 4, 1, (0.5,)),
        Case("wide", 1, 0.5, "bf16", 2, 1, (1.0, 0.45)),
        Case("gpt", 2, 0.5, "bf16", 3, 1, (0.5,), Adafactor(weight_decay=0.1)),
        Case("wide", 1, 0.5, "bf16", 2, 1, (0.5,), AdamW(states="8bit")),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                *(Case("wide", 1, 0.5, "bf16", 2, 1, (0.45,), rule) for rule in (Lion(weight_decay=0.1), Toy())),
                *(Case("wide", 1, 0.5, "fp32", 2, 1, (0.5,), AdamW(states=states)) for states in ("bf16", "8bit")),
                Case("gpt", 2, 0.5, "fp32", 5, 2),
                Case("llama"),
                Case("gpt", 2, 0.5),
                Case("llama", 1, 0.5),
                Case("llama", 2),
                Case("llama", 2, 0.5),
                Case("moe", 1, 0.5),
                Case("moe", 2),
                Case("dit", 2, 0.5),
                *(Case("llama", 2, 0.5, "fp32", 10, 2, optimizer=rule) for rule in RULES),
                *(Case("gpt", 2, 0.5, "bf16", 10, 2, optimizer=rule) for rule in RULES),
                *(Case(name, 1, 0.5, "bf16", 10) for name in MODELS),
                *(Case(name, 2, 0.0, "bf16", 10) for name in MODELS),
                *(Case(name, 2, 0.5, "autocast", 10) for name in MODELS),
            )
        ),
    ],
    ids=str,
)
def test_planned_equals_plain_to_the_bit(case: Case, tmp_path: Path) -> None:
    losses, weights = _plain(case)
    for share in case.shares:
        got, values, made = _planned(case, share, tmp_path)
        assert got == losses, f"{case} at {share}"
        assert values.keys() == weights.keys()
        assert all(torch.equal(values[key], weights[key]) for key in weights), f"{case} at {share}"
        assert (len(made.choices.gaps) > 0) == (share < 1)


@pytest.mark.long
def test_a_checkpoint_holds_masters_and_states_in_parts_whole(tmp_path: Path) -> None:
    case = Case("wide", clip_norm=0.5, precision="bf16", num_layers=1)
    graph = capture(_model(case), _batches(case, 0)[0], next_byte_loss)
    made = plan(graph, small_machine(), budget="60%", clip_norm=0.5, master_weights=True)
    state = next(s for s in program_of(made, graph).graph.states if s.name == "tokens.weight.master")
    assert len(state.parts) == 3
    with Trainer(made, graph, _model(case), folder=tmp_path) as trainer:
        assert torch.equal(trainer.value("tokens.weight.master"), _model(case).get_parameter("tokens.weight").float())
        trainer.step(_batches(case, 0))
        saved = trainer.save(tmp_path / "saved")
        wanted = {name: trainer.value(name) for name in ("tokens.weight", "tokens.weight.master", "norm.bias.exp_avg")}
        assert not torch.equal(wanted["tokens.weight"].float(), wanted["tokens.weight.master"])
        loss = trainer.step(_batches(case, 1))
    tensor = open_checkpoint(saved).tensors["tokens.weight.master"]
    assert (tensor.dtype, tensor.shape) == ("float32", (24_000, 128))
    everything = plan(graph, small_machine(), budget="100%", clip_norm=0.5, master_weights=True)
    with Trainer(everything, graph, _model(case), folder=tmp_path) as trainer:
        trainer.load(saved)
        assert all(torch.equal(trainer.value(name), value) for name, value in wanted.items())
        assert trainer.step(_batches(case, 1)) == loss


@pytest.mark.long
@pytest.mark.parametrize(
    "rule",
    [RULES[0], *(pytest.param(rule, marks=pytest.mark.slow) for rule in RULES[1:])],
    ids=lambda rule: type(rule).__name__,
)
def test_a_run_goes_on_under_another_budget_and_with_other_numbers(rule: ParameterRule, tmp_path: Path) -> None:
    """Saved whole, whatever the parts; the second half at another rate, as in plain PyTorch."""
    case = Case("gpt", clip_norm=0.5, precision="bf16", steps=4, num_layers=1, optimizer=rule)
    model = _model(case)
    masters = MasterWeights(model)
    optimizer = rule.plain(masters.parameters)
    wanted: list[float] = []
    for step in range(4):
        if step == 2:
            optimizer.param_groups[0]["lr"] = 2 * rule.lr
        loss = next_byte_loss(model, _batches(case, step)[0])
        loss.backward()
        wanted.append(loss.item())
        masters.add_gradients()
        torch.nn.utils.clip_grad_norm_(masters.parameters, 0.5)
        optimizer.step()
        masters.write_back()
        optimizer.zero_grad()
    graph = capture(_model(case), _batches(case, 0)[0], next_byte_loss)
    settings: dict[str, Any] = {"clip_norm": 0.5, "master_weights": True, "optimizer": rule}
    everything = plan(graph, small_machine(), budget="100%", **settings)
    budget = everything.peak_bytes["device"] - program_of(everything, graph).arena_bytes // 3
    found: list[float] = []
    for made, lr, first in (
        (everything, rule.lr, 0),
        (plan(graph, small_machine(), budget=budget, **settings), 2 * rule.lr, 2),
    ):
        assert bool(made.choices.gaps) == (first > 0)
        with Trainer(made, graph, _model(case), folder=tmp_path) as trainer:
            if first:
                trainer.load(tmp_path / "saved" / "step-00000002")
            found += [trainer.step(_batches(case, step), lr=lr) for step in (first, first + 1)]
            trainer.save(tmp_path / "saved")
    assert found == wanted
