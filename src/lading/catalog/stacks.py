"""Software stacks by name, as data with a source for each setting; one that has not been seen gets the default."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

from lading.errors import ConfigError
from lading.files import read_toml
from lading.ir.stack import Stack

_FOLDER = Path(__file__).parent / "stacks"
DEFAULT = "default"


def stack_names() -> tuple[str, ...]:
    """Names of the catalog's stacks, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


@cache
def stack_by_name(name: str) -> Stack:
    """A stack of the catalog, or one described by a TOML file; factors it does not give are the default's.

    Raises:
        ConfigError: no such stack, or a key or value of the file is wrong.
    """
    path = _FOLDER / f"{name}.toml" if name in stack_names() else Path(name)
    if not path.is_file():
        raise ConfigError(f"expected a software stack ({', '.join(stack_names())}) or a TOML file, got {name!r}")
    data = read_toml(path, "a software stack")
    known = {field.name for field in dataclasses.fields(Stack)}
    if unknown := sorted(set(data) - known):
        raise ConfigError(f"{path}: unknown keys {', '.join(unknown)}; a stack has {', '.join(sorted(known))}")
    settings: dict[str, Any] = {"name": path.stem, **data}
    if name != DEFAULT:
        settings["in_situ"] = stack_by_name(DEFAULT).in_situ | data.get("in_situ", {})
    for key in ("merges", "adapter_modules", "low_precisions"):
        settings[key] = tuple(settings.get(key, ()))
    return Stack(**settings)
