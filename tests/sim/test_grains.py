"""Grains agree: a step takes the same seconds as kernels, as units and as chunks, by one engine and one verifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import pytest
import torch
from tests.golden.layouts import CASES as LAYOUTS
from tests.golden.steps import CASES as STEPS
from tests.golden.steps import made_again
from tests.golden.store import read_text
from tests.runtime.cases import keep_all

import lading
from lading.catalog.load import load_machine
from lading.catalog.stacks import stack_by_name
from lading.cost.compute import op_seconds, placed_costs
from lading.cost.hosting import caller_seconds
from lading.cost.kernels import kernel_s
from lading.ir.action import Action, ActionKind, Work
from lading.ir.graph import OpKind, Phase
from lading.ir.layout import Layout
from lading.ir.machine import Machine
from lading.ir.program import ALL_UNITS, COMPUTE, ActionList, Program, Region, parse_program
from lading.ir.schedules import schedule
from lading.ir.work import Collective, Kernel, Stage
from lading.memory.verify import verify
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.parallel.ranks import rank_segment
from lading.program.emit import ListShape, emit
from lading.program.rank_units import Unit
from lading.sim.device_step import simulate as simulate_program
from lading.sim.rank_engine import Priced, action_seconds, run_ranks
from lading.sim.rank_step import ListedStep, units_of_runs
from lading.sim.simulate import simulate
from lading.tracing.tabulate import captured_table


def checked(program: Program) -> Program:
    """The Program, proven and read back from its text."""
    verify(program)
    assert parse_program(program.text().splitlines(), program.graph, program.tiers).text() == program.text()
    return program


# One device: the operations of a planned step, run after run.


def unit_name(module: str) -> str:
    """Block, or what is before or after the blocks."""
    return ".".join(module.split(".")[:2])


def coarser(program: Program, machine: Machine, unit_of: Callable[[str], int]) -> tuple[Program, list[float]]:
    """Runs of a compute stream's operations of one unit and phase as regions, and the seconds of these."""
    costs, graph, rows = placed_costs(program.graph, machine), program.graph, list[tuple[int, Phase, float]]()
    entering_s = 0.0
    for action in program.actions:
        assert action.stream == "compute"
        if action.op is not None:
            op = graph.ops[action.op]
            rows.append((unit_of(op.module), op.phase, entering_s + costs[action.op]))
            entering_s = 0.0
        elif action.kind is ActionKind.MOVE:
            entering_s += caller_seconds(graph.storages[action.storage or 0].size_bytes, machine.device)
    actions, regions, seconds = ActionList(), list[Region](), list[float]()
    for (unit, phase), run in groupby(rows, key=lambda row: row[:2]):
        if phase is Phase.OPTIMIZER:
            actions.add(ActionKind.STEP, COMPUTE)
        else:
            actions.add(ActionKind.COMPUTE, COMPUTE, op=len(regions), micro_batch=0)
            regions.append(Region(0, unit, Work.BACKWARD if phase is Phase.BACKWARD else Work.FORWARD))
        seconds.append(sum(row[2] for row in run))
    return Program((actions,), regions=tuple(regions)), [*seconds[:-1], seconds[-1] + entering_s]


@pytest.mark.parametrize("name", ["keep-all", "checkpointed"])
def test_a_step_of_one_device_takes_the_same_time_at_every_grain(name: str) -> None:
    kernels, machine = made_again(name, read_text(f"programs/{name}.txt")), STEPS[name].machine()
    expected_s = simulate_program(checked(kernels), machine).duration_s
    names = sorted({unit_name(op.module) for op in kernels.graph.ops})
    units = coarser(kernels, machine, lambda module: names.index(unit_name(module)))
    chunks = coarser(kernels, machine, lambda _: ALL_UNITS)
    assert len(kernels.actions) > 4 * len(units[0].actions) > 4 * len(chunks[0].actions) > 0
    for program, seconds in (units, chunks):
        assert run_ranks(checked(program), seconds).step_s == pytest.approx(expected_s, rel=1e-12)


# Ranks: the regions of a layout, cut into the kernels that they stand for.


def finer(
    program: Program, seconds: Sequence[float], parts: Callable[[Region], list[tuple[Region, float]]]
) -> tuple[Program, list[float]]:
    """Regions as what they are made of, one after the other, each with its share of the seconds."""
    ranks, numbers, uses, lasts = list[ActionList](), dict[Region, int](), list[frozenset[int]](), list[float]()
    for base, actions in zip(program.bounds, program.ranks, strict=False):
        cut, spans = ActionList(), list[tuple[int, int]]()
        for action in actions:
            first, waits = len(cut), tuple(spans[wait][1] for wait in action.waits)
            for part, share in parts(program.regions[action.op]) if action.op is not None else [(None, 1.0)]:
                number = len(cut)
                _copy(cut, actions, action, waits)
                if part is not None:
                    assert action.op is not None
                    if part not in numbers:
                        uses.append(program.uses[action.op])
                    cut.op[number] = numbers.setdefault(part, len(numbers))
                lasts.append(share * seconds[base + action.id])
                waits = ()
            spans.append((first, len(cut) - 1))
        cut.rows = [(spans[a][0], spans[b][1]) if a <= b else (spans[b][1] + 1, spans[b][1]) for a, b in actions.rows]
        ranks.append(cut)
    made = Program(
        tuple(ranks), regions=tuple(numbers), storages=program.storages, uses=tuple(uses),
        repeat=program.repeat, schedule=program.schedule,
    )  # fmt: skip
    return made, lasts


def _copy(cut: ActionList, actions: ActionList, action: Action, waits: tuple[int, ...]) -> None:
    number = action.id
    cut.add(
        action.kind, actions.stream[number], waits, storage=actions.storage[number],
        micro_batch=actions.micro_batch[number], peer=actions.peer[number], group=action.group,
    )  # fmt: skip


def in_parts(listed: ListedStep, region: Region, *, kernels: bool) -> list[tuple[Region, float]]:
    """Units of a chunk, or kernels of a unit, in order, with what each takes of the whole."""
    runs = units_of_runs(listed.request, listed.runs, listed.segments)[region.stage]
    units, onward = [unit for unit, count in runs for _ in range(count)], region.work is Work.FORWARD
    if region.unit == ALL_UNITS:
        if region.stop:
            return [(region, 1.0)]  # a bucket
        order = range(len(units)) if onward else range(len(units) - 1, -1, -1)
        rows = [(region._replace(unit=at), sum(_seconds(listed, units[at], region.work))) for at in order]
    elif kernels:
        each = _seconds(listed, units[region.unit], region.work)
        stop = region.stop or len(each)
        rows = [(region._replace(start=at, stop=at + 1), each[at]) for at in range(region.start, stop)]
    else:
        return [(region, 1.0)]
    whole = sum(seconds for _, seconds in rows)
    return [(part, seconds / whole) for part, seconds in rows if seconds] if whole else [(region, 1.0)]


def _seconds(listed: ListedStep, unit: Unit, work: Work) -> list[float]:
    prices = listed.prices
    kernels = unit.in_order(work, weights_forward=not listed.request.stack.megatron_order)
    return [
        prices.collective_s(kernel.detail) if isinstance(kernel.detail, Collective) else prices.kernel_s(kernel)
        for kernel in kernels
    ]


ALONE = "llama3-8b rtx4090 gb4,recompute=full s1024 qwen-finetune qlora=16 quantizer=nf4"
SHAPES = (
    "llama3.2-1b h100 dp8,gb16 s4096 default",
    "llama3.2-1b rtx4090 dp4,zero3,gb16,recompute=full s2048 hf-transformers",
    "qwen3-30b-a3b h100 dp16,ep8,zero3,gb64,recompute=full s4096 torchtitan-eager",
    "llama3-8b h100 dp4,pp2,zero2,gb32 s4096 torchtitan-eager",
    "llama3-8b h100 pp2,vpp2,zbv,gb16,dp2 s4096 torchtitan-eager",
)


@pytest.mark.long
@pytest.mark.parametrize("name", [ALONE, *SHAPES])
def test_ranks_take_the_same_time_at_every_grain(name: str) -> None:
    """What waits for a region waits for its last kernel, so computing beside the network is slowed as much in parts."""
    listed = simulate(*LAYOUTS[name].request()).step.listed
    assert listed is not None
    program, seconds = listed.program, action_seconds(listed.program, listed.seconds)
    expected_s = run_ranks(checked(program), seconds, listed.slowdowns).step_s
    count = program.bounds[-1]
    for kernels in (False, True):
        program, seconds = finer(program, seconds, lambda one, k=kernels: in_parts(listed, one, kernels=k))
        assert run_ranks(checked(program), seconds, listed.slowdowns).step_s == pytest.approx(expected_s, rel=1e-11)
    assert program.bounds[-1] > 4 * count


# A rank of one, and a step without a cluster.


def test_a_rank_alone_takes_as_long_as_the_step_without_a_cluster() -> None:
    """Where both have a price: a kernel has no strides, so pointwise operations of a step may take longer."""
    with torch.device("meta"):
        model = build_model("llama", num_layers=2, dim=64, num_heads=4, vocab_size=128, max_seq_len=64).bfloat16()
    batch, machine = {"tokens": torch.zeros(2, 65, dtype=torch.int64)}, load_machine("h100")
    graph, table = (
        lading.capture(model, batch, next_byte_loss),
        captured_table(model, batch, next_byte_loss, whole=False),
    )
    stack = stack_by_name("torch-eager-cpu")

    def of_kernel(kernel: Kernel) -> float:
        return kernel_s(kernel, machine.device, stack) if kernel.kind is not OpKind.ELEMENTWISE else 0.0

    def of_rank(key: Priced) -> float:
        _, what, _ = key
        if not isinstance(what, Region):
            return 0.0
        segments = [rank_segment(segment, {"b": 2, "s": 64}, Layout(micro_batch=2)) for segment in table.segments]
        return sum(
            count * of_kernel(kernel)
            for segment, count in zip(segments, table.counts, strict=True)
            for kernel in segment.kernels
            if (kernel.stage is Stage.FORWARD) == (what.work is Work.FORWARD)
        )

    rank = emit(ListShape(schedule("1f1b", 1, 1, 1), ((),)))
    rank_s = run_ranks(checked(rank), action_seconds(rank, of_rank)).step_s
    overhead_s = machine.device.op_overhead_s
    lasts = [
        op_seconds(graph, op, machine.device) - overhead_s if op.kind is not OpKind.ELEMENTWISE else 0.0
        for op in graph.ops
    ]
    step = keep_all(graph)
    batch_s = sum(
        caller_seconds(graph.storages[a.storage or 0].size_bytes, machine.device)
        for a in step.actions
        if a.kind is ActionKind.MOVE
    )
    assert simulate_program(step, machine, op_seconds=lasts).duration_s == pytest.approx(batch_s + rank_s)
