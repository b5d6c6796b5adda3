"""Loss in parts: the same numbers to the bit, in one place of the size of the logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.machines import small_machine
from tests.runtime import cases
from tests.runtime.cases import (
    OPTIMIZER,
    assert_equals_eager,
    at_random,
    batches_of,
    disk_always,
    graph_of,
    load,
    model_of,
    program_of,
)
from torch.nn import functional as F

from lading.errors import ConfigError, PlanInfeasible, ProgramError
from lading.ir.cast_losses import VECTOR_BYTES
from lading.ir.cross_entropy import cast_losses, cross_entropies
from lading.ir.defer import defer, updates
from lading.ir.expand import expand
from lading.ir.graph import Role, StepGraph
from lading.ir.loss_parts import with_loss_parts
from lading.ir.plan import Plan
from lading.memory.restore import restore_program
from lading.planner.api import make_plan
from lading.runtime.executor import Executor
from lading.tracing.trace import capture

RATES = [1e-3, 5e-4, 2e-3]
#: A vocabulary that is not a whole number of vectors.
WIDE = {"vocab_size": 1003}


def narrow_loss(model: torch.nn.Module, batch: Mapping[str, Any], ignored: int = -100) -> torch.Tensor:
    """Cross-entropy in float32 of logits in 16 bits, one target of which does not count."""
    targets = batch["y"].flatten().index_fill(0, torch.tensor([3]), ignored)
    return F.cross_entropy(model(batch["x"]).bfloat16().float().flatten(0, 1), targets, ignore_index=ignored)


def largest_bytes(graph: StepGraph) -> int:
    """Bytes of what one operation reads and writes, at most."""
    return max(sum(graph.storages[s].size_bytes for s in {*graph.reads(op), *graph.writes(op)}) for op in graph.ops)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "micro", "clip", "parts", "share", "evict"),
    [
        ("gpt", 1, 0.0, 2, 0.0, None),
        ("llama", 2, 1.0, 5, 0.5, "half"),
        ("moe", 1, 0.0, 64, 1.0, "all"),
    ],
)  # fmt: skip
def test_equals_plain_pytorch(
    tmp_path: Path, name: str, micro: int, clip: float, parts: int, share: float, evict: str | None
) -> None:
    whole = graph_of(name, micro=micro, clip=clip, **WIDE)
    graph, origins = with_loss_parts(whole, parts)
    assert len(cross_entropies(whole)) == micro
    assert [whole.ops[i].name for i in dict.fromkeys(origins)] == [op.name for op in whole.ops]
    assert len(graph.ops) == len(whole.ops) + micro * (5 * parts - 3)
    later = defer(graph, int(share * len(updates(graph))))[0] if share else graph
    program = program_of(later, {None: None, "half": at_random(0), "all": disk_always}[evict])
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        assert_equals_eager(executor, name, micro=micro, clip=clip, rates=RATES, **WIDE)


def test_logits_are_there_once() -> None:
    whole = graph_of("gpt", vocab_size=2048)
    parts, _ = with_loss_parts(whole, 16)
    (loss,) = cross_entropies(whole)
    logits = whole.storages[loss.logits].size_bytes
    touched = {*whole.reads(whole.ops[loss.backward]), *whole.writes(whole.ops[loss.backward])}
    assert sum(whole.storages[s].size_bytes for s in touched) == 3 * logits
    assert [parts.storages[s].size_bytes for s in (loss.scores, loss.chosen, loss.gradient)] == [0, 0, 0]
    pieces = list(parts.storages[len(whole.storages) :])
    assert {s.role for s in pieces} == {Role.ACTIVATION}
    assert {s.size_bytes for s in pieces} == {logits // 16}
    assert with_loss_parts(whole, 0)[0] is whole


def test_the_gradients_of_a_tied_weight_are_summed_in_one_place() -> None:
    whole = graph_of("gpt", vocab_size=2048)
    (tied,) = (p for p in whole.parameters if len(p.names) > 1)
    assert tied.gradient is not None
    (total,) = (op for op in whole.ops if tied.gradient in op.outputs)
    parts, origins = with_loss_parts(whole, 4)
    at = origins.index(whole.ops.index(total))
    assert total.name == "aten.add.Tensor"
    assert parts.ops[at].name == "aten.add_.Tensor"
    assert (
        parts.storage_of(parts.ops[at].inputs[0]) == parts.storage_of(tied.gradient) == whole.storage_of(tied.gradient)
    )
    assert len({*parts.op_reads[at], *parts.op_writes[at]}) == 2


def test_logits_that_something_else_reads_stay_whole() -> None:
    whole = graph_of("gpt")
    (loss,) = cross_entropies(whole)
    reader = dataclasses.replace(
        whole.ops[loss.forward], name="aten.relu.default", args=whole.ops[loss.forward].args[:1]
    )  # fmt: skip
    used = dataclasses.replace(whole, ops=(*whole.ops[: loss.forward], reader, *whole.ops[loss.forward :]))
    assert cross_entropies(used) == ()
    with pytest.raises(ConfigError, match="expected a cross-entropy whose logits nothing else reads, found none"):
        with_loss_parts(used, 4)


@pytest.mark.parametrize(
    ("name", "micro", "clip", "parts", "ignored"),
    [("gpt", 1, 0.0, 5, -100), ("gpt", 1, 0.0, 5, 2000), ("llama", 2, 1.0, 32, 7)],  # no words, and one
)
def test_the_loss_of_narrow_logits_equals_plain_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, micro: int, clip: float, parts: int, ignored: int
) -> None:
    loss = partial(narrow_loss, ignored=ignored)
    monkeypatch.setattr(cases, "loss_fn", loss)
    captured = capture(model_of(name, **WIDE), batches_of(1, 1)[0][0], loss, accumulation=micro)
    whole = expand(captured, clip_norm=clip)
    graph, origins = with_loss_parts(whole, parts)
    assert len(cast_losses(whole)) == micro
    assert {whole.ops[i].name for i in origins} == {op.name for op in whole.ops}
    with Executor(program_of(graph), optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        assert_equals_eager(executor, name, micro=micro, clip=clip, rates=RATES, **WIDE)


def test_only_narrow_logits_are_whole() -> None:
    whole = expand(capture(model_of("gpt", vocab_size=2048), batches_of(1, 1)[0][0], narrow_loss))
    parts, _ = with_loss_parts(whole, 16)
    (cast,) = cast_losses(whole)
    narrow = whole.storages[cast.narrow].size_bytes
    assert [parts.storages[s].size_bytes for s in (cast.loss.logits, cast.loss.scores, cast.loss.gradient)] == [0, 0, 0]
    assert parts.storages[cast.narrow].size_bytes == narrow
    assert parts.storages[cast.narrow_gradient].size_bytes == 0
    assert max(s.size_bytes for s in parts.storages[len(whole.storages) :]) == 2 * narrow // 16


@pytest.mark.parametrize("words", [1003, 1006, 1024])
def test_rows_of_a_part_begin_at_vectors_as_the_whole_does(words: int) -> None:
    """Kernels of GPUs add up a row in an order that depends on its address."""
    whole = expand(capture(model_of("gpt", vocab_size=words), batches_of(1, 1)[0][0], narrow_loss))
    parts, _ = with_loss_parts(whole, 32)  # as many as tokens
    (cast,) = cast_losses(whole)
    reads = [parts.tensors[op.inputs[0]] for op in parts.ops if op.name == whole.ops[cast.cast].name]
    first = {tensor.offset * 4 for tensor in reads if tensor.storage == cast.narrow}  # bytes in float32
    assert len(first) == {1003: 8, 1006: 16, 1024: 32}[words]
    assert all(place % VECTOR_BYTES == 0 for place in first)


def test_a_target_that_is_no_word_is_refused_as_in_plain_pytorch(tmp_path: Path) -> None:
    (batch,) = batches_of(1, 1)[0]
    graph, _ = with_loss_parts(expand(capture(model_of("gpt"), batch, narrow_loss)), 4)
    with Executor(program_of(graph), optimizer=OPTIMIZER, folder=tmp_path) as executor:
        load(executor, model_of("gpt"))
        for wrong in (80, -3):
            with pytest.raises(ProgramError, match=f"Target {wrong} is out of bounds"):
                executor.step([{**batch, "y": torch.full_like(batch["y"], wrong)}], lr=1e-3)


def test_narrow_logits_that_something_else_reads_are_cast_whole() -> None:
    def twice(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        narrow = model(batch["x"]).bfloat16()
        return F.cross_entropy(narrow.float().flatten(0, 1), batch["y"].flatten()) + narrow.float().square().mean()

    def scaled(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        loss = narrow_loss(model, batch)
        return loss * loss.detach()

    for loss_of in (twice, scaled):
        assert cast_losses(expand(capture(model_of("gpt"), batches_of(1, 1)[0][0], loss_of))) == ()


@pytest.mark.long
def test_a_budget_that_the_whole_loss_does_not_fit_is_planned_and_run(tmp_path: Path) -> None:
    """Less than the backward of the loss needs at once: the plan has its loss in parts and trains as plain."""
    sizes = {"vocab_size": 4001, "dim": 16, "num_heads": 2}
    whole = graph_of("gpt", **sizes)
    budget = int(0.97 * largest_bytes(whole))
    planned = make_plan(whole, small_machine(), budget=str(budget))
    assert planned.plan.choices.loss_parts == 16
    assert planned.program.peak_bytes <= budget < largest_bytes(whole)
    path = tmp_path / "plan.json"
    planned.plan.save(path)
    program = restore_program(Plan.load(path), whole, small_machine())
    assert program.fingerprint == planned.program.fingerprint
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        assert_equals_eager(executor, "gpt", rates=RATES, **sizes)
    with pytest.raises(PlanInfeasible):
        make_plan(whole, small_machine(), budget=str(budget // 4))
    too_many = dataclasses.replace(planned.plan, choices=dataclasses.replace(planned.plan.choices, loss_parts=4000))
    with pytest.raises(ConfigError, match="expected 0 to 1024"):
        restore_program(too_many, whole, small_machine())
