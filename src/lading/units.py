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
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*%\s*\Z")
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)\s*\Z")


def parse_bytes(text: str | int) -> int:
    """Bytes from ``"256MB"``, ``"24GiB"`` or a plain integer.

    Raises:
        ConfigError: not a number with a known unit, or negative.
    """
    if isinstance(text, bool) or (isinstance(text, int) and text < 0):
        raise ConfigError(f"expected a size in bytes such as '256MB', got {text!r}")
    if isinstance(text, int) and text < 1 << 63:
        return text
    if isinstance(text, int):
        raise ConfigError("expected a size below 2**63 bytes, got a larger integer")
    match = _NUMBER.match(text)
    if match is None or match[2].upper() not in _BYTE_UNITS:
        raise ConfigError(f"expected a size such as '256MB', '24GiB' or '1.5GB', got {text!r}")
    size = float(match[1]) * _BYTE_UNITS[match[2].upper()]
    if size >= 2**63:
        raise ConfigError(f"expected a size below 2**63 bytes, got {text!r}")
    return round(size)


def format_bytes(size_bytes: float) -> str:
    """``'1.50 GiB'``: binary units, two decimals."""
    for unit, scale in (("TiB", GiB << 10), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def format_capacity(size_bytes: float) -> str:
    """``'64 GB'``: vendors' units, to the nearest of three figures."""
    unit, scale = _capacity_unit(size_bytes)
    return f"{size_bytes / scale:.3g} {unit}"


def format_capacity_above(size_bytes: float) -> str:
    """``'65 GB'``: vendors' units, two figures, never less than ``size_bytes``."""
    unit, scale = _capacity_unit(size_bytes)
    step = 10.0 ** (floor(log10(max(1.0, size_bytes / scale))) - 1)
    return f"{round(ceil(size_bytes / scale / step) * step, 3):g} {unit}"


def _capacity_unit(size_bytes: float) -> tuple[str, float]:
    return next(((unit, scale) for unit, scale in _CAPACITY_UNITS if size_bytes >= scale), _CAPACITY_UNITS[-1])


def format_seconds(seconds: float) -> str:
    """``'1.234 s'``, ``'12.3 ms'`` or ``'45.6 us'``."""
    if abs(seconds) >= 1:
        return f"{seconds:.3f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} us"


def format_flops(flops: float) -> str:
    """``'1.23 GFLOP'`` with decimal prefixes."""
    for unit, scale in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if abs(flops) >= scale:
            return f"{flops / scale:.2f} {unit}"
    return f"{flops:.0f} FLOP"


def share_or_bytes(size: str | int, whole_bytes: int) -> int:
    """Bytes of ``"256MB"``, of an integer, or of a share such as ``"50%"`` of ``whole_bytes``.

    Raises:
        ConfigError: neither a size nor a share above 0% and up to 100%.
    """
    match = _PERCENT.match(size) if isinstance(size, str) else None
    if match is None:
        return parse_bytes(size)
    if not 0 < float(match[1]) <= 100:
        raise ConfigError(f"expected a share above 0% and up to 100%, got {size!r}")
    return int(whole_bytes * float(match[1]) / 100)
