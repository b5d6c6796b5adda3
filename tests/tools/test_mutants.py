"""The tool that puts faults into copies of the code, on a toy tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tools.mutants import Fault, FaultError, mutated, read_faults

CODE = "def last(numbers):\n    return len(numbers) - 1\n\n\ndef name():\n    return 'toy'\n"
TESTS = """
from toy import last, name
def test_the_only_one():
    assert last([1]) == 0
def test_last():
    assert last([1, 2]) == 1
"""
FAULTS = """
tests = ["tests/test_toy.py"]

[[fault]]
name = "one-too-many"
file = "src/toy.py"
old = "len(numbers) - 1"
new = "len(numbers)"
hurts = "who asks for the last"
tests = ["tests/test_toy.py::test_last"]

[[fault]]
name = "another-name"
file = "src/toy.py"
old = "'toy'"
new = "'game'"
hurts = "who asks for the name"

[[fault]]
name = "for-ever"
file = "src/toy.py"
old = "    return len(numbers) - 1"
new = "    while True: pass"
hurts = "who asks for the last"
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {"src/toy.py": CODE, "tests/test_toy.py": TESTS, "tools/faults/toys.toml": FAULTS}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.long
def test_faults_are_noticed_or_live_and_the_tree_stays_as_it_is(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--root", tree, "--faults", tree / "tools/faults", "--out", tree / "out", "--jobs", "1", "--bare"]
    limit = "import tools.mutants as tool; tool._MORE_S = 1.0; tool.main()"
    done = subprocess.run(
        [sys.executable, "-c", limit, *map(str, words)], capture_output=True, text=True, timeout=60, check=False
    )
    lines = {line.split()[3]: line.split()[0] for line in done.stdout.splitlines() if " s  toys/" in line}
    expected = {"toys/one-too-many": "failed", "toys/another-name": "lived", "toys/for-ever": "hung"}
    assert lines == expected, done.stdout + done.stderr
    assert "toys/one-too-many  tests/test_toy.py::test_last\n" in done.stdout, "the test that it names runs alone"
    assert "3 faults tried, 1 of them live" in done.stdout
    assert done.returncode == 1, "a fault lives"
    assert (tree / "src/toy.py").read_text() == CODE


def test_a_fault_that_does_not_fit_the_code_is_refused(tree: Path) -> None:
    fits = read_faults(tree / "tools/faults")[0]

    def refused(words: str, **changed: str) -> None:
        with pytest.raises(FaultError, match=words):
            mutated(tree, Fault(**{**vars(fits), **changed}))

    assert mutated(tree, fits) == CODE.replace("len(numbers) - 1", "len(numbers)")
    refused("expected the old text once, found it 2 times", old="return", new="yield")
    refused("expected the old text once, found it 0 times", old="length(numbers)")
    refused("expected a file, found none", file="src/game.py")
    refused("expected Python with the fault in it", new="len(numbers")


def test_an_entry_with_another_key_or_a_name_twice_is_refused(tree: Path) -> None:
    path = tree / "tools/faults/toys.toml"
    path.write_text(FAULTS.replace("hurts", "harms"))
    with pytest.raises(FaultError, match="harms"):
        read_faults(path.parent)
    path.write_text(FAULTS.replace("another-name", "one-too-many"))
    with pytest.raises(FaultError, match="one-too-many"):
        read_faults(path.parent)
