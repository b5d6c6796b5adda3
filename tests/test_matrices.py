"""Matrix optimizers on several ranks give the bits of one process, however parameters are cut."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lading import AdamW
from lading.errors import ConfigError
from lading.ir.routes import ShardRegion
from lading.matrices import SOAP, MatrixOptimizer, Muon, Shampoo
from lading.runtime.shard_regions import piece, region_of
from tests.ranks import run_ranks

STEPS = 4


class Model(nn.Module):
    """Matrices that no number of ranks divides, a fused one, a stack of experts, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Linear(10, 18, bias=False)
        self.down = nn.Linear(18, 10, bias=False)
        self.qkv = nn.Linear(10, 14, bias=False)
        self.thin = nn.Linear(7, 3, bias=False)
        self.experts = nn.Parameter(torch.empty(3, 6, 5))
        self.norm = nn.Parameter(torch.empty(10))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def gradients(step: int) -> list[torch.Tensor]:
    """The reduced gradients of a step, whole."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator) for p in Model().parameters()]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    norm, qkv = [("norm", named.pop("norm"))], [("qkv", named.pop("qkv.weight"))]
    return [
        {"params": list(named.items())},
        {"params": qkv, "parts": (6, 4, 4)},
        {"params": norm, "rule": AdamW(lr=1e-2)},
    ]


KINDS = {
    "muon": lambda p, **k: Muon(p, lr=0.02, **k),
    "muon-fp32": lambda p, **k: Muon(p, lr=0.02, dtype="float32", nesterov=False, **k),
    "shampoo": lambda p, **k: Shampoo(p, lr=0.02, eps=1e-6, frequency=2, **k),
    "soap": lambda p, **k: SOAP(p, lr=0.02, frequency=2, **k),
}


def give(model: nn.Module, whole: list[torch.Tensor]) -> None:
    """Gradients as a reduction would leave them."""
    for parameter, exact in zip(model.parameters(), whole, strict=True):
        grad = exact.to(parameter.dtype)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            shape, offset = compute_local_shape_and_global_offset(grad.shape, mesh, placements)
            local = grad[
                ShardRegion(tuple(offset), tuple(shape)).slices_in(ShardRegion((0,) * grad.ndim, tuple(grad.shape)))
            ].clone()
            parameter.grad = DTensor.from_local(local, mesh, placements, shape=grad.shape, stride=grad.stride())
        else:
            parameter.grad = grad.clone()


def step_all(model: nn.Module, optimizer: MatrixOptimizer) -> None:
    for step in range(STEPS):
        give(model, gradients(step))
        optimizer.step()


def moved(model: nn.Module, optimizer: MatrixOptimizer) -> list[torch.Tensor]:
    step_all(model, optimizer)
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def alone(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> list[torch.Tensor]:
    """What one process makes of it, with as many threads as the others have: products differ in bits with them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = Model().to(dtype)
    optimizer = KINDS[kind](groups_of(model), **options)
    found = moved(model, optimizer)
    torch.set_num_threads(threads)
    return found


def cut(model: Model, mode: str, ranks: int) -> nn.Module:
    if mode == "ddp":
        return model
    if mode == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard")))
    if mode in ("ep", "fsdp-ep"):
        return _cut_experts(model, mode, ranks)
    if mode in ("tp", "fsdp-tp"):
        shape, names = ((ranks,), ("tp",)) if mode == "tp" else ((ranks // 2, 2), ("dp", "tp"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model if mode == "tp" else fully_shard(model, mesh=mesh["dp"])
    return fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))


def _cut_experts(model: Model, mode: str, ranks: int) -> nn.Module:
    """Three experts on the ranks of one mesh dim, of which some may have none; their rows on those of the other."""
    shape, names = ((ranks,), ("ep",)) if mode == "ep" else ((2, ranks // 2), ("dp", "ep"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), mesh["ep"], [Shard(0)]))
    if mode == "ep":
        return model
    return fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 else None)


def _equal(
    rank: int, ranks: int, modes: tuple[str, ...], expected: dict[str, list[torch.Tensor]], dtype: torch.dtype
) -> None:
    for kind, whole in expected.items():
        for mode in modes:
            for groups in (1, 3) if kind == "muon" else (2,):
                model = cut(Model().to(dtype), mode, ranks)
                optimizer = KINDS[kind](groups_of(model), groups=groups)
                step_all(model, optimizer)
                # Each rank's own pieces: torch gathers none where some rank has nothing of two dims.
                for (name, ours), theirs in zip(model.named_parameters(), whole, strict=True):
                    region = region_of(ours)
                    expected_piece = theirs[region.slices_in(ShardRegion((0,) * theirs.ndim, tuple(theirs.shape)))]
                    assert torch.equal(piece(ours.detach(), region), expected_piece), (kind, mode, groups, name)


MODES = {
    2: ("ddp", "fsdp", "tp", "fsdp-ep"),
    3: ("fsdp", "ep"),
    4: ("fsdp", "hsdp", "fsdp-tp", "fsdp-ep"),
    8: ("fsdp", "hsdp", "fsdp-tp", "fsdp-ep", "ep", "ddp"),
}


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 8))])
def test_the_bits_of_one_process(ranks: int):
    kinds = KINDS if ranks in (2, 8) else ("muon", "soap")
    run_ranks(_equal, ranks, ranks, MODES[ranks], {kind: alone(kind) for kind in kinds}, torch.float32)


def test_the_bits_of_one_process_in_16():
    kinds = ("muon", "shampoo", "soap")
    run_ranks(_equal, 2, 2, ("fsdp",), {kind: alone(kind, dtype=torch.bfloat16) for kind in kinds}, torch.bfloat16)


def test_one_process_is_torchs_muon():
    model, other = Model(), Model()
    matrices = [p for p in other.parameters() if p.ndim == 2 and p is not other.qkv.weight]
    reference = torch.optim.Muon(matrices, lr=0.02)
    for step in range(STEPS):
        give(other, gradients(step))
        reference.step()
    moved(model, KINDS["muon"](groups_of(model)))
    assert torch.equal(model.up.weight, other.up.weight)
    assert torch.equal(model.thin.weight, other.thin.weight)


def test_a_vector_is_no_matrix():
    with pytest.raises(ConfigError, match=r"norm: expected a matrix.*shape \(10,\).*rule that works on elements"):
        Muon(Model().named_parameters(), lr=0.1)


def test_parts_add_up():
    with pytest.raises(ConfigError, match=r"qkv: expected parts that add up to its 14 rows, got \(6, 4\)"):
        Muon([{"params": [("qkv", Model().qkv.weight)], "parts": (6, 4)}])


class _Counted(TorchDispatchMode):
    """Counts calls of torch's operations, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


def _experts(batched: bool, reduces: bool, dtype: str) -> tuple[list[torch.Tensor], Counter[str]]:
    """Weights after three steps of seven matrices of one shape, one of its transpose and a vector; and calls."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"experts": (6, 24, 40), "up": (24, 40), "down": (40, 24), "norm": (40,)}
    made = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    groups = [
        {"params": [pair for pair in made.items() if pair[0] != "norm"]},
        {"params": [("norm", made["norm"])], "rule": AdamW(lr=1e-2)},
    ]
    optimizer = Muon(groups, lr=0.02, groups=1, batched=batched, reduces=reduces, dtype=dtype)
    with _Counted() as counted:
        for _ in range(3):
            for parameter in made.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    return [parameter.detach() for parameter in made.values()], counted.calls


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-3)])
def test_equal_shapes_are_batched_where_asked(reduces: bool, dtype: str, tolerance: float) -> None:
    """Seven matrices are one of batched products, and weights are those without up to rounding."""
    plain, calls = _experts(batched=False, reduces=reduces, dtype=dtype)
    batched, fewer = _experts(batched=True, reduces=reduces, dtype=dtype)
    updates = 2 * 5 * 3  # two in a step of the iteration
    assert (calls["aten::addmm"], calls["aten::baddbmm"]) == (8 * updates, 0)
    assert (fewer["aten::addmm"], fewer["aten::baddbmm"]) == (updates, updates)
    for one, other in zip(plain, batched, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=tolerance)  # of weights that moved by 0.02 a step


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Muon, {"share": True}, "expected batched or share, got both"),
        (Shampoo, {}, "expected a rule whose matrices can be batched, as Muon's, got Shampoo; leave batched out"),
    ],
)
def test_what_cannot_be_batched_is_refused(kind: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kind([("up", Model().up.weight)], batched=True, **options)


def _batched(rank: int) -> None:
    weights: list[list[torch.Tensor]] = []
    for batched in (False, True):
        model = cut(Model(), "fsdp", 2)
        optimizer = Muon(groups_of(model), lr=0.02, dtype="float32", batched=batched)
        weights.append(moved(model, optimizer))
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_owners_batch_what_they_own() -> None:
    run_ranks(_batched, 2)


def test_a_setting_that_is_not_known():
    with pytest.raises(ConfigError, match="unknown setting 'moment' of Muon; expected batched, coefficients, dtype"):
        Muon([Model().up.weight], moment=0.9)


def test_groups_have_what_is_read():
    """``weight_decay`` of a group, as torch's optimizers take it, would have no effect."""
    for key, value, said in (
        (
            "weight_decay",
            0.0,
            "initial_lr, lr, name, params, parts, rule, got 'weight_decay'.* go into the group's rule=",
        ),
        ("rule", "adamw", "expected a rule of lading.optim, as lading.AdamW, got 'adamw'"),
    ):
        with pytest.raises(ConfigError, match=said):
            Muon([{"params": [Model().up.weight], key: value}])


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor().clone() for n, p in model.named_parameters() if isinstance(p, DTensor)}


def _faults(rank: int) -> None:
    model = cut(Model(), "fsdp", 2)
    optimizer = KINDS["muon"](groups_of(model))
    give(model, gradients(0))
    optimizer.step()
    before = whole(model)
    # Not finite on one rank: nothing moves anywhere, momentum included.
    give(model, gradients(1))
    if rank == 1:
        grad = model.up.weight.grad
        assert isinstance(grad, DTensor)
        grad.to_local()[0, 0] = float("nan")
    optimizer.step()
    assert optimizer.skipped == 1
    assert all(torch.equal(now, before[name]) for name, now in whole(model).items())
    # No gradient on any rank: the others move.
    give(model, gradients(1))
    model.up.weight.grad = None
    optimizer.step()
    assert torch.equal(whole(model)["up.weight"], before["up.weight"])
    assert not torch.equal(whole(model)["down.weight"], before["down.weight"])
    # A gradient on one rank only: an error on both, not a hang.
    give(model, gradients(2))
    if rank == 0:
        model.up.weight.grad = None
    with pytest.raises(ValueError, match=r"up\.weight: expected a gradient on all 2 ranks or on none, found one on 1"):
        optimizer.step()


def test_faults_that_others_had():
    run_ranks(_faults, 2)


def _counted(rank: int, ranks: int) -> None:
    model = cut(Model(), "fsdp", ranks)
    optimizer = KINDS["muon"](groups_of(model), groups=1)
    give(model, gradients(0))
    optimizer.step()
    assert optimizer.traffic.collectives == 2
    # What leaves a rank: its pieces of what others own, and others' pieces of what it owns.
    sent = torch.tensor([optimizer.traffic.elements])
    dist.all_reduce(sent)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert int(sent) <= 2 * matrices
    replicated = cut(Model(), "ddp", ranks)
    optimizer = KINDS["muon"](groups_of(replicated), groups=1)
    give(replicated, gradients(0))
    optimizer.step()
    sent = torch.tensor([optimizer.traffic.elements])
    dist.all_reduce(sent)
    # Every owner has the gradient already; the direction goes to all others once.
    assert optimizer.traffic.collectives == 1
    assert int(sent) == (ranks - 1) * matrices


class _Waits(TorchFunctionMode):
    """Counts what makes the host wait for a device: numbers, truth and copies of tensors, but for counters on the host.

    On a CPU nothing waits; the calls are those that would.
    """

    calls = frozenset(
        ("item", "tolist", "cpu", "numpy", "nonzero", "equal", "__bool__", "__int__", "__float__", "__index__")
    )

    def __init__(self, optimizer: MatrixOptimizer) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._counters = {id(state["step"]) for state in optimizer.state.values()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.calls and id(args[0]) not in self._counters:
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


def _waits(kind: str, model: nn.Module, **options: Any) -> list[list[str]]:
    """Waits of each of four steps."""
    optimizer = KINDS[kind](groups_of(model), **options)
    waits: list[list[str]] = []
    for step in range(STEPS):
        give(model, gradients(step))
        with _Waits(optimizer) as counted:
            optimizer.step()
        waits.append(counted.waits)
    return waits


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_waits_for_its_device_to_leave_out_steps_only(kind: str, reduces: bool) -> None:
    assert _waits(kind, Model(), skip_nonfinite=False, reduces=reduces) == [[]] * STEPS
    assert _waits(kind, Model(), reduces=reduces) == [["tolist"]] * STEPS


def _waited(rank: int) -> None:
    for kind in ("muon", "soap"):
        due = [2, 1, 2, 1] if kind == "soap" else [1] * STEPS  # bases are made at the first, turned at the third
        for options in ({}, {"skip_nonfinite": False}):
            assert [len(each) for each in _waits(kind, cut(Model(), "fsdp", 2), **options)] == due


def test_ranks_wait_once_in_a_step_and_once_where_a_decomposition_may_fail() -> None:
    run_ranks(_waited, 2)


def test_what_is_sent_is_counted():
    run_ranks(_counted, 2, 2)


def test_states_that_are_missing_are_said():
    optimizer = KINDS["soap"](groups_of(Model()))
    state = copy.deepcopy(optimizer.state_dict())
    next(row for row in state["state"].values() if "left" in row).pop("left")
    with pytest.raises(ConfigError, match=r"states of up\.weight: expected exp_avg, .*left, .*found exp_avg"):
        optimizer.load_state_dict(state)
    with pytest.raises(ConfigError, match="expected all parameters when a matrix optimizer is made"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 2))]})


def test_dues_are_spread():
    """Bases that turn every second update turn for half of equal matrices at each, and owners have as many."""
    parameters = [torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(8)]
    optimizer = SOAP([(f"p{i}", p) for i, p in enumerate(parameters)], frequency=2, stagger=True)
    assert sorted(rule.shift % 2 for rule in optimizer._rules) == [0] * 4 + [1] * 4  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_the_example_learns(tmp_path: Path):
    """Run as its docstring says."""
    example = Path(__file__).parent.parent / "examples" / "muon_fsdp2.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(example), "--steps", "6"]
    command += ["--overlap", "both"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "6 steps" in done.stdout


def own_gradients(step: int, rank: int) -> list[torch.Tensor]:
    return gradients(1000 * step + rank)


def _reduced(rank: int, ranks: int, expected: dict[str, list[torch.Tensor]]) -> None:
    for kind, whole_run in expected.items():
        model = Model()
        optimizer = KINDS[kind](groups_of(model), reduces=True, groups=2)
        for step in range(STEPS):
            for parameter, grad in zip(model.parameters(), own_gradients(step, rank), strict=True):
                parameter.grad = grad
            optimizer.step()
        for now, then in zip(model.parameters(), whole_run, strict=True):
            assert torch.equal(now, then), kind
        # What a reduce-scatter and an all-gather of all parameters move.
        sent = torch.tensor([optimizer.traffic.elements])
        dist.all_reduce(sent)
        assert int(sent) == STEPS * 2 * (ranks - 1) * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_replicas_whose_gradients_are_reduced_at_owners(ranks: int):
    """ZeRO-1: the bits of one process that is given the mean, and no more bytes than a reduction and a gather."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected: dict[str, list[torch.Tensor]] = {}
    for kind, make in KINDS.items():
        model = Model()
        optimizer = make(groups_of(model))
        for step in range(STEPS):
            each = [own_gradients(step, rank) for rank in range(ranks)]
            give(model, [sum(parts[1:], parts[0].clone()) / ranks for parts in zip(*each, strict=True)])
            optimizer.step()
        expected[kind] = [p.detach() for p in model.parameters()]
    torch.set_num_threads(threads)
    run_ranks(_reduced, ranks, ranks, expected)


def _fails_everywhere(rank: int) -> None:
    parameters = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = Shampoo([("a", parameters[0]), ("b", parameters[1])])
    parameters[0].grad, parameters[1].grad = torch.full((4, 4), 1e25), torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="direction failed on some rank"):
        optimizer.step()


def test_an_owner_that_fails_is_told_to_all():
    run_ranks(_fails_everywhere, 2)


def test_names_differ():
    twice = [{"params": [("w", torch.nn.Parameter(torch.ones(2, 2)))]} for _ in range(2)]
    with pytest.raises(ConfigError, match="different names, found 'w' more than once"):
        Muon(twice)


def test_replicas_of_two_dtypes():
    """A 16-bit matrix and a 32-bit vector in one exchange."""
    matrix = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    norm = torch.nn.Parameter(torch.ones(4))
    optimizer = Muon([{"params": [matrix]}, {"params": [norm], "rule": AdamW()}], lr=0.1, reduces=True, groups=1)
    matrix.grad, norm.grad = torch.ones_like(matrix), torch.ones_like(norm)
    optimizer.step()
    assert float((matrix.detach() - 1).abs().max()) > 0
    assert float((norm.detach() - 1).abs().max()) > 0
