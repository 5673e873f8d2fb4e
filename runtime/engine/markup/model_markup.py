"""The markup of a model: its family's, found by the chat template, or a description in its tokenizer_config.json.

A `response_template` (transformers 5.13) or its predecessor `response_schema` defines the beginning and the end of a
message's fields in the output. It can express more than `Markup`, and only concerns reading. Parts that `Markup` cannot
express are logged, and the family's markup is used for them. Must not import parsers or grammars.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import structlog

from .markup import (
    ANSWER_TAGS,
    BRACKETS,
    COMMAND_THINKING,
    GENERIC_MARKUP,
    KNOWN_MARKUPS,
    RESPONSE_TAGS,
    SEED_THINK,
    THINK,
    THOUGHT,
    CallSyntax,
    Markup,
    Reasoning,
)

# Texts in the chat template of each family; the first family with all of them is the model's.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("gemma4", ("<|tool_call>call:",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes_list", ("<tool_call>\n[",)),
    ("hermes_list", ("<tool_call>\\n[",)),  # the line break as an escape in a text of the template
    ("hermes", ("<tool_call>",)),
    ("hunyuan_a13b", ("<tool_calls>[",)),
    ("cohere_command3", ("<|START_ACTION|>", '"tool_name"')),
    ("granite", ("<|start_of_role|>", "<|tool_call|>")),
    ("phi4_mini_json", ("<|tool_call|>",)),
    ("phi4_mini_json", ("<|tool|>",)),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral_list", ("[TOOL_CALLS]",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters":')),
    ("llama3_json", ("<|python_tag|>",)),
    ("nemotron_json", ("<TOOLCALL>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("olmo3", ("<function_calls>",)),
)
_TOKEN_SIGNS = {"lfm2": "<|tool_call_start|>"}  # special tokens of families whose template may not show calls
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
MAX_LITERAL = 200  # characters of a delimiter

_log = structlog.get_logger("quire.text")

# A part of a pattern: optional white space, the name of the call, or a literal character.
_PART = re.compile(
    r"(?P<space>(?:\\[snrt]|\s)[*+?]?\??)"
    r"|\(\?P<(?P<group>\w+)>[^()]*\)(?![*+?{])"
    r"|(?:\\(?P<escaped>[^A-Za-z0-9\s])|(?P<plain>[^\\()\[\]{}.*+?^$|\s]))(?![*+?{])"
)
_PLACEHOLDER = re.compile(r"\{(?:content\.)?([A-Za-z0-9_-]+)\}")
_GROUP = r"\((?:\?P<\w+>)?(?!\?)[^()]*\)"
_WHOLE_CALL = re.compile(r"\{\s*type\s*:\s*'function'\s*,\s*function\s*:\s*@\s*\}")  # a call in a response_schema


def find_markup(name: str, template: str, tokens: Mapping[str, int], config: Mapping[str, Any] | None = None) -> Markup:
    """Return the markup of the family `name`, or `auto`: of the model with this chat template and these special tokens.

    With `auto`, the markup of the model's tokenizer_config.json has precedence over the template's. Otherwise the
    template always decides about reasoning. `auto` has generic tool calls where the template shows none; `none` has no
    tool calls.
    """
    markup = _family(name, template, tokens)
    if name == "auto" and not markup.channels:
        markup = _described(config or {}, markup)
    return markup.with_special(tokens)


def _family(name: str, template: str, tokens: Collection[str]) -> Markup:
    if name == "auto":
        shown = [each for each, signs in _SIGNS if all(sign in template for sign in signs)]
        name = next(iter([*shown, *(each for each, sign in _TOKEN_SIGNS.items() if sign in tokens)]), name)
    family = GENERIC_MARKUP if name == "auto" else KNOWN_MARKUPS.get(name, Markup())
    if family.channels:
        return family
    found = [
        each
        for each in (THINK, BRACKETS, SEED_THINK, THOUGHT, COMMAND_THINKING)
        if each.close in template or each.close in tokens
    ]
    tags = [each for each in (ANSWER_TAGS, RESPONSE_TAGS) if each.open in template and each.close in template]
    return replace(family, reasoning=found[0] if found else None, answer=tags[0] if found and tags else None)


class _OtherForm(Exception):
    """A part of a description that `Markup` cannot express; the message says why."""


def _described(config: Mapping[str, Any], family: Markup) -> Markup:
    """Return the family's markup, replaced where the model has a description of its own."""
    source = next((name for name in ("response_template", "response_schema") if config.get(name) is not None), None)
    if source is None:
        return family
    parts: dict[str, Any] = {}
    try:
        fields = _fields(config[source]) if source == "response_template" else _fields_of_schema(config[source])
    except _OtherForm as error:
        fields = {}
        _log.warning("the description of the model's output is not used", source=source, reason=str(error))
    for name, field in fields.items():
        try:
            if name == "tool_calls":
                parts["calls"] = _calls(field)
            elif name in REASONING_FIELDS:
                parts["reasoning"] = _reasoning(field)
            elif name != "content" or field.keys() & {"open", "open_pattern"}:
                raise _OtherForm("only reasoning and tool calls may have delimiters")
        except _OtherForm as error:
            reason = f"{name}: {error}"
            _log.warning("a part of the description of the model's output is not used", source=source, reason=reason)
    return replace(family, **parts)


def _fields(template: object) -> dict[str, Mapping[str, Any]]:
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping) or not all(isinstance(field, Mapping) for field in fields.values()):
        raise _OtherForm("it has no map of fields")
    return dict(fields)


def _reasoning(field: Mapping[str, Any]) -> Reasoning:
    (opening, name, _) = _delimiter(field, "open")
    closing = _closing(field)
    if name is not None:
        raise _OtherForm("its pattern has a group")
    if isinstance(field.get("close"), list) and len(field["close"]) > 1:
        raise _OtherForm("it has several ends")
    if not closing or " " in opening + closing:
        raise _OtherForm("its delimiters are not two words")
    return Reasoning(opening, closing)


def _calls(field: Mapping[str, Any]) -> CallSyntax:
    (opening, group, middle) = _delimiter(field, "open")
    closing = _closing(field)
    content = field.get("content")
    options = field.get("content_args") or {}
    if content == "xml-inline":
        # The template does not define the text between the tags: only a family does.
        tag = f"{options.get('tag_pattern')}" if isinstance(options, Mapping) else ""
        for calls in (family.calls for family in KNOWN_MARKUPS.values() if family.calls is not None):
            if calls.arguments == "parameters" and calls.open == opening and tag.startswith(calls.key_open):
                return calls
    is_json = content == "json" and isinstance(options, Mapping)
    if not is_json or any(map(options.get, ("unquoted_keys", "string_delims"))):
        raise _OtherForm("only JSON between two delimiters can be enforced")
    name, arguments = _keys(field.get("transform"))
    if group is not None:
        if (name, arguments) != (group, "content") or field.get("transform_each"):
            raise _OtherForm("its transform is not a name and its arguments")
        return _syntax(opening, f"{middle} ", f" {closing}".rstrip())
    begin = f' {{ "{name}" : "', f'" , "{arguments}" : ', " }"
    if field.get("transform_each"):
        return _syntax(*begin, begin=f"{opening} [", separator=" ,", end=f" ] {closing}".rstrip())
    return _syntax(opening + begin[0], begin[1], f"{begin[2]} {closing}".rstrip())


def _syntax(opening: str, middle: str, closing: str, **parts: str) -> CallSyntax:
    """Return a syntax of calls in whose literals each run of white space is one space."""
    given = {"open": opening, "middle": middle, "close": closing, **parts}
    literals: dict[str, Any] = {name: re.sub(" +", " ", each) for name, each in given.items()}
    return CallSyntax(**literals)


def _keys(transform: object) -> tuple[str, str]:
    """Return the places of a call's name and arguments in a transform: keys of the JSON, or names of groups."""
    match transform:
        case {"function": "{content}"}:
            return "name", "arguments"
        case {"function": {"name": str(name), "arguments": str(arguments)}}:
            found = _PLACEHOLDER.fullmatch(name), _PLACEHOLDER.fullmatch(arguments)
            if found[0] and found[1]:
                return found[0].group(1), found[1].group(1)
    raise _OtherForm("its transform is not a function with a name and arguments")


def _delimiter(field: Mapping[str, Any], kind: str) -> tuple[str, str | None, str]:
    """Return the delimiter of a field: a literal, or the literals around a group of the pattern, and its name."""
    given = field.get(kind)
    pattern = field.get(f"{kind}_pattern")
    if isinstance(given, list) and given and (kind == "close" or len(given) == 1):
        given = given[0]
    if isinstance(pattern, str) and given is None:
        before, group, after = _literals(pattern)
    elif isinstance(given, str) and pattern is None:
        before = re.sub(r"\s+", " ", given)
        group = None
        after = ""
    else:
        raise _OtherForm(f"its {kind} is not one literal or one pattern")
    before = before.lstrip(" ") if group is not None else before.strip(" ")
    if len(before + after) > MAX_LITERAL or not (before + after).isprintable() or not before:
        raise _OtherForm(f"its {kind} is not a printable text of 1 to {MAX_LITERAL} characters")
    return before, group, after


def _closing(field: Mapping[str, Any]) -> str:
    if field.get("close") is None and field.get("close_pattern") is None:
        return ""
    literal, group, _ = _delimiter(field, "close")
    if group is not None:
        raise _OtherForm("the pattern of its end has a group")
    return literal


def _literals(pattern: str) -> tuple[str, str | None, str]:
    """Return the text before the only group of a pattern, the group's name, and the text after it.

    White space is one space. Raises _OtherForm for a pattern with other parts than literals, white space and one named
    group.
    """
    texts = [""]
    group = None
    at = 0
    while at < len(pattern):
        part = _PART.match(pattern, at)
        if part is None or (part["group"] and group):
            raise _OtherForm(f"the pattern {pattern[:MAX_LITERAL]!r} is not literals around one name")
        if part["group"]:
            group = part["group"]
            texts.append("")
        else:
            texts[-1] += " " if part["space"] else part["escaped"] or part["plain"]
        at = part.end()
    before, after = texts[0], texts[1] if group else ""
    return re.sub(" +", " ", before), group, re.sub(" +", " ", after)


def _fields_of_schema(schema: object) -> dict[str, Mapping[str, Any]]:
    """Return the fields of a `response_schema` in the form of template fields. Raises _OtherForm."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(schema, Mapping) or not isinstance(properties, Mapping):
        raise _OtherForm("it has no map of properties")
    fields: dict[str, Mapping[str, Any]] = {}
    for name, field in properties.items():
        if name == "role" or not isinstance(field, Mapping):
            continue
        own = field.get("x-regex-iterator" if name == "tool_calls" else "x-regex")
        fields[name] = {} if name == "content" and own is None else _around(name, own, schema.get("x-regex"))
        if name == "tool_calls":
            fields[name] = {**fields[name], **_content_of_schema(field.get("items"))}
    return fields


def _around(name: str, own: object, whole: object) -> dict[str, str]:
    """Return the patterns around a field's group: in its own expression, or in the expression of the whole message."""
    found = None
    if isinstance(own, str) and own != "^(.*)$":
        found = re.fullmatch(f"([^()]*){_GROUP}([^()]*)", own)
    elif isinstance(whole, str):
        found = re.search(rf"\(\?:([^()]*)\(\?P<{re.escape(name)}>[^()]*\)([^()]*)\)", whole)
    # `_delimiter` refuses a field without a beginning.
    return {"open_pattern": found[1], "close_pattern": found[2]} if found else {"open": ""}


def _content_of_schema(items: object) -> dict[str, Any]:
    match items:
        case {"x-parser": "json", "x-parser-args": {"transform": str(transform)}} if _WHOLE_CALL.fullmatch(transform):
            return {"content": "json", "transform": {"function": "{content}"}}
    return {}
