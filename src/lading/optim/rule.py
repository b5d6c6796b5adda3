"""Rules: what an optimizer keeps of a parameter, what an update costs, and its arithmetic.

A rule is a frozen dataclass of its settings. What plans and costs ask of it needs no torch, which only its arithmetic
imports, when it runs. There are two kinds:

- ``ParameterRule`` moves any parameter. Unless it is ``whole``, its update treats elements alone, so that states of a
  large parameter can be cut into parts that pass through the device one after another.
- ``MatrixRule`` moves whole matrices, beside a ``ParameterRule`` for what is none. Its arithmetic is a ``Rule``:
  ``pre`` (elementwise: on any piece of the gradient), ``direction`` (on the whole matrix that ``pre`` gave) and
  ``post`` (elementwise again), so that anyone may run its parts anywhere.

A state is cut with its parameter, or whole with whoever runs ``direction``. Functions read and write their arguments,
nothing else: pieces give the bits of the whole.

>>> rule = Muon().maths()
>>> held, whole = fresh(rule, grad.shape, grad.dtype, grad.device)
>>> update_matrix(rule, param, grad, held, whole, lr=0.02, update=1)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

from lading.errors import ConfigError

if TYPE_CHECKING:
    import torch

States = dict[str, "torch.Tensor"]
#: Elements that an update with temporaries is given at once, by kind of device: few enough for a cache, many enough to
#: hide launches on a GPU.
AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}


def elements_at_once(kind: str) -> int:
    """Elements that an update with temporaries is given at once; on a device of another kind as few as on a CPU."""
    return AT_ONCE.get(kind, AT_ONCE["cpu"])


#: What to do where an update does not treat elements alone.
INSTEAD = (
    'take one that does, lading.optimizer("adafactor"), or lading.Matrices(rule="muon") for matrices; a rule of your '
    "own says whole = True"
)
#: Norms, orders, and what LAPACK takes whatever the size.
SMALL_BYTES = 4 << 10
#: Bytes of a number in the formats that states have, over those of float32.
_SHARES = MappingProxyType({"bfloat16": 0.5, "uint8": 0.25})


class StatePlace(StrEnum):
    """Place of a state: cut like its parameter, or whole with the matrix's owner."""

    ELEMENTWISE = "elementwise"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A state of a parameter or a matrix, zero before the first update.

    Attributes:
        shape: Its own; that of the parameter or matrix if it is cut like it.
        dtype: "float32", ...; "" for that of the weights that move: the parameter's, or its float32 master's.
        block: Elements of the parameter, in the order of memory, for which one element stands, as a scale does; 1 for
            a state that is cut element by element.
    """

    shape: tuple[int, ...]
    dtype: str = ""
    place: StatePlace = StatePlace.ELEMENTWISE
    block: int = 1


@dataclass(frozen=True)
class UpdateWork:
    """Products, decompositions and passes that one update of one matrix takes.

    Attributes:
        products: (times, m, n, k): so many products of (m, k) by (k, n).
        eigen: (times, n): decompositions of symmetric matrices of n rows; QR and roots count as what they cost.
        passes: Times all elements of the matrix are read or written.
    """

    products: tuple[tuple[float, int, int, int], ...]
    eigen: tuple[tuple[float, int], ...] = ()
    passes: float = 0.0

    @property
    def flops(self) -> float:
        """FLOP of the update: a multiply-add counts as two, a decomposition as 9 n^3 (Golub and Van Loan, 8.3)."""
        products = sum(2 * times * m * n * k for times, m, n, k in self.products)
        return products + sum(9 * times * n**3 for times, n in self.eigen)


@dataclass(frozen=True, kw_only=True)
class ParameterRule(ABC):
    """Optimizer that moves any parameter; a subclass is a frozen, keyword-only dataclass of its settings.

    A new one is a file with such a class, and a line in ``lading.optim.registry``; or no line at all, and
    "module:Class" for its name. What it costs follows from its states.

    Attributes:
        lr: Learning rate at its peak.
        planned: Names of the settings from which states follow: a plan is for these values. The others may change.
        counts: Whether updates are numbered; ``update`` is then given the number.
        whole: Whether an update needs the whole parameter. Its states are then not cut: not into parts that move one
            after another, and not over ranks.
        temporaries: Numbers that ``update`` allocates for each element it is given.
        passes: Times an update reads or writes an element besides operands once each.
        calls: Operations that an update by code of its own makes, for each run of ``AT_ONCE`` elements; 0 for one
            kernel.
    """

    lr: float = 1e-3
    planned: ClassVar[tuple[str, ...]] = ()
    counts: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    temporaries: ClassVar[int] = 0
    passes: ClassVar[float] = 0.0
    calls: ClassVar[int] = 0

    def scratch_numbers(self, elements: int, kind: str) -> int:
        """Count the float32 numbers that an update of so many elements allocates on a kind of device."""
        return self.temporaries * elements

    def moves(self, dtype: str) -> bool:
        """Whether it moves weights, a parameter's or its master's, of a dtype; one for complex weights overrides it."""
        return not dtype.startswith("complex")

    def of_size(self, elements: int) -> Self:
        """Rule that moves a parameter of so many elements: this one, unless small ones have other planned settings."""
        return self

    @abstractmethod
    def state_specs(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        """States of a parameter of this shape, or of a part of one, by name, in the order in which they are kept."""

    @abstractmethod
    def update(
        self, param: torch.Tensor, grad: torch.Tensor, states: States, *, lr: float, step: torch.Tensor | None
    ) -> None:
        """Move a parameter and its states in place.

        Args:
            param, grad: Tensors of one dtype, shape and dense strides; flat parts of these unless the rule is
                ``whole``.
            states: Tensors by the names of ``state_specs``.
            lr: Learning rate of this update.
            step: float32 scalar, the number of this update from 1; None where the rule does not count.
        """

    @abstractmethod
    def plain(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Make the optimizer of plain PyTorch to which ``update`` is equal to the bit."""

    def update_piece(self, param: torch.Tensor, grad: torch.Tensor, states: States, *, lr: float, update: int) -> None:
        """Move a piece of a parameter that ranks share, of any shape; ``update`` counts from 1.

        Raises:
            ConfigError: the rule cannot.
        """
        raise ConfigError(
            f"expected a rule that moves pieces of parameters on ranks, as lading.AdamW does, got {type(self).__name__}"
        )

    @property
    def moments(self) -> int:
        """Number of states of a matrix that have its shape."""
        shape = (2, 3)
        return sum(state.shape == shape for state in self.state_specs(shape).values())

    def state_numbers(self, shape: tuple[int, ...]) -> float:
        """Number of elements of all states of a parameter; those of fewer bits than float32 count as a part of one."""
        return sum(prod(s.shape) * _SHARES.get(s.dtype, 1.0) for s in self.state_specs(shape).values())


def trial_of(size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Make a vector and three gradients of it, of very different sizes along the vector."""
    import torch

    seed = torch.Generator().manual_seed(0)
    sizes = torch.linspace(0.1, 8, size)
    return torch.randn(size, generator=seed), [torch.randn(size, generator=seed) * sizes for _ in range(3)]


def check_elementwise(rule: ParameterRule, initial: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
    """Try whether a rule that is not ``whole`` gives the parts of a small matrix the bits of the whole.

    Args:
        initial: States of 256 elements before the first update; zeros where it says none.

    Raises:
        ConfigError: it does not, or its update fails.
    """
    import torch

    if rule.whole:
        return

    def update_part(part: slice, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        param, grads = trial_of(256)
        copy = param[part].clone().view(shape)
        states: States = {}
        for name, spec in rule.state_specs(shape).items():
            states[name] = torch.zeros(spec.shape, dtype=dtype_of(spec, copy.dtype))
            if name in initial:
                states[name].copy_(initial[name][part].view(shape) if spec.shape else initial[name])
        for number, grad in enumerate(grads, 1):
            step = torch.tensor(float(number)) if rule.counts else None
            rule.update(copy, grad[part].clone().view(shape), states, lr=1e-2, step=step)
        return copy, *states.values()

    name = getattr(rule, "optimizer", type(rule).__name__)
    try:
        with torch.inference_mode(False), torch.no_grad():
            full_update = update_part(slice(0, 256), (16, 16))
            parts = [(part, update_part(part, (part.stop - part.start,))) for part in (slice(0, 64), slice(64, 256))]
    except Exception as error:
        raise ConfigError(
            "optimizer: expected one whose update treats elements alone, so that parameters can be moved part by part; "
            f"{name} failed on a matrix of 256 elements: {type(error).__name__}: {error}; {INSTEAD}"
        ) from error
    for part, updated in parts:
        pairs = ((full.flatten(), moved_part.flatten()) for full, moved_part in zip(full_update, updated, strict=True))
        if not all(torch.equal(full[part] if full.numel() == 256 else full, moved_part) for full, moved_part in pairs):
            raise ConfigError(
                f"optimizer: expected one whose update treats elements alone, but {name} gives a part of a parameter "
                f"other numbers than the whole; {INSTEAD}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCase:
    """A matrix that an update moves, and how its tensors lie, for the scratch it takes.

    Attributes:
        rows_at_once: Rows that elementwise work takes at once.
        threads: Compute threads.
        rounds: What moves has fewer than 32 bits, so that copies of it are widened and rounded again.
        widens: The gradient is cast on its way to a master.
        is_wide: The gradient is float32.
        is_turned: The gradient does not lie row by row.
    """

    rows: int
    columns: int
    rows_at_once: int
    threads: int
    rounds: bool
    widens: bool
    is_wide: bool
    is_turned: bool


@dataclass(frozen=True, kw_only=True)
class MatrixRule(ABC):
    """Optimizer that moves whole matrices; a subclass is a frozen, keyword-only dataclass of its settings.

    Attributes:
        default_lr: Learning rate of an optimizer for which none is said.
        usual_lr: A learning rate at which it trains well, for demonstrations.
        counts: Whether updates are numbered, for bias corrections and for what is due now and then.
        due: Names of the settings that say how many updates pass until something is due; 1 for at every one.
        elementwise_bytes: Bytes read and written for each element beside products, in float32.
    """

    default_lr: ClassVar[float]
    usual_lr: ClassVar[float]
    counts: ClassVar[bool] = True
    due: ClassVar[tuple[str, ...]] = ()
    elementwise_bytes: ClassVar[float]

    @property
    @abstractmethod
    def product_dtype(self) -> str:
        """Dtype in which products run."""

    @property
    @abstractmethod
    def travels(self) -> str:
        """Dtype in which a gradient travels to its owner without losing a bit; "" for the gradient's."""

    @abstractmethod
    def state_specs(self, rows: int, columns: int) -> Mapping[str, StateSpec]:
        """States of one matrix, by name, in the order in which they are kept."""

    @abstractmethod
    def work(self, rows: int, columns: int) -> UpdateWork:
        """Work of one direction, the mean over updates."""

    def decomposes(self, update: int, shift: int = 0) -> bool:
        """Whether an update, from 1, decomposes a matrix, which may fail: all ranks then wait to hear that none did.

        Args:
            shift: Staggers matrices, as ``maths`` takes it.
        """
        return bool(self.due)

    @abstractmethod
    def shared_work(self, part: int, short: int, long: int) -> tuple[int, UpdateWork] | None:
        """Rounds of a direction that several ranks share, and one rank's work in each; None where none can share it.

        Args:
            part: Rows of each product that the rank computes, of ``short``.
        """

    @abstractmethod
    def workspace_elements(self, rows: int, columns: int) -> int:
        """Elements, of ``product_dtype``, of a place in the arena that a direction works in; 0 for scratch alone.

        The matrix itself comes first in it, and ``WorkspaceRule.direction_within`` gets the rest.
        """

    @abstractmethod
    def scratch_bytes(self, case: MatrixCase) -> int:
        """Bytes that an update of one matrix allocates."""

    @abstractmethod
    def maths(self, shift: int = 0, *, shared: bool = False) -> Rule:
        """Make the arithmetic of these settings.

        Args:
            shift: Staggers the updates at which something is due.
            shared: Products are taken by blocks of rows, which several ranks may share.
        """

    @property
    def cut_states(self) -> int:
        """Number of states that are cut as the matrix is."""
        return sum(state.place is StatePlace.ELEMENTWISE for state in self.state_specs(1, 1).values())

    def state_elements(self, rows: int, columns: int) -> tuple[int, int]:
        """Elements of states that are cut as the matrix is, and of those that lie whole with its owner."""
        states = self.state_specs(rows, columns).values()
        cut, uncut = (sum(prod(s.shape) for s in states if s.place is place) for place in StatePlace)
        return cut, uncut


class Rule(Protocol):
    """Arithmetic that moves a matrix. ``update`` counts the matrix's own updates from 1.

    Attributes:
        settings: A ``MatrixRule``; settings that no state's shape follows from may be exchanged between updates.
        shared: Whether ranks may share its products; it is a ``SharedRule`` then.
    """

    settings: Any
    shared: bool

    @property
    def travels(self) -> torch.dtype | None:
        """Dtype of what ``pre`` gives, where no bit is lost by sending it in that; None for the gradient's."""
        ...

    def pre(self, grad: torch.Tensor, held: States, update: int) -> torch.Tensor:
        """Turn a piece of the gradient, any shape, into what ``direction`` takes; states have that shape."""
        ...

    def direction(self, matrix: torch.Tensor, whole: States, update: int) -> torch.Tensor:
        """Compute the direction of a whole matrix (rows, columns), contiguous, and update its states in place."""
        ...

    def post(
        self, param: torch.Tensor, direction: torch.Tensor, shape: tuple[int, int], *, lr: float, update: int
    ) -> None:
        """Move a piece of the parameter along the same piece of the direction; ``shape`` is the whole matrix's."""
        ...

    def work(self, rows: int, columns: int) -> UpdateWork:
        """Products, decompositions and passes of ``direction``."""
        ...


class SharedRule(Rule, Protocol):
    """Rule whose products ranks share by blocks of rows."""

    def blocks(self, rows: int) -> list[slice]:
        """Cut ``rows``, the length of a matrix's shorter side, into the blocks that ranks may take, in order."""
        ...

    def by_blocks(
        self, matrix: torch.Tensor, own: Sequence[slice], meet: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Compute the direction, of which this rank computes some rows of each product.

        Args:
            matrix: (rows, columns), the same on all that share it.
            own: Blocks of rows.
            meet: From a product with these rows, the product with all.
        """
        ...


@runtime_checkable
class StackedRule(Rule, Protocol):
    """Rule that computes directions of several matrices of one shape at once, whatever the number of the update."""

    def directions(self, matrices: torch.Tensor) -> torch.Tensor:
        """Directions of matrices (number, rows, columns), which need not have the bits of ``direction``."""
        ...


class WorkspaceRule(Rule, Protocol):
    """Rule that computes directions within scratch memory of its caller."""

    def direction_within(self, matrix: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """Compute the direction of a matrix that may be overwritten, within ``room``."""
        ...


class WholeRule:
    """Base of rules whose states all lie with a matrix's owner, since they are updated from its whole gradient."""

    def __init__(self, settings: Any, shift: int = 0) -> None:
        """Take the settings; ``shift`` staggers the updates at which decompositions are due."""
        self.settings = settings
        self.shift = shift
        self.shared = False

    @property
    def travels(self) -> torch.dtype | None:
        """Number format that travels to the owner; None for that of the gradient."""
        return None

    def pre(self, grad: torch.Tensor, held: States, update: int) -> torch.Tensor:
        """Return the gradient as it is: nothing elementwise comes before the direction."""
        return grad

    def work(self, rows: int, columns: int) -> UpdateWork:
        """Work of a direction, the mean over updates."""
        return self.settings.work(rows, columns)


def copied_elements(case: MatrixCase) -> int:
    """Number of float32 elements that a copy of the gradient takes where a rule needs it so, row by row."""
    elements = case.rows * case.columns
    return elements * (not case.is_wide or case.is_turned) + -(-elements // 2) * (case.rounds and case.is_turned)


def check_ranges(name: str, low_high: Mapping[str, tuple[float, float, float]]) -> None:
    """Check settings of a rule, by their names: (value, lowest, highest).

    Raises:
        ConfigError: one is out of range, or no number.
    """
    for key, (value, low, high) in low_high.items():
        if type(value) not in (int, float) or not low <= value <= high or math.isinf(value):
            limits = f">= {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
            raise ConfigError(f"{name}: expected {key} {limits}, got {value}")


def check_choices(name: str, rule: object, choices: Mapping[str, Sequence[str]]) -> None:
    """Check settings of a rule that are one of several words.

    Raises:
        ConfigError: one is none of them.
    """
    for key, allowed in choices.items():
        if (choice := getattr(rule, key)) not in allowed:
            raise ConfigError(f"{name}: expected {key} to be one of {', '.join(allowed)}, got {choice!r}")


def dtype_of(state: StateSpec, moved: torch.dtype) -> torch.dtype:
    """Dtype of a state beside weights of dtype ``moved``."""
    import torch

    return getattr(torch, state.dtype) if state.dtype else moved


def move(param: torch.Tensor, direction: torch.Tensor, factor: float) -> None:
    """Move a parameter: ``param += factor * direction``, each element rounded once.

    In 16 bits torch's own kernel rounds an element otherwise where it is one of the last few, so that pieces would
    differ from the whole; in 32 bits it does not.
    """
    param.add_(direction.float() if param.itemsize < 4 else direction, alpha=factor)


def fresh(
    rule: Rule, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[States, States]:
    """Make the states of a matrix before the first update: those held elementwise, and whole ones."""
    import torch

    by_place: dict[StatePlace, States] = {StatePlace.ELEMENTWISE: {}, StatePlace.WHOLE: {}}
    for name, state in rule.settings.state_specs(*shape).items():
        by_place[state.place][name] = torch.zeros(state.shape, dtype=dtype_of(state, dtype), device=device)
    return by_place[StatePlace.ELEMENTWISE], by_place[StatePlace.WHOLE]


def update_matrix(
    rule: Rule, param: torch.Tensor, grad: torch.Tensor, held: States, whole: States, *, lr: float, update: int
) -> None:
    """Update one matrix in one place: what every other way of running a rule must equal, bit for bit.

    Args:
        param, grad: (rows, columns).
        held, whole: From ``fresh``.
        update: Number of the update, from 1.
    """
    shape = (param.shape[0], param.shape[1])
    travels = rule.pre(grad, held, update)
    matrix = travels.to(rule.travels or travels.dtype).contiguous()
    rule.post(param, rule.direction(matrix, whole, update).to(matrix.dtype), shape, lr=lr, update=update)
