"""Code in reach of a step, as far as it can be told without running it: which names it mentions, and its variables.

From the forwards of the modules, the loss and the hooks on, a function leads to the functions, methods and classes that
it names. A name put together while it runs (``getattr(self, "w" + str(i))``) leads nowhere.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import cached_property, partial
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from lading.ir.frozen import Kind
from lading.tracing.attributes import (
    COMPARED,
    GONE,
    OF_TORCH,
    Table,
    is_apart,
    is_leaf,
    is_plain,
    items_of,
    joined,
    read_item,
    tables_at,
)
from lading.tracing.hooks import hooks_of, named

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

_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial, np.ufunc)
#: What says by itself which one it is.
_NAMED = (*_FUNCTIONS, type, Enum, torch.dtype, torch.device, torch.layout, torch.memory_format, ModuleType)
#: Items that are followed of a container.
_FOLLOWED = 4096

#: Path of a value, how to read it, and what it is.
Entry = tuple[str, Callable[[], object], object]


class Reach:
    """What the code of a step mentions.

    Args:
        tables: Attributes of the model and the loss (``lading.tracing.attributes.tables_of``).
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
            for _, value in islice(items_of(table.held), None if table.owner is not None else _FOLLOWED):
                self._follow(value)
        for held in (*model.modules(), *model.parameters()) if model is not None else ():
            for _, hook in hooks_of(held):
                self._follow(hook)
        self._name("forward")
        while self._todo:
            self._visit(self._todo.pop())

    def variables(self) -> Iterator[Entry]:
        """Values that the code reads from variables of its files, from classes and as defaults."""
        for function in self._functions:
            if _is_of_library(function.__module__):
                continue
            label = f"{function.__module__}.{function.__qualname__}"
            for name in ("__defaults__", "__kwdefaults__"):
                read = partial(_defaults_of, function, name)
                if defaults := read():
                    yield f"{name.strip('_')} of {label}", read, defaults
            scope = function.__globals__
            for name in _variables_in(function.__code__):
                if name in scope and not name.startswith("__"):
                    yield from self._variable(f"{function.__module__}.{name}", scope, name)
        for owner in self._owners:
            for name in vars(owner):
                is_read = name in self.names and not name.startswith("__")
                if is_read and not _is_of_library(owner.__module__):
                    yield from self._variable(f"{owner.__module__}.{owner.__qualname__}.{name}", vars(owner), name)

    def _variable(self, label: str, scope: Mapping[str, Any], name: str) -> Iterator[Entry]:
        value = scope[name]
        if isinstance(value, ModuleType) or is_apart(value):
            return
        yield label, partial(scope.get, name, GONE), value
        if not is_leaf(value) and not isinstance(value, FunctionType):
            for table in tables_at(label, value):
                yield from self.entries_in(table)

    def entries_in(self, table: Table) -> Iterator[Entry]:
        """Values of a table that the code may read: attributes that it names, and items of what it names.

        Of a container the first items count, and how many there are.
        """
        held, label = table.held, table.label
        if table.attribute == "_modules":
            return
        inside = table.owner is None and (not table.attribute or table.attribute in self.names)
        of_torch = OF_TORCH if table.owner is not None and issubclass(table.owner, torch.nn.Module) else ()
        is_counted = inside and isinstance(held, (dict, set))
        if is_counted:
            yield length_of(label), partial(len, held), len(held)
        settings = _holds_settings(table.owner)
        if settings and any(kind.__name__ == "GenerationConfig" for kind in _mro(table.owner)):
            return  # how to generate is read by generate() alone
        for key, value in islice(items_of(held), COMPARED if is_counted else None):
            if (settings and key in _WRITTEN_AS_SAVED) or (key in of_torch and not is_leaf(value)):
                continue
            if (inside or key in self.names) and not is_apart(value):
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


def length_of(label: str) -> str:
    """Path of the number of entries of a dict or set."""
    return f"len({label})"


def recorded(value: Any) -> object:
    """What a capture keeps of a value: itself, or its kind in words."""
    if is_leaf(value) or value is GONE:
        return value
    if isinstance(value, _FUNCTIONS):
        return Kind(f"function {named(value)}")
    if isinstance(value, type):
        return Kind(f"class {value.__module__}.{value.__qualname__}")
    if isinstance(value, torch.Tensor):
        return Kind(f"a tensor of {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}")
    if isinstance(value, _NAMED):
        return Kind(value)
    name = type(value).__name__
    return Kind(f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}")


def is_named(value: Any) -> bool:
    """Whether a value says by itself which one it is, in every process alike: a function, a class, a dtype."""
    return isinstance(value, _NAMED)


def _defaults_of(function: FunctionType, name: str) -> object:
    """Defaults of a function's arguments, or of those that are given by keyword only, as ``recorded``."""
    defaults = getattr(function, name) or ()
    if isinstance(defaults, dict):
        return tuple((key, _default(value)) for key, value in defaults.items())
    return tuple(map(_default, defaults))


def _default(value: Any) -> object:
    return Kind(repr(value)) if is_plain(value) and not is_leaf(value) else recorded(value)


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
    """What was read, by path, as it is recorded."""
    return {label: recorded(value) for label, _, value in entries}
