"""Replicas and shards of the stages of a pipeline, and replicas of shards: all have the numbers of one process."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lading
from lading.errors import ConfigError
from lading.ir.graph import StepGraph
from lading.ir.layout import parse_layout
from lading.ir.plan import Option
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.runtime.job import Replicas
from tests.ranks import run_ranks
from tests.test_pipelines import SIZES, connected
from tests.test_replicas import BUCKET, batch
from tests.test_saved_plan import states_on_disk
from tests.test_train_ranks import ASKED, numbers, records, written
from tests.test_train_ranks import alone as run_alone

#: Bytes by which a small budget is below what keeping everything takes.
TIGHT = 30_000

pytestmark = pytest.mark.usefixtures("one_thread")


def build(name: str, layers: int, dtype: torch.dtype, frozen: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_layers": layers, **({"num_experts": 4} if name == "moe" else {})}
    model = build_model("gpt" if name == "dropout" else name, **sizes).to(dtype)
    if name == "dropout":
        for layer in model.layers:
            layer.mlp_out = nn.Sequential(layer.mlp_out, nn.Dropout(0.2))
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(path != frozen)
    return model


@cache
def captured(name: str, layers: int, dtype: torch.dtype, frozen: str, accumulation: int) -> StepGraph:
    return lading.capture(build(name, layers, dtype, frozen), batch(0, 0), next_byte_loss, accumulation=accumulation)


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to train on four ranks: how the step is spread, what is captured, and how it is planned."""

    layout: str
    model: str = "llama"
    layers: int = 2
    dtype: torch.dtype = torch.float32
    frozen: str = ""
    micro: int = 1
    steps: int = 3
    plan: Callable[[], dict[str, Any]] = dict
    tight: bool = False

    def planned(self, graph: StepGraph, layout: str) -> lading.Plan:
        """Plan; where it is tight, for less memory than keeping everything takes of the fullest rank."""
        asked = {"budget": "100%", "cache": False, "policy": "keep-all", "disk_budget": 0, **self.plan()}
        roomy = lading.plan(graph, connected(), layout=layout, **asked)
        if not self.tight:
            return roomy
        budget = max(each.predictions.keep_all_bytes for each in (roomy, *roomy.peers)) - TIGHT
        asked |= {"policy": "residency", "budget": budget}
        return lading.plan(graph, connected(), layout=layout, **asked)

    def train(self, folder: Path, rank: int | None = None) -> tuple[dict[str, torch.Tensor], list[float]]:
        """Train as a rank, or alone on the batches of all; returns the values and the losses."""
        layout = parse_layout("dp1" if rank is None else self.layout)
        count = self.micro * parse_layout(self.layout).dp // layout.dp
        first = 0 if rank is None else layout.replica(rank) * count
        model, graph = build(*self.of), captured(*self.of, count)
        with lading.Trainer(self.planned(graph, str(layout)), graph, model, folder=folder) as trainer:
            losses = [
                trainer.step([batch(step, first + number) for number in range(count)]) for step in range(self.steps)
            ]
            values = {name: trainer.value(name) for name in sorted(trainer._values)}
        for name, value in model.state_dict().items():
            assert name not in values or torch.equal(value, values[name])
        return values, losses

    @property
    def of(self) -> tuple[str, int, torch.dtype, str]:
        """What is captured."""
        return self.model, self.layers, self.dtype, self.frozen


#: Two replicas with a micro-batch each add up as one process does.
EXACT = {
    "replicas": Case(f"dp2,pp2,bucket_bytes={BUCKET}"),
    "tied replicas": Case("dp2,pp2", "gpt"),
    "tied zero1": Case("dp2,pp2,zero1", "gpt"),
    "tied zero3": Case("dp2,pp2,zero3", "gpt"),
    "frozen": Case("dp2,pp2,zero3", "gpt", frozen="tokens.weight"),
    "dropout": Case("dp2,pp2,zero3", "dropout"),
    "masters": Case("dp2,pp2,zero3", dtype=torch.bfloat16, plan=lambda: {"master_weights": True}),
    "recomputed": Case("dp2,pp2,zero3", plan=lambda: {"policy": "checkpoint-every-block"}),
    "tight": Case("dp2,pp2,zero3", tight=True),
    "disk": Case("dp2,pp2,zero1", plan=lambda: {"policy": states_on_disk, "disk_budget": None}),
    "muon": Case("dp2,pp2", plan=lambda: {"matrices": lading.Matrices(rule="muon", lr=0.02)}),
    "muon shards": Case("dp2,pp2,zero3", plan=lambda: {"matrices": lading.Matrices(rule="muon", lr=0.02)}),
}
_CLIPPED = Case("", layers=4, dtype=torch.float64, micro=2, steps=20, plan=lambda: {"clip_norm": 0.1})
CLIPPED = {
    layout: dataclasses.replace(_CLIPPED, layout=layout)
    for layout in (
        "dp2,pp2",
        "dp2,pp2,zero1",
        "dp2,pp2,zero3",
        "dp2,pp2,zero3,zero-bubble",
        "dp2,pp2,vpp2,zbv,zero1",
        "dp2,pp2,vpp2,interleaved,zero3",
        "dp4,zero1,shard2",
        "dp4,zero2,shard2",
        "dp4,zero3,shard2",
    )
}


SAVED = Case("", "gpt", dtype=torch.float64)
CASES = {**EXACT, **CLIPPED}
#: Cases of the start of four ranks that also saves, and is given unlike things.
FIRST = {"tied zero3", "masters", "dp2,pp2,vpp2,interleaved,zero3", "dp4,zero3,shard2"}


def _four(rank: int, out: str, names: list[str]) -> None:
    for name in names:
        folder = Path(out) / f"{name} {rank}"
        folder.mkdir()
        torch.save(CASES[name].train(folder, rank), folder / "values")
    if names[0] in FIRST:
        _goes_on(rank, Path(out))
        torch.save(_unlike(rank, Path(out)), Path(out) / f"told {rank}")


def _goes_on(rank: int, out: Path) -> None:
    """Save with one product, go on from there with another, and with a third without a checkpoint."""
    folder = out / f"masters {rank}"

    def planned(layout: str) -> tuple[lading.Plan, StepGraph]:
        graph = captured(*SAVED.of, 4 // parse_layout(layout).dp)
        return SAVED.planned(graph, layout), graph

    def run(trainer: lading.Trainer, step: int) -> None:
        micro = 4 // trainer.plan.replicas
        first = trainer.plan.replica(rank) * micro
        trainer.step([batch(step, first + number) for number in range(micro)])

    with lading.Trainer(*planned("dp2,pp2,zero3"), build(*SAVED.of), folder=folder) as trainer:
        run(trainer, 0)
        path = trainer.save(out / "saved")
    with lading.Trainer(*planned("dp4,zero1,shard2"), build(*SAVED.of), folder=folder) as trainer:
        trainer.load(path)
        run(trainer, 1)
        trainer.pause()
        trainer.resume(*planned("dp2,pp2"))
        run(trainer, 2)
        trainer.save(out / "saved")


def _unlike(rank: int, out: Path) -> dict[str, str]:
    """What is said where ranks are given other batches, or have other collectives, than those that they join."""
    told: dict[str, str] = {}
    case = CASES["masters"]
    graph, model = captured(*case.of, 1), build(*case.of)
    with lading.Trainer(case.planned(graph, "dp2,pp2"), graph, model, folder=out / f"masters {rank}") as trainer:
        with pytest.raises(ConfigError) as refused:
            trainer.step(batch(0, rank))
        told["batches"] = str(refused.value)
        trainer.step(batch(0, rank % 2))
    with pytest.raises(ConfigError) as refused:
        Replicas(parse_layout("dp2,pp2"), {"replicate": "other" if rank == 3 else "one", "pp": "one"})
    told["collectives"] = str(refused.value)
    return told


@pytest.fixture(scope="module", params=["first", "rest"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Folder with what four ranks wrote, and the names of their cases; they are launched once."""
    folder = tmp_path_factory.mktemp("four")
    names = [name for name in CASES if (name in FIRST) == (request.param == "first")]
    run_ranks(_four, 4, str(folder), names)
    return folder, names


@pytest.mark.slow
def test_two_replicas_of_two_stages_train_as_one_process_to_the_bit(ran: tuple[Path, list[str]]) -> None:
    for name in filter(EXACT.__contains__, ran[1]):
        alone, losses = CASES[name].train(ran[0])
        for rank in range(4):
            values, told = torch.load(ran[0] / f"{name} {rank}" / "values")
            assert told == losses, name
            assert values.keys() == alone.keys(), name
            assert [key for key in alone if not torch.equal(values[key], alone[key])] == [], name


@pytest.mark.slow
def test_products_that_add_up_in_another_order_stay_within_rounding(ran: tuple[Path, list[str]]) -> None:
    for name in filter(CLIPPED.__contains__, ran[1]):
        alone, losses = CASES[name].train(ran[0])
        first = torch.load(ran[0] / f"{name} 0" / "values")[0]
        for rank in range(4):
            values, told = torch.load(ran[0] / f"{name} {rank}" / "values")
            assert told == pytest.approx(losses, rel=1e-12), name
            assert values.keys() == alone.keys(), name
            for key, value in values.items():
                assert torch.equal(value, first[key]), (name, key)
                # AdamW divides by the root of a square: where a gradient is near zero its error counts for more.
                torch.testing.assert_close(value, alone[key], rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("ran", ["first"], indirect=True)
def test_a_checkpoint_goes_from_product_to_product_and_to_one_process(
    ran: tuple[Path, list[str]], tmp_path: Path
) -> None:
    graph = captured(*SAVED.of, 4)
    with lading.Trainer(SAVED.planned(graph, "dp1"), graph, build(*SAVED.of), folder=tmp_path) as alone:
        for step in range(3):
            alone.step([batch(step, number) for number in range(4)])
        values = {name: alone.value(name) for name in alone._values}
    with lading.Trainer(SAVED.planned(graph, "dp1"), graph, build(*SAVED.of), folder=tmp_path) as trainer:
        trainer.load(ran[0] / "saved" / "step-00000003")
        for name, value in values.items():
            torch.testing.assert_close(trainer.value(name), value, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("ran", ["first"], indirect=True)
def test_ranks_that_do_unlike_things_are_told(ran: tuple[Path, list[str]]) -> None:
    told = torch.load(ran[0] / "told 0")
    assert all(torch.load(ran[0] / f"told {rank}") == told for rank in range(4))
    assert (
        "expected the same batches on ranks 0, 2, which compute on them together, got others on rank 2"
        in told["batches"]
    )
    assert "the same collectives over replicate on ranks 2, 3, rank 3 has others than rank 2" in told["collectives"]


def test_a_small_budget_drops_what_a_stage_unsharded_or_computed() -> None:
    case = EXACT["tight"]
    plan = case.planned(captured(*case.of, 1), case.layout)
    gaps = [choice.option for each in (plan, *plan.peers) for choice in each.choices.gaps]
    assert gaps
    assert {*gaps} == {Option.RECOMPUTE}


@pytest.mark.slow
def test_a_run_of_a_file_trains_on_a_product_as_in_one_process(tmp_path: Path) -> None:
    path, out = written(tmp_path), tmp_path / "ranks"
    asked = ("model.sizes={dim=64, num_layers=2, num_heads=2, dropout=0.0}", "optimization={steps=4, warmup_steps=1}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "lading"]
    command += ["train", str(path), "--no-cache", *ASKED, *asked, "layout='dp2,pp2,zero1'", f"out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert numbers(records(out)) == numbers(run_alone(path, *asked, "optimization.accumulation=2"))
