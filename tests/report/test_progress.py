"""Progress: plain lines where nothing can be redrawn, a bar on a terminal."""

from __future__ import annotations

import io
import re

import pytest

from lading.errors import ConfigError
from lading.report.progress import clock_text, memory_text, planning_progress, training_progress
from lading.units import GiB, MiB


class Stream(io.StringIO):
    """Text that counts flushes and may claim to be a terminal."""

    def __init__(self, terminal: bool = False) -> None:
        super().__init__()
        self.terminal = terminal
        self.flushes = 0

    def isatty(self) -> bool:
        return self.terminal

    def flush(self) -> None:
        self.flushes += 1


class Clock:
    """Seconds set by the test."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def train(stream: Stream, steps: int, seconds: float, first_step: int = 0) -> list[str]:
    clock = Clock()
    with training_progress(steps, 400 * MiB, stream, first_step=first_step, every_s=5.0, clock=clock) as progress:
        for step in range(first_step + 1, steps + 1):
            clock.now += seconds
            progress.update(step=step, loss=5.0 - step / 100, tokens_per_s=2048.0, memory_bytes=312 * MiB)
    return stream.getvalue().splitlines()


def test_lines_come_every_few_seconds_and_at_both_ends() -> None:
    stream = Stream()
    lines = train(stream, steps=21, seconds=1.0)
    assert [line.split()[1] for line in lines] == ["1/21", "6/21", "11/21", "16/21", "21/21"]
    assert lines[0] == "step 1/21  loss 4.9900  2,048 tokens/s  memory 312/400 MiB 78%  20s left"
    assert lines[-1].endswith("done in 21s")
    assert stream.flushes >= len(lines)
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_a_resumed_run_estimates_from_its_own_steps() -> None:
    lines = train(Stream(), steps=100, seconds=2.0, first_step=90)
    assert lines[0].startswith("step 91/100 ")
    assert lines[0].endswith("18s left")


def test_slow_steps_each_get_a_line() -> None:
    assert len(train(Stream(), steps=4, seconds=60.0)) == 4


def test_a_terminal_gets_a_bar_that_ends_when_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Stream(terminal=True)

    def fail() -> None:
        with training_progress(10, 400 * MiB, stream) as progress:
            progress.update(step=3, loss=2.5, tokens_per_s=1000.0, memory_bytes=399 * MiB)
            progress.note("[not markup]")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "3/10" in plain
    assert "loss 2.5000  1,000 tok/s  399/400 MiB 99%" in plain
    assert "[not markup]" in plain
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l"), "the cursor is shown again"


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert len(train(Stream(terminal=True), steps=2, seconds=60.0)) == 2


def test_memory_is_never_rounded_to_a_full_budget() -> None:
    assert memory_text(312 * MiB, 400 * MiB) == "312/400 MiB 78%"
    assert memory_text(400 * MiB, 400 * MiB).endswith(" 100%")
    assert memory_text(400 * MiB + 1, 400 * MiB).endswith(" 101%")
    assert memory_text(400 * MiB - 1, 400 * MiB).endswith(" 99%")
    assert memory_text(3 * GiB, 8 * GiB) == "3.00/8.00 GiB 37%"


def test_clock_text() -> None:
    assert [clock_text(s) for s in (0.4, 59.4, 59.6, 185, 7440)] == ["0s", "59s", "1m00s", "3m05s", "2h04m"]


@pytest.mark.parametrize(("steps", "budget", "first"), [(0, 1, 0), (1, -1, 0), (1, 1, 2), (1, 1, -1)])
def test_counts_out_of_range(steps: int, budget: int, first: int) -> None:
    with pytest.raises(ConfigError, match="expected total_steps"), training_progress(steps, budget, first_step=first):
        pass


def test_a_search_for_a_plan_says_what_it_does_in_plain_lines() -> None:
    out, clock = Stream(), Clock()
    with planning_progress(out, every_s=2.0, clock=clock) as progress:
        for second, share in enumerate((0.0, 0.2, 0.25, 0.4, 0.999)):
            clock.now = 100.0 + second
            progress.update(share, f"plan {second}")
        clock.now = 105.0
    lines = ["planning, 25% after 2s: plan 2", "planning, 99% after 4s: plan 4", "planned in 5s"]
    assert out.getvalue().splitlines() == lines


def test_a_quick_search_says_nothing_but_its_notes() -> None:
    out, clock = Stream(), Clock()
    with planning_progress(out, after_s=3.0, clock=clock) as progress:
        clock.now = 102.5
        progress.update(0.5, "plan 1")
        progress.note("from the cache")
    assert out.getvalue() == "from the cache\n"


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, clock = Stream(terminal=True), Clock()
    with planning_progress(out, after_s=2.0, clock=clock) as progress:
        progress.update(0.1, "too early [to show]")
        clock.now = 102.0
        progress.update(0.42, "a first plan [of 3]")
        progress.note("a note")
    assert "too early" not in out.getvalue()
    assert "a first plan [of 3]" in out.getvalue()
    assert "42%" in out.getvalue()
    assert "a note" in out.getvalue()


@pytest.mark.parametrize("columns", [60, 80])
def test_a_narrow_terminal_cuts_the_words_of_planning_and_not_its_figures(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Stream(terminal=True)
    with planning_progress(stream) as progress:
        progress.update(0.36, "plan 4 of 19, the fastest takes 13.4 ms (11 updates deferred to the next step)")
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert re.search(r"planning \S+  36% 0:00:00 plan 4 of 19, \S+", plain)
