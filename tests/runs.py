"""A tiny run as files, and the command line in a process of its own that starts at once."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lading.catalog.load import save_machine
from lading.cli.main import main
from lading.ir.plan import Plan
from lading.ir.program import Program
from lading.permissions import Permissions, granting
from lading.planner import residency, single_changes
from lading.units import MiB
from tests.machines import small_machine

#: New objects among which garbage is looked for, in tests and the processes that they start; 700 as Python comes.
YOUNG_OBJECTS = 10_000
#: What a small process grows by, generously: no run here breaks its budget unless a test makes it.
OVERHEAD_BYTES = 48 * MiB

RUN = """
machine = "{root}/machine.toml"
threads = 1
seed = 3
out = "{root}/out"
model = {{ name = "gpt", sizes = {{ dim = 64, num_layers = 1, num_heads = 2, dropout = 0.1 }} }}
data = {{ sequence_length = 32, batch_size = 2, source = "{root}/text" }}
optimization = {{ steps = 40, clip_norm = 1.0, schedule = "cosine", warmup_steps = 4 }}
memory = {{ budget = "99%" }}  # of which the process is most: about two thirds of what the tensors would take
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


def saved_plan(made: Plan, out: Path, **changes: Any) -> Path:
    """The plan for the run in ``out``, as a file; ``changes`` are of its optimization or, by name, its checkpoint."""
    run = json.loads(json.dumps(made.request.run))
    run["out"] = str(out)
    for key, value in changes.items():
        run["checkpoint" if key in run["checkpoint"] else "optimization"][key] = value
    path = out.parent / f"{out.name}.json"
    made.of_run(run).save(path)
    return path


def start(log: Path, *argv: str) -> BaseProcess:
    """``lading ARGV...`` in a new process, forked from one that has imported torch; its output goes to ``log``."""
    return _started(log, _command, argv)


def start_script(log: Path, path: Path) -> BaseProcess:
    """``python PATH`` in the folder of ``log``, in such a process."""
    return _started(log, _script, path)


def _started(log: Path, function: Callable[..., None], argument: object) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=function, args=(log, argument), daemon=True)
    process.start()
    return process


def _command(log: Path, argv: tuple[str, ...]) -> None:
    set_up(log)
    shorten_search(setattr)
    with granting(Permissions(folders=(Path(tempfile.gettempdir()).resolve(),))):  # as tests/conftest.py
        sys.exit(main(argv))


def _script(log: Path, path: Path) -> None:
    set_up(log)
    os.chdir(log.parent)
    sys.path.insert(0, str(path.parent))  # as `python PATH` has it
    runpy.run_path(str(path), run_name="__main__")


def shorten_search(patch: Callable[[object, str, object], None]) -> None:
    """Take the first plan of at most twice the least time, and do not change it choice by choice."""
    patch(single_changes, "_WORK", 0)
    patch(residency, "GOOD_ENOUGH", 1.0)


def set_up(log: Path) -> None:
    """Set a process up as tests/conftest.py does theirs, and write its output to ``log``."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup would have had ignored
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    single_changes._WORK = 0
    os.environ["COLUMNS"] = "500"  # what this is forked from may be older than the test
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


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


def failing(function: Callable[..., Any], calls: int, code: int, file: str = "") -> Callable[..., Any]:
    """``function``, whose call number ``calls`` and all later ones fail.

    Args:
        file: Only calls are counted whose first argument is a descriptor of a file of this name; "" counts all.
    """
    count = 0

    def call(*args: Any) -> Any:
        nonlocal count
        if file and not os.readlink(f"/proc/self/fd/{args[0]}").endswith(f"/{file}"):
            return function(*args)
        count += 1
        if count >= calls:
            raise OSError(code, os.strerror(code))
        return function(*args)

    return call
