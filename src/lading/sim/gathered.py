"""Gathered: the most that is alive on a rank whose parameters are cut (zero 3), as PyTorch's FSDP2 takes and frees it.

[Note: buffers]
A group of parameters ([Note: order of FSDP2] in lading.program.emit) is gathered into one buffer and copied out of it.
In forward the buffer stays until the next group has been copied out; in backward it goes at once, but the next one's is
there already.
Gradients stay as the products made them until a group's backward ends. They are copied into a buffer in the dtype of
reductions, which stays until the next group is reduced; what is reduced of it is the gradient of this rank's part
(torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py, foreach_reduce). The last
of a micro-batch stays through the next one's forward (_fsdp_state.py, _root_post_backward_final_callback).
In a pipeline gathered parameters stay for the step, and so do gradients, in the dtype of reductions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lading.ir.graph import DTYPE_BYTES
from lading.ir.layout import Layout
from lading.ir.stack import Stack
from lading.ir.work import RankSegment
from lading.memory.ranks import gathered_width, gradient_width, shards
from lading.parallel.memory import alive_bytes
from lading.parallel.recompute import Recomputed
from lading.program.units import bounds, groups_of


@dataclass(frozen=True, slots=True)
class Stretch:
    """Kernels of a unit between which its groups do nothing.

    Attributes:
        begins, ends: Groups, by number, that begin before it and that end after it.
        most: Most bytes alive of the unit's activations and of its gradients that are not reduced yet.
        gradients: Of these, gradients.
        left: Bytes alive when its last kernel has run, likewise.
        uses: It is not before or after all that is done with parameters.
    """

    begins: tuple[int, ...]
    ends: tuple[int, ...]
    most: int
    gradients: int
    left: int
    uses: bool = True


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """What a unit (a block, what is before, what is after) takes on a rank.

    Attributes:
        groups: Elements of each of its groups, by the axes over which they are replicated, in order of forward.
        enters: Bytes of the activations that enter.
        saved: Bytes kept from forward to backward.
    """

    groups: tuple[tuple[str, int], ...]
    enters: int
    saved: int
    forward: tuple[Stretch, ...]
    backward: tuple[Stretch, ...]


def unit_bytes(segment: RankSegment, again: Recomputed, layout: Layout, stack: Stack) -> UnitBytes:
    """Of one unit; ``again`` is what runs again in its backward."""
    alive = alive_bytes(segment, again, stack.fusion, fused_loss=stack.fused_loss)
    groups = groups_of(segment, layout)
    width = gradient_width(layout, stack)
    made: dict[int, list[tuple[int, int]]] = {}
    names = [axes for axes, _ in groups]
    for tensor, axes in segment.parameters:
        if tensor in alive.gradients:
            local = segment.tensors[tensor]
            group = names.index(axes if axes in names else names[0])
            size = local.size_bytes // DTYPE_BYTES[local.dtype] * width
            made.setdefault(alive.gradients[tensor], []).append((group, size))
    return UnitBytes(
        groups=groups,
        enters=sum(segment.tensors[t].size_bytes for t in segment.enters),
        saved=alive.saved,
        forward=_stretches(segment, alive.forward, groups, {}),
        backward=_stretches(segment, alive.backward, groups, made),
    )


def _stretches(
    segment: RankSegment,
    alive: Sequence[tuple[int, int]],
    groups: Sequence[tuple[str, int]],
    made: Mapping[int, Sequence[tuple[int, int]]],
) -> tuple[Stretch, ...]:
    """Cut the kernels where groups begin and end; ``made`` are gradients, by the kernel that makes them."""
    kernels = [segment.kernels[place] for place, _ in alive]
    if not kernels:
        return ()
    spans = bounds(segment, kernels, groups)
    cuts = sorted({0, len(kernels), *(at for span in spans for at in span)})
    held = [0] * len(groups)
    found: list[Stretch] = []
    for start, stop in pairwise(cuts):
        most = gradients = left = 0
        for place, size in alive[start:stop]:
            for group, gradient in made.get(place, ()):
                held[group] += gradient
            left = size + sum(held)
            if left > most:
                most, gradients = left, sum(held)
        ends = tuple(g for g, (_, end) in enumerate(spans) if end == stop)
        begins = tuple(g for g, (begin, _) in enumerate(spans) if begin == start)
        uses = any(begin <= start < end for begin, end in spans)
        found.append(Stretch(begins, ends, most, gradients, left, uses))
        for group in ends:
            held[group] = 0
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes on a rank when they are most, beside its parts of parameters and of the optimizer's states.

    Attributes:
        activations: Kept and transient.
        gathered: Gathered parameters, gradients not reduced yet, and buffers of both.
        gradients: Of this rank's parts.
    """

    activations: int = 0
    gathered: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.activations + self.gathered + self.gradients


def gathered_passes(units: Sequence[UnitBytes], layout: Layout, stack: Stack) -> list[Peak]:
    """The most that is alive in the forward of each unit, then in each one's backward, last unit first.

    Args:
        units: In order of forward, each as often as it stands; there is no pipeline.
    """
    walk = _Walk(units, layout, stack)
    found: list[Peak] = []
    for number in range(len(units)):
        walk.peak = Peak()
        walk.forward(number, number == len(units) - 1)
        found.append(walk.peak)
    for number in reversed(range(len(units))):
        walk.peak = Peak()
        walk.backward(number)
        found.append(walk.peak)
    return found


def own_gradients(unit: UnitBytes, layout: Layout, stack: Stack) -> int:
    """Bytes of the gradients of a rank's part of a unit's parameters."""
    width = DTYPE_BYTES[stack.gradient_dtype]
    return sum(elements * width // shards(axes, layout) for axes, elements in unit.groups)


class _Walk:
    """Where a rank stands: bytes by what they are of ([Note: buffers])."""

    def __init__(self, units: Sequence[UnitBytes], layout: Layout, stack: Stack) -> None:
        self.units, self.layout = units, layout
        self.width, self.made = gathered_width(layout, stack), gradient_width(layout, stack)
        self.reduced = DTYPE_BYTES[stack.gradient_dtype]
        self.accumulates = layout.micro_batches > 1
        self.peak = Peak()
        self.saved = self.whole = self.buffer = self.reducing = self.gradients = 0
        if self.accumulates and units[0].groups:  # of the micro-batch before
            self.reducing = units[0].groups[0][1] * self.reduced
        parts = (self._part(axes, size) for unit in units for axes, size in unit.groups)
        self.gradients = sum(parts) if self.accumulates else 0
        self.there: set[tuple[int, int]] = set()
        #: Groups whose forward has ended, as (unit, group): the order in which backward asks for them.
        self.ended: list[tuple[int, int]] = []

    def forward(self, number: int, stays: bool) -> None:
        """Of a unit whose parameters stay until backward or are released."""
        unit = self.units[number]
        alive = unit.enters
        for stretch in unit.forward:
            for group in stretch.begins:
                axes, elements = unit.groups[group]
                size = elements * self.width
                self._see(alive, self.buffer + size + size // shards(axes, self.layout))  # its own part is cast first
                self.whole += size
                self._see(alive, self.buffer + size)
                self.buffer = size
                self.there.add((number, group))
            if not stretch.uses:
                self.buffer = 0
            self._see(stretch.most, self.buffer)
            alive = stretch.left
            for group in reversed(stretch.ends):
                self.ended.append((number, group))
                if not stays:
                    self.whole -= unit.groups[group][1] * self.width
                    self.there.remove((number, group))
        self.saved += unit.saved

    def backward(self, number: int) -> None:
        """Of a unit."""
        unit = self.units[number]
        self.saved -= unit.saved
        for stretch in unit.backward:
            for group in stretch.begins:
                self._begin(unit.groups[group][1], (number, group))
            self._see(stretch.most, self.buffer, stretch.gradients)
            for group in stretch.ends:
                axes, elements = unit.groups[group]
                self.whole -= elements * self.width
                self.reducing = elements * self.reduced
                own, unreduced = self._part(axes, elements), elements * self.made
                self._see(stretch.left, self.buffer, unreduced)
                self._see(stretch.left - unreduced, self.buffer + own)
                self.gradients += 0 if self.accumulates else own

    def _begin(self, elements: int, place: tuple[int, int]) -> None:
        self.ended.pop()
        if place not in self.there:
            self.whole += elements * self.width
            self._see(0, self.buffer)
        self.buffer = 0
        if self.ended and self.ended[-1] not in self.there:
            before, group = self.ended[-1]
            self.buffer = self.units[before].groups[group][1] * self.width

    def _part(self, axes: str, elements: int) -> int:
        """Bytes of this rank's part of a group's gradients."""
        return elements * self.reduced // shards(axes, self.layout)

    def _see(self, alive: int, buffer: int, unreduced: int = 0) -> None:
        total = self.saved + alive + self.whole + buffer + self.reducing + self.gradients
        if total > self.peak.total:
            gathered = self.whole + buffer + self.reducing + unreduced
            self.peak = Peak(self.saved + alive - unreduced, gathered, self.gradients)
