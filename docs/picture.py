"""Draw docs/picture.svg, the picture of the read-me, from what a run left in its folder.

lading demo --seconds 15
python docs/picture.py out/demo docs/picture.svg
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lading.ir.plan import Plan
from lading.ir.timeline import Timeline
from lading.report.charts import memory_figure
from lading.report.html import CSS
from lading.report.svg import el, words

#: Pixels from one line of the legend to the next, and of one of its entries.
LINE, ENTRY = 22, 260


def picture(folder: Path) -> str:
    """Draw the device's memory over one step of a run, predicted and measured, with its legend, as one SVG."""
    plan = Plan.load(folder / "plan.json")
    lines = [Timeline.load(folder / f"{source}.json") for source in ("predicted", "measured")]
    duration_s = max(line.duration_s for line in lines)
    drawn = memory_figure("device", duration_s, plan.budgets["device"], lines)
    (width, height, body) = re.findall(r'<svg viewBox="0 0 (\S+) (\S+)"[^>]*>(.*?)</svg>', drawn, re.DOTALL)[
        1
    ]  # the drawing for a phone
    entries = re.findall(r'class="swatch ([^"]*)"[^>]*></i>([^<]*)<', drawn)
    columns = int(float(width) // ENTRY)
    legend = "".join(
        _entry(class_, label, 70 + ENTRY * (n % columns), float(height) + 20 + LINE * (n // columns))
        for n, (class_, label) in enumerate(entries)
    )
    whole = float(height) + 20 + LINE * -(-len(entries) // columns)
    style = el("style", f"{CSS}\ntext{{font-family:sans-serif}}")
    paper = el("rect", width="100%", height="100%", style="fill:var(--paper)")
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {whole:g}" role="img"'
    return f"<svg {head}><title>Memory of one step of {folder.name}</title>{style}{paper}{body}{legend}</svg>\n"


def _entry(class_: str, label: str, x: float, y: float) -> str:
    """Draw an entry of the legend: a line for what is drawn as one, else a square."""
    if class_ in ("tracked", "resident"):
        mark = el("path", d=f"M{x} {y - 4:g}h20", class_=class_)
    elif class_ == "forecast":
        mark = el("line", x1=x, x2=x + 20, y1=y - 4, y2=y - 4, class_=class_)
    else:
        mark = el("rect", x=x + 4, y=y - 10, width=12, height=12, class_=class_)
    return mark + words(label, x + 27, y, "tick")


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(Path(sys.argv[1])))
