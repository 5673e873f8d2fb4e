"""References within JSON schemas: their targets, the schemas in use, and cycles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

from ...common.errors import InvalidRequest

DATA = frozenset({"const", "default", "enum", "example", "examples"})  # keywords whose values are not schemas
# Keywords that do not restrict values.
ANNOTATIONS = frozenset({"$comment", "default", "deprecated", "description", "example", "examples", "title"})
EXTENSION = "x-"  # beginning of keywords that no draft defines
# Keywords whose value maps names to schemas; `dependencies` also maps names to lists of names.
MAPS = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})

BY_REFERENCE = frozenset({"$defs", "definitions"})  # schemas that apply only by reference
IN_PLACE = ("allOf", "anyOf", "oneOf")  # a single schema in one of these lists replaces the list
_DYNAMIC = frozenset({"$dynamicRef", "$recursiveRef"})
_CONDITIONS = ("not", "if", "then", "else")
_POINTER = "/~!$&'()*+,;=:@?"  # characters of a JSON pointer that a URI may have in its fragment

_Schema = Mapping[str, Any]


def check_references(root: _Schema) -> None:
    """Raise InvalidRequest if a reference in use leads back to itself without a schema that restricts values.

    The same holds if a value of a schema would have to contain a value of the same schema, without end.
    """
    grounded: set[int] = set()  # ids of schemas whose references have no cycle
    for schema in schemas_in_use(root):
        path: dict[int, str] = {}
        reference = ""
        at = schema
        while isinstance(at, dict) and id(at) not in grounded:
            if id(at) in path:
                raise InvalidRequest(
                    f"the references of the JSON schema lead in a circle: {reference!r} refers to itself, and nothing "
                    "says which values are valid"
                )
            path[id(at)] = reference
            reference, at = _same_schema(root, at, reference)
        grounded.update(path)
    _check_conditions(root)
    _check_finite_values(root)


def referred(root: _Schema, reference: Any) -> Any:
    """Return the value that a reference into `root` refers to; None for other references, which llguidance resolves."""
    pointer = _own_pointer(root, reference)
    return None if pointer is None else _at(root, pointer)


def as_uri(root: _Schema, reference: str) -> str:
    """Return a reference to a place in `root` with all characters encoded that a URI cannot have."""
    pointer = _own_pointer(root, reference)
    return reference if pointer is None else f"{reference.partition('#')[0]}#{quote(pointer, safe=_POINTER)}"


def _own_pointer(root: _Schema, reference: Any) -> str | None:
    """Return the JSON pointer of a reference to a place in `root`; None for other references."""
    if not isinstance(reference, str):
        return None
    own, _, fragment = reference.partition("#")
    if own not in ("", root.get("$id")):
        return None
    pointer = unquote(fragment)
    if pointer and not pointer.startswith("/"):
        return None
    return fragment if _at(root, pointer) is None and _at(root, fragment) is not None else pointer


def _at(root: _Schema, pointer: str) -> Any:
    at: Any = root
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list) and name.isdecimal() and int(name) < len(at):
            at = at[int(name)]
        else:
            at = at.get(name) if isinstance(at, dict) else None
    return at


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


def schemas_in_use(root: _Schema) -> Iterator[_Schema]:
    """Yield the schemas in `root`, without the definitions that no schema uses."""
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


def with_definitions_in_use(root: _Schema) -> _Schema:
    """Return a schema without the definitions to which no reference in use refers.

    A schema with references that only llguidance resolves, by identifiers or anchors, keeps all its definitions.
    """
    has_bases = any(schema is not root and isinstance(schema.get("$id"), str) for schema in schemas_inside(root))
    used = list(schemas_in_use(root))
    if has_bases or any(_may_be_inside(root, schema) for schema in used):
        return root
    in_use = set(map(id, used))
    kept = {id(each) for schema in used for each in _containers(root, schema.get("$ref"))} | in_use

    def names(values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: around(each) for name, each in values.items() if id(each) in kept}

    def around(value: Any) -> Any:
        """Return the part of a value that contains schemas in use."""
        if isinstance(value, list):
            return [around(each) if id(each) in kept else True for each in value]
        return whole(value) if id(value) in in_use else names(value)

    def whole(value: Any) -> Any:
        """Return a value in use."""
        if isinstance(value, list):
            return [whole(each) for each in value]
        return {key: inside(key, each) for key, each in value.items()} if isinstance(value, dict) else value

    def inside(key: str, value: Any) -> Any:
        if key in BY_REFERENCE:
            return names(value)
        if key in DATA or key.startswith(EXTENSION):
            return value
        is_map = key in MAPS and isinstance(value, dict)
        return {name: whole(each) for name, each in value.items()} if is_map else whole(value)

    changed: _Schema = whole(root)
    return changed


def _may_be_inside(root: _Schema, schema: _Schema) -> bool:
    """Return whether a schema refers to a place in `root` that its references do not show."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or _own_pointer(root, reference) is not None:
        return not schema.keys().isdisjoint(_DYNAMIC)
    identifier = str(root.get("$id", root.get("id", "")))
    try:
        return urldefrag(urljoin(identifier, reference)).url == urldefrag(identifier).url
    except ValueError:  # not an address
        return True


def _containers(root: _Schema, reference: Any) -> Iterator[Any]:
    """Yield the objects and arrays that a reference to a place in `root` leads through."""
    parts = (_own_pointer(root, reference) or "").split("/")
    for end in range(2, len(parts) + 1):
        yield _at(root, "/".join(parts[:end]))


def _same_schema(root: _Schema, schema: _Schema, reference: str) -> tuple[str, Any]:
    """Return the schema that replaces this one by reference, and the last reference to it; None if there is none."""
    if "$ref" in schema:
        return str(schema["$ref"]), referred(root, schema["$ref"])
    for key in IN_PLACE:
        inside = schema.get(key)
        if isinstance(inside, list) and len(inside) == 1:
            return reference, inside[0]
    return reference, None


def _check_conditions(root: _Schema) -> None:
    """Raise InvalidRequest if the validity of a value depends on the invalidity of the same value."""
    users: dict[int, list[int]] = {}
    num_open: dict[int, int] = {}  # schema -> number of schemas about the same value that may lead back to it
    schemas = list(schemas_in_use(root))
    for schema in schemas:
        about_same = [referred(root, schema["$ref"])] if "$ref" in schema else []
        for key in (*IN_PLACE, *_CONDITIONS):
            inside = schema.get(key)
            about_same += inside if isinstance(inside, list) else [inside]
        parts = [each for each in about_same if isinstance(each, dict)]
        num_open[id(schema)] = len(parts)
        for each in parts:
            users.setdefault(id(each), []).append(id(schema))
    grounded = [schema for schema, num in num_open.items() if not num]
    while grounded:
        for user in users.get(grounded.pop(), ()):
            num_open[user] -= 1
            if not num_open[user]:
                grounded.append(user)
    for schema in schemas:
        for key in _CONDITIONS:
            inside = schema.get(key)
            if isinstance(inside, dict) and num_open.get(id(inside), 0):
                raise InvalidRequest(
                    f"the references of the JSON schema lead in a circle: {key!r} is about values that are valid or "
                    "invalid depending on itself"
                )


def _check_finite_values(root: _Schema) -> None:
    needed: dict[int, int] = {}  # schema -> lists in `_contained` without a schema known to have a value
    waiting: dict[int, list[tuple[int, list[int]]]] = {}  # schema -> schemas that need it, and their lists
    finite: list[int] = []
    for schema in schemas_in_use(root):
        lists = _contained(root, schema)
        needed[id(schema)] = len(lists)
        for each in lists:
            open_lists = [1]  # shared by the schemas of the list: the first schema with a value decides
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


def _needed_items(schema: _Schema) -> list[Any]:
    """Return the schemas of the first `minItems` items of an array."""
    least = schema.get("minItems")
    items = schema.get("items")
    first, others = ("items", "additionalItems") if isinstance(items, list) else ("prefixItems", "items")
    known = schema.get(first)
    if not isinstance(least, int) or not isinstance(known, list | None):
        return []
    known = known or []
    return [*known[: max(0, least)], *([schema.get(others)] if least > len(known) else [])]


def _property(schema: _Schema, name: str) -> Any:
    """Return the schema of a property; None if there is none or it depends on patterns."""
    known = schema.get("properties", {})
    if isinstance(known, dict) and name in known:
        return known[name]
    return None if schema.get("patternProperties") else schema.get("additionalProperties")


def _contained(root: _Schema, schema: _Schema) -> list[list[_Schema]]:
    """Return lists of schemas: a value of the schema needs a value of one schema from each list."""
    lists: list[list[Any]] = [[referred(root, schema["$ref"])]] if "$ref" in schema else []
    for key in IN_PLACE:
        inside = schema.get(key)
        if isinstance(inside, list) and inside:
            lists += [[each] for each in inside] if key == "allOf" else [inside]
    kind = schema.get("type")
    required = schema.get("required")
    if kind in ("object", ["object"]) and isinstance(required, list):
        lists += [[_property(schema, name)] for name in required if isinstance(name, str)]
    if kind in ("array", ["array"]):
        lists += [[each] for each in _needed_items(schema)]
    return [each for each in lists if all(isinstance(inside, dict) for inside in each)]
