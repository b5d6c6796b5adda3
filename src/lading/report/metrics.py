"""metrics.jsonl: one JSON object a line, appended while a run goes on and readable after it was killed.

A line counts once its newline is on disk. Not-a-number and infinities are written as Python's json writes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from lading.errors import ConfigError


class MetricsLog:
    """Appends records to a file, each flushed to the system before ``log`` returns. Usable in ``with``.

    Opening cuts off a last line that a killed run left without its newline.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            _cut_torn_line(path)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one record.

        Raises:
            ConfigError: a value has no JSON form.
        """
        try:
            line = json.dumps(dict(record))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"expected numbers, text, lists or dicts as metrics, got {record!r}: {error}") from error
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; logging again raises ValueError."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every record of a file, without a last line that has no newline (a killed run).

    Raises:
        ConfigError: no such file, or another line is not a JSON object; names the line.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"expected metrics at {path}, found no file") from error
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(data.split(b"\n")[:-1], 1)]


def truncate_after(path: Path, step: int) -> int:
    """Drop the records of steps after ``step``, as a run that resumes there will write them again.

    Writes aside and renames, so that a kill leaves either the old file or the new one. A record without a step stays.

    Returns:
        Number of records dropped.
    Raises:
        ConfigError: as for ``read_metrics``.
    """
    records = read_metrics(path)
    kept = [record for record in records if "step" not in record or record["step"] <= step]
    aside = path.with_name(path.name + ".new")
    with aside.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    return len(records) - len(kept)


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record: object = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: expected a JSON object, got {line[:80]!r}; mend or remove the line") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {line[:80]!r}; mend or remove the line")
    return cast("dict[str, Any]", record)


def _cut_torn_line(path: Path) -> None:
    with path.open("r+b") as file:
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
