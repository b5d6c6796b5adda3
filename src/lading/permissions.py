"""Permissions: what files that a command reads may have Lading do, beyond being read; the user grants it.

A plan, a run or a machine file may name code ("module:function"), and files and folders anywhere. Who calls Lading from
Python is asked nothing: it is their program. Under ``lading COMMAND`` a name of code is imported only if it stands on
the command line too, and a path is followed only below the working directory, below the folder of a file that the
command line names, and where the command line says; ``--trust`` grants all.

The grant is a context variable: set for the time of one command, and read where code is imported or a path followed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lading.errors import ConfigError

#: Texts between quotes, as in ``optimization.optimizer={ rule = "my.module:Rule" }``.
_QUOTED = re.compile(r"""["']([^"']*)["']""")


@dataclass(frozen=True)
class Permissions:
    """Grants of the user.

    Attributes:
        everything: Any code and any path.
        names: Names of code that may be imported, as "module:function".
        folders: Files and folders that may be followed, with all below them; resolved.
    """

    everything: bool = True
    names: frozenset[str] = frozenset()
    folders: tuple[Path, ...] = ()


#: Grant of a program that calls Lading.
_ALL = Permissions()
_GRANTED: ContextVar[Permissions] = ContextVar("lading_permissions", default=_ALL)


@contextmanager
def granting(permissions: Permissions) -> Generator[None]:
    """Grant this and no more while the block runs, but for folders that were granted outside of it."""
    folders = (*permissions.folders, *_GRANTED.get().folders)
    token = _GRANTED.set(dataclasses.replace(permissions, folders=folders))
    try:
        yield
    finally:
        _GRANTED.reset(token)


def permissions_of(command: object) -> Permissions:
    """Collect what a command line grants: all with ``--trust``, else what its words name and the folders of its files.

    Args:
        command: Dataclass of the command's arguments.
    """
    if getattr(command, "trust", False):
        return Permissions()
    words = [part for word in _words(command) for part in _parts(word)]
    folders = [Path()]
    for path in map(Path, words):
        try:
            folders.append(path.parent if path.is_file() else path)
        except (OSError, ValueError):  # no name of a file
            continue
    return Permissions(False, frozenset(words), tuple(dict.fromkeys(map(_resolved, folders))))


def check_code(name: str, what: str) -> None:
    """Refuse to import code that a file names and the command line does not.

    Args:
        name: "module:function".
        what: The setting that names it, for the message.
    Raises:
        ConfigError: it was not granted.
    """
    granted = _GRANTED.get()
    if not granted.everything and name not in granted.names:
        raise ConfigError(
            f"{what}: {name!r} would run code that a file names: expected a name that comes with Lading; if you know "
            "and trust that code, add --trust to the command"
        )


def check_path(path: str | Path, what: str) -> None:
    """Refuse to follow a path that a file names, and that leaves its folder and the working directory.

    Args:
        what: The setting that names it, for the message.
    Raises:
        ConfigError: it was not granted.
    """
    granted = _GRANTED.get()
    if granted.everything:
        return
    target = _resolved(Path(path))
    if not any(target.is_relative_to(folder) for folder in granted.folders):
        raise ConfigError(
            f"{what}: {str(path)!r} is outside of the working directory and of the folder of the file that names it: "
            "expected a path inside; if you want it followed, add --trust to the command, or name it there"
        )


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, or no name of a file
        return path.absolute()


def _words(value: object) -> Iterator[str]:
    """List the texts and paths of a command's arguments."""
    if isinstance(value, (str, Path)):
        yield str(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(cast(Any, value)):
            yield from _words(getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        for item in cast("Iterable[object]", value):
            yield from _words(item)


def _parts(word: str) -> Iterator[str]:
    """List what a word of the command line names: itself, what it sets a key to, and texts in that."""
    yield word
    _, equals, value = word.partition("=")
    if equals:
        yield value.strip()
        yield from _QUOTED.findall(value)
