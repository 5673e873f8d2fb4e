"""The rule that the output must match, under the names of OpenAI, vLLM, llama.cpp and SGLang."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from ...common.errors import InvalidRequest
from ...common.prompts import shown
from ...common.types import StructuredOutputs
from ..http.errors import BadRequest

# Top-level fields of vLLM's older versions, of llama.cpp and of SGLang, and the kind of grammar in each.
ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
KINDS = ("json", "json_object", "regex", "choice", "grammar")  # keys of vLLM's `structured_outputs`
STRUCTURE_FIELDS = frozenset({"response_format", "structured_outputs", *ALIASES})
_LARK_START = re.compile(r"^[ \t]*[?!]*start(\.\d+)?[ \t]*:(?!:=)", re.MULTILINE)  # GBNF has "::="


def structure_of(values: dict[str, Any]) -> StructuredOutputs | None:
    """Return the rule in the body's fields, None if any text is allowed. Raises BadRequest."""
    found: list[tuple[str, StructuredOutputs]] = []
    if (given := _response_format(values.get("response_format", {"type": "text"}))) is not None:
        found.append(("response_format", given))
    if "structured_outputs" in values:
        found.append(("structured_outputs", _structured_outputs(values["structured_outputs"])))
    found += [(name, _of_kind(name, kind, values[name])) for name, kind in ALIASES.items() if name in values]
    if len(found) > 1:
        raise BadRequest(f"give one of {found[0][0]} and {found[1][0]}, not both", found[1][0])
    return found[0][1] if found else None


def structure_field(values: Set[str]) -> str:
    """Return the name of the body's field with the grammar; in `/v1/responses` it is `text.format`."""
    given = (name for name in ("response_format", "structured_outputs", *ALIASES) if name in values)
    return next(given, "text.format" if "text" in values else "tools")


def _response_format(value: object) -> StructuredOutputs | None:
    match value:
        case {"type": "text", **rest} if not rest:
            return None
        case {"type": "json_object", **rest} if not rest:
            return StructuredOutputs(json_object=True)
        case {"type": "json_object", "schema": schema, **rest} if not rest:  # llama.cpp's
            return _of_kind("response_format", "json", schema)
        case {"type": "json_schema", "json_schema": {"schema": schema} as given, **rest} if not rest:
            _check_labels(given)
            return _of_kind("response_format", "json", schema)
    raise BadRequest(
        'response_format must be {"type": "text"}, {"type": "json_object"} or '
        f'{{"type": "json_schema", "json_schema": {{"name": …, "schema": {{…}}}}}}, not {shown(value)}',
        "response_format",
    )


def _check_labels(given: Mapping[Any, Any]) -> None:
    """Raise BadRequest for a wrong type in a field next to a schema; such fields have no effect."""
    for name, kind, allowed in (("name", str, "text"), ("description", str, "text"), ("strict", bool, "true or false")):
        value = given.get(name)
        if value is not None and type(value) is not kind:
            raise BadRequest(
                f"response_format: json_schema.{name} must be {allowed}, not {shown(value)}", "response_format"
            )


def _structured_outputs(value: object) -> StructuredOutputs:
    given = {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else {}
    if len(given) == 1 and (kind := next(iter(given))) in KINDS:
        return _of_kind("structured_outputs", kind, given[kind])
    raise BadRequest(
        f"structured_outputs must be an object with exactly one of {', '.join(KINDS)}, not {shown(value)}",
        "structured_outputs",
    )


def _of_kind(name: str, kind: str, value: Any) -> StructuredOutputs:
    """Return the structure of a field's value; a grammar is Lark's if it has a rule `start`."""
    try:
        if kind == "grammar":
            if not isinstance(value, str):
                raise InvalidRequest(f"a grammar must be text, not {shown(value)}")
            return StructuredOutputs(lark=value) if _LARK_START.search(value) else StructuredOutputs(gbnf=value)
        if type(value) not in _TYPES[kind] or (kind == "choice" and not all(isinstance(text, str) for text in value)):
            raise InvalidRequest(f"{kind} must be {_NAMES[kind]}, not {shown(value)}")
        if kind == "json_object" and value is False:
            raise InvalidRequest("json_object must be true")
        field: dict[str, Any] = {kind: tuple(value) if kind == "choice" else value}
        return StructuredOutputs(**field)
    except InvalidRequest as error:
        raise BadRequest(f"{name}: {str(error).removeprefix('structured_outputs').lstrip(': ')}", name) from None


_TYPES: dict[str, tuple[type, ...]] = {
    "json": (dict, str, bool),
    "json_object": (bool,),
    "regex": (str,),
    "choice": (list,),
}
_NAMES = {
    "json": "a JSON schema, as an object or as text",
    "json_object": "true",
    "regex": "text",
    "choice": "a list of texts",
}
