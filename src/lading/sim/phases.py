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
    """Work and memory of one segment on one rank.

    Attributes:
        again: Work that is recomputed before backward.
        backward_input, backward_weight: Work for gradients of activations, and for those of parameters.
        saved_bytes: Bytes kept from forward to backward by one micro-batch, on the device.
        transients: Largest bytes alive beside the saved ones in forward, and in backward with recomputed tensors.
        sent_bytes: Bytes of the activations on its border, which a pipeline sends.
        elements: Number of parameters, by the axes over which they are replicated.
        trained: Number of trained parameters among them, likewise.
        trained_bytes, frozen_bytes: With adapters, bytes of the trained parameters, and of the frozen weights.
        placeholders: Bytes of gradients that are tensors in name only, by shape; each shape counts once for a rank.
        segment, recomputed_parts: The segment itself, and which of its kernels are recomputed.
        moved_bytes: Bytes kept on a lower tier instead of the device.
        tied: Elements among ``elements["dp"]`` of a weight that is tied to one of the first segment.
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
        """Parts of forward, recomputation, gradients of activations and gradients of weights."""
        return self.forward, self.again, self.backward_input, self.backward_weight

    @property
    def model_flops(self) -> float:
        """FLOP of a micro-batch without recomputation."""
        return self.forward.flops + self.backward_input.flops + self.backward_weight.flops

    @cached_property
    def without_tied(self) -> Phases:
        """Phases on a rank that also has the first segment, which counts the tied weight ([Note: tied weights])."""
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
    """Whether a tied weight is simulated as two, of the first and the last segment ([Note: tied weights])."""
    return not layout.is_pipeline and layout.zero >= (2 if stack.drops_gradients else 3)


def untied_if_apart(segments: Sequence[Phases], layout: Layout, stack: Stack) -> tuple[Phases, ...]:
    """Segments as they are, or with no weight tied where ``groups_apart``."""
    if not groups_apart(layout, stack):
        return tuple(segments)
    return tuple(dataclasses.replace(segment, tied=0) if segment.tied else segment for segment in segments)


def without_tied_elements(elements: Mapping[str, int], tied: int) -> dict[str, int]:
    """Numbers of parameters by axes, less ``tied`` of those that every data-parallel rank replicates."""
    return {axes: number - tied if axes == DENSE else number for axes, number in elements.items()}


def stretches(segment: RankSegment, recompute: Recomputed, stack: Stack) -> list[list[Kernel]]:
    """Kernels of forward, of recomputation, of gradients of activations and of gradients of weights."""
    issued = launched(segment, stack)
    again: tuple[Kernel, ...] = ()
    if recompute.kernels:
        again = launched(
            dataclasses.replace(segment, kernels=tuple(segment.kernels[p] for p in recompute.kernels)), stack
        )
    by_stage = [[k for k in issued if k.stage is stage] for stage in _STAGES]
    return [by_stage[0], [k for k in again if k.stage is Stage.FORWARD], *by_stage[1:]]


def phases(segment: RankSegment, mode: str, modules: Sequence[str], prices: Prices, stack: Stack) -> Phases:
    """Sum up the work and the memory of a segment.

    Args:
        mode, modules: Recompute mode and modules (``lading.parallel.recompute.recomputed``).
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
