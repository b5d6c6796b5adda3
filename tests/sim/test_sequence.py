"""Parameters cut by PyTorch's FSDP2 under a fake process group: what a rank issues, in order, is what Lading says.

A change of Lading's own lists shows in tests/golden/sequences too, which has one of each kind.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tests.sim.parity import (
    HALF,
    LAYERS,
    POLICY,
    H,
    S,
    checkpointed,
    collectives,
    context_parallel,
    fully_sharded,
    groups_of,
    mesh_of,
    own_peak,
    pipeline,
    products,
    recorded,
    request_of,
    run_once,
    static_pipelines,
    table_of,
    tensor_parallel,
    torch_model,
)
from tests.sim.parity_experts import experts_model, shard_experts
from tests.sim.sequence import collectives_of, sequence_of
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.tensor.parallel import loss_parallel

from lading.catalog.load import load_machine
from lading.ir.plan import UnitResidency
from lading.sim.simulate import prices_of, simulate

SLOW = partial(pytest.param, marks=pytest.mark.slow)


def test_gathers_and_reductions_of_cut_parameters():
    with mesh_of(dp=4) as mesh:
        model = fully_sharded(torch_model("llama"), mesh)
        theirs = recorded(model, groups_of(mesh), lambda: run_once("llama", model))
    ours = sequence_of(request_of("llama", "dp4,zero3,mb2"), table_of("llama"))
    assert collectives(ours) == collectives(theirs)
    assert products(ours) == products(theirs)
    assert len(collectives(ours)) == 5 + 4 + 5


def test_parameters_that_stay_until_backward():
    with mesh_of(dp=4) as mesh:
        model = fully_sharded(torch_model("llama"), mesh, keeps=False)
        theirs = recorded(model, groups_of(mesh), lambda: run_once("llama", model))
    ours = sequence_of(request_of("llama", "dp4,zero3,mb2"), table_of("llama"), keep=UnitResidency.BACKWARD)
    assert collectives(ours) == collectives(theirs)
    assert len(collectives(ours)) == 5 + 5


def test_hybrid_sharding_reduces_twice():
    with mesh_of(replicate=2, shard=2) as mesh:
        model = fully_sharded(torch_model("llama"), mesh)
        theirs = recorded(model, groups_of(mesh), lambda: run_once("llama", model))
    request = request_of("llama", "dp4,shard2,zero3,mb2")
    assert collectives(sequence_of(request, table_of("llama"))) == collectives(theirs)
    assert {c.axis for c in collectives_of(request, table_of("llama"))} == {"shard", "replicate"}
    assert own_peak(request) == pytest.approx(theirs.peak_bytes, rel=0.02)


@pytest.mark.parametrize("micro_batches", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_micro_batch_gathers_and_reduces(micro_batches: int):
    with mesh_of(dp=4) as mesh:
        model = fully_sharded(torch_model("llama"), mesh)
        theirs = recorded(model, groups_of(mesh), lambda: [run_once("llama", model) for _ in range(micro_batches)])
    ours = sequence_of(request_of("llama", f"dp4,zero3,mb2,gb{8 * micro_batches}"), table_of("llama"))
    assert collectives(ours) == collectives(theirs)
    assert products(ours) == products(theirs)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # an embedding cut over tp hands on a view
@pytest.mark.parametrize(("sp", "full"), [(True, False), SLOW(False, True), SLOW(False, False), SLOW(True, True)])
def test_tensor_parallel_inside_cut_parameters(sp: bool, full: bool):
    """With sequence parallel the gradients of norms are summed over tp, a parameter at a time, before they are cut."""
    with mesh_of(dp=2, tp=2) as mesh, loss_parallel():
        model = tensor_parallel(torch_model("llama"), mesh["tp"], sp=sp)
        model = fully_sharded(checkpointed(model) if full else model, mesh["dp"])
        theirs = recorded(model, groups_of(mesh), lambda: run_once("llama", model))
    layout = "dp2,tp2,zero3,mb2" + ",sp" * sp + ",recompute=full" * full
    request = request_of("llama", layout)
    ours = sequence_of(request, table_of("llama"))
    assert collectives(ours) == collectives(theirs)
    assert products(ours) == products(theirs)
    if (
        full and not sp
    ):  # norms of cut tokens are several kernels on a CPU; torch's parallel loss has buffers of its own
        assert own_peak(request) == pytest.approx(theirs.peak_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("seq", "full", "micro_batches"),
    [
        (16, True, 2),
        *(SLOW(s, f, m) for s in (4, 16, 64) for f in (False, True) for m in (1, 2) if (s, f, m) != (16, True, 2)),
    ],
)
def test_peaks_of_cut_parameters(seq: int, full: bool, micro_batches: int):
    """From a step that is all parameters to one that is all activations."""
    with mesh_of(dp=4) as mesh:
        model: Any = torch_model("llama")
        model = fully_sharded(checkpointed(model) if full else model, mesh)

        def step() -> None:
            for number in range(micro_batches):  # as lading.apply tells FSDP2; else it waits behind every micro-batch
                model.set_is_last_backward(number == micro_batches - 1)
                run_once("llama", model, seq)

        theirs = recorded(model, groups_of(mesh), step)
    layout = f"dp4,zero3,mb2,gb{8 * micro_batches}" + ",recompute=full" * full
    assert own_peak(request_of("llama", layout, seq=seq)) == pytest.approx(theirs.peak_bytes, rel=0.004)


@pytest.mark.parametrize("method", ["ring", SLOW("all_gather")])
@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_context_parallel_inside_cut_parameters(cp: int, method: str):
    """torch's own loop over the ring; the kernels in it are a CPU's."""
    with mesh_of(dp=2, cp=cp) as mesh, context_parallel(mesh.get_group("cp"), method):
        whole = mesh["dp", "cp"]._flatten("dp_cp")
        model = fully_sharded(torch_model("llama"), whole)
        groups = {"dp": whole.get_group(), "cp": mesh.get_group("cp")}
        theirs = recorded(model, groups, lambda: run_once("llama", model, S // cp))
    request = request_of("llama", f"dp2,cp{cp},cp_comm={method},zero3,mb2")
    ours = sequence_of(request, table_of("llama"))
    assert collectives(ours) == collectives(theirs)
    assert products(ours) == products(theirs)
    assert own_peak(request) == pytest.approx(theirs.peak_bytes, rel=0.02)


PIPELINES = [
    SLOW("gpipe", 3, 1, 4),
    ("1f1b", 3, 1, 4),
    ("interleaved", 2, 2, 4),
    SLOW("zero-bubble", 2, 1, 4),
    ("zbv", 2, 2, 4),
    SLOW("dualpipe-v", 2, 2, 4),
]


@pytest.mark.parametrize("rank", [SLOW(0), 1])
@pytest.mark.parametrize(("kind", "ranks", "chunks", "micro_batches"), PIPELINES)
def test_pipelines_send_and_compute_in_order(kind: str, ranks: int, chunks: int, micro_batches: int, rank: int):
    """Of several chunks torch asks for receives earlier, when the sender is to send: their own order is compared."""
    layers = ranks * chunks
    with mesh_of(rank, pp=ranks) as mesh, static_pipelines():
        modules, step = pipeline(kind, mesh["pp"], chunks, micro_batches, layers=layers)
        theirs = recorded(modules, groups_of(mesh), step)
    request = request_of("llama", f"pp{ranks},vpp{chunks},{kind},mb2,gb{2 * micro_batches}", layers=layers, stack=HALF)
    ours = sequence_of(request, table_of("llama", layers), rank=rank)
    assert products(ours) == products(theirs)
    for op in ("send", "receive") if chunks > 1 or kind == "zero-bubble" else ("",):
        own = [(i.collective.op, i.peer, i.collective.size_bytes) for i in ours if i.collective]
        all_of = [(e.kind, e.peer, e.size_bytes) for e in theirs.collectives]
        assert [c for c in own if c[0] == op or not op] == [c for c in all_of if c[0] == op or not op] != []


@pytest.mark.parametrize("rank", [SLOW(0), 1])
@pytest.mark.parametrize("kind", [SLOW("gpipe"), "1f1b"])
def test_cut_parameters_in_a_pipeline(kind: str, rank: int):
    """Gathered once a step, reduced once behind the last backward."""
    with mesh_of(2 * rank, pp=2, dp=2) as mesh, static_pipelines():
        modules, step = pipeline(
            kind, mesh["pp"], 1, 3, layers=4, wrap=lambda part: fully_sharded(part, mesh["dp"], keeps=False)
        )
        theirs = recorded(modules, groups_of(mesh), step)
    request = request_of("llama", f"dp2,pp2,{kind},zero3,mb2,gb12", layers=4)
    ours = sequence_of(request, table_of("llama", 4), rank=rank)
    assert collectives(ours) == collectives(theirs)
    assert products(ours) == products(theirs)


@pytest.mark.parametrize("ep", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_over_ranks_inside_cut_parameters(ep: int):
    """Experts are a group of their own within each block, over the ranks that hold the same ones."""
    with mesh_of(edp=2, ep=ep) as mesh:
        whole = mesh["edp", "ep"]._flatten("dp")
        groups = {"dp": whole.get_group(), "dp/ep": mesh.get_group("edp"), "ep": mesh.get_group("ep")}
        model = shard_experts(experts_model(LAYERS, groups["ep"]), whole, mesh["edp"])
        theirs = recorded(model, groups, lambda: run_once("llama", model))
    request = request_of("moe", f"dp{2 * ep},ep{ep},zero3,mb2")
    ours = sequence_of(request, table_of("moe"))
    assert collectives(ours) == collectives(theirs)
    assert products(ours) == products(theirs)
    assert own_peak(request) == pytest.approx(theirs.peak_bytes, rel=0.02)


@pytest.mark.parametrize("layout", ["dp2,tp2,sp,zero3,mb2,gb8", "dp2,tp2,sp,zero1,mb2,gb8"])
def test_sums_over_tp_are_priced_as_they_are_issued(layout: str):
    """One for each norm and micro-batch where parameters are cut, else one for all of them behind the step."""
    request, table = request_of("llama", layout), table_of("llama")
    issued = [i.collective for i in sequence_of(request, table) if i.kernel is None and i.collective]
    sums = [c for c in issued if c.axis == "tp"]
    assert len(sums) == (2 * (2 * LAYERS + 1) if request.layout.zero == 3 else 1)
    assert sum(c.size_bytes for c in sums) == (2 * 2 if request.layout.zero == 3 else 4) * (2 * LAYERS + 1) * H
    prices = prices_of(request, load_machine("h100"), table)
    (stage,) = simulate(request, table).step.stages
    times = 2 if request.layout.zero == 3 else 1
    assert times * prices.sums_s(stage.summed) == pytest.approx(sum(prices.collective_s(c) for c in sums))


@pytest.mark.parametrize("micro_batches", [SLOW(1), 2])
def test_replicas_reduce_in_the_last_micro_batch(micro_batches: int):
    """torch's ``replicate``, which reduces a unit at a time."""
    with mesh_of(dp=4) as mesh:
        model: Any = torch_model("llama")
        for modules in (model.tokens, *model.layers, [model.norm, model.head], model):
            replicate(modules, mesh=mesh, mp_policy=POLICY)

        def step() -> None:
            for number in range(micro_batches):
                model.set_requires_gradient_sync(number == micro_batches - 1)
                run_once("llama", model)

        theirs = recorded(model, groups_of(mesh), step)
    ours = sequence_of(request_of("llama", f"dp4,mb2,gb{8 * micro_batches}"), table_of("llama"))
    assert collectives(ours) == collectives(theirs)
    assert products(ours) == products(theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "tp"), [(0, 2), (1, 4)])
def test_tensor_parallel_inside_a_pipeline(rank: int, tp: int):
    with mesh_of(rank * tp, pp=2, tp=tp) as mesh, static_pipelines(), loss_parallel():
        modules, step = pipeline(
            "1f1b", mesh["pp"], 1, 3, layers=4, wrap=lambda part: tensor_parallel(part.bfloat16(), mesh["tp"], sp=False)
        )
        theirs = recorded(modules, groups_of(mesh), step)
    request = request_of("llama", f"pp2,tp{tp},1f1b,mb2,gb6", layers=4, stack=HALF)
    ours = sequence_of(request, table_of("llama", 4), rank=rank)
    assert collectives(ours) == collectives(theirs)
    assert products(ours) == products(theirs)
