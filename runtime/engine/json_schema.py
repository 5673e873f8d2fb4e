"""JSON schemas for llguidance, which refuses some keywords even where they allow everything.

A keyword that says nothing, such as `uniqueItems: false`, is left out. Other keywords stay: llguidance enforces or
refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..common.errors import InvalidRequest

DATA = frozenset({"const", "default", "enum", "example", "examples"})  # their values are no schemas
MAPS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})  # of schemas, by name

_Schema = Mapping[str, Any]


def without_idle_keywords(schema: Any) -> Any:
    """Return a schema, or a list of schemas, without the keywords that allow everything.

    Raises RecursionError for one that is nested too deeply, and InvalidRequest if it needs keys of a map that differ:
    the grammar allows a key to occur twice.
    """
    if isinstance(schema, list):
        return [without_idle_keywords(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    _check_distinct_keys(schema)
    return {
        key: _inside(key, value)
        for key, value in schema.items()
        if (is_idle := IDLE.get(key)) is None or not is_idle(value, schema)
    }


def _check_distinct_keys(schema: _Schema) -> None:
    least, required = schema.get("minProperties"), schema.get("required")
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    keys = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()
    if isinstance(least, int) and not is_closed and least > len(keys) + 1:
        raise InvalidRequest(
            f"a JSON schema with minProperties: {least} cannot be enforced where keys are free, since a key may occur "
            "twice; list the keys in properties and required"
        )


def _inside(key: str, value: Any) -> Any:
    if key in DATA:
        return value
    if key in MAPS and isinstance(value, dict):
        return {name: without_idle_keywords(each) for name, each in value.items()}
    return without_idle_keywords(value)


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
