"""Settings of every test: the same examples in every run, however slow the machine."""

from __future__ import annotations

import signal

from hypothesis import settings

settings.register_profile("lading", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("lading")

# A background shell ignores Ctrl-C for the tests and all they start; the tests of Ctrl-C need it back.
signal.signal(signal.SIGINT, signal.default_int_handler)
