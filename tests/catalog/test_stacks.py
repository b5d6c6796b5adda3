"""Every stack of the catalog loads; a wrong file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lading.catalog.stacks import DEFAULT, stack_by_name, stack_names
from lading.errors import ConfigError


@pytest.mark.parametrize("name", stack_names())
def test_each_loads(name: str) -> None:
    stack = stack_by_name(name)
    assert stack.name == name
    assert stack.title


def test_there_is_a_default() -> None:
    assert DEFAULT in stack_names()


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="expected a software stack"):
        stack_by_name("no-such-stack")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('title = "t"\nspeed = 3', "unknown keys speed"),
        ("title = ", "expected TOML"),
        ('title = "t"\nfusion = "x"', "fusion"),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "stack.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        stack_by_name(str(path))
