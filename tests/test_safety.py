"""What docs/safety.md says of files: little memory, nothing that a terminal obeys, nothing that can be guessed."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lading.catalog.load import load_machine
from lading.checkpoint.lock import run_lock
from lading.checkpoint.saver import Saver
from lading.checkpoint.staging import StagingMemory
from lading.cli.main import main
from lading.config import DataConfig
from lading.errors import ConfigError, StorageError
from lading.files import CONTROL_CHARACTERS, parse_json, read_toml
from lading.report.lines import fitted, printable
from lading.runtime import kernel_memory, tiers
from lading.runtime.arrays import ArrayDataset
from lading.runtime.probe import scratch_bytes
from lading.runtime.resident import PeakMeter
from lading.runtime.tiers import FileTier
from tests.programs import chain
from tests.test_hostile import PROBLEM

#: Clears a screen, sets a title, goes back to the line's beginning; DEL, C1, and the order of letters turned.
OBEYED = ["\x1b[2J", "\x1b]0;title\x07", "\x00", "\x08", "\x7f", "\x9b2J", "\u202e", "\u2066"]


def config(path: Path, **inputs: str) -> DataConfig:
    return DataConfig(kind="arrays", source=str(path), batch_size=2, inputs=inputs)


@pytest.mark.long
def test_what_a_small_file_unpacks_to_is_not_in_memory_at_once(tmp_path: Path) -> None:
    """80 MiB of zeros in a file of 0.1 are read some rows at a time, and a row of 80 MiB not at all."""
    np.savez_compressed(tmp_path / "many.npz", x=np.zeros((20 << 10, 1 << 10), dtype=np.float32))
    np.savez_compressed(tmp_path / "wide.npz", x=np.zeros((1, 20 << 20), dtype=np.float32))
    meter = PeakMeter()
    for name, rows in (("many", 20 << 10), ("wide", 0)):
        meter.reset()
        before = meter.now_bytes()
        if rows:
            assert len(ArrayDataset(config(tmp_path / f"{name}.npz"), tmp_path / "run", seed=1)) == rows
        else:
            with pytest.raises(ConfigError, match=r"wide\.npz: expected rows of at most .* numpy.savez"):
                ArrayDataset(config(tmp_path / f"{name}.npz"), tmp_path / "run", seed=1)
        assert meter.peak_bytes() - before < 64 << 20
    meter.close()


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_by_rows_and_by_columns_are_read_alike(tmp_path: Path, order: str) -> None:
    values = np.arange(100 * 6, dtype=np.float32).reshape(100, 2, 3)
    np.savez(tmp_path / "data.npz", x=np.asarray(values, order=order), row=np.arange(100))  # type: ignore[call-overload]
    data = ArrayDataset(config(tmp_path / "data.npz"), tmp_path / "run", seed=1)
    for step in range(20):
        batch = data.batch(step, 0)
        assert np.array_equal(batch["x"].numpy(), values[batch["row"].numpy()])


@pytest.mark.parametrize("text", OBEYED)
def test_control_characters_are_no_part_of_names(tmp_path: Path, text: str) -> None:
    assert CONTROL_CHARACTERS.search(text)
    for content in (json.dumps({"name": text}), json.dumps([{text: 1}], ensure_ascii=False)):
        with pytest.raises(ValueError, match=r"control character U\+|Invalid control character"):
            parse_json(content.encode())
    assert parse_json(json.dumps({"name": f"a{text}"}).encode(), controls=True) == {"name": f"a{text}"}
    escaped = "".join(f"\\u{ord(character):04x}" for character in text)
    (tmp_path / "x.toml").write_text(f'name = "{escaped}"\n')
    with pytest.raises(ConfigError, match=r"x\.toml: .*control character U\+"):
        read_toml(tmp_path / "x.toml", "a machine")
    for shown in (printable(text), fitted(f"error: {text}"), fitted(f"{'word ' * 50}{text}", 40)):
        assert not CONTROL_CHARACTERS.search(shown)
        assert "\\x" in shown or "\\u" in shown


def test_other_characters_are(tmp_path: Path) -> None:
    for text in ("Grün, 模型, نموذج", "two\nlines\twide", "\\u001b as it is written", "emoji 🚢", "soft\u00adhyphen"):
        assert parse_json(json.dumps({"name": text}).encode()) == {"name": text}
        assert printable(text) == text
    assert printable("back\rto the beginning") == "back\\rto the beginning"


def test_a_path_in_an_error_does_not_reach_the_terminal_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a\x1b[2Jb"
    folder.mkdir()
    (folder / "run.toml").write_text("x = 1")
    assert main(["train", str(folder / "run.toml")]) == 2
    said = capsys.readouterr().err
    assert "a\\x1b[2Jb/run.toml" in said.replace("\n  ", "")
    assert "\x1b" not in said


@pytest.mark.parametrize("name", ["[/red]", "[link=x]", "[blink]x"])
def test_a_name_in_a_table_is_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    tasks = [{**task, "name": f"{name}{number}", "group": ""} for number, task in enumerate(PROBLEM["tasks"])]
    flows = [{"source": f"{name}0", "targets": [f"{name}1"], "size_bytes": 4}]
    devices = [{"name": name, "memory_bytes": 100}]
    problem = {**PROBLEM, "name": name, "tasks": tasks, "flows": flows, "devices": devices}
    (tmp_path / "problem.json").write_text(json.dumps(problem))
    assert main(["place", "--graph", str(tmp_path / "problem.json")]) == 0
    assert capsys.readouterr().out.count(name) >= 3


def test_a_lock_in_a_shared_folder_is_no_link_to_somewhere_else(tmp_path: Path) -> None:
    """Both locks are emptied and written: of a link that would be the file where it leads."""
    target = tmp_path / "precious"
    target.write_text("precious")
    for name in ("lading.lock", "run.lock"):
        (tmp_path / "shared").mkdir(exist_ok=True)
        (tmp_path / "shared" / name).symlink_to(target)
    with pytest.raises(StorageError, match="cannot use"):
        FileTier(tmp_path / "shared", 4096)
    with pytest.raises(StorageError, match="cannot use"), run_lock(tmp_path / "shared"):
        pass
    assert target.read_text() == "precious"


@pytest.mark.parametrize("has_unnamed", [True, False])
def test_nobody_can_wait_for_the_name_of_a_swap_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_unnamed: bool
) -> None:
    """It has none where the file system has files without a name, and one that nobody can guess elsewhere."""
    opened: list[str] = []
    right = os.open

    def watched(path: Path, flags: int, *args: int, **named: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE and not has_unnamed:
            raise OSError(errno.EOPNOTSUPP, "no files without a name")
        opened.append(str(path))
        return right(path, flags, *args, **named)

    monkeypatch.setattr(tiers.os, "open", watched)
    for _ in range(2):
        FileTier(tmp_path, 4096).close()
    names = [Path(path).name for path in opened if "swap" in path]
    assert len(names) == len(set(names)) == (0 if has_unnamed else 2)
    assert all(re.fullmatch(r"lading-swap-\d+-[0-9a-f]{16}", name) for name in names)
    assert list(tmp_path.iterdir()) == []


def test_a_machine_with_an_escape_in_a_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "machine.toml").write_text('extends = "h100"\nname = "\\u001b[2J"\n')
    with pytest.raises(ConfigError, match=r"machine\.toml: .*'\\x1b\[2J' has the control character U\+001B"):
        load_machine(tmp_path / "machine.toml")


def test_processes_that_are_started_import_nothing_from_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -c`` and ``python -m`` do, before anything else is said: a json.py there would be run."""
    commands: list[list[str]] = []

    def start(command: list[str], *_: object, **__: object) -> None:
        commands.append(command)
        raise OSError("not started")

    monkeypatch.setattr(subprocess, "Popen", start)
    memory = StagingMemory(4096)
    measured_apart = kernel_memory.__dict__["_measured_apart"]
    for begin in (Saver(memory).start, lambda: scratch_bytes(1), lambda: measured_apart(chain(1).graph, 1)):
        with pytest.raises(StorageError):
            begin()
    memory.close()
    assert len(commands) == 3
    for command in commands:
        assert command[:2] == [sys.executable, "-P"]
