"""Layouts as settings of torchtitan and of Megatron-LM: every choice is said, or said to be unsaid."""

from __future__ import annotations

import shlex
from types import SimpleNamespace
from typing import Any

import pytest

from lading.ir.layout import parse_layout
from lading.report.handover import HandedLayout, megatron_settings, stages_text, torchtitan_settings


def handed(text: str, *layers: int, ahead: int = 0) -> HandedLayout:
    return HandedLayout(
        model="llama3-8b",
        layout=parse_layout(text),
        seq_len=8192,
        compiled=True,
        overlaps=(True, False),
        stage_layers=layers or (32,),
        ahead=ahead,
    )


def titan(text: str, *layers: int) -> tuple[dict[str, Any], Any, tuple[str, ...]]:
    """Run the function that was written, on a plain configuration: its parallelism, itself, what is unsaid."""
    settings = torchtitan_settings(handed(text, *layers))
    config = SimpleNamespace(training=SimpleNamespace(), compile=SimpleNamespace())
    scope: dict[str, Any] = {
        "Trainer": SimpleNamespace(Config=object),
        "ParallelismConfig": dict,
        "FullAC": SimpleNamespace(Config=lambda: "full"),
        "SelectiveAC": SimpleNamespace(Config=lambda: "selective"),
        "llama3_8b": lambda: config,
    }
    exec(settings.text, scope)
    assert scope["llama3_8b_planned"]() is config
    return config.parallelism, config, settings.unsaid


def test_torchtitan_is_told_a_sharded_layout() -> None:
    parallel, config, unsaid = titan("dp16,tp2,cp2,sp,zero3,shard8,mb2,gb128,recompute=selective,recompute_modules=op")
    assert parallel == {
        "data_parallel_replicate_degree": 4,
        "data_parallel_shard_degree": 4,
        "fsdp_reshard_after_forward": "always",
        "tensor_parallel_degree": 2,
        "enable_sequence_parallel": True,
        "context_parallel_degree": 2,
        "expert_parallel_degree": 1,
    }
    assert config.training.num_tokens_per_microbatch_per_dp_rank == 2 * 8192
    assert config.training.num_tokens_per_train_step == 128 * 8192
    assert (config.activation_checkpoint, config.compile.enable, unsaid) == ("selective", True, ())


def test_torchtitan_is_told_stages_and_what_it_cannot_be_told() -> None:
    parallel, config, unsaid = titan(
        "dp2,pp2,vpp2,zero1,gb16,interleaved,recompute=full,recompute_layers=1", 1, 2, 2, 1
    )
    assert parallel["module_fqns_per_model_part"] == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2"],
        ["layers.3", "layers.4"],
        ["layers.5", "norm", "lm_head"],
    ]
    assert parallel["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert parallel["num_pp_microbatches"] == 8
    assert config.activation_checkpoint == "full"
    assert [sentence.split()[0] for sentence in unsaid] == ["zero1:", "full"]
    parallel, _, unsaid = titan("dp2,pp2,zero3,gb16,zero-bubble", 16, 16)
    assert parallel["pipeline_parallel_layers_per_stage"] == 16
    assert unsaid == ("zero-bubble with one chunk a rank: torch's InterleavedZeroBubble wants two or more",)


@pytest.mark.parametrize(
    ("text", "layers", "expected"),
    [
        (
            "dp4,tp2,sp,zero1,gb16",
            (32,),
            "--sequence-parallel --bf16 --use-distributed-optimizer --overlap-grad-reduce",
        ),
        ("dp4,zero1,shard2,gb16", (32,), "--num-distributed-optimizer-instances 2"),
        ("dp2,pp2,vpp2,gb16,interleaved", (8, 8, 8, 8), "--num-virtual-stages-per-pipeline-rank 2"),
        ("dp2,pp2,vpp2,gb16,interleaved", (1, 2, 2, 1), "--pipeline-model-parallel-layout Et*1|t*2|t*2|t*1L"),
        ("dp8,tp2,ep8,etp1,gb16,fp8", (32,), "--expert-tensor-parallel-size 1 --bf16 --fp8-format hybrid"),
        ("dp1,cp4,gb16,cp_comm=all_to_all", (32,), "--cp-comm-type a2a"),
        ("dp1,gb4,recompute=selective", (32,), "--recompute-granularity selective --recompute-modules core_attn"),
        ("dp1,gb4,recompute=full,recompute_layers=3", (32,), "--recompute-method block --recompute-num-layers 3"),
        ("dp1,gb4,offload=optimizer", (32,), "--optimizer-cpu-offload --optimizer-offload-fraction 1.0"),
    ],
)
def test_megatron_is_told(text: str, layers: tuple[int, ...], expected: str) -> None:
    settings = megatron_settings(handed(text, *layers))
    body = settings.text.split("OPTIONS=(")[1].rstrip(")\n")
    assert expected in " ".join(shlex.split(body))
    assert settings.unsaid == ()


def test_megatron_predicts_ahead_in_the_last_stage_and_has_not_every_schedule() -> None:
    settings = megatron_settings(
        handed("dp1,pp2,gb4,zero-bubble,recompute=selective,recompute_modules=op", 31, 31, ahead=1)
    )
    assert "'Et*31|t*30mL'" in settings.text
    assert [sentence.split()[0] for sentence in settings.unsaid] == ["schedule", "recompute"]


def test_equal_stages_are_written_together() -> None:
    assert stages_text((7, *[14] * 8, 7)) == "7, 8 x 14, 7"
