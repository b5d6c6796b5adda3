"""Machine files: the catalog loads and says where its numbers come from; mistakes are named; text round-trips."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.machines import unsourced

from lading.catalog.load import (
    load_machine,
    machine_from_dict,
    machine_names,
    machine_to_toml,
    save_machine,
)
from lading.errors import ConfigError, StorageError
from lading.ir.graph import OpKind
from lading.ir.machine import Curve, Machine, wires

NAMES = machine_names()
#: What the documentation promises to know.
PROMISED = (
    "a100", "a100-40gb", "a100-pcie", "apple-m1", "apple-m2", "apple-m3-max", "apple-m4", "b200", "cpu", "cpu-laptop",
    "cpu-server", "gb200", "h100", "h100-96gb", "h100-pcie", "h200", "l4", "l40s", "mi300x", "rtx3090", "rtx4090",
    "rtx5090", "rtx6000ada", "rtxa6000", "t4", "v100-16gb", "v100-32gb",
)  # fmt: skip


def as_dict(machine: Machine) -> dict[str, object]:
    return tomllib.loads(machine_to_toml(machine))


def test_the_catalog_holds_what_the_docs_say() -> None:
    assert set(PROMISED) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_catalog_machine_round_trips_and_sources_every_number(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    again = machine_from_dict(as_dict(machine), "again")
    assert again == machine
    assert again.fingerprint == machine.fingerprint
    assert unsourced(machine) == ()
    assert machine.tier("disk") is not None
    assert (machine.tier("host") is not None) == (machine.device.kind == "cuda")
    assert (machine.host_device is not None) == (machine.device.kind == "cuda")


#: GPUs whose last-level cache is a large part of what a kernel moves.
CACHED = (
    "l4",
    "l40",
    "l40s",
    "rtx2000ada",
    "rtx4000ada",
    "rtx4060",
    "rtx4070",
    "rtx4070tisuper",
    "rtx4080",
    "rtx4090",
    "rtx5080",
    "rtx5090",
    "rtx6000ada",
    "rtxpro6000",
)


def test_what_a_disk_moves_goes_through_the_link_of_its_gpu() -> None:
    gpus = [machine for machine in map(load_machine, NAMES) if machine.host_tier and machine.device.kind != "cpu"]
    assert len(gpus) > 40
    assert all([len(shared) for shared in wires(machine.tiers)] == [len(machine.tiers)] for machine in gpus)


def test_what_a_cache_holds_is_faster_than_memory() -> None:
    cached, plain = (load_machine(name).device for name in ("rtx4090", "rtx3090"))
    for size, faster in ((1e6, 2.0), (16e6, 1.5), (1e9, 0.99)):
        shares = [d.rates["elementwise"].at(size) / d.memory_bandwidth_bytes_per_s for d in (cached, plain)]
        assert shares[0] / shares[1] > faster
    assert cached.rates["elementwise"].at(1e9) < cached.memory_bandwidth_bytes_per_s


@pytest.mark.parametrize("name", NAMES)
def test_every_catalog_machine_has_a_rate_for_every_class(name: str) -> None:
    device = load_machine(name).device
    computed = {OpKind.MATMUL, OpKind.CONVOLUTION, OpKind.STEP, OpKind.COLLECTIVE, OpKind.VIEW}
    assert {kind.value for kind in OpKind if kind not in computed} <= device.rates.keys()
    assert device.product_efficiency is not None
    assert max(device.product_efficiency.rate) < (1.2 if name.startswith("rtx") else 1), "consumer boards clock higher"
    assert device.peak_flops_per_s["float32"] > 0
    assert all(
        max(curve.rate) <= device.memory_bandwidth_bytes_per_s * (3 if device.kind == "cpu" or name in CACHED else 1)
        for rate, curve in device.rates.items()
        if not rate.startswith(("attention", "product"))
    )


MINE = """
name = "mine"
date = "2026-11-21"
source = "my desktop"
extends = "rtx4090"

[device]
memory_bandwidth_bytes_per_s = 2.016e12

[[tiers]]
name = "host"
capacity_bytes = 100_000_000_000
"""


def test_a_file_extends_a_machine_of_the_catalog(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    mine, base = load_machine(path), load_machine("rtx4090")
    assert mine.name == "mine"
    assert mine.tier("host") == dataclasses.replace(base.tiers[0], capacity_bytes=100_000_000_000)
    assert mine.tier("disk") == base.tier("disk")
    assert mine.device.peak_flops_per_s == base.device.peak_flops_per_s
    # Shares are of the file's own bandwidth.
    assert mine.device.rates["copy"].at(1e9) == pytest.approx(2 * base.device.rates["copy"].at(1e9))
    assert mine.device.optimizer_elements_per_s == pytest.approx(2 * base.device.optimizer_elements_per_s)
    # What it replaced has lost its source; a tier's is covered by the tier's.
    assert unsourced(mine) == ("device.memory_bandwidth_bytes_per_s",)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('extends = "rtx4090"', 'extends = "rtx4009"', "extends: expected one of .*rtx4090.*, got 'rtx4009'"),
        ('extends = "rtx4090"', "extends = 3", "unknown key 'extends'"),
        ('extends = "rtx4090"', 'extends = "desktop"', 'product_best: .* found none: .* extend a machine, as "cpu"'),
        ("[device]", "[shares]\nspeed = 2\n[device]", "unknown key 'speed' in \\[shares\\]"),
        ("[device]", "[shares]\nproduct_best = -1\n[device]", "shares.product_best: expected a finite number > 0"),
        ("[device]", "[shares.rates]\ncopy = 3\n[device]", "shares.rates.copy: expected a table of size and rate"),
        ("2.016e12", "true", "memory_bandwidth_bytes_per_s: expected a finite number > 0, got True"),
    ],
)
def test_a_wrong_base_or_share_is_named(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE.replace(old, new))
    with pytest.raises(ConfigError, match=words):
        load_machine(path)


def test_the_host_of_a_gpu_machine_reads_strictly() -> None:
    data = as_dict(load_machine("h100"))
    data["host_device"].update(num_threads=0)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"host_device\.num_threads must be positive"):
        machine_from_dict(data, "f")


def test_a_plan_may_carry_the_machine_as_json() -> None:
    machine = load_machine("h100")
    assert machine_from_dict(json.loads(json.dumps(dataclasses.asdict(machine))), "plan") == machine


def test_a_number_without_a_source_is_found() -> None:
    machine = load_machine("cpu")
    kept = {k: v for k, v in machine.sources.items() if not k.startswith("tiers.disk")}
    missing = unsourced(dataclasses.replace(machine, sources=kept))
    assert "tiers.disk.read_bytes_per_s" in missing
    assert all(key.startswith("tiers.disk.") for key in missing)


def test_a_misspelt_key_is_named_with_the_nearest(tmp_path: Path) -> None:
    text = machine_to_toml(load_machine("cpu")).replace("memory_bytes", "memory_bites")
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.toml.*'memory_bites'.*did you mean 'memory_bytes'"):
        load_machine(path)


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        load_machine("h1000")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["device"].pop("op_overhead_s"), "missing key 'op_overhead_s' in \\[device\\]"),
        (lambda d: d["device"].update(memory_bytes="80GB"), "device.memory_bytes: expected an integer, got str"),
        (lambda d: d["device"].update(memory_bytes=True), "device.memory_bytes: expected an integer"),
        (lambda d: d["device"].update(op_overhead_s=float("nan")), "device.op_overhead_s: expected a finite number"),
        (lambda d: d["device"].update(kind="tpu"), "f: \\[device\\] device kind must be"),
        (lambda d: d["device"]["rates"]["copy"].update(rate=[1.0]), "\\[device.rates.copy\\] a curve needs as many"),
        (lambda d: d["tiers"][0].update(read_bytes_per_s=0), "tier disk: read_bytes_per_s must be positive"),
        (lambda d: d.update(tiers={}), "tiers: expected an array, got dict"),
        (lambda d: d.update(device=3), "expected a table, got int"),
    ],
)
def test_wrong_values_name_the_key_and_the_file(change: object, words: str) -> None:
    data = as_dict(load_machine("cpu"))
    change(data)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=words) as raised:
        machine_from_dict(data, "f")
    assert str(raised.value).startswith("f: ")


def test_broken_toml_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("name = ")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load_machine(path)


def test_saving_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text("old")
    save_machine(load_machine("cpu"), path)
    assert load_machine(path) == load_machine("cpu")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StorageError, match="make its folder first"):
        save_machine(load_machine("cpu"), tmp_path / "missing" / "m.toml")


positive = st.floats(min_value=1e-300, max_value=1e300)


@given(text=st.text(st.characters(codec="utf-8")), number=positive, sizes=st.lists(positive, min_size=1, unique=True))
def test_any_text_and_number_survives_toml(text: str, number: float, sizes: list[float]) -> None:
    base = load_machine("cpu")
    curve = Curve(size=tuple(sorted(sizes)), rate=tuple(sizes))
    device = dataclasses.replace(base.device, op_overhead_s=number, rates={text: curve}, product_efficiency=None)
    machine = dataclasses.replace(base, name=text, device=device, sources={text: text}, tiers=())
    assert machine_from_dict(as_dict(machine), "f") == machine
