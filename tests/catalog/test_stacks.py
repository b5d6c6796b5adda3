"""Every stack of the catalog loads; a wrong file is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lading.catalog.stacks import DEFAULT, stack_by_name, stack_names
from lading.clusters import space_of
from lading.errors import ConfigError
from lading.ir.layout import parse_layout
from lading.ir.request import Request
from lading.ir.stack import NEVER_SEEN
from lading.sim.simulate import simulate


@pytest.mark.parametrize("name", stack_names())
def test_each_loads(name: str) -> None:
    stack = stack_by_name(name)
    assert stack.name == name
    assert stack.title


def test_there_is_a_default() -> None:
    assert DEFAULT in stack_names()


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="expected a software stack"):
        stack_by_name("no-such-stack")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('title = "t"\nspeed = 3', "unknown keys speed"),
        ("title = ", "expected a software stack in TOML"),
        ('title = "t"\n[spread]\nampere = 2.0', "spread"),
        ('title = "t"\nfusion = "x"', "fusion"),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "stack.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        stack_by_name(str(path))


def test_factors_that_a_stack_does_not_give_are_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('title = "t"\n[in_situ]\n"ampere.products" = 1.5\n')
    mine, default = stack_by_name(str(path)), stack_by_name(DEFAULT)
    assert mine.in_situ_of("ampere", "products") == 1.5
    assert mine.in_situ_of("hopper", "attention") == default.in_situ_of("hopper", "attention") != 1.0


def test_a_stack_whose_steps_were_seen_has_a_narrower_interval() -> None:
    seen = stack_by_name("megatron-2022")
    assert seen.spread_on("ampere") < 0.15 < NEVER_SEEN == seen.spread_on("hopper")
    assert stack_by_name(DEFAULT).spread_on("ampere") == NEVER_SEEN


def test_a_stack_says_what_runs_beside_computing() -> None:
    assert stack_by_name("torchtitan-compile").sentence() == (
        "software stack torchtitan-compile (torchtitan, each block compiled); beside computing: reducing gradients, "
        "gathering cut parameters; waited for: tensor parallel, context parallel, expert parallel (alltoall), sends "
        "of a pipeline with one chunk a rank"
    )
    said = stack_by_name("megatron-bridge").sentence()
    assert "60% of tensor parallel, 90% of context parallel, sends of a pipeline; waited for: expert parallel" in said
    assert "beside" not in stack_by_name("megatron-2021").sentence()


def test_deepseek_v3_reaches_the_published_rate_with_its_own_software() -> None:
    """180,000 H800 hours for 10^12 tokens (arXiv 2412.19437, table 1 and 3.2)."""
    rates: list[float] = []
    peaks: list[float] = []
    for stack in ("default", "deepseek-v3"):
        request = Request(model="deepseek-v3", machine="h800", seq_len=4096, stack=stack)
        space = space_of(replace(request, devices=2048, global_batch=15360))
        modules = "recompute=selective,recompute_modules=layernorm+moe_act+mla_up_proj"
        layout = parse_layout(f"dp128,pp16,ep64,vpp2,zero1,mb1,gb15360,dualpipe-v,fp8,{modules}")
        simulated = simulate(replace(space.request, layout=layout), space.table)
        rates.append(15360 * 4096 / 2048 / simulated.step.step_s)
        peaks.append(simulated.peak_bytes / 2**30)
    published = 1e12 / 180_000 / 3600
    assert rates[0] < 0.6 * published
    assert rates[1] == pytest.approx(published, rel=0.1)
    assert peaks[1] < 60  # of 80; what products read again is in 8 bits there
