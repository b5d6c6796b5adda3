"""A model cut by torch itself under a fake process group, and what Lading says of the same layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tests.sim.sequence import Issued
from tools.recorder import Recorder
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining import stage as stage_module
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as rings
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from lading.catalog.tables import family_table
from lading.ir.graph import Role
from lading.ir.layout import parse_layout
from lading.ir.request import Architecture, StepRequest
from lading.ir.stack import Stack
from lading.ir.table import ModelTable
from lading.ir.work import Product
from lading.models.reference import build_model, model_class
from lading.sim.simulate import simulate

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
    fp32_rings=True,
    blocks_ahead=False,
)
#: Parameters and gradients in bf16, as a model without FSDP has them here.
HALF = dataclasses.replace(STACK, parameters_dtype="bfloat16", gradient_dtype="bfloat16")


@torch.library.custom_op("parity::rms_norm", mutates_args=())
def _norm(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm as one kernel, as on a GPU; on a CPU torch has several. Values do not matter."""
    return x.clone(), x.new_ones((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("parity::rms_norm_backward", mutates_args=())
def _norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return grad.clone(), weight.clone()


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(False)


_norm.register_autograd(lambda ctx, grad, _: _norm_backward(grad, *ctx.saved_tensors), setup_context=_keep)


_in_parts = functional.rms_norm


def whole_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``functional.rms_norm`` as one operation, for plain tensors."""
    return _in_parts(x, shape, weight, eps) if isinstance(weight, DTensor) else _norm(x, weight)[0]


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


def request_of(family: str, layout: str, *, seq: int = S, layers: int = LAYERS, stack: Stack = STACK) -> StepRequest:
    """A step of the small model under a layout."""
    model = Architecture(family=family, symbols=SIZES[family], blocks=(("block", layers),))
    return StepRequest(
        name="parity", model=model, seq_len=seq, machine="h100", layout=parse_layout(layout), stack=stack
    )


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
    for module in (model.tokens, *model.layers):
        if module is not None:
            fully_shard(module, **options, reshard_after_forward=keeps)
    if model.head is not None:
        fully_shard([model.norm, model.head], **options, reshard_after_forward=False)
    return fully_shard(model, **options)


def run_once(family: str, model: nn.Module, seq: int = S) -> None:
    """Forward, loss and backward of one micro-batch."""
    batch = {"tokens": torch.zeros(B, seq + 1, dtype=torch.int64)}
    with patch.object(functional, "rms_norm", whole_norm):
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


def checkpointed(model: Any) -> nn.Module:
    """Each block runs again in backward."""
    for place, layer in enumerate(model.layers):
        model.layers[place] = checkpoint_wrapper(layer)
    return model


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sp: bool) -> nn.Module:
    """A Llama cut by ``parallelize_module``, the head's loss over the vocabulary."""
    tokens: Any = Shard(1) if sp else Replicate()
    whole = {"desired_input_layouts": (Replicate(), None), "input_layouts": (tokens, None)}
    plan: dict[str, ParallelStyle] = {"norm": SequenceParallel()} if sp else {}
    for place in range(len(list(model.get_submodule("layers").children()))):
        p = f"layers.{place}."
        plan[p + "attn"] = PrepareModuleInput(**whole)
        plan[p + "mlp"] = PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(Replicate(),))
        plan |= {p + name: ColwiseParallel() for name in ("attn.wq", "attn.wk", "attn.wv", "mlp.gate", "mlp.up")}
        plan |= {p + name: RowwiseParallel(output_layouts=tokens) for name in ("attn.wo", "mlp.down")}
        plan |= {p + name: SequenceParallel() for name in ("attn_norm", "mlp_norm") if sp}
    plan["tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)
    plan["head"] = ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False)
    there = {name for name, _ in model.named_modules()}  # a part of a pipeline has some of them
    return parallelize_module(model, mesh, {name: style for name, style in plan.items() if name in there})


def own_peak(request: StepRequest, *, rank: int = 0) -> int:
    """What Lading says is alive at most, without the optimizer's states."""
    memory = simulate(request, table_of(request.model.family, request.model.layers)).memory[rank]
    return sum(size for role, size in memory.items() if role is not Role.OPTIMIZER_STATE)


class RingAttention(torch.autograd.Function):
    """torch's own ring over the ranks of a group (``context_parallel``), with the kernel that a CPU has."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = rings._templated_ring_attention(group, 2, op, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        kept, options = ctx.saved_tensors, {"is_causal": True, "dropout_p": 0.0}
        found = rings._templated_ring_attention_backward(ctx.group, 2, op, *grads, "grad_out", *kept, **options)
        return (*found[:3], None)


@contextmanager
def context_parallel(group: dist.ProcessGroup, method: str) -> Iterator[None]:
    """Attentions meet the keys and values of other ranks: "ring" or "all_gather"."""

    def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> Any:
        return RingAttention.apply(q, k, v, group)

    before = rings._cp_options.rotate_method
    rings._cp_options.rotate_method = {
        "ring": rings._RotateMethod.ALL_TO_ALL,
        "all_gather": rings._RotateMethod.ALL_GATHER,
    }[method]
    try:
        with patch.object(functional, "scaled_dot_product_attention", ring):
            yield
    finally:
        rings._cp_options.rotate_method = before


class Part(nn.Module):
    """Some layers of a model, with what is before the first and after the last."""

    def __init__(self, model: Any, layers: range) -> None:
        super().__init__()
        self.tokens = model.tokens if layers.start == 0 else None
        self.rope = model.rope
        self.layers = nn.ModuleList(model.layers[place] for place in layers)
        last = layers.stop == len(model.layers)
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens or a stream of activations to a stream or logits."""
        x = x if self.tokens is None else self.tokens(x)
        for layer in self.layers:
            x = layer(x, self.rope)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of the last stage."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


#: Kind of a schedule -> the class of torch.distributed.pipelining.
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}


def _without_vote(schedule: Any, stages: list[Any], *_: Any) -> None:
    """Ranks vote on how to start over tensors that no fake rank sends; shapes are given, so they are static."""
    for stage in stages:
        stage._inference_mode = stage_module.InferenceMode.STATIC


@contextmanager
def static_pipelines() -> Iterator[None]:
    """Pipelines whose shapes are given start without a vote."""
    with patch.object(schedules._PipelineSchedule, "_warmup_p2p", _without_vote):
        yield


def pipeline(
    kind: str,
    mesh: DeviceMesh,
    chunks: int,
    micro_batches: int,
    *,
    layers: int,
    wrap: Callable[[Any], Any] | None = None,
) -> tuple[nn.Module, Callable[[], object]]:
    """A rank's stages of a Llama in torch's own pipeline: all its modules, and one step.

    Args:
        mesh: Of the pipeline's ranks, seen by one of them.
        wrap: What is done to the module of each stage; None for nothing, and parameters in bf16.
    """
    group, ranks = mesh.get_group(), mesh.size()
    rank, stages = mesh.get_local_rank(), ranks * chunks
    each = layers // stages
    model = torch_model("llama", layers)
    model = model.to(torch.bfloat16) if wrap is None else model
    v_shaped = kind in ("zbv", "dualpipe-v")
    held = [rank, 2 * ranks - 1 - rank] if v_shaped else [c * ranks + rank for c in range(chunks)]
    stream = torch.empty(B, S, H, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.zeros(B, S, dtype=torch.int64)
    logits = torch.empty(B, S, V, dtype=torch.bfloat16)
    made = []
    for stage in held:
        part = Part(model, range(stage * each, (stage + 1) * each))
        part = part if wrap is None else wrap(part)
        first, last = stage == 0, stage == stages - 1
        enters, leaves = (tokens if first else stream), (logits if last else stream)
        grads = {"input_grads": () if first else (stream.detach(),), "output_grads": () if last else (stream.detach(),)}
        stage_ = PipelineStage(
            part, stage, stages, torch.device("cpu"), input_args=(enters,), output_args=(leaves,), group=group, **grads
        )
        made.append(stage_)
    cls = schedules.get_schedule_class(SCHEDULES[kind])
    plan = cls(made[0] if kind in ("gpipe", "1f1b") else made, micro_batches, loss_fn=cross_entropy)
    batch = torch.zeros(B * micro_batches, S, dtype=torch.int64)

    def step() -> object:
        with patch.object(functional, "rms_norm", whole_norm):
            return plan.step(*((batch,) if 0 in held else ()), target=batch, return_outputs=False)

    return nn.ModuleList(stage_.submod for stage_ in made), step
