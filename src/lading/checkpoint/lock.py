"""One run per folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lading.errors import StorageError


@contextmanager
def run_lock(folder: Path, agents: Sequence[str] = ()) -> Iterator[None]:
    """Keep other runs out of ``folder``, which is made if need be; the lock ends with the process, however that ends.

    Args:
        agents: Names of the processes that started this run, which ``agents_of`` reads when they start it again.

    Raises:
        StorageError: another run is writing there, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _cannot_use(folder, error) from error
    try:
        try:
            _lock(file, folder, agents)
        except StorageError:
            raise
        except OSError as error:  # a file system without locks, or a disk without space for a process number
            raise _cannot_use(folder, error) from error
        yield
    finally:
        os.close(file)


def agents_of(folder: Path) -> list[str]:
    """Names of the processes that started the last run in ``folder``, as ``run_lock`` was given them."""
    path = folder / "run.lock"
    return path.read_text().splitlines()[1:] if path.is_file() else []


def _lock(file: int, folder: Path, agents: Sequence[str]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(file, 32, 0).decode(errors="replace").partition("\n")[0] or "unknown"
        raise StorageError(
            f"expected {folder} to be free, found process {owner} training there; "
            "wait for it, or choose another out folder"
        ) from error
    os.ftruncate(file, 0)
    os.pwrite(file, "\n".join((str(os.getpid()), *agents)).encode(), 0)


def _cannot_use(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot use {folder / 'run.lock'} to keep other runs out of {folder}: {error.strerror}; free some space, or "
        "choose another out folder"
    )
