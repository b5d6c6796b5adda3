"""Alone: a step is captured for one rank and trained on one, so what brings other ranks in is refused by name.

A wrapper that reduces or gathers (DDP, FSDP, DataParallel) works by hooks on real parameters: captured, it would be
left out without a word, and replicas would drift apart. A collective has no part in a step that one rank plans.
"""

from __future__ import annotations

import gc
import importlib
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lading.errors import CaptureError, ConfigError

#: What to do instead.
ADVICE = (
    "a captured step runs on one rank: capture the plain module, before it is wrapped or cut; for several ranks, cut "
    "it with lading.apply as `lading plan --model` says, and move it by an optimizer of torch or of lading.optim"
)
#: Namespaces of operations that other ranks take part in.
_OF_RANKS = frozenset(
    ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem", "_dtensor", "fsdp")
)
#: What to do instead of one Trainer on each of several ranks.
_ADVICE_ON_TRAINING = (
    'its plan is for one rank, so each would train a model of its own: plan in the job, or with layout="dp4" for four '
    "ranks; or cut the model with lading.apply and move it by an optimizer of torch or of lading.optim; or, where each "
    'is to train for itself, as in a sweep, plan with layout="dp1" and give independent=True'
)
#: Where a wrapper's class is, and what people call it. What nobody has imported no module is of, and importing torch's
#: distributed parts takes most of a second, so that is not done here.
_REDUCE = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "DistributedDataParallel"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "DataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "FullyShardedDataParallel (FSDP1)"),
)
_WRAPPERS = (*_REDUCE, ("torch.distributed.fsdp", "FSDPModule", "fully_shard (FSDP2)"))


def reducing_wrapper(params: Sequence[torch.Tensor]) -> nn.Module | None:
    """Find a module of torch that reduces gradients of some of these parameters, whoever else does; None without one.

    A parameter does not know that a reducer waits for its gradient, so all objects of the process are looked through:
    some tens of milliseconds, for once.
    """
    param_ids = {id(param) for param in params}
    kinds = tuple(
        getattr(sys.modules[module_name], kind) for module_name, kind, _ in _REDUCE if module_name in sys.modules
    )
    for candidate in gc.get_objects():
        if issubclass(type(candidate), kinds) and any(id(param) in param_ids for param in candidate.parameters()):
            return candidate
    return None


def num_ranks() -> tuple[int, str]:
    """Number of ranks of the job that this process belongs to, and what says so: torch.distributed, or the launcher."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        world_size = 1 if "fake" in distributed.get_backend() else distributed.get_world_size()
        return world_size, "torch.distributed is initialized"
    told_by_launcher = os.environ.get("WORLD_SIZE", "")
    return int(told_by_launcher) if told_by_launcher.isdecimal() else 1, "its launcher set WORLD_SIZE"


def import_groupless() -> None:
    """Import the part of torch whose functions keep the process group that is there when it is imported.

    torch.distributed.nn.functional has that group as a default argument, and fake tensors import it (by torch._dynamo).
    A group that is kept outlives ``destroy_process_group``, gloo's threads with it, and a thread that lets go of a
    tensor as Python ends takes the process down ("terminate called without an active exception", one end of 20 with
    torch 2.13). So it is imported before a job is joined, or as if none were.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or "torch.distributed.nn.functional" in sys.modules:
        return
    world_group, distributed.group.WORLD = distributed.group.WORLD, None
    try:
        importlib.import_module("torch.distributed.nn.functional")
    finally:
        distributed.group.WORLD = world_group


def rank_number() -> int:
    """Number of this process in its job; 0 alone."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    told_by_launcher = os.environ.get("RANK", "")
    return int(told_by_launcher) if told_by_launcher.isdecimal() else 0


def ranks_here() -> int:
    """Number of the job's ranks on this host, as its launcher says; all of them where it does not."""
    told_by_launcher = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told_by_launcher) if told_by_launcher.isdecimal() else num_ranks()[0]


def restarts() -> int:
    """Number of times that the launcher has started this job again after a rank had failed (``--max-restarts``)."""
    told_by_launcher = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(told_by_launcher) if told_by_launcher.isdecimal() else 0


def agent() -> str:
    """Name of the torchrun process that started this one, unlike that of any other; "" where none did.

    It starts ranks again when one has failed or when others join or leave; of the last two it keeps no count.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    parent, stat = os.getppid(), Path(f"/proc/{os.getppid()}/stat")
    began = stat.read_text().rpartition(")")[2].split()[19] if stat.is_file() else ""
    return f"{platform.node()} {parent} {began} {os.environ['TORCHELASTIC_RUN_ID']}"


def launcher(ranks: int) -> str:
    """Start of a command line that starts so many ranks on this host: ``torchrun ... -m ``, or nothing for one."""
    return f"torchrun --standalone --nproc-per-node {ranks} -m " if ranks > 1 else ""


def check_only_rank() -> None:
    """Make sure that no other rank would train beside this one.

    Raises:
        ConfigError: the job has several.
    """
    count, why = num_ranks()
    if count > 1:
        raise ConfigError(f"expected a job of one process, found one of {count} ranks ({why}); {_ADVICE_ON_TRAINING}")


def check_alone(model: nn.Module) -> None:
    """Make sure that nothing in a model works on several ranks or devices.

    In a job of several ranks the model must not be the inside of a wrapper either: captured without it, replicas would
    drift apart.

    Raises:
        CaptureError: a module is wrapped or cut, or a tensor is a piece of one; names it.
    """
    for path, module in model.named_modules():
        _check(module, f"module {path!r}" if path else "the model")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        check_whole(name, tensor)
    if num_ranks()[0] > 1:
        parameters = list(model.parameters())
        if reducing_wrapper(parameters) is not None:
            gc.collect()  # one that was let go of waits for nothing
        if (wrapper := reducing_wrapper(parameters)) is not None:
            raise CaptureError(
                f"the model: expected parameters of its own, found them in a {type(wrapper).__name__} too, which would "
                f"reduce their gradients; {ADVICE}"
            )


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
    for module_name, kind, name in _WRAPPERS:
        if _is(module, module_name, kind):
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
