"""Checkpoints on disk: written in a stream, complete or absent, and trusted only after their checksums.

    folder/step-00000050/state.safetensors      every tensor, in the safetensors format
                         manifest.json          step, meta, and the size and sha256 of everything
    folder/step-00000050.tmp-HOST-1234-x8q2/    being written (or deleted) by process 1234 of a host
    folder/step-00000050.old/                   replaced by a second save of the same step

[Note: complete or absent] Files and folder are synced, then the folder is renamed, then the parent is synced: a
kill at any instant leaves the new checkpoint whole or not there. Older ones are deleted after that, by renaming first.
One process saves into a folder at a time, so a ``.tmp`` folder of this process or of a dead one is a leftover. Of a
process of another host, or of another container with the same disk, that cannot be told: a folder in which nothing has
changed for a day is one. What cannot be deleted is no reason not to save: it is warned of, and tried again at every
later save.

Nothing in a file is executed: JSON and raw bytes only.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lading.checkpoint.state import CHUNK_BYTES, SavedTensor, TensorSource, checked_sources, source_bytes, write_state
from lading.errors import ConfigError, StorageError
from lading.files import parse_json
from lading.ir.graph import DTYPE_BYTES
from lading.ir.reading import read_as
from lading.units import format_bytes

if TYPE_CHECKING:
    import torch

#: Raised whenever what a saved checkpoint means changes.
CHECKPOINT_FORMAT = 1
STATE, MANIFEST = "state.safetensors", "manifest.json"

_KIND = "lading checkpoint"
_FOLDER = re.compile(r"step-(\d{8,})(\.old)?\Z")
_LEFTOVER = re.compile(r"step-\d{8,}\.tmp-(?:(?P<host>[0-9a-f]{8})-)?(?P<pid>\d+)(?:-\w+)?\Z")
#: Seconds after which what another host has not touched is a leftover.
_ABANDONED_S = 86_400.0


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint whose manifest, header and file size have been checked; tensors are checked as they are read."""

    path: Path
    step: int
    meta: dict[str, Any]
    tensors: dict[str, SavedTensor]

    def read(self, name: str) -> torch.Tensor:
        """Read the tensor ``name`` onto the CPU, into memory of its own.

        Raises:
            StorageError: no such tensor, or its bytes are not those that were saved.
        """
        import torch

        entry = self._entry(name)
        flat = torch.empty(entry.size_bytes, dtype=torch.uint8)
        target, filled = flat.numpy().data, 0
        for chunk in self.chunks(name):
            target[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        return flat.view(getattr(torch, entry.dtype)).reshape(entry.shape)

    def chunks(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of tensor ``name`` in order, at most ``CHUNK_BYTES`` at a time.

        A chunk is valid until the next is asked for. The checksum is known, and a wrong one raised, after the last.

        Raises:
            StorageError: no such tensor, or its bytes are not those that were saved.
        """
        entry = self._entry(name)
        digest, left = hashlib.sha256(), entry.size_bytes
        buffer = memoryview(bytearray(min(left, CHUNK_BYTES)))
        try:
            with open(self.path / STATE, "rb", buffering=0) as file:
                file.seek(entry.start)
                while left:
                    count = file.readinto(buffer[:left])
                    if not count:
                        raise self._damaged(entry, f"{entry.size_bytes} bytes", f"{entry.size_bytes - left}")
                    digest.update(buffer[:count])
                    left -= count
                    yield buffer[:count]
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"{self.path / STATE}: cannot read {entry}: {error}; {_advice(self.path)}") from error
        if digest.hexdigest() != entry.sha256:
            raise self._damaged(entry, f"sha256 {entry.sha256[:16]}", digest.hexdigest()[:16])

    def verify(self) -> None:
        """Read every tensor once and check its bytes.

        Raises:
            StorageError: naming the first tensor that is not what was saved.
        """
        for name in self.tensors:
            for _ in self.chunks(name):
                continue

    def _entry(self, name: str) -> SavedTensor:
        if name not in self.tensors:
            near = get_close_matches(name, self.tensors, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {len(self.tensors)} others"
            raise StorageError(f"{self.path}: expected a tensor {name!r}, found none; {hint}")
        return self.tensors[name]

    def _damaged(self, entry: SavedTensor, expected: str, found: str) -> StorageError:
        return StorageError(f"{self.path / STATE}: {entry}: expected {expected}, found {found}; {_advice(self.path)}")


@dataclass(frozen=True)
class _Manifest:
    """Contents of a checkpoint's manifest: sizes in bytes, and where each tensor lies in the state file."""

    step: int
    meta: dict[str, Any]
    state_bytes: int
    header_bytes: int
    header_sha256: str
    tensors: tuple[SavedTensor, ...]


def save_checkpoint(
    folder: Path, step: int, tensors: Iterable[TensorSource], meta: Mapping[str, Any], keep: int
) -> Path:
    """Write a checkpoint, then delete all but the ``keep`` newest up to this step.

    Chunks are asked for one at a time and copied before the next, so memory stays constant. Tensors are written by
    falling element size (their alignment in the format), otherwise in the order given. ``meta`` must be JSON.

    Returns:
        The folder of the new checkpoint.
    Raises:
        ConfigError: an argument means nothing (a name twice, an unknown dtype, meta that is not JSON, keep < 1).
        StorageError: the disk is full or fails, or a tensor's chunks do not add up; older checkpoints are untouched.
    """
    if step < 0 or keep < 1:
        raise ConfigError(f"expected step >= 0 and keep >= 1, got step {step} and keep {keep}")
    sources = checked_sources(tensors)
    meta = plain_json(meta)
    final = folder / f"step-{step:08d}"
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clean_up(folder)
        temporary = _unused(final)
        temporary.mkdir()
        body = write_state(temporary / STATE, sources, step)
        _write_manifest(temporary / MANIFEST, {"step": step, "meta": meta, **body})
        _sync_folder(temporary)
        _publish(temporary, final)
        _prune(folder, step, keep)
    except BaseException as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)  # or by the next save
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise _cannot_save(final, sources, error) from error
        raise
    return final


def latest_checkpoint(folder: Path) -> Path | None:
    """Find the newest complete checkpoint in ``folder``; None if there is none.

    Warns of a newer one that is damaged.
    """
    for path in _newest_first(folder):
        try:
            return _inspect(path).path
        except StorageError as error:
            warnings.warn(f"skipped a damaged checkpoint: {error}", stacklevel=2)
    return None


def open_checkpoint(path: Path) -> Checkpoint:
    """Open one checkpoint folder, after checking its manifest, the header and the size of its state file.

    Raises:
        StorageError: missing, foreign, of another format, truncated or altered; says what to use instead.
    """
    try:
        return _inspect(path)
    except StorageError as error:
        raise StorageError(f"{error}; {_advice(path)}") from error


# -- writing


def plain_json(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of a checkpoint's meta as it is read back.

    Raises:
        ConfigError: it has no JSON form.
    """
    try:
        return json.loads(json.dumps(dict(meta), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"expected checkpoint meta of JSON values: {error}") from error


def _write_manifest(path: Path, body: dict[str, Any]) -> None:
    data = {"kind": _KIND, "format": CHECKPOINT_FORMAT, "sha256": _hash_json(body), "body": body}
    with open(path, "x") as file:
        file.write(json.dumps(data, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _hash_json(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _publish(temporary: Path, final: Path) -> None:
    """Rename into place; a checkpoint of the same step steps aside until the new one stands."""
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        os.rename(final, old)
    os.rename(temporary, final)
    _sync_folder(final.parent)
    if old.exists():
        _remove(old)


def _prune(folder: Path, step: int, keep: int) -> None:
    """Delete all but the ``keep`` newest up to ``step``; later ones belong to a run that went further."""
    for path in [path for path in _newest_first(folder) if _step_of(path) <= step][keep:]:
        _remove(path)


def _unused(path: Path) -> Path:
    """Find a name beside that of a checkpoint, for a folder that only this process writes or deletes."""
    return path.with_name(f"{path.name.removesuffix('.old')}.tmp-{_host()}-{os.getpid()}-{secrets.token_hex(4)}")


def _host() -> str:
    """Eight digits for this host, or container: processes of another may have the same numbers."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")  # containers may share the name of their host
    except OSError:  # no Linux
        numbers = ""
    return hashlib.sha256(f"{socket.gethostname()} {numbers}".encode()).hexdigest()[:8]


def _remove(path: Path) -> None:
    """Delete a checkpoint; half deleted, it no longer bears the name of one."""
    doomed = _unused(path)
    try:
        os.rename(path, doomed)
    except OSError as error:
        warnings.warn(f"cannot delete {path}: {error}; the next save tries again", stacklevel=2)
    else:
        _delete(doomed)


def _delete(path: Path) -> None:
    """Delete a leftover, or as much of it as can be."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        warnings.warn(f"cannot delete {path}: {error}; the next save tries again", stacklevel=2)


def _clean_up(folder: Path) -> None:
    """Delete leftovers of dead processes, and finish or undo a replacement that was cut short."""
    for path in list(folder.iterdir()):
        named = _LEFTOVER.match(path.name)
        if named and _is_leftover(path, named["host"], int(named["pid"])):
            _delete(path)
    for old in [path for path in _newest_first(folder) if path.name.endswith(".old")]:
        final = old.with_name(old.name.removesuffix(".old"))
        if final.exists():
            _remove(old)
        else:
            os.rename(old, final)


def _is_leftover(path: Path, host: str | None, pid: int) -> bool:
    """Whether nobody writes a folder any more; one without a host's name is of an earlier version."""
    if host in (None, _host()):
        return not _is_other_process(pid)
    try:
        newest = max(each.stat().st_mtime for each in (path, *path.glob("*")))
    except OSError:  # its owner deletes or renames it
        return False
    return time.time() - newest > _ABANDONED_S


def _is_other_process(pid: int) -> bool:
    """Whether ``pid`` is alive and not this process."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def _cannot_save(final: Path, sources: Sequence[TensorSource], error: OSError) -> StorageError:
    needed = sum(map(source_bytes, sources))
    older = next((path for path in _newest_first(final.parent)), None)
    kept = f"the newest checkpoint is {older}" if older else "there is no older checkpoint"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"the disk is full: checkpoint {final} needs {format_bytes(needed)}, {_free(final)} are free; "
            f"free some space or write elsewhere; {kept}"
        )
    return StorageError(f"cannot save checkpoint {final}: {error}; check the folder and its disk; {kept}")


def _free(path: Path) -> str:
    """Say the free space of the disk where ``path`` is to be, as far as it is known."""
    try:
        return format_bytes(shutil.disk_usage(next(parent for parent in path.parents if parent.exists())).free)
    except OSError:
        return "an unknown number of bytes"


# -- reading


def _step_of(path: Path) -> int:
    match = _FOLDER.match(path.name)
    return int(match[1]) if match else -1


def _newest_first(folder: Path) -> list[Path]:
    """List the folders that bear the name of a checkpoint; one that was replaced comes after its replacement."""
    try:
        paths = [path for path in folder.iterdir() if _FOLDER.match(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"expected a folder of checkpoints at {folder}: {error}") from error
    return sorted(paths, key=lambda path: (_step_of(path), not path.name.endswith(".old")), reverse=True)


def _advice(path: Path) -> str:
    """Say what to do when the checkpoint at ``path`` is damaged."""
    for older in _newest_first(path.parent):
        if _step_of(older) < _step_of(path):
            try:
                return f"use the older checkpoint {_inspect(older).path}"
            except StorageError:
                continue
    return f"there is no older checkpoint in {path.parent}: start the run again"


def _inspect(path: Path) -> Checkpoint:
    """Open a checkpoint as ``open_checkpoint`` does, without advice."""
    try:
        body: _Manifest = read_as(_Manifest, _read_manifest(path / MANIFEST), str(path / MANIFEST), "it was altered")
    except ConfigError as error:
        raise StorageError(f"expected the manifest of a checkpoint: {error}") from error
    _check_places(body, path / MANIFEST)
    state = path / STATE
    try:
        with open(state, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            header = file.read(body.header_bytes)
    except OSError as error:
        raise StorageError(f"{state}: expected a file of {body.state_bytes} bytes: {error}") from error
    if found != body.state_bytes:
        ends = ((entry, entry.start + entry.size_bytes) for entry in body.tensors)
        lost = next((f", first missing in {entry}" for entry, end in ends if end > found), "")
        raise StorageError(f"{state}: expected {body.state_bytes} bytes, found {found}{lost}")
    if (digest := hashlib.sha256(header).hexdigest()) != body.header_sha256:
        raise StorageError(f"{state}: expected a header of sha256 {body.header_sha256[:16]}, found {digest[:16]}")
    return Checkpoint(path, body.step, body.meta, {entry.name: entry for entry in body.tensors})


def _check_places(body: _Manifest, path: Path) -> None:
    """Refuse what no save writes: a name twice, an unknown dtype, bytes that are not those of the shape or outside."""
    if body.step < 0 or not 8 <= body.header_bytes <= body.state_bytes:
        raise StorageError(
            f"{path}: expected a step >= 0 and a header within {body.state_bytes} bytes, found step {body.step} and "
            f"{body.header_bytes} bytes: it was altered"
        )
    if len({entry.name for entry in body.tensors}) != len(body.tensors):
        raise StorageError(f"{path}: expected names of tensors that differ, found one twice: it was altered")
    for entry in body.tensors:
        size = prod(entry.shape) * DTYPE_BYTES.get(entry.dtype, 0) if min(entry.shape, default=0) >= 0 else -1
        within = body.header_bytes <= entry.start <= body.state_bytes - entry.size_bytes
        if entry.dtype not in DTYPE_BYTES or size != entry.size_bytes or not within:
            raise StorageError(
                f"{path}: {entry}: expected a known dtype and its bytes inside the file, found {entry.size_bytes} "
                f"bytes at {entry.start}: it was altered"
            )


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise StorageError(f"{path.parent}: expected a checkpoint with a {MANIFEST}, found none") from error
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}: expected a manifest in JSON: {error}") from error
    if not isinstance(data, dict) or data.get("kind") != _KIND:
        raise StorageError(f"{path}: expected a {_KIND}, found another file")
    if (found := data.get("format")) != CHECKPOINT_FORMAT or isinstance(found, bool):
        raise StorageError(f"{path}: expected format {CHECKPOINT_FORMAT}, found {found!r}: another Lading wrote it")
    body, expected = data.get("body"), data.get("sha256")
    if (digest := _hash_json(body)) != expected or not isinstance(body, dict):
        raise StorageError(f"{path}: expected sha256 {str(expected)[:16]}, found {digest[:16]}: it was altered")
    return body
