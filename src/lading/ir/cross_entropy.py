"""Cross-entropies of a step: where they are, what of them nothing else uses, and what their backward begins with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lading.ir.graph import StepGraph

_FORWARD, _BACKWARD = "aten._log_softmax.default", "aten._log_softmax_backward_data.default"
_LOSS, _LOSS_BACKWARD = "aten.nll_loss_forward.default", "aten.nll_loss_backward.default"
_CAST, ONES = "aten._to_copy.default", "aten.ones_like.default"
#: Reductions of ``nll_loss`` whose gradient is one number: the mean and the sum.
_TO_ONE = (1, 2)
#: What a loss is divided or multiplied by before its backward begins.
_SCALED = frozenset({"aten.mul.Tensor", "aten.div.Tensor", "aten.clone.default", _CAST})
#: Number formats of logits whose loss is computed in float32.
_NARROW = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Cross-entropy of a step, by the positions of its operations.

    Attributes:
        forward, loss_backward, backward: ``log_softmax``, and the backward of ``nll_loss`` and of ``log_softmax``.
        logits, scores, chosen, gradient: Storages of the logits, of their log-probabilities, of the gradient of these
            and of the gradient of the logits: as many bytes each.
    """

    forward: int
    loss_backward: int
    backward: int
    logits: int
    scores: int
    chosen: int
    gradient: int


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Cross-entropy whose gradient can be made token by token, before the loss is known.

    Attributes:
        loss: The cross-entropy.
        total: Operation that makes the loss, and the number of tokens that count.
        seed: Operations that make the gradient that the backward of the loss begins with, in order; the first makes
            ones.
    """

    loss: CrossEntropy
    total: int
    seed: tuple[int, ...]

    @property
    def of_loss(self) -> frozenset[int]:
        """Operations of the loss that parts take the place of, or that run before them."""
        return frozenset({self.loss.forward, self.loss.loss_backward, self.loss.backward, *self.seed})

    @property
    def replaced(self) -> frozenset[int]:
        """All operations that parts take the place of, or that run before them."""
        return self.of_loss


@dataclass(frozen=True, slots=True)
class CastLoss(TokenLoss):
    """Loss in float32 of logits in 16 bits.

    Attributes:
        cast, cast_back: Operations that make the logits of the loss, and the gradient of the narrow ones.
        narrow, narrow_gradient: Storages of the logits in 16 bits and of their gradient.
    """

    cast: int
    cast_back: int
    narrow: int
    narrow_gradient: int

    @property
    def replaced(self) -> frozenset[int]:
        """All operations that parts take the place of, or that run before them."""
        return self.of_loss | {self.cast, self.cast_back}


def cross_entropies(graph: StepGraph) -> tuple[CrossEntropy, ...]:
    """Find the cross-entropies of a step that can be computed in parts: those whose storages nothing else uses."""
    uses, given = graph.storage_uses, given_storages(graph)
    losses: list[CrossEntropy] = []
    for forward, op in enumerate(graph.ops):
        if op.name != _FORWARD or op.args[2] is not False or not whole_rows(graph, op.inputs[0], op.outputs[0]):
            continue
        logits, scores = graph.storage_of(op.inputs[0]), graph.storage_of(op.outputs[0])
        later_uses = uses[scores][1:]
        if [graph.ops[i].name for i in later_uses] != [_LOSS, _LOSS_BACKWARD, _BACKWARD]:
            continue
        loss_backward, backward = later_uses[1:]
        first, last = graph.ops[loss_backward], graph.ops[backward]
        chosen, gradient = graph.storage_of(first.outputs[0]), graph.storage_of(last.outputs[0])
        ends = uses[logits][-1] == forward and len(uses[logits]) == 2 and logits in graph.op_writes[uses[logits][0]]
        are_whole = whole_rows(graph, first.inputs[1], first.outputs[0]) and whole_rows(graph, *last.inputs[:2])
        are_whole = are_whole and whole_rows(graph, last.inputs[0], last.outputs[0])
        alone = uses[chosen] == [loss_backward, backward] and uses[gradient][0] == backward
        if ends and are_whole and alone and first.args[4] in _TO_ONE and not given & {logits, scores, chosen, gradient}:
            losses.append(CrossEntropy(forward, loss_backward, backward, logits, scores, chosen, gradient))
    return tuple(losses)


def token_loss(graph: StepGraph, loss: CrossEntropy) -> TokenLoss | None:
    """Find how the gradient of a loss is made token by token; None where that needs more than its targets."""
    total = graph.storage_uses[loss.scores][1]
    seed = seed_of(graph, graph.ops[loss.loss_backward].inputs[0], loss.forward)
    targets = {graph.storage_of(graph.ops[total].inputs[1])}
    if seed is None or graph.ops[total].args[2] is not None:  # weights of classes
        return None
    return TokenLoss(loss, total, seed) if unchanged(graph, targets, total, loss.loss_backward) else None


def cast_losses(graph: StepGraph) -> tuple[CastLoss, ...]:
    """Find the losses of 16-bit logits that nothing but a cast to the loss's own number format reads."""
    losses = (_cast_loss(graph, loss) for loss in cross_entropies(graph))
    return tuple(loss for loss in losses if loss is not None)


def _cast_loss(graph: StepGraph, loss: CrossEntropy) -> CastLoss | None:
    uses, given = graph.storage_uses, given_storages(graph)
    cast, users = uses[loss.logits][0], uses[loss.gradient][1:]
    if len(users) != 1 or any(graph.ops[i].name != _CAST or len(graph.ops[i].inputs) != 1 for i in (cast, *users)):
        return None
    cast_back = users[0]
    logits, gradient = graph.ops[cast].inputs[0], graph.ops[cast_back].outputs[0]
    narrow, narrow_gradient = graph.storage_of(logits), graph.storage_of(gradient)
    same_dtype = graph.tensors[logits].dtype == graph.tensors[gradient].dtype
    are_whole = all(
        graph.tensors[t].is_row_major and graph.tensors[t].spans(graph.storages[graph.storage_of(t)].size_bytes)
        for t in (logits, graph.ops[cast].outputs[0], graph.ops[cast_back].inputs[0], gradient)
    )
    alone = len(uses[narrow]) == 2 and narrow in graph.op_writes[uses[narrow][0]] and uses[narrow][1] == cast
    fresh = uses[narrow_gradient][0] == cast_back and not given & {narrow, narrow_gradient}
    tokens = token_loss(graph, loss)
    if (
        tokens is None
        or not (same_dtype and are_whole and alone and fresh)
        or graph.tensors[logits].dtype not in _NARROW
    ):
        return None
    return CastLoss(loss, tokens.total, tokens.seed, cast, cast_back, narrow, narrow_gradient)


def unchanged(graph: StepGraph, storages: Iterable[int], first: int, last: int) -> bool:
    """Whether no operation behind the first writes any of these storages, up to the last."""
    read = set(storages)
    return all(read.isdisjoint(graph.op_writes[i]) for i in range(first + 1, last + 1))


def given_storages(graph: StepGraph) -> frozenset[int]:
    """Storages whose value something outside of the step's operations needs."""
    return graph.persistent | {graph.storage_of(tensor) for tensor in graph.results}


def whole_rows(graph: StepGraph, *tensors: int) -> bool:
    """Whether tensors are matrices of one shape and dtype, each row by row and all of its storage."""
    first, *others = (graph.tensors[t] for t in tensors)
    same_kind = all((t.shape, t.dtype) == (first.shape, first.dtype) for t in others)
    are_whole = all(t.is_row_major and t.spans(graph.storages[t.storage].size_bytes) for t in (first, *others))
    return len(first.shape) == 2 and same_kind and are_whole


def seed_of(graph: StepGraph, gradient: int, before: int) -> tuple[int, ...] | None:
    """Operations that make a gradient out of ones, in order; None where it depends on anything else."""
    makers = {t: i for i, op in enumerate(graph.ops) for t in op.outputs}
    views = {graph.storage_of(t): i for t, i in makers.items()}
    chain: list[int] = []
    tensor = gradient
    while True:
        index = makers.get(tensor, views.get(graph.storage_of(tensor)))
        if index is None or index < before:
            return None
        chain.insert(0, index)
        op = graph.ops[index]
        if op.name == ONES:
            return tuple(chain)
        if op.name not in _SCALED or len(op.inputs) != 1:
            return None
        tensor = op.inputs[0]
