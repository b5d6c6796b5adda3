"""Owners against every assignment there is, their bound, and what others do."""

from __future__ import annotations

import itertools
import random

import pytest
from benchmarks.optimizers.owner_policies import POLICIES

from lading.catalog.tables import model_table
from lading.errors import ConfigError
from lading.optim.muon import Muon
from lading.parallel.block_matrices import projections
from lading.planner.owners import Loads, Matrix, Owners, OwnersInfeasible, assign, bound_s, spread_turns


def qwen3(name: str, *, shared: bool = False) -> list[Matrix]:
    found: list[Matrix] = []
    for layer, key, rows, columns in projections(model_table(f"qwen3-{name}")):
        seconds = Muon().work(rows, columns).flops / 1e15
        gangs = tuple(seconds / (2 * 0.85) ** power for power in (1, 2, 3)) if shared else ()
        found.append(Matrix(f"{layer}.{key}", seconds, rows * columns, layer, shared_s=gangs))
    return found


def some(seed: int, count: int, *, state: bool = False) -> list[Matrix]:
    drawn = random.Random(seed)
    sizes = [drawn.choice([1.0, 1.5, 2.0, 3.5, 5.0]) * (1 + 0.01 * drawn.random()) for _ in range(count)]
    return [
        Matrix(str(i), s, int(10 * s), state_bytes=drawn.randint(1, 9) if state else 0) for i, s in enumerate(sizes)
    ]


def brute_force(matrices: list[Matrix], ranks: int, cap: int | None = None) -> float:
    best = float("inf")
    for owner in itertools.product(range(ranks), repeat=len(matrices)):
        loads, kept = [0.0] * ranks, [0] * ranks
        for matrix, rank in zip(matrices, owner, strict=True):
            loads[rank] += matrix.seconds
            kept[rank] += matrix.state_bytes
        if cap is None or max(kept) <= cap:
            best = min(best, max(loads))
    return best


def check(owners: Owners, matrices: list[Matrix]) -> None:
    """Loads are those of what was given, and no less than the bound."""
    loads = [0.0] * len(owners.loads_s)
    for matrix, gang in zip(matrices, owners.ranks, strict=True):
        assert len(set(gang)) == len(gang)
        for rank in gang:
            loads[rank] += matrix.seconds if len(gang) == 1 else matrix.shared_s[(2, 4, 8, 16).index(len(gang))]
    assert all(has >= needs - 1e-9 for has, needs in zip(owners.loads_s, loads, strict=True))
    assert owners.makespan_s >= owners.bound_s * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_the_best_of_every_assignment_there_is(seed: int):
    matrices, ranks = some(seed, 8), 2 + seed % 3
    owners, best = assign(matrices, ranks), brute_force(matrices, ranks)
    check(owners, matrices)
    assert owners.makespan_s <= best * (1 + 1e-3)
    assert owners.bound_s <= best * (1 + 1e-9)
    assert owners.gap <= 1e-3


@pytest.mark.parametrize("seed", range(4))
def test_many_kinds_are_near_the_best(seed: int):
    """More kinds than are listed: filled and exchanged."""
    matrices = some(seed, 9)
    owners, best = assign(matrices, 3), brute_force(matrices, 3)
    check(owners, matrices)
    assert owners.bound_s <= best * (1 + 1e-12)
    assert owners.makespan_s <= best * 1.03


@pytest.mark.parametrize("seed", range(6))
def test_a_cap_on_whole_states_is_kept(seed: int):
    matrices = some(seed, 8, state=True)
    cap = max(*(m.state_bytes for m in matrices), sum(m.state_bytes for m in matrices) // 3 + 4)
    owners = assign(matrices, 3, cap_bytes=cap)
    best = brute_force(matrices, 3, cap)
    assert max(owners.state_bytes) <= cap
    assert owners.makespan_s <= best * (1 + 1e-3)
    assert owners.bound_s <= best * (1 + 1e-9)


@pytest.mark.parametrize(
    ("ranks", "cap", "sizes"),
    [
        (2, 7, [(9.0, 0), (3.0, 3), (1.0, 0), (3.0, 5), (4.0, 1)]),
        (2, 17, [(7.0, 0), (2.0, 8), (2.0, 5), (1.0, 8), (4.0, 0), (2.0, 6)]),
        (3, 7, [(2.0, 6), (8.0, 2), (2.0, 1), (1.0, 6), (9.0, 4)]),
    ],
)
def test_a_swap_keeps_the_cap_of_both_ranks(ranks: int, cap: int, sizes: list[tuple[float, int]]):
    """The fullest rank gives a long matrix for a shorter one, whose state it may have no room for."""
    matrices = [Matrix(str(i), s, 1, state_bytes=m) for i, (s, m) in enumerate(sizes)]
    assert max(assign(matrices, ranks, cap_bytes=cap).state_bytes) <= cap


def test_a_cap_that_only_one_assignment_keeps():
    """Filling largest first puts both long ones apart and then finds no room; listing finds the one way."""
    sizes = [(4.0, 1), (3.0, 5), (2.0, 5), (1.0, 9)]
    matrices = [Matrix(str(i), s, 1, state_bytes=m) for i, (s, m) in enumerate(sizes)]
    owners = assign(matrices, 2, cap_bytes=10)
    assert owners.state_bytes == (10, 10)
    assert owners.makespan_s == brute_force(matrices, 2, 10) == 5.0


def test_states_that_do_not_fit_are_said():
    with pytest.raises(OwnersInfeasible, match="room for 9 bytes"):
        assign([Matrix("a", 1.0, 1, state_bytes=9), Matrix("b", 1.0, 1, state_bytes=1)], 2, cap_bytes=8)
    with pytest.raises(ConfigError, match="at least one rank, got 1 and 0"):
        assign([Matrix("a", 1.0, 1)], 0)


@pytest.mark.parametrize("name", ["1.7b", "8b", "32b"])
@pytest.mark.parametrize("ranks", [16, 64, 256])
def test_never_worse_than_what_others_do(name: str, ranks: int):
    matrices = qwen3(name)
    owners = assign(matrices, ranks)
    check(owners, matrices)
    for policy in POLICIES.values():
        other = policy(matrices, ranks)
        check(other, matrices)
        assert owners.makespan_s <= other.makespan_s * (1 + 1e-9)


@pytest.mark.parametrize("name", ["1.7b", "4b", "8b", "14b", "32b"])
@pytest.mark.parametrize("ranks", [16, 32, 64, 128, 256])
def test_no_owners_of_whole_matrices_are_shorter(name: str, ranks: int):
    """Proven for all of Qwen3's shapes."""
    owners = assign(qwen3(name), ranks)
    check(owners, qwen3(name))
    assert owners.gap <= 1e-3


@pytest.mark.parametrize(("name", "ranks", "share"), [("8b", 256, 0.7), ("4b", 128, 0.85), ("1.7b", 64, 0.95)])
def test_several_ranks_share_a_matrix_once_ranks_are_many(name: str, ranks: int, share: float):
    alone, shared = assign(qwen3(name), ranks), assign(qwen3(name, shared=True), ranks)
    check(shared, qwen3(name, shared=True))
    assert max(len(gang) for gang in shared.ranks) > 1
    assert shared.makespan_s < share * alone.makespan_s
    assert shared.gap < 0.1


@pytest.mark.parametrize("ranks", [8, 24, 64])
def test_gangs_begin_together(ranks: int):
    """Played through rank by rank: a gang begins when its last is free, and nobody waits for it."""
    matrices = qwen3("8b", shared=True)[: 7 * 3]
    owners = assign(matrices, ranks)
    check(owners, matrices)
    order = sorted(range(len(matrices)), key=lambda i: -len(owners.ranks[i]))
    assert len(owners.ranks[order[0]]) > 1
    busy = [0.0] * ranks
    for number in order:
        gang = owners.ranks[number]
        starts = {round(busy[rank], 9) for rank in gang}
        assert len(starts) == 1
        for rank in gang:
            busy[rank] += (
                matrices[number].shared_s[(2, 4, 8, 16).index(len(gang))] if len(gang) > 1 else matrices[number].seconds
            )
    assert max(busy) == pytest.approx(owners.makespan_s)


def test_a_gang_begins_when_its_last_is_free():
    loads = Loads(3, None)
    loads.assign_matrix(0, Matrix("alone", 3.0, 1), (1,), 3.0)
    loads.assign_matrix(1, Matrix("shared", 4.0, 1, shared_s=(2.0,)), (0, 1), 2.0)
    assert loads.seconds.tolist() == [5.0, 5.0, 0.0]


def test_sharing_that_saves_nothing_is_left():
    matrices = [Matrix(str(i), 1.0, 1, shared_s=(0.9, 0.8)) for i in range(8)]
    assert all(len(gang) == 1 for gang in assign(matrices, 8).ranks)
    assert all(len(gang) == 2 for gang in assign(matrices, 16).ranks)


def test_the_order_of_matrices_does_not_matter():
    matrices = qwen3("1.7b")
    mixed = random.Random(0).sample(matrices, len(matrices))
    assert assign(mixed, 64).makespan_s == pytest.approx(assign(matrices, 64).makespan_s, rel=1e-9)
    assert assign(matrices, 64) == assign(matrices, 64)


def test_the_bound_counts_the_largest():
    three = [Matrix(str(i), 1.0, 1) for i in range(3)]
    assert bound_s(three, 2) == 2.0


def test_turns_are_spread_over_each_owners_matrices():
    matrices = [Matrix(f"{i:02}", 1.0, 1, turn=i // 4) for i in range(16)]
    owners = assign(matrices, 4)
    spread = spread_turns(matrices, owners)
    assert spread.loads_s == owners.loads_s
    for rank in range(4):
        assert sorted(m.turn for m, gang in zip(matrices, spread.ranks, strict=True) if gang == (rank,)) == [0, 1, 2, 3]
