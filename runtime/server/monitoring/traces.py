"""Traces of requests: the interface of a tracer, the caller's W3C context, and the phases of a request.

Must not import OpenTelemetry, which an installation may lack.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import NamedTuple, Protocol

from ...common.types import Usage
from ...engine.facade import EmbedRequest, GenerateRequest

TRACEPARENT = "traceparent"  # names of the W3C context in headers and frames
TRACESTATE = "tracestate"
NO_CONTEXT: Mapping[str, str] = MappingProxyType({})

_caller: ContextVar[Mapping[str, str]] = ContextVar("caller", default=NO_CONTEXT)


def note_caller(traceparent: str, tracestate: str = "") -> None:
    """Make the requests that this task submits next part of the caller's trace; an empty text begins a trace."""
    _caller.set({TRACEPARENT: traceparent, TRACESTATE: tracestate} if traceparent else NO_CONTEXT)


def caller() -> Mapping[str, str]:
    """Return the W3C context that `note_caller` received last, empty without one."""
    return _caller.get()


class RequestTrace(Protocol):
    """The trace of one request. It ends with `finish` or `fail`, once."""

    trace_id: str  # 32 hexadecimal digits; empty: the request is not recorded

    def accept(self) -> None:
        """Note that the engine has queued the request."""

    def finish(self, usage: Usage, finish_reason: str | None) -> None:
        """End the trace of a request that ran to its end; a request to embed texts has no `finish_reason`."""

    def fail(self, code: str | None) -> None:
        """End the trace of a request that was refused or cut. None: its reader left."""


class Tracer(Protocol):
    """Makes a trace for each request of a server."""

    def begin(self, request: GenerateRequest | EmbedRequest) -> RequestTrace:
        """Begin the trace of a request that is submitted now, in the caller's context."""

    async def close(self) -> None:
        """Send the remaining traces."""


class SilentTrace:
    """The trace of a request that is not recorded."""

    trace_id = ""

    def accept(self) -> None:
        pass

    def finish(self, usage: Usage, finish_reason: str | None) -> None:
        pass

    def fail(self, code: str | None) -> None:
        pass


class SilentTracer:
    """The tracer of a server without traces."""

    def begin(self, request: GenerateRequest | EmbedRequest) -> RequestTrace:
        return NO_TRACE

    async def close(self) -> None:
        pass


NO_TRACE = SilentTrace()


class TracePhase(NamedTuple):
    """One part of the time of a request."""

    name: str
    duration_ns: int


def phases(total_ns: int, prepared_ns: int, usage: Usage | None, rest: str) -> list[TracePhase]:
    """Divide the time of a request into consecutive phases, whose durations add up to `total_ns`.

    `prepare` is the time before the queue, at most `prepared_ns`. The engine reports `queue`, `prefill`, `decode` and
    `preempted`, the time without pages or without an engine. The last phase has the name `rest`. A phase without time
    is left out. The times of several outputs overlap: a phase is cut where the total is used up.
    """
    engine_ns = {} if usage is None else _engine_phases(usage)
    wanted_ns = {"prepare": min(prepared_ns, total_ns - sum(engine_ns.values())), **engine_ns, rest: total_ns}
    left_ns = total_ns
    parts: list[TracePhase] = []
    for name, wanted in wanted_ns.items():
        duration_ns = max(0, min(wanted, left_ns))
        left_ns -= duration_ns
        if duration_ns:
            parts.append(TracePhase(name, duration_ns))
    return parts


def _engine_phases(usage: Usage) -> dict[str, int]:
    """Return the nanoseconds of the phases that the engine reports."""
    reported = {
        "queue": usage.queue_ms,
        "prefill": usage.prefill_ms,
        "decode": usage.decode_ms,
        "preempted": usage.stall_ms,
    }
    return {name: round(milliseconds * 1e6) for name, milliseconds in reported.items()}
