"""What stacks fuse: bytes that remain, order, and what must stay apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lading.catalog.load import load_machine
from lading.catalog.stacks import stack_by_name
from lading.catalog.tables import family_table
from lading.cost.fusion import DRAW, eager_norm, fuse, launched, unfused
from lading.cost.kernels import floor_of, kernel_s
from lading.errors import ConfigError
from lading.ir.graph import OpKind, Role
from lading.ir.layout import parse_layout
from lading.ir.work import Attention, Kernel, LocalTensor, Product, RankSegment, Stage
from lading.parallel.ranks import rank_segment

MB = 1 << 20


def tensor(number: int, size: int = MB, storage: int = -1, shape: tuple[int, ...] = (512, 1024)) -> LocalTensor:
    return LocalTensor(number if storage < 0 else storage, "bfloat16", shape, size, Role.ACTIVATION)


def op(name: str, kind: OpKind, inputs: tuple[int, ...], outputs: tuple[int, ...], module: str = "m") -> Kernel:
    stage = Stage.BACKWARD_WEIGHT if module == "weight" else Stage.FORWARD
    detail = Product(512, 512, 1024) if kind is OpKind.MATMUL else None
    size = MB * len(inputs), MB * len(outputs)
    return Kernel(f"aten.{name}.default", kind, stage, module, "bfloat16", *size, inputs, outputs, detail)


def segment(kernels: list[Kernel], count: int, leaves: tuple[int, ...] = ()) -> RankSegment:
    return RankSegment("s", tuple(kernels), tuple(tensor(i) for i in range(count)), (0,), leaves, ())


def names(kernels: tuple[Kernel, ...]) -> list[str]:
    return [k.name.removeprefix("aten.").removesuffix(".default") for k in kernels]


ELEMENTWISE, TRANSCENDENTAL = OpKind.ELEMENTWISE, OpKind.TRANSCENDENTAL


def test_a_chain_becomes_one_kernel_that_writes_only_its_end():
    found = segment([op("silu", TRANSCENDENTAL, (0,), (1,)), op("mul", ELEMENTWISE, (1, 0), (2,))], 3, (2,))
    (one,) = fuse(found, "compiled")
    assert (one.bytes_read, one.bytes_written, one.inputs, one.outputs) == (MB, MB, (0,), (2,))
    assert one.kind is TRANSCENDENTAL
    assert fuse(found, "eager") == found.kernels


def test_what_is_read_outside_is_written():
    kernels = [
        op("silu", TRANSCENDENTAL, (0,), (1,)),
        op("mul", ELEMENTWISE, (1, 0), (2,)),
        op("mm", OpKind.MATMUL, (1,), (3,)),
    ]
    fused = fuse(segment(kernels, 4, (2,)), "fused")
    assert names(fused) == ["fused.silu.mul", "mm"]
    assert fused[0].bytes_written == 2 * MB


def test_fusing_waits_for_a_product_but_never_goes_round_one():
    late = [
        op("silu", TRANSCENDENTAL, (0,), (1,)),
        op("mm", OpKind.MATMUL, (4,), (2,)),
        op("mul", ELEMENTWISE, (1, 2), (3,)),
    ]
    assert names(fuse(segment(late, 5, (3,)), "compiled")) == ["mm", "fused.silu.mul"]
    round_ = [
        op("silu", TRANSCENDENTAL, (0,), (1,)),
        op("mm", OpKind.MATMUL, (1,), (2,)),
        op("mul", ELEMENTWISE, (1, 2), (3,)),
    ]
    assert names(fuse(segment(round_, 4, (3,)), "compiled")) == ["silu", "mm", "mul"]


def test_a_group_goes_round_no_other_group():
    kernels = [
        op("exp", TRANSCENDENTAL, (0,), (1,)),
        op("log", TRANSCENDENTAL, (5,), (2,)),
        op("mm", OpKind.MATMUL, (1,), (3,)),
        op("add", ELEMENTWISE, (2, 3), (4,)),
        op("mm", OpKind.MATMUL, (2,), (6,)),
        op("sub", ELEMENTWISE, (1, 6), (7,)),
    ]
    fused = fuse(segment(kernels, 8, (4, 7)), "compiled")
    assert sorted(names(fused)) in (
        sorted(["exp", "fused.log.add", "mm", "mm", "sub"]),
        sorted(["fused.exp.sub", "log", "add", "mm", "mm"]),
        sorted(["exp", "log", "add", "sub", "mm", "mm"]),
    )
    made: set[int] = {0, 5}
    for kernel in fused:
        assert set(kernel.inputs) <= made
        made |= set(kernel.outputs)


def test_libraries_fuse_a_module_and_dropout_with_the_addition():
    kernels = [
        op("native_dropout", OpKind.RANDOM, (0,), (1,), "dropout"),
        op("add", ELEMENTWISE, (1, 2), (3,), "block"),
        op("native_layer_norm", OpKind.NORM, (3,), (4,), "norm"),
    ]
    found = segment(kernels, 5, (3, 4))
    assert names(fuse(found, "fused")) == ["fused.native_dropout.add", "native_layer_norm"]
    assert len(fuse(found, "compiled")) == 1


def test_sums_over_tokens_are_kernels_apart_when_compiled():
    kernels = [op("mul", ELEMENTWISE, (0, 1), (2,)), op("sum", OpKind.REDUCTION, (2,), (3,))]
    tensors = (*(tensor(i) for i in range(3)), tensor(3, 2048, shape=(1024,)))
    fused = fuse(RankSegment("s", tuple(kernels), tensors, (0,), (2,), ()), "compiled")
    assert names(fused) == ["mul", "sum"]


def test_two_views_of_a_storage_are_read_once_each_and_no_more_than_all():
    views = (tensor(0, MB), tensor(1, MB, 0), tensor(2, 2 * MB, 0), tensor(3))
    kernels = (op("silu", TRANSCENDENTAL, (0,), (3,)), op("mul", ELEMENTWISE, (3, 1, 2), (3,)))
    (one,) = fuse(RankSegment("s", kernels, views, (0,), (3,), ()), "compiled")
    assert one.bytes_read == 2 * MB


def test_what_backward_can_make_again_is_not_saved():
    back = Stage.BACKWARD_INPUT
    kernels = [
        op("silu", TRANSCENDENTAL, (0,), (1,)),
        op("mul", ELEMENTWISE, (1, 2), (3,)),
        op("mm", OpKind.MATMUL, (3,), (4,)),
        replace(op("mul", ELEMENTWISE, (5, 1), (6,)), stage=back),
        replace(op("mul", ELEMENTWISE, (5, 2), (7,)), stage=back),
        replace(op("silu_backward", TRANSCENDENTAL, (7, 0), (8,)), stage=back),
    ]
    forward, _, backward = fuse(segment(kernels, 9, (4,)), "fused")
    assert (forward.bytes_read, forward.bytes_written) == (2 * MB, MB)
    assert (backward.bytes_read, backward.bytes_written) == (3 * MB, 2 * MB)
    kernels[4] = replace(kernels[4], inputs=(5, 9))  # gate alone is not enough
    kernels[5] = replace(kernels[5], inputs=(7, 9))
    forward, _, backward = fuse(segment(kernels, 10, (4,)), "fused")
    assert forward.bytes_written == 2 * MB


@pytest.mark.parametrize(("fused_loss", "per_logit"), [(False, 1.67), (True, 1.0)])
def test_losses_by_stack(fused_loss: bool, per_logit: float):
    kernels = [op("_log_softmax", OpKind.SOFTMAX, (0,), (1,)), op("nll_loss_forward", OpKind.SOFTMAX, (1,), (2,))]
    found = fuse(segment(kernels, 3, (2,)), "fused", fused_loss=fused_loss)
    assert len(found) == (1 if fused_loss else 2)
    assert found[0].bytes_read == round(MB * per_logit)
    assert launched(segment(kernels, 3, (2,)), stack_by_name("megatron-2021")) == fuse(
        segment(kernels, 3, (2,)), "fused"
    )


def test_norms_written_in_python_move_many_times_the_bytes():
    norm = Kernel(
        "aten._fused_rms_norm.default", OpKind.NORM, Stage.FORWARD, "n", "bfloat16", 2 * MB, 2 * MB, (0,), (1,)
    )
    parts = eager_norm(norm)
    assert sum(k.bytes_read + k.bytes_written for k in parts) == 9 * 4 * MB
    back = eager_norm(replace(norm, name="aten._fused_rms_norm_backward.default", stage=Stage.BACKWARD_INPUT))
    assert len(back) > len(parts)
    whole = segment([norm], 2, (1,))
    assert launched(whole, stack_by_name("hf-transformers")) == parts
    assert launched(whole, stack_by_name("torchtitan-eager")) == (norm,)


def test_parts_that_a_stack_runs_operation_by_operation_stay_apart() -> None:
    kernels = [
        op("silu", TRANSCENDENTAL, (0,), (1,), "mlp"),
        op("mul", ELEMENTWISE, (1, 0), (2,), "mlp"),
        op("neg", ELEMENTWISE, (2,), (3,), "attn.rope"),
        op("cat", ELEMENTWISE, (3,), (4,), "attn.rope"),
    ]
    block = segment(kernels, 5, (4,))
    assert names(fuse(block, "fused")) == ["fused.silu.mul", "fused.neg.cat"]
    assert names(fuse(block, "fused", unfused_parts=("swiglu",))) == ["silu", "mul", "fused.neg.cat"]
    assert names(fuse(block, "fused", unfused_parts=("rope",))) == ["fused.silu.mul", "neg", "cat"]


def test_unknown_levels_are_an_error():
    with pytest.raises(ConfigError, match="eager, fused, compiled"):
        fuse(segment([], 0), "inductor")


def block(layout: str, family: str = "llama") -> RankSegment:
    sizes = {"h": 512, "n": 8, "v": 1000} | ({"k": 2, "d": 64, "f": 1024} if family == "llama" else {})
    table = family_table(family, layers=2, **sizes)
    return rank_segment(table.segments[1], {**table.symbols, "s": 512, "b": 2}, parse_layout(layout))


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("layout", ["dp1", "tp2,sp", "tp2"])
def test_real_blocks_move_fewer_bytes_and_keep_all_the_work(family: str, layout: str):
    found = block(layout, family)
    moved: list[int] = []
    for level in ("eager", "fused", "compiled"):
        kernels = fuse(found, level)
        moved.append(sum(k.bytes_read + k.bytes_written for k in kernels if k.detail is None))
        kept = [k for k in kernels if k.detail is not None]
        assert sorted(map(repr, kept)) == sorted(repr(k) for k in found.kernels if k.detail is not None)
        assert len(kernels) <= len(found.kernels)
        written: set[int] = set()
        for kernel in kernels:
            storages = {found.tensors[t].storage for t in kernel.inputs}
            late = {found.tensors[t].storage for k in found.kernels for t in k.outputs} - written
            started = {found.tensors[t].storage for t in found.enters}
            assert not (storages & late) - started - _borders(found)
            written |= {found.tensors[t].storage for t in kernel.outputs}
    assert moved[0] > moved[1] >= moved[2]


def _borders(found: RankSegment) -> set[int]:
    """Storages that some kernel reads before any writes them: parameters and gradients from outside."""
    written: set[int] = set()
    outside: set[int] = set()
    for kernel in found.kernels:
        outside |= {found.tensors[t].storage for t in kernel.inputs} - written
        written |= {found.tensors[t].storage for t in kernel.outputs}
    return outside


def test_unfused_attention_does_the_whole_square():
    attention = Attention(2, 8, 8, 1024, 1024, 64, 64, True, False)
    kernel = Kernel("attn", OpKind.ATTENTION, Stage.FORWARD, "attn", "float16", 1, 1, (), (), attention)
    parts = unfused(kernel)
    assert sum(k.flops for k in parts) == 2 * attention.flops
    back = unfused(Kernel("attn", OpKind.ATTENTION, Stage.BACKWARD_INPUT, "attn", "float16", 1, 1, (), (),
                          Attention(2, 8, 8, 1024, 1024, 64, 64, True, True)))  # fmt: skip
    assert sum(k.flops for k in back) == 2 * sum(k.flops for k in parts)
    device, stack = load_machine("a100").device, stack_by_name("megatron-2021")
    fused_stack = stack_by_name("megatron-core")
    assert kernel_s(kernel, device, stack) == pytest.approx(sum(kernel_s(k, device, stack) for k in parts))
    assert kernel_s(kernel, device, stack) > 2 * kernel_s(kernel, device, fused_stack)
    assert len(fuse(RankSegment("s", (kernel,), (), (), (), ()), "fused", "unfused")) == 4


@pytest.mark.parametrize("fusion", ["compiled", "fused"])
def test_random_numbers_that_a_compiler_draws_cost_flop(fusion: str) -> None:
    """A kernel more for each dropout, of so many FLOP for each byte of its mask; its floor is its time."""
    dropout = replace(op("native_dropout", OpKind.RANDOM, (0,), (1,)), bytes_written=MB + MB // 2)
    given = segment([dropout, op("gelu", OpKind.TRANSCENDENTAL, (1,), (2,))], 3)
    stack = replace(stack_by_name("compiled-torch"), fusion=fusion)
    drawing, device = replace(stack, random_flop=600.0), load_machine("v100-16gb").device
    plain, more = launched(given, stack), launched(given, drawing)
    (draw,) = [kernel for kernel in more if kernel.name == DRAW]
    assert [kernel for kernel in more if kernel.name != DRAW] == list(plain)
    seconds = kernel_s(draw, device, drawing)
    assert seconds == pytest.approx(MB // 2 * 600.0 / device.peak_flops_per_s["float32"])
    assert floor_of(draw, device, drawing).linear_s == seconds
