"""The check that a capture says what eager does, to the bit, and the models it is made on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tools.replay import Replay
from torch import nn

from lading.ir.graph import Op, Phase, StepGraph
from lading.models.reference import build_model
from lading.tracing.batches import input_leaves
from lading.tracing.trace import capture

Loss = Callable[[nn.Module, Any], torch.Tensor]
SMALL = {"vocab_size": 32, "max_seq_len": 16, "dim": 16, "num_heads": 2}


def own(name: str, **sizes: Any) -> nn.Module:
    """A small reference model."""
    torch.manual_seed(0)
    return build_model(name, **SMALL | {"num_layers": 2} | sizes)


def tokens(rows: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    """A batch for ``next_byte_loss``."""
    return {"tokens": torch.randint(32, (rows, length), generator=torch.Generator().manual_seed(1))}


def latents(rows: int = 3) -> dict[str, torch.Tensor]:
    """A batch for ``noise_loss`` of the default sizes."""
    generator = torch.Generator().manual_seed(1)
    return {
        "latents": torch.randn(rows, 4, 16, 16, generator=generator),
        "labels": torch.randint(10, (rows,), generator=generator),
    }


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss for models of one tensor."""
    return model(batch["x"]).square().mean()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of parameters and buffers under every name."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach().clone() for name, tensor in named}


def assert_equals_eager(model: nn.Module, batch: Any, loss: Loss) -> StepGraph:
    """Replay the capture of a step next to eager: loss, every gradient and every buffer are equal to the bit."""
    graph = capture(model, batch, loss)
    replay = Replay(graph, values(model), dict(input_leaves(batch)))
    torch.manual_seed(7)
    got = replay.run()
    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    wanted = loss(model, batch)
    wanted.backward()
    assert torch.equal(got, wanted.detach())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert {n for p in graph.parameters for n in p.names} == parameters.keys()
    for parameter in graph.parameters:
        grad = parameters[parameter.names[0]].grad
        assert (parameter.gradient is None) == (grad is None), parameter.names
        if grad is not None and parameter.gradient is not None:
            assert torch.equal(replay.tensor(parameter.gradient), grad), parameter.names
    buffers = dict(model.named_buffers(remove_duplicate=False))
    assert {name for name, _ in graph.buffers} == buffers.keys()
    for name, tensor in graph.buffers:
        assert torch.equal(replay.tensor(tensor), buffers[name]), name
    return graph


def ops_of(graph: StepGraph, phase: Phase, module: str = "") -> list[Op]:
    """Operations of a phase in a module and those inside it."""
    return [op for op in graph.ops if op.phase is phase and f"{op.module}.".startswith(f"{module}." if module else "")]
