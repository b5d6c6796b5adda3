"""The doctor tells what is there from what is not, and never changes anything."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from tests.machines import small_machine
from tests.runs import write_run

from lading import hosts
from lading.catalog.load import save_machine
from lading.cli import doctor_command as doctor
from lading.cli.doctor_command import Finding
from lading.cli.main import main
from lading.config import load_run
from lading.ir.machine import KERNEL_BYTES, Machine
from lading.runtime.host import host_id


def found(folder: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in doctor.doctor(folder)}


def test_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    findings = found(tmp_path)
    assert findings["torch"].found == torch.__version__
    assert findings["memory"].state == "ok"
    assert str(tmp_path) in findings["disk"].found
    assert not list(tmp_path.iterdir())
    assert main(["doctor", "--folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert main(["doctor", "--folder", str(tmp_path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in data] == [line[9:23].strip() for line in text.splitlines()]
    assert all(entry["cost"] for entry in data if entry["state"] != "ok")


def test_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(*names: str) -> None:
        def lookup(name: str) -> str:
            if name in names:
                raise PackageNotFoundError(name)
            return version(name)

        monkeypatch.setattr(doctor, "version", lookup)

    missing("pyarrow", "wandb")
    findings = found(tmp_path)
    assert findings["pyarrow"] == Finding(
        name="pyarrow", state="lacking", found="missing", cost="Parquet is not read: pip install 'lading[data]'"
    )
    missing("highspy")
    assert main(["doctor", "--folder", str(tmp_path)]) == 1
    assert "error: Lading cannot run here: highspy missing (no plan is made" in capsys.readouterr().err
    monkeypatch.setattr(doctor, "version", lambda name: "2.10.1" if name == "torch" else "1.0")
    assert found(tmp_path)["torch"].cost == "Lading needs torch 2.11 or newer"
    assert "cannot be imported in one process" in found(tmp_path)["ortools"].cost
    assert "threads" not in found(tmp_path)  # torch is not asked


def test_a_disk_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(tmp_path / "none")["disk"].state == "bad"
    opened = os.open

    def refuse(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    disk = found(Path(tempfile.gettempdir()))["disk"]
    assert disk.state == "lacking"
    assert "no O_DIRECT" in disk.found


@pytest.mark.parametrize("named", ["", "cache"], ids=["home", "XDG_CACHE_HOME"])
def test_the_probe_of_this_host(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / named) if named else "")
    assert "none of this host" in found(tmp_path)["probe"].found
    cache = tmp_path / (named or ".cache") / "lading"
    cache.mkdir(parents=True)
    path = cache / f"cpu-2-threads-folder-{tmp_path.stat().st_dev}-torch-{torch.__version__}.toml"
    save_machine(small_machine(), path)
    assert "is of another host" in found(tmp_path)["probe"].found
    save_machine(dataclasses.replace(small_machine(), host_id=host_id()), path)
    before = doctor.date

    class Later(before):
        @classmethod
        def today(cls) -> Later:
            return cls(2026, 12, 1)

    monkeypatch.setattr(doctor, "date", Later)
    assert (found(tmp_path)["probe"].state, found(tmp_path)["probe"].found.endswith("11 days old")) == ("ok", True)
    path.write_text(path.read_text().replace("2026-11-20", "2026-01-20"))
    assert "days old" in found(tmp_path)["probe"].found
    assert found(tmp_path)["probe"].state == "lacking"
    path.write_text("broken")
    assert found(tmp_path)["probe"].cost == "delete the file"


@pytest.mark.parametrize("home", ["none", "nowhere to write"])
def test_the_probe_of_a_user_without_a_home_is_kept_with_the_run(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container: measured once, not a traceback, and not measured in vain."""
    (tmp_path / "file").touch()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if home == "none":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # in no list of users
    else:
        monkeypatch.setenv("HOME", str(tmp_path / "file"))
    kept = list[Path]()

    def probed(path: Path, *_: object, **__: object) -> Machine:
        machine = dataclasses.replace(small_machine(), host_id=host_id(), sources={KERNEL_BYTES: "made up"})
        save_machine(machine, path)
        kept.append(path)
        return machine

    monkeypatch.setattr(hosts, "probe_to", probed)
    run = load_run(write_run(tmp_path), ["machine=probe"])
    assert hosts.machine_of(run) == hosts.machine_of(run)
    assert [path.parent for path in kept] == [Path(run.out)]
    assert found(Path(run.out))["probe"].found.startswith(str(kept[0]))
