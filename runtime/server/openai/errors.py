"""Errors in the form of OpenAI's API: a status, `{"error": {message, type, param, code}}`, headers about a retry."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

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


class _Kind(NamedTuple):
    status: int
    type: str
    code: str | None


# The first matching class decides.
_KINDS: tuple[tuple[type[QuireError], _Kind], ...] = (
    (ContextLengthExceeded, _Kind(400, "invalid_request_error", "context_length_exceeded")),
    (InvalidRequest, _Kind(400, "invalid_request_error", None)),
    (Unauthenticated, _Kind(401, "invalid_request_error", "invalid_api_key")),
    (RequestNotFound, _Kind(404, "invalid_request_error", "not_found")),
    (QuotaExceeded, _Kind(429, "insufficient_quota", "insufficient_quota")),
    (Overloaded, _Kind(429, "rate_limit_error", "rate_limit_exceeded")),
    (Unavailable, _Kind(503, "server_error", "server_unavailable")),
    (DeadlineExceeded, _Kind(504, "timeout_error", "timeout")),
    (Cancelled, _Kind(499, "invalid_request_error", "cancelled")),
    (QuireError, _Kind(500, "server_error", "server_error")),
)


def error_answer(
    error: QuireError,
    fields: Collection[str] = (),
    names: Mapping[str, str] = MappingProxyType({}),
    _request_id: str = "",
) -> HTTPAnswer:
    """Return `error` as an answer.

    `fields` are the parameters that the error may concern, and `names` maps parameters to other names in this body.
    """
    content = _body(error, fields, names)
    if isinstance(error, BadRequest):
        return HTTPAnswer(error.status, content, JSON, {"x-should-retry": "false", **error.headers})
    return HTTPAnswer(_kind(error).status, content, JSON, retry_headers(error))


def error_event(error: QuireError, names: Mapping[str, str], _request_id: str = "") -> bytes:
    """Return `error` as the last event of a stream. `names` are as in `error_answer`."""
    return b"data: " + _body(error, (), names) + b"\n\n"


def _kind(error: QuireError) -> _Kind:
    return next(kind for cls, kind in _KINDS if isinstance(error, cls))


def _body(error: QuireError, fields: Collection[str], names: Mapping[str, str]) -> bytes:
    kind = _kind(error)
    message, param = named(error, fields, names)
    code = error.error_code if isinstance(error, BadRequest) else kind.code
    return msgspec.json.encode({"error": {"message": message, "type": kind.type, "param": param, "code": code}})
