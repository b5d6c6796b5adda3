"""Hooks of modules and parameters: which there are, in words, and how capture carries those of parameters over.

Hooks of modules run as the step is traced, so what they compute is part of it. A parameter is exchanged for a fake one,
so its hooks go along; they see the gradient of one micro-batch before it is added up, as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from lading.errors import CaptureError

#: Tables of hooks that a module has, with what torch calls them.
_OF_MODULES = {
    "_forward_pre_hooks": "forward_pre_hook",
    "_forward_hooks": "forward_hook",
    "_backward_pre_hooks": "full_backward_pre_hook",
    "_backward_hooks": "full_backward_hook",
}
#: The same of a parameter.
_OF_PARAMETERS = {"_backward_hooks": "hook", "_post_accumulate_grad_hooks": "post_accumulate_grad_hook"}
#: All tables of hooks that a module has.
_TABLES = tuple(name for name, table in vars(torch.nn.Module()).items() if "hooks" in name and isinstance(table, dict))


def hooks_of(owner: torch.nn.Module | torch.Tensor) -> Iterator[tuple[str, Any]]:
    """Hooks of a module or a parameter: pairs of the kind, as in ``register_KIND``, and the function."""
    kinds = _OF_MODULES if isinstance(owner, torch.nn.Module) else _OF_PARAMETERS
    for table, kind in kinds.items():
        for hook in (getattr(owner, table) or {}).values():
            yield kind, hook


def described(owner: torch.nn.Module | torch.Tensor) -> tuple[str, ...]:
    """Describe each hook in words, such as ``"forward_hook scaled (net.py:12)"``."""
    return tuple(f"{kind} {named(hook)}" for kind, hook in hooks_of(owner))


def described_global() -> tuple[str, ...]:
    """Describe the hooks that all modules have, in words."""
    scope = vars(torch.nn.modules.module)
    return tuple(f"{kind} {named(h)}" for table, kind in _OF_MODULES.items() for h in scope[f"_global{table}"].values())


@contextmanager
def hooks_as_they_were(model: torch.nn.Module) -> Iterator[Callable[[], set[str]]]:
    """Take away, at the end, what forwards hook into modules, as transformers does where hidden states are asked for.

    Gives a function that names the modules with other hooks by now.
    """
    tables = [
        (module_name, table, table.copy())
        for module_name, module in model.named_modules()
        for name in _TABLES
        if isinstance(table := vars(module).get(name), dict)
    ]

    def changed() -> set[str]:
        return {name for name, table, before in tables if table.keys() != before.keys()}

    try:
        yield changed
    finally:
        for _, table, before in tables:
            if table.keys() != before.keys():
                table.clear()
                table.update(before)


def named(hook: Any) -> str:
    """Name a function by its name and line, such as ``"scaled (net.py:12)"``."""
    while isinstance(hook, partial):
        hook = hook.func
    code = getattr(hook, "__code__", None)
    if code is None:
        return getattr(hook, "__name__", type(hook).__qualname__)
    return f"{hook.__qualname__} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})"


def carry_hooks(model: torch.nn.Module, fakes: Mapping[str, torch.Tensor]) -> None:
    """Give the fakes of parameters the hooks that change gradients.

    Raises:
        CaptureError: a hook that cannot be part of a step: one that runs once a gradient is added up, where an
            optimizer would be called, or one of several tensors.
    """
    for name, parameter in model.named_parameters():
        for kind, hook in hooks_of(parameter):
            if kind != "hook":
                raise CaptureError(
                    f"parameter {name!r} has a {kind}, {named(hook)}, which runs once its gradient is added up: "
                    "where and when that is, the plan decides. Change gradients in register_hook, leave updates to "
                    "the plan, and remove this hook before capture"
                )
            if getattr(hook, "__module__", "") == "torch.autograd.graph":
                raise CaptureError(
                    f"parameter {name!r} has a hook of register_multi_grad_hook, which waits for the gradients of "
                    "other tensors than the step has; use register_hook on each, or remove it before capture"
                )
            if parameter.requires_grad:
                fakes[name].register_hook(hook)


def check_hooks(model: torch.nn.Module, fakes: Mapping[str, torch.Tensor]) -> None:
    """Refuse a step that changes the hooks of parameters: the next one would run with others.

    Raises:
        CaptureError: names the parameter.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        before, after = list(hooks_of(parameter)), list(hooks_of(fakes[name]))
        if before != after:
            changed = next((h for h in reversed([*after, *before]) if (h in before) != (h in after)), after[-1])
            raise CaptureError(
                f"the step changes the hooks of parameter {name!r} ({changed[0]} {named(changed[1])}), so every step "
                "would run with others than the last; register or remove hooks before capture"
            )
