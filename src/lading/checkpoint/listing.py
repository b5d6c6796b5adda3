"""Lists of checkpoints: which are there, what they take, and whether their bytes were verified since they were saved.

step-00000050/verified.json     when all bytes were read and found to be those that were saved, and of which manifest
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lading.checkpoint.lock import read_lock
from lading.checkpoint.manifest import MANIFEST
from lading.checkpoint.store import BEST, NEWEST, checkpoint_folders, described_checkpoint, open_checkpoint, step_of
from lading.errors import ConfigError, StorageError
from lading.files import parse_json, remove_file, write_text

VERIFIED = "verified.json"


@dataclass(frozen=True)
class ListedCheckpoint:
    """Row of a list of checkpoints.

    Attributes:
        size_bytes: Bytes of its files.
        saved_s: When it was saved, in seconds since 1970.
        verified_s: When its bytes were last found to be whole; None if nobody has looked since.
        damage: What is wrong with its manifest, header or size; "" where nothing is, and for other bytes nobody knows.
    """

    path: Path
    step: int
    size_bytes: int
    saved_s: float
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
    found = [path for each in (folder, folder / NEWEST, folder / BEST) for path in reversed(checkpoint_folders(each))]
    if not found:
        raise ConfigError(
            f"expected a checkpoint, a folder of checkpoints or the out folder of a run, found none in {str(folder)!r}"
        )
    return found


def list_checkpoint(path: Path) -> ListedCheckpoint:
    """Describe a checkpoint, of which only the manifest and the header are read.

    Raises:
        StorageError: the system does not let it be looked at.
    """
    step, damage = -1, ""
    try:
        step = described_checkpoint(path).step
        open_checkpoint(path)
    except StorageError as error:
        damage = str(error)
    try:
        size_bytes = sum(each.stat().st_size for each in path.iterdir())
        manifest = path / MANIFEST
        saved_s = (manifest if manifest.exists() else path).stat().st_mtime
    except OSError as error:
        raise StorageError(f"cannot look at {path}: {error.strerror}; check its permissions") from error
    return ListedCheckpoint(path, step, size_bytes, saved_s, _verified_s(path), damage)


def unfinished_bytes(folder: Path) -> int:
    """Bytes of checkpoints in a folder that are being written or deleted, or were when their process was killed."""
    try:
        asides = [path for path in folder.iterdir() if path.name.startswith("step-") and ".tmp-" in path.name]
        return sum(each.stat().st_size for path in asides for each in path.glob("*"))
    except OSError as error:
        raise StorageError(f"cannot look at {folder}: {error.strerror}; it changes while it is read") from error


def verify_checkpoint(path: Path) -> Iterator[str]:
    """Read all bytes of a checkpoint, and name those that are not what was saved: file, tensor and place in the file.

    Notes beside it that it was whole, or takes such a note away. Where nothing can be written there, there is none.
    """
    damaged = False
    try:
        with read_lock(path) as folder:
            for words in replace(described_checkpoint(path), folder=folder).damages():
                damaged = True
                yield words
    except OSError as error:
        damaged = True
        yield str(error)
    try:
        if damaged:
            remove_file(path / VERIFIED)
        else:
            write_text(path / VERIFIED, json.dumps({"manifest": _digest(path), "at_s": time.time()}) + "\n")
    except StorageError:  # of a read-only disk or another user: it has been verified all the same
        return


def _digest(path: Path) -> str:
    return hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()


def _verified_s(path: Path) -> float | None:
    """When a checkpoint's bytes were found whole; None without a note of that, of this manifest."""
    try:
        noted = parse_json((path / VERIFIED).read_bytes())
        same = isinstance(noted, dict) and noted.get("manifest") == _digest(path)
    except (OSError, ValueError):
        return None
    at_s = noted.get("at_s") if same else None
    return at_s if type(at_s) is float and 0 <= at_s < 1e11 else None
