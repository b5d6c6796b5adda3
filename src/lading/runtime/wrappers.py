"""Wrappers: modules of torch that reduce gradients of the parameters in them, whoever else does."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

_REDUCE = (DistributedDataParallel, FullyShardedDataParallel, DataParallel)


def reducing_wrapper(params: Sequence[torch.Tensor]) -> nn.Module | None:
    """A wrapper that lives and has one of these parameters, if there is one.

    A parameter does not know that a reducer waits for its gradient, so all objects of the process are looked through:
    some tens of milliseconds, for once.
    """
    wanted = {id(param) for param in params}
    for each in gc.get_objects():
        if issubclass(type(each), _REDUCE) and any(id(param) in wanted for param in each.parameters()):
            return each
    return None
