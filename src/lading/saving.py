"""Saving: the checkpoints of a trainer, written while it waits, or beside training by the saver process.

[Note: beside training] A save beside training copies every value into staging memory, which is made once, and hands it
to ``lading.checkpoint.saver``, a process that writes, checksums and commits it. Values that lie in memory as they are
written are copied on a thread while the next step runs, in the order in which the step will write over them, and held
by a fence until then (``lading.runtime.fence``). What is shared with other ranks, lies in a file or has another order
in memory is copied before training goes on. Where the budget leaves no room for staging memory, training waits.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lading.checkpoint.lock import SaveLocks
from lading.checkpoint.saver import SaveOrder, Saver, StagedTensor
from lading.checkpoint.staging import StagingMemory, staged_bytes
from lading.checkpoint.state import TensorSource, checked_sources, source_bytes
from lading.checkpoint.store import check_retention, plain_json, save_checkpoint
from lading.errors import BudgetWarning, StorageError
from lading.ir.action import DEVICE
from lading.ir.machine import MEMORY
from lading.ir.program import Program
from lading.runtime.executor import Executor
from lading.runtime.fence import Fence
from lading.runtime.named import NamedValues, Value
from lading.runtime.resident import give_back
from lading.units import format_bytes


@dataclass(frozen=True)
class Snapshot:
    """Values of a trainer between two steps, and what a checkpoint has beside them.

    Attributes:
        programs: Programs that take turns over the values.
        beside: Further tensors (name, bytes), saved as uint8.
    """

    step: int
    executor: Executor
    values: NamedValues
    programs: Sequence[Program]
    beside: Mapping[str, bytes]

    def sources(self, left: list[str]) -> list[TensorSource]:
        """List the tensors of a checkpoint; reading one that ranks share takes its name from ``left``."""
        named: list[TensorSource] = [
            (name, value.dtype, value.shape, self.values.chunks(name, left)) for name, value in self.values.items()
        ]
        more: list[TensorSource] = [(n, "uint8", (len(data),), [memoryview(data)]) for n, data in self.beside.items()]
        return named + more

    def can_stage(self, value: Value) -> bool:
        """Whether a value's bytes lie in this process's memory as they are saved, so that a thread can copy them."""
        if value.start is not None or value.is_shared:
            return False
        storages = self.executor.program.graph.storages
        is_whole = sum(storages[storage].size_bytes for storage in value.storages) == value.size_bytes
        return is_whole and all(map(self.executor.can_stage, value.storages))

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging memory that a checkpoint takes."""
        sizes = [*(value.size_bytes for value in self.values.values()), *map(len, self.beside.values())]
        return sum(map(staged_bytes, sizes))

    @property
    def room_bytes(self) -> int:
        """Bytes that the plan's budget leaves for staging: of the device's memory if that is the host's."""
        if self.executor.kind == "cpu":
            budgets = (p.budgets[DEVICE] - p.peak_bytes + p.staging_bytes for p in self.programs)
            return max(0, min(budgets))
        host = next((tier.name for tier in self.programs[0].tiers if tier.kind == MEMORY), "")
        return max(0, min(p.budgets.get(host, 0) - p.tier_bytes(host) for p in self.programs))

    @property
    def shortage(self) -> str:
        """Say why a checkpoint cannot be staged beside training; "" where it can."""
        needed, room = self.staging_bytes, self.room_bytes
        if needed <= room:
            return ""
        what = "memory budget" if self.executor.kind == "cpu" else "host tier's budget"
        return (
            f"checkpoints are written while training waits: to write them beside it, {format_bytes(needed)} of memory "
            f"would stage them, and the {what} leaves {format_bytes(room)}; raise it by {format_bytes(needed - room)}, "
            "or wait for them (checkpoint.wait = true in a run)"
        )


@dataclass(eq=False)
class _Job:
    """One save beside training."""

    order: SaveOrder
    thread: threading.Thread | None = None
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
        if self.job is not None and self.job.thread is not None:
            self.job.thread.join()
            if self.job.failure is not None:
                warnings.warn(_words(self.job), stacklevel=2)
        self.job = None
        self.close()

    def close(self) -> None:
        """End the saver, and give the memory back."""
        if self.saver is not None:
            self.saver.close()
        if self.memory is not None:
            self.memory.close()
        self.saver = self.memory = None


@dataclass(eq=False)
class Saves:
    """Checkpoints of one trainer, one at a time.

    Attributes:
        newest: Path of the newest that is committed; "" without one.
    """

    newest: str = ""
    _locks: SaveLocks = field(default_factory=SaveLocks)
    _background: _Background = field(default_factory=_Background)
    _warned: bool = False

    def __post_init__(self) -> None:
        weakref.finalize(self, self._background.end)

    def save(
        self,
        snapshot: Snapshot,
        folder: Path,
        meta: Mapping[str, Any],
        keep: int,
        keep_every_steps: int = 0,
        *,
        wait: bool,
    ) -> Path:
        """Write a checkpoint; without ``wait`` beside training, if the budget has room. One under way ends first.

        Returns:
            Its folder, which is there once it is committed.
        Raises:
            StorageError: it cannot be written, another trainer saves there, or the one before could not be written.
            ConfigError: ``meta`` has no JSON form, keep < 1 or keep_every_steps < 0.
        """
        left = snapshot.values.shared()
        try:
            self.wait()
            self._locks.take(folder)
            meta = plain_json(meta)
            check_retention(keep, keep_every_steps)
            if not wait and (shortage := snapshot.shortage):
                wait = True
                self._warn(shortage)
            give_back()  # what steps freed leaves its room to the buffers of saving
            snapshot.executor.reset_peak()
            sources = snapshot.sources(left)
            if not wait:
                path = self._begin(snapshot, checked_sources(sources), folder, meta, keep, keep_every_steps)
            else:
                path = save_checkpoint(folder, snapshot.step, sources, meta, keep, keep_every_steps)
                self.newest = str(path)
        finally:  # the others give all shards, whether or not they can be written
            snapshot.values.give(list(left))
        snapshot.executor.observe_peak()
        return path

    def _warn(self, shortage: str) -> None:
        """Warn once that training waits."""
        if not self._warned:
            warnings.warn(BudgetWarning(shortage), stacklevel=5)
        self._warned = True

    def _begin(
        self,
        snapshot: Snapshot,
        sources: Sequence[TensorSource],
        folder: Path,
        meta: Mapping[str, Any],
        keep: int,
        keep_every_steps: int,
    ) -> Path:
        """Copy what has to be copied now, and start a thread that does the rest."""
        memory, fresh_bytes = self._memory(snapshot.staging_bytes)
        tensors: list[StagedTensor] = []
        rooms: dict[int, list[torch.Tensor]] = {}
        start = 0
        for name, dtype, shape, chunks in sources:
            size = source_bytes((name, dtype, shape, chunks))
            tensors.append(StagedTensor(name, dtype, tuple(shape), start, size))
            value = snapshot.values.get(name)
            if size and value is not None and snapshot.can_stage(value):
                self._place(snapshot, value.storages, memory, start, rooms)
            else:
                _fill(memory, start, size, (name, dtype, shape, chunks))
            start += staged_bytes(size)
        job = _Job(SaveOrder(str(folder.absolute()), snapshot.step, meta, keep, tuple(tensors), keep_every_steps))
        fence = snapshot.executor.stage(rooms, fresh_bytes)
        saver = self._background.saver = self._background.saver or Saver(memory)
        job.thread = threading.Thread(target=_run, args=(job, fence, saver), name="lading-saving")
        self._background.job = job
        try:
            job.thread.start()
        except BaseException:
            self._background.job = None
            fence.open()
            raise
        return folder / job.order.path.name

    def _memory(self, size_bytes: int) -> tuple[StagingMemory, int]:
        """Staging memory of so many bytes at least, and how many of them nobody has touched."""
        memory = self._background.memory
        if memory is not None and memory.size_bytes >= size_bytes:
            return memory, 0
        self._background.close()
        memory = self._background.memory = StagingMemory(size_bytes)
        return memory, size_bytes

    def _place(
        self,
        snapshot: Snapshot,
        storages: Sequence[int],
        memory: StagingMemory,
        start: int,
        rooms: dict[int, list[torch.Tensor]],
    ) -> None:
        """Find the places that storages of one value, one after another, have in staging memory."""
        for storage in storages:
            size = snapshot.executor.program.graph.storages[storage].size_bytes
            rooms.setdefault(storage, []).append(_bytes_of(memory, start, size))
            start += size

    @property
    def is_under_way(self) -> bool:
        """Whether a save beside training has not ended."""
        job = self._background.job
        return job is not None and job.thread is not None and job.thread.is_alive()

    def check(self) -> None:
        """Raise what a save beside training has failed of, if it is known by now; as ``wait``."""
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
        assert job.thread is not None
        job.thread.join()  # where a signal ends the wait, the save goes on
        self._background.job = None
        for text in job.warnings:
            warnings.warn(text, stacklevel=3)
        if job.failure is not None:
            number = getattr(job.failure, "errno", None)
            raise StorageError(_words(job), errno=number) from job.failure
        self.newest = str(job.order.path)

    def waited(self) -> str:
        """Path of the newest checkpoint, or words for none, once no save is under way; raises as ``wait``."""
        self.wait()
        return self.newest or "nothing is saved"

    def close(self) -> None:
        """Wait for the save under way, then give the staging memory back; raises as ``wait``. May be called twice."""
        try:
            self.wait()
        finally:
            if self._background.job is not None:  # a signal has ended the wait: so ends the save
                if self._background.saver is not None:
                    self._background.saver.kill()
                self._background.end()
            self._background.close()
            self._locks.close()


def _run(job: _Job, fence: Fence, saver: Saver) -> None:
    """Carry a save out, on its thread."""
    try:
        try:
            saver.start()  # which comes up meanwhile
        finally:
            fence.run()
        job.warnings = saver.save(job.order)
    except Exception as error:
        job.failure = error


def _words(job: _Job) -> str:
    return f"the checkpoint of step {job.order.step}, saved beside training, is not written: {job.failure}"


def _bytes_of(memory: StagingMemory, start: int, size_bytes: int) -> torch.Tensor:
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory.memory, dtype=torch.uint8, count=size_bytes, offset=start)


def _fill(memory: StagingMemory, start: int, size_bytes: int, source: TensorSource) -> None:
    """Copy a tensor's chunks into staging memory.

    Raises:
        StorageError: they do not add up to its size.
    """
    name, dtype, shape, chunks = source
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
