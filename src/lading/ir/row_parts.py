"""Steps rewritten so that a loss, with all that makes its gradient, runs by parts of the tokens.

Tokens do not depend on each other, and the gradient of a loss does not depend on its value: the logits of some tokens
give their loss and the gradient of their logits before the next ones are looked at, and nothing is computed twice.

[Note: one score a token] ``nll_loss`` reads of each token's scores one, that of its target. These are kept, one a
token, and the same kernel adds them up in the same order, so the loss has the same bits: it is asked for word 0 of a
vocabulary of one word, or for nothing where the target is to be ignored.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar, cast

from lading.ir.cross_entropy import ONES, TokenLoss
from lading.ir.defer import moved_blocks
from lading.ir.graph import Arg, Literal, Op, OpKind, Ref, Role, StepGraph, Storage, Tensor, row_major

#: Operations that are told the dtype of what they make.
_MAKES_DTYPE = frozenset({"aten._to_copy.default", "aten.ones.default", "aten.empty.memory_format"})
#: Target that ``nll_loss`` ignores, whatever the step's own is ([Note: one score a token]).
_IGNORED = -100
_Loss = TypeVar("_Loss", bound=TokenLoss)


class RowParts(ABC, Generic[_Loss]):
    """Rewriter of a step; ``came_from`` has the operation of the old step for each of the new one.

    Args:
        losses: Losses that run in parts.
        parts: Number of parts.
        unused: Storages that parts take the place of.
        multiple: Number that the tokens of a part, but of the last one, are a multiple of.
    """

    def __init__(
        self, graph: StepGraph, losses: Sequence[_Loss], parts: int, unused: Sequence[int], multiple: int = 1
    ) -> None:
        self.graph, self.losses, self.parts, self.multiple = graph, losses, parts, multiple
        self.storages, self.tensors = list(graph.storages), list(graph.tensors)
        self.ops, self.came_from = list[Op](), list[int]()
        for storage in unused:
            self.storages[storage] = dataclasses.replace(self.storages[storage], size_bytes=0)

    @abstractmethod
    def _logits(self, token_loss: _Loss, rows: tuple[int, int], words: int) -> int:
        """Add what makes the logits (tokens of the part, words) that the loss reads; returns them."""

    @abstractmethod
    def _use(self, token_loss: _Loss, gradient: int, rows: tuple[int, int]) -> None:
        """Add what becomes of the gradient of a part's logits."""

    def result(self) -> tuple[StepGraph, tuple[int, ...]]:
        """Rewritten step, and where its operations came from."""
        totals = {loss.total: loss for loss in self.losses}  # by then the targets are made
        dropped = {index for loss in self.losses for index in loss.replaced}
        place: dict[int, int] = {}
        for index, op in enumerate(self.graph.ops):
            place[index] = len(self.ops)
            if index in totals:
                scores, words = self._parts(totals[index])
                args = (Ref(scores), Ref(words), *op.args[2:4], _IGNORED)
                self._add(dataclasses.replace(op, args=args, inputs=(scores, words)), index)
            elif index not in dropped:
                self.ops.append(op)
                self.came_from.append(index)
        graph = dataclasses.replace(
            self.graph, storages=tuple(self.storages), tensors=tuple(self.tensors), ops=tuple(self.ops),
            blocks=moved_blocks(self.graph, place),
        )  # fmt: skip
        return graph, tuple(self.came_from)

    def _parts(self, token_loss: _Loss) -> tuple[int, int]:
        """Add all parts of a loss: the score of each token's target, and what ``nll_loss`` is asked for."""
        total, loss = self.graph.ops[token_loss.total], token_loss.loss
        for index in token_loss.seed:
            if index not in self.came_from:  # losses that are added up begin with the same ones
                self._make_seed(index)
        target, ignored = total.inputs[1], cast("int", total.args[4])
        tokens, words = self.graph.tensors[target].shape[0], self.graph.tensors[total.inputs[0]].shape[1]
        dtype = self.graph.tensors[total.inputs[0]].dtype
        counted, asked_targets, clamped = self._targets(token_loss.total, target, ignored, dtype, words)
        scores = self._fresh("scores of targets", dtype, (tokens, 1))
        step = -(-tokens // self.parts // self.multiple) * self.multiple
        for first in range(0, tokens, step):
            rows = (first, min(first + step, tokens))
            logits = self._logits(token_loss, rows, words)
            scores_in_rows = self._score(token_loss, logits, rows, dtype)
            self._pick(loss.forward, scores_in_rows, clamped, scores, rows)
            gradient = self._gradient(token_loss, scores_in_rows, target, counted, rows)
            self._use(token_loss, gradient, rows)
        return scores, asked_targets

    def _make_seed(self, index: int) -> None:
        """Make the gradient that the backward of the loss begins with, which needs no loss."""
        op = self.graph.ops[index]
        if op.name == ONES:
            out = self.tensors[op.outputs[0]]
            self._add_op_in_place_of(index, "aten.ones.default", (out.shape,), op.outputs[0])
        else:
            self._add(op, index)

    def _targets(self, index: int, target: int, ignored: int, dtype: str, words: int) -> tuple[int, int, int]:
        """Number of tokens that count; what is asked of scores of one word; and targets that are a row's column.

        A target to be ignored may be no word at all, below the first or above the last one, and any column does for it;
        what is no word and counts is refused by the backward of ``nll_loss``.
        """
        of = self.tensors[target]
        valid = self._add_op_in_place_of(
            index, "aten.ne.Scalar", (Ref(target), ignored), self._fresh("counted targets", "bool", of.shape)
        )
        number = self._add_op_in_place_of(
            index, "aten.sum.default", (Ref(valid),), self._fresh("number of targets", "int64", ()), OpKind.REDUCTION
        )
        counted = self._add_op_in_place_of(
            index, "aten._to_copy.default", (Ref(number),), self._fresh("weight of targets", dtype, ())
        )
        ones = self._add_op_in_place_of(
            index, "aten._to_copy.default", (Ref(valid),), self._fresh("asked targets", of.dtype, of.shape)
        )
        less = self._add_op_in_place_of(
            index, "aten.sub.Tensor", (Ref(ones), 1), self._fresh("asked targets", of.dtype, of.shape)
        )
        asked_targets = self._add_op_in_place_of(
            index, "aten.mul.Tensor", (Ref(less), -_IGNORED), self._fresh("asked targets", of.dtype, of.shape)
        )
        columns = self._fresh("columns of targets", of.dtype, of.shape)
        clamped = self._add_op_in_place_of(index, "aten.clamp.default", (Ref(target), 0, words - 1), columns)
        return counted, asked_targets, clamped

    def _score(self, token_loss: _Loss, logits: int, rows: tuple[int, int], dtype: str) -> int:
        """Log-probabilities of a part's words."""
        op = self.graph.ops[token_loss.loss.forward]
        out = self._fresh(f"scores[{rows[0]}]", dtype, self.tensors[logits].shape)
        return self._part(
            token_loss.loss.forward,
            (Ref(logits), *op.args[1:]),
            out,
            self._share(token_loss.loss.forward, rows, token_loss),
        )

    def _pick(self, index: int, made: int, known: int, scores: int, rows: tuple[int, int]) -> None:
        """Keep the score of each target of a part."""
        count = rows[1] - rows[0]
        column = self._view(dataclasses.replace(self.tensors[known], shape=(count, 1), stride=(1, 1), offset=rows[0]))
        picked = self._fresh(f"scores of targets[{rows[0]}]", self.tensors[made].dtype, (count, 1))
        self._add_op_in_place_of(index, "aten.gather.default", (Ref(made), 1, Ref(column)), picked, OpKind.GATHER)
        self._copy_into(index, picked, scores, rows)

    def _gradient(self, token_loss: _Loss, made: int, target: int, counted: int, rows: tuple[int, int]) -> int:
        """Gradient of a part's logits."""
        first, last = self.graph.ops[token_loss.loss.loss_backward], self.graph.ops[token_loss.loss.backward]
        shape, dtype = self.tensors[made].shape, self.graph.tensors[last.outputs[0]].dtype
        targets = self._rows(target, *rows)
        args = (first.args[0], Ref(made), Ref(targets), *first.args[3:6], Ref(counted))
        chosen = self._fresh(f"gradient of scores[{rows[0]}]", self.tensors[made].dtype, shape)
        self._part(
            token_loss.loss.loss_backward, args, chosen, self._share(token_loss.loss.loss_backward, rows, token_loss)
        )
        out = self._fresh(f"gradient of logits[{rows[0]}]", dtype, shape)
        args = (Ref(chosen), Ref(made), *last.args[2:])
        return self._part(token_loss.loss.backward, args, out, self._share(token_loss.loss.backward, rows, token_loss))

    def _share(self, index: int, rows: tuple[int, int], token_loss: _Loss) -> int:
        """Floating-point operations of some tokens."""
        tokens = self.graph.tensors[self.graph.ops[token_loss.total].inputs[1]].shape[0]
        return self.graph.ops[index].flops * (rows[1] - rows[0]) // max(1, tokens)

    def _add(self, op: Op, index: int) -> None:
        read = sum(self.tensors[t].touched_bytes for t in dict.fromkeys(op.inputs))
        written = sum(self.tensors[t].size_bytes for t in (*op.outputs, *op.mutates))
        self.ops.append(dataclasses.replace(op, bytes_read=read, bytes_written=written))
        self.came_from.append(index)

    def _fresh(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        """Make a row-major tensor with a storage of its own."""
        tensor = Tensor(len(self.storages), dtype, shape, row_major(shape))
        self.storages.append(Storage(name, tensor.size_bytes, Role.ACTIVATION))
        return self._view(tensor)

    def _view(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _rows(self, tensor: int, low: int, high: int) -> int:
        """Add a view of some rows of a tensor."""
        of = self.tensors[tensor]
        return self._view(
            dataclasses.replace(of, shape=(high - low, *of.shape[1:]), offset=of.offset + low * of.stride[0])
        )

    def _part(self, index: int, args: tuple[Arg, ...], out: int, flops: int = 0) -> int:
        """Add an operation of the old step with other operands; returns what it makes."""
        inputs = tuple(arg.tensor for arg in args if isinstance(arg, Ref))
        op = dataclasses.replace(
            self.graph.ops[index], args=args, inputs=inputs, outputs=(out,), results=(out,), flops=flops
        )
        self._add(op, index)
        return out

    def _add_op_in_place_of(
        self, index: int, name: str, args: tuple[Arg, ...], out: int, kind: OpKind = OpKind.ELEMENTWISE
    ) -> int:
        """Add another operation in the place of one of the old step; returns what it makes."""
        inputs = tuple(arg.tensor for arg in args if isinstance(arg, Ref))
        cast_to: tuple[tuple[str, Arg], ...] = (("dtype", Literal("dtype", self.tensors[out].dtype)),)
        op = dataclasses.replace(
            self.graph.ops[index], name=name, args=args, kwargs=cast_to if name in _MAKES_DTYPE else (), inputs=inputs,
            outputs=(out,), results=(out,), mutates=(), kind=kind, flops=0,
        )  # fmt: skip
        self._add(op, index)
        return out

    def _copy_into(self, index: int, made: int, whole: int, rows: tuple[int, int]) -> None:
        """Copy what was made of a part into its rows of a tensor, which the first part makes room for."""
        if rows[0] == 0:
            self._add_op_in_place_of(
                index, "aten.empty.memory_format", (self.tensors[whole].shape,), whole, OpKind.COPY
            )
        into = self._rows(whole, *rows)
        copy = dataclasses.replace(
            self.graph.ops[index], name="aten.copy_.default", kind=OpKind.COPY, args=(Ref(into), Ref(made)),
            kwargs=(), inputs=(made,), outputs=(), results=(None,), mutates=(into,), flops=0,
        )  # fmt: skip
        self._add(copy, index)
