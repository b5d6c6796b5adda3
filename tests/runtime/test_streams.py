"""Streams: who is woken by an announcement, and that nobody is left waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from lading.runtime.streams import Gate, Stopped

_SHORT_S, _LONG_S = 0.05, 20.0


@pytest.fixture
def gate() -> Gate:
    return Gate(3)


def test_who_waits_for_several_streams_goes_on_once_all_have_come(gate: Gate) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gate.wait, ((0, 2), (1, 1)))
        for stream, count in ((0, 1), (1, 1)):
            gate.announce(stream, count)
            assert not _ends(waiting.result)
        gate.announce(0, 2)
        assert _ends(waiting.result, _LONG_S)


def test_an_announcement_wakes_whom_it_reaches_and_a_failure_all(gate: Gate) -> None:
    with ThreadPoolExecutor(3) as pool:
        near, far, other = (pool.submit(gate.wait, (wait,)) for wait in ((0, 1), (0, 3), (2, 1)))
        gate.announce(0, 1)
        assert _ends(near.result, _LONG_S)
        assert not _ends(far.result)
        gate.fail(OSError("disk full"))
        for stopped in (far, other):
            with pytest.raises(Stopped):
                stopped.result(_LONG_S)
        with pytest.raises(Stopped):
            gate.wait(((0, 1),))


def test_no_announcement_is_missed_by_streams_that_wait_in_turns(gate: Gate) -> None:
    rounds = 2000

    def turn(stream: int) -> None:
        for count in range(1, rounds + 1):
            gate.wait((((stream - 1) % 3, count if stream else count - 1),))
            gate.announce(stream, count)

    threads = [threading.Thread(target=turn, args=(stream,), daemon=True) for stream in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LONG_S)
    assert gate.counts == [rounds] * 3


def _ends(result: Callable[[float], None], seconds: float = _SHORT_S) -> bool:
    """Whether ``Future.result`` returns within so long."""
    try:
        result(seconds)
    except TimeoutError:
        return False
    return True
