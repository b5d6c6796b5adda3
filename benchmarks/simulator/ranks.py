"""Small runs of stock PyTorch on gloo ranks of this host: DDP, FSDP2, tensor parallel and pipelines.

``here.py`` runs and predicts them; one by hand, for so many seconds, its figures as JSON:

    python benchmarks/simulator/ranks.py 5 4.0
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tools.batches import random_batch
from tools.recorder import Recorder
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lading.ir.layout import Layout, parse_layout
from lading.models.reference import build_model, model_class
from lading.runtime.probe_sharing import kernels_s


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run: its layout says the ranks, the batch and what is done to the model."""

    model: str
    sizes: dict[str, Any]
    layout: str
    tokens: int = 256

    @property
    def parsed(self) -> Layout:
        """Its layout, in fp32."""
        return parse_layout(f"fp32,{self.layout}")

    def __str__(self) -> str:
        return f"{self.model} {self.layout}"


_GPT = {"num_layers": 4, "dim": 512, "num_heads": 8, "vocab_size": 4096, "max_seq_len": 256, "tied": False}
_LLAMA = {
    "num_layers": 4, "dim": 512, "num_heads": 8, "num_kv_heads": 4, "hidden_dim": 1408, "vocab_size": 4096,
    "max_seq_len": 256,
}  # fmt: skip
_SMALL = {**_LLAMA, "dim": 384, "num_heads": 6, "num_kv_heads": 2, "hidden_dim": 1024}
_MOE = {
    "num_layers": 3, "dim": 256, "num_heads": 4, "num_kv_heads": 4, "hidden_dim": 512, "vocab_size": 2048,
    "max_seq_len": 256,
}  # fmt: skip
#: Seconds for which kernels are timed before and after the steps.
_KERNELS_S = 0.6
#: Modules before and after the layers; positions are read without a call, so they stay with the root.
_BEFORE, _AFTER = ("tokens", "patches", "steps", "labels"), ("norm", "modulation", "head")
_DIT = {"num_layers": 6, "dim": 384, "num_heads": 6}
RUNS = (
    Run(model="gpt", sizes=_GPT, layout="mb2,gb2"),
    Run(model="llama", sizes=_LLAMA, layout="mb2,gb4,recompute=full"),
    Run(model="gpt", sizes={**_GPT, "num_layers": 3}, layout="dp2,mb1,gb4"),
    Run(model="moe", sizes=_MOE, layout="dp3,mb2,gb6"),
    Run(model="llama", sizes=_LLAMA, layout="dp2,zero3,mb2,gb4"),
    Run(model="dit", sizes=_DIT, layout="dp2,zero3,mb8,gb16,recompute=full"),
    Run(model="gpt", sizes={**_GPT, "dim": 384, "num_heads": 6}, layout="dp4,zero2,mb2,gb8"),
    Run(model="llama", sizes=_LLAMA, layout="tp2,mb2,gb2"),
    Run(model="llama", sizes={**_LLAMA, "num_layers": 3}, layout="tp4,sp,mb2,gb2"),
    Run(model="gpt", sizes=_GPT, layout="pp2,mb1,gb4"),
    Run(model="llama", sizes=_SMALL, layout="pp2,dp2,zero2,gpipe,mb1,gb8"),
    Run(model="llama", sizes=_SMALL, layout="tp2,dp2,zero3,mb2,gb4"),
)


class Chunk(nn.Module):
    """Some layers of a GPT or Llama, with the embeddings if they are the first and the head if they are the last."""

    def __init__(self, model: Any, layers: range, total: int) -> None:
        super().__init__()
        self.is_first, self.is_last = layers.start == 0, layers.stop == total
        self.layers = nn.ModuleList(model.layers[i] for i in layers)
        self.rope = getattr(model, "rope", None)
        self.tokens = model.tokens if self.is_first else None
        self.positions = getattr(model, "positions", None) if self.is_first else None
        self.norm, self.head = (model.norm, model.head) if self.is_last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None:
            length = x.shape[1]
            x = self.tokens(x)
            x = x if self.positions is None else x + self.positions.weight[:length]
        for layer in self.layers:
            x = layer(x) if self.rope is None else layer(x, self.rope)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def tensor_parallel_plan(layers: int, sp: bool) -> dict[str, ParallelStyle]:
    """Styles of a Llama's modules by name, as torchtitan has them."""
    tokens = Shard(1) if sp else Replicate()
    plan: dict[str, ParallelStyle] = {"norm": SequenceParallel()} if sp else {}
    for i in range(layers):
        p = f"layers.{i}."
        plan[p + "attn"] = PrepareModuleInput(input_layouts=(tokens, None), desired_input_layouts=(Replicate(), None))
        plan[p + "mlp"] = PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(Replicate(),))
        plan |= {p + name: ColwiseParallel() for name in ("attn.wq", "attn.wk", "attn.wv", "mlp.gate", "mlp.up")}
        plan |= {p + name: RowwiseParallel(output_layouts=tokens) for name in ("attn.wo", "mlp.down")}
        plan |= {p + name: SequenceParallel() for name in ("attn_norm", "mlp_norm") if sp}
    plan["tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)
    plan["head"] = ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False)
    return plan


def parallel_model(run: Run, mesh: DeviceMesh) -> nn.Module:
    """The model of a rank without a pipeline."""
    layout = run.parsed
    model: Any = build_model(run.model, **run.sizes)
    if layout.tp > 1:
        model = parallelize_module(model, mesh["tp"], tensor_parallel_plan(len(model.layers), layout.sp))
    if layout.recompute == "full":
        for i, layer in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(layer)
    if layout.zero:
        return _sharded(model, layout, mesh)
    if layout.dp > 1:
        group = mesh["dp"].get_group()
        return DistributedDataParallel(model, None, process_group=group, gradient_as_bucket_view=True)
    return model


def _sharded(model: Any, layout: Layout, mesh: DeviceMesh) -> nn.Module:
    """As torchtitan: a unit is what is before the layers, a layer, or what is after them; the last stays gathered."""
    before = [m for name in _BEFORE if (m := getattr(model, name, None)) is not None]
    after = [m for name in _AFTER if (m := getattr(model, name, None)) is not None]
    units = [before, *([layer] for layer in model.layers), after]
    for unit in units:
        kept = layout.zero == 3 and unit is not units[-1]
        for parts in [unit] if len(unit) > 1 else unit:
            fully_shard(parts, mesh=mesh["dp"], reshard_after_forward=kept)
    return fully_shard(model, mesh=mesh["dp"])


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    """Fused; what is cut and what is not are groups of their own, as one call takes no mix."""
    groups: dict[bool, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, fused=True)


class Step:
    """One training step of a rank, without a pipeline."""

    def __init__(self, run: Run, mesh: DeviceMesh) -> None:
        self.run, self.layout = run, run.parsed
        self.model = parallel_model(run, mesh)
        self.optimizer = _adamw(self.model)
        self.loss = model_class(run.model).loss
        rank = mesh["dp"].get_local_rank()
        rows, count = self.layout.micro_batch, self.layout.micro_batches
        self.batches = [
            random_batch(run.model, run.sizes, rows=rows, tokens=run.tokens, seed=rank * count + i)
            for i in range(count)
        ]
        self.parallel_loss = loss_parallel if self.layout.tp > 1 else nullcontext

    def __call__(self) -> None:
        for number, batch in enumerate(self.batches):
            last = number == len(self.batches) - 1
            with self._syncs(last), self.parallel_loss():
                self._loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        model: Any = _Buffers(self.model) if self.run.model == "dit" else self.model
        loss = self.loss(model, batch)
        return loss / len(self.batches) if len(self.batches) > 1 else loss

    def _syncs(self, last: bool) -> Any:
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return nullcontext()


class _Buffers:
    """A wrapped DiT whose loss finds the buffers of the DiT."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any) -> torch.Tensor:
        return self.model(*args)

    def get_buffer(self, name: str) -> torch.Tensor:
        return getattr(self.model, "module", self.model).get_buffer(name)


class PipelineStep:
    """One training step of a rank of a pipeline."""

    def __init__(self, run: Run, mesh: DeviceMesh) -> None:
        layout = run.parsed
        model: Any = build_model(run.model, **run.sizes)
        count, rank = len(model.layers) // layout.pp, mesh["pp"].get_local_rank()
        chunk: nn.Module = Chunk(model, range(rank * count, (rank + 1) * count), len(model.layers))
        del model
        if layout.zero:
            chunk = _sharded(chunk, layout, mesh)
        stage = PipelineStage(chunk, rank, layout.pp, torch.device("cpu"), group=mesh["pp"].get_group())
        kind = ScheduleGPipe if layout.schedule == "gpipe" else Schedule1F1B
        self.schedule = kind(stage, layout.micro_batches, loss_fn=_cross_entropy)
        self.optimizer = _adamw(chunk)
        rows = layout.micro_batch * layout.micro_batches
        seed = mesh["dp"].get_local_rank()
        batch = random_batch(run.model, run.sizes, rows=rows, tokens=run.tokens, seed=seed)["tokens"]
        self.inputs = (batch[:, :-1],) if rank == 0 else ()
        self.target: dict[str, Any] = {"target": batch[:, 1:]} if rank == layout.pp - 1 else {}

    def __call__(self) -> None:
        self.schedule.step(*self.inputs, **self.target, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@contextmanager
def _group(rank: int, layout: Layout, folder: str) -> Iterator[DeviceMesh]:
    timeout = timedelta(seconds=180)
    where = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=layout.devices, timeout=timeout)
    try:
        yield init_device_mesh("cpu", (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp"))
    finally:
        dist.destroy_process_group()


def _rank(rank: int, run: Run, folder: str, seconds: float, max_steps: int) -> None:
    """One rank; writes its figures. What the host's kernels take is measured before the steps and after."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with _group(rank, run.parsed, folder) as mesh:
        made: Callable[[Run, DeviceMesh], Callable[[], None]] = PipelineStep if run.parsed.pp > 1 else Step
        found = _peak(lambda: made(run, mesh))
        if seconds:
            before = kernels_s(_KERNELS_S)
            found |= _timed(made(run, mesh), seconds, max_steps)
            found["kernels_s"] = [before, kernels_s(_KERNELS_S)]
        Path(folder, f"rank{rank}.json").write_text(json.dumps(found))


def _timed(step: Callable[[], None], seconds: float, max_steps: int) -> dict[str, Any]:
    """Wall and processor seconds of steps after two that do not count; how many there are is agreed on."""
    for _ in range(2):
        step()
    dist.barrier()
    began = time.perf_counter()
    step()
    once = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(once, dist.ReduceOp.MAX)
    count = max(5, min(max_steps, int(seconds / float(once))))
    wall, processor = [time.perf_counter()], [time.process_time()]
    for _ in range(count):
        step()
        wall.append(time.perf_counter())
        processor.append(time.process_time())
    return {"wall_s": _differences(wall), "processor_s": _differences(processor)}


def _differences(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def _peak(make: Callable[[], Callable[[], None]]) -> dict[str, Any]:
    """Most bytes of tensors alive at once in the third step: parameters, states and all else."""
    with Recorder({}) as record:
        step = make()
        for _ in range(2):
            step()
        dist.barrier()
        record.peak_bytes = record.live_bytes
        step()
        dist.barrier()
        return {"start_bytes": record.live_bytes, "peak_bytes": record.peak_bytes}


def measure(run: Run, seconds: float, max_steps: int = 60) -> list[dict[str, Any]]:
    """Figures of each rank: memory, and steps for so many seconds if not 0."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (run, folder, seconds, max_steps), nprocs=run.parsed.devices, start_method="spawn")
        return [json.loads(Path(folder, f"rank{r}.json").read_text()) for r in range(run.parsed.devices)]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = RUNS[int(sys.argv[1])]
    print(json.dumps(measure(chosen, float(sys.argv[2]) if len(sys.argv) > 2 else 4.0)))
