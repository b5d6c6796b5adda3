"""Local search: a placement changed a little, again and again, kept when it simulates faster (or fits better).

A change moves one group, or a run of neighbors, to another device, moves the border between two parts, or exchanges
two groups or two devices. One that is a little slower is kept too, at first by 5%, at last not at all, so that the
search leaves where no single change helps. So is one that does not fit, counted longer by the memory it lacks, mildly
at first: the way between two that fit often leads through some that do not. The best seen counts. Changes are drawn
from a generator with a fixed seed and counted, not timed: same problem, same placement.
"""

from __future__ import annotations

from random import Random

from lading.ir.placement import Placement
from lading.planner.placement.trial import Trial, key_of

#: Changes tried: at least, and at most for each unit of effort.
_FEWEST, _MOST = 20, 200
_LOOSE = 0.05
#: What lacks all memory there is counts so many times its step more, at first and at last.
_MILD, _HARD = 5.0, 1000.0


def improve(trial: Trial, start: Placement, effort: float) -> Placement:
    """Search for faster placements from ``start`` by random changes; returns the best.

    Args:
        effort: How much is simulated, in units of 100,000 tasks and flows.
    """
    problem = trial.problem
    count = len(problem.network.devices)
    if count == 1:
        return start
    random, memory = Random(0), problem.network.memory_bytes
    steps = int(min(max(_FEWEST, trial.affordable(effort)), effort * _MOST))
    current, best, room = start, start, sum(memory)

    def worth(placement: Placement, done: float) -> float:
        missing, step_s = key_of(placement, memory)
        return step_s * (1 + _MILD * (_HARD / _MILD) ** done * missing / room)

    for step in range(steps):
        devices = _changed(current, random, count)
        if devices == list(current.devices) or not trial.can_run(devices):
            continue
        changed = trial.of(devices, start.policy)
        done = step / steps
        if worth(changed, done) <= worth(current, done) * (1 + _LOOSE * (1 - done)):
            current = changed
        if key_of(changed, memory) < key_of(best, memory):
            best = changed
    return best


def _changed(placement: Placement, random: Random, count: int) -> list[int]:
    """Change a placement at random in one way; returns the device of each group."""
    devices, kind = list(placement.devices), random.random()
    if kind < 0.35 and len(placement.parts) > 1:
        _move_border(placement, devices, random)
    elif kind < 0.5:
        devices[random.randrange(len(devices))] = random.randrange(count)
    elif kind < 0.7:
        first = random.randrange(len(devices))
        size = _size(random, len(devices) - first)
        devices[first : first + size] = [random.randrange(count)] * size
    elif kind < 0.9:
        a, b = random.randrange(len(devices)), random.randrange(len(devices))
        devices[a], devices[b] = devices[b], devices[a]
    else:
        a, b = random.randrange(count), random.randrange(count)
        devices = [b if d == a else a if d == b else d for d in devices]
    return devices


def _move_border(placement: Placement, devices: list[int], random: Random) -> None:
    parts = placement.parts
    place = random.randrange(len(parts) - 1)
    left, right = parts[place], parts[place + 1]
    if random.random() < 0.5:
        size = _size(random, right.last - right.first + 1)
        devices[right.first : right.first + size] = [left.device] * size
    else:
        size = _size(random, left.last - left.first + 1)
        devices[left.last + 1 - size : left.last + 1] = [right.device] * size


def _size(random: Random, most: int) -> int:
    """Draw a number from 1 to ``most``, small ones more often."""
    return min(most, 1 << random.randrange(most.bit_length()))
