"""The same model cut by torch's ``parallelize_module`` under a fake process group: same products and collectives."""

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lading.catalog.tables import family_table
from lading.ir.layout import Layout
from lading.ir.work import Collective, Kernel, Product, RankSegment, Stage
from lading.models.reference import build_model, model_class
from lading.parallel.memory import saved_bytes
from lading.parallel.ranks import rank_segment
from lading.parallel.recompute import recomputed

B, S, H, N, K, F, V, LAYERS = 2, 16, 64, 8, 4, 192, 96, 2
Event = tuple[str, tuple[int, ...]]
_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}


class Record(TorchDispatchMode):
    """Local products and collectives in order; shapes that DTensor tries on fake tensors are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if isinstance(out, FakeTensor):
            return out
        base = func._schema.name.split("::")[1]
        if base in ("mm", "addmm"):
            a, b = args[-2:]
            self.events.append(("product", (a.shape[0], b.shape[1], a.shape[1])))
        elif base in _COLLECTIVES:
            whole = max(prod(args[0].shape), prod(out.shape)) * out.element_size()
            self.events.append((_COLLECTIVES[base], (whole,)))
        return out


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.slow)])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    try:
        yield init_device_mesh("cpu", (request.param,))
    finally:
        dist.destroy_process_group()


def llama_plan(tokens: Any, sp: bool) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {"norm": SequenceParallel()} if sp else {}
    for i in range(LAYERS):
        p = f"layers.{i}."
        whole = {"input_layouts": (tokens, None), "desired_input_layouts": (Replicate(), None)}
        plan[p + "attn"] = PrepareModuleInput(**whole)
        plan[p + "mlp"] = PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(Replicate(),))
        plan |= {p + name: ColwiseParallel() for name in ("attn.wq", "attn.wk", "attn.wv", "mlp.gate", "mlp.up")}
        plan |= {p + name: RowwiseParallel(output_layouts=tokens) for name in ("attn.wo", "mlp.down")}
        plan |= {p + name: SequenceParallel() for name in ("attn_norm", "mlp_norm") if sp}
    return plan


def gpt_plan(tokens: Any, sp: bool) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {"norm": SequenceParallel()} if sp else {}
    for i in range(LAYERS):
        p = f"layers.{i}."
        plan |= {p + name: ColwiseParallel(input_layouts=tokens) for name in ("qkv", "mlp_in")}
        plan |= {p + name: RowwiseParallel(output_layouts=tokens) for name in ("attn_out", "mlp_out")}
        plan |= {p + name: SequenceParallel() for name in ("attn_norm", "mlp_norm") if sp}
    return plan


def torch_model(family: str, mesh: DeviceMesh, sp: bool) -> torch.nn.Module:
    sizes = {"num_layers": LAYERS, "dim": H, "num_heads": N, "vocab_size": V, "max_seq_len": S}
    sizes |= {"num_kv_heads": K, "hidden_dim": F} if family == "llama" else {"tied": False}
    model = build_model(family, **sizes).to(torch.bfloat16)
    tokens = Shard(1) if sp else Replicate()
    plan = (llama_plan if family == "llama" else gpt_plan)(tokens, sp)
    plan["tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)
    plan["head"] = ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False)
    if family == "gpt":
        for layer in model.layers:
            layer.num_heads //= mesh.size()
    return parallelize_module(model, mesh, plan)


def torch_events(family: str, mesh: DeviceMesh, sp: bool, *, full: bool = False) -> list[Event]:
    model = torch_model(family, mesh, sp)
    if full:
        for i in range(LAYERS):
            model.layers[i] = checkpoint_wrapper(model.layers[i])
    if family == "gpt" and sp:  # positions of the tokens of this rank
        model.positions.weight = torch.nn.Parameter(model.positions.weight[: S // mesh.size()].detach())
    batch = {"tokens": torch.zeros(B, S + 1, dtype=torch.int64)}
    with Record() as record, loss_parallel():
        model_class(family).loss(model, batch).backward()
    return record.events


def rank_segments(family: str, layout: Layout) -> list[RankSegment]:
    sizes = {"h": H, "n": N, "v": V} | ({"k": K, "f": F, "d": H // N} if family == "llama" else {})
    table = family_table(family, layers=LAYERS, **sizes)
    values = {**table.symbols, "s": S, "b": B}
    return [rank_segment(segment, values, layout, regather=False) for segment in table.segments]


def events(kernels: list[Kernel]) -> list[Event]:
    found: list[Event] = []
    for kernel in kernels:
        if isinstance(kernel.detail, Product):
            found.append(("product", (kernel.detail.m, kernel.detail.n, kernel.detail.k)))
        elif isinstance(kernel.detail, Collective):
            found.append((kernel.detail.op, (kernel.detail.size_bytes,)))
    return found


def own_events(family: str, layout: Layout, *, full: bool = False) -> list[Event]:
    before, layer, after = rank_segments(family, layout)
    order = [before, *[layer] * LAYERS, after]
    forward = [k for segment in order for k in segment.kernels if k.stage is Stage.FORWARD]
    backward: list[Kernel] = []
    for segment in reversed(order):
        again = recomputed(segment, "full" if full and segment is layer else "none", early_stop=True)
        backward += [segment.kernels[place] for place in again.kernels]
        backward += [k for k in segment.kernels if k.stage is not Stage.FORWARD]
    return events([*forward, *backward])


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_same_products_and_collectives_in_the_same_order(family: str, sp: bool, mesh: DeviceMesh):
    theirs = torch_events(family, mesh, sp)
    ours = own_events(family, Layout(tp=mesh.size(), sp=sp))
    # Torch reduces when a gradient is next read, ours as soon as it is there: beside the product for the weight.
    assert [e for e in ours if e[0] != "product"] == [e for e in theirs if e[0] != "product"]
    assert [e for e in ours if e[0] == "product"] == [e for e in theirs if e[0] == "product"]


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_same_with_full_recompute(family: str, sp: bool, mesh: DeviceMesh):
    """Torch gathers a gradient before it recomputes, ours after: the same otherwise, so order is not compared."""
    theirs = torch_events(family, mesh, sp, full=True)
    ours = own_events(family, Layout(tp=mesh.size(), sp=sp), full=True)
    assert Counter(ours) == Counter(theirs)
    assert len(ours) > len(own_events(family, Layout(tp=mesh.size(), sp=sp)))


def torch_saved_bytes(family: str, mesh: DeviceMesh, sp: bool) -> int:
    """Bytes that autograd keeps on a rank from forward to backward, parameters and tables left out."""
    model = torch_model(family, mesh, sp)
    if family == "gpt" and sp:
        model.positions.weight = torch.nn.Parameter(model.positions.weight[: S // mesh.size()].detach())
    local = [getattr(t, "_local_tensor", t) for t in (*model.parameters(), *model.buffers())]
    fixed = {t.untyped_storage()._cdata for t in local}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    batch = {"tokens": torch.zeros(B, S + 1, dtype=torch.int64)}
    with loss_parallel(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model_class(family).loss(model, batch)
        found = sum(size for storage, size in kept.items() if storage not in fixed)
        del loss
    return found


@pytest.mark.parametrize("sp", [False, True])
def test_as_many_bytes_are_kept(sp: bool, mesh: DeviceMesh):
    before, layer, after = rank_segments("gpt", Layout(tp=mesh.size(), sp=sp))
    ours = saved_bytes(before) + LAYERS * saved_bytes(layer) + saved_bytes(after)
    assert ours == pytest.approx(torch_saved_bytes("gpt", mesh, sp), rel=0.02)
