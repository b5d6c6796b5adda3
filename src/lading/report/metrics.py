"""metrics.jsonl: one JSON object a line, appended while a run goes on and readable after it was killed.

A line counts once its newline is on disk. Not-a-number and infinities are written as Python's json writes them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from lading.errors import ConfigError, StorageError
from lading.files import cannot_read, cannot_write, read_bytes, remove_file, rename_file, sync_folder, write_text

#: Seconds of records that a machine that stops may lose.
_SYNC_S = 5.0
#: What to do without the figures of the steps before a checkpoint.
_GONE = (
    "put it back, or begin anew in another folder (out); lading export CHECKPOINT --to FOLDER writes the trained values"
)
#: Lowest and upper end of what a step's record may say; a loss may be anything that training can give.
_LIMITS = {"step": (0, 1 << 63), "memory_bytes": (0, 1 << 63), "base_bytes": (0, 1 << 63), "step_s": (1e-9, 1e9)}


class MetricsLog:
    """Log that appends records to a file, each given to the system before ``log`` returns. Usable in ``with``.

    A killed process loses nothing that was logged; a machine that stops loses a few seconds of it, but nothing from
    before ``sync``. Opening cuts off a last line that a killed run left without its newline.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            is_new = not path.exists()
            if not is_new:
                _cut_torn_line(path)
            self._file = path.open("ab", buffering=0)  # nothing is left to write when a full disk is noticed
            if is_new:
                sync_folder(path.parent)
        except OSError as error:
            raise cannot_write(path, error) from error
        self._synced_s = time.monotonic()
        self._failed = False
        self._unwritten = b""

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one record.

        Raises:
            ConfigError: a value has no JSON form.
            StorageError: the disk is full or fails; what was logged before stays.
        """
        try:
            line = json.dumps(dict(record))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"expected numbers, text, lists or dicts as metrics, got {record!r}: {error}") from error
        try:
            self._unwritten += f"{line}\n".encode()
            self._write()
            if time.monotonic() - self._synced_s > _SYNC_S:
                self._sync()
        except OSError as error:
            self._failed = True
            raise self._cannot_write(error) from error

    def sync(self) -> None:
        """Wait until all that was logged is on disk, where a machine that stops does not lose it.

        What the disk has not taken before is tried once more.

        Raises:
            StorageError: the disk fails.
        """
        try:
            self._write()
            self._sync()
        except OSError as error:
            self._failed = True
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> StorageError:
        return StorageError(f"{cannot_write(self.path, error)}; then go on with --resume")

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced_s = time.monotonic()

    def close(self) -> None:
        """Wait for the disk, unless it has failed already, and close the file; logging again raises ValueError."""
        try:
            if not (self._failed or self._file.closed):
                self._sync()
        except OSError as error:
            raise self._cannot_write(error) from error
        finally:
            self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed |= error is not None  # which is what there is to say, not that the disk fails here too
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read every record of a file, without a last line that has no newline (a killed run).

    Raises:
        ConfigError: no such file, or another line is not a JSON object; names the line.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"expected metrics at {path}, found no file") from error
    except OSError as error:
        raise cannot_read(path, error) from error
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(data.split(b"\n")[:-1], 1)]


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Read the records of a run's steps: each has its step, loss, step_s and memory_bytes.

    A record may have ``base_bytes``, what the process had before training, and ``excess``, sentences on its budget.

    Raises:
        ConfigError: as for ``read_metrics``, or one of these is missing or of another kind; names the line.
    """
    records = read_metrics(path)
    for number, record in enumerate(records, 1):
        location = f"{path}, line {number}"
        for key, kind in {"step": int, "loss": float, "step_s": float, "memory_bytes": int}.items():
            _check(record, key, kind, location)
        if "base_bytes" in record:
            _check(record, "base_bytes", int, location)
        texts = record.get("excess", [])
        if type(texts) is not list or not all(isinstance(item, str) for item in cast("list[object]", texts)):
            shown = repr(cast("object", texts))[:60]
            raise ConfigError(f"{location}: expected a list of texts as 'excess', got {shown}; mend or remove the line")
    return records


def truncate_after(path: Path, step: int) -> int:
    """Drop the records of steps after ``step``, as a run that resumes there will write them again.

    Writes aside and renames, so that a kill leaves either the old file or the new one. A record without a step stays.
    Once the record of ``step`` was read, a line that is none, as a machine that stopped may leave behind, and what
    follows it are dropped, too.

    Returns:
        Number of lines dropped.
    Raises:
        ConfigError: as for ``read_metrics``.
    """
    if not path.exists():
        raise ConfigError(f"expected metrics at {path}, found no file; {_GONE}")
    lines, remaining, reached = read_bytes(path).split(b"\n")[:-1], list[dict[str, Any]](), step < 0
    for number, line in enumerate(lines, 1):
        try:
            record = _parse(line, f"{path}, line {number}")
        except ConfigError:
            if not reached:
                raise
            break
        reached |= record.get("step", -1) >= step
        if "step" not in record or record["step"] <= step:
            remaining.append(record)
    write_text(path, "".join(json.dumps(record) + "\n" for record in remaining))
    return len(lines) - len(remaining)


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: expected a JSON object, got {line[:80]!r}; mend or remove the line") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {line[:80]!r}; mend or remove the line")
    fields = cast("dict[str, Any]", record)
    if "step" in fields:
        _check(fields, "step", int, where)
    return fields


def _cut_torn_line(path: Path) -> None:
    with path.open("r+b") as file:
        complete_bytes = file.read().rfind(b"\n") + 1
        file.truncate(complete_bytes)


def _check(record: dict[str, Any], key: str, kind: type, where: str) -> None:
    value = record.get(key)
    low, high = _LIMITS.get(key, (0, 0))
    if type(value) is not kind or (key in _LIMITS and not low <= cast(float, value) < high):
        expected = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{where}: expected {expected} as {key!r}, got {repr(value)[:60]}; mend or remove the line")


def keep_figures(out: Path, steps: int) -> None:
    """Leave of the figures in a run's folder those of its first ``steps`` steps; with none, put its metrics aside.

    Raises:
        ConfigError: as ``truncate_after``. StorageError: a file cannot be renamed or deleted.
    """
    if steps:
        truncate_after(out / "metrics.jsonl", steps - 1)
        return
    if (out / "metrics.jsonl").is_file():  # a run that saved nothing to go on from
        rename_file(out / "metrics.jsonl", out / "metrics.before.jsonl")
    remove_file(out / "measured.json")
    remove_file(out / "ranks.json")
