"""States of matrix optimizers move between numbers of ranks, meshes, plans, and ways of reducing gradients."""

from __future__ import annotations

import copy
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor

from lading.errors import ConfigError
from tests.ranks import run_ranks
from tests.test_matrices import KINDS, Model, cut, give, gradients, groups_of

#: How the model is cut, one way after another, and on how many ranks; FSDP2 on two ranks that are tensor parallel cuts
#: by one.
TRIP, SHORT = (("own", 2), ("fsdp-tp", 4), ("own", 3)), (("own", 2), ("fsdp-tp", 2), ("own", 1))


def build(kind: str, mode: str, ranks: int) -> tuple[Any, Any]:
    model = Model() if mode == "own" else cut(Model(), mode, ranks)
    optimizer = KINDS[kind](groups_of(model), reduces=mode == "own", stagger=True, groups=2)
    return model, optimizer


def updates(model: Any, optimizer: Any, first: int) -> None:
    """Two, with rates of each group's own that change as a schedule would have it; gradients are whole numbers, whose
    mean rounds nowhere."""
    for step in (first, first + 1):
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] *= 0.9 - 0.1 * number
        give(model, [grad.mul(8).round() for grad in gradients(step)])
        optimizer.step()


def _through_torch(kind: str, model: Any, optimizer: Any, place: Path) -> tuple[Any, Any]:
    """Copy of a model and its optimizer, by torch's functions for states of any optimizer, and a checkpoint."""
    other, second = build(kind, "fsdp-tp", dist.get_world_size())
    save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=place)
    for options in (None, StateDictOptions(flatten_optimizer_state_dict=True)):
        states = get_optimizer_state_dict(other, second, options=options)
        if options is None:
            assert set(states["state"]) == {name for name, _ in other.named_parameters()}
            load({"optimizer": states}, checkpoint_id=place)
        set_optimizer_state_dict(other, second, states, options=options)
    other.load_state_dict(model.state_dict())
    return other, second


def _leg(
    rank: int, trip: tuple[tuple[str, int], ...], number: int, folder: Path, expected: dict[str, list[torch.Tensor]]
) -> None:
    mode, ranks = trip[number]
    for kind, whole in expected.items():
        model, optimizer = build(kind, mode, ranks)
        if number:
            weights = model.state_dict()
            load({"model": weights, "optimizer": optimizer}, checkpoint_id=folder / f"{kind}-{number - 1}")
            model.load_state_dict(weights)
        if mode == "fsdp-tp":
            model, optimizer = _through_torch(kind, model, optimizer, folder / f"{kind}-torch")
        updates(model, optimizer, 2 * number)
        state, place = {"model": model.state_dict(), "optimizer": optimizer}, folder / f"{kind}-{number}"
        if number:
            save(state, checkpoint_id=place)
        else:  # states go on while a copy of them is saved
            saving = async_save(state, checkpoint_id=place, process_group=dist.new_group())
            assert isinstance(saving, Future)
            updates(model, optimizer, 2)
            saving.result()
        if number == len(trip) - 1:
            for ours, theirs in zip(model.parameters(), whole, strict=True):
                assert torch.equal(ours.full_tensor() if isinstance(ours, DTensor) else ours, theirs), kind


@pytest.mark.parametrize(
    ("kind", "trip"),
    [
        pytest.param("soap", SHORT, id="two ranks"),
        *(pytest.param(kind, TRIP, id=f"{kind}, four ranks", marks=pytest.mark.slow) for kind in ("soap", "muon")),
    ],
)
def test_from_replicas_to_shards_and_back(kind: str, trip: tuple[tuple[str, int], ...], tmp_path: Path):
    """ZeRO-1, FSDP2 with tensor parallel, ZeRO-1 on other ranks: the bits of one that never stops."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = Model()
    optimizer = KINDS[kind](groups_of(model), stagger=True)
    for number in range(len(trip)):
        updates(model, optimizer, 2 * number)
    expected = {kind: [p.detach() for p in model.parameters()]}
    torch.set_num_threads(threads)
    for number, (_, ranks) in enumerate(trip):
        run_ranks(_leg, ranks, trip, number, tmp_path, expected)


def test_a_state_dict_of_one_process_is_taken_over():
    (model, optimizer), (other, second) = build("soap", "own", 1), build("soap", "own", 1)
    updates(model, optimizer, 0)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(model.state_dict())
    for each in (model, other):
        updates(each, optimizer if each is model else second, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_what_is_not_taken_over_says_so_and_leaves_everything():
    model, optimizer = build("muon", "own", 1)
    updates(model, optimizer, 0)
    before = {key: row["step"].clone() for key, row in optimizer.state_dict()["state"].items()}
    _, plain = build("muon", "ddp", 1)
    with pytest.raises(ConfigError, match=r"of momentum, got all of it; .* torch\.distributed\.checkpoint"):
        optimizer.load_state_dict(plain.state_dict())
    state = copy.deepcopy(plain.state_dict())
    state["param_groups"][0]["params"].pop()
    with pytest.raises(ConfigError, match=r"expected states of groups of .* group parameters as they were"):
        plain.load_state_dict(state)
    state = copy.deepcopy(plain.state_dict())
    state["param_groups"][0]["param_names"].reverse()
    with pytest.raises(ConfigError, match="give parameters in the order in which they were saved"):
        plain.load_state_dict(state)
    assert all(torch.equal(row["step"], before[key]) for key, row in optimizer.state_dict()["state"].items())
    pieces = optimizer.state[dict(model.named_parameters())["up.weight"]]["momentum"]
    with pytest.raises(NotImplementedError, match="pieces of one; load them by a checkpoint"):
        pieces.add(1)
