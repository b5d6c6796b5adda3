"""Lists of checkpoints: which are there, what they take, and whether their bytes were verified since they were saved.

step-00000050/verified.json     when all bytes were read, by which manifest, and how many places were damaged
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lading.checkpoint.lock import read_lock
from lading.checkpoint.manifest import MANIFEST
from lading.checkpoint.store import (
    BEST,
    NEWEST,
    SET_ASIDE,
    checkpoint_folders,
    described_checkpoint,
    inspect_checkpoint,
    step_of,
)
from lading.errors import ConfigError, StorageError
from lading.files import parse_json, write_text

VERIFIED = "verified.json"


@dataclass(frozen=True)
class ListedCheckpoint:
    """Row of a list of checkpoints.

    Attributes:
        size_bytes: Bytes of its files; 0 where the system does not let them be looked at.
        saved_s: When it was saved, in seconds since 1970; None where that cannot be told.
        verified_s: When all its bytes were last read and compared; None if nobody has looked since it was saved.
        damage: What is wrong with its manifest, header or size, or was found when it was verified; "" where nothing is.
    """

    path: Path
    step: int
    size_bytes: int
    saved_s: float | None
    verified_s: float | None
    damage: str


def find_checkpoints(folder: Path) -> list[Path]:
    """Find the checkpoints of a folder by step: its own, or those of a run; a checkpoint alone is itself.

    Raises:
        ConfigError: there is none.
        StorageError: the folder cannot be read.
    """
    if (folder / MANIFEST).exists() or (step_of(folder) >= 0 and folder.is_dir()):
        return [folder]
    paths = [path for place in (folder, folder / NEWEST, folder / BEST) for path in reversed(checkpoint_folders(place))]
    if not paths:
        raise ConfigError(
            f"expected a checkpoint, a folder of checkpoints or the out folder of a run, found none in {str(folder)!r}"
        )
    return paths


def list_checkpoint(path: Path) -> ListedCheckpoint | None:
    """Describe a checkpoint, of which only the manifest and the header are read; None if a save has deleted it."""
    step, damage = -1, ""
    try:
        step = described_checkpoint(path).step
        inspect_checkpoint(path)
    except StorageError as error:
        damage = str(error)
    size_bytes, saved_s = 0, None
    try:
        size_bytes = _bytes_in(path)
        manifest = path / MANIFEST
        saved_s = (manifest if manifest.exists() else path).stat().st_mtime
    except FileNotFoundError:
        if not os.path.lexists(path):
            return None
    except OSError as error:
        damage = damage or f"cannot look at {path}: {error.strerror}; check its permissions"
    verified_s, places = _verified(path)
    if places and not damage:
        damage = f"{places} place{'s' * (places > 1)}, found by lading checkpoint verify"
    return ListedCheckpoint(path, step, size_bytes, saved_s, verified_s, damage)


def unfinished_bytes(folder: Path) -> int:
    """Bytes of checkpoints in a folder that are being written or deleted, or were when their process was killed."""
    return _bytes_of(folder, ".tmp-")


def set_aside_bytes(folder: Path) -> int:
    """Bytes of checkpoints in a folder that were set aside when their run went on from an earlier one."""
    return _bytes_of(folder, SET_ASIDE)


def _bytes_of(folder: Path, mark: str) -> int:
    try:
        asides = [path for path in folder.iterdir() if path.name.startswith("step-") and mark in path.name]
    except OSError as error:
        raise StorageError(f"cannot look at {folder}: {error.strerror}; check its permissions") from error
    total = 0
    for path in asides:
        with suppress(FileNotFoundError):  # a save has ended meanwhile
            total += _bytes_in(path)
    return total


def _bytes_in(path: Path) -> int:
    """Bytes of the files in a folder, or of a file in its place; of a file that goes meanwhile none.

    Raises:
        OSError: as the file system says; FileNotFoundError where the folder is gone.
    """
    if not path.is_dir():
        return path.stat().st_size
    total = 0
    for entry in path.iterdir():
        with suppress(FileNotFoundError):
            total += entry.stat().st_size
    return total


def verify_checkpoint(path: Path) -> Iterator[str]:
    """Read all bytes of a checkpoint, and name those that are not what was saved: file, tensor and place in the file.

    Notes the result beside it, for a list; where nothing can be written there, there is none. Of one that a save has
    deleted meanwhile nothing is said.
    """
    damaged = 0
    try:
        with read_lock(path) as folder:
            for words in replace(described_checkpoint(path), folder=folder).damages():
                damaged += 1
                yield words
    except OSError as error:
        if os.path.lexists(path):
            damaged += 1
            yield str(error)
    try:
        note = {"manifest": _digest(path), "at_s": time.time(), "damaged": damaged}
        write_text(path / VERIFIED, json.dumps(note) + "\n")
    except OSError:  # of a read-only disk or another user, or without a manifest: it has been verified all the same
        return


def _digest(path: Path) -> str:
    return hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()


def _verified(path: Path) -> tuple[float | None, int]:
    """When a checkpoint's bytes were last verified, and the places that were damaged; None without a note of that."""
    try:
        noted = parse_json((path / VERIFIED).read_bytes())
        is_same = isinstance(noted, dict) and noted.get("manifest") == _digest(path)
    except (OSError, ValueError):
        return None, 0
    at_s, damaged = (noted.get("at_s"), noted.get("damaged")) if is_same else (None, 0)
    if type(at_s) is not float or not 0 <= at_s < 1e11 or type(damaged) is not int:
        return None, 0
    return at_s, damaged
