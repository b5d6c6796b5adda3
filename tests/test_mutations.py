"""Every kind of file that is read, mutated: Lading's own error or a result; nothing is run, no hang, little memory."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lading.checkpoint.state import tensor_source
from lading.checkpoint.store import open_checkpoint, save_checkpoint
from lading.config import DataConfig, ModelConfig
from lading.models import hugging_face
from lading.models.weight_files import INDEX
from lading.runtime.arrays import ArrayDataset
from lading.runtime.documents import files_of, pieces
from lading.runtime.resident import PeakMeter
from lading.runtime.tokens import load_tokenizer
from tests import meanings
from tests.fuzz import Watch
from tests.mutations import CANARY, Hang, Kind, Reader, mutation
from tests.test_hostile import KINDS as DOCUMENTS
from tests.test_hostile import toml_file

#: Mutations of each kind: by default a handful, with ``-m slow`` as many as are said to strangers.
FEW, MANY = 12, 2000


def rehashed_plan(document: Any) -> Any:
    table = json.loads(json.dumps(document))
    table.pop("fingerprint", None)
    run = table["request"].pop("run")
    fingerprint = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]
    table["request"]["run"] = run
    return {**table, "fingerprint": fingerprint}


#: Documents whose readers compare what they read with what the file says.
COMPARED = {
    **dict.fromkeys(("plan", "cluster plan", "placement"), meanings.read_plan),
    "machine": meanings.read_machine,
    "run": meanings.read_run,
}


def documents() -> dict[str, Kind]:
    """The kinds that are text, read as tests/test_hostile.py reads them, or compared."""
    kinds: dict[str, Kind] = {}
    for name, (file, whole, just_read) in DOCUMENTS.items():
        read = COMPARED.get(name, just_read)
        form = "toml" if file.endswith(".toml") else "lines" if file.endswith(".jsonl") else "json"
        is_plan = name in ("plan", "cluster plan", "placement")
        mend = {"mend": rehashed_plan} if is_plan else {}
        kinds[name] = Kind(file, partial(_encoded, whole), read, form, **mend)
    return kinds


def _encoded(whole: Any, folder: Path) -> bytes:
    return whole(folder).encode()


def state(folder: Path) -> bytes:
    """The tensors of a checkpoint."""
    saved = save_checkpoint(folder, 2, [tensor_source(n, torch.ones(3)) for n in "ab"], {"loss": 1.5}, keep=1)
    return (saved / "state.safetensors").read_bytes()


def read_state(path: Path) -> None:
    saved = path.parent / "step-00000002"
    shutil.copy(path, saved / "state.safetensors")
    opened = open_checkpoint(saved)
    for name in opened.tensors:
        assert opened.read(name).tolist() == [1.0] * 3  # a checksum says so, or it is refused


def weights(folder: Path) -> bytes:
    """Two files of weights and their index; the content of the first."""
    save_file: Any = pytest.importorskip("safetensors.torch").save_file
    for number, name in enumerate(("first", "second")):
        save_file({f"{name}.weight": torch.full((3, 4), number + 0.5), f"{name}.bias": torch.ones(3)}, folder / name)
    keys = {f"{name}.{part}": name for name in ("first", "second") for part in ("weight", "bias")}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 96}, "weight_map": keys}))
    return (folder / "first").read_bytes()


def index(folder: Path) -> bytes:
    weights(folder)
    return (folder / INDEX).read_bytes()


def read_weights(path: Path) -> None:
    model = ModelConfig(name=str(path.parent))
    hugging_face.weights_dtype(model)
    meanings.check_weights(path.parent)


def columns() -> dict[str, np.ndarray]:
    return {"x": np.arange(120, dtype=np.float32).reshape(40, 3), "y": np.arange(40, dtype=np.int64)}


def npz(folder: Path) -> bytes:
    np.savez_compressed(folder / "data.npz", **columns())  # pyright: ignore[reportArgumentType]
    return (folder / "data.npz").read_bytes()


def stored_npz(folder: Path) -> bytes:
    np.savez(folder / "stored.npz", **columns())  # pyright: ignore[reportArgumentType]
    return (folder / "stored.npz").read_bytes()


def safetensors(folder: Path) -> bytes:
    pytest.importorskip("safetensors.numpy").save_file(columns(), folder / "data.safetensors")
    return (folder / "data.safetensors").read_bytes()


def parquet(folder: Path) -> bytes:
    arrow: Any = pytest.importorskip("pyarrow")
    table = arrow.table({"x": columns()["x"].tolist(), "y": columns()["y"]})
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / "data.parquet")
    return (folder / "data.parquet").read_bytes()


def read_arrays(path: Path) -> None:
    for inputs in ({}, {"x": "float32 3", "y": "int64"}):
        rows = path.parent / "rows"
        shutil.rmtree(rows, ignore_errors=True)
        config = DataConfig(kind="arrays", source=str(path), batch_size=2, inputs=inputs)
        dataset = ArrayDataset(config, rows, seed=1)
        dataset.batch(0, 0)
        if path.suffix != ".parquet":
            meanings.check_arrays(dataset, path, columns())


def text_parquet(folder: Path) -> bytes:
    arrow: Any = pytest.importorskip("pyarrow")
    table = arrow.table({"text": ["one", "two", "three"] * 20, "label": list(range(60))})
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / "texts.parquet")
    return (folder / "texts.parquet").read_bytes()


def text_lines(_: Path) -> bytes:
    return b"".join(json.dumps({"text": text, "label": 1}).encode() + b"\n" for text in ("one", "two", "three"))


def read_texts(path: Path) -> None:
    config = DataConfig(source=str(path), sequence_length=4, batch_size=1)
    for _ in pieces(files_of(str(path)), config, labelled=True):
        pass


def tokenizer(folder: Path) -> bytes:
    made_of: Any = pytest.importorskip("tokenizers")
    made = made_of.Tokenizer(made_of.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = made_of.pre_tokenizers.Whitespace()
    made.post_processor = made_of.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 3)])
    made.save(str(folder / "tokenizer.json"))
    return (folder / "tokenizer.json").read_bytes()


def read_tokenizer(path: Path) -> None:
    load_tokenizer(path).encode(["a b c"])


def configuration(_: Path) -> bytes:
    hf: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = hf.LlamaConfig(**sizes, vocab_size=32, architectures=["LlamaForCausalLM"])
    return made.to_json_string().encode()


def read_configuration(path: Path) -> None:
    model = ModelConfig(name=str(path))
    hugging_face.task_of(model, hugging_face.read_config(model))


ALL = {
    **documents(),
    "state": Kind("whole.safetensors", state, read_state),
    "safetensors": Kind("first", weights, read_weights),
    "index": Kind(INDEX, index, read_weights, "json"),
    "npz": Kind("data.npz", npz, read_arrays),
    "stored npz": Kind("stored.npz", stored_npz, read_arrays),
    "safetensors of arrays": Kind("data.safetensors", safetensors, read_arrays),
    "parquet": Kind("data.parquet", parquet, read_arrays),
    "parquet of texts": Kind("texts.parquet", text_parquet, read_texts),
    "lines of texts": Kind("texts.jsonl", text_lines, read_texts, "lines"),
    "tokenizer": Kind("tokenizer.json", tokenizer, read_tokenizer, "json"),
    "configuration": Kind("config.json", configuration, read_configuration, "json"),
}
#: Kinds whose readers take seconds to import; tests/models damages some of those files by default.
SLOW_TO_IMPORT = ("configuration",)


@pytest.fixture(scope="module")
def watch() -> Watch:
    made = Watch()
    sys.addaudithook(made.audit)  # for good, as Python has it; off but while a file is read
    return made


@pytest.fixture
def reader(tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    modules, folder = tmp_path / "modules", tmp_path / "stranger"
    modules.mkdir()
    folder.mkdir()
    (modules / f"{CANARY}.py").write_text("def run(*_, **__): pass\n")
    monkeypatch.syspath_prepend(modules)
    meter = PeakMeter()
    yield Reader(folder.resolve(), watch, meter)
    meter.close()


def check(reader: Reader, name: str, numbers: range) -> None:
    kind = ALL[name]
    original = kind.whole(reader.folder)
    assert reader.read(kind, original) == ""
    written = {"toml": toml_file, "lines": lambda document: f"{json.dumps(document)}\n"}.get(kind.form, json.dumps)
    failed: dict[str, str] = {}
    for number in numbers:
        content = mutation(kind, original, number, written)
        try:
            reader.read(kind, content)
        except (Exception, Hang) as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} in {place.filename}, line {place.lineno}"
            failed.setdefault(where, f"mutation {number} of {name}: {str(error)[:300]}, of {content[:300]!r}")
    assert not failed, "\n".join(f"{where}: {what}" for where, what in failed.items())
    assert reader.refused >= len(numbers) // 10  # that mutations are none would not be noticed otherwise


@pytest.mark.parametrize("name", [name for name in ALL if name not in SLOW_TO_IMPORT])
def test_a_handful_of_mutations(reader: Reader, name: str) -> None:
    check(reader, name, range(FEW))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_mutations_at_length(reader: Reader, name: str) -> None:
    check(reader, name, range(MANY))
