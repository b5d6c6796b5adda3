"""Head in parts: a product with the vocabulary whose logits are never whole, by parts of the tokens.

The logits of a step are as many numbers as it has tokens times words, and are often its largest tensor. Tokens do not
depend on each other: the logits of some give their loss, the gradient of their logits, and from that the gradient of
what the head reads and a summand of the gradient of its weight, before the next ones are computed. The gradient of a
loss does not depend on its value, so nothing is computed twice.

Losses and the gradients of all that comes before the head keep their bits. The gradient of the head's weight is a sum
over all tokens that a whole product adds up in its own order and parts add up part by part, so its last bits differ.
So a plan chooses this form only where none fits that keeps them, and says so.

[Note: one score a token] ``nll_loss`` reads of each token's scores one, that of its target. These are kept, one a
token, and the same kernel adds them up in the same order, so the loss has the same bits: it is asked for word 0 of a
vocabulary of one word, or for nothing where the target is to be ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from lading.errors import ConfigError
from lading.ir.defer import moved_blocks
from lading.ir.graph import (
    Arg,
    Literal,
    Op,
    OpKind,
    Ref,
    Role,
    StepGraph,
    Storage,
    Tensor,
    row_major,
)
from lading.ir.loss_parts import CrossEntropy, cross_entropies

_PRODUCT, _ONES = "aten.mm.default", "aten.ones_like.default"
#: Product that is added to what it is written to.
ADDED_PRODUCT = "aten.addmm_.default"
#: What a loss is divided or multiplied by before its backward begins.
_SCALED = frozenset({"aten.mul.Tensor", "aten.div.Tensor", "aten.clone.default", "aten._to_copy.default"})
#: Dtypes in which sums part by part stay close to one sum.
_WIDE = frozenset({"float32", "float64"})
#: Operations that are told the dtype of what they make.
_MAKES_DTYPE = frozenset({"aten._to_copy.default", "aten.ones.default", "aten.empty.memory_format"})
#: Target that ``nll_loss`` ignores, whatever the step's own is ([Note: one score a token]).
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Head:
    """Head of a step with its loss, by the positions of its operations.

    Attributes:
        loss: Cross-entropy of the logits.
        product: Logits (tokens, words) = hidden (tokens, width) @ weight (width, words).
        to_weight, to_hidden: Products that make the gradients of the weight (words, width) and of what the head reads.
        total: Operation that makes the loss, and the number of tokens that count.
        seed: Operations that make the gradient that the backward of the loss begins with, in order; the first makes
            ones.
    """

    loss: CrossEntropy
    product: int
    total: int
    to_weight: int
    to_hidden: int
    seed: tuple[int, ...]

    @property
    def replaced(self) -> frozenset[int]:
        """Operations that parts take the place of, or that run before them."""
        backward = (self.loss.loss_backward, self.loss.backward, self.to_weight, self.to_hidden)
        return frozenset({self.product, self.loss.forward, *backward, *self.seed})


def heads(graph: StepGraph) -> tuple[Head, ...]:
    """Find the heads of a step that can be computed in parts: those whose logits nothing but their loss reads."""
    found = (_head(graph, loss, graph.storage_uses) for loss in cross_entropies(graph))
    return tuple(head for head in found if head is not None)


def _head(graph: StepGraph, loss: CrossEntropy, uses: Mapping[int, Sequence[int]]) -> Head | None:
    product, total = uses[loss.logits][0], uses[loss.scores][1]
    made = graph.ops[product]
    if made.name != _PRODUCT or made.kwargs or graph.ops[total].args[2] is not None:  # weights of classes
        return None
    users = [i for i in uses[loss.gradient] if i != loss.backward]
    hidden, weight = (graph.storage_of(t) for t in made.inputs)
    if len(users) != 2 or any(graph.ops[i].name != _PRODUCT or graph.ops[i].kwargs for i in users):
        return None
    if any(graph.storage_of(graph.ops[i].inputs[0]) != loss.gradient for i in users):
        return None
    reads = {graph.storage_of(graph.ops[i].inputs[1]): i for i in users}
    seed = _seed(graph, graph.ops[loss.loss_backward].inputs[0], loss.forward)
    if reads.keys() != {hidden, weight} or hidden == weight or seed is None:
        return None
    to_weight, to_hidden = reads[hidden], reads[weight]
    same = graph.tensors[graph.ops[to_weight].inputs[1]] == graph.tensors[made.inputs[0]]
    wide = graph.tensors[graph.ops[to_weight].outputs[0]].dtype in _WIDE
    kept = _unchanged(graph, product, max(users))
    return Head(loss, product, total, to_weight, to_hidden, seed) if same and wide and kept else None


def _unchanged(graph: StepGraph, product: int, last: int) -> bool:
    """Whether nothing writes what the head's product reads until the backward has read it, too."""
    operands = set(graph.op_reads[product])
    return all(operands.isdisjoint(graph.op_writes[i]) for i in range(product + 1, last + 1))


def _seed(graph: StepGraph, gradient: int, before: int) -> tuple[int, ...] | None:
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
        if op.name == _ONES:
            return tuple(chain)
        if op.name not in _SCALED or len(op.inputs) != 1:
            return None
        tensor = op.inputs[0]


def with_head_parts(graph: StepGraph, parts: int) -> tuple[StepGraph, tuple[int, ...]]:
    """Compute the heads of a step in so many parts.

    Storages and tensors keep their numbers. Also returns the index in ``graph`` of the operation that each operation of
    the result does a part of.

    Args:
        parts: Number of parts; 0 or 1 leaves the step as it is.

    Raises:
        ConfigError: the step has no head that can be computed so.
    """
    if parts < 2:
        return graph, tuple(range(len(graph.ops)))
    found = heads(graph)
    if not found:
        raise ConfigError(
            f"the plan computes the head in {parts} parts: expected a product whose result nothing but a cross-entropy "
            "reads, found none; plan again"
        )
    return _HeadParts(graph, found, parts).result()


class _HeadParts:
    """Rewriter of a step; ``came_from`` has the operation of the old step for each of the new one."""

    def __init__(self, graph: StepGraph, found: tuple[Head, ...], parts: int) -> None:
        self.graph, self.heads, self.parts = graph, found, parts
        self.storages, self.tensors = list(graph.storages), list(graph.tensors)
        self.ops, self.came_from = list[Op](), list[int]()
        for head in found:
            loss = head.loss
            for storage in (loss.logits, loss.scores, loss.chosen, loss.gradient):
                self.storages[storage] = dataclasses.replace(self.storages[storage], size_bytes=0)

    def result(self) -> tuple[StepGraph, tuple[int, ...]]:
        """Rewritten step, and where its operations came from."""
        totals = {head.total: head for head in self.heads}  # by then the targets are made
        dropped = {index for head in self.heads for index in head.replaced}
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

    def _each(self, index: int, name: str, args: tuple[Arg, ...], out: int, kind: OpKind = OpKind.ELEMENTWISE) -> int:
        """Add another operation in the place of one of the old step; returns what it makes."""
        inputs = tuple(arg.tensor for arg in args if isinstance(arg, Ref))
        cast_to: tuple[tuple[str, Arg], ...] = (("dtype", Literal("dtype", self.tensors[out].dtype)),)
        op = dataclasses.replace(
            self.graph.ops[index], name=name, args=args, kwargs=cast_to if name in _MAKES_DTYPE else (), inputs=inputs,
            outputs=(out,), results=(out,), mutates=(), kind=kind, flops=0,
        )  # fmt: skip
        self._add(op, index)
        return out

    def _parts(self, head: Head) -> tuple[int, int]:
        """Add all parts of a head: the score of each token's target, and what ``nll_loss`` is asked for."""
        total, loss = self.graph.ops[head.total], head.loss
        for index in head.seed:
            if index not in self.came_from:  # losses that are added up begin with the same ones
                self._seed(index)
        target, ignored = total.inputs[1], cast("int", total.args[4])
        tokens, words = self.graph.tensors[target].shape[0], self.graph.tensors[total.inputs[0]].shape[1]
        dtype = self.graph.tensors[total.inputs[0]].dtype
        counted, asked, known = self._targets(head.total, target, ignored, dtype)
        scores = self._fresh("scores of targets", dtype, (tokens, 1))
        step = -(-tokens // self.parts)
        for first in range(0, tokens, step):
            rows = (first, min(first + step, tokens))
            logits = self._logits(head, rows, words)
            made = self._score(head, logits, rows, dtype)
            self._pick(loss.forward, made, known, scores, rows)
            gradient = self._gradient(head, made, target, counted, rows)
            self._products(head, gradient, rows)
        return scores, asked

    def _seed(self, index: int) -> None:
        """Make the gradient that the backward of the loss begins with, which needs no loss."""
        op = self.graph.ops[index]
        if op.name == _ONES:
            out = self.tensors[op.outputs[0]]
            self._each(index, "aten.ones.default", (out.shape,), op.outputs[0])
        else:
            self._add(op, index)

    def _targets(self, index: int, target: int, ignored: int, dtype: str) -> tuple[int, int, int]:
        """Number of tokens that count; what is asked of scores of one word; and targets that are a row's column."""
        of = self.tensors[target]
        valid = self._each(
            index, "aten.ne.Scalar", (Ref(target), ignored), self._fresh("counted targets", "bool", of.shape)
        )
        number = self._each(
            index, "aten.sum.default", (Ref(valid),), self._fresh("number of targets", "int64", ()), OpKind.REDUCTION
        )
        counted = self._each(
            index, "aten._to_copy.default", (Ref(number),), self._fresh("weight of targets", dtype, ())
        )
        ones = self._each(
            index, "aten._to_copy.default", (Ref(valid),), self._fresh("asked targets", of.dtype, of.shape)
        )
        less = self._each(index, "aten.sub.Tensor", (Ref(ones), 1), self._fresh("asked targets", of.dtype, of.shape))
        asked = self._each(
            index, "aten.mul.Tensor", (Ref(less), -_IGNORED), self._fresh("asked targets", of.dtype, of.shape)
        )
        known = self._each(
            index, "aten.clamp.default", (Ref(target), 0), self._fresh("columns of targets", of.dtype, of.shape)
        )
        return counted, asked, known

    def _logits(self, head: Head, rows: tuple[int, int], words: int) -> int:
        """Logits (tokens of the part, words)."""
        op = self.graph.ops[head.product]
        hidden = self._rows(op.inputs[0], *rows)
        shape = (rows[1] - rows[0], words)
        out = self._fresh(f"logits[{rows[0]}]", self.tensors[op.outputs[0]].dtype, shape)
        return self._part(head.product, (Ref(hidden), op.args[1]), out, self._share(head.product, rows, head))

    def _score(self, head: Head, logits: int, rows: tuple[int, int], dtype: str) -> int:
        """Log-probabilities of a part's words."""
        op = self.graph.ops[head.loss.forward]
        out = self._fresh(f"scores[{rows[0]}]", dtype, self.tensors[logits].shape)
        return self._part(
            head.loss.forward, (Ref(logits), *op.args[1:]), out, self._share(head.loss.forward, rows, head)
        )

    def _pick(self, index: int, made: int, known: int, scores: int, rows: tuple[int, int]) -> None:
        """Keep the score of each target of a part."""
        count = rows[1] - rows[0]
        column = self._view(dataclasses.replace(self.tensors[known], shape=(count, 1), stride=(1, 1), offset=rows[0]))
        picked = self._fresh(f"scores of targets[{rows[0]}]", self.tensors[made].dtype, (count, 1))
        self._each(index, "aten.gather.default", (Ref(made), 1, Ref(column)), picked, OpKind.GATHER)
        self._copy_into(index, picked, scores, rows)

    def _copy_into(self, index: int, made: int, whole: int, rows: tuple[int, int]) -> None:
        """Copy what was made of a part into its rows of a tensor, which the first part makes room for."""
        if rows[0] == 0:
            self._each(index, "aten.empty.memory_format", (self.tensors[whole].shape,), whole, OpKind.COPY)
        into = self._rows(whole, *rows)
        copy = dataclasses.replace(
            self.graph.ops[index], name="aten.copy_.default", kind=OpKind.COPY, args=(Ref(into), Ref(made)),
            kwargs=(), inputs=(made,), outputs=(), results=(None,), mutates=(into,), flops=0,
        )  # fmt: skip
        self._add(copy, index)

    def _gradient(self, head: Head, made: int, target: int, counted: int, rows: tuple[int, int]) -> int:
        """Gradient of a part's logits."""
        first, last = self.graph.ops[head.loss.loss_backward], self.graph.ops[head.loss.backward]
        shape, dtype = self.tensors[made].shape, self.graph.tensors[last.outputs[0]].dtype
        targets = self._rows(target, *rows)
        args = (first.args[0], Ref(made), Ref(targets), *first.args[3:6], Ref(counted))
        chosen = self._fresh(f"gradient of scores[{rows[0]}]", self.tensors[made].dtype, shape)
        self._part(head.loss.loss_backward, args, chosen, self._share(head.loss.loss_backward, rows, head))
        out = self._fresh(f"gradient of logits[{rows[0]}]", dtype, shape)
        args = (Ref(chosen), Ref(made), *last.args[2:])
        return self._part(head.loss.backward, args, out, self._share(head.loss.backward, rows, head))

    def _products(self, head: Head, gradient: int, rows: tuple[int, int]) -> None:
        """Gradients of what a part of the head reads, and the part's summand of the weight's gradient."""
        to_weight, to_hidden = self.graph.ops[head.to_weight], self.graph.ops[head.to_hidden]
        of = self.tensors[gradient]
        turned = self._view(dataclasses.replace(of, shape=of.shape[::-1], stride=of.stride[::-1]))
        hidden, weight = self._rows(to_weight.inputs[1], *rows), to_weight.outputs[0]
        flops = self._share(head.to_weight, rows, head)
        if rows[0] == 0:
            self._part(head.to_weight, (Ref(turned), Ref(hidden)), weight, flops)
        else:
            added = dataclasses.replace(
                to_weight, name=ADDED_PRODUCT, args=(Ref(weight), Ref(turned), Ref(hidden)),
                inputs=(weight, turned, hidden), outputs=(), results=(None,), mutates=(weight,), flops=flops,
            )  # fmt: skip
            self._add(added, head.to_weight)
        whole = self.tensors[to_hidden.outputs[0]]
        part = self._fresh(
            f"{self.storages[whole.storage].name}[{rows[0]}]", whole.dtype, (of.shape[0], whole.shape[1])
        )
        self._part(head.to_hidden, (Ref(gradient), to_hidden.args[1]), part, self._share(head.to_hidden, rows, head))
        self._copy_into(head.to_hidden, part, to_hidden.outputs[0], rows)

    def _share(self, index: int, rows: tuple[int, int], head: Head) -> int:
        """Floating-point operations of some tokens."""
        tokens = self.graph.tensors[self.graph.ops[head.total].inputs[1]].shape[0]
        return self.graph.ops[index].flops * (rows[1] - rows[0]) // max(1, tokens)
