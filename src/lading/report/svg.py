"""Elements, scales and axes for inline SVG and HTML. Text is escaped here and nowhere else."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, log10

from lading.units import GiB, KiB, MiB


def text(value: object) -> str:
    """Escape text so that it is safe between tags and in quoted attributes."""
    return html.escape(str(value), quote=True)


def breakable(value: str) -> str:
    """Escape a dotted name so that a narrow column breaks it after a dot or an underscore."""
    return re.sub(r"(?<=[^\W\d])[._](?=[^\W\d]|\*)|(?<=\*)\.", r"\g<0><wbr/>", text(value))


def unbroken_options(value: str) -> str:
    """Escape a sentence so that no line ends inside an option of a command, as ``--memory=512m``."""
    return re.sub(r"--[\w=-]+", lambda option: el("span", option[0], class_="word"), text(value))


def el(name: str, *children: str, **attributes: object) -> str:
    """Write an element. ``children`` are markup already (pass ``text(...)`` for words); attributes are escaped.

    ``class_`` becomes ``class``, other underscores become hyphens; an attribute that is None is left out.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            parts.append(f'{key.rstrip("_").replace("_", "-")}="{text(num(value))}"')
    head = " ".join(parts)
    return f"<{head}>{''.join(children)}</{name}>" if children or name not in _VOID else f"<{head}/>"


_VOID = frozenset({"rect", "line", "path", "circle", "meta", "br"})


def num(value: object) -> object:
    """Round a float to at most two decimals without trailing zeros; anything else stays."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Plotting area of a chart and what its corners stand for; pixels from the top left.

    ``x_low`` lies at ``left``, ``y_low`` at the bottom.
    """

    left: float
    top: float
    width: float
    height: float
    x_high: float
    y_high: float
    x_low: float = 0.0
    y_low: float = 0.0

    @property
    def right(self) -> float:
        """Pixel of the right edge."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """Pixel of the lower edge."""
        return self.top + self.height

    def x(self, value: float) -> float:
        """Pixel of a value along the horizontal axis."""
        return self.left + (value - self.x_low) / ((self.x_high - self.x_low) or 1.0) * self.width

    def y(self, value: float) -> float:
        """Pixel of a value along the vertical axis."""
        return self.bottom - (value - self.y_low) / ((self.y_high - self.y_low) or 1.0) * self.height


def round_step(span: float, most: int, base: Sequence[float] = (1, 2, 5)) -> float:
    """Find the smallest of ``base`` times a power of ten that cuts ``span`` into at most ``most`` parts."""
    if span <= 0:
        return 1.0
    power = 10.0 ** floor(log10(span / most))
    return next(m * power for m in (*base, *(10 * b for b in base)) if span / (m * power) <= most)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Choose round values from ``low`` to ``high``, at most ``most`` + 1 of them."""
    step = round_step(high - low, most)
    first, last = -floor(-low / step + 1e-9), floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def byte_ticks(high: float, most: int) -> list[tuple[float, str]]:
    """Choose round numbers of bytes from 0 to ``high``, with text: powers of two in the unit that suits ``high``."""
    scale, unit = next(((s, u) for s, u in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")) if high >= 2 * s), (1, "B"))
    span, step = high / scale, 0.25 if scale == GiB else 1.0
    while span / step > most:
        step *= 2
    step = {128.0: 100.0, 256.0: 200.0, 512.0: 500.0}.get(step, step)
    return [(i * step * scale, f"{i * step:g} {unit}" if i else "0") for i in range(floor(span / step) + 1)]


def second_ticks(high: float, most: int) -> list[tuple[float, str]]:
    """Choose round times from 0 to ``high`` seconds, with text in one unit."""
    scale, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if high >= 2 * s), (1e-6, "us"))
    return [(value * scale, f"{value:g} {unit}" if value else "0") for value in ticks(0, high / scale, most)]


#: Pixels from a tick within which the end of the axis lets no label be centred, and of the margin behind the end.
_LABEL_HALF, _MARGIN = 22, 12


def x_axis(frame: Frame, marks: Sequence[tuple[float, str]]) -> str:
    """Draw a base line with ticks and text below."""
    out = [el("line", x1=frame.left, x2=frame.right, y1=frame.bottom, y2=frame.bottom, class_="axis")]
    for value, label in marks:
        x = frame.x(value)
        out.append(el("line", x1=x, x2=x, y1=frame.bottom, y2=frame.bottom + 4, class_="axis"))
        near_end = len(label) > 2 and frame.right - x < _LABEL_HALF
        at, anchor = (frame.right + _MARGIN, "end") if near_end else (x, "mid")
        out.append(words(label, at, frame.bottom + 17, f"tick {anchor}"))
    return "".join(out)


def y_axis(frame: Frame, marks: Sequence[tuple[float, str]]) -> str:
    """Draw faint lines across with text on the left."""
    out: list[str] = []
    for value, label in marks:
        y = frame.y(value)
        out.append(el("line", x1=frame.left, x2=frame.right, y1=y, y2=y, class_="grid"))
        out.append(words(label, frame.left - 8, y + 4, "tick end"))
    return "".join(out)


def words(label: str, x: float, y: float, class_: str) -> str:
    """Draw text at a point; ``class_`` holds style and anchor (``mid``, ``end``)."""
    return el("text", text(label), x=x, y=y, class_=class_)


def level(frame: Frame, value: float, label: str, class_: str) -> str:
    """Draw a horizontal line at ``value``, with its label above the right end if there is one."""
    y = frame.y(value)
    line = el("line", x1=frame.left, x2=frame.right, y1=y, y2=y, class_=class_)
    return line + (words(label, frame.right - 6, y - 6, f"note {class_}-text end") if label else "")


def polyline(points: Sequence[tuple[float, float]], class_: str, *, halo: bool = False) -> str:
    """Draw a line through pixels; with ``halo`` on a wider one in the colour of the page, to stand out on fills."""
    if not points:
        return ""
    d = "M" + "L".join(f"{num(float(x))} {num(float(y))}" for x, y in points)
    under = el("path", d=d, class_="halo") if halo else ""
    return under + el("path", d=d, class_=class_)


def staircase(
    steps: Sequence[tuple[float, float]], end_x: float, y: Callable[[float], float]
) -> list[tuple[float, float]]:
    """Corner pixels of a function that holds each value from its x (pixels) to the next."""
    points: list[tuple[float, float]] = []
    for x, value in steps:
        height = round(y(value), 1)
        if points and points[-1][1] == height:
            continue
        if points:
            points.append((x, points[-1][1]))
        points.append((x, height))
    if points:
        points.append((end_x, points[-1][1]))
    return points


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Write (class of the swatch, words) side by side, in HTML so that it wraps."""
    keys = [el("span", el("i", class_=f"swatch {class_}"), text(label), class_="key") for class_, label in entries]
    return el("div", *keys, class_="legend")


def figure(title: str, body: str, *, note: str = "", wide: bool = True) -> str:
    """Frame a drawing with a title and an optional remark; a wide one scrolls sideways on a narrow screen."""
    caption = el("figcaption", el("b", text(title)), el("span", text(note), class_="muted") if note else "")
    return el("figure", caption, el("div", body, class_="scroll") if wide else body)


def svg(width: float, height: float, body: str, label: str, class_: str = "wide") -> str:
    """Write a drawing that scales to its column."""
    return el("svg", body, viewBox=f"0 0 {num(width)} {num(height)}", class_=class_, role="img", aria_label=label)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    chosen: int | None = None,
    total: Sequence[str] | None = None,
    left: Sequence[int] = (0,),
    swatches: Sequence[str] = (),
) -> str:
    """Write a table of text as HTML.

    Args:
        chosen: Row to mark.
        total: A last row, set off.
        left: Columns of words (left-aligned, wrapping); the others are figures.
        swatches: CSS class of a colour for each row.
    """

    def cells(name: str, row: Sequence[str], swatch: str = "") -> str:
        mark = el("i", class_=f"swatch {swatch}") if swatch else ""
        first = "l name marked" if swatch else "l name"
        classes = [("l wrap" if i else first) if i in left else None for i in range(len(row))]
        words = [breakable(cell) if i == 0 else text(cell) for i, cell in enumerate(row)]
        return "".join(el(name, "" if i else mark, word, class_=classes[i]) for i, word in enumerate(words))

    body = [
        el("tr", cells("td", row, swatches[i] if swatches else ""), class_="chosen" if i == chosen else None)
        for i, row in enumerate(rows)
    ]
    if total is not None:
        body.append(el("tr", cells("td", total), class_="total"))
    inner = el("thead", el("tr", cells("th", head))) + el("tbody", *body)
    return el("div", el("table", inner), class_="scroll")
