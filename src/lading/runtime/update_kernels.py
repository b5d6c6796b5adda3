"""Kernels that move parameters: operations ``lading.<rule>`` (``lading.ir.update_ops``), whatever the rule.

A rule that treats elements alone is given as many at once as fit a cache, where it needs copies: of a gradient in
another dtype, or temporaries of its own. Its bits are those of ``ParameterRule.plain``.

A rule for matrices takes what is elementwise a few rows at a time; the bits are those of
``lading.optim.rule.update_matrix``. Where it has a workspace, its products write where that lies in the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import torch

from lading.errors import ConfigError
from lading.ir.graph import Op
from lading.ir.update_ops import matrix_rule_of, rule_of
from lading.optim.registry import name_of
from lading.optim.rule import MatrixCase, MatrixRule, ParameterRule, StatePlace, States, WorkspaceRule, elements_at_once
from lading.runtime.resident import give_back
from lading.runtime.scratch import bytes_of


@dataclass
class Rate:
    """Numbers of the updates of a step, which change from step to step.

    Attributes:
        value: Learning rate of the optimizer.
        matrices: Learning rate of rules for matrices.
        rules: Rule by the parameter's storage, its learning rate included, where parameter groups differ.
        norms: Norms (L1, L2) of the gradients of a parameter's updates, by its storage, which the step fills; None
            where nobody asks for them.
    """

    value: float = 0.0
    matrices: float = 0.0
    rules: Mapping[int, ParameterRule] = field(default_factory=lambda: {})
    norms: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] | None = None

    def take(self, other: Rate) -> None:
        """Take the numbers of another; kernels are bound to this object."""
        self.value, self.matrices, self.rules, self.norms = other.value, other.matrices, other.rules, other.norms

    def noting(
        self, update: Callable[[], None], gradient: torch.Tensor, clip: torch.Tensor | None, parameter: int
    ) -> Callable[[], None]:
        """Make the call of an update that takes the norms of its gradient first, in steps that ask for them.

        Args:
            clip: Scalar by which the update itself clips; None where the gradient is clipped.
            parameter: Storage of the parameter.
        """

        def run() -> None:
            if self.norms is not None:
                norms = [torch.linalg.vector_norm(gradient, order) for order in (1, 2)]
                l1, l2 = norms if clip is None else [norm * clip for norm in norms]
                self.norms.setdefault(parameter, []).append((l1, l2))
            update()

        return run


@dataclass(frozen=True, slots=True)
class _Update:
    """Decoded arguments of one operation that updates matrices of one shape: tensors are (matrices, rows, columns).

    Attributes:
        counts: Whether it adds one to ``step``, the number of updates.
        master: The parameter in float32, where it has fewer bits.
        coefficient: Scalar that clips the gradient.
        workspace: Place in the arena for the rule's products.
    """

    rule: MatrixRule
    param: torch.Tensor
    grad: torch.Tensor
    states: dict[str, torch.Tensor]
    step: torch.Tensor | None
    counts: bool
    master: torch.Tensor | None
    coefficient: torch.Tensor | None
    workspace: torch.Tensor | None

    @property
    def moved(self) -> torch.Tensor:
        """Tensor that the rule moves: the master, where there is one."""
        return self.param if self.master is None else self.master

    @property
    def rounds(self) -> bool:
        """Whether the moved tensor has fewer than 32 bits: copies of it are widened and rounded again."""
        return self.moved.itemsize < 4

    @property
    def widens(self) -> bool:
        """Whether gradients are cast, and clipped, on their way to the master."""
        return self.master is not None and self.grad.dtype is not torch.float32

    def rows_at_once(self, kind: str) -> int:
        """Number of rows that hold about as many elements as are worked on at once."""
        return max(1, elements_at_once(kind) // self.param.shape[-1])


def parameter_kernel(
    op: Op,
    args: list[Any],
    kwargs: dict[str, Any],
    kind: str,
    *,
    optimizer: ParameterRule | None = None,
    rate: Rate,
    parameter: int = -1,
) -> tuple[Callable[[], None], int]:
    """Make the call that moves a parameter, or a part of it, by a rule that treats elements alone.

    Args:
        args, kwargs: Arguments of the operation, with tensors where they lie.
        optimizer: The rule with the settings of the run; None takes those that were planned, and the class's defaults.
        rate: Numbers of the step's updates.
        parameter: Storage of the parameter, by which ``rate.rules`` has its own.

    Returns:
        The call, and the bytes it allocates beside its tensors.

    Raises:
        ConfigError: the operation was planned for another rule, or for other settings.
    """
    rule = _as_planned(op, optimizer)
    param, grad, *others = args
    specs = rule.state_specs(tuple(param.shape))
    names, blocks = list(specs), [1, 1, 1, *(spec.block for spec in specs.values())]
    states: States = dict(zip(names, others, strict=False))
    step = others[len(names)] if rule.counts else None
    master, coefficient = kwargs.get("master"), kwargs.get("coefficient")
    counts = kwargs.get("first", True)
    if master is None:
        pieces, copied = _pieces([param, grad, param, *states.values()], blocks, rule, kind), 0
        if grad.stride() != param.stride():
            pieces, copied = [[param, grad, param, *states.values()]], bytes_of([grad])
    else:
        pieces, copied = _master_pieces([param, grad, master, *states.values()], blocks, rule, kind)
    most, last = max(moved.numel() for _, _, moved, *_ in pieces), pieces[-1][2]
    scratch = copied + 4 * rule.scratch_numbers(most, kind)

    def run() -> None:
        if step is not None and counts:
            step.add_(1)
        grouped = rate.rules.get(parameter)
        current_rule, lr = (rule, rate.value) if grouped is None else (grouped, grouped.lr)
        room = None
        if copied and master is not None:
            room = torch.empty(copied // 4, dtype=torch.float32, device=param.device)
        for rounded, gradient, moved, *parts in pieces:
            scaled_gradient = gradient
            if room is not None:
                scaled_gradient = room[: gradient.numel()].as_strided(moved.shape, moved.stride()).copy_(gradient)
                if coefficient is not None:
                    scaled_gradient.mul_(coefficient)
            elif copied:
                scaled_gradient = torch.empty_like(moved).copy_(gradient)
            mine = [p.clone() if p.dim() == 0 and moved is not last else p for p in parts]  # a number of all pieces
            current_rule.update(moved, scaled_gradient, dict(zip(names, mine, strict=True)), lr=lr, step=step)
            if master is not None:
                rounded.copy_(moved)

    return run, scratch


def _as_planned(op: Op, optimizer: ParameterRule | None) -> ParameterRule:
    """Rule that an operation runs by: the planned one with the settings of ``optimizer``.

    Raises:
        ConfigError: ``optimizer`` is another than the operation was planned for.
    """
    planned = cast(ParameterRule, rule_of(op))
    if optimizer is None:
        return planned
    small = optimizer.of_size(0)
    if type(planned) is type(small) and all(getattr(small, key) == getattr(planned, key) for key in planned.planned):
        return small
    check_planned(planned, optimizer)
    return optimizer


def check_planned(planned: ParameterRule, optimizer: ParameterRule) -> None:
    """Refuse an optimizer that is another than was planned for.

    Raises:
        ConfigError: it is another rule, or has other settings from which states follow.
    """
    if type(optimizer) is not type(planned):
        raise ConfigError(
            f"expected the optimizer that was planned, {name_of(planned)}, got {name_of(optimizer)}; plan again with "
            "optimizer=, or give this one"
        )
    for key in planned.planned:
        if getattr(optimizer, key) != getattr(planned, key):
            raise ConfigError(
                f"expected {key} {getattr(planned, key)!r} of {name_of(planned)}, as was planned, got "
                f"{getattr(optimizer, key)!r}; plan again with optimizer="
            )


def _pieces(tensors: list[torch.Tensor], blocks: list[int], rule: ParameterRule, kind: str) -> list[list[torch.Tensor]]:
    """Cut (param, grad, what moves, states...) alike, so that temporaries stay small; without any, leave them whole.

    Args:
        blocks: Elements of the parameter for which an element of each of these stands.
    """
    if rule.whole or not rule.temporaries or not all(t.is_contiguous() for t in tensors):
        return [tensors]
    return _cut(tensors, blocks, elements_at_once(kind))


def _master_pieces(
    tensors: list[torch.Tensor], blocks: list[int], rule: ParameterRule, kind: str
) -> tuple[list[list[torch.Tensor]], int]:
    """Cut (param, grad, master, states...) into pieces to widen at once; returns the bytes of widening as well."""
    grad, master = tensors[1], tensors[2]
    if grad.dtype is torch.float32 and grad.stride() == master.stride():
        return _pieces(tensors, blocks, rule, kind), 0
    count = prod(grad.shape)
    if rule.whole or not all(t.is_contiguous() for t in tensors):
        return [tensors], 4 * count
    return _cut(tensors, blocks, elements_at_once(kind)), 4 * min(count, elements_at_once(kind))


def _cut(tensors: list[torch.Tensor], blocks: list[int], at_once: int) -> list[list[torch.Tensor]]:
    flat = [t.view(-1) if t.dim() else t for t in tensors]
    starts = range(0, max(1, tensors[0].numel()), at_once)  # an empty parameter is one piece
    pairs = list(zip(flat, blocks, strict=True))
    return [[t[at // block : (at + at_once) // block] if t.dim() else t for t, block in pairs] for at in starts]


def matrix_kernel(
    op: Op, args: list[Any], kwargs: dict[str, Any], out: torch.Tensor | None, kind: str, rate: Rate
) -> tuple[Callable[[], None], int]:
    """Make the call that moves whole matrices by a rule for matrices.

    Args:
        args, kwargs: Arguments of the operation, with tensors where they lie.
        out: The workspace; None without one.
        rate: Numbers of the step's updates.

    Returns:
        The call, and the bytes it allocates beside its tensors.
    """
    rule = matrix_rule_of(op)
    assert rule is not None
    param, grad, *others = args
    names = list(rule.state_specs(*param.shape[-2:]))
    states = {name: _stacked(t) for name, t in zip(names, others, strict=False)}
    step = others[len(names)] if rule.counts else None
    master = kwargs.get("master")
    update = _Update(
        rule=rule, param=_stacked(param), grad=_stacked(grad), states=states, step=step,
        counts=bool(kwargs.get("first", True)), master=None if master is None else _stacked(master),
        coefficient=kwargs.get("coefficient"), workspace=out,
    )  # fmt: skip
    return _matrices(update, kind, rate), rule.scratch_bytes(_case(update, kind))


def _stacked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 3 else tensor.unsqueeze(0)


def _case(update: _Update, kind: str) -> MatrixCase:
    return MatrixCase(
        rows=update.param.shape[1],
        columns=update.param.shape[2],
        rows_at_once=update.rows_at_once(kind),
        threads=torch.get_num_threads(),
        rounds=update.rounds,
        widens=update.widens,
        is_wide=update.grad.dtype is torch.float32,
        is_turned=not update.grad.is_contiguous(),
    )


def _matrices(update: _Update, kind: str, rate: Rate) -> Callable[[], None]:
    """Make the call that moves one matrix after another: its direction first, then a few rows at a time along it."""
    rule, rows = update.rule.maths(), update.rows_at_once(kind)
    shape = (update.param.shape[1], update.param.shape[2])

    def run() -> None:
        number = 0
        if update.step is not None:
            if update.counts:
                update.step.add_(1)
            number = int(update.step)
        lr = rate.matrices
        for index in range(update.param.shape[0]):
            direction = _direction(update, rule, index, number, rows)
            for part in _parts(shape[0], rows):
                rule.post(update.moved[index, part], direction[part], shape, lr=lr, update=number)
                if update.master is not None:
                    update.param[index, part].copy_(update.master[index, part])
            del direction  # else it would live on beside that of the next matrix
        if kind == "cpu" and update.workspace is None:  # temporaries of every size would stay side by side
            give_back()

    return run


def _direction(update: _Update, rule: Any, index: int, number: int, rows: int) -> torch.Tensor:
    """Compute the direction of matrix ``index``, (rows, columns), in the workspace where there is one.

    Args:
        number: Number of this update, from 1.
        rows: Rows that are worked on at once.
    """
    states = {name: state[index] for name, state in update.states.items()}
    kinds = update.rule.state_specs(*update.param.shape[-2:])
    elementwise = {name: state for name, state in states.items() if kinds[name].place is StatePlace.ELEMENTWISE}
    if update.workspace is None:
        matrix = rule.pre(_gradient(update, index, slice(None)), elementwise, number).contiguous()
        return rule.direction(matrix, states, number).to(matrix.dtype)
    shape = update.param.shape[1:]
    x = update.workspace[: prod(shape)].view(shape)
    for part in _parts(shape[0], rows):
        x[part].copy_(rule.pre(_gradient(update, index, part), {n: s[part] for n, s in elementwise.items()}, number))
    return cast(WorkspaceRule, rule).direction_within(x, update.workspace[prod(shape) :])


def _gradient(update: _Update, index: int, part: slice) -> torch.Tensor:
    """Rows ``part`` of a gradient as the rule sees them: in float32 and clipped, where it is cast on its way."""
    grad = update.grad[index, part]
    if not update.widens:
        return grad
    wide = grad.float()
    return wide if update.coefficient is None else wide.mul_(update.coefficient)


def _parts(rows: int, at_once: int) -> Iterator[slice]:
    return (slice(start, min(rows, start + at_once)) for start in range(0, rows, at_once))
