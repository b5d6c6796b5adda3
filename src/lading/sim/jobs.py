"""Jobs: a simulated step as what every rank of a cluster does, and as what failures would cost it."""

from __future__ import annotations

import dataclasses

import numpy as np

from lading.errors import ConfigError
from lading.ir.graph import Role
from lading.memory.ranks import replicas, state_bytes
from lading.program.schedules import Schedule, Work, schedule
from lading.sim.cluster import Job, Stretches
from lading.sim.goodput import Failures
from lading.sim.parts import Span
from lading.sim.piped import held_up_s, tied_s
from lading.sim.prices import MachinePrices
from lading.sim.simulate import Simulated
from lading.sim.step import DATA_PARALLEL, Stage


def job_of(simulated: Simulated, *, meetings: int = 2) -> Job:
    """All ranks of a simulated step, for ``simulate_cluster``.

    Equal ranks take as long as the step less what it has for waiting for the slowest, within 2%.

    A stage's computing is cut into equal stretches, and its collectives are spread over their ends. Parameters that are
    cut (FSDP) are gathered and reduced by all ranks that they are cut over, who meet there.

    Args:
        meetings: How often a group meets in a block on its way forward, and on its way back: 2 are those of attention
            and of the MLP.
    Ignores: that blocks, and the stretches of a block, differ.
    """
    layout, step = simulated.request.layout, simulated.step
    run = step.pipeline
    plan = schedule("1f1b", 1, 1, layout.micro_batches) if run is None else run.schedule
    group, shared_s = layout.tp * layout.cp, 0.0
    together = layout.zero == 3 and run is None
    if together:
        group = layout.tp * layout.sharding_ranks
        shared_s = max(0.0, step.shares_s.get(DATA_PARALLEL, 0.0)) / layout.micro_batches
    job = Job(
        plan=plan,
        work={kind: [_stretches(s, kind, meetings, shared_s, group > 1) for s in step.stages] for kind in Work},
        group=group,
        replicas=layout.devices // layout.pp // group,
        send_forward=0.0 if run is None else run.send_s,
        send_backward=0.0 if run is None else run.send_s,
        overlap=run is None or run.overlap,
        end_s=step.shares_s.get("optimizer", 0.0) + step.shares_s.get("host", 0.0),
    )
    return job if together else _reduced(job, simulated)


def _stretches(stage: Stage, kind: Work, meetings: int, shared_s: float, meets: bool) -> Stretches:
    """What a stage does in an action, with its part of what all ranks exchange for a micro-batch."""
    spans: dict[Work, tuple[tuple[Span, ...], float]] = {
        Work.FORWARD: ((stage.forward,), 1 / 3),
        Work.BACKWARD: ((stage.again, stage.backward_input, stage.backward_weight), 2 / 3),
        Work.BACKWARD_INPUT: ((stage.again, stage.backward_input), 1 / 3),
        Work.BACKWARD_WEIGHT: ((stage.backward_weight,), 1 / 3),
    }
    held, part = spans[kind]
    number = max(1, meetings * sum(count for _, count in stage.run))
    together = sum(s for span in held for cause, s in span.shares_s.items() if cause.endswith(" communication"))
    together = together if meets else 0.0
    copies_s = stage.copies_s[0] if kind is Work.FORWARD else 0.0 if kind is Work.BACKWARD_WEIGHT else stage.copies_s[1]
    alone = sum(span.seconds for span in held) + copies_s - together
    together += shared_s * part
    return Stretches((alone / number,) * number, (together / number,) * number)


def _reduced(job: Job, simulated: Simulated) -> Job:
    """The job with its reductions and gathers, beside computing or after it as the stack has them."""
    layout, stack, stages = simulated.request.layout, simulated.request.stack, simulated.step.stages
    prices = MachinePrices(simulated.machine, layout, stack)
    whole = np.array([prices.reduce_s(stage.elements) for stage in stages])
    blocks = np.array([max(1.0, sum(count for _, count in stage.run)) for stage in stages])
    backward = np.array([stage.backward_s for stage in stages])
    gathers = np.array([prices.gather_s(stage.elements) for stage in stages])
    held = [list(job.plan.stages_of(rank)) for rank in range(job.plan.ranks)]
    waits = [float(gathers[own].sum()) for own in held]
    if stack.overlap_param_gather:
        waits = [wait / float(blocks[own].sum()) for wait, own in zip(waits, held, strict=True)]
    job = dataclasses.replace(job, end_s=job.end_s + tied_s(job.plan, stages, prices))
    end_s = job.end_s + max(waits)
    if layout.cuts_parameters:  # behind the last backward, and gathered within the first forwards
        late_s = held_up_s(simulated.step.pipeline, stages, stack, prices) if simulated.step.pipeline else 0.0
        return dataclasses.replace(job, reduce_s=_at_last(job.plan, whole), end_s=job.end_s + late_s)
    if stack.overlap_grad_reduce:
        ahead, tail = backward * (1 - 1 / blocks), whole / blocks
        return dataclasses.replace(job, reduce_s=whole, ahead_s=ahead, tail_s=tail, end_s=end_s)
    return dataclasses.replace(job, reduce_s=_at_last(job.plan, whole), end_s=end_s)


def _at_last(plan: Schedule, whole: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
    """All of a rank's reductions on the stage whose gradients are there last."""
    found = [0.0] * plan.stages
    for rank, order in enumerate(plan.orders):
        stages = plan.stages_of(rank)
        found[stages[int(order[-1, 1])]] = float(sum(whole[stage] for stage in stages))
    return found


def checkpoint_bytes(simulated: Simulated) -> int:
    """Bytes of a checkpoint of all ranks: parameters and optimizer states, what replicas share once."""
    layout, stack = simulated.request.layout, simulated.request.stack
    whole = dataclasses.replace(layout, zero=0, shard=0)
    total = 0
    for stage in simulated.step.stages:
        for axes, number in stage.elements.items():
            roles = state_bytes({axes: number}, whole, stack)
            kept = roles[Role.PARAMETER] + roles[Role.OPTIMIZER_STATE]
            total += kept * (layout.devices // layout.pp // replicas(axes, layout))
    return total - (simulated.updated.saved_fewer_bytes if simulated.updated else 0)


def failures_of(
    simulated: Simulated,
    *,
    device_mtbf_hours: float,
    restart_s: float,
    storage_bytes_per_s: float,
    standstill_s: float | None = None,
) -> Failures:
    """What failures cost a job of this step, for ``lading.sim.goodput``.

    Args:
        storage_bytes_per_s: At which all ranks together write checkpoints.
        standstill_s: Seconds that training stands still for one, which is then written beside it; None where it stands
            still until it is written.
    Raises:
        ConfigError: storage that takes no bytes, or as ``Failures``.
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
