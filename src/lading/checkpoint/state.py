"""The state file of a checkpoint: the safetensors format, written in a stream in constant memory."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lading.errors import ConfigError, StorageError
from lading.ir.graph import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

#: Most bytes of a tensor in memory at once, while reading or writing.
CHUNK_BYTES = 1 << 20

_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "complex64": "C64", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip

#: A tensor to save: name, dtype (``"float32"``), shape, and its bytes in order, in any number of chunks.
TensorSource = tuple[str, str, Sequence[int], Iterable[memoryview]]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Place of a tensor in the state file, in bytes, and the hash of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int
    sha256: str

    def __str__(self) -> str:
        return f"tensor {self.name!r} ({self.dtype} {list(self.shape)})"


def tensor_source(name: str, tensor: torch.Tensor) -> TensorSource:
    """Make a source of a tensor in memory for ``save_checkpoint``; its bytes are taken when they are written.

    A tensor that is not contiguous, or lies on a GPU, is copied while it is written.
    """
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _TensorChunks(tensor)


@dataclass(frozen=True, eq=False)
class _TensorChunks:
    tensor: torch.Tensor

    def __iter__(self) -> Iterator[memoryview]:
        import torch

        flat = self.tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), CHUNK_BYTES):
            yield flat[start : start + CHUNK_BYTES].cpu().numpy().data


class _Output:
    """File written in whole blocks, past the page cache where the file system allows that."""

    def __init__(self, path: Path) -> None:
        self.block = mmap.mmap(-1, CHUNK_BYTES)  # page-aligned, as O_DIRECT wants
        self.filled = 0
        self.size_bytes = 0
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            self._set_direct(True)
        except BaseException:
            self.close()
            raise

    def _set_direct(self, direct: bool) -> None:
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, getattr(os, "O_DIRECT", 0) if direct else 0)
        except OSError as error:
            if error.errno != errno.EINVAL:  # tmpfs and others have only the page cache
                raise

    def write(self, data: memoryview) -> None:
        self.size_bytes += data.nbytes
        while data:
            count = min(len(data), CHUNK_BYTES - self.filled)
            self.block[self.filled : self.filled + count] = data[:count]
            self.filled += count
            data = data[count:]
            if self.filled == CHUNK_BYTES:
                self._flush()

    def _flush(self) -> None:
        with memoryview(self.block) as view:
            done = 0
            while done < self.filled:
                done += os.write(self.fd, view[done : self.filled])
        self.filled = 0

    def sync(self) -> None:
        """Write the last, partial block and wait for the disk."""
        self._set_direct(False)
        self._flush()
        os.fsync(self.fd)

    def close(self) -> None:
        os.close(self.fd)


def checked_sources(tensors: Iterable[TensorSource]) -> list[TensorSource]:
    """Sort the sources in the order of the file: by falling element size, which aligns every tensor.

    Raises:
        ConfigError: a name twice or reserved, an unknown dtype, a negative size.
    """
    sources = list(tensors)
    names: set[str] = set()
    for name, dtype, shape, _ in sources:
        if name in names or name == "__metadata__":
            raise ConfigError(f"expected tensor names that differ, got {name!r} twice or reserved")
        if dtype not in _SAFETENSORS:
            raise ConfigError(f"tensor {name!r}: expected a dtype among {', '.join(_SAFETENSORS)}, got {dtype!r}")
        if any(size < 0 for size in shape):
            raise ConfigError(f"tensor {name!r}: expected sizes >= 0, got {tuple(shape)}")
        names.add(name)
    return sorted(sources, key=lambda source: -DTYPE_BYTES[source[1]])


def source_bytes(source: TensorSource) -> int:
    """Bytes that a source's tensor takes in the file."""
    return prod(source[2]) * DTYPE_BYTES[source[1]]


def _header(sources: Sequence[TensorSource], step: int) -> bytes:
    """Write the length and header of a safetensors file, padded to 8 bytes.

    Source: https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(step)}}
    end = 0
    for source in sources:
        start, end = end, end + source_bytes(source)
        name, dtype, shape, _ = source
        header[name] = {"dtype": _SAFETENSORS[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_state(path: Path, sources: Sequence[TensorSource], step: int) -> dict[str, Any]:
    """Write the state file and wait for the disk; returns its part of the manifest.

    Raises:
        StorageError: the chunks of a tensor do not add up to its size.
        OSError: as the file system says.
    """
    header = _header(sources, step)
    output = _Output(path)
    try:
        output.write(memoryview(header))
        saved = [asdict(_write_tensor(output, source)) for source in sources]
        output.sync()
    finally:
        output.close()
    return {
        "state_bytes": output.size_bytes,
        "header_bytes": len(header),
        "header_sha256": hashlib.sha256(header).hexdigest(),
        "tensors": saved,
    }


def _write_tensor(output: _Output, source: TensorSource) -> SavedTensor:
    name, dtype, shape, chunks = source
    start, digest = output.size_bytes, hashlib.sha256()
    for chunk in chunks:
        if chunk.nbytes:
            data = chunk.cast("B")
            digest.update(data)
            output.write(data)
    found, expected = output.size_bytes - start, source_bytes(source)
    if found != expected:
        raise StorageError(f"tensor {name!r} ({dtype} {list(shape)}): expected {expected} bytes to save, got {found}")
    return SavedTensor(name, dtype, tuple(shape), start, expected, digest.hexdigest())
