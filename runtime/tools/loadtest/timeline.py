"""A run over time, as arrays for the charts: requests, errors, tokens, and the server's metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .latency import Values
from .records import RequestRecord
from .results import LoadTestRun
from .server_metrics import MetricsSample

NUM_BINS = 60  # most bins of a run; the bin width is a round number
ROUND_WIDTHS_S = tuple(factor * 10.0**power for power in range(-3, 5) for factor in (1, 2, 5))
MAX_STEPS = 1500  # steps of a line


@dataclass(frozen=True, slots=True)
class RunTimeline:
    """One run over time, in bins of equal width from second 0 on. Samples of the server have times of their own."""

    bin_s: float
    arrivals: Values  # [bins], requests sent
    errors: Values  # [bins], requests that failed
    tokens: Values  # [bins], output tokens
    in_flight: tuple[Values, Values]  # times, and the requests in flight from each of them on
    sampled_s: Values  # [samples]
    running: Values  # [samples], NaN where the server does not report it
    waiting: Values  # [samples]
    kv_usage: Values  # [samples], 0 to 1


def run_timeline(run: LoadTestRun) -> RunTimeline:
    """Compute the timeline of a run."""
    sent = [record for record in run.records if record.sent_s > 0]
    start = run.started_s
    chunks = [(at - start, count) for r in sent for at, count in zip(r.token_times, r.token_counts, strict=True)]
    begins = np.array([record.sent_s - start for record in sent])
    ends = np.array([_end_s(record) - start for record in sent])
    span_s = max(float(ends.max(initial=0.0)), 0.01)
    bin_s = next(width for width in ROUND_WIDTHS_S if span_s / width <= NUM_BINS or width == ROUND_WIDTHS_S[-1])
    edges = bin_s * np.arange(int(span_s / bin_s) + 2, dtype=np.float64)
    failed = np.array([_end_s(record) - start for record in sent if record.error is not None])
    arrived, counts = np.array(chunks).reshape(-1, 2).T
    samples = run.metrics.samples if run.metrics else []
    return RunTimeline(
        bin_s=bin_s,
        arrivals=_binned(begins, edges),
        errors=_binned(failed, edges),
        tokens=_binned(arrived, edges, counts),
        in_flight=_in_flight(begins, ends),
        sampled_s=np.array([sample.time_s - start for sample in samples]),
        running=_sampled(samples, lambda sample: sample.running),
        waiting=_sampled(samples, lambda sample: sample.waiting),
        kv_usage=_sampled(samples, lambda sample: sample.kv_usage),
    )


def _end_s(record: RequestRecord) -> float:
    return max(record.ended_s, record.sent_s, *record.token_times[-1:])


def _binned(times: Values, edges: Values, weights: Values | None = None) -> Values:
    return np.histogram(times, edges, weights=weights)[0].astype(np.float64)


def _in_flight(begins: Values, ends: Values) -> tuple[Values, Values]:
    """Return every change of the number of requests in flight; for a long run, its values at equally spaced times."""
    times = np.sort(np.concatenate([begins, ends]))
    if times.size > MAX_STEPS:
        times = np.linspace(times[0], times[-1], MAX_STEPS)
    begun = np.searchsorted(np.sort(begins), times, side="right")
    return times, (begun - np.searchsorted(np.sort(ends), times, side="right")).astype(np.float64)


def _sampled(samples: Sequence[MetricsSample], value: Callable[[MetricsSample], float | None]) -> Values:
    return np.array([np.nan if (read := value(sample)) is None else read for sample in samples], np.float64)
