"""Queues of a rank's actions: whichever thread does an action, what comes before it stays before it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tests.rank_steps import Row, program_of

from lading.ir.action import ActionKind
from lading.ir.program import COMPUTE_STREAM, NETWORK_STREAM, Program
from lading.runtime.binding import Bound, queues, taken_over
from lading.runtime.device import Call, CpuDevice

_COMPUTE, _REDUCE, _MOVE = ActionKind.COMPUTE, ActionKind.REDUCE_GRAD, ActionKind.MOVE


def row(stream: str, *waits: int) -> Row:
    kind = {COMPUTE_STREAM: _COMPUTE, NETWORK_STREAM: _REDUCE}.get(stream, _MOVE)
    return stream, kind, waits, 0.0, 0.0


def nothing() -> None:
    return None


def queued(program: Program, runs: list[Call | None], taken: frozenset[int]) -> Bound:
    device = CpuDevice()
    return queues(program, runs, [device.lane(name, blocking=True) for name in program.streams], taken, None)


def before(order: Sequence[set[int]]) -> list[set[int]]:
    """All that comes before each action, from what is known to come right before it."""
    every: list[set[int]] = []
    for known in order:
        every.append(known.union(*(every[one] for one in known)))
    return every


def in_program(program: Program) -> list[set[int]]:
    last: dict[str, int] = {}
    order: list[set[int]] = []
    for action in program.actions:
        order.append({*action.waits, *([last[action.stream]] if action.stream in last else [])})
        last[action.stream] = action.id
    return before(order)


def in_queues(bound: Bound, count: int) -> list[set[int]]:
    order: list[set[int]] = [set() for _ in range(count)]
    for actions, entries in zip(bound.actions, bound.entries, strict=True):
        begun = 0
        for number, action in enumerate(actions):
            order[action] |= {actions[number - 1]} if number else set()
            entry = next((each for each in entries if each.action == action), None)
            if entry is not None:
                begun += 1
                order[action] |= {bound.actions[stream][ended - 1] for stream, ended in entry.waits}
        assert begun == len(entries)
    return before(order)


@pytest.mark.parametrize("seed", range(40))
def test_order(seed: int) -> None:
    """Random programs: each action still comes after all that it came after."""
    draw = random.Random(seed)
    streams = (COMPUTE_STREAM, COMPUTE_STREAM, NETWORK_STREAM, NETWORK_STREAM, "disk_read")
    rows = [
        row(draw.choice(streams), *sorted(draw.sample(range(number), draw.randint(0, min(2, number)))))
        for number in range(30)
    ]
    program = program_of("dp2", rows)
    runs: list[Call | None] = [nothing if draw.random() < 0.8 else None for _ in rows]
    taken = taken_over(program, runs)
    bound = queued(program, runs, taken)
    for asked, held in zip(in_program(program), in_queues(bound, len(rows)), strict=True):
        assert asked <= held
    assert {a for a in taken if runs[a] is not None} <= {e.action for queue in bound.entries for e in queue}


def test_taken_over() -> None:
    """The compute stream does what it could only wait for; what runs beside it stays with the network's thread."""
    rows = [
        row(COMPUTE_STREAM),
        row(NETWORK_STREAM, 0),  # nothing to compute meanwhile
        row(COMPUTE_STREAM, 1),
        row(NETWORK_STREAM, 2),  # beside the next
        row(COMPUTE_STREAM),
        row(COMPUTE_STREAM, 3),
        row(NETWORK_STREAM, 5),  # nobody waits for it
    ]
    program = program_of("dp2", rows)
    assert taken_over(program, [nothing] * 7) == {1}
    bound = queued(program, [nothing] * 7, taken_over(program, [nothing] * 7))
    assert [entry.action for entry in bound.entries[program.streams.index(COMPUTE_STREAM)]] == [0, 1, 2, 4, 5]


def test_freed_behind() -> None:
    """What the network frees behind such an action wakes no thread; what waits for another stream does not hold it."""
    rows = [row(COMPUTE_STREAM), row(NETWORK_STREAM, 0), row(NETWORK_STREAM), row("disk_read"), row(COMPUTE_STREAM, 1)]
    rows.append(row(NETWORK_STREAM, 3))
    program = program_of("dp2", rows)
    runs: list[Call | None] = [nothing, nothing, None, nothing, nothing, None]
    assert taken_over(program, runs) == {1, 2}
    bound = queued(program, runs, taken_over(program, runs))
    assert [e.action for e in bound.entries[program.streams.index(NETWORK_STREAM)]] == [5]
