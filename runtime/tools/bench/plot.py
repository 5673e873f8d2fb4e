"""Draw the pictures of `quire bench --plot`. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..plotting import load_pyplot, save_plot
from .cache_comparison import CacheComparison
from .roofline import DTYPES, PEAK_NAMES, Roofline, mean_roofline
from .speed import ShapeResult

PREFILL = "#b3452c"
DECODE = "#2c6fb3"
ROOF_COLOR = "#555555"
LABEL_OFFSETS = [  # points to the right and above, the nearest first
    (dx, dy) for far in range(0, 104, 13) for dy in sorted({-far, far}) for dx in (9 + far // 3, -9 - far // 3)
]

Line = tuple[tuple[float, float], tuple[float, float]]


def plot_cache_comparison(comparison: CacheComparison, path: Path) -> None:
    """Draw the milliseconds per token against the length of the sequence. Raises ConfigError."""
    pyplot = load_pyplot("plot")
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run, label, color in (
        (comparison.uncached, "everything recomputed", PREFILL),
        (comparison.cached, "KV cache", DECODE),
    ):
        tokens = range(comparison.prompt_tokens + 1, comparison.prompt_tokens + len(run.forward_s))
        axes.plot(tokens, [seconds * 1000 for seconds in run.forward_s[1:]], label=label, color=color)
    axes.set(xlabel="tokens in the sequence", ylabel="milliseconds per generated token")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    save_plot(pyplot, figure, path)


def plot_roofline(results: Sequence[ShapeResult], title: str, path: Path) -> None:
    """Draw operations per second against operations per byte, one point per shape and phase, below the roofline.

    Raises ConfigError.
    """
    pyplot = load_pyplot("plot")
    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    points = [
        (str(result.shape), phase.work.intensity, phase.ops_per_s / 1e9, color)
        for result in results
        for phase, color in ((result.prefill, PREFILL), (result.decode, DECODE))
    ]
    limits = _draw_roofline(
        axes, mean_roofline([result.roofline for result in results]), [point[1] for point in points]
    )
    for name, color in (("prefill", PREFILL), ("decode", DECODE)):
        axes.plot(
            [x for _, x, _, c in points if c == color],
            [y for _, _, y, c in points if c == color],
            "o",
            color=color,
            label=name,
        )
    axes.set(xlabel="operations per byte read", ylabel="GOP/s", title=title)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.canvas.draw()  # makes the layout final, so that labels can be placed
    figure.set_layout_engine("none")
    _label_points(axes, points, limits)
    save_plot(pyplot, figure, path)


def _draw_roofline(axes: Any, roofline: Roofline, intensities: Sequence[float]) -> list[Line]:
    """Draw and return the lines: a slope for the bandwidth, a horizontal line for each dtype's peak."""
    bandwidth = roofline.read_bytes_per_s / 1e9
    peaks = {PEAK_NAMES[dtype]: roofline.peak_ops_per_s[dtype] / 1e9 for dtype in DTYPES}
    top = max(peaks.values())
    left, right = min(intensities) / 2.5, max(*intensities, top / bandwidth) * 3
    slope = ((left, left * bandwidth), (top / bandwidth, top))
    levels = [((peak / bandwidth, peak), (right, peak)) for peak in peaks.values()]
    for (x0, y0), (x1, y1) in (slope, *levels):
        axes.loglog([x0, x1], [y0, y1], color=ROOF_COLOR, linewidth=1)
    for name, peak in peaks.items():
        axes.annotate(
            f"{name} {peak:,.0f}", (right, peak), (0, 4), textcoords="offset points", ha="right", color=ROOF_COLOR
        )
    axes.annotate(f"{bandwidth:.1f} GB/s", slope[0], (2, -4), textcoords="offset points", va="top", color=ROOF_COLOR)
    return [slope, *levels]


def _label_points(axes: Any, points: Sequence[tuple[str, float, float, str]], limits: Sequence[Line]) -> None:
    """Put each label at the nearest free offset from its point, with a leader line if that is far away."""
    taken = [axes.get_legend().get_window_extent(), *(text.get_window_extent() for text in axes.texts)]
    taken += [_box(axes, x, y, 7) for _, x, y, _ in points]
    for (x0, y0), (x1, y1) in limits:
        taken += [_box(axes, x0 * (x1 / x0) ** (i / 200), y0 * (y1 / y0) ** (i / 200), 2) for i in range(201)]
    for label, x, y, color in points:
        text = axes.annotate(label, (x, y), LABEL_OFFSETS[0], textcoords="offset points", va="center", color=color)
        for offset in LABEL_OFFSETS:
            text.set(position=offset, ha="left" if offset[0] > 0 else "right")
            if not any(text.get_window_extent().overlaps(box) for box in taken):
                break
        taken.append(text.get_window_extent())
        if text.get_position()[1]:
            axes.annotate(
                "",
                (x, y),
                text.get_position(),
                textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4},
            )


def _box(axes: Any, x: float, y: float, size: float) -> Any:
    """Return a box in pixels around a data point."""
    from matplotlib.transforms import Bbox

    px, py = axes.transData.transform((x, y))
    return Bbox.from_bounds(px - size, py - size, 2 * size, 2 * size)
