"""Batches of bytes: real text, no state, no anonymous memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lading.config import DataConfig
from lading.errors import ConfigError, StorageError
from lading.runtime.data import LatentDataset, TextDataset
from lading.runtime.documents import pieces


def dataset(source: Path | str, cache: Path, seed: int = 1, length: int = 16, **settings: Any) -> TextDataset:
    config = DataConfig(source=str(source), sequence_length=length, batch_size=4, **settings)
    return TextDataset(config, cache, seed=seed)


@pytest.fixture(scope="module")
def stdlib_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def text_of(cache: Path) -> bytes:
    (path,) = cache.glob("text-*.tokens")
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
    assert 8e6 < len(dataset("stdlib", stdlib_cache)) < 25e6
    text = text_of(stdlib_cache)
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert (stdlib / "abc.py").read_bytes() in text
    assert (stdlib / "json" / "decoder.py").read_bytes() in text
    tests = stdlib / "test" / "test_abc.py"
    assert not tests.exists() or tests.read_bytes() not in text


def test_a_batch_is_windows_of_the_text(stdlib_cache: Path) -> None:
    data, text = dataset("stdlib", stdlib_cache), text_of(stdlib_cache)
    tokens = data.batch(3, 1)["tokens"]
    assert (tokens.dtype, tokens.shape) == (torch.int64, (4, 17))
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < 256
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
    tokens = dataset(tmp_path / "text", tmp_path, seed=7, format="text").batch(12, 3)["tokens"]
    assert tokens[:, 0].tolist() == [120, 36, 59, 231]


def test_every_window_can_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(40)))
    data = dataset(tmp_path / "text", tmp_path, format="text")
    assert len(data) == 40
    starts = {int(first) for step in range(200) for first in data.batch(step, 0)["tokens"][:, 0]}
    assert starts == set(range(40 - 16))


def test_files_are_sorted_and_joined_by_a_zero(folder: Path, tmp_path: Path) -> None:
    dataset(folder, tmp_path / "cache")
    assert text_of(tmp_path / "cache").split(b"\0") == [b"%02d" % i * 30 for i in range(19)] + [b"zz" * 30]


def test_a_pattern_is_a_source(folder: Path, tmp_path: Path) -> None:
    dataset(f"{folder}/0[12]*.txt", tmp_path / "cache")
    assert text_of(tmp_path / "cache") == b"01" * 30 + b"\0" + b"02" * 30


def test_the_cache_is_used_again_and_made_anew_when_the_text_changes(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = dataset(folder, cache)
    before = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert dataset(folder, cache).fingerprint == first.fingerprint
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == before
    for path in folder.rglob("*.txt"):
        path.write_bytes(path.read_bytes() + b"more")
    second = dataset(folder, cache)
    assert len(second) == len(first) + 20 * 4
    assert second.fingerprint != first.fingerprint


def test_errors(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "empty").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"expected files with text in .*none, found none"):
        dataset(tmp_path / "none", cache)
    with pytest.raises(ConfigError, match="expected 'stdlib', a folder, a file or a pattern, got 'stdlb'"):
        dataset("stdlb", cache)
    (tmp_path / "short").write_bytes(b"x" * 16)
    with pytest.raises(ConfigError, match="expected at least 17 tokens of text, got 16; give more text"):
        dataset(tmp_path / "short", cache)
    (tmp_path / "short").write_bytes(b"x" * 17)
    assert dataset(tmp_path / "short", cache).batch(0, 0)["tokens"].tolist() == [[120] * 17] * 4
    with pytest.raises(ConfigError, match="expected a step and a micro-batch >= 0, got -1 and 0"):
        dataset(folder, cache).batch(-1, 0)


def test_bytes_that_nobody_said_are_text_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0" + bytes(100))
    with pytest.raises(ConfigError, match=r"picture\.png: expected text in UTF-8 .* data\.format = \"text\""):
        dataset(folder, tmp_path / "cache")
    assert len(dataset(folder, tmp_path / "cache", format="text")) > 1200


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"count": "x"}', b'{"dtype": "<u1", "count": 7}'])
def test_a_damaged_description_is_made_again(folder: Path, tmp_path: Path, damage: bytes) -> None:
    first = dataset(folder, tmp_path / "cache")
    (facts,) = (tmp_path / "cache").glob("*.json")
    facts.write_bytes(damage)
    assert dataset(folder, tmp_path / "cache").fingerprint == first.fingerprint


def test_rows_are_texts(tmp_path: Path) -> None:
    rows = [{"body": "first é", "n": 1}, {"body": ""}, {"body": "second\nline"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("third")
    dataset(tmp_path, tmp_path / ".cache", length=4, text_field="body")
    first = "first é\0second\nline".encode()
    assert text_of(tmp_path / ".cache") == b"\0".join([first, first, b"third"])


def test_rows_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    cases = {
        '{"text": 1}': r"a.jsonl, line 2: expected a text in 'text', found 1",
        '{"txt": "x"}': r"line 2: expected a text in 'text', found the fields \['txt'\]; see data.text_field",
        "[1]": "line 2: expected a JSON object",
        "{": "line 2: expected a JSON object",
        r'{"text": "\ud800"}': "line 2: expected text that has a UTF-8 form",
    }
    for line, message in cases.items():
        file.write_text('{"text": "fine"}\n' + line)
        with pytest.raises(ConfigError, match=message):
            dataset(file, tmp_path / "cache", length=2)
    pytest.importorskip("pyarrow")
    with pytest.raises(ConfigError, match="expected a Parquet file"):
        dataset(file, tmp_path / "cache", format="parquet")


def test_a_text_longer_than_a_piece_stays_whole(tmp_path: Path) -> None:
    text = ("é" * 1000 + "\n").encode() * 400 + "ü".encode() * 300_000
    (tmp_path / "text").write_bytes(text)
    dataset(tmp_path / "text", tmp_path / "cache")
    assert text_of(tmp_path / "cache") == text
    parts = list(pieces([tmp_path / "text"], DataConfig(sequence_length=1, batch_size=1)))
    assert [part.first for part in parts] == [True] + [False] * (len(parts) - 1)
    assert "".join(part.data.decode() for part in parts).encode() == text


def test_latents_depend_on_their_class_and_place() -> None:
    data = LatentDataset((3, 8, 8), 4, batch_size=6, seed=5)
    first, again, other = data.batch(7, 1), data.batch(7, 1), data.batch(7, 2)
    assert first["latents"].shape == (6, 3, 8, 8)
    assert (first["latents"].dtype, first["labels"].dtype) == (torch.float32, torch.int64)
    assert torch.equal(first["latents"], again["latents"])
    assert not torch.equal(first["latents"], other["latents"])
    by_class = {int(k): v for k, v in zip(first["labels"], first["latents"], strict=True)}
    for label, latents in zip(other["labels"], other["latents"], strict=True):
        for known, pattern in by_class.items():
            near = float((latents - pattern).abs().max()) < 0.21  # twice the noise
            assert near == (known == int(label))


@pytest.mark.long
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**31))
def test_any_seed_step_and_micro_batch(stdlib_cache: Path, seed: int, step: int, micro: int) -> None:
    tokens = dataset("stdlib", stdlib_cache, seed=seed).batch(step, micro)["tokens"]
    assert tokens.shape == (4, 17)


MEMORY = """
import sys
from pathlib import Path
from lading.config import DataConfig
from lading.runtime.data import TextDataset
def resident(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))
small = DataConfig(source=sys.argv[1], format="text", sequence_length=8, batch_size=2)
TextDataset(small, Path(sys.argv[2]), seed=0).batch(0, 0)
before = resident("RssAnon"), resident("RssFile")
big = DataConfig(source=sys.argv[3], format="text", sequence_length=4096, batch_size=64)
data = TextDataset(big, Path(sys.argv[2]), seed=0)
for step in range(300):
    data.batch(step, 0)
print(resident("RssAnon") - before[0], resident("RssFile") - before[1])
"""


@pytest.mark.long
def test_the_text_does_not_fill_memory(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(os.urandom(1 << 10))
    (tmp_path / "big").write_bytes(os.urandom(24 << 20))
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *(str(tmp_path / name) for name in ("small", "cache", "big"))],
        capture_output=True, text=True, check=True, timeout=60, env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    anonymous, mapped = map(int, done.stdout.split())
    assert mapped < 4 << 20
    assert anonymous < 12 << 20


def test_a_text_that_goes_away(folder: Path, tmp_path: Path) -> None:
    data = dataset(folder, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("text-*.tokens")
    path.write_bytes(b"short")
    with pytest.raises(StorageError, match=r"expected .* bytes, found fewer"):
        data.batch(0, 0)
    path.unlink()
    with pytest.raises(StorageError, match="cannot read the text"):
        data.batch(0, 0)
