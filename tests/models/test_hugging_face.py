"""Models of transformers from a configuration or a folder: the class, the weights, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lading.config import ModelConfig
from lading.errors import ConfigError, StorageError
from lading.models.hugging_face import build_from, load_weights, read_config, task_of
from lading.tracing.initial import defer

hf = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
T5 = {
    "vocab_size": 32,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", SMALL),
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}),  # tied
    "MixtralForCausalLM": ("MixtralConfig", SMALL | {"num_local_experts": 12}),  # files hold experts one by one
    "BertModel": ("BertConfig", SMALL),
    "BertForMaskedLM": ("BertConfig", SMALL),  # tied
    "T5ForConditionalGeneration": ("T5Config", T5),  # tied, and a shared embedding
    "BertForSequenceClassification": ("BertConfig", SMALL | {"num_labels": 3}),
}
TASKS = {"ConditionalGeneration": "seq2seq-lm", "MaskedLM": "masked-lm", "Classification": "classification"}


def saved(name: str, folder: Path, **how: Any) -> nn.Module:
    """A model with random weights, saved by transformers."""
    torch.manual_seed(1)
    config, sizes = CASES[name]
    model = getattr(hf, name)(getattr(hf, config)(**sizes))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.save_pretrained(folder, **how)
    return model


def loaded(config: ModelConfig) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What a run starts from, by the name under which a model first has it."""
    values: dict[str, torch.Tensor] = {}
    missing = load_weights(config, defer(lambda: build_from(config)).model, lambda n, v: values.update({n: v.clone()}))
    return values, missing


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_the_weights_are_those_that_from_pretrained_loads(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = ModelConfig(name=str(tmp_path))
    values, missing = loaded(config)
    reference = getattr(hf, name).from_pretrained(tmp_path)
    assert type(build_from(config)) is type(reference)
    assert missing == []
    state = reference.state_dict()
    assert values.keys() == {n for n, _ in (*reference.named_parameters(), *reference.named_buffers()) if n in state}
    assert all(torch.equal(value, state[n]) for n, value in values.items())
    task = next((task for end, task in TASKS.items() if name.endswith(end)), None)
    assert task_of(config, read_config(config)) == (task or ("contrastive" if name == "BertModel" else "causal-lm"))


def test_values_of_another_dtype_become_those_of_the_model(tmp_path: Path) -> None:
    model = saved("LlamaForCausalLM", tmp_path).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    values, _ = loaded(ModelConfig(name=str(tmp_path)))
    assert {value.dtype for value in values.values()} == {torch.float32}
    assert torch.equal(values["lm_head.weight"], model.lm_head.weight.float())  # type: ignore[union-attr]


def test_another_head(tmp_path: Path) -> None:
    model = saved("BertForMaskedLM", tmp_path)
    name = str(tmp_path)
    with pytest.raises(ConfigError, match=r"missing: .*pooler\.dense\.bias.*; not expected: cls\.predictions"):
        loaded(ModelConfig(name=name, task="classification"))
    values, missing = loaded(ModelConfig(name=name, task="classification", new_head=True))
    assert missing == ["bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.bias", "classifier.weight"]
    embedding = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(values[embedding], model.state_dict()[embedding])
    base, _ = loaded(ModelConfig(name=name, task="contrastive", new_head=True))
    assert torch.equal(base[embedding.removeprefix("bert.")], model.state_dict()[embedding])


def edit(folder: Path, **settings: Any) -> ModelConfig:
    """The folder with other settings in its config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return ModelConfig(name=str(folder))


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    saved("LlamaForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match=r"model.layers.2.input_layernorm.weight"):
        loaded(edit(tmp_path, num_hidden_layers=3))
    with pytest.raises(ConfigError, match=r"not expected: model\.layers\.1.* and 6 more"):
        loaded(edit(tmp_path, num_hidden_layers=1))
    with pytest.raises(ConfigError, match=r"of another shape: .*expected \(33, 16\), found \(32, 16\)"):
        loaded(edit(tmp_path, num_hidden_layers=2, vocab_size=33))
    with pytest.raises(ConfigError, match=r"differ in the files; set tie_word_embeddings = false"):
        loaded(edit(tmp_path, vocab_size=32, tie_word_embeddings=True))


def test_damaged_files(tmp_path: Path) -> None:
    saved("LlamaForCausalLM", tmp_path / "a", max_shard_size="8KB")
    index = tmp_path / "a" / "model.safetensors.index.json"
    whole = index.read_text()
    for damage in ("{", "[]", "{}", whole.replace("model-00001", "../model-00001")):
        index.write_text(damage)
        with pytest.raises(StorageError, match="expected the index of safetensors files"):
            loaded(ModelConfig(name=str(tmp_path / "a")))
    index.write_text(whole)
    shard = sorted((tmp_path / "a").glob("*.safetensors"))[0]
    data = shard.read_bytes()
    for damaged in (data[:-8], data[:30], b"", b"\xff" * len(data)):
        shard.write_bytes(damaged)
        with pytest.raises(StorageError, match="expected a safetensors file at"):
            loaded(ModelConfig(name=str(tmp_path / "a")))
    index.unlink()
    with pytest.raises(ConfigError, match="found neither"):
        loaded(ModelConfig(name=str(tmp_path / "a")))
    shutil.rmtree(tmp_path / "a")


def test_settings_and_errors_of_a_configuration(tmp_path: Path) -> None:
    hf.BertConfig(**SMALL).save_pretrained(tmp_path)
    name = str(tmp_path / "config.json")
    config = read_config(ModelConfig(name=name, sizes={"hidden_dropout_prob": 0.25}))
    assert config.hidden_dropout_prob == 0.25
    with pytest.raises(ConfigError, match="'hidden_droput_prob' is no setting of a BertConfig"):
        read_config(ModelConfig(name=name, sizes={"hidden_droput_prob": 0.25}))
    with pytest.raises(ConfigError, match="transformers has no such model of type 'bert'"):
        build_from(ModelConfig(name=name, task="seq2seq-lm"))
    vision = hf.ViTConfig(num_hidden_layers=1, architectures=["ViTForImageClassification"])
    vision.save_pretrained(tmp_path)
    assert task_of(ModelConfig(name=name), read_config(ModelConfig(name=name))) == "own"
    hf.ViTConfig(num_hidden_layers=1, architectures=["ViTForNothing"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="transformers has no model ViTForNothing"):
        build_from(ModelConfig(name=name))
    for text in ("{", "[]", '{"model_type": "nothing"}', "{}"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"expected the config\.json of a model"):
            read_config(ModelConfig(name=name))
