"""The saver process writes what is staged, says what failed, and takes nothing committed with it."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from lading.checkpoint.saver import SaveOrder, Saver, StagedTensor
from lading.checkpoint.staging import StagingMemory, staged_bytes
from lading.checkpoint.store import latest_checkpoint, open_checkpoint
from lading.errors import ConfigError, StorageError
from lading.ir.program import LINE_BYTES

SIZE = 3 << 20


@pytest.fixture
def memory() -> Iterator[StagingMemory]:
    made = StagingMemory(SIZE)
    yield made
    made.close()


@pytest.fixture
def saver(memory: StagingMemory) -> Iterator[Saver]:
    made = Saver(memory)
    yield made
    made.close()


def order(folder: Path, step: int, size: int = SIZE) -> SaveOrder:
    return SaveOrder(str(folder), step, {"step": step}, 2, (StagedTensor("w", "uint8", (size,), ((0, 0, size),)),))


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def waiting_bytes(saver: Saver) -> int:
    """Bytes of orders that the process has not read."""
    assert saver._process is not None
    assert saver._process.stdin is not None
    return struct.unpack("i", fcntl.ioctl(saver._process.stdin, termios.FIONREAD, bytes(4)))[0]


def test_it_writes_what_is_staged_and_yields_to_training(memory: StagingMemory, saver: Saver, tmp_path: Path) -> None:
    for step in (1, 2):
        memory.memory[:] = bytes([step]) * SIZE
        assert saver.save(order(tmp_path, step)) == []
        checkpoint = open_checkpoint(tmp_path / f"step-0000000{step}")
        assert checkpoint.meta == {"step": step}
        assert b"".join(map(bytes, checkpoint.chunks("w"))) == bytes([step]) * SIZE
    assert saver.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, saver.pid) >= 15
    assert os.sched_getscheduler(saver.pid) == os.SCHED_IDLE
    assert "torch" not in Path(f"/proc/{saver.pid}/maps").read_text()
    assert os.getpgid(saver.pid) != os.getpgid(0)  # a terminal's Ctrl-C is for training


def test_it_puts_pieces_of_several_memories_together(tmp_path: Path) -> None:
    memories = [StagingMemory(SIZE), StagingMemory(SIZE)]
    memories[0].memory[:4], memories[1].memory[8:12] = b"abcd", b"efgh"
    saver = Saver(memories[0], StagingMemory.of_process(os.getpid(), memories[1].file, SIZE))
    pieces = ((1, 10, 2), (0, 0, 4), (1, 8, 1))
    assert saver.save(SaveOrder(str(tmp_path), 1, {}, 2, (StagedTensor("w", "uint8", (7,), pieces),))) == []
    saver.close()
    assert b"".join(map(bytes, open_checkpoint(tmp_path / "step-00000001").chunks("w"))) == b"ghabcde"
    memories[1].close()
    with pytest.raises(StorageError, match="see whether it lives"):
        StagingMemory.of_process(os.getpid(), 1 << 20, SIZE)


@pytest.mark.parametrize("size", [1, LINE_BYTES - 1, LINE_BYTES, LINE_BYTES + 1, 4097])
def test_a_staged_tensor_ends_before_the_next_begins(size: int) -> None:
    assert size <= staged_bytes(size) < size + LINE_BYTES
    assert staged_bytes(size) % LINE_BYTES == 0


def test_signals_that_end_a_job_are_left_to_training(saver: Saver, tmp_path: Path) -> None:
    saver.save(order(tmp_path, 1))
    assert saver.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(saver.pid, number)
    pid = saver.pid
    assert saver.save(order(tmp_path, 2)) == []
    assert saver.pid == pid


def test_its_errors_come_back(saver: Saver, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, before[1]))  # which the saver inherits
    try:
        saver.start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(StorageError, match="step-00000001") as caught:
        saver.save(order(tmp_path, 1))
    assert caught.value.errno == errno.EFBIG
    assert saver.save(order(tmp_path, 2, 1 << 10)) == []
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000002"
    with pytest.raises(ConfigError, match="a dtype among"):
        saver.save(SaveOrder(str(tmp_path), 3, {}, 2, (StagedTensor("w", "text", (1,), ((0, 0, 1),)),)))


def test_one_that_dies_is_told_and_replaced(saver: Saver, tmp_path: Path) -> None:
    saver.save(order(tmp_path, 1))
    assert saver.pid is not None
    os.kill(saver.pid, signal.SIGSTOP)
    status = Path(f"/proc/{saver.pid}/status")
    wait_until(lambda: "(stopped)" in status.read_text())
    failures: list[Exception] = []

    def save() -> None:
        try:
            saver.save(order(tmp_path, 2))
        except StorageError as error:
            failures.append(error)

    saving = Thread(target=save)
    saving.start()
    dead = saver.pid
    wait_until(lambda: waiting_bytes(saver) > 0)  # or the thread may find it dead already, and start another
    os.kill(dead, signal.SIGKILL)
    saving.join()
    assert f"step-00000002: the process that saves ({dead}) has died (by SIGKILL)" in str(failures[0])
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001"
    assert saver.save(order(tmp_path, 3)) == []
    assert saver.pid != dead


SPIN = "while True: pass"


@pytest.mark.long
def test_one_that_no_processor_is_left_for_gives_way(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a thread that never pauses idle work gets next to nothing; another process takes the save over."""
    monkeypatch.setattr("lading.checkpoint.saver._PATIENCE_S", 0.3)
    monkeypatch.setattr("lading.checkpoint.saver._LOOK_S", 0.01)
    saver.save(order(tmp_path, 1))
    large = tuple(StagedTensor(f"w{n}", "uint8", (SIZE,), ((0, 0, SIZE),)) for n in range(8))
    idle, processor = saver.pid, min(os.sched_getaffinity(0))
    assert idle is not None
    before = os.sched_getaffinity(0)
    spinning = subprocess.Popen([sys.executable, "-S", "-c", SPIN])
    try:
        for pid in (idle, *map(int, os.listdir(f"/proc/{idle}/task")), spinning.pid):
            os.sched_setaffinity(pid, {processor})
        told = saver.save(replace(order(tmp_path, 2), tensors=large))
    finally:
        spinning.kill()
        spinning.wait()
    assert os.sched_getaffinity(0) == before
    assert len(told) == 1
    assert "training leaves no processor idle, so checkpoints are written with 3% of one from step 2 on" in told[0]
    assert saver.pid != idle
    assert saver.pid is not None
    assert os.sched_getscheduler(saver.pid) != os.SCHED_IDLE
    assert os.getpriority(os.PRIO_PROCESS, saver.pid) >= 15
    open_checkpoint(tmp_path / "step-00000002").verify()
    pid = saver.pid
    assert saver.save(order(tmp_path, 3)) == []  # said once, and it stays
    assert saver.pid == pid
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_one_whose_training_process_is_gone_ends(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            saver = Saver(StagingMemory(SIZE))
            saver.save(order(tmp_path, 1))
            (tmp_path / "pid").write_text(f"{saver.pid}")
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: has_ended(pid))
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001"
