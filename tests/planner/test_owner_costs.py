"""Costs of owners on a machine and without one, what travels, and how both are said."""

from __future__ import annotations

import itertools

import pytest
import torch

import lading.optim
from lading.errors import ConfigError
from lading.ir.routes import Moves, ShardRegion, moves_of, pieces, wholes_of
from lading.optim.muon import Muon
from lading.optim.shampoo import Shampoo
from lading.optim.soap import SOAP
from lading.planner.owners import DirectionCosts, Matrix, Owners, assign


def test_operations_without_a_machine() -> None:
    costs = DirectionCosts.of("")
    assert costs.matrix(Muon(), 64, 640) == 5 * (4 * 64 * 64 * 640 + 2 * 64**3)
    assert costs.shared(Muon(), 64, 640, [0.5, 0.25]) == (
        costs.matrix(Muon(), 64, 640) / 2,
        costs.matrix(Muon(), 64, 640) / 4,
    )
    with pytest.raises(ConfigError, match="h200x"):
        DirectionCosts.of("h200x")


def test_a_machine_knows_launches_and_decompositions() -> None:
    """What operations make little of: small matrices are bound by launches, decompositions are slow."""
    on, without = DirectionCosts.of("h100"), DirectionCosts.of("")
    small, large = ((Muon(), n, n) for n in (64, 4096))
    assert on.matrix(*large) / on.matrix(*small) < 0.01 * without.matrix(*large) / without.matrix(*small)
    rare, never = Shampoo(frequency=1), Shampoo(frequency=10**9)
    assert on.matrix(rare, 2048, 2048) / on.matrix(never, 2048, 2048) > 3 * (
        without.matrix(rare, 2048, 2048) / without.matrix(never, 2048, 2048)
    )
    assert on.matrix(SOAP(frequency=1), 2048, 2048) > on.matrix(SOAP(), 2048, 2048)


def test_sharing_costs_what_ranks_tell_each_other() -> None:
    """On a machine with fast links a large matrix is worth sharing, a small one is not."""
    on = DirectionCosts.of("h100")
    large, small = (on.shared(Muon(), *shape, [0.5, 0.25, 0.125, 0.0625]) for shape in ((8192, 28672), (512, 512)))
    alone = on.matrix(Muon(), 8192, 28672)
    assert len(large) == 3  # eight ranks of a node; sixteen are not neighbours
    assert alone > large[0] > large[1] > large[2] > alone / 8
    assert small[0] > on.matrix(Muon(), 512, 512)


def regions(ranks: int, rows: int, columns: int, replicas: int) -> list[ShardRegion]:
    each = rows // (ranks // replicas)
    return [ShardRegion((each * (rank % (ranks // replicas)), 0), (each, columns)) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "replicas"), [(4, 1), (4, 2), (4, 4), (6, 2)])
def test_no_owners_move_less(ranks: int, replicas: int) -> None:
    """All owners of three matrices: the mean over ranks is never below what is said."""
    wholes = [whole for n, rows in enumerate((12, 24, 48)) for whole in wholes_of(n, f"w{n}", (rows, 5))]
    holdings = [regions(ranks, rows, 5, replicas) for rows in (12, 24, 48)]
    found: list[Moves] = []
    means: list[float] = []
    for owners in itertools.product(range(ranks), repeat=3):
        routes = pieces(wholes, holdings, owners)
        found.append(moves_of(routes, ranks))
        means.append(sum(p.region.size for way in routes for p in way if p.source != p.target) / ranks)
    assert len({one.balanced for one in found}) == 1
    assert min(means) <= found[0].balanced < min(means) + 1
    assert all(one.busiest >= mean for one, mean in zip(found, means, strict=True))


def test_owners_in_words() -> None:
    matrices = [Matrix(str(n), s, 1, state_bytes=1 << 20) for n, s in enumerate((3e-3, 2e-3, 1e-3))]
    said = DirectionCosts.of("h100").report(assign(matrices, 2), Moves(busiest=1200, balanced=1000))
    assert "3 matrices with owners among 2 ranks: fullest 3.0 ms on h100" in said
    assert "load ratio 1.000, bound 3.0 ms, 0.0% above it" in said
    assert "whole states: 2.00 MiB on the fullest rank, 1.50 MiB at least" in said
    assert "travelling: 1,200 elements to the busiest rank in a step, 1,000 at least" in said
    gang = Owners("x", ((0, 1),), (1e12, 1e12), 1e12, (0, 0))
    assert "1 matrices with owners among 2 ranks, 1 of them with several: fullest 1e+12 operations; name a machine" in (
        DirectionCosts.of("").report(gang)
    )


def test_an_optimizer_says_who_owns_what() -> None:
    parameter = torch.nn.Parameter(torch.ones(64, 32))
    assert "1 matrices with owners among 1 ranks" in lading.optim.Muon([parameter], machine="h100").report()
    assert "operations; name a machine for seconds" in lading.optim.Muon([parameter]).report()
    with pytest.raises(ConfigError, match="h1000"):
        lading.optim.Muon([parameter], machine="h1000")
