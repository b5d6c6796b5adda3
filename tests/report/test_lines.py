"""Lines that fit the terminal, wherever the output goes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lading.report.lines import fitted, line_columns, say, say_list

LONG = "word " * 30
PATH = "/a/folder/" + "x" * 90


def test_long_lines_are_broken_and_short_ones_left() -> None:
    lines = fitted(f"short\n  {LONG.rstrip()}", 40).splitlines()
    assert lines[0] == "short"
    assert all(len(line) <= 40 for line in lines)
    assert lines[1].startswith("  word")
    assert all(line.startswith("    word") for line in lines[2:])
    assert " ".join(lines[1:]).split() == LONG.split()


def test_a_path_stays_whole_behind_what_says_it() -> None:
    assert fitted(f"error: {PATH}: no such file", 80) == f"error: {PATH}:\n  no such file"


def test_no_terminal_has_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("sys.__stdout__", io.StringIO())
    assert line_columns() == 80
    monkeypatch.setenv("COLUMNS", "1")
    assert line_columns() == 40


def test_sentences_hang_behind_their_head() -> None:
    console = Console(file=io.StringIO(), width=30)
    say(console, "a [sentence] of more than thirty characters")
    say_list(console, "Assumed", ["one that is longer than a line", "two"])
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "a [sentence] of more than",
        "  thirty characters",
        "Assumed - one that is longer",
        "          than a line",
        "        - two",
    ]
