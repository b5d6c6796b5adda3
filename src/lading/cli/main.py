"""``lading``: parse the command line, run one command, turn Lading's errors into one line and an exit code.

0 done   1 an error inside Lading   2 bad input   3 no plan fits   4 a run broke its budget   130 Ctrl-C   143 SIGTERM
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Annotated

import tyro

from lading.cli.clusters import Validate
from lading.cli.commands import Command, Demo, Doctor, Export, Fit, Plan, Probe, Report, Simulate, Train
from lading.cli.placement import Place
from lading.errors import BudgetExceeded, CaptureError, ConfigError, LadingError, PlanInfeasible, StorageError

#: What a disk or a device says that takes no more.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)

AnyCommand = (
    Annotated[Fit, tyro.conf.subcommand("fit")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Simulate, tyro.conf.subcommand("simulate")]
    | Annotated[Place, tyro.conf.subcommand("place")]
    | Annotated[Validate, tyro.conf.subcommand("validate")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Probe, tyro.conf.subcommand("probe")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[Demo, tyro.conf.subcommand("demo")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. ``argv`` defaults to the process's arguments.

    Raises:
        SystemExit: after ``--help`` (0), or when the arguments cannot be parsed (2).
    """
    try:
        command = parse(argv)
        with _terminable():
            command.run()
        sys.stdout.flush()
    except LadingError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    except BrokenPipeError:
        _stop_printing()
        return 141
    except OSError as error:
        if error.filename is None and error.errno not in _FULL:  # not about a file that the user could mend
            raise
        if error.filename is None:  # what the command prints into
            print(f"error: cannot write the output: {error.strerror}; free some space", file=sys.stderr)
            _stop_printing()
        else:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _stop_printing() -> None:
    """Drop what is still to be printed: nobody takes it, and Python would try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _terminable() -> Generator[None, None, None]:
    """Let SIGTERM unwind like Ctrl-C, so that files and threads are closed before the process ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except SystemExit as stop:
        if stop.code == 143:
            print("terminated", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def parse(argv: Sequence[str] | None = None) -> Command:
    """The command that the arguments ask for.

    Raises:
        SystemExit: after ``--help`` (0), or when the arguments cannot be parsed (2).
    """
    return tyro.cli(
        AnyCommand,  # pyright: ignore[reportArgumentType]
        prog="lading",
        description="Plans, simulates and runs training steps inside a memory budget.",
        args=None if argv is None else list(argv),
    )


def exit_code(error: LadingError) -> int:
    """What the process returns for an error."""
    if isinstance(error, PlanInfeasible):
        return 3
    if isinstance(error, BudgetExceeded):
        return 4
    return 2 if isinstance(error, ConfigError | CaptureError | StorageError) else 1


if __name__ == "__main__":
    sys.exit(main())
