"""Runtimes that are not PyTorch's, in words of other sources: versions, denials, and frameworks only compared with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tools.validate.rows import Row, read_rows

from tests.validate.test_fifth_set import asked

_FOLDER = Path(__file__).parents[2] / "benchmarks" / "validation"
_PLAIN = "lumi-bigcode-33b"


@pytest.fixture(scope="module", name="rows")
def fixture_rows() -> dict[str, Row]:
    return {row.id: row for row in read_rows([_FOLDER / "blind_frameworks_7.jsonl"])[0]}


@pytest.mark.parametrize(
    ("framework", "tf32"),
    [
        *((f"TensorFlow{version}", True) for version in (" 2.20", " v2.15", "-2.15", "==2.15.0", " 2", "")),
        *((f"TensorFlow{version}", False) for version in (" 1", "-1.15", "/1.15", " (1.15)", "==1.15", " 2.3.1")),
        *((name, True) for name in ("TF 2.15", "MaxText", "paxml", "T5X", "Levanter")),
        *((f"PyTorch 2.2{than}", False) for than in (" (not JAX)", ", compared with TensorFlow", "/XLA")),
    ],
)
def test_fp32_is_tf32_by_the_runtime_and_its_version(rows: dict[str, Row], framework: str, tf32: bool) -> None:
    """2.20 was before 2.4, "TensorFlow-1.15" after it, and software on JAX under another name was none."""
    assert asked(rows["keras-bert-jax"], layout={"framework": framework}, notes="").stack.tf32 is tf32


@pytest.mark.parametrize(
    ("framework", "parts"),
    [
        *((f"TensorFlow{words}", True) for words in (" 1.15 without XLA", " 1.15, XLA off", "-1.15", " v1.15")),
        *((f"TensorFlow{words}", False) for words in (" 1.15 with XLA", " 2.15")),
        ("PyTorch 1.8 (unlike TensorFlow 1.15)", False),
    ],
)
def test_tensorflow_1_has_gelu_in_parts_unless_xla_is_on(rows: dict[str, Row], framework: str, parts: bool) -> None:
    stack = asked(rows["dlperf-bert-tf-amp-1"], layout={"framework": framework}, notes="").stack
    assert ("gelu" in stack.unfused) is parts
    assert (stack.fusion == "compiled") is framework.endswith("with XLA")


@pytest.mark.parametrize(
    ("framework", "parts"),
    [
        *((f"Keras 3 {words}", True) for words in ("with PyTorch backend", "(torch)", "on PyTorch")),
        ("KERAS_BACKEND=torch, Keras 3", True),
        ("Keras 3 (TensorFlow; not PyTorch)", False),
        ("PyTorch 2.2, twice as fast as Keras (TensorFlow)", False),
    ],
)
def test_norms_of_keras_on_pytorch_run_in_parts(rows: dict[str, Row], framework: str, parts: bool) -> None:
    assert asked(rows["keras-mistral-torch"], layout={"framework": framework}, notes="").stack.eager_norms is parts


@pytest.mark.parametrize(
    ("framework", "source", "attention"),
    [
        ("Keras 3.8 (JAX)", "a report", "flash2"),
        ("Keras 3.6 (JAX)", "a report", "unfused"),
        ("Keras 3.10 (JAX)", "a report, 2025-03", "flash2"),
        ("Keras 2.15 (TensorFlow)", "a report, 2025-03", "unfused"),
        ("PyTorch", "keras-io, 2024-03", "flash2"),
        ("PyTorch", "ten times faster than Keras or T5X, 2024-03", "flash2"),
    ],
)
def test_attention_of_keras_is_by_its_version(
    rows: dict[str, Row], framework: str, source: str, attention: str
) -> None:
    row = dataclasses.replace(rows["keras-bert-jax"], source=source)
    assert asked(row, layout={"framework": framework}, notes="").stack.attention == attention


@pytest.mark.parametrize(
    ("notes", "gradients"),
    [
        ("--bf16 --fp16-lm-cross-entropy", "float32"),
        ("not --fp16 but --bf16", "float32"),
        ("--fp16 without --accumulate-allreduce-grads-in-fp32", "float16"),
        ("--no-masked-softmax-fusion --fp16", "float16"),
    ],
)
def test_flags_of_megatron_that_only_begin_with_fp16(rows: dict[str, Row], notes: str, gradients: str) -> None:
    assert asked(rows["dlperf-gpt-megatron-dp_8x1x1"], notes=notes).stack.gradient_dtype == gradients


@pytest.mark.parametrize(
    "notes", ["slower than OneFlow", "unlike JAX and PaddlePaddle", "Oneflow-Inc/OneFlow-Benchmark has OneFlow's"]
)
def test_autocast_of_pytorch_is_not_what_it_is_compared_with(rows: dict[str, Row], notes: str) -> None:
    assert asked(rows["dlperf-bert-torch-amp-1"], notes=notes).stack.autocast
    assert not asked(rows["dlperf-bert-oneflow-amp-1"], notes=notes).stack.autocast


@pytest.mark.parametrize(
    ("notes", "attention"),
    [
        *((f"FlashAttention {words}", "flash1") for words in ("is not used", "off")),
        *((words, "flash1") for words in ("use-flash-attn false", "use_flash_attention=no", "flash_attention: false")),
        *((words, "flash1") for words in ("FlashAttention-2 disabled", "does not support FlashAttention")),
        *((words, "flash2") for words in ("no flashy figures", "unlike Keras", "use_flash_attn: true")),
        *((words, "flash2") for words in ("FlashAttention-2, no dropout", "no FlashAttention-3, which is Hopper's")),
    ],
)
def test_flash_attention_that_is_denied(rows: dict[str, Row], notes: str, attention: str) -> None:
    row = dataclasses.replace(rows[_PLAIN], source="a report, 2024-06")
    parts = {"hardware": {"gpu": "A100"}, "layout": {"framework": "PyTorch"}, "model": {"attention": ""}}
    assert asked(row, notes=notes, **parts).stack.attention == attention


@pytest.mark.parametrize(
    ("words", "attention"), [("FlashAttention-2, fused softmax", "flash2"), ("fused softmax", "unfused")]
)
def test_a_fused_softmax_beside_a_kernel_of_attention(rows: dict[str, Row], words: str, attention: str) -> None:
    assert asked(rows["fleetx-gpt345m"], model={"attention": words}).stack.attention == attention


@pytest.mark.parametrize(
    "notes", ["not FlashAttention-2", "faster than FlashAttention 2", "FlashAttention-2 is not used"]
)
def test_flash_attention_2_that_is_denied_is_not_its_package(rows: dict[str, Row], notes: str) -> None:
    parts = {"model": {"attention": ""}, "layout": {"framework": "PyTorch FSDP2"}}
    assert asked(rows["prime-b200-4b-16k"], notes=notes, **parts).stack.attention != "flash2-package"


def test_a_kernel_beside_what_it_is_not(rows: dict[str, Row]) -> None:
    row = rows["fleetx-gpt345m"]
    words = {"FlashAttention-2 (not eager)": "flash2", "eager (no SDPA)": "unfused"}
    assert {text: asked(row, model={"attention": text}).stack.attention for text in words} == words


@pytest.mark.parametrize("source", ["NGC PyTorch 22.09, 2023-05", "nvcr.io/nvidia/pytorch:22.12-py3, 2024"])
def test_a_container_may_stand_behind_a_blank(rows: dict[str, Row], source: str) -> None:
    row = dataclasses.replace(rows["lambda-bert-a10"], source=source)
    parts = {"layout": {"framework": "PyTorch"}, "hardware": {"gpu": "A100"}}
    assert asked(row, notes="", **parts).stack.attention == "unfused"


@pytest.mark.parametrize(
    ("notes", "layers"),
    [
        ("activations of 6 of the 32 layers in host memory", 6),
        ("6 of 32 layers' activations lie in the host's memory", 6),
        ("6 of 32 layers' activations recomputed", 0),
    ],
)
def test_layers_whose_activations_are_in_host_memory(rows: dict[str, Row], notes: str, layers: int) -> None:
    assert asked(rows["dataflow-h100-8b-4k"], notes=notes).layout.offload_layers == layers


def test_levels_and_examples_of_something_else(rows: dict[str, Row]) -> None:
    half = {"layout": {"precision": "fp16"}}
    compiled = asked(rows["lambda-bert-a10"], notes="optimization level O2 of the compiler", **half)
    assert not compiled.stack.master_weights
    other = {"layout": {"framework": "DeepSpeedExamples, not Megatron-LM"}}
    assert asked(rows["dlperf-ds-8-zero0"], notes="", **other).stack.fusion == "fused"
