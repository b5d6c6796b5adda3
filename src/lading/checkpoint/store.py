"""Checkpoints on disk: written in a stream, complete or absent, and trusted only after their checksums.

    folder/step-00000050/state.safetensors      every tensor, in the safetensors format
                         manifest.json          step, meta, and the checksums of every chunk of the state file
    folder/step-00000050.tmp-HOST-1234-x8q2/    being written (or deleted) by process 1234 of a host
    folder/step-00000050.old/                   replaced by a second save of the same step

[Note: complete or absent] Files and folder are synced, then the folder is renamed, then the parent is synced: a
kill or a power cut at any instant leaves the new checkpoint whole or not there, and once a save has returned it is
there. Older ones are deleted after that, by renaming first. One process saves into a folder at a time (``SaveLocks``),
so a ``.tmp`` folder of this process or of one that is gone is a leftover (``lading.files``). What cannot be deleted is
no reason not to save: it is warned of, and tried again at every later save; one that somebody reads is tried again, too
(``read_checkpoint``).

Nothing in a file is executed: JSON and raw bytes only.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lading.checkpoint.lock import delete_lock, read_lock
from lading.checkpoint.manifest import MANIFEST, manifest_bytes, read_manifest
from lading.checkpoint.state import (
    CHUNK_BYTES,
    Checksums,
    Readable,
    SavedBytes,
    SavedTensor,
    TensorSource,
    checked_sources,
    read_chunks,
    source_bytes,
    write_state,
)
from lading.checkpoint.swapped import SWAP, JoinedFile, Swapped, SwapPlaces
from lading.errors import ConfigError, DamagedCheckpoint, StorageError
from lading.files import (
    leftovers,
    make_durable_folder,
    name_aside,
    remove_leftover,
    rename_file,
    sync_folder,
    write_text,
)
from lading.units import format_bytes

if TYPE_CHECKING:
    import torch

STATE = "state.safetensors"
#: Folders of a run's checkpoints: the newest ones, and the one of the lowest validation loss.
NEWEST, BEST = "checkpoints", "best"
#: What the name of a checkpoint has more once its run goes on from an earlier one.
SET_ASIDE = ".set-aside"

_STEP = re.compile(r"step-(\d{8,})")
_FOLDER = re.compile(r"step-(\d{8,})(\.old)?\Z")


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint whose manifest, header and file size have been checked; tensors are checked as they are read.

    Attributes:
        chunk_bytes: Bytes that each checksum is for.
        state_bytes: Size of the state file.
        swap: Parts of a swap file that follow it, of a checkpoint in place (``lading.checkpoint.swapped``); else None.
        folder: Descriptor of its folder while a lock keeps it from being deleted (``read_checkpoint``); else None.
    """

    path: Path
    step: int
    meta: dict[str, Any]
    tensors: dict[str, SavedTensor]
    header: SavedBytes
    chunk_bytes: int
    state_bytes: int
    swap: SwapPlaces | None = None
    folder: int | None = None

    def read(self, name: str) -> torch.Tensor:
        """Read the tensor ``name`` onto the CPU, into memory of its own.

        Raises:
            StorageError: no such tensor.
            DamagedCheckpoint: its bytes are not those that were saved.
        """
        import torch

        entry = self._entry(name)
        flat = torch.empty(entry.size_bytes, dtype=torch.uint8)
        target, filled = flat.numpy().data, 0
        for chunk in self.chunks(name):
            target[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        return flat.view(getattr(torch, entry.dtype)).reshape(entry.shape)

    def chunks(self, name: str, start: int = 0, end: int | None = None) -> Iterator[memoryview]:
        """Yield the bytes of tensor ``name`` from ``start`` up to ``end`` in order, at most ``CHUNK_BYTES`` at a time.

        Only the chunks that hold them are read. What is yielded is valid until the next is asked for. Its checksum has
        been compared, but in a file of format 1, where a wrong one is raised after the last.

        Raises:
            StorageError: no such tensor.
            DamagedCheckpoint: its bytes are not those that were saved; names the first that is not.
        """
        entry = self._entry(name)
        end = entry.size_bytes if end is None else min(end, entry.size_bytes)
        part = entry.part(start, end, self.chunk_bytes)
        at = part.start - entry.start
        try:
            with self.opened() as file:
                for chunk, damage in read_chunks(file, part, self.chunk_bytes):
                    if damage is not None:
                        raise _damaged(self.path, f"{self._place_of(entry, damage.start)}: {entry}: {damage}")
                    if piece := chunk[max(start - at, 0) : max(end - at, 0)]:
                        yield piece
                    at += len(chunk)
        except StorageError:
            raise
        except OSError as error:
            raise _damaged(self.path, f"{self._place_of(entry, entry.start)}: cannot read {entry}: {error}") from error

    def verify(self) -> None:
        """Read everything once and check its bytes.

        Raises:
            DamagedCheckpoint: naming the first bytes that are not what was saved.
        """
        for words in self.damages():
            raise _damaged(self.path, words)

    def damages(self) -> Iterator[str]:
        """Read everything, and name all bytes that are not what was saved: file, tensor and place in the file.

        Raises:
            StorageError: the file cannot be read.
        """
        state = self.path / STATE
        try:
            with self._file(STATE) as file:
                size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes > self.state_bytes:
                yield f"{state}: expected {self.state_bytes} bytes, found {size_bytes}"
            with self.opened() as file:
                for saved in (self.header, *self.tensors.values()):
                    for _, damage in read_chunks(file, saved, self.chunk_bytes):
                        if damage is not None:
                            yield f"{self._place_of(saved, damage.start)}: {saved}: {damage}"
                            if damage.end > size_bytes and self.swap is None:  # all that follows is missing, too
                                return
        except OSError as error:
            raise StorageError(f"{state}: cannot read: {error}; check the disk (dmesg)") from error

    def unchecked(self) -> int:
        """Count the tensors that have no checksums, as their run was killed before those were made."""
        return sum(1 for entry in self.tensors.values() if entry.size_bytes and not entry.sha256)

    def _place_of(self, saved: SavedBytes, at: int) -> Path | str:
        """File that has the byte ``at`` of a run of bytes."""
        if self.swap is None or saved.start < self.state_bytes:
            return self.path / STATE
        name = STATE if self.swap.is_in_state(at - self.state_bytes) else SWAP
        return f"{self.path / name}, whose parts begin at byte {self.state_bytes}"

    def _file(self, name: str) -> FileIO:
        if self.folder is None:
            return open(self.path / name, "rb", buffering=0)
        return os.fdopen(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.folder), "rb", buffering=0)

    @contextmanager
    def opened(self) -> Iterator[Readable]:
        """Open what has the bytes of all tensors."""
        if self.swap is None:
            with self._file(STATE) as file:
                yield file
        else:
            with JoinedFile(self._file, STATE, self.state_bytes, self.swap) as joined:
                yield joined

    def _entry(self, name: str) -> SavedTensor:
        if name not in self.tensors:
            nearest = get_close_matches(name, self.tensors, 1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"it has {len(self.tensors)} others"
            raise StorageError(f"{self.path}: expected a tensor {name!r}, found none; {hint}")
        return self.tensors[name]


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Iterable[TensorSource],
    meta: Mapping[str, Any],
    keep: int,
    keep_every_steps: int = 0,
    swapped: Swapped | None = None,
    spared: Path | None = None,
) -> Path:
    """Write a checkpoint, then delete all up to this step but the ``keep`` newest.

    Chunks are asked for one at a time and copied before the next, so memory stays constant. Tensors are written by
    falling element size (their alignment in the format), otherwise in the order given. ``meta`` must be JSON.

    Args:
        keep_every_steps: Keep every checkpoint of a multiple of so many steps, too; 0 keeps none for that.
        swapped: Further tensors, which stay in a swap file, but for pieces that are among ``tensors``. Earlier
            checkpoints in that file are deleted, whoever reads them.
        spared: Checkpoint that is not deleted.

    Returns:
        The folder of the new checkpoint, which is on disk.
    Raises:
        ConfigError: an argument means nothing (a name twice, an unknown dtype, meta that is not JSON, keep < 1).
        StorageError: the disk is full or fails, or a tensor's chunks do not add up; older checkpoints are untouched.
    """
    if step < 0:
        raise ConfigError(f"expected step >= 0, got {step}")
    check_retention(keep, keep_every_steps)
    sources = checked_sources(tensors)
    meta = plain_json(meta)
    final = name_of_step(folder, step)
    temporary = None
    try:
        _make_folder(folder)
        _clean_up(folder)
        temporary = name_aside(final)
        temporary.mkdir()
        body = write_state(temporary / STATE, sources, step)
        if swapped is not None:
            swapped.link(temporary / SWAP)
            body = _with_swapped(body, swapped)
        _write_manifest(temporary / MANIFEST, {"step": step, "meta": meta, **body})
        sync_folder(temporary)
        _publish(temporary, final)
        if swapped is not None:
            _remove_earlier(final)
        _prune(folder, step, keep, keep_every_steps, spared)
    except BaseException as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)  # or by the next save
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise _cannot_save(final, sources, error) from error
        raise
    return final


def _with_swapped(body: dict[str, Any], swapped: Swapped) -> dict[str, Any]:
    """Add the tensors that stay in a swap file to a manifest."""
    end, starts = body["state_bytes"], {tensor["name"]: tensor["start"] for tensor in body["tensors"]}
    pieces = {part.piece for tensor in swapped.tensors for part in tensor.parts}
    tensors = [tensor for tensor in body["tensors"] if tensor["name"] not in pieces]
    for tensor in swapped.tensors:
        saved = SavedTensor(end, tensor.size_bytes, (), (), tensor.name, tensor.dtype, tensor.shape)
        tensors.append(asdict(saved))
        end += tensor.size_bytes
    return {**body, "tensors": tensors, "swap": asdict(swapped.places(starts))}


def _remove_earlier(final: Path) -> None:
    """Delete the earlier checkpoints in the swap file of a new one, as steps write over them from now on."""
    inode = os.stat(final / SWAP).st_ino
    for path in checkpoint_folders(final.parent):
        if path != final and (path / SWAP).exists() and os.stat(path / SWAP).st_ino == inode:
            _remove(path, read_or_not=True)


def add_checksums(path: Path, is_over: Callable[[], bool]) -> None:
    """Make the checksums that a checkpoint in place lacks, unless it is deleted meanwhile.

    Args:
        is_over: Whether they are no longer wanted; asked after each chunk.

    Raises:
        OSError: as the file system says.
    """
    checkpoint, entries = described_checkpoint(path), list[dict[str, Any]]()
    with checkpoint.opened() as file:
        for entry in checkpoint.tensors.values():
            sums = Checksums()
            for chunk, damage in () if entry.sha256 else read_chunks(file, entry, checkpoint.chunk_bytes):
                if damage is not None:
                    raise StorageError(f"{path / SWAP}: {entry}: {damage}")
                if is_over():
                    return
                sums.update(chunk)
            entries.append(asdict(entry) | ({} if entry.sha256 else sums.end()))
    body = {"step": checkpoint.step, "meta": checkpoint.meta, "chunk_bytes": CHUNK_BYTES}
    body |= {"state_bytes": checkpoint.state_bytes, "header": asdict(checkpoint.header), "tensors": entries}
    assert checkpoint.swap is not None, "only there checksums are missing"
    if path.exists():
        write_text(path / MANIFEST, manifest_bytes({**body, "swap": asdict(checkpoint.swap)}, in_place=True).decode())


def name_of_step(folder: Path, step: int) -> Path:
    """Name of the checkpoint of a step in a folder of checkpoints."""
    return folder / f"step-{step:08d}"


def check_retention(keep: int, keep_every_steps: int) -> None:
    """Refuse numbers of checkpoints to keep that mean nothing.

    Raises:
        ConfigError: keep < 1 or keep_every_steps < 0.
    """
    if keep < 1 or keep_every_steps < 0:
        raise ConfigError(f"expected keep >= 1 and keep_every_steps >= 0, got {keep} and {keep_every_steps}")


def latest_checkpoint(folder: Path) -> Path | None:
    """Find the newest complete checkpoint in ``folder``; None if there is none.

    Warns of a newer one that is damaged.
    """
    for path in checkpoint_folders(folder):
        try:
            return inspect_checkpoint(path).path
        except StorageError as error:
            warnings.warn(f"skipped a damaged checkpoint: {error}", stacklevel=2)
    return None


def open_checkpoint(path: Path) -> Checkpoint:
    """Open one checkpoint folder, after checking its manifest, the header and the size of its state file.

    Raises:
        DamagedCheckpoint: missing, foreign, of another format, truncated or altered; says what to use instead.
    """
    try:
        return inspect_checkpoint(path)
    except StorageError as error:
        raise _damaged(path, f"{error}") from error


@contextmanager
def read_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """Open one checkpoint as ``open_checkpoint`` does, and keep it from being deleted during the block.

    Raises:
        StorageError: as ``open_checkpoint``; or it is being deleted.
    """
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(read_lock(path))
        except StorageError:
            raise
        except OSError as error:
            open_checkpoint(path)  # says what is wrong with it
            raise _damaged(path, f"{path}: cannot open the folder: {error.strerror}") from error
        yield replace(open_checkpoint(path), folder=folder)


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


def _make_folder(folder: Path) -> None:
    """Make the folder of checkpoints, unless it exists, so that it is there after a power cut, too."""
    if folder.exists() and not checkpoint_folders(folder):  # who made it may have been killed before it was on disk
        with suppress(PermissionError):  # who may not read the folder above has not made this one
            sync_folder(folder.parent)
    make_durable_folder(folder)


def _write_manifest(path: Path, body: dict[str, Any]) -> None:
    with open(path, "xb") as file:
        file.write(manifest_bytes(body, in_place="swap" in body))
        file.flush()
        os.fsync(file.fileno())


def _publish(temporary: Path, final: Path) -> None:
    """Rename into place; a checkpoint of the same step steps aside until the new one stands."""
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        os.rename(final, old)
    os.rename(temporary, final)
    sync_folder(final.parent)
    if old.exists():
        _remove(old)


def _prune(folder: Path, step: int, keep: int, every: int, spared: Path | None) -> None:
    """Delete all but the ``keep`` newest up to ``step``, those of every so many steps (0: of none), and ``spared``.

    Later ones belong to a run that went further.
    """
    for path in [path for path in checkpoint_folders(folder) if step_of(path) <= step][keep:]:
        if path != spared and (not every or step_of(path) % every or path.name.endswith(".old")):
            _remove(path)


def _remove(path: Path, *, read_or_not: bool = False) -> None:
    """Delete a checkpoint that nobody reads; half deleted, it no longer bears the name of one.

    One that was replaced loses its name in any case (``read_or_not``): who reads it has its folder open.
    """
    doomed = name_aside(path.with_name(path.name.removesuffix(".old")))
    try:
        with delete_lock(path) as free:
            if free or read_or_not or path.name.endswith(".old"):
                os.rename(path, doomed)
            if free:
                remove_leftover(doomed)
    except OSError as error:
        _warn_of(path, error)


def _remove_aside(path: Path) -> None:
    """Delete what lies aside, unless it was replaced while somebody reads it."""
    try:
        with delete_lock(path) as free:
            if free:
                remove_leftover(path)
    except OSError as error:
        _warn_of(path, error)


def _warn_of(path: Path, error: OSError) -> None:
    warnings.warn(f"cannot delete {path}: {error}; the next save tries again", stacklevel=2)


def clear_leftovers(folder: Path) -> None:
    """Delete what processes that are gone left aside among checkpoints; this one saves none there now.

    Raises:
        OSError: the folder cannot be read.
    """
    for path in leftovers(folder, _STEP, own=True):
        _remove_aside(path)


def _clean_up(folder: Path) -> None:
    """Delete leftovers of processes that are gone, and finish or undo a replacement that was cut short."""
    clear_leftovers(folder)
    replaced = [path for path in checkpoint_folders(folder) if path.name.endswith(".old")]
    if replaced:  # whoever replaced it may have been killed before the new one was on disk
        sync_folder(folder)
    for old in replaced:
        final = old.with_name(old.name.removesuffix(".old"))
        if final.exists():
            _remove(old)
        else:
            os.rename(old, final)


def _cannot_save(final: Path, sources: Sequence[TensorSource], error: OSError) -> StorageError:
    needed_bytes = sum(map(source_bytes, sources))
    older = next((path for path in checkpoint_folders(final.parent)), None)
    remaining = f"the newest checkpoint is {older}" if older else "there is no older checkpoint"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"the disk is full: checkpoint {final} needs {format_bytes(needed_bytes)}, {_free(final)} are free; "
            f"free some space or write elsewhere; {remaining}"
        )
    do = "free some memory" if error.errno == errno.ENOMEM else "check the folder and its disk"
    return StorageError(f"cannot save checkpoint {final}: {error}; {do}; {remaining}")


def _free(path: Path) -> str:
    """Say the free space of the disk where ``path`` is to be, as far as it is known."""
    try:
        return format_bytes(shutil.disk_usage(next(parent for parent in path.parents if parent.exists())).free)
    except OSError:
        return "an unknown number of bytes"


# -- reading


def step_of(path: Path) -> int:
    """Step of the checkpoint whose folder bears this name; -1 for a name of something else."""
    match = _FOLDER.match(path.name)
    return int(match[1]) if match else -1


def checkpoint_folders(folder: Path) -> list[Path]:
    """List the folders that bear the name of a checkpoint, the newest first, and after it one that it replaced.

    Raises:
        StorageError: the folder cannot be read.
    """
    try:
        paths = [path for path in folder.iterdir() if _FOLDER.match(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"expected a folder of checkpoints at {folder}: {error}") from error
    return sorted(paths, key=lambda path: (step_of(path), not path.name.endswith(".old")), reverse=True)


def run_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints that belong with those of a folder, the newest first; of a run its best one, too.

    Raises:
        StorageError: a folder cannot be read.
    """
    names = (NEWEST, BEST) if folder.name in (NEWEST, BEST) else (folder.name,)
    paths = [path for name in names for path in checkpoint_folders(folder.with_name(name))]
    return sorted(paths, key=step_of, reverse=True)


def _damaged(path: Path, words: str) -> DamagedCheckpoint:
    """Error of a damaged checkpoint that says what to use instead, of which all bytes are read."""
    older = next((candidate for candidate in run_checkpoints(path.parent) if _replaces(candidate, path)), None)
    if older is None:
        remedy = f"there is no older checkpoint in {path.parent} whose bytes are those that were saved"
        return DamagedCheckpoint(f"{words}; {remedy}: start the run again")
    advice = f"use the older checkpoint {older}, all bytes of which were read now and are those that were saved"
    return DamagedCheckpoint(f"{words}; {advice}", older=str(older))


def _replaces(other: Path, path: Path) -> bool:
    """Whether a checkpoint is another one than ``path``, not of a later step, and whole."""
    if other == path or step_of(other) > step_of(path):
        return False
    try:
        with read_lock(other) as folder:
            return next(replace(inspect_checkpoint(other), folder=folder).damages(), None) is None
    except OSError:
        return False


def set_aside(path: Path) -> Path:
    """Give a checkpoint a name under which no run takes it for one, and nothing deletes it; returns that.

    Raises:
        StorageError: it cannot be renamed.
    """
    names = (f"{path.name}{SET_ASIDE}{number}" for number in ("", *(f"-{n}" for n in range(2, 10_000))))
    target = next(target for name in names if not os.path.lexists(target := path.with_name(name)))
    rename_file(path, target)
    return target


def inspect_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint as ``open_checkpoint`` does, and look for no other where it is damaged.

    Raises:
        StorageError: as ``open_checkpoint``, without what to use instead.
    """
    checkpoint = described_checkpoint(path)
    state, header, size_bytes = path / STATE, checkpoint.header, checkpoint.state_bytes
    try:
        with open(state, "rb", buffering=0) as file:
            found_bytes = os.fstat(file.fileno()).st_size
            damages = [damage for _, damage in read_chunks(file, header, checkpoint.chunk_bytes) if damage is not None]
    except OSError as error:
        raise StorageError(f"{state}: expected a file of {size_bytes} bytes: {error}") from error
    if found_bytes != size_bytes:
        ends = ((entry, entry.start + entry.size_bytes) for entry in checkpoint.tensors.values())
        lost = next((f", first missing in {entry}" for entry, end in ends if end > found_bytes), "")
        raise StorageError(f"{state}: expected {size_bytes} bytes, found {found_bytes}{lost}")
    if damages:
        raise StorageError(f"{state}: {header}: {damages[0]}")
    if checkpoint.swap is not None:
        _check_swap(path / SWAP, checkpoint.swap.size_bytes)
    return checkpoint


def _check_swap(path: Path, size_bytes: int) -> None:
    """Refuse a checkpoint in place whose swap file is gone or was cut."""
    try:
        stat = path.stat()
    except OSError as error:
        raise StorageError(f"{path}: expected a file of {size_bytes} bytes: {error}") from error
    if stat.st_size != size_bytes:
        raise StorageError(f"{path}: expected {size_bytes} bytes, found {stat.st_size}")


def described_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint by its manifest alone, whether or not its state file is there.

    Raises:
        StorageError: the manifest is missing, foreign, of another format or altered, or of another step.
    """
    body = read_manifest(path / MANIFEST)
    if _FOLDER.match(path.name) and step_of(path) != body.step:
        raise StorageError(
            f"{path}: expected the checkpoint of step {step_of(path)}, as its folder is named, found that of step "
            f"{body.step}; rename the folder"
        )
    tensors = {entry.name: entry for entry in body.tensors}
    return Checkpoint(path, body.step, body.meta, tensors, body.header, body.chunk_bytes, body.state_bytes, body.swap)
