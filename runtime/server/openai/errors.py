"""Errors in the form of OpenAI's API: a status, `{"error": {message, type, param, code}}`, headers about a retry."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec

from ...common.errors import QuireError
from ..http.errors import JSON, HTTPAnswer, kind_of, named, retry_headers


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
    return HTTPAnswer(kind_of(error).status, content, JSON, retry_headers(error))


def error_event(error: QuireError, names: Mapping[str, str], _request_id: str = "") -> bytes:
    """Return `error` as the last event of a stream. `names` are as in `error_answer`."""
    return b"data: " + _body(error, (), names) + b"\n\n"


def _body(error: QuireError, fields: Collection[str], names: Mapping[str, str]) -> bytes:
    _, kind, code = kind_of(error)
    message, param = named(error, fields, names)
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
