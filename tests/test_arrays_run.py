"""A vision model from a run file, on arrays and on made-up numbers; a model of the catalog by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lading.config import ModelConfig, RunConfig, load_run
from lading.errors import ConfigError
from lading.fit import Hardware, fit_run
from lading.hosts import machine_of
from lading.report.metrics import read_metrics
from lading.run import capture_run, loss_of, task_of
from lading.train import train_plain, train_run
from tests.runs import write_run

pytest.importorskip("transformers")

VIT = {
    "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4, "num_channels": 3,
    "hidden_dropout_prob": 0.1, "id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2},
}  # fmt: skip


@pytest.fixture
def vit(tmp_path: Path) -> RunConfig:
    """A ViT on 40 pictures."""
    numbers = np.random.default_rng(0)
    pictures = numbers.standard_normal((40, 3, 16, 16), dtype=np.float32)
    np.savez(tmp_path / "pictures.npz", pixel_values=pictures, labels=np.arange(40) % 3)
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    file = write_run(tmp_path)
    table = f'data = {{ kind = "arrays", source = "{tmp_path}/pictures.npz", batch_size = 4 }}'
    lines = [table if line.startswith("data") else line for line in file.read_text().splitlines()]
    model = f'model = {{ name = "{tmp_path}/config.json" }}'
    file.write_text("\n".join(model if line.startswith("model") else line for line in lines))
    settings = ["optimization.steps=3", "optimization.warmup_steps=0", "checkpoint.every_steps=0"]
    return load_run(file, [*settings, "memory.budget=100%", "memory.policy=keep-all"])


@pytest.mark.slow
def test_a_vision_model_learns_from_arrays(vit: RunConfig) -> None:
    torch.set_num_threads(1)
    assert task_of(vit.model) == "own"
    plain = train_plain(vit, Path(vit.out))
    assert train_run(vit).losses == plain.losses
    assert "losses" not in read_metrics(Path(vit.out) / "metrics.jsonl")[0]


@pytest.mark.long
def test_made_up_numbers_are_said_to_be(vit: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = {"pixel_values": "float32 3 16 16", "labels": "int64 below 3"}
    run = dataclasses.replace(vit, data=dataclasses.replace(vit.data, kind="random", source="stdlib", inputs=inputs))
    train_run(run)
    assert "the loss means nothing" in capsys.readouterr().out
    assert "4 rows of random numbers" in str(fit_run(run, Hardware(machine="rtx4090")))


def test_data_of_another_kind_than_the_model_learns_from(vit: RunConfig) -> None:
    text = dataclasses.replace(vit.data, kind="text", source="stdlib", sequence_length=8)
    with pytest.raises(ConfigError, match="not made for text; expected 'arrays'"):
        capture_run(dataclasses.replace(vit, data=text), machine_of(vit))
    gpt = dataclasses.replace(vit, model=ModelConfig(name="gpt"))
    with pytest.raises(ConfigError, match="learns 'causal-lm' from text, got 'arrays'"):
        capture_run(gpt, machine_of(vit))


def test_a_forward_without_a_loss_is_refused(vit: RunConfig) -> None:
    with pytest.raises(ConfigError, match="mostly 'labels'"):
        loss_of(vit.model)(*_bare(vit))


def _bare(run: RunConfig) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from lading.run import build

    return build(run.model), {"pixel_values": torch.zeros(1, 3, 16, 16)}


def test_a_model_of_the_catalog_by_name(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path), ["model.name=qwen3-0.6b", "model.sizes={num_layers=2, vocab_size=256}"])
    graph = capture_run(run, machine_of(run)).captured
    names = " ".join(p.names[0] for p in graph.parameters)
    assert ".1." in names
    assert ".2." not in names
    with pytest.raises(ConfigError, match=r"did you mean 'llama3-8b'\?"):
        ModelConfig(name="lama3-8b")
    long = load_run(tmp_path / "run.toml", ["model.name=gpt2", "model.sizes={}", "data.sequence_length=2000"])
    with pytest.raises(ConfigError, match="at most 1024 tokens"):
        capture_run(long, machine_of(run))
