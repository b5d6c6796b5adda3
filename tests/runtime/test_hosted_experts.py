"""Experts that a host computes for the few tokens that chose them: plans, and 20 steps beside plain PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.cases import OPTIMIZER
from tests.runtime.expert_cases import EXPERTS, Batch, Plain, batches_of, loss_fn, model_of
from tests.runtime.test_routing import BESIDE_HOST, all_on_host
from torch import nn

import lading
from lading.errors import ConfigError
from lading.ir.expand import expand
from lading.ir.expert_rows import ExpertRows, find_expert_rows
from lading.ir.experts import find_experts
from lading.ir.graph import StepGraph
from lading.ir.machine import Machine
from lading.ir.plan import Plan
from lading.memory.guards import find_guards
from lading.memory.hosted_experts import find_hosted, limits_by_expert
from lading.memory.restore import programs_of

STEPS, TOKENS = 20, 16
#: A sum over fewer rows, whose other terms are zero, differs by rounding; 20 steps of AdamW may make much of it.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def quick_host() -> Machine:
    """A device behind a link so slow that the host is quicker for a few tokens, and waits that cost little."""
    assert BESIDE_HOST.host_device is not None
    processors = dataclasses.replace(BESIDE_HOST.host_device, memory_bandwidth_bytes_per_s=1e11)
    rates = {f"{way}_bytes_per_s": 1e8 for way in ("read", "write", "mixed_read", "mixed_write")}
    tiers = (dataclasses.replace(BESIDE_HOST.tiers[0], latency_s=1e-7, **rates), *BESIDE_HOST.tiers[1:])
    device = dataclasses.replace(BESIDE_HOST.device, op_overhead_s=1e-8)
    return dataclasses.replace(BESIDE_HOST, device=device, host_device=processors, tiers=tiers)


def loads_of(often: float = 1.0) -> dict[str, list[tuple[float, float]]]:
    return {f"layers.{n}": [(1.0, 14.0), (often, 1.0), (often, 1.0), (often, 1.0)] for n in range(2)}


def batches(routing: str, steps: int = STEPS) -> Iterator[Batch]:
    """Expert 0 gets most tokens, of the others some get one or a few; or all as many; or another one gets most."""
    generator = torch.Generator().manual_seed(2)
    for step in range(steps):
        first = step // 5 if routing == "changing" else 0
        few = torch.randint(4, (EXPERTS,), generator=generator)
        chosen = torch.full((TOKENS,), first % EXPERTS)
        if routing == "uniform":
            chosen = torch.arange(TOKENS) % EXPERTS
        else:
            taken = torch.cat([torch.full((int(few[e]),), (first + e) % EXPERTS) for e in range(1, EXPERTS)])
            chosen[: len(taken)] = taken
        order = torch.randperm(TOKENS, generator=generator)
        more = EXPERTS * torch.randint(4, (TOKENS,), generator=generator)
        yield {"tokens": (chosen[order] + more).reshape(2, 8), "scale": torch.ones(())}


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    return lading.capture(model_of(), batches_of([[0]], 1)[0][0], loss_fn)


def planned(graph: StepGraph, loads: Any, machine: Machine | None = None, **more: Any) -> Plan:
    settings: dict[str, Any] = {"budget": "45%", "policy": all_on_host, "optimizer": OPTIMIZER, "cache": False, **more}
    return lading.plan(graph, machine or quick_host(), experts=loads, **settings)


@pytest.mark.parametrize(("routing", "clip"), [("skewed", 0.0), ("changing", 1.0), ("uniform", 0.0)])
def test_experts_with_few_tokens_are_computed_on_the_host(
    graph: StepGraph, routing: str, clip: float, tmp_path: Path
) -> None:
    made = planned(graph, loads_of(), clip_norm=clip)
    assert made.host_tokens
    made.save(tmp_path / "plan.json")
    made = Plan.load(tmp_path / "plan.json")
    plain = Plain(model_of(), clip)
    with lading.Trainer(made, graph, model_of(), optimizer=OPTIMIZER, folder=tmp_path) as trainer:
        for batch in batches(routing):
            loss, wanted = trainer.step(batch, lr=OPTIMIZER.lr), plain.step([batch], OPTIMIZER.lr)
            assert [loss] == pytest.approx(wanted, rel=1e-5)
        counts = trainer.experts
        assert counts is not None
        rows = counts.hosted.get("layers.0", [0] * EXPERTS)
        tokens = [[int((b["tokens"] % EXPERTS == e).sum()) for e in range(EXPERTS)] for b in batches(routing)]
        limits = made.host_tokens["layers.0"]
        assert rows == [sum(0 < each[e] <= limits.get(e, 0) for each in tokens) for e in range(EXPERTS)]
        assert any(rows) == (routing != "uniform" or TOKENS // EXPERTS <= max(limits.values()))
        for name, value in plain.values().items():
            torch.testing.assert_close(trainer.value(name), value, **CLOSE)
        assert trainer.base_bytes + trainer.peak_bytes <= made.budgets["device"]
