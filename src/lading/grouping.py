"""Grouping: which parameters of a run a rule for matrices moves, and which the rule beside it does, with reasons."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import cast

from lading.errors import ConfigError, did_you_mean
from lading.optim.registry import DEFAULT, make_rule, matrix_rule
from lading.optim.rule import MatrixRule

MATRIX, REST = "matrix", "rest"
#: Words and rows that ``Matrices.parameters`` takes, for errors.
_WANTED = "'matrix', 'rest', a number of equal parts, or the rows of each part such as \"64 32 32\""
_SMALL = "no matrix"
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


class Use(StrEnum):
    """First use that a model makes of a parameter."""

    PRODUCT = "product"
    TABLE = "embedding"
    HEAD = "head"
    CONVOLUTION = "convolution"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Described:
    """A parameter by all its names, its shape and its use."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    use: Use


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """A rule that moves whole matrices; what is no matrix is moved by the optimizer beside it.

    Where nothing is said, matrices are the parameters of two dims that products read, but for the last product's (the
    head) and those that are looked up in (embeddings), and stacks of three dims, one matrix for each of the first.

    Attributes:
        rule: Name of a rule for matrices (``lading.optim.registry``).
        lr: Learning rate at its peak; it follows the schedule as that of the optimizer beside it does.
        settings: Settings of the rule's class, by name.
        parameters: Ways to move parameters, by pattern of names ("layers.*.qkv.weight"), of which the first that
            matches
            counts: "matrix"; "rest", moved by the optimizer beside it; for several matrices in one, how many of equal
            rows, or the rows of each ("64 32 32").
    """

    rule: str
    lr: float
    settings: dict[str, bool | int | float | str] = field(default_factory=lambda: {})
    parameters: dict[str, int | str] = field(default_factory=lambda: {})

    def __post_init__(self) -> None:
        if not (isinstance(self.lr, (int, float)) and 0 <= self.lr < 1e6):
            raise ConfigError(f"lr: expected a number >= 0, got {self.lr!r}")
        for pattern, value in self.parameters.items():
            if value not in (MATRIX, REST):
                _rows(pattern, value)
        self.made()

    def made(self) -> MatrixRule:
        """Make the rule with its settings.

        Raises:
            ConfigError: no such rule or setting, or one out of range.
        """
        matrix_rule(self.rule)
        return cast(MatrixRule, make_rule(self.rule, self.settings))


@dataclass(frozen=True, slots=True)
class Grouping:
    """Parameters by what moves them, each by its number.

    Attributes:
        matrices: Those a rule moves, with the rows of their parts; () for whole.
        rest: Those that the optimizer beside it moves, with the reason.
    """

    matrices: dict[int, tuple[int, ...]]
    rest: dict[int, str]

    def describe(self, rule: str, named: Sequence[Described], beside: str = DEFAULT) -> str:
        """Describe both groups in one line, layers folded; ``beside`` names what moves the rest."""
        parted = " in parts" if any(self.matrices.values()) else ""
        matrices = _folded([named[i].names[0] for i in self.matrices]) or "nothing, as its matrices are frozen"
        text = f"{rule} moves {matrices}{parted}"
        reasons: dict[str, list[str]] = {}
        for number, reason in self.rest.items():
            reasons.setdefault(reason, []).append(named[number].names[0])
        small = len(reasons.pop(_SMALL, ()))
        others = [f"{_folded(names)} ({reason})" for reason, names in reasons.items()]
        others += [f"{small} of fewer than two dims"] if small else []
        return f"{text}; {beside} moves {'; '.join(others) or 'nothing'}"


def group(matrices: Matrices, named: Sequence[Described], frozen: Sequence[Described] = ()) -> Grouping:
    """Decide what moves each trained parameter.

    Args:
        frozen: Parameters that are not trained, or no more: what is said of them has no use for now, and is no error.

    Raises:
        ConfigError: a pattern that matches nothing, a parameter it cannot mean, or one that nobody says how to move.
    """
    moved: dict[int, tuple[int, ...]] = {}
    rest: dict[int, str] = {}
    unused = dict.fromkeys(matrices.parameters)
    for number, item in enumerate(named):
        pattern = next((p for p in matrices.parameters if any(fnmatchcase(n, p) for n in item.names)), None)
        if pattern is None:
            reason = _by_itself(item, matrices.rule)
        else:
            unused.pop(pattern, None)
            reason = "as told" if matrices.parameters[pattern] == REST else ""
        if reason:
            rest[number] = reason
        else:
            moved[number] = _parts(item, matrices, pattern)
    unused = [p for p in unused if not any(fnmatchcase(name, p) for item in frozen for name in item.names)]
    if unused:
        raise ConfigError(_unmatched(unused[0], named))
    if not moved and not any(_is_matrix(item, matrices) for item in frozen):
        raise ConfigError(f"{matrices.rule}: expected at least one matrix to move, found none; train without matrices")
    return Grouping(moved, rest)


def _is_matrix(item: Described, matrices: Matrices) -> bool:
    """Whether a frozen parameter would be moved as a matrix if it were trained."""
    pattern = next((p for p in matrices.parameters if any(fnmatchcase(n, p) for n in item.names)), None)
    if pattern is not None:
        return matrices.parameters[pattern] != REST
    return len(item.shape) in (2, 3) and item.use is Use.PRODUCT


def _by_itself(item: Described, rule: str) -> str:
    """Reason why no matrix rule moves a parameter of which nobody says anything; "" if it is a matrix."""
    if len(item.shape) < 2:
        return _SMALL
    if item.use in (Use.TABLE, Use.HEAD):
        return item.use.value
    if item.use is Use.OTHER:
        return "in no product"
    if len(item.shape) > 3 or item.use is Use.CONVOLUTION or 0 in item.shape:
        raise ConfigError(
            f"{item.names[0]}: {rule} moves matrices and stacks of them, this is a {item.use.value} weight of shape "
            f'{item.shape}; leave it to the optimizer beside: matrices.parameters = {{ "{item.names[0]}" = "rest" }}'
        )
    return ""


def _parts(item: Described, matrices: Matrices, pattern: str | None) -> tuple[int, ...]:
    """Rows of each part of a matrix; () where it is one."""
    if len(item.shape) not in (2, 3) or 0 in item.shape:
        raise ConfigError(
            f"{item.names[0]}: expected a matrix or a stack of matrices for {matrices.rule}, got shape {item.shape}; "
            f"set matrices.parameters {pattern!r} to 'rest'"
        )
    value = matrices.parameters[pattern] if pattern is not None else MATRIX
    if value == MATRIX:
        return ()
    rows, parts = item.shape[-2], _rows(str(pattern), value)
    if isinstance(parts, int):
        if rows % parts:
            raise ConfigError(f"{item.names[0]}: expected parts that divide its {rows} rows, got {parts} parts")
        return (rows // parts,) * parts
    if sum(parts) != rows:
        raise ConfigError(f"{item.names[0]}: expected parts that add up to its {rows} rows, got {sum(parts)}")
    return parts


def _rows(pattern: str, value: int | str) -> int | tuple[int, ...]:
    """Read a number of parts, or the rows of each."""
    if isinstance(value, int) and value > 0:
        return value
    words = value.split() if isinstance(value, str) else []
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"parameters: {pattern!r}: expected {_WANTED}, got {value!r}")
    return tuple(map(int, words))


def _unmatched(pattern: str, named: Sequence[Described]) -> str:
    names = [name for item in named for name in item.names]
    matched = [name for name in names if fnmatchcase(name, pattern)]
    if matched:
        return f"matrices.parameters: {pattern!r} comes behind patterns that take all it matches; put it first"
    hint = did_you_mean(pattern, names, 0.3)
    return f"matrices.parameters: expected patterns that match a trained parameter, {pattern!r} matches none{hint}"


def _folded(names: Sequence[str]) -> str:
    """Fold names that differ in layers only: ``"4 of layers.*.wq.weight, head.weight"``."""
    counts: dict[str, list[str]] = {}
    for name in names:
        counts.setdefault(_NUMBER.sub(".*", name), []).append(name)
    words = [
        f"{len(folded_names)} of {folded}" if len(folded_names) > 1 else folded_names[0]
        for folded, folded_names in counts.items()
    ]
    return ", ".join(words)


def matrices_from(table: Mapping[str, object]) -> Matrices:
    """Read what ``dataclasses.asdict`` of a ``Matrices`` gave.

    Raises:
        ConfigError: as for ``Matrices``.
    """
    try:
        return Matrices(**table)  # pyright: ignore[reportArgumentType]
    except TypeError as error:
        raise ConfigError(f"expected rule, lr, settings and parameters of matrices, got {', '.join(table)}") from error
