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
from ..http.errors import JSON, BadRequest, HTTPAnswer, named, retry_headers, status_of


class _Kind(NamedTuple):
    type: str
    code: str | None


# The first matching class decides.
_KINDS: tuple[tuple[type[QuireError], _Kind], ...] = (
    (ContextLengthExceeded, _Kind("invalid_request_error", "context_length_exceeded")),
    (InvalidRequest, _Kind("invalid_request_error", None)),
    (Unauthenticated, _Kind("invalid_request_error", "invalid_api_key")),
    (RequestNotFound, _Kind("invalid_request_error", "not_found")),
    (QuotaExceeded, _Kind("insufficient_quota", "insufficient_quota")),
    (Overloaded, _Kind("rate_limit_error", "rate_limit_exceeded")),
    (Unavailable, _Kind("server_error", "server_unavailable")),
    (DeadlineExceeded, _Kind("timeout_error", "timeout")),
    (Cancelled, _Kind("invalid_request_error", "cancelled")),
    (QuireError, _Kind("server_error", "server_error")),
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
    return HTTPAnswer(status_of(error), content, JSON, retry_headers(error))


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
