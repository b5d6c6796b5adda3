"""Frozen values: plain values of the batch, the model and the loss, recorded at capture and compared before each step.

A step is traced once, so a number, a text or a flag that Python reads while it is traced is the same in every step.
``docs/frozen.md`` says which values are recorded, and what is not seen. Of what is no such value (a list, a function, a
submodule) it is compared whether it is still the same object; where it is not, all is read again by its path, so that
an equal list in the place of a list makes no difference.

Attributes of objects and variables of functions count where the step's code names them: a counter that a loop keeps in
the object whose method the loss is may move on.
"""

from __future__ import annotations

import dataclasses
import dis
import pickle
import random
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property, partial
from io import IOBase
from itertools import chain, islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import numpy as np
import torch

from lading.errors import CaptureError, ConfigError
from lading.ir.frozen import Frozen, ReadTensor, ValueKind
from lading.tracing.attributes import (
    COMPARED,
    GONE,
    OF_TORCH,
    AttributeTable,
    is_apart,
    is_leaf,
    is_looked_into,
    is_plain,
    items_of,
    joined,
    read_item,
    sample_of,
    tables_at,
    tables_of,
    version_of,
)
from lading.tracing.batches import input_leaves, plain_leaves
from lading.tracing.module_hooks import described, described_global, hooks_of, named

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
_NUMBERS = (bool, int, float, complex)
#: Random generators of which a step may have one of its own.
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
#: Modules whose forward goes through whatever is in them.
_LISTS = (
    torch.nn.Sequential,
    torch.nn.ModuleList,
    torch.nn.ModuleDict,
    torch.nn.ParameterList,
    torch.nn.ParameterDict,
)
#: Why torch's search for anomalies is refused.
ANOMALY = (
    "it looks into torch's own backward, of which a planned step has the operations only: look for NaN in a step of "
    "plain PyTorch, or in what the loss function returns"
)
_ADVICE = "a captured step does not see the change: set it back, or capture and plan again"


def freeze(model: torch.nn.Module, batch: Any, loss: Any) -> tuple[Frozen, GeneratorStates]:
    """Record the plain values in reach of a step, and its random generators, before it is traced."""
    modules, others, of_loss = _entries(model, loss)
    _check_read(others, of_loss)
    frozen = Frozen(
        batch=plain_leaves(batch),
        modules=values_of(modules),
        others=values_of(others),
        loss=values_of(of_loss),
        autocast=_autocast(),
        model=weakref.ref(model),
        loss_function=loss,
    )
    return frozen, GeneratorStates(chain(others, of_loss))


class GeneratorStates:
    """States of random generators beside torch's that a step may draw from, before it is traced."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._states: dict[str, tuple[object, bytes]] = {}
        for label, _, value in entries:
            owner = getattr(value, "__self__", value)  # of a method
            if isinstance(owner, _GENERATORS) and not isinstance(owner, random.SystemRandom):
                self._states[label] = owner, pickle.dumps(owner)

    def check(self) -> None:
        """Refuse a step that has drawn from one.

        Raises:
            CaptureError: names it.
        """
        for label, (owner, before) in self._states.items():
            if pickle.dumps(owner) != before:
                raise CaptureError(
                    f"the step draws from the random generator {label} ({type(owner).__module__}."
                    f"{type(owner).__qualname__}), so every step would use the numbers drawn now; use torch.rand and "
                    "its like, or draw outside and give the numbers in the batch"
                )


def _check_read(*entries: Iterable[Entry]) -> None:
    """Refuse what gives Python another value each time it is read, as iterators do.

    Raises:
        CaptureError: names it.
    """
    for label, _, value in chain(*entries):
        if isinstance(value, Iterator) and not isinstance(value, IOBase):
            raise CaptureError(
                f"expected a step that reads its batch, found the iterator {label} ({type(value).__name__}): what "
                "Python takes from it at capture would be in every step; take from it outside, and give it in the batch"
            )


def _autocast() -> str:
    """Describe the autocast that is on around a step, by dtype and device; "" without one."""
    on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return ", ".join(f"{str(torch.get_autocast_dtype(kind)).removeprefix('torch.')} on {kind}" for kind in on)


def _check_switches(frozen: Frozen) -> None:
    """Refuse what torch was told around a step that no operation of the step would see.

    Raises:
        ConfigError: autocast is on as it was not at capture, or torch is to look for anomalies.
    """
    now = _autocast()
    if now not in ("", frozen.autocast):
        raise ConfigError(
            f"expected autocast {f'to {frozen.autocast}' if frozen.autocast else 'off'}, as captured, got it to {now}, "
            "which a captured step does not see; put it into the loss function, or around lading.capture"
        )
    if torch.is_anomaly_enabled():
        raise ConfigError(f"expected torch.autograd.set_detect_anomaly(False), found it on; {ANOMALY}")


def without(frozen: Frozen, labels: Collection[str]) -> Frozen:
    """Leave out what the step itself changes, where that was shown to make no other step."""
    lengths = {length_of(label.rpartition(".")[0]) for label in labels}
    labels = {*labels, *lengths}
    passed_by = {*labels, *(label.replace("loss.", "loss: ", 1) for label in labels if label.startswith("loss."))}
    parts = {name: getattr(frozen, name) for name in ("modules", "others", "loss")}
    return dataclasses.replace(
        frozen, **{name: {k: v for k, v in part.items() if k not in passed_by} for name, part in parts.items()}
    )


class Watch:
    """Compares what a step was captured with to what is there now.

    Args:
        frozen: Values of the captured graph; None where it was made without a capture.
        model: The model that is trained; None where nobody has it.

    Raises:
        ConfigError: it differs already.
    """

    def __init__(self, frozen: Frozen | None, model: torch.nn.Module | None) -> None:
        self._frozen, self._model = frozen, model
        self._entries = list(self._read())
        loss = frozen.loss_function if frozen is not None else None
        roots = (("", model), ("loss", loss)) if frozen is not None else ()
        self._parts = [
            (name, module, _parts(module))
            for prefix, root in roots
            if isinstance(root, torch.nn.Module)
            for name, module in root.named_modules(prefix=prefix)
        ]

    def _read(self) -> Iterator[Entry]:
        """Read what was recorded, as it is now.

        Raises:
            ConfigError: a value or kind differs.
        """
        frozen, model = self._frozen, self._model
        if frozen is None:
            return
        modules, others, of_loss = _entries(model, frozen.loss_function)
        if model is not None:
            yield from _checked(frozen.modules, modules)
        if model is not None and frozen.model is not None and frozen.model() is model:
            yield from _checked(frozen.others, others)
        if frozen.loss_function is not None:
            yield from _checked(frozen.loss, of_loss)

    def check(self, batches: Sequence[Any], inputs: Collection[str]) -> None:
        """Compare everything before a step.

        Args:
            batches: The step's micro-batches.
            inputs: Names of the tensors of one.

        Raises:
            ConfigError: names what differs, what it was and what it is.
        """
        if self._frozen is None:
            return
        _check_switches(self._frozen)
        for number, batch in enumerate(batches):
            values = plain_leaves(batch)
            if not _all_same(self._frozen.batch, values):
                _refuse_batch(number, self._frozen.batch, values, inputs, dict(input_leaves(batch)))
        with torch._C.DisableTorchFunctionSubclass():  # parameters whose values a trainer has answer little else
            for name, module, parts in self._parts:
                now = _parts(module)
                if len(now) != len(parts) or any(
                    now_part[1] is not part[1] for now_part, part in zip(now, parts, strict=True)
                ):
                    _check_parts(name, module, dict(parts), dict(now))
                    parts[:] = now
            if not all(map(_is_unchanged, self._entries)):
                self._look_again()
        for tensor in self._frozen.tensors:
            if _is_written(tensor):
                self._refuse_changed(tensor)

    def _refuse_changed(self, changed: ReadTensor) -> NoReturn:
        """Name a tensor that is a constant of the step, and was written since the capture.

        Raises:
            ConfigError: always.
        """
        tensor = changed.tensor()
        label = next((label for label, _, value in self._entries if value is tensor), "")
        raise ConfigError(
            f"expected {label or 'a tensor'} ({changed.said}) to keep its values, as captured, found that it was "
            "written, which a captured step does not see: register it as a buffer and change that by "
            "Trainer.set_value, give it in the batch, or capture again"
        )

    def _look_again(self) -> None:
        """Go on with what was put in the place of something, where it makes the same step.

        Raises:
            ConfigError: names what differs.
        """
        for label, read, value in self._entries:
            if not _same(now := recorded(read()), was := recorded(value)):
                _refuse(label, was, now)
        before = {label: value for label, _, value in self._entries}
        entries = list(self._read())
        for label, _, now in entries:
            if now is not before[label] and not _is_alike(now, before[label]):
                raise ConfigError(f"expected {label} to stay {recorded(now)!r}, as captured, got another; {_ADVICE}")
        self._entries = entries


def _is_written(read: ReadTensor) -> bool:
    """Whether a tensor was written since the capture; of one that is gone nobody can tell, nor read it."""
    tensor = read.tensor()
    if tensor is None:
        return False
    return version_of(tensor) != read.version or sample_of(tensor) != read.sample


def _is_unchanged(entry: Entry) -> bool:
    now = entry[1]()
    return now is entry[2] or (is_leaf(now) and _same(now, entry[2]))


def _is_alike(now: object, before: object) -> bool:
    """Whether an object of the same kind, in which all that is recorded is the same, makes the same step."""
    if now is before or is_leaf(now):
        return _same(now, before)
    if type(now) is not type(before) or isinstance(now, (torch.Tensor, torch.nn.Module)):
        return False
    if isinstance(now, FunctionType):
        return now.__code__ == getattr(before, "__code__", None)
    if isinstance(now, partial) and isinstance(before, partial):
        return _is_alike(now.func, before.func)
    if isinstance(now, tuple) and isinstance(before, tuple):
        return len(now) == len(before) and all(map(_is_alike, now, before))
    return is_looked_into(now) or (now == before) is True


def _parts(module: torch.nn.Module) -> list[tuple[str, object]]:
    """Submodules, parameters and buffers of a module, by name."""
    tables = vars(module)
    return [*tables["_modules"].items(), *tables["_parameters"].items(), *tables["_buffers"].items()]


def _check_parts(path: str, module: torch.nn.Module, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Refuse a part of a module that was put in the place of another, and more of a list's.

    Raises:
        ConfigError: names the part.
    """
    for name in {**before, **(now if isinstance(module, _LISTS) else {})}:
        was, got = before.get(name), now.get(name)
        if was is not got:
            stays = "nothing" if was is None else f"the {type(was).__name__} that it was"
            description = "nothing" if got is None else f"{'a' if was is None else 'another'} {type(got).__name__}"
            raise ConfigError(f"expected {joined(path, name)} to stay {stays}, got {description}; {_ADVICE}")


def _refuse_batch(
    number: int,
    wanted: Mapping[str, object],
    given: Mapping[str, object],
    inputs: Collection[str],
    tensors: Collection[str],
) -> None:
    """Say where a batch first differs from the captured one.

    Args:
        number: Number of the micro-batch.
        wanted, given: Plain values of the captured batch and of this one, by name.
        inputs, tensors: Names of the tensors of the captured batch and of this one.
    Raises:
        ConfigError: always.
    """
    path = next(path for path in (*wanted, *given) if not _same(wanted.get(path, GONE), given.get(path, GONE)))
    expected = "a tensor" if path in inputs else _said(wanted.get(path, GONE))
    current = "a tensor" if path in tensors else _said(given.get(path, GONE))
    raise ConfigError(
        f"micro-batch {number}: expected {path!r} = {expected}, as captured, got {current}; numbers, texts and flags "
        "of a batch are part of the captured step: make it a tensor, leave out what the step does not use, or capture "
        "again"
    )


def _refuse(label: str, expected: object, got: object) -> NoReturn:
    raise ConfigError(f"expected {label} = {_said(expected)}, as captured, got {_said(got)}; {_ADVICE}")


def _all_same(wanted: Mapping[str, object], given: Mapping[str, object]) -> bool:
    return wanted.keys() == given.keys() and all(_same(given[path], value) for path, value in wanted.items())


def _checked(wanted: Mapping[str, object], entries: Iterable[Entry]) -> Iterator[Entry]:
    """Pass on the entries of what was recorded, comparing each.

    Raises:
        ConfigError: a value differs.
    """
    current_entries = {label: (label, read, value) for label, read, value in entries}
    for label, expected in wanted.items():
        current = recorded(current_entries[label][2]) if label in current_entries else GONE
        if not _same(current, expected):
            _refuse(label, expected, current)
        yield current_entries[label]


def _same(left: object, right: object) -> bool:
    """Whether two plain values make the same step: 1, 1.0 and True do not, nor do 0.0 and -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return repr(left) == repr(right) if isinstance(left, float) else bool(left == right)


def _said(value: object) -> str:
    return "nothing" if value is GONE else repr(value)[:80]


def _entries(model: torch.nn.Module | None, loss: Any) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """Values in reach of a step: of every instance of the model, of this instance, and of the loss."""
    tables = tables_of(model if model is not None else torch.nn.Module())
    of_loss = [table for table in tables_of(torch.nn.Module(), loss) if table.label]
    everything, alone = Reach([*tables, *of_loss], model, loss), Reach(of_loss, None, loss)
    modules = list(_of_modules(model, everything.names)) if model is not None else []
    others = [entry for table in tables for entry in everything.entries_in(table)]
    theirs = [entry for table in of_loss for entry in alone.entries_in(table)]
    if isinstance(loss, torch.nn.Module):
        theirs.extend((f"loss: {label}", read, value) for label, read, value in _of_modules(loss, alone.names))
    return modules, [*others, *everything.variables()], [*theirs, *alone.variables()]


def _of_modules(model: torch.nn.Module, names: set[str]) -> Iterator[Entry]:
    """Recorded facts of modules: types, training flags, hooks, numbers, functions and dtypes, and what is trained.

    So is in which order a list of modules runs, and which modules have a forward beside that of their class.
    """
    yield _entry("hooks of all modules", described_global)
    named_modules = list(model.named_modules())
    attributes = {name or "the model": vars(module) for name, module in named_modules}
    yield _entry("modules whose forward is not that of their class", partial(_with_own_forward, attributes))
    for name, module in named_modules:
        path, description = f"{name}." if name else "", name or "the model"
        yield _entry(f"type of {description}", partial(_type_name, module))
        if isinstance(module, _LISTS):
            yield _entry(f"modules in {description}", partial(" ".join, vars(module)["_modules"]))
        yield _entry(hooks_label(name), partial(described, module))
        yield _entry(f"{path}training", partial(vars(module).get, "training"))
        for key, value in vars(module).items():
            if key not in OF_TORCH and key in names and (isinstance(value, _NUMBERS) or is_named(value)):
                yield f"{path}{key}", partial(vars(module).get, key, GONE), value
    for name, parameter in model.named_parameters():
        yield _entry(f"{name}.requires_grad", partial(getattr, parameter, "requires_grad"))
        yield _entry(f"hooks of {name}", partial(described, parameter))


def hooks_label(name: str) -> str:
    """Path under which the hooks of a module are recorded."""
    return f"hooks of {name or 'the model'}"


def _entry(label: str, read: Any) -> Entry:
    return label, read, read()


def _with_own_forward(attributes: Mapping[str, Mapping[str, object]]) -> str:
    """Names of the modules, of which the attributes are given, that have a forward of their own."""
    return " ".join(name for name, attribute_names in attributes.items() if "forward" in attribute_names)


def _type_name(module: torch.nn.Module) -> str:
    return type(module).__qualname__


class Reach:
    """Names and variables that the code of a step mentions, as far as it can be told without running it.

    From the forwards of the modules, the loss and the hooks on, a function leads to the functions, methods and classes
    that it names. A name put together while it runs (``getattr(self, "w" + str(i))``) leads nowhere.

    Args:
        tables: Attributes of the model and the loss (``lading.tracing.attributes.tables_of``).
        model: The model; None for the loss alone.

    Attributes:
        names: Names of attributes that are read, and texts that may be such.
    """

    def __init__(self, tables: Iterable[AttributeTable], model: torch.nn.Module | None, loss: Any) -> None:
        self.names: set[str] = {"training"}
        self._owners: dict[type, None] = {}
        self._functions: dict[FunctionType, None] = {}
        self._members: dict[str, list[FunctionType]] = {}
        self._aliases: dict[str, str] = {}
        self._modules: dict[ModuleType, dict[str, None]] = {}
        self._todo: list[FunctionType] = []
        self._follow(loss)
        for table in tables:
            self._own(table.owner)
            for _, value in islice(items_of(table.held), None if table.owner is not None else _FOLLOWED):
                self._follow(value)
        for owner in (*model.modules(), *model.parameters()) if model is not None else ():
            for _, hook in hooks_of(owner):
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
        for module, names in self._modules.items():
            for name in names:
                yield from self._variable(f"{module.__name__}.{name}", vars(module), name)
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
        yield from self._slots(label, value)
        if not is_leaf(value) and not isinstance(value, FunctionType):
            for table in tables_at(label, value):
                yield from self.entries_in(table)

    def entries_in(self, table: AttributeTable) -> Iterator[Entry]:
        """Values of a table that the code may read: attributes that it names, and items of what it names.

        Of a container the first items count, and how many there are.
        """
        values, label = table.held, table.label
        if table.attribute == "_modules":
            return
        inside = table.owner is None and (not table.attribute or table.attribute in self.names)
        of_torch = OF_TORCH if table.owner is not None and issubclass(table.owner, torch.nn.Module) else ()
        is_counted = inside and isinstance(values, (dict, set))
        if is_counted:
            yield length_of(label), partial(len, values), len(values)
        settings = _holds_settings(table.owner)
        if settings and any(kind.__name__ == "GenerationConfig" for kind in _mro(table.owner)):
            return  # how to generate is read by generate() alone
        for key, value in islice(items_of(values), COMPARED if is_counted else None):
            if (settings and key in _WRITTEN_AS_SAVED) or (key in of_torch and not is_leaf(value)):
                continue
            if (inside or key in self.names) and not is_apart(value):
                yield joined(label, key), partial(read_item, values, key), value
                yield from self._slots(joined(label, key), value)
        for key in dict.fromkeys(chain.from_iterable(map(vars, _of_users(table.owner)))):
            if key in self.names and key not in values and not key.startswith("__"):  # may come to hide the class's
                yield joined(label, key), partial(read_item, values, key), GONE

    def _slots(self, label: str, value: Any) -> Iterator[Entry]:
        """Attributes that the code names of an object that has slots for them."""
        for name in _slots_of(value):
            if name in self.names:
                yield joined(label, name), partial(getattr, value, name, GONE), getattr(value, name, GONE)

    def _follow(self, value: Any) -> None:
        """Visit the functions that a value is made of; the keywords of a partial one are names of arguments."""
        if isinstance(value, partial):
            self.names.update(value.keywords)
            for part in (value.func, *value.args, *value.keywords.values()):
                self._follow(part)
        elif isinstance(value, type):  # whose attributes may be settings
            if not _is_of_library(value.__module__):
                self._own(value)
        elif _slots_of(value):
            self._own(type(value))
        else:
            self._todo.extend(_functions_in(value))

    def _enter(self, module: ModuleType, names: Iterable[str]) -> None:
        """Follow what code reads of a module of the user's, as ``settings.weight`` and ``losses.total(x)``."""
        top = module.__name__.partition(".")[0]
        if top in sys.stdlib_module_names or top in _LIBRARIES:
            return
        read = self._modules.setdefault(module, {})
        for name in names:
            if name not in read and name in vars(module):
                read[name] = None
                value = vars(module)[name]
                if isinstance(value, ModuleType):
                    self._enter(value, names)
                else:
                    self._follow(value)

    def _own(self, owner: type | None) -> None:
        settings = _holds_settings(owner)
        if settings:  # a forward may read a setting by its common name
            self._aliases.update(getattr(owner, "attribute_map", {}))
        for kind in _mro(owner):
            if kind in self._owners or kind in (object, torch.nn.Module):
                continue
            self._owners[kind] = None
            for name, value in list(vars(kind).items()):
                if isinstance(value, type):
                    self._follow(value)
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
        names = _attributes_in(function.__code__)
        for name in names:
            self._name(name)
        for cell in function.__closure__ or ():
            for _, value in items_of(cell):
                self._follow(value)
        for value in map(function.__globals__.get, _variables_in(function.__code__)):
            if isinstance(value, ModuleType):
                self._enter(value, names)
            else:
                self._follow(value)


def length_of(label: str) -> str:
    """Path under which the number of entries of a dict or set is recorded."""
    return f"len({label})"


def recorded(value: Any) -> object:
    """Form in which a capture remembers a value: itself, or its kind in words."""
    if is_leaf(value) or value is GONE:
        return value
    if isinstance(value, _FUNCTIONS):
        return ValueKind(f"function {named(value)}")
    if isinstance(value, type):
        return ValueKind(f"class {value.__module__}.{value.__qualname__}")
    if isinstance(value, torch.Tensor):
        return ValueKind(f"a tensor of {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}")
    if isinstance(value, _NAMED):
        return ValueKind(value)
    name = type(value).__name__
    return ValueKind(f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}")


def is_named(value: Any) -> bool:
    """Whether a value has a name that is the same in every process: a function, a class, a dtype."""
    return isinstance(value, _NAMED)


def _defaults_of(function: FunctionType, name: str) -> object:
    """Defaults of a function's arguments, or of those that are given by keyword only, as ``recorded``."""
    defaults = getattr(function, name) or ()
    if isinstance(defaults, dict):
        return tuple((key, _default(value)) for key, value in defaults.items())
    return tuple(map(_default, defaults))


def _default(value: Any) -> object:
    return ValueKind(repr(value)) if is_plain(value) and not is_leaf(value) else recorded(value)


def _functions_in(value: Any) -> list[FunctionType]:
    """Python functions that a callable or a member of a class is made of."""
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


def _slots_of(value: object) -> list[str]:
    """Names of the slots of an object of a user's class that has no other attributes."""
    kind = type(value)
    top = kind.__module__.partition(".")[0]
    if hasattr(value, "__dict__") or top in _LIBRARIES or top in sys.stdlib_module_names or top == "builtins":
        return []
    slots = (vars(cls).get("__slots__", ()) for cls in kind.__mro__)
    return [name for slot_names in slots for name in ((slot_names,) if isinstance(slot_names, str) else slot_names)]


def _of_users(owner: type | None) -> list[type]:
    """Classes of an object that no library has."""
    return [kind for kind in _mro(owner) if kind is not object and not _is_of_library(kind.__module__)]


def _holds_settings(owner: type | None) -> bool:
    return any(kind.__name__ in _SETTINGS and _is_of_library(kind.__module__) for kind in _mro(owner))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield code, and that of the functions and classes inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _words_in(code: CodeType) -> dict[str, None]:
    """Collect every name and text in code: more than it reads, without a look at each instruction."""
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
    """Recorded form of the values of entries, by path."""
    return {label: recorded(value) for label, _, value in entries}
