"""A step of a pipeline: stages in the order of a schedule, and what data-parallel ranks exchange beside and behind it.

Where parameters are whole (zero 0 and 1) gradients are reduced as the last backward makes them, and what the optimizer
updated in parts is gathered before the next step.

[Note: cut in a pipeline]
zero 2 and zero 3 are one program there, PyTorch's: FSDP2 inside torch.distributed.pipelining (torch 2.13). A stage's
parameters are gathered before its first forward and stay until its last backward is done (stage.py,
backward_maybe_with_nosync: set_reshard_after_backward(False); torchtitan at b5bcd76, distributed/fsdp.py,
get_fsdp_reshard_after_forward_policy: none after forward where there is a pipeline). Gradients add up whole, in the
dtype of reductions; they are reduced once, behind the stage's last backward, and the rank computes on when that is done
(stage.py, perform_reduce_grad). Between steps a rank keeps its parts of parameters and states only.

GPipe and 1F1B gather a unit at a time inside the first forward, once its input is there, so each stage holds up the
first micro-batch (``_first_forward_s``). Other schedules run from lists of actions (schedules.py,
_add_unshard_reshard): a stage is gathered whole, up to three are there at once, and the gathers begin with the step
(``_late_s``). With more than three chunks stages are released and gathered again all the time (``gathering``).

DeepSpeed refuses both (runtime/pipe/engine.py: "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"), and of
Megatron's no run in a pipeline is known: under such a stack the same is simulated, and said.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lading.ir.graph import DTYPE_BYTES
from lading.ir.layout import Layout
from lading.ir.stack import Stack
from lading.program.schedules import Schedule, Work, schedule_of
from lading.sim.pipeline import Floats, PipelineRun, PipelineSeconds, simulate_pipeline
from lading.sim.step import (
    COPIES,
    DATA_PARALLEL,
    Exchange,
    Stage,
    Step,
    flops_of,
    host_s,
    shares_of,
    trained_of,
)

#: Stages that torch's lists of actions have gathered at once, and schedules that run without such a list.
GATHERED_AT_ONCE, _DIRECT = 3, ("gpipe", "1f1b")


def pipeline_step(
    stages: Sequence[Stage],
    layout: Layout,
    stack: Stack,
    exchange: Exchange,
    send_s: float,
    run: PipelineRun | None = None,
) -> Step:
    """A step of a pipeline.

    Args:
        stages: In the order of forward.
        send_s: Seconds of what one hands to the next.
        run: Of the same stages with whole parameters, where it is known.
    """
    plan = schedule_of(layout, rules="megatron" if stack.megatron_order else "torch")
    first = _first_forwards(plan, stages, layout, stack, exchange)
    if run is None or any(first):
        run = _run(plan, stages, first, stack, send_s)
    busiest = int(np.argmax(run.busy_s))  # whose seconds say why; the others wait for it
    busy = float(run.busy_s[busiest])
    ranks = [[stages[s] for s in plan.stages_of(rank)] for rank in range(layout.pp)]
    extra = {
        "bubble": run.makespan_s - busy,
        DATA_PARALLEL: _exposed_s(run, stages, layout, stack, exchange)
        + sum(first[s] for s in plan.stages_of(busiest))
        + tied_s(plan, stages, exchange),
        "optimizer": max(exchange.optimizer_s(trained_of(own)) for own in ranks),
        "host": max(host_s(own, stack, exchange) for own in ranks),
    }
    shares: dict[str, float] = {}
    for stage in ranks[busiest]:
        copies = {COPIES: sum(stage.copies_s) * layout.micro_batches} if any(stage.copies_s) else {}
        for name, value in shares_of(stage, layout.micro_batches, copies).items():
            shares[name] = shares.get(name, 0.0) + value
    shares |= extra
    if sums := max(sum(exchange.sums_s(stage.summed) for stage in own) for own in ranks):
        shares["tp communication"] = shares.get("tp communication", 0.0) + sums
    return Step(sum(shares.values()), shares, tuple(stages), run, flops_of(stages) * layout.micro_batches)


def tied_s(plan: Schedule, stages: Sequence[Stage], exchange: Exchange) -> float:
    """Seconds of summing the gradients of a tied weight's copies ([Note: tied weights] in lading.sim.phases)."""
    away = [stage.tied for place, stage in enumerate(stages) if plan.rank_of(place) != plan.rank_of(0)]
    copies = max(away, default=0)
    return exchange.copies_sum_s(copies) if copies else 0.0


def _run(plan: Schedule, stages: Sequence[Stage], first: Sequence[float], stack: Stack, send_s: float) -> PipelineRun:
    """Events; ``first`` is what each stage's first forward takes longer."""
    forward: Floats = np.array([s.forward.seconds + s.copies_s[0] for s in stages])
    if any(first):
        forward = np.repeat(forward[:, None], plan.micro_batches, axis=1)
        forward[:, 0] += first
    seconds = PipelineSeconds(
        forward=forward,
        backward=np.array([s.backward_s + s.copies_s[1] for s in stages]),
        backward_input=np.array([s.again.seconds + s.backward_input.seconds + s.copies_s[1] for s in stages]),
        backward_weight=np.array([s.backward_weight.seconds for s in stages]),
        send_forward=send_s,
        send_backward=send_s,
    )
    return simulate_pipeline(plan, seconds, overlap=bool(stack.hidden.get("pp", 0.0)) or plan.chunks > 1)


def held_up_s(run: PipelineRun, stages: Sequence[Stage], stack: Stack, exchange: Exchange) -> float:
    """Seconds by which gathering cut parameters makes a step longer ([Note: cut in a pipeline])."""
    gathers = [_gather_s(stage, stack, exchange) for stage in stages]
    if _is_direct(run.schedule):
        return sum(_first_forward_s(stage, gather_s) for stage, gather_s in zip(stages, gathers, strict=True))
    return max(_late_s(run, rank, gathers) for rank in range(run.schedule.ranks))


def _exposed_s(run: PipelineRun, stages: Sequence[Stage], layout: Layout, stack: Stack, exchange: Exchange) -> float:
    """Seconds by which exchanges between replicas make the step longer than its pipeline."""
    ranks = range(run.schedule.ranks)
    if layout.zero >= 2:
        reduces = [_reduce_s(stage, stack, exchange) for stage in stages]
        late = 0.0 if _is_direct(run.schedule) else held_up_s(run, stages, stack, exchange)
        return late + max(_reduced_end(run, rank, reduces) for rank in ranks) - run.makespan_s
    held = [[stages[s] for s in run.schedule.stages_of(rank)] for rank in ranks]
    ends = [_rank_end(run, rank, stages, layout, stack, exchange) for rank in ranks]
    return max(ends) - run.makespan_s + max(_rank_gather(own, stack, exchange) for own in held)


def _rank_end(
    run: PipelineRun, rank: int, stages: Sequence[Stage], layout: Layout, stack: Stack, exchange: Exchange
) -> float:
    """When a rank's gradients are reduced, where they are reduced as they come."""
    held = run.schedule.stages_of(rank)
    computed = float(run.end_s[rank][-1])
    if not stack.overlap_grad_reduce:
        return max(run.makespan_s, computed) + exchange.reduce_s(trained_of([stages[s] for s in held]))
    network = 0.0
    for stage in sorted(held, key=lambda s: float(run.gradients_ready_s[s])):
        ready = float(run.gradients_ready_s[stage])
        reduction, blocks = _in_buckets(stages[stage], layout, stack, exchange)
        begin = max(network, ready - stages[stage].backward_s * (1 - 1 / blocks))
        network = max(begin + reduction, ready + reduction / blocks)
    return max(run.makespan_s, network)


def _in_buckets(stage: Stage, layout: Layout, stack: Stack, exchange: Exchange) -> tuple[float, float]:
    """Seconds of a stage's reductions, and how many there are: equal buckets, or as if there were one of each unit."""
    if not layout.bucket_bytes:
        return exchange.reduce_s(stage.trained), max(1.0, sum(count for _, count in stage.run))
    size = sum(stage.trained.values()) * DTYPE_BYTES[stack.gradient_dtype]
    number = max(1, -(-size // layout.bucket_bytes))
    return number * exchange.reduce_s({axes: count // number for axes, count in stage.trained.items()}), number


def _rank_gather(held: Sequence[Stage], stack: Stack, exchange: Exchange) -> float:
    """Seconds for which a rank waits for updated parameters; beside computing, only for those of its first block."""
    whole = exchange.gather_s(trained_of(held))
    if not stack.overlap_param_gather:
        return whole
    return whole / max(1.0, sum(count for stage in held for _, count in stage.run))


def _is_direct(plan: Schedule) -> bool:
    return plan.kind in _DIRECT and plan.chunks == 1


def _gather_s(stage: Stage, stack: Stack, exchange: Exchange) -> float:
    """Gather all of a stage, and copy it out of the buffers."""
    return exchange.gather_s(stage.elements) + exchange.copies_s(stage.elements, stack.gather_copy_bytes)


def _reduce_s(stage: Stage, stack: Stack, exchange: Exchange) -> float:
    """Reduce all of a stage's gradients, and copy them into the buffers."""
    return exchange.reduce_s(stage.trained) + exchange.copies_s(stage.trained, stack.reduce_copy_bytes)


def _first_forwards(
    plan: Schedule, stages: Sequence[Stage], layout: Layout, stack: Stack, exchange: Exchange
) -> list[float]:
    """By how much each stage's first forward is longer, as its units are gathered meanwhile."""
    if layout.zero < 2 or not _is_direct(plan):
        return [0.0] * plan.stages
    return [_first_forward_s(stage, _gather_s(stage, stack, exchange)) for stage in stages]


def _first_forward_s(stage: Stage, gather_s: float) -> float:
    """Seconds for which a forward waits for its units, each gathered while the one before computes; equal units."""
    units = max(1.0, sum(count for _, count in stage.run))
    return gather_s / units + max(0.0, gather_s - stage.forward.seconds) * (units - 1) / units


def gathering(plan: Schedule, rank: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Stages that are released, and then gathered, before each action of a rank ([Note: cut in a pipeline])."""
    held = plan.stages_of(rank)
    chunks: list[int] = plan.orders[rank][:, 1].tolist()
    order = [held[chunk] for chunk in chunks]
    coming: list[tuple[int, ...]] = []
    for stage in reversed(order):
        behind = coming[-1] if coming else ()
        coming.append((stage, *[other for other in behind if other != stage])[:GATHERED_AT_ONCE])
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    there: tuple[int, ...] = ()
    for wanted in reversed(coming):
        gone = tuple(stage for stage in there if stage not in wanted)
        found.append((gone, tuple(stage for stage in wanted if stage not in there)))
        there = wanted
    return found


class _Change(NamedTuple):
    """An action of a rank before which stages are released and gathered, or that is the first to need one.

    Attributes:
        place: Number of the action.
        first: The stage that it needs, if it is the first since that was gathered.
    """

    place: int
    gone: tuple[int, ...]
    comes: tuple[int, ...]
    first: int | None


@lru_cache(maxsize=2048)
def _changes(plan: Schedule, rank: int) -> tuple[_Change, ...]:
    """``gathering`` without the actions at which nothing changes; the same for all layouts of a schedule."""
    held = plan.stages_of(rank)
    chunks: list[int] = plan.orders[rank][:, 1].tolist()
    stages = [held[chunk] for chunk in chunks]
    unused: set[int] = set()
    found: list[_Change] = []
    for place, (stage, (gone, comes)) in enumerate(zip(stages, gathering(plan, rank), strict=True)):
        unused |= set(comes)
        first = stage if stage in unused else None
        unused.discard(stage)
        if gone or comes or first is not None:
            found.append(_Change(place, gone, comes, first))
    return tuple(found)


@lru_cache(maxsize=2048)
def _last_backwards(plan: Schedule, rank: int) -> tuple[tuple[int, int], ...]:
    """Number of the action, and the stage, after which its gradients are final; in the order of actions."""
    held = plan.stages_of(rank)
    last: dict[int, int] = {}
    for place, (work, chunk, _, _) in enumerate(plan.orders[rank].tolist()):
        if work in (Work.BACKWARD, Work.BACKWARD_WEIGHT):
            last[held[chunk]] = place
    return tuple(sorted((place, stage) for stage, place in last.items()))


def most_gathered(plan: Schedule, rank: int, size_bytes: Sequence[int]) -> int:
    """Most bytes of gathered parameters of a rank at once.

    Args:
        size_bytes: Of each stage.
    """
    if _is_direct(plan):
        return sum(size_bytes[stage] for stage in plan.stages_of(rank))
    now = most = 0
    for change in _changes(plan, rank):
        now += sum(size_bytes[stage] for stage in change.comes) - sum(size_bytes[stage] for stage in change.gone)
        most = max(most, now)
    return most


def _late_s(run: PipelineRun, rank: int, gathers: Sequence[float]) -> float:
    """Seconds by which a rank is late as it waits for gathers, which begin when the action before has ended."""
    start_s, end_s = run.start_s[rank], run.end_s[rank]
    late = network = 0.0
    ready: dict[int, float] = {}
    for place, _, comes, first in _changes(run.schedule, rank):
        for stage in comes:
            network = max(network, float(end_s[place - 1]) + late if place else 0.0) + gathers[stage]
            ready[stage] = network
        if first is not None:  # later actions of the stage start later, so wait less
            late = max(late, ready[first] - float(start_s[place]))
    return late


def _reduced_end(run: PipelineRun, rank: int, reduces: Sequence[float]) -> float:
    """When a rank has reduced its gradients, each stage's behind its last backward; idle time takes up the delay."""
    start_s, end_s = run.start_s[rank], run.end_s[rank]
    idle = np.cumsum(np.maximum(0.0, start_s - np.concatenate([[0.0], end_s[:-1]])))
    late = taken = 0.0
    for place, stage in _last_backwards(run.schedule, rank):
        late = max(0.0, late - (float(idle[place]) - taken)) + reduces[stage]
        taken = float(idle[place])
    return float(end_s[-1]) + max(0.0, late - (float(idle[-1]) - taken))
