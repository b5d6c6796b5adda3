"""Phases: what one segment costs a rank in forward, in backward, and when it is recomputed; and what it keeps.

[Note: tied weights]
An embedding that is its model's head too is one weight, with one gradient and one state, where one stage has both: it
is the first segment's, and its gradient is there once the first segment's backward has run. In a pipeline the first
stage and the last have a copy each, whose gradients the two sum once a step (Megatron-LM,
core/distributed/finalize_model_grads.py, _allreduce_word_embedding_grads). Where groups of parameters are gathered each
by itself, both are simulated as weights of their own: ``lading.runtime.apply`` refuses one weight in two groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lading.cost.fusion import launched
from lading.cost.kernels import operand_share
from lading.ir.layout import Layout
from lading.ir.stack import Stack
from lading.ir.work import Kernel, RankSegment, Stage
from lading.parallel.memory import segment_memory, weight_shapes
from lading.parallel.ranks import DENSE
from lading.parallel.recompute import Recomputed, recomputed
from lading.sim.parts import Part, Prices, part_of

_STAGES = (Stage.FORWARD, Stage.BACKWARD_INPUT, Stage.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Phases:
    """Work and memory of one segment of one rank.

    Attributes:
        again: Work that is run again before backward.
        backward_input, backward_weight: Gradients of activations and those of parameters.
        saved_bytes: Bytes kept from forward to backward by one micro-batch, on the device.
        transients: Most bytes that forward has alive besides, and backward, recomputed tensors included.
        sent_bytes: Bytes of the activations on its border, which a pipeline sends.
        elements: Parameters by the axes over which they are replicated.
        trained: Trained parameters among them.
        trained_bytes, frozen_bytes: Bytes of what is trained beside frozen weights, and of these.
        placeholders: Bytes of gradients that are tensors in name only, by shape; each shape once for a whole rank.
        segment, recomputed_parts: Segment that it is of, and what is run again and kept.
        moved_bytes: Bytes kept behind the device instead.
        tied: Elements among ``elements["dp"]`` of a weight that is one with one of the first segment.
    """

    forward: Part
    again: Part
    backward_input: Part
    backward_weight: Part
    saved_bytes: int
    transients: tuple[int, int]
    sent_bytes: int
    elements: dict[str, int]
    trained: dict[str, int]
    trained_bytes: int
    frozen_bytes: int
    placeholders: dict[tuple[int, ...], int]
    segment: RankSegment
    recomputed_parts: Recomputed
    moved_bytes: int = 0
    tied: int = 0

    @property
    def parts(self) -> tuple[Part, Part, Part, Part]:
        """Forward, what runs again, gradients of activations and of weights."""
        return self.forward, self.again, self.backward_input, self.backward_weight

    @property
    def model_flops(self) -> float:
        """FLOP of a micro-batch, without what is recomputed."""
        return self.forward.flops + self.backward_input.flops + self.backward_weight.flops

    @cached_property
    def without_tied(self) -> Phases:
        """Costs beside the first segment, which has what is tied to it ([Note: tied weights])."""
        if not self.tied:
            return self
        share = 1 - self.tied / sum(self.elements.values())
        trained = without_tied_elements(self.trained, self.tied) if self.trained else self.trained
        return dataclasses.replace(
            self,
            elements=without_tied_elements(self.elements, self.tied),
            trained=trained,
            tied=0,
            trained_bytes=round(self.trained_bytes * share),
            frozen_bytes=round(self.frozen_bytes * share),
        )


def groups_apart(layout: Layout, stack: Stack) -> bool:
    """Whether the first and the last segment have a weight each, though it is tied ([Note: tied weights])."""
    return not layout.is_pipeline and layout.zero >= (2 if stack.drops_gradients else 3)


def as_held(segments: Sequence[Phases], layout: Layout, stack: Stack) -> tuple[Phases, ...]:
    """Segments, with nothing tied where a layout has groups apart."""
    has_groups_apart = groups_apart(layout, stack)
    return tuple(dataclasses.replace(held, tied=0) if has_groups_apart and held.tied else held for held in segments)


def without_tied_elements(elements: Mapping[str, int], tied: int) -> dict[str, int]:
    """Parameters without so many that are whole on every data-parallel rank."""
    return {axes: number - tied if axes == DENSE else number for axes, number in elements.items()}


def stretches(segment: RankSegment, recompute: Recomputed, stack: Stack) -> list[list[Kernel]]:
    """Kernels of forward, of what runs again, and of gradients of activations and of weights."""
    issued = launched(segment, stack)
    again: tuple[Kernel, ...] = ()
    if recompute.kernels:
        again = launched(
            dataclasses.replace(segment, kernels=tuple(segment.kernels[p] for p in recompute.kernels)), stack
        )
    by_stage = [[k for k in issued if k.stage is stage] for stage in _STAGES]
    return [by_stage[0], [k for k in again if k.stage is Stage.FORWARD], *by_stage[1:]]


def phases(segment: RankSegment, mode: str, modules: Sequence[str], prices: Prices, stack: Stack) -> Phases:
    """Sum up a segment.

    Args:
        mode, modules: What is recomputed (``lading.parallel.recompute.recomputed``).
    """
    recompute = recomputed(segment, mode, modules, early_stop=stack.early_stop)
    in_place = stack.gradient_placeholders and bool(segment.enters and segment.leaves)
    memory = segment_memory(
        segment, recompute, stack.fusion, fused_loss=stack.fused_loss, makes_weight_gradients=not in_place,
        operand_share=operand_share(prices.precision, stack),
    )  # fmt: skip
    forward, again, backward_input, backward_weight = [
        part_of(kernels, prices) for kernels in stretches(segment, recompute, stack)
    ]
    return Phases(
        forward=forward,
        again=again,
        backward_input=backward_input,
        backward_weight=backward_weight,
        saved_bytes=memory.saved,
        transients=(memory.forward_peak - memory.saved, memory.backward_peak - memory.saved),
        sent_bytes=sum(segment.tensors[t].size_bytes for t in segment.leaves),
        elements=segment.parameter_elements,
        trained=segment.parameter_elements if segment.trained_elements is None else segment.trained_elements,
        trained_bytes=segment.trained_bytes,
        frozen_bytes=segment.frozen_bytes,
        placeholders=weight_shapes(segment) if in_place else {},
        segment=segment,
        recomputed_parts=recompute,
        tied=segment.tied_elements,
    )
