"""Bits: planned steps against eager on the same kernels, and bound operations against their functional form."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import lading
from lading.ir.graph import StepGraph
from lading.ir.machine import Machine
from lading.memory.restore import step_of
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.optim.adamw import AdamW
from lading.optim.master import MasterWeights
from lading.runtime.kernel_calls import Rate, bind
from lading.runtime.scratch import by_signature, extent

OPTIMIZER = AdamW(lr=1e-3, weight_decay=0.1)
BUDGETS = ("100%", "50%", "25%")


@dataclass(frozen=True, kw_only=True)
class Parity:
    """A small run that eager and a plan do on the same kernels."""

    name: str
    model: str
    dtype: torch.dtype = torch.float32
    micro: int = 1
    clip_norm: float = 0.0
    sizes: dict[str, Any] = field(default_factory=lambda: {})


def parity_cases(dry: bool) -> list[Parity]:
    """Every kind of norm and of attention kernel; all are to be equal to the bit."""
    large = {} if dry else {"dim": 512, "num_heads": 8, "vocab_size": 4096}
    return [
        Parity(name="gpt fp32", model="gpt", sizes=large, micro=2, clip_norm=1.0),
        Parity(name="gpt fp32 dropout", model="gpt", sizes={**large, "dropout": 0.1}),
        Parity(name="gpt bf16", model="gpt", sizes=large, dtype=torch.bfloat16, micro=2, clip_norm=1.0),
        Parity(name="llama fp32", model="llama", sizes={**large, "num_kv_heads": 2}),
        Parity(name="llama bf16", model="llama", sizes={**large, "num_kv_heads": 2}, dtype=torch.bfloat16),
        Parity(name="moe fp32", model="moe", sizes=large),
    ]


def made(case: Parity) -> torch.nn.Module:
    """Build the case's model, with weights alike every time."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "dim": 64, "num_heads": 4, "vocab_size": 256, "max_seq_len": 128, **case.sizes}
    before = torch.get_default_dtype()
    torch.set_default_dtype(case.dtype)
    try:
        return build_model(case.model, **sizes).train()
    finally:
        torch.set_default_dtype(before)


def batches(case: Parity, steps: int) -> list[list[dict[str, torch.Tensor]]]:
    """Draw the batches of so many steps, with tokens alike every time."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = case.sizes.get("vocab_size", 256)
    return [
        [{"tokens": torch.randint(vocabulary, (4, 129), generator=generator)} for _ in range(case.micro)]
        for _ in range(steps)
    ]


@contextmanager
def deterministic(kind: str, *, strict: bool = False) -> Iterator[None]:
    """Kernels that add in a fixed order, where there are such; ``strict`` has flash attention's backward do so, too.

    Its kernel takes no notice of what only warns; a strict operation that has no such kernel is an error.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(kind == "cuda", warn_only=not strict)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def eager_run(case: Parity, kind: str, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of plain PyTorch."""
    model = made(case).to(kind)
    masters = MasterWeights(model)
    optimizer = torch.optim.AdamW(
        masters.parameters, lr=OPTIMIZER.lr, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay, fused=True,
    )  # fmt: skip
    losses: list[float] = []
    torch.manual_seed(2)
    for micro_batches in batches(case, steps):
        total = 0.0
        for batch in micro_batches:
            loss = next_byte_loss(model, {k: v.to(kind) for k, v in batch.items()})
            loss = loss / len(micro_batches) if len(micro_batches) > 1 else loss
            loss.backward()
            masters.add_gradients()
            total += loss.item()
        if case.clip_norm:
            torch.nn.utils.clip_grad_norm_(masters.parameters, case.clip_norm)
        optimizer.step()
        masters.write_back()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses, {name: p.detach().cpu() for name, p in model.named_parameters()}


def run_parity(case: Parity, machine: Machine, steps: int = 4) -> dict[str, Any]:
    """Eager twice and every budget once; what is equal to the bit, and how far apart the rest is."""
    kind = machine.device.kind
    with deterministic(kind), attention_of(kind):
        losses, weights = eager_run(case, kind, steps)
        again, weights_again = eager_run(case, kind, steps)
        found: dict[str, Any] = {
            "losses": losses, "eager_repeats": losses == again and not differing(weights, weights_again),
        }  # fmt: skip
        graph = lading.capture(made(case), batches(case, 1)[0][0], next_byte_loss, accumulation=case.micro)
        for budget in BUDGETS:
            try:
                found[f"budget {budget}"] = planned(case, graph, machine, budget, losses, weights)
            except lading.PlanInfeasible as error:
                found[f"budget {budget}"] = f"infeasible, smallest {error.smallest_budget_bytes} bytes"
    return found


def attention_of(kind: str) -> Any:
    """See ``one_device.same_attention``."""
    from one_device import same_attention

    return same_attention(kind)


def planned(
    case: Parity, graph: StepGraph, machine: Machine, budget: str, losses: list[float], weights: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """One planned run against eager's numbers."""
    plan = lading.plan(
        graph, machine, budget=budget, clip_norm=case.clip_norm, master_weights=case.dtype is torch.bfloat16
    )
    model = made(case)
    with (
        tempfile.TemporaryDirectory() as folder,
        lading.Trainer(plan, graph, model, optimizer=OPTIMIZER, folder=folder) as trainer,
    ):
        torch.manual_seed(2)
        got = [trainer.step(micro_batches) for micro_batches in batches(case, len(losses))]
        moved = sorted(trainer.program.slots)
    trained = {name: p.detach().cpu() for name, p in model.named_parameters()}
    return {
        "moves_to": moved, "recomputes": sum(c.option == "recompute" for c in plan.choices.gaps),
        "losses_equal": got == losses, "largest_loss_difference": max(map(lambda a, b: abs(a - b), got, losses)),
        "weights_that_differ": len(differing(trained, weights)), "weights": len(weights),
        "largest_weight_difference": max((trained[n] - w).abs().max().item() for n, w in weights.items()),
    }  # fmt: skip


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bits differ."""
    return [name for name, tensor in left.items() if not torch.equal(tensor, right[name])]


def check_operations(graph: StepGraph | None, machine: Machine) -> dict[str, Any]:
    """Each distinct operation of the step: its bound form must give the bits of its functional form."""
    assert graph is not None, "there is no captured step"
    step = step_of(graph, machine, clip_norm=1.0, master_weights=False)
    wrong: list[str] = []
    failed: dict[str, str] = {}
    checked = 0

    def check(op: Any) -> int:
        nonlocal checked
        if op.mutates or op.random or op.name.startswith("aten.empty"):
            return 0
        try:
            checked += 1
            if not same_bits(step, op, machine.device.kind):
                wrong.append(op.name)
        except Exception as error:
            failed[op.name] = f"{type(error).__name__}: {error}"
        return 0

    with torch.inference_mode(), deterministic(machine.device.kind, strict=True):
        by_signature(step, check)
    return {"checked": checked, "wrong": sorted(set(wrong)), "errors": failed}


def same_bits(graph: StepGraph, op: Any, kind: str) -> bool:
    """Run one operation bound to places, and in its functional form, on the same random inputs."""
    values: dict[int, torch.Tensor] = {}

    def view(tensor: int) -> torch.Tensor:
        if tensor not in values:
            t = graph.tensors[tensor]
            dtype = getattr(torch, t.dtype)
            flat = torch.zeros(t.offset + extent(t), dtype=dtype, device=kind)
            if dtype.is_floating_point and tensor in op.inputs:
                flat.uniform_(0.1, 1.0)
            values[tensor] = flat.as_strided(t.shape, t.stride, t.offset)
        return values[tensor]

    bind(op, view, kind=kind, optimizer=OPTIMIZER, rate=Rate(1e-3)).run()
    for result in op.results:
        if result is not None:
            values[result] = values[result].clone()
    want = functional(op, view)
    pairs = [(values[r], w) for r, w in zip(op.results, want, strict=True) if r is not None]
    return all(
        torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
        for a, b in pairs
    )


def functional(op: Any, view: Callable[[int], torch.Tensor]) -> list[Any]:
    """The operation's results in new tensors."""
    from lading.ir.graph import Literal, Ref

    def value(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return view(arg.tensor)
        if isinstance(arg, Literal):
            return torch.device(arg.value) if arg.kind == "device" else getattr(torch, arg.value)
        return [value(item) for item in arg] if isinstance(arg, tuple) else arg

    namespace, packet, overload = op.name.split(".")
    call = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    out = call(*map(value, op.args), **{k: value(v) for k, v in op.kwargs})
    return list(out) if isinstance(out, (tuple, list)) else [out]
