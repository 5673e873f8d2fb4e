"""Write the report of a load test: one self-contained HTML page with inline charts, without scripts or other files.

Text from options, servers and datasets must appear as text, never as markup: the template escapes everything except
the charts. Every chart has its figures in words as its alternative text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ...common.errors import ConfigError
from ..percentiles import percentile
from ..plotting import load_pyplot
from .charts import (
    OPTION,
    PART_COLORS,
    CurvePoint,
    draw_curve,
    draw_distribution,
    draw_parts,
    draw_timeline,
    series_colors,
    series_dash,
)
from .latency import Values, latencies_ms, parts_by_band, parts_ms
from .records import RequestRecord
from .results import LoadTestRun
from .timeline import run_timeline

TEMPLATE = Path(__file__).with_name("report.html")
MAX_SHOWN_CHARACTERS = 240
MAX_LATE_MS = 1.0  # mean delay of the load generator above which the page has a note

LATENCIES = {
    "ttft": ("Time to first token", "from sending a request to its first token"),
    "tpot": ("Time per output token", "mean over the tokens of a request after the first"),
    "itl": ("Inter-token latency", "between one chunk of the answer and the next"),
    "e2el": ("End-to-end latency", "from sending a request to its last token"),
    "schedule_delay": (
        "Schedule delay",
        "from when a request was due until it was sent, including the wait for a limit of concurrent requests",
    ),
}
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


@dataclass(frozen=True, slots=True)
class Chart:
    svg: Markup
    alternative: str  # the figures in words, for screen readers


@dataclass(frozen=True, slots=True)
class RunView:
    """The data of one run on the page."""

    label: str
    color: str
    dash: str  # the line's stroke-dasharray
    headline: str
    figures: dict[str, str]  # column -> cell of the table of all runs
    latencies: list[tuple[str, list[str]]]  # cells under STATISTICS
    timeline: Chart
    parts: Chart | None
    errors: list[tuple[str, int, str]]  # code, number of requests, first message
    notes: list[str]


def check_report(path: Path) -> None:
    """Check, before the run, that the report can be written. Raises MissingDependency or ConfigError."""
    load_pyplot(OPTION)
    if path.suffix not in (".html", ".htm"):
        raise ConfigError(f"`report` {path}: the name must end in .html")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"`report` {path} cannot be written: {path.parent} is not a folder")


def write_report(path: Path, runs: Sequence[LoadTestRun]) -> None:
    """Write the report of `runs`. Raises MissingDependency, or ConfigError where `path` cannot be written."""
    text = render_report(runs)
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"`report` {path} cannot be written: {error.strerror or error}") from error


def render_report(runs: Sequence[LoadTestRun]) -> str:
    """Return the page for one run, or for the runs of a sweep in order of load. Raises MissingDependency."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    latencies = [latencies_ms(run.records) for run in runs]
    colors = series_colors(len(runs))
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        title=f"Load test of {_model(runs[0])}",
        about=_about(runs),
        statistics=STATISTICS,
        runs=[_view(run, index, colors[index], latencies[index]) for index, run in enumerate(runs)],
        curve=_curve(runs, latencies) if len(runs) > 1 else None,
        tiles=_tiles(runs[0], latencies[0]),
        has_goodput=any(_goodput(run) is not None for run in runs),
        distributions=[_distribution(name, runs, latencies) for name in LATENCIES],
        parts=_parts([(_load(run), each) for run in runs if (each := parts_ms(run.records))])
        if len(runs) > 1
        else None,
        part_colors=PART_COLORS,
    )


# The header


def _model(run: LoadTestRun) -> str:
    return str(run.summary.get("model_id") or "a server")


def _about(runs: Sequence[LoadTestRun]) -> list[tuple[str, str]]:
    """Return the settings that all runs have in common, and the server's description of itself."""
    settings = [_settings(run) for run in runs]
    return [(name, value) for name, value in settings[0].items() if all(each.get(name) == value for each in settings)]


def _settings(run: LoadTestRun) -> dict[str, str]:
    summary = run.summary
    own = run.summary.get("x_quire", {})
    server = run.metrics.server if run.metrics else {}
    settings = {
        "date": summary.get("date"),
        "backend": summary.get("backend"),
        "dataset": own.get("dataset"),
        "requests": summary.get("num_prompts"),
        "arrivals": _arrivals(summary),
        "max concurrency": summary.get("max_concurrency"),
        "seed": own.get("seed"),
        "server version": server.get("version"),
        "ISA level": server.get("isa"),
        "threads": server.get("threads"),
    }
    return {name: str(value) for name, value in settings.items() if value not in (None, "")}


def _arrivals(summary: dict[str, Any]) -> str | None:
    """Describe the times at which requests were sent."""
    rate = summary.get("request_rate")
    if rate is None:
        return None
    if math.isinf(float(rate)):
        return "all at once" if summary.get("max_concurrency") is None else "each when another one ends"
    return f"{float(rate):g} per second, burstiness {summary.get('burstiness', 1.0):g}"


def _tiles(run: LoadTestRun, latencies: dict[str, Values]) -> list[tuple[str, str]]:
    """Return the headline figures of a single run."""
    summary = run.summary
    goodput = _goodput(run)
    return [
        ("output tokens per second", f"{summary['output_throughput']:,.1f}"),
        ("requests per second", f"{summary['request_throughput']:,.2f}"),
        *([] if goodput is None else [("requests per second within limits", f"{goodput:,.2f}")]),
        ("TTFT p50, ms", _ms(percentile(latencies["ttft"], 50))),
        ("TTFT p99, ms", _ms(percentile(latencies["ttft"], 99))),
        ("TPOT p50, ms", _ms(percentile(latencies["tpot"], 50))),
        ("failed requests", f"{summary['failed']:,}"),
    ]


# One run


def _view(run: LoadTestRun, index: int, color: str, latencies: dict[str, Values]) -> RunView:
    return RunView(
        label=run.label,
        color=color,
        dash=" ".join(f"{2 * length:g}" for length in series_dash(index)),
        headline=f"{run.summary['output_throughput']:,.1f} output tokens/s, {run.summary['failed']:,} failed",
        figures=_figures(run, latencies),
        latencies=[(title, _statistics(latencies[name])) for name, (title, _) in LATENCIES.items()],
        timeline=_timeline(run),
        parts=_parts(parts_by_band(run.records)),
        errors=_errors(run.records),
        notes=_notes(run),
    )


def _figures(run: LoadTestRun, latencies: dict[str, Values]) -> dict[str, str]:
    summary = run.summary
    goodput = _goodput(run)
    figures = {
        "finished": f"{summary['completed']:,}",
        "failed": f"{summary['failed']:,}",
        "cancelled": f"{sum(record.cancelled for record in run.records):,}",
        "seconds": f"{summary['duration']:,.1f}",
        "requests/s": f"{summary['request_throughput']:,.2f}",
    }
    if goodput is not None:
        figures["within limits"] = f"{goodput:,.2f}"
    figures["output tokens/s"] = f"{summary['output_throughput']:,.1f}"
    for name, percent in (
        ("ttft", 50),
        ("ttft", 99),
        ("tpot", 50),
        ("tpot", 99),
        ("itl", 99),
        ("e2el", 50),
        ("e2el", 99),
    ):
        figures[f"{name.upper()} p{percent}"] = _ms(percentile(latencies[name], percent))
    return figures


def _statistics(values: Values) -> list[str]:
    if not values.size:
        return ["–"] * len(STATISTICS)
    percentiles = (percentile(values, percent) for percent in (50, 90, 95, 99))
    return [_ms(value) for value in (float(values.mean()), *percentiles, float(values.max()))]


def _timeline(run: LoadTestRun) -> Chart:
    timeline = run_timeline(run)
    counts = timeline.in_flight[1]
    words = [f"{run.label} over {timeline.bin_s * timeline.tokens.size:.3g} s:"]
    words.append(f"at most {timeline.tokens.max() / timeline.bin_s:,.0f} output tokens per second")
    words.append(f"and {counts.max(initial=0):,.0f} requests in flight")
    words.append(f"{timeline.errors.sum():,.0f} errors")
    if np.isfinite(timeline.waiting).any():
        words.append(f"at most {np.nanmax(timeline.waiting):,.0f} requests waiting at the server")
    if np.isfinite(timeline.kv_usage).any():
        words.append(f"at most {np.nanmax(timeline.kv_usage):.0%} of the KV pool in use")
    return Chart(Markup(draw_timeline(timeline)), f"{words[0]} {', '.join(words[1:])}.")


def _errors(records: Sequence[RequestRecord]) -> list[tuple[str, int, str]]:
    """Return the errors by code, the most frequent first, each with its first message."""
    failed = [record for record in records if record.error is not None]
    counts = Counter(record.error_code or "UNKNOWN" for record in failed)
    first = {record.error_code or "UNKNOWN": record.error or "" for record in reversed(failed)}
    return [(code, count, first[code][:MAX_SHOWN_CHARACTERS]) for code, count in counts.most_common()]


def _notes(run: LoadTestRun) -> list[str]:
    notes = []
    late_ms = run.summary.get("x_quire", {}).get("generator_delay_ms", {}).get("mean", 0.0)
    if late_ms > MAX_LATE_MS:
        notes.append(
            f"The load generator was late, by {_ms(late_ms)} ms per request on average: it could not keep up, so the "
            "server met another load than was wanted."
        )
    if run.metrics and run.metrics.failures:
        notes.append(f"{run.metrics.failures:,} scrapes of the server's metrics failed.")
    slow = sum(record.slow_reader for record in run.records)
    if slow:
        notes.append(f"{slow:,} requests were read slowly on purpose; they are not in the latencies.")
    return notes


# Charts of all runs


def _distribution(name: str, runs: Sequence[LoadTestRun], latencies: Sequence[dict[str, Values]]) -> tuple[str, Chart]:
    """Return the meaning of a latency and the chart of its distribution."""
    title, meaning = LATENCIES[name]
    series = [each[name] for each in latencies]
    words = (
        f"{run.label}: p50 {_ms(percentile(values, 50))}, p99 {_ms(percentile(values, 99))} ms"
        for run, values in zip(runs, series, strict=True)
    )
    chart = Chart(Markup(draw_distribution(title, series)), f"{title}, distribution. {'; '.join(words)}.")
    return f"{meaning[0].upper()}{meaning[1:]}.", chart


def _curve(runs: Sequence[LoadTestRun], latencies: Sequence[dict[str, Values]]) -> Chart:
    points = [
        CurvePoint(
            label=_load(run),
            tokens_per_s=run.summary["output_throughput"],
            ttft_ms=(percentile(each["ttft"], 50), percentile(each["ttft"], 99)),
            tpot_ms=(percentile(each["tpot"], 50), percentile(each["tpot"], 99)),
            request_rate=_rate(run),
            goodput=_goodput(run),
        )
        for run, each in zip(runs, latencies, strict=True)
    ]
    words = (
        f"at {point.label}: {point.tokens_per_s:,.1f} output tokens per second, TTFT p50 {_ms(point.ttft_ms[0])} and "
        f"p99 {_ms(point.ttft_ms[1])} ms, TPOT p50 {_ms(point.tpot_ms[0])} and p99 {_ms(point.tpot_ms[1])} ms"
        for point in points
    )
    return Chart(Markup(draw_curve(points)), f"Latency against throughput. {'; '.join(words)}.")


def _load(run: LoadTestRun) -> str:
    """Return the run's load as a label for charts. The run's own label is not used, since it may hold any text."""
    rate = _rate(run)
    if rate is not None and (math.isfinite(rate) or run.summary.get("max_concurrency") is None):
        return f"{rate:g}/s" if math.isfinite(rate) else "all at once"
    return f"{float(run.summary['max_concurrency']):g}"


def _rate(run: LoadTestRun) -> float | None:
    rate = run.summary.get("request_rate")  # infinity is the text "inf", as in vLLM
    return None if rate is None else float(rate)


def _goodput(run: LoadTestRun) -> float | None:
    """Return the requests per second within every limit. None: no limits were given."""
    goodput: float | None = run.summary.get("request_goodput")
    return goodput


def _parts(rows: Sequence[tuple[str, dict[str, float]]]) -> Chart | None:
    if not rows:
        return None
    words = (f"{label}: {', '.join(f'{part} {_ms(ms)}' for part, ms in parts.items())} ms" for label, parts in rows)
    return Chart(Markup(draw_parts(rows)), f"Where time went. {'; '.join(words)}.")


# Numbers


def _ms(value: float) -> str:
    """Format milliseconds with about three digits; a dash where there is no value."""
    if not math.isfinite(value):
        return "–"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"
