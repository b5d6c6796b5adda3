"""Budgets of tiers that no machine or disk can give are refused, or said where the disk is not here."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from lading.config import RunConfig, load_run
from lading.errors import ConfigError
from lading.ir.machine import Machine
from lading.prepare import plan_run
from lading.runtime.host import host_id, usable_bytes
from lading.tier_budgets import asked_limits, limit_notes, run_limits
from tests.machines import machine_with_host, small_machine
from tests.runs import OVERHEAD_BYTES, write_run

TERA = 10**12


def here(machine: Machine) -> Machine:
    return dataclasses.replace(machine, host_id=host_id())


def asked(root: Path, *settings: str) -> RunConfig:
    return load_run(write_run(root), settings)


def test_a_disk_budget_above_the_whole_disk_is_refused_on_this_host(tmp_path: Path) -> None:
    machine = here(small_machine())
    total = shutil.disk_usage(tmp_path).total
    run = asked(tmp_path, f"memory.disk_budget={total + TERA}")
    with pytest.raises(ConfigError, match=r"memory\.disk_budget: expected at most .* all that the disk of .* has, got"):
        plan_run(run, machine)
    half = dataclasses.replace(run, memory=dataclasses.replace(run.memory, disk_budget=total // 2 + TERA // 1000))
    if total // 2 + TERA // 1000 <= total:
        assert run_limits(half, machine)["disk"] == total // 2 + TERA // 1000
    with pytest.raises(ConfigError, match="for each of 2 ranks"):
        run_limits(half, machine, 2)


def test_a_disk_budget_above_what_is_free_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(total=10 * TERA, free=TERA)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    run, machine = asked(tmp_path, f"memory.disk_budget={2 * TERA}"), here(small_machine(overhead_bytes=OVERHEAD_BYTES))
    prepared = plan_run(run, machine)
    (sentence,) = prepared.notes
    assert not any("disk_budget" in text for text in prepared.plan.assumptions)  # free space is no part of a plan
    assert sentence.startswith("memory.disk_budget is ")
    assert "a run that finds less than its plan takes is refused" in sentence
    assert limit_notes(run, machine, {"disk": TERA // 2}) == ()
    assert limit_notes(run, machine, {"disk": TERA // 2}, 4) != ()


def test_a_disk_of_another_machine_is_compared_with_its_file(tmp_path: Path) -> None:
    machine = small_machine(overhead_bytes=OVERHEAD_BYTES)
    run = asked(tmp_path, f"memory.disk_budget={9 * TERA}")
    assert any("that test says of its disk" in text for text in plan_run(run, machine).notes)
    assert limit_notes(run, machine, {"disk": machine.tiers[0].capacity_bytes}) == ()


def test_more_memory_than_a_machine_has_is_refused(tmp_path: Path) -> None:
    machine = machine_with_host()
    most = machine.tiers[0].capacity_bytes
    run = asked(tmp_path, f"memory.budgets.host={most + 1}")
    with pytest.raises(ConfigError, match=rf"budgets\.host: expected at most .*\({most} bytes\), all that test has"):
        run_limits(run, machine)
    with pytest.raises(ConfigError, match="for each of 2 ranks"):
        run_limits(asked_again(run, most), machine, 2)
    assert run_limits(asked_again(run, most), machine)["host"] == most
    with pytest.raises(ConfigError, match=r"budgets\['host'\]: expected at most .* all that test has, got"):
        asked_limits(machine, None, {"host": most + 1})


def asked_again(run: RunConfig, host: int) -> RunConfig:
    return dataclasses.replace(run, memory=dataclasses.replace(run.memory, budgets={"host": host}))


def test_a_budget_of_memory_may_be_all_of_the_host_and_all_of_a_node(tmp_path: Path) -> None:
    """A probe writes less than all, and a catalog the part of one device."""
    machine = machine_with_host()
    part = machine.tiers[0].capacity_bytes
    run = asked(tmp_path, f"memory.budgets.host={2 * part}")
    assert run_limits(run, dataclasses.replace(machine, node_devices=4))["host"] == 2 * part
    whole = asked_again(run, usable_bytes())
    small = dataclasses.replace(machine, tiers=(dataclasses.replace(machine.tiers[0], capacity_bytes=part // 2),))
    assert run_limits(whole, here(small))["host"] == usable_bytes()
    with pytest.raises(ConfigError, match=r"budgets\.host: expected at most"):
        run_limits(asked_again(run, max(usable_bytes(), part) + 1), here(machine))


def test_settings_of_a_swap_file_that_a_machine_has_not(tmp_path: Path) -> None:
    machine = small_machine(disk=False)
    run = asked(tmp_path, "memory.disk_budget=1GB")
    with pytest.raises(ConfigError, match=r"memory\.disk_budget: expected a machine with a tier of kind 'file', found"):
        run_limits(run, machine)
    none = dataclasses.replace(run, memory=dataclasses.replace(run.memory, disk_budget=0, folder=str(tmp_path)))
    assert run_limits(none, machine) == {}
    assert limit_notes(none, machine, {}) == (
        "memory.folder does nothing, as test has no swap file without a location of its own",
    )
