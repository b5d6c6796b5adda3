"""Weights in a folder: one safetensors file, or several and their index, read one tensor or one piece at a time."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lading.errors import ConfigError, StorageError
from lading.files import parse_json
from lading.permissions import check_path

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

#: Most bytes of a tensor in memory at once, where it is read in pieces.
PIECE_BYTES = 1 << 20

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class WeightFiles:
    """Tensors of a folder's safetensors files; each is read when it is asked for.

    Raises:
        ConfigError: the folder has no such files.
        StorageError: a file, or the index, is damaged or missing, or a tensor is not where the index says.
    """

    def __init__(self, folder: Path) -> None:
        check_path(folder, "model.name")
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._places: dict[str, dict[str, _Place]] = {}
        homes: dict[str, list[str]] = {}
        listed = self._index()
        for name in sorted(set(listed.values())) or [SINGLE]:
            try:
                self._places[name] = _places_of(folder / name)
                # Read, not mapped: pages of a mapped file would count as memory of the run.
                self._files[name] = safe_open(folder / name, framework="pt", backend="pread")
            except (OSError, SafetensorError, ValueError) as error:
                raise StorageError(
                    f"expected a safetensors file at {folder / name}: {one_line_message(error)}; download it again"
                ) from error
            for key in self._files[name].keys():  # noqa: SIM118 - no dict
                homes.setdefault(key, []).append(name)
        self._where = {
            key: names[0] if len(names) == 1 else self._home(key, names, listed) for key, names in homes.items()
        }
        for key, name in listed.items():
            if key not in self._places[name]:
                raise StorageError(
                    f"{folder / name}: expected {shortened(key)} in it, as {INDEX} says, found no such tensor; "
                    "download both again"
                )

    def _home(self, key: str, names: list[str], listed: Mapping[str, str]) -> str:
        """Name of the file that has a tensor; where several have it, the one that the index says."""
        if listed.get(key) not in names:
            raise StorageError(
                f"{self.folder}: expected each tensor once, found {shortened(key)} in {names[0]} and in {names[1]}; "
                f"remove one of them, or name its file in {INDEX}"
            )
        return listed[key]

    def _index(self) -> dict[str, str]:
        """File of each tensor, as the index says; empty for a single file."""
        index = self.folder / INDEX
        if not index.is_file():
            if not (self.folder / SINGLE).is_file():
                raise ConfigError(
                    f"expected {SINGLE} or {INDEX} in {self.folder}, found neither; save the weights as safetensors"
                )
            return {}
        try:
            listed = parse_json(index.read_bytes())["weight_map"]
            if not isinstance(listed, dict) or not listed:
                raise ValueError(f"expected names of tensors and files as weight_map, got {shortened(listed)}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"expected the index of safetensors files at {index}: {one_line_message(error)}; download it again"
            ) from error
        for key, name in listed.items():
            if not _is_file_name(name):
                raise StorageError(
                    f"expected the index of safetensors files at {index}: weight_map[{shortened(key)}]: expected the "
                    f"name of a file in its folder, got {shortened(name)}; download it again"
                )
        return listed

    def names(self) -> list[str]:
        """List the tensors, sorted."""
        return sorted(self._where)

    def dtype(self, key: str) -> str:
        """Name of a tensor's dtype, as the file has it: ``"BF16"``."""
        return self._place(key).dtype

    def shape(self, key: str) -> tuple[int, ...]:
        """Lengths of a tensor; nothing of it is read."""
        return self._place(key).shape

    def stored_dtype(self, key: str) -> torch.dtype:
        """Dtype of a tensor.

        Raises:
            StorageError: torch has none of that name.
        """
        name = self.dtype(key)
        if name not in _DTYPES:
            raise StorageError(
                f"{self.folder / self._where[key]}: cannot read {shortened(key)}: expected a dtype among "
                f"{', '.join(_DTYPES)}, found {shortened(name)}"
            )
        return _DTYPES[name]

    def _place(self, key: str) -> _Place:
        return self._places[self._where[key]][key]

    def bytes_of(self, key: str, low: int, high: int) -> bytearray:
        """Read the bytes of a tensor from ``low`` up to ``high``, counted in the tensor.

        Raises:
            StorageError: the file cannot be read, or ends before.
        """
        path, place = self.folder / self._where[key], self._place(key)
        data = bytearray(high - low)
        try:
            with open(path, "rb", buffering=0) as file:
                file.seek(place.start + low)
                view, num_read = memoryview(data), 0
                while num_read < len(data) and (count := file.readinto(view[num_read:])):
                    num_read += count
        except OSError as error:
            raise StorageError(f"{path}: cannot read {shortened(key)}: {one_line_message(error)}") from error
        if num_read < len(data):
            raise StorageError(
                f"{path}: cannot read {shortened(key)}: expected {len(data)} bytes from {place.start + low}, found "
                f"{num_read}; download it again"
            )
        return data

    def read(self, key: str) -> torch.Tensor:
        """Read a whole tensor.

        Raises:
            StorageError: it cannot be read.
        """
        name = self._where[key]
        try:
            return self._files[name].get_tensor(key)
        except (OSError, SafetensorError, RuntimeError, TypeError, ValueError, OverflowError) as error:
            # a type that torch lacks, or a size that it cannot have
            raise StorageError(
                f"{self.folder / name}: cannot read {shortened(key)}: {one_line_message(error)}"
            ) from error


def _is_file_name(name: object) -> bool:
    """Whether a text names a file of the folder itself, as all file systems take it."""
    if not isinstance(name, str) or not 0 < len(name.encode()) < 256 or "\0" in name:
        return False
    return Path(name).name == name and name != ".."


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a tensor in its file: the first byte, its dtype by the file's name for it, and its shape."""

    start: int
    dtype: str
    shape: tuple[int, ...]


def _places_of(path: Path) -> dict[str, _Place]:
    """Read the header of a file, and refuse one that names a tensor twice, of which safetensors reads the last.

    What else may be wrong with it safetensors tells when it opens the file.

    Raises:
        ValueError: as ``parse_json``. OSError: the file cannot be read.
    """
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            return {}
        header = parse_json(file.read(length))
    try:
        return {
            key: _Place(
                8 + length + int(entry["data_offsets"][0]), str(entry["dtype"]), tuple(map(int, entry["shape"]))
            )
            for key, entry in header.items()
            if key != "__metadata__"
        }
    except (AttributeError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise ValueError(f"a header that is none: {one_line_message(error)}") from error


@dataclass(frozen=True)
class FileTensor:
    """Tensor of a file as numbers of a dtype, read a piece at a time.

    Attributes:
        dtypes: Dtypes that the file's numbers are turned into, one after another; those of the last are read.
    """

    files: WeightFiles
    key: str
    dtypes: tuple[torch.dtype, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the tensor; nothing of it is read."""
        return self.files.shape(self.key)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the numbers as they are read."""
        return self.dtypes[-1]

    def bytes_as(self, dtype: str) -> Callable[[int, int], Iterator[memoryview]]:
        """Reader of ranges of the bytes that the numbers have in a dtype, by its name: ``"float32"``."""
        return FileTensor(self.files, self.key, (*self.dtypes, getattr(torch, dtype))).chunks

    def chunks(self, low: int, high: int) -> Iterator[memoryview]:
        """Yield the bytes from ``low`` up to ``high`` of the numbers as they are read: whole numbers.

        Raises:
            StorageError: the file cannot be read.
        """
        stored, item = self.files.stored_dtype(self.key), self.dtype.itemsize
        first, last = low // item, high // item
        step = PIECE_BYTES // max(item, stored.itemsize)
        for at in range(first, last, step):
            raw = self.files.bytes_of(self.key, at * stored.itemsize, min(last, at + step) * stored.itemsize)
            numbers = torch.frombuffer(raw, dtype=stored)
            for dtype in self.dtypes:
                numbers = numbers.to(dtype)
            yield numbers.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class StackedTensor:
    """Tensors of files as one of more dims, in which they lie one after another; read a piece at a time.

    Attributes:
        parts: The tensors, all of one shape.
        num_joined: How many of them are one entry along the first dim, laid along the second.
    """

    parts: tuple[FileTensor, ...]
    num_joined: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the whole; nothing of it is read."""
        rows, *trailing = self.parts[0].shape
        return (len(self.parts) // self.num_joined, self.num_joined * rows, *trailing)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the numbers as they are read."""
        return self.parts[0].dtype

    def bytes_as(self, dtype: str) -> Callable[[int, int], Iterator[memoryview]]:
        """Reader of ranges of the bytes that the numbers have in a dtype, by its name: ``"float32"``."""
        last = getattr(torch, dtype)
        return StackedTensor(
            tuple(FileTensor(part.files, part.key, (*part.dtypes, last)) for part in self.parts), self.num_joined
        ).chunks

    def chunks(self, low: int, high: int) -> Iterator[memoryview]:
        """Yield the bytes from ``low`` up to ``high`` of the numbers as they are read: whole numbers.

        Raises:
            StorageError: the file cannot be read.
        """
        size = prod(self.parts[0].shape) * self.dtype.itemsize
        for number in range(low // size, -(-high // size)) if size else ():
            start = number * size
            yield from self.parts[number].chunks(max(low - start, 0), min(high - start, size))


def equal_numbers(one: FileTensor | StackedTensor, other: FileTensor | StackedTensor) -> bool:
    """Whether two tensors, read as one dtype, have the same shape and numbers."""
    if one.shape != other.shape:
        return False
    size = prod(one.shape) * one.dtype.itemsize
    cuts = ((low, min(size, low + PIECE_BYTES)) for low in range(0, size, PIECE_BYTES))
    return all(b"".join(one.chunks(*cut)) == b"".join(other.chunks(*cut)) for cut in cuts)


def one_line_message(error: Exception) -> str:
    """Message of an error of transformers or safetensors, in one line of moderate length."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:300]}..."


def shortened(value: object) -> str:
    """Text of a value from a file, in ASCII and of moderate length."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
