"""Gathering on ranks that are threads: every rank reads the whole value, a piece at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.rank_threads import Mail, ThreadRank, on_threads

from lading.ir.graph import TensorPlacement
from lading.ir.layout import Layout, parse_layout
from lading.runtime import gathering
from lading.runtime.executor import Executor
from lading.runtime.gathering import Gathering, gathering_bytes, read_value
from lading.runtime.shard_reads import own_runs
from lading.runtime.value_layout import Value

#: Elements of a unit before the value in it, and after.
BEFORE, AFTER = 32, 17


@dataclass
class Storages:
    """Bytes of a rank's storages, read as an executor's are; with ``in_order`` False it can only be read whole.

    Attributes:
        largest: Bytes of the largest part that was asked for.
    """

    tensors: list[torch.Tensor]
    in_order: bool = True
    largest: int = field(default=0)

    @property
    def program(self) -> Any:
        sizes = [SimpleNamespace(size_bytes=tensor.nbytes) for tensor in self.tensors]
        return SimpleNamespace(graph=SimpleNamespace(storages=sizes))

    def takes_chunks(self, _: int) -> bool:
        return self.in_order

    def read_storage(self, storage: int) -> torch.Tensor:
        return self.tensors[storage].clone()

    def read_part(self, storage: int, start: int, room: torch.Tensor) -> None:
        assert self.in_order
        room.copy_(self.tensors[storage].flatten().view(torch.uint8)[start : start + room.numel()])
        self.largest = max(self.largest, room.numel())


@dataclass(frozen=True)
class Case:
    """A value of some shape that ranks of a layout share.

    Attributes:
        dim, lengths: Dim of which ranks along "tp" have runs of each part; none where lengths are empty.
        shards: Whether ranks along "shard" have shards of what a rank would else have.
        owner: Number along "pp" of the rank that has it.
        in_order: Whether storages have the elements of what lies in them in order.
    """

    layout: str
    shape: tuple[int, ...] = (6, 12, 4)
    dim: int = 0
    lengths: tuple[int, ...] = ()
    shards: bool = False
    owner: int | None = None
    in_order: bool = True

    @property
    def spread(self) -> Layout:
        return parse_layout(self.layout)

    def whole(self) -> torch.Tensor:
        return torch.arange(prod(self.shape), dtype=torch.float32).view(self.shape)

    def on_rank(self, rank: int) -> tuple[Value, Storages]:
        """The value as a rank has it, and what lies in that rank's storages."""
        place, spread, mine = self.spread.place(rank), self.spread, self.whole()
        placement = None
        if self.lengths:
            placement = TensorPlacement(self.shape, self.dim, self.lengths, "tp", spread.tp)
            mine = own_runs(mine, placement, place["tp"]).contiguous()
        ranks, start, parts = 1, None, [mine]
        if self.shards:
            ranks, start = spread.axes["shard"], BEFORE
            unit = torch.cat([torch.full((BEFORE,), -1.0), mine.flatten(), torch.full((AFTER,), -2.0)])
            unit = torch.nn.functional.pad(unit, (0, -unit.numel() % (2 * ranks)))
            parts = [*unit.chunk(ranks)[place["shard"]].chunk(2)]  # a shard of two storages
        is_here = self.owner is None or place["pp"] == self.owner
        storages = tuple(range(len(parts))) if is_here else ()
        value = Value("float32", self.shape, storages, start, ranks, "shard", self.owner, "pp", placement)
        return value, Storages([part.clone() for part in parts] if is_here else [], self.in_order)


CASES = [
    Case("dp4,zero3", shards=True),
    Case("dp2,zero3", shape=(3,), shards=True),
    Case("tp2", lengths=(2, 4)),
    Case("tp2", dim=1, lengths=(8, 4)),
    Case("tp2", dim=2, lengths=(2, 2)),
    Case("tp2", dim=1, lengths=(8, 4), in_order=False),
    Case("pp2", owner=1),
    Case("pp2", owner=0, shape=()),
    Case("tp2,pp2", dim=1, lengths=(8, 4), owner=1),
    Case("dp2,pp2,zero3", shards=True, owner=0),
    Case("dp2,tp2,zero3", dim=1, lengths=(12,), shards=True),
    Case("dp2,tp2,zero3", dim=0, lengths=(4, 2), shards=True),
]


@pytest.mark.long
@pytest.mark.parametrize("piece_bytes", [16, 100, 200, 500, 1 << 20])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_reads_the_whole_value(case: Case, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces shorter than a run, than a row, of several rows, of everything."""
    monkeypatch.setattr(gathering, "PIECE_BYTES", piece_bytes)
    mail = Mail()

    def read(rank: int) -> None:
        value, storages = case.on_rank(rank)
        executor, ranks = cast("Executor", storages), ThreadRank(case.spread, rank, mail)
        assert torch.equal(read_value(executor, value, ranks), case.whole())
        together = Gathering(executor, {"w": value}, ["w"], ranks)
        parts = [piece.clone() for piece in together.pieces("w")]
        together.end()
        assert max(part.numel() for part in parts) <= piece_bytes
        assert storages.largest <= piece_bytes
        assert gathering_bytes(value) <= 3 * piece_bytes
        assert torch.equal(torch.cat(parts).view(torch.float32).view(case.shape), case.whole())

    on_threads(read, case.spread.devices)


def test_alone_a_value_among_others_is_read_too() -> None:
    storages = Storages([torch.arange(10.0), torch.arange(10.0, 24.0)])
    value = Value("float32", (3, 4), (0, 1), start=6)
    expected = torch.arange(6.0, 18.0).view(3, 4)
    assert torch.equal(read_value(cast("Executor", storages), value), expected)
    alone = Gathering(cast("Executor", storages), {"w": value}, [], None)
    for _ in range(2):
        assert torch.equal(torch.cat([*alone.pieces("w")]).view(torch.float32), expected.flatten())
    alone.end()


@pytest.mark.parametrize("read_first", [0, 1, 3])
def test_ranks_come_to_the_end_together_where_the_first_stops_half_way(
    read_first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the disk is full: what follows on all ranks finds them in step."""
    monkeypatch.setattr(gathering, "PIECE_BYTES", 100)
    mail, case = Mail(), Case("tp2", dim=1, lengths=(8, 4))

    def read(rank: int) -> torch.Tensor:
        value, storages = case.on_rank(rank)
        ranks, executor = ThreadRank(case.spread, rank, mail), cast("Executor", storages)
        together = Gathering(executor, dict.fromkeys("abc", value), "abc", ranks)
        if rank == 0 and read_first:
            stopped = together.pieces("a")
            for _ in range(read_first):
                next(stopped)
            cast("Any", stopped).close()
        together.end()
        together.end()  # of which nothing is left
        total = torch.tensor([float(rank + 1)])
        ranks.sum_(total, "tp")
        return total

    assert [float(total) for total in on_threads(read, 2)] == [3.0, 3.0]
