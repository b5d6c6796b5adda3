"""Token dispatch: DeepEP as its README measures it, and each way against the others."""

from __future__ import annotations

import pytest

from lading.catalog.load import load_machine
from lading.cost.collective import collective_s, dispatch_s
from lading.cost.topology import group_of_ranks
from lading.errors import ConfigError

#: deepseek-ai/DeepEP README.md @ebfe47e: 4096 tokens of 7168 bytes (FP8), 8 experts of each on at most 4 nodes.
TOKEN_BYTES = 4096 * 7168


@pytest.mark.parametrize(
    ("ranks", "bytes_counted", "rate"),
    # Counted as its tests count: a copy for each rank, or node, that a token goes to, its own included; its experts
    # lie in four of eight groups, two groups a node with four nodes.
    [
        (8, TOKEN_BYTES * 5.25, 153e9),
        (16, TOKEN_BYTES * 1.97, 43e9),
        (32, TOKEN_BYTES * 3.14, 44e9),
        (64, TOKEN_BYTES * 4, 46e9),
    ],
)
def test_deepep_takes_what_its_readme_says(ranks: int, bytes_counted: float, rate: float) -> None:
    machine = load_machine("h800")
    group = group_of_ranks(ranks, machine)
    seconds = dispatch_s(TOKEN_BYTES * 8, group, machine, dispatcher="deepep", active=8, most_nodes=4)
    assert seconds == pytest.approx(bytes_counted / rate, rel=0.12)


def test_deepep_on_other_nodes_than_its_constants_come_from() -> None:
    """Four nodes of DGX B200: 50 GB/s, 55 with IBGDA (NVIDIA-NeMo/Megatron-Bridge docs/performance-guide.md @067f987d);
    8 experts of a token lie on 3.6 of 4 nodes, counted with its own."""
    machine = load_machine("b200")
    size = TOKEN_BYTES * 8.0
    seconds = dispatch_s(size, group_of_ranks(32, machine), machine, dispatcher="deepep", active=8)
    assert 50e9 <= TOKEN_BYTES * 4 * (1 - 0.75**8) / seconds <= 55e9


def test_ways_of_dispatch_compare_as_their_bytes() -> None:
    machine = load_machine("h100")
    one, two = group_of_ranks(8, machine), group_of_ranks(16, machine)
    size = 64e6 * 8
    pairwise = dispatch_s(size, two, machine, active=8)
    assert pairwise == collective_s("all_to_all", size, two, machine)
    assert dispatch_s(size, two, machine, dispatcher="deepep", active=8) < 0.5 * pairwise
    gathered = dispatch_s(size, one, machine, dispatcher="allgather", active=8)
    assert gathered == pytest.approx(dispatch_s(size, one, machine, dispatcher="allgather", active=8, combine=True))
    assert gathered > dispatch_s(size / 8, one, machine, active=1)
    assert dispatch_s(size, group_of_ranks(1, machine), machine) == 0


def test_an_unknown_way_is_refused() -> None:
    machine = load_machine("h100")
    with pytest.raises(ConfigError, match="expected one of alltoall"):
        dispatch_s(1e6, group_of_ranks(8, machine), machine, dispatcher="flex")
