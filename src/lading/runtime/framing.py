"""Framing: turn tokens of a text into the batch of a task. Pure functions of the tokens and of raw random words.

Shapes: B batch, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lading.errors import ConfigError
from lading.models.tasks import IGNORED

#: Draws that many 64-bit words; the same ones whenever it is called for the same batch.
Words = Callable[[int], np.ndarray]
Arrays = dict[str, np.ndarray]

#: Share of the tokens that are predicted, and of those the shares that become the mask and any token (BERT's).
_CHOSEN, _MASKED, _RANDOM = 0.15, 0.8, 0.1


@dataclass(frozen=True, kw_only=True)
class Specials:
    """Tokens of a tokenizer that are not text.

    Attributes:
        prefix, suffix: Tokens that the tokenizer puts before and after a text.
        separator: Token between two texts; None puts nothing there.
        mask, pad: Tokens that hide and that fill; None where the tokenizer has none.
        vocabulary: Number of all tokens.
    """

    vocabulary: int
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    separator: int | None = None
    mask: int | None = None
    pad: int | None = None


def window_tokens(task: str, length: int, specials: Specials) -> int:
    """Number of neighbouring tokens of text that a sequence of ``length`` tokens is made of.

    Raises:
        ConfigError: no room for text between the special tokens.
    """
    if task == "causal-lm":
        return length + 1
    inner = length - len(specials.prefix) - len(specials.suffix)
    if inner < 1:
        raise ConfigError(f"data.sequence_length: expected room for text between {length - inner} special tokens")
    if task == "seq2seq-lm":
        return 2 * length - len(specials.suffix)
    return 2 * inner if task == "contrastive" else inner


def framed(task: str, windows: np.ndarray, length: int, specials: Specials, words: Words) -> Arrays:
    """Make the batch of a task from windows of text, int64 (B, ``window_tokens``)."""
    if task == "causal-lm":
        return {"tokens": windows}
    if task == "seq2seq-lm":  # a text and what follows it, which ends as the tokenizer ends texts
        target = _around(windows[:, length:], (), specials.suffix)
        return {"tokens": np.ascontiguousarray(windows[:, :length]), "labels": target}
    if task == "contrastive":
        halves = np.split(windows, 2, axis=1)
        first, second = (_around(half, specials.prefix, specials.suffix) for half in halves)
        return {"first": first, "second": second}
    return masked(_around(windows, specials.prefix, specials.suffix), specials, words)


def masked(tokens_BT: np.ndarray, specials: Specials, words: Words) -> Arrays:
    """Hide some tokens, which are then the labels; at least one of a batch.

    Source: Devlin et al. 2018 (arXiv:1810.04805), section 3.1.
    Raises:
        ConfigError: the tokenizer has no mask token.
    """
    if specials.mask is None:
        raise ConfigError("data.tokenizer: expected one with a mask token for masked-lm, found none; choose another")
    choice, fate, replacement = words(3 * tokens_BT.size).reshape(3, *tokens_BT.shape)
    text = np.ones(tokens_BT.shape, dtype=bool)
    text[:, : len(specials.prefix)] = False
    text[:, tokens_BT.shape[1] - len(specials.suffix) :] = False
    chosen = (_share(choice) < _CHOSEN) & text
    if not chosen.any():
        chosen[0, len(specials.prefix)] = True
    hidden = chosen & (_share(fate) < _MASKED)
    changed = chosen & ~hidden & (_share(fate) < _MASKED + _RANDOM)
    anything = (replacement % np.uint64(specials.vocabulary)).astype(np.int64)
    shown = np.where(hidden, specials.mask, np.where(changed, anything, tokens_BT))
    return {"tokens": shown, "labels": np.where(chosen, tokens_BT, IGNORED)}


def padded(texts: list[np.ndarray], labels: list[int], length: int, specials: Specials) -> Arrays:
    """Make a batch of labelled texts, cut or padded to ``length`` tokens."""
    tokens = np.full((len(texts), length), specials.pad or 0, dtype=np.int64)
    mask = np.zeros((len(texts), length), dtype=np.int64)
    for row, text in enumerate(texts):
        framed = np.concatenate([specials.prefix, text, specials.suffix]).astype(np.int64)
        tokens[row, : len(framed)] = framed
        mask[row, : len(framed)] = 1
    return {"tokens": tokens, "mask": mask, "labels": np.asarray(labels, dtype=np.int64)}


def _around(text_BT: np.ndarray, prefix: tuple[int, ...], suffix: tuple[int, ...]) -> np.ndarray:
    rows = len(text_BT)
    parts = [np.tile(np.asarray(part, dtype=np.int64), (rows, 1)) for part in (prefix, suffix)]
    return np.concatenate([parts[0], text_BT, parts[1]], axis=1)


def _share(words: np.ndarray) -> np.ndarray:
    """Turn random 64-bit words into numbers from 0 to below 1."""
    return (words >> np.uint64(11)) * 2.0**-53
