"""Actions print as one line and parse back."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lading.errors import ProgramError
from lading.ir.action import Action, ActionKind, parse_action

ids = st.integers(0, 1 << 40)
names = st.sampled_from(["", "device", "host", "disk", "caller"])
actions = st.builds(
    Action,
    id=ids,
    kind=st.sampled_from(ActionKind),
    stream=st.sampled_from(["compute", "disk_read", "host_write"]),
    op=st.none() | ids,
    storage=st.none() | ids,
    source=names,
    target=names,
    places=st.lists(st.tuples(ids, ids), max_size=3).map(tuple),
    waits=st.lists(ids, max_size=3).map(tuple),
)


@given(actions)
def test_a_line_gives_the_action_back(action: Action) -> None:
    line = str(action)
    assert "\n" not in line
    assert parse_action(line) == action
    assert parse_action(f"  {line}\n") == action


@given(actions, st.data())
def test_a_damaged_line_is_an_action_or_a_program_error(action: Action, data: st.DataObject) -> None:
    line = str(action)
    at = data.draw(st.integers(0, len(line)))
    damaged = line[:at] + data.draw(st.text(max_size=3)) + line[at + data.draw(st.integers(0, 3)) :]
    with suppress(ProgramError):
        assert isinstance(parse_action(damaged), Action)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "ID KIND STREAM"),
        ("0 COMPUTE", "ID KIND STREAM"),
        ("x COMPUTE compute", "ID KIND STREAM"),
        ("0 THINK compute", "ID KIND STREAM"),
        ("0 COMPUTE compute op=x", "integers"),
        ("0 COMPUTE compute op=1 place=3", "keys among .* got \\['place'\\]"),
        ("0 MOVE disk_read at=3", "integers"),
        ("0 MOVE disk_read at=3@4@5", "integers"),
        ("0 MOVE disk_read waits=1,,2", "integers"),
    ],
)
def test_what_is_not_an_action(line: str, why: str) -> None:
    with pytest.raises(ProgramError, match=why):
        parse_action(line)
