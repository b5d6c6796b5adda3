"""Batches of a run: a function of (seed, step, micro-batch), and without replacement of how many samples were taken."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import torch

from lading.config import DataConfig
from lading.errors import ConfigError
from lading.runtime.epochs import DataPosition, Epochs
from lading.runtime.framing import Arrays, framed, padded, window_tokens
from lading.runtime.tokens import load_tokenizer, open_store

#: Second words of the keys under which random numbers are drawn.
_WINDOWS, _MASKS, _HELD_OUT = 0, 2, 3
#: Fewest tokens of a piece of text that is held out, unless all that is held out are fewer; and most such pieces.
_PIECE_TOKENS, _MOST_PIECES = 1 << 16, 64

Batch = dict[str, torch.Tensor]


class Dataset(Protocol):
    """Source of a training loop's batches."""

    @property
    def fingerprint(self) -> str:
        """Text that identifies the values; a run that goes on with others would have another loss curve."""
        ...

    def batch(self, step: int, micro: int) -> Batch:
        """Batch of micro-batch ``micro`` of step ``step``, both from 0."""
        ...

    def continued(self, position: DataPosition) -> Self:
        """Copy of the data as a run reads it from a position on; data that are drawn with replacement have none."""
        ...


class Places:
    """Places in a row of elements at which something of a given length can begin, without touching what is left out.

    Args:
        spans: Start and length of each run of elements that may be used, int64 (runs, 2), in order.
        length: Elements of what begins there, >= 1.
        stride: Elements from one place of a run to the next.
    """

    def __init__(self, spans: np.ndarray, length: int = 1, stride: int = 1) -> None:
        counts = np.maximum((spans[:, 1] - length + stride) // stride, 0)
        self._ends = np.cumsum(counts)
        self._firsts, self._starts, self._stride = self._ends - counts, spans[:, 0], stride

    def __len__(self) -> int:
        """Number of places."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def chosen(self, raw: np.ndarray) -> list[int]:
        """Places that random 64-bit words choose, one each."""
        return self.numbered((raw % np.uint64(len(self))).astype(np.int64))

    def numbered(self, numbers: np.ndarray) -> list[int]:
        """Places of these numbers, int64 [n], counted from 0."""
        runs = np.searchsorted(self._ends, numbers, side="right")
        return (self._starts[runs] + (numbers - self._firsts[runs]) * self._stride).tolist()


class Sampler:
    """Choice of the places where the samples of each batch begin: with replacement, or each once an epoch.

    Args:
        spans: Elements that may be used, as ``Places`` takes them.
        length: Elements of a sample.
        stride: Elements from a sample to the next where samples are not to be drawn again within an epoch.
        position: How far a run has read.
    """

    def __init__(
        self, config: DataConfig, seed: int, spans: np.ndarray, length: int, stride: int, position: DataPosition
    ) -> None:
        self._config, self._seed, self._length, self._stride = config, seed, length, stride
        self._in_epochs = config.sampling == "epochs"
        self.places = Places(spans, length, stride if self._in_epochs else 1)
        self._epochs = Epochs(len(self.places), seed, position)

    def restricted_to(self, spans: np.ndarray) -> Sampler:
        """Sampler of some of the elements."""
        return Sampler(self._config, self._seed, spans, self._length, self._stride, self._epochs.position)

    def continued(self, position: DataPosition) -> Sampler:
        """Sampler of a run that goes on from a position."""
        continued = copy.copy(self)
        continued._epochs = dataclasses.replace(self._epochs, position=position)
        return continued

    def chosen(self, step: int, micro: int) -> list[int]:
        """Places of the samples of a batch.

        Source: Philox counters (Salmon et al., SC'11): step and micro-batch are the high words of the counter, so no
            two batches share a random number; its raw words do not change between numpy versions.

        Raises:
            ConfigError: ``step`` or ``micro`` is negative.
        """
        if step < 0 or micro < 0:
            raise ConfigError(f"expected a step and a micro-batch >= 0, got {step} and {micro}")
        count = self._config.batch_size
        if self._in_epochs:
            return self.places.numbered(self._epochs.samples(step, micro, count))
        return self.places.chosen(words_of(self._seed, _WINDOWS, step, micro, count))


def words_of(seed: int, purpose: int, step: int, micro: int, count: int) -> np.ndarray:
    """Random 64-bit words of a batch for one purpose: uint64 [count]."""
    return np.random.Philox(counter=[0, 0, micro, step], key=[seed, purpose]).random_raw(count)


def from_the_beginning(config: DataConfig, micro_batches: int = 1) -> DataPosition:
    """Position of a run that begins.

    Args:
        micro_batches: Those of a step, of all replicas together.
    """
    return DataPosition(0, 0, config.batch_size * micro_batches)


def whole_span(count: int) -> np.ndarray:
    """Make the span of all of ``count`` elements, as those of ``Places``: int64 [1, 2]."""
    return np.asarray([[0, count]], dtype=np.int64)


def split_spans(count: int, share: float, *, held_out: bool, most_pieces: int) -> np.ndarray:
    """Spans of one side of a row of elements that is split in two, the same for equal arguments.

    The row is cut into as many equal strata as there are pieces to hold out, and each piece lies at a place of its
    stratum that was drawn once and for all: every part of the data is in both sides, and no order of it matters.

    Args:
        share: Share of the elements that is held out.
        held_out: Whether to return what is held out, or the rest.
        most_pieces: Number of pieces, where so many elements are held out.

    Returns:
        Start and length of each span, int64 (spans, 2), in order.
    """
    size = min(count, max(1, round(count * share)))
    pieces = min(most_pieces, size)
    length = size // pieces
    lows = np.arange(pieces + 1, dtype=np.int64) * count // pieces
    room = lows[1:] - lows[:-1] - length + 1
    raw = np.random.Philox(key=[0, _HELD_OUT]).random_raw(pieces)
    starts = lows[:-1] + (raw % room.astype(np.uint64)).astype(np.int64)
    if held_out:
        return np.stack([starts, np.full_like(starts, length)], axis=1)
    begins = np.concatenate([[0], starts + length])
    return np.stack([begins, np.concatenate([starts, [count]]) - begins], axis=1)


class TextDataset:
    """Windows of a text, made into the batches of a task.

    Args:
        config: Source, tokenizer, sequence length T and batch size B.
        folder: Folder of the run, where the tokens are cached. They are made anew when the source changes.
        task: "causal-lm" gives ``{"tokens": int64 (B, T + 1)}``, targets shifted by one; others: ``models.tasks``.
        tokenizer: A tokenizer.json or its folder; None for one token a byte.
        vocabulary, num_labels: Token values and classes that the model knows; None where that is not known.
    Raises:
        ConfigError: no text at the source, fewer tokens than one sequence takes, or tokens the model does not know.
        StorageError: the cache cannot be written.
    """

    def __init__(
        self,
        config: DataConfig,
        folder: Path,
        *,
        seed: int,
        task: str = "causal-lm",
        tokenizer: Path | None = None,
        vocabulary: int | None = None,
        num_labels: int | None = None,
    ) -> None:
        self.config, self.task, self._seed = config, task, seed
        self._store = open_store(config, load_tokenizer(tokenizer), folder, labelled=task == "classification")
        self.specials = self._store.specials
        self._window = window_tokens(task, config.sequence_length, self.specials)
        labelled = self.task == "classification"
        count = len(self._store.documents) if labelled else self._store.count
        window = 1 if labelled else self._window
        # A causal sequence ends with the token that the next one begins with: each is predicted once.
        stride = window - 1 if task == "causal-lm" else window
        self._sampler = Sampler(config, seed, whole_span(count), window, stride, from_the_beginning(config))
        if labelled:
            self._check_labels(num_labels)
        elif not len(self._sampler.places):
            raise ConfigError(
                f"data.source {config.source!r}: expected at least {self._window} tokens of text, "
                f"got {self._store.count}; give more text or a smaller data.sequence_length"
            )
        if vocabulary is not None:
            self._check_vocabulary(vocabulary)

    def __len__(self) -> int:
        """Number of tokens of the text."""
        return self._store.count

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens."""
        return self._store.fingerprint

    def part(self, share: float, *, held_out: bool) -> Self:
        """Data of one side of a split: the texts with labels, or pieces of the text, that are held out, or the rest.

        Raises:
            ConfigError: there are too few for a sequence, or for a text, on that side.
        """
        labelled = self.task == "classification"
        count = len(self._store.documents) if labelled else self._store.count
        pieces = count if labelled else max(1, min(_MOST_PIECES, int(count * share) // _PIECE_TOKENS))
        window = 1 if labelled else self._window
        part = copy.copy(self)
        part._sampler = self._sampler.restricted_to(split_spans(count, share, held_out=held_out, most_pieces=pieces))
        elements = "texts" if labelled else f"tokens, of which a sequence takes {window}"
        check_part(part._sampler.places, share, count, elements)
        return part

    def continued(self, position: DataPosition) -> Self:
        """Copy of the data as a run reads it from a position on."""
        continued = copy.copy(self)
        continued._sampler = self._sampler.continued(position)
        return continued

    def batch(self, step: int, micro: int) -> Batch:
        """Batch of micro-batch ``micro`` of step ``step``.

        Raises:
            ConfigError: ``step`` or ``micro`` is negative.
            StorageError: the cache file is gone, cut short or cannot be read.
        """
        chosen = self._sampler.chosen(step, micro)
        if self.task == "classification":
            return _tensors(self._labelled(chosen))
        windows = np.stack(self._store.read((start, self._window) for start in chosen))

        def words(count: int) -> np.ndarray:
            return words_of(self._seed, _MASKS, step, micro, count)

        return _tensors(framed(self.task, windows, self.config.sequence_length, self.specials, words))

    def _labelled(self, chosen: list[int]) -> Arrays:
        rows = self._store.documents[chosen]
        texts = self._store.read((int(start), min(int(length), self._window)) for start, length, _ in rows)
        return padded(texts, rows[:, 2].tolist(), self.config.sequence_length, self.specials)

    def _check_labels(self, num_labels: int | None) -> None:
        if not len(self._sampler.places):
            raise ConfigError(f"data.source {self.config.source!r}: expected texts with labels, found none")
        highest = int(self._store.documents[:, 2].max())
        if num_labels is not None and highest >= num_labels:
            raise ConfigError(
                f"data.source {self.config.source!r}: expected labels below {num_labels}, got {highest}; "
                f"set model.sizes.num_labels to {highest + 1}"
            )

    def _check_vocabulary(self, vocabulary: int) -> None:
        specials = self.specials
        used = [self._store.highest, *specials.prefix, *specials.suffix, *([specials.pad] if specials.pad else [])]
        if self.task == "masked-lm" and specials.mask is not None:
            used += [specials.mask, specials.vocabulary - 1]
        if max(used) >= vocabulary:
            raise ConfigError(
                f"data.tokenizer: expected tokens below {vocabulary}, the model's vocabulary, got {max(used)}; "
                "give the model's tokenizer, or a model with a larger vocabulary"
            )


def check_part(places: Places, share: float, count: int, elements: str) -> None:
    """Refuse a side of a split on which nothing can begin.

    Raises:
        ConfigError: there are no places.
    """
    if not len(places):
        raise ConfigError(
            f"validation.share: expected enough of the data on both sides, got {share:g} of {count:,} {elements}; set "
            "another share, give more data, or a validation.source of its own"
        )


class LatentDataset:
    """Made-up latents of a diffusion model: each class is a pattern of waves, each sample that pattern and some noise.

    Args:
        shape: Channels, rows and columns of the latents.
    """

    def __init__(self, shape: tuple[int, int, int], num_classes: int, *, batch_size: int, seed: int) -> None:
        self._shape, self._num_classes, self._batch_size, self._seed = shape, num_classes, batch_size, seed
        self.fingerprint = f"latents {shape} of {num_classes} classes"

    def batch(self, step: int, micro: int) -> Batch:
        """Batch of micro-batch ``micro`` of step ``step``: {"latents": float32 (B, C, I, I), "labels": int64 (B,)}."""
        if step < 0 or micro < 0:
            raise ConfigError(f"expected a step and a micro-batch >= 0, got {step} and {micro}")
        channels, rows, columns = self._shape
        raw = words_of(self._seed, _WINDOWS, step, micro, self._batch_size * (1 + channels * rows * columns))
        labels = (raw[: self._batch_size] % np.uint64(self._num_classes)).astype(np.int64)
        noise = (raw[self._batch_size :] >> np.uint64(11)).reshape(-1, *self._shape) * 2.0**-52 - 1.0
        channel, row, column = np.meshgrid(*map(np.arange, self._shape), indexing="ij")
        turns = (labels[:, None, None, None] + 1) * (row / rows + column / columns) / 2 + channel / channels
        latents = np.sin(2 * np.pi * turns) + 0.1 * noise
        return _tensors({"latents": latents.astype(np.float32), "labels": labels})

    def continued(self, position: DataPosition) -> Self:
        """Return these data: they are drawn."""
        return self


def example_batch(task: str, config: DataConfig, tokenizer: Path | None) -> Batch:
    """Batch of the shapes and dtypes of a run's batches; the values mean nothing."""
    specials = load_tokenizer(tokenizer).specials
    rows, length = config.batch_size, config.sequence_length
    if task == "classification":
        empty = np.zeros(window_tokens(task, length, specials), dtype=np.int64)
        return _tensors(padded([empty] * rows, [0] * rows, length, specials))
    windows = np.zeros((rows, window_tokens(task, length, specials)), dtype=np.int64)
    return _tensors(framed(task, windows, length, specials, lambda count: np.zeros(count, dtype=np.uint64)))


def _tensors(arrays: Arrays) -> Batch:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
