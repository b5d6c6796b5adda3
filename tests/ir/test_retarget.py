"""Graphs for a GPU: every operation that is put in has, on meta tensors, the results that the graph says."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lading.errors import ConfigError
from lading.ir.expand import expand
from lading.ir.graph import Arg, Literal, Op, Ref, Role, StepGraph
from lading.ir.retarget import retarget
from lading.memory.lifetime import lifetimes
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.runtime.kernel_calls import workspace_of
from lading.tracing.trace import capture

SIZES: dict[str, Any] = {"num_layers": 2, "dim": 64, "num_heads": 4, "vocab_size": 80, "max_seq_len": 40}


def decoder(
    name: str, dtype: torch.dtype = torch.float32, micro: int = 1, clip: float = 0.0, **sizes: Any
) -> StepGraph:
    model = build_model(name, **SIZES | sizes).to(dtype)
    batch = {"tokens": torch.zeros(2, 38, dtype=torch.int64)}
    graph = capture(model, batch, next_byte_loss, accumulation=micro)
    return expand(graph, clip_norm=clip, master_weights=dtype is torch.bfloat16)


class Attends(torch.nn.Module):
    """One attention with a mask or without, after a layer norm."""

    def __init__(self, width: int = 8, heads: int = 2, kv_heads: int = 2, mask: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.norm = torch.nn.LayerNorm(heads * width)
        self.kv = torch.nn.Linear(heads * width, kv_heads * width)
        self.register_buffer("mask", None if mask is None else torch.zeros(mask))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (y.unflatten(-1, (-1, self.width)).transpose(1, 2) for y in (self.norm(x), self.kv(x)))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, k, attn_mask=self.mask, is_causal=self.mask is None, enable_gqa=grouped, scale=0.3
        )  # type: ignore[arg-type]


def attends(dtype: torch.dtype = torch.float32, length: int = 16, **sizes: Any) -> StepGraph:
    model = Attends(**sizes).to(dtype)
    width = model.heads * model.width
    return expand(capture(model, {"x": torch.zeros(3, length, width, dtype=dtype)}, lambda m, b: m(b["x"]).sum()))


def meta_results(graph: StepGraph, op: Op) -> list[Any]:
    """What the operation gives on meta tensors laid out as the graph has them."""

    def value(arg: Arg) -> Any:
        match arg:
            case Ref(tensor):
                t = graph.tensors[tensor]
                return torch.empty_strided(t.shape, t.stride, dtype=getattr(torch, t.dtype), device="meta")
            case Literal("device", _):
                return torch.device("meta")
            case Literal(_, text):
                return getattr(torch, text)
            case tuple():
                return [value(item) for item in arg]
            case _:
                return arg

    namespace, packet, overload = op.name.split(".")
    call = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    out = call(*map(value, op.args), **{k: value(v) for k, v in op.kwargs})
    return list(out) if isinstance(out, (tuple, list)) else [out]


GRAPHS: dict[str, Callable[[], StepGraph]] = {
    "gpt": lambda: decoder("gpt", dropout=0.1, micro=2, clip=1.0),
    "gpt bf16": lambda: decoder("gpt", torch.bfloat16, dropout=0.1),
    "llama": lambda: decoder("llama", clip=0.5),
    "llama bf16": lambda: decoder("llama", torch.bfloat16, num_kv_heads=2),
    "mask": lambda: attends(mask=(16, 16)),
    "mask of each head": lambda: attends(torch.bfloat16, mask=(1, 2, 16, 16)),
    "wide": lambda: attends(torch.bfloat16, width=264),
    "shared heads": lambda: attends(heads=4, kv_heads=2),
    "llama with shared heads": lambda: decoder("llama", num_kv_heads=2, micro=2),
    "unaligned": lambda: attends(torch.float32, width=12),
}
NEW = ("attention", "dropout", "_foreach_norm", "native_layer_norm", "_fused_rms_norm")


@pytest.mark.long
@pytest.mark.parametrize("name", GRAPHS)
def test_new_operations_give_what_the_graph_says(name: str) -> None:
    old = GRAPHS[name]()
    graph = retarget(old, "cuda")
    checked = 0
    for op in graph.ops:
        assert "_for_cpu" not in op.name
        assert "bernoulli" not in op.name
        if not any(part in op.name for part in NEW):
            continue
        checked += 1
        found = meta_results(graph, op)
        assert len(found) == len(op.results), op.name
        for given, result in zip(found, op.results, strict=True):
            if result is not None and "layer_norm" not in op.name:
                t = graph.tensors[result]
                assert (tuple(given.shape), str(given.dtype)) == (t.shape, f"torch.{t.dtype}"), op.name
    assert checked >= 4
    lifetimes(graph)
    assert len(workspace_of(graph, "cuda")) == len(graph.ops)
    assert graph.parameters == old.parameters
    assert graph.losses == old.losses


def names(graph: StepGraph) -> Counter[str]:
    return Counter(op.name.split(".")[1] for op in graph.ops)


def test_kernels_by_dtype_and_mask() -> None:
    flash, efficient = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
    for graph, wanted in (
        (GRAPHS["llama bf16"](), flash),
        (GRAPHS["llama"](), efficient),
        (GRAPHS["wide"](), efficient),
    ):
        count = names(graph)["_scaled_dot_product_flash_attention_for_cpu"]
        found = names(retarget(graph, "cuda"))
        assert found[wanted] == found[f"{wanted}_backward"] == count > 0
    assert retarget(graph, "cpu") is graph
    old = names(retarget(attends(torch.bfloat16), "cuda", flash=False))
    assert old[efficient] == old[f"{efficient}_backward"] == 1


def test_dropout_keeps_one_byte_an_element() -> None:
    old = GRAPHS["gpt"]()
    new = retarget(old, "cuda")
    found = names(new)
    assert found["native_dropout"] == found["native_dropout_backward"] == 2 * 5  # micro-batches, dropouts
    assert names(old)["bernoulli_"] == 10
    assert len(new.ops) == len(old.ops) - 3 * 10
    masks = [
        s
        for op in new.ops
        if "native_dropout.default" in op.name
        for s in [new.storages[new.storage_of(op.outputs[1])]]
    ]
    assert {s.size_bytes for s in masks} == {2 * 37 * 64}
    probabilities = {op.args[1] for op in new.ops if op.name == "aten.native_dropout.default"}
    assert probabilities == {0.1}
    assert new.bytes_of_role(Role.ACTIVATION) < old.bytes_of_role(Role.ACTIVATION)
    assert all(op.random for op in new.ops if op.name == "aten.native_dropout.default")
    for block in new.blocks:
        runs = [[new.ops[s + i].name for i in range(block.num_ops)] for s in block.starts]
        assert all(run == runs[0] for run in runs)


class Halves(torch.nn.Module):
    """Noise that is used in another way than dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(x).bernoulli_(0.5)
        return (x * self.weight * noise + noise.div(0.5)).sum()


def test_other_uses_of_random_numbers_are_left_alone() -> None:
    graph = capture(Halves(), {"x": torch.zeros(3, 4)}, lambda m, b: m(b["x"]))
    assert names(retarget(graph, "cuda")) == names(graph)


def test_statistics_of_norms_are_wide() -> None:
    graph = retarget(GRAPHS["gpt bf16"](), "cuda")
    for op in graph.ops:
        if op.name.startswith("aten.native_layer_norm"):
            statistics = (
                op.results[1:3]
                if "backward" not in op.name
                else tuple(a.tensor for a in op.args[3:5] if isinstance(a, Ref))
            )
            assert {graph.tensors[t].dtype for t in statistics if t is not None} == {"float32"}


def test_devices_and_gradient_norms() -> None:
    graph = GRAPHS["llama"]()
    made = dataclasses.replace(graph.ops[0], kwargs=(("device", Literal("device", "cpu")),))
    graph = dataclasses.replace(graph, ops=(made, *graph.ops[1:]))
    new = retarget(graph, "cuda")
    assert dict(new.ops[0].kwargs)["device"] == Literal("device", "cuda")
    found = names(new)
    assert found["_foreach_norm"] == len(graph.parameters)
    assert found["linalg_vector_norm"] == 1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: attends(torch.float64), "float64 has none"),
        (lambda: attends(torch.bfloat16, width=12), "multiple of 8"),
        (lambda: attends(width=6), "multiple of 8"),
    ],
)
def test_attention_without_a_kernel_is_refused(make: Callable[[], StepGraph], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        retarget(make(), "cuda")


def test_what_only_a_cpu_has_is_refused() -> None:
    graph = GRAPHS["mask"]()
    odd = dataclasses.replace(graph.ops[0], name="aten.mkldnn_rnn_layer.default", module="lstm")
    with pytest.raises(ConfigError, match=r"mkldnn_rnn_layer\.default in lstm has a kernel for the CPU only"):
        retarget(dataclasses.replace(graph, ops=(odd, *graph.ops[1:])), "cuda")
