"""Properties of transformers' models that a step's cost depends on, as data: pretrained.toml, one source for each.

A name leads to an entry, and the entry says what its code does; who knows better states the property itself.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lading.errors import ConfigError

_FILE = Path(__file__).parent / "pretrained.toml"
#: Part of ``Stack.unfused`` that an activation of transformers is; those that are one kernel of torch's have none.
ACTIVATION_PARTS = {"gelu_new": "gelu", "gelu_bloom": "gelu", "gelu_python": "gelu-erf"}
#: Activations that are one kernel, by transformers' names of them (activations.py, ACT2FN).
ONE_KERNEL = ("gelu", "gelu_pytorch_tanh", "silu", "swish", "relu", "quick_gelu")


@dataclass(frozen=True, kw_only=True)
class PretrainedModel:
    """Model of transformers.

    Attributes:
        type: Its ``model_type``.
        names: Words of published names that mean it, as letters and digits alone.
        activation: Activation of its MLP by transformers' name.
        unfused: Year and month of the last sources in which it had no fused attention by itself; (0, 0) for that of
            all models.
        source: Source of each.
    """

    type: str
    names: tuple[str, ...]
    activation: str
    source: str
    unfused: tuple[int, int] = (0, 0)


@cache
def pretrained_models() -> tuple[PretrainedModel, ...]:
    """Read the entries.

    Raises:
        ConfigError: an entry lacks a key, has an unknown one, or an activation that is not known.
    """
    data: dict[str, Any] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    found: list[PretrainedModel] = []
    for entry in data["models"]:
        try:
            year, month = (int(part) for part in entry.pop("unfused", "0-0").split("-"))
            names = tuple(entry.pop("names"))
            model = PretrainedModel(**entry, names=names, unfused=(year, month))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{_FILE}: expected type, names, activation, source, unfused: {error}") from error
        activation_part(model.activation)
        found.append(model)
    return tuple(found)


def activation_part(activation: str) -> str:
    """Part of ``Stack.unfused`` that an activation is; "" where it is one kernel.

    Raises:
        ConfigError: no such activation is known.
    """
    if activation in ONE_KERNEL:
        return ""
    if activation not in ACTIVATION_PARTS:
        known = ", ".join((*ONE_KERNEL, *ACTIVATION_PARTS))
        raise ConfigError(f"expected an activation of transformers ({known}), got {activation[:40]!r}")
    return ACTIVATION_PARTS[activation]


def pretrained_of(name: str) -> PretrainedModel | None:
    """Look up the model that a published name means ("openai-community/gpt2-large"); None where no entry is meant.

    A name means an entry where neighbouring words of it, joined, are one of the entry's names; of two the longest.
    """
    words = re.findall(r"[a-z]+|\d+(?:\.\d+)?(?:[bmk](?![a-z]))?", name.lower())  # "2.7b" is a size
    joined = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    meant = [(len(known), model) for model in pretrained_models() for known in model.names if known in joined]
    return max(meant, key=lambda pair: pair[0])[1] if meant else None
