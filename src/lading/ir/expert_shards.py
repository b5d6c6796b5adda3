"""Expert parallel: each rank has some experts of a mixture and computes them for the tokens of all ranks.

``shard_experts`` rewrites a captured micro-batch into that of one rank. Experts are the modules of a list named
``experts``; of so many, every rank has as many, one after another. Every expert runs on every token, as captured, so
what enters the experts is gathered from all ranks along the tokens, and the sum of what the experts of a rank make goes
back to the ranks whose tokens they are: each adds up its own. What is said to one expert alone, as the weights that a
router gives it, goes to the rank that has it, by an all-to-all. Backward mirrors that, by the same rules.

[Note: slots] All ranks run one Program, so the first expert of a rank stands where the first of another does: what is
built for each rank must be equal but for the names of parameters, or the layout is refused.
``TensorPlacement.names`` says which parameter it is on which rank.

[Note: mean of experts] A rank's gradient of an expert is the sum over the tokens of all ranks, each of which takes the
mean over its own batch. Divided by the number of ranks it is what replicas get by taking their mean.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import cast

from lading.errors import ConfigError
from lading.ir.graph import (
    DTYPE_BYTES,
    Arg,
    Op,
    OpKind,
    Parameter,
    Phase,
    Ref,
    RepeatedBlock,
    Role,
    StepGraph,
    Tensor,
    TensorPlacement,
    rename_op,
)
from lading.ir.graph_writer import GraphWriter
from lading.ir.layout import Layout
from lading.ir.opkinds import base_name
from lading.ir.reduction import ALL_GATHER, ALL_TO_ALL, SCATTER_SUM
from lading.ir.sharding_rules import ShardingRule, rule_of

#: Name of a parameter of one expert: the list, the expert's number in it, and the parameter's name in the expert.
_EXPERT = re.compile(r"((?:.+\.)?experts)\.(\d+)\.(.+)")


def shard_experts(captured: StepGraph, layout: Layout) -> StepGraph:
    """Rewrite a captured micro-batch into that of each rank; ``Parameter.placement`` names the experts of each.

    Raises:
        ConfigError: the model has no list of experts that ranks divide, or does with them what is not known.
    """
    lists = _lists_of(captured, layout)
    each = [_ExpertSharder(captured, layout, lists, rank) for rank in range(layout.ep)]
    programs = [sharder.written() for sharder in each]
    for rank, program in enumerate(programs[1:], 1):
        unlike = next((n for n, (a, b) in enumerate(zip(programs[0], program, strict=False)) if a != b), None)
        if unlike is not None or len(program) != len(programs[0]):
            op = each[0].writer.ops[min(unlike or 0, len(each[0].writer.ops) - 1)]
            raise ConfigError(
                f"layout: expected experts that all do the same, found that what rank {rank} of ep{layout.ep} has "
                f"differs from what rank 0 has, at {op.name} of {op.module or 'the loss'}; give all experts of a list "
                "the same shape and add up their results in one way, or leave ep out"
            )
    return each[0].sharded([sharder.experts_here() for sharder in each])


def _lists_of(captured: StepGraph, layout: Layout) -> dict[str, int]:
    """Count the experts of each list, by its name."""
    lists: dict[str, int] = {}
    for parameter in captured.parameters:
        if match := _EXPERT.fullmatch(parameter.names[0]):
            lists[match[1]] = max(lists.get(match[1], 0), int(match[2]) + 1)
            if len(parameter.names) > 1:
                raise ConfigError(
                    f"layout: expected every expert to have parameters of its own with ep, found "
                    f"{' and '.join(parameter.names)} tied; untie them, or leave ep out"
                )
    if not lists:
        stacked = next((p.names[0] for p in captured.parameters if "expert" in p.names[0]), "none")
        raise ConfigError(
            f"layout: expected experts that are modules of a list (blocks.0.experts.3.up.weight), found {stacked}; "
            "parameters that stack several experts are not cut yet: give each expert a module, or leave ep out"
        )
    for name, count in lists.items():
        if count % layout.ep:
            raise ConfigError(f"layout: expected experts that ep{layout.ep} divides, found {count} in {name}; use less")
    return lists


class _ExpertSharder:
    """Builder of one rank's micro-batch.

    Attributes:
        experts: List and experts of what a captured storage holds, where it holds anything of experts.
        scaled: Those of them with the tokens of all ranks.
        columns: Lists for whose experts, one after another, a captured storage has a number a token.
        alias: Storages that stand for captured ones: of a sum of which the rank has one term, that term.
        versions: Storages made of captured ones, by what they are: "tokens" gathered, "columns" of the rank's experts,
            "sum" scattered.
        spans: Where the operations that stand for a captured one begin and end.
    """

    def __init__(self, captured: StepGraph, layout: Layout, lists: Mapping[str, int], rank: int) -> None:
        self.graph, self.layout, self.ranks, self.rank, self.lists = captured, layout, layout.ep, rank, lists
        self.across = layout.across("replicate", "shard")
        self.writer = GraphWriter(captured, self.across)
        self.by_number = dict(enumerate(captured.tensors))
        self.experts: dict[int, tuple[str, frozenset[int]]] = {}
        self.scaled: set[int] = set()
        self.columns: dict[int, str] = {}
        self.alias: dict[int, int] = {}
        self.versions: dict[tuple[str, int], int] = {}
        self.views: dict[tuple[int, int], int] = {}
        self.spans: list[tuple[int, int]] = []
        self.slots: dict[int, tuple[str, int, str]] = {}
        for parameter in captured.parameters:
            if match := _EXPERT.fullmatch(parameter.names[0]):
                storage, number = captured.storage_of(parameter.tensor), int(match[2])
                self.experts[storage] = match[1], frozenset([number])
                self.slots[storage] = match[1], number % self._experts_per_rank(match[1]), match[3]
        last = {captured.storage_of(t): n for n, op in enumerate(captured.ops) for t in (*op.outputs, *op.mutates)}
        self.final: dict[int, list[Parameter]] = {}
        for parameter in captured.parameters:
            if self._is_experts(parameter.tensor) and parameter.gradient is not None:
                self.final.setdefault(last[captured.storage_of(parameter.gradient)], []).append(parameter)
        for index, op in enumerate(captured.ops):
            start = len(self.writer.ops)
            self._run(op)
            for parameter in self.final.get(index, ()):
                self._take_mean(parameter, op)
            self.spans.append((start, len(self.writer.ops)))

    # What the rank has.

    def _experts_per_rank(self, name: str) -> int:
        """Experts of a list that each rank has."""
        return self.lists[name] // self.ranks

    def _is_experts(self, tensor: int) -> bool:
        """Whether a captured tensor holds anything of experts."""
        return self.graph.storage_of(tensor) in self.experts

    def _experts_of(self, tensor: int) -> tuple[str, frozenset[int]] | None:
        """List and experts that a captured tensor holds something of, or is said to: a router's weights of one."""
        view = self.graph.tensors[tensor]
        name = self.columns.get(view.storage)
        if name is not None and self._is_column(view, name):
            return name, frozenset([view.offset])
        return self.experts.get(view.storage)

    def _is_column(self, view: Tensor, name: str) -> bool:
        """Whether a view has one number a token of a storage that has one for each expert of a list."""
        count, elements = self.lists[name], self._elements(view)
        steps = [step for n, step in zip(view.shape, view.stride, strict=True) if n > 1]
        return elements % count == 0 and view.offset < count and all(step % count == 0 for step in steps)

    def _is_here(self, tensor: int) -> bool:
        """Whether the rank has any of the experts that a tensor holds something of."""
        name, numbers = self.experts[self.graph.storage_of(tensor)]
        return any(number // self._experts_per_rank(name) == self.rank for number in numbers)

    def experts_here(self) -> list[Parameter]:
        """Parameters of the rank's experts, slot by slot."""
        mine = [p for p in self.graph.parameters if self.graph.storage_of(p.tensor) in self.slots]
        mine = [p for p in mine if self._is_here(p.tensor)]
        return sorted(mine, key=lambda p: self.slots[self.graph.storage_of(p.tensor)])

    def sharded(self, of_ranks: Sequence[Sequence[Parameter]]) -> StepGraph:
        """Make the graph of the rank.

        Args:
            of_ranks: Parameters of each rank's experts, slot by slot.
        """
        over = cast("str", dict(self.across)["over"])
        slots = [[each[slot] for each in of_ranks] for slot in range(len(of_ranks[0]))]
        placements = {
            first.tensor: TensorPlacement(
                self.writer.tensors[first.tensor].shape,
                0,
                (),
                over,
                self.ranks,
                tuple(p.names[0] for p in (first, *others)),
            )
            for first, *others in slots
        }
        parameters = [p for p in self.graph.parameters if p.tensor in placements or not self._is_experts(p.tensor)]
        losses = tuple(self._scattered(t, self.writer.ops[-1]) if self._is_experts(t) else t for t in self.graph.losses)
        graph = dataclasses.replace(
            self.writer.written(self.graph),
            parameters=tuple(dataclasses.replace(p, placement=placements.get(p.tensor)) for p in parameters),
            losses=losses,
            blocks=tuple(self._blocks()),
        )
        graph = _compact(graph)
        graph.validate()
        return graph

    def _blocks(self) -> Iterator[RepeatedBlock]:
        """Yield the repeated blocks with what stands for their operations; those of unlike length by themselves."""
        runs: dict[tuple[str, Phase, int], list[int]] = {}
        for block in self.graph.blocks:
            for first in block.starts:
                start, end = self.spans[first][0], self.spans[first + block.num_ops - 1][1]
                if end > start:
                    runs.setdefault((block.module, block.phase, end - start), []).append(start)
        for (module, phase, length), starts in runs.items():
            yield RepeatedBlock(module, phase, length, tuple(starts))

    def written(self) -> list[tuple[object, ...]]:
        """Operations as they are on any rank: a parameter of an expert by its slot, what is made of it by its turn."""
        numbers: dict[int, int] = {}

        def named(arg: Arg) -> object:
            if isinstance(arg, tuple):
                return tuple(map(named, arg))
            return describe_tensor(arg.tensor) if isinstance(arg, Ref) else arg

        def describe_tensor(tensor: int) -> tuple[object, ...]:
            view = self.writer.tensors[tensor]
            if view.storage in self.slots:
                storage: object = self.slots[view.storage]
            elif view.storage < len(self.graph.storages) and view.storage not in self.experts:
                storage = "captured", view.storage
            else:
                storage = numbers.setdefault(view.storage, len(numbers))
            return storage, view.dtype, view.shape, view.stride, view.offset

        return [
            (
                op.name,
                op.phase,
                op.kwargs,
                named(op.args),
                *map(describe_tensor, (*op.inputs, *op.outputs, *op.mutates)),
            )
            for op in self.writer.ops
        ]

    # Operations.

    def _run(self, op: Op) -> None:
        """Write an operation as the rank runs it, unless it is of experts of other ranks."""
        touched = {t: held for t in (*op.inputs, *op.mutates) if (held := self._experts_of(t)) is not None}
        if not touched:
            self.writer.ops.append(op)
            return
        if op.random or op.mutates:
            raise self._refusal(op, f"without {'random numbers' if op.random else 'writes in place'}")
        names = {name for name, _ in touched.values()}
        numbers = frozenset[int]().union(*(each for _, each in touched.values()))
        if len(names) == len(numbers) == 1:
            self._run_expert(op, (names.pop(), numbers))
        elif len(names) == 1 and self._adds(op):
            self._add_up(op, (names.pop(), numbers))
        elif len(names) == 1 and self._joins(op, min(names)):
            self._join(op, min(names))
        else:
            self.writer.ops.append(
                self._renamed(op, {t: self._scattered(t, op) for t in touched if self._is_experts(t)})
            )

    def _run_expert(self, op: Op, experts: tuple[str, frozenset[int]]) -> None:
        """Run an operation of one expert on the tokens of all ranks."""
        rule = rule_of(op, self.by_number)
        label = self._token_label(op, rule)
        labels = dict(rule.inputs) if rule is not None else {}
        for number, tensor in enumerate(op.outputs):
            storage, view = self.graph.storage_of(tensor), self.graph.tensors[tensor]
            self.experts[storage] = experts
            if label is None or rule is None:
                continue
            if label in rule.outputs[number]:
                if self._token_dim(view) != rule.outputs[number].index(label):
                    raise self._refusal(op, "whose results lie token by token")
                self.scaled.add(storage)
            elif label not in rule.summed:
                raise self._refusal(op, "that make something of each token")
        given = [t for t in op.inputs if label is not None and label in labels[t] and not self._is_experts(t)]
        for view in map(self.graph.tensors.__getitem__, given):
            if self._is_column(view, experts[0]) and view.offset in experts[1]:
                self.columns[view.storage] = experts[0]
        if not self._is_here(op.outputs[0]):
            return
        moved = {t: self._gathered(t, experts[0], op) for t in given}
        moved |= {t: self._view_here(t) for t in op.inputs if self._is_experts(t)}
        self.writer.ops.append(self._renamed(op, moved, scaled=label is not None))

    def _token_label(self, op: Op, rule: ShardingRule | None) -> str | None:
        """Label of the dim along which an operation of an expert goes over tokens; None where it sees none."""
        labels: set[str | None] = set()
        for tensor in op.inputs:
            view, storage = self.graph.tensors[tensor], self.graph.storage_of(tensor)
            lasting = self.graph.storages[storage].role in (Role.PARAMETER, Role.BUFFER, Role.CONSTANT)
            if (storage not in self.scaled and (storage in self.experts or lasting)) or prod(view.shape) == 1:
                continue
            dim = self._token_dim(view)
            labels.add(None if dim is None or rule is None else rule.inputs[tensor][dim])
        if len(labels) > 1 or None in labels:
            raise self._refusal(op, "that treat tokens alone, along one dim")
        return labels.pop() if labels else None

    def _adds(self, op: Op) -> bool:
        """Whether an operation adds up what several experts make, of which all have the same place in memory."""
        views = [self.graph.tensors[t] for t in (*op.inputs, *op.outputs)]
        same_layout = len({(v.dtype, v.shape, v.stride, v.offset) for v in views}) == 1
        are_scaled = all(view.storage in self.scaled for view in views[:2])
        return base_name(op.name) == "add" and len(op.inputs) == len(op.args) == 2 and same_layout and are_scaled

    def _add_up(self, op: Op, experts: tuple[str, frozenset[int]]) -> None:
        """Add what the rank's experts make; what one alone makes is their sum."""
        out = self.graph.storage_of(op.outputs[0])
        self.experts[out] = experts
        self.scaled.add(out)
        local_inputs = [t for t in op.inputs if self._is_here(t)]
        if len(local_inputs) == 1:
            storage = self.graph.storage_of(local_inputs[0])
            self.alias[out] = self.alias.get(storage, storage)
        elif local_inputs:
            self.writer.ops.append(self._renamed(op, {t: self._view_here(t) for t in local_inputs}, scaled=True))

    def _joins(self, op: Op, name: str) -> bool:
        """Whether an operation lays a number a token of each expert of a list side by side."""
        if base_name(op.name) not in ("cat", "stack") or len(op.inputs) != self.lists[name]:
            return False
        out, dim = self.graph.tensors[op.outputs[0]], cast("int", op.args[1] if len(op.args) > 1 else 0)
        views = [self.graph.tensors[t] for t in op.inputs]
        order = [self.experts.get(view.storage) for view in views]
        return (
            order == [(name, frozenset([number])) for number in range(len(views))]
            and all(view.storage in self.scaled and view.is_row_major and self._elements(view) == prod(view.shape)
                    for view in views)
            and out.is_row_major
            and prod(out.shape[dim % len(out.shape) :]) == out.shape[dim] == len(views)
        )  # fmt: skip

    def _join(self, op: Op, name: str) -> None:
        """Send what the rank's experts said of each rank's tokens there, and lay what arrives side by side."""
        out, each = self.graph.tensors[op.outputs[0]], self._experts_per_rank(name)
        rows = prod(out.shape) // self.lists[name]
        pieces: list[int] = []
        for tensor in op.inputs:
            if self._is_here(tensor):
                view = self.writer.tensors[self._view_here(tensor)]
                pieces.append(self.writer.tensor(dataclasses.replace(
                    view, shape=(self.ranks * rows, 1), stride=(1, 1), offset=0
                )))  # fmt: skip
        whole = self.writer.fresh("said of all tokens", out.dtype, (self.ranks * rows, each))
        joined = self.writer.tensors[whole].storage
        self.writer.cat(tuple(pieces), 1, whole, op)
        arrived = self._exchanged(joined, "said of the rank's tokens", out.dtype, op)
        parts = [self.writer.tensor(Tensor(arrived, out.dtype, (rows, each), (each, 1), rank * rows * each))
                 for rank in range(self.ranks)]  # fmt: skip
        self.writer.cat(tuple(parts), 1, self.writer.view(out.storage, out.dtype, (rows, self.lists[name])), op)

    def _take_mean(self, parameter: Parameter, op: Op) -> None:
        """Divide the gradient of an expert. See [Note: mean of experts]."""
        gradient = cast("int", parameter.gradient)
        if not self._is_experts(gradient) or self.graph.storage_of(gradient) in self.scaled:
            raise self._refusal(op, f"behind a router's weights (the gradient of {parameter.names[0]} depends on none)")
        if not self._is_here(gradient):
            return
        view = self._view_here(gradient)
        size = self.writer.tensors[view].touched_bytes
        self.writer.ops.append(Op(
            name="aten.div_.Scalar", phase=op.phase, args=(Ref(view), self.ranks), kwargs=(), inputs=(view,),
            outputs=(), results=(None,), mutates=(view,), module=op.module, kind=OpKind.ELEMENTWISE,
            flops=prod(self.writer.tensors[view].shape), bytes_read=size, bytes_written=size,
        ))  # fmt: skip

    # Versions of storages.

    def _elements(self, view: Tensor) -> int:
        """Elements of a captured storage."""
        return self.graph.storages[view.storage].size_bytes // DTYPE_BYTES[view.dtype]

    def _token_dim(self, view: Tensor) -> int | None:
        """Find the dim of a captured view that goes over all of its storage, block by block: the tokens."""
        elements = self._elements(view)
        dims = [d for d, (n, step) in enumerate(zip(view.shape, view.stride, strict=True)) if n * step == elements]
        return max(dims, key=lambda d: view.stride[d], default=None)

    def _scaled_view(self, view: Tensor) -> Tensor:
        """View of the tokens of all ranks that a captured view of a rank's own tokens is."""
        dim = self._token_dim(view)
        if dim is None:
            raise ConfigError(
                f"layout: expected experts that see all tokens alike with ep, found {view.shape} with strides "
                f"{view.stride} of {self.graph.storages[view.storage].name}; leave ep out"
            )
        shape = tuple(n * self.ranks if d == dim else n for d, n in enumerate(view.shape))
        return dataclasses.replace(view, shape=shape)

    def _view_here(self, tensor: int) -> int:
        """Tensor of the rank that stands for a captured one of its experts."""
        view = self.graph.tensors[tensor]
        geometry = self._scaled_view(view) if view.storage in self.scaled else view
        storage = self.alias.get(view.storage, view.storage)
        if storage == view.storage:
            self.writer.tensors[tensor] = geometry
            return tensor
        return self._on(tensor, storage, geometry)

    def _on(self, tensor: int, storage: int, view: Tensor) -> int:
        """Tensor that views another storage than the captured one."""
        if (tensor, storage) not in self.views:
            self.views[tensor, storage] = self.writer.tensor(dataclasses.replace(view, storage=storage))
        return self.views[tensor, storage]

    def _gathered(self, tensor: int, name: str, op: Op) -> int:
        """Get what an expert is given of all ranks' tokens."""
        view = self.graph.tensors[tensor]
        if view.storage in self.columns:
            return self._column(tensor, name, op)
        elements, key = self._elements(view), ("tokens", view.storage)
        if key not in self.versions:
            made = self.writer.version(view.storage, "of all ranks", view.dtype, elements * self.ranks)
            source, out = self.writer.view(view.storage, view.dtype, (elements,)), self.writer.row(made, view.dtype)
            self.writer.add(ALL_GATHER, (source,), (out,), op, OpKind.COLLECTIVE)
            self.versions[key] = made
        return self._on(tensor, self.versions[key], self._scaled_view(view))

    def _column(self, tensor: int, name: str, op: Op) -> int:
        """Get what is said to one of the rank's experts of all ranks' tokens."""
        view, count, each = self.graph.tensors[tensor], self.lists[name], self._experts_per_rank(name)
        key = "columns", view.storage
        if key not in self.versions:
            rows = self._elements(view) // count
            parts = [self.writer.tensor(Tensor(view.storage, view.dtype, (rows, each), (count, 1), rank * each))
                     for rank in range(self.ranks)]  # fmt: skip
            whole = self.writer.fresh("said by expert", view.dtype, (self.ranks * rows, each))
            packed = self.writer.tensors[whole].storage
            self.writer.cat(tuple(parts), 0, whole, op)
            self.versions[key] = self._exchanged(packed, "said to the rank's experts", view.dtype, op)
        stride = tuple(step // count * each for step in view.stride)
        local = dataclasses.replace(self._scaled_view(view), stride=stride, offset=view.offset % each)
        return self._on(tensor, self.versions[key], local)

    def _scattered(self, tensor: int, op: Op) -> int:
        """Sum what the experts of all ranks make of the rank's own tokens."""
        view = self.graph.tensors[tensor]
        if view.storage not in self.scaled:
            raise self._refusal(op, "whose parameters nothing else uses")
        key = "sum", view.storage
        if key not in self.versions:
            elements, storage = self._elements(view), self.alias.get(view.storage, view.storage)
            made = self.writer.version(view.storage, "of all experts", view.dtype, elements)
            source = self.writer.view(storage, view.dtype, (elements * self.ranks,))
            self.writer.add(SCATTER_SUM, (source,), (self.writer.row(made, view.dtype),), op, OpKind.COLLECTIVE)
            self.versions[key] = made
        return self._on(tensor, self.versions[key], view)

    def _exchanged(self, source: int, name: str, dtype: str, op: Op) -> int:
        """Send a part of a storage to each rank; what arrives lies rank after rank."""
        row = self.writer.row(source, dtype)
        out = self.writer.fresh(name, dtype, self.writer.tensors[row].shape)
        self.writer.add(ALL_TO_ALL, (row,), (out,), op, OpKind.COLLECTIVE)
        return self.writer.tensors[out].storage

    # Making.

    def _renamed(self, op: Op, moved: Mapping[int, int], *, scaled: bool = False) -> Op:
        """Give an operation a rank's tensors, and the work and the bytes that it then has."""
        for tensor in op.outputs:
            storage = self.graph.storage_of(tensor)
            if storage in self.scaled:
                self._view_here(tensor)
                whole = self.graph.storages[storage]
                self.writer.storages[storage] = dataclasses.replace(whole, size_bytes=whole.size_bytes * self.ranks)
        every = (*op.inputs, *op.outputs, *op.mutates, *(t for t in op.results if t is not None))
        op = rename_op(op, {**{t: t for t in every}, **moved})
        args = op.args
        if base_name(op.name) == "slice_backward":
            args = (args[0], self.writer.tensors[op.outputs[0]].shape, *args[2:])
        return dataclasses.replace(
            op,
            args=args,
            flops=op.flops * (self.ranks if scaled else 1),
            bytes_read=sum(self.writer.tensors[t].touched_bytes for t in dict.fromkeys(op.inputs)),
            bytes_written=sum(self.writer.tensors[t].touched_bytes for t in op.outputs),
        )

    def _refusal(self, op: Op, what: str) -> ConfigError:
        return ConfigError(
            f"layout: expected experts {what} with ep, found {op.name} of {op.module or 'the loss'}; change that, or "
            "leave ep out"
        )


def _compact(graph: StepGraph) -> StepGraph:
    """Leave out the tensors and storages that nothing uses."""
    used = dict.fromkeys(
        [
            *(t for op in graph.ops for t in (*op.inputs, *op.outputs, *op.mutates)),
            *(t for op in graph.ops for t in op.results if t is not None),
            *(t for p in graph.parameters for t in (p.tensor, p.gradient) if t is not None),
            *(t for _, t in graph.buffers),
            *(t for leaves in graph.inputs for _, t in leaves),
            *graph.losses,
        ]
    )
    tensors = {old: new for new, old in enumerate(sorted(used))}
    storages = {old: new for new, old in enumerate(sorted({graph.storage_of(t) for t in tensors}))}
    return dataclasses.replace(
        graph,
        storages=tuple(graph.storages[old] for old in storages),
        tensors=tuple(
            dataclasses.replace(graph.tensors[old], storage=storages[graph.storage_of(old)]) for old in tensors
        ),
        ops=tuple(rename_op(op, tensors) for op in graph.ops),
        parameters=tuple(
            dataclasses.replace(
                p, tensor=tensors[p.tensor], gradient=None if p.gradient is None else tensors[p.gradient]
            )
            for p in graph.parameters
        ),
        buffers=tuple((name, tensors[t]) for name, t in graph.buffers),
        inputs=tuple(tuple((name, tensors[t]) for name, t in leaves) for leaves in graph.inputs),
        losses=tuple(tensors[t] for t in graph.losses),
    )
