"""What `quire loadtest` prints: a progress line while it runs, then the result in the words of `vllm bench serve`.

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

from .results import percentile_key
from .sender import LoadProgress

PROGRESS_INTERVAL_S = 0.5
LATE_MS = 10.0  # a generator that is later than this made another load than was wanted
MAX_MESSAGES = 3
METRIC_NAMES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
    "client_queue_time": ("Client-side Queueing", "Client Queue Time"),
    "e2el_including_client_queue": ("Queue-inclusive End-to-end Latency", "E2EL incl. Client Queue"),
}


def print_result(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> None:
    """Print the result as tables."""
    console = Console(width=72, highlight=False)
    console.print(_totals(result))
    for metric in metrics:
        if f"mean_{metric}_ms" in result:
            console.print(_latencies(result, metric, percentiles))
    console.print("\n".join(_notes(result, percentiles)), soft_wrap=True, markup=False)


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
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
        ("Request goodput (req/s):", result["request_goodput"]),
        ("Output token throughput (tok/s):", result["output_throughput"]),
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
    """Return the lines below the tables: lateness, and errors with the first messages."""
    own = result["x_quire"]
    highest = percentile_key(max(percentiles)) if percentiles else "mean"
    delay, late = own["schedule_delay_ms"][highest], own.get("generator_delay_ms", {}).get(highest, 0.0)
    lines = [
        f"Schedule delay (ms): {highest} {delay:.2f}; counted from the schedule, E2EL {highest} "
        f"{own['e2el_from_schedule_ms'][highest]:.2f}, TTFT {highest} {own['ttft_from_schedule_ms'][highest]:.2f}"
    ]
    if late > LATE_MS:
        lines.append(
            f"The load generator itself was late ({highest} {late:.2f} ms): it could not keep up, so the server met "
            "another load than was wanted."
        )
    lines += [f"Errors: {count} x {code}" for code, count in own["errors"].items()]
    messages = dict.fromkeys(message for message in result["errors"] if message)
    lines += [f"  {message}" for message in islice(messages, MAX_MESSAGES)]
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
    last_s, last_tokens = time.perf_counter(), 0
    while True:
        await asyncio.sleep(PROGRESS_INTERVAL_S)
        now_s = time.perf_counter()
        rate = (progress.tokens - last_tokens) / (now_s - last_s)
        last_s, last_tokens = now_s, progress.tokens
        live.update(Text(progress_line(progress, rate)), refresh=True)


def progress_line(progress: LoadProgress, tokens_per_s: float) -> str:
    """Return the text of the progress line."""
    of = "" if progress.total is None else f" of {progress.total:,}"
    return (
        f"sent {progress.sent:,}{of}   done {progress.done:,}   running {progress.running:,}   "
        f"failed {progress.failed:,}   {tokens_per_s:,.0f} tokens/s"
    )
