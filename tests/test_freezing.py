"""Layers freeze and thaw between steps: the trainer goes on by another plan, with the numbers of plain PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lading
from lading.config import FreezeConfig, RunConfig, load_run
from lading.errors import ConfigError, StorageError
from lading.freezing import by_gradient_norm, by_percentile
from lading.ir.action import DEVICE
from lading.ir.graph import StepGraph
from lading.ir.layout import parse_layout
from lading.optim.master import MasterWeights
from lading.report.metrics import read_steps
from lading.run import built_whole, dataset_of, layers_to_freeze, loss_of
from lading.train import plain_step, train_run
from lading.trainer import Trainer
from lading.units import format_seconds
from tests.captured import shared_capture
from tests.machines import small_machine
from tests.ranks import run_ranks
from tests.runs import RUN, write_run
from tests.test_pipelines import connected
from tests.test_saved_plan import states_on_disk

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, WIDTH, MICRO = 4, 16, 2
ADAMW = lading.AdamW(lr=1e-2)


def build(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    layers[-1].append(nn.Dropout(0.2))
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, number: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + number))


def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs.to(next(model.parameters()).dtype)).float().square().mean()


def freeze(model: nn.Sequential, count: int) -> None:
    for number, layer in enumerate(model):
        layer.requires_grad_(number >= count)


def planned(model: nn.Module, **asked: Any) -> tuple[lading.Plan, StepGraph]:
    graph = lading.capture(model, batch(0, 0), loss, accumulation=MICRO)
    return lading.plan(graph, small_machine(), **{"budget": "100%", "cache": False, **asked}), graph


def plain(
    optimizer: torch.optim.Optimizer, model: nn.Sequential, frozen: Sequence[int], clip_norm: float
) -> list[float]:
    """Train in plain PyTorch, with so many leading layers frozen in each step; returns the losses."""
    torch.manual_seed(1)
    losses: list[float] = []
    for step, count in enumerate(frozen):
        freeze(model, count)
        optimizer.zero_grad()
        parts = [loss(model, batch(step, number)) / MICRO for number in range(MICRO)]
        for part in parts:
            part.backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(sum(part.item() for part in parts))
    return losses


def lines(trainer: Trainer, model: nn.Sequential, frozen: Sequence[int], again: Callable[[], Any]) -> list[float]:
    """Train by a trainer that freezes nothing yet, with so many leading layers frozen in each step."""
    torch.manual_seed(1)
    losses: list[float] = []
    for step, count in enumerate(frozen):
        if step and count != frozen[step - 1]:
            trainer.pause()
            freeze(model, count)
            trainer.resume(*again())
        losses.append(trainer.step([batch(step, number) for number in range(MICRO)]))
    return losses


def test_layers_frozen_midway_train_as_in_plain_pytorch(tmp_path: Path) -> None:
    frozen = [0, 0, 1, 1, 3, 3]
    model, reference = build(), build()
    again = partial(planned, model, clip_norm=0.05, optimizer=ADAMW)
    with lading.Trainer(*again(), model, optimizer=ADAMW, folder=tmp_path) as trainer:
        peaks, states = [trainer.plan.peak_bytes[DEVICE]], len(trainer._values)
        losses = lines(trainer, model, frozen, again)
        peaks.append(trainer.plan.peak_bytes[DEVICE])
        assert trainer.steps == len(frozen)
        assert len(trainer._values) < states
        with pytest.raises(ConfigError, match=r"0\.0\.weight\.exp_avg"):
            trainer.value("0.0.weight.exp_avg")
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.01, fused=True)
    assert losses == plain(optimizer, reference, frozen, 0.05)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert peaks[1] < peaks[0]


def test_an_optimizer_of_torch_keeps_what_it_has_of_frozen_layers(tmp_path: Path) -> None:
    frozen = [0, 2, 2, 1, 0]
    model, reference = build(), build()
    made = [torch.optim.AdamW([{"params": list(m[:2].parameters()), "lr": 1e-3}, {"params": list(m[2:].parameters())}])
            for m in (model, reference)]  # fmt: skip
    again = partial(planned, model, optimizer=made[0])
    with lading.Trainer(*again(), model, optimizer=made[0], folder=tmp_path) as trainer:
        losses = lines(trainer, model, frozen, again)
    assert losses == plain(made[1], reference, frozen, 0.0)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "asked"),
    [
        (torch.bfloat16, {"master_weights": True}),
        (torch.float32, {"matrices": lading.Matrices(rule="muon", lr=0.02)}),
        (torch.float32, {"policy": states_on_disk}),
    ],
    ids=["masters", "muon", "disk"],
)
def test_a_pause_changes_no_bit(dtype: torch.dtype, asked: dict[str, Any], tmp_path: Path) -> None:
    def train(*, pauses: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = build(dtype)
        made = planned(model, **asked)
        with lading.Trainer(*made, model, folder=tmp_path) as trainer:
            torch.manual_seed(1)
            losses: list[float] = []
            for step in range(3):
                losses.append(trainer.step([batch(step, number) for number in range(MICRO)]))
                if pauses:
                    trainer.pause()
                    assert all(p.isfinite().all() for p in model.parameters())  # they are here
                    trainer.resume(*made)
            return losses, {name: trainer.value(name) for name in trainer._values}

    (losses, values), (expected, wanted) = train(pauses=True), train(pauses=False)
    assert losses == expected
    assert [name for name in wanted if not torch.equal(values[name], wanted[name])] == []


def test_states_of_thawed_layers_begin_at_zero(tmp_path: Path) -> None:
    model = build()
    with lading.Trainer(*planned(model), model, folder=tmp_path) as trainer:
        lines(trainer, model, [0, 1, 0], partial(planned, model))
        assert trainer.value("0.0.weight.step") == 1
        assert trainer.value("1.0.weight.step") == 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "asked"),
    [(torch.float32, {}), (torch.bfloat16, {"master_weights": True})],
    ids=["float32", "masters"],
)
def test_a_checkpoint_with_frozen_layers_is_read_where_they_are_trained(
    dtype: torch.dtype, asked: dict[str, Any], tmp_path: Path
) -> None:
    def go_on(trainer: Trainer) -> list[float]:
        return [trainer.step([batch(step, number) for number in range(MICRO)]) for step in (4, 5)]

    model, other = build(dtype), build(dtype)
    again = partial(planned, model, **asked)
    with lading.Trainer(*again(), model, folder=tmp_path) as trainer:
        lines(trainer, model, [0, 1, 1], again)
        saved = trainer.save(tmp_path / "saved")
        trainer.pause()
        freeze(model, 0)
        trainer.resume(*again())
        expected = go_on(trainer), {name: trainer.value(name) for name in trainer._values}
    with lading.Trainer(*planned(other, **asked), other, folder=tmp_path) as trainer:
        lines(trainer, other, [0, 0], list)  # its states are not zero
        trainer.load(saved)
        assert not trainer.value("0.0.weight.exp_avg").count_nonzero()
        assert trainer.value("1.0.weight.exp_avg").count_nonzero()
        losses, values = go_on(trainer), {name: trainer.value(name) for name in trainer._values}
    assert losses == expected[0]
    assert [name for name in values if not torch.equal(values[name], expected[1][name])] == []


def test_a_checkpoint_without_states_of_trained_layers_is_refused(tmp_path: Path) -> None:
    """States that are missing begin anew only where the checkpoint says that their parameters were frozen."""
    model, other = build(), build()
    freeze(model, 1)
    with lading.Trainer(*planned(model), model, folder=tmp_path) as trainer:
        trainer._frozen = []  # as one that does not say so
        saved = trainer.save(tmp_path / "saved")
    with (
        lading.Trainer(*planned(other), other, folder=tmp_path) as trainer,
        pytest.raises(StorageError, match=r"these tensors differ: 0\.0\.bias\.exp_avg"),
    ):
        trainer.load(saved)


def test_a_checkpoint_is_read_where_layers_are_frozen(tmp_path: Path) -> None:
    model, again = build(), build()
    with lading.Trainer(*planned(model), model, folder=tmp_path) as trainer:
        lines(trainer, model, [0, 0], list)
        saved = trainer.save(tmp_path / "saved")
        moment = trainer.value("3.0.weight.exp_avg")
    freeze(again, 2)
    with lading.Trainer(*planned(again), again, folder=tmp_path) as trainer:
        trainer.load(saved)
        assert trainer.steps == 2
        assert torch.equal(trainer.value("3.0.weight.exp_avg"), moment)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_refused(tmp_path: Path) -> None:
    model = build()
    made = planned(model)
    with lading.Trainer(*made, model, folder=tmp_path) as trainer:
        with pytest.raises(ConfigError, match=r"found one that is not; call pause\(\) first"):
            trainer.resume(*made)
        trainer.pause()
        for call in (partial(trainer.step, batch(0, 0)), trainer.pause, partial(trainer.save, tmp_path)):
            with pytest.raises(ConfigError, match=r"call resume\(plan, graph\)"):
                call()
        other = planned(model, optimizer=lading.optimizer("lion"))
        with pytest.raises(ConfigError, match="plan with the same optimizer"):
            trainer.resume(*other)
        trainer.resume(*made)
        trainer.step([batch(0, number) for number in range(MICRO)])
        trainer.pause()
    assert not any(parameter.isnan().any() for parameter in model.parameters())


#: Layout of each phase, with the number of leading layers that are frozen then and the steps it takes.
PHASES = {
    2: (("pp2", 0, 2), ("pp2", 1, 1), ("dp2", 2, 2), ("dp2", 3, 1)),
    4: (("pp4", 0, 2), ("pp4", 1, 1), ("pp2,dp2", 2, 2), ("dp4", 3, 1)),
}


def _phases(
    rank: int, ranks: int, folder: Path, *, alone: bool = False
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train on all micro-batches of each step, through the phases; returns the losses, norms, and all values."""
    model = build(torch.float64)

    def again(layout: str) -> tuple[lading.Plan, StepGraph]:
        share = 4 // parse_layout(layout).dp
        frozen = sum(not parameter.requires_grad for parameter in model.parameters())
        make = partial(lading.capture, model, batch(0, 0), loss, accumulation=share)
        graph = shared_capture(make, "phases of freezing", frozen, share)
        asked = {"budget": "100%", "cache": False, "policy": "keep-all", "optimizer": ADAMW}
        return lading.plan(graph, connected(), layout=layout, **asked), graph

    losses: list[float] = []
    norms: list[float] = []
    layouts = ["dp1" if alone else layout for layout, _, _ in PHASES[ranks]]
    with lading.Trainer(*again(layouts[0]), model, folder=folder) as trainer:
        for layout, (_, frozen, steps) in zip(layouts, PHASES[ranks], strict=True):
            if trainer.steps:
                trainer.pause()
                freeze(model, frozen)
                trainer.resume(*again(layout))
            share = 4 // parse_layout(layout).dp
            first = share * parse_layout(layout).replica(rank)
            for _ in range(steps):
                parts = [batch(trainer.steps, first + number) for number in range(share)]
                losses.append(trainer.step(parts, norms=True))
            norms += trainer.gradient_norms().values()
        return losses, norms, {name: trainer.value(name) for name in sorted(trainer._values)}


def _on_ranks(rank: int, ranks: int, out: str) -> None:
    folder = Path(out) / str(rank)
    folder.mkdir()
    torch.save(_phases(rank, ranks, folder), folder / "values")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_pipeline_whose_layers_freeze_goes_on_as_replicas(ranks: int, tmp_path: Path) -> None:
    run_ranks(_on_ranks, ranks, ranks, str(tmp_path))
    expected, norms, wanted = _phases(0, ranks, tmp_path, alone=True)
    for rank in range(ranks):
        losses, told, values = torch.load(tmp_path / str(rank) / "values")
        assert losses == pytest.approx(expected, rel=1e-12)
        assert told == pytest.approx(norms, rel=1e-8)
        assert values.keys() == wanted.keys()
        for name, value in values.items():  # ranks add up their gradients in another order
            torch.testing.assert_close(value, wanted[name], rtol=1e-8, atol=1e-10)


def test_the_published_rule_is_its_formula() -> None:
    # 12 layers, alpha 1/3: 0 + 12/3 = 4 at most, then 4 + 8/3, then 6 + 6/3, as He et al. 2021 write it.
    assert by_gradient_norm(0, [1.0] * 11 + [0.1], 1 / 3) == 4
    assert by_gradient_norm(4, [0.0] * 4 + [1.0] * 7 + [0.1], 1 / 3) == 6
    assert by_gradient_norm(6, [0.0] * 6 + [1.0] * 5 + [0.1], 1 / 3) == 8
    # The layer with the smallest gradient is the second of those left, so that it and those before it freeze.
    assert by_gradient_norm(4, [0.0] * 4 + [1.0, 0.5, *[2.0] * 6], 0.5) == 6
    assert by_gradient_norm(12, [0.0] * 12, 0.5) == 12


def test_the_rule_of_the_released_code_is_its_percentile() -> None:
    before, now = [4.0, 10.0, 8.0, 2.0, 5.0], [3.0, 9.0, 4.0, 1.5, 1.0]
    # Changes 0.25, 0.1, 0.5, 0.25, 0.8: their median 0.25 is reached at the first layer, the 70th percentile (0.45, 0.8
    # of the way from 0.25 to 0.5) at the third.
    assert by_percentile(0, now, before, 50) == 1
    assert by_percentile(0, now, before, 70) == 3
    # Of the last two, 0.25 and 0.8, the median 0.525 is reached by the last.
    assert by_percentile(3, now, before, 50) == 5
    assert by_percentile(1, [0.0, 0.0, 4.0], [1.0, 2.0, 8.0], 50) == 3  # a layer without a gradient has not changed


@pytest.mark.parametrize("asked", [{}, {"clip_norm": 0.01}, {"clip_norm": 0.01, "master_weights": True}], ids=str)
def test_norms_of_gradients_are_those_of_plain_pytorch(asked: dict[str, Any], tmp_path: Path) -> None:
    model, reference = (build(torch.bfloat16 if "master_weights" in asked else torch.float32) for _ in range(2))
    with lading.Trainer(*planned(model, **asked), model, folder=tmp_path) as trainer:
        torch.manual_seed(1)
        trainer.step([batch(0, number) for number in range(MICRO)], norms=True)
        taken = [trainer.gradient_norms(order) for order in (1, 2)]
        trainer.step([batch(1, number) for number in range(MICRO)])
        with pytest.raises(ConfigError, match=r"call step\(..., norms=True\)"):
            trainer.gradient_norms()
    torch.manual_seed(1)
    gradients = {name: torch.zeros(p.shape) for name, p in reference.named_parameters()}
    for number in range(MICRO):
        reference.zero_grad()
        (loss(reference, batch(0, number)) / MICRO).backward()
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            gradients[name] += parameter.grad
    total = torch.linalg.vector_norm(torch.cat([each.flatten() for each in gradients.values()]))
    scale = min(1.0, asked.get("clip_norm", 1e9) / float(total))
    for order, norms in enumerate(taken, 1):
        expected = {name: scale * float(torch.linalg.vector_norm(each, order)) for name, each in gradients.items()}
        assert norms == pytest.approx(expected, rel=1e-4)


def test_layers_freeze_by_a_rule_and_by_a_list(tmp_path: Path) -> None:
    model, other = build(), build()
    freezing = lading.Freezing(model, list(model)[:-1], alpha=0.5)
    counts: list[int] = []
    with lading.Trainer(*planned(model), model, folder=tmp_path) as trainer:
        for epoch in range(3):
            if freezing.advance(epoch, trainer):
                trainer.pause()
                trainer.resume(*planned(model))
            counts.append(freezing.frozen)
            trainer.step([batch(epoch, number) for number in range(MICRO)], norms=freezing.needs_norms)
            norms = trainer.gradient_norms()
            assert {name.partition(".")[0] for name in norms} == {str(n) for n in range(freezing.frozen, LAYERS)}
    assert counts == [0, 1, 2]
    again = lading.Freezing(other, list(other)[:-1], alpha=0.5)
    again.load(freezing.state())
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in model.parameters()]

    listed = lading.Freezing(other, [list(other)[:3]], epochs={4: 1})
    with lading.Trainer(*planned(other), other, folder=tmp_path) as trainer:
        assert [listed.advance(epoch, trainer) for epoch in range(6)] == [False] * 4 + [True, False]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({}, "expected one of epochs, alpha and percentile, got none"),
        ({"alpha": 0.5, "percentile": 70}, "got alpha and percentile"),
        ({"alpha": 1.5}, "alpha: expected a number"),
        ({"epochs": {1: 2, 2: 1}}, "that grow, up to 4"),
        ({"epochs": {1: 5}}, "that grow, up to 4"),
        ({"epochs": {1: 4}}, "always trained, found every trained parameter in the 4 layers that may freeze; leave"),
        ({"percentile": 70}, "always trained, found every trained parameter in the 4 layers"),
    ],
)
def test_a_freezing_that_means_nothing_is_refused(asked: dict[str, Any], why: str) -> None:
    model = build()
    with pytest.raises(ConfigError, match=why):
        lading.Freezing(model, model, **asked)


@pytest.mark.parametrize("rule", [{"alpha": 1.0}, {"percentile": 100.0}], ids=str)
def test_the_largest_numbers_of_the_rules_are_taken_by_a_file_and_by_a_loop(rule: dict[str, float]) -> None:
    model = build()
    FreezeConfig(layers=["0"], every_steps=1, **rule)  # type: ignore[arg-type]
    assert lading.Freezing(model, [model[0]], **rule).frozen == 0  # type: ignore[arg-type]


def rest(model: nn.Sequential, hidden: torch.Tensor) -> torch.Tensor:
    return model[2:](hidden).square().mean()


def cached(model: nn.Sequential, folder: Path, *, slow_read: bool = False, **room: Any) -> lading.PrefixCache:
    fast = small_machine()
    device = dataclasses.replace(fast.device, memory_bandwidth_bytes_per_s=1e15, op_overhead_s=0.0)
    tier = dataclasses.replace(fast.tiers[0], read_bytes_per_s=1.0 if slow_read else 1e15, latency_s=0.0)
    machine = dataclasses.replace(fast, device=device, tiers=(tier,))
    return lading.PrefixCache(nn.Sequential(*list(model)[:2]), machine, folder=folder, **room)


def test_a_cached_prefix_is_skipped_with_the_same_bits(tmp_path: Path) -> None:
    samples, row = torch.stack([batch(9, number) for number in range(6)]), 8 * WIDTH * 4
    model, other = build(), build()
    for each in (model, other):
        freeze(each, 2)
    cache = cached(model, tmp_path, memory=2 * row, disk=20 * row)

    def train(net: nn.Sequential, captured: Any, batches: Callable[[int], torch.Tensor]) -> list[float]:
        graph = lading.capture(net, batches(0), captured)
        plan = lading.plan(graph, small_machine(), budget="100%", cache=False)
        with lading.Trainer(plan, graph, net, folder=tmp_path) as trainer:
            torch.manual_seed(1)
            return [trainer.step(batches(number % 3)) for number in range(12)]

    def hidden(number: int) -> torch.Tensor:
        return cache([2 * number, 2 * number + 1], samples[2 * number : 2 * number + 2])

    losses = train(model, rest, hidden)
    assert losses == train(other, lambda net, x: net(x).square().mean(), lambda n: samples[2 * n : 2 * n + 2])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert cache.verdict.startswith("kept: a sample of 512 B is computed in")
    assert (cache.hits, cache.misses) == (20, 6)


def test_a_cache_that_would_not_pay_is_not_kept(tmp_path: Path) -> None:
    model, inputs = build().eval(), torch.randn(3, WIDTH)
    freeze(model, 2)
    slow = cached(model, tmp_path, slow_read=True, memory=0, disk=1 << 20)
    for number in range(4):
        assert slow(range(3 * number, 3 * number + 3), inputs + number).shape == (3, WIDTH)
    assert slow.verdict.startswith("not kept, as reading would not pay: a sample of 64 B is computed in")
    assert "read from disk in 64" in slow.verdict

    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0)

    mixed = lading.PrefixCache(Mixed(), small_machine(), memory=1 << 20)
    mixed([0, 1, 2], inputs)
    mixed([3, 4, 5], inputs + torch.arange(3).unsqueeze(1))
    assert torch.equal(
        mixed([0, 4, 2], inputs + torch.tensor([[0.0], [1.0], [0.0]])),
        Mixed()(inputs + torch.tensor([[0.0], [1.0], [0.0]])),
    )
    assert mixed.verdict == "not kept: the outputs of a sample depend on the samples that are in its batch"


def test_a_prefix_whose_outputs_differ_is_refused(tmp_path: Path) -> None:
    model, inputs = build(), torch.randn(2, WIDTH)
    with pytest.raises(ConfigError, match=r"found that 0\.0\.weight is trained"):
        cached(model, tmp_path, memory=1 << 20)
    freeze(model, LAYERS)
    with pytest.raises(ConfigError, match="that draws random numbers"):
        lading.PrefixCache(model, small_machine(), memory=1 << 20)([0, 1], inputs)
    with pytest.raises(ConfigError, match="that changes its buffers"):
        lading.PrefixCache(nn.BatchNorm1d(WIDTH, affine=False), small_machine(), memory=1 << 20)([0, 1], inputs)
    cache = cached(model, tmp_path, memory=1 << 20)
    cache([0, 1], inputs)
    with pytest.raises(ConfigError, match="inputs of sample 1 as they were before"):
        cache([2, 1], inputs + 1)
    with pytest.raises(ConfigError, match="a number for each of 2 samples, got 1"):
        cache([2], inputs)
    with pytest.raises(ConfigError, match="expected a machine with a tier of kind 'file'"):
        lading.PrefixCache(nn.Identity(), small_machine(disk=False), memory=0, disk="1MB")


FREEZE = (
    "model.sizes={dim=64, num_layers=2, num_heads=2, dropout=0.1}",
    "optimization={steps=6, clip_norm=1.0}",
    "memory={policy='keep-all', budget='100%'}",
    "validation={share=0.25, every_steps=4, batches=1}",
)
LAYERS_OF_RUN = "freeze.layers=['tokens positions layers.0', 'layers.1']"


def frozen_plain(run: RunConfig, frozen: Sequence[int]) -> list[float]:
    """Losses of a run in plain PyTorch, with so many of its layers frozen in each step."""
    model = built_whole(run)
    layers, masters = layers_to_freeze(run, model), MasterWeights(model)
    data = dataset_of(run, model)
    rule = run.optimization.optimizer
    optimizers = [(rule.plain(masters.parameters), rule.lr)]
    losses: list[float] = []
    for step, count in enumerate(frozen):
        for layer in layers[:count]:
            for module in layer:
                module.requires_grad_(False)
        losses.append(plain_step(model, loss_of(run.model), optimizers, masters, [data.batch(step, 0)], run, step))
    return losses


@pytest.mark.long
def test_a_run_freezes_layers_by_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path)
    asked = [*FREEZE, LAYERS_OF_RUN, "freeze.every_steps=2", "freeze.schedule=[0, 1, 2]"]
    run = load_run(path, asked)
    done = train_run(run)
    assert list(done.losses) == frozen_plain(run, [0, 0, 1, 1, 2, 2])
    records = read_steps(Path(run.out) / "metrics.jsonl")
    assert [record["frozen"] for record in records] == [0, 0, 1, 1, 2, 2]
    assert len({record["plan"] for record in records}) == 3
    assert "2 of 2 layers are frozen after step 4; planned again" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_that_begins_frozen_is_compared_with_its_own_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its plan of the first step is not the one that it was prepared with."""
    asked = [*FREEZE[:3], LAYERS_OF_RUN, "optimization.steps=10", "freeze.every_steps=20", "freeze.schedule=[1, 2]"]
    run = load_run(write_run(tmp_path), asked)
    done = train_run(run)
    assert list(done.losses) == frozen_plain(run, [1] * 10)
    printed = capsys.readouterr()
    assert "1 of 2 layers are frozen after step 0; planned again" in printed.out
    predicted = format_seconds(done.predicted_step_s)  # the machine of the tests is made up, so its steps are others
    assert f"{predicted} were predicted: beside the machine file," in " ".join(printed.err.split())


@pytest.mark.long
def test_layers_freeze_after_the_steps_that_are_compared_with_the_prediction(tmp_path: Path) -> None:
    """Steps 3 to 9 are of the Program before."""
    asked = [*FREEZE[:3], LAYERS_OF_RUN, "optimization.steps=11", "freeze.every_steps=9", "freeze.schedule=[0, 1]"]
    run = load_run(write_run(tmp_path), asked)
    assert list(train_run(run).losses) == frozen_plain(run, [0] * 9 + [1] * 2)


@pytest.mark.slow
def test_a_run_whose_matrices_are_all_frozen_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rule for matrices then moves nothing; what is said of a frozen one by its name is no error."""
    path = write_run(tmp_path)
    by_name = "optimization.matrices={rule='muon', lr=0.01, parameters={'layers.0.qkv.weight'=3}}"
    run = load_run(path, [*FREEZE, LAYERS_OF_RUN, "freeze.every_steps=2", "freeze.schedule=[0, 1, 2]", by_name])
    assert len(train_run(run).losses) == run.optimization.steps
    assert "2 of 2 layers are frozen after step 4; planned again" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_freezes_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    asked = [*FREEZE, LAYERS_OF_RUN, "freeze.every_steps=2", "freeze.schedule=[0, 1, 2]"]
    done = train_run(load_run(path, asked))
    parts = [*asked, f"out={tmp_path}/parts", "checkpoint.every_steps=2"]
    for steps in (3, 4, 6):
        train_run(load_run(path, [*parts, f"optimization.steps={steps}"]), resume=True)
    again = read_steps(tmp_path / "parts/metrics.jsonl")
    assert [record["loss"] for record in again] == list(done.losses)
    with pytest.raises(ConfigError, match=r"saved with another freeze\.schedule"):
        train_run(load_run(path, [*parts, "freeze.schedule=[0, 2]"]), resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["alpha=0.5", "percentile=50"])
def test_a_run_freezes_layers_by_their_gradients(tmp_path: Path, rule: str) -> None:
    path = write_run(tmp_path)
    asked = [*FREEZE, LAYERS_OF_RUN, "freeze.every_steps=2", f"freeze.{rule}"]
    run = load_run(path, asked)
    done = train_run(run)
    frozen = [record["frozen"] for record in read_steps(Path(run.out) / "metrics.jsonl")]
    assert frozen[-1] > frozen[0] == 0
    assert list(done.losses) == frozen_plain(run, frozen)
    parts = [*asked, f"out={tmp_path}/parts", "checkpoint.every_steps=2"]
    for steps in (2, 5, 6):
        train_run(load_run(path, [*parts, f"optimization.steps={steps}"]), resume=True)
    assert [record["loss"] for record in read_steps(tmp_path / "parts/metrics.jsonl")] == list(done.losses)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("schedule=[0, 1]", "alpha=0.5"), "expected one of schedule, alpha and percentile, got schedule and alpha"),
        ((), "expected one of schedule, alpha and percentile, got none"),
        (("schedule=[1, 0]",), r"freeze\.schedule: expected numbers from 0 to 2 that do not fall"),
        (("schedule=[0, 3]",), r"freeze\.schedule: expected numbers from 0 to 2"),
        (("schedule=[]",), r"freeze\.schedule: expected numbers"),
        (("schedule=['a']",), r"freeze\.schedule\[0\]: expected an integer"),
        (("schedule=1",), r"freeze\.schedule: expected an array, each an integer"),
        (("alpha=1.5",), r"freeze\.alpha"),
        (("percentile=-1",), r"freeze\.percentile"),
        (("schedule=[0, 1]", "every_steps=0"), r"freeze\.every_steps"),
        (("schedule=[0]", "layers=[]"), r"freeze\.layers: expected names of modules"),
        (("schedule=[0]", "epochs=1"), r"unknown key 'freeze\.epochs'"),
    ],
)
def test_settings_of_freezing_that_mean_nothing_are_refused(tmp_path: Path, keys: tuple[str, ...], said: str) -> None:
    (tmp_path / "run.toml").write_text(RUN.format(root=tmp_path))
    with pytest.raises(ConfigError, match=said):
        load_run(tmp_path / "run.toml", [LAYERS_OF_RUN, "freeze.every_steps=2", *(f"freeze.{key}" for key in keys)])


def test_layers_that_a_model_has_not_are_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    run = load_run(path, ["freeze={layers=['layer.0'], every_steps=2, schedule=[1]}"])
    with pytest.raises(ConfigError, match=r"freeze\.layers: .* got 'layer\.0'; did you mean 'layers\.0'"):
        train_run(run)
