"""Every file that is read, damaged: Lading's own error that names the file, or what it says; nothing is executed."""

from __future__ import annotations

import _pickle
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import BytesIO, StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lading.catalog.load import load_machine, machine_from_dict, machine_to_toml
from lading.cli.main import main
from lading.config import DataConfig, load_run, run_from_dict, run_to_dict
from lading.errors import ConfigError, LadingError
from lading.ir.plan import Plan
from lading.ir.timeline import Timeline
from lading.memory.restore import program_of
from lading.report.metrics import read_metrics, truncate_after
from lading.run import Prepared, prepare_plan
from lading.runtime.arrays import ArrayDataset
from lading.summary import finish_run
from tests.fuzz import Watch, damaged_bytes, damaged_document
from tests.runs import write_run

T = TypeVar("T")
FUZZ = settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
FEW = settings(FUZZ, max_examples=20)


@pytest.fixture(scope="module", autouse=True)
def short_search() -> None:
    """Search as for users, so that the documents which are damaged have something of every kind."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended."""
    path = write_run(tmp_path_factory.mktemp("fuzz"))
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        assert main(["train", str(path), "optimization.steps=4", "optimization.warmup_steps=1"]) == 0
    return path.parent / "out"


@pytest.fixture(scope="module")
def watch() -> Watch:
    made = Watch()
    sys.addaudithook(made.audit)  # for good, as Python has it; off but for the tests here
    return made


@pytest.fixture(autouse=True)
def _nothing_is_executed(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler"):
        monkeypatch.setattr(pickle, name, watch.refuse)
    monkeypatch.setattr(torch, "load", watch.refuse)
    watch.on = True
    yield
    watch.on = False
    assert watch.seen == []  # nor was it tried and the refusal caught


CALL = pickle.dumps(os.getcwd)


@pytest.mark.parametrize(
    "run",
    [
        lambda: pickle.loads(CALL),
        lambda: pickle.load(BytesIO(CALL)),
        lambda: pickle.Unpickler(BytesIO(CALL)).load(),
        lambda: _pickle.loads(CALL),
        lambda: torch.load(BytesIO(CALL)),
        lambda: os.system("true"),
        lambda: subprocess.run(["true"], check=True),
    ],
    ids=["loads", "load", "Unpickler", "C", "torch.load", "system", "subprocess"],
)
def test_the_watch_sees_what_is_executed(watch: Watch, out: Path, run: Callable[[], object]) -> None:
    """A reader that unpickles, or starts something, fails the tests below."""
    with pytest.raises(AssertionError, match="executed"):
        check(out / "plan.json", CALL, run)
    assert len(watch.seen) == 1
    watch.seen.clear()


def check(file: Path, changed: bytes, read: Callable[[], object]) -> None:
    """``read`` with ``file`` damaged: it gives a result, or an error that names the file."""
    original = file.read_bytes()
    try:
        file.write_bytes(changed)
        refused(file.name, read)
    finally:
        file.write_bytes(original)


def refused(name: str, read: Callable[[], T]) -> T | None:
    """What ``read`` gives; None if it raises a ConfigError of moderate length that says ``name``."""
    caught: LadingError | None = None
    try:
        return read()
    except LadingError as error:
        caught = error
    assert isinstance(caught, ConfigError)
    assert name in str(caught)
    assert len(str(caught)) < 2000
    return None


@FUZZ
@given(data=st.data())
def test_run_toml(out: Path, data: st.DataObject) -> None:
    file = out.parent / "run.toml"
    check(file, damaged_bytes(data, file.read_bytes()), lambda: load_run(file))


@FUZZ
@given(data=st.data())
def test_run(out: Path, data: st.DataObject) -> None:
    known = run_to_dict(load_run(out.parent / "run.toml"))
    changed = damaged_document(data, known)
    run = refused("run.toml", lambda: run_from_dict(changed, "run.toml"))
    assert run is None or run_from_dict(run_to_dict(run)) == run


@FUZZ
@given(data=st.data())
def test_machine_toml(out: Path, data: st.DataObject) -> None:
    file = out.parent / "machine.toml"
    check(file, damaged_bytes(data, file.read_bytes()), lambda: load_machine(file))


@FUZZ
@given(data=st.data())
def test_machine(out: Path, data: st.DataObject) -> None:
    known = tomllib.loads((out.parent / "machine.toml").read_text())
    changed = damaged_document(data, known)
    machine = refused("machine.toml", lambda: machine_from_dict(changed, "machine.toml"))
    assert machine is None or machine_from_dict(tomllib.loads(machine_to_toml(machine)), "again") == machine


@FUZZ
@given(data=st.data())
def test_plan_json_bytes(out: Path, data: st.DataObject) -> None:
    file = out / "plan.json"
    check(file, damaged_bytes(data, file.read_bytes()), lambda: Plan.load(file))


@pytest.fixture(scope="module")
def prepared(out: Path) -> Prepared:
    return prepare_plan(Plan.load(out / "plan.json"))


@FEW
@given(data=st.data())
def test_plan(out: Path, prepared: Prepared, data: st.DataObject) -> None:
    """A plan whose numbers were changed is refused, or lowers to the program that it names."""
    known = json.loads((out / "plan.json").read_text())
    changed = damaged_document(data, {key: known[key] for key in known.keys() - {"request"}})
    (out / "other.json").write_text(json.dumps({**known, **changed}))
    plan = refused("other.json", lambda: Plan.load(out / "other.json"))
    if plan is None:
        return
    with suppress(LadingError):
        program = program_of(plan, prepared.step.captured)
        assert program.fingerprint == prepared.program.fingerprint


@FUZZ
@given(data=st.data())
def test_metrics(out: Path, data: st.DataObject) -> None:
    file = out / "metrics.jsonl"
    check(file, damaged_bytes(data, file.read_bytes()), lambda: (read_metrics(file), truncate_after(file, 2)))


@pytest.fixture(scope="module")
def documents(out: Path) -> dict[str, Any]:
    """What the files that a report is made from say, before anything touches them."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {"metrics.jsonl": records, "measured.json": json.loads((out / "measured.json").read_text())}


@FEW
@given(data=st.data(), name=st.sampled_from(["metrics.jsonl", "measured.json"]))
def test_report_of_damaged_files(
    out: Path, prepared: Prepared, documents: dict[str, Any], data: st.DataObject, name: str
) -> None:
    changed = damaged_document(data, documents[name])
    lines = [json.dumps(record) for record in changed] if name == "metrics.jsonl" else [json.dumps(changed)]
    check(out / name, "".join(f"{line}\n" for line in lines).encode(), lambda: finish_run(prepared, None))


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same columns in every format."""
    safetensors, arrow = pytest.importorskip("safetensors.numpy"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path_factory.mktemp("arrays")
    x, y = np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(4, dtype=np.int64)
    np.savez_compressed(folder / "data.npz", x=x, y=y)
    safetensors.save_file({"x": x, "y": y}, folder / "data.safetensors")
    arrow.write_table(__import__("pyarrow").table({"x": x.tolist(), "y": y}), folder / "data.parquet")
    return folder


@FUZZ
@given(data=st.data(), ending=st.sampled_from(["npz", "safetensors", "parquet"]), said=st.booleans())
def test_arrays(arrays: Path, data: st.DataObject, ending: str, said: bool) -> None:
    file = arrays / f"data.{ending}"
    inputs = {"x": "float32 3", "y": "int64"} if said else {}
    config = DataConfig(kind="arrays", source=str(file), batch_size=2, inputs=inputs)
    with TemporaryDirectory(dir=arrays) as folder:
        changed = damaged_bytes(data, file.read_bytes())
        check(file, changed, lambda: ArrayDataset(config, Path(folder), seed=1).batch(0, 0))


@FUZZ
@given(data=st.data())
def test_timeline(out: Path, data: st.DataObject) -> None:
    file = out / "measured.json"
    if data.draw(st.booleans()):
        check(file, damaged_bytes(data, file.read_bytes()), lambda: Timeline.load(file))
        return
    known = json.loads(file.read_text())
    known = {**known, "events": known["events"][:3], "memory": known["memory"][:3], "resident": known["resident"][:3]}
    known["labels"] = known["labels"][:3]
    changed = json.dumps(damaged_document(data, known)).encode()
    check(file, changed, lambda: dataclasses.replace(Timeline.load(file)).duration_s)
