"""Damage to files: bytes changed anywhere, and documents whose parsed form is changed in one place."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

#: What may stand where something else was expected.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1 << 63, 1 << 200, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", "../../etc/passwd", "os:system", "__import__('os')", "%s", "nan", "1e999", "50%"]),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


def damaged_bytes(data: st.DataObject, original: bytes) -> bytes:
    """``original`` with up to 8 bytes in a row replaced, removed or added, or cut short."""
    start = data.draw(st.integers(0, len(original)))
    if data.draw(st.integers(0, 9)) == 0:
        return original[:start]
    changed = bytearray(original)
    changed[start : start + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    return bytes(changed)


def damaged_document(data: st.DataObject, original: Any, *, values: st.SearchStrategy[Any] = VALUES) -> Any:
    """A copy of parsed JSON or TOML with one value replaced, removed, or put under another key."""
    document = copy.deepcopy(original)
    parent, key = data.draw(st.sampled_from(_places(document)))
    action = data.draw(st.sampled_from(["replace", "replace", "remove", "rename"]))
    if action == "replace":
        parent[key] = data.draw(values)
    elif action == "remove":
        del parent[key]
    elif isinstance(parent, dict):
        parent[data.draw(st.text(max_size=6))] = parent.pop(key)
    else:
        parent.insert(key, data.draw(values))
    return document


def _places(node: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a document, containers before what they hold."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
    found: list[tuple[Any, Any]] = []
    for key, value in items:
        found.append((node, key))
        if isinstance(value, (dict, list)):
            found += _places(value)
    return found


class Watch:
    """Refuses, while it is on, to start a program and to unpickle anything."""

    #: What Python audits when a program is started, and when a pickle names what it wants to have or call.
    EVENTS = frozenset({"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class"})

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []

    def refuse(self, *args: object, **_: object) -> None:
        self.seen.append(str(args))
        raise AssertionError(f"executed {args}")

    def audit(self, event: str, args: tuple[object, ...]) -> None:
        if self.on and event in self.EVENTS:
            self.refuse(event, *args)
