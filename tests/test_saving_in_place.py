"""Checkpoints in place: values stay in the swap file, and a kill at any instant leaves one that is whole."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lading.checkpoint.manifest import MANIFEST, manifest_bytes
from lading.checkpoint.store import STATE, add_checksums, checkpoint_folders, latest_checkpoint, open_checkpoint
from lading.checkpoint.swapped import SWAP
from lading.errors import ConfigError, DamagedCheckpoint, StorageError
from lading.ir.graph import StepGraph
from lading.ir.program import PAGE_BYTES
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.prepare import plan
from lading.runtime.host_arena import Arena
from lading.runtime.tiers import FileTier
from lading.tracing.trace import capture
from lading.trainer import Trainer
from lading.units import KiB, MiB
from tests.machines import small_machine

SIZES: dict[str, Any] = {"dim": 64, "num_layers": 2, "num_heads": 2, "dropout": 0.1}
STEPS = 8
#: Norm that gradients of some steps of the wide model are above.
WIDE_CLIP = 0.097


pytestmark = pytest.mark.usefixtures("one_thread")


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model("gpt", **SIZES)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(step))}


@cache
def graph_of() -> StepGraph:
    return capture(model_of(), batch_of(0), next_byte_loss)


def trainer_of(folder: Path, budget: str = "60%", **settings: Any) -> Trainer:
    made = plan(graph_of(), small_machine(), budget=budget, **settings)
    return Trainer(made, graph_of(), model_of(), folder=folder, threads=1)


def wide_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(1024, 2048, bias=False), torch.nn.GELU(), torch.nn.Linear(2048, 1024, bias=False)
    return torch.nn.Sequential(*layers)


def wide_batch(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, 1024, generator=torch.Generator().manual_seed(step))}


def mean_square(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).square().mean()


@cache
def wide_graph() -> StepGraph:
    """Step whose states are in pieces of 4 MiB, of some of which the budget of a half keeps one in memory."""
    return capture(wide_model(), wide_batch(0), mean_square)


def wide_trainer(folder: Path, budget: str = "50%", **settings: Any) -> Trainer:
    made = plan(wide_graph(), small_machine(), budget=budget, **settings)
    return Trainer(made, wide_graph(), wide_model(), folder=folder, threads=1)


def guessing_trainer(folder: Path) -> Trainer:
    """In pieces too, with updates on a guess that is wrong in some steps."""
    return wide_trainer(folder, clip_norm=WIDE_CLIP, clipped=0.0)


def contents(path: Path) -> dict[str, bytes]:
    checkpoint = open_checkpoint(path)
    return {name: b"".join(map(bytes, checkpoint.chunks(name))) for name in checkpoint.tensors}


@pytest.mark.parametrize("clipped", [None, pytest.param(0.1, marks=pytest.mark.long)])
def test_a_checkpoint_in_place_is_that_of_its_step_to_the_bit(tmp_path: Path, clipped: float | None) -> None:
    """Also with updates on a guess, whose values have two places already."""
    guess: dict[str, Any] = {} if clipped is None else {"clip_norm": 1.0, "clipped": clipped}
    kept = copied = tmp_path
    with trainer_of(tmp_path, **guess) as trainer:
        losses = list[float]()
        for step in range(STEPS):
            losses.append(trainer.step(batch_of(step)))
            if step in (1, 2, 4):
                copied = trainer.save(tmp_path / "copied")
                kept = trainer.save(tmp_path / "saved", in_place=True)
                trainer.wait_saved()
        assert open_checkpoint(kept).unchecked() == 0
        assert contents(kept) == contents(copied)
        assert [path.name for path in (tmp_path / "saved").iterdir() if path.is_dir()] == ["step-00000005"]
        in_memory, all_of_it = (kept / STATE).stat().st_size, (copied / STATE).stat().st_size
        assert in_memory < all_of_it // 2, "most of the state is on the disk and was not written again"
    assert list(open_checkpoint(kept).damages()) == []  # the run and its swap file are gone
    with trainer_of(tmp_path, "1GB", **guess) as trainer:  # by another plan
        trainer.load(kept)
        assert [trainer.step(batch_of(step)) for step in range(5, STEPS)] == losses[5:]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[float]]:
    """Checkpoint in place behind three steps, a copy of it, and the losses of five steps."""
    folder = tmp_path_factory.mktemp("pieces")
    with wide_trainer(folder) as trainer:
        losses = [trainer.step(wide_batch(step)) for step in range(3)]
        copied = trainer.save(folder / "copied")
        kept = trainer.save(folder / "saved", in_place=True)
        trainer.wait_saved()
        losses += [trainer.step(wide_batch(step)) for step in range(3, 5)]
    return kept, copied, losses


@pytest.mark.long
def test_of_a_value_in_pieces_those_in_memory_are_copied_alone(
    tmp_path: Path, pieces: tuple[Path, Path, list[float]]
) -> None:
    kept, copied, losses = pieces
    checkpoint = open_checkpoint(kept)
    assert checkpoint.swap is not None
    there = [checkpoint.swap.parts[number] for number in checkpoint.swap.in_state]
    assert len(there) >= 2
    assert all(size == 4 * MiB for _, size in there)
    whole = {
        entry.name: entry.size_bytes for entry in checkpoint.tensors.values() if entry.start < checkpoint.state_bytes
    }
    assert not whole.keys() & {"0.weight.exp_avg", "0.weight.exp_avg_sq"}, sorted(whole)
    assert checkpoint.state_bytes < sum(whole.values()) + sum(size for _, size in there) + 64 * KiB
    assert contents(kept) == contents(copied)
    assert list(checkpoint.damages()) == []
    assert checkpoint.unchecked() == 0
    with wide_trainer(tmp_path, "100%") as trainer:
        trainer.load(kept)
        assert [trainer.step(wide_batch(step)) for step in range(3, 5)] == losses[3:]


@pytest.mark.long
def test_an_altered_byte_of_a_piece_in_memory_is_named_in_its_file(
    tmp_path: Path, pieces: tuple[Path, Path, list[float]]
) -> None:
    path = tmp_path / pieces[0].name
    shutil.copytree(pieces[0], path)
    checkpoint = open_checkpoint(path)
    assert checkpoint.swap is not None
    number = checkpoint.swap.in_state[-1]
    for name, part in ((STATE, number), (SWAP, next(n for n in range(number) if n not in checkpoint.swap.in_state))):
        with open(path / name, "r+b") as file:
            file.seek(at := checkpoint.swap.parts[part][0] + 7)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))
    words = sorted(checkpoint.damages())
    assert [str(path / name) in each for name, each in zip((STATE, SWAP), words, strict=True)] == [True, True]


def test_checkpoints_in_place_of_before_pieces_are_read(tmp_path: Path) -> None:
    """Format 3 is a manifest that names no parts in the state file."""
    with trainer_of(tmp_path) as trainer:
        trainer.step(batch_of(0))
        saved = trainer.save(tmp_path / "saved", in_place=True)
        trainer.wait_saved()
    before, manifest = contents(saved), saved / MANIFEST
    body = json.loads(manifest.read_bytes())["body"]
    swap = body.pop("swap")
    assert swap.pop("in_state") == []
    text = manifest_bytes({**body, "swap": swap}, in_place=True)
    manifest.write_bytes(text.replace(b'"format": 4', b'"format": 3', 1))
    assert contents(saved) == before
    for wrong in ([0, 0], [len(swap["parts"])], [-1]):
        manifest.write_bytes(manifest_bytes({**body, "swap": {**swap, "in_state": wrong}}, in_place=True))
        with pytest.raises(StorageError, match="expected parts inside their files"):
            open_checkpoint(saved)


def test_bytes_stay_where_they_were_kept(tmp_path: Path) -> None:
    pages = 6
    tier, arena = FileTier(tmp_path, pages * PAGE_BYTES), Arena(pages * PAGE_BYTES)
    whole = arena.bytes_at(0, pages * PAGE_BYTES)

    def read() -> list[int]:
        tier.read(0, whole)
        return whole[::PAGE_BYTES].tolist()

    def write(first: int, count: int, number: int) -> None:
        tier.writing(first * PAGE_BYTES, whole[: count * PAGE_BYTES].fill_(number))()

    write(0, pages, 1)
    tier.reserve_second()
    write(1, 1, 2)
    tier.keep()
    kept = tier.runs(0, pages * PAGE_BYTES)
    write(0, 3, 3)
    write(2, 2, 4)
    assert read() == [3, 3, 4, 4, 1, 1]
    tier.link(tmp_path / "named")
    bytes_ = (tmp_path / "named").read_bytes()
    assert [bytes_[at] for start, size in kept for at in range(start, start + size, PAGE_BYTES)] == [1, 2, 1, 1, 1, 1]
    tier.keep()
    kept = tier.runs(0, pages * PAGE_BYTES)
    write(3, 3, 5)
    part = arena.bytes_at(0, 3 * PAGE_BYTES)
    tier.reading(2 * PAGE_BYTES, part)()  # what lies in both places
    assert part[::PAGE_BYTES].tolist() == [4, 5, 5]
    bytes_ = (tmp_path / "named").read_bytes()
    assert [bytes_[at] for start, size in kept for at in range(start, start + size, PAGE_BYTES)] == [3, 3, 4, 4, 1, 1]
    tier.close()


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trainer_of(tmp_path) as trainer:
        trainer.step(batch_of(0))
        first = trainer.save(tmp_path / "saved", in_place=True)
        trainer.wait_saved()
        before = contents(first)

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        trainer.step(batch_of(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", full)
            with pytest.raises(StorageError, match="the disk is full"):
                trainer.save(tmp_path / "saved", in_place=True)
        for step in range(2, 5):
            trainer.step(batch_of(step))
        assert contents(first) == before
        trainer.save(tmp_path / "saved", in_place=True)
        assert not first.exists()


def test_a_save_that_fails_behind_its_commit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint stands by its name, so no step may write over its bytes."""
    with trainer_of(tmp_path) as trainer:
        for step in range(2):
            trainer.step(batch_of(step))
            with monkeypatch.context() as patch:
                if step:
                    patch.setattr("lading.checkpoint.store._remove_earlier", failing)
                    with pytest.raises(StorageError, match="cannot save"):
                        trainer.save(tmp_path / "saved", in_place=True)
                else:
                    trainer.save(tmp_path / "saved", in_place=True)
        newest = latest_checkpoint(tmp_path / "saved")
        assert newest is not None
        assert newest.name == "step-00000002"
        copied = trainer.save(tmp_path / "copied")
        for step in range(2, 5):
            trainer.step(batch_of(step))
        trainer.wait_saved()
        assert contents(newest) == contents(copied)


def test_a_disk_that_gives_back_nothing_is_told_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lading.saving_in_place.add_checksums", failing)
    with trainer_of(tmp_path) as trainer:
        trainer.step(batch_of(0))
        trainer.save(tmp_path / "saved", in_place=True)
        monkeypatch.undo()
        with pytest.raises(StorageError, match=r"cannot make the checksums .* Input/output error"):
            trainer.save(tmp_path / "saved", in_place=True)
        trainer.save(tmp_path / "saved", in_place=True)


def failing(*_: object) -> None:
    raise OSError(5, "Input/output error")


def test_copies_between_them_leave_the_file_its_name(tmp_path: Path) -> None:
    """A file without a name is given no other, so the newest in place stays beside those that are kept."""
    with warnings.catch_warnings(), trainer_of(tmp_path) as trainer:
        warnings.simplefilter("error")
        for step in range(6):
            trainer.step(batch_of(step))
            path = trainer.save(tmp_path / "saved", in_place=step % 3 == 0, keep=1)
            assert (path / SWAP).exists() == (step % 3 == 0)
    names = sorted(path.name for path in (tmp_path / "saved").iterdir() if path.is_dir())
    assert names == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize("name", [SWAP, STATE])
def test_altered_and_missing_bytes_are_named(tmp_path: Path, name: str) -> None:
    with trainer_of(tmp_path) as trainer:
        trainer.step(batch_of(0))
        path = trainer.save(tmp_path / "saved", in_place=True)
        trainer.wait_saved()
    checkpoint = open_checkpoint(path)
    assert checkpoint.swap is not None
    at = checkpoint.swap.parts[-1][0] + 5 if name == SWAP else checkpoint.state_bytes - 5
    with open(path / name, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    [words] = checkpoint.damages()
    assert f"{path / name}" in words
    assert f"to be 0x{byte:02x}, found 0x{byte ^ 1:02x}" in words
    with warnings.catch_warnings(), trainer_of(tmp_path) as trainer:
        warnings.filterwarnings("ignore", ".*failed half-way")
        with pytest.raises(DamagedCheckpoint, match=name):
            trainer.load(path)
    os.truncate(path / name, 4096)
    with pytest.raises(StorageError, match=f"{name}: expected .* bytes, found 4096"):
        open_checkpoint(path)
    (path / name).unlink()
    with pytest.raises(StorageError, match=f"{name}: expected a file"):
        open_checkpoint(path)


def test_where_it_cannot_be(tmp_path: Path) -> None:
    with trainer_of(tmp_path, "1GB") as trainer:
        trainer.step(batch_of(0))
        with pytest.raises(ConfigError, match="expected a plan that keeps values on a disk"):
            trainer.check_in_place(tmp_path / "saved")
    with trainer_of(tmp_path) as trainer:
        trainer.step(batch_of(0))
        with pytest.raises(ConfigError, match="on one file system, found two"):
            trainer.check_in_place("/proc/saved")
        trainer.check_in_place(tmp_path / "saved")


def test_without_its_last_name_the_file_is_copied(tmp_path: Path) -> None:
    with trainer_of(tmp_path) as trainer:
        trainer.step(batch_of(0))
        first = trainer.save(tmp_path / "saved", in_place=True)
        trainer.wait_saved()
        for each in first.iterdir():
            each.unlink()
        first.rmdir()
        trainer.step(batch_of(1))
        with pytest.warns(UserWarning, match="checkpoints are copied, .* was deleted"):
            path = trainer.save(tmp_path / "saved", in_place=True)
        assert not (path / SWAP).exists()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.save(tmp_path / "saved", in_place=True)  # said once


def test_checksums_are_made_for_the_checkpoint_of_a_killed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lading.saving_in_place.add_checksums", lambda *_: None)
    with trainer_of(tmp_path) as trainer:
        trainer.step(batch_of(0))
        path = trainer.save(tmp_path / "saved", in_place=True)
    assert open_checkpoint(path).unchecked() > 0
    before = contents(path)
    add_checksums(path, lambda: True)
    assert open_checkpoint(path).unchecked() > 0
    add_checksums(path, lambda: False)
    assert open_checkpoint(path).unchecked() == 0
    assert contents(path) == before


#: Trainer of a run that is killed, and its batches, by name.
RUNS = {"gpt": (trainer_of, batch_of), "pieces": (wide_trainer, wide_batch), "guess": (guessing_trainer, wide_batch)}


def _file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def train(kind: str, folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    make, batch = RUNS[kind]
    with make(folder / "swap") as trainer, open(folder / "losses", "a") as losses:
        if (newest := latest_checkpoint(folder / "saved")) is not None:
            trainer.load(newest)
        while trainer.steps < steps:
            step = trainer.steps
            losses.write(f"{step} {trainer.step(batch(step))!r}\n")
            losses.flush()
            trainer.save(folder / "saved", in_place=True)


@pytest.mark.long
@pytest.mark.parametrize("kind", RUNS)
def test_a_kill_at_any_instant_leaves_a_checkpoint(tmp_path: Path, kind: str) -> None:
    make, batch = RUNS[kind]
    steps, instants, context = 12, random.Random(0), multiprocessing.get_context("fork")
    for name in ("swap", "saved"):
        (tmp_path / name).mkdir()
    with make(tmp_path) as trainer:
        expected = [trainer.step(batch(step)) for step in range(steps)]
        assert (trainer.speculation is not None) == (kind == "guess")
        assert trainer.speculation is None or 0 < trainer.speculation.again < steps
    kills = saved = 0
    longest_s = 0.05
    for _ in range(60):
        process = context.Process(target=train, args=(kind, tmp_path, steps))
        process.start()
        lines = len((tmp_path / "losses").read_text().splitlines()) if (tmp_path / "losses").exists() else 0
        deadline = time.monotonic() + 60
        while process.is_alive() and time.monotonic() < deadline:
            said = (tmp_path / "losses").read_text().splitlines() if (tmp_path / "losses").exists() else []
            if len(said) > lines:
                break
            time.sleep(0.001)
        time.sleep(instants.random() * longest_s)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        newest = latest_checkpoint(tmp_path / "saved")
        before, saved = saved, 0 if newest is None else open_checkpoint(newest).step
        longest_s = min(2.0, longest_s * (1.0 if saved > before else 1.2))  # a slow disk takes longer to save
        if newest is not None:
            assert list(open_checkpoint(newest).damages()) == []
            if saved == steps:
                break
    assert kills >= 5
    for line in (tmp_path / "losses").read_text().splitlines():
        step, loss = line.split()
        assert float(loss) == expected[int(step)]
    assert len(list((tmp_path / "swap").iterdir())) <= 1  # the lock
    checkpoints = checkpoint_folders(tmp_path / "saved")
    assert len(checkpoints) <= 3, "two are kept, and a kill may come before the third is deleted"
    largest = max(_file_bytes(path) for path in checkpoints)
    assert _file_bytes(tmp_path / "saved") <= 4 * largest, "and one that was being written"
