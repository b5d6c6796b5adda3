"""Optimizers: a file a rule, their registry, and by name those that run rules for matrices on sharded parameters."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """The optimizer of a rule for matrices, as ``lading.optim.Muon`` (``lading.matrices``)."""
    if not name[:1].isupper():  # a module of the folder
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("lading.matrices"), name)
