"""The JSON object of a request's body, stricter than Python's reader: no key twice, no NaN, no infinity, only UTF-8.

The event loop waits for the reader, so the number of values is limited before it runs. A long body is read in a thread,
by a reader that can release the GIL between two values.
"""

from __future__ import annotations

import codecs
import json
import json.scanner
import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np

from ...common.fair_executor import FairExecutor
from .errors import BadRequest

T = TypeVar("T")

PARSED_AT_ONCE = 64 << 10  # bytes of a body, which takes about a millisecond
MAX_CONTAINERS = 1 << 16  # lists, objects and keys of one body, each as expensive as several numbers
MAX_VALUES = 1 << 18  # such as token ids
MAX_LEVELS = 500  # levels of lists and objects: later code recurses up to twice per level
MAX_DIGITS = 20  # digits of an integer: converting a long one takes quadratic time


_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_CHANGES = bytes.maketrans(b"[{]}", b"\1\1\xff\xff")  # changes of the level, as int8


class BodyReader:
    """Reads bodies of requests: short bodies at once, long ones in a thread, where the tenants take turns."""

    def __init__(self) -> None:
        self._thread = FairExecutor(1)

    async def read(self, tenant: str, num_bytes: int, function: Callable[[], T]) -> T:
        """Return the result of a function that reads `num_bytes`. Raises Unavailable after `close`."""
        return function() if num_bytes <= PARSED_AT_ONCE else await self._thread.submit(tenant, function)

    def close(self) -> None:
        """Stop reading long bodies. Idempotent."""
        self._thread.close()


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the object in `body`. Raises BadRequest that names the fault.

    Only one thread may parse bodies of more than `PARSED_AT_ONCE` bytes: their scanner keeps the keys that it has read.
    """
    encoding = json.detect_encoding(body)
    if not encoding.startswith("utf-8"):
        raise BadRequest(f"the body is in {encoding.upper()}; send it in UTF-8")
    body = body.removeprefix(codecs.BOM_UTF8)
    if not body:
        raise BadRequest('the body is empty; it must be a JSON object such as {"model": "…"}')
    _check_size(body)
    decoder = _DECODER if len(body) <= PARSED_AT_ONCE else _PATIENT_DECODER
    try:
        value = decoder.decode(body.decode())
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise BadRequest("the body nests too deeply") from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error.msg} (character {error.pos})") from None
    if b"\\u" in body and not _is_unicode(value):
        raise BadRequest("the body is not valid Unicode: it contains a lone surrogate")
    if not isinstance(value, dict):
        raise BadRequest('the body must be a JSON object such as {"model": "…"}')
    return value


def _is_unicode(value: object) -> bool:
    """Return whether every text in `value` can be encoded: an escape can be half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_size(body: bytes) -> None:
    """Raise BadRequest for too many values."""
    if _exceeds(body) and _exceeds(_without_texts(body)):
        raise BadRequest(f"the body has more than {MAX_CONTAINERS} lists, objects and keys, or {MAX_VALUES} values")
    if body.count(b"[") + body.count(b"{") > MAX_LEVELS and _num_levels(_without_texts(body)) > MAX_LEVELS:
        raise BadRequest(f"the body nests deeper than {MAX_LEVELS} levels")


def _without_texts(body: bytes) -> bytes:
    """Return the body without quoted text."""
    return b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])


def _num_levels(data: bytes) -> int:
    """Return the nesting depth of lists and objects in a body without texts."""
    changes = np.frombuffer(data.translate(_CHANGES, _NO_BRACKETS), np.int8)
    return int(changes.cumsum(dtype=np.int32).max(initial=0))


def _exceeds(data: bytes) -> bool:
    return sum(map(data.count, (b"[", b"{", b":"))) > MAX_CONTAINERS or data.count(b",") >= MAX_VALUES


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadRequest(f"the body has the key {key[:80]!r} twice in one object", key[:80])
            seen.add(key)
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise BadRequest(f"the number {digits[:40]} has more than {MAX_DIGITS} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise BadRequest(f"the number {digits[:40]} is too large")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise BadRequest(f"the body is not JSON: {name} is no number")


def _new_decoder() -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_unique, parse_int=_integer, parse_float=_finite, parse_constant=_refuse_constant
    )


_DECODER = _new_decoder()
_PATIENT_DECODER = _new_decoder()
# The scanner in C would hold the GIL for the whole body, and every stream would wait.
_PATIENT_DECODER.scan_once = json.scanner.py_make_scanner(_PATIENT_DECODER)  # type: ignore[attr-defined]
