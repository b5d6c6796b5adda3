"""The search of layouts: equal to trying every layout, bounded by what is true, and the same in every process."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lading.catalog.load import load_machine
from lading.catalog.stacks import stack_by_name
from lading.cli.main import main
from lading.cli.plan_command import like_text, shown
from lading.clusters import space_of, step_of
from lading.errors import ConfigError, PlanInfeasible
from lading.ir.layout import parse_layout
from lading.ir.plan import Plan
from lading.ir.program import parse_program
from lading.ir.request import Request
from lading.memory.verify import verify
from lading.planner.bounds import HIDDEN
from lading.planner.layouts import find_layouts
from lading.planner.peaks import peaks_of, room_of
from lading.planner.refine import refine
from lading.planner.search import Bounded, LayoutSearch
from lading.planner.space import PINS, Space, parse_pins, precisions_of
from lading.sim.simulate import Simulated, simulate


def space(
    model: str = "gpt2", devices: int = 4, batch: int = 16, seq: int = 512, stack: str = "default", **rest: Any
) -> Space:
    asked = Request(model=model, machine="h100", seq_len=seq, stack=stack, devices=devices, global_batch=batch, **rest)
    return space_of(asked)


def every(search: LayoutSearch) -> list[Bounded]:
    """All layouts of a space, one by one."""
    space = search.space
    found: list[Bounded] = []
    for mesh in space.meshes():
        for block in space.blocks(mesh):
            for mode in space.modes:
                for pipe in space.pipes(partial=mode.name == "full"):
                    if search.space.wanted_request.devices % (mesh.tp * mesh.cp * pipe.pp):
                        continue
                    replicas = search.space.wanted_request.devices // (mesh.tp * mesh.cp * pipe.pp)
                    for cut in space.cuts(replicas * mesh.cp, pipe.stages):
                        found.append(Bounded(0.0, 0.0, 0.0, block, mode, pipe, cut))
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("stack", "pins"),
    [
        ("default", {"micro_batch": 2, "cp": 1, "recompute": "none"}),
        pytest.param("default", {"micro_batch": 2, "cp": 1}, marks=pytest.mark.slow),
        ("torchtitan-eager", {"micro_batch": 1, "tp": 2, "recompute": "full"}),
        pytest.param(
            "torchtitan-compile",
            {"micro_batch": 2, "cp": 1, "recompute": "none", "precisions": ("bf16", "fp8")},
            marks=pytest.mark.slow,
        ),
        ("default", {"micro_batch": 2, "cp": 1, "offload": ("parameters",), "offload_to": "disk"}),
        pytest.param("megatron-core", {"micro_batch": 2, "sp": False}, marks=pytest.mark.slow),
    ],
)
def test_search_equals_brute_force(stack: str, pins: dict[str, Any]) -> None:
    free = {"precisions": pins["precisions"]} if "precisions" in pins else {}
    pins = {key: value for key, value in pins.items() if key not in free}
    asked = space(stack=stack, pins=pins, batch=8, proven=64, **free)
    search, room = LayoutSearch(asked), room_of(asked)
    found = find_layouts(asked)
    truth: list[tuple[float, int, str]] = []
    possible = 0
    for one in every(search):
        try:
            layout = search.layout(one)
            simulated = simulate(search.request(layout), asked.table)
        except ConfigError:
            continue
        possible += 1
        if simulated.prediction.fits:
            most = max(tiers["device"] for tiers in peaks_of(simulated, asked.wanted_request).values())
            truth.append((float(f"{simulated.step.step_s:.11g}"), most, str(layout)))
    assert found.counted == possible > 50
    truth.sort()
    assert [one.order for one in found.best[:10]] == truth[:10]
    assert found.proven == len(found.best) == min(64, len(truth))
    assert found.winner.peaks["step"]["device"] <= room["device"]


def test_parts_that_a_stack_recomputes_alone_are_searched() -> None:
    """Of those that it names, the ones that the model has; pinned ones alone."""

    def parts(model: str, stack: str, **pins: Any) -> list[str]:
        return ["+".join(mode.modules) for mode in space(model, stack=stack, pins=pins).modes if mode.modules]

    assert parts("llama3-8b", "megatron-core") == ["layernorm"]
    assert parts("mixtral-8x7b", "megatron-core") == ["layernorm", "layernorm+moe_act"]
    latent = ["layernorm", "layernorm+moe_act", "layernorm+moe_act+mla_up_proj"]
    assert parts("deepseek-v3", "megatron-core") == latent
    assert parts("llama3-8b", "torchtitan-eager") == ["op"]
    assert parts("llama3-8b", "torchtitan-eager", recompute="full") == []
    assert parts("llama3-8b", "torchtitan-eager", recompute_modules=("act",)) == ["act"]
    assert parts("llama3-8b", "megatron-2021") == []


def test_405b_fits_as_meta_ran_it() -> None:
    """Llama 3 (2024), table 4: 16,384 H100, tp8 cp1 pp16 dp128, sequences of 8,192 tokens."""
    pins = {"tp": 8, "cp": 1, "pp": 16, "vpp": 4, "micro_batch": 1, "sp": True, "zero": 1, "schedule": "interleaved"}
    asked = space("llama3-405b", 16384, 2048, 8192, "torchtitan-compile", pins=pins, proven=1, top=1)
    winner = find_layouts(asked).winner
    assert winner.layout.recompute_modules == ("op",)
    assert winner.simulated.prediction.fits


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "devices", "batch", "seq", "stack"),
    [
        ("llama3-8b", 16, 64, 4096, "cut in pipelines"),
        pytest.param("llama3-70b", 64, 512, 8192, "default", marks=pytest.mark.slow),
        pytest.param("gpt3-175b", 512, 1536, 2048, "megatron-core", marks=pytest.mark.slow),
        ("llama3-8b", 32, 128, 4096, "torchtitan-compile"),
        pytest.param("mixtral-8x7b", 64, 256, 4096, "megatron-bridge", marks=pytest.mark.slow),
    ],
)
def test_bounds_are_below_the_truth(model: str, devices: int, batch: int, seq: int, stack: str) -> None:
    pins: dict[str, Any] = {"micro_batch": 1, "cp": 1}
    if stack == "cut in pipelines":
        stack, pins = "default", {**pins, "zero": 3, "tp": 1, "pp": 4}
    asked = space(model, devices, batch, seq, stack, pins=pins, top=1)
    search, budget = LayoutSearch(asked), room_of(asked)["device"]
    found: list[Bounded] = []
    for family in search.families(lambda done, of, what: None):
        for member in family.members:
            for unpriced in search.unpriced(member, budget):
                opened = search.opened(unpriced, budget)
                if opened is None:
                    continue
                layouts = [*search.bounded(opened, budget)]
                bounds = [family.bound_s, member.bound_s, unpriced.prefiltered.step_s, opened.prefiltered.step_s]
                assert all(bound_s * HIDDEN <= one.step_s for one in layouts[:1] for bound_s in bounds)
                found += layouts[:: max(1, len(layouts) // 3)]
            for unpriced in search.unpriced(member, inf):
                opened = search.opened(unpriced, inf)
                assert opened is not None
                least = min(one.peak_bytes for one in search.bounded(opened, inf))
                assert unpriced.prefiltered.peak_bytes <= opened.prefiltered.peak_bytes <= least
    found += search.over
    ratios: list[float] = []
    for one in found[:: max(1, len(found) // 25)]:
        refined = refine(search, one, room_of(asked))
        assert one.step_s <= refined.step_s
        assert one.peak_bytes <= search.peak_bytes(one) <= refined.simulated.peak_bytes
        ratios.append(refined.step_s / one.step_s)
    assert sum(ratios) / len(ratios) < 1.05


@pytest.mark.parametrize(
    ("model", "devices", "seq", "stack"),
    [
        pytest.param("mixtral-8x7b", 8, 4096, "default", marks=pytest.mark.slow),
        ("gpt2-xl", 8, 1024, "torchtitan-compile"),
        pytest.param("llama3-8b", 8, 1000, "megatron-2021", marks=pytest.mark.slow),
        pytest.param("mixtral-8x7b", 16, 2048, "megatron-bridge", marks=pytest.mark.slow),
        pytest.param("deepseek-v3", 64, 4096, "default", marks=pytest.mark.slow),
    ],
)
def test_floors_are_below_every_member(model: str, devices: int, seq: int, stack: str) -> None:
    """Of a family's floors each segment, each phase and all that is kept, beside the member's own prices."""
    search = LayoutSearch(
        space(model, devices, 64, seq, stack, pins={"pp": 1} if model != "mixtral-8x7b" else {"tp": 1})
    )
    ratios: list[float] = []
    for family in search.families(lambda done, of, what: None):
        for member in family.members:
            if member.kernel_bounds is None:
                continue
            for mode in search.space.modes:
                least, costs = search.least_costs(member, mode), search.costs(member.block, mode)
                assert np.all(least.device <= costs.device * (1 + 1e-12))
                assert np.all(least.host <= costs.host)
                assert np.all(least.saved <= costs.saved)
                assert np.array_equal(least.elements, costs.elements)
                ratios.append(float(np.sum(least.device) / np.sum(costs.device)))
    assert len(ratios) > 10
    print("floor over price:", min(ratios), sum(ratios) / len(ratios))


@pytest.mark.parametrize(
    ("model", "batch", "pins"),
    [
        ("llama3-8b", 48, {"tp": 1, "vpp": 2, "micro_batch": 1}),
        ("llama3-70b", 96, {"tp": 4, "schedule": "gpipe", "micro_batch": 3}),  # the first rank has most layers
    ],
)
def test_bounds_of_pipelines_that_were_run(model: str, batch: int, pins: dict[str, Any]) -> None:
    """What a pipeline takes longer than its bound is added to layouts with it: that must not pass what they take."""
    asked = space(
        model, 24, batch, 4096, pins={"cp": 1, "pp": 3, "recompute": "none", "offload": (), "sp": False, **pins}
    )
    search, room, cut = LayoutSearch(asked), room_of(asked), 0
    (family,) = search.families(lambda done, of, what: None)
    (unpriced,) = search.unpriced(family.members[0], inf)
    opened = search.opened(unpriced, inf)
    assert opened is not None
    for one in sorted(search.bounded(opened, inf), key=lambda each: each.cut.zero):
        span_s = search.span_s(one)
        simulated = refine(search, one, room)
        if span_s is not None and one.cut.zero == 3:
            assert one.step_s + max(0.0, span_s - one.span_s) <= simulated.step_s
            cut += 1
    assert cut


def test_rows_of_the_table_are_choices_that_matter() -> None:
    """Of layouts that differ in little one is shown, with how many there are; where all differ so, all are shown."""
    asked = space(devices=4, batch=16, pins={"cp": 1, "micro_batch": 2, "recompute": "none"})
    best = find_layouts(asked).best
    rows = shown(best, 10)
    assert [row[0].order for row in rows] == sorted(row[0].order for row in rows)
    keys = [dataclasses.replace(row[0].layout, shard=0, vpp=1, schedule="1f1b", sp=False) for row in rows]
    assert len(set(keys)) == len(keys)
    alike = next(row for row in rows if len(row) > 1)
    assert like_text(*alike).startswith(f"{len(alike) - 1} variant")
    assert like_text(alike[0]) == ""
    for row in shown(best, 2):
        assert len({(one.layout.dp, one.layout.tp, one.layout.pp) for one in row}) == 1
    pinned = {"cp": 1, "micro_batch": 2, "recompute": "none", "tp": 1, "pp": 1, "zero": 3, "offload": ()}
    assert [row[0].layout.shard for row in shown(find_layouts(space(pins=pinned)).best, 10)] in ([0, 2], [2, 0])


def test_experts_over_all_ranks() -> None:
    found = find_layouts(
        space("mixtral-8x7b", 8, 32, 2048, pins={"ep": 8, "tp": 1, "cp": 1, "micro_batch": 1, "pp": 1})
    )
    assert found.proven
    assert found.winner.layout.ep == 8


def test_pins() -> None:
    text = "dp2,tp2,pp2,vpp2,sp,zero1,mb2,gb16,interleaved,recompute=full,recompute_layers=1"
    asked = space(devices=8, pins={key: getattr(parse_layout(text), key) for key in PINS})
    found = find_layouts(asked)
    layout = dataclasses.replace(parse_layout(text), global_batch=16)
    assert [one.layout for one in found.best] == [layout]
    assert found.counted == 1
    request = dataclasses.replace(asked.request, layout=layout)
    assert found.winner.step_s == simulate(request, asked.table).step.step_s
    with pytest.raises(ConfigError, match="did you mean 'zero'"):
        parse_pins(("zreo=1",))
    with pytest.raises(ConfigError, match="zero must be 0, 1, 2 or 3, got 5"):
        parse_pins(("zero=5",))
    with pytest.raises(ConfigError, match="--pin cp_comm: expected ring, all_gather, all_to_all, got 'rng'"):
        parse_pins(("cp_comm=rng",))
    with pytest.raises(ConfigError, match="micro-batches and vpp that the schedule takes"):
        find_layouts(space(pins={"tp": 1, "cp": 1, "pp": 2, "vpp": 2, "schedule": "gpipe", "micro_batch": 1}))
    with pytest.raises(ConfigError, match="expected a whole number, got 'eight'"):
        parse_pins(("tp=eight",))
    with pytest.raises(ConfigError, match="heads"):
        find_layouts(space(devices=8, pins={"tp": 8}))


@pytest.mark.long
def test_what_does_not_fit_names_the_moment_and_what_would() -> None:
    asked = space("llama3-8b", 1, 4, 8192, pins={"micro_batch": 1, "offload": (), "tp": 1, "cp": 1})
    with pytest.raises(PlanInfeasible, match="at moment 'step'") as raised:
        find_layouts(asked)
    assert raised.value.missing_bytes > 0
    text = str(raised.value)
    assert "no layout of 1 device fits" in text
    assert "none can: parameters, gradients and optimizer states" in text
    assert "3 devices instead of 1: " in text
    assert "offload not pinned to none: " in text
    hosted = find_layouts(asked.asking(pins={"micro_batch": 1, "tp": 1, "cp": 1}))
    assert hosted.winner.layout.offload == ("optimizer",)
    assert hosted.winner.peaks["step"]["host"] > hosted.winner.peaks["step"]["device"] / 4
    with pytest.raises(PlanInfeasible):
        find_layouts(asked.asking(devices=2))
    more = find_layouts(asked.asking(devices=3))
    assert str(more.winner.layout) in text


@pytest.mark.long
def test_smallest_budget_is_one_that_works() -> None:
    pins = {"micro_batch": 1, "cp": 1, "offload": (), "pp": 1}
    asked = space(devices=2, pins=pins, budgets={"device": 2_540_000_000})
    with pytest.raises(PlanInfeasible, match="proven for all") as raised:
        find_layouts(asked)
    budget = raised.value.smallest_budget_bytes
    found = find_layouts(asked.asking(budgets={"device": budget}))
    assert found.winner.fits
    with pytest.raises(PlanInfeasible):
        find_layouts(asked.asking(budgets={"device": budget - 100}))
    assert f"a budget of {budget} bytes instead of 2540000000: {found.winner.layout}" in str(raised.value)


@pytest.mark.long
def test_giving_up_is_not_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host binds at the moment of saving, bounds say nothing of it: layouts are tried, and some are left."""
    monkeypatch.setattr("lading.planner.refine._LEAST", 4)
    monkeypatch.setattr("lading.planner.refine._LIGHTEST", 4)
    monkeypatch.setattr("lading.planner.layouts._DOUBLINGS", 1)
    asked = space(
        devices=4, pins={"offload": (), "tp": 1, "cp": 1, "pp": 1, "recompute": "full"}, save="gathered", top=1
    )
    tiers = tuple(dataclasses.replace(t, capacity_bytes=1 << 28) for t in asked.machine.tiers)
    asked = dataclasses.replace(asked, machine=dataclasses.replace(asked.machine, tiers=tiers))
    with pytest.raises(PlanInfeasible, match="was found that fits, which is not proven") as raised:
        find_layouts(asked)
    assert "at moment 'save'" in str(raised.value)
    assert "20 were simulated" in str(raised.value)
    assert "checkpoints in pieces (--save sharded) instead of gathered: dp4" in str(raised.value)


def test_patience_counts_from_the_first_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []

    def peaks(simulated: Simulated, asked: Request) -> dict[str, dict[str, int]]:
        calls.append(None)
        found = peaks_of(simulated, asked)
        return found if len(calls) > 6 else {**found, "start": {"device": 1 << 60, "host": 0}}

    monkeypatch.setattr("lading.planner.refine.peaks_of", peaks)
    monkeypatch.setattr("lading.planner.refine._LEAST", 2)
    monkeypatch.setattr("lading.planner.refine._PATIENCE", 1)
    found = find_layouts(space(pins={"cp": 1, "micro_batch": 2}, top=4, proven=4))
    assert (len(found.best), found.proof.simulated) == (4, 10)


def test_what_does_not_divide_says_what_would() -> None:
    small: dict[str, Any] = {"cp": 1, "recompute": "none", "micro_batch": 1}
    for pins, what in (({"shard": 3}, "shard not pinned to 3"), ({"tp": 3}, "6 devices instead of 4")):
        with pytest.raises(ConfigError, match=r"with a global batch of 16 and .* can be: expected") as raised:
            find_layouts(space(pins={**small, **pins}))
        assert what in str(raised.value)
    with pytest.raises(ConfigError, match="16 devices instead of 17"):
        find_layouts(space(devices=17, batch=7, pins=small))


@pytest.mark.long
def test_same_plan_on_every_rank(tmp_path: Path) -> None:
    """What is planned here is planned by a process that hashes in another order."""
    options = ["--devices", "4", "--global-batch", "16", "--seq", "512", "--price", "1"]
    pins = [word for pin in ("tp=1", "mb=2", "recompute=none", "zero=1") for word in ("--pin", pin)]
    command = ["plan", "--model", "gpt2", "--machine", "h100", *options, *pins]
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    assert main([*command, "--json", str(here), "--out", str(tmp_path / "plan.json")]) == 0
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "lading.cli.main",
            *command,
            "--json",
            str(there),
            "--out",
            str(tmp_path / "again.json"),
        ],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
        timeout=60,
    )
    assert here.read_text() == there.read_text()
    assert (tmp_path / "plan.json").read_text() == (tmp_path / "again.json").read_text()


@pytest.mark.long
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    plan, figures = tmp_path / "plan.json", tmp_path / "figures.json"
    options = ["--devices", "8", "--global-batch", "32", "--seq", "1024", "--price", "2"]
    assert main(
        ["plan", "--model", "gpt2-xl", "--machine", "h100", *options, "--pin", "cp=1", "--pin", "mb=2",
         "--out", str(plan), "--json", str(figures)]
    ) == 0  # fmt: skip
    printed = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "500")
    assert "why it loses" in printed
    assert "% slower: " in printed
    assert "proven" in printed
    assert "assumed - " in printed
    assert max(map(len, printed.splitlines())) <= 80
    document = json.loads(figures.read_text())
    saved = Plan.load(plan)
    assert saved.layout is not None
    assert saved.layout.partition(",bucket_bytes")[0] == document["layouts"][0]["layout"]
    assert set(saved.predictions.peaks) == {"start", "step", "longest", "save", "resume"}
    assert document["layouts"][0]["step_s"] >= saved.step_s >= saved.lower_bound_s  # less where it has chosen buckets
    asked = space("gpt2-xl", 8, 32, 1024)
    again = simulate(dataclasses.replace(asked.request, layout=saved.parsed_layout), asked.table)
    assert again.step.listed is not None
    program = parse_program(saved.program)
    assert program.text() == again.step.listed.program.text()  # what is saved is what was timed
    verify(program)
    assert all(row["loses_because"] for row in document["layouts"])
    assert document["layouts"][0]["loses_because"] == "fastest"
    assert main(["plan", "--model", "gpt2-xl", "--machine", "h100", "--out", str(plan)]) == 2
    assert "expected --devices and --global-batch next to --model" in capsys.readouterr().err
    for wrong, message in (
        (["run.toml", "--tree"], "--tree belongs to --model"),
        (["run.toml", "--pin", "tp=2"], "--pin belongs to --model"),
        (["--model", "gpt2", "--machine", "h100", *options, "--top", "0"], "expected at least 1 layout to show, got 0"),
        (["--model", "gpt2", "--machine", "h100", *options, "--budget", "0"], "--budget: expected memory of a device"),
        (["--model", "gpt2", "--machine", "h100", *options, "--budget", "1TB"], "or less, got 1000000000000"),
        (["--model", "gpt2", "--machine", "h100", *options[:-1], "-2"], "--price: expected a price"),
    ):
        assert main(["plan", *wrong, "--out", str(plan)]) == 2
        assert message in capsys.readouterr().err


def test_longer_than_the_model_takes_is_said() -> None:
    long, _ = step_of(Request(model="gpt2", machine="h100", seq_len=4096))
    assert long.assumed == ("gpt2 is for sequences of up to 1,024 tokens: taken as if it were for 4,096",)
    assert step_of(Request(model="llama3-8b", machine="h100", seq_len=4096))[0].assumed == ()


def test_precisions_to_choose_from() -> None:
    """Those that the stack has and the device multiplies; what a search may not choose is said why."""
    h100, b200 = load_machine("h100"), load_machine("b200")
    compiled, eager = (stack_by_name(f"torchtitan-{kind}") for kind in ("compile", "eager"))
    assert precisions_of("any", h100, compiled) == ("bf16", "fp8")
    assert precisions_of("any", b200, compiled) == ("bf16", "fp8", "mxfp8", "nvfp4")
    assert precisions_of("any", load_machine("a100"), compiled) == precisions_of("any", h100, eager) == ("bf16",)
    assert precisions_of("fp32", h100, eager) == ("fp32",)
    assert precisions_of("fp8, bf16,fp8", h100, compiled) == ("fp8", "bf16")
    for text, machine, stack, message in (
        ("bf16,fp9", h100, compiled, "did you mean 'fp8'"),
        ("bf16,mxfp8", h100, compiled, "mxfp8 cannot be chosen: .* has no products in it"),
        ("bf16,fp8", h100, eager, "has none of fewer than 16 bits"),
        ("bf16,fp32", h100, eager, "to be asked for alone"),
    ):
        with pytest.raises(ConfigError, match=message):
            precisions_of(text, machine, stack)


def test_fewer_bits_are_chosen_only_if_asked_for() -> None:
    kept, free = (find_layouts(space(stack="torchtitan-compile", precisions=p)) for p in ((), ("bf16", "fp8")))
    assert free.counted == 2 * kept.counted
    assert free.winner.step_s <= kept.winner.step_s
    assert {one.layout.precision for one in kept.best} == {"bf16"}
    assert any("--precision any" in text for text in kept.left_out)
    assert not any("--precision any" in text for text in free.left_out)


@pytest.mark.long
def test_cut_parameters_are_searched_in_pipelines() -> None:
    """Of stacks that have them there; 2 and 3 are one, so only one is counted."""
    pins = {"pp": 2, "micro_batch": 1, "cp": 1, "tp": 1, "recompute": "none"}
    asked = space("llama3-8b", 16, 64, 4096, stack="torchtitan-compile", pins=pins, proven=1, top=1)
    assert {cut.zero for cut in LayoutSearch(asked).space.cuts(8, 2)} == {0, 3}
    found = find_layouts(asked.asking(pins={**pins, "zero": 3}))
    assert found.proven
    assert (found.winner.layout.pp, found.winner.layout.zero) == (2, 3)
    none = LayoutSearch(space("llama3-8b", 16, 64, 4096, stack="megatron-core", pins=pins))
    assert {cut.zero for cut in none.space.cuts(8, 2)} == {0, 1}
    assert any("zero 2, 3" in text for text in none.space.left_out())


def test_what_does_not_fit_is_put_behind_the_device() -> None:
    """405 billion parameters on two devices: their states are too large for the hosts, not for their disks."""
    pins = {"micro_batch": 1, "tp": 1, "cp": 1, "pp": 1, "recompute": "full", "recompute_layers": -1}
    with pytest.raises(PlanInfeasible) as error:
        find_layouts(space("llama3-405b", 2, 4, 4096, pins=pins))
    near = next(line for line in str(error.value).splitlines() if "offload=parameters, offload_to=disk" in line)
    layout = parse_layout(near.partition("): ")[2].partition(", step")[0])
    assert (layout.zero, layout.offload, layout.offload_to) == (3, ("parameters",), "disk")
    found = find_layouts(
        space("llama3-405b", 2, 4, 4096, pins={**pins, "offload": ("parameters",), "offload_to": "disk"})
    )
    assert found.winner.layout == layout
    assert found.winner.simulated.prediction.fits
    with pytest.raises(ConfigError, match="expected none, optimizer or parameters, got 'activations'"):
        parse_pins(("offload=activations",))
    with pytest.raises(ConfigError, match=r"--pin offload_to: expected a tier of h100 \(host, disk\), got 'tape'"):
        space("llama3-405b", 2, 4, 4096, pins=parse_pins(("offload_to=tape",)))
