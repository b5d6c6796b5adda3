"""Software stacks by name, as data with a source for each setting; one that has not been seen gets the default."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lading.errors import ConfigError, did_you_mean
from lading.files import read_toml
from lading.ir.reading import read_as
from lading.ir.stack import GUESSED, SWITCHES, Stack

_FOLDER = Path(__file__).parent / "stacks"
DEFAULT = "default"
#: What of a stack may be set otherwise.
_SWITCHES = {field.name for field in dataclasses.fields(Stack)} - {"name", "title", "sources", "fitted", "framework"}
#: What a file that gives nothing has; only its title has to be there.
_PLAIN = Stack(name="", title="")


def stack_names() -> tuple[str, ...]:
    """Names of the catalog's stacks, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def stack_by_name(name: str) -> Stack:
    """Load a stack of the catalog, or one described by a TOML file; factors it does not give are the default's.

    Args:
        name: Name or path; switches set otherwise follow it, as in "megatron-core,attention=flash2,hidden.tp=0.6".
    Raises:
        ConfigError: no such stack or switch, or a key or value of the file is wrong.
    """
    if name in stack_names():
        return _catalog_stack(name)
    path = Path(name)
    if "," in name and not path.is_file():
        base, *settings = name.split(",")
        return with_switches(stack_by_name(base), settings)
    if not path.is_file():
        raise ConfigError(f"expected a software stack ({', '.join(stack_names())}) or a TOML file, got {name!r}")
    return _read(path, stack_by_name(DEFAULT).in_situ)


def evidence_on(stack: Stack, architecture: str) -> str:
    """How software is known on an architecture: FITTED, SWITCHES or GUESSED.

    Switches are known by name where kernels are the same for all software. On GPUs on which no step of any software
    was seen, its libraries are others (ROCm's products, attention and collectives), so there it is guessed.
    """
    evidence = stack.evidence_on(architecture)
    return (
        GUESSED
        if evidence == SWITCHES and architecture != "cpu" and architecture not in _fitted_architectures()
        else evidence
    )


@cache
def _fitted_architectures() -> frozenset[str]:
    return frozenset(architecture for name in stack_names() for architecture in stack_by_name(name).fitted)


@cache
def _catalog_stack(name: str) -> Stack:
    return _read(_FOLDER / f"{name}.toml", {} if name == DEFAULT else _catalog_stack(DEFAULT).in_situ)


def _read(path: Path, in_situ: Mapping[str, float]) -> Stack:
    """Read the stack of a file; ``in_situ`` are the factors that it may leave out."""
    data = _read_with_base(path)
    known_keys = {field.name for field in dataclasses.fields(Stack)}
    if unknown := sorted(key[:40] for key in set(data) - known_keys):
        raise ConfigError(f"{path}: unknown keys {', '.join(unknown)}; a stack has {', '.join(sorted(known_keys))}")
    if not data:
        raise ConfigError(
            f"{path}: expected switches of software, such as title and fusion, got an empty file; write it again with "
            "lading probe --software, or begin it with like = and the name of a stack"
        )
    table = json.loads(json.dumps(vars(_PLAIN))) | {"name": path.stem, **data}
    try:
        stack: Stack = read_as(Stack, table, str(path), "src/lading/ir/stack.py has the keys of such a file")
        return dataclasses.replace(stack, in_situ={**in_situ, **stack.in_situ})
    except ConfigError as error:
        raise error if str(error).startswith(str(path)) else ConfigError(f"{path}: {error}") from error


def with_switches(stack: Stack, settings: Sequence[str]) -> Stack:
    """The stack with switches set otherwise, each "KEY=VALUE"; of a table, such as ``hidden``, "hidden.tp=0.6";
    of a list, such as ``unfused``, "unfused=gelu+rope".

    Raises:
        ConfigError: no such switch, or no such value of it.
    """
    table: dict[str, Any] = json.loads(json.dumps(vars(stack)))
    names = [setting.strip().partition("=")[0] for setting in settings]
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise ConfigError(f"software {stack.name}: expected {twice[0]!r:.60} once, got it twice; leave one out")
    for setting in settings:
        name, equals, words = setting.strip().partition("=")
        key, dot, inner = name.partition(".")
        if not equals or key not in _SWITCHES or bool(dot) != isinstance(table[key], dict):
            hint = did_you_mean(key, _SWITCHES)
            raise ConfigError(f"software {stack.name}: expected a switch as KEY=VALUE, got {setting!r:.60}{hint}")
        value = _value(words)
        if isinstance(table[key], list) and isinstance(value, str):  # words without quotes, such as gelu+rope
            value = [word for word in value.strip("[]").split("+") if word]
        table[key] = {**table[key], inner: value} if dot else value
        table["sources"][key] = "set by the user"
    table["name"] = ",".join((stack.name, *(setting.strip() for setting in settings)))
    changed: Stack = read_as(Stack, table, f"software {stack.name}", f"its switches are {', '.join(sorted(_SWITCHES))}")
    return changed


def _value(words: str) -> object:
    """A value as TOML has it; words without quotes are a string."""
    try:
        return tomllib.loads(f"value = {words}")["value"]
    except tomllib.TOMLDecodeError:
        return words


def _read_with_base(path: Path) -> dict[str, Any]:
    """Table of a stack's file on top of the one that it is ``like``."""
    data = read_toml(path, "a software stack")
    like = data.pop("like", None)
    if like is None:
        return data
    base = _FOLDER / f"{like}.toml"
    if like not in stack_names() or base == path:
        raise ConfigError(f"{path}: like: expected a software stack ({', '.join(stack_names())}), got {like!r}")
    below = _read_with_base(base)
    for table in ("sources", "in_situ"):
        data[table] = {**below.get(table, {}), **data.get(table, {})}
    return {**below, **data}
