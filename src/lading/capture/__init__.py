"""Capture: one training step of an ``nn.Module`` as a StepGraph.

[Note: capture is a folder and a function] ``lading.capture`` must be callable, yet importing this folder binds that
name to a module. So the module can be called, and stands for ``lading.capture.trace.capture``.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """This folder."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See ``lading.capture.trace.capture``."""
        from lading.capture.trace import capture

        return capture(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
