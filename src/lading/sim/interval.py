"""Interval of a predicted step: the range that holds nine of ten measured steps, given how well the step is known.

[Note: interval]
Errors multiply, so the interval is formed in logarithms: from ``step_s / exp(h)`` to ``step_s * exp(h)``. Software of
which nothing is known is slower than the defaults of its class more often than it is faster, as not all of it was
tuned: there it is from ``step_s / exp(0.6 h)`` to ``step_s * exp(1.9 h)``. The square of h is a sum of what may be
wrong independently:

- the software: fitted (steps of it on the architecture were seen), a named set of switches of which no step was seen
  there, or the defaults of its class;
- the machine: kernels measured by shape, or rates of a data sheet;
- uncertain causes, each by its share of the step: what the host launches, transfers, memory-bound operations (which are
  fused?), attention (whose kernel?), copies to the host and updates there. A share s of a cause that takes exp(w) times
  as long makes a step 1 + s (exp(w) - 1) times as long. Of fitted software most of that is known;
- of software that is not known, models of few columns: their kernels are short, and what lies between kernels counts;
- words of a source that were not understood, and what it does not say.

Where something that is not said was simulated both ways (a micro-batch), the interval is that of both: it reaches as
much further as the other step is longer, or shorter (``StepRequest.otherwise``).

A source of which no row was ever compared with a prediction may mean other things by its words than was understood, so
of known software too half of its steps lay outside of intervals made as above. There the interval reaches further, by
what holds nine of ten of 347 steps of 64 sources as they were predicted before anything was changed for them
(``benchmarks/validation/first_reading.py``).

Updates on the host err as often one way as the other, so there the interval reaches as far down as up.

A board at a limit of power that is not its own is slower, never faster: products go at what is computed of a joule
(``lading.cost.product``), and boards may be limited to half of their power or less. So there the interval reaches
further up alone, as far as half of the power takes it.

The constants are those that hold nine of ten steps of software that was left out of everything (``python -m
tools.validate --left-out``): by maximum likelihood of Student's t on these errors, all of one source counted as one
row, then times one factor, so that nine of ten lie in the interval. Updates on the host vary by 2.2, as published
launches reach 5 to 22% of what the memory allows. How far intervals of software that is not known reach, its own part,
and what few columns and a data sheet add, hold 85 to 95% of 264 published steps of 47 sources that the classes were not
made from (``benchmarks/validation``, November 2026), each source counted once, and of frameworks left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, hypot, log, sqrt

from lading.ir.stack import FITTED, GUESSED, SWITCHES

#: Half width, in logarithms, by how the software is known, and of a machine that only a data sheet tells of.
_SOFTWARE = {FITTED: 0.1, SWITCHES: 0.11, GUESSED: 0.13}
DATA_SHEET = 0.2
#: Columns of a model up to which kernels of software that is not known are short, and what that adds.
_FEW_COLUMNS, _SHORT_KERNELS = 1024, 0.165
_ON_HOST = "updates on the host"
#: Half width that a step of one cause alone would have, by words of the cause; the first that fits counts.
_CAUSES = {
    "launches": 0.65,
    "waiting in blocks": 0.43,
    "copies": 0.5,
    _ON_HOST: log(2.2),
    "host": 0.43,
    "communication": 0.5,
    "attention": 0.28,
    "memory-bound": 0.24,
}
#: Share of a cause's uncertainty that is left, by how the software is known.
_LEFT = {FITTED: 0.3, SWITCHES: 0.7, GUESSED: 1.0}
#: How far an interval reaches below and above, in half widths, where these are not the same: as of published steps of
#: software that was in no table, most took longer than predicted (``benchmarks/validation``, November 2026).
_SIDES = {GUESSED: (0.6, 1.9)}
#: Half width, in logarithms, of products beside each other of one software: what kernels of a running step are off by.
_KERNELS = 0.115
#: Word of a cause whose kernels are others than those of products in 16 bits.
_LOW = "low-precision"
#: Half of an interval that holds nine of ten normal values, in standard deviations.
NINE_OF_TEN = 1.645
#: How far down and up the interval of a source reaches besides, of which no row was compared with a prediction before.
FIRST_READING = (0.35, 0.6)
#: How much longer a step takes, in logarithms, at half of the board's power, where all of it is products.
_HALF_THE_POWER = log(2.0)
#: For each word or field of a source that was not understood, and each thing that a step depends on and it leaves out.
UNTOLD = log(1.1)


def half_width(
    evidence: str, shares: Mapping[str, float], *, measured: bool, untold: int = 0, columns: int = 0
) -> float:
    """Half width of the interval of a step's seconds, in logarithms ([Note: interval]).

    Args:
        evidence: How the software is known on the device's architecture, as of ``Stack.evidence_on``.
        shares: Shares of the step by cause.
        measured: Whether kernels of the device were measured by shape.
        untold: Number of words or fields of a source that were not understood, plus number of facts that it leaves out.
        columns: Width of the model; 0 to leave it out.
    """
    causes = (_longer(_LEFT[evidence] * _uncertain(cause), share) for cause, share in shares.items())
    machine = 0.0 if measured else DATA_SHEET
    short = _SHORT_KERNELS if evidence == GUESSED and 0 < columns <= _FEW_COLUMNS else 0.0
    parts = (_SOFTWARE[evidence], machine, short, *causes)
    return sqrt(sum(part**2 for part in parts) + untold * UNTOLD**2)


def either_way(evidence: str, shares: Mapping[str, float]) -> float:
    """Half width, on both sides, due to updates on the host; arguments as ``half_width``."""
    return _longer(_LEFT[evidence] * _CAUSES[_ON_HOST], shares.get(_ON_HOST, 0.0))


def _longer(width: float, share: float) -> float:
    """Logarithm of how much longer a step is whose share of a cause takes ``exp(width)`` times as long."""
    return log(1 + min(1.0, max(0.0, share)) * (exp(width) - 1))


def bounds(
    evidence: str, half: float, *, either_way: float = 0.0, clocks_untold: bool = False, first_reading: bool = False
) -> tuple[float, float]:
    """Bounds of the interval as factors of the predicted seconds.

    Args:
        evidence: How the software is known.
        half: Half width, as of ``half_width``.
        either_way: Part of it due to causes that err as often one way as the other, as of ``either_way``.
        clocks_untold: Whether the board's power is limited, but the source does not say to what.
        first_reading: Whether no row of the step's source was compared with a prediction before.
    """
    below, above = _SIDES.get(evidence, (1.0, 1.0))
    misread_down, misread_up = FIRST_READING if first_reading else (0.0, 0.0)
    down = hypot(below * half, sqrt(1 - below**2) * either_way, misread_down)
    return exp(-down), exp(hypot(above * half, _HALF_THE_POWER if clocks_untold else 0.0, misread_up))


def causes_of(shares: Mapping[str, float], *, updates_on_host: bool) -> dict[str, float]:
    """Shares of a step by the causes of intervals, where an optimizer on the host is another cause than on a device."""
    causes = dict(shares)
    if updates_on_host:
        causes[_ON_HOST] = causes.pop("optimizer", 0.0)
    return causes


def cause_spreads(shares: Mapping[str, float], evidence: str = GUESSED) -> dict[str, float]:
    """Standard deviation of a step's logarithm due to each cause; products in few bits are a cause of their own.

    Args:
        shares: Shares of the step by cause; a bubble is left out, as it lasts as long as the others make it.
        evidence: How the software is known.
    """
    spreads: dict[str, float] = {}
    working = max(1e-9, 1.0 - max(0.0, shares.get("bubble", 0.0)))
    for cause, share in shares.items():
        if cause == "bubble" or share <= 0:
            continue
        word = next((word for word in (*_CAUSES, _LOW) if word in cause), "kernels")
        spreads[word] = spreads.get(word, 0.0) + share * _CAUSES.get(word, _KERNELS)
    return {cause: _LEFT[evidence] * spread / working / NINE_OF_TEN for cause, spread in spreads.items()}


def _uncertain(cause: str) -> float:
    return next((width for word, width in _CAUSES.items() if word in cause), 0.0)
