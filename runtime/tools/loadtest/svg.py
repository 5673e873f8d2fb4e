"""Figures of matplotlib as inline SVG, in one style.

It must not know what is drawn. One invariant: pictures of one page disturb neither each other nor the page: no id is
there twice, no style reaches beyond its picture, and text stays text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from io import StringIO
from typing import Any

from ..plotting import load_pyplot

INK, QUIET, GRID = "#1f2933", "#5f6b7a", "#e4e7eb"
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": QUIET,
    "axes.grid": True,
    "axes.labelcolor": QUIET,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "svg.hashsalt": "quire",  # the same picture has the same bytes
    "svg.fonttype": "none",  # text stays text: small, selectable, read aloud
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": QUIET,
    "xtick.labelsize": 8.5,
    "ytick.color": QUIET,
    "ytick.labelsize": 8.5,
}


@dataclass
class Drawing:
    figure: Any
    svg: str = ""  # once it is done


@contextmanager
def drawing(width_in: float, height_in: float) -> Iterator[Drawing]:
    """An empty figure to draw on, done when the block is over. Raises MissingDependency."""
    pyplot = load_pyplot("--report")
    with pyplot.rc_context(STYLE):
        made = Drawing(pyplot.figure(figsize=(width_in, height_in), layout="constrained"))
        try:
            yield made
            written, nothing = StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
            made.figure.savefig(written, format="svg", metadata=nothing)
            made.svg = _inline(written.getvalue())
        finally:
            pyplot.close(made.figure)


def _inline(text: str) -> str:
    """As a part of a page: no prolog, size or page-wide style, and no id that another picture of the page has."""
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", text, count=1)
    text = re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", text, count=1)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # nothing refers to them
    own = sha256(text.encode()).hexdigest()[:8]
    return re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{own}", text)
