"""Every stack of the catalog loads; a wrong file is refused."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import lading.catalog.stacks
from lading.catalog.stacks import DEFAULT, stack_by_name, stack_names
from lading.clusters import space_of, step_of
from lading.errors import ConfigError
from lading.ir.layout import parse_layout
from lading.ir.request import Request
from lading.ir.stack import FITTED, GUESSED, KINDS, SWITCHES
from lading.sim.simulate import simulate

FOLDER = Path(lading.catalog.stacks.__file__).parent / "stacks"


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
        ('title = "t"\n[in_situ]\nampere = 20.0', "in_situ"),
        ('title = "t"\nlike = "none"', "like: expected a software stack"),
        ('title = "t"\nkind = "none"', "kind"),
        ('title = "t"\nfusion = "x"', "fusion"),
        ('title = "t"\nreduces_whole = 4', "reduces_whole must be a stage of ZeRO"),
        ('title = "t"\ngather_rank_s = -1.0', "gather_rank_s must be >= 0"),
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


def test_a_factor_of_an_architecture_holds_for_all_causes() -> None:
    stack = replace(stack_by_name(DEFAULT), in_situ={"ampere": 1.2, "ampere.attention": 1.4})
    assert [stack.in_situ_of("ampere", cause) for cause in ("products", "attention")] == [1.2, 1.4]
    assert stack.in_situ_of("hopper", "products") == 1.0


def test_how_software_is_known() -> None:
    seen = stack_by_name("megatron-2022")
    assert (seen.evidence_on("ampere"), seen.evidence_on("hopper")) == (FITTED, SWITCHES)
    assert [stack_by_name(kind).evidence_on("ampere") for kind in (*KINDS, DEFAULT)] == [GUESSED] * 5


@pytest.mark.parametrize("name", stack_names())
def test_each_switch_has_a_source(name: str) -> None:
    known = {"title", "kind", "framework", "fitted", "in_situ", "sources", "like"}
    given = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    assert not given.keys() - known - given["sources"].keys()
    assert not given["sources"].keys() - given.keys() - {"in_situ"}


def test_a_class_has_older_defaults_where_it_differs_from_them() -> None:
    now, then = (stack_by_name(f"megatron-like{year}") for year in ("", "-2022"))
    assert (now.attention, then.attention) == ("cudnn", "unfused")
    assert then.vocabulary_padding == now.vocabulary_padding == 128
    assert (then.hidden, then.sources["hidden"] != now.sources["hidden"]) == ({}, True)


def test_switches_set_behind_a_name() -> None:
    stack = stack_by_name("megatron-core,attention=flash2,overlap_grad_reduce=true,hidden.tp=0.6,launch_s=9e-6")
    assert (stack.attention, stack.overlap_grad_reduce, stack.hidden["tp"], stack.launch_s) == (
        "flash2",
        True,
        0.6,
        9e-6,
    )
    assert stack.name.startswith("megatron-core,attention=flash2")
    assert stack.sources["attention"] == "set by the user"
    assert stack.evidence_on("blackwell") == FITTED


@pytest.mark.parametrize("words", ["gelu+rope", "[gelu+rope]"])
def test_a_switch_that_is_a_list_is_set_in_plain_words(words: str) -> None:
    assert stack_by_name(f"eager-torch,unfused={words}").unfused == ("gelu", "rope")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("atention=flash2", "did you mean 'attention'"),
        ("attention", "KEY=VALUE"),
        ("attention=flash2,attention=flash3", "expected 'attention' once, got it twice"),
        ("hidden.ttp=0.5", "hidden: expected axes of tp, cp, ep and pp, got 'ttp'"),
        ("attention=flash9", "attention must be one of"),
        ("launch_s=quick", "launch_s: expected float"),
        ("hidden=1", "expected a switch"),
        ("hidden.tp=2", "hidden in"),
        ("name=x", "expected a switch"),
    ],
)
def test_switches_that_are_not(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        stack_by_name(f"megatron-core,{setting}")


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


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("gathers", [2, 3])
def test_parameters_gathered_while_nothing_is_computed_take_longer(gathers: int, reduces: bool) -> None:
    """Also where recomputing releases them again, in whose list the releases once stood on another stream."""
    asked = Request(
        model="llama2-7b", machine="a100", layout="dp16,zero3,gb32,recompute=full", seq_len=2048, stack=DEFAULT
    )
    request, table = step_of(asked)
    plain = replace(request.stack, gathers=gathers, overlap_grad_reduce=reduces)
    beside, alone = (
        simulate(replace(request, stack=stack), table).step.step_s
        for stack in (plain, replace(plain, overlap_param_gather=False))
    )
    assert alone > beside
