"""Parameters cut by PyTorch's FSDP2 under a fake process group: what a rank issues, in order, is what Lading says."""

from __future__ import annotations

import pytest
from tests.sim.parity import (
    collectives,
    fully_sharded,
    groups_of,
    mesh_of,
    products,
    recorded,
    request_of,
    run_once,
    table_of,
    torch_model,
)

from lading.ir.clusterplan import Keep
from lading.sim.sequence import collectives_of, sequence_of


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
    ours = sequence_of(request_of("llama", "dp4,zero3,mb2"), table_of("llama"), keep=Keep.BACKWARD)
    assert collectives(ours) == collectives(theirs)
    assert len(collectives(ours)) == 5 + 5


def test_hybrid_sharding_reduces_twice():
    with mesh_of(replicate=2, shard=2) as mesh:
        model = fully_sharded(torch_model("llama"), mesh)
        theirs = recorded(model, groups_of(mesh), lambda: run_once("llama", model))
    request = request_of("llama", "dp4,shard2,zero3,mb2")
    assert collectives(sequence_of(request, table_of("llama"))) == collectives(theirs)
    assert {c.axis for c in collectives_of(request, table_of("llama"))} == {"shard", "replicate"}


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_each_micro_batch_gathers_and_reduces(micro_batches: int):
    with mesh_of(dp=4) as mesh:
        model = fully_sharded(torch_model("llama"), mesh)
        theirs = recorded(model, groups_of(mesh), lambda: [run_once("llama", model) for _ in range(micro_batches)])
    ours = sequence_of(request_of("llama", f"dp4,zero3,mb2,gb{8 * micro_batches}"), table_of("llama"))
    assert collectives(ours) == collectives(theirs)
    assert products(ours) == products(theirs)
