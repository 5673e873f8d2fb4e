"""The latencies of a request, defined once for results, goodput and charts: TTFT, TPOT, ITL, E2EL, schedule delay.

The definitions equal those of `vllm bench serve`: a client measures from sending a request to its last chunk with
tokens. The time that a request waited before it was sent is a separate latency, `schedule_delay_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .records import RequestRecord

Values = NDArray[np.float64]

LATENCY_PARTS = ("queue", "prefill", "decode", "stall", "elsewhere")  # parts of a request's time, in this order
BANDS = (("fastest half", 0.0, 0.5), ("p50 to p90", 0.5, 0.9), ("p90 to p99", 0.9, 0.99), ("slowest 1 %", 0.99, 1.0))


def is_measured(record: RequestRecord) -> bool:
    """Return whether the latencies of a request count: it finished, and was not read slowly on purpose."""
    return record.finish_reason is not None and not record.slow_reader


def ttft_s(record: RequestRecord) -> float | None:
    """Return the time to first token. None: there was no token."""
    return record.token_times[0] - record.sent_s if record.token_times else None


def itls_s(record: RequestRecord) -> list[float]:
    """Return the inter-token latencies: the times between one chunk of tokens and the next."""
    return [after - before for before, after in pairwise(record.token_times)]


def tpot_s(record: RequestRecord) -> float | None:
    """Return the mean time per output token after the first. None: there were fewer than two tokens."""
    if not record.token_times or record.output_tokens < 2:
        return None
    return (record.token_times[-1] - record.token_times[0]) / (record.output_tokens - 1)


def e2el_s(record: RequestRecord) -> float | None:
    """Return the end-to-end latency, to the last token. None: there was no token."""
    return record.token_times[-1] - record.sent_s if record.token_times else None


def schedule_delay_s(record: RequestRecord) -> float:
    """Return the delay with which the request was sent. A slow load generator affects only this latency."""
    return record.sent_s - record.scheduled_s


def latencies_ms(records: Sequence[RequestRecord]) -> dict[str, Values]:
    """Return the latencies of all measured requests by name, and the schedule delays of all sent requests."""
    measured = [record for record in records if is_measured(record)]
    return {
        "ttft": _known(measured, ttft_s),
        "tpot": _known(measured, tpot_s),
        "itl": _milliseconds(gap for record in measured for gap in itls_s(record)),
        "e2el": _known(measured, e2el_s),
        "schedule_delay": _milliseconds(schedule_delay_s(record) for record in records if record.sent_s > 0),
    }


def parts_ms(records: Sequence[RequestRecord]) -> dict[str, float] | None:
    """Return the mean milliseconds of each of LATENCY_PARTS over the measured requests. None: the server reports none.

    `elsewhere` is the client's latency beyond the server's own figures: network, API server process, client.
    """
    reported = _with_server_times(records)
    if not reported:
        return None
    parts = {
        "queue": [record.queue_ms or 0.0 for record in reported],
        "prefill": [record.prefill_ms or 0.0 for record in reported],
        "decode": [record.decode_ms or 0.0 for record in reported],
        "stall": [record.stall_ms or 0.0 for record in reported],
    }
    at_server = np.sum([parts[name] for name in parts], axis=0)
    elsewhere = np.array([1000 * (e2el_s(record) or 0.0) for record in reported]) - at_server
    means = {name: float(np.mean(values)) for name, values in parts.items()}
    return {**means, "elsewhere": float(np.maximum(elsewhere, 0.0).mean())}


def parts_by_band(records: Sequence[RequestRecord]) -> list[tuple[str, dict[str, float]]]:
    """Return `parts_ms` for each of BANDS that has requests, from the fastest to the slowest."""
    ordered = sorted(_with_server_times(records), key=lambda record: e2el_s(record) or 0.0)
    found = []
    for name, low, high in BANDS:
        band = parts_ms(ordered[round(low * len(ordered)) : round(high * len(ordered))])
        if band is not None:
            found.append((name, band))
    return found


def _with_server_times(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if is_measured(record) and record.queue_ms is not None]


def _known(records: Sequence[RequestRecord], latency: Callable[[RequestRecord], float | None]) -> Values:
    return _milliseconds(value for record in records if (value := latency(record)) is not None)


def _milliseconds(seconds: Iterable[float]) -> Values:
    return 1000 * np.fromiter(seconds, np.float64)
