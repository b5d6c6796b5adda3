"""Wrappers and collectives are refused by name: a captured step runs on one rank."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lading.errors import CaptureError
from lading.tracing.trace import capture

BATCH = {"x": torch.zeros(2, 4)}


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone: what is refused is refused there, too."""
    meet: Path = tmp_path_factory.mktemp("group") / "meet"
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).sum()


def _plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def _with_dtensor() -> nn.Module:
    model = _plain()
    mesh = init_device_mesh("cpu", (1,))
    whole = model.get_parameter("1.weight").detach()
    model[1].weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    return model


def _with_inner(wrap: Callable[[nn.Module], Any]) -> nn.Module:
    model = _plain()
    model[1] = wrap(model[1])
    return model


_ON_CPU: dict[str, Any] = {"device_id": torch.device("cpu")}
WRAPPED: dict[str, tuple[Callable[[], Any], str]] = {
    "ddp": (lambda: DistributedDataParallel(_plain()), "the model: .* found DistributedDataParallel; .*lading.apply"),
    "ddp inside": (lambda: _with_inner(DistributedDataParallel), "module '1': .* found DistributedDataParallel"),
    "fsdp1": (lambda: FullyShardedDataParallel(_plain(), **_ON_CPU), r"found FullyShardedDataParallel \(FSDP1\)"),
    "fsdp2": (lambda: fully_shard(_plain()), r"the model: .* found fully_shard \(FSDP2\)"),
    "fsdp2 inside": (lambda: _with_inner(fully_shard), r"module '1': .* found fully_shard \(FSDP2\)"),
    "replicas": (lambda: DataParallel(_plain()), "the model: .* found DataParallel; .* capture the plain module"),
    "pieces": (_with_dtensor, r"1\.weight: expected a plain tensor, found a DTensor placed \(Shard\(dim=0\),\)"),
}


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_model(name: str) -> None:
    make, said = WRAPPED[name]
    with pytest.raises(CaptureError, match=said):
        capture(make(), BATCH, _loss)


def _all_reduced(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    dist.all_reduce(copy)
    return copy


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    out = [torch.empty_like(tensor)]
    dist.all_gather(out, tensor)
    return out[0]


COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "c10d": _all_reduced,
    "c10d gather": _gathered,
    "functional": lambda t: functional.all_reduce(t, "sum", dist.group.WORLD),  # pyright: ignore[reportArgumentType]
    "functional with gradient": lambda t: torch.ops._c10d_functional_autograd.all_gather_into_tensor(t, 1, "0"),
    "op": lambda t: torch.ops._c10d_functional.broadcast(t, 0, "0"),
    "barrier": lambda t: dist.barrier() or t,
}


class _Calls(nn.Module):
    def __init__(self, call: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.call(x)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_in_forward_or_in_the_loss(name: str) -> None:
    call = COLLECTIVES[name]
    with pytest.raises(CaptureError, match=r"cannot capture .* in the model itself: a captured step runs on one rank"):
        capture(_Calls(call), BATCH, _loss)
    with pytest.raises(CaptureError, match=r"cannot capture .* in the loss: a captured step runs on one rank"):
        capture(_plain(), BATCH, lambda model, batch: call(model(batch["x"]).detach()).sum() + _loss(model, batch))


def test_a_loss_that_calls_a_wrapper() -> None:
    """Around the model that is captured: its parameters would be exchanged, and its reducer left out."""
    model = _plain()
    wrapped = DistributedDataParallel(model)
    with pytest.raises(CaptureError, match=r"the loss calls a DistributedDataParallel: .* capture the plain module"):
        capture(model, BATCH, lambda _, batch: wrapped(batch["x"]).sum())
    assert capture(_plain(), BATCH, _loss).ops  # nothing stays behind


def test_a_batch_in_pieces() -> None:
    pieces = distribute_tensor(torch.zeros(2, 4), init_device_mesh("cpu", (1,)), [Replicate()])
    with pytest.raises(CaptureError, match="x: expected a plain tensor, found a DTensor"):
        capture(_plain(), {"x": pieces}, _loss)


_ENDING = """
import sys
import time
from pathlib import Path
import torch
import torch.distributed as dist
import lading

def gloo_threads():
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meet", rank=0, world_size=1)
before = dist.group.WORLD
for _ in range(3000):  # a thread has its name only once it runs, which on a busy host takes a while
    if gloo_threads():
        break
    time.sleep(0.01)
assert gloo_threads() > 0
lading.capture(torch.nn.Linear(2, 2), torch.ones(1, 2), lambda model, batch: model(batch).sum())
assert dist.group.WORLD is before
assert "torch._dynamo" in sys.modules
del before
dist.destroy_process_group()
assert gloo_threads() == 0
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are looked for as Linux lists them")
def test_a_process_group_ends_where_it_is_destroyed_though_a_step_was_captured(tmp_path: Path) -> None:
    # One that something keeps has threads as Python ends, which then takes the process down once in a while.
    subprocess.run([sys.executable, "-c", _ENDING, str(tmp_path)], check=True, timeout=60)
