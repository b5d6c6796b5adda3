"""What a forward leaves in plain Python: attributes of modules and of the objects and containers they hold.

A captured step is the same in every step, so a counter that decides what the next forward does, or a tensor that the
next forward reads, would give other numbers than eager. Most models leave nothing. Where something is left, the step is
captured once more as the next step would find the model, and the two captures are compared.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lading.errors import CaptureError
from lading.ir.graph import StepGraph

_PLAIN = (int, float, bool, str, complex, type(None))
_CONTAINERS = (list, dict, set, deque)
#: Items of a container that are compared; its length always is.
_COMPARED = 64
_ADVICE = (
    "keep it in a buffer (register_buffer) and compute with it as a tensor, or leave it as it is while training "
    "(and capture again when it changes)"
)

#: Where an attribute is: the table that holds it, by identity, and its name there.
Place = tuple[int, Any]


@dataclass(frozen=True)
class Table:
    """The attributes of a module or of an object it holds, or the items of a container.

    Attributes:
        label: Dotted path, for messages.
        held: The table itself.
        before: A copy of it.
    """

    label: str
    held: Any
    before: Any

    def restore(self) -> None:
        """Make the table what it was."""
        self.held.clear()
        (self.held.update if isinstance(self.held, (dict, set)) else self.held.extend)(self.before)


@dataclass
class Left:
    """What a forward left.

    Attributes:
        labels: Path of each attribute.
        plain: New values of numbers, texts and flags that changed.
        tensors: Tensors of the step that attributes now hold, which held none before.
    """

    labels: dict[Place, str] = field(default_factory=lambda: {})
    plain: dict[Place, Any] = field(default_factory=lambda: {})
    tensors: dict[Place, torch.Tensor] = field(default_factory=lambda: {})


def tables_of(model: torch.nn.Module) -> list[Table]:
    """Every table in which a forward of the model could leave something, copied."""
    found: dict[int, Table] = {}
    for name, module in model.named_modules():
        _add(found, name, vars(module))
        for key, value in list(vars(module).items()):
            label = f"{name}.{key}".lstrip(".")
            if type(value) in _CONTAINERS and not key.startswith("_"):
                _add(found, label, value)
            elif _is_plain_object(value):
                _add(found, label, vars(value))
    return list(found.values())


def _add(found: dict[int, Table], label: str, held: Any) -> None:
    found.setdefault(id(held), Table(label, held, copy.copy(held)))


def _is_plain_object(value: Any) -> bool:
    """An object of the user's that is no module, tensor, function or class."""
    if isinstance(value, (torch.nn.Module, torch.Tensor, type)) or callable(value):
        return False
    return type(getattr(value, "__dict__", None)) is dict and not type(value).__module__.startswith("torch")


def left_in(tables: list[Table]) -> Left:
    """What has changed since the tables were copied."""
    left = Left()
    for table in tables:
        before, now = dict(_items(table.before)), dict(_items(table.held))
        for key, value in now.items():
            old, place = before.get(key), (id(table.held), key)
            if isinstance(value, FakeTensor):
                if value is not old and not isinstance(old, torch.Tensor):
                    left.tensors[place] = value
            elif not isinstance(value, _PLAIN) or value is old or (type(value) is type(old) and value == old):
                continue
            else:
                left.plain[place] = value
            left.labels[place] = f"{table.label}.{key}".lstrip(".")
    return left


def _items(held: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(held, dict):
        yield from held.items()
        return
    yield "length", len(held)
    if not isinstance(held, set):
        yield from zip(range(_COMPARED), held, strict=False)


def carry(tables: list[Table], left: Left, seen: set[str]) -> None:
    """Put into the tables what the step before left; numbers tell ``seen`` when something is decided by them."""
    for table in tables:
        for key in dict(_items(table.held)).keys() | {k for at, k in left.labels if at == id(table.held)}:
            place = (id(table.held), key)
            if place in left.tensors:
                _set(table.held, key, left.tensors[place])
            elif place in left.plain:
                _set(table.held, key, _watched(left.plain[place], left.labels[place], seen))


def _set(held: Any, key: Any, value: Any) -> None:
    """One attribute or item; a length follows from the items."""
    if isinstance(held, dict):
        held[key] = value
    elif isinstance(key, int) and not isinstance(held, set):
        if key < len(held):
            held[key] = value
        else:
            held.append(value)


def check_steady(graph: StepGraph, left: Left, again: Callable[[set[str]], tuple[StepGraph, Left]]) -> None:
    """Refuse a step that is another one the next time.

    Args:
        left: What the captured forward left.
        again: Captures once more with that carried over; takes a set for the names of the numbers that decide
            something.

    Raises:
        CaptureError: names the attribute.
    """
    seen: set[str] = set()
    names = ", ".join(repr(name) for name in list(left.labels.values())[:3])
    try:
        second, changed = again(seen)
    except CaptureError as error:
        raise CaptureError(f"the forward changes {names}, and the next step cannot go on from that: {error}") from error
    if second != graph:
        moving = [left.labels[place] for place in left.plain if place in changed.plain] or list(left.labels.values())
        names = ", ".join(repr(name) for name in moving[:3])
        raise CaptureError(f"the forward changes {names}, and so what the next step computes; {_ADVICE}")
    deciding = sorted(seen & {changed.labels[place] for place in changed.plain})
    if deciding:
        raise CaptureError(
            f"the forward changes {deciding[0]!r} in every step and decides by it what to compute; {_ADVICE}"
        )


def _watched(value: Any, label: str, seen: set[str]) -> Any:
    """A number that notices when it is compared, counted with or turned into another; anything else as it is."""
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
