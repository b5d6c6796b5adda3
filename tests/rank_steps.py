"""Steps of ranks written down by hand: what runs when, on which stream, and what it waits for."""

from __future__ import annotations

import dataclasses

from lading.ir.action import Action, ActionKind
from lading.ir.graph import Op, OpKind, Phase, Role, StepGraph, Storage, Tensor
from lading.ir.job_timeline import JobTimeline, RankTimeline, rank_timeline
from lading.ir.layout import parse_layout
from lading.ir.program import ActionList, Program
from lading.ir.timeline import Event, Timeline

SEND, RECV, REDUCE = ActionKind.SEND, ActionKind.RECV, ActionKind.REDUCE_GRAD
#: Stream, kind and waits of an action, and when it runs.
Row = tuple[str, ActionKind, tuple[int, ...], float, float]


def op(*facts: tuple[str, int | str]) -> Op:
    kind = OpKind.COLLECTIVE if facts else OpKind.MATMUL
    return Op("c10d.made_up.default", Phase.FORWARD, (), facts, (), (), (), (), "layers.0", kind)


def program_of(layout: str, rows: list[Row], peer: int = 0) -> Program:
    """Program of actions that each run an operation of their own, but for moves."""
    over = parse_layout(layout).across("pp", "replicate", "shard")
    actions, ops = list[Action](), list[Op]()
    for number, (stream, kind, waits, _, _) in enumerate(rows):
        if kind is ActionKind.MOVE:
            actions.append(Action(number, kind, stream, storage=0, source="disk", target="device", waits=waits))
            continue
        facts = (("peer", peer), ("tag", 3), *over) if kind in (SEND, RECV) else over
        ops.append(op(*(facts if stream != "compute" else ())))
        actions.append(Action(number, kind, stream, op=len(ops) - 1, waits=waits))
    storages, tensors = (Storage("w", 4, Role.PARAMETER),), (Tensor(0, "float32", (1,), (1,)),)
    graph = StepGraph(storages, tensors, tuple(ops), (), (), ((),), ())
    return Program((ActionList().extend(actions),), graph, arena_bytes=4)


def rank_of(rank: int, layout: str, rows: list[Row], peer: int = 0, start_s: float = 0.0) -> RankTimeline:
    """Timeline of a rank whose actions are given."""
    program = program_of(layout, rows, peer)
    events = [Event(0, stream, number, begin, end) for number, (stream, _, _, begin, end) in enumerate(rows)]
    labels = {action.id: program.label(action) for action in program.actions}
    line = Timeline("measured", tuple(sorted(events, key=lambda e: e.start_s)), (), labels)
    return dataclasses.replace(rank_timeline(program, parse_layout(layout), rank, line), start_s=start_s)


def job_of(*ranks: RankTimeline) -> JobTimeline:
    return JobTimeline(plan="p", step=1, ranks=ranks)


def replica(rank: int, computed_s: float, reduced_s: float, start_s: float = 0.0) -> RankTimeline:
    """A replica that computes, reduces beside another second of computing, and steps."""
    return rank_of(rank, "dp2", rows_of_replica(computed_s, reduced_s), start_s=start_s)


def rows_of_replica(computed_s: float, reduced_s: float) -> list[Row]:
    """Actions of such a replica."""
    over_s = max(reduced_s, computed_s + 1)
    return [
        ("compute", ActionKind.COMPUTE, (), 0.0, computed_s),
        ("network", REDUCE, (0,), computed_s, reduced_s),
        ("compute", ActionKind.COMPUTE, (), computed_s, computed_s + 1),
        ("compute", ActionKind.STEP, (1,), over_s, over_s + 1),
    ]
