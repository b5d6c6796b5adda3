"""Context parallel: each rank has a run of the tokens of every sequence, and all have the numbers of one process.

Gradients of parameters are sums over tokens, which ranks add up in another order than one process, as the loss's mean:
the tolerance is that of ``tests.test_tensor_parallel``, derived there. transformers takes the loss in float32: of a
sum of 32 losses the order is worth 32 eps of float32 at most, 2e-6 of it; gradients do not depend on the sum.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lading
from lading.errors import ConfigError
from lading.ir.context_shards import shard_context
from lading.ir.graph import OpKind
from lading.ir.layout import parse_layout
from lading.ir.reduction import ALL_REDUCE
from lading.memory.restore import step_of
from lading.models.loss import next_byte_loss
from tests.ranks import run_ranks
from tests.test_replicas import batch, machine
from tests.test_tensor_parallel import Case, build

pytestmark = pytest.mark.usefixtures("one_thread")

FAST = {"tied": Case("cp2", steps=2, plan=lambda: {"clip_norm": 0.1, "policy": "keep-all"})}
CASES = {
    "twenty": Case("cp2", plan=lambda: {"clip_norm": 0.1}, steps=20),
    "accumulated": Case("cp2", "llama", micro=2),
    "transformers": Case("cp2", "transformers", micro=2, plan=lambda: {"clip_norm": 0.1}, steps=20),
    "experts": Case("cp2", "moe"),
    "fused": Case("cp2", "llama", torch_optimizer=True),
    "masters": Case("cp2", "llama", dtype=torch.bfloat16, plan=lambda: {"master_weights": True}),
    "recomputed": Case("cp2", plan=lambda: {"policy": "checkpoint-every-block"}),
}
FOUR = {
    "four": Case("cp4", "llama", steps=20),
    "replicas": Case("dp2,cp2", micro=2, plan=lambda: {"clip_norm": 0.1}),
}


def _ranks(rank: int, out: str, names: list[str]) -> None:
    for name in names:
        folder = Path(out) / f"{name} {rank}"
        folder.mkdir()
        case = {**FAST, **CASES, **FOUR}[name]
        torch.save(case.train(case.layout, folder), folder / "values")


def _check(folder: Path, cases: dict[str, Case], ranks: int) -> None:
    run_ranks(_ranks, ranks, str(folder), [*cases])
    for name, case in cases.items():
        alone = case.train("dp1", folder)
        for rank in range(ranks):
            values, losses = torch.load(folder / f"{name} {rank}" / "values")
            if case.model == "transformers":
                assert losses == pytest.approx(alone[1], rel=2e-6)
                losses = alone[1]
            case.check(values, losses, alone)


def test_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    _check(tmp_path, FAST, 2)


@pytest.mark.slow
def test_two_ranks_train_as_one_process_in_every_way(tmp_path: Path) -> None:
    _check(tmp_path, CASES, 2)


@pytest.mark.slow
def test_four_ranks_train_as_one_process(tmp_path: Path) -> None:
    _check(tmp_path, FOUR, 4)


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_a_rank_computes_its_tokens(model: str) -> None:
    """Products of half the tokens, keys and values of all, and nothing as long as all logits."""
    whole = lading.capture(build(model, torch.float32, 4), batch(0, 0), next_byte_loss)
    sharded = shard_context(whole, parse_layout("cp2"))
    for kind in (OpKind.MATMUL, OpKind.ATTENTION):
        flops = [sum(op.flops for op in graph.ops if op.kind is kind) for graph in (whole, sharded)]
        assert flops[0] == 2 * flops[1]
    lengths = [g.tensors[op.outputs[0]].shape for g in (whole, sharded) for op in g.ops if "_log_softmax.d" in op.name]
    assert lengths == [(32, 64), (16, 64)]
    assert all(p.placement is None for p in sharded.parameters)


@pytest.mark.parametrize(("layout", "over", "replicas"), [("cp2", "cp", 1), ("dp2,cp2", "replicate/cp", 2)])
def test_gradients_are_reduced_once_a_step_in_buckets(layout: str, over: str, replicas: int) -> None:
    """Not each by itself in each micro-batch; in one collective with the replicas' mean."""
    graph = lading.capture(build("llama", torch.float32, 2), batch(0, 0), next_byte_loss, accumulation=3)
    spread = dataclasses.replace(parse_layout(layout), bucket_bytes=1 << 20)
    step = step_of(graph, machine(), clip_norm=0.0, master_weights=False, layout=spread)
    reductions = [op for op in step.ops if op.name == ALL_REDUCE]
    told = [(dict(op.kwargs)["over"], dict(op.kwargs)["mean_of"]) for op in reductions]
    assert told == [(over, replicas)]
    trained = sum(step.tensors[p.tensor].size_bytes for p in step.parameters if p.gradient is not None)
    assert reductions[0].bytes_read == trained


class _Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(64, 8), nn.Linear(8, 64, bias=False)
        self.size = nn.Parameter(torch.ones(8))


def _weighed_loss(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens = inputs["tokens"]
    logits = model.out(model.tokens(tokens[:, :-1]))
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + model.size.square().sum()


def test_a_gradient_that_does_not_come_of_tokens_is_no_sum() -> None:
    """Every rank has all of it already; the others are terms of sums over the tokens."""
    graph = lading.capture(_Weighed(), batch(0, 0), _weighed_loss)
    sharded = shard_context(graph, parse_layout("cp2"))
    terms = {p.names[0]: p.gradient_terms for p in sharded.parameters}
    assert terms == {"tokens.weight": 2, "out.weight": 2, "size": 1}


class _Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.rows(tokens)


def test_what_is_not_built_is_refused_by_name() -> None:
    graph = lading.capture(build("gpt", torch.float32, 2), batch(0, 0), next_byte_loss)
    with pytest.raises(ConfigError, match=r"tokens that cp3 divides, found \(2, 16, 32\) from tokens"):
        shard_context(graph, parse_layout("cp3"))
    summed = lading.capture(_Adds(), {"x": torch.ones(2, 8)}, lambda model, inputs: model(inputs["x"]).sum())
    with pytest.raises(ConfigError, match="looks tokens up"):
        shard_context(summed, parse_layout("cp2"))
    for layout, said in (("cp2,ep2", "leave ep out, or cp"), ("tp2,sp,cp2", "leave sp out, or cp")):
        with pytest.raises(ConfigError, match=said):
            lading.plan(graph, machine(), layout=layout, budget="100%", cache=False)


def _evaluated(layout: str, folder: Path) -> list[float]:
    """Losses of a step, and of held out tokens after it."""
    model = build("gpt", torch.float64, 4)
    graph = lading.capture(model, batch(0, 0), next_byte_loss)
    others = [lading.capture(model, batch(0, 0), next_byte_loss, evaluation=True)]
    plan = lading.plan(graph, machine(), layout=layout, budget="100%", cache=False, others=others, policy="keep-all")
    with lading.Trainer(plan, graph, model, others=others, folder=folder) as trainer:
        return [trainer.step(batch(0, 0)), trainer.evaluate(batch(1, 0))]


def _evaluates(rank: int, out: str) -> None:
    torch.save(_evaluated("cp2", Path(out)), Path(out) / f"losses {rank}")


@pytest.mark.slow
def test_a_rank_evaluates_its_tokens(tmp_path: Path) -> None:
    run_ranks(_evaluates, 2, str(tmp_path))
    alone = _evaluated("dp1", tmp_path)
    for rank in range(2):
        assert torch.load(tmp_path / f"losses {rank}") == pytest.approx(alone, rel=1e-8)
