"""``lading place``: from a model and a list of devices to a table, figures and a trace."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fuzz import damaged_document

from lading.catalog.fleets import FLEETS, load_fleet
from lading.cli.main import main
from lading.errors import ConfigError, PlanInfeasible
from lading.ir.plan import PLAN_FORMAT, Plan, PlanKind
from lading.planner.placement.contest import place
from lading.planner.placement.from_file import read_problem
from lading.units import format_seconds

GRAPH = {
    "name": "two",
    "micro_batches": 1,
    "devices": [{"name": "a", "memory_bytes": 100}, {"name": "b", "memory_bytes": 100}],
    "links": [
        {"name": "n", "devices": ["a", "b"], "medium": "wire", "bandwidth_bytes_per_s": 10.0, "efficiency": 1.0,
         "latency_s": 0.0}
    ],
    "tasks": [
        {"name": name, "seconds": seconds, "resident_bytes": 60, "kept_bytes": 0, "working_bytes": 0, "group": "",
         "backward": False, "once": False}
        for name, seconds in (("first", [1.0, 2.0]), ("second", [None, 3.0]))
    ],
    "flows": [{"source": "first", "targets": ["second"], "size_bytes": 20}],
}  # fmt: skip


def test_a_model_of_the_catalog_on_unlike_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, trace = tmp_path / "out.json", tmp_path / "out.pftrace"
    asked = ["place", "--model", "llama3.2-1b", "--machine", "laptop-and-server", "--seq", "1024", "--effort", "1"]
    assert main([*asked, "--json", str(figures), "--trace", str(trace)]) == 0
    said = capsys.readouterr().out
    assert "llama3.2-1b on laptop, gpu, server: a step in" in said
    assert "no placement takes less than" in said
    assert "the memory of gpu is full" in said
    assert "NVIDIA T4 computes in float16" in said
    found = json.loads(figures.read_text())
    assert {p["policy"] for p in found["policies"]} >= {"chain", "lp", "best"}
    assert 0 <= found["gap"] < 0.2
    assert found["machine"] == "laptop-and-server"
    assert found["machine_fingerprint"] == load_fleet("laptop-and-server").fingerprint
    assert sum(len(part["groups"]) for part in found["parts"]) == 18
    assert all(d["peak_bytes"] <= d["memory_bytes"] for d in found["devices"])
    assert trace.stat().st_size > 1000


def test_plan_takes_a_list_of_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    asked = ["plan", "--model", "gpt2", "--machine", "two-desktops", "--seq", "128", "--out", str(out)]
    assert main([*asked, "--global-batch", "4"]) == 0
    said = capsys.readouterr().out
    assert "micro-batches of a step, searched briefly: 1: " in said
    plan = Plan.load(out, PlanKind.PLACEMENT)
    assert plan.micro_batches in (1, 2, 4)
    assert plan.step_s >= plan.lower_bound_s > 0
    assert main(["place", "--plan", str(out)]) == 0
    assert main([*asked, "--devices", "8"]) == 2
    assert "--devices belongs to a cluster of alike devices" in capsys.readouterr().err


def test_a_graph_of_plain_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(GRAPH))
    assert main(["place", "--graph", str(path), "--policy", "chain"]) == 0
    assert "two on a, b: a step in 6.000 s" in capsys.readouterr().out  # 1 s, 2 s of transfer, 3 s


@pytest.mark.slow
def test_one_pass_of_a_captured_model(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["place", "--model", "gpt2", "--machine", "two-desktops", "--units", "20", "--seq", "64", "--latency"]
    assert main([*asked, "--effort", "0"]) == 0
    assert "one pass in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "code", "message"),
    [
        (["--model", "gpt2"], 2, "expected --model and --machine"),
        (["--model", "gpt2", "--machine", "nowhere"], 2, "expected a fleet"),
        (["--model", "gpt9", "--machine", "two-desktops"], 2, "expected a model"),
        (["--model", "gpt2", "--machine", "two-desktops", "--policy", "guess"], 2, "expected a policy among"),
        (["--model", "gpt2", "--machine", "two-desktops", "--batch", "0"], 2, "expected a batch"),
        (["--model", "gpt2", "--machine", "two-desktops", "--json", "/no/where.json"], 2, "folder that exists"),
        (["--model", "llama3-70b", "--machine", "two-desktops"], 3, "all parts need"),
        (["--model", "llama3-70b", "--machine", "laptop-and-server"], 3, "add a device"),
    ],
)
def test_what_cannot_be_says_why(asked: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", *asked, "--effort", "0"]) == code
    assert message in capsys.readouterr().err


def test_a_placement_is_saved_and_simulated_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, again, slow = tmp_path / "placement.json", tmp_path / "again.json", tmp_path / "slow.toml"
    asked = ["place", "--model", "llama3.2-1b", "--machine", "laptop-and-server", "--seq", "1024", "--effort", "0"]
    assert main([*asked, "--policy", "chain", "--out", str(saved)]) == 0
    first = capsys.readouterr().out
    assert main(["place", "--plan", str(saved), "--json", str(again)]) == 0
    second = capsys.readouterr().out
    said = f"predicted when it was made: {format_seconds(Plan.load(saved).step_s)}\n"
    assert said in second
    assert second.replace(said, "").replace(f"wrote {again}", "") == first.replace(f"wrote {saved}", "")
    assert json.loads(again.read_text())["step_s"] == Plan.load(saved).step_s
    assert main(["simulate", str(saved)]) == 2
    assert f"simulate it with: lading place --plan {saved}" in capsys.readouterr().err
    text = (FLEETS / "laptop-and-server.toml").read_text()
    slow.write_text(text.replace("bandwidth_bytes_per_s = 1.575e+10", "bandwidth_bytes_per_s = 1e+8"))
    assert main(["place", "--plan", str(saved), "--machine", str(slow)]) == 0
    assert "for other devices than laptop-and-server has now" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--plan", "{plan}", "--seq", "8"], "--seq: expected nothing of the kind next to --plan"),
        (["--plan", "{plan}", "--machine", "two-desktops"], "expected a list with the placement's device"),
        (["--graph", "{graph}", "--batch", "2"], "--batch: expected nothing of the kind next to --graph"),
        (["--graph", "{graph}", "--out", "{plan}"], "--out: expected nothing of the kind next to --graph"),
        (
            ["--plan", "{plan}", "--trace", "{graph}", "--json", "{graph}"],
            "--trace and --json: expected different files",
        ),
        (
            ["--plan", "{graph}"],
            f"expected a plan of format {PLAN_FORMAT}, found no format; make one with: lading place",
        ),
        (["--plan", "nowhere.json"], "expected a placement at nowhere.json, found no file"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    asked: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, graph = tmp_path / "plan.json", tmp_path / "graph.json"
    graph.write_text(json.dumps(GRAPH))
    made = ["place", "--model", "gpt2", "--machine", "laptop-and-server", "--policy", "single", "--out", str(plan)]
    assert main(made) == 0
    assert main(["place", *(word.format(plan=plan, graph=graph) for word in asked)]) == 2
    assert message in capsys.readouterr().err


@given(st.data())
@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
def test_a_damaged_graph_says_what_is_wrong_or_is_placed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_text(json.dumps(damaged_document(data, GRAPH)))
    said, problem = "", None
    try:
        problem = read_problem(path)
    except ConfigError as error:
        said = str(error)
    if problem is None:
        assert str(path) in said
        return
    with suppress(PlanInfeasible):
        assert place(problem, effort=0).fits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flows": [{"source": "first", "targets": ["third"], "size_bytes": 1}]}, "flows between tasks of the file"),
        ({"tasks": [*GRAPH["tasks"], GRAPH["tasks"][0]]}, "tasks of different names"),
        ({"micro_batches": 0}, "micro_batches >= 1"),
        ({"more": 1}, r"unknown ['more']"),
    ],
)
def test_a_wrong_graph_says_where(
    change: dict[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({**GRAPH, **change}))
    assert main(["place", "--graph", str(path)]) == 2
    assert message in capsys.readouterr().err
