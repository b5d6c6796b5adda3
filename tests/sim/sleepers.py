"""A pipeline of sleeping stages, run by torch over gloo: what it takes is what its schedule takes.

python -m tests.sim.sleepers folder      # all kinds on 3 ranks; seconds.json has the best step of each
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

#: Seconds of a stage's forward, input gradient and weight gradient.
FORWARD_S, INPUT_S, WEIGHT_S = 0.04, 0.05, 0.03
RANKS, MICRO_BATCHES = 3, 6
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1, "zbv": 2, "dualpipe-v": 2}
NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}


def stage_module() -> Any:
    """Takes ``FORWARD_S`` forward, and on the way back ``INPUT_S`` and ``WEIGHT_S``, each on its own path."""
    import torch

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, before_s: float, after_s: float) -> Any:
            ctx.after_s = after_s
            time.sleep(before_s)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            time.sleep(ctx.after_s)
            return grad.clone(), None, None

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: Any) -> Any:
            return Slow.apply(x, FORWARD_S, INPUT_S) * Slow.apply(self.weight, 0.0, WEIGHT_S)

    return Stage()


def run_kind(rank: int, kind: str) -> float:
    """Seconds of the best of three steps of one schedule."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    from lading.ir.schedules import schedule

    plan = schedule(kind, RANKS, CHUNKS[kind], MICRO_BATCHES)
    mine = plan.stages_of(rank)
    device, example = torch.device("cpu"), torch.ones(1, 4, requires_grad=True)
    stages = [
        PipelineStage(stage_module(), s, plan.stages, device, input_args=example, output_args=example * 1) for s in mine
    ]
    held: Any = stages if len(stages) > 1 or kind == "zero-bubble" else stages[0]
    runner = get_schedule_class(NAMES[kind])(
        held, MICRO_BATCHES, loss_fn=lambda y, t: ((y - t) ** 2).mean(), scale_grads=False
    )
    inputs = (torch.ones(MICRO_BATCHES, 4),) if 0 in mine else ()
    target = {"target": torch.zeros(MICRO_BATCHES, 4)} if plan.stages - 1 in mine else {}
    took: list[float] = []
    for _ in range(3):
        dist.barrier()
        began = time.perf_counter()
        runner.step(*inputs, **target)
        dist.barrier()
        took.append(time.perf_counter() - began)
    return min(took)


def run_rank(rank: int, folder: str) -> None:
    """All kinds on one rank; rank 0 writes what they took."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", rendezvous, timeout=timedelta(seconds=120), rank=rank, world_size=RANKS)
    took = {kind: run_kind(rank, kind) for kind in NAMES}
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(took))
    dist.destroy_process_group()


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    running = [spawn.Process(target=run_rank, args=(rank, sys.argv[1])) for rank in range(RANKS)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in running))


if __name__ == "__main__":
    main()
