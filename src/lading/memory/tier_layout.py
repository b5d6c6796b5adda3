"""The parts of a Program that do not move: budgets, slots of the lower tiers, and where each storage is at home."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lading.errors import ProgramError
from lading.ir.action import DEVICE
from lading.ir.graph import PERSISTENT, StepGraph
from lading.ir.machine import Tier, outdoes
from lading.ir.program import LINE_BYTES, PAGE_BYTES, Homes, Program, slot_bytes


@dataclass(frozen=True, slots=True)
class Location:
    """Place of a copy of a storage: a tier, and an offset in bytes in the arena or in that tier."""

    tier: str
    offset: int


def home_tiers(program: Program) -> dict[int, str]:
    """Tier that has each persistent storage's value between two steps.

    That is "device" for what is in ``resident``; otherwise the tier that has a slot for it, the farthest if several
    have. Copies anywhere else are worth nothing when a step starts.

    Raises:
        ProgramError: a persistent storage has neither.
    """
    homes = {storage: tier.name for tier in program.tiers for storage, _ in program.slots.get(tier.name, ())}
    homes.update((storage, DEVICE) for storage, _ in program.resident)
    persistent = sorted(program.graph.persistent)
    for index in persistent:
        if index not in homes:
            storage = program.graph.storages[index]
            raise ProgramError(
                f"expected persistent storage {index} ({storage.name}) in `resident` or in a tier's slots, "
                f"found it in neither; give it a home"
            )
    return {index: homes[index] for index in persistent}


def passing_on_host(program: Program) -> frozenset[int]:
    """Storages that are in the host's memory only to be worked on there: their slots may lie over each other.

    That is what does not outlive the step, and what is at home in a tier behind the host.
    """
    graph, names = program.graph, [tier.name for tier in program.tiers]
    if not program.host_tier or not graph.hosted:
        return frozenset()
    far = {s for tier in names[names.index(program.host_tier) + 1 :] for s, _ in program.slots.get(tier, ())}
    lasting = graph.persistent - (far - {s for s, _ in program.resident})
    return graph.host_storages - lasting


def homes_of(program: Program) -> Homes:
    """Places of what lasts from step to step, whichever step is run; gradients of deferred updates do not."""
    roles = [storage.role for storage in program.graph.storages]
    tiers = {storage: tier for storage, tier in home_tiers(program).items() if roles[storage] in PERSISTENT}
    slots = {name: dict(pairs) for name, pairs in program.slots.items()}
    places: dict[str, dict[int, int]] = {}
    for storage, tier in tiers.items():
        if tier != DEVICE:
            places.setdefault(tier, {})[storage] = slots[tier][storage]
    return Homes({s: offset for s, offset in program.resident if tiers.get(s) == DEVICE}, places)


def alignment_of(size_bytes: int) -> int:
    """Alignment in bytes, in the arena, of a storage of ``size_bytes``."""
    return PAGE_BYTES if size_bytes >= PAGE_BYTES else LINE_BYTES


def check_layout(program: Program) -> None:
    """Check budgets, slots and ``resident`` for names and ids; residencies' addresses are checked with the actions.

    Raises:
        ProgramError: naming the tier or storage.
    """
    names = [tier.name for tier in program.tiers]
    if unknown := program.slots.keys() - set(names):
        raise ProgramError(f"expected slots in tiers among {names}, found {sorted(unknown)}; rename them")
    if min(program.arena_bytes, program.workspace_bytes, program.overhead_bytes, program.save_bytes) < 0:
        raise ProgramError(
            "expected arena_bytes, workspace_bytes, overhead_bytes and save_bytes >= 0, found a negative one; fix it"
        )
    _check_budget(program, DEVICE, program.peak_bytes)
    for tier in program.tiers:
        slots = program.slots.get(tier.name, ())
        _check_ids(program, f"slots of {tier.name}", slots)
        _check_slots(program, tier, slots)
        _check_budget(program, tier.name, program.tier_bytes(tier.name))
    _check_ids(program, "`resident`", program.resident)
    for storage, _ in program.resident:
        if storage not in program.graph.persistent:
            raise ProgramError(
                f"expected only persistent storages in `resident`, found storage {storage} "
                f"({program.graph.storages[storage].name}), which does not outlive the step; remove it"
            )


def _check_budget(program: Program, tier: str, used_bytes: int) -> None:
    if used_bytes and tier not in program.budgets:
        raise ProgramError(f"expected a budget for tier {tier}, which needs {used_bytes} bytes, found none; add one")
    if used_bytes > program.budgets.get(tier, 0):
        raise ProgramError(
            f"expected at most {program.budgets[tier]} bytes in tier {tier}, found {used_bytes}; "
            f"raise the budget by {used_bytes - program.budgets[tier]} bytes or plan again"
        )


def _check_ids(program: Program, what: str, pairs: tuple[tuple[int, int], ...]) -> None:
    seen: set[int] = set()
    for storage, _ in pairs:
        if not 0 <= storage < len(program.graph.storages):
            raise ProgramError(f"expected storage ids in 0..{len(program.graph.storages) - 1} in {what}, got {storage}")
        if storage in seen:
            raise ProgramError(f"expected each storage once in {what}, found storage {storage} twice; keep one")
        seen.add(storage)


def _check_slots(program: Program, tier: Tier, slots: tuple[tuple[int, int], ...]) -> None:
    end, owner, shared_end = 0, -1, 0
    hosts = tier.name == program.host_tier
    staged = passing_on_host(program) if hosts else frozenset[int]()
    for storage, offset in sorted(slots, key=lambda pair: pair[1]):
        if offset < 0 or offset % tier.alignment_bytes:
            raise ProgramError(
                f"expected slot offsets at multiples of {tier.alignment_bytes} B, found storage {storage} at {offset} "
                f"of {tier.name}"
            )
        if offset < (end if storage in staged else max(end, shared_end)):
            raise ProgramError(f"slots of storages {owner} and {storage} overlap in {tier.name} at {offset}; move one")
        behind = offset + slot_bytes(program.graph.storages[storage].size_bytes)
        if storage in staged:  # those that are there only to be worked on may follow each other in one place
            shared_end = max(shared_end, behind)
        else:
            end, owner = behind, storage


def usable_tiers(
    tiers: Sequence[Tier], limits: Mapping[str, int], graph: StepGraph, homes: Homes | None, *, searched: bool
) -> tuple[Tier, ...]:
    """Tiers that a plan may use: those with room that no nearer one with room for everything outdoes.

    A disk behind a GPU's link is no faster than the host's memory on the same link, and adds nothing to it.

    Args:
        limits: Bytes by tier.
        searched: Whether the plan is searched; a policy may name any tier with room.
    """
    usable = [tier for tier in tiers if limits[tier.name]]
    if not searched:
        return tuple(usable)
    wanted = homes.slots.keys() if homes else frozenset[str]()

    def is_needless(far: Tier) -> bool:
        nearer = usable[: usable.index(far)]
        return far.name not in wanted and any(
            outdoes(near, far) and _slots_bytes(graph, near) <= limits[near.name] for near in nearer
        )

    return tuple(tier for tier in usable if not is_needless(tier))


def _slots_bytes(graph: StepGraph, tier: Tier) -> int:
    """Bytes that all storages of a step would take in a tier, each in a place of its own."""
    unit = tier.alignment_bytes
    return sum(-(-storage.size_bytes // unit) * unit for storage in graph.storages)
