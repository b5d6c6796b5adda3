"""Layouts as settings of the framework that will run them, and what it cannot be told.

Settings are those of torchtitan at b5bcd76c (August 2026: torchtitan/config/configs.py and
distributed/activation_checkpoint.py), as a function for a model's ``config_registry.py``, and of Megatron-LM at core
0.15 (megatron/training/arguments.py), as options of ``pretrain_gpt.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from lading.ir.layout import Layout

_TORCH_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
_CP_COMM_TYPES = {"ring": "p2p", "all_gather": "all_gather", "all_to_all": "a2a"}
_FP8_OPTIONS = {
    "fp8": "--fp8-format hybrid",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--fp4-format e2m1 --fp4-recipe nvfp4",
}
#: Parts of ``recompute_modules`` by the names that Megatron-LM's --recompute-modules has.
_MEGATRON_PARTS = ("core_attn", "layernorm", "moe_act", "mla_up_proj", "mlp", "moe")


@dataclass(frozen=True)
class Handover:
    """Settings of a framework for a layout.

    Attributes:
        file_name: Name of a file that they would be in.
        text: Content of that file.
        unsaid: Sentences on what of the layout the framework cannot be told.
    """

    file_name: str
    text: str
    unsaid: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class HandedLayout:
    """Layout and what else settings say.

    Attributes:
        model: Name of the model in the catalog.
        seq_len: Tokens of a sequence.
        compiled: Whether the software stack compiles blocks.
        overlaps: Whether it reduces gradients, and gathers parameters, beside computing.
        stage_layers: Layers of each stage, in order of forward.
        ahead: Layers at the end of the last stage that predict further tokens (MTP).
    """

    model: str
    layout: Layout
    seq_len: int
    compiled: bool
    overlaps: tuple[bool, bool]
    stage_layers: tuple[int, ...]
    ahead: int = 0


def stages_text(counts: Sequence[int]) -> str:
    """Write the layers of stages, equal neighbours together: "7, 8 x 14, 7"."""
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return ", ".join(f"{often} x {count}" if often > 1 else f"{count}" for count, often in runs)


def torchtitan_settings(handed: HandedLayout) -> Handover:
    """Write a layout as a function of torchtitan's ``config_registry.py``."""
    layout, unsaid = handed.layout, list[str]()
    parallel = _torchtitan_data_parallel(layout, unsaid)
    parallel["tensor_parallel_degree"] = layout.tp
    if layout.tp > 1:
        parallel["enable_sequence_parallel"] = layout.sp
    parallel["context_parallel_degree"] = layout.cp
    parallel["expert_parallel_degree"] = layout.ep
    if layout.ep > 1 and layout.expert_tp != 1:
        unsaid.append(f"experts cut over {layout.expert_tp} ranks besides: torchtitan borrows them for whole experts")
    if layout.is_pipeline:
        parallel |= _torchtitan_pipeline(handed, unsaid)
    if layout.precision not in ("bf16", "fp32"):
        unsaid.append(f"products in {layout.precision}: convert the model, as the *_float8 and *_mxfp8 configs do")
    if layout.offload and "parameters" not in layout.offload:
        unsaid.append(f"{' and '.join(layout.offload)} in {layout.offload_to}: torchtitan moves all states or none")
    name = "".join(letter if letter.isalnum() else "_" for letter in handed.model)
    lines = [
        f"# For torchtitan's config_registry.py beside {name}, the model's own config there under whatever name;",
        f"# run it with --config {name}_planned on {layout.devices:,} ranks.",
        f"def {name}_planned() -> Trainer.Config:",
        f"    config = {name}()",
        "    config.parallelism = ParallelismConfig(",
        *(f"        {key}={value!r}," for key, value in parallel.items()),
        "    )",
        f"    config.training.max_context_length = {handed.seq_len}",
        f"    config.training.num_tokens_per_microbatch_per_dp_rank = {layout.micro_batch} * {handed.seq_len}",
        f"    config.training.num_tokens_per_train_step = {layout.global_batch} * {handed.seq_len}",
        f"    config.training.enable_cpu_offload = {'parameters' in layout.offload}",
        f"    config.activation_checkpoint = {_torchtitan_recompute(layout, unsaid)}",
        f"    config.compile.enable = {handed.compiled}",
        "    return config",
    ]
    return Handover("torchtitan.py", "\n".join(lines) + "\n", tuple(unsaid))


def _torchtitan_data_parallel(layout: Layout, unsaid: list[str]) -> dict[str, object]:
    if layout.zero == 0:
        return {"data_parallel_replicate_degree": layout.dp, "data_parallel_shard_degree": 1}
    sharded = max(1, layout.sharding_ranks // layout.cp)
    if sharded * layout.cp != layout.sharding_ranks:
        unsaid.append(f"states over {layout.sharding_ranks} ranks: a multiple of cp {layout.cp} was expected")
    if layout.zero == 1:
        unsaid.append("zero1: FSDP2 keeps shards of parameters and gradients too")
    return {
        "data_parallel_replicate_degree": layout.dp // sharded,
        "data_parallel_shard_degree": sharded,
        "fsdp_reshard_after_forward": "always" if layout.zero == 3 and not layout.is_pipeline else "never",
    }


def _torchtitan_pipeline(handed: HandedLayout, unsaid: list[str]) -> dict[str, object]:
    layout, counts = handed.layout, handed.stage_layers
    if layout.vpp == 1 and layout.schedule == "zero-bubble":
        unsaid.append("zero-bubble with one chunk a rank: torch's InterleavedZeroBubble wants two or more")
    keys: dict[str, object] = {
        "pipeline_parallel_degree": layout.pp,
        "pipeline_parallel_schedule": _TORCH_SCHEDULES[layout.schedule],
        "num_pp_microbatches": layout.micro_batches,
    }
    if len(set(counts)) == 1:
        return keys | {
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
            "pipeline_parallel_layers_per_stage": counts[0],
        }
    firsts = [sum(counts[:stage]) for stage in range(len(counts))]
    parts = [[f"layers.{n}" for n in range(first, first + count)] for first, count in zip(firsts, counts, strict=True)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return keys | {"module_fqns_per_model_part": parts}


def _torchtitan_recompute(layout: Layout, unsaid: list[str]) -> str:
    if layout.recompute == "none":
        return "None"
    if layout.recompute == "full":
        if layout.recompute_layers >= 0:
            unsaid.append(f"full recompute of {layout.recompute_layers} layers of a chunk: torchtitan recomputes all")
        return "FullAC.Config()"
    if layout.recompute_modules != ("op",):
        parts = "+".join(layout.recompute_modules) or "core_attn"
        unsaid.append(f"recompute of {parts}: torchtitan's SelectiveAC recomputes every second product (op)")
    return "SelectiveAC.Config()"


def megatron_settings(handed: HandedLayout) -> Handover:
    """Write a layout as options of Megatron-LM's ``pretrain_gpt.py``, one a line."""
    layout, unsaid = handed.layout, list[str]()
    options = [
        f"--seq-length {handed.seq_len}",
        f"--micro-batch-size {layout.micro_batch}",
        f"--global-batch-size {layout.global_batch}",
        f"--tensor-model-parallel-size {layout.tp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--context-parallel-size {layout.cp}",
    ]
    if layout.sp:
        options.append("--sequence-parallel")
    if layout.cp > 1:
        options.append(f"--cp-comm-type {_CP_COMM_TYPES[layout.cp_comm]}")
    if layout.ep > 1 or layout.expert_tp != layout.tp:
        options += [
            f"--expert-model-parallel-size {layout.ep}",
            f"--expert-tensor-parallel-size {layout.expert_tp}",
        ]
    if layout.is_pipeline:
        options += _megatron_pipeline(handed, unsaid)
    options += _megatron_precision(layout) + _megatron_states(handed, unsaid) + _megatron_recompute(layout, unsaid)
    text = " \\\n  ".join(
        [f"# Options of Megatron-LM's pretrain_gpt.py for {layout.devices:,} ranks\nOPTIONS=(", *options]
    )
    return Handover("megatron.sh", text.replace(" \\\n", "\n") + "\n)\n", tuple(unsaid))


def _megatron_pipeline(handed: HandedLayout, unsaid: list[str]) -> list[str]:
    layout, counts = handed.layout, handed.stage_layers
    if layout.schedule not in ("1f1b", "interleaved"):
        unsaid.append(f"schedule {layout.schedule}: Megatron-LM has 1f1b and interleaved")
    if len(set(counts)) == 1 and not handed.ahead:
        return [f"--num-virtual-stages-per-pipeline-rank {layout.vpp}"] if layout.vpp > 1 else []
    stages = [f"t*{count}" for count in counts[:-1]] + [f"t*{counts[-1] - handed.ahead}" + "m" * handed.ahead]
    return [f"--pipeline-model-parallel-layout 'E{'|'.join(stages)}L'"]


def _megatron_precision(layout: Layout) -> list[str]:
    if layout.precision == "fp32":
        return []
    return ["--fp16"] if layout.precision == "fp16" else ["--bf16", *filter(None, [_FP8_OPTIONS.get(layout.precision)])]


def _megatron_states(handed: HandedLayout, unsaid: list[str]) -> list[str]:
    layout, flags = handed.layout, list[str]()
    if layout.zero >= 1:
        flags.append("--use-distributed-optimizer")
        if (instances := layout.dp * layout.cp // layout.sharding_ranks) > 1:
            flags.append(f"--num-distributed-optimizer-instances {instances}")
    if layout.zero >= 2:
        flags.append(f"--use-megatron-fsdp --data-parallel-sharding-strategy {_SHARDING[layout.zero]}")
    flags += [f"--overlap-{overlap}" for overlap, runs in zip(_OVERLAPS, handed.overlaps, strict=True) if runs]
    if layout.offload == ("optimizer",):
        flags.append("--optimizer-cpu-offload --optimizer-offload-fraction 1.0")
    elif layout.offload:
        unsaid.append(f"{' and '.join(layout.offload)} in {layout.offload_to}: Megatron-LM moves the optimizer only")
    return flags


_OVERLAPS = ("grad-reduce", "param-gather")
_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def _megatron_recompute(layout: Layout, unsaid: list[str]) -> list[str]:
    if layout.recompute == "none":
        return []
    if layout.recompute == "full":
        if layout.recompute_layers < 0:
            return ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
        return [
            f"--recompute-granularity full --recompute-method block --recompute-num-layers {layout.recompute_layers}"
        ]
    if unknown := [part for part in layout.recompute_modules if part not in _MEGATRON_PARTS]:
        unsaid.append(f"recompute of {', '.join(unknown)}: Megatron-LM has {', '.join(_MEGATRON_PARTS)}")
    parts = [part for part in layout.recompute_modules if part in _MEGATRON_PARTS] or ["core_attn"]
    return [f"--recompute-granularity selective --recompute-modules {' '.join(parts)}"]


HANDOVERS: dict[str, Callable[[HandedLayout], Handover]] = {
    "torchtitan": torchtitan_settings,
    "megatron": megatron_settings,
}
