"""Words of frameworks of which no row was shared: read, told as not understood, or refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tools.validate.requests import request_of
from tools.validate.rows import read_rows
from tools.validate.words import machine_of

from lading.errors import ConfigError
from lading.ir.request import StepRequest
from lading.ir.stack import FITTED, GUESSED
from lading.sim.simulate import simulate
from tests.validate.test_rows import changed

_DATA = {"tp": 1, "pp": 1, "dp": 64, "zero_stage": None, "fsdp": None}


def asked(
    tmp_path: Path, framework: str, notes: str = "", *, source: str = "tech blog 2025-03", **layout: Any
) -> StepRequest:
    file = tmp_path / "rows.jsonl"
    parts: dict[str, Any] = {
        "measured": {"tokens_per_s_per_gpu": None},
        "hardware": {"gpus": 64, "inter_node_link": "InfiniBand 400 Gb/s per GPU"},
        "source": source,
        "notes": notes,
        "layout": {**_DATA, "global_batch": 128, "framework": framework, **layout},
    }
    file.write_text(changed(**parts))
    return request_of(read_rows([file])[0][0])


@pytest.mark.parametrize(
    ("framework", "notes", "layout", "expected"),
    [
        ("MaxText", "ici_fsdp_parallelism=8 dcn_data_parallelism=8", {}, {"zero": 3}),
        ("accelerate", "", {"sharding": "FSDP2 reshard_after_forward=false"}, {"zero": 2}),
        ("ColossalAI", "", {"sharding": "Gemini"}, {"zero": 3}),
        ("PaddleFleetX", "", {"sharding": "p_g_os"}, {"zero": 3}),
        ("PaddleNLP", "", {"sharding": "os_g"}, {"zero": 2}),
        ("PaddleNLP", "sharding_parallel_degree 8", {"sharding": "stage1"}, {"zero": 1, "shard": 8}),
        ("veScale", "", {"sharding": "DistributedOptimizer"}, {"zero": 1}),
        ("Megatron-FSDP", "", {"sharding": "optim_grads_params"}, {"zero": 3}),
        ("InternEvo", "", {"sharding": "zero1 size 8"}, {"zero": 1, "shard": 8}),
        ("InternEvo", "", {"sharding": "ISP wp16"}, {"zero": 3, "shard": 16}),
        ("nanotron", "", {"dp": 32, "pp": 2, "pp_schedule": "AllForwardAllBackward"}, {"schedule": "gpipe"}),
        ("nanotron", "", {"activation_checkpointing": "recompute_layer: true"}, {"recompute": "full"}),
        ("PaddleNLP", "", {"activation_checkpointing": "core_attn"}, {"recompute": "selective"}),
        ("ms-swift", "", {"activation_checkpointing": "full", "ac_detail": "uniform 1"}, {"recompute_layers": -1}),
        ("Paddle Fleet", "sharding stage2 offload", {"sharding": "stage2"}, {"offload": ("optimizer",)}),
        ("BMTrain", "", {"optimizer": "AdamOffloadOptimizer", "sharding": "zero3"}, {"offload": ("optimizer",)}),
        ("PaddleNLP", "virtual_pp_degree 2", {"dp": 32, "pp": 2}, {"vpp": 2}),
    ],
)
def test_layouts_in_other_words(
    tmp_path: Path, framework: str, notes: str, layout: dict[str, Any], expected: dict[str, Any]
) -> None:
    request = asked(tmp_path, framework, notes, **layout)
    assert {name: getattr(request.layout, name) for name in expected} == expected
    assert not request.unread


@pytest.mark.parametrize(
    ("framework", "notes", "layout", "expected"),
    [
        ("LLM Foundry", "attn_impl: torch", {}, {"framework": "Composer", "attention": "unfused"}),
        ("llm-foundry", "", {"attention": "flash3"}, {"attention": "flash3"}),  # a fact of its tables says triton
        ("NeMo AutoModel", "", {"sharding": "fsdp2"}, {"kind": "eager-torch", "framework": ""}),
        ("Lightning", "", {"dp": 8, "tp": 8, "sharding": "fsdp2"}, {"kind": "eager-torch"}),
        ("AXLearn", "", {"sharding": "fsdp"}, {"kind": "compiled-torch"}),
        ("Thunder", "thunder.jit", {"sharding": "fsdp zero2"}, {"kind": "compiled-torch"}),
        ("transformers Trainer", "", {"compile": True}, {"fusion": "compiled", "name": "hf-transformers"}),
        ("LLaMA-Factory", "", {"sharding": "ds_z3"}, {"gathers": 3, "pieces": 12}),
        ("T5X", "", {"precision": "fp8 (TE delayed)"}, {"fused_casts": True, "low_scaling": "delayed"}),
        ("accelerate", "fp8 by torchao", {"precision": "fp8"}, {"fused_casts": False, "low_scaling": "tensorwise"}),
        ("xtuner", "", {"precision": "fp8 tile-wise", "compile": True}, {"low_scaling": "block"}),
        ("LitGPT", "", {"precision": "bf16-true"}, {"moments_dtype": "bfloat16", "master_weights": False}),
        ("DDP", "bucket_cap_mb=100, bf16_compress_hook", {}, {"bucket_elements": 50 * 2**20}),
        ("DeepSpeed", "reduce_bucket_size 5e8, overlap_comm true", {}, {"bucket_elements": 5e8}),
        ("DeepSpeed", "overlap_comm: true", {}, {"overlap_grad_reduce": True}),
        ("PaddleNLP", "use_flash_attention true", {"dp": 32, "tp": 2}, {"kind": "eager-torch", "attention": "flash2"}),
        ("PaddleNLP", "use_fused_rms_norm false", {}, {"eager_norms": True}),
        ("Paxml (JAX, XLA)", "", {}, {"kind": "compiled-torch", "attention": "unfused"}),
        ("Paxml (JAX, XLA)", "ENABLE_TE=1", {}, {"kind": "compiled-torch", "attention": "cudnn"}),
        ("flash-attn models", "fused_dropout_add_ln, fused_mlp", {}, {"kind": "eager-torch", "fusion": "fused"}),
        ("FSDP2", "a benchmark of Thunder, eager", {"compile": False}, {"kind": "eager-torch"}),
        ("llm.c (C and CUDA)", "", {}, {"kind": "compiled-torch", "master_weights": True, "parameters_dtype": ""}),
        (
            "own trainer in CUDA and C++",
            "parameters and moments in bf16, no other masters; CUDA graphs full_iteration",
            {},
            {"name": "compiled-torch", "master_weights": False, "parameters_dtype": "", "cuda_graphs": True},
        ),
        ("LLaMA-Factory", "as in the table of llm.c's authors", {}, {"name": "hf-transformers", "fusion": "eager"}),
        (
            "transformers with Transformer Engine's TransformerLayer",
            "",
            {},
            {"fusion": "fused", "eager_norms": False, "foreach": True},
        ),
        ("FSDP2", "", {}, {"foreach": True}),
        ("FSDP2", "AdamW(fused=True)", {}, {"foreach": False}),
        ("FSDP2", "torch.compile", {}, {"foreach": False}),
        ("FSDP2", "", {"optimizer": "AdamW, fused=True"}, {"foreach": False, "host_update": "fused"}),
        ("FSDP2", "", {"optimizer": "AdamW, fused=False"}, {"foreach": True, "host_update": "loop"}),
        ("FSDP2", "CPUOffloadOptimizer of torchao", {}, {"host_update": "fused"}),
        ("transformers", "", {}, {"host_update": "loop"}),
        ("transformers, DeepSpeed", "ZeRO-Offload", {}, {"host_update": "cpu-adam"}),
        (
            "Megatron-LM",
            "--no-rope-fusion, --no-bias-swiglu-fusion",
            {"dp": 32, "tp": 2},
            {"unfused": ("rope", "swiglu")},
        ),
        ("Megatron-LM", "no gradient accumulation fusion", {"dp": 32, "tp": 2}, {"unfused": ("gradients",)}),
        (
            "Megatron-LM",
            "1F1B overlap of experts' all-to-all",
            {"dp": 32, "tp": 2},
            {"hidden": {"tp": 0.6, "cp": 0.9, "pp": 1.0, "ep": 0.9}},
        ),
        ("PEFT", "no autocast", {"task": "LoRA r8"}, {"adapter_dtype": "float32", "adapter_autocast": False}),
        ("PEFT", "", {"task": "LoRA r8", "precision": "bf16 mixed"}, {"adapter_autocast": True}),
        (
            "transformers, DDP",
            "",
            {"precision": "fp16 mixed"},
            {"parameters_dtype": "float32", "master_weights": False},
        ),
        ("transformers, DDP", "", {"precision": "bf16"}, {"parameters_dtype": "", "foreach": True}),
        ("PEFT", "", {"precision": "bf16 mixed", "task": "LoRA r8"}, {"parameters_dtype": ""}),
        ("LLaMA-Factory", "", {"task": "LoRA r8"}, {"name": "hf-transformers", "adapter_dropout": False}),
        (
            "own trainer",
            "fp16_opt_level O2",
            {"precision": "fp16"},
            {"parameters_dtype": "", "master_weights": True, "gradient_dtype": "bfloat16"},
        ),
    ],
)
def test_software_in_other_words(
    tmp_path: Path, framework: str, notes: str, layout: dict[str, Any], expected: dict[str, Any]
) -> None:
    stack = asked(tmp_path, framework, notes, **layout).stack
    assert {name: getattr(stack, name) for name in expected} == expected


def test_a_family_of_software_and_a_runtime_leave_more_open(tmp_path: Path) -> None:
    """Of frameworks that share transformers' models no step was seen, whatever set their switches are of."""
    family, runtime, plain = (asked(tmp_path, name) for name in ("Axolotl", "llm.c (C and CUDA)", "FSDP2"))
    assert family.stack.name == "hf-transformers"
    assert family.stack.evidence_on("hopper") == GUESSED
    assert any("software of a family" in sentence for sentence in family.assumed)
    open_of_both = [set(request.unstated) - set(plain.unstated) for request in (family, runtime)]
    assert [len(left) for left in open_of_both] == [4, 3], "of a family the kernel of attention too"
    for request in (family, runtime):
        wide, narrow = (
            simulate(one).prediction for one in (request, dataclasses.replace(request, unstated=plain.unstated))
        )
        assert wide.high_s > narrow.high_s
        assert wide.step_s == narrow.step_s


def test_steps_of_one_cluster_do_not_make_a_framework_known_elsewhere(tmp_path: Path) -> None:
    """Clean runs of Megatron-DeepSpeed were seen; training with DeepSpeed's engine takes 20 to 40% longer (MT-NLG)."""
    runs = (asked(tmp_path, name, source="a report, 2022-05") for name in ("Megatron-DeepSpeed", "vTrain's"))
    assert [run.stack.evidence_on("ampere") for run in runs] == [GUESSED, FITTED]


@pytest.mark.parametrize(("year", "attention"), [("2023-11", "masked"), ("2024-06", "flash2")])
def test_flash_attention_takes_biases_since_2024(tmp_path: Path, year: str, attention: str) -> None:
    request = asked(tmp_path, "own trainer, PyTorch FSDP", "FlashAttention-2; ALiBi", source=f"a report, {year}")
    assert request.stack.attention == attention


@pytest.mark.parametrize(("notes", "attention"), [("xformers' memory-efficient attention", "flash1"), ("", "unfused")])
def test_attention_of_xformers_is_fused(tmp_path: Path, notes: str, attention: str) -> None:
    request = asked(tmp_path, "transformers, DeepSpeed", notes, source="a report, 2023-05", zero_stage=1)
    assert request.stack.attention == attention


def test_a_power_limit_in_the_notes_is_told(tmp_path: Path) -> None:
    request = asked(tmp_path, "FSDP2", "each card limited to 280 W")
    assert request.unread == ("notes say 'limited to 280 w': clocks at a power limit",)


@pytest.mark.parametrize(
    ("framework", "mode"),
    [("LLaMA-Factory", "full"), ("LLaMA-Factory with Unsloth", "full"), ("Paxml", "full"), ("LitGPT", "none")],
)
def test_what_software_recomputes_where_a_row_does_not_say(tmp_path: Path, framework: str, mode: str) -> None:
    request = asked(tmp_path, framework, activation_checkpointing=None)
    assert request.layout.recompute == mode
    assert ("whether blocks are recomputed" in request.unstated) is (mode == "none")
    assert asked(tmp_path, framework, activation_checkpointing="none").layout.recompute == "none"


@pytest.mark.parametrize(("task", "mode"), [("QLoRA r16", "full"), ("LoRA r16", "none")])
def test_peft_recomputes_where_weights_have_few_bits(tmp_path: Path, task: str, mode: str) -> None:
    assert asked(tmp_path, "PEFT", activation_checkpointing=None, task=task).layout.recompute == mode


def test_what_a_row_does_not_say_widens_the_interval(tmp_path: Path) -> None:
    said, unsaid = (asked(tmp_path, "FSDP2", activation_checkpointing=mode) for mode in ("none", None))
    other = asked(tmp_path, "PaddlePaddle", activation_checkpointing="none")
    assert not said.unstated
    assert unsaid.unstated == ("whether blocks are recomputed",)
    assert "how far a runtime that is not PyTorch's is like it" in other.unstated
    of_a_run = asked(tmp_path, "FSDP2", "33,500 GPU hours over 143,000 steps", activation_checkpointing="none")
    assert of_a_run.unstated == ("what a whole run takes besides its steps",)
    sure, wide = (simulate(request).prediction for request in (said, unsaid))
    assert sure.step_s == wide.step_s
    assert wide.high_s > sure.high_s


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        ("EPLB with 32 redundant experts", "held twice"),
        ("group-limited routing of 4 nodes", "few nodes"),
        ("tp_linear_async_communication: true", "beside products"),
        ("backward_prefetch=BACKWARD_POST", "gathered late"),
        ("optimizer_in_bwd=True", "within backward"),
        ("tensor parallel with mode='isp'", "InternEvo"),
        ("stages of [5,9,9,9] layers", "unlike numbers"),
        ("intra-layer micro-batch overlap", "beside each other"),
        ("images decoded and augmented by the host", "while training"),
    ],
)
def test_what_is_not_priced_is_told_and_widens(tmp_path: Path, notes: str, said: str) -> None:
    assert any(said in words for words in asked(tmp_path, "own trainer", notes).unread)
    assert not asked(tmp_path, "own trainer", f"no {notes}").unread


def test_sequences_in_chunks_on_the_host_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chunks of a sequence wait on the host"):
        asked(tmp_path, "DeepSpeed-Ulysses", offload="FPDT sequence chunks to host")


def test_published_runs_of_other_frameworks_are_asked_for_as_they_say() -> None:
    """Runs of software of which but one has a set of its own are read whole, but for one word that is not priced."""
    rows, notes = read_rows([Path(__file__).parents[2] / "benchmarks" / "validation" / "other_frameworks.jsonl"])
    requests = {row.id: request_of(row) for row in rows}
    assert (len(rows), notes) == (38, [])
    assert all(row.step_s for row in rows)
    named = {request.stack.framework for request in requests.values()} - {""}
    assert named == {"nanotron"}
    unread = {word.split(":")[0] for request in requests.values() for word in request.unread}
    assert unread == {"'tp_linear_async_communication true'"}
    shards = {name: requests[f"internlm-{name}"].layout for name in ("tp1-z8-64", "tp1-z1all-64")}
    assert [(layout.zero, layout.shard) for layout in shards.values()] == [(1, 8), (1, 0)]


def test_runs_that_were_predicted_before_anything_was_changed_for_them_are_read_whole() -> None:
    rows, notes = read_rows([Path(__file__).parents[2] / "benchmarks" / "validation" / "unseen_frameworks.jsonl"])
    requests = {row.id: request_of(row) for row in rows}
    assert (len(rows), notes) == (49, [])
    assert all(row.step_s for row in rows)
    unread = {word for request in requests.values() for word in request.unread}
    assert len(unread) == 1, unread
    recomputed = {name for name, request in requests.items() if request.layout.recompute == "full"}
    assert {"llamafactory-fa2-1024", "llamafactory-unsloth-100000", "pax-126M", "pax-175B-te"} <= recomputed


def test_runs_on_boards_of_ones_own_are_read_but_for_what_is_not_priced() -> None:
    rows, notes = read_rows([Path(__file__).parents[2] / "benchmarks" / "validation" / "blind_frameworks_3.jsonl"])
    requests = {row.id: request_of(row) for row in rows}
    assert (len(rows), notes) == (80, [])
    assert all(row.step_s for row in rows)
    unread = {word.split(":")[0] for request in requests.values() for word in request.unread}
    assert unread == {"'images decoded and augmented'"}
    assert requests["gpt2-file-l40-bs32"].machine == "l40"
    assert requests["ult-h100-8b-full"].stack.attention == "masked"
    assert requests["torchao-4070ts-vitg-ao"].stack.host_update == "fused"


@pytest.mark.parametrize(
    ("words", "machine"),
    [
        ("NVIDIA L40", "l40"),
        ("L40S-48G", "l40s"),
        ("NVIDIA L4", "l4"),
        ("A10G (g5.xlarge)", "a10g"),
        ("A10", "a10"),
        ("RTX PRO 6000 Blackwell", "rtxpro6000"),
        ("GeForce RTX 3090 Ti", "rtx3090ti"),
        ("RTX 4070 Ti SUPER", "rtx4070tisuper"),
        ("AMD Instinct MI250X", "mi250x"),
        ("RTX A5000", "rtxa5000"),
    ],
)
def test_boards_by_their_names(words: str, machine: str) -> None:
    assert machine_of(words)[0] == machine


@pytest.mark.parametrize("words", ["RTX 4070 Ti", "RTX 3080 Ti", "L400", "RTX 3060 Ti"])
def test_a_board_is_not_taken_for_another_whose_name_begins_alike(words: str) -> None:
    with pytest.raises(ConfigError, match="expected a GPU of the catalog's machines"):
        machine_of(words)
