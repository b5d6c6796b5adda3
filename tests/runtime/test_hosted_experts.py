"""Experts that a host computes for the few tokens that chose them: plans, and 20 steps beside plain PyTorch."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Iterator, Sequence
from math import nan
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.machines import small_machine
from tests.runtime.cases import OPTIMIZER, load
from tests.runtime.expert_cases import EXPERTS, HIDDEN, Batch, Mixture, Plain, batches_of, loss_fn, model_of
from tests.runtime.fake_accelerator import FakeApi, fake_device
from tests.runtime.test_routing import BESIDE_HOST, all_on_host
from torch import nn

import lading
from lading.errors import ConfigError, ProgramError
from lading.ir.action import Action
from lading.ir.expand import expand
from lading.ir.expert_rows import ExpertRows, find_expert_rows
from lading.ir.experts import find_experts
from lading.ir.graph import PERSISTENT, StepGraph
from lading.ir.machine import Curve, Machine
from lading.ir.plan import Option, Plan
from lading.ir.program import PAGE_BYTES, Program
from lading.memory.guards import find_guards, find_routers_alone
from lading.memory.hosted_experts import (
    check_hosted,
    find_hosted,
    host_bytes,
    is_kept,
    limits_by_expert,
    room_bytes,
)
from lading.memory.lifetime import Lifetimes, can_recompute, gaps, is_movable
from lading.memory.restore import programs_of
from lading.planner.host_experts import ROOM_REFUSED, HostChoice, host_seconds
from lading.planner.policies import Policy
from lading.planner.routing import expected_step_s
from lading.runtime import expert_computing
from lading.runtime.executor import Executor
from lading.runtime.expert_computing import _KeptMemory, _Rows
from lading.runtime.named import NamedValues
from lading.saved_values import Snapshot
from lading.sim.device_step import simulate

STEPS, TOKENS = 20, 16
#: A sum over fewer rows, whose other terms are zero, differs by rounding; 20 steps of AdamW may make much of it.
RTOL, ATOL = 1e-4, 1e-5


def slow_link(latency_s: float) -> Machine:
    """A device behind a link of 100 MB/s."""
    assert BESIDE_HOST.host_device is not None
    processors = dataclasses.replace(BESIDE_HOST.host_device, memory_bandwidth_bytes_per_s=1e11)
    rates = {f"{way}_bytes_per_s": 1e8 for way in ("read", "write", "mixed_read", "mixed_write")}
    tiers = (dataclasses.replace(BESIDE_HOST.tiers[0], latency_s=latency_s, **rates), *BESIDE_HOST.tiers[1:])
    device = dataclasses.replace(BESIDE_HOST.device, op_overhead_s=1e-8)
    return dataclasses.replace(BESIDE_HOST, device=device, host_device=processors, tiers=tiers)


#: Whose waits are short, so that the norms of an expert's gradients may have theirs.
QUICK = dataclasses.replace(BESIDE_HOST, device=dataclasses.replace(BESIDE_HOST.device, op_overhead_s=2e-7))


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


@pytest.fixture(scope="module")
def made(graph: StepGraph) -> Plan:
    return planned(graph, loads_of())


def planned(graph: StepGraph, loads: Any, machine: Machine | None = None, **more: Any) -> Plan:
    settings: dict[str, Any] = {"budget": "45%", "policy": all_on_host, "optimizer": OPTIMIZER, "cache": False, **more}
    return lading.plan(graph, machine or BESIDE_HOST, experts=loads, **settings)


@pytest.mark.parametrize(
    ("routing", "clip"),
    [
        ("skewed", 0.0),
        pytest.param("changing", 1.0, marks=pytest.mark.long),
        pytest.param("uniform", 0.0, marks=pytest.mark.long),
    ],
)
def test_experts_with_few_tokens_are_computed_on_the_host(
    graph: StepGraph, made: Plan, routing: str, clip: float, tmp_path: Path
) -> None:
    made = planned(graph, loads_of(), QUICK, clip_norm=clip) if clip else made
    assert {limit < 14 for row in made.host_tokens.values() for limit in row.values()} == {True}
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
        assert any(rows)
        for name, value in plain.values().items():
            torch.testing.assert_close(trainer.value(name), value, rtol=RTOL, atol=ATOL)
        assert trainer.base_bytes + trainer.peak_bytes <= made.budgets["device"]


@pytest.mark.parametrize("style", ["unbind", pytest.param("mask", marks=pytest.mark.long)])
def test_nothing_reads_rows_that_the_host_has_not_written(style: str, api: FakeApi, tmp_path: Path) -> None:
    """Freed memory holds NaN, and values are read in between; steps without a host's expert are whole."""
    graph = lading.capture(model_of(style), batches_of([[0]], 1)[0][0], loss_fn)
    made = planned(graph, loads_of(), QUICK)
    (program,) = programs_of(made, graph, ())
    plain, tokens = Plain(model_of(style), 0.0), made.host_tokens
    device = fake_device(api)
    with Executor(
        program, optimizer=OPTIMIZER, folder=tmp_path, device=device, experts=tokens, poison=True
    ) as executor:
        load(executor, plain.model)
        for number, batch in enumerate(batches("skewed", 10)):
            loss = executor.step([batch], lr=OPTIMIZER.lr)
            assert loss == pytest.approx(plain.step([batch], OPTIMIZER.lr), rel=1e-5)
            if number == 4:
                executor.flush()
                executor.forward([batch])  # changes nothing
        assert executor.experts is not None
        assert sum(map(sum, executor.experts.counts.hosted.values())) >= 10
        for parameter in program.graph.parameters:
            value = executor.read_storage(program.graph.storage_of(parameter.tensor))
            torch.testing.assert_close(value, plain.values()[parameter.names[0]], rtol=RTOL, atol=ATOL)


def test_what_the_device_moves_for_an_expert_alone_is_brought_where_the_host_computes_it(
    api: FakeApi, tmp_path: Path
) -> None:
    """Activations of a page or more are moved away between experts, and memory that nobody has written holds NaN."""
    steps = [dict(batch, tokens=batch["tokens"].repeat(2, 1)) for batch in batches("skewed", 4)]
    graph = lading.capture(model_of(), steps[0], loss_fn)
    made = planned(graph, loads_of(), QUICK)
    (program,) = programs_of(made, graph, ())
    guards = find_guards(program)
    hosted = find_hosted(program, guards, limits_by_expert(guards, made.host_tokens))
    assert hosted.fetches.keys() <= guards.actions.keys()
    assert hosted.fetched(hosted.rows.keys()) == hosted.fetches.keys() > set()
    plain = Plain(model_of(), 0.0)
    with Executor(
        program, optimizer=OPTIMIZER, folder=tmp_path, device=fake_device(api), experts=made.host_tokens, poison=True
    ) as executor:
        load(executor, plain.model)
        for batch in steps:
            assert executor.step([batch], lr=OPTIMIZER.lr) == pytest.approx(plain.step([batch], OPTIMIZER.lr), rel=1e-5)
        assert executor.experts is not None
        assert any(map(any, executor.experts.counts.hosted.values()))


def at_random(seed: int) -> Policy:
    """Policy that moves experts' values to the host, and for all else moves, runs again or keeps as a seed says."""

    def chosen(graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
        draws, choices = random.Random(seed), dict[tuple[int, int], Option]()
        for gap in gaps(graph, lives):
            storage = graph.storages[gap.storage]
            can_move = is_movable(graph, gap.storage, PAGE_BYTES)
            options = [Option("host")] * (4 * can_move)
            if not (storage.role in PERSISTENT and ".experts." in storage.name):
                options += [Option.RECOMPUTE] * (2 * can_recompute(graph, lives, gap))
                options += [Option.KEEP] * (draws.random() < 0.3)
            if options:
                choices[gap.storage, gap.start] = draws.choice(options)
        return {gap: option for gap, option in choices.items() if option != Option.KEEP}

    return chosen


@pytest.mark.long
def test_plans_at_random_fit_and_compute_the_same_numbers(api: FakeApi, tmp_path: Path) -> None:
    steps = [dict(batch, tokens=batch["tokens"].repeat(2, 1)) for batch in batches("skewed", 4)]
    graph = lading.capture(model_of(), steps[0], loss_fn)
    fetched = 0
    for seed in (13, 21):
        made = planned(graph, loads_of(), QUICK, policy=at_random(seed), budget="100%", clip_norm=seed % 2)
        assert made.peak_bytes["device"] <= made.budgets["device"]
        (program,) = programs_of(made, graph, ())
        plain, folder = Plain(model_of(), seed % 2), tmp_path / f"{seed}"
        folder.mkdir()
        with Executor(
            program, optimizer=OPTIMIZER, folder=folder, device=fake_device(api),
            experts=made.host_tokens or made.experts, poison=True,
        ) as executor:  # fmt: skip
            load(executor, plain.model)
            for batch in steps:
                wanted = plain.step([batch], OPTIMIZER.lr)
                assert executor.step([batch], lr=OPTIMIZER.lr) == pytest.approx(wanted, rel=1e-5)
            hosting = None if executor.experts is None else executor.experts.hosting
            fetched += 0 if hosting is None else len(hosting.hosted.fetches)
    assert fetched


def test_steps_without_few_tokens_have_the_bits_of_plain_pytorch(graph: StepGraph, made: Plan, tmp_path: Path) -> None:
    """Until an expert is computed on the host, everything is to the bit."""
    most = max(limit for row in made.host_tokens.values() for limit in row.values())
    assert most < TOKENS
    plain = Plain(model_of(), 0.0)
    with lading.Trainer(made, graph, model_of(), optimizer=OPTIMIZER, folder=tmp_path) as trainer:
        for used in (0, 1, 3, 0, 2, 1):
            batch = {"tokens": torch.full((2, 8), used), "scale": torch.ones(())}
            assert [trainer.step(batch, lr=OPTIMIZER.lr)] == plain.step([batch], OPTIMIZER.lr)
        assert trainer.experts is not None
        assert not any(map(any, trainer.experts.hosted.values()))
        assert [n for n, value in plain.values().items() if not torch.equal(trainer.value(n), value)] == []


def test_the_host_computes_where_a_step_is_expected_to_be_shorter(graph: StepGraph) -> None:
    """By the simulator, in which the host's seconds pass where the device waits, and grow with the tokens."""
    rows = {name: [share for share, _ in row] for name, row in loads_of().items()}
    tokens = {name: tuple(count for _, count in row) for name, row in loads_of().items()}
    seconds: dict[str, float] = {}
    for name, loads in (("device", rows), ("host", loads_of())):
        made = planned(graph, loads)
        (program,) = programs_of(made, graph, ())
        guards = find_guards(program) if made.leaves_out_experts else find_routers_alone(program)
        host = HostChoice(tokens, made.host_tokens) if made.host_tokens else None
        seconds[name] = expected_step_s(program, guards, BESIDE_HOST, rows, host)
    assert made.host_tokens
    assert seconds["host"] < 0.99 * seconds["device"]
    hosted = find_hosted(program, guards, limits_by_expert(guards, made.host_tokens))
    expert = min(hosted.rows)
    one, two = (host_seconds(program, hosted, {expert: count}, BESIDE_HOST) for count in (1, 2))
    assert one.keys() == two.keys() == {a for a, e in hosted.by_action.items() if e == expert}
    assert sum(one.values()) < sum(two.values())
    left = guards.left_out(guards.all_experts() - {expert})
    with_host = simulate(program, BESIDE_HOST, left_out=left, longer_s=one)
    ends = {event.action: event.end_s - event.start_s for event in with_host.events}
    assert [ends[a] for a in sorted(one)] == pytest.approx([one[a] for a in sorted(one)])


def test_measured_rates_of_rows_take_the_place_of_the_assumed_one(graph: StepGraph, made: Plan) -> None:
    """A product takes its FLOP at the rate of as many rows; and the plan no longer says that it assumes it."""
    host = BESIDE_HOST.host_device
    assert host is not None
    (program,) = programs_of(made, graph, ())
    guards = find_guards(program)
    hosted = find_hosted(program, guards, limits_by_expert(guards, made.host_tokens))
    expert = min(hosted.rows)

    def seconds(tokens: float, curve: Curve) -> float:
        machine = dataclasses.replace(BESIDE_HOST, host_device=dataclasses.replace(host, row_flops_per_s=curve))
        return sum(host_seconds(program, hosted, {expert: tokens}, machine).values())

    flops = sum(program.graph.ops[op].flops for op in hosted.rows[expert].ops) / TOKENS
    fast, slow = (Curve(size=(1.0, 2.0), rate=(rate, 1e8)) for rate in (1e7, 1e6))
    assert seconds(1.0, slow) - seconds(1.0, fast) == pytest.approx(flops / 1e6 - flops / 1e7)
    assert seconds(2.0, slow) == seconds(2.0, fast)
    assert seconds(2.0, slow) - seconds(1.0, slow) == pytest.approx(2 * flops / 1e8 - flops / 1e6, rel=1e-3)
    quick = dataclasses.replace(host, row_flops_per_s=Curve(size=(1.0,), rate=(1e11,)))
    told = planned(graph, loads_of(), dataclasses.replace(BESIDE_HOST, host_device=quick))
    assert told.host_tokens
    assert any("20 GFLOP/s a thread in products of a few rows, and a wait" in each for each in made.assumptions)
    assert not any("GFLOP/s a thread" in each for each in told.assumptions)
    assert any("for each copy of rows is assumed, not measured" in each for each in told.assumptions)


def test_rows_of_the_chosen_alone_pass_the_link(graph: StepGraph, made: Plan, tmp_path: Path) -> None:
    """Moved are rows of what an expert reads and makes, once each, single numbers, and no weight."""
    few = 2
    tokens = torch.zeros(TOKENS, dtype=torch.int64)
    tokens[[3, 9]] = 1  # and expert 0 gets too many
    with lading.Trainer(made, graph, model_of(), optimizer=OPTIMIZER, folder=tmp_path) as trainer:
        trainer.step({"tokens": tokens.reshape(2, 8), "scale": torch.ones(())}, lr=OPTIMIZER.lr)
        assert trainer.experts is not None
        assert {name: row[1] for name, row in trainer.experts.hosted.items()} == {"layers.0": 1, "layers.1": 1}
        moved, spared = trainer.experts.hosted_bytes, trainer.experts.spared_bytes
    guards = find_guards(programs_of(made, graph, ())[0])
    assert guards.routed is not None
    program = programs_of(made, graph, ())[0]
    hosted = find_hosted(program, guards, limits_by_expert(guards, made.host_tokens))
    down = up = 0
    for expert, rows in hosted.rows.items():
        if expert[1] != 1:
            continue
        sizes = {s: few * program.graph.storages[s].size_bytes // rows.count for s in rows.widths}
        down += sum(sizes[s] for each in rows.inputs.values() for s in each) + 2 * 4  # numbers of updates
        up += sum(sizes[s] for each in rows.results.values() for s in each) + 2 * 4
    assert moved == {"device_to_host": down, "host_to_device": up}
    assert sum(spared.values()) > 10 * (down + up)


class _Centred(nn.Module):
    """Expert that looks at the mean over tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y - y.mean(dim=(0, 1), keepdim=True)


def _found(model: nn.Module) -> Sequence[ExpertRows | str]:
    step = expand(lading.capture(model, batches_of([[0]], 1)[0][0], loss_fn), optimizer=OPTIMIZER)
    return [*find_expert_rows(step, find_experts(step)).values()]


def test_what_mixes_tokens_or_draws_numbers_is_refused() -> None:
    model = model_of()
    assert all(isinstance(each, ExpertRows) for each in _found(model))
    for layer in model.layers:
        experts = layer.get_submodule("experts")
        experts.register_module("1", _Centred(experts.get_submodule("1")))
    whys = [each for each in _found(model) if isinstance(each, str)]
    assert len(whys) == 2
    assert all("aten.mean.dim" in why and "treat each token by itself" in why for why in whys)


class _LengthFirst(Mixture):
    """Mixture whose experts see tokens in another order than the router: (length, batch)."""

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.scores(tokens)
        top, chosen = scores.topk(1, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, top.sigmoid())
        x = x.transpose(0, 1).contiguous()
        for number, expert in enumerate(self.experts):
            x = x + weights[..., number].t().unsqueeze(-1) * expert(x)
        return x.transpose(0, 1)


class _Summed(Mixture):
    """Mixture that adds a sum over what an expert makes of a token, taken in another order of tokens."""

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.scores(tokens)
        top, chosen = scores.topk(1, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, top.sigmoid())
        for number, expert in enumerate(self.experts):
            part = weights[..., number].unsqueeze(-1) * expert(x)
            x = x + part + part.transpose(0, 1).sum(-1, keepdim=True).transpose(0, 1)
        return x


class _Turned(nn.Module):
    """Expert that computes (length, batch) of (batch, length)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


def test_tokens_in_another_order_than_the_routers_are_refused() -> None:
    """Rows of other tokens would be gathered and written: silently where one token chose the expert."""
    for kind in (_LengthFirst, _Summed):
        model = model_of()
        for number in range(len(model.layers)):
            model.layers[number] = kind("slice", 0.0, HIDDEN)
        assert {isinstance(each, str) and "tokens" in each for each in _found(model)} == {True}
    model = model_of()
    for layer in model.layers:
        experts = layer.get_submodule("experts")
        experts.register_module("1", _Turned(experts.get_submodule("1")))
    assert sum(isinstance(each, str) for each in _found(model)) == 2


def test_the_plan_says_why_an_expert_is_not_computed_on_the_host(graph: StepGraph) -> None:
    model = model_of(dropout=0.5)
    drawn = lading.capture(model, batches_of([[0]], 1)[0][0], loss_fn)
    made = planned(drawn, loads_of(), slow_link(1e-7))
    assert not made.host_tokens
    assert any("layers.0.1" in each and "an update runs in every step" in each for each in made.assumptions)
    made = planned(graph, loads_of(), slow_link(2e-4))  # a wait takes as long as fetching
    assert not made.host_tokens
    assert any("for more than 0 tokens the host takes over 2 times its fetching" in each for each in made.assumptions)
    alone = planned(graph, loads_of(), small_machine(), policy="keep-all", budget="1GB")
    assert any("test has no processors beside its device" in each for each in alone.assumptions)
    with pytest.raises(ConfigError, match="for every one a pair"):
        planned(graph, {"layers.0": [1.0, (0.5, 2.0), 1.0, 1.0]})
    with pytest.raises(ConfigError, match="for every one a pair"):
        planned(graph, {"layers.0": [(1.0, 14.0), (1.0, nan), (1.0, 1.0), (1.0, 1.0)]})


def test_an_expert_that_a_rule_for_matrices_moves_is_not_computed_on_the_host(graph: StepGraph) -> None:
    """The host's time for the rule's products is not known, which was an error of the machine's file."""
    soap = lading.Matrices(rule="soap", lr=0.01, settings={"frequency": 2})
    made = planned(graph, loads_of(), slow_link(1e-7), matrices=soap, policy="keep-all", budget="100%")
    assert not made.host_tokens
    assert any("moves a whole parameter, expected a rule that treats elements" in each for each in made.assumptions)


def test_the_room_of_experts_on_the_host_is_held_to_its_budget(graph: StepGraph, made: Plan) -> None:
    """Where not all have room, fewer are computed there, or none, and the plan says so; a run refuses any other."""
    (program,) = programs_of(made, graph, ())
    guards = find_guards(program)
    hosted = find_hosted(program, guards, limits_by_expert(guards, made.host_tokens))
    beside, needed = program.tier_bytes("host"), host_bytes(program, hosted)
    assert made.peak_bytes["host"] == beside + needed
    exact = planned(graph, loads_of(), budgets={"host": beside + needed})
    assert exact.host_tokens == made.host_tokens
    assert not any(each.startswith(ROOM_REFUSED) for each in exact.assumptions)
    for room in (needed - 1, 0):
        less = planned(graph, loads_of(), budgets={"host": beside + room})
        assert len(hosted.rows) > sum(map(len, less.host_tokens.values())) >= bool(room)
        assert less.peak_bytes["host"] <= beside + room
        assert any(each.startswith(f"{ROOM_REFUSED}the {len(hosted.rows)} experts") for each in less.assumptions)
    small = dataclasses.replace(program, budgets={**program.budgets, "host": beside + needed - 1})
    with pytest.raises(ProgramError, match=f"expected {needed} bytes of the host's memory .* raise it by 1"):
        check_hosted(small, guards, hosted)


@pytest.mark.long
def test_an_evaluation_larger_than_the_step_leaves_experts_what_room_there_is(graph: StepGraph) -> None:
    """On the device there may be none, where the plan fetches every expert; on the host its tier is the larger."""
    batch = batches_of([[0]], 1)[0][0]
    large = {**batch, "tokens": batch["tokens"].repeat(16, 1)}
    other = lading.capture(model_of(), large, loss_fn, evaluation=True)
    full = planned(graph, loads_of(), budget="100%", others=[other])
    assert not full.host_tokens
    assert any("no plan that does so fits" in each for each in full.assumptions)
    made = planned(graph, loads_of(), others=[other])
    for each in (full, made):
        assert all(one.peak_bytes["device"] <= each.budgets["device"] for one in (each, *each.others))
    programs = programs_of(made, graph, [other])
    assert made.host_tokens
    guards = find_guards(programs[0])
    needed = host_bytes(programs[0], find_hosted(programs[0], guards, limits_by_expert(guards, made.host_tokens)))
    peaks = [each.peak_bytes["host"] for each in (made, *made.others)]
    assert peaks == [program.tier_bytes("host") + needed for program in programs]
    assert programs[1].tier_bytes("host") > programs[0].tier_bytes("host")
    exact = planned(graph, loads_of(), others=[other], budgets={"host": max(peaks)})
    assert exact.host_tokens == made.host_tokens
    less = planned(graph, loads_of(), others=[other], budgets={"host": max(peaks) - 1})
    assert sum(map(len, less.host_tokens.values())) < sum(map(len, made.host_tokens.values()))


def _larger(program: Program, size_bytes: int) -> Program:
    """Program of the same values of which one lies so many bytes further up in the host's memory."""
    *rows, (storage, offset) = sorted(program.slots["host"], key=lambda slot: slot[1])
    return dataclasses.replace(program, slots={**program.slots, "host": (*rows, (storage, offset + size_bytes))})


def test_experts_on_the_host_have_room_beside_what_other_programs_put_there(graph: StepGraph, made: Plan) -> None:
    """The tier is as large as the largest Program needs it, as that of evaluation may be."""
    (program,) = programs_of(made, graph, ())
    guards = find_guards(program)
    hosted = find_hosted(program, guards, limits_by_expert(guards, made.host_tokens))
    budget = program.tier_bytes("host") + host_bytes(program, hosted)
    exact, more = dataclasses.replace(program, budgets={**program.budgets, "host": budget}), PAGE_BYTES
    check_hosted(exact, guards, hosted, (exact,))
    with pytest.raises(ProgramError, match=f"of the host's memory .* raise it by {more}"):
        check_hosted(exact, guards, hosted, (_larger(exact, more),))
    tokens = {name: tuple(count for _, count in row) for name, row in loads_of().items()}
    choice = HostChoice(tokens, made.host_tokens)
    assert choice.hosted(exact, guards).rows.keys() == hosted.rows.keys()
    fewer = dataclasses.replace(choice, others=(_larger(exact, more),)).hosted(exact, guards)
    assert fewer.rows.keys() < hosted.rows.keys()
    assert fewer.left_off


def test_a_save_beside_training_leaves_experts_on_the_host_their_room(
    graph: StepGraph, made: Plan, api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program,) = programs_of(made, graph, ())
    guards = find_guards(program)
    needed = host_bytes(program, find_hosted(program, guards, limits_by_expert(guards, made.host_tokens)))
    rooms: list[int] = []
    for tokens in (True, made.host_tokens):
        with Executor(
            program, optimizer=OPTIMIZER, folder=tmp_path, device=fake_device(api), experts=tokens
        ) as executor:
            values = cast("NamedValues", None)  # which the room does not ask for
            monkeypatch.setattr(Executor, "kind", "cuda")
            rooms.append(Snapshot(0, executor, values, (program,), {}).room_bytes)
            monkeypatch.undo()
    assert rooms == [left := program.budgets["host"] - program.tier_bytes("host"), left - needed]


class _Weighed(dict[int, torch.Tensor]):
    """Tensors of an expert, and the bytes of those of all."""

    now = most = 0

    def __setitem__(self, key: int, value: torch.Tensor) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        _Weighed.now += value.nbytes
        _Weighed.most = max(_Weighed.most, _Weighed.now)

    def pop(self, key: int, *default: Any) -> Any:
        value = super().pop(key, *default)
        _Weighed.now -= 0 if value is None else value.nbytes
        return value


def test_rows_and_gradients_on_the_host_take_what_their_room_says(
    graph: StepGraph, made: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are given back after their last use, not at the end of the step; memory of gradients serves the next."""
    monkeypatch.setattr(_Weighed, "now", 0)
    monkeypatch.setattr(_Weighed, "most", 0)
    monkeypatch.setattr(expert_computing, "_Rows", lambda numbers: _Rows(numbers, _Weighed()))
    fresh: list[torch.Tensor] = []
    monkeypatch.setattr(expert_computing, "_KeptMemory", lambda: _Noting(fresh))
    few = 2
    tokens = torch.zeros(TOKENS, dtype=torch.int64)
    for expert in range(1, EXPERTS):
        tokens[few * expert : few * (expert + 1)] = expert
    with lading.Trainer(made, graph, model_of(), optimizer=OPTIMIZER, folder=tmp_path) as trainer:
        for _ in range(3):
            trainer.step({"tokens": tokens.reshape(2, 8), "scale": torch.ones(())}, lr=OPTIMIZER.lr)
    (program,) = programs_of(made, graph, ())
    guards = find_guards(program)
    limits = limits_by_expert(guards, {name: dict.fromkeys(row, few) for name, row in made.host_tokens.items()})
    hosted = find_hosted(program, guards, limits)
    room = host_bytes(program, hosted) - room_bytes(program.graph, hosted)
    assert 0.9 * room <= _Weighed.most <= room  # rows count twice while they are put in order
    assert _Weighed.now == 0
    gradients = sum(is_kept(program.graph, rows, s) for rows in hosted.rows.values() for s in _made(program, rows))
    assert 0 < len(fresh) < gradients  # not one for each, and none in a later step


class _Noting(_KeptMemory):
    """Notes the memory that it has not had before."""

    def __init__(self, fresh: list[torch.Tensor]) -> None:
        super().__init__()
        self._fresh = fresh

    def take(self, size_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        memory = super().take(size_bytes, dtype)
        if all(memory.data_ptr() != each.data_ptr() for each in self._fresh):
            self._fresh.append(memory)
        return memory


def _made(program: Program, rows: ExpertRows) -> set[int]:
    return {program.graph.storage_of(t) for op in rows.ops for t in program.graph.ops[op].outputs}


def _step_with(few: int) -> Batch:
    """Batch whose tokens choose expert 0, but for some that choose expert 1."""
    tokens = torch.zeros(TOKENS, dtype=torch.int64)
    tokens[:few] = 1
    return {"tokens": tokens.reshape(2, 8), "scale": torch.ones(())}


def _updates(made: Plan, graph: StepGraph, expert: tuple[int, int]) -> tuple[Program, list[Action]]:
    """Program of a plan, and its updates of an expert that the host computes."""
    (program,) = programs_of(made, graph, ())
    guards = find_guards(program)
    hosted = find_hosted(program, guards, limits_by_expert(guards, made.host_tokens))
    moved = (a for a in program.actions if hosted.by_action.get(a.id) == expert)
    return program, [a for a in moved if program.graph.ops[a.op or 0].name.startswith("lading.")]


@pytest.mark.parametrize("done", [0, 1])
def test_a_step_that_stops_says_what_the_host_has_changed(
    graph: StepGraph, made: Plan, done: int, api: FakeApi, tmp_path: Path
) -> None:
    """Before an expert's first update it has not changed; behind one, that parameter has, and the step is no whole."""
    program, updates = _updates(made, graph, (1, 1))

    def stop(action: Action) -> None:
        if action.id == updates[done].id:
            raise RuntimeError("as asked")

    device, tokens = fake_device(api), made.host_tokens
    first = program.graph.storage_of(program.graph.ops[updates[0].op or 0].inputs[0])
    with Executor(
        program, optimizer=OPTIMIZER, folder=tmp_path, device=device, jitter=stop, experts=tokens
    ) as executor:
        load(executor, model_of())
        before = executor.read_storage(first)
        with pytest.raises(ProgramError, match="as asked"):
            executor.step([_step_with(2)], lr=OPTIMIZER.lr)
        assert executor.changed.get(first) == ((1, 1) if done else None)
        assert torch.equal(executor.read_storage(first), before) == (not done)
        assert not done or not executor.is_whole


def test_values_that_are_being_copied_are_changed_behind_the_copy(
    graph: StepGraph, made: Plan, api: FakeApi, tmp_path: Path
) -> None:
    program, updates = _updates(made, graph, (1, 1))
    changed = [program.graph.storage_of(program.graph.ops[a.op or 0].inputs[0]) for a in updates]
    device, tokens = fake_device(api), made.host_tokens
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, device=device, experts=tokens) as executor:
        load(executor, model_of())
        executor.step([_step_with(2)], lr=OPTIMIZER.lr)
        before = {s: executor.read_storage(s) for s in changed}
        rooms = {s: [torch.zeros(program.graph.storages[s].size_bytes, dtype=torch.uint8)] for s in changed}
        thread = threading.Timer(0.5, executor.stage(rooms).run)
        thread.start()
        executor.step([_step_with(2)], lr=OPTIMIZER.lr)
        thread.join()
        for storage, (room,) in rooms.items():
            assert torch.equal(room.view(torch.float32).view(before[storage].shape), before[storage])
            assert not torch.equal(executor.read_storage(storage), before[storage])
