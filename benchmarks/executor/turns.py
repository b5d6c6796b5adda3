"""Processes that take steps in turn, and what their times say."""

from __future__ import annotations

import multiprocessing
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb
from multiprocessing.connection import Connection
from typing import Any

from sides import Side, serve

_TIMEOUT_S = 400
Interval = tuple[float, float, float]


@dataclass
class Running:
    """A side in its process, with what its steps took."""

    side: Side
    process: Any
    connection: Connection
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def receive(self) -> dict[str, Any] | None:
        """Next message of the side; None if it has died or takes too long."""
        try:
            if self.connection.poll(_TIMEOUT_S):
                return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(10)  # it has died
        return None

    def end(self) -> str:
        """End the process; says how it ended."""
        late = self.process.is_alive()
        self.process.kill()
        self.process.join()
        if late:
            return f"no answer in {_TIMEOUT_S} s"
        killed = self.process.exitcode == -signal.SIGKILL
        return "killed: out of memory" if killed else f"died with exit code {self.process.exitcode}"

    def step(self, number: int) -> dict[str, Any] | None:
        """One step with the batch of that number; None if it does not come back."""
        self.connection.send(number)
        return self.receive()


def start(sides: dict[str, Side]) -> tuple[dict[str, Running], dict[str, str]]:
    """Every side in a process of its own; those that cannot start, and why."""
    context = multiprocessing.get_context("spawn")
    running: dict[str, Running] = {}
    failed: dict[str, str] = {}
    for name, side in sides.items():
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(side, theirs), daemon=True)
        process.start()
        theirs.close()
        running[name] = Running(side, process, ours)
        facts = running[name].receive()
        if facts is None or "error" in facts:
            failed[name] = facts["error"] if facts else running[name].end()
            del running[name]
        else:
            running[name].facts = facts
    return running, failed


def interleave(
    running: dict[str, Running], failed: dict[str, str], *, warm_up: int, rounds: int, seconds: float
) -> None:
    """Steps in turn: the warm-up, then so many rounds, or as many as begin within ``seconds``, five at least."""
    started = time.perf_counter()
    for turn in range(warm_up + rounds):
        names = [*running]
        shift = turn % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            one, answer = running[name], running[name].step(turn)
            if answer is None:
                failed[name] = f"{one.end()} in step {turn}"
                del running[name]
                continue
            one.losses.append(answer["loss"])
            if turn >= warm_up:
                one.seconds.append(answer["seconds"])
                one.cpu.append(answer["cpu"])
        if turn + 1 == warm_up:
            started = time.perf_counter()
        if turn >= warm_up + 4 and time.perf_counter() - started > seconds:
            return


def finish(running: dict[str, Running]) -> None:
    """End every side; its facts get the memory it took."""
    for one in running.values():
        one.connection.send(None)
        one.facts |= one.receive() or {}
        one.process.join()


def interval(values: Sequence[float]) -> Interval:
    """(median, low, high): an interval that holds the true median with 95% by order statistics."""
    ordered, n = sorted(values), len(values)
    tail, low = 0.0, 0
    while low < n // 2 and (tail := tail + comb(n, low) / 2**n) <= 0.025:
        low += 1
    low = max(0, low - 1)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def against(one: Sequence[float], other: Sequence[float]) -> Interval:
    """Interval of the ratio of two sides, round by round."""
    return interval([a / b for a, b in zip(one, other, strict=False)])
