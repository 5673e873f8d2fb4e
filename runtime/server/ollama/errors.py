"""Errors in the form of Ollama's API: `{"error": message}`, in a stream as its last line."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from ...common.errors import QuireError
from ..http.errors import JSON, HTTPAnswer, kind_of, named, retry_headers


def error_answer(error: QuireError, fields: Collection[str], names: Mapping[str, str], _request_id: str) -> HTTPAnswer:
    """Return `error` as an answer. See `DoorForm`."""
    return HTTPAnswer(kind_of(error).status, _body(error, fields, names), JSON, retry_headers(error))


def error_line(error: QuireError, names: Mapping[str, str], _request_id: str) -> bytes:
    """Return `error` as the last line of a stream. See `DoorForm`."""
    return _body(error, (), names) + b"\n"


def _body(error: QuireError, fields: Collection[str], names: Mapping[str, str]) -> bytes:
    return msgspec.json.encode({"error": named(error, fields, names)[0]})
