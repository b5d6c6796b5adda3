"""Recipes: settings of published runs that the tables made with them do not print, each with its evidence.

[Note: sweep of one node] All 765 rows of vTrain's sweep of one node are sums, to 0.1%, of one time per layer and one
per head for each hidden size, tensor-parallel ways and micro-batch. Of a layer of 2,048 on 8 sequences it is 16.3 ms:
products that ran at the A100's best rate through forward, backward and a second forward would leave 0.7 ms for the 6 ms
of memory-bound kernels, so nothing was recomputed, whatever the configuration says. A head takes what one of 50,257
columns does, and of 25,128 on each of two ranks, as in vTrain's own model (src/model/gpt_modeling.py @f8dda847:
vocab_size // world_size).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from lading.ir.layout import Layout
from lading.ir.request import Architecture, StepRequest

_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge scripts/performance/configs/llama/llama3_workload_base_configs.py"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a request that hold where all that is given here does.

    Attributes:
        stack, machine, precision, zero: Values that the request must have.
        hidden, layers: Sizes that the model must have.
        settings: Fields of Request and of Layout to set.
        evidence: Place where the settings are written.
    """

    stack: str
    machine: str
    precision: str
    zero: int
    hidden: int
    layers: int
    settings: dict[str, Any]
    evidence: str


def _offloads(machine: str, precision: str, layers: int) -> Recipe:
    return Recipe(
        stack="megatron-bridge",
        machine=machine,
        precision=precision,
        zero=3,
        hidden=8192,
        layers=80,
        settings={"offload": ("activations",), "offload_layers": layers},
        evidence=f"activations of {layers} layers go to the host ({_BRIDGE}: cpu_offloading_num_layers)",
    )


RECIPES: tuple[Recipe, ...] = (
    _offloads("gb300", "bf16", 30),
    _offloads("gb300", "fp8", 20),
    _offloads("gb200", "bf16", 20),
    _offloads("gb200", "fp8", 40),
    _offloads("b200", "fp8", 5),
    Recipe(
        stack="megatron-bridge",
        machine="h100",
        precision="fp8",
        zero=3,
        hidden=4096,
        layers=32,
        settings={"recompute": "full", "recompute_layers": 5},
        evidence=f"5 of 32 layers are recomputed ({_BRIDGE}: recompute_num_layers)",
    ),
)


def recipe_of(stack: str, machine: str, model: Architecture, layout: Layout) -> Recipe | None:
    """Published recipe that a request is made with; None without one."""
    return next(
        (
            recipe
            for recipe in RECIPES
            if (recipe.stack, recipe.machine, recipe.precision) == (stack, machine, layout.precision)
            and (recipe.zero, recipe.hidden, recipe.layers) == (layout.zero, model.symbols["h"], model.layers)
        ),
        None,
    )


@dataclass(frozen=True)
class Fact:
    """Settings of a software stack that a source's own files give for some of its rows.

    Attributes:
        pattern: Searched in what the row says, in lower case.
        applies: Whether a request is one of them.
        settings: Fields of Stack, whose ``hidden`` is added to, and of Layout.
        evidence: Place where they are written.
        of_run: Whether they say of these very runs what their rows say wrongly or not at all, so that they count also
            where nothing is known of the framework.
    """

    pattern: str
    applies: Callable[[StepRequest], bool]
    settings: dict[str, Any]
    evidence: str
    of_run: bool = False


def _large(request: StepRequest) -> bool:
    return request.machine == "h100" and request.layout.devices >= 128


def _attends_in_8_bits(request: StepRequest) -> bool:
    latent_gb200 = "kr" in request.model.symbols and request.machine == "gb200"
    return request.layout.precision == "mxfp8" and "e" in request.model.symbols and not latent_gb200


#: The file that rows of vTrain's sweep of one node name.
SWEEP = "vtrain data/ground_truth_single"

FACTS: tuple[Fact, ...] = (
    Fact(
        SWEEP,
        lambda request: request.layout.recompute == "full",
        {"recompute": "none"},
        "vTrain's sweep of one node: its times per layer leave no room for a second forward, so nothing is recomputed",
        of_run=True,
    ),
    Fact(
        r"bigscience",
        lambda request: request.layout.devices >= 320,
        {"launch_blocking": True},
        "bigscience chronicles-prequel.md, hanging on the large model: from 320 GPUs on runs only go with "
        "CUDA_LAUNCH_BLOCKING=1",
        of_run=True,
    ),
    Fact(
        r"llm-foundry",
        lambda request: not _large(request),
        {"attention": "triton", "gradient_dtype": "bfloat16"},
        "llm-foundry scripts/train/benchmarking/submit_benchmarks.py: attn_impl triton, flash-attn 1.0.7; composer "
        "0.12 to 0.16.3 reduce in the low precision (get_mixed_precision)",
    ),
    Fact(
        r"llm-foundry",
        _large,
        {"attention": "flash2", "gradient_dtype": "float32"},
        "llm-foundry 5e85bd62 (2024-01) for the tables of 128 devices and more: flash-attn 2.4.2; composer since "
        "0.16.4 reduces in fp32 (get_mixed_precision)",
    ),
    Fact(
        r"dgxc.*v25\.01",
        lambda request: "e" in request.model.symbols,
        {"hidden": {"tp": 0.0}},
        "dgxc-benchmarking v25.01.1 grok1/grok1_314b.yaml: ub_tp_comm_overlap false",
        of_run=True,
    ),
    Fact(
        r"dgxc.*v25\.01",
        lambda request: request.model.family == "nemotron" and request.layout.pp > 1,
        {"hidden": {"tp": 0.0, "pp": 0.0}},
        "dgxc-benchmarking v25.01.1 nemotron/nemotron4-340b-synth.yaml: ub_tp_comm_overlap and overlap_p2p_comm false",
        of_run=True,
    ),
    Fact(
        r"dgxc.*v25\.01",
        lambda request: request.stack.kind == "megatron-like" and request.model.family in ("llama", "nemotron"),
        {"fused_loss": True},
        "dgxc-benchmarking v25.01.1 llama3.1/*.yaml and nemotron/*.yaml: cross_entropy_loss_fusion true",
        of_run=True,
    ),
    Fact(
        r"(?:container|nemo|release|tag|toolkit) ?v?25\.0[1-5]\b|\b2025-0[1-5]\b",
        lambda request: (
            "kr" in request.model.symbols
            and request.stack.attention == "cudnn"
            and request.machine.startswith(("gb", "b"))
        ),
        {"attention": "unfused"},
        "TransformerEngine pull 1504 (2025-02), fused_attn.cpp: no fused attention on Blackwell for heads of more than "
        "128 columns; dgxc-benchmarking v25.05.05 deepseek_v3/pretraining/launch.sh recomputes core_attn on GB200",
        of_run=True,
    ),
    Fact(
        r"megatron-bridge|mbridge",
        lambda request: request.task == "lora",
        {"fused_loss": False},
        "Megatron-Bridge recipes/llama/llama3.py, v0.5.0: PEFT disables cross_entropy_loss_fusion",
    ),
    Fact(
        r"megatron-bridge.*release 25\.",
        lambda request: request.stack.attention == "cudnn9",
        {"attention": "cudnn"},
        "assumption: containers of 2025 have cuDNN before 9.2x, as fast as what SimuMax measured with TE 2.11",
    ),
    Fact(
        r"megatron-bridge.*cuda graphs full_iteration",
        _attends_in_8_bits,
        {"attention": "cudnn9-mxfp8"},
        "Megatron-Bridge v0.5.1 scripts/performance/configs: fp8_dot_product_attention with cutedsl_fused_grouped_mlp",
    ),
    Fact(
        r"megatron-bridge.*cuda graphs full_iteration",
        lambda request: request.layout.precision == "mxfp8" and "e" in request.model.symbols,
        {"fused_experts": True},
        "Megatron-Bridge v0.5.1 scripts/performance/configs: cutedsl_fused_grouped_mlp where iterations are graphs",
    ),
    Fact(
        r"megatron-bridge|mbridge",
        lambda request: request.layout.precision in ("fp8", "mxfp8"),
        {"gather_dtype": "float8_e4m3fn"},
        "Megatron-Bridge src/megatron/bridge/training/mixed_precision.py: fp8_param_gather",
    ),
    Fact(
        r"megatron-bridge skills",
        lambda request: request.model.family == "mla-moe" and not request.model.symbols.get("qr"),
        {"hidden": {"tp": 0.0}, "experts_s": 2.5e-3, "step_s": 0.045},
        "Megatron-Bridge recipes/moonlight/h100/moonlight_16b.py, without scripts/performance: tp_comm_overlap and "
        "moe_router_fusion False, manual_gc_interval 5; assumption: 25 launches of 10 us more for a router in parts, "
        "0.15 s for a collection of garbage each fifth step",
        of_run=True,
    ),
    Fact(
        r"megatron-bridge|mbridge",
        lambda request: request.model.family == "mla-moe",
        {"moments_dtype": "bfloat16"},
        "Megatron-Bridge recipes of Moonlight and DeepSeek-V3: use_precision_aware_optimizer, exp_avg_dtype bfloat16",
        of_run=True,
    ),
    Fact(
        r"torchtitan",
        lambda request: request.layout.precision == "fp8" and request.linear_dtype != "rowwise",
        {"gather_dtype": "float8_e4m3fn"},
        "torchtitan benchmarks: enable_fsdp_float8_all_gather with tensorwise scaling",
    ),
    Fact(
        "",
        lambda request: request.async_tp,
        {"hidden": {"tp": 0.7}},
        "asynchronous tensor parallel, as torchtitan benchmarks/asyncTP_llama3_h100_2025-06: the same layout with and "
        "without takes 8 to 14% less, about 0.7 of what tensor-parallel collectives take alone",
        of_run=True,
    ),
    Fact(
        r"torchtitan",
        lambda request: request.layout.cp > 1,
        {"cp_comm": "all_gather"},
        "torchtitan 9dec370 config_manager.py: context_parallel_rotate_method defaults to allgather",
    ),
)


def with_facts(
    request: StepRequest, text: str, *, known: bool = True, stated: Collection[str] = ()
) -> tuple[StepRequest, list[str]]:
    """Request with what its source's own files set, and the evidence; only of the run where ``known`` is false.

    Args:
        stated: Switches that the row states by itself, and no fact replaces; ``hidden`` is added to.
    """
    lowered = text.lower()
    evidence: list[str] = []
    for fact in FACTS:
        if (known or fact.of_run) and re.search(fact.pattern, lowered) and fact.applies(request):
            settings = {name: value for name, value in fact.settings.items() if name == "hidden" or name not in stated}
            if "hidden" in settings:
                settings["hidden"] = {**request.stack.hidden, **settings["hidden"]}
            of_layout = {name: settings.pop(name) for name in list(settings) if hasattr(request.layout, name)}
            request = dataclasses.replace(
                request,
                stack=dataclasses.replace(request.stack, **settings),
                layout=dataclasses.replace(request.layout, **of_layout),
            )
            evidence.append(fact.evidence)
    return request, evidence


def high_precision_layers(request: StepRequest, text: str) -> int:
    """Number of layers that a recipe keeps in 16 bits.

    Nemotron 3 Super in 4 bits: the first and the last 14 (Megatron-Bridge src/megatron/bridge/training/
    mixed_precision.py: nemotron_3_super_bf16_with_nvfp4_mixed). Current scaling of Megatron-Bridge keeps the first and
    the last, but not in scripts/performance (utils/precision.py), which published tables are made with.
    """
    bridge = request.stack.name.startswith("megatron-bridge")
    if bridge and request.layout.precision == "nvfp4" and request.model.symbols.get("latent"):
        return 15
    scaled = request.layout.precision == "fp8" and request.linear_dtype in ("", "tensorwise")
    return 2 if bridge and scaled and "perf preset" not in text else 0
