"""Updates on the host: bytes by what is kept, resources by the job's ranks on a node, the fit by what predicts."""

from __future__ import annotations

import dataclasses
from statistics import median

import pytest
from benchmarks.calibrate.offload import ROWS

from lading.catalog.load import load_machine
from lading.catalog.stacks import stack_by_name
from lading.cost.hosting import copy_s, host_share, update_bytes, update_s

DEFAULT = stack_by_name("default")


def test_published_updates_are_priced_by_the_code_that_predicts() -> None:
    """The fit is the median of the usual launches, so half of them take longer than predicted and half less."""
    usual = [row.share for row in ROWS if not row.tuned]
    assert median(usual) == pytest.approx(host_share(DEFAULT), rel=0.02)
    for row in ROWS:
        machine = load_machine(row.machine).with_job(row.ranks)
        seconds = update_s(row.elements, 0.0, machine, machine.host_tier, DEFAULT)
        assert seconds / row.seconds == pytest.approx(row.share / host_share(DEFAULT))
        assert row.tuned or 1 / 3.2 < seconds / row.seconds < 3.2, row.name


def test_a_host_is_divided_by_the_ranks_of_the_job_and_not_by_its_slots() -> None:
    server = load_machine("a100")
    assert server.node_devices == 8
    assert server.with_job(8) == server
    alone, two = server.with_job(1), server.with_job(2)
    whole = [update_s(1e9, 12, machine, "host", DEFAULT) for machine in (server, two, alone)]
    assert whole[0] == pytest.approx(4 * whole[1])
    assert whole[0] == pytest.approx(8 * whole[2])
    host, disk = alone.tier("host"), alone.tier("disk")
    own = server.tier("disk")
    assert host is not None
    assert disk is not None
    assert own is not None
    assert host.capacity_bytes == 8 * 256e9
    assert host.read_bytes_per_s == 2.5e10, "a copy goes over the bus of its device"
    assert disk.capacity_bytes == 8 * own.capacity_bytes
    assert disk.read_bytes_per_s == 2.5e10, "eight drives behind one bus"
    desktop = load_machine("rtx4090")
    assert desktop.node_devices == 1
    assert update_s(1e9, 12, desktop.with_job(4), "host", DEFAULT) == pytest.approx(
        4 * update_s(1e9, 12, desktop, "host", DEFAULT)
    )
    assert copy_s(1e9, desktop.with_job(4), "host", out=False) == pytest.approx(1 / 12.5, rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "size_bytes"),
    [
        ({"parameters_dtype": "float32", "master_weights": False}, 28),
        ({}, 34),
        ({"gradient_dtype": "bfloat16"}, 32),
        ({"gradient_dtype": "bfloat16", "moments_dtype": "bfloat16", "master_weights": False}, 14),
        ({"moments": 0, "master_weights": False, "gradient_dtype": "bfloat16"}, 6),
    ],
)
def test_bytes_of_an_update_follow_from_what_is_kept(settings: dict[str, object], size_bytes: int) -> None:
    stack = dataclasses.replace(DEFAULT, **{"gradient_dtype": "float32", "parameters_dtype": "", **settings})
    assert update_bytes(stack) == size_bytes


def test_an_update_takes_what_its_implementation_reaches_of_memory() -> None:
    machine = load_machine("h100")

    def seconds(**switches: object) -> float:
        return update_s(1e9, 12, machine, "host", dataclasses.replace(DEFAULT, **switches))

    fused = seconds(host_update="fused")
    assert seconds(host_update="loop") == pytest.approx(4.7 * fused)
    assert 4 < seconds(host_update="cpu-adam") / fused < 6
    assert seconds(host_update="loop", host_optimizer=0.35) == pytest.approx(2 * fused), "a share that is stated counts"
