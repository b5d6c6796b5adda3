"""Arrays as data: the columns of npz, safetensors and Parquet files, one row a sample; or numbers made up.

A column is an argument of the model's forward. Rows are copied once into a file next to the run,

    arrays-FINGERPRINT.rows    row after row, each column's bytes in turn
    arrays-FINGERPRINT.json    the columns, how many rows, and their hash; written last

and read from there, as a mapping would add its pages to the resident set that a budget is about.
"""

from __future__ import annotations

import copy
import hashlib
import json
import lzma
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import torch

from lading.config import DataConfig
from lading.errors import ConfigError, StorageError
from lading.files import make_durable_folder, parse_json, write_aside, write_text
from lading.inputs import Input, parse_input
from lading.runtime.data import Batch, Sampler, check_part, from_the_beginning, split_spans, whole_span
from lading.runtime.documents import files_of, fingerprint_of
from lading.runtime.epochs import DataPosition

_LAYOUT = 2
_WINDOWS = 0
_ROWS_AT_ONCE = 64
_FORMATS = {".npz": "npz", ".safetensors": "safetensors", ".parquet": "parquet"}
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
          "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}  # fmt: skip

#: What readers raise of a file that is damaged, or holds what are no numbers.
_UNREADABLE = (
    *(OSError, EOFError, ValueError, TypeError, KeyError, IndexError, ArithmeticError, RuntimeError, MemoryError),
    *(SyntaxError, tokenize.TokenError, struct.error, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)

#: Most bytes that rows which are unpacked together may take: so many times their file, but at least so many.
_MOST_UNPACKED, _LEAST_ALLOWED_BYTES = 10, 64 << 20

Columns = Mapping[str, Input]


def inputs_of(config: DataConfig) -> dict[str, Input]:
    """Columns of a batch by name: as ``data.inputs`` says, else as the first file's are.

    Raises:
        ConfigError: neither says it, or the file cannot be read.
    """
    if config.inputs:
        return {name: parse_input(f"data.inputs.{name}", text) for name, text in config.inputs.items()}
    if config.kind == "random":
        raise ConfigError("data.inputs: expected the inputs of the model, such as pixel_values = 'float32 3 224 224'")
    path = files_of(config.source)[0]
    try:
        columns = {"npz": _npz_columns, "safetensors": _safetensors_columns, "parquet": _parquet_columns}[_form(path)](
            path
        )
    except ConfigError:
        raise
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error
    if not columns:
        raise ConfigError(f"{path}: expected at least one column, found none")
    return columns


def made_up(columns: Columns, rows: int, seed: int, step: int, micro: int) -> Batch:
    """Draw a batch of random numbers: normal ones, integers below their limit (0 and 1 without), and masks all true.

    Source: Philox counters, as for text: step and micro-batch are the high words.
    """
    numbers = np.random.Generator(np.random.Philox(counter=[0, 0, micro, step], key=[seed, _WINDOWS]))
    batch: Batch = {}
    for name, column in columns.items():
        shape = (rows, *column.shape)
        dtype = getattr(torch, column.dtype)
        if dtype.is_floating_point:
            values = torch.from_numpy(numbers.standard_normal(shape, dtype=np.float32))
        elif dtype is torch.bool:
            values = torch.ones(shape, dtype=torch.bool)
        else:
            values = torch.from_numpy(numbers.integers(0, column.below or 2, shape))
        batch[name] = values.to(dtype)
    return batch


class RandomDataset:
    """Batches of random numbers, for a model whose data is not at hand."""

    def __init__(self, config: DataConfig, *, seed: int) -> None:
        self._columns, self._rows, self._seed = inputs_of(config), config.batch_size, seed
        self.fingerprint = f"random {self._columns}"

    def batch(self, step: int, micro: int) -> Batch:
        """Batch of micro-batch ``micro`` of step ``step``."""
        _check_place(step, micro)
        return made_up(self._columns, self._rows, self._seed, step, micro)

    def continued(self, position: DataPosition) -> Self:
        """Return these data: they are drawn."""
        return self


class ArrayDataset:
    """Rows of arrays in files.

    Args:
        folder: Folder of the run, where the rows are cached. They are made anew when a file changes.

    Raises:
        ConfigError: no files at the source, or a file has other columns than the first, or than ``data.inputs`` says.
        StorageError: the cache cannot be written.
    """

    def __init__(self, config: DataConfig, folder: Path, *, seed: int) -> None:
        self._config, self._seed = config, seed
        self._columns = dict(sorted(inputs_of(config).items()))  # as they lie in a row, however they are listed
        files = files_of(config.source)
        parts = [fingerprint_of(files), list(self._columns.items()), _LAYOUT]
        self._path = folder / f"arrays-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.rows"
        facts = _facts(self._path)
        if facts is None:
            facts = self._write(files, folder)
        self._num_rows, self.fingerprint = int(facts["rows"]), str(facts["sha256"])[:16]
        if not self._num_rows:
            raise ConfigError(f"data.source {config.source!r}: expected rows, found none")
        self._sampler = Sampler(config, seed, whole_span(self._num_rows), 1, 1, from_the_beginning(config))

    def __len__(self) -> int:
        """Number of all rows."""
        return self._num_rows

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return sum(map(_row_bytes, self._columns.values()))

    def part(self, share: float, *, held_out: bool) -> Self:
        """Rows of one side of a split: single ones that are held out, or the rest.

        Raises:
            ConfigError: there are none on that side.
        """
        rows, part = self._num_rows, copy.copy(self)
        part._sampler = self._sampler.restricted_to(split_spans(rows, share, held_out=held_out, most_pieces=rows))
        check_part(part._sampler.places, share, rows, "rows")
        return part

    def continued(self, position: DataPosition) -> Self:
        """Copy of the data as a run reads it from a position on."""
        continued = copy.copy(self)
        continued._sampler = self._sampler.continued(position)
        return continued

    def batch(self, step: int, micro: int) -> Batch:
        """Batch of micro-batch ``micro`` of step ``step``: rows chosen as windows of a text are.

        Raises:
            ConfigError: ``step`` or ``micro`` is negative.
            StorageError: the cache is gone, cut short or cannot be read.
        """
        chosen, size = self._sampler.chosen(step, micro), self.row_bytes
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                rows = [os.pread(file, size, row * size) for row in chosen]
            finally:
                os.close(file)
        except OSError as error:
            raise StorageError(
                f"cannot read the rows in {self._path}: {error.strerror}; start the run again"
            ) from error
        if any(len(row) != size for row in rows):
            raise StorageError(f"{self._path}: expected {self._num_rows * size} bytes, found fewer; delete it")
        return self._split(rows)

    def _split(self, rows: list[bytes]) -> Batch:
        batch: Batch = {}
        at = 0
        for name, column in self._columns.items():
            size = _row_bytes(column)
            data = bytearray(b"".join(row[at : at + size] for row in rows))
            at += size
            flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            batch[name] = flat.view(getattr(torch, column.dtype)).view(len(rows), *column.shape)
        return batch

    def _write(self, files: list[Path], folder: Path) -> dict[str, Any]:
        """Copy every row; the description is written last."""
        digest, count = hashlib.sha256(), 0
        try:
            make_durable_folder(folder)
            with write_aside(self._path) as file:
                for path in files:
                    for rows in _read(path, self._columns):
                        file.write(rows)
                        digest.update(rows)
                        count += len(rows) // self.row_bytes
            facts = {"rows": count, "row_bytes": self.row_bytes, "sha256": digest.hexdigest()}
            write_text(self._path.with_suffix(".json"), json.dumps(facts))
        except OSError as error:
            raise StorageError(f"cannot copy the arrays of {self._config.source!r} to {folder}: {error}") from error
        return facts


def _check_place(step: int, micro: int) -> None:
    if step < 0 or micro < 0:
        raise ConfigError(f"expected a step and a micro-batch >= 0, got {step} and {micro}")


def _facts(path: Path) -> dict[str, Any] | None:
    """Read the description of a cache; None if the cache is not there whole."""
    try:
        facts = parse_json(path.with_suffix(".json").read_bytes())
        is_complete = path.stat().st_size == int(facts["rows"]) * int(facts["row_bytes"]) and facts["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # to be made again
    return facts if is_complete else None


def _row_bytes(column: Input) -> int:
    return prod(column.shape) * torch.empty(0, dtype=getattr(torch, column.dtype)).element_size()


def _form(path: Path) -> str:
    if path.suffix not in _FORMATS:
        raise ConfigError(f"{path}: expected a file that ends in {', '.join(_FORMATS)}; see data.source")
    return _FORMATS[path.suffix]


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: expected arrays as {path.suffix.removeprefix('.')}: {error}")


def _read(path: Path, columns: Columns) -> Iterator[bytes]:
    """Read the rows of a file, some at a time, as the bytes of all columns.

    Raises:
        ConfigError: it lacks a column, or one is of another shape.
    """
    read = {"npz": _npz, "safetensors": _safetensors, "parquet": _parquet}[_form(path)]
    try:
        for group in read(path, columns):
            yield _interleaved(path, group, columns)
    except ConfigError:
        raise
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


def _interleaved(path: Path, group: Mapping[str, torch.Tensor], columns: Columns) -> bytes:
    """Bytes of the rows of a group of columns: each row has all its columns in turn."""
    parts: list[torch.Tensor] = []
    for name, column in columns.items():
        value = group[name]
        if not _is_shaped(tuple(value.shape[1:]), column.shape):
            raise ConfigError(
                f"{path}: expected rows of {column.shape} in {name!r}, found {tuple(value.shape[1:])}; see data.inputs"
            )
        _check_numbers(path, name, value, column)
        rows = value.to(getattr(torch, column.dtype)).reshape(len(value), -1).contiguous()
        parts.append(rows.view(torch.uint8) if rows.numel() else rows.to(torch.uint8))
    return torch.cat(parts, dim=1).numpy().tobytes()


def _is_shaped(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a row has a shape, dims of size 1 aside; one of a single dim is taken for any of as many numbers."""
    shape, wanted = tuple(n for n in shape if n != 1), tuple(n for n in wanted if n != 1)
    return shape == wanted or (min(len(shape), len(wanted)) < 2 and prod(shape) == prod(wanted))


def _check_numbers(path: Path, name: str, value: torch.Tensor, column: Input) -> None:
    """Refuse numbers that do not fit a column.

    Raises:
        ConfigError: the numbers are of another kind, or do not go into the column's dtype.
    """
    expected_dtype = getattr(torch, column.dtype)
    if expected_dtype.is_floating_point != value.dtype.is_floating_point or value.is_complex():
        raise ConfigError(f"{path}: expected {column.dtype} in {name!r}, found {value.dtype}; see data.inputs")
    if expected_dtype.is_floating_point or not value.numel():
        return
    low, high = (
        (0, 1) if expected_dtype is torch.bool else (torch.iinfo(expected_dtype).min, torch.iinfo(expected_dtype).max)
    )
    if column.below is not None:
        low, high = 0, column.below - 1
    numbers = value.numpy()
    smallest, largest = int(numbers.min()), int(numbers.max())
    if not low <= smallest <= largest <= high:
        raise ConfigError(
            f"{path}: expected integers from {low} to {high} in {name!r}, found {smallest} to {largest}; "
            "see data.inputs"
        )


def _same_rows(path: Path, shapes: Mapping[str, Sequence[int]]) -> int:
    counts = {name: shape[0] if len(shape) else 0 for name, shape in shapes.items()}
    if len(set(counts.values())) != 1:
        raise ConfigError(f"{path}: expected as many rows in each column, found {counts}")
    return next(iter(counts.values()))


def _missing(path: Path, columns: Columns, names: Any) -> None:
    if absent := [name for name in columns if name not in names]:
        raise ConfigError(f"{path}: expected a column {absent[0]!r}, found {sorted(names)}; see data.inputs")


def _npz_columns(path: Path) -> dict[str, Input]:
    with zipfile.ZipFile(path) as file:
        columns: dict[str, Input] = {}
        for member in file.namelist():
            with file.open(member) as data:
                version = np.lib.format.read_magic(data)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(data)
            columns[member.removesuffix(".npy")] = _column(path, member, str(dtype), shape)
    return columns


def _npz(path: Path, columns: Columns) -> Iterator[dict[str, torch.Tensor]]:
    """Read columns some rows at a time, as what a small file unpacks to may be larger than memory."""
    with zipfile.ZipFile(path) as file, ExitStack() as stack:
        members = {name.removesuffix(".npy"): name for name in file.namelist()}
        _missing(path, columns, members)
        allowed = max(_LEAST_ALLOWED_BYTES, _MOST_UNPACKED * path.stat().st_size)
        opened = {name: _NpzColumn(stack.enter_context(file.open(members[name])), allowed) for name in columns}
        count = _same_rows(path, {name: column.shape for name, column in opened.items()})
        row_bytes = sum(column.row_bytes for column in opened.values())
        if count and row_bytes > allowed:
            raise ConfigError(
                f"{path}: expected rows of at most {allowed:,} bytes in a file of {path.stat().st_size:,}, found "
                f"{row_bytes:,}; write it with numpy.savez, which does not compress"
            )
        step = max(1, min(_ROWS_AT_ONCE, allowed // max(1, row_bytes)))
        for at in range(0, count, step):
            yield {name: column.read(min(step, count - at)) for name, column in opened.items()}


class _NpzColumn:
    """Array of an npz file that is read from its first row on.

    Args:
        allowed_bytes: Most bytes of an array that lies by columns (Fortran's order), which is read as a whole.

    Raises:
        ValueError: it is no array, or one of objects.
    """

    def __init__(self, member: IO[bytes], allowed_bytes: int) -> None:
        self._member, self._at = member, 0
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        self.shape, by_columns, self._dtype = read(member)
        if self._dtype.hasobject or min(self.shape, default=0) < 0:
            raise ValueError(f"expected numbers, found {self._dtype} of shape {self.shape}")
        self._whole: np.ndarray | None = None
        if by_columns and len(self.shape) > 1:
            if (size := prod(self.shape) * self._dtype.itemsize) > allowed_bytes:
                raise ValueError(f"expected rows one after another, found {size:,} bytes by columns (Fortran's order)")
            self._whole = np.ndarray(self.shape, self._dtype, self._bytes(size), order="F")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape[1:]) * self._dtype.itemsize

    def read(self, count: int) -> torch.Tensor:
        """Next ``count`` rows.

        Raises:
            ValueError: there are fewer.
        """
        if self._whole is None:
            data = self._bytes(count * self.row_bytes)
            return torch.from_numpy(np.ndarray((count, *self.shape[1:]), self._dtype, data))
        self._at += count
        return torch.from_numpy(np.ascontiguousarray(self._whole[self._at - count : self._at]))

    def _bytes(self, size: int) -> bytearray:
        data = bytearray(self._member.read(size))
        if len(data) < size:
            raise ValueError(f"expected {size} bytes more, found {len(data)}")
        return data


def _safetensors_columns(path: Path) -> dict[str, Input]:
    with _opened(path) as file:
        columns: dict[str, Input] = {}
        for name in file.keys():  # noqa: SIM118  a safetensors file is no mapping
            part = file.get_slice(name)
            columns[name] = _column(path, name, _NAMES.get(str(part.get_dtype()), "?"), part.get_shape())
    return columns


def _safetensors(path: Path, columns: Columns) -> Iterator[dict[str, torch.Tensor]]:
    with _opened(path) as file:
        _missing(path, columns, file.keys())
        parts = {name: file.get_slice(name) for name in columns}
        count = _same_rows(path, {name: part.get_shape() for name, part in parts.items()})
        for at in range(0, count, _ROWS_AT_ONCE):
            yield {name: part[at : min(count, at + _ROWS_AT_ONCE)] for name, part in parts.items()}


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", backend="pread")
    except SafetensorError as error:
        raise _unreadable(path, error) from error


def _parquet_columns(path: Path) -> dict[str, Input]:
    for group in _parquet(path, None):
        return {name: _column(path, name, str(v.dtype).removeprefix("torch."), v.shape) for name, v in group.items()}
    raise ConfigError(f"{path}: expected rows, found none")


def _parquet(path: Path, columns: Columns | None) -> Iterator[dict[str, torch.Tensor]]:
    """Read columns of numbers, or of lists of as many numbers in each row, some rows at a time."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{path}: reading Parquet needs pyarrow: pip install 'lading[data]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            names = list(file.schema_arrow.names)
            _missing(path, columns or {}, names)
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=list(columns or names)):
                yield {name: _from_arrow(path, name, batch.column(name)) for name in (columns or names)}
    except pyarrow.ArrowException as error:
        raise _unreadable(path, error) from error


def _from_arrow(path: Path, name: str, values: Any) -> torch.Tensor:
    from pyarrow import compute, types

    lengths_of: Any = compute.__dict__["list_value_length"]  # made at import, which type checkers do not see
    rows = len(values)
    while types.is_list(values.type) or types.is_large_list(values.type) or types.is_fixed_size_list(values.type):
        if values.null_count or len(lengths_of(values).unique()) > 1:
            raise ConfigError(f"{path}: expected as many numbers in every row of {name!r}")
        values = values.flatten()
    if values.null_count:
        raise ConfigError(f"{path}: expected a value in every row of {name!r}, found {values.null_count} without")
    flat = np.array(values.to_numpy(zero_copy_only=False))  # one of our own, as torch wants to write
    if flat.dtype == object:
        raise ConfigError(f"{path}: expected numbers in {name!r}, found {values.type}")
    return torch.from_numpy(flat).view(rows, -1) if len(flat) != rows else torch.from_numpy(flat)


def _column(path: Path, name: str, dtype: str, shape: Any) -> Input:
    if len(shape) < 1:
        raise ConfigError(f"{path}: expected one row a sample in {name!r}, found a single number")
    return parse_input(f"{path}: {name}", " ".join([dtype, *map(str, shape[1:])]))
