"""Losses in float32 of logits in 16 bits, in parts: only the narrow logits are whole.

Mixed precision casts the logits, whose float32 copy is as large as two of them, its log-probabilities and two gradients
as well, before the last is cast back. By parts of the tokens each is a few rows; the gradient of the logits, in 16 bits
again, is written over the rows that it was made of. Kernels are the same and see whole rows, so the numbers are the
same to the bit.
"""

from __future__ import annotations

import dataclasses

from lading.ir.cross_entropy import CastLoss, cast_losses
from lading.ir.graph import OpKind, Ref, StepGraph, Tensor, row_major
from lading.ir.row_parts import RowParts


def with_cast_losses(graph: StepGraph, parts: int) -> tuple[StepGraph, tuple[int, ...]]:
    """Compute the losses of 16-bit logits in so many parts; a step without any is returned as it is.

    Storages and tensors keep their numbers. Also returns the index in ``graph`` of the operation that each operation of
    the result does a part of.
    """
    found = cast_losses(graph)
    return _CastLosses(graph, found, parts).result() if found else (graph, tuple(range(len(graph.ops))))


class _CastLosses(RowParts[CastLoss]):
    """Rewriter of a step with its losses of narrow logits in parts."""

    def __init__(self, graph: StepGraph, found: tuple[CastLoss, ...], parts: int) -> None:
        losses = [cast.loss for cast in found]
        unused = [s for loss in losses for s in (loss.logits, loss.scores, loss.chosen, loss.gradient)]
        super().__init__(graph, found, parts, [*unused, *(cast.narrow_gradient for cast in found)])
        place = {cast.narrow_gradient: cast.narrow for cast in found}
        self.tensors = [dataclasses.replace(t, storage=place.get(t.storage, t.storage)) for t in self.tensors]

    def _narrow(self, found: CastLoss, rows: tuple[int, int]) -> int:
        """View of the narrow logits of a part (tokens of the part, words)."""
        words = self.graph.tensors[self.graph.ops[found.total].inputs[0]].shape[1]
        dtype, shape = self.graph.tensors[self.graph.ops[found.cast].inputs[0]].dtype, (rows[1] - rows[0], words)
        return self._view(Tensor(found.narrow, dtype, shape, row_major(shape), offset=rows[0] * words))

    def _logits(self, found: CastLoss, rows: tuple[int, int], words: int) -> int:
        wide = self.graph.tensors[self.graph.ops[found.cast].outputs[0]].dtype
        out = self._fresh(f"logits[{rows[0]}]", wide, (rows[1] - rows[0], words))
        return self._part(found.cast, (Ref(self._narrow(found, rows)),), out)

    def _use(self, found: CastLoss, gradient: int, rows: tuple[int, int]) -> None:
        into = self._narrow(found, rows)
        copy = dataclasses.replace(
            self.graph.ops[found.cast_back], name="aten.copy_.default", kind=OpKind.COPY,
            args=(Ref(into), Ref(gradient)), kwargs=(), inputs=(gradient,), outputs=(), results=(None,),
            mutates=(into,), flops=0,
        )  # fmt: skip
        self._add(copy, found.cast_back)
