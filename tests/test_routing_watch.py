"""A run leaves out experts without tokens, counts who was chosen, and is planned again for those."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from functools import partial
from itertools import pairwise
from math import inf, pi, sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lading import prepare, replanning, routing_watch
from lading.catalog.load import save_machine
from lading.cli.main import main
from lading.config import MemoryConfig, RunConfig, load_run, lr_at
from lading.errors import ConfigError
from lading.ir.machine import Machine
from lading.ir.plan import Plan
from lading.planner.api import Planned
from lading.planner.routing import plan_experts
from lading.prepare import plan_run
from lading.report.metrics import read_metrics
from lading.routing_watch import Loads, Shares, chance, difference, moved_loads
from lading.run import Prepared, initial_values
from lading.run_ranks import RunRanks
from lading.train import opened_data, train_run, trainer_of
from tests.machines import small_machine
from tests.runs import OVERHEAD_BYTES, write_run
from tests.runtime.test_hosted_experts import slow_link
from tests.runtime.test_routing import all_on_host

#: Eight experts of which two tokens a step choose few.
SETTINGS = (
    'model={name="moe", sizes={dim=32, num_layers=1, num_heads=2, num_kv_heads=2, hidden_dim=256, num_experts=8, '
    "num_active=1}}",
    "data.batch_size=1", "data.sequence_length=2", "optimization.accumulation=1", "optimization.steps=7",
    "memory.budget=97%",
)  # fmt: skip


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return load_run(write_run(tmp_path_factory.mktemp("run")), SETTINGS)


def run_in(asked: RunConfig, out: Path, *, experts: bool) -> RunConfig:
    return dataclasses.replace(asked, out=str(out), memory=dataclasses.replace(asked.memory, experts=experts))


def metrics(out: Path) -> tuple[list[float], list[str]]:
    """Losses, and the plan of each step."""
    records = list(read_metrics(out / "metrics.jsonl"))
    return [record["loss"] for record in records], [record["plan"] for record in records]


@pytest.mark.long
def test_a_run_is_planned_again_for_the_experts_chosen_and_keeps_its_numbers(
    asked: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = run_in(asked, tmp_path / "every", experts=False)
    train_run(dataclasses.replace(every, memory=dataclasses.replace(every.memory, budget="100%", policy="keep-all")))
    seen: list[Shares] = []

    def plan_here(before: Prepared, machine: Machine, loads: Shares) -> Plan:
        seen.append(loads)
        memory = dataclasses.replace(before.run.memory, budget=before.plan.budgets["device"])
        return plan_run(dataclasses.replace(before.run, memory=memory), machine, loads=loads).plan

    monkeypatch.setattr(routing_watch, "_LOOK_STEPS", 4)
    monkeypatch.setattr(routing_watch, "_WORTH_S", 0.0)
    monkeypatch.setattr(routing_watch, "_SAVED", -1e9)
    monkeypatch.setattr(replanning, "plan_apart", plan_here)
    capsys.readouterr()
    train_run(run_in(asked, tmp_path / "chosen", experts=True))
    said = " ".join("".join(capsys.readouterr()).split())
    losses, plans = metrics(tmp_path / "chosen")
    assert losses == metrics(tmp_path / "every")[0]
    assert len(set(plans[:4])) == 1
    assert plans[4] != plans[3], said
    assert "other experts are chosen than were planned for; planned again in" in said
    assert Plan.load(tmp_path / "chosen" / "plan.json").fingerprint == plans[-1]
    assert all(0 < sum(row) <= 2 for row in seen[0].values())  # two tokens choose at most two experts in a step


#: Experts behind a slow link, each of which gets a few of 16 tokens.
ON_HOST = (
    'model={name="moe", sizes={dim=64, num_layers=1, num_heads=2, num_kv_heads=2, hidden_dim=128, num_experts=8, '
    "num_active=1}}",
    "data.batch_size=2", "data.sequence_length=8", "optimization.accumulation=1", "optimization.steps=8",
    "optimization.clip_norm=0", "memory.budget=60%", "memory.experts=true", "memory.experts_on_host=true",
)  # fmt: skip


def run_beside_host(folder: Path) -> RunConfig:
    """A run on the stand-in device, with all that can be in the host's memory."""
    path = write_run(folder)
    save_machine(slow_link(1e-7), folder / "machine.toml")
    return load_run(path, ON_HOST)


@pytest.mark.long
def test_a_run_computes_experts_on_the_host_as_a_loop_of_ones_own_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the tokens of four steps were counted, by the same losses as the trainer in Python, to the bit."""

    def on_host(make: Any, policy: Any, *asked: Any, **hosts: bool) -> Planned:
        return plan_experts(make, all_on_host, *asked, **hosts)

    seen: list[tuple[Loads, Plan]] = []

    def planned_for(before: Prepared, machine: Machine, loads: Loads) -> Plan:
        loads = json.loads(json.dumps(loads))  # as another process reads them
        memory = dataclasses.replace(before.run.memory, budget=before.plan.budgets["device"])
        seen.append((loads, plan_run(dataclasses.replace(before.run, memory=memory), machine, loads=loads).plan))
        return seen[-1][1]

    monkeypatch.setattr(prepare, "plan_experts", on_host)
    monkeypatch.setattr(routing_watch, "_LOOK_STEPS", 4)
    monkeypatch.setattr(routing_watch, "_WORTH_S", 0.0)
    monkeypatch.setattr(replanning, "plan_apart", planned_for)
    run = run_beside_host(tmp_path)
    train_run(run)
    said = " ".join("".join(capsys.readouterr()).split())
    assert re.search(r"experts get other numbers of tokens than were planned .*; the host computes \d experts", said), (
        said
    )
    losses, plans = metrics(tmp_path / "out")
    assert plans[3] != plans[4]
    loop = dataclasses.replace(run, out=str(tmp_path / "loop"))
    prepared = plan_run(loop)
    assert any("may be once the tokens that each gets are counted" in each for each in prepared.plan.assumptions)
    data, _ = opened_data(loop, prepared.step.initial.model)
    with trainer_of(prepared, RunRanks()) as trainer:
        trainer.initialize(partial(initial_values, loop, prepared.step.initial, fill=trainer.fill))
        own = []
        for step in range(8):
            if step == 4:
                assert trainer.experts is not None
                assert json.loads(json.dumps(trainer.experts.loads())) == seen[0][0]
                trainer.pause()
                trainer.resume(seen[0][1], prepared.step.captured)
            own.append(trainer.step([data.batch(step, 0)], lr=lr_at(loop.optimization, step)))
        assert trainer.experts is not None
        assert sum(map(sum, trainer.experts.hosted.values())) >= 4
    assert losses == own

    plain = dataclasses.replace(run, out=str(tmp_path / "plain"), machine=str(tmp_path / "alone.toml"))
    save_machine(small_machine(overhead_bytes=OVERHEAD_BYTES), tmp_path / "alone.toml")
    train_run(dataclasses.replace(plain, memory=MemoryConfig(budget="100%", policy="keep-all")))
    assert losses == pytest.approx(metrics(tmp_path / "plain")[0], rel=1e-5)


def test_experts_on_the_host_need_experts_and_are_told_where_they_cannot_be(asked: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="experts_on_host: expected experts = true beside it, got false"):
        MemoryConfig(budget="50%", experts_on_host=True)
    alone = run_in(asked, tmp_path / "out", experts=True)
    alone = dataclasses.replace(
        alone, memory=dataclasses.replace(alone.memory, experts_on_host=True, policy="keep-all")
    )
    made = plan_run(dataclasses.replace(alone, memory=dataclasses.replace(alone.memory, budget="100%"))).plan
    assert any(each.endswith("test has no processors beside its device") for each in made.assumptions)


@pytest.mark.slow
def test_a_plan_for_the_experts_chosen_is_made_apart(
    asked: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing_watch, "_LOOK_STEPS", 4)
    monkeypatch.setattr(routing_watch, "_WORTH_S", 0.0)
    monkeypatch.setattr(routing_watch, "_SAVED", -1e9)
    train_run(run_in(asked, tmp_path / "out", experts=True))
    said = " ".join("".join(capsys.readouterr()).split())
    assert "other experts are chosen than were planned for; planned again in" in said
    assert "stay in memory" in Plan.load(tmp_path / "out" / "plan.json").assumptions[-1]


def test_chance_makes_no_other_routing() -> None:
    shares = {"a": [0.5, 0.25, 1.0, 0.0]}
    assert chance(shares, shares, 32, 32) == pytest.approx(sqrt(2 / pi / 16) * (0.5 + sqrt(0.1875)) / 4)
    random.seed(0)
    experts, far = range(64), 0
    windows = [[sum(random.random() < 0.5 for _ in range(32)) / 32 for _ in experts] for _ in range(100)]
    for one, other in pairwise(windows):
        drift = difference({"a": one}, {"a": other}) - chance({"a": one}, {"a": other}, 32, 32)
        far += drift > routing_watch._DRIFT
    assert far == 0  # by the difference alone about half of them


def test_a_run_is_planned_again_only_where_others_are_chosen() -> None:
    assert difference({"a": [1.0, 0.5]}, {}) == 0.25
    assert difference({"a": [1.0, 0.5], "b": [0.0, 0.0]}, {"a": [0.5, 0.5], "b": [0.2, 0.0]}) == pytest.approx(0.175)
    assert difference({}, {}) == 0.0


class Counting:
    """Trainer that has counted, and runs no step."""

    def __init__(self) -> None:
        from lading.runtime.replays import ExpertCounts

        self.experts = ExpertCounts()

    def steps(self, number: int, *chosen: int) -> None:
        self.experts.steps += number
        row = self.experts.chosen.setdefault("router", [0, 0])
        for expert in chosen:
            row[expert] += number


def run_that(*, hosts: bool, plan: Any = None) -> Any:
    """A prepared run, as far as a watch looks at it."""
    return SimpleNamespace(plan=plan, run=SimpleNamespace(memory=SimpleNamespace(experts_on_host=hosts)))


def test_steps_since_the_last_look_count(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: Any = Counting()
    planned: list[Shares] = []

    def in_vain(self: Any, known: Shares, what: str) -> str:
        planned.append(known)
        assert what == "other experts are chosen"
        return "in vain"

    monkeypatch.setattr(routing_watch.RoutingWatch, "_planned_again", in_vain)
    watch = routing_watch.RoutingWatch(run_that(hosts=False), trainer, plans=True)
    trainer.steps(31, 0)
    assert not watch.advance(10**12)
    trainer.steps(1, 0)
    assert watch.advance(10**12) == "in vain"
    trainer.steps(32, 0)
    assert not watch.advance(10**12)  # as before
    trainer.steps(32, 1)
    assert not watch.advance(0)  # nothing left to train
    trainer.steps(32, 1)
    assert watch.advance(10**12) == "in vain"
    assert planned == [{"router": [1.0, 0.0]}, {"router": [0.0, 1.0]}]
    fixed = routing_watch.RoutingWatch(run_that(hosts=False), trainer, plans=False)
    assert not fixed.advance(10**12)


def test_tokens_count_where_the_host_may_compute_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is chosen stays as it was; how many tokens they get is not known at first, and changes once."""
    trainer: Any = Counting()
    planned: list[Loads] = []

    def in_vain(self: Any, known: Loads, what: str) -> str:
        planned.append(known)
        return what

    monkeypatch.setattr(routing_watch.RoutingWatch, "_planned_again", in_vain)
    watch = routing_watch.RoutingWatch(run_that(hosts=True), trainer, plans=True)
    others = routing_watch.RoutingWatch(run_that(hosts=False), trainer, plans=True)
    told: list[str] = []
    for tokens in ((6, 2), (6, 3), (4, 4), (1, 7)):
        trainer.steps(32, 0, 1)
        row = trainer.experts.tokens.setdefault("router", [0, 0])
        row[:] = [count + 32 * more for count, more in zip(row, tokens, strict=True)]
        told.append(watch.advance(10**12))
        assert not others.advance(10**12)
    moved = "experts get other numbers of tokens"
    assert told == [moved, "", "", moved]
    assert planned == [{"router": [(1.0, 6.0), (1.0, 2.0)]}, {"router": [(1.0, 1.0), (1.0, 7.0)]}]


def test_few_steps_say_little_of_tokens() -> None:
    """One token in the one step that chose an expert is not fewer than two or three in 32 steps."""
    assert moved_loads({"a": [(1 / 32, 1.0), (1.0, 1.0)]}, {"a": [(1.0, 2.5), (1.0, 2.5)]}, 32, 32) == 0.5
    assert moved_loads({"a": [(0.0, 0.0), (1.0, 3.0)]}, {}, 32, inf) == 0.5
    assert moved_loads({"a": [(0.0, 0.0), (1.0, 3.0)]}, {"a": [(1.0, 9.0), (0.0, 0.0)]}, 32, 32) == 0.0


@pytest.mark.parametrize(("leaves_out", "then_s", "is_taken"), [(True, 0.98, False), (True, 0.96, True),
                                                                (False, 0.999, True), (False, 1.0, False)])  # fmt: skip
def test_a_plan_that_waits_for_no_router_is_taken_for_any_gain(
    monkeypatch: pytest.MonkeyPatch, leaves_out: bool, then_s: float, is_taken: bool
) -> None:
    """One that leaves others out has to save more, as moving to it takes time and what is expected is not exact."""
    now, then = SimpleNamespace(leaves_out_experts=True), SimpleNamespace(leaves_out_experts=leaves_out)
    now.request = SimpleNamespace(machine_table={})
    prepared = run_that(hosts=False, plan=now)
    trainer: Any = Counting()
    trainer.program = None
    trainer.steps(32, 0, 1)
    monkeypatch.setattr(routing_watch, "machine_from_dict", lambda table, name: None)
    monkeypatch.setattr(replanning, "plan_apart", lambda before, machine, loads: then)
    monkeypatch.setattr(replanning, "restored", lambda plan, before: None)
    monkeypatch.setattr(replanning, "go_on_by", lambda plan, before, trainer: SimpleNamespace(plan=plan))
    monkeypatch.setattr(routing_watch, "_expected_s", lambda plan, *rest: 1.0 if plan is now else then_s)
    watch = routing_watch.RoutingWatch(prepared, trainer, plans=True)
    watch._known, watch._known_steps = {"router": [1.0, 0.1]}, 32
    said = watch.advance(10**12)
    assert ("which saves nothing" in said) != is_taken
    assert (watch.prepared.plan is then) == is_taken


def test_what_cannot_leave_out_experts_is_refused(asked: RunConfig, tmp_path: Path) -> None:
    wanted = run_in(asked, tmp_path / "out", experts=True)
    fused = dataclasses.replace(wanted, optimization=dataclasses.replace(wanted.optimization, compile=True))
    with pytest.raises(ConfigError, match="experts: expected one device without compiled regions, got compile=True"):
        plan_run(fused)
    with pytest.raises(ConfigError, match="experts: expected one device without compiled regions, got several ranks"):
        plan_run(dataclasses.replace(wanted, layout="dp2"))
    file = write_run(tmp_path)
    settings = [f"out={tmp_path / 'dense'}", "memory.experts=true"]
    assert main(["train", str(file), *settings]) == 2
    assert main(["train", str(file), "memory.experts=often"]) == 2
