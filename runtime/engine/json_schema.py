"""JSON schemas for llguidance, which refuses some keywords even where they allow everything.

A keyword that says nothing, such as `uniqueItems: false`, is left out. Other keywords stay: llguidance enforces or
refuses them. Dates get a pattern, since its own allows 29 February in every year, and host names a greatest length.
References that only lead back to themselves are refused: llguidance accepts them, and allows no text there. Classes of
characters in patterns are written so that it reads them as ECMAScript does, and the name of a dialect has its own
scheme. What drafts 4, 6 and 7 ignore beside a reference is left out. `json_numbers.py` is about numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from ..common.errors import InvalidRequest
from .json_numbers import check_numbers, with_left_out

DATA = frozenset({"const", "default", "enum", "example", "examples"})  # their values are no schemas
MAPS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})  # of schemas, by name

BY_REFERENCE = frozenset({"$defs", "definitions"})  # whose schemas apply only where one refers to them
IN_PLACE = ("allOf", "anyOf", "oneOf")  # with a single schema they say what that one says

BESIDE_REFERENCES = frozenset({"$ref", "$schema", "$id", "id", *BY_REFERENCE})  # kept in drafts that ignore others

MAX_HOSTNAME = 253  # characters (RFC 1123)
DATES = ("date", "date-time")  # formats
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
REAL_DATE = f"^(....-(0[13-9]|1[0-2])|....-02-([01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"

_DIALECT = re.compile(r"^https?(://json-schema\.org/draft(-0[467]|/2019-09|/2020-12)/schema)")
_IGNORES_SIBLINGS = re.compile(r"https?://json-schema\.org/draft-0[467]/schema#?")
# A character behind a backslash, a property of Unicode, or a class of characters.
_PATTERN_PART = re.compile(r"\\[pP]\{[^}]*\}|\\.|\[(\^?)((?:\\.|[^\]\\])*)\]", re.DOTALL)
# A character of a class, or a class within it.
_ATOM = re.compile(r"\\(?:[pP]\{[^}]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|c[a-zA-Z]|.)|.", re.DOTALL)
_SYNTAX = frozenset("-[&~")  # of classes in Rust's syntax
_NUMBERED = re.compile(r"\\[xu]\{?([0-9a-fA-F]+)\}?")
_ESCAPED = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "b": 8, "0": 0}  # characters behind a backslash, in a class
CONTROL = frozenset(range(32))

# Whitespace at most once in each place: no model fills its output with spaces.
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}"
# Behind a backslash, without u: as the name of a property that is free, llguidance takes escapes of known names.
ESCAPES = 'nrbtf\\"'

_Schema = Mapping[str, Any]


def library_options(schema: Any) -> dict[str, str]:
    """Return the options with which llguidance must read an enforceable schema, its `x-guidance`."""
    options = {"whitespace_pattern": JSON_WHITESPACE}
    return options | {"json_allowed_escapes": ESCAPES} if any(map(_has_free_names, schemas_inside(schema))) else options


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
    return _enforceable(schema, isinstance(dialect, str) and _IGNORES_SIBLINGS.fullmatch(dialect) is not None)


def _enforceable(schema: Any, ignores_siblings: bool) -> Any:
    if isinstance(schema, list):
        return [_enforceable(each, ignores_siblings) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if ignores_siblings and isinstance(schema.get("$ref"), str):
        schema = {key: value for key, value in schema.items() if key in BESIDE_REFERENCES}
    _check_distinct_keys(schema)
    check_numbers(schema)
    kept = {
        key: _inside(key, value, ignores_siblings)
        for key, value in schema.items()
        if (is_idle := IDLE.get(key)) is None or not is_idle(value, schema)
    }
    if isinstance(kept.get("$schema"), str):
        kept["$schema"] = _DIALECT.sub(_with_scheme, kept["$schema"])
    if isinstance(kept.get("pattern"), str):
        kept["pattern"] = _as_read(kept["pattern"])
    if schema.get("format") == "hostname" and isinstance(most := schema.get("maxLength", MAX_HOSTNAME), int | float):
        kept["maxLength"] = min(most, MAX_HOSTNAME)
    kept = with_left_out(kept)
    return _with_real_dates(kept) if schema.get("format") in DATES else kept


def check_references(root: _Schema) -> None:
    """Raise InvalidRequest if a reference that is in use leads to itself, without a schema that says something."""
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
                if key not in DATA and key not in BY_REFERENCE:
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


def _with_scheme(dialect: re.Match[str]) -> str:
    return ("https" if dialect[2].startswith("/") else "http") + dialect[1]


def _as_read(pattern: str) -> str:
    """Return a pattern with classes that llguidance reads as ECMAScript does."""
    return _PATTERN_PART.sub(_written, pattern)


def _written(part: re.Match[str]) -> str:
    """Return a part of a pattern as llguidance must have it.

    A class with all control characters would also allow quotation marks and backslashes, which a string has behind a
    backslash too: it gets all but the first. In Rust's syntax, a bracket in a class begins another, and &&, ~~ and --
    are operators. A class may be empty, or the complement of nothing.
    """
    if part[2] is None:
        return _without_nul(part[0]) if part[0][:2] in (r"\p", r"\P") else part[0]
    if not part[2]:
        return r"[\s\S]" if part[1] else r"[^\s\S]"
    ranges = list(_ranges(_ATOM.findall(part[2])))
    body = "".join("-".join(map(_atom, each)) for each in ranges)
    if part[1]:
        return rf"[^\x00{body}]"
    has_property = any(each[0][:2] in (r"\p", r"\P") for each in ranges)
    return _without_nul(body) if has_property or frozenset().union(*map(_controls, ranges)) == CONTROL else f"[{body}]"


def _without_nul(body: str) -> str:
    return rf"[{body}&&[^\x00]]"


def _ranges(atoms: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the atoms of a class: alone, or the first and the last one of a range."""
    at = 0
    while at < len(atoms):
        ends = (atoms[at], atoms[min(at + 2, len(atoms) - 1)])
        if atoms[at + 1 : at + 2] == ["-"] and at + 2 < len(atoms) and None not in map(_code, ends):
            yield ends
            at += 3
        else:
            yield (atoms[at],)
            at += 1


def _atom(atom: str) -> str:
    code = _code(atom) if atom[:2] in (r"\0", r"\b", r"\c") else None  # which Rust's syntax does not have
    return "\\" + atom if atom in _SYNTAX else atom if code is None else rf"\x{code:02x}"


def _code(atom: str) -> int | None:
    """Return the code of a character in a class; None for a class of characters."""
    if not atom.startswith("\\"):
        return ord(atom)
    if numbered := _NUMBERED.fullmatch(atom):
        return int(numbered[1], 16)
    if atom[1] == "c" and len(atom) == 3:
        return ord(atom[2]) % 32
    return None if atom[1] in "pPdDsSwW" else _ESCAPED.get(atom[1], ord(atom[1]))


def _controls(ends: tuple[str, ...]) -> frozenset[int]:
    """Return the control characters of a range in a class."""
    if ends[0] == r"\s":
        return frozenset(range(9, 14))
    first, last = _code(ends[0]), _code(ends[-1])
    return CONTROL.intersection(range(first, last + 1)) if first is not None and last is not None else frozenset()


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
    if key in MAPS and isinstance(value, dict):
        written = _as_read if key == "patternProperties" else str
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
