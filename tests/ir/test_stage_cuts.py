"""A captured step is cut into stages: the ranks of a pipeline, in one process, have the gradients of the whole step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import lading
from lading.errors import ConfigError
from lading.ir.expand import expand
from lading.ir.graph import OpKind, Phase, Role, StepGraph
from lading.ir.layout import Layout
from lading.ir.reduction import RECEIVE, SEND
from lading.ir.schedules import Schedule, schedule
from lading.ir.stage_cuts import narrow_cuts, rank_steps, stage_of_ops
from lading.memory.lifetime import Gap, Lifetimes, can_recompute, gaps, lifetimes
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.tracing.interpret import Interpreter

MICRO = 4
SIZES: dict[str, Any] = {"vocab_size": 64, "max_seq_len": 16, "dim": 32, "num_heads": 2, "num_layers": 4}
MORE: dict[str, dict[str, Any]] = {"moe": {"num_experts": 4, "num_active": 2}}
CASES = [
    ("llama", "interleaved", 2, 2),
    ("llama", "zero-bubble", 2, 1),
    ("gpt", "1f1b", 4, 1),
    ("gpt", "zbv", 2, 2),
    ("moe", "1f1b", 2, 1),
    ("skips", "interleaved", 2, 2),
    pytest.param("llama", "gpipe", 2, 1, marks=pytest.mark.slow),
    pytest.param("llama", "1f1b", 4, 1, marks=pytest.mark.slow),
    pytest.param("llama", "zbv", 2, 2, marks=pytest.mark.slow),
    pytest.param("skips", "1f1b", 2, 1, marks=pytest.mark.slow),
]


class Skips(nn.Module):
    """A net whose first activations are read by its last stages, with a table that needs no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.down, self.middle, self.up = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1]).div(16).cos()[None, :, None]
        first = self.embed(tokens) * places
        second = self.down(first).relu()
        return self.head(self.up(self.middle(second).relu() + first).relu() * places + second)


def batch(number: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(number)
    return {"tokens": torch.randint(0, 64, (2, 17), generator=drawn)}


@cache
def captured(name: str) -> tuple[nn.Module, StepGraph]:
    torch.manual_seed(0)
    model = Skips() if name == "skips" else build_model(name, **{**SIZES, **MORE.get(name, {})})
    return model, lading.capture(model, batch(0), next_byte_loss, accumulation=MICRO)


def steps_of(graph: StepGraph, plan: Schedule) -> list[StepGraph]:
    """Whole steps of all ranks, with updates."""
    cuts = narrow_cuts(graph, plan.stages, [float(op.flops + 1) for op in graph.ops], 1.0)
    each = rank_steps(graph, stage_of_ops(graph, cuts), Layout(pp=plan.ranks), plan.rank_of)
    return [expand(step.graph, order=step.order(plan)) for step in each]


def begun(model: nn.Module, step: StepGraph) -> Interpreter:
    values = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    run = Interpreter(step.storages, step.tensors)
    for parameter in step.parameters:
        run.put(parameter.tensor, values[parameter.names[0]])
    for name, tensor in step.buffers:
        run.put(tensor, values[name])
    for micro, inputs in enumerate(step.inputs):
        for _, tensor in inputs:
            run.put(tensor, batch(micro)["tokens"])
    return run


def play(model: nn.Module, steps: Sequence[StepGraph]) -> list[Interpreter]:
    """Run the steps of all ranks, without updates, each until it waits for what another sends."""
    runs = [begun(model, step) for step in steps]
    left = [deque(op for op in step.ops if op.kind is not OpKind.STEP) for step in steps]
    mail: dict[tuple[int, object, object], deque[torch.Tensor]] = {}
    while any(left):
        before = sum(map(len, left))
        for rank, run in enumerate(runs):
            while left[rank]:
                op, named = left[rank][0], dict(left[rank][0].kwargs)
                if op.name == SEND:
                    box = mail.setdefault((rank, named["peer"], named["tag"]), deque())
                    box.append(run.tensor(op.inputs[0]).clone())
                elif op.name == RECEIVE:
                    if not (box := mail.get((named["peer"], rank, named["tag"]))):  # type: ignore[arg-type]
                        break
                    run.tensor(op.outputs[0]).copy_(box.popleft())
                else:
                    run.run(op)
                left[rank].popleft()
        assert sum(map(len, left)) < before, "all ranks wait"
    assert not any(mail.values())
    return runs


@pytest.mark.long
@pytest.mark.parametrize(("name", "kind", "ranks", "chunks"), CASES)
def test_ranks_have_the_gradients_of_one_process_to_the_bit(name: str, kind: str, ranks: int, chunks: int) -> None:
    model, graph = captured(name)
    whole, steps = expand(graph), steps_of(graph, schedule(kind, ranks, chunks, MICRO))
    alone = play(model, [whole])[0]
    gradients = {p.names[0]: alone.tensor(p.gradient) for p in whole.parameters if p.gradient is not None}
    found: dict[str, torch.Tensor] = {}
    for run, step in zip(play(model, steps), steps, strict=True):
        for parameter in step.parameters:
            if parameter.gradient is not None:
                assert parameter.names[0] not in found
                found[parameter.names[0]] = run.tensor(parameter.gradient)
        losses = [run.tensor(loss).item() for loss in step.losses]
        assert losses in ([], [alone.tensor(loss).item() for loss in whole.losses])
    assert found.keys() == gradients.keys()
    assert [each for each in found if not torch.equal(found[each], gradients[each])] == []


def test_a_rank_has_its_share_of_parameters_and_states() -> None:
    _, graph = captured("llama")
    steps = steps_of(graph, schedule("1f1b", 4, 1, MICRO))
    whole = sum(s.size_bytes for s in expand(graph).storages if s.role in (Role.PARAMETER, Role.OPTIMIZER_STATE))
    shares = [
        sum(s.size_bytes for s in step.storages if s.role in (Role.PARAMETER, Role.OPTIMIZER_STATE)) for step in steps
    ]
    assert sum(shares) == whole
    assert max(shares) < 0.35 * whole


def test_what_travels_is_the_stream_between_blocks() -> None:
    _, graph = captured("llama")
    for step in steps_of(graph, schedule("1f1b", 4, 1, MICRO)):
        for op in step.ops:
            if op.name == SEND:
                assert op.bytes_read == 2 * 16 * 32 * 4


def test_stages_are_even_where_activations_shrink() -> None:
    """The fewest bytes are alive at the end, where there is no work left to share."""
    layers = [nn.Linear(2 ** (9 - n), 2 ** (8 - n)) for n in range(6)]
    model = nn.Sequential(*(each for layer in layers for each in (layer, nn.ReLU())))
    graph = lading.capture(model, torch.zeros(64, 512), lambda model, inputs: model(inputs).square().mean())
    work = [float(op.flops) for op in graph.ops]
    forward = [index for index, op in enumerate(graph.ops) if op.phase is Phase.FORWARD]
    (cut,) = narrow_cuts(graph, 2, work, 0.0)
    first, whole = sum(work[i] for i in forward if i < cut), sum(work[i] for i in forward)
    assert 0.25 < first / whole < 0.8
    (cheap,) = narrow_cuts(graph, 2, work, 1e6)  # a byte is dear: as late as can be
    assert cheap > cut


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_what_is_changed_in_place_is_of_one_stage(stages: int) -> None:
    """As the gates of an LSTM, whose parts are changed one after another."""
    model = nn.LSTM(8, 8, 2)
    graph = lading.capture(model, torch.zeros(5, 2, 8), lambda model, inputs: model(inputs)[0].square().mean())
    assert any(op.mutates for op in graph.ops)
    cuts = narrow_cuts(graph, stages, [1.0] * len(graph.ops), 0.0)
    of_op = stage_of_ops(graph, cuts)
    writers: dict[int, set[int]] = {}
    for index, op in enumerate(graph.ops):
        if op.phase is Phase.FORWARD:
            for storage in graph.op_writes[index]:
                writers.setdefault(storage, set()).add(of_op[index])
    assert max(map(len, writers.values())) == 1
    rank_steps(graph, of_op, Layout(pp=stages), lambda stage: stage)


def test_refused() -> None:
    _, graph = captured("llama")
    with pytest.raises(ConfigError, match="cut into 9999 stages, found"):
        narrow_cuts(graph, 9999, [1.0] * len(graph.ops), 0.0)
    taken = lading.capture(Counting(), torch.zeros(8, 4), lambda model, inputs: model(inputs).square().mean())
    cuts = narrow_cuts(taken, 2, [1.0] * len(taken.ops), 0.0)
    with pytest.raises(ConfigError, match="stage that changes the buffer 'seen' to be the only one that reads it"):
        rank_steps(taken, stage_of_ops(taken, cuts), Layout(pp=2), lambda stage: stage)


class Counting(nn.Module):
    """Model whose first layer changes a buffer that its last one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.seen = nn.Buffer(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().sum(0)
        for layer in self.layers:
            x = layer(x).relu()
        return x * self.seen


def test_what_a_peer_sends_once_is_not_received_again() -> None:
    _, graph = captured("llama")
    received = 0
    for step in steps_of(graph, schedule("1f1b", 4, 1, MICRO)):
        lives = lifetimes(step)
        of_peers = [gap for gap in gaps(step, lives) if _producer(step, lives, gap) == RECEIVE]
        assert not any(can_recompute(step, lives, gap) for gap in of_peers)
        received += len(of_peers)
    assert received > MICRO


def _producer(step: StepGraph, lives: Lifetimes, gap: Gap) -> str:
    producer = lives.producer[gap.storage]
    return "" if producer is None else step.ops[producer].name
