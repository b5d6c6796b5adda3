"""Errors that Lading raises on purpose.

    LadingError
    |-- ConfigError (ValueError)     a setting, a file or an argument is wrong
    |   |-- BudgetAboveDevice        a device budget is more than the device has
    |-- CaptureError                 the model cannot be turned into a StepGraph
    |-- PlanInfeasible               no plan fits the budget; says what binds and by how much
    |-- ProgramError                 the verifier rejects a Program; names the action
    |-- SimulationError              the simulator was handed something it cannot time
    |-- BudgetExceeded               a run used more memory than its plan promised
    |-- StorageError (OSError)       a file, a tier or a checkpoint is full, corrupt or missing; or memory is
    |   |-- DamagedCheckpoint        bytes of a checkpoint are not those that were saved; names one that is whole

``BudgetWarning`` is a warning: the run goes on.

A message says what was expected, what was found and what to change.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial
from typing import Any, cast

#: Words longer than any path or number that somebody wrote; the rest of one says nothing more.
_LONG_WORD = re.compile(r"(\S{160})\S{240,}")


class LadingError(Exception):
    """Base of every deliberate error; any can be copied, pickled, and raised again in another process."""

    def __init__(self, message: str) -> None:
        super().__init__(_LONG_WORD.sub(r"\1...", message))

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild the error from its message and its keyword arguments, each an attribute of the same name."""
        parameters = inspect.signature(type(self)).parameters.values()
        named = {p.name: getattr(self, p.name) for p in parameters if p.kind is p.KEYWORD_ONLY}
        return partial(type(self), *self.args, **named), (), vars(self)


class ConfigError(LadingError, ValueError):
    """A setting, file or argument does not mean anything."""


class BudgetAboveDevice(ConfigError):
    """A device budget is more than the device has."""


class CaptureError(LadingError):
    """The model cannot be captured; names the operation, the module and what to do."""


class PlanInfeasible(LadingError):
    """Error of a budget that no plan fits.

    Attributes:
        missing_bytes: Bytes by which the binding moment is above the budget.
        smallest_budget_bytes: The smallest budget for which a plan was found. Found by moving, or recomputing, all that
            can be, so a search that mixes both may do with less. 0 where no budget helps, as a lower tier is too small.
    """

    def __init__(self, message: str, *, missing_bytes: int, smallest_budget_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        self.smallest_budget_bytes = smallest_budget_bytes


class ProgramError(LadingError):
    """A Program is not executable; names the offending action."""

    def __init__(self, message: str, *, action_id: int | None = None) -> None:
        super().__init__(message)
        self.action_id = action_id


class SimulationError(LadingError):
    """An action has no cost or no stream to run on."""


class BudgetWarning(UserWarning):
    """A step took more memory than its plan promised; says how much, and the step after it says what took it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class BudgetExceeded(LadingError):
    """Measured memory went above the promised budget."""


class StorageError(LadingError, OSError):
    """A file, a tier or a checkpoint could not be written, read or trusted; or the system gives no memory.

    Attributes:
        errno: Number of the system's error, where there was one.
    """

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class DamagedCheckpoint(StorageError):
    """Bytes of a checkpoint are not those that were saved, or are missing.

    Attributes:
        older: Folder of the newest other checkpoint up to its step, all bytes of which were read and are those that
            were saved; "" where there is none.
    """

    def __init__(self, message: str, *, older: str = "", errno: int | None = None) -> None:
        super().__init__(message, errno=errno)
        self.older = older


def check_type(name: str, value: object, kind: type, expected: str) -> None:
    """Refuse an argument of another type than ``kind``.

    Args:
        name: Name of the argument.
        expected: What to give, in words.
    Raises:
        ConfigError: it is of another type.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name}: expected {expected}, got {type(value).__name__}")


def check_rate(name: str, value: object) -> None:
    """Refuse a learning rate or a norm that is no finite number of 0 or more.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ConfigError(f"{name}: expected a finite number >= 0, got {value!r}")


def check_clip_norm(value: object) -> None:
    """Refuse a limit of the gradients' norm that is no finite number of 0 or more.

    Raises:
        ConfigError: it is none; says what to give in the place of infinity, which torch takes.
    """
    if value == float("inf"):
        raise ConfigError(
            "clip_norm: expected a finite number >= 0, got inf; a number that no norm reaches, as 1e18, takes norms "
            "and clips nothing, 0 does neither"
        )
    check_rate("clip_norm", value)


#: No number of a configuration is larger.
LARGEST = (1 << 63) - 1


def check_number(
    name: str, value: object, low: float, high: float = math.inf, *, above: bool = False, closed: bool = False
) -> None:
    """Refuse a value that is no finite number with ``low <= value < high``.

    Args:
        above: ``low`` itself is refused.
        closed: ``high`` itself is taken.

    Raises:
        ConfigError: it is none.
    """
    good = type(value) in (int, float) and low <= cast(float, value) < LARGEST
    good = good and (cast(float, value) < high or (closed and value == high))
    if not good or (above and value == low):
        most = f" and {'<=' if closed else '<'} {high:g}" if high < math.inf else ""
        limits = f"{'>' if above else '>='} {low:g}{most}"
        raise ConfigError(f"{name}: expected a number {limits}, got {short_repr(value)}")


def short_repr(value: object) -> str:
    """Print a value for an error message, in 60 characters at most."""
    return "an integer of more than 63 bits" if type(value) is int and abs(value) > LARGEST else repr(value)[:60]


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Question that ends an error message: the known name nearest to ``name``; "" where none is near.

    Args:
        cutoff: Least similarity, from 0 to 1, as of ``difflib``.
    """
    near = get_close_matches(name, list(known), 1, cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""
