"""Bodies of HTTP requests: short and long ones are read by the same rules, and long ones without stopping others."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import pytest
from quire.runtime.server.http.errors import BadRequest
from quire.runtime.server.http.json_body import PARSED_AT_ONCE, parse_object

LONG = b" " * PARSED_AT_ONCE


@pytest.mark.parametrize("padding", [b"", LONG], ids=["short", "long"])
@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b'{"a": {"b": 1, "b": 2}}', "has the key 'b' twice"),
        (b'{"a": [NaN]}', "NaN is no number"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": 123456789012345678901}', "more than 20 digits"),
        (b'{"a": "\\ud800"}', "lone surrogate"),
        (b'{"a": "\\uD800"}', "lone surrogate"),
        (b'{"\\udfff": 1}', "lone surrogate"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": 1', "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "nests deeper than 500 levels"),
        (b'{"a": "\\u0041", "b": ' + b"[" * 982 + b"]" * 982 + b"}", "nests deeper than 500 levels"),
        (b"[" * 70_000, "more than 65536 lists"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_is_no_object_is_refused(body: bytes, match: str, padding: bytes) -> None:
    with pytest.raises(BadRequest, match=match):
        parse_object(body + padding)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("length", [1, PARSED_AT_ONCE])
def test_a_body_in_another_encoding_is_named(encoding: str, length: int) -> None:
    with pytest.raises(BadRequest, match=f"the body is in {encoding[:6].upper()}[-BLE]*; send it in UTF-8"):
        parse_object(('{"a": "' + "b" * length + '"}').encode(encoding))


@pytest.mark.parametrize("padding", [b"", LONG], ids=["short", "long"])
def test_a_byte_order_mark_is_ignored(padding: bytes) -> None:
    assert parse_object(b'\xef\xbb\xbf{"a": "\xef\xbb\xbf"}' + padding) == {"a": "\ufeff"}
    with pytest.raises(BadRequest, match="the body is empty"):
        parse_object(b"\xef\xbb\xbf")
    with pytest.raises(BadRequest, match="the body is not JSON"):
        parse_object(b"\xef\xbb\xbf" * 2 + b"{}" + padding)


def test_long_bodies_have_the_values_of_short_ones() -> None:
    value: Any = {"a": [1, -2.5, 1e300, True, False, None, "é\n\u2028😀", "", {}], "b": {"c": {"d": [[], [{}]]}}, "": 0}
    for body in (json.dumps(value), json.dumps(value, ensure_ascii=False), json.dumps(value, indent=3)):
        assert parse_object(body.encode()) == parse_object(body.encode() + LONG) == value


@pytest.mark.parametrize("element", [b"1", b'"abcdefgh"', b"true", b"[]", b'{"a":"b"}'])
def test_a_long_body_lets_other_threads_run_between_its_values(element: bytes) -> None:
    """The scanner in C would read all values in one call."""
    body = b'{"a":[' + b",".join([element] * 20_000) + b"]}" + LONG
    num_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    def read() -> None:
        sys.setprofile(count)
        parse_object(body)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert num_calls >= 20_000
