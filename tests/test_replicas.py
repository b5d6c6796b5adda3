"""A step runs on several ranks: each trains on a batch of its own, and all have the numbers of one process."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lading
from lading.errors import ConfigError, PlanInfeasible, StorageError
from lading.ir.graph import OpKind, Phase, StepGraph
from lading.ir.layout import Layout
from lading.ir.machine import Curve, Machine
from lading.ir.reduction import reduce_gradients, with_draws
from lading.ir.statistics import share_statistics
from lading.memory.restore import step_of
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.optim.registry import optimizer as rule
from lading.planner.api import best_buckets
from lading.runtime.draws import Draws
from lading.runtime.tiers import tiers_of_rank
from tests.captured import shared_capture
from tests.machines import small_machine
from tests.ranks import run_ranks
from tests.test_saved_plan import states_on_disk

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {"vocab_size": 64, "max_seq_len": 16, "dim": 32, "num_heads": 2, "num_layers": 2}
#: Fewer bytes than the gradients of a block, so that there are several buckets.
BUCKET = 20_000
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


def machine() -> Machine:
    """The made-up machine, with collectives of its processes."""
    curve, small = Curve(size=(1e3, 1e6), rate=(1e8, 1e9)), small_machine()
    device = dataclasses.replace(small.device, peak_flops_per_s={**small.device.peak_flops_per_s, "float64": 5e10})
    return dataclasses.replace(
        small, device=device, collectives={f"{op}.{n}": curve for op in COLLECTIVES for n in (2, 3, 4)}
    )


def batch(step: int, number: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(100 * step + number)
    return {"tokens": torch.randint(0, 64, (2, 17), generator=drawn)}


class Noisy(nn.Module):
    """Next-token model whose layers drop out weights of attention and outputs, and whose forward draws noise.

    Args:
        norm: Whether layers keep running statistics of what they get.
    """

    def __init__(self, num_layers: int, *, norm: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(NoisyLayer(norm=norm) for _ in range(num_layers))
        self.out = nn.Linear(32, 64)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embedding(tokens_BT)
        x_BTD = x_BTD + 0.1 * torch.randn_like(x_BTD)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.out(x_BTD)


class NoisyLayer(nn.Module):
    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()
        self.heads, self.mixed, self.dropout = nn.Linear(32, 96), nn.Linear(32, 32), nn.Dropout(0.2)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        normed_BTD = self.norm(x_BTD.flatten(0, 1)).view_as(x_BTD)
        q_B1TD, k_B1TD, v_B1TD = self.heads(normed_BTD).unsqueeze(1).chunk(3, dim=-1)
        y_B1TD = nn.functional.scaled_dot_product_attention(q_B1TD, k_B1TD, v_B1TD, is_causal=True, dropout_p=0.1)
        return x_BTD + self.dropout(self.mixed(y_B1TD.squeeze(1)))


def build(name: str = "llama", dtype: torch.dtype = torch.float32, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    if name in ("noisy", "normed"):
        return Noisy(layers, norm=name == "normed").to(dtype)
    return build_model(name, **{**SIZES, "num_layers": layers}).to(dtype)


@cache
def captured(name: str, dtype: torch.dtype, accumulation: int, layers: int = 2) -> StepGraph:
    """The step of ``build(name, dtype, layers)``."""

    def make() -> StepGraph:
        return lading.capture(build(name, dtype, layers), batch(0, 0), next_byte_loss, accumulation=accumulation)

    return shared_capture(make, "replicas", name, dtype, accumulation, layers)


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to train: what is captured, and how it is planned."""

    model: str = "llama"
    dtype: torch.dtype = torch.float32
    micro: int = 1
    plan: Callable[[], dict[str, Any]] = dict
    layers: int = 2

    def train(self, layout: str, share: int, first: int, folder: Path, steps: int = 3) -> tuple[Any, list[float]]:
        """Train on ``share`` micro-batches a step from number ``first`` on; returns the values and the losses."""
        model = build(self.model, self.dtype, self.layers)
        graph = captured(self.model, self.dtype, share, self.layers)
        asked = {"budget": "100%", "cache": False, **self.plan()}
        made = lading.plan(graph, machine(), layout=layout, **asked)
        with lading.Trainer(made, graph, model, folder=folder) as trainer:
            losses = [trainer.step([batch(step, first + number) for number in range(share)]) for step in range(steps)]
            states = {name: trainer.value(name) for name in trainer._values}
        return states, losses


CASES = {
    "clipped": Case(plan=lambda: {"clip_norm": 0.1}),
    "tied": Case("gpt"),
    "masters": Case(dtype=torch.bfloat16, plan=lambda: {"master_weights": True, "clip_norm": 0.1}),
    "lion": Case(plan=lambda: {"optimizer": rule("lion")}),
    "recomputed": Case(plan=lambda: {"policy": "checkpoint-every-block"}),
    "muon": Case(plan=lambda: {"matrices": lading.Matrices(rule="muon", lr=0.02)}),
    "disk": Case(plan=lambda: {"policy": states_on_disk, "clip_norm": 0.1}),
    "dropout": Case("noisy"),
    "statistics": Case("normed"),
}


def same(name: str, value: torch.Tensor, alone: torch.Tensor) -> bool:
    """Whether values are equal: to the bit, but running statistics, of which one process rounds every sum at once."""
    if "running_" in name:
        return torch.allclose(value, alone, rtol=1e-6, atol=1e-7)
    return torch.equal(value, alone)


#: Cases that try something that no other of them tries, on one layer; the slow tests try all on two.
QUICK = ("tied", "masters", "muon", "disk", "statistics")


def _replica(rank: int, out: str, names: list[str], layers: int) -> None:
    for name in names:
        case = dataclasses.replace(CASES[name], layers=layers)
        folder = Path(out) / f"{name} {rank}"
        folder.mkdir()
        torch.save(case.train(f"dp2,bucket_bytes={BUCKET}", case.micro, rank * case.micro, folder), folder / "values")


@pytest.mark.long
@pytest.mark.parametrize(
    ("names", "layers"),
    [pytest.param([*QUICK], 1, id="quick"), pytest.param([*CASES], 2, id="every", marks=pytest.mark.slow)],
)
def test_two_ranks_train_as_one_process_to_the_bit(tmp_path: Path, names: list[str], layers: int) -> None:
    run_ranks(_replica, 2, str(tmp_path), names, layers)
    for name in names:
        case = dataclasses.replace(CASES[name], layers=layers)
        alone, losses = case.train("dp1", 2 * case.micro, 0, tmp_path)
        for rank in range(2):
            values, told = torch.load(tmp_path / f"{name} {rank}" / "values")
            assert told == losses, name
            assert values.keys() == alone.keys()
            assert [key for key in alone if not same(key, values[key], alone[key])] == [], name


def _four(rank: int, out: str) -> None:
    case = Case(dtype=torch.float64, micro=2)
    folder = Path(out) / str(rank)
    folder.mkdir()
    torch.save(case.train("", 2, 2 * rank, folder), folder / "values")


def _in_one_folder(rank: int, out: str) -> None:
    case = Case(plan=lambda: {"policy": states_on_disk}, layers=1)
    values = case.train("dp2", 1, rank, Path(out) / "files")
    torch.save(values, Path(out) / f"values {rank}")


@pytest.mark.long
def test_ranks_that_are_given_one_folder_have_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    run_ranks(_in_one_folder, 2, str(tmp_path))
    first, second = (torch.load(tmp_path / f"values {rank}") for rank in range(2))
    assert first[1] == second[1]
    assert all(torch.equal(value, second[0][name]) for name, value in first[0].items())
    assert [*(tmp_path / "files").iterdir()] == []
    tier = machine().tiers[0]
    located = dataclasses.replace(tier, location="/fast")
    elsewhere = dataclasses.replace(tier, kind="module:function", location="host:1")
    tiers = (tier, located, elsewhere)
    assert tiers_of_rank(tiers, tmp_path, 0) == tiers
    locations = [each.location for each in tiers_of_rank(tiers, tmp_path, 3)]
    assert locations == [f"{tmp_path}/rank-3", "/fast/rank-3", "host:1"]


@pytest.mark.slow
def test_four_ranks_add_up_in_another_order(tmp_path: Path) -> None:
    run_ranks(_four, 4, str(tmp_path))
    alone, losses = Case(dtype=torch.float64).train("dp1", 8, 0, tmp_path)
    for rank in range(4):
        values, told = torch.load(tmp_path / str(rank) / "values")
        assert told == pytest.approx(losses, rel=1e-14)
        first = torch.load(tmp_path / "0" / "values")[0]
        for name, value in values.items():
            assert torch.equal(value, first[name]), name
            # AdamW divides by the root of a square: where a gradient is near zero its error counts for more.
            torch.testing.assert_close(value, alone[name], rtol=1e-8, atol=1e-10)


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except (ConfigError, StorageError) as error:
        return str(error)
    return "nothing was refused"


def _unlike_steps(trainer: lading.Trainer, rank: int, out: Path) -> dict[str, str]:
    told: dict[str, str] = {}
    told["rates"] = _refused(lambda: trainer.step(batch(0, rank), lr=0.1 * (rank + 1)))
    trainer.step(batch(0, rank), lr=0.1)
    path = trainer.save(out / "saved")
    before = trainer.value("norm.weight").clone()
    trainer.step(batch(1, rank), lr=0.1)
    trainer.load(path)
    assert torch.equal(trainer.value("norm.weight"), before)
    told["losses"] = f"{trainer.evaluate(batch(2, rank)):.12f}"
    if rank:  # who skips a batch that it cannot take keeps nobody waiting for long
        with pytest.raises(ConfigError, match="pad or cut the batch"):
            trainer.step({"tokens": batch(1, rank)["tokens"][:1]})
    trainer.step(batch(1, rank), lr=0.1)
    if rank:
        trainer.set_value("norm.weight", before)
    told["set"] = _refused(lambda: trainer.step(batch(1, rank), lr=0.1))
    told["doing"] = _refused(
        (lambda: trainer.evaluate(batch(1, rank))) if rank else (lambda: trainer.step(batch(1, 0)))
    )
    trainer.load(path)
    return told


def _unlike(rank: int, out: str) -> None:
    told: dict[str, str] = {}
    model = build()
    graph = lading.capture(model, batch(0, 0), next_byte_loss)
    asked: dict[str, Any] = {"budget": "100%", "cache": False}
    plan = lading.plan(graph, machine(), **asked)
    other = lading.plan(graph, machine(), layout="dp2,bucket_bytes=1000", **asked)
    told["plan"] = _refused(lambda: lading.Trainer(other if rank else plan, graph, model, folder=out))
    changed = build()
    with torch.no_grad():
        next(changed.parameters()).view(-1)[0] += rank
    told["model"] = _refused(lambda: lading.Trainer(plan, graph, changed, folder=out))
    told["settings"] = _refused(lambda: lading.plan(graph, machine(), budget=["100%", "1GB"][rank], cache=False))
    longer = lading.capture(model, batch(0, 0), next_byte_loss, accumulation=1 + rank)
    told["captures"] = _refused(lambda: lading.plan(longer, machine(), **asked))
    with pytest.raises(PlanInfeasible):  # on all ranks, though the first alone planned
        lading.plan(graph, machine(), budget="1KB", policy="keep-all", cache=False, layout="dp2")
    three = lading.plan(graph, machine(), layout="dp3", **asked)
    told["ranks"] = _refused(lambda: lading.Trainer(three, graph, model, folder=out))
    alone = lading.plan(graph, machine(), layout="dp1", **asked)
    told["alone"] = _refused(lambda: lading.Trainer(alone, graph, model, folder=out))
    folder = Path(out) / str(rank)
    folder.mkdir()
    with lading.Trainer(plan, graph, model, folder=folder) as trainer:
        told |= _unlike_steps(trainer, rank, Path(out))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    grouped = lading.plan(graph, machine(), optimizer=optimizer, **asked)
    with lading.Trainer(grouped, graph, model, optimizer=optimizer, folder=folder) as trainer:
        trainer.step(batch(0, rank))
        optimizer.param_groups[0]["weight_decay"] += 0.1 * rank
        told["groups"] = _refused(lambda: trainer.step(batch(1, rank)))
    optimizer.param_groups[0]["weight_decay"] = 0.1
    if rank:
        optimizer.state[next(model.parameters())]["exp_avg"].add_(1.0)
    told["states"] = _refused(lambda: lading.Trainer(grouped, graph, model, optimizer=optimizer, folder=folder))
    torch.save(told, folder / "told")


def test_ranks_that_were_given_unlike_things_are_told(tmp_path: Path) -> None:
    run_ranks(_unlike, 2, str(tmp_path))
    told, other = (torch.load(tmp_path / str(rank) / "told") for rank in range(2))
    assert "expected all ranks to do the same, but rank 1 is about to evaluate after step 2" in told.pop("doing")
    assert "expected all ranks to do the same, but rank 0 is about to run step 3" in other.pop("doing")
    assert told == other
    assert "rank 1 in the settings, budget: expected 100% as on rank 0, got 1GB" in told["settings"]
    assert "rank 1 in the captures, first, micro-batches: expected 1 as on rank 0, got 2" in told["captures"]
    assert "expected the same values set (by load, set_value, initialize) on all ranks, got another" in told["set"]
    assert "rank 1 in the states of the optimizer, tokens.weight.exp_avg" in told["states"]
    assert "ranks differ: rank 1 in the plan" in told["plan"]
    assert "rank 1 in the values" in told["model"]
    assert "expected a job of 3 ranks, as the plan is for so many, found one of 2" in told["ranks"]
    assert "expected a job of one process" in told["alone"]
    assert "expected the same numbers of the optimizer's groups on all ranks, got" in told["groups"]
    assert "expected the same lr on all ranks, got 0.1 on rank 0, 0.2 on rank 1; nothing has run" in told["rates"]


def _of_unlike_sizes(rank: int, out: str) -> None:
    """Give a rank a short batch, for which both have a capture."""
    model, short = build(), {"tokens": batch(0, 0)["tokens"][:1]}
    graphs = [lading.capture(model, given, next_byte_loss) for given in (batch(0, 0), short)]
    asked: dict[str, Any] = {"budget": "100%", "cache": False, "layout": "dp2"}
    plan = lading.plan(graphs[0], machine(), others=graphs[1:], **asked)
    with lading.Trainer(plan, graphs[0], model, others=graphs[1:], folder=out) as trainer:
        said = _refused(lambda: trainer.step(short if rank else batch(0, 0)))
        trainer.step(short)
    (Path(out) / f"said {rank}").write_text(said)


@pytest.mark.long
def test_a_rank_with_a_batch_of_another_size_is_told(tmp_path: Path) -> None:
    run_ranks(_of_unlike_sizes, 2, str(tmp_path))
    said = (tmp_path / "said 0").read_text()
    assert said == (tmp_path / "said 1").read_text()
    assert "expected the same capture of the batch (graph, others, shapes, counted from 0) on all ranks, got 0" in said


def _dies(rank: int, out: str) -> None:
    model = build()
    graph = lading.capture(model, batch(0, 0), next_byte_loss)
    plan = lading.plan(graph, machine(), budget="100%", cache=False)
    trainer = lading.Trainer(plan, graph, model, folder=Path(out))
    trainer.step(batch(0, rank))
    if rank == 1:
        import os

        os._exit(0)
    started = time.monotonic()
    said = _refused(lambda: trainer.step(batch(1, rank)))
    (Path(out) / "said").write_text(f"{time.monotonic() - started:.0f} {said}")
    trainer.close()


def test_a_rank_that_died_is_named(tmp_path: Path) -> None:
    run_ranks(_dies, 2, str(tmp_path))
    seconds, _, said = (tmp_path / "said").read_text().partition(" ")
    assert int(seconds) < 30
    assert "rank 0 lost a connection while waiting for the others to run step 2; missing: rank 1 (run step 1)" in said
    assert "GLHF" not in said


def step(model: nn.Module, given: Any, loss: Any = next_byte_loss) -> StepGraph:
    return step_of(lading.capture(model, given, loss), machine(), clip_norm=0.0, master_weights=False)


def test_what_uses_a_bucket_stands_behind_the_next_reduction() -> None:
    graph = reduce_gradients(step(build(), batch(0, 0)), Layout(dp=2, bucket_bytes=BUCKET))
    reduced = [index for index, op in enumerate(graph.ops) if op.kind is OpKind.COLLECTIVE]
    buckets = [graph.storage_of(graph.ops[index].inputs[0]) for index in reduced]
    assert len(set(buckets)) == len(buckets) > 3
    first_use = {
        bucket: min(i for i, op in enumerate(graph.ops) if op.phase is Phase.OPTIMIZER and bucket in graph.reads(op))
        for bucket in buckets
    }
    for bucket, behind in zip(buckets, reduced[1:], strict=False):
        assert first_use[bucket] > behind
    trained = {graph.storage_of(p.gradient) for p in graph.parameters if p.gradient is not None}
    assert trained == set(buckets)


def test_buckets_are_as_large_as_the_network_asks() -> None:
    alone = step(build_model("llama", **{**SIZES, "dim": 256}), batch(0, 0))
    quick, slow = (Curve(size=(1e3, 1e7), rate=rate) for rate in ((1e9, 1e9), (1e5, 1e9)))  # 1 us or 10 ms for 1 kB
    sizes = [
        best_buckets(
            lambda layout: reduce_gradients(alone, layout),
            dataclasses.replace(machine(), collectives={"all_reduce.2": curve}),
            Layout(dp=2),
        )[0].bucket_bytes
        for curve in (quick, slow)
    ]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda x, seen: x + seen.add_(1), "expected no operation that reads the buffer 'seen', which changes"),
        (lambda x, seen: (x, seen.clamp_(0))[0], "changes by a sum .* found that aten.clamp_"),
    ],
)
def test_buffers_that_are_no_sums_over_ranks_are_refused(change: Callable[..., torch.Tensor], why: str) -> None:
    model = nn.Linear(4, 4)
    model.seen = nn.Buffer(torch.ones(4))
    graph = step(model, {"input": torch.ones(3, 4)}, lambda m, b: change(m(b["input"]), m.seen).square().mean())
    with pytest.raises(ConfigError, match=why):
        share_statistics(graph, Layout(dp=2))


def noise(x: torch.Tensor) -> torch.Tensor:
    """Draw random numbers in the ways of which it is known how many words of the generator they take."""
    x = nn.functional.dropout(x, 0.3) + torch.rand_like(x) + torch.randn_like(x) + torch.bernoulli(x.sigmoid())
    x = x + torch.randn(17) + torch.empty_like(x).exponential_() + torch.empty_like(x).uniform_(-1, 1)
    return x + torch.randint(0, 5, x.shape) + torch.randperm(17) + torch.normal(x, 0.1)


def test_what_ranks_skip_is_what_one_process_draws() -> None:
    given = torch.ones(3, 17, dtype=torch.float64)
    captured = lading.capture(nn.Linear(17, 17).double(), given, lambda m, x: noise(m(x)).mean())
    torch.manual_seed(5)
    draws = Draws(captured, first=0, micro_batches=3)
    drawn = [op.draw for op in with_draws(captured, "cpu").ops if op.draw is not None]
    assert drawn == [(number, 0) for number in range(len(drawn))]
    draws.begin()
    draws.end()  # none of them was this rank's
    skipped = torch.get_rng_state()
    torch.manual_seed(5)
    for _ in range(3):
        noise(given)
    assert torch.equal(torch.get_rng_state(), skipped)


@pytest.mark.parametrize(
    ("draw", "why"),
    [
        (lambda: torch.randn(3), "aten.randn.default in the loss, which keeps some for later"),
        (
            lambda: torch.multinomial(torch.ones(3), 1),
            "aten.multinomial.default, which draws as many as its values ask",
        ),
    ],
)
def test_random_numbers_of_which_nobody_knows_how_many_are_refused(draw: Callable[[], torch.Tensor], why: str) -> None:
    captured = lading.capture(nn.Linear(3, 3), torch.ones(2, 3), lambda m, x: (m(x) * draw()).sum())
    with pytest.raises(ConfigError, match=why):
        Draws(with_draws(captured, "cpu"), first=0, micro_batches=2)


def test_a_plan_for_ranks_says_how_they_are_started(tmp_path: Path) -> None:
    model = build()
    graph = lading.capture(model, batch(0, 0), next_byte_loss)
    plan = lading.plan(graph, machine(), budget="100%", cache=False, layout="dp2")
    with pytest.raises(ConfigError, match="start it with: torchrun --nproc-per-node 2 SCRIPT"):
        lading.Trainer(plan, graph, model, folder=tmp_path)
    with pytest.raises(ConfigError, match='expected replicas, as "dp4", shards, as'):
        lading.plan(graph, machine(), budget="100%", cache=False, layout="dp2,recompute=full")
    with pytest.raises(ConfigError, match="test: expected the speed of collectives among 2 ranks"):
        lading.plan(graph, small_machine(), budget="100%", cache=False, layout="dp2")
    with pytest.raises(ConfigError, match=r"at most 8589934592 bytes, all that test has for a rank \(2 on this host"):
        lading.plan(graph, machine(), budget="9GiB", cache=False, layout="dp2,bucket_bytes=100000")


@pytest.mark.slow
def test_the_example_prints_the_losses_of_one_process() -> None:
    script = str(Path(__file__).parents[1] / "examples" / "on_ranks.py")
    alone = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    ranks = subprocess.run(launch, check=True, capture_output=True, text=True).stdout
    assert alone.removeprefix("1 rank:") == ranks.removeprefix("2 ranks:")
    assert len(alone.split()) == 5
