"""Software of a row: a named set of switches, or the defaults of a class, and what the row says replaces of them.

[Note: software that is not known]
Words of a source name the set (``words.STACK_RULES``). Where none is named, or the framework is to be left out, the row
still tells the class: that it is compiled, runs on DeepSpeed, cuts tensors or layers as Megatron does; else it is eager
PyTorch. Of a class there are defaults for now and for the years before kernels of attention and overlap were common, so
the year of the source counts. What the row states of single switches replaces these as it does those of a named set.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from lading.catalog.stacks import stack_by_name, stack_names
from lading.ir.graph import DTYPE_BYTES
from lading.ir.stack import Stack
from tools.validate.fields import FLASH_VERSION, denies_flash, rounds_to_tf32, stage_of
from tools.validate.pretrained import activation_part, pretrained_of
from tools.validate.prose import clauses_of
from tools.validate.rows import Row
from tools.validate.runtimes import (
    affirmed,
    has_attention_in_layers,
    has_own_runtime,
    rounds_by_default,
    switches_of_runtime,
    words_of_runtime,
)
from tools.validate.words import StackRule, machine_of, stack_rule_of

#: Year that a source without one is taken to be of, by what its GPU's name begins with: about the middle of the years
#: in which most was published of it and kernels of attention were common.
_MIDDLE = (("a100", 2023), ("a800", 2023), ("v100", 2022))
#: From this year on FlashAttention without a number is taken for the second in PyTorch; before, and where a source has
#: no year, for the first. From it on, what trains models of transformers on DeepSpeed has PyTorch's fused attention:
#: "SDPA is used by default for torch>=2.1.1" (transformers, pages of its models); forks of
#: Megatron have their own.
_NUMBERED = 2024
#: Year of PyTorch 2.0 (15 March 2023), the first with ``scaled_dot_product_attention``.
_FUSED = 2023
#: Models of transformers had no fused attention by themselves before 4.36 (11 December 2023), and from 4.38 to 4.40
#: (21 February to 17 May 2024) gave it a mask that is a tensor, which FlashAttention does not take
#: (huggingface/transformers pulls 26572, 30070 and 30314); a padded batch has one at any time. Year and month of
#: sources: until, and from to.
_UNFUSED_UNTIL, _MASKED = (2023, 11), ((2024, 3), (2024, 5))
#: Year and month of a release of DeepSpeed where a source has no month, as PyPI has them.
_RELEASED = ((r"deepspeed[ =]*v?0\.14\.[0-2]\b", (2024, 4)), (r"deepspeed[ =]*v?0\.1[0-2]\.", (2023, 11)))
_PADDED = (
    r"(?<!\bno )(?<!\bnot )(?<!\bnever )(?<!\bneither )(?<!\bwithout )"
    r"(?:(?:batch\w*|examples?|sequences?|samples?|inputs?) (?:are |is |were )?padded|"
    r"(?:left|right)[- ]padded|padding to (?:the )?(?:longest|max))"
)
#: Software that runs models of transformers.
_TRANSFORMERS = r"transformers|\bhf\b|hugging ?face|\bpeft\b|\btrl\b|accelerate|xtuner|ms-swift|llama-?factory|axolotl"
#: PaddlePaddle has FlashAttention-2 since August 2023 (PaddlePaddle/Paddle pull 56015).
_PADDLE_FLASH2 = 2023
#: Year of FlashAttention 2.4, which is the first that takes ALiBi (Dao-AILab/flash-attention README, changelog).
_BIASED = 2024
#: Containers of 2026 and later, which have cuDNN from 9.2x on; its attention is faster on Blackwell.
_CUDNN9 = re.compile(r"(?:release|container|nemo|pytorch)[ :-]*(?:2[6-9])\.\d\d\b", re.IGNORECASE)
#: NeMo without FlashAttention, which came with 23.03 "for GPT models in Transformer Engine" (README of the launcher,
#: changelog), and without ub_tp_comm_overlap, which its yaml files of 2022 have not; BERT had none in mid 2023 either.
_NEMO_IN_PARTS = re.compile(r"\bnemo[\w -]*\b(?:22\.\d\d|23\.0[12])\b", re.IGNORECASE)
_IN_PARTS_YEAR = 2022
_NEMO_BERT = re.compile(r"\bnemo[\w -]*\b23\.\d\d\b", re.IGNORECASE)
#: Containers with cuDNN 8.9 or 9.0, as NeMo's are until 24.05.
#: Transformer Engine 1.6 is of the container of May 2024.
_CUDNN8 = re.compile(
    r"(?:\bnemo|container|pytorch|\()[ :-]*(?:23\.\d\d|24\.0[1-5])\b|\btransformer[- ]?engine v?(?:0\.\d+|1\.[0-5])\b",
    re.IGNORECASE,
)
#: NVIDIA's containers by month, "pytorch:22.09", "PyTorch 22.09": years of the classes' defaults are PyTorch's.
_CONTAINER = r"\bpytorch[:/ -](2\d)\.(?:0[1-9]|1[0-2])\b"
#: Name of a container that software other than its own ran in: "PyTorch FSDP2 (NGC container nemo-25.09)".
_CONTAINER_NAME = re.compile(
    r"(?<=[\w,(] )(?:in )?(?:the )?(?:ngc |nvidia )?container(?: image)?[ :]+[\w./-]*nemo[-:_][\w.]+", re.IGNORECASE
)
#: What may stand around the name of a container and names no software.
_NO_NAMES = r"\b(?:ngc|nvidia|docker|image|official|in|the|on|from)\b|[\W\d]"
_JAX = r"\bjax\b|\bflax\b|\bxla\b|maxtext|paxml|\bt5x\b|easylm|\balpa\b|axlearn|levanter"
_COMPILED = (
    r"compile=true|torch[._]compile(?![_=: ]+false)|\binductor\b|max-autotune|\bthunder\b|nvfuser|"
    rf"{_JAX}"
)
#: Software without Python in a step: kernels of its own, launched from compiled code.
CODE = r"\bllm\.c\b|\bllmq\b|\bc(?:\+\+)?(?:/| and )cuda\b|\bcuda(?:/| and )c(?:\+\+|\b)"
#: Software that is not PyTorch's: activations have 16 bits throughout. PaddlePaddle's BERTs list layer_norm, softmax
#: and gelu among what AMP runs so (NVIDIA/DeepLearningExamples run_squad.py, PaddleNLP: custom_white_list); OneFlow's
#: AMP lists no operation to keep in fp32 (oneflow/core/job_rewriter/auto_mixed_precision_lists.cpp, BlackList).
OUTSIDE = rf"{_JAX}|{CODE}|paddle|\boneflow\b(?!-inc)"
#: Year and month of an arXiv number.
_ARXIV = r"\b(\d\d)(0[1-9]|1[0-2])\.\d{5}\b"
_DEEPSPEED = r"deepspeed|gpt-?neox"
#: PyTorch's own operations, also where tensors are cut; and words of PyTorch's own ways to share a model.
_NATIVE = (
    r"nanotron|picotron|vescale|dtensor|colossal-?ai|\bolmo|litgpt|fairscale|lightning|\bfabric\b|torchtune|xtuner|"
    r"veomni|auto-?model|accelerate|transformers|internlm|internevo|paddle"
)
#: Words of software that casts fp32 parameters in every use.
_AUTOCAST = r"lightning|\bfabric\b|\bamp\b|autocast|mixed|accelerate|\bddp\b|zero-?redundancy|fp32 param"
_PLAIN = r"\bfsdp|pytorch|\bddp\b"
_NOT_COMPILED = re.compile(
    r"(?:no|not|without|w/o|disabl\w+) (?:using )?torch\.compile|"
    r"torch\.compile(?:d|\(\))?(?: is|:|=)? ?(?:off|false|disabled|not used|no\b)|"
    r"\b(?:no|not|without|w/o) (?:using )?xla\b|\bxla(?: is|:|=)? ?(?:off|false|disabled|not used)"
)
#: LiBai fuses bias and GELU, bias and dropout, scale, mask and softmax as Megatron-LM does, whatever is cut
#: (Oneflow-Inc/libai configs/common/models/gpt.py and bert.py, bias_gelu_fusion and the like); so does OneFlow-GPT
#: (Oneflow-Inc/OneFlow-Benchmark LanguageModeling/GPT/oneflow_gpt/model.py).
_MEGATRON = r"megatron|\bmcore\b|transformer[- ]engine|\bte\b|distributed optimizer|\blibai\b|\boneflow-gpt\b"
_NO_GRAPHS = re.compile(
    r"\b(?:no|without|w/o|disabled?) cuda[- ]graphs?\b|cuda[- ]graphs? (?:are |is )?(?:off|disabled)", re.I
)
#: Of the host's time for a pass of experts, what is left where router and preprocessing are a graph and tokens go by
#: HybridEP: Qwen3-30B-A3B on 16 H100 takes 6.9 ms a layer and micro-batch then, and 9.6 without a graph
#: (Megatron-Bridge skills and docs/performance-summary.md, release 26.04).
_REPLAYED_ROUTER = 0.65
#: Assumption: Python on a core of a Grace CPU takes this many times as long as on one of an x86 host of H100s or B200s.
_GRACE = 1.3
_APART = r"no (?:comm(?:unication)?s? overlap|overlap of comm)|without overlap|communication is not overlapped"
#: (words, switches): what a row states of its software; all that are found count.
_STATED: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        rf"no gradient bucketing|{_APART}|overlap[-_]grad[-_](?:reduce|sync)[ =:]+(?:false|off)",
        {"overlap_grad_reduce": False},
    ),
    (r"overlap[-_]param[-_](?:gather|sync)[ =:]+(?:false|off)", {"overlap_param_gather": False}),
    (_APART, {"overlap_param_gather": False, "hidden": {}}),
    (r"overlapped grad/param sync", {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    (
        r"bf16 gradient sync|(?:reduc|grad)[\w-]*(?: \w+)? in (?:bf16|bfloat16)|bf16 reduc",
        {"gradient_dtype": "bfloat16"},
    ),
    (r"gradient accumulation in fp16", {"gradient_dtype": "float16"}),
    (
        r"fp32 grad(?:ient)? accumulation|fp32 reduce|(?:reduc|grad)[\w-]*(?: \w+)? in (?:fp32|float32)",
        {"gradient_dtype": "float32"},
    ),
    # Apex and paddle.amp.decorate: parameters and gradients of 16 bits, masters in fp32.
    (
        r"(?:\bamp|opt_level|(?<!optimization )\blevel)[-_ =:,\"']*o2\b",
        {"parameters_dtype": "", "master_weights": True, "gradient_dtype": "bfloat16"},
    ),
    # DeepSpeedExamples Megatron-LM/mpu/transformer.py and layers of 2019: products, mask, softmax, dropout and residual
    # one by one; neither bias and GELU nor bias and dropout are one kernel.
    (r"deepspeedexamples'?s?[^;|,]{0,12}megatron", {"fusion": "eager"}),
    # BMTrain's README: parameters of torch.half, and a fused optimizer "for mixed-precision training".
    (r"\bbmtrain\b", {"parameters_dtype": "", "master_weights": True, "gradient_dtype": "float16"}),
    # PyTorch's optimizers keep moments in the parameters' number format.
    (
        r"pure (?:bf16|bfloat16)|\bbf16-true",
        {
            "parameters_dtype": "",
            "master_weights": False,
            "gradient_dtype": "bfloat16",
            "moments_dtype": "bfloat16",
        },
    ),
    (
        r"pure (?:fp16|float16)|(?:model|weights|everything)[^;|.]{0,12} in (?:float16|fp16) throughout",
        {"parameters_dtype": "", "master_weights": False, "gradient_dtype": "float16", "moments_dtype": "float16"},
    ),
    # PEFT since 0.12 keeps adapters of models in 16 bits in fp32 (autocast_adapter_dtype); autocast would cast them.
    (
        r"(?s)^(?=.*\bpeft\b).*(?:bf16-true|pure (?:bf16|bfloat16)|(?:\bno|without) (?:autocast|amp)\b|"
        r"use_amp[ =:]*false)",
        {"adapter_dtype": "float32", "adapter_autocast": False},
    ),
    (r"cross-entropy fusion", {"fused_loss": True}),
    # flash_attn/models/gpt.py: one kernel for dropout, residual and norm, products with bias and GELU.
    (r"fused_dropout_add_ln|fused dropout ?\+ ?residual|fused_mlp|fused mlp", {"fusion": "fused"}),
    (r"use_fused_rms_norm[ =:]+false", {"eager_norms": True}),
    # Its layers in place of a model's own: norms within products, fused rotary embedding, SwiGLU and attention.
    (
        r"(?:transformer[- _]engine(?:'s)?|\bte)[ .]+(?:te\.)?transformer_?layer",
        {"fusion": "fused", "eager_norms": False},
    ),
    # torch.optim's AdamW is foreach by default: one kernel over all tensors was asked for.
    (
        r"fused[_ =:]*true|fused (?:adam|optimizer)|fusedadam|adamw?_torch_fused|adamw?\(fused|apex[^;|]{0,20}adam",
        {"foreach": False},
    ),
    # Whose optimizer works on the host: DeepSpeed's own, or the one that torchao's class is told to take.
    (r"deepspeed|zero[- ]offload|zero[- ]infinity", {"host_update": "cpu-adam"}),
    (r"cpuoffloadoptimizer", {"host_update": "fused"}),
    # LLaMA-Factory hparams/finetuning_args.py: lora_dropout is 0 by default; Unsloth's kernels want 0.
    (r"llama-?factory|\bunsloth\b(?! off)", {"adapter_dropout": False}),
    (r"no[-_ ]rope[-_ ]fusion", {"unfused": ("rope",)}),
    (r"no[-_ ]bias[-_ ]swiglu[-_ ]fusion", {"unfused": ("swiglu",)}),
    (r"no[-_ ](?:fusion of )?gradient[-_ ]accumulation(?:[-_ ]fusion)?\b", {"unfused": ("gradients",)}),
    # Without autocast 16-bit products need parameters of 16 bits.
    (r"(?:\bno|without|w/o) (?:torch[. ])?(?:autocast|amp)\b", {"parameters_dtype": "", "autocast": False}),
    (r"fp32 params", {"parameters_dtype": "float32", "master_weights": False}),
    (
        r"(?:parameters|weights)\b[^;|.]{0,30}\bin (?:bf16|bfloat16)\b[^;|]{0,20}\bno (?:other |fp32 )?masters",
        {"parameters_dtype": "", "master_weights": False, "gradient_dtype": "bfloat16"},
    ),
    (r"gptq", {"quantizer": "gptq"}),
    (r"torch-?ao|float8linear|convert_to_float8", {"fused_casts": False, "low_scaling": "tensorwise"}),
    (
        r"(?:transformer[-_ ]engine|\bte\b)[^;|]{0,20}(?:fp8|float8)|"
        r"(?:fp8|float8)[^;|]{0,20}(?:transformer[-_ ]engine|\bte\b)",
        {"fused_casts": True, "low_scaling": "delayed"},
    ),
    (r"overlap[-_]comm['\"]?[ =:]+true", {"overlap_grad_reduce": True}),
    (r"overlap[-_]comm['\"]?[ =:]+false", {"overlap_grad_reduce": False}),
    (r"\bbf16[-_ ]compress", {"gradient_dtype": "bfloat16"}),
    (r"\bfp16[-_ ]compress", {"gradient_dtype": "float16"}),
    (r"attn_impl['\"]?[ =:]+['\"]?torch\b", {"attention": "unfused"}),
    (r"alltoall dispatcher", {"dispatcher": "alltoall"}),
    (r"hybridep|deepep", {"dispatcher": "deepep"}),
    (
        r"liger|cut[-_ ]cross|chunked (?:\w+ )?(?:cross|loss|output)|chunkedoutput|(?:fused|chunked) (?:linear[-_ ])?"
        r"cross|\bflce\b|\bcce\b",
        {"fused_loss": True},
    ),
    (r"liger(?! loss)|unsloth(?! off)", {"fusion": "fused", "eager_norms": False, "fused_loss": True}),
)
#: Each launch waits for its kernel (CUDA programming guide, environment variables).
_BLOCKING = r"cuda_launch_blocking[ =:]+(?:1|true)"
#: Megatron-LM's arguments.py: --bf16 sets the flag, with --fp16 gradients are added up and reduced as they are.
_IN_FP32 = r"accumulate[-_]allreduce[-_]grads[-_]in[-_]fp32"
#: Words of transfers of experts' tokens beside computing (Megatron-Core's --overlap-moe-expert-parallel-comm).
_EXPERTS_BESIDE = (
    r"moe a2a overlap|overlap[-_]moe[-_]expert[-_]parallel[-_]comm(?![=: ]*false)|1f1b[- ]overlap|"
    r"(?:\bep\b|expert\w*'?)[^;|]{0,20}all-?to-?all[^;|]{0,20} (?:overlap|beside|with comput)"
)
#: Tokens that the busiest rank of experts computes, over the mean, where all are padded or cut to a capacity.
_CAPACITY = re.compile(r"capacity[-_ ]factor(?: of)?[ =:]*(\d(?:\.\d+)?)")


def software_of(row: Row, text: str, assumed: list[str], *, known: bool = True) -> Stack:
    """Find the software that a row ran on, its switches as the row says.

    Args:
        text: All that the row says in words.
        assumed: Sentences on what is taken for granted are added.
        known: Whether named sets count; else only the class does ([Note: software that is not known]).
    """
    rule = _rule_of(row, text) if known else None
    if rule is None:
        stack = stack_by_name(class_of(row, text))
        assumed.append(f"software that is not known: {stack.title} ({stack.name})")
        stack = dataclasses.replace(stack, **_attention(row, text, stack, assumed), **_cut_parameters(row, stack))
        stack = dataclasses.replace(stack, **_tuned(row, stack, assumed), **_models(row, text, stack, assumed))
        stack = dataclasses.replace(stack, **_biased(row, text, stack, assumed))
    else:
        stack = stack_by_name(_present(rule.stack, assumed))
        otherwise = _named_otherwise(row, text, stack, assumed)
        same = otherwise.get("attention", stack.attention) == stack.attention or _older_cudnn(row, stack, [])
        fitted = stack.fitted if same else ()
        stack = dataclasses.replace(stack, **otherwise, fitted=fitted)
        if rule.family:
            assumed.append(f"software of a family, of which no step was seen: its switches are those of {stack.name}")
            stack = dataclasses.replace(stack, framework="", fitted=())
    stack = dataclasses.replace(stack, **stated_switches(row, text, stack))
    return dataclasses.replace(stack, **_gelu(row, text, stack, assumed))


def _gelu(row: Row, text: str, stack: Stack, assumed: list[str]) -> dict[str, Any]:
    """GELU in operations of PyTorch: as the row's ``activation`` says, else as the catalog's entry of the model."""
    stated = str(row.model.get("activation", ""))
    if not stated and stack.fusion == "eager" and re.search(r"\bmin-?gpt\b", text.lower()):
        assumed.append("GELU in operations of PyTorch: karpathy/minGPT mingpt/model.py, NewGELU")
        return {"unfused": tuple(dict.fromkeys((*stack.unfused, activation_part("gelu_new"))))}
    ran = re.search(_TRANSFORMERS, text.lower()) is not None
    model = pretrained_of(_name(row)) if ran and not stated else None
    if stack.fusion != "eager" or not (stated or model):
        return {}
    part = activation_part(stated or (model.activation if model else ""))
    if not part:
        return {}
    why = f"the row's {stated}" if stated else f"{model.activation} of {model.type}: {model.source}" if model else ""
    assumed.append(f"GELU in operations of PyTorch, {why}")
    return {"unfused": tuple(dict.fromkeys((*stack.unfused, part)))}


def _name(row: Row) -> str:
    return str(row.model.get("name", "")).lower()


def _present(name: str, assumed: list[str]) -> str:
    """The named set, or that of the catalog whose name begins alike."""
    if name in stack_names():
        return name
    near = max(stack_names(), key=lambda other: (len(_common(other, name)), other))
    assumed.append(f"software stack {name} as {near}: no data of its own")
    return near


def _common(left: str, right: str) -> str:
    return left[: next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), len(left))]


def framework_of(row: Row, text: str) -> str:
    """Framework of the named set that a row ran on; "" where none is named."""
    rule = _rule_of(row, text)
    return stack_by_name(_present(rule.stack, [])).framework if rule else ""


def _rule_of(row: Row, text: str) -> StackRule | None:
    """Rule of the named set: what the field of the framework names counts before all that the row says besides."""
    compiled = "true" if row.layout.get("compile") else "false"
    named = affirmed(str(row.layout.get("framework", "")))
    if not named or re.sub(_NO_NAMES, "", _CONTAINER_NAME.sub(" ", named)):  # else the container's own software ran
        named, text = (_CONTAINER_NAME.sub(" ", words) for words in (named, text))
    rule = stack_rule_of(f"{named} | compile={compiled}" if named else "")
    if re.search(rf"{_DEEPSPEED}|{_TRANSFORMERS}", named):  # BigScience ran more than its fork of Megatron
        text = re.sub(r"bigscience", " ", text, flags=re.IGNORECASE)
    return rule or (None if has_own_runtime(row) else stack_rule_of(text))


def class_of(row: Row, text: str) -> str:
    """Name of the class defaults of a row ([Note: software that is not known])."""
    named = f"{affirmed(str(row.layout.get('framework', '')))} {row.layout.get('sharding', '')}".strip().lower()
    if named and re.search(rf"{_DEEPSPEED}|{_MEGATRON}|{_NATIVE}|{_PLAIN}", named) and "compile=true" not in text:
        text = named if row.layout.get("compile") is False or not re.search(_COMPILED, text.lower()) else text
    if is_compiled(text) or re.search(CODE, named or text.lower()):
        return "compiled-torch"
    lowered = text.lower()
    cuts = any(int(row.layout.get(axis) or 1) > 1 for axis in ("tp", "pp", "ep"))
    if re.search(_DEEPSPEED, lowered):
        kind = "deepspeed-like"
    elif re.search(_MEGATRON, lowered) or (cuts and not re.search(rf"{_PLAIN}|{_NATIVE}", lowered)):
        kind = "megatron-like"
    else:
        kind = "eager-torch"
    year = year_of(row) or _middle(row)
    older = sorted(name for name in stack_names() if re.fullmatch(rf"{kind}-\d{{4}}", name) and int(name[-4:]) >= year)
    return older[0] if older and year else kind


def is_compiled(text: str) -> bool:
    """Whether words say that blocks are compiled."""
    return re.search(_COMPILED, _NOT_COMPILED.sub(" ", text.lower())) is not None


def _middle(row: Row) -> int:
    """Year that a source without one is taken to be of; 0 for the newest."""
    machine, _ = machine_of(str(row.hardware.get("gpu", "")))
    return next((year for word, year in _MIDDLE if machine.startswith(word)), 0)


def year_of(row: Row) -> int:
    """Year that a row's source names, by a date, a release or an arXiv number; 0 where it names none.

    A container that the source names holds software of its month, whenever the figures were published.
    """
    if held := re.search(_CONTAINER, row.source.lower()):
        return 2000 + int(held[1])
    years = [int(year) for year in re.findall(r"\b(20[12]\d)(?:\b|-)", row.source)]
    years += [2000 + int(year) for year in re.findall(r"(?:release |\bv|NeMo |container )(\d\d)\.\d\d\b", row.source)]
    years += [2000 + int(year) for year, _ in re.findall(_ARXIV, row.source)]
    return max(years, default=0)


def _cut_parameters(row: Row, stack: Stack) -> dict[str, Any]:
    """Overlap and number formats that come with the stage of ZeRO, and with tensors and layers that are cut.

    FSDP, and DeepSpeed's stage 3, prefetch and reduce beside backward, but for software whose gathers are lists of
    tensors, which waits for each of them (``Stack.gather_rank_s``). PyTorch's optimizer that cuts states alone sends
    what it updated at the end of its step (torch/distributed/optim/zero_redundancy_optimizer.py, ``_sync_params``).
    Software on PyTorch with an optimizer of its own that cuts states, or with cut tensors or layers, keeps parameters
    in 16 bits and masters beside them (InternEvo solver/optimizer/hybrid_zero_optim.py, Colossal-AI
    zero/low_level/low_level_optim.py, nanotron optim/optimizer_from_gradient_accumulator.py).
    """
    stage = stage_of(row.layout, [], [])
    if stage >= 3:
        return {} if stack.gather_rank_s else {"overlap_grad_reduce": True, "overlap_param_gather": True}
    if stack.kind not in ("eager-torch", "compiled-torch"):
        return {}
    settings: dict[str, Any] = {"overlap_param_gather": False} if stage == 1 else {}
    if re.search(CODE, str(row.layout.get("framework", "")).lower()):  # parameters of 16 bits, masters beside them
        return settings | {"parameters_dtype": "", "master_weights": True, "gradient_dtype": "bfloat16"}
    cuts = any(int(row.layout.get(axis) or 1) > 1 for axis in ("tp", "pp"))
    words = f"{row.layout.get('framework', '')} {row.layout.get('precision', '')} {row.notes}".lower()
    if (stage == 1 or cuts) and stage < 2 and not re.search(_AUTOCAST, words):
        settings |= {"parameters_dtype": "", "master_weights": True, "gradient_dtype": "bfloat16"}
    return settings


def _tuned(row: Row, stack: Stack, assumed: list[str]) -> dict[str, Any]:
    """Switches of Megatron-like software that its year and number format tell."""
    if stack.kind != "megatron-like":
        return {}
    settings: dict[str, Any] = {}
    if re.search(r"fp8|fp4|float8", str(row.layout.get("precision", "")).lower()) and stack.gradient_dtype == "float32":
        settings["gradient_dtype"] = "bfloat16"
        assumed.append("gradients reduced in bf16, as recipes in 8 bits of NeMo and Megatron-Bridge have it")
    if stack.attention == "cudnn" and _CUDNN8.search(f"{row.layout.get('framework', '')} {row.notes}"):
        settings["attention"] = "flash2"
        assumed.append("cuDNN's attention before 9.1, at the rates of FlashAttention-2: containers until May 2024")
    elif stack.attention == "cudnn" and _CUDNN9.search(row.source):
        settings["attention"] = "cudnn9"
        assumed.append("cuDNN's attention from 9.2x on, as containers of 2026 have it")
    return settings


def _named_otherwise(row: Row, text: str, stack: Stack, assumed: list[str]) -> dict[str, Any]:
    """Switches of a row that a set's framework has and its runs had not: ZeRO-3's hooks, compiled blocks, attention."""
    settings: dict[str, Any] = {}
    hooks = stack_by_name("deepspeed-like")
    words = f"{text} | {row.layout.get('sharding', '')}".lower()
    on_hooks = stack.kind == hooks.kind or re.search(r"deepspeed|\bds[-_]z(?:ero)?-?3", words) is not None
    if on_hooks and stack.gathers != hooks.gathers and stage_of(row.layout, [], []) == 3:
        settings = {"gathers": hooks.gathers, "pieces": hooks.pieces, **_cut_parameters(row, hooks)}
        assumed.append(
            "parameters are gathered as DeepSpeed's ZeRO-3 does: by each tensor, ahead, and again to recompute"
        )
    if stack.kind == "eager-torch" and stack.fusion == "eager" and is_compiled(text):
        compiled = stack_by_name("compiled-torch")
        settings |= {
            "fusion": compiled.fusion,
            "launch_s": compiled.launch_s,
            "block_s": min(stack.block_s, compiled.block_s),
            "eager_norms": compiled.eager_norms,
        }
        assumed.append("blocks are compiled: the row says so")
    stated = " ".join(clauses_of(f"{row.notes}; {row.layout.get('framework', '')}"))
    settings |= _older_cudnn(row, stack, assumed)
    settings |= _older_nemo(row, stack, assumed)
    if stack.framework == "transformers":
        settings |= _attention_of_transformers(row, text.lower(), assumed)
    named = re.search(rf"flash[- _]?att(?:ention|n)?(?:{FLASH_VERSION}|\b)", stated)
    if stack.attention == "unfused" and named:
        settings["attention"] = f"flash{named[1] or 2}"
        assumed.append(f"attention {settings['attention']}: the notes say {named[0]!r}")
    return settings


def _older_cudnn(row: Row, stack: Stack, assumed: list[str]) -> dict[str, Any]:
    """cuDNN's attention before 9.1, which on Hopper is no faster than FlashAttention-2."""
    if stack.attention != "cudnn" or not _CUDNN8.search(f"{row.source} {row.layout.get('framework', '')}"):
        return {}
    assumed.append(
        "cuDNN's attention before 9.1, at the rates of FlashAttention-2, as containers until May 2024 have it"
    )
    return {"attention": "flash2"}


def _older_nemo(row: Row, stack: Stack, assumed: list[str]) -> dict[str, Any]:
    """Switches of NeMo before its attention was one kernel."""
    if stack.framework != "NeMo":
        return {}
    named = f"{row.layout.get('framework', '')} | {row.source}"
    if _NEMO_IN_PARTS.search(named) or (not _NEMO_BERT.search(named) and year_of(row) == _IN_PARTS_YEAR):
        assumed.append(
            "attention in parts, nothing of tensor parallelism beside computing, and no Megatron-Core, so no step was "
            "seen: NeMo before 23.03"
        )
        return {"framework": "", "attention": "unfused", "hidden": {}, "overlap_param_gather": False}
    if _NEMO_BERT.search(named) and re.search(r"encoder|\bbert\b", f"{_name(row)} {row.model.get('kind', '')}".lower()):
        assumed.append("attention in parts: NeMo has FlashAttention for GPT alone in 2023")
        return {"attention": "unfused", "overlap_param_gather": False}
    return {}


def _trains_transformers(row: Row, lowered: str, stack: Stack) -> bool:
    """Whether software that is not known trains models of transformers on DeepSpeed, as most has since 2024."""
    if stack.kind != "deepspeed-like":
        return False
    named = re.search(_TRANSFORMERS, str(row.layout.get("framework", "")).lower()) is not None
    forks = re.search(r"megatron|neox", lowered) is not None
    return named or (not forks and (year_of(row) or _middle(row) or _NUMBERED) >= _NUMBERED)


def month_of(row: Row, lowered: str = "") -> tuple[int, int]:
    """Year and month of a row's source, of its arXiv number or of a release; (0, 0) where none tells both."""
    months = [(int(year), int(month)) for year, month in re.findall(r"\b(20[12]\d)-(\d\d)\b", row.source)]
    others = [month for words, month in _RELEASED if re.search(words, lowered)]
    others += [(2000 + int(year), int(month)) for year, month in re.findall(_ARXIV, row.source)]
    return max([*months, *(month for month in others if month[0] == year_of(row))], default=(0, 0))


#: Repositories by name, in a source, and their code: "Dao-AILab/flash-attention", "flash-attention's training code".
_ADDRESSES, _CODE_OF = re.compile(r"[\w.-]+/[\w./-]+"), re.compile(r"\b[\w-]+(?:'s)? training code\b")


def _attention_of_transformers(row: Row, lowered: str, assumed: list[str]) -> dict[str, Any]:
    """Kernel of attention of transformers' models where nobody says it: what their release takes by default.

    A repository named after a kernel says nothing of the kernel, and neither does the name of a row's source.
    """
    month, year = month_of(row, lowered), year_of(row)
    source = row.source.lower()
    lowered = lowered.removeprefix(f"{row.family.lower()} |").replace(source, _ADDRESSES.sub(" ", source))
    lowered = _CODE_OF.sub(" ", lowered)
    if re.search(r"flash|\bfa-?[23]\b|sdpa|scaled_dot|xformers|unsloth(?! off)|eager attention|attn_impl", lowered):
        return {}
    if (month[0] and month <= _UNFUSED_UNTIL) or (not month[0] and 0 < year < _UNFUSED_UNTIL[0]):
        assumed.append("attention in parts: transformers before 4.36 has no other by default")
        return {"attention": "unfused"}
    model = pretrained_of(_name(row))
    until = model.unfused if model else (0, 0)
    if model and ((month[0] and month <= until) or (not month[0] and 0 < year < until[0])):
        assumed.append(f"attention in parts: transformers' {model.type} had no other until {until[0]}-{until[1]:02d}")
        return {"attention": "unfused"}
    padded = re.search(_PADDED, f"{lowered} | {row.model.get('attention', '')}".lower())
    if _MASKED[0] <= month <= _MASKED[1] or padded:
        assumed.append(
            "PyTorch's memory-efficient attention: masks of transformers 4.38 to 4.40, and padded, are tensors"
        )
        return {"attention": "masked"}
    assumed.append("PyTorch's fused attention, as models of transformers have it by default")
    return {"attention": "flash2"}


def _models(row: Row, text: str, stack: Stack, assumed: list[str]) -> dict[str, Any]:
    """Fusion of models that are transformers' own, where the class has Megatron's kernels."""
    if not _trains_transformers(row, text.lower(), stack):
        return {}
    assumed.append("operations of transformers' models run one by one, norms in fp32")
    return {"fusion": "eager", "eager_norms": True}


def _biased(row: Row, text: str, stack: Stack, assumed: list[str]) -> dict[str, Any]:
    """Kernel of attention with ALiBi before FlashAttention took it: one that reads a bias as a tensor."""
    flash, year = stack.attention in ("flash1", "flash2"), year_of(row)
    if not flash or not 0 < year < _BIASED or "alibi" not in text.lower():
        return {}
    assumed.append(f"attention under a bias that is a tensor: FlashAttention takes ALiBi from 2.4 on, of {_BIASED}")
    return {"attention": "masked"}


#: Words of attention that is no kernel of its own.
_IN_PARTS = r"unfused attention|eager attention|attn_implementation[ =:]+eager"
#: Software whose attention is its own, and in parts without FlashAttention: llm-foundry's attn_impl is "torch" then,
#: flash_attn/models/gpt.py takes SelfAttention of flash_attn/modules/mha.py.
_OWN_ATTENTION = rf"{OUTSIDE}|llm-?foundry|\bmpt\b|flash[-_]att\w*(?:'s training code|/models)"
#: PyTorch on AMD's GPUs had no fused attention until 2.3 of 2024 (pytorch/pytorch issue 112997 and pull 114309).
_AMD_FUSED = 2024


def _attention(row: Row, text: str, stack: Stack, assumed: list[str]) -> dict[str, Any]:
    """Kernel of attention that a row states, where the class has another kind."""
    lowered = text.lower()
    if re.search(_IN_PARTS, lowered):
        return {"attention": "unfused"}
    if re.search(r"cudnn[-_ ](?:flash|fused|attention|attn|sdpa)", lowered):
        return {"attention": "cudnn"}
    if re.search(r"flex[- _]?attention", lowered):
        return {"attention": "flex"}
    if denies_flash(text):
        stated = " ".join(clauses_of(f"{text}; {row.model.get('attention', '')}"))
        if re.search(r"\bsdpa\b|scaled[ _]dot", stated):  # the package was denied, not PyTorch's own
            return {"attention": "flash2"} if stack.attention == "unfused" else {}
        named = re.search(r"xformers|memory[- _]efficient[- _]attention", stated)
        return {"attention": "flash1" if named else without_flash(row, text, stack)}
    if numbered := re.search(rf"flash[- _]?att(?:ention|n)?{FLASH_VERSION}", affirmed(text)):
        return {"attention": f"flash{numbered[1]}"}
    if stack.attention == "unfused" and re.search(r"xformers|memory[- _]efficient[- _]attention", lowered):
        return {"attention": "flash1"}
    if has_attention_in_layers(row, text, year_of(row)):
        return _attention_of_layers(" ".join(clauses_of(text)), assumed)
    if stack.kind == "compiled-torch" and 0 < year_of(row) < _FUSED:
        return {"attention": "unfused"}
    if stack.kind == "compiled-torch" and 0 < year_of(row) < _NUMBERED:
        return {"attention": "flash1"}  # scaled_dot_product_attention of PyTorch 2.0 and 2.1
    if "paddle" in lowered and re.search(r"flash[- _]?att", lowered) and (year_of(row) or _NUMBERED) >= _PADDLE_FLASH2:
        return {"attention": "flash2"}
    if not re.search(r"flash[- _]?att", lowered):
        if machine_of(str(row.hardware.get("gpu", "")))[0].startswith("mi") and 0 < year_of(row) < _AMD_FUSED:
            assumed.append("attention in parts: PyTorch has no other on AMD's GPUs before 2.3, of 2024")
            return {"attention": "unfused"}
        if not _trains_transformers(row, lowered, stack) or stack.attention != "unfused":
            return {}
        told = _attention_of_transformers(row, lowered, assumed)
        return told or ({"attention": "flash2"} if re.search(r"sdpa|scaled_dot", lowered) else {})
    if stack.kind == "eager-torch" and (year_of(row) or _NUMBERED - 1) < _NUMBERED:
        return {"attention": "flash1"}
    return {"attention": "flash2"} if stack.attention == "unfused" else {}


def without_flash(row: Row, text: str, stack: Stack) -> str:
    """Kernel of attention that software has by itself where FlashAttention is switched off.

    PyTorch's scaled_dot_product_attention then takes its memory-efficient kernel, which is priced as the first
    FlashAttention. Transformer Engine takes cuDNN's. Layers of Megatron's and DeepSpeed's kind are products and a
    softmax.
    """
    if not stack.attention.startswith("flash"):
        return stack.attention
    is_torch = stack.kind in ("eager-torch", "compiled-torch")
    return "flash1" if is_torch and not re.search(_OWN_ATTENTION, words_of_runtime(row, text)) else "unfused"


def _attention_of_layers(stated: str, assumed: list[str]) -> dict[str, Any]:
    """Kernel of attention of software that has layers for it: that of Transformer Engine where it is used.

    Args:
        stated: What the row says in words, denials left out.
    """
    if re.search(r"transformer[- _]engine|\bte\b|enable_te=1|cudnn", stated):
        return {"attention": "cudnn"}
    if re.search(r"flash|pallas|fused attention", stated):
        return {}
    assumed.append("attention in parts: layers of its own have products and a softmax, and XLA fuses none by itself")
    return {"attention": "unfused"}


def stated_switches(row: Row, text: str, stack: Stack) -> dict[str, Any]:
    """Switches that the row's words replace."""
    settings: dict[str, Any] = {}
    named = (row.layout.get(name, "") for name in ("precision", "precision_detail", "optimizer"))
    lowered = " | ".join([text, *map(str, named)]).lower()
    found = [switches for words, switches in _STATED if re.search(words, lowered)]
    if re.search(OUTSIDE, words_of_runtime(row, text)):
        found.append({"autocast": False})
    for switches in (*found, switches_of_runtime(row, text)):
        apart = (*settings.get("unfused", stack.unfused), *switches.get("unfused", ()))
        settings |= {**switches, **({"unfused": tuple(dict.fromkeys(apart))} if "unfused" in switches else {})}
    if any(re.search(_BLOCKING, clause) for clause in clauses_of(text)):
        settings["launch_blocking"] = True
    settings |= _megatron_in_fp16(row, lowered)
    rounds = rounds_to_tf32(lowered)
    if rounds is None and rounds_by_default(row):
        rounds = True
    if rounds is not None:
        settings["tf32"] = rounds
    settings |= _graphs(text, stack) | _buckets(lowered, settings.get("gradient_dtype", stack.gradient_dtype))
    if str(row.layout.get("optimizer", "")).lower() == "sgd":
        settings["moments"] = 0
    launched = settings.get("dispatcher") == "deepep" and not settings.get("cuda_graphs", True)
    if launched and re.search(r"CUDA graphs [^;.]*moe_router", text):
        grace = machine_of(str(row.hardware.get("gpu", "")))[0].startswith("gb")
        settings["experts_s"] = _REPLAYED_ROUTER * (_GRACE if grace else 1.0) * stack.experts_s
    if re.search(r"(?:fp8|float8) all-?gather", lowered) and re.search(r"fp8|float8", str(row.layout.get("precision"))):
        settings["gather_dtype"] = "float8_e4m3fn"
    if (capacity := _CAPACITY.search(lowered)) and float(capacity[1]) > 1 and row.model.get("experts"):
        settings["imbalance"] = float(capacity[1])
    hidden = settings.get("hidden", stack.hidden)
    if row.layout.get("ep_comm_overlap") or re.search(_EXPERTS_BESIDE, lowered):
        settings["hidden"] = {**hidden, "ep": max(hidden.get("ep", 0.0), 0.9)}
    elif "ep overlap off" in lowered:
        settings["hidden"] = {**hidden, "ep": 0.0}
    return settings


def _megatron_in_fp16(row: Row, lowered: str) -> dict[str, Any]:
    """Gradients of Megatron-LM in 16 bits: its flag of fp16, and none that adds them up in fp32."""
    flags = affirmed(lowered)
    framework = str(row.layout.get("framework", "")).lower()
    if not re.match(r"megatron-lm\b", framework) or not re.search(r"--fp16(?![\w-])", flags):
        return {}
    return {} if re.search(_IN_FP32, flags) else {"gradient_dtype": "float16"}


def _buckets(lowered: str, gradient_dtype: str) -> dict[str, Any]:
    """Buckets of gradients in the words of DDP (MiB of them) or DeepSpeed (elements)."""
    if told := re.search(r"bucket_cap_mb['\"]?[ =:]+(\d+)", lowered):
        return {"bucket_elements": float(int(told[1]) * 2**20 // DTYPE_BYTES[gradient_dtype])}
    if told := re.search(r"reduce_bucket_size['\"]?[ =:]+(\d+(?:\.\d+)?(?:e\d+)?)", lowered):
        return {"bucket_elements": float(told[1])}
    return {}


def _graphs(text: str, stack: Stack) -> dict[str, Any]:
    """Switches by what is replayed as CUDA graphs."""
    graphs = _cuda_graphs(text)
    if graphs is None:
        return {}
    if not graphs and re.search(r"CUDA graphs [^;.]*attn", text):  # of a block, only the experts are launched
        return {"cuda_graphs": False, "block_s": 0.0, "module_s": 0.0, "launch_s": stack.launch_s / 2}
    return {"cuda_graphs": graphs}


def _cuda_graphs(text: str) -> bool | None:
    """Whether most kernels are replayed: graphs of the router alone leave the rest to be launched. None: not told."""
    if _NO_GRAPHS.search(text):
        return False
    if match := re.search(r"CUDA graphs ([^;.]*)", text):
        scope = match[1]
        return not scope.startswith(("transformer_engine", "moe_", "attn", "mamba"))
    if re.search(r"CUDA graphs", text):
        return True
    return False if "perf preset" in text and "No exactly matching" not in text else None
