"""Sides of the comparison, each in a process of its own: ways to train one model that does not fit.

``serve`` runs in the side's process. It builds the side, says that it is ready, then trains the steps whose numbers
come in as lines, and answers each line with seconds, losses, and what the process has read, written and taken so far.
"""

from __future__ import annotations

import gc
import importlib
import json
import mmap
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from tools.batches import random_batch

from lading.models.reference import build_model, model_class
from lading.optim.master import MasterWeights
from lading.runtime.resident import PeakMeter, resident_bytes, trim

LR, SEED = 1e-3, 0
#: Elements of a sub-group of DeepSpeed's states; a parameter that is larger is one by itself.
_SUB_GROUP = 7_000_000


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side: a way to train a model on batches of one row.

    Attributes:
        kind: "plain", "lading", "deepspeed", "deepspeed-all", "fsdp2" or "paging".
        precision: "fp32", or "bf16" with float32 masters.
        plan: File of a Lading side's plan.
        folder: Folder on the disk for what a side keeps there.
        limit_bytes: Bytes that a "paging" side may add, its page cache included.
    """

    kind: str
    model: str
    sizes: dict[str, Any]
    tokens: int
    precision: str
    threads: int
    folder: str
    plan: str = ""
    limit_bytes: int = 0

    @property
    def all_sizes(self) -> dict[str, Any]:
        """Sizes with the length of a sequence."""
        return {**self.sizes, "max_seq_len": self.tokens}

    @property
    def dtype(self) -> torch.dtype:
        """Number format of parameters."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def module(self) -> torch.nn.Module:
        """Build the model, with the same values each time."""
        torch.manual_seed(SEED)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            return build_model(self.model, **self.all_sizes).train()
        finally:
            torch.set_default_dtype(before)

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        """Draw the batch of a step, the same for all sides."""
        return random_batch(self.model, self.all_sizes, rows=1, tokens=self.tokens, seed=number)


Step = Callable[[dict[str, torch.Tensor]], float]


def plain(side: Side) -> Step:
    """All in memory, with the fused AdamW."""
    return _plain_step(side, side.module())


def stock_step(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[..., torch.Tensor],
    masters: MasterWeights | None = None,
) -> Step:
    """Step of plain PyTorch: loss, backward, update, of float32 masters where a module in 16 bits has them."""

    def step(batch: dict[str, torch.Tensor]) -> float:
        loss = loss_of(module, batch)
        loss.backward()
        if masters is not None:
            masters.add_gradients()
        optimizer.step()
        if masters is not None:
            masters.write_back()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def _plain_step(side: Side, module: torch.nn.Module) -> Step:
    masters = MasterWeights(module)
    optimizer = torch.optim.AdamW(masters.parameters, lr=LR, fused=True)
    return stock_step(module, optimizer, model_class(side.model).loss, masters)


def lading(side: Side) -> Step:
    """Train by a plan that was made before, from the same values."""
    package: Any = importlib.import_module("lading")
    defer: Any = importlib.import_module("lading.tracing.initial").defer
    initial = defer(side.module)
    graph = package.capture(initial.model, side.batch(0), model_class(side.model).loss)
    trainer = package.Trainer(
        side.plan, graph, None, folder=side.folder, threads=side.threads, optimizer=package.AdamW(lr=LR)
    )
    initial.materialize(SEED, trainer.set_value)
    return trainer.step


def fsdp2(side: Side) -> Step:
    """FSDP2 on one rank of gloo with its parameters and states offloaded."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _one_rank()
    mesh: Any = importlib.import_module("torch.distributed").device_mesh.init_device_mesh("cpu", (1,))
    torch.set_default_dtype(torch.float32)
    module = Side(**{**asdict(side), "precision": "fp32"}).module()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy: dict[str, Any] = {"mp_policy": mixed} if side.precision == "bf16" else {}
    policy |= {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for layer in module.layers:  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(layer, **policy)
    fully_shard(module, **policy)
    for each in module.modules():  # those of rotation, which are in a parameter's format elsewhere
        for name, buffer in each.named_buffers(recurse=False):
            setattr(each, name, buffer.to(side.dtype))
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)
    return stock_step(module, optimizer, model_class(side.model).loss)


def deepspeed(side: Side, *, parameters: bool) -> Step:
    """ZeRO-3 with the optimizer's states, and on demand parameters, on NVMe, read and written while others update."""
    package: Any = importlib.import_module("deepspeed")
    _one_rank()
    package.init_distributed("gloo")
    module = side.module()
    largest = max(each.numel() for each in module.parameters())
    configuration = _configuration(side, largest + -largest % 4096, parameters=parameters)
    # Given a module with whole parameters, 0.19.8 makes them bfloat16 on a CPU without float16, whatever is configured.
    package.zero.Init(module=module, config_dict_or_path=configuration)
    engine, *_ = package.initialize(model=module, model_parameters=module.parameters(), config=configuration)
    loss_of = model_class(side.model).loss

    def step(batch: dict[str, torch.Tensor]) -> float:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def _configuration(side: Side, largest: int, *, parameters: bool) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": side.folder, "pin_memory": False}
    states = {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True, "fast_init": False}
    on_disk = {**nvme, "buffer_count": 8, "buffer_size": largest, "max_in_cpu": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": side.precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "overlap_comm": False,
            "reduce_bucket_size": 5_000_000,
            "sub_group_size": _SUB_GROUP,
            "stage3_param_persistence_threshold": 10_000,
            "stage3_prefetch_bucket_size": 10_000_000,
            "stage3_max_live_parameters": 50_000_000,
            "stage3_max_reuse_distance": 50_000_000,
            **({"offload_param": on_disk} if parameters else {}),
            "offload_optimizer": {**nvme, **states},
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 16,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def paging(side: Side) -> Step:
    """Leave paging to the system: weights and states are one file mapped into memory, in a control group.

    A machine without swap has no other way to let the system page what PyTorch trains. Its processes are killed when
    what is not mapped does not fit.

    Raises:
        OSError: the machine has no control groups of version 1, or this process may not make one.
    """
    module = side.module()
    if side.precision != "fp32":
        raise OSError("expected fp32, as masters are made by another class; measure fp32")
    parameters = [*module.parameters()]
    file, whole, mapped = _mapped([3 * 4 * p.numel() for p in parameters], Path(side.folder) / "mapped")
    optimizer = torch.optim.AdamW(parameters, lr=LR, fused=True)
    for parameter, room in zip(parameters, mapped, strict=True):
        value, first, second = room.view(3, -1)
        value.copy_(parameter.detach().flatten())
        parameter.data = value.view(parameter.shape)
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": first.view(parameter.shape),
            "exp_avg_sq": second.view(parameter.shape),
        }
    gc.collect()
    trim()
    whole.flush()
    whole.madvise(mmap.MADV_DONTNEED)
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what comes back counts in the group
    _confine(side.limit_bytes)
    loss_of = model_class(side.model).loss

    def step(batch: dict[str, torch.Tensor]) -> float:
        loss = loss_of(module, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def _mapped(sizes: Sequence[int], path: Path) -> tuple[IO[bytes], mmap.mmap, list[torch.Tensor]]:
    """Map one file of float32 numbers: the file, the mapping, and a tensor for each size in bytes."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    file = path.open("w+b")
    file.truncate(starts[-1])
    whole = mmap.mmap(file.fileno(), starts[-1])
    path.unlink()
    tensors = [
        torch.frombuffer(whole, dtype=torch.float32, count=size // 4, offset=start)
        for size, start in zip(sizes, starts, strict=False)
    ]
    return file, whole, tensors


def control_group(process: int) -> Path | None:
    """Name the control group of a side's process; None on a host without those of version 1."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":", 2)[2] for line in lines if ":memory:" in line), None)
    return None if own is None else Path("/sys/fs/cgroup/memory") / own.strip("/") / f"lading-benchmark-{process}"


def _confine(limit_bytes: int) -> None:
    """Put this process into a control group that may take so many bytes more than it has."""
    group = control_group(os.getpid())
    if group is None:
        raise OSError("expected control groups of version 1 with memory, found none; leave the side out")
    group.mkdir()
    # What the process has already stays counted above, so the limit is for what it touches from now on.
    (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _one_rank() -> None:
    distributed: Any = importlib.import_module("torch.distributed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "1", "RANK": "0"}
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    distributed.init_process_group("gloo")


MAKERS: dict[str, Callable[[Side], Step]] = {
    "plain": plain,
    "lading": lading,
    "fsdp2": fsdp2,
    "deepspeed": lambda side: deepspeed(side, parameters=False),
    "deepspeed-all": lambda side: deepspeed(side, parameters=True),
    "paging": paging,
}


#: Packages of a side, which are imported before its memory is counted.
_PACKAGES = {
    "lading": ("lading.trainer", "lading.tracing.trace", "torch._dynamo"),  # capturing imports the last one
    "fsdp2": ("torch.distributed.fsdp",),
    "deepspeed": ("deepspeed",),
    "deepspeed-all": ("deepspeed",),
}


def disk_bytes() -> tuple[int, int]:
    """Read the bytes that this process had the disk read and write so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def serve(side: Side) -> None:
    """Train as a side: a line of step numbers comes in, a line of what they took goes out."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the libraries print goes to the log
    torch.set_num_threads(side.threads)
    for package in _PACKAGES.get(side.kind, ()):
        importlib.import_module(package)
    trim()
    before = resident_bytes()
    step = MAKERS[side.kind](side)
    torch.set_num_threads(side.threads)  # a library may have changed it
    built_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"built": built_bytes}), file=answers)
    meter, is_built = PeakMeter(), False
    for line in sys.stdin:
        batches = [side.batch(number) for number in json.loads(line)]
        seconds, losses = list[float](), list[float]()
        for batch in batches:
            started = time.perf_counter()
            losses.append(step(batch))
            seconds.append(time.perf_counter() - started)
        answer = {"seconds": seconds, "losses": losses, "disk": disk_bytes(), "peak": meter.peak_bytes() - before}
        print(json.dumps({**answer, "process": meter.peak_bytes()}), file=answers)
        if not is_built:  # the warm-up does not count
            is_built = True
            trim()
            meter.reset()


if __name__ == "__main__":
    serve(Side(**json.loads(sys.argv[1])))
