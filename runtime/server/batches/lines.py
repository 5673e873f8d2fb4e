"""The lines of a batch, in OpenAI's format, which is vLLM's, too: a request per line, and an answer per line.

A line is `{"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}`. An answer line depends on
its line alone: a request without a seed gets one from the line, so a line that is computed again has the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from ...common.errors import InvalidRequest
from ...common.prompts import shown

MAX_LINE_BYTES = 8 << 20
MAX_ID_CHARACTERS = 512
SEEDED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
URLS = (*SEEDED, "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/classify")

_FIELDS = ("custom_id", "method", "url", "body")
_encode = msgspec.json.encode
_decode = msgspec.json.decode
_decode_line = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class BatchLine(NamedTuple):
    """One request of a batch."""

    custom_id: str
    url: str
    body: bytes  # JSON object
    name: str  # name of the request and of its answer, which follows from the line and its number


class LineRefused(InvalidRequest):
    """A line that is no request. `custom_id` is empty if it could not be read."""

    def __init__(self, message: str, custom_id: str = "", code: str = "invalid_request") -> None:
        super().__init__(message)
        self.custom_id = custom_id
        self.error_code = code


class LineAnswer(NamedTuple):
    """The answer to one request: a status, and a JSON value."""

    status: int
    body: bytes

    @property
    def is_error(self) -> bool:
        return self.status >= 400


def line_name(number: int, line: bytes) -> str:
    """Return the name of a line, which follows from its content and its number among the lines."""
    return sha256(b"%d:%b" % (number, line.strip())).hexdigest()[:32]


def read_line(number: int, line: bytes, urls: Collection[str] = URLS) -> BatchLine:
    """Return the request of a line. Raises LineRefused."""
    if len(line) > MAX_LINE_BYTES:
        raise LineRefused(f"the line has {len(line)} bytes; at most {MAX_LINE_BYTES} are allowed")
    try:
        line.decode()  # values are decoded later, and not all of them
        fields = _decode_line(line)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise LineRefused(f"the line is not a JSON object: {error}", code="invalid_json_line") from None
    custom_id = _text(fields, "custom_id", "")
    if not 1 <= len(custom_id) <= MAX_ID_CHARACTERS:
        raise LineRefused(f"custom_id must have 1 to {MAX_ID_CHARACTERS} characters, not {len(custom_id)}")
    if unknown := sorted(fields.keys() - set(_FIELDS)):
        raise LineRefused(
            f"the line has the unknown field {unknown[0][:80]!r}; allowed: {', '.join(_FIELDS)}", custom_id
        )
    method = _text(fields, "method", custom_id)
    if method != "POST":
        raise LineRefused(f"method must be POST, not {method[:80]!r}", custom_id)
    url = _text(fields, "url", custom_id)
    if url not in urls:
        raise LineRefused(f"url must be one of {', '.join(urls)}, not {url[:80]!r}", custom_id, "invalid_url")
    name = line_name(number, line)
    return BatchLine(custom_id, url, _body(fields, custom_id, url, name), name)


def _text(fields: dict[str, msgspec.Raw], name: str, custom_id: str) -> str:
    if name not in fields:
        raise LineRefused(f"{name} is missing", custom_id, "missing_required_parameter")
    value = _value(fields[name])
    if not isinstance(value, str):
        raise LineRefused(f"{name} must be text, not {shown(value)}", custom_id)
    return value


def _body(fields: dict[str, msgspec.Raw], custom_id: str, url: str, name: str) -> bytes:
    """Return the body with a seed. Raises LineRefused for a body that no single answer can follow."""
    if "body" not in fields:
        raise LineRefused("body is missing", custom_id, "missing_required_parameter")
    raw = bytes(fields["body"]).strip()
    value = _value(fields["body"])
    if not isinstance(value, dict):
        raise LineRefused(f"body must be an object, not {shown(value)}", custom_id)
    for field in ("stream", "background"):
        if value.get(field):
            raise LineRefused(f"body.{field} cannot be true in a batch; leave it out", custom_id)
    if url not in SEEDED or value.get("seed") is not None:
        return raw
    seed = int(name[:12], 16)
    if "seed" in value:
        return _encode({**value, "seed": seed})
    return b'{"seed":%d%b%b' % (seed, b"," if value else b"", raw[1:])


def _value(raw: msgspec.Raw) -> Any:
    """Return a decoded value. Numbers that the library does not take are None: the server names their fault."""
    try:
        return _decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


def answer_line(line: BatchLine, answer: LineAnswer) -> bytes:
    """Return the line of an answer, also of an HTTP error."""
    error = None
    if answer.is_error:
        error = _error_of(answer)
    response = {"status_code": answer.status, "request_id": line.name, "body": msgspec.Raw(answer.body)}
    return _record(line.name, line.custom_id, response, error)


def refusal_line(number: int, line: bytes, refusal: LineRefused) -> bytes:
    """Return the line of a request that was not sent."""
    error = {"code": refusal.error_code, "message": str(refusal)}
    return _record(line_name(number, line), refusal.custom_id or None, None, error)


def _error_of(answer: LineAnswer) -> dict[str, Any]:
    try:
        error = _decode(answer.body)["error"]
        return {"code": error.get("code") or error.get("type"), "message": error["message"]}
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return {"code": str(answer.status), "message": answer.body[:300].decode(errors="replace")}


def _record(name: str, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    record = {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error}
    return _encode(record) + b"\n"
