"""Names of properties in JSON schemas: `propertyNames` and `minProperties` by keywords that llguidance supports."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .disjoint import required_names
from .references import ANNOTATIONS

MAX_NAMES = 500  # names of a list
MAX_OPTIONAL = 20  # optional properties that may satisfy a minimum of one more property

_Schema = Mapping[str, Any]


def with_listed_names(schema: _Schema, names: Collection[Any]) -> _Schema:
    """Return a schema with only these properties instead of `propertyNames`; the same schema if it has patterns."""
    known = schema.get("properties", {})
    if schema.get("patternProperties") or not isinstance(known, dict) or len(names) > MAX_NAMES:
        return schema
    others = schema.get("additionalProperties", True)
    allowed = [name for name in names if isinstance(name, str)]
    kept = {name: each for name, each in known.items() if name in allowed}
    if others is not False:
        kept |= {name: others for name in allowed if name not in known}
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    return {**rest, "properties": kept, "additionalProperties": False}


def with_patterned_names(schema: _Schema, names: _Schema) -> _Schema:
    """Return a schema with `patternProperties` instead of `propertyNames`; the same one if that is not equivalent."""
    said = names.keys() - ANNOTATIONS
    is_plain = names.get("type", "string") == "string" and not any(
        schema.get(key) for key in ("properties", "patternProperties")
    )
    if said <= {"type"} or not is_plain or schema.get("additionalProperties") is False:
        return schema
    pattern = names.get("pattern")
    if said <= {"type", "minLength", "maxLength"}:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        if isinstance(least, int) and isinstance(most, int | str):
            pattern = rf"^[\s\S]{{{max(0, least):d},{most}}}$"
    elif not said <= {"type", "pattern"}:
        return schema
    if not isinstance(pattern, str):
        return schema
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    return {
        **rest,
        "patternProperties": {pattern: schema.get("additionalProperties", True)},
        "additionalProperties": False,
    }


def with_least_properties(schema: _Schema) -> _Schema:
    """Return a schema with required properties instead of a minimum number of properties, if other names are allowed.

    One of its named optional properties becomes required.
    """
    least = schema["minProperties"]
    known = schema.get("properties")
    required = required_names(schema)
    if not isinstance(least, int) or isinstance(least, bool) or not isinstance(known, dict):
        return schema
    rest = {key: value for key, value in schema.items() if key != "minProperties"}
    if least <= len(required):
        return rest
    optional = [name for name in known if name not in required]
    if schema.get("additionalProperties") is False or least > len(required) + 1 or not optional:
        return schema
    needed: list[Any] = [{"required": [name]} for name in optional[:MAX_OPTIONAL]]
    given = rest.get("allOf", [])
    return {**rest, "allOf": [*given, {"anyOf": needed}] if isinstance(given, list) else [{"anyOf": needed}]}
