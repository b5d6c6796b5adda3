"""Tables against captures: the same lengths, FLOP and bytes at sizes that were never fitted."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from tools.families import FAMILIES, build_at, sizes_of, write_table
from torch import nn

from lading.catalog.tables import family_table, read_table, stored_table, table_families
from lading.errors import CaptureError, ConfigError
from lading.ir.graph import DTYPE_BYTES, Op, OpKind, Role, StepGraph
from lading.ir.sizes import Size
from lading.ir.table import ModelTable, Segment
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.tracing.tabulate import module_table, table_at_sizes, traced

#: Captured in every run of the tests; the others in slow ones.
_FAST = ("gpt", "gpt-dropout", "llama", "moe-shared", "mla-moe")
_EVERY = [name if name in _FAST else pytest.param(name, marks=pytest.mark.slow) for name in sorted(FAMILIES)]


@cache
def _captured(family: str) -> tuple[dict[str, int], StepGraph, ModelTable]:
    """A family at sizes that its table was not fitted to."""
    at = sizes_of(FAMILIES[family], 9)[-1]
    graph, views, tied = traced(*build_at(family, at), FAMILIES[family].loss)
    return at, graph, table_at_sizes(graph, views, tied, family)


def _shapes(segment: Segment, sizes: dict[str, int]) -> list[tuple[int, ...]]:
    return [tuple(d.at(sizes) for d in t.dims) for t in segment.tensors]


def _bytes(segment: Segment, op: Op, sizes: dict[str, int]) -> tuple[int, int]:
    """Read and written, each operand once."""

    def size(index: int) -> int:
        tensor = segment.tensors[index]
        return int(tensor.elements.at(sizes)) * DTYPE_BYTES[tensor.dtype]

    return sum(map(size, op.inputs)), sum(map(size, dict.fromkeys((*op.outputs, *op.mutates))))


def _flops(shapes: list[tuple[int, ...]], op: Op) -> int:
    ins, out = [shapes[i] for i in op.inputs], [shapes[i] for i in op.outputs]
    if op.kind is OpKind.ATTENTION:
        q, k, v = ins[1:4] if "backward" in op.name else ins[:3]
        scores, values = 2 * prod(q) * k[-2], 2 * prod(q[:-1]) * k[-2] * v[-1]
        return 3 * scores + 2 * values if "backward" in op.name else scores + values
    if op.kind is OpKind.CONVOLUTION:
        return _convolution_flops(shapes, op)
    if op.kind is OpKind.MATMUL:
        left = ins[1] if "addmm" in op.name or "baddbmm" in op.name else ins[0]
        rows = out[0][1:] if "grouped" in op.name and len(ins[1]) == 2 else out[0]  # each group has its own tokens
        return 2 * prod(rows) * left[-1]
    return 0


def _convolution_flops(shapes: list[tuple[int, ...]], op: Op) -> int:
    """Each of a result's numbers takes the kernel's times the channels of a group; backward has two such products."""
    if "backward" not in op.name:
        return 2 * prod(shapes[op.outputs[0]]) * prod(shapes[op.inputs[1]][1:])
    gradient, weight = shapes[op.inputs[0]], shapes[op.inputs[2]]
    return 4 * prod(gradient) * prod(weight[1:])


@pytest.mark.long
@pytest.mark.parametrize("family", _EVERY)
def test_a_stored_table_is_what_a_new_capture_gives(family: str) -> None:
    at, _, found = _captured(family)
    stored = stored_table(family)
    assert len(found.segments) == len(stored.segments)
    for mine, theirs in zip(stored.segments, found.segments, strict=True):
        assert [(op.name, op.inputs, op.outputs, op.module) for op in mine.ops] == [
            (op.name, op.inputs, op.outputs, op.module) for op in theirs.ops
        ]
        assert _shapes(mine, at) == _shapes(theirs, {})
        assert [(t.storage, t.dtype, t.role, t.name) for t in mine.tensors] == [
            (t.storage, t.dtype, t.role, t.name) for t in theirs.tensors
        ]
        assert (mine.saved, mine.gradients, mine.enters, mine.leaves) == (
            theirs.saved, theirs.gradients, theirs.enters, theirs.leaves,
        )  # fmt: skip


@pytest.mark.parametrize("family", _EVERY)
def test_flop_and_bytes_are_those_of_the_graph(family: str) -> None:
    at, graph, _ = _captured(family)
    stored = stored_table(family)
    counts = [Size.of(text).at(FAMILIES[family].layers) for text in stored.counts]
    flops = read = written = 0
    for segment, count in zip(stored.segments, counts, strict=True):
        shapes = _shapes(segment, at)
        for op in segment.ops:
            if op.kind is OpKind.VIEW:
                continue
            flops += count * _flops(shapes, op)
            sizes = _bytes(segment, op, at)
            read, written = read + count * sizes[0], written + count * sizes[1]
    assert flops == graph.flops
    statistics = _widened(stored, counts, at)  # layer norm's are fp32 on a GPU, bf16 on the CPU
    assert read == sum(op.bytes_read for op in graph.ops) + statistics[0]
    assert written == sum(op.bytes_written for op in graph.ops) + statistics[1]


def _widened(stored: Any, counts: list[int], at: dict[str, int]) -> tuple[int, int]:
    """Bytes that layer norms' statistics take more in a table than on the CPU."""
    read = written = 0
    for segment, count in zip(stored.segments, counts, strict=True):
        for op in segment.ops:
            if op.name.startswith("aten.native_layer_norm"):
                tensors = op.inputs[2:4] if "backward" in op.name else op.outputs[1:3]
                more = 2 * count * sum(segment.tensors[t].elements.at(at) for t in tensors)
                read, written = (read + more, written) if "backward" in op.name else (read, written + more)
    return read, written


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_a_table_says_of_its_tensors_holds(family: str) -> None:
    stored = stored_table(family)
    assert read_table(write_table(stored)) == stored
    for before, after in zip(stored.segments, stored.segments[1:], strict=False):
        dims = [[s.tensors[t].dims for t in ends] for s, ends in ((before, before.leaves), (after, after.enters))]
        assert dims[0] == dims[1]
        back = [
            [s.tensors[t].dims for t in ends] for s, ends in ((before, before.enters_back), (after, after.leaves_back))
        ]
        assert back[0] == back[1]
    for segment in stored.segments:
        made = {t for op in segment.ops for t in op.outputs} | set(segment.enters) | set(segment.enters_back)
        for op in segment.ops:
            for t in op.inputs:
                assert t in made or segment.tensors[t].role in (Role.PARAMETER, Role.BUFFER, Role.INPUT, Role.CONSTANT)
        parameters = [t for t in segment.tensors if t.role is Role.PARAMETER and t.name]
        assert len(segment.gradients) == len(parameters)
        for parameter, gradient in segment.gradients:
            assert gradient is not None
            assert segment.tensors[gradient].dims == segment.tensors[parameter].dims


def _dims(segment: Segment, tensors: tuple[int, ...]) -> list[tuple[Size, ...]]:
    return [segment.tensors[t].dims for t in tensors]


def _parameters(table: ModelTable) -> int:
    sizes = {**table.symbols, "s": 1, "b": 1}
    return sum(
        count * sum(int(segment.tensors[p].elements.at(sizes)) for p, _ in segment.gradients)
        for segment, count in zip(table.segments, table.counts, strict=True)
    )


@pytest.mark.long
def test_a_module_has_a_table_in_its_batch() -> None:
    with torch.device("meta"):
        model = build_model("gpt", num_layers=3, dim=30, num_heads=6, max_seq_len=64)
    tokens = torch.zeros(4, 21, dtype=torch.int64, device="meta")
    table = module_table(model, {"tokens": tokens}, next_byte_loss, "own")
    assert table.counts == (1, 3, 1)
    assert [str(d) for d in table.segments[1].tensors[table.segments[1].enters[0]].dims] == ["b", "-1 + s", "30"]
    assert table.tied == (((0, "tokens.weight"), (2, "head.weight")),)
    assert _parameters(table) == sum(p.numel() for p in model.parameters()) + model.head.weight.numel()


class _Stack(nn.Module):
    """Blocks that all take what was made before them, some of another kind; ``known`` of them are counted."""

    def __init__(self, kinds: str, known: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(_StackBlock(kind) for kind in kinds)
        self.known = len(kinds) if known else 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, waves = self.embed(tokens), torch.cos(torch.arange(tokens.shape[1], dtype=torch.float32))
        for at in range(self.known or len(self.layers)):
            x = self.layers[at](x, waves)
        return x


class _StackBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kind = kind

    def forward(self, x: torch.Tensor, waves: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * waves[:, None]
        return x + self.second(y.relu() if self.kind == "r" else y.tanh())


@pytest.mark.long
@pytest.mark.parametrize("known", [False, True])
def test_equal_blocks_in_a_row_are_one_segment(known: bool) -> None:
    model = _Stack("rrrrrttttr", known)
    table = module_table(model, {"x": torch.zeros(4, 12, dtype=torch.int64)}, lambda m, x: m(x["x"]).sum())
    assert table.counts == (1, 5, 4, 1, 1)
    assert [s.name for s in table.segments] == ["before", "layers", "layers.2", "layers.3", "after"]
    assert [[str(d) for d in table.segments[1].tensors[t].dims] for t in table.segments[1].enters] == [
        ["s"],
        ["b", "s", "8"],
    ]
    assert _parameters(table) == sum(p.numel() for p in model.parameters())
    assert len(model.layers) == 10  # as it was


def test_rows_of_numbers_are_no_tokens() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    table = module_table(model, torch.zeros(5, 8), lambda m, x: m(x).sum())
    assert {name for s in table.segments for t in s.tensors for d in t.dims for name in d.symbols} == {"b"}


class _Halves(nn.Module):
    """Takes another way for long inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y.relu() if x.shape[1] < 40 else y.tanh()


def test_other_operations_at_other_sizes_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"relu.*tanh"):
        module_table(_Halves(), lambda b, s: torch.zeros(b, s, 4), lambda m, x: m(x).sum())


def test_a_length_that_is_no_polynomial_is_refused() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x[:, : int(x.shape[1] ** 0.5)]).sum()

    with pytest.raises(CaptureError, match="polynomial"):
        module_table(nn.Linear(4, 4), lambda b, s: torch.zeros(b, s, 4), loss)


def test_missing_sizes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"v \(vocabulary\).*no v"):
        family_table("gpt", layers=2, h=64, n=4)
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        family_table("lama", layers=2)
    assert set(table_families()) == set(FAMILIES)
