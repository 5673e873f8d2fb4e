"""The output of `quire loadtest`: a progress line while it runs, then the result in the words of `vllm bench serve`.

The progress line is drawn on the event loop that times the tokens: drawing must take well under a millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .results import LoadTestRun, percentile_key
from .sender import LoadProgress

PROGRESS_INTERVAL_S = 0.5
LATE_MS = 10.0  # lateness above which the load differs from the requested one
MAX_SHOWN_MESSAGES = 3
SWEEP_WIDTH = 140
METRIC_NAMES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
    "client_queue_time": ("Client-side Queueing", "Client Queue Time"),
    "e2el_including_client_queue": ("Queue-inclusive End-to-end Latency", "E2EL incl. Client Queue"),
}


def print_result(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> None:
    """Print the result as tables, after a warning if the load generator was late."""
    console = Console(width=72, highlight=False)
    if (warning := lateness(result, percentiles)) is not None:
        console.print(f"Warning: {warning}", soft_wrap=True, markup=False)
    console.print(_totals(result))
    for metric in _measured(metrics, result):
        if f"mean_{metric}_ms" in result:
            console.print(_latencies(result, metric, percentiles))
    console.print("\n".join(_notes(result, percentiles)), soft_wrap=True, markup=False)


def print_sweep(runs: Sequence[LoadTestRun], metrics: Sequence[str], percentiles: Sequence[float]) -> None:
    """Print one table with a row per load: requests, throughput, and the median and highest percentile of latencies."""
    highest = percentile_key(max(percentiles)) if percentiles else "mean"
    shown = [metric for metric in _measured(metrics, runs[0].summary) if metric in METRIC_NAMES]
    table = Table(box=box.SIMPLE_HEAD, title="Sweep", title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("load")
    for column in ("ok", "failed", "tokens/s", *(f"{METRIC_NAMES[metric][1]} p50 / {highest} ms" for metric in shown)):
        table.add_column(column, justify="right")
    for run in runs:
        result = run.summary
        latencies = (_pair(result.get(f"median_{metric}_ms"), result.get(f"{highest}_{metric}_ms")) for metric in shown)
        counts = f"{result['completed']:,}", f"{result['failed']:,}", f"{result['output_throughput']:,.1f}"
        table.add_row(run.label, *counts, *latencies)
    Console(width=SWEEP_WIDTH, highlight=False).print(table)


def _measured(metrics: Sequence[str], result: Mapping[str, Any]) -> Sequence[str]:
    """Return the metrics, for vectors without the metrics of tokens after the first."""
    if _embeds(result):
        return [metric for metric in metrics if metric not in ("tpot", "itl")]
    return metrics


def _embeds(result: Mapping[str, Any]) -> bool:
    return bool(result["x_quire"].get("task") == "embed")


def _pair(median: float | None, highest: float | None) -> str:
    return " / ".join("–" if value is None else f"{value:,.1f}" for value in (median, highest))


def lateness(result: Mapping[str, Any], percentiles: Sequence[float]) -> str | None:
    """Return a warning if the load generator was late, so that the load differed from the requested one."""
    highest = percentile_key(max(percentiles)) if percentiles else "mean"
    late = result["x_quire"].get("generator_delay_ms", {}).get(highest, 0.0)
    if late <= LATE_MS:
        return None
    return (
        f"the load generator itself was late ({highest} {late:.2f} ms): it could not keep up, so the server met "
        "another load than was wanted"
    )


def _totals(result: Mapping[str, Any]) -> Table:
    own = result["x_quire"]
    table = _table("Serving Benchmark Result")
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
        ("Cancelled requests:", own["cancelled"] or None),
        ("Slow readers:", own["slow_readers"] or None),
        ("Maximum request concurrency:", result["max_concurrency"]),
        ("Request rate configured (RPS):", None if result["request_rate"] == "inf" else float(result["request_rate"])),
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Embedded texts:" if _embeds(result) else "Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
        ("Request goodput (req/s):", result["request_goodput"]),
        (
            "Text throughput (texts/s):" if _embeds(result) else "Output token throughput (tok/s):",
            result["output_throughput"],
        ),
        ("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", float(result["max_concurrent_requests"])),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    for name, value in rows:
        if value is not None:
            table.add_row(name, f"{value:.2f}" if isinstance(value, float) else f"{value}")
    return table


def _latencies(result: Mapping[str, Any], metric: str, percentiles: Sequence[float]) -> Table:
    title, name = METRIC_NAMES[metric]
    table = _table(title)
    named = [(percentile_key(each).upper(), percentile_key(each)) for each in percentiles]
    for word, key in (("Mean", "mean"), ("Median", "median"), *named):
        table.add_row(f"{word} {name} (ms):", f"{result[f'{key}_{metric}_ms']:.2f}")
    return table


def _notes(result: Mapping[str, Any], percentiles: Sequence[float]) -> list[str]:
    """Return the lines below the tables: schedule delay, and errors with the first messages."""
    own = result["x_quire"]
    highest = percentile_key(max(percentiles)) if percentiles else "mean"
    delay = own["schedule_delay_ms"][highest]
    lines = [
        f"Schedule delay (ms): {highest} {delay:.2f}; counted from the schedule, E2EL {highest} "
        f"{own['e2el_from_schedule_ms'][highest]:.2f}, TTFT {highest} {own['ttft_from_schedule_ms'][highest]:.2f}"
    ]
    lines += [f"Errors: {count} x {code}" for code, count in own["errors"].items()]
    messages = dict.fromkeys(message for message in result["errors"] if message)
    lines += [f"  {message}" for message in islice(messages, MAX_SHOWN_MESSAGES)]
    return lines


def _table(title: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", show_header=False, pad_edge=False
    )
    table.add_column(min_width=42)
    table.add_column(justify="right", min_width=12)
    return table


@contextlib.contextmanager
def shown_progress(progress: LoadProgress, *, quiet: bool) -> Iterator[None]:
    """Draw the progress line while the block runs, on a terminal only. Needs a running event loop."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        drawing = asyncio.get_running_loop().create_task(_draw(live, progress))
        try:
            yield
        finally:
            drawing.cancel()


async def _draw(live: Live, progress: LoadProgress) -> None:
    last_s = time.perf_counter()
    last_tokens = 0
    while True:
        await asyncio.sleep(PROGRESS_INTERVAL_S)
        now_s = time.perf_counter()
        rate = (progress.tokens - last_tokens) / (now_s - last_s)
        last_s = now_s
        last_tokens = progress.tokens
        live.update(Text(progress_line(progress, rate)), refresh=True)


def progress_line(progress: LoadProgress, tokens_per_s: float) -> str:
    """Return the text of the progress line."""
    of = "" if progress.total is None else f" of {progress.total:,}"
    return (
        f"sent {progress.sent:,}{of}   done {progress.done:,}   running {progress.running:,}   "
        f"failed {progress.failed:,}   {tokens_per_s:,.0f} tokens/s"
    )
