"""``lading``: parse the command line, run one command, turn Lading's errors into one line and an exit code.

0 done   1 an error inside Lading   2 bad input   3 no plan fits   4 a run broke its budget   130 Ctrl-C
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from lading.cli.commands import Command, Demo, Fit, Plan, Probe, Report, Simulate, Train
from lading.errors import BudgetExceeded, CaptureError, ConfigError, LadingError, PlanInfeasible, StorageError

AnyCommand = (
    Annotated[Fit, tyro.conf.subcommand("fit")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Simulate, tyro.conf.subcommand("simulate")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Probe, tyro.conf.subcommand("probe")]
    | Annotated[Demo, tyro.conf.subcommand("demo")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. ``argv`` defaults to the process's arguments.

    Raises:
        SystemExit: after ``--help`` (0), or when the arguments cannot be parsed (2).
    """
    try:
        parse(argv).run()
        sys.stdout.flush()
    except LadingError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.filename is None:  # not about a file that the user could mend
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


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
