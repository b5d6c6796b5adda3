"""Tokenizer files, and the batches of every task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lading.config import DataConfig
from lading.errors import ConfigError
from lading.runtime.data import TextDataset, example_batch
from lading.runtime.framing import Specials, masked, window_tokens
from lading.runtime.tokens import load_tokenizer

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]", *(f"w{i}" for i in range(300))]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """One token a word, with BERT's special tokens around a text."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    made.enable_padding(length=128)
    made.enable_truncation(4)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """The words in order, and labelled texts of a few of them."""
    (tmp_path / "text.txt").write_text(" ".join(WORDS[5:]))
    rows = [{"text": " ".join(WORDS[5 + i : 7 + 2 * i]), "label": i % 3} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def dataset(text: Path, tokenizer: Path, task: str, file: str = "text.txt", **model: Any) -> TextDataset:
    config = DataConfig(source=str(text / file), sequence_length=10, batch_size=6)
    return TextDataset(config, text / "cache", seed=3, task=task, tokenizer=tokenizer, **model)


def test_special_tokens(tokenizer: Path) -> None:
    expected = Specials(vocabulary=305, prefix=(1,), suffix=(2,), separator=2, mask=3, pad=4)
    assert load_tokenizer(tokenizer).specials == expected
    assert load_tokenizer(tokenizer.parent).specials == expected  # the folder
    (tokenizer.parent / "tokenizer_config.json").write_text(json.dumps({"mask_token": {"content": "w0"}}))
    (tokenizer.parent / "special_tokens_map.json").write_text(json.dumps({"eos_token": "w1"}))
    specials = load_tokenizer(tokenizer).specials
    assert (specials.mask, specials.separator, specials.pad) == (5, 6, 4)


def test_every_task_keeps_the_order_of_the_text(text: Path, tokenizer: Path) -> None:
    tokens = dataset(text, tokenizer, "causal-lm").batch(0, 0)["tokens"]
    assert tokens.shape == (6, 11)
    assert torch.equal(tokens.diff(), torch.ones(6, 10, dtype=torch.int64))
    pair = dataset(text, tokenizer, "contrastive").batch(0, 0)
    assert pair["first"].shape == pair["second"].shape == (6, 10)
    assert {int(t) for name in pair for t in pair[name][:, 0]} == {1}
    assert {int(t) for name in pair for t in pair[name][:, -1]} == {2}
    assert torch.equal(pair["second"][:, 1], pair["first"][:, -2] + 1)
    batch = dataset(text, tokenizer, "seq2seq-lm").batch(0, 0)
    assert batch["tokens"].shape == batch["labels"].shape == (6, 10)
    assert torch.equal(batch["labels"][:, 0], batch["tokens"][:, -1] + 1)
    assert batch["labels"][:, -1].tolist() == [2] * 6


def test_masks(text: Path, tokenizer: Path) -> None:
    data, whole = dataset(text, tokenizer, "masked-lm"), []
    for step in range(100):
        batch = data.batch(step, 0)
        assert torch.equal(batch["labels"], data.batch(step, 0)["labels"])
        chosen = batch["labels"] != -100
        assert chosen.any()
        assert not chosen[:, [0, -1]].any()
        kept = torch.where(chosen, batch["labels"], batch["tokens"])
        assert torch.equal(kept[:, 1:-1].diff(), torch.ones(6, 7, dtype=torch.int64))  # the text is there
        whole.append((batch["tokens"], batch["labels"], chosen))
    tokens, labels, chosen = (torch.stack(parts) for parts in zip(*whole, strict=True))
    share = chosen[:, :, 1:-1].float().mean().item()
    assert abs(share - 0.15) < 0.02
    assert abs((tokens[chosen] == 3).float().mean().item() - 0.8) < 0.06
    assert abs((tokens[chosen] == labels[chosen]).float().mean().item() - 0.1) < 0.04


def test_a_batch_without_a_chosen_token_gets_one() -> None:
    specials = Specials(vocabulary=9, prefix=(1,), suffix=(2,), mask=3)
    tokens = np.full((2, 4), 7, dtype=np.int64)
    found = masked(tokens, specials, lambda count: np.full(count, 2**64 - 1, dtype=np.uint64))
    assert (found["labels"] != -100).sum() == 1
    with pytest.raises(ConfigError, match="expected one with a mask token for masked-lm"):
        masked(tokens, Specials(vocabulary=9), lambda count: np.zeros(count, dtype=np.uint64))


def test_labelled_texts_are_padded_or_cut(text: Path, tokenizer: Path) -> None:
    data = dataset(text, tokenizer, "classification", "rows.jsonl", num_labels=3)
    seen = set()
    for step in range(40):
        batch = data.batch(step, 0)
        for tokens, mask, label in zip(batch["tokens"], batch["mask"], batch["labels"], strict=True):
            row = int(tokens[1]) - 5
            length = min(2 + row, 8) + 2
            assert int(label) == row % 3
            assert mask.tolist() == [1] * length + [0] * (10 - length)
            assert tokens.tolist() == [1, *range(5 + row, 3 + row + length), 2, *[4] * (10 - length)]
            seen.add(row)
    assert seen == set(range(12))
    with pytest.raises(ConfigError, match=r"expected labels below 2, got 2; set model\.sizes\.num_labels to 3"):
        dataset(text, tokenizer, "classification", "rows.jsonl", num_labels=2)
    with pytest.raises(ConfigError, match="expected JSON lines or Parquet with labels"):
        dataset(text, tokenizer, "classification")
    (text / "rows.jsonl").write_text('{"text": "w1", "label": "w2"}')
    with pytest.raises(ConfigError, match="line 1: expected an integer >= 0 in 'label', found 'w2'"):
        dataset(text, tokenizer, "classification", "rows.jsonl")


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm", "seq2seq-lm", "contrastive", "classification"])
def test_an_example_has_the_shapes_of_a_batch(text: Path, tokenizer: Path, task: str) -> None:
    file = "rows.jsonl" if task == "classification" else "text.txt"
    data = dataset(text, tokenizer, task, file)
    batch, example = data.batch(0, 0), example_batch(task, data.config, tokenizer)
    assert {n: (t.dtype, t.shape) for n, t in batch.items()} == {n: (t.dtype, t.shape) for n, t in example.items()}


def test_the_model_must_know_the_tokens(text: Path, tokenizer: Path) -> None:
    dataset(text, tokenizer, "causal-lm", vocabulary=305)
    with pytest.raises(ConfigError, match="expected tokens below 304, the model's vocabulary, got 304; give the model"):
        dataset(text, tokenizer, "causal-lm", vocabulary=304)


def test_errors(text: Path, tokenizer: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected 'auto', 'bytes' or a tokenizer\.json, found no file"):
        load_tokenizer(text / "none.json")
    with pytest.raises(ConfigError, match=r"expected a tokenizer\.json at"):
        load_tokenizer(text / "rows.jsonl")
    (text / "text.txt").write_bytes(b"caf\xe9 " * 40)
    with pytest.raises(ConfigError, match="expected UTF-8 text for the tokenizer, found"):
        dataset(text, tokenizer, "causal-lm")
    with pytest.raises(ConfigError, match="expected room for text between 2 special tokens"):
        window_tokens("masked-lm", 2, load_tokenizer(tokenizer).specials)
