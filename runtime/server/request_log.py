"""The log lines of requests: one at info level for each that ran and ended, one at debug level for each refused.

It must not know sockets or streams. One invariant: a line tells numbers and codes, never what was sent, which messages
of errors may quote.

What a line is about comes from `structlog.contextvars`, which tasks inherit from the task that makes them, so that
other rooms' lines about a request carry it too: a connection's task binds `connection=new_id()` at its start and
`tenant` when it knows it, a request's task `request=new_id()`. `client_id` is the id that its client gave it.
"""

from __future__ import annotations

import structlog

from ..protocol.frames import Done, Error

_REFUSALS = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "NOT_FOUND"})

_log = structlog.get_logger("quire.server")


def log_end(last: Done | Error) -> None:
    """`last` is the frame that ended the request of this task, or that refused one of this connection."""
    if isinstance(last, Error):
        refused = last.code in _REFUSALS
        log = _log.debug if refused else _log.info
        log(
            "request refused" if refused else "request failed",
            client_id=last.request_id,
            code=last.code,
            retry_after_ms=last.retry_after_ms,
        )
        return
    usage = last.usage
    _log.info(
        "request ended",
        client_id=last.request_id,
        finish_reason=last.finish_reason,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        queue_ms=round(usage.queue_ms, 1),
        prefill_ms=round(usage.prefill_ms, 1),
        decode_ms=round(usage.decode_ms, 1),
        stall_ms=round(usage.stall_ms, 1),
    )
