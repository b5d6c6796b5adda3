"""Plans of another kind are refused before a model is touched; the error names the command that makes the right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.plans import cluster_plan, placed_plan, some_plan
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import lading
from lading.errors import ConfigError
from lading.ir.plan import PlanKind

PLANS = {PlanKind.RUN: some_plan(), PlanKind.CLUSTER: cluster_plan(), PlanKind.PLACEMENT: placed_plan()}
READERS: dict[PlanKind, tuple[str, Callable[[Any, nn.Module], object]]] = {
    PlanKind.RUN: ("lading.Trainer", lambda plan, model: lading.Trainer(plan, None, model, independent=True)),  # type: ignore[arg-type]
    PlanKind.CLUSTER: ("lading.apply", lambda plan, model: lading.apply(plan, model, init_device_mesh("cpu", (2,)))),
    PlanKind.PLACEMENT: (
        "lading.place",
        lambda plan, model: lading.place(plan, model, (torch.zeros(1, 4),), lambda output, _: output.sum()),
    ),
}
COMMANDS = {
    PlanKind.RUN: "lading plan RUN.toml",
    PlanKind.CLUSTER: "lading plan --model NAME --machine NAME --devices N",
    PlanKind.PLACEMENT: "lading place --model NAME --machine LIST",
}
WRONG = [(reader, kind) for reader in PlanKind for kind in PlanKind if kind is not reader]


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("reader", "kind"), WRONG)
def test_a_plan_of_another_kind_is_refused(reader: PlanKind, kind: PlanKind, tmp_path: Path) -> None:
    name, read = READERS[reader]
    file = tmp_path / "plan.json"
    PLANS[kind].save(file)
    said = f"expected a {reader}, found a {kind}; make one with: {COMMANDS[reader]}"
    _refused(lambda model: read(PLANS[kind], model), f"{name}: {said}")
    for path in (file, str(file)):  # the file is named, not who read it
        _refused(lambda model, path=path: read(path, model), f"{file}: {said}")


@pytest.mark.parametrize("reader", PlanKind)
@pytest.mark.parametrize("plan", [None, {"format": 5}, nn.Linear(2, 2)], ids=["None", "dict", "module"])
def test_what_is_no_plan_is_refused(reader: PlanKind, plan: Any) -> None:
    name, read = READERS[reader]
    said = f"{name}: expected a {reader} or the path of its file, got {type(plan).__name__}; make one with: "
    _refused(lambda model: read(plan, model), said + COMMANDS[reader])


def _refused(call: Callable[[nn.Module], object], said: str) -> None:
    """``call`` raises with these words at the start, and leaves the model as it was."""
    model = nn.Sequential(nn.Linear(4, 4))
    before = {name: id(param) for name, param in model.named_parameters()}
    with pytest.raises(ConfigError) as caught:
        call(model)
    assert str(caught.value).startswith(said), str(caught.value)
    assert {name: id(param) for name, param in model.named_parameters()} == before
