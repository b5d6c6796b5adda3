"""References of a simulated pipeline: a lower bound of its seconds, published bubbles, and most activations alive."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from tools.pipelines import PipelineSeconds

from lading.errors import SimulationError
from lading.ir.action import Work
from lading.ir.schedules import Schedule

_SPLIT = ("zero-bubble", "zbv", "dualpipe-v")


def lower_bound_s(plan: Schedule, seconds: PipelineSeconds) -> float:
    """Least seconds that any run of the schedule takes, whatever the sends do.

    The largest of what a micro-batch takes from end to end, and of each rank's work after the first input can reach it
    and before its last gradient can reach the first stage.

    Raises:
        SimulationError: as ``simulate_pipeline``.
    """
    forward, backward, inputs, weights, down, up = seconds.table(plan.stages, plan.micro_batches)
    split = plan.kind in _SPLIT
    both = np.minimum(backward, inputs + weights) if split else backward
    back = np.fmin(backward, inputs) if split else backward
    rank_of = np.array([plan.rank_of(s) for s in range(plan.stages)])
    hop = np.concatenate([[0.0], (rank_of[1:] != rank_of[:-1]).astype(float)])[:, None]
    down = np.concatenate([np.zeros_like(down[:1]), down[:-1]]) * hop
    reach = np.cumsum(forward + down, axis=0) - forward
    leave = np.cumsum(back + up * hop, axis=0) - back
    path = float(np.max(np.sum(forward + down + back + up * hop, axis=0)))
    best = [path]
    for rank in range(plan.ranks):
        stages = list(plan.stages_of(rank))
        head, tail = float(np.min(reach[stages])), float(np.min(leave[min(stages)]))
        busy = float(np.sum(forward[stages] + both[stages]))
        best.append(head + busy + (0.0 if split else tail))
    return max(best)


def closed_form_s(plan: Schedule, seconds: PipelineSeconds) -> float:
    """Seconds of a schedule whose stages are equal, by the published bubbles; unequal ones count by their mean.

    Exact for GPipe, 1F1B and interleaved without sends; within 3% otherwise while a send is shorter than a forward.

    Raises:
        SimulationError: seconds that the schedule needs are missing.
    Source: Narayanan 2021 (2104.04473) section 2.2; Qi 2023 (2401.10241) table 1; DualPipe's repository, its table.
    """
    means: list[float] = np.mean(seconds.table(plan.stages, plan.micro_batches), axis=(1, 2)).tolist()
    forward, backward, inputs, weights, down, up = means
    ranks, hops = plan.ranks, plan.ranks - 1
    send = (down + up) if ranks > 1 else 0.0
    both = backward if plan.kind not in _SPLIT else inputs + weights
    work = plan.micro_batches * plan.chunks * (forward + both)
    if np.isnan(work):
        raise SimulationError(
            f"schedule {plan.kind} needs the seconds of backward, whole or in halves, which are missing"
        )
    if plan.kind == "gpipe":
        return work + hops * (forward + both + send)
    if plan.kind == "1f1b":
        # A micro-batch's way to the last rank and back holds `ranks` of them: what sends add to it is paid once a way.
        return work + hops * (forward + both + send) + (plan.micro_batches - 1) // ranks * hops * send
    if plan.kind == "interleaved":
        return work + hops * (forward + both) + (plan.stages - 1) * send
    if plan.kind == "zero-bubble":
        return work + hops * max(forward + inputs - weights, forward) + hops * send
    if plan.kind == "zbv":
        return work + hops * forward + hops * send
    joint = seconds.joint * (forward + backward)
    return work + hops * (joint + backward - 3 * weights) + hops * send


def alive_peaks(
    plan: Schedule,
    saved: npt.ArrayLike,
    kept: npt.ArrayLike = 0.0,
    spike: npt.ArrayLike = 0.0,
    forward_spike: npt.ArrayLike | None = None,
) -> npt.NDArray[np.float64]:
    """Most that the activations of unfinished micro-batches take on each rank, whatever the actions last.

    Args:
        saved: Bytes that a micro-batch of each stage leaves from its forward to its backward; a number, or one a stage.
        kept: Bytes of them held from the input gradient to the weight gradient, where these are apart.
        spike: Bytes that an action of the stage takes on top while it runs.
        forward_spike: Bytes that a forward takes on top, where they differ.
    Returns:
        Bytes by rank. With ``saved`` 1: the most micro-batches under way, counted by chunk.
    """
    layers = (saved, kept, spike, spike if forward_spike is None else forward_spike)
    whole, half, top, forward = (np.broadcast_to(np.asarray(v, np.float64), (plan.stages,)) for v in layers)
    peaks = np.empty(plan.ranks)
    for rank, order in enumerate(plan.orders):
        stage = np.array(plan.stages_of(rank))[order[:, 1]]
        full, part = whole[stage], half[stage]
        change = np.choose(order[:, 0], (full, -full, part - full, -part))
        after = np.cumsum(change)
        running = np.where(change > 0, after, after - change)
        peaks[rank] = float(np.max(running + np.where(order[:, 0] == Work.FORWARD, forward[stage], top[stage])))
    return peaks
