"""From a run's configuration to everything the loop needs: model, batch, machine, graph, plan, program."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lading.capture.initial import Deferred, defer
from lading.capture.trace import capture
from lading.catalog.load import load_machine, machine_from_dict, save_machine
from lading.config import MODELS, ModelConfig, RunConfig, run_from_dict, run_to_dict
from lading.errors import ConfigError
from lading.ir.graph import StepGraph
from lading.ir.machine import Machine
from lading.ir.plan import Plan
from lading.ir.program import Program
from lading.ir.step import expand
from lading.ir.timeline import Timeline
from lading.models.loss import next_byte_loss
from lading.models.registry import build_model, model_class
from lading.planner.api import make_plan, make_program
from lading.runtime.host import host_id
from lading.runtime.kernels import workspace_of
from lading.runtime.probe import probe
from lading.sim.engine import simulate

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


@dataclass(frozen=True)
class Prepared:
    """A planned run.

    Attributes:
        initial: The model on fake tensors, with the recipe of its initial values.
        captured: One micro-batch. ``graph`` is the whole step.
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


def plan(
    graph: StepGraph,
    machine: Machine,
    *,
    budget: str | int,
    disk_budget: str | int | None = None,
    policy: str = "residency",
    clip_norm: float = 0.0,
    master_weights: bool = False,
) -> Plan:
    """Plan the training step of a captured model with AdamW.

    Args:
        graph: From ``lading.capture``.
        budget: Device bytes ("256MB"), or a share ("50%") of what keeping everything needs.
        disk_budget: Bytes allowed on disk; None allows what the machine has.
        policy: "keep-all", "checkpoint-every-block" or "residency".
        clip_norm: Limit of the global gradient norm; 0 switches it off.
        master_weights: Give each bfloat16 or float16 parameter a float32 master, as ``lading.optim.master`` does.

    Raises:
        PlanInfeasible: nothing fits; says what binds, how much is missing and what would do.
        ConfigError: an argument means nothing.
    """
    step = expand(graph, clip_norm=clip_norm, master_weights=master_weights)
    scratch = _scratch(step, machine)
    planned = make_plan(
        step,
        machine,
        budget=budget,
        disk_budget=disk_budget,
        policy=policy,
        expansion={"clip_norm": clip_norm, "master_weights": float(master_weights)},
        workspace_bytes=scratch,
    )
    return planned.plan


def lowered(plan: Plan, graph: StepGraph) -> Program:
    """The Program of a plan for the graph it was made from.

    Raises:
        ConfigError: it was made from another.
    """
    step = expand(
        graph, clip_norm=plan.settings["clip_norm"], master_weights=bool(plan.settings.get("master_weights", 0.0))
    )
    machine = machine_from_dict(plan.machine, "the plan's machine")
    return make_program(plan, step, machine, workspace_bytes=_scratch(step, machine))


def _scratch(graph: StepGraph, machine: Machine) -> Sequence[int]:
    """Scratch bytes of each operation, or () for a device whose kernels are not the ones bound here."""
    return workspace_of(graph) if machine.device.kind == "cpu" else ()


def plan_run(run: RunConfig, machine: Machine | None = None) -> Prepared:
    """Capture a run's step and plan it for its machine, or for ``machine``."""
    torch.set_num_threads(run.num_threads)
    machine = machine or machine_of(run)
    initial, captured, graph = _captured(run)
    free = _free_bytes(Path(run.memory.folder or run.out))
    planned = make_plan(
        graph,
        machine,
        budget=run.memory.budget,
        disk_budget=run.memory.disk_budget_bytes(free),
        policy=run.memory.policy,
        expansion={"clip_norm": run.optimization.clip_norm, "master_weights": float(_has_masters(run))},
        workspace_bytes=_scratch(graph, machine),
        run=run_to_dict(run),
    )
    return Prepared(run, initial, captured, graph, machine, planned.plan, planned.program, planned.predicted)


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
    initial, captured, graph = _captured(run)
    program = make_program(plan, graph, machine, workspace_bytes=_scratch(graph, machine))
    return Prepared(run, initial, captured, graph, machine, plan, program, simulate(program, machine))


def _captured(run: RunConfig) -> tuple[Deferred, StepGraph, StepGraph]:
    initial = defer(lambda: build(run.model, run.optimization.precision))
    captured = capture(
        initial.model, example_batch(run), loss_of(run.model), accumulation=run.optimization.accumulation
    )
    step = expand(captured, clip_norm=run.optimization.clip_norm, master_weights=_has_masters(run))
    return initial, captured, step


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
    if model.name.endswith(".json"):
        return _hugging_face(Path(model.name), dtype)
    module, _, function = model.name.partition(":")
    try:
        made = getattr(importlib.import_module(module), function)(**model.sizes)
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"model.name {model.name!r}: expected a function that returns a module: {error}") from error
    if not isinstance(made, torch.nn.Module):
        raise ConfigError(f"model.name {model.name!r}: expected a torch.nn.Module, got {type(made).__name__}")
    return made


def _hugging_face(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("a Hugging Face configuration needs: pip install 'lading[hf]'") from error
    try:
        config = AutoConfig.for_model(**json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.name {str(path)!r}: expected the config.json of a model: {error}") from error
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def loss_of(model: ModelConfig) -> Loss:
    """``loss(model, batch)``: a reference model's own, else that of byte batches."""
    if model.name in MODELS:
        return model_class(model.name).loss
    return _logits_loss if model.name.endswith(".json") else next_byte_loss


def _logits_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Next-byte loss of a model whose output has ``logits``."""
    return next_byte_loss(lambda tokens: model(input_ids=tokens).logits, batch)  # pyright: ignore[reportArgumentType]


def example_batch(run: RunConfig) -> dict[str, torch.Tensor]:
    """A batch of the run's shape; the values mean nothing."""
    return {"tokens": torch.zeros(run.data.batch_size, run.data.sequence_length + 1, dtype=torch.int64)}


def machine_of(run: RunConfig) -> Machine:
    """The machine a run names; "probe" is this host's CPU and the run's disk, measured now if they never were."""
    if run.machine != "probe":
        return load_machine(run.machine)
    folder = Path(run.memory.folder or run.out)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"cpu-{run.num_threads}-threads-disk-{folder.stat().st_dev}-torch-{torch.__version__}.toml"
    path = Path.home() / ".cache" / "lading" / name
    if path.is_file():
        machine = load_machine(path)
        if machine.host_id == host_id():
            return machine
    return probe_to(path, folder, threads=run.num_threads, device="cpu")


def probe_to(
    path: Path, folder: Path, *, threads: int | None = None, seconds: float = 50.0, device: str | None = None
) -> Machine:
    """Measure this host (its GPU if it has one, or ``device``) and the disk of ``folder``; writes the machine file."""
    folder.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = probe(folder=folder, threads=threads, seconds=seconds, device=device, progress=print)
    save_machine(machine, path)
    return machine


def _free_bytes(folder: Path) -> int:
    import shutil

    while not folder.exists():
        folder = folder.absolute().parent
    return shutil.disk_usage(folder).free
