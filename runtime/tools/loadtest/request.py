"""What passes between who drives a load and who speaks to the server: requests out, chunks in, one failure.

It must not know a protocol. One invariant: a stream yields chunks until one with an `end`, or raises RequestFailed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One request to send, and how its client will behave."""

    prompt: Prompt
    prompt_tokens: int  # 0: not known here
    max_tokens: int
    cancel_after: int | None = None  # leave after so many generated tokens
    pause_s: float = 0.0  # between reading one chunk and the next


class End(NamedTuple):
    """How a stream ended, and what the server says of it. None: it does not say."""

    finish_reason: str
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    stall_ms: float | None = None


class Chunk(NamedTuple):
    """One piece of an answer."""

    arrived_s: float  # time.perf_counter
    num_tokens: int
    text: str
    end: End | None = None


class RequestFailed(Exception):
    """`code` is what failures are counted by: a gRPC code name, or HTTP_503."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Backend(Protocol):
    """A server under load. Leaving a stream early cancels its request."""

    def stream(self, request: Request) -> AsyncGenerator[Chunk, None]: ...

    async def close(self) -> None: ...
