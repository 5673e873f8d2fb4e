"""Records made into arrays: distributions, a run over its seconds, and where its requests' time went.

It must not know how they are shown. One invariant: nothing is defined here that `latency` defines, and a request counts
where its fate lets it: in latencies if it is measured, in arrivals if it was sent, in errors if it failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from .charts import PARTS, History
from .latency import e2el_s, is_measured, itls_s, schedule_delay_s, tpot_s, ttft_s
from .record import RequestRecord
from .run import Run
from .timeline import Sample

Values = NDArray[np.float64]

NUM_BINS = 60  # at least so many over a run, of a round width
ROUND_WIDTHS_S = tuple(factor * 10.0**power for power in range(-3, 5) for factor in (1, 2, 5))
MAX_STEPS = 1500  # of a line
BANDS = (("fastest half", 0.0, 0.5), ("p50 to p90", 0.5, 0.9), ("p90 to p99", 0.9, 0.99), ("slowest 1 %", 0.99, 1.0))


def latencies_ms(records: Sequence[RequestRecord]) -> dict[str, Values]:
    """Every measured request's TTFT, TPOT and E2EL, all their ITLs, and every sent request's schedule delay."""
    measured = [record for record in records if is_measured(record)]
    return {
        "ttft": _known(measured, ttft_s),
        "tpot": _known(measured, tpot_s),
        "itl": _milliseconds(gap for record in measured for gap in itls_s(record)),
        "e2el": _known(measured, e2el_s),
        "schedule_delay": _milliseconds(schedule_delay_s(record) for record in _sent(records)),
    }


def history(run: Run) -> History:
    sent = _sent(run.records)
    start = run.started_s
    chunks = [(at - start, count) for r in sent for at, count in zip(r.token_times, r.token_counts, strict=True)]
    begins = np.array([record.sent_s - start for record in sent])
    ends = np.array([_end_s(record) - start for record in sent])
    span_s = max(float(ends.max(initial=0.0)), 0.01)
    bin_s = next(width for width in ROUND_WIDTHS_S if span_s / width <= NUM_BINS or width == ROUND_WIDTHS_S[-1])
    edges = bin_s * np.arange(int(span_s / bin_s) + 2, dtype=np.float64)
    failed = np.array([_end_s(record) - start for record in sent if record.error is not None])
    arrived, counts = np.array(chunks).reshape(-1, 2).T
    samples = run.timeline.samples if run.timeline else []
    return History(
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


def parts_ms(records: Sequence[RequestRecord]) -> dict[str, float] | None:
    """Mean milliseconds of each of PARTS over the measured requests; None where the server does not tell.

    `elsewhere` is what the client waited beyond the server's account: network, the server's front, the client itself.
    """
    told = _told(records)
    if not told:
        return None
    parts = {
        "queue": [record.queue_ms or 0.0 for record in told],
        "prefill": [record.prefill_ms or 0.0 for record in told],
        "decode": [record.decode_ms or 0.0 for record in told],
        "stall": [record.stall_ms or 0.0 for record in told],
    }
    totals = np.sum([parts[name] for name in parts], axis=0)
    beyond = np.array([1000 * (e2el_s(record) or 0.0) for record in told]) - totals
    means = {name: float(np.mean(values)) for name, values in parts.items()}
    return {name: ({**means, "elsewhere": float(np.maximum(beyond, 0.0).mean())})[name] for name in PARTS}


def parts_by_band(records: Sequence[RequestRecord]) -> list[tuple[str, dict[str, float]]]:
    """`parts_ms` of requests from the fastest to the slowest, as far as there are so many."""
    ordered = sorted(_told(records), key=lambda record: e2el_s(record) or 0.0)
    found = []
    for name, low, high in BANDS:
        band = parts_ms(ordered[round(low * len(ordered)) : round(high * len(ordered))])
        if band is not None:
            found.append((name, band))
    return found


def _told(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if is_measured(record) and record.queue_ms is not None]


def _sent(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.sent_s > 0]


def _end_s(record: RequestRecord) -> float:
    return max(record.ended_s, record.sent_s, *record.token_times[-1:])


def _known(records: Sequence[RequestRecord], latency: Callable[[RequestRecord], float | None]) -> Values:
    return _milliseconds(value for record in records if (value := latency(record)) is not None)


def _milliseconds(seconds: Iterable[float]) -> Values:
    return 1000 * np.fromiter(seconds, np.float64)


def _binned(times: Values, edges: Values, weights: Values | None = None) -> Values:
    return np.histogram(times, edges, weights=weights)[0].astype(np.float64)


def _in_flight(begins: Values, ends: Values) -> tuple[Values, Values]:
    """Steps up and down; of many, what holds at equally distant moments."""
    times = np.sort(np.concatenate([begins, ends]))
    if times.size > MAX_STEPS:
        times = np.linspace(times[0], times[-1], MAX_STEPS)
    begun = np.searchsorted(np.sort(begins), times, side="right")
    return times, (begun - np.searchsorted(np.sort(ends), times, side="right")).astype(np.float64)


def _sampled(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> Values:
    return np.array([np.nan if (read := value(sample)) is None else read for sample in samples], np.float64)
