"""Checks of arriving micro-batches: whether they are as large as planned, by the shapes a model is called with.

Memory and seconds were planned for so many sequences of so many tokens. More of them would take memory that nobody
planned, so they are refused before the forward begins; fewer, as at the end of the data, take less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lading.errors import ConfigError

#: What models of transformers call their input, first of what they are called with by name.
_NAMES = ("input_ids", "tokens", "inputs_embeds", "x", "input")


@dataclass(frozen=True)
class MicroBatch:
    """Largest micro-batch that was planned, by number of sequences and tokens of each."""

    sequences: int
    tokens: int

    def check(self, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Compare every tensor that a model is called with; shapes alone, so that no device is waited for.

        Whole numbers of two dims are (sequences, tokens), of one dim sequences packed one behind the other. Of the
        input, which is the first tensor that is no mask, three dims are (sequences, tokens, hidden). Of all others the
        first dim counts sequences, unless it may count positions or heads: a mask, a table of positions, a bias.

        Raises:
            ConfigError: there are more sequences, or longer ones, than planned; names the tensor.
        """
        ordered = {name: options[name] for name in _NAMES if name in options} | dict(options)
        is_input = True
        for name, tensor in (*named_tensors("argument", args), *named_tensors("", ordered)):
            if not tensor.ndim:
                continue
            if got := self._excess(tensor, is_input=is_input):
                raise ConfigError(
                    f"expected a micro-batch of at most {self.sequences} sequences of {self.tokens} tokens, as "
                    f"planned, got {got} in {name}; give smaller ones, or plan for these with lading plan --pin mb=N "
                    "and --seq"
                )
            is_input = is_input and tensor.dtype is torch.bool

    def _excess(self, tensor: torch.Tensor, *, is_input: bool) -> str:
        """Say what a tensor has, in words, if that is more than planned; else ""."""
        shape, is_mask = tensor.shape, tensor.dtype is torch.bool
        is_whole = not (is_mask or tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        if is_whole and len(shape) == 1:
            return f"{shape[0]} tokens in a row" if shape[0] > self.sequences * self.tokens else ""
        if (len(shape) == 2 and is_whole) or (len(shape) == 3 and is_input and not is_mask):
            fits = shape[0] <= self.sequences and shape[1] <= self.tokens
            return "" if fits else f"{shape[0]} of {shape[1]}"
        if is_mask or not is_input:
            if len(shape) < 3 and shape[0] <= self.tokens:  # by position
                return ""
            if len(shape) == 3 and shape[1] == shape[2]:  # by head and two positions
                return ""
        return f"{shape[0]}" if shape[0] > self.sequences else ""


def named_tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Find the tensors in what a model is called with or returns; yields each with its path, beginning by ``name``."""
    items: Iterator[tuple[object, Any]] = iter(())
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, (list, tuple)):
        items = iter(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    for key, item in items:
        yield from named_tensors(f"{name} {key}" if name == "argument" else f"{name}.{key}".lstrip("."), item)
