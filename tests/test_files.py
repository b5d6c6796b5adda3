"""Every place that writes, each of its calls to the system failing once: an error of Lading's; the next try works."""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import json
import mmap
import os
import resource
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lading.catalog.load import save_machine
from lading.checkpoint.lock import run_lock
from lading.checkpoint.state import tensor_source
from lading.checkpoint.store import latest_checkpoint, open_checkpoint, save_checkpoint
from lading.cli.main import main
from lading.config import DataConfig
from lading.errors import ConfigError, StorageError
from lading.files import make_folder, read_json, remove_file, rename_file, write_aside, write_text
from lading.report.cluster_page import write_cluster_page
from lading.report.html import write_report
from lading.report.memory_chart import write_held_snapshot
from lading.report.metrics import MetricsLog, truncate_after
from lading.report.perfetto import write_trace
from lading.report.snapshot import write_snapshot
from lading.runtime.arrays import ArrayDataset
from lading.runtime.host_arena import Arena
from lading.runtime.tiers import FileTier
from lading.runtime.tokens import load_tokenizer, open_store
from tests.machines import small_machine
from tests.plans import cluster_plan, placed_plan
from tests.report.synthetic import run as synthetic_run
from tests.report.test_cluster import SHOWN

#: What is asked of the system to write files, by module and name.
CALLS = [
    *((os, name) for name in ("open", "replace", "rename", "fsync", "mkdir", "unlink", "rmdir", "ftruncate", "write")),
    *((os, name) for name in ("pwrite", "pwritev", "posix_fallocate", "fstat", "scandir", "listdir")),
    (fcntl, "flock"), (fcntl, "fcntl"), (io, "open"), (builtins, "open"), (mmap, "mmap"),
]  # fmt: skip


@contextmanager
def failing(target: tuple[str, int] | None) -> Iterator[Counter[str]]:
    """Calls by name while it is on; call number ``target[1]`` of ``target[0]`` fails."""
    seen: Counter[str] = Counter()

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            mode = str(args[1] if len(args) > 1 else settings.get("mode", "r"))
            if name in ("io.open", "builtins.open") and not set(mode) & set("wax+"):
                return function(*args, **settings)  # reading: imports, among others
            seen[name] += 1
            if (name, seen[name]) == target:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return function(*args, **settings)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, attribute in CALLS:
            name = f"{module.__name__}.{attribute}"
            patch.setattr(module, attribute, watched(name, getattr(module, attribute)))
        yield seen


@contextmanager
def nothing_fits() -> Iterator[None]:
    """No file may grow: every write of any library fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@cache
def run() -> dict[str, Any]:
    return synthetic_run(blocks=1)


def checkpoint(folder: Path) -> None:
    """Two saves, of which the second replaces the first and deletes an older one."""
    for step in (1, 2, 2):
        save_checkpoint(folder / "saved", step, [tensor_source("w", torch.full((3000,), float(step)))], {}, keep=1)


SWAPPED = Arena(5000).bytes_at(0, 5000)  # O_DIRECT takes whole pages of memory


def swap(folder: Path) -> None:
    tier = FileTier(folder / "swap", 1 << 16)
    try:
        tier.write(0, SWAPPED)
    finally:
        tier.close()


def lock(folder: Path) -> None:
    with run_lock(folder / "run"):
        pass


def metrics(folder: Path) -> None:
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.log({"step": 1})
    truncate_after(folder / "metrics.jsonl", 0)


def text(folder: Path) -> None:
    config = DataConfig(source=str(folder.parent / "source.txt"), sequence_length=4, batch_size=1)
    open_store(config, load_tokenizer(None), folder / "cache")


def arrays(folder: Path) -> None:
    config = DataConfig(kind="arrays", source=str(folder.parent / "source.npz"), batch_size=1)
    ArrayDataset(config, folder / "rows", seed=0)


def renamed(folder: Path) -> None:
    make_folder(folder / "made")
    write_text(folder / "made" / "a", "new")
    rename_file(folder / "made" / "a", folder / "made" / "b")
    remove_file(folder / "made" / "b")


WRITERS: dict[str, Callable[[Path], object]] = {
    "plan": lambda folder: run()["plan"].save(folder / "plan.json"),
    "cluster plan": lambda folder: cluster_plan().save(folder / "plan.json"),
    "placement": lambda folder: placed_plan().save(folder / "placement.json"),
    "timeline": lambda folder: run()["measured"].save(folder / "measured.json"),
    "report": lambda folder: write_report(folder / "report.html", **run()),
    "cluster report": lambda folder: write_cluster_page(folder / "report.html", SHOWN),
    "trace": lambda folder: write_trace(folder / "timeline.pftrace", [run()["measured"]]),
    "snapshot": lambda folder: write_snapshot(folder / "measured.pickle", run()["program"], run()["measured"]),
    "rank snapshot": lambda folder: write_held_snapshot(folder / "ranks.pickle", {"rank 0": ()}),
    "machine": lambda folder: save_machine(small_machine(), folder / "machine.toml"),
    "metrics": metrics,
    "checkpoint": checkpoint,
    "swap file": swap,
    "lock": lock,
    "text": text,
    "arrays": arrays,
    "renamed": renamed,
}


def prepare(folder: Path) -> None:
    """What makes the next try do all of its work again."""
    if (folder / "metrics.jsonl").exists():
        (folder / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"st')  # a killed run left half a line
    for path in (*folder.glob("cache/*"), *folder.glob("rows/*")):
        path.unlink()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # which takes a disk's time: a thousand are asked for
    (tmp_path / "source.txt").write_text("some text to cache")
    np.savez(tmp_path / "source.npz", x=np.arange(6, dtype=np.float32).reshape(3, 2))
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.mark.long
@pytest.mark.parametrize("name", WRITERS)
def test_each_call_fails_once(name: str, folder: Path) -> None:
    """What fails is named, what was there stays, and the next try works and leaves nothing else behind."""
    write = WRITERS[name]
    write(folder)
    prepare(folder)
    with failing(None) as calls:
        write(folder)
    expected = files(folder)
    assert calls
    for target in [(call, number) for call, count in calls.items() for number in range(1, count + 1)]:
        prepare(folder)
        said = ""
        with failing(target), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "cannot (delete|remove)")
            try:
                write(folder)
            except StorageError as error:
                said = str(error)
        assert not said or str(folder) in said or target[0] == "mmap.mmap"  # which is memory
        if name == "checkpoint":
            newest = latest_checkpoint(folder / "saved")
            assert newest is not None, target
            open_checkpoint(newest).verify()
        write(folder)
        assert files(folder) == expected, target


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk(name: str, folder: Path) -> None:
    write = WRITERS[name]
    for _ in range(2):
        prepare(folder)
        write(folder)
    expected = files(folder)
    prepare(folder)
    with nothing_fits(), pytest.raises(StorageError, match="File too large") as caught:
        write(folder)
    assert str(folder) in str(caught.value)
    write(folder)
    assert files(folder) == expected


@pytest.mark.parametrize("mark", [None, "old"])
def test_a_link_stays_and_its_target_is_replaced(folder: Path, mark: str | None) -> None:
    (folder / "link").symlink_to(folder / "target")
    if mark is not None:
        (folder / "target").write_text(mark)
    write_text(folder / "link", "new")
    assert (folder / "link").is_symlink()
    assert (folder / "target").read_text() == "new"
    assert sorted(files(folder)) == ["link", "target"]


def test_what_is_no_file_is_written_as_it_is(folder: Path) -> None:
    """A device is not replaced by a file; what it says is passed on."""
    write_text(Path(os.devnull), "new")
    assert Path(os.devnull).is_char_device()
    with pytest.raises(StorageError, match=r"cannot write /dev/full: No space left on device; free some space"):
        write_text(Path("/dev/full"), "new")
    assert Path("/dev/full").is_char_device()


def test_two_threads_write_one_file(folder: Path) -> None:
    """Each has a file aside of its own: the one that ends last is there, whole, and open to whom the umask lets in."""
    with write_aside(folder / "new") as first, write_aside(folder / "new") as second:  # as two threads may interleave
        first.write(b"first" * 9)
        second.write(b"second")
    assert files(folder) == {"new": b"first" * 9}
    (folder / "plain").touch()
    assert (folder / "new").stat().st_mode == (folder / "plain").stat().st_mode


def test_errors_about_other_files_pass(folder: Path) -> None:
    write_text(folder / "new", "old")
    with pytest.raises(FileNotFoundError), write_aside(folder / "new") as file:
        file.write((folder / "missing").read_bytes())
    assert files(folder) == {"new": b"old"}


def test_a_command_whose_output_is_a_full_disk(capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w") as full, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", full)
        assert main(["doctor", "--json"]) == 2
    assert "error: cannot write the output: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "Expecting value"),
        (b'{"a": 1', "Expecting ','"),
        (b"\xff\xfe", "can't decode byte"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": -Infinity}', "-Infinity is not a number"),
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' is there twice"),
        (b'{"a": "\\ud800"}', "surrogates not allowed"),
        (b'{"\\udfff": 1}', "surrogates not allowed"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "integer string conversion"),
    ],
)
def test_what_is_no_json(folder: Path, content: bytes, said: str) -> None:
    (folder / "a.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"expected a thing in JSON at .*a\.json: .*; make one") as caught:
        read_json(folder / "a.json", "a thing", "make one")
    assert said in str(caught.value)


def test_text_beyond_one_unit_is_json(folder: Path) -> None:
    (folder / "a.json").write_text(json.dumps({"\N{OK HAND SIGN}": "\N{ROCKET}"}), encoding="utf-8-sig")
    assert read_json(folder / "a.json", "a thing", "make one") == {"\N{OK HAND SIGN}": "\N{ROCKET}"}
