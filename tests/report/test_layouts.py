"""Lines of layouts: they fit the width, share what all have, and their sentences add up."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lading.report.layout_table import LayoutRow, layout_figures, layouts_lines, loses_because

PEAKS = {"step": {"device": 60 << 30, "host": 2 << 30}}
FIRST = LayoutRow(
    layout="dp8,zero2,gb32",
    step_s=10.0,
    spread=0.1,
    interval=(math.exp(-0.1), math.exp(0.1)),
    bound_s=9.0,
    mfu=0.4,
    tokens_per_s_per_device=1234.5,
    shares_s={"products": 8.0, "tp communication": 1.0, "data-parallel communication": 1.0},
    peaks=PEAKS,
    binding=("step", "device", 0.9),
)


def row(layout: str, over: str = "", **shares: float) -> LayoutRow:
    causes = {**FIRST.shares_s, **{name.replace("_", " "): seconds for name, seconds in shares.items()}}
    return dataclasses.replace(FIRST, layout=layout, step_s=sum(causes.values()), shares_s=causes, over=over)


def test_causes_that_take_longer_are_named_until_nine_tenths() -> None:
    assert loses_because(FIRST, FIRST) == "fastest"
    slower = row("dp4,tp2", tp_communication=2.5, bubble=1.0, recomputing=0.1)
    assert loses_because(slower, FIRST) == "26.0% slower: tp communication +1.500 s, bubble +1.000 s (96% of what " + (
        "takes longer)"
    )
    less = row("dp2,tp4", tp_communication=3.0, products=7.0)
    assert loses_because(less, FIRST) == "10.0% slower: tp communication +2.000 s; products -1.000 s"
    assert loses_because(row("dp8,zero3"), FIRST) == "as fast; a tie goes to less memory, then by name"
    large = row("dp8", over="activation 2.00 GiB over", products=7.0)
    assert loses_because(large, FIRST) == "10.0% faster, but does not fit: activation 2.00 GiB over"


def test_layouts_are_told_apart_by_what_differs() -> None:
    """Half a second of bubble more is 50 ms of doubt; four of one cause for another are more than they differ by."""
    more = row("dp4,tp2", bubble=0.5)
    assert more.uncertain_s(FIRST) == pytest.approx(0.05)
    assert more.is_told_apart(FIRST)
    other = row("dp2,tp4", products=4.0, tp_communication=5.3)
    assert other.uncertain_s(FIRST) == pytest.approx(0.1 * (4.0**2 + 4.3**2) ** 0.5)
    assert not other.is_told_apart(FIRST)
    assert loses_because(other, FIRST).startswith("3.0% slower (within 5.9% not told apart): tp communication +4.300 s")
    figures = layout_figures(other, FIRST)
    assert (figures["low_s"], figures["high_s"], figures["told_apart"]) == (
        pytest.approx(10.3 * math.exp(-0.1)),
        pytest.approx(10.3 * math.exp(0.1)),
        False,
    )


@pytest.mark.parametrize("width", [80, 100, 200])
def test_lines_fit_and_say_once_what_all_have(width: int) -> None:
    long = "dp4,tp2,zero2,gb32,recompute=full,recompute_layers=12,offload=optimizer,interleaved,cp_comm=all_gather"
    rows = [FIRST, *(row(long, tp_communication=2.0, bubble=1.0) for _ in range(11))]
    rows.append(row("dp1,zero2,gb32", over="activation 2.00 GiB over"))
    rows = [dataclasses.replace(each, price_per_billion_tokens=123456.0) for each in rows]
    lines = layouts_lines(rows[:-1], rows[-1:], width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert lines[0] == "Layouts, the fastest first; all have zero2,gb32"
    assert text.count("zero2") == text.count("gb32") == 1
    assert "…" not in text
    assert text.count("60.00 GiB") == 13
    assert "12 12.000 s" in text.replace("\n", " ")
