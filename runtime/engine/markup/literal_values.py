"""Rules of a grammar for JSON schemas whose values are literals of Python, or of Gemma."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .argument_streams import ANNOTATION_KEYWORDS
from .literal_arguments import Notation, python_literal

MAX_VALUE_DEPTH = 16  # values of greater depth are JSON
SINGLE_QUOTED = r"/'([^'\\\uFDD0\x00-\x1F]|\\[\\'nrt])*'/"

_COMMA = 'ws? "," ws?'


@dataclass(frozen=True, slots=True)
class LiteralForms:
    """The rules of a notation's literals: of any text, of a JSON value, and of a key, as of any key."""

    text: str
    literal: Callable[[Any], str]
    key: Callable[[str], str]  # a key and the sign after it; empty if the notation cannot have the key
    any_key: str


def python_forms(json_text: str) -> LiteralForms:
    """Return the forms of Python's literals; `json_text` is the rule of a text in JSON."""
    text = f"{json_text} | {SINGLE_QUOTED}"
    return LiteralForms(
        text=text,
        literal=lambda value: _quoted(python_literal(value)),
        key=lambda key: f'{_quoted(json.dumps(key, ensure_ascii=False))} ws? ":"',
        any_key=f'({text}) ws? ":"',
    )


class LiteralValues:
    """Writer of the rules of values.

    `lines` has the grammar. `add_rule` adds a rule and returns its name; `json_rule` adds the rule of a schema's JSON,
    which the parser reads, too: the rule of every schema with other keywords than types, items and properties.
    """

    def __init__(
        self,
        notation: Notation,
        forms: LiteralForms,
        lines: list[str],
        add_rule: Callable[[str], str],
        json_rule: Callable[[Any], str],
    ) -> None:
        self._notation = notation
        self._forms = forms
        self._add_rule = add_rule
        self._json_rule = json_rule
        words = {word: _quoted(name) for word, name in notation.words.items()}
        self._types = {
            "boolean": f"{words['true']} | {words['false']}",
            "null": words["null"],
            "array": "any_list",
            "object": "any_dict",
            "string": forms.text,
        }
        if not any(line.startswith("any_value:") for line in lines):
            lines += [
                f"any_value: {forms.text} | {json_rule({'type': 'number'})} | {' | '.join(words.values())}"
                " | any_list | any_dict",
                f'any_list: "[" ws? (any_value ({_COMMA} any_value)*)? ws? "]"',
                f'any_dict: "{{" ws? (any_pair ({_COMMA} any_pair)*)? ws? "}}"',
                f"any_pair: {forms.any_key} ws? any_value",
            ]

    def rule(self, schema: Any, depth: int = 0) -> str:
        """Return the rule of one value."""
        keys = set() if schema is True else schema.keys() - ANNOTATION_KEYWORDS
        if not keys:
            return "any_value"
        if keys == {"type"}:
            kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            return self._add_rule(
                " | ".join(self._types.get(kind) or self._json_rule({"type": kind}) for kind in kinds)
            )
        if keys in ({"enum"}, {"enum", "type"}, {"const"}) and (values := _simple_values(schema)):
            return self._add_rule(" | ".join(map(self._forms.literal, values)))
        if depth < MAX_VALUE_DEPTH:
            if keys == {"anyOf"}:
                return self._add_rule(" | ".join(self.rule(each, depth + 1) for each in schema["anyOf"]))
            if keys == {"type", "items"} and schema["type"] == "array" and schema["items"] is not False:
                item = self.rule(schema["items"], depth + 1)
                return self._add_rule(f'"[" ws? ({item} ({_COMMA} {item})*)? ws? "]"')
            if _is_closed_object(schema, keys) and all(map(self._forms.key, schema["properties"])):
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

    def _object(self, schema: Any, depth: int) -> str:
        required = schema.get("required", [])
        items = [
            (f"{self._forms.key(key)} ws? {self.rule(each, depth + 1)}", key in required)
            for key, each in schema["properties"].items()
            if each is not False
        ]
        return self._add_rule(f'"{{" ws? {self.sequence(items)} ws? "}}"')


def _is_closed_object(schema: Any, keys: set[str]) -> bool:
    return (
        keys <= {"type", "properties", "required", "additionalProperties"}
        and schema.get("type") == "object"
        and schema.get("additionalProperties") is False
        and isinstance(schema.get("properties"), dict)
        and all(schema["properties"].get(name, False) is not False for name in schema.get("required", []))
    )


def _simple_values(schema: Any) -> list[Any]:
    """Return the values of an enum or a const of words, texts and integers; none if it has other values."""
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if "type" in schema and not (schema["type"] == "string" and all(isinstance(each, str) for each in values)):
        return []
    return values if all(each is None or isinstance(each, bool | int | str) for each in values) else []


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
