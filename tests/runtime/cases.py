"""Small training steps, the same by plain PyTorch, and programs that run them with chosen or random evictions."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional as F

from lading.ir.action import CALLER, Action, ActionKind
from lading.ir.expand import PART_ELEMENTS, expand
from lading.ir.graph import PERSISTENT, OpKind, StepGraph
from lading.ir.machine import Device, Machine, Tier
from lading.ir.plan import Option
from lading.ir.program import COMPUTE_STREAM, PAGE_BYTES, ActionList, Program, slot_bytes
from lading.memory.lifetime import can_recompute, gaps, is_movable, lifetimes
from lading.memory.verify import verify
from lading.models.reference import build_model
from lading.optim.adamw import AdamW
from lading.planner.lower import StepCosts, lower
from lading.runtime.executor import Executor
from lading.runtime.kernel_calls import workspace_of
from lading.tracing.trace import capture
from lading.units import GiB

SIZES = {"num_layers": 2, "dim": 64, "num_heads": 4, "vocab_size": 80, "max_seq_len": 16}
OPTIMIZER = AdamW(weight_decay=0.1)
#: Learning rates of the steps that are compared.
RATES = (1e-3, 5e-4, 2e-3)
Batch = dict[str, torch.Tensor]

DISK = Tier(
    name="disk", kind="file", persistent=True, capacity_bytes=GiB, read_bytes_per_s=1e9, write_bytes_per_s=1e9,
    mixed_read_bytes_per_s=5e8, mixed_write_bytes_per_s=5e8, latency_s=1e-4,
)  # fmt: skip
MACHINE = Machine(
    name="test", date="2026-11", source="made up", tiers=(DISK,),
    device=Device(
        name="cpu", kind="cpu", memory_bytes=8 * GiB, memory_bandwidth_bytes_per_s=1e10, op_overhead_s=1e-6,
        peak_flops_per_s={"float32": 1e11}, optimizer_elements_per_s=5e8,
    ),
)  # fmt: skip
#: The same with memory of the host behind the device, before the disk or alone.
HOST = dataclasses.replace(DISK, name="host", kind="memory", host_computes=True, persistent=False)
TIERED = dataclasses.replace(MACHINE, tiers=(HOST, DISK))
HOST_ONLY = dataclasses.replace(MACHINE, tiers=TIERED.tiers[:1])


def loss_fn(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Cross-entropy of the next tokens."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def model_of(name: str, **sizes: Any) -> torch.nn.Module:
    """The same weights every time."""
    torch.manual_seed(0)
    return build_model(name, **{**SIZES, **sizes}).train()


def batches_of(steps: int, micro: int) -> list[list[Batch]]:
    """Batches of two rows of sixteen tokens, for every micro-batch of every step."""
    torch.manual_seed(1)
    return [[{k: torch.randint(0, 80, (2, 16)) for k in "xy"} for _ in range(micro)] for _ in range(steps)]


def eager_run(
    model: torch.nn.Module, batches: Sequence[Sequence[Batch]], rates: Sequence[float], clip: float
) -> list[list[float]]:
    """Plain PyTorch: the numbers every executor must give."""
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay, fused=True,
    )  # fmt: skip
    torch.manual_seed(2)
    losses = []
    for micro_batches, lr in zip(batches, rates, strict=True):
        losses.append([])
        for batch in micro_batches:
            loss = loss_fn(model, batch)
            if len(micro_batches) > 1:
                loss = loss / len(micro_batches)
            loss.backward()
            losses[-1].append(float(loss.detach()))
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    return losses


@cache
def graph_of(
    name: str, *, micro: int = 1, clip: float = 0.0, part_elements: int = PART_ELEMENTS, **sizes: Any
) -> StepGraph:
    """The whole step of a model on ``batches_of``, captured once; its updates in parts of so many elements."""
    captured = capture(model_of(name, **sizes), batches_of(1, 1)[0][0], loss_fn, accumulation=micro)
    return expand(captured, clip_norm=clip, part_elements=part_elements)


def program_of(
    graph: StepGraph,
    pick: Callable[[list[Option]], Option] | None = None,
    machine: Machine = MACHINE,
    op_s: float = 1e-5,
    *,
    behind_host: Mapping[int, str] = MappingProxyType({}),
    host_bytes: int = GiB,
) -> Program:
    """A verified program; ``pick`` chooses one of the possible options for each gap (None keeps everything).

    Args:
        op_s: Seconds of each operation, by which transfers are scheduled.
        behind_host: Tier of what the host works on and that lies behind its memory.
        host_bytes: Bytes of the host's memory.
    """
    lives = lifetimes(graph, behind_host=behind_host)
    choices: dict[tuple[int, int], Option] = {}
    for gap in gaps(graph, lives):
        options = [Option.KEEP]
        if can_recompute(graph, lives, gap):
            options.append(Option.RECOMPUTE)
        if is_movable(graph, gap.storage, 4096):
            options += [Option(tier.name) for tier in machine.tiers]
        if pick is not None and (option := pick(options)) != Option.KEEP:
            choices[gap.storage, gap.start] = option
    scratch = workspace_of(graph)
    costs = StepCosts(op_seconds=(op_s,) * len(graph.ops), workspace_bytes=tuple(scratch))
    budgets = {"device": GiB, **{tier.name: GiB for tier in machine.tiers}}
    budgets |= {tier.name: host_bytes for tier in machine.tiers if tier.host_computes}
    program = lower(graph, lives, machine, costs, choices, budgets).program
    assert program is not None
    verify(program)
    return program


def behind_host(graph: StepGraph) -> dict[int, str]:
    """Put all that the host works on and that outlasts the step on the disk."""
    return {s: "disk" for s in sorted(graph.host_storages) if graph.storages[s].role in PERSISTENT}


def at_random(seed: int, share: float = 0.5) -> Callable[[list[Option]], Option]:
    """Evict a share of the gaps."""
    generator = random.Random(seed)
    return lambda options: generator.choice(options) if generator.random() < share else Option.KEEP


def disk_always(options: list[Option]) -> Option:
    """Evict to the disk whatever can be."""
    return Option("disk") if Option("disk") in options else Option.KEEP


def host_always(options: list[Option]) -> Option:
    """Evict to the host whatever can be."""
    return Option("host") if Option("host") in options else Option.KEEP


def load(executor: Executor, model: torch.nn.Module) -> None:
    """Put a model's weights and buffers into an executor."""
    graph = executor.program.graph
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for parameter in graph.parameters:
        run, tensor = graph.run_of(graph.storage_of(parameter.tensor)), named[parameter.names[0]]
        if len(run) == 1:
            executor.write_storage(run[0], tensor)
            continue
        counts = [graph.storages[piece].size_bytes // tensor.element_size() for piece in run]
        for piece, part in zip(run, tensor.detach().flatten().split(counts), strict=True):
            executor.write_storage(piece, part)
    for name, tensor in graph.buffers:
        executor.write_storage(graph.storage_of(tensor), named[name])


def keep_all(graph: StepGraph) -> Program:
    """A program without a planner: everything at its own address, operations in order, nothing freed."""
    offsets: dict[int, int] = {}
    end = 0
    for index, storage in enumerate(graph.storages):
        offsets[index] = end
        end += slot_bytes(max(storage.size_bytes, PAGE_BYTES))
    actions: list[Action] = []

    def add(kind: ActionKind, placed: Sequence[int] = (), **fields: Any) -> None:
        places = tuple((s, offsets[s]) for s in placed)
        actions.append(Action(len(actions), kind, COMPUTE_STREAM, places=places, **fields))

    for storage in dict.fromkeys(graph.storage_of(t) for inputs in graph.inputs for _, t in inputs):
        add(ActionKind.MOVE, [storage], storage=storage, source=CALLER, target="device")
    for index, op in enumerate(graph.ops):
        kind = ActionKind.STEP if op.kind is OpKind.STEP else ActionKind.COMPUTE
        add(kind, list(dict.fromkeys(graph.storage_of(t) for t in op.outputs)), op=index)
    for tensor in graph.losses:
        add(ActionKind.MOVE, storage=graph.storage_of(tensor), source="device", target=CALLER)
    resident = tuple((i, offsets[i]) for i, s in enumerate(graph.storages) if s.role in PERSISTENT)
    return Program(
        (ActionList().extend(actions),), graph, arena_bytes=end, workspace_bytes=max(workspace_of(graph)),
        resident=resident, budgets={"device": GiB},
    )  # fmt: skip


def differing(executor: Executor, model: torch.nn.Module) -> list[str]:
    """Names of parameters and buffers whose bits differ from the model's."""
    graph = executor.program.graph
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    tensors = [(p.names[0], p.tensor) for p in graph.parameters] + list(graph.buffers)
    return [n for n, t in tensors if not torch.equal(whole_value(executor, graph.storage_of(t)), named[n].detach())]


def whole_value(executor: Executor, storage: int) -> torch.Tensor:
    """Copy a parameter or buffer, by its storage or its first piece."""
    graph = executor.program.graph
    pieces = [executor.read_storage(piece) for piece in graph.run_of(storage)]
    if len(pieces) == 1:
        return pieces[0]
    (whole,) = (graph.tensors[p.tensor] for p in graph.parameters if graph.storage_of(p.tensor) == storage)
    return torch.cat(pieces).view(whole.shape)


def assert_equals_eager(
    executor: Executor, name: str, *, micro: int = 1, clip: float = 0.0, rates: Sequence[float] = RATES, **sizes: Any
) -> None:
    """Steps from a model's first weights: each loss and then each value of plain PyTorch, to the bit."""
    batches, reference = batches_of(len(rates), micro), model_of(name, **sizes)
    losses = eager_run(reference, batches, rates, clip)
    load(executor, model_of(name, **sizes))
    assert differing(executor, model_of(name, **sizes)) == []
    torch.manual_seed(2)
    assert [executor.step(b, lr=lr) for b, lr in zip(batches, rates, strict=True)] == losses
    assert differing(executor, reference) == []
