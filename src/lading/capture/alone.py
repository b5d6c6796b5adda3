"""Alone: a step is captured for one rank, so what brings other ranks in is refused by name.

A wrapper that reduces or gathers (DDP, FSDP, DataParallel) works by hooks on real parameters: captured, it would be
left out without a word, and replicas would drift apart. A collective has no part in a step that one rank plans.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lading.errors import CaptureError

#: What to do instead.
ADVICE = (
    "a captured step runs on one rank: capture the plain module, before it is wrapped or cut; for several ranks, cut "
    "it with lading.apply as `lading plan --model` says, and move it by an optimizer of torch or of lading.optim"
)
#: Namespaces of operations that other ranks take part in.
_OF_RANKS = frozenset(
    ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem", "_dtensor", "fsdp")
)
#: Where a wrapper's class is, and what people call it. What nobody has imported no module is of, and importing torch's
#: distributed parts takes most of a second, so that is not done here.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "DistributedDataParallel"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "DataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "FullyShardedDataParallel (FSDP1)"),
    ("torch.distributed.fsdp", "FSDPModule", "fully_shard (FSDP2)"),
)


def check_alone(model: nn.Module) -> None:
    """Make sure that nothing in a model works on several ranks or devices.

    Raises:
        CaptureError: a module is wrapped or cut, or a tensor is a piece of one; names it.
    """
    for path, module in model.named_modules():
        _check(module, f"module {path!r}" if path else "the model")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        check_whole(name, tensor)


def check_whole(name: str, tensor: torch.Tensor) -> None:
    """Make sure that a tensor is no piece of one that lies on several ranks.

    Raises:
        CaptureError: it is a DTensor.
    """
    if _is(tensor, "torch.distributed.tensor", "DTensor"):
        placements = getattr(tensor, "placements", "")
        raise CaptureError(f"{name}: expected a plain tensor, found a DTensor placed {placements}; {ADVICE}")


def _is(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _check(module: nn.Module, place: str) -> None:
    for where, kind, name in _WRAPPERS:
        if _is(module, where, kind):
            raise CaptureError(f"{place}: expected plain modules, found {name}; {ADVICE}")


@contextmanager
def refusing_wrappers() -> Iterator[None]:
    """Refuse the forward of a wrapper that is not in the model, as where the loss calls one that it closes over."""

    def check(module: nn.Module, _: Any) -> None:
        _check(module, f"the loss calls a {type(module).__name__}")

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def is_of_ranks(func: Any) -> bool:
    """Whether other ranks take part in an operation."""
    return func.namespace in _OF_RANKS
