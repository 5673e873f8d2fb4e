"""The pictures of a load test: numbers in, inline SVG out. Drawn by matplotlib, the optional extra `plot`.

It must not know requests, runs or HTML. One invariant: no text of a user's gets into a picture, so nothing in it can be
markup; series are told apart by colour and dash, and the page around a picture says whose they are.

Percentiles stand on a probit axis (percentiles of a normal distribution lie at equal distances), so that p99 can be
read as well as p50.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..plotting import load_pyplot
from .svg import GRID, INK, QUIET, drawing

Values = NDArray[np.float64]

ALARM = "#c0392b"
PARTS = {  # of a request's time, in the order in which they pass; Okabe and Ito's colours
    "queue": "#e69f00",
    "prefill": "#56b4e9",
    "decode": "#0072b2",
    "stall": "#d55e00",
    "elsewhere": "#b8bfc8",
}
SINGLE = "#0b6fa4"
DASHES = ((), (6, 2), (2, 1.5), (6, 2, 1.5, 2))  # on and off, in line widths
PERCENTILES = (1, 10, 25, 50, 75, 90, 99, 99.9, 99.99)
PLAIN = "{x:,.10g}"  # ticks, as a str.format
MAX_SAMPLES_MARKED = 90
MAX_CDF_POINTS = 400
SHORTEST_MS = 1e-3  # on an axis
NORMAL = NormalDist()
LOWEST_PLACE = NORMAL.inv_cdf(0.01)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One run of a sweep. Latencies in ms, NaN where there are none."""

    label: str  # its load
    tokens_per_s: float
    ttft_ms: tuple[float, float]  # p50, p99
    tpot_ms: tuple[float, float]
    request_rate: float | None = None
    goodput: float | None = None  # requests per second


@dataclass(frozen=True, slots=True)
class History:
    """One run over time. Bins are a width of seconds from 0 on; server samples have times of their own."""

    bin_s: float
    arrivals: Values  # [bins], requests sent
    errors: Values  # [bins], requests that ended in one
    tokens: Values  # [bins], output tokens
    in_flight: tuple[Values, Values]  # times, requests at and after them
    sampled_s: Values = field(default_factory=lambda: np.empty(0))
    running: Values = field(default_factory=lambda: np.empty(0))  # NaN: not told
    waiting: Values = field(default_factory=lambda: np.empty(0))
    kv_usage: Values = field(default_factory=lambda: np.empty(0))


def series_colours(count: int) -> list[str]:
    """Of runs at rising load: dark to light, the same to a colour-blind eye, dark enough on white."""
    if count == 1:
        return [SINGLE]
    shades = load_pyplot("--report").get_cmap("plasma")(np.linspace(0.0, 0.68, count))
    return [f"#{round(255 * r):02x}{round(255 * g):02x}{round(255 * b):02x}" for r, g, b, _ in shades]


def series_dash(index: int) -> tuple[float, ...]:
    """Of the run at `index`; empty: solid."""
    return DASHES[index % len(DASHES)]


def draw_distribution(title: str, series: Sequence[Values]) -> str:
    """Cumulative distributions, milliseconds on a log axis, one line per run; a run without values has none."""
    with drawing(5.2, 3.3) as picture:
        axes = picture.figure.subplots()
        colours = series_colours(len(series))
        for index, values in enumerate(series):
            if values.size:
                axes.plot(*_cumulative(values), color=colours[index], dashes=series_dash(index))
        _percentile_axis(axes, max(values.size for values in series))
        _milliseconds(axes, "x", np.concatenate(series))
        axes.set_title(title)
    return picture.svg


def draw_curve(points: Sequence[CurvePoint]) -> str:
    """Latency against output tokens per second; with objectives, also goodput against the request rate."""
    with_goodput = [point for point in points if point.goodput is not None and point.request_rate is not None]
    panels = 3 if with_goodput else 2
    with drawing(10.6, 3.6) as picture:
        axes = picture.figure.subplots(1, panels)
        _latency_curve(axes[0], "Time to first token", points, [point.ttft_ms for point in points])
        _latency_curve(axes[1], "Time per output token", points, [point.tpot_ms for point in points])
        if with_goodput:
            _goodput_curve(axes[2], with_goodput)
    return picture.svg


def draw_history(history: History) -> str:
    """Arrivals and errors, tokens, requests and the KV pool over one run's seconds, one above the other."""
    sampled = history.sampled_s.size > 0
    with drawing(10.6, 6.6 if sampled else 5.0) as picture:
        rows = picture.figure.subplots(4 if sampled else 3, 1, sharex=True)
        _arrivals(rows[0], history)
        _steps(rows[1], history, history.tokens / history.bin_s, SINGLE)
        rows[1].set_title("Output tokens per second")
        _in_flight(rows[2], history)
        if sampled:
            rows[3].plot(history.sampled_s, 100 * history.kv_usage, color=SINGLE, **_marks(history))
            rows[3].fill_between(history.sampled_s, 100 * history.kv_usage, color=SINGLE, alpha=0.12, linewidth=0)
            rows[3].set(title="KV pool in use, %", ylim=(0, 104))
        for axes in rows:
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(PLAIN)
            axes.grid(axis="x", visible=False)
        rows[-1].set(xlabel="seconds since the start", xlim=(0, history.bin_s * history.tokens.size))
    return picture.svg


def draw_parts(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Where time went: per row, the mean milliseconds of each of PARTS, beside each other."""
    with drawing(10.6, 0.75 + 0.36 * len(rows)) as picture:
        axes = picture.figure.subplots()
        left = np.zeros(len(rows))
        places = np.arange(len(rows))
        for part, colour in PARTS.items():
            widths = np.array([parts.get(part, 0.0) for _, parts in rows])
            axes.barh(places, widths, left=left, color=colour, height=0.62, edgecolor="white", linewidth=0.6)
            left += widths
        for place, total in zip(places, left, strict=True):
            axes.annotate(
                f"{total:,.0f}" if total >= 10 else f"{total:.1f}",
                (total, place),
                (5, 0),
                textcoords="offset points",
                va="center",
                color=QUIET,
            )
        axes.set_yticks(places, [label for label, _ in rows], color=INK)
        axes.xaxis.set_major_formatter(PLAIN)
        axes.set(xlabel="milliseconds, mean", xlim=(0, 1.08 * max(left.max(), 1e-3)))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
    return picture.svg


# Axes


def _cumulative(values: Values) -> tuple[Values, Values]:
    """Values from p1 on, as far as so many can tell, and their places on the probit axis."""
    ordered = np.sort(np.maximum(values, SHORTEST_MS))
    places = np.linspace(LOWEST_PLACE, _highest_place(ordered.size), MAX_CDF_POINTS)
    shares = np.array([NORMAL.cdf(place) for place in places])
    return ordered[np.minimum((shares * ordered.size).astype(int), ordered.size - 1)], places


def _highest_place(count: int) -> float:
    return max(NORMAL.inv_cdf(1 - 0.5 / max(count, 2)), NORMAL.inv_cdf(0.9))


def _percentile_axis(axes: Any, count: int) -> None:
    highest = _highest_place(count)
    places = {percent: NORMAL.inv_cdf(percent / 100) for percent in PERCENTILES}
    shown = {percent: place for percent, place in places.items() if place <= highest}
    axes.set_yticks(list(shown.values()), [f"p{percent:g}" for percent in shown])
    axes.set_ylim(LOWEST_PLACE, highest + 0.1)
    axes.axhline(0, color=GRID, linewidth=1.8, zorder=0)  # p50


def _milliseconds(axes: Any, which: str, values: Values) -> None:
    """A log axis with plain numbers at round steps; at least a factor of four wide."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    known = np.maximum(values[np.isfinite(values)], SHORTEST_MS)
    if not known.size:
        getattr(axes, f"{which}axis").set_major_locator(NullLocator())
        return
    low, high = float(known.min()), float(known.max())
    middle, half = (low * high) ** 0.5, max((high / low) ** 0.5 * 1.12, 2.0)
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
    fastest = int(speed.argmax())  # nothing is right of it
    for name, line, side in (("p99", p99, "bottom"), ("p50", p50, "top")):
        axes.annotate(name, (speed[fastest], line[fastest]), (7, 0), textcoords="offset points", va=side, weight="bold")
    for point, height in zip(points, p99, strict=True):
        axes.annotate(
            point.label,
            (point.tokens_per_s, height),
            (0, 6),
            textcoords="offset points",
            ha="center",
            color=QUIET,
            size=8,
            bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.5},
        )
    axes.set(title=title, xlabel="output tokens per second", xlim=(0, 1.16 * max(speed.max(), 1e-3)))
    axes.xaxis.set_major_formatter(PLAIN)


def _goodput_curve(axes: Any, points: Sequence[CurvePoint]) -> None:
    rates = np.array([point.request_rate for point in points], np.float64)
    goodput = np.array([point.goodput for point in points], np.float64)
    finite = rates[np.isfinite(rates)]
    top = max(finite.max() if finite.size else 0.0, goodput.max())
    axes.plot([0, top], [0, top], color=QUIET, linewidth=1, dashes=DASHES[2])
    axes.annotate("all that is asked", (top, top), (-4, 2), textcoords="offset points", ha="right", color=QUIET, size=8)
    axes.plot(rates, goodput, "o", color=SINGLE, linestyle="solid", markersize=5)
    axes.set(title="Goodput", xlabel="requests per second asked", ylabel="requests per second within limits")
    axes.set_xlim(0, 1.08 * top or 1)
    axes.set_ylim(0, 1.08 * top or 1)


def _arrivals(axes: Any, history: History) -> None:
    _steps(axes, history, history.arrivals / history.bin_s, SINGLE)
    axes.set_title("Requests sent per second")
    if history.errors.any():
        _steps(axes, history, history.errors / history.bin_s, ALARM)
        axes.set_title("Requests sent per second, and errors (red, hatched)")
        axes.patches[-1].set(hatch="////", alpha=0.6, facecolor="none", edgecolor=ALARM)


def _steps(axes: Any, history: History, heights: Values, colour: str) -> None:
    edges = history.bin_s * np.arange(heights.size + 1)
    axes.stairs(heights, edges, color=colour, fill=True, alpha=0.14)
    axes.stairs(heights, edges, color=colour, linewidth=1.4)


def _in_flight(axes: Any, history: History) -> None:
    times, counts = history.in_flight
    axes.step(times, counts, where="post", color=INK, linewidth=1.4)
    named = ["at the client"]
    for values, colour, dash, name in (
        (history.running, PARTS["decode"], DASHES[1], "running"),
        (history.waiting, PARTS["queue"], DASHES[2], "waiting"),
    ):
        if np.isfinite(values).any():
            axes.plot(history.sampled_s, values, color=colour, dashes=dash, **_marks(history))
            named.append(name)
    axes.set_title("Requests in flight")
    if len(named) > 1:
        axes.legend(
            axes.lines, named, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.98), fontsize=8.5
        )


def _marks(history: History) -> dict[str, Any]:
    """Few samples are shown as such: what lies between them nobody knows."""
    return {"marker": "o", "markersize": 3.5} if history.sampled_s.size <= MAX_SAMPLES_MARKED else {}
