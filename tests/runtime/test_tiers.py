"""Tiers give back what was put in, or say what is wrong."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from lading.errors import StorageError
from lading.ir.program import PAGE_BYTES
from lading.runtime.host_arena import Arena, huge_page_bytes
from lading.runtime.resident import resident_bytes
from lading.runtime.tiers import PIECE_BYTES, FileTier, MemoryTier, TierBytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "swap"


def tier_of(kind: str, folder: Path, size: int) -> TierBytes:
    return FileTier(folder, size) if kind == "disk" else MemoryTier(Arena(size))


@pytest.mark.parametrize("kind", ["disk", "memory"])
@pytest.mark.parametrize("size", [64, PAGE_BYTES, 3 * PAGE_BYTES, 5 * PAGE_BYTES + 100, PIECE_BYTES + PAGE_BYTES])
def test_round_trip(kind: str, folder: Path, size: int) -> None:
    pages = -(-size // PAGE_BYTES) * PAGE_BYTES
    arena = Arena(2 * pages)
    source, target = arena.memory[:size], arena.memory[pages : pages + size]
    source[:] = os.urandom(size)
    tier = tier_of(kind, folder, 2 * PAGE_BYTES + size)
    tier.write(2 * PAGE_BYTES, arena.bytes_at(0, size))
    tier.read(2 * PAGE_BYTES, arena.bytes_at(pages, size))
    assert bytes(target) == bytes(source)
    tier.close()


@pytest.mark.skipif(not huge_page_bytes(), reason="the system makes no huge pages for those who ask")
def test_an_arena_lies_in_whole_huge_pages_and_takes_no_more_than_its_bytes() -> None:
    huge = huge_page_bytes()
    arena = Arena(8 * huge + 3 * PAGE_BYTES)  # a huge page at its end would reach beyond it
    before = resident_bytes()
    arena.bytes_at(0, arena.size_bytes).fill_(1)
    assert abs(resident_bytes() - before - arena.size_bytes) < huge // 2
    assert arena.bytes_at(0, 1).data_ptr() % huge == 0, "of one that is cut off at its start nothing is huge"
    flags = _smaps_of(arena.bytes_at(0, 1).data_ptr(), "VmFlags:")
    assert "hg" in flags.split(), "the kernel was not asked for huge pages"
    assert arena.size_bytes == len(arena.memory)
    arena.close()


def _smaps_of(address: int, key: str) -> str:
    """Line of the mapping at an address that begins with ``key``."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= address < high
        elif inside and line.startswith(key):
            return line
    raise AssertionError(f"no mapping at {address:#x}")


@pytest.mark.parametrize("size", [64, PAGE_BYTES, 3 * PAGE_BYTES, 5 * PAGE_BYTES + 100, PIECE_BYTES + PAGE_BYTES])
def test_prepared_moves_are_those_made_at_once(folder: Path, size: int) -> None:
    """Of one call to the system or of several, as often as they are run."""
    pages = -(-size // PAGE_BYTES) * PAGE_BYTES
    arena, tier = Arena(2 * pages), FileTier(folder, 2 * PAGE_BYTES + size)
    write = tier.writing(2 * PAGE_BYTES, arena.bytes_at(0, size))
    read = tier.reading(2 * PAGE_BYTES, arena.bytes_at(pages, size))
    for _ in range(2):
        arena.memory[:size] = os.urandom(size)
        write()
        read()
        assert bytes(arena.memory[pages : pages + size]) == bytes(arena.memory[:size])
    tier.close()


def test_neighbours_are_left_alone(folder: Path) -> None:
    arena, tier = Arena(4 * PAGE_BYTES), FileTier(folder, 4 * PAGE_BYTES)
    arena.memory[: 4 * PAGE_BYTES] = b"a" * (4 * PAGE_BYTES)
    tier.write(0, arena.bytes_at(0, arena.size_bytes))
    arena.memory[:100] = b"b" * 100
    tier.write(PAGE_BYTES, arena.bytes_at(0, 100))
    tier.read(0, arena.bytes_at(0, arena.size_bytes))
    assert bytes(arena.memory[:PAGE_BYTES]) == b"a" * PAGE_BYTES
    assert bytes(arena.memory[PAGE_BYTES : PAGE_BYTES + 100]) == b"b" * 100
    assert bytes(arena.memory[2 * PAGE_BYTES :]) == b"a" * (2 * PAGE_BYTES)
    tier.close()


def test_the_file_has_no_name_and_its_space_comes_back(folder: Path) -> None:
    tier = FileTier(folder, 1 << 20)
    assert [p.name for p in folder.iterdir()] == ["lading.lock"]
    assert (folder / "lading.lock").read_text().split()[0] == str(os.getpid())
    tier.close()
    assert list(folder.iterdir()) == []
    tier.close()


def _hold(folder: Path, ready: Connection) -> None:
    FileTier(folder, PAGE_BYTES)
    ready.send(True)
    signal.pause()


def test_one_run_per_folder_until_it_is_gone(folder: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ready, tell = context.Pipe(duplex=False)
    process = context.Process(target=_hold, args=(folder, tell))
    process.start()
    assert ready.poll(60)
    with pytest.raises(StorageError, match=rf"in use by process {process.pid}; .*folder of its own"):
        FileTier(folder, PAGE_BYTES)
    process.kill()
    process.join()
    (folder / "lading-swap-1").write_bytes(b"left by a run killed between open and unlink")
    tier = FileTier(folder, PAGE_BYTES)
    assert [p.name for p in folder.iterdir()] == ["lading.lock"]
    tier.close()


def test_a_file_that_lost_a_part_and_is_long_again_is_refused(folder: Path) -> None:
    """What was lost would be read as zeros."""
    tier, arena = FileTier(folder, 64 * PAGE_BYTES), Arena(PAGE_BYTES)
    page = arena.bytes_at(0, PAGE_BYTES)
    os.ftruncate(tier._file, 48 * PAGE_BYTES)  # pyright: ignore[reportPrivateUsage]
    os.ftruncate(tier._file, 64 * PAGE_BYTES)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(StorageError, match="has lost some of its 262144 bytes"):
        tier.read(50 * PAGE_BYTES, page)
    with pytest.raises(StorageError, match="has lost some of its 262144 bytes"):
        tier.reading(50 * PAGE_BYTES, page)()
    tier.close()


@pytest.mark.parametrize("is_prepared", [False, True])
def test_no_write_makes_a_file_long_again_that_lost_its_end(folder: Path, is_prepared: bool) -> None:
    """Of a few pages the blocks say nothing, and once the file is long again they are zeros."""
    tier, arena = FileTier(folder, 64 * PAGE_BYTES), Arena(PAGE_BYTES)
    page = arena.bytes_at(0, PAGE_BYTES)
    write = tier.writing(63 * PAGE_BYTES, page) if is_prepared else partial(tier.write, 63 * PAGE_BYTES, page)
    write()
    os.ftruncate(tier._file, 62 * PAGE_BYTES)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(StorageError, match="has lost some of its 262144 bytes"):
        write()
    with pytest.raises(StorageError, match="lost some"):
        tier.read(62 * PAGE_BYTES, page)
    tier.close()


def test_a_full_disk_is_found_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"expected 1.00 MiB \(1048576 bytes\).*swap, found .* free \(No space"):
        FileTier(folder, 1 << 20)
    assert not list(folder.iterdir())
    monkeypatch.undo()
    FileTier(folder, 1 << 20).close()  # neither lock nor file was left behind


def test_a_quota_is_no_want_of_space(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "posix_fallocate", refused)
    with pytest.raises(StorageError, match="found a quota on the space of this user") as caught:
        FileTier(folder, 1 << 20)
    assert " free" not in str(caught.value)  # the disk may have all the space in the world


def test_a_file_size_limit_is_found_at_the_start(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(StorageError, match=r"found a limit on the size of a file, .*ulimit -f.*File too large"):
            FileTier(folder, 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="choose a folder that can be written"):
        FileTier(tmp_path / "swap", PAGE_BYTES)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot use .*file for swapping"):
        FileTier(tmp_path / "file", PAGE_BYTES)


@pytest.mark.parametrize(("call", "verb"), [("preadv", "read"), ("pwritev", "write")])
def test_disk_errors(folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, verb: str) -> None:
    tier, arena = FileTier(folder, 4 * PAGE_BYTES), Arena(4 * PAGE_BYTES)

    def broken(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, broken)
    with pytest.raises(StorageError, match=f"cannot {verb} 16384 bytes at 0.*Input/output error") as caught:
        getattr(tier, verb)(0, arena.bytes_at(0, arena.size_bytes))
    assert caught.value.errno == errno.EIO
    with pytest.raises(StorageError, match=f"cannot {verb} 16384 bytes at 0.*Input/output error"):
        {"read": tier.reading, "write": tier.writing}[verb](0, arena.bytes_at(0, arena.size_bytes))()
    monkeypatch.setattr(os, call, lambda file, buffers, offset: 100)
    with pytest.raises(StorageError, match="moved less than a page"):
        getattr(tier, verb)(0, arena.bytes_at(0, arena.size_bytes))
    tier.close()


def test_short_transfers_are_continued(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may move fewer bytes, and not whole pages."""
    tier, arena = FileTier(folder, 8 * PAGE_BYTES), Arena(8 * PAGE_BYTES)
    calls: list[int] = []
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def short(file: int, buffers: Sequence[memoryview], offset: int, real: object = real) -> int:
            calls.append(offset)
            moved = real(file, [buffers[0][: 3 * PAGE_BYTES]], offset)  # type: ignore[operator]
            return moved - 10 if len(buffers[0]) > 3 * PAGE_BYTES else moved

        monkeypatch.setattr(os, name, short)
    data = os.urandom(8 * PAGE_BYTES)
    arena.memory[:] = data
    tier.write(0, arena.bytes_at(0, arena.size_bytes))
    arena.memory[:] = bytes(8 * PAGE_BYTES)
    tier.read(0, arena.bytes_at(0, arena.size_bytes))
    assert bytes(arena.memory) == data
    assert len(calls) > 4
    arena.memory[:] = bytes(8 * PAGE_BYTES)
    tier.writing(0, arena.bytes_at(0, arena.size_bytes))()
    arena.memory[:] = data
    tier.writing(0, arena.bytes_at(0, arena.size_bytes))()
    arena.memory[:] = bytes(8 * PAGE_BYTES)
    tier.reading(0, arena.bytes_at(0, arena.size_bytes))()
    assert bytes(arena.memory) == data
    tier.close()


def test_without_direct_io_it_works_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(UserWarning, match="does not take O_DIRECT"):
        tier = FileTier(folder, 2 * PAGE_BYTES)
    assert not tier.direct
    arena = Arena(2 * PAGE_BYTES)
    arena.memory[:] = b"x" * (2 * PAGE_BYTES)
    tier.write(0, arena.bytes_at(0, arena.size_bytes))
    arena.memory[:] = bytes(2 * PAGE_BYTES)
    tier.read(0, arena.bytes_at(0, arena.size_bytes))
    assert bytes(arena.memory) == b"x" * (2 * PAGE_BYTES)
    tier.close()


def test_out_of_range(folder: Path) -> None:
    tier, arena = FileTier(folder, PAGE_BYTES), Arena(2 * PAGE_BYTES)
    for offset, size in ((0, 2 * PAGE_BYTES), (100, PAGE_BYTES), (PAGE_BYTES, PAGE_BYTES)):
        for read in (tier.read, lambda *at: tier.reading(*at)()):
            with pytest.raises(StorageError, match="not whole pages of 4096 bytes"):
                read(offset, arena.bytes_at(0, size))
    tier.close()


@pytest.mark.long
def test_arena_pages_come_back_even_while_a_view_is_alive() -> None:
    script = """
from lading.runtime.host_arena import Arena, huge_page_bytes
from lading.runtime.resident import resident_bytes
from lading.runtime.resident import PeakMeter, resident_bytes
meter, size = PeakMeter(), 64 << 20
arena = Arena(size)
before = resident_bytes()
meter.reset()
view = arena.bytes_at(0, size)
assert resident_bytes() - before < size // 4, "untouched pages"
view.fill_(1)
assert size - (1 << 20) < resident_bytes() - before < size + (4 << 20)
arena.close()
assert resident_bytes() - before < size // 4, "closed"
assert size - (1 << 20) < meter.peak_bytes() - before < size + (4 << 20)
meter.reset()
assert meter.peak_bytes() - before < size // 4
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_views_of_an_arena_stay_inside_it() -> None:
    arena = Arena(PAGE_BYTES)
    with pytest.raises(ValueError, match="outside the arena of 4096 bytes"):
        arena.bytes_at(4000, 200)
    assert arena.bytes_at(4096, 0).numel() == 0
    assert torch.equal(arena.bytes_at(64, 8), torch.zeros(8, dtype=torch.uint8))
    arena.close()
