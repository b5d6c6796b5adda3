"""Speculation: the bits of plain PyTorch with clipping, whether steps are clipped or not, and nothing half done."""

from __future__ import annotations

import itertools
import random
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.runtime.cases import (
    OPTIMIZER,
    TIERED,
    assert_equals_eager,
    batches_of,
    disk_always,
    eager_run,
    graph_of,
    host_always,
    load,
    model_of,
    program_of,
)
from tests.runtime.fake_accelerator import FakeApi, fake_device

from lading.errors import ConfigError, ProgramError, StorageError
from lading.ir.action import Action
from lading.ir.graph import PERSISTENT, Phase, StepGraph
from lading.ir.guess import coefficient_op, guess_of, speculated, update_names, with_guess
from lading.ir.host_ops import hosted, light_groups
from lading.ir.late_updates import even_moves, with_late_updates
from lading.ir.plan import Option
from lading.ir.program import PAGE_BYTES, Program
from lading.memory.tier_layout import home_tiers
from lading.memory.values_before import known_before, on_device_alone
from lading.runtime.executor import Executor

#: Norms that gradients of some of the first steps are above, by model; of no step; of every step.
SOME, NEVER, ALWAYS = {"gpt": 2.8, "llama": 1.68, "moe": 2.42}, 1e3, 1e-3
RATES = (1e-3, 5e-4, 2e-3, 1e-3, 1e-3, 1e-3)


def on_device(program: Program) -> set[str]:
    """Parameters of which something is on the device alone, and is no number of updates."""
    alone = on_device_alone(program)
    return {name for name, each in update_names(program.graph).items() if each & alone}


@cache
def speculating(
    name: str, clip: float, *, micro: int = 1, waiting: int = 0, late: bool = False, op_s: float = 1e-5
) -> StepGraph:
    """A step all of whose values go to the disk where they can; as many more updates wait."""
    graph = graph_of(name, micro=micro, clip=clip)
    wait = set(random.Random(0).sample(sorted(update_names(graph)), waiting))
    while True:
        made = with_guess(graph, wait)
        made = with_late_updates(made, even_moves(made, [1.0] * len(made.ops), 2.0))[0] if late else made
        more = on_device(program_of(made, disk_always, op_s=op_s)) - wait
        if not more:
            return made
        wait |= more


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "micro", "tier", "waiting", "late"),
    [("gpt", 1, "disk", 0, False), ("llama", 2, "host", 5, True), ("moe", 1, "disk", 9, True)],
)
@pytest.mark.parametrize("clip", [0.0, NEVER, ALWAYS], ids=["some", "never", "always"])
def test_equals_plain_pytorch(
    tmp_path: Path, name: str, micro: int, tier: str, waiting: int, late: bool, clip: float
) -> None:
    clip = clip or SOME[name]
    graph = speculating(name, clip, micro=micro, waiting=waiting, late=late)
    program = program_of(graph, disk_always if tier == "disk" else host_always, TIERED)
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        assert_equals_eager(executor, name, micro=micro, clip=clip, rates=RATES)
        assert executor.speculation is not None
        again = executor.speculation.again
        assert again in {NEVER: [0], ALWAYS: [len(RATES)]}.get(clip, range(1, len(RATES)))
        assert executor.completed == len(RATES)


def test_gradients_are_gone_before_the_norm_is_known() -> None:
    graph = speculating("gpt", 1.0)
    norm = coefficient_op(graph)
    assert norm is not None
    assert guess_of(graph) is not None
    early = [i for i, op in enumerate(graph.ops) if op.name == "lading.adamw" and i < norm]
    late = [i for i, op in enumerate(graph.ops) if op.name == "lading.adamw" and i > norm]
    assert len(early) > len(late) // 3 > 0
    assert all(graph.storages[s].role in PERSISTENT for s in speculated(graph))
    plain = graph_of("gpt")
    order = [op.inputs[0] for op in plain.ops if op.phase is Phase.OPTIMIZER]
    assert [t for t in order if t in {graph.ops[i].inputs[0] for i in early}] == [graph.ops[i].inputs[0] for i in early]


@pytest.mark.long
@pytest.mark.parametrize("clip", [SOME["moe"], ALWAYS])
def test_what_is_written_after_its_update_goes_to_a_second_place(tmp_path: Path, clip: float) -> None:
    """Operations take so long that all transfers end within their step."""
    program = program_of(speculating("moe", clip, op_s=1e-3), disk_always, op_s=1e-3)
    assert len(program.second_places["disk"]) > len(speculated(program.graph)) // 2
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        assert_equals_eager(executor, "moe", clip=clip, rates=RATES)
        assert executor.speculation is not None
        assert executor.speculation.again


def test_each_value_has_two_places_of_its_own() -> None:
    program = program_of(speculating("llama", 1.0, op_s=1e-3), disk_always, op_s=1e-3)
    places = program.second_places["disk"]
    homes, sizes = home_tiers(program), program.graph.storages
    assert places.keys() >= {s for s in speculated(program.graph) if homes[s] == "disk"}
    taken = sorted([*dict(program.slots["disk"]).items(), *places.items()], key=lambda place: place[1])
    starts = sorted(places.values())
    assert starts[0] >= max(offset + sizes[s].size_bytes for s, offset in program.slots["disk"])
    assert all(b - a >= PAGE_BYTES for a, b in itertools.pairwise(starts))
    assert program.tier_bytes("disk") >= max(offset + sizes[s].size_bytes for s, offset in taken)


def test_what_changes_on_a_guess_may_not_be_at_home_on_the_device(tmp_path: Path) -> None:
    program = program_of(speculating("llama", 1.0), lambda _: Option.KEEP)
    with pytest.raises(ProgramError, match="until the norm of all gradients is known"):
        Executor(program, optimizer=OPTIMIZER, folder=tmp_path)


def test_a_step_that_fails_before_the_norm_is_known_has_not_happened(tmp_path: Path) -> None:
    """Most updates have run by then, and none counts."""
    program = program_of(speculating("gpt", SOME["gpt"]), disk_always)
    norm = coefficient_op(program.graph)
    stop_at = next(a.id for a in program.actions if a.op == norm)
    armed = [False]

    def fails(action: Action) -> None:
        if armed[0] and action.id == stop_at:
            raise RuntimeError("stopped here")

    batches, reference = batches_of(3, 1), model_of("gpt")
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True, jitter=fails) as executor:
        load(executor, model_of("gpt"))
        torch.manual_seed(2)
        executor.step(batches[0], lr=1e-3)
        before = {
            s: executor.read_storage(s).clone() for s in executor.homes if s not in executor.program.graph.carried
        }
        state = torch.get_rng_state()
        armed[0] = True
        with pytest.raises(ProgramError, match="stopped here"):
            executor.step(batches[1], lr=1e-3)
        armed[0] = False
        assert executor.is_whole
        assert not executor.changed
        assert [s for s, b in before.items() if not torch.equal(executor.read_storage(s), b)] == []
        torch.set_rng_state(state)
        losses = [executor.step(b, lr=1e-3) for b in batches[1:]]
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path) as other:
        load(other, reference)
        torch.manual_seed(2)
        other.step(batches[0], lr=1e-3)
        assert [other.step(b, lr=1e-3) for b in batches[1:]] == losses


def test_a_step_without_clipping_or_with_changed_buffers_is_refused() -> None:
    with pytest.raises(ConfigError, match="clipped: expected a step whose gradients are clipped"):
        with_guess(graph_of("gpt"), set())


def test_an_interrupt_at_the_end_of_a_step_that_is_clipped_takes_it_back(tmp_path: Path) -> None:
    """All of its actions have run, most of them for nothing."""
    program = program_of(speculating("gpt", ALWAYS, op_s=1e-3), disk_always, op_s=1e-3)
    last = max(a.id for a in program.actions if a.stream == "compute")
    stops: list[Executor] = []

    def stopped(action: Action) -> None:
        if stops and action.id == last:
            stops.pop().stop(KeyboardInterrupt())

    batch = batches_of(1, 1)[0]
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True, jitter=stopped) as executor:
        load(executor, model_of("gpt"))
        before = {s: executor.read_storage(s).clone() for s in executor.homes}
        state = torch.get_rng_state()
        stops.append(executor)
        with pytest.raises(KeyboardInterrupt):
            executor.step(batch, lr=1e-3)
        assert executor.completed == 0
        assert executor.is_whole
        assert [s for s, value in before.items() if not torch.equal(executor.read_storage(s), value)] == []
        torch.set_rng_state(state)
        loss = executor.step(batch, lr=1e-3)
        torch.manual_seed(2)
        assert loss == eager_run(model_of("gpt"), [batch], [1e-3], ALWAYS)[0]


def test_values_that_cannot_be_read_again_are_lost_and_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of(speculating("gpt", ALWAYS), disk_always)
    assert any(before.tier for before in known_before(program).values())
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path) as executor:
        load(executor, model_of("gpt"))

        def fails(*_: object) -> None:
            raise OSError("the disk is gone")

        monkeypatch.setattr(executor._values, "copy", fails)
        monkeypatch.setattr(executor.speculation, "_is_stale", False)
        with pytest.raises(StorageError, match="could not be read from their tier again; load a checkpoint"):
            executor.step(batches_of(1, 1)[0], lr=1e-3)
        assert executor.lost
        assert not executor.is_whole


@pytest.mark.long
@pytest.mark.parametrize("clip", [NEVER, SOME["llama"], ALWAYS])
def test_a_device_that_runs_behind_the_host_gives_the_same_bits(tmp_path: Path, api: FakeApi, clip: float) -> None:
    program = program_of(speculating("llama", clip, micro=2), host_always, TIERED)
    assert "host_write" in program.streams
    device = fake_device(api)
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, device=device, poison=True) as executor:
        assert_equals_eager(executor, "llama", micro=2, clip=clip, rates=RATES)
        assert executor.speculation is not None
        assert executor.speculation.again in {NEVER: [0], ALWAYS: [len(RATES)]}.get(clip, range(1, len(RATES)))


def on_host(graph: StepGraph, share: float) -> StepGraph:
    """A share of the updates that may run on the host, drawn at random."""
    rng = random.Random(1)
    return hosted(graph, (i for group in light_groups(graph) if rng.random() < share for i in group))


@cache
def hosted_program(clip: float, share: float) -> Program:
    """Updates on the host, some of which wait; what they do not touch goes to the disk."""
    graph, wait = graph_of("llama", micro=2, clip=clip), set[str]()
    wait |= set(random.Random(0).sample(sorted(update_names(graph)), 5))
    while True:
        program = program_of(on_host(with_guess(graph, wait), share), disk_always, TIERED)
        if not (more := on_device(program) - wait):
            return program
        wait |= more


@pytest.mark.long
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("clip", [NEVER, SOME["llama"], ALWAYS])
def test_updates_on_the_host_leave_the_values_from_before(
    tmp_path: Path, api: FakeApi, clip: float, share: float
) -> None:
    program = hosted_program(clip, share)
    graph, guessed = program.graph, speculated(program.graph)
    changed = {s for op in graph.hosted for s in guessed.intersection(graph.op_writes[op])}
    assert changed
    assert changed <= program.second_places["host"].keys()
    assert share == 1.0 or program.second_places["disk"], "others go by the device"
    device = fake_device(api)
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, device=device, poison=True) as executor:
        assert_equals_eager(executor, "llama", micro=2, clip=clip, rates=RATES)
        assert executor.speculation is not None
        assert executor.speculation.again in {NEVER: [0], ALWAYS: [len(RATES)]}.get(clip, range(1, len(RATES)))


@pytest.mark.long
def test_a_step_that_stops_amid_updates_on_the_host_has_not_happened(tmp_path: Path, api: FakeApi) -> None:
    program = hosted_program(NEVER, 1.0)
    graph, guessed = program.graph, speculated(program.graph)
    updates = [a.id for a in program.actions if a.op in graph.on_host and guessed.intersection(graph.op_writes[a.op])]
    armed: list[int] = []

    def fails(action: Action) -> None:
        if action.id in armed:
            raise RuntimeError("stopped here")

    batches, losses = batches_of(4, 2), list[list[float]]()
    with Executor(
        program, optimizer=OPTIMIZER, folder=tmp_path, device=fake_device(api), poison=True, jitter=fails
    ) as executor:
        load(executor, model_of("llama"))
        for number, batch in enumerate(batches):
            armed[:] = [updates[number * len(updates) // len(batches)]]
            before = {s: executor.read_storage(s).clone() for s in executor.homes}
            with pytest.raises(ProgramError, match="stopped here"):
                executor.step(batch, lr=1e-3)
            armed.clear()
            assert executor.is_whole
            assert [s for s, value in before.items() if not torch.equal(executor.read_storage(s), value)] == []
            losses.append(executor.step(batch, lr=1e-3))
    assert losses == eager_run(model_of("llama"), batches, [1e-3] * len(batches), NEVER)
