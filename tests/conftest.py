"""Settings of every test: the same examples in every run, however slow the machine."""

from __future__ import annotations

import settings
from hypothesis import signal

settings.register_profile("lading", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("lading")

# A shell that runs the tests in the background ignores Ctrl-C for them and all they start; the tests of it need it back.
signal.signal(signal.SIGINT, signal.default_int_handler)
