"""Bytes on a rank of stock PyTorch in eager, at the moment of a step when they are most.

Where a stack keeps gradients in buffers of their own, the most is when activations are most (``lading.memory.ranks``).
Stock PyTorch makes gradients as backward goes and drops them after the update, so that a step has several hills: the
end of forward, the head's backward, the end of backward, a later micro-batch. A rank is walked through its units (what
is before the layers, each layer, what is after them) in the order of its schedule, and every hill is looked at.

[Note: FSDP2]
A unit is a group, as torchtitan has them. Gathering a group takes a flat buffer and the parameters that are copied out
of it. In forward the flat buffer stays until the next group is copied out; the group before is freed by then with
ZeRO-3, but the last one stays. In backward the group in front is gathered once the present one is copied out, so its
flat buffer is there beside the present one's parameters and gradients. After a group's backward its gradients are
copied into the input of a reduce-scatter, which stays until the next one's. In a pipeline all that is after the last
micro-batch (lading.sim.sequence, [Note: groups]). Source: torch.distributed.fsdp._fully_shard, _fsdp_param_group.py
(wait_for_unshard, post_backward) and _fsdp_collectives.py (foreach_all_gather, foreach_reduce), torch 2.13.

[Note: other ways]
DistributedDataParallel has buckets that are always there; while it is told not to reduce, gradients are tensors of
their own beside them. A stage of torch.distributed.pipelining has a buffer for what each micro-batch brings, and keeps
what it handed on until the micro-batch is back (stage.py, _prepare_forward_infra and fwd_cache). A cross-entropy over
cut logits makes one tensor of their size more in backward (tensor/parallel/loss.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lading.errors import ConfigError
from lading.ir.action import Work
from lading.ir.graph import DTYPE_BYTES, Role
from lading.ir.layout import Layout
from lading.ir.stack import Stack
from lading.ir.work import RankSegment, Stage
from lading.memory.ranks import adapter_bytes, shards, state_bytes
from lading.parallel.memory import alive_bytes
from lading.parallel.recompute import recomputed
from lading.program.schedules import Schedule
from lading.sim.phases import groups_apart, less


@dataclass(frozen=True)
class EagerUnit:
    """Bytes of a segment of one rank.

    Attributes:
        saved: Bytes kept from forward to backward.
        forward: Most bytes while it runs.
        keeping, adding: Most bytes while backward runs, where gradients of weights stay as they are made, and where
            each is added to one that is there.
        elements: Parameters by the axes over which they are replicated.
        trained: Trained parameters among them.
        trained_bytes, frozen_bytes: Bytes of adapters and of what they stand beside, as they are kept; else 0.
        tables: Bytes of buffers and constants.
        enters: Bytes of what enters.
        leaves: Bytes of what leaves; of the last unit, the logits.
        tied: Parameters that are the first unit's too.
    """

    saved: int
    forward: int
    keeping: int
    adding: int
    elements: dict[str, int]
    trained: dict[str, int]
    trained_bytes: int
    frozen_bytes: int
    tables: int
    enters: int
    leaves: int
    tied: int = 0

    @staticmethod
    def of(segment: RankSegment, layout: Layout, stack: Stack) -> EagerUnit:
        """Make the unit of a segment, as the layout recomputes it."""
        mode = layout.recompute if segment.enters and segment.leaves else "none"
        kept = recomputed(segment, mode, layout.recompute_modules, early_stop=stack.early_stop)
        alive = alive_bytes(segment, kept, stack.fusion, fused_loss=stack.fused_loss)
        made: dict[int, int] = {}
        for tensor, place in alive.gradients.items():
            made[place] = made.get(place, 0) + segment.tensors[tensor].size_bytes
        keeping = adding = held = 0
        logits = _logits(segment)
        for place, alone in alive.backward:
            more = layout.tp > 1 and "_log_softmax_backward" in segment.kernels[place].name
            size = alone + (logits if more else 0)
            held += made.get(place, 0)
            keeping = max(keeping, size + held)
            adding = max(adding, size + made.get(place, 0))
        fixed = {t.storage: t.size_bytes for t in segment.tensors if t.role in (Role.BUFFER, Role.CONSTANT)}
        return EagerUnit(
            saved=alive.saved,
            forward=max((size for _, size in alive.forward), default=0),
            keeping=keeping,
            adding=adding,
            elements=segment.parameter_elements,
            trained=segment.parameter_elements if segment.trained_elements is None else segment.trained_elements,
            trained_bytes=segment.trained_bytes,
            frozen_bytes=segment.frozen_bytes,
            tables=sum(fixed.values()),
            enters=sum(segment.tensors[t].size_bytes for t in segment.enters),
            leaves=sum(segment.tensors[t].size_bytes for t in segment.leaves) or logits,
            tied=segment.tied_elements,
        )

    def without(self, tied: int) -> EagerUnit:
        """The unit without parameters that another has, whose gradient is there before."""
        share = 1 - tied / self.number
        return replace(
            self,
            elements=less(self.elements, tied),
            trained=less(self.trained, tied) if self.trained else self.trained,
            trained_bytes=round(self.trained_bytes * share),
            frozen_bytes=round(self.frozen_bytes * share),
        )

    @property
    def number(self) -> int:
        """Parameters."""
        return sum(self.elements.values())


def _logits(segment: RankSegment) -> int:
    """Bytes of what a cross-entropy reads; 0 if there is none."""
    found = (k for k in segment.kernels if "_log_softmax." in k.name and k.stage is Stage.FORWARD)
    return next((segment.tensors[k.inputs[0]].size_bytes for k in found), 0)


@dataclass
class _Walk:
    """A rank under way through its step.

    Attributes:
        units: Units of each stage it holds, in order of forward.
        roles: Bytes that stay all the time, by role.
        gathered: Units whose parameters are there in full, by (stage, place).
        made: Bytes of gradients there, by (stage, place).
        parts: Bytes of this rank's part of reduced gradients, by (stage, place).
        flat, reducing: Bytes of the buffers of the last gather, and of the last reduction.
        waiting: Bytes of activations kept by other micro-batches.
        output: Bytes that the stage handed on, of the micro-batch that goes back.
    """

    units: dict[int, list[EagerUnit]]
    roles: dict[Role, int]
    layout: Layout
    width: int
    in_buffers: bool
    gathered: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    made: dict[tuple[int, int], int] = field(default_factory=lambda: {})
    parts: dict[tuple[int, int], int] = field(default_factory=lambda: {})
    flat: int = 0
    reducing: int = 0
    waiting: int = 0
    output: int = 0
    peak: dict[Role, int] = field(default_factory=lambda: {})

    @property
    def is_fsdp(self) -> bool:
        return self.layout.zero >= 2

    def look(self, activations: int, more: int = 0) -> None:
        """Remember this moment if nothing was larger."""
        now = dict(self.roles)
        now[Role.GRADIENT] += sum(self.made.values()) + sum(self.parts.values())
        whole = sum(self.bytes_of(stage, place) for stage, place in self.gathered)
        now[Role.WORKSPACE] = whole + self.flat + self.reducing + more
        now[Role.ACTIVATION] = now.get(Role.ACTIVATION, 0) + activations + self.waiting + self.output
        if sum(now.values()) > sum(self.peak.values()):
            self.peak = now

    def bytes_of(self, stage: int, place: int) -> int:
        """Bytes of the parameters of a unit."""
        return self.units[stage][place].number * self.width

    def gradients_of(self, stage: int, place: int) -> int:
        """Bytes of the gradients of the trained parameters of a unit."""
        unit = self.units[stage][place]
        return unit.trained_bytes or sum(unit.trained.values()) * self.width

    def gather(self, stage: int, place: int, activations: int) -> None:
        """Have a unit in full; nothing if it is."""
        if not self.is_fsdp or (stage, place) in self.gathered:
            return
        size = self.bytes_of(stage, place)
        self.look(activations, size)
        self.flat = size
        self.gathered.add((stage, place))
        self.look(activations)

    def forward(self, stage: int) -> None:
        """A micro-batch through a stage."""
        units, kept = self.units[stage], 0
        for place, unit in enumerate(units):
            self.gather(stage, place, kept)
            self.look(kept + unit.forward)
            kept += unit.saved
            if self.layout.zero == 3 and not self.layout.is_pipeline and place < len(units) - 1:
                self.gathered.discard((stage, place))
        self.flat = 0
        self.waiting += kept + self._handed(stage)

    def _handed(self, stage: int) -> int:
        """Bytes a pipeline's stage keeps of a micro-batch besides: its output, but not what came into a buffer."""
        units = self.units[stage]
        return units[-1].leaves - units[0].enters if self.layout.pp > 1 else 0

    def backward(self, stage: int, *, first: bool, reduces: bool) -> None:
        """Run a stage of a micro-batch backward.

        Args:
            first: No gradients are there yet.
            reduces: They are reduced now.
        """
        units = self.units[stage]
        kept = sum(unit.saved for unit in units)
        self.waiting -= kept + self._handed(stage)
        self.output = self._handed(stage)
        keeps = (first and not (self.in_buffers and reduces)) or (self.is_fsdp and self.layout.pp == 1)
        for place in reversed(range(len(units))):
            unit = units[place]
            kept -= unit.saved
            self.gather(stage, place, kept + unit.saved)
            self.flat = self._in_front(stage, place)
            self.look(kept + (unit.keeping if keeps else unit.adding))
            if keeps:
                self.made[stage, place] = self.gradients_of(stage, place)
            if self.is_fsdp and self.layout.pp == 1:
                self._reduce(stage, place, kept)
            elif self.in_buffers and reduces:
                self.made.pop((stage, place), None)
        self.flat = self.output = 0
        if self.is_fsdp and reduces and self.layout.pp > 1:
            for place in range(len(units)):
                self._reduce(stage, place, 0)

    def _in_front(self, stage: int, place: int) -> int:
        """The flat buffer of the unit that comes next in backward."""
        if not self.is_fsdp or not place or (stage, place - 1) in self.gathered:
            return 0
        return self.bytes_of(stage, place - 1)

    def _reduce(self, stage: int, place: int, activations: int) -> None:
        """A unit is released, and its gradients go into the input of a reduce-scatter, of which a part remains."""
        self.gathered.discard((stage, place))
        self.reducing = 0
        size = self.gradients_of(stage, place)
        self.look(activations, size)
        self.made.pop((stage, place), None)
        self.reducing = size
        elements = self.units[stage][place].trained
        part = sum(number * self.width // shards(axes, self.layout) for axes, number in elements.items())
        self.look(activations, part)
        self.parts[stage, place] = part


def eager_memory(
    runs: Sequence[Sequence[tuple[int, int]]],
    segments: Sequence[RankSegment],
    layout: Layout,
    stack: Stack,
    plan: Schedule,
) -> list[dict[Role, int]]:
    """Bytes of each pipeline rank by role, when their sum is largest.

    Args:
        runs: Segments of each stage, and how often each stands.
        segments: Segments of one rank.
    Raises:
        ConfigError: ZeRO-1, which stock PyTorch has not.
    """
    if layout.zero == 1:
        raise ConfigError(f"stack {stack.name}: stock PyTorch cuts states with FSDP2; choose zero2 or zero3, got zero1")
    units = [EagerUnit.of(segment, layout, stack) for segment in segments]
    found: list[dict[Role, int]] = []
    for rank in range(plan.ranks):
        held = {s: [units[segment] for segment, count in runs[s] for _ in range(count)] for s in plan.stages_of(rank)}
        found.append(_walked(held, layout, stack, plan, rank))
    return found


def _once(units: Sequence[EagerUnit]) -> list[EagerUnit]:
    """Units of a model, with what is tied in the last that has it: its gradient is there first."""
    tied = max(unit.tied for unit in units)
    having = [place for place, unit in enumerate(units) if unit.tied]
    others = {0, *having[:-1]} if tied else set[int]()
    return [unit.without(tied) if place in others else unit for place, unit in enumerate(units)]


def _walked(
    held: dict[int, list[EagerUnit]], layout: Layout, stack: Stack, plan: Schedule, rank: int
) -> dict[Role, int]:
    if not (layout.is_pipeline or groups_apart(layout, stack)):
        held = {stage: _once(units) for stage, units in held.items()}
    whole = [unit for units in held.values() for unit in units]
    elements: dict[str, int] = {}
    for unit in whole:
        for axes, number in unit.elements.items():
            elements[axes] = elements.get(axes, 0) + number
    cut = layout if layout.zero != 2 else replace(layout, zero=3)
    roles = state_bytes(elements, cut, stack)
    if frozen := sum(unit.frozen_bytes for unit in whole):
        roles = adapter_bytes(frozen, sum(unit.trained_bytes for unit in whole), cut, stack)
    in_buffers = layout.zero == 0 and layout.dp * layout.cp > 1
    if not in_buffers:
        roles[Role.GRADIENT] = 0
    roles[Role.PARAMETER] += max(unit.tables for unit in whole)
    walk = _Walk(held, roles, layout, DTYPE_BYTES[stack.parameters_dtype or "float32"], in_buffers)
    stages = plan.stages_of(rank)
    if layout.pp > 1:  # a buffer for what each micro-batch is to bring, forward and back
        borders = [(held[s][0].enters, held[s][-1].leaves if s < plan.stages - 1 else 0) for s in stages]
        roles[Role.ACTIVATION] = layout.micro_batches * sum(map(sum, borders))
    done = dict.fromkeys(stages, 0)
    for kind, chunk, _, _ in plan.orders[rank].tolist():
        stage = stages[int(chunk)]
        if kind == Work.FORWARD:
            walk.forward(stage)
        elif kind in (Work.BACKWARD, Work.BACKWARD_INPUT):
            done[stage] += 1
            last = done[stage] == layout.micro_batches
            walk.backward(stage, first=done[stage] == 1, reduces=last or (layout.pp == 1 and layout.zero > 0))
    return walk.peak
