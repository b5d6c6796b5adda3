"""RankGraph: a segment as every rank of a layout runs it: operations with arguments, collectives among them.

One list for all ranks: what differs between them is which elements of a tensor each has, which its ``DimShards`` say,
and where a rank stands on the axes, which the operations of ``COLLECTIVES`` and ``LOCAL`` ask for. All other operations
are torch's own, with the sizes of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lading.ir.graph import Op
from lading.ir.table import SegmentTensor

#: Operations between the ranks of an axis: (tensor, axis, ...) -> tensor.
COLLECTIVES = {
    "lading.all_reduce": "(x, axis, how): the sum, or the maximum, of what the ranks have",
    "lading.all_gather": "(x, axis): the elements of all ranks",
    "lading.reduce_scatter": "(x, axis): of the sum the elements that a rank has of the result",
    "lading.send_rows": "(rows, ends, axis): rows sorted by expert go to the ranks of their experts",
    "lading.return_rows": "(rows, ends, axis): the same rows come back",
    "lading.gather_rows": "(rows, ends, axis): the rows of all ranks, by expert and then by rank",
    "lading.scatter_rows": "(rows, ends, axis): of the sum of such rows those of a rank",
    "lading.expert_ends": "(ends, axis): where the rows of each of a rank's experts end, of all ranks' rows",
}
#: Operations of a rank that depend on which elements it has.
LOCAL = {
    "lading.shard": "(x): of what is whole on every rank the elements that a rank has of the result",
    "lading.spread": "(x): what a rank has at its places in the whole, zeros elsewhere; a partial sum",
    "lading.embedding": "(weight, index): rows of the words of a rank, zeros for others; a partial sum",
    "lading.embedding_backward": "(grad, index): gradient of the words of a rank",
    "lading.row_max": "(scores): maximum over the words of a rank",
    "lading.row_sum": "(scores, maximum): sum of exponentials over the words of a rank",
    "lading.log_softmax": "(scores, maximum, sum)",
    "lading.pick": "(scores, target): the target's score, zero where it is a word of another rank",
    "lading.nll_loss": "(picked, target, reduction, ignored): the loss, and how many targets count",
    "lading.nll_loss_backward": "(grad, scores, target, reduction, ignored, count)",
    "lading.nll_row_sum": "(grad, target, reduction, ignored, count): sum over all words of the gradient of scores",
    "lading.log_softmax_backward": "(grad, result, row_sum)",
    "lading.causal_mask": "(queries): 0 where a token of a rank sees one of all tokens, else minus infinity",
}


@dataclass(frozen=True, slots=True)
class Leaf:
    """Factor of a dim: ``size`` elements, cut over axes by rules, one after another."""

    size: int
    cuts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class DimShards:
    """Shards of a dim, by rank: the dim is ``parts`` one after another, each a product of leaves.

    Attributes:
        length: Elements of each rank; -1 for rows whose number depends on what a router chose.
    """

    parts: tuple[tuple[Leaf, ...], ...]
    length: int = field(compare=False)

    @property
    def is_cut(self) -> bool:
        """Whether ranks have different elements."""
        return any(leaf.cuts for part in self.parts for leaf in part)

    def elements(self, place: Mapping[str, int], degrees: Mapping[str, int]) -> list[int]:
        """List the elements of the dim that a rank has, in order.

        Args:
            place: Place of the rank on each axis.
            degrees: Ranks of each axis.
        """
        elements: list[int] = []
        before = 0
        for part in self.parts:
            places, size = [0], 1
            for leaf in part:
                inners = leaf_elements(leaf, place, degrees)
                places = [outer * leaf.size + inner for outer in places for inner in inners]
                size *= leaf.size
            elements.extend(before + at for at in places)
            before += size
        return elements


def shards_of(parts: tuple[tuple[Leaf, ...], ...], degrees: Mapping[str, int]) -> DimShards:
    """Cut a dim of such parts over axes of such degrees; all ranks have as many elements as the first."""
    dim = DimShards(parts, 0)
    return replace(dim, length=len(dim.elements(dict.fromkeys(degrees, 0), degrees)))


def leaf_elements(leaf: Leaf, place: Mapping[str, int], degrees: Mapping[str, int]) -> list[int]:
    """Elements of a leaf that a rank has.

    Tokens over context-parallel ranks are dealt a piece from the front and one from the back (see
    ``lading.parallel.ranks``), where there are pieces enough; all else goes in runs. Of fewer heads than ranks each
    stands on several.
    """
    elements = list(range(leaf.size))
    for axis, rule in leaf.cuts:
        degree, rank = degrees[axis], place[axis]
        pieces = 2 * degree
        if axis == "cp" and rule == "tokens" and len(elements) % pieces == 0:
            each = len(elements) // pieces
            back = (pieces - 1 - rank) * each
            elements = [*elements[rank * each : (rank + 1) * each], *elements[back : back + each]]
        elif len(elements) < degree:
            elements = [elements[rank * len(elements) // degree]]
        else:
            each = -(-len(elements) // degree)
            elements = elements[rank * each : (rank + 1) * each]
    return elements


@dataclass(frozen=True, slots=True)
class RankParameter:
    """Parameter and its gradient, by number (None: it gets none).

    Attributes:
        summed: tp ranks have parts of the gradient's sum.
        is_expert: One of many experts: ranks of "ep" have different ones.
    """

    tensor: int
    gradient: int | None
    summed: bool
    is_expert: bool


@dataclass(frozen=True)
class RankGraph:
    """Segment as each rank has it; fields as of ``lading.ir.table.Segment``, by numbers of ``tensors``.

    Attributes:
        loss: The tensor that backward starts from; None for a segment without a loss.
    """

    name: str
    tensors: tuple[SegmentTensor[DimShards], ...]
    ops: tuple[Op, ...]
    enters: tuple[int, ...]
    leaves: tuple[int, ...]
    enters_back: tuple[int, ...]
    leaves_back: tuple[int, ...]
    parameters: tuple[RankParameter, ...]
    loss: int | None
    degrees: Mapping[str, int]
