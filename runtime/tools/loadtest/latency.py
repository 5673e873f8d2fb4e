"""What each latency means, once, for figures, goodput and charts alike.

It must not know how records are made or shown. The definitions are those of `vllm bench serve`: everything is measured
from sending, at the client, and ends with the last chunk that had tokens; what a request waited to be sent is told
apart, by `schedule_delay_s`. All are seconds; None where a request cannot say.
"""

from __future__ import annotations

from itertools import pairwise

from .record import RequestRecord


def is_measured(record: RequestRecord) -> bool:
    """Whether its times count: it finished, and its reader was not slow on purpose."""
    return record.finish_reason is not None and not record.slow_reader


def ttft_s(record: RequestRecord) -> float | None:
    """To the first token."""
    return record.token_times[0] - record.sent_s if record.token_times else None


def itls_s(record: RequestRecord) -> list[float]:
    """Between one chunk of tokens and the next."""
    return [after - before for before, after in pairwise(record.token_times)]


def tpot_s(record: RequestRecord) -> float | None:
    """Per output token after the first, the mean."""
    if not record.token_times or record.output_tokens < 2:
        return None
    return (record.token_times[-1] - record.token_times[0]) / (record.output_tokens - 1)


def e2el_s(record: RequestRecord) -> float | None:
    """To the last token."""
    return record.token_times[-1] - record.sent_s if record.token_times else None


def schedule_delay_s(record: RequestRecord) -> float:
    """From when it should have been sent until it was: a driver that cannot keep up shows here, not in latencies."""
    return record.sent_s - record.scheduled_s
