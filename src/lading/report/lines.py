"""Lines of text that fit the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING

from lading.files import CONTROL_CHARACTERS

if TYPE_CHECKING:
    from rich.console import Console

#: Where the output is no terminal and COLUMNS is not set.
_COLUMNS = 80
_LEAST = 40
_HANG = 2


def line_columns() -> int:
    """Columns of a line: those of the terminal, else 80."""
    return max(_LEAST, get_terminal_size((_COLUMNS, 24)).columns)


def printable(text: str) -> str:
    """Text whose control characters, which a terminal would obey, are shown as they are written: ``\\x1b``."""
    shown = CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
    return shown.replace("\r", "\\r")


def fitted(text: str, columns: int | None = None, *, hang: int = _HANG, styled: bool = False) -> str:
    """Break long lines of a text between words; what follows a break is indented by ``hang`` more.

    Args:
        columns: Columns of a line; None is ``line_columns()``. A word that is longer, such as a path, stays whole.
        styled: Leave control characters as they are: they are colors, and nothing of a file is in it.
    """
    width = columns or line_columns()
    lines: list[str] = []
    for line in (text if styled else printable(text)).splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + hang)
        lines += [line] if len(line) <= width else _broken(line, width, "", indent)
    return "\n".join(lines)


def _broken(line: str, width: int, first: str, others: str) -> list[str]:
    """Break one line into several; a word too long for any line goes on behind the one before it."""
    lines: list[str] = []
    for part in wrap(
        line, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    ):
        if lines and len(part) > width:
            lines[-1] += f" {part.lstrip()}"
        else:
            lines.append(part)
    return lines


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print sentences on a console, fitted to its width and otherwise as they are."""
    console.print(fitted(text, console.width), style=style, markup=False, highlight=False, soft_wrap=True)


def say_list(console: Console, head: str, sentences: Iterable[str]) -> None:
    """Print sentences below one another behind a head."""
    for number, sentence in enumerate(sentences):
        first = f"{'' if number else head:{len(head)}} - "
        lines = _broken(printable(sentence), console.width, first, " " * len(first))
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
