"""Arguments of the public functions: nothing is swallowed."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lading
from lading.errors import ConfigError
from lading.tracing.trace import capture
from tests.machines import small_machine


def test_no_public_function_takes_any_keyword() -> None:
    public = [getattr(lading, name) for name in lading.__all__ if name not in ("__version__", "capture")]
    for function in (capture, *public):
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds or isinstance(function, type), function


def test_flags_are_flags_and_batches_have_values(tmp_path: Path) -> None:
    graph = capture(nn.Linear(4, 4), {"x": torch.ones(2, 4)}, lambda model, batch: model(batch["x"]).sum())
    wrong: Any = "no"
    with pytest.raises(ConfigError, match="master_weights"):
        lading.plan(graph, small_machine(), budget="100%", master_weights=wrong)
    with pytest.raises(ConfigError, match="compile"):
        lading.plan(graph, small_machine(), budget="100%", compile=wrong)
    with pytest.raises(TypeError, match="clipnorm"):
        lading.plan(graph, small_machine(), budget="100%", clipnorm=1.0)  # pyright: ignore[reportCallIssue]
    made = lading.plan(graph, small_machine(), budget="100%")
    with lading.Trainer(made, graph, nn.Linear(4, 4), folder=tmp_path) as trainer:
        for given in (torch.ones(2, 4).to_sparse(), torch.ones(2, 4, device="meta")):
            with pytest.raises(ConfigError, match="'x' dense, with values"):
                trainer.step({"x": given})
        assert trainer.steps == 0
        trainer.step({"x": torch.ones(2, 4)})
