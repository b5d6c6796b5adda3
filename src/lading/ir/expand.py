"""Expansion: from one micro-batch's graph to a whole training step.

Micro-batches are unrolled, gradients accumulated in place, clipped by their global norm, and every parameter updated
as soon as its gradient is final and nothing still reads the old value. The operations added are those that eager
PyTorch runs (``AccumulateGrad``, ``clip_grad_norm_``, and what moves the parameter), so the numbers are the same to the
bit.

[Note: master weights] With ``master_weights``, a parameter of less than 32 bits has a float32 master beside its other
states. Its gradients are summed over micro-batches in float32, clipped in float32 and applied to the master, and
the parameter becomes the master rounded; ``lading.optim.master`` is the same in plain PyTorch.

[Note: states in parts] The states of a large parameter are storages of a few MiB each, with one update for each, on
views of the parameter and its gradient, so that they can pass through the device one after another. Fused kernels
treat elements alone, in vectors from the start of what they are given: cut at whole vectors, parts give the bits of
the whole (tests/optim/test_parameter_rules.py); where blocks of elements have a scale (``lading.optim.low_bit``), those
are whole blocks too. A rule that needs the whole parameter says so (``ParameterRule.whole``); for a rule for matrices
(``lading.ir.update_ops``) states are cut between matrices only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from math import lcm, prod
from types import MappingProxyType

from lading.errors import ConfigError, check_clip_norm
from lading.grouping import Matrices
from lading.ir.graph import (
    DTYPE_BYTES,
    PERSISTENT,
    Arg,
    Literal,
    Op,
    OpKind,
    Parameter,
    Phase,
    Ref,
    RepeatedBlock,
    Role,
    State,
    StepGraph,
    Storage,
    Tensor,
    rename_op,
    row_major,
)
from lading.ir.layout import ALONE, SHARDED, Layout
from lading.ir.reduction import ALL_REDUCE, ALL_REDUCE_SUM, REDUCE_SCATTER, reduction
from lading.ir.update_ops import (
    PREFIX,
    MatrixStack,
    Tensors,
    grouped,
    members,
    update_op,
)
from lading.optim.registry import default_rule, name_of
from lading.optim.rule import ParameterRule

#: Least elements of a part: 4 MiB of float32, which a disk moves at nearly full speed.
PART_ELEMENTS = 1 << 20
#: Operations of a step that is planned, at most, where micro-batches multiply them: 55 of a Llama of 32 blocks.
_MOST_OPERATIONS = 200_000
#: A model has about this many parts at most, so that the step stays short.
_PARTS = 256
#: Parts begin at whole pages of float32, which are whole vectors of every CPU.
_UNIT = 1024
#: Added to the norm by which gradients are clipped, as by ``torch.nn.utils.clip_grad_norm_``.
CLIP_EPSILON = 1e-6
#: Share of a part by which it may be larger so that it has whole rows.
_ROWS_SHARE = 1 / 64
#: Dtype of the parts of a complex number.
_REAL = MappingProxyType({"complex64": "float32", "complex128": "float64"})
_LOW = frozenset({"bfloat16", "float16"})


def expand(  # noqa: PLR0913  what a step depends on
    graph: StepGraph,
    *,
    clip_norm: float = 0.0,
    master_weights: bool = False,
    optimizer: ParameterRule | None = None,
    matrices: Matrices | None = None,
    part_elements: int = PART_ELEMENTS,
    widen: bool = False,
    layout: Layout = ALONE,
    order: Sequence[tuple[Sequence[int], int]] = (),
    sizes: Mapping[str, int] = MappingProxyType({}),
    clipped: StepGraph | None = None,
) -> StepGraph:
    """Expand a micro-batch to the step of ``graph.accumulation`` of them, with the updates of all trained parameters.

    Of an evaluation these are its micro-batches alone.

    Args:
        graph: One micro-batch, as captured.
        clip_norm: Limit of the global gradient norm as in ``torch.nn.utils.clip_grad_norm_``; 0 switches it off.
        master_weights: Give each bfloat16 or float16 parameter a float32 master. See [Note: master weights].
        optimizer: Rule that moves parameters; None for the default, AdamW.
        matrices: Which parameters another rule moves as matrices, and by which; None leaves all to ``optimizer``.
        part_elements: Least elements of a part of an optimizer state. See [Note: states in parts].
        widen: Take the gradient of a parameter with a master to float32 of a single micro-batch too, as other ranks
            add theirs.
        layout: Where it cuts states, parameters are shards (``lading.ir.sharding``): gradients are reduced and cut once
            they are summed, with ZeRO 2 and 3 in each micro-batch; over replicas of shards once a step. Where ranks
            have parameters of their own, all ranks' norms are clipped by.
        order: Runs of operations of ``graph``, each with its micro-batch, in the order in which a rank of a pipeline
            does them; () does one micro-batch after the other. Backward of each operation goes through the
            micro-batches in order.
        sizes: Elements of the smallest parameter in a unit, by the name of its shard (``ParameterRule.of_size``).
        clipped: Micro-batch of all stages of a pipeline, whose gradients have one norm; None if that is ``graph``.

    Raises:
        ConfigError: negative clip_norm, no parameter has a gradient, gradients of several dtypes to clip, a parameter
            that the rule cannot move, or more micro-batches than can be planned.
    """
    check_clip_norm(clip_norm)  # 0 is off
    if (count := graph.accumulation * len(graph.ops)) > _MOST_OPERATIONS and graph.accumulation > 1:
        raise ConfigError(
            f"accumulation: expected at most {max(1, _MOST_OPERATIONS // len(graph.ops)):,} micro-batches of "
            f"{len(graph.ops):,} operations, as a step is planned operation by operation, got {graph.accumulation:,} "
            f"({count:,} operations); make micro-batches larger"
        )
    trained = [p for p in graph.parameters if p.gradient is not None]
    if not trained and graph.trains and not order:  # a stage of a pipeline may have nothing to train
        raise ConfigError("no parameter has a gradient: nothing would be trained; check requires_grad")
    builder = _StepBuilder(graph, master_weights, optimizer or default_rule(), matrices, layout, widen, sizes)
    builder.add_micro_batches(order)
    if not trained and clip_norm and clipped is not None and clipped.trains:
        builder.add_norm_of_others(_clipped_dtype(clipped, master_weights))
    if trained:
        if layout.zero == 1:
            builder.add_reductions([p for p in trained if not p.is_on_one_rank])
        if layout.zero and layout.axes["replicate"] > 1:
            builder.add_means_of_shards(trained)
        dtype = _clipped_dtype(clipped or graph, master_weights) if clip_norm else ""
        coefficient = builder.add_clipping(trained, clip_norm, dtype) if clip_norm else None
        total = sum(prod(graph.tensors[p.tensor].shape) for p in graph.parameters)
        builder.add_updates(trained, coefficient, max(part_elements, total // _PARTS))
    return builder.finish()


class _StepBuilder:
    """Builder of the expanded graph; ``ops`` holds the operations in their final order.

    Attributes:
        gradients: Tensor of each parameter's gradient, summed over micro-batches, by the parameter's tensor.
        parts: Rows of the parts of each parameter that the rule for matrices moves, by the parameter's tensor.
    """

    def __init__(
        self,
        graph: StepGraph,
        master_weights: bool,
        optimizer: ParameterRule,
        matrices: Matrices | None,
        layout: Layout,
        widen: bool,
        sizes: Mapping[str, int],
    ) -> None:
        self.graph, self.master_weights, self.widen, self.layout = graph, master_weights, widen, layout
        self.optimizer, self.matrices, self.sizes = optimizer, matrices, sizes
        self.parts = grouped(graph, matrices)[0] if matrices is not None else {}
        self.storages = list(graph.storages)
        self.tensors = list(graph.tensors)
        self.ops: list[Op] = []
        self.starts: list[int] = []
        self.inputs: list[tuple[tuple[str, int], ...]] = []
        self.losses: list[int] = []
        self.gradient_norm: int | None = None
        self.states: list[State] = []
        self.gradients = {p.tensor: p.gradient for p in graph.parameters if p.gradient is not None}

    def has_master(self, parameter: Parameter) -> bool:
        """Whether a float32 master is updated instead of the parameter."""
        return _has_master(self.graph, parameter, self.master_weights)

    def add_micro_batches(self, order: Sequence[tuple[Sequence[int], int]]) -> None:
        """Append the operations of all micro-batches; later ones have fresh activations and add to the gradients."""
        forward_ops = range(len(self.graph.ops))
        names: list[dict[int, int]] = []
        for micro in range(self.graph.accumulation):
            names.append(self._tensor_map(micro))
            self.inputs.append(tuple((name, names[micro][t]) for name, t in self.graph.inputs[0]))
            self.losses.extend(names[micro][t] for t in self.graph.losses)
            if not order:
                self.starts.append(len(self.ops))
                self._add_run(forward_ops, names[micro], micro)
                self._add_up(micro, names[micro], self.starts[-1])
        for run, micro in order:
            self._add_run(run, names[micro], micro)
        for micro in range(self.graph.accumulation) if order else ():
            self._add_up(micro, names[micro], 0)

    def _add_run(self, run: Sequence[int], names: dict[int, int], micro: int) -> None:
        for index in run:
            op = rename_op(self.graph.ops[index], names)
            self.ops.append(dataclasses.replace(op, draw=(op.draw[0], micro)) if op.draw is not None else op)

    def _add_up(self, micro: int, names: Mapping[int, int], start: int) -> None:
        """Insert the sum of each gradient over micro-batches behind its last write, which is from ``start`` on."""
        if not (self.graph.trains and (self.graph.accumulation > 1 or self.widen or self.layout.zero > 1)):
            return
        written = ((i, t) for i in range(start, len(self.ops)) for t in (*self.ops[i].outputs, *self.ops[i].mutates))
        last = {self.tensors[t].storage: i for i, t in written}
        after: dict[int, list[Op]] = {}
        for parameter in self.graph.parameters:
            if parameter.gradient is None:
                continue
            fresh = names[parameter.gradient]
            inserted = after.setdefault(last[self.tensors[fresh].storage], [])
            if self.layout.zero > 1 and not parameter.is_on_one_rank:
                inserted.extend(self._reduced(parameter, fresh, micro))
                continue
            op = self._accumulate(parameter, fresh) if micro else self._widen(parameter)
            if op is not None:
                inserted.insert(0, op)
        self._insert(after)

    def _reduced(self, parameter: Parameter, fresh: int, micro: int) -> list[Op]:
        """Reduce a unit's gradient of one micro-batch to this rank's shard, and add it to those before."""
        total, ops = self.gradients[parameter.tensor], list[Op]()
        self.gradients[parameter.tensor] = fresh
        if (wide := self._widen(parameter)) is not None:
            ops.append(wide)
        ops.append(self._scatter(parameter, micro))
        if micro:
            shard, self.gradients[parameter.tensor] = self.gradients[parameter.tensor], total
            ops.append(self._accumulate(parameter, shard))
        return ops

    def add_reductions(self, trained: Sequence[Parameter]) -> None:
        """Reduce the gradients of units, summed over micro-batches, to this rank's shards."""
        final = {self.tensors[t].storage: i for i, op in enumerate(self.ops) for t in (*op.outputs, *op.mutates)}
        after: dict[int, list[Op]] = {}
        for parameter in trained:
            last = final[self.tensors[self.gradients[parameter.tensor]].storage]
            after.setdefault(last, []).append(self._scatter(parameter, 0))
        self._insert(after)

    def add_means_of_shards(self, trained: Sequence[Parameter]) -> None:
        """Reduce each shard of gradients over the replicas that have the same shard."""
        final = {self.tensors[t].storage: i for i, op in enumerate(self.ops) for t in (*op.outputs, *op.mutates)}
        across, after = self.layout.across("replicate"), dict[int, list[Op]]()
        for parameter in trained:
            shard = self.gradients[parameter.tensor]
            size, module = self.tensors[shard].size_bytes, parameter.names[0]
            mean = reduction(ALL_REDUCE, across, (shard, size), phase=Phase.BACKWARD, module=module)
            after.setdefault(final[self.tensors[shard].storage], []).append(mean)
        self._insert(after)

    def _scatter(self, parameter: Parameter, micro: int) -> Op:
        """Reduce a unit's gradients over ranks; this rank's shard is then its gradient."""
        gradient, across, name = self.gradients[parameter.tensor], self.layout.across(*SHARDED), parameter.names[0]
        flat, ranks = self.tensors[gradient], self.layout.shards
        shard = f"{name} gradients shard" + (f"#{micro}" if micro else "")
        shard_gradient = self._fresh(shard, flat.dtype, (flat.shape[0] // ranks,), Role.GRADIENT)
        shape = self.tensors[parameter.tensor].shape
        view = dataclasses.replace(self.tensors[shard_gradient], shape=shape, stride=row_major(shape))
        self.gradients[parameter.tensor] = shard_gradient if len(shape) == 1 else self._tensor(view)
        if parameter.gradient_terms > 1:
            across = (*across, ("mean_of", ranks // parameter.gradient_terms))
        return reduction(
            REDUCE_SCATTER, across, (gradient, flat.size_bytes), shard_gradient, phase=Phase.BACKWARD, module=name
        )

    def _insert(self, after: Mapping[int, Sequence[Op]]) -> None:
        """Insert operations behind others, by the positions of those."""
        self.ops = [new for index, op in enumerate(self.ops) for new in (op, *after.get(index, ()))]

    def _tensor_map(self, micro: int) -> dict[int, int]:
        """Map tensor ids to those of one micro-batch; persistent storages are shared, the others copied."""
        if micro == 0:
            return {t: t for t in range(len(self.graph.tensors))}
        renumbered: dict[int, int] = {}
        names: dict[int, int] = {}
        for old, tensor in enumerate(self.graph.tensors):
            storage = self.graph.storages[tensor.storage]
            if storage.role in PERSISTENT:
                names[old] = old
                continue
            if tensor.storage not in renumbered:
                renumbered[tensor.storage] = self._storage(f"{storage.name}#{micro}", storage.size_bytes, storage.role)
            names[old] = self._tensor(dataclasses.replace(tensor, storage=renumbered[tensor.storage]))
        return names

    def _storage(self, name: str, size_bytes: int, role: Role) -> int:
        self.storages.append(Storage(name, size_bytes, role))
        return len(self.storages) - 1

    def _tensor(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _scalar(self, name: str, role: Role, dtype: str = "float32") -> int:
        return self._fresh(name, dtype, (), role)

    def _accumulate(self, parameter: Parameter, fresh: int) -> Op:
        """Add a micro-batch's gradient to the sum: ``grad += fresh``."""
        total = self.gradients[parameter.tensor]
        args: tuple[Arg, ...] = (Ref(total), Ref(fresh))
        op = self._op("aten.add_.Tensor", args, parameter, (total, fresh), mutates=(total,))
        return dataclasses.replace(op, phase=Phase.BACKWARD)

    def _widen(self, parameter: Parameter) -> Op | None:
        """Copy the first micro-batch's gradient to float32, to which the others are added, where there is a master."""
        if not self.has_master(parameter):
            return None
        total, op = self._in_float32(parameter, f"{parameter.names[0]}.main_grad", Role.GRADIENT)
        self.gradients[parameter.tensor] = total
        return dataclasses.replace(op, phase=Phase.BACKWARD)

    def _in_float32(self, parameter: Parameter, name: str, role: Role) -> tuple[int, Op]:
        """Make a float32 tensor laid out as the parameter's gradient, and the operation that fills it."""
        source = self.gradients[parameter.tensor]
        old = self.tensors[source]
        size = prod(old.shape) * DTYPE_BYTES["float32"]
        stride = old.stride if old.is_dense else row_major(old.shape)
        converted = self._tensor(Tensor(self._storage(name, size, role), "float32", old.shape, stride))
        op = self._op("aten._to_copy.default", (Ref(source),), parameter, (source,), mutates=())
        kwargs = (("dtype", Literal("dtype", "float32")),)
        op = dataclasses.replace(op, kwargs=kwargs, outputs=(converted,), results=(converted,), bytes_written=size)
        return converted, dataclasses.replace(op, kind=OpKind.COPY)

    def add_norm_of_others(self, dtype: str) -> None:
        """Add what a rank does that has nothing to clip: nothing of its own, in the sum of all ranks' squares."""
        clip = Parameter(("clip.grad_norm",), -1, None)
        total = self._scalar("clip.nothing", Role.WORKSPACE, dtype)
        kwargs = (("dtype", Literal("dtype", dtype)),)
        self.ops.append(dataclasses.replace(self._making("aten.zeros.default", ((),), clip, (), total), kwargs=kwargs))
        self.ops.append(self._sum_over_ranks(total, dtype))
        self.gradient_norm = self._scalar("clip.sqrt", Role.WORKSPACE, dtype)
        self.ops.append(self._making("aten.sqrt.default", (Ref(total),), clip, (total,), self.gradient_norm))

    def _sum_over_ranks(self, total: int, dtype: str) -> Op:
        """Make the sum of squares over all ranks with gradients of their own."""
        return reduction(
            ALL_REDUCE_SUM, self._clipping_ranks(), (total, DTYPE_BYTES[dtype]), phase=Phase.OPTIMIZER, module="clip"
        )

    def _clipping_ranks(self) -> tuple[tuple[str, int | str], ...]:
        """Name the ranks that add up the squares of gradients of their own: stages, and shards."""
        return self.layout.across("pp", *(SHARDED if self.layout.zero else ()))

    def add_clipping(self, trained: Sequence[Parameter], clip_norm: float, dtype: str) -> int:
        """Add the operations of clip_grad_norm_ up to the coefficient; returns its tensor.

        Each gradient's norm is taken as soon as the gradient is final, while it is still at hand.

        Args:
            dtype: Dtype of the gradients' norms.
        """
        norms: list[int] = []
        final = {self.tensors[t].storage: i for i, op in enumerate(self.ops) for t in (*op.outputs, *op.mutates)}
        after: dict[int, list[Op]] = {}
        for parameter in trained:
            gradient = self.gradients[parameter.tensor]
            ops = after.setdefault(final[self.tensors[gradient].storage], [])
            if self._widens_inside(parameter):
                gradient, op = self._in_float32(parameter, f"{parameter.names[0]}.grad_float32", Role.WORKSPACE)
                ops.append(op)
            norms.append(self._scalar(f"{parameter.names[0]}.grad_norm", Role.WORKSPACE, dtype))
            args: tuple[Arg, ...] = (Ref(gradient), 2.0)
            ops.append(self._making("aten.linalg_vector_norm.default", args, parameter, (gradient,), norms[-1]))
        self._insert(after)
        clip = Parameter(("clip.grad_norm",), -1, None)
        placed = [p.placement is not None and not (self.layout.zero and p.is_on_one_rank) for p in trained]
        if any(placed):  # of what each rank has in whole, each would count all
            shards = [norm for norm, is_shard in zip(norms, placed, strict=True) if is_shard]
            norms = [norm for norm, is_shard in zip(norms, placed, strict=True) if not is_shard]
            over = next(p.placement.over for p in trained if p.placement is not None)
            norms.append(self._norm_over(shards, self.layout.across(*over.split("/")), dtype, clip))
        stacked = self._storage("clip.norms", DTYPE_BYTES[dtype] * len(norms), Role.WORKSPACE)
        last = self._tensor(Tensor(stacked, dtype, (len(norms),), (1,)))
        args = (tuple(Ref(n) for n in norms),)
        self.ops.append(self._making("aten.stack.default", args, clip, tuple(norms), last))
        over_ranks = (("aten.square.default", ()), (ALL_REDUCE_SUM, ()), ("aten.sqrt.default", ()))
        chain: tuple[tuple[str, tuple[Arg, ...]], ...] = (
            ("aten.linalg_vector_norm.default", (2.0,)),
            *(over_ranks if dict(self._clipping_ranks())["over"] else ()),
            ("aten.add.Tensor", (CLIP_EPSILON,)),
            ("aten.reciprocal.default", ()),
            ("aten.mul.Tensor", (clip_norm,)),
            ("aten.clamp.default", (None, 1.0)),
        )
        for name, extra_args in chain:
            if name == "aten.add.Tensor":
                self.gradient_norm = last
            if name == ALL_REDUCE_SUM:
                self.ops.append(self._sum_over_ranks(last, dtype))
                continue
            out = self._scalar(f"clip.{name.split('.')[1]}", Role.WORKSPACE, dtype)
            self.ops.append(self._making(name, (Ref(last), *extra_args), clip, (last,), out))
            last = out
        return last

    def _norm_over(
        self, norms: Sequence[int], across: tuple[tuple[str, int | str], ...], dtype: str, clip: Parameter
    ) -> int:
        """Norm of what the ranks of a tensor-parallel group have shards of."""
        stacked = self._storage("clip.norms of shards", DTYPE_BYTES[dtype] * len(norms), Role.WORKSPACE)
        last = self._tensor(Tensor(stacked, dtype, (len(norms),), (1,)))
        self.ops.append(self._making("aten.stack.default", (tuple(map(Ref, norms)),), clip, tuple(norms), last))
        for name, extra_args in (("aten.linalg_vector_norm.default", (2.0,)), ("aten.square.default", ())):
            out = self._scalar(f"clip.{name.split('.')[1]} of shards", Role.WORKSPACE, dtype)
            self.ops.append(self._making(name, (Ref(last), *extra_args), clip, (last,), out))
            last = out
        size = DTYPE_BYTES[dtype]
        self.ops.append(reduction(ALL_REDUCE_SUM, across, (last, size), phase=Phase.OPTIMIZER, module="clip"))
        out = self._scalar("clip.norm of shards", Role.WORKSPACE, dtype)
        self.ops.append(self._making("aten.sqrt.default", (Ref(last),), clip, (last,), out))
        return out

    def _widens_inside(self, parameter: Parameter) -> bool:
        """Whether the update itself takes a gradient of less than 32 bits to its master."""
        return self.has_master(parameter) and self.tensors[self.gradients[parameter.tensor]].dtype != "float32"

    def add_updates(self, trained: Sequence[Parameter], coefficient: int | None, part_elements: int) -> None:
        """Insert the updates of each parameter after its last reader and its final gradient."""
        last: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            for t in (*op.inputs, *op.outputs, *op.mutates):
                last[self.tensors[t].storage] = index
        after: dict[int, list[Op]] = {}
        end = len(self.ops) - 1
        for parameter in trained:
            gradient = self.gradients[parameter.tensor]
            ready = max(last.get(self.tensors[t].storage, -1) for t in (parameter.tensor, gradient))
            ops = after.setdefault(end if coefficient is not None else ready, [])
            inside = self._widens_inside(parameter)
            if coefficient is not None and not inside:
                args: tuple[Arg, ...] = (Ref(gradient), Ref(coefficient))
                ops.append(self._op("aten.mul_.Tensor", args, parameter, (gradient, coefficient), mutates=(gradient,)))
            ops.extend(self._updates(parameter, coefficient if inside else None, part_elements))
        self.ops = [new for index, op in enumerate(self.ops) for new in (op, *after.get(index, ()))]

    def _updates(self, parameter: Parameter, coefficient: int | None, part_elements: int) -> list[Op]:
        """Make one update, or one for each part of the states. See [Note: states in parts]."""
        if self.matrices is not None and parameter.tensor in self.parts:
            return self._matrix_updates(parameter, self.matrices, coefficient, part_elements)
        name, value = parameter.names[0], self.tensors[parameter.tensor]
        gradient = self.tensors[self.gradients[parameter.tensor]]
        rule = self.optimizer.of_size(self.sizes.get(name, prod(value.shape)))
        if not rule.moves(dtype := self._moved_dtype(parameter)):
            change = "give an optimizer of torch" if dtype in _REAL else "leave the optimizer's states= out"
            raise ConfigError(
                f"{name}: expected weights that {name_of(rule)} moves with these settings, got {dtype}; convert the "
                f"model, or {change}"
            )
        count = 1 if rule.whole else -(-prod(value.shape) // max(part_elements, _UNIT))
        if count <= 1 or not (value.is_row_major and gradient.is_row_major):
            pairs = [(parameter.tensor, self.gradients[parameter.tensor])]
        else:
            cuts = zip(_cut(value, count), _cut(gradient, count), strict=True)
            pairs = [(self._tensor(v), self._tensor(g)) for v, g in cuts]
        step = self._scalar(f"{name}.step", Role.OPTIMIZER_STATE) if rule.counts else None
        specs = rule.state_specs(value.shape)
        suffixes = (*specs, *(("master",) if self.has_master(parameter) else ()))
        parts = {suffix: [self._rule_state(rule, parameter, suffix, pair[0]) for pair in pairs] for suffix in suffixes}
        for suffix, tensors in parts.items():
            shape = specs[suffix].shape if suffix in specs else value.shape
            if not shape and len(tensors) > 1:  # a number, of which each part has its own
                shape = (len(tensors),)
            self.states.append(State(f"{name}.{suffix}", self.tensors[tensors[0]].dtype, shape, tuple(tensors)))
        if step is not None:
            self.states.append(State(f"{name}.step", "float32", (), (step,)))
        return [
            self._update(
                rule, parameter,
                Tensors(
                    param=pair[0], grad=pair[1], states=tuple(parts[suffix][i] for suffix in specs), step=step,
                    first=i == 0, master=parts["master"][i] if "master" in parts else None, coefficient=coefficient,
                ),
            )
            for i, pair in enumerate(pairs)
        ]  # fmt: skip

    def _rule_state(self, rule: ParameterRule, parameter: Parameter, suffix: str, like: int) -> int:
        """Make a state of the rule, or the master, for a part of a parameter."""
        shape = self.tensors[like].shape
        state = rule.state_specs(shape).get(suffix)
        dtype = (state and state.dtype) or self._moved_dtype(parameter)
        if state is None or state.shape == shape:
            return self._state(parameter, suffix, like, dtype)
        offset = self.tensors[like].offset
        name = f"{parameter.names[0]}.{suffix}" + (f"[{offset}]" if like != parameter.tensor else "")
        return self._fresh(name, dtype, state.shape, Role.OPTIMIZER_STATE)

    def _moved_dtype(self, parameter: Parameter) -> str:
        """Dtype of the weights that an update moves: of the parameter, or of its master."""
        return "float32" if self.has_master(parameter) else self.tensors[parameter.tensor].dtype

    def _matrix_updates(
        self, parameter: Parameter, matrices: Matrices, coefficient: int | None, part_elements: int
    ) -> list[Op]:
        """Make one update for each matrix, or for each few of a stack."""
        value, gradient = self.tensors[parameter.tensor], self.tensors[self.gradients[parameter.tensor]]
        name, rule = parameter.names[0], matrices.made()
        if not value.is_row_major:
            raise ConfigError(
                f"{name}: expected a parameter that lies in memory row by row for {matrices.rule}, got strides "
                f"{value.stride} of shape {value.shape}; make it contiguous, or set it to 'rest' in matrices.parameters"
            )
        step = self._scalar(f"{name}.step", Role.OPTIMIZER_STATE) if rule.counts else None
        interleaved = len(value.shape) == 3 and len(self.parts[parameter.tensor]) > 1
        master = None
        if interleaved and self.has_master(parameter):
            master = self._state(parameter, "master", parameter.tensor, "float32")
        masters = [] if master is None else [master]
        ops: list[Op] = []
        for member in members(name, value, gradient, self.parts[parameter.tensor]):
            pieces = list(member.stacked(part_elements))
            states = [self._matrix_states(parameter, matrices, piece, start) for start, piece in pieces]
            for (_, piece), names in zip(pieces, states, strict=True):
                param, grad = self._tensor(piece.value), self._tensor(piece.gradient)
                master_piece = self._master_of(parameter, param, master)
                masters += [master_piece] if master_piece is not None and master is None else []
                tensors = Tensors(
                    param=param, grad=grad, states=tuple(names.values()), step=step, first=not ops, master=master_piece,
                    coefficient=coefficient, workspace=self._workspace(matrices, piece),
                )  # fmt: skip
                ops.append(self._sized(update_op(matrices, piece.shape, tensors, name.rpartition(".")[0])))
            for suffix, state in rule.state_specs(*member.shape[1:]).items():
                state_shape = state.shape if len(value.shape) == 2 else (member.shape[0], *state.shape)
                tensors_of = tuple(names[suffix] for names in states)
                self.states.append(
                    State(f"{member.label}.{suffix}", self.tensors[tensors_of[0]].dtype, state_shape, tensors_of)
                )
        if masters:
            self.states.append(State(f"{name}.master", "float32", value.shape, tuple(masters)))
        if step is not None:
            self.states.append(State(f"{name}.step", "float32", (), (step,)))
        return ops

    def _matrix_states(
        self, parameter: Parameter, matrices: Matrices, piece: MatrixStack, start: int
    ) -> dict[str, int]:
        """Make the states of the matrices of one update, by suffix; later runs of a stack are numbered."""
        count, rows, columns = piece.shape
        stack = (count,) if len(piece.value.shape) == 3 else ()
        states: dict[str, int] = {}
        for suffix, state in matrices.made().state_specs(rows, columns).items():
            name = f"{piece.label}.{suffix}" + (f"[{start}]" if start else "")
            dtype = state.dtype or self._moved_dtype(parameter)
            states[suffix] = self._fresh(name, dtype, (*stack, *state.shape), Role.OPTIMIZER_STATE)
        return states

    def _master_of(self, parameter: Parameter, param: int, whole: int | None) -> int | None:
        """Make the master of the matrices of one update: a storage of its own, or a view of ``whole``."""
        if not self.has_master(parameter):
            return None
        value = self.tensors[param]
        if whole is not None:
            return self._tensor(dataclasses.replace(value, storage=self.tensors[whole].storage, dtype="float32"))
        name = f"{parameter.names[0]}.master" + (f"[{value.offset}]" if value.offset else "")
        return self._fresh(name, "float32", value.shape, Role.OPTIMIZER_STATE)

    def _workspace(self, matrices: Matrices, piece: MatrixStack) -> int | None:
        """Make the tensor that the rule works in, if that has a place in the arena."""
        rule = matrices.made()
        elements = rule.workspace_elements(*piece.shape[1:])
        if not elements:
            return None
        return self._fresh(f"{piece.label}.workspace", rule.product_dtype, (elements,), Role.WORKSPACE)

    def _fresh(self, name: str, dtype: str, shape: tuple[int, ...], role: Role) -> int:
        """Make a row-major tensor with a storage of its own."""
        storage = self._storage(name, prod(shape) * DTYPE_BYTES[dtype], role)
        return self._tensor(Tensor(storage, dtype, shape, row_major(shape)))

    def _sized(self, op: Op) -> Op:
        """Count the bytes of an operation's tensors."""
        read = sum(self.tensors[t].touched_bytes for t in op.inputs)
        return dataclasses.replace(
            op, bytes_read=read, bytes_written=sum(self.tensors[t].touched_bytes for t in op.mutates)
        )

    def _state(self, parameter: Parameter, suffix: str, like: int, dtype: str) -> int:
        """Make a state that lies as one part of the parameter does."""
        part = self.tensors[like]
        is_whole = like == parameter.tensor
        extent = self.storages[part.storage].size_bytes // DTYPE_BYTES[part.dtype] if is_whole else prod(part.shape)
        name = f"{parameter.names[0]}.{suffix}" + ("" if is_whole else f"[{part.offset}]")
        storage = self._storage(name, extent * DTYPE_BYTES[dtype], Role.OPTIMIZER_STATE)
        return self._tensor(
            dataclasses.replace(part, storage=storage, dtype=dtype, offset=part.offset if is_whole else 0)
        )

    def _update(self, rule: ParameterRule, parameter: Parameter, tensors: Tensors) -> Op:
        """Make the update of a parameter, or of a part of one."""
        counting = () if tensors.step is None else (tensors.step,)
        args = (tensors.param, tensors.grad, *tensors.states, *counting)
        named = {"master": tensors.master, "coefficient": tensors.coefficient}
        extra = {name: tensor for name, tensor in named.items() if tensor is not None}
        masters = () if tensors.master is None else (tensors.master,)
        mutates = (tensors.param, *tensors.states, *masters, *(counting if tensors.first else ()))
        op = self._op(
            PREFIX + name_of(rule), tuple(map(Ref, args)), parameter, (*args, *extra.values()), mutates=mutates
        )
        later: tuple[tuple[str, Arg], ...] = (("first", False),) if counting and not tensors.first else ()
        usual = {field.name: field.default for field in dataclasses.fields(rule)}
        settings: Arg = tuple((key, now) for key in rule.planned if (now := getattr(rule, key)) != usual[key])
        planned: tuple[tuple[str, Arg], ...] = (("settings", settings),) if settings else ()
        kwargs = (*((name, Ref(tensor)) for name, tensor in extra.items()), *later, *planned)
        extra_bytes = int(rule.passes * self.tensors[tensors.param].touched_bytes)
        return dataclasses.replace(op, kwargs=kwargs, kind=OpKind.STEP, bytes_read=op.bytes_read + extra_bytes)

    def _making(
        self, name: str, args: tuple[Arg, ...], parameter: Parameter, inputs: tuple[int, ...], output: int
    ) -> Op:
        """Make an operation of the clipping that creates a tensor."""
        op = self._op(name, args, parameter, inputs, mutates=())
        written = self.tensors[output].touched_bytes
        kind = OpKind.REDUCTION if "norm" in name else OpKind.ELEMENTWISE
        return dataclasses.replace(op, outputs=(output,), results=(output,), bytes_written=written, kind=kind)

    def _op(
        self,
        name: str,
        args: tuple[Arg, ...],
        parameter: Parameter,
        inputs: tuple[int, ...],
        *,
        mutates: tuple[int, ...],
    ) -> Op:
        """Make an optimizer-phase operation of a parameter's module."""
        return Op(
            name=name,
            phase=Phase.OPTIMIZER,
            args=args,
            kwargs=(),
            inputs=inputs,
            outputs=(),
            results=(None,) if mutates else (),
            mutates=mutates,
            module=parameter.names[0].rpartition(".")[0],
            kind=OpKind.ELEMENTWISE,
            bytes_read=sum(self.tensors[t].touched_bytes for t in inputs),
            bytes_written=sum(self.tensors[t].touched_bytes for t in mutates),
        )

    def finish(self) -> StepGraph:
        """Check and return the expanded graph. Only forward blocks stay runs of consecutive operations."""
        blocks = tuple(
            RepeatedBlock(b.module, b.phase, b.num_ops, tuple(s + start for start in self.starts for s in b.starts))
            for b in self.graph.blocks
            if b.phase is Phase.FORWARD
        )
        parameters = tuple(dataclasses.replace(p, gradient=self.gradients.get(p.tensor)) for p in self.graph.parameters)
        graph = dataclasses.replace(
            self.graph,
            storages=tuple(self.storages),
            tensors=tuple(self.tensors),
            ops=tuple(self.ops),
            parameters=parameters,
            inputs=tuple(self.inputs),
            losses=tuple(self.losses),
            gradient_norm=self.gradient_norm,
            blocks=blocks,
            states=tuple(self.states),
        )
        graph.validate()
        return graph


def _has_master(graph: StepGraph, parameter: Parameter, master_weights: bool) -> bool:
    return master_weights and graph.tensors[parameter.tensor].dtype in _LOW


def _clipped_dtype(graph: StepGraph, master_weights: bool) -> str:
    """Find the one dtype of the norms of all gradients that are clipped; of complex ones that is the real part's.

    Raises:
        ConfigError: there are several.
    """
    moved = {
        p.names[0]: "float32" if _has_master(graph, p, master_weights) else graph.tensors[p.gradient].dtype
        for p in graph.parameters
        if p.gradient is not None
    }
    dtypes = {_REAL.get(dtype, dtype): name for name, dtype in moved.items()}
    if len(dtypes) > 1:
        raise ConfigError(
            f"expected gradients of one dtype to clip, got {', '.join(f'{d} ({n})' for d, n in dtypes.items())}; "
            "use master_weights=True, one dtype for all parameters, or clip_norm=0"
        )
    return next(iter(dtypes))


def _cut(tensor: Tensor, count: int) -> list[Tensor]:
    """Cut a row-major tensor into ``count`` flat views of about the same size, at whole units.

    At whole rows, too, where that changes sizes by little: pieces of a gradient are rows (``ir.gradient_pieces``).
    """
    elements = prod(tensor.shape)
    rows = lcm(_UNIT, tensor.shape[-1])
    unit = rows if rows <= _ROWS_SHARE * elements / count else _UNIT
    step = -(-elements // (count * unit)) * unit
    starts = range(0, elements, step)
    return [
        dataclasses.replace(tensor, shape=(min(step, elements - at),), stride=(1,), offset=tensor.offset + at)
        for at in starts
    ]
