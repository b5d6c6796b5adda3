"""A tiny run as files, and the command line in a process of its own that starts at once."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lading.catalog.load import save_machine
from lading.cli.main import main
from lading.ir.program import Program
from lading.units import MiB
from tests.machines import small_machine

#: What a small process grows by, generously: no run here breaks its budget unless a test makes it.
OVERHEAD_BYTES = 48 * MiB

RUN = """
machine = "{root}/machine.toml"
threads = 1
seed = 3
out = "{root}/out"
model = {{ name = "gpt", sizes = {{ dim = 64, num_layers = 2, num_heads = 2, dropout = 0.1 }} }}
data = {{ sequence_length = 32, batch_size = 2, source = "{root}/text" }}
optimization = {{ steps = 40, clip_norm = 1.0, accumulation = 2, schedule = "cosine", warmup_steps = 4 }}
memory = {{ budget = "97%" }}  # of which the process is most: about half of what the tensors would take
checkpoint = {{ every_steps = 5 }}
"""


def write_run(root: Path) -> Path:
    """A run configuration in ``root``, with its machine and its text; returns the TOML file."""
    letters = random.Random(0)
    (root / "text").mkdir()
    for name in "abcd":
        text = "".join(letters.choice("etaoin shrdlu\n") for _ in range(4000))
        (root / "text" / f"{name}.txt").write_text(text)
    save_machine(small_machine(overhead_bytes=OVERHEAD_BYTES), root / "machine.toml")
    path = root / "run.toml"
    path.write_text(RUN.format(root=root))
    return path


def budget_for(everything: Program, share: float) -> int:
    """Bytes for the process and a share of the tensors of a program that keeps them all."""
    return everything.peak_bytes - int(everything.arena_bytes * (1 - share))


def start(log: Path, *argv: str) -> BaseProcess:
    """``lading ARGV...`` in a new process, forked from one that has imported torch; its output goes to ``log``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "lading.train", "lading.planner.api", "highspy"])
    process = context.Process(target=_command, args=(log, argv), daemon=True)
    process.start()
    return process


def _command(log: Path, argv: tuple[str, ...]) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.exit(main(argv))


def wait_until(done: Callable[[], bool], process: BaseProcess, *, timeout_s: float = 60) -> bool:
    """Poll until ``done`` or until the process has ended; whether it was done."""
    end = time.monotonic() + timeout_s
    while not done():
        if not process.is_alive():
            return done()
        assert time.monotonic() < end, "timed out"
        time.sleep(1e-3)
    return True


def num_lines(path: Path) -> int:
    """Whole lines of a file; 0 if there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def failing(function: Callable[..., Any], calls: int, code: int) -> Callable[..., Any]:
    """``function``, whose call number ``calls`` and all later ones fail."""
    count = 0

    def call(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count >= calls:
            raise OSError(code, os.strerror(code))
        return function(*args)

    return call
