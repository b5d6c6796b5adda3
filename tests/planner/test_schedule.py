"""Gathers begin behind updates of their shards, and transfers across a step's boundary where they may."""

from __future__ import annotations

import dataclasses

import pytest
from tests.planner.steps import bytes_machine

from lading.ir.action import ActionKind
from lading.ir.graph import Op, OpKind, Phase, Role, StepGraph, Storage, Tensor
from lading.ir.sharding import UNSHARD
from lading.planner.emission import Emission, Item, Residency
from lading.planner.schedule import Stretched, stretch
from lading.units import GiB

#: Storages of a step that gathers.
SHARD, WHOLE, OTHER = range(3)


def roomed(
    stays: list[Residency],
    soft_bytes: int = 100 * GiB,
    mixed_bytes_per_s: float = 1e9,
    write_bytes_per_s: float = 1e9,
    *,
    both_ways: bool = False,
) -> Stretched:
    """Give room to stays of three storages of a GiB each, over ten items of a second, on a disk of 1 GB/s.

    Args:
        mixed_bytes_per_s: Rate of either direction while the other one is busy.
        write_bytes_per_s: Rate of writing alone.
    """
    storages = tuple(Storage(f"s{n}", GiB, Role.ACTIVATION) for n in range(3))
    tensors = tuple(Tensor(n, "uint8", (GiB,), (1,)) for n in range(3))
    ops = tuple(_op("aten.add_.Tensor", (0,), mutates=(0,)) for _ in range(10))
    emission = Emission([Item(ActionKind.COMPUTE, op=n) for n in range(10)], stays)
    graph = StepGraph(storages, tensors, ops, (), (), ((),), ())
    machine = bytes_machine()
    (disk,) = (
        dataclasses.replace(
            tier,
            write_bytes_per_s=write_bytes_per_s,
            mixed_read_bytes_per_s=mixed_bytes_per_s,
            mixed_write_bytes_per_s=mixed_bytes_per_s,
        )
        for tier in machine.tiers
    )
    machine = dataclasses.replace(machine, tiers=(disk,))
    return stretch(graph, machine, emission, [1.0] * 10, soft_bytes, repeats=False, both_ways=both_ways)


def test_write_backs_follow_one_another() -> None:
    """Each takes 1.34 s with its margin: from 1.0 s on to 2.34 and to 3.68."""
    assert roomed([Residency(n, 0, 0, to_tier="disk") for n in range(2)]).last == (2, 3)


def test_fetches_follow_one_another() -> None:
    """Both are needed at 9.0 s: one begins at 7.66 and the other at 6.32."""
    assert roomed([Residency(n, 9, 9, tier="disk") for n in range(2)]).first == (7, 6)


@pytest.mark.parametrize(("mixed", "last", "first"), [(0.9e9, 2, 7), (0.5e9, 3, 6), (0.25e9, 5, 4)])
def test_a_transfer_has_the_time_that_it_takes_beside_the_other_direction(mixed: float, last: int, first: int) -> None:
    """Its margin, 1.34 s, or 2.15 s at half of the rate, or 4.3 s at a quarter."""
    stays = [Residency(0, 0, 0, to_tier="disk"), Residency(1, 9, 9, tier="disk")]
    made, alone = (roomed(stays, mixed_bytes_per_s=mixed, both_ways=both_ways) for both_ways in (True, False))
    assert (made.last[0], made.first[1]) == (last, first)
    assert (alone.last[0], alone.first[1]) == (2, 7)


def test_a_fast_write_has_the_time_that_it_takes_beside_reads() -> None:
    """Four times as fast alone, 0.34 s with its margin, and no faster than reads beside them."""
    written = [Residency(0, 0, 0, to_tier="disk")]
    alone = roomed(written, mixed_bytes_per_s=4e9, write_bytes_per_s=4e9, both_ways=True)
    beside = roomed(written, mixed_bytes_per_s=0.5e9, write_bytes_per_s=4e9, both_ways=True)
    assert (alone.last, beside.last) == ((1,), (3,))


def test_a_transfer_takes_no_room_that_there_is_not() -> None:
    written, beside = Residency(0, 0, 0, to_tier="disk"), Residency(1, 2, 9)
    assert roomed([written, beside]).last[0] == 2
    assert roomed([written, beside], 3 * GiB // 2).last[0] == 1


def test_a_fetch_begins_behind_the_stay_before() -> None:
    kept, again = Residency(0, 0, 5), Residency(0, 7, 9, tier="disk")
    assert roomed([again]).first == (5,)
    assert roomed([kept, again]).first[1] == 6


def _op(name: str, inputs: tuple[int, ...], outputs: tuple[int, ...] = (), mutates: tuple[int, ...] = ()) -> Op:
    kind = OpKind.COLLECTIVE if name == UNSHARD else OpKind.ELEMENTWISE
    return Op(name, Phase.FORWARD, (), (), inputs, outputs, outputs or (None,), mutates, "", kind)


@pytest.mark.parametrize("writers", [(), (0,), (1,), (0, 1), (0, 2)])
def test_a_gather_begins_behind_every_update_of_its_shard(writers: tuple[int, ...]) -> None:
    """Parts of a shard may have an update each; the last of them counts, however slow the network is."""
    storages = (
        Storage("shard", 1024, Role.PARAMETER), Storage("whole", 2048, Role.ACTIVATION), Storage("x", 64, Role.INPUT),
    )  # fmt: skip
    tensors = tuple(Tensor(s, "float32", (each.size_bytes // 4,), (1,)) for s, each in enumerate(storages))
    updates = [
        _op("aten.add_.Tensor", (n,), mutates=(n,)) for n in (SHARD if i in writers else OTHER for i in range(3))
    ]
    gather, reader = _op(UNSHARD, (SHARD,), outputs=(WHOLE,)), _op("aten.add_.Tensor", (OTHER, WHOLE), mutates=(OTHER,))
    graph = StepGraph(storages, tensors, (*updates, gather, reader), (), (), ((),), ())
    items = [Item(ActionKind.COMPUTE, op=n) for n in range(5)]
    items[3] = Item(ActionKind.UNSHARD, op=3)
    stays = [Residency(SHARD, 0, 4, initial=True, final=True), Residency(WHOLE, 3, 4)]
    emission = Emission(items=items, residencies=stays)
    found = stretch(graph, bytes_machine(), emission, [1.0] * 5, 1 << 20, repeats=False, network_seconds={3: 10.0})
    assert found.first[1] == max((n + 1 for n in writers), default=0)
