"""``lading simulate --model``: all ranks one by one, long runs, and the trace of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from lading.cli.main import main

ASKED = [
    "simulate",
    "--model",
    "llama3-70b",
    "--machine",
    "h100",
    "--devices",
    "256",
    "--layout",
    "tp8,pp4,gb256,zero1",
]


def test_ranks_failures_and_price(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    more = ["--jitter", "0.03", "--mtbf", "50000", "--storage", "100GB", "--restart", "300", "--price", "2"]
    assert main([*ASKED, *more, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "256 ranks one by one, equal work varying by 3.0%" in printed
    assert "a failure every 195.3 h: checkpoints of 98" in printed
    assert "failures included" in printed
    assert "Assumed - a restart" not in printed
    figures = json.loads(out.read_text())
    unequal, run = figures["unequal_ranks"], figures["long_run"]
    assert 0.01 < unequal["longer"] < 0.1
    assert run["checkpoint_bytes"] == pytest.approx(14 * 70.6e9, rel=0.01)
    assert 0.99 < run["goodput"] < 1
    longer = unequal["step_s"] / figures["step_s"] / run["goodput"]
    assert run["price_per_billion_tokens"] == pytest.approx(figures["price_per_billion_tokens"] * longer)


@pytest.mark.long
@pytest.mark.parametrize("slow", ["--straggler", "--slow-link"])
def test_one_slow_device_slows_all(slow: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    steps = []
    for factor in ("1.0", "1.5", "3"):
        out = tmp_path / f"{factor}.json"
        assert main([*ASKED, slow, factor, "--json", str(out)]) == 0
        assert "times as long" in capsys.readouterr().out
        steps.append(json.loads(out.read_text())["unequal_ranks"]["step_s"])
    assert steps[0] <= steps[1] < steps[2]


def test_what_a_restart_takes_is_said_if_it_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--mtbf", "50000", "--storage", "100GB"]) == 0
    assert "Assumed - a restart takes 600 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--mtbf", "50000"], "expected --storage SIZE next to --mtbf"),
        (["--storage", "1TB"], "expected --mtbf HOURS next to them"),
        (["--layout", "tp8,vpp2"], r"chunks of a rank (vpp) in a pipeline only"),
        (["--layout", "tp8,zero-bubble"], r"chunks of a rank (vpp) in a pipeline only"),
        (["--jitter", "2"], "a share of the time, from 0 to below 1"),
    ],
)
def test_settings_that_need_others(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, *more]) != 0
    assert words in capsys.readouterr().err


def test_a_step_that_was_measured_corrects_the_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, out = tmp_path / "plain.json", tmp_path / "known.json"
    assert main([*ASKED, "--json", str(plain)]) == 0
    before = json.loads(plain.read_text())
    layout, measured_s = before["layout"], 1.1 * before["step_s"]
    assert main([*ASKED, "--known", f"{layout}={measured_s}", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    known = figures["known"]
    assert figures["step_s"] == before["step_s"], "the prediction itself stays beside it"
    assert before["step_s"] < known["step_s"] < measured_s
    assert known["high_s"] / known["low_s"] < before["high_s"] / before["low_s"]
    assert known["runs"][0]["measured_s"] == pytest.approx(measured_s)
    assert "with that known, the step takes" in capsys.readouterr().out
    assert known["runs"][0]["unlike"] == []
    assert main([*ASKED, "--known", "fast"]) != 0
    assert "expected LAYOUT=SECONDS" in capsys.readouterr().err


def test_a_known_step_of_another_model_or_machine_says_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "known.json"
    factors: list[float] = []
    for place in ("", "@gpt3-6.7b@a100"):
        assert main([*ASKED, "--known", f"dp8,zero3,gb64{place}=1e6", "--json", str(out)]) == 0
        figures = json.loads(out.read_text())
        factors.append(figures["known"]["step_s"] / figures["step_s"])
        run = figures["known"]["runs"][0]
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] > 1
    assert (run["model"], run["machine"]) == ("gpt3-6.7b", "a100")
    assert set(run["unlike"]) >= {"machine", "model"}
    assert "of gpt3-6.7b on a100 took" in capsys.readouterr().out
    assert main([*ASKED, "--known", "dp8@gpt3-6.7b@nowhere=3"]) != 0
    assert main([*ASKED, "--known", "dp8@=3"]) != 0
    assert "LAYOUT@MODEL@MACHINE=SECONDS" in capsys.readouterr().err


def test_growth_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, out = tmp_path / "step.html", tmp_path / "step.json"
    assert main([*ASKED, "--growth", "256", "--report", str(page), "--json", str(out), "--jitter", "0.02"]) == 0
    assert "Replicas added" in capsys.readouterr().out
    grown = json.loads(out.read_text())["growth"]
    assert [point["devices"] for point in grown] == [32, 64, 128, 256]
    rates = [point["tokens_per_s_per_device"] for point in grown]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] > 0.85 * rates[0]
    figures = json.loads(out.read_text())
    assert grown[-1]["step_s"] == pytest.approx(figures["step_s"])
    source = page.read_text()
    assert "ranks one by one" in source
    assert "Growth" in source
    assert main([*ASKED, "--growth", "16"]) != 0
    assert "at least one replica's 32 devices" in capsys.readouterr().err


def test_the_trace_shows_ranks_of_the_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "step.pftrace"
    assert main([*ASKED, "--trace", str(path)]) == 0
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    names = {p.track_descriptor.thread.thread_name for p in trace.packet if p.HasField("track_descriptor")}
    assert {"rank class 0 compute", "rank class 3 compute", "rank class 0 data-parallel network"} <= names
    assert any(p.track_event.flow_ids for p in trace.packet)
