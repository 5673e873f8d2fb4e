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

JSON = "application/json"
STRUCTURED_OUTPUTS = "structured_outputs"  # the engine's name of the field with a grammar
RETRY_UNAVAILABLE_MS = 1000  # retry time for Unavailable, whose end is unknown


class HTTPAnswer(NamedTuple):
    """One whole HTTP answer; `headers` are added to the headers of every answer."""

    status: int
    content: bytes
    media_type: str = JSON
    headers: Mapping[str, str] = MappingProxyType({})


class BadRequest(InvalidRequest):
    """A refusal before the engine: the request's path, headers, body or a field is wrong or not supported."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        error_code: str | None = None,
        status: int = 400,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.param = param
        self.error_code = error_code
        self.status = status
        self.headers = headers


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
    error: QuireError, fields: Collection[str] = (), names: Mapping[str, str] = MappingProxyType({})
) -> HTTPAnswer:
    """Return `error` as an answer.

    `fields` are the parameters that the error may concern, and `names` maps parameters to other names in this body.
    """
    content = _body(error, fields, names)
    if isinstance(error, BadRequest):
        return HTTPAnswer(error.status, content, JSON, {"x-should-retry": "false", **error.headers})
    return HTTPAnswer(_kind(error).status, content, JSON, _retry_headers(error))


def error_event(error: QuireError, names: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """Return `error` as the last event of a stream. `names` are as in `error_answer`."""
    return b"data: " + _body(error, (), names) + b"\n\n"


def _kind(error: QuireError) -> _Kind:
    return next(kind for cls, kind in _KINDS if isinstance(error, cls))


def _body(error: QuireError, fields: Collection[str], names: Mapping[str, str]) -> bytes:
    kind = _kind(error)
    message = str(error).encode("utf-8", "replace").decode()  # a quoted lone surrogate becomes "?"
    param = None
    code = kind.code
    if isinstance(error, BadRequest):
        param = error.param and error.param.encode("utf-8", "replace").decode()  # likewise
        code = error.error_code
    else:  # the engine's messages about a parameter begin with its name
        first = message.removeprefix("the " if message.startswith("the prompt ") else "")
        first = first.partition(" ")[0].rstrip(":").partition("[")[0]
        if first in fields or first in names or first == STRUCTURED_OUTPUTS:
            param = names.get(first, first)
        if param is not None and first != "prompt":  # the engine names messages "prompt", too
            message = param + message.removeprefix(first)
    return msgspec.json.encode({"error": {"message": message, "type": kind.type, "param": param, "code": code}})


def _retry_headers(error: QuireError) -> dict[str, str]:
    """Return the headers that openai-python and other clients read before they send the request again."""
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    if not error.retryable:
        return {"x-should-retry": "false"}
    retry_ms = error.retry_after_ms
    if retry_ms is None and isinstance(error, Unavailable):
        retry_ms = RETRY_UNAVAILABLE_MS
    if retry_ms is None:
        return {"x-should-retry": "true"}
    return {"x-should-retry": "true", "retry-after-ms": str(retry_ms), "retry-after": str(-(-retry_ms // 1000))}
