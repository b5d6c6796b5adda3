"""Every stack of the catalog loads; a wrong file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lading.catalog.stacks import DEFAULT, stack_by_name, stack_names
from lading.errors import ConfigError
from lading.ir.stack import NEVER_SEEN


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
