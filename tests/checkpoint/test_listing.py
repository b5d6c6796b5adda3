"""``lading checkpoint``: every byte that is not what was saved is named, and a list says what is there."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lading.checkpoint.listing import list_checkpoint, verify_checkpoint
from lading.checkpoint.lock import read_lock
from lading.checkpoint.state import CHUNK_BYTES, TensorSource
from lading.checkpoint.store import latest_checkpoint, open_checkpoint, save_checkpoint
from lading.cli.main import main
from lading.errors import StorageError

FLOATS = bytes(range(120))


def save(folder: Path, step: int = 1) -> Path:
    sources: list[TensorSource] = [
        ("layers.0.weight", "float32", [5, 6], [memoryview(FLOATS)]),
        ("empty", "int8", [0], []),
        ("flags", "bool", [3], [memoryview(b"\1\0\1")]),
    ]
    return save_checkpoint(folder, step, sources, {"note": "größe"}, 3)


def damage_of(path: Path) -> str:
    words = list(verify_checkpoint(path))
    return "\n".join(words)


@pytest.fixture
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes of hundreds of verifications need not survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.long
@pytest.mark.usefixtures("_no_sync")
def test_every_byte_that_is_altered_is_named(tmp_path: Path) -> None:
    path, chance = save(tmp_path), random.Random(0)
    assert damage_of(path) == ""
    places = {
        entry.name: (entry.start, entry.start + entry.size_bytes) for entry in open_checkpoint(path).tensors.values()
    }
    for name in ("state.safetensors", "manifest.json"):
        original = (path / name).read_bytes()
        for at in range(len(original)):
            data = bytearray(original)
            data[at] ^= 1 << chance.randrange(8)
            (path / name).write_bytes(data)
            words = damage_of(path)
            assert name in words
            if name == "state.safetensors":
                inside = next((tensor for tensor, (first, last) in places.items() if first <= at < last), "")
                assert f"expected byte {at} of the file to be 0x{original[at]:02x}, found 0x{data[at]:02x}" in words
                assert (f"tensor {inside!r}" if inside else "the header") in words
            elif at > original.index(b'"body": ') + 7:
                assert f"expected byte {at} of" in words or "expected its last bytes" in words
            if at % 7 == 0:  # which the same code finds
                with pytest.raises(StorageError, match=re.escape(name)):
                    open_checkpoint(path).verify()
        (path / name).write_bytes(original)
    open_checkpoint(path).verify()


@pytest.mark.usefixtures("_no_sync")
def test_a_byte_that_is_missing_or_added_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path)
    for name in ("state.safetensors", "manifest.json"):
        original = (path / name).read_bytes()
        for at in range(0, len(original) + 1, 5):
            for changed in (original[:at], original[:at] + original[at + 1 :], original[:at] + b"?" + original[at:]):
                (path / name).write_bytes(changed)
                assert (damage_of(path) == "") == (changed == original), (name, at)
        (path / name).unlink()
        assert name in damage_of(path)
        (path / name).write_bytes(original)


def test_damage_in_several_chunks(tmp_path: Path) -> None:
    size = 3 * CHUNK_BYTES + 100
    data = random.Random(1).randbytes(size)
    path = save_checkpoint(tmp_path, 1, [("w", "uint8", [size], [memoryview(data)])], {}, 1)
    start = open_checkpoint(path).tensors["w"].start
    with (path / "state.safetensors").open("r+b") as file:
        file.seek(start + CHUNK_BYTES + 70_000)  # beyond the modulus of the sums
        file.write(bytes([data[CHUNK_BYTES + 70_000] ^ 255]))
        file.seek(start + 2 * CHUNK_BYTES + 5)
        file.write(bytes(50))
    os.truncate(path / "state.safetensors", start + size - 7)
    words = damage_of(path).splitlines()
    assert len(words) == 3
    assert f"tensor 'w' (uint8 [{size}]): expected byte {start + CHUNK_BYTES + 70_000} of the file" in words[0]
    first = start + 2 * CHUNK_BYTES
    assert f"expected bytes {first} to {first + CHUNK_BYTES - 1} of the file of sha256" in words[1]
    assert f"expected bytes {start + size - 7} to {start + size - 1} of the file, found its end" in words[2]


def test_only_the_chunks_that_are_asked_for_are_read(tmp_path: Path) -> None:
    size = 3 * CHUNK_BYTES + 100
    data = random.Random(1).randbytes(size)
    path = save_checkpoint(tmp_path, 1, [("w", "uint8", [size], [memoryview(data)])], {}, 1)
    checkpoint = open_checkpoint(path)
    with (path / "state.safetensors").open("r+b") as file:
        file.seek(checkpoint.tensors["w"].start)
        file.write(bytes([data[0] ^ 1]))
    for start, end in ((CHUNK_BYTES, size), (CHUNK_BYTES + 5, 2 * CHUNK_BYTES + 1), (size - 1, size), (size, size)):
        assert b"".join(map(bytes, checkpoint.chunks("w", start, end))) == data[start:end]
    with pytest.raises(StorageError, match="expected byte"):
        list(checkpoint.chunks("w", CHUNK_BYTES - 1, CHUNK_BYTES + 1))


def test_a_checkpoint_of_the_first_format_is_read(tmp_path: Path) -> None:
    path = save(tmp_path)
    checkpoint, state = open_checkpoint(path), (path / "state.safetensors").read_bytes()
    tensors = [
        {"name": t.name, "dtype": t.dtype, "shape": t.shape, "start": t.start, "size_bytes": t.size_bytes,
         "sha256": hashlib.sha256(state[t.start : t.start + t.size_bytes]).hexdigest()}
        for t in checkpoint.tensors.values()
    ]  # fmt: skip
    header = checkpoint.header.size_bytes
    body = {"step": 1, "meta": {"a": 1}, "state_bytes": len(state), "header_bytes": header, "tensors": tensors}
    body["header_sha256"] = hashlib.sha256(state[:header]).hexdigest()
    sha256 = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    manifest = {"kind": "lading checkpoint", "format": 1, "sha256": sha256, "body": body}
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    old = open_checkpoint(path)
    assert (old.step, old.meta) == (1, {"a": 1})
    assert bytes(old.read("layers.0.weight").numpy().tobytes()) == FLOATS
    old.verify()
    for at in (header + 3, 9):
        (path / "state.safetensors").write_bytes(state[:at] + bytes([state[at] ^ 1]) + state[at + 1 :])
        assert "of sha256" in damage_of(path)


def test_a_folder_with_the_name_of_another_step(tmp_path: Path) -> None:
    path = save(tmp_path).rename(tmp_path / "step-00000007")
    with pytest.raises(StorageError, match="expected the checkpoint of step 7, as its folder is named, found that of"):
        open_checkpoint(path)
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint"):
        assert latest_checkpoint(tmp_path) is None
    open_checkpoint(path.rename(tmp_path / "kept for later")).verify()


def test_what_was_copied_over_is_no_longer_verified(tmp_path: Path) -> None:
    """Who keeps two folders alike does so: the note on the bytes before stays beside the new ones."""
    path, other = save(tmp_path / "here"), save_checkpoint(tmp_path / "there", 1, [], {}, 1)
    assert damage_of(path) == ""
    before = list_checkpoint(path)
    for name in ("state.safetensors", "manifest.json"):
        shutil.copy(other / name, path / name)
    after = list_checkpoint(path)
    assert before is not None
    assert after is not None
    assert before.verified_s is not None
    assert (after.damage, after.verified_s) == ("", None)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    first, second = save(tmp_path / "checkpoints", 1), save(tmp_path / "checkpoints", 12)
    best = save(tmp_path / "best", 5)
    (tmp_path / "checkpoints" / f"step-00000013.tmp-{os.getpid()}").mkdir()
    (tmp_path / "checkpoints" / f"step-00000013.tmp-{os.getpid()}" / "state.safetensors").write_bytes(bytes(2048))

    def said(*argv: str, code: int = 0) -> str:
        assert main(["checkpoint", *argv]) == code
        out, error = capsys.readouterr()
        return out + error

    kept = tmp_path / "checkpoints" / "step-00000014.set-aside"
    kept.mkdir()
    (kept / "state.safetensors").write_bytes(bytes(4096))
    today = time.strftime("%Y-%m-%d")
    rows = said("list", str(tmp_path)).splitlines()
    assert [row.split()[0] for row in rows] == [str(first.parent), "step", "1", "12", "unfinished", "set",
                                                str(best.parent), "step", "5"]  # fmt: skip
    assert all(today in row and row.endswith("  no") for row in (rows[2], rows[3], rows[8]))
    assert "2.00 KiB" in rows[4]
    assert "4.00 KiB" in rows[5]
    assert said("verify", str(first)) == f"whole    {first}\n"
    assert said("verify", str(tmp_path)).count("whole") == 3
    assert all(row.count(today) == 2 for row in said("list", str(tmp_path)).splitlines() if " 20" in row)
    with (second / "state.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\7")
    text = said("verify", str(tmp_path / "checkpoints"), code=2)
    assert f"whole    {first}" in text
    assert f"damaged  {second}/state.safetensors: tensor 'flags' (bool [3]): expected byte" in text
    assert "1 of 2 checkpoints is damaged" in text
    assert said("list", str(second)).splitlines()[2].endswith("  damaged: 1 place, found by lading checkpoint verify")
    save(tmp_path / "checkpoints", 12)  # anew: what was noted no longer holds
    assert said("list", str(second)).splitlines()[2].endswith("  no")
    with pytest.MonkeyPatch.context() as patch:  # a save of a run deletes it before its turn
        patch.setattr("lading.checkpoint.listing.read_lock", lambda path: shutil.rmtree(path) or read_lock(path))
        assert said("verify", str(best)) == f"deleted  {best}, by a save meanwhile\n"
    (second / "manifest.json").write_text("{")
    assert "damaged: " in said("list", str(second))
    assert "expected a checkpoint, a folder of checkpoints or the out folder of a run, found none in" in said(
        "list", str(tmp_path / "nowhere"), code=2
    )


def test_what_is_no_checkpoint_hides_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file, an empty folder, links to nothing and elsewhere, all by the names of checkpoints, beside a whole one."""
    folder, other = tmp_path / "größe 1", tmp_path / "other disk"
    whole = save(folder, 1)
    (folder / "step-00000002").write_bytes(b"no folder")
    (folder / "step-00000003").mkdir()
    (folder / "step-00000004").symlink_to(tmp_path / "nowhere")
    (folder / "step-00000005").symlink_to(save(other, 5))
    shutil.copytree(whole, folder / "step-00000006")
    (folder / "step-00000007").symlink_to(folder / "step-00000007")  # a circle
    assert main(["checkpoint", "list", str(folder)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert ["damaged: " in row for row in rows] == [False, True, True, True, False, True, True]
    assert [row.split()[0] for row in rows] == ["1", *(f"step-{n:08d}" for n in (2, 3, 4)), "5", "step-00000006",
                                                "step-00000007"]  # fmt: skip
    assert main(["checkpoint", "verify", str(folder)]) == 2
    out, error = capsys.readouterr()
    found = [row.removeprefix("whole").strip() for row in out.splitlines() if row.startswith("whole")]
    assert found == [str(whole), f"{folder}/step-00000005"]
    assert "5 of 7 checkpoints are damaged" in error


def test_a_list_is_made_while_a_run_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What goes between two looks is no error."""
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    (tmp_path / "step-00000003.tmp-1").mkdir()
    (tmp_path / "step-00000003.tmp-1" / "state.safetensors").write_bytes(bytes(2048))
    look, seen = os.stat, set[str]()

    def vanishing(path: Path, *args: object, **settings: object) -> os.stat_result:
        """Look at each file that is being written once, after which it is gone."""
        if ".tmp-" in str(path) and (name := str(path)) not in seen:
            seen.add(name)
            shutil.rmtree(tmp_path / "step-00000003.tmp-1", ignore_errors=True)
        return look(path, *args, **settings)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "stat", vanishing)
        assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert "unfinished" not in capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lading.checkpoint.listing.described_checkpoint", lambda path: shutil.rmtree(path) or absent(path)
        )
        assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert [row for row in capsys.readouterr().out.splitlines() if row.startswith("deleted")] == [
        f"deleted    {path}, by a save meanwhile" for path in (first, second)
    ]


def absent(path: Path) -> None:
    raise StorageError(f"{path}: expected a manifest")


def test_verifying_imports_no_torch(tmp_path: Path) -> None:
    path = save(tmp_path)
    code = (
        "import sys; from lading.cli.main import main; assert main(['checkpoint', *sys.argv[1:]]) == 0;"
        "heavy = {'torch', 'numpy'} & sys.modules.keys(); assert not heavy, heavy"
    )
    for action in ("verify", "list"):
        subprocess.run(
            [sys.executable, "-c", code, action, str(path)], check=True, env={"PYTHONPATH": ":".join(sys.path)}
        )
