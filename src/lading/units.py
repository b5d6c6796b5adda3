"""Units: inside Lading everything is seconds, bytes and FLOP; this is the only place that converts."""

from __future__ import annotations

import re
from math import ceil, floor, log10

from lading.errors import ConfigError

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30

_BYTE_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": KiB, "MIB": MiB, "GIB": GiB, "TIB": 1 << 40,
}  # fmt: skip
_CAPACITY_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
#: Plain numbers below are not taken as bytes.
_LEAST_PLAIN_BYTES = 1024
#: Units of long times, the seconds of one, and from how many seconds on they are used.
_LONG_TIMES = (("days", 86400, 3 * 86400), ("h", 3600, 3 * 3600), ("min", 60, 1000))
#: Units that are bits: a capital prefix, then a small b. All small is taken for bytes, as nobody has such bits.
_BITS = re.compile(r"[KMGT]i?b\Z")
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*%\s*\Z")
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)\s*\Z")


def parse_bytes(size: str | float, name: str = "") -> int:
    """Read ``"256MB"``, ``"24GiB"``, or a number of bytes, as bytes.

    A number below 1024 without a unit is refused: it may be meant as megabytes or gigabytes. 0 is none.

    Args:
        name: Name of what the size is of, for errors.
    Raises:
        ConfigError: not a number with a known unit, negative, or a number that could mean several things.
    """
    return _read_bytes(size, name, is_share=False)


def _read_bytes(size: object, name: str, *, is_share: bool) -> int:
    prefix = f"{name}: " if name else ""
    share = ", a share such as '50%'," if is_share else ""
    expected = f"{prefix}expected a size such as '256MB' or '24GiB'{share} or a number of bytes"
    if isinstance(size, bool) or not isinstance(size, (str, int, float)):
        raise ConfigError(f"{expected}, got {size!r}")
    match = _NUMBER.match(size if isinstance(size, str) else str(size))
    if match is None or match[2].upper() not in _BYTE_UNITS:
        raise ConfigError(f"{expected}, got {_shown(size)}")
    if _BITS.match(match[2]):
        raise ConfigError(f"{expected}, got {_shown(size)}: a small b is bits; write {match[2][:-1]}B for bytes")
    size_bytes = size if isinstance(size, int) else float(match[1]) * _BYTE_UNITS[match[2].upper()]
    if size_bytes >= 2**63:
        raise ConfigError(f"{prefix}expected a size below 2**63 bytes, got {_shown(size)}")
    if not match[2] and 0 < size_bytes < _LEAST_PLAIN_BYTES:
        meanings = _meanings(float(match[1]), is_share=is_share)
        raise ConfigError(f"{prefix}expected a unit: {size!r} may mean {meanings}; write the one that is meant")
    return round(size_bytes)


def _shown(size: str | float) -> str:
    return "a larger integer" if isinstance(size, int) and abs(size) >= 2**63 else repr(size)


def _meanings(number: float, *, is_share: bool) -> str:
    """Say what a small number without a unit may mean."""
    percent = 100 * number if number <= 1 else number
    shares = [f"{percent:g}%"] if is_share and percent <= 100 else []
    return " or ".join(repr(text) for text in (*shares, *(f"{number:g}{unit}" for unit in ("B", "MB", "GB"))))


def format_bytes(size_bytes: float) -> str:
    """Format bytes in binary units with two decimals: ``'1.50 GiB'``."""
    for unit, scale in (("TiB", GiB << 10), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def format_capacity(size_bytes: float) -> str:
    """Format bytes in vendors' units, to the nearest of three figures: ``'64 GB'``."""
    unit, scale = _capacity_unit(size_bytes)
    return f"{size_bytes / scale:.3g} {unit}"


def format_capacity_above(size_bytes: float) -> str:
    """Format bytes in vendors' units with two figures, never less than ``size_bytes``: ``'65 GB'``."""
    unit, scale = _capacity_unit(size_bytes)
    step = 10.0 ** (floor(log10(max(1.0, size_bytes / scale))) - 1)
    return f"{round(ceil(size_bytes / scale / step) * step, 3):g} {unit}"


def _capacity_unit(size_bytes: float) -> tuple[str, float]:
    return next(((unit, scale) for unit, scale in _CAPACITY_UNITS if size_bytes >= scale), _CAPACITY_UNITS[-1])


def format_seconds(seconds: float) -> str:
    """Format seconds in the unit of their size, from hours to nanoseconds: ``'17.3 min'``, ``'12.3 ms'``."""
    for unit, scale, least_s in _LONG_TIMES:
        if abs(seconds) >= least_s:
            return f"{seconds / scale:.1f} {unit}"
    if abs(seconds) >= 1 - 5e-5:
        return f"{seconds:.3f} s"
    for unit, scale in (("ms", 1e3), ("us", 1e6), ("ns", 1e9)):
        if abs(seconds) * scale >= 1 - 5e-5:
            return f"{seconds * scale:.1f} {unit}"
    return f"{seconds * 1e9:.1g} ns" if seconds else "0 s"


def format_flops(flops: float) -> str:
    """Format FLOP with decimal prefixes: ``'1.23 GFLOP'``."""
    for unit, scale in (
        ("ZFLOP", 1e21),
        ("EFLOP", 1e18),
        ("PFLOP", 1e15),
        ("TFLOP", 1e12),
        ("GFLOP", 1e9),
        ("MFLOP", 1e6),
    ):
        if abs(flops) >= scale:
            return f"{flops / scale:.2f} {unit}"
    return f"{flops:.0f} FLOP"


def share_or_bytes(size: str | float, whole_bytes: int, name: str = "") -> int:
    """Read ``"256MB"``, a number of bytes, or a share of ``whole_bytes`` (``"50%"`` or ``0.5``) as bytes.

    A number between 0 and 1 is a share. 1 is refused, as it may be all of it or one byte; so are those below 1024.

    Args:
        name: Name of what the size is of, for errors.
    Raises:
        ConfigError: neither a size nor a share above 0% and up to 100%, or a number that could mean several things.
    """
    share = share_of(size, name)
    return _read_bytes(size, name, is_share=True) if share is None else int(whole_bytes * share)


def share_of(size: str | float, name: str = "") -> float | None:
    """Read a share, ``"50%"`` or ``0.5``, above 0 and up to 1; None where it is a number of bytes.

    Raises:
        ConfigError: a percentage that is not above 0% and up to 100%.
    """
    if isinstance(size, float):
        return size if 0 < size < 1 else None
    if not isinstance(size, str):
        return None
    if match := _PERCENT.match(size):
        if not 0 < float(match[1]) <= 100:
            prefix = f"{name}: " if name else ""
            raise ConfigError(f"{prefix}expected a share above 0% and up to 100%, got {size!r}")
        return float(match[1]) / 100
    number = _NUMBER.match(size)
    return float(number[1]) if number and not number[2] and 0 < float(number[1]) < 1 else None


def format_count(number: float) -> str:
    """Format a number with three figures and a word from a million on: ``'4.56 million'``, ``'8,192'``."""
    for word, scale in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if float(f"{number:.3g}") >= scale:
            return f"{float(f'{number:.3g}') / scale:.3g} {word}"
    return f"{number:,.0f}"
