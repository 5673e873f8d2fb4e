"""Rules of a grammar for JSON schemas whose values are literals of Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from .argument_streams import ANNOTATION_KEYWORDS
from .python_arguments import python_literal

MAX_VALUE_DEPTH = 16  # deeper values have JSON's words for True, False and None
SINGLE_QUOTED = r"/'([^'\\\uFDD0\x00-\x1F]|\\[\\'nrt])*'/"

_TYPES = {"boolean": '"True" | "False"', "null": '"None"', "array": "py_list", "object": "py_dict"}
_COMMA = 'ws? "," ws?'


class PythonValues:
    """Writer of the rules of values.

    `lines` has the grammar. `add_rule` adds a rule and returns its name; `json_rule` adds the rule of a schema's JSON,
    which the parser reads, too: the rule of every schema with other keywords than types, items and properties.
    """

    def __init__(self, lines: list[str], add_rule: Callable[[str], str], json_rule: Callable[[Any], str]) -> None:
        self._add_rule = add_rule
        self._json_rule = json_rule
        if not any(line.startswith("py_value:") for line in lines):
            text = json_rule({"type": "string"})
            pair = f'({text} | {SINGLE_QUOTED}) ws? ":" ws? py_value'
            lines += [
                f"py_value: {text} | {SINGLE_QUOTED} | {json_rule({'type': 'number'})}"
                ' | "True" | "False" | "None" | py_list | py_dict',
                f'py_list: "[" ws? (py_value ({_COMMA} py_value)*)? ws? "]"',
                f'py_dict: "{{" ws? (py_pair ({_COMMA} py_pair)*)? ws? "}}"',
                f"py_pair: {pair}",
            ]

    def rule(self, schema: Any, depth: int = 0) -> str:
        """Return the rule of one value."""
        keys = set() if schema is True else schema.keys() - ANNOTATION_KEYWORDS
        if not keys:
            return "py_value"
        if keys == {"type"}:
            kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            return self._add_rule(self._types(kinds))
        if keys in ({"enum"}, {"enum", "type"}, {"const"}) and (literals := _literals(schema)):
            return self._add_rule(" | ".join(literals))
        if depth < MAX_VALUE_DEPTH:
            if keys == {"anyOf"}:
                return self._add_rule(" | ".join(self.rule(each, depth + 1) for each in schema["anyOf"]))
            if keys == {"type", "items"} and schema["type"] == "array" and schema["items"] is not False:
                item = self.rule(schema["items"], depth + 1)
                return self._add_rule(f'"[" ws? ({item} ({_COMMA} {item})*)? ws? "]"')
            if _is_closed_object(schema, keys):
                return self._object(schema, depth)
        return self._json_rule(schema)

    def sequence(self, items: Sequence[tuple[str, bool]], more: str = "") -> str:
        """Return the rule of items in their order with commas between them; False: an item may be missing.

        Any number of `more` may follow.
        """
        after = self._add_rule(f"({_COMMA} {more})*") if more else ""  # the rule after an item
        start = self._add_rule(f"({more} {after})?") if more else ""  # the rule before the first item
        for item, is_required in reversed(items):
            then = self._add_rule(f"{item} {after}")
            start = then if is_required else self._add_rule(f"{then} | {start}" if start else f"{then}?")
            following = f"{_COMMA} {then}"
            optional = f"{following} | {after}" if after else f"({following})?"
            after = self._add_rule(following if is_required else optional)
        return start

    def _types(self, kinds: Sequence[str]) -> str:
        """Return alternatives for the names of types."""
        rules = [_TYPES.get(kind) or self._json_rule({"type": kind}) for kind in kinds]
        return " | ".join([*rules, *([SINGLE_QUOTED] if "string" in kinds else [])])

    def _object(self, schema: Any, depth: int) -> str:
        required = schema.get("required", [])
        items = [
            (f'{json.dumps(json.dumps(key, ensure_ascii=False), ensure_ascii=False)} ws? ":" ws? '
             f"{self.rule(each, depth + 1)}", key in required)
            for key, each in schema["properties"].items()
            if each is not False
        ]  # fmt: skip
        return self._add_rule(f'"{{" ws? {self.sequence(items)} ws? "}}"')


def _is_closed_object(schema: Any, keys: set[str]) -> bool:
    return (
        keys <= {"type", "properties", "required", "additionalProperties"}
        and schema.get("type") == "object"
        and schema.get("additionalProperties") is False
        and isinstance(schema.get("properties"), dict)
        and all(schema["properties"].get(name, False) is not False for name in schema.get("required", []))
    )


def _literals(schema: Any) -> list[str]:
    """Return the literals of an enum or a const of words, texts and integers; none if it has other values."""
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if "type" in schema and not (schema["type"] == "string" and all(isinstance(each, str) for each in values)):
        return []
    if not all(each is None or isinstance(each, bool | int | str) for each in values):
        return []
    return [json.dumps(python_literal(each), ensure_ascii=False) for each in values]
