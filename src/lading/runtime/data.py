"""Byte-level batches from real text, with no download and no tokenizer: token = byte, vocabulary 256.

The text lies in two cache files, one a split, of which each batch reads its windows and nothing else: a mapping would
add the neighbouring pages of every window to the resident set that a budget is about. A batch is a pure function of
(seed, split, step, micro-batch): resuming needs no state.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from lading.config import STDLIB, DataConfig
from lading.errors import ConfigError, StorageError

VOCABULARY = 256

#: Share of the files, or of the bytes of a single file, that is validation.
_VALIDATION_SHARE = 0.1
_CHUNK_BYTES = 1 << 20
_NOT_TEXT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

Split = Literal["train", "validation"]


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes ``start`` to ``stop`` of a file."""

    path: Path
    start: int
    stop: int


class ByteDataset:
    """Random windows of a text.

    Args:
        config: Source, sequence length T and batch size B.
        cache_folder: Where the cache files go: the run's folder. They are made anew when the source changes.
        seed: Seed of the windows.
        split: "train", or "validation": a tenth of the files, chosen by the hash of their content; for a single
            file its last tenth.
    Raises:
        ConfigError: no text at the source, or a split shorter than T + 1 bytes.
        StorageError: the cache cannot be written.
    """

    def __init__(self, config: DataConfig, cache_folder: Path, *, seed: int, split: Split = "train") -> None:
        self._path = path = _cached(config.source, cache_folder)[split]
        self.config = config
        self.split: Split = split
        self._key = [seed, ("train", "validation").index(split)]
        self._size_bytes = path.stat().st_size
        self._num_starts = self._size_bytes - config.sequence_length
        if self._num_starts < 1:
            raise ConfigError(
                f"data.source {config.source!r}: expected at least {config.sequence_length + 1} bytes of {split} text, "
                f"got {self._size_bytes}; give more text or a smaller data.sequence_length"
            )

    def __len__(self) -> int:
        """Bytes of the split."""
        return self._size_bytes

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the text: a run that goes on with another text would have another loss curve."""
        return _hash(self._path).hex()[:16]

    def batch(self, step: int, micro: int) -> dict[str, torch.Tensor]:
        """The micro-batch ``micro`` of step ``step``: ``{"tokens": int64 (B, T + 1)}``, targets shifted by one.

        Source: Philox counters (Salmon et al., SC'11): step and micro-batch are the high words of the counter, so no
            two batches share a random number; its raw words do not change between numpy versions.
        Raises:
            ConfigError: ``step`` or ``micro`` is negative.
            StorageError: the cache file is gone, cut short or cannot be read.
        """
        if step < 0 or micro < 0:
            raise ConfigError(f"expected a step and a micro-batch >= 0, got {step} and {micro}")
        raw = np.random.Philox(counter=[0, 0, micro, step], key=self._key).random_raw(self.config.batch_size)
        windows = self._read((raw % np.uint64(self._num_starts)).tolist())
        return {"tokens": torch.from_numpy(windows.astype(np.int64))}

    def _read(self, starts: list[int]) -> np.ndarray:
        """The window at each start, uint8 (B, T + 1)."""
        length = self.config.sequence_length + 1
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                windows = [os.pread(file, length, start) for start in starts]
            finally:
                os.close(file)
        except OSError as error:
            raise StorageError(
                f"cannot read the text in {self._path}: {error.strerror}; start the run again"
            ) from error
        if any(len(window) != length for window in windows):
            raise StorageError(f"{self._path}: expected {self._size_bytes} bytes, found fewer; delete it and run again")
        return np.frombuffer(b"".join(windows), dtype=np.uint8).reshape(-1, length)


def _cached(source: str, folder: Path) -> dict[Split, Path]:
    """The cache file of each split, written if it is not there."""
    files = _files(source)
    name = _fingerprint(files)
    paths: dict[Split, Path] = {s: folder / f"{s}-{name}.bytes" for s in ("train", "validation")}
    if all(path.exists() for path in paths.values()):
        return paths
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split, spans in _split(files).items():
            _write(paths[split], spans)
    except OSError as error:
        raise StorageError(f"cannot copy the text of {source!r} to {folder}: {error}") from error
    return paths


def _files(source: str) -> list[Path]:
    """The files of a source, sorted by relative path."""
    root = Path(sysconfig.get_path("stdlib") if source == STDLIB else source)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ConfigError(f"data.source: expected 'stdlib', a folder or a file, got {source!r}, which does not exist")
    paths = sorted(_walk(root, python_only=source == STDLIB), key=lambda path: path.relative_to(root).as_posix())
    if not paths:
        raise ConfigError(f"data.source: expected files with text in {root}, found none")
    return paths


def _walk(root: Path, *, python_only: bool) -> Iterator[Path]:
    """Files below ``root`` that are not empty and not hidden; of the library only its own source, without tests."""
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".") and not (python_only and f in _NOT_TEXT)]
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            if (path.suffix == ".py" or not python_only) and path.is_file() and path.stat().st_size:
                yield path


def _fingerprint(files: Iterable[Path]) -> str:
    """Changes when a file does."""
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def _split(files: list[Path]) -> dict[Split, list[_Span]]:
    """Validation is the tenth of the files with the smallest hashes of content, at least one; order is kept."""
    if len(files) == 1:
        size = files[0].stat().st_size
        cut = size - round(size * _VALIDATION_SHARE)
        return {"train": [_Span(files[0], 0, cut)], "validation": [_Span(files[0], cut, size)]}
    by_hash = sorted(files, key=_hash)
    chosen = set(by_hash[: max(1, round(len(files) * _VALIDATION_SHARE))])
    spans = {path: _Span(path, 0, path.stat().st_size) for path in files}
    return {
        "train": [spans[path] for path in files if path not in chosen],
        "validation": [spans[path] for path in files if path in chosen],
    }


def _hash(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _write(path: Path, spans: list[_Span]) -> None:
    """The spans one after the other, a zero byte between two; complete or absent."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb") as out:
            for number, span in enumerate(spans):
                out.write(b"\0" if number else b"")
                with open(span.path, "rb") as file:
                    file.seek(span.start)
                    for _ in range(span.start, span.stop, _CHUNK_BYTES):
                        out.write(file.read(min(_CHUNK_BYTES, span.stop - file.tell())))
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
