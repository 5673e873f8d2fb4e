"""JSON schemas of tools' arguments: closed objects, and the enforceable part of a schema without a grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .references import ANNOTATIONS, BY_REFERENCE, DATA, MAPS, referred, schemas_inside

_NOTES = ANNOTATIONS | {"discriminator"}
# Keywords that allow an object more properties than `properties` names.
_OPENING = frozenset(
    {"$ref", "additionalProperties", "allOf", "anyOf", "dependencies", "dependentRequired", "dependentSchemas", "else"}
    | {"if", "minProperties", "not", "oneOf", "patternProperties", "propertyNames", "then", "unevaluatedProperties"}
)
_ALTERNATIVES = ("anyOf", "oneOf")
# Keywords that every grammar can enforce.
_SIMPLE = frozenset(
    {"$defs", "$ref", "additionalProperties", "allOf", "anyOf", "const", "definitions", "description", "enum", "items"}
    | {"maxItems", "maxLength", "minItems", "minLength", "oneOf", "prefixItems", "properties", "required", "type"}
)

_Schema = Mapping[str, Any]


def closed(root: Any) -> Any:
    """Return a schema whose objects have declared properties only, unless the schema mentions others.

    Small models add properties to open objects, and do not end. Validators accept closed objects too.
    """
    if not isinstance(root, dict):
        return root
    places = set(_places(root))
    open_targets = {
        id(referred(root, each["$ref"]))
        for each in schemas_inside(root)
        if "$ref" in each and (id(each) not in places or len(each.keys() - _NOTES) > 1)
    }

    def written(schema: Any) -> Any:
        if isinstance(schema, list):
            return [written(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        found = {key: value if key in DATA else _with_maps(key, value, written) for key, value in schema.items()}
        if id(schema) in places and id(schema) not in open_targets and _is_declared(schema):
            found["additionalProperties"] = False
        return found

    return written(root)


def _with_maps(key: str, value: Any, written: Callable[[Any], Any]) -> Any:
    if key in MAPS and isinstance(value, dict):
        return {name: written(each) for name, each in value.items()}
    return written(value)


def _is_declared(schema: _Schema) -> bool:
    """Return whether an object schema declares properties and does not mention others."""
    known = schema.get("properties")
    required = schema.get("required", [])
    if not isinstance(known, dict) or not known or schema.keys() & _OPENING:
        return False
    return isinstance(required, list) and all(isinstance(name, str) and name in known for name in required)


def _places(root: _Schema) -> Iterator[int]:
    """Yield the ids of schemas that alone decide about a value."""
    pending: list[Any] = [root, *(each for name in BY_REFERENCE for each in _values(root.get(name)))]
    while pending:
        schema = pending.pop()
        if not isinstance(schema, dict):
            continue
        yield id(schema)
        pending += _values(schema.get("properties"))
        for key in ("items", "additionalProperties", "prefixItems"):
            inside = schema.get(key)
            pending += inside if isinstance(inside, list) else [inside]
        for key in _ALTERNATIVES:
            if schema.keys() - _NOTES - BY_REFERENCE <= {key, "type", "$schema"}:
                inside = schema.get(key)
                pending += inside if isinstance(inside, list) else []


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else []


def relaxed(schema: Any) -> Any:
    """Return the part of a schema that a grammar can always enforce: kinds, names, constants and lengths.

    It applies to tools that are not strict if no grammar can enforce the whole schema.
    """
    if isinstance(schema, list):
        return [relaxed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key not in _SIMPLE or (key in ("oneOf", "anyOf") and not isinstance(value, list)):
            continue
        name = "anyOf" if key == "oneOf" and "anyOf" not in schema else key
        if name == "oneOf":
            continue
        kept[name] = value if key in DATA else _with_maps(key, value, relaxed)
    return kept
