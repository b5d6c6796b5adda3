"""Gradients in pieces: the same numbers to the bit, and no large gradient is ever whole."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.machines import small_machine
from tests.runtime.cases import (
    OPTIMIZER,
    RATES,
    assert_equals_eager,
    at_random,
    batches_of,
    differing,
    disk_always,
    eager_run,
    graph_of,
    load,
    loss_fn,
    model_of,
    program_of,
)

from lading.errors import ConfigError
from lading.ir.defer import defer, updates
from lading.ir.expand import expand
from lading.ir.gradient_pieces import pieced_gradients, with_gradient_pieces
from lading.ir.graph import Ref, Role
from lading.ir.loss_parts import with_loss_parts
from lading.ir.plan import Plan
from lading.memory.restore import restore_program
from lading.planner.api import make_plan
from lading.runtime.executor import Executor
from lading.tracing.trace import capture

#: A vocabulary that is not a whole number of vectors.
WIDE = {"vocab_size": 1003}
#: Elements of the parts of updates: 16 rows of 64.
PART = 1024


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "micro", "clip", "loss_parts", "share", "evict"),
    [
        ("gpt", 1, 0.0, 0, 0.0, None),
        ("gpt", 1, 1.0, 0, 0.5, "half"),
        ("llama", 2, 1.0, 5, 0.5, "half"),
        ("llama", 1, 0.0, 0, 0.3, "all"),
        ("moe", 2, 0.0, 4, 1.0, "all"),
    ],
)  # fmt: skip
def test_equals_plain_pytorch(
    tmp_path: Path, name: str, micro: int, clip: float, loss_parts: int, share: float, evict: str | None
) -> None:
    whole, _ = with_loss_parts(graph_of(name, micro=micro, clip=clip, part_elements=PART, **WIDE), loss_parts)
    graph, origins = with_gradient_pieces(whole, 4 * 64 * 160)
    cut = {gradient.name for gradient in pieced_gradients(whole, 4 * 64 * 160)}
    assert cut == ({"tokens.weight"} if name == "gpt" else {"tokens.weight", "head.weight"})
    assert sorted(set(origins)) == list(range(len(whole.ops)))
    graph.validate()
    later = defer(graph, int(share * len(updates(graph))))[0] if share else graph
    program = program_of(later, {None: None, "half": at_random(0), "all": disk_always}[evict])
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        assert_equals_eager(executor, name, micro=micro, clip=clip, rates=RATES, **WIDE)


@pytest.mark.parametrize(("micro", "clip", "share"), [(1, 0.0, 0.0), (2, 1.0, 0.5)])
def test_late_products_equal_plain_pytorch(tmp_path: Path, micro: int, clip: float, share: float) -> None:
    """A tied weight's product runs right before its sum, by what it reads, and nothing else changes its place."""
    sizes, piece = {**WIDE, "dim": 128}, 4 * 128 * 160
    whole = graph_of("gpt", micro=micro, clip=clip, part_elements=PART, **sizes)
    early, _ = with_gradient_pieces(whole, piece)
    graph, origins = with_gradient_pieces(whole, piece, late_products=True)
    assert sorted(map(str, graph.ops)) == sorted(map(str, early.ops))
    graph.validate()
    heads = {origin for origin, op in zip(origins, graph.ops, strict=True) if op.module == "head" and op.outputs}
    products = [at for at, origin in enumerate(origins) if origin in heads and origins.count(origin) > 2]
    (tied,) = (each for each in pieced_gradients(whole, piece) if each.name == "tokens.weight")
    assert len(products) == micro * len(tied.starts[1:])
    for at in products:
        made = graph.storage_of(graph.ops[at].outputs[0])
        read = next(i for i, op in enumerate(graph.ops) if made in graph.reads(op))
        assert 0 < read - at <= len(("sub", "and", "clamp", "look-up", "sum", *range(micro)))
    later = defer(graph, int(share * len(updates(graph))))[0] if share else graph
    with Executor(program_of(later, at_random(0)), optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        assert_equals_eager(executor, "gpt", micro=micro, clip=clip, rates=RATES, **sizes)


def test_products_of_as_many_tokens_as_half_the_width_are_not_late() -> None:
    """32 tokens, and a width of 64: what the product reads is more than half of the gradient."""
    whole, piece = graph_of("gpt", part_elements=PART, **WIDE), 4 * 64 * 160
    assert with_gradient_pieces(whole, piece, late_products=True) == with_gradient_pieces(whole, piece)


class Tied(torch.nn.Module):
    """Table that two look-ups and a head share: tokens (rows, tokens) -> logits (rows, tokens, words).

    Args:
        padding: Word whose row gets no gradient from look-ups.
        narrow: Look up by int32 numbers.
        scaled: Divide gradients by how often a word was looked up.
    """

    def __init__(self, *, words: int = 1003, padding: int | None = None, narrow: bool = False, scaled: bool = False):
        super().__init__()
        self.table = torch.nn.Embedding(words, 64, padding_idx=padding, scale_grad_by_freq=scaled)
        self.middle = torch.nn.Linear(64, 64)
        self.bias = torch.nn.Parameter(torch.zeros(words))
        self.narrow = narrow

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        numbers = tokens.int() if self.narrow else tokens
        hidden = self.middle(self.table(numbers).relu()) + self.table(numbers // 2)
        return torch.nn.functional.linear(hidden, self.table.weight, self.bias)


def built(**settings: Any) -> Tied:
    torch.manual_seed(0)
    return Tied(**settings)


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"padding": 40}, {"padding": 0}, {"narrow": True}, {"words": 2000}])
def test_a_table_that_three_share_equals_plain_pytorch(tmp_path: Path, settings: dict[str, Any]) -> None:
    whole = expand(capture(built(**settings), batches_of(1, 1)[0][0], loss_fn), clip_norm=0.5, part_elements=PART)
    graph, _ = with_gradient_pieces(whole, 4 * 64 * 160)
    (cut,) = pieced_gradients(whole, 4 * 64 * 160)
    assert cut.name == "table.weight"
    assert len(cut.storages) > len("abc")  # the head's, those of two look-ups, and their sums
    reference, batches = built(**settings), batches_of(len(RATES), 1)
    losses = eager_run(reference, batches, RATES, 0.5)
    with Executor(program_of(graph, at_random(1)), optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        load(executor, built(**settings))
        assert [executor.step(b, lr=lr) for b, lr in zip(batches, RATES, strict=True)] == losses
        assert differing(executor, reference) == []


def test_what_is_not_understood_stays_whole() -> None:
    """A gradient that is scaled by how often words come, and one that a caller is given."""
    batch = batches_of(1, 1)[0][0]
    scaled = expand(capture(built(scaled=True), batch, loss_fn), part_elements=PART)
    assert pieced_gradients(scaled, 4 * 64 * 160) == ()
    assert with_gradient_pieces(scaled, 4 * 64 * 160)[0] is scaled
    plain = graph_of("gpt", part_elements=PART, **WIDE)
    (tied,) = (p for p in plain.parameters if len(p.names) > 1)
    assert tied.gradient is not None
    given = dataclasses.replace(plain, losses=(*plain.losses, tied.gradient))
    assert pieced_gradients(given, 4 * 64 * 160) == ()
    assert with_gradient_pieces(plain, 0)[0] is plain


def test_gradients_of_gradients_stay_whole() -> None:
    """A product that makes one large gradient reads another."""
    whole, piece_bytes = graph_of("llama", part_elements=PART, **WIDE), 4 * 64 * 48
    cut = {gradient.name for gradient in pieced_gradients(whole, piece_bytes)}
    first = next(p.gradient for p in whole.parameters if p.names[0] == "head.weight")
    later = next(p.gradient for p in whole.parameters if p.names[0] in cut and p.names[0].startswith("layers.0."))
    assert first is not None
    made = next(i for i, op in enumerate(whole.ops) if later in op.outputs)
    op = whole.ops[made]
    odd = dataclasses.replace(op, args=(op.args[0], Ref(first)), inputs=(op.inputs[0], first))
    other = dataclasses.replace(whole, ops=(*whole.ops[:made], odd, *whole.ops[made + 1 :]))
    assert pieced_gradients(other, piece_bytes) == ()


def test_no_piece_is_there_with_another_where_each_is_used_up_at_once() -> None:
    """The updates of a head stand behind the piece that they read, and no operation has the gradient whole."""
    whole = graph_of("llama", part_elements=PART, **WIDE)
    graph, _ = with_gradient_pieces(whole, 4 * 64 * 160)
    head = next(p for p in whole.parameters if p.names[0] == "head.weight")
    assert head.gradient is not None
    size = whole.tensors[head.gradient].size_bytes
    pieces = [i for i, s in enumerate(graph.storages) if i >= len(whole.storages) and s.role is Role.GRADIENT]
    assert max(graph.storages[s].size_bytes for s in pieces) < size // 2
    name = whole.storages[whole.storage_of(head.gradient)].name
    uses = [
        sorted(i for i, op in enumerate(graph.ops) if s in (*graph.reads(op), *graph.writes(op)))
        for s in pieces
        if graph.storages[s].name.startswith(name)
    ]
    assert len(uses) > 2
    assert all(before[-1] < after[0] for before, after in pairwise(uses))


@pytest.mark.long
def test_a_budget_below_a_weight_and_its_gradient_is_planned_and_run(tmp_path: Path) -> None:
    """A table of 8 MiB and its gradient in 13 MiB: planned, saved, read back, and the numbers are plain PyTorch's."""
    sizes = {"vocab_size": 8192, "dim": 256, "num_heads": 2, "num_layers": 1}
    captured = capture(model_of("gpt", **sizes), batches_of(1, 1)[0][0], loss_fn)
    whole = expand(captured, part_elements=1 << 17)
    budget = 13 << 20
    assert max(sum(whole.storages[s].size_bytes for s in reads) for reads in whole.op_reads) > budget
    planned = make_plan(whole, small_machine(), budget=str(budget))
    assert planned.plan.choices.gradient_pieces
    assert planned.program.peak_bytes <= budget
    planned.plan.save(tmp_path / "plan.json")
    program = restore_program(Plan.load(tmp_path / "plan.json"), whole, small_machine())
    assert program.fingerprint == planned.program.fingerprint
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        assert_equals_eager(executor, "gpt", rates=RATES, **sizes)
    wrong = dataclasses.replace(planned.plan, choices=dataclasses.replace(planned.plan.choices, gradient_pieces=-1))
    with pytest.raises(ConfigError, match="pieces of gradients of -1 bytes"):
        restore_program(wrong, whole, small_machine())
