"""Policies that look at the step alone: (graph, lifetimes) -> choices. ``residency`` has a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lading.ir.fold import block_items
from lading.ir.graph import PERSISTENT, Phase, Role, StepGraph
from lading.ir.plan import Option
from lading.ir.sharding import units_of
from lading.memory.lifetime import Gap, Lifetimes, can_recompute, gaps

#: Chooses for gaps by (storage, position of the use that opens the gap); what is left out is kept.
Policy = Callable[[StepGraph, Lifetimes], dict[tuple[int, int], Option]]


def keep_all(graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
    """Keep every storage until its last use, as plain training does."""
    return {}


def checkpoint_every_block(graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
    """Recompute every repeated block in backward, as full activation checkpointing: only what it starts from is kept.

    That is its input; or, where backward does not read the input itself, what the block made of it first.
    """
    items = block_items(graph.ops)
    blocks = [(start, start + b.num_ops) for b in graph.blocks if b.phase is Phase.FORWARD for start in b.starts]
    choices: dict[tuple[int, int], Option] = {}
    for gap in gaps(graph, lives):
        to_backward = graph.ops[gap.start].phase is Phase.FORWARD and graph.ops[gap.end].phase is Phase.BACKWARD
        activation = graph.storages[gap.storage].role is Role.ACTIVATION
        inside = to_backward and activation and _inside(lives, blocks, gap) and can_recompute(graph, lives, gap)
        if inside and _stays_inside(graph, lives, items, gap.storage, gap.end):
            choices[gap.storage, gap.start] = Option.RECOMPUTE
    return choices


def reshard_every_unit(graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
    """Drop whole parameters after each forward and each backward, as FSDP2 reshards, and unshard them again."""
    wholes = {unit.whole for unit in units_of(graph).values() if not unit.lasts}
    return {
        (gap.storage, gap.start): Option.RECOMPUTE
        for gap in gaps(graph, lives)
        if gap.storage in wholes
        and graph.ops[gap.start].phase is not graph.ops[gap.end].phase
        and can_recompute(graph, lives, gap)
    }


def reshard_and_checkpoint(graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
    """Drop whole parameters as ``reshard_every_unit``, and recompute blocks as ``checkpoint_every_block``."""
    resharded = reshard_every_unit(graph, lives)
    return {**resharded, **checkpoint_every_block(graph, lives)} if resharded else {}


def _inside(lives: Lifetimes, blocks: list[tuple[int, int]], gap: Gap) -> bool:
    """Whether the gap leads out of the one block in which the storage was made and used so far."""
    made = lives.uses[gap.storage][0]
    return any(start <= made and gap.start < stop for start, stop in blocks)


def _stays_inside(graph: StepGraph, lives: Lifetimes, items: Sequence[str], storage: int, end: int) -> bool:
    """Whether recomputing a storage at ``end`` needs nothing of other blocks that would be gone by then."""
    producer = lives.producer[storage]
    if producer is None:
        return False
    for source in graph.reads(graph.ops[producer]):
        if graph.storages[source].role in PERSISTENT or graph.storages[source].role is Role.INPUT:
            continue
        made = lives.producer[source]
        if lives.uses[source][-1] >= end:
            continue
        if made is None or items[made] != items[producer]:
            return False
        if not _stays_inside(graph, lives, items, source, end):
            return False
    return True
