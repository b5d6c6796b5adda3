"""Where groups of parameters were asked for and none fit, no plan is written, and the command says so by its exit."""

from __future__ import annotations

from pathlib import Path

import pytest

from lading.cli.main import main

PINS = [word for pin in ("zero=3", "dp=2", "recompute=full", "mb=1") for word in ("--pin", pin)]
ASKED = [
    "plan",
    "--model",
    "gpt2",
    "--machine",
    "h100",
    "--devices",
    "2",
    "--global-batch",
    "8",
    "--seq",
    "1024",
    *PINS,
]


@pytest.mark.long
def test_no_groups_that_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    asked = [*ASKED, "--pin", "offload=none", "--budget", "3434527362", "--out", str(out)]
    assert main([*asked, "--unshard", "zero2"]) == 3
    said = capsys.readouterr().err
    assert "no plan written, as no groups of its parameters fit beside what dp2,zero3,gb8" in said
    assert "leave --unshard out, which finds groups that fit" in said
    assert not out.exists()
    assert main(asked) == 0
    assert out.exists()


def test_groups_of_a_layout_that_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    asked = [*ASKED, "--pin", "offload=optimizer", "--out", str(out)]
    assert main([*asked, "--unshard", "zero2"]) == 2
    assert "--unshard zero2: no plan written, as no groups of parameters are chosen" in capsys.readouterr().err
    assert not out.exists()
    assert main(asked) == 0
    assert "no groups of parameters, which lading.apply needs: expected everything on the d" in capsys.readouterr().out
