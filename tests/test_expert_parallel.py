"""Expert parallel on ranks: each has some of the experts, and all have the numbers of one process.

A rank's experts see the tokens of all ranks in one product, and what experts make is added up by ranks: sums in another
order than in one process, which has a micro-batch after the other. So the numbers are equal within the tolerance of
``tests.test_tensor_parallel``, derived there for float64.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lading
from lading.errors import ConfigError
from lading.ir.expert_shards import shard_experts
from lading.ir.graph import OpKind
from lading.ir.layout import parse_layout
from lading.ir.reduction import ALL_GATHER, ALL_TO_ALL, SCATTER_SUM
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from tests.captured import shared_capture
from tests.ranks import run_ranks
from tests.test_replicas import SIZES, batch, machine

pytestmark = pytest.mark.usefixtures("one_thread")

_TOLERANCE = {torch.float64: 1e-8, torch.bfloat16: 2e-2}


def build(experts: int = 4, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return build_model("moe", **SIZES, num_experts=experts).to(dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to train: what is captured, and how it is planned."""

    layout: str = "dp2,ep2"
    experts: int = 4
    dtype: torch.dtype = torch.float64
    micro: int = 2
    steps: int = 3
    plan: Callable[[], dict[str, Any]] = dict

    def train(self, layout: str, folder: Path, rank: int = 0) -> tuple[dict[str, torch.Tensor], list[float]]:
        """Train on the same micro-batches whatever the layout; returns the values and the losses."""
        model = build(self.experts, self.dtype)
        share = self.micro // parse_layout(layout).dp
        first = rank * share
        graph = shared_capture(
            lambda: lading.capture(model, batch(0, 0), next_byte_loss, accumulation=share),
            *("expert parallel", self.experts, self.dtype, share),
        )
        asked: dict[str, Any] = {"budget": "100%", "cache": False, **self.plan()}
        if layout == "dp1":
            asked["policy"] = "keep-all"
        made = lading.plan(graph, machine(), layout=layout, **asked)
        with lading.Trainer(made, graph, model, folder=folder) as trainer:
            losses = [trainer.step([batch(s, first + n) for n in range(share)]) for s in range(self.steps)]
            values = {name: trainer.value(name) for name in sorted(trainer._values)}
        for name, value in model.state_dict().items():
            assert name not in values or torch.equal(value, values[name]), name
        return values, losses

    def check(self, got: tuple[dict[str, torch.Tensor], list[float]], alone: tuple[Any, list[float]]) -> None:
        tolerance = _TOLERANCE[self.dtype]
        assert got[1] == pytest.approx(alone[1], rel=tolerance)
        assert got[0].keys() == alone[0].keys()
        for name, value in got[0].items():
            close = torch.allclose(value, alone[0][name], rtol=tolerance, atol=tolerance)
            assert close, f"{name} is off by {(value - alone[0][name]).abs().max():.1e}"


FAST = {"clipped": Case(steps=2, plan=lambda: {"clip_norm": 0.1, "policy": "keep-all"})}
CASES = {
    "twenty": Case(steps=20, plan=lambda: {"clip_norm": 0.1}),
    "accumulated": Case(micro=4),
    "masters": Case(dtype=torch.bfloat16, plan=lambda: {"master_weights": True}),
    "recomputed": Case(experts=2, plan=lambda: {"policy": "checkpoint-every-block"}),
    "states": Case("dp2,ep2,zero1", plan=lambda: {"clip_norm": 0.1}),
    "gradients": Case("dp2,ep2,zero2", micro=4, plan=lambda: {"clip_norm": 0.1}),
    "parameters": Case("dp2,ep2,zero3", micro=4, steps=20, plan=lambda: {"clip_norm": 0.1}),
    "resharded": Case("dp2,ep2,zero3", plan=lambda: {"policy": "reshard-and-checkpoint"}),
}
FOUR = {"four": Case("ep4", micro=4, steps=20), "shards": Case("ep4,zero3", micro=4)}


def _ranks(rank: int, out: str, names: list[str]) -> None:
    for name in names:
        folder = Path(out) / f"{name} {rank}"
        folder.mkdir()
        case = {**FAST, **CASES, **FOUR}[name]
        torch.save(case.train(case.layout, folder, rank), folder / "values")


def _check(folder: Path, cases: dict[str, Case], ranks: int) -> None:
    run_ranks(_ranks, ranks, str(folder), [*cases])
    for name, case in cases.items():
        alone = case.train("dp1", folder)
        for rank in range(ranks):
            case.check(torch.load(folder / f"{name} {rank}" / "values"), alone)


def test_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    _check(tmp_path, FAST, 2)


@pytest.mark.slow
def test_two_ranks_train_as_one_process_in_every_way(tmp_path: Path) -> None:
    _check(tmp_path, CASES, 2)


@pytest.mark.slow
def test_four_ranks_train_as_one_process(tmp_path: Path) -> None:
    _check(tmp_path, FOUR, 4)


def _saved(rank: int, out: str) -> None:
    model = build()
    graph = lading.capture(model, batch(0, 0), next_byte_loss)
    plan = lading.plan(graph, machine(), layout="dp2,ep2", budget="100%", cache=False)
    with lading.Trainer(plan, graph, model, folder=out) as trainer:
        trainer.step(batch(0, rank))
        saved = trainer.save(Path(out) / "saved")
        trainer.step(batch(1, rank))
        values = {name: trainer.value(name) for name in sorted(trainer._values)}
        trainer.load(saved)
        trainer.step(batch(1, rank))
        assert [name for name in values if not torch.equal(values[name], trainer.value(name))] == []
    torch.save((str(saved), values), Path(out) / f"values {rank}")


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_one_process(tmp_path: Path) -> None:
    run_ranks(_saved, 2, str(tmp_path))
    saved, values = torch.load(tmp_path / "values 1")
    model = build()
    graph = lading.capture(model, batch(0, 0), next_byte_loss, accumulation=2)
    plan = lading.plan(graph, machine(), layout="dp1", budget="100%", cache=False)
    with lading.Trainer(plan, graph, model, folder=tmp_path) as trainer:
        trainer.load(saved)
        trainer.step([batch(1, 0), batch(1, 1)])
        alone = {name: trainer.value(name) for name in sorted(trainer._values)}
    Case().check((alone, []), (values, []))


def test_a_rank_computes_its_experts_for_all_tokens() -> None:
    """As many products as experts of a rank, each twice as long: the FLOP stay, and half of the experts' bytes go."""
    whole = lading.capture(build(), batch(0, 0), next_byte_loss)
    sharded = shard_experts(whole, parse_layout("ep2"))
    experts = [sum("experts" in p.names[0] for p in graph.parameters) for graph in (whole, sharded)]
    assert experts == [2 * 4 * 3, 2 * 2 * 3]
    products = [sum(op.flops for op in graph.ops if op.kind is OpKind.MATMUL) for graph in (whole, sharded)]
    assert products[0] == products[1]
    assert Counter(op.name for op in sharded.ops if op.kind is OpKind.COLLECTIVE) == {
        ALL_GATHER: 4, ALL_TO_ALL: 4, SCATTER_SUM: 4,
    }  # fmt: skip
    names = [p.placement.names for p in sharded.parameters if p.placement is not None]
    assert names[0] == ("layers.0.mlp.experts.0.gate.weight", "layers.0.mlp.experts.2.gate.weight")


class _Stacked(nn.Module):
    """A mixture whose experts are rows of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.ones(4, 8, 8))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bd,edf->bf", x_BD, self.experts)


class _Unlike(nn.Module):
    """A mixture whose last expert is wider than the others, or whose experts draw random numbers."""

    def __init__(self, *, noisy: bool = False, biased: bool = False) -> None:
        super().__init__()
        widths = [8, 8, 8, 8 if noisy else 16]
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, n), nn.Linear(n, 8, bias=biased)) for n in widths)
        self.dropout = nn.Dropout(0.5 if noisy else 0.0)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        a, b, c, d = (self.dropout(expert(x_BD)) for expert in self.experts)
        return a + b + c + d


def _loss(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(inputs["x"]).square().mean()


def test_what_is_not_built_is_refused_by_name() -> None:
    graph = lading.capture(build(3), batch(0, 0), next_byte_loss)
    with pytest.raises(ConfigError, match=r"ep2 divides, found 3 in layers\.0\.mlp\.experts"):
        shard_experts(graph, parse_layout("ep2"))
    x = {"x": torch.ones(2, 8)}
    for model, said in (
        (_Stacked(), "modules of a list .* found experts; parameters that stack"),
        (_Unlike(), "all do the same"),
        (_Unlike(noisy=True), "found aten.empty_like.default of dropout"),
        (_Unlike(biased=True), "gradient of experts.3.1.bias depends on none"),
        (nn.Linear(8, 8), "found none"),
    ):
        with pytest.raises(ConfigError, match=said):
            shard_experts(lading.capture(model, x, _loss), parse_layout("ep2"))
    graph = lading.capture(build(), batch(0, 0), next_byte_loss)
    for layout in ("dp4,ep2", "dp2,ep2,tp2", "dp4,ep4,zero3,shard2"):
        with pytest.raises(ConfigError, match="experts spread over all replicas"):
            lading.plan(graph, machine(), layout=layout, budget="100%", cache=False)
    rule = lading.Matrices(rule="muon", lr=0.02)
    with pytest.raises(ConfigError, match="muon"):
        lading.plan(graph, machine(), layout="ep2", budget="100%", cache=False, matrices=rule)
