"""Words of a row's fields: what each way of writing a layout's settings means, and which of them mean nothing here.

A word that is not understood is never dropped: it comes back among the unread, which are printed with the prediction
and widen its interval. A method that changes the step and is not modelled is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lading.errors import ConfigError
from lading.ir.layout import PRECISIONS

_NOTHING = re.compile(r"^\s*(none|no|off|false|n/?a|not used|disabled|0|-)?\s*$", re.IGNORECASE)
_PRECISION_WORDS = (
    *(("nvfp4", "nvfp4"), ("fp4", "nvfp4"), ("mxfp8", "mxfp8"), ("fp8-mx", "mxfp8"), ("fp8_mx", "mxfp8")),
    *(("fp8", "fp8"), ("float8", "fp8"), ("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")),
    *(("float16", "fp16"), ("half", "fp16"), ("tf32", "fp32"), ("fp32", "fp32"), ("float32", "fp32")),
    *(("single precision", "fp32"), ("single-precision", "fp32")),
    *(("16-mixed", "fp16"), ("16-true", "fp16"), ("32-true", "fp32"), ("nf4", "bf16")),
)
#: Words of a number format that are read, or that change nothing here.
_PRECISION_READ = re.compile(
    r"(?:nv|mx)?fp(?:4|8|16|32)|b?float(?:8|16|32)|\bbf16|tf32|\b(?:16|32)\b|half|nf4|mixed|precision|\bamp|autocast|true|"
    r"e[45]m[23]|hybrid|delayed|current|scal\w*|per[- ]tensor|"
    r"tensor-?wise|row-?wise|block-?wise|\b(?:te|mx|cs|ds|pure|only|full|deepseek|params?|"
    r"parameters|weights?|grads?|gradients?|accum\w*|reduc\w*|master\w*|moments|states?|optim\w*|with|without|no|and|in|too|compute|"
    r"training|gemms?|products|linears?|all-?gathers?|gathers?|torch-?ao|deep-?gemm|tile-?wise|auto|upcast|ms-?amp|o[0-3]|style|p|c|o|policy|jmp|f32|f16|first|second|moment|"
    r"torch|pytorch|cuda|native|automatic|apex|level|dtype|to|from|single|off|disabled|enabled)\b|\b\d+x\d+\b"
)
#: Schedule whose two directions each hold the whole model; it is simulated as half as many ranks of DualPipe-V.
DUALPIPE = "dualpipe"
#: In order: words of a schedule, and the kind that Lading has.
_SCHEDULES = (
    (r"zb-?v|zbv", "zbv"),
    (r"dual-?pipe[- ]?v\b|dual-?pipe v", "dualpipe-v"),
    (r"dual-?pipe|bidirectional", DUALPIPE),
    (r"zb|zero-?bubble|interleavedzerobubble", "zero-bubble"),
    (r"gpipe|afab|all[-_ ]?forward", "gpipe"),
    (r"interleaved|1f1b-i|vpp|virtual", "interleaved"),
    (r"(?<!seq)1f1b|pipedream-?flush|one[- ]forward", "1f1b"),
)
_CP = (
    (r"^a2a\+p2p|usp|hierarchical|2d", ""),
    (r"a2a|all[-_ ]?to[-_ ]?all|ulysses", "all_to_all"),
    (r"all[-_ ]?gather|\bag\b", "all_gather"),
    (r"ring|p2p", "ring"),
)
_TASKS = (
    *(
        (r"q-?lora", "qlora"),
        (r"\b(?:rs|ada|do|ve)?-?lora|\bdora|lora\+|peft|adapter", "lora"),
        (r"sft|full|fine-?tun|finetun|instruct", "sft"),
    ),
    (r"pre-?train|continu\w* pre|from scratch|cpt|train", "pretrain"),
)
#: In order: words of what is recomputed, without marks between them, and the mode. Policies of JAX that save some
#: products are taken for the nearest mode.
_MODES = (
    (
        r"^(?:none|no|off|false|disabled|0|everything saveable)$|"
        r"\bcheckpoint\w*(?: activations)? (?:false|off|disabled|no)\b",
        "none",
    ),
    (r"granularity selective|^(?:selective|sac|per ?op|op|partial)\b", "selective"),
    (r"^(?:minimal|dots? |save dot)\w*", "selective"),
    (
        r"granularity full|^(?:full|yes|true|on|all|uniform|complete|1|unsloth)$|^nothing saveable$|^use reentrant",
        "full",
    ),
    (r"^(?:full|all|each|every|per)(?: (?:transformer|decoder))? (?:layers?|blocks?)\b", "full"),
    (r"^(?:full|complete)\b(?!.*(?:\bonly\b|mlp|att(?:entio)?n|norm))", "full"),
    (r"^(?:enable |use |fsdp )?(?:full |activations?|gradient|grad) ?(?:recompute|recomputation|check\w*)", "full"),
    (r"^checkpoint(?:ing)? activations|^torch\.utils\.checkpoint|^apply activation checkpointing", "full"),
    (r"^recompute(?: (?:layers?|blocks?|granularity full))?(?: (?:true|on|yes))?$|^checkpoint ?blocks?$", "full"),
    (r"^checkpoint wrapper|^remat\b|^save (?:qkv|out|query|value) |^qkv proj offloaded", "full"),
)
#: (words of a row's software, where it is written): software that recomputes every block unless it is told otherwise.
_RECOMPUTES: tuple[tuple[str, str], ...] = (
    (r"llama-?factory", "LLaMA-Factory hparams/model_args.py: disable_gradient_checkpointing is False by default"),
    (r"\bunsloth\b(?! off)", 'Unsloth\'s notebooks: use_gradient_checkpointing="unsloth" in get_peft_model'),
    (
        r"(?s)(?=.*task=q-?lora).*\bpeft\b",
        "PEFT utils/other.py, prepare_model_for_kbit_training: use_gradient_checkpointing is True by default",
    ),
    (r"\bpaxml\b", "paxml tasks/lm/params/c4.py, TransformerLmSpmdAdam: CHECKPOINT_POLICY SAVE_NOTHING"),
)
#: Parts of a block before the word that they are recomputed: "core_attn recompute".
_PARTS_FIRST = re.compile(
    r"(?!activation|gradient|full|act )([\w ,+/-]*(?:att(?:entio)?n|mlp|ffn|norm|act\b)[\w ,+/-]*?) "
    r"(?:recomput|checkpoint)\w*"
)
#: Ways to write which layers are recomputed, all of them in full: a number of them, or every so many.
_LAYERS = (
    re.compile(r"(?:recompute|checkpoint)\w* (\d+) of \d+ layers"),
    re.compile(r"^\s*(?:first |last )?(\d+)(?: of \d+)? (?:layers|blocks)\b"),
    re.compile(r"(?:\bblock|num[-_ ]layers)[ =:,]+(\d+)"),
)
#: Megatron's number of layers that a stage recomputes, each one of them ("uniform": of a chunk of them, so of all).
_OF_STAGE = re.compile(r"method[ =:]+block\b.*?recompute[-_ ]num[-_ ]layers[ =:]+(\d+)")
_EVERY = re.compile(r"every (?:(\d+)(?:nd|rd|th|st)?|other|second|third) (?:layer|block)", re.IGNORECASE)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%(?: of (?:the )?(?:layers|blocks))?$")
_SHARE = re.compile(r"^(?:ratio|fraction|share)?[ =:]*(?:(0\.\d+)|(\d+)/(\d+))(?: of (?:the )?(?:layers|blocks))?$")
#: Methods that change what a step does, and that nothing here models.
_NOT_MODELLED = (
    (r"zen-?flow", "ZenFlow updates the important gradients at once and the others every few steps"),
    (
        r"twin-?flow|offload\+\+|partial(?:ly)? off|offload ?ratio|\d+ ?% ?(?:of )?(?:the )?(?:optim|on)",
        "a part of the optimizer stays on the device",
    ),
    (r"super-?offload", "SuperOffload updates speculatively, and rolls back"),
    (r"delayed (?:parameter )?update|one[- ]step[- ](?:delay|stale)|\bdpu\b", "updates come a step late"),
    (
        r"local[- ]?(?:sgd|adam\w*|update|step)|\w*lo-?co\b|dipaco|fed-?avg|federated|hivemind|"
        r"(?:model|parameter|weight) averaging|outer (?:optimizer|nesterov|step|loop)|"
        r"\b(?:sync(?!\w* (?:check|sav))\w*|averag\w*|all-?reduc\w*|outer)[^.;|]{0,30} every "
        r"\d+ (?:inner |local )?(?:steps|iterations)|(?:inner|local) steps",
        "replicas meet every few steps only",
    ),
    (
        r"\b[1248]-?bit (?:gradient|all-?reduce|comm|adam(?=.*comm)|lamb)|\b1-?bit|0/1 ?adam|power-?sgd|"
        r"compressed (?:gradient|comm)|quantized (?:gradient|weight|comm|all)|sparsif|zero ?\+\+|zeropp|\bq[wg]z\b|"
        r"\bdemo\b|\bsdp4bit\b",
        "what is sent is compressed on its way",
    ),
    (
        r"pipedream(?!-?flush)|pipemare|async(?:hronous)?[- ](?:sgd|pipeline|update)|weight[- ]stash",
        "updates do not wait for all micro-batches",
    ),
    (r"\bfpdt\b|fully pipelined distributed|ulysses-?offload", "chunks of a sequence wait on the host"),
    (r"galore|apollo|\blomo\b|adalomo|\blisa\b|badam|\bfira\b", "gradients or states are projected, fused or left out"),
)
#: Kinds of training whose steps have other parts than a forward, a backward and an update of one model.
_OTHER_TASKS = (
    (r"\bdpo\b|\bkto\b|\borpo\b|preference", "steps of it run pairs of answers, and often a second model"),
    (r"\brlh?a?i?f\b|\bppo\b|\bgrpo\b|reinforc|\brloo\b", "steps of it generate text between updates"),
    (r"distill", "steps of it run a second model"),
    (r"inference|generation|serving|decod|prefill", "it has no backward"),
    (
        r"\bia3\b|prompt[- ]tun|prefix[- ]tun|\bbitfit\b|frozen|freez|linear prob",
        "a part of the weights is trained, but not by LoRA",
    ),
)
_METHOD_FIELDS = ("offload", "optimizer", "pp_schedule", "sharding", "framework", "task")
_ADAM = r"adam"
#: Times that LAMB goes over a parameter's element more than Adam does: it writes its update, reads it and the parameter
#: for their norms, and reads both again to apply it (apex csrc/multi_tensor_lamb.cu, two stages and two norms).
_LAMB_PASSES = 5.0
_OPTIMIZERS = (
    (r"^(sgd)\b", "sgd"),
    (r"lamb\b", "lamb"),
    *((rf"\b{name}w?\b", name) for name in ("lion", "adafactor", "muon", "shampoo", "soap")),
    (_ADAM, "adamw"),
)
#: Words of an optimizer that are read, or that change nothing here.
_OPTIMIZER_READ = re.compile(
    r"\b(?:(?:torch|optim|fused|apex|bnb|bitsandbytes|cpu|deepspeed|distributed|decoupled|megatron|te|hf|"
    r"transformer engine|paged|hybrid|mixed ?precision|flash)\.? ?)*"
    r"(?:adam ?w?|sgd|lion ?w?|adafactor|muon|shampoo|soap|lamb)\b|"
    r"\b(?:8 ?-?b(?:it)?|int8|fp32|float32|bf16|bfloat16|fp16|float16|16-bit|32-?bit|32b|pure|full|only|memory|"
    r"efficient|momentum|moments?|masters?|weights?|copy|copies|states?|params?|parameters?|optimizers?|torch|fused|foreach|loop|naive|"
    r"paged|bnb|bitsandbytes|cpu|deepspeed|apex|distributed|decoupled|dist|offload(?:ed|ing)?|"
    r"nesterov|heads?|embeddings?|beta\d?|betas|eps|lr|wd|decay|weight|exp ?avg|hf|no|"
    r"without|with|and|in|of|on|w/o|the|kept|for|zero|optax|any ?precision|kahan|summation|optim|true|false|default|"
    r"overlap (?:grad|param) (?:sync|reduce|gather))\b"
)


def unread_of_gpu(words: str, power_w: float) -> list[str]:
    """Words on a device's power or parts that its catalog entry does not have.

    Args:
        power_w: Watts of the catalog's board; 0 where they are not known.
    Raises:
        ConfigError: the device is a part of one.
    """
    lowered = words.lower()
    if re.search(r"\bmig\b|\b\dg\.\d+gb\b", lowered):
        raise ConfigError(f"hardware.gpu: expected whole devices, got {words!r}: parts of one (MIG) are not modelled")
    if re.search(r"\bmax-?q\b", lowered):
        return [f"hardware.gpu {words!r}: a Max-Q board, which has the chip at half of the power or so"]
    limits = [float(number) for number in re.findall(r"(?<![\w.])(\d{3,4}) ?w\b", lowered)]
    if any(power_w and abs(limit / power_w - 1) > 0.05 for limit in limits):
        return [f"hardware.gpu {words!r}: its power limit, the catalog's board has {power_w:g} W"]
    capped = not limits and re.search(r"power[- ](?:limit|cap)|under-?clock|clock(?:s|ed)? (?:at|to|locked)", lowered)
    return [f"hardware.gpu {words!r}: clocks of its power limit"] if capped else []


#: Words of prose on what changes a step and is not priced, and what of it they mean.
_NOT_PRICED = (
    (
        r"(?:images?|videos?|audio)[^;|.]{0,24}(?:decoded|augmented)|streamed from the (?:hub|internet|web)",
        "data that the host makes or fetches while training",
    ),
    (
        r"\bbinned\b|\bbin[-_ ]size\b|(?:bucketed|grouped) by length|group[-_ ]by[-_ ]length|of up to \d+ tokens",
        "sequences of fewer tokens than the longest",
    ),
    (r"tp[-_]linear[-_]async[-_]communication[ =:]+true", "tensor-parallel transfers beside products"),
    (r"\beplb\b|redundant experts?", "experts that are held twice to even their load"),
    (r"(?:group|node|device)[- ]limited (?:routing|top)", "tokens that go to few nodes"),
    (r"(?:micro-?batch|two-?batch|dual-?batch) overlap|\b(?:tbo|dbo)\b", "halves of a batch beside each other"),
    (r"backward[-_]post\b", "parameters that are gathered late"),
    (r"optimizer[-_ ]in[-_ ](?:the[-_ ])?(?:bwd|backward)|fused[-_ ]backward[-_ ]pass", "updates within backward"),
    (r"mode=?['\": ]+(?:isp|fsp|msp)\b", "tensor parallel in InternEvo's manner"),
    (
        r"\[\d+(?:, ?\d+)+\]|uneven (?:pipeline|stages|layers)|hetero\w* (?:pp|pipeline)",
        "stages of unlike numbers of layers",
    ),
    (r"\bdomino\b", "tensor-parallel transfers beside halves of a batch"),
)


def not_priced(text: str) -> list[str]:
    """What prose says that changes a step and is not priced; clauses that deny it are to be left out before."""
    found = ((re.search(pattern, text.lower()), what) for pattern, what in _NOT_PRICED)
    return [f"{match[0]!r}: {what}, which is not priced" for match, what in found if match]


def shard_told(stated: Mapping[str, Any]) -> int:
    """Number of ranks that share what is cut, where only words of the sharding tell it; 0 where they do not."""
    words = str(stated.get("sharding", "")).lower().replace("_", " ")
    told = re.search(r"\b(?:size|degree|group(?: of)?|over|within|wp)[ =:]*(\d+)\b", words)
    return int(told[1]) if told else 0


def is_nothing(words: str) -> bool:
    """Whether a field's words say that there is none of it: "none", "off", "n/a"."""
    return bool(_NOTHING.match(words))


def refuse_what_is_not_modelled(layout: Mapping[str, Any]) -> None:
    """Refuse a row whose fields name a method that changes the step and is not modelled.

    Raises:
        ConfigError: names the method and what it does.
    """
    for name in _METHOD_FIELDS:
        words = str(layout.get(name, "")).lower()
        for pattern, reason in _NOT_MODELLED:
            if match := re.search(pattern, words):
                raise ConfigError(
                    f"layout.{name}: expected a method that is modelled, got {words!r} ({match[0]}): {reason}, which "
                    "is not"
                )
    task = str(layout.get("task", "")).lower()
    for pattern, reason in _OTHER_TASKS:
        if match := re.search(pattern, task):
            raise ConfigError(
                f"layout.task: expected pretraining, fine-tuning, LoRA or Q-LoRA, got {task!r} ({match[0]}): {reason}, "
                "which is not modelled"
            )


def unread_methods(text: str) -> list[str]:
    """Methods that are not modelled and that prose names, which may as well say that they were not used."""
    lowered = text.lower()
    found = (re.search(pattern, lowered) for pattern, _ in _NOT_MODELLED[2:])
    return [f"notes name {match[0]!r}, which is not modelled" for match in found if match]


#: (words, stage of ZeRO that they mean), in order.
_SHARDING = (
    (r"reshard-after-forward[ =:]*(?:false|never|no|off|0)|no-reshard-after-forward", 2),
    (r"no-shard|\bddp\b|data[- ]parallel only|^(?:none|no|off)\b", 0),
    (
        r"(?:zero|\bz|stage)[- =]?3|full-shard|fully[- ]shard|hybrid-shard(?!-zero2)|zero-?infinity|\bgemini\b|"
        r"\bp-g-os\b|optim-grads-params|\bisp\b|\bwp ?\d|weight[- ]parallel",
        3,
    ),
    (r"(?:zero|\bz|stage)[- =]?2|shard-grad-op|hybrid-shard-zero2|\bos-g\b|optim-grads\b", 2),
    (r"(?:zero|\bz|stage)[- =]?1|distributed[- ]?optimizer|optimizer[- ]state|\boss\b|zero-redundancy-?optimizer", 1),
    (r"(?:zero|stage)[- =]?0", 0),
    (r"[fh]sdp", 3),
)


def stage_of(stated: Mapping[str, Any], assumed: list[str], unread: list[str]) -> int:
    """Stage of ZeRO: what is cut over replicas."""
    words = str(stated.get("sharding") or stated.get("framework", "")).lower().replace("_", "-")
    named = next((stage for pattern, stage in _SHARDING if re.search(pattern, words)), None)
    if named is None and stated.get("sharding"):
        unread.append(f"layout.sharding {words!r}")
    if named is not None and stated.get("sharding") and "zero_stage" in stated and named != stated["zero_stage"]:
        unread.append(f"layout.sharding {words!r}: zero_stage {stated['zero_stage']} counts")
    if "zero_stage" not in stated and named is None and int(stated.get("fsdp") or 0) > 1:
        assumed.append("fsdp: parameters are sharded, as under ZeRO-3")
        return 3
    if "zero_stage" not in stated and named is not None:
        assumed.append(f"sharding {words!r}: as under ZeRO-{named}")
        return named
    return int(stated.get("zero_stage") or 0)


def precision_of(stated: Mapping[str, Any], assumed: list[str], unread: list[str]) -> str:
    """Number format of products."""
    words = str(stated.get("precision", "")).lower()
    if words in PRECISIONS:
        return words
    for word, name in _PRECISION_WORDS:
        if word in words:
            assumed.append(f"precision {words!r} as {name}")
            left = " ".join(re.findall(r"[a-z]\w*", _PRECISION_READ.sub(" ", words.replace("_", " "))))
            if left or "mxfp4" in words:
                unread.append(f"layout.precision {words!r}: {left or 'mxfp4'!r}; {name}")
            return name
    if words:
        unread.append(f"layout.precision {words!r}: bf16")
    else:
        assumed.append("bf16: no precision is stated")
    return "bf16"


def schedule_of(stated: Mapping[str, Any], chunks: int, unread: list[str]) -> str:
    """Order of a pipeline's micro-batches; what has chunks is interleaved unless another one is named."""
    words = str(stated.get("pp_schedule", "")).lower()
    plain = "interleaved" if chunks > 1 else "1f1b"
    if _NOTHING.match(words):
        return plain
    named = next((schedule for pattern, schedule in _SCHEDULES if re.search(pattern, words)), None)
    if named is None:
        unread.append(f"layout.pp_schedule {words!r}: {plain}")
    return plain if named in (None, "interleaved", "1f1b") else named


def cp_comm_of(stated: Mapping[str, Any], unread: list[str]) -> str:
    """Way in which keys and values meet where sequences are cut."""
    words = str(stated.get("cp_comm", "")).lower()
    if _NOTHING.match(words):
        return "ring"
    named = next((way for pattern, way in _CP if re.search(pattern, words)), "")
    if not named:
        unread.append(f"layout.cp_comm {words!r}: ring")
    return named or "ring"


def task_of(stated: Mapping[str, Any], unread: list[str]) -> str:
    """Kind of training: "pretrain", "sft", "lora" or "qlora"."""
    words = str(stated.get("task", "")).lower()
    if _NOTHING.match(words):
        return "pretrain"
    named = next((task for pattern, task in _TASKS if re.search(pattern, words)), None)
    if named is None:
        unread.append(f"layout.task {words!r}: as pretraining")
    elif named != "sft" and (variant := re.search(r"dora|(?:rs|ada|ve)-?lora|lora\+|peft|adapter", words)):
        unread += [f"layout.task {words!r}: {variant[0]!r} as LoRA"] if variant[0] != "adapter" else []
    return named or "pretrain"


def optimizer_of(stated: Mapping[str, Any], unread: list[str]) -> tuple[str, dict[str, Any]]:
    """Rule of the optimizer, and what its words change of the stack."""
    words = str(stated.get("optimizer", "")).lower().replace("_", " ")
    if _NOTHING.match(words):
        return "adamw", {}
    named = next((rule for pattern, rule in _OPTIMIZERS if re.search(pattern, words)), None)
    if named is None:
        unread.append(f"layout.optimizer {words!r}: AdamW")
        return "adamw", {}
    settings: dict[str, Any] = {}
    apart = re.sub(
        r"(?<=[a-z])(?=adam|sgd|lamb)|(?<=adam)(?=[w\d])(?!w\b)|(?<=adamw)(?=\d)|"
        r"(?<=[a-z])(?=offload|optimizer)|(?<=offload)(?=[a-z])(?!e[dr]|ing)",
        " ",
        words,
    )
    left = re.findall(r"[a-z]\w*|\b4 ?-?bit", _OPTIMIZER_READ.sub(" ", apart))
    if left:
        unread.append(f"layout.optimizer {words!r}: {' '.join(left)!r}")
    if named == "sgd":
        return "adamw", {"moments": int("moment" in words)}
    if named == "lamb":  # Adam's states; its update is written, normed beside the parameter, and read again
        settings["update_passes"] = _LAMB_PASSES
        named = "adamw"
    if re.search(r"8 ?-?bit|\b8b\b|int8", words):
        settings["moments_dtype"] = "uint8"
    elif re.search(r"bf16|bfloat16", words):
        settings["moments_dtype"] = "bfloat16"
    if re.search(r"fused(?![= ]*false)|\bapex\b", words):
        settings["foreach"] = False
    if re.search(r"cpu-?adam|deepspeed", words):
        settings["host_update"] = "cpu-adam"
    elif re.search(r"loop|naive|foreach|fused[= ]*false", words):
        settings["host_update"] = "loop"
    elif re.search(r"\bfused(?! ?adam)", words):
        settings["host_update"] = "fused"
    if "paged" in words:
        unread.append(f"layout.optimizer {words!r}: pages that the host lends the device are not modelled")
    return named, settings


#: Version of a FlashAttention, behind its name: "FlashAttention-2", "flash_attn==2.0.4", "flash attention (v2)".
FLASH_VERSION = r"(?:[-_ ]?| ?[=~>]=? ?| ?\((?=v|[1-4](?:\.\d+)*\)))(?:v(?:ersion)? ?)?([1-4])(?:\.\d+)*\b"
#: Kernels of fused attention, and those that words deny: "no FlashAttention", "without SDPA or FlashAttention".
_KERNEL = (
    rf"(?:flash(?:[- ]?att(?:entio)?n)?(?:{FLASH_VERSION}|\w*)|\bfa-?[1-4]\b|\bsdpa\b|"
    r"scaled dot\w*|\bcudnn\b|xformers|\btriton\b|memory[- ]efficient|\bflex[- ]?att\w*|(?<![a-z-])fused att\w*)"
)
_DENIED_KERNELS = re.compile(
    r"\b(?:no|not|without|w/o|never|instead of|rather than|disabl\w+)"
    rf"(?: us\w+(?: of)?| support\w*(?: of| for)?| hav\w+)? {_KERNEL}(?:(?:,? n?or |/| and ){_KERNEL})*|"
    rf"{_KERNEL}['\"]?(?: (?:is|was|are))?[ =:]+(?:(?:turned|switched) )?(?:off\b|false\b|disabled|unavailable|"
    r"unsupported|0\b|no(?=\s*(?:[,;|).]|$))|not (?:used|enabled|available|supported|installed|taken)\b)"
)
#: Attention that is no kernel of its own.
_IN_PARTS = re.compile(
    r"(?<!\bnot )(?<!\bno )\b(?:unfused|non-?fused|eager|naive|vanilla|math|in parts|einsum|masked fill|bmm)\b"
)
#: A denied third or fourth FlashAttention may be another kernel.
_NO_KERNEL = re.compile(r"\b(?:flash(?![- ]?(?:att\w*)?[- ]?v?[34])(?=[- ]?att|\b)|fused att)")
#: Words of all fused attention of PyTorch together.
_ALL_OF_TORCH = re.compile(r"sdpa|scaled dot|fused att")


def denies_flash(words: str) -> bool:
    """Whether words say that FlashAttention did not run; a denied third or fourth one may be another kernel."""
    denied = _DENIED_KERNELS.finditer(words.lower().replace("_", " "))
    return any(_NO_KERNEL.search(match[0]) for match in denied)


def attention_of(words: str, stack_attention: str, without_flash: str = "unfused") -> dict[str, Any]:
    """Kernel of attention, where words name one: "eager", "unfused", "flash-attention 2", ...

    Args:
        stack_attention: Kernel that the software has by itself; where it is fused, "flash" alone says no more.
        without_flash: Kernel that the software has by itself where FlashAttention is switched off.
    """
    lowered = words.lower().replace("_", " ")
    denied = " ".join(match[0] for match in _DENIED_KERNELS.finditer(lowered))
    left = _DENIED_KERNELS.sub(" ", lowered)
    fused = re.search(_KERNEL, left)
    if _IN_PARTS.search(left) or (not fused and "fused softmax" in left):
        return {"attention": "unfused"}
    if not fused and _NO_KERNEL.search(denied):
        kernel = "unfused" if _ALL_OF_TORCH.search(denied) else without_flash
        return {} if kernel == stack_attention else {"attention": kernel}
    if numbered := re.search(rf"\b(?:flash[- ]?(?:att(?:entio)?n)?|fa){FLASH_VERSION}", left):
        return {"attention": f"flash{numbered[1]}"}
    if re.search(r"\bcudnn\b", left):
        return {} if stack_attention.startswith("cudnn") else {"attention": "cudnn"}
    if stack_attention == "unfused" and re.search(r"xformers|memory[- ]efficient|\btriton\b", left):
        return {"attention": "triton" if "triton" in left else "flash1"}
    if stack_attention == "unfused" and (fused or "fused" in left):
        return {"attention": "flash2"}
    return {}


#: Ways to say that products of fp32 operands are not rounded to TF32, and that they are (torch.backends.cuda.matmul,
#: torch.set_float32_matmul_precision, TrainingArguments.tf32).
_NO_TF32 = re.compile(
    r"\b(?:no|not|without|w/o|non)[- ](?:use of |using )?tf32|tf32 ?\)?(?: is| was|:|=)* ?(?:off|disabled|false|0\b)|"
    r"matmul_precision[^;|.]{0,6}highest"
)
_TF32 = re.compile(r"tf32\b|matmul_precision[^;|.]{0,6}(?:high\b|medium)")


def rounds_to_tf32(words: str) -> bool | None:
    """Whether words say that products of fp32 operands run in TF32; None where they do not say.

    Args:
        words: In lower case.
    """
    if _NO_TF32.search(words):
        return False
    return True if _TF32.search(words) else None


def dtypes_of(row_words: str) -> dict[str, Any]:
    """Settings of the stack that words on number formats and copies of what is kept replace."""
    words, settings = row_words.lower(), dict[str, Any]()
    if (rounds := rounds_to_tf32(words)) is not None:
        settings["tf32"] = rounds
    if re.search(
        r"(?:no|without|w/o)(?: fp32| float32)? (?:master|cop(?:y|ies))|pure[ _](?:bf|fp)16|(?:bf|fp)16[- ]only|"
        r"(?:bf|fp)16 \(?pure|full[- ](?:bf|fp)16|16-true|memory[- ]efficient[- ](?:bf|fp)16",
        words,
    ):
        settings |= {"master_weights": False, "parameters_dtype": ""}
        if re.search(r"bf16-true", words):  # torch's optimizers keep states as parameters are
            settings["moments_dtype"] = "bfloat16"
    elif re.search(r"(?:fp32|float32|with) master|master (?:weights|copy) in (?:fp32|float32)", words):
        settings |= {"master_weights": True, "parameters_dtype": ""}
    elif re.search(r"(?:fp32|float32|f32) upcast|upcast\w* (?:params? )?to (?:fp32|float32)|\bp=f(?:loat)?32", words):
        settings |= {"parameters_dtype": "float32", "master_weights": False}
    elif kept := re.search(r"\b(?:bf16|bfloat16|fp16|(fp32|float32)) (?:param|weight)", words):
        settings |= {"parameters_dtype": "float32", "master_weights": False} if kept[1] else {"parameters_dtype": ""}
    if re.search(r"(?:bf16|bfloat16|16-bit) (?:optimizer|moments|adam|states|exp_avg)", words):
        settings["moments_dtype"] = "bfloat16"
    if gradients := re.search(r"\b(fp32|float32|bf16|bfloat16|fp16|float16|fp8) (?:grad|accum|reduc)", words):
        named = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}
        settings["gradient_dtype"] = named.get(gradients[1], gradients[1])
    return settings


#: Part of what is moved: percent, or a ratio.
_PART = re.compile(r"(\d+(?:\.\d+)?) ?%|(?:ratio|fraction)\D{0,3}([01]?\.\d+|[01]\b)")


#: Modules that adapters attach to, as frameworks name them, and their last names in tables.
_ADAPTED = (
    *((r"\bq_?proj\b|\bwq\b", ("wq",)), (r"\bk_?proj\b|\bwk\b", ("wk",)), (r"\bv_?proj\b|\bwv\b", ("wv",))),
    (r"\bo_?proj\b|\bwo\b|linear_proj\b", ("wo",)),
    (r"query_key_value|linear_qkv|\bc_attn\b|\bw?qkv\b", ("wq", "wk", "wv", "qkv")),
    *((r"gate_?proj", ("gate",)), (r"up_?proj", ("up",)), (r"down_?proj|linear_fc2", ("down",))),
    (r"linear_fc1", ("gate", "up")),
    (r"attention(?: only| modules| layers| projections)", ("wq", "wk", "wv", "qkv", "wo")),
    (r"mlp(?: only| modules| layers)", ("gate", "up", "down")),
)


def adapted_of(task: str) -> dict[str, Any]:
    """Settings of the modules that adapters attach to, where a task's words list them."""
    if re.search(r"all[- ]?(?:the )?linear|all modules|every linear", task.lower()):
        return {"adapter_modules": ()}
    names = [name for pattern, names in _ADAPTED if re.search(pattern, task.lower()) for name in names]
    return {"adapter_modules": tuple(dict.fromkeys(names))} if names else {}


def offload_of(
    stated: Mapping[str, Any], text: str, layers: int, assumed: list[str], unread: list[str]
) -> dict[str, Any]:
    """Settings of what lies behind the device, and where; software's own words count where no field says it."""
    if moved := re.search(r"activation[- ]offload\w* (?:of |for )?(\d+) layers", text):
        return {"offload": ("activations",), "offload_layers": int(moved[1])}
    words = str(stated.get("offload", "")).lower()
    elsewhere = " ".join(str(stated.get(name, "")) for name in ("framework", "sharding")).lower()
    if "offload" in str(stated.get("optimizer", "")).lower():
        elsewhere += " optimizer offload"
    if "offload" not in stated and re.search(r"offload|zero-?infinity", elsewhere):
        words = f"{elsewhere} nvme" if "infinity" in elsewhere else elsewhere
        if not re.search(r"optim|param|activation|state", words) and re.search(r"zero-?3|z3|stage ?3|infinity", words):
            words += " parameters"
    if _NOTHING.match(words):
        return {}
    kinds = {
        "parameters": r"param|weight",
        "activations": r"activation|\bacts?\b",
        "optimizer": r"optim|state|adam|master|moment|grad",
    }
    named = tuple(kind for kind, pattern in kinds.items() if re.search(pattern, words))
    if "parameters" in named:
        named = tuple(kind for kind in named if kind != "optimizer")
    where = re.search(r"nvme|ssd|disk|file", words)
    if not named and not where and not re.search(r"cpu|host|ram\b|offload|yes|true", words):
        unread.append(f"layout.offload {words!r}: nothing is moved")
        return {}
    if not named:
        assumed.append(f"offload {words!r}: the optimizer's states, as what is moved is not said")
        named = ("optimizer",)
    settings: dict[str, Any] = {"offload": named, **({"offload_to": "disk"} if where else {})}
    if "activations" in named and (
        held := re.search(
            r"(?:activations of )?(\d+) of (?:the )?\d+ layers(?:' activations)? (?:are |lie )?in (?:the )?host", text
        )
    ):
        settings["offload_layers"] = int(held[1])
    if share := _PART.search(words):
        part = float(share[1] or share[2]) / (100 if share[1] else 1)
        if named == ("activations",) and part <= 1:
            return _share_of_activations(stated, words, part, layers, assumed, unread)
        elif part < 1:
            raise ConfigError(
                f"layout.offload: expected what is moved as a whole, got {words!r} ({share[0]}): a part of {named[0]} "
                "stays on the device, which is not modelled"
            )
    return settings


def _share_of_activations(
    stated: Mapping[str, Any], words: str, part: float, layers: int, assumed: list[str], unread: list[str]
) -> dict[str, Any]:
    """Settings where a share of all activations moves: so much of the blocks of each chunk of a rank, in whole blocks.

    A share of less than half a block moves nothing, which is unread.
    """
    held = max(1, layers // (int(stated.get("pp") or 1) * int(stated.get("vpp") or 1)))
    moved = min(held, round(part * held))
    if not moved:
        unread.append(f"layout.offload {words!r}: less than half of one of {held} blocks, so nothing is moved")
        return {}
    assumed.append(f"offload {words!r}: activations of {moved} of {held} blocks of each chunk of a rank")
    return {"offload": ("activations",), "offload_layers": moved}


#: Parts of a block in other words than a module's name.
_PARTS = (
    (r"core[- _]att(?:entio)?n|attention[- _]core|attention scores?|softmax", "core_attn"),
    (r"(?:self[- _])?attention", "attn"),
    (r"mlp|ffn|feed[- _]?forward", "mlp"),
    (r"(?:layer|rms)[- _]?norms?|norms?", "layernorm"),
    (r"(?:(?:mlp|ffn)(?:'s)?[- _])?act(?:ivation)?(?:[- _]func(?:tion)?)?|swi?glu|gelu|silu", "act"),
)


#: A part of a block as the whole of what a field says (PaddleNLP's recompute_granularity).
_PART_ALONE = {"core_attn": "core_attn", "core_attention": "core_attn", "full_attn": "attn", "mlp": "mlp"}


def modules_of(detail: str, text: str) -> tuple[str, ...]:
    """Parts of a block that are recomputed, as a row lists them; () where it lists none."""
    named = re.search(r"[Ss]elective recompute (?:modules|of) ([\w,]+)", text)
    words = re.sub(r"['\"]", "", named[1] if named else detail)
    listed = re.match(r"(?:-*recompute[-_ ])?modules[ =:]+(?=\w)", words.strip())  # Megatron's list has blanks
    words = re.sub(r"[\s,]+", ",", words.strip()[listed.end() :].strip("[]()")) if listed else words
    parts = [part.strip() for part in re.split(r"[,+/]|\band\b", words.strip("[]() ")) if part.strip()]
    parts = [next((name for pattern, name in _PARTS if re.fullmatch(pattern, part.lower())), part) for part in parts]
    if not parts or any(not re.fullmatch(r"\w+", part) for part in parts):
        return ()
    return tuple(part for part in parts if part not in ("selective", "full", "no"))


def _recompute_words(stated: Mapping[str, Any]) -> tuple[str, str]:
    """What a row says of recomputing, and its detail; parts of a block that stand for both are the detail."""
    words = str(stated.get("activation_checkpointing", "")).strip().lower()
    detail = str(stated.get("ac_detail", "")).strip()
    if not detail and (part := _PART_ALONE.get(words.replace("-", "_").replace(" ", "_"))):
        words, detail = "selective", part
    if listed := re.match(r"(?:selective|recompute|checkpoint)\w*(?:[: (]| of)+(?=\w)", words):
        of = words[listed.end() :].rstrip(")")
        if not detail and modules_of(of, "") and re.search(r"att(?:entio)?n|mlp|ffn|norm|act", of):
            words, detail = "selective", of
    elif (named := _PARTS_FIRST.fullmatch(words)) and not detail and modules_of(named[1], ""):
        words, detail = "selective", named[1]
    return words, detail


def recompute_of(
    stated: Mapping[str, Any], text: str, layers: int, assumed: list[str], unread: list[str]
) -> tuple[str, int, tuple[str, ...]]:
    """Recomputing: its mode, number of layers (-1 all) and modules, as far as words say."""
    words, detail = _recompute_words(stated)
    if not words:
        if place := next((place for software, place in _RECOMPUTES if re.search(software, text.lower())), ""):
            assumed.append(f"every block recomputed, as {place}")
            return "full", -1, ()
        if detail != "no":
            assumed.append("no activation recompute: none is stated")
        return "none", -1, ()
    plain = " ".join(re.sub(r"[-_:=,()'\"]+", " ", words).split())
    mode = next((mode for pattern, mode in _MODES if re.search(pattern, plain)), None)
    if mode is None:
        unread.append(f"layout.activation_checkpointing {words!r}: every layer in full")
        return "full", -1, ()
    if mode == "none":
        return mode, -1, ()
    count = _layers(detail, text if mode == "full" else "", layers)
    if count is None and (of_stage := _OF_STAGE.search(f"{words} {detail}")):
        stages = int(stated.get("pp") or 1) * int(stated.get("vpp") or 1)
        count = min(layers, int(of_stage[1]) * stages)
    elif count is None and mode == "full" and "granularity" not in plain:
        count = _layers("", words, layers) if "num" not in plain else None
    if count is not None:
        assumed.append(f"{count} of {layers} layers recomputed in full: {detail or words or 'as the notes say'}")
        return "full", count, ()
    if mode == "full":
        if re.match(r"save |qkv |unsloth", plain):
            assumed.append(f"recompute {words!r}: every layer in full")
        if detail and not re.search(r"^(?:full|all|every|each|uniform|yes|complete)\b|1 layer", detail, re.IGNORECASE):
            unread.append(f"layout.ac_detail {detail!r}: every layer in full")
        return mode, -1, ()
    if re.match(r"minimal|dots? |save dot", plain):
        assumed.append(f"recompute {words!r}: by operation, products are kept")
        return "selective", -1, ("op",)
    modules = modules_of(detail, text)
    if modules:
        return ("selective", -1, ()) if modules == ("core_attn",) else ("selective", -1, modules)
    if re.search(r"per-op|selective op|=\"op\"|torchtitan", f"{text} {words} {detail}"):
        return "selective", -1, ("op",)
    if detail and detail.lower() not in ("selective", "selective op", "core", "attention"):
        unread.append(f"layout.ac_detail {detail!r}: attention's core")
    return "selective", -1, ()


def _layers(detail: str, text: str, layers: int) -> int | None:
    """Number of layers that words say are recomputed; None where they say none.

    Megatron's "uniform" keeps the input of so many layers each, and recomputes all.
    """
    if re.search(r"\buniform\b", f"{detail} {text}"):
        return None
    for words in (detail, text):
        if found := next((match for pattern in _LAYERS if (match := pattern.search(words))), None):
            return min(layers, int(found[1]))
    if found := _EVERY.search(detail):
        each = int(found[1]) if found[1] else 3 if "third" in found[0].lower() else 2
        return -(-layers // max(1, each))
    if found := _PERCENT.search(detail):
        return round(layers * min(100.0, float(found[1])) / 100)
    if found := _SHARE.search(detail):
        share = float(found[1]) if found[1] else int(found[2]) / max(1, int(found[3]))
        return round(layers * min(1.0, share))
    return None
