"""What seconds of collectives take for granted is said, for the links that a job uses and no others."""

from __future__ import annotations

import pytest

from lading.catalog.load import load_machine
from lading.catalog.networks import with_network
from lading.cost.collective import assumed_of_links
from lading.ir.layout import parse_layout


@pytest.mark.parametrize(
    ("name", "layout", "said"),
    [
        ("h100", "dp1", ()),
        ("h100", "tp8", ()),
        ("h800", "tp8,dp2", ("eight NDR InfiniBand NICs",)),
        ("a100", "tp8,dp4", ("eight HDR InfiniBand NICs", "0.5% of its rate")),
        ("a100", "dp16,ep16", ("eight HDR InfiniBand NICs", "all-to-alls reach 75%")),
        ("h100", "tp8,pp2", ("eight NDR InfiniBand NICs", "sends reach 75%")),
        ("gb200", "tp4,dp16", ("nvlink: efficiency as of eight B200",)),
        ("rtx4090", "dp2", ("through host memory",)),
    ],
)
def test_what_a_job_uses_is_said(name: str, layout: str, said: tuple[str, ...]) -> None:
    found = assumed_of_links(parse_layout(layout), load_machine(name))
    assert len(found) == len(said)
    assert all(part in text for part, text in zip(said, found, strict=True))


def test_a_stated_network_takes_the_place_of_the_assumed_one() -> None:
    layout = parse_layout("tp8,dp2")
    machine = load_machine("a100")
    assert assumed_of_links(layout, with_network(machine, "8x HDR InfiniBand 200 Gb/s per node")) == ()
    (text,) = assumed_of_links(layout, with_network(machine, "4x Omni-Path 100 Gb/s per node"))
    assert "a hop of 5 us" in text
