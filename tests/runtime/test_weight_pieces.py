"""Weights in pieces: the same numbers to the bit, and pieces of a weight come, stay and go by themselves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.machines import small_machine
from tests.runtime.cases import (
    OPTIMIZER,
    RATES,
    TIERED,
    assert_equals_eager,
    at_random,
    batches_of,
    disk_always,
    eager_run,
    graph_of,
    host_always,
    loss_fn,
    model_of,
    program_of,
)

from lading.errors import ConfigError
from lading.ir.action import DEVICE, ActionKind
from lading.ir.defer import defer, updates
from lading.ir.expand import expand
from lading.ir.gradient_pieces import with_gradient_pieces
from lading.ir.graph import OpKind
from lading.ir.plan import Plan
from lading.ir.weight_pieces import with_weight_pieces
from lading.memory.restore import restore_program
from lading.planner.api import make_plan
from lading.prepare import plan
from lading.runtime.executor import Executor
from lading.tracing.trace import capture
from lading.trainer import Trainer

#: A vocabulary that is not a whole number of vectors.
WIDE = {"vocab_size": 1003}
#: Elements of the parts of updates, a page of them, and least bytes of a piece.
PART, PIECE = 1024, 1 << 14
#: A table of 8 MiB, of which an update reads all, and runs of pieces of it.
TABLE = {"vocab_size": 8192, "dim": 256, "num_heads": 2, "num_layers": 1}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "micro", "clip", "share", "evict"),
    [
        ("gpt", 1, 0.0, 0.0, None),
        ("gpt", 1, 1.0, 0.5, "half"),
        ("llama", 2, 1.0, 0.5, "half"),
        ("llama", 1, 0.0, 0.3, "all"),
        ("moe", 2, 0.0, 1.0, "all"),
    ],
)
def test_equals_plain_pytorch(
    tmp_path: Path, name: str, micro: int, clip: float, share: float, evict: str | None
) -> None:
    whole = graph_of(name, micro=micro, clip=clip, part_elements=PART, **WIDE)
    graph = with_weight_pieces(with_gradient_pieces(whole, 4 * 64 * 160)[0], PIECE)
    assert graph.runs
    graph.validate()
    later = defer(graph, int(share * len(updates(graph))))[0] if share else graph
    program = program_of(later, {None: None, "half": at_random(0), "all": disk_always}[evict])
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        assert_equals_eager(executor, name, micro=micro, clip=clip, rates=RATES, **WIDE)


@pytest.mark.long
@pytest.mark.parametrize(("name", "micro", "clip"), [("llama", 1, 0.0), ("gpt", 2, 1.0)])
def test_equals_plain_pytorch_through_two_tiers(tmp_path: Path, name: str, micro: int, clip: float) -> None:
    graph = with_weight_pieces(graph_of(name, micro=micro, clip=clip, part_elements=PART, **WIDE), PIECE)
    for pick in (host_always, at_random(3)):
        program = program_of(graph, pick, TIERED)
        with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
            assert_equals_eager(executor, name, micro=micro, clip=clip, rates=RATES, **WIDE)


def test_pieces_are_cut_where_updates_begin_and_nothing_else_changes() -> None:
    whole = graph_of("gpt", part_elements=PART, **WIDE)
    graph = with_weight_pieces(whole, PIECE)
    table = next(p for p in whole.parameters if p.names[0] == "tokens.weight")
    run = graph.run_of(graph.storage_of(table.tensor))
    assert run[0] == whole.storage_of(table.tensor)
    assert sum(graph.storages[s].size_bytes for s in run) == whole.storages[run[0]].size_bytes == 1003 * 64 * 4
    assert all(PIECE <= graph.storages[s].size_bytes < 2 * PIECE for s in run[:-1])
    assert graph.ops == whole.ops
    assert graph.parameters == whole.parameters
    for op, old, new in zip(whole.ops, whole.op_reads, graph.op_reads, strict=True):
        if run[0] in old:
            read = [storage for storage in new if storage in run]
            assert len(read) == (1 if op.kind is OpKind.STEP else len(run))
    assert with_weight_pieces(graph, PIECE) is graph
    assert with_weight_pieces(whole, 0) is whole
    assert with_weight_pieces(whole, 1 << 20) is whole


@pytest.mark.long
def test_a_budget_below_the_update_of_a_whole_weight_is_planned_and_run(tmp_path: Path) -> None:
    """A table of 8 MiB in 9.5 MiB, with states, gradient and process: its update has pieces of each."""
    captured = capture(model_of("gpt", **TABLE), batches_of(1, 1)[0][0], loss_fn)
    whole, budget = expand(captured, part_elements=1 << 17), 19 << 19
    planned = make_plan(whole, small_machine(), budget=str(budget))
    assert planned.plan.choices.weight_pieces
    assert planned.program.peak_bytes <= budget
    assert planned.plan.lower_bound_s <= planned.plan.step_s
    (run,) = planned.program.graph.runs
    moves = [a for a in planned.program.actions if a.kind is ActionKind.MOVE and a.storage in run]
    assert {a.storage for a in moves if a.target == DEVICE} < set(run)  # the others stay
    planned.plan.save(tmp_path / "plan.json")
    program = restore_program(Plan.load(tmp_path / "plan.json"), whole, small_machine())
    assert program.fingerprint == planned.program.fingerprint
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        assert_equals_eager(executor, "gpt", rates=RATES, **TABLE)
    wrong = dataclasses.replace(planned.plan, choices=dataclasses.replace(planned.plan.choices, weight_pieces=-1))
    with pytest.raises(ConfigError, match="pieces of weights of -1 bytes"):
        restore_program(wrong, whole, small_machine())


@pytest.mark.long
def test_a_trainer_reads_saves_and_loads_weights_in_pieces(tmp_path: Path) -> None:
    sizes = {**TABLE, "dim": 512}
    graph = capture(model_of("gpt", **sizes), batches_of(1, 1)[0][0], loss_fn)
    made = plan(graph, small_machine(), budget="24MiB")
    assert made.choices.weight_pieces
    reference, batches = model_of("gpt", **sizes), batches_of(4, 1)
    losses = [loss for (loss,) in eager_run(reference, batches, [1e-3] * 4, 0.0)]
    rule = dataclasses.replace(OPTIMIZER, lr=1e-3)
    with Trainer(made, graph, model_of("gpt", **sizes), optimizer=rule, folder=tmp_path) as trainer:
        assert [trainer.step(batch) for (batch,) in batches[:2]] == losses[:2]
        saved = trainer.save(tmp_path / "saved")
        table = trainer.value("tokens.weight")
    short = {name: tokens[:1] for name, tokens in batches[0][0].items()}
    shapes = [capture(model_of("gpt", **sizes), short, loss_fn)]
    with Trainer(made, graph, model_of("gpt", **sizes), optimizer=rule, folder=tmp_path, shapes=shapes) as trainer:
        trainer.load(saved)
        assert torch.equal(trainer.value("tokens.weight"), table)
        assert [trainer.step(batch) for (batch,) in batches[2:]] == losses[2:]
        assert trainer.evaluate(short) == loss_fn(reference, short).item()
        values = dict(trainer.state_dict())
    assert all(torch.equal(values[name], tensor) for name, tensor in reference.state_dict().items())
