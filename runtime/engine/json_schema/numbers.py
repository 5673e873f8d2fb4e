"""Numbers of JSON schemas for llguidance, which calculates in f64 and leaves some decimals out.

In llguidance, a range up to 9.99 lacks 9.9, like every number that is the beginning of a bound with several decimals.
Multiples of 0.25 lack 0.5, like every number that can be written with fewer decimals than the divisor. Both kinds are
added. A schema that would allow wrong numbers is refused: large numbers that f64 does not have, and ranges such as
above 0 to 0.5. For numbers beyond 64 bits, the library recurses without end, which no exception stops.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from ...common.errors import InvalidRequest
from .references import ANNOTATIONS, DATA, EXTENSION, MAPS, schemas_inside

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MAX_WHOLE = 1 << 53  # largest bound below which f64 has all whole numbers
MAX_INT64 = (1 << 63) - 1  # llguidance rounds larger bounds of integers down to it
MIN_INT64 = -(1 << 63)
# Bounds for integers without bounds, because a small model may never end a number. llguidance lacks -2^63; f64 has no
# number between that and this minimum.
OWN_BOUNDS: Mapping[str, int] = {"minimum": MIN_INT64 + 1024, "maximum": MAX_INT64}
MAX_BOUNDS = 50  # different bounds of integers, of 2,000 expressions each, in a schema that gets OWN_BOUNDS
MAX_DECIMALS = 12  # decimals of a divisor: llguidance reads hardly any with more
MAX_DIVISOR = 1 << 32  # llguidance's limit, without the point
MAX_NEIGHBORS = 8  # f64 numbers on each side of a divisor among which one is read as the divisor
# A divisor has about as many states as remainders times digits of the bounds; a decimal counts as several digits. With
# 12,000 states and a vocabulary with numbers of three digits, a mask takes up to 30 ms, and all masks take 12 MB. With
# a million remainders, each mask took 10 seconds.
MAX_STATES = 12_000
DECIMAL = 8
_NEAREST = (("minimum", 1), ("maximum", -1))  # the effective bound is the greatest one, times the sign
LIMIT_KEYWORDS = (*BOUNDS, "multipleOf")


def check_numbers(schema: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a bound, or a number of `const` or `enum`, that llguidance would round."""
    for key in BOUNDS:
        bound = schema.get(key)
        is_end = (key, bound) in (("maximum", MAX_INT64), ("minimum", MIN_INT64))
        is_int64 = is_end and not _may_be_fraction(schema.get("type"))
        if isinstance(bound, int | float) and not _is_exact(bound) and not is_int64:
            raise InvalidRequest(f"a JSON schema with {key}: {bound} cannot be enforced: such a number is rounded")
    divisor = schema.get("multipleOf")
    if isinstance(divisor, int | float) and _is_divisor(divisor) and divisor > MAX_WHOLE:
        raise InvalidRequest("a JSON schema with multipleOf cannot be enforced: divisors beyond 2^53 are rounded")
    for key in ("const", "enum"):
        for number in _numbers(schema.get(key)):
            if not abs(number) <= MAX_WHOLE:
                raise InvalidRequest(
                    f"a JSON schema with {number} in {key} cannot be enforced: numbers beyond 2^53 are rounded"
                )


def check_limits(parts: Collection[Mapping[str, Any]]) -> None:
    """Raise InvalidRequest if llguidance cannot enforce these limits of one number together."""
    _check_open_end(parts)
    _check_divisors(parts)


def with_listed_multiples(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema without `multipleOf` if it lists its values, of which it keeps the multiples."""
    divisor = schema.get("multipleOf")
    key = next((key for key in ("const", "enum") if key in schema), None)
    if key is None or not _is_divisor(divisor):
        return schema
    listed = [schema[key]] if key == "const" else schema[key]
    if not isinstance(listed, list):
        return schema
    multiples = [each for each in listed if not is_number(each) or _is_multiple(each, divisor)]
    kept = {name: value for name, value in schema.items() if name not in ("multipleOf", key)}
    return kept | ({key: schema[key]} if multiples == listed else {"enum": multiples})


def with_own_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that limits integers to 64 bits on each side without a bound, unless it lists its values."""
    if schema.keys() & {"const", "enum", "multipleOf"} or "integer" not in _kinds(schema) or "number" in _kinds(schema):
        return schema
    missing = {
        key: bound
        for key, bound in OWN_BOUNDS.items()
        if schema.get(key, MIN_INT64) == MIN_INT64 and f"exclusive{key.capitalize()}" not in schema
    }
    return {**schema, **missing}


def with_shared_integers(root: dict[str, Any]) -> dict[str, Any]:
    """Return a schema in which equal schemas of bounded integers are one definition.

    llguidance makes 2,000 expressions for each 64-bit integer, but makes them only once for a definition.
    """
    defined = root.get("$defs", {})
    counts = bounds_of_integers(root)
    if not isinstance(defined, dict) or max(counts.values(), default=0) < 2:
        return root
    prefix = "integer"
    while any(name.startswith(prefix) for name in defined):
        prefix += "_"
    names = {bounds: f"{prefix}{index}" for index, (bounds, count) in enumerate(counts.items()) if count > 1}

    def written(schema: Any) -> Any:
        if isinstance(schema, list):
            return [written(each) for each in schema]
        if not isinstance(schema, dict) or (schema is not root and "$id" in schema):  # base of references inside
            return schema
        name = names.get(_bounds_of_integer(schema) or "")
        return {key: inside(key, each) for key, each in schema.items()} if name is None else {"$ref": f"#/$defs/{name}"}

    def inside(key: str, value: Any) -> Any:
        if key in DATA or key.startswith(EXTENSION):
            return value
        if key in MAPS and isinstance(value, dict):
            return {name: written(each) for name, each in value.items()}
        return written(value)

    changed = {key: inside(key, value) for key, value in root.items()}
    return {
        **changed,
        "$defs": {**changed.get("$defs", {}), **{name: json.loads(each) for each, name in names.items()}},
    }


def bounds_of_integers(root: Mapping[str, Any]) -> Counter[str]:
    """Count the bounds of integers in a schema, by their JSON."""
    return Counter(bounds for each in schemas_inside(root) if (bounds := _bounds_of_integer(each)) is not None)


def _bounds_of_integer(schema: Mapping[str, Any]) -> str | None:
    """Return the JSON, without annotations, of a schema that only bounds integers; None for other schemas."""
    bounds = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    is_alone = bounds.keys() <= {"type", *LIMIT_KEYWORDS} and "integer" in _kinds(schema)
    return json.dumps(bounds, sort_keys=True) if is_alone and len(bounds) > 1 else None


def _kinds(schema: Mapping[str, Any]) -> Collection[Any]:
    kinds = schema.get("type")
    return kinds if isinstance(kinds, list) else (kinds,)


def with_left_out(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that also allows the numbers within its bounds and its divisor that llguidance leaves out."""
    if _is_divisor(schema.get("multipleOf")):
        schema = schema | {"multipleOf": _spelled(schema["multipleOf"])}
    limits = {key: schema[key] for key in LIMIT_KEYWORDS if key in schema}
    left_out = list(_left_out(limits))
    others = schema.get("allOf", [])
    if not left_out or not isinstance(others, list) or not _may_be_fraction(schema.get("type", "number")):
        return schema
    kept = {key: value for key, value in schema.items() if key not in limits}
    return {**kept, "allOf": [*others, {"anyOf": [limits, *left_out]}]}


def _check_open_end(parts: Collection[Mapping[str, Any]]) -> None:
    """Raise InvalidRequest for a range that begins after a whole number and ends before the next one.

    llguidance would allow the whole number itself; below zero, this is the end of the range.
    """
    for near, far, sign in (("minimum", "maximum", 1), ("maximum", "minimum", -1)):
        begin, is_open = max(_ends(parts, near, sign), default=(-1.0, False))
        end = min((bound for bound, _ in _ends(parts, far, sign)), default=math.inf)
        if is_open and 0 <= begin < end < begin + 1 and begin == int(begin):
            raise InvalidRequest(
                f"a JSON schema with numbers between {sign * begin:g}, which is excluded, and {sign * end:g} cannot be "
                f"enforced: {sign * begin:g} would be allowed"
            )


def _check_divisors(parts: Collection[Mapping[str, Any]]) -> None:
    """Raise InvalidRequest for a divisor with too many remainders."""
    divisors = [Fraction(_decimal(part["multipleOf"])) for part in parts if _is_divisor(part.get("multipleOf"))]
    if not divisors:
        return
    numerator = math.lcm(*(each.numerator for each in divisors))
    divisor = Fraction(numerator, math.gcd(*(each.denominator for each in divisors)))
    num_decimals = next(num for num in itertools.count() if 10**num % divisor.denominator == 0)
    ends = [max((bound for bound, _ in _ends(parts, key, sign)), default=0.0) for key, sign in _NEAREST]
    num_digits = sum(map(_num_digits, ends))
    if int(divisor * 10**num_decimals) * (1 + num_digits + DECIMAL * num_decimals) > MAX_STATES:
        bounded = f" and bounds with {num_digits} digits" if num_digits else ""
        raise InvalidRequest(
            f"a JSON schema with multiples of {_shown(divisor)}{bounded} cannot be enforced: too many remainders"
        )


def _shown(number: Fraction) -> str:
    return f"{Decimal(number.numerator) / Decimal(number.denominator):.12g}"


def _num_digits(bound: float) -> int:
    return len(format(Decimal(repr(bound)), "f").removesuffix(".0").replace(".", "").lstrip("-0"))


def _is_exact(bound: float) -> bool:
    return abs(bound) <= MAX_WHOLE or (MIN_INT64 < bound <= MAX_INT64 and float(bound) == bound)


def _ends(parts: Collection[Mapping[str, Any]], key: str, sign: int) -> Iterator[tuple[float, bool]]:
    """Yield the bounds under a key and its exclusive form, times `sign`, and whether they are excluded."""
    exclusive = f"exclusive{key.capitalize()}"
    for part in parts:
        for name, is_open in ((key, part.get(exclusive) is True), (exclusive, True)):
            bound = part.get(name)
            if bound is not None and is_number(bound):
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
    """Return whether a number is a multiple in decimal arithmetic: in f64, 0.3 is not a multiple of 0.1."""
    return not _is_divisor(divisor) or (Fraction(repr(number)) / Fraction(_decimal(divisor))).denominator == 1


def _multiples_with_fewer_decimals(divisor: Any) -> Iterator[float]:
    """Yield the least multiple for each smaller number of decimals."""
    if isinstance(divisor, float) and _is_divisor(divisor):
        whole, _, decimals = format(_decimal(divisor), "f").partition(".")
        if len(decimals) <= MAX_DECIMALS:
            for num_left_out in range(1, len(decimals)):
                step = math.lcm(int(whole + decimals), 10**num_left_out)
                yield _spelled(float(Decimal(step).scaleb(-len(decimals))))


def _spelled(divisor: float) -> float:
    """Return a number that llguidance reads as this divisor."""
    exact = _decimal(divisor)
    below = above = divisor
    for _ in range(MAX_NEIGHBORS + 1):
        for each in (below, above):
            if _as_read(each) == exact:
                return each
        below, above = math.nextafter(below, 0), math.nextafter(above, math.inf)
    raise InvalidRequest(
        f"a JSON schema with multipleOf: {divisor} cannot be enforced: such a divisor is rounded in binary"
    )


def _decimal(divisor: float) -> Decimal:
    """Return the intended divisor: llguidance's reading, if the number was respelled for it."""
    exact = Decimal(repr(divisor))
    return exact if _num_decimals(exact) <= MAX_DECIMALS else _as_read(divisor) or exact


def _as_read(divisor: float) -> Decimal | None:
    """Return a number as llguidance reads it: in f64, multiplied by 10 until it is whole, and divided again."""
    num_decimals = _num_decimals(Decimal(repr(divisor)))
    if num_decimals > 2 * MAX_DECIMALS:
        return None
    divisor = float(Decimal(repr(divisor)).scaleb(num_decimals)) / 10.0**num_decimals
    num_decimals = 0
    while divisor != math.floor(divisor) and divisor <= MAX_DIVISOR:
        divisor *= 10
        num_decimals += 1
    return Decimal(int(divisor)).scaleb(-num_decimals) if divisor <= MAX_DIVISOR else None


def _num_decimals(number: Decimal) -> int:
    exponent = number.as_tuple().exponent
    return -exponent if isinstance(exponent, int) else 0


def is_number(value: Any) -> bool:
    """Return whether a value is a JSON number: true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_divisor(value: Any) -> bool:
    return is_number(value) and 0 < value < math.inf


def _may_be_fraction(kinds: Any) -> bool:
    return kinds == "number" or (isinstance(kinds, list) and "number" in kinds)
