"""Code in reach of a step, as far as it can be told without running it: which names it mentions, and its variables.

From the forwards of the modules, the loss and the hooks on, a function leads to the functions, methods and classes that
it names. A name put together while it runs (``getattr(self, "w" + str(i))``) leads nowhere.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from lading.capture.attributes import GONE, Table, is_plain, items_of, joined, tables_at
from lading.capture.hooks import hooks_of

#: Packages whose code is followed by names only: what they keep in variables is no number of a step.
_LIBRARIES = frozenset({"torch", "transformers", "diffusers", "numpy", "lading", "logging"})
#: Methods that Python calls by themselves.
_UNNAMED = frozenset({"__init__", "__new__", "__init_subclass__", "__setattr__", "__repr__", "__reduce__", "__del__"})

#: Operations that read a variable of a file; other loads with a name read an attribute.
_OF_FILES = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
#: Classes of transformers whose objects only hold settings: what they do with them (save, compare, generate) is no part
#: of a forward, but has methods with names such as ``update`` that forwards mention too.
_SETTINGS = frozenset({"PreTrainedConfig", "PretrainedConfig", "GenerationConfig"})
#: Settings that saving writes.
_WRITTEN_AS_SAVED = frozenset({"architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"})

#: Path of a value, how to read it, and what it is.
Entry = tuple[str, Callable[[], object], object]


class Reach:
    """What the code of a step mentions.

    Args:
        tables: Attributes of the model and the loss (``lading.capture.attributes.tables_of``).
        model: None for the loss alone.

    Attributes:
        names: Of attributes that are read, and texts that may be such.
    """

    def __init__(self, tables: Iterable[Table], model: torch.nn.Module | None, loss: Any) -> None:
        self.names: set[str] = {"training"}
        self._owners: dict[type, None] = {}
        self._functions: dict[FunctionType, None] = {}
        self._members: dict[str, list[FunctionType]] = {}
        self._aliases: dict[str, str] = {}
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
            for name in _variables_in(function.__code__):
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
        inside = table.owner is None and (not table.attribute or table.attribute in self.names)
        settings = _holds_settings(table.owner)
        if settings and any(kind.__name__ == "GenerationConfig" for kind in _mro(table.owner)):
            return  # how to generate is read by generate() alone
        for key, value in items_of(held):
            if settings and key in _WRITTEN_AS_SAVED:
                continue
            if isinstance(value, (list, dict, set)) or not is_plain(value):
                continue
            if inside or key in self.names:
                yield joined(label, key), partial(read_item, held, key), value

    def _follow(self, value: Any) -> None:
        """Visit the functions that a value is made of; the keywords of a partial one are names of arguments."""
        if isinstance(value, partial):
            self.names.update(value.keywords)
            for part in (value.func, *value.args, *value.keywords.values()):
                self._follow(part)
        else:
            self._todo.extend(_functions_in(value))

    def _own(self, owner: type | None) -> None:
        settings = _holds_settings(owner)
        if settings:  # a forward may read a setting by its common name
            self._aliases.update(getattr(owner, "attribute_map", {}))
        for kind in _mro(owner):
            if kind in self._owners or kind in (object, torch.nn.Module):
                continue
            self._owners[kind] = None
            for name, value in vars(kind).items():
                if settings and _is_of_library(kind.__module__) and not isinstance(value, property):
                    continue
                for function in _functions_in(value):
                    self._members.setdefault(name, []).append(function)
                    if name in self.names or (name.startswith("__") and name not in _UNNAMED):
                        self._todo.append(function)

    def _name(self, name: str) -> None:
        if name not in self.names:
            self.names.add(name)
            self._todo.extend(self._members.get(name, ()))
            if name in self._aliases:
                self._name(self._aliases[name])

    def _visit(self, function: FunctionType) -> None:
        if function in self._functions:
            return
        self._functions[function] = None
        if _is_of_library(function.__module__):
            for name in _words_in(function.__code__):
                self._name(name)
            return
        for name in _attributes_in(function.__code__):
            self._name(name)
        for cell in function.__closure__ or ():
            for _, value in items_of(cell):
                self._follow(value)
        for value in map(function.__globals__.get, _variables_in(function.__code__)):
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


def _mro(owner: type | None) -> tuple[type, ...]:
    return owner.__mro__ if owner is not None else ()


def _holds_settings(owner: type | None) -> bool:
    return any(kind.__name__ in _SETTINGS and _is_of_library(kind.__module__) for kind in _mro(owner))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of the functions and classes inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _words_in(code: CodeType) -> dict[str, None]:
    """Every name and text in code: more than it reads, without a look at each instruction."""
    return {word: None for part in _codes(code) for word in (*part.co_names, *_texts_in(part))}


def _attributes_in(code: CodeType) -> dict[str, None]:
    """Names of attributes that code reads, and texts that may be such."""
    names: dict[str, None] = {}
    for part in _codes(code):
        names.update(dict.fromkeys(_texts_in(part)))
        for step in dis.get_instructions(part):
            if step.opcode in dis.hasname and step.opname.startswith("LOAD_") and step.opname not in _OF_FILES:
                names[str(step.argval)] = None
    return names


def _variables_in(code: CodeType) -> dict[str, None]:
    """Names of variables of its file that code reads."""
    steps = (step for part in _codes(code) for step in dis.get_instructions(part))
    return {str(step.argval): None for step in steps if step.opname in _OF_FILES}


def _texts_in(code: CodeType) -> Iterator[str]:
    """Texts that stand in code."""
    return (constant for constant in code.co_consts if isinstance(constant, str))


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def values_of(entries: Iterable[Entry]) -> Mapping[str, object]:
    """What was read, by path."""
    return {label: value for label, _, value in entries}
