"""Operation costs: each class by its formula, monotone, with every guess said aloud."""

from __future__ import annotations

import dataclasses
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lading.catalog.load import load_machine
from lading.cost.compute import (
    compiled_products,
    fused_costs,
    kernel_of,
    missing_rates,
    op_bytes,
    op_costs,
    op_seconds,
    packed_columns,
    walk,
)
from lading.errors import ConfigError
from lading.ir.graph import Arg, Op, OpKind, Phase, Ref, Role, StepGraph, Storage, Tensor
from lading.ir.machine import PACKED_COLUMNS, Curve, Device
from lading.ir.opkinds import kind_of

CPU, H100 = load_machine("cpu").device, load_machine("h100").device
FLAT = Device(
    name="flat",
    kind="cpu",
    memory_bytes=1 << 30,
    memory_bandwidth_bytes_per_s=1e9,
    op_overhead_s=1e-3,
    peak_flops_per_s={"float32": 1e10},
    optimizer_elements_per_s=1e6,
)


def tensor(*shape: int, dtype: str = "float32", stride: tuple[int, ...] | None = None) -> Tensor:
    dense = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return Tensor(0, dtype, shape, stride or dense)


def graph(
    name: str,
    inputs: list[Tensor],
    outputs: list[Tensor],
    *,
    rest: tuple[Arg, ...] = (),
    kind: OpKind | None = None,
    flops: int = 0,
    mutates: tuple[int, ...] = (),
    repeat: int = 1,
) -> StepGraph:
    """One operation on its own storages, ``repeat`` times."""
    tensors = [dataclasses.replace(t, storage=i) for i, t in enumerate((*inputs, *outputs))]
    ids = tuple(range(len(inputs)))
    outs = tuple(range(len(inputs), len(tensors)))
    op = Op(
        name=name,
        phase=Phase.FORWARD,
        args=(*(Ref(i) for i in ids), *rest),
        kwargs=(),
        inputs=ids,
        outputs=outs,
        results=outs,
        mutates=mutates,
        module="m",
        kind=kind or kind_of(name) or OpKind.ELEMENTWISE,
        flops=flops,
        bytes_read=sum(tensors[i].touched_bytes for i in ids),
        bytes_written=sum(tensors[i].touched_bytes for i in (*outs, *mutates)),
    )
    storages = tuple(Storage(f"s{i}", t.size_bytes, Role.ACTIVATION) for i, t in enumerate(tensors))
    return StepGraph(
        storages=storages,
        tensors=tuple(tensors),
        ops=(op,) * repeat,
        parameters=(),
        buffers=(),
        inputs=((),),
        losses=(),
    )


def mm(m: int, k: int, n: int, dtype: str = "float32", repeat: int = 1) -> StepGraph:
    operands = [tensor(m, k, dtype=dtype), tensor(k, n, dtype=dtype)]
    return graph("aten.mm.default", operands, [tensor(m, n, dtype=dtype)], flops=2 * m * k * n, repeat=repeat)


def joined(first: StepGraph, second: StepGraph) -> StepGraph:
    """Two products, one after the other."""
    return dataclasses.replace(
        first,
        storages=(*first.storages, *second.storages),
        tensors=(*first.tensors, *(dataclasses.replace(t, storage=t.storage + 3) for t in second.tensors)),
        ops=(*first.ops, dataclasses.replace(second.ops[0], args=(Ref(3), Ref(4)), inputs=(3, 4), outputs=(5,))),
    )


def seconds(g: StepGraph, device: Device) -> float:
    return op_seconds(g, g.ops[0], device)


dims = st.integers(1, 4096)


@given(
    m=dims,
    k=dims,
    n=dims,
    grow=st.integers(1, 4),
    which=st.integers(0, 2),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_a_larger_product_never_takes_less_work_time(m: int, k: int, n: int, grow: int, which: int, dtype: str) -> None:
    large = [m, k, n]
    large[which] *= 1 + grow
    for device in (CPU, H100):
        # Efficiency may rise with size, never faster than the work.
        assert 0 < seconds(mm(m, k, n, dtype), device) <= seconds(mm(*large, dtype), device) * (1 + 1e-9)


@given(
    size=st.integers(1, 1 << 26),
    more=st.integers(1, 1 << 26),
    kind=st.sampled_from(["mul.Tensor", "exp.default", "clone.default", "_softmax.default"]),
)
def test_more_bytes_never_take_less_on_a_flat_machine(size: int, more: int, kind: str) -> None:
    def cost(n: int) -> float:
        return seconds(graph(f"aten.{kind}", [tensor(n)], [tensor(n)]), FLAT)

    assert FLAT.op_overhead_s < cost(size) < cost(size + more)
    assert cost(size) == pytest.approx(1e-3 + 8 * size / 1e9)


def test_a_product_by_hand() -> None:
    device = dataclasses.replace(FLAT, skinny_dim=100.0, product_efficiency=Curve(size=(1.0, 1e12), rate=(0.5, 0.5)))
    share = 0.5 * (100 / 200) * (300 / 400) * (900 / 1000)
    assert seconds(mm(100, 300, 900), device) == pytest.approx(1e-3 + 2 * 100 * 300 * 900 / (1e10 * share))


def test_the_bias_of_addmm_is_no_dimension() -> None:
    operands = [tensor(900), tensor(100, 300), tensor(300, 900)]
    biased = graph("aten.addmm.default", operands, [tensor(100, 900)], flops=2 * 100 * 300 * 900)
    device = dataclasses.replace(FLAT, skinny_dim=100.0)
    assert seconds(biased, device) == pytest.approx(seconds(mm(100, 300, 900), device))


def test_batched_and_grouped_products_are_judged_by_one_matrix() -> None:
    device = dataclasses.replace(FLAT, product_efficiency=Curve(size=(2e3, 2e6), rate=(0.1, 1.0)))
    flops = 2 * 64 * 10**3
    batched = graph("aten.bmm.default", [tensor(64, 10, 10), tensor(64, 10, 10)], [tensor(64, 10, 10)], flops=flops)
    assert seconds(batched, device) == pytest.approx(1e-3 + flops / (1e10 * 0.1))
    operands = [tensor(640, 10), tensor(64, 10, 10), tensor(64, dtype="int32")]
    grouped = graph("aten._grouped_mm.default", operands, [tensor(640, 10)], flops=flops)
    assert seconds(grouped, device) == pytest.approx(seconds(batched, device))


def test_matrices_of_a_batch_fill_a_gpu_together() -> None:
    efficiency = Curve(size=(2e3, 2e6), rate=(0.1, 1.0))
    device = dataclasses.replace(FLAT, kind="cuda", product_efficiency=efficiency, memory_bandwidth_bytes_per_s=1e12)
    flops = 2 * 64 * 10**3
    batched = graph("aten.bmm.default", [tensor(64, 10, 10), tensor(64, 10, 10)], [tensor(64, 10, 10)], flops=flops)
    assert seconds(batched, device) == pytest.approx(1e-3 + flops / (1e10 * efficiency.at(flops)))
    slow = dataclasses.replace(device, memory_bandwidth_bytes_per_s=1e6)
    assert seconds(batched, slow) == pytest.approx(1e-3 + 4 * 64 * 3 * 100 / 1e6), "no faster than memory takes them"


def test_a_dtype_without_a_peak_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"float8_e5m2.*float32.*peak_flops_per_s\.float8_e5m2"):
        seconds(mm(8, 8, 8, "float8_e5m2"), FLAT)


def test_an_operation_prefers_its_own_rate_then_its_class_then_bandwidth() -> None:
    g = graph("aten.gelu_backward.default", [tensor(1000), tensor(1000)], [tensor(1000)])

    def with_rates(**rates: float) -> Device:
        curves = {k: Curve(size=(1.0,), rate=(v,)) for k, v in rates.items()}
        return dataclasses.replace(FLAT, rates=curves)

    assert seconds(g, FLAT) == pytest.approx(1e-3 + 12e3 / 1e9)
    assert seconds(g, with_rates(transcendental=1e8)) == pytest.approx(1e-3 + 12e3 / 1e8)
    assert seconds(g, with_rates(transcendental=1e8, transcendental_backward=1e7)) == pytest.approx(1e-3 + 12e3 / 1e7)
    assert seconds(g, with_rates(transcendental=1e8, gelu_backward=1e6)) == pytest.approx(1e-3 + 12e3 / 1e6)


def test_a_gelu_through_a_tanh_has_a_rate_of_its_own() -> None:
    erf, other = Curve(size=(1.0,), rate=(1e8,)), Curve(size=(1.0,), rate=(2e7,))
    plain = graph("aten.gelu.default", [tensor(1000)], [tensor(1000)])
    (op,) = plain.ops
    through_tanh = dataclasses.replace(plain, ops=(dataclasses.replace(op, kwargs=(("approximate", "tanh"),)),))
    both = dataclasses.replace(FLAT, rates={"gelu": erf, "gelu.tanh": other})
    assert seconds(plain, both) == pytest.approx(1e-3 + 8e3 / 1e8)
    assert seconds(through_tanh, both) == pytest.approx(1e-3 + 8e3 / 2e7)
    assert seconds(through_tanh, dataclasses.replace(FLAT, rates={"gelu": erf})) == seconds(plain, both)


def attention(causal: bool, flops: int) -> StepGraph:
    q, stats = tensor(2, 3, 128, 16), tensor(2, 3, 128)
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    return graph(name, [q, q, q], [q, stats], rest=(0.0, causal), flops=flops)


def test_attention_flops_come_from_the_shapes() -> None:
    full = 4 * 2 * 3 * 128 * 128 * 16
    bare, given_flops = attention(False, 0), attention(False, full)
    assert kernel_of(bare, bare.ops[0]).flops == full
    assert seconds(bare, CPU) == seconds(given_flops, CPU)
    q, stats = tensor(2, 3, 128, 16), tensor(2, 3, 128)
    name = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    backward = graph(name, [q, q, q, q, q, stats], [q, q, q], rest=(0.0, True))
    assert kernel_of(backward, backward.ops[0]).flops == full * 5 / 4  # causal: half


def test_attention_goes_at_the_rate_of_one_of_its_heads() -> None:
    """Each is a product of its own: many short ones are as slow as one."""
    device = dataclasses.replace(FLAT, rates={"attention": Curve(size=(1e6, 1e9), rate=(1e9, 1e12))})
    full = 4 * 2 * 3 * 128 * 128 * 16
    assert seconds(attention(False, full), device) == pytest.approx(
        1e-3 + full / device.rates["attention"].at(full / 6)
    )


def test_causal_attention_does_half() -> None:
    device = dataclasses.replace(FLAT, rates={"attention": Curve(size=(1.0,), rate=(1e9,))})
    full = 4 * 2 * 3 * 128 * 128 * 16
    assert seconds(attention(False, full), device) == pytest.approx(1e-3 + full / 1e9)
    assert seconds(attention(True, full), device) == pytest.approx(1e-3 + full / 2e9)


def test_an_update_counts_elements_without_a_rate_and_bytes_with_one() -> None:
    state = [tensor(1000), tensor(1000), tensor(1000), tensor(1000), Tensor(0, "float32", (), ())]
    g = graph("lading.adamw", state, [], mutates=(0, 2, 3, 4), kind=OpKind.STEP)
    assert seconds(g, FLAT) == pytest.approx(1e-3 + 1000 / 1e6)
    rated = dataclasses.replace(FLAT, rates={"step": Curve(size=(1.0,), rate=(28e6,))})
    assert seconds(g, rated) == pytest.approx(1e-3 + 28008 / 28e6)


def test_bytes_are_those_that_move() -> None:
    table, index = tensor(10_000, 8), tensor(5, dtype="int64")
    lookup = graph("aten.embedding.default", [table, index], [tensor(5, 8)])
    assert op_bytes(lookup, lookup.ops[0]) == 160 + 160 + 40
    put = graph("aten.index_put_.default", [table, index, tensor(5, 8)], [], mutates=(0,))
    assert op_bytes(put, put.ops[0]) == 3 * 160
    kernel = kernel_of(put, put.ops[0])  # of a table only the rows that are added to are written
    assert (kernel.bytes_read, kernel.bytes_written) == (2 * 160, 160)
    copy = graph("aten.copy_.default", [tensor(100), tensor(100)], [], mutates=(0,))
    assert op_bytes(copy, copy.ops[0]) == 800
    zeros = graph("aten.zeros_like.default", [tensor(100)], [tensor(100)])
    assert op_bytes(zeros, zeros.ops[0]) == 400


def test_walks_against_memory_are_seen() -> None:
    def of(name: str, *inputs: Tensor, out: Tensor, rest: tuple[Arg, ...] = ()) -> tuple[int, bool]:
        g = graph(name, list(inputs), [out], rest=rest)
        return tuple(walk(g, g.ops[0]))  # type: ignore[return-value]

    dense, turned = tensor(64, 32), tensor(64, 32, stride=(1, 64))
    assert of("aten.mul.Tensor", dense, dense, out=dense) == (1, False)
    assert of("aten.mul.Tensor", turned, turned, out=turned) == (1, False)
    assert of("aten.mul.Tensor", dense, turned, out=dense)[1]
    assert of("aten.clone.default", turned, out=dense)[1]
    heads = tensor(2, 4, 128, 32, stride=(16384, 32, 128, 1))
    assert of("aten.mul.Tensor", heads, tensor(128, 32), out=heads) == (256, False)
    assert of("aten.sum.dim_IntList", dense, out=tensor(1, 32), rest=((0,), True))[1]
    assert not of("aten.sum.dim_IntList", dense, out=tensor(64, 1), rest=((-1,), True))[1]


@pytest.mark.parametrize(
    ("shape", "dim", "stride", "bandwidth"),
    [
        ((4, 8), 0, None, 4e9), ((1, 4, 8), 1, None, 4e9), ((32,), -1, None, 4e9),
        ((4, 8), 1, None, 1e9), ((4, 8), -1, None, 1e9), ((4, 8), 0, (1, 4), 1e9),
    ],
)  # fmt: skip
def test_tensors_joined_as_they_lie_are_copied(
    shape: tuple[int, ...], dim: int, stride: tuple[int, ...] | None, bandwidth: float
) -> None:
    joined = tuple(2 * n if d == dim % len(shape) else n for d, n in enumerate(shape))
    made = graph("aten.cat.default", [tensor(*shape, stride=stride)] * 2, [tensor(*joined)], kind=OpKind.COPY)
    op = dataclasses.replace(made.ops[0], args=((Ref(0), Ref(1)), dim))
    curves = {name: Curve(size=(1.0,), rate=(rate,)) for name, rate in (("copy", 4e9), ("cat", 1e9))}
    device = dataclasses.replace(FLAT, rates=curves)
    assert op_seconds(made, op, device) == pytest.approx(1e-3 + 512 / bandwidth)


def test_small_pieces_bound_a_pointwise_operation() -> None:
    heads = tensor(2, 4, 128, 32, stride=(16384, 32, 128, 1))
    g = graph("aten.mul.Tensor", [heads, tensor(128, 32)], [heads])
    device = dataclasses.replace(FLAT, rates={"runs": Curve(size=(1.0,), rate=(100.0,))})
    assert seconds(g, device) == pytest.approx(1e-3 + 256 / 100.0)


def test_op_costs_are_op_seconds_in_order() -> None:
    g = mm(32, 64, 16, repeat=3)
    assert op_costs(g, CPU) == [seconds(g, CPU)] * 3


def test_every_guess_is_said_once() -> None:
    g = graph("aten.exp.default", [tensor(8)], [tensor(8)], repeat=3)
    assert missing_rates(g, CPU) == ()
    assert missing_rates(g, FLAT) == ("no rate of transcendental on flat: timed by its bytes at memory bandwidth",)
    unknown = graph("aten.frobnicate.default", [tensor(8)], [tensor(8)])
    assert missing_rates(unknown, CPU) == (
        "aten.frobnicate.default is not a known operation: timed as elementwise on generic 8-core desktop CPU",
    )
    assert any("run at peak" in line for line in missing_rates(mm(8, 8, 8), FLAT))


@pytest.mark.parametrize("name", ["aten.empty.memory_format", "aten.new_empty_strided.default"])
def test_an_allocation_costs_its_launch_and_nothing_is_guessed(name: str) -> None:
    g = graph(name, [], [tensor(1000)])
    assert seconds(g, FLAT) == FLAT.op_overhead_s
    assert missing_rates(g, FLAT) == ()


def test_sixteen_bits_take_their_own_rates_or_say_what_they_take() -> None:
    peaks = {"float32": 1e10, "bfloat16": 4e10}
    own = {"mm": Curve(size=(1.0,), rate=(5e9,)), "elementwise": Curve(size=(1.0,), rate=(1e9,))}
    plain = dataclasses.replace(FLAT, peak_flops_per_s=peaks, rates=own)
    low = {"matmul.bfloat16": Curve(size=(1.0,), rate=(8e9,)), "elementwise.bfloat16": Curve(size=(1.0,), rate=(2e9,))}
    typed = dataclasses.replace(plain, rates={**own, **low})
    product, sixteen = mm(64, 64, 64), mm(64, 64, 64, "bfloat16")
    flops = 2 * 64**3
    assert seconds(product, plain) == seconds(product, typed) == 1e-3 + flops / 5e9
    assert seconds(sixteen, plain) == pytest.approx(1e-3 + flops / 2e10)
    assert seconds(sixteen, typed) == 1e-3 + flops / 8e9
    narrow = tensor(1000, dtype="bfloat16")
    added = graph("aten.add.Tensor", [narrow, narrow], [narrow])
    assert seconds(added, plain) == 1e-3 + 6000 / 1e9
    assert seconds(added, typed) == 1e-3 + 6000 / 2e9
    assert [bool(missing_rates(g, plain)) for g in (product, sixteen, added)] == [False, True, True]
    assert "bfloat16 rate of products" in missing_rates(sixteen, plain)[0]
    assert not any(missing_rates(g, typed) for g in (product, sixteen, added))
    without = dataclasses.replace(plain, peak_flops_per_s={"float32": 1e10})
    with pytest.raises(ConfigError, match="bfloat16"):
        seconds(sixteen, without)


def test_products_in_sixteen_bits_go_by_their_layout() -> None:
    rates = {"matmul.bfloat16": 4e9, "matmul.NT.bfloat16": 8e9, "matmul.NN.bfloat16": 1e9}
    curves = {name: Curve(size=(1.0,), rate=(rate,)) for name, rate in rates.items()}
    device = dataclasses.replace(FLAT, peak_flops_per_s={"float32": 1e10, "bfloat16": 4e10}, rates=curves)
    straight, other = tensor(64, 64, dtype="bfloat16"), tensor(64, 64, dtype="bfloat16")
    turned = dataclasses.replace(other, stride=(1, 64))
    flops = 2 * 64**3
    for right, left, rate in ((other, straight, 1e9), (turned, straight, 8e9), (other, turned, 4e9)):
        g = graph("aten.mm.default", [left, right], [straight], flops=flops)
        assert seconds(g, device) == pytest.approx(1e-3 + flops / rate)
        assert not missing_rates(g, device)


def test_attention_without_a_mask_has_a_rate_of_its_own() -> None:
    masked, whole = Curve(size=(1.0,), rate=(1e9,)), Curve(size=(1.0,), rate=(2e9,))
    plain, both = ({"attention": masked}, {"attention": masked, "attention.whole": whole})
    for is_causal in (True, False):
        g = attention(is_causal, 0)
        by_mask = seconds(g, dataclasses.replace(FLAT, rates=plain)) - FLAT.op_overhead_s
        by_own = seconds(g, dataclasses.replace(FLAT, rates=both)) - FLAT.op_overhead_s
        assert by_own == pytest.approx(by_mask if is_causal else by_mask / 2)


def test_memory_for_packing_grows_with_each_wider_product() -> None:
    assert packed_columns(mm(8, 512, 64, repeat=3)) == 64 + 200
    assert packed_columns(mm(8, 512, 100_000)) == PACKED_COLUMNS + 200
    assert packed_columns(joined(mm(8, 512, 64), mm(8, 512, 300))) == (64 + 200) + (300 + 200)
    assert packed_columns(joined(mm(8, 512, 300), mm(8, 512, 64))) == 300 + 200
    assert packed_columns(mm(8, 256, 100)) == 200  # not deep: two thirds
    assert packed_columns(mm(8, 512, 64, dtype="bfloat16")) == 0
    narrow = graph("aten.add.Tensor", [tensor(8)], [tensor(8)])
    assert packed_columns(narrow) == 0


def test_a_run_that_is_compiled_reads_and_writes_only_what_crosses_its_border() -> None:
    """x + x, times x, into a product: one call that reads x and writes what the product reads."""
    x = tensor(512, 512)
    tensors = tuple(dataclasses.replace(x, storage=i) for i in range(4))
    sums = graph("aten.add.Tensor", [x], [x]).ops[0]
    size = x.touched_bytes
    times = dataclasses.replace(
        sums, name="aten.mul.Tensor", inputs=(0, 1), outputs=(2,), results=(2,), bytes_read=2 * size
    )
    product = dataclasses.replace(
        mm(512, 512, 512).ops[0], args=(Ref(2), Ref(2)), inputs=(2,), outputs=(3,), results=(3,)
    )
    step = StepGraph(
        storages=tuple(Storage(f"s{i}", size, Role.ACTIVATION) for i in range(4)),
        tensors=tensors,
        ops=(sums, times, product),
        parameters=(),
        buffers=(),
        inputs=((),),
        losses=(3,),
    )
    alone, fused = op_costs(step, FLAT), fused_costs(step, FLAT)
    assert alone[0] == pytest.approx(1e-3 + 2 * size / 1e9)
    assert fused[0] == pytest.approx(1e-3 + size / 1e9)  # its result is never written
    assert fused[1] == pytest.approx(size / 1e9)  # x is there already, and the call was made
    assert fused[2] == alone[2]


def test_code_is_compiled_once_for_each_distinct_product_of_16_bit_numbers() -> None:
    assert compiled_products(mm(8, 8, 64)) == 0
    assert compiled_products(mm(8, 8, 64, dtype="bfloat16", repeat=3)) == 1
    straight, turned = tensor(8, 8, dtype="bfloat16"), tensor(8, 8, dtype="bfloat16", stride=(1, 8))
    once = graph("aten.mm.default", [straight, straight], [straight])
    other = graph("aten.mm.default", [straight, turned], [straight])
    assert compiled_products(joined(once, other)) == 2
