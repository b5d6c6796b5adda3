"""Seconds of kernels on GPUs: against published measurements, limits that must hold, and bad input."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from lading.catalog.kernel_rates import kernel_rates
from lading.catalog.load import load_machine
from lading.catalog.stacks import stack_by_name
from lading.cost.kernels import adam_bytes, assumed_of_attention, attention_s, clip_s, kernel_s, memory_s, step_s
from lading.cost.product import groups_launch_s, peak_flops, product_s, seconds
from lading.errors import ConfigError
from lading.ir.graph import OpKind
from lading.ir.machine import ARCHITECTURES, Curve
from lading.ir.work import Attention, Collective, Kernel, Product, Stage

ROOT = Path(__file__).parents[2] / "benchmarks"
GPUS = ("a100", "a100-40gb", "a100-pcie", "h100", "h100-96gb", "h200", "b200", "gb200", "b300", "gb300")


def device(name: str):
    return load_machine(name).device


def measured(kind: str, hardware: str) -> Iterator[tuple[dict[str, str], float, float]]:
    """Shape, TFLOP/s and efficiency of measured operators."""
    for line in (ROOT / "validation" / "operators_collectives.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == kind and row["hardware"].startswith(hardware):
            yield row["shape"], row["achieved_tflops"] * 1e12, row["efficiency"]


def test_products_of_an_a100_are_as_measured():
    off: list[float] = []
    for shape, rate, _ in measured("matmul", "A100"):
        product = Product(int(shape["m"]), int(shape["n"]), int(shape["k"]), accumulates=shape["accumulate"] == "True")
        off.append(abs(product_s(product, "bfloat16", device("a100-pcie")) * rate / product.flops - 1))
    assert median(off) < 0.02
    assert sorted(off)[int(0.9 * len(off))] < 0.12


def test_rows_that_start_at_few_bytes_slow_products_as_measured():
    rows = json.loads((ROOT / "calibrate" / "published_unaligned.json").read_text(encoding="utf-8"))["rows"]
    off: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        product = Product(row["m"], row["n"], row["k"], row["groups"])
        predicted = product_s(product, "float16", device("a100"))
        off[row["groups"] == 1].append(abs(predicted * row["tflops"] * 1e12 / product.flops - 1))
    assert median(off[True]) < 0.1
    assert median(off[False]) < 0.2
    even, odd = (product_s(Product(8192, n, 14336), "float16", device("a100")) for n in (51200, 51201))
    assert 3 < odd / even < 4
    even, odd = (product_s(Product(8192, n, 14336), "float32", device("a100")) for n in (51200, 51201))
    assert odd == pytest.approx(even, rel=0.05)
    gradients = [product_s(Product(51201, 14336, 8192), "float16", device("a100"), of_weight=w) for w in (True, False)]
    assert 3 < gradients[0] / gradients[1] < 4  # only there are its columns rows in memory


def test_long_products_of_a_b200_are_as_measured():
    off: list[float] = []
    for shape, rate, _ in measured("matmul", "B200"):
        product = Product(int(shape["m"]), int(shape["n"]), int(shape["k"]), accumulates=shape["accumulate"] == "True")
        out = 4.0 if shape["out_dtype"] == "fp32" else 2.0
        if product.flops / rate > 1e-3:
            off.append(abs(product_s(product, "bf16", device("b200"), out_bytes=out) * rate / product.flops - 1))
    assert len(off) > 200
    assert median(off) < 0.03
    assert sorted(off)[int(0.9 * len(off))] < 0.08


def test_attention_is_as_published():
    data = json.loads((ROOT / "calibrate" / "published_attention.json").read_text(encoding="utf-8"))
    off: list[float] = []
    for series in data["series"]:
        if series["pass"] != "forward":
            continue
        for length, rate in zip(data["lengths"], series["tflops"], strict=True):
            heads, dim = 2048 // series["dim"], series["dim"]
            found = Attention(16384 // length, heads, heads, length, length, dim, dim, series["causal"], False)
            seconds = attention_s(found, "bfloat16", device(series["machine"]), series["kernel"])
            off.append(abs(seconds * rate * 1e12 / found.flops - 1))
    assert len(off) == 18 * 6
    assert median(off) < 0.03
    assert max(off) < 0.2


def test_attention_of_an_a100_that_no_figure_shows():
    off: list[float] = []
    for kind, backward in (("sdp_fwd", False), ("sdp_bwd", True)):
        for shape, rate, _ in measured(kind, "A100"):
            heads, keys = int(shape["head_num"]), int(shape["kv_head_num"])
            dims = int(shape["qk_head_dim"]), int(shape["v_head_dim"])
            found = Attention(1, heads, keys, 4096, 4096, *dims, True, backward)
            full = (5 if backward else 2) * 4096**2 * heads * sum(dims)
            off.append(abs(attention_s(found, "bfloat16", device("a100-pcie")) * rate / full - 1))
    assert median(off) < 0.07


def test_operations_that_move_bytes_are_as_published():
    off: list[float] = []
    for line in (ROOT / "calibrate" / "published_memory.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["class"] in ("elementwise.fused", "step") and row["bytes"] > 3e8:
            found = memory_s(row["bytes"], row["class"], device(row["machine"]))
            off.append(abs(found / row["seconds"] - 1))
    assert len(off) > 4
    assert max(off) < 0.06


@pytest.mark.parametrize("name", GPUS)
def test_no_product_beats_its_limits(name: str):
    gpu = device(name)
    for precision in ("bf16", "fp8", "mxfp8", "nvfp4"):
        if name.startswith("a100") and precision != "bf16":
            with pytest.raises(ConfigError, match="float"):
                product_s(Product(8, 8, 8), precision, gpu)
            continue
        if name.startswith("h") and precision == "nvfp4":
            continue
        for shape in ((8192, 8192, 8192), (1, 8192, 8192), (4096, 128, 65536), (77, 33, 5)):
            product = Product(*shape)
            seconds = product_s(product, precision, gpu, sustained=0.0)
            assert seconds >= product.flops / peak_flops(gpu, precision)
            assert product_s(product, precision, gpu) >= seconds
            least = {"bf16": 2.0, "fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5}[precision]
            moved = least * product.k * (product.m + product.n) + 2 * product.m * product.n
            assert seconds >= moved / gpu.memory_bandwidth_bytes_per_s


def test_products_grow_with_every_dim_and_group():
    gpu = device("h100")
    base = product_s(Product(4096, 4096, 4096), "bf16", gpu)
    for product in (Product(8192, 4096, 4096), Product(4096, 8192, 4096), Product(4096, 4096, 8192)):
        assert 1.8 < product_s(product, "bf16", gpu) / base < 2.2
    assert product_s(Product(512, 4096, 4096, groups=8), "bf16", gpu) > base
    assert product_s(Product(4096, 4096, 4096, accumulates=True), "bf16", gpu) > base
    assert product_s(Product(4096, 4096, 4096), "fp8", gpu) < 0.7 * base


def test_a_product_that_is_split_writes_and_reads_its_parts_in_fp32():
    """One tile on eight multiprocessors: eight sums, each of an eighth of k, and then the sum of these."""
    rates = replace(
        kernel_rates("ampere").product, tiles=((128, 128),), reach=1.0, operand_columns=0.0, wave_share=0.0,
        prologue_k=0.0, epilogue_share=0.0, memory_share=1.0, fixed_s=0.0,
    )  # fmt: skip
    product, peak, bandwidth = Product(128, 128, 16384), 1e12, 1e11
    outputs, operands = 128 * 128, 16384 * (128 + 128)
    compute = product.flops / peak + (8 + 1) * 4 * outputs / bandwidth
    memory = 2 * (operands + outputs) / bandwidth
    found = seconds(product, (2.0, 2.0), peak, bandwidth, 8, rates)
    assert found == pytest.approx((compute**4 + memory**4) ** 0.25, rel=1e-9)


def test_a_power_limit_slows_products_and_less_attention():
    limited, full = device("h100-96gb"), device("h100")
    product, attention = Product(8192, 8192, 8192), Attention(1, 32, 32, 8192, 8192, 128, 128, True, False)
    slow = product_s(product, "bf16", limited) / product_s(product, "bf16", full)
    assert 1.2 < slow < 1.45
    assert 1 < attention_s(attention, "bfloat16", limited) / attention_s(attention, "bfloat16", full) < slow


def test_attention_knows_mask_window_and_how_many_heads_fill_the_device():
    gpu = device("h100")

    def of(batch: int, heads: int, tokens: int, causal: bool, window: int = 0) -> float:
        found = Attention(batch, heads, heads, tokens, tokens, 128, 128, causal, False, window)
        return attention_s(found, "bfloat16", gpu, "flash3")

    assert 0.5 < of(1, 32, 16384, True) / of(1, 32, 16384, False) < 0.6
    assert of(1, 32, 16384, True, window=1024) < 0.3 * of(1, 32, 16384, True)
    assert of(1, 2, 4096, True) > 2 * of(1, 32, 4096, True) / 16
    assert of(8, 32, 4096, True) == pytest.approx(8 * of(1, 32, 4096, True), rel=0.15)


def test_unknown_kernels_and_devices_are_named():
    attention = Attention(1, 8, 8, 512, 512, 64, 64, True, False)
    with pytest.raises(ConfigError, match="'unfused' attention is"):
        attention_s(attention, "bfloat16", device("h100"), "unfused")
    with pytest.raises(ConfigError, match="expected an architecture"):
        kernel_rates("volta")
    with pytest.raises(ConfigError, match="expected a GPU whose kernels were measured"):
        attention_s(attention, "bfloat16", device("rtx4090"))
    send = Kernel("send", None, Stage.FORWARD, "", "bfloat16", 0, 0, (), (), Collective("send", "pp", 8))
    with pytest.raises(ConfigError, match="the collective send"):
        kernel_s(send, device("h100"), stack_by_name("default"))


def test_devices_without_fitted_kernels_go_by_their_own_rates():
    for name in ("v100-32gb", "mi300x", "rtx4090", "cpu-server"):
        gpu = device(name)
        dtype = "float32" if name == "cpu-server" else "float16"
        product = Product(4096, 4096, 4096)
        assert product_s(product, dtype, gpu) > product.flops / gpu.peak_flops_per_s[dtype]
        backward = Attention(1, 8, 8, 2048, 2048, 64, 64, True, True)
        fused = Kernel("attention", OpKind.ATTENTION, Stage.BACKWARD_INPUT, "", dtype, 0, 0, (), (), backward)
        assert kernel_s(fused, gpu, stack_by_name("default")) > backward.flops / gpu.peak_flops_per_s[dtype]
        assert memory_s(1e8, "norm_backward.fused", gpu) > 1e8 / gpu.memory_bandwidth_bytes_per_s


def kernel(detail: Product | None, stage: Stage = Stage.FORWARD, name: str = "aten.mm.default") -> Kernel:
    kind = OpKind.MATMUL if detail else OpKind.NORM
    return Kernel(name, kind, stage, "", "bfloat16", 10**8, 10**8, (), (), detail)


def test_stacks_change_what_a_kernel_takes():
    gpu = device("h100")
    eager, fused, compiled = (stack_by_name(n) for n in ("torchtitan-eager", "megatron-core", "torchtitan-compile"))
    norm, back = kernel(None), kernel(None, Stage.BACKWARD_INPUT)
    assert kernel_s(norm, gpu, eager) > kernel_s(norm, gpu, fused) == kernel_s(norm, gpu, compiled)
    assert kernel_s(back, gpu, fused) > kernel_s(norm, gpu, fused)
    weight = kernel(Product(4096, 4096, 4096), Stage.BACKWARD_WEIGHT)
    assert kernel_s(weight, gpu, fused) > kernel_s(weight, gpu, compiled)
    experts = kernel(Product(16, 1024, 1024, groups=64), name="aten._grouped_mm.default")
    assert kernel_s(experts, gpu, fused) == groups_launch_s(Product(16, 1024, 1024, groups=64), gpu)
    assert kernel_s(experts, gpu, compiled) < kernel_s(experts, gpu, fused)


def test_low_precision_counts_the_casts():
    gpu, stack = device("h100"), stack_by_name("nemo")
    product = Product(8192, 8192, 8192)
    forward, weight = kernel(product), kernel(product, Stage.BACKWARD_WEIGHT)
    moved = 8192 * 8192 * 4  # delayed scaling: read once, written along rows and along columns
    assert kernel_s(forward, gpu, stack, "fp8") == pytest.approx(
        product_s(product, "fp8", gpu) + memory_s(moved, "elementwise.fused", gpu)
    )
    assert kernel_s(weight, gpu, stack, "fp8") == product_s(
        Product(8192, 8192, 8192, accumulates=True), "fp8", gpu, out_bytes=2.0
    )


def test_optimizer_and_clipping_by_bytes():
    assert adam_bytes(stack_by_name("megatron-core")) == 4 + 24 + 2
    assert adam_bytes(stack_by_name("torchtitan-compile")) == 28
    foreach, kept = (dataclasses.replace(stack_by_name("torchtitan-compile"), foreach=on) for on in (True, False))
    assert adam_bytes(foreach) - adam_bytes(kept) == 4 * 13, "passes of torch/optim/adamw.py over fp32"
    low = dataclasses.replace(foreach, parameters_dtype="", gradient_dtype="bfloat16")
    assert adam_bytes(low) == 2 * 20, "all in 16 bits: 20 passes"
    gpu = device("a100")
    assert step_s(1e9, 28, gpu) == pytest.approx(28e9 / (0.82 * 2.039e12), rel=0.01)
    assert clip_s(1e9, stack_by_name("megatron-core"), gpu) > 12e9 / 2.039e12


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_says_where_its_numbers_come_from(architecture: str):
    rates = kernel_rates(architecture)
    assert set(rates.sources) == {"product", "attention", "memory"}
    assert 0 < rates.memory.share < 1
    assert all(set(passes) == {"forward", "backward"} for passes in rates.attention.values())


@pytest.mark.slow
def test_the_catalog_holds_what_the_fits_give():
    products = pytest.importorskip("benchmarks.calibrate.products")
    ampere = load_machine("a100-pcie").device
    fitted = products.fit(products.shapes("A100"), ampere, "ampere")
    known = kernel_rates("ampere").product
    for name in ("reach", "operand_columns", "wave_share", "prologue_k", "epilogue_share", "memory_share", "fixed_s"):
        assert getattr(known, name) == pytest.approx(getattr(fitted, name), rel=0.02)


@pytest.mark.slow
def test_products_left_out_of_the_fit_are_predicted():
    products = pytest.importorskip("benchmarks.calibrate.products")
    found = products.shapes("A100")
    off = products.left_out(found, load_machine("a100-pcie").device, "ampere", lambda p: p.n)
    assert median(map(abs, off)) < 0.04
    assert sorted(map(abs, off))[int(0.9 * len(off))] < 0.12


@pytest.mark.parametrize(("name", "rate"), [("a100", 19.18e12), ("h100", 52.0e12), ("b200", 66.24e12)])
def test_large_products_in_fp32_are_as_measured(name: str, rate: float):
    # zzc0721/torch-performance-test-data database.md @9d828276, without TF32
    product = Product(10240, 10240, 10240)
    assert product_s(product, "float32", device(name)) == pytest.approx(product.flops / rate, rel=0.05)


def test_attention_in_fp32_takes_three_products_in_tf32_for_each():
    for causal in (False, True):
        shape = Attention(2, 32, 32, 4096, 4096, 128, 128, causal, False)
        wide = attention_s(shape, "float32", device("h100"), "flash2")
        # The memory-efficient kernel, which alone takes fp32, has the rates of "masked".
        halves = attention_s(replace(shape, causal=False), "bfloat16", device("h100"), "masked", sustained=0.0)
        assert wide == pytest.approx(6 * halves * (0.53 if causal else 1), rel=0.1)
    kernel = Kernel("sdpa", OpKind.ATTENTION, Stage.FORWARD, "attn", "bfloat16", 0, 0, (), (), shape)
    board, stack = device("rtxpro6000"), stack_by_name("eager-torch")
    wide = replace(kernel, dtype="float32")
    assert kernel_s(wide, board, stack) == pytest.approx(6.4 * kernel_s(kernel, board, stack)), "not its fp32 peak, too"
    own = {"_scaled_dot_product_efficient_attention": Curve(size=(1e6, 1e9), rate=(3e13, 3e13))}
    probed = replace(board, rates={**board.rates, **own})
    assert kernel_s(wide, probed, stack) == pytest.approx(shape.flops / 3e13), "as it was measured on this device"


@pytest.mark.parametrize(
    ("tokens", "heads", "batch", "rates"), [(2048, 16, 2, (37.4, 29.1)), (4096, 32, 1, (42.4, 33.5))]
)
def test_attention_in_fp32_is_as_measured_on_an_h100(tokens: int, heads: int, batch: int, rates: tuple[float, float]):
    # benchmarks/gpu/results, one_device, alone: TFLOP/s of what a causal mask leaves, forward and backward
    for backward, measured in zip((False, True), rates, strict=True):
        shape = Attention(batch, heads, heads, tokens, tokens, 128, 128, True, backward)
        flops = 2.0 * tokens**2 * 128 * heads * batch * (2.5 if backward else 1.0)
        rate = flops / attention_s(shape, "float32", device("h100"), "flash2")
        assert rate == pytest.approx(measured * 1e12, rel=0.15), backward


def test_masked_attention_goes_back_in_small_tiles_where_shared_memory_is_small():
    # Dao-AILab/flash-attention issue 416: 12.3 TFLOP/s beside 53.5, and 1.15 times for the mask
    for columns, longer in ((128, 4.99), (96, 2.226 * 576 / 480), (64, 2.226)):
        shape = Attention(2, 16, 16, 4096, 4096, columns, columns, False, True)
        kernel = Kernel("sdpa", OpKind.ATTENTION, Stage.BACKWARD_INPUT, "attn", "bfloat16", 0, 0, (), (), shape)
        flash, masked = (replace(stack_by_name("eager-torch"), attention=word) for word in ("flash2", "masked"))
        for name in ("rtx4090", "rtxpro6000", "l40s", "a10g"):
            ratio = kernel_s(kernel, device(name), masked) / kernel_s(kernel, device(name), flash)
            assert ratio == pytest.approx(longer, rel=0.01), (name, columns)
        forward = replace(kernel, detail=replace(shape, backward=False), stage=Stage.FORWARD)
        ratio = kernel_s(forward, device("rtx4090"), masked) / kernel_s(forward, device("rtx4090"), flash)
        assert ratio == pytest.approx(2.226 * ((columns + 128) / 192 if columns == 96 else 1.0), rel=0.01)


def test_rows_at_odd_addresses_cost_boards_of_a_data_sheet_the_clocks_that_they_cost_an_a100():
    # 3.319 times on an A100, of 2,049 FLOP a clock and multiprocessor; a V100 does 1,024, an RTX 3090 512
    for name, longer in (("v100-32gb", 1 + 2.319 / 2), ("rtx3090", 1 + 2.319 / 4)):
        odd, even = (
            kernel_s(
                Kernel("mm", OpKind.MATMUL, Stage.FORWARD, "head", "float16", 0, 0, (), (), Product(8192, n, 8192)),
                device(name),
                stack_by_name("eager-torch"),
            )
            for n in (50257, 50256)
        )
        assert odd / even == pytest.approx(longer, rel=1e-3), name


def test_rules_of_nvidias_boards_of_a_data_sheet_are_of_no_others():
    """AMD's GPUs have other kernels; a probed A100 or H100 has rates of its own, and 164 KiB and more a block."""
    software = stack_by_name("eager-torch")
    probed = replace(device("rtx4090"), name="NVIDIA H100 80GB HBM3", num_threads=16, skinny_dim=132.3)
    shape = Attention(2, 16, 16, 4096, 4096, 128, 128, False, True)
    attention = Kernel("sdpa", OpKind.ATTENTION, Stage.BACKWARD_INPUT, "attn", "bfloat16", 0, 0, (), (), shape)
    for one in (probed, *map(device, ("mi250x", "mi300x", "mi325x", "mi355x"))):
        flash, masked = (kernel_s(attention, one, replace(software, attention=word)) for word in ("flash2", "masked"))
        assert masked / flash == pytest.approx(2.226, rel=1e-3), one.name
        odd, even = (
            Kernel("mm", OpKind.MATMUL, Stage.FORWARD, "head", "bfloat16", 0, 0, (), (), Product(8192, n, 8192))
            for n in (50257, 50256)
        )
        assert kernel_s(odd, one, software) / kernel_s(even, one, software) == pytest.approx(1, rel=1e-3), one.name


def test_before_ampere_the_own_rate_is_the_memory_efficient_kernels():
    shape = Attention(2, 16, 16, 2048, 2048, 128, 128, True, False)
    kernel = Kernel("sdpa", OpKind.ATTENTION, Stage.FORWARD, "attn", "float16", 0, 0, (), (), shape)
    for name in ("v100-32gb", "t4"):
        board, peaks = device(name), device(name).peak_flops_per_s
        flash, masked = (replace(stack_by_name("eager-torch"), attention=word) for word in ("flash2", "masked"))
        causal = kernel_s(kernel, board, flash)
        assert kernel_s(kernel, board, masked) == pytest.approx(2 * causal, rel=0.15), "what the mask leaves out, too"
        wide = kernel_s(replace(kernel, dtype="float32"), board, flash)
        assert wide == pytest.approx(causal * peaks["float16"] / peaks["float32"]), "fp32 has no tensor cores there"
        (said,) = assumed_of_attention("flash2", board)
        assert "compute capability 8.0" in said
        assert assumed_of_attention("masked", board) == assumed_of_attention("flash2", device("a100")) == ()


def test_heads_of_96_columns_fill_tiles_of_128_where_a_product_makes_their_rows():
    for backward, factor in ((False, (96 + 128) / (2 * 96)), (True, (2 * 96 + 3 * 128) / (5 * 96))):
        for columns, longer in ((96, factor), (64, 1.0), (128, 1.0)):
            shape = Attention(2, 32, 32, 8192, 8192, columns, columns, False, backward)
            masked, flash = (attention_s(shape, "bfloat16", device("a100"), name) for name in ("masked", "flash1"))
            assert masked / flash == pytest.approx(longer, rel=0.01)
