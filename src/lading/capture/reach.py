"""Code in reach of a step, as far as it can be told without running it: which names it mentions, and its variables.

From the forwards of the modules, the loss and the hooks on, a function leads to the functions, methods and classes that
it names. A name put together while it runs (``getattr(self, "w" + str(i))``) leads nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from types import FunctionType, MethodType
from typing import Any

import torch

from lading.capture.attributes import GONE, Table, is_plain, items_of, tables_at
from lading.capture.hooks import hooks_of

#: Packages whose code is followed by names only: what they keep in variables is no number of a step.
_LIBRARIES = frozenset({"torch", "transformers", "diffusers", "numpy", "lading"})
#: Methods that Python calls by themselves.
_UNNAMED = frozenset({"__init__", "__new__", "__init_subclass__", "__setattr__", "__repr__", "__reduce__", "__del__"})

#: Path of a value, how to read it, and what it is.
Entry = tuple[str, Callable[[], object], object]


class Reach:
    """What the code of a step mentions.

    Args:
        tables: Attributes of the model and the loss (``lading.capture.attributes.tables_of``).
        model: None for the loss alone.

    Attributes:
        names: Of attributes and variables, and texts that may be such.
    """

    def __init__(self, tables: Iterable[Table], model: torch.nn.Module | None, loss: Any) -> None:
        self.names: set[str] = {"training"}
        self._owners: dict[type, None] = {}
        self._functions: dict[FunctionType, None] = {}
        self._members: dict[str, list[FunctionType]] = {}
        self._todo: list[FunctionType] = []
        self._follow(loss)
        for table in tables:
            self._own(table.owner)
            for _, value in items_of(table.held):
                self._follow(value)
        for held in (*model.modules(), *model.parameters()) if model is not None else ():
            for _, hook in hooks_of(held):
                self._follow(hook)
        self._name("forward")
        while self._todo:
            self._visit(self._todo.pop())

    def variables(self) -> Iterator[Entry]:
        """Plain values that the code reads from variables of its files, from classes and as defaults."""
        for function in self._functions:
            if _is_of_library(function.__module__):
                continue
            label = f"{function.__module__}.{function.__qualname__}"
            if function.__defaults__ and is_plain(function.__defaults__):
                yield f"defaults of {label}", partial(getattr, function, "__defaults__"), function.__defaults__
            scope = function.__globals__
            for name in _names_in(function.__code__):
                if name in scope and not name.startswith("__"):
                    yield from self._variable(f"{function.__module__}.{name}", scope, name)
        for owner in self._owners:
            for name, value in vars(owner).items():
                plain = name in self.names and not name.startswith("__") and is_plain(value)
                if plain and not _is_of_library(owner.__module__):
                    yield f"{owner.__module__}.{owner.__qualname__}.{name}", partial(getattr, owner, name, GONE), value

    def _variable(self, label: str, scope: dict[str, Any], name: str) -> Iterator[Entry]:
        value = scope[name]
        if isinstance(value, (list, dict, set)) or not is_plain(value):
            for table in tables_at(label, value) if not isinstance(value, FunctionType) else ():
                yield from self.plain_in(table)
        else:
            yield label, partial(scope.get, name, GONE), value

    def plain_in(self, table: Table) -> Iterator[Entry]:
        """Plain values of a table that the code may read: attributes that it names, and items of what it names."""
        held, label = table.held, table.label
        inside = table.owner is None and not self.names.isdisjoint(label.replace(" ", ".").split("."))
        for key, value in items_of(held):
            if isinstance(value, (list, dict, set)) or not is_plain(value):
                continue
            if inside or key in self.names:
                yield f"{label}.{key}".strip("."), partial(read_item, held, key), value

    def _follow(self, value: Any) -> None:
        """Visit the functions that a value is made of; the keywords of a partial one are names of arguments."""
        if isinstance(value, partial):
            self.names.update(value.keywords)
            for part in (value.func, *value.args, *value.keywords.values()):
                self._follow(part)
        else:
            self._todo.extend(_functions_in(value))

    def _own(self, owner: type | None) -> None:
        for kind in owner.__mro__ if owner is not None else ():
            if kind in self._owners or kind in (object, torch.nn.Module):
                continue
            self._owners[kind] = None
            for name, value in vars(kind).items():
                for function in _functions_in(value):
                    self._members.setdefault(name, []).append(function)
                    if name in self.names or (name.startswith("__") and name not in _UNNAMED):
                        self._todo.append(function)

    def _name(self, name: str) -> None:
        if name not in self.names:
            self.names.add(name)
            self._todo.extend(self._members.get(name, ()))

    def _visit(self, function: FunctionType) -> None:
        if function in self._functions:
            return
        self._functions[function] = None
        names = _names_in(function.__code__)
        for name in names:
            self._name(name)
        if _is_of_library(function.__module__):
            return
        for cell in function.__closure__ or ():
            for _, value in items_of(cell):
                self._follow(value)
        for value in (function.__globals__.get(name) for name in names):
            self._follow(value)
            if isinstance(value, type) and not _is_of_library(value.__module__):
                self._own(value)


def read_item(held: Any, key: Any) -> object:
    """What is in a table under a name now."""
    return held.get(key, GONE) if isinstance(held, dict) else dict(items_of(held)).get(key, GONE)


def _functions_in(value: Any) -> list[FunctionType]:
    """The Python functions that a callable or a member of a class is made of."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    elif isinstance(value, (MethodType, staticmethod, classmethod)):
        value = value.__func__
    inner = getattr(value, "__wrapped__", None) if isinstance(value, FunctionType) else None
    functions = [value] if isinstance(value, FunctionType) else []
    return [*functions, *(_functions_in(inner) if inner is not None else ())]


def _names_in(code: Any) -> dict[str, None]:
    """Names and texts in code, and in the code of functions inside it."""
    names = dict.fromkeys((*code.co_names, *code.co_freevars))
    for constant in code.co_consts:
        if isinstance(constant, str):
            names[constant] = None
        elif hasattr(constant, "co_names"):
            names.update(_names_in(constant))
    return names


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def values_of(entries: Iterable[Entry]) -> Mapping[str, object]:
    """What was read, by path."""
    return {label: value for label, _, value in entries}
