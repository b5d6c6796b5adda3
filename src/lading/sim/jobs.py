"""Jobs: a simulated step as what every rank of a cluster does, and as what failures would cost it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lading.errors import ConfigError
from lading.ir.action import Work
from lading.ir.graph import Role
from lading.ir.program import Region
from lading.memory.rank_bytes import replicas, state_bytes
from lading.sim.cluster import Job, Stretches
from lading.sim.goodput import Failures
from lading.sim.parts import Span
from lading.sim.rank_step import ListedStep
from lading.sim.simulate import Simulated
from lading.sim.step import SimulatedStage


def job_of(simulated: Simulated, *, meetings: int = 2) -> Job:
    """Make the work of all ranks of a simulated step, for ``simulate_cluster``; equal ranks take as long as the step.

    A region's computing is cut into equal stretches, and its collectives are spread over their ends.

    Args:
        meetings: How often a group meets in a block on its way forward, and on its way back: 2 are those of attention
            and of the MLP.
    Raises:
        ConfigError: ranks that are processes of one host, of which no lists are run.
    Ignores: that the stretches of a block differ; that gathers of hybrid sharding are met by some replicas only.
    """
    listed = simulated.step.listed
    if listed is None:
        raise ConfigError("ranks one by one: expected ranks with a device each, got processes of one host")
    layout, listed = simulated.request.layout, dataclasses.replace(listed, every_micro_batch=True)
    times = listed.times()
    group = layout.tp * layout.cp
    return Job(
        program=listed.program,
        seconds=[end - start for start, end in zip(times.start_s, times.end_s, strict=True)],
        stretches={region: _stretches(region, listed, meetings, group > 1) for region in listed.program.regions},
        group=group,
        replicas=layout.devices // layout.pp // group,
    )


def _stretches(region: Region, listed: ListedStep, meetings: int, meets: bool) -> Stretches:
    """Split a region's seconds into computing and collectives of its group."""
    stage = listed.stages[region.stage]
    units = sum(count for _, count in stage.run) if region.unit < 0 else 1
    number = max(1, meetings * units // max(1, region.stop if region.unit < 0 else 1))
    spans = _SPANS[region.work](stage)
    whole = sum(span.seconds for span in spans)
    together = sum(s for span in spans for cause, s in span.shares_s.items() if cause.endswith(" communication"))
    share = together / whole if whole and meets else 0.0
    return Stretches(((1 - share) / number,) * number, (share / number,) * number)


_SPANS: dict[Work, Callable[[SimulatedStage], tuple[Span, ...]]] = {
    Work.FORWARD: lambda stage: (stage.forward,),
    Work.BACKWARD: lambda stage: (stage.recompute, stage.backward_input, stage.backward_weight),
    Work.BACKWARD_INPUT: lambda stage: (stage.recompute, stage.backward_input),
    Work.BACKWARD_WEIGHT: lambda stage: (stage.backward_weight,),
}


def checkpoint_bytes(simulated: Simulated) -> int:
    """Bytes of a checkpoint of all ranks: parameters and optimizer states, what replicas share once."""
    layout, stack = simulated.request.layout, simulated.request.stack
    whole = dataclasses.replace(layout, zero=0, shard=0)
    total = 0
    for stage in simulated.step.stages:
        for axes, number in stage.elements.items():
            roles = state_bytes({axes: number}, whole, stack)
            saved_bytes = roles[Role.PARAMETER] + roles[Role.OPTIMIZER_STATE]
            total += saved_bytes * (layout.devices // layout.pp // replicas(axes, layout))
    return total - (simulated.updated.saved_fewer_bytes if simulated.updated else 0)


def failures_of(
    simulated: Simulated,
    *,
    device_mtbf_hours: float,
    restart_s: float,
    storage_bytes_per_s: float,
    standstill_s: float | None = None,
) -> Failures:
    """Describe the failures of a job that repeats this step, for ``lading.sim.goodput``.

    Args:
        storage_bytes_per_s: Bytes a second at which all ranks together write checkpoints.
        standstill_s: Seconds that training waits for a checkpoint, which is then written beside training; None if it
            waits until the checkpoint is written.
    Raises:
        ConfigError: ``storage_bytes_per_s`` is not above 0, or as ``Failures``.
    """
    if not storage_bytes_per_s > 0:
        raise ConfigError(f"expected storage of more than 0 bytes a second, got {storage_bytes_per_s}")
    write_s = checkpoint_bytes(simulated) / storage_bytes_per_s
    return Failures(
        devices=simulated.request.layout.devices,
        device_mtbf_hours=device_mtbf_hours,
        restart_s=restart_s,
        checkpoint_s=write_s if standstill_s is None else standstill_s,
        write_s=0.0 if standstill_s is None else write_s,
    )
