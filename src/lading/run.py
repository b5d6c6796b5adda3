"""Configured runs, from a TOML to what the loop needs: model, data, initial values, captured step, Program.

Nothing is planned here: ``prepare_plan`` takes a saved plan as it is. ``lading.prepare`` makes one.
"""

from __future__ import annotations

import dataclasses
import importlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from lading.alone import num_ranks, rank_number, ranks_here
from lading.catalog.load import machine_from_dict
from lading.catalog.models import resolved
from lading.config import MODELS, STDLIB, SYNTHETIC, DataConfig, ModelConfig, RunConfig, run_from_dict
from lading.errors import ConfigError, did_you_mean
from lading.ir.graph import StepGraph
from lading.ir.layout import parse_layout
from lading.ir.machine import Machine
from lading.ir.plan import Plan
from lading.ir.program import Program
from lading.ir.timeline import Timeline
from lading.ir.together import number_alike
from lading.memory.restore import as_planned, predicted_timeline, programs_of, restore_program, step_of
from lading.models import hugging_face
from lading.models.dit import DitConfig
from lading.models.hugging_face import Fill, Sink
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model, model_class
from lading.models.tasks import LOSSES
from lading.models.twins import load_named
from lading.models.weight_files import FileTensor, StackedTensor
from lading.permissions import check_code, check_path
from lading.runtime import data
from lading.runtime.arrays import ArrayDataset, RandomDataset, inputs_of, made_up
from lading.runtime.data import Dataset, LatentDataset, TextDataset
from lading.runtime.documents import files_of
from lading.runtime.host import check_host
from lading.tracing.initial import Deferred, defer
from lading.tracing.trace import capture

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


@dataclass(frozen=True)
class CapturedRun:
    """Captured step of a run, for which any number of plans can be made.

    Attributes:
        initial: The model on fake tensors, with the recipe of its initial values.
        captured: Graph of one micro-batch. ``graph`` is that of the whole step.
        evaluation: Graph of a micro-batch as ``eval()`` has it, where the run is validated and it is another one.
        evaluation_graph: Graph of a whole evaluation.
    """

    initial: Deferred
    captured: StepGraph
    graph: StepGraph
    evaluation: StepGraph | None = None
    evaluation_graph: StepGraph | None = None

    @property
    def others(self) -> list[StepGraph]:
        """Captures beside the training step's, as ``lading.Trainer`` takes them."""
        return [] if self.evaluation is None else [self.evaluation]


@dataclass(frozen=True)
class Prepared:
    """A planned run: its configuration, its captured step, its plan and its Program.

    Attributes:
        notes: Sentences on what of the run's budgets there may not be room for now.
    """

    run: RunConfig
    step: CapturedRun
    plan: Plan
    program: Program
    notes: tuple[str, ...] = ()

    @cached_property
    def predicted(self) -> Timeline:
        """Predicted Timeline of one step of this rank, as it was planned."""
        return predicted_timeline(self.plan.of_rank(rank_number()), self.program)


def prepare_plan(plan: Plan, *, to_run: bool = False) -> Prepared:
    """Prepare a run from a saved plan, checked against the run that it records.

    Args:
        to_run: Refuse a plan made for another host; to look at one, any host will do.

    Raises:
        ConfigError: the plan was made without a run, for another model, or for another host; or its Program is not safe
            to run.
    """
    if plan.request.run is None:
        raise ConfigError("the plan records no run; make it with: lading plan RUN.toml")
    run = run_from_dict(plan.request.run, "the plan's run")
    if to_run:
        check_host(plan.request.host_id)
    torch.set_num_threads(run.num_threads)
    machine = machine_from_dict(plan.request.machine_table, "the plan's machine")
    step = capture_run(run, machine)
    if plan.ranks == 1:
        program = restore_program(plan, as_planned(plan, step.graph), machine)
    else:
        program = programs_of(plan.of_rank(rank_number()), step.captured, step.others)[0]
    if to_run and run.kept_checkpoints and machine.device.kind == "cpu" and not program.save_bytes:
        raise ConfigError(
            "the plan counts no memory for saving, and its run saves; plan again, or set checkpoint.every_steps to 0, "
            "and checkpoint.at_end and validation.keep_best to false there (and leave checkpoint.keep and wait out)"
        )
    return Prepared(run, step, plan, program)


def programs_of_ranks(prepared: Prepared) -> list[Program]:
    """Programs of the ranks along a pipeline, in order; of other ranks the one that all have.

    Raises:
        ConfigError: as ``lading.memory.restore.restore_program``.
    """
    plan, step = prepared.plan, prepared.step
    mine = plan.of_rank(rank_number())
    return [
        prepared.program if stage_plan is mine else programs_of(stage_plan, step.captured, step.others)[0]
        for stage_plan in (plan, *plan.peers)
    ]


def sharing_processors(run: RunConfig, ranks: int = 0) -> RunConfig:
    """Copy of a run whose threads, where it sets none, are a rank's share of the processors.

    Args:
        ranks: Ranks that will share this host; 0 for those of the job that do.
    """
    count = ranks or (ranks_here() if num_ranks()[0] > 1 else 1)
    if count == 1 or run.threads:
        return run
    return dataclasses.replace(run, threads=max(1, run.num_threads // count))


def sharing_batches(run: RunConfig, ranks: int) -> RunConfig:
    """Copy of a run whose accumulation, where it sets ``micro_batches``, is a replica's share of them.

    Args:
        ranks: Ranks that train it.

    Raises:
        ConfigError: they cannot be shared equally.
    """
    count = run.optimization.micro_batches
    replicas = parse_layout(run.layout, ranks).dp if run.layout else ranks
    if count % replicas:
        raise ConfigError(
            f"optimization.micro_batches: expected a multiple of the {replicas} replicas, got {count}; set one, or "
            "start another number of ranks"
        )
    if not count:
        return run
    if (each := run.optimization.accumulation) not in (1, count // replicas):
        raise ConfigError(
            f"optimization.micro_batches: expected it in place of accumulation, as it counts those of all {replicas} "
            f"replicas together, got micro_batches = {count} and accumulation = {each}; leave one out"
        )
    return dataclasses.replace(run, optimization=dataclasses.replace(run.optimization, accumulation=count // replicas))


def capture_run(run: RunConfig, machine: Machine, initial: Deferred | None = None) -> CapturedRun:
    """Build a run's model on fake tensors and capture its step for the machine's kernels; nothing is computed.

    Args:
        initial: The model, where it was built before; parameters that do not require a gradient are frozen.
    """
    run = resolved(run)
    chosen = run.optimization
    initial = initial or defer(lambda: build(run.model, chosen.precision))
    layers_to_freeze(run, initial.model)
    record = partial(capture, initial.model, example_batch(run), loss_of(run.model), accumulation=chosen.accumulation)
    expanded = partial(
        step_of,
        machine=machine,
        clip_norm=chosen.clip_norm,
        master_weights=has_masters(run),
        optimizer=chosen.optimizer,
        matrices=chosen.matrices,
    )
    captured = record()
    step = expanded(captured)
    if run.validation is None or step.training_only() is None:
        return CapturedRun(initial, captured, step)
    evaluation = record(evaluation=True)
    step, evaluation_step = number_alike([step, expanded(evaluation)])
    return CapturedRun(initial, captured, step, evaluation, evaluation_step)


def layers_to_freeze(run: RunConfig, model: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """Modules of each layer that a run may freeze, in the order of the forward.

    Raises:
        ConfigError: the model has no module of such a name.
    """
    named = dict(model.named_modules())
    layers = [layer.split() for layer in run.freeze.layers] if run.freeze else []
    if unknown := [name for layer in layers for name in layer if name not in named]:
        raise ConfigError(
            f"freeze.layers: expected modules of the model {run.model.name!r}, got {unknown[0]!r}"
            f"{did_you_mean(unknown[0], named)}"
        )
    return [[named[name] for name in layer] for layer in layers]


def has_masters(run: RunConfig) -> bool:
    """Whether parameters of less than 32 bits have float32 masters."""
    return run.optimization.precision == "bf16"


def build(model: ModelConfig, precision: str = "fp32") -> torch.nn.Module:
    """Build the model of a configuration, in training mode, initialised from torch's generator.

    Args:
        precision: "fp32" or "bf16", the dtype in which it is made.

    Raises:
        ConfigError: unknown name or size, or a module or file that cannot be used.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return _built(model, dtype)
    finally:
        torch.set_default_dtype(before)


def _built(model: ModelConfig, dtype: torch.dtype) -> torch.nn.Module:
    if model.name in MODELS:
        return build_model(model.name, **model.sizes)
    if model.is_hugging_face:
        return hugging_face.build_from(model, dtype)
    check_code(model.name, "model.name")
    module, _, function = model.name.partition(":")
    try:
        built = getattr(importlib.import_module(module), function)(**model.sizes)
    except Exception as error:  # code of the user's: whatever it raises is told as theirs
        raise ConfigError(
            f"model.name {model.name!r}: expected a function that returns a module, it fails: "
            f"{type(error).__name__}: {error}{_where(error, __file__)}"
        ) from error
    if not isinstance(built, torch.nn.Module):
        raise ConfigError(f"model.name {model.name!r}: expected a torch.nn.Module, got {type(built).__name__}")
    return built


def _where(error: Exception, here: str) -> str:
    """Name the line of the user's code that raised an error, in words; "" where the call itself raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "" if last.filename == here or last.filename.startswith("<") else f" ({last.filename}, line {last.lineno})"


def task_of(model: ModelConfig) -> str:
    """Task that a model learns: one of ``lading.config.Task``, or "denoising" for a diffusion model.

    Raises:
        ConfigError: another task than the model can learn.
    """
    if model.is_hugging_face:
        return hugging_face.task_of(model, hugging_face.read_config(model))
    task = "denoising" if model.name == "dit" else "causal-lm"
    if model.task == "own" and model.name not in MODELS:
        return "own"
    if model.task not in ("auto", task):
        raise ConfigError(f"model.task: {model.name!r} learns {task!r}, got {model.task!r}; leave it out")
    return task


def loss_of(model: ModelConfig) -> Loss:
    """Loss function of a model: a reference model's own, its task's for one of Hugging Face, else of the next byte."""
    if model.name in MODELS:
        return model_class(model.name).loss
    task = task_of(model)
    return LOSSES[task] if model.is_hugging_face or task == "own" else next_byte_loss


def tokenizer_of(run: RunConfig) -> Path | None:
    """Tokenizer file of a run; None for one token a byte."""
    if run.data.tokenizer == "bytes":
        return None
    if run.data.tokenizer != "auto":
        check_path(run.data.tokenizer, "data.tokenizer")
        return Path(run.data.tokenizer)
    if not run.model.is_hugging_face:
        return None
    path = Path(run.model.weights or Path(run.model.name).parent) / "tokenizer.json"
    return path if path.is_file() else None


def example_batch(run: RunConfig) -> dict[str, torch.Tensor]:
    """Batch of the shapes and dtypes of a run's batches; the values mean nothing."""
    if (task := _task(run)) == "denoising":
        return _latents(run).batch(0, 0)
    if task == "own":
        return made_up(inputs_of(run.data), run.data.batch_size, run.seed, 0, 0)
    return data.example_batch(task, run.data, tokenizer_of(run))


def dataset_of(run: RunConfig, module: torch.nn.Module, *, held_out: bool = False) -> Dataset:
    """Open the data of a run, for its model, which may be fake: what it trains on, or what it is validated on.

    Args:
        held_out: Whether to open the validation data, of a run that has ``validation``.

    Raises:
        ConfigError: the text cannot be read, is too short, or is not the model's kind of text; or a file of
            ``validation.source`` is trained on.
        StorageError: the run's folder cannot be written.
    """
    if (task := _task(run)) == "denoising":
        return _latents(run)
    if run.data.kind == "random":
        return RandomDataset(run.data, seed=run.seed)
    share = run.validation.share if run.validation else 0.0
    if held_out and not share:
        run = dataclasses.replace(run, data=_validation_data(run))
    dataset = ArrayDataset(run.data, Path(run.out), seed=run.seed) if task == "own" else _text_of(run, task, module)
    return dataset.part(share, held_out=held_out) if share else dataset


def check_sources(run: RunConfig) -> None:
    """Look for the files of a run's data, which are read once it is planned.

    Raises:
        ConfigError: a source has none.
    """
    if run.data.kind != "random" and run.data.source not in (STDLIB, SYNTHETIC):
        files_of(run.data.source)
    if run.validation is not None and run.validation.source:
        files_of(run.validation.source, "validation.source")


def _validation_data(run: RunConfig) -> DataConfig:
    """Settings of a run's validation data where they have a source of their own."""
    source = run.validation.source if run.validation else ""
    trained_on = {path.resolve() for path in files_of(run.data.source)}
    if overlapping := [path for path in files_of(source, "validation.source") if path.resolve() in trained_on]:
        raise ConfigError(
            f"validation.source: expected files that are not trained on, found {overlapping[0]} in data.source, too; "
            "leave it out of one of them, or set validation.share instead"
        )
    return dataclasses.replace(run.data, source=source)


def _text_of(run: RunConfig, task: str, module: torch.nn.Module) -> TextDataset:
    if task != "classification" and run.data.label_field != DataConfig.label_field:
        raise ConfigError(
            f"data.label_field: expected model.task 'classification' beside it, found {task!r}, which reads no labels; "
            f"got {run.data.label_field!r}; leave it out"
        )
    config = getattr(module, "config", None)
    embedding = module.get_input_embeddings() if run.model.is_hugging_face else None  # pyright: ignore[reportCallIssue]
    return TextDataset(
        run.data,
        Path(run.out),
        seed=run.seed,
        task=task,
        tokenizer=tokenizer_of(run),
        vocabulary=getattr(embedding, "num_embeddings", None) or getattr(config, "vocab_size", None),
        num_labels=getattr(config, "num_labels", None),
    )


def _task(run: RunConfig) -> str:
    """Task that a run's model learns.

    Raises:
        ConfigError: the run's kind of data cannot be learned so.
    """
    task, kind = task_of(run.model), run.data.kind
    if (task == "own") == (kind == "text"):
        if kind == "text":
            raise ConfigError(
                f"data.kind: {run.model.name!r} is not made for text; expected 'arrays' (npz, safetensors or Parquet "
                "files whose columns its forward takes) or 'random' with data.inputs, got 'text'"
            )
        raise ConfigError(
            f"data.kind: {run.model.name!r} learns {task!r} from text, got {kind!r}; set model.task = 'own' for a "
            "model whose forward takes the columns and gives the loss"
        )
    return task


def _latents(run: RunConfig) -> LatentDataset:
    if run.data.source != SYNTHETIC:
        raise ConfigError(
            f"data.source: {run.model.name!r} learns latents, expected {SYNTHETIC!r}, got {run.data.source!r}"
        )
    sizes = DitConfig(**run.model.sizes)  # pyright: ignore[reportArgumentType]
    if run.data.sequence_length != sizes.patches_per_side**2:
        raise ConfigError(
            f"data.sequence_length: expected the patches of an image, {sizes.patches_per_side**2}, "
            f"got {run.data.sequence_length}"
        )
    shape = (sizes.channels, sizes.image_size, sizes.image_size)
    return LatentDataset(shape, sizes.num_classes, batch_size=run.data.batch_size, seed=run.seed)


def load_weights(
    model: ModelConfig, module: torch.nn.Module, sink: Sink, fill: Fill | None = None, folder: str = ""
) -> list[str]:
    """Hand the weights of a folder to ``sink`` and ``fill``; returns notes on what was done with them.

    Args:
        module: The model, which may be fake.
        sink, fill: As ``lading.models.hugging_face.load_weights`` takes them.
        folder: Folder of the weights; "" is the model's own.

    Raises:
        ConfigError, StorageError: as those of ``lading.models``.
    """
    if model.is_hugging_face:
        drawn = hugging_face.load_weights(model, module, sink, fill=fill, folder=folder)
    else:
        drawn = list[str]()
        load_named(Path(folder), module, sink, fill)
    names = ", ".join(drawn[:3]) + (f" and {len(drawn) - 3} more" if len(drawn) > 3 else "")
    dtypes = hugging_face.weights_dtype(model, folder)
    read = f"weights from {folder or model.weights} ({dtypes})"
    return [read, *([f"drawn, as the files lack them: {names}"] if drawn else [])]


def initial_values(
    run: RunConfig, initial: Deferred, sink: Sink, *, fill: Fill | None = None, folder: str = ""
) -> list[str]:
    """Hand the values that a run starts from on, one after another; returns notes on where they come from.

    What a folder holds comes from there, the rest is made as building the model would make it. Random numbers of the
    steps start from the seed again after weights were loaded, however many it took to build the model.

    Args:
        folder: Folder of the weights; "" is the model's own, if it has one.
    """
    if not (folder or run.model.weights):
        initial.materialize(run.seed, sink)
        return []
    loaded: set[str] = set()

    def take(name: str, value: torch.Tensor) -> None:
        loaded.add(name)
        sink(name, value)

    def take_from(name: str, numbers: FileTensor | StackedTensor) -> None:
        assert fill is not None, "asked for only where it is given"
        loaded.add(name)
        fill(name, numbers)

    notes = load_weights(run.model, initial.model, take, None if fill is None else take_from, folder)
    initial.keeping(initial.named.keys() - loaded).materialize(run.seed, sink)
    torch.manual_seed(run.seed)
    return notes


def built_whole(run: RunConfig) -> torch.nn.Module:
    """Build the model of a run with the values it starts from, all in memory, as plain PyTorch would have it."""
    torch.manual_seed(run.seed)
    module = build(run.model, run.optimization.precision)
    if run.model.weights:
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}

        def copy(name: str, value: torch.Tensor) -> None:
            with torch.no_grad():
                tensors[name].copy_(value)

        load_weights(run.model, module, copy)
        torch.manual_seed(run.seed)
    return module
