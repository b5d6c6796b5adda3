"""Plans beside a cache that reacts: LRU, first in first out, furthest next use, and LRU that fetches one layer ahead.

And beside DTR, which evicts what is cheap to make again, and POET's integer program (``poet.py``).

    python benchmarks/planner/paging.py --models llama-1b-6-layers --machines h100 rtx4090 --budgets 50% 25%

A cache knows nothing of the step: an operation whose operand is away waits until it is back (a miss), and what has to
make room for it goes to the nearest lower tier, written if it was changed. It may use every byte of the budget, without
addresses. Nothing is recomputed. Seconds are exposed where nothing computes. Times are predicted, with each direction
of a tier at the rate that it has beside the other.
DTR and POET decide about activations only: optimizer states, or all that lasts, then wait on lower tiers. Their choices
go through Lading's lowering, so their transfers are scheduled, and misses are none of theirs.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from contest import best_of, dtr, poets

from lading import __version__
from lading.catalog.load import load_machine
from lading.errors import PlanInfeasible
from lading.ir.action import DEVICE
from lading.ir.expand import expand
from lading.ir.fold import block_items
from lading.ir.graph import StepGraph
from lading.ir.machine import Machine
from lading.ir.program import slot_bytes
from lading.memory.lifetime import lifetimes
from lading.planner.api import make_plan, step_costs, tier_limits
from lading.planner.residency import StepProblem
from lading.planner.streaming import persistent_away
from lading.sim.device_step import stall_s
from lading.units import format_seconds, share_or_bytes
from models import cases

#: Gives the priority by which a storage leaves, the least first.
Priority = Callable[["Cache", int], float]
_HEAD = "| model | machine | budget | policy | step | misses | exposed |"


@dataclass
class Cache:
    """Cache of a step's storages in the device's memory, run through one step after another.

    Attributes:
        ahead: Whether the next run of operations of one block is fetched while one runs.
        ready: When each resident storage is there, in seconds.
        dirty: Resident storages that a lower tier does not have as they are.
        free_s: When each direction of the tier is free.
    """

    step: StepProblem
    priority: Priority
    ahead: bool = False
    ready: dict[int, float] = field(default_factory=lambda: {})
    dirty: set[int] = field(default_factory=set[int])
    came: dict[int, int] = field(default_factory=lambda: {})
    used: dict[int, int] = field(default_factory=lambda: {})
    made: set[int] = field(default_factory=set[int])
    free_s: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "write": 0.0})
    position: int = 0
    ticket: int = 0
    bytes: int = 0
    misses: int = 0

    def __post_init__(self) -> None:
        self.sizes = [slot_bytes(storage.size_bytes) for storage in self.step.graph.storages]
        self.made.update(self.step.graph.persistent)
        self.runs = self._runs()

    def _runs(self) -> list[tuple[int, int]]:
        """First and last operation of the run of operations of one block that each operation is in, and of the next."""
        items = block_items(self.step.graph.ops)
        keys = [(item, op.phase) for item, op in zip(items, self.step.graph.ops, strict=True)]
        ends, end = [0] * len(keys), len(keys)
        for at in range(len(keys) - 1, -1, -1):
            if at + 1 < len(keys) and keys[at] != keys[at + 1]:
                end = at + 1
            ends[at] = end
        return [(end, ends[end] if end < len(keys) else end) for end in ends]

    def next_use(self, storage: int) -> int:
        """Operations until the next use, over the step's boundary."""
        uses, count = self.step.lives.uses[storage], len(self.step.graph.ops)
        later = next((use for use in uses if use >= self.position), None)
        if later is not None:
            return later - self.position
        return uses[0] + count - self.position if storage in self.step.graph.persistent and uses else 1 << 40

    def run(self) -> tuple[float, int]:
        """Seconds of a step and its misses, once the cache has seen two steps before."""
        clock = begin = 0.0
        for _ in range(3):
            begin, self.misses = clock, 0
            for position in range(len(self.step.graph.ops)):
                self.position = position
                clock = self._operation(clock)
            temporary = set(self.ready) - self.step.graph.persistent
            for storage in temporary:
                self._drop(storage)
            self.made &= self.step.graph.persistent
        return clock - begin, self.misses

    def _operation(self, clock: float) -> float:
        graph, at = self.step.graph, self.position
        reads, writes = graph.op_reads[at], graph.op_writes[at]
        locked = {*reads, *writes}
        start = clock
        for storage in dict.fromkeys((*reads, *writes)):
            if storage in self.made and self.ready.get(storage, clock + 1.0) > clock:
                self.misses += 1
            if storage not in self.ready:
                self._bring(storage, clock, locked)
            start = max(start, self.ready[storage])
            self.ticket += 1
            self.used[storage] = self.ticket
        if self.ahead:
            first, last = self.runs[at]
            coming = {s for i in range(first, last) for s in graph.op_reads[i]}
            kept = locked | {s for i in range(at, last) for s in (*graph.op_reads[i], *graph.op_writes[i])}
            for storage in sorted((coming & self.made) - self.ready.keys(), key=self.next_use):
                if self.bytes + self.sizes[storage] > self.step.arena_bytes and not self._victims(kept):
                    break
                self._bring(storage, clock, kept)
        self.made.update(writes)
        self.dirty.update(writes)
        end = start + self.step.costs.op_seconds[at]
        for storage in locked - graph.persistent:
            if self.step.lives.uses[storage][-1] == at:
                self._drop(storage)
        return end

    def _victims(self, locked: set[int]) -> list[int]:
        return [storage for storage in self.ready if storage not in locked]

    def _drop(self, storage: int) -> None:
        if storage in self.ready:
            del self.ready[storage]
            self.dirty.discard(storage)
            self.bytes -= self.sizes[storage]

    def _bring(self, storage: int, clock: float, locked: set[int]) -> None:
        """Make room for a storage, and fetch it if it has a value."""
        room_s = clock
        while self.bytes + self.sizes[storage] > self.step.arena_bytes:
            victim = min(self._victims(locked), key=lambda each: (self.priority(self, each), each))
            if victim in self.dirty:
                room_s = self._transfer(victim, "write", max(room_s, self.ready[victim]))
            self._drop(victim)
        fetched = storage in self.made
        self.ready[storage] = self._transfer(storage, "read", room_s) if fetched else room_s
        self.bytes += self.sizes[storage]
        self.ticket += 1
        self.came[storage] = self.ticket

    def _transfer(self, storage: int, way: str, start_s: float) -> float:
        tier = self.step.machine.tiers[0]
        rate = tier.mixed_read_bytes_per_s if way == "read" else tier.mixed_write_bytes_per_s
        start = max(start_s, self.free_s[way])
        self.free_s[way] = start + tier.latency_s + self.sizes[storage] / rate
        return self.free_s[way]


POLICIES: dict[str, tuple[Priority, bool]] = {
    "LRU": (lambda cache, storage: cache.used.get(storage, 0), False),
    "FIFO": (lambda cache, storage: cache.came[storage], False),
    "furthest next use": (lambda cache, storage: -cache.next_use(storage), False),
    "LRU, one layer ahead": (lambda cache, storage: cache.used.get(storage, 0), True),
}


def _deciding(step: StepProblem, start: str, limit_s: float) -> list[str]:
    """One line for each rival that decides before the step."""
    aways = [{}, *persistent_away(step)]
    offers = {
        "DTR": chain.from_iterable(dtr(step, away) for away in aways),
        "POET": chain.from_iterable(poets(step, away, limit_s) for away in aways),
    }
    found: list[str] = []
    for policy, offered in offers.items():
        plan = best_of(step, offered)
        if plan is None:
            found.append(f"{start}| {policy} | none found | | |")
            continue
        exposed = stall_s(plan.timeline, plan.program)
        found.append(f"{start}| {policy} | {format_seconds(plan.step_s)} | - | {format_seconds(exposed)} |")
    return found


def lines(name: str, graph: StepGraph, machine: Machine, budget: str, limit_s: float) -> list[str]:
    """One line for each cache and each rival, and one for the plan."""
    wide = dataclasses.replace(machine, device=dataclasses.replace(machine.device, memory_bytes=1 << 45))
    step = expand(graph)
    limits = {DEVICE: 1 << 60, **tier_limits(wide, {})}
    free = StepProblem(step, lifetimes(step), wide, step_costs(step, wide), limits)
    within = dataclasses.replace(free, budgets={**limits, DEVICE: share_or_bytes(budget, free.needs({}))})
    start = f"| {name} | {machine.name} | {budget} "
    found: list[str] = []
    for policy, (priority, ahead) in POLICIES.items():
        if within.is_hopeless:
            found.append(f"{start}| {policy} | does not fit | | |")
            continue
        seconds, misses = Cache(within, priority, ahead).run()
        computed = sum(within.costs.op_seconds)
        found.append(
            f"{start}| {policy} | {format_seconds(seconds)} | {misses} | {format_seconds(seconds - computed)} |"
        )
    found += _deciding(within, start, limit_s)
    try:
        planned = make_plan(step, wide, budget=budget)
    except PlanInfeasible:
        return [*found, f"{start}| plan | does not fit | | |"]
    exposed = stall_s(planned.predicted, planned.program)
    text = f"{format_seconds(planned.plan.step_s)} (bound {format_seconds(planned.plan.lower_bound_s)})"
    return [*found, f"{start}| plan | {text} | - | {format_seconds(exposed)} |"]


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", help="names of benchmarks/planner/models.py; all by default")
    parser.add_argument("--machines", nargs="*", default=["rtx4090", "h100"])
    parser.add_argument("--budgets", nargs="*", default=["50%", "25%"])
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of each of POET's programs")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    table = [f"Lading {__version__}; predicted times.", "", _HEAD, "|" + "---|" * (_HEAD.count("|") - 1)]
    print("\n".join(table))
    for case in cases():
        if chosen.models and case.name not in chosen.models:
            continue
        graph = case.graph()
        for machine in map(load_machine, chosen.machines):
            for budget in chosen.budgets:
                made = lines(case.name, graph, machine, budget, chosen.limit)
                print("\n".join(made), flush=True)
                table += made
    if chosen.out:
        chosen.out.write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
