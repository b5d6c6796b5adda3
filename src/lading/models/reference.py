"""Reference models by name; ``lading.config.MODELS`` lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from torch import nn

from lading.config import MODELS
from lading.errors import ConfigError, did_you_mean


class ReferenceModel(Protocol):
    """Class of a reference model.

    Attributes:
        Config: Dataclass of its sizes, the one argument of its constructor.
        loss: ``loss(model, batch)``, a scalar.
    """

    Config: type[Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]

    def __call__(self, config: Any) -> nn.Module: ...


def model_class(name: str) -> ReferenceModel:
    """Find the class of a reference model.

    Raises:
        ConfigError: no such model; the nearest name is given.
    """
    module, _, class_name = MODELS[_check_choice(name, "model", sorted(MODELS))].partition(":")
    return cast(ReferenceModel, getattr(import_module(module), class_name))


def build_model(name: str, **sizes: Any) -> nn.Module:
    """Build a reference model with weights drawn from torch's default generator.

    Args:
        name: A key of ``MODELS``.
        sizes: Fields of the model's configuration; the rest keep their defaults.
    Raises:
        ConfigError: no such model or size (the nearest name is given), or a size out of range.
    """
    model = model_class(name)
    fields = [field.name for field in dataclasses.fields(model.Config)]
    named = {_check_choice(key, f"size of {name!r}", fields): value for key, value in sizes.items()}
    return model(model.Config(**named))


def _check_choice(name: str, what: str, names: list[str]) -> str:
    """Return ``name`` if it is one of ``names``.

    Raises:
        ConfigError: it is not; the nearest is given.
    """
    if name in names:
        return name
    hint = did_you_mean(name, names, 0.4)
    raise ConfigError(f"expected a {what} among {', '.join(names)}; got {name!r}{hint}")
