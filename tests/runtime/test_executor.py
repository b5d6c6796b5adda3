"""The executor computes what plain PyTorch computes, bit for bit, whatever a program evicts and however threads run."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.programs import with_actions
from tests.runtime.cases import (
    OPTIMIZER,
    RATES,
    assert_equals_eager,
    at_random,
    batches_of,
    differing,
    disk_always,
    eager_run,
    graph_of,
    keep_all,
    load,
    model_of,
    program_of,
)

from lading.errors import ConfigError, ProgramError, StorageError
from lading.ir.action import Action, ActionKind
from lading.ir.expand import expand
from lading.ir.graph import PERSISTENT, StepGraph
from lading.ir.program import Program
from lading.runtime.executor import Executor
from lading.runtime.host_arena import Arena
from lading.tracing.trace import capture

STEPS = [("gpt", 1, 0.0, 0.0), ("gpt", 2, 1.0, 0.2), ("llama", 2, 0.5, 0.0), ("moe", 1, 0.0, 0.0)]


def executor_of(program: Program, folder: Path, **settings: object) -> Executor:
    return Executor(program, optimizer=OPTIMIZER, folder=folder, **settings)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize(
    ("evict", "name", "micro", "clip", "dropout"),
    [
        *(("all", *step) for step in STEPS),
        ("nothing", *STEPS[1]),
        ("half", *STEPS[3]),
        *(pytest.param("nothing", *STEPS[n], marks=pytest.mark.slow) for n in (0, 2, 3)),
        *(pytest.param("half", *STEPS[n], marks=pytest.mark.slow) for n in (0, 1, 2)),
    ],
)
def test_equals_plain_pytorch(tmp_path: Path, name: str, micro: int, clip: float, dropout: float, evict: str) -> None:
    sizes = {"dropout": dropout} if dropout else {}
    graph = graph_of(name, micro=micro, clip=clip, **sizes)
    pick = {"nothing": None, "half": at_random(0), "all": disk_always}[evict]
    program = keep_all(graph) if pick is None else program_of(graph, pick)
    with executor_of(program, tmp_path, poison=True) as executor:
        assert_equals_eager(executor, name, micro=micro, clip=clip, **sizes)


def test_sleeping_streams_do_not_change_the_numbers(tmp_path: Path) -> None:
    graph = graph_of("gpt", micro=2, clip=1.0)
    program = program_of(graph, at_random(1))
    assert set(program.streams) == {"compute", "disk_read", "disk_write"}
    sleepers = {stream: random.Random(stream) for stream in program.streams}

    def jitter(action: Action) -> None:
        if sleepers[action.stream].random() < 0.2:
            time.sleep(sleepers[action.stream].random() * 2e-3)

    with executor_of(program, tmp_path, poison=True, jitter=jitter) as executor:
        assert_equals_eager(executor, "gpt", micro=2, clip=1.0, rates=RATES[:2])


def test_a_missing_wait_shows(tmp_path: Path) -> None:
    """The test above can fail: without the waits on reads, slow reads give wrong numbers."""
    program = program_of(graph_of("gpt"), disk_always)
    reads = {a.id for a in program.actions if a.stream == "disk_read"}
    careless = tuple(
        dataclasses.replace(a, waits=tuple(w for w in a.waits if w not in reads)) if a.stream == "compute" else a
        for a in program.actions
    )
    losses = eager_run(model_of("gpt"), batches_of(1, 1), RATES[:1], 0.0)

    def jitter(action: Action) -> None:
        if action.stream == "disk_read":
            time.sleep(1e-3)

    program = with_actions(program, careless)
    with executor_of(program, tmp_path, poison=True, jitter=jitter) as executor:
        load(executor, model_of("gpt"))
        with contextlib.suppress(ProgramError):  # tokens of poison are no tokens
            assert executor.step(batches_of(1, 1)[0], lr=RATES[0]) != losses[0]


def test_a_use_after_free_shows(tmp_path: Path) -> None:
    """Poison works: freeing a weight that is still needed turns the loss into NaN."""
    program = keep_all(graph_of("llama"))
    weight = program.graph.storage_of(program.graph.parameters[3].tensor)
    first = next(a.id for a in program.actions if a.op is not None)
    actions = list(program.actions)
    actions.insert(first, Action(first, ActionKind.FREE, "compute", storage=weight, source="device"))
    home = dict(program.resident)[weight]
    use = dataclasses.replace(actions[first + 1], places=(*actions[first + 1].places, (weight, home)))
    actions[first + 1] = use
    numbered = tuple(dataclasses.replace(a, id=i) for i, a in enumerate(actions))
    with executor_of(with_actions(program, numbered), tmp_path, poison=True) as executor:
        load(executor, model_of("llama"))
        (loss,) = executor.step(batches_of(1, 1)[0], lr=1e-3)
        assert math.isnan(loss)


class Reused(torch.nn.Module):
    """A buffer that changes in training, a constant, a frozen and a channels-last parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        self.frozen = torch.nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).mean((2, 3)) * self.frozen + torch.tensor([0.5, 1.5] * 4)
        self.count.add_(y.detach().sum(0))  # type: ignore[operator]
        return y.square().mean()


def reused_run() -> tuple[Reused, StepGraph, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, batch = Reused(), {"x": torch.randn(2, 4, 6, 6)}
    return model, expand(capture(model, batch, lambda m, b: m(b["x"]))), batch


def test_buffers_constants_and_layouts(tmp_path: Path) -> None:
    model, graph, batch = reused_run()
    with executor_of(keep_all(graph), tmp_path, poison=True) as executor:
        load(executor, model)
        assert differing(executor, model) == []
        got = [executor.step([batch], lr=1e-2)[0] for _ in range(3)]
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.1, fused=True)
        want = []
        for _ in range(3):
            optimizer.param_groups[0]["lr"] = 1e-2
            loss = model(batch["x"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            want.append(loss.item())
        assert got == want
        assert differing(executor, model) == []
        (weight,) = (p.tensor for p in graph.parameters if p.names == ("conv.weight",))
        weight = executor.read_storage(graph.storage_of(weight))
        assert weight.stride() == model.conv.weight.stride()


@pytest.mark.parametrize("evict", [None, disk_always], ids=["device", "disk"])
def test_storages_come_back_as_written(tmp_path: Path, evict: object) -> None:
    graph = graph_of("gpt", dim=128)
    program = program_of(graph, evict)  # type: ignore[arg-type]
    with executor_of(program, tmp_path) as executor:
        homes = set(executor.homes.values())
        assert homes == ({"device"} if evict is None else {"device", "disk"})
        persistent = [i for i, s in enumerate(graph.storages) if s.role in PERSISTENT]
        written = {}
        for storage in persistent:
            before = executor.read_storage(storage)
            assert not before.any(), "storages start as zeros"
            written[storage] = torch.randn(before.shape) if before.dtype is torch.float32 else before.clone()
            executor.write_storage(storage, written[storage])
        assert all(torch.equal(executor.read_storage(s), value) for s, value in written.items())
        weight = next(s for s in persistent if written[s].dim() == 2)
        executor.write_storage(weight, written[weight].t().contiguous().t())
        assert torch.equal(executor.read_storage(weight), written[weight]), "other strides"
        raw = torch.arange(graph.storages[weight].size_bytes).to(torch.uint8)
        executor.write_storage(weight, raw)
        assert torch.equal(executor.read_storage(weight).contiguous().view(torch.uint8).flatten(), raw)
        executor.read_storage(weight).zero_()
        assert executor.read_storage(weight).any(), "what is read is a copy"
        executor.write_part(weight, 12, torch.zeros(8, dtype=torch.uint8))
        raw[12:20] = 0
        assert torch.equal(executor.read_storage(weight).contiguous().view(torch.uint8).flatten(), raw)


def test_storages_larger_than_the_bounce_buffer(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 1100), torch.nn.Linear(1100, 1001), torch.nn.Linear(1001, 8))
    model[1].weight.requires_grad_(False)  # nothing writes it, so its home is the disk
    batch = {"x": torch.randn(1, 8)}
    graph = expand(capture(model, batch, lambda m, b: m(b["x"]).mean()))
    with executor_of(program_of(graph, disk_always), tmp_path) as executor:
        large = next(p for p in graph.parameters if p.names[0] == "1.weight")  # 4.4 MB and no whole page
        storage = graph.storage_of(large.tensor)
        assert executor.homes[storage] == "disk"
        executor.write_storage(storage, model[1].weight)
        executor.step([batch], lr=0.0)
        want = model[1].weight.detach() * 1.0
        assert torch.equal(executor.read_storage(storage), want)
        part = torch.randn(300_000)  # from one piece of what passes through memory into the third
        executor.write_part(storage, 4 * 250_000, part.view(torch.uint8))
        want.view(-1)[250_000:550_000] = part
        assert torch.equal(executor.read_storage(storage), want)


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    graph = graph_of("gpt", micro=2)
    (batches,) = batches_of(1, 2)
    with executor_of(keep_all(graph), tmp_path) as executor:
        load(executor, model_of("gpt"))
        with pytest.raises(ConfigError, match="completed step"):
            executor.timeline()
        with pytest.raises(ConfigError, match="expected 2 micro-batches, got 1"):
            executor.step(batches[:1], lr=1e-3)
        with pytest.raises(ConfigError, match=r"micro-batch 1: expected the inputs \['x', 'y'\], got \['x'\]"):
            executor.step([batches[0], {"x": batches[1]["x"]}], lr=1e-3)
        with pytest.raises(ConfigError, match=r"expected 'y' of int64 \(2, 16\), got int32 \(2, 16\)"):
            executor.step([{**batches[0], "y": batches[0]["y"].int()}, batches[1]], lr=1e-3)
        with pytest.raises(ConfigError, match=r"expected 'x' of int64 \(2, 16\), got int64 \(2, 15\)"):
            executor.step([{**batches[0], "x": batches[0]["x"][:, 1:]}, batches[1]], lr=1e-3)
        with pytest.raises(ConfigError, match=r"'tokens.weight' as float32 \(80, 64\), got float32 \(64, 80\)"):
            executor.write_storage(graph.storage_of(graph.parameters[0].tensor), torch.zeros(64, 80))
        activation = next(i for i, s in enumerate(graph.storages) if s.role not in PERSISTENT)
        with pytest.raises(ConfigError, match="holds no value between steps"):
            executor.read_storage(activation)
        executor.step(batches, lr=1e-3)
        with pytest.raises(ConfigError, match="at least one compute thread"):
            executor_of(keep_all(graph), tmp_path, threads=0)
    executor.close()
    with pytest.raises(ConfigError, match="closed"):
        executor.step(batches, lr=1e-3)


def test_timeline_is_one_legal_run(tmp_path: Path) -> None:
    program = program_of(graph_of("gpt"), at_random(0))
    with executor_of(program, tmp_path) as executor:
        load(executor, model_of("gpt"))
        (batch,) = batches_of(1, 1)
        executor.step(batch, lr=1e-3)
        executor.step(batch, lr=1e-3)
        timeline = executor.timeline()
        assert executor.timeline() is timeline
    events = {event.action: event for event in timeline.events}
    assert sorted(events) == list(range(len(program.actions)))
    assert min(event.start_s for event in timeline.events) == 0.0
    last: dict[str, float] = {}
    for action in program.actions:
        event = events[action.id]
        assert event.stream == action.stream
        assert last.get(action.stream, 0.0) <= event.start_s <= event.end_s
        assert all(events[w].end_s <= event.start_s for w in action.waits), str(action)
        last[action.stream] = event.end_s
    assert 0 < timeline.peak_of_tier("device") <= program.arena_bytes + program.workspace_bytes
    assert all(size > 0 for sample in timeline.memory for size in sample.bytes_by_role.values())
    device = [s.bytes_by_role for s in timeline.memory if s.tier == "device"]
    assert (
        device[0]
        == device[-1]
        == {"parameter": device[0]["parameter"], "optimizer_state": device[0]["optimizer_state"]}
    )
    assert 0 < timeline.peak_of_tier("disk") <= program.tier_bytes("disk")
    assert timeline.source == "measured"
    assert timeline.labels[0] == program.label(program.actions[0])


@pytest.mark.parametrize("verb", ["preadv", "pwritev"])
def test_a_failing_disk_stops_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    program = program_of(graph_of("gpt"), disk_always)
    with executor_of(program, tmp_path) as executor:
        load(executor, model_of("gpt"))
        real, count = getattr(os, verb), iter(range(1000))

        def broken(*args: object) -> int:
            if next(count) >= 7:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args)

        monkeypatch.setattr(os, verb, broken)
        begin = time.perf_counter()
        with pytest.raises(StorageError, match=r"action \d+ MOVE disk_\w+ .* failed: .*Input/output error"):
            executor.step(batches_of(1, 1)[0], lr=1e-3)
        assert time.perf_counter() - begin < 5
        assert executor.completed == 0
        if verb == "pwritev":  # nothing was updated yet, and what did not reach the disk is still on the device
            assert executor.is_whole
        else:
            with pytest.raises(ConfigError, match="load a checkpoint"):  # what lay there cannot be read any more
                executor.step(batches_of(1, 1)[0], lr=1e-3)
    assert not [t for t in threading.enumerate() if t.name.startswith("lading")]


@pytest.mark.long
@pytest.mark.parametrize("stream", ["compute", "disk_read", "disk_write"])
def test_any_stream_may_fail_at_any_action(tmp_path: Path, stream: str) -> None:
    program = program_of(graph_of("gpt"), disk_always)
    ids = [a.id for a in program.actions if a.stream == stream]
    for position in (0, len(ids) // 2, len(ids) - 1):

        def jitter(action: Action, bad: int = ids[position]) -> None:
            if action.id == bad:
                raise RuntimeError("boom")

        with executor_of(program, tmp_path, jitter=jitter) as executor:
            load(executor, model_of("gpt"))
            with pytest.raises(ProgramError, match=rf"action {ids[position]} .*failed: boom") as caught:
                executor.step(batches_of(1, 1)[0], lr=1e-3)
            assert caught.value.action_id == ids[position]
            assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_interrupt_comes_through(tmp_path: Path) -> None:
    program = program_of(graph_of("gpt"), disk_always)

    def jitter(action: Action) -> None:
        if action.kind is ActionKind.STEP:
            raise KeyboardInterrupt

    with executor_of(program, tmp_path, jitter=jitter) as executor:
        load(executor, model_of("gpt"))
        with pytest.raises(KeyboardInterrupt):
            executor.step(batches_of(1, 1)[0], lr=1e-3)
    assert not [t for t in threading.enumerate() if t.name.startswith("lading")]


def test_a_kernel_that_refuses_is_named(tmp_path: Path) -> None:
    with executor_of(keep_all(graph_of("gpt")), tmp_path) as executor:
        load(executor, model_of("gpt"))
        (batches,) = batches_of(1, 1)
        batches[0]["x"][0, 0] = 1000
        with pytest.raises(ProgramError, match=r"embedding tokens\) failed: .*out of range"):
            executor.step(batches, lr=1e-3)


def test_unknown_operations_are_refused_at_the_start(tmp_path: Path) -> None:
    graph = graph_of("gpt")
    ops = (dataclasses.replace(graph.ops[0], name="mylib.nothing.default"), *graph.ops[1:])
    program = dataclasses.replace(keep_all(graph), graph=dataclasses.replace(graph, ops=ops))
    with pytest.raises(ProgramError, match=r"found 'mylib.nothing.default'; import the library") as caught:
        executor_of(program, tmp_path)
    assert caught.value.action_id is not None


def test_one_run_per_folder(tmp_path: Path) -> None:
    program = program_of(graph_of("gpt"), disk_always)
    threads = torch.get_num_threads()
    with executor_of(program, tmp_path, threads=2):
        with pytest.raises(
            StorageError, match="in use by another Trainer of this process; close that one, or give this one a folder"
        ):
            executor_of(program, tmp_path, threads=3)
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == threads
    executor_of(program, tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_memory_that_is_gone_when_the_step_ends_is_in_its_peak(tmp_path: Path) -> None:
    """An operation takes 64 MiB for a moment: the present at the end of the step would not show it."""
    program, size = keep_all(graph_of("gpt")), 64 << 20
    middle = len(program.actions) // 2

    def take(action: Action) -> None:
        if action.id == middle:
            arena = Arena(size)
            arena.bytes_at(0, size).fill_(1)
            arena.close()

    with executor_of(program, tmp_path, jitter=take) as executor:
        load(executor, model_of("gpt"))
        executor.step(batches_of(1, 1)[0], lr=1e-3)
        peak, timeline = executor.step_peak_bytes, executor.timeline()
    assert size * 3 // 4 < peak < size + program.arena_bytes + (64 << 20)
    assert timeline.peak_bytes == peak == executor.peak_resident_bytes


MEMORY = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from lading.runtime.executor import Executor
from tests.runtime.cases import *
model = model_of("gpt", dim=256, vocab_size=4096, num_layers=2, max_seq_len=128)
batch = {k: torch.randint(0, 4096, (4, 128)) for k in "xy"}
loss_fn(model, batch).backward()  # kernels warm: what they keep is the probe's overhead, not the program's
model.zero_grad()
graph = expand(capture(model, batch, loss_fn))
evict = disk_always if sys.argv[2] == "disk" else None
program = program_of(graph, evict)
with Executor(program, optimizer=OPTIMIZER, folder=Path(sys.argv[1])) as executor:
    load(executor, model)
    for _ in range(2):
        executor.step([batch], lr=1e-3)
    print(executor.peak_resident_bytes, program.arena_bytes, program.workspace_bytes, executor.timeline().peak_bytes)
"""


@pytest.mark.long
@pytest.mark.parametrize("evict", [pytest.param("nothing", marks=pytest.mark.slow), "disk"])
def test_memory_stays_inside_arena_and_workspace(tmp_path: Path, evict: str) -> None:
    command = [sys.executable, "-c", MEMORY, str(tmp_path), evict]
    out = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    peak, arena, workspace, last = map(int, out.stdout.split())
    assert arena > 64 << 20
    # 8 MiB: code pages, BLAS buffers, thread stacks and closures; a fresh process's share of that is probed.
    assert last <= peak <= arena + workspace + (8 << 20), (peak, arena, workspace)
    assert peak > arena // 2


REUSE = """
import os, resource, sys, torch
from lading.runtime.resident import resident_bytes, reuse_pages, trim
torch.set_num_threads(1)
assert reuse_pages()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def measure(size):
    torch.ones(1 << 16), faults(), trim(), resident_bytes()  # code that the fork has not mapped yet
    trim()
    start = resident_bytes()
    for round in range(16):
        if round == 8:
            before = faults()
        several = [torch.ones(size >> 4) for _ in range(4)]
        del several
    print((faults() - before) / 8, resident_bytes() - start, flush=True)
for size in map(int, sys.argv[1:]):
    if not os.fork():
        measure(size)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.long
def test_freed_temporaries_keep_their_pages_up_to_a_size() -> None:
    """Each size in a process of its own, as what one leaves would serve the next."""
    sizes = [1 << 20, 4 << 20, 12 << 20, 40 << 20]
    out = subprocess.check_output([sys.executable, "-c", REUSE, *map(str, sizes)], timeout=60)
    for size, line in zip(sizes, out.splitlines(), strict=True):
        faults, left = map(float, line.split())
        if size < 40 << 20:
            assert faults * 4096 / size < 0.05
            assert left / size < 8
        else:
            assert left / size < 0.1, "large ones leave nothing behind"
