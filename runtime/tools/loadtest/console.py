"""A load test's result for people, in the order and the words of `vllm bench serve`.

It must not compute. One invariant: a figure that is shown is in the result, but for its rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .results import percentile_key

LATE_MS = 10.0  # above it, arrivals were not those that were asked for
MOST_MESSAGES = 3
METRIC_NAMES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
    "client_queue_time": ("Client-side Queueing", "Client Queue Time"),
    "e2el_including_client_queue": ("Queue-inclusive End-to-end Latency", "E2EL incl. Client Queue"),
}


def print_result(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> None:
    console = Console(width=72, highlight=False)
    console.print(_totals(result))
    for metric in metrics:
        if f"mean_{metric}_ms" in result:
            console.print(_latencies(result, metric, percentiles))
    console.print("\n".join(_sentences(result, percentiles)), soft_wrap=True, markup=False)


def _totals(result: Mapping[str, Any]) -> Table:
    ours = result["x_quire"]
    table = _table("Serving Benchmark Result")
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
        ("Cancelled requests:", ours["cancelled"] or None),
        ("Slow readers:", ours["slow_readers"] or None),
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


def _sentences(result: Mapping[str, Any], percentiles: Sequence[float]) -> list[str]:
    """What the figures above do not say by themselves."""
    ours = result["x_quire"]
    highest = percentile_key(max(percentiles)) if percentiles else "mean"
    delay, late = ours["schedule_delay_ms"][highest], ours.get("generator_delay_ms", {}).get(highest, 0.0)
    lines = [
        f"Schedule delay (ms): {highest} {delay:.2f}; counted from the schedule, E2EL {highest} "
        f"{ours['e2el_from_schedule_ms'][highest]:.2f}, TTFT {highest} {ours['ttft_from_schedule_ms'][highest]:.2f}"
    ]
    if late > LATE_MS:
        lines.append(
            f"The load generator itself was late ({highest} {late:.2f} ms): it, not the server, is the limit here, and "
            "the arrivals were not those that were asked for."
        )
    lines += [f"Errors: {count} x {code}" for code, count in ours["errors"].items()]
    messages = dict.fromkeys(message for message in result["errors"] if message)
    lines += [f"  {message}" for message in islice(messages, MOST_MESSAGES)]
    return lines


def _table(title: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", show_header=False, pad_edge=False
    )
    table.add_column(min_width=42)
    table.add_column(justify="right", min_width=12)
    return table
