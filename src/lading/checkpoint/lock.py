"""Locks: one run in a folder, one trainer that saves into a folder, and no checkpoint deleted while it is read.

All end with the process that has them, however that ends. Folders of checkpoints are locked by themselves, so that no
file is left in them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lading.errors import StorageError
from lading.files import make_durable_folder

#: What a file system says that has no locks, or none of folders.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EBADF, errno.EINVAL)


@contextmanager
def run_lock(folder: Path, agents: Sequence[str] = (), prepare: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Keep other runs out of ``folder``, which is made if need be; the lock ends with the process, however that ends.

    Args:
        agents: Names of the processes that started this run, which ``agents_of`` reads when they start it again.
        prepare: Called when the folder is this run's, before ``agents_of`` says so.

    Raises:
        StorageError: another run is writing there, or the folder cannot be written; or as ``prepare``.
    """
    try:
        make_durable_folder(folder)
        file = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise _cannot_use(folder, error) from error
    try:
        try:
            _lock(file, folder)
            _write(file, str(os.getpid()))
            prepare()
            _write(file, "\n".join((str(os.getpid()), *agents)))
        except StorageError:
            raise
        except OSError as error:  # a file system without locks, or a disk without space for a process number
            raise _cannot_use(folder, error) from error
        yield
    finally:
        os.close(file)


def check_free(folder: Path) -> None:
    """Refuse a folder where another run is writing, without taking it; one that cannot be looked at is for the lock.

    Raises:
        StorageError: another run is writing there.
    """
    try:
        file = os.open(folder / "run.lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        _lock(file, folder, fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    finally:
        os.close(file)


def agents_of(folder: Path) -> list[str]:
    """Names of the processes that started the last run in ``folder``, as ``run_lock`` was given them."""
    path = folder / "run.lock"
    return path.read_text().splitlines()[1:] if path.is_file() else []


class SaveLocks:
    """Locks of the folders that a trainer saves into, each taken when it is first asked for, held until ``close``."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def take(self, folder: Path) -> None:
        """Keep other trainers from saving into a folder, which is made if need be; again does nothing.

        A file system that has no locks of folders lets them. A folder that cannot be made is for the save to tell.

        Raises:
            StorageError: another one saves there.
        """
        if (absolute := folder.absolute()) in self._files:
            return
        try:
            make_durable_folder(absolute)
            file = os.open(absolute, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(file)
                if not isinstance(error, BlockingIOError):
                    raise StorageError(f"cannot lock {folder}: {error.strerror}; choose another folder") from error
                raise StorageError(
                    f"expected {folder} to be free, found another trainer that saves there; close it or wait for its "
                    "process, or choose another folder"
                ) from error
        self._files[absolute] = file

    def close(self) -> None:
        """Let others save into the folders; may be called twice."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        self.close()


@contextmanager
def read_lock(path: Path) -> Iterator[int]:
    """Keep a checkpoint's folder from being deleted while the block reads it.

    Yields:
        A descriptor of the folder, which is still this one when its name is taken by another.
    Raises:
        StorageError: it is being deleted.
        OSError: it is missing or cannot be opened.
    """
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            was_replaced = not path.exists() or os.stat(path).st_ino != os.fstat(file).st_ino
        except BlockingIOError:
            was_replaced = True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            was_replaced = False
            warnings.warn(f"nothing keeps {path} from being deleted while it is read: {error.strerror}", stacklevel=4)
        if was_replaced:
            raise StorageError(f"{path} is being deleted or replaced; open another checkpoint")
        yield file
    finally:
        os.close(file)


@contextmanager
def delete_lock(path: Path) -> Iterator[bool]:
    """Tell whether a checkpoint may be deleted during the block, as nobody reads it, and keep readers out meanwhile.

    Raises:
        OSError: it cannot be opened.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        free = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield free
    finally:
        os.close(file)


def _lock(file: int, folder: Path, kind: int = fcntl.LOCK_EX) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(file, 32, 0).decode(errors="replace").partition("\n")[0] or "unknown"
        raise StorageError(
            f"expected {folder} to be free, found process {owner} training there; "
            "wait for it, or choose another out folder"
        ) from error


def _write(file: int, text: str) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, text.encode(), 0)


def _cannot_use(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot use {folder / 'run.lock'} to keep other runs out of {folder}: {error.strerror}; free some space, or "
        "choose another out folder"
    )
