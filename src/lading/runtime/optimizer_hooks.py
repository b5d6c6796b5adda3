"""Hooks of an optimizer: called when a gradient is final, and before a parameter is read.

A gradient of FSDP2 is final once it is reduced, which is when FSDP2 runs a parameter's hooks; any other one when
autograd has summed it up. FSDP2 reads parameters when it unshards a unit, whoever asked for it: forward, backward, a
prefetch, or the user. Elsewhere a module's forward reads them: its own, and those of everything in it where it is an
element of a list or the outermost, so that a weight used beside its module's forward is final, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from lading.errors import ConfigError
from lading.ir.routes import ShardRegion
from lading.runtime.in_flight import Late
from lading.runtime.shard_regions import gradient


def when_final(
    parameters: Mapping[int, tuple[torch.Tensor, ShardRegion]], tell: Callable[[int, torch.Tensor], None]
) -> list[RemovableHandle]:
    """Call ``tell(number, piece)`` whenever a gradient is final, with this rank's piece, of the shape of its region.

    Raises:
        ConfigError: a parameter's gradient is told to somebody already, who would send it, too.
    """
    for parameter, _ in parameters.values():
        if any(hasattr(hook, "tells") for hook in (_hooks_of(parameter) or {}).values()):
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)}: expected one optimizer to which backward tells its "
                "gradient, found another one; close() that first"
            )

    def hooked(number: int, region: ShardRegion) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                grad = gradient(parameter, region)
            if grad is not None:
                tell(number, grad)

        hook.tells = True  # type: ignore[attr-defined]
        return hook

    return [p.register_post_accumulate_grad_hook(hooked(number, region)) for number, (p, region) in parameters.items()]


def _hooks_of(parameter: torch.Tensor) -> dict[int, Callable[..., None]] | None:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


def before_reading(model: nn.Module, parameters: Mapping[int, torch.Tensor], late: Late) -> list[RemovableHandle]:
    """Have ``late`` finish what moves a parameter before the model reads it, and everything before it saves or loads.

    Raises:
        ConfigError: a parameter is not in the model.
    """
    number_of = {id(parameter): number for number, parameter in parameters.items()}
    handles: list[RemovableHandle] = []
    gathered = _hook_gathers(model, number_of, late)
    needs = _needs(model, {key: n for key, n in number_of.items() if n not in gathered})
    missing = set(number_of.values()).difference(gathered, *(numbers for _, numbers in needs))
    if missing:
        raise ConfigError(
            f"expected a model that has all parameters of the optimizer, found one without {len(missing)} of "
            f"{len(number_of)}; give model= the outermost module, after it has been cut"
        )
    for unit in model.modules():
        handles.append(unit.register_state_dict_pre_hook(_finishing(late, None)))
        handles.append(unit.register_load_state_dict_pre_hook(_finishing(late, None)))
    handles += [module.register_forward_pre_hook(_finishing(late, numbers), prepend=True) for module, numbers in needs]
    return handles


def _finishing(late: Late, numbers: Collection[int] | None) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        late.finish(numbers)

    return hook


def _hook_gathers(model: nn.Module, number_of: Mapping[int, int], late: Late) -> set[int]:
    """Hook the unsharding of FSDP2's units; returns the numbers of the parameters that they unshard."""
    unsharded: set[int] = set()
    for group in fsdp_param_groups(model):
        shard_ids = [id(parameter.sharded_param) for parameter in group.fsdp_params]
        if numbers := {number_of[key] for key in shard_ids if key in number_of}:
            group.unshard = _gathering(group, late, numbers)
            unsharded |= numbers
    return unsharded


def fsdp_param_groups(model: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters that are unsharded together, each once (torch 2.11 to 2.13)."""
    groups: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                if group is not None:
                    groups[id(group)] = group  # modules cut as one unit share theirs
    return list(groups.values())


def _gathering(group: Any, late: Late, numbers: Collection[int]) -> Callable[..., None]:
    """Wrap a unit's ``unshard`` so that its parameters are moved before.

    FSDP2 copies them on a stream that waits for the stream of forward only as the outermost unit begins, so that stream
    is told to wait for whatever has moved since.
    """
    gather: Callable[..., None] = group.unshard

    def unshard(async_op: bool = False) -> None:
        late.finish(numbers)
        if late.moved is not None:
            copies, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
            copies.wait_event(late.moved)
        gather(async_op)

    return unshard


def _needs(model: nn.Module, number_of: Mapping[int, int]) -> list[tuple[nn.Module, set[int]]]:
    """Pair each module with the parameters it reads: its own, and of the outermost and of elements of lists all below.

    Parameters of an inner element of a list belong to that element alone.
    """
    elements = {
        id(child)
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        for child in module.children()
    }

    def parameters_below(module: nn.Module) -> set[int]:
        reads = {number_of[id(p)] for p in module.parameters(recurse=False) if id(p) in number_of}
        for child in module.children():
            if id(child) not in elements:
                reads |= parameters_below(child)
        return reads

    needs: list[tuple[nn.Module, set[int]]] = []
    for module in model.modules():
        is_root = module is model or id(module) in elements
        direct = {number_of[id(p)] for p in module.parameters(recurse=False) if id(p) in number_of}
        if numbers := parameters_below(module) if is_root else direct:
            needs.append((module, numbers))
    return needs
