"""Plans round-trip through JSON, and what is not a plan is refused by name."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plans import some_plan

from lading.errors import ConfigError
from lading.ir.plan import Plan, plan_from_dict


def as_json(plan: Plan, folder: Path) -> dict[str, Any]:
    """What ``save`` writes."""
    plan.save(folder / "plan.json")
    return json.loads((folder / "plan.json").read_text())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return as_json(some_plan(), tmp_path_factory.mktemp("plan"))


@pytest.mark.parametrize("changes", [{}, {"run": None}, {"gaps": (), "policies": (), "assumptions": ()}])
def test_round_trip(tmp_path: Path, changes: dict[str, Any]) -> None:
    plan = some_plan(**changes)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_gap() -> None:
    assert some_plan().gap == pytest.approx(0.25)
    assert some_plan(lower_bound_s=0.0).gap == 0.0


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("choices",), 3, "choices"),
        (("choices", "gaps"), {"storage": 1}, "choices.gaps"),
        (("choices", "gaps", 1), "recompute", "choices.gaps[1]"),
        (("choices", "gaps", 1, "storage"), "4", "choices.gaps[1].storage"),
        (("choices", "gaps", 1, "start"), 1.0, "choices.gaps[1].start"),
        (("choices", "gaps", 0, "option"), "attic", "choices.gaps[0].option"),
        (("choices", "gaps", 0, "option"), ["disk"], "choices.gaps[0].option"),
        (("choices", "deferred"), None, "choices.deferred"),
        (("request", "budgets", "device"), "10", "request.budgets.device"),
        (("request", "budgets", "device"), True, "request.budgets.device"),
        (("request", "budgets"), [1], "request.budgets"),
        (("request", "settings", "clip_norm"), None, "request.settings.clip_norm"),
        (("request", "machine_table"), None, "request.machine_table"),
        (("request", "run"), [], "request.run"),
        (("predictions", "step_s"), "fast", "predictions.step_s"),
        (("predictions", "policies", 0, "fits"), 1, "predictions.policies[0].fits"),
        (("predictions", "policies", 0), {}, "predictions.policies[0]"),
        (("predictions", "actions", 0), 1.5, "predictions.actions[0]"),
        (("program",), "0 COMPUTE compute op=0", "program"),
        (("program", 1), None, "program[1]"),
        (("assumptions",), "none", "assumptions"),
        (("assumptions", 0), 7, "assumptions[0]"),
        (("version",), 1, "version"),
        (("format",), 99, "format"),
        (("format",), True, "format"),
        (("typo",), 1, "typo"),
    ],
)
def test_a_wrong_field_is_named(data: dict[str, Any], path: tuple[Any, ...], value: Any, named: str) -> None:
    broken = json.loads(json.dumps(data))
    place = broken
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ConfigError) as error:
        plan_from_dict(broken, "plan.json")
    assert named in str(error.value)
    assert "plan again" in str(error.value)
    assert str(error.value).startswith("plan.json")


@pytest.mark.parametrize("name", ["request", "program", "choices", "predictions", "format"])
def test_a_missing_field_is_named(data: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        plan_from_dict({key: value for key, value in data.items() if key != name}, "plan.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("program", 1), "0 COMPUTE compute op=1"),
        (("choices", "gaps"), []),
        (("choices", "deferred"), 0),
        (("choices", "hosted"), []),
        (("request", "budgets", "device"), 11),
        (("request", "settings", "clip_norm"), 1.0),
        (("predictions", "step_s"), 0.25),
        (("fingerprint",), "0" * 16),
    ],
)
def test_a_plan_that_was_changed_is_refused(data: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    changed = json.loads(json.dumps(data))
    place = changed
    for key in path[:-1]:
        place = place[key]
    assert place[path[-1]] != value
    place[path[-1]] = value
    with pytest.raises(ConfigError, match=r"plan\.json: expected a plan as it was saved, .* plan again"):
        plan_from_dict(changed, "plan.json")


def test_the_run_of_a_plan_may_be_changed(data: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(data))
    changed["request"]["run"]["optimization"] = {"steps": 20}
    loaded = plan_from_dict(changed, "plan.json")
    assert loaded.request.run == changed["request"]["run"]
    assert loaded.fingerprint == plan_from_dict(data, "plan.json").fingerprint


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in items for found in _places(item, (*path, key)))]


@pytest.mark.long
@given(st.data(), json_values)
@settings(max_examples=300)
def test_any_other_value_anywhere_is_a_plan_or_a_config_error(
    data: dict[str, Any], draw: st.DataObject, value: Any
) -> None:
    broken = {"": json.loads(json.dumps(data))}
    place: Any = broken
    path = ("", *draw.draw(st.sampled_from(_places(data))))
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with suppress(ConfigError):
        plan = plan_from_dict(broken[""], "plan.json")
        assert isinstance(hash(plan.choices.gaps), int)
        assert isinstance(plan.gap, float)


@pytest.mark.long
@given(cut=st.integers(0, 2000), put=st.binary(max_size=4))
@settings(max_examples=150)
def test_a_damaged_file_is_a_plan_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, cut: int, put: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.json"
    some_plan().save(file)
    whole = file.read_bytes()
    file.write_bytes(whole[: cut % len(whole)] + put + whole[cut % len(whole) + len(put) :])
    with suppress(ConfigError):
        assert isinstance(Plan.load(file), Plan)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "NaN", '{"format": NaN}', "[" * 100_000])
def test_what_is_not_a_plan(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match=r"plan\.json"):
        Plan.load(tmp_path / "plan.json")


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lading plan"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(ConfigError):
        Plan.load(tmp_path)
