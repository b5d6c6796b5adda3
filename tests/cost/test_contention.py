"""Computing beside a collective: as slow as was measured, less where fewer processors and bytes are taken."""

from __future__ import annotations

import pytest

from lading.catalog.load import load_machine
from lading.cost.contention import channels, contention
from lading.cost.topology import group_of_ranks
from lading.errors import ConfigError


def test_products_and_small_kernels_slow_down_as_measured() -> None:
    a100, h100 = load_machine("a100"), load_machine("h100")
    gather = group_of_ranks(8, a100)
    # NVIDIA/nccl issue 1428 (1.18 to 2.08 ms, 0.02 to 0.05 ms); pytorch/pytorch #179937 (30 to 40%).
    assert 1 + contention("all_gather", gather, a100, 108).slowdown == pytest.approx(1.76, rel=0.12)
    assert 1 + contention("all_gather", gather, a100, 108, memory_bound=True).slowdown == pytest.approx(2.5, rel=0.12)
    assert 1 + contention("all_gather", gather, h100, 132).slowdown == pytest.approx(1.35, rel=0.12)


def test_what_takes_less_slows_less() -> None:
    machine = load_machine("h100")
    inside, across = group_of_ranks(8, machine), group_of_ranks(8, machine, stride=8)
    engine = contention("all_gather", inside, machine, 132, copy_engine=True)
    switch, ring = (contention("all_reduce", inside, machine, 132, nvls=nvls) for nvls in (True, False))
    assert engine.compute > switch.compute > ring.compute
    assert contention("all_gather", across, machine, 132).compute > 0.95
    assert ring.collective < contention("all_gather", across, machine, 132).collective < 1
    assert contention("all_gather", group_of_ranks(1, machine), machine, 132).slowdown == 0


def test_channels_are_those_of_nccl() -> None:
    machine = load_machine("h100")
    assert channels("all_gather", group_of_ranks(8, machine), machine) == 24
    assert channels("all_reduce", group_of_ranks(8, machine), machine) == 16
    assert channels("all_gather", group_of_ranks(64, machine), machine) == 16
    assert channels("send", group_of_ranks(2, machine, stride=8), machine) == 2


def test_no_processors_are_refused() -> None:
    machine = load_machine("h100")
    with pytest.raises(ConfigError, match="num_sms"):
        contention("send", group_of_ranks(2, machine), machine, 0)


def test_a_mix_of_computing_lies_between_and_loses_more_as_the_collective_lasts_longer() -> None:
    machine = load_machine("h100")
    group = group_of_ranks(8, machine)
    found = [contention("all_gather", group, machine, 132, memory_bound=share) for share in (0.0, 0.1, 0.5, 1.0)]
    rates = [each.compute for each in found]
    assert rates == sorted(rates, reverse=True)
    assert 1 / rates[1] == pytest.approx(0.9 / rates[0] + 0.1 / rates[3])
    assert all(1 - each.compute < each.lost <= 0.8 for each in found)
    with pytest.raises(ConfigError, match="from 0 to 1"):
        contention("all_gather", group, machine, 132, memory_bound=1.5)
