"""Power cuts on paper: what a disk may hold after one, at every moment of what was done to a folder.

``DiskLog`` records what happens below a folder while it is on: every content that a file has had, every name that came
and went, and what was synced. It watches the calls that sync or change names (``CALLS``) and compares the folder before
and after each, so that data are seen however they were written.

``DiskLog.states`` then yields what a file system may leave behind if the power goes after any of these events:

 - content that was synced is there; of later content all, nothing, a half or zeros in its place;
 - names of a folder as they were at its last sync, and any subset of what was done to them since: a rename may be there
   before the data of what it renames, a file may be there before its folder, a deletion before what it followed.

This is more than any one file system does, and what POSIX allows. A folder outside of those watched is safe.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

#: What is asked of the system that syncs or changes names, in module ``os``.
CALLS = (
    "fsync",
    "fdatasync",
    "rename",
    "replace",
    "mkdir",
    "unlink",
    "remove",
    "rmdir",
    "link",
    "truncate",
    "ftruncate",
)
#: Subsets of pending changes of names that are tried where there are more than so many changes.
_ALL_SUBSETS = 6
_DRAWN_SUBSETS = 40


@dataclass(frozen=True)
class Content:
    """A file has other bytes than before."""

    inode: int
    data: bytes


@dataclass(frozen=True)
class Named:
    """An inode has a name in a folder; ``before`` is the name in the same folder that it had until then."""

    folder: int
    name: str
    inode: int
    before: str | None = None


@dataclass(frozen=True)
class Unnamed:
    """A name is gone from a folder."""

    folder: int
    name: str


@dataclass(frozen=True)
class Synced:
    """A file's content, or a folder's names, are on disk."""

    inode: int


@dataclass(frozen=True)
class Mark:
    """What was promised: the test's own, such as the step of a checkpoint that is saved."""

    promise: Any


@dataclass
class _Disk:
    """What is on disk for sure, and what may be."""

    synced: dict[int, bytes] = field(default_factory=dict)
    unsynced: dict[int, bytes] = field(default_factory=dict)
    names: dict[int, dict[str, int]] = field(default_factory=dict)
    changes: list[Named | Unnamed] = field(default_factory=list)

    def apply(self, event: Any) -> None:
        if isinstance(event, Content):
            self.unsynced[event.inode] = event.data
        elif isinstance(event, Named | Unnamed):
            self.changes.append(event)
        elif isinstance(event, Synced):
            if event.inode in self.unsynced:
                self.synced[event.inode] = self.unsynced.pop(event.inode)
            for change in [change for change in self.changes if change.folder == event.inode]:
                _rename(self.names, change)
                self.changes.remove(change)


def _rename(names: dict[int, dict[str, int]], change: Named | Unnamed) -> None:
    folder = names.setdefault(change.folder, {})
    if isinstance(change, Unnamed):
        folder.pop(change.name, None)
        return
    if change.before is not None:
        folder.pop(change.before, None)
    folder[change.name] = change.inode


class DiskLog:
    """Log of what happens below ``root``, which is a folder that is there.

    Args:
        drop: Number of a sync that is left out, neither done nor recorded, as if its line were not in the code.

    Attributes:
        syncs: Syncs that were asked for.
    """

    def __init__(self, root: Path, drop: int | None = None) -> None:
        self.root, self.drop, self.syncs = root, drop, 0
        self.events: list[Any] = []
        self._open: dict[int, int] = {}  # files are held open: a number of an inode is not given away again
        self._names: dict[int, dict[str, int]] = {root.stat().st_ino: {}}
        self._contents: dict[int, bytes] = {}
        self._top = root.stat().st_ino
        self._folders = {self._top}
        self._look()
        self._beginning = self.events
        self.events = []

    @contextmanager
    def on(self) -> Iterator[DiskLog]:
        """Record during the block."""
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._watched(name, getattr(os, name)))
            try:
                yield self
                self._look()
            finally:
                for file in self._open.values():
                    os.close(file)
                self._open.clear()

    def mark(self, promise: Any) -> None:
        """Note what has been promised by now, for the states from here on."""
        self._look()
        self.events.append(Mark(promise))

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            self._look()
            if name in ("fsync", "fdatasync"):
                self.syncs += 1
                if self.syncs - 1 == self.drop:
                    return None
                result = function(*args, **settings)
                self.events.append(Synced(os.fstat(args[0]).st_ino))
                return result
            result = function(*args, **settings)
            self._look()
            return result

        return call

    def _look(self) -> None:
        """Record what has changed since the last look."""
        names: dict[int, dict[str, int]] = {}
        for path, folders, files in os.walk(self.root):
            inodes = {name: os.lstat(os.path.join(path, name)).st_ino for name in (*folders, *files)}
            names[os.stat(path).st_ino] = inodes
            self._folders |= {inodes[name] for name in folders}
            for name, inode in inodes.items():
                if inode not in self._open:
                    self._open[inode] = os.open(os.path.join(path, name), os.O_RDONLY)
                if name in files and (data := _bytes(self._open[inode])) != self._contents.get(inode, b""):
                    self._contents[inode] = data
                    self.events.append(Content(inode, data))
        for folder in names.keys() | self._names.keys():
            before, now = self._names.get(folder, {}), names.get(folder, {})
            gone = {name: inode for name, inode in before.items() if now.get(name) != inode}
            for name, inode in now.items():
                if before.get(name) != inode:
                    old = next((each for each, other in gone.items() if other == inode and each not in now), None)
                    self.events.append(Named(folder, name, inode, old))
                    gone.pop(old or name, None)
                    gone.pop(name, None)
            self.events += [Unnamed(folder, name) for name in gone]
        self._names = names

    def states(self, chance: random.Random) -> Iterator[tuple[dict[str, bytes | None], list[Any]]]:
        """Yield each folder that a power cut may leave, once for each list of promises: its files, and the promises.

        Files are contents by path; a folder is None.
        """
        disk, promises, seen = _Disk(), list[Any](), set[Any]()
        for event in self._beginning:  # what was there is on disk
            disk.apply(event)
        for inode in (*disk.unsynced, *{change.folder for change in disk.changes}):
            disk.apply(Synced(inode))
        for event in (None, *self.events):
            if isinstance(event, Mark):
                promises = [*promises, event.promise]
            elif event is not None:
                disk.apply(event)
            for changes in _subsets(disk.changes, chance):
                for contents in _contents(disk):
                    tree = self._tree(disk, changes, contents)
                    key = (len(promises), frozenset(tree.items()))
                    if key not in seen:
                        seen.add(key)
                        yield tree, promises

    def _tree(self, disk: _Disk, changes: list[Named | Unnamed], contents: dict[int, bytes]) -> dict[str, bytes | None]:
        names = {folder: dict(inodes) for folder, inodes in disk.names.items()}
        for change in changes:
            _rename(names, change)
        tree: dict[str, bytes | None] = {}

        def walk(folder: int, path: str) -> None:
            for name, inode in names.get(folder, {}).items():
                if inode in self._folders:
                    tree[f"{path}{name}"] = None
                    walk(inode, f"{path}{name}/")
                else:
                    tree[f"{path}{name}"] = contents.get(inode, b"")

        walk(self._top, "")
        return tree


def _bytes(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)


def _subsets(changes: list[Any], chance: random.Random) -> Iterator[list[Any]]:
    """Subsets of changes that were not synced: all of few, of many all prefixes, all but one, each one, and some."""
    count = len(changes)
    if count <= _ALL_SUBSETS:
        choices = set(itertools.product((False, True), repeat=count))
    else:
        choices = {tuple(n < end for n in range(count)) for end in range(count + 1)}
        choices |= {tuple((n == one) == there for n in range(count)) for one in range(count) for there in (False, True)}
        choices |= {tuple(chance.random() < 0.5 for _ in range(count)) for _ in range(_DRAWN_SUBSETS)}
    for choice in sorted(choices):
        yield list(itertools.compress(changes, choice))


def _contents(disk: _Disk) -> Iterator[dict[int, bytes]]:
    """What files may hold: of content that was not synced all, nothing, half, zeros; in all files, or in each alone."""
    whole = disk.synced | disk.unsynced
    yield whole
    for ruin in (_lost, _torn, _zeros):
        ruined = {inode: ruin(disk.synced.get(inode, b""), data) for inode, data in disk.unsynced.items()}
        if ruined:
            yield whole | ruined
        if len(ruined) > 1:
            yield from (whole | {inode: data} for inode, data in ruined.items())


def _lost(before: bytes, after: bytes) -> bytes:
    return before


def _torn(before: bytes, after: bytes) -> bytes:
    same = len(before) if after.startswith(before) else 0
    end = same + (len(after) - same) // 2
    return after[:end] + before[end:]


def _zeros(before: bytes, after: bytes) -> bytes:
    same = len(before) if after.startswith(before) else 0
    return after[:same] + bytes(len(after) - same)


def lay_out(tree: dict[str, bytes | None], folder: Path) -> Path:
    """Make a folder that holds a state."""
    folder.mkdir()
    for name, data in tree.items():
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)
    return folder
