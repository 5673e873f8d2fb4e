"""JSON schemas for llguidance, which refuses some keywords even where they allow everything.

A keyword without effect, such as `uniqueItems: false`, is left out. Other keywords stay: llguidance enforces or refuses
them. Dates and times get a pattern, since its own allows 29 February in every year and second 60 in every minute, and
host names get a maximum length. References that only lead back to themselves are refused, because llguidance accepts
them but then allows no text. The name of a dialect has its own scheme. Keywords that drafts 4, 6 and 7 ignore are left
out. `numbers.py` has the rules for numbers, and `patterns.py` those for regular expressions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ...common.errors import InvalidRequest
from .numbers import (
    LIMIT_KEYWORDS,
    MAX_BOUNDS,
    OWN_BOUNDS,
    bounds_of_integers,
    check_limits,
    check_numbers,
    with_left_out,
    with_listed_multiples,
    with_own_bounds,
    with_shared_integers,
)
from .patterns import as_read
from .references import (
    BY_REFERENCE,
    DATA,
    EXTENSION,
    IN_PLACE,
    MAPS,
    as_uri,
    referred,
    schemas_in_use,
    schemas_inside,
    with_definitions_in_use,
)
from .rewriting import rewritten

COUNTS = frozenset({"minContains", "maxContains"})  # keywords that drafts 4, 6 and 7 do not have
BESIDE_REFERENCES = frozenset({"$ref", "$schema", "$id", "id", *BY_REFERENCE})  # kept in drafts that ignore others

MAX_COMBINATIONS = 200  # combinations of limits of numbers in one schema
MAX_LIMITS = 50  # limits on one number
MAX_NESTING = 100  # depth of references and combinations in one place
MAX_NAME_PATTERNS = 128  # patterns of one schema, which are compared in pairs: half a second for 200
MAX_HOSTNAME = 253  # characters (RFC 1123)
# Formats that llguidance enforces. Others are annotations, as unknown formats are in JSON Schema.
FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
REAL_DATE = f"^(....-(0[13-9]|1[0-2])-..|....-02-([01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"

# Second 60 is left out: a leap second is valid in few minutes only.
REAL_TIMES = {"date": REAL_DATE, "date-time": f"{REAL_DATE}[tT]..:..:[0-5]", "time": "^..:..:[0-5]"}

_DIALECT = re.compile(r"^https?(://json-schema\.org/draft(-0[467]|/2019-09|/2020-12)/schema)")
_IGNORES_SIBLINGS = re.compile(r"https?://json-schema\.org/draft-0[467]/schema#?")
# Whitespace at most once in each place, so that a model cannot fill its output with spaces.
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}"
# Escapes without u: llguidance accepts escapes of known names as the name of a free property.
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
    """Return whether properties may have names that the schema does not list."""
    is_known = any(schema.get(key) for key in ("properties", "patternProperties", "required"))
    return is_known and schema.get("additionalProperties") is not False


def enforceable_schema(schema: Any, *, bounds_integers: bool = True) -> Any:
    """Return a schema, or a list of schemas, as llguidance enforces it.

    With `bounds_integers`, integers have at most 64 bits, unless the schema has too many different bounds for that.
    Raises RecursionError for a schema that is nested too deeply. Raises InvalidRequest if it needs keys of a map that
    differ, since the grammar allows a key to occur twice, or numbers that `check_numbers` refuses.
    """
    dialect = schema.get("$schema") if isinstance(schema, dict) else None
    is_old = isinstance(dialect, str) and _IGNORES_SIBLINGS.fullmatch(dialect) is not None
    if isinstance(schema, dict):
        schema = rewritten(with_definitions_in_use(_as_said(schema, is_old, schema)))
    enforceable = _enforceable(schema, bounds_integers)
    if isinstance(schema, dict):
        _check_all_limits(schema)
        if bounds_integers and len(bounds_of_integers(enforceable)) > MAX_BOUNDS:
            enforceable = _enforceable(schema, bounds_integers=False)
        return with_shared_integers(enforceable)
    return enforceable


def _as_said(schema: Any, ignores_siblings: bool, root: _Schema) -> Any:
    """Return a schema with URIs as references, without keywords that its dialect ignores."""
    if isinstance(schema, list):
        return [_as_said(each, ignores_siblings, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    is_reference = isinstance(schema.get("$ref"), str)
    said: dict[str, Any] = {}
    for key, value in schema.items():
        if ignores_siblings and (key in COUNTS or (is_reference and key not in BESIDE_REFERENCES)):
            continue
        if key in MAPS and isinstance(value, dict):
            said[key] = {name: _as_said(each, ignores_siblings, root) for name, each in value.items()}
        elif key == "$ref" and is_reference:
            said[key] = as_uri(root, value)
        elif key == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        else:
            said[key] = value if key in DATA else _as_said(value, ignores_siblings, root)
    return said


def _enforceable(schema: Any, bounds_integers: bool) -> Any:
    if isinstance(schema, list):
        return [_enforceable(each, bounds_integers) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = with_listed_multiples(schema)
    _check_distinct_keys(schema)
    if isinstance(patterns := schema.get("patternProperties"), dict) and len(patterns) > MAX_NAME_PATTERNS:
        raise InvalidRequest(f"patternProperties of a JSON schema may have {MAX_NAME_PATTERNS} patterns at most")
    check_numbers(schema)
    kept = {
        key: _inside(key, value, bounds_integers)
        for key, value in schema.items()
        if (is_idle := IDLE.get(key)) is None or not is_idle(value, schema)
    }
    if isinstance(dialect := kept.pop("$schema", None), str) and _DIALECT.match(dialect):
        kept = {"$schema": _DIALECT.sub(_with_scheme, dialect), **kept}
    if isinstance(kept.get("pattern"), str):
        kept["pattern"] = as_read(kept["pattern"])
    if schema.get("format") == "hostname" and isinstance(most := schema.get("maxLength", MAX_HOSTNAME), int | float):
        kept["maxLength"] = min(most, MAX_HOSTNAME)
    kept = with_left_out(kept)
    if bounds_integers:
        kept = with_own_bounds(kept)
    real = REAL_TIMES.get(str(schema.get("format")))
    return _with_pattern(kept, real) if real else kept


def _check_all_limits(root: _Schema) -> None:
    """Raise InvalidRequest for limits of numbers that cannot be enforced together, wherever they are in the schema."""
    known: dict[int, _Alternatives] = {}
    for schema in schemas_in_use(root):
        for parts in _limits(root, schema, known):
            check_limits([dict(part) for part in parts])


def _limits(root: _Schema, schema: Any, known: dict[int, _Alternatives], depth: int = 0) -> _Alternatives:
    """Return the alternative sets of limits of a number, by references and combinations of schemas."""
    if not isinstance(schema, dict):
        return _UNLIMITED
    if id(schema) in known:
        return known[id(schema)]
    if depth > MAX_NESTING:
        raise InvalidRequest(f"a JSON schema has more than {MAX_NESTING} references or combinations within each other")
    known[id(schema)] = _UNLIMITED  # a reference cycle adds no limits
    own = tuple(
        (key, schema[key])
        for key in LIMIT_KEYWORDS
        if isinstance(schema.get(key), int | float) and schema[key] != OWN_BOUNDS.get(key)
    )
    found: _Alternatives = ((own,),) if own else _UNLIMITED
    groups: list[list[Any]] = []
    for key in IN_PLACE:
        inside = schema.get(key)
        if isinstance(inside, list) and inside:
            groups += [[each] for each in inside] if key == "allOf" else [inside]
    for group in [[referred(root, schema.get("$ref"))], *groups]:
        others = {one: None for each in group for one in _limits(root, each, known, depth + 1)}
        if len(found) * len(others) > MAX_COMBINATIONS:
            raise InvalidRequest(f"a JSON schema has more than {MAX_COMBINATIONS} combinations of limits of numbers")
        found = tuple(dict.fromkeys(tuple(dict.fromkeys(one + other)) for one in found for other in others))
    if any(len(each) > MAX_LIMITS for each in found):
        raise InvalidRequest(f"a JSON schema has more than {MAX_LIMITS} limits of one number")
    known[id(schema)] = found
    return found


def _with_scheme(dialect: re.Match[str]) -> str:
    return ("https" if dialect[2].startswith("/") else "http") + dialect[1]


def _with_pattern(schema: dict[str, Any], pattern: str) -> dict[str, Any]:
    if schema.setdefault("pattern", pattern) == pattern:
        return schema
    others = schema.get("allOf", [])
    return {**schema, "allOf": [*others, {"pattern": pattern}]} if isinstance(others, list) else schema


def _check_distinct_keys(schema: _Schema) -> None:
    least = schema.get("minProperties")
    required = schema.get("required")
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    keys = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()
    if isinstance(least, int) and not is_closed and least > len(keys) + 1:
        raise InvalidRequest(
            f"a JSON schema with minProperties: {least} cannot be enforced where keys are free, since a key may occur "
            "twice; list the keys in properties and required"
        )


def _inside(key: str, value: Any, bounds_integers: bool) -> Any:
    if key in DATA:
        return value
    if key.startswith(EXTENSION):  # a schema only by reference
        with suppress(InvalidRequest):
            return _enforceable(value, bounds_integers)
        return True
    if key in MAPS and isinstance(value, dict):
        written = as_read if key == "patternProperties" else str
        return {written(name): _enforceable(each, bounds_integers) for name, each in value.items()}
    return _enforceable(value, bounds_integers)


def _allows_all(value: Any) -> bool:
    return value is True or value == {}


def _is_false(value: Any, _: _Schema) -> bool:
    return value is False


def _is_open(value: Any, _: _Schema) -> bool:
    return _allows_all(value)


def _maps_to_nothing(value: Any, _: _Schema) -> bool:
    return isinstance(value, dict) and all(each == [] or _allows_all(each) for each in value.values())


def _decides_nothing(_: Any, schema: _Schema) -> bool:
    """Return whether `if`, `then` and `else` allow everything: `if` alone, branches without `if`, or open branches."""
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
