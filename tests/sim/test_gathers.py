"""Parameters gathered bucket by bucket: against steps of whole blocks, worked-out times and bytes, what must hold."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
from tests.sim.sequence import sequence_of

from lading.clusters import step_of
from lading.errors import ConfigError
from lading.ir.plan import UnitResidency
from lading.ir.request import Request
from lading.sim.buckets import Bucket, Costs, names_of
from lading.sim.gathers import gathered_step
from lading.sim.modules import Modules, modules_of
from lading.sim.simulate import simulate


@cache
def modules(model: str = "llama3-8b", layout: str = "zero3", devices: int = 64, stack: str = "default") -> Modules:
    return modules_of(*step_of(question(model, layout, devices, stack)))


def question(model: str, layout: str, devices: int, stack: str) -> Request:
    return Request(model=model, machine="h100", devices=devices, layout=layout, seq_len=4096, stack=stack)


def blocks(of: Modules, keep: UnitResidency = UnitResidency.RELEASE) -> list[Bucket]:
    """A bucket for each block; the last is not released before backward."""
    found: list[Bucket] = []
    for place in range(len(of.order)):
        own = [n for n, (at, _) in enumerate(of.atoms) if at == place]
        found.append(Bucket(own[0], own[-1], keep))
    if keep is UnitResidency.RELEASE:
        found[-1] = dataclasses.replace(found[-1], keep=UnitResidency.BACKWARD)
    return found


@pytest.mark.parametrize(
    ("model", "layout", "stack"),
    [
        ("llama3-8b", "zero3", "torchtitan-compile"),
        ("llama3-8b", "zero3,gb512", "torchtitan-eager"),
        ("llama3-70b", "zero3,tp8,sp,recompute=full", "torchtitan-compile"),
        ("gpt3-6.7b", "zero3", "default"),
        ("qwen3-30b-a3b", "zero3,ep8", "default"),
        ("llama3-8b", "zero3,gb256,recompute=full,offload=parameters", "torchtitan-eager"),
    ],
)
def test_whole_blocks_take_what_the_step_does(model: str, layout: str, stack: str) -> None:
    of = modules(model, layout, 64, stack)
    simulated = simulate(of.request, step_of(question(model, layout, 64, stack))[1])
    found = gathered_step(Costs(of), blocks(of))
    assert found.step_s == pytest.approx(simulated.step.step_s, rel=0.002)
    assert found.peak_bytes == pytest.approx(simulated.peak_bytes, rel=0.01)
    elements = of.elements(range(len(of.atoms)))
    assert elements == simulated.step.stages[0].elements


def test_gathers_by_how_long_they_stay() -> None:
    of = modules(layout="zero3,gb512")
    costs, count, micro_batches = Costs(of), len(of.order), 8
    released, kept, between, stays = (gathered_step(costs, blocks(of, keep)) for keep in UnitResidency)
    assert sum(released.forward) == micro_batches * count
    assert sum(released.backward) == micro_batches * (count - 1)
    assert (sum(kept.forward), sum(kept.backward)) == (micro_batches * count, 0)
    assert (sum(between.forward), sum(between.backward)) == (count, micro_batches * count)
    assert (sum(stays.forward), sum(stays.backward)) == (count, 0)
    assert stays.step_s < kept.step_s < released.step_s
    assert released.peak_bytes < min(kept.peak_bytes, stays.peak_bytes)


def test_what_is_left_out_is_as_what_is_listed() -> None:
    of = modules(layout="zero3,gb640")
    for keep in UnitResidency:
        few, all_of_them = (gathered_step(Costs(of), blocks(of, keep), listed=n) for n in (4, 10))
        assert few.step_s == pytest.approx(all_of_them.step_s, rel=1e-9)
        assert (few.forward, few.backward) == (all_of_them.forward, all_of_them.backward)
        assert few.exposed_s == pytest.approx(all_of_them.exposed_s)
        assert few.network_s == pytest.approx(all_of_them.network_s)
        assert few.peak_bytes == all_of_them.peak_bytes


def test_bytes_at_the_turn_worked_out() -> None:
    """All stays gathered: at the turn that is all parameters, all activations, and the logits in their forms."""
    of = modules("llama3-8b", "zero3", 64)
    found = gathered_step(Costs(of), blocks(of, UnitResidency.STEP))
    parameters = 2 * sum(of.elements(range(len(of.atoms))).values())
    saved = sum(of.blocks[block].saved_bytes for block, _ in of.order)
    assert sum(found.peak.gathered.values()) == parameters
    assert found.peak_bytes >= parameters + saved + of.state_bytes
    moment = found.peak
    there = [moment.gathered, moment.coming, moment.gradients, moment.reduced]
    assert (
        sum(sum(sizes.values()) for sizes in there) + moment.activation_bytes + moment.state_bytes == found.peak_bytes
    )


def test_only_what_runs_again_is_gathered_once_more() -> None:
    """Under a stack whose recomputing releases parameters, of 32 blocks 20 run again: two gathers in their backward."""
    of = modules("llama3-8b", "zero3,recompute=full,recompute_layers=20", 64, "deepspeed-zero3")
    found = gathered_step(Costs(of), blocks(of))
    assert found.backward == (1, *[2] * 20, *[1] * 12, 0)


def test_names_are_the_fewest_modules() -> None:
    of = modules()
    assert names_of(of, Bucket(0, 0)) == ("tokens",)
    assert names_of(of, Bucket(1, 9)) == ("layers.0",)
    assert names_of(of, Bucket(0, 5)) == ("tokens", "layers.0.attn_norm", "layers.0.attn")
    assert names_of(of, Bucket(6, 18)) == ("layers.0.mlp_norm", "layers.0.mlp", "layers.1")
    assert names_of(of, Bucket(3, 3)) == ("layers.0.attn.wk",)
    last = len(of.atoms) - 1
    assert names_of(of, Bucket(last - 1, last)) == ("norm", "head")


def test_asking_earlier_is_never_slower_and_takes_memory() -> None:
    of = modules("llama3-8b", "zero3", 512)  # the network is what lasts
    costs = Costs(of)
    early = [dataclasses.replace(bucket, ahead_forward=2, ahead_backward=2) for bucket in blocks(of)]
    one, two = gathered_step(costs, blocks(of)), gathered_step(costs, early)
    assert two.step_s <= one.step_s * (1 + 1e-9)
    assert two.peak_bytes >= one.peak_bytes


@pytest.mark.parametrize("keep", UnitResidency)
def test_gathers_are_those_a_rank_issues(keep: UnitResidency) -> None:
    """As many of the same bytes as the sequence has that is compared with FSDP2's own."""
    of = modules("llama3-8b", "zero3,gb192", 64, "torchtitan-compile")
    issued = sequence_of(
        of.request, step_of(question("llama3-8b", "zero3,gb192", 64, "torchtitan-compile"))[1], keep=keep
    )
    collectives = [each.collective for each in issued if each.collective and each.collective.axis == "dp"]
    costs, plan = Costs(of), blocks(of, keep)
    found = gathered_step(costs, plan)
    gathers = [costs.of(bucket).gathered for bucket in plan]
    planned = sum((f + b) * size for f, b, size in zip(found.forward, found.backward, gathers, strict=True))
    assert sum(found.forward) + sum(found.backward) == sum(each.op == "all_gather" for each in collectives)
    assert planned == sum(each.size_bytes for each in collectives if each.op == "all_gather")
    reduced = 3 * sum(costs.of(bucket).reduced for bucket in plan)
    assert reduced == sum(each.size_bytes for each in collectives if each.op == "reduce_scatter")


def test_refused() -> None:
    of = modules()
    with pytest.raises(ConfigError, match="each of 291 atoms once"):
        gathered_step(Costs(of), blocks(of)[:-1])
    for layout, message in (("zero2", "expected a layout with zero3"), ("zero3,pp2", "without pp")):
        with pytest.raises(ConfigError, match=message):
            modules(layout=layout)
