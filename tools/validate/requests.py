"""Requests made of rows: what is stated is taken, what is not is assumed and said, what cannot be is an error."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lading.catalog.load import load_machine
from lading.catalog.networks import node_size, parse_network, parse_node
from lading.errors import ConfigError, LadingError
from lading.ir.layout import Layout
from lading.ir.machine import Link
from lading.ir.request import StepRequest
from lading.ir.schedules import V_SHAPED
from lading.ir.stack import Stack
from lading.sim.simulate import simulate
from tools.validate.architecture import architecture_of, unread_of_model
from tools.validate.fields import (
    DUALPIPE,
    FLASH_VERSION,
    adapted_of,
    attention_of,
    cp_comm_of,
    dtypes_of,
    is_nothing,
    not_priced,
    offload_of,
    optimizer_of,
    precision_of,
    recompute_of,
    refuse_what_is_not_modelled,
    schedule_of,
    shard_told,
    stage_of,
    task_of,
    unread_methods,
    unread_of_gpu,
)
from tools.validate.known_sources import is_first_reading
from tools.validate.prose import clauses_of, contradicted, stated_in_notes
from tools.validate.recipes import SWEEP, high_precision_layers, recipe_of, with_facts
from tools.validate.rows import SWITCHES, Row
from tools.validate.runtimes import affirmed, words_of_runtime
from tools.validate.software import CODE, OUTSIDE, month_of, software_of, stated_switches, without_flash, year_of
from tools.validate.words import machine_of_source, unread_of_name

#: Words for how operands of 8 bits are scaled (``lading.ir.stack.SCALINGS``).
_RECIPES = (
    (r"delayed", "delayed"),
    (r"block-?wise|\bblock|sub-?channel|tile-?wise|1 ?x ?128|128 ?x ?128|deep-?gemm", "block"),
    (r"row-?wise|\brow|axis-?wise|per-?(?:row|channel|token)", "rowwise"),
    (r"tensor-?wise|per-?tensor|\btensor\b|current|dynamic|\bcs\b", "tensorwise"),
)

#: Words for pipelines that count embedding and loss as a layer each, Megatron's two options among them.
_EDGES = re.compile(
    r"account[-_ ]for[-_ ](?:embedding|loss)[-_ ]in[-_ ]pipeline|"
    r"embeddings?(?: layer)? and (?:the )?(?:loss|head|output)(?: layer)? "
    r"(?:are |is )?(?:each )?(?:count|treat)\w* as (?:a |one )?(?:transformer )?(?:layer|block)"
)


def request_of(row: Row, *, known: bool = True) -> StepRequest:
    """Make the request to simulate for a row.

    Args:
        known: Whether what is known of the row's framework counts; else its software is one that is not known.

    Raises:
        ConfigError: the row lacks something that cannot be assumed, or its layout cannot be.
    """
    text = said(row)
    refuse_what_is_not_modelled(row.layout)
    prose, told = stated_in_notes(row)
    row = dataclasses.replace(row, layout={**row.layout, **prose})
    if not row.hardware.get("gpus"):
        raise ConfigError(f"hardware.gpus: expected a number above 0, got {row.hardware.get('gpus')}")
    machine, assumed = machine_of_source(str(row.hardware.get("gpu", "")), row.source)
    assumed += told
    unread = _unread(row, machine)
    stack, optimizer = _kept(row, software_of(row, text, assumed, known=known), assumed, unread)
    model, taken = architecture_of(row.model, text, _padding(row, stack))
    assumed += taken
    layout = _layout(row, text, stack, assumed, unread)
    task = task_of(row.layout, unread)
    near, network = _links(row, machine, assumed, unread)
    request = StepRequest(
        name=row.id,
        model=model,
        seq_len=int(row.model["seq_len"]),
        machine=machine,
        network=network,
        near=near,
        ranks_per_node=int(row.hardware.get("gpus_per_node") or 0),
        layout=layout,
        stack=stack,
        task=task,
        lora_rank=_rank(row, assumed) if task in ("lora", "qlora") else 0,
        trains_embeddings="(emb)" in str(row.layout.get("task", "")),
        packed_tokens=_packed(text, stack, task, assumed),
        dropout=_dropout(row, stack, model.family, text, assumed, unread),
        alibi="alibi" in text.lower(),
        optimizer=optimizer,
        **(_extras(row, text, model.layers) | _edges(row, text, layout, model.layers, unread)),
    )
    stated = {*(name for name in SWITCHES if name in row.layout), *stated_switches(row, text, stack)}
    request = _as_published(request, text, assumed, known=known, stated=stated)
    request = _interleaved(_filled(request, row, assumed), assumed)
    request = _on_slow_omnipath(_on_plain_ethernet(request, row, assumed), row, assumed)
    return _with_doubts(request, row, text, assumed, unread)


def _with_doubts(request: StepRequest, row: Row, text: str, assumed: list[str], unread: Sequence[str]) -> StepRequest:
    """Add to a request what makes its interval wider: what was not understood, not said, or read for the first time."""
    assumed += [f"not understood: {words}" for words in unread]
    first_reading = is_first_reading(row.family)
    if first_reading:
        assumed.append(f"no row of {row.family} was compared with a prediction before: its words may mean other things")
    return dataclasses.replace(
        request,
        assumed=tuple(assumed),
        first_reading=first_reading,
        unread=tuple(unread),
        unstated=tuple(_unstated(row, text, assumed)),
        clocks_untold=bool(_limits(row, request.machine)),
    )


def _unstated(row: Row, text: str, assumed: Sequence[str]) -> list[str]:
    """List what a row does not say though its step depends on it by a tenth or so.

    Args:
        assumed: Sentences on what was taken for granted.
    """
    nodes = int(row.hardware.get("gpus") or 0) > int(row.hardware.get("gpus_per_node") or 8)
    ran = f"{row.layout.get('framework', '')} {text}".lower()
    runtime = re.search(_RUNTIMES, words_of_runtime(row, text))
    family = any(re.match(r"software of a family|operations of transformers' models", told) for told in assumed)
    doubts = (
        (any(sentence.startswith("no activation recompute") for sentence in assumed), "whether blocks are recomputed"),
        (any("as models of transformers have it" in sentence for sentence in assumed), "the kernel of attention"),
        (any(sentence.startswith("a micro-batch of") for sentence in assumed), "the micro-batch"),
        (any(sentence.startswith("an H100 of PyTorch's team") for sentence in assumed), "which H100"),
        (nodes and not _names_rate(row), "the network between nodes"),
        *((runtime, what) for what in _OF_RUNTIME),
        *((family, what) for what in _OF_FAMILY),
        (re.search(_WHOLE_RUN, ran), "what a whole run takes besides its steps"),
    )
    return [what for is_so, what in doubts if is_so]


def _names_rate(row: Row) -> bool:
    """Whether words for the network between nodes tell its rate, or instances whose rate is known."""
    words = str(row.hardware.get("inter_node_link") or "")
    slots = int(row.hardware.get("gpus_per_node") or 8)
    return bool(words) and (
        parse_network(words, slots).link is not None
        or bool(re.search(r"\befa(?:v\d)?\b|\belastic\b", words, re.IGNORECASE))
    )


#: Software whose operations are not PyTorch's.
_RUNTIMES = (
    r"\bjax\b|\bxla\b|paxml|maxtext|\bt5x\b|\balpa\b|levanter|axlearn|paddle|mindspore|oneflow|tensorflow|mxnet|keras|"
    + CODE
)


#: What is not told of software with a runtime of its own, and of software that shares the models of a family.
_OF_RUNTIME = (
    "how far a runtime that is not PyTorch's is like it",
    "which operations its runtime fuses",
    "which transfers its runtime has beside computing",
)
_OF_FAMILY = (
    "which operations of its models run one by one",
    "what it changed of its family's trainer",
    "which kernels its optimizer has",
)


#: Words of a figure that is a whole run's over its steps: saving, evaluating and failures are in it.
_WHOLE_RUN = r"\bgpu[- ]?hours|whole run|entire (?:run|training)|wall[- ]?clock (?:days|hours)"


def _limits(row: Row, machine: str) -> list[str]:
    """Words of a row on a limit of power that its board has not."""
    gpu, words = load_machine(machine).device.gpu, str(row.hardware.get("gpu", ""))
    limited = re.search(r"limited to \d{2,3} ?w\b|power[- ]limit\w* (?:of |to |at )?\d{2,3} ?w\b", row.notes.lower())
    notes = [f"notes say {limited[0]!r}: clocks at a power limit"] if limited else []
    return [*notes, *unread_of_gpu(words, gpu.power_w if gpu else 0.0)]


def _unread(row: Row, machine: str) -> list[str]:
    """Fields of a row, and words of its device and model, that no rule reads."""
    return [
        *row.unread,
        *_limits(row, machine),
        *unread_of_name(str(row.hardware.get("gpu", ""))),
        *unread_of_model(row.model),
        *unread_methods(row.notes),
        *not_priced("; ".join(clauses_of(f"{row.notes}; {row.layout.get('framework', '')}"))),
        *contradicted(row, is_nothing),
    ]


#: Software on transformers that attaches adapters to every product unless it is told otherwise, or lists what it does.
_ADAPTS_ALL = r"llama-?factory|unsloth|swift|xtuner|axolotl|\bmodules: all|all-linear|target[-_ ]modules|qwenlm/qwen"


def _adapted_by_default(row: Row, stack: Stack, assumed: list[str]) -> dict[str, Any]:
    """Modules that adapters attach to by PEFT's default, where transformers' models are trained and none are told."""
    plain = stack.name == "hf-transformers" and not stack.adapter_modules
    if not plain or task_of(row.layout, []) not in ("lora", "qlora") or re.search(_ADAPTS_ALL, said(row).lower()):
        return {}
    assumed.append(
        "adapters on queries and values: PEFT utils/constants.py, TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"
    )
    return {"adapter_modules": ("wq", "wv", "qkv")}


def _kept(row: Row, stack: Stack, assumed: list[str], unread: list[str]) -> tuple[Stack, str]:
    """Software with what a row's words say of optimizer, number formats and attention; and the optimizer's rule."""
    optimizer, settings = optimizer_of(row.layout, unread)
    settings |= dtypes_of(
        " | ".join(str(row.layout.get(name, "")) for name in ("precision", "precision_detail", "optimizer"))
    )
    settings = _autocast(row, stack) | settings
    settings |= adapted_of(str(row.layout.get("task", ""))) or _adapted_by_default(row, stack, assumed)
    settings |= {name: row.layout[name] for name in SWITCHES if name in row.layout}
    without = without_flash(row, said(row), stack)
    settings |= attention_of(str(row.model.get("attention", "")), stack.attention, without)
    settings |= _of_package(row, settings.get("attention", stack.attention), assumed)
    settings |= _before_flash2(row, settings.get("attention", stack.attention), assumed)
    return dataclasses.replace(stack, **settings), optimizer


def _of_package(row: Row, attention: str, assumed: list[str]) -> dict[str, Any]:
    """FlashAttention-2 where a row names it on a B200 or B300, on which PyTorch's own attention is cuDNN's."""
    words = affirmed(f"{row.model.get('attention', '')} | {row.layout.get('framework', '')} | {row.notes}")
    board = re.search(r"\bg?b[23]00", str(row.hardware.get("gpu", "")).lower())
    if attention != "flash2" or not board or not re.search(r"flash[- _]?att(?:entio)?n[- _]?v?2|\bfa-?2\b", words):
        return {}
    assumed.append("FlashAttention-2's own kernels on Blackwell, which are Ampere's")
    return {"attention": "flash2-package"}


#: Year and month of FlashAttention-2 (arXiv 2307.08691): what was published then without a number is the first.
_FLASH2 = (2023, 7)


def _before_flash2(row: Row, attention: str, assumed: list[str]) -> dict[str, Any]:
    """FlashAttention where a row names it without a number, and its source is older than the second."""
    words = affirmed(f"{row.model.get('attention', '')} | {row.layout.get('framework', '')} | {row.notes}")
    month, year = month_of(row), year_of(row)
    older = month <= _FLASH2 if month[0] else 0 < year < _FLASH2[0]
    named = re.findall(rf"flash[- _]?att(?:entio)?n(?:{FLASH_VERSION})?", words)
    if attention != "flash2" or not older or not named or any(named) or re.search(r"\bfa-?2\b", words):
        return {}
    assumed.append(f"the first FlashAttention: the second is of {_FLASH2[0]}-{_FLASH2[1]:02d}")
    return {"attention": "flash1"}


#: Words that say that there is no automatic mixed precision.
_NO_AUTOCAST = (
    r"(?:\bno|without|w/o) (?:torch[. ])?(?:autocast|amp|mixed)\b|"
    r"(?:autocast|\bamp)(?: is|:|=)* ?(?:off|disabled|false)"
)


def _autocast(row: Row, stack: Stack) -> dict[str, Any]:
    """Number formats of PyTorch's automatic mixed precision, where a set has parameters of 16 bits.

    Parameters and their gradients stay in fp32, and each use casts them (torch.amp); weights under adapters do not.
    """
    words = str(row.layout.get("precision", "")).lower()
    mixed = re.search(r"\bmixed|\bamp\b|autocast", re.sub(_NO_AUTOCAST, "", words))
    if stack.name == "hf-transformers" and re.fullmatch(r"fp16|float16|half", words):
        mixed = True  # transformers training_args.py: fp16 is "16-bit (mixed) precision training"; pure fp16 has none
    kinds = ("eager-torch", "compiled-torch")
    if not mixed or stack.kind not in kinds or stack.master_weights or task_of(row.layout, []) in ("lora", "qlora"):
        return {}
    if stack.parameters_dtype:
        return {}
    own = re.search(OUTSIDE, words_of_runtime(row, said(row))) is not None
    return {"parameters_dtype": "float32", "gradient_dtype": "float32", "autocast": not own}


def _padding(row: Row, stack: Stack) -> int:
    """Number that the vocabulary is rounded up to a multiple of; down where negative ([Note: sweep of one node])."""
    ways = int(row.layout.get("tp") or 1)
    if SWEEP in row.source.lower():
        return -ways
    return stack.vocabulary_padding * ways if stack.vocabulary_padding > 1 else 1


def _as_published(request: StepRequest, text: str, assumed: list[str], *, known: bool, stated: set[str]) -> StepRequest:
    """Request with what the recipe it was made with sets and the table does not print.

    Args:
        stated: Switches of the software that the row itself states: they count before what recipes say.
    """
    layers = request.high_precision_layers or (high_precision_layers(request, text) if known else 0)
    request = dataclasses.replace(request, high_precision_layers=layers)
    request, evidence = with_facts(request, text, known=known, stated=stated)
    assumed += evidence
    layout = request.layout
    recipe = recipe_of(request.stack.name, request.machine, request.model, layout)
    if recipe is None or layout.recompute != "none":
        return request
    assumed.append(recipe.evidence)
    of_layout = {name: value for name, value in recipe.settings.items() if hasattr(layout, name)}
    rest = {name: value for name, value in recipe.settings.items() if name not in of_layout}
    return dataclasses.replace(request, layout=dataclasses.replace(layout, **of_layout), **rest)


def said(row: Row) -> str:
    """All that a row says in words, joined."""
    compiled = row.layout.get("compile")
    parts = (row.family, row.source, row.layout.get("framework", ""), row.model.get("note", ""), row.notes)
    task = row.layout.get("task", "pretrain")
    return " | ".join([*map(str, parts), f"task={task}", f"compile={'true' if compiled else 'false'}"])


def _rank(row: Row, assumed: list[str]) -> int:
    """Rank of the adapters; where none is printed 16, as in Megatron-Bridge (recipes/llama/llama3.py, 70B)."""
    if match := re.search(r"\b(?:lora[-_ ])?(?:r|rank|dim)[ =:]*(\d+)", str(row.layout.get("task", "")), re.IGNORECASE):
        return int(match[1])
    assumed.append("adapters of rank 16")
    return 16


def _packed(text: str, stack: Stack, task: str, assumed: list[str]) -> int:
    """Mean tokens of what attends to itself in a packed sequence: SQuAD's examples are about 160 tokens long.

    Megatron-Bridge's recipes to tune Llama 3 pack SQuAD unless told otherwise: recipes/utils/dataset_utils.py
    default_squad_config and scripts/performance/configs/llama/llama3_llm_finetune.py, v0.5.0.
    """
    packs = stack.packed_tokens > 0 and task != "pretrain"
    if not packs and (not re.search(r"pack", text, re.IGNORECASE) or "squad" not in text.lower()):
        return 0
    assumed.append("packed SQuAD: examples of 160 tokens attend to themselves only")
    return 160


#: Dropout of blocks; that of adapters is another.
_DROPOUT = (
    r"(attention[ _-])?(?<!lora[ _-])(?<!adapter[ _-])dropout[ =:]*(0(?:\.\d+)?)(?![\w.]*\d)"
    r"(?! (?:before|of|in|on) (?:lora|adapters))"
)
_NO_DROPOUT = (
    r"\b(?:no|without|w/o) (?:any )?dropout\b|"
    r"(?<![a-z])(?<!lora[ _-])(?<!adapter[ _-])dropout(?: is| was|:|=)* ?(?:off|disabled|none|false)\b"
)


#: BERT and what differs from it in data or depth alone. Another word before it names another model, as ModernBERT and
#: NeoBERT, which drop nothing out.
_BERT = r"(?:^|[/(,:]) ?(?:(?:google|nvidia|megatron|mlperf|hf)[-_ ])?(?:xlm-)?(?:ro|distil)?bert(?:a)?(?![a-z])"


def _dropout(row: Row, stack: Stack, family: str, text: str, assumed: list[str], unread: list[str]) -> float:
    """Probability in blocks; that behind attention and MLP where attention's own is another, which is unread then."""
    by_attention = {
        bool(match[1]): float(match[2]) for match in reversed([*re.finditer(_DROPOUT, text, re.IGNORECASE)])
    }
    if len(set(by_attention.values())) > 1:
        unread.append(f"attention's dropout of {by_attention[True]:g}: that of all is taken as {by_attention[False]:g}")
    if by_attention:
        return by_attention.get(False, by_attention.get(True, 0.0))
    if re.search(_NO_DROPOUT, text, re.IGNORECASE):
        return 0.0
    if family == "gpt" and "mlperf" in text.lower():
        assumed.append("no dropout: MLPerf's GPT-3 (mlcommons/training large_language_model/megatron-lm/run_gpt3.sh)")
        return 0.0
    if family == "gpt" and stack.name == "hf-transformers" and re.search(r"gpt-?2", text, re.IGNORECASE):
        assumed.append("dropout 0.1: transformers' GPT2Config, resid_pdrop, embd_pdrop and attn_pdrop")
        return 0.1
    if family == "gpt" and re.search(_BERT, str(row.model.get("name", "")).lower()):
        assumed.append("dropout 0.1: BERT's own (google-research/bert modeling.py, BertConfig), which its ports keep")
        return 0.1
    if family == "gpt" and stack.dropout:
        assumed.append(f"dropout {stack.dropout}: {stack.sources.get('dropout', stack.title)}")
        return stack.dropout
    return 0.0


#: Elastic Fabric Adapters of a node where a source names no rate, by GPU: AWS's p3dn, p4d and p4de, p5 to p5en and p6.
_EFA = (
    ("v100", "EFA 100 Gb/s a node"),
    ("a100", "EFA 4x 100 Gb/s"),
    ("h100", "EFA 3200 Gb/s a node"),
    ("h200", "EFA 3200 Gb/s a node"),
    ("b200", "EFA 3200 Gb/s a node"),
)


def _links(row: Row, machine: str, assumed: list[str], unread: list[str]) -> tuple[str, str]:
    """Words for what links the devices of a node, and for what links nodes; what they leave open is assumed."""
    near = str(row.hardware.get("intra_node_link") or "")
    words = str(row.hardware.get("inter_node_link") or "")
    ranks = int(row.hardware.get("gpus_per_node") or 0)
    known = load_machine(machine)
    node = parse_node(known, near, ranks)
    unread += node.unread
    if node.said:
        assumed.append(f"inside a node: {node.said}")
    slots = ranks or node_size(known)
    if row.hardware["gpus"] <= slots:
        return near, words
    network = parse_network(words, slots)
    rate = next((rate for name, rate in _EFA if machine.startswith(name)), "")
    if network.link is None and rate and re.search(r"\befa(?:v\d)?\b|elastic fabric", words.lower()):
        words = rate
        assumed.append(f"EFA of AWS's instances with this GPU: {rate}")
        network = parse_network(words, slots)
    if network.link and _is_untold_omnipath(network.link) and 0 < year_of(row) <= _OMNIPATH_OF[0]:
        words = _OMNIPATH_OF[1]
        network = parse_network(words, slots)
        assumed.append(f"Omni-Path until {_OMNIPATH_OF[0]}: {_OMNIPATH_OF[2]}")
    unread += network.unread
    assumed.append(f"between nodes: {network.said}")
    return near, words if network.link else ""


def _layout(row: Row, text: str, stack: Stack, assumed: list[str], unread: list[str]) -> Layout:
    stated = row.layout
    degrees = _degrees(row, assumed)
    shard = _shard(stated, degrees)
    degrees["vpp"] = _chunks(row, degrees, text, assumed)
    schedule = schedule_of(stated, degrees["vpp"], unread)
    if schedule == DUALPIPE:
        schedule = _one_direction(degrees, assumed, unread)
    elif schedule in V_SHAPED and degrees["vpp"] != 2:
        degrees["vpp"] = 2
        assumed.append(f"two chunks of the pipeline on a rank, as {schedule} has them")
    micro_batch, global_batch = _batches(row, degrees["dp"], assumed)
    mode, layers, modules = _recompute(row, text, assumed, unread)
    zero = stage_of(stated, assumed, unread)
    moved = offload_of(stated, text, int(row.model["layers"]), assumed, unread)
    if "parameters" in moved.get("offload", ()) and zero < 3 and degrees["dp"] * degrees["cp"] == 1:
        zero = 3
        assumed.append("parameters come from behind the device piece by piece: ZeRO-3 of one rank")
    return Layout(
        **degrees,
        etp=_expert_tp(stated, degrees, assumed),
        sp=_sequence_parallel(row, degrees["tp"], stack, assumed),
        zero=zero,
        shard=shard,
        cp_comm=cp_comm_of(stated, unread),
        micro_batch=micro_batch,
        global_batch=global_batch,
        schedule=schedule,
        recompute=mode,
        recompute_layers=layers,
        recompute_modules=modules,
        precision=_precision(row, stack, assumed, unread),
        **moved,
    )


def _precision(row: Row, stack: Stack, assumed: list[str], unread: list[str]) -> str:
    """Number format of products; fp32 where 4-bit ones of bitsandbytes get fp32 activations.

    ``prepare_model_for_kbit_training`` (PEFT utils/other.py) makes norms, embeddings and head fp32, and Linear4bit
    computes in its input's format if that is fp32 or bf16, whatever ``bnb_4bit_compute_dtype`` says
    (bitsandbytes nn/modules.py, ``set_compute_type``); under autocast the input has 16 bits.
    """
    named = precision_of(row.layout, assumed, unread)
    wide = task_of(row.layout, []) == "qlora" and stack.quantizer == "nf4" and not stack.adapter_autocast
    if not wide or named == "fp32":
        return named
    assumed.append("products in fp32: without autocast norms of a 4-bit model give fp32, in which Linear4bit computes")
    return "fp32"


def _degrees(row: Row, assumed: list[str]) -> dict[str, int]:
    """Ways of each axis; replicas that share parameters or experts may be counted apart.

    Raises:
        ConfigError: they are not the row's devices.
    """
    stated, gpus = row.layout, int(row.hardware["gpus"])
    degrees = {name: int(stated.get(name) or 1) for name in ("dp", "tp", "cp", "pp", "ep", "vpp")}
    inside = degrees["tp"] * degrees["cp"] * degrees["pp"]
    if "dp" not in stated and gpus % inside == 0:
        degrees["dp"] = gpus // inside
        assumed.append(f"dp {degrees['dp']}: what the other ways leave of the GPUs")
    product = degrees["dp"] * inside
    for name, ways in (("fsdp", int(stated.get("fsdp") or 1)), ("ep", degrees["ep"])):
        if product != gpus and ways > 1 and product * ways == gpus:
            degrees["dp"] *= ways
            assumed.append(f"dp {degrees['dp']}: the {ways} ways of {name} are replicas that dp does not count")
            return degrees
    if product != gpus:
        raise ConfigError(f"layout: expected dp*tp*cp*pp to be the {gpus} GPUs, got {product}")
    return degrees


def _one_direction(degrees: dict[str, int], assumed: list[str], unread: list[str]) -> str:
    """Schedule of DualPipe: a rank has a stage of either direction, so each half of the ranks is a DualPipe-V.

    Ranks i and p - 1 - i of p hold the same two stages, so p / 2 ranks with two chunks each are a pipeline in a V,
    and there are twice as many replicas (deepseek-ai/DualPipe README, DualPipeV: "cut in half").
    """
    ranks = degrees["pp"]
    degrees["vpp"] = 2
    if ranks < 4 or ranks % 2:
        unread.append(f"layout.pp_schedule 'dualpipe' on {ranks} ranks: as DualPipe-V, which holds the model once")
        return "dualpipe-v"
    degrees["pp"], degrees["dp"] = ranks // 2, 2 * degrees["dp"]
    assumed.append(f"DualPipe on {ranks} ranks as two DualPipe-V on {ranks // 2}, one for each direction")
    return "dualpipe-v"


def _batches(row: Row, dp: int, assumed: list[str]) -> tuple[int, int]:
    """Number of sequences of a micro-batch of a replica, and of a step."""
    stated = row.layout
    micro_batch, global_batch = int(stated.get("micro_batch") or 0), int(stated.get("global_batch") or 0)
    steps = int(stated.get("n_microbatches") or stated.get("grad_accum") or 0)
    if not micro_batch:
        micro_batch = max(1, global_batch // (dp * steps)) if steps and global_batch else 1
        assumed.append(f"a micro-batch of {micro_batch}")
    if not global_batch:
        global_batch = dp * micro_batch * max(1, steps)
        assumed.append(f"a global batch of {global_batch}: {max(1, steps)} micro-batches for each replica")
    whole = -(-global_batch // (dp * micro_batch)) * dp * micro_batch
    if whole != global_batch:
        assumed.append(f"a global batch of {whole}, the next multiple of dp x micro-batch, instead of {global_batch}")
    return micro_batch, whole


def _filled(request: StepRequest, row: Row, assumed: list[str]) -> StepRequest:
    """The request with the largest micro-batch that fits, where nobody states one and there is no pipeline.

    A pipeline gains by many micro-batches; else each one more launches all kernels again and, where replicas share
    states, moves parameters or hides fewer transfers. Powers of two that divide a replica's sequences are tried. The
    interval holds steps with a micro-batch of 1 too.
    """
    stated, layout = row.layout, request.layout
    told = any(stated.get(name) for name in ("micro_batch", "grad_accum", "n_microbatches"))
    if told or layout.pp > 1 or not stated.get("global_batch"):
        return request
    sequences = layout.global_batch // layout.dp
    for size in (2**power for power in range(sequences.bit_length() - 1, 0, -1)):
        if sequences % size:
            continue
        larger = dataclasses.replace(request, layout=dataclasses.replace(layout, micro_batch=size))
        if (simulated := simulate(larger)).prediction.fits:
            longer = simulate(request).step.step_s / simulated.step.step_s
            at = assumed.index("a micro-batch of 1")
            assumed[at] = (
                f"a micro-batch of {size}: the largest power of two that fits in memory, as there is no pipeline; "
                f"with one of 1, which the interval holds too, {longer:.2f} times as long"
            )
            return dataclasses.replace(larger, otherwise=longer)
    return request


def _interleaved(request: StepRequest, assumed: list[str]) -> StepRequest:
    """The request whose interval holds the other pipeline, where nobody says whether Megatron's is interleaved."""
    layout = request.layout
    guessed = any(_INTERLEAVED in told for told in assumed)
    if request.stack.kind != "megatron-like" or not (guessed or _PLAIN_PIPELINE in assumed):
        return request
    chunks = 1 if guessed else _usual_chunks(request.model.layers, layout.pp)
    if not chunks or layout.global_batch // (layout.dp * layout.micro_batch) % layout.pp:
        return request
    schedule = schedule_of({}, chunks, [])
    other = dataclasses.replace(request, layout=dataclasses.replace(layout, vpp=chunks, schedule=schedule))
    kind = "with" if chunks > 1 else "without"
    try:
        times = simulate(other).step.step_s / simulate(request).step.step_s
    except LadingError as error:
        assumed.append(f"{kind} interleaving cannot be simulated, so the interval does not hold it: {error}")
        return request
    assumed.append(f"{kind} interleaving, which the interval holds too, {times:.2f} times as long")
    return dataclasses.replace(request, otherwise=times)


def _chunks(row: Row, degrees: dict[str, int], text: str, assumed: list[str]) -> int:
    if "vpp" in row.layout or degrees["pp"] == 1:
        return degrees["vpp"]
    schedule = str(row.layout.get("pp_schedule", "")).lower()
    if told := re.search(r"\b(?:v|vpp|chunks|virtual stages)[ =:]*(\d+)|(\d+) (?:chunks|virtual)", schedule):
        return int(told[1] or told[2])
    if (chunks := _chunks_told(f"{text.lower()} {schedule}", int(row.model["layers"]), degrees["pp"])) > 1:
        assumed.append(f"{chunks} chunks of the pipeline on a rank: the notes say so")
        return chunks
    if re.search(r"interleaved 1f1b|1f1b interleaved", f"{text.lower()} {schedule}"):
        per_rank = max(1, int(row.model["layers"]) // degrees["pp"])
        assumed.append(f"two layers in a chunk of the interleaved pipeline: {max(1, per_rank // 2)} chunks")
        return max(1, per_rank // 2)
    chunks = _usual_chunks(int(row.model["layers"]), degrees["pp"])
    if chunks and any(re.search(_SENDS_BESIDE, part) and not _DENIES.search(part) for part in _sentences(row.notes)):
        assumed.append(
            f"an interleaved pipeline of {chunks} chunks on a rank, {_INTERLEAVED}: its transfers overlap, which "
            "Megatron-Core has with interleaving alone (megatron/training/arguments.py, overlap_p2p_comm)"
        )
        return chunks
    assumed.append(_PLAIN_PIPELINE)
    return 1


#: Network of Ethernet at its least where a source says no more: one NIC of a node, of the usual rate since 2018.
_PLAIN_ETHERNET = "Ethernet, 100 Gb/s a node"


def _on_plain_ethernet(request: StepRequest, row: Row, assumed: list[str]) -> StepRequest:
    """The request whose interval holds one NIC a node, where nodes are said to be linked by Ethernet and no rate is."""
    words = str(row.hardware.get("inter_node_link") or "").lower()
    nodes = int(row.hardware["gpus"]) > int(row.hardware.get("gpus_per_node") or 8)
    if not nodes or _names_rate(row) or request.otherwise != 1.0 or not re.search(r"\bethernet\b|\btcp\b", words):
        return request
    slow = dataclasses.replace(request, network=_PLAIN_ETHERNET)
    times = simulate(slow).step.step_s / simulate(request).step.step_s
    assumed.append(f"on {_PLAIN_ETHERNET}, which the interval holds too, {times:.2f} times as long")
    return dataclasses.replace(request, otherwise=times)


#: What NCCL reached of 400 Gb/s of Omni-Path a node: the last year of it, words for the network, and who measured it.
_OMNIPATH_OF = (
    2021,
    "Omni-Path, 54 Gb/s measured a node",
    "an all-reduce of sixteen nodes of V100 reached 54 of 400 Gb/s (bigscience experiments/bandwidth)",
)
#: At the least: four nodes of A100, January 2022 (bigscience experiments/bandwidth, all_reduce_bench-a100-n4.txt).
_SLOW_OMNIPATH = "Omni-Path, 40 Gb/s measured a node"


def _is_untold_omnipath(link: Link) -> bool:
    """Whether a link is Omni-Path of 400 Gb/s a node, of which nobody says what was measured."""
    gigabits = link.nics * link.bandwidth_bytes_per_s * 8 / 1e9
    return link.kind == "omnipath" and link.efficiency < 1.0 and abs(gigabits / 400 - 1) < 0.01


def _on_slow_omnipath(request: StepRequest, row: Row, assumed: list[str]) -> StepRequest:
    """The request whose interval holds the slowest Omni-Path of 100 Gb/s links that was measured, if no run tells."""
    words = str(row.hardware.get("inter_node_link") or "")
    link = parse_network(words, int(row.hardware.get("gpus_per_node") or 8)).link
    nodes = int(row.hardware["gpus"]) > int(row.hardware.get("gpus_per_node") or 8)
    if not nodes or link is None or link.kind != "omnipath" or request.stack.fitted or request.otherwise != 1.0:
        return request
    slow = dataclasses.replace(request, network=_SLOW_OMNIPATH)
    times = simulate(slow).step.step_s / simulate(request).step.step_s
    if times <= 1.0:
        return request
    assumed.append(f"on {_SLOW_OMNIPATH}, which the interval holds too, {times:.2f} times as long")
    return dataclasses.replace(request, otherwise=times)


#: Words of a pipeline's transfers beside computing.
_SENDS_BESIDE = (
    r"overlap[-_]p2p[-_]comm\w*(?![=: ]*(?:false|off))|overlap\w*[^;|.]{0,120}\bpp\b(?! (?:off|disabled))|"
    r"\bpp\b[^;|.]{0,30}\boverlap(?!\w* (?:off|disabled))"
)
_DENIES = re.compile(r"\b(?:no|not|without|neither|never|none)\b")
_INTERLEAVED, _PLAIN_PIPELINE = "about two layers each", "a pipeline without interleaving"


def _sentences(notes: str) -> list[str]:
    return re.split(r"[;|]|\. ", notes.lower())


def _usual_chunks(layers: int, stages: int) -> int:
    """Number of chunks of a rank with about two layers each, of those that divide its layers; 0 where none does."""
    each, rest = divmod(layers, stages)
    if rest or each < 2:
        return 0
    divisors = [chunks for chunks in range(2, each + 1) if each % chunks == 0]
    return min(divisors, key=lambda chunks: max(2 * chunks / each, each / (2 * chunks)))


def _chunks_told(words: str, layers: int, stages: int) -> int:
    """Chunks of a rank that words tell in the terms of Megatron or of PyTorch; 0 where they tell none."""
    number = r"[ =:]*(\d+)"
    if each := re.search(rf"num[-_ ]layers[-_ ]per[-_ ]virtual[-_ ](?:pipeline[-_ ])?stage{number}", words):
        return layers // stages // max(1, int(each[1])) or 1
    told = re.search(
        rf"virtual[-_ ](?:pipeline|pp)[-_ ](?:model[-_ ]parallel[-_ ])?(?:size|degree){number}|\bvpp{number}|"
        rf"(\d+) virtual (?:pipeline )?stages|interleav\w* (?:factor|degree|depth|size|chunks)?(?: of)?{number}\b|"
        r"(\d+) (?:model )?chunks per",
        words,
    )
    return int(next(filter(None, told.groups()))) if told else 0


def _expert_tp(stated: Mapping[str, Any], degrees: dict[str, int], assumed: list[str]) -> int:
    if degrees["ep"] == 1 or stated.get("etp"):
        return int(stated.get("etp") or 0)
    ranks = degrees["dp"] * degrees["cp"] * degrees["tp"]
    if ranks % (degrees["ep"] * degrees["tp"]) == 0:
        return 0
    assumed.append("experts are not cut further (etp 1)")
    return 1


def _sequence_parallel(row: Row, tp: int, stack: Stack, assumed: list[str]) -> bool:
    """Whether what is between products is cut by tokens; not assumed where these cannot be (a ViT has 257)."""
    if "seq_parallel" in row.layout:
        return bool(row.layout["seq_parallel"]) and tp > 1
    if tp > 1:
        wide = stack.sequence_parallel and int(row.model["seq_len"]) % tp == 0
        assumed.append(f"tensor parallel {'with' if wide else 'without'} sequence parallel")
        return wide
    return False


def _shard(stated: Mapping[str, Any], degrees: dict[str, int]) -> int:
    """Ranks that share states, 0 for all: sources count dp alone, or dp and cp together."""
    width = int(stated.get("fsdp") or 0) or shard_told(stated)
    if degrees["dp"] * degrees["cp"] % max(1, width):
        width = int(stated.get("fsdp") or 0)
    return 0 if width in (0, degrees["dp"], degrees["dp"] * degrees["cp"]) else width


def _recompute(row: Row, text: str, assumed: list[str], unread: list[str]) -> tuple[str, int, tuple[str, ...]]:
    """Recomputing: its mode, number of layers (-1 all) and modules."""
    layers = int(row.model["layers"])
    mode, count, modules = recompute_of(row.layout, text, layers, assumed, unread)
    if (mode, count, modules) != ("selective", -1, ()) or row.layout.get("ac_detail") in ("core_attn", "core"):
        return mode, count, modules
    if (share := _recomputed_share(row)) is not None:
        assumed.append(f"{share:.0%} of the layers recomputed in full: printed HFU over MFU")
        return "full", round(share * layers), ()
    return mode, count, modules


def _recomputed_share(row: Row) -> float | None:
    """Share of layers recomputed, by what hardware FLOP exceed the model's: a forward is a third of a step."""
    mfu, hfu = row.measured.get("mfu"), row.measured.get("hfu")
    if not mfu or not hfu or row.layout.get("zero_stage") != 3:
        return None
    return min(1.0, max(0.0, 3 * (hfu / mfu - 1)))


def _extras(row: Row, text: str, layers: int) -> dict[str, Any]:
    """Settings that few sources tell."""
    stated = row.layout
    detail = f"{stated.get('precision_detail', '')} {text}".lower()
    extras: dict[str, Any] = {
        "async_tp": bool(stated.get("async_tp", False)),
        "embedding_is_layer": bool(stated.get("embedding_as_layer", False)),
        "schedule_detail": str(stated.get("pp_schedule", "")),
    }
    if re.search(r"(?<!mx)fp8(?![-_]mx)|float8", str(stated.get("precision", "")).lower()):
        words = f"{stated.get('precision_detail', '')} {stated['precision']}".lower().replace("_", " ")
        extras["linear_dtype"] = next((recipe for word, recipe in _RECIPES if re.search(word, words)), "")
    if share := re.search(r"last (\d+)% of (?:decoder )?layers bf16", detail):
        extras["high_precision_layers"] = -(-int(share[1]) * layers // 100)
    return extras


def _edges(row: Row, text: str, layout: Layout, layers: int, unread: list[str]) -> dict[str, Any]:
    """Settings of pipelines whose first and last stages hold another number of blocks than those between."""
    words = f"{row.layout.get('precision_detail', '')} {text}".lower()
    if _EDGES.search(words):
        return {"embedding_is_layer": True}
    if fewer := re.search(r"(one|two|1|2) (?:transformer )?(?:layer|block)s? fewer", words):
        return {"edge_layers_fewer": {"one": 1, "two": 2}.get(fewer[1]) or int(fewer[1])}
    ends = [_stage_layers(row, words, end) for end in ("first", "last")]
    stages = layout.pp * layout.vpp
    if listed := _listed_stages(words, stages):
        unread[:] = [
            words_unread for words_unread in unread if "stages of unlike numbers of layers" not in words_unread
        ]
        if sum(listed) == layers and min(listed) > 0:
            return {"stage_layers": listed}
        unread.append(f"layers of the stages {listed}, of {layers} in all: {stages} stages as even as can be")
        return {}
    if ends == [0, 0]:
        return {}
    others = layout.pp - sum(end > 0 for end in ends)
    between, left = divmod(layers - sum(ends), max(1, others))
    counts = (ends[0] or between, *[between] * (layout.pp - 2), ends[1] or between)
    if layout.pp < 2 or left or min(counts) < 1 or sum(counts) != layers or any(n % layout.vpp for n in counts):
        unread.append(f"layers of the first and last stage, {ends[0]} and {ends[1]}: {stages} stages as even as can be")
        return {}
    chunk = tuple(count // layout.vpp for count in counts)  # Megatron counts all chunks of a rank
    back = chunk[::-1] if layout.schedule in ("dualpipe-v", "zbv") else chunk
    return {"stage_layers": chunk + back * (layout.vpp - 1)}


def _listed_stages(words: str, stages: int) -> tuple[int, ...]:
    """Blocks of each stage where words list them: "layers 4 4 5 3", "[4, 4, 5, 3]"; () where nothing does."""
    if stages < 2:
        return ()
    listed = rf"\d+(?:[ ,|]+\d+){{{stages - 1}}}"
    before = r"(?:\[|(?:layers?|blocks?|stages?|layout|split)\b[^;|.\d\[]{0,24}\[?)"
    lists = re.findall(rf"{before}({listed})(?![ ,|]*\d)(?!\.\d)", words)
    return next((tuple(map(int, re.findall(r"\d+", numbers))) for numbers in lists), ())


def _stage_layers(row: Row, words: str, end: str) -> int:
    """Blocks of the first or last stage, by a field or in Megatron's words; 0 where nobody says."""
    stated = int(row.layout.get(f"{end}_stage_layers") or 0)
    named = re.search(rf"decoder[-_ ]{end}[-_ ]pipeline[-_ ]num[-_ ]layers[ =:]*(\d+)", words)
    return stated or (int(named[1]) if named else 0)
