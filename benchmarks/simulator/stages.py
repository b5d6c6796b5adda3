"""A job of equal stages, whose seconds are given: to measure and to test what all ranks of a cluster do."""

from __future__ import annotations

from collections.abc import Mapping

from lading.ir.action import ActionKind, Work
from lading.ir.program import Border, Region
from lading.ir.schedules import Schedule
from lading.program.emit import RUN, ListShape, UnitShape, emit
from lading.sim.cluster import Job, Stretches
from lading.sim.rank_engine import Priced, action_seconds


def job_of(
    plan: Schedule,
    stretches: Mapping[Work, Stretches],
    *,
    send_s: tuple[float, float] = (0.0, 0.0),
    overlap: bool = True,
    end_s: float = 0.0,
    reduce_s: float = 0.0,
    **ranks: int,
) -> Job:
    """A job of equal stages; with ``reduce_s`` each is one unit whose gradients are reduced beside computing."""
    unit = UnitShape(("dp",), (((RUN, 0, 0),),) * 4)
    runs = (((unit, 1),),) * plan.stages
    alone = frozenset() if reduce_s else frozenset({"dp"})
    shape = ListShape(plan, runs, pipelined=True, single_rank_axes=alone, overlap_send=overlap, whole_first=False)
    program = emit(shape)

    def seconds(key: Priced) -> float:
        kind, what, _ = key
        if isinstance(what, Region):
            return stretches[what.work].total_s
        if kind is ActionKind.SEND and isinstance(what, Border):
            return send_s[not what.forward]
        return {ActionKind.REDUCE_GRAD: reduce_s, ActionKind.STEP: end_s}.get(kind, 0.0)

    return Job(
        program=program,
        seconds=action_seconds(program, seconds),
        stretches={region: stretches[region.work] for region in program.regions},
        **ranks,
    )
