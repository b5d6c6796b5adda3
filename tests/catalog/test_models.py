"""Models by name: as large as published, and refused when misspelt or too long."""

from __future__ import annotations

import pytest
import torch

from lading.catalog.models import model_names, named_model
from lading.errors import ConfigError
from lading.models.registry import build_model

#: Parameters in millions, from the papers and model cards; where rotary tables are no parameters.
MILLIONS = {
    "dit-s": 33, "dit-b": 130, "dit-l": 458, "dit-xl": 675,
    "gpt2": 124.4, "gpt2-medium": 354.8, "gpt2-large": 774.0, "gpt2-xl": 1557.6,
    "gpt3-6.7b": 6700, "gpt3-175b": 175_000,
    "llama2-7b": 6738.4, "llama2-13b": 13_015.9, "llama2-70b": 68_976.6,
    "llama3-8b": 8030.3, "llama3-70b": 70_553.7, "llama3-405b": 405_853,
    "llama3.2-1b": 1235.8, "llama3.2-3b": 3212.7,
    "mistral-7b": 7248.0, "mixtral-8x7b": 46_702.8,
    "qwen3-0.6b": 596.0, "qwen3-1.7b": 1720.6, "qwen3-4b": 4022.5, "qwen3-8b": 8190.7, "qwen3-14b": 14_768.3,
    "qwen3-32b": 32_762.1,
}  # fmt: skip


def test_each_name_has_a_published_size() -> None:
    assert set(model_names()) == set(MILLIONS)


@pytest.mark.parametrize("name", sorted(MILLIONS))
def test_a_model_is_as_large_as_published(name: str) -> None:
    named = named_model(name)
    config = named.config(min(64, named.max_tokens))
    with torch.device("meta"):
        model = build_model(config.name, **config.sizes)
    total = sum(p.numel() for p in model.parameters()) / 1e6
    rounded = name.startswith(("dit", "gpt3"))  # their papers print round numbers
    assert total == pytest.approx(MILLIONS[name], rel=0.02 if rounded else 5e-4)
    assert named.source
    assert named.title


def test_a_sequence_is_as_long_as_the_model_takes() -> None:
    assert named_model("llama3-70b").default_tokens == 4096
    assert named_model("llama3-70b").config(2048).sizes["max_seq_len"] == 2048
    assert named_model("gpt2").default_tokens == 1024
    assert named_model("dit-xl").default_tokens == 256
    with pytest.raises(ConfigError, match="gpt2: expected a sequence of at most 1024 tokens, got 2000"):
        named_model("gpt2").config(2000)


def test_a_misspelt_model_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama3-70b'"):
        named_model("llama3-70")
