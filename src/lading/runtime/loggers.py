"""Loggers: figures of a run to TensorBoard and Weights & Biases, where they are installed and asked for.

metrics.jsonl is the record of a run; what is written here is a copy for people, and a run never reads it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from lading.config import LoggingConfig
from lading.errors import ConfigError
from lading.files import cannot_write

#: Modules that have TensorBoard's SummaryWriter, the first that is installed is used.
_WRITERS = {"tensorboard": "torch.utils.tensorboard", "tensorboardX": "tensorboardX"}


class Logger(Protocol):
    """Receiver of the figures of a run."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add the figures of a step, by name."""
        ...

    def close(self) -> None:
        """Write the records that are left and close the log."""
        ...


def check_logging(config: LoggingConfig) -> None:
    """Refuse to log to what is not installed, before anything is done.

    Raises:
        ConfigError: names what to install.
    """
    if config.tensorboard and not any(map(find_spec, _WRITERS)):
        raise ConfigError("logging.tensorboard needs tensorboard: pip install 'lading[logging]', or set it to false")
    if config.wandb and find_spec("wandb") is None:
        raise ConfigError("logging.wandb needs wandb: pip install wandb, or leave it out")


def open_loggers(config: LoggingConfig, folder: Path, *, first_step: int, settings: dict[str, Any]) -> list[Logger]:
    """Open the loggers that a run asks for.

    Args:
        folder: Folder of the run: TensorBoard's events go into ``tensorboard`` there, what W&B keeps into ``wandb``.
        first_step: First step of this process; what was logged of it and later ones before a kill is dropped.
        settings: Settings of the run, for W&B.
    """
    check_logging(config)
    loggers: list[Logger] = []
    if config.tensorboard:
        loggers.append(_TensorBoard(folder / "tensorboard", first_step))
    if config.wandb:
        loggers.append(_WandB(config.wandb, folder, settings))
    return loggers


class _TensorBoard:
    def __init__(self, folder: Path, first_step: int) -> None:
        name = next(module for package, module in _WRITERS.items() if find_spec(package))
        with warnings.catch_warnings():  # of what tensorboard itself imports
            warnings.simplefilter("ignore")
            try:
                self._writer = import_module(name).SummaryWriter(str(folder), purge_step=first_step)
            except OSError as error:
                raise cannot_write(folder, error) from error

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """Logger to Weights & Biases: one folder is one run there; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, project: str, folder: Path, settings: dict[str, Any]) -> None:
        name = str(folder.absolute())
        self._run: Any = import_module("wandb").init(
            project=project,
            name=folder.name,
            id=hashlib.sha256(name.encode()).hexdigest()[:16],
            dir=name,
            config=settings,
            resume="allow",
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()
