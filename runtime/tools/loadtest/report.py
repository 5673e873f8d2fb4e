"""A load test as one page: self-contained HTML, its pictures inline, nothing loaded from anywhere and no script.

It must not measure. One invariant: whatever was said by flags, servers or data sets appears as text, never as markup
(the template escapes; only our own pictures are exempt), and every picture has its figures in words beside it.
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
from ..plotting import load_pyplot
from .charts import (
    PARTS,
    CurvePoint,
    Values,
    draw_curve,
    draw_distribution,
    draw_history,
    draw_parts,
    series_colours,
    series_dash,
)
from .record import RequestRecord
from .run import Run
from .series import history, latencies_ms, parts_by_band, parts_ms

TEMPLATE = Path(__file__).with_name("report.html")
MAX_MESSAGE_CHARACTERS = 240
MAX_LATE_MS = 1.0  # that a generator of load may be without a word

LATENCIES = {
    "ttft": ("Time to first token", "from sending a request to its first token"),
    "tpot": ("Time per output token", "a request's mean after its first token"),
    "itl": ("Inter-token latency", "between one piece of the answer and the next"),
    "e2el": ("End-to-end latency", "from sending a request to its last token"),
    "schedule_delay": (
        "Schedule delay",
        "from when a request was due until it was sent, waiting for a place among the most at a time included",
    ),
}
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


@dataclass(frozen=True, slots=True)
class Chart:
    svg: Markup
    alternative: str  # what a reader who does not see it is told


@dataclass(frozen=True, slots=True)
class RunView:
    """What the page says of one run."""

    label: str
    colour: str
    dash: str  # of its line, as SVG writes it
    headline: str
    figures: dict[str, str]  # its row of the table, by column
    latencies: list[tuple[str, list[str]]]  # cells under STATISTICS
    history: Chart
    parts: Chart | None
    errors: list[tuple[str, int, str]]  # code, how many, one's message
    notes: list[str]


def check_report(path: Path) -> None:
    """Before anything is run. Raises MissingDependency, or ConfigError where `path` cannot be written."""
    load_pyplot("--report")
    if path.suffix not in (".html", ".htm"):
        raise ConfigError(f"--report {path}: the name must end in .html")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--report {path} cannot be written: {path.parent} is not a folder")


def write_report(path: Path, runs: Sequence[Run]) -> None:
    """Raises MissingDependency, or ConfigError where `path` cannot be written."""
    text = render_report(runs)
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"--report {path} cannot be written: {error.strerror or error}") from error


def render_report(runs: Sequence[Run]) -> str:
    """The page of at least one run; several are the points of one sweep, in order of load. Raises MissingDependency."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    latencies = [latencies_ms(run.records) for run in runs]
    colours = series_colours(len(runs))
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        title=f"Load test of {_model(runs[0])}",
        about=_about(runs),
        statistics=STATISTICS,
        runs=[_view(run, index, colours[index], latencies[index]) for index, run in enumerate(runs)],
        curve=_curve(runs, latencies) if len(runs) > 1 else None,
        tiles=_tiles(runs[0], latencies[0]),
        has_goodput=any(_goodput(run) is not None for run in runs),
        distributions=[_distribution(name, runs, latencies) for name in LATENCIES],
        parts=_parts([(_load(run), each) for run in runs if (each := parts_ms(run.records))])
        if len(runs) > 1
        else None,
        part_colours=PARTS,
    )


# The header


def _model(run: Run) -> str:
    return str(run.summary.get("model_id") or "a server")


def _about(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What was run, as far as all runs have it in common, and what their server said of itself."""
    told = [_settings(run) for run in runs]
    return [(name, value) for name, value in told[0].items() if all(each.get(name) == value for each in told)]


def _settings(run: Run) -> dict[str, str]:
    summary, own = run.summary, run.summary.get("x_quire", {})
    server = run.timeline.server if run.timeline else {}
    settings = {
        "date": summary.get("date"),
        "server": own.get("address"),
        "backend": summary.get("backend"),
        "data set": own.get("dataset"),
        "requests": summary.get("num_prompts"),
        "sent": _sent(summary),
        "at most at a time": summary.get("max_concurrency"),
        "seed": own.get("seed"),
        "server version": server.get("version"),
        "ISA level": server.get("isa"),
        "threads": server.get("threads"),
    }
    return {name: str(value) for name, value in settings.items() if value not in (None, "")}


def _sent(summary: dict[str, Any]) -> str | None:
    """When requests were sent, in words."""
    rate = summary.get("request_rate")
    if rate is None:
        return None
    if math.isinf(float(rate)):
        return "all at once" if summary.get("max_concurrency") is None else "each when another ends"
    return f"{float(rate):g} per second, burstiness {summary.get('burstiness', 1.0):g}"


def _tiles(run: Run, latencies: dict[str, Values]) -> list[tuple[str, str]]:
    """What a reader asks first of a single run."""
    summary, goodput = run.summary, _goodput(run)
    return [
        ("output tokens per second", f"{summary['output_throughput']:,.1f}"),
        ("requests per second", f"{summary['request_throughput']:,.2f}"),
        *([] if goodput is None else [("of those within limits", f"{goodput:,.2f}")]),
        ("TTFT p50, ms", _ms(_percentile(latencies["ttft"], 50))),
        ("TTFT p99, ms", _ms(_percentile(latencies["ttft"], 99))),
        ("TPOT p50, ms", _ms(_percentile(latencies["tpot"], 50))),
        ("failed requests", f"{summary['failed']:,}"),
    ]


# One run


def _view(run: Run, index: int, colour: str, latencies: dict[str, Values]) -> RunView:
    return RunView(
        label=run.label,
        colour=colour,
        dash=" ".join(f"{2 * length:g}" for length in series_dash(index)),
        headline=f"{run.summary['output_throughput']:,.1f} output tokens/s, {run.summary['failed']:,} failed",
        figures=_figures(run, latencies),
        latencies=[(title, _statistics(latencies[name])) for name, (title, _) in LATENCIES.items()],
        history=_history(run),
        parts=_parts(parts_by_band(run.records)),
        errors=_errors(run.records),
        notes=_notes(run),
    )


def _figures(run: Run, latencies: dict[str, Values]) -> dict[str, str]:
    summary, goodput = run.summary, _goodput(run)
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
        figures[f"{name.upper()} p{percent}"] = _ms(_percentile(latencies[name], percent))
    return figures


def _statistics(values: Values) -> list[str]:
    if not values.size:
        return ["–"] * len(STATISTICS)
    percentiles = (_percentile(values, percent) for percent in (50, 90, 95, 99))
    return [_ms(value) for value in (float(values.mean()), *percentiles, float(values.max()))]


def _history(run: Run) -> Chart:
    seen = history(run)
    counts = seen.in_flight[1]
    told = [f"{run.label} over {seen.bin_s * seen.tokens.size:.3g} s:"]
    told.append(f"at most {seen.tokens.max() / seen.bin_s:,.0f} output tokens per second")
    told.append(f"and {counts.max(initial=0):,.0f} requests in flight")
    told.append(f"{seen.errors.sum():,.0f} errors")
    if np.isfinite(seen.waiting).any():
        told.append(f"at most {np.nanmax(seen.waiting):,.0f} requests waiting at the server")
    if np.isfinite(seen.kv_usage).any():
        told.append(f"at most {np.nanmax(seen.kv_usage):.0%} of the KV pool in use")
    return Chart(Markup(draw_history(seen)), f"{told[0]} {', '.join(told[1:])}.")


def _errors(records: Sequence[RequestRecord]) -> list[tuple[str, int, str]]:
    """Most frequent first; the message is the first one's."""
    failed = [record for record in records if record.error is not None]
    counts = Counter(record.error_code or "UNKNOWN" for record in failed)
    first = {record.error_code or "UNKNOWN": record.error or "" for record in reversed(failed)}
    return [(code, count, first[code][:MAX_MESSAGE_CHARACTERS]) for code, count in counts.most_common()]


def _notes(run: Run) -> list[str]:
    notes = []
    late_ms = run.summary.get("x_quire", {}).get("generator_delay_ms", {}).get("mean", 0.0)
    if late_ms > MAX_LATE_MS:
        notes.append(
            f"The load test itself was late, {_ms(late_ms)} ms per request on average: it could not keep up, and the "
            "server met another load than was asked for."
        )
    if run.timeline and run.timeline.failures:
        notes.append(f"{run.timeline.failures:,} scrapes of the server's metrics failed.")
    slow = sum(record.slow_reader for record in run.records)
    if slow:
        notes.append(f"{slow:,} requests had a reader that was slow on purpose; latencies leave them out.")
    return notes


# Pictures of all runs


def _distribution(name: str, runs: Sequence[Run], latencies: Sequence[dict[str, Values]]) -> tuple[str, Chart]:
    """With what it means."""
    title, meaning = LATENCIES[name]
    series = [each[name] for each in latencies]
    told = (
        f"{run.label}: p50 {_ms(_percentile(values, 50))}, p99 {_ms(_percentile(values, 99))} ms"
        for run, values in zip(runs, series, strict=True)
    )
    chart = Chart(Markup(draw_distribution(title, series)), f"{title}, distribution. {'; '.join(told)}.")
    return f"{meaning[0].upper()}{meaning[1:]}.", chart


def _curve(runs: Sequence[Run], latencies: Sequence[dict[str, Values]]) -> Chart:
    points = [
        CurvePoint(
            label=_load(run),
            tokens_per_s=run.summary["output_throughput"],
            ttft_ms=(_percentile(each["ttft"], 50), _percentile(each["ttft"], 99)),
            tpot_ms=(_percentile(each["tpot"], 50), _percentile(each["tpot"], 99)),
            request_rate=_rate(run),
            goodput=_goodput(run),
        )
        for run, each in zip(runs, latencies, strict=True)
    ]
    told = (
        f"at {point.label}: {point.tokens_per_s:,.1f} output tokens per second, TTFT p50 {_ms(point.ttft_ms[0])} and "
        f"p99 {_ms(point.ttft_ms[1])} ms, TPOT p50 {_ms(point.tpot_ms[0])} and p99 {_ms(point.tpot_ms[1])} ms"
        for point in points
    )
    return Chart(Markup(draw_curve(points)), f"Latency against throughput. {'; '.join(told)}.")


def _load(run: Run) -> str:
    """A number of our own: text of a user's does not go into pictures."""
    rate = _rate(run)
    if rate is not None and (math.isfinite(rate) or run.summary.get("max_concurrency") is None):
        return f"{rate:g}/s" if math.isfinite(rate) else "all at once"
    return f"{float(run.summary['max_concurrency']):g}"


def _rate(run: Run) -> float | None:
    rate = run.summary.get("request_rate")  # vLLM writes inf as a text
    return None if rate is None else float(rate)


def _goodput(run: Run) -> float | None:
    """Requests per second that met every limit; None: no limits were asked for."""
    goodput: float | None = run.summary.get("request_goodput")
    return goodput


def _parts(rows: Sequence[tuple[str, dict[str, float]]]) -> Chart | None:
    if not rows:
        return None
    told = (f"{label}: {', '.join(f'{part} {_ms(ms)}' for part, ms in parts.items())} ms" for label, parts in rows)
    return Chart(Markup(draw_parts(rows)), f"Where time went. {'; '.join(told)}.")


# Numbers


def _percentile(values: Values, percent: float) -> float:
    return float(np.percentile(values, percent)) if values.size else math.nan


def _ms(value: float) -> str:
    """About three digits; a dash where there is none."""
    if not math.isfinite(value):
        return "–"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"
