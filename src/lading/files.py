"""Files: written whole or not at all, and read as JSON or TOML; whatever goes wrong is an error of Lading's own.

A file is written aside, synced and renamed, so that a reader, a kill or a full disk finds the old file or the new one.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import tomllib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from lading.errors import ConfigError, StorageError

#: What to do about an error of the system.
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space, or choose another folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "choose a folder that can be written"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EEXIST), "make its folder first, or choose another"),
    errno.EISDIR: "name a file",
}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def cannot_write(path: Path, error: OSError) -> StorageError:
    """Error that says why ``path`` cannot be written, and what to change."""
    advice = _ADVICE.get(error.errno or 0, "check the disk (dmesg), or choose another folder")
    return StorageError(f"cannot write {path}: {error.strerror or error}; {advice}")


def cannot_read(path: Path, error: OSError) -> StorageError:
    """Error that says why ``path`` cannot be read, and what to change."""
    return StorageError(f"cannot read {path}: {error.strerror or error}; check its permissions and the disk (dmesg)")


def make_folder(path: Path) -> None:
    """Make a folder and those above it, unless they exist.

    Raises:
        StorageError: it cannot be made, or a file has its name.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def remove_file(path: Path) -> None:
    """Remove a file, if it is there.

    Raises:
        StorageError: it cannot be removed.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot remove {path}: {error.strerror}; check the permissions of its folder") from error


def rename_file(path: Path, target: Path) -> None:
    """Give a file another name, whose file it replaces.

    Raises:
        StorageError: it cannot be renamed.
    """
    try:
        os.replace(path, target)
    except OSError as error:
        raise cannot_write(target, error) from error


@contextmanager
def write_aside(path: Path) -> Generator[BinaryIO]:
    """Open a file to fill, which takes the place of ``path`` when the block ends, and is removed if the block raises.

    The target of a link is replaced, not the link. What is no regular file (a pipe, a terminal) is written directly.

    Raises:
        StorageError: the folder is missing or read-only, or the disk is full or fails; an old file stays.
        OSError: the block raised it about another file.
    """
    target = aside = path
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                yield file
            return
        aside = target.with_name(f"{target.name}.tmp-{secrets.token_hex(6)}")  # of this call: threads share a process
        try:
            with aside.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    except StorageError:
        raise
    except OSError as error:
        if error.filename is not None and str(error.filename) not in (str(path), str(target), str(aside)):
            raise  # about another file, which the block reads
        raise cannot_write(path, error) from error


def write_text(path: Path, text: str) -> None:
    """Write ``text`` in UTF-8, whole or not at all; raises as ``write_aside``."""
    data = text.encode("utf-8")
    with write_aside(path) as file:
        file.write(data)


def read_bytes(path: Path) -> bytes:
    """Read all bytes of a file.

    Raises:
        StorageError: it is missing or cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise cannot_read(path, error) from error


def read_json(path: Path | str, what: str, advice: str) -> Any:
    """Parse the JSON of a file, whose numbers are finite and whose keys differ.

    Args:
        what: Content that is expected there, such as "a plan".
        advice: How to get it.

    Raises:
        ConfigError: no such file, it cannot be read, or it is not JSON in UTF-8.
    """
    try:
        return parse_json(Path(path).read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"expected {what} at {path}, found no file; {advice}") from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"expected {what} in JSON at {path}: {error}; {advice}") from error


def parse_json(data: bytes, *, finite: bool = True) -> Any:
    """Parse JSON.

    Args:
        finite: Whether NaN and infinities, which Python writes and JSON lacks, are refused.

    Raises:
        ValueError: it is not JSON in UTF-8, a number is not finite, a text is none, an object has a key twice, or it is
            nested too deeply.
    """
    constant = _no_constant if finite else None
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=constant, object_pairs_hook=_distinct)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if _SURROGATE.search(data):  # half a pair of them is no character: no file system or terminal takes it
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def read_toml(path: Path, what: str, advice: str = "") -> dict[str, Any]:
    """Parse the TOML of a file.

    Args:
        what: Content that is expected there, such as "a machine".
        advice: How to get it, or nothing.

    Raises:
        ConfigError: no such file, it cannot be read, or it is not TOML in UTF-8.
    """
    ending = f"; {advice}" if advice else ""
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"expected {what} at {path}, found no file{ending}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: expected {what} in TOML: it is nested too deeply{ending}") from error
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: expected {what} in TOML: {error}{ending}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number it can hold")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} is there twice")
    return table
