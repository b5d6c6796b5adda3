"""Software stacks by name, as data with a source for each setting; one that has not been seen gets the default."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from lading.errors import ConfigError
from lading.files import read_toml
from lading.ir.reading import read_as
from lading.ir.stack import Stack

_FOLDER = Path(__file__).parent / "stacks"
DEFAULT = "default"
#: What a file that gives nothing has; only its title has to be there.
_PLAIN = Stack(name="", title="")


def stack_names() -> tuple[str, ...]:
    """Names of the catalog's stacks, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def stack_by_name(name: str) -> Stack:
    """Load a stack of the catalog, or one described by a TOML file; factors it does not give are the default's.

    Raises:
        ConfigError: no such stack, or a key or value of the file is wrong.
    """
    if name in stack_names():
        return _catalog_stack(name)
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"expected a software stack ({', '.join(stack_names())}) or a TOML file, got {name!r}")
    return _read(path, stack_by_name(DEFAULT).in_situ)


@cache
def _catalog_stack(name: str) -> Stack:
    return _read(_FOLDER / f"{name}.toml", {} if name == DEFAULT else _catalog_stack(DEFAULT).in_situ)


def _read(path: Path, in_situ: Mapping[str, float]) -> Stack:
    """Read the stack of a file; ``in_situ`` are the factors that it may leave out."""
    data = read_toml(path, "a software stack")
    known = {field.name for field in dataclasses.fields(Stack)}
    if unknown := sorted(key[:40] for key in set(data) - known):
        raise ConfigError(f"{path}: unknown keys {', '.join(unknown)}; a stack has {', '.join(sorted(known))}")
    table = json.loads(json.dumps(vars(_PLAIN))) | {"name": path.stem, **data}
    try:
        stack: Stack = read_as(Stack, table, str(path), "src/lading/ir/stack.py has the keys of such a file")
        return dataclasses.replace(stack, in_situ={**in_situ, **stack.in_situ})
    except ConfigError as error:
        raise error if str(error).startswith(str(path)) else ConfigError(f"{path}: {error}") from error
