"""The option list is frozen, and asking for it is quick and imports no torch.

After a wanted change: ``python tests/cli/test_help.py`` writes the golden file again; read its diff.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

COMMANDS = (
    "",
    "fit",
    "plan",
    "simulate",
    "place",
    "train",
    "report",
    "export",
    "import",
    "checkpoint",
    "software",
    "probe",
    "doctor",
    "demo",
)
GOLDEN = Path(__file__).parent / "help.txt"
FRAMES = re.compile("[╭─╮│╰╯]|-----+")
CODE = """
import sys
from lading.cli.main import main
try:
    main(sys.argv[1:])
finally:
    heavy = sorted({"torch", "numpy", "transformers", "highspy"} & sys.modules.keys())
    assert not heavy, heavy
"""


@cache
def help_of(command: str) -> subprocess.CompletedProcess[str]:
    arguments = [command, "--help"] if command else ["--help"]
    environment = {"PYTHONPATH": ":".join(sys.path), "COLUMNS": "80", "PATH": "", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=60,
    )


def words(text: str) -> str:
    """The text without frames, so that only what it says is frozen."""
    lines = (" ".join(FRAMES.sub(" ", line).split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def golden_text() -> str:
    return "\n".join(f"$ lading {command or '--help'}\n{words(help_of(command).stdout)}" for command in COMMANDS)


def test_the_option_list_is_frozen() -> None:
    assert golden_text() == GOLDEN.read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_heavy(command: str) -> None:
    done = help_of(command)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: lading {command or 'COMMAND'}" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns(command: str) -> None:
    assert not [line for line in help_of(command).stdout.splitlines() if len(line) > 80]


def test_help_answers_at_once() -> None:
    """Of processor time, the least of three: other work is not the subject. Importing torch alone takes over 2 s."""
    took_s: list[float] = []
    for _ in range(3):
        before = os.times()
        assert help_of.__wrapped__("train").returncode == 0
        after = os.times()
        took_s.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(took_s) < 0.9


if __name__ == "__main__":
    GOLDEN.write_text(golden_text())
