"""The arguments of a tool call as they stream: where they end in the output, and their JSON.

Both forms return JSON whose every prefix is the beginning of an object. Parameters cannot express every schema:
`parameters_schema` returns the part that they can.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from ...common.errors import InvalidRequest
from ..json_schema.references import IN_PLACE, check_references, referred
from .markup import ID, CallSyntax

SPACE = " \t\r\n"

# Keys of a schema that do not restrict the value.
ANNOTATION_KEYWORDS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
# Keywords about objects that parameters do not express; some only with certain values.
UNEXPRESSED = frozenset(
    {"anyOf", "oneOf", "not", "if", "then", "else", "const", "enum", "patternProperties", "propertyNames"}
    | {"dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"}
)
MAX_SCHEMA_PARTS = 100  # schemas that an object must match, by references and allOf
SIMPLE = frozenset({"string", "null", "boolean", "integer", "number"})

ValueForm = Literal["text", "mixed", "json"]

_OUTSIDE_TEXT = re.compile(r'["{}\[\]]')
_WITHIN_TEXT = re.compile(r'["\\]')
_ID = re.compile(f"({ID})")
_NUMBER = re.compile("[0-9]+")
_ESCAPED = re.compile(r"\\.", re.DOTALL)  # characters after a backslash


class ArgumentStream(Protocol):
    """The arguments of one call."""

    is_complete: bool

    def feed(self, text: str) -> tuple[str, str]:
        """Return the JSON for more of the output, and the unread rest, which the caller passes again."""

    def finish(self, is_cut: bool) -> str:
        """Return the text that completes the JSON at the output's end; nothing if the output `is_cut`."""


class JSONArguments:
    """One JSON object, passed on unchanged."""

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._is_broken = False  # the text is not an object
        self._in_text = False
        self._is_escaped = False

    def feed(self, text: str) -> tuple[str, str]:
        """See `ArgumentStream.feed`."""
        if self._is_broken:
            return "", ""
        if not self._depth:
            text = text.lstrip(SPACE)
            if text and text[0] != "{":
                self._is_broken = True
                return "", ""
        end = self._end(text)
        return text[:end], text[end:]

    def finish(self, is_cut: bool) -> str:
        """See `ArgumentStream.finish`."""
        return "{}" if not is_cut and not self._depth and not self.is_complete else ""

    def _end(self, text: str) -> int:
        """Return where the object ends, or the length of the text."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_WITHIN_TEXT if self._in_text else _OUTSIDE_TEXT).search(text, at)
            if found is None:
                break
            at = found.end()
            character = found.group()
            if character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_text = not self._in_text
            else:
                self._depth += 1 if character in "{[" else -1
                if not self._depth:
                    self.is_complete = True
                    return at
        return len(text)


class ParameterArguments:
    r"""Parameters, as `<parameter=KEY>\nVALUE\n</parameter>`, as a JSON object.

    `syntax` has the literals around keys and values. The schema of the arguments decides which values are texts.
    """

    def __init__(self, syntax: CallSyntax, schema: Mapping[str, Any] | None) -> None:
        self.is_complete = False
        self._syntax = syntax
        self._key_end = syntax.key_close.partition(" ")[0]
        self._schema = schema or {}
        self._num_parameters = 0
        self._form: ValueForm | None = None  # form of the next value
        self._value_schema: Any = True
        self._end = syntax.value_close
        self._at_start = False  # no character of the value has been read
        self._held = ""  # text of a value that is shown at its end

    def feed(self, text: str) -> tuple[str, str]:
        """See `ArgumentStream.feed`."""
        pieces: list[str] = []
        before = None
        while not self.is_complete and text != before:
            before = text
            text = (self._between if self._form is None else self._value)(text, pieces)
        return "".join(pieces), text

    def finish(self, is_cut: bool) -> str:
        """See `ArgumentStream.finish`."""
        return "{}" if not is_cut and not self._num_parameters and not self.is_complete else ""

    def _between(self, text: str, pieces: list[str]) -> str:
        """Take the head of the next parameter, or find the end of the parameters."""
        text = text.lstrip(SPACE)
        opening = self._syntax.key_open
        if text.startswith(opening):
            key, end, rest = text[len(opening) :].partition(self._key_end)
            size = match_literal(self._syntax.key_close, end + rest) if end else None
            if size is None:
                return text
            if size >= 0:
                self._begin(key, pieces)
                return (end + rest)[size:]
        if not opening.startswith(text):
            self.is_complete = True
            pieces.append("}" if self._num_parameters else "{}")
        return text

    def _begin(self, key: str, pieces: list[str]) -> None:
        self._value_schema = property_schema(self._schema, key)
        self._form = value_form(self._value_schema)
        self._at_start = True
        pieces.append(f"{', ' if self._num_parameters else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        pieces.append('"' if self._form == "text" else "")
        # A line break comes before the end because a text in JSON may contain the literal, but no line break.
        is_json_on_lines = self._form == "json" and self._syntax.on_lines
        self._end = f"\n{self._syntax.value_close}" if is_json_on_lines else self._syntax.value_close
        self._num_parameters += 1

    def _value(self, text: str, pieces: list[str]) -> str:
        """Take more of a value, without the line breaks at its start and end."""
        line_break = "\n" if self._syntax.on_lines else ""
        if self._at_start and text:
            text = text.removeprefix(line_break)
            self._at_start = False
        end = text.find(self._end)
        if end >= 0 and self._is_in_text(text[:end]):  # the literal is a part of a text in JSON
            self._held += text[: end + 1]
            return text[end + 1 :]
        if end >= 0:
            value = self._held + text[:end].removesuffix(line_break)
            text = text[end + len(self._end) :]
            pieces.append(_text(value) + '"' if self._form == "text" else _json_value(value, self._value_schema))
            self._held = ""
            self._form = None
            return text
        literal = self._syntax.value_close
        end = len(text) - max(num_held(text, line_break + literal), num_held(text, literal))
        if self._form == "text":
            pieces.append(_text(text[:end]))
        else:
            self._held += text[:end]
        return text[end:]

    def _is_in_text(self, rest: str) -> bool:
        """Return whether a value in JSON that continues with `rest` ends within a text."""
        if self._form != "json" or self._syntax.on_lines:
            return False
        return _ESCAPED.sub("", self._held + rest).count('"') % 2 == 1


def property_schema(schema: Mapping[str, Any], key: str) -> Any:
    """Return the schema of one argument; references within the schema are resolved."""
    properties = schema.get("properties")
    others = schema.get("additionalProperties", True)
    found = properties.get(key, others) if isinstance(properties, dict) else others
    return _looked_up(schema, found)


def parameters_schema(schema: Mapping[str, Any], *, never: str = ">") -> dict[str, Any]:
    """Return properties, required and additionalProperties of an object, from all schemas that it must match.

    `never` has the characters that names cannot have.
    False in additionalProperties: other names are not allowed. Raises InvalidRequest for a schema that
    parameters do not express.
    """
    parts = _parts(schema)
    names = [name for part in parts for name in (*part.get("properties", {}), *part.get("required", []))]
    properties = {name: _all_of(schema, [_value_schema(part, name) for part in parts]) for name in dict.fromkeys(names)}
    required = {name: True for part in parts for name in part.get("required", [])}
    others = _all_of(schema, [part.get("additionalProperties", True) for part in parts])
    if not any("additionalProperties" in part for part in parts) and any("properties" in part for part in parts):
        others = False  # arguments that the tool's author does not mention are not allowed
    for name, given in properties.items():
        if sign := next((each for each in never if each in name), ""):
            raise InvalidRequest(f"the property {name!r} cannot be a parameter of this model, because of its {sign}")
        if given is False and name in required:
            raise InvalidRequest(f"the required property {name!r} has no value")
    for part in parts:
        if part.get("minProperties", 0) > len(required):
            raise InvalidRequest("minProperties cannot be enforced for this model's parameters; use required")
        if part.get("maxProperties", math.inf) < (math.inf if others is not False else len(properties)):
            raise InvalidRequest("maxProperties cannot be enforced for this model's parameters")
    return {"properties": properties, "required": list(required), "additionalProperties": others}


def _parts(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas that an object must match: the schema itself, its references, and the schemas in allOf."""
    check_references(schema)
    parts: list[Mapping[str, Any]] = []
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop(0)
        if part is True or any(part is each for each in parts):
            continue
        if not isinstance(part, dict) or len(parts) == MAX_SCHEMA_PARTS:
            raise InvalidRequest("this model's parameters cannot express the schemas which the arguments must match")
        _check_part(part)
        parts.append(part)
        if "$ref" in part:
            pending.append(referred(schema, part["$ref"]))
        for key in IN_PLACE:
            pending += part.get(key, [])
    return parts


def _check_part(part: Mapping[str, Any]) -> None:
    for key in sorted(part.keys() & UNEXPRESSED):
        if not (key in IN_PLACE and isinstance(part[key], list) and len(part[key]) == 1):
            raise InvalidRequest(f"this model's parameters cannot express {key}, where it is about all arguments")
    kinds = part.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise InvalidRequest("the arguments of a tool are an object")
    forms: dict[str, Any] = {"properties": dict, "required": list, "allOf": list, "minProperties": int}
    for key, form in (forms | {"maxProperties": int, "additionalProperties": bool | dict}).items():
        if key in part and not isinstance(part[key], form):
            raise InvalidRequest(f"{key} has a value that it cannot have")
    if not all(isinstance(name, str) for name in part.get("required", [])):
        raise InvalidRequest("required is a list of names")


def _value_schema(part: Mapping[str, Any], name: str) -> Any:
    return part.get("properties", {}).get(name, part.get("additionalProperties", True))


def _all_of(root: Mapping[str, Any], schemas: list[Any]) -> Any:
    """Return one schema that combines all of them."""
    limiting = [each for index, each in enumerate(schemas) if each not in (True, {}) and each not in schemas[:index]]
    if False in limiting:
        return False
    if len(limiting) > 1:
        return {"allOf": limiting}
    return _looked_up(root, limiting[0] if limiting else schemas[0])


def _looked_up(schema: Mapping[str, Any], found: Any) -> Any:
    """Return a schema, or its target if it is only a reference."""
    if not isinstance(found, dict) or found.keys() - ANNOTATION_KEYWORDS != {"$ref"}:
        return found
    target = referred(schema, found["$ref"])
    return found if target is None else target


def value_form(schema: Any) -> ValueForm:
    """Return the form of a value: plain text, JSON, or JSON with a text as the fallback."""
    types = _simple_types(schema)
    if types == frozenset({"string"}):
        return "text"
    return "json" if types is None or "string" not in types else "mixed"


def text_values(schema: Any) -> list[str]:
    """Return the texts to which a schema restricts its value; none if it allows other values, or texts with tags."""
    keys = schema.keys() - ANNOTATION_KEYWORDS - {"type"} if isinstance(schema, dict) else set()
    values = schema["enum"] if keys == {"enum"} else [schema["const"]] if keys == {"const"} else []
    if not keys or schema.get("type", "string") != "string" or not isinstance(values, list):
        return []
    return values if all(isinstance(each, str) and "</" not in each for each in values) else []


def match_literal(literal: str, text: str) -> int | None:
    """Return the end of `literal` at the beginning of the text; -1 if it is not there, None if more text is needed."""
    at = 0
    for index, part in enumerate(literal.split(" ")):
        if index:
            at = len(text) - len(text[at:].lstrip(SPACE))
        for piece in _ID.split(part):
            if piece == ID:
                number = _NUMBER.match(text, at)
                if number is None or number.end() == len(text):
                    return -1 if number is None and at < len(text) else None
                at = number.end()
                continue
            if not text.startswith(piece, at):
                return None if piece.startswith(text[at:]) else -1
            at += len(piece)
    return at


def num_held(text: str, literal: str) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of `literal`."""
    for length in range(min(len(text), len(literal) - 1), 0, -1):
        if literal.startswith(text[-length:]):
            return length
    return 0


def _simple_types(schema: Any) -> frozenset[str] | None:
    """Return the types of a schema that only names types, or lists texts; None for other schemas."""
    if schema is True:
        return SIMPLE | {"object", "array"}
    if not isinstance(schema, dict):
        return None
    keys = schema.keys() - ANNOTATION_KEYWORDS
    if text_values(schema):
        return frozenset({"string"})
    if not keys:
        return SIMPLE | {"object", "array"}
    if keys == {"type"}:
        given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset(given) if all(isinstance(each, str) and each in SIMPLE for each in given) else None
    for name in ("anyOf", "oneOf"):
        if keys == {name} and isinstance(schema[name], list):
            found = [_simple_types(each) for each in schema[name]]
            if any(each is None for each in found) or any(map(text_values, schema[name])):
                return None
            return frozenset().union(*(each for each in found if each is not None))
    return None


def _json_value(text: str, schema: Any) -> str:
    """Return a value's JSON: the text itself if it is JSON of a type that the schema names, else a JSON text."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    types = _simple_types(schema)
    if types is None or (not isinstance(value, str) and _type_names(value) & types):
        return text.strip(SPACE)
    return json.dumps(text, ensure_ascii=False)


def _type_names(value: object) -> frozenset[str]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number"})
    return frozenset({"object"} if isinstance(value, dict) else {"array"})


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number")
