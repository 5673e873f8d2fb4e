"""Errors in the form of Anthropic's API: `{"type": "error", "error": {type, message}, "request_id"}`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from ...common.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    QuireError,
    QuotaExceeded,
    RequestNotFound,
    Unauthenticated,
    Unavailable,
)
from ..http.errors import JSON, BadRequest, HTTPAnswer, named, retry_headers

TOO_LONG = "prompt is too long: "  # words by which coding agents decide to compact a conversation

# The first matching class decides.
_STATUSES: tuple[tuple[type[QuireError], int], ...] = (
    (InvalidRequest, 400),
    (Unauthenticated, 401),
    (RequestNotFound, 404),
    (QuotaExceeded, 429),
    (Overloaded, 429),
    (Unavailable, 529),
    (DeadlineExceeded, 504),
    (Cancelled, 499),
    (QuireError, 500),
)
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_answer(error: QuireError, fields: Collection[str], names: Mapping[str, str], request_id: str) -> HTTPAnswer:
    """Return `error` as an answer. See `DoorForm`."""
    content = _body(error, fields, names, request_id)
    headers = retry_headers(error)
    if isinstance(error, BadRequest):
        headers |= error.headers
    return HTTPAnswer(_status(error), content, JSON, headers)


def error_event(error: QuireError, names: Mapping[str, str], request_id: str) -> bytes:
    """Return `error` as the last event of a stream. See `DoorForm`."""
    return b"event: error\ndata: " + _body(error, (), names, request_id) + b"\n\n"


def _status(error: QuireError) -> int:
    if isinstance(error, BadRequest):
        return error.status
    return next(status for cls, status in _STATUSES if isinstance(error, cls))


def _body(error: QuireError, fields: Collection[str], names: Mapping[str, str], request_id: str) -> bytes:
    message, _ = named(error, fields, names)
    if isinstance(error, ContextLengthExceeded):
        message = TOO_LONG + message
    kind = _TYPES.get(_status(error), "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id})
