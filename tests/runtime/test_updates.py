"""Kernels that move matrices: their bits, and what they allocate."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.cases import OPTIMIZER, TIERED, at_random, batches_of, load, loss_fn, model_of, program_of
from tests.runtime.fake_accelerator import FakeApi, fake_device
from torch.profiler import ProfilerActivity, profile

from lading.grouping import Matrices
from lading.ir.defer import defer
from lading.ir.defer import updates as deferrable
from lading.ir.expand import expand
from lading.ir.update_ops import (
    Tensors,
    rule_of,
    update_op,
)
from lading.optim import rule as rule_module
from lading.optim.rule import fresh, update_matrix
from lading.runtime.executor import Executor
from lading.runtime.kernel_calls import BoundKernel, Rate, bind
from lading.tracing.trace import capture

RULES: list[Any] = [
    Matrices(rule="muon", lr=0.1),
    Matrices(rule="muon", lr=0.1, settings={"dtype": "float32", "coefficients": "you", "scale": "none", "steps": 4}),
    Matrices(rule="soap", lr=0.1, settings={"frequency": 2}),
    Matrices(rule="shampoo", lr=0.1, settings={"frequency": 2, "eps": 1e-6}),
    Matrices(rule="shampoo", lr=0.1, settings={"frequency": 1, "eps": 1e-4, "root": "newton", "grafting": "none"}),
]


def maths(matrices: Matrices) -> Any:
    return matrices.made().maths()


def bound(matrices: Matrices, param: torch.Tensor, grad: torch.Tensor) -> BoundKernel:
    """The update of a matrix, or of a stack, with states of zeros."""
    rule, shape = matrices.made(), (param.shape[-2], param.shape[-1])
    held = param.dtype if matrices.rule == "muon" else torch.float32
    states = [torch.zeros(*param.shape[:-2], *s.shape, dtype=held) for s in rule.state_specs(*shape).values()]
    room = rule.workspace_elements(*shape)
    dtype = getattr(torch, rule.product_dtype)
    tensors = [param, grad, *states, torch.zeros(()), torch.empty(room, dtype=dtype)]
    step = 2 + len(states)
    numbers = Tensors(
        param=0, grad=1, states=tuple(range(2, step)), step=step if rule.counts else None,
        workspace=step + 1 if room else None,
    )  # fmt: skip
    op = update_op(matrices, (1 if param.dim() == 2 else param.shape[0], *shape), numbers, "")
    return bind(op, lambda tensor: tensors[tensor], rate=Rate(0.0, 0.1))


@pytest.mark.parametrize("at_once", [100, 1 << 18])
@pytest.mark.parametrize("shape", [(33, 20), (20, 48), (3, 16, 24)])
@pytest.mark.parametrize("matrices", RULES, ids=lambda m: m.rule + "-".join(map(str, m.settings)))
def test_bits_are_those_of_the_rule(
    matrices: Matrices, shape: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule_module, "AT_ONCE", {"cpu": at_once})
    generator = torch.Generator().manual_seed(1)
    param, grad = torch.randn(shape, generator=generator), torch.empty(shape)
    wanted, rule = param.clone(), maths(matrices)
    kernel = bound(matrices, param, grad)
    stack = wanted if wanted.dim() == 3 else wanted.unsqueeze(0)
    states = [fresh(rule, (shape[-2], shape[-1]), torch.float32) for _ in stack]
    for update in range(1, 5):
        grad.copy_(torch.randn(shape, generator=generator))
        kernel.run()
        for index, (held, whole) in enumerate(states):
            update_matrix(rule, stack[index], grad.view(stack.shape)[index], held, whole, lr=0.1, update=update)
        assert torch.equal(param, wanted)


@pytest.mark.parametrize("clip", [None, 0.25])
def test_every_matrix_of_a_stack_is_rounded_from_its_master(clip: float | None) -> None:
    """Parameter and gradient have 16 bits; the master moves by the gradient in 32, clipped."""
    matrices, shape = RULES[1], (3, 16, 24)
    rule, generator = matrices.made(), torch.Generator().manual_seed(1)
    master = torch.randn(shape, generator=generator)
    param, grad = master.bfloat16(), torch.randn(shape, generator=generator).bfloat16()
    wanted, states = master.clone(), [fresh(maths(matrices), (16, 24), torch.float32) for _ in range(3)]
    coefficient = torch.tensor(1.0 if clip is None else clip)
    room = torch.empty(rule.workspace_elements(16, 24), dtype=getattr(torch, rule.product_dtype))
    tensors = [param, grad, torch.zeros(shape), master, coefficient, room]
    numbers = Tensors(
        param=0, grad=1, states=(2,), master=3, coefficient=None if clip is None else 4,
        workspace=5 if room.numel() else None,
    )  # fmt: skip
    bind(update_op(matrices, shape, numbers, ""), lambda tensor: tensors[tensor], rate=Rate(0.0, 0.1)).run()
    for index, (held, whole) in enumerate(states):
        update_matrix(maths(matrices), wanted[index], grad[index].float() * coefficient, held, whole, lr=0.1, update=1)
    assert torch.equal(master, wanted)
    assert torch.equal(param, wanted.bfloat16())


@pytest.mark.parametrize("shape", [(256, 96), (2, 96, 200)])
@pytest.mark.parametrize("matrices", RULES, ids=lambda m: m.rule + "-".join(map(str, m.settings)))
def test_scratch_is_an_upper_bound(matrices: Matrices, shape: tuple[int, ...]) -> None:
    param, grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)), torch.empty(shape)
    kernel = bound(matrices, param, grad)
    assert 0.5 * kernel.scratch_bytes < _most_bytes(kernel, grad) <= kernel.scratch_bytes


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("matrices", RULES, ids=lambda m: m.rule + "-".join(map(str, m.settings)))
def test_scratch_is_an_upper_bound_in_16_bits_and_for_turned_gradients(matrices: Matrices, turned: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        param = torch.randn((160, 96), generator=torch.Generator().manual_seed(1)).to(dtype)
        grad = torch.empty_like(param.T if turned else param)
        kernel = bound(matrices, param, grad.T if turned else grad)
        assert _most_bytes(kernel, grad) <= kernel.scratch_bytes


def test_scratch_is_an_upper_bound_for_long_sides() -> None:
    """From 512 rows on LAPACK's QR takes more for each."""
    grad = torch.empty(520, 24)
    kernel = bound(RULES[2], torch.zeros(520, 24), grad)
    assert _most_bytes(kernel, grad) <= kernel.scratch_bytes


def _most_bytes(kernel: BoundKernel, grad: torch.Tensor) -> int:
    """The most that three updates have at once, beside their tensors."""
    generator, most = torch.Generator().manual_seed(2), 0
    for _ in range(3):
        grad.copy_(torch.randn(grad.shape, generator=generator))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            kernel.run()
        assert profiled.profiler is not None
        sizes = [e.nbytes() for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
        most = max(most, *accumulate(sizes))
    return most


def test_an_update_says_what_it_is() -> None:
    op = update_op(RULES[0], (2, 8, 4), Tensors(param=0, grad=1, states=(2,), workspace=3), "layers.0")
    assert op.flops == 2 * RULES[0].made().work(8, 4).flops
    assert (op.name, op.mutates, op.outputs, op.module) == ("lading.muon", (0, 2), (3,), "layers.0")
    assert rule_of(op) == RULES[0].made()


@pytest.mark.parametrize("rule", ["muon", *(pytest.param(r, marks=pytest.mark.slow) for r in ("soap", "shampoo"))])
def test_a_device_behind_the_host_gives_the_same_bits(rule: Any, tmp_path: Path, api: FakeApi) -> None:
    """On streams that are threads, with half of all gaps moved or recomputed, updates deferred and memory poisoned."""
    settings: dict[str, Any] = {} if rule == "muon" else {"frequency": 2}
    matrices = Matrices(rule=rule, lr=0.02, settings=settings)
    captured = capture(model_of("gpt", num_layers=1), batches_of(1, 1)[0][0], loss_fn)
    graph = expand(captured, clip_norm=0.5, matrices=matrices)
    late = defer(graph, len(deferrable(graph)))[0]
    assert any(late.ops[i].name == f"lading.{rule}" for i in late.deferred)
    found: list[tuple[list[Any], dict[str, torch.Tensor]]] = []
    for step, pick, device in ((graph, None, None), (late, at_random(0), fake_device(api))):
        program = program_of(step, pick, TIERED)
        with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, device=device, poison=True) as executor:
            load(executor, model_of("gpt", num_layers=1))
            losses = [executor.step(batch, lr=1e-3, matrix_lr=0.02) for batch in batches_of(4, 1)]
            values = {p.names[0]: executor.read_storage(step.storage_of(p.tensor)) for p in step.parameters}
            found.append((losses, values))
    (losses, values), (got, moved) = found
    assert got == losses
    assert all(torch.equal(values[name], moved[name]) for name in values)


def test_a_device_that_lading_does_not_know_is_given_as_few_elements_as_a_cpu() -> None:
    assert rule_module.elements_at_once("somewhere:driver") == rule_module.elements_at_once("cpu")
    assert rule_module.elements_at_once("cuda") > rule_module.elements_at_once("cpu")
