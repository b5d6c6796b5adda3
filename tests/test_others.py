"""Several steps over one model and one optimizer: evaluations, losses that alternate, masks; within one budget."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lading.errors import ConfigError, PlanInfeasible
from lading.memory.restore import programs_of
from lading.memory.tier_layout import homes_of
from lading.prepare import plan
from lading.tracing.trace import capture
from lading.trainer import Trainer
from tests.machines import small_machine
from tests.runs import OVERHEAD_BYTES, budget_for

MACHINE = small_machine(overhead_bytes=OVERHEAD_BYTES)
Batch = dict[str, torch.Tensor]


pytestmark = pytest.mark.usefixtures("one_thread")


class Two(torch.nn.Module):
    """A body with dropout and running statistics, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(32, 128), torch.nn.BatchNorm1d(128), torch.nn.ReLU(), torch.nn.Dropout(0.3)
        )
        self.left, self.right = torch.nn.Linear(128, 64), torch.nn.Linear(128, 64)

    def forward(self, x_BD: torch.Tensor, mask_BD: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        h_BD = self.body(x_BD)
        h_BD = h_BD if mask_BD is None else h_BD * mask_BD
        return self.left(h_BD), self.right(h_BD)


def left_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch["x"], batch.get("mask"))[0], batch["y"])


def right_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.l1_loss(model(batch["x"], batch.get("mask"))[1], batch["y"])


def batch(step: int, rows: int = 48, *, mask: bool = False) -> Batch:
    seed = torch.Generator().manual_seed(step)
    made = {"x": torch.randn(rows, 32, generator=seed), "y": torch.randn(rows, 64, generator=seed)}
    return {**made, "mask": (torch.rand(rows, 128, generator=seed) > 0.5).float()} if mask else made


class Plain:
    """What plain PyTorch does."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def step(self, batch: Batch, *, loss: Callable[..., torch.Tensor] = left_loss) -> float:
        self.model.train()
        self.optimizer.zero_grad()
        value = loss(self.model, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return value.item()

    @torch.no_grad()
    def evaluate(self, batch: Batch, *, loss: Callable[..., torch.Tensor] = left_loss) -> float:
        self.model.eval()
        return loss(self.model, batch).item()


def losses(run: Any) -> list[float]:
    """Losses of a run that changes between all steps."""
    torch.manual_seed(1)
    got: list[float] = []
    for step in range(2):
        got += [run.step(batch(step)), run.evaluate(batch(50 + step)), run.step(batch(step), loss=right_loss)]
        got += [run.step(batch(step, mask=True)), run.evaluate(batch(60 + step, 20))]
        got += [run.step(batch(9)), run.step(batch(10, 30))]
    return got


@pytest.mark.long
def test_steps_that_take_turns_give_plain_pytorchs_bits(tmp_path: Path) -> None:
    """Kept whole and with values on disk; clipped; a head that one loss alone trains; smaller batches of each."""
    torch.manual_seed(0)
    start = Two()
    graph = capture(start, batch(0), left_loss)
    others = [
        capture(start, batch(0), left_loss, evaluation=True),
        capture(start, batch(0), right_loss),
        capture(start, batch(0, mask=True), left_loss),
    ]
    shapes = [capture(start, batch(0, 20), left_loss, evaluation=True), capture(start, batch(0, 30), left_loss)]
    budget: str | int = "100%"
    for tight in (False, True):
        ours, theirs = copy.deepcopy(start), copy.deepcopy(start)
        mine, other = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (ours, theirs))
        asked: dict[str, Any] = {"optimizer": mine, "clip_norm": 0.5, "others": others, "cache": False}
        made = plan(graph, MACHINE, budget=budget, **asked)
        programs = programs_of(made, graph, others)
        budget = budget_for(programs[0], 0.6)
        assert bool(homes_of(programs[0]).slots) == tight
        assert all(each.peak_bytes <= made.budgets["device"] for each in programs)
        with Trainer(made, graph, ours, optimizer=mine, others=others, shapes=shapes, folder=tmp_path) as trainer:
            got = losses(trainer)
        assert got == losses(Plain(theirs, other))
        assert all(
            torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
        )
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert all(torch.equal(mine.state[p][name], other.state[q][name]) for name in other.state[q])


@pytest.mark.long
@pytest.mark.parametrize("rows", [40_000, 48])
def test_the_smallest_budget_is_one_of_all_steps(rows: int) -> None:
    """What an error calls the smallest budget has a plan of the step and its others, where either of them binds."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 48))
    graph, others = capture(model, batch(0), _loss), [capture(model, batch(0, rows), _loss, evaluation=True)]
    with pytest.raises(PlanInfeasible) as alone:
        plan(graph, small_machine(), budget=40_000, cache=False)
    for budget in (40_000, alone.value.smallest_budget_bytes + 5000):
        with pytest.raises(PlanInfeasible, match="no plan of the step and its 1 others fits a device budget") as none:
            plan(graph, small_machine(), budget=budget, others=others, cache=False)
        smallest = none.value.smallest_budget_bytes
        assert smallest == budget + none.value.missing_bytes
        assert f"found for is {smallest} bytes" in f"{none.value}"
    with pytest.raises(PlanInfeasible):  # of fewer bytes than a number without a unit may be
        plan(graph, small_machine(), budget="0.01%", others=others, cache=False)
    made = plan(graph, small_machine(), budget=smallest, others=others, cache=False)
    assert all(each.peak_bytes <= smallest for each in programs_of(made, graph, others))


def _loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch["x"]).square().mean()


class Pair(torch.nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.g = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
        self.d = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))


def g_loss(model: Any, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.softplus(-model.d(model.g(batch["z"]))).mean()


def d_loss(model: Any, batch: Batch) -> torch.Tensor:
    softplus = torch.nn.functional.softplus
    return (softplus(-model.d(batch["x"])) + softplus(model.d(model.g(batch["z"]).detach()))).mean()


def only(model: Pair, part: str) -> Pair:
    """The pair of which one part is trained."""
    model.g.requires_grad_(part == "g")
    model.d.requires_grad_(part == "d")
    return model


def test_a_generator_and_its_discriminator(tmp_path: Path) -> None:
    """One module, one optimizer with a group for each; plain PyTorch has two."""
    torch.manual_seed(0)
    ours = Pair()
    theirs = copy.deepcopy(ours)
    seed = torch.Generator().manual_seed(7)
    batches = [{"x": torch.randn(12, 16, generator=seed), "z": torch.randn(12, 8, generator=seed)} for _ in range(3)]
    mine = torch.optim.Adam([{"params": ours.g.parameters(), "lr": 1e-3}, {"params": ours.d.parameters(), "lr": 4e-3}])
    d_graph = capture(only(ours, "d"), batches[0], d_loss)
    g_graph = capture(only(ours, "g"), batches[0], g_loss)
    made = plan(d_graph, MACHINE, budget="100%", optimizer=mine, others=[g_graph])
    got: list[float] = []
    with Trainer(made, d_graph, only(ours, "d"), optimizer=mine, others=[g_graph], folder=tmp_path) as trainer:
        for each in batches:
            only(ours, "d")
            got.append(trainer.step(each))
            only(ours, "g")
            got.append(trainer.step(each, loss=g_loss))
        with pytest.raises(ConfigError, match=r"expected g\.0\.weight\.requires_grad = False, as captured, got True"):
            trainer.step(batches[0])
    expected: list[float] = []
    adams = [torch.optim.Adam(theirs.d.parameters(), lr=4e-3), torch.optim.Adam(theirs.g.parameters(), lr=1e-3)]
    for each in batches:
        for adam, loss in zip(adams, (d_loss, g_loss), strict=True):
            theirs.zero_grad()
            value = loss(theirs, each)
            value.backward()
            adam.step()
            expected.append(value.item())
    assert got == expected
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_captures_that_are_no_others_of_the_plan() -> None:
    model, second = Two(), torch.nn.Linear(8, 8)
    graph, held_out = capture(model, batch(0), left_loss), capture(model, batch(0), left_loss, evaluation=True)
    made = plan(graph, MACHINE, budget="100%", others=[held_out])
    with pytest.raises(ConfigError, match="others: expected the 1 captures that the plan was made with, got 0"):
        Trainer(made, graph, model)
    of_second = capture(second, torch.ones(2, 8), lambda model, x: model(x).mean())
    with pytest.raises(ConfigError, match=r"expected captures of one model, .* has a Trainer of its own"):
        plan(graph, MACHINE, budget="100%", others=[of_second])


def test_what_is_no_list_of_captures_is_refused_by_name() -> None:
    model = Two()
    graph = capture(model, batch(0), left_loss)
    for given in (graph, [1], None):
        with pytest.raises(ConfigError, match=r"others: expected a list of what lading\.capture returns, got"):
            plan(graph, MACHINE, budget="100%", others=given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"shapes: expected a list of what lading\.capture returns, got"):
        Trainer(plan(graph, MACHINE, budget="100%"), graph, model, shapes=graph)  # type: ignore[arg-type]


def test_attention_that_evaluates_in_one_kernel() -> None:
    """Of torch's encoder, which asks it for no weights."""
    torch.manual_seed(0)
    model, x_BTD = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 5, 16)

    def loss(model: torch.nn.Module, x_BTD: torch.Tensor) -> torch.Tensor:
        return (model(x_BTD) - 1).square().mean()

    graph, held_out = capture(model, x_BTD, loss), capture(model, x_BTD, loss, evaluation=True)
    assert any("multi_head_attention" in op.name for op in held_out.ops)
    with Trainer(plan(graph, MACHINE, budget="100%", others=[held_out]), graph, model, others=[held_out]) as trainer:
        got = trainer.evaluate(x_BTD)
    with torch.no_grad():
        assert got == loss(model.eval(), x_BTD).item()


class Padded(Two):
    """Masks only where there is something to mask, as decoders of transformers do."""

    def forward(self, x_BD: torch.Tensor, mask_BD: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x_BD, None if mask_BD is None or bool((mask_BD > 0).all()) else mask_BD)


def test_batches_that_a_forward_treats_in_two_ways_run_by_two_captures(tmp_path: Path) -> None:
    """Padding in some batches and in others none, of one shape."""
    padded, whole = batch(1, mask=True), batch(2, mask=True)
    whole["mask"].fill_(1.0)
    torch.manual_seed(0)
    ours = Padded()
    theirs = copy.deepcopy(ours)
    mine, other = (torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in (ours, theirs))
    graphs = [capture(ours, each, left_loss) for each in (whole, padded)]
    made = plan(graphs[0], MACHINE, budget="100%", optimizer=mine, clip_norm=0.5, others=graphs[1:])
    torch.manual_seed(1)
    with Trainer(made, graphs[0], ours, optimizer=mine, others=graphs[1:], folder=tmp_path) as trainer:
        got = [trainer.step(each) for each in (padded, whole, padded)]
    torch.manual_seed(1)
    plain = Plain(theirs, other)
    assert got == [plain.step(each) for each in (padded, whole, padded)]
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_batch_that_the_forward_would_treat_otherwise_is_refused_before_the_step(tmp_path: Path) -> None:
    padded, whole = batch(1, mask=True), batch(2, mask=True)
    whole["mask"].fill_(1.0)
    model = Padded()
    graph = capture(model, padded, left_loss)
    with Trainer(plan(graph, MACHINE, budget="100%"), graph, model, folder=tmp_path) as trainer:
        with pytest.raises(
            ConfigError, match=r"the model itself reads False, as captured; .* a capture of such a batch too"
        ):
            trainer.step(whole)
        trainer.step(padded)
        assert trainer.steps == 1
