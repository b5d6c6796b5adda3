"""Tensor parallel on ranks: each computes its share of every product, and they have the numbers of one process.

Sums along a dim that is cut are added up in another order, so the numbers are not equal to the bit. In float64 a sum of
n terms is off by at most n eps of their absolute sum; a step is a few hundred such sums one after another, and AdamW
divides gradients by their own size, so that an error of eps there moves a parameter by lr times as much, however small
the gradient is. After 20 steps of lr 1e-3 with sums of a hundred terms that is 20 * 1e-3 * 300 * 100 * 2e-16 = 1e-13
where no gradient is near zero; a gradient of 1e-5 of its terms' size makes it 1e-8, which is asked. bfloat16 has 8
bits, and a weight that is rounded the other way is off by one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lading
from lading.errors import ConfigError
from lading.ir.graph import StepGraph, Tensor
from lading.ir.layout import parse_layout
from lading.ir.tensor_shards import Split, local_view, shard_tensors
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.tracing.batches import input_leaves
from tests.captured import shared_capture
from tests.rank_threads import play
from tests.ranks import run_ranks
from tests.test_replicas import SIZES, batch, machine

pytestmark = pytest.mark.usefixtures("one_thread")

_TOLERANCE = {torch.float64: 1e-8, torch.bfloat16: 2e-2}


def labelled_loss(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens = inputs["tokens"][:, :16]
    return model(input_ids=tokens, labels=tokens).loss


def build(name: str, dtype: torch.dtype, heads: int) -> nn.Module:
    torch.manual_seed(0)
    if name == "transformers":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32,
        )  # fmt: skip
        return nn.Module.to(LlamaForCausalLM(config), dtype)
    return build_model(name, **{**SIZES, "num_heads": heads}).to(dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to train: what is captured, and how it is planned."""

    layout: str = "tp2"
    model: str = "gpt"
    heads: int = 4
    dtype: torch.dtype = torch.float64
    micro: int = 1
    steps: int = 3
    plan: Callable[[], dict[str, Any]] = dict
    torch_optimizer: bool = False

    def train(self, layout: str, folder: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
        """Train on the same micro-batches whatever the layout; returns the values and the losses."""
        model = build(self.model, self.dtype, self.heads)
        loss = labelled_loss if self.model == "transformers" else next_byte_loss
        replicas = parse_layout(layout).dp
        share = self.micro // replicas
        first = parse_layout(layout).replica(int(folder.name.split()[-1])) * share if replicas > 1 else 0

        def make() -> StepGraph:
            return lading.capture(model, batch(0, 0), loss, accumulation=share)

        key = ("tensor parallel", self.model, self.dtype, self.heads, share)
        graph = make() if self.torch_optimizer else shared_capture(make, *key)
        asked: dict[str, Any] = {"budget": "100%", "cache": False, **self.plan()}
        chosen = torch.optim.AdamW(model.parameters(), fused=True) if self.torch_optimizer else None
        made = lading.plan(graph, machine(), layout=layout, optimizer=chosen, **asked)
        with lading.Trainer(made, graph, model, folder=folder, optimizer=chosen) as trainer:
            losses = [trainer.step([batch(s, first + n) for n in range(share)]) for s in range(self.steps)]
            values = {name: trainer.value(name) for name in sorted(trainer._values)}
        for name, value in model.state_dict().items():
            assert name not in values or torch.equal(value, values[name]), name
        return values, losses

    def check(self, values: dict[str, torch.Tensor], losses: list[float], alone: tuple[Any, list[float]]) -> None:
        tolerance = _TOLERANCE[self.dtype]
        assert losses == pytest.approx(alone[1], rel=tolerance)
        assert values.keys() == alone[0].keys()
        for name, value in values.items():
            close = torch.allclose(value, alone[0][name], rtol=tolerance, atol=tolerance)
            assert close, f"{name} is off by {(value - alone[0][name]).abs().max():.1e}"


FAST = {
    "tied": Case(plan=lambda: {"clip_norm": 0.1}),
    "clipped sequence": Case("tp2,sp", "llama", micro=2, plan=lambda: {"clip_norm": 0.1}),
}
CASES = {
    "twenty": Case(plan=lambda: {"clip_norm": 0.1}, steps=20),
    "sequence": Case("tp2,sp", micro=2),
    "llama": Case("tp2,sp", "transformers", micro=2, plan=lambda: {"clip_norm": 0.1}),
    "fused": Case(model="llama", torch_optimizer=True),
    "masters": Case(model="llama", dtype=torch.bfloat16, plan=lambda: {"master_weights": True}),
    "recomputed": Case(plan=lambda: {"policy": "checkpoint-every-block"}),
}
#: Cases that try something that no other of them tries; the others are slow tests.
QUICK = ("tied", "clipped sequence", "masters")
FOUR = {
    "replicas": Case("dp2,tp2", micro=2, plan=lambda: {"clip_norm": 0.1}),
    "shards": Case("dp2,tp2,zero3", "llama", micro=2, torch_optimizer=True),
    "four": Case("tp4,sp", micro=2, steps=20, plan=lambda: {"clip_norm": 0.1}),
}


def _ranks(rank: int, out: str, names: list[str]) -> None:
    for name in names:
        folder = Path(out) / f"{name} {rank}"
        folder.mkdir()
        case = {**FAST, **CASES, **FOUR}[name]
        torch.save(case.train(case.layout, folder), folder / "values")


@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([*QUICK], id="quick"),
        pytest.param([n for n in CASES if n not in QUICK], id="rest", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_as_one_process(tmp_path: Path, names: list[str]) -> None:
    run_ranks(_ranks, 2, str(tmp_path), names)
    for name in names:
        case = {**FAST, **CASES}[name]
        alone = case.train("dp1", tmp_path)
        for rank in range(2):
            values, losses = torch.load(tmp_path / f"{name} {rank}" / "values")
            case.check(values, losses, alone)


@pytest.mark.slow
def test_four_ranks_train_as_one_process(tmp_path: Path) -> None:
    run_ranks(_ranks, 4, str(tmp_path), [*FOUR])
    for name, case in FOUR.items():
        alone = case.train("dp1", tmp_path)
        for rank in range(4):
            values, losses = torch.load(tmp_path / f"{name} {rank}" / "values")
            case.check(values, losses, alone)


def _saved(rank: int, out: str) -> None:
    case = CASES["sequence"]
    model = build(case.model, case.dtype, case.heads)
    graph = lading.capture(model, batch(0, 0), next_byte_loss)
    plan = lading.plan(graph, machine(), layout="tp2", budget="100%", cache=False)
    with lading.Trainer(plan, graph, model, folder=out) as trainer:
        trainer.step(batch(0, 0))
        saved = trainer.save(Path(out) / "saved")
        trainer.step(batch(1, 0))
        values = {name: trainer.value(name) for name in sorted(trainer._values)}
        trainer.load(saved)
        trainer.step(batch(1, 0))
        assert [name for name in values if not torch.equal(values[name], trainer.value(name))] == []
    torch.save((str(saved), values), Path(out) / f"values {rank}")


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_one_process(tmp_path: Path) -> None:
    run_ranks(_saved, 2, str(tmp_path))
    saved, values = torch.load(tmp_path / "values 1")
    model = build("gpt", torch.float64, 4)
    graph = lading.capture(model, batch(0, 0), next_byte_loss)
    plan = lading.plan(graph, machine(), layout="dp1", budget="100%", cache=False)
    with lading.Trainer(plan, graph, model, folder=tmp_path) as trainer:
        trainer.load(saved)
        trainer.step(batch(1, 0))
        alone = {name: trainer.value(name) for name in sorted(trainer._values)}
    Case().check(alone, [], (values, []))


class Fused(nn.Module):
    """Three products by one matrix, which are used apart, and once in one piece and in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(16, 24, bias=False), nn.Linear(8, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.fused(x)
        first, second, third = mixed.chunk(3, -1)
        return self.out(torch.relu(first) * second + third).sum() + mixed.cumsum(-1).square().mean()


def fused_loss(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(inputs["x"])


def test_parts_of_a_fused_matrix_are_gathered_in_their_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, given = Fused().double(), {"x": torch.randn(4, 16, dtype=torch.float64)}
    initial = {name: value.detach().clone() for name, value in model.named_parameters()}
    graph = lading.capture(model, given, fused_loss)
    plans = [lading.plan(graph, machine(), layout=text, budget="100%", cache=False) for text in ("tp2", "dp1")]
    ranks = play(plans[0], graph, initial, lambda step, replica: [dict(input_leaves(given))], 2, tmp_path)
    with lading.Trainer(plans[1], graph, model, folder=tmp_path) as trainer:
        losses = [trainer.step(given) for _ in range(2)]
        alone = {name: trainer.value(name) for name in initial}
    for values, told in ranks:
        Case().check({name: values[name] for name in initial}, [sum(each) for each in told], (alone, losses))


def _local(view: Tensor, parts: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], int, Split] | None:
    local = local_view(view, parts, 2)
    return None if local is None else (local[0].shape, local[0].stride, local[0].offset, local[1])


def test_views_of_a_rank() -> None:
    """Of 3 rows of queries, keys and values, 4 heads of 2 each, a rank has 2 heads of each."""
    keys = Tensor(0, "float32", (3, 4, 2), (24, 2, 1), 8)
    assert _local(keys, (8, 8, 8)) == ((3, 2, 2), (12, 2, 1), 4, Split(1, (4,)))
    stacked = Tensor(0, "float32", (3, 3, 4, 2), (24, 8, 2, 1))
    assert _local(stacked, (8, 8, 8)) == ((3, 3, 2, 2), (12, 4, 2, 1), 0, Split(2, (4,)))
    assert _local(Tensor(0, "float32", (3, 24), (24, 1)), (8, 8, 8)) == ((3, 12), (12, 1), 0, Split(1, (8, 8, 8)))
    assert _local(Tensor(0, "float32", (24, 3), (1, 24)), (24,)) == ((12, 3), (1, 12), 0, Split(0, (24,)))
    assert _local(keys, (24,)) is None
    tokens = Tensor(0, "float32", (8, 6), (6, 1))  # two sequences of four tokens
    assert _local(tokens, (24,)) == ((4, 6), (6, 1), 0, Split(0, (4,)))


def test_a_table_of_positions_longer_than_the_sequence_is_cut_in_each_run_of_that_length() -> None:
    model = build_model("gpt", **{**SIZES, "max_seq_len": 64})
    step = shard_tensors(lading.capture(model, batch(0, 0), next_byte_loss), parse_layout("tp2,sp"))
    placements = {p.names[0]: p.placement for p in step.parameters if p.placement is not None}
    assert placements["positions.weight"].lengths == (16,) * 4
    assert all(sum(each.lengths) == each.shape[each.dim] for each in placements.values())


def test_what_ranks_do_not_divide_is_refused_by_name() -> None:
    graph = lading.capture(build("gpt", torch.float32, 2), batch(0, 0), next_byte_loss)
    with pytest.raises(ConfigError, match=r"matrix that tp4 divides, found layers\.0\.qkv\.weight \(96, 32\)"):
        shard_tensors(graph, parse_layout("tp4"))
    with pytest.raises(ConfigError, match=r"matrix that tp3 divides, found tokens\.weight \(64, 32\)"):
        shard_tensors(graph, parse_layout("tp3"))
    with pytest.raises(ConfigError, match="add tp2"):
        lading.plan(graph, machine(), layout="sp", budget="100%", cache=False)
    rule = lading.Matrices(rule="muon", lr=0.02)
    with pytest.raises(ConfigError, match="muon"):
        lading.plan(graph, machine(), layout="tp2", budget="100%", cache=False, matrices=rule)
