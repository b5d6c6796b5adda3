"""A process of its own for code that may never end, or end its process: watched, limited, killed with all it began."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from lading.errors import ConfigError

#: Seconds that a process gets to end by itself once it has answered.
_TO_END_S = 5.0
#: What a process sends: a stage's line, the result, and why there is none.
_SAID, _MADE, _REFUSED = "said", "made", "refused"


def supervised(
    call: Callable[..., Any], *given: Any, limit_s: float, what: str, advice: str, said: Callable[[str], None]
) -> Any:
    """Call a function in a fresh process, which is killed with all that it started when it is done or too slow.

    Its temporary files are in a folder that is deleted then.

    Args:
        call: Called as ``call(*given, progress=...)``; it, ``given`` and what it returns can be pickled.
        limit_s: Seconds that it may take, starting included.
        what: Name of what is run, for errors.
        advice: What to change where it took longer.
        said: Called with each line of progress.
    Raises:
        ConfigError: the function raised it, took longer, or the process ended without a result.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="lading-") as folder:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(theirs, folder, call, given))
        process.start()
        theirs.close()
        try:
            return _result(ours, process, limit_s, what, advice, said)
        finally:
            _end(process)


def _answer(pipe: Connection, folder: str, call: Callable[..., Any], given: tuple[Any, ...]) -> None:
    os.setsid()  # all that it starts is of one session, and a signal from the terminal goes to the one who watches
    tempfile.tempdir = folder
    try:
        result = call(*given, progress=partial(_say, pipe))
    except ConfigError as error:
        pipe.send((_REFUSED, str(error)))
    else:
        pipe.send((_MADE, result))


def _say(pipe: Connection, line: str) -> None:
    pipe.send((_SAID, line))


def _result(
    pipe: Connection, process: BaseProcess, limit_s: float, what: str, advice: str, said: Callable[[str], None]
) -> Any:
    """Wait for what the process answers."""
    end, last = time.monotonic() + limit_s, "its first lines"
    while True:
        if not wait([pipe, process.sentinel], max(0.0, end - time.monotonic())):
            raise ConfigError(f"{what}: expected an end within {limit_s:g} s, it still runs, after: {last}; {advice}")
        kind, answer = _received(pipe)
        if kind == _MADE:
            return answer
        if kind == _REFUSED:
            raise ConfigError(answer)
        if kind == _SAID:
            last = answer
            said(answer)
            continue
        process.join(_TO_END_S)
        raise ConfigError(
            f"{what}: expected a result, but the process that ran it ended ({_how(process.exitcode)}), after: {last}; "
            "leave out what ends it (os._exit, exit, a signal, memory that the host has not)"
        )


def _received(pipe: Connection) -> tuple[str, Any]:
    """Read what the process sent; "" where it is gone and left nothing."""
    try:
        return pipe.recv() if pipe.poll() else ("", None)
    except EOFError:
        return "", None


def _how(code: int | None) -> str:
    if code is None:
        return "its pipe is closed"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _end(process: BaseProcess) -> None:
    """Kill a process and what it started."""
    assert process.pid is not None
    with suppress(ProcessLookupError):  # all have ended, or it has not begun
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
