"""Tensor, context and expert parallel with shards and with stages: ranks have the numbers of one process.

Sums over what is cut are added up in another order, so the numbers are not equal to the bit. The tolerance is that of
``tests.test_tensor_parallel``, derived there: 1e-8 after 20 steps in float64. Shards add nothing to it, as they move
elements and add no others up, and stages add nothing, as their sums are those of one process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lading
from lading.errors import ConfigError
from lading.ir.graph import StepGraph
from lading.ir.layout import parse_layout
from lading.ir.plan import Option
from lading.tracing.batches import input_leaves
from tests.rank_threads import play
from tests.ranks import run_ranks
from tests.test_pipelines import connected
from tests.test_products import Case, build, captured
from tests.test_replicas import batch
from tests.test_train_ranks import ASKED, records, written
from tests.test_train_ranks import alone as run_alone

pytestmark = pytest.mark.usefixtures("one_thread")

#: By dtype; bfloat16 has 8 bits, and a weight that is rounded the other way is off by one of them.
_TOLERANCE = {torch.float64: 1e-8, torch.bfloat16: 2e-2}


def clipped() -> dict[str, Any]:
    return {"clip_norm": 0.1}


def recomputed() -> dict[str, Any]:
    return {"clip_norm": 0.1, "policy": "checkpoint-every-block"}


def masters() -> dict[str, Any]:
    return {"clip_norm": 0.1, "master_weights": True}


def case(layout: str, model: str = "gpt", **more: Any) -> Case:
    """A case in float64 of two micro-batches a replica; the model gpt has tied weights."""
    given: dict[str, Any] = {"dtype": torch.float64, "micro": 2, "steps": 3, "plan": clipped, **more}
    return Case(layout, model, **given)


#: Two and four ranks played in one process.
QUICK = {
    "tp and zero3": case("dp2,tp2,zero3", micro=1),
    "tp and pp": case("tp2,pp2"),
    "cp and zero3": case("cp2,zero3", micro=1),
}
#: The same, for the slow tests, where eight ranks would take too many processes.
SLOWER = {
    "cp, tp and zero3": case("cp2,tp2,zero3", "llama", micro=1),
    "tp, pp and zero3": case("dp2,tp2,pp2,zero3"),
    "tp, pp and zero1": case("dp2,tp2,sp,pp2,zero1", "llama"),
}
#: Four ranks.
CASES = {
    "tp, zero1": case("dp2,tp2,zero1", steps=20),
    "tp, zero2": case("dp2,tp2,sp,zero2", "llama"),
    "tp, zero3": case("dp2,tp2,zero3", steps=20),
    "tp, sp, zero3": case("dp2,tp2,sp,zero3", "llama", plan=recomputed),
    "tp, frozen": case("dp2,tp2,zero3", frozen="tokens.weight"),
    "tp, dropout": case("dp2,tp2,sp,zero3", "dropout"),
    "tp, masters": case("dp2,tp2,zero3", "llama", dtype=torch.bfloat16, plan=masters),
    "tp, tight": case("dp2,tp2,zero3", tight=True),
    "pp": case("tp2,pp2", steps=20),
    "pp, sp": case("tp2,sp,pp2", "llama", plan=recomputed),
    "pp, zero bubble": case("tp2,pp2,vpp2,zbv", "llama", layers=4),
    "pp, frozen": case("tp2,pp2", frozen="tokens.weight"),
    "pp, dropout": case("tp2,pp2", "dropout"),
    "pp, masters": case("tp2,sp,pp2", "llama", dtype=torch.bfloat16, plan=masters),
    "cp, pp": case("cp2,pp2"),
    "cp, tp": case("cp2,tp2", steps=20),
    "cp, zero1": case("dp2,cp2,zero1", steps=20),
    "cp, zero2": case("dp2,cp2,zero2"),
    "cp, zero3": case("dp2,cp2,zero3", "llama", steps=20, plan=recomputed),
    "cp, hybrid": case("dp2,cp2,zero3,shard2"),
    "cp alone": case("cp4,zero3"),
    "cp, frozen": case("cp4,zero3", frozen="tokens.weight"),
    "ep, pp": case("dp2,ep2,pp2", "moe", steps=20),
    "ep, pp, zero1": case("dp2,ep2,pp2,zero1", "moe"),
    "ep, pp, zero3": case("dp2,ep2,pp2,zero3", "moe", plan=recomputed),
    "cp, masters": case("dp2,cp2,zero3", "llama", dtype=torch.bfloat16, plan=masters),
}


def check(of: Case, got: tuple[dict[str, torch.Tensor], list[float]], alone: tuple[Any, list[float]]) -> None:
    tolerance = _TOLERANCE[of.dtype]
    assert got[1] == pytest.approx(alone[1], rel=tolerance)
    assert got[0].keys() == alone[0].keys()
    for name, value in got[0].items():
        close = torch.allclose(value, alone[0][name], rtol=tolerance, atol=tolerance)
        assert close, f"{of.layout}: {name} is off by {(value - alone[0][name]).abs().max():.1e}"


@pytest.mark.long
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWER)])
def test_ranks_in_one_process_train_as_one_rank(name: str, tmp_path: Path) -> None:
    of = {**QUICK, **SLOWER}[name]
    layout = parse_layout(of.layout)
    graph, model = captured(*of.of, of.micro), build(*of.of)
    initial = {n: tensor.detach().clone() for n, tensor in [*model.named_parameters(), *model.named_buffers()]}

    def feeds(step: int, replica: int) -> list[dict[str, torch.Tensor]]:
        return [dict(input_leaves(batch(step, replica * of.micro + number))) for number in range(of.micro)]

    ranks = play(of.planned(graph, of.layout), graph, initial, feeds, of.steps, tmp_path)
    alone = of.train(tmp_path)
    for values, told in ranks:
        assert all(torch.equal(value, ranks[0][0][key]) for key, value in values.items())
        losses = [sum(step) for step in told if step]  # of each micro-batch its share
        assert layout.dp > 1 or losses in ([], pytest.approx(alone[1], rel=1e-8))
        check(of, (values, alone[1]), alone)


def _four(rank: int, out: str) -> None:
    for name, of in CASES.items():
        folder = Path(out) / f"{name} {rank}"
        folder.mkdir()
        torch.save(of.train(folder, rank), folder / "values")
    _goes_on(rank, Path(out))
    torch.save(_unlike(rank, Path(out)), Path(out) / f"told {rank}")
    torch.save(_norms("cp2,pp2", Path(out) / f"tp, zero3 {rank}"), Path(out) / f"norms {rank}")


_SAVED = case("", plan=dict)


def _planned(layout: str) -> tuple[lading.Plan, StepGraph]:
    graph = captured(*_SAVED.of, 4 // parse_layout(layout).dp)
    return _SAVED.planned(graph, layout), graph


def _goes_on(rank: int, out: Path) -> None:
    """Go on from a checkpoint of one process with one product after another, the last without a checkpoint."""
    folder, step, path = out / f"tp, zero3 {rank}", 1, out / "alone" / "step-00000001"

    def run(trainer: lading.Trainer) -> None:
        micro = 4 // trainer.plan.replicas
        first = trainer.plan.replica(rank) * micro
        trainer.step([batch(step, first + number) for number in range(micro)])

    for layout in ("dp2,tp2,zero3", "tp2,pp2", "dp2,cp2,zero3"):
        with lading.Trainer(*_planned(layout), build(*_SAVED.of), folder=folder) as trainer:
            trainer.load(path)
            run(trainer)
            path, step = trainer.save(out / "saved"), step + 1
            if step == 4:
                trainer.pause()
                trainer.resume(*_planned("dp2,tp2,sp,zero1"))
                run(trainer)
                trainer.save(out / "saved")


def _norms(layout: str, folder: Path) -> dict[str, float]:
    """Norms of the gradients of one step on four micro-batches, each rank on all of them."""
    plan, graph = _planned(layout)
    with lading.Trainer(plan, graph, build(*_SAVED.of), folder=folder) as trainer:
        trainer.step([batch(0, number) for number in range(4)], norms=True)
        return trainer.gradient_norms()


def _unlike(rank: int, out: Path) -> dict[str, str]:
    """What is said where ranks of one replica are given other batches."""
    told: dict[str, str] = {}
    for layout in ("dp2,tp2,zero3", "tp2,pp2", "dp2,cp2,zero3"):
        plan, graph = _planned(layout)
        model, count = build(*_SAVED.of), graph.accumulation
        with lading.Trainer(plan, graph, model, folder=out / f"tp, zero3 {rank}") as trainer:
            with pytest.raises(ConfigError) as refused:
                trainer.step([batch(0, rank * count + number) for number in range(count)])
            told[layout] = str(refused.value)
    return told


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what four ranks wrote; they are launched once."""
    folder = tmp_path_factory.mktemp("four")
    plan, graph = _planned("dp1")
    with lading.Trainer(plan, graph, build(*_SAVED.of), folder=folder) as alone:
        alone.step([batch(0, number) for number in range(4)])
        alone.save(folder / "alone")
    run_ranks(_four, 4, str(folder))
    return folder


@pytest.mark.slow
def test_four_ranks_train_as_one_process(ran: Path) -> None:
    for name, of in CASES.items():
        alone = of.train(ran)
        first = torch.load(ran / f"{name} 0" / "values")[0]
        for rank in range(4):
            values, losses = torch.load(ran / f"{name} {rank}" / "values")
            assert [key for key, value in values.items() if not torch.equal(value, first[key])] == [], name
            check(of, (values, losses), alone)


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_every_layout(ran: Path, tmp_path: Path) -> None:
    plan, graph = _planned("dp1")
    with lading.Trainer(plan, graph, build(*_SAVED.of), folder=tmp_path) as alone:
        for step in range(5):
            alone.step([batch(step, number) for number in range(4)])
        values = {name: alone.value(name) for name in alone._values}
    with lading.Trainer(plan, graph, build(*_SAVED.of), folder=tmp_path) as trainer:
        trainer.load(ran / "saved" / "step-00000005")
        for name, value in values.items():
            torch.testing.assert_close(trainer.value(name), value, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_norms_of_gradients_count_ranks_of_a_sequence_once(ran: Path, tmp_path: Path) -> None:
    alone = _norms("dp1", tmp_path)
    for rank in range(4):
        assert torch.load(ran / f"norms {rank}") == pytest.approx(alone, rel=1e-8)


@pytest.mark.slow
def test_ranks_of_one_replica_that_get_other_batches_are_told_so(ran: Path) -> None:
    told = torch.load(ran / "told 0")
    assert all(torch.load(ran / f"told {rank}") == told for rank in range(4))
    for layout, ranks in (("dp2,tp2,zero3", "0, 1"), ("tp2,pp2", "0, 1, 2, 3"), ("dp2,cp2,zero3", "0, 1")):
        assert f"expected the same batches on ranks {ranks}, which compute on them together" in told[layout]


@pytest.mark.parametrize(
    ("layout", "micro", "less_bytes"),
    [
        ("dp2,tp2,zero3", 1, 150_000),
        pytest.param("tp2,pp2", 2, 60_000, marks=pytest.mark.slow),
        pytest.param("dp2,cp2,zero3", 1, 150_000, marks=pytest.mark.slow),
    ],
)
def test_a_small_budget_drops_what_is_computed_or_unsharded_again(layout: str, micro: int, less_bytes: int) -> None:
    of = case(layout, micro=micro)
    graph = captured(*of.of, micro)
    roomy = of.planned(graph, layout)
    budget = max(each.predictions.keep_all_bytes for each in (roomy, *roomy.peers)) - less_bytes
    plan = lading.plan(graph, connected(), layout=layout, budget=budget, disk_budget=0, cache=False, clip_norm=0.1)
    gaps = [choice.option for each in (plan, *plan.peers) for choice in each.choices.gaps]
    assert gaps
    assert {*gaps} == {Option.RECOMPUTE}


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("cp2,tp2,sp", "leave sp out, or cp"),
        ("cp2,ep2", "leave ep out, or cp"),
        ("dp2,cp4,zero3,shard2", "give shard4 or more"),
        ("dp2,ep2,tp2", "leave the rest out, or ep"),
    ],
)
def test_products_that_are_not_made_are_refused_by_name(layout: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        lading.plan(captured(*_SAVED.of, 1), connected(), layout=layout, budget="100%", cache=False)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2,tp2,zero3", "tp2,pp2", "dp2,cp2,zero3"])
def test_a_run_of_a_file_trains_on_a_product_as_in_one_process(layout: str, tmp_path: Path) -> None:
    path, out = written(tmp_path), tmp_path / "ranks"
    asked = ("model.sizes={dim=64, num_layers=2, num_heads=2, dropout=0.0}", "optimization={steps=4, warmup_steps=1}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "lading"]
    micro = f"optimization.accumulation={2 if 'pp' in layout else 1}"
    command += ["train", str(path), "--no-cache", *ASKED, *asked, micro, f"layout='{layout}'", f"out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    alone = run_alone(path, *asked, "optimization.accumulation=2")
    assert [row["loss"] for row in records(out)] == pytest.approx([row["loss"] for row in alone], rel=1e-4)
