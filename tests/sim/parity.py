"""A model cut by torch itself under a fake process group, and what Lading says of the same layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lading.catalog.tables import family_table
from lading.ir.clusterplan import Keep
from lading.ir.layout import parse_layout
from lading.ir.request import Architecture, Request
from lading.ir.stack import Stack
from lading.ir.table import ModelTable
from lading.ir.work import Product
from lading.models.registry import build_model, model_class
from lading.sim.sequence import Issued, sequence_of
from lading.testing.recorder import Recorder

B, S, H, N, K, F, V, LAYERS = 2, 64, 64, 8, 4, 192, 256, 3
SIZES: dict[str, dict[str, int]] = {
    "gpt": {"h": H, "n": N, "v": V},
    "llama": {"h": H, "n": N, "v": V, "k": K, "f": F, "d": H // N},
}
#: Parameters in fp32, gathered in bf16, reduced in fp32: torchtitan's defaults.
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STACK = Stack(
    name="torch",
    title="PyTorch in eager mode",
    fusion="eager",
    parameters_dtype="float32",
    gradient_dtype="float32",
    master_weights=False,
    early_stop=True,
    regathers=False,
)


@contextmanager
def mesh_of(rank: int = 0, **axes: int) -> Iterator[DeviceMesh]:
    """A mesh of ranks that are not there, seen by one of them."""
    world = 1
    for size in axes.values():
        world *= size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()


def groups_of(mesh: DeviceMesh, **names: str) -> dict[str, dist.ProcessGroup]:
    """Groups of a mesh by the name that Lading has for the axis."""
    return {names.get(axis, axis): mesh.get_group(axis) for axis in mesh.mesh_dim_names or ()}


def table_of(family: str, layers: int = LAYERS) -> ModelTable:
    """Of the small model."""
    return family_table(family, layers=layers, **SIZES[family])


def request_of(family: str, layout: str, *, layers: int = LAYERS, stack: Stack = STACK) -> Request:
    """A step of the small model under a layout."""
    model = Architecture(family=family, symbols=SIZES[family], blocks=(("block", layers),))
    return Request(name="parity", model=model, seq_len=S, machine="h100", layout=parse_layout(layout), stack=stack)


def torch_model(family: str, layers: int = LAYERS) -> nn.Module:
    """The same model in PyTorch."""
    sizes: dict[str, Any] = {"num_layers": layers, "dim": H, "num_heads": N, "vocab_size": V, "max_seq_len": S}
    sizes |= {"num_kv_heads": K, "hidden_dim": F} if family == "llama" else {"tied": False}
    model = build_model(family, **sizes)
    for module in model.modules():  # tables of positions: in the dtype of what they turn
        for name, table in module.named_buffers(recurse=False):
            setattr(module, name, table.to(torch.bfloat16))
    return model


def fully_sharded(model: Any, mesh: DeviceMesh, *, keeps: bool | int = True) -> nn.Module:
    """Cut in units as torchtitan does (models/llama3/infra/parallelize.py, apply_fsdp): the last one stays."""
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": POLICY}
    before = [model.tokens]
    for module in (*before, *model.layers):
        fully_shard(module, **options, reshard_after_forward=keeps)
    fully_shard([model.norm, model.head], **options, reshard_after_forward=False)
    return fully_shard(model, **options)


def run_once(family: str, model: nn.Module) -> None:
    """Forward, loss and backward of one micro-batch."""
    batch = {"tokens": torch.zeros(B, S + 1, dtype=torch.int64)}
    model_class(family).loss(model, batch).backward()


def recorded(
    model: nn.Module, groups: Mapping[str, dist.ProcessGroup], step: Callable[[], object], *, warm: bool = True
) -> Recorder:
    """One step of a rank, after one that is not recorded: in the first things are made that stay."""
    if warm:
        step()
    for parameter in model.parameters():
        parameter.grad = None
    with Recorder(groups, [*model.parameters(), *model.buffers()]) as recorder:
        step()
    return recorder


def own(request: Request, table: ModelTable, *, rank: int = 0, keep: Keep = Keep.RELEASE) -> list[Issued]:
    """What Lading says that the rank issues."""
    return sequence_of(request, table, rank=rank, keep=keep)


Named = tuple[str, str, int]


def collectives(found: list[Issued] | Recorder) -> list[Named]:
    """Operation, axis and bytes of each collective, in order."""
    if isinstance(found, Recorder):
        return [(e.kind, e.axis, e.size_bytes) for e in found.collectives]
    return [(c.op, c.axis, c.size_bytes) for c in (i.collective for i in found) if c]


def products(found: list[Issued] | Recorder) -> list[tuple[int, ...]]:
    """Shapes of products, in order."""
    if isinstance(found, Recorder):
        return found.products
    details = [i.kernel.detail for i in found if i.kernel is not None]
    return [(d.m, d.n, d.k) if d.groups == 1 else (d.groups, d.m, d.n, d.k) for d in details if isinstance(d, Product)]
