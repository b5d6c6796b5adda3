"""Seconds of matrix optimizers on devices of the catalog."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.machines import small_machine

from lading.catalog.load import load_machine
from lading.cost.collective import collective_s
from lading.cost.compute import op_seconds
from lading.cost.matrix_updates import direction_s, shared_s
from lading.cost.product import peak_flops
from lading.cost.topology import group_of_ranks
from lading.ir.expand import expand
from lading.ir.graph import OpKind
from lading.optim.adamw import AdamW
from lading.optim.moment_rule import StateFormat
from lading.optim.muon import Muon
from lading.optim.rule import UpdateWork
from lading.tracing.trace import capture


@pytest.mark.parametrize("shape", [(5120, 25600), (25600, 5120), (1024, 1024)])
def test_an_iteration_takes_no_less_than_its_products_at_the_peak(shape: tuple[int, int]):
    device = load_machine("h100").device
    work = Muon().work(*shape)
    seconds = direction_s(work, shape[0] * shape[1], device, "bf16", 5e-6)
    assert work.flops / peak_flops(device, "bf16") < seconds < 4 * work.flops / peak_flops(device, "bf16") + 1e-3


def test_small_matrices_take_what_the_host_takes():
    device = load_machine("h100").device
    assert direction_s(Muon().work(64, 64), 4096, device, "bf16", 5e-6) == pytest.approx((15 + 4) * 5e-6)


def test_updates_that_widen_states_take_what_was_measured():
    """In ns for an element, of two cores on which the fused kernel takes 0.64 (``lading.optim.moment_rule``)."""
    model = torch.nn.Linear(1024, 2048, bias=False)
    captured = capture(model, torch.ones(2, 1024), lambda model, x: model(x).sum())
    device = dataclasses.replace(small_machine().device, optimizer_elements_per_s=1e9 / 0.64)
    measured: dict[StateFormat, float] = {"auto": 0.64, "fp32": 0.64, "bf16": 2.5, "8bit": 7.6}
    for states, each_ns in measured.items():
        graph = expand(captured, optimizer=AdamW(states=states))
        taken = sum(op_seconds(graph, op, device) for op in graph.ops if op.kind is OpKind.STEP)
        assert 1e9 * taken / (1024 * 2048) == pytest.approx(each_ns, rel=0.05), states


def test_decompositions_are_slow():
    """As many operations in a decomposition take longer than in products."""
    device = load_machine("h100").device
    n = 4096
    decomposed = direction_s(UpdateWork((), eigen=((1.0, n),)), n * n, device, "fp32", 5e-6)
    multiplied = direction_s(UpdateWork(((4.5, n, n, n),)), n * n, device, "fp32", 5e-6)
    assert decomposed > 3 * multiplied


def test_ranks_that_share_a_matrix_tell_each_other_their_rows_in_every_round():
    machine = load_machine("h100")
    five, ten = (shared_s(Muon(steps=steps), 1024, 4096, machine, 0.0)[0] for steps in (5, 10))
    group, width = group_of_ranks(2, machine), 2
    met = sum(collective_s("all_gather", 1024 * columns * width, group, machine) for columns in (1024, 4096))
    assert ten - five > 5 * met
