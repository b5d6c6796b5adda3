"""Exchanges that begin under backward and end under the next forward: the same bits, the same collectives."""

from __future__ import annotations

import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from lading import AdamW
from lading.errors import ConfigError
from lading.matrices import SOAP, MatrixOptimizer, Muon
from lading.runtime.exchange import _equal_told, _is_equal  # pyright: ignore[reportPrivateUsage]
from lading.runtime.in_flight import Early, Late
from lading.runtime.optimizer_hooks import _gathering  # pyright: ignore[reportPrivateUsage]
from lading.runtime.state_shards import Pieces
from tests.ranks import run_ranks

KINDS = {"muon": lambda p, **k: Muon(p, lr=0.02, **k), "soap": lambda p, **k: SOAP(p, lr=0.02, frequency=2, **k)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 18, bias=False), nn.Linear(18, 10, bias=False)
        self.norm = nn.RMSNorm(10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, and a first matrix that is used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 10, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden @ self.first.weight


def cut(mode: str, ranks: int) -> Any:
    torch.manual_seed(0)
    return cut_by(Net(), mode, ranks)


def cut_by(model: Any, mode: str, ranks: int) -> Any:
    """A model as each way of cutting leaves it; blocks, if it has some, are units of their own."""
    if mode == "own":
        return model
    if mode == "ddp":
        return DistributedDataParallel(model)
    shape = {"fsdp": (ranks,), "hsdp": (2, ranks // 2), "fsdp-tp": (ranks // 2, 2), "tp": (1, ranks)}[mode]
    names = {"hsdp": ("replicate", "shard")}.get(mode, ("dp", "tp")[: len(shape)])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    blocks = getattr(model, "blocks", ())
    if mode.endswith("tp"):
        for block in blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if mode == "tp":
        return model
    for block in blocks:
        fully_shard(block, mesh=mesh["dp"] if mode == "fsdp-tp" else mesh)
    return fully_shard(model, mesh=mesh["dp"] if mode == "fsdp-tp" else mesh)


def optimizer_of(model: nn.Module, kind: str = "muon", overlap: str = "step", **options: Any) -> MatrixOptimizer:
    named = list(model.named_parameters())
    rest = [(name, p) for name, p in named if p.ndim == 1]
    if overlap != "step":
        options["model"] = model
    groups = [{"params": [(n, p) for n, p in named if p.ndim > 1]}, {"params": rest, "rule": AdamW(lr=1e-2)}]
    return KINDS[kind](groups, overlap=overlap, groups=3, **options)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model: nn.Module, step: int, rank: int) -> float:
    loss = model(batch(step, rank)).square().mean()
    loss.backward()
    return float(loss.detach())


def trained(model: nn.Module, optimizer: MatrixOptimizer, data: int, steps: int = 3) -> list[float]:
    losses: list[float] = []
    for step in range(steps):
        losses.append(backward(model, step, data))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights(model: nn.Module, optimizer: MatrixOptimizer) -> list[torch.Tensor]:
    optimizer.finish()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


EVERY = ("step", "backward", "forward", "both")
MODES = {
    2: {"fsdp": EVERY, "own": EVERY, "hsdp": ("step", "both"), "tp": ("step", "both"), "ddp": ("step", "forward")},
    3: {"fsdp": EVERY, "own": EVERY},
    4: {"hsdp": ("step", "both"), "fsdp-tp": ("step", "both")},
    8: {"fsdp": EVERY, "hsdp": EVERY, "fsdp-tp": EVERY, "own": EVERY, "ddp": ("step", "forward")},
}


def _same(rank: int, ranks: int) -> None:
    for mode, overlaps in MODES[ranks].items():
        own = {"reduces": True} if mode == "own" else {}
        data = 0 if mode == "tp" else rank // 2 if mode == "fsdp-tp" else rank
        for kind in KINDS if mode == "fsdp" else ("muon",):
            found: dict[str, Any] = {}
            # Other rules than Muon overlap all ways on three ranks, in a slow test.
            for overlap in overlaps if kind == "muon" or ranks > 2 else ("step", "both"):
                model = cut(mode, ranks)
                optimizer = optimizer_of(model, kind, overlap, **own)
                losses = trained(model, optimizer, data)
                now = (losses, weights(model, optimizer), optimizer.traffic.collectives, optimizer.traffic.elements)
                before = found.setdefault("step", now)
                assert now[0] == before[0], (mode, kind, overlap)
                assert all(torch.equal(a, b) for a, b in zip(now[1], before[1], strict=True)), (mode, kind, overlap)
                assert now[3] == before[3], (mode, kind, overlap)
                # Replicas among DTensors have a group of their own, which sends nothing in.
                assert now[2] == before[2] or (mode == "tp" and now[2] < before[2]), (mode, kind, overlap)
                assert now[0][-1] != now[0][0]
                for ours in now[1]:  # no rank is apart from the first
                    first = ours.clone()
                    dist.broadcast(first, 0)
                    assert torch.equal(ours, first), (mode, kind, overlap)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 8))])
def test_bits_and_collectives_are_those_of_a_step_alone(ranks: int):
    run_ranks(_same, ranks, ranks)


def _starts_and_ends(rank: int) -> None:
    model = cut("fsdp", 2)
    optimizer = optimizer_of(model, overlap="both")
    pieces = [p.to_local().detach() for p in model.parameters() if isinstance(p, DTensor) and p.ndim > 1]
    backward(model, 0, rank)
    assert optimizer.traffic.collectives == 3  # all gradients are on their way, and nothing has moved
    before = [piece.clone() for piece in pieces]
    optimizer.step()
    assert optimizer.traffic.collectives == 6
    assert all(torch.equal(a, b) for a, b in zip(before, pieces, strict=True))
    # A rate that changes now is that of the next step.
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 100.0
    # The last block is read: its matrices have moved, and all that travelled with them.
    block = model.blocks[-1]
    block.unshard()
    assert all(float((a - b).abs().max()) < 1 for a, b in zip(before[-2:], pieces[-2:], strict=True))
    assert not torch.equal(before[-1], pieces[-1])
    block.reshard()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    # A state dict is that of the whole step.
    taken = model.state_dict()["first.weight"].to_local().clone()
    optimizer.finish()
    assert torch.equal(taken, model.first.weight.to_local())
    assert not torch.equal(taken, before[0])
    # Gathered ahead of time by the unit before.
    model.set_modules_to_forward_prefetch([block])
    optimizer.zero_grad()
    backward(model, 1, rank)
    optimizer.step()
    with torch.no_grad():
        now = model(batch(2, rank))
        optimizer.finish()
        assert torch.equal(now, model(batch(2, rank)))
    _two_optimizers(rank)


def _two_optimizers(rank: int) -> None:
    """Each ends its own step before a unit is gathered ahead of time."""
    model = cut("fsdp", 2)
    blocks = list(model.blocks)
    for here, following in pairwise(blocks):
        here.set_modules_to_forward_prefetch([following])
    for part in ("up", "down"):
        named = [(name, p) for name, p in model.named_parameters() if f".{part}." in name]
        optimizer = Muon(named, lr=0.02, overlap="forward", model=model)
        backward(model, 0, rank)
        optimizer.step()
        with torch.no_grad():
            now = model(batch(2, rank))
            optimizer.finish()
            assert torch.equal(now, model(batch(2, rank))), part


def test_gradients_leave_under_backward_and_results_arrive_when_they_are_read():
    run_ranks(_starts_and_ends, 2)


def _faults(rank: int, mode: str, overlap: str) -> None:
    model = cut(mode, 2)
    optimizer = optimizer_of(model, overlap=overlap, reduces=mode == "own")
    data = 0 if mode == "tp" else rank
    trained(model, optimizer, data, steps=1)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    start = weights(model, optimizer)

    def unmoved() -> bool:
        now = optimizer.state_dict()["state"]
        states = [(a, now[name][key]) for name, row in before.items() for key, a in row.items()]
        pairs = [pair for a, b in states for pair in zip(_parts(a), _parts(b), strict=True)]
        return all(torch.equal(a, b) for a, b in [*pairs, *zip(weights(model, optimizer), start, strict=True)])

    # Not finite on one rank, after it has been sent.
    model(batch(0, data) * (float("inf") if rank else 1)).square().mean().backward()
    optimizer.step()
    assert optimizer.skipped == 1
    assert unmoved()
    optimizer.zero_grad()
    # A step that is not taken.
    backward(model, 1, data)
    optimizer.zero_grad()
    if overlap in ("backward", "both"):
        _changes(model, optimizer, data)
    # A parameter without a gradient on one rank, then on all.
    backward(model, 1, data)
    lacking = getattr(model, "module", model).blocks[2].up.weight
    if rank == 1:
        lacking.grad = None
    with pytest.raises(ValueError, match=r"blocks\.2\.up\.weight: expected a gradient on all 2 ranks"):
        optimizer.step()
    assert unmoved()
    optimizer.zero_grad()
    early = overlap in ("backward", "both")
    lacking.requires_grad_(not early)
    backward(model, 1, data)
    lacking.grad = None
    optimizer.step()
    assert not unmoved()
    optimizer.zero_grad()
    lacking.requires_grad_(True)
    assert trained(model, optimizer, data)
    _accumulated(mode, overlap, data)


def _changes(model: Any, optimizer: MatrixOptimizer, data: int) -> None:
    """Gradients that change on the way: an error on all ranks."""
    backward(model, 1, data)
    clip_grad_norm_([p for p in model.parameters() if p.ndim > 1 and p is not model.first.weight], 1e-3)
    with pytest.raises(ValueError, match=r"was changed after it had been sent.*overlap='step'"):
        optimizer.step()
    optimizer.zero_grad()
    backward(model, 1, data)
    backward(model, 2, data)
    with pytest.raises(ValueError, match=r"was changed after it had been sent.*optimizer\.accumulate"):
        optimizer.step()
    optimizer.zero_grad()


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What this rank has of a state."""
    if isinstance(tensor, Pieces):
        return [part for _, part in sorted(tensor.parts.items())]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor]


def _accumulated(mode: str, overlap: str, rank: int) -> None:
    """Two micro-batches in a step, with and without overlap, and by FSDP2's flag."""

    def moved(overlap: str, *, flag: bool = False) -> list[torch.Tensor]:
        model = cut(mode, 2)
        optimizer = optimizer_of(model, overlap=overlap, reduces=mode == "own")
        with optimizer.accumulate():
            _reduces(model, not flag)
            backward(model, 5, rank)
        _reduces(model, True)
        backward(model, 6, rank)
        optimizer.step()
        return weights(model, optimizer)

    for flag in (False, True) if mode in ("fsdp", "hsdp") else (False,):
        found, expected = moved(overlap, flag=flag), moved("step", flag=flag)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (mode, overlap)


def _reduces(model: Any, now: bool) -> None:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


FAULTS = (("fsdp", "both"), ("own", "both"), ("ddp", "forward"))


def _all_faults(rank: int, ways: tuple[tuple[str, str], ...]) -> None:
    for mode, overlap in ways:
        _faults(rank, mode, overlap)


@pytest.mark.parametrize(
    "ways",
    [
        FAULTS,
        pytest.param(
            tuple(
                (m, o)
                for m in ("fsdp", "own", "hsdp", "tp", "ddp")
                for o in EVERY
                if m != "ddp" or o in ("step", "forward")
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_faults_under_overlap(ways: tuple[tuple[str, str], ...]):
    run_ranks(_all_faults, 2, ways)


def _drops(rank: int) -> None:
    """One rank has sent groups that the other has not: told to both, and the next step works."""
    model = cut("own", 2)
    optimizer = optimizer_of(model, overlap="backward", reduces=True)
    out = model.first(batch(0, rank)) if rank else model.blocks[2](torch.ones(1, 10))
    out.sum().backward()
    assert (optimizer.traffic.collectives == 0) == bool(rank)
    with pytest.raises(ValueError, match="expected a gradient on all 2 ranks or on none, found one on 1"):
        optimizer.step()
    optimizer.zero_grad()
    # One rank gives up a backward that the other has not run, and which steps with the next.
    backward(model, rank, rank)
    with pytest.raises(ValueError, match=r"1 of 2 ranks are in step\(\) and the others in zero_grad\(\)"):
        (optimizer.step if rank else optimizer.zero_grad)()
    optimizer.zero_grad()
    assert trained(model, optimizer, rank)


def test_ranks_that_have_sent_unlike_many_groups():
    run_ranks(_drops, 2)


def replica(overlap: str) -> tuple[nn.Module, MatrixOptimizer]:
    """On this process alone."""
    torch.manual_seed(0)
    model = Net()
    return model, optimizer_of(model, overlap=overlap, reduces=True)


def test_a_gradient_that_changes_and_keeps_its_sum_is_noticed():
    early = Early(SimpleNamespace(groups=[]), *[lambda number: None] * 2)  # type: ignore[arg-type]
    gradient = torch.tensor([1.0, 3.0])
    early.arrived(0, gradient)
    early.moving[0] = None  # type: ignore[assignment]  # sent
    assert not early.changed({0: gradient})[0]
    gradient.copy_(torch.tensor([2.0, 2.0]))
    assert early.changed({0: gradient})[0]


@pytest.mark.parametrize("numbers", [(0, 2), (1, 3), (5, 7, 6), (2**56, 3 * 2**56)])
def test_settings_that_differ_are_told_whatever_they_add_up_to(numbers: tuple[int, ...]):
    """Ranks learn sums alone."""
    told = [_equal_told(number) for number in numbers]
    assert not _is_equal([sum(each) for each in zip(*told, strict=True)], len(numbers))
    assert _is_equal([len(numbers) * each for each in told[0]], len(numbers))


def test_weights_that_are_loaded_stay():
    """What a step still has to move is moved before."""
    model, optimizer = replica("forward")
    saved = copy.deepcopy(model.state_dict())
    backward(model, 0, 0)
    optimizer.step()
    model.load_state_dict(saved)
    optimizer.finish()
    assert all(torch.equal(now, saved[name]) for name, now in model.state_dict().items())


def test_states_that_are_loaded_after_backward_count():
    _, before = made = replica("step")
    trained(*made, 0)
    found: list[list[torch.Tensor]] = []
    for overlap in ("step", "both"):
        model, optimizer = replica(overlap)
        backward(model, 0, 0)
        optimizer.load_state_dict(before.state_dict())
        optimizer.step()
        found.append(weights(model, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_another_optimizer_of_the_same_parameters():
    """The first has to be closed, or it would send what backward makes for ever."""
    model, first = replica("both")
    backward(model, 0, 0)
    with pytest.raises(ConfigError, match=r"expected one optimizer to which backward tells .* close\(\) that first"):
        optimizer_of(model, overlap="both", reduces=True)
    first.close()
    second = optimizer_of(model, overlap="both", reduces=True)
    backward(model, 0, 0)
    assert second._early.groups  # pyright: ignore[reportPrivateUsage]
    assert not first._early.groups  # pyright: ignore[reportPrivateUsage]


class _Unit:
    """As much of a unit of FSDP2 on a device with streams as is told what to wait for."""

    def __init__(self, seen: list[str]) -> None:
        self.unshard = lambda async_op: seen.append(f"gather {async_op}")
        self.comm_ctx = SimpleNamespace(get_all_gather_streams=lambda async_op, state: (self, None))
        self.wait_event = lambda event: seen.append(f"wait for {event}")
        self._training_state = None


class _Moves(Late):
    def __init__(self, seen: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self.seen = seen

    def finish(self, parameters: Any = None) -> None:
        self.seen.append("finish")
        self.moved = "what moved"


def test_streams_that_gather_wait_for_what_moved():
    seen: list[str] = []
    _gathering(_Unit(seen), _Moves(seen), {0})(async_op=True)
    assert seen == ["finish", "wait for what moved", "gather True"]


def test_what_cannot_be():
    model = Net()
    with pytest.raises(ConfigError, match="no matrix is a DTensor that needs a gradient, and replicas"):
        optimizer_of(model, overlap="backward")
    with pytest.raises(ConfigError, match="expected overlap step, backward, forward or both, got 'late'"):
        optimizer_of(model, overlap="late")
    with pytest.raises(ConfigError, match="expected model=, the outermost module, got overlap 'forward'"):
        Muon([model.first.weight], overlap="forward")
    with pytest.raises(ConfigError, match="expected another overlap with model=, got overlap 'step'"):
        Muon([model.first.weight], model=model)
    with pytest.raises(ConfigError, match="found one without 1 of 1"):
        Muon([torch.nn.Parameter(torch.ones(2, 2))], overlap="forward", model=model)


def _wrong_ways(rank: int) -> None:
    model = cut("fsdp", 2)
    with pytest.raises(
        ConfigError, match=r"expected a mesh with this rank, 1, got|expected parameters on ranks of mesh= \[0\]"
    ):
        Muon([p for p in model.parameters() if p.ndim > 1], mesh=DeviceMesh("cpu", [0]))
    plain = Net()
    optimizer = Muon([p for p in plain.parameters() if p.ndim > 1])
    fully_shard(plain, mesh=init_device_mesh("cpu", (2,)))
    backward(plain, 0, rank)
    with pytest.raises(ValueError, match=r"found none; either backward has not run, or the model was cut or"):
        optimizer.step()
    with pytest.raises(
        ConfigError, match=r"ranks differ: rank 1 in the parameters, w: expected \w+ \(2, 2\).* got \w+ \(2, 3\)"
    ):
        Muon([("w", nn.Parameter(torch.ones(2, 2 + rank)))])
    with pytest.raises(ConfigError, match=r"ranks differ: rank 1 .*momentum: expected 0\.8 as on rank 0, got 0\.9"):
        Muon([("w", nn.Parameter(torch.ones(2, 2)))], momentum=0.8 + 0.1 * rank)
    with pytest.raises(ConfigError, match=r"expected 1 parameters as on rank 0, got 2 parameters \(and 1 more\)"):
        Muon([(f"w{number}", nn.Parameter(torch.ones(2, 2))) for number in range(1 + rank)])


def test_what_is_told_to_every_rank():
    run_ranks(_wrong_ways, 2)
