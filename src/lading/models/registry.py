"""Reference models by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from torch import nn

from lading.errors import ConfigError
from lading.models.common import DecoderConfig
from lading.models.gpt import GPT, GptConfig
from lading.models.llama import Llama, LlamaConfig
from lading.models.moe import MoE, MoeConfig

#: Name -> (model class, its configuration class).
MODELS: Mapping[str, tuple[type[nn.Module], type[DecoderConfig]]] = MappingProxyType(
    {"gpt": (GPT, GptConfig), "llama": (Llama, LlamaConfig), "moe": (MoE, MoeConfig)}
)


def build_model(name: str, **sizes: Any) -> nn.Module:
    """A reference model with weights drawn from torch's default generator.

    Args:
        name: "gpt", "llama" or "moe".
        sizes: Fields of the model's configuration; the rest keep their defaults.
    Raises:
        ConfigError: no such model or size (the nearest name is given), or a size out of range.
    """
    model_class, config_class = MODELS[_known(name, "model", list(MODELS))]
    fields = [field.name for field in dataclasses.fields(config_class)]
    return model_class(
        config_class(**{_known(key, f"size of {name!r}", fields): value for key, value in sizes.items()})
    )


def _known(name: str, what: str, names: list[str]) -> str:
    """``name`` if it is one of ``names``."""
    if name in names:
        return name
    near = get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"expected a {what} among {', '.join(names)}; got {name!r}{hint}")
