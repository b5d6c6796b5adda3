"""Ranks keep shards of states, gradients and parameters: all have the numbers of one process."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lading
from lading.errors import ConfigError
from lading.ir.action import ActionKind
from lading.ir.graph import Phase, Role, StepGraph
from lading.ir.layout import parse_layout
from lading.ir.machine import Curve
from lading.ir.plan import Option
from lading.ir.program import Program
from lading.ir.sharding import units_of
from lading.memory.lifetime import Gap, Lifetimes, gaps
from lading.memory.restore import planned_step, program_of, step_of
from lading.models.loss import next_byte_loss
from lading.optim.registry import optimizer as rule
from lading.planner.policies import reshard_every_unit
from lading.runtime.named import check_numbers
from lading.runtime.value_layout import Value, values_of
from tests.ranks import run_ranks
from tests.test_replicas import BUCKET, Case, batch, build, captured, machine, same
from tests.test_saved_plan import states_on_disk

pytestmark = pytest.mark.usefixtures("one_thread")

LAYOUTS = ("zero1", "zero2", "zero3")
#: Matrices that are several to the rule that moves them.
IN_PARTS: dict[str, int | str] = {"layers.*.gate.weight": 3, "layers.*.wo.weight": "8 24"}


def all_on_disk(graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
    """Keep states and shards on disk, read shards to be unsharded, and unshard again in backward."""
    units = units_of(graph).values()
    shards = {graph.storage_of(unit.shard) for unit in units if not unit.lasts}
    away = [g for g in gaps(graph, lives) if g.storage in shards and graph.storages[g.storage].size_bytes >= 4096]
    from_disk = {(g.storage, g.start): Option("disk") for g in away}
    return {**states_on_disk(graph, lives), **from_disk, **reshard_every_unit(graph, lives)}


CASES = {
    "clipped": Case(plan=lambda: {"clip_norm": 0.1}),
    "tied": Case("gpt"),
    "masters": Case(dtype=torch.bfloat16, plan=lambda: {"master_weights": True}),
    "lion": Case(plan=lambda: {"optimizer": rule("lion")}),
    "recomputed": Case(plan=lambda: {"policy": "checkpoint-every-block"}),
    "disk": Case(plan=lambda: {"policy": all_on_disk}),
    "dropout and statistics": Case("normed"),
    "muon": Case(plan=lambda: {"matrices": lading.Matrices(rule="muon", lr=0.02, parameters=IN_PARTS)}),
    "soap": Case(
        dtype=torch.bfloat16,
        plan=lambda: {"matrices": lading.Matrices(rule="soap", lr=0.01), "master_weights": True},
    ),
}


def train_with_torch(layout: str, share: int, first: int, folder: Path) -> dict[str, torch.Tensor]:
    """Train by an optimizer of torch with groups and a schedule; returns states and values, as they are given back."""
    model = build()
    kinds: dict[str, list[nn.Parameter]] = {"matrices": [], "first": [], "vectors": []}
    for name, parameter in model.named_parameters():
        kinds["first" if name.startswith("layers.0") else "matrices" if parameter.dim() > 1 else "vectors"] += [
            parameter
        ]
    matrices, first_layer, vectors = ({"params": members} for members in kinds.values())
    groups = [{**matrices, "weight_decay": 0.2}, {**first_layer, "lr": 0.02, "betas": (0.8, 0.9)}, vectors]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    graph = lading.capture(model, batch(0, 0), next_byte_loss, accumulation=share)
    plan = lading.plan(graph, machine(), budget="100%", cache=False, layout=layout, optimizer=optimizer)
    with lading.Trainer(plan, graph, model, folder=folder, optimizer=optimizer) as trainer:
        for step in range(3):
            trainer.step([batch(step, first + number) for number in range(share)])
            schedule.step()
    states = {f"{n}.{key}": value for n, p in model.named_parameters() for key, value in optimizer.state[p].items()}
    return {**model.state_dict(), **states}


ODD, TORCH = "odd", "torch"
#: Ways to train, each by the layouts that differ where a step has one micro-batch.
EVERY = [(layout, name) for layout in ("zero2", "zero3") for name in (*CASES, ODD, TORCH)]
#: Each way but one by one layout, on a model of one layer; the slow tests try all on two.
QUICK = [
    *(("zero2", name) for name in ("masters", "muon", TORCH)),
    *(("zero3", name) for name in ("clipped", "tied", "recomputed", "disk", "dropout and statistics", "soap", ODD)),
]


def text(layout: str, ranks: int) -> str:
    return f"dp{ranks},{layout}" + ("" if layout == "zero3" else f",bucket_bytes={BUCKET}")


def odd_model() -> nn.Sequential:
    """Parameters that no number of ranks divides, one of which is frozen, and one that nothing uses."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    model[2].weight.requires_grad_(False)
    return model


def odd_loss(model: nn.Module, given: Any) -> torch.Tensor:
    return model(given["x"]).square().mean()


def odd_batch(step: int, number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + number))}


def train_odd(layout: str, share: int, first: int, folder: Path) -> dict[str, torch.Tensor]:
    """Train with an optimizer whose one number of the second group leaves all ranks but the first an empty shard."""
    model = odd_model()
    most = [parameter for parameter in model.parameters() if parameter.numel() > 1]
    optimizer = torch.optim.AdamW([{"params": most}, {"params": [model[4].bias], "lr": 0.01}], lr=0.001)
    graph = lading.capture(model, odd_batch(0, 0), odd_loss, accumulation=share)
    plan = lading.plan(graph, machine(), budget="100%", cache=False, layout=layout, optimizer=optimizer)
    with lading.Trainer(plan, graph, model, folder=folder, optimizer=optimizer) as trainer:
        for step in range(3):
            trainer.step([odd_batch(step, first + number) for number in range(share)])
        values = {name: trainer.value(name) for name in trainer._values}
    for name, value in model.state_dict().items():  # given back, whole
        assert torch.equal(value, values[name]), name
    return values


def of_layers(name: str, layers: int) -> Case:
    """A case on so many layers; of one alone, what is recomputed takes more memory than what is kept."""
    return CASES[name] if name == "recomputed" else dataclasses.replace(CASES[name], layers=layers)


def _ways(rank: int, out: str, ways: list[tuple[str, str]], layers: int = 2) -> None:
    for layout, name in ways:
        folder = Path(out) / f"{layout} {name} {rank}"
        folder.mkdir()
        if name == ODD:
            values = train_odd(f"dp2,{layout}", 1, rank, folder)
        elif name == TORCH:
            values = train_with_torch(text(layout, 2), 1, rank, folder)
        else:
            case = of_layers(name, layers)
            values = case.train(text(layout, 2), case.micro, rank * case.micro, folder)
        torch.save(values, folder / "values")


def _two(rank: int, out: str) -> None:
    _ways(rank, out, QUICK, 1)
    _saves(rank, Path(out))
    graph = captured("llama", torch.float32, 1)
    asked: dict[str, Any] = {"policy": "keep-all", "cache": False}
    replicas = lading.plan(graph, machine(), budget="100%", **asked)
    tight = lading.plan(graph, machine(), budget=replicas.budgets["device"] - 30_000, **asked)
    torch.save([replicas.layout, tight.layout], Path(out) / f"layouts {rank}")


def _saves(rank: int, out: Path) -> None:
    """Save with shards, and go on from there with others, and with one process's values."""
    graph = captured("llama", torch.float32, 1, 1)
    folder = out / f"saves {rank}"
    folder.mkdir()
    path, after = None, None
    for layout in LAYOUTS:
        asked: dict[str, Any] = {"budget": "100%", "cache": False, "matrices": lading.Matrices(rule="muon", lr=0.02)}
        plan = lading.plan(graph, machine(), layout=text(layout, 2), **asked)
        with lading.Trainer(plan, graph, build(layers=1), folder=folder) as trainer:
            if path is None:
                trainer.step(batch(0, rank))
                path = trainer.save(out / "saved", meta={"layout": layout})
            assert trainer.load(path) == {"layout": "zero1"}
            assert trainer.evaluate(batch(1, rank)) > 0
            trainer.step(batch(1, rank))
            values = {name: trainer.value(name) for name in trainer._values}
        after = after or values
        assert all(torch.equal(after[name], value) for name, value in values.items())
    torch.save(after, folder / "values")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what two ranks wrote; they are launched once."""
    folder = tmp_path_factory.mktemp("two")
    run_ranks(_two, 2, str(folder))
    return folder


def _check(folder: Path, ways: list[tuple[str, str]], scratch: Path, layers: int = 2) -> None:
    """Compare what ranks wrote in ``folder`` with one process, which trains once a name."""
    whole: dict[str, Any] = {}
    for layout, name in ways:
        if name not in whole:
            whole[name] = _alone(name, scratch, layers)
        for rank in range(2):
            values = torch.load(folder / f"{layout} {name} {rank}" / "values")
            if name in CASES:
                _check_case(values, whole[name], (layout, name, rank))
                continue
            assert values.keys() == whole[name].keys(), (layout, name)
            for key, value in whole[name].items():
                if name == ODD:  # what is behind the last whole vector is rounded as a vector is, an ulp
                    torch.testing.assert_close(values[key], value, rtol=5e-7, atol=0)
                else:
                    assert torch.equal(values[key], value), (layout, name, key)


def _alone(name: str, scratch: Path, layers: int) -> Any:
    if name == ODD:
        return train_odd("dp1", 2, 0, scratch)
    if name == TORCH:
        return train_with_torch("dp1", 2, 0, scratch)
    case = of_layers(name, layers)
    return case.train("dp1", 2 * case.micro, 0, scratch)


def _check_case(got: Any, whole: Any, what: tuple[str, str, int]) -> None:
    (values, told), (alone, losses) = got, whole
    assert values.keys() == alone.keys(), what
    for key, value in alone.items():
        if what[1] == "clipped":  # squares are added up in another order, 2 ulp of the norm
            torch.testing.assert_close(values[key], value, rtol=1e-5, atol=1e-7)
        else:
            assert same(key, values[key], value), (*what, key)
    if what[1] != "clipped":
        assert told == losses, what


@pytest.mark.long
def test_two_ranks_with_shards_train_as_one_process_to_the_bit(two_ranks: Path, tmp_path: Path) -> None:
    _check(two_ranks, QUICK, tmp_path, 1)


@pytest.mark.slow
def test_two_ranks_with_shards_train_as_one_process_in_every_way(tmp_path: Path) -> None:
    run_ranks(_ways, 2, str(tmp_path), EVERY)
    _check(tmp_path, EVERY, tmp_path)


def test_replicas_are_planned_where_they_fit_and_shards_where_not(two_ranks: Path) -> None:
    roomy, tight = torch.load(two_ranks / "layouts 0")
    assert torch.load(two_ranks / "layouts 1") == [roomy, tight]
    assert not parse_layout(roomy).zero
    assert parse_layout(tight).zero


def test_a_checkpoint_of_shards_is_whole(two_ranks: Path, tmp_path: Path) -> None:
    graph = captured("llama", torch.float32, 2, 1)
    matrices = lading.Matrices(rule="muon", lr=0.02)
    plan = lading.plan(graph, machine(), budget="100%", cache=False, layout="dp1", matrices=matrices)
    with lading.Trainer(plan, graph, build(layers=1), folder=tmp_path) as trainer:
        trainer.load(two_ranks / "saved" / "step-00000001")
        trainer.step([batch(1, 0), batch(1, 1)])
        for rank in range(2):
            values = torch.load(two_ranks / f"saves {rank}" / "values")
            assert [name for name, value in values.items() if not torch.equal(value, trainer.value(name))] == []


def _padded() -> dict[str, Any]:
    """Shampoo's plan: of the two widest matrices, two of four ranks have none."""
    return {"matrices": lading.Matrices(rule="shampoo", lr=0.01), "clip_norm": 0.1}


def _four(rank: int, out: str) -> None:
    case = Case(dtype=torch.float64, plan=_padded)
    for layout in LAYOUTS:
        folder = Path(out) / f"{layout} {rank}"
        folder.mkdir()
        torch.save(case.train(text(layout, 4), 2, 2 * rank, folder), folder / "values")
        torch.save(train_odd(f"dp4,{layout}", 1, rank, folder), folder / "odd")


@pytest.mark.slow
def test_four_ranks_with_shards_add_up_in_another_order(tmp_path: Path) -> None:
    run_ranks(_four, 4, str(tmp_path))
    alone, losses = Case(dtype=torch.float64, plan=_padded).train("dp1", 8, 0, tmp_path)
    odd = train_odd("dp1", 4, 0, tmp_path)
    for layout in LAYOUTS:
        for name, value in torch.load(tmp_path / f"{layout} 3" / "odd").items():
            torch.testing.assert_close(value, odd[name], rtol=1e-5, atol=1e-7)  # four float32 in another order
        first = torch.load(tmp_path / f"{layout} 0" / "values")[0]
        for rank in range(4):
            values, told = torch.load(tmp_path / f"{layout} {rank}" / "values")
            assert told == pytest.approx(losses, rel=1e-14)
            for name, value in values.items():
                assert torch.equal(value, first[name]), name
                # AdamW divides by the root of a square: where a gradient is near zero its error counts for more.
                torch.testing.assert_close(value, alone[name], rtol=1e-8, atol=1e-10)


def test_a_rank_keeps_its_part_of_states_and_parameters() -> None:
    graph = captured("llama", torch.float32, 1)
    steps = {
        layout: step_of(graph, machine(), clip_norm=0.0, master_weights=False, layout=parse_layout(layout))
        for layout in ("dp1", "dp4,zero2,bucket_bytes=20000", "dp4,zero3")
    }
    roles = (Role.OPTIMIZER_STATE, Role.PARAMETER)
    lasting = {layout: [step.bytes_of_role(role) for role in roles] for layout, step in steps.items()}
    (states, parameters), zero2, zero3 = lasting.values()
    padding = 1.05
    assert states / 4 <= zero2[0] <= padding * states / 4
    assert parameters <= zero2[1] <= padding * parameters
    assert states / 4 <= zero3[0] <= padding * states / 4
    assert parameters / 4 <= zero3[1] <= padding * parameters / 4


def dropped(graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
    """Policy that reshards all parameters between forward and backward."""
    wholes = units_of(graph)
    across = [gap for gap in gaps(graph, lives) if gap.storage in wholes and _across(graph, gap)]
    return {(gap.storage, gap.start): Option.RECOMPUTE for gap in across}


def _across(graph: StepGraph, gap: Gap) -> bool:
    return graph.ops[gap.start].phase is not Phase.BACKWARD and graph.ops[gap.end].phase is Phase.BACKWARD


def test_an_unsharded_parameter_is_a_storage_that_is_dropped_and_unsharded_again() -> None:
    graph = captured("llama", torch.float32, 1)
    programs = {
        policy: program_of(
            lading.plan(graph, machine(), budget="100%", cache=False, layout="dp2,zero3", policy=policy), graph
        )
        for policy in ("keep-all", dropped)
    }
    counts = [
        Counter(a.kind for a in program.actions if a.stream == "network" and a.kind is not ActionKind.FREE)
        for program in programs.values()
    ]
    units = len(units_of(programs["keep-all"].graph))
    assert counts[0] == {ActionKind.UNSHARD: units, ActionKind.REDUCE_GRAD: units}
    assert counts[1] == {**counts[0], ActionKind.RECOMPUTE: units - 1}  # no gradient is worked out from the table
    assert programs[dropped].arena_bytes < programs["keep-all"].arena_bytes


def leads(program: Program) -> list[int]:
    """Number of computations between each unsharding and the first that reads what it makes, in order."""
    graph, actions = program.graph, program.actions
    found: list[int] = []
    for number, action in enumerate(actions):
        if action.kind not in (ActionKind.UNSHARD, ActionKind.RECOMPUTE) or action.stream != "network":
            continue
        whole = action.places[0][0]
        runs = [a.op for a in actions[number + 1 :] if a.op is not None and a.stream == "compute"]
        found.append(next(n for n, op in enumerate(runs) if whole in graph.op_reads[op]))
    return found


def test_a_budget_of_less_room_is_searched_though_all_may_stay() -> None:
    graph, slow = captured("llama", torch.float32, 1), Curve(size=(1e3, 1e6), rate=(1e6, 1e6))
    network = dataclasses.replace(machine(), collectives=dict.fromkeys(machine().collectives, slow))
    asked: dict[str, Any] = {"cache": False, "layout": "dp2,zero3"}
    whole = lading.plan(graph, network, budget="100%", **asked)
    plan = lading.plan(graph, network, budget=whole.budgets["device"] - 20_000, **asked)
    rows = {row.policy: row for row in plan.policies}
    assert {"reshard-every-unit", "reshard-and-checkpoint"} < rows.keys()
    assert plan.lower_bound_s < plan.step_s <= min(row.step_s for row in rows.values() if row.step_s is not None)


def test_whole_parameters_are_unsharded_as_early_as_memory_allows() -> None:
    graph, slow = captured("llama", torch.float32, 1), Curve(size=(1e3, 1e6), rate=(1e6, 1e6))
    network = dataclasses.replace(machine(), collectives=dict.fromkeys(machine().collectives, slow))

    def planned(budget: str | int) -> Program:
        policy = "reshard-every-unit"
        plan = lading.plan(graph, network, budget=budget, cache=False, layout="dp2,zero3", policy=policy)
        return program_of(plan, graph)

    wide = planned(100 << 20)
    tight = planned(wide.predicted_bytes - 60_000)
    first, *ahead = leads(wide)[:4]  # of forward, which begins with all of them: a block has 34 computations
    assert (first, *ahead) == (0, 6, 40, 74)
    assert sum(leads(tight)) < sum(leads(wide)) - 34
    frees = [a for a in wide.actions if a.kind is ActionKind.FREE]
    reduced = {s for a in wide.actions if a.kind is ActionKind.REDUCE_GRAD for s in wide.graph.op_reads[a.op or 0]}
    assert {a.stream for a in frees if a.storage in reduced} == {"network"}  # computing does not wait for them


def test_parameters_with_unlike_numbers_of_updates_share_no_shards() -> None:
    """A unit of shards counts updates once; layers that were frozen for a while have had fewer."""
    model = build()
    graph = lading.capture(model, batch(0, 0), next_byte_loss)
    asked: dict[str, Any] = {"budget": "100%", "cache": False, "policy": "keep-all", "layout": "dp2,zero3"}

    def values(optimizer: torch.optim.Optimizer | None = None) -> dict[str, Value]:
        return values_of(planned_step(lading.plan(graph, machine(), optimizer=optimizer, **asked), graph))

    steps = {name: torch.tensor(6.0) for name in values() if name.endswith(".step")}
    check_numbers(values(), steps)
    unlike = {name: number for name, number in steps.items() if "gate" not in name}
    with pytest.raises(ConfigError, match=r"to have had as many updates, found 6 .* and 0 .*gate"):
        check_numbers(values(), unlike)
    optimizer = torch.optim.AdamW(model.parameters())
    for name, parameter in model.named_parameters():
        if f"{name}.step" in unlike:
            optimizer.state[parameter]["step"] = unlike[f"{name}.step"]
    check_numbers(values(optimizer), unlike)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"optimizer": rule("adafactor")}, "adafactor, which moves whole parameters"),
    ],
)
def test_what_moves_whole_parameters_is_not_cut(asked: dict[str, Any], why: str) -> None:
    graph = captured("llama", torch.float32, 1)
    with pytest.raises(ConfigError, match=why):
        lading.plan(graph, machine(), budget="100%", cache=False, layout="dp2,zero2", **asked)
