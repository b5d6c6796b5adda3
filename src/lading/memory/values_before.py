"""Where values from before a step are while its updates run on a guess (``lading.ir.guess``)."""

from __future__ import annotations

from typing import NamedTuple

from lading.errors import ProgramError
from lading.ir.action import DEVICE, ActionKind
from lading.ir.guess import next_values, speculated, update_actions
from lading.ir.program import LINE_BYTES, Program
from lading.memory.tier_layout import home_tiers


class Before(NamedTuple):
    """Where the value from before a step is, of what is at home on the device and changes on a guess.

    Attributes:
        tier: Tier that has it; "" for a few bytes of which the executor makes a copy.
        action: Action of the step that puts it there; -1 where it is there when a step begins.
    """

    tier: str
    action: int


def values_before(program: Program) -> dict[int, Before]:
    """Where the value from before a step is, of each storage at home on the device that changes on a guess.

    Raises:
        ProgramError: it is nowhere.
    """
    found, alone = known_before(program), on_device_alone(program)
    if alone:
        raise ProgramError(
            f"expected the value of {program.graph.storages[min(alone)].name} in a lower tier until the norm of all "
            "gradients is known, found it on the device alone; plan again"
        )
    return found


def on_device_alone(program: Program) -> frozenset[int]:
    """Storages that change on a guess, and whose value from before the step is nowhere then."""
    homes, known = home_tiers(program), known_before(program)
    return frozenset(s for s in speculated(program.graph) if homes[s] == DEVICE and s not in known)


def known_before(program: Program) -> dict[int, Before]:
    """As ``values_before``, without those whose value is nowhere."""
    graph, homes = program.graph, home_tiers(program)
    changed = update_actions(graph, program.actions)
    again = next_values(graph, program.actions, program.host_tier).moves
    written: dict[int, list[Before]] = {}
    for action in program.actions:
        if action.kind is ActionKind.MOVE and action.storage in changed and action.source == DEVICE:
            before = Before(action.target, -1 if action.id in again else action.id)
            written.setdefault(action.storage, []).append(before)
    found: dict[int, Before] = {}
    for storage in changed:
        if homes[storage] != DEVICE:
            continue
        places = written.get(storage, [])
        early = [before for before in places if before.action >= 0]
        if early or len({before.tier for before in places}) == 1:
            found[storage] = (early or places)[-1]
        elif not places and graph.storages[storage].size_bytes <= LINE_BYTES:
            found[storage] = Before("", -1)
    return found
