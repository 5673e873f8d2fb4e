"""Numbers of JSON schemas for llguidance, which counts in f64 and leaves some decimals out.

A range up to 9.99 lacks 9.9 in llguidance, as any other number that is the beginning of a bound with several decimals.
Multiples of 0.25 lack 0.5, as others that can be written with fewer decimals than the divisor. Both are added. What
would allow wrong numbers is refused: large numbers that f64 does not have, and ranges from above 0 to 0.5 and the like.
At numbers beyond 64 bits, the library recurses without end, which no exception stops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from ..common.errors import InvalidRequest

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MAX_WHOLE = 1 << 53  # up to which f64 has all whole numbers
MAX_INT64 = (1 << 63) - 1  # llguidance rounds larger bounds of integers down to it
MAX_DECIMALS = 12  # of a divisor: llguidance reads hardly any with more


def check_numbers(schema: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a bound, or a number of `const` or `enum`, that llguidance would round."""
    for key in BOUNDS:
        bound = schema.get(key)
        if isinstance(bound, int | float) and not _is_exact(bound) and (key, bound) != ("maximum", MAX_INT64):
            raise InvalidRequest(f"a JSON schema with {key}: {bound} cannot be enforced: such a number is rounded")
    for key in ("const", "enum"):
        for number in _numbers(schema.get(key)):
            if not abs(number) <= MAX_WHOLE:
                raise InvalidRequest(
                    f"a JSON schema with {number} in {key} cannot be enforced: numbers beyond 2^53 are rounded"
                )
    _check_open_end(schema)


def with_left_out(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that also allows the numbers which its bounds and its divisor allow and llguidance leaves out."""
    limits = {key: schema[key] for key in (*BOUNDS, "multipleOf") if key in schema}
    left_out, others = list(_left_out(limits)), schema.get("allOf", [])
    if not left_out or not isinstance(others, list) or not _may_be_fraction(schema.get("type", "number")):
        return schema
    kept = {key: value for key, value in schema.items() if key not in limits}
    return {**kept, "allOf": [*others, {"anyOf": [limits, *left_out]}]}


def _check_open_end(schema: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a range that begins after a whole number and ends before the next one.

    llguidance allows the whole number. Below zero, it is the end of the range.
    """
    others = schema.get("allOf")
    parts = [schema, *(each for each in (others if isinstance(others, list) else []) if isinstance(each, dict))]
    for near, far, sign in (("minimum", "maximum", 1), ("maximum", "minimum", -1)):
        begin, is_open = max(_ends(parts, near, sign), default=(-1.0, False))
        end = min((bound for bound, _ in _ends(parts, far, sign)), default=math.inf)
        if is_open and 0 <= begin < end < begin + 1 and begin == int(begin):
            raise InvalidRequest(
                f"a JSON schema with numbers between {sign * begin:g}, which is excluded, and {sign * end:g} cannot be "
                f"enforced: {sign * begin:g} would be allowed"
            )


def _is_exact(bound: float) -> bool:
    return abs(bound) <= MAX_WHOLE or (abs(bound) <= MAX_INT64 and float(bound) == bound)


def _ends(parts: list[Mapping[str, Any]], key: str, sign: int) -> Iterator[tuple[float, bool]]:
    """Yield the bounds under a key and its exclusive form, times `sign`, and whether they are excluded."""
    exclusive = f"exclusive{key.capitalize()}"
    for part in parts:
        for name, is_open in ((key, part.get(exclusive) is True), (exclusive, True)):
            bound = part.get(name)
            if isinstance(bound, int | float) and not isinstance(bound, bool):
                yield sign * bound, is_open


def _numbers(data: Any) -> Iterator[float]:
    if isinstance(data, dict | list):
        for each in data.values() if isinstance(data, dict) else data:
            yield from _numbers(each)
    elif isinstance(data, int | float):
        yield data


def _left_out(limits: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield schemas of numbers that llguidance leaves out."""
    divisor = limits.get("multipleOf")
    bounds = {key: bound for key, bound in limits.items() if key in BOUNDS}
    numbers = [number for bound in bounds.values() for number in _beginnings(bound) if _is_multiple(number, divisor)]
    if numbers:
        yield {"enum": numbers, **bounds}
    for each in _multiples_with_fewer_decimals(divisor):
        yield {"multipleOf": each, **bounds}


def _beginnings(bound: Any) -> Iterator[float]:
    """Yield a bound with fewer decimals, as long as it has any."""
    if isinstance(bound, float):
        whole, _, decimals = format(Decimal(repr(bound)), "f").partition(".")
        for length in range(1, len(decimals)):
            if decimals[:length].strip("0"):
                yield float(f"{whole}.{decimals[:length]}")


def _is_multiple(number: float, divisor: Any) -> bool:
    """Return whether a number is a multiple in decimals: in f64, 0.3 is none of 0.1."""
    if not isinstance(divisor, int | float) or not 0 < divisor < math.inf:
        return True
    return (Fraction(repr(number)) / Fraction(repr(divisor + 0))).denominator == 1


def _multiples_with_fewer_decimals(divisor: Any) -> Iterator[float]:
    """Yield, for each smaller number of decimals, the least multiple that has no more."""
    if isinstance(divisor, float):
        whole, _, decimals = format(Decimal(repr(divisor)), "f").partition(".")
        if divisor > 0 and len(decimals) <= MAX_DECIMALS:
            for num_left_out in range(1, len(decimals)):
                step = math.lcm(int(whole + decimals), 10**num_left_out)
                yield float(Decimal(step).scaleb(-len(decimals)))


def _may_be_fraction(kinds: Any) -> bool:
    return kinds == "number" or (isinstance(kinds, list) and "number" in kinds)
