"""Draw the memory that serving a model takes: one bar for all parts, and one for the small parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..plotting import load_pyplot, save_plot
from .kv_sizes import human

COLORS = ("#2c6fb3", "#7fb0dc", "#174a7c", "#a9c9e8", "#b3452c", "#6a994e", "#bc9c22", "#7b5ea7", "#888888", "#4a8f8c")
SMALL = 0.05  # share of the whole below which a part is drawn in the second bar
MIB = 1 << 20


def plot_memory(parts: Mapping[str, int], title: str, path: Path) -> None:
    """Draw bytes by purpose. Raises MissingDependency or ConfigError."""
    pyplot = load_pyplot("plot")
    total = sum(parts.values())
    colors = {name: COLORS[index % len(COLORS)] for index, name in enumerate(parts)}
    small = {name: size for name, size in parts.items() if 0 < size < SMALL * total}
    rest = f"other parts, {human(sum(small.values()))}"
    large = {name: size for name, size in parts.items() if size and name not in small} | {rest: sum(small.values())}
    bars = [(large, {**colors, rest: "#dddddd"}), (small, colors)] if small else [(large, colors)]
    figure, rows = pyplot.subplots(len(bars), 1, figsize=(9, 2.2 * len(bars)), layout="constrained", squeeze=False)
    for (axes,), (sizes, palette) in zip(rows, bars, strict=True):
        _draw_bar(axes, sizes, palette)
    rows[0][0].set_title(f"{title}: {human(total)}")
    save_plot(pyplot, figure, path)


def _draw_bar(axes: Any, sizes: Mapping[str, int], colors: Mapping[str, str]) -> None:
    left = 0.0
    for name, size in sizes.items():
        label = name if name.startswith("other parts") else f"{name}, {human(size)}"
        axes.barh(0, size / MIB, left=left, color=colors[name], label=label)
        left += size / MIB
    axes.set(xlabel="MiB", yticks=[], xlim=(0, left))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.35), fontsize="small")
