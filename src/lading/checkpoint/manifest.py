"""Manifest of a checkpoint: what it holds, where each tensor lies in its state file, and checksums of all of that.

[Note: formats] Format 2 has checksums of chunks, and of the bytes of the manifest itself. Format 4, of a checkpoint in
place (``lading.checkpoint.swapped``), is else as 2; format 3 was the same without pieces in the state file. Format 1
had one sha256 for each tensor: to who reads it, the whole tensor is one chunk. Files of other formats are refused by
their number.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from lading.checkpoint.state import SavedBytes, SavedTensor, checksums_of, locate_damage
from lading.checkpoint.swapped import SwapPlaces
from lading.errors import ConfigError, StorageError
from lading.files import parse_json
from lading.ir.graph import DTYPE_BYTES
from lading.ir.reading import read_as

#: Raised whenever what a saved checkpoint means changes.
CHECKPOINT_FORMAT = 4
MANIFEST = "manifest.json"

_KIND = "lading checkpoint"
#: A manifest up to its body, whose bytes the checksums are of; and what ends it.
_BEGINNING = '{"kind": "lading checkpoint", "format": %d, "adler32": "%08x", "sha256": "%s", "body": '
_BEGINS = re.compile(
    rb'\{"kind": "lading checkpoint", "format": [234], "adler32": "([0-9a-f]{8})", "sha256": "([0-9a-f]{64})", "body": '
)
_ENDING = b"}\n"


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint's manifest.

    Attributes:
        chunk_bytes: Bytes that each checksum is for.
        state_bytes: Size of the state file.
        swap: Parts of a swap file that follow it, of a checkpoint in place; else None.
    """

    step: int
    meta: dict[str, Any]
    chunk_bytes: int
    state_bytes: int
    header: SavedBytes
    tensors: tuple[SavedTensor, ...]
    swap: SwapPlaces | None = None

    @property
    def end_bytes(self) -> int:
        """End of the last byte that a tensor may have."""
        return self.state_bytes + (self.swap.joined_bytes if self.swap is not None else 0)


@dataclass(frozen=True)
class _EarlierTensor:
    """Tensor in a manifest of format 1."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class _EarlierManifest:
    """Contents of a manifest of format 1."""

    step: int
    meta: dict[str, Any]
    state_bytes: int
    header_bytes: int
    header_sha256: str
    tensors: tuple[_EarlierTensor, ...]


def manifest_bytes(body: Mapping[str, Any], *, in_place: bool = False) -> bytes:
    """Write the manifest that has a body, with the checksums of the body's bytes in front; of a checkpoint in place."""
    text = json.dumps(body, indent=1).encode()
    sha256, adler32 = checksums_of(text)
    return (_BEGINNING % (4 if in_place else 2, adler32, sha256)).encode() + text + _ENDING


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint, of this format or an earlier one, and check that it can be true.

    Raises:
        StorageError: it is missing, of another format or altered, or says what no save writes.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise StorageError(f"{path.parent}: expected a checkpoint with a {MANIFEST}, found none") from error
    except OSError as error:
        raise StorageError(f"{path}: expected a manifest in JSON: {error}") from error
    try:
        if (begins := _BEGINS.match(data)) is not None:
            body = {"swap": None, **_parsed(path, _checked_body(path, data, begins))}  # as format 2 has none
            if isinstance(body["swap"], dict):
                body["swap"] = {"in_state": [], **body["swap"]}  # as format 3 has none
            manifest: Manifest = read_as(Manifest, body, str(path), "it was altered")
        else:
            manifest = _earlier(path, data)
    except ConfigError as error:
        raise StorageError(f"expected the manifest of a checkpoint: {error}") from error
    _check_places(manifest, path)
    return manifest


def _checked_body(path: Path, data: bytes, begins: re.Match[bytes]) -> bytes:
    """Bytes of a manifest's body, if they are those of its checksums."""
    if not data.endswith(_ENDING):
        raise StorageError(f"{path}: expected its last bytes to be {_ENDING!r}, found {data[-2:]!r} at {len(data) - 2}")
    body = data[begins.end() : -len(_ENDING)]
    adler32, sha256 = int(begins[1], 16), begins[2].decode()
    found_sha256, found_adler32 = checksums_of(body)
    if found_sha256 != sha256:
        if found_adler32 == adler32:  # of which the chance is one in four billions where the body was altered
            raise StorageError(f"{path}: expected sha256 {found_sha256} at {begins.start(2)}, found {sha256}")
        raise StorageError(f"{path}: {locate_damage(memoryview(body), begins.end(), len(body), sha256, adler32)}")
    if found_adler32 != adler32:
        raise StorageError(f"{path}: expected adler32 {found_adler32:08x} at {begins.start(1)}, found {adler32:08x}")
    return body


def _parsed(path: Path, data: bytes) -> dict[str, Any]:
    try:
        parsed = parse_json(data)
    except ValueError as error:
        raise StorageError(f"{path}: expected a manifest in JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise StorageError(f"{path}: expected a {_KIND}, found another file")
    return parsed


def _earlier(path: Path, data: bytes) -> Manifest:
    """Read a manifest of format 1 as one of format 2, in which each tensor is one chunk."""
    parsed = _parsed(path, data)
    if parsed.get("kind") != _KIND:
        raise StorageError(f"{path}: expected a {_KIND}, found another file")
    number = parsed.get("format")
    if type(number) is not int or not 1 <= number <= CHECKPOINT_FORMAT:
        raise StorageError(
            f"{path}: expected format 1 to {CHECKPOINT_FORMAT}, found {number!r}: another Lading wrote it"
        )
    if number > 1:
        raise StorageError(f"{path}: expected its beginning as it is written, found {data[:40]!r}: it was altered")
    body, expected = parsed.get("body"), parsed.get("sha256")
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    if digest != expected or not isinstance(body, dict):
        raise StorageError(f"{path}: expected sha256 {str(expected)[:16]}, found {digest[:16]}: it was altered")
    earlier: _EarlierManifest = read_as(_EarlierManifest, body, str(path), "it was altered")
    header = SavedBytes(0, earlier.header_bytes, (earlier.header_sha256,), ())
    tensors = tuple(
        SavedTensor(t.start, t.size_bytes, (t.sha256,) if t.size_bytes else (), (), t.name, t.dtype, t.shape)
        for t in earlier.tensors
    )
    chunk_bytes = max(earlier.state_bytes, 1)
    return Manifest(earlier.step, earlier.meta, chunk_bytes, earlier.state_bytes, header, tensors)


def _check_places(body: Manifest, path: Path) -> None:
    """Refuse what no save writes: a name twice, an unknown dtype, bytes that are not those of the shape or outside."""
    header = body.header
    if body.step < 0 or body.chunk_bytes < 1 or header.start or not 8 <= header.size_bytes <= body.state_bytes:
        raise StorageError(
            f"{path}: expected a step >= 0 and a header within {body.state_bytes} bytes, found step {body.step} and "
            f"{header.size_bytes} bytes in chunks of {body.chunk_bytes}: it was altered"
        )
    if len({entry.name for entry in body.tensors}) != len(body.tensors):
        raise StorageError(f"{path}: expected names of tensors that differ, found one twice: it was altered")
    for entry in body.tensors:
        size = prod(entry.shape) * DTYPE_BYTES.get(entry.dtype, 0) if min(entry.shape, default=0) >= 0 else -1
        within = header.size_bytes <= entry.start <= body.end_bytes - entry.size_bytes
        if entry.dtype not in DTYPE_BYTES or size != entry.size_bytes or not within:
            raise StorageError(
                f"{path}: {entry}: expected a known dtype and its bytes inside the file, found {entry.size_bytes} "
                f"bytes at {entry.start}: it was altered"
            )
    if body.swap is not None and not body.swap.are_inside(body.state_bytes):
        raise StorageError(f"{path}: expected parts inside their files, found another: it was altered")
    for saved in (header, *body.tensors):
        count = -(-saved.size_bytes // body.chunk_bytes)
        if not saved.sha256 and saved.start >= body.state_bytes:
            continue  # they are made after the save
        if len(saved.sha256) != count or len(saved.adler32) not in (0, count):
            raise StorageError(
                f"{path}: {saved}: expected {count} checksums of each kind, found {len(saved.sha256)} and "
                f"{len(saved.adler32)}: it was altered"
            )
