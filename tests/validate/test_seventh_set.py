"""Words of the seventh set that was predicted before anything was changed for it, and what they mean."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tools.validate.requests import request_of
from tools.validate.rows import Row, read_rows

from lading.catalog.load import load_machine
from lading.cost.kernels import attention_s
from lading.cost.product import product_s
from lading.ir.work import Attention, Product
from lading.sim.simulate import simulate
from tests.validate.test_fifth_set import asked

_FOLDER = Path(__file__).parents[2] / "benchmarks" / "validation"


@pytest.fixture(scope="module", name="rows")
def fixture_rows() -> dict[str, Row]:
    rows, notes = read_rows([_FOLDER / "blind_frameworks_7.jsonl"])
    assert (len(rows), notes) == (127, [])
    return {row.id: row for row in rows}


def test_every_word_of_the_seventh_set_is_read(rows: dict[str, Row]) -> None:
    assert {row.id: request_of(row).unread for row in rows.values() if request_of(row).unread} == {}


def test_transformer_engine_that_is_denied_is_not_used(rows: dict[str, Row]) -> None:
    """'ViT currently does not support Transformer Engine' had cuDNN's attention."""
    row = rows["vit-t5x-b16-h100"]
    assert asked(row).stack.attention == "unfused"
    assert asked(row, notes="Transformer Engine is used").stack.attention == "cudnn"


@pytest.mark.parametrize(
    ("row", "framework", "source", "attention"),
    [
        ("keras-bert-jax", "Keras 3 (JAX, XLA)", "keras-io, 2024-03", "unfused"),
        ("keras-gemma-torch", "Keras 3 (PyTorch, eager)", "keras-io, 2024-03", "unfused"),
        ("keras-bert-tf", "Keras 3 (TensorFlow 2.15, XLA)", "keras-io, 2024-03", "unfused"),
        ("keras-bert-jax", "Keras 3 (JAX, XLA)", "keras-io, 2025-06", "flash2"),
    ],
)
def test_keras_has_attention_in_its_layers_until_2024(
    rows: dict[str, Row], row: str, framework: str, source: str, attention: str
) -> None:
    changed = dataclasses.replace(rows[row], source=source)
    assert asked(changed, layout={"framework": framework}).stack.attention == attention


@pytest.mark.parametrize(
    ("framework", "tf32"),
    [
        ("Keras 3 (JAX, XLA)", True),
        ("Keras 3 (TensorFlow 2.15, XLA)", True),
        ("TensorFlow 1.15, XLA", False),
        ("TensorFlow 2.3", False),
        ("Keras 3 (PyTorch, eager)", False),
        ("PyTorch 2.2", False),
    ],
)
def test_jax_and_tensorflow_round_fp32_to_tf32(rows: dict[str, Row], framework: str, tf32: bool) -> None:
    row = rows["keras-bert-jax"]
    assert asked(row, layout={"framework": framework}).stack.tf32 is tf32
    assert not asked(row, layout={"framework": framework}, notes="TF32 disabled").stack.tf32


def test_norms_and_gelu_of_frameworks_without_kernels_for_them_run_in_parts(rows: dict[str, Row]) -> None:
    assert asked(rows["keras-mistral-torch"]).stack.eager_norms
    assert not asked(rows["keras-mistral-jax"]).stack.eager_norms
    apart, compiled = (asked(rows[f"dlperf-bert-{name}-amp-1"]).stack.unfused for name in ("tf", "tfxla"))
    assert ("gelu" in apart, "gelu" in compiled) == (True, False)


def test_a_container_holds_software_of_its_month(rows: dict[str, Row]) -> None:
    """Figures of 2023 of a container of 2022 had PyTorch 2.0's fused attention."""
    row = rows["lambda-bert-a10"]
    assert asked(row).stack.attention == "unfused"
    later = dataclasses.replace(row, source=row.source.replace("22.09", "23.06"))
    assert asked(later).stack.name == "eager-torch-2023"


def test_apex_o2_may_stand_behind_a_comma(rows: dict[str, Row]) -> None:
    stack = asked(rows["lambda-bert-a10"]).stack
    assert (stack.master_weights, stack.parameters_dtype) == (True, "")


def test_the_address_of_a_model_card_names_no_software(rows: dict[str, Row]) -> None:
    row = rows["amd-olmo-1b"]
    assert (asked(row).stack.name, asked(row).stack.attention) == ("eager-torch", "flash2")
    assert asked(row, layout={"framework": "Hugging Face Trainer"}).stack.name == "hf-transformers"


@pytest.mark.parametrize(("gpu", "year", "attention"), [("MI250X", 2023, "unfused"), ("A100", 2023, "flash1")])
def test_amd_has_no_fused_attention_of_pytorch_before_2024(
    rows: dict[str, Row], gpu: str, year: int, attention: str
) -> None:
    row = dataclasses.replace(rows["lumi-bigcode-33b"], source=f"a report, {year}-06")
    eager = asked(row, hardware={"gpu": gpu}, layout={"framework": "PyTorch"}, notes="")
    assert eager.stack.attention == attention
    told = asked(row, hardware={"gpu": gpu}, layout={"framework": "PyTorch"}, notes="FlashAttention-2")
    assert told.stack.attention == "flash2"
    assert asked(rows["lumi-bigcode-33b"]).stack.attention == "unfused"


def test_switches_that_are_false_and_a_fused_softmax_are_no_kernel_of_attention(rows: dict[str, Row]) -> None:
    row = rows["fleetx-gpt345m"]
    assert asked(row).stack.attention == "unfused"
    assert asked(row, model={"attention": ""}).stack.attention == "unfused"
    assert asked(row, model={"attention": ""}, notes="use_flash_attn True").stack.attention == "flash1"
    assert asked(row, model={"attention": "scaled_dot_product_attention"}).stack.attention == "flash2"


def test_a_runtime_of_its_own_is_not_the_framework_that_its_report_compares(rows: dict[str, Row]) -> None:
    """OneFlow was Megatron-LM by the path of a README beside its own; its fusions are like Megatron's, though."""
    compared, own = (asked(rows[f"dlperf-gpt-{name}-dp_1x1x1"]).stack for name in ("megatron", "oneflow"))
    assert (compared.name, own.name) == ("megatron-2021", "megatron-like-2022")
    assert any("runtime" in told for told in asked(rows["keras-bert-tf"]).unstated)
    autocast = {name: asked(rows[f"dlperf-bert-{name}-amp-1"]).stack.autocast for name in ("oneflow", "torch")}
    assert autocast == {"oneflow": False, "torch": True}, "OneFlow-Inc publishes figures of others too"


@pytest.mark.parametrize(
    ("notes", "gradients"),
    [
        ("--fp16", "float16"),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "float32"),
        ("--bf16", "float32"),
        ("fp16", "float32"),
    ],
)
def test_megatron_in_fp16_reduces_gradients_in_it(rows: dict[str, Row], notes: str, gradients: str) -> None:
    assert asked(rows["dlperf-gpt-megatron-dp_8x1x1"], notes=notes).stack.gradient_dtype == gradients
    assert asked(rows["dlperf-gpt-oneflow-dp_8x1x1"], notes=notes).stack.gradient_dtype == "float32"


def test_deepspeeds_first_megatron_has_no_fused_kernels(rows: dict[str, Row]) -> None:
    row = rows["dlperf-ds-8-zero0"]
    assert asked(row).stack.fusion == "eager"
    assert asked(row, layout={"framework": "DeepSpeed 0.3"}).stack.fusion == "fused"


def test_one_gpu_takes_parameters_from_the_host_piece_by_piece(rows: dict[str, Row]) -> None:
    """It was refused, as parameters that are moved need ZeRO-3."""
    row = rows["dataflow-h100-8b-4k"]
    layout = asked(row).layout
    assert (layout.zero, layout.offload, layout.offload_layers) == (3, ("parameters", "activations"), 6)
    every = asked(row, notes="one GPU").layout
    assert every.offload_layers == 0
    assert simulate(asked(row)).step.step_s < simulate(asked(row, notes="one GPU")).step.step_s


def test_tokens_that_cannot_be_cut_are_not_taken_as_cut(rows: dict[str, Row]) -> None:
    """A ViT's 257 tokens were cut by 4 and 8, which was refused."""
    row = rows["vit-t5x-g14-32-tp4"]
    like = asked(row, layout={"framework": "Megatron-LM"})
    assert not asked(row).layout.sp
    assert not like.layout.sp
    assert (
        asked(row, layout={"framework": "Megatron-LM"}, model={"seq_len": 256}).layout.sp
        == like.stack.sequence_parallel
    )


def test_flash_attention_2_on_blackwell_is_not_cudnns(rows: dict[str, Row]) -> None:
    """PyTorch's own attention is cuDNN's there; FlashAttention-2's kernels are those for Ampere."""
    row = rows["prime-b200-4b-16k"]
    assert asked(row).stack.attention == "flash2-package"
    assert asked(row, model={"attention": "SDPA"}).stack.attention == "flash2"
    assert asked(row, hardware={"gpu": "NVIDIA H200"}).stack.attention == "flash2"


def test_products_of_fp32_need_fewer_columns_on_a_v100_than_tensor_cores_do() -> None:
    """Units of fp32 do an eighth of the FLOP a clock, on operands twice as wide: both had the same dimension."""
    flat, cube = Product(512, 1024, 4096), Product(1290, 1290, 1290)
    longer = {
        (name, precision): product_s(flat, precision, load_machine(name).device)
        / product_s(cube, precision, load_machine(name).device)
        for name in ("v100-16gb", "rtx3090")
        for precision in ("fp32", "fp16")
    }
    assert longer["v100-16gb", "fp32"] < 1.03
    assert longer["v100-16gb", "fp16"] > 1.04
    assert longer["rtx3090", "fp32"] == pytest.approx(longer["rtx3090", "fp16"], rel=1e-3)


@pytest.mark.parametrize(
    ("dim", "keys", "backward", "tflops"),
    [(64, 16384, False, 379.4), (64, 2048, False, 381.0), (64, 16384, True, 334.0), (128, 4096, False, 353.9)],
)
def test_flash_attention_2_on_a_b200_is_as_published(dim: int, keys: int, backward: bool, tflops: float) -> None:
    """Dao-AILab/flash-attention issue 1589 (16,384 tokens, 2,048 columns) and meta-pytorch/tritonbench pull 171."""
    device = load_machine("b200").device
    batch, heads = (16384 // keys, 2048 // dim) if dim == 64 else (8, 16)
    attention = Attention(batch, heads, heads, keys, keys, dim, dim, False, backward)
    flops = (10 if backward else 4) * batch * heads * keys**2 * dim
    seconds = attention_s(attention, "bfloat16", device, "flash2-package", sustained=0.0)
    assert flops / seconds / 1e12 == pytest.approx(tflops, rel=0.12)
    assert seconds > attention_s(attention, "bfloat16", device, "flash2", sustained=0.0)
