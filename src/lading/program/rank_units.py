"""Units: what one rank gathers and reduces together: its kernels in order, its groups, and when these begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lading.ir.action import Work
from lading.ir.graph import Role
from lading.ir.layout import Layout
from lading.ir.stack import Stack
from lading.ir.work import Collective, Form, Kernel, RankSegment, Stage
from lading.memory.rank_bytes import replicas
from lading.parallel.ranks import EXPERTS
from lading.parallel.recompute import Recomputed
from lading.program.emit import BEGIN, END, RUN, Pass, UnitShape

_WHOLE: Pass = ((RUN, 0, 0),)


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A block of a rank, or what is before or after the blocks.

    Attributes:
        again: What of it runs again in backward.
        lazy: It runs again when backward first reads what was kept, as torch's checkpoint; else before all.
        ends: It is the last of the model.
    """

    segment: RankSegment
    again: Recomputed
    lazy: bool = True
    ends: bool = False

    def kernels(self, work: Work) -> list[Kernel]:
        """Kernels that an action of a schedule runs of it, in order."""
        stage_kernels = [k for k in self.segment.kernels if (k.stage is Stage.FORWARD) == (work is Work.FORWARD)]
        if work is Work.BACKWARD_WEIGHT:
            return [k for k in stage_kernels if k.stage is Stage.BACKWARD_WEIGHT]
        if work is Work.BACKWARD_INPUT:
            stage_kernels = [k for k in stage_kernels if k.stage is Stage.BACKWARD_INPUT]
        if work is Work.FORWARD or not self.again.kernels:
            return stage_kernels
        looks = (at for at, kernel in enumerate(stage_kernels) if self._looks_back(kernel))
        first = next(looks, len(stage_kernels)) if self.lazy else 0
        return [
            *stage_kernels[:first],
            *(self.segment.kernels[place] for place in self.again.kernels),
            *stage_kernels[first:],
        ]

    def in_order(self, work: Work, *, weights_forward: bool) -> list[Kernel]:
        """``kernels`` as a list's region numbers them; torch goes through weights alone in their own order."""
        kernels = self.kernels(work)
        alone = work is Work.BACKWARD_WEIGHT and weights_forward
        if alone and not any(isinstance(kernel.detail, Collective) for kernel in kernels):
            kernels.reverse()
        return kernels

    def _looks_back(self, kernel: Kernel) -> bool:
        """Whether a kernel of backward reads what forward kept: before it the forward is run again."""
        kept_storages = {self.segment.tensors[t].storage for t in self.segment.saved}
        read = [self.segment.tensors[t] for t in kernel.inputs]
        return any(t.storage in kept_storages or t.role is Role.PARAMETER for t in read)


def groups_of(segment: RankSegment, layout: Layout) -> tuple[tuple[str, int], ...]:
    """Groups of a unit's parameters: its own, and its experts' if they are spread over other ranks."""
    elements: dict[str, int] = {}
    for axes, count in segment.parameter_elements.items():
        is_apart = replicas(axes, layout) != replicas("dp", layout)
        elements["dp"] = elements.get("dp", 0) + (0 if is_apart else count)
        if is_apart:
            elements[axes] = elements.get(axes, 0) + count
    return tuple((axes, elements[axes]) for axes in sorted(elements) if elements[axes])


def bounds(segment: RankSegment, kernels: Sequence[Kernel], groups: Sequence[tuple[str, int]]) -> list[tuple[int, int]]:
    """First and last unit of each group: a unit's own with the unit, that of experts with what is done for them.

    What is after the blocks has the loss, which no module's parameters are needed for.
    """
    first, last = 0, len(kernels)
    if not segment.leaves and groups and kernels:
        uses = [at for at, k in enumerate(kernels) if any(segment.tensors[t].role is Role.PARAMETER for t in k.inputs)]
        forward = kernels[0].stage is Stage.FORWARD
        if uses:
            first, last = (0, uses[-1] + 1) if forward else (uses[0], len(kernels))
    experts = [at for at, k in enumerate(kernels) if k.is_experts or _travels(k)]
    return [(experts[0], experts[-1] + 1) if axes == EXPERTS and experts else (first, last) for axes, _ in groups]


def _travels(kernel: Kernel) -> bool:
    return isinstance(kernel.detail, Collective) and kernel.detail.axis == "ep"


def unit_shape(unit: Unit, layout: Layout, stack: Stack, *, weights_forward: bool) -> UnitShape:
    """Collect the facts of a unit that a list needs to know."""
    segment, sharded = unit.segment, layout.cuts_parameters
    axes = tuple(axes for axes, _ in groups_of(segment, layout))
    passes = (_WHOLE, _WHOLE, _WHOLE, _WHOLE)
    if sharded:
        passes = _passes(segment.form, unit.again, unit.lazy, axes, weights_forward)
    recomputes = bool(unit.again.kernels)
    return UnitShape(
        axes,
        passes,
        unit.ends,
        sums=sharded and bool(segment.summed_parameters),
        gathers=stack.gathers - 1 if recomputes else 1,
    )


@lru_cache(maxsize=1024)
def _passes(
    form: Form, again: Recomputed, lazy: bool, axes: tuple[str, ...], weights_forward: bool
) -> tuple[Pass, Pass, Pass, Pass]:
    unit = Unit(form.segment, again, lazy)
    groups = [(name, 1) for name in axes]
    return tuple(  # pyright: ignore[reportReturnType]
        _pass(unit, unit.in_order(work, weights_forward=weights_forward), groups) for work in Work
    )


def _pass(unit: Unit, kernels: Sequence[Kernel], groups: Sequence[tuple[str, int]]) -> Pass:
    """A pass cut where groups begin and end; at a border what ends goes before what begins."""
    spans = bounds(unit.segment, kernels, groups)
    items: list[tuple[int, int, int]] = []
    start = 0
    for place in range(len(kernels) + 1):
        ends = [(END, at, 0) for at, span in enumerate(spans) if span[1] == place]
        begins = [(BEGIN, at, 0) for at, span in enumerate(spans) if span[0] == place]
        if place > start and (ends or begins or place == len(kernels)):
            items.append((RUN, start, place))
            start = place
        items += [*ends, *begins]
    return tuple(items)


def without_tied(segment: RankSegment, *, apart: bool) -> RankSegment:
    """A segment without what is tied to the first one, unless groups are apart."""
    elements = dict(segment.parameter_elements)
    if not apart and segment.tied_elements:
        elements["dp"] -= segment.tied_elements
    return replace(segment, parameter_elements=elements)
