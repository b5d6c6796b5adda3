"""Mutation harness: files changed in seeded ways, read under a watch over time, memory and code that is run.

A mutation is fixed by its kind and its number, so that one that failed can be made again by itself.
"""

from __future__ import annotations

import copy
import json
import math
import random
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from lading.errors import LadingError
from lading.permissions import Permissions, granting
from lading.runtime.resident import PeakMeter
from tests.fuzz import Watch

#: Most seconds that reading a file may take, and most memory: so many times the file, but at least so many bytes.
MOST_S, MOST_TIMES, LEAST_BYTES = 10.0, 10, 64 << 20
#: Module that no file may have imported; importing it fails the test.
CANARY = "lading_canary"
TEXTS = (
    *("", " ", "x", "nan", "50%", "1e999", "%s", "{0}", "\\", '"', "[/red]", "[link=x]", "<script>", "\x1b[2J", "\r"),
    *("../../etc/passwd", "/etc/passwd", "/dev/zero", "a\0b", f"{CANARY}:run", f"{CANARY}:run.more", "os:abort"),
    *("\ud800", "x" * 5000, "\u202e", "9" * 5000, "1_0", "0x10", "true", "null", "-0", "float32", "float32 3 4"),
)  # fmt: skip
NUMBERS = (
    *(0, -1, 1, 2, 1 << 31, (1 << 63) - 1, 1 << 63, -(1 << 63), 1 << 200, 10**400),
    *(0.0, 0.5, -1.5, 5e-324, 1e308, -1e308, math.inf, -math.inf, math.nan),
)


class Hang(BaseException):
    """A file was read for too long."""


@dataclass(frozen=True)
class Kind:
    """A kind of file that is read.

    Attributes:
        name: Name of the file.
        whole: Makes the file's content, and what lies beside it, in a folder.
        read: Reads the file of a folder.
        form: "json", "toml" or "lines" where it can be changed as a document too, else "".
        mend: Makes a changed document fit its own checksum, as one who means it would.
    """

    name: str
    whole: Callable[[Path], bytes]
    read: Callable[[Path], object]
    form: str = ""
    mend: Callable[[Any], Any] = lambda document: document


def any_value(rng: random.Random, depth: int = 2) -> Any:
    """A value of any type of JSON, often one that something else would be."""
    draw = rng.random()
    if draw < 0.35:
        return rng.choice(TEXTS)
    if draw < 0.7:
        return rng.choice(NUMBERS)
    if draw < 0.8 or not depth:
        return rng.choice((None, True, False))
    if draw < 0.9:
        return [any_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return {rng.choice(TEXTS): any_value(rng, depth - 1) for _ in range(rng.randrange(3))}


def _places(node: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a document."""
    places: list[tuple[Any, Any]] = []
    stack = [node]
    while stack:
        container = stack.pop()
        for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
            places.append((container, key))
            if isinstance(value, (dict, list)):
                stack.append(value)
    return places


def changed_document(rng: random.Random, original: Any) -> Any:
    """A copy of a document with one thing in it, or two, replaced, removed, added, renamed, nested or put elsewhere."""
    document = copy.deepcopy(original)
    for _ in range(1 if rng.random() < 0.8 else 2):
        places = _places(document)
        if not places:
            return any_value(rng)
        container, key = rng.choice(places)
        action = rng.choice(("replace", "replace", "replace", "remove", "add", "rename", "nest", "other"))
        if action == "remove":
            del container[key]
        elif action == "add" and isinstance(container, list):
            container.insert(key, any_value(rng))
        elif action in ("add", "rename") and isinstance(container, dict):
            container[rng.choice((*TEXTS, f"{key}s"))] = container.pop(key) if action == "rename" else any_value(rng)
        elif action == "nest":
            container[key] = rng.choice(([container[key]], {"x": container[key]}, [container[key]] * 2))
        elif action == "other":
            other, place = rng.choice(places)
            if isinstance(other, dict) or place < len(other):
                container[key] = copy.deepcopy(other[place]) if place in other or isinstance(other, list) else None
        else:
            container[key] = any_value(rng)
    return document


def changed_bytes(rng: random.Random, original: bytes) -> bytes:
    """Content with some bytes flipped, replaced, removed, repeated or cut, or numbers in it set to extremes."""
    data = bytearray(original)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 4, 8, 64))
        action = rng.choice(("flip", "flip", "random", "random", "remove", "repeat", "cut", "number", "swap"))
        if action == "flip" and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif action == "random":
            data[at : at + length] = rng.randbytes(rng.choice((length, rng.randrange(9))))
        elif action == "remove":
            del data[at : at + length]
        elif action == "repeat":
            data[at:at] = data[at : at + length] * rng.choice((1, 2, 100))
        elif action == "cut" and rng.random() < 0.3:
            del data[at:]
        elif action == "number":
            width, number = rng.choice((2, 4, 8)), rng.choice((0, 1, -1, 0x7F, 0x7FFF, 0x7FFFFFFF, 1 << 62))
            data[at : at + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        elif action == "swap":
            other = rng.randrange(len(data) + 1)
            piece = data[at : at + length]
            data[at : at + length] = data[other : other + length]
            data[other : other + length] = piece
    return bytes(data)


def mutation(kind: Kind, original: bytes, number: int, written: Callable[[Any], str]) -> bytes:
    """Content of a file of a kind, changed: by its bytes, or where it is a document half of the time as that.

    Args:
        written: Writes a document of the kind's form.
    """
    rng = random.Random(f"{kind.name} {number}")
    if not kind.form or rng.random() < 0.4:
        return changed_bytes(rng, original)
    document = changed_document(rng, parsed(kind, original))
    if rng.random() < 0.7:
        with suppress(TypeError, KeyError, ValueError, AttributeError):  # what is no such document has no checksum
            document = kind.mend(document)
    return written(document).encode("utf-8", "surrogatepass")


def parsed(kind: Kind, content: bytes) -> Any:
    """The document that a file is; of lines the first."""
    text = content.decode()
    return (
        tomllib.loads(text)
        if kind.form == "toml"
        else json.loads(text.splitlines()[0] if kind.form == "lines" else text)
    )


@contextmanager
def limited_time() -> Generator[None]:
    """Raise ``Hang`` in what takes longer than a file may take."""

    def stop(_: int, __: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 2 * MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Reader:
    """Reads files of a folder one after another, each as a command would, and keeps account of what that took.

    Attributes:
        accepted, refused: Files that were read, and that were refused.
    """

    folder: Path
    watch: Watch
    meter: PeakMeter
    accepted: int = 0
    refused: int = 0

    def read(self, kind: Kind, content: bytes) -> str:
        """Read a file of this content; returns the error that refuses it, or "".

        Raises:
            AssertionError: anything but that, or it took too much time or memory, or had code run.
        """
        path = self.folder / kind.name
        path.write_bytes(content)
        self.meter.reset()
        before, begun, said = self.meter.now_bytes(), time.monotonic(), ""
        self.watch.on = True
        try:
            with granting(Permissions(everything=False, folders=(self.folder,))), limited_time():
                kind.read(path)
            self.accepted += 1
        except LadingError as error:
            said = str(error)
            self.refused += 1
        finally:
            self.watch.on = False
        assert time.monotonic() - begun < MOST_S, "it took too long"
        taken, allowed = self.meter.peak_bytes() - before, max(LEAST_BYTES, MOST_TIMES * len(content))
        assert taken < allowed, f"{taken} bytes were taken for a file of {len(content)}"
        assert self.watch.seen == [], "code was run"
        assert CANARY not in sys.modules, "a module was imported"
        assert len(said) < 2000, f"the error is long: {said}"
        assert not said or self.folder.name in said or path.name in said, said
        return said
