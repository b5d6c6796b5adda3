"""The configuration of a run: frozen dataclasses, and the strict reader of the TOML file that fills them.

A run is a ``RunConfig``, written in Python or read by ``load_run``. Nothing is ignored: a key that does not exist,
has the wrong type, is missing or is out of range is a ConfigError that names the file, the key and what to write.
Relative paths are relative to the working directory.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import tomllib
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from lading.errors import LARGEST, ConfigError, check_clip_norm, check_number, did_you_mean, short_repr
from lading.files import read_toml
from lading.grouping import Matrices
from lading.inputs import catalog_models, check_inputs
from lading.optim.registry import DEFAULT, default_rule, parameter_rule, rule_to_dict
from lading.optim.rule import ParameterRule
from lading.units import share_or_bytes

#: Models that need no module or file: name -> "module:class".
MODELS = {
    "llama": "lading.models.llama:Llama",
    "gpt": "lading.models.gpt:GPT",
    "moe": "lading.models.moe:MoE",
    "dit": "lading.models.dit:DiT",
}
#: ``data.source`` that means the Python standard library's own source.
STDLIB = "stdlib"
#: ``data.source`` that means latents made up from their labels, for a diffusion model.
SYNTHETIC = "synthetic"

Task = Literal["auto", "causal-lm", "masked-lm", "seq2seq-lm", "classification", "contrastive", "own"]
TextFormat = Literal["auto", "text", "jsonl", "parquet", "bytes"]

_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    if type(value) is not int or not low <= value <= (LARGEST if high is None else high):
        limits = f">= {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name}: expected an integer {limits}, got {short_repr(value)}")


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{name}: expected a text that is not empty, got {value!r}")


def _choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        hint = did_you_mean(str(value), choices)
        raise ConfigError(f"{name}: expected one of {', '.join(choices)}, got {value!r}{hint}")


def _refuse_idle(settings: object, needed: str, *names: str, within: str = "") -> None:
    """Refuse settings that change nothing in this configuration, where they are not as by default.

    Args:
        needed: Words that name what they belong to, and what is there in its place.
        within: Begins the names in words, where these are of a part of what is checked.
    """
    usual = {f.name: f.default for f in dataclasses.fields(cast(Any, settings))}
    for name in names:
        if (value := getattr(settings, name)) != usual[name]:
            raise ConfigError(
                f"{within}{name}: expected {needed}, got {name} = {short_repr(value)}; "
                f"leave it out, or set it to {short_repr(usual[name])}"
            )


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """Settings of how the parameters move.

    Attributes:
        steps: Optimizer steps of the whole run.
        optimizer: Rule that moves every parameter, or those that ``matrices`` leaves: AdamW, or in a file any ``rule``
            of ``lading.optim.registry``, its name beside its settings.
        matrices: Rule that moves whole matrices.
        clip_norm: Largest norm of all gradients together; 0 switches clipping off.
        accumulation: Micro-batches per optimizer step, of each replica where ranks are several.
        micro_batches: Micro-batches per optimizer step of all replicas together, in place of ``accumulation``: any
            number of replicas that divides it trains alike; 0 leaves it to ``accumulation``.
        schedule: Learning rate after the warm-up, "constant" or "cosine" (down to 0 at ``steps``).
        warmup_steps: Steps of linear rise to the full learning rate; a run of fewer steps ends below it.
        precision: "fp32"; or "bf16": parameters, activations and gradients in bfloat16, with float32 master weights and
            moments, gradients summed over micro-batches and clipped in float32.
        compile: Fuse runs of light operations with PyTorch's compiler: faster, but sums are added in another order, so
            results are close to plain PyTorch's and not equal to the bit.
    """

    steps: int
    optimizer: ParameterRule = field(default_factory=default_rule)
    matrices: Matrices | None = None
    clip_norm: float = 0.0
    accumulation: int = 1
    micro_batches: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False

    def __post_init__(self) -> None:
        _integer("steps", self.steps, 1)
        check_clip_norm(self.clip_norm)
        _integer("accumulation", self.accumulation, 1)
        _integer("micro_batches", self.micro_batches, 0)
        _integer("warmup_steps", self.warmup_steps, 0)
        if self.schedule not in ("constant", "cosine"):
            raise ConfigError(f"schedule: expected 'constant' or 'cosine', got {self.schedule!r}")
        if self.precision not in ("fp32", "bf16"):
            raise ConfigError(f"precision: expected 'fp32' or 'bf16', got {self.precision!r}")


def processors() -> int:
    """Number of processors that this process may use."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return available or 1


def lr_at(optimization: Optimization, step: int, peak: float | None = None) -> float:
    """Learning rate of optimizer step ``step``, counted from 0; ``peak`` is the full one, the optimizer's if None.

    Linear warm-up reaches the full rate at step ``warmup_steps - 1``; past ``steps`` a cosine stays at 0.

    Raises:
        ConfigError: ``step`` is negative.
    """
    _integer("step", step, 0)
    peak, warmup = optimization.optimizer.lr if peak is None else peak, optimization.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if optimization.schedule == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, optimization.steps - warmup))
    return peak * 0.5 * (1.0 + math.cos(math.pi * done))


def crowded_words(run: RunConfig) -> str:
    """Say that a run has more threads than this process may use processors; "" where it has not."""
    if run.threads <= (num_processors := processors()):
        return ""
    return (
        f"threads = {run.threads}, but this process may use {num_processors} processors: threads take turns and wait "
        f"for each other, so steps take longer; leave threads out, or set at most {num_processors}"
    )


def short_of_peak(optimization: Optimization) -> str | None:
    """Note that a run ends within its warm-up; None for any other run."""
    steps, warmup = optimization.steps, optimization.warmup_steps
    if steps >= warmup:
        return None
    last = lr_at(optimization, steps - 1)
    return (
        f"the run ends within its warm-up, at step {steps} of {warmup}: the learning rate\n"
        f"rises to {last:g} of {optimization.optimizer.lr:g}; optimization.warmup_steps shortens it"
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Settings of which model is trained, and what it learns.

    Attributes:
        name: "llama", "gpt", "moe", "dit"; a model of the catalog such as "llama3-8b"; "module:function" for your own;
            or a Hugging Face model: the path of a config.json (initial weights are drawn) or of a folder with it and
            safetensors (they are loaded).
        sizes: Arguments of that model, or settings of its Hugging Face configuration, by name.
        task: Task that is learned; "auto" is what the model is made for. "own" is the loss that the model's forward
            gives when it is called with the columns of the data (``data.kind`` "arrays" or "random").
        new_head: Draw the parameters that the folder's files lack, and leave out those that the model lacks.
    """

    name: str
    sizes: dict[str, int | float | bool] = field(default_factory=lambda: {})
    task: Task = "auto"
    new_head: bool = False

    def __post_init__(self) -> None:
        _text("name", self.name)
        known = self.name in MODELS or _ENTRY.match(self.name) or self.is_hugging_face
        if not known and self.name not in (names := [*MODELS, *catalog_models()]):
            raise ConfigError(
                f"name: expected one of {', '.join(MODELS)}, a model of the catalog, 'module:function', or the path of "
                f"a config.json or of a folder that holds one, got {self.name!r}{did_you_mean(self.name, names)}"
            )
        _choice("task", self.task, get_args(Task))
        if self.new_head and not self.weights:
            raise ConfigError(f"new_head: expected a folder with weights as name, got {self.name!r}")

    @property
    def is_hugging_face(self) -> bool:
        """Whether the name is the path of a Hugging Face model."""
        return self.name.endswith(".json") or os.sep in self.name or os.path.isdir(self.name)

    @property
    def weights(self) -> str:
        """Folder whose weights training starts from; "" where they are drawn."""
        return self.name if self.is_hugging_face and not self.name.endswith(".json") else ""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings of the data: text and how it becomes tokens, or arrays.

    Attributes:
        kind: "text"; "arrays" for the columns of npz, safetensors or Parquet files, which become the arguments of the
            model's forward; "random" for numbers made up, to plan or try a model whose data is not at hand.
        source: "stdlib" (the Python standard library's own source), or a file, a folder or a pattern ("text/*.jsonl");
            "synthetic" for the latents of a diffusion model.
        inputs: Columns of arrays by name, each its dtype, the shape of a row and what its integers are below: "float32
            3 224 224", "int64 below 1000". Files of arrays need it only where they do not say the shape.
        sequence_length: Tokens of a sequence, T; the patches of an image for a diffusion model; of arrays it only
            counts, as so many tokens a row.
        batch_size: Sequences or rows of a micro-batch, B.
        format: Format of the files; "auto" goes by their endings (.jsonl, .parquet, else text).
        text_field: Field of a JSON line or Parquet row that has the text.
        label_field: Field that has the label (an integer from 0); for classification.
        tokenizer: A tokenizer.json, or a folder that holds one; "bytes" for one token a byte; "auto" is the model
            folder's, or bytes where it has none.
        sampling: "random" draws each sample from all of the data; "epochs" takes every sample once, in random order,
            before it takes any again. Then samples of a text are sequences side by side.
    """

    sequence_length: int = 0
    batch_size: int
    kind: Literal["text", "arrays", "random"] = "text"
    source: str = STDLIB
    inputs: dict[str, str] = field(default_factory=lambda: {})
    format: TextFormat = "auto"
    text_field: str = "text"
    label_field: str = "label"
    tokenizer: str = "auto"
    sampling: Literal["random", "epochs"] = "random"

    def __post_init__(self) -> None:
        _text("source", self.source)
        _choice("sampling", self.sampling, ("random", "epochs"))
        if self.sampling == "epochs" and (self.kind == "random" or self.source == SYNTHETIC):
            made = "data.kind 'random'" if self.kind == "random" else f"data.source {SYNTHETIC!r}"
            raise ConfigError(
                f"sampling: expected 'random' for {made}, whose samples are made up as they are asked for, got "
                "'epochs'; leave it out"
            )
        _choice("format", self.format, get_args(TextFormat))
        _text("text_field", self.text_field)
        _text("label_field", self.label_field)
        _text("tokenizer", self.tokenizer)
        _choice("kind", self.kind, ("text", "arrays", "random"))
        check_inputs(self.kind, self.inputs, self.sequence_length, has_source=self.source != STDLIB)
        if self.kind == "random":
            _refuse_idle(self, "files to read beside it, found kind 'random', whose numbers are made up", "source")
        if self.kind != "text" or self.source == SYNTHETIC:
            what = f"kind {self.kind!r}" if self.kind != "text" else f"source {SYNTHETIC!r}"
            needed = f"kind 'text' and files of it beside it, found {what}"
            _refuse_idle(self, needed, "format", "text_field", "label_field", "tokenizer")
        elif self.format in ("text", "bytes"):
            needed = f"JSON lines or Parquet beside it, found format {self.format!r}"
            _refuse_idle(self, needed, "text_field", "label_field")
        _integer("sequence_length", self.sequence_length, 0 if self.kind != "text" else 1)
        _integer("batch_size", self.batch_size, 1)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a micro-batch; of its rows where a row has no tokens."""
        return self.batch_size * max(1, self.sequence_length)

    def __str__(self) -> str:
        size = (
            f"{self.batch_size} x {self.sequence_length} tokens" if self.sequence_length else f"{self.batch_size} rows"
        )
        return f"{size} of random numbers" if self.kind == "random" else size


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Settings of a loss over data that is not trained on. Either ``share`` or ``source`` says which.

    Attributes:
        share: Share of the data that is held out of training, above 0 and below 1. Which part depends on the data and
            the share alone: pieces spread over a text, or single rows and labelled texts.
        source: A file, a folder or a pattern, as ``data.source``; none of its files may be trained on.
        every_steps: Steps between two evaluations. One follows the last step, too.
        batches: Batches of an evaluation, each as large as a step's and the same every time.
        keep_best: Whether to keep a checkpoint of the lowest loss, in ``best`` of the run's folder, beside the others.
    """

    share: float = 0.0
    source: str = ""
    every_steps: int = 100
    batches: int = 8
    keep_best: bool = True

    def __post_init__(self) -> None:
        check_number("share", self.share, 0, 1)
        if bool(self.share) == bool(self.source.strip()):
            got = f"both, {self.share} and {self.source!r}" if self.share else "neither"
            raise ConfigError(
                f"share: expected a share of the data above 0, or a source of its own, got {got}; set one of them"
            )
        _integer("every_steps", self.every_steps, 1)
        _integer("batches", self.batches, 1)


@dataclass(frozen=True, kw_only=True)
class FreezeConfig:
    """Settings of which leading layers freeze while a run trains: one of ``schedule``, ``alpha`` and ``percentile``.

    Attributes:
        layers: Names of the model's modules in the order of its forward, each a layer (``"layers.0"``), or several with
            blanks between them that freeze together (``"tokens layers.0"``). What is in none of them is always trained.
        every_steps: Steps of an epoch, after each of which layers may freeze.
        schedule: Number of frozen layers in each epoch, from the first on; the last number holds from then on.
        alpha: Freeze up to the layer with the smallest gradient, at most this share of those still trained, in [0, 1].
        percentile: Freeze up to the first layer whose gradient changes as much as this percentile of those still
            trained, in [0, 100].
    """

    layers: list[str]
    every_steps: int
    schedule: list[int] | None = None
    alpha: float | None = None
    percentile: float | None = None

    def __post_init__(self) -> None:
        _integer("every_steps", self.every_steps, 1)
        rules = {"schedule": self.schedule, "alpha": self.alpha, "percentile": self.percentile}
        if len(chosen := [name for name, rule in rules.items() if rule is not None]) != 1:
            raise ConfigError(
                f"schedule: expected one of schedule, alpha and percentile, got {' and '.join(chosen) or 'none'}"
            )
        if not self.layers or not all(layer.split() for layer in self.layers):
            raise ConfigError(f"layers: expected names of modules, such as ['layers.0'], got {self.layers}")
        check_number("alpha", self.alpha or 0.0, 0, 1, closed=True)
        check_number("percentile", self.percentile or 0.0, 0, 100, closed=True)
        counts = self.schedule or [0]
        if counts != sorted(counts) or counts[0] < 0 or counts[-1] > len(self.layers) or self.schedule == []:
            raise ConfigError(
                f"schedule: expected numbers from 0 to {len(self.layers)} that do not fall, as so many layers are "
                f"named, got {self.schedule}"
            )


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Settings of the memory that a run may use.

    Attributes:
        budget: Device memory: "256MB", bytes, or a share such as "50%" or 0.5 of what keeping everything needs.
        disk_budget: Budget of the swap file, the machine's nearest tier of kind "file": a size, or a share of the free
            space in its folder; 0 for none.
        budgets: Budgets of other tiers of the machine by name, in the same way: a share is one of the free space where
            the tier is a file, else of its capacity. A tier that is not named may be filled.
        policy: Name of the planner's policy.
        folder: Folder for the swap file of a tier without a location; "" for the run's own ``out`` folder.
        experts: Leave out of each step the experts that no token chose, and plan again when others are chosen than
            before. On one device, without ``optimization.compile``.
        experts_on_host: Let the host's processors compute experts that get few tokens, where they lie, if steps are
            expected to be shorter for it, once the tokens of each were counted. Numbers are then those of plain PyTorch
            but for rounding. Needs ``experts``, and a machine with a ``[host_device]``.
        clipped: Share of steps whose gradients are expected to be above ``optimization.clip_norm`` at first. Updates
            then need not wait for the norm of all gradients, and a clipped step runs twice; planned again where another
            share is counted. On one device, without ``optimization.compile`` and validation. None waits.
    """

    budget: str | int | float
    disk_budget: str | int | float = "50%"
    budgets: dict[str, str | int | float] = field(default_factory=lambda: {})
    policy: str = "residency"
    folder: str = ""
    experts: bool = False
    experts_on_host: bool = False
    clipped: float | None = None

    def __post_init__(self) -> None:
        if self.experts_on_host and not self.experts:
            raise ConfigError("experts_on_host: expected experts = true beside it, got false; set both, or neither")
        share_or_bytes(self.disk_budget, 1, "disk_budget")
        for name, size in self.budgets.items():
            share_or_bytes(size, 1, f"budgets.{name}")
        _text("policy", self.policy)
        if self.clipped is not None:
            check_number("clipped", self.clipped, 0, 1)
        if share_or_bytes(self.budget, 1 << 40, "budget") == 0:
            raise ConfigError(f"budget: expected a size above 0, got {self.budget!r}")

    def budget_bytes(self, keep_all_bytes: int) -> int:
        """Budget of the device in bytes; ``keep_all_bytes`` is the peak of a step that keeps everything."""
        return share_or_bytes(self.budget, keep_all_bytes)

    def by_tier(self, swap_tier: str) -> dict[str, str | int | float]:
        """Collect budgets as they were set, sizes or shares, by the name of their tier.

        Args:
            swap_tier: Name of the tier that ``disk_budget`` is of (``Machine.swap_tier``); "" where there is none.
        Raises:
            ConfigError: that tier has two budgets.
        """
        if swap_tier in self.budgets and self.disk_budget != type(self).disk_budget:
            raise ConfigError(
                f"memory: expected one budget of {swap_tier}, got disk_budget and budgets.{swap_tier}; leave one out"
            )
        return {**({swap_tier: self.disk_budget} if swap_tier else {}), **self.budgets}

    def setting_of(self, tier: str) -> str:
        """Dotted key of the setting that has a tier's budget."""
        return f"memory.budgets.{tier}" if tier in self.budgets else "memory.disk_budget"

    def with_tier_budgets(self, sizes: Mapping[str, int]) -> MemoryConfig:
        """Copy with these budgets in bytes of all tiers of a machine."""
        return dataclasses.replace(self, disk_budget=type(self).disk_budget, budgets=dict(sizes))

    def tier_budgets(self, whole_bytes: Mapping[str, int], swap_tier: str) -> dict[str, int]:
        """Budgets of a machine's tiers in bytes; tiers without one are left out.

        Args:
            whole_bytes: Bytes that a share is taken of, by tier of the machine.
            swap_tier: Name of the tier that ``disk_budget`` is of; "" where there is none.
        Raises:
            ConfigError: a budget is of no tier of the machine, or a tier has two.
        """
        if unknown := self.budgets.keys() - whole_bytes.keys():
            known = ", ".join(whole_bytes) or "it has none"
            raise ConfigError(f"memory.budgets: expected tiers of the machine ({known}), got {min(unknown)!r}")
        asked = self.by_tier(swap_tier)
        return {
            name: share_or_bytes(asked[name], size, self.setting_of(name))
            for name, size in whole_bytes.items()
            if name in asked
        }


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Settings of when to save.

    Attributes:
        every_steps: Steps between two checkpoints; 0 saves none on the way.
        keep: Number of checkpoints that stay, the newest ones.
        keep_every_steps: Keep every checkpoint of a multiple of so many steps, too; 0 keeps none for that.
        at_end: Whether to save when the run ends, and when it is stopped.
        wait: Whether training waits while checkpoints on the way are written. If not, a process writes them beside it,
            where the memory budget has room to stage them; where it has none, training waits, and the run says so.
        in_place: Whether checkpoints on the way leave what lies in the swap file there, which then takes twice the
            room: next to nothing is written, and each replaces the one before (``lading.saving_in_place``). Those of
            ``keep_every_steps`` and the last one are copied.
    """

    every_steps: int = 0
    keep: int = 2
    keep_every_steps: int = 0
    at_end: bool = True
    wait: bool = False
    in_place: bool = False

    def __post_init__(self) -> None:
        _integer("every_steps", self.every_steps, 0)
        _integer("keep", self.keep, 1)
        _integer("keep_every_steps", self.keep_every_steps, 0)
        if self.keep_every_steps and (not self.every_steps or self.keep_every_steps % self.every_steps):
            raise ConfigError(
                f"keep_every_steps: expected a multiple of every_steps ({self.every_steps}), as only what is saved can "
                f"be kept, got {self.keep_every_steps}"
            )

        if self.in_place and not self.every_steps:
            raise ConfigError("in_place: expected every_steps > 0, as it is for checkpoints on the way, got 0")
        if not self.every_steps:
            _refuse_idle(self, "every_steps > 0 beside it, as it is for checkpoints on the way", "wait")
        if self.in_place:
            _refuse_idle(self, "in_place = false beside it, as training waits for checkpoints in place anyway", "wait")

    @property
    def saves(self) -> bool:
        """Whether anything is saved at all."""
        return self.at_end or self.every_steps > 0

    @property
    def stages(self) -> bool:
        """Whether checkpoints on the way are to be written beside training."""
        return self.every_steps > 0 and not (self.wait or self.in_place)

    def is_in_place(self, step: int) -> bool:
        """Whether the checkpoint of a step on the way is to be in place."""
        return self.in_place and not (self.keep_every_steps and step % self.keep_every_steps == 0)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Settings of where figures go besides metrics.jsonl, which is always written.

    Attributes:
        tensorboard: Also write TensorBoard events into the run's folder.
        wandb: Also log to this Weights & Biases project; "" for none.
        every_steps: Steps between two records there.
    """

    tensorboard: bool = False
    wandb: str = ""
    every_steps: int = 1

    def __post_init__(self) -> None:
        _integer("every_steps", self.every_steps, 1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Configuration of a whole run.

    Attributes:
        machine: "probe" (the cached probe of this host), a name in the catalog, or the path of a machine file.
        layout: How ranks share a step, as "dp4", "dp4,zero3" or "pp2" (see ``lading.plan``); one without dp, as
            "zero3", has as many replicas as there are ranks for; "" lets the plan choose how those of the job do.
        threads: Compute threads; 0 for every processor this process may use, or its share of them where ranks share a
            host.
        seed: Seed of the weights and of the order of the data.
        out: Folder of everything the run writes.
    """

    model: ModelConfig
    data: DataConfig
    optimization: Optimization
    memory: MemoryConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig | None = None
    freeze: FreezeConfig | None = None
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    machine: str = "probe"
    layout: str = ""
    threads: int = 0
    seed: int = 0
    out: str = "out/run"

    def __post_init__(self) -> None:
        _text("machine", self.machine)
        _integer("threads", self.threads, 0)
        _integer("seed", self.seed, 0, (1 << 63) - 1)
        _text("out", self.out)
        if self.data.source == STDLIB and self.data.kind == "text" and not (self.validation and self.validation.source):
            needed = f"JSON lines or Parquet beside it, found source {STDLIB!r}"
            _refuse_idle(self.data, needed, "text_field", "label_field", within="data.")
        if self.validation is not None and (self.data.kind == "random" or self.data.source == SYNTHETIC):
            raise ConfigError(
                "validation: expected data in files, found numbers that are made up anew for each step, of which "
                "nothing can be held out; leave it out"
            )

    @property
    def kept_checkpoints(self) -> int:
        """Number of checkpoints that stay: the newest ones, those of every so many steps, and the best.

        0 where nothing is saved.
        """
        best = self.validation is not None and self.validation.keep_best
        saved, every = self.checkpoint, self.checkpoint.keep_every_steps
        return saved.keep * saved.saves + (self.optimization.steps // every if every else 0) + best

    def most_checkpoints(self, first: int, newest: Collection[int], *, has_best: bool) -> int:
        """Count the checkpoints that are there at once, at most, in the rest of a run; one that is being written, too.

        Args:
            first: Steps that were done before.
            newest: Steps of the checkpoints that are there, but the best.
            has_best: Whether a best one is there.
        """
        saved, total = self.checkpoint, self.optimization.steps
        each = saved.every_steps or total + 1
        due = range((first // each + 1) * each, total + 1, each)
        at_end = {total} - set(due[-1:]) if saved.at_end and first < total else set[int]()
        stay = self._staying(newest, due, set(), saved.keep)
        most = self._staying(newest, due, at_end, saved.keep + 1)  # while the last is written
        if self.validation is None or not self.validation.keep_best:
            return max(most, len(newest)) + has_best
        evaluations = -(-total // self.validation.every_steps) - first // self.validation.every_steps
        best = min(has_best + evaluations, 2)  # the next one is written before the last is deleted
        return max(most + min(best, 1), stay + best, len(newest) + has_best)

    def _staying(self, newest: Collection[int], due: range, at_end: set[int], keep: int) -> int:
        """Count the checkpoints among those there and those to come that are the ``keep`` newest, or kept for good."""
        every = self.checkpoint.keep_every_steps
        last = {*newest, *due[-keep:], *at_end}
        stays = set(sorted(last)[-keep:])
        if not every:
            return len(stays)
        kept_steps = {step for step in newest if step % every == 0} | {step for step in at_end if step % every == 0}
        first = -(-due.start // every) * every
        return len(stays | kept_steps | set(range(first, due.stop, every)))

    @property
    def num_threads(self) -> int:
        """Number of compute threads, with ``threads`` 0 resolved."""
        return self.threads or processors()


T = TypeVar("T")
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


@dataclass(frozen=True)
class _Origin:
    """Origin of values, for errors: a file, and the dotted keys that the command line set."""

    file: str
    overrides: frozenset[str] = frozenset()

    def of(self, key: str) -> str:
        inside = any(key == k or key.startswith(k + ".") for k in self.overrides)
        return "command line" if inside else self.file


def load_run(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run from TOML, then apply overrides such as ``"optimization.steps=20"``.

    The value of an override is read as TOML; what is not TOML is taken as text (``schedule=cosine``).

    Raises:
        ConfigError: file missing or not TOML; key unknown, missing, of the wrong type or out of range.
    """
    name = os.fspath(path)
    data = read_toml(Path(path), "a run configuration")
    origin = _Origin(name, frozenset(_override(data, text) for text in overrides))
    run = _build(RunConfig, data, "", origin)
    each, together = run.optimization.accumulation, run.optimization.micro_batches
    if together and each != 1:
        raise ConfigError(
            f"{origin.of('optimization.micro_batches')}: optimization.micro_batches: expected it in place of "
            f"accumulation, as it counts those of all replicas together, got micro_batches = {together} and "
            f"accumulation = {each}; leave one out"
        )
    return run


def run_to_dict(run: RunConfig) -> dict[str, Any]:
    """Convert a run to plain JSON values, which ``run_from_dict`` reads back."""
    table = dataclasses.asdict(run)
    table["optimization"]["optimizer"] = rule_to_dict(run.optimization.optimizer)
    return table


def run_from_dict(data: object, origin: str = "run") -> RunConfig:
    """Read the run that ``run_to_dict`` wrote; raises as ``load_run``, with ``origin`` in errors."""
    return _build(RunConfig, data, "", _Origin(origin))


def _override(data: dict[str, Any], text: str) -> str:
    """Set one ``key=value`` in parsed TOML; returns the key."""
    key, equals, value = text.partition("=")
    key = key.strip()
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"command line: expected key=value such as optimization.steps=20, got {text!r}")
    table = data
    for depth, part in enumerate(parts[:-1], 1):
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"command line: cannot set {key!r}: {'.'.join(parts[:depth])!r} is not a table")
        table = cast("dict[str, Any]", inner)
    table[parts[-1]] = _override_value(key, value.strip())
    return key


def _override_value(key: str, text: str) -> object:
    try:
        parsed = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in ("'", '"', "[", "{"):
            raise ConfigError(f"command line: {key}: {text!r} is not a TOML value: {error}") from error
        return text
    plain = parsed.keys() == {"v"} and isinstance(parsed["v"], bool | int | float | str | list | dict)
    return cast(object, parsed["v"]) if plain else text


def _build(cls: type[T], data: object, prefix: str, origin: _Origin) -> T:
    """Make a ``cls`` from a table; ``prefix`` is "" or a dotted key with its closing dot."""
    where = origin.of(prefix.rstrip("."))
    if not isinstance(data, dict):
        name = f"{prefix.rstrip('.')}: " if prefix else ""
        raise ConfigError(f"{where}: {name}expected a table, got {data!r}")
    table = cast("dict[str, object]", data)
    fields = {f.name: f for f in dataclasses.fields(cast(Any, cls))}
    is_rule = issubclass(cast(type, cls), ParameterRule)
    section = (*fields, "rule") if is_rule else fields
    for key in [key for key in table if key not in fields]:
        short = key[:60]
        raise ConfigError(
            f"{origin.of(prefix + key)}: unknown key {prefix + short!r}{_nearest_key(prefix, short, section)}"
        )
    hints = get_type_hints(cls)
    values = {key: _convert(hints[key], value, prefix + key, origin) for key, value in table.items()}
    required = [n for n, f in fields.items() if f.default is MISSING and f.default_factory is MISSING]
    for key in required:
        if key not in values:
            raise ConfigError(f"{where}: missing key {prefix + key!r}: expected {_expected(hints[key])}")
    try:
        return cls(**values)
    except ConfigError as error:
        at_fault = prefix + str(error).partition(":")[0]
        raise ConfigError(f"{origin.of(at_fault)}: {prefix}{error}") from error


def _convert(hint: Any, value: object, key: str, origin: _Origin) -> object:
    """Convert ``value`` to the annotated type; an integer is a number too, true and false are only themselves."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for kind in kinds:
        if kind is ParameterRule:
            return _rule(value, key + ".", origin)
        if dataclasses.is_dataclass(kind) and value is not None:
            return _build(cast("type[Any]", kind), value, key + ".", origin)
        if get_origin(kind) is Literal and value in get_args(kind):
            return value
        if get_origin(kind) is dict and isinstance(value, dict):
            items = cast("dict[str, object]", value).items()
            return {k: _convert(get_args(kind)[1], v, f"{key}.{k}", origin) for k, v in items}
        if get_origin(kind) is list and isinstance(value, list):
            items = enumerate(cast("list[object]", value))
            return [_convert(get_args(kind)[0], item, f"{key}[{number}]", origin) for number, item in items]
        if type(value) is kind:
            return value
    if float in kinds and type(value) is int and abs(value) <= LARGEST:
        return float(value)
    raise ConfigError(f"{origin.of(key)}: {key}: expected {_expected(hint)}, got {short_repr(value)}")


def _rule(value: object, prefix: str, origin: _Origin) -> ParameterRule:
    """Make a rule from a table of its settings, with its name unless it is the default's."""
    if not isinstance(value, dict):
        return _build(parameter_rule(DEFAULT), value, prefix, origin)
    settings = dict(cast("dict[str, object]", value))
    name = settings.pop("rule", DEFAULT)
    if not isinstance(name, str):
        raise ConfigError(f"{origin.of(prefix + 'rule')}: {prefix}rule: expected a text, got {short_repr(name)}")
    try:
        kind = parameter_rule(name)
    except ConfigError as error:
        raise ConfigError(f"{origin.of(prefix + 'rule')}: {prefix}{error}") from error
    known, usual = ({f.name for f in dataclasses.fields(cast(Any, each))} for each in (kind, parameter_rule(DEFAULT)))
    for key in settings:
        if key in usual - known:
            raise ConfigError(
                f"{origin.of(prefix + key)}: unknown key {prefix + key!r}, which {DEFAULT} has and {name} has not; "
                f"expected one of {', '.join(sorted({*known, 'rule'}))}"
            )
    return _build(kind, settings, prefix, origin)


def _expected(hint: Any) -> str:
    """Say in words what to write for an annotated type."""
    if hint is ParameterRule or dataclasses.is_dataclass(hint) or get_origin(hint) is dict:
        return "a table"
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is list:
        return f"an array, each {_expected(get_args(hint)[0])}"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_expected(kind) for kind in get_args(hint) if kind is not types.NoneType)
    return _WORDS[hint]


def _keys(cls: type, prefix: str = "") -> Iterator[str]:
    """List every dotted key of a configuration, tables included."""
    hints = get_type_hints(cls)
    for name in [f.name for f in dataclasses.fields(cast(Any, cls))]:
        yield prefix + name
        for kind in get_args(hints[name]) or (hints[name],):
            if kind is ParameterRule:
                yield from (f"{prefix}{name}.{key}" for key in ("rule", *_keys(parameter_rule(DEFAULT))))
            elif dataclasses.is_dataclass(kind):
                yield from _keys(cast(type, kind), f"{prefix}{name}.")


def _nearest_key(prefix: str, key: str, section: Collection[str]) -> str:
    """Nearest spelling among all keys; this section's win over others of the same name, then the first.

    Args:
        section: Keys of this section, which are those of the rule where it is an optimizer's.
    """
    section_keys = [f"{prefix}{name}" for name in section]
    elsewhere = [k for k in _keys(RunConfig) if not (k.startswith(prefix) and "." not in k[len(prefix) :])]
    by_name = {k.split(".")[-1]: k for k in (*reversed(elsewhere), *section_keys)}
    for match in difflib.get_close_matches(key, by_name, 1):
        return f"; did you mean {by_name[match]!r}?"
    return f"; expected one of {', '.join(sorted(section_keys))}"
