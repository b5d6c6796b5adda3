"""Parts of pages that are written from the code: commands from their parsers, keys from the classes they fill.

python docs/reference.py commands      # prints one of them
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from inspect import getdoc
from io import StringIO
from types import MappingProxyType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from lading.cli.main import main
from lading.config import RunConfig
from lading.grouping import Matrices
from lading.optim.registry import DEFAULT, rule_class, rule_names
from lading.optim.rule import ParameterRule


def commands() -> str:
    """Write what ``lading --help`` and the help of every command print."""
    overview = _help("--help")
    names = re.findall(r"^  (\w+) ", overview.partition("commands:")[2], re.MULTILINE)
    pages = [f"## lading {name}\n\n```text\n{_help(name, '--help')}\n```" for name in names]
    return "\n\n".join([f"```text\n{overview}\n```", *pages])


def _help(*arguments: str) -> str:
    """Text that a command prints for ``--help``, at 100 columns and without colours."""
    os.environ.update(COLUMNS="100", NO_COLOR="1")
    said = StringIO()
    with redirect_stdout(said):
        try:
            main(arguments)
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"lading {' '.join(arguments)} failed: {said.getvalue()}") from end
    return "\n".join(line.rstrip() for line in said.getvalue().strip().splitlines())


def keys() -> str:
    """Write a table of keys for each table of a run's file: type, default and meaning, as the classes say them."""
    return "\n\n".join(f"## {title}\n\n{table}" for title, table in _tables(RunConfig, ""))


def _tables(cls: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the title and the table of a class of settings, then those of the tables in it."""
    if cls is ParameterRule:
        yield f"`[{prefix[:-1]}]`", f"`rule` is {DEFAULT} if not given.\n\n" + _rules(rule_names(matrices=False))
        return
    hints, meanings = get_type_hints(cls), _attributes(cls)
    inner: dict[str, Any] = {}
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        for kind in get_args(hints[field.name]) or (hints[field.name],):
            if dataclasses.is_dataclass(kind) or kind is ParameterRule:
                inner[field.name] = kind
        meaning = meanings.get(field.name) or f"{_first_line(inner[field.name])} See below."
        cells = [f"`{field.name}`", _words(hints[field.name]), _default(field), meaning]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if cls is Matrices:
        rows += ["", "The rules and their `settings`:", "", _rules(rule_names(parameters=False))]
    yield f"`[{prefix[:-1]}]`" if prefix else "At the top of the file", "\n".join(rows)
    for name, kind in inner.items():
        yield from _tables(kind, f"{prefix}{name}.")


def _rules(names: tuple[str, ...]) -> str:
    """Write a table of rules: each with its settings and their defaults."""
    rows = ["| `rule` | settings and their defaults | what it is |", "|---|---|---|"]
    for name in names:
        rule = rule_class(name)
        settings = ", ".join(f"`{f.name} = {_default(f).strip('`')}`" for f in dataclasses.fields(cast(Any, rule)))
        rows.append(f'| `"{name}"` | {settings} | {_first_line(rule)} |')
    return "\n".join(rows)


def _first_line(cls: Any) -> str:
    """First sentence of a class's docstring."""
    return (getdoc(cls) or "").splitlines()[0].replace("``", "`")


def _attributes(cls: Any) -> dict[str, str]:
    """Read the ``Attributes:`` section of a docstring: the meaning of each by its name, with those of base classes."""
    meanings: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        section = (getdoc(one) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, re.MULTILINE):
            meanings[name] = re.sub(r"\s+", " ", text).replace("``", "`")
    return meanings


def _words(hint: Any) -> str:
    """Say a type as a TOML file has it."""
    if get_origin(hint) is Literal:
        return " or ".join(f'`"{value}"`' for value in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_words(kind) for kind in get_args(hint) if kind is not type(None))
    if dataclasses.is_dataclass(hint) or hint is ParameterRule or get_origin(hint) in (dict, MappingProxyType):
        return "table"
    if get_origin(hint) in (tuple, list):
        return "array"
    return {str: "text", int: "integer", float: "number", bool: "`true` or `false`"}[hint]


def _default(field: dataclasses.Field[Any]) -> str:
    """Say a default as a TOML file has it."""
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "must be given"
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if dataclasses.is_dataclass(value) or value is None or value == {}:
        return "none" if value is None or value == {} else "see below"
    return f"`{str(value).lower() if isinstance(value, bool) else repr(value).replace(chr(39), chr(34))}`"


#: What a mark in a page can name.
TABLES: MappingProxyType[str, Callable[[], str]] = MappingProxyType({"commands": commands, "keys": keys})

if __name__ == "__main__":
    print(TABLES[sys.argv[1]]())
