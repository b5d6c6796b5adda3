"""Files of other people's models, damaged or made to mislead: an error that names the file and the entry."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fuzz import damaged_bytes, damaged_document
from tests.models.test_hugging_face import SMALL, loaded, saved

from lading.config import ModelConfig
from lading.errors import CaptureError, ConfigError, LadingError, StorageError
from lading.models.hugging_face import build_from, read_config, task_of
from lading.runtime.tokens import load_tokenizer
from lading.tracing.initial import defer

hf = pytest.importorskip("transformers")
FEW = settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
INDEX = "model.safetensors.index.json"
#: What stands in a damaged file where something else was: no large integer, for as many layers take for ever.
VALUES = st.one_of(
    st.none(), st.booleans(), st.sampled_from([0, -1, 3, 1.5, "", "x", [], {}, [3], {"a": None}, 1e999]),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in shards."""
    folder = tmp_path_factory.mktemp("llama")
    saved("LlamaForCausalLM", folder, max_shard_size="8KB")
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def said(file: Path, changed: bytes, read: Callable[[], object]) -> str:
    """What the error says that ``read`` raises with ``file`` changed; "" where it raises none."""
    original = file.read_bytes()
    text = ""
    try:
        file.write_bytes(changed)
        read()
    except LadingError as error:
        text = str(error)
    finally:
        file.write_bytes(original)
    assert len(text.encode()) < 2000  # and a terminal can show it
    return text


def index_with(folder: Path, entry: str, name: Any) -> bytes:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][entry] = name
    return json.dumps(index).encode()


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/passwd", "..", ".", "", "a/b", "a\0b", 3, None, ["a"], True, 10**400, "x" * 5000]
)
def test_an_index_that_names_no_file_beside_it(folder: Path, name: Any) -> None:
    text = said(
        folder / INDEX, index_with(folder, "lm_head.weight", name), lambda: loaded(ModelConfig(name=str(folder)))
    )
    assert f"{folder / INDEX}: " in text
    what = "weight_map['lm_head.weight']: expected the name of a file"
    assert ("control character U+0000" if name == "a\0b" else what) in text


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: text.replace('"lm_head.weight"', '"\\ud800"'), "surrogates not allowed"),
        (lambda text: text.replace('"lm_head.weight"', '"model.norm.weight"'), "'model.norm.weight' is there twice"),
        (lambda text: text.replace('"total_size"', '"x": NaN, "total_size"'), "NaN is not a number"),
        (lambda text: "[" * 100_000, "nested too deeply"),
        (lambda text: text.encode("utf-16"), "can't decode byte"),
        (lambda text: '{"weight_map": {}}', "expected names of tensors and files as weight_map"),
        (lambda text: '{"weight_map": ["a"]}', "expected names of tensors and files as weight_map"),
        (lambda text: "", "Expecting value"),
    ],
)
def test_an_index_that_is_none(folder: Path, change: Callable[[str], str | bytes], expected: str) -> None:
    changed = change((folder / INDEX).read_text())
    data = changed if isinstance(changed, bytes) else changed.encode()
    text = said(folder / INDEX, data, lambda: loaded(ModelConfig(name=str(folder))))
    assert f"expected the index of safetensors files at {folder / INDEX}" in text
    assert expected in text


@pytest.mark.parametrize("entry", ["lm_head.weight", "none.weight"])
def test_a_tensor_that_is_not_where_the_index_says(folder: Path, entry: str) -> None:
    """Of another file of the folder, or of none."""
    there = json.loads((folder / INDEX).read_text())["weight_map"]
    other = next(name for name in sorted(set(there.values())) if name != there.get(entry))
    text = said(folder / INDEX, index_with(folder, entry, other), lambda: loaded(ModelConfig(name=str(folder))))
    assert f"{other}: expected {entry!r} in it, as {INDEX} says, found no such tensor" in text


def test_a_tensor_in_two_files_is_that_of_the_index(folder: Path, tmp_path: Path) -> None:
    """Neither silently wins where the index does not say."""
    tensors: Any = pytest.importorskip("safetensors.torch")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = json.loads((folder / INDEX).read_text())
    expected, _ = loaded(ModelConfig(name=str(folder)))
    home = index["weight_map"]["lm_head.weight"]
    for other in set(index["weight_map"].values()) - {home}:
        more = tensors.load_file(folder / other) | {"lm_head.weight": torch.zeros(32, 16)}
        tensors.save_file(more, tmp_path / other)
    values, _ = loaded(ModelConfig(name=str(tmp_path)))
    assert all(torch.equal(values[name], value) for name, value in expected.items())
    del index["weight_map"]["lm_head.weight"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(StorageError, match=r"expected each tensor once, found 'lm_head.weight' in model-0.* and in"):
        loaded(ModelConfig(name=str(tmp_path)))


def with_header(header: bytes, data: bytes = bytes(8)) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


ENTRY = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    "content",
    [
        with_header(f'{{"w":{ENTRY},"w":{ENTRY}}}'.encode()),
        with_header(f'{{"\\ud800":{ENTRY}}}'.encode()),
        with_header(b"[" * 5000),
        with_header(b"[]"),
        with_header(b'{"w":{"dtype":"F32","shape":[1e30],"data_offsets":[0,8]}}'),
        with_header(b'{"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}}'),
        with_header(b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}'),
        with_header(b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,9999]}}'),
        (1 << 60).to_bytes(8, "little") + b"{}",
        b"",
    ],
)
def test_a_header_that_is_none(folder: Path, content: bytes) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    assert f"expected a safetensors file at {shard}" in said(
        shard, content, lambda: loaded(ModelConfig(name=str(folder)))
    )


@pytest.mark.parametrize(
    "header",
    [
        b'{"lm_head.weight":{"dtype":"F4","shape":[16],"data_offsets":[0,8]}}',
        b'{"lm_head.weight":{"dtype":"F32","shape":[0,9223372036854775808],"data_offsets":[0,0]}}',
    ],
)
def test_a_tensor_that_torch_cannot_have(folder: Path, tmp_path: Path, header: bytes) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(with_header(header, bytes(8 if b"F4" in header else 0)))
    with pytest.raises(StorageError, match=r"model\.safetensors: cannot read 'lm_head.weight'"):
        loaded(ModelConfig(name=str(tmp_path)))


@FEW
@given(data=st.data())
def test_damaged_safetensors(folder: Path, data: st.DataObject) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    original = shard.read_bytes()
    length = 8 + int.from_bytes(original[:8], "little")
    changed = damaged_bytes(data, original[:length]) + original[length:]
    text = said(shard, changed, lambda: loaded(ModelConfig(name=str(folder))))
    assert not text or str(folder) in text


@FEW
@given(data=st.data(), as_bytes=st.booleans())
def test_a_damaged_index(folder: Path, data: st.DataObject, as_bytes: bool) -> None:
    original = (folder / INDEX).read_bytes()
    changed = (
        damaged_bytes(data, original) if as_bytes else json.dumps(damaged_document(data, json.loads(original))).encode()
    )
    text = said(folder / INDEX, changed, lambda: loaded(ModelConfig(name=str(folder))))
    assert not text or str(folder) in text


def built(name: str) -> None:
    """The model of a configuration on fakes, as a run has it."""
    model = ModelConfig(name=name)
    task_of(model, read_config(model))
    defer(lambda: build_from(model))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["LlamaConfig", "BertConfig"])
@settings(FEW, max_examples=15)
@given(data=st.data())
def test_a_damaged_configuration(kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("config") / "config.json"
    known = json.loads(getattr(hf, kind)(**SMALL, architectures=[kind.replace("Config", "Model")]).to_json_string())
    changed = damaged_document(data, known, values=VALUES)
    path.write_text(json.dumps(changed))
    text = said(path, path.read_bytes(), lambda: built(str(path)))
    assert not text or str(path) in text or text.startswith("model.task")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"architectures": [3]}, "expected names of classes as architectures, got [3]"),
        ({"architectures": "LlamaModel"}, "expected names of classes as architectures, got 'LlamaModel'"),
        ({"architectures": ["Trainer"]}, "transformers has no model Trainer"),
        ({"architectures": ["logging"]}, "transformers has no model logging"),
        ({"model_type": 3}, 'no object with a "model_type"'),
        ({"model_type": "\ud800"}, "surrogates not allowed"),
        ({"hidden_size": -16}, "negative dimension -16"),
        ({"num_attention_heads": 0}, ""),
        (
            {"attn_implementation": "someone/kernel"},
            "attn_implementation: expected an implementation that transformers",
        ),
        ({"_attn_implementation": {"": "a/b@main"}}, "which is code on the Hub"),
        ({"sub_configs": [{"text_config": {"_experts_implementation": "a/b"}}]}, "which is code on the Hub"),
    ],
)
def test_a_configuration_of_nothing(tmp_path: Path, settings: dict[str, Any], expected: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(hf.LlamaConfig(**SMALL).to_json_string()) | settings))
    with pytest.raises((ConfigError, CaptureError)) as caught:
        built(str(path))
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "settings", "name"),
    [
        ("Llama", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ("Mixtral", {"num_local_experts": 10**12}, "num_local_experts"),
        ("GPT2", {"n_layer": 10**9}, "n_layer"),
        ("T5", {"num_decoder_layers": 10**9}, "num_decoder_layers"),
        ("Swin", {"depths": [1, 10**9]}, "depths"),
        ("Llava", {"text_config": {"model_type": "llama", "num_hidden_layers": 10**9}}, "num_hidden_layers"),
        ("Albert", {"num_hidden_groups": 10**9}, "num_hidden_groups"),
        ("Bert", {"num_labels": 10**9}, "num_labels"),
    ],
)
def test_a_thousand_million_layers(kind: str, settings: dict[str, Any], name: str, tmp_path: Path) -> None:
    """In a file, and as a size of a run; what is large for another reason stays."""
    getattr(hf, f"{kind}Config")().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    plain = json.loads(file.read_text())
    begun = time.monotonic()
    file.write_text(json.dumps(plain | settings))
    with pytest.raises(ConfigError, match=rf"{name}: expected at most [\d,]+, got 1e\+"):
        read_config(ModelConfig(name=str(file)))
    file.write_text(json.dumps(plain | {"max_position_embeddings": 10**7, "block_size": 10**6, "num_labels": 2}))
    read_config(ModelConfig(name=str(file)))
    if name in plain:
        with pytest.raises(ConfigError, match=rf"{name}: expected at most"):
            read_config(ModelConfig(name=str(file), sizes=settings))
    assert time.monotonic() - begun < 10


def test_infinities_of_a_configuration(tmp_path: Path) -> None:
    """Written as Python does, or as an object, as transformers does since version 5."""
    hf.Mamba2Config(hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    model = ModelConfig(name=str(tmp_path / "config.json"))
    assert tuple(read_config(model).time_step_limit) == (0.0, math.inf)
    settings = json.loads((tmp_path / "config.json").read_text()) | {"time_step_limit": [0.0, math.inf]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert tuple(read_config(model).time_step_limit) == (0.0, math.inf)


@settings(FEW, max_examples=15)
@given(data=st.data(), beside=st.booleans())
def test_a_damaged_tokenizer(tokenizer: Path, data: st.DataObject, beside: bool) -> None:
    file = tokenizer
    if beside:
        file = tokenizer.with_name("tokenizer_config.json")
        file.write_text(json.dumps({"mask_token": {"content": "a"}, "eos_token": "b"}))
    if data.draw(st.booleans()):
        changed = damaged_bytes(data, file.read_bytes())
    else:
        changed = json.dumps(damaged_document(data, json.loads(file.read_bytes()), values=VALUES)).encode()
    text = said(file, changed, lambda: load_tokenizer(tokenizer).encode(["a b c"]))
    assert not text or str(tokenizer.parent) in text


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\xff\xfe", b"[]", b"null", b'{"mask_token": "\\ud800"}'])
def test_a_file_that_is_no_tokenizer(tokenizer: Path, name: str, content: bytes) -> None:
    file = tokenizer.with_name(name)
    file.touch()
    assert str(file) in said(file, content, lambda: load_tokenizer(tokenizer))
    if name != "tokenizer.json":
        file.unlink()
