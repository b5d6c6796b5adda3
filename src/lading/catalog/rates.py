"""Rates in words: bytes a second that "50 GB/s", "400 Gb/s" or "400G" mean.

[Note: bits and bytes] A capital B is bytes, a small b is bits: 50 GB/s are 400 Gb/s. "bit" and "Byte" written out say
so themselves. Where nobody minded capitals ("gb/s", "GBPS"), a network's rate is in bits, and that of a bus, of memory
or of a disk in bytes, as data sheets have them; the reading is then an assumption and is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lading.units import parse_bytes

_PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_NUMBER = r"(?<![A-WYZa-wyz0-9_.,-])(\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?)"
_SECOND = r"(?:\s?/\s?s(?:ec(?:ond)?)?|\s?ps|\s?per\s+sec(?:ond)?|\s?s-1)"
#: After the number: a prefix; then bits or bytes, a second at the end, which "Gb" of a port may leave out.
_UNIT = re.compile(
    _NUMBER
    + r"\s?-?([kKmMgGtT])(i?|ega(?=bi)|iga(?=bi)|era(?=bi))(?:"
    + rf"(?P<word>bits?|Bits?|BITS?|bytes?|Bytes?|BYTES?)(?P<word_s>{_SECOND})?"
    + r"|(?P<ports>(?:ig)?E)"
    + rf"|(?P<letter>[bB])(?:(?P<letter_s>{_SECOND}|PS|/S)|(?P<port>[eE](?:thernet)?)?)"
    + r"|(?P<bare>)(?=\s|$|[,;)]))\b"
)
_PORTS = re.compile(r"ethernet|infiniband|\bib\b|roce|rdma|nic\b|nics\b|cx-?\d|connectx|[fehnqx]dr|slingshot", re.I)
_BOTH_WAYS = re.compile(r"bi-?dir|both (?:ways|directions)|duplex|in \+ out|tx ?\+ ?rx", re.I)
_ONE_WAY = re.compile(r"uni-?dir|per direction|each (?:way|direction)|one[- ]way|/dir\b|in each", re.I)


@dataclass(frozen=True)
class NamedRate:
    """Rate that words name.

    Attributes:
        bytes_per_s: Bytes a second, as written: of both directions together where ``both_ways`` says so.
        words: Words that it was read from.
        start, end: Place of these words in the text.
        assumed: Reading that was taken for granted; "" where the words leave no choice.
    """

    bytes_per_s: float
    words: str
    start: int
    end: int
    assumed: str = ""


def find_rates(text: str, *, bits: bool) -> tuple[NamedRate, ...]:
    """Find the rates that words name, in order ([Note: bits and bytes]).

    Args:
        bits: Whether a rate whose capitals say nothing is in bits, as a network's, or in bytes, as a bus's.
    """
    return tuple(_rates(text, bits))


def _rates(text: str, bits: bool) -> Iterator[NamedRate]:
    for match in _UNIT.finditer(text):
        prefix = match[2].lower()
        scale = 1024.0 ** (1 + "kmgt".index(prefix)) if match[3] == "i" else _PREFIXES[prefix]
        in_bits, assumed = _in_bits(match, text, bits)
        if in_bits is None:
            continue
        value = float(match[1].replace(",", "")) * scale / (8 if in_bits else 1)
        if value > 0:
            yield NamedRate(value, match[0].strip(), match.start(), match.end(), assumed)


def _in_bits(match: re.Match[str], text: str, bits: bool) -> tuple[bool | None, str]:
    """Whether a rate is in bits, and what was assumed to say so; None where it is no rate."""
    if match["word"]:
        in_bits = match["word"].lower().startswith("bit")
        return (in_bits if in_bits or match["word_s"] else None), ""
    if match["ports"]:
        return True, ""
    if match["letter"] is None:  # "400G": a port, where ports are spoken of
        if match[2] == "G" and _PORTS.search(text):
            return True, ""
        return (True, f"{match[0].strip()!r} is Gb/s") if bits and match[2] == "G" else (None, "")
    if not match["letter_s"]:  # "100Gb" and "100GbE" are ports, "80 GB" is a size
        return (True if match["port"] or match["letter"] == "b" else None), ""
    shouted = match["letter_s"] in ("PS", "/S")
    if match["letter"] == "B" and not shouted:
        return False, ""
    if match["letter"] == "b" and match[2].isupper():
        return True, ""
    reading = "bits, as of networks" if bits else "bytes, as of buses, memory and disks"
    return bits, f"{match[0].strip()!r} is in {reading}: its capitals say neither"


def parse_rate(words: str, name: str) -> float:
    """Read "2 TB/s", "400 Gb/s", or a size such as "2TB" that passes in a second, as bytes a second.

    Args:
        name: Name of what the rate is of, for errors.
    Raises:
        ConfigError: neither a rate nor a size.
    """
    rates = find_rates(words.strip(), bits=False)
    if len(rates) == 1 and rates[0].words == words.strip():
        return rates[0].bytes_per_s
    return float(parse_bytes(words, name))


def both_ways(text: str) -> bool | None:
    """Whether a rate is the sum of both directions, by the words around it; None where they do not say."""
    if _ONE_WAY.search(text):
        return False
    return True if _BOTH_WAYS.search(text) else None
