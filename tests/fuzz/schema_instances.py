"""Instances of JSON schemas, made from the schemas alone, and changed ones, which are often almost valid."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 12
MAX_REPEATS = 4  # items of an array, and properties of a map
TEXTS = (
    *(
        "",
        "a",
        "b1",
        "abc",
        "name",
        "x-a",
        "@scope",
        "A",
        "EN",
        "USA",
        "1",
        "1.2.3",
        "v2",
        "10Gi",
        "0.5",
        "#a0b1c2",
        "a@b.co",
    ),
    *(
        "https://example.org/a",
        "git://h/x",
        "${{ x }}",
        "config.yml",
        "src/main.py",
        "2024-02-28",
        "2024-02-29T10:00:00Z",
    ),
    *(
        "10:00:00Z",
        "P1D",
        "127.0.0.1",
        "::1",
        "1b4e28ba-2fa1-41d2-883f-0016d3cca427",
        "0123abcd",
        "example.org",
        "*",
        "true",
    ),
    *("a" * 12, "some words of text", "{{ x }}", "./a", "/a/b", "key", "UPPER_CASE", "camelCase", "a-b", "é", "1m 30s"),
)
_LEAST = {"string": "minLength", "array": "minItems"}
_Schema = Mapping[str, Any]


class InstanceGenerator:
    """Values that a schema suggests. Whether they are valid is for a validator to say."""

    def __init__(self, root: _Schema, chance: random.Random) -> None:
        self._root = root
        self._chance = chance
        self._declared = set(_declared(root))

    def value(self, schema: Any, depth: int = 0) -> Any:
        """Return a value of a schema; properties come in the schema's order."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return self._chance.choice((None, True, 1, "a"))
        found = [self._own(schema, depth)] if schema.keys() & _DECIDING else []
        if isinstance(reference := schema.get("$ref"), str):
            found.append(self.value(self._at(reference), depth + 1))
        for each in schema.get("allOf", ()):
            found.append(self.value(each, depth + 1))
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                found.append(self.value(self._chance.choice(schema[key]), depth + 1))
        if not found:
            return self._chance.choice((None, True, 1, "a", [], {}))
        if all(isinstance(each, dict) for each in found):
            whole = {name: value for each in found for name, value in each.items()}
            return {name: whole[name] for name in sorted(whole, key=lambda name: name not in self._declared)}
        return found[-1]

    def _at(self, reference: str) -> Any:
        at: Any = self._root
        for part in reference.partition("#")[2].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~").replace("%24", "$")
            at = at[int(name)] if isinstance(at, list) and name.isdecimal() else at.get(name, {})
        return at

    def _own(self, schema: _Schema, depth: int) -> Any:
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else self._chance.choice(schema["enum"] or [None])
        kinds = schema.get("type", "object" if schema.keys() & _OBJECTS else "array" if "items" in schema else "string")
        kind = self._chance.choice(kinds) if isinstance(kinds, list) else kinds
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._text(schema)
            case "integer" | "number":
                return self._number(schema, kind)
            case "boolean":
                return self._chance.random() < 0.5
        return None

    def _object(self, schema: _Schema, depth: int) -> dict[str, Any]:
        required = schema.get("required", [])
        share = 0.5 if depth < MAX_DEPTH // 2 else 0.0
        found = {
            name: self.value(each, depth + 1)
            for name, each in schema.get("properties", {}).items()
            if name in required or self._chance.random() < share
        }
        others = schema.get("additionalProperties", {})
        names = schema.get("propertyNames")
        patterns = schema.get("patternProperties", {})
        for _ in range(self._chance.randrange(3) if depth < MAX_DEPTH // 2 else 0):
            name = self.value({"type": "string", **names}, depth + 1) if isinstance(names, dict) else self._text({})
            of_name = [each for pattern, each in patterns.items() if _matches(pattern, name)]
            if name not in schema.get("properties", {}) and (of_name or others is not False):
                found[str(name)] = self.value((of_name or [others])[0], depth + 1)
        for name in required:
            found.setdefault(name, self.value(others, depth + 1))
        return found

    def _array(self, schema: _Schema, depth: int) -> list[Any]:
        items = schema.get("items", {})
        first = schema.get("prefixItems", items if isinstance(items, list) else [])
        rest = schema.get("additionalItems", {}) if isinstance(items, list) else items
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", MAX_REPEATS), max(MAX_REPEATS, least))
        length = self._chance.randint(min(least, most), most) if depth < MAX_DEPTH // 2 else least
        if rest is False:
            length = min(length, len(first))
        return [self.value(first[at] if at < len(first) else rest, depth + 1) for at in range(length)]

    def _text(self, schema: _Schema) -> str:
        fitting = [
            text
            for text in TEXTS
            if schema.get("minLength", 0) <= len(text) <= schema.get("maxLength", len(text))
            and _matches(schema.get("pattern", ""), text)
        ]
        return self._chance.choice(fitting or TEXTS)

    def _number(self, schema: _Schema, kind: str) -> float:
        least = schema.get("minimum", schema.get("exclusiveMinimum", -5))
        most = schema.get("maximum", schema.get("exclusiveMaximum", max(least, 0) + 50))
        step = schema.get("multipleOf", 1)
        number = self._chance.choice((least, most, (least + most) // 2, least + 1, most - 1))
        number = number // step * step
        return number + 0.5 if kind == "number" and self._chance.random() < 0.3 else int(number)


_OBJECTS = frozenset({"properties", "additionalProperties", "patternProperties", "required", "propertyNames"})
_DECIDING = _OBJECTS | {"const", "enum", "type", "items", "prefixItems"}


def _declared(value: Any) -> Iterator[str]:
    """Yield the names of properties anywhere in a schema."""
    if isinstance(value, dict | list):
        known = value.get("properties") if isinstance(value, dict) else None
        yield from known if isinstance(known, dict) else ()
        for each in value.values() if isinstance(value, dict) else value:
            yield from _declared(each)


def _matches(pattern: Any, text: Any) -> bool:
    try:
        return re.search(pattern, str(text)) is not None
    except (re.error, TypeError):
        return True


def changed(value: Any, chance: random.Random) -> Any:
    """Return a copy of a value that differs in one place."""
    places = list(_places(value))
    path = chance.choice(places)
    return _changed_at(value, path, chance)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(each, (*path, key))


def _changed_at(value: Any, path: tuple[Any, ...], chance: random.Random) -> Any:
    if path:
        copy = dict(value) if isinstance(value, dict) else list(value)
        copy[path[0]] = _changed_at(value[path[0]], path[1:], chance)
        return copy
    others: list[Any] = [None, True, 0, -1, 1.5, 10**6, "", "zz", [], {}]
    if isinstance(value, dict):
        left_out = chance.choice([*value, None])
        others += 3 * [
            {name: each for name, each in value.items() if name != left_out},
            {**value, "zz": chance.choice(others)},
        ]
    elif isinstance(value, list):
        others += 3 * [value[1:], [*value, *value[-1:]], [*value, chance.choice(others)]]
    elif isinstance(value, str):
        others += 3 * [value[:-1], f"{value}é", f" {value}", f"{value}{value}", value.upper()]
    elif not isinstance(value, bool | None):
        others += 3 * [-value, value + 1, value + 0.25, value * 1000]
    return chance.choice(others)
