"""The command line as a shell sees it: versions, typing mistakes, pipes that close, lines of 80 columns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lading import __version__
from lading.cli.main import main

ROOT = Path(__file__).parent.parent.parent


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"lading {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["fitt"], "got 'fitt'; did you mean 'fit'?"),
        (["simulat", "--model", "gpt2"], "did you mean 'simulate'?"),
        (["--frob"], "expected a command, one of fit, plan, simulate"),
        ([], "usage: lading COMMAND"),
        (["train", "--resum"], "--resume"),
        (["plan", "--modle", "gpt2"], "--model"),
    ],
)
def test_a_typing_mistake_is_answered_with_the_nearest(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.out == ""


def test_a_mistyped_option_is_compared_with_those_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--modle", "gpt2"])
    assert "lading fit" not in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    "asked",
    ["place --model llama3.2-1b --machine two-desktops --policy even --seq 128", "checkpoint list nowhere"],
)
def test_a_closed_pipe_is_no_error(asked: str, tmp_path: Path) -> None:
    """A reader of all that is said goes away, as ``head`` does."""
    code = """
import sys, traceback
from lading.cli.main import main
try:
    code = main(sys.argv[2:])
except BaseException as error:
    open(sys.argv[1], "w").write(traceback.format_exc())
    raise
sys.exit(code)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "trace"), *asked.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 141
    assert not (tmp_path / "trace").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        "simulate --model llama3-405b --machine h100 --devices 16384 --layout tp8,cp2,pp16,vpp8,zero1,sp --jitter 0.02 "
        "--mtbf 50000 --storage 2TB --price 2 --optimizer muon",
        "simulate --model llama3-8b --machine h100 --devices 8 --layout zero3 --growth 64 --lora 16",
        "plan --model llama3.2-1b --machine h100 --devices 4 --global-batch 8 --seq 512 --pin zero=3 --pin pp=1 --tree",
        "place --model llama3.2-1b --machine laptop-and-server --effort 0",
        "doctor",
        "simulate nothing.json",
    ],
)
def test_no_line_is_wider_than_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for one word, such as a path, that is longer."""
    monkeypatch.delenv("COLUMNS")
    monkeypatch.chdir(tmp_path)
    main(command.split())
    said = capsys.readouterr()
    lines = (said.out + said.err).splitlines()
    assert len(lines) >= 1
    assert not [line for line in lines if len(line) > 80 and max(map(len, line.split())) < 60]
    assert "…" not in said.out


def test_what_one_process_does_is_refused_on_every_rank_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 2
    assert "lading demo is done by one process, torchrun has started 2" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "demo").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["doctor"]) == 0
