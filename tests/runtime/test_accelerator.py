"""The executor's lines for a device that runs behind the host, on a device whose streams are threads."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.cases import (
    HOST_ONLY,
    OPTIMIZER,
    RATES,
    TIERED,
    assert_equals_eager,
    at_random,
    batches_of,
    differing,
    eager_run,
    graph_of,
    host_always,
    load,
    loss_fn,
    model_of,
    program_of,
)
from tests.runtime.fake_accelerator import FakeApi, FakeMeter, fake_device

from lading.errors import ProgramError
from lading.grouping import Matrices
from lading.ir.action import Action, ActionKind
from lading.ir.defer import defer, updates
from lading.ir.expand import expand
from lading.ir.machine import Machine
from lading.ir.program import PAGE_BYTES, Program
from lading.optim.shampoo import ShampooRule
from lading.optim.soap import SOAPRule
from lading.runtime.accelerator import BouncedTier
from lading.runtime.executor import Executor
from lading.runtime.tiers import PIECE_BYTES, FileTier
from lading.runtime.workspace import measured_workspace
from lading.tracing.trace import capture

STEPS = [("gpt", 2, 1.0, 0.2), ("llama", 2, 0.5, 0.0), ("moe", 1, 0.0, 0.0)]


def executor_of(program: Program, folder: Path, api: FakeApi, **settings: object) -> Executor:
    device = fake_device(api)
    return Executor(program, optimizer=OPTIMIZER, folder=folder, device=device, poison=True, **settings)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize(
    ("machine", "name", "micro", "clip", "dropout"),
    [
        *(pytest.param(TIERED, *step, id=f"host and disk-{step[0]}") for step in STEPS),
        *(pytest.param(HOST_ONLY, *step, id=f"host-{step[0]}") for step in STEPS[:1]),
        *(pytest.param(HOST_ONLY, *step, id=f"host-{step[0]}", marks=pytest.mark.slow) for step in STEPS[1:]),
    ],
)
def test_equals_plain_pytorch(
    tmp_path: Path, api: FakeApi, name: str, micro: int, clip: float, dropout: float, machine: Machine
) -> None:
    sizes = {"dropout": dropout} if dropout else {}
    program = program_of(graph_of(name, micro=micro, clip=clip, **sizes), at_random(0), machine)
    tiers = {"host", "disk"} if machine is TIERED else {"host"}
    assert set(program.streams) == {"compute", *(f"{t}_{way}" for t in tiers for way in ("read", "write"))}
    with executor_of(program, tmp_path, api) as executor:
        assert_equals_eager(executor, name, micro=micro, clip=clip, **sizes)
        storage = program.graph.storage_of(program.graph.parameters[0].tensor)
        whole = b"".join(bytes(chunk) for chunk in executor.chunks(storage))
        assert whole == executor.read_storage(storage).numpy().tobytes()
        assert api.closed == 0
    assert api.closed == 1


def test_a_step_that_stops_leaves_its_values(tmp_path: Path, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was issued by then runs to its end; the values come home through the host."""
    program, batches = program_of(graph_of("gpt"), at_random(0), TIERED), batches_of(1, 1)
    reference = model_of("gpt")
    eager_run(reference, batches, RATES[:1], 0.0)
    with executor_of(program, tmp_path, api) as executor:
        entries = {entry.action: entry for queue in executor._bound.entries for entry in queue}
        updates = [a.id for a in program.actions if a.kind is ActionKind.STEP]
        for at in (updates[0] - 1, updates[-1]):
            load(executor, model_of("gpt"))
            issue = entries[at].run

            def stopped(issue: Any = issue) -> None:
                executor.stop(KeyboardInterrupt())
                issue()

            with monkeypatch.context() as patch:
                patch.setattr(entries[at], "run", stopped)
                with pytest.raises(KeyboardInterrupt):
                    executor.step(batches[0], lr=RATES[0])
            assert executor.lost == frozenset()
            if executor.is_whole:
                assert differing(executor, model_of("gpt")) == []
        moved = {p.names[0] for p in program.graph.parameters if program.graph.storage_of(p.tensor) in executor.changed}
        assert moved
        assert moved & set(differing(executor, reference)) == set()


def test_the_host_runs_ahead_of_the_device(tmp_path: Path) -> None:
    """Issuing a step takes less time than the device takes to do it, and nothing but the end waits for it."""
    api, seen = FakeApi(lambda: time.sleep(1e-3)), []
    program = program_of(graph_of("gpt", num_layers=1), None, HOST_ONLY)
    with executor_of(program, tmp_path, api) as executor:
        load(executor, model_of("gpt", num_layers=1))
        run = executor._run_stream

        def timed(name: str) -> None:
            start = time.perf_counter()
            run(name)
            seen.append(time.perf_counter() - start)

        executor._run_stream = timed  # type: ignore[method-assign]
        start = time.perf_counter()
        executor.step(batches_of(1, 1)[0], lr=1e-3)
        whole = time.perf_counter() - start
    api.stop()
    assert whole > len(program.graph.ops) * 1e-3
    assert seen[0] < whole / 3


def test_streams_that_do_not_wait_for_events_show(tmp_path: Path, api: FakeApi) -> None:
    """The tests above can fail: without the waits between streams the numbers are wrong."""
    program = program_of(graph_of("gpt"), host_always, HOST_ONLY)
    losses = eager_run(model_of("gpt"), batches_of(1, 1), RATES[:1], 0.0)
    with executor_of(program, tmp_path, api) as executor:
        load(executor, model_of("gpt"))
        executor._device.begin()
        api.deaf = True
        try:
            got = executor.step(batches_of(1, 1)[0], lr=RATES[0])
        except ProgramError:  # tokens of poison are no tokens
            return
        assert got != losses[0]


@pytest.mark.parametrize("machine", [TIERED, HOST_ONLY], ids=["host and disk", "host"])
def test_timeline_is_one_legal_run(tmp_path: Path, api: FakeApi, machine: Machine) -> None:
    program = program_of(graph_of("gpt"), at_random(0), machine)
    with executor_of(program, tmp_path, api) as executor:
        load(executor, model_of("gpt"))
        for timing in (True, False, True):
            executor.timing = timing
            executor.step(batches_of(1, 1)[0], lr=1e-3)
        timeline = executor.timeline()
        assert executor.observe_peak() == program.arena_bytes == timeline.peak_bytes
    events = {event.action: event for event in timeline.events}
    assert sorted(events) == list(range(len(program.actions)))
    last: dict[str, float] = {}
    for action in program.actions:
        event = events[action.id]
        assert last.get(action.stream, 0.0) <= event.start_s <= event.end_s
        # Its thread stamps by the host's clock, the others by events; one is laid on the other once a step, at a moment
        # in which a busy host may have taken the processor away.
        blocking = action.stream.startswith("disk")
        slack = 2e-2 if blocking or any(program.actions[w].stream.startswith("disk") for w in action.waits) else 0.0
        assert all(events[w].end_s <= event.start_s + slack for w in action.waits), str(action)
        last[action.stream] = event.end_s
    assert timeline.duration_s < 60


def test_a_failure_on_the_device_is_reported(tmp_path: Path, api: FakeApi) -> None:
    """It shows when the step is awaited; a failure while issuing is still named."""
    program = program_of(graph_of("gpt"), host_always, HOST_ONLY)
    with executor_of(program, tmp_path, api) as executor:
        load(executor, model_of("gpt"))
        (batches,) = batches_of(1, 1)
        batches[0]["x"][0, 0] = 1000
        with pytest.raises(ProgramError, match=r"runs behind the host: device-side error: .*out of range"):
            executor.step(batches, lr=1e-3)
        with pytest.raises(Exception, match="load a checkpoint"):
            executor.step(batches, lr=1e-3)
    assert not [t for t in threading.enumerate() if t.name.startswith("lading")]


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, api: FakeApi) -> None:
    program = program_of(graph_of("gpt"), at_random(0), TIERED)
    with executor_of(program, tmp_path, api) as executor:
        load(executor, model_of("gpt"))
        executor._caller.batches = ()
        executor._device.handed = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            executor.step(batches_of(1, 1)[0], lr=1e-3)
    assert not [t for t in threading.enumerate() if t.name.startswith("lading")]


def interrupted(_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("size", [100, PAGE_BYTES, PIECE_BYTES, 2 * PIECE_BYTES + 5 * PAGE_BYTES + 100])
def test_a_disk_through_two_pieces_of_host_memory(tmp_path: Path, api: FakeApi, size: int) -> None:
    tier = BouncedTier(api, FileTier(tmp_path, size + PAGE_BYTES))
    with api.on(api.stream()):
        data, back = torch.randint(256, (size,), dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        for offset in (0, PAGE_BYTES):
            tier.write(offset, data)
            tier.read(offset, back.zero_())
            assert torch.equal(back, data)
    tier.close()


def test_batches_and_losses_go_through_page_locked_memory(tmp_path: Path, api: FakeApi) -> None:
    model = torch.nn.Linear(4, 4)
    graph = expand(capture(model, {"x": torch.zeros(2, 4)}, lambda m, b: m(b["x"]).mean(), accumulation=2))
    with executor_of(program_of(graph, None, HOST_ONLY), tmp_path, api) as executor:
        load(executor, model)
        before = len(api.pinned)
        first = executor.step([{"x": torch.ones(2, 4)}, {"x": torch.full((2, 4), 2.0)}], lr=0.0)
        assert len(api.pinned) == before + 2
        assert executor.step([{"x": torch.ones(2, 4)}, {"x": torch.full((2, 4), 2.0)}], lr=0.0) == first
        assert len(api.pinned) == before + 2
        wanted = [(model(torch.full((2, 4), float(i))).mean() / 2).item() for i in (1, 2)]
        assert first == wanted


def test_batches_of_several_shapes_are_handed_over(tmp_path: Path, api: FakeApi) -> None:
    """In any order, from memory that is taken once for the largest."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    rows = (3, 1, 2)
    graphs = [capture(model, {"x": torch.zeros(count, 4)}, lambda m, b: m(b["x"]).mean()) for count in rows]
    program = program_of(expand(graphs[0]), None, HOST_ONLY)
    with executor_of(program, tmp_path, api) as executor:
        load(executor, model)
        for each in graphs[1:]:
            executor.add_shape(dataclasses.replace(program, graph=expand(each)))
        pinned: list[list[int]] = []
        for number in (2, 0, 1, 0, 2):
            x = torch.randn(rows[number], 4)
            (loss,) = executor.step([{"x": x}], lr=0.0, shape=number)
            assert loss == pytest.approx(model(x).mean().item(), abs=1e-6)
            pinned.append(list(api.pinned))
        assert pinned[1:] == pinned[1:2] * 4


def test_actions_are_named_on_both_halves(tmp_path: Path, api: FakeApi) -> None:
    def jitter(action: Action) -> None:
        if action.stream == "disk_read":
            raise OSError("no such luck")

    program = program_of(graph_of("gpt"), at_random(0), TIERED)
    with executor_of(program, tmp_path, api, jitter=jitter) as executor:
        load(executor, model_of("gpt"))
        with pytest.raises(Exception, match=r"action \d+ MOVE disk_read .* failed: no such luck"):
            executor.step(batches_of(1, 1)[0], lr=1e-3)


def test_updates_deferred_into_the_next_step(tmp_path: Path, api: FakeApi) -> None:
    graph = graph_of("gpt")
    later, _ = defer(graph, len(updates(graph)))
    program = program_of(later, host_always, HOST_ONLY)
    with executor_of(program, tmp_path, api) as executor:
        assert_equals_eager(executor, "gpt", rates=RATES[:2])


def test_scratch_is_measured_once_for_equal_operations(api: FakeApi) -> None:
    graph = graph_of("gpt")
    reset = []
    api.meter = lambda: CountingMeter(api, reset)  # type: ignore[method-assign,assignment]
    scratch = measured_workspace(graph, api)
    assert len(scratch) == len(graph.ops)
    assert len(reset) == len(set(scratch)) < len(graph.ops)
    products = {scratch[i] for i, op in enumerate(graph.ops) if op.name == "aten.addmm.default"}
    assert 1 < len(products) <= 4


@pytest.mark.parametrize("rule", ["soap", "shampoo"])
def test_scratch_is_measured_when_matrices_are_decomposed(
    rule: Any, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of parts that another update of the same parameter has counted."""
    matrices = Matrices(rule=rule, lr=0.1, parameters={"*.qkv.weight": 3, "*": "rest"})
    captured = capture(model_of("gpt", num_layers=1), batches_of(1, 1)[0][0], loss_fn)
    due: list[int] = []

    def decomposing(own: Any, matrix: torch.Tensor, whole: Any, update: int) -> torch.Tensor:
        due.extend([update] if update == 1 or getattr(own.settings, _DUE[rule])(update - (rule == "soap")) else [])
        return torch.zeros_like(matrix)

    for kind in (SOAPRule, ShampooRule):
        monkeypatch.setattr(kind, "direction", decomposing)
    measured_workspace(expand(captured, matrices=matrices), api)
    assert set(due) == {1, 2}
    assert len(due) == 2 * 2 * 2  # an update that counts and one that does not, warm and measured


_DUE = {"soap": "turns_bases", "shampoo": "takes_roots"}


class CountingMeter(FakeMeter):
    """One byte more for each operation that is measured."""

    def __init__(self, api: FakeApi, reset: list[int]) -> None:
        super().__init__(api)
        self.resets = reset

    def reset(self) -> None:
        self.resets.append(0)

    def now_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return len(self.resets)
