"""All that training depends on goes on from a checkpoint: a resumed run has the losses of one that was not cut."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from lading.checkpoint.store import open_checkpoint
from lading.config import RunConfig, load_run, run_to_dict
from lading.prepare import plan_run
from lading.report.metrics import read_metrics
from lading.train import train_run
from tests.runs import write_run

STEPS, CUT = 6, 3
#: Micro-batches whose masks of dropout are drawn one after another, clipped, on a rate that rises and then falls.
USUAL = ("optimization.accumulation=3", "optimization.warmup_steps=4", "optimization.schedule=cosine")
#: What else a run's state may consist of, by what it is.
OTHERS = {
    "masters": ("optimization.precision=bf16",),
    "matrices": ("optimization.matrices={rule='muon', lr=0.02}",),
    "momentum": ("optimization.optimizer={rule='sgd', lr=0.1, momentum=0.9}",),
    "no replacement": ("data.sampling=epochs", "data.batch_size=30"),
    "frozen": ("freeze={layers=['tokens positions', 'layers.0'], every_steps=2, schedule=[0, 1, 2]}",),
    "validation": ("validation={share=0.25, every_steps=2, batches=2}",),
    "less memory": ("memory.policy=residency", "memory.budget=99%"),
}


def figures(out: Path) -> list[tuple[int, float, float, float | None, int | None]]:
    keys = ("step", "loss", "lr", "validation_loss", "frozen")
    return [tuple(record.get(key) for key in keys) for record in read_metrics(out / "metrics.jsonl")]  # type: ignore[misc]


def cut(run: RunConfig, root: Path) -> Path:
    """Copy a run's folder as it would be had it been killed after the checkpoint of step ``CUT``."""
    shutil.copytree(run.out, root / "resumed")
    for name in ("checkpoints", "best"):
        for path in (root / "resumed" / name).glob("step-*"):
            if int(path.name.removeprefix("step-")) > CUT:
                shutil.rmtree(path)
    return root / "resumed"


def check(root: Path, *settings: str) -> None:
    common = [f"optimization.steps={STEPS}", f"checkpoint={{every_steps={CUT}, keep=9}}", "memory.policy=keep-all"]
    run = load_run(write_run(root), [*common, "memory.budget=100%", *USUAL, *settings])
    threads = torch.get_num_threads()
    made = plan_run(run).plan
    train_run(made)
    out = cut(run, root)
    train_run(made.of_run(run_to_dict(dataclasses.replace(run, out=str(out)))), resume=True)
    torch.set_num_threads(threads)
    whole = Path(run.out)
    assert figures(out) == figures(whole)
    assert [row[0] for row in figures(out)] == list(range(STEPS))
    one, other = (open_checkpoint(folder / "checkpoints" / f"step-{STEPS:08d}") for folder in (whole, out))
    assert one.tensors.keys() == other.tensors.keys()
    assert [name for name in one.tensors if not torch.equal(one.read(name), other.read(name))] == []
    assert (out / "plan.json").read_text() == (whole / "plan.json").read_text().replace(str(whole), str(out))


def test_micro_batches_dropout_and_the_schedule_go_on(tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_each_kind_of_state_goes_on(name: str, tmp_path: Path) -> None:
    check(tmp_path, *OTHERS[name])
