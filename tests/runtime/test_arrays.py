"""Arrays and made-up numbers as batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from lading.config import DataConfig
from lading.errors import ConfigError, StorageError
from lading.inputs import Input, parse_input
from lading.runtime.arrays import ArrayDataset, RandomDataset, inputs_of

ROWS = 150


def columns() -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(0)
    pixels = numbers.standard_normal((ROWS, 3, 2, 2), dtype=np.float32)
    return {"pixel_values": pixels, "labels": np.arange(ROWS, dtype=np.int64)}


def npz(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    np.savez(folder / "data.npz", **arrays)  # pyright: ignore[reportArgumentType]
    return folder / "data.npz"


def safetensors(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    save_file(arrays, folder / "data.safetensors")
    return folder / "data.safetensors"


def parquet(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    lists = {"pixel_values": arrays["pixel_values"].reshape(ROWS, -1).tolist(), "labels": arrays["labels"]}
    schema = arrow.schema([("pixel_values", arrow.list_(arrow.float32())), ("labels", arrow.int64())])
    table = arrow.table(lists, schema=schema)
    __import__("pyarrow.parquet").parquet.write_table(table, folder / "data.parquet")
    return folder / "data.parquet"


def config(source: Path, **more: Any) -> DataConfig:
    return DataConfig(kind="arrays", source=str(source), batch_size=8, **more)


SHAPES = {"pixel_values": "float32 3 2 2", "labels": f"int64 below {ROWS}"}


@pytest.mark.parametrize("write", [npz, safetensors, parquet])
def test_rows_stay_together(write: Any, tmp_path: Path) -> None:
    arrays = columns()
    data = ArrayDataset(config(write(tmp_path, arrays), inputs=SHAPES), tmp_path / "run", seed=1)
    assert len(data) == ROWS
    batch = data.batch(3, 0)
    assert batch["pixel_values"].shape == (8, 3, 2, 2)
    for row, label in enumerate(batch["labels"].tolist()):
        assert torch.equal(batch["pixel_values"][row], torch.from_numpy(arrays["pixel_values"][label]))
    again = data.batch(3, 0)
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    assert not torch.equal(batch["labels"], data.batch(4, 0)["labels"])


@pytest.mark.parametrize("write", [npz, safetensors])
def test_a_file_says_its_own_columns(write: Any, tmp_path: Path) -> None:
    found = inputs_of(config(write(tmp_path, columns())))
    assert found == {"pixel_values": Input("float32", (3, 2, 2)), "labels": Input("int64")}


def test_columns_in_another_order_are_the_same_columns(tmp_path: Path) -> None:
    file, turned = npz(tmp_path, columns()), dict(reversed(SHAPES.items()))
    made = [ArrayDataset(config(file, inputs=inputs), tmp_path / "run", seed=1) for inputs in (SHAPES, turned)]
    first, second = (data.batch(0, 0) for data in made)
    assert all(torch.equal(first[name], second[name]) for name in SHAPES)
    assert made[0].fingerprint == made[1].fingerprint


@pytest.mark.parametrize("rows", [[[1, 2, 3], [4]], [[1], None], [[1, None], [2, 3]], ["a", "b"]])
def test_lists_of_other_lengths_and_gaps_are_refused(rows: list[Any], tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    __import__("pyarrow.parquet").parquet.write_table(arrow.table({"x": rows}), tmp_path / "data.parquet")
    with pytest.raises(ConfigError, match="expected"):
        ArrayDataset(config(tmp_path / "data.parquet"), tmp_path / "run", seed=1)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    arrays = columns()
    first = ArrayDataset(config(npz(tmp_path, arrays)), tmp_path / "run", seed=1)
    same = ArrayDataset(config(npz(tmp_path, arrays)), tmp_path / "run", seed=1)
    other = ArrayDataset(config(npz(tmp_path, arrays | {"labels": arrays["labels"] + 1})), tmp_path / "run", seed=1)
    assert first.fingerprint == same.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": np.arange(ROWS - 1)}, "as many rows in each column"),
        ({"labels": np.arange(ROWS) + 1}, f"from 0 to {ROWS - 1} in 'labels', found 129 to {ROWS}"),
        ({"labels": np.arange(ROWS, dtype=np.float32)}, "expected int64 in 'labels', found torch.float32"),
        ({"pixel_values": np.zeros((ROWS, 5), dtype=np.float32)}, r"rows of \(3, 2, 2\) in 'pixel_values'"),
        ({"pixel_values": np.zeros((ROWS, 2, 2, 3), dtype=np.float32)}, r"found \(2, 2, 3\)"),  # channels last
        ({"labels": np.array(3)}, "as many rows in each column"),
        ({"labels": np.array(["a"] * ROWS)}, "expected arrays as npz"),
        ({"labels": np.zeros(ROWS, dtype="datetime64[s]")}, "expected arrays as npz"),
    ],
)
def test_other_arrays_are_refused(change: dict[str, np.ndarray], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        ArrayDataset(config(npz(tmp_path, columns() | change), inputs=SHAPES), tmp_path / "run", seed=1)


@pytest.mark.parametrize(("dtype", "most"), [("uint8", 255), ("int8", 127), ("bool", 1)])
def test_integers_that_would_wrap_are_refused(dtype: str, most: int, tmp_path: Path) -> None:
    for last in (most, most + 1):
        labels = np.zeros(ROWS, dtype=np.int64)
        labels[-1] = last
        settings = config(npz(tmp_path, {"labels": labels}), inputs={"labels": dtype})
        if last > most:
            with pytest.raises(ConfigError, match=f"to {most} in 'labels', found 0 to {last}"):
                ArrayDataset(settings, tmp_path / "run", seed=1)
        else:
            assert len(ArrayDataset(settings, tmp_path / "run", seed=1)) == ROWS


@pytest.mark.parametrize("shape", ["float32 12", "float32 3 4", "float32 3 1 2 2"])
def test_a_row_may_be_flat_or_have_dims_of_one(shape: str, tmp_path: Path) -> None:
    pixels = columns()["pixel_values"]
    if shape == "float32 3 4":
        pixels = pixels.reshape(ROWS, 12)
    file = npz(tmp_path, {"x": pixels, "row": np.arange(ROWS)})
    data = ArrayDataset(config(file, inputs={"x": shape, "row": "int64"}), tmp_path / "run", seed=1)
    batch = data.batch(0, 0)
    assert torch.equal(batch["x"].flatten(1), torch.from_numpy(pixels).flatten(1)[batch["row"]])


def test_what_is_no_file_of_arrays_is_refused(tmp_path: Path) -> None:
    for name in ("data.npz", "data.safetensors", "data.parquet", "data.txt"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        with pytest.raises(ConfigError, match=r"expected (arrays as|a file that ends)"):
            ArrayDataset(config(tmp_path / name), tmp_path / "run", seed=1)
    np.savez(tmp_path / "data.npz", a=np.array([{}], dtype=object))
    with pytest.raises(ConfigError, match="expected"):
        ArrayDataset(config(tmp_path / "data.npz"), tmp_path / "run", seed=1)
    with pytest.raises(ConfigError, match="expected a column 'x'"):
        ArrayDataset(config(safetensors(tmp_path, columns()), inputs={"x": "int64"}), tmp_path / "run", seed=1)


def test_a_cut_cache_is_noticed(tmp_path: Path) -> None:
    data = ArrayDataset(config(npz(tmp_path, columns())), tmp_path / "run", seed=1)
    for path in (tmp_path / "run").glob("*.rows"):
        path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(StorageError, match="found fewer"):
        data.batch(0, 0)


def test_random_numbers_have_the_shapes_asked_for() -> None:
    asked = {"x": "bfloat16 4 5", "labels": "int64 below 3", "mask": "bool 6"}
    data = RandomDataset(DataConfig(kind="random", inputs=asked, batch_size=50), seed=2)
    batch = data.batch(0, 1)
    assert (batch["x"].dtype, batch["x"].shape) == (torch.bfloat16, (50, 4, 5))
    assert set(batch["labels"].tolist()) == {0, 1, 2}
    assert batch["mask"].all()
    assert torch.equal(batch["x"], data.batch(0, 1)["x"])
    assert not torch.equal(batch["x"], data.batch(1, 1)["x"])


@pytest.mark.parametrize(
    "text", ["", "float31 3", "float32 -1", "int64 below", "float32 below 3", "int64 below 0", "3", "int8 below 129"]
)
def test_words_that_describe_no_input(text: str) -> None:
    with pytest.raises(ConfigError, match="such as"):
        parse_input("labels", text)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "text"}, "sequence_length"),
        ({"kind": "text", "sequence_length": 4, "inputs": SHAPES}, "kind 'arrays' or 'random'"),
        ({"kind": "random"}, "inputs of the model"),
        ({"kind": "arrays"}, "files of arrays"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DataConfig(batch_size=2, **settings)
