"""Draw the charts of a load test as inline SVG with matplotlib, the optional extra `plot`.

Text of users or servers must not appear in a picture, where it would not be escaped. Runs differ by color and dash, and
the page has the legend. Percentiles are drawn on a probit axis, on which a normal distribution is a straight line, so
that p99 is as easy to read as p50.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from ..plotting import GRID, INK, QUIET_COLOR, load_pyplot, svg_figure
from .latency import LATENCY_PARTS, Values
from .timeline import RunTimeline

OPTION = "report"  # the option that needs matplotlib

ALARM = "#c0392b"
LATENCY_COLORS = ("#e69f00", "#56b4e9", "#0072b2", "#d55e00", "#b8bfc8")  # palette of Okabe and Ito
PART_COLORS = dict(zip(LATENCY_PARTS, LATENCY_COLORS, strict=True))
SINGLE = "#0b6fa4"
DASHES = ((), (6, 2), (2, 1.5), (6, 2, 1.5, 2))  # lengths on and off, in line widths
PERCENTILES = (1, 10, 25, 50, 75, 90, 99, 99.9, 99.99)
PLAIN_TICK = "{x:,.10g}"  # format of ticks
MAX_SAMPLES_MARKED = 90
MAX_CDF_POINTS = 400
MIN_MS = 1e-3  # least value of an axis
NORMAL = NormalDist()
LOWEST_PROBIT = NORMAL.inv_cdf(0.01)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One run of a sweep. Latencies in ms, NaN where there are none."""

    label: str  # the load of the run
    tokens_per_s: float
    ttft_ms: tuple[float, float]  # p50, p99
    tpot_ms: tuple[float, float]
    request_rate: float | None = None
    goodput: float | None = None  # requests per second


def series_colors(count: int) -> list[str]:
    """Return colors for runs at rising load: dark to light, safe for color-blind readers, dark enough on white."""
    if count == 1:
        return [SINGLE]
    shades = load_pyplot(OPTION).get_cmap("plasma")(np.linspace(0.0, 0.68, count))
    return [f"#{round(255 * r):02x}{round(255 * g):02x}{round(255 * b):02x}" for r, g, b, _ in shades]


def series_dash(index: int) -> tuple[float, ...]:
    """Return the dash pattern of the run at `index`; empty means solid."""
    return DASHES[index % len(DASHES)]


def draw_distribution(title: str, series: Sequence[Values]) -> str:
    """Draw cumulative distributions, one line per run that has values, with milliseconds on a log axis."""
    with svg_figure(OPTION, 5.2, 3.3) as picture:
        axes = picture.figure.subplots()
        colors = series_colors(len(series))
        for index, values in enumerate(series):
            if values.size:
                axes.plot(*_cumulative(values), color=colors[index], dashes=series_dash(index))
        _percentile_axis(axes, max(values.size for values in series))
        _milliseconds(axes, "x", np.concatenate(series))
        axes.set_title(title)
    return picture.svg


def draw_curve(points: Sequence[CurvePoint]) -> str:
    """Draw latency against output tokens per second; with objectives, also goodput against the request rate."""
    with_goodput = [point for point in points if point.goodput is not None and point.request_rate is not None]
    panels = 3 if with_goodput else 2
    with svg_figure(OPTION, 10.6, 3.6) as picture:
        axes = picture.figure.subplots(1, panels)
        _latency_curve(axes[0], "Time to first token", points, [point.ttft_ms for point in points])
        _latency_curve(axes[1], "Time per output token", points, [point.tpot_ms for point in points])
        if with_goodput:
            _goodput_curve(axes[2], with_goodput)
    return picture.svg


def draw_timeline(timeline: RunTimeline) -> str:
    """Draw a run over time: arrivals and errors, output tokens, requests in flight, KV pool usage."""
    sampled = timeline.sampled_s.size > 0
    with svg_figure(OPTION, 10.6, 6.6 if sampled else 5.0) as picture:
        rows = picture.figure.subplots(4 if sampled else 3, 1, sharex=True)
        _arrivals(rows[0], timeline)
        _steps(rows[1], timeline, timeline.tokens / timeline.bin_s, SINGLE)
        rows[1].set_title("Output tokens per second")
        _in_flight(rows[2], timeline)
        if sampled:
            rows[3].plot(timeline.sampled_s, 100 * timeline.kv_usage, color=SINGLE, **_marks(timeline))
            rows[3].fill_between(timeline.sampled_s, 100 * timeline.kv_usage, color=SINGLE, alpha=0.12, linewidth=0)
            rows[3].set(title="KV pool in use, %", ylim=(0, 104))
        for axes in rows:
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(PLAIN_TICK)
            axes.grid(axis="x", visible=False)
        rows[-1].set(xlabel="seconds since the start", xlim=(0, timeline.bin_s * timeline.tokens.size))
    return picture.svg


def draw_parts(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Draw the division of the requests' time: a bar per row, with the mean milliseconds of each of LATENCY_PARTS."""
    with svg_figure(OPTION, 10.6, 0.75 + 0.36 * len(rows)) as picture:
        axes = picture.figure.subplots()
        left = np.zeros(len(rows))
        rows_y = np.arange(len(rows))
        for part, color in PART_COLORS.items():
            widths = np.array([parts.get(part, 0.0) for _, parts in rows])
            axes.barh(rows_y, widths, left=left, color=color, height=0.62, edgecolor="white", linewidth=0.6)
            left += widths
        for y, total in zip(rows_y, left, strict=True):
            axes.annotate(
                f"{total:,.0f}" if total >= 10 else f"{total:.1f}",
                (total, y),
                (5, 0),
                textcoords="offset points",
                va="center",
                color=QUIET_COLOR,
            )
        axes.set_yticks(rows_y, [label for label, _ in rows], color=INK)
        axes.xaxis.set_major_formatter(PLAIN_TICK)
        axes.set(xlabel="milliseconds, mean", xlim=(0, 1.08 * max(left.max(), 1e-3)))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
    return picture.svg


# Axes


def _cumulative(values: Values) -> tuple[Values, Values]:
    """Return values and their probits, from p1 to the highest percentile that this number of values supports."""
    ordered = np.sort(np.maximum(values, MIN_MS))
    probits = np.linspace(LOWEST_PROBIT, _highest_probit(ordered.size), MAX_CDF_POINTS)
    shares = np.array([NORMAL.cdf(probit) for probit in probits])
    return ordered[np.minimum((shares * ordered.size).astype(int), ordered.size - 1)], probits


def _highest_probit(count: int) -> float:
    return max(NORMAL.inv_cdf(1 - 0.5 / max(count, 2)), NORMAL.inv_cdf(0.9))


def _percentile_axis(axes: Any, count: int) -> None:
    highest = _highest_probit(count)
    probits = {percent: NORMAL.inv_cdf(percent / 100) for percent in PERCENTILES}
    shown = {percent: probit for percent, probit in probits.items() if probit <= highest}
    axes.set_yticks(list(shown.values()), [f"p{percent:g}" for percent in shown])
    axes.set_ylim(LOWEST_PROBIT, highest + 0.1)
    axes.axhline(0, color=GRID, linewidth=1.8, zorder=0)  # p50


def _milliseconds(axes: Any, which: str, values: Values) -> None:
    """Make the `which` axis logarithmic in milliseconds, with round ticks, at least a factor of four wide."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    known = np.maximum(values[np.isfinite(values)], MIN_MS)
    if not known.size:
        getattr(axes, f"{which}axis").set_major_locator(NullLocator())
        return
    low, high = float(known.min()), float(known.max())
    middle = (low * high) ** 0.5
    half = max((high / low) ** 0.5 * 1.12, 2.0)
    low, high = middle / half, middle * half
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    steps = (1, 1.5, 2, 3, 4, 5, 7) if high / low < 8 else (1, 2, 5) if high / low < 2e3 else (1,)
    axis = getattr(axes, f"{which}axis")
    getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}lim")(low, high)
    axis.set_major_locator(FixedLocator([step * 10.0**decade for decade in decades for step in steps]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    getattr(axes, f"set_{which}label")("milliseconds")


def _latency_curve(
    axes: Any, title: str, points: Sequence[CurvePoint], latencies: Sequence[tuple[float, float]]
) -> None:
    speed = np.array([point.tokens_per_s for point in points])
    p50, p99 = (np.array([pair[index] for pair in latencies]) for index in (0, 1))
    axes.fill_between(speed, p50, p99, color=SINGLE, alpha=0.08, linewidth=0)
    axes.plot(speed, p99, "o", color=SINGLE, dashes=DASHES[1], markerfacecolor="white", markersize=5)
    axes.plot(speed, p50, "o", color=SINGLE, linestyle="solid", markersize=5)
    _milliseconds(axes, "y", np.concatenate([p50, p99]))
    fastest = int(speed.argmax())  # the rightmost point
    for name, line, side in (("p99", p99, "bottom"), ("p50", p50, "top")):
        axes.annotate(name, (speed[fastest], line[fastest]), (7, 0), textcoords="offset points", va=side, weight="bold")
    for point, height in zip(points, p99, strict=True):
        axes.annotate(
            point.label,
            (point.tokens_per_s, height),
            (0, 6),
            textcoords="offset points",
            ha="center",
            color=QUIET_COLOR,
            size=8,
            bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.5},
        )
    axes.set(title=title, xlabel="output tokens per second", xlim=(0, 1.16 * max(speed.max(), 1e-3)))
    axes.xaxis.set_major_formatter(PLAIN_TICK)


def _goodput_curve(axes: Any, points: Sequence[CurvePoint]) -> None:
    rates = np.array([point.request_rate for point in points], np.float64)
    goodput = np.array([point.goodput for point in points], np.float64)
    finite = rates[np.isfinite(rates)]
    top = max(finite.max() if finite.size else 0.0, goodput.max())
    axes.plot([0, top], [0, top], color=QUIET_COLOR, linewidth=1, dashes=DASHES[2])
    axes.annotate(
        "every request within limits",
        (top, top),
        (-4, 2),
        textcoords="offset points",
        ha="right",
        color=QUIET_COLOR,
        size=8,
    )
    axes.plot(rates, goodput, "o", color=SINGLE, linestyle="solid", markersize=5)
    axes.set(title="Goodput", xlabel="requests per second sent", ylabel="requests per second within limits")
    axes.set_xlim(0, 1.08 * top or 1)
    axes.set_ylim(0, 1.08 * top or 1)


def _arrivals(axes: Any, timeline: RunTimeline) -> None:
    _steps(axes, timeline, timeline.arrivals / timeline.bin_s, SINGLE)
    axes.set_title("Requests sent per second")
    if timeline.errors.any():
        _steps(axes, timeline, timeline.errors / timeline.bin_s, ALARM)
        axes.set_title("Requests sent per second, and errors (red, hatched)")
        axes.patches[-1].set(hatch="////", alpha=0.6, facecolor="none", edgecolor=ALARM)


def _steps(axes: Any, timeline: RunTimeline, heights: Values, color: str) -> None:
    edges = timeline.bin_s * np.arange(heights.size + 1)
    axes.stairs(heights, edges, color=color, fill=True, alpha=0.14)
    axes.stairs(heights, edges, color=color, linewidth=1.4)


def _in_flight(axes: Any, timeline: RunTimeline) -> None:
    times, counts = timeline.in_flight
    axes.step(times, counts, where="post", color=INK, linewidth=1.4)
    named = ["at the client"]
    for values, color, dash, name in (
        (timeline.running, PART_COLORS["decode"], DASHES[1], "running"),
        (timeline.waiting, PART_COLORS["queue"], DASHES[2], "waiting"),
    ):
        if np.isfinite(values).any():
            axes.plot(timeline.sampled_s, values, color=color, dashes=dash, **_marks(timeline))
            named.append(name)
    axes.set_title("Requests in flight")
    if len(named) > 1:
        axes.legend(
            axes.lines, named, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.98), fontsize=8.5
        )


def _marks(timeline: RunTimeline) -> dict[str, Any]:
    """Return markers for the samples, if they are few: the line between two samples is only interpolated."""
    return {"marker": "o", "markersize": 3.5} if timeline.sampled_s.size <= MAX_SAMPLES_MARKED else {}
