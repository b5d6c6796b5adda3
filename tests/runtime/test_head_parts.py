"""A head in parts of the tokens: the same losses to the bit at first, and weights within what another order gives."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.machines import small_machine
from tests.runtime.cases import (
    OPTIMIZER,
    Batch,
    at_random,
    batches_of,
    disk_always,
    eager_run,
    graph_of,
    load,
    loss_fn,
    model_of,
    program_of,
    whole_value,
)
from torch.nn import functional as F

from lading.errors import ConfigError
from lading.ir.expand import expand
from lading.ir.gradient_pieces import pieced_gradients, with_gradient_pieces
from lading.ir.graph import StepGraph
from lading.ir.head_parts import ADDED_PRODUCT, heads, with_head_parts
from lading.ir.plan import Plan
from lading.ir.weight_pieces import with_weight_pieces
from lading.memory.restore import restore_program
from lading.planner.api import make_plan
from lading.runtime.executor import Executor
from lading.tracing.trace import capture

RATES = [1e-3, 5e-4, 2e-3]
WIDE = {"vocab_size": 1003}
#: A gradient added up in another order is within this much of the step's, but for those elements, less than one in
#: a thousand, whose gradient is not large beside its rounding: AdamW divides by their root mean square.
RELATIVE, ABSOLUTE, FAR_SHARE = 1e-4, 2e-5, 1e-3


def assert_close_to_eager(
    executor: Executor, model: torch.nn.Module, reference: torch.nn.Module, *, micro: int = 1, clip: float = 0.0
) -> None:
    """Losses of the first step to the bit, later ones and all values within what another order of sums gives."""
    batches = batches_of(len(RATES), micro)
    losses = eager_run(reference, batches, RATES, clip)
    load(executor, model)
    torch.manual_seed(2)
    ours = [executor.step(b, lr=lr) for b, lr in zip(batches, RATES, strict=True)]
    assert ours[0] == losses[0]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=1e-6, atol=0)
    graph, named = executor.program.graph, dict(reference.named_parameters(remove_duplicate=False))
    for parameter in graph.parameters:
        value = whole_value(executor, graph.storage_of(parameter.tensor))
        expected = named[parameter.names[0]].detach()
        far = ~torch.isclose(value, expected, rtol=RELATIVE, atol=ABSOLUTE)
        assert int(far.sum()) <= FAR_SHARE * far.numel()
        torch.testing.assert_close(value, expected, rtol=0, atol=2 * max(RATES))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "micro", "clip", "parts", "pieces", "evict"),
    [
        ("gpt", 1, 0.0, 3, 0, None),
        ("gpt", 1, 1.0, 32, 4 * 64 * 160, "half"),
        ("llama", 2, 1.0, 5, 4 * 64 * 160, "half"),
        ("moe", 2, 0.0, 8, 0, "all"),
    ],
)  # fmt: skip
def test_is_close_to_plain_pytorch(
    tmp_path: Path, name: str, micro: int, clip: float, parts: int, pieces: int, evict: str | None
) -> None:
    captured = capture(model_of(name, **WIDE), batches_of(1, 1)[0][0], loss_fn, accumulation=micro)
    whole = expand(captured, clip_norm=clip, part_elements=1024)
    graph, origins = with_head_parts(whole, parts)
    assert len(heads(whole)) == micro
    assert sorted(set(origins)) == list(range(len(whole.ops)))
    graph.validate()
    replaced = {i for head in heads(whole) for i in (*head.replaced, head.total)}
    kept = [op for i, op in enumerate(whole.ops) if i not in replaced]
    assert [op for op, origin in zip(graph.ops, origins, strict=True) if origin not in replaced] == kept
    if pieces:
        assert pieced_gradients(graph, pieces)
        graph, _ = with_gradient_pieces(graph, pieces)
        graph.validate()
    program = program_of(graph, {None: None, "half": at_random(0), "all": disk_always}[evict])
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        assert_close_to_eager(executor, model_of(name, **WIDE), model_of(name, **WIDE), micro=micro, clip=clip)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_the_parts_of_a_gradient_add_up_at_once_and_in_the_same_order(tmp_path: Path, name: str) -> None:
    """Products of all parts stand behind the last part, by piece, and give the bits of those between the parts."""
    captured, piece = capture(model_of(name, **WIDE), batches_of(1, 1)[0][0], loss_fn), 4 * 64 * 160
    graph, _ = with_head_parts(expand(captured, part_elements=1024), 4)
    early, late = (with_gradient_pieces(graph, piece, late_products=late)[0] for late in (False, True))
    assert sorted(map(str, late.ops)) == sorted(map(str, early.ops))
    name_of_head = "head.weight" if name == "llama" else "tokens.weight"
    (head,) = (each for each in pieced_gradients(graph, piece) if each.name == name_of_head)
    added = [i for i, op in enumerate(late.ops) if op.name == ADDED_PRODUCT]
    parts = [i for i, op in enumerate(late.ops) if op.name == "aten._log_softmax_backward_data.default"]
    assert len(added) == 3 * len(head.starts[1:])
    assert min(added) > max(parts)
    values: list[list[torch.Tensor]] = []
    for each in (early, with_weight_pieces(late, 1 << 14)):
        with Executor(program_of(each, at_random(0)), optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
            load(executor, model_of(name, **WIDE))
            losses = [executor.step(batch, lr=1e-3) for batch in batches_of(3, 1)]
            rows = [whole_value(executor, each.storage_of(p.tensor)) for p in each.parameters]
        values.append([torch.tensor(losses), *rows])
    assert all(map(torch.equal, *values))


@pytest.mark.long
@pytest.mark.parametrize("ignored", [-100, 0, 7])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_targets_that_are_ignored_count_for_nothing(tmp_path: Path, ignored: int, reduction: str) -> None:
    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        scores = model(batch["x"]).flatten(0, 1)
        return F.cross_entropy(scores, batch["y"].flatten(), ignore_index=ignored, reduction=reduction) * 0.5

    batches = batches_of(2, 1)
    for (batch,) in batches:
        batch["y"][:, ::3] = ignored
    graph, _ = with_head_parts(expand(capture(model_of("gpt", **WIDE), batches[0][0], loss)), 4)
    reference = model_of("gpt", **WIDE)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    losses = []
    for (batch,) in batches:
        losses.append(loss(reference, batch))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    with Executor(program_of(graph), optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        load(executor, model_of("gpt", **WIDE))
        ours = [executor.step(b, lr=1e-3)[0] for b in batches]
    assert ours[0] == float(losses[0].detach())
    assert ours[1] == pytest.approx(float(losses[1].detach()), rel=1e-6)


def test_targets_that_are_made_behind_the_scores_are_read(tmp_path: Path) -> None:
    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        scores = F.log_softmax(model(batch["x"]).flatten(0, 1), 1)
        return F.nll_loss(scores, (batch["y"] * 3 + 1).flatten())

    (batch,) = batches_of(1, 1)[0]
    graph, _ = with_head_parts(expand(capture(model_of("gpt", **WIDE), batch, loss)), 4)
    graph.validate()
    with Executor(program_of(graph), optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        load(executor, model_of("gpt", **WIDE))
        assert executor.step([batch], lr=1e-3) == [float(loss(model_of("gpt", **WIDE), batch).detach())]


def test_two_losses_that_begin_with_the_same_ones(tmp_path: Path) -> None:
    """One head of which two losses are added up, each in parts: the losses' sum to the bit."""

    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        first, second = (model(batch[key]).flatten(0, 1) for key in "xy")
        return F.cross_entropy(first, batch["y"].flatten()) + F.cross_entropy(second, batch["x"].flatten())

    (batch,) = batches_of(1, 1)[0]
    whole = expand(capture(model_of("gpt", **WIDE), batch, loss))
    assert len(heads(whole)) == 2
    graph, _ = with_head_parts(whole, 4)
    made = [storage for op in graph.ops for storage in {graph.storage_of(t) for t in op.outputs}]
    assert len(made) == len(set(made))
    with Executor(program_of(graph), optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        load(executor, model_of("gpt", **WIDE))
        assert executor.step([batch], lr=1e-3) == [float(loss(model_of("gpt", **WIDE), batch).detach())]


def largest_bytes(graph: StepGraph) -> int:
    """Bytes of what one operation reads and writes, at most."""
    return max(sum(graph.storages[s].size_bytes for s in {*graph.reads(op), *graph.writes(op)}) for op in graph.ops)


@pytest.mark.long
def test_a_budget_that_no_whole_logits_fit_is_planned_and_said(tmp_path: Path) -> None:
    """Tokens times words are 8 MiB, and so is what 5 MiB train: the plan says that last bits differ."""

    def batch(rows: int) -> Batch:
        torch.manual_seed(1)
        return {k: torch.randint(0, 80, (rows, 16)) for k in "xy"}

    sizes = {"vocab_size": 2048, "dim": 64, "num_heads": 2, "num_layers": 1}
    whole = expand(capture(model_of("gpt", **sizes), batch(64), loss_fn))
    budget = 5 << 20
    assert largest_bytes(whole) > budget
    planned = make_plan(whole, small_machine(), budget=str(budget))
    assert planned.plan.choices.head_parts in {8, 16, 32}
    assert any("added up in another order" in sentence for sentence in planned.plan.assumptions)
    planned.plan.save(tmp_path / "plan.json")
    program = restore_program(Plan.load(tmp_path / "plan.json"), whole, small_machine())
    assert program.fingerprint == planned.program.fingerprint
    assert program.peak_bytes <= budget
    reference = model_of("gpt", **sizes)
    expected = float(loss_fn(reference, batch(64)).detach())
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        load(executor, model_of("gpt", **sizes))
        assert executor.step([batch(64)], lr=1e-3) == [expected]
    wrong = dataclasses.replace(planned.plan, choices=dataclasses.replace(planned.plan.choices, head_parts=5000))
    with pytest.raises(ConfigError, match="5000 parts of the head, expected 0 to 1024"):
        restore_program(wrong, whole, small_machine())


def changed(graph: StepGraph, index: int, **fields: Any) -> StepGraph:
    """The same step with another operation at one place."""
    ops = [dataclasses.replace(op, **fields) if i == index else op for i, op in enumerate(graph.ops)]
    return dataclasses.replace(graph, ops=tuple(ops))


def test_other_heads_stay_whole() -> None:
    """Logits with a bias or that are read twice, weights of classes, a loss that scales its gradient by itself."""
    whole = graph_of("gpt")
    (head,) = heads(whole)
    total = whole.ops[head.total]
    assert with_head_parts(whole, 1)[0] is whole
    others = [
        changed(whole, head.product, name="aten.addmm.default"),
        changed(whole, head.total, args=(*total.args[:2], total.args[1], *total.args[3:])),
        changed(whole, head.seed[0], name="aten.neg.default"),
        changed(whole, head.to_hidden, name="aten.addmm.default"),
    ]
    for other in others:
        assert heads(other) == ()
        with pytest.raises(ConfigError, match="nothing but a cross-entropy reads, found none"):
            with_head_parts(other, 4)
