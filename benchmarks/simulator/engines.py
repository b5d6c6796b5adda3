"""One pipeline on three engines: Lading's loop over orders, a heap of events, and simpy's processes.

Each takes the same actions and gives the same times; what differs is how the next event is found.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

from tools.pipelines import PipelineSeconds, simulate_pipeline

from lading.ir.action import Work
from lading.ir.schedules import Schedule


def lading_s(plan: Schedule, seconds: PipelineSeconds) -> float:
    """Makespan by ``simulate_pipeline``, every action's and send's times kept."""
    return simulate_pipeline(plan, seconds).makespan_s


class _Lists:
    """Actions of all ranks as plain lists: what each needs and posts, by a slot for every stage and micro-batch."""

    def __init__(self, plan: Schedule, seconds: PipelineSeconds) -> None:
        layers: list[list[list[float]]] = seconds.table(plan.stages, plan.micro_batches).tolist()
        half = plan.stages * plan.micro_batches
        self.nothing = 2 * half
        self.bounds = [0]
        self.lasts: list[float] = []
        self.needs: list[int] = []
        self.posts: list[int] = []
        self.sends: list[float] = []
        self.links: list[int] = []
        for rank, order in enumerate(plan.orders):
            for work, chunk, micro_batch, _ in order.tolist():
                stage, forward = plan.stage(rank, chunk), work == Work.FORWARD
                slot = (0 if forward else half) + stage * plan.micro_batches + micro_batch
                before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
                hands = work != Work.BACKWARD_WEIGHT
                goes = hands and 0 <= after < plan.stages
                step = plan.micro_batches * (after - stage)
                away = goes and plan.rank_of(after) != rank
                self.lasts.append(layers[work][stage][micro_batch])
                self.needs.append(slot if hands and 0 <= before < plan.stages else self.nothing)
                self.posts.append(slot + step if goes else self.nothing)
                self.sends.append(layers[4 if forward else 5][stage][micro_batch] if away else 0.0)
                self.links.append(3 * rank + ((0 if forward else 1) if away else 2))
            self.bounds.append(len(self.lasts))


def heap_s(plan: Schedule, seconds: PipelineSeconds) -> float:
    """Makespan by a heap of (time, serial, what, number): the end of an action, or an arrival."""
    jobs = _Lists(plan, seconds)
    at, stop = list(jobs.bounds[:-1]), jobs.bounds[1:]
    here, waits, link_free = {jobs.nothing}, dict[int, int](), [0.0] * (3 * plan.ranks)
    heap: list[tuple[float, int, int, int]] = []
    starts, ends, serial, now = [0.0] * jobs.bounds[-1], [0.0] * jobs.bounds[-1], 0, 0.0

    def begin(rank: int) -> None:
        nonlocal serial
        index = at[rank]
        if index == stop[rank]:
            return
        if jobs.needs[index] not in here:
            waits[jobs.needs[index]] = rank
            return
        serial += 1
        starts[index] = now
        heappush(heap, (now + jobs.lasts[index], serial, rank, -1))

    for rank in range(plan.ranks):
        begin(rank)
    while heap:
        now, _, rank, slot = heappop(heap)
        if slot >= 0:
            here.add(slot)
            if slot in waits:
                begin(waits.pop(slot))
            continue
        index = at[rank]
        ends[index] = now
        at[rank] += 1
        if jobs.posts[index] != jobs.nothing:
            link = jobs.links[index]
            link_free[link] = max(link_free[link], now) + jobs.sends[index]
            serial += 1
            heappush(heap, (link_free[link], serial, -1, jobs.posts[index]))
        begin(rank)
    return max(ends)


def simpy_s(plan: Schedule, seconds: PipelineSeconds) -> float:
    """Makespan by simpy: a process a rank, an event for each input, a process for each send."""
    import simpy

    jobs = _Lists(plan, seconds)
    env: Any = simpy.Environment()
    arrived = [env.event() for _ in range(jobs.nothing)]
    link_free, ends = [0.0] * (3 * plan.ranks), [0.0] * plan.ranks

    def send(index: int) -> Any:
        link = jobs.links[index]
        link_free[link] = max(link_free[link], env.now) + jobs.sends[index]
        yield env.timeout(link_free[link] - env.now)
        arrived[jobs.posts[index]].succeed()

    def run(rank: int) -> Any:
        for index in range(jobs.bounds[rank], jobs.bounds[rank + 1]):
            if jobs.needs[index] != jobs.nothing:
                yield arrived[jobs.needs[index]]
            yield env.timeout(jobs.lasts[index])
            if jobs.posts[index] != jobs.nothing:
                env.process(send(index))
        ends[rank] = env.now

    for rank in range(plan.ranks):
        env.process(run(rank))
    env.run()
    return max(ends)


ENGINES = {"lading": lading_s, "heap": heap_s, "simpy": simpy_s}
