"""Text as tokens in a cache file next to the run: made once, then read in windows.

    text-FINGERPRINT.tokens      the tokens, as the smallest unsigned integers that hold the vocabulary
    text-FINGERPRINT.documents   start, length and label of each text, int64; only where texts have labels
    text-FINGERPRINT.json        how many tokens, of which kind, and their hash; written last

A mapping of the file would add the neighbouring pages of every window to the resident set that a budget is about, so
windows are read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lading.config import DataConfig
from lading.errors import ConfigError, StorageError
from lading.files import make_durable_folder, parse_json, read_bytes, write_aside, write_text
from lading.runtime.documents import PIECE_BYTES, TextPiece, files_of, fingerprint_of, pieces
from lading.runtime.framing import Specials

#: Raised whenever the same text would become other tokens.
_LAYOUT = 2
_BYTES = Specials(vocabulary=256, separator=0)
#: Names of special tokens where no file beside the tokenizer says them.
_USUAL = {
    "mask_token": ("[MASK]", "<mask>"),
    "pad_token": ("[PAD]", "<pad>"),
    "eos_token": ("</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>"),
}


@dataclass(frozen=True)
class Tokenizer:
    """Turns text into tokens by a tokenizer file; without one, into one token a byte."""

    path: Path | None
    specials: Specials
    made: Any = None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of each text, none of them special.

        Raises:
            ConfigError: the tokenizer's file has no token for a part of one.
        """
        assert self.path is not None
        with _reading(self.path):
            return [encoding.ids for encoding in self.made.encode_batch_fast(list(texts), add_special_tokens=False)]


def load_tokenizer(path: Path | None) -> Tokenizer:
    """Load the tokenizer of a ``tokenizer.json`` or of the folder that holds it; for None, the one of bytes.

    Raises:
        ConfigError: no such file, or it is something else.
    """
    if path is None:
        return Tokenizer(None, _BYTES)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"data.tokenizer: expected 'auto', 'bytes' or a tokenizer.json, found no file {path}")
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError("a tokenizer file needs tokenizers: pip install 'lading[hf]'") from error
    with _reading(path):
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return Tokenizer(path, _specials(tokenizer, path), tokenizer)


@contextmanager
def _reading(path: Path) -> Generator[None]:
    """Turn whatever tokenizers raises of a file inside, a panic of its Rust code too, into an error that names it."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        message = " ".join(str(error).split())[:300]
        raise ConfigError(f"data.tokenizer: expected a tokenizer.json at {path}: {message}") from error


def _specials(made: Any, path: Path) -> Specials:
    encoding = made.encode("a", add_special_tokens=True)
    special = [bool(flag) for flag in encoding.special_tokens_mask]
    start = special.index(False) if False in special else len(special)
    end = len(special) - special[::-1].index(False) if False in special else len(special)
    named = {key: _special(made, key, path) for key in _USUAL}
    suffix = tuple(encoding.ids[end:])
    return Specials(
        vocabulary=made.get_vocab_size(),
        prefix=tuple(encoding.ids[:start]),
        suffix=suffix,
        separator=named["eos_token"] if named["eos_token"] is not None else next(iter(suffix), None),
        mask=named["mask_token"],
        pad=named["pad_token"],
    )


def _special(made: Any, key: str, path: Path) -> int | None:
    """Id of a special token that a file beside the tokenizer names, or that has the usual name; None without one."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = path.with_name(name)
        try:
            value: Any = parse_json(file.read_bytes(), controls=True).get(key) if file.is_file() else None
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file}: expected the settings of a tokenizer: {error}") from error
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            return made.token_to_id(value)
    return next((token for word in _USUAL[key] if (token := made.token_to_id(word)) is not None), None)


@dataclass(frozen=True)
class TokenStore:
    """Tokens of a text, in a file.

    Attributes:
        count: Number of all tokens. ``highest`` is the largest of them.
        fingerprint: Hash of the tokens: a run that goes on with another text would have another loss curve.
        documents: Start, length and label of each text, int64 (texts, 3); empty where texts have no labels.
    """

    path: Path
    dtype: np.dtype[Any]
    count: int
    highest: int
    fingerprint: str
    documents: np.ndarray
    specials: Specials

    def read(self, spans: Iterable[tuple[int, int]]) -> list[np.ndarray]:
        """Tokens of each span (start, length), int64.

        Raises:
            StorageError: the cache file is gone, cut short or cannot be read.
        """
        item = self.dtype.itemsize
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                blocks = [(os.pread(file, length * item, start * item), length) for start, length in spans]
            finally:
                os.close(file)
        except OSError as error:
            raise StorageError(f"cannot read the text in {self.path}: {error.strerror}; start the run again") from error
        if any(len(block) != length * item for block, length in blocks):
            raise StorageError(f"{self.path}: expected {self.count * item} bytes, found fewer; delete it and run again")
        return [np.frombuffer(block, dtype=self.dtype).astype(np.int64) for block, _ in blocks]


def open_store(config: DataConfig, tokenizer: Tokenizer, folder: Path, *, labelled: bool = False) -> TokenStore:
    """Open the tokens of a text in the cache in ``folder``; make them anew if the text or the tokenizer changed.

    Raises:
        ConfigError: no text at the source, or a file of it cannot be read as text.
        StorageError: the cache cannot be written.
    """
    files = files_of(config.source)
    parts = [fingerprint_of(files), config.format, config.text_field, config.label_field, labelled, _LAYOUT]
    if tokenizer.path is not None:
        parts.append(hashlib.sha256(read_bytes(tokenizer.path)).hexdigest())
    path = folder / f"text-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.tokens"
    store = _opened(path, tokenizer.specials)
    if store is None:
        try:
            make_durable_folder(folder)
            _write(path, pieces(files, config, labelled=labelled), tokenizer)
        except OSError as error:
            raise StorageError(f"cannot copy the text of {config.source!r} to {folder}: {error}") from error
        store = _opened(path, tokenizer.specials)
    if store is None:
        raise StorageError(f"{path}: expected the text that was just written, found another; run again")
    return store


def _opened(path: Path, specials: Specials) -> TokenStore | None:
    """Open the store at ``path``; None if it is not there whole."""
    try:
        facts = parse_json(path.with_suffix(".json").read_bytes())
        dtype = np.dtype(facts["dtype"])
        documents = np.fromfile(path.with_suffix(".documents"), dtype=np.int64) if facts["documents"] else np.empty(0)
        store = TokenStore(
            path,
            dtype,
            int(facts["count"]),
            int(facts["highest"]),
            str(facts["sha256"])[:16],
            documents.astype(np.int64).reshape(-1, 3),
            specials,
        )
        is_complete = path.stat().st_size == store.count * dtype.itemsize and len(store.documents) == facts["documents"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # to be made again
    return store if is_complete else None


class _TokenWriter:
    """Writes tokens to a file and hashes them; remembers where texts begin."""

    def __init__(self, file: BinaryIO, specials: Specials) -> None:
        self._file, self._specials = file, specials
        self.dtype = np.dtype(
            "<u1" if specials.vocabulary <= 1 << 8 else "<u2" if specials.vocabulary <= 1 << 16 else "<u4"
        )
        self.count, self.highest, self.digest = 0, 0, hashlib.sha256()
        self.documents: list[list[int]] = []

    def begin(self, label: int | None) -> None:
        """Start a new text: what is added next belongs to it."""
        if self.count and self._specials.separator is not None:
            self.add(np.asarray([self._specials.separator]))
        if label is not None:
            self.documents.append([self.count, 0, label])

    def add(self, tokens: np.ndarray) -> None:
        if not len(tokens):
            return
        data = tokens.astype(self.dtype).tobytes()
        self._file.write(data)
        self.digest.update(data)
        self.count += len(tokens)
        self.highest = max(self.highest, int(tokens.max()))

    def end(self) -> None:
        """End a piece of a text."""
        if self.documents:
            self.documents[-1][1] = self.count - self.documents[-1][0]


def _write(path: Path, texts: Iterable[TextPiece], tokenizer: Tokenizer) -> None:
    """Write the files of a store, the description last; each is complete or absent."""
    with write_aside(path) as file:
        writer = _TokenWriter(file, tokenizer.specials)
        for piece, tokens in _encoded(texts, tokenizer):
            if piece.first:
                writer.begin(piece.label)
            writer.add(tokens)
            writer.end()
    facts = {
        "count": writer.count,
        "highest": writer.highest,
        "dtype": writer.dtype.str,
        "sha256": writer.digest.hexdigest(),
        "documents": len(writer.documents),
    }
    with write_aside(path.with_suffix(".documents")) as file:
        file.write(np.asarray(writer.documents, dtype=np.int64).tobytes())
    write_text(path.with_suffix(".json"), json.dumps(facts))


def _encoded(texts: Iterable[TextPiece], tokenizer: Tokenizer) -> Iterator[tuple[TextPiece, np.ndarray]]:
    """Encode each piece of text; yields the piece with its tokens."""
    if tokenizer.path is None:
        for piece in texts:
            yield piece, np.frombuffer(piece.data, dtype=np.uint8)
        return
    group: list[TextPiece] = []
    size = 0
    for piece in texts:
        group.append(piece)
        size += len(piece.data)
        if size >= PIECE_BYTES:
            yield from _encoded_group(group, tokenizer)
            group, size = [], 0
    yield from _encoded_group(group, tokenizer)


def _encoded_group(group: list[TextPiece], tokenizer: Tokenizer) -> Iterator[tuple[TextPiece, np.ndarray]]:
    try:
        texts = [piece.data.decode() for piece in group]
    except UnicodeDecodeError as error:
        bad_bytes = error.object[error.start : error.start + 16]
        raise ConfigError(
            f"data.source: expected UTF-8 text for the tokenizer, found {bad_bytes!r}; "
            "leave files that are no text out, or set data.tokenizer to 'bytes'"
        ) from error
    for piece, ids in zip(group, tokenizer.encode(texts), strict=True):
        yield piece, np.asarray(ids, dtype=np.int64)
