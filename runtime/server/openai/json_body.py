"""The JSON object of a request's body, stricter than Python's reader: no key twice, no NaN, no infinity, only UTF-8."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from .errors import BadRequest


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the object in `body`. Raises BadRequest that names the fault."""
    try:
        value = _DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise BadRequest("the body nests too deeply") from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error.msg} (character {error.pos})") from None
    except ValueError as error:  # a number of thousands of digits
        raise BadRequest(f"the body is not usable JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest('the body must be a JSON object such as {"model": "…"}')
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadRequest(f"the body has the key {key[:80]!r} twice in one object", key[:80])
            seen.add(key)
    return found


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise BadRequest(f"the number {digits[:40]} is too large")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise BadRequest(f"the body is not JSON: {name} is no number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant)
