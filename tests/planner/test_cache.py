"""The cache of plans: a hit is the plan that would be made, all it depends on is in its name, damage is said."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.captured import captured_step
from tests.machines import small_machine
from tests.planner.steps import bytes_machine, tiny

from lading.errors import LadingError
from lading.ir.machine import Machine
from lading.ir.reporting import Silent
from lading.planner import cache
from lading.planner.api import Planned, make_plan
from lading.planner.cache import cache_folder, cached_plan


class Notes(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def ask(folder: Path | None, machine: Machine | None = None, **asked: Any) -> tuple[Planned, list[str]]:
    """A plan of a small step by way of the cache, made without a search if nothing else is asked, and what was said."""
    notes, graph = Notes(), asked.pop("graph", captured_step("gpt", num_layers=1))
    asked = {"budget": "2MB", "policy": "checkpoint-every-block"} | asked
    return cached_plan(graph, machine or small_machine(), folder=folder, progress=notes, **asked), notes.said


def bytes_of(planned: Planned) -> str:
    return json.dumps(dataclasses.asdict(planned.plan), indent=1)


def refuse(*_: object, **__: object) -> Planned:
    pytest.fail("planned")


@pytest.mark.long
def test_a_hit_equals_the_plan_that_would_be_made_and_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: dict[str, Any] = {"policy": "residency", "budget": "80%", "expansion": {"clip_norm": 0.0}}
    searched |= {"graph": tiny(0, 4).graph, "machine": bytes_machine()}
    made, said = ask(tmp_path, **searched)
    assert said == []
    monkeypatch.setattr(cache, "make_plan", refuse)
    again, said = ask(tmp_path, **searched)
    assert len(said) == 1
    assert "from the cache" in said[0]
    assert made.plan.choices.gaps
    assert bytes_of(again) == bytes_of(made)
    assert again.program.text() == made.program.text()
    assert again.predicted == made.predicted
    assert again.program.graph == made.program.graph
    assert again.plan.predictions.keep_all_bytes == made.plan.predictions.keep_all_bytes


def test_without_a_folder_nothing_is_kept() -> None:
    assert bytes_of(ask(None)[0]) == bytes_of(ask(None)[0])
    assert ask(None)[1] == []


def test_whatever_a_plan_depends_on_is_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(tmp_path)
    others: list[dict[str, Any]] = [
        {"budget": "3MB"},
        {"budgets": {"disk": "1GB"}},
        {"policy": "keep-all"},
        {"expansion": {"clip_norm": 1.0}},
        {"workspace_bytes": (64,) * len(captured_step("gpt", num_layers=1).ops)},
        {"machine": small_machine(overhead_bytes=1)},
    ]
    for count, asked in enumerate(others, 2):
        assert ask(tmp_path, **asked)[1] == []
        assert len(list(tmp_path.iterdir())) == count
    monkeypatch.setattr(cache, "_source_hash", lambda: "another")
    assert ask(tmp_path)[1] == []
    assert len(list(tmp_path.iterdir())) == len(others) + 2


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_file_is_said_and_replaced(tmp_path: Path, damage: str) -> None:
    first, _ = ask(tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    changed = whole.replace(b'"step_s": 0.', b'"step_s": 1.', 1)
    assert changed != whole
    path.write_bytes({"cut": whole[:-100], "changed": changed, "empty": b""}[damage])
    again, said = ask(tmp_path)
    assert len(said) == 1
    assert "planning anew" in said[0]
    assert {"cut": "in JSON", "changed": "changed or damaged", "empty": "in JSON"}[damage] in said[0]
    assert path.read_bytes() == whole
    assert again.plan == first.plan


def test_a_plan_whose_program_is_refused_is_said_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(tmp_path)

    def refused(*_: object, **__: object) -> None:
        raise LadingError("another program")

    monkeypatch.setattr(cache, "restore_program", refused)
    assert "another program" in ask(tmp_path)[1][0]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made, said = ask(tmp_path / "file" / "plans")
    assert made.plan.choices.gaps
    assert "not kept" in said[0]


def test_what_was_used_longest_ago_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(tmp_path)
    (first,) = tmp_path.iterdir()
    ask(tmp_path, budget="3MB")
    (second,) = set(tmp_path.iterdir()) - {first}
    assert ask(tmp_path)[1]  # uses the first again
    monkeypatch.setattr(cache, "FOLDER_BYTES", int(2.5 * first.stat().st_size))
    ask(tmp_path, budget="4MB")
    assert first.exists()
    assert not second.exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_the_plan_of_a_function_is_not_kept(tmp_path: Path) -> None:
    def mine(*_: object) -> dict[Any, Any]:
        return {}

    made, said = ask(tmp_path, policy=mine, budget="100%")
    assert not said
    assert made.plan.request.policy == "mine"
    assert not list(tmp_path.iterdir())
    assert bytes_of(made) == bytes_of(
        make_plan(captured_step("gpt", num_layers=1), small_machine(), policy=mine, budget="100%")
    )


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lading" / "plans"
    for other in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", other)
        assert cache_folder() == Path.home() / ".cache" / "lading" / "plans"


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # as containers give, in no list of users
    assert cache_folder() is None


def test_a_cache_that_can_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = ask(tmp_path)

    def denied(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", denied)
        again, (said,) = ask(tmp_path)
    assert "from the cache" in said
    assert bytes_of(again) == bytes_of(made)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", denied)
        again, said = ask(tmp_path)
    assert "planning anew: [Errno 13] Permission denied" in said[0]
    assert bytes_of(again) == bytes_of(made)
    monkeypatch.setattr(Path, "iterdir", denied)
    _, (said,) = ask(tmp_path, budget="3MB")
    assert "not kept in the cache: " in said
    assert "Permission denied" in said
