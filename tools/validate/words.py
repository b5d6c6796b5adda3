"""Words of sources: which catalog machine a GPU's name means, and which software stack a source ran on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lading.catalog.load import machine_names
from lading.errors import ConfigError

#: (words, catalog machine, what is taken for granted); the first that fits counts.
_MACHINES: tuple[tuple[str, str, str], ...] = (
    (r"a800.*pcie|pcie.*a800", "a100-pcie", "A800 PCIe: an A100 PCIe, which computes as it"),
    (r"a800.*\b40 ?g", "a100-40gb", "A800: an A100 with NVLink of 400 GB/s; computes as it"),
    (r"a800", "a800", ""),
    (
        r"a100.*pcie.*\b40 ?g|a100.*\b40 ?g.*pcie|pcie.*a100.*\b40 ?g",
        "a100-pcie",
        "A100 PCIe of 40 GB: one of 80 GB, whose memory is 1.24 times as fast",
    ),
    (r"a100 ?x\b", "a100-pcie", "A100X: an A100 PCIe; its own network port is not counted"),
    (r"a100.*pcie|pcie.*a100", "a100-pcie", ""),
    (r"a100.*\b40 ?g|\b40 ?g.*a100", "a100-40gb", ""),
    (r"a100.*\b64 ?g|\b64 ?g.*a100", "a100", "an A100 of 64 GB: as one of 80 GB"),
    (r"a100", "a100", ""),
    (r"gh200.*(?:\b14[14] ?g|hbm3e)", "h200", "GH200 of 144 GB: its GPU is taken for an H200, and its host too"),
    (r"gh200", "gh200", ""),
    (r"gb300", "gb300", ""),
    (r"gb200", "gb200", ""),
    (r"b300", "b300", ""),
    (r"b100", "b200", "B100: a B200, which has 1.29 times its peak and may draw 1000 W where it draws 700"),
    (r"b200|sm ?100", "b200", ""),
    (r"h200.*nvl\b|nvl\b.*h200", "h200", "H200 NVL: an H200 SXM, which may draw 700 W where it draws 600"),
    (r"h200", "h200", ""),
    (r"h100.*(\b96 ?g|hbm2e|500 ?w)", "h100-96gb", ""),
    (
        r"h100.*nvl\b|nvl\b.*h100",
        "h100-pcie",
        "H100 NVL: an H100 PCIe, whose memory has 2 TB/s where it has 3.9, and which draws 350 of 400 W",
    ),
    (r"h100.*pcie|pcie.*h100", "h100-pcie", ""),
    (r"h100.*\b64 ?g|\b64 ?g.*h100", "h100", "an H100 of 64 GB: one of 80 GB, whose memory is faster"),
    (r"h100", "h100", ""),
    (r"h800.*pcie|pcie.*h800", "h100-pcie", "H800 PCIe: an H100 PCIe, which computes as it"),
    (r"h800", "h800", ""),
    (
        r"\bh20 ?3e\b|\bh20\b.*\b141 ?g",
        "h20",
        "H20 of 141 GB: one of 96 GB, with 4.0 TB/s where it has 4.8",
    ),
    (r"\bh20\b", "h20", ""),
    (r"mi300x", "mi300x", ""),
    (r"mi325", "mi325x", ""),
    (r"mi350", "mi350x", ""),
    (r"mi355", "mi355x", ""),
    (r"v100s", "v100s", ""),
    (
        r"v100.*pcie.*\b16 ?g|v100.*\b16 ?g.*pcie|pcie.*v100.*\b16 ?g",
        "v100-pcie",
        "V100 PCIe of 16 GB: as one of 32 GB",
    ),
    (r"v100.*pcie|pcie.*v100", "v100-pcie", ""),
    (r"v100.*\b16 ?g", "v100-16gb", ""),
    (r"v100.*sxm3", "v100-32gb", "V100 SXM3: a V100 SXM2, which may draw 300 W where it draws 350 or more"),
    (r"v100", "v100-32gb", ""),
    (r"rtx ?6000 ?ada|6000 ada", "rtx6000ada", ""),
    (r"pro ?6000", "rtxpro6000", ""),
    (r"\b4000 ?ada", "rtx4000ada", ""),
    (r"\b2000 ?ada", "rtx2000ada", ""),
    (r"a6000", "rtxa6000", ""),
    (r"a5000", "rtxa5000", ""),
    (r"a4500", "rtxa4500", ""),
    (r"a4000", "rtxa4000", ""),
    (r"l40s", "l40s", ""),
    (r"\bl40\b", "l40", ""),
    (r"\bl4\b", "l4", ""),
    (r"\bt4\b", "t4", ""),
    (r"\ba10g\b|\bg5\.\d*xlarge", "a10g", ""),
    (r"\ba10\b", "a10", ""),
    (r"\ba40\b", "a40", ""),
    (r"mi250", "mi250x", "MI250: an MI250X, one die of a package as a GPU, as ROCm counts them"),
    (r"3090 ?ti", "rtx3090ti", ""),
    (r"3090", "rtx3090", ""),
    (r"\b3080(?! ?ti)", "rtx3080", ""),
    (r"\b3060(?! ?ti)", "rtx3060", ""),
    (r"4090 ?d\b", "rtx4090", "RTX 4090 D: an RTX 4090, which has 128 multiprocessors where it has 114"),
    (r"4090", "rtx4090", ""),
    (r"\b4080 ?super", "rtx4080", "RTX 4080 SUPER: an RTX 4080, which has 76 multiprocessors where it has 80"),
    (r"\b4080", "rtx4080", ""),
    (r"\b4070 ?ti ?super", "rtx4070tisuper", ""),
    (r"\b4070(?! ?(?:ti|super))", "rtx4070", ""),
    (r"\b4060(?! ?ti)", "rtx4060", ""),
    (r"5090 ?d\b", "rtx5090", "RTX 5090 D: an RTX 5090, which computes as it"),
    (r"5090", "rtx5090", ""),
    (r"\b5080", "rtx5080", ""),
    (r"2080 ?ti", "rtx2080ti", ""),
)


#: Accelerators that no machine of the catalog is like: neither their kernels nor their links are known here.
_OTHERS = (
    (r"\btpu|trillium|ironwood", "a TPU"),
    (r"gaudi|\bhpu\b", "a Gaudi"),
    (r"trainium|\btrn[12]|inferentia", "a Trainium"),
    (r"ascend|\b910 ?[abc]\b|\bnpu\b", "an Ascend"),
    (r"cerebras|\bwse|groq|graphcore|\bipu\b|sambanova|\bmlu", "none of its kind"),
)


#: Words of GPUs in laptops, whose names are those of other chips' boards.
_OF_LAPTOPS = r"\blaptop|\bmobile\b|\bnotebook"
#: Words of a GPU's name that are read, or that change nothing here; what is in brackets is a remark.
_GPU_READ = re.compile(
    r"\([^)]*\)|\b(?:nvidia|amd|instinct|radeon|geforce|tesla|quadro|rtx|gtx|titan|pro|hopper|blackwell|ampere|volta|"
    r"turing|ada|lovelace|generation|workstation|server|edition|founders|gpus?|cards?|accelerators?|tensor|core|"
    r"dgx|hgx|nvlink\d?|nvl\d*|nvswitch|pci ?e\d?(?: ?gen ?\d)?|sxm\d?|oam|ib|infiniband|gcds?|dies?|node|nodes|"
    r"with|and|of|the|per|each|in|a|x|super|ti|d|3e|max ?q|grace|superchip|hbm\d?e?|gddr\d?x?|sm ?\d+|"
    r"[vphabgml]?[tg]?[a-z]?\d+[a-z]*|"
    r"\d+(?:\.\d+)?|[gt]i?b|[gt]b/?s|[gt]bps|w|watts?|limited|power|limit|limits|to)\b"
)


def unread_of_name(gpu: str) -> list[str]:
    """List the words of a GPU's name that no rule reads."""
    words = re.sub(r"[-_/,;:]", " ", gpu.lower())
    left = re.sub(r"[^a-z]+", " ", _GPU_READ.sub(" ", words)).strip()
    return [f"hardware.gpu {gpu!r}: {left!r}"] if left else []


def machine_of(gpu: str) -> tuple[str, list[str]]:
    """Find the catalog machine that a source's words for its GPU mean, and what is taken for granted by it.

    Raises:
        ConfigError: no machine of the catalog is meant.
    """
    words = re.sub(r"[-_/]", " ", gpu.lower())
    if re.search(_OF_LAPTOPS, words):
        raise ConfigError(
            f"hardware.gpu: expected a board of the catalog's machines, got {gpu!r}: a laptop's part of that name has "
            "fewer multiprocessors and less power, and no machine is of one; describe it in a file of its own"
        )
    if other := next((name for pattern, name in _OTHERS if re.search(pattern, words)), ""):
        raise ConfigError(
            f"hardware.gpu: expected a GPU of the catalog's machines, got {gpu!r}: {other} is not modelled, as neither "
            "its kernels nor its links are known"
        )
    for pattern, name, assumed in _MACHINES:
        if not re.search(pattern, words):
            continue
        if name not in machine_names():
            raise ConfigError(f"expected a GPU whose machine is in the catalog, got {gpu!r}: it has no {name!r} yet")
        return name, [assumed] if assumed else []
    plain = re.sub(r"[^a-z0-9]", "", words)
    named = [name for name in machine_names() if re.search(re.sub(r"[^a-z0-9]", "", name) + r"(?!\d|ti|super)", plain)]
    if named:
        return max(named, key=len), []
    raise ConfigError(f"expected a GPU of the catalog's machines ({', '.join(machine_names())}), got {gpu!r}")


#: An H100 of which no more is said, and how sources of PyTorch's team begin, whose H100s are of 96 GB and 500 W.
_BARE_H100 = re.compile(r"(?:nvidia )?h100s?(?: gpus?)?(?: sxm5?)?")
_PYTORCH_TEAM = re.compile(
    r"(?:https?://)?(?:www\.)?(?:github\.com/)?(?:pytorch/(?:ao|torchtitan|torchtune)|meta-pytorch/[\w.-]+)(?![\w-])"
)


def machine_of_source(gpu: str, source: str) -> tuple[str, list[str]]:
    """Find the catalog machine that words for a GPU mean in a source, and what is taken for granted by it.

    Tables of torchtitan say that its H100s have HBM2e of 96 GB at 2.4 TB/s and a limit of 500 W; those of PyTorch's
    other repositories, which are made on torchtitan by the same people, name the board alone.

    Raises:
        ConfigError: no machine of the catalog is meant.
    """
    machine, assumed = machine_of(gpu)
    if _PYTORCH_TEAM.match(source.lower().strip()) and _BARE_H100.fullmatch(re.sub(r"[-_/]", " ", gpu.lower()).strip()):
        said = "an H100 of PyTorch's team: 96 GB of HBM2e and 500 W, as in docs and benchmarks of pytorch/torchtitan"
        return "h100-96gb", [*assumed, said]
    return machine, assumed


@dataclass(frozen=True)
class StackRule:
    """Words by which a source's software stack is known.

    Attributes:
        pattern: Searched in what the row says of its source, framework and notes, in lower case.
        stack: Name in the catalog.
        evidence: Reason why this is the stack.
        family: Whether the words name a family of software that shares models and trainers, not one whose steps are
            known: what is predicted of it is as uncertain as of software that is not known.
    """

    pattern: str
    stack: str
    evidence: str
    family: bool = False


#: In order: names of a publication first, then names of frameworks, newest first. Words of a class of software, such as
#: FSDP or DeepSpeed, name no set (``tools.validate.software``).
STACK_RULES: tuple[StackRule, ...] = (
    StackRule(r"qwenlm/qwen .*task=q-?lora", "qwen-finetune-zero2", "Qwen's finetune_qlora_single_gpu.sh"),
    StackRule(r"qwenlm/qwen .*task=(full|sft)", "qwen-finetune-zero3", "Qwen's finetune_ds.sh"),
    StackRule(r"qwenlm/qwen ", "qwen-finetune", "Qwen's finetune_lora_single_gpu.sh"),
    StackRule(r"simumax", "megatron-core", "notes: Megatron-LM 23e00ed0, TE 2.11, no overlap of communication"),
    StackRule(
        r"llm[- ]foundry|composer|mosaic", "fsdp1", "llm-foundry's scripts/train/benchmarking: Composer with FSDP1"
    ),
    StackRule(r"torchtitan.*compile=true", "torchtitan-compile", "torchtitan with --training.compile"),
    StackRule(r"torchtitan", "torchtitan-eager", "torchtitan, compile not set"),
    StackRule(r"\bnanotron\b", "nanotron", "Hugging Face's nanotron; its host takes as long whatever a block computes"),
    StackRule(
        r"(?s)(?=.*(?:megatron|mbridge|nemo)).*cuda graphs full_iteration",
        "megatron-bridge-graphs",
        "a preset that replays whole iterations",
    ),
    StackRule(r"megatron-bridge|mbridge", "megatron-bridge", "Megatron-Core of 2025-26 with Transformer Engine"),
    StackRule(
        r"(?s)^(?!.*nemo[ /-]?(?:(?:hf ?)?auto-?model|rl\b|aligner)).*(?:dgxc|\bnemo\b)",
        "nemo",
        "NeMo launcher: Megatron-Core with Transformer Engine",
    ),
    StackRule(
        r"^(?=.*megatron-deepspeed)(?:[^|]*\|){0,2}[^|]*\b(?:gpt-?neox|glm-130b)\b",
        "megatron-deepspeed",
        "GPT-NeoX and GLM-130B trained on forks of Megatron-DeepSpeed of their own",
        family=True,
    ),
    StackRule(r"bigscience", "megatron-deepspeed-bigscience", "BigScience's fork of Megatron-DeepSpeed, for BLOOM"),
    StackRule(r"ground_truth_single", "megatron-deepspeed-traced", "vTrain's runs on one node"),
    StackRule(r"vtrain", "megatron-deepspeed", "Megatron-DeepSpeed of 2022"),
    StackRule(
        r"megatron-deepspeed",
        "megatron-deepspeed",
        "Megatron-DeepSpeed, of which vTrain's clean runs were seen, but none of training with DeepSpeed's engine",
        family=True,
    ),
    StackRule(r"(?:2104\.04473|sc'21).*deepspeed zero-3", "deepspeed-zero3", "DeepSpeed's ZeRO-3 of 2021"),
    StackRule(r"2104\.04473|sc'21.*ptd|sc'21", "megatron-2021", "Narayanan et al. 2021"),
    StackRule(r"2205\.05198|korthikanti", "megatron-2022", "Korthikanti et al. 2022"),
    StackRule(r"(?s)^(?!.*deepspeed).*megatron.*(2104\.|2105\.|2021)", "megatron-2021", "Megatron-LM of 2021"),
    StackRule(r"megascale|zero bubble|2401\.10241|megatron-lm.*2023", "megatron-2023", "Megatron-LM of 2023"),
    StackRule(
        r"(?s)^(?!.*(?:nanotron|picotron|deepspeed)).*"
        r"(?:hugging ?face(?:/(?:transformers|peft|trl|accelerate)\b|(?! ?/|\.co\b))|\btransformers\b|\bhf accelerate|"
        r"\bpeft\b|\btrl\b|llama-?factory|axolotl|ms-swift(?!.*megatron)|\bunsloth\b(?! off))",
        "hf-transformers",
        "transformers' Trainer, which LLaMA-Factory, Axolotl, SWIFT and Unsloth run",
        family=True,
    ),
)


def stack_rule_of(text: str) -> StackRule | None:
    """First rule whose words are in ``text``; None if no stack is known by them."""
    lowered = text.lower()
    return next((rule for rule in STACK_RULES if re.search(rule.pattern, lowered)), None)
