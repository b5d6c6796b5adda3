"""What a search for a plan tells: shares that never fall, and words for what is done."""

from __future__ import annotations

from tests.planner.steps import bytes_machine, tiny

from lading.ir.reporting import Silent
from lading.planner.api import make_plan


class Heard(Silent):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.shares: list[float] = []
        self.words: list[str] = []

    def update(self, share: float, doing: str) -> None:
        self.shares.append(share)
        self.words.append(doing)


def test_a_search_moves_on_and_says_what_it_does() -> None:
    heard = Heard()
    make_plan(tiny(0, 4).graph, bytes_machine(), budget="80%", progress=heard)
    assert heard.shares == sorted(heard.shares)
    assert 0 <= heard.shares[0] < heard.shares[-1] < 1
    assert len(set(heard.shares)) > 10
    assert any("updates deferred" in text for text in heard.words)
    assert any("the fastest takes" in text for text in heard.words)
