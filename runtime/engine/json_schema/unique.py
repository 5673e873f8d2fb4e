"""Arrays of unique items in JSON schemas, as lists of values where there are few items.

If there are few lists, they have the values in every order. Otherwise they have the values only in the order of the
items' schema, and if there are still too many lists, the longest are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from .disjoint import JSON_TYPES, Case, Comparer, distinct
from .numbers import is_number

MAX_LISTS = 500  # lists of values of one array
LEAST_ITEMS = 3  # length of lists that must remain possible, if there are enough values
MAX_INTEGERS = 64  # integers of a range that are listed

_Schema = Mapping[str, Any]


def with_unique_items(schema: _Schema, comparer: Comparer) -> _Schema:
    """Return a schema with `enum` instead of `uniqueItems`; the same schema if the items are not enumerated.

    The schema of the items stays.
    """
    if schema["uniqueItems"] is not True:
        return schema
    kinds = schema.get("type", list(JSON_TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    if not isinstance(kinds, list) or not is_number(least) or not is_number(most):
        return schema
    rest = {key: value for key, value in schema.items() if key != "uniqueItems"}
    if most <= 1 or "array" not in kinds:
        return rest
    items = schema.get("items")
    if not isinstance(items, dict) or "prefixItems" in schema:
        return schema
    values = _values(comparer.cases(items))
    lists = None if values is None else _lists(values, least, most)
    if lists is None:
        return schema
    rest = {key: value for key, value in rest.items() if key not in ("minItems", "maxItems")}
    arrays: dict[str, Any] = {"enum": lists}
    if kinds != ["array"]:
        arrays = {"anyOf": [{"type": [kind for kind in JSON_TYPES if kind != "array"]}, {"type": "array", **arrays}]}
    given = rest.get("allOf", [])
    return {**rest, "allOf": [*given, arrays] if isinstance(given, list) else [arrays]}


def _values(cases: list[Case]) -> list[Any] | None:
    """Return the distinct values of cases; None if they are not enumerated."""
    found: list[Any] = []
    for case in cases:
        values = list(case.values.values()) if case.values is not None else _few_values(case)
        if values is None:
            return None
        found += values
    return list(distinct(found).values())


def _few_values(case: Case) -> list[Any] | None:
    """Return the values of a case of null, booleans, or integers in a short range; None for other cases."""
    if case.types <= {"null", "boolean"}:
        return ([None] if "null" in case.types else []) + ([False, True] if "boolean" in case.types else [])
    ends = [_bounds(case, "minimum"), _bounds(case, "maximum")]
    if case.types != {"number"} or not case.is_integer or not all(ends):
        return None
    least, most = math.ceil(max(ends[0])), math.floor(min(ends[1]))
    return list(range(least, most + 1)) if most - least < MAX_INTEGERS else None


def _bounds(case: Case, key: str) -> list[float]:
    return [part[key] for part in case.parts if is_number(part.get(key)) and math.isfinite(part[key])]


def _lists(values: list[Any], least: float, most: float) -> list[list[Any]] | None:
    """Return lists of different values; None if too few lengths have a small number of lists."""
    lengths = [count for count in range(len(values) + 1) if least <= count <= most]
    if sum(math.perm(len(values), count) for count in lengths) <= MAX_LISTS:
        return [list(each) for count in lengths for each in itertools.permutations(values, count)]
    kept = list(_few(len(values), lengths))
    if not kept or kept[-1] < min(LEAST_ITEMS, lengths[-1]):
        return None
    return [list(each) for count in kept for each in itertools.combinations(values, count)]


def _few(num_values: int, lengths: list[int]) -> Iterator[int]:
    """Yield the first lengths whose combinations stay below the limit."""
    num_lists = 0
    for count in lengths:
        num_lists += math.comb(num_values, count)
        if num_lists > MAX_LISTS:
            return
        yield count
