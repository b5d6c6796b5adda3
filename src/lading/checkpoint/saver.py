"""The saver: a process beside training that writes, checksums and commits checkpoints out of staging memory.

It imports no torch, so that it starts in a tenth of a second and takes some 20 MiB. It yields the processors to
training: whatever wakes interrupts it at once (SCHED_IDLE of Linux). Where training never leaves a processor idle, such
a process gets three thousandths of one, and a save would last for hours: when that has shown for ten seconds, another
process begins the save anew, which gets 3% at least, and writes the later ones, too. (It cannot be the same one: Linux
lets nobody but root out of SCHED_IDLE.) Signals that ask a job to end are left to the
training process, which waits for the save under way; where that process is gone, the saver ends at once, and what it
had not committed is a leftover like any other.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lading.checkpoint.staging import StagingMemory
from lading.checkpoint.state import CHUNK_BYTES, TensorSource
from lading.checkpoint.store import save_checkpoint
from lading.errors import ConfigError, LadingError, StorageError

#: How the saver begins: with the folders that the training process imports from, and no other.
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from lading.checkpoint.saver import main; main()"
#: Of a saver that is no idle work, and the share of a processor that Linux gives it beside a thread that never pauses.
_NICENESS, _SHARE = 15, 0.03
#: Word for a saver that is idle work.
_IDLE = "idle"
#: Seconds for which such a one waits for processors before it may be found to starve, and between two looks.
_PATIENCE_S, _LOOK_S = 10.0, 0.5
#: Seconds that a saver without work has to end.
_CLOSING_S = 10.0


@dataclass(frozen=True)
class StagedTensor:
    """Tensor of a checkpoint, whose bytes lie in staging memories.

    Attributes:
        pieces: (number of the memory, first byte there, bytes), one after another.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class SaveOrder:
    """One checkpoint to write, as ``save_checkpoint`` takes it; ``meta`` must be JSON."""

    folder: str
    step: int
    meta: Mapping[str, Any]
    keep: int
    tensors: tuple[StagedTensor, ...]
    keep_every_steps: int = 0

    @property
    def path(self) -> Path:
        """Folder that the checkpoint will have."""
        return Path(self.folder) / f"step-{self.step:08d}"


class Saver:
    """A saver process. Started by the first save, and again after it has died.

    Args:
        memories: Memories that training processes of this host fill.
    """

    def __init__(self, *memories: StagingMemory) -> None:
        self.memories = memories
        self._process: subprocess.Popen[bytes] | None = None
        self._is_idle_work, self._is_killed = True, False

    @property
    def pid(self) -> int | None:
        """Number of the process; None before the first save."""
        return None if self._process is None else self._process.pid

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process, if none lives; returns it.

        Raises:
            StorageError: the system starts no process.
        """
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        places = [(memory.file, memory.size_bytes) for memory in self.memories]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, json.dumps(sys.path), json.dumps(places), self._kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[file for file, _ in places],
                process_group=0,  # not that of a terminal's Ctrl-C; in another session niceness could mean nothing
            )
        except OSError as error:
            raise StorageError(
                f"cannot start the process that saves: {error}; save with wait=True, which needs none"
            ) from error
        return self._process

    def save(self, order: SaveOrder) -> list[str]:
        """Have a checkpoint written, and wait until it is committed.

        Returns:
            Warnings of what went wrong beside it.
        Raises:
            ConfigError, StorageError: as ``save_checkpoint``; or the process died. Older checkpoints are whole.
        """
        process, warnings_of_start = self.start(), list[str]()
        answer = self._answer(process, order)
        if answer is None and not self._is_killed:
            warnings_of_start.append(
                f"training leaves no processor idle, so checkpoints are written with {_SHARE:.0%} of one from step "
                f"{order.step} on, beside training; train with a thread less, or let it wait for them "
                "(checkpoint.wait = true in a run), if they last too long"
            )
            self._is_idle_work = False
            process = self.start()
            answer = self._answer(process, order)
        if not answer or not answer.endswith(b"\n"):
            raise StorageError(
                f"cannot save checkpoint {order.path}: the process that saves ({process.pid}) has died "
                f"({_ending(process.wait())}); older checkpoints are whole; look at the system's log for its memory, "
                "and save again"
            )
        outcome = json.loads(answer)
        if "failed" not in outcome:
            return warnings_of_start + outcome["warnings"]
        kind = ConfigError if outcome["kind"] == ConfigError.__name__ else StorageError
        error = kind(outcome["failed"])
        if isinstance(error, StorageError):
            error.errno = outcome["errno"]
        raise error

    @property
    def _kind(self) -> str:
        return _IDLE if self._is_idle_work else "nice"

    def _answer(self, process: subprocess.Popen[bytes], order: SaveOrder) -> bytes | None:
        """Give a process an order and wait for its answer: b"" if it dies, None if it is idle work and starves."""
        assert process.stdin is not None
        assert process.stdout is not None
        before = _ran_and_waited_s(process.pid)
        try:
            process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return b""
        poller = select.poll()
        poller.register(process.stdout, select.POLLIN)
        while not poller.poll(1000 * _LOOK_S if self._is_idle_work else None):
            if _starves(before, _ran_and_waited_s(process.pid)):
                process.kill()
                process.wait()
                return None
        return process.stdout.readline()

    def kill(self) -> None:
        """Stop the process at once: ``save``, on another thread, raises."""
        self._is_killed = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process, which has no save under way. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()
        try:
            process.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ran_and_waited_s(pid: int) -> tuple[float, float] | None:
    """Seconds for which a process ran, and was ready to run without a processor; None where the system does not say."""
    with suppress(OSError, ValueError):
        ran, waited, times = map(int, Path(f"/proc/{pid}/schedstat").read_text().split())
        if times:  # a system that does not count says 0
            return ran / 1e9, waited / 1e9
    return None


def _starves(before: tuple[float, float] | None, now: tuple[float, float] | None) -> bool:
    """Whether a process has waited for long, and got less than another one would that is no idle work."""
    if before is None or now is None:
        return False
    ran_s, waited_s = now[0] - before[0], now[1] - before[1]
    return waited_s > _PATIENCE_S and ran_s < _SHARE * (ran_s + waited_s)


def _ending(code: int) -> str:
    with suppress(ValueError):
        return f"by {signal.Signals(-code).name}"
    return f"with status {code}"


def main() -> None:
    """Run the saver: an order a line on standard input, an answer a line on standard output, both JSON."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    if sys.argv[3] == _IDLE and hasattr(os, "SCHED_IDLE") and _ran_and_waited_s(os.getpid()):
        with suppress(PermissionError):  # a sandbox that allows no choice
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    memories = [StagingMemory(size_bytes, file).memory for file, size_bytes in json.loads(sys.argv[2])]
    orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    while True:
        outcome = _carry_out(json.loads(orders.get()), memories)
        sys.stdout.write(json.dumps(outcome) + "\n")
        sys.stdout.flush()


def _listen(orders: queue.SimpleQueue[bytes]) -> None:
    """Take orders until the training process closes or is gone; then end, whatever is under way."""
    for line in sys.stdin.buffer:
        orders.put(line)
    os._exit(0)


def _carry_out(order: dict[str, Any], memories: Sequence[memoryview]) -> dict[str, Any]:
    """Write the checkpoint of an order; returns the answer."""
    tensors = [_source(StagedTensor(**entry), memories) for entry in order["tensors"]]
    outcome: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            retention = order["keep"], order["keep_every_steps"]
            save_checkpoint(Path(order["folder"]), order["step"], tensors, order["meta"], *retention)
        except (LadingError, OSError, MemoryError) as error:
            outcome |= {"failed": f"{error}" or type(error).__name__, "kind": type(error).__name__}
            outcome["errno"] = getattr(error, "errno", None) or getattr(error.__cause__, "errno", None)
    return {**outcome, "warnings": [str(warning.message) for warning in caught]}


def _source(tensor: StagedTensor, memories: Sequence[memoryview]) -> TensorSource:
    def chunks() -> Iterator[memoryview]:
        for number, first, size_bytes in tensor.pieces:
            end = first + size_bytes
            for start in range(first, end, CHUNK_BYTES):
                yield memories[number][start : min(start + CHUNK_BYTES, end)]

    return tensor.name, tensor.dtype, tuple(tensor.shape), chunks()
