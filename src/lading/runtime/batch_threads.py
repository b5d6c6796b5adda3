"""Batch threads: threads of a library that wait for a processor instead of interrupting what runs there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def batch_threads() -> Iterator[None]:
    """Let the system schedule threads that are started within as batch work (SCHED_BATCH of Linux; else as they are).

    A thread that wakes may otherwise interrupt the one that runs. gloo has several threads a process that wake each
    other within a collective: so interrupted, a quarter of small collectives between two processes of one host took
    the 4 ms of a scheduler's turn longer (benchmarks/ranks/wakeups.py).
    """
    policy = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else -1
    if policy != getattr(os, "SCHED_OTHER", None):  # another system, or whoever started the process chose one
        yield
        return
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except PermissionError:  # a sandbox that allows no choice: collectives are slower, and nothing else
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, os.sched_param(0))
