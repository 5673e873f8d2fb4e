"""The data model of a load test: the request to send, the stream that answers it, and the record of both.

A `Backend` speaks one protocol to the server under load. All times are seconds of `time.perf_counter`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send, and the behavior of its client."""

    prompt: str | tuple[int, ...]  # text or token ids
    prompt_tokens: int  # 0: unknown
    max_tokens: int
    cancel_after: int | None = None  # the client cancels after this many generated tokens
    pause_s: float = 0.0  # the client waits this long between two chunks


class StreamEnd(NamedTuple):
    """The end of a stream, with the server's own figures; None where the server reports none."""

    finish_reason: str
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    stall_ms: float | None = None


class ReceivedChunk(NamedTuple):
    """One piece of an answer."""

    arrived_s: float
    num_tokens: int
    text: str
    end: StreamEnd | None = None  # set in the last chunk of a stream


class RequestFailed(Exception):
    """A request that failed. `code` groups failures in the result: a gRPC code name, or HTTP_503."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Backend(Protocol):
    """A server under load, behind one protocol."""

    def stream(self, request: LoadRequest) -> AsyncGenerator[ReceivedChunk, None]:
        """Send `request` and yield its chunks, the last of them with an `end`, or raise RequestFailed.

        Closing the generator early cancels the request.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class RequestRecord(msgspec.Struct):
    """The sizes of one request, and the arrival times of its answer. Written while the request runs."""

    index: int
    prompt_tokens: int  # requested tokens; replaced by the server's count where the server reports one
    max_tokens: int
    scheduled_s: float  # time when the request was due
    sent_s: float = 0.0
    token_times: list[float] = msgspec.field(default_factory=list)  # arrival of each chunk that had tokens
    token_counts: list[int] = msgspec.field(default_factory=list)  # number of tokens in each of those chunks
    ended_s: float = 0.0
    finish_reason: str | None = None  # None: failed or cancelled
    error: str | None = None
    cancelled: bool = False  # cancelled on purpose, see `cancel_rate`
    queue_ms: float | None = None  # the server's own figures, None where it reports none
    prefill_ms: float | None = None
    decode_ms: float | None = None
    stall_ms: float | None = None
    cached_tokens: float | None = None
    text: str = ""
    error_code: str | None = None  # groups errors in the result: a gRPC code name, or HTTP_503
    slow_reader: bool = False  # read slowly on purpose, see `slow_reader_rate`: its latencies do not count

    @property
    def output_tokens(self) -> int:
        """Number of tokens that arrived."""
        return sum(self.token_counts)
