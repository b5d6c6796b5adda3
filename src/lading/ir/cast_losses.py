"""Losses in float32 of logits in 16 bits, in parts: only the narrow logits are whole.

Mixed precision casts the logits, whose float32 copy is as large as two of them, its log-probabilities and two gradients
as well, before the last is cast back. By parts of the tokens each is a few rows; the gradient of the logits, in 16 bits
again, is written over the rows that it was made of. Kernels are the same and see whole rows, so the numbers are the
same to the bit.

[Note: alignment of rows] Kernels of GPUs read a row by vectors of 16 bytes, from an address that these divide, so the
order in which they add up a row depends on where it begins. Each part therefore begins at a row that in the whole
logits lies on such an address, as the first row of the part's own storage does.
"""

from __future__ import annotations

import dataclasses
from math import gcd, lcm

from lading.ir.cross_entropy import CastLoss, cast_losses
from lading.ir.graph import DTYPE_BYTES, OpKind, Ref, StepGraph, Tensor, row_major
from lading.ir.row_parts import RowParts

#: Bytes of the vectors that kernels of GPUs read.
VECTOR_BYTES = 16


def with_cast_losses(graph: StepGraph, parts: int) -> tuple[StepGraph, tuple[int, ...]]:
    """Compute the losses of 16-bit logits in so many parts; a step without any is returned as it is.

    Storages and tensors keep their numbers. Also returns the index in ``graph`` of the operation that each operation of
    the result does a part of.
    """
    losses = cast_losses(graph)
    return _CastLosses(graph, losses, parts).result() if losses else (graph, tuple(range(len(graph.ops))))


class _CastLosses(RowParts[CastLoss]):
    """Rewriter of a step with its losses of narrow logits in parts."""

    def __init__(self, graph: StepGraph, casts: tuple[CastLoss, ...], parts: int) -> None:
        losses = [cast.loss for cast in casts]
        unused = [s for loss in losses for s in (loss.logits, loss.scores, loss.chosen, loss.gradient)]
        multiple = lcm(*(_aligned_rows(graph, cast) for cast in casts))
        super().__init__(graph, casts, parts, [*unused, *(cast.narrow_gradient for cast in casts)], multiple)
        place = {cast.narrow_gradient: cast.narrow for cast in casts}
        self.tensors = [dataclasses.replace(t, storage=place.get(t.storage, t.storage)) for t in self.tensors]

    def _narrow(self, loss: CastLoss, rows: tuple[int, int]) -> int:
        """View of the narrow logits of a part (tokens of the part, words)."""
        words = self.graph.tensors[self.graph.ops[loss.total].inputs[0]].shape[1]
        dtype, shape = self.graph.tensors[self.graph.ops[loss.cast].inputs[0]].dtype, (rows[1] - rows[0], words)
        return self._view(Tensor(loss.narrow, dtype, shape, row_major(shape), offset=rows[0] * words))

    def _logits(self, token_loss: CastLoss, rows: tuple[int, int], words: int) -> int:
        wide = self.graph.tensors[self.graph.ops[token_loss.cast].outputs[0]].dtype
        out = self._fresh(f"logits[{rows[0]}]", wide, (rows[1] - rows[0], words))
        return self._part(token_loss.cast, (Ref(self._narrow(token_loss, rows)),), out)

    def _use(self, token_loss: CastLoss, gradient: int, rows: tuple[int, int]) -> None:
        into = self._narrow(token_loss, rows)
        copy = dataclasses.replace(
            self.graph.ops[token_loss.cast_back], name="aten.copy_.default", kind=OpKind.COPY,
            args=(Ref(into), Ref(gradient)), kwargs=(), inputs=(gradient,), outputs=(), results=(None,),
            mutates=(into,), flops=0,
        )  # fmt: skip
        self._add(copy, token_loss.cast_back)


def _aligned_rows(graph: StepGraph, loss: CastLoss) -> int:
    """Number of rows of the logits that are whole vectors together ([Note: alignment of rows])."""
    scores = graph.tensors[graph.ops[loss.total].inputs[0]]
    elements = VECTOR_BYTES // DTYPE_BYTES[scores.dtype]
    return elements // gcd(elements, scores.shape[1])
