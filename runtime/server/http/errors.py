"""Refusals and whole answers over HTTP, and `DoorForm`: the parts in which the APIs differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

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


class ErrorKind(NamedTuple):
    """A class of errors over HTTP: its status, and its type and code in OpenAI's form."""

    status: int
    type: str
    code: str | None


# The first matching class decides.
_KINDS: tuple[tuple[type[QuireError], ErrorKind], ...] = (
    (ContextLengthExceeded, ErrorKind(400, "invalid_request_error", "context_length_exceeded")),
    (InvalidRequest, ErrorKind(400, "invalid_request_error", None)),
    (Unauthenticated, ErrorKind(401, "invalid_request_error", "invalid_api_key")),
    (RequestNotFound, ErrorKind(404, "invalid_request_error", "not_found")),
    (QuotaExceeded, ErrorKind(429, "insufficient_quota", "insufficient_quota")),
    (Overloaded, ErrorKind(429, "rate_limit_error", "rate_limit_exceeded")),
    (Unavailable, ErrorKind(503, "server_error", "server_unavailable")),
    (DeadlineExceeded, ErrorKind(504, "timeout_error", "timeout")),
    (Cancelled, ErrorKind(499, "invalid_request_error", "cancelled")),
    (QuireError, ErrorKind(500, "server_error", "server_error")),
)


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


@dataclass(frozen=True)
class DoorForm:
    """The form of one API: its errors, its streams, and the header with a request's id.

    The functions get the error, the names that parameters have in this body, and the request's id. `error_answer` also
    gets the fields that the error may concern.
    """

    error_answer: Callable[[QuireError, Collection[str], Mapping[str, str], str], HTTPAnswer]
    error_event: Callable[[QuireError, Mapping[str, str], str], bytes]
    known: Collection[str]  # fields of bodies, which errors may concern
    stream_headers: Sequence[tuple[str, str]]
    keep_alive: bytes  # event of a silent stream; empty: none
    id_header: str = "x-request-id"


def named(error: QuireError, fields: Collection[str], names: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the message of an error and the field that it concerns, under their names in the body.

    `fields` are the parameters that the error may concern, and `names` maps parameters to their names in this body.
    """
    message = _valid(str(error))
    if isinstance(error, BadRequest):
        return message, error.param and _valid(error.param)
    # The engine's messages about a parameter begin with its name.
    first = message.removeprefix("the " if message.startswith("the prompt ") else "")
    first = first.partition(" ")[0].rstrip(":").partition("[")[0]
    if not (first in fields or first in names or first == STRUCTURED_OUTPUTS):
        return message, None
    param = names.get(first, first)
    if first != "prompt":  # the engine names messages "prompt", too
        message = param + message.removeprefix(first)
    return message, param


def _valid(text: str) -> str:
    """Return the text as it can be encoded: a quoted lone surrogate becomes "?"."""
    return text.encode("utf-8", "replace").decode()


def kind_of(error: QuireError) -> ErrorKind:
    """Return the kind of an error; a refusal before the engine has its own status and code."""
    kind = next(kind for cls, kind in _KINDS if isinstance(error, cls))
    return kind._replace(status=error.status, code=error.error_code) if isinstance(error, BadRequest) else kind


def retry_headers(error: QuireError) -> dict[str, str]:
    """Return the headers of a refusal, and the headers that clients read before they send the request again."""
    if isinstance(error, BadRequest):
        return {"x-should-retry": "false", **error.headers}
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
