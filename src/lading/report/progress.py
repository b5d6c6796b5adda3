"""Progress of a training run, and of the search for its plan: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from math import ceil, floor
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TextIO

from lading.errors import ConfigError
from lading.ir.reporting import PlanProgress
from lading.units import GiB, KiB, MiB, format_bytes

if TYPE_CHECKING:
    import rich.progress
    from rich.console import Console

#: A budget this full is shown in yellow.
NEARLY_FULL = 0.95
NO_LOSSES: Mapping[str, float] = MappingProxyType({})


class Progress(Protocol):
    """Receiver of what a training loop tells about itself."""

    def update(
        self, *, step: int, loss: float, tokens_per_s: float, memory_bytes: int, losses: Mapping[str, float] = NO_LOSSES
    ) -> None:
        """Show the state after ``step`` steps are done; ``losses`` are what ``loss`` is the sum of, by name."""
        ...

    def note(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        ...


@contextmanager
def planning_progress(
    stream: TextIO | None = None,
    *,
    after_s: float = 0.0,
    every_s: float = 2.0,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[PlanProgress, None, None]:
    """Show the search for a plan for as long as the ``with`` block runs; a quick one shows nothing but its notes.

    Args:
        stream: Where to write; None is standard error. A terminal gets a bar, anything else plain lines.
        after_s: Seconds before anything is shown.
        every_s: Least seconds between two plain lines, and before the first.
        clock: Seconds, for tests.
    """
    out: TextIO = sys.stderr if stream is None else stream
    console = _terminal(out)
    shown = (
        _PlanLines(out, max(after_s, every_s), every_s, clock) if console is None else _PlanBar(console, after_s, clock)
    )
    try:
        yield shown
    finally:
        shown.close()


@contextmanager
def training_progress(
    total_steps: int,
    budget_bytes: int,
    stream: TextIO | None = None,
    *,
    first_step: int = 0,
    every_s: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[Progress, None, None]:
    """Show progress for as long as the ``with`` block runs.

    Args:
        total_steps: Steps of the whole run, >= 1.
        budget_bytes: Device budget that memory is shown against; 0 for a run without one.
        stream: Where to write; None is standard error. A terminal gets a bar, anything else plain lines.
        first_step: Steps already done when the run resumes.
        every_s: Least seconds between two plain lines; the first and the last step always get one.
        clock: Seconds, for tests.
    Raises:
        ConfigError: a count out of range.
    """
    if total_steps < 1 or budget_bytes < 0 or not 0 <= first_step <= total_steps:
        raise ConfigError(
            "expected total_steps >= 1, budget_bytes >= 0 and 0 <= first_step <= total_steps, "
            f"got {total_steps}, {budget_bytes} and {first_step}"
        )
    out: TextIO = sys.stderr if stream is None else stream
    console = _terminal(out)
    if console is None:
        yield _Lines(total_steps, budget_bytes, out, first_step, every_s, clock)
        return
    bar = _Bar(total_steps, budget_bytes, console, first_step)
    with bar.live:
        yield bar


def memory_text(memory_bytes: int, budget_bytes: int) -> str:
    """Write memory and budget in the budget's unit, as ``'312/400 MiB 78%'``; the share is rounded away from 100%."""
    if budget_bytes == 0:
        return format_bytes(memory_bytes)
    unit, scale = next((u for u in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)) if budget_bytes >= u[1]), ("B", 1))
    used, budget = memory_bytes / scale, budget_bytes / scale
    digits = 0 if budget >= 100 or scale == 1 else 2
    over = memory_bytes > budget_bytes
    percent = (ceil if over else floor)(memory_bytes / budget_bytes * 100)
    return f"{used:.{digits}f}/{budget:.{digits}f} {unit} {percent}%"


def losses_text(losses: Mapping[str, float]) -> str:
    """Write the parts of a loss, as ``' (text 2.3100, balance 0.0123)'``; nothing where there is one only."""
    return f" ({', '.join(f'{name} {value:.4f}' for name, value in losses.items())})" if losses else ""


def clock_text(seconds: float) -> str:
    """Write seconds as ``'12s'``, ``'3m05s'`` or ``'2h04m'``."""
    rounded_s = round(seconds)
    if rounded_s < 60:
        return f"{rounded_s}s"
    if rounded_s < 3600:
        return f"{rounded_s // 60}m{rounded_s % 60:02d}s"
    return f"{rounded_s // 3600}h{rounded_s % 3600 // 60:02d}m"


def _terminal(stream: TextIO) -> Console | None:
    """Make a console if the stream is a terminal that can redraw a line."""
    if not stream.isatty():
        return None
    from rich.console import Console

    console = Console(file=stream)
    return None if console.is_dumb_terminal else console


class _Lines:
    """Progress as one line every few seconds, flushed."""

    def __init__(
        self, total_steps: int, budget_bytes: int, stream: TextIO, first_step: int, every_s: float,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._total, self._budget, self._stream = total_steps, budget_bytes, stream
        self._first, self._every_s, self._clock = first_step, every_s, clock
        self._start_s = clock()
        self._last_s: float | None = None

    def update(
        self, *, step: int, loss: float, tokens_per_s: float, memory_bytes: int, losses: Mapping[str, float] = NO_LOSSES
    ) -> None:
        now_s = self._clock()
        if self._last_s is not None and now_s - self._last_s < self._every_s and step < self._total:
            return
        self._last_s = now_s
        elapsed, num_done = now_s - self._start_s, step - self._first
        remaining_text = (
            f"{clock_text(elapsed / num_done * (self._total - step))} left" if num_done > 0 else "time left unknown"
        )
        ending = f"done in {clock_text(elapsed)}" if step >= self._total else remaining_text
        self.note(
            f"step {step}/{self._total}  loss {loss:.4f}{losses_text(losses)}  {tokens_per_s:,.0f} tokens/s  "
            f"memory {memory_text(memory_bytes, self._budget)}  {ending}"
        )

    def note(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class _Bar:
    """Progress as a rich bar; ``live`` is what to enter while it is shown."""

    def __init__(self, total_steps: int, budget_bytes: int, console: Console, first_step: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._budget = budget_bytes
        self.live: rich.progress.Progress = RichProgress(
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
        )
        self._task = self.live.add_task("train", total=total_steps, completed=first_step, figures="")

    def update(
        self, *, step: int, loss: float, tokens_per_s: float, memory_bytes: int, losses: Mapping[str, float] = NO_LOSSES
    ) -> None:
        share = memory_bytes / self._budget if self._budget else 0.0
        colour = "red" if share > 1 else "yellow" if share >= NEARLY_FULL else "green"
        terms = losses_text(losses).replace("[", r"\[")
        figures = (
            f"loss [bold]{loss:.4f}[/]{terms}  {tokens_per_s:,.0f} tok/s  "
            f"[{colour}]{memory_text(memory_bytes, self._budget)}[/]"
        )
        self.live.update(self._task, completed=step, figures=figures)

    def note(self, text: str) -> None:
        self.live.console.print(text, markup=False, highlight=False)


class _PlanLines:
    """Progress of planning as one line every few seconds, flushed, and one at the end if there were any."""

    def __init__(self, stream: TextIO, after_s: float, every_s: float, clock: Callable[[], float]) -> None:
        self._stream, self._every_s, self._clock = stream, every_s, clock
        self._start_s = clock()
        self._next_s, self._shown = self._start_s + after_s, False

    def update(self, share: float, doing: str) -> None:
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s, self._shown = now_s + self._every_s, True
            self.note(f"planning, {floor(100 * share)}% after {clock_text(now_s - self._start_s)}: {doing}")

    def note(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Say how long it took, where anything was shown."""
        if self._shown:
            self.note(f"planned in {clock_text(self._clock() - self._start_s)}")


class _PlanBar:
    """Progress of planning as a rich bar that goes away when the plan is there."""

    def __init__(self, console: Console, after_s: float, clock: Callable[[], float]) -> None:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        self._clock, self._from_s, self._started = clock, clock() + after_s, False
        columns = (
            TextColumn("planning", table_column=Column(min_width=8)),
            BarColumn(bar_width=10, table_column=Column(min_width=10)),
            TaskProgressColumn(table_column=Column(min_width=4)),
            TimeElapsedColumn(table_column=Column(min_width=7)),
            TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
        )  # a narrow terminal cuts the words, never the figures
        self._live: rich.progress.Progress = RichProgress(*columns, console=console, transient=True, expand=True)
        self._task = self._live.add_task("", total=1.0)

    def update(self, share: float, doing: str) -> None:
        self._live.update(self._task, completed=share, description=doing)
        if not self._started and self._clock() >= self._from_s:
            self._live.start()
            self._started = True

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._started:
            self._live.stop()
