"""Every operation of real steps gives, bound to given memory, the bits of the functional operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import transformers
from tests.runtime.cases import loss_fn, model_of
from torch.nn import functional as F

from lading.errors import ProgramError
from lading.ir.graph import Arg, Literal, Op, OpKind, Phase, Ref, StepGraph
from lading.runtime import kernel_calls
from lading.runtime.host_arena import view_of
from lading.runtime.kernel_calls import bind, out_overload, workspace_of
from lading.tracing.trace import capture

UNDEFINED = ("aten.empty_like.default", "aten.empty.memory_format")


def hf_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return model(input_ids=batch["x"], labels=batch["y"]).loss


def bert() -> torch.nn.Module:
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96, vocab_size=80,
        max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def hf_llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=80, bos_token_id=None, eos_token_id=None, pad_token_id=3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Odd(torch.nn.Module):
    """What decoders do not do: convolution, masks, tied and scattered indices, products of unusual layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.table = torch.nn.Embedding(80, 8, padding_idx=2)
        self.head = torch.nn.Linear(24, 80)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        image = F.relu(self.conv(x.new_ones(2, 3, 4, 4) * x.mean()))
        x = x.masked_fill(tokens.unsqueeze(-1) == 5, 1.5) + F.max_pool2d(image, 4).flatten(1).unsqueeze(1)
        rows = torch.arange(16)
        x = torch.cat([x, x.roll(1, 1), x[:, rows.flip(0)]], dim=-1)
        y = torch.stack([x[:, ::2], x[:, 1::2]], 1).cumsum(1).flatten(1, 2)
        y = y.where(y > 0, y.clamp(max=0.5) / 3) - y.amax(-1, keepdim=True).exp().reciprocal().sqrt()
        mixed = (y.transpose(1, 2) @ y).tanh().sigmoid()[:, :, ::2].repeat_interleave(2, -1)
        return self.head((y @ mixed).to(torch.float64).to(torch.float32))


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[..., torch.Tensor]]] = {
    "gpt": (lambda: model_of("gpt", num_layers=1, dropout=0.2), loss_fn),
    "llama": (lambda: model_of("llama", num_layers=1), loss_fn),
    "moe": (lambda: model_of("moe", num_layers=1), loss_fn),
    "bert": (bert, hf_loss),
    "hf_llama": (hf_llama, hf_loss),
    "odd": (Odd, loss_fn),
}


class Values:
    """Bytes of every storage of a captured step, filled operation by operation in the functional form."""

    def __init__(self, graph: StepGraph, named: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> None:
        self.graph = graph
        self.bytes = [torch.zeros(s.size_bytes, dtype=torch.uint8) for s in graph.storages]
        given = [(p.tensor, named[p.names[0]]) for p in graph.parameters] + [(t, named[n]) for n, t in graph.buffers]
        for tensor, value in (*given, *((t, batch[n]) for n, t in graph.inputs[0])):
            self.tensor(tensor).copy_(value.detach())
        for storage, stored in zip(self.bytes, graph.storages, strict=True):
            if stored.data:
                storage.copy_(torch.tensor(list(stored.data), dtype=torch.uint8))

    def tensor(self, index: int) -> torch.Tensor:
        return view_of(self.bytes[self.graph.tensors[index].storage], self.graph.tensors[index])

    def run(self, op: Op) -> None:
        with torch.no_grad():
            out = resolve(op.name)(*map(self._decode, op.args), **{k: self._decode(v) for k, v in op.kwargs})
        flat = list(out) if isinstance(out, (tuple, list)) else [out]
        for value, tensor in zip(flat, op.results, strict=True):
            if tensor is not None:
                assert value.stride() == self.graph.tensors[tensor].stride
                self.tensor(tensor).copy_(value)

    def _decode(self, arg: Arg) -> Any:
        if isinstance(arg, tuple):
            return [self._decode(item) for item in arg]
        return self.tensor(arg.tensor) if isinstance(arg, Ref) else decode_literal(arg)


def decode_literal(arg: Any) -> Any:
    if not isinstance(arg, Literal):
        return arg
    if arg.kind in ("device", "float"):
        return {"device": torch.device, "float": float}[arg.kind](arg.value)
    return getattr(torch, arg.value)


def resolve(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def case(name: str) -> Values:
    torch.manual_seed(0)
    build, loss = MODELS[name]
    model = build().train()
    batch = {k: torch.randint(0, 80, (2, 16)) for k in "xy"}
    graph = capture(model, batch, loss)
    return Values(graph, dict(model.named_parameters()) | dict(model.named_buffers()), batch)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_bound_operations_give_the_bits_of_the_functional_ones(name: str) -> None:
    values = case(name)
    graph = values.graph
    wrong: list[str] = []
    for op in graph.ops:
        before = {s: values.bytes[s].clone() for s in graph.reads(op)}
        generator = torch.get_rng_state()
        values.run(op)
        want = [(t, values.tensor(t).clone()) for t in (*op.outputs, *op.mutates)]
        for storage in graph.writes(op):
            values.bytes[storage].fill_(0xFF)
            values.bytes[storage].copy_(before.get(storage, values.bytes[storage]))
        torch.set_rng_state(generator)
        with torch.inference_mode():
            bind(op, values.tensor).run()
        if op.name not in UNDEFINED and not all(_same_bits(values.tensor(t), value) for t, value in want):
            wrong.append(op.name)
        untouched = before.keys() - set(graph.writes(op))
        assert all(torch.equal(values.bytes[s], before[s]) for s in untouched), op.name
    assert wrong == []


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def test_operations_with_a_kernel_for_given_results_take_no_scratch() -> None:
    graph = case("gpt").graph
    scratch = dict(zip((op.name for op in graph.ops), workspace_of(graph), strict=True))
    for name in ("mm", "addmm", "gelu", "gelu_backward", "_log_softmax", "embedding", "embedding_dense_backward"):
        assert scratch[f"aten.{name}.default"] == 0, name
    assert scratch["aten.native_layer_norm.default"] >= 2 * 16 * 64 * 4


@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("aten.mm.default", "aten.mm.out"),
        ("aten.gelu_backward.default", "aten.gelu_backward.grad_input"),
        ("aten.nll_loss_forward.default", "aten.nll_loss_forward.output"),
        ("aten.mul.Scalar", "aten.mul.out"),
        ("aten.native_layer_norm.default", None),  # its out= overload is the functional one and a copy
        ("aten.add_.Tensor", None),
    ],
)
def test_out_overload(name: str, out: str | None) -> None:
    assert out_overload(name) == out


def allocations(run: Callable[[], object]) -> int:
    """Highest sum of live bytes that torch's CPU allocator gave out during a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("name", ["gpt", "moe", "bert", "odd"])
def test_scratch_covers_what_is_allocated(name: str) -> None:
    values = case(name)
    graph = values.graph
    seen: set[tuple[str, tuple[Any, ...]]] = set()
    for op, scratch in zip(graph.ops, workspace_of(graph), strict=True):
        with torch.inference_mode():
            kernel = bind(op, values.tensor)
            key = (op.name, tuple(graph.tensors[t].shape for t in op.inputs))
            if key in seen:
                kernel.run()
                continue
            seen.add(key)
            assert allocations(kernel.run) <= scratch + 2048, op.name  # a few scalars


def large_calls(batch: int) -> Iterator[tuple[str, tuple[Any, ...], tuple[torch.Tensor, ...]]]:
    """Kernels that run in pieces, at sizes where they do: name, arguments, results of the whole."""
    aten, heads, length, width = torch.ops.aten, 6, 160, 64
    x, grad = torch.randn(2, batch, length * 3, 64 * heads).unbind()
    weight, bias = torch.randn(2, 64 * heads).unbind()
    norm = (x, (64 * heads,), weight, bias, 1e-5)
    result = aten.native_layer_norm.default(*_lists(norm))
    yield "aten.native_layer_norm.default", norm, result
    back = (grad, x, (64 * heads,), *result[1:], weight, bias, (True, True, True))
    yield "aten.native_layer_norm_backward.default", back, aten.native_layer_norm_backward.default(*_lists(back))
    qkv = torch.randn(batch, length * 6, 3 * width * heads)
    q, k, v = (y.unflatten(2, (heads, width)).transpose(1, 2) for y in qkv.chunk(3, -1))
    name = "_scaled_dot_product_flash_attention_for_cpu"
    result = getattr(aten, name).default(q, k, v, 0.0, True)
    yield f"aten.{name}.default", (q, k, v, 0.0, True), result
    back = (torch.randn(batch, length * 6, heads, width).transpose(1, 2), q, k, v, *result, 0.0, True)
    yield f"aten.{name}_backward.default", back, getattr(aten, f"{name}_backward").default(*back)


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("batch", [1, 5])
def test_pieces_give_the_bits_of_the_whole_with_less_scratch(batch: int, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    for name, values, want in large_calls(batch):
        op, tensors = op_of(name, values, tuple(map(torch.empty_like, want)))
        with torch.inference_mode():
            kernel = bind(op, tensors.__getitem__)
            kernel.run()
            assert allocations(kernel.run) <= kernel.scratch_bytes, name
        got = tensors[len(op.inputs) :]
        assert all(map(_same_bits, got, want)), name
        if batch > 1:
            assert kernel.scratch_bytes < sum(t.nbytes for t in want) * 0.6, name


def test_attention_with_a_mask_in_pieces() -> None:
    torch.manual_seed(0)
    aten = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    q, k, v = torch.randn(3, 4, 4, 300, 64).unbind()
    for mask in (torch.randn(4, 1, 300, 300), torch.randn(1, 4, 300, 300), torch.randn(300, 300)):
        want = aten(q, k, v, 0.0, False, attn_mask=mask)
        op, tensors = op_of("aten._scaled_dot_product_flash_attention_for_cpu.default", (q, k, v, 0.0, False), want)
        op = dataclasses.replace(op, kwargs=(("attn_mask", Ref(5)),), inputs=(0, 1, 2, 5))
        copies = [*tensors[:3], *map(torch.zeros_like, want), mask]
        kernel = bind(op, copies.__getitem__)
        kernel.run()
        assert kernel.scratch_bytes < sum(t.nbytes for t in want)
        assert all(map(_same_bits, copies[3:5], want))


@pytest.mark.parametrize("length", [200, 800])
def test_attention_scratch_at_larger_tiles(length: int) -> None:
    torch.set_num_threads(2)
    q, k, v = torch.randn(3, 1, 2, length, 32).unbind()
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, stats = forward(q, k, v, 0.0, True)
    calls = [
        ("", (q, k, v, 0.0, True), (torch.empty_like(out), torch.empty_like(stats))),
        ("_backward", (out, q, k, v, out, stats, 0.0, True), tuple(map(torch.empty_like, (q, k, v)))),
    ]
    for suffix, values, results in calls:
        name = f"aten._scaled_dot_product_flash_attention_for_cpu{suffix}.default"
        op, tensors = op_of(name, values, results)
        kernel = bind(op, tensors.__getitem__)
        kernel.run()
        assert allocations(kernel.run) <= kernel.scratch_bytes


def op_of(name: str, values: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> tuple[Op, list[torch.Tensor]]:
    """An operation on tensors numbered in order of appearance."""
    tensors = [*(v for v in values if isinstance(v, torch.Tensor)), *results]
    count = iter(range(len(tensors)))
    args = tuple(Ref(next(count)) if isinstance(v, torch.Tensor) else v for v in values)
    inputs = tuple(a.tensor for a in args if isinstance(a, Ref))
    outs = tuple(range(len(inputs), len(tensors)))
    op = Op(
        name=name, phase=Phase.FORWARD, args=args, kwargs=(), inputs=inputs, outputs=outs, results=outs, mutates=(),
        module="m", kind=OpKind.ELEMENTWISE,
    )  # fmt: skip
    return op, tensors


def layouts() -> Iterator[tuple[str, tuple[Any, ...], torch.Tensor]]:
    """Calls with inputs and results that do not lie densely."""
    # Products of whole numbers: libraries may sum in another order where another operand is transposed.
    a, b = torch.randn(6, 8).mul(9).round().t(), torch.randn(2, 6, 10).mul(9).round()[1, :, ::2]
    wide = torch.randn(4, 3, 10)[:, :, 1::3]
    yield "aten.mm.default", (a, b), torch.empty(8, 5)
    yield "aten.mm.default", (a, b), torch.empty(5, 8).t()
    yield "aten.addmm.default", (torch.arange(5.0).expand(8, 5), a, b), torch.empty(8, 5)
    whole = torch.randn(4, 3, 10).mul(9).round()[:, :, 1::3]
    yield "aten.bmm.default", (whole, whole.transpose(1, 2)), torch.empty(4, 3, 3)
    yield "aten.add.Tensor", (wide, torch.randn(3, 1)), torch.empty(4, 3, 3)
    yield "aten.add.Scalar", (wide, 2, 3), torch.empty(4, 3, 3)
    yield "aten.mul.Tensor", (wide, 0.3), torch.empty(3, 3, 4).permute(2, 1, 0)
    yield "aten._softmax.default", (wide, 1, False), torch.empty(4, 3, 3)
    yield "aten._log_softmax.default", (wide.transpose(0, 2), -1, False), torch.empty(3, 3, 4)
    yield "aten.sum.dim_IntList", (wide, (0, 2), True), torch.empty(1, 3, 1)
    yield "aten.sum.default", (wide,), torch.empty(())
    yield "aten.clone.default", (wide,), torch.empty(4, 3, 3)
    yield "aten.native_layer_norm.default", (wide, (3,), torch.randn(3), None, 1e-5), torch.empty(4, 3, 3)
    yield "aten.embedding.default", (torch.randn(9, 4), torch.tensor([[1, 8], [3, 1]]).t()), torch.empty(2, 2, 4)
    grad, cut = torch.randn(2, 3, 4), torch.tensor([[1, 8, 3, 0], [3, 1, 1, 0]])[:, :-1]
    yield "aten.embedding_dense_backward.default", (grad, cut, 9, -1, False), torch.empty(9, 4)
    part = torch.randn(2, 3, 8)[..., 4:]  # what a concatenation gives back
    yield "aten.embedding_dense_backward.default", (part, cut, 9, 3, False), torch.empty(9, 4)
    yield "aten.embedding_dense_backward.default", (grad.transpose(0, 1), cut.t(), 9, -1, False), torch.empty(9, 4)
    yield "aten.slice_backward.default", (wide, (4, 9, 3), 1, 2, 8, 2), torch.empty(4, 9, 3)
    yield "aten.index_put.default", (wide, (None, torch.tensor([2, 0])), wide[:, :2], True), torch.empty(4, 3, 3)
    yield "aten.mul.Tensor", (wide.bfloat16(), 0.3), torch.empty(4, 3, 3, dtype=torch.bfloat16)


LAYOUTS = list(layouts())


@pytest.mark.parametrize(("name", "values", "result"), LAYOUTS, ids=[c[0] for c in LAYOUTS])
def test_unusual_layouts(name: str, values: tuple[Any, ...], result: torch.Tensor) -> None:
    op, tensors = op_of(name, values, (result,))
    if name.startswith("aten.native_layer_norm"):  # two statistics that nobody wants
        op = dataclasses.replace(op, results=(*op.results, None, None))
    want = resolve(name)(*_lists(values))
    with torch.inference_mode():
        bind(op, tensors.__getitem__).run()
    assert _same_bits(result, want[0] if isinstance(want, tuple) else want)


def _lists(values: tuple[Any, ...]) -> list[Any]:
    return [list(v) if isinstance(v, tuple) else v for v in values]


def test_padding_row_of_an_embedding_gets_no_gradient() -> None:
    grad, indices = torch.randn(2, 3, 4), torch.tensor([[0, 2, 2], [4, 2, 0]])
    values = (grad, indices, 5, 2, False)
    op, tensors = op_of("aten.embedding_dense_backward.default", values, (torch.empty(5, 4),))
    bind(op, tensors.__getitem__).run()
    assert torch.equal(tensors[-1], torch.ops.aten.embedding_dense_backward.default(*values))
    assert not tensors[-1][2].any()
    assert tensors[-1][0].any()


def test_cut_indices_of_an_embedding_take_no_table_of_scratch() -> None:
    indices = torch.zeros(2, 5, dtype=torch.int64)[:, :-1]
    values = (torch.randn(2, 4, 8), indices, 100, -1, False)
    op, tensors = op_of("aten.embedding_dense_backward.default", values, (torch.empty(100, 8),))
    assert bind(op, tensors.__getitem__).scratch_bytes == 8 * 8


def test_cut_gradients_of_an_embedding_take_no_table_of_scratch() -> None:
    """One half of a row, as a concatenation of two embeddings gives back."""
    grad = torch.randn(8, 16)[:, 8:]
    values = (grad, torch.zeros(8, dtype=torch.int64), 100, -1, False)
    op, tensors = op_of("aten.embedding_dense_backward.default", values, (torch.empty(100, 8),))
    assert bind(op, tensors.__getitem__).scratch_bytes <= grad.nbytes


def test_literals_reach_the_kernel() -> None:
    source, result = torch.tensor([1.0, -2.0]), torch.empty(2)
    op, tensors = op_of("aten.clamp.default", (source, None, 1.0), (result,))
    op = dataclasses.replace(op, args=(Ref(0), Literal("float", "-inf"), 0.5))
    bind(op, tensors.__getitem__).run()
    assert result.tolist() == [0.5, -2.0]


@pytest.mark.parametrize(("batch", "heads", "threads"), [(4, 5, 2), (4, 4, 2), (2, 8, 2), (4, 5, 1), (1, 12, 4)])
def test_parts_of_attention_keep_the_threads_as_busy_as_the_whole(batch: int, heads: int, threads: int) -> None:
    """The kernel gives whole heads to threads."""
    rows, some = kernel_calls._tile(batch, heads, kernel_calls.PIECE_BYTES // 3, threads)
    parts = [len(b) * len(h) for b in _ranges(batch, rows) for h in _ranges(heads, some)]
    assert sum(parts) == batch * heads
    assert sum(-(-part // threads) for part in parts) == -(-batch * heads // threads)
    assert max(parts) < batch * heads or batch == 1


def _ranges(count: int, step: int) -> list[range]:
    return [range(start, min(start + step, count)) for start in range(0, count, step)]


def test_a_result_that_would_be_rounded_is_refused() -> None:
    """A kernel that gives another dtype than was captured is an error, not another number."""
    op = Op("aten.norm.Scalar", Phase.FORWARD, (Ref(0),), (), (0,), (1,), (1,), (), "layer", OpKind.REDUCTION)
    place = torch.zeros(2, dtype=torch.bfloat16)
    copy = kernel_calls._copying(op, place)
    copy(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ProgramError, match=r"in layer: expected a result in torch\.bfloat16"):
        copy(torch.ones(2))
    kernel_calls._copying(op, torch.zeros(2))(torch.ones(2, dtype=torch.bfloat16))
    assert place.tolist() == [1, 1]
