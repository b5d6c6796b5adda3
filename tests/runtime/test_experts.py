"""Experts left out where they got no token: plain PyTorch's bits, in every plan, whoever looks or fails in between."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.machines import small_machine
from tests.runtime.cases import DISK, HOST, MACHINE, OPTIMIZER, at_random, disk_always, host_always, load, program_of
from tests.runtime.expert_cases import USES, Plain, batches_of, loss_fn, model_of, rate_of
from tests.runtime.fake_accelerator import FakeApi, fake_device

import lading
from lading.errors import ConfigError
from lading.ir.action import Action, ActionKind
from lading.ir.defer import defer, updates
from lading.ir.expand import expand
from lading.ir.experts import find_experts
from lading.ir.graph import Op, Role, StepGraph
from lading.ir.plan import Option
from lading.ir.program import COMPUTE_STREAM, Program, slot_bytes
from lading.memory.guards import find_guards, with_late_reads
from lading.memory.restore import programs_of
from lading.memory.verify import verify
from lading.runtime import replays
from lading.runtime.accelerator import BlockingLane
from lading.runtime.executor import Executor
from lading.runtime.update_kernels import parameter_kernel
from lading.sim.device_step import simulate

#: With a disk so fast that what an update has moved is written within the step, and lies on the disk between steps.
FAST = dataclasses.replace(
    MACHINE,
    tiers=(
        dataclasses.replace(
            DISK, read_bytes_per_s=1e13, write_bytes_per_s=1e13, mixed_read_bytes_per_s=1e13,
            mixed_write_bytes_per_s=1e13, latency_s=1e-9,
        ),
    ),
)  # fmt: skip
#: Memory of the host behind a device, as fast, alone and before that disk.
NEAR = dataclasses.replace(FAST.tiers[0], name="host", kind=HOST.kind, persistent=False)
FAST_HOST = dataclasses.replace(MACHINE, tiers=(NEAR,))
FAST_BOTH = dataclasses.replace(MACHINE, tiers=(NEAR, *FAST.tiers))


def graph_of(*, micro: int = 1, clip: float = 0.0, deferred: float = 0.0, **model: Any) -> StepGraph:
    captured = lading.capture(model_of(**model), batches_of([[0]], 1)[0][0], loss_fn, accumulation=micro)
    graph = expand(captured, clip_norm=clip, optimizer=OPTIMIZER)
    return defer(graph, int(deferred * len(updates(graph))))[0] if deferred else graph


def late(program: Program) -> Program:
    made = with_late_reads(program, lambda router, expert: expert > 0)
    verify(made)
    return made


def differing(executor: Executor, plain: Plain) -> list[str]:
    """Names of parameters and states whose bits differ from plain PyTorch's."""
    graph, expected = executor.program.graph, plain.values()
    tensors = [(p.names[0], p.tensor) for p in graph.parameters] + [(s.name, s.parts[0]) for s in graph.states]
    assert all(len(state.parts) == 1 for state in graph.states)
    assert {name for name, _ in tensors} == set(expected)
    return [n for n, t in tensors if not same_bits(executor.read_storage(graph.storage_of(t)), expected[n])]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.contiguous().view(torch.int32))


PROGRAMS = [  # micro-batches, clipping, share of updates deferred, what leaves the device, late reads, style
    (1, 0.0, 0.0, "all", True, "slice"),
    (1, 1.0, 1.0, "all", True, "unbind"),
    (1, 1.0, 0.5, "half", True, "slice"),
    (1, 0.0, 1.0, "values", False, "mask"),
    (2, 1.0, 0.0, "all", True, "slice"),
    (2, 0.0, 1.0, "half", True, "unbind"),
    (2, 1.0, 0.6, "half", False, "mask"),
    (1, 1.0, 0.0, "nothing", False, "slice"),
    (1, 0.0, 0.0, "all", True, "shift"),
]


def picked(evict: str, seed: int = 0) -> Any:
    return {"nothing": None, "half": at_random(seed), "all": disk_always, "values": at_random(seed, 0.8)}[evict]


@pytest.mark.long
@pytest.mark.parametrize(("micro", "clip", "deferred", "evict", "is_late", "style"), PROGRAMS)
@pytest.mark.parametrize("seed", [0, 1])
def test_numbers_are_plain_pytorch_s_over_twenty_steps(
    tmp_path: Path, micro: int, clip: float, deferred: float, evict: str, is_late: bool, style: str, seed: int
) -> None:
    program = program_of(
        graph_of(micro=micro, clip=clip, deferred=deferred, style=style), picked(evict, seed), FAST if seed else MACHINE
    )
    program = late(program) if is_late else program
    plain = Plain(model_of(style), clip)
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True, experts=True) as executor:
        load(executor, plain.model)
        for step, batches in enumerate(batches_of(USES, micro)):
            lr = rate_of(step)
            assert executor.step(batches, lr=lr) == plain.step(batches, lr)
            if step == 7 + seed:  # with updates that wait, and others missed
                assert differing(executor, plain) == []
        assert differing(executor, plain) == []
        assert executor.experts is not None
        counts = executor.experts.counts
        assert counts.chosen["layers.0"] == [sum(e in used for used in USES) for e in range(4)]
        assert counts.steps == len(USES)
        if evict == "all" and seed:
            assert counts.replayed > 0
            assert counts.spared_bytes["disk_read"] > counts.moved_bytes["disk_read"]


BEHIND = [  # micro-batches, clipping, share of updates deferred, style; what leaves the device; tiers; late reads
    ((1, 0.0, 0.0, "slice"), host_always, FAST_HOST, True),
    pytest.param((1, 1.0, 1.0, "unbind"), host_always, FAST_HOST, True, marks=pytest.mark.long),
    pytest.param((2, 1.0, 0.6, "slice"), at_random(0), FAST_BOTH, True, marks=pytest.mark.long),
    pytest.param((1, 1.0, 0.0, "slice"), disk_always, FAST_BOTH, True, marks=pytest.mark.long),
    pytest.param((2, 0.0, 1.0, "mask"), at_random(1, 0.8), FAST_HOST, False, marks=pytest.mark.long),
    pytest.param((1, 1.0, 0.0, "slice"), None, FAST_HOST, False, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("step_of", "evict", "machine", "is_late"), BEHIND)
def test_numbers_are_plain_pytorch_s_on_a_device_that_runs_behind_the_host(
    tmp_path: Path, api: FakeApi, step_of: tuple[int, float, float, str], evict: Any, machine: Any, is_late: bool
) -> None:
    micro, clip, deferred, style = step_of
    program = program_of(graph_of(micro=micro, clip=clip, deferred=deferred, style=style), evict, machine)
    program = late(program) if is_late else program
    plain = Plain(model_of(style), clip)
    with Executor(
        program, optimizer=OPTIMIZER, folder=tmp_path, poison=True, experts=True, device=fake_device(api)
    ) as executor:
        load(executor, plain.model)
        for step, batches in enumerate(batches_of(USES, micro)):
            lr = rate_of(step)
            assert executor.step(batches, lr=lr) == plain.step(batches, lr)
            if step == 7:
                assert differing(executor, plain) == []
        assert differing(executor, plain) == []
        assert executor.experts is not None
        counts = executor.experts.counts
        assert counts.chosen["layers.0"] == [sum(e in used for used in USES) for e in range(4)]
        if evict in (host_always, disk_always):
            tier = program.tiers[0].name if evict is host_always else "disk"
            assert counts.replayed > 0
            assert counts.spared_bytes[f"{tier}_read"] > counts.moved_bytes[f"{tier}_read"]


@pytest.mark.parametrize("micro", [1, pytest.param(2, marks=pytest.mark.long)])
def test_choices_are_counted_while_the_host_goes_on(
    tmp_path: Path, api: FakeApi, monkeypatch: pytest.MonkeyPatch, micro: int
) -> None:
    """Late copies of what was chosen are whole, though its memory is spoilt as soon as it may be used again."""
    program = program_of(graph_of(micro=micro), host_always, FAST_HOST)

    def waiting(lane: BlockingLane, marks: Any) -> None:
        raise AssertionError("the host waited for the device")

    monkeypatch.setattr(BlockingLane, "wait", waiting)
    plain = Plain(model_of(), 0.0)
    launched = api.launched

    def late_copies(stream: Any, call: Any) -> Any:  # those of the lane that counts
        is_copy = getattr(getattr(call, "func", None), "__name__", "") == "copy_" and stream is lanes["routing"]
        return launched(stream, (lambda: (time.sleep(0.1), call())) if is_copy else call)

    lanes: dict[str, Any] = {}
    monkeypatch.setattr(api, "launched", late_copies)
    device = fake_device(api)
    make_lane = device.lane

    def lane_of(stream: str, *, blocking: bool) -> Any:
        made = make_lane(stream, blocking=blocking)
        lanes[stream] = made.stream
        return made

    monkeypatch.setattr(device, "lane", lane_of)
    with Executor(
        program, optimizer=OPTIMIZER, folder=tmp_path, poison=True, experts="count", device=device
    ) as executor:
        load(executor, plain.model)
        for step, batches in enumerate(batches_of(USES[:6], micro)):
            assert executor.step(batches, lr=rate_of(step)) == plain.step(batches, rate_of(step))
        assert differing(executor, plain) == []
        assert executor.experts is not None
        counts = executor.experts.counts
    assert lanes.keys() >= {"routing"}
    assert counts.chosen == {f"layers.{n}": [sum(e in used for used in USES[:6]) for e in range(4)] for n in range(2)}
    assert sum(counts.tokens["layers.1"]) == 16 * micro * len(USES[:6])
    assert not counts.spared_bytes
    assert not counts.moved_bytes


@pytest.mark.long
def test_choices_are_counted_on_a_cpu_where_nothing_is_left_out(tmp_path: Path) -> None:
    program, plain = program_of(graph_of(deferred=1.0), disk_always, FAST), Plain(model_of(), 0.0)
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True, experts="count") as executor:
        load(executor, plain.model)
        for step, batches in enumerate(batches_of(USES, 1)):
            assert executor.step(batches, lr=rate_of(step)) == plain.step(batches, rate_of(step))
            executor.forward(batches)  # counts nothing
        assert executor.experts is not None
        assert executor.experts.counts.steps == len(USES)
        assert executor.experts.counts.chosen["layers.0"] == [sum(e in used for used in USES) for e in range(4)]


def test_an_update_is_made_up_for_where_it_lies(tmp_path: Path) -> None:
    """Values of an expert that is not chosen do not move at all, however long; then all updates are made up for."""
    program = late(program_of(graph_of(deferred=1.0), disk_always, FAST))
    guards = find_guards(program)
    experts = [p for p in program.graph.parameters if ".experts." in p.names[0]]
    assert len(guards.replayed) == len(experts)
    plain = Plain(model_of(), 0.0)
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True, experts=True) as executor:
        load(executor, plain.model)
        for step, batches in enumerate(batches_of([[0]] * 6, 1)):
            executor.step(batches, lr=rate_of(step))
            plain.step(batches, rate_of(step))
        assert executor.experts is not None
        assert executor.experts.counts.replayed == 0
        assert differing(executor, plain) == []
        assert executor.experts.counts.replayed == 6 * len(experts) * 3 // 4


@pytest.mark.parametrize(("evict", "machine"), [(host_always, FAST_HOST), (None, MACHINE)])
def test_making_up_for_updates_takes_no_memory_but_its_room(
    tmp_path: Path, api: FakeApi, monkeypatch: pytest.MonkeyPatch, evict: Any, machine: Any
) -> None:
    """A budget counts the room, and nothing besides."""
    program = program_of(graph_of(), evict, machine)
    program = late(program) if evict else program
    gradients: list[tuple[int, int]] = []

    def noting(op: Op, args: list[torch.Tensor], *rest: Any, **settings: Any) -> Any:
        gradients.append((args[1].data_ptr(), args[1].nbytes))
        return parameter_kernel(op, args, *rest, **settings)

    monkeypatch.setattr(replays, "parameter_kernel", noting)
    device = fake_device(api)
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, experts=True, device=device) as executor:
        load(executor, model_of())
        for step, batches in enumerate(batches_of([[0], [0], [0, 1]], 1)):
            executor.step(batches, lr=rate_of(step))
        assert executor.experts is not None
        room = executor.experts._room
        start = room.bytes_at(0, room.size_bytes).data_ptr()
        assert gradients
        assert all(start <= at and at + size <= start + room.size_bytes for at, size in gradients)


@pytest.mark.long
@pytest.mark.parametrize("deferred", [0.0, 1.0])
def test_what_nobody_chooses_is_made_up_for_before_too_much_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deferred: float
) -> None:
    monkeypatch.setattr(replays, "MOST_MISSED", 4)
    program = late(program_of(graph_of(deferred=deferred, clip=1.0), disk_always, FAST))
    plain = Plain(model_of(), 1.0)
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True, experts=True) as executor:
        load(executor, plain.model)
        assert executor.experts is not None
        for step, batches in enumerate(batches_of([[0]] * 11, 1)):
            assert executor.step(batches, lr=rate_of(step)) == plain.step(batches, rate_of(step))
            assert len(executor.experts._history) <= 4
        assert executor.experts.counts.replayed > 0
        assert differing(executor, plain) == []
        for step, batches in enumerate(batches_of([[0, 1, 2, 3]] * 2, 1), 11):
            executor.step(batches, lr=rate_of(step))
            plain.step(batches, rate_of(step))
        assert executor.experts._history == []  # nobody misses anything
        assert differing(executor, plain) == []


def test_nothing_changes_where_every_expert_is_used(tmp_path: Path) -> None:
    program = program_of(graph_of(clip=1.0, deferred=1.0), disk_always, FAST)
    guards = find_guards(program)
    assert guards.left_out(guards.all_experts()) == frozenset()
    plain = Plain(model_of(), 1.0)
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, experts=True) as executor:
        load(executor, plain.model)
        assert executor.experts is not None
        for step, batches in enumerate(batches_of([[0, 1, 2, 3]] * 4, 1)):
            assert executor.step(batches, lr=rate_of(step)) == plain.step(batches, rate_of(step))
            if not step:  # before which no step was, whose updates could have been deferred
                executor.experts.counts.spared_bytes.clear()
        assert executor.experts.counts.spared_bytes == {}
        assert executor.experts.counts.replayed == 0


class Stop(Exception):
    pass


@pytest.mark.long
@pytest.mark.parametrize("deferred", [0.0, 1.0])
def test_a_step_that_fails_half_way_keeps_what_was_missed(tmp_path: Path, deferred: float) -> None:
    """Wherever a step stops: it has not happened, and is run again; or values are of two steps, and it says so."""
    program = late(program_of(graph_of(deferred=deferred), disk_always, FAST))
    again = unfinished = 0
    for at in range(0, len(program.actions), 41):
        plain, fails = Plain(model_of(), 0.0), [False]

        def stop(action: Action, at: int = at, fails: list[bool] = fails) -> None:
            if fails[0] and action.id == at:
                raise Stop

        with Executor(
            program, optimizer=OPTIMIZER, folder=tmp_path, jitter=stop, poison=True, experts=True
        ) as executor:
            load(executor, plain.model)
            for step, batches in enumerate(batches_of(USES[:8], 1)):
                if step == 5:  # expert 2 is chosen, which missed all before
                    fails[0] = True
                    with pytest.raises(lading.ProgramError):
                        executor.step(batches, lr=rate_of(step))
                    fails[0] = False
                    if not executor.is_whole:
                        unfinished += 1
                        break
                assert executor.step(batches, lr=rate_of(step)) == plain.step(batches, rate_of(step))
            else:
                again += 1
                assert differing(executor, plain) == []
    assert again > 2
    assert unfinished > 0


def test_clipping_that_spoils_every_gradient_spoils_those_of_zeros(tmp_path: Path) -> None:
    program = late(program_of(graph_of(clip=1.0), disk_always, FAST))
    plain = Plain(model_of(), 1.0)
    steps = batches_of([[0], [0], [0]], 1)
    steps[1][0]["scale"] = torch.tensor(float("nan"))
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, experts=True) as executor:
        load(executor, plain.model)
        for step, batches in enumerate(steps):
            executor.step(batches, lr=rate_of(step))
            plain.step(batches, rate_of(step))
        storage = {p.names[0]: program.graph.storage_of(p.tensor) for p in program.graph.parameters}
        name = "layers.1.experts.3.down.weight"
        assert bool(torch.isnan(plain.values()[name]).all())
        assert bool(torch.isnan(executor.read_storage(storage[name])).all())


def test_norms_of_gradients_are_zero_for_experts_left_out(tmp_path: Path) -> None:
    program = program_of(graph_of(), disk_always, FAST)
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, experts=True) as executor:
        load(executor, model_of())
        executor.step(batches_of([[0]], 1)[0], lr=1e-3, norms=True)
        norms = executor.gradient_norms()
        by_name = {p.names[0]: norms[program.graph.storage_of(p.tensor)] for p in program.graph.parameters}
        assert by_name["layers.0.experts.1.up.weight"] == (0.0, 0.0)
        assert by_name["layers.0.experts.0.up.weight"][1] > 0


def test_moved_bytes_are_those_of_the_actions_that_are_not_left_out(tmp_path: Path) -> None:
    program = late(program_of(graph_of(), disk_always, FAST))
    guards = find_guards(program)
    used = frozenset((router, 0) for router in range(len(guards.routers)))
    left_out = guards.left_out(used)
    predicted: dict[str, int] = {}
    for action in program.actions:
        guarded = action.id in guards.actions and action.id not in left_out
        if guarded and action.kind is ActionKind.MOVE and action.storage is not None:
            size = slot_bytes(program.graph.storages[action.storage].size_bytes)
            predicted[action.stream] = predicted.get(action.stream, 0) + size
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, experts=True) as executor:
        load(executor, model_of())
        executor.step(batches_of([[0]], 1)[0], lr=1e-3)
        assert executor.experts is not None
        assert executor.experts.counts.moved_bytes == predicted
    whole, shorter = simulate(program, MACHINE), simulate(program, MACHINE, left_out=left_out)
    assert shorter.duration_s < 0.6 * whole.duration_s
    assert simulate(program, MACHINE, left_out=frozenset()).duration_s == whole.duration_s
    assert COMPUTE_STREAM in program.streams


def test_random_numbers_in_experts_are_drawn_as_ever() -> None:
    """An operation that draws random numbers runs in every step, and so does what it needs."""
    program = program_of(graph_of(dropout=0.2), disk_always, FAST)
    guards = find_guards(program)
    random = [a.id for a in program.actions if a.op is not None and program.graph.ops[a.op].random]
    assert random
    assert not set(random) & set(guards.actions)


def test_what_has_no_experts_is_refused(tmp_path: Path) -> None:
    program = program_of(graph_of(style="dense"), None)
    assert find_guards(program).actions == {}
    with pytest.raises(ConfigError, match="experts: expected outputs weighed by a router's weights"):
        Executor(program, optimizer=OPTIMIZER, folder=tmp_path, experts=True)
    half = lading.capture(model_of().half(), batches_of([[0]], 1)[0][0], loss_fn)
    assert find_experts(half).zeros == {}  # what nobody reads is left out all the same
    assert not find_experts(half).updates
    graph = lading.capture(model_of("dense"), batches_of([[0]], 1)[0][0], loss_fn)
    with pytest.raises(ConfigError, match=r"torch\.scatter"):
        lading.plan(graph, small_machine(), budget="100%", experts=True, cache=False)


def test_shares_of_other_experts_are_refused() -> None:
    graph = lading.capture(model_of(), batches_of([[0]], 1)[0][0], loss_fn)
    for shares, words in (
        ({"layers.7": [1.0] * 4}, "expected routers among"),
        ({"layers.0": [1.0] * 3}, "expected 4 shares"),
        ({"layers.0": [1.0, 2.0, 0.0, 0.0]}, "from 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            lading.plan(graph, small_machine(), budget="100%", experts=shares)
    settings: tuple[dict[str, Any], ...] = ({"compile": True}, {"devices": 2, "layout": "dp2"})
    for setting in settings:
        with pytest.raises(ConfigError, match="experts: expected one device"):
            lading.plan(graph, small_machine(), budget="100%", experts=True, **setting)


def values_away(graph: StepGraph, lives: Any) -> dict[tuple[int, int], Option]:
    """Policy that keeps everything in memory but what experts have."""
    from lading.memory.lifetime import gaps, is_movable

    roles = (Role.PARAMETER, Role.OPTIMIZER_STATE)
    return {
        (gap.storage, gap.start): Option("disk")
        for gap in gaps(graph, lives)
        if is_movable(graph, gap.storage, 4096)
        and graph.storages[gap.storage].role in roles
        and ".experts." in graph.storages[gap.storage].name
    }


@pytest.mark.long
def test_saved_resumed_and_planned_again(tmp_path: Path) -> None:
    """A checkpoint has every expert's values, and training goes on from it, and by a plan for what was counted."""
    model, plain = model_of(), Plain(model_of(), 1.0)
    graph = lading.capture(model, batches_of([[0]], 1)[0][0], loss_fn)

    def planned(experts: Any) -> lading.Plan:
        return lading.plan(
            graph, small_machine(), budget="100%", policy=values_away, clip_norm=1.0, optimizer=OPTIMIZER,
            experts=experts, cache=False,
        )  # fmt: skip

    steps = batches_of(USES, 1)
    with lading.Trainer(planned(True), graph, model, folder=tmp_path / "a") as trainer:
        for step in range(6):
            assert trainer.step(steps[step][0], lr=rate_of(step)) == plain.step(steps[step], rate_of(step))[0]
        saved = trainer.save(tmp_path / "saved")
        trainer.step(steps[0][0], lr=1.0)  # lost with the process
    small = {"tokens": steps[9][0]["tokens"][:1], "scale": torch.ones(())}
    steps[9] = [small]
    shapes = [lading.capture(model_of(), small, loss_fn)]
    with lading.Trainer(planned(True), graph, model_of(), folder=tmp_path / "b", shapes=shapes) as trainer:
        trainer.load(saved)
        for step in range(6, 12):
            with torch.no_grad():  # experts that missed steps are brought up to date here, too
                expected = loss_fn(plain.model, steps[step + 1][0]).item()
            assert trainer.evaluate(steps[step + 1][0]) == expected
            assert trainer.step(steps[step][0], lr=rate_of(step)) == plain.step(steps[step], rate_of(step))[0]
        assert trainer.experts is not None
        shares = trainer.experts.shares()
        assert shares["layers.1"][0] > shares["layers.1"][2] > 0
        trainer.pause()
        trainer.resume(planned(shares), graph)
        for step in range(12, len(USES)):
            assert trainer.step(steps[step][0], lr=rate_of(step)) == plain.step(steps[step], rate_of(step))[0]
        for name, value in plain.values().items():
            assert same_bits(trainer.value(name), value), name


def moved_experts(program: Program) -> set[str]:
    """Experts, as ``layers.0.experts.1``, of which a Program moves values."""
    moves = {a.storage for a in program.actions if a.kind is ActionKind.MOVE}
    moved = {program.graph.storages[storage].name for storage in program.graph.persistent & moves}
    return {name[: name.index(".experts.") + len(".experts.0")] for name in moved if ".experts." in name}


@pytest.mark.long
def test_experts_chosen_often_stay_in_memory(tmp_path: Path) -> None:
    """A plan that knows shares keeps the experts that are chosen most, and a step moves less for it; numbers stay."""
    often, fast = 3, dict.fromkeys(("read_bytes_per_s", "write_bytes_per_s"), 2e10)
    disk = dataclasses.replace(
        small_machine().tiers[0], latency_s=1e-6, **fast, **{f"mixed_{key}": 1e10 for key in fast}
    )
    machine = dataclasses.replace(small_machine(), tiers=(disk,))
    graph = lading.capture(model_of(hidden=2048), batches_of([[0]], 1)[0][0], loss_fn)
    short = lading.capture(
        model_of(hidden=2048), {"tokens": torch.zeros(1, 8).long(), "scale": torch.ones(())}, loss_fn
    )
    shares = {f"layers.{layer}": [1.0 if e == often else 0.1 for e in range(4)] for layer in range(2)}

    def planned(experts: Any) -> lading.Plan:
        return lading.plan(
            graph,
            machine,
            budget="70%",
            clip_norm=1.0,
            optimizer=OPTIMIZER,
            experts=experts,
            cache=False,
            others=[short],
        )

    plans = {name: planned(experts) for name, experts in (("unknown", True), ("known", shares))}
    programs = {name: programs_of(plan, graph, [short])[0] for name, plan in plans.items()}
    hot = {f"layers.{layer}.experts.{often}" for layer in range(2)}
    assert moved_experts(programs["unknown"]) & hot
    assert not moved_experts(programs["known"]) & hot
    kept = int(re.findall(r"(\d+) stay in memory", plans["known"].assumptions[-1])[0])
    assert kept == 8 - len(moved_experts(programs["known"]))
    moved = dict[str, int]()
    steps = batches_of([[often], [often], [often, 1], [often]] * 2, 1)
    for name, plan in plans.items():
        plain = Plain(model_of(hidden=2048), 1.0)
        with lading.Trainer(plan, graph, model_of(hidden=2048), folder=tmp_path / name, others=[short]) as trainer:
            for step, batches in enumerate(steps):
                assert trainer.step(batches[0], lr=rate_of(step)) == plain.step(batches, rate_of(step))[0]
            assert trainer.experts is not None
            moved[name] = sum(trainer.experts.moved_bytes.values())
            for value, expected in plain.values().items():
                assert same_bits(trainer.value(value), expected), value
    assert moved["known"] < 0.75 * moved["unknown"]
