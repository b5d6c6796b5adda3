"""From a run's configuration to everything the loop needs: model, batch, machine, graph, plan, program."""

from __future__ import annotations

import dataclasses
import importlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from lading.capture.initial import Deferred, defer
from lading.capture.trace import capture
from lading.catalog.load import as_machine, machine_from_dict
from lading.catalog.models import resolved
from lading.checkpoint.state import CHUNK_BYTES
from lading.config import MODELS, SYNTHETIC, ModelConfig, RunConfig, run_from_dict, run_to_dict
from lading.errors import ConfigError, StorageError, check_type
from lading.grouping import Matrices, matrices_from
from lading.hosts import machine_of
from lading.ir.graph import StepGraph
from lading.ir.machine import Machine
from lading.ir.plan import Plan
from lading.ir.program import Program
from lading.ir.reporting import SILENT, PlanProgress
from lading.ir.retarget import retarget
from lading.ir.step import expand
from lading.ir.timeline import Timeline
from lading.ir.updates import grouped
from lading.models import hugging_face
from lading.models.dit import DitConfig
from lading.models.loss import next_byte_loss
from lading.models.registry import build_model, model_class
from lading.models.tasks import LOSSES
from lading.planner.api import KEPT_BYTES, SAVE_BYTES, Sketch, make_program, predict, sketch_plan
from lading.planner.cache import cache_folder, cached_plan
from lading.planner.policies import Policy
from lading.report.progress import planning_progress
from lading.runtime import data
from lading.runtime.arrays import ArrayDataset, RandomDataset, inputs_of, made_up
from lading.runtime.cuda import Cuda
from lading.runtime.data import Dataset, LatentDataset, TextDataset
from lading.runtime.host import host_id
from lading.runtime.kernel_memory import kernel_memory
from lading.runtime.kernels import workspace_of
from lading.runtime.values import BOUNCE_BYTES, named_tensors
from lading.runtime.workspace import measured_workspace
from lading.units import parse_bytes, share_or_bytes

#: Setting of a plan whose scratch was measured, or is that of a GPU: the largest of its operations.
_SCRATCH = "workspace_bytes"
#: Manifest, checksums and code of saving: once, and for each tensor. Measured: 0.1 MiB for a mixture of experts of two
#: layers, 0.7 for a Llama of 6 that gave no freed scratch back before, torch 2.13.
_SAVE_ONCE_BYTES, _SAVE_BYTES_PER_TENSOR = 256 << 10, 1 << 10

#: A search for a plan shorter than this shows nothing.
_QUICK_S = 2.0

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


@dataclass(frozen=True)
class Prepared:
    """A planned run.

    Attributes:
        initial: The model on fake tensors, with the recipe of its initial values.
        captured: One micro-batch. ``graph`` is the whole step in the order of the plan.
    """

    run: RunConfig
    initial: Deferred
    captured: StepGraph
    graph: StepGraph
    machine: Machine
    plan: Plan
    program: Program
    predicted: Timeline

    @property
    def keep_all_bytes(self) -> int:
        """Device bytes that keeping everything would need, as predicted."""
        return int(self.plan.settings["keep_all_bytes"])


def plan(  # noqa: PLR0913  the public entry spells out all it takes
    graph: StepGraph,
    machine: Machine | str | Path,
    *,
    budget: str | float,
    disk_budget: str | float | None = None,
    policy: str | Policy = "residency",
    clip_norm: float = 0.0,
    master_weights: bool = False,
    matrices: Matrices | None = None,
    compile: bool = False,
    cache: bool = True,
) -> Plan:
    """Plan the training step of a captured model with AdamW, or with a rule for its matrices and AdamW for the rest.

    Args:
        graph: From ``lading.capture``.
        machine: What it is planned for: a name of the catalog ("h100"), the path of a file that ``lading probe`` wrote,
            or a ``lading.Machine``.
        budget: Device memory: "256MB", a number of bytes, or a share ("50%" or 0.5) of what keeping everything needs.
            Numbers that could mean several things, such as 1 or 50, are refused.
        disk_budget: Bytes allowed on disk ("20GB"); 0 for none; None allows what the machine has.
        policy: "keep-all", "checkpoint-every-block" or "residency"; or ``policy(graph, lifetimes) -> choices``.
        clip_norm: Limit of the global gradient norm; 0, the default, switches it off.
        master_weights: Give each bfloat16 or float16 parameter a float32 master, as ``lading.optim.master`` does.
        matrices: Muon, Shampoo or SOAP, and which parameters they move (``lading.Matrices``).
        compile: Fuse runs of light operations: faster, close to plain PyTorch's numbers, not equal to the bit.
        cache: Take the plan from the user's cache folder if an equal one was made before, which is said on standard
            error, and keep it there; False plans anew. A search of more than two seconds says there what it does.

    Raises:
        PlanInfeasible: nothing fits; says what binds, how much is missing and what would do.
        ConfigError: an argument means nothing.
    """
    machine = as_machine(machine)
    check_type("graph", graph, StepGraph, "what lading.capture returns")
    if matrices is not None:
        check_type("matrices", matrices, Matrices, 'lading.Matrices(rule="muon", lr=0.02) or None')
    check_type("master_weights", master_weights, bool, "True or False")
    check_type("compile", compile, bool, "True or False")
    share_or_bytes(budget, 1, "budget")  # refused before anything is planned
    parse_bytes(0 if disk_budget is None else disk_budget, "disk_budget")
    step = step_of(graph, machine, clip_norm=clip_norm, master_weights=master_weights, matrices=matrices)
    with planning_progress(after_s=_QUICK_S) as progress:
        memory = _kernel_memory(step, machine, progress)
        planned = cached_plan(
            step,
            machine,
            folder=cache_folder() if cache else None,
            progress=progress,
            budget=budget,
            disk_budget=disk_budget,
            policy=policy,
            expansion={
                "clip_norm": clip_norm,
                "master_weights": float(master_weights),
                **memory.settings,
                "compile": float(compile),
                SAVE_BYTES: float(_save_bytes(step, machine)),
            },
            workspace_bytes=memory.scratch_bytes,
        )
    return _with_matrices(memory.told(planned.plan), graph, matrices)


def step_of(
    captured: StepGraph, machine: Machine, *, clip_norm: float, master_weights: bool, matrices: Matrices | None = None
) -> StepGraph:
    """The whole step of a captured micro-batch, with the operations of the machine's device.

    Raises:
        ConfigError: an operation has no kernel there, or the rule for matrices cannot move what it is told to.
    """
    step = expand(captured, clip_norm=clip_norm, master_weights=master_weights, matrices=matrices)
    return retarget(step, machine.device.kind, flash="bfloat16" in machine.device.peak_flops_per_s)


def lowered(plan: Plan, graph: StepGraph) -> Program:
    """The Program of a plan for the graph it was made from.

    Raises:
        ConfigError: it was made from another.
    """
    machine = machine_from_dict(plan.machine, "the plan's machine")
    masters = bool(plan.settings.get("master_weights", 0.0))
    matrices = matrices_from(plan.matrices) if plan.matrices is not None else None
    step = step_of(graph, machine, clip_norm=plan.settings["clip_norm"], master_weights=masters, matrices=matrices)
    return make_program(plan, step, machine, workspace_bytes=_planned_scratch(plan, step))


@dataclass(frozen=True)
class _KernelMemory:
    """What a step's kernels take beside its tensors.

    Attributes:
        scratch_bytes: Of each operation, while it runs.
        settings: What a plan remembers of it: the largest scratch, which is all that lowering it again asks for, and
            what stays in the process.
        assumption: What was not measured, in words.
    """

    scratch_bytes: Sequence[int]
    settings: Mapping[str, float] = field(default_factory=lambda: {})
    assumption: str = ""

    def told(self, plan: Plan) -> Plan:
        """The plan with what was not measured among its assumptions."""
        said = (self.assumption,) if self.assumption else ()
        return dataclasses.replace(plan, assumptions=(*plan.assumptions, *said))


def _kernel_memory(graph: StepGraph, machine: Machine, progress: PlanProgress = SILENT) -> _KernelMemory:
    """Measured where the machine is this host, else worked out from the bindings of the operations."""
    kind, here = machine.device.kind, machine.host_id == host_id()
    if kind == "cuda" and here and torch.cuda.is_available():
        return _recorded(measured_workspace(graph, Cuda()))
    if kind != "cpu":
        return _recorded(workspace_of(graph, kind))
    if not here:
        return _KernelMemory(workspace_of(graph))
    progress.update(0.0, "measuring what kernels take beside tensors")
    plans = cache_folder()
    try:
        measured = kernel_memory(
            graph, machine.device.num_threads or torch.get_num_threads(), cache=plans and plans.with_name("kernels")
        )
    except StorageError as error:
        said = f"memory of kernels beside tensors is worked out by cause, not measured: {error}"
        return _KernelMemory(workspace_of(graph), assumption=said)
    names = ", ".join(measured.unmeasured)
    said = f"scratch of {names} is worked out from shapes, as they could not be run by themselves" if names else ""
    scratch = (measured.workspace_bytes, *measured.scratch_bytes[1:])  # of which plans ask for the largest
    return dataclasses.replace(_recorded(scratch, {KEPT_BYTES: float(measured.kept_bytes)}), assumption=said)


def _recorded(scratch: Sequence[int], kept: Mapping[str, float] = MappingProxyType({})) -> _KernelMemory:
    return _KernelMemory(scratch, {_SCRATCH: float(max(scratch, default=0)), **kept})


def _planned_scratch(plan: Plan, graph: StepGraph) -> Sequence[int]:
    """Scratch for lowering a plan again: what was measured when it was made, if anything was."""
    if _SCRATCH not in plan.settings:
        return workspace_of(graph)
    return (int(plan.settings[_SCRATCH]), *(0 for _ in graph.ops[1:]))


def _save_bytes(graph: StepGraph, machine: Machine) -> int:
    """What ``Trainer.save`` takes of a CPU: a block to write, a bounce buffer, and what it cannot read piece by piece.

    On another device the buffers lie on the host.
    """
    if machine.device.kind != "cpu":
        return 0
    sized = [(view, graph.storages[storage].size_bytes) for storage, view in named_tensors(graph).items()]
    loose = [size for view, size in sized if not (view.is_row_major and view.spans(size))]
    objects = _SAVE_ONCE_BYTES + _SAVE_BYTES_PER_TENSOR * len(sized)
    return objects + CHUNK_BYTES + max(BOUNCE_BYTES, 2 * max(loose, default=0))


def _run_save_bytes(run: RunConfig, graph: StepGraph, machine: Machine) -> int:
    return _save_bytes(graph, machine) if run.checkpoint.saves else 0


@dataclass(frozen=True)
class CapturedRun:
    """The step of a run, which any number of plans can be made for.

    Attributes:
        initial: The model on fake tensors, with the recipe of its initial values.
        captured: One micro-batch. ``graph`` is the whole step.
    """

    initial: Deferred
    captured: StepGraph
    graph: StepGraph


def plan_run(
    run: RunConfig,
    machine: Machine | None = None,
    step: CapturedRun | None = None,
    *,
    cache: bool = False,
    progress: PlanProgress = SILENT,
) -> Prepared:
    """Plan a run for its machine, or for ``machine``.

    Args:
        step: From ``capture_run``, of a run that differs in memory at most; None captures it now.
        cache: Whether to take the plan from the user's cache folder, and to keep it there (``planner.cache``).
        progress: Is told what is being done.
    """
    torch.set_num_threads(run.num_threads)
    run = resolved(run)
    machine = machine or machine_of(run)
    progress.update(0.0, "capturing the model")
    step = step or capture_run(run, machine)
    initial, captured, graph = step.initial, step.captured, step.graph
    free = _free_bytes(Path(run.memory.folder or run.out))
    memory = _kernel_memory(graph, machine, progress)
    planned = cached_plan(
        graph,
        machine,
        folder=cache_folder() if cache else None,
        progress=progress,
        budget=run.memory.budget,
        disk_budget=run.memory.disk_budget_bytes(free),
        policy=run.memory.policy,
        expansion={
            "clip_norm": run.optimization.clip_norm,
            "master_weights": float(_has_masters(run)),
            "compile": float(run.optimization.compile),
            **memory.settings,
            SAVE_BYTES: float(_run_save_bytes(run, graph, machine)),
        },
        workspace_bytes=memory.scratch_bytes,
    )
    made = _with_matrices(memory.told(planned.plan), captured, run.optimization.matrices)
    made = dataclasses.replace(made, run=run_to_dict(run))
    return Prepared(run, initial, captured, planned.graph, machine, made, planned.program, planned.predicted)


def sketch_run(run: RunConfig, machine: Machine, step: CapturedRun) -> Sketch:
    """A plan of a captured run for ``machine`` without a search; budgets are the run's, its disk budget in bytes."""
    memory = _kernel_memory(step.graph, machine)
    return sketch_plan(
        step.graph,
        machine,
        budget=run.memory.budget,
        disk_budget=run.memory.disk_budget_bytes(0),
        workspace_bytes=memory.scratch_bytes,
        settings={**memory.settings, SAVE_BYTES: float(_run_save_bytes(run, step.graph, machine))},
    )


def prepare_plan(plan: Plan, *, to_run: bool = False) -> Prepared:
    """Everything of a saved plan, made again and checked against it.

    Args:
        to_run: Refuse a plan made for another host; to look at one, any host will do.

    Raises:
        ConfigError: the plan was made without a run, for another model, or for another host.
    """
    if plan.run is None:
        raise ConfigError("the plan records no run; make it with: lading plan RUN.toml")
    run = run_from_dict(plan.run, "the plan's run")
    if to_run and plan.host_id and plan.host_id != host_id():
        raise ConfigError(
            f"the plan was made for the host {plan.host_id!r}, this one is {host_id()!r}; plan again here"
        )
    torch.set_num_threads(run.num_threads)
    machine = machine_from_dict(plan.machine, "the plan's machine")
    if to_run and run.checkpoint.saves and machine.device.kind == "cpu" and not plan.settings.get(SAVE_BYTES):
        raise ConfigError(
            "the plan counts no memory for saving, and its run saves; plan again, or set checkpoint.every_steps to 0 "
            "and checkpoint.at_end to false there"
        )
    step = capture_run(run, machine)
    program = make_program(plan, step.graph, machine, workspace_bytes=_planned_scratch(plan, step.graph))
    predicted = predict(plan, program, machine)
    return Prepared(run, step.initial, step.captured, program.graph, machine, plan, program, predicted)


def capture_run(run: RunConfig, machine: Machine) -> CapturedRun:
    """Build a run's model on fake tensors and capture its step for the machine's kernels; nothing is computed."""
    run = resolved(run)
    initial = defer(lambda: build(run.model, run.optimization.precision))
    captured = capture(
        initial.model, example_batch(run), loss_of(run.model), accumulation=run.optimization.accumulation
    )
    chosen = run.optimization
    step = step_of(
        captured, machine, clip_norm=chosen.clip_norm, master_weights=_has_masters(run), matrices=chosen.matrices
    )
    return CapturedRun(initial, captured, step)


def _with_matrices(plan: Plan, captured: StepGraph, matrices: Matrices | None) -> Plan:
    """The plan with what moves its matrices; who moves what is said first among what it assumes."""
    if matrices is None:
        return plan
    said = grouped(captured, matrices)[1]
    return dataclasses.replace(plan, matrices=dataclasses.asdict(matrices), assumptions=(said, *plan.assumptions))


def _has_masters(run: RunConfig) -> bool:
    return run.optimization.precision == "bf16"


def build(model: ModelConfig, precision: str = "fp32") -> torch.nn.Module:
    """The model of a configuration, in training mode, initialised from torch's generator.

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
    module, _, function = model.name.partition(":")
    try:
        made = getattr(importlib.import_module(module), function)(**model.sizes)
    except Exception as error:  # code of the user's: whatever it raises is told as theirs
        raise ConfigError(
            f"model.name {model.name!r}: expected a function that returns a module, it fails: "
            f"{type(error).__name__}: {error}{_where(error, __file__)}"
        ) from error
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(f"model.name {model.name!r}: expected a torch.nn.Module, got {type(made).__name__}")
    return made


def _where(error: Exception, here: str) -> str:
    """The line of the user's code in which an error was raised, in words; "" where it was raised by the call itself."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "" if last.filename == here or last.filename.startswith("<") else f" ({last.filename}, line {last.lineno})"


def task_of(model: ModelConfig) -> str:
    """What a model learns: a task of ``lading.config.Task``, or "denoising" for a diffusion model.

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
    """``loss(model, batch)``: a reference model's own, that of the task for one of Hugging Face, else next byte."""
    if model.name in MODELS:
        return model_class(model.name).loss
    task = task_of(model)
    return LOSSES[task] if model.is_hugging_face or task == "own" else next_byte_loss


def tokenizer_of(run: RunConfig) -> Path | None:
    """The tokenizer file of a run; None for one token a byte."""
    if run.data.tokenizer == "bytes":
        return None
    if run.data.tokenizer != "auto":
        return Path(run.data.tokenizer)
    if not run.model.is_hugging_face:
        return None
    path = Path(run.model.weights or Path(run.model.name).parent) / "tokenizer.json"
    return path if path.is_file() else None


def example_batch(run: RunConfig) -> dict[str, torch.Tensor]:
    """A batch of the run's shape; the values mean nothing."""
    if (task := _task(run)) == "denoising":
        return _latents(run).batch(0, 0)
    if task == "own":
        return made_up(inputs_of(run.data), run.data.batch_size, run.seed, 0, 0)
    return data.example_batch(task, run.data, tokenizer_of(run))


def dataset_of(run: RunConfig, module: torch.nn.Module) -> Dataset:
    """The batches of a run, for its model, which may be fake.

    Raises:
        ConfigError: the text cannot be read, is too short, or is not the model's kind of text.
        StorageError: the run's folder cannot be written.
    """
    if (task := _task(run)) == "denoising":
        return _latents(run)
    if task == "own":
        random = run.data.kind == "random"
        return (
            RandomDataset(run.data, seed=run.seed) if random else ArrayDataset(run.data, Path(run.out), seed=run.seed)
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
    """What a run's model learns.

    Raises:
        ConfigError: not from data of this kind.
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


def load_weights(model: ModelConfig, module: torch.nn.Module, sink: Callable[[str, torch.Tensor], None]) -> list[str]:
    """Hand the weights of a model's folder on; says what was done with them.

    Args:
        module: The model, which may be fake.
        sink: Called with each name and value; it must copy what it keeps.
    """
    drawn = hugging_face.load_weights(model, module, sink)
    names = ", ".join(drawn[:3]) + (f" and {len(drawn) - 3} more" if len(drawn) > 3 else "")
    dtypes = hugging_face.weights_dtype(model)
    return [f"weights from {model.weights} ({dtypes})", *([f"drawn, as the files lack them: {names}"] if drawn else [])]


def initial_values(run: RunConfig, initial: Deferred, sink: Callable[[str, torch.Tensor], None]) -> list[str]:
    """Hand the values on that a run starts from, one after another; says where they come from.

    What a folder holds comes from there, the rest is made as building the model would make it. Random numbers of the
    steps start from the seed again after weights were loaded, however many it took to build the model.
    """
    if not run.model.weights:
        initial.materialize(run.seed, sink)
        return []
    loaded: set[str] = set()

    def take(name: str, value: torch.Tensor) -> None:
        loaded.add(name)
        sink(name, value)

    notes = load_weights(run.model, initial.model, take)
    initial.keeping(initial.named.keys() - loaded).materialize(run.seed, sink)
    torch.manual_seed(run.seed)
    return notes


def built_whole(run: RunConfig) -> torch.nn.Module:
    """The model of a run with the values that it starts from, all in memory, as plain PyTorch would have it."""
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


def _free_bytes(folder: Path) -> int:
    """Free space of a folder's disk, rounded down to five leading bits, so that equal runs get the same share of it."""
    import shutil

    while not folder.exists():
        folder = folder.absolute().parent
    free = shutil.disk_usage(folder).free
    unit = 1 << max(0, free.bit_length() - 5)
    return free // unit * unit
