"""Documents: text from files, folders and patterns of text, JSON lines and Parquet, in pieces of bounded size."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lading.config import STDLIB, DataConfig
from lading.errors import ConfigError
from lading.permissions import check_path

PIECE_BYTES = 256 << 10
_NOT_TEXT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
#: Bytes of a file in which a zero says that it is no text, as for git.
_LOOKED_AT_BYTES = 8000
_BY_ENDING = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


class TextPiece(NamedTuple):
    """Piece of a text in bytes, and whether it is the first; a text is cut after a line."""

    data: bytes
    first: bool
    label: int | None = None


def files_of(source: str, key: str = "data.source") -> list[Path]:
    """List the files of a source, sorted by path.

    Args:
        key: Setting that has it, for messages.

    Raises:
        ConfigError: there are none, or the user did not grant the path (``lading.permissions``).
    """
    if source != STDLIB:
        check_path(source, key)
    root = Path(sysconfig.get_path("stdlib") if source == STDLIB else source)
    if root.is_file():
        return [root]
    if root.is_dir():
        paths = sorted(_walk(root, python_only=source == STDLIB), key=lambda path: path.relative_to(root).as_posix())
    else:
        matches = map(Path, glob.glob(source, recursive=True))
        paths = sorted(path for path in matches if path.is_file() and path.stat().st_size)
        if not paths:
            raise ConfigError(
                f"{key}: expected 'stdlib', a folder, a file or a pattern, got {source!r}, which does not exist"
            )
    if not paths:
        raise ConfigError(f"{key}: expected files with text in {root}, found none")
    return paths


def fingerprint_of(files: Iterable[Path]) -> str:
    """Hash of the names, sizes and times of files, which changes when one of them does."""
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def pieces(files: Iterable[Path], config: DataConfig, *, labelled: bool = False) -> Iterator[TextPiece]:
    """Read the text of files, in order.

    Args:
        labelled: Whether each text has a label in ``config.label_field``.

    Raises:
        ConfigError: a file is not what its format says; names the file and the line or row.
    """
    for path in files:
        form = config.format if config.format != "auto" else _BY_ENDING.get(path.suffix, "text")
        if form in ("jsonl", "parquet"):
            rows = _json_rows(path) if form == "jsonl" else _parquet_rows(path, config, labelled=labelled)
            for location, row in rows:
                label = _label_of(row, config, location) if labelled else None
                if text := _text_of(row, config, location):
                    yield TextPiece(text, True, label)
        elif labelled:
            raise ConfigError(f"{path}: expected JSON lines or Parquet with labels, got {form}; see data.format")
        else:
            if config.format == "auto":
                _check_text(path)
            yield from _read_one_text(path)


def _walk(root: Path, *, python_only: bool) -> Iterator[Path]:
    """List files below ``root`` that are not empty and not hidden; of Python's library its own source, no tests."""
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".") and not (python_only and f in _NOT_TEXT)]
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            if (path.suffix == ".py" or not python_only) and path.is_file() and path.stat().st_size:
                yield path


def _check_text(path: Path) -> None:
    """Refuse a file of bytes that nobody said are text.

    Raises:
        ConfigError: it begins with more than text, as archives, pickles, images and UTF-16 do.
    """
    with open(path, "rb") as file:
        if b"\0" in file.read(_LOOKED_AT_BYTES):
            raise ConfigError(
                f"{path}: expected text in UTF-8 or another encoding without zero bytes, found a zero among its first "
                f"{_LOOKED_AT_BYTES} bytes; leave the file out, save text as UTF-8, or take its bytes as they are by "
                'data.format = "text"'
            )


def _read_one_text(path: Path) -> Iterator[TextPiece]:
    """Read a file as one text; each piece but the last ends with a line, or with a word where a line is longer."""
    remainder, first = b"", True
    with open(path, "rb") as file:
        while block := file.read(PIECE_BYTES):
            data = remainder + block
            cut = data.rfind(b"\n") + 1 or data.rfind(b" ") + 1 or _last_character(data)
            if len(block) < PIECE_BYTES:  # the end of the file
                cut = len(data)
            yield TextPiece(data[:cut], first)
            remainder, first = data[cut:], False
    if remainder:
        yield TextPiece(remainder, first)


def _last_character(data: bytes) -> int:
    """Offset at which the last, maybe cut, character of UTF-8 text begins; the end of bytes that are no UTF-8."""
    starts = (at for at in range(len(data) - 1, max(-1, len(data) - 5), -1) if data[at] & 0xC0 != 0x80)
    return next(starts, 0) or len(data)


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            location = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                row: Any = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{location}: expected a JSON object, got {line[:60]!r}: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{location}: expected a JSON object, got {line[:60]!r}")
            yield location, row


def _parquet_rows(path: Path, config: DataConfig, *, labelled: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{path}: reading Parquet needs pyarrow: pip install 'lading[data]'") from error
    columns = [config.text_field, *([config.label_field] if labelled else [])]
    try:
        with parquet.ParquetFile(path) as file:
            if absent := [name for name in columns if name not in file.schema_arrow.names]:
                raise ConfigError(f"{path}: expected a column {absent[0]!r}, found {file.schema_arrow.names}")
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # of the file, its pages, and texts in them
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: expected a Parquet file: {error}") from error


def _text_of(row: dict[str, Any], config: DataConfig, where: str) -> bytes:
    text = row.get(config.text_field)
    if not isinstance(text, str):
        description = f"the fields {sorted(row)}" if text is None else repr(text)
        raise ConfigError(
            f"{where}: expected a text in {config.text_field!r}, found {description}; see data.text_field"
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # half of a pair of surrogates
        raise ConfigError(f"{where}: expected text that has a UTF-8 form: {error}") from error


def _label_of(row: dict[str, Any], config: DataConfig, where: str) -> int:
    label = row.get(config.label_field)
    if type(label) is not int or label < 0:
        raise ConfigError(
            f"{where}: expected an integer >= 0 in {config.label_field!r}, found {label!r}; see data.label_field"
        )
    return label
