"""Fields: every usual way to write a setting is understood, what is not is told, and what is not modelled refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tools.validate.document import predictions_of
from tools.validate.requests import request_of
from tools.validate.rows import read_rows
from tools.validate.scoring import Simulator, outcomes_of, reported_bytes

from lading.errors import ConfigError
from lading.ir.request import Prediction, StepRequest
from lading.sim.simulate import machine_of, simulate
from tests.validate.test_rows import changed


def asked(tmp_path: Path, **parts: Any) -> StepRequest:
    file = tmp_path / "rows.jsonl"
    file.write_text(changed(**{"measured": {"tokens_per_s_per_gpu": None}, **parts}))
    return request_of(read_rows([file])[0][0])


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"cp_comm": "Ulysses"}, {"cp_comm": "all_to_all"}),
        ({"cp_comm": "all-gather"}, {"cp_comm": "all_gather"}),
        ({"cp_comm": "p2p"}, {"cp_comm": "ring"}),
        ({"dp": 1, "pp": 2, "vpp": 2, "pp_schedule": "ZBV"}, {"schedule": "zbv"}),
        ({"dp": 1, "pp": 2, "pp_schedule": "GPipe"}, {"schedule": "gpipe"}),
        ({"dp": 1, "pp": 2, "vpp": 2, "pp_schedule": "Interleaved1F1B"}, {"schedule": "interleaved"}),
        ({"offload": "optimizer->NVMe"}, {"offload": ("optimizer",), "offload_to": "disk"}),
        ({"offload": "optimizer states to CPU"}, {"offload": ("optimizer",), "offload_to": ""}),
        ({"offload": "no"}, {"offload": ()}),
        ({"offload": "params+optimizer CPU", "zero_stage": 3}, {"offload": ("parameters",)}),
        ({"activation_checkpointing": "Gradient checkpointing"}, {"recompute": "full", "recompute_layers": -1}),
        ({"activation_checkpointing": "off"}, {"recompute": "none"}),
        ({"activation_checkpointing": "every layer"}, {"recompute": "full"}),
        ({"activation_checkpointing": "full", "ac_detail": "2 of 4 layers"}, {"recompute_layers": 2}),
        ({"activation_checkpointing": "selective", "ac_detail": "every other layer"}, {"recompute_layers": 2}),
        ({"activation_checkpointing": "selective", "ac_detail": "50% of layers"}, {"recompute": "full"}),
        (
            {"activation_checkpointing": "selective", "ac_detail": "layernorm, mlp"},
            {"recompute": "selective", "recompute_modules": ("layernorm", "mlp")},
        ),
        ({"sharding": "FSDP"}, {"zero": 3}),
    ],
)
def test_usual_wordings_are_understood(tmp_path: Path, layout: dict[str, Any], expected: dict[str, Any]) -> None:
    request = asked(tmp_path, layout=layout)
    assert {name: getattr(request.layout, name) for name in expected} == expected
    assert request.unread == ()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"layout": {"cp_comm": "tree"}}, "layout.cp_comm 'tree'"),
        ({"layout": {"dp": 1, "pp": 2, "pp_schedule": "hanayo"}}, "layout.pp_schedule 'hanayo'"),
        ({"layout": {"precision": "posit8"}}, "layout.precision 'posit8'"),
        ({"layout": {"task": "reward model"}}, "layout.task 'reward model'"),
        ({"layout": {"optimizer": "schedule-free"}}, "layout.optimizer"),
        ({"layout": {"activation_checkpointing": "some"}}, "layout.activation_checkpointing 'some'"),
        ({"layout": {"offload": "moonward"}}, "layout.offload 'moonward'"),
        ({"layout": {"sequence_packing": True}}, "field layout.sequence_packing: True"),
        ({"model": {"attention": "GQA, differential"}}, "'differential'"),
        ({"model": {"kind": "vision"}}, "model.kind 'vision'"),
        ({"hardware": {"gpu": "H100 SXM 80GB, capped at 450 W"}}, "its power limit"),
        ({"hardware": {"intra_node_link": "string and cups"}}, "links of a node"),
        ({"hardware": {"gpus_per_node": 1, "inter_node_link": "8x 200 Gb/s avian carriers"}}, "avian carriers"),
    ],
)
def test_what_is_not_understood_is_printed_and_widens_the_interval(
    tmp_path: Path, parts: dict[str, Any], words: str
) -> None:
    request = asked(tmp_path, **parts)
    assert any(words in text for text in request.unread), request.unread
    assert any(f"not understood: {text}" in request.assumed for text in request.unread)
    told, sure = (simulate(r).prediction for r in (request, dataclasses.replace(request, unread=())))
    assert told.high_s / told.step_s > sure.high_s / sure.step_s


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"offload": "optimizer (ZenFlow)"}, "every few steps"),
        ({"offload": "Twin-Flow 40% of optimizer"}, "stays on the device"),
        ({"optimizer": "1-bit Adam"}, "compressed"),
        ({"framework": "DiLoCo on OpenDiLoCo"}, "every few steps only"),
        ({"optimizer": "GaLore AdamW"}, "projected"),
    ],
)
def test_methods_that_are_not_modelled_are_refused_by_name(tmp_path: Path, layout: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asked(tmp_path, layout=layout)


def test_links_of_a_node_are_read(tmp_path: Path) -> None:
    def nearest(**hardware: Any) -> tuple[str, int, float]:
        link = machine_of(asked(tmp_path, hardware={"gpu": "A100 SXM 80GB", **hardware})).links[0]
        return link.name, link.ranks, link.bandwidth_bytes_per_s / 1e9

    assert nearest(intra_node_link="NVLink3/NVSwitch 600GB/s") == ("nvlink", 8, 300)
    assert nearest(intra_node_link="NVLink 300 GB/s per direction") == ("nvlink", 8, 300)
    assert nearest(intra_node_link="NVLink 400 GB/s") == ("nvlink", 8, 200)
    assert nearest(intra_node_link="PCIe 4.0 x16") == ("pcie", 8, 31.5)
    assert nearest(intra_node_link="PCIe Gen3 x8") == ("pcie", 8, 7.875)
    assert nearest(gpus_per_node=4) == ("nvlink", 4, 300)
    assert nearest(gpu="GB200", gpus_per_node=4)[1] == 72
    assert nearest(gpu="GB200", intra_node_link="NVLink5, NVL36")[1] == 36


def test_windows_and_latent_attention_in_their_usual_wording(tmp_path: Path) -> None:
    def model(**fields: Any) -> Any:
        return asked(tmp_path, model={"layers": 6, **fields}).model

    assert model(window=64).blocks == (("window", 6),)
    assert model(attention="sliding_window=64").symbols["window"] == 64
    assert model(attention="local 64 : global, 5:1").blocks == (("window", 5), ("full", 1))
    experts = {"experts": 4, "topk": 2, "moe_ffn_hidden": 128, "shared_expert_ffn": 128, "first_dense_layers": 1}
    words = "MLA (q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim 32, qk_rope_head_dim 16, v_head_dim 32)"
    latent = model(attention=words, **experts)
    assert latent.family == "mla-moe"
    assert [latent.symbols[name] for name in ("qr", "kr", "dn", "dr", "dv")] == [96, 64, 32, 16, 32]
    assert model(attention="MLA", **experts).symbols["kr"] == 512
    with pytest.raises(ConfigError, match="linear attention"):
        model(attention="linear attention")


def test_states_without_masters_and_in_fewer_bits(tmp_path: Path) -> None:
    source = "a fork of Megatron, 2025"
    assert asked(tmp_path, source=source, layout={"optimizer": "AdamW"}).stack.master_weights
    detail = {"precision": "bf16", "precision_detail": "pure bf16, no master weights"}
    bare = asked(tmp_path, source=source, layout=detail).stack
    assert not bare.master_weights
    assert asked(tmp_path, layout={"optimizer": "AdamW 8bit"}).stack.moments_dtype == "uint8"
    assert asked(tmp_path, layout={"optimizer": "SGD"}).stack.moments == 0
    assert asked(tmp_path, layout={"optimizer": "Lion"}).stack.moments == 1


def test_kernels_of_attention_that_words_name(tmp_path: Path) -> None:
    def kernel(words: str, **parts: Any) -> str:
        return asked(tmp_path, model={"attention": words}, **parts).stack.attention

    assert kernel("GQA, eager") == "unfused"
    assert kernel("FA2, causal") == "flash2"
    assert kernel("flash attention", source="Megatron-LM 2022") == "flash1", "the software's own is not fused"


def test_a_fraction_of_a_count_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"layout.vpp: expected a whole number, got 1.5"):
        asked(tmp_path, layout={"vpp": 1.5})


def test_memory_of_one_rank_of_a_pipeline_is_laid_beside_that_rank(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    prediction = Prediction(step_s=1.0, low_s=1.0, high_s=1.0, peak_bytes=9, rank_bytes=(9, 5, 7, 6))

    def told(words: str) -> int:
        file.write_text(changed(measured={"memory_kind": words, "peak_memory_gib": 1.0}))
        return reported_bytes(read_rows([file])[0][0], prediction, 8)

    assert [told(f"max allocated, {words}") for words in ("rank 0", "rank 7", "last stage", "rank 3")] == [9, 6, 6, 5]
    assert told("max_memory_allocated, max over ranks") == 9
    assert told("mean over ranks, allocated") == 7


def test_what_was_understood_stands_with_each_prediction(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(changed(hardware={"gpus_per_node": 1, "inter_node_link": "50 GB/s RoCE per GPU"}))
    (line,) = predictions_of(outcomes_of(read_rows([file])[0], Simulator()))
    said = line["understood"]
    assert "1 x 50 GB/s (400 Gb/s) ethernet for 1 devices" in said["links"]
    assert {"software", "switches", "number formats", "recompute", "sequences", "groups"} <= said.keys()


@pytest.mark.parametrize(
    ("layout", "refused"),
    [
        ({"optimizer": "outer Nesterov every 500 steps"}, "meet every few steps"),
        ({"optimizer": "local Adam, H=50"}, "meet every few steps"),
        ({"framework": "OpenDiLoCo"}, "diloco"),
        ({"sharding": "ZeRO++ with qgZ"}, "compressed on its way"),
        ({"pp_schedule": "PipeDream"}, "do not wait"),
        ({"task": "DPO"}, "pairs of answers"),
        ({"task": "inference"}, "no backward"),
        ({"offload": "optimizer to cpu, ratio 0.5"}, "a part of optimizer stays"),
    ],
)
def test_methods_that_skip_or_add_to_a_step_are_refused(tmp_path: Path, layout: dict[str, Any], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        asked(tmp_path, layout=layout)


def test_methods_that_only_the_notes_name_are_told(tmp_path: Path) -> None:
    assert any("diloco" in words for words in asked(tmp_path, notes="trained with DiLoCo").unread)
    assert any("every 16 steps" in words for words in asked(tmp_path, notes="gradients sync every 16 steps").unread)
    assert not asked(tmp_path, notes="pipedream-flush, 1F1B").unread


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("AdamW, no fp32 copy", {"master_weights": False, "parameters_dtype": ""}),
        ("AdamW with fp32 master weights", {"master_weights": True, "parameters_dtype": ""}),
        ("memory-efficient-fp16 adam", {"master_weights": False}),
        ("decoupled_lionw_8b", {"moments": 1, "moments_dtype": "uint8"}),
        ("adamw_bnb_8bit", {"moments_dtype": "uint8"}),
        ("DeepSpeedCPUAdam", {"host_update": "cpu-adam"}),
    ],
)
def test_optimizers_in_the_words_of_frameworks(tmp_path: Path, words: str, settings: dict[str, Any]) -> None:
    request = asked(tmp_path, layout={"optimizer": words})
    assert {name: getattr(request.stack, name) for name in settings} == settings
    assert not request.unread


@pytest.mark.parametrize("words", ["adamw 4bit", "StableAdamW", "low-bit adam", "sgd with warm restarts of pages"])
def test_words_of_an_optimizer_that_no_rule_reads_are_told(tmp_path: Path, words: str) -> None:
    assert any("layout.optimizer" in text for text in asked(tmp_path, layout={"optimizer": words}).unread)


@pytest.mark.parametrize(
    ("sharding", "stage"),
    [("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 0), ("ds_z3_offload_config", 3), ("optimizer state", 1)],
)
def test_sharding_in_the_words_of_frameworks(tmp_path: Path, sharding: str, stage: int) -> None:
    request = asked(tmp_path, layout={"sharding": sharding, "zero_stage": None})
    assert (request.layout.zero, request.unread) == (stage, ())
    assert asked(tmp_path, layout={"sharding": "FULL_SHARD", "zero_stage": 1}).unread


def test_what_the_name_of_a_framework_says_of_sharding_and_offload(tmp_path: Path) -> None:
    layout = {"framework": "LLaMA-Factory (DeepSpeed ZeRO-3 + CPU offload)", "zero_stage": None, "offload": None}
    request = asked(tmp_path, layout=layout)
    assert (request.layout.zero, request.layout.offload) == (3, ("parameters",))
    assert asked(tmp_path, layout={**layout, "offload": "none"}).layout.offload == ()


def test_number_formats_in_the_words_of_frameworks(tmp_path: Path) -> None:
    def stack(words: str) -> Any:
        return asked(tmp_path, layout={"precision": words}).stack

    assert asked(tmp_path, layout={"precision": "16-mixed"}).layout.precision == "fp16"
    assert asked(tmp_path, layout={"precision": "32-true"}).layout.precision == "fp32"
    assert not stack("pure bf16").master_weights
    assert stack("bf16 params, fp32 grads").gradient_dtype == "float32"
    assert asked(tmp_path, layout={"precision": "fp8 rowwise"}).linear_dtype == "rowwise"
    assert asked(tmp_path, layout={"precision": "bf16 with Foo rounding"}).unread


def test_lists_and_flags_of_recomputing(tmp_path: Path) -> None:
    def modules(**layout: Any) -> tuple[str, ...]:
        return asked(tmp_path, layout=layout).layout.recompute_modules

    chosen = {"activation_checkpointing": "selective"}
    assert modules(**chosen, ac_detail=["core_attn", "mlp"]) == ("core_attn", "mlp")
    assert modules(**chosen, ac_detail="core attention and MLP") == ("core_attn", "mlp")
    assert modules(activation_checkpointing="recompute core attention and layernorm") == ("core_attn", "layernorm")
    assert asked(tmp_path, layout={"activation_checkpointing": True}).layout.recompute == "full"
    assert asked(tmp_path, layout={"activation_checkpointing": "full", "ac_detail": "mlp only"}).unread


def test_first_and_last_stages_of_other_sizes(tmp_path: Path) -> None:
    layout = {"dp": 1, "pp": 4}
    parts: dict[str, Any] = {"hardware": {"gpus": 4}, "model": {"layers": 6}}

    def uneven(notes: str = "", **more: Any) -> StepRequest:
        return asked(tmp_path, layout={**layout, **more}, notes=notes, **parts)

    assert uneven(first_stage_layers=1, last_stage_layers=1).stage_layers == (1, 2, 2, 1)
    words = "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1"
    assert uneven(words).stage_layers == (1, 2, 2, 1)
    assert uneven(last_stage_layers=3).stage_layers == (1, 1, 1, 3)
    assert uneven(first_stage_layers=2, last_stage_layers=1).unread == (
        "layers of the first and last stage, 2 and 1: 4 stages as even as can be",
    )
    for listed in ("layers of the stages 1 1 3 1", "stages of [1, 1, 3, 1] layers", "layers 1, 1, 3, 1"):
        assert (uneven(listed).stage_layers, uneven(listed).unread) == ((1, 1, 3, 1), ())
    for listed in ("layers 1, 1, 3, 2", "stages of [1, 1, 3, 2] layers"):
        told = "layers of the stages (1, 1, 3, 2), of 6 in all: 4 stages as even as can be"
        assert (uneven(listed).stage_layers, uneven(listed).unread) == ((), (told,))
    assert (uneven("batches of 1, 1, 3, 1").stage_layers, uneven("batches of 1, 1, 3, 1").unread) == ((), ())
    assert uneven(dp=2, pp=2, vpp=2, last_stage_layers=2).stage_layers == (2, 1, 2, 1), "of all chunks of a rank"
    assert uneven(dp=2, pp=2, vpp=2, last_stage_layers=3).unread
    assert uneven("account-for-embedding-in-pipeline-split").embedding_is_layer
    assert uneven("embedding and loss are counted as layers").embedding_is_layer


def test_rank_and_modules_of_adapters(tmp_path: Path) -> None:
    request = asked(tmp_path, layout={"task": "QLoRA rank 64 on q_proj,v_proj"})
    assert (request.task, request.lora_rank, request.stack.adapter_modules) == ("qlora", 64, ("wq", "wv"))
    assert any("dora" in words for words in asked(tmp_path, layout={"task": "DoRA r=8"}).unread)


def test_kernels_of_attention_by_number_and_by_library(tmp_path: Path) -> None:
    def request(words: str, **parts: Any) -> StepRequest:
        return asked(tmp_path, model={"attention": words}, **parts)

    assert request("flash_attention_2").stack.attention == "flash2"
    assert request("Flash Attention 3 (hopper)").stack.attention == "flash3"
    assert not request("flash attn v2.5").unread
    assert request("xformers", source="a fork of 2021").stack.attention == "flash1"


def test_memory_of_a_stage_by_its_number(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    prediction = Prediction(step_s=1.0, low_s=1.0, high_s=1.0, peak_bytes=9, rank_bytes=(9, 5, 7, 6))
    for words, expected in (("allocated, stage 2", 7), ("pipeline rank 1", 5), ("GPU 7", 6)):
        file.write_text(changed(measured={"memory_kind": words, "peak_memory_gib": 1.0}))
        assert reported_bytes(read_rows([file])[0][0], prediction, 8) == expected


def test_switches_of_software_by_their_names(tmp_path: Path) -> None:
    stack = asked(tmp_path, layout={"overlap_grad_reduce": False, "attention": "unfused"}).stack
    assert (stack.overlap_grad_reduce, stack.attention) == (False, "unfused")
    assert asked(tmp_path, notes="gradients reduced in fp32").stack.gradient_dtype == "float32"
    assert not asked(tmp_path, notes="no overlap of communication").stack.overlap_grad_reduce
    with pytest.raises(ConfigError, match="attention"):
        asked(tmp_path, layout={"attention": "psychic"})


@pytest.mark.parametrize(
    ("words", "detail", "count"),
    [("full", "block 2", 2), ("selective", "50%", 2), ("partial", "first 1 layers", 1), ("selective", "1/2", 2)],
)
def test_parts_of_the_layers_recomputed(tmp_path: Path, words: str, detail: str, count: int) -> None:
    layout = asked(tmp_path, layout={"activation_checkpointing": words, "ac_detail": detail}).layout
    assert (layout.recompute, layout.recompute_layers) == ("full", count)


def test_chunks_that_the_schedule_says_and_blocks_without_attention(tmp_path: Path) -> None:
    layout = {"dp": 1, "pp": 2, "vpp": None, "pp_schedule": "interleaved 1F1B, v=3"}
    assert asked(tmp_path, model={"layers": 6}, layout=layout).layout.vpp == 3
    with pytest.raises(ConfigError, match="RWKV"):
        asked(tmp_path, model={"arch": "RWKV"})


def test_saving_at_intervals_is_no_method(tmp_path: Path) -> None:
    assert not asked(tmp_path, notes="async checkpointing every 100 steps").unread
