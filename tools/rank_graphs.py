"""Rank graphs: a cut segment as operations with arguments that every rank runs.

The kernels of a CutSegment are the operations; views come back between them, and arguments that are lengths become
those of a rank. What every rank can make by itself (inputs, buffers, what is computed of them) is made whole and then
sharded where cut tokens are asked for.

Ignores: cp_comm other than all_gather. A ring would run each step's attention on the keys that are there, and merge its
result with what came before by the log-sums of both; heads sent round (all_to_all) need one more operation.

A ``RankGraph`` is one list for all ranks, collectives among its operations: what differs between them is which elements
of a tensor each has, which its ``DimShards`` say, and where a rank stands on the axes, which the operations of
``COLLECTIVES`` and ``LOCAL`` ask for. All other operations are torch's own, with the sizes of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from lading.errors import ConfigError
from lading.ir.graph import UNKNOWN, Arg, Literal, Op, OpKind, Phase, Ref, Role, refs
from lading.ir.layout import Layout
from lading.ir.opkinds import base_name
from lading.ir.sizes import Power, Size
from lading.ir.table import Segment, SegmentTensor
from lading.ir.work import Stage
from lading.parallel.atoms import Lineage, setting
from lading.parallel.choose import CONTEXT, EXPERT, EXPERT_TENSOR, is_token
from lading.parallel.cut import cut, makers
from lading.parallel.ranks import axes_of
from lading.parallel.shapes import WORDS, Length, Lengths, check
from lading.parallel.specs import CutKernel, CutParameter, CutSegment

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


#: Argument that is the shape of the result.
_SHAPED = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "expand", "new_zeros", "new_ones", "new_empty", "new_full"), 1),
    **dict.fromkeys(("slice_backward", "select_backward"), 1),
    **dict.fromkeys(("zeros", "ones", "empty", "full"), 0),
}
#: Numbers that are no lengths of a rank's tensors: a mean over all tokens is one over all ranks'.
_SCALES = frozenset(["div", "mul", "add", "sub", "baddbmm", "addmm", "pow"])
_WHOLE = "whole"
_TAKES_ROWS = frozenset(["embedding", "embedding_dense_backward", "index_select", "index", "slice_backward"])


def rank_graph(segment: Segment, sizes: Mapping[str, int], layout: Layout, *, regather: bool = True) -> RankGraph:
    """A segment as every rank of a layout runs it; arguments as of ``rank_segment``.

    Raises:
        ConfigError: the layout cannot be, or an operation's arguments on a rank are not known.
    """
    if layout.cp > 1 and layout.cp_comm != "all_gather":
        raise ConfigError(
            f"layout: expected cp_comm=all_gather, got {layout.cp_comm}: of the others only costs are known, not what "
            "each rank computes"
        )
    segment_cut = cut(segment, axes_of(layout, regather=regather), wide=layout.precision == "fp32")
    degrees = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "etp": layout.expert_tp}
    values = {"b": layout.micro_batch, **sizes}
    check(segment_cut.lengths, values, degrees, segment_cut.name)
    return _Builder(segment_cut, values, degrees, layout.sp).run()


#: A tensor of the segment, and which copy: the collectives it came through with its tokens whole or cut.
_Key = tuple[int, str, bool]
_RankTensor = SegmentTensor[DimShards]


@dataclass
class _Builder:
    """Writes the operations of one segment."""

    cut: CutSegment
    values: Mapping[str, int]
    degrees: Mapping[str, int]
    sp: bool
    tensors: list[_RankTensor] = field(default_factory=list[_RankTensor])
    ops: list[Op] = field(default_factory=list[Op])
    keys: dict[_Key, int] = field(default_factory=dict[_Key, int])
    statistics: dict[str, int] = field(default_factory=dict[str, int])
    pending: tuple[str, tuple[Arg, ...], tuple[int, ...]] = ("", (), ())
    phase: Phase = Phase.FORWARD
    module: str = ""

    def __post_init__(self) -> None:
        cuts = self.cut.cuts
        self.segment, self.free = cuts.segment, cuts.free
        self.lengths: Lengths = cuts.lengths
        self.lineage: Lineage = self.lengths.lineage
        self.first = makers(self.segment)
        self.views: dict[int, Op] = {}
        for op in self.segment.ops:
            if op.kind is OpKind.VIEW:
                for t in op.outputs:
                    self.views.setdefault(t, op)
        ends = (*self.segment.enters, *self.segment.enters_back)
        self.roots = {*self.first.values(), *ends}
        self.makers = {t: op for op in self.segment.ops if op.kind is not OpKind.VIEW for t in op.outputs}
        self._numbers: dict[int, int] = {}

    def run(self) -> RankGraph:
        segment = self.segment
        enters = tuple(self._enter(t) for t in segment.enters)
        enters_back = tuple(self._enter(t) for t in segment.enters_back)
        for kernel in self.cut.kernels:
            self.phase = Phase.FORWARD if kernel.stage is Stage.FORWARD else Phase.BACKWARD
            self.module = kernel.module
            if kernel.op is None:
                self._collective(kernel)
            else:
                self._operation(kernel, kernel.op)
        leaves = tuple(self._leave(t, local) for t, local in zip(segment.leaves, self.cut.leaves, strict=True))
        back = zip(segment.leaves_back, self.cut.leaves_back, strict=True)
        leaves_back = tuple(self._leave(t, local) for t, local in back)
        parameters = tuple(self._parameter(*pair) for pair in zip(segment.gradients, self.cut.parameters, strict=True))
        starts = [op for op in self.ops if op.phase is Phase.BACKWARD and base_name(op.name) == "ones_like"]
        loss = starts[0].inputs[0] if starts and not enters_back else None
        tensors, ops = tuple(self.tensors), tuple(self.ops)
        return RankGraph(
            segment.name, tensors, ops, enters, leaves, enters_back, leaves_back, parameters, loss, self.degrees
        )

    # Tensors.

    def _dims(self, tensor: int, *, scattered: bool = False, whole: bool = False) -> tuple[DimShards, ...]:
        mine = self.segment.tensors[tensor]
        if whole and mine.role is not Role.PARAMETER:
            return tuple(self._uncut(size) for size in mine.dims)
        return tuple(map(self._shards, self.lengths.of(tensor, scattered=scattered, persistent=whole)))

    def _uncut(self, size: Size) -> DimShards:
        return shards_of(((Leaf(size.at(self.values)),),), self.degrees)

    def _shards(self, place: int) -> DimShards:
        length = self.lengths.lengths[place]
        if not length.parts:
            return shards_of((self._leaves(length),), self.degrees)
        parts = [[self.lengths.lengths[inner] for inner in part] for part in length.parts]
        if any(inner.parts for part in parts for inner in part):
            raise ConfigError(
                f"segment {self.segment.name!r}: a dim of {length.size} has parts within parts: cannot run"
            )
        leaves = tuple(tuple(leaf for inner in part for leaf in self._leaves(inner)) for part in parts)
        return shards_of(leaves, self.degrees)

    def _leaves(self, length: Length) -> tuple[Leaf, ...]:
        leaves: list[Leaf] = []
        for size, factors in length.leaves or ((length.size, ()),):
            number = size.at(self.values)
            cuts = tuple((f.axis, f.rule) for f in factors if self.degrees[f.axis] > 1)
            padded = [f for f in factors if f.rule == WORDS and number % self.degrees[f.axis]]
            if padded:
                raise ConfigError(
                    f"segment {self.segment.name!r}: expected a vocabulary that is a multiple of {padded[0].axis} "
                    f"{self.degrees[padded[0].axis]} where ranks run it, got {number}"
                )
            leaves.append(Leaf(number, cuts))
        return tuple(leaves)

    def _new(self, tensor: int, dims: tuple[DimShards, ...], *, routed: bool = False, shares: int = -1) -> int:
        """A tensor of the rank that is a copy of one of the segment, in the memory of ``shares`` if that is given."""
        mine = self.segment.tensors[tensor]
        if routed:
            frame = self.lineage.dims[tensor]
            dims = tuple(replace(n, length=-1) if self._is_rows(dim) else n for dim, n in zip(frame, dims, strict=True))
        return self._add(mine.dtype, dims, mine.role, mine.name, shares=shares)

    def _add(
        self, dtype: str, dims: tuple[DimShards, ...], role: Role = Role.ACTIVATION, name: str = "", *, shares: int = -1
    ) -> int:
        storage = len(self.tensors) if shares < 0 else self.tensors[shares].storage
        self.tensors.append(SegmentTensor(storage, dtype, dims, role, name))
        return len(self.tensors) - 1

    def _is_rows(self, dim: tuple[int, ...]) -> bool:
        rows = [k.op.inputs[0] for k in self.cut.kernels if k.op is not None and base_name(k.op.name) == "_grouped_mm"]
        return bool(rows) and self.lineage.atoms.leaves(dim) == self.lineage.atoms.leaves(self.lineage.dims[rows[0]][0])

    def _is_routed(self, tensor: int) -> bool:
        return any(dim.length == -1 for dim in self.tensors[tensor].dims)

    def _has_tokens(self, tensor: int) -> bool:
        return any(is_token(self.lineage, leaf) for leaf in self.lineage.leaves(tensor))

    def _is_free(self, tensor: int) -> bool:
        return self.segment.tensors[tensor].storage in self.free

    def _key(self, tensor: int, copy: str, scattered: bool) -> _Key:
        return (tensor, copy, scattered and self._has_tokens(tensor))

    def _enter(self, tensor: int) -> int:
        if self._is_free(tensor):
            return self._whole(tensor)
        key = self._key(tensor, "", self.sp)
        if key not in self.keys:
            self.keys[key] = self._new(tensor, self._dims(tensor, scattered=key[2]))
        return self.keys[key]

    def _leave(self, tensor: int, local: int) -> int:
        return self._whole(tensor) if self._is_free(tensor) else self._local(local)

    def _parameter(self, pair: tuple[int, int | None], cut_parameter: CutParameter) -> RankParameter:
        tensor, gradient = pair
        mine = self._whole(tensor)
        if gradient is None:
            return RankParameter(mine, None, False, cut_parameter.is_expert)
        copy, scattered = self.cut.cuts.copies.get(self.segment.tensors[gradient].storage, ("", False))
        made = self._get(gradient, copy, scattered)
        leaves = [leaf for dim in self.tensors[mine].dims for part in dim.parts for leaf in part]
        shared = any(leaf.size < self.degrees[axis] for leaf in leaves for axis, _ in leaf.cuts)
        return RankParameter(mine, made, cut_parameter.summed or shared, cut_parameter.is_expert)

    def _local(self, local: int, *, rows: bool = False) -> int:
        """The tensor that a kernel takes.

        Args:
            rows: It is looked up by number: all rows of a parameter are taken.
        """
        origin = self.cut.cuts.origins[local]
        if rows and self.segment.tensors[origin.tensor].role is Role.PARAMETER:
            return self._whole(origin.tensor)
        return self._get(origin.tensor, origin.copy, origin.scattered)

    def _get(self, tensor: int, copy: str, scattered: bool) -> int:
        if self._is_free(tensor):
            return self._sharded(tensor, self._whole(tensor), ("shard", scattered))
        key = self._key(tensor, copy, scattered)
        if key in self.keys:
            return self.keys[key]
        if tensor in self.roots or tensor not in self.views:
            other = self._key(tensor, copy, False)
            if key == other or other not in self.keys:
                raise ConfigError(f"segment {self.segment.name!r}: tensor {tensor} is used before any rank has it")
            return self._sharded(tensor, self.keys[other], (copy, scattered))
        view = self.views[tensor]
        self._view(view, self._get(view.inputs[0], copy, scattered), (copy, key[2]))
        return self.keys[key]

    def _sharded(self, tensor: int, source: int, form: tuple[str, bool]) -> int:
        """Shard that a rank has of a tensor that is whole on it; the tensor itself where that is all of it."""
        key = self._key(tensor, *form)
        if key not in self.keys:
            dims = self._dims(tensor, scattered=key[2])
            if dims == self.tensors[source].dims:
                return source
            self.keys[key] = self._new(tensor, dims)
            self._call("lading.shard", (Ref(source),), (self.keys[key],))
        return self.keys[key]

    def _whole(self, tensor: int) -> int:
        """A tensor that every rank can make by itself, of all tokens; of a parameter what the rank has of it."""
        key = (tensor, _WHOLE, False)
        if key in self.keys:
            return self.keys[key]
        if tensor in self.roots or tensor not in self.views:
            self.keys[key] = self._new(tensor, self._dims(tensor, whole=True))
        else:
            view = self.views[tensor]
            self._view(view, self._whole(view.inputs[0]), (_WHOLE, False))
        return self.keys[key]

    # Operations.

    def _call(self, name: str, args: tuple[Arg, ...], outputs: tuple[int, ...]) -> None:
        """An operation between or beside those of the segment."""
        inputs = tuple(dict.fromkeys(refs(args)))
        self.ops.append(Op(name, self.phase, args, (), inputs, outputs, outputs, (), self.module, OpKind.COPY))

    def _view(self, op: Op, source: int, form: tuple[str, bool]) -> None:
        whole = form[0] == _WHOLE
        for t in op.outputs:
            key = (t, _WHOLE, False) if whole else self._key(t, *form)
            dims = self._dims(t, scattered=form[1], whole=whole)
            self.keys[key] = self._new(t, dims, routed=self._is_routed(source), shares=source)
        made = {t: self.keys[(t, _WHOLE, False) if whole else self._key(t, *form)] for t in op.outputs}
        self._put(op, {op.inputs[0]: source}, made)

    def _put(self, op: Op, taken: Mapping[int, int], made: Mapping[int, int], **changes: object) -> None:
        """An operation of the segment on a rank's tensors, with the lengths of these."""
        lengths = self._arguments(op, taken, made)

        def local(arg: Arg) -> Arg:
            if isinstance(arg, Ref):
                return Ref(taken[arg.tensor])
            if isinstance(arg, Size | Power):
                return arg.at(self.values)
            if isinstance(arg, Literal) and arg.kind == UNKNOWN:
                raise ConfigError(
                    f"segment {self.segment.name!r}: expected arguments of {op.name} in {op.module!r} that are simple "
                    f"in the sizes, got {arg.value} at those captured; capture at one size only"
                )
            return tuple(map(local, arg)) if isinstance(arg, tuple) else arg

        args = tuple(lengths[at] if at in lengths else local(arg) for at, arg in enumerate(op.args))
        kwargs = tuple((key, local(arg)) for key, arg in op.kwargs)
        rank_op = replace(
            op,
            args=args,
            kwargs=kwargs,
            inputs=tuple(taken[t] for t in op.inputs),
            outputs=tuple(made[t] for t in op.outputs),
            phase=self.phase,
            results=tuple(None if t is None else made[t] for t in op.results),
            mutates=tuple(taken[t] for t in op.mutates),
            settings=(),
        )
        self.ops.append(replace(rank_op, **cast("dict[str, tuple[Arg, ...]]", changes)))

    def _arguments(self, op: Op, taken: Mapping[int, int], made: Mapping[int, int]) -> dict[int, Arg]:
        """Lengths of a rank in the place of those of the whole, by number of the argument."""
        base = base_name(op.name)
        outs = [self.tensors[made[t]] for t in op.outputs]
        lengths: dict[int, Arg] = {}
        if base in _SHAPED:
            lengths[_SHAPED[base]] = tuple(dim.length for dim in outs[0].dims)
        if base in ("slice", "slice_backward"):
            lengths.update(self._slice(op, self.tensors[taken[op.inputs[0]]], outs[0]))
        if base in ("split_with_sizes", "split"):
            dim = cast(int, setting(op, "dim"))
            sizes = tuple(t.dims[dim].length for t in outs)
            lengths[1] = sizes if base == "split_with_sizes" else sizes[0]
        if base == "embedding_dense_backward":
            lengths[2] = outs[0].dims[0].length
        is_cut = any(dim.is_cut for ids in (taken, made) for t in ids.values() for dim in self.tensors[t].dims)
        rest = [arg for at, arg in enumerate(op.args) if at not in lengths and _has_size(arg)]
        if rest and is_cut and base not in _SCALES and setting(op, "normalizes") is None:
            raise ConfigError(
                f"segment {self.segment.name!r}: {op.name} in {op.module!r} takes {rest[0]}, and what a rank gives it "
                "is not known; use a layout that does not cut it"
            )
        return lengths

    def _slice(self, op: Op, source: _RankTensor, made: _RankTensor) -> dict[int, Arg]:
        """Find where a slice starts and ends on a rank."""
        dim, at = cast(int, setting(op, "dim")), 2
        if base_name(op.name).endswith("backward"):
            source, made, at = made, source, 3
        first = cast(Size, setting(op, "start")).at(self.values)
        if not (source.dims[dim].is_cut or made.dims[dim].is_cut):
            step = op.args[at + 2] if len(op.args) > at + 2 else 1
            assert isinstance(step, int)
            return {at: first, at + 1: first + step * made.dims[dim].length}
        start = self._start(source, dim, first)
        return {at: start, at + 1: start + made.dims[dim].length}

    def _start(self, tensor: _RankTensor, dim: int, first: int) -> int:
        """Find where element ``first`` of a dim stands on the first rank, which has some of each slice."""
        elements = tensor.dims[dim].elements(dict.fromkeys(self.degrees, 0), self.degrees)
        return sum(at < first for at in elements)

    def _operation(self, kernel: CutKernel, op: Op) -> None:
        if op.random:
            raise ConfigError(f"segment {self.segment.name!r}: {op.name} draws numbers, which ranks would draw apart")
        if op.outputs and all(self._is_free(t) for t in op.outputs):
            made: dict[int, int] = {}
            for t in op.outputs:
                made[t] = self.keys[(t, _WHOLE, False)] = self._new(t, self._dims(t, whole=True))
            return self._put(op, {t: self._whole(t) for t in op.inputs}, made)
        if any(self._is_free(t) for t in op.mutates):
            raise ConfigError(f"segment {self.segment.name!r}: {op.name} writes to what every rank has; cannot be run")
        rows = base_name(op.name) in _TAKES_ROWS
        pairs = zip(op.inputs, kernel.inputs, strict=True)
        taken = {t: self._local(local, rows=rows) for t, local in pairs}
        special = self._special(kernel, op)
        if special is None or not special(kernel, op, taken):
            self._put(op, taken, self._results(kernel, op, taken))
        return None

    def _special(self, kernel: CutKernel, op: Op) -> Callable[[CutKernel, Op, dict[int, int]], bool] | None:
        """Writer of an operation whose ranks do other than torch's does, unless it answers that they do not."""
        if op.kind is OpKind.ATTENTION and kernel.spec is not None and kernel.spec.axis == CONTEXT:
            return self._attention
        return {
            "addmm": self._addmm,
            "embedding": self._embedding,
            "embedding_dense_backward": self._embedding_backward,
            "slice_backward": self._slice_backward,
            "_log_softmax": self._log_softmax,
            "nll_loss_forward": self._nll_loss,
            "nll_loss_backward": self._nll_loss_backward,
            "_log_softmax_backward_data": self._log_softmax_backward,
            "_grouped_mm": self._grouped_mm,
        }.get(base_name(op.name))

    def _results(self, kernel: CutKernel, op: Op, taken: Mapping[int, int]) -> dict[int, int]:
        routed = any(map(self._is_routed, taken.values()))
        made: dict[int, int] = {}
        for t, local in zip(op.outputs, kernel.outputs, strict=True):
            origin = self.cut.cuts.origins[local]
            key = self._key(t, origin.copy, origin.scattered)
            shares = self._written(op, t, taken)
            made[t] = self.keys[key] = self._new(t, self._dims(t, scattered=key[2]), routed=routed, shares=shares)
        return made

    def _written(self, op: Op, output: int, taken: Mapping[int, int]) -> int:
        """Operand of a rank that an operation writes to as ``output``; -1 where the result is new."""
        storage = self.segment.tensors[output].storage
        return next((taken[t] for t in op.inputs if self.segment.tensors[t].storage == storage), -1)

    def _lost(self, op: Op, taken: Mapping[int, int]) -> int:
        """Ranks whose results have to be added up."""
        after = {leaf for t in op.outputs for leaf in self.lineage.leaves(t)}
        axes = self.cut.cuts.axis
        lost = [axes[leaf] for t in taken for leaf in self.lineage.leaves(t) if leaf in axes and leaf not in after]
        return self.degrees[lost[0]] if lost else 1

    def _addmm(self, kernel: CutKernel, op: Op, taken: dict[int, int]) -> bool:
        """A bias is added once: each rank of a partial sum adds its share."""
        ranks = self._lost(op, dict.fromkeys(op.inputs[1:], 0))
        if ranks == 1:
            return False
        named = dict(op.kwargs)
        beta = named.get("beta", 1)
        assert isinstance(beta, int | float)
        named["beta"] = beta / ranks
        self._put(replace(op, kwargs=tuple(named.items())), taken, self._results(kernel, op, taken))
        return True

    def _embedding(self, kernel: CutKernel, op: Op, taken: dict[int, int]) -> bool:
        weight, index = (taken[t] for t in op.inputs[:2])
        if not self.tensors[weight].dims[0].is_cut:
            return False
        made = self._results(kernel, op, taken)
        self._call("lading.embedding", (Ref(weight), Ref(index)), tuple(made.values()))
        return True

    def _embedding_backward(self, kernel: CutKernel, op: Op, taken: dict[int, int]) -> bool:
        made = self._results(kernel, op, taken)
        if self.tensors[made[op.outputs[0]]].dims[0].is_cut:
            args = tuple(Ref(taken[t]) for t in op.inputs[:2])
            self._call("lading.embedding_backward", args, tuple(made.values()))
        else:
            self._put(op, taken, made)
        return True

    def _slice_backward(self, kernel: CutKernel, op: Op, taken: dict[int, int]) -> bool:
        """Tokens that are cut come to their places in a result that is not."""
        (source,), dim = op.inputs, cast(int, setting(op, "dim"))
        made = self._results(kernel, op, taken)
        if self.tensors[taken[source]].dims[dim].is_cut and not self.tensors[made[op.outputs[0]]].dims[dim].is_cut:
            dims = list(self.tensors[taken[source]].dims)
            dims[dim] = self._uncut(self.segment.tensors[source].dims[dim])
            spread = self._new(source, tuple(dims))
            self._call("lading.spread", (Ref(taken[source]),), (spread,))
            taken = {source: spread}
        self._put(op, taken, made)
        return True

    # The loss over a vocabulary that ranks share.

    def _statistic(self, scores: int, name: str, args: tuple[Arg, ...], dtype: str = "") -> int:
        """A number for each row of scores."""
        rows = self.tensors[scores]
        made = self._add(dtype or rows.dtype, rows.dims[:-1])
        self._call(name, args, (made,))
        return made

    def _summed(self, kernel: CutKernel) -> None:
        """A collective of one number a row."""
        assert kernel.spec is not None
        scores, how = self._local(kernel.inputs[0]), kernel.statistic
        if how == "norm":
            raise ConfigError(f"segment {self.segment.name!r}: a norm over cut columns cannot be run; use a smaller tp")
        if how == "max":
            part = self._statistic(scores, "lading.row_max", (Ref(scores),))
        elif how == "sum":
            part = self._statistic(scores, "lading.row_sum", (Ref(scores), Ref(self.statistics["max"])))
        else:
            part = self.statistics["picked"]
        reduce = "max" if how == "max" else "sum"
        args = (Ref(part), kernel.spec.axis, reduce)
        self.statistics[how] = self._statistic(scores, "lading.all_reduce", args)
        if how == "target":
            self._finish_loss()

    def _log_softmax(self, kernel: CutKernel, op: Op, taken: dict[int, int]) -> bool:
        if not self.tensors[taken[op.inputs[0]]].dims[-1].is_cut:
            return False
        args = (Ref(taken[op.inputs[0]]), Ref(self.statistics["max"]), Ref(self.statistics["sum"]))
        self._call("lading.log_softmax", args, tuple(self._results(kernel, op, taken).values()))
        return True

    def _nll_loss(self, kernel: CutKernel, op: Op, taken: dict[int, int]) -> bool:
        """The target's score is exchanged before the mean is taken."""
        scores, target = (taken[t] for t in op.inputs[:2])
        if not self.tensors[scores].dims[-1].is_cut:
            return False
        self._unweighted(op)
        self.statistics["picked"] = self._statistic(scores, "lading.pick", (Ref(scores), Ref(target), op.args[4]))
        made = self._results(kernel, op, taken)
        self.pending = ("lading.nll_loss", (Ref(target), *op.args[3:5]), tuple(made.values()))
        return True

    def _finish_loss(self) -> None:
        name, args, outputs = self.pending
        self._call(name, (Ref(self.statistics["target"]), *args), outputs)

    def _unweighted(self, op: Op) -> None:
        weight = op.args[2] if op.name.startswith("aten.nll_loss_forward") else op.args[3]
        if weight is not None:
            raise ConfigError(f"segment {self.segment.name!r}: a loss with weights over a cut vocabulary cannot be run")

    def _nll_loss_backward(self, kernel: CutKernel, op: Op, taken: dict[int, int]) -> bool:
        grad, scores, target, count = (taken[t] for t in op.inputs)
        if not self.tensors[scores].dims[-1].is_cut:
            return False
        self._unweighted(op)
        made = self._results(kernel, op, taken)
        told = (*op.args[4:6], Ref(count))
        self._call("lading.nll_loss_backward", (Ref(grad), Ref(scores), Ref(target), *told), tuple(made.values()))
        self.statistics["row_sum"] = self._statistic(
            scores, "lading.nll_row_sum", (Ref(grad), Ref(target), *told), self.tensors[scores].dtype
        )
        return True

    def _log_softmax_backward(self, kernel: CutKernel, op: Op, taken: dict[int, int]) -> bool:
        if not self.tensors[taken[op.inputs[0]]].dims[-1].is_cut:
            return False
        source = self.makers.get(op.inputs[0])
        if source is None or not source.name.startswith("aten.nll_loss_backward"):
            raise ConfigError(
                f"segment {self.segment.name!r}: expected a log-softmax over a cut vocabulary whose gradient is that "
                "of nll_loss, got another; ranks would have to exchange its sums"
            )
        args = (*(Ref(taken[t]) for t in op.inputs), Ref(self.statistics["row_sum"]))
        self._call("lading.log_softmax_backward", args, tuple(self._results(kernel, op, taken).values()))
        return True

    # Attention over all tokens of a sequence.

    def _attention(self, kernel: CutKernel, op: Op, taken: dict[int, int]) -> bool:
        backward = "backward" in op.name
        q, k, v = op.inputs[1:4] if backward else op.inputs[:3]
        named = dict(op.kwargs)
        if not op.name.startswith("aten._scaled_dot_product_flash_attention_for_cpu") or named.get("attn_mask"):
            raise ConfigError(
                f"segment {self.segment.name!r}: {op.name} cannot be run over cut tokens; expected "
                "_scaled_dot_product_flash_attention_for_cpu without a mask"
            )
        operands = dict(taken)
        for t in (k, v):
            operands[t] = self._all_tokens(t, self.tensors[taken[t]])
            self._call("lading.all_gather", (Ref(taken[t]), CONTEXT), (operands[t],))
        args = list(op.args)
        causal = 7 if backward else 4
        if len(args) > causal and args[causal]:
            queries = self.tensors[taken[q]]
            keys = self.tensors[operands[k]]
            mask = self._add(queries.dtype, (queries.dims[2], keys.dims[2]), Role.CONSTANT)
            self._call("lading.causal_mask", (Ref(taken[q]),), (mask,))
            args[causal], named["attn_mask"] = False, Ref(-1)
            operands[-1] = mask
        made = self._results(kernel, op, taken)
        outs = dict(made)
        for t in op.outputs[1:3] if backward else ():
            outs[t] = self._all_tokens(t, self.tensors[made[t]])
        inputs = (*op.inputs, *((-1,) if -1 in operands else ()))
        self._put(replace(op, args=tuple(args), kwargs=tuple(named.items()), inputs=inputs), operands, outs)
        for t in op.outputs[1:3] if backward else ():
            self._call("lading.reduce_scatter", (Ref(outs[t]), CONTEXT), (made[t],))
        return True

    def _all_tokens(self, tensor: int, of_rank: _RankTensor) -> int:
        """A tensor with the tokens of all context-parallel ranks."""
        dims = tuple(
            shards_of(tuple(tuple(_without(leaf, CONTEXT) for leaf in part) for part in dim.parts), self.degrees)
            for dim in of_rank.dims
        )
        return self._new(tensor, dims)

    # Rows sorted by expert.

    def _ends(self, *, sent: bool, gathered: bool = False) -> int:
        """Tensor of the ends of each expert's rows.

        Args:
            sent: Ends of a rank's experts, with the rows of all ranks that sent some; else as a rank's router has them.
            gathered: With the rows of all tp ranks, which cut the same experts.
        """
        key: _Key = (-1, f"{self.phase} {sent} {gathered}", False)
        if key in self.keys:
            return self.keys[key]
        grouped = next(k.op for k in self.cut.kernels if k.op is not None and base_name(k.op.name) == "_grouped_mm")
        if gathered:
            before = self._ends(sent=sent)
            self.keys[key] = self._add(self.tensors[before].dtype, self.tensors[before].dims)
            self._call("lading.all_reduce", (Ref(before), EXPERT_TENSOR, "sum"), (self.keys[key],))
        elif sent:
            stacked = next(t for t in (*grouped.inputs, *grouped.outputs) if len(self.segment.tensors[t].dims) == 3)
            self.keys[key] = self._add("int32", self._dims(stacked)[:1])
            self._call("lading.expert_ends", (Ref(self._ends(sent=False)), EXPERT), (self.keys[key],))
        else:
            kernel = next(k for k in self.cut.kernels if k.op is grouped)
            self.keys[key] = self._local(kernel.inputs[2])
        return self.keys[key]

    def _grouped_mm(self, kernel: CutKernel, op: Op, taken: dict[int, int]) -> bool:
        sent = self._is_routed(taken[op.inputs[0]])
        gathers = any(k.op is None and k.spec is not None and k.spec.axis == EXPERT_TENSOR and self._moves_rows(k)
                      for k in self.cut.kernels)  # fmt: skip
        ends = self._ends(sent=sent, gathered=gathers)
        self._put(op, {**taken, op.inputs[2]: ends}, self._results(kernel, op, taken))
        return True

    def _moves_rows(self, kernel: CutKernel) -> bool:
        """Whether a collective brings together, or parts, rows that are sorted by expert."""
        frame = self.lineage.dims[self.cut.cuts.origins[kernel.outputs[0]].tensor]
        return kernel.name in ("all_gather", "reduce_scatter", "all_to_all") and bool(frame) and self._is_rows(frame[0])

    # Collectives.

    def _collective(self, kernel: CutKernel) -> None:
        assert kernel.spec is not None
        if kernel.statistic:
            return self._summed(kernel)
        source, origin = self._local(kernel.inputs[0]), self.cut.cuts.origins[kernel.outputs[0]]
        key, name, axis = self._key(origin.tensor, origin.copy, origin.scattered), kernel.spec.op, kernel.spec.axis
        sent, routed = origin.copy.endswith("sent"), self._is_routed(source)
        if name == "all_to_all":
            name, routed = "send_rows" if sent else "return_rows", sent
            args: tuple[Arg, ...] = (Ref(source), Ref(self._ends(sent=False)), axis)
        elif self._moves_rows(kernel):
            name = "gather_rows" if name == "all_gather" else "scatter_rows"
            args = (Ref(source), Ref(self._ends(sent=routed)), axis)
        else:
            args = (Ref(source), axis, *(("sum",) if name == "all_reduce" else ()))
        self.keys[key] = self._new(origin.tensor, self._dims(origin.tensor, scattered=key[2]), routed=routed)
        return self._call(f"lading.{name}", args, (self.keys[key],))


def _without(leaf: Leaf, axis: str) -> Leaf:
    return Leaf(leaf.size, tuple(cut_over for cut_over in leaf.cuts if cut_over[0] != axis))


def _has_size(arg: Arg) -> bool:
    return any(map(_has_size, arg)) if isinstance(arg, tuple) else isinstance(arg, Size) and bool(arg.symbols)
