"""A placement, run: its parts are stages of torch's own pipeline on two processes, with the whole model's numbers."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline

import lading
from lading.catalog.load import load_machine
from lading.catalog.models import named_model
from lading.errors import ConfigError
from lading.ir.fleet import Fleet, Join, Member
from lading.ir.placement import Placement, PlacementProblem, split_points
from lading.ir.plan import PLAN_FORMAT, PlacedStage, Plan, PlanKind
from lading.ir.request import Request
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.placing import saved
from lading.planner.placement.contest import place
from lading.planner.placement.from_graph import Grain, problem_of
from lading.planner.placement.trial import Trial
from lading.runtime.place import Placed, _lay_row_by_row, _path, _set_private, _Tied
from lading.tracing.trace import capture

MICRO_BATCHES, ROWS, TOKENS = 4, 2, 32


def _model() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "max_seq_len": TOKENS, "dim": 64, "num_heads": 2, "num_layers": 6}
    return build_model("gpt", **sizes)  # the head is the embedding


@cache
def _problem() -> PlacementProblem:
    """Two computers of which neither holds the model's states."""
    graph = capture(_model(), {"tokens": torch.zeros(ROWS, TOKENS + 1, dtype=torch.int64)}, next_byte_loss)
    machine = load_machine("cpu-laptop")
    whole = problem_of(
        graph, Fleet(name="f", date="", source="", devices=(_member("one", machine.device.memory_bytes),))
    )
    return problem_of(graph, _fleet(0.8 * whole.least_bytes), grain=Grain(max_units=10), micro_batches=MICRO_BATCHES)


def _fleet(half_bytes: float) -> Fleet:
    size = load_machine("cpu-laptop").device.overhead_bytes + int(half_bytes)
    link = Join(
        name="wire", devices=("a", "b"), medium="wire", bandwidth_bytes_per_s=1e9, efficiency=1.0, latency_s=1e-4
    )
    return Fleet(name="f", date="", source="", devices=(_member("a", size), _member("b", size)), links=(link,))


def _member(name: str, memory_bytes: int) -> Member:
    return Member(name=name, machine=load_machine("cpu-laptop"), memory_bytes=memory_bytes)


@cache
def _placed() -> Placement:
    return place(_problem(), "chain")


def _plan(units: int | None = 10, **choices: Any) -> Plan:
    asked = Request(
        model="gpt", machine="two", seq_len=TOKENS, layout=f"mb{ROWS}", global_batch=ROWS * MICRO_BATCHES, units=10
    )
    plan = saved(asked, _fleet(1e9), _problem(), _placed())
    request = dataclasses.replace(plan.request, units=units)
    return dataclasses.replace(plan, request=request, choices=dataclasses.replace(plan.choices, **choices))


def test_too_few_units_to_divide_the_model_are_refused() -> None:
    """Six layers beside three other modules are nine; with eight, all layers would be one."""
    graph = capture(_model(), {"tokens": torch.zeros(ROWS, TOKENS + 1, dtype=torch.int64)}, next_byte_loss)
    with pytest.raises(ConfigError, match=r"got 8: 'layers' is then one module with 9\d% .* give --units 9 or more"):
        problem_of(graph, _fleet(1e9), grain=Grain(max_units=8))
    divided = problem_of(graph, _fleet(1e9), grain=Grain(max_units=9))
    assert {"layers.0", "layers.5"} <= {group.name for group in divided.groups}


def test_the_parts_of_a_chain_are_split_points() -> None:
    problem, found = _problem(), _placed()
    points = split_points(problem, found)
    assert len(points) == 1
    assert points[0].startswith("layers.")
    assert [stage.begins for stage in _plan().stages[1:]] == list(points)
    mixed = Trial(problem).of([n % 2 for n in range(len(problem.groups))])
    with pytest.raises(ConfigError, match="expected one part on each device, got parts on a, b, a"):
        split_points(problem, dataclasses.replace(mixed, policy="own"))


def test_a_device_with_little_room_has_fewer_micro_batches_under_way() -> None:
    plan = _plan()
    room = plan.choices.in_flight
    assert [room[stage.device] for stage in plan.stages] == [2, 1]
    assert plan.windows == (2, 1)
    first = plan.stages[0].device
    assert _plan(in_flight={name: 1 if name == first else 3 for name in room}).windows == (
        1,
        1,
    )  # a stage gets no more than the one before


def test_a_torch_without_the_fields_that_are_set_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected Linear\._num_stages in torch.*, which torch"):
        _set_private(nn.Linear(1, 1), "_num_stages", 2)


def test_blocks_of_a_table_are_found_in_the_model() -> None:
    """The catalog calls them by number; the model has one list of as many."""
    blocks = ["before", *(f"layers {n}" for n in range(6)), "after"]

    def points(cut: int) -> list[tuple[str, bool]]:
        parts = tuple((name, "a" if number < cut else "b") for number, name in enumerate(blocks))
        return [(_path(s, _model()), s.behind) for s in _plan(None, placement=parts).stages[1:]]

    assert points(1) == [("layers.0", False)]
    assert points(4) == [("layers.3", False)]
    assert points(7) == [("layers.5", True)]  # what follows the last block
    with pytest.raises(ConfigError, match=r"expected one list of 6 modules .* found none; place with --units N"):
        _path(PlacedStage(device="b", begins="layers 3", blocks=6), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"found no module 'layers.9'; did you mean 'layers"):
        _path(PlacedStage(device="b", begins="layers.9"), _model())


def test_a_saved_placement_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    _plan().save(path)
    assert Plan.load(path, PlanKind.PLACEMENT) == _plan()
    path.write_text(path.read_text().replace('"b"\n', '"c"\n', 1))
    with pytest.raises(ConfigError, match=r"placement.json: a placement: expected devices among a, b, got 'c'"):
        Plan.load(path, PlanKind.PLACEMENT)
    path.write_text("{}")
    with pytest.raises(ConfigError, match=f"format {PLAN_FORMAT}, found no format; make one with: lading place"):
        Plan.load(path, PlanKind.PLACEMENT)


@pytest.mark.parametrize("units", [None, 10])
def test_tokens_that_were_not_asked_for_are_saved(units: int | None) -> None:
    """A script reads them from the plan: 0 would be a batch of nothing."""
    asked = Request(model="gpt2", machine="two", units=units)
    plan = saved(asked, _fleet(1e9), _problem(), _placed())
    assert plan.request.seq_len == named_model("gpt2").default_tokens


@pytest.mark.slow
@pytest.mark.parametrize("under_way", [2, 1])
def test_a_placed_model_has_the_losses_gradients_and_output_of_the_whole(under_way: int) -> None:
    plan = _plan()
    in_flight = {name: min(count, under_way) for name, count in plan.choices.in_flight.items()}
    run_ranks(_part, 2, _plan(in_flight=in_flight))


def test_losses_of_micro_batches_add_up_to_the_mean_of_the_step() -> None:
    part = object.__new__(Placed)
    part.plan, part._loss, part._passing = _plan(), nn.functional.mse_loss, False
    output, target = torch.arange(8.0), torch.zeros(8)
    shares = [
        part._scaled(*pair) for pair in zip(output.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES), strict=True)
    ]
    assert float(sum(shares)) == pytest.approx(float(nn.functional.mse_loss(output, target)))


def test_gradients_of_a_tied_weight_are_exchanged_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps before an update: the second adds what both parts have of it, and not the first once more."""

    def exchanged(operations: list[tuple[Any, torch.Tensor]]) -> list[Any]:
        sent = next(tensor for kind, tensor in operations if kind is dist.isend)
        next(tensor for kind, tensor in operations if kind is dist.irecv).copy_(10 * sent)  # the other part has as many
        return []

    monkeypatch.setattr(dist, "P2POp", lambda kind, tensor, peer, group: (kind, tensor))
    monkeypatch.setattr(dist, "batch_isend_irecv", exchanged)
    part = nn.Linear(2, 1, bias=False)
    tied = _Tied(part, "weight", (0, 1), 0, None)
    for _ in range(2):
        tied.set_aside()
        part(torch.ones(1, 2)).sum().backward()
        tied.add_up()
    assert part.weight.grad is not None
    assert part.weight.grad.tolist() == [[2 * (1 + 10)] * 2]


class _Turned(nn.Sequential):
    """Layers that hand over a transpose, or one row for all: neither is contiguous."""

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x_BTC = torch.tanh(layer(x_BTC)).transpose(1, 2)
        return x_BTC.mean(1)


def _turned() -> nn.Module:
    torch.manual_seed(0)
    return _Turned(*(nn.Linear(8, 8) for _ in range(4)))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's tracer uses what torch deprecates
def test_what_leaves_a_part_is_contiguous() -> None:
    """Ranks send and receive nothing else."""
    example = torch.randn(ROWS, 8, 8)
    pipe = pipeline(_turned(), mb_args=(example,), split_spec={"2": SplitPoint.BEGINNING})
    first, second = (pipe.get_stage_module(number) for number in (0, 1))
    expected = first(example)
    assert not expected.is_contiguous()
    _lay_row_by_row(first, comes_in=False, goes_out=True)
    _lay_row_by_row(second, comes_in=True, goes_out=False)
    assert torch.equal(first(example), expected)
    assert first(example).is_contiguous()
    (taken,) = second.graph.find_nodes(op="placeholder")
    assert taken.meta["val"].is_contiguous()
    assert torch.equal(second(first(example)), _turned()(example))


@pytest.mark.slow
def test_parts_may_hand_over_a_transpose() -> None:
    run_ranks(_turned_part, 2, _plan(None, placement=(("0", "a"), ("1", "a"), ("2", "b"), ("3", "b"))))


def _turned_part(rank: int, plan: Plan) -> None:
    torch.manual_seed(1)
    inputs, target = torch.randn(MICRO_BATCHES * ROWS, 8, 8), torch.randn(MICRO_BATCHES * ROWS, 8)
    part = lading.place(plan, _turned(), (inputs[:ROWS],), nn.functional.mse_loss)
    plain = _turned()
    losses = part.step(inputs, target=target)
    nn.functional.mse_loss(plain(inputs), target).backward()
    if part.is_last:
        torch.testing.assert_close(torch.stack(losses).mean(), nn.functional.mse_loss(plain(inputs), target).detach())
    for name, parameter in part.module.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


def _loss(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def _part(rank: int, plan: Plan) -> None:
    torch.manual_seed(1)
    tokens = torch.randint(0, 64, (MICRO_BATCHES * ROWS, TOKENS + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    lean = plan.windows[0] == 1  # this time no process holds the whole model
    with torch.device("meta" if lean else "cpu"):
        model = _model()
    part = lading.place(plan, model, (inputs[:ROWS],), _loss)
    if lean:
        part.module.to_empty(device="cpu")
        whole = _model().state_dict()
        part.module.load_state_dict({name: whole[name] for name in part.module.state_dict()})
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
    plain = _model()
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for times in (1, 2, 1):  # gradients of two steps add up, tied ones too
        for _ in range(times):
            losses = part.step(inputs, target=targets)
            own = [_loss(plain(x), y) for x, y in zip(inputs.split(ROWS), targets.split(ROWS), strict=True)]
            torch.stack(own).mean().backward()
        if part.is_last:
            torch.testing.assert_close(torch.stack(losses), torch.stack(own).detach(), rtol=1e-5, atol=1e-6)
        gradients = {name: p.grad for name, p in plain.named_parameters(remove_duplicate=False)}
        held = dict(part.module.named_parameters())
        assert {"tokens.weight", "head.weight"} & held.keys() == {"head.weight" if part.is_last else "tokens.weight"}
        for name, parameter in held.items():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    output = part.run(inputs)
    assert (output is None) == (rank == 0)
    if output is not None:
        torch.testing.assert_close(output, plain(inputs).detach(), rtol=1e-4, atol=1e-5)
