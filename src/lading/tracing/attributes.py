"""Attributes that a step leaves in plain Python: of modules, and of objects, containers and functions they hold.

A captured step is the same in every step, so a counter that decides what the next forward does, or a tensor that the
next forward reads, would give other numbers than eager. Most models leave nothing. Where something is left, the step is
captured once more as the next step would find the model, and the two captures are compared. What that cannot show is a
decision that falls many steps later: numbers notice when they are compared, the length of a list does not.
"""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.lr_scheduler import LRScheduler

from lading.errors import CaptureError
from lading.ir.graph import StepGraph
from lading.tracing.module_hooks import hooks_of

_PLAIN = (int, float, bool, str, complex, bytes, np.generic, type(None))
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
#: Elements that are compared of a tensor that a step reads as a constant: of a small one all, of one with more so many.
_SMALL, _SAMPLED = 512, 64
#: What ``torch.nn.Module`` keeps for itself.
OF_TORCH = frozenset(vars(torch.nn.Module()))
#: Items of a list, dict, set or array that are compared; the length of all but arrays always is.
COMPARED = 64
#: Items of a dict or set that are looked into.
_LOOKED_INTO = 4096
#: Name of a list's length among its items.
LENGTH = "length"
#: How far containers and objects inside one another are followed.
_DEEPEST = 3
GONE = object()
#: Packages whose objects are no part of a step: what a logger is told to show changes no number.
_APART = frozenset({"logging"})
_ADVICE = (
    "keep it in a buffer (register_buffer) and compute with it as a tensor, or leave it as it is while training "
    "(and capture again when it changes)"
)

#: Where an attribute is: the table that holds it, by identity, and its name there.
Place = tuple[int, Any]


@dataclass(frozen=True)
class AttributeTable:
    """Attributes of a module or of an object it holds, or items of a container; with a copy of what they were.

    Attributes:
        label: Dotted path, for messages.
        held: The dict, container or variable itself.
        before: Copy of it, made before the step.
        owner: Class of the module or object; None for a container.
        attribute: Name of the attribute that leads to a container; empty where a variable or an argument does.
    """

    label: str
    held: Any
    before: Any
    owner: type | None = None
    attribute: str = ""

    def restore(self) -> None:
        """Make the table what it was; one that was not touched, which others may share, stays untouched."""
        table, before = self.held, self.before
        if isinstance(table, np.ndarray):
            table[...] = before
        elif isinstance(table, CellType):
            _refill(table, before)
        elif not _is_untouched(table, before):
            table.clear()
            (table.update if isinstance(table, (dict, set)) else table.extend)(before)


def _refill(cell: CellType, before: CellType) -> None:
    """Give a variable the value it had; one that had none yet has none again."""
    try:
        cell.cell_contents = before.cell_contents
    except ValueError:
        del cell.cell_contents


def _is_untouched(table: Any, before: Any) -> bool:
    if len(table) != len(before):
        return False
    if isinstance(table, dict):
        return all(key in before and before[key] is value for key, value in table.items())
    return table == before if isinstance(table, set) else all(map(operator.is_, table, before))


@dataclass
class Left:
    """Changes that a forward left in attributes.

    Attributes:
        labels: Path of each attribute.
        plain: New values of numbers, texts and flags that changed, and of containers of such; ``GONE`` for none; and
            modules put in the place of others.
        tensors: Tensors of the step that attributes now hold, which held none before; or what has some inside.
    """

    labels: dict[Place, str] = field(default_factory=lambda: {})
    plain: dict[Place, Any] = field(default_factory=lambda: {})
    tensors: dict[Place, Any] = field(default_factory=lambda: {})

    def forget_steady(self, is_steady: Callable[[torch.Tensor], bool]) -> None:
        """Leave out tensors whose values are the same in every step: tables that the next step would make again."""
        for place in [p for p, value in self.tensors.items() if all(map(is_steady, fakes_in(value)))]:
            del self.tensors[place], self.labels[place]


def tables_of(model: torch.nn.Module, loss: Any = None) -> list[AttributeTable]:
    """Copy every table in which a step of the model and its loss could leave something."""
    tables: dict[int, AttributeTable] = {}
    _add_modules(tables, "", model)
    if isinstance(loss, torch.nn.Module):
        _add_modules(tables, "loss", loss)
    else:
        _walk(tables, "loss", loss, _DEEPEST)
    return list(tables.values())


def tables_at(label: str, value: Any) -> list[AttributeTable]:
    """Copy the tables that a value, known as ``label``, is or holds."""
    tables: dict[int, AttributeTable] = {}
    _walk(tables, label, value, _DEEPEST)
    return list(tables.values())


def _add_modules(tables: dict[int, AttributeTable], prefix: str, root: torch.nn.Module) -> None:
    for name, module in root.named_modules(prefix=prefix):
        _add(tables, name, vars(module), type(module))
        _add(tables, name, vars(module)["_modules"], attribute="_modules")
        for key, value in list(vars(module).items()):
            if key not in OF_TORCH:
                _walk(tables, joined(name, key), value, _DEEPEST, key)
        parameters = ((joined(name, key), p) for key, p in module._parameters.items() if p is not None)
        for label, hooked in ((name, module), *parameters):
            for kind, hook in hooks_of(hooked):
                _walk(tables, f"{label} {kind}".lstrip(), hook, _DEEPEST)


def joined(*parts: object) -> str:
    """Join parts, of which some may be empty, to a dotted path."""
    return ".".join(part for part in map(str, parts) if part)


def _walk(tables: dict[int, AttributeTable], label: str, value: Any, depth: int, attribute: str = "") -> None:
    """Add the tables that a value is or holds to ``found``; ``attribute`` is the name that leads there."""
    if isinstance(value, MethodType):
        value = value.__self__
    elif isinstance(value, partial):
        _walk(tables, f"{label}.keywords", value.keywords, depth)
        value = (value.func, value.args)
    elif isinstance(value, torch.optim.Optimizer):  # its states change by themselves, its settings are told
        label, value, attribute = f"{label}.param_groups", value.param_groups, "param_groups"
    table = value if type(value) in (*_CONTAINERS, CellType) or _is_array(value) else None
    owner = type(value) if table is None and _is_plain_object(value) else None
    if owner is not None:
        table = vars(value)
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            _walk(tables, f"{label}.{name}", cell, depth)
    if table is not None:
        if id(table) in tables:
            return
        _add(tables, label, table, owner, attribute)
    elif not isinstance(value, tuple):
        return
    if depth:
        items = items_of(value if table is None else table)
        for key, inner in list(items if owner is not None else islice(items, _LOOKED_INTO)):
            name = str(key) if owner is not None else attribute
            _walk(tables, joined(label, key), inner, depth - 1, name)


def _add(
    tables: dict[int, AttributeTable], label: str, table: Any, owner: type | None = None, attribute: str = ""
) -> None:
    tables.setdefault(id(table), AttributeTable(label, table, copied(table), owner, attribute))


def copied(table: Any) -> Any:
    """Shallow copy of a table; a cell is a variable of a function that an inner one assigns."""
    if isinstance(table, CellType):
        return CellType(*(value for _, value in items_of(table)))
    return copy.copy(table)


def is_apart(value: Any) -> bool:
    """Whether an object is no part of a step, such as a logger."""
    return any(kind.__module__.partition(".")[0] in _APART for kind in type(value).__mro__)


def is_looked_into(value: Any) -> bool:
    """Whether a value is a container, array, object or variable whose items and attributes are known by their paths."""
    return type(value) in (*_CONTAINERS, CellType) or _is_array(value) or _is_plain_object(value)


def _is_plain_object(value: Any) -> bool:
    """Whether a value is an object of the user's, or a function, that is no module, tensor or class."""
    if isinstance(value, (torch.nn.Module, torch.Tensor, ModuleType, type)):
        return False
    if is_apart(value):
        return False
    is_of_torch = type(value).__module__.startswith("torch") and not isinstance(value, LRScheduler)
    return type(getattr(value, "__dict__", None)) is dict and not is_of_torch


def version_of(tensor: torch.Tensor) -> int | None:
    """How often torch has written a tensor in place; None of inference tensors, of which torch counts nothing."""
    return None if tensor.is_inference() else tensor._version


def sample_of(tensor: torch.Tensor) -> bytes:
    """Bytes of all elements of a small tensor, or of some of a large one, spread over it.

    What is written through ``.data`` or by numpy torch does not count; an average of weights changes them all. Nothing
    of a tensor on another device, for which the host would wait in each step.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return b""
    samples_per_dim = _SMALL if tensor.numel() <= _SMALL else max(1, round(_SAMPLED ** (1 / tensor.dim())))
    parts = tuple(
        slice(None, None, -(-length // samples_per_dim)) if length else slice(None) for length in tensor.shape
    )
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        some = tensor.resolve_conj().resolve_neg()
        some = torch.view_as_real(some) if some.is_complex() else some
        return some[parts].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "biufc"


def fakes_in(value: Any, depth: int = _DEEPEST) -> Iterator[torch.Tensor]:
    """Find the tensors of a step that a value is or holds, ``depth`` containers deep."""
    if isinstance(value, FakeTensor):
        yield value
    elif depth:
        inside: Iterable[Any] = ()
        if isinstance(value, (tuple, list, set, deque)):
            inside = value
        elif isinstance(value, dict):
            inside = value.values()
        elif _is_plain_object(value):
            inside = vars(value).values()
        for inner in inside:
            yield from fakes_in(inner, depth - 1)


def is_leaf(value: Any, depth: int = _DEEPEST) -> bool:
    """Whether a value is a number, a text or a flag, or holds nothing else and cannot change."""
    if isinstance(value, _PLAIN):
        return True
    return isinstance(value, (tuple, frozenset)) and depth > 0 and all(is_leaf(inner, depth - 1) for inner in value)


def is_plain(value: Any, depth: int = _DEEPEST) -> bool:
    """Whether a value is a number, a text or a flag, or a container of nothing else."""
    if isinstance(value, _PLAIN) or (depth == _DEEPEST and _is_array(value)):
        return True
    if not depth or not (isinstance(value, (tuple, frozenset)) or type(value) in _CONTAINERS):
        return False
    return all(is_plain(inner, depth - 1) for inner in (value.values() if isinstance(value, dict) else value))


def left_in(tables: list[AttributeTable]) -> Left:
    """Collect what has changed in tables since they were copied."""
    left = Left()
    for table in tables:
        before, now = dict(items_of(table.before)), dict(items_of(table.held))
        for key in (*now, *(before.keys() - now.keys())):
            value, old, place = now.get(key, GONE), before.get(key), (id(table.held), key)
            if value is old or (value is GONE and not isinstance(table.held, (dict, set))):
                continue  # a shorter list says so by its length
            if next(fakes_in(value), None) is not None:
                if isinstance(value, FakeTensor) and isinstance(old, torch.Tensor):
                    continue
                left.tensors[place] = value
            elif _is_other(value, old):
                left.plain[place] = value
            else:
                continue
            left.labels[place] = joined(table.label, key)
    return left


def carried(tables: list[AttributeTable], was_read: Callable[[torch.Tensor], bool]) -> Iterator[str]:
    """Paths of attributes that held a tensor, which the step read, and now hold one that was made in the step.

    What the step did not read it makes anew each time, as hooks of ``torch.nn.utils.weight_norm`` do.
    """
    for table in tables:
        before = dict(items_of(table.before))
        for key, value in items_of(table.held):
            old = before.get(key)
            is_made = isinstance(value, FakeTensor) and value is not old
            if is_made and isinstance(old, torch.Tensor) and was_read(old):
                yield joined(table.label, key)


def _is_other(value: Any, old: Any) -> bool:
    """Whether a value that is not the one before may make another step of the next."""
    if _is_array(value):
        return not (isinstance(old, np.ndarray) and np.array_equal(value, old))
    if value is GONE or isinstance(value, torch.nn.Module):
        return True
    return is_plain(value) and not (type(value) is type(old) and is_plain(old) and bool(value == old))


def items_of(table: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (name, value) for each entry of a mapping; for a list or the like, its length and its first items."""
    if isinstance(table, dict):
        yield from table.items()
    elif isinstance(table, set):
        yield from ((item, True) for item in table)
    elif isinstance(table, CellType):
        with suppress(ValueError):  # a variable that has no value yet
            yield "", table.cell_contents
    elif isinstance(table, np.ndarray):
        yield from enumerate(table.flat[:COMPARED].tolist())
    else:
        yield LENGTH, len(table)
        yield from enumerate(islice(table, COMPARED))


def read_item(table: Any, key: Any) -> object:
    """Value in a table under a name that ``items_of`` gave; GONE where there is none."""
    if isinstance(table, dict):
        return table.get(key, GONE)
    if isinstance(table, set):
        return True if key in table else GONE
    if isinstance(table, CellType):
        return next((value for _, value in items_of(table)), GONE)
    if key == LENGTH:
        return len(table)
    if isinstance(table, np.ndarray):
        return table.flat[key].item() if key < table.size else GONE
    return table[key] if key < len(table) else GONE


def carry(tables: list[AttributeTable], left: Left, seen: set[str]) -> None:
    """Put into the tables what the last step left; add the names of numbers that decide something to ``seen``."""
    places: dict[int, list[Place]] = {}
    for place in left.labels:
        places.setdefault(place[0], []).append(place)
    for table in tables:
        for place in places.get(id(table.held), ()):
            if place in left.tensors:
                _set(table.held, place[1], left.tensors[place])
            elif isinstance(table.held, np.ndarray):
                table.held.flat[place[1]] = left.plain[place]
            else:
                _set(table.held, place[1], _watched(left.plain[place], left.labels[place], seen))


def _set(table: Any, key: Any, value: Any) -> None:
    """Set one attribute or item of a table; the item ``LENGTH`` of a list sets how long it is."""
    if isinstance(table, CellType):
        table.cell_contents = value
    elif isinstance(table, dict):
        if value is GONE:
            table.pop(key, None)
        else:
            table[key] = value
    elif isinstance(table, set):
        (table.discard if value is GONE else table.add)(key)
    elif key == LENGTH:
        while len(table) > int.__index__(value):
            table.pop()
        while COMPARED <= len(table) < int.__index__(value):
            table.append(table[-1])
    elif key < len(table):
        table[key] = value
    else:
        table.append(value)


def check_steady(graph: StepGraph, left: Left, again: Callable[[set[str]], tuple[StepGraph, Left]]) -> None:
    """Refuse a step that is another one the next time.

    Args:
        left: Changes that the captured forward left.
        again: Captures once more with these carried over; takes a set for the names of the numbers that decide
            something.

    Raises:
        CaptureError: names the attribute.
    """
    read_labels: set[str] = set()
    names = ", ".join(repr(name) for name in list(left.labels.values())[:3])
    try:
        second, changed = again(read_labels)
    except CaptureError as error:
        raise CaptureError(f"the forward changes {names}, and the next step cannot go on from that: {error}") from error
    if second != graph:
        moving = [left.labels[place] for place in left.plain if place in changed.plain] or list(left.labels.values())
        names = ", ".join(repr(name) for name in moving[:3])
        raise CaptureError(f"the forward changes {names}, and so what the next step computes; {_ADVICE}")
    deciding = sorted(read_labels & {changed.labels[place] for place in changed.plain})
    if deciding:
        raise CaptureError(
            f"the forward changes {deciding[0]!r} in every step and decides by it what to compute; {_ADVICE}"
        )


def _watched(value: Any, label: str, seen: set[str]) -> Any:
    """Wrap a number so that it notices when it is compared, counted with or converted; anything else stays as it is."""
    if type(value) not in (int, float):
        return value
    return _watching(type(value), label, seen)(value)


_ARITHMETIC = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv",
               "mod", "rmod", "pow", "rpow", "neg", "pos", "abs")  # fmt: skip
_DECISIONS = ("lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "float", "index", "hash", "round", "trunc", "divmod")


def _watching(base: type, label: str, seen: set[str]) -> type:
    def arithmetic(method: Any) -> Any:
        def compute(self: Any, *others: Any) -> Any:
            return _watched(method(self, *others), label, seen)

        return compute

    def decision(method: Any) -> Any:
        def decide(self: Any, *others: Any) -> Any:
            seen.add(label)
            return method(self, *others)

        return decide

    methods: dict[str, Any] = {}
    for names, wrap in ((_ARITHMETIC, arithmetic), (_DECISIONS, decision)):
        for name in (f"__{name}__" for name in names):
            if hasattr(base, name):
                methods[name] = wrap(getattr(base, name))
    return type(f"watched_{base.__name__}", (base,), methods)
