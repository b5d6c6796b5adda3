"""Expansion to a whole step, against eager PyTorch with gradient accumulation and clip_grad_norm_."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from tests.capture.parity import own, squares, tokens, values
from torch import nn

from lading.errors import ConfigError
from lading.ir.expand import _cut, expand  # pyright: ignore[reportPrivateUsage]
from lading.ir.graph import OpKind, Phase, Role, StepGraph, Tensor
from lading.ir.layout import parse_layout
from lading.ir.program import NO_GRAPH
from lading.ir.reduction import REDUCE_SCATTER, _Reducer, _Span  # pyright: ignore[reportPrivateUsage]
from lading.ir.sharding import shard_parameters
from lading.models.loss import next_byte_loss
from lading.tracing.batches import input_leaves
from lading.tracing.interpret import Interpreter
from lading.tracing.trace import capture


class Halves(nn.Module):
    """Two parameters whose gradients are views of one tensor, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(4, 2))
        self.twice = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.twice @ torch.cat([self.left, self.right], dim=1) + self.twice


def run(graph: StepGraph, named: dict[str, torch.Tensor], batches: Sequence[Any]) -> Interpreter:
    """Every operation of an expanded graph but the updates, which come after all that read the parameters."""
    memory = Interpreter(graph.storages, graph.tensors)
    for parameter in graph.parameters:
        memory.put(parameter.tensor, named[parameter.names[0]])
    for name, tensor in graph.buffers:
        memory.put(tensor, named[name])
    for inputs, batch in zip(graph.inputs, batches, strict=True):
        leaves = dict(input_leaves(batch))
        for name, tensor in inputs:
            memory.put(tensor, leaves[name])
    with torch.no_grad():
        for op in graph.ops:
            if op.kind is not OpKind.STEP:
                memory.run(op)
    return memory


@pytest.mark.long
@pytest.mark.parametrize("clip_norm", [0.0, 1e-3, 1e6])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", ["gpt", "moe", "halves"])
def test_gradients_equal_eager(name: str, accumulation: int, clip_norm: float) -> None:
    torch.manual_seed(0)
    model = Halves() if name == "halves" else own(name, num_layers=1)
    loss = squares if name == "halves" else next_byte_loss
    batches: list[dict[str, torch.Tensor]] = [
        {"x": torch.randn(3, 4)} if name == "halves" else {"tokens": torch.randint(32, (2, 9))}
        for _ in range(accumulation)
    ]
    graph = expand(capture(model, batches[0], loss, accumulation=accumulation), clip_norm=clip_norm)
    memory = run(graph, values(model), batches)
    wanted: list[torch.Tensor] = []
    for batch in batches:
        value = loss(model, batch) / accumulation if accumulation > 1 else loss(model, batch)
        value.backward()
        wanted.append(value.detach())
    if clip_norm:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    assert [memory.tensor(t).item() for t in graph.losses] == [value.item() for value in wanted]
    parameters = dict(model.named_parameters())
    for parameter in graph.parameters:
        assert parameter.gradient is not None
        grad = parameters[parameter.names[0]].grad
        assert grad is not None
        assert torch.equal(memory.tensor(parameter.gradient), grad), parameter.names


def step_of(**settings: Any) -> StepGraph:
    accumulation = settings.pop("accumulation", 1)
    return expand(capture(own("llama"), tokens(), next_byte_loss, accumulation=accumulation), **settings)


@pytest.mark.parametrize(("accumulation", "clip_norm"), [(1, 0.0), (2, 0.0), (1, 1.0), (2, 1.0)])
def test_updates_come_once_after_the_last_reader(accumulation: int, clip_norm: float) -> None:
    graph = step_of(accumulation=accumulation, clip_norm=clip_norm)
    updates = {op.args[0]: position for position, op in enumerate(graph.ops) if op.name == "lading.adamw"}
    assert len(updates) == sum(op.kind is OpKind.STEP for op in graph.ops) == len(graph.parameters)
    for position, op in enumerate(graph.ops):
        if op.kind is not OpKind.STEP:
            continue
        parameter, gradient = (graph.storage_of(t) for t in op.inputs[:2])
        used = [
            i
            for i, other in enumerate(graph.ops)
            if {parameter, gradient} & {*graph.reads(other), *graph.writes(other)}
        ]
        assert used[-1] == position
        between = graph.ops[used[-2] + 1 : position]
        if not clip_norm:  # at once: what stands between are other updates that waited for the same operation
            assert all(other.kind is OpKind.STEP for other in between)
        assert op.phase is Phase.OPTIMIZER
        assert [graph.storages[graph.storage_of(t)].role for t in op.mutates] == [
            Role.PARAMETER,
            *[Role.OPTIMIZER_STATE] * 3,
        ]


def test_more_micro_batches_than_can_be_planned_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"accumulation: expected at most [\d,]+ micro-batches.*got 1,000,000,000 \("):
        step_of(accumulation=10**9)


def test_clipping_is_that_of_torch() -> None:
    graph = step_of(clip_norm=0.5)
    tail = [op for op in graph.ops if op.phase is Phase.OPTIMIZER]
    count = len(graph.parameters)
    names = [op.name.removeprefix("aten.").split(".")[0] for op in tail]
    assert names[:count] == ["linalg_vector_norm"] * count
    assert names[count : count + 6] == ["stack", "linalg_vector_norm", "add", "reciprocal", "mul", "clamp"]
    assert names[count + 6 :] == ["mul_", "lading"] * count
    assert [op.args[1] for op in tail if op.name == "aten.mul.Tensor"] == [0.5]


def test_micro_batches_share_what_lasts_and_nothing_else() -> None:
    one, three = step_of(), step_of(accumulation=3)
    for role in (Role.PARAMETER, Role.BUFFER, Role.CONSTANT, Role.OPTIMIZER_STATE):
        assert three.bytes_of_role(role) == one.bytes_of_role(role)
    for role in (Role.INPUT, Role.GRADIENT):
        assert three.bytes_of_role(role) == 3 * one.bytes_of_role(role)
    assert len({three.storage_of(t) for t in three.losses}) == 3
    assert [[name for name, _ in inputs] for inputs in three.inputs] == [["tokens"]] * 3
    sums = [op for op in three.ops if op.name == "aten.add_.Tensor"]
    assert len(sums) == 2 * len(three.parameters)
    assert {op.phase for op in sums} == {Phase.BACKWARD}
    for block in three.blocks:
        for start in block.starts:
            ops = three.ops[start : start + block.num_ops]
            assert [op.name for op in ops] == [op.name for op in three.ops[block.starts[0] :][: block.num_ops]]
    assert sum(len(b.starts) for b in three.blocks) == 3 * sum(len(b.starts) for b in one.blocks)


def test_states_are_named_for_their_parameters() -> None:
    graph = step_of()
    names = [p.names[0] for p in graph.parameters]
    assert [state.name for state in graph.states] == [f"{n}.{s}" for n in names_in_order(graph, names) for s in STATES]
    sizes = {s.name: sum(graph.storages[graph.storage_of(t)].size_bytes for t in s.parts) for s in graph.states}
    for parameter in graph.parameters:
        size = graph.storages[graph.storage_of(parameter.tensor)].size_bytes
        assert [sizes[f"{parameter.names[0]}.{s}"] for s in STATES] == [size, size, 4]


STATES = ("exp_avg", "exp_avg_sq", "step")


def names_in_order(graph: StepGraph, names: list[str]) -> list[str]:
    """Parameters in the order in which their states were made."""
    order = [s.name.removesuffix(".step") for s in graph.states if s.name.endswith(".step")]
    assert sorted(order) == sorted(names)
    return order


def test_frozen_parameters_have_no_state() -> None:
    model = own("gpt")
    next(model.parameters()).requires_grad_(False)
    graph = expand(capture(model, tokens(), next_byte_loss))
    trained = {p.names[0] for p in graph.parameters if p.gradient is not None}
    assert len(trained) == len(graph.parameters) - 1
    assert {state.name.rpartition(".")[0] for state in graph.states} == trained


def test_refusals() -> None:
    graph = capture(own("gpt"), tokens(), next_byte_loss)
    with pytest.raises(ConfigError, match="clip_norm: expected a finite number >= 0"):
        expand(graph, clip_norm=-1.0)
    with pytest.raises(ConfigError, match="got inf; a number that no norm reaches, as 1e18, takes norms"):
        expand(graph, clip_norm=float("inf"))
    frozen = tuple(dataclasses.replace(p, gradient=None) for p in graph.parameters)
    with pytest.raises(ConfigError, match="no parameter has a gradient"):
        expand(dataclasses.replace(graph, parameters=frozen))


def low(name: str, **sizes: Any) -> StepGraph:
    """A bfloat16 model as captured."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = own(name, **sizes)
    finally:
        torch.set_default_dtype(before)
    return capture(model, tokens(), next_byte_loss, accumulation=2)


def test_states_in_parts_cover_each_parameter_once() -> None:
    captured = capture(own("llama", dim=64), tokens(), next_byte_loss)
    whole, graph = expand(captured), expand(captured, part_elements=1)
    assert [(s.name, s.shape) for s in graph.states] == [(s.name, s.shape) for s in whole.states]
    assert graph.bytes_of_role(Role.OPTIMIZER_STATE) == whole.bytes_of_role(Role.OPTIMIZER_STATE)
    cut = [s for s in graph.states if len(s.parts) > 1]
    assert cut
    for state in cut:
        sizes = [graph.tensors[t].shape[0] for t in state.parts]
        assert sum(sizes) == prod(state.shape)
        assert all(size % 1024 == 0 for size in sizes[:-1])
    for parameter in graph.parameters:
        mine = [op for op in graph.ops if op.kind is OpKind.STEP and writes_to(graph, op, parameter.tensor)]
        assert [dict(op.kwargs).get("first", True) for op in mine] == [True] + [False] * (len(mine) - 1)
        spans = [(graph.tensors[op.args[0].tensor].offset, prod(graph.tensors[op.args[0].tensor].shape)) for op in mine]
        assert spans[0][0] == 0
        assert all(a + n == b for (a, n), (b, _) in pairwise(spans))


def test_parts_of_a_view_lie_within_it() -> None:
    parts = _cut(Tensor(0, "float32", (2, 1024), (1024, 1), offset=512), 2)
    assert [(part.offset, part.shape) for part in parts] == [(512, (1024,)), (1536, (1024,))]


def test_a_gradient_that_is_a_view_is_found_in_its_bucket() -> None:
    step = dataclasses.replace(NO_GRAPH, tensors=(Tensor(0, "float32", (8,), (1,), offset=4),))
    reducer = _Reducer(step, parse_layout("dp2"))
    reducer.spans[0] = [_Span(start=4, stop=12, bucket=1, offset=100)]
    found = reducer.tensors[reducer._in_bucket(0)]  # pyright: ignore[reportPrivateUsage]
    assert (found.storage, found.offset) == (1, 100)


def test_frozen_parameters_are_cut_where_parameters_are() -> None:
    model = own("llama", num_layers=1)
    for parameter in model.layers.parameters():
        parameter.requires_grad_(False)
    captured = capture(model, tokens(), next_byte_loss)
    whole = {zero: sum(captured.tensors[p.tensor].size_bytes for p in captured.parameters if zero == 3 or p.gradient)
             for zero in (1, 3)}  # fmt: skip
    for zero, size in whole.items():
        graph, units, _ = shard_parameters(captured, parse_layout(f"dp2,zero{zero}"))
        cut = 2 * sum(graph.tensors[unit.shard].size_bytes for unit in units)
        assert size <= cut < 1.1 * size


def test_ranks_of_a_sequence_have_terms_of_a_sum_not_of_a_mean() -> None:
    """Of four ranks two share each sequence: the sum of all four is that of two gradients."""
    captured, layout = capture(own("llama", num_layers=1), tokens(), next_byte_loss), parse_layout("dp2,cp2,zero1")
    terms = tuple(dataclasses.replace(p, gradient_terms=2) for p in captured.parameters)
    graph, _, _ = shard_parameters(dataclasses.replace(captured, parameters=terms), layout)
    facts = [dict(op.kwargs) for op in expand(graph, layout=layout).ops if op.name == REDUCE_SCATTER]
    assert {(each["ranks"], each.get("mean_of")) for each in facts} == {(4, 2)}


def writes_to(graph: StepGraph, op: Any, tensor: int) -> bool:
    return graph.storage_of(op.args[0].tensor) == graph.storage_of(tensor)


def test_masters_take_the_gradients_in_float32() -> None:
    graph = expand(low("llama", num_layers=1), clip_norm=1.0, master_weights=True)
    sizes = {s.name: (s.dtype, s.shape) for s in graph.states}
    for parameter in graph.parameters:
        value = graph.tensors[parameter.tensor]
        assert value.dtype == "bfloat16"
        assert parameter.gradient is not None
        assert graph.tensors[parameter.gradient].dtype == "float32"
        assert all(sizes[f"{parameter.names[0]}.{s}"] == ("float32", value.shape) for s in ("master", *STATES[:2]))
    norms = [op for op in graph.ops if op.name == "aten.linalg_vector_norm.default"]
    assert {graph.tensors[op.inputs[0]].dtype for op in norms} == {"float32"}


def test_clipping_without_masters_stays_in_the_gradients_dtype() -> None:
    graph = expand(low("llama", num_layers=1), clip_norm=1.0)
    norms = [op for op in graph.ops if op.name == "aten.linalg_vector_norm.default"]
    assert {graph.tensors[op.outputs[0]].dtype for op in norms} == {"bfloat16"}
    assert not any(state.name.endswith(".master") for state in graph.states)
