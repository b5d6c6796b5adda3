"""What the public functions take, and what public objects say of themselves."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lading
from lading.catalog.load import save_machine
from lading.config import ModelConfig
from lading.ir.graph import StepGraph
from lading.memory.restore import program_of
from lading.run import build
from tests.machines import small_machine


def mean_square(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    return lading.capture(torch.nn.Linear(64, 256), torch.randn(32, 64), mean_square)


def test_a_machine_is_given_by_name_or_path(graph: StepGraph, tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    save_machine(small_machine(), path)
    expected = lading.plan(graph, small_machine(), budget="100%")
    assert lading.plan(graph, path, budget="100%") == lading.plan(graph, str(path), budget="100%") == expected
    program = program_of(expected, graph)
    assert lading.simulate(program, path) == lading.simulate(program, small_machine())
    assert lading.plan(graph, "cpu", budget="100%").request.machine == "cpu"


def test_what_is_no_machine_is_refused(graph: StepGraph) -> None:
    with pytest.raises(lading.ConfigError, match="did you mean 'h100'"):
        lading.plan(graph, "h10", budget="50%")
    with pytest.raises(lading.ConfigError, match=r"machine: expected a name of the catalog, .*, got 3"):
        lading.plan(graph, 3, budget="50%")  # type: ignore[arg-type]


def test_a_budget_is_given_as_a_share_or_in_bytes(graph: StepGraph) -> None:
    share = lading.plan(graph, small_machine(), budget=0.995)
    assert share == lading.plan(graph, small_machine(), budget="99.5%")
    size = share.budgets["device"]
    assert lading.plan(graph, small_machine(), budget=size).budgets == share.budgets
    for ambiguous in (1, 50):
        with pytest.raises(lading.ConfigError, match="expected a unit"):
            lading.plan(graph, small_machine(), budget=ambiguous)
    with pytest.raises(lading.ConfigError, match="budget above 0"):
        lading.plan(graph, small_machine(), budget=0)


def test_objects_say_what_they_are_in_a_line(graph: StepGraph) -> None:
    model = torch.nn.Linear(64, 256)
    plan = lading.plan(graph, small_machine(), budget="100%")
    program = program_of(plan, graph)
    with lading.Trainer(plan, graph, model) as trainer:
        objects = (graph, small_machine(), plan, program, lading.simulate(program, small_machine()), trainer)
        for one in objects:
            text = repr(one)
            assert text.startswith(type(one).__name__ + "("), text
            assert len(text) < 160, text
            assert "\n" not in text, text
    assert "2 parameters (16,640 elements)" in repr(graph)
    assert "residency on test: step " in repr(plan)
    assert repr(trainer).startswith("Trainer(closed")


def test_plans_and_timelines_are_saved_to_a_path_given_as_text(graph: StepGraph, tmp_path: Path) -> None:
    plan = lading.plan(graph, small_machine(), budget="100%")
    plan.save(str(tmp_path / "plan.json"))
    assert lading.Plan.load(str(tmp_path / "plan.json")).fingerprint == plan.fingerprint
    timeline = lading.simulate(program_of(plan, graph), small_machine())
    timeline.save(str(tmp_path / "timeline.json"))
    assert lading.Timeline.load(str(tmp_path / "timeline.json")) == timeline


CALLABLE = [name for name in lading.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", CALLABLE)
def test_help_shows_arguments_and_a_docstring(name: str) -> None:
    public: Any = getattr(lading, name)
    parameters = inspect.signature(public).parameters.values()
    assert parameters
    assert not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    assert inspect.getdoc(public)
    text = pydoc.render_doc(public, renderer=pydoc.plaintext)  # pyright: ignore[reportAttributeAccessIssue]
    assert all(p.name in text for p in parameters)


def test_an_unknown_setting_of_a_plan_is_refused(graph: StepGraph) -> None:
    with pytest.raises(TypeError, match="clipnorm"):
        lading.plan(graph, small_machine(), budget="100%", clipnorm=1.0)  # type: ignore[call-arg]


def test_arguments_of_another_kind_are_refused_by_name(graph: StepGraph) -> None:
    model, machine = torch.nn.Linear(64, 256), small_machine()
    plan = lading.plan(graph, machine, budget="100%")
    torch_optimizer = torch.optim.AdamW(model.parameters())
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: lading.capture(torch.zeros(2), model, mean_square), "model: expected a torch.nn.Module, got Tensor"),
        (lambda: lading.capture(model, torch.zeros(2, 64), None), r"loss: expected a function loss\(model, batch\)"),
        (lambda: lading.capture(model, torch.zeros(2, 64), mean_square, accumulation=0), "accumulation: .* got 0"),
        (lambda: lading.plan(model, machine, budget="50%"), "graph: expected what lading.capture returns, got Linear"),
        (lambda: lading.plan(graph, machine, budget=50), "budget: expected a unit: 50 may mean"),
        (lambda: lading.plan(graph, machine, budget=0.9, disk_budget="50%"), "disk_budget: expected a size such as"),
        (lambda: lading.plan(graph, machine, budget=0.9, clip_norm="1"), "clip_norm: expected a finite number >= 0"),
        (lambda: lading.plan(graph, machine, budget=0.9, matrices="muon"), "matrices: expected lading.Matrices"),
        (lambda: lading.Trainer(graph, plan, model), "Trainer: expected a plan of a run or .* got StepGraph"),
        (
            lambda: lading.Trainer(plan, graph, model, optimizer=torch_optimizer),
            "expected the optimizer that was planned",
        ),
        (lambda: lading.simulate(plan, machine), "program: expected a lading.Program, .* got Plan"),
    ]
    for call, words in wrong:
        with pytest.raises(lading.ConfigError, match=words):
            call()


@pytest.mark.parametrize("lr", ["1e-3", -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_changes_nothing(graph: StepGraph, lr: Any, tmp_path: Path) -> None:
    model, batch = torch.nn.Linear(64, 256), torch.randn(32, 64)
    lading.plan(graph, small_machine(), budget="100%").save(tmp_path / "plan.json")
    with lading.Trainer(tmp_path / "plan.json", graph, model) as trainer:
        before = trainer.value("weight")
        with pytest.raises(lading.ConfigError, match="lr: expected a finite number >= 0, got"):
            trainer.step(batch, lr=lr)
        assert torch.equal(trainer.value("weight"), before)
        trainer.step(batch, lr=1e-3)
        assert not torch.equal(trainer.value("weight"), before)


def broken() -> torch.nn.Module:
    raise ValueError("no such width")


def test_a_function_that_makes_no_model_is_told_with_its_line() -> None:
    with pytest.raises(lading.ConfigError, match=r"ValueError: no such width \(.*test_public.py, line \d+\)"):
        build(ModelConfig(name="tests.test_public:broken"))
    with pytest.raises(lading.ConfigError, match=r"it fails: TypeError: .* unexpected keyword argument 'width'$"):
        build(ModelConfig(name="tests.test_public:broken", sizes={"width": 3}))
    with pytest.raises(lading.ConfigError, match=r"it fails: ModuleNotFoundError: No module named 'nowhere'$"):
        build(ModelConfig(name="nowhere:broken"))
