"""A model by name on the ranks of a host that was measured: its plan is the fastest, and runs as it is."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lading import spreading
from lading.catalog.load import save_machine
from lading.cli.main import main
from lading.config import RunConfig, run_from_dict
from lading.errors import ConfigError, PlanInfeasible
from lading.ir.layout import Layout
from lading.ir.machine import Curve, Machine, Processes
from lading.ir.plan import Plan
from lading.ir.request import Request
from lading.prepare import check_spread_layout, plan_run
from lading.report.metrics import read_metrics
from lading.run import CapturedRun, Prepared, capture_run, sharing_batches
from lading.runtime.host import host_id
from lading.runtime.probe_ranks import OPS
from lading.spreading import layouts_of_run, spread_model
from lading.tracing.initial import Deferred
from lading.train import train_run
from tests.machines import small_machine
from tests.runs import OVERHEAD_BYTES

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = """
from lading.models.gpt import GPT, GptConfig

def model():
    return GPT(GptConfig(vocab_size=256, dim=64, num_layers={layers}, num_heads=4, max_seq_len=64))
"""


def host(rate: float = 1e9, where: str = "elsewhere") -> Machine:
    """The made-up machine as if measured, whose processes exchange so many bytes a second."""
    names = [f"{op}.{ranks}" for op in OPS for ranks in (2, 3, 4)]
    curve = Curve(size=(1e3, 1e6), rate=(rate / 10, rate))
    machine = small_machine(overhead_bytes=OVERHEAD_BYTES)
    return dataclasses.replace(machine, host_id=where, collectives=dict.fromkeys(names, curve))


@pytest.fixture(autouse=True, scope="module")
def _captured_once() -> Iterator[None]:
    """A run of one batch and as many micro-batches is captured once for all searches, whose layouts it is for."""
    steps: dict[str, CapturedRun] = {}

    def captured(run: RunConfig, machine: Machine, initial: Deferred | None = None) -> CapturedRun:
        key = repr((run.model, run.data, run.optimization.accumulation))
        if key not in steps:
            steps[key] = capture_run(run, machine, initial)
        return steps[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spreading, "capture_run", captured)
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a model and the file of a machine."""
    for layers in (1, 4):
        (tmp_path / f"tiny{layers}.py").write_text(TINY.format(layers=layers))
    save_machine(host(where=host_id()), tmp_path / "machine.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def asked(devices: int, batch: int = 8, layers: int = 1, **more: Any) -> Request:
    return Request(
        model=f"tiny{layers}:model",
        machine="machine.toml",
        devices=devices,
        global_batch=batch,
        seq_len=64,
        **more,
    )


@pytest.mark.long
def test_ranks_are_timed_with_the_threads_that_they_have(folder: Path) -> None:
    measured = host(where=host_id())
    share = dataclasses.replace(measured.device, num_threads=3, memory_bandwidth_bytes_per_s=1e8, rates={})
    whole = dataclasses.replace(share, num_threads=256, memory_bandwidth_bytes_per_s=1e10)
    shared = Processes(cores=256, slowdown={"memory-bound": (1.0,)}, device=share)
    both = dataclasses.replace(measured, device=whole, processes=shared)
    alone = dataclasses.replace(both, device=share, processes=dataclasses.replace(shared, device=None))
    asks = asked(2, pins={"dp": 2, "zero": 0})
    elsewhere = dataclasses.replace(both, host_id="elsewhere")
    runs = [spread_model(asks, machine, cache=False) for machine in (both, alone, elsewhere)]
    assert len({run.ways[0].in_memory_s for run in runs}) == 1
    assert runs[0].best.plan.step_s >= 0.99 * runs[0].ways[0].in_memory_s
    assert not any("threads" in said for said in runs[2].best.plan.assumptions), "processors here are not those there"


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_layouts_are_all_that_a_run_may_have(devices: int) -> None:
    counts, found = range(1, devices + 1), set[str]()
    for dp, tp, cp, pp, zero, sp, schedule in product(
        counts, counts, counts, counts, range(4), (False, True), ("1f1b", "zero-bubble")
    ):
        if dp * tp * cp * pp != devices or (zero == 2 and pp > 1):  # as zero 3
            continue
        for shard in (0, *counts) if zero == 3 else (0,):
            try:
                layout = Layout(dp=dp, tp=tp, cp=cp, pp=pp, zero=zero, sp=sp, schedule=schedule, shard=shard)
                spread = check_spread_layout(str(layout), devices)
            except ConfigError:
                continue
            found.add(str(dataclasses.replace(spread, shard=0 if shard == dp * cp else spread.shard)))
    assert {str(layout) for layout in layouts_of_run(devices, {})[0]} == found


@pytest.mark.long
@pytest.mark.parametrize(
    "rate",
    [pytest.param(1e6, id="slow network"), pytest.param(1e10, id="fast network", marks=pytest.mark.slow)],
)
def test_the_first_is_the_fastest_of_all_when_each_is_planned(folder: Path, rate: float) -> None:
    machine = host(rate)
    request = asked(2)
    found = spread_model(request, machine, cache=False)
    steps: dict[str, float] = {}
    for way in found.ways:
        moved = found.best.run.optimization
        moved = dataclasses.replace(moved, micro_batches=request.global_batch // way.micro_batch)
        data = dataclasses.replace(found.best.run.data, batch_size=way.micro_batch)
        run = dataclasses.replace(found.best.run, data=data, optimization=moved, layout=str(way.layout))
        step = spreading.capture_run(sharing_batches(run, 2), machine)
        plan = plan_run(run, machine, step, devices=2).plan
        steps[str(way.layout)] = plan.step_s
        assert not any("c10d" in said or "collective" in said for said in plan.assumptions)  # they were measured
    assert len(steps) >= 6
    best = found.best.plan
    assert steps[str(found.ways[0].layout)] == best.step_s == min(steps.values())
    assert {"dp2", "dp2,zero3", "pp2", "tp2", "cp2"} <= steps.keys()


@pytest.mark.long
def test_a_budget_chooses_other_layouts_and_what_does_not_fit_is_said(folder: Path) -> None:
    machine = host()
    pins = {"dp": 2, "zero": 0}
    roomy = spread_model(asked(2, pins=pins), machine, cache=False)
    whole = roomy.best.plan.peak_bytes["device"]
    pinned = spread_model(asked(2, pins={"pp": 2, "schedule": "zbv", "vpp": 2}), machine, cache=False)
    assert [str(way.layout) for way in pinned.ways] == ["pp2,vpp2,zbv"]
    assert pinned.best.plan.ranks == 2
    with pytest.raises(PlanInfeasible, match=r"none of 1 layouts fits 49.00 MiB a rank; the nearest is dp2: no plan"):
        spread_model(asked(2, pins=pins, budgets={"device": OVERHEAD_BYTES + (1 << 20)}), machine, cache=False)
    assert roomy.ways[0].micro_batch == 4
    tight = spread_model(asked(2, pins=pins, budgets={"device": int(whole * 0.97)}), machine, cache=False)
    assert [(str(way.layout), way.micro_batch, way.micro_batches) for way in tight.ways] == [("dp2", 2, 2)]
    assert tight.best.plan.peak_bytes["device"] <= whole * 0.97


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"pins": {"tp": 2, "cp": 2, "sp": True}}, "leave sp out, or cp"),
        ({"pins": {"recompute": "full"}}, "--pin recompute: expected one of dp, tp, .* leave it out"),
        ({"pins": {"dp": 3}}, "--pin: no layout of 4 devices has dp=3"),
        ({"pins": {"tp": 4, "micro_batch": 3}}, "tp4 .*: 8 sequences are no multiple of micro-batches of 3"),
        ({"precisions": ("fp8",)}, "--precision: expected fp32 or bf16"),
        (
            {"batch": 3, "pins": {"dp": 4}},
            "runs this model: dp4 and the like: 3 sequences are no multiple of 4 replicas",
        ),
    ],
)
def test_what_ranks_of_a_host_do_not_run_is_refused(folder: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spread_model(asked(4, **more), host(), cache=False)


def test_what_is_not_searched_is_said(folder: Path) -> None:
    found = spread_model(asked(3), host(), cache=False)
    assert {str(way.layout) for way in found.ways} == {"pp3", "pp3,zero-bubble"}
    assert "dp3 and the like: 8 sequences are no multiple of 3 replicas" in found.left_out
    assert {"tp3", "cp3"} <= {said.partition(":")[0] for said in found.left_out}
    assert any(said.startswith("pipelines of several chunks a rank: --pin schedule") for said in found.left_out)


@pytest.mark.long
def test_what_no_plan_can_hold_is_not_planned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation of every layout needs more at once than the budget: one is planned, to say what is missing."""
    planned: list[str] = []

    def counted(run: RunConfig, *rest: Any, **more: Any) -> Prepared:
        planned.append(run.layout)
        return plan_run(run, *rest, **more)

    monkeypatch.setattr(spreading, "plan_run", counted)
    with pytest.raises(PlanInfeasible, match=r"none of \d+ layouts fits 100.00 KiB a rank; the nearest is ") as caught:
        spread_model(asked(2, budgets={"device": 100 << 10}), host(), cache=False)
    assert len(planned) == 1
    assert f"the nearest is {planned[0]}: no plan fits a device budget of 100.00 KiB" in str(caught.value)
    assert caught.value.smallest_budget_bytes > OVERHEAD_BYTES


def test_a_machine_without_collectives_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="make one with: lading probe --ranks 2"):
        spread_model(asked(2), dataclasses.replace(host(), collectives={}), cache=False)


def plan_words(devices: int, batch: int, layers: int = 1) -> list[str]:
    words = ["plan", "--model", f"tiny{layers}:model", "--machine", "machine.toml", "--devices", str(devices)]
    return [*words, "--global-batch", str(batch), "--seq", "64"]


@pytest.mark.long
def test_the_command_ends_with_the_line_that_runs_its_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*plan_words(2, 4), "--stack", "megatron-core"]) == 2
    assert "--stack belongs to a cluster" in " ".join(capsys.readouterr().err.split())
    assert main([*plan_words(2, 4), "--pin", "dp=2", "--pin", "zero=0"]) == 0
    said = capsys.readouterr().out
    line = "run it here by: torchrun --standalone --nproc-per-node 2 -m lading train --plan plan.json"
    assert said.splitlines()[-1] == line
    plan = Plan.load(folder / "plan.json")
    assert (plan.ranks, plan.request.host_id) == (2, host_id())
    assert plan.request.run is not None
    assert plan.request.run["optimization"]["micro_batches"] * plan.request.run["data"]["batch_size"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "layers"), [(2, 1), (4, 4)])
def test_what_the_command_prints_trains_as_one_process(folder: Path, devices: int, layers: int) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    where = os.pathsep.join((str(folder), *sys.path))
    env = {**os.environ, "PATH": path, "PYTHONPATH": where, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lading", *plan_words(devices, 8, layers)]
    said = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout
    line = said.splitlines()[-1].partition("run it here by: ")[2]
    done = subprocess.run(line, shell=True, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plan = Plan.load(folder / "plan.json")
    run = run_from_dict(json.loads(json.dumps(plan.request.run)))
    losses = [record["loss"] for record in read_metrics(folder / run.out / "metrics.jsonl")]
    assert len(losses) == 100
    assert re.search(r"loss \d+\.\d+ -> \d+\.\d+ in 100 steps", done.stdout)
    alone = train_run(dataclasses.replace(run, layout="", out="alone", optimization=dataclasses.replace(
        run.optimization, steps=10)))  # fmt: skip
    assert losses[:10] == pytest.approx(list(alone.losses), rel=1e-5)
