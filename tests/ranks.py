"""A function run by several processes of this host over gloo, one thread each."""

from __future__ import annotations

import faulthandler
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from tests.runs import YOUNG_OBJECTS


def run_ranks(function: Callable[..., None], ranks: int, *args: Any) -> None:
    """Call ``function(rank, *args)`` in each process of a group; a failing one fails all.

    Args:
        function: Of a module, as the processes import it.
    """
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_run, (ranks, folder, function, args), nprocs=ranks, start_method="forkserver")


def _run(rank: int, ranks: int, folder: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    faulthandler.enable()  # a rank that dies of a signal says where
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'meet'}", rank=rank, world_size=ranks)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()
