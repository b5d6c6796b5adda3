"""Cut: a segment as one rank of a layout runs it, still without numbers: which collectives stand where.

Each activation is whole, cut along an atom (heads, columns, vocabulary), or, with sequence parallel, cut along its
tokens. An operation on cut atoms needs the tokens of its other inputs whole: they are gathered. A result in which a
cut atom is summed away is a partial sum: it is reduced, or scattered to tokens, where the first operation needs it that
is not linear. Backward goes by the same rules, as gradients have the atoms of what they are gradients of.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import cast

from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES, Op, OpKind, Phase, Role
from lading.ir.opkinds import base_name
from lading.ir.sizes import Size
from lading.ir.table import Segment, SegmentTensor
from lading.ir.work import Stage
from lading.parallel.atoms import Lineage, setting
from lading.parallel.choose import CONTEXT, EXPERT, EXPERT_TENSOR, TENSOR, Axes, CutAxes, choose, is_token
from lading.parallel.contractions import PRODUCTS, product_operands
from lading.parallel.lineage import lineage
from lading.parallel.shapes import Lengths
from lading.parallel.specs import CutKernel, CutParameter, Cuts, CutSegment, Origin, Spec, staged

#: A partial sum may pass through these: the sum of results is the result of sums.
_LINEAR = frozenset(["add", "sub", "neg", "clone", "cat", "mul", "div"])
_FREE = frozenset({Role.PARAMETER, Role.BUFFER, Role.INPUT, Role.CONSTANT})


class _Itself:
    """A segment by identity: comparing two takes longer than cutting needs to be fast."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    def __hash__(self) -> int:
        return id(self.segment)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.segment is self.segment


def cut(segment: Segment, axes: Axes, *, wide: bool = False) -> CutSegment:
    """Cut a segment over the axes that have more than one rank; done once for each segment and axes.

    Args:
        wide: As it runs in fp32, where it was captured in 16 bits.
    Raises:
        ConfigError: an operation cannot be cut this way; names it.
    """
    return _cut(_Itself(segment), axes, wide)


@lru_cache(maxsize=4096)
def _cut(itself: _Itself, axes: Axes, wide: bool) -> CutSegment:
    return _Cutter(widened(itself.segment) if wide else itself.segment, axes).run()


@dataclass(slots=True)
class _PresentCopy:
    """Place of a storage's value: ``tag`` of its present copy, how it is cut, and over which axis it is a partial sum.

    ``slot`` is the operation that made it; what is ``free`` every rank can make whole or in part by itself.
    """

    tag: str = ""
    scattered: bool = False
    away: bool = False
    partial: str = ""
    slot: int = -1
    tensor: int = -1
    free: bool = False


@dataclass
class _Cutter:
    segment: Segment
    axes: Axes
    lineage: Lineage = field(init=False)
    choice: CutAxes = field(init=False)
    lengths: Lengths = field(init=False)
    tensors: list[SegmentTensor[int]] = field(default_factory=lambda: [])
    origins: list[Origin] = field(default_factory=list[Origin])
    slots: list[list[CutKernel]] = field(default_factory=lambda: [])
    states: dict[int, _PresentCopy] = field(default_factory=lambda: {})
    summed: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        self.lineage = lineage(self.segment)
        self.choice = choose(self.lineage, self.axes)
        if self.choice.experts and self.axes.tp and not (self.axes.etp or self.axes.sp):
            raise ConfigError(
                f"segment {self.segment.name!r}: experts that are not cut (etp1) need tp ranks of different tokens; "
                "expected sp, or etp as tp, got neither"
            )
        self.lengths = Lengths(self.lineage, self.choice, self.axes.cp)
        self._local: dict[tuple[int, str, bool], int] = {}
        self._storages: dict[tuple[int, str], int] = {}
        self._copies: dict[tuple[int, str, bool], str] = {}
        self._to_inputs = leading_to(self.segment)
        self._gradients = {self.segment.tensors[g].storage for _, g in self.segment.gradients if g is not None}
        self._makers = makers(self.segment)

    def run(self) -> CutSegment:
        segment, sp = self.segment, self.axes.sp
        self._check_known()
        for tensor in (*segment.enters, *segment.enters_back):
            self._state(tensor).scattered = sp and self._has_tokens(tensor)
        for tensor in self._without_gradient():
            self.states[segment.tensors[tensor].storage] = _PresentCopy(free=True)
        for index, op in enumerate(segment.ops):
            self.slots.append([])
            if op.kind is not OpKind.VIEW:
                self._run(index, op)
        self.slots.append([])
        leaves = tuple(self._border(tensor) for tensor in (*segment.leaves, *segment.leaves_back))
        enters = tuple(self.local(tensor) for tensor in segment.enters)
        parameters, saved = self._parameters(), self._saved()  # they may name tensors that no kernel does
        return CutSegment(
            name=segment.name,
            lengths=tuple(self.lengths.lengths),
            tensors=tuple(self.tensors),
            kernels=staged([kernel for slot in self.slots for kernel in slot], self.tensors),
            enters=enters,
            leaves=leaves[: len(segment.leaves)],
            saved=saved,
            parameters=parameters,
            leaves_back=leaves[len(segment.leaves) :],
            cuts=self._cuts(),
        )

    def _cuts(self) -> Cuts:
        roles = {tensor.storage for tensor in self.segment.tensors if tensor.role in _FREE}
        free = frozenset(roles | {storage for storage, state in self.states.items() if state.free})
        copies = {storage: (state.tag, state.scattered) for storage, state in self.states.items()}
        return Cuts(self.segment, self.lengths, self.choice.axis, tuple(self.origins), free, copies)

    def _check_known(self) -> None:
        for op in self.segment.ops if self.axes.cp else ():
            tensors = (*op.inputs, *op.outputs)
            if op.kind is OpKind.MATMUL and any(len(self._token_dims(t)) > 1 for t in tensors):
                raise ConfigError(
                    f"segment {self.segment.name!r}: context parallel needs fused attention, got {op.name} on scores "
                    "of all pairs of tokens; use a table with fused attention, or cp1"
                )
        for op in self.lineage.unknown if self.axes.cp or self.axes.sp else ():
            if any(self._has_tokens(t) for t in (*op.inputs, *op.outputs)):
                raise ConfigError(
                    f"segment {self.segment.name!r}: expected operations that are known to cut along tokens, got "
                    f"{op.name} in {op.module!r}; use a layout without cp and sp"
                )

    def _border(self, tensor: int) -> int:
        """Cut a tensor that leaves: with sequence parallel its tokens are cut, and it is no partial sum; masks stay
        whole.
        """
        scattered = self.axes.sp and not self._state(tensor).free
        return self.want(tensor, len(self.segment.ops), scattered=scattered)

    def _without_gradient(self) -> list[int]:
        """Tensors that enter and are not differentiated, such as masks and tables of positions: every rank has them
        whole.
        """
        leaves = list(self.segment.leaves_back)
        tensors: list[int] = []
        for tensor in self.segment.enters:
            if leaves and self.lineage.leaves(leaves[0]) == self.lineage.leaves(tensor):
                leaves.pop(0)
            elif self.segment.leaves_back:
                tensors.append(tensor)
        return tensors

    # What is known of a tensor.

    def _cut_axes(self, tensor: int) -> set[str]:
        axes = {self.choice.axis.get(leaf, "") for leaf in self._atoms_of(tensor)} - {""}
        return axes

    def _atoms_of(self, tensor: int) -> set[int]:
        """Find the atoms of a tensor, those within parts too."""
        atoms: set[int] = set()
        todo = list(self.lineage.leaves(tensor))
        while todo:
            leaf = todo.pop()
            atoms.add(leaf)
            for part in self.lineage.atoms.parts(leaf):
                todo.extend(self.lineage.atoms.leaves(part))
        return atoms

    def _token_dims(self, tensor: int) -> list[int]:
        dims = enumerate(self.lineage.dims[tensor])
        return [p for p, dim in dims if any(is_token(self.lineage, leaf) for leaf in self.lineage.atoms.leaves(dim))]

    def _has_tokens(self, tensor: int) -> bool:
        return any(is_token(self.lineage, leaf) for leaf in self._atoms_of(tensor))

    def _state(self, tensor: int) -> _PresentCopy:
        return self.states.setdefault(self.segment.tensors[tensor].storage, _PresentCopy())

    def _is_free(self, tensor: int) -> bool:
        return self.segment.tensors[tensor].role in _FREE or self._state(tensor).free

    def _ranks_cut(self, tensor: int) -> bool:
        """Cut over the ranks that would cut its tokens."""
        return bool(self._cut_axes(tensor) & {TENSOR, EXPERT_TENSOR})

    # Local tensors.

    def local(self, tensor: int) -> int:
        """The present copy of a tensor."""
        state = self._state(tensor)
        return self._place(tensor, state.tag, state.scattered and self._has_tokens(tensor))

    def _place(self, tensor: int, tag: str, scattered: bool) -> int:
        key = (tensor, tag, scattered)
        if key not in self._local:
            mine = self.segment.tensors[tensor]
            persistent = mine.role is Role.PARAMETER and self._makers.get(mine.storage, tensor) == tensor
            dims = self.lengths.of(tensor, scattered=scattered, persistent=persistent)
            storage = self._storages.setdefault((mine.storage, tag), len(self._storages))
            repeats = mine.repeats
            self._local[key] = len(self.tensors)
            self.tensors.append(SegmentTensor(storage, mine.dtype, dims, mine.role, mine.name, repeats))
            self.origins.append(Origin(tensor, tag, scattered))
        return self._local[key]

    def _new(self, dtype: str, dims: tuple[int, ...], role: Role) -> int:
        """A local tensor that the segment does not have: statistics that ranks exchange."""
        key = (-1 - len(self.tensors), "")
        self.tensors.append(
            SegmentTensor(self._storages.setdefault(key, len(self._storages)), dtype, dims, role, "", ())
        )
        self.origins.append(Origin(-1, "", False))
        return len(self.tensors) - 1

    # Collectives.

    def want(self, tensor: int, slot: int, *, scattered: bool, stage: Stage = Stage.FORWARD) -> int:
        """The copy of a tensor that an operation needs, after a collective if it is not there yet.

        Args:
            slot: The operation that needs it.
            scattered: Tokens cut, or whole.
        """
        self._settle(tensor)
        state = self._state(tensor)
        if not self._has_tokens(tensor) or (self._ranks_cut(tensor) and not state.scattered):
            return self.local(tensor)
        if self._is_free(tensor):
            return self._place(tensor, state.tag, scattered)
        if state.scattered and not scattered:
            return self._gathered(tensor, slot, stage)
        return self._place(tensor, state.tag, scattered)

    def _whole_view(self, tensor: int) -> int:
        """The tensor that made the storage, if this is a view of all of it; otherwise the tensor itself."""
        maker = self._makers.get(self.segment.tensors[tensor].storage, tensor)
        is_whole = self.segment.tensors[maker].elements == self.segment.tensors[tensor].elements
        return maker if is_whole else tensor

    def _gathered(self, tensor: int, slot: int, stage: Stage) -> int:
        state, view = self._state(tensor), self._whole_view(tensor)
        is_regathered = stage is not Stage.FORWARD and self.axes.regather
        key = (view, state.tag, is_regathered)
        if key not in self._copies:
            tag = f"{state.tag}gathered{view}{'again' if is_regathered else ''}"
            self._copies[key] = tag
            axis = EXPERT_TENSOR if state.away else TENSOR
            source, gathered = self._place(view, state.tag, True), self._place(view, tag, False)
            self._collect(slot, "all_gather", axis, source, gathered, gathered, stage)
        return self._place(tensor, self._copies[key], False)

    def _collect(
        self, slot: int, op: str, axis: str, source: int, made: int, size: int, stage: Stage, statistic: str = ""
    ) -> None:
        """``size`` is the tensor whose bytes the collective has."""
        module = self.segment.ops[min(slot, len(self.segment.ops) - 1)].module
        spec = Spec("collective", (size,), op=op, axis=axis)
        self.slots[slot].append(
            CutKernel(
                op, None, stage, module, self.tensors[size].dtype, (source,), (made,), (), spec, statistic=statistic
            )
        )

    def _settle(self, tensor: int) -> None:
        """Reduce a partial sum, right behind the operation that made it."""
        state = self._state(tensor)
        if not state.partial:
            return
        axis, maker = state.partial, state.tensor
        source = self._place(maker, state.tag, False)
        state.partial, state.tag = "", f"{state.tag}reduced"
        state.scattered = self.axes.sp and self._has_tokens(maker)
        reduced = self._place(maker, state.tag, state.scattered)
        op = "reduce_scatter" if state.scattered else "all_reduce"
        stage = self._stage(state.slot, self.segment.ops[state.slot])
        self._collect(state.slot, op, axis, source, reduced, source, stage)

    def _stage(self, slot: int, op: Op) -> Stage:
        if op.phase is not Phase.BACKWARD:
            return Stage.FORWARD
        return Stage.BACKWARD_INPUT if slot in self._to_inputs else Stage.BACKWARD_WEIGHT

    # Operations.

    def _run(self, slot: int, op: Op) -> None:
        stage = self._stage(slot, op)
        if self._stays_partial(slot, op):
            return
        for tensor in op.inputs:
            self._settle(tensor)
        away = self._travel(slot, op, stage)
        tensors = (*op.inputs, *op.outputs, *op.mutates)
        cut_op = any(self._ranks_cut(tensor) for tensor in tensors)
        scattered = not cut_op and self._goes_scattered(op)
        inputs = tuple(self.want(t, slot, scattered=scattered, stage=stage) for t in op.inputs)
        for tensor in op.outputs:
            self._record_copy(tensor, slot, scattered, away)
            self._state(tensor).free = self._makes_free(op)
        if base_name(op.name) == "_log_softmax" and self._exchanges(op):
            self._exchange(slot, op, inputs[0], "max", "sum")
        if op.kind is OpKind.NORM and self._norms_cut(op):
            self._exchange(slot, op, inputs[0], "norm")
        self._emit(slot, op, stage, inputs)
        if base_name(op.name) == "nll_loss_forward" and cut_op:
            return self._exchange(slot, op, inputs[0], "target")
        if op.kind is not OpKind.NORM or not self._norms_cut(op):  # statistics were just summed
            for tensor in (*op.outputs, *op.mutates):
                self._mark(tensor, op, stage, scattered)
        return None

    def _norms_cut(self, op: Op) -> bool:
        """Whether a norm is over an atom that is cut: ranks exchange the sums of each token."""
        frame = self.lineage.dims[op.inputs[0]]
        places = cast("tuple[int, ...]", setting(op, "normalizes") or ())
        return any(a in self.choice.axis for place in places for a in self.lineage.atoms.leaves(frame[place]))

    def _makes_free(self, op: Op) -> bool:
        return all(self._is_free(t) and self.segment.tensors[t].role is not Role.PARAMETER for t in op.inputs)

    def _record_copy(self, tensor: int, slot: int, scattered: bool, away: bool) -> None:
        self.states[self.segment.tensors[tensor].storage] = _PresentCopy(
            scattered=scattered and self._has_tokens(tensor), away=away, slot=slot, tensor=tensor
        )

    def _mark(self, tensor: int, op: Op, stage: Stage, scattered: bool) -> None:
        """Whether a result is each rank's part of a sum."""
        if self._ranks_cut(tensor) or not self.segment.tensors[tensor].dtype.startswith(("float", "bfloat")):
            return
        if base_name(op.name).startswith("new_") or base_name(op.name) in ("histc", "bincount"):
            return
        storage, tokens = self.segment.tensors[tensor].storage, self._has_tokens(tensor)
        partial = TENSOR if scattered and not tokens else self._lost(op, tensor)
        inherited = any(self.segment.tensors[t].storage in self.summed for t in op.inputs)
        if not partial and not inherited:
            return
        if storage in self._gradients or (stage is Stage.BACKWARD_WEIGHT and not tokens):
            self.summed.add(storage)  # with the other gradients of parameters, at the end of the step
        elif partial:
            self._state(tensor).partial = partial

    def _lost(self, op: Op, tensor: int) -> str:
        """Axis whose cut atoms an input has and the result does not."""
        after = self._atoms_of(tensor)
        for source in op.inputs:
            for atom in self._atoms_of(source) - after:
                if self.choice.axis.get(atom, EXPERT) != EXPERT:
                    return self.choice.axis[atom]
        return ""

    def _goes_scattered(self, op: Op) -> bool:
        """Whether an operation on no cut atom works on cut tokens (with ``sp``), as no value it needs is whole."""
        if not self.axes.sp:
            return False
        tensors = [t for t in op.inputs if self._has_tokens(t)]
        if not tensors:
            return any(self._has_tokens(t) for t in op.outputs)
        if any(self._state(t).scattered for t in tensors if not self._is_free(t)):
            return True
        return all(self._is_free(t) for t in tensors)

    def _stays_partial(self, slot: int, op: Op) -> bool:
        """Run a linear operation on partial sums; only where all its inputs are."""
        base = base_name(op.name)
        states = [self._state(t) for t in op.inputs]
        if base not in _LINEAR or op.mutates or not states or not all(s.partial for s in states):
            return False
        if len({s.partial for s in states}) > 1 or (base in ("mul", "div") and len(states) > 1):
            return False
        inputs = tuple(self._place(t, self._state(t).tag, False) for t in op.inputs)
        for tensor in op.outputs:
            self._record_copy(tensor, slot, False, states[0].away)
            self._state(tensor).partial = states[0].partial
        self._emit(slot, op, self._stage(slot, op), inputs)
        return True

    def _exchanges(self, op: Op) -> bool:
        return bool({leaf for leaf in self.choice.words if leaf in self.choice.axis} & self._atoms_of(op.outputs[0]))

    def _exchange(self, slot: int, op: Op, source: int, *statistics: str) -> None:
        """Add all-reduces of one number a token (``CutKernel.statistic``)."""
        rows = tuple(
            place
            for place, dim in zip(self.tensors[source].dims, self.lineage.dims[op.inputs[0]], strict=True)
            if not any(leaf in self.choice.axis for leaf in self.lineage.atoms.leaves(dim))
        )
        for statistic in statistics:
            statistic_sum = self._new("float32", rows, Role.ACTIVATION)
            self._collect(
                slot, "all_reduce", TENSOR, source, statistic_sum, statistic_sum, self._stage(slot, op), statistic
            )

    def _travel(self, slot: int, op: Op, stage: Stage) -> bool:
        """Experts on other ranks: rows go there before a grouped product and come back before the tokens' order."""
        rows = self._rows(op)
        if not self.choice.experts or not self.axes.ep:
            return False
        grouped = base_name(op.name) == "_grouped_mm"
        stays = all(rows & self._atoms_of(t) for t in op.outputs) if rows else False
        away = grouped or (stays and not self._widens(op) and any(self._state(t).away for t in op.inputs))
        for tensor in op.inputs:
            state = self._state(tensor)
            if self._is_free(tensor) or not self._has_tokens(tensor) or state.away == away or not rows:
                continue
            if not rows & self._atoms_of(tensor):
                continue
            self._move(tensor, slot, away, stage)
        return away

    def _widens(self, op: Op) -> bool:
        """A cast of a gradient to a wider type: it comes back as its value went, before it was cast."""
        if base_name(op.name) != "_to_copy" or op.phase is not Phase.BACKWARD:
            return False
        before, after = (DTYPE_BYTES[self.segment.tensors[t].dtype] for t in (op.inputs[0], op.outputs[0]))
        return after > before

    def _rows(self, op: Op) -> set[int]:
        return self._routed & {atom for t in op.inputs for atom in self._atoms_of(t)}

    @cached_property
    def _routed(self) -> set[int]:
        """Atoms of the rows of grouped products."""
        atoms: set[int] = set()
        for op in self.segment.ops:
            if base_name(op.name) == "_grouped_mm" and op.phase is not Phase.BACKWARD:
                atoms.update(self.lineage.atoms.leaves(self.lineage.dims[op.inputs[0]][0]))
        return atoms

    def _move(self, tensor: int, slot: int, away: bool, stage: Stage) -> None:
        state, view = self._state(tensor), self._whole_view(tensor)
        scattered = state.scattered
        source = self._place(view, state.tag, scattered)
        state.tag, state.away = f"{state.tag}{'sent' if away else 'back'}", away
        exchanged = self._place(view, state.tag, scattered)
        self._collect(slot, "all_to_all", EXPERT, source, exchanged, source, stage)

    def _emit(self, slot: int, op: Op, stage: Stage, inputs: tuple[int, ...]) -> None:
        outputs = tuple(self.local(t) for t in op.outputs)
        mutates = tuple(self.local(t) for t in op.mutates)
        spec = self._spec(op, inputs, outputs)
        out_dtype = next((self.tensors[t].dtype for t in (*outputs, *mutates)), "float32")
        dtype = self.tensors[spec.tensors[0]].dtype if spec and spec.form != "collective" else out_dtype
        kernel = CutKernel(op.name, op.kind, stage, op.module, dtype, inputs, outputs, mutates, spec, op.settings, op)
        self.slots[slot].append(kernel)

    def _spec(self, op: Op, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Spec | None:
        base = base_name(op.name)
        if op.kind is OpKind.ATTENTION:
            first = 1 if "backward" in op.name else 0
            key = self.lineage.atoms.leaves(self.lineage.dims[op.inputs[first + 1]][2])
            crosses = self.axes.cp and any(is_token(self.lineage, leaf) for leaf in key)
            return Spec("attention", inputs[first : first + 3], axis=CONTEXT if crosses else "")
        if op.kind is not OpKind.MATMUL or base not in PRODUCTS:
            return None
        places = product_operands(op, [len(self.tensors[t].dims) for t in inputs])
        form = {"_grouped_mm": "grouped", "linear": "linear"}.get(base, "product")
        return Spec(form, (*(inputs[p] for p in places), outputs[0]))

    # What is left at the end.

    def _saved(self) -> tuple[int, ...]:
        """One local tensor of each storage that forward makes, or is given, and backward reads."""
        kernels = [kernel for slot in self.slots for kernel in slot]
        before = {self.tensors[self.local(t)].storage for t in self.segment.enters}
        for kernel in kernels:
            if kernel.stage is Stage.FORWARD:
                before.update(self.tensors[t].storage for t in (*kernel.inputs, *kernel.outputs, *kernel.mutates))
        by_storage: dict[int, int] = {}
        for kernel in kernels:
            for t in kernel.inputs if kernel.stage is not Stage.FORWARD else ():
                mine = self.tensors[t]
                if mine.storage in before and mine.role in (Role.ACTIVATION, Role.INPUT, Role.WORKSPACE):
                    by_storage.setdefault(mine.storage, t)
        return tuple(by_storage.values())

    def _parameters(self) -> tuple[CutParameter, ...]:
        """List each parameter once; heads that stand on more than one rank have gradients to be summed as well.

        A gradient whose tokens are cut, as that of learned positions is, is a part of a sum: zero but for its tokens.
        """
        parameters: list[CutParameter] = []
        for tensor, gradient in self.segment.gradients:
            leaves = self._atoms_of(tensor)
            summed = gradient is not None and (
                self.segment.tensors[gradient].storage in self.summed
                or (self._state(gradient).scattered and self._has_tokens(gradient))
            )
            is_expert = bool(leaves & self.choice.experts)
            parameters.append(CutParameter(self._place(tensor, "", False), is_expert, summed, gradient is not None))
        return tuple(parameters)


def makers(segment: Segment) -> dict[int, int]:
    """First tensor of each storage: an operation's result, or what the storage's first reader takes."""
    first_tensors: dict[int, int] = {}
    for op in segment.ops:
        for t in (*op.inputs, *op.outputs):
            first_tensors.setdefault(segment.tensors[t].storage, t)
    for t, tensor in enumerate(segment.tensors):
        first_tensors.setdefault(tensor.storage, t)
    return first_tensors


def leading_to(segment: Segment) -> frozenset[int]:
    """Operations of backward on whose results the gradients of what entered depend."""
    needed_tensors, leading = set(segment.leaves_back), set[int]()
    for index in range(len(segment.ops) - 1, -1, -1):
        op = segment.ops[index]
        if op.phase is Phase.BACKWARD and needed_tensors & {*op.outputs, *op.mutates}:
            needed_tensors.update(op.inputs)
            leading.add(index)
    return frozenset(leading)


_HALF = ("bfloat16", "float16")
_CAST = "aten._to_copy."


def widened(segment: Segment) -> Segment:
    """The segment in fp32.

    A cast between 16 and 32 bits is a view there, as PyTorch's ``to`` gives back what it is given; one of which either
    side is written in place stays a copy.
    """
    tensors = [replace(t, dtype="float32") if t.dtype in _HALF else t for t in segment.tensors]
    written = {tensors[t].storage for op in segment.ops for t in op.mutates}
    new_storages: dict[int, int] = {}
    ops: list[Op] = []
    for op in segment.ops:
        if not _is_idle(op, tensors):
            ops.append(op)
            continue
        source, result = (_final_storage(new_storages, tensors[t].storage) for t in (op.inputs[0], op.outputs[0]))
        if written & {source, result} or source == result:
            ops.append(op)
            continue
        new_storages[result] = source
        ops.append(replace(op, kind=OpKind.VIEW))
    roles = {t.storage: t.role for t in tensors}
    homes = [_final_storage(new_storages, t.storage) for t in tensors]
    wide_tensors = tuple(replace(t, storage=home, role=roles[home]) for t, home in zip(tensors, homes, strict=True))
    return replace(segment, tensors=wide_tensors, ops=tuple(ops))


def _is_idle(op: Op, tensors: list[SegmentTensor[Size]]) -> bool:
    """Whether a cast has nothing left to cast."""
    if not op.name.startswith(_CAST) or len(op.inputs) != 1 or len(op.outputs) != 1:
        return False
    return tensors[op.inputs[0]].dtype == tensors[op.outputs[0]].dtype


def _final_storage(moved: dict[int, int], storage: int) -> int:
    while storage in moved:
        storage = moved[storage]
    return storage
