"""Settings of the site: Sphinx, pages in Markdown by MyST, and tables written from the code while the site is built.

    make docs      # out/docs/index.html

A line ``<!-- generated: NAME -->`` of a page is replaced by what the function of that name in ``reference.py`` writes,
so what the site says of commands and keys is what the program does.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

import reference

import lading

project = "Lading"
copyright = "the authors of Lading, Apache-2.0"
release = lading.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"Lading {release}"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
copybutton_exclude = ".linenos, .gp, .go"
nitpicky = False


def write_generated(_app: Sphinx, _name: str, source: list[str]) -> None:
    """Replace the marks of a page by what the code says, and links to pages that are not of the site by their paths."""
    source[0] = re.sub(r"<!-- generated: (\w+) -->", lambda match: reference.TABLES[match[1]](), source[0])
    source[0] = re.sub(r"\[([^\]]+)\]\(\.\./([\w/]+\.md)[^)]*\)", r"\1 (`\2`)", source[0])


def setup(app: Sphinx) -> None:
    """Have the marks replaced whenever a page is read."""
    app.connect("source-read", write_generated)
