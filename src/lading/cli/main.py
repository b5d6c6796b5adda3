"""``lading``: parse the command line, run one command, turn Lading's errors into one line and an exit code.

0 done   1 an error inside Lading   2 bad input   3 no plan fits   4 a run broke its budget
129 SIGHUP, as of a terminal that is gone   130 Ctrl-C   143 SIGTERM
"""

from __future__ import annotations

import dataclasses
import errno
import inspect
import os
import platform
import re
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from io import StringIO
from typing import TextIO, get_type_hints

import tyro

from lading import __version__
from lading.cli.checkpoint_command import CheckpointCommand
from lading.cli.demo_command import DemoCommand
from lading.cli.doctor_command import DoctorCommand
from lading.cli.export_command import ExportCommand
from lading.cli.fit_command import FitCommand
from lading.cli.import_command import ImportCommand
from lading.cli.options import Command
from lading.cli.place_command import PlaceCommand
from lading.cli.plan_command import PlanCommand
from lading.cli.probe_command import ProbeCommand
from lading.cli.report_command import ReportCommand
from lading.cli.simulate_command import SimulateCommand
from lading.cli.software_command import SoftwareCommand
from lading.cli.train_command import TrainCommand
from lading.errors import (
    BudgetExceeded,
    CaptureError,
    ConfigError,
    LadingError,
    PlanInfeasible,
    StorageError,
    did_you_mean,
)
from lading.permissions import granting, permissions_of
from lading.report.lines import fitted

#: What a disk or a device says that takes no more.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
#: What torch says where the system refuses memory, in a RuntimeError.
_NO_MEMORY = "can't allocate memory"
_HEAD = """usage: lading COMMAND [arguments]

Plan, simulate and run training steps inside a memory budget.
Begin with: lading demo
"""
_TAIL = """lading COMMAND --help   explains a command and its options
lading --version        prints the version

exit codes: 0 done, 1 an error inside Lading, 2 what was asked is wrong,
            3 no plan fits, 4 a run broke its budget, 130 Ctrl-C"""
#: A setting of a run, such as "optimization.steps=20".
_SETTING = re.compile(r"[a-z_]+(\.[a-z_]+)*=")
#: Columns of a command's name in the help.
_NAMED = 12
_COMMANDS: dict[str, type[Command]] = {
    "fit": FitCommand,
    "plan": PlanCommand,
    "simulate": SimulateCommand,
    "place": PlaceCommand,
    "train": TrainCommand,
    "report": ReportCommand,
    "export": ExportCommand,
    "checkpoint": CheckpointCommand,
    "import": ImportCommand,
    "software": SoftwareCommand,
    "probe": ProbeCommand,
    "doctor": DoctorCommand,
    "demo": DemoCommand,
}
#: Commands that all ranks of a job run together.
_OF_JOBS = (PlanCommand, TrainCommand, ImportCommand, ProbeCommand)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. ``argv`` defaults to the process's arguments.

    Raises:
        SystemExit: after ``--help`` (0), or when the arguments cannot be parsed (2).
    """
    try:
        return _main(argv)
    except BrokenPipeError:  # who reads what is printed has gone, as ``head`` does
        pass
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):  # which rich turns into an exit
            raise
    _stop_printing(sys.stdout, sys.stderr)
    return 141


def _main(argv: Sequence[str] | None) -> int:
    try:
        command = parse(argv)
        _check_ranks(command)
        with _terminable(), granting(permissions_of(command)):
            command.run()
        sys.stdout.flush()
    except LadingError as error:
        _say_error(error)
        return exit_code(error)
    except BrokenPipeError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and _NO_MEMORY not in str(error):
            raise
        message = str(error).strip().partition("\n")[0] or "an allocation failed"
        _say_error(f"the process was refused memory: {message}; raise its limit (ulimit -v, or the container's)")
        return 2
    except OSError as error:
        if error.filename is None and error.errno not in _FULL:  # not about a file that the user could mend
            raise
        if error.filename is None:  # what the command prints into
            _say_error(f"cannot write the output: {error.strerror}; free some space")
            _stop_printing(sys.stdout)
        else:
            _say_error(error)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _check_ranks(command: Command) -> None:
    """Refuse a command for one process that torchrun has started on several ranks.

    Raises:
        ConfigError: torchrun has started several for a command that knows nothing of ranks.
    """
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks == "1" or "TORCHELASTIC_RUN_ID" not in os.environ or isinstance(command, _OF_JOBS):
        return
    names = {kind: name for name, kind in _COMMANDS.items()}
    some = ", ".join(f"lading {names[kind]}" for kind in _OF_JOBS)
    raise ConfigError(
        f"lading {names[type(command)]} is done by one process, torchrun has started {ranks}; start it without "
        f"torchrun (ranks of a job run {some})"
    )


#: What is said of a command that a signal has ended, by its exit code.
_ENDED: dict[object, str] = {128 + signal.SIGTERM: "terminated", 128 + signal.SIGHUP: "hung up"}


def _stop_printing(*streams: TextIO) -> None:
    """Drop output that nobody reads any more; Python would try to print it again at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())


@contextmanager
def _terminable() -> Generator[None, None, None]:
    """Let SIGTERM and SIGHUP unwind like Ctrl-C, so that files and threads are closed before the process ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, _: object) -> None:
        for signal_number in before:
            signal.signal(signal_number, signal.SIG_IGN)  # once is enough
        raise SystemExit(128 + number)

    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    before = {n: handler for n, handler in before.items() if n == signal.SIGTERM or handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, terminate)
    try:
        yield
    except SystemExit as stop:
        if words := _ENDED.get(stop.code):
            print(words, file=sys.stderr)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def parse(argv: Sequence[str] | None = None) -> Command:
    """Parse the arguments into the command they ask for.

    Raises:
        SystemExit: after ``--help`` and ``--version`` (0), or when the arguments cannot be parsed (2).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name in _COMMANDS:
        asks_help = not {"-h", "--help"}.isdisjoint(arguments)
        with _fitted_output() if asks_help else nullcontext():
            return tyro.cli(
                _COMMANDS[name], prog=f"lading {name}", args=_join_overrides(_COMMANDS[name], arguments[1:])
            )
    if name in ("-h", "--help"):
        print(_help())
        raise SystemExit(0)
    if name == "--version":
        print(f"lading {__version__}")
        raise SystemExit(0)
    if not arguments:
        print(_help(), file=sys.stderr)
        raise SystemExit(2)
    hint = did_you_mean(name, _COMMANDS)
    print(fitted(f"error: expected a command, one of {', '.join(_COMMANDS)}, got {name!r}{hint}"), file=sys.stderr)
    raise SystemExit(2)


def _join_overrides(command: type[Command], arguments: list[str]) -> list[str]:
    """Gather the settings of a run in one place, as argparse takes them only on one side of a flag."""
    if "overrides" not in command.__annotations__:
        return arguments
    flags = _flags_of(command)
    takes_next = [
        argument.startswith("-") and "=" not in argument and argument not in flags for argument in ("", *arguments)
    ]
    pairs = zip(arguments, takes_next, strict=False)
    is_setting = [not is_value and _SETTING.match(argument) is not None for argument, is_value in pairs]
    if True not in is_setting:
        return arguments
    first = is_setting.index(True)
    settings = [argument for argument, is_set in zip(arguments, is_setting, strict=True) if is_set]
    others = [argument for argument, is_set in zip(arguments[first:], is_setting[first:], strict=True) if not is_set]
    return [*arguments[:first], *settings, *others]


def _flags_of(options: type) -> set[str]:
    """Options of a command that take no value, as they are written."""
    flags: set[str] = set()
    for name, kind in get_type_hints(options).items():
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            flags |= _flags_of(kind)
        elif kind is bool:
            flags.add(f"--{name.replace('_', '-')}")
    return flags


@contextmanager
def _fitted_output() -> Generator[None, None, None]:
    """Break lines that are printed wider than the terminal, such as tyro's of usage."""
    captured_output = StringIO()
    try:
        with redirect_stdout(captured_output):
            yield
    finally:
        print(fitted(captured_output.getvalue(), styled=True))


def _help() -> str:
    """Text that ``lading --help`` prints."""
    lines = [_HEAD, "", "commands:"]
    lines += [
        f"  {name:<{_NAMED}}{(inspect.getdoc(command) or '').splitlines()[0]}" for name, command in _COMMANDS.items()
    ]
    return "\n".join([*(fitted(line, hang=_NAMED) for line in lines), "", _TAIL])


def _say_error(error: Exception | str) -> None:
    ranks = os.environ.get("WORLD_SIZE", "1")
    place = f"on rank {os.environ.get('RANK', '?')} of {ranks} ({platform.node()}): " if ranks != "1" else ""
    for text in (f"error: {place}{error}", *getattr(error, "__notes__", ())):
        print(fitted(text), file=sys.stderr)


def exit_code(error: LadingError) -> int:
    """Exit code of the process for an error."""
    if isinstance(error, PlanInfeasible):
        return 3
    if isinstance(error, BudgetExceeded):
        return 4
    return 2 if isinstance(error, ConfigError | CaptureError | StorageError) else 1


if __name__ == "__main__":
    sys.exit(main())
