"""Figures that leave the run: TensorBoard events read back, and what W&B is called with."""

from __future__ import annotations

import json
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
from tests.runs import write_run

from lading.config import LoggingConfig, load_run
from lading.errors import ConfigError
from lading.report.metrics import read_metrics
from lading.runtime import loggers
from lading.runtime.loggers import check_logging, open_loggers
from lading.train import train_run


def test_nothing_is_logged_unasked(tmp_path: Path) -> None:
    assert open_loggers(LoggingConfig(), tmp_path, first_step=0, settings={}) == []
    assert not list(tmp_path.iterdir())


def test_what_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda _: None)
    check_logging(LoggingConfig())
    with pytest.raises(ConfigError, match=r"logging\.tensorboard needs tensorboard: pip install"):
        check_logging(LoggingConfig(tensorboard=True))
    with pytest.raises(ConfigError, match=r"logging\.wandb needs wandb: pip install"):
        check_logging(LoggingConfig(wandb="project"))


def events(folder: Path) -> dict[int, float]:
    """Step -> loss, as TensorBoard shows them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(folder))
        read.Reload()
    return {event.step: event.value for event in read.Scalars("loss")}


def test_a_run_is_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    settings = ["optimization.steps=7", "logging.tensorboard=true", "logging.every_steps=3", "memory.budget=100%"]
    run = load_run(write_run(tmp_path), settings)
    train_run(run)
    metrics = {r["step"]: r["loss"] for r in read_metrics(Path(run.out) / "metrics.jsonl")}
    assert len(metrics) == 7
    assert events(Path(run.out) / "tensorboard") == pytest.approx({step: metrics[step] for step in (0, 3, 6)}, rel=1e-6)


def test_a_resumed_run_replaces_what_it_does_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for first, offset in ((0, 1.0), (3, 10.0)):
        (logger,) = open_loggers(LoggingConfig(tensorboard=True), tmp_path, first_step=first, settings={})
        for step in range(first, 5):
            logger.log(step, {"loss": step + offset})
        logger.close()
    assert events(tmp_path / "tensorboard") == {0: 1.0, 1: 2.0, 2: 3.0, 3: 13.0, 4: 14.0}


def test_a_folder_is_one_run_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Run:
        def log(self, figures: dict[str, float], step: int) -> None:
            calls.append((step, figures))

        def finish(self) -> None:
            calls.append("finish")

    module = types.ModuleType("wandb")
    module.init = lambda **how: calls.append(how) or Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(loggers, "find_spec", lambda _: object())
    for _ in range(2):
        (logger,) = open_loggers(LoggingConfig(wandb="cargo"), tmp_path, first_step=0, settings={"seed": 1})
        logger.log(4, {"loss": 0.5})
        logger.close()
    first, logged, finished, second = calls[:4]
    assert (first["project"], first["resume"], first["config"]) == ("cargo", "allow", {"seed": 1})
    assert first["id"] == second["id"]
    assert first["dir"] == str(tmp_path)
    assert (logged, finished) == ((4, {"loss": 0.5}), "finish")


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (logger,) = open_loggers(LoggingConfig(wandb="cargo"), tmp_path, first_step=0, settings=json.loads("{}"))
        logger.log(0, {"loss": 0.5})
        logger.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
