"""Head in parts: a product with the vocabulary whose logits are never whole, by parts of the tokens.

The logits of a step are as many numbers as it has tokens times words, and are often its largest tensor. Tokens do not
depend on each other: the logits of some give their loss, the gradient of their logits, and from that the gradient of
what the head reads and a summand of the gradient of its weight, before the next ones are computed. The gradient of a
loss does not depend on its value, so nothing is computed twice.

Losses and the gradients of all that comes before the head keep their bits. The gradient of the head's weight is a sum
over all tokens that a whole product adds up in its own order and parts add up part by part, so its last bits differ.
So a plan chooses this form only where none fits that keeps them, and says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lading.errors import ConfigError
from lading.ir.cross_entropy import CrossEntropy, TokenLoss, cross_entropies, token_loss, unchanged
from lading.ir.graph import Ref, StepGraph
from lading.ir.row_parts import RowParts

_PRODUCT = "aten.mm.default"
#: Product that is added to what it is written to.
ADDED_PRODUCT = "aten.addmm_.default"
#: Dtypes in which sums part by part stay close to one sum.
_WIDE = frozenset({"float32", "float64"})


@dataclass(frozen=True, slots=True)
class Head(TokenLoss):
    """Head of a step with its loss, by the positions of its operations.

    Attributes:
        product: Logits (tokens, words) = hidden (tokens, width) @ weight (width, words).
        to_weight, to_hidden: Products that make the gradients of the weight (words, width) and of what the head reads.
    """

    product: int
    to_weight: int
    to_hidden: int

    @property
    def replaced(self) -> frozenset[int]:
        """All operations that parts take the place of, or that run before them."""
        return self.of_loss | {self.product, self.to_weight, self.to_hidden}


def heads(graph: StepGraph) -> tuple[Head, ...]:
    """Find the heads of a step that can be computed in parts: those whose logits nothing but their loss reads."""
    candidates = (_head(graph, loss, graph.storage_uses) for loss in cross_entropies(graph))
    return tuple(head for head in candidates if head is not None)


def _head(graph: StepGraph, loss: CrossEntropy, uses: Mapping[int, Sequence[int]]) -> Head | None:
    product, tokens = uses[loss.logits][0], token_loss(graph, loss)
    product_op = graph.ops[product]
    if product_op.name != _PRODUCT or product_op.kwargs or tokens is None:
        return None
    users = [i for i in uses[loss.gradient] if i != loss.backward]
    hidden, weight = (graph.storage_of(t) for t in product_op.inputs)
    if len(users) != 2 or any(graph.ops[i].name != _PRODUCT or graph.ops[i].kwargs for i in users):
        return None
    if any(graph.storage_of(graph.ops[i].inputs[0]) != loss.gradient for i in users):
        return None
    reads = {graph.storage_of(graph.ops[i].inputs[1]): i for i in users}
    if reads.keys() != {hidden, weight} or hidden == weight:
        return None
    to_weight, to_hidden = reads[hidden], reads[weight]
    is_same_input = graph.tensors[graph.ops[to_weight].inputs[1]] == graph.tensors[product_op.inputs[0]]
    wide = graph.tensors[graph.ops[to_weight].outputs[0]].dtype in _WIDE
    is_unchanged = unchanged(graph, graph.op_reads[product], product, max(users))
    if not (is_same_input and wide and is_unchanged):
        return None
    return Head(loss, tokens.total, tokens.seed, product, to_weight, to_hidden)


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
    step_heads = heads(graph)
    if not step_heads:
        raise ConfigError(
            f"the plan computes the head in {parts} parts: expected a product whose result nothing but a cross-entropy "
            "reads, found none; plan again"
        )
    return _HeadParts(graph, step_heads, parts).result()


class _HeadParts(RowParts[Head]):
    """Rewriter of a step with its heads in parts."""

    def __init__(self, graph: StepGraph, step_heads: tuple[Head, ...], parts: int) -> None:
        losses = [head.loss for head in step_heads]
        unused = [s for loss in losses for s in (loss.logits, loss.scores, loss.chosen, loss.gradient)]
        super().__init__(graph, step_heads, parts, unused)

    def _logits(self, token_loss: Head, rows: tuple[int, int], words: int) -> int:
        """Logits (tokens of the part, words)."""
        op = self.graph.ops[token_loss.product]
        hidden = self._rows(op.inputs[0], *rows)
        shape = (rows[1] - rows[0], words)
        out = self._fresh(f"logits[{rows[0]}]", self.tensors[op.outputs[0]].dtype, shape)
        return self._part(
            token_loss.product, (Ref(hidden), op.args[1]), out, self._share(token_loss.product, rows, token_loss)
        )

    def _use(self, token_loss: Head, gradient: int, rows: tuple[int, int]) -> None:
        """Gradients of what a part of the head reads, and the part's summand of the weight's gradient."""
        to_weight, to_hidden = self.graph.ops[token_loss.to_weight], self.graph.ops[token_loss.to_hidden]
        of = self.tensors[gradient]
        turned = self._view(dataclasses.replace(of, shape=of.shape[::-1], stride=of.stride[::-1]))
        hidden, weight = self._rows(to_weight.inputs[1], *rows), to_weight.outputs[0]
        flops = self._share(token_loss.to_weight, rows, token_loss)
        if rows[0] == 0:
            self._part(token_loss.to_weight, (Ref(turned), Ref(hidden)), weight, flops)
        else:
            added = dataclasses.replace(
                to_weight, name=ADDED_PRODUCT, args=(Ref(weight), Ref(turned), Ref(hidden)),
                inputs=(weight, turned, hidden), outputs=(), results=(None,), mutates=(weight,), flops=flops,
            )  # fmt: skip
            self._add(added, token_loss.to_weight)
        to_hidden_output = self.tensors[to_hidden.outputs[0]]
        part = self._fresh(
            f"{self.storages[to_hidden_output.storage].name}[{rows[0]}]",
            to_hidden_output.dtype,
            (of.shape[0], to_hidden_output.shape[1]),
        )
        self._part(
            token_loss.to_hidden,
            (Ref(gradient), to_hidden.args[1]),
            part,
            self._share(token_loss.to_hidden, rows, token_loss),
        )
        self._copy_into(token_loss.to_hidden, part, to_hidden.outputs[0], rows)
