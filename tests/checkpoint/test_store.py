"""Checkpoints: what was saved comes back bit for bit, or an error says what is wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from lading.checkpoint.manifest import manifest_bytes
from lading.checkpoint.state import CHUNK_BYTES, TensorSource, tensor_source
from lading.checkpoint.store import checkpoint_folders, latest_checkpoint, open_checkpoint, save_checkpoint
from lading.errors import ConfigError, StorageError
from lading.files import name_aside

TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "rng": torch.arange(13, dtype=torch.uint8),
    "half": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
    "weight": torch.randn(7, 3, generator=torch.Generator().manual_seed(2)).t(),
    "step": torch.tensor(50, dtype=torch.int64),
    "scalar": torch.tensor(0.1, dtype=torch.float32),
    "empty": torch.empty(0, 4),
    "big": torch.arange(CHUNK_BYTES // 4 + 1001, dtype=torch.int32),
    "fp8": torch.arange(5, dtype=torch.float32).to(torch.float8_e4m3fn),
    "wide": torch.tensor([1e300, float("nan"), -0.0], dtype=torch.float64),
    "complex": torch.tensor([1 + 2j]),
}  # fmt: skip
META = {"seed": 3, "curve": [5.5, 0.1], "name": "prüfung", "nested": {"1": None}}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(flat[0], flat[1])


def save(folder: Path, step: int = 50, tensors: dict[str, torch.Tensor] = TENSORS, keep: int = 2) -> Path:
    return save_checkpoint(folder, step, [tensor_source(n, t) for n, t in tensors.items()], META, keep)


def small(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((100,), value), "half": torch.full((3,), value, dtype=torch.bfloat16)}


def test_round_trip(tmp_path: Path) -> None:
    path = save(tmp_path)
    assert path == tmp_path / "step-00000050" == latest_checkpoint(tmp_path)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.step, checkpoint.meta) == (50, META)
    assert checkpoint.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert same_bytes(checkpoint.read(name), tensor), name
    checkpoint.verify()
    assert max(len(chunk) for chunk in checkpoint.chunks("big")) == CHUNK_BYTES


def test_safetensors_reads_the_state_file(tmp_path: Path) -> None:
    path = save(tmp_path)
    with safe_open(path / "state.safetensors", framework="pt") as file:
        assert set(file.keys()) == TENSORS.keys()
        assert file.metadata() == {"format": "pt", "step": "50"}
        for name, tensor in TENSORS.items():
            assert same_bytes(file.get_tensor(name), tensor), name


def test_tensors_are_aligned_however_long_their_names_are(tmp_path: Path) -> None:
    """Other libraries map the file and read numbers where they lie."""
    for step in range(8):
        checkpoint = open_checkpoint(save(tmp_path, step, {"n" * (step + 1): torch.ones(3, dtype=torch.float64)}))
        assert [entry.start % 8 for entry in checkpoint.tensors.values()] == [0]


def test_the_checksum_is_that_of_the_bytes(tmp_path: Path) -> None:
    saved = open_checkpoint(save(tmp_path)).tensors["big"]
    data = TENSORS["big"].numpy().tobytes()
    chunks = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    assert len(chunks) == 2
    assert saved.sha256 == tuple(hashlib.sha256(chunk).hexdigest() for chunk in chunks)
    assert saved.adler32 == tuple(map(zlib.adler32, chunks))


def test_streams_in_constant_memory(tmp_path: Path) -> None:
    size_chunks = 24

    def chunks() -> Iterator[memoryview]:
        for i in range(size_chunks):
            yield memoryview(bytes([i]) * CHUNK_BYTES)

    tracemalloc.start()
    path = save_checkpoint(tmp_path, 1, [("disk", "uint8", [size_chunks * CHUNK_BYTES], chunks())], {}, 1)
    seen = [chunk[0] for chunk in open_checkpoint(path).chunks("disk")]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == list(range(size_chunks))
    assert peak < 3 * CHUNK_BYTES


def test_keep(tmp_path: Path) -> None:
    for step in (1, 2, 3, 90):
        save(tmp_path, step, small(step), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000090"]
    save(tmp_path, 4, small(4), keep=1)  # a run that went back: the later step is not this run's to delete
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004", "step-00000090"]


def test_a_step_saved_twice_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 5, small(1.0))
    path = save(tmp_path, 5, small(2.0))
    assert open_checkpoint(path).read("w")[0] == 2.0
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]


def test_a_replacement_cut_short_is_undone(tmp_path: Path) -> None:
    path = save(tmp_path, 5, small(1.0), keep=1)
    path.rename(tmp_path / "step-00000005.old")
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    assert open_checkpoint(latest).read("w")[0] == 1.0
    save(tmp_path, 6, small(2.0), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005", "step-00000006"]


def test_a_replacement_cut_short_behind_the_new_one_goes_on_from_that(tmp_path: Path) -> None:
    save(tmp_path, 5, small(1.0)).rename(tmp_path / "step-00000005.old")
    new = save(tmp_path / "aside", 5, small(2.0)).rename(tmp_path / "step-00000005")
    assert latest_checkpoint(tmp_path) == new
    assert checkpoint_folders(tmp_path) == [new, tmp_path / "step-00000005.old"]


def test_two_containers_with_equal_process_numbers_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that they share; what another left long ago goes."""
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    theirs = name_aside(tmp_path / "step-00000001")
    left = name_aside(tmp_path / "step-00000002")
    monkeypatch.undo()
    for path in (theirs, left):
        path.mkdir()
        (path / "state.safetensors").write_bytes(b"half")
    for path in (left, left / "state.safetensors"):
        os.utime(path, (time.time() - 2 * 86_400,) * 2)
    save(tmp_path, 1, small(1.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", theirs.name]
    assert len({name_aside(theirs) for _ in range(8)}) == 8


def test_leftovers_of_dead_processes_go_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    for pid in (dead, os.getpid(), os.getppid()):
        (tmp_path / f"step-00000001.tmp-{pid}").mkdir()
    save(tmp_path, 2, small(1.0))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-00000001.tmp-{os.getppid()}", "step-00000002"]


def test_leftovers_of_a_process_that_nobody_waits_for_go(tmp_path: Path) -> None:
    """Its number stays taken where a container's first process does not ask how others ended."""
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)
    (tmp_path / f"step-00000001.tmp-{dead}").mkdir()
    save(tmp_path, 2, small(1.0))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]
    os.waitpid(dead, 0)


@pytest.mark.parametrize("name", ["step-00000001", "step-00000002"])
def test_what_cannot_be_deleted_is_left_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Neither remains of this process nor those of a dead one keep a save from being made."""
    for left in (f"{name}.tmp-{os.getpid()}", f"{name}.tmp-{2**22 + 1}"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "state.safetensors").write_bytes(b"half")
    (tmp_path / f"{name}.tmp-{2**22 + 2}").write_bytes(b"a file")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        for step in (1, 2, 2):
            with pytest.warns(UserWarning, match=r"cannot delete .*tmp-.* not permitted.*the next save tries again"):
                path = save(tmp_path, step, small(float(step)), keep=1)
            assert latest_checkpoint(tmp_path) == path
            open_checkpoint(path).verify()
    save(tmp_path, 3, small(3.0), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_nothing_there(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "absent") is None
    with pytest.raises(
        StorageError, match=r"expected a checkpoint with a manifest\.json, found none; there is no older"
    ):
        open_checkpoint(tmp_path / "step-00000001")


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 16
    path.write_bytes(data)


def test_a_flipped_bit_is_found_in_every_tensor(tmp_path: Path) -> None:
    older = save(tmp_path, 40, small(1.0))
    path = save(tmp_path)
    for entry in open_checkpoint(path).tensors.values():
        if not entry.size_bytes:
            continue
        position = entry.start + entry.size_bytes - 1
        flip(path / "state.safetensors", position)
        with pytest.raises(StorageError) as caught:
            open_checkpoint(path).read(entry.name)
        for part in (
            f"tensor '{entry.name}'",
            entry.dtype,
            f"byte {position} of",
            "found",
            f"older checkpoint {older}",
        ):
            assert part in str(caught.value)
        flip(path / "state.safetensors", position)
    open_checkpoint(path).verify()


def test_truncated(tmp_path: Path) -> None:
    older = save(tmp_path, 40, small(1.0))
    path = save(tmp_path)
    size = (path / "state.safetensors").stat().st_size
    os.truncate(path / "state.safetensors", size - 1)
    with pytest.raises(StorageError, match=rf"expected {size} bytes, found {size - 1}, first missing in tensor 'fp8'"):
        open_checkpoint(path)
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint"):
        assert latest_checkpoint(tmp_path) == older
    (path / "state.safetensors").unlink()
    with pytest.raises(StorageError, match=rf"expected a file of {size} bytes.*use the older checkpoint {older}"):
        open_checkpoint(path)


def test_truncated_after_it_was_opened(tmp_path: Path) -> None:
    path = save(tmp_path, 1, small(1.0))
    checkpoint = open_checkpoint(path)
    os.truncate(path / "state.safetensors", checkpoint.tensors["w"].start + 7)
    with pytest.raises(
        StorageError, match=r"tensor 'w' \(float32 \[100\]\): expected bytes \d+ to \d+ of the file, found its end"
    ):
        checkpoint.read("w")


def rewrite(path: Path, **changes: object) -> None:
    """Replace what is in front of the body, or the body, as somebody would who means it."""
    data = {**json.loads((path / "manifest.json").read_text()), **changes}
    text = manifest_bytes(data["body"]).decode()
    for key in changes.keys() - {"body"}:
        text = re.sub(rf'(?<="{key}": )("[^"]*"|\d+)', json.dumps(changes[key]), text, count=1)
    (path / "manifest.json").write_text(text)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"format": 5}, "expected format 1 to 4, found 5: another Lading wrote it"),
        ({"format": True}, "expected format 1 to 4, found True"),
        ({"format": 1}, "it was altered"),
        ({"kind": "other"}, "expected a lading checkpoint"),
        ({"sha256": "0" * 64}, "expected sha256 .* at 77, found 0000"),
        ({"adler32": "0" * 8}, "expected adler32 .* at 55, found 00000000"),
        ({"body": None}, "expected a lading checkpoint, found another file"),
        ({"body": {}}, "expected the manifest of a checkpoint"),
    ],
)
def test_wrong_manifest(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    path = save(tmp_path, 1, small(1.0))
    rewrite(path, **changes)
    with pytest.raises(StorageError, match=expected):
        open_checkpoint(path)


def test_a_pickle_is_refused_not_executed(tmp_path: Path) -> None:
    path = save(tmp_path, 1, small(1.0))
    (path / "manifest.json").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    with pytest.raises(StorageError, match="expected a manifest in JSON"):
        open_checkpoint(path)
    assert not (tmp_path / "ran").exists()


def test_an_unknown_tensor(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path))
    with pytest.raises(StorageError, match="expected a tensor 'wieght', found none; did you mean 'weight'"):
        checkpoint.read("wieght")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("fuzz"), 7, small(0.5))


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzz(saved: Path, data: st.DataObject) -> None:
    """Bytes of the manifest or of the state file changed, cut or added: an error, whatever they mean."""
    file = saved / data.draw(st.sampled_from(["manifest.json", "state.safetensors"]))
    original = file.read_bytes()
    changed = bytearray(original)
    start = data.draw(st.integers(0, len(original)))
    changed[start : start + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    try:
        file.write_bytes(changed)
        checkpoint = open_checkpoint(saved)
        found = {name: checkpoint.read(name) for name in checkpoint.tensors}
    except StorageError:
        assert changed != original
    else:
        assert changed == original
        assert (checkpoint.step, checkpoint.meta) == (7, META)
        assert {n: t.tolist() for n, t in found.items()} == {n: t.tolist() for n, t in small(0.5).items()}
    finally:
        file.write_bytes(original)


def test_a_tensor_that_ends_behind_the_file_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    path = save(tmp_path, 1, small(1.0))
    body = json.loads((path / "manifest.json").read_text())["body"]
    max(body["tensors"], key=lambda tensor: tensor["start"])["start"] += 2
    rewrite(path, body=body)
    with pytest.raises(StorageError, match="its bytes inside the file"):
        open_checkpoint(path)


def test_an_altered_manifest_of_equal_sums_is_refused(tmp_path: Path) -> None:
    """An adler32 is easily met: neighbours that change by 1, -2 and 1 leave both of its sums as they are."""
    path = save(tmp_path, 1, small(1.0))
    data = (path / "manifest.json").read_bytes()
    altered = data.replace(b"fung", b"gsog")
    assert altered != data
    assert zlib.adler32(altered) == zlib.adler32(data)
    (path / "manifest.json").write_bytes(altered)
    with pytest.raises(StorageError, match=r"expected sha256 .* at 77, found"):
        open_checkpoint(path)


@pytest.mark.parametrize(("writes_left", "code"), [(0, errno.ENOSPC), (1, errno.ENOSPC), (0, errno.EDQUOT)])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes_left: int, code: int) -> None:
    older = save(tmp_path, 40)
    write, calls = os.write, iter(range(100))

    def full(fd: int, data: memoryview) -> int:
        if next(calls) >= writes_left:
            raise OSError(code, os.strerror(code))
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StorageError, match=r"disk is full.* needs .* are free; .*step-00000040"):
            save(tmp_path, 50)
    assert list(tmp_path.iterdir()) == [older]
    open_checkpoint(older).verify()


def test_a_full_disk_at_the_last_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"disk is full.* there is no older checkpoint"):
        save(tmp_path / "new", 50)
    assert list((tmp_path / "new").iterdir()) == []


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: max(4096, len(data) // 8192 * 4096)]))
    open_checkpoint(save(tmp_path)).verify()


def test_an_error_while_reading_the_tensors_leaves_nothing(tmp_path: Path) -> None:
    def chunks() -> Iterator[memoryview]:
        yield memoryview(b"1234")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 1, [("a", "uint8", [8], chunks())], {}, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "error", "expected"),
    [
        (
            ("a", "float32", [2], [memoryview(b"1234")]),
            StorageError,
            r"'a' \(float32 \[2\]\): expected 8 bytes.* got 4",
        ),
        (("a", "float32", [0], [memoryview(b"1234")]), StorageError, "expected 0 bytes to save, got 4"),
        (("a", "complex128", [0], []), ConfigError, "expected a dtype among"),
        (("a", "float32", [-1], []), ConfigError, "expected sizes >= 0"),
        (("__metadata__", "float32", [0], []), ConfigError, "reserved"),
    ],
)
def test_a_wrong_source(tmp_path: Path, source: TensorSource, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        save_checkpoint(tmp_path, 1, [source], {}, 1)
    assert latest_checkpoint(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments(tmp_path: Path) -> None:
    twice: list[TensorSource] = [("a", "uint8", [0], []), ("a", "uint8", [0], [])]
    for step, tensors, meta, keep in ((1, twice, {}, 1), (-1, [], {}, 1), (1, [], {}, 0), (1, [], {"x": {1}}, 1),
                                      (1, [], {"x": float("nan")}, 1)):  # fmt: skip
        with pytest.raises(ConfigError, match="expected"):
            save_checkpoint(tmp_path, step, tensors, meta, keep)


def test_the_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        save(tmp_path / "file")
    with pytest.raises(StorageError, match="expected a folder of checkpoints"):
        latest_checkpoint(tmp_path / "file")
