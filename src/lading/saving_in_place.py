"""Saving in place: checkpoints whose values on a disk are not copied, but stay where they are in the swap file.

Out of core most of a state lies in the swap file between two steps. A checkpoint in place gives that file a name
(``lading.checkpoint.swapped``), writes what was in memory beside it, and from then on steps write where the
checkpoint's bytes are not ([Note: two places] in ``lading.runtime.tiers``). So a save neither reads nor writes what is
on the disk, and its file takes twice the room. A rename commits it, after a sync: a kill at any instant leaves the
checkpoint before, or this one. The one before goes then, as steps write over its bytes.

Checksums need all bytes to be read. A thread makes them while training goes on; the next save ends it.
"""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lading.checkpoint.state import TensorSource
from lading.checkpoint.store import add_checksums, name_of_step, save_checkpoint
from lading.checkpoint.swapped import SWAP, Swapped, SwappedPart, SwappedTensor
from lading.errors import ConfigError, StorageError
from lading.ir.action import DEVICE
from lading.runtime.accelerator import BouncedTier
from lading.runtime.executor import Executor
from lading.runtime.resident import give_back
from lading.runtime.speculation import VersionedTier
from lading.runtime.tiers import FileTier, TierBytes
from lading.saved_values import Snapshot

#: Niceness of the thread that makes checksums: steps come first.
_NICENESS = 15


def check_in_place(executor: Executor, folder: Path, *, is_alone: bool) -> FileTier:
    """Refuse a run whose checkpoints cannot be made in place, and reserve their room on the disk.

    Args:
        folder: Where checkpoints will be.
        is_alone: Whether the run has one rank.

    Returns:
        The swap file.
    Raises:
        ConfigError: it has several ranks, keeps nothing on a disk, or has the folder on another file system.
        StorageError: the disk has no room for twice the swap file.
    """
    key = "checkpoint.in_place"
    if not is_alone:
        raise ConfigError(f"{key}: expected one process, found several ranks; leave it out")
    file = _swap_file(executor)
    if file is None:
        raise ConfigError(
            f"{key}: expected a plan that keeps values on a disk between steps, found all of them in memory; "
            "leave it out, or lower the memory budget"
        )
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if os.stat(existing).st_dev != os.stat(file.folder).st_dev:
        raise ConfigError(
            f"{key}: expected {folder} and the swap folder {file.folder} on one file system, found two; choose "
            "another (memory.folder), or leave it out"
        )
    if not file.is_linkable:
        raise ConfigError(
            f"{key}: expected a file system on which a file without a name can be given one (O_TMPFILE), found "
            f"{file.folder} on another; choose another folder (memory.folder), or leave it out"
        )
    file.reserve_second()
    return file


@dataclass(eq=False)
class SavesInPlace:
    """Checkpoints in place of one trainer, and the thread that makes the checksums of the newest.

    Attributes:
        newest: The newest one; while it is there, the swap file has a name, and can be given another.
    """

    newest: Path | None = None
    _thread: threading.Thread | None = None
    _is_over: bool = False
    _failure: Exception | None = None
    _warned: bool = False

    def save(
        self, snapshot: Snapshot, folder: Path, meta: Mapping[str, Any], keep: int, keep_every_steps: int
    ) -> Path | None:
        """Commit a checkpoint between two steps.

        Returns:
            Its folder; None where somebody deleted the last one, which is warned of once: it is to be copied.
        Raises:
            StorageError, ConfigError: as ``check_in_place`` and ``lading.checkpoint.store.save_checkpoint``; the
                one before stays.
        """
        snapshot.executor.flush()
        file = _swap_file(snapshot.executor)
        if file is not None and file.is_lost:
            if not self._warned:
                warnings.warn(
                    "checkpoints are copied, though in_place was asked for, as the last one in the swap file was "
                    "deleted: a file whose names are all gone is given no other",
                    stacklevel=4,
                )
            self._warned = True
            return None
        file = check_in_place(snapshot.executor, folder, is_alone=snapshot.ranks is None)
        self.end()
        self.check()
        swapped, pieces = _swapped(snapshot, file)
        names = {tensor.name for tensor in swapped.tensors}
        gathering = snapshot.values.gathering()
        sources = [source for source in snapshot.sources(gathering) if source[0] not in names]
        sources += pieces
        give_back()  # what steps freed leaves its room to the buffers of saving
        try:
            path = save_checkpoint(folder, snapshot.step, sources, meta, keep, keep_every_steps, swapped)
        except BaseException:
            if file.has_name(name_of_step(folder, snapshot.step) / SWAP):  # it failed behind its commit
                file.keep()
                self.newest = name_of_step(folder, snapshot.step)
            self._begin()
            raise
        finally:
            gathering.end()
        file.keep()
        self.newest = path
        self._begin()
        return path

    def _begin(self) -> None:
        """Begin to make the checksums of the newest checkpoint."""
        if self.newest is None:
            return
        self._is_over, self._failure = False, None
        self._thread = threading.Thread(target=self._run, args=(self.newest,), name="lading checksums")
        self._thread.start()

    def _run(self, path: Path) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            add_checksums(path, lambda: self._is_over)
        except Exception as error:  # raised on the thread of training
            self._failure = error

    def end(self) -> None:
        """Make no more checksums."""
        self._is_over = True
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def check(self) -> None:
        """Raise why checksums could not be made, if that is known by now.

        Raises:
            StorageError: the disk does not give back what was saved.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise StorageError(f"cannot make the checksums of checkpoint {self.newest}: {failure}") from failure

    def wait(self) -> None:
        """Return once all checksums are made; raises as ``check``."""
        if self._thread is not None:
            self._thread.join()
        self.check()


def _behind(tier: TierBytes, offset: int) -> tuple[TierBytes, int]:
    """Find what has the bytes of a tier, and where."""
    while isinstance(tier, VersionedTier | BouncedTier):
        offset = tier.place(offset) if isinstance(tier, VersionedTier) else offset
        tier = tier.behind
    return tier, offset


def _swap_file(executor: Executor) -> FileTier | None:
    """Find the swap file that has values between steps; of several the first."""
    for name in dict.fromkeys(executor.homes.values()):
        if name != DEVICE and isinstance(file := _behind(executor.tiers[name], 0)[0], FileTier):
            return file
    return None


def _swapped(snapshot: Snapshot, file: FileTier) -> tuple[Swapped, list[TensorSource]]:
    """List the values with bytes in the swap file, in the order of their elements, and their pieces in memory."""
    executor, storages = snapshot.executor, snapshot.storages
    slots = {name: dict(pairs) for name, pairs in executor.program.slots.items()}

    def place(storage: int) -> int | None:
        name = executor.homes.get(storage, DEVICE)
        if name == DEVICE:
            return None
        tier, offset = _behind(executor.tiers[name], slots[name][storage])
        return offset if tier is file else None

    tensors, pieces = list[SwappedTensor](), list[TensorSource]()
    for name, value in snapshot.values.items():
        sizes = [storages[storage].size_bytes for storage in value.storages]
        is_whole = value.start is None and sum(sizes) == value.size_bytes and all(sizes)
        places = [place(storage) for storage in value.storages]
        in_order = all(map(executor.takes_chunks, value.storages))
        if not is_whole or not in_order or all(offset is None for offset in places):
            continue
        parts = list[SwappedPart]()
        for number, (storage, offset, size) in enumerate(zip(value.storages, places, sizes, strict=True)):
            if offset is not None:
                parts += itertools.starmap(SwappedPart, file.runs(offset, size))
                continue
            piece = f"{name}.piece-{number}"
            parts.append(SwappedPart(0, size, piece))
            pieces.append((piece, "uint8", (size,), executor.chunks(storage)))
        tensors.append(SwappedTensor(name, value.dtype, tuple(value.shape), tuple(parts)))
    return Swapped(tensors, file.link, file.file_bytes), pieces
