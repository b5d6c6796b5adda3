"""Storage: bytes that each pipeline rank of a step holds by role, on the device and behind it, when they are most."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES, Role
from lading.ir.layout import Layout
from lading.ir.request import StepRequest
from lading.memory.ranks import adapter_bytes, behind, gathered_bytes, shards, state_bytes
from lading.program.emit import most_gathered
from lading.program.schedules import alive_peaks
from lading.sim.gathered import Peak, Stretch, UnitBytes, gathered_passes, unit_bytes
from lading.sim.phases import Phases
from lading.sim.step import SimulatedStage, Step, elements_of, trained_of

#: Bytes by role on the device, and behind it.
Places = tuple[dict[Role, int], dict[Role, int]]


def stored(
    request: StepRequest, given: Sequence[dict[Role, int]], stages: Sequence[SimulatedStage], step: Step
) -> list[Places]:
    """Of each pipeline rank what is on the device, and what lies where the layout moves it.

    Args:
        given: Bytes by role with parameters, gradients and states on the device.
    Raises:
        ConfigError: activations are moved under stock PyTorch, which has no such thing.
    """
    layout, stack = request.layout, request.stack
    if "activations" in layout.offload and stack.drops_gradients:
        raise ConfigError(
            f"stack {stack.name}: stock PyTorch keeps activations on the device; expected another stack with "
            "offload=activations"
        )
    found: list[Places] = []
    for own, roles, moved in zip(held_stages(stages, step), given, _moved(stages, step), strict=True):
        here, there = behind(roles, _updated(own, layout), _largest(own), layout, stack)
        found.append((here, {**there, Role.ACTIVATION: int(moved)} if moved else there))
    return found


def device_roles(
    request: StepRequest, both: Sequence[Phases], stages: Sequence[SimulatedStage], step: Step
) -> list[dict[Role, int]]:
    """Of each pipeline rank, bytes by role when their sum is largest; moved activations are left out.

    Args:
        both: All variants of the segments.
    """
    layout, stack = request.layout, request.stack
    if _gathers_units(request):
        return [_gathered_roles(request, both, stages[0])]
    found: list[dict[Role, int]] = []
    for own, activations in zip(held_stages(stages, step), _alive(stages, step), strict=True):
        if request.task in ("lora", "qlora"):
            frozen, trained = (sum(getattr(stage, name) for stage in own) for name in ("frozen_bytes", "trained_bytes"))
            roles = adapter_bytes(frozen, trained, layout, stack)
        else:
            roles = state_bytes(elements_of(own), layout, stack)
        placeholders = {shape: size for stage in own for shape, size in stage.placeholders.items()}
        roles[Role.WORKSPACE] = sum(placeholders.values())
        if layout.zero >= 2 and step.pipeline is not None:  # [Note: sharded in a pipeline] in lading.program.emit
            roles[Role.GRADIENT] = 0
            unreduced = sum(trained_of(own).values()) * DTYPE_BYTES[stack.gradient_dtype]
            whole = [gathered_bytes(stage.elements, layout, stack) for stage in stages]
            roles[Role.WORKSPACE] += most_gathered(step.pipeline.schedule, len(found), whole) + unreduced
        elif layout.zero == 3:
            roles[Role.WORKSPACE] += 2 * gathered_bytes(_largest(own), layout, stack)
        roles[Role.ACTIVATION] = int(activations)
        found.append(roles)
    return found


def held_stages(stages: Sequence[SimulatedStage], step: Step) -> list[list[SimulatedStage]]:
    """Stages of each rank."""
    if step.pipeline is None:
        return [[stages[0]]]
    plan = step.pipeline.schedule
    return [[stages[s] for s in plan.stages_of(rank)] for rank in range(plan.ranks)]


def _alive(stages: Sequence[SimulatedStage], step: Step) -> list[float]:
    """Most that activations take on the device of each rank."""
    if step.pipeline is None:
        return [float(stages[0].saved_bytes + max(stages[0].transients))]
    saved = np.array([stage.saved_bytes for stage in stages])
    spikes = np.array([stage.transients for stage in stages])
    return alive_peaks(step.pipeline.schedule, saved, saved, spikes[:, 1], spikes[:, 0]).tolist()


def _moved(stages: Sequence[SimulatedStage], step: Step) -> list[float]:
    """Most that activations take behind the device of each rank."""
    if step.pipeline is None:
        return [float(stages[0].moved_bytes)]
    moved = np.array([stage.moved_bytes for stage in stages])
    plan = step.pipeline.schedule
    return alive_peaks(plan, moved, moved).tolist() if moved.any() else [0.0] * plan.ranks


def _updated(own: Sequence[SimulatedStage], layout: Layout) -> float:
    return sum(number / shards(axes, layout) for axes, number in trained_of(own).items())


def _largest(own: Sequence[SimulatedStage]) -> dict[str, int]:
    return max((stage.largest_unit for stage in own), key=lambda unit: sum(unit.values()))


def _gathers_units(request: StepRequest) -> bool:
    """Whether parameters are cut and gathered a unit at a time, each of them trained."""
    layout = request.layout
    return layout.zero == 3 and not layout.is_pipeline and request.task not in ("lora", "qlora")


def units_of(request: StepRequest, stage: SimulatedStage, segments: Sequence[Phases]) -> list[UnitBytes]:
    """The units of a stage in order of forward, where parameters are gathered a unit at a time; else none."""
    if not _gathers_units(request):
        return []
    found = {variant: _unit(segments[variant], request) for variant, _ in stage.run}
    return [found[variant] for variant, count in stage.run for _ in range(count)]


def _unit(phases: Phases, request: StepRequest) -> UnitBytes:
    """A unit; where its activations are moved, two units' are there while it runs (``lading.sim.variants.moved``)."""
    unit = unit_bytes(phases.segment, phases.kept, request.layout, request.stack)
    if not phases.moved_bytes:
        return unit
    there = 2 * phases.moved_bytes

    def more(stretches: Sequence[Stretch]) -> tuple[Stretch, ...]:
        return tuple(dataclasses.replace(s, most=s.most + there, left=s.left + there) for s in stretches)

    return dataclasses.replace(unit, saved=0, forward=more(unit.forward), backward=more(unit.backward))


def on_device(peak: Peak, layout: Layout) -> int:
    """Bytes of a pass on the device: gradients of the rank's part go to the host where it updates."""
    return peak.total - (peak.gradients if layout.updates_on_host else 0)


def _gathered_roles(request: StepRequest, both: Sequence[Phases], stage: SimulatedStage) -> dict[Role, int]:
    """Of a rank whose parameters are gathered a unit at a time."""
    layout = request.layout
    passes = gathered_passes(units_of(request, stage, both), layout, request.stack)
    peak = max(passes, key=lambda found: on_device(found, layout))
    roles = state_bytes(stage.elements, layout, request.stack)
    roles[Role.GRADIENT] = 0 if layout.updates_on_host else peak.gradients
    roles[Role.WORKSPACE] = peak.gathered + sum(stage.placeholders.values())
    roles[Role.ACTIVATION] = peak.activations
    return roles
