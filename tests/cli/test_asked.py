"""``plan`` and ``simulate`` are asked in one way: a run file, or the same options of a model on devices."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_help import help_of, words
from tests.plans import cluster_plan, placed_plan, some_plan

import lading
from lading.cli.main import main, parse
from lading.cli.options import ModelOptions
from lading.cli.plan_command import PlanCommand
from lading.cli.simulate_command import SimulateCommand
from lading.cli.train_command import TrainCommand
from lading.clusters import space_of
from lading.errors import ConfigError
from lading.ir.plan import Plan
from lading.ir.request import Request
from lading.planner.space import parse_pins

ASKED = ("--model", "llama3-8b", "--machine", "h100", "--devices", "8", "--global-batch", "16", "--seq", "4096")


def group(command: str, title: str) -> str:
    """What the help of a command says under a title, on one line."""
    text = " ".join(words(help_of(command).stdout).split())
    return text.partition(title)[2].partition(" options With --model,")[0].rpartition(" ")[0]


def test_the_same_words_ask_both() -> None:
    plan, simulate = parse(["plan", *ASKED]), parse(["simulate", *ASKED])
    assert isinstance(plan, PlanCommand)
    assert isinstance(simulate, SimulateCommand)
    assert plan.with_model == simulate.with_model
    assert simulate.with_model == ModelOptions(model="llama3-8b", machine="h100", devices=8, global_batch=16, seq=4096)


def test_their_help_says_the_same() -> None:
    said = group("plan", "Instead of a run file, a model on many devices:")
    assert said == group("simulate", "Instead of a run file, a model on many devices:")
    assert all(f"--{option.name.replace('_', '-')} " in said for option in dataclasses.fields(ModelOptions))


def test_sequences_of_a_step_are_said_in_either_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = [tmp_path / "option.json", tmp_path / "layout.json"]
    rest = [*ASKED[:6], "--seq", "512"]
    assert main(["simulate", *rest, "--global-batch", "32", "--layout", "tp2", "--json", str(figures[0])]) == 0
    assert main(["simulate", *rest, "--layout", "tp2,gb32", "--json", str(figures[1])]) == 0
    first, second = (json.loads(path.read_text()) for path in figures)
    assert first == second
    assert main(["simulate", *rest, "--global-batch", "32", "--layout", "tp2,gb16"]) == 2
    assert "both say how many sequences a step has; leave one out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("plan run.toml --top 3", "--top belongs to --model, got it next to run.toml; leave it out, or give --model"),
        ("simulate plan.json --jitter 0.1", "--jitter belongs to --model, got it next to plan.json; leave it out"),
        ("simulate run.toml --stack default", "--stack belongs to --model, got it next to run.toml; leave it out"),
        ("simulate run.toml --model gpt2", "expected RUN.toml, PLAN.json or --model NAME, got both run.toml and --mod"),
        ("plan --devices 8", "expected RUN.toml or --model NAME next to --devices, got neither"),
        ("simulate", "expected RUN.toml, PLAN.json or --model NAME, got neither"),
        ("simulate --model gpt2 --no-cache", "--no-cache belongs to RUN.toml"),
        ("simulate --model gpt2", "expected --machine NAME next to --model"),
        ("plan --model gpt2 --machine h100", "expected --devices and --global-batch next to --model"),
        ("simulate --model gpt2 --machine h100 --price -1", "--price: expected a price of a device for an hour"),
        ("plan --model gpt2 --out a.json --json a.json", "--out and --json: expected different files, got 'a.json' tw"),
        ("plan --model gpt2 --machine two-desktops --top 3", "--top belongs to a cluster of alike devices"),
    ],
)
def test_wrong_mixes_are_refused_with_what_to_change(
    argv: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv.split()) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("command", "plan", "message"),
    [
        ("train --plan {}", cluster_plan(), "expected the plan of a run, got that of a cluster; give its layout"),
        (
            "train --plan {}",
            dataclasses.replace(cluster_plan(), program=("arena 0",)),
            "got that of a cluster; give its",
        ),
        ("train --plan {}", placed_plan(), "expected the plan of a run, got a placement; simulate it with"),
        ("simulate {}", cluster_plan(), "lading simulate --model: --layout dp8,zero3,gb8"),
        ("simulate {}", placed_plan(), "got a placement; simulate it with: lading place --plan"),
        ("place --plan {}", some_plan(), "expected a placement, found a plan of a run; make one with: lading place"),
        ("place --plan {}", cluster_plan(), "expected a placement, found a plan of a cluster; make one with: lading"),
    ],
)
def test_a_plan_of_another_kind_is_refused_by_what_it_is(
    command: str, plan: Plan, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.save(tmp_path / "plan.json")
    assert main(command.format(tmp_path / "plan.json").split()) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_trainer_refuses_the_plan_of_a_cluster() -> None:
    graph: Any = None
    with pytest.raises(
        ConfigError, match="Trainer: expected a plan of a run, found a plan of a cluster; make one with"
    ):
        lading.Trainer(cluster_plan(), graph, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--devices 0", "--devices: expected at least 1, got 0"),
        ("--devices 8 --global-batch 0", "--global-batch: expected at least 1, got 0"),
        ("--devices 8 --seq -1", "--seq: expected at least 1, got -1"),
        ("--devices 8 --layout ep2", "ep spreads experts over ranks, and llama3-8b has none; leave ep2 out"),
    ],
)
def test_what_means_nothing_is_no_default(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--model", "llama3-8b", "--machine", "h100", *options.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_experts_are_not_pinned_where_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *ASKED, "--pin", "ep=2"]) == 2
    assert "ep spreads experts over ranks, and llama3-8b has none" in " ".join(capsys.readouterr().err.split())


def test_settings_may_stand_on_both_sides_of_a_flag() -> None:
    wanted = ("out=x", "optimization.steps=6")
    for said in ("run.toml out=x --resume optimization.steps=6", "run.toml --resume out=x optimization.steps=6"):
        train = parse(["train", *said.split()])
        assert isinstance(train, TrainCommand)
        assert train.overrides == wanted
        assert train.resume
    made = parse(["plan", *ASKED, "--pin", "zero=3", "--pin", "tp=8"])
    assert isinstance(made, PlanCommand)
    assert made.overrides == ()
    between = parse(
        ["simulate", "run.toml", "out=x", "--trace=a.pftrace", "memory.budget=1GB", "--json", "a", "data.batch_size=2"]
    )
    assert isinstance(between, SimulateCommand)
    assert between.overrides == ("out=x", "memory.budget=1GB", "data.batch_size=2")


@pytest.mark.parametrize("pin", ["vpp=2", "schedule=zero-bubble"])
def test_what_a_pipeline_has_is_not_pinned_beside_none(pin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *ASKED, "--pin", pin, "--pin", "pp=1"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"which only a pipeline has, got {pin}, pp=1; leave pp out, or them" in said


@pytest.mark.parametrize("pin", ["vpp=2", "schedule=zero-bubble"])
def test_what_a_pipeline_has_leaves_pipelines_to_choose_from(pin: str) -> None:
    space = space_of(Request(model="llama3-8b", machine="h100", devices=8, global_batch=16, pins=parse_pins((pin,))))
    pipes = space.pipes(partial=False)
    key, value = pin.split("=")
    assert {pipe.pp for pipe in pipes} == {2, 4, 8}
    assert all(str(getattr(pipe, key)) == value for pipe in pipes)
