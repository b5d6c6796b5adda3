"""Software of a row: a named set, or the defaults of its class, with what the row says in their place."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tools.validate.requests import request_of, said
from tools.validate.rows import Row, read_rows
from tools.validate.software import class_of, framework_of, software_of, year_of

from lading.errors import ConfigError
from lading.ir.stack import FITTED, GUESSED, KINDS, SWITCHES
from tests.validate.test_rows import FILES, changed

ROWS = {row.id: row for row in read_rows(FILES[:1])[0]}


def row_of(tmp_path: Path, source: str, notes: str = "", **parts: dict[str, Any]) -> Row:
    file = tmp_path / "rows.jsonl"
    fields: dict[str, Any] = {"id": "x-1", "source": source, "source_family": "x", "notes": notes}
    file.write_text(changed(**fields, **parts))
    return read_rows([file])[0][0]


@pytest.mark.parametrize(
    ("source", "layout", "name"),
    [
        ("a report, 2025: FSDP2", {"tp": 1}, "eager-torch"),
        ("a report, 2025: FSDP2 with tensor parallel", {"tp": 2}, "eager-torch"),
        ("a report, 2025", {"compile": True}, "compiled-torch"),
        ("JAX on GPUs, 2025", {}, "compiled-torch"),
        ("DeepSpeed ZeRO-3, 2025", {}, "deepspeed-like"),
        ("DeepSpeed ZeRO-3, 2021", {}, "deepspeed-like-2021"),
        ("InternEvo, 2025", {"tp": 2}, "eager-torch"),
        ("a fork of Megatron, 2025", {}, "megatron-like"),
        ("a fork of Megatron, 2021", {}, "megatron-like-2022"),
        ("arXiv 2203.12345, a fork of Megatron", {}, "megatron-like-2022"),
        ("a fork of Megatron, 2023-11", {}, "megatron-like-2023"),
        ("a report, 2023: FSDP", {}, "eager-torch-2023"),
        ("a report, 2022: FSDP", {}, "eager-torch-2022"),
        ("in-house software", {"tp": 2, "dp": 4}, "megatron-like"),
        ("in-house software", {"tp": 1, "dp": 8}, "eager-torch"),
    ],
)
def test_what_a_row_tells_decides_its_class(tmp_path: Path, source: str, layout: dict[str, Any], name: str) -> None:
    row = row_of(tmp_path, source, layout={"tp": 1, "pp": 1, "ep": 1, "compile": False, **layout})
    assert class_of(row, said(row)) == name


def test_software_of_no_known_name_is_said_to_be_of_its_class(tmp_path: Path) -> None:
    row, assumed = row_of(tmp_path, "in-house software, 2025: DDP"), list[str]()
    stack = software_of(row, said(row), assumed)
    assert stack.kind in KINDS
    assert stack.evidence_on("hopper") == GUESSED
    assert any("not known" in sentence and stack.name in sentence for sentence in assumed)


def test_the_year_of_a_source(tmp_path: Path) -> None:
    years = [year_of(row_of(tmp_path, s)) for s in ("x 2021-04", "NeMo 24.07 container", "arXiv 2104.04473", "a file")]
    assert years == [2021, 2024, 2021, 0]


def test_what_a_row_states_replaces_the_class_too(tmp_path: Path) -> None:
    notes = "no comm overlap; fp32 grad accumulation; TE cross-entropy fusion; flash attention; hybridep"
    row = row_of(tmp_path, "a fork of Megatron, 2021", notes)
    stack = software_of(row, said(row), [], known=False)
    assert not stack.overlap_grad_reduce
    assert not stack.overlap_param_gather
    assert stack.hidden == {}
    assert (stack.gradient_dtype, stack.attention, stack.dispatcher) == ("float32", "flash2", "deepep")
    assert stack.fused_loss


def test_what_cuts_parameters_exchanges_them_beside_computing(tmp_path: Path) -> None:
    layout = {"zero_stage": 3, "tp": 2, "dp": 4}
    row = row_of(tmp_path, "a fork of Megatron with FSDP, 2022", layout=layout)
    stack = software_of(row, said(row), [])
    assert stack.name == "megatron-like-2022"
    assert stack.overlap_grad_reduce
    assert stack.overlap_param_gather


def test_gathers_into_lists_are_waited_for_one_by_one(tmp_path: Path) -> None:
    row = row_of(tmp_path, "DeepSpeed ZeRO-3, 2021", layout={"zero_stage": 3, "dp": 8})
    stack = software_of(row, said(row), [])
    assert stack.gather_rank_s
    assert (stack.overlap_param_gather, stack.overlap_grad_reduce, stack.reduces_whole) == (False, False, 3)


@pytest.mark.parametrize(("stage", "beside"), [(1, False), (2, True), (3, True)])
def test_pytorch_sends_what_it_updated_where_states_alone_are_cut(tmp_path: Path, stage: int, beside: bool) -> None:
    row = row_of(tmp_path, "PyTorch, 2025", layout={"zero_stage": stage, "dp": 8})
    stack = software_of(row, said(row), [])
    assert stack.overlap_param_gather == beside
    assert stack.reduces_whole == 1, "DDP sums gradients on every rank"


def test_a_framework_left_out_is_predicted_by_its_class_alone() -> None:
    row = ROWS["tt2412-006"]
    known, guessed = request_of(row), request_of(row, known=False)
    assert (known.stack.framework, guessed.stack.framework) == ("torchtitan", "")
    assert guessed.stack.name == "compiled-torch"
    assert known.stack.gather_dtype == guessed.stack.gather_dtype == "float8_e4m3fn", "its notes say so"
    triton = ROWS["mosaic-075"]
    assert request_of(triton).stack.attention == "triton"
    assert request_of(triton, known=False).stack.attention != "triton", "only its own files tell"
    assert framework_of(row, said(row)) == "torchtitan"


def test_facts_of_a_run_itself_stay_where_its_framework_is_left_out() -> None:
    blocked = next(r for r in ROWS.values() if r.family == "bloom-tuning" and r.hardware["gpus"] >= 320)
    assert request_of(blocked, known=False).stack.launch_blocking


def test_each_row_of_tier_a_has_a_framework() -> None:
    missing = [row.id for row in ROWS.values() if row.tier == "A" and not framework_of(row, said(row))]
    assert not missing, json.dumps(missing[:5])


@pytest.mark.parametrize(
    ("source", "attention"),
    [
        ("LLaMA-Factory with DeepSpeed, 2025", "flash2"),
        ("a fork of Megatron-LM with DeepSpeed, 2025", "unfused"),
        ("DeepSpeed, 2022", "unfused"),
        ("DeepSpeed, 2025; unfused attention", "unfused"),
    ],
)
def test_attention_of_software_on_deepspeed_is_of_its_year(tmp_path: Path, source: str, attention: str) -> None:
    row = row_of(tmp_path, source)
    assumed = list[str]()
    assert software_of(row, said(row), assumed).attention == attention
    assert any("by default" in words for words in assumed) == (attention == "flash2")


@pytest.mark.parametrize(
    ("source", "framework", "fusion"),
    [
        ("LLaMA-Factory, 2025", "DeepSpeed ZeRO-2", "eager"),
        ("a fork of Megatron-LM, 2025", "DeepSpeed", "fused"),
        ("docs of Megatron-SWIFT, 2025", "transformers with DeepSpeed", "eager"),
        ("LLaMA-Factory with Liger kernels, 2025", "DeepSpeed", "fused"),
        ("a report, 2022", "DeepSpeed", "fused"),
        ("GPT-NeoX, 2025", "DeepSpeed", "fused"),
    ],
)
def test_models_of_transformers_on_deepspeed_are_eager(
    tmp_path: Path, source: str, framework: str, fusion: str
) -> None:
    row = row_of(tmp_path, source, layout={"framework": framework})
    stack = software_of(row, said(row), [], known=False)
    assert stack.kind == "deepspeed-like"
    assert (stack.fusion, stack.eager_norms) == (fusion, fusion == "eager")


@pytest.mark.parametrize(
    ("source", "notes", "attention"),
    [
        ("a report, 2023-06", "", "unfused"),
        ("a report, 2024-01", "", "flash2"),
        ("a report, 2024-04", "", "masked"),
        ("a report, DeepSpeed 0.14.2, 2024", "", "masked"),
        ("a report, 2024-07", "", "flash2"),
        ("a report, 2025-07", "examples padded to the longest", "masked"),
        ("a report, 2025-07", "unpadded", "flash2"),
        ("a report, 2024-04", "FlashAttention-2", "flash2"),
        ("a report, 2025-07", "FlexAttention", "flex"),
    ],
)
def test_attention_of_transformers_is_that_of_its_release(
    tmp_path: Path, source: str, notes: str, attention: str
) -> None:
    row = row_of(tmp_path, source, notes, layout={"framework": "transformers, DeepSpeed"})
    assert software_of(row, said(row), [], known=False).attention == attention


@pytest.mark.parametrize(
    ("framework", "layout", "kept"),
    [
        ("Colossal-AI", {"tp": 2, "dp": 1}, ("", True, "bfloat16")),
        ("in-house, PyTorch", {"zero_stage": 1}, ("", True, "bfloat16")),
        ("PyTorch Lightning, ZeRO-1", {"zero_stage": 1}, ("float32", False, "float32")),
        ("PyTorch DDP", {}, ("float32", False, "float32")),
    ],
)
def test_software_that_cuts_by_itself_keeps_parameters_in_16_bits(
    tmp_path: Path, framework: str, layout: dict[str, Any], kept: tuple[str, bool, str]
) -> None:
    row = row_of(tmp_path, "a report, 2025", layout={"tp": 1, "dp": 2, "framework": framework, **layout})
    stack = software_of(row, said(row), [], known=False)
    assert (stack.parameters_dtype, stack.master_weights, stack.gradient_dtype) == kept


def test_a_named_set_with_another_kernel_of_attention_is_not_one_whose_steps_were_seen(tmp_path: Path) -> None:
    seen = row_of(tmp_path, "vTrain, 2022")
    other = row_of(tmp_path, "vTrain, 2022", "FlashAttention-2")
    evidence = [software_of(row, said(row), []).evidence_on("ampere") for row in (seen, other)]
    assert evidence == [FITTED, SWITCHES]


def test_heads_of_latent_attention_have_no_fused_kernel_on_blackwell_until_mid_2025() -> None:
    row = ROWS["dgxc2505-004"]
    assert request_of(row, known=False).stack.attention == request_of(row).stack.attention == "unfused"
    source = row.source.replace("25.05.05", "25.11").replace("2025-05", "2025-11")
    later = dataclasses.replace(row, source=source, notes=row.notes.replace("25.04", "25.11"))
    assert request_of(later, known=False).stack.attention == "cudnn"


def test_gpt_3_of_mlperf_has_no_dropout(tmp_path: Path) -> None:
    model, layout = {"gated_mlp": False, "vocab": 51200}, {"tp": 2, "dp": 1, "framework": "Megatron"}
    rates = [
        request_of(row_of(tmp_path, source, model=model, layout=layout)).dropout
        for source in ("MLPerf training v4.0", "a report, 2024")
    ]
    assert rates == [0.0, 0.1]


@pytest.mark.parametrize(
    ("name", "framework", "parts"),
    [
        ("GPT-2 XL", "PyTorch Lightning, transformers", ("gelu",)),
        ("GPT-J 6B", "transformers", ("gelu",)),
        ("GPT-NeoX 20B", "transformers", ()),
        ("Phi-1.5", "transformers", ("gelu",)),
        ("Phi-14B", "transformers", ()),
        ("Cerebras-GPT 2.7B", "transformers", ()),
        ("facebook/esm2_t33_650M_UR50D", "transformers", ("gelu-erf",)),
        ("GPT-2 XL", "PyTorch DDP", ()),
        ("GPT-2 XL", "transformers, torch.compile", ()),
    ],
)
def test_models_of_transformers_with_gelu_new_run_it_in_operations(
    tmp_path: Path, name: str, framework: str, parts: tuple[str, ...]
) -> None:
    row = row_of(tmp_path, "a report, 2023", model={"name": name}, layout={"framework": framework, "compile": False})
    assert software_of(row, said(row), []).unfused == parts


def test_a_stated_activation_counts_before_the_models_entry(tmp_path: Path) -> None:
    layout = {"framework": "transformers", "compile": False}
    for activation, parts in (("gelu", ()), ("gelu_python", ("gelu-erf",)), ("gelu_new", ("gelu",))):
        model = {"name": "GPT-2 XL", "activation": activation}
        row = row_of(tmp_path, "a report, 2023", model=model, layout=layout)
        assert software_of(row, said(row), []).unfused == parts
    row = row_of(tmp_path, "a report, 2023", model={"name": "GPT-2 XL", "activation": "gleu"}, layout=layout)
    with pytest.raises(ConfigError, match="expected an activation of transformers"):
        software_of(row, said(row), [])


@pytest.mark.parametrize(
    ("source", "autocast"),
    [("a report, 2025: DDP", True), ("JAX, 2025", False), ("llm.c, 2025", False), ("PaddlePaddle, 2023", False)],
)
def test_software_that_is_not_pytorch_has_activations_in_16_bits(tmp_path: Path, source: str, autocast: bool) -> None:
    row = row_of(tmp_path, source, layout={"tp": 1, "pp": 1, "ep": 1, "compile": False, "precision": "fp16 (AMP)"})
    assert request_of(row).stack.autocast is autocast


@pytest.mark.parametrize(
    ("precision", "task", "expected"),
    [("bf16-true", "QLoRA r8", "fp32"), ("bf16 mixed", "QLoRA r8", "bf16"), ("bf16-true", "LoRA r8", "bf16")],
)
def test_4_bit_products_get_fp32_without_autocast(tmp_path: Path, precision: str, task: str, expected: str) -> None:
    layout = {"precision": precision, "task": task, "framework": "transformers, PyTorch, PEFT", "compile": False}
    row = row_of(tmp_path, "a report, 2025", "bitsandbytes nf4", layout={"tp": 1, "pp": 1, "ep": 1, **layout})
    request = request_of(row)
    assert request.layout.precision == expected
    assert any("Linear4bit" in sentence for sentence in request.assumed) is (expected == "fp32")


@pytest.mark.parametrize(
    ("precision", "notes", "rounds"),
    [
        ("tf32", "", True),
        ("fp32", "allow_tf32=True", True),
        ("fp32", "TF32 enabled", True),
        ("fp32", "torch.set_float32_matmul_precision('high')", True),
        ("fp32", "torch.set_float32_matmul_precision('highest')", False),
        ("fp32 (no TF32)", "", False),
        ("fp32", "allow_tf32=False", False),
        ("fp32", "TF32 is disabled", False),
        ("single precision", "", False),
    ],
)
def test_tf32_is_what_words_say_of_it(tmp_path: Path, precision: str, notes: str, rounds: bool) -> None:
    layout = {"tp": 1, "pp": 1, "ep": 1, "compile": False, "precision": precision}
    request = request_of(row_of(tmp_path, "a report, 2025: DDP", notes, layout=layout))
    assert (request.layout.precision, request.stack.tf32, request.unread) == ("fp32", rounds, ())


@pytest.mark.parametrize("words", ["bf16 without autocast", "bf16, no AMP"])
def test_products_without_autocast_have_parameters_of_16_bits(tmp_path: Path, words: str) -> None:
    layout = {"tp": 1, "pp": 1, "ep": 1, "compile": False, "precision": words}
    stack = request_of(row_of(tmp_path, "a report, 2025: DDP", layout=layout)).stack
    assert (stack.autocast, stack.parameters_dtype) == (False, "")


@pytest.mark.parametrize(
    "model",
    [
        {"attention": "bi-directional"},
        {"attention": "no causal mask"},
        {"kind": "encoder-only transformer"},
        {"kind": "RoBERTa"},
        {"kind": "vision transformer"},
    ],
)
def test_words_of_an_encoder(tmp_path: Path, model: dict[str, Any]) -> None:
    row = row_of(tmp_path, "a report, 2025: DDP", model=model, layout={"tp": 1, "pp": 1, "ep": 1, "compile": False})
    request = request_of(row)
    assert request.model.symbols["whole"] == 1
    assert request.unread == ()
