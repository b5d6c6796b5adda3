"""State file of a checkpoint: the safetensors format, written and read in a stream in constant memory.

[Note: checksums of chunks] Each ``CHUNK_BYTES`` of a tensor, and of the header, have a sha256, which says whether
they are what was saved, before anybody sees them. They also have an adler32, whose two sums over the bytes give the
place and the value of a single byte that was altered; the sha256 of the bytes with that one put back proves it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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


#: Modulus of the two sums of an adler32.
_ADLER = 65521


class Readable(Protocol):
    """Bytes of a file, read from a place on."""

    def seek(self, offset: int, /) -> int:
        """Go to a byte."""
        ...

    def readinto(self, target: memoryview, /) -> int | None:
        """Read up to as much as there is room for; 0 at the end."""
        ...


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Place of a run of bytes in a file, and the checksums of its chunks, in order.

    Attributes:
        start: Its first byte in the file.
        sha256: In hexadecimal digits; one for each chunk, or none where they are not made yet.
        adler32: One for each chunk; none where the file is of format 1.
    """

    start: int
    size_bytes: int
    sha256: tuple[str, ...]
    adler32: tuple[int, ...]

    def __str__(self) -> str:
        return "the header"

    def part(self, start: int, end: int, chunk_bytes: int) -> SavedBytes:
        """Find the chunks that hold the bytes from ``start`` up to ``end`` of this run."""
        first, last = start // chunk_bytes, -(-min(end, self.size_bytes) // chunk_bytes)
        size_bytes = max(0, min(last * chunk_bytes, self.size_bytes) - first * chunk_bytes)
        chunks = slice(first, last)
        return SavedBytes(self.start + first * chunk_bytes, size_bytes, self.sha256[chunks], self.adler32[chunks])


@dataclass(frozen=True, slots=True)
class SavedTensor(SavedBytes):
    """Place of a tensor in the state file, in bytes, and the checksums of its chunks."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Hash of the tensor's bytes, by that of its chunks."""
        return hashlib.sha256(" ".join(self.sha256).encode()).hexdigest()

    def __str__(self) -> str:
        return f"tensor {self.name!r} ({self.dtype} {list(self.shape)})"


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a file that are not those that were saved, or are missing.

    Attributes:
        start: The first of them in the file.
        end: The byte after the last.
        words: What was expected there, and what was found.
    """

    start: int
    end: int
    words: str

    def __str__(self) -> str:
        return self.words


class Checksums:
    """Checksums of a stream of bytes, chunk by chunk."""

    def __init__(self) -> None:
        self.sha256, self.adler32 = list[str](), list[int]()
        self._digest, self._adler, self._filled = hashlib.sha256(), 1, 0

    def update(self, data: memoryview) -> None:
        """Add the bytes that follow."""
        while data:
            part = data[: CHUNK_BYTES - self._filled]
            self._digest.update(part)
            self._adler = zlib.adler32(part, self._adler)
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == CHUNK_BYTES:
                self._end()

    def end(self) -> dict[str, Any]:
        """End the last chunk; returns the fields of ``SavedBytes`` that are checksums."""
        if self._filled:
            self._end()
        return {"sha256": tuple(self.sha256), "adler32": tuple(self.adler32)}

    def _end(self) -> None:
        self.sha256.append(self._digest.hexdigest())
        self.adler32.append(self._adler)
        self._digest, self._adler, self._filled = hashlib.sha256(), 1, 0


def checksums_of(data: bytes) -> tuple[str, int]:
    """Compute the two checksums of one chunk: sha256 in hexadecimal digits, and adler32."""
    return hashlib.sha256(data).hexdigest(), zlib.adler32(data)


def read_chunks(file: Readable, saved: SavedBytes, chunk_bytes: int) -> Iterator[tuple[memoryview, Damage | None]]:
    """Read a run of bytes in pieces of at most ``CHUNK_BYTES``, each with the damage that is known by then.

    A piece is valid until the next is asked for. Chunks of at most ``CHUNK_BYTES`` are compared before they are
    yielded, larger ones at their end. What is missing at the end of the file is one damage, and the last.

    Args:
        chunk_bytes: Bytes that each checksum is for, the last chunk's are fewer.

    Raises:
        OSError: as the file system says.
    """
    buffer, num_done = memoryview(bytearray(min(saved.size_bytes, CHUNK_BYTES))), 0
    digest = hashlib.sha256()
    file.seek(saved.start)
    while num_done < saved.size_bytes:
        number = num_done // chunk_bytes
        first, end = number * chunk_bytes, min(saved.size_bytes, (number + 1) * chunk_bytes)
        piece = buffer[: min(CHUNK_BYTES, end - num_done)]
        if (count := _fill(file, piece)) < len(piece):
            at, last = saved.start + num_done + count, saved.start + saved.size_bytes
            missing = f"expected bytes {at} to {last - 1} of the file, found its end"
            yield piece[:count], Damage(at, last, missing)
            return
        digest.update(piece)
        num_done += count
        damage = None
        if num_done == end:
            if saved.sha256 and digest.hexdigest() != saved.sha256[number]:
                adler32 = saved.adler32[number] if saved.adler32 else None
                complete_chunk = piece if len(piece) == end - first else None
                damage = locate_damage(complete_chunk, saved.start + first, end - first, saved.sha256[number], adler32)
            digest = hashlib.sha256()
        yield piece, damage


def _fill(file: Readable, target: memoryview) -> int:
    """Read until ``target`` is full or the file ends; returns the bytes read."""
    count = 0
    while count < len(target) and (more := file.readinto(target[count:])):
        count += more
    return count


def locate_damage(data: memoryview | None, start: int, size_bytes: int, sha256: str, adler32: int | None) -> Damage:
    """Tell which bytes of a chunk are not those of its checksums: the one that was altered, or else the whole chunk.

    Args:
        data: The chunk as it was found; None where it is too large to have been kept.
        start: Its first byte in the file.
    """
    words = f"expected bytes {start} to {start + size_bytes - 1} of the file of sha256 {sha256[:16]}, found others"
    if data is None or adler32 is None or size_bytes > CHUNK_BYTES:
        return Damage(start, start + size_bytes, words)
    checksum = zlib.adler32(data)
    low, high = ((checksum & 0xFFFF) - (adler32 & 0xFFFF)) % _ADLER, ((checksum >> 16) - (adler32 >> 16)) % _ADLER
    excess = low if low < 256 else low - _ADLER  # of the altered byte
    if excess and abs(excess) < 256:
        repaired = bytearray(data)
        for from_end in range(high * pow(excess, -1, _ADLER) % _ADLER, size_bytes + 1, _ADLER):
            at = size_bytes - from_end
            if from_end and 0 <= (saved := data[at] - excess) < 256:
                repaired[at] = saved
                if hashlib.sha256(repaired).hexdigest() == sha256:
                    words = f"expected byte {start + at} of the file to be 0x{saved:02x}, found 0x{data[at]:02x}"
                    return Damage(start + at, start + at + 1, words)
                repaired[at] = data[at]
    return Damage(start, start + size_bytes, words)


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
            num_written = 0
            while num_written < self.filled:
                num_written += os.write(self.fd, view[num_written : self.filled])
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
    header = memoryview(_header(sources, step))
    checksums = Checksums()
    checksums.update(header)
    output = _Output(path)
    try:
        output.write(header)
        saved = [asdict(_write_tensor(output, source)) for source in sources]
        output.sync()
    finally:
        output.close()
    return {
        "chunk_bytes": CHUNK_BYTES,
        "state_bytes": output.size_bytes,
        "header": asdict(SavedBytes(0, len(header), **checksums.end())),
        "tensors": saved,
    }


def _write_tensor(output: _Output, source: TensorSource) -> SavedTensor:
    name, dtype, shape, chunks = source
    start, checksums = output.size_bytes, Checksums()
    for chunk in chunks:
        if chunk.nbytes:
            data = chunk.cast("B")
            checksums.update(data)
            output.write(data)
    num_written, expected = output.size_bytes - start, source_bytes(source)
    if num_written != expected:
        raise StorageError(
            f"tensor {name!r} ({dtype} {list(shape)}): expected {expected} bytes to save, got {num_written}"
        )
    return SavedTensor(start, expected, **checksums.end(), name=name, dtype=dtype, shape=tuple(shape))
