"""Tiers are data: another disk, and a memory behind a socket that only this file knows, take part in training."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import socketserver
import struct
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from lading.catalog.load import machine_from_dict, machine_to_toml
from lading.config import MemoryConfig, load_run
from lading.errors import ConfigError, ProgramError, StorageError
from lading.ir.graph import Role, StepGraph
from lading.ir.host_ops import light_groups
from lading.ir.machine import TIER_SPEEDS, Tier
from lading.ir.plan import Plan
from lading.ir.program import Program
from lading.memory.restore import program_of
from lading.memory.verify import verify
from lading.optim.adamw import AdamW
from lading.planner.api import make_plan
from lading.planner.host_balance import hosted_step
from lading.planner.residency import ResidencySearch, flow_bound_s, lower_bound_s
from lading.prepare import plan
from lading.report.html import write_report
from lading.report.plan_table import placement_table
from lading.report.promises import RunSummary
from lading.runtime.device import DeviceDriver
from lading.runtime.host_arena import Arena
from lading.runtime.tiers import open_tier
from lading.sim.device_step import simulate
from lading.tracing.trace import capture
from lading.trainer import Trainer
from tests.machines import machine_with_host, small_machine
from tests.planner.steps import captured, every_choice, needs, random_choices, step_of, tiny, within
from tests.programs import GraphBuilder, ProgramBuilder
from tests.programs import machine as toy_machine
from tests.runs import budget_for
from tests.runtime.fake_accelerator import FakeApi, fake_device

STEPS, WIDTH, ROWS = 3, 64, 32
LR = 1e-2
#: READ or WRITE, the offset and the number of bytes; bytes follow a WRITE, and answer a READ.
HEAD = struct.Struct("<cQQ")


class SocketTier:
    """Bytes that another process, or here a thread, keeps: one connection for each direction."""

    def __init__(self, size_bytes: int, location: str) -> None:
        host, _, port = location.rpartition(":")
        try:
            self._read, self._write = (socket.create_connection((host, int(port))) for _ in range(2))
        except OSError as error:
            raise StorageError(f"cannot reach {location}: {error}") from error
        self._size_bytes = size_bytes

    def read(self, offset: int, into: torch.Tensor) -> None:
        self._read.sendall(HEAD.pack(b"R", offset, len(into)))
        into.copy_(torch.frombuffer(bytearray(_received(self._read, len(into))), dtype=torch.uint8))

    def write(self, offset: int, data: torch.Tensor) -> None:
        self._write.sendall(HEAD.pack(b"W", offset, len(data)) + data.numpy().tobytes())
        assert _received(self._write, 1) == b"."

    def close(self) -> None:
        self._read.close()
        self._write.close()


def _received(connection: socket.socket, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = connection.recv(min(count, 1 << 16))
        if not part:
            raise ConnectionError("the other end has closed")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Keeper(socketserver.ThreadingTCPServer):
    """The other end."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.memory = bytearray(1 << 22)
        self.written_bytes = 0


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        keeper = self.server
        assert isinstance(keeper, Keeper)
        with contextlib.suppress(ConnectionError):
            while True:
                kind, offset, count = HEAD.unpack(_received(self.request, HEAD.size))
                if kind == b"R":
                    self.request.sendall(keeper.memory[offset : offset + count])
                else:
                    keeper.memory[offset : offset + count] = _received(self.request, count)
                    keeper.written_bytes += count
                    self.request.sendall(b".")


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    with Keeper() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


pytestmark = pytest.mark.usefixtures("one_thread")


def slower(tier: Tier, name: str, kind: str, location: str) -> Tier:
    """A tier behind ``tier``, at half its rates."""
    rates = {f.name: getattr(tier, f.name) / 2 for f in dataclasses.fields(tier) if f.name.endswith("bytes_per_s")}
    return dataclasses.replace(tier, name=name, kind=kind, location=location, persistent=False, **rates)


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())))


def batch(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))}


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["x"])


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    return capture(net(), batch(0), loss_of)


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """Losses of plain PyTorch."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    losses: list[float] = []
    for step in range(STEPS):
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(params=["nvme2", "far"])
def third(request: pytest.FixtureRequest, tmp_path: Path, keeper: Keeper) -> Tier:
    """A second disk in another folder, or a memory behind a socket."""
    disk = small_machine().tiers[0]
    if request.param == "nvme2":
        return slower(disk, "nvme2", "file", str(tmp_path / "second"))
    port = keeper.server_address[1]
    return slower(disk, "far", f"{__name__}:{SocketTier.__name__}", f"127.0.0.1:{port}")


@pytest.fixture
def made(graph: StepGraph, third: Tier) -> Plan:
    """A plan in less than half of the tensors' memory that has to put something behind a disk of a few pages."""
    small = small_machine()
    everything = program_of(plan(graph, small, budget="100%", cache=False), graph)
    return plan(
        graph,
        dataclasses.replace(small, tiers=(*small.tiers, third)),
        budget=budget_for(everything, 0.45),
        budgets={"disk": 5 * WIDTH * WIDTH * 4, third.name: "4MB"},
        cache=False,
    )


@pytest.mark.long
def test_a_third_tier_takes_part_in_training(
    graph: StepGraph, plain: list[float], made: Plan, third: Tier, tmp_path: Path, keeper: Keeper
) -> None:
    assert {"disk", third.name} <= {choice.option.tier for choice in made.choices.gaps}
    assert 0 < made.peak_bytes[third.name] <= made.budgets[third.name] == 4_000_000
    path = tmp_path / "plan.json"
    made.save(path)
    assert Plan.load(path) == made
    assert f"gaps on {third.name}" in repr(made)
    with Trainer(path, graph, net(), optimizer=AdamW(lr=LR), folder=tmp_path / "swap") as trainer:
        losses = [trainer.step(batch(step)) for step in range(STEPS)]
        measured, program = trainer.timeline(), trainer.program
    assert losses == plain
    assert keeper.written_bytes if third.name == "far" else (tmp_path / "second").is_dir()
    verify(program)
    predicted = simulate(program, machine_from_dict(made.request.machine_table, "plan"))
    for timeline in (predicted, measured):
        assert {f"{third.name}_read", f"{third.name}_write"} <= {event.stream for event in timeline.events}
        assert 0 < timeline.peak_of_tier(third.name) <= program.tier_bytes(third.name)
    _check_report(tmp_path / "report.html", made, graph, predicted=predicted, measured=measured, tier=third.name)


def _check_report(path: Path, made: Plan, graph: StepGraph, *, tier: str, **timelines: object) -> None:
    program = program_of(made, graph)
    columns = [str(column.header) for column in placement_table(made, program.graph).columns]
    assert columns == ["role", "total", "keep", "recompute", "disk", tier]
    summary = RunSummary(
        title="", model="", machine="", date="", budget_bytes=made.budgets["device"], keep_all_bytes=1,
        predicted_step_s=made.step_s, predicted_peak_bytes=made.peak_bytes["device"],
    )  # fmt: skip
    write_report(path, plan=made, program=program, metrics=(), summary=summary, **timelines)  # type: ignore[arg-type]
    text = path.read_text()
    assert f"{tier.capitalize()} use over one step" in text
    assert f"read {tier}" in text


@pytest.mark.long
def test_a_device_that_cannot_reach_a_tier_goes_through_memory_that_it_can(
    graph: StepGraph, plain: list[float], made: Plan, tmp_path: Path
) -> None:
    device = fake_device(FakeApi())
    with Trainer(made, graph, net(), optimizer=AdamW(lr=LR), folder=tmp_path / "swap", device=device) as trainer:
        assert [trainer.step(batch(step)) for step in range(STEPS)] == plain


def stand_in() -> DeviceDriver:
    """Driver of a device that only this file knows."""
    return fake_device(FakeApi())


def test_a_device_that_only_the_machine_file_names_trains(graph: StepGraph, plain: list[float], tmp_path: Path) -> None:
    small = small_machine()
    machine = dataclasses.replace(small, device=dataclasses.replace(small.device, kind=f"{__name__}:stand_in"))
    assert machine_from_dict(tomllib.loads(machine_to_toml(machine)), "again") == machine
    everything = program_of(plan(graph, machine, budget="100%", cache=False), graph)
    found = plan(graph, machine, budget=budget_for(everything, 0.5), cache=False)
    with Trainer(found, graph, net(), optimizer=AdamW(lr=LR), folder=tmp_path / "swap") as trainer:
        losses = [trainer.step(batch(step)) for step in range(STEPS - 1)]
        trainer.pause()
        trainer.resume(found, graph)  # its values lay in the host's memory meanwhile
        assert [*losses, trainer.step(batch(STEPS - 1))] == plain
        assert trainer.base_bytes == 0
        assert 0 < trainer.peak_bytes <= found.budgets["device"]
    gone = dataclasses.replace(machine, device=dataclasses.replace(machine.device, kind=f"{__name__}:gone"))
    with pytest.raises(ConfigError, match="device: expected a kind that Lading has, or a 'module:function'"):
        Trainer(plan(graph, gone, budget="100%", cache=False), graph, net(), folder=tmp_path / "swap")


def test_names_of_tiers_mean_nothing() -> None:
    """Under other names the same Programs come out, with operations on the host's processors too."""
    usual = machine_with_host(host_bytes_per_s=2e11, elements_per_s=5e10)
    host, disk = usual.tiers
    renamed = dataclasses.replace(
        usual, tiers=(dataclasses.replace(host, name="near"), dataclasses.replace(disk, name="away"))
    )
    texts: list[list[str]] = []
    for machine, names in ((usual, ("host", "disk")), (renamed, ("near", "away"))):
        step = captured("gpt", machine=machine)
        step = within(step, int(0.6 * needs(step, {})))
        groups = light_groups(step.graph)
        search = ResidencySearch(step, ())
        search.advance()
        assert search.best is not None
        hosted = hosted_step(within(step, 1 << 30), groups[0])
        programs = [search.best.program, hosted.lower(random_choices(hosted, Random(0))).program]
        texts.append([_renamed(program, dict(zip(names, ("host", "disk"), strict=True))) for program in programs])
    assert texts[0] == texts[1]
    assert all(f" {tier}_{way}" in texts[0][1] for tier in ("host", "disk") for way in ("read", "write"))
    assert " host_compute " in texts[0][1]


def _renamed(program: Program | None, names: dict[str, str]) -> str:
    assert program is not None
    verify(program)
    text = program.text()
    for old, new in names.items():
        for mark in (" {}_", "from={}", "to={}", "budget {} ", "slots {} "):
            text = text.replace(mark.format(old), mark.format(new))
    return text


@pytest.mark.parametrize(
    ("wire", "slow_rate", "ends"),
    [("", 50, [10.0, 20.0]), ("link", 50, [20.0, 20.0]), ("link", 25, [40.0 / 3, 40.0]), ("link", 80, [20.0, 20.0])],
)
def test_tiers_share_a_wire(wire: str, slow_rate: float, ends: list[float]) -> None:
    """Two loads of 1000 bytes, one at 100 bytes/s: a slower one keeps its rate up to half of the wire's."""
    build = GraphBuilder()
    first, second = (build.storage(name, 1000, Role.PARAMETER) for name in "ab")
    for storage in (first, second):
        build.op([storage], [build.storage("out", 64, Role.ACTIVATION)])
    p = ProgramBuilder(build.graph(), {first: "host", second: "disk"}, {"host": [first], "disk": [second]})
    p.load(first, "host")
    p.load(second, "disk")
    for op in range(2):
        p.run(op)
    p.free_all()
    program, toy = p.program(), toy_machine(latency_s=0.0)
    slow = dataclasses.replace(toy.tiers[1], read_bytes_per_s=slow_rate)
    tiers = tuple(dataclasses.replace(tier, wire=wire) for tier in (toy.tiers[0], slow))
    timeline = simulate(program, dataclasses.replace(toy, tiers=tiers), op_seconds=[0.0, 0.0])
    assert [e.end_s for e in timeline.events if e.stream.endswith("_read")] == pytest.approx(ends)


@pytest.mark.parametrize("share", [1.0, 0.26])
@pytest.mark.parametrize("seed", range(3))
def test_a_bound_knows_a_shared_wire(seed: int, share: float) -> None:
    """It lies below the best of all choices, and above the bound of tiers on wires of their own."""
    step = tiny(seed, depth=1)
    disk = dataclasses.replace(step.machine.tiers[0], wire="bus")
    rates = {key: share * getattr(disk, key) for key in TIER_SPEEDS if key.endswith("bytes_per_s")}
    other = dataclasses.replace(disk, name="nvme2", location="/second", **rates)
    shared = dataclasses.replace(step.machine, tiers=(disk, other))
    apart = dataclasses.replace(step.machine, tiers=(disk, dataclasses.replace(other, wire="")))
    steps = [within(step_of(step.graph, machine, step.costs), step.budgets["device"]) for machine in (shared, apart)]
    bounds = [lower_bound_s(one) for one in steps]
    assert bounds[1] <= bounds[0] + 1e-12
    best = min(found.step_s for found in every_choice(steps[0]))
    assert bounds[0] <= best + 1e-12
    assert flow_bound_s(steps[0], 4) <= best + 1e-9


def test_a_disk_behind_a_link_is_used_where_the_host_has_no_room() -> None:
    machine = machine_with_host()
    near, far = machine.tiers
    rates = {key: 0.25 * getattr(far, key) for key in TIER_SPEEDS if key.endswith("bytes_per_s")}
    for wire, host_bytes, used in (("link", "1GB", {"host"}), ("link", "1MB", {"host", "disk"})):
        tiers = (dataclasses.replace(near, wire=wire), dataclasses.replace(far, wire=wire, **rates))
        wired = dataclasses.replace(machine, tiers=tiers)
        made = make_plan(captured().graph, wired, budget="60%", budgets={"host": host_bytes})
        assert {name for name, places in made.program.slots.items() if places} == used


def test_storages_begin_where_a_tier_wants_them() -> None:
    disk = dataclasses.replace(small_machine().tiers[0], alignment_bytes=1 << 16)
    step = captured("gpt", machine=dataclasses.replace(small_machine(), tiers=(disk,)))
    program = step.lower(random_choices(step, Random(0))).program
    assert program is not None
    verify(program)
    offsets = [offset for _, offset in program.slots["disk"]]
    assert len(offsets) > 2
    assert all(offset % (1 << 16) == 0 for offset in offsets)
    crooked = dataclasses.replace(program, slots={"disk": tuple((s, at + 4096) for s, at in program.slots["disk"])})
    with pytest.raises(ProgramError, match="expected slot offsets at multiples of 65536 B"):
        verify(crooked)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "keep"}, "expected a tier's name of letters, digits and underscores, none of device, caller"),
        ({"name": "a b"}, "expected a tier's name"),
        ({"kind": "tape"}, "tier disk: expected the kind 'memory', 'file' or 'module:function', got 'tape'"),
        ({"host_computes": True}, "the host's processors cannot work on a file"),
        ({"alignment_bytes": 512}, "expected alignment_bytes in whole pages of 4096, got 512"),
    ],
)
def test_what_no_tier_can_be_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(small_machine().tiers[0], **change)  # type: ignore[arg-type]


def test_tiers_that_cannot_be_together_are_refused() -> None:
    small = small_machine()
    disk = small.tiers[0]
    for other, words in (
        (disk, "expected tiers of different names, got 'disk'"),
        (dataclasses.replace(disk, name="nvme2"), "more than one tier of kind 'file' at the folder of the run"),
        (dataclasses.replace(disk, name="nvme2", location="x", wire="disk"), "expected a wire that is no tier"),
    ):
        with pytest.raises(ConfigError, match=words):
            dataclasses.replace(small, tiers=(disk, other))


def test_a_machine_file_says_all_of_a_tier(tmp_path: Path) -> None:
    disk = slower(small_machine().tiers[0], "nvme2", "my.module:open", "/second")
    tier = dataclasses.replace(disk, host_computes=True, persistent=True, alignment_bytes=1 << 16, wire="bus")
    machine = dataclasses.replace(small_machine(), tiers=(tier,))
    text = machine_to_toml(machine)
    assert machine_from_dict(tomllib.loads(text), "f") == machine
    earlier = text.replace('kind = "my.module:open"\n', "")
    with pytest.raises(ConfigError, match=r"f: missing key 'kind' in \[tiers.0\].*'memory', 'file' or"):
        machine_from_dict(tomllib.loads(earlier), "f")


def test_a_kind_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    tier = dataclasses.replace(small_machine().tiers[0], kind="no_such_module:open")
    with pytest.raises(ConfigError, match="that can be imported, got 'no_such_module:open'"):
        open_tier(tier, 4096, tmp_path, Arena)


def test_any_tier_has_a_budget_in_a_run(tmp_path: Path) -> None:
    """Shares are of the capacity where the tier is no file; a budget of no tier is an error."""
    path = tmp_path / "run.toml"
    path.write_text("""
        model = { name = "gpt" }
        data = { batch_size = 1, sequence_length = 8 }
        optimization = { steps = 1 }
        memory = { budget = "1GB", disk_budget = 0, budgets = { far = "25%" } }
    """)
    memory = load_run(path, ["memory.budgets.nvme2=10GB"]).memory
    assert memory.tier_budgets({"disk": 7, "far": 4000, "nvme2": 9}, "disk") == {
        "disk": 0, "far": 1000, "nvme2": 10_000_000_000,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"memory.budgets: expected tiers of the machine \(disk\), got 'far'"):
        memory.tier_budgets({"disk": 7}, "disk")
    with pytest.raises(ConfigError, match=r"budgets\.far: "):
        load_run(path, ["memory.budgets.far=1"])


def test_the_disk_budget_is_that_of_the_nearest_file_whatever_its_name() -> None:
    """Of several files the nearest; a tier has one budget."""
    disk = small_machine().tiers[0]
    swap = dataclasses.replace(disk, name="nvme", location="/fast")
    memory = dataclasses.replace(disk, name="disk", kind="memory")
    machine = dataclasses.replace(small_machine(), tiers=(memory, swap, dataclasses.replace(disk, name="slow")))
    assert machine.swap_tier == "nvme"
    sizes = {tier.name: 1000 for tier in machine.tiers}
    assert MemoryConfig(budget="1GB").tier_budgets(sizes, machine.swap_tier) == {"nvme": 500}
    named = MemoryConfig(budget="1GB", budgets={"nvme": "25%", "disk": "70MB"})
    assert named.tier_budgets(sizes, machine.swap_tier) == {"nvme": 250, "disk": 70_000_000}
    with pytest.raises(ConfigError, match=r"expected one budget of nvme, got disk_budget and budgets\.nvme"):
        dataclasses.replace(named, disk_budget="1MB").tier_budgets(sizes, machine.swap_tier)
