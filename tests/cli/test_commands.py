"""Commands hand the right things to the modules that do the work, and errors become one line and an exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.plans import some_plan

from lading.cli import demo_command
from lading.cli.main import main, parse
from lading.cli.simulate_command import timeline_text
from lading.cli.train_command import TrainCommand
from lading.config import RunConfig, load_run, run_to_dict
from lading.errors import (
    BudgetExceeded,
    CaptureError,
    ConfigError,
    PlanInfeasible,
    ProgramError,
    SimulationError,
    StorageError,
)
from lading.ir.graph import StepGraph
from lading.ir.plan import Plan, PolicyRow
from lading.ir.timeline import Event, MemorySample, Timeline
from lading.stragglers import slow_step_s

RUN = """
model = { name = "llama" }
data = { sequence_length = 8, batch_size = 2 }
optimization = { steps = 3 }
memory = { budget = "50%" }
machine = "rtx4090"
"""
TIMELINE = Timeline(
    source="predicted",
    events=(Event(0, "compute", 0, 0.0, 2.0), Event(0, "disk_read", 1, 0.5, 1.0)),
    memory=(MemorySample(0.0, "device", {"parameter": 1024}),),
    labels={0: "mm", 1: "disk -> device w"},
    peak_bytes=3 << 20,
)


#: The modules that commands import when they run.
WORKERS = ("lading.train", "lading.prepare", "lading.run", "lading.hosts", "lading.summary")


class FakeTrain(types.ModuleType):
    """Stands for all of ``WORKERS``: records each call, and fails when told to."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("lading.train")
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.error: BaseException | None = None
        self.demo: Callable[..., object]
        graph = StepGraph((), (), (), (), (), (), ())
        program = types.SimpleNamespace(graph=graph)
        prepared = types.SimpleNamespace(plan=plan, program=program, predicted=TIMELINE, notes=())
        for name, result in {
            "plan_run": prepared, "prepare_plan": prepared, "train_run": "trained",
            "write_run_report": Path("x/report.html"), "demo": "demonstrated", "probe_to": None,
        }.items():  # fmt: skip
            setattr(self, name, self._fake(name, result))

    def _fake(self, name: str, result: object) -> Callable[..., object]:
        def call(*args: Any, **kwargs: Any) -> object:
            self.calls.append((name, args, kwargs))
            if self.error:
                raise self.error
            return result

        return call


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTrain:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    plan = some_plan(
        budgets={"device": 1 << 20, "disk": 1 << 20}, step_s=1.0, lower_bound_s=0.5,
        peaks={"step": {"device": 1 << 19}}, bytes_by_role={"parameter": 1 << 19},
        run=run_to_dict(load_run("run.toml")),
        policies=(PolicyRow(policy="residency", fits=True, peak_bytes=1 << 19, step_s=1.0),), assumptions=(),
    )  # fmt: skip
    plan.save(Path("saved.json"))
    fake = FakeTrain(plan)
    for name in WORKERS:
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(demo_command, "demo", fake.demo)
    return fake


def failure(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(argv)
    return code, capsys.readouterr().err


def test_plan(train: FakeTrain, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.toml", "memory.budget=30%", "--out", "new.json"]) == 0
    (name, args, options), *others = train.calls
    assert (name, args, others) == ("plan_run", (load_run("run.toml", ["memory.budget=30%"]),), [])
    assert options["cache"]
    assert Plan.load(Path("new.json")) == Plan.load(Path("saved.json"))
    out = capsys.readouterr().out
    assert "residency" in out
    assert out.endswith("wrote new.json\n")


def test_simulate(train: FakeTrain, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "run.toml"]) == 0
    assert main(["simulate", "saved.json", "--trace", "step.pftrace"]) == 0
    assert [name for name, _, _ in train.calls] == ["plan_run", "prepare_plan"]
    assert train.calls[1][1] == (Plan.load(Path("saved.json")),)
    assert Path("step.pftrace").stat().st_size > 0
    assert "predicted step 2.000 s, device peak 3.00 MiB" in capsys.readouterr().out


NEW = {"resume": False, "resume_from": "", "cache": True}


def test_train(train: FakeTrain) -> None:
    assert main(["train", "run.toml", "seed=4", "threads=1"]) == 0
    assert main(["train", "--plan", "saved.json", "--resume"]) == 0
    assert train.calls[0] == ("train_run", (load_run("run.toml", ["seed=4", "threads=1"]),), NEW)
    assert train.calls[1] == ("train_run", (Plan.load(Path("saved.json")),), NEW | {"resume": True})
    assert main(["train", "--plan", "saved.json", "--resume-from", "out/checkpoints/step-00000002"]) == 0
    back = {"resume_from": Path("out/checkpoints/step-00000002")}
    assert train.calls[2] == ("train_run", (Plan.load(Path("saved.json")),), NEW | back)


def test_without_the_cache(train: FakeTrain, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["plan", "run.toml", "--no-cache"], ["simulate", "run.toml", "--no-cache"]):
        assert main(argv) == 0
    assert main(["train", "run.toml", "--no-cache"]) == 0
    assert [options["cache"] for _, _, options in train.calls] == [False] * 3
    for argv in (["train", "--plan", "saved.json"], ["simulate", "saved.json"], ["plan", "--model", "gpt2"]):
        assert main([*argv, "--no-cache"]) == 2
        assert "--no-cache belongs to RUN.toml" in capsys.readouterr().err


def test_report_probe_demo(train: FakeTrain) -> None:
    for argv in (["report", "."], ["probe", "--out", "m.toml"], ["demo", "--budget", "64MB", "--seconds", "5"]):
        assert main(argv) == 0
    assert train.calls == [
        ("write_run_report", (Path(), slow_step_s), {}),
        ("probe_to", (Path("m.toml"), Path()), {"ranks": 1}),
        ("demo", (Path("out/demo"), "64MB", 5.0, "adamw"), {}),
    ]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["plan", "absent.toml"], "error: expected a run configuration at absent.toml, found no file\n"),
        (["plan", "run.toml", "steps=2"], "unknown key 'steps'; did you mean 'optimization.steps'?\n"),
        (["plan", "run.toml", "--out", "no/plan.json"], "expected a file in a folder that exists, got 'no/plan.json'"),
        (["simulate", "run.toml", "--trace", "."], "expected a file in a folder that exists, got '.'"),
        (["simulate", "run.json"], "expected a plan at run.json, found no file"),
        (["train"], "expected RUN.toml or --plan PLAN.json, got neither\n"),
        (["train", "run.toml", "--plan", "saved.json"], "expected RUN.toml or --plan PLAN.json, got both\n"),
        (
            ["train", "--plan", "saved.json", "out=else"],
            "settings next to saved.json, got 'out=else'; plan again: lading",
        ),
        (["simulate", "saved.json", "seed=1"], "a plan fixes its run: expected no settings next to saved.json"),
        (["report", "absent"], "expected the out folder of a run, got 'absent'"),
        (["probe", "--folder", "absent"], "--folder: expected a folder"),
        (["probe", "--ranks", "0"], "--ranks: expected at least 1"),
        (["demo", "--budget", "lots"], "budget: expected a size such as '256MB' or '24GiB'"),
        (["demo", "--seconds", "0"], "--seconds: expected a time above 0, got 0.0"),
    ],
)
def test_bad_input_is_one_line(
    train: FakeTrain, capsys: pytest.CaptureFixture[str], argv: list[str], expected: str
) -> None:
    code, error = failure(capsys, *argv)
    assert code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert expected in error
    assert train.calls == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("c"), 2),
        (CaptureError("c"), 2),
        (StorageError("c"), 2),
        (PermissionError(13, "Permission denied", "out"), 2),
        (PlanInfeasible("c", missing_bytes=1, smallest_budget_bytes=2), 3),
        (BudgetExceeded("c"), 4),
        (ProgramError("c"), 1),
        (SimulationError("c"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(train: FakeTrain, capsys: pytest.CaptureFixture[str], error: BaseException, code: int) -> None:
    train.error = error
    found, message = failure(capsys, "train", "run.toml")
    assert found == code
    assert message == ("interrupted\n" if code == 130 else f"error: {error}\n")


def test_a_bug_keeps_its_traceback(train: FakeTrain) -> None:
    for bug in (ValueError("bug"), OSError("bug without a file")):
        train.error = bug
        with pytest.raises(type(bug), match="bug"):
            main(["train", "run.toml"])


def test_an_unknown_flag_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "run.toml", "--resmue"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "Perhaps you meant" in error
    assert "--resume" in error


def test_arguments_of_train_in_any_order() -> None:
    expected = TrainCommand(run_file=Path("a.toml"), overrides=("x=1", "y=2"), resume=True)
    assert parse(["train", "a.toml", "x=1", "y=2", "--resume"]) == expected
    assert parse(["train", "--resume", "a.toml", "x=1", "y=2"]) == expected


def test_timeline_text_of_nothing() -> None:
    assert timeline_text(Timeline("predicted", (), ())) == "predicted step 0 s, device peak 0 B"


SLOW = """
import sys, time, types
train = types.ModuleType("lading.train")
def train_run(run, resume, resume_from, cache):
    print("started" * {times}, flush=True)
    time.sleep({seconds})
train.train_run = train_run
sys.modules["lading.train"] = train
from lading.cli.main import main
sys.exit(main(["train", "run.toml"]))
"""


def start(times: int, seconds: float) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = SLOW.format(times=times, seconds=seconds)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )


def test_ctrl_c_exits_130_without_a_traceback(train: FakeTrain) -> None:
    process = start(1, 30)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=20)
    assert (process.returncode, error) == (130, b"interrupted\n")


@pytest.mark.long
def test_a_closed_pipe_is_no_traceback(train: FakeTrain) -> None:
    process = start(100_000, 0)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=20) == 141
    process.stderr.close()


def test_the_configuration_given_is_the_configuration_run(train: FakeTrain) -> None:
    main(["train", "run.toml"])
    (run,) = train.calls[0][1]
    assert isinstance(run, RunConfig)
    assert run.machine == "rtx4090"


@pytest.mark.long
def test_software_without_zero_1_is_shown_on_a_layout_that_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["software", "torch-eager-cpu"]) == 0
    assert "on h100, dp4,tp2,zero2,gb32, takes" in " ".join(capsys.readouterr().out.split())
    assert main(["software", "torch-eager-cpu", "--layout", "dp4,tp2,zero1,mb1,gb32"]) == 2
    assert "choose zero2 or zero3, got zero1" in " ".join(capsys.readouterr().err.split())
