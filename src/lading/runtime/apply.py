"""Cluster plans on stock PyTorch models: a plan is set by FSDP2, group by group.

``apply`` calls ``fully_shard`` once for each group of the plan, from the innermost modules outward, and sets what the
plan says of it: resharded after forward or not, what is unsharded ahead, in which dtype, whether it lies in host
memory, what is recomputed. Nothing of the training loop changes. Blocks may be compiled in place before
(``block.compile()``, as torchtitan does): what ``apply`` sets then lies around what is compiled.

[Note: micro-batches] A group that stays unsharded over the micro-batches of a step must be resharded behind the last
one, or the next step would read what was before the optimizer's update. A micro-batch is the forwards up to a backward,
and the backwards up to the next forward, so that a loss of several forwards counts once. It is counted as its backward
begins, when flags are set that FSDP2 reads later. Its step has been taken once an optimizer of these parameters begins
to, and given up where no gradient is left; either way the next backward is the first of a step. An optimizer that steps
when not as many micro-batches as planned have run is stopped. The hooks that do this are the model's and one of all
optimizers; ``stop_counting`` takes both away. Micro-batches larger than planned are refused as they arrive
(``MicroBatch``), before the forward begins, as nobody planned their memory; smaller ones, as at the end of the data,
take less.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lading import __version__
from lading.errors import ConfigError, did_you_mean
from lading.ir.action import DEVICE
from lading.ir.graph import DTYPE_BYTES
from lading.ir.layout import Layout
from lading.ir.plan import Plan, PlanKind, ShardedUnit, plan_for
from lading.runtime.agreement import ARRIVAL_S, Facts, agree_on, digests, flattened, structure
from lading.runtime.optimizer_hooks import fsdp_param_groups
from lading.runtime.shard_regions import ranks_of

#: What models of transformers call their input, first of what they are called with by name.
_NAMES = ("input_ids", "tokens", "inputs_embeds", "x", "input")


@dataclass(frozen=True)
class MicroBatch:
    """Largest micro-batch that was planned, by number of sequences and tokens of each."""

    sequences: int
    tokens: int

    def check(self, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Compare every tensor that a model is called with; shapes alone, so that no device is waited for.

        Whole numbers of two dims are (sequences, tokens), of one dim sequences packed one behind the other. Of the
        input, which is the first tensor that is no mask, three dims are (sequences, tokens, hidden). Of all others the
        first dim counts sequences, unless it may count positions or heads: a mask, a table of positions, a bias.

        Raises:
            ConfigError: there are more sequences, or longer ones, than planned; names the tensor.
        """
        ordered = {name: options[name] for name in _NAMES if name in options} | dict(options)
        is_input = True
        for name, tensor in (*named_tensors("argument", args), *named_tensors("", ordered)):
            if not tensor.ndim:
                continue
            if excess := self._excess(tensor, is_input=is_input):
                raise ConfigError(
                    f"expected a micro-batch of at most {self.sequences} sequences of {self.tokens} tokens, as "
                    f"planned, got {excess} in {name}; give smaller ones, or plan for these with lading plan --pin "
                    "mb=N and --seq"
                )
            is_input = is_input and tensor.dtype is torch.bool

    def _excess(self, tensor: torch.Tensor, *, is_input: bool) -> str:
        """Say what a tensor has, in words, if that is more than planned; else ""."""
        shape, is_mask = tensor.shape, tensor.dtype is torch.bool
        is_whole = not (is_mask or tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        if is_whole and len(shape) == 1:
            return f"{shape[0]} tokens in a row" if shape[0] > self.sequences * self.tokens else ""
        if (len(shape) == 2 and is_whole) or (len(shape) == 3 and is_input and not is_mask):
            fits = shape[0] <= self.sequences and shape[1] <= self.tokens
            return "" if fits else f"{shape[0]} of {shape[1]}"
        if is_mask or not is_input:
            if len(shape) < 3 and shape[0] <= self.tokens:  # by position
                return ""
            if len(shape) == 3 and shape[1] == shape[2]:  # by head and two positions
                return ""
        return f"{shape[0]}" if shape[0] > self.sequences else ""


def named_tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Find the tensors in what a model is called with or returns; yields each with its path, beginning by ``name``."""
    items: Iterator[tuple[object, Any]] = iter(())
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, (list, tuple)):
        items = iter(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    for key, item in items:
        yield from named_tensors(f"{name} {key}" if name == "argument" else f"{name}.{key}".lstrip("."), item)


#: Name under which a model has what takes the hooks of ``apply`` away.
_REMOVERS = "_lading_removers"


def apply(
    plan: Plan | Path | str,
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    names: Mapping[str, str] | None = None,
    timeout_s: float = ARRIVAL_S,
) -> nn.Module:
    """Shard a model over data-parallel ranks as a plan says; in place.

    A parameter that several groups share, such as a tied embedding, makes them one group, unsharded from its first use
    to its last. Frozen parameters are taken: of the plan's modules as they are; of modules that the plan does not
    know, such as a vision tower, in groups of their own, one for each element of a list; and as what adapters (LoRA)
    are trained beside. What that takes above the plan must fit its budget. Activations of towers and adapters are
    not planned for, and not counted.

    Args:
        plan: Plan from ``lading plan --model``, or the path of its file.
        model: Model as it is on one rank (tensor parallel may be applied), with the modules that the plan names. All
            ranks have the same values of parameters and buffers, or all have it on the meta device, to be filled after.
            Parameters are frozen already, and adapters are there.
        mesh: Data-parallel ranks: one dim, or two (replicas, shards) where the layout has ``shard``.
        names: Names in the model of what the plan calls otherwise, such as ``{"tokens": "tok_embeddings"}``: of single
            modules, wherever they stand in a path.
        timeout_s: Seconds within which all ranks of the mesh are to call it, from when one does.
    Returns:
        The model, for a line such as ``model = lading.apply(plan, model, mesh)``.
    Raises:
        ConfigError: the plan is not one of a cluster or is for another model, a module is not known, the mesh has
            another size, what is shared or beside it does not fit the budget, or the model is cut already or has blocks
            that are recomputed already; ranks were given unlike plans or models, or one did not call. Nothing has been
            done to the model then.
    """
    plan = agree_on("lading.apply", ranks_of(mesh), lambda: _facts(plan, model, mesh, names or {}), timeout_s=timeout_s)
    return _applied(plan, model, mesh)


def _facts(plan: Plan | Path | str, model: nn.Module, mesh: DeviceMesh, names: Mapping[str, str]) -> tuple[Plan, Facts]:
    """Check the plan; returns it, and the facts that all ranks must have alike."""
    plan = _checked(plan, model, mesh, names)
    versions = {"lading": __version__, "torch": torch.__version__}
    return plan, {
        "plan": flattened(asdict(plan)),
        "model": structure(model),
        **digests(model),
        "versions": versions,
    }


def _checked(plan: Plan | Path | str, model: nn.Module, mesh: DeviceMesh, names: Mapping[str, str]) -> Plan:
    """Translate the plan to the model's own names, if it can be set on this model.

    Raises:
        ConfigError: it cannot.
    """
    plan = _renamed(plan_for("lading.apply", plan, PlanKind.CLUSTER), names)
    _check(plan, plan.parsed_layout, mesh)
    _check_plain(model)
    modules = dict(model.named_modules())
    groups = [_members(group, modules) for group in plan.choices.units]
    _check_compiled(groups, modules)
    _check_parameters(plan, model, groups)
    plan, more_bytes = _joined(plan, model)
    beside = _frozen_units(plan, model)
    more_bytes += _beside_bytes(beside, mesh.size(-1))
    left_bytes = plan.budgets[DEVICE] - plan.peak_bytes[DEVICE] if more_bytes else 0
    if more_bytes > left_bytes:
        raise ConfigError(
            f"apply: expected shared parameters and frozen modules that are not planned to take at most the "
            f"{left_bytes:,} bytes that the plan leaves of its budget, found {more_bytes:,}; plan with a memory budget "
            f"smaller by {more_bytes - left_bytes:,}, or untie what is shared"
        )
    for path in plan.choices.recomputed:
        _module_at(path, modules)
    return plan


def _applied(plan: Plan, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    layout = plan.parsed_layout
    modules = dict(model.named_modules())
    groups = [_members(group, modules) for group in plan.choices.units]
    beside = [unit for unit, _ in _frozen_units(plan, model)]
    whole_parameters = list(model.parameters())
    modules.update({path: _recompute(model, path) for path in plan.choices.recomputed})
    policy = MixedPrecisionPolicy(
        param_dtype=_dtype(plan.choices.gather_dtype), reduce_dtype=_dtype(plan.choices.reduce_dtype)
    )
    sharded: dict[int, FSDPModule] = {}
    for number in _outward(plan.choices.units):
        group = plan.choices.units[number]
        members = [modules[path] for path in groups[number]]
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if group.offload else OffloadPolicy()
        released = group.reshard_after_forward
        arguments: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
        sharded_modules: Any = members if len(members) > 1 else members[0]
        fully_shard(sharded_modules, reshard_after_forward=released, **arguments)
        sharded[number] = _as_sharded(members[0])
        if not group.unshard_in_backward:
            sharded[number].set_unshard_in_backward(False)
    for unit in beside:
        if unit is not model:
            fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    if not isinstance(model, FSDPModule):  # has at most frozen parameters of its own left
        fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    _prefetch(plan.choices.units, sharded)
    removers: list[Callable[[], None]] = []
    if layout.micro_batches > 1:
        kept_units = [sharded[n] for n, group in enumerate(plan.choices.units) if not group.reshard_after_backward]
        removers.append(_MicroBatches(_as_sharded(model), kept_units, layout.micro_batches).remove)
    removers.append(_watch_sizes(model, MicroBatch(layout.micro_batch, plan.request.seq_len)))
    removers.append(_refuse_earlier_optimizers(whole_parameters, model))
    model.__dict__[_REMOVERS] = removers
    return model


def _watch_sizes(model: nn.Module, planned: MicroBatch) -> Callable[[], None]:
    """Have each forward with gradients check its micro-batch's size first; returns the call that stops that."""

    def check(module: nn.Module, args: Any, options: Any) -> None:
        if torch.is_grad_enabled():
            planned.check(args, options)

    return model.register_forward_pre_hook(check, prepend=True, with_kwargs=True).remove


def _refuse_earlier_optimizers(before: Sequence[nn.Parameter], model: nn.Module) -> Callable[[], None]:
    """Refuse steps of optimizers that have parameters from before the model was cut, which move nothing of it.

    Args:
        before: Parameters that the model had.

    Returns:
        The call that stops that.
    """
    current_ids = {id(parameter) for parameter in model.parameters()}
    replaced = {id(parameter): weakref.ref(parameter) for parameter in before if id(parameter) not in current_ids}

    def check(optimizer: Optimizer, arguments: Any, options: Any) -> None:
        for parameter in (member for group in optimizer.param_groups for member in group["params"]):
            if id(parameter) in replaced and replaced[id(parameter)]() is parameter:
                raise ConfigError(
                    "expected an optimizer of the model that lading.apply returned, found one that was made before: "
                    f"its parameters, of shape {tuple(parameter.shape)} and others, are no longer the model's and "
                    "would be moved in vain; make it after lading.apply"
                )

    return register_optimizer_step_pre_hook(check).remove


def stop_counting(model: nn.Module) -> None:
    """Take away what ``apply`` hung into a model and into optimizers, for another loop over the same model.

    From then on it is the loop that sees to the size of micro-batches, and that calls ``set_is_last_backward`` and, of
    groups that stay unsharded, ``set_reshard_after_backward``.
    """
    for remove in model.__dict__.pop(_REMOVERS, ()):
        remove()


def _renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Copy of the plan in which modules have the model's own names."""
    paths = [path for group in plan.choices.units for path in group.modules]
    path_parts = {part for path in (*paths, *plan.choices.recomputed) for part in path.split(".")}
    if unknown := sorted(set(names) - path_parts):
        hint = did_you_mean(unknown[0], path_parts)
        raise ConfigError(f"apply: expected names of the plan's modules, got {unknown[0]!r}, which is in no path{hint}")

    def renamed(path: str) -> str:
        return ".".join(names.get(part, part) for part in path.split("."))

    units = tuple(replace(unit, modules=tuple(map(renamed, unit.modules))) for unit in plan.choices.units)
    recomputed = tuple(map(renamed, plan.choices.recomputed))
    return replace(plan, choices=replace(plan.choices, units=units, recomputed=recomputed))


def _check_plain(model: nn.Module) -> None:
    """Refuse a model to which something that a plan does has been done, or whose parameters have what shards lose."""
    for name, parameter in model.named_parameters():
        hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))  # pyright: ignore[reportPrivateUsage]
        if any(hooks):
            raise ConfigError(
                f"apply: expected parameters without hooks, found one on {name!r}, which the shard in its place would "
                "not have; call register_post_accumulate_grad_hook on the parameters afterwards, each of which is then "
                "this rank's shard"
            )
        if parameter.grad is not None:
            raise ConfigError(
                f"apply: expected parameters without gradients, found one on {name!r} of a backward pass before, which "
                "the shard in its place would not have; call model.zero_grad() first"
            )
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ConfigError(
                f"apply: expected a model that is not cut, found {path or 'the model'!r} under fully_shard; call apply "
                "in its place, once"
            )
        if isinstance(module, CheckpointWrapper):
            raise ConfigError(
                f"apply: expected a model without activation checkpointing, found {path!r} wrapped; leave that to the "
                "plan, which says what is recomputed"
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ConfigError(
                f"apply: expected a model without activation checkpointing, found {path or 'the model'!r} with "
                "gradient_checkpointing of transformers; call model.gradient_checkpointing_disable() and leave that to "
                "the plan, which says what is recomputed"
            )
        if isinstance(module, OptimizedModule):
            raise ConfigError(
                f"apply: expected modules under their own names, found {path or 'the model'!r} in a wrapper of "
                "torch.compile; compile in place with module.compile()"
            )


def _check_compiled(groups: Sequence[Sequence[str]], modules: Mapping[str, nn.Module]) -> None:
    """Refuse a group inside of what is compiled, where its hooks would break the graph."""
    for path in (path for group in groups for path in group):
        outer = path
        while outer:
            outer = outer.rpartition(".")[0]
            if outer and modules[outer]._compiled_call_impl is not None:
                raise ConfigError(
                    f"apply: expected groups of whole compiled modules, found {path!r} inside of {outer!r}, which is "
                    "compiled; plan with --unshard zero3 or zero2, whose groups are whole blocks, or do not compile"
                )


def _check(plan: Plan, layout: Layout, mesh: DeviceMesh) -> None:
    if layout.zero != 3:
        raise ConfigError(
            f"apply: expected a plan that cuts parameters (zero3), got {plan.layout}; plan with --pin zero=3"
        )
    if layout.pp > 1 or layout.ep > 1:
        raise ConfigError(
            f"apply: expected a plan without pipeline and expert parallel, got {plan.layout}; plan with --pin pp=1 and "
            "--pin ep=1"
        )
    if "activations" in layout.offload or layout.offload == ("optimizer",) or layout.offload_to:
        raise ConfigError(
            f"apply: expected everything on the device, or parameters with all their states on the host, as FSDP2's "
            f"CPUOffloadPolicy does, got {plan.layout}; plan with offload=parameters and no offload_to, or without"
        )
    if plan.choices.gather_dtype not in ("", "float32", "bfloat16", "float16"):
        raise ConfigError(f"apply: expected parameters gathered in 16 or 32 bits, got {plan.choices.gather_dtype}")
    if layout.recompute == "selective":
        raise ConfigError(
            "apply: expected recompute none or full, got selective; plan with --pin recompute=full or none"
        )
    if not plan.choices.units:
        raise ConfigError(
            f"apply: expected groups of parameters, got none in the plan of {plan.layout}; lading plan said why, such "
            "as that none fit: plan with more memory, or with --pin recompute=full"
        )
    ranks = layout.dp * layout.cp
    shape = (ranks // layout.shard, layout.shard) if 0 < layout.shard < ranks else (ranks,)
    if tuple(mesh.shape) != shape:
        raise ConfigError(
            f"apply: expected a mesh of {' x '.join(map(str, shape))} data-parallel ranks, as the plan's {plan.layout} "
            f"has, got {' x '.join(map(str, mesh.shape))}; plan for these devices, or make another mesh"
        )


def _module_at(path: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    if path in modules:
        return modules[path]
    hint = did_you_mean(path, modules)
    raise ConfigError(f"apply: expected modules of the plan's model, found none called {path!r}{hint}")


def _members(group: ShardedUnit, modules: Mapping[str, nn.Module]) -> list[str]:
    for path in group.modules:
        _module_at(path, modules)
    return list(group.modules)


def _nearest(name: str, homes: Mapping[str, int]) -> str:
    """Path of the nearest module around a parameter that any group names; "" is the whole model."""
    path = name.rpartition(".")[0]
    while path and path not in homes:
        path = path.rpartition(".")[0]
    return path


def _homes(units: Sequence[ShardedUnit]) -> dict[str, int]:
    return {path: number for number, unit in enumerate(units) for path in unit.modules}


def _check_parameters(plan: Plan, model: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Refuse a model whose groups have not as many bytes as the plan says.

    A parameter that modules share counts in each of them, as in the plan, whose segments have their own.
    """
    homes = _homes(plan.choices.units)
    counts, trained = ([0] * len(groups) for _ in range(2))
    checked: set[tuple[int, str]] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path = _nearest(name, homes)
        home = homes.get(path)
        if home is None:
            if parameter.requires_grad:
                raise ConfigError(
                    f"apply: expected every trained parameter in a group of the plan, found {name!r} in none; plan for "
                    "the model with it, or freeze it before apply"
                )
            continue
        if (id(parameter), path) not in checked:
            checked.add((id(parameter), path))
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            counts[home] += local.numel()
            trained[home] += local.numel() if parameter.requires_grad else 0
    for number, (group, count) in enumerate(zip(plan.choices.units, counts, strict=True)):
        width = DTYPE_BYTES[plan.choices.gather_dtype] if plan.choices.gather_dtype else _width(model)
        # Adapters beside frozen weights, with their gradients in place of the weights' own.
        adapts = (count - trained[number]) * width == group.unsharded_bytes >= 2 * trained[number] * width
        if group.unsharded_bytes and count * width != group.unsharded_bytes and not adapts:
            raise ConfigError(
                f"apply: expected {group.unsharded_bytes:,} bytes of parameters in group {number} "
                f"({', '.join(group.modules)}), found {count * width:,}: the plan is for another model than this; "
                "adapters are taken beside frozen parameters of at least twice their bytes"
            )


def _joined(plan: Plan, model: nn.Module) -> tuple[Plan, int]:
    """Join groups that share a parameter, as FSDP2 unshards one in one group alone; the first keeps its place.

    Returns:
        The plan, and the most bytes that joined groups take above it: parameters and gradients, unsharded throughout.
    """
    units, more_bytes = list(plan.choices.units), 0
    while pair := _sharing(units, model):
        first, second = sorted(pair)
        first_unit, second_unit = units[first], units.pop(second)
        both_bytes = first_unit.unsharded_bytes + second_unit.unsharded_bytes
        units[first] = replace(
            second_unit,
            modules=(*first_unit.modules, *second_unit.modules),
            reshard_after_backward=first_unit.reshard_after_backward or second_unit.reshard_after_backward,
            unshard_in_backward=True,
            prefetch_forward=first_unit.prefetch_forward,
            unsharded_bytes=both_bytes,
        )
        more_bytes += 2 * both_bytes
    return replace(plan, choices=replace(plan.choices, units=tuple(units))), more_bytes


def _sharing(units: Sequence[ShardedUnit], model: nn.Module) -> tuple[int, int] | None:
    """Find two groups that have one parameter."""
    homes, home_by_parameter = _homes(units), dict[int, int]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        home = homes.get(_nearest(name, homes))
        if home is not None and home_by_parameter.setdefault(id(parameter), home) != home:
            return home_by_parameter[id(parameter)], home
    return None


def _frozen_units(plan: Plan, model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Find modules with frozen parameters that no group has, from the innermost outward.

    Returns:
        Each module to be cut, with the number of elements that are its own: elements of lists in a module that has none
        of the plan's, then that module; at last the model itself, where it has any left.
    """
    homes = _homes(plan.choices.units)
    planned = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if _nearest(name, homes) in homes}
    around = {path[:end] for path in homes for end, letter in enumerate(path) if letter == "."}
    separate: list[nn.Module] = []

    def find(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            below = f"{path}.{name}".lstrip(".")
            if below in around:
                find(below, child)
            elif below not in homes:
                inner = [element for m in child.modules() if isinstance(m, nn.ModuleList) for element in m]
                separate.extend((*reversed(inner), child))

    if "" not in homes:
        find("", model)
    cut: list[tuple[nn.Module, int]] = []
    for module in (*separate, model):
        sizes = {id(p): p.numel() for p in module.parameters() if id(p) not in planned}
        planned |= sizes.keys()
        if sizes:
            cut.append((module, sum(sizes.values())))
    return cut


def _beside_bytes(beside: Sequence[tuple[nn.Module, int]], ranks: int) -> int:
    """Count bytes of frozen modules that are not planned: shards of all, and two groups of the largest, unsharded."""
    sizes = [elements * max(p.element_size() for p in module.parameters()) for module, elements in beside]
    return -(-sum(sizes) // ranks) + 2 * max(sizes, default=0)


def _width(model: nn.Module) -> int:
    return next(parameter.element_size() for parameter in model.parameters())


def _dtype(name: str) -> torch.dtype | None:
    dtype = getattr(torch, name) if name else None
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"apply: expected a dtype of torch, got {name!r}")
    return dtype


def _recompute(model: nn.Module, path: str) -> nn.Module:
    """Have a module's forward run again in backward; returns what stands in its place."""
    if not path:
        raise ConfigError("apply: expected blocks to be recomputed, got the whole model")
    outer, _, name = path.rpartition(".")
    wrapped = checkpoint_wrapper(model.get_submodule(path))
    setattr(model.get_submodule(outer), name, wrapped)
    return wrapped


def _outward(groups: Sequence[ShardedUnit]) -> list[int]:
    """Order groups so that those inside of modules of others come first; returns their numbers."""
    homes = {path: number for number, group in enumerate(groups) for path in group.modules}
    inside: list[set[int]] = [set() for _ in groups]
    for number, group in enumerate(groups):
        for path in group.modules:
            outer = path
            while outer:
                outer = outer.rpartition(".")[0]
                if outer in homes and homes[outer] != number:
                    inside[homes[outer]].add(number)
    ordered: list[int] = []
    remaining_groups = set(range(len(groups)))
    while remaining_groups:
        ready = sorted(number for number in remaining_groups if not inside[number] & remaining_groups)
        if not ready:
            raise ConfigError(
                f"apply: groups {sorted(remaining_groups)} are inside of each other; no order of fully_shard does that"
            )
        ordered += ready
        remaining_groups -= set(ready)
    return ordered


def _as_sharded(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _prefetch(groups: Sequence[ShardedUnit], sharded: Mapping[int, FSDPModule]) -> None:
    """Tell FSDP2 which groups to unshard ahead, where that is more than the one that it does by itself.

    Behind the first group it would ask for the last of the micro-batch before, whose backward has ended (torch 2.13,
    ``FSDPParamGroup._backward_prefetch``): it is told to ask for itself, which is there.
    """
    if groups[0].modules != ("",):
        sharded[0].set_modules_to_backward_prefetch([sharded[0]])
    for number, group in enumerate(groups):
        after = [sharded[n] for n in range(number + 1, min(len(groups), number + 1 + group.prefetch_forward))]
        before = [sharded[n] for n in range(number - 1, max(-1, number - 1 - group.prefetch_backward), -1)]
        if group.prefetch_forward > 1 and after:
            sharded[number].set_modules_to_forward_prefetch(after)
        if group.prefetch_backward > 1 and before:
            sharded[number].set_modules_to_backward_prefetch(before)


class _MicroBatches:
    """Sets what the last micro-batch of a step has different ([Note: micro-batches])."""

    def __init__(self, model: FSDPModule, kept_units: Sequence[FSDPModule], count: int) -> None:
        self.model, self.kept, self.count = model, kept_units, count
        self.begun = 0
        self.is_stepped, self.is_forward_behind = False, False
        assert isinstance(model, nn.Module)
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._groups = list(fsdp_param_groups(model))
        self_ref = weakref.ref(self)  # all optimizers' hook must not keep the model

        def check(optimizer: Optimizer, arguments: Any, options: Any) -> None:
            counting = self_ref()
            if counting is not None:
                counting.check(optimizer)

        self._handles = model.register_forward_hook(self._hook_outputs), register_optimizer_step_pre_hook(check)

    def remove(self) -> None:
        """Take the hooks away; what stays unsharded is resharded behind the next backward."""
        for handle in self._handles:
            handle.remove()
        for group in self.kept:
            group.set_reshard_after_backward(True, recurse=False)
        self.model.set_is_last_backward(True)

    def _hook_outputs(self, module: nn.Module, arguments: Any, output: Any) -> None:
        outputs = [tensor for _, tensor in named_tensors("output", output) if tensor.requires_grad]
        if outputs:
            self.is_forward_behind = True
            register_multi_grad_hook(outputs, self._begin_backward, mode="any")

    def _begin_backward(self, grad: torch.Tensor) -> None:
        if not self.is_forward_behind:
            return  # of the same micro-batch, such as a second loss of it
        self.is_forward_behind = False
        if self.is_stepped or not self._has_gradients():
            self.begun, self.is_stepped = 0, False
        self.begun += 1
        if self.begun > self.count:
            raise ConfigError(
                f"expected a step of the optimizer after {self.count} micro-batches, as planned, got one more; plan "
                "with the global batch of this run; a step that is given up sets gradients to None, by zero_grad()"
            )
        last = self.begun == self.count
        self.model.set_is_last_backward(last)
        for group in self.kept:
            group.set_reshard_after_backward(last, recurse=False)

    def _has_gradients(self) -> bool:
        """Whether a backward since the last step has left a gradient: reduced, or still to be."""
        for parameter in (member for group in self._groups for member in group.fsdp_params):
            unsharded = getattr(parameter, "_unsharded_param", None)
            if parameter.sharded_param.grad is not None or parameter.unsharded_accumulated_grad is not None:
                return True
            if unsharded is not None and unsharded.grad is not None:
                return True
        return False

    def check(self, optimizer: Optimizer) -> None:
        """Refuse a step of an optimizer of these parameters before all planned micro-batches have run.

        Several optimizers may step behind them, and one that steps others, as torchtitan's container does. A
        step at a rate of zero moves nothing, and counts only behind all of them.
        """
        sharded = {id(member.sharded_param) for group in self._groups for member in group.fsdp_params}
        if not any(id(p) in sharded for group in optimizer.param_groups for p in group["params"]):
            return
        if self.begun != self.count:
            if not any(group.get("lr", 1.0) for group in optimizer.param_groups):
                return  # moves nothing: torch makes states so, where a checkpoint is to be loaded before any step
            raise ConfigError(
                f"expected {self.count} micro-batches before a step of the optimizer, as planned, got {self.begun}; "
                "plan with the global batch of this run"
            )
        self.is_stepped = True
        for unit in self._units:  # what a forward since, such as a validation's, has left unsharded
            unit.reshard()
