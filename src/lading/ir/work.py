"""Work: what one rank does for one segment under a layout, in numbers: kernels and collectives, not yet in seconds.

Between a ModelTable, which knows no layout, and costs, which know no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from lading.ir.graph import OpKind, Role

#: Name of kernels that copy an activation from one number format to another under autocast.
AUTOCAST = "autocast"


class Stage(StrEnum):
    """Part of a micro-batch that a kernel belongs to: pipelines may put the last two at different times."""

    FORWARD = "forward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"


@dataclass(frozen=True, slots=True)
class Product:
    """``groups`` products of (m, k) by (k, n); ``accumulates``: added to what the output holds (a gradient in fp32)."""

    m: int
    n: int
    k: int
    groups: int = 1
    accumulates: bool = False

    @property
    def flops(self) -> int:
        """FLOP of the products; a multiply-add counts as two."""
        return 2 * self.groups * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Attention:
    """Fused attention of ``batch`` sequences; ``window`` tokens back at most if not 0."""

    batch: int
    heads: int
    kv_heads: int
    query_tokens: int
    key_tokens: int
    qk_dim: int
    v_dim: int
    causal: bool
    backward: bool
    window: int = 0

    @property
    def pairs(self) -> float:
        """Number of pairs of a query and a key that meet, for one head of one sequence."""
        queries, keys = self.query_tokens, self.key_tokens
        if self.window and self.window < keys:
            return float(queries * self.window - (self.window**2 / 2 if self.causal else 0))
        return queries * keys / 2 if self.causal and queries == keys else float(queries * keys)

    @property
    def flops(self) -> float:
        """FLOP of the kernel: two products forward; backward, which computes the scores again, five."""
        width = 3 * self.qk_dim + 2 * self.v_dim if self.backward else self.qk_dim + self.v_dim
        return 2 * self.batch * self.heads * self.pairs * width


@dataclass(frozen=True, slots=True)
class Collective:
    """Communication of the ranks of one group.

    Attributes:
        op: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send" or "receive".
        axis: Axis of the layout whose ranks take part: "tp", "cp", "ep", "etp" (tp ranks that share an expert), "dp",
            "pp".
        size_bytes: Bytes of the whole tensor: what each rank holds before a reduction, after an all-gather; for an
            all-to-all what one rank sends in all, its own part included; for a send what is sent.
    """

    op: str
    axis: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """Shard of a tensor on one rank; tensors with one ``storage`` share memory."""

    storage: int
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    role: Role
    name: str = ""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operation of one rank.

    Attributes:
        kind: Cost class; None for a collective.
        detail: Sizes that the costs of its class need beside bytes.
        bytes_read, bytes_written: Bytes of each operand once, as an operation alone.
        inputs, outputs: Local tensors of the RankSegment, or tensors of a StepGraph.
        strided: Whether it walks against the order of memory, where strides are known.
        runs: Two-dimensional pieces of memory that it goes through, likewise.
        form: Form of the operation that takes another time: "tanh" of a GELU; "" for the plain one, or unknown.
    """

    name: str
    kind: OpKind | None
    stage: Stage
    module: str
    dtype: str
    bytes_read: int
    bytes_written: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    detail: Product | Attention | Collective | None = None
    strided: bool = False
    runs: int = 1
    form: str = ""

    @property
    def is_experts(self) -> bool:
        """Whether a kernel is a product of routed tokens with their experts."""
        return isinstance(self.detail, Product) and "grouped_mm" in self.name

    @property
    def flops(self) -> float:
        """FLOP of a product or of attention; 0 for the rest."""
        return self.detail.flops if isinstance(self.detail, Product | Attention) else 0.0


@dataclass(frozen=True)
class RankSegment:
    """A segment as one rank of a layout runs it.

    Attributes:
        kernels: In order: forward (loss included), then backward; views are left out, collectives are in their place.
        enters, leaves: Local activations on its borders: what a pipeline sends, what checkpointing keeps.
        saved: Local tensors kept from forward to backward when nothing is recomputed.
        parameter_elements: Elements on this rank, by name of the axes over which they are still replicated ("dp" for
            those of every data-parallel rank, "dp/ep" for an expert's, whose data-parallel group is smaller).
        trained_elements: Those of them that are trained beside frozen weights (adapters, or all of what is not in a
            block); None where all parameters are trained.
        trained_bytes, frozen_bytes: Bytes of what is trained and of the other weights, as they are kept, where
            ``trained_elements`` is not None.
        summed_parameters: Elements of those parameters of which each tp rank has a part of the gradient's sum: what is
            whole on all of them but worked on cut tokens or heads (norms with sequence parallel).
        parameters: Local tensors that are parameters, each with the axes over which it is replicated.
        tied_elements: Elements, in ``parameter_elements["dp"]``, of a weight that is one with one of the model's first
            segment.
    """

    name: str
    kernels: tuple[Kernel, ...]
    tensors: tuple[LocalTensor, ...]
    enters: tuple[int, ...]
    leaves: tuple[int, ...]
    saved: tuple[int, ...]
    parameter_elements: dict[str, int] = field(default_factory=lambda: {})
    summed_parameters: tuple[int, ...] = ()
    trained_elements: dict[str, int] | None = None
    trained_bytes: int = 0
    frozen_bytes: int = 0
    parameters: tuple[tuple[int, str], ...] = ()
    tied_elements: int = 0

    @cached_property
    def form(self) -> Form:
        """Structure of the segment without its numbers."""
        return Form(self)


class Form:
    """Structure common to segments that differ in nothing but numbers: equal forms are equal keys of caches.

    Attributes:
        segment: One of these segments. Names, kinds, stages, storages and who reads what are those of all; sizes are
            its own.
    """

    __slots__ = ("_hash", "_key", "segment")

    def __init__(self, segment: RankSegment) -> None:
        kernels, tensors = segment.kernels, segment.tensors
        self.segment = segment
        self._key: tuple[object, ...] = (
            segment.name,
            tuple([(k.name, k.module, k.kind, k.stage, type(k.detail), k.inputs, k.outputs) for k in kernels]),
            tuple([k.detail.axis for k in kernels if isinstance(k.detail, Collective)]),
            tuple([t.storage for t in tensors]),
            tuple([t.role for t in tensors]),
            (segment.enters, segment.leaves, segment.saved),
        )
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and (self is other or self._key == other._key)
