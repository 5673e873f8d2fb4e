"""JSON schemas for llguidance, which refuses some keywords even where they allow everything.

A keyword that says nothing, such as `uniqueItems: false`, is left out. Other keywords stay: llguidance enforces or
refuses them. Dates get a pattern, since its own allows 29 February in every year, and host names a greatest length.
References that only lead back to themselves are refused: llguidance accepts them, and allows no text there. The name of
a dialect has its own scheme. What drafts 4, 6 and 7 ignore is left out. `json_numbers.py` is about numbers, and
`json_patterns.py` about regular expressions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from ..common.errors import InvalidRequest
from .json_numbers import LIMITS, check_limits, check_numbers, with_left_out, with_listed_multiples
from .json_patterns import as_read

DATA = frozenset({"const", "default", "enum", "example", "examples"})  # their values are no schemas
EXTENSION = "x-"  # begins the name of a keyword about which no draft says anything
MAPS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})  # of schemas, by name

BY_REFERENCE = frozenset({"$defs", "definitions"})  # whose schemas apply only where one refers to them
IN_PLACE = ("allOf", "anyOf", "oneOf")  # with a single schema they say what that one says

COUNTS = frozenset({"minContains", "maxContains"})  # which those drafts do not have
BESIDE_REFERENCES = frozenset({"$ref", "$schema", "$id", "id", *BY_REFERENCE})  # kept in drafts that ignore others

MAX_ALTERNATIVES = 200  # combinations of limits of numbers that one schema may lead to
MAX_LIMITS = 50  # that one number must keep
MAX_DEPTH = 100  # of references and combinations in one place
MAX_NAME_PATTERNS = 128  # of one schema: each is compared with each other one, 200 of them for half a second
MAX_HOSTNAME = 253  # characters (RFC 1123)
DATES = ("date", "date-time")  # formats
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
REAL_DATE = f"^(....-(0[13-9]|1[0-2])|....-02-([01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"

_DIALECT = re.compile(r"^https?(://json-schema\.org/draft(-0[467]|/2019-09|/2020-12)/schema)")
_IGNORES_SIBLINGS = re.compile(r"https?://json-schema\.org/draft-0[467]/schema#?")
# Whitespace at most once in each place: no model fills its output with spaces.
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}"
# Behind a backslash, without u: as the name of a property that is free, llguidance takes escapes of known names.
ESCAPES = 'nrbtf\\"'

_Schema = Mapping[str, Any]
_Alternatives = tuple[tuple[tuple[tuple[str, float], ...], ...], ...]
_UNLIMITED: _Alternatives = ((),)


def library_options(schema: Any) -> dict[str, str]:
    """Return the options with which llguidance must read an enforceable schema, its `x-guidance`."""
    options = {"whitespace_pattern": JSON_WHITESPACE}
    if any(map(_has_free_names, schemas_inside(schema))):
        options["json_allowed_escapes"] = ESCAPES
    return options


def _has_free_names(schema: _Schema) -> bool:
    """Return whether properties may have other names beside those that the schema knows."""
    is_known = any(schema.get(key) for key in ("properties", "patternProperties", "required"))
    return is_known and schema.get("additionalProperties") is not False


def enforceable_schema(schema: Any) -> Any:
    """Return a schema, or a list of schemas, as llguidance enforces it.

    Raises RecursionError for one that is nested too deeply. Raises InvalidRequest if it needs keys of a map that
    differ, since the grammar allows a key to occur twice, or numbers that `check_numbers` refuses.
    """
    dialect = schema.get("$schema") if isinstance(schema, dict) else None
    is_old = isinstance(dialect, str) and _IGNORES_SIBLINGS.fullmatch(dialect) is not None
    enforceable = _enforceable(schema, is_old)
    if isinstance(schema, dict):
        _check_all_limits(schema, is_old)
    return enforceable


def _enforceable(schema: Any, ignores_siblings: bool) -> Any:
    if isinstance(schema, list):
        return [_enforceable(each, ignores_siblings) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if ignores_siblings and isinstance(schema.get("$ref"), str):
        schema = {key: value for key, value in schema.items() if key in BESIDE_REFERENCES}
    if ignores_siblings:
        schema = {key: value for key, value in schema.items() if key not in COUNTS}
    schema = with_listed_multiples(schema)
    _check_distinct_keys(schema)
    if isinstance(patterns := schema.get("patternProperties"), dict) and len(patterns) > MAX_NAME_PATTERNS:
        raise InvalidRequest(f"patternProperties of a JSON schema may have {MAX_NAME_PATTERNS} patterns at most")
    check_numbers(schema)
    kept = {
        key: _inside(key, value, ignores_siblings)
        for key, value in schema.items()
        if (is_idle := IDLE.get(key)) is None or not is_idle(value, schema)
    }
    if isinstance(kept.get("$schema"), str):
        kept["$schema"] = _DIALECT.sub(_with_scheme, kept["$schema"])
    if isinstance(kept.get("pattern"), str):
        kept["pattern"] = as_read(kept["pattern"])
    if schema.get("format") == "hostname" and isinstance(most := schema.get("maxLength", MAX_HOSTNAME), int | float):
        kept["maxLength"] = min(most, MAX_HOSTNAME)
    kept = with_left_out(kept)
    return _with_real_dates(kept) if schema.get("format") in DATES else kept


def check_references(root: _Schema) -> None:
    """Raise InvalidRequest if a reference that is in use leads to itself, without a schema that says something.

    Also if a value of a schema would have to contain a value of the same schema, and so on without end.
    """
    grounded: set[int] = set()  # ids of schemas from which no references lead in a circle
    for schema in _schemas_in_use(root):
        path: dict[int, str] = {}
        reference, at = "", schema
        while isinstance(at, dict) and id(at) not in grounded:
            if id(at) in path:
                raise InvalidRequest(
                    f"the references of the JSON schema lead in a circle: {reference!r} refers to itself, and nothing "
                    "says which values are valid"
                )
            path[id(at)] = reference
            reference, at = _same_schema(root, at, reference)
        grounded.update(path)
    _check_finite_values(root)


def referred(root: _Schema, reference: Any) -> Any:
    """Return what a reference to a place in `root` refers to; None for other references, which llguidance resolves."""
    if not isinstance(reference, str):
        return None
    own, _, pointer = reference.partition("#")
    if own not in ("", root.get("$id")):
        return None
    at: Any = root
    for part in unquote(pointer).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list) and name.isdecimal() and int(name) < len(at):
            at = at[int(name)]
        else:
            at = at.get(name) if isinstance(at, dict) else None
    return None if pointer and not pointer.startswith("/") else at


def schemas_inside(schema: Any) -> Iterator[_Schema]:
    """Yield all schemas in a schema or a list of schemas, definitions included."""
    pending: list[Any] = [schema]
    while pending:
        each = pending.pop()
        if isinstance(each, list):
            pending.extend(each)
        elif isinstance(each, dict):
            yield each
            for key, value in each.items():
                if key not in DATA:
                    pending.extend(value.values() if key in MAPS and isinstance(value, dict) else [value])


def with_references(schema: Any, new: Callable[[str], str]) -> Any:
    """Return a schema in which `new` has replaced every reference."""
    if isinstance(schema, list):
        return [with_references(each, new) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            changed[key] = {name: with_references(each, new) for name, each in value.items()}
        elif key == "$ref" and isinstance(value, str):
            changed[key] = new(value)
        else:
            changed[key] = value if key in DATA else with_references(value, new)
    return changed


def _schemas_in_use(root: _Schema) -> Iterator[_Schema]:
    """Yield the schemas in `root`, but of its definitions only those that others refer to."""
    seen: set[int] = set()
    pending: list[Any] = [root]
    while pending:
        schema = pending.pop()
        if isinstance(schema, list):
            pending.extend(schema)
        elif isinstance(schema, dict) and id(schema) not in seen:
            seen.add(id(schema))
            yield schema
            pending.append(referred(root, schema.get("$ref")))
            for key, value in schema.items():
                if key not in DATA and key not in BY_REFERENCE and not key.startswith(EXTENSION):
                    pending.extend(value.values() if key in MAPS and isinstance(value, dict) else [value])


def _same_schema(root: _Schema, schema: _Schema, reference: str) -> tuple[str, Any]:
    """Return the schema that decides instead of this one, and the last reference to it; None if this one decides."""
    if "$ref" in schema:
        return str(schema["$ref"]), referred(root, schema["$ref"])
    for key in IN_PLACE:
        inside = schema.get(key)
        if isinstance(inside, list) and len(inside) == 1:
            return reference, inside[0]
    return reference, None


def _check_finite_values(root: _Schema) -> None:
    needed: dict[int, int] = {}  # by schema: lists in `_contained` without a schema that has a value
    waiting: dict[int, list[tuple[int, list[int]]]] = {}  # by schema: those that need it, and their lists
    finite: list[int] = []
    for schema in _schemas_in_use(root):
        lists = _contained(root, schema)
        needed[id(schema)] = len(lists)
        for each in lists:
            open_lists = [1]  # shared by the schemas of the list: the first one that has a value counts
            for inside in each:
                waiting.setdefault(id(inside), []).append((id(schema), open_lists))
        if not lists:
            finite.append(id(schema))
    while finite:
        for user, open_lists in waiting.pop(finite.pop(), []):
            needed[user] -= open_lists[0]
            if open_lists[0] and not needed[user]:
                finite.append(user)
            open_lists[0] = 0
    if any(needed.values()):
        raise InvalidRequest(
            "the references of the JSON schema lead in a circle: a value would have to contain another value of the "
            "same schema, without end"
        )


def _contained(root: _Schema, schema: _Schema) -> list[list[_Schema]]:
    """Return lists of schemas: a value of the schema needs a value of one schema from each list."""
    lists: list[list[Any]] = [[referred(root, schema["$ref"])]] if "$ref" in schema else []
    for key in IN_PLACE:
        inside = schema.get(key)
        if isinstance(inside, list) and inside:
            lists += [[each] for each in inside] if key == "allOf" else [inside]
    properties, required = schema.get("properties"), schema.get("required")
    if schema.get("type") == "object" and isinstance(properties, dict) and isinstance(required, list):
        lists += [[properties[name]] for name in required if isinstance(name, str) and name in properties]
    least = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(least, int) and least > 0 and "prefixItems" not in schema:
        lists.append([schema.get("items")])
    return [each for each in lists if all(isinstance(inside, dict) for inside in each)]


def _check_all_limits(root: _Schema, ignores_siblings: bool) -> None:
    """Raise InvalidRequest for limits of numbers that cannot be enforced together, wherever they are in the schema."""
    known: dict[int, _Alternatives] = {}
    for schema in _schemas_in_use(root):
        for parts in _limits(root, schema, ignores_siblings, known):
            check_limits([dict(part) for part in parts])


def _limits(
    root: _Schema, schema: Any, ignores_siblings: bool, known: dict[int, _Alternatives], depth: int = 0
) -> _Alternatives:
    """Return the sets of limits of which a number must keep one, by references and combinations of schemas."""
    if not isinstance(schema, dict):
        return _UNLIMITED
    if id(schema) in known:
        return known[id(schema)]
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"a JSON schema has more than {MAX_DEPTH} references or combinations within each other")
    known[id(schema)] = _UNLIMITED  # in a circle, nothing is added
    own = tuple((key, schema[key]) for key in LIMITS if isinstance(schema.get(key), int | float))
    found: _Alternatives = ((own,),) if own else _UNLIMITED
    groups: list[list[Any]] = []
    if ignores_siblings and "$ref" in schema:
        found = _UNLIMITED
    else:
        for key in IN_PLACE:
            inside = schema.get(key)
            if isinstance(inside, list) and inside:
                groups += [[each] for each in inside] if key == "allOf" else [inside]
    for group in [[referred(root, schema.get("$ref"))], *groups]:
        others = {one: None for each in group for one in _limits(root, each, ignores_siblings, known, depth + 1)}
        if len(found) * len(others) > MAX_ALTERNATIVES:
            raise InvalidRequest(f"a JSON schema has more than {MAX_ALTERNATIVES} combinations of limits of numbers")
        found = tuple(dict.fromkeys(tuple(dict.fromkeys(one + other)) for one in found for other in others))
    if any(len(each) > MAX_LIMITS for each in found):
        raise InvalidRequest(f"a JSON schema has more than {MAX_LIMITS} limits of one number")
    known[id(schema)] = found
    return found


def _with_scheme(dialect: re.Match[str]) -> str:
    return ("https" if dialect[2].startswith("/") else "http") + dialect[1]


def _with_real_dates(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.setdefault("pattern", REAL_DATE) == REAL_DATE:
        return schema
    others = schema.get("allOf", [])
    return {**schema, "allOf": [*others, {"pattern": REAL_DATE}]} if isinstance(others, list) else schema


def _check_distinct_keys(schema: _Schema) -> None:
    least, required = schema.get("minProperties"), schema.get("required")
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    keys = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()
    if isinstance(least, int) and not is_closed and least > len(keys) + 1:
        raise InvalidRequest(
            f"a JSON schema with minProperties: {least} cannot be enforced where keys are free, since a key may occur "
            "twice; list the keys in properties and required"
        )


def _inside(key: str, value: Any, ignores_siblings: bool) -> Any:
    if key in DATA:
        return value
    if key.startswith(EXTENSION):  # a schema only if one refers to it
        with suppress(InvalidRequest):
            return _enforceable(value, ignores_siblings)
        return True
    if key in MAPS and isinstance(value, dict):
        written = as_read if key == "patternProperties" else str
        return {written(name): _enforceable(each, ignores_siblings) for name, each in value.items()}
    return _enforceable(value, ignores_siblings)


def _allows_all(value: Any) -> bool:
    return value is True or value == {}


def _is_false(value: Any, _: _Schema) -> bool:
    return value is False


def _is_open(value: Any, _: _Schema) -> bool:
    return _allows_all(value)


def _maps_to_nothing(value: Any, _: _Schema) -> bool:
    return isinstance(value, dict) and all(each == [] or _allows_all(each) for each in value.values())


def _decides_nothing(_: Any, schema: _Schema) -> bool:
    """Return whether `if`, `then` and `else` allow everything: one without the others, or with open branches."""
    return "if" not in schema or all(_allows_all(schema.get(branch, True)) for branch in ("then", "else"))


def _counts_nothing(_: Any, schema: _Schema) -> bool:
    """Return whether `contains` and its limits allow everything."""
    return "contains" not in schema or (
        "maxContains" not in schema and schema.get("minContains") == 0 and schema["minContains"] is not False
    )


IDLE: dict[str, Callable[[Any, _Schema], bool]] = {  # keyword -> whether its value in this schema allows everything
    "$recursiveAnchor": _is_false,
    "uniqueItems": _is_false,
    "not": _is_false,
    "propertyNames": lambda value, schema: _allows_all(value) or value == {"type": "string"},
    "additionalItems": lambda _, schema: not isinstance(schema.get("items"), list),
    "unevaluatedItems": _is_open,
    "unevaluatedProperties": _is_open,
    "dependencies": _maps_to_nothing,
    "dependentRequired": _maps_to_nothing,
    "dependentSchemas": _maps_to_nothing,
    "if": _decides_nothing,
    "then": _decides_nothing,
    "else": _decides_nothing,
    "contains": _counts_nothing,
    "minContains": _counts_nothing,
    "maxContains": _counts_nothing,
}
