"""matplotlib, the optional extra `plot`: loading it, and drawing a figure as inline SVG in the style of the reports.

Pictures on one page must not affect each other or the page: their ids are unique, and they contain no page-wide styles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any

from ..common.errors import ConfigError, MissingDependency

INK = "#1f2933"
QUIET_COLOR = "#5f6b7a"
GRID = "#e4e7eb"
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": QUIET_COLOR,
    "axes.grid": True,
    "axes.labelcolor": QUIET_COLOR,
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
    "svg.hashsalt": "quire",  # makes the SVG reproducible
    "svg.fonttype": "none",  # text stays text: small, selectable, readable by screen readers
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": QUIET_COLOR,
    "xtick.labelsize": 8.5,
    "ytick.color": QUIET_COLOR,
    "ytick.labelsize": 8.5,
}


def load_pyplot(option: str) -> Any:
    """Return pyplot, set up to draw into files. Raises MissingDependency that names the `option` that needs it."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingDependency(f"{option} needs matplotlib: pip install 'quire[plot]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_plot(path: Path) -> None:
    """Check, before any work, that the picture can be written. Raises MissingDependency or ConfigError."""
    formats = load_pyplot("plot").FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:] not in formats:
        raise ConfigError(f"`plot` {path}: the name must end in one of {', '.join(f'.{name}' for name in formats)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"`plot` {path} cannot be written: {path.parent} is not a folder")


def save_plot(pyplot: Any, figure: Any, path: Path) -> None:
    """Write a figure to the file of --plot and close it. Raises ConfigError."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"`plot` {path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


@dataclass
class SvgFigure:
    """A matplotlib figure, and its SVG once `svg_figure` has ended."""

    figure: Any
    svg: str = ""


@contextmanager
def svg_figure(option: str, width_in: float, height_in: float) -> Iterator[SvgFigure]:
    """Yield an empty figure, and render it when the block ends. Raises MissingDependency."""
    pyplot = load_pyplot(option)
    with pyplot.rc_context(STYLE):
        picture = SvgFigure(pyplot.figure(figsize=(width_in, height_in), layout="constrained"))
        try:
            yield picture
            written = StringIO()
            nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            picture.figure.savefig(written, format="svg", metadata=nothing)
            picture.svg = _inline(written.getvalue())
        finally:
            pyplot.close(picture.figure)


def _inline(text: str) -> str:
    """Return the SVG without prolog, size and page-wide styles, and with ids that no other picture has."""
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", text, count=1)
    text = re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", text, count=1)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # nothing refers to these ids
    own = sha256(text.encode()).hexdigest()[:8]
    return re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{own}", text)
