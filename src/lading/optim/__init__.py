"""The mathematics of optimizers, on plain tensors; and, by name, those that run them on sharded parameters."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lading.matrices import SOAP, Muon, Shampoo

__all__ = ["SOAP", "Muon", "Shampoo"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("lading.matrices"), name)
