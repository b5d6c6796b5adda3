"""All ranks of a plan in one process: each runs its Program by the real executor, on a thread of its own.

What ranks tell each other goes through queues, so a test needs no launcher, and takes no longer than the arithmetic.
Nothing that draws random numbers runs so: torch has one generator for a process.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import torch

from lading.ir.graph import StepGraph
from lading.ir.layout import Layout
from lading.ir.plan import Plan
from lading.memory.restore import planned_optimizer, planned_step, programs_of
from lading.runtime.executor import Executor
from lading.runtime.named import NamedValues
from lading.runtime.value_layout import values_here, values_of, values_of_ranks

#: Seconds after which ranks that wait for each other are said to be stuck.
STUCK_S = 60.0


class Mail:
    """Queues of what ranks tell each other, by anything that names them."""

    def __init__(self) -> None:
        self.lock, self.queues = threading.Lock(), dict[object, "Queue[torch.Tensor]"]()

    def __getitem__(self, key: tuple[object, ...]) -> Queue[torch.Tensor]:
        with self.lock:  # two threads could make one each
            return self.queues.setdefault(key, Queue())


class ThreadRank:
    """A rank among threads: a ``lading.runtime.binding.Reducer``, which adds up in the order of the ranks."""

    def __init__(self, layout: Layout, rank: int, mail: Mail) -> None:
        self.layout, self.rank, self.mail = layout, rank, mail
        self.turns: dict[str, int] = defaultdict(int)

    def number(self, over: str) -> int:
        return self.layout.group(self.rank, over).index(self.rank)

    def _told(self, over: str, values: torch.Tensor) -> list[torch.Tensor]:
        """What all ranks over some axes say in their next collective."""
        ranks, turn = self.layout.group(self.rank, over), self.turns[over]
        self.turns[over] += 1
        for other in ranks:
            self.mail[over, turn, self.rank, other].put(values.clone())
        return [self._take(over, turn, other, self.rank) for other in ranks]

    def _take(self, *key: object) -> torch.Tensor:
        return self.mail[key].get(timeout=STUCK_S)

    def sum_(self, values: torch.Tensor, over: str) -> None:
        total, *others = self._told(over, values)
        for other in others:
            total += other
        values.copy_(total)

    def mean_(self, values: torch.Tensor, over: str) -> None:
        self.sum_(values, over)
        values.div_(len(self.layout.group(self.rank, over)))

    def reduce_scatter(self, shard: torch.Tensor, values: torch.Tensor, over: str, *, mean: bool = True) -> None:
        count, number = len(shard), self.number(over)
        total, *others = [each[number * count : (number + 1) * count] for each in self._told(over, values)]
        shard.copy_(total)
        for other in others:
            shard += other
        if mean:
            shard.div_(1 + len(others))

    def all_gather(self, values: torch.Tensor, shard: torch.Tensor, over: str) -> None:
        values.copy_(torch.cat(self._told(over, shard)))

    def all_to_all(self, arrived: torch.Tensor, values: torch.Tensor, over: str) -> None:
        number, count = self.number(over), len(self.layout.group(self.rank, over))
        arrived.copy_(torch.cat([each.chunk(count)[number] for each in self._told(over, values)]))

    def broadcast(self, values: torch.Tensor, source: int, over: str) -> None:
        values.copy_(self._told(over, values)[source])

    def send(self, values: torch.Tensor, peer: int, tag: int, over: str) -> None:
        self.mail["sent", self.rank, self.layout.group(self.rank, over)[peer], tag].put(values.clone())

    def mailbox(self, size_bytes: int, peer: int, tag: int, over: str) -> _Mailbox:
        return _Mailbox(self.mail["sent", self.layout.group(self.rank, over)[peer], self.rank, tag])


class _Mailbox:
    def __init__(self, queue: Queue[torch.Tensor]) -> None:
        self.queue = queue

    def post(self) -> None:
        """Do nothing: a queue takes what is sent whether or not it was asked for."""

    def take(self, values: torch.Tensor) -> None:
        values.copy_(self.queue.get(timeout=STUCK_S).view_as(values))


@contextmanager
def opened(plan: Plan, captured: StepGraph, folder: Path) -> Generator[list[tuple[NamedValues, Executor]], None, None]:
    """Open the values and the executor of every rank of a plan."""
    layout, mail = plan.parsed_layout, Mail()
    stages = [planned_step(each, captured) for each in (plan, *plan.peers)] if plan.peers else []
    with ExitStack() as stack:
        ranks: list[tuple[NamedValues, Executor]] = []
        for rank in range(plan.ranks):
            mine, others = plan.of_rank(rank), ThreadRank(layout, rank, mail)
            program = programs_of(mine, captured, ())[0]
            here = folder / f"rank {rank}"
            here.mkdir()
            executor = stack.enter_context(
                Executor(program, optimizer=planned_optimizer(mine), folder=here, replicas=others)
            )
            values = values_of_ranks(stages, mine.choices.rank) if stages else values_of(program.graph)
            first = {alias: p.names[0] for p in captured.parameters for alias in p.names}
            named = NamedValues(values_here(values, others), first, program.graph, executor, others)  # type: ignore[arg-type]
            ranks.append((named, executor))
        yield ranks


def play(
    plan: Plan,
    captured: StepGraph,
    initial: Mapping[str, torch.Tensor],
    batches: Callable[[int, int], Sequence[Mapping[str, torch.Tensor]]],
    steps: int,
    folder: Path,
) -> list[tuple[dict[str, torch.Tensor], list[list[float]]]]:
    """Run steps of a plan on all its ranks, and give each one's values and the losses that it was told.

    Args:
        initial: Parameters and buffers by name.
        batches: Gives the micro-batches of a step and a replica.
    """
    with opened(plan, captured, folder) as ranks:

        def run(rank: int) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
            named, executor = ranks[rank]
            for name, value in initial.items():
                named.write(name, value)
            replica = plan.parsed_layout.replica(rank)
            lr = planned_optimizer(plan).lr
            losses = [executor.step(batches(step, replica), lr=lr) for step in range(steps)]
            return {name: named.read(name) for name in sorted(named)}, [[float(x) for x in each] for each in losses]

        return on_threads(run, plan.ranks)


def on_threads(run: Callable[[int], Any], ranks: int) -> list[Any]:
    """Call ``run(rank)`` on a thread each; the first error of one is raised."""
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            results[rank] = run(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(ranks)]
