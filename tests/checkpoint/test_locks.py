"""Who may save, read and delete: one trainer saves into a folder, and nothing is deleted that is read."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lading.checkpoint.lock import SaveLocks, delete_lock
from lading.checkpoint.store import latest_checkpoint, open_checkpoint, read_checkpoint, save_checkpoint
from lading.errors import ConfigError, StorageError
from lading.units import MiB


def save(folder: Path, step: int, value: int = 0, keep: int = 1, every: int = 0, size_bytes: int = 3000) -> Path:
    source = ("w", "uint8", [size_bytes], [memoryview(bytes([value]) * size_bytes)])
    return save_checkpoint(folder, step, [source], {"value": value}, keep, every)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_read_is_deleted_later(tmp_path: Path) -> None:
    path = save(tmp_path, 1, 7)
    with read_checkpoint(path) as checkpoint:
        save(tmp_path, 2)
        save(tmp_path, 3)
        assert names(tmp_path) == ["step-00000001", "step-00000003"]
        assert set(b"".join(checkpoint.chunks("w"))) == {7}
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-00000004"]


def test_what_is_replaced_twice_while_it_is_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1, 7)
    with read_checkpoint(path) as checkpoint:
        for value in (8, 9, 10):
            save(tmp_path, 1, value)
            assert open_checkpoint(path).meta == {"value": value}
            assert set(b"".join(checkpoint.chunks("w"))) == {7}
            checkpoint.verify()
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000002"]


def test_what_is_being_deleted_is_not_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with delete_lock(path) as free:
        assert free
        with pytest.raises(StorageError, match="is being deleted or replaced"), read_checkpoint(path):
            pass
    with read_checkpoint(path), delete_lock(path) as free:
        assert not free


def test_what_is_replaced_between_its_opening_and_its_lock_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = save(tmp_path, 1, 7), fcntl.flock

    def late(file: int, operation: int) -> None:
        if operation & fcntl.LOCK_SH and path.exists():
            path.rename(tmp_path / "aside")
            (tmp_path / "aside2").mkdir()
            (tmp_path / "aside2").rename(path)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(StorageError, match="is being deleted or replaced"), read_checkpoint(path):
        pass


def test_every_so_many_steps_one_stays(tmp_path: Path) -> None:
    for step in range(1, 14):
        save(tmp_path, step, keep=2, every=5)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (5, 10, 12, 13)]
    with pytest.raises(ConfigError, match="keep_every_steps >= 0"):
        save(tmp_path, 14, every=-1)


def test_one_trainer_saves_into_a_folder(tmp_path: Path) -> None:
    first, second = SaveLocks(), SaveLocks()
    for _ in range(2):
        first.take(tmp_path / "new")
    save(tmp_path / "new", 1)
    with pytest.raises(StorageError, match=rf"expected {tmp_path}/new to be free, found another trainer that saves"):
        second.take(tmp_path / "new")
    second.take(tmp_path / "other")
    first.close()
    second.take(tmp_path / "new")
    assert names(tmp_path / "new") == ["step-00000001"]
    del second  # whoever forgets to close one
    first.take(tmp_path / "new")
    first.close()
    (tmp_path / "file").write_text("")
    first.take(tmp_path / "file")
    with pytest.raises(StorageError, match="expected a folder of checkpoints at"):
        save(tmp_path / "file", 1)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Saving works, and who reads is told that nothing protects it."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    SaveLocks().take(tmp_path)
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000002"]
    with pytest.warns(UserWarning, match="nothing keeps .* from being deleted"), read_checkpoint(path) as checkpoint:
        checkpoint.verify()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={4 * MiB}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_is_full(disk: Path) -> None:
    older = save(disk / "saved", 1, size_bytes=MiB)
    with pytest.raises(StorageError, match=r"the disk is full: .* needs 5\.00 MiB, .* newest checkpoint is .*01"):
        save(disk / "saved", 2, size_bytes=5 * MiB)
    assert names(disk / "saved") == [older.name]
    open_checkpoint(older).verify()
    save(disk / "saved", 2, size_bytes=MiB)


def test_a_disk_that_becomes_read_only(disk: Path) -> None:
    older = save(disk / "saved", 1)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(StorageError, match=r"cannot save checkpoint .*Read-only file system.*newest checkpoint is"):
        save(disk / "saved", 2)
    assert latest_checkpoint(disk / "saved") == older
    with read_checkpoint(older) as checkpoint:
        checkpoint.verify()
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    save(disk / "saved", 2)
    assert names(disk / "saved") == ["step-00000002"]


def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = save(tmp_path, 1)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("mkdir", "rename", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(StorageError, match=r"Read-only file system; check the folder and its disk; the newest .*01"):
        save(tmp_path, 2)
    assert names(tmp_path) == [older.name]
