"""Layouts print and parse as one line; what cannot be is refused with the rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lading.errors import ConfigError
from lading.ir.layout import PRECISIONS, RECOMPUTES, Layout, parse_layout
from lading.ir.stack import Stack

powers = st.sampled_from((1, 2, 4, 8))
layouts = st.builds(
    Layout,
    dp=powers,
    tp=powers,
    cp=powers,
    pp=st.integers(1, 20),
    vpp=st.integers(1, 4),
    sp=st.booleans(),
    zero=st.sampled_from((0, 1, 2, 3)),
    cp_comm=st.sampled_from(("ring", "all_gather", "all_to_all")),
    micro_batch=st.integers(1, 9),
    recompute=st.sampled_from(RECOMPUTES),
    recompute_layers=st.integers(-1, 5),
    recompute_modules=st.sampled_from(((), ("core_attn",), ("layernorm", "act"))),
    precision=st.sampled_from(PRECISIONS),
)


@given(layouts)
def test_a_layout_parses_back(layout: Layout) -> None:
    assert parse_layout(str(layout)) == layout
    assert layout.devices == layout.dp * layout.tp * layout.cp * layout.pp


def test_micro_batches_of_a_replica() -> None:
    layout = parse_layout("dp4,mb2,gb64")
    assert layout.micro_batches == 8
    assert parse_layout("dp4,cp2,zero1,shard4").sharding_ranks == 4
    assert parse_layout("dp4,cp2").sharding_ranks == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp8,px4", "'px4'"),
        ("tp0", "tp must be >= 1"),
        ("zero4", "zero must be 0, 1, 2 or 3"),
        ("dp3,mb2,gb16", "no multiple"),
        ("dp2,ep4", "do not divide"),
        ("dp4,zero3,shard3", "expected shard to divide dp 4 x cp 1, got 3"),
        ("tp8,dp2,tp4", "expected tp once, got it twice in tp8,dp2,tp4"),
        ("zero1,bf16,fp8", "expected precision once"),
        ("dp4,shard2", "expected zero1, zero2 or zero3 beside it, got dp4,shard2"),
        ("recompute=some", "recompute must be one of"),
        ("recompute_layers=x", "'recompute_layers=x'"),
    ],
)
def test_what_cannot_be(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_layout(text)


def test_ranks_lie_along_axes() -> None:
    layout = parse_layout("dp4,zero3,shard2,pp2")
    assert layout.axes == {"pp": 2, "replicate": 2, "shard": 2, "cp": 1, "tp": 1}
    assert layout.place(6) == {"pp": 1, "replicate": 1, "shard": 0, "cp": 0, "tp": 0}
    assert [layout.replica(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert layout.group(6, "shard") == (6, 7)
    assert layout.group(6, "replicate") == (4, 6)
    assert layout.group(6, "pp") == (2, 6)
    assert layout.group(6, "pp/shard") == (2, 3, 6, 7)
    assert layout.across("shard", "pp", "tp") == (("over", "pp/shard"), ("ranks", 4), ("of", 8))
    assert [parse_layout(text).shards for text in ("dp2,cp2,zero1", "dp2,zero1", "dp2,cp2")] == [4, 2, 1]


def test_near_words_are_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'interleaved'"):
        parse_layout("interleavd")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fusion": "some"}, "fusion must be one of"),
        ({"attention": "flash9"}, "attention must be one of"),
        ({"launch_s": -1.0}, "launch_s must be >= 0"),
        ({"hidden": {"tp": 1.5}}, "hidden in"),
        ({"imbalance": 0.5}, "imbalance must be >= 1"),
    ],
)
def test_stacks_that_cannot_be(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Stack(name="s", title="t", **settings)  # type: ignore[arg-type]


def test_factors_of_a_running_step() -> None:
    stack = Stack(name="s", title="t", in_situ={"hopper.products": 1.2})
    assert stack.in_situ_of("hopper", "products") == 1.2
    assert stack.in_situ_of("hopper", "attention") == 1.0
    assert stack.in_situ_of("ampere", "products") == 1.0


@pytest.mark.parametrize(
    "text",
    ["dp8,zero3,offload=parameters", "dp2,offload=optimizer+activations,offload_layers=20,offload_to=disk"],
)
def test_what_lies_behind_the_device_round_trips(text: str) -> None:
    layout = parse_layout(text)
    assert str(layout) == text
    assert layout.updates_on_host
    assert not parse_layout("offload=activations").updates_on_host


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("offload=weights", "offload must be of parameters, optimizer, activations, joined by '[+]', got 'weights'"),
        ("zero2,offload=parameters", "expected zero3, got zero2"),
        ("offload=optimizer,offload_layers=3", "expected offload=activations"),
        ("offload_to=disk", "expected offload= beside it"),
        ("offload=activations,offload_layers=-2", "offload_layers must be >= 0, got -2"),
    ],
)
def test_offloads_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_layout(text)


@pytest.mark.parametrize(("text", "remedy"), [("tp3", "64 is no multiple of 3"), ("dp3,tp2", "leave dp out")])
def test_a_layout_of_other_devices_says_what_to_change(text: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"expected a layout of 64 devices, got {text}.*{remedy}"):
        parse_layout(text, 64)
