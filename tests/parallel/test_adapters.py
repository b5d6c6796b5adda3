"""Adapters: products of a frozen linear with LoRA are those that torch's autograd runs; what is kept and trained."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.validate.requests import request_of
from tools.validate.rows import read_rows
from torch.utils._python_dispatch import TorchDispatchMode

from lading.catalog.stacks import stack_by_name
from lading.catalog.tables import family_table
from lading.errors import ConfigError
from lading.ir.graph import OpKind, Role
from lading.ir.layout import Layout
from lading.ir.request import Architecture, StepRequest
from lading.ir.work import Attention, Kernel, LocalTensor, Product, RankSegment, Stage
from lading.parallel.adapters import Adapters, adapted, adapters_of, packed
from lading.parallel.ranks import rank_segment
from lading.sim.simulate import simulate

ROWS = Path(__file__).parents[2] / "benchmarks" / "validation" / "measurements.jsonl"
TOKENS, IN, OUT, RANK = 24, 40, 56, 8


class Recorder(TorchDispatchMode):
    """Shapes (m, n, k) of products, by whether backward runs, and names of all else that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[tuple[bool, int, int, int]] = Counter()
        self.others: Counter[tuple[bool, str]] = Counter()
        self.backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "mm":
            (m, k), n = args[0].shape, args[1].shape[1]
            self.products[(self.backward, m, n, k)] += 1
        elif name in ("mul", "add", "add_", "native_dropout", "native_dropout_backward"):
            self.others[(self.backward, name)] += 1
        return func(*args, **(kwargs or {}))


def recorded() -> Recorder:
    """A frozen linear and its adapter as PEFT writes them, forward and backward, with an input that needs a gradient.

    The input is used twice, so that its gradients are summed as in a block.
    """
    base = torch.nn.Linear(IN, OUT, bias=False).requires_grad_(False)
    low, high = torch.nn.Linear(IN, RANK, bias=False), torch.nn.Linear(RANK, OUT, bias=False)
    x = torch.randn(TOKENS, IN, requires_grad=True)
    with Recorder() as recorder:
        result = base(x)
        result = result + high(low(torch.native_dropout(x, 0.05, True)[0])) * 0.25
        recorder.backward = True
        torch.autograd.backward([result], [torch.ones_like(result)])
    return recorder


def linear() -> RankSegment:
    """One linear as a block: x, weight, y; gradients of y, x and the weight."""

    def tensor(place: int, role: Role, *shape: int) -> LocalTensor:
        return LocalTensor(place, "bfloat16", shape, 2 * shape[0] * shape[1], role)

    tensors = (
        tensor(0, Role.ACTIVATION, TOKENS, IN),
        tensor(1, Role.PARAMETER, IN, OUT),
        tensor(2, Role.ACTIVATION, TOKENS, OUT),
        tensor(3, Role.ACTIVATION, TOKENS, OUT),
        tensor(4, Role.ACTIVATION, TOKENS, IN),
        tensor(5, Role.GRADIENT, OUT, IN),
    )

    def mm(stage: Stage, work: Product, inputs: tuple[int, ...], output: int) -> Kernel:
        return Kernel("mm", OpKind.MATMUL, stage, "linear", "bfloat16", 1, 1, inputs, (output,), work)

    kernels = (
        mm(Stage.FORWARD, Product(TOKENS, OUT, IN), (0, 1), 2),
        mm(Stage.BACKWARD_WEIGHT, Product(OUT, IN, TOKENS), (3, 0), 5),
        mm(Stage.BACKWARD_INPUT, Product(TOKENS, IN, OUT), (3, 1), 4),
    )
    return RankSegment("block", kernels, tensors, (0,), (2,), (0, 1), {"dp": IN * OUT})


def products(segment: RankSegment) -> Counter[tuple[bool, int, int, int]]:
    works = [(k.stage, k.detail) for k in segment.kernels if isinstance(k.detail, Product)]
    return Counter((stage is not Stage.FORWARD, work.m, work.n, work.k) for stage, work in works)


def layout_of(**settings: Any) -> Layout:
    return Layout(**{"micro_batch": 1, "global_batch": 8, "precision": "bf16", **settings})


def block(family: str = "llama") -> RankSegment:
    table = family_table(family, layers=2, tied=False, name="small", h=64, n=4, k=4, d=16, v=256, f=96)
    return rank_segment(table.segments[1], {**table.symbols, "s": 32}, layout_of())


def test_products_and_kernels_are_those_of_torch() -> None:
    found, real = adapted(linear(), Adapters(rank=RANK, dropout=True), layout_of()), recorded()
    assert products(found) == real.products
    forward = Counter(k.name for k in found.kernels if k.stage is Stage.FORWARD)
    assert forward["adapter.dropout"] == real.others[(False, "native_dropout")] == 1
    assert forward["adapter.scale"] == real.others[(False, "mul")] == 1
    assert forward["adapter.sum"] == real.others[(False, "add")] == 1
    backward = Counter(k.name for k in found.kernels if k.stage is not Stage.FORWARD)
    assert backward["adapter.dropout_back"] == real.others[(True, "native_dropout_backward")] == 1
    assert backward["adapter.scale_back"] == real.others[(True, "mul")] == 1


def test_only_adapters_are_trained_and_kept_for() -> None:
    whole = block()
    found = adapted(whole, Adapters(rank=8), layout_of())
    sides = sum(
        k.detail.k + k.detail.n for k in whole.kernels if k.stage is Stage.FORWARD and isinstance(k.detail, Product)
    )
    assert found.trained_elements == {"dp": 8 * sides}
    assert found.frozen_bytes == 2 * whole.parameter_elements["dp"]
    base = [k for k in found.kernels if k.stage is Stage.BACKWARD_WEIGHT and not k.name.startswith("adapter.")]
    assert base == []


def test_fp32_adapters_move_more() -> None:
    narrow, wide = (adapted(block(), Adapters(rank=8, wide=w, dropout=True), layout_of()) for w in (False, True))
    moved = [sum(k.bytes_read + k.bytes_written for k in s.kernels if k.name != "adapter.mm") for s in (narrow, wide)]
    assert moved[1] > 1.3 * moved[0]
    assert products(narrow) == products(wide)


def test_fp32_adapters_without_autocast_compute_in_fp32() -> None:
    """As torch types them: bf16 in, an fp32 product, a sum that is fp32, and the result cast back once."""
    settings = {"rank": RANK, "wide": True, "dropout": True}
    cast, apart = (adapted(linear(), Adapters(**settings, autocast=on), layout_of()) for on in (True, False))
    assert products(cast) == products(apart)
    small = [{k.dtype for k in s.kernels if k.name == "adapter.mm"} for s in (cast, apart)]
    assert small == [{"bfloat16"}, {"float32"}]
    names = Counter(k.name for k in apart.kernels if k.stage is Stage.FORWARD)
    assert (names["adapter.widen"], names["adapter.narrow"], names["adapter.cast_a"]) == (1, 1, 0)
    last = [k for k in apart.kernels if k.stage is Stage.FORWARD][-1]
    assert (last.name, last.bytes_read, last.bytes_written) == ("adapter.narrow", 4 * TOKENS * OUT, 2 * TOKENS * OUT)
    moved = [sum(k.bytes_read + k.bytes_written for k in s.kernels) for s in (cast, apart)]
    assert moved[1] > moved[0]


@pytest.mark.parametrize(("quantizer", "kernels", "bits"), [("gptq", 9, 4.16), ("nf4", 1, 4.13)])
def test_weights_of_four_bits(quantizer: str, kernels: int, bits: float) -> None:
    whole = block()
    found = adapted(whole, Adapters(rank=8, quantizer=quantizer), layout_of())
    weights = 4 * 64 * 64 + 3 * 64 * 96
    norms = whole.parameter_elements["dp"] - weights
    assert found.frozen_bytes - 2 * norms == pytest.approx(weights * bits / 8, rel=2e-3)
    names = Counter(k.stage for k in found.kernels if k.name.startswith("adapter.dequantize"))
    assert names[Stage.FORWARD] == 7 * kernels
    assert names[Stage.BACKWARD_INPUT] == (0 if quantizer == "gptq" else 7)
    written = [
        k.bytes_written for k in found.kernels if k.name in ("adapter.dequantize.scales", "adapter.dequantize.nf4")
    ]
    assert sum(written[:7]) == 2 * weights


def test_adapters_of_some_modules_only() -> None:
    found = adapted(block(), Adapters(rank=8, modules=("wq", "wk")), layout_of())
    assert found.trained_elements == {"dp": 2 * 8 * (64 + 64)}
    modules = {k.module.split(".adapter")[0] for k in found.kernels if k.name == "adapter.mm"}
    assert modules == {"attn.wq", "attn.wk"}


def test_packed_documents_see_themselves_only() -> None:
    works = [k.detail for k in block().kernels if isinstance(k.detail, Attention)]
    found = [k.detail for k in packed(block(), 8).kernels if isinstance(k.detail, Attention)]
    assert works
    assert len(works) == len(found)
    for before, after in zip(works, found, strict=True):
        assert after.batch * after.query_tokens == before.batch * before.query_tokens
        assert after.flops == pytest.approx(before.flops / 4)


def request(task: str, **settings: Any) -> StepRequest:
    model = Architecture(
        family="llama", symbols={"h": 2048, "n": 16, "k": 16, "d": 128, "v": 32000, "f": 5504}, blocks=(("block", 8),)
    )
    stack = settings.pop("stack", stack_by_name("hf-transformers"))
    given = {"name": task, "model": model, "seq_len": 2048, "machine": "a100", "stack": stack, "task": task, **settings}
    return StepRequest(layout=layout_of(recompute="full"), **given)


def test_memory_and_time_of_the_ways_to_tune() -> None:
    full, lora, both, quantized = (
        simulate(request(task, lora_rank=64 * (task != "sft"), trains_embeddings=outer))
        for task, outer in (("sft", False), ("lora", False), ("lora", True), ("qlora", False))
    )
    assert lora.peak_bytes < full.peak_bytes
    copies = 2 * 32000 * 2048 + 2048
    gained = sum(both.memory[0].values()) - sum(lora.memory[0].values())
    assert gained == pytest.approx(copies * 2 * 4, rel=0.05)  # value, gradient and two moments, in 16 bits
    saved = lora.memory[0][Role.PARAMETER] - quantized.memory[0][Role.PARAMETER]
    linears = 8 * (4 * 2048 * 2048 + 3 * 2048 * 5504)
    assert saved > 0.7 * 2 * linears
    assert lora.step.shares_s["products"] < full.step.shares_s["products"]
    assert quantized.step.step_s > lora.step.step_s


def test_published_steps_of_tuning() -> None:
    """Twenty steps of QwenLM/Qwen's README; one of them (7B, 1,024 tokens, Q-LoRA) is at odds with its neighbors."""
    rows, _ = read_rows([ROWS])
    chosen = [row for row in rows if row.family == "qwen-finetune"]
    errors = [simulate(request_of(row)).step.step_s / row.measured["iteration_s"] - 1 for row in chosen]
    assert len(errors) >= 20
    assert statistics.mean(map(abs, errors)) < 0.06
    assert statistics.median(map(abs, errors)) < 0.03


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(ConfigError, match="rank must be >= 1"):
        adapters_of(request("lora"))
    plain = dataclasses.replace(stack_by_name("hf-transformers"), quantizer="")
    with pytest.raises(ConfigError, match="quantizer for qlora"):
        adapters_of(request("qlora", lora_rank=8, stack=plain))
    with pytest.raises(ConfigError, match="one of gptq, nf4"):
        Adapters(rank=8, quantizer="int3")
    assert adapters_of(request("sft")) is None
