"""Models by name: as large as published, and refused when misspelt or too long."""

from __future__ import annotations

import pytest
import torch

from lading.catalog.models import model_names, named_model
from lading.catalog.tables import model_table
from lading.errors import ConfigError
from lading.ir.table import ModelTable
from lading.models.reference import build_model

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
    "gpt-1t": 1_008_000,
}  # fmt: skip
#: The same of models that are simulated only.
SIMULATED = {
    "deepseek-v3": 671_026, "deepseek-v2": 235_741, "moonlight-16b": 15_960, "qwen3-30b-a3b": 30_532,
    "qwen3-235b-a22b": 235_094, "nemotron4-15b": 15_600, "nemotron4-340b": 341_000, "mpt-7b": 6649, "mpt-30b": 29_960,
    "bloom-176b": 176_247, "wan2.1-14b": 14_288,
}  # fmt: skip


def test_each_name_has_a_published_size() -> None:
    assert set(model_names()) == {*MILLIONS, *SIMULATED}


def _parameters(table: ModelTable, tokens: int) -> int:
    tied = {second for _, second in table.tied}
    sizes = {**table.symbols, "s": tokens}
    return sum(
        count * int(segment.tensors[p].elements.at(sizes))
        for index, (segment, count) in enumerate(zip(table.segments, table.counts, strict=True))
        for p, _ in segment.gradients
        if (index, segment.tensors[p].name) not in tied
    )


@pytest.mark.parametrize("name", sorted({*MILLIONS, *SIMULATED}))
def test_a_table_has_the_published_parameters(name: str) -> None:
    published = {**MILLIONS, **SIMULATED}[name]
    named = named_model(name)
    total = _parameters(model_table(name), named.max_tokens) / 1e6
    rounded = name.startswith(("dit", "gpt3", "gpt-1t", "nemotron"))
    assert total == pytest.approx(published, rel=0.02 if rounded else 1e-3)


def test_a_table_has_the_norms_of_queries_and_keys() -> None:
    names = {
        name: {t.name for s in model_table(name).segments for t in s.tensors} for name in ("qwen3-8b", "llama3-8b")
    }
    assert "attn.q_norm.weight" in names["qwen3-8b"]
    assert "attn.q_norm.weight" not in names["llama3-8b"]


def test_what_is_simulated_only_is_not_built() -> None:
    with pytest.raises(ConfigError, match=r"deepseek-v3: expected a model that can be built \(.*llama3-8b"):
        named_model("deepseek-v3").config(1024)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(MILLIONS))
def test_a_model_is_as_large_as_published(name: str) -> None:
    named = named_model(name)
    config = named.config(min(64, named.max_tokens))
    with torch.device("meta"):
        model = build_model(config.name, **config.sizes)
    total = sum(p.numel() for p in model.parameters()) / 1e6
    rounded = name.startswith(("dit", "gpt3", "gpt-1t"))  # their papers print round numbers
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
