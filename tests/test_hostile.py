"""Every kind of file that Lading reads, damaged in a few hundred ways: a result, or an error that names the file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tools.validate.rows import read_rows

from lading.catalog.fleets import FLEETS, load_fleet
from lading.catalog.load import load_machine, machine_to_toml
from lading.catalog.stacks import stack_by_name
from lading.checkpoint.manifest import CHECKPOINT_FORMAT, manifest_bytes
from lading.checkpoint.state import tensor_source
from lading.checkpoint.store import save_checkpoint
from lading.config import load_run
from lading.errors import LadingError
from lading.ir.job_timeline import JobTimeline
from lading.ir.plan import Plan
from lading.ir.stack import Stack
from lading.ir.timeline import Timeline
from lading.planner.placement.from_file import read_problem
from lading.report.metrics import read_metrics, read_steps
from lading.software_profile import stack_to_toml
from tests.fuzz import damaged_bytes, damaged_document
from tests.machines import small_machine
from tests.meanings import read_checkpoint
from tests.plans import cluster_plan, placed_plan, some_plan
from tests.rank_steps import job_of, replica
from tests.report.synthetic import run as synthetic_run
from tests.runs import RUN

FEW = settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
ROOT = Path(__file__).parents[1]
PROBLEM = {
    "name": "p", "micro_batches": 1, "links": [],
    "devices": [{"name": "a", "memory_bytes": 100}],
    "tasks": [
        {"name": n, "seconds": [1.0], "resident_bytes": 1, "kept_bytes": 1, "working_bytes": 1, "group": n,
         "backward": False, "once": False}
        for n in ("x", "y")
    ],
    "flows": [{"source": "x", "targets": ["y"], "size_bytes": 4}],
}  # fmt: skip
STEP = {"step": 0, "loss": 1.5, "step_s": 0.25, "memory_bytes": 100}


@cache
def row() -> str:
    return (ROOT / "benchmarks" / "validation" / "measurements.jsonl").read_text().splitlines()[0] + "\n"


@cache
def timeline(folder: Path) -> str:
    synthetic_run(blocks=1)["measured"].save(folder / "whole.json")
    return (folder / "whole.json").read_text()


def ranks(folder: Path) -> str:
    job_of(replica(0, 1.0, 4.0), replica(1, 2.0, 3.5, start_s=0.5)).save(folder / "whole.json")
    return (folder / "whole.json").read_text()


def saved(plan: Any, folder: Path) -> str:
    plan.save(folder / "whole.json")
    return (folder / "whole.json").read_text()


def toml(data: Any) -> str:
    """Parsed JSON as TOML, as far as it can be: what it has no word for is left out."""
    if isinstance(data, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in data.items() if v is not None) + "}"
    if isinstance(data, list):
        return "[" + ", ".join(toml(v) for v in data if v is not None) + "]"
    return json.dumps(data).replace("Infinity", "inf").replace("NaN", "nan")


def toml_file(data: Any) -> str:
    table = data if isinstance(data, dict) else {"x": data}
    return "".join(f"{json.dumps(key)} = {toml(value)}\n" for key, value in table.items() if value is not None)


def profiled() -> Stack:
    """Software as a profile writes it."""
    factors = {"cpu.products": 1.1, "cpu.loss": 0.9, "cpu.all_reduce": 1.4}
    base = stack_by_name("torch-eager-cpu")
    engine = replace(base, gradient_copies=1.2, fresh_bytes_per_s={"1": 2.6e9, "2": 1.9e9})
    return replace(engine, launch_s=1e-5, step_s=2e-4, fitted=("cpu",), in_situ=factors)


def manifest(folder: Path) -> str:
    saved = save_checkpoint(folder, 1, [tensor_source("w", torch.ones(3))], {"loss": 1.5}, keep=1)
    return (saved / "manifest.json").read_text()


def open_altered(path: Path) -> None:
    """Open and read a checkpoint whose manifest fits its checksum again, as one who means it would make it."""
    saved, content = path.parent / "step-00000001", b"" if path.is_dir() else path.read_bytes()
    try:
        data = json.loads(content)
        if {key: data[key] for key in ("kind", "format")} != {"kind": "lading checkpoint", "format": CHECKPOINT_FORMAT}:
            raise ValueError("another kind of file")
        (saved / "manifest.json").write_bytes(manifest_bytes(data["body"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        (saved / "manifest.json").write_bytes(content)
    read_checkpoint(saved)


#: Kind of file -> its name, a whole one, and what reads it.
KINDS: dict[str, tuple[str, Callable[[Path], str], Callable[[Path], object]]] = {
    "run": ("run.toml", lambda folder: RUN.format(root=folder), load_run),
    "machine": ("machine.toml", lambda _: machine_to_toml(small_machine()), load_machine),
    "devices": ("two.toml", lambda _: (FLEETS / "laptop-and-server.toml").read_text(), load_fleet),
    "stack": ("stack.toml", lambda _: 'title = "t"\nfusion = "fused"\nlaunch_s = 1e-6\n[in_situ]\nhopper = 0.9\n',
              lambda path: stack_by_name(str(path))),
    "software": ("mine.toml", lambda _: stack_to_toml(profiled()), lambda path: stack_by_name(str(path))),
    "plan": ("plan.json", lambda folder: saved(some_plan(), folder), Plan.load),
    "cluster plan": ("plan.json", lambda folder: saved(cluster_plan(), folder), Plan.load),
    "checkpoint": ("manifest.json", manifest, open_altered),
    "placement": ("placement.json", lambda folder: saved(placed_plan(), folder), Plan.load),
    "problem": ("problem.json", lambda _: json.dumps(PROBLEM), read_problem),
    "timeline": ("measured.json", timeline, Timeline.load),
    "ranks": ("ranks.json", ranks, JobTimeline.load),
    "metrics": ("metrics.jsonl", lambda _: json.dumps(STEP) + "\n",
                lambda path: (read_metrics(path), read_steps(path))),
    "rows": ("rows.jsonl", lambda _: row(), lambda path: read_rows([path])),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


def said(path: Path, content: bytes, read: Callable[[Path], object]) -> str:
    """What the error says that ``read`` raises; "" where it raises none."""
    path.write_bytes(content)
    text = ""
    try:
        read(path)
    except LadingError as error:
        text = str(error)
    assert len(text.encode()) < 2000  # and a terminal can show it
    assert not text or path.name in text or "state.safetensors" in text
    return text


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_is_read(kind: str, folder: Path) -> None:
    name, whole, read = KINDS[kind]
    assert said(folder / name, whole(folder).encode(), read) == ""


NOTHING = [
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b"x = " + b"[" * 100_000,
    b"\x00",
    b'{"a": ',
    b"null",
    b"3",
    b"1" * 5000,
    b'"\\ud800"',
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_something_else(kind: str, folder: Path) -> None:
    name, _, read = KINDS[kind]
    for content in (*NOTHING, *(text + b"\n" for text in NOTHING)):
        if kind == "metrics" and not content.endswith(b"\n"):
            continue  # a line that is still being written
        assert said(folder / name, content, read), content[:20]
    (folder / "folder").mkdir(exist_ok=True)
    with pytest.raises((LadingError, OSError)) as caught:
        read(folder / "folder")
    assert isinstance(caught.value, LadingError)


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(data=st.data())
def test_damaged_bytes(kind: str, folder: Path, data: st.DataObject) -> None:
    name, whole, read = KINDS[kind]
    said(folder / name, damaged_bytes(data, whole(folder).encode()), read)


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(data=st.data())
def test_a_damaged_document(kind: str, folder: Path, data: st.DataObject) -> None:
    name, whole, read = KINDS[kind]
    is_toml = name.endswith(".toml")
    known = tomllib.loads(whole(folder)) if is_toml else json.loads(whole(folder))
    if kind == "timeline":
        known = {key: value[:3] if isinstance(value, list) else value for key, value in known.items()}
    changed = damaged_document(data, json.loads(json.dumps(known, default=str)))
    said(folder / name, ((toml_file(changed) if is_toml else json.dumps(changed)) + "\n").encode(), read)
