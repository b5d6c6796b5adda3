"""Prose: what notes alone state is read where no field does, and what they deny is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tools.validate.requests import request_of
from tools.validate.rows import read_rows
from tools.validate.words import machine_of

from lading.errors import ConfigError
from lading.ir.request import StepRequest
from lading.sim.simulate import machine_of as machine_asked
from lading.sim.simulate import simulate
from tests.validate.test_rows import changed


def asked(tmp_path: Path, **parts: Any) -> StepRequest:
    file = tmp_path / "rows.jsonl"
    file.write_text(changed(**{"measured": {"tokens_per_s_per_gpu": None}, **parts}))
    return request_of(read_rows([file])[0][0])


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ("bf16; gradient checkpointing enabled; flash-attn 2", {"recompute": "full"}),
        ("Full activation checkpointing.", {"recompute": "full"}),
        ("trained with activation recomputation, TE 1.7", {"recompute": "full"}),
        ("Selective activation recompute; SP with TP", {"recompute": "selective"}),
        ("no activation checkpointing", {"recompute": "none"}),
        ("Activation checkpointing setting is not stated.", {"recompute": "none"}),
        ("memory is lower than with gradient checkpointing", {"recompute": "none"}),
        ("optimizer states offloaded to CPU", {"offload": ("optimizer",)}),
        ("no CPU offload", {"offload": ()}),
        ("DeepSpeed ZeRO-2, overlap_comm", {"zero": 2}),
        ("plain DDP, no ZeRO", {"zero": 0}),
        ("fp16 mixed precision", {"precision": "fp16"}),
        ("fp16; DDP", {"precision": "fp16", "zero": 0}),
        ("gradients reduced in fp16", {"precision": "bf16"}),
    ],
)
def test_what_only_the_notes_state_is_read(tmp_path: Path, notes: str, expected: dict[str, Any]) -> None:
    layout = asked(tmp_path, notes=notes).layout
    assert {name: getattr(layout, name) for name in expected} == expected


def test_what_notes_state_is_said_and_a_field_counts_before_it(tmp_path: Path) -> None:
    notes = "8-bit AdamW; LoRA r=32 on all linear layers"
    request = asked(tmp_path, notes=notes)
    assert (request.task, request.lora_rank, request.stack.moments_dtype) == ("lora", 32, "uint8")
    assert any("the notes say '8-bit adamw'" in text for text in request.assumed)
    fields = asked(tmp_path, notes=notes, layout={"task": "pretrain", "optimizer": "AdamW"})
    assert (fields.task, fields.stack.moments_dtype) == ("pretrain", "float32")


def test_notes_that_contradict_a_field_are_told(tmp_path: Path) -> None:
    notes = "optimizer_cpu_offload true"
    assert any(
        "says nothing is moved" in text for text in asked(tmp_path, notes=notes, layout={"offload": "none"}).unread
    )
    assert asked(tmp_path, notes="cpu_offload False", layout={"offload": "none"}).unread == ()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("gradient_checkpointing: true, use_reentrant: false", ("full", -1)),
        ("enable_activation_checkpointing=True", ("full", -1)),
        ("gradient_checkpointing=False", ("none", -1)),
        ("checkpoint-activations: true, checkpoint-num-layers 1", ("full", -1)),
        ("checkpoint_wrapper on each layer", ("full", -1)),
        ("full, uniform, 1 layer", ("full", -1)),
        ("full (every block)", ("full", -1)),
        ("--recompute_granularity full --recompute_method uniform --recompute_num_layers 1", ("full", -1)),
        ("recompute_granularity full, recompute_method block, recompute_num_layers 3", ("full", 3)),
        ("nothing_saveable", ("full", -1)),
        ("save_qkv_proj", ("full", -1)),
        ("minimal", ("selective", -1)),
        ("dots_with_no_batch_dims_saveable", ("selective", -1)),
        ("core_attn recompute", ("selective", -1)),
        ("unsloth", ("full", -1)),
    ],
)
def test_recomputing_in_the_words_of_frameworks(tmp_path: Path, words: str, expected: tuple[str, int]) -> None:
    request = asked(tmp_path, layout={"activation_checkpointing": words})
    assert (request.layout.recompute, request.layout.recompute_layers) == expected
    assert request.unread == ()


def test_layers_that_each_stage_recomputes_are_counted_by_stage(tmp_path: Path) -> None:
    words = "recompute_granularity full, recompute_method block, recompute_num_layers 1"
    layout = {"dp": 1, "pp": 2, "activation_checkpointing": words}
    assert asked(tmp_path, layout=layout).layout.recompute_layers == 2


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"source": "huggingface/nanotron docs"}, "nanotron"),
        ({"source": "huggingface/transformers docs"}, "hf-transformers"),
        ({"source": "FSDP vs DeepSpeed", "layout": {"framework": "HF Accelerate FSDP"}}, "hf-transformers"),
        ({"layout": {"framework": "LLaMA-Factory"}}, "hf-transformers"),
        ({"layout": {"framework": "Axolotl (DeepSpeed ZeRO-3)"}}, "deepspeed-like"),
        ({"layout": {"framework": "GPT-NeoX", "dp": 1, "tp": 2}}, "deepspeed-like"),
        ({"layout": {"framework": "Colossal-AI", "dp": 1, "tp": 2}}, "eager-torch"),
        ({"layout": {"framework": "MaxText"}}, "compiled-torch"),
        ({"notes": "FSDP2 without torch.compile"}, "eager-torch"),
        ({"notes": "torch.compile"}, "compiled-torch"),
    ],
)
def test_software_by_its_own_name_and_not_by_what_stands_beside(
    tmp_path: Path, parts: dict[str, Any], name: str
) -> None:
    assert asked(tmp_path, **parts).stack.name == name


def test_what_stands_for_megatron_like_software_by_format_and_container(tmp_path: Path) -> None:
    def stack(precision: str, source: str = "a fork", **layout: Any) -> Any:
        return asked(tmp_path, source=source, layout={"dp": 1, "tp": 2, "precision": precision, **layout}).stack

    assert (stack("bf16").gradient_dtype, stack("fp8").gradient_dtype) == ("float32", "bfloat16")
    assert (stack("bf16").attention, stack("bf16", "a fork in container 26.04").attention) == ("cudnn", "cudnn9")
    assert stack("bf16", task="LoRA r=8").adapter_modules == ("wq", "wk", "wv", "qkv")
    assert stack("bf16", task="LoRA r=8 on all-linear").adapter_modules == ()
    assert stack("bf16", async_tp=True).hidden["tp"] == 0.7
    assert asked(tmp_path, notes="float8 all-gather", layout={"precision": "fp8"}).stack.gather_dtype == "float8_e4m3fn"
    assert asked(tmp_path, notes="float8 all-gather").stack.gather_dtype == ""


def test_kernels_that_notes_name(tmp_path: Path) -> None:
    assert asked(tmp_path, notes="liger kernel", layout={"framework": "Axolotl"}).stack.fusion == "fused"
    assert asked(tmp_path, notes="cut_cross_entropy").stack.fused_loss
    assert asked(tmp_path, notes="cudnn_flash_te attention").stack.attention == "cudnn"
    old = {"source": "Megatron-DeepSpeed 2022"}
    assert asked(tmp_path, **old).stack.attention == "unfused"
    assert asked(tmp_path, **old, notes="FlashAttention v2").stack.attention == "flash2"
    assert asked(tmp_path, **old, notes="no flash attention").stack.attention == "unfused"


def test_stage_three_of_deepspeed_gathers_ahead_whatever_its_set(tmp_path: Path) -> None:
    source = {"source": "Megatron-DeepSpeed 2023"}
    assert not asked(tmp_path, **source).stack.overlap_param_gather
    stack = asked(tmp_path, **source, layout={"zero_stage": 3}).stack
    assert (stack.overlap_param_gather, stack.gathers) == (True, 3)
    framework = {"framework": "Axolotl (deepspeed_configs/zero3.json)", "zero_stage": None}
    assert asked(tmp_path, layout=framework).stack.overlap_grad_reduce


def test_dualpipe_is_two_pipelines_of_half_its_ranks(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"hardware": {"gpus": 8}, "model": {"layers": 8}}
    layout = {"dp": 1, "pp": 8, "global_batch": 32}
    dual = asked(tmp_path, layout={**layout, "pp_schedule": "DualPipe"}, **parts)
    assert (dual.layout.pp, dual.layout.dp, dual.layout.vpp, dual.layout.schedule) == (4, 2, 2, "dualpipe-v")
    assert any("one for each direction" in text for text in dual.assumed)
    cut = asked(tmp_path, layout={**layout, "pp_schedule": "DualPipeV"}, **parts)
    assert (cut.layout.pp, cut.layout.dp, cut.layout.vpp, cut.layout.schedule) == (8, 1, 2, "dualpipe-v")
    assert asked(tmp_path, layout={"dp": 1, "pp": 2, "pp_schedule": "DualPipe"}).unread


@pytest.mark.parametrize(
    ("notes", "chunks"),
    [
        ("num_layers_per_virtual_pipeline_stage 2", 2),
        ("virtual pipeline size 2", 2),
        ("4 virtual pipeline stages", 4),
        ("1F1B", 1),
    ],
)
def test_chunks_that_only_notes_tell(tmp_path: Path, notes: str, chunks: int) -> None:
    layout = {"dp": 1, "pp": 2, "vpp": None}
    assert asked(tmp_path, notes=notes, model={"layers": 8}, layout=layout).layout.vpp == chunks


def test_replicas_that_are_counted_apart(tmp_path: Path) -> None:
    request = asked(tmp_path, layout={"dp": 1, "fsdp": 2})
    assert (request.layout.dp, request.layout.zero) == (2, 3)
    assert any("replicas that dp does not count" in text for text in request.assumed)


def test_models_that_leave_their_mlp_open(tmp_path: Path) -> None:
    def model(**fields: Any) -> Any:
        return asked(tmp_path, model={"gated_mlp": None, "hidden": 4096, "heads": 32, "layers": 32, **fields}).model

    llama = model(ffn_hidden=11008, vocab=32000, params_b=6.74)
    assert (llama.family, llama.symbols["f"]) == ("llama", 11008)
    assert model(ffn_hidden=16384, vocab=50257, params_b=6.7, tied_embeddings=True).family == "gpt"
    wide = model(gated_mlp=True, vocab=128256, kv_heads=8, params_b=8.03)
    assert wide.symbols["f"] == 14336
    assert model(note="SwiGLU", vocab=32000).symbols["f"] == 11008
    assert model(vocab=32000).family == "gpt"


def test_experts_that_words_tell(tmp_path: Path) -> None:
    fields = {"experts": 8, "moe_ffn_hidden": 128, "layers": 4, "note": "top-2 of 8, one shared expert"}
    request = asked(tmp_path, model={**fields, "first_dense_layers": 1})
    assert (request.model.symbols["a"], request.model.symbols["fs"]) == (2, 128)
    without = asked(tmp_path, model={**fields, "note": "top-2", "first_dense_layers": 1, "ffn_hidden": 512})
    assert without.model.symbols["fs"] == 0
    assert without.model.blocks == (("dense", 1), ("moe", 3))
    assert simulate(without).prediction.step_s > 0
    assert asked(tmp_path, model=fields, notes="capacity factor 1.25").stack.imbalance == 1.25


@pytest.mark.parametrize(
    ("gpu", "name"),
    [("NVIDIA H20 96GB", "h20"), ("AMD Instinct MI325X", "mi325x"), ("MI355X 288GB OAM", "mi355x"), ("H200", "h200")],
)
def test_gpus_that_were_added(tmp_path: Path, gpu: str, name: str) -> None:
    assert machine_of(gpu)[0] == name
    assert simulate(asked(tmp_path, hardware={"gpu": gpu})).prediction.step_s > 0


@pytest.mark.parametrize("gpu", ["TPU v5p-128", "Intel Gaudi 2", "AWS Trainium2", "Ascend 910B"])
def test_other_accelerators_are_refused_by_name(gpu: str) -> None:
    with pytest.raises(ConfigError, match="is not modelled"):
        machine_of(gpu)


def test_networks_without_units_and_rates_that_only_a_node_has(tmp_path: Path) -> None:
    def link(words: str, **hardware: Any) -> tuple[int, float, tuple[str, ...]]:
        request = asked(tmp_path, hardware={"gpus_per_node": 1, "inter_node_link": words, **hardware})
        network = machine_asked(request).links[-1]
        return network.nics, network.bandwidth_bytes_per_s * 8 / 1e9, request.unread

    assert link("InfiniBand 8x400") == (8, 400, ())
    assert link("EFA 3200 Gb/s")[2] == ()
    request = asked(tmp_path, hardware={"gpu": "A100 PCIe", "intra_node_link": "PCIe Gen4 (no NVLink)"})
    assert machine_asked(request).links[0].kind == "pcie"


#: Ways to say that FlashAttention did not run.
DENIALS = (
    "no FlashAttention",
    "without flash-attention",
    "not using Flash Attention",
    "FlashAttention off",
    "FlashAttention not used",
    "flash_attn: false",
    "use_flash_attention=False",
    "FlashAttention-2 disabled",
    "Flash Attention is switched off",
    "FlashAttention was not available",
    "disabled flash attention",
    "never FlashAttention",
)


@pytest.mark.parametrize("words", DENIALS)
def test_without_flash_attention_software_has_what_it_takes_by_itself_then(tmp_path: Path, words: str) -> None:
    """PyTorch's own function takes its memory-efficient kernel, Megatron's layers have products and a softmax."""
    torch_2024 = {"source": "a report, 2024-06", "layout": {"framework": "plain PyTorch FSDP"}}
    megatron = {"source": "a report, 2024-06", "layout": {"framework": "Megatron-LM"}}
    for place in ({"notes": words}, {"model": {"attention": words}}):
        assert asked(tmp_path, **torch_2024, **place).stack.attention == "flash1"
        assert asked(tmp_path, **megatron, **place).stack.attention in ("unfused", "cudnn")
    assert asked(tmp_path, **torch_2024, notes="FlashAttention-2").stack.attention == "flash2"
    eager_2022 = {"source": "a report, 2022-06", "layout": {"framework": "plain PyTorch FSDP"}}
    assert asked(tmp_path, **eager_2022, notes=words).stack.attention == "unfused"


@pytest.mark.parametrize(
    "words", ["PyTorch SDPA, FlashAttention not used", "FlashAttention-3 off", "flash_attn==2.0.4"]
)
def test_another_kernel_than_the_one_denied_is_kept(tmp_path: Path, words: str) -> None:
    torch_2024 = {"source": "a report, 2024-06", "layout": {"framework": "plain PyTorch FSDP"}}
    assert asked(tmp_path, **torch_2024, model={"attention": words}).stack.attention == "flash2"
