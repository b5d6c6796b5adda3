"""Updates on the host of states on a disk, end to end on the stand-in: planned, saved, trained, stopped and resumed."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import pytest
import torch

from lading import Plan, StepGraph, Trainer, capture, plan
from lading.checkpoint.store import open_checkpoint
from lading.ir.graph import Role
from lading.memory.restore import program_of
from lading.optim.adamw import AdamW
from lading.runtime.device import DeviceDriver
from tests.machines import machine_with_host
from tests.runs import budget_for
from tests.runtime.fake_accelerator import FakeApi, fake_device

WIDTH, ROWS, STEPS, LR = 256, 16, 6, 1e-3

pytestmark = pytest.mark.usefixtures("one_thread")


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(layer for _ in range(6) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())))


def batch(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))}


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["x"])


@cache
def graph_of() -> StepGraph:
    return capture(net(), batch(0), loss_of)


def stand_in() -> DeviceDriver:
    """Driver of the device."""
    return fake_device(FakeApi())


@cache
def made() -> Plan:
    """A plan for a device and a host with room for the parameters, whose link the disk shares."""
    machine = machine_with_host(host_bytes_per_s=2e11, elements_per_s=5e9)
    machine = dataclasses.replace(
        machine,
        device=dataclasses.replace(machine.device, kind=f"{__name__}:stand_in"),
        tiers=tuple(dataclasses.replace(t, wire="link", latency_s=1e-6) for t in machine.tiers),
    )
    graph = graph_of()
    everything = program_of(plan(graph, machine, budget="100%", cache=False), graph)
    return plan(graph, machine, budget=budget_for(everything, 0.4), budgets={"host": "3MB"}, cache=False)


def trainer_of(folder: Path, planned: Plan | Path) -> Trainer:
    return Trainer(planned, graph_of(), net(), optimizer=AdamW(lr=LR), folder=folder, threads=1)


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


def test_a_plan_from_disk_trains_and_resumes_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made().save(path)
    expected = plain()
    with trainer_of(tmp_path / "swap", path) as trainer:
        program = trainer.program
        past = [a for a in program.actions if (a.source, a.target) == ("disk", "host")]
        assert Role.OPTIMIZER_STATE in {program.graph.storages[a.storage or 0].role for a in past}
        losses = [trainer.step(batch(step)) for step in range(4)]
        copied = trainer.save(tmp_path / "copied")
        kept = trainer.save(tmp_path / "saved", in_place=True)
        trainer.wait_saved()
        assert losses == expected[:4]
        assert trainer.step(batch(4)) == expected[4]
        timeline = trainer.timeline()
        assert {"disk_read", "disk_write", "host_compute"} <= {event.stream for event in timeline.events}
        assert 0 < timeline.peak_of_tier("host") <= program.tier_bytes("host") <= 3_000_000
    for saved in (kept, copied):
        assert list(open_checkpoint(saved).damages()) == []
        with trainer_of(tmp_path / "swap", path) as trainer:
            trainer.load(saved)
            assert [trainer.step(batch(step)) for step in range(4, STEPS)] == expected[4:]
