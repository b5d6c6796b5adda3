"""Ranks that were given unlike plans, models or settings are told so at once, and which; nobody waits for ever."""

from __future__ import annotations

import copy
import dataclasses
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from tests.machines import small_machine
from tests.plans import cluster_plan, placed_plan
from tests.ranks import run_ranks
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import lading
from lading.errors import CaptureError, ConfigError
from lading.ir.plan import Plan, ShardedUnit
from lading.matrices import Muon
from lading.runtime.agreement import Meeting, digests, flattened, structure

Given = dict[str, dict[str, object]]


def _meet(each: list[Callable[[], tuple[str, Given]] | None], timeout_s: float = 30.0) -> list[str]:
    """What threads that stand for ranks are told; None never comes."""
    store, ranks = HashStore(), tuple(range(len(each)))

    def come(rank: int, prepare: Callable[[], tuple[str, Given]]) -> str:
        try:
            return Meeting("place", ranks, rank, store, timeout_s).agree(prepare)
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(len(each)) as pool:
        running = [pool.submit(come, rank, prepare) for rank, prepare in enumerate(each) if prepare]
        return [one.result() for one in running]


def _gives(**plan: object) -> Callable[[], tuple[str, Given]]:
    return lambda: ("done", {"plan": plan})


def _fails() -> tuple[str, Given]:
    raise ConfigError("no module called 'layers.9'")


def test_all_agree_or_none() -> None:
    same, other, more = _gives(step=1, groups=3), _gives(step=2, groups=3), _gives(step=1, groups=4, extra=True)
    assert _meet([same] * 4) == ["done"] * 4
    told = _meet([same, other, same, other])
    assert len(set(told)) == 1
    assert "ranks differ: ranks 1, 3 in the plan, step: expected 1 as on rank 0, got 2; give every rank" in told[0]
    told = _meet([other, same, same, more])  # most are right
    assert len(set(told)) == 1
    assert "rank 0 in the plan, step: expected 1 as on rank 1, got 2; rank 3 in the plan, groups: exp" in told[0]
    assert "got 4 (and 1 more)" in told[0]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_fails_by_itself_is_told_to_all(rank: int) -> None:
    each: list[Any] = [_gives(step=1)] * 3
    each[rank] = _fails
    told = _meet(each)
    assert told.pop(rank) == "no module called 'layers.9'"
    assert told == [f"place: failed on rank {rank}: no module called 'layers.9'"] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes_is_waited_for_so_long(rank: int) -> None:
    each: list[Any] = [_gives(step=1)] * 3
    each[rank] = None
    told = _meet(each, timeout_s=0.05)
    assert len(set(told)) == 1
    assert f"expected 3 ranks to call it, rank {rank} did not within 0.05 s; call it on every rank alike" in told[0]
    assert told[0].endswith("that process lives")  # the call has no timeout_s


def test_who_comes_too_late_is_told_what_was_decided() -> None:
    store = HashStore()
    for rank in (1, 2, 0):
        with pytest.raises(ConfigError, match="ranks 0, 2 did not within"):
            Meeting("place", (0, 1, 2), rank, store, 0.01).agree(_gives(step=1))


def test_facts_of_models() -> None:
    def model(**changes: Any) -> dict[str, str]:
        made = nn.Sequential(nn.Linear(2, 3), nn.Dropout(changes.get("p", 0.1)), nn.Linear(3, 2))
        made.get_parameter("2.weight").requires_grad_(changes.get("trained", True))
        if changes.get("tied"):
            made.register_parameter("again", made.get_parameter("2.bias"))
        return structure(made.train(changes.get("training", True)))

    assert model() == model()
    for change in ({"p": 0.2}, {"trained": False}, {"tied": True}, {"training": False}):
        assert model(**change) != model(), change
    assert flattened({"a": [1, {"b": None}], "c": ()}) == {
        "": "2 entries", "a": "2 entries", "a.0": "1", "a.1": "1 entries", "a.1.b": "None", "c": "0 entries",
    }  # fmt: skip


def test_sets_agree_in_whatever_order_they_print() -> None:
    printed = [
        ("{'a', 'b'}", "{'b', 'a'}"),
        ("frozenset({(1, 2), (3, 4)})", "frozenset({(3, 4), (1, 2)})"),
        ("kinds={<Kind.A: 1>, <Kind.B: 2>}, p=0.1", "kinds={<Kind.B: 2>, <Kind.A: 1>}, p=0.1"),
        ("""{'a, {', "it's"}""", """{"it's", 'a, {'}"""),
        ("{frozenset({1, 2}), frozenset({3})}", "{frozenset({3}), frozenset({2, 1})}"),
    ]
    for one, other in printed:
        assert _meet([_gives(kept=one), _gives(kept=other)]) == ["done"] * 2
    for one, other in (
        ("[1, 2]", "[2, 1]"),
        ("{(1, 2)}", "{(2, 1)}"),
        ("{1, 2}", "{1, 3}"),
        ("}{a, b", "}{b, a"),
    ):
        assert "ranks differ" in _meet([_gives(kept=one), _gives(kept=other)])[0]


def test_a_digest_is_of_every_value_and_of_their_order() -> None:
    model = nn.ModuleList([nn.Linear(129, 65), nn.Linear(3, 1, bias=False).bfloat16(), nn.Conv2d(3, 4, 3)])
    model.append(nn.BatchNorm1d(5))
    model.register_buffer("table", torch.arange(6000.0), persistent=False)

    def hashes() -> dict[str, str]:
        sections = digests(model)
        assert set(sections["values"]) == {name for name, _ in model.named_parameters()}
        assert set(sections["buffers"]) == {
            "table", "3.running_mean", "3.running_var", "3.num_batches_tracked",
        }  # fmt: skip
        return sections["values"] | sections["buffers"]

    before, sections = hashes(), digests(model)
    assert digests(cast(Any, copy.deepcopy(model)).to(memory_format=torch.channels_last)) == sections
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        for index in (0, tensor.numel() // 2 + 1 if tensor.dim() else 0, -1):
            flat = tensor.data.view(-1)
            value = flat[index].clone()
            flat[index] = value + 1
            after = hashes()
            assert {key for key in before if after[key] != before[key]} == {name}
            flat[index] = value
    weight = cast(Any, model[0]).weight
    weight.data = weight.data.flip(0)
    assert hashes()["0.weight"] != before["0.weight"]
    model.to("meta")
    assert set(hashes().values()) == {"no values"}


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, None])
def test_a_digest_of_buffers_that_lie_otherwise(layout: torch.layout | None) -> None:
    def digest(edge: float) -> str:
        graph = torch.zeros(4, 4)
        graph[1, 2], graph[3, 0] = 1.0, edge
        model = nn.Module()
        model.register_buffer("graph", torch.complex(graph, graph).conj() if layout is None else _sparse(graph, layout))
        return digests(model)["buffers"]["graph"]

    assert digest(2.0) == digest(2.0) != digest(3.0)


def _sparse(dense: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CS. tensor support is in beta")
        return dense.to_sparse(layout=layout)


def _model(layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), *(nn.Linear(4, 4, bias=False) for _ in range(layers)))


def _placed() -> Plan:
    placement = tuple((str(n), "a" if n < 2 else "b") for n in range(4))
    plan = placed_plan(seq_len=3, layout="mb2,gb4", placement=placement, in_flight={"a": 2, "b": 2})
    return dataclasses.replace(plan, request=dataclasses.replace(plan.request, units=4))


def _cluster() -> Plan:
    units = (ShardedUnit(modules=("0", "1")), ShardedUnit(modules=("2",)), ShardedUnit(modules=("3",)))
    return cluster_plan(seq_len=3, layout="dp2,zero3,mb2,gb4", units=units)


def _with(plan: Plan, **choices: Any) -> Plan:
    return dataclasses.replace(plan, choices=dataclasses.replace(plan.choices, **choices))


def _refused(said: str, call: Callable[[], Any]) -> None:
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=said):
        call()
    assert time.monotonic() - begun < 30


def _unlike(rank: int) -> None:
    plan, tokens = _placed(), torch.zeros(2, 3, dtype=torch.int64)
    parts = plan.choices.placement
    later = _with(plan, placement=(*parts[:2], (parts[2][0], "a"), *parts[3:]))

    def place(mine: Plan, model: nn.Module) -> None:
        lading.place(mine, model, (tokens,), lambda out, target: out.sum())

    _refused(r"place: ranks differ: rank 1 in the plan, choices\.placement\.2\.1: expected 'b' .* got 'a'",
             lambda: place(later if rank else plan, _model()))  # fmt: skip
    _refused("place: ranks differ: rank 1 in the model, module 4: expected nothing as on rank 0, got Linear",
             lambda: place(plan, _model(3 + rank)))  # fmt: skip

    mesh, cluster = init_device_mesh("cpu", (2,)), _cluster()
    units = cluster.choices.units
    kept = _with(cluster, units=(*units[:2], ShardedUnit(modules=("3",), reshard_after_forward=False)))
    fewer = _with(cluster, units=(*units[:1], ShardedUnit(modules=("2", "3"))))
    unknown = _with(cluster, units=(*units[:2], ShardedUnit(modules=("7",))))
    for other, said in (
        (kept, r"rank 1 in the plan, choices\.units\.2\.reshard_after_forward: expected True .* got False"),
        (fewer, r"apply: ranks differ: rank 1 in the plan, choices\.units: expected 3 entries .* got 2 entries"),
        (unknown, "failed on rank 1: apply: .* none called '7'" if rank == 0 else "none called '7'"),
    ):
        _refused(said, lambda other=other: lading.apply(other if rank else cluster, _model(), mesh))
    trained = _model()
    with torch.no_grad():
        trained.get_parameter("2.weight")[1, 2] += rank
    for call in (lambda: place(plan, trained), lambda: lading.apply(cluster, trained, mesh)):
        _refused(r"ranks differ: rank 1 in the values, 2\.weight: expected \w{16} as on rank 0, got \w{16}; give", call)
    for unlike, is_saved in (("running_mean", True), ("mask", False)):
        normed = _model()
        normed.register_buffer(unlike, torch.zeros(4) + rank, persistent=is_saved)
        for call in (lambda: place(plan, normed), lambda: lading.apply(cluster, normed, mesh)):  # noqa: B023
            _refused(
                rf"ranks differ: rank 1 in the buffers, {unlike}: expected \w{{16}} as on rank 0, got \w{{16}}", call
            )
    if rank == 0:
        _refused("expected 2 ranks to call it, rank 1 did not within 0.5 s; .*; timeout_s= waits longer",
                 lambda: lading.apply(cluster, _model(), mesh, timeout_s=0.5))  # fmt: skip
    dist.barrier()
    if rank == 1:  # it is told what was decided without it
        _refused("rank 1 did not within 0.5 s", lambda: lading.apply(cluster, _model(), mesh))
    _sizes(lading.apply(cluster, _model(), mesh))


def _sizes(model: nn.Module) -> None:
    """Micro-batches of at most two sequences of three tokens."""
    model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()  # the last of the data
    for shape, got in (((8, 3), "8 of 3"), ((2, 4), "2 of 4"), ((7,), "7 tokens in a row")):
        _refused(f"at most 2 sequences of 3 tokens, as planned, got {got} in argument 0; give smaller ones, or plan",
                 lambda shape=shape: model(torch.zeros(*shape, dtype=torch.int64)))  # fmt: skip
    with torch.no_grad():
        model(torch.zeros(8, 3, dtype=torch.int64))  # nothing is saved for backward


def test_a_job_that_is_only_tried_out() -> None:
    """On a fake process group, and fake tensors, nobody answers."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = lading.apply(_cluster(), _model(), mesh)
        assert isinstance(model, FSDPModule)
    finally:
        dist.destroy_process_group()


def _settings(rank: int) -> None:
    param = nn.Parameter(torch.ones(4, 4))
    _refused(r"Muon: ranks differ: rank 1 in the settings, param_groups\[0\], lr: expected 0\.1 .* got 0\.2",
             lambda: Muon([("w", param)], lr=0.1 + 0.1 * rank))  # fmt: skip
    optimizer = Muon([("w", param)], lr=0.1)
    group, before = optimizer.param_groups[0], param.detach().clone()
    for key, value, said in (
        (
            "lr",
            0.2,
            r"Muon\.step: ranks differ: rank 1 in the settings, param_groups\[0\], lr: expected 0\.1 .* got 0\.2",
        ),
        ("momentum", 0.5, r"momentum: expected 0\.95 as on rank 0, got 0\.5"),
        ("lr", -0.1, r"expected lr of 0 or more, got -0\.1"),
    ):
        made, param.grad = group[key], torch.ones(4, 4)
        group[key] = value if rank else made
        _refused(said, optimizer.step)
        assert torch.equal(param, before)
        group[key] = made
    group["lr"] = 0.3  # on both
    optimizer.step()
    assert not torch.equal(param, before)
    model = nn.Linear(4, 4, bias=False)
    wrapped = DistributedDataParallel(model)
    _refused("own under reduces=True, found parameters in a DistributedDataParallel, which reduces them already",
             lambda: Muon([("w", model.weight)], reduces=True))  # fmt: skip
    later = nn.Linear(4, 4, bias=False)
    optimizer = Muon([("w", later.weight)], reduces=True)
    rewrapped = DistributedDataParallel(later)
    rewrapped(torch.ones(2, 4)).sum().backward()
    _refused("found parameters in a DistributedDataParallel", optimizer.step)
    del wrapped, rewrapped


def _alone(rank: int) -> None:
    """A captured step of one rank, where there are two."""
    model, batch = nn.Linear(4, 4), {"x": torch.ones(2, 4)}
    wrapped = DistributedDataParallel(model)
    with pytest.raises(
        CaptureError, match="expected parameters of its own, found them in a DistributedDataParallel too"
    ):
        lading.capture(wrapped.module, batch, lambda model, batch: model(batch["x"]).sum())
    del wrapped
    graph = lading.capture(model, batch, lambda model, batch: model(batch["x"]).sum())
    plan = lading.plan(graph, small_machine(), budget="100%", cache=False, layout="dp1")
    _refused("expected a job of one process, found one of 2 ranks .*initialized.*give independent=True",
             lambda: lading.Trainer(plan, graph, None))  # fmt: skip


def _on_each(rank: int) -> None:
    """In one pair of processes, as these take longest to start."""
    _alone(rank)
    _unlike(rank)
    _settings(rank)


def test_what_ranks_have_unlike_is_refused_on_every_one() -> None:
    run_ranks(_on_each, 2)
