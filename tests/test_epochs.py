"""Data without replacement: every sample once an epoch, whoever takes it and wherever a run was cut."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lading.checkpoint.store import latest_checkpoint, open_checkpoint
from lading.config import DataConfig, load_run
from lading.errors import ConfigError, StorageError
from lading.prepare import plan_run
from lading.runtime.arrays import ArrayDataset
from lading.runtime.data import Sampler, TextDataset, from_the_beginning
from lading.runtime.epochs import DataPosition, Epochs, permuted
from lading.train import train_plain, train_run
from tests.runs import write_run
from tests.test_train_ranks import ASKED, numbers, records, written
from tests.test_train_ranks import alone as run_alone

SIZES = [*range(1, 70), 255, 256, 257, 1000]


@pytest.mark.parametrize("count", SIZES)
def test_an_epoch_is_a_permutation(count: int) -> None:
    values = permuted(np.arange(count), count, 3, 0)
    assert sorted(values.tolist()) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(permuted(np.arange(500), 500, seed, epoch)) for seed in range(3) for epoch in range(3)]
    assert len({*orders}) == 9
    same = [
        sum(a == b for a, b in zip(left, right, strict=True))
        for left in orders
        for right in orders
        if left is not right
    ]
    assert max(same) < 12  # one place in 500 is equal by chance
    near = [np.abs(np.diff(order)).mean() for order in orders]
    assert all(150 < each < 183 for each in near)  # 500 / 3, as of numbers drawn apart


PINNED = [
    [8, 3, 5, 4, 9, 6, 0, 1, 2, 7],
    [4, 0, 6, 1, 7, 3, 8, 9, 5, 2],
    [961214937110, 379342711594, 43372186378],
]


def test_the_order_never_changes() -> None:
    """A run that goes on with another version of Lading takes the samples that are left."""
    assert permuted(np.arange(10), 10, 3, 0).tolist() == PINNED[0]
    assert permuted(np.arange(10), 10, 3, 1).tolist() == PINNED[1]
    assert permuted(np.asarray([0, 1, 10**12 - 1]), 10**12, 7, 5).tolist() == PINNED[2]


def taken(order: Epochs, steps: range, replicas: int, accumulation: int, batch_size: int) -> list[int]:
    """Samples of all replicas, in the order of the step's micro-batches."""
    return [
        sample
        for step in steps
        for replica in range(replicas)
        for micro in range(accumulation)
        for sample in order.samples(step, replica * accumulation + micro, batch_size).tolist()
    ]


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(1, 3)), max_size=4))
def test_any_number_of_replicas_goes_on_where_others_stopped(count: int, parts: list[tuple[int, int, int]]) -> None:
    """Parts of a run: steps, replicas, and micro-batches of each; batches of three samples may span two epochs."""
    position, step, samples = DataPosition(0, 0, 3), 0, list[int]()
    for steps, replicas, accumulation in parts:
        position = position.going_on(step, 3 * replicas * accumulation)
        position = DataPosition.from_dict(json.loads(json.dumps(position.to_dict())), "here")
        order = Epochs(count, 5, position)
        samples += taken(order, range(step, step + steps), replicas, accumulation, 3)
        step += steps
    whole = Epochs(count, 5, DataPosition(0, 0, 3))
    assert samples == taken(whole, range(len(samples) // 3), 1, 1, 3)
    for epoch in range(0, len(samples), count):
        assert max(Counter(samples[epoch : epoch + count]).values()) == 1


@pytest.mark.parametrize(
    "data", [None, {}, {"step": 1, "samples": 2}, {"step": 1, "samples": -2, "step_samples": 3}, [1]]
)
def test_a_checkpoint_that_does_not_say_how_far_it_read_is_refused(data: Any) -> None:
    with pytest.raises(StorageError, match="here: expected how far its run had read the data"):
        DataPosition.from_dict(data, "here")


def written_text(folder: Path, size: int) -> tuple[Path, bytes]:
    text = bytes(random.Random(0).choices(b"abcdefgh", k=size))
    (folder / "text").write_bytes(text)
    return folder / "text", text


def test_every_byte_of_a_text_is_predicted_once_an_epoch(tmp_path: Path) -> None:
    path, text = written_text(tmp_path, 8 * 25 + 3)  # one byte before the first that is predicted, two are left over
    config = DataConfig(sequence_length=8, batch_size=5, source=str(path), sampling="epochs", format="bytes")
    data = TextDataset(config, tmp_path, seed=1).continued(from_the_beginning(config))
    rows = torch.cat([data.batch(step, 0)["tokens"] for step in range(5)])
    starts = sorted(text.index(bytes(row.tolist())) for row in rows)
    assert starts == list(range(0, 200, 8))
    again = torch.cat([data.batch(step, 0)["tokens"] for step in range(5, 10)])
    assert not torch.equal(again, rows)
    assert sorted(map(tuple, again.tolist())) == sorted(map(tuple, rows.tolist()))


def test_held_out_text_and_the_rest_are_samples_of_their_own(tmp_path: Path) -> None:
    path, text = written_text(tmp_path, 4000)
    config = DataConfig(sequence_length=8, batch_size=5, source=str(path), sampling="epochs", format="bytes")
    whole = TextDataset(config, tmp_path, seed=1)
    places: list[set[int]] = []
    for held_out in (False, True):
        side = whole.part(0.25, held_out=held_out)
        count = len(side._sampler.places)
        rows = [row for step in range(count // 5) for row in side.batch(step, 0)["tokens"]]
        starts = [text.index(bytes(row.tolist())) for row in rows]
        assert len({*starts}) == len(starts) == count // 5 * 5
        places.append({at for start in starts for at in range(start, start + 9)})
    assert not places[0] & places[1]


def test_every_row_of_arrays_comes_once_an_epoch(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", number=np.arange(23, dtype=np.int64))
    config = DataConfig(kind="arrays", batch_size=4, source=str(tmp_path / "rows.npz"), sampling="epochs")
    data = ArrayDataset(config, tmp_path, seed=0).continued(from_the_beginning(config, 2))
    read = [row for step in range(3) for micro in range(2) for row in data.batch(step, micro)["number"].tolist()]
    assert sorted(read[:23]) == list(range(23))


def test_what_is_made_up_has_no_epochs() -> None:
    with pytest.raises(ConfigError, match=r"sampling: expected 'random' for data\.kind 'random'"):
        DataConfig(kind="random", inputs={"x": "float32 3"}, batch_size=1, sampling="epochs")
    with pytest.raises(ConfigError, match="sampling: expected one of random, epochs, got 'epoch'"):
        DataConfig(sequence_length=4, batch_size=1, sampling="epoch")  # type: ignore[arg-type]


def configured(root: Path, *settings: str) -> Any:
    return load_run(write_run(root), ["data.sampling=epochs", "optimization.steps=6", "memory.budget=100%", *settings])


@pytest.mark.long
def test_a_run_goes_on_in_its_epoch_with_steps_of_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 499 sequences of 32 bytes: three steps of 120 and two of 60 take each at most once."""
    taken: list[int] = []
    choose = Sampler.chosen

    def watched(self: Sampler, step: int, micro: int) -> list[int]:
        taken.extend(places := choose(self, step, micro))
        return places

    monkeypatch.setattr(Sampler, "chosen", watched)
    run = configured(tmp_path, "optimization.steps=3", "data.batch_size=30", "optimization.accumulation=4")
    train_run(run)
    meta = open_checkpoint(latest_checkpoint(Path(run.out) / "checkpoints") or Path()).meta
    assert meta["data.position"] == {"step": 0, "samples": 0, "step_samples": 120}
    changed = dataclasses.replace(run.optimization, steps=5, accumulation=2)
    train_run(dataclasses.replace(run, optimization=changed), resume=True)
    assert len(taken) == len({*taken}) == 3 * 120 + 2 * 60
    meta = open_checkpoint(latest_checkpoint(Path(run.out) / "checkpoints") or Path()).meta
    assert meta["data.position"] == {"step": 3, "samples": 360, "step_samples": 60}


def test_plain_pytorch_reads_the_same_epochs(tmp_path: Path) -> None:
    run = configured(tmp_path, "optimization.accumulation=2")
    assert train_run(run).losses == train_plain(run, tmp_path).losses


@pytest.mark.slow
def test_two_ranks_go_on_in_the_epoch_of_one(tmp_path: Path) -> None:
    """With as many micro-batches a step the order is the same, so the losses are those of one process to the bit."""
    path = written(tmp_path)
    asked = ("data.sampling=epochs", "optimization.micro_batches=2", "optimization.accumulation=1", "checkpoint.keep=9")
    whole = run_alone(path, *asked)
    shutil.copytree(tmp_path / "alone", tmp_path / "ranks")
    shutil.rmtree(tmp_path / "ranks/checkpoints/step-00000004")
    shutil.rmtree(tmp_path / "ranks/best")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lading"]
    command += ["train", str(path), "--no-cache", *ASKED, *asked, f"out={tmp_path}/ranks", "--resume"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert numbers(records(tmp_path / "ranks")) == numbers(whole)
    assert plan_run(load_run(path, [*ASKED, *asked])).run.data.sampling == "epochs"
