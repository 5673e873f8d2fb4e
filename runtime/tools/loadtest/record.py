"""What one request of a load test was and did, as its client saw it. It must not know how the request was sent or what
will be made of it. A record is written by one driver while its request runs, and only read afterwards; every time is
seconds of time.perf_counter."""

from __future__ import annotations

import msgspec


class RequestRecord(msgspec.Struct):
    """One request: what was asked, when, and when each chunk of its answer arrived."""

    index: int
    prompt_tokens: int  # as asked; replaced by the server's count where it tells
    max_tokens: int
    scheduled_s: float  # when it should have been sent
    sent_s: float = 0.0
    token_times: list[float] = msgspec.field(default_factory=list)  # arrival of each chunk that had tokens
    token_counts: list[int] = msgspec.field(default_factory=list)  # tokens of that chunk
    ended_s: float = 0.0
    finish_reason: str | None = None  # None: failed or cancelled
    error: str | None = None
    cancelled: bool = False  # by --cancel-rate
    queue_ms: float | None = None  # the server's own account of its time, where it gives one
    prefill_ms: float | None = None
    decode_ms: float | None = None
    stall_ms: float | None = None
    cached_tokens: float | None = None
    text: str = ""
    error_code: str | None = None  # what to count errors by: a gRPC code name, or HTTP_503
    slow_reader: bool = False  # by --slow-reader-rate: its times say when it read, not when the server wrote

    @property
    def output_tokens(self) -> int:
        """Tokens that arrived."""
        return sum(self.token_counts)
