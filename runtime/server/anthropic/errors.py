"""Errors in the form of Anthropic's API: `{"type": "error", "error": {type, message}, "request_id"}`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from ...common.errors import ContextLengthExceeded, QuireError, Unavailable
from ..http.errors import JSON, HTTPAnswer, kind_of, named, retry_headers

TOO_LONG = "prompt is too long: "  # words by which coding agents decide to compact a conversation

OVERLOADED = 529  # status of a server that cannot answer now
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def error_answer(error: QuireError, fields: Collection[str], names: Mapping[str, str], request_id: str) -> HTTPAnswer:
    """Return `error` as an answer. See `DoorForm`."""
    content = _body(error, fields, names, request_id)
    return HTTPAnswer(_status(error), content, JSON, retry_headers(error))


def error_event(error: QuireError, names: Mapping[str, str], request_id: str) -> bytes:
    """Return `error` as the last event of a stream. See `DoorForm`."""
    return b"event: error\ndata: " + _body(error, (), names, request_id) + b"\n\n"


def _status(error: QuireError) -> int:
    return OVERLOADED if isinstance(error, Unavailable) else kind_of(error).status


def _body(error: QuireError, fields: Collection[str], names: Mapping[str, str], request_id: str) -> bytes:
    message, _ = named(error, fields, names)
    if isinstance(error, ContextLengthExceeded):
        message = TOO_LONG + message
    kind = _TYPES.get(_status(error), "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id})
