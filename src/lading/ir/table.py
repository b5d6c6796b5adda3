"""ModelTable: what the distinct blocks of a model compute, with symbols for sizes, so that one capture serves them all.

A model is a list of segments (what is before the blocks, each distinct block with how often it stands, what is after
them), and a segment is the operations of its forward, loss and backward in the order of a captured StepGraph, on
tensors whose dims are ``Size``s. Symbols ``b`` (sequences of a micro-batch) and ``s`` (tokens of a sequence) are in
every table; a table of the catalog has symbols for the model's own sizes too (width, heads, vocabulary, ...).

[Note: settings of an operation]
A table's ``Op`` is a step's, with numbers of the segment's tensors, with views among the operations (kind VIEW), and
with ``settings``: how the dims of its results come from those of its inputs, so that whoever cuts a table need not know
the signatures of torch. Dims are counted from 0, lengths are Sizes. Of views: ``groups``, pairs of (input dims, output
dims) that hold the same elements in order (view, squeeze, expand); ``dims``, the input dim of each output dim (permute,
transpose, t); ``expands``, output dims that are repeated; ``dim`` with ``start`` (slice, select) or ``sizes`` (split,
unbind). Of others: ``dim`` (cat, stack, softmax, topk, gather, ...), ``reduces`` with ``keepdim`` (sum, mean, ...),
``normalizes`` (dims of the input that a norm is over), ``indexes`` (dims that index tensors stand for), ``is_causal``,
``window``, ``p`` (dropout).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from lading.ir.graph import Op, Role
from lading.ir.sizes import Size

#: Type of what a tensor knows of a dim.
Dim = TypeVar("Dim")


@dataclass(frozen=True, slots=True)
class SegmentTensor(Generic[Dim]):
    """View of a storage in a segment: of the whole model, or of one rank.

    Attributes:
        storage: Tensors with the same number share memory; the storage's bytes are those of its largest tensor.
        dims: Each dim. In a table its length, a ``Size``; in a cut segment the place of its length among the segment's;
            in a rank graph the shards that ranks have of it (``DimShards``).
        role: Role of the storage.
        name: Qualified parameter name within the segment, or "".
        repeats: Dims along which the same elements are read again and again (stride 0): they take no memory.
    """

    storage: int
    dtype: str
    dims: tuple[Dim, ...]
    role: Role
    name: str = ""
    repeats: tuple[int, ...] = ()

    @property
    def elements(self: SegmentTensor[Size]) -> Size:
        """Elements in memory: each once, however often it is repeated."""
        total = Size.of(1)
        for dim, length in enumerate(self.dims):
            total = total if dim in self.repeats else total * length
        return total


@dataclass(frozen=True, slots=True)
class Segment:
    """One distinct block, or what is before or after the blocks.

    Attributes:
        enters: Activations of the segment before it, in forward.
        leaves: Activations that the segment after it takes; as many, in the same order, as that one's ``enters``. One
            that only passes through is in both.
        enters_back: Gradients of ``leaves``, given by the segment after it, in backward; none for a leaf without.
        leaves_back: Gradients of ``enters``, in the order of the ``enters_back`` of the segment before.
        gradients: For each parameter tensor, the tensor of its gradient; None if it gets none.
        saved: Tensors that eager autograd keeps from forward to backward, parameters and ``enters`` included.
        precise: Its products stay in 16 bits where those of other blocks have fewer.
    """

    name: str
    tensors: tuple[SegmentTensor[Size], ...]
    ops: tuple[Op, ...]
    enters: tuple[int, ...]
    leaves: tuple[int, ...]
    enters_back: tuple[int, ...]
    leaves_back: tuple[int, ...]
    gradients: tuple[tuple[int, int | None], ...]
    saved: tuple[int, ...]
    precise: bool = False


@dataclass(frozen=True)
class ModelTable:
    """Table of a model: ``segments`` in the order of forward, each so many times in a row.

    Attributes:
        symbols: Value of each symbol but ``b`` and ``s``.
        counts: How often each segment stands.
        tied: Pairs of (segment, parameter name) that are one parameter: an embedding and its head.
        source: Origin of the model, in words.
        assumed: Features that the model has and the table has not.
    """

    name: str
    segments: tuple[Segment, ...]
    counts: tuple[int, ...]
    symbols: dict[str, int]
    tied: tuple[tuple[tuple[int, str], tuple[int, str]], ...] = ()
    source: str = ""
    assumed: tuple[str, ...] = ()
