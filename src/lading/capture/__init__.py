"""Capture: one training step of an ``nn.Module`` as a StepGraph.

[Note: capture is a folder and a function] ``lading.capture`` must be callable, yet importing this folder binds that
name to a module. So the module can be called, and has the signature and the help of ``lading.capture.trace.capture``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _function()(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<function {self.__name__}>"

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_function())

    @property
    def __doc__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        # pydoc takes a module's help from here alone, so the arguments come first.
        function = _function()
        return f"capture{inspect.signature(function)}\n\n{inspect.getdoc(function)}"


def _function() -> Callable[..., Any]:
    """The function that the folder stands for, which brings torch."""
    return import_module("lading.capture.trace").capture


sys.modules[__name__].__class__ = _CallableModule
