"""What a file says, read a second time by the shortest reader there is: an accepted file has to mean just that."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from lading.catalog.load import load_machine
from lading.checkpoint.store import open_checkpoint
from lading.config import load_run, run_to_dict
from lading.ir.plan import Plan
from lading.models.weight_files import INDEX, WeightFiles
from lading.runtime.arrays import ArrayDataset

#: Names of dtypes in the header of a safetensors file, as numpy has them.
_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8",
    "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


def read_json_once(content: bytes) -> Any:
    """Parse JSON in which no table has a key twice, as that would mean either of two things."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        assert len(made) == len(pairs), f"a key is there twice in {[key for key, _ in pairs]}"
        return made

    return json.loads(content, object_pairs_hook=table)


def difference(said: Any, meant: Any, where: str = "") -> str:
    """Name the first place in which a value is not what a document says, and what is left to a default is another.

    Args:
        said: A document of JSON or TOML, or a part of it.
        meant: What was read of it: plain values, or objects whose fields are its keys.
    """
    if dataclasses.is_dataclass(meant) and not isinstance(meant, type):
        return _difference_of_fields(said, meant, where)
    if isinstance(meant, Mapping) and isinstance(said, dict):
        if meant.keys() != said.keys():
            return f"{where}: {sorted(map(str, meant.keys() ^ said.keys()))}"
        named = cast("dict[str, Any]", said).items()
        return next((found for key, value in named if (found := difference(value, meant[key], f"{where}.{key}"))), "")
    if isinstance(meant, (list, tuple)) and isinstance(said, list):
        if len(said) != len(meant):
            return f"{where}: {len(said)} and {len(meant)} entries"
        pairs = enumerate(zip(said, cast("list[Any]", meant), strict=True))
        return next((found for n, (a, b) in pairs if (found := difference(a, b, f"{where}[{n}]"))), "")
    if isinstance(said, (int, float)) and isinstance(meant, (int, float)):
        same = said == meant or (isinstance(meant, float) and _as_float(said, meant))
        return "" if same and isinstance(said, bool) is isinstance(meant, bool) else f"{where}: {said!r}, {meant!r}"
    return "" if said == meant else f"{where}: {said!r:.80}, {meant!r:.80}"


def _as_float(said: float, meant: float) -> bool:
    """Whether a number of a file is read as this one, an integer rounded."""
    return float(said) == meant or (math.isnan(said) and math.isnan(meant))


def _difference_of_fields(said: Any, meant: Any, where: str) -> str:
    if not isinstance(said, dict):
        return f"{where}: {said!r:.80}, {meant!r:.80}"
    table = cast("dict[str, Any]", said)
    fields = {field.name: field for field in dataclasses.fields(meant)}
    if strangers := table.keys() - fields.keys():
        return f"{where}: {sorted(strangers)}"
    for name, field in fields.items():
        value = getattr(meant, name)
        if name in table:
            found = difference(table[name], value, f"{where}.{name}")
        elif field.default is not dataclasses.MISSING:
            found = "" if value == field.default else f"{where}.{name}: not in the file, {value!r:.80}"
        else:
            found = "" if value == cast(Any, field).default_factory() else f"{where}.{name}: not in the file"
        if found:
            return found
    return ""


def read_plan(path: Path) -> None:
    """Read a plan, whose every field is in its file."""
    plan = Plan.load(path)
    assert not (found := difference(read_json_once(path.read_bytes()), plan.to_dict())), found


def read_machine(path: Path) -> None:
    """Read a machine."""
    machine = load_machine(path)
    assert not (found := difference(tomllib.loads(path.read_text()), machine)), found


def read_run(path: Path) -> None:
    """Read a run, whose rule for parameters is a table with its name."""
    run, said = load_run(path), tomllib.loads(path.read_text())
    rule = run_to_dict(run)["optimization"]["optimizer"]
    named: Any = cast("dict[str, Any]", said).get("optimization", {}).pop("optimizer", {})
    run = dataclasses.replace(run, optimization=dataclasses.replace(run.optimization))
    for name, value in named.items():
        assert not (found := difference(value, rule[name], f"optimization.optimizer.{name}")), found
    table = dataclasses.asdict(run)
    del table["optimization"]["optimizer"]
    assert not (found := _missing_or_other(said, table)), found


def _missing_or_other(said: dict[str, Any], meant: dict[str, Any], where: str = "") -> str:
    """As ``difference``, of tables whose keys need not all be in the file."""
    for key, value in said.items():
        if key not in meant:
            return f"{where}.{key}: ignored"
        inner = meant[key]
        if isinstance(value, dict) and isinstance(inner, dict):
            found = _missing_or_other(cast("dict[str, Any]", value), cast("dict[str, Any]", inner), f"{where}.{key}")
        else:
            found = difference(value, inner, f"{where}.{key}")
        if found:
            return found
    return ""


def read_checkpoint(folder: Path) -> None:
    """Read a checkpoint all of whose bytes are as its manifest says."""
    opened = open_checkpoint(folder)
    opened.verify()
    body = read_json_once((folder / "manifest.json").read_bytes())["body"]
    state = (folder / "state.safetensors").read_bytes()
    assert not (found := difference(body["step"], opened.step) or difference(body["meta"], opened.meta)), found
    assert opened.tensors.keys() == {told["name"] for told in body["tensors"]}
    for told in body["tensors"]:
        tensor = opened.read(told["name"])
        assert str(tensor.dtype) == f"torch.{told['dtype']}"
        assert list(tensor.shape) == told["shape"]
        assert raw(tensor) == state[told["start"] : told["start"] + told["size_bytes"]]


def raw(tensor: torch.Tensor) -> bytes:
    """Bytes of a tensor's numbers."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def safetensors_of(path: Path) -> dict[str, tuple[tuple[int, ...], bytes, str]]:
    """Shape, bytes and dtype of each tensor of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = read_json_once(content[8 : 8 + length])
    header.pop("__metadata__", None)
    data = content[8 + length :]
    return {
        name: (tuple(told["shape"]), data[slice(*told["data_offsets"])], told["dtype"]) for name, told in header.items()
    }


def check_weights(folder: Path) -> None:
    """Read a folder of weights: the tensors of the files that its index names, each from there."""
    files = WeightFiles(folder)
    where = read_json_once((folder / INDEX).read_bytes())["weight_map"]
    each = {name: safetensors_of(folder / name) for name in set(where.values())}
    assert set(files.names()) == {key for tensors in each.values() for key in tensors}
    for key in files.names():
        homes = [tensors for tensors in each.values() if key in tensors]
        shape, data, _ = (homes[0] if len(homes) == 1 else each[where[key]])[key]
        assert tuple(files.shape(key)) == shape
        assert raw(files.read(key)) == data
        assert bytes(files.bytes_of(key, 0, len(data))) == data
    for key, name in where.items():
        assert key in each[name], f"the index says that {key!r} is in {name!r}"


def check_arrays(dataset: ArrayDataset, path: Path, original: Mapping[str, np.ndarray]) -> None:
    """Compare all rows that were read of a file with what numpy reads, or the header of safetensors says."""
    size = dataset.row_bytes
    content = dataset._path.read_bytes()
    found = dataset._split([content[at : at + size] for at in range(0, len(content), size)])
    for name, value in found.items():
        expected = _column(path, name, original)
        assert tuple(value.shape) == expected.shape
        assert raw(value) == expected.tobytes() or _equal_numbers(value, expected), name


def _equal_numbers(value: torch.Tensor, expected: np.ndarray) -> bool:
    return np.array_equal(value.numpy(), expected, equal_nan=expected.dtype.kind == "f")


def _column(path: Path, name: str, original: Mapping[str, np.ndarray]) -> np.ndarray:
    if path.suffix == ".safetensors":
        shape, data, dtype = safetensors_of(path)[name]
        return np.frombuffer(data, _DTYPES[dtype]).reshape(shape)
    try:
        with np.load(path, allow_pickle=False) as loaded:
            return loaded[name]
    except Exception:  # numpy refuses more: what is read all the same has to be what was written
        return original[name]
