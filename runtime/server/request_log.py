"""Log lines about requests: one at info level for each that ran and ended, one at debug level for each refused.

A line has numbers and codes, never what a client sent, which the messages of errors may quote. What a line is about
comes from `structlog.contextvars`, which a task inherits from the task that creates it: a connection's task binds
`connection=new_id()` at its start and `tenant` once it is known, a request's task binds `request=new_id()`. `client_id`
is the id that the client gave the request.
"""

from __future__ import annotations

import structlog

from ..common.errors import GenerationFailed, QuireError
from ..protocol.frames import Done, Error

_REFUSALS = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "NOT_FOUND"})

_log = structlog.get_logger("quire.server")


def log_end(last: Done | Error) -> None:
    """Log the frame that ended or refused a request."""
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


def quire_error(error: Exception, what: str = "request", **fields: object) -> QuireError:
    """Return `error` as its client may see it. Any exception but a QuireError is a bug, and logged with `fields`."""
    if isinstance(error, QuireError):
        return error
    _log.error(f"{what} failed", exc_info=error, **fields)
    return GenerationFailed(f"an internal error ended this {what}; see the server's log")
