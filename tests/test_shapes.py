"""Batches of several shapes over one plan, one memory and one set of values; losses without a step; metrics."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import lading
from lading.errors import CaptureError, ConfigError
from lading.ir.graph import StepGraph
from lading.ir.plan import Plan
from lading.memory.restore import program_of, programs_of
from lading.planner import residency
from lading.prepare import plan
from lading.tracing.trace import capture
from lading.trainer import Trainer
from tests.machines import small_machine
from tests.runs import OVERHEAD_BYTES, budget_for

MACHINE = small_machine(overhead_bytes=OVERHEAD_BYTES)
#: Sequences and tokens of a batch: the largest, a short last one, and two buckets of lengths.
SHAPES = [(4, 32), (3, 32), (4, 16), (2, 24)]


pytestmark = pytest.mark.usefixtures("one_thread")


class Words(torch.nn.Module):
    """A small transformer with attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.drop = torch.nn.Embedding(64, 48), torch.nn.Dropout(dropout)
        self.qkv, self.out = torch.nn.Linear(48, 144, bias=False), torch.nn.Linear(48, 48, bias=False)
        self.norm, self.head = torch.nn.LayerNorm(48), torch.nn.Linear(48, 64, bias=False)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        h_BTD = self.embed(ids_BT)
        q, k, v = (x.unflatten(-1, (2, 24)).transpose(1, 2) for x in self.qkv(h_BTD).chunk(3, dim=-1))
        a = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(self.norm(h_BTD + self.drop(self.out(a.transpose(1, 2).flatten(2)))))


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["next"].flatten())


def words(dropout: float = 0.0) -> Words:
    torch.manual_seed(0)
    return Words(dropout)


def batch(step: int, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    seed = torch.Generator().manual_seed(step)
    return {name: torch.randint(64, shape, generator=seed) for name in ("ids", "next")}


def planned(model: torch.nn.Module, optimizer: torch.optim.Optimizer, share: float) -> tuple[Plan, list[StepGraph]]:
    graphs = [capture(model, batch(0, shape), loss_fn) for shape in SHAPES]
    everything = program_of(plan(graphs[0], MACHINE, budget="100%", optimizer=optimizer, policy="keep-all"), graphs[0])
    return plan(graphs[0], MACHINE, budget=budget_for(everything, share), optimizer=optimizer, clip_norm=0.5), graphs


@pytest.fixture
def near_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans as near to their bound as those of users: their updates wait for the next step."""
    monkeypatch.setattr(residency, "GOOD_ENOUGH", 0.005)


@pytest.mark.long
@pytest.mark.usefixtures("near_the_bound")
def test_steps_of_several_shapes_give_plain_pytorchs_bits(tmp_path: Path) -> None:
    """Interleaved, with losses evaluated between; each step's gradients are clipped."""
    ours, theirs = words(), words()
    mine, other = (torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in (ours, theirs))
    made, graphs = planned(ours, mine, 0.75)
    order = [SHAPES[i] for i in (0, 1, 0, 2, 3, 2, 0, 1)]
    got: list[float] = []
    assert made.choices.deferred
    assert made.choices.gaps
    with Trainer(made, graphs[0], ours, optimizer=mine, shapes=graphs[1:], folder=tmp_path) as trainer:
        for step, shape in enumerate(order):
            got += [trainer.evaluate(batch(100 + step, shape)), trainer.step(batch(step, shape))]
    expected: list[float] = []
    for step, shape in enumerate(order):
        with torch.no_grad():
            expected.append(loss_fn(theirs, batch(100 + step, shape)).item())
        other.zero_grad()
        loss = loss_fn(theirs, batch(step, shape))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        other.step()
        expected.append(loss.item())
    assert got == expected
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


class Placed(torch.nn.Module):
    """Tokens with learned positions, of which a short batch reads a part and the longest the whole table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = torch.nn.Embedding(64, 48), torch.nn.Embedding(32, 48)
        self.head = torch.nn.Linear(48, 64)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(ids_BT) + self.positions.weight[: ids_BT.shape[1]]))


def test_a_shape_that_reads_a_part_of_a_table_is_one_of_it(tmp_path: Path) -> None:
    """A slice of all rows is no view of its own, that of some is: the operations are the same ones."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Placed())
    ours, theirs = models
    mine, other = (torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in models)
    graphs = [capture(ours, batch(0, shape), loss_fn) for shape in ((4, 32), (4, 16))]
    assert len(graphs[0].tensors) != len(graphs[1].tensors)
    made = plan(graphs[0], MACHINE, budget="100%", optimizer=mine, policy="keep-all", cache=False)
    order = [(4, 32), (4, 16), (4, 16), (4, 32)]
    with Trainer(made, graphs[0], ours, optimizer=mine, shapes=graphs[1:], folder=tmp_path) as trainer:
        got = [trainer.step(batch(step, shape)) for step, shape in enumerate(order)]
    expected: list[float] = []
    for step, shape in enumerate(order):
        other.zero_grad()
        loss = loss_fn(theirs, batch(step, shape))
        loss.backward()
        other.step()
        expected.append(loss.item())
    assert got == expected
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_micro_batches_of_two_shapes_are_refused_with_what_to_change() -> None:
    model = words()
    graph, short = (capture(model, batch(0, shape), loss_fn, accumulation=2) for shape in ((4, 16), (3, 16)))
    made = plan(graph, MACHINE, budget="100%")
    with Trainer(made, graph, model, shapes=[short]) as trainer:
        for rows in ((4, 3), (3, 4)):
            with pytest.raises(ConfigError, match="pad or cut it: the micro-batches of one step are of one shape"):
                trainer.step([batch(0, (count, 16)) for count in rows])


def test_another_step_is_no_shape_of_it() -> None:
    model = words()
    graph, larger = (capture(model, batch(0, shape), loss_fn) for shape in ((4, 16), (4, 32)))
    made = plan(graph, MACHINE, budget="100%")

    def squared(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_fn(model, batch) ** 2

    with pytest.raises(
        ConfigError, match=r"expected ids of at most 512 bytes, .* found 1024 bytes; plan for the largest"
    ):
        Trainer(made, graph, model, shapes=[larger])
    with pytest.raises(ConfigError, match=r"expected the \d+ operations of the step .* found \d+; the model computes"):
        Trainer(made, graph, model, shapes=[capture(model, batch(0, (4, 16)), squared)])
    with (
        Trainer(made, graph, model) as trainer,
        pytest.raises(ConfigError, match=r"expected 'ids' of int64 \(4, 16\), got int64 \(3, 16\); .* in shapes="),
    ):
        trainer.step(batch(0, (3, 16)))


@pytest.mark.long
@pytest.mark.usefixtures("near_the_bound")
def test_an_evaluation_finds_updates_that_wait_for_the_next_step(tmp_path: Path) -> None:
    """Of a model with dropout; the plan comes from its file."""
    ours, theirs = words(0.2), words(0.2)
    mine, other = (torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in (ours, theirs))
    graph = capture(ours, batch(0, (4, 32)), loss_fn)
    others = [capture(ours, batch(0, (4, 32)), loss_fn, evaluation=True)]
    asked: dict[str, Any] = {"optimizer": mine, "clip_norm": 0.5, "others": others}
    everything = programs_of(plan(graph, MACHINE, budget="100%", **asked), graph, others)[0]
    made = plan(graph, MACHINE, budget=budget_for(everything, 0.55), **asked)
    assert made.choices.deferred
    made.save(tmp_path / "plan.json")
    got: list[float] = []
    torch.manual_seed(1)
    with Trainer(tmp_path / "plan.json", graph, ours, optimizer=mine, others=others, folder=tmp_path) as trainer:
        ours.eval()  # as people do; an evaluation is one whatever the mode is
        got.append(trainer.evaluate(batch(9, (4, 32))))
        ours.train()
        for step in range(3):
            got += [trainer.step(batch(step, (4, 32))), trainer.evaluate(batch(9, (4, 32)))]
            got.append(trainer.evaluate(batch(9, (4, 32))))
        with pytest.raises(ConfigError, match="loss: expected one of the functions that were captured, got words"):
            trainer.evaluate(batch(9, (4, 32)), loss=words)  # type: ignore[arg-type]
    torch.manual_seed(1)
    with torch.no_grad():
        expected = [loss_fn(theirs.eval(), batch(9, (4, 32))).item()]
    for step in range(3):
        other.zero_grad()
        loss = loss_fn(theirs.train(), batch(step, (4, 32)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        other.step()
        with torch.no_grad():
            expected += [loss.item()] + 2 * [loss_fn(theirs.eval(), batch(9, (4, 32))).item()]
    assert got == expected


def test_a_forward_of_training_is_not_evaluated() -> None:
    for layer, found in ((torch.nn.Dropout(0.5), "bernoulli"), (torch.nn.BatchNorm1d(8), "batch_norm|add_")):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), layer)
        graph = capture(model, torch.ones(4, 8), lambda model, x: model(x).square().mean())
        with (
            Trainer(plan(graph, MACHINE, budget="100%"), graph, model) as trainer,
            pytest.raises(ConfigError, match=f"expected a forward without dropout and running .*({found})"),
        ):
            trainer.evaluate(torch.ones(4, 8))


def test_metrics_are_reported_and_not_trained() -> None:
    """Of each step, of micro-batches together, and of an evaluation."""

    def scored(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        logits = model(batch["ids"]).flatten(0, 1)
        right = logits.argmax(-1) == batch["next"].flatten()
        loss = torch.nn.functional.cross_entropy(logits, batch["next"].flatten())
        return {"loss": loss, "metrics": {"accuracy": right.float().mean(), "right": right.sum()}}

    for accumulation in (1, 2):
        model = words()
        micro = [batch(i, (4, 16)) for i in range(accumulation)]
        graph = capture(model, micro[0], scored, accumulation=accumulation)
        with torch.no_grad():
            plain = [scored(model, each) for each in micro]
        wanted = [sum(float(out["metrics"][name]) for out in plain) / accumulation for name in ("accuracy", "right")]
        with Trainer(plan(graph, MACHINE, budget="100%", policy="keep-all"), graph, model) as trainer:
            for run in (trainer.evaluate, trainer.step):
                assert run(micro) == pytest.approx(sum(float(out["loss"]) for out in plain) / accumulation)
                assert trainer.losses == {"accuracy": wanted[0], "right": wanted[1]}
            assert trainer.step(micro) < float(plain[0]["loss"])


class Scaled(torch.nn.Module):
    """A model whose activation is changed in place after it is made, and a scale that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 64), torch.nn.Linear(64, 4)
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        return self.last(torch.relu_(hidden)) * self.scale[0], hidden


def seen(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, and what a user wants to see: activations, views of them, numbers, a parameter and an input."""
    logits, hidden = model(x)
    right = (logits > 0).float().mean()
    beside = {"logits": logits, "hidden": hidden, "class": logits.argmax(-1), "first": hidden[:, 0]}
    return logits.square().mean(), {**beside, "right": right, "scale": model.scale, "x": x}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_outputs_and_the_norm_come_out_of_a_step(accumulation: int) -> None:
    """With the bits of eager, to keep over steps; of each micro-batch, of a short batch, and of an evaluation."""
    torch.manual_seed(0)
    model = Scaled()
    eager = copy.deepcopy(model)
    usual = torch.optim.AdamW(eager.parameters(), lr=1e-3, fused=True)
    batches = [torch.randn(6, 8) for _ in range(2 * accumulation)]
    graph = capture(model, batches[0], seen, accumulation=accumulation)
    evaluation = capture(model, batches[0], seen, accumulation=accumulation, evaluation=True)
    made = plan(graph, MACHINE, budget="100%", others=[evaluation], clip_norm=0.1, optimizer=lading.AdamW(lr=1e-3))
    short = capture(model, batches[0][:1], seen, accumulation=accumulation)
    kept: list[tuple[Any, torch.Tensor]] = []

    def compare(trainer: Trainer, micro: list[torch.Tensor]) -> None:
        for number, x in enumerate(micro):
            loss, beside = seen(eager, x)
            (loss / accumulation).backward()
            right = beside.pop("right")
            assert trainer.outputs.keys() == beside.keys()
            outputs = {name: o[number] if accumulation > 1 else o for name, o in trainer.outputs.items()}
            assert [name for name in beside if not torch.equal(outputs[name], beside[name])] == []
            kept.append((outputs["scale"], beside["scale"].detach().clone()))
            if accumulation == 1:
                assert trainer.losses == {"right": float(right)}

    with Trainer(made, graph, model, optimizer=lading.AdamW(lr=1e-3), others=[evaluation], shapes=[short]) as trainer:
        for micro in (batches[:accumulation], batches[accumulation:], [x[:1] for x in batches[:accumulation]]):
            if len(micro[0]) > 1:
                trainer.evaluate(micro)
                compare(trainer, micro)
                assert trainer.gradient_norm is None
                usual.zero_grad()
            trainer.step(micro)
            compare(trainer, micro)
            assert trainer.gradient_norm == float(torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1))
            usual.step()
            usual.zero_grad()
    assert all(torch.equal(output, then) for output, then in kept)
    assert [name for name, value in eager.named_parameters() if not torch.equal(value, model.get_parameter(name))] == []


def test_outputs_count_in_the_memory_of_a_plan() -> None:
    def wide(model: torch.nn.Module, x: torch.Tensor) -> Any:
        logits = model(x)
        return logits.square().mean(), {"logits": logits, "hot": logits > 0}

    model, x = torch.nn.Linear(8, 512), torch.ones(64, 8)
    graphs = [capture(model, x, loss) for loss in (wide, lambda model, x: wide(model, x)[0])]
    peaks = [program_of(plan(graph, MACHINE, budget="100%"), graph).overhead_bytes for graph in graphs]
    assert 64 * 512 * 5 <= peaks[0] - peaks[1] < 64 * 512 * 5.5  # float32 and bool; each operation has a little, too


def test_a_scaled_loss_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scale = torch.amp.GradScaler.scale

    def scaled(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return scaler.scale(model(x).square().mean())

    with pytest.raises(CaptureError, match=r"a loss without a scale.* Train in bfloat16"):
        capture(torch.nn.Linear(4, 4), torch.ones(2, 4), scaled)
    assert torch.amp.GradScaler.scale is scale
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert capture(torch.nn.Linear(4, 4), torch.ones(2, 4), scaled).ops


class Large(torch.nn.Module):
    """A table and a head of so many words that a small budget has the loss in parts of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(3000, 8), torch.nn.Linear(8, 3000, bias=False)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids_BT))


@pytest.mark.long
def test_smaller_batches_by_a_plan_with_its_loss_in_parts(tmp_path: Path) -> None:
    """They have the parts of the plan, some of them empty, and plain PyTorch's bits."""
    shapes = [(8, 32), (5, 32), (1, 8), (1, 20)]
    torch.manual_seed(0)
    ours = Large()
    theirs = copy.deepcopy(ours)
    graphs = [capture(ours, batch(0, shape), loss_fn) for shape in shapes]
    everything = program_of(plan(graphs[0], MACHINE, budget="100%", policy="keep-all"), graphs[0])
    made = plan(graphs[0], MACHINE, budget=budget_for(everything, 0.55))
    assert made.choices.loss_parts
    optimizer = lading.AdamW().plain(theirs.parameters())
    with Trainer(made, graphs[0], ours, shapes=graphs[1:], folder=tmp_path) as trainer:
        got = [trainer.step(batch(step, shapes[step % 4])) for step in range(8)]
    expected: list[float] = []
    for step in range(8):
        optimizer.zero_grad()
        loss = loss_fn(theirs, batch(step, shapes[step % 4]))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert got == expected
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
