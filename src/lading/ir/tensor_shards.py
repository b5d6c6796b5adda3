"""Tensor parallel: each rank computes its share of every product, on its shards of the parameters.

``shard_tensors`` rewrites a captured micro-batch into that of one rank. Tensors keep their numbers; of a sharded one a
rank has equal runs of one dim. What the ranks have of a storage is worked out forwards, an operation at a time: a
matrix whose operand is whole is cut along its columns, one whose operand is sharded along its rows, so that the ranks
have parts of a sum. Where an operation needs what its rank has not, a collective, an operation like others, gets it.

[Note: whole by default] What an operation does along its dims is said by ``lading.ir.sharding_rules``, where it is
known: an operation may run on shards of the dims that have labels there. Any other gets whole operands, and gives every
rank the same result. So no model is computed wrongly; one with many such operations gains little, which its prediction
says.

[Note: two dims] All views of a storage, and all collectives, see its sharded elements as (blocks, period): period is
a run of elements, made of parts, each of which is cut into as many equal runs as there are ranks; a rank has the same
run of each part. Parts are several where queries, keys and values come of one matrix. A view is local arithmetic:
strides of a period and more shrink, the dim that is as long as a part or a period gets shorter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

from lading.errors import ConfigError
from lading.ir.defer import moved_blocks
from lading.ir.graph import (
    DTYPE_BYTES,
    Op,
    OpKind,
    Parameter,
    Phase,
    Ref,
    Role,
    StepGraph,
    Tensor,
    TensorPlacement,
    refs,
    rename_op,
)
from lading.ir.graph_writer import GraphWriter
from lading.ir.layout import Layout
from lading.ir.opkinds import base_name
from lading.ir.reduction import ALL_GATHER, CAUSAL_ROWS, OWN_RUNS, OWN_WORDS, SCATTER_SUM, SUM
from lading.ir.sharding_rules import ShardingRule, rule_of

#: Operations for which what is done to parts of a sum is done to the sum.
_LINEAR = frozenset(["add", "sub", "neg", "clone", "allreduce"])
#: Elements of a period, part after part. See [Note: two dims].
Parts = tuple[int, ...]
#: Ways to have a storage beside its parts: whole on each rank, or as a sum of what the ranks have.
WHOLE: Parts = ()
SUMMED: Parts = (-1,)
#: Cost of an operation's FLOP beside that of a byte sent.
_FLOP_COST = 0.01
#: Cost of copying a byte beside that of sending one.
_COPY_COST = 0.02
#: Cost of leaving a matrix of parameters whole, which shards are for.
_WHOLE_COST = 1e12
#: Number by which a loss is told to be the sum of those of all rows.
_SUM_OF_LOSSES = 2


@dataclass(frozen=True, slots=True)
class Split:
    """Dim of a tensor of which ranks have runs.

    Attributes:
        lengths: Elements of the dim, part after part, each cut into equal runs; repeated where the dim is longer.
    """

    dim: int
    lengths: tuple[int, ...]


#: Label to cut, the lengths of its parts, and how long the dim is.
_Candidate = tuple[str, tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class _Strategy:
    """How an operation is run: what it needs of each operand, and what it makes of each result."""

    inputs: Mapping[int, Parts]
    outputs: tuple[Parts, ...]
    label: str | None = None


def shard_tensors(captured: StepGraph, layout: Layout, axis: str = "tp") -> StepGraph:
    """Rewrite a captured micro-batch into that of each rank; ``Parameter.placement`` says what a rank has.

    Args:
        axis: Along "tp" ranks have shards of parameters; along "cp" they have all, and runs of the tokens.

    Raises:
        ConfigError: columns of a matrix are used in parts that the ranks do not divide; or the tokens cannot be cut.
    """
    return _Partitioner(captured, layout, axis).sharded()


def local_view(tensor: Tensor, parts: Parts, ranks: int) -> tuple[Tensor, Split] | None:
    """View of a rank's own runs that a view of the whole is; None where it is none. See [Note: two dims].

    Args:
        parts: Parts of a period of the storage.
    """
    period = sum(parts)
    block, within = divmod(tensor.offset, period)
    number, start = 0, 0
    while start + parts[number] <= within:
        start, number = start + parts[number], number + 1
    inside = within - start
    shape, stride = list(tensor.shape), list(tensor.stride)
    split: Split | None = None
    reach = inside
    for dim in sorted((d for d, n in enumerate(shape) if n > 1 and stride[d]), key=lambda d: -stride[d]):
        length, step = shape[dim], stride[dim]
        if split is not None:
            reach += (length - 1) * step
        elif step >= period:
            if step % period:
                return None
            stride[dim] = step // ranks
        elif len(parts) > 1 and len({*parts}) == 1 and step == parts[0] and length <= len(parts) - number:
            stride[dim] = step // ranks  # a dim that counts the parts
        else:
            lengths = _lengths(length, step, parts, number, inside)
            if lengths is None or any(piece_length % ranks for piece_length in lengths):
                return None
            split, shape[dim] = Split(dim, lengths), length // ranks
    if split is None or reach >= stride[split.dim]:
        return None
    offset = block * (period // ranks) + start // ranks + inside
    return dataclasses.replace(tensor, shape=tuple(shape), stride=tuple(stride), offset=offset), split


def _lengths(length: int, step: int, parts: Parts, number: int, inside: int) -> tuple[int, ...] | None:
    """Elements of each part along a dim that runs over one part, or over whole periods; None where it does neither."""
    if length * step == parts[number] and parts[number] % step == 0:
        return (length,)
    if number == 0 and inside < step and (length * step) % sum(parts) == 0 and all(part % step == 0 for part in parts):
        return tuple(part // step for part in parts)
    return None


def _parts(tensor: Tensor, split: Split) -> Parts:
    return tuple(length * tensor.stride[split.dim] for length in split.lengths)


class _Partitioner:
    """Builder of a rank's micro-batch.

    Attributes:
        axis: Along "tp" parameters are sharded, along "cp" tokens are, and every rank has all parameters.
        whole: Tensors as the whole model has them, by number.
        versions: Storages that hold each storage of the capture, by how they do; {} of a parameter not used yet.
        first: How each storage was made.
        wanted: Parts that a gradient is to have, by storage.
        preferred: Parts in which sequence parallel has what a storage holds: ``tokens``, of ``token_bytes`` in all.
    """

    def __init__(self, captured: StepGraph, layout: Layout, axis: str) -> None:
        self.graph, self.layout, self.axis, self.ranks = captured, layout, axis, layout.axes[axis]
        self.writer = GraphWriter(captured, layout.across(axis))
        self.whole = dict(enumerate(captured.tensors))
        self.parameters = {captured.storage_of(p.tensor): p for p in captured.parameters}
        self.matrices = {s: n for s, p in self.parameters.items() if len(self.whole[n := p.tensor].shape) > 1}
        self.versions: dict[int, dict[Parts, int]] = {
            s: {} if s in self.parameters and axis == "tp" else {WHOLE: s} for s in range(len(captured.storages))
        }
        self.first: dict[int, Parts] = {}
        self.local: dict[tuple[int, int], int] = {}
        self.wanted: dict[int, Parts] = {}
        self.preferred: dict[int, Parts] = {}
        self.tokens, self.token_bytes = WHOLE, 0
        self.words: dict[tuple[int, int], tuple[int, int]] = {}
        self.masks: dict[tuple[int, int, str], int] = {}
        self.gradients: dict[int, int] = {}
        self.terms: dict[int, int] = {}
        self.losses: dict[int, int] = {}
        self.views: dict[int, list[int]] = {}
        for tensor in dict.fromkeys(t for op in captured.ops for t in op.inputs):
            self.views.setdefault(captured.storage_of(tensor), []).append(tensor)
        last = {captured.storage_of(t): n for n, op in enumerate(captured.ops) for t in (*op.outputs, *op.mutates)}
        self.final: dict[int, list[Parameter]] = {}
        for parameter in captured.parameters:
            if parameter.gradient is not None:
                self.final.setdefault(last[captured.storage_of(parameter.gradient)], []).append(parameter)

    def sharded(self) -> StepGraph:
        place: dict[int, int] = {}
        for index, op in enumerate(self.graph.ops):
            if op.phase is Phase.BACKWARD and not self.wanted and self.axis == "tp":
                self._want()
            if self.axis == "cp":
                self._prefer(op)
            self._run(op)
            if self.axis == "tp":
                self._prefer(op)
            place[index] = len(self.writer.ops) - 1
            self._finish(index, op)
        if self.axis == "cp" and not self.tokens:
            raise ConfigError(
                "layout: expected a model that looks tokens up (torch.nn.Embedding), along which cp cuts a sequence, "
                "found none; leave cp out"
            )
        parameters = tuple(map(self._parameter, self.graph.parameters))
        for tensor, full_tensor in self.whole.items():
            self._localize(tensor, full_tensor)
        graph = dataclasses.replace(
            self.writer.written(self.graph),
            parameters=parameters,
            losses=tuple(self.losses.get(loss, loss) for loss in self.graph.losses),
            blocks=moved_blocks(self.graph, place),
        )
        graph.validate()
        return graph

    # Choosing.

    def _run(self, op: Op) -> None:
        """Write an operation as a rank runs it, behind what gets its operands."""
        strategy = self._strategy(op)
        name = base_name(op.name)
        if name == "addmm" and SUMMED in strategy.outputs:
            return self._run_apart(op)
        if name == "embedding" and strategy.label == "words":
            return self._embedding(op, strategy)
        if name == "embedding_dense_backward" and strategy.label == "words":
            return self._embedding_backward(op, strategy)
        if name == "nll_loss_forward" and strategy.label == "rows":
            return self._mean_of_rows(op, strategy)
        if strategy.label == "queries":
            op = self._attending(op)
        local = {tensor: self._as(tensor, parts, op) for tensor, parts in strategy.inputs.items()}
        for tensor, parts in zip(op.outputs, strategy.outputs, strict=True):
            local[tensor] = self._record_version(tensor, parts)
        local |= {t: t for t in (*op.inputs, *op.results, *op.mutates) if t is not None and t not in local}
        self.writer.ops.append(self._sized(rename_op(op, local), op, strategy))
        for tensor in op.mutates:  # all other versions are of the past
            storage = self.whole[tensor].storage
            self.versions[storage] = {WHOLE: self.versions[storage][WHOLE]}
        return None

    def _strategy(self, op: Op) -> _Strategy:
        """Choose how an operation runs; whole where nothing else can be."""
        names = dict.fromkeys((*op.inputs, *op.mutates))
        plain = _Strategy(dict.fromkeys(names, WHOLE), (WHOLE,) * len(op.outputs))
        if op.random or op.mutates or (op.kind in (OpKind.COLLECTIVE, OpKind.STEP) and op.name != SUM):
            return plain
        name = base_name(op.name)
        if name in _LINEAR and self._are_sums(op):
            return _Strategy(dict.fromkeys(names, SUMMED), (SUMMED,))
        rule = rule_of(op, self.whole)
        if rule is None:
            return plain
        options = [plain]
        if name == "cat" and (joined := self._joined(op)) is not None:
            options.append(joined)
        for candidate in dict.fromkeys(self._candidates(op, rule)):
            if (option := self._option(op, rule, candidate)) is not None:
                options.append(option)
        best = min(options, key=lambda option: self._cost(op, option))
        if best is plain and _uses_matrix(op):
            self._check_matrix(op, rule)
        return best

    def _joined(self, op: Op) -> _Strategy | None:
        """Lay side by side what is cut along the dim in which it is joined: each operand is one or more parts."""
        out = self.whole[op.outputs[0]]
        pieces, *dim_args = op.args
        dim = cast("int", dim_args[0] if dim_args else 0) % len(out.shape)
        inputs: dict[int, Parts] = {}
        lengths: list[int] = []
        for tensor in refs(pieces):
            for parts in self.versions[self.whole[tensor].storage]:
                local = None if parts in (WHOLE, SUMMED) else local_view(self.whole[tensor], parts, self.ranks)
                if local is not None and local[1].dim == dim and sum(local[1].lengths) == self.whole[tensor].shape[dim]:
                    inputs[tensor] = parts
                    lengths += local[1].lengths
                    break
            else:
                return None
        parts = _parts(out, Split(dim, tuple(lengths)))
        return _Strategy(inputs, (parts,), "joined") if local_view(out, parts, self.ranks) is not None else None

    def _are_sums(self, op: Op) -> bool:
        """Whether all operands are sums of what the ranks have, and as large as the result."""
        are_alike = all(self.whole[t].shape == self.whole[op.outputs[0]].shape for t in op.inputs)
        tensors = are_alike and all(isinstance(arg, Ref) for arg in op.args)
        return tensors and all({*self.versions[self.whole[t].storage]} == {SUMMED} for t in op.inputs)

    def _candidates(self, op: Op, rule: ShardingRule) -> Iterator[_Candidate]:
        """Yield what an operation may be cut along: as an operand is, or a gradient is to be; a matrix as it can be."""
        candidates: list[_Candidate] = []
        for tensor in op.inputs:
            storage = self.whole[tensor].storage
            part_versions = [parts for parts in self.versions[storage] if parts not in (WHOLE, SUMMED)]
            if (op.kind is not OpKind.MATMUL or self.axis == "cp") and storage in self.preferred:
                part_versions.append(self.preferred[storage])
            for parts in part_versions:
                candidates += self._label(tensor, parts, rule.inputs[tensor])
        for tensor, labels in zip(op.outputs, rule.outputs, strict=True):
            storage = self.whole[tensor].storage
            if parts := self.wanted.get(storage, self.preferred.get(storage)):
                candidates += self._label(tensor, parts, labels)
        yield from candidates
        for tensor in op.inputs:
            storage = self.whole[tensor].storage
            if storage in self.matrices and not self.versions[storage]:
                yield from self._of_matrix(op, rule, tensor, {label for label, *_ in candidates})

    def _of_matrix(self, op: Op, rule: ShardingRule, tensor: int, known: set[str]) -> Iterator[_Candidate]:
        """Yield how a matrix of parameters can be cut that is used for the first time."""
        labels, shape = rule.inputs[tensor], self.whole[tensor].shape
        if not _uses_matrix(op) or not known.isdisjoint(labels):
            return
        columns_first = op.kind is OpKind.MATMUL  # of an embedding the words
        for label, length in sorted(
            zip(labels, shape, strict=True), key=lambda row: (row[0] in rule.summed) is columns_first
        ):
            if label is not None and length % self.ranks == 0:
                yield label, (length,), length
                yield from ((label, lengths, length) for lengths in self._parts_of_use(op, rule, label))
                return

    def _label(self, tensor: int, parts: Parts, labels: Sequence[str | None]) -> Iterator[_Candidate]:
        view = self.whole[tensor]
        local = local_view(view, parts, self.ranks)
        if local is not None and (label := labels[local[1].dim]) is not None:
            yield label, local[1].lengths, view.shape[local[1].dim]

    def _parts_of_use(self, op: Op, rule: ShardingRule, label: str) -> Iterator[tuple[int, ...]]:
        """Yield the lengths of the parts of a result's columns that are used by themselves."""
        output, labels = op.outputs[0], rule.outputs[0]
        if label not in labels:
            return
        tensor = self.whole[output]
        dim = labels.index(label)
        step, length = tensor.stride[dim], tensor.shape[dim]
        views = [self.whole[t] for t in self.views.get(tensor.storage, ())]
        starts = sorted({0, *(view.offset % (length * step) // step for view in views)})
        if len(starts) > 1:
            yield tuple(b - a for a, b in zip(starts, [*starts[1:], length], strict=True))

    def _option(self, op: Op, rule: ShardingRule, candidate: _Candidate) -> _Strategy | None:
        """Make the strategy that cuts a label; None where some tensor cannot be cut so."""
        label = candidate[0]
        inputs: dict[int, Parts] = {}
        for tensor in op.inputs:
            parts = self._cut_at(tensor, rule.inputs[tensor], candidate)
            if parts is None:
                return None
            inputs[tensor] = parts
        outputs: list[Parts] = []
        for tensor, labels in zip(op.outputs, rule.outputs, strict=True):
            sums = label in rule.summed and label not in labels
            parts = SUMMED if sums else self._cut_at(tensor, labels, candidate)
            if parts is None or parts == WHOLE:
                return None
            if op.kind is OpKind.MATMUL and not sums and not self._used_locally(op, tensor, parts):
                return None
            outputs.append(parts)
        return _Strategy(inputs, tuple(outputs), label)

    def _cut_at(self, tensor: int, labels: Sequence[str | None], candidate: _Candidate) -> Parts | None:
        """Parts of a storage with which a tensor is cut along a label; WHOLE without it, None where it cannot be."""
        label, lengths, length = candidate
        if label not in labels:
            return WHOLE
        view, dim = self.whole[tensor], labels.index(label)
        if view.shape[dim] != length:  # fewer heads of keys than of queries
            if lengths != (length,):
                return None
            lengths = (view.shape[dim],)
        if not view.stride[dim] or any(piece_length % self.ranks for piece_length in lengths):
            return None
        split = Split(dim, lengths)
        new = _parts(view, split)
        elements = self.whole_elements(view.storage, view.dtype)
        for parts in (*self.versions[view.storage], new):
            if parts in (WHOLE, SUMMED) or elements % sum(parts):
                continue
            local = local_view(view, parts, self.ranks)
            if local is not None and local[1] == split:
                return parts
        return None

    def whole_elements(self, storage: int, dtype: str) -> int:
        """Elements of a storage as the whole model has it."""
        elements = self.writer.storages[storage].size_bytes // DTYPE_BYTES[dtype]
        return elements if self.first.get(storage, WHOLE) in (WHOLE, SUMMED) else elements * self.ranks

    def _used_locally(self, op: Op, tensor: int, parts: Parts) -> bool:
        """Whether forward uses a result in parts that each rank has runs of."""
        if op.phase is Phase.BACKWARD:
            return True
        views = [self.whole[t] for t in self.views.get(self.whole[tensor].storage, ())]
        return all(local_view(view, parts, self.ranks) is not None for view in views)

    def _cost(self, op: Op, option: _Strategy) -> float:
        """Cost of an operation in bytes sent, or what is like them, with what gets its operands."""
        cost = op.flops * _FLOP_COST / (1 if option.label is None else self.ranks)
        cost += _WHOLE_COST if self.axis == "cp" and option.label is None else 0  # cut whatever can be
        for tensor, want in option.inputs.items():
            storage = self.whole[tensor].storage
            have, size = self.versions[storage], self.whole[tensor].touched_bytes
            if storage in self.parameters and not have:
                cost += _WHOLE_COST if want == WHOLE and storage in self.matrices and _uses_matrix(op) else 0
            elif want not in have:
                cost += _WHOLE_COST if storage in self.parameters and self.axis == "tp" else 0
                if WHOLE not in have:
                    cost += size * (2 if SUMMED in have and want == WHOLE else 1)
                cost += 0 if want == WHOLE else size * _COPY_COST / self.ranks
        for tensor, parts in zip(op.outputs, option.outputs, strict=True):
            size = self.whole[tensor].touched_bytes
            wanted_parts = self.wanted.get(self.whole[tensor].storage, self.preferred.get(self.whole[tensor].storage))
            cost += 2 * size if parts == SUMMED else 0
            cost += size if wanted_parts is not None and parts == WHOLE else 0
        return cost

    def _check_matrix(self, op: Op, rule: ShardingRule) -> None:
        """Refuse to leave a matrix of parameters whole that was to be cut."""
        for tensor in op.inputs:
            storage = self.whole[tensor].storage
            if storage in self.matrices and not self.versions[storage]:
                name, shape = self.parameters[storage].names[0], self.whole[self.matrices[storage]].shape
                raise ConfigError(
                    f"layout: expected a matrix that tp{self.ranks} divides, found {name} {shape}, with lengths, or "
                    "with results used in parts (heads, mostly), that it does not; use a tp that divides their number"
                )

    def _want(self) -> None:
        """Note which parts gradients are to have: those of their parameters, also where they are sums of several."""
        for parameter in self.graph.parameters:
            if parameter.gradient is not None and (split := self._split_of(parameter)) is not None:
                gradient = self.whole[parameter.gradient]
                self.wanted[gradient.storage] = _parts(gradient, split)
        for op in reversed(self.graph.ops):
            if base_name(op.name) not in _LINEAR or not op.outputs:
                continue
            out = self.whole[op.outputs[0]]
            if out.storage in self.wanted:
                for tensor in op.inputs:
                    if self.whole[tensor].shape == out.shape and self.whole[tensor].stride == out.stride:
                        self.wanted.setdefault(self.whole[tensor].storage, self.wanted[out.storage])

    def _prefer(self, op: Op) -> None:
        """With sequence and context parallel, let what comes of an embedding be cut along the tokens."""
        cuts = self.layout.sp or self.axis == "cp"
        if not cuts or op.phase is not Phase.FORWARD or base_name(op.name) != "embedding":
            return
        tensor = self.whole[op.outputs[0]]
        tokens = len(tensor.shape) - 2
        if tokens < 0 or tensor.shape[tokens] % self.ranks:
            raise ConfigError(
                f"layout: expected tokens that {self.axis}{self.ranks} divides, found {tensor.shape} from "
                f"{op.module}; take sequences of another length, or leave {'sp' if self.axis == 'tp' else 'cp'} out"
            )
        self.tokens = _parts(tensor, Split(tokens, (tensor.shape[tokens],)))
        self.token_bytes = tensor.size_bytes
        self.preferred[tensor.storage] = self.tokens

    # Versions of a storage.

    def _as(self, tensor: int, want: Parts, op: Op) -> int:
        """Tensor of a rank that is one of the whole model, with what makes it where it is not there yet."""
        view = self.whole[tensor]
        have = self.versions[view.storage]
        if not have:
            have[want] = view.storage
            self._shrink(view.storage, want)
        if want not in have:
            self._get(view.storage, view.dtype, want, op)
        storage = have[want]
        local = view if want in (WHOLE, SUMMED) else self._local(view, want)
        if storage == view.storage:
            self.writer.tensors[tensor] = local
            return tensor
        if (tensor, storage) not in self.local:
            self.local[tensor, storage] = self.writer.tensor(dataclasses.replace(local, storage=storage))
        return self.local[tensor, storage]

    def _local(self, view: Tensor, parts: Parts) -> Tensor:
        local = local_view(view, parts, self.ranks)
        assert local is not None, "a strategy needs what there can be"
        return local[0]

    def _get(self, storage: int, dtype: str, want: Parts, op: Op) -> None:
        """Make another version of a storage by a collective, or by a copy."""
        have = self.versions[storage]
        if want == WHOLE:
            have[want] = self._summed(storage, dtype, op) if SUMMED in have else self._gathered(storage, dtype, op)
            return
        if SUMMED in have and WHOLE not in have and len(want) == 1:
            have[want] = self._scattered(storage, dtype, want, op)
            return
        if WHOLE not in have:
            self._get(storage, dtype, WHOLE, op)
        have[want] = self._copy_own_runs(storage, dtype, want, op)

    def _summed(self, storage: int, dtype: str, op: Op) -> int:
        """Sum what ranks have of a storage."""
        source, count = self._flat(self.versions[storage][SUMMED], dtype)
        summed = self.writer.version(storage, "summed", dtype, count)
        self.writer.add(SUM, (source,), (self.writer.row(summed, dtype),), op, OpKind.COLLECTIVE)
        return summed

    def _gathered(self, storage: int, dtype: str, op: Op) -> int:
        """Gather the runs of all ranks, and lay them in order."""
        parts, source_storage = next((p, s) for p, s in self.versions[storage].items() if p != SUMMED)
        source, count = self._flat(source_storage, dtype)
        local = sum(parts) // self.ranks
        buffer = self.writer.version(storage, "gathered", dtype, count * self.ranks)
        self.writer.add(ALL_GATHER, (source,), (self.writer.row(buffer, dtype),), op, OpKind.COLLECTIVE)
        if len(parts) == 1 and count == local:
            return buffer
        pieces: list[int] = []
        start = 0
        for part in parts:
            columns = part // self.ranks
            for rank in range(self.ranks):
                view = Tensor(buffer, dtype, (count // local, columns), (local, 1), rank * count + start)
                pieces.append(self.writer.tensor(view))
            start += columns
        gathered = self.writer.version(storage, "whole", dtype, count * self.ranks)
        gathered_view = self.writer.view(gathered, dtype, (count // local, sum(parts)))
        self.writer.cat(tuple(pieces), 1, gathered_view, op)
        return gathered

    def _scattered(self, storage: int, dtype: str, parts: Parts, op: Op) -> int:
        """Sum what ranks have of a storage, of which each keeps its runs."""
        source, count = self._flat(self.versions[storage][SUMMED], dtype)
        period = sum(parts)
        if count > period:
            columns = period // self.ranks
            summed = self.versions[storage][SUMMED]
            views = [
                Tensor(summed, dtype, (count // period, columns), (period, 1), rank * columns)
                for rank in range(self.ranks)
            ]
            pieces = tuple(map(self.writer.tensor, views))
            buffer = self.writer.version(storage, "by rank", dtype, count)
            buffer_view = self.writer.view(buffer, dtype, (count // columns, columns))
            self.writer.cat(pieces, 0, buffer_view, op)
            source = self.writer.row(buffer, dtype)
        shard = self.writer.version(storage, "shard", dtype, count // self.ranks)
        self.writer.add(SCATTER_SUM, (source,), (self.writer.row(shard, dtype),), op, OpKind.COLLECTIVE)
        return shard

    def _copy_own_runs(self, storage: int, dtype: str, parts: Parts, op: Op) -> int:
        """Copy a rank's own runs out of what is whole."""
        whole_storage = self.versions[storage][WHOLE]
        period = sum(parts)
        count = self.writer.storages[whole_storage].size_bytes // DTYPE_BYTES[dtype]
        source = self.writer.view(whole_storage, dtype, (count // period, period))
        shard = self.writer.version(storage, "shard", dtype, count // self.ranks)
        out = self.writer.view(shard, dtype, (count // period, period // self.ranks))
        self.writer.add(OWN_RUNS, (source,), (out,), op, OpKind.COPY, (Ref(source), parts))
        return shard

    def _record_version(self, tensor: int, parts: Parts) -> int:
        """Note what an operation makes of a storage."""
        storage = self.whole[tensor].storage
        self.versions[storage] = {parts: storage}
        if parts == SUMMED and self.tokens and self.writer.storages[storage].size_bytes == self.token_bytes:
            self.preferred[storage] = self.tokens
        self._shrink(storage, parts)
        if parts not in (WHOLE, SUMMED):
            self.writer.tensors[tensor] = self._local(self.whole[tensor], parts)
        return tensor

    def _shrink(self, storage: int, parts: Parts) -> None:
        self.first[storage] = parts
        if parts not in (WHOLE, SUMMED):
            old = self.writer.storages[storage]
            self.writer.storages[storage] = dataclasses.replace(old, size_bytes=old.size_bytes // self.ranks)

    # Operations that ranks run in another way.

    def _attending(self, op: Op) -> Op:
        """Let a rank's queries attend to all keys: a causal mask becomes the rank's rows of one."""
        first = 1 if base_name(op.name).endswith("_backward") else 0
        for tensor in op.outputs[1:] if first else ():  # gradients of keys and values, sums over queries
            view = self.whole[tensor]
            self.preferred[view.storage] = _parts(view, Split(2, (view.shape[2],)))
        causal = next(n for n, arg in enumerate(op.args) if arg is True) if True in op.args else None
        if causal is None:
            return op
        query, key = (self.whole[t] for t in op.inputs[first : first + 2])
        mask = self._causal_rows(query.shape[2], key.shape[2], query.dtype, op)
        args = (*op.args[:causal], False, *op.args[causal + 1 :])
        kwargs = (("attn_mask", Ref(mask)), *(pair for pair in op.kwargs if pair[0] != "attn_mask"))
        return dataclasses.replace(op, args=args, kwargs=kwargs, inputs=(*op.inputs, mask))

    def _causal_rows(self, rows: int, columns: int, dtype: str, op: Op) -> int:
        """Mask that a rank adds for its rows, of so many, where a query attends to no later key."""
        key = rows, columns, dtype
        if key not in self.masks:
            local_rows = rows // self.ranks
            mask = self.masks[key] = self.writer.fresh("causal mask", dtype, (local_rows, columns))
            self.writer.add(CAUSAL_ROWS, (), (mask,), op, OpKind.COPY)
        return self.masks[key]

    def _mean_of_rows(self, op: Op, strategy: _Strategy) -> None:
        """Add up a rank's own losses and their weights, then those of all ranks."""
        inputs = tuple(self._as(tensor, parts, op) for tensor, parts in strategy.inputs.items())
        loss, weight = (self.whole[t] for t in op.outputs)
        outputs = (
            self.writer.fresh("losses of the rank", loss.dtype, ()),
            self.writer.fresh("weights of the rank", weight.dtype, ()),
        )
        local = [self.writer.tensors[t].storage for t in outputs]
        args = (*map(Ref, inputs), op.args[2], _SUM_OF_LOSSES, *op.args[4:])
        summed = dataclasses.replace(op, args=args, inputs=inputs, outputs=outputs, results=outputs)
        self.writer.ops.append(self._sized(summed, op, strategy))
        total = self._record_version(op.outputs[1], WHOLE)
        self._all_reduce(local[1], self.whole[op.outputs[1]].storage, weight.dtype, op)
        mean = self._record_version(op.outputs[0], WHOLE)
        if op.args[3] == _SUM_OF_LOSSES:
            return self._all_reduce(local[0], loss.storage, loss.dtype, op)
        losses = self.writer.storage("losses of all ranks", loss.dtype, 1)
        self._all_reduce(local[0], losses, loss.dtype, op)
        parts = self.writer.view(losses, loss.dtype, ()), total
        return self.writer.add("aten.div.Tensor", parts, (mean,), op, OpKind.ELEMENTWISE)

    def _all_reduce(self, source: int, target: int, dtype: str, op: Op) -> None:
        views = self.writer.view(source, dtype, (1,)), self.writer.view(target, dtype, (1,))
        self.writer.add(SUM, views[:1], views[1:], op, OpKind.COLLECTIVE)

    def _run_apart(self, op: Op) -> None:
        """Run a product whose result is a sum of the ranks' before its bias is added."""
        out = self.whole[op.outputs[0]]
        storage = self.writer.storage(f"{self.graph.storages[out.storage].name} product", out.dtype, prod(out.shape))
        product = self.writer.tensor(dataclasses.replace(out, storage=storage))
        self.whole[product], self.versions[storage] = self.writer.tensors[product], {}
        bias, *factors = (cast("Ref", arg) for arg in op.args)
        inputs = tuple(factor.tensor for factor in factors)
        size = out.touched_bytes
        self._run(dataclasses.replace(
            op, name="aten.mm.default", args=tuple(factors), inputs=inputs, outputs=(product,), results=(product,)
        ))  # fmt: skip
        self._run(dataclasses.replace(
            op, name="aten.add.Tensor", args=(Ref(product), bias), inputs=(product, bias.tensor),
            kind=OpKind.ELEMENTWISE, flops=prod(out.shape), bytes_read=2 * size, bytes_written=size,
        ))  # fmt: skip

    def _own_words(self, index: int, weight: int, rows: int, op: Op) -> tuple[int, int]:
        """Rows of a rank's words, and which of the words it has, as tensors."""
        view, dtype = self.whole[index], self.whole[weight].dtype
        key = index, rows
        if key not in self.words:
            source = self._as(index, WHOLE, op)
            local = self.writer.fresh("own words", view.dtype, view.shape)
            word_mask = self.writer.fresh("words here", dtype, (*view.shape, 1))
            self.writer.add(OWN_WORDS, (source,), (local, word_mask), op, OpKind.COPY, (Ref(source), rows))
            self.words[key] = local, word_mask
        return self.words[key]

    def _embedding(self, op: Op, strategy: _Strategy) -> None:
        """Look up a rank's own words; rows of others are zeros, so that the ranks' results add up."""
        weight, index = op.inputs
        table = self._as(weight, strategy.inputs[weight], op)
        local, word_mask = self._own_words(index, weight, self.writer.tensors[table].shape[0], op)
        out = self.whole[op.outputs[0]]
        looked = self.writer.fresh("rows of own words", out.dtype, out.shape)
        args = (Ref(table), Ref(local), *op.args[2:])
        lookup = dataclasses.replace(op, args=args, inputs=(table, local), outputs=(looked,), results=(looked,))
        self.writer.ops.append(lookup)
        self._masked(looked, word_mask, self._record_version(op.outputs[0], SUMMED), op)

    def _embedding_backward(self, op: Op, strategy: _Strategy) -> None:
        """Add up the gradients of a rank's own words."""
        gradient, index = op.inputs
        out, view = self.whole[op.outputs[0]], self.whole[gradient]
        source = self._as(gradient, WHOLE, op)
        local, word_mask = self._own_words(index, gradient, out.shape[0] // self.ranks, op)
        masked = self.writer.fresh("gradient of own words", view.dtype, view.shape)
        self._masked(source, word_mask, masked, op)
        local_gradient = self._record_version(op.outputs[0], strategy.outputs[0])
        args = (Ref(masked), Ref(local), out.shape[0] // self.ranks, *op.args[3:])
        self.writer.ops.append(
            dataclasses.replace(
                op, args=args, inputs=(masked, local), outputs=(local_gradient,), results=(local_gradient,)
            )
        )

    def _masked(self, source: int, mask: int, out: int, op: Op) -> None:
        count = prod(self.writer.tensors[out].shape)
        self.writer.add("aten.mul.Tensor", (source, mask), (out,), op, OpKind.ELEMENTWISE, flops=count)

    def _sized(self, op: Op, whole: Op, strategy: _Strategy) -> Op:
        """Give an operation the lengths, the work and the bytes of a rank."""
        if strategy.label is None:
            return op
        args = op.args
        if base_name(op.name) == "slice_backward":
            args = (args[0], self.writer.tensors[op.outputs[0]].shape, *args[2:])
        return dataclasses.replace(
            op,
            args=args,
            flops=whole.flops // self.ranks,
            bytes_read=sum(self.writer.tensors[t].touched_bytes for t in dict.fromkeys(op.inputs)),
            bytes_written=sum(self.writer.tensors[t].touched_bytes for t in op.outputs),
        )

    # What comes out.

    def _finish(self, index: int, op: Op) -> None:
        """Get gradients that are final now as their parameters are, and losses whole."""
        for parameter in self.final.get(index, ()):
            assert parameter.gradient is not None
            split = self._split_of(parameter)
            want = WHOLE if split is None else _parts(self.whole[parameter.gradient], split)
            if self.axis == "cp" and self._is_sum(parameter.gradient):
                want = SUMMED  # the step's gradients are reduced instead, in units or buckets
                self.terms[parameter.tensor] = self.ranks
            gradient = self._as(parameter.gradient, want, op)
            self.gradients[parameter.tensor] = gradient
            storage = self.writer.tensors[gradient].storage
            self.writer.storages[storage] = dataclasses.replace(self.writer.storages[storage], role=Role.GRADIENT)
        for loss in self.graph.losses:
            if any(self.whole[t].storage == self.whole[loss].storage for t in op.outputs):
                self.losses[loss] = self._as(loss, WHOLE, op)

    def _is_sum(self, tensor: int) -> bool:
        """Whether ranks have terms of a sum and nothing else of it."""
        return {*self.versions[self.whole[tensor].storage]} == {SUMMED}

    def _split_of(self, parameter: Parameter) -> Split | None:
        """Dim of a parameter that ranks have runs of; None where each has all of it."""
        view = self.whole[parameter.tensor]
        parts = self.first.get(view.storage, WHOLE)
        local = None if parts in (WHOLE, SUMMED) else local_view(view, parts, self.ranks)
        return None if local is None else local[1]

    def _parameter(self, parameter: Parameter) -> Parameter:
        split, placement = self._split_of(parameter), parameter.placement
        if split is not None:
            across, shape = dict(self.layout.across(self.axis)), self.whole[parameter.tensor].shape
            lengths = split.lengths * (shape[split.dim] // sum(split.lengths))
            placement = TensorPlacement(shape, split.dim, lengths, cast("str", across["over"]), self.ranks)
        gradient = self.gradients.get(parameter.tensor, parameter.gradient)
        terms = self.terms.get(parameter.tensor, 1)
        return dataclasses.replace(parameter, gradient=gradient, placement=placement, gradient_terms=terms)

    def _localize(self, tensor: int, whole: Tensor) -> None:
        """Let a tensor that stands for the whole model's be a rank's; an empty one where no operation uses it."""
        parts = self.first.get(whole.storage, WHOLE)
        if parts in (WHOLE, SUMMED):
            return
        local = local_view(whole, parts, self.ranks)
        self.writer.tensors[tensor] = (
            dataclasses.replace(whole, shape=(0,), stride=(1,), offset=0) if local is None else local[0]
        )

    def _flat(self, storage: int, dtype: str) -> tuple[int, int]:
        """View of a storage as one dim, and its elements."""
        row = self.writer.row(storage, dtype)
        return row, self.writer.tensors[row].shape[0]


def _uses_matrix(op: Op) -> bool:
    """Whether an operation says how a matrix of parameters is cut."""
    return op.kind is OpKind.MATMUL or base_name(op.name) == "embedding"
