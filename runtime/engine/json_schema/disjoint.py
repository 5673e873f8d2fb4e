"""A test whether JSON schemas are disjoint: no value is valid under both.

The answer is False where that cannot be shown. Must not import the rules of llguidance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .numbers import is_number
from .references import referred

JSON_TYPES = ("null", "boolean", "object", "array", "number", "string")  # integers are numbers
MAX_CASES = 32  # cases of one schema
MAX_CASE_DEPTH = 8  # depth of properties and references
MAX_COMPARISONS = 60_000  # comparisons for one root, which take a second
APART = frozenset({"date", "date-time", "time", "ipv4", "ipv6", "uuid"})  # formats that exclude each other

_Schema = Mapping[str, Any]


@dataclass
class Case:
    """The facts that hold for all values of a schema. A value satisfies every entry of each list."""

    types: frozenset[str] = frozenset(JSON_TYPES)
    is_integer: bool = False
    values: dict[Any, Any] | None = None  # key that equal values share -> value; None: not enumerated
    parts: list[_Schema] = field(default_factory=list)  # schemas without references and combinations

    @cached_property
    def required(self) -> list[str]:
        """Names of required properties, enumerated ones first, because these distinguish most cases."""
        names = {name for part in self.parts for name in required_names(part)}
        listed = {
            name
            for part in self.parts
            if isinstance(known := part.get("properties"), dict)
            for name in names.intersection(known)
            if isinstance(known[name], dict) and known[name].keys() & {"const", "enum"}
        }
        return sorted(names, key=lambda name: (name not in listed, name))


class Comparer:
    """Comparison of schemas within a root, to which their references refer."""

    def __init__(self, root: _Schema) -> None:
        self._root = root
        self._known: dict[int, list[Case]] = {}  # cases by id of a schema
        self._schemas: list[_Schema] = []  # schemas with these ids, kept alive
        self._num_left = MAX_COMPARISONS

    def cases(self, schema: Any, depth: int = 0) -> list[Case]:
        """Return the cases of a schema: each of its values belongs to one."""
        if schema is False:
            return []
        if not isinstance(schema, dict) or depth > MAX_CASE_DEPTH:
            return [Case()]
        known = self._known.get(id(schema))
        if known is None:
            self._schemas.append(schema)
            self._known[id(schema)] = [Case()]  # a reference cycle adds no conditions
            known = self._known[id(schema)] = self._new_cases(schema, depth)
        return known

    def _new_cases(self, schema: _Schema, depth: int) -> list[Case]:
        whole = [Case()]
        own = Case(_types(schema.get("type")), schema.get("type") == "integer", _values(schema), [schema])
        groups: list[list[Case]] = [[own]]
        if "$ref" in schema:
            groups.append(self.cases(referred(self._root, schema["$ref"]), depth + 1))
        for each in _list(schema.get("allOf")):
            groups.append(self.cases(each, depth + 1))
        for key in ("anyOf", "oneOf"):
            if alternatives := _list(schema.get(key)):
                groups.append([case for each in alternatives for case in self.cases(each, depth + 1)])
        for group in groups:
            self._num_left -= len(whole) * len(group) - 1
            if len(whole) * len(group) > MAX_CASES or self._num_left < 0:
                continue  # fewer conditions: more values
            whole = [_both(one, other) for one in whole for other in group]
        return [case for case in whole if case.types and case.values != {}]

    def are_disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Return whether it is certain that no value is valid under both schemas."""
        self._num_left -= 1
        if depth > MAX_CASE_DEPTH or self._num_left < 0:
            return False
        pairs = itertools.product(self.cases(one, depth), self.cases(other, depth))
        return all(self._are_disjoint(first, second, depth) for first, second in pairs)

    def _are_disjoint(self, one: Case, other: Case, depth: int) -> bool:
        self._num_left -= 1
        common = one.types & other.types
        for case, against in ((one, other), (other, one)):
            if case.values is not None and against.values is not None:
                return case.values.keys().isdisjoint(against.values)
        for case, against in ((one, other), (other, one)):
            if case.values is not None:
                return all(self.is_invalid(value, against, depth) for value in case.values.values())
        return all(self._are_disjoint_as(kind, one, other, depth) for kind in common)

    def _are_disjoint_as(self, kind: str, one: Case, other: Case, depth: int) -> bool:
        if kind == "object":
            return any(
                self.are_disjoint(mine, its, depth + 1)
                for name in itertools.chain(one.required, other.required)
                for mine in _properties(one, name)
                for its in _properties(other, name)
            )
        if kind in _LIMITS:
            least, most = _LIMITS[kind]
            if _greatest([*one.parts, *other.parts], least) > _smallest([*one.parts, *other.parts], most):
                return True
        formats = {str(part.get("format")) for part in [*one.parts, *other.parts]}
        return kind == "string" and len(formats & APART) > 1

    def is_invalid(self, value: Any, case: Case, depth: int = 0) -> bool:
        """Return whether it is certain that a value does not belong to a case."""
        self._num_left -= 1
        if self._num_left < 0:
            return False
        kind = type_of(value)
        if kind not in case.types or (case.is_integer and isinstance(value, float) and not value.is_integer()):
            return True
        if case.values is not None:
            return identity(value) not in case.values
        if kind in _LIMITS:
            least, most = _LIMITS[kind]
            size = value if kind == "number" else len(value)
            if not _greatest(case.parts, least) <= size <= _smallest(case.parts, most):
                return True
        if kind != "object":
            return False
        return not value.keys() >= set(case.required) or any(
            self._is_surely_invalid(each, schema, depth + 1)
            for name, each in value.items()
            for schema in _properties(case, name)
        )

    def _is_surely_invalid(self, value: Any, schema: Any, depth: int) -> bool:
        return depth <= MAX_CASE_DEPTH and all(
            self.is_invalid(value, case, depth) for case in self.cases(schema, depth)
        )


_LIMITS = {
    "number": ("minimum", "maximum"),
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
}


def type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, dict):
        return "object"
    return "array" if isinstance(value, list) else "string" if isinstance(value, str) else "number"


def identity(value: Any) -> Any:
    """Return a key that is equal for values that JSON Schema calls equal: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, dict):
        return ("object", frozenset((name, identity(each)) for name, each in value.items()))
    return ("array", *map(identity, value)) if isinstance(value, list) else (type_of(value), value)


def required_names(schema: _Schema) -> set[str]:
    """Return the names of required properties; draft 3 has a boolean under this key."""
    return {name for name in _list(schema.get("required")) if isinstance(name, str)}


def distinct(values: Iterable[Any]) -> dict[Any, Any]:
    """Return the values without duplicates, by their identity."""
    found: dict[Any, Any] = {}
    for value in values:
        found.setdefault(identity(value), value)
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _types(kinds: Any) -> frozenset[str]:
    names = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(names, list):
        return frozenset(JSON_TYPES)
    return frozenset("number" if name == "integer" else name for name in names if isinstance(name, str))


def _values(schema: _Schema) -> dict[Any, Any] | None:
    if "const" in schema:
        return distinct([schema["const"]])
    return distinct(schema["enum"]) if isinstance(schema.get("enum"), list) else None


def _both(one: Case, other: Case) -> Case:
    values = one.values if other.values is None else other.values
    if one.values is not None and other.values is not None:
        values = {key: value for key, value in one.values.items() if key in other.values}
    types = one.types & other.types
    if values is not None:
        values = {key: value for key, value in values.items() if type_of(value) in types}
    return Case(types, one.is_integer or other.is_integer, values, [*one.parts, *other.parts])


def _properties(case: Case, name: str) -> Iterable[Any]:
    """Yield the schemas that a property must match, as far as it is certain that they apply to this name."""
    for part in case.parts:
        known = part.get("properties")
        if isinstance(known, dict) and name in known:
            yield known[name]
        elif not part.get("patternProperties"):
            yield part.get("additionalProperties", True)
    yield True


def _greatest(parts: Iterable[_Schema], key: str) -> float:
    return max((part[key] for part in parts if is_number(part.get(key))), default=-math.inf)


def _smallest(parts: Iterable[_Schema], key: str) -> float:
    return min((part[key] for part in parts if is_number(part.get(key))), default=math.inf)
