"""Traces: the lists of ranks as they ran, as a Timeline of the ranks that are worth looking at."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lading.errors import ConfigError
from lading.ir.action import ActionKind
from lading.ir.program import COMPUTE as COMPUTE_STREAM
from lading.ir.timeline import Event, Timeline
from lading.sim.occupancy import occupancy
from lading.sim.rank_engine import RankTimes
from lading.sim.simulate import WAITING, Simulated

COMPUTE, NETWORK = "compute", "data-parallel network"
SEND_DOWN, SEND_UP = "send to the next stage", "send to the stage before"
#: Drawn though it takes no time.
_ALWAYS = (ActionKind.COMPUTE, ActionKind.SEND)
_NAMES = (COMPUTE, NETWORK, SEND_DOWN, SEND_UP, "receive")


def rank_timeline(times: RankTimes, *, ranks: Sequence[int] | None = None) -> Timeline:
    """Make the events of some classes of ranks, with a flow from each send to the action that uses what it brings.

    Args:
        ranks: Classes of ranks to show; all by default.
    Returns:
        A "predicted" timeline; ``rank_class`` of an event is its class, and action ids are the same whichever classes
        are shown.
    Raises:
        ConfigError: the program has no such class of ranks.
    """
    program = times.program
    last = len(program.ranks) - 1
    shown = list(range(last + 1)) if ranks is None else sorted(set(ranks))
    if bad := [rank for rank in shown if not 0 <= rank <= last]:
        raise ConfigError(f"expected pipeline ranks from 0 to {last}, got {bad}")
    events: list[Event] = []
    labels: dict[int, str] = {}
    send_of: dict[tuple[int, int], int] = {}
    receives: list[tuple[tuple[int, int], int]] = []
    for rank in shown:
        base, actions = program.bounds[rank], program.ranks[rank]
        received: dict[int, tuple[int, int]] = {}
        for number, kind in enumerate(actions.kind):
            key = (actions.storage[number], actions.micro_batch[number])
            receives += [(received[wait], base + number) for wait in actions.waits[number] if wait in received]
            if kind is ActionKind.RECV:
                received[number] = key
            elif kind is ActionKind.SEND:
                send_of[key] = base + number
            start_s, end_s = times.start_s[base + number], times.end_s[base + number]
            if kind in (ActionKind.RECV, ActionKind.RESHARD) or (end_s <= start_s and kind not in _ALWAYS):
                continue
            labels[base + number] = program.label(actions.action(number))
            events.append(Event(rank, _stream(kind, actions.stream[number], key, times), base + number, start_s, end_s))
    events.sort(key=lambda event: event.start_s)
    flows = tuple((send_of[key], taker) for key, taker in receives if key in send_of and send_of[key] in labels)
    return Timeline("predicted", tuple(events), (), labels, flows=flows)


def _stream(kind: ActionKind, stream: int, key: tuple[int, int], times: RankTimes) -> str:
    """Name of a stream; a send that computing waits for is drawn as a send."""
    if kind is ActionKind.SEND and stream == COMPUTE_STREAM:
        return SEND_DOWN if getattr(times.program.storages[key[0]], "forward", True) else SEND_UP
    return _NAMES[stream]


def step_timeline(simulated: Simulated, *, ranks: Sequence[int] | None = None) -> Timeline:
    """Make the timeline of a simulated step: actions of some pipeline ranks, their memory, and the waits at the end.

    Args:
        ranks: Pipeline ranks to show; by default the first two, one in the middle and the last.
    Raises:
        ConfigError: the pipeline has no such rank.
    """
    times = step_times(simulated)
    last = len(times.program.ranks) - 1
    shown = sorted({0, min(1, last), last // 2, last}) if ranks is None else sorted(set(ranks))
    drawn = rank_timeline(times, ranks=shown)
    occupancies = [occupancy(simulated, rank) for rank in shown]
    step_s = simulated.step.step_s
    equal_s = step_s - simulated.step.shares_s[WAITING]
    events, labels = list(drawn.events), dict(drawn.labels)
    for place, rank in enumerate(shown):
        number = times.program.bounds[-1] + place
        labels[number] = WAITING
        events.append(Event(rank, COMPUTE, number, equal_s, step_s))
    memory = tuple(sample for memory in occupancies for sample in memory.samples(f"rank {memory.rank}"))
    peak = max(memory.peak_bytes for memory in occupancies)
    return dataclasses.replace(drawn, events=tuple(events), labels=labels, memory=memory, peak_bytes=peak)


def step_times(simulated: Simulated) -> RankTimes:
    """Times of every action of a simulated step, every micro-batch among them."""
    step = simulated.step
    if step.times is not None:
        return step.times
    assert step.listed is not None
    return dataclasses.replace(step.listed, every_micro_batch=True).times()
