"""Arriving: whether micro-batches are as large as planned, by the shapes of what a model is called with.

Memory and seconds were planned for so many sequences of so many tokens. More of them would take memory that nobody
planned, so they are refused before the forward begins; fewer, as at the end of the data, take less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lading.errors import ConfigError

#: What models of transformers call what is looked at, first of what they are called with by name.
_NAMES = ("input_ids", "tokens", "inputs_embeds", "x", "input")


@dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch that was planned: sequences, and tokens of each."""

    sequences: int
    tokens: int

    def check(self, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Compare the first tensor that a model is called with; shapes alone, so that no device is waited for.

        Tokens are whole numbers (sequences, tokens), or embeddings (sequences, tokens, hidden); of anything else the
        first dim counts sequences.

        Raises:
            ConfigError: there are more sequences, or longer ones, than planned.
        """
        given = _first_tensor(args, options)
        if given is None:
            return
        is_tokens = not given.dtype.is_floating_point and not given.dtype.is_complex
        if is_tokens and given.ndim == 1:  # sequences packed one behind the other
            fits, got = len(given) <= self.sequences * self.tokens, f"{len(given)} tokens in a row"
        elif given.ndim == (2 if is_tokens else 3):  # tokens, or their embeddings
            fits = given.shape[0] <= self.sequences and given.shape[1] <= self.tokens
            got = f"{given.shape[0]} of {given.shape[1]}"
        else:
            fits, got = given.shape[0] <= self.sequences, f"{given.shape[0]}"
        if not fits:
            raise ConfigError(
                f"expected a micro-batch of at most {self.sequences} sequences of {self.tokens} tokens, as planned, "
                f"got {got}; give smaller ones, or plan for these with lading plan --pin mb=N and --seq"
            )


def _first_tensor(args: Sequence[Any], options: Mapping[str, Any]) -> torch.Tensor | None:
    ordered = [*args, *(options[name] for name in _NAMES if name in options), *options.values()]
    return next((each for each in ordered if isinstance(each, torch.Tensor) and each.ndim), None)
