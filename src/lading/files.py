"""Files: written whole or not at all, and read as JSON or TOML; whatever goes wrong is an error of Lading's own.

    plan.json                                   the file
    plan.json.tmp-3f9a01bc-1234-5be0a1c2        being written (or deleted) by process 1234 of a host

[Note: written aside] What is written lies aside until it is whole and on disk, then it is renamed, then its folder is
synced: a reader, a kill, a full disk or a power cut finds the old file or the new one, and once the call has returned
only the new one. What a process that is gone has left aside is deleted when the same name is written again. Of a
process of another host, or of another container with the same disk, it is not known whether it is gone: what nothing
has changed for a day is taken as left.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
import tomllib
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from lading.errors import ConfigError, StorageError

#: What to do about an error of the system.
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space, or choose another folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "choose a folder that can be written"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EEXIST), "make its folder first, or choose another"),
    errno.EISDIR: "name a file",
}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
#: Name of what is written aside: that of the target, a host in eight digits (none in earlier versions), a process.
_ASIDE = re.compile(r"(?P<name>.+)\.tmp-(?:(?P<host>[0-9a-f]{8})-)?(?P<pid>\d+)(?:-\w+)?\Z")
#: Seconds after which what another host has not touched is left.
_ABANDONED_S = 86_400.0
#: What a file system says that cannot wait for the names of a folder (some network and FUSE file systems).
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)
#: Characters that a terminal obeys instead of showing them, or that turn the order in which it shows others; of those
#: that begin a new line only the ones that begin it somewhere else.
CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
#: Bytes of JSON in which one of these may be.
_CONTROL_BYTES = re.compile(
    rb"\\u00[0189]|\\u007[fF]|\\[bf]|\\u20[26]|\x7f|\xc2[\x80-\x9f]|\xe2\x80[\xaa-\xae]|\xe2\x81[\xa6-\xa9]"
)


def cannot_write(path: Path, error: OSError) -> StorageError:
    """Error that says why ``path`` cannot be written, and what to change."""
    advice = _ADVICE.get(error.errno or 0, "check the disk (dmesg), or choose another folder")
    return StorageError(f"cannot write {path}: {error.strerror or error}; {advice}")


def cannot_read(path: Path, error: OSError) -> StorageError:
    """Error that says why ``path`` cannot be read, and what to change."""
    return StorageError(f"cannot read {path}: {error.strerror or error}; check its permissions and the disk (dmesg)")


def home_cache() -> Path | None:
    """Folder of the user's caches: $XDG_CACHE_HOME, or ``~/.cache`` where that is not absolute.

    Returns:
        None for a user without either, as in a container.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        return named
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None


def host_cache(beside: Path) -> Path:
    """Folder for what was measured of this host: ``lading`` in the user's cache, or ``beside`` where none is."""
    home = home_cache()
    if home is None:
        return beside
    folder = home / "lading"
    try:
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    except OSError:  # a home that may not even be looked into
        return beside
    return folder if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK) else beside


def make_folder(path: Path) -> None:
    """Make a folder and those above it, unless they exist.

    Raises:
        StorageError: it cannot be made, or a file has its name.
    """
    try:
        make_durable_folder(path)
    except OSError as error:
        raise cannot_write(path, error) from error


def make_durable_folder(path: Path) -> None:
    """Make a folder and those above it, unless they exist; those that were made are there after a power cut, too.

    Raises:
        OSError: as the file system says.
    """
    missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk; before, a power cut may undo what was made, renamed or deleted.

    A file system that has no such wait is left alone.

    Raises:
        OSError: as the file system says.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(fd)


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
    """Give a file another name, whose file it replaces; it has that name after a power cut, too.

    Raises:
        StorageError: it cannot be renamed.
    """
    try:
        os.replace(path, target)
        sync_folder(target.parent)
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
        for leftover in leftovers(target.parent, re.compile(re.escape(target.name))):
            remove_leftover(leftover)
        aside = name_aside(target)  # of this call: threads share a process
        try:
            with aside.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, target)
            sync_folder(target.parent)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    except StorageError:
        raise
    except OSError as error:
        if error.filename is not None and Path(error.filename) not in (path, target, aside, target.parent):
            raise  # about another file, which the block reads
        raise cannot_write(path, error) from error


@contextmanager
def write_folder_aside(target: Path) -> Generator[Path]:
    """Make a folder to fill, which gets the name ``target`` when the block ends; removed if the block raises.

    Raises:
        OSError: as the file system says, or ``target`` is there.
    """
    make_durable_folder(target.parent)
    for leftover in leftovers(target.parent, re.compile(re.escape(target.name))):
        remove_leftover(leftover)
    aside = name_aside(target)
    aside.mkdir()
    try:
        yield aside
        sync_tree(aside)
        os.rename(aside, target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)  # or by the next call
        raise


def sync_tree(folder: Path) -> None:
    """Wait until all files of a folder, and of those inside, are on disk with their names.

    Raises:
        OSError: as the file system says.
    """
    for path in folder.iterdir():
        if path.is_dir():
            sync_tree(path)
        else:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    sync_folder(folder)


def name_aside(path: Path) -> Path:
    """Find a name beside ``path`` that only this call uses, for what is written before it gets that name."""
    return path.with_name(f"{path.name}.tmp-{this_host()}-{os.getpid()}-{secrets.token_hex(4)}")


def leftovers(folder: Path, name: re.Pattern[str], *, own: bool = False) -> list[Path]:
    """List what processes that are gone have left aside in ``folder``, of targets whose whole name matches.

    Args:
        own: Whether this process writes nothing there now, so that what bears its number is of an earlier one.

    Raises:
        OSError: the folder cannot be read.
    """
    matches = [(path, _ASIDE.match(path.name)) for path in folder.iterdir()]
    return [
        path
        for path, match in matches
        if match and name.fullmatch(match["name"]) and _is_left(path, match["host"], int(match["pid"]), own=own)
    ]


def remove_leftover(path: Path) -> None:
    """Delete a file or folder that lies aside, or as much of it as can be; warns of what cannot."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        warnings.warn(f"cannot delete {path}: {error}; the next save tries again", stacklevel=2)


def this_host() -> str:
    """Eight digits for this host, or container: processes of another may have the same numbers."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")  # containers may share the name of their host
    except OSError:  # no Linux
        numbers = ""
    return hashlib.sha256(f"{socket.gethostname()} {numbers}".encode()).hexdigest()[:8]


def _is_left(path: Path, host: str | None, pid: int, *, own: bool) -> bool:
    """Whether nobody writes a file or folder any more; one without a host's name is of an earlier version."""
    if host in (None, this_host()):
        return own if pid == os.getpid() else not _is_alive(pid)
    try:
        newest = max(entry.stat().st_mtime for entry in (path, *path.glob("*")))
    except OSError:  # its owner deletes or renames it
        return False
    return time.time() - newest > _ABANDONED_S


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):  # no Linux, or it has ended
        return True
    return state != b"Z"  # one that was killed, and whose parent has not asked how it ended


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


def parse_json(data: bytes, *, finite: bool = True, controls: bool = False) -> Any:
    """Parse JSON.

    Args:
        finite: Whether NaN and infinities, which Python writes and JSON lacks, are refused.
        controls: Whether texts may have control characters, as those of a tokenizer, which are no names.

    Raises:
        ValueError: it is not JSON in UTF-8, a number is not finite, a text is none or has control characters, an object
            has a key twice, or it is nested too deeply.
    """
    constant = _no_constant if finite else None
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=constant, object_pairs_hook=_distinct)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if _SURROGATE.search(data):  # half a pair of them is no character: no file system or terminal takes it
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    if not controls and _CONTROL_BYTES.search(data):
        _check_texts(value)
    return value


def _check_texts(value: object) -> None:
    """Refuse control characters in the texts of a document: names are printed, and a terminal would obey them.

    Raises:
        ValueError: a text has one.
    """
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            if match := CONTROL_CHARACTERS.search(item):
                raise ValueError(f"the text {item[:80]!a} has the control character U+{ord(match[0]):04X}")
        elif isinstance(item, dict):
            pending += (*cast("dict[object, object]", item), *cast("dict[object, object]", item).values())
        elif isinstance(item, list):
            pending += cast("list[object]", item)


def read_toml(path: Path, what: str, advice: str = "") -> dict[str, Any]:
    """Parse the TOML of a file.

    Args:
        what: Content that is expected there, such as "a machine".
        advice: How to get it, or nothing.

    Raises:
        ConfigError: no such file, it cannot be read, it is not TOML in UTF-8, or a text has control characters.
    """
    ending = f"; {advice}" if advice else ""
    try:
        table = tomllib.loads(path.read_bytes().decode("utf-8-sig"))  # some editors begin a file with a byte order mark
        _check_texts(table)
        return table
    except FileNotFoundError as error:
        raise ConfigError(f"expected {what} at {path}, found no file{ending}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: expected {what} in TOML: it is nested too deeply{ending}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: expected {what} in TOML, encoded as UTF-8, found byte {error.object[error.start]:#04x} at "
            f"{error.start}; save it as UTF-8{ending}"
        ) from error
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
