"""Plans set on a stock model: on ranks over gloo the numbers of stock FSDP2, and the gathers that were planned."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime.loops import LOOPS, SOME_LOOPS
from tests.runtime.sharding import FULL, SOME_UNLIKE, UNLIKE, compare_plans, with_units
from torch import nn

from lading.catalog.architectures import architecture_table
from lading.catalog.stacks import stack_by_name
from lading.errors import ConfigError
from lading.ir.layout import parse_layout
from lading.ir.plan import Plan
from lading.ir.request import Architecture, StepRequest
from lading.planner.unshard import choose_groups, neighbor_peaks, plan_of
from lading.runtime.apply import _check_plain, _refuse_earlier_optimizers

#: tests.runtime.sharding.SIZES by the table's names.
SIZES = {"v": 512, "h": 64, "n": 4, "k": 2, "d": 16, "f": 192}
#: tests.runtime.sharding.GPT_SIZES likewise.
GPT_SIZES = {"v": 512, "h": 64, "n": 4, "d": 16, "f": 256, "p": 64}
STEPS = 2
LOOPED = "dp2,zero3,mb2,gb8"


def planned(layout: str, policy: str, share: float = 0.5, family: str = "llama") -> Plan:
    """Of the small Llama or GPT, with a budget between ZeRO-3's peak and ZeRO-2's."""
    symbols = SIZES if family == "llama" else GPT_SIZES
    model = Architecture(family=family, symbols=symbols, blocks=(("block", 4),))
    stack = stack_by_name("torchtitan-eager")
    request = StepRequest(
        name="small", model=model, seq_len=64, machine="h100", layout=parse_layout(layout), stack=stack
    )
    table = architecture_table(model)
    low, high = neighbor_peaks(request, table)
    return plan_of(choose_groups(request, table, int(low + share * (high - low)), policy), "test")


@cache
def cases(name: str) -> dict[str, Plan]:
    """Plans by name."""
    if name == "few":
        found = {"residency": planned("dp2,zero3,mb2,gb8", "residency")}
        greedy = planned("dp2,zero3,mb2,gb8", "reverse-greedy")
        further = [dataclasses.replace(u, prefetch_forward=2, prefetch_backward=3) for u in greedy.choices.units]
        return {
            **found,
            "ahead": with_units(greedy, *further),
            "refused": greedy,
            "some loops": planned(LOOPED, "zero2", 1.0),
            "some unlike": planned(LOOPED, "zero3", 1.0),
        }
    if name == "policies":
        return {
            "zero3": planned("dp2,zero3,mb2,gb8", "zero3", 1.0),
            "loops": planned(LOOPED, "zero2", 1.0),
            "unlike": planned(LOOPED, "zero3", 1.0),
            "zero2": planned("dp2,zero3,mb2,gb12", "zero2", 1.0),
            "greedy": planned("dp2,zero3,mb2,gb12", "reverse-greedy"),
            "residency-full": planned("dp2,zero3,mb2,gb8", "residency", 0.9),
            "recomputed": planned("dp2,zero3,mb2,gb8,recompute=full", "reverse-greedy"),
            "offloaded": planned("dp2,zero3,mb2,gb8,offload=parameters", "residency"),
            "some-recomputed": planned("dp2,zero3,mb2,gb8,recompute=full,recompute_layers=2", "residency"),
            "compiled.kept": planned("dp2,zero3,mb2,gb8", "zero2", 1.0),
            "compiled.recomputed": planned("dp2,zero3,mb2,gb8,recompute=full", "zero3", 1.0),
        }
    if name == "peaks":
        return {
            "residency-recomputed": planned("dp2,zero3,mb2,gb8,recompute=full", "residency"),
            "residency-once": planned("dp2,zero3,mb2,gb4", "residency"),
            "gpt.residency": planned("dp2,zero3,mb2,gb8", "residency", family="gpt"),
            "gpt.residency-recomputed": planned("dp2,zero3,mb2,gb8,recompute=full", "residency", family="gpt"),
        }
    return {
        "residency": planned("dp4,zero3,mb2,gb16", "residency"),
        "recomputed": planned("dp4,zero3,mb2,gb16,recompute=full", "reverse-greedy"),
        "hybrid": planned("dp4,zero3,shard2,mb2,gb16", "residency"),
    }


def run(name: str, folder: Path) -> None:
    """All plans of a set on their ranks."""
    for each, plan in cases(name).items():
        plan.save(folder / f"{each}.json")
    ranks = next(iter(cases(name).values())).request.devices
    run_ranks(compare_plans, ranks, str(folder))


@pytest.mark.parametrize(
    "name", ["few", *(pytest.param(name, marks=pytest.mark.slow) for name in ("policies", "peaks", "ranks"))]
)
def test_the_same_numbers_and_the_planned_gathers(name: str, tmp_path: Path) -> None:
    """Losses and weights to the bit, gathers and reductions as planned, and no more memory than the budget."""
    run(name, tmp_path)
    for each, plan in cases(name).items():
        found = json.loads((tmp_path / f"{each}.out").read_text())
        if each == "refused":
            _check_refusals(found)
            continue
        if each in ("loops", "some loops"):
            assert found == dict.fromkeys(LOOPS if each == "loops" else SOME_LOOPS, "equal")
            continue
        if each in ("unlike", "some unlike"):
            for made in [name for name in FULL if each == "unlike" or name in SOME_UNLIKE]:
                assert "at most the 0 bytes that the plan leaves of its budget, found" in found.pop(f"full {made}")
            assert found == dict.fromkeys(UNLIKE if each == "unlike" else SOME_UNLIKE, "equal")
            continue
        assert found["losses"] == found["expected"], each
        assert found["weights"], each
        assert found["losses"][-1] < found["losses"][0]
        if each.startswith("compiled"):
            continue  # nothing is compiled under a mode that counts
        counts = Counter(found["found"])
        gathers = tuple(counts[f"{phase} _allgather_base_"] for phase in ("forward", "backward"))
        assert gathers == tuple(STEPS * n for n in plan.unshards), each
        reductions = len(plan.choices.units) * plan.micro_batches
        assert counts["backward _reduce_scatter_base_"] == STEPS * reductions, each
        if found["peak_bytes"]:
            predicted = plan.peak_bytes["device"]
            assert 0.97 * predicted <= found["peak_bytes"] <= plan.budgets["device"]


def _check_refusals(said: list[str]) -> None:
    assert "found 'layers.1' under fully_shard; call apply in its place, once" in said[0]
    assert "found 'layers.2' wrapped; leave that to the plan" in said[1]
    assert "found 'layers.0' in a wrapper of torch.compile; compile in place with module.compile()" in said[2]
    assert "the plan is for another model than this" in said[3]
    assert "got 'tokns', which is in no path; did you mean 'tokens'?" in said[4]
    assert said[5:7] == ["renamed", "gone"]
    assert "none called 'tokenz'; did you mean 'tokens'?" in said[7]
    assert "expected a mesh of 64 data-parallel ranks" in said[8]
    assert "got 2;" in said[8]
    assert "expected 12 bytes of parameters in group 0 (" in said[9]
    assert "found 65,536" in said[9]
    assert "found 'tokens.weight' in none" in said[10]
    assert "expected groups of parameters, got none" in said[11]
    assert "expected a plan that cuts parameters" in said[12]
    assert "expected a plan without pipeline" in said[13]
    assert "expected 2 micro-batches before a step of the optimizer, as planned, got 1" in said[14]
    assert "expected a step of the optimizer after 2 micro-batches, as planned, got one more" in said[15]


def test_checkpointing_of_transformers_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].gradient_checkpointing = True  # as gradient_checkpointing_enable() sets it
    with pytest.raises(ConfigError, match=r"found '0' with gradient_checkpointing .*gradient_checkpointing_disable"):
        _check_plain(model)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_would_be_lost_and_are_refused(register: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    getattr(model[0].weight, register)(lambda _: None)
    with pytest.raises(ConfigError, match=r"without hooks, found one on '0\.weight'.*afterwards"):
        _check_plain(model)


def test_gradients_from_before_would_be_lost_and_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigError, match=r"found one on '0\.weight' of a backward pass before.*zero_grad"):
        _check_plain(model)
    model.zero_grad()
    _check_plain(model)


def test_an_optimizer_from_before_moves_nothing_and_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = list(model.parameters())
    early, of_kept = torch.optim.SGD(before, lr=0.1), torch.optim.SGD(model[1].parameters(), lr=0.1)
    model[0].weight = nn.Parameter(torch.ones(2, 2))  # as fully_shard puts a shard there
    stop = _refuse_earlier_optimizers(before, model)
    try:
        with pytest.raises(ConfigError, match=r"made before.*shape \(2, 2\).*after lading\.apply"):
            early.step()
        of_kept.step()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    finally:
        stop()
    early.step()


@pytest.mark.long
def test_plans_are_what_they_are_for() -> None:
    """The cases differ in what they try: whole blocks and parts, all lengths of stay, several blocks in a bucket."""
    groups = [group for name in ("few", "policies") for plan in cases(name).values() for group in plan.choices.units]
    stays = {(group.reshard_after_forward, group.reshard_after_backward) for group in groups}
    assert stays == set(product((False, True), repeat=2))
    assert [group.modules for group in cases("few")["residency"].choices.units if not group.unshard_in_backward] == [
        ("tokens",)
    ]
    assert any(len(group.modules) > 1 and "layers.0" in group.modules for group in groups)
    assert any(group.modules[0].count(".") > 1 for group in groups)
    assert cases("policies")["recomputed"].choices.recomputed == ("layers.0", "layers.1", "layers.2", "layers.3")
