"""The stages of a pipeline run on several ranks, and have the numbers of one process to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lading
from lading.errors import ConfigError
from lading.ir.action import DEVICE
from lading.ir.graph import StepGraph
from lading.ir.machine import Curve, Machine
from lading.memory.restore import programs_of
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.sim.device_step import straggler_step_s
from tests.ranks import run_ranks
from tests.test_replicas import SIZES, batch, build, captured, machine
from tests.test_saved_plan import states_on_disk

pytestmark = pytest.mark.usefixtures("one_thread")

MICRO = 2


def connected() -> Machine:
    """The made-up machine, with sends between its processes."""
    made = machine()
    return dataclasses.replace(
        made, collectives={**made.collectives, "send.2": Curve(size=(1e3, 1e6), rate=(1e8, 1e9))}
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to train: what is captured, and how it is planned."""

    layout: str = "pp2"
    model: str = "llama"
    layers: int = 2
    dtype: torch.dtype = torch.float32
    plan: Callable[[], dict[str, Any]] = dict
    torch_groups: bool = False

    def train(self, layout: str, folder: Path, steps: int = 3) -> tuple[dict[str, torch.Tensor], list[float]]:
        """Train on the same micro-batches whatever the layout; returns the values and the losses."""
        model = build(self.model, self.dtype, self.layers)
        if self.torch_groups:
            graph = lading.capture(model, batch(0, 0), next_byte_loss, accumulation=MICRO)
        else:
            graph = captured(self.model, self.dtype, MICRO, self.layers)
        asked = {"budget": "100%", "cache": False, "policy": "keep-all", **self.plan()}
        optimizer = with_groups(model) if self.torch_groups else None
        made = lading.plan(graph, connected(), layout=layout, optimizer=optimizer, **asked)
        losses: list[float] = []
        with lading.Trainer(made, graph, model, folder=folder, optimizer=optimizer) as trainer:
            for step in range(steps):
                losses.append(trainer.step([batch(step, number) for number in range(MICRO)]))
                for group in [] if optimizer is None else optimizer.param_groups:
                    group["lr"] *= 0.5
            if graph.training_only() is None:
                losses.append(trainer.evaluate([batch(9, number) for number in range(MICRO)]))
            states = {name: trainer.value(name) for name in sorted(trainer._values)}
        for name, value in model.state_dict().items():
            assert name not in states or torch.equal(value, states[name])
        given = {} if optimizer is None else optimizer.state
        for name, parameter in model.named_parameters():  # on every rank all states are back
            for key, state in given.get(parameter, {}).items():
                assert torch.equal(state, states[f"{name}.{key}"])
        assert optimizer is None or len(given) == len(list(model.parameters()))
        return states, losses


def with_groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Optimizer of torch whose groups have members on both stages."""
    kinds = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": kinds[0], "weight_decay": 0.2}, {"params": kinds[1], "lr": 0.02}], lr=0.01)


CASES = {
    "tied": Case(model="gpt"),
    "torch": Case(model="gpt", torch_groups=True),
    "interleaved": Case("pp2,vpp2,interleaved", layers=4),
    "zero bubble": Case("pp2,zero-bubble"),
    "V": Case("pp2,vpp2,zbv", layers=4),
    "masters": Case(dtype=torch.bfloat16, plan=lambda: {"master_weights": True}),
    "muon": Case(plan=lambda: {"matrices": lading.Matrices(rule="muon", lr=0.02)}),
    "recomputed": Case(plan=lambda: {"policy": "checkpoint-every-block"}),
    "disk": Case(plan=lambda: {"policy": states_on_disk}),
    "dropout and statistics": Case("pp2,vpp2,interleaved", "normed", layers=4),
}


#: What no other case tries, two at a time, on two layers; each case by itself, and on four, is a slow test. Of two
#: layers a chunk of the model draws no random numbers, so that those of the rank's chunks beside it follow each other.
QUICK = {
    "torch": CASES["torch"],
    "zero bubble and masters": dataclasses.replace(CASES["masters"], layout="pp2,zero-bubble"),
    "V and disk": dataclasses.replace(CASES["disk"], layout="pp2,vpp2,zbv"),
    "dropout and statistics on two layers": dataclasses.replace(CASES["dropout and statistics"], layers=2),
}


def _stage(rank: int, out: str, names: list[str]) -> None:
    for name in names:
        case = {**CASES, **QUICK}[name]
        folder = Path(out) / f"{name} {rank}"
        folder.mkdir()
        torch.save(case.train(case.layout, folder), folder / "values")


@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([*QUICK], id="quick"),
        pytest.param([n for n in CASES if n not in QUICK], id="rest", marks=pytest.mark.slow),
    ],
)
def test_two_stages_train_as_one_process_to_the_bit(tmp_path: Path, names: list[str]) -> None:
    run_ranks(_stage, 2, str(tmp_path), names)
    for name in names:
        case = {**CASES, **QUICK}[name]
        alone, losses = case.train("dp1", tmp_path)
        for rank in range(2):
            values, told = torch.load(tmp_path / f"{name} {rank}" / "values")
            assert told == losses, name
            assert values.keys() == alone.keys(), name
            assert [key for key in alone if not torch.equal(values[key], alone[key])] == [], name


def _clipped(rank: int, out: str) -> None:
    case = Case("pp4", layers=4, dtype=torch.float64, plan=lambda: {"clip_norm": 0.1})
    folder = Path(out) / str(rank)
    folder.mkdir()
    torch.save(case.train(case.layout, folder), folder / "values")


@pytest.mark.slow
def test_four_stages_clip_by_one_norm(tmp_path: Path) -> None:
    run_ranks(_clipped, 4, str(tmp_path))
    alone, losses = Case(layers=4, dtype=torch.float64, plan=lambda: {"clip_norm": 0.1}).train("dp1", tmp_path)
    for rank in range(4):
        values, told = torch.load(tmp_path / str(rank) / "values")
        assert told == pytest.approx(losses, rel=1e-14)
        for name, value in values.items():
            # The coefficient is off by a rounding or two, and with it every gradient.
            torch.testing.assert_close(value, alone[name], rtol=1e-10, atol=1e-12)


def _tied(layout: str) -> tuple[torch.nn.Module, StepGraph, lading.Plan]:
    torch.manual_seed(0)
    model = build_model("gpt", **SIZES)
    graph = lading.capture(model, batch(0, 0), next_byte_loss, accumulation=MICRO)
    return model, graph, lading.plan(graph, connected(), budget="100%", cache=False, policy="keep-all", layout=layout)


def _saved(rank: int, out: str) -> None:
    model, graph, plan = _tied("pp2")
    assert plan.of_rank(1).step_s == plan.step_s
    assert [plan.of_rank(each).choices.rank for each in range(2)] == [0, 1]
    path = Path(out) / f"plan {rank}.json"
    plan.save(path)
    folder = Path(out) / str(rank)
    folder.mkdir()
    with lading.Trainer(path, graph, model, folder=folder) as trainer:
        trainer.step([batch(0, number) for number in range(MICRO)])
        saved = trainer.save(Path(out) / "saved")
        trainer.step([batch(1, number) for number in range(MICRO)])
        values = {name: trainer.value(name) for name in sorted(trainer._values)}
        trainer.load(saved)
        trainer.step([batch(1, number) for number in range(MICRO)])
        assert [name for name in values if not torch.equal(values[name], trainer.value(name))] == []
    torch.save((str(saved), values), folder / "values")


def test_a_checkpoint_of_a_pipeline_goes_on_in_one_process(tmp_path: Path) -> None:
    run_ranks(_saved, 2, str(tmp_path))
    model, graph, plan = _tied("dp1")
    saved, values = torch.load(tmp_path / "1" / "values")
    with lading.Trainer(plan, graph, model, folder=tmp_path) as trainer:
        trainer.load(saved)
        trainer.step([batch(1, number) for number in range(MICRO)])
        assert [name for name in values if not torch.equal(values[name], trainer.value(name))] == []


def test_each_stage_has_its_part_and_the_step_is_that_of_all() -> None:
    _, graph, plan = _tied("pp2")
    _, _, alone = _tied("dp1")
    peaks = [plan.of_rank(rank).peak_bytes[DEVICE] for rank in range(2)]
    assert max(peaks) < 0.9 * alone.peak_bytes[DEVICE]
    assert 0.5 * alone.step_s < plan.step_s < 1.2 * alone.step_s  # sends are slow on this machine
    for rank in range(2):  # nothing ends before it begins, as where a rank's clock stood while it waited for another
        assert [line for line in plan.of_rank(rank).predictions.actions if "-" in line] == []
    programs = [programs_of(plan.of_rank(rank), graph, ())[0] for rank in range(2)]
    assert straggler_step_s(programs, connected(), 1.0) == pytest.approx([plan.step_s] * 2)
    assert plan.step_s < max(straggler_step_s(programs, connected(), 2.0)) < 2 * plan.step_s


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "more", "why"),
    [
        ("pp2,dp4,ep2", {}, "expected experts spread over all replicas"),
        ("dp2,gpipe", {}, "expected a schedule"),
        ("vpp2", {}, r"chunks of a rank \(vpp\) in a pipeline only"),
        ("pp2,dualpipe-v,vpp2", {}, "needs as many micro-batches as stages"),
        ("pp2", {"others": True}, "whose ranks have parameters of their own"),
    ],
)
def test_refused(layout: str, more: dict[str, Any], why: str) -> None:
    _, graph, _ = _tied("dp1")
    asked: dict[str, Any] = {"others": [graph]} if more else {}
    with pytest.raises(ConfigError, match=why):
        lading.plan(graph, connected(), budget="100%", cache=False, layout=layout, **asked)


def test_an_output_of_an_early_stage_is_refused() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))

    def loss(model: Any, x: torch.Tensor) -> Any:
        early = model[0](x)
        return model[1:](early).square().mean(), {"early": early}

    graph = lading.capture(model, torch.ones(64, 64), loss, accumulation=MICRO)
    with pytest.raises(ConfigError, match="found some of loss, early on an earlier one; return what the last layers"):
        lading.plan(graph, connected(), budget="100%", cache=False, layout="pp2")


def _partly_frozen(layout: str, frozen: slice) -> tuple[torch.nn.Module, StepGraph, lading.Plan]:
    """Four layers, of which some are frozen, and a plan that clips their step by its norm."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).double()
    for layer in list(model)[frozen]:
        layer.requires_grad_(False)
    x = torch.ones(8, 64, dtype=torch.float64)
    graph = lading.capture(model, x, lambda m, inputs: m(inputs).square().mean(), accumulation=MICRO)
    asked: dict[str, Any] = {"budget": "100%", "cache": False, "policy": "keep-all", "clip_norm": 1e-3}
    return model, graph, lading.plan(graph, connected(), layout=layout, **asked)


#: Layers that are frozen, and the stage that has nothing to train then: the first has no backward, the last has one.
FROZEN_STAGES = {"first": (slice(0, 3), 0), "last": (slice(1, 4), 1)}


def _clipped_beside_frozen(rank: int, out: str, layout: str, which: str) -> None:
    folder = Path(out) / f"{which} {layout} {rank}"
    folder.mkdir()
    model, graph, plan = _partly_frozen(layout, FROZEN_STAGES[which][0])
    norms, losses = list[float | None](), list[float]()
    with lading.Trainer(plan, graph, model, folder=folder) as trainer:
        for step in range(3):
            torch.manual_seed(step)
            losses.append(trainer.step([torch.randn(8, 64, dtype=torch.float64) for _ in range(MICRO)]))
            norms.append(trainer.gradient_norm)
        values = {name: trainer.value(name) for name in sorted(trainer._values)}
    torch.save((values, losses, norms), folder / "values")


def _both_frozen(rank: int, out: str) -> None:
    for which in FROZEN_STAGES:
        _clipped_beside_frozen(rank, out, "pp2", which)


def test_a_stage_with_nothing_to_train_takes_part_in_clipping(tmp_path: Path) -> None:
    run_ranks(_both_frozen, 2, str(tmp_path))
    for which, (frozen, stage) in FROZEN_STAGES.items():
        _, graph, plan = _partly_frozen("pp2", frozen)
        trained = [
            any(p.gradient is not None for p in programs_of(plan.of_rank(rank), graph, ())[0].graph.parameters)
            for rank in range(2)
        ]
        assert trained == [stage != 0, stage != 1]
        _clipped_beside_frozen(0, str(tmp_path), "dp1", which)
        alone, losses, norms = torch.load(tmp_path / f"{which} dp1 0" / "values")
        assert min(norms) > 1e-3
        for rank in range(2):
            values, told, taken = torch.load(tmp_path / f"{which} pp2 {rank}" / "values")
            assert told == pytest.approx(losses, rel=1e-14)
            assert taken == pytest.approx(norms, rel=1e-14)
            for name, value in values.items():
                torch.testing.assert_close(value, alone[name], rtol=1e-10, atol=1e-12)


def test_stages_of_several_dtypes_are_not_clipped_by_one_norm() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).double())

    def loss(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        return model[1](model[0](inputs).double()).square().mean()

    graph = lading.capture(model, torch.ones(2, 8), loss, accumulation=2)
    with pytest.raises(ConfigError, match="expected gradients of one dtype to clip"):
        lading.plan(graph, connected(), budget="100%", cache=False, layout="pp2", clip_norm=1.0)
