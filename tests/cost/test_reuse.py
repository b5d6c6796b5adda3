"""Reuse: what was touched too long ago comes from memory, and an operation takes longer by what the machine says."""

from __future__ import annotations

import dataclasses
import tomllib

import pytest

from lading.catalog.load import machine_from_dict, machine_to_toml
from lading.cost.compute import op_costs
from lading.cost.reuse import cold_bytes, touched_bytes
from lading.errors import ConfigError
from lading.ir.graph import Op, OpKind, Phase, Ref, Role, StepGraph, Storage, Tensor
from lading.ir.machine import COLD_PRODUCT, Curve, Device, HostSpeed, Machine

KIB = 1024
WARM = Device(
    name="flat",
    kind="cpu",
    memory_bytes=1 << 30,
    memory_bandwidth_bytes_per_s=4e9,
    op_overhead_s=1e-3,
    peak_flops_per_s={"float32": 1e10},
    optimizer_elements_per_s=1e6,
    rates={"elementwise": Curve(size=(1.0,), rate=(4e9,))},
)
#: Passes at a quarter of their rate where operands come from memory; 8 KiB of cache.
COLD = dataclasses.replace(
    WARM,
    cache_bytes=8 * KIB,
    cold_rates={"elementwise": Curve(size=(1.0,), rate=(1e9,)), COLD_PRODUCT: Curve(size=(1.0,), rate=(2e9,))},
)


def chain(*pairs: tuple[int, int], name: str = "aten.neg.default", rows: int = 1024, flops: int = 0) -> StepGraph:
    """Operations that each read one storage of ``4 * rows`` bytes and write another, by their numbers."""
    count = 1 + max(max(pair) for pair in pairs)
    size = 4 * rows
    kind = OpKind.MATMUL if flops else OpKind.ELEMENTWISE
    ops = tuple(
        Op(
            name=name,
            phase=Phase.FORWARD,
            args=(Ref(source), Ref(source)) if flops else (Ref(source),),
            kwargs=(),
            inputs=(source,),
            outputs=(target,),
            results=(target,),
            mutates=(),
            module="m",
            kind=kind,
            flops=flops,
            bytes_read=size,
            bytes_written=size,
        )
        for source, target in pairs
    )
    shape, stride = ((32, rows // 32), (rows // 32, 1)) if flops else ((rows,), (1,))
    return StepGraph(
        storages=tuple(Storage(f"s{i}", size, Role.ACTIVATION) for i in range(count)),
        tensors=tuple(Tensor(i, "float32", shape, stride) for i in range(count)),
        ops=ops,
        parameters=(),
        buffers=(),
        inputs=((),),
        losses=(),
    )


def test_what_was_just_made_is_in_cache_and_what_a_step_ago_is_not() -> None:
    """Of 8 KiB two storages of 4 KiB are there: the one read was made last, the one written a step ago."""
    graph = chain((0, 1), (1, 2), (2, 3), (3, 4))
    assert cold_bytes(graph, 8 * KIB) == [8 * KIB, 4 * KIB, 4 * KIB, 4 * KIB]


def test_a_step_that_fits_in_cache_finds_all_of_it_there() -> None:
    assert cold_bytes(chain((0, 1), (1, 2), (2, 3)), 16 * KIB) == [0, 0, 0]


def test_a_storage_larger_than_the_cache_is_never_all_there() -> None:
    graph = chain((0, 0), rows=4096)  # 16 KiB, in place
    assert touched_bytes(graph, graph.ops[0]) == {0: 16 * KIB}
    assert cold_bytes(graph, 8 * KIB) == [8 * KIB]


def test_of_a_table_only_the_rows_that_are_looked_up_are_touched() -> None:
    graph = chain((0, 1))
    table = dataclasses.replace(graph.tensors[0], shape=(1 << 20,))
    graph = dataclasses.replace(
        graph,
        storages=(dataclasses.replace(graph.storages[0], size_bytes=4 << 20), graph.storages[1]),
        tensors=(table, graph.tensors[1]),
        ops=(dataclasses.replace(graph.ops[0], name="aten.embedding.default", kind=OpKind.GATHER),),
    )
    assert touched_bytes(graph, graph.ops[0]) == {0: 4 * KIB, 1: 4 * KIB}


def test_a_pass_costs_between_warm_and_cold_by_the_bytes_that_are_not_in_cache() -> None:
    graph = chain((0, 1), (1, 2), (2, 3), (3, 4))
    size = 8 * KIB
    assert op_costs(graph, WARM) == [pytest.approx(1e-3 + size / 4e9)] * 4
    first, second, *_ = op_costs(graph, COLD)
    assert first == pytest.approx(1e-3 + size / 1e9)
    assert second == pytest.approx(1e-3 + (size / 1e9 + size / 4e9) / 2)
    assert op_costs(chain((0, 1)), COLD) == [pytest.approx(1e-3 + size / 4e9)]  # the step fits


def test_a_product_waits_for_what_is_not_in_cache() -> None:
    graph = chain((0, 1), (1, 2), (2, 3), (3, 4), name="aten.mm.default", flops=1 << 16)
    extra = [cold - warm for cold, warm in zip(op_costs(graph, COLD), op_costs(graph, WARM), strict=True)]
    assert extra == [pytest.approx(bytes_ / 2e9) for bytes_ in (8 * KIB, 4 * KIB, 4 * KIB, 4 * KIB)]


def test_cold_rates_faster_than_warm_ones_take_nothing_away() -> None:
    faster = dataclasses.replace(COLD, cold_rates={"elementwise": Curve(size=(1.0,), rate=(9e9,))})
    graph = chain((0, 1), (1, 2), (2, 3), (3, 4))
    assert op_costs(graph, faster) == op_costs(graph, WARM)


def test_cold_rates_are_kept_in_a_machine_file_and_change_with_the_host() -> None:
    machine = Machine(name="m", date="2026-11-28", source="test", device=COLD)
    assert machine_from_dict(tomllib.loads(machine_to_toml(machine)), "test") == machine
    slower = machine.at_speed(HostSpeed(others=2.0)).device
    assert slower.cold_rates["elementwise"].rate == (5e8,)


@pytest.mark.parametrize("lacks", [{"cache_bytes": 0}, {"cold_rates": {}}, {"cache_bytes": -1}])
def test_a_cache_without_cold_rates_is_refused(lacks: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="cold_rates"):
        dataclasses.replace(COLD, **lacks)
