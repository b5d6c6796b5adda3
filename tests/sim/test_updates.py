"""Steps under Muon, Shampoo and SOAP: from AdamW's by what is known of both, pinned and searched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lading.catalog.load import load_machine
from lading.catalog.stacks import stack_by_name
from lading.catalog.tables import model_table
from lading.cli.main import main
from lading.clusters import space_of, step_of, summary
from lading.cost.owned import update_of
from lading.cost.patterns import Kind, spread
from lading.cost.product import peak_flops
from lading.errors import ConfigError
from lading.ir.graph import Role
from lading.ir.layout import parse_layout
from lading.ir.request import Request
from lading.ir.routes import ShardRegion, pieces, wholes_of
from lading.optim.muon import Muon
from lading.parallel.block_matrices import BlockMatrix, matrices_of, projections
from lading.planner.layouts import find_layouts
from lading.planner.owners import Matrix, assign
from lading.planner.search import LayoutSearch
from lading.sim.modules import modules_of
from lading.sim.simulate import Simulated, simulate
from lading.sim.storage import stages_of_ranks
from lading.sim.updates import block_matrices, rank_update

QWEN3_8B = {"q": (4096, 4096), "kv": (1024, 4096), "up": (12288, 4096), "down": (4096, 12288)}


def step(optimizer: str, layout: str, model: str = "qwen3-8b", **rest: Any) -> Simulated:
    question = Request(model=model, machine="h100", layout=layout, seq_len=2048, optimizer=optimizer, **rest)
    return simulate(*step_of(question))


@pytest.mark.parametrize("layout", ["dp8,zero3", "dp2,tp4,sp,zero1", "dp4,tp2,pp4,zero1,gb32", "dp2"])
def test_what_replaces_adamw(layout: str) -> None:
    """Muon's step is AdamW's with another optimizer's share; it keeps one moment of a matrix's elements, not two."""
    before, after = step("adamw", layout), step("muon", layout)
    update = after.updated
    assert update is not None
    assert after.step.shares_s["optimizer"] > update.update.seconds > update.update.directions.seconds
    other = {
        name: s for name, s in before.step.shares_s.items() if name not in ("optimizer", "waiting for the slowest")
    }
    assert {name: after.step.shares_s[name] for name in other} == other
    shape, blocks = parse_layout(layout), 36 // parse_layout(layout).pp
    elements = blocks * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 12288 * 4096) / shape.tp
    ways = shape.dp if shape.zero else 1
    for old, new in zip(before.memory, after.memory, strict=True):
        assert old[Role.OPTIMIZER_STATE] - new[Role.OPTIMIZER_STATE] == pytest.approx(4 * elements / ways, rel=1e-6)
        assert {**old, Role.OPTIMIZER_STATE: 0} == {**new, Role.OPTIMIZER_STATE: 0}


def test_a_pipeline_updates_as_long_as_its_slowest_rank() -> None:
    """The first and the last have an embedding and a head beside their blocks."""
    after = step("muon", "dp4,tp2,pp4,zero1,gb32")
    of_segment = block_matrices(after.request, after.table)
    stages = stages_of_ranks(after.step.stages, after.step)
    seconds = [rank_update(own, of_segment, after.request, after.machine).seconds for own in stages]
    assert len(seconds) == 4
    assert max(seconds) > 1.001 * min(seconds)
    assert after.step.shares_s["optimizer"] == max(seconds)


def test_directions_are_the_owners_of_the_planner() -> None:
    """The simulator spreads kinds, the planner matrices: the same fullest rank, at the same bound."""
    request, table = step_of(Request(model="qwen3-4b", machine="h100", layout="dp64,zero3", optimizer="muon"))
    found = simulate(request, table).updated
    assert found is not None
    directions = found.update.directions
    rule, flops = Muon(), peak_flops(load_machine("h100").device, "bf16")
    matrices = [Matrix(f"{n}", rule.work(r, c).flops, r * c) for n, (_, _, r, c) in enumerate(projections(table))]
    owners = assign(matrices, 64)
    assert found.update.matrices == len(matrices) == 36 * 7
    assert found.update.load_ratio == pytest.approx(owners.load_ratio, rel=0.05)
    assert directions.seconds == pytest.approx(directions.bound_s, rel=1e-3)
    assert owners.makespan_s / flops < directions.seconds < 3 * owners.makespan_s / flops


@pytest.mark.parametrize(("ranks", "layout"), [(8, "dp8,zero3"), (4, "tp4,sp"), (8, "dp4,tp2,sp")])
def test_bytes_that_move_are_those_of_the_routes(ranks: int, layout: str) -> None:
    """Counted over the routes that the run takes, on rows cut over ranks, or over tp ranks with replicas."""
    shape = parse_layout(layout)
    matrix = BlockMatrix("w", 64, 48, count=1)
    machine, rule = load_machine("h100"), Muon()
    update = update_of({matrix: 16}, 16 * 64 * 48 / ranks, rule, shape, stack_by_name("default"), machine)
    wholes = [whole for number in range(16) for whole in wholes_of(number, f"w{number}", (64, 48))]
    cut = ranks if shape.zero else shape.tp
    rows = [ShardRegion((64 // cut * (rank % cut), 0), (64 // cut, 48)) for rank in range(ranks)]
    inbound, outbound = pieces(wholes, [rows] * 16, [number % ranks for number in range(16)])
    moved = sum(2 * p.region.size for p in (*inbound, *outbound) if p.source != p.target)
    assert update.moved_bytes * ranks == pytest.approx(moved)


def test_whole_states_lie_with_owners() -> None:
    """SOAP keeps both factors, both bases and both moments of a matrix in fp32, once among its ranks."""
    before, after = step("adamw", "dp8,zero3"), step("soap", "dp8,zero3")
    per_block = sum(
        n * (2 * (r * r + c * c) + 2 * r * c) for n, (r, c) in zip((2, 2, 2, 1), QWEN3_8B.values(), strict=True)
    )
    elements = 36 * sum(n * r * c for n, (r, c) in zip((2, 2, 2, 1), QWEN3_8B.values(), strict=True))
    more = after.memory[0][Role.OPTIMIZER_STATE] - before.memory[0][Role.OPTIMIZER_STATE]
    mean = 4 * (36 * per_block - 2 * elements) / 8
    assert mean * 0.999 < more < mean * 1.1
    assert any("5% of the fp32 peak" in sentence for sentence in after.assumed)


def test_experts_are_batches_of_matrices() -> None:
    table = model_table("deepseek-v3")
    found = {m.name: m for m in matrices_of(table.segments[2], table.symbols)}
    assert found["experts.up_EDG"] == BlockMatrix("experts.up_EDG", 2048, 7168, 512, is_expert=True)
    assert found["attn.q_up.weight"].rows == 128 * (128 + 64)  # heads of a part without positions and one with
    assert not any("norm" in name for name in found)
    update = step("muon", "dp64,ep8,zero1", "qwen3-30b-a3b").updated
    assert update is not None
    assert update.update.matrices == 48 * (3 * 128 + 4 + 1)  # experts; q, k, v, out; the router
    assert update.update.load_ratio < 1.01


def test_groups_of_parameters_know_the_optimizer() -> None:
    """Where parameters are cut, what stays gathered is chosen beside the same update and the same states."""
    found = {}
    for optimizer in ("adamw", "muon"):
        request, table = step_of(
            Request(model="gpt2", machine="h100", layout="dp4,zero3,gb16", seq_len=512, optimizer=optimizer)
        )
        simulated, modules = simulate(request, table), modules_of(request, table)
        found[optimizer] = (
            simulated.step.shares_s["optimizer"] + simulated.step.shares_s["host"] - modules.rest_s,
            simulated.memory[0][Role.OPTIMIZER_STATE] - modules.state_bytes,
        )
    assert found["muon"] == pytest.approx(found["adamw"], abs=1e-9)


def test_a_few_long_matrices_among_many_short_ones() -> None:
    """Owners of what is longer than the mean have nothing else; the others share the rest evenly."""
    kinds = (Kind(28.65, 7, (), 4), Kind(2.11, 0, (), 4), Kind(1.12, 1, (), 3084))
    found = spread(kinds, 128)
    assert found.seconds == pytest.approx(28.65)
    assert found.bound_s == pytest.approx(28.65)
    assert found.state_bytes == 25
    assert spread(kinds, 8).seconds < 1.01 * spread(kinds, 8).mean_s


def test_replicas_get_whole_directions() -> None:
    """Without cut states every replica needs every direction: more bytes, and longer."""
    cut, whole = step("muon", "dp64,zero1").updated, step("muon", "dp64").updated
    assert cut is not None
    assert whole is not None
    assert whole.update.moved_bytes > 30 * cut.update.moved_bytes
    assert whole.update.exposed_s > cut.update.exposed_s


@pytest.mark.parametrize(
    ("layout", "more", "message"),
    [
        ("dp8,zero1,offload=optimizer", {}, "muon: expected states on the device, got offload=optimizer"),
        ("dp8", {"lora": 16}, "muon: expected all weights trained, got lora"),
    ],
)
def test_what_owners_cannot_do_is_said(layout: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        step("muon", layout, **more)


def test_a_rule_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"expected one of adamw, .*, or 'module:Class' .*, got 'loin'"):
        step("loin", "dp8")


@pytest.mark.parametrize(("optimizer", "moments"), [("adam", 2), ("lion", 1), ("sgd", 0), ("adafactor", 0)])
@pytest.mark.parametrize("layout", ["dp8,zero3", "dp4,tp2,pp4,zero1,gb32", "dp8,zero1,offload=optimizer"])
def test_rules_of_all_parameters_count_their_states(optimizer: str, moments: int, layout: str) -> None:
    """An update reads and writes as many moments as the rule keeps; the rest of the step is as it was."""
    before, after = step("adamw", layout), step(optimizer, layout)
    kept = [
        [roles.get(Role.OPTIMIZER_STATE, 0) for roles in (*one.memory, *one.lower_tier_by_rank)]
        for one in (before, after)
    ]
    assert kept[1] == pytest.approx([size / 12 * (4 + 4 * moments) for size in kept[0]], rel=1e-6)
    assert sum(kept[1]) > 0
    seconds = [one.step.shares_s["optimizer"] for one in (before, after)]
    passes = 14 if optimizer == "adafactor" else 0
    assert (seconds[1] > seconds[0], seconds[1] < seconds[0]) == (passes > 0, moments < 2 and not passes)
    if parse_layout(layout).offload:  # 34 bytes an element for AdamW, as its master is read twice; copies beside
        assert seconds[1] / seconds[0] == pytest.approx((18 + 8 * moments + 4 * passes) / 34, rel=0.1)
    assert any(sentence.startswith(f"{optimizer}: timed by the bytes") for sentence in after.assumed)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["muon", "soap", "lion"])
def test_the_search_finds_the_fastest(optimizer: str) -> None:
    """Every layout of a small space, simulated."""
    pins = {"micro_batch": 2, "cp": 1, "recompute": "none"}
    asked = Request(model="gpt2", machine="h100", seq_len=512, optimizer=optimizer, devices=4, global_batch=8)
    space = space_of(replace(asked, pins=pins, proven=64))
    found = find_layouts(space)
    assert found.proven == len(found.best)
    assert optimizer == "lion" or not any(one.layout.offload for one in found.best)
    again = [simulate(LayoutSearch(space).request(one.layout), space.table).step.step_s for one in found.best]
    steps = [one.step_s for one in found.best]
    assert steps == pytest.approx(again, rel=1e-12)
    assert steps == pytest.approx(sorted(steps), rel=1e-9)
    assert all(one.bound_s <= one.step_s for one in found.best)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", "gpt2", "--machine", "h100", "--devices", "4", "--seq", "512", "--optimizer", "muon"]
    asked += ["--global-batch", "8", "--pin", "micro_batch=2", "--pin", "pp=1", "--out", str(tmp_path / "p.json")]
    assert main(["plan", *asked]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "muon: 72 matrices with owners among 4 ranks" in said
    assert "above it" in said
    found = summary(step("muon", "dp4", "gpt2"))["optimizer"]
    assert found["name"] == "muon"
    assert found["directions_s"] >= found["directions_bound_s"] > 0
