"""A checkpoint of any layout is loaded by any other, to the bit, and a rank reads the bytes that it has."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache, partial
from io import FileIO
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import lading
from lading.checkpoint import state
from lading.checkpoint.state import CHUNK_BYTES, tensor_source
from lading.checkpoint.store import open_checkpoint, save_checkpoint
from lading.ir.graph import StepGraph, TensorPlacement
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.runtime.executor import Executor
from lading.runtime.named import NamedValues
from lading.runtime.resident import PeakMeter, give_back
from lading.runtime.shard_reads import own_runs, read_runs
from lading.units import MiB
from tests.rank_threads import on_threads, opened
from tests.ranks import run_ranks
from tests.test_pipelines import connected
from tests.test_replicas import batch
from tests.test_saved_plan import states_on_disk

pytestmark = pytest.mark.usefixtures("one_thread")

Ranks = list[tuple[NamedValues, Executor]]
Values = dict[str, torch.Tensor]
SIZES = {"dim": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "max_seq_len": 32}


@dataclasses.dataclass(frozen=True)
class Saved:
    """A way in which a state lies on ranks and tiers."""

    layout: str
    model: str = "gpt"
    on_disk: bool = False
    muon: bool = False
    masters: bool = False

    def planned(self, graph: StepGraph) -> lading.Plan:
        asked: dict[str, Any] = {"policy": "keep-all", "disk_budget": 0}
        if self.on_disk:
            asked = {"policy": states_on_disk}
        if self.muon:
            asked["matrices"] = lading.Matrices(rule="muon", lr=0.02)
        if self.masters:
            asked["master_weights"] = True
        return lading.plan(graph, connected(), layout=self.layout, budget="100%", cache=False, **asked)

    @property
    def states(self) -> tuple[str, bool, bool]:
        """What the state consists of, which another way must share to load it."""
        return self.model, self.muon, self.masters


@cache
def captured(model: str, masters: bool) -> StepGraph:
    more = {"num_experts": 4} if model == "moe" else {}
    made = build_model(model, **SIZES, **more).to(torch.bfloat16 if masters else torch.float32)
    return lading.capture(made, batch(0, 0), next_byte_loss, accumulation=2)


#: Tied weights, with a rank of each kind.
QUICK = [Saved("dp1"), Saved("dp2,zero3"), Saved("tp2"), Saved("pp2", on_disk=True)]
WAYS = [
    *QUICK,
    Saved("dp2"), Saved("dp2,pp2"), Saved("dp4,zero3"), Saved("cp2,zero3"), Saved("dp2,tp2,zero3"), Saved("tp2,pp2"),
    Saved("dp3,zero3"), Saved("dp3,zero1"), Saved("dp2,zero2", on_disk=True), Saved("dp1", on_disk=True),
]  # fmt: skip
EXPERTS = [Saved(layout, "moe") for layout in ("dp1", "dp2,ep2", "dp2,ep2,pp2", "dp2,zero3", "dp2,ep2,zero3")]
MUON = [Saved(layout, muon=True) for layout in ("dp1", "dp2", "dp2,zero3", "pp2", "dp2,pp2,zero3", "dp3,zero3")]
MASTERS = [Saved(layout, "llama", masters=True) for layout in ("dp1", "dp2,zero3", "tp2", "pp2", "dp2,tp2,zero3")]


def content(named: NamedValues, seed: int) -> Values:
    """Values by name, another one for every seed, name and place; numbers of updates are alike."""
    made: Values = {}
    for name in named:
        value, drawn = named[name], torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        dtype = getattr(torch, value.dtype)
        made[name] = (
            torch.randn(value.shape, generator=drawn).to(dtype) if value.shape else torch.full((), seed, dtype=dtype)
        )
    return made


def write(ranks: Ranks, values: Values) -> None:
    for named, _ in ranks:
        for name in named:  # masters come after their parameters
            named.write(name, values[name])


def save(ranks: Ranks, folder: Path) -> Path:
    """Save as ``Trainer.save`` does: the first rank writes, the others give their shards."""

    def part(rank: int) -> Path | None:
        named, _ = ranks[rank]
        gathering = named.gathering()
        if rank:
            gathering.end()
            return None
        sources = [(name, value.dtype, value.shape, named.chunks(name, gathering)) for name, value in named.items()]
        written = save_checkpoint(folder, 1, sources, {}, keep=1)
        gathering.end()
        return written

    path = on_threads(part, len(ranks))[0]
    assert path is not None
    return path


def all_of(named: NamedValues) -> Values:
    """All values of the ranks together; all of them call this."""
    return {name: named.read(name) for name in named}


def check_every_pair(ways: list[Saved], folder: Path) -> None:
    """Save each way, each another state; load each into each of them, over other values."""
    with ExitStack() as stack:
        ranks: list[Ranks] = []
        for number, way in enumerate(ways):
            graph, here = captured(way.model, way.masters), folder / f"{number}"
            here.mkdir()
            ranks.append(stack.enter_context(opened(way.planned(graph), graph, here)))
        states = [content(each[0][0], 1 + number) for number, each in enumerate(ranks)]
        saved: list[Path] = []
        for number, each in enumerate(ranks):
            write(each, states[number])
            saved.append(save(each, folder / f"saved {number}"))
        for number, path in enumerate(saved):
            checkpoint = open_checkpoint(path)
            assert checkpoint.tensors.keys() == states[number].keys()
            for name, value in states[number].items():
                assert torch.equal(checkpoint.read(name), value), (ways[number], name)
        for to, each in enumerate(ranks):
            for of, path in enumerate(saved):
                checkpoint = open_checkpoint(path)
                for named, _ in each:
                    named.load(checkpoint, ())
                for read in on_threads(lambda rank, each=each: all_of(each[rank][0]), len(each)):
                    differing = [name for name, value in states[of].items() if not torch.equal(read[name], value)]
                    assert read.keys() == states[of].keys()
                    assert differing == [], f"{ways[of]} -> {ways[to]}"


@pytest.mark.long
def test_some_layouts_load_each_others_checkpoints(tmp_path: Path) -> None:
    check_every_pair(QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [WAYS, EXPERTS, MUON, MASTERS], ids=["gpt", "moe", "muon", "masters"])
def test_every_layout_loads_the_checkpoints_of_every_other(ways: list[Saved], tmp_path: Path) -> None:
    assert len({way.states for way in ways}) == 1
    check_every_pair(ways, tmp_path)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("piece", "chunk_bytes"), [(24, 16), (24, 1 << 20), (400, 1 << 20), (1 << 20, 1 << 20)])
def test_runs_are_those_of_the_whole_tensor(
    dim: int, piece: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in any cuts and from anywhere: the elements of every range of every rank, and no byte twice."""
    monkeypatch.setattr("lading.runtime.shard_reads._BLOCK_BYTES", piece)
    shape = (6, 12, 4)
    whole = torch.randn(shape)
    data = memoryview(bytearray(whole.view(torch.uint8).numpy().tobytes()))
    lengths = {0: (2, 4), 1: (8, 4), 2: (2, 2)}[dim]
    placement = TensorPlacement(shape, dim, lengths, "tp", 2)

    asked: list[tuple[int, int]] = []

    def chunks(low: int, high: int) -> Iterator[memoryview]:
        asked.append((low, high))
        for at in range(low, high, 20):
            yield data[at : min(high, at + 20)]

    for rank in range(2):
        own = own_runs(whole, placement, rank).contiguous().view(torch.uint8).flatten()
        for low, high in ((0, own.numel()), (0, 4), (100, 300), (44, own.numel()), (48, 48)):
            read, at = torch.zeros(0, dtype=torch.uint8), low
            asked.clear()
            for start, part in read_runs(placement, rank, 4, low, high, chunks, chunk_bytes):
                assert start == at
                read, at = torch.cat([read, part]), start + part.numel()
            assert torch.equal(read, own[low:high])
            assert all(end < start for (_, end), (start, _) in pairwise(asked))


def chunks_of(placement: TensorPlacement, rank: int, low: int, high: int) -> set[int]:
    """Numbers of the chunks of a tensor of float32 in which bytes ``low`` up to ``high`` of a rank's own lie."""
    place = torch.arange(prod(placement.shape)).view(placement.shape)
    own = own_runs(place, placement, rank).flatten()[low // 4 : -(-high // 4)]
    return set((own * 4 // CHUNK_BYTES).unique().tolist())


#: Shape, dim that is cut, its parts, ranks: rows of many chunks and of one, runs over some, parts of other lengths.
CUTS = [
    ((3, 8, 1 << 17), 1, (8,), 8),  # rows of 4 MiB, runs of half a chunk
    ((3, 24, 50_000), 1, (16, 8), 4),  # runs that begin and end within chunks, gaps of less and of more than one
    ((700, 1, 3000), 2, (3000,), 4),  # rows of 12 kB: every chunk has some of each rank, but for the last rows
    ((24, 100_001), 0, (16, 4, 4), 2),
    ((2, 1 << 19), 1, (1 << 19,), 2),  # runs of whole chunks
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("shape", "dim", "lengths", "ranks"), CUTS)
def test_only_the_chunks_that_have_bytes_of_a_rank_are_read(
    shape: tuple[int, ...],
    dim: int,
    lengths: tuple[int, ...],
    ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each once, as it takes all of a chunk to compare its checksum."""
    placement = TensorPlacement(shape, dim, lengths, "tp", ranks)
    whole = torch.randn(shape)
    path = save_checkpoint(tmp_path, 1, [tensor_source("w", whole)], {}, 1)
    checkpoint, counted = open_checkpoint(path), list[int]()
    size = checkpoint.tensors["w"].size_bytes

    def counting(file: FileIO, target: memoryview) -> int:
        counted.append(read_into(file, target))
        return counted[-1]

    read_into = state._fill
    monkeypatch.setattr(state, "_fill", counting)
    saved = 0
    for rank in range(ranks):
        own = own_runs(whole, placement, rank).contiguous().view(torch.uint8).flatten()
        for low, high in ((0, own.numel()), (own.numel() // 8 * 4, own.numel()), (400, own.numel() // 12 * 4)):
            counted.clear()
            read = [
                part.clone()
                for _, part in read_runs(placement, rank, 4, low, high, partial(checkpoint.chunks, "w"), CHUNK_BYTES)
            ]
            assert torch.equal(torch.cat(read), own[low:high])
            needed = chunks_of(placement, rank, low, high)
            assert sum(counted) == sum(min(CHUNK_BYTES, size - number * CHUNK_BYTES) for number in needed)
            saved += size - sum(counted)
    assert saved > 0


def loading_bytes(named: NamedValues, path: Path) -> int:
    """Bytes that the process takes at most while a rank loads."""
    give_back()
    meter = PeakMeter()
    before = meter.now_bytes()
    named.load(open_checkpoint(path), ())
    taken = meter.peak_bytes() - before
    meter.close()
    return taken


LARGE = {"dim": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 16384, "max_seq_len": 32, "tied": False}


@pytest.mark.long
@pytest.mark.parametrize("layout", ["dp2,zero3", "tp2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_a_rank_loads_in_constant_memory(layout: str, tmp_path: Path) -> None:
    """The largest tensors have 16 MiB, and a rank 8 of them where they are cut.

    Of two loads the one that took less counts: what tests before left to the process may come to it in one of them.
    """
    made = build_model("gpt", **{**LARGE, "tied": True})
    graph = lading.capture(made, batch(0, 0), next_byte_loss, accumulation=2)
    with opened(Saved(layout).planned(graph), graph, tmp_path) as ranks:
        write(ranks, content(ranks[0][0], 1))
        path = save(ranks, tmp_path / "saved")
        write(ranks, content(ranks[0][0], 2))
        for named, _ in ranks:
            assert min(loading_bytes(named, path) for _ in range(2)) < 6 * MiB
        expected = content(ranks[0][0], 1)
        for read in on_threads(lambda rank: all_of(ranks[rank][0]), len(ranks)):
            assert all(torch.equal(read[name], value) for name, value in expected.items())


def read_bytes() -> int:
    """Bytes that this process has read from files so far, as the system counts them."""
    return int(Path("/proc/self/io").read_text().split()[1])


def most_bytes(named: NamedValues) -> int:
    """Bytes that a rank may read of what it has: pieces of 1 MiB; all of a tensor that is cut along a later dim."""
    total = 0
    for value in named.values():
        if value.storages:
            is_cut = value.placement is not None and value.placement.dim == 0
            parts = value.ranks * (value.placement.ranks if value.placement is not None and is_cut else 1)
            total += min(value.size_bytes, value.size_bytes // parts + 2 * MiB)
    return total


#: Layouts, and the share of all bytes that each rank reads at most; a stage has the table of words or the larger head.
SHARES = {"dp2,zero3": 0.6, "pp2": 0.7, "tp2": 0.75, "dp4,zero3": 0.4}


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count what a process reads")
@pytest.mark.parametrize(
    "layout", ["dp2,zero3", "pp2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tp2", "dp4,zero3"))]
)
def test_a_rank_reads_what_it_has(layout: str, tmp_path: Path) -> None:
    graph = lading.capture(build_model("gpt", **LARGE), batch(0, 0), next_byte_loss, accumulation=2)
    with opened(Saved(layout).planned(graph), graph, tmp_path) as ranks:
        write(ranks, content(ranks[0][0], 1))
        path = save(ranks, tmp_path / "saved")
        total = (path / "state.safetensors").stat().st_size
        for named, _ in ranks:
            before = read_bytes()
            named.load(open_checkpoint(path), ())
            read = read_bytes() - before
            assert read <= most_bytes(named) + MiB // 2  # and what says where the tensors lie
            assert read <= SHARES[layout] * total


def _within_budget(rank: int, out: str, layout: str) -> None:
    made = build_model("gpt", **LARGE)
    graph = lading.capture(made, batch(0, 0), next_byte_loss)
    machine = dataclasses.replace(connected(), device=dataclasses.replace(connected().device, overhead_bytes=32 * MiB))
    plan = lading.plan(graph, machine, layout=layout, budget="100%", policy=states_on_disk, cache=False)
    folder = Path(out) / str(rank)
    folder.mkdir()
    with lading.Trainer(plan, graph, made, folder=folder) as trainer:
        trainer.step(batch(0, rank if plan.replicas > 1 else 0))
        path = trainer.save(Path(out) / "saved")
        expected = trainer.value("tokens.weight.exp_avg")
    with lading.Trainer(plan, graph, None, folder=folder) as trainer:
        trainer.load(path)
        assert trainer.steps == 1
        assert 0 < trainer.peak_bytes <= trainer.plan.budgets["device"]
        assert torch.equal(trainer.value("tokens.weight.exp_avg"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2,zero3", "tp2", "pp2"])
def test_a_load_keeps_the_budget_of_every_rank(layout: str, tmp_path: Path) -> None:
    run_ranks(_within_budget, 2, str(tmp_path), layout)
