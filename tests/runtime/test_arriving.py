"""Micro-batches larger than planned are refused, whichever of a model's arguments shows it."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lading.errors import ConfigError
from lading.runtime.apply import MicroBatch

PLANNED = MicroBatch(2, 6)


@dataclass
class Batch:
    tokens: torch.Tensor
    kind: str = "text"


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


def mask(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bool)


@pytest.mark.parametrize(
    ("args", "options", "said"),
    [
        ((ids(8, 6),), {}, "got 8 of 6 in argument 0"),
        ((ids(2, 6), ids(8, 6)), {}, "got 8 of 6 in argument 1"),
        ((ids(2, 6), ids(2, 24)), {}, "got 2 of 24 in argument 1"),
        ((ids(2, 6), torch.zeros(8, 3, 4, 4)), {}, "got 8 in argument 1"),
        ((ids(2, 6),), {"labels": ids(8, 6)}, "got 8 of 6 in labels"),
        ((), {"labels": ids(2, 6), "input_ids": ids(8, 6)}, "got 8 of 6 in input_ids"),
        ((mask(2, 6), torch.zeros(2, 7, 4)), {}, "got 2 of 7 in argument 1"),
        (({"input_ids": ids(8, 6)},), {}, r"got 8 of 6 in argument 0\.input_ids"),
        ((UserDict(input_ids=ids(8, 6)),), {}, r"got 8 of 6 in argument 0\.input_ids"),
        (([ids(2, 6), (ids(8, 6),)],), {}, r"got 8 of 6 in argument 0\.1\.0"),
        ((), {"batch": Batch(ids(8, 6))}, r"got 8 of 6 in batch\.tokens"),
        ((torch.zeros(2, 6, 4), ids(13)), {}, "got 13 tokens in a row in argument 1"),
    ],
)
def test_every_argument_counts(args: tuple[Any, ...], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"at most 2 sequences of 6 tokens, as planned, {said}; give smaller"):
        PLANNED.check(args, options)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((ids(2, 6), mask(6, 6)), {"bias": torch.zeros(8, 6, 6)}),
        ((mask(6, 6), ids(2, 6)), {"positions": ids(6), "frequencies": torch.zeros(6, 4)}),
        ((torch.zeros(2, 6, 4), torch.tensor(0.5), None, "text"), {"labels": ids(1, 3), "lengths": ids(3)}),
        ((torch.zeros(2, 3, 64, 64), ids(2)), {"encoded": torch.zeros(2, 77, 8), "mask": mask(1, 1, 6, 6)}),
        ((ids(12),), {"position_ids": ids(12), "cu_seqlens": ids(3)}),
    ],
)
def test_what_counts_positions_or_heads_is_no_sequence(args: tuple[Any, ...], options: dict[str, Any]) -> None:
    PLANNED.check(args, options)
