"""Bytes at the five moments of a Llama 3 8B on eight devices, worked out by hand from its parameters."""

from __future__ import annotations

import dataclasses

import pytest

from lading.catalog.load import load_machine
from lading.clusters import space_of, step_of
from lading.ir.request import Request
from lading.planner.peaks import budget_for, peaks_of, room_of
from lading.sim.simulate import simulate

#: Of the model, and of its embedding, the largest parameter; of a gate, the largest of a block; layers.
NUMBER, EMBEDDING, GATE, LAYERS = 8_030_261_248, 128_256 * 4096, 14336 * 4096, 32
AHEAD = 10_000_000


def peaks(layout: str, save: str = "sharded", stack: str = "default", longest: int = 0) -> dict[str, dict[str, int]]:
    asked = Request(
        model="llama3-8b", machine="h100", layout=layout, seq_len=1024, stack=stack, save=save, longest=longest
    )
    return peaks_of(simulate(*step_of(asked)), asked)


def test_cut_over_all() -> None:
    """Of each parameter 2 bytes, of its gradient 4, of its states 12, each cut in eight."""
    found = peaks("dp8,zero3,gb8")
    assert found["start"]["device"] == pytest.approx(NUMBER * 18 / 8, abs=8)
    piece = EMBEDDING * 4 // 8
    assert found["start"]["host"] == piece
    assert found["save"] == {"device": found["start"]["device"], "host": piece + AHEAD}
    assert found["resume"] == {"device": found["start"]["device"], "host": 2 * piece}
    assert found["step"]["device"] > found["start"]["device"]
    assert found["longest"] == found["step"]
    assert peaks("dp8,zero3,gb8", "async")["save"]["host"] == pytest.approx(NUMBER * 14 / 8, abs=8)


def test_gathered_on_one_rank() -> None:
    """One whole state more on the device; parameters and states once, over the memory of a node of eight."""
    found = peaks("dp8,zero3,gb8", "gathered")
    assert found["save"]["device"] == pytest.approx(NUMBER * 18 / 8 + EMBEDDING * 4, abs=8)
    assert found["save"]["host"] == pytest.approx(NUMBER * 14 / 8, abs=8)
    assert found["resume"] == found["save"]
    replicas = peaks("dp8,gb8,recompute=full", "gathered")  # which all have everything: it is saved once
    assert replicas["save"]["host"] == found["save"]["host"]
    stages = peaks("dp2,pp4,zero1,gb8,recompute=full", "gathered")  # four ranks of the node gather a stage each
    last = 8 * GATE * 3 + 8 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 2 * 4096) + EMBEDDING + 4096
    assert stages["save"]["host"] == last * 14 // 2


def test_megatron_copies_all_to_the_host_before_it_writes() -> None:
    found = peaks("dp8,zero1,gb8,recompute=full", stack="megatron-core")
    assert found["save"]["host"] == pytest.approx(NUMBER * (2 + 12 / 8), rel=1e-6)
    assert found["start"]["device"] == pytest.approx(NUMBER * (2 + 4 + 12 / 8), rel=1e-6)


def test_updates_on_the_host() -> None:
    """Gradients of 4 bytes and states of 12 lie there, cut in eight; parameters stay."""
    found = peaks("dp8,zero3,gb8,offload=optimizer")
    there = NUMBER * 16 / 8
    assert found["step"]["host"] == pytest.approx(there, abs=8)
    assert found["start"]["device"] == pytest.approx(NUMBER * 2 / 8, abs=8)
    assert found["resume"]["host"] == pytest.approx(there + 2 * EMBEDDING * 4 // 8, abs=8)


def test_the_longest_batch_has_its_own_peak() -> None:
    found = peaks("dp8,zero3,gb8", longest=4096)
    assert found["longest"]["device"] > found["step"]["device"]
    assert found["start"] == peaks("dp8,zero3,gb8")["start"]


def test_a_budget_for_some_bytes_has_room_for_them() -> None:
    one = Request(model="gpt2", machine="h100", seq_len=64, devices=1, global_batch=1)
    machine = load_machine("h100")
    for size in (1, 12_345_678, 70_000_000_001):
        space = space_of(dataclasses.replace(one, budgets={"device": budget_for(size, machine)}))
        assert size <= room_of(space)["device"] <= size + 2
