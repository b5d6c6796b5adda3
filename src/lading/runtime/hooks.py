"""Hooks: when a gradient is final, and when a parameter is about to be read.

A gradient of FSDP2 is final once it is reduced, which is when FSDP2 runs a parameter's hooks; any other one when
autograd has summed it up. FSDP2 reads parameters when it gathers a unit, whoever asked for it: forward, backward, a
prefetch, or the user. Elsewhere a module's forward reads them: its own, and those of everything in it where it is an
element of a list or the outermost, so that a weight used beside its module's forward is final, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lading.errors import ConfigError
from lading.ir.routes import Box
from lading.runtime.boxes import gradient
from lading.runtime.flights import Late


def when_final(parameters: Mapping[int, tuple[torch.Tensor, Box]], tell: Callable[[int, torch.Tensor], None]) -> None:
    """Call ``tell(number, piece)`` whenever a gradient is final, with this rank's piece, the box of the whole."""

    def hooked(number: int, box: Box) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                found = gradient(parameter, box)
            if found is not None:
                tell(number, found)

        return hook

    for number, (parameter, box) in parameters.items():
        parameter.register_post_accumulate_grad_hook(hooked(number, box))


def before_reading(model: nn.Module, parameters: Mapping[int, torch.Tensor], late: Late) -> None:
    """Have ``late`` finish what moves a parameter before the model reads it, and everything before it is saved.

    Raises:
        ConfigError: a parameter is not in the model.
    """
    number_of = {id(parameter): number for number, parameter in parameters.items()}
    for unit in model.modules():
        unit.register_state_dict_pre_hook(lambda *_: late.finish())
    gathered = _hook_gathers(model, number_of, late)
    needs = _needs(model, {key: n for key, n in number_of.items() if n not in gathered})
    for module, needed in needs:
        module.register_forward_pre_hook(_finishing(late, needed), prepend=True)
    missing = set(number_of.values()).difference(gathered, *(needed for _, needed in needs))
    if missing:
        raise ConfigError(
            f"expected a model that has all parameters of the optimizer, found one without {len(missing)} of "
            f"{len(number_of)}; give model= the outermost module, after it has been cut"
        )


def _finishing(late: Late, numbers: Collection[int]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        late.finish(numbers)

    return hook


def _hook_gathers(model: nn.Module, number_of: Mapping[int, int], late: Late) -> set[int]:
    """Of FSDP2's units; returns the parameters that these gather."""
    found: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            if group is None or hasattr(group.unshard, "finishes"):
                continue
            known = [id(each.sharded_param) for each in group.fsdp_params]
            held = {number_of[key] for key in known if key in number_of}
            group.unshard = _gathering(group.unshard, late, held)
            found |= held
    return found


def _gathering(gather: Callable[..., None], late: Late, numbers: Collection[int]) -> Callable[..., None]:
    def unshard(async_op: bool = False) -> None:
        late.finish(numbers)
        gather(async_op)

    unshard.finishes = True  # type: ignore[attr-defined]
    return unshard


def _needs(model: nn.Module, number_of: Mapping[int, int]) -> list[tuple[nn.Module, set[int]]]:
    """What each module reads: its own parameters, and of the outermost and of elements of lists all that no inner
    element has."""
    elements = {
        id(child)
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        for child in module.children()
    }

    def below(module: nn.Module) -> set[int]:
        found = {number_of[id(p)] for p in module.parameters(recurse=False) if id(p) in number_of}
        for child in module.children():
            if id(child) not in elements:
                found |= below(child)
        return found

    needs: list[tuple[nn.Module, set[int]]] = []
    for module in model.modules():
        whole = module is model or id(module) in elements
        own = {number_of[id(p)] for p in module.parameters(recurse=False) if id(p) in number_of}
        if numbers := below(module) if whole else own:
            needs.append((module, numbers))
    return needs
