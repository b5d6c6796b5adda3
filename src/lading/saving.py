"""Saving: the checkpoints of a trainer, written while it waits, or beside training by the saver process.

[Note: beside training] A save beside training copies every value into staging memory, which is made once, and hands it
to ``lading.checkpoint.saver``, a process that writes, checksums and commits it. What lies in memory as it is saved is
copied on a thread while the next step runs, in the order in which the step will write over it, and held by a fence
until then (``lading.runtime.fence``). Each rank of a host stages its own shards so, in memory of its own; the first
one's saver maps them all, and begins when every rank has noted that its copies are made. Runs of tensor parallel, what
lies in a file, or has another order in memory, and shards of another host, are gathered by the first rank before
training goes on, a MiB at a time ([Note: gathering]). Where a rank's budget leaves no room for its staging memory,
training waits. What lies in a swap file may stay there instead (``lading.saving_in_place``).
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lading.checkpoint.lock import SaveLocks
from lading.checkpoint.saver import SaveOrder, Saver, StagedTensor
from lading.checkpoint.staging import StagingMemory
from lading.checkpoint.state import TensorSource, checked_sources, source_bytes
from lading.checkpoint.store import check_retention, plain_json, save_checkpoint
from lading.errors import BudgetWarning, StorageError
from lading.runtime.fence import Fence
from lading.runtime.host import clock_id
from lading.runtime.resident import give_back
from lading.saved_values import Snapshot
from lading.saving_in_place import SavesInPlace
from lading.staging_layout import StagingLayout, is_spread
from lading.units import format_bytes

if TYPE_CHECKING:
    from lading.runtime.job import Replicas

#: Seconds that the first rank waits for the copies of the others, and between two looks.
_COPIES_S, _PAUSE_S = 600.0, 0.01


def _shortage(staging: StagingLayout, snapshot: Snapshot) -> str:
    """Say why a rank cannot stage its part beside training; "" where it can."""
    room = snapshot.room_bytes
    if staging.size_bytes <= room:
        return ""
    budget_name = "memory budget" if snapshot.executor.kind == "cpu" else "host tier's budget"
    return (
        f"checkpoints are written while training waits: to write them beside it, {format_bytes(staging.size_bytes)} "
        f"of memory would stage them, and the {budget_name} leaves {format_bytes(room)}; raise it by "
        f"{format_bytes(staging.size_bytes - room)}, or wait for them (checkpoint.wait = true in a run)"
    )


@dataclass(frozen=True)
class _Share:
    """Part that a rank takes in every save beside training.

    Attributes:
        gathered: Names of the values that the first rank gathers, in order.
        tensors: Those of a checkpoint, on the first rank.
        watched_ranks: Ranks whose memory its saver reads, too.
    """

    staging: StagingLayout
    gathered: Sequence[str]
    memory: StagingMemory
    tensors: tuple[StagedTensor, ...] = ()
    watched_ranks: tuple[int, ...] = ()

    def rooms(self, snapshot: Snapshot) -> dict[int, list[torch.Tensor]]:
        """Places in staging memory by the storage that is copied there."""
        storages = snapshot.storages
        return {s: [_bytes_of(self.memory, at, storages[s].size_bytes)] for s, at in self.staging.places.items()}


@dataclass(eq=False)
class _Job:
    """One save beside training."""

    order: SaveOrder
    thread: threading.Thread
    failure: Exception | None = None
    warnings: list[str] = field(default_factory=lambda: [])


@dataclass(eq=False)
class _Background:
    """Staging memory, its saver, and the save under way."""

    memory: StagingMemory | None = None
    saver: Saver | None = None
    job: _Job | None = None

    def end(self) -> None:
        """Wait for the save under way, for want of anybody else who does; what failed is warned of."""
        if self.job is not None:
            self.job.thread.join()
            if self.job.failure is not None:
                warnings.warn(_words(self.job), stacklevel=2)
        self.job = None
        self.close()

    def close_saver(self) -> None:
        """End the saver, and let go of the memories of other ranks."""
        if self.saver is not None:
            self.saver.close()
            for memory in self.saver.memories[1:]:
                memory.close()
        self.saver = None

    def close(self) -> None:
        """End the saver, and give the memory back."""
        self.close_saver()
        if self.memory is not None:
            self.memory.close()
        self.memory = None


@dataclass(eq=False)
class Saves:
    """Checkpoints of one trainer, one at a time.

    Attributes:
        newest: Path of the newest that is committed; "" without one.
    """

    newest: str = ""
    _locks: SaveLocks = field(default_factory=SaveLocks)
    _background: _Background = field(default_factory=_Background)
    _in_place: SavesInPlace = field(default_factory=SavesInPlace)
    _keeps_folders: bool = False
    _warned: bool = False
    _number: int = 0
    _laid: tuple[StagingLayout, list[str], str] | None = None
    _share: _Share | None = None

    def __post_init__(self) -> None:
        weakref.finalize(self, self._background.end)

    def save_in_place(
        self, snapshot: Snapshot, folder: Path, meta: Mapping[str, Any], keep: int, keep_every_steps: int = 0
    ) -> Path:
        """Commit a checkpoint in place (``lading.saving_in_place``); one that cannot be is copied, as by ``save``.

        Returns:
            Its folder.
        Raises:
            StorageError, ConfigError: as ``save``.
        """
        self._checked(folder, meta, keep, keep_every_steps)
        path = self._in_place.save(snapshot, folder, meta, keep, keep_every_steps)
        if path is None:
            return self.save(snapshot, folder, meta, keep, keep_every_steps)
        self.newest = str(path)
        return path

    def save(
        self, snapshot: Snapshot, folder: Path, meta: Mapping[str, Any], keep: int, keep_every_steps: int = 0
    ) -> Path:
        """Write a checkpoint while training waits; the other ranks give what they share. One under way ends first.

        Returns:
            Its folder.
        Raises:
            StorageError: it cannot be written, another trainer saves there, or the one before could not be written.
            ConfigError: ``meta`` has no JSON form, keep < 1 or keep_every_steps < 0.
        """
        gathering = snapshot.values.gathering()
        try:
            self._checked(folder, meta, keep, keep_every_steps)
            give_back()  # what steps freed leaves its room to the buffers of saving
            snapshot.executor.reset_peak()
            sources, spared = snapshot.sources(gathering), self._in_place.newest
            path = save_checkpoint(folder, snapshot.step, sources, meta, keep, keep_every_steps, spared=spared)
        finally:  # the others give all shards, whether or not they can be written
            gathering.end()
        self.newest = str(path)
        snapshot.executor.observe_peak()
        return path

    def begin(
        self, snapshot: Snapshot, folder: Path, meta: Mapping[str, Any], keep: int, keep_every_steps: int = 0
    ) -> Path | None:
        """Begin a checkpoint beside training, if every rank's budget has room; all ranks call this.

        One under way ends first.

        Returns:
            Its folder, which is there once it is committed; None where training has to wait, which is warned of once.
        Raises:
            StorageError: the one before could not be written, another trainer saves there, or there is no memory.
            ConfigError: ``meta`` has no JSON form, keep < 1 or keep_every_steps < 0.
        """
        ranks = snapshot.ranks
        self.settle()
        _by_first(ranks, lambda: self._checked(folder, meta, keep, keep_every_steps))
        if shortage := self.shortage(snapshot):
            self._warn(shortage)
            return None
        share = self._share or self._shared(snapshot)
        snapshot.executor.reset_peak()
        self._gather(snapshot, share)
        fence = snapshot.executor.stage(share.rooms(snapshot), 0 if self._share else share.staging.size_bytes)
        self._share, self._number = share, self._number + 1
        order = SaveOrder(str(folder.absolute()), snapshot.step, meta, keep, share.tensors, keep_every_steps)
        job = _Job(order, threading.Thread(target=self._run, args=(fence, ranks, f"staged {self._number}")))
        self._background.job = job
        try:
            job.thread.start()
        except BaseException:
            self._background.job = None
            fence.open()
            raise
        return folder / order.path.name

    def _checked(self, folder: Path, meta: Mapping[str, Any], keep: int, keep_every_steps: int) -> str:
        """Wait for the save before, keep others out of the folder, and refuse what means nothing; returns a text."""
        self.wait()
        self._locks.take(folder)
        plain_json(meta)
        check_retention(keep, keep_every_steps)
        return "it may be saved"

    def shortage(self, snapshot: Snapshot) -> str:
        """Say why a checkpoint cannot be staged beside training; "" where it can. All ranks call this."""
        if self._laid is None:
            staging, gathered = self._laid_out(snapshot)
            mine, texts = _shortage(staging, snapshot), None
            if snapshot.ranks is not None:
                texts = snapshot.ranks.gather(mine)
            shortage_text = (
                mine if texts is None else next((f"rank {r}: {text}" for r, text in enumerate(texts) if text), "")
            )
            self._laid = staging, gathered, json.loads(_by_first(snapshot.ranks, lambda: json.dumps(shortage_text)))
        return self._laid[2]

    def _laid_out(self, snapshot: Snapshot) -> tuple[StagingLayout, list[str]]:
        """Lay out this rank's staging memory; returns the names of the values that ranks gather, too, in order."""
        ranks, (runs, gathered) = snapshot.ranks, snapshot.runs()
        if ranks is not None:
            host = f"{clock_id()} {os.readlink('/proc/self/ns/pid')}"
            hosts_and_names = ranks.gather((host, gathered)) or []
            is_one_host = len({host_of_rank for host_of_rank, _ in hosts_and_names}) <= 1
            spread = [] if is_one_host else [name for name, value in snapshot.values.items() if is_spread(value)]
            names = dict.fromkeys([*(name for _, names in hosts_and_names for name in names), *spread])
            gathered = json.loads(_by_first(ranks, lambda: json.dumps([*names])))
        runs = {name: name_runs for name, name_runs in runs.items() if name not in gathered}
        sizes: list[tuple[str, int]] = []
        if ranks is None or ranks.rank == 0:
            sizes = [(name, snapshot.values[name].size_bytes) for name in gathered]
            sizes += [(name, len(data)) for name, data in snapshot.beside.items()]
        return StagingLayout.of(snapshot.storages, runs, sizes), gathered

    def _shared(self, snapshot: Snapshot) -> _Share:
        """Allocate this rank's staging memory; the first rank maps those of the others, and starts its saver."""
        assert self._laid is not None, "its size was compared with the budget"
        staging, gathered, _ = self._laid
        ranks = snapshot.ranks
        self._background.close()
        memory = self._background.memory = StagingMemory(max(1, staging.size_bytes))
        parts = [((os.getpid(), memory.file, memory.size_bytes), staging.runs)]
        if ranks is not None:
            parts = ranks.gather(parts[0])
            if parts is None:
                return _Share(staging, gathered, memory)
        others = [rank for rank, (_, runs) in enumerate(parts) if rank and runs]
        self._background.saver = Saver(memory, *(StagingMemory.of_process(*parts[rank][0]) for rank in others))
        pieces: dict[str, list[tuple[int, int, int, int]]] = {}
        for number, rank in enumerate([0, *others]):
            for name, runs in parts[rank][1].items():
                pieces.setdefault(name, []).extend((at, number, start, size) for at, start, size in runs)
        sources = checked_sources(snapshot.sources(snapshot.values.gathering()))
        for source in sources:
            if (start := staging.gathered.get(source[0])) is not None:
                pieces[source[0]] = [(0, 0, start, source_bytes(source))]
        tensors = tuple(_staged(source, pieces.get(source[0], [])) for source in sources)
        return _Share(staging, gathered, memory, tensors, tuple(others))

    def _gather(self, snapshot: Snapshot, share: _Share) -> None:
        """Copy now what cannot be copied while a step runs; ranks take part in what they share."""
        give_back()  # what steps freed leaves its room to the buffers of saving
        gathering = snapshot.values.gathering(share.gathered)
        if snapshot.ranks is None or snapshot.ranks.rank == 0:
            sources = {source[0]: source for source in snapshot.sources(gathering)}
            for name, start in share.staging.gathered.items():
                _fill(share.memory, start, sources[name])
        gathering.end()

    def _run(self, fence: Fence, ranks: Replicas | None, mark: str) -> None:
        """Carry this rank's part of a save out, on a thread of its own."""
        job, saver, share = self._background.job, self._background.saver, self._share
        assert job is not None
        assert share is not None
        try:
            try:
                fence.run()
            except BaseException:
                if ranks is not None and saver is None:
                    ranks.note(f"not {mark}")
                raise
            if saver is None:
                assert ranks is not None, "alone there is a saver"
                ranks.note(mark)
                return
            saver.start()
            if ranks is not None:
                _wait_for(ranks, mark, share.watched_ranks)
            job.warnings = saver.save(job.order)
        except Exception as error:
            job.failure = error

    def _warn(self, shortage: str) -> None:
        """Warn once that training waits."""
        if not self._warned:
            warnings.warn(BudgetWarning(shortage), stacklevel=4)
        self._warned = True

    @property
    def is_under_way(self) -> bool:
        """Whether a save beside training has not ended."""
        job = self._background.job
        return job is not None and job.thread.is_alive()

    def settle(self) -> None:
        """Return once this rank's part of a save is done."""
        job = self._background.job
        if job is not None:
            job.thread.join()

    def check(self) -> None:
        """Raise what a save beside training has failed of, if it is known by now; as ``wait``."""
        self._in_place.check()
        if not self.is_under_way:
            self.wait()

    def wait(self) -> None:
        """Return once no save is under way.

        Raises:
            StorageError: the last one failed; says of what. The next may be tried.
        """
        job = self._background.job
        if job is None:
            return
        job.thread.join()  # where a signal ends the wait, the save goes on
        self._background.job = None
        for text in job.warnings:
            warnings.warn(text, stacklevel=3)
        if job.failure is not None:
            number = getattr(job.failure, "errno", None)
            raise StorageError(_words(job), errno=number) from job.failure
        if job.order.tensors:  # of the rank that writes
            self.newest = str(job.order.path)

    def waited(self) -> str:
        """Path of the newest checkpoint, or words for none, once no save is under way; raises as ``wait``."""
        self.wait()
        self._in_place.wait()
        return self.newest or "nothing is saved"

    def close(self) -> None:
        """Wait for the save under way, then give staging memory and folders back; raises as ``wait``.

        May be called twice; the next save begins anew.
        """
        try:
            self.wait()
            self._in_place.wait()
        finally:
            self._in_place.end()
            if self._background.job is not None:  # a signal has ended the wait: so ends the save
                if self._background.saver is not None:
                    self._background.saver.kill()
                self._background.end()
            self._background.close()
            self._laid = self._share = None
            if not self._keeps_folders:
                self._locks.close()

    @contextmanager
    def keeping_folders(self) -> Generator[None]:
        """Keep other trainers out of the folders though the saves are closed inside: they go on later."""
        self._keeps_folders = True
        try:
            yield
        finally:
            self._keeps_folders = False


def _wait_for(ranks: Replicas, mark: str, others: Sequence[int]) -> None:
    """Wait until other ranks have made their copies.

    Raises:
        StorageError: they have not.
    """
    deadline = time.monotonic() + _COPIES_S
    while not ranks.noted(mark, others):
        if failed := [rank for rank in others if ranks.noted(f"not {mark}", [rank])]:
            raise StorageError(f"rank {failed[0]} could not copy its part; look at its output")
        if time.monotonic() > deadline:
            raise StorageError(f"expected the copies of ranks {others} within {_COPIES_S:g} s; see whether they live")
        time.sleep(_PAUSE_S)


def _staged(source: TensorSource, pieces: Sequence[tuple[int, int, int, int]]) -> StagedTensor:
    """Put the pieces of a tensor (first byte of it, memory, first byte there, bytes) in order.

    Raises:
        StorageError: they are not all of it.
    """
    (name, dtype, shape, _), size = source, source_bytes(source)
    ordered, end = sorted(pieces), 0
    for at, _, _, count in ordered:
        if at != end:
            break
        end += count
    if end != size:
        raise StorageError(f"tensor {name!r}: expected {size} bytes of all ranks, got those before {end}")
    return StagedTensor(name, dtype, tuple(shape), tuple((memory, start, count) for _, memory, start, count in ordered))


def _words(job: _Job) -> str:
    return f"the checkpoint of step {job.order.step}, saved beside training, is not written: {job.failure}"


def _by_first(ranks: Replicas | None, make: Callable[[], str]) -> str:
    """Let the first rank make a text that all get, with its errors; alone, make it."""
    return make() if ranks is None else ranks.by_first("Trainer.save", make, lambda: None)


def _bytes_of(memory: StagingMemory, start: int, size_bytes: int) -> torch.Tensor:
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory.memory, dtype=torch.uint8, count=size_bytes, offset=start)


def _fill(memory: StagingMemory, start: int, source: TensorSource) -> None:
    """Copy a tensor's chunks into staging memory.

    Raises:
        StorageError: they do not add up to its size.
    """
    (name, dtype, shape, chunks), size_bytes = source, source_bytes(source)
    end, at = start + size_bytes, start
    for chunk in chunks:
        data = chunk.cast("B") if chunk.nbytes else b""
        if at + len(data) <= end:
            memory.memory[at : at + len(data)] = data
        at += len(data)
    if at != end:
        raise StorageError(
            f"tensor {name!r} ({dtype} {list(shape)}): expected {size_bytes} bytes to save, got {at - start}"
        )
