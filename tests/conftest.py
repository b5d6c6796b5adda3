"""Settings of every test: the same examples in every run, however slow the machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("lading", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("lading")
