"""Small data types: timelines, curves, units, tensors, graphs."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.machines import machine_with_host, small_machine
from tests.programs import GraphBuilder

from lading.catalog.load import machine_from_dict, machine_to_toml
from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES, Literal, Op, OpKind, Phase, Ref, Role, Tensor, map_refs, refs, rename_op
from lading.ir.machine import Curve, Processes
from lading.ir.program import LINE_BYTES, PAGE_BYTES, slot_bytes
from lading.ir.timeline import Event, MemorySample, Timeline
from lading.units import GiB, KiB, MiB, format_bytes, format_flops, format_seconds, parse_bytes

positive = st.floats(1e-3, 1e12)


def test_timeline_round_trip_and_sums(tmp_path: Path) -> None:
    events = (Event(0, "compute", 0, 0.0, 1.0), Event(0, "disk_read", 1, 0.5, 3.0), Event(0, "compute", 2, 3.0, 3.25))
    memory = (
        MemorySample(0.0, "device", {"parameter": 3}),
        MemorySample(1.0, "device", {"parameter": 3, "activation": 4}),
        MemorySample(1.0, "disk", {"parameter": 9}),
    )
    labels = {0: "mm layers.0", 2: "add"}
    timeline = Timeline("measured", events, memory, labels, ((0.0, 5), (1.0, 8)), 8)
    timeline.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json") == timeline
    assert timeline.duration_s == 3.25
    assert timeline.busy_s("compute") == 1.25
    assert (timeline.peak_of_tier("device"), timeline.peak_of_tier("disk"), timeline.peak_of_tier("host")) == (7, 9, 0)
    assert Timeline("predicted", (), ()).duration_s == 0.0
    assert Timeline("measured", (*events[:2], Event(0, "compute", 2, 1.0, 1.5)), ()).duration_s == 3.0


@given(st.dictionaries(positive, positive, min_size=1, max_size=6), positive)
def test_a_curve_stays_between_its_neighbours(points: dict[float, float], size: float) -> None:
    sizes = tuple(sorted(points))
    curve = Curve(size=sizes, rate=tuple(points[s] for s in sizes))
    for s in sizes:
        assert curve.at(s) == pytest.approx(points[s])
    below = max((s for s in sizes if s <= size), default=sizes[0])
    above = min((s for s in sizes if s >= size), default=sizes[-1])
    low, high = sorted((points[below], points[above]))
    assert low * (1 - 1e-9) <= curve.at(size) <= high * (1 + 1e-9)


def test_a_curve_is_a_line_in_the_logarithms() -> None:
    curve = Curve(size=(10.0, 1000.0), rate=(1.0, 100.0))
    assert curve.at(100.0) == pytest.approx(10.0)
    assert (curve.at(1.0), curve.at(1e9)) == (1.0, 100.0)


@pytest.mark.parametrize(
    ("size", "rate"),
    [((), ()), ((1.0,), ()), ((2.0, 1.0), (1.0, 1.0)), ((1.0, 1.0), (1.0, 2.0)), ((0.0,), (1.0,)), ((1.0,), (0.0,))],
)
def test_what_is_not_a_curve(size: tuple[float, ...], rate: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="a curve needs"):
        Curve(size=size, rate=rate)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("256MB", 256 * 10**6),
        ("24GiB", 24 * GiB),
        ("1.5 gb", 1_500_000_000),
        ("2e3KiB", 2000 * KiB),
        ("4096", 4096),
        ("0", 0),
        (5 * MiB, 5 * MiB),
        ("1 TiB", 1 << 40),
    ],
)
def test_sizes(text: str | int, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1 M B", "10 parsecs", "50%", "1e", "nan", "inf", "0x10", -1, True])
def test_what_is_not_a_size(text: str | int) -> None:
    with pytest.raises(ConfigError, match="expected a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1.5 * GiB, "1.50 GiB"), (-MiB, "-1.00 MiB")],
)
def test_bytes_for_people(size_bytes: float, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_times_and_work_for_people() -> None:
    short = ["1.234 s", "12.3 ms", "45.6 us", "7.8 ns", "0 s", "1.000 s", "1.0 ms", "-2.0 ms"]
    assert [format_seconds(s) for s in (1.2345, 0.0123, 45.6e-6, 7.8e-9, 0, 0.99999, 0.0009999999, -0.002)] == short
    assert [format_seconds(s) for s in (999, 1234.567, 36000, 1e6)] == ["999.000 s", "20.6 min", "10.0 h", "11.6 days"]
    assert [format_flops(f) for f in (5, 2e6, 1.23e9, 4e12, 5e15, 1.5e21)] == [
        "5 FLOP",
        "2.00 MFLOP",
        "1.23 GFLOP",
        "4.00 TFLOP",
        "5.00 PFLOP",
        "1.50 ZFLOP",
    ]


@given(st.integers(0, 1 << 30))
def test_slots_are_whole_lines_or_pages(size_bytes: int) -> None:
    slot = slot_bytes(size_bytes)
    unit = PAGE_BYTES if size_bytes >= PAGE_BYTES else LINE_BYTES
    assert slot % unit == 0
    assert max(size_bytes, 1) <= slot < size_bytes + unit + (size_bytes == 0)


def test_bytes_of_views() -> None:
    assert Tensor(0, "float32", (2, 3), (3, 1)).size_bytes == 24
    expanded = Tensor(0, "bfloat16", (2, 5), (1, 0))
    assert (expanded.size_bytes, expanded.touched_bytes) == (20, 4)
    assert Tensor(0, "int64", (0, 5), (5, 0)).touched_bytes == 0
    assert Tensor(0, "bool", (), ()).size_bytes == DTYPE_BYTES["bool"]
    strides = [(3, 1), (1, 2), (4, 1), (1, 3), (2, 1)]
    assert [s for s in strides if Tensor(0, "float32", (2, 3), s).is_dense] == [(3, 1), (1, 2)]


def test_references_are_found_and_renamed_at_any_depth() -> None:
    args = (Ref(3), (1, (Ref(4), None)), Literal("dtype", "float32"), Ref(3))
    assert list(refs(args)) == [3, 4, 3]
    op = Op("aten.cat", Phase.FORWARD, args, (("out", Ref(5)),), (3, 4), (6,), (6, None), (5,), "m", OpKind.COPY)
    renamed = rename_op(op, {3: 30, 4: 40, 5: 50, 6: 60})
    assert list(refs((renamed.args, tuple(v for _, v in renamed.kwargs)))) == [30, 40, 30, 50]
    assert (renamed.inputs, renamed.outputs, renamed.results, renamed.mutates) == ((30, 40), (60,), (60, None), (50,))
    assert map_refs(args, {3: 3, 4: 4}) == args


def test_a_graph_that_reads_what_is_not_there_is_refused() -> None:
    build = GraphBuilder()
    x, y = build.storage("x", 8, Role.INPUT), build.storage("y", 8, Role.ACTIVATION)
    build.op([y], [x])
    with pytest.raises(ConfigError, match=r"op 0 f in layer0 reads \['y'\]"):
        build.graph()


def test_ranks_of_a_host_have_a_share_of_it() -> None:
    alone = dataclasses.replace(
        machine_with_host(),
        device=dataclasses.replace(
            small_machine().device, rates={name: Curve(size=(1.0,), rate=(6e9,)) for name in ("softmax", "bmm")}
        ),
        processes=Processes(cores=2, slowdown={"products": (1.0, 1.0, 1.5), "memory-bound": (1.0, 1.25, 2.0)}),
    )
    assert alone.shared_by(1) is alone
    host, disk = (alone.tier(name) for name in ("host", "disk"))
    assert host is not None
    assert disk is not None
    three = alone.shared_by(3)
    assert three.device.memory_bytes == alone.device.memory_bytes // 3
    assert three.device.peak_flops_per_s["float32"] == 1e11 / 1.5
    assert three.device.memory_bandwidth_bytes_per_s == alone.device.memory_bandwidth_bytes_per_s / 2.0
    assert [three.device.rates[name].at(1.0) for name in ("softmax", "bmm")] == [3e9, 4e9]
    shares = {tier.name: tier for tier in three.tiers}
    assert shares["disk"].read_bytes_per_s == disk.read_bytes_per_s / 3
    assert shares["disk"].capacity_bytes == disk.capacity_bytes // 3
    assert shares["host"].read_bytes_per_s == host.read_bytes_per_s
    assert "3 on this host compute and move at once" in three.sources["ranks"]
    gpu = dataclasses.replace(alone, device=dataclasses.replace(alone.device, kind="cuda"))
    assert gpu.shared_by(3).device == gpu.device


def test_ranks_have_of_the_disk_what_was_measured_among_them() -> None:
    measured = {"disk.read_bytes_per_s": (2e9, 7e8, 4e8), "disk.latency_s": (1e-4, 2e-4), "disk.read_slowdown": (0.1,)}
    alone = dataclasses.replace(
        machine_with_host(), processes=Processes(cores=2, slowdown={"memory-bound": (1.0,)}, tiers=measured)
    )
    disk, two, six = (alone.shared_by(ranks).tier("disk") for ranks in (1, 2, 6))
    assert disk is not None
    assert two is not None
    assert six is not None
    assert (two.read_bytes_per_s, two.latency_s, two.read_slowdown) == (7e8, 2e-4, 0.1)
    assert two.write_bytes_per_s == disk.write_bytes_per_s / 2  # not measured
    assert (six.read_bytes_per_s, six.latency_s) == (2e8, 2e-4)  # among three measured: half for twice as many
    for wrong, said in (({"disk.speed": (1.0,)}, "got 'disk.speed'"), ({"disk.latency_s": (-1.0,)}, "numbers >= 0")):
        with pytest.raises(ConfigError, match=said):
            Processes(cores=2, slowdown={"memory-bound": (1.0,)}, tiers=wrong)


def test_processor_is_as_fast_as_with_the_threads_of_a_process() -> None:
    whole = dataclasses.replace(small_machine().device, num_threads=8)
    share = dataclasses.replace(whole, num_threads=2, memory_bandwidth_bytes_per_s=1e9)
    shared = Processes(cores=8, slowdown={"memory-bound": (1.0, 1.5)}, device=share)
    machine = dataclasses.replace(small_machine(), device=whole, processes=shared)
    assert machine.with_threads().device == machine.with_threads(2).device == share
    assert machine.with_threads().processes == dataclasses.replace(shared, device=None)
    assert machine.with_threads(8).device == whole
    assert "threads" not in machine.with_threads(8).sources
    assert machine.with_threads(3).device == share
    assert "as fast with 3 threads as they were measured with 2" in machine.with_threads(3).sources["threads"]
    assert machine.with_threads().with_threads() == machine.with_threads()
    assert machine.with_threads().shared_by(2).device.memory_bandwidth_bytes_per_s == pytest.approx(1e9 / 1.5)
    alone = dataclasses.replace(small_machine(), device=whole)
    assert alone.with_threads(8) is alone.with_threads() is alone
    assert "threads" in alone.with_threads(4).sources
    gpu = dataclasses.replace(alone, device=dataclasses.replace(whole, kind="cuda", num_threads=0))
    assert gpu.with_threads(3) is gpu
    again = machine_from_dict(tomllib.loads(machine_to_toml(machine)), "again")
    assert again == machine
