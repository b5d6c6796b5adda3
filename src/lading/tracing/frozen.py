"""What a captured step froze, and whether it still is so: plain values of the batch, the model and the loss.

A step is traced once, so a number, a text or a flag that Python reads while it is traced is the same in every step.
Such values are recorded at capture and compared before each step; ``docs/frozen.md`` says which, and what is not seen.
Of what is none (a list, a function, a submodule) it is compared whether it is still the same object; where it is not,
all is read again by its path, so that an equal list in the place of a list makes no difference.

Attributes of objects and variables of functions count where the step's code names them: a counter that a loop keeps in
the object whose method the loss is may move on.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NoReturn

import torch

from lading.errors import ConfigError
from lading.ir.frozen import Frozen
from lading.tracing.attributes import GONE, OF_TORCH, is_leaf, is_looked_into, joined, tables_of
from lading.tracing.batches import input_leaves, plain_leaves
from lading.tracing.hooks import described, described_global
from lading.tracing.reach import Entry, Reach, is_named, length_of, recorded, values_of

_NUMBERS = (bool, int, float, complex)
#: Modules whose forward goes through whatever is in them.
_LISTS = (
    torch.nn.Sequential,
    torch.nn.ModuleList,
    torch.nn.ModuleDict,
    torch.nn.ParameterList,
    torch.nn.ParameterDict,
)
_ADVICE = "a captured step does not see the change: set it back, or capture and plan again"


def freeze(model: torch.nn.Module, batch: Any, loss: Any) -> Frozen:
    """Record the plain values in reach of a step, before it is traced."""
    modules, others, of_loss = _entries(model, loss)
    return Frozen(
        batch=plain_leaves(batch),
        modules=values_of(modules),
        others=values_of(others),
        loss=values_of(of_loss),
        model=weakref.ref(model),
        loss_function=loss,
    )


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
        frozen: Of the captured graph; None where it was made without a capture.
        model: What is trained; None where nobody has it.

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
        """What was recorded, as it is now.

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
        """Compare before a step.

        Args:
            batches: Micro-batches.
            inputs: Names of the tensors of one.

        Raises:
            ConfigError: names what differs, what it was and what it is.
        """
        if self._frozen is None:
            return
        for number, batch in enumerate(batches):
            given = plain_leaves(batch)
            if not _all_same(self._frozen.batch, given):
                _refuse_batch(number, self._frozen.batch, given, inputs, dict(input_leaves(batch)))
        with torch._C.DisableTorchFunctionSubclass():  # parameters whose values a trainer has answer little else
            for name, module, parts in self._parts:
                now = _parts(module)
                if len(now) != len(parts) or any(one[1] is not other[1] for one, other in zip(now, parts, strict=True)):
                    _check_parts(name, module, dict(parts), dict(now))
                    parts[:] = now
            if not all(map(_is_unchanged, self._entries)):
                self._look_again()

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


def _is_unchanged(entry: Entry) -> bool:
    now = entry[1]()
    return now is entry[2] or (is_leaf(now) and _same(now, entry[2]))


def _is_alike(now: object, before: object) -> bool:
    """Whether something of the same kind, in which all that is recorded is the same, makes the same step."""
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
            said = "nothing" if got is None else f"{'a' if was is None else 'another'} {type(got).__name__}"
            raise ConfigError(f"expected {joined(path, name)} to stay {stays}, got {said}; {_ADVICE}")


def _refuse_batch(
    number: int,
    wanted: Mapping[str, object],
    given: Mapping[str, object],
    inputs: Collection[str],
    tensors: Collection[str],
) -> None:
    """Say where a batch first differs from the captured one; both also have tensors, by name."""
    path = next(path for path in (*wanted, *given) if not _same(wanted.get(path, GONE), given.get(path, GONE)))
    expected = "a tensor" if path in inputs else _said(wanted.get(path, GONE))
    got = "a tensor" if path in tensors else _said(given.get(path, GONE))
    raise ConfigError(
        f"micro-batch {number}: expected {path!r} = {expected}, as captured, got {got}; numbers, texts and flags of a "
        "batch are part of the captured step: make it a tensor, leave out what the step does not use, or capture again"
    )


def _refuse(label: str, expected: object, got: object) -> NoReturn:
    raise ConfigError(f"expected {label} = {_said(expected)}, as captured, got {_said(got)}; {_ADVICE}")


def _all_same(wanted: Mapping[str, object], given: Mapping[str, object]) -> bool:
    return wanted.keys() == given.keys() and all(_same(given[path], value) for path, value in wanted.items())


def _checked(wanted: Mapping[str, object], entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries of what was recorded.

    Raises:
        ConfigError: a value differs.
    """
    there = {label: (label, read, value) for label, read, value in entries}
    for label, expected in wanted.items():
        got = recorded(there[label][2]) if label in there else GONE
        if not _same(got, expected):
            _refuse(label, expected, got)
        yield there[label]


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
    """Values in reach of a step: what every instance of the model must have, what this one has, the loss's."""
    tables = tables_of(model if model is not None else torch.nn.Module())
    of_loss = [table for table in tables_of(torch.nn.Module(), loss) if table.label]
    whole, alone = Reach([*tables, *of_loss], model, loss), Reach(of_loss, None, loss)
    modules = list(_of_modules(model, whole.names)) if model is not None else []
    others = [entry for table in tables for entry in whole.entries_in(table)]
    theirs = [entry for table in of_loss for entry in alone.entries_in(table)]
    if isinstance(loss, torch.nn.Module):
        theirs.extend((f"loss: {label}", read, value) for label, read, value in _of_modules(loss, alone.names))
    return modules, [*others, *whole.variables()], [*theirs, *alone.variables()]


def _of_modules(model: torch.nn.Module, names: set[str]) -> Iterator[Entry]:
    """Types, training flags, hooks, numbers, functions and dtypes of modules, and of parameters whether they are
    trained."""
    yield _entry("hooks of all modules", described_global)
    for name, module in model.named_modules():
        path, said = f"{name}." if name else "", name or "the model"
        yield _entry(f"type of {said}", partial(_type_name, module))
        yield _entry(hooks_label(name), partial(described, module))
        yield _entry(f"{path}training", partial(vars(module).get, "training"))
        for key, value in vars(module).items():
            if key not in OF_TORCH and key in names and (isinstance(value, _NUMBERS) or is_named(value)):
                yield f"{path}{key}", partial(vars(module).get, key, GONE), value
    for name, parameter in model.named_parameters():
        yield _entry(f"{name}.requires_grad", partial(getattr, parameter, "requires_grad"))
        yield _entry(f"hooks of {name}", partial(described, parameter))


def hooks_label(name: str) -> str:
    """Path of the hooks of a module."""
    return f"hooks of {name or 'the model'}"


def _entry(label: str, read: Any) -> Entry:
    return label, read, read()


def _type_name(module: torch.nn.Module) -> str:
    return type(module).__qualname__
