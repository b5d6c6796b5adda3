"""Batches of bytes: real text, no state, no anonymous memory."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lading.config import DataConfig
from lading.errors import ConfigError, StorageError
from lading.runtime.data import VOCABULARY, ByteDataset


def dataset(source: Path | str, cache: Path, split: str = "train", seed: int = 1, length: int = 16) -> ByteDataset:
    config = DataConfig(source=str(source), sequence_length=length, batch_size=4)
    return ByteDataset(config, cache, seed=seed, split=split)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def stdlib_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def text_of(cache: Path, split: str) -> bytes:
    (path,) = cache.glob(f"{split}-*.bytes")
    return path.read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty files that differ, one in a subfolder, one hidden, one empty."""
    root = tmp_path / "text"
    (root / "sub").mkdir(parents=True)
    for i in range(19):
        (root / f"{i:02d}.txt").write_bytes(b"%02d" % i * 30)
    (root / "sub" / "last.txt").write_bytes(b"zz" * 30)
    (root / ".hidden").write_bytes(b"hidden" * 30)
    (root / "empty").write_bytes(b"")
    return root


def test_the_standard_library(stdlib_cache: Path) -> None:
    train, validation = (dataset("stdlib", stdlib_cache, split) for split in ("train", "validation"))
    assert 8e6 < len(train) < 20e6
    assert 0.02 < len(validation) / len(train) < 0.3
    text = text_of(stdlib_cache, "train") + b"\0" + text_of(stdlib_cache, "validation")
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert (stdlib / "abc.py").read_bytes() in text
    assert (stdlib / "json" / "decoder.py").read_bytes() in text
    tests = stdlib / "test" / "test_abc.py"
    assert not tests.exists() or tests.read_bytes() not in text


def test_a_batch_is_windows_of_the_text(stdlib_cache: Path) -> None:
    data, text = dataset("stdlib", stdlib_cache), text_of(stdlib_cache, "train")
    tokens = data.batch(3, 1)["tokens"]
    assert (tokens.dtype, tokens.shape) == (torch.int64, (4, 17))
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < VOCABULARY
    for row in tokens:
        assert bytes(row.tolist()) in text


def test_a_batch_depends_on_nothing_but_its_place(folder: Path, tmp_path: Path) -> None:
    first = dataset(folder, tmp_path / "a")
    places = [(0, 0), (0, 1), (1, 0), (2**40, 3)]
    expected = [first.batch(*place)["tokens"] for place in places]
    second = dataset(folder, tmp_path / "b")
    for place, tokens in reversed(list(zip(places, expected, strict=True))):
        assert torch.equal(second.batch(*place)["tokens"], tokens)
    others = [first.batch(5, 5), dataset(folder, tmp_path / "a", seed=2).batch(0, 0)]
    everything = [*expected, *(other["tokens"] for other in others)]
    assert len({tuple(t.flatten().tolist()) for t in everything}) == len(everything)


def test_the_windows_of_a_place_never_change(tmp_path: Path) -> None:
    """A run saved with one version must resume with the next."""
    (tmp_path / "text").write_bytes(bytes(range(256)) * 4)
    tokens = dataset(tmp_path / "text", tmp_path, seed=7).batch(12, 3)["tokens"]
    assert tokens[:, 0].tolist() == [224, 98, 249, 77]


def test_every_window_can_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(40)))
    data = dataset(tmp_path / "text", tmp_path)
    assert len(data) == 36
    starts = {int(first) for step in range(200) for first in data.batch(step, 0)["tokens"][:, 0]}
    assert starts == set(range(36 - 16))


def test_files_are_split_whole_sorted_and_joined_by_a_zero(folder: Path, tmp_path: Path) -> None:
    dataset(folder, tmp_path / "cache")
    train, validation = (text_of(tmp_path / "cache", s).split(b"\0") for s in ("train", "validation"))
    assert (len(train), len(validation)) == (18, 2)
    assert sorted(train + validation) == [b"%02d" % i * 30 for i in range(19)] + [b"zz" * 30]
    assert train == sorted(train)
    assert validation == sorted(validation)


def test_the_split_follows_the_content_not_the_name(folder: Path, tmp_path: Path) -> None:
    dataset(folder, tmp_path / "a")
    for i, path in enumerate(sorted(folder.glob("*.txt"), reverse=True)):
        path.rename(folder / f"new{i:02d}")
    dataset(folder, tmp_path / "b")
    before, after = (text_of(tmp_path / c, "validation").split(b"\0") for c in "ab")
    assert sorted(before) == sorted(after)


def test_a_single_file_is_cut_at_nine_tenths(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(250)))
    assert len(dataset(tmp_path / "text", tmp_path / "c")) == 225
    assert text_of(tmp_path / "c", "train") + text_of(tmp_path / "c", "validation") == bytes(range(250))
    assert len(dataset(tmp_path / "text", tmp_path / "c", "validation")) == 25


def test_the_cache_is_used_again_and_made_anew_when_the_text_changes(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = dataset(folder, cache)
    before = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert dataset(folder, cache).fingerprint == first.fingerprint
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == before
    for path in folder.rglob("*.txt"):
        path.write_bytes(path.read_bytes() + b"more")
    second = dataset(folder, cache)
    assert len(second) == len(first) + 18 * 4
    assert second.fingerprint != first.fingerprint


def test_errors(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "empty").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"expected files with text in .*none, found none"):
        dataset(tmp_path / "none", cache)
    with pytest.raises(ConfigError, match="expected 'stdlib', a folder or a file, got 'stdlb'"):
        dataset("stdlb", cache)
    (tmp_path / "short").write_bytes(b"x" * 18)
    with pytest.raises(ConfigError, match="expected at least 17 bytes of train text, got 16; give more text"):
        dataset(tmp_path / "short", cache)
    (tmp_path / "short").write_bytes(b"x" * 19)
    assert dataset(tmp_path / "short", cache).batch(0, 0)["tokens"].tolist() == [[120] * 17] * 4
    with pytest.raises(ConfigError, match="of validation text, got 2"):
        dataset(tmp_path / "short", cache, "validation")
    with pytest.raises(ConfigError, match="expected a step and a micro-batch >= 0, got -1 and 0"):
        dataset(folder, cache).batch(-1, 0)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**31))
def test_any_seed_step_and_micro_batch(stdlib_cache: Path, seed: int, step: int, micro: int) -> None:
    tokens = dataset("stdlib", stdlib_cache, seed=seed).batch(step, micro)["tokens"]
    assert tokens.shape == (4, 17)


MEMORY = """
import sys
from pathlib import Path
from lading.config import DataConfig
from lading.runtime.data import ByteDataset
def resident(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))
data = lambda: ByteDataset(DataConfig(source=sys.argv[1], sequence_length=8, batch_size=2), Path(sys.argv[2]), seed=0)
data().batch(0, 0)
before = resident("RssAnon"), resident("RssFile")
big = DataConfig(source=sys.argv[3], sequence_length=4096, batch_size=64)
data = ByteDataset(big, Path(sys.argv[2]), seed=0)
for step in range(300):
    data.batch(step, 0)
print(resident("RssAnon") - before[0], resident("RssFile") - before[1])
"""


def test_the_text_does_not_fill_memory(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(os.urandom(1 << 10))
    (tmp_path / "big").write_bytes(os.urandom(48 << 20))
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *(str(tmp_path / name) for name in ("small", "cache", "big"))],
        capture_output=True, text=True, check=True, timeout=60, env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    anonymous, mapped = map(int, done.stdout.split())
    assert mapped < 4 << 20
    assert anonymous < 12 << 20


def test_a_text_that_goes_away(folder: Path, tmp_path: Path) -> None:
    data = dataset(folder, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("train-*")
    path.write_bytes(b"short")
    with pytest.raises(StorageError, match=r"expected .* bytes, found fewer"):
        data.batch(0, 0)
    path.unlink()
    with pytest.raises(StorageError, match="cannot read the text"):
        data.batch(0, 0)
