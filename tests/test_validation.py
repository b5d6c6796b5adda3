"""Runs with validation data: what is held out, the losses, and the best checkpoint."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lading.checkpoint.store import latest_checkpoint, open_checkpoint
from lading.cli.main import main
from lading.config import STDLIB, DataConfig, RunConfig, ValidationConfig, load_run, run_from_dict, run_to_dict
from lading.errors import ConfigError
from lading.report.metrics import read_metrics
from lading.run import build, dataset_of, loss_of
from lading.runtime.arrays import ArrayDataset
from lading.runtime.data import TextDataset, split_spans
from lading.tracing.initial import defer
from lading.train import train_plain, train_run
from lading.trainer import Trainer
from tests.runs import write_run

PLAIN = ("model.sizes={dim=64, num_layers=1, num_heads=2}", "optimization.steps=6", "optimization.warmup_steps=1",
         "memory.policy=keep-all", "memory.budget=100%")  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


def covered(spans: np.ndarray) -> np.ndarray:
    return np.concatenate([np.arange(start, start + length) for start, length in spans])


@pytest.mark.parametrize(("count", "share", "most"), [(1, 0.5, 64), (10, 0.3, 10), (1000, 0.07, 64), (999, 0.9, 999)])
def test_the_two_sides_of_a_split_are_all_of_it_and_share_nothing(count: int, share: float, most: int) -> None:
    sides = [split_spans(count, share, held_out=held_out, most_pieces=most) for held_out in (True, False)]
    held_out, rest = map(covered, sides)
    assert sorted([*held_out, *rest]) == list(range(count))
    assert len(sides[0]) <= most
    assert len(held_out) == pytest.approx(count * share, abs=len(sides[0]))
    assert np.array_equal(sides[0], split_spans(count, share, held_out=True, most_pieces=most))


def test_training_never_reads_text_that_is_held_out(tmp_path: Path) -> None:
    """Tokens are bytes of the standard library; places are looked at, as short pieces of code occur in many files."""
    data = TextDataset(DataConfig(source=STDLIB, sequence_length=64, batch_size=512), tmp_path, seed=0)
    read: list[tuple[int, int]] = []
    store = data._store

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def read(self, spans: Any) -> list[np.ndarray]:
            asked = list(spans)
            read.extend(asked)
            return store.read(asked)

    data._store = Recorder()  # pyright: ignore[reportAttributeAccessIssue]
    share, bitmaps = 0.05, list[np.ndarray]()
    for held_out in (False, True):
        part = data.part(share, held_out=held_out)
        read.clear()
        first = [part.batch(step, 0)["tokens"] for step in range(40)]
        bitmap = np.zeros(len(data), dtype=bool)
        for start, length in read:
            bitmap[start : start + length] = True
        bitmaps.append(bitmap)
        again = TextDataset(data.config, tmp_path, seed=0).part(share, held_out=held_out)
        assert torch.equal(first[7], again.batch(7, 0)["tokens"])
    assert not (bitmaps[0] & bitmaps[1]).any()
    pieces = split_spans(len(data), share, held_out=True, most_pieces=min(64, int(len(data) * share) >> 16))
    assert len(pieces) > 4  # spread over the text
    assert bitmaps[1].sum() > 0.5 * pieces[:, 1].sum()
    assert set(np.flatnonzero(bitmaps[1])) <= set(covered(pieces))


def test_rows_and_labelled_texts_are_held_out_one_by_one(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", x=np.arange(50, dtype=np.int64)[:, None])
    arrays = ArrayDataset(
        DataConfig(kind="arrays", source=str(tmp_path / "rows.npz"), batch_size=400), tmp_path / "run", seed=1
    )
    sides = [set(arrays.part(0.2, held_out=side).batch(0, 0)["x"].flatten().tolist()) for side in (True, False)]
    assert [len(side) for side in sides] == [10, 40]
    assert not sides[0] & sides[1]
    lines = "".join(f'{{"text": "{chr(65 + i)}", "label": {i % 2}}}\n' for i in range(20))
    (tmp_path / "texts.jsonl").write_text(lines)
    config = DataConfig(source=str(tmp_path / "texts.jsonl"), sequence_length=4, batch_size=200)
    texts = TextDataset(config, tmp_path / "run", seed=1, task="classification")
    sides = [set(texts.part(0.25, held_out=side).batch(0, 0)["tokens"][:, 0].tolist()) for side in (True, False)]
    assert [len(side) for side in sides] == [5, 15]
    assert not sides[0] & sides[1]


def run_of(tmp_path: Path, *overrides: str) -> RunConfig:
    path = tmp_path / "run.toml"
    if not path.exists():
        write_run(tmp_path)
        (tmp_path / "other.txt").write_text("a text of its own that nobody trains on\n" * 200)
    return load_run(path, [*PLAIN, *overrides])


def records(out: Path) -> list[dict[str, Any]]:
    return read_metrics(out / "metrics.jsonl")


def test_validation_leaves_training_as_it_is_and_keeps_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = f'validation={{source="{tmp_path}/other.txt", every_steps=2, batches=2}}'
    without = train_run(run_of(tmp_path, f"out={tmp_path}/without"))
    result = train_run(run_of(tmp_path, f"out={tmp_path}/with", own))
    assert result.losses == without.losses
    assert result.peak_bytes <= result.budget_bytes
    losses = dict(result.validation_losses)
    assert list(losses) == [2, 4, 6]
    assert [r["step"] for r in records(tmp_path / "with") if "validation_loss" in r] == [1, 3, 5]
    lowest = min(losses, key=lambda step: losses[step])
    assert result.best_checkpoint == f"{tmp_path}/with/best/step-{lowest:08d}"
    best = open_checkpoint(Path(result.best_checkpoint))
    best.verify()
    assert best.meta["validation"]["loss"] == losses[lowest]
    assert f"lowest {losses[lowest]:.4f} after step {lowest}, kept in {result.best_checkpoint}" in str(result)
    assert "Validation loss" in (tmp_path / "with/report.html").read_text()
    told = capsys.readouterr().err
    assert f"validation after step 2: loss {losses[2]:.4f}, the lowest so far; kept in" in told


@pytest.mark.long
def test_a_model_with_dropout_is_evaluated_without(tmp_path: Path) -> None:
    """The loss is that of plain PyTorch in eval mode, and training draws the random numbers that it drew."""
    share = f'validation={{source="{tmp_path}/other.txt", every_steps=3, batches=2}}'
    dropout = ("model.sizes.dropout=0.5", "optimization.accumulation=2", "memory.policy=residency", "memory.budget=99%")
    run = run_of(tmp_path, *dropout, f"out={tmp_path}/with", share)
    result = train_run(run, cache=True)
    assert result.losses == train_plain(run, tmp_path / "with").losses
    best = open_checkpoint(Path(result.best_checkpoint))
    model = build(run.model).eval()
    model.load_state_dict({name: best.read(name) for name in best.tensors if name in model.state_dict()}, strict=False)
    data = dataset_of(run, model, held_out=True)
    with torch.no_grad():
        plain = [float(loss_of(run.model)(model, data.batch(0, number))) for number in range(4)]
    assert sum(plain) / 4 == pytest.approx(dict(result.validation_losses)[best.step], rel=1e-6)
    assert result.peak_bytes <= result.budget_bytes


@pytest.mark.long
def test_a_run_that_goes_on_knows_what_was_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter([5.0, 1.0, 4.0, 3.0])
    monkeypatch.setattr(Trainer, "evaluate", lambda *_: next(given))
    once = f'validation={{source="{tmp_path}/other.txt", every_steps=1, batches=1}}'
    out = f"out={tmp_path}/stopped"
    train_run(run_of(tmp_path, out, once, "optimization.steps=2", "optimization.schedule=constant"))
    more = ("optimization.steps=4", "optimization.schedule=constant", "checkpoint.every_steps=1")
    result = train_run(run_of(tmp_path, out, once, *more), resume=True)
    assert result.best_checkpoint == f"{tmp_path}/stopped/best/step-00000002"
    assert [p.name for p in sorted((tmp_path / "stopped/checkpoints").iterdir())] == ["step-00000003", "step-00000004"]
    assert "validation after step 3: loss 4.0000; the lowest is 1.0000, after step 2" in capsys.readouterr().err
    assert main(["export", f"{tmp_path}/stopped", "--to", f"{tmp_path}/exported", "--best"]) == 0
    exported = load_file(tmp_path / "exported/model.safetensors")["transformer.ln_f.weight"]
    for checkpoint in (Path(result.best_checkpoint), tmp_path / "stopped/checkpoints/step-00000004"):
        is_best = torch.equal(exported, open_checkpoint(checkpoint).read("norm.weight"))
        assert is_best == (checkpoint.parent.name == "best")
    # Another measure is another loss: what was best by the old one no longer counts.
    given = iter([2.0, 2.0])
    monkeypatch.setattr(Trainer, "evaluate", lambda *_: next(given))
    changed = run_of(tmp_path, out, once.replace("batches=1", "batches=2"), *more, "optimization.steps=5")
    assert train_run(changed, resume=True).best_checkpoint == f"{tmp_path}/stopped/best/step-00000005"
    assert "validation is not as it was for" in capsys.readouterr().out


def test_a_share_is_held_out_of_plain_runs_too_and_stays(tmp_path: Path) -> None:
    share = "validation={share=0.25, every_steps=4, keep_best=false}"
    run = run_of(tmp_path, f"out={tmp_path}/out", share)
    result = train_run(run)
    assert result.losses == train_plain(run, tmp_path / "out").losses
    assert list(dict(result.validation_losses)) == [4, 6]
    assert not (tmp_path / "out/best").exists()
    assert result.best_checkpoint == ""
    with pytest.raises(ConfigError, match=r"validation.share \(was 0.25, is None\)"):
        train_run(run_of(tmp_path, f"out={tmp_path}/out", "optimization.steps=8"), resume=True)


def test_a_run_goes_on_from_the_best_where_that_is_the_newest(tmp_path: Path) -> None:
    own = f'validation={{source="{tmp_path}/other.txt", every_steps=1, batches=1}}'
    run = run_of(tmp_path, f"out={tmp_path}/out", own, "checkpoint={at_end=false}", "optimization.schedule=constant")
    whole = train_run(run)
    shutil.rmtree(tmp_path / "out/checkpoints", ignore_errors=True)
    newest = latest_checkpoint(tmp_path / "out/best")
    assert newest is not None
    done = open_checkpoint(newest).step
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run"):
        train_run(run)
    longer = dataclasses.replace(run, optimization=dataclasses.replace(run.optimization, steps=8))
    result = train_run(longer, resume=True)
    assert len(result.losses) == 8 - done
    assert [r["loss"] for r in records(tmp_path / "out")][:6] == list(whole.losses)


def test_what_is_refused(tmp_path: Path) -> None:
    def refused(*overrides: str) -> str:
        try:
            run = run_of(tmp_path, f"out={tmp_path}/out", *overrides)
            dataset_of(run, defer(lambda: build(run.model)).model, held_out=True)
        except ConfigError as error:
            return str(error)
        return "nothing was refused"

    assert "validation.share: expected a number >= 0 and < 1, got 1.5" in refused("validation.share=1.5")
    assert "expected a share of the data above 0, or a source of its own, got neither" in refused("validation={}")
    assert "got both, 0.1 and 'x'; set one of them" in refused("validation={share=0.1, source='x'}")
    assert "unknown key 'validation.every'; did you mean" in refused("validation.every=3")
    assert "validation.source: expected 'stdlib', a folder" in refused("validation.source=nowhere")
    assert "found" in (said := refused(f"validation.source={tmp_path}/text/a.txt"))
    assert "validation.source: expected files that are not trained on" in said
    assert "expected enough of the data on both sides, got 0.001 of" in refused("validation.share=0.001")
    random = "data={kind='random', inputs={x='float32 3'}, batch_size=2}"
    assert "validation: expected data in files" in refused(random, "validation.share=0.1")


def test_settings_of_validation_survive_a_saved_plan(tmp_path: Path) -> None:
    run = run_of(tmp_path, "validation.share=0.1")
    assert run.validation == ValidationConfig(share=0.1)
    assert run_from_dict(run_to_dict(run)) == run
    assert run_from_dict({k: v for k, v in run_to_dict(run).items() if k != "validation"}).validation is None
