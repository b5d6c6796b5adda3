"""Updates as operations of the step, whatever rule moves what (``lading.optim.registry``).

An operation ``lading.<rule>`` moves a parameter, a part of one, or one matrix or several of equal shape (experts of a
stack). Its arguments are (param, grad, states..., step), all but grad mutated; ``step`` only where the rule counts
updates. Named: ``master`` (float32 weights), ``coefficient`` (of the gradient), ``first`` (False: another operation of
this parameter has counted the step), and ``settings``: all of a rule for matrices; of another rule those from which its
states follow, as the rest may change from step to step. What a rule for matrices works in may be an output, a workspace
with a place in the arena for as long as the operation takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from lading.grouping import Described, Grouping, Matrices, Use, group
from lading.ir.graph import Arg, Op, OpKind, Parameter, Phase, Ref, StepGraph, Tensor, refs
from lading.optim.registry import DEFAULT, make_rule
from lading.optim.rule import MatrixRule, ParameterRule, UpdateWork

PREFIX = "lading."
#: Tables are looked up in by these.
_LOOKUPS = ("aten.embedding.", "aten.embedding_bag", "aten._embedding_bag", "aten.index_select.")


def rule_of(op: Op) -> ParameterRule | MatrixRule | None:
    """Rule by which an operation moves parameters, with the settings that are planned; None if it does not."""
    if not op.name.startswith(PREFIX):
        return None
    settings = cast("tuple[tuple[str, bool | int | float | str], ...]", dict(op.kwargs).get("settings", ()))
    return _rule(op.name.removeprefix(PREFIX), settings)


@lru_cache(maxsize=256)
def _rule(name: str, settings: tuple[tuple[str, bool | int | float | str], ...]) -> ParameterRule | MatrixRule:
    """Make a rule with its settings; cached, as operations of a step have few different settings."""
    return make_rule(name, dict(settings))


def matrix_rule_of(op: Op) -> MatrixRule | None:
    """Rule by which an operation moves matrices; None if it does not."""
    rule = rule_of(op)
    return rule if isinstance(rule, MatrixRule) else None


def matrices_of(graph: StepGraph, op: Op) -> tuple[int, int, int]:
    """Count the matrices an operation moves: (how many, rows, columns)."""
    shape = graph.tensors[op.inputs[0]].shape
    return (1, *shape) if len(shape) == 2 else cast("tuple[int, int, int]", shape)


def work_of(graph: StepGraph, op: Op) -> tuple[MatrixRule, int, UpdateWork] | None:
    """Rule, number of matrices, and the work for each; None if the operation moves no matrices."""
    rule = matrix_rule_of(op)
    if rule is None:
        return None
    count, rows, columns = matrices_of(graph, op)
    return rule, count, rule.work(rows, columns)


@dataclass(frozen=True, slots=True)
class MatrixStack:
    """Matrices of equal shape that lie regularly in a parameter.

    Attributes:
        label: The parameter's name, and the part's number.
        value, gradient: (rows, columns), or (count, rows, columns) for a stack.
    """

    label: str
    value: Tensor
    gradient: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the stack: (count, rows, columns)."""
        return (1, *self.value.shape) if len(self.value.shape) == 2 else cast("tuple[int, int, int]", self.value.shape)

    def stacked(self, most_elements: int) -> Iterator[tuple[int, MatrixStack]]:
        """Yield runs of whole matrices of at least so many elements, with the number of the first."""
        count, rows, columns = self.shape
        if len(self.value.shape) == 2:
            yield 0, self
            return
        matrices_per_part = min(count, max(1, -(-most_elements // (rows * columns))))
        for start in range(0, count, matrices_per_part):
            cut = [
                dataclasses.replace(
                    t,
                    shape=(min(matrices_per_part, count - start), rows, columns),
                    offset=t.offset + start * t.stride[0],
                )
                for t in (self.value, self.gradient)
            ]
            yield start, MatrixStack(self.label, *cut)


def members(name: str, value: Tensor, gradient: Tensor, parts: Sequence[int]) -> list[MatrixStack]:
    """List the matrices of a parameter: one, or one for each part of its rows."""
    if not parts:
        return [MatrixStack(name, value, gradient)]
    stacks: list[MatrixStack] = []
    start = 0
    for number, rows in enumerate(parts):
        cut = [
            dataclasses.replace(t, shape=(*t.shape[:-2], rows, t.shape[-1]), offset=t.offset + start * t.stride[-2])
            for t in (value, gradient)
        ]
        stacks.append(MatrixStack(f"{name}.{number}", *cut))
        start += rows
    return stacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Ids of the tensors that an update works on; ``first``: it counts the step."""

    param: int
    grad: int
    states: tuple[int, ...]
    step: int | None = None
    first: bool = True
    master: int | None = None
    coefficient: int | None = None
    workspace: int | None = None


def update_op(matrices: Matrices, shape: tuple[int, int, int], tensors: Tensors, module: str) -> Op:
    """Make the operation on matrices of ``shape``, (count, rows, columns), without bytes."""
    rule = matrices.made()
    count, rows, columns = shape
    counting = () if tensors.step is None else (tensors.step,)
    args = (tensors.param, tensors.grad, *tensors.states, *counting)
    named = {"master": tensors.master, "coefficient": tensors.coefficient}
    extra = {key: tensor for key, tensor in named.items() if tensor is not None}
    updated = (tensors.param, *tensors.states, *((tensors.master,) if tensors.master is not None else ()))
    later: tuple[tuple[str, Arg], ...] = (("first", False),) if counting and not tensors.first else ()
    settings: Arg = tuple((field.name, getattr(rule, field.name)) for field in dataclasses.fields(rule))
    outputs = () if tensors.workspace is None else (tensors.workspace,)
    return Op(
        name=PREFIX + matrices.rule,
        phase=Phase.OPTIMIZER,
        args=tuple(map(Ref, args)),
        kwargs=(*((key, Ref(tensor)) for key, tensor in extra.items()), *later, ("settings", settings)),
        inputs=(*args, *extra.values()),
        outputs=outputs,
        results=outputs or (None,),
        mutates=(*updated, *(counting if tensors.first else ())),
        module=module,
        kind=OpKind.STEP,
        flops=int(count * rule.work(rows, columns).flops),
    )


def step_of(op: Op) -> int | None:
    """Id of the tensor that counts updates; None for operations that do not move matrices, or count none."""
    rule = matrix_rule_of(op)
    return None if rule is None or not rule.counts else next(refs(op.args[-1]))


def always_due(op: Op) -> Op:
    """Copy an operation with what is due now and then due at every update."""
    rule = matrix_rule_of(op)
    if rule is None or not rule.due:
        return op
    pairs = cast("tuple[tuple[str, Arg], ...]", dict(op.kwargs)["settings"])
    due: Arg = tuple((key, 1 if key in rule.due else value) for key, value in pairs)
    return dataclasses.replace(op, kwargs=(*(pair for pair in op.kwargs if pair[0] != "settings"), ("settings", due)))


def described(graph: StepGraph, parameters: Sequence[Parameter]) -> list[Described]:
    """Describe the parameters of a captured micro-batch and what the model does with them."""
    source = {graph.storage_of(p.tensor): i for i, p in enumerate(graph.parameters)}
    uses: dict[int, set[Use]] = {}
    head: int | None = None
    for op in graph.ops:
        if op.phase not in (Phase.FORWARD, Phase.LOSS):
            continue
        touched = [graph.storage_of(t) for arg in op.args for t in refs(arg)]
        origins = [source[s] for s in touched if s in source]
        if op.kind is OpKind.COPY and len(origins) == 1 and len(op.outputs) == 1:  # a cast, as under autocast
            source[graph.storage_of(op.outputs[0])] = origins[0]
            continue
        use = _use(op)
        for number in origins:
            uses.setdefault(number, set()).add(use)
            if use is Use.PRODUCT and len(graph.tensors[graph.parameters[number].tensor].shape) == 2:
                head = number
    numbers = [graph.parameters.index(p) for p in parameters]
    kinds = [_first_use(uses.get(number, set()), number == head) for number in numbers]
    return [Described(p.names, graph.tensors[p.tensor].shape, use) for p, use in zip(parameters, kinds, strict=True)]


def _use(op: Op) -> Use:
    if op.kind is OpKind.MATMUL:
        return Use.PRODUCT
    if op.kind is OpKind.CONVOLUTION:
        return Use.CONVOLUTION
    return Use.TABLE if op.name.startswith(_LOOKUPS) else Use.OTHER


def _first_use(uses: set[Use], is_head: bool) -> Use:
    """Pick the use that counts of several: a tied table is a table, a head is no hidden matrix."""
    if Use.TABLE in uses:
        return Use.TABLE
    if is_head:
        return Use.HEAD
    return next((use for use in (Use.PRODUCT, Use.CONVOLUTION) if use in uses), Use.OTHER)


def grouped(graph: StepGraph, matrices: Matrices, beside: str = DEFAULT) -> tuple[dict[int, tuple[int, ...]], str]:
    """Parts of each matrix that the rule moves, by the parameter's tensor; and who moves what, in words.

    Args:
        beside: Name of the rule that moves the rest.

    Raises:
        ConfigError: as ``lading.grouping.group``.
    """
    trained = [p for p in graph.parameters if p.gradient is not None]
    named = described(graph, trained)
    frozen = described(graph, [p for p in graph.parameters if p.gradient is None])
    grouping: Grouping = group(matrices, named, frozen)
    return {trained[i].tensor: parts for i, parts in grouping.matrices.items()}, grouping.describe(
        matrices.rule, named, beside
    )
