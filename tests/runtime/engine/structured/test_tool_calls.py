"""The parser reads every output that the grammar of a request allows as calls of its tools with valid arguments."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.types import StructuredOutputs, ToolChoice
from quire.runtime.engine.markup.markup import BRACKETS, CHANNEL_TOKENS, KNOWN_MARKUPS, MARK, THINK, CallSyntax, Markup
from quire.runtime.engine.structured.grammars import check_structure, grammar_of
from quire.runtime.engine.structured.tool_calls import ToolCalls
from structlog.testing import capture_logs

DEEPSEEK = KNOWN_MARKUPS["deepseek_v31"].calls or CallSyntax("", "", "")
SPECIAL = (
    *("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|python_tag|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    *("[CALL_ID]", "<|tool_call>", "<tool_call|>", '<|"|>', "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|START_ACTION|>", "<|END_ACTION|>"),
    *CHANNEL_TOKENS,
)
PIECES = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "}}", '"}}\n', '{"name', '": "', "{}", "weather", "time",
    "<function=", "<parameter=", "</parameter>", "</function>", "\n```json\n", "<|tool_call|>", '{"name": "', "final",
    '"parameters": ', '"arguments": ', "commentary to=functions.", "Paris",
    DEEPSEEK.open, DEEPSEEK.begin, DEEPSEEK.middle, "<TOOLCALL>", "</TOOLCALL>", 'city="', "weather(", "days=",
    "<seed:tool_call>", "</seed:tool_call>", "<tool_calls>", "</tool_calls>", "call:weather{", "city:", "days:", "city",
)  # fmt: skip
EOS = 0


class Vocabulary:
    """Special tokens, bytes and some pieces of markup."""

    names = ("<eos>", *SPECIAL)

    def __init__(self) -> None:
        self.bos_token_id = None
        self.eos_token_id = EOS
        self.special_token_ids = list(range(len(self.names)))
        self.tokens = [each.encode() for each in self.names] + [bytes([byte]) for byte in range(256)]
        self.tokens += [piece.encode() for piece in PIECES]

    def __call__(self, text: str) -> list[int]:
        return [len(self.names) + byte for byte in text.encode()]


VOCABULARY = Vocabulary()
TABLES = LLTokenizer(TokenizerWrapper(VOCABULARY))
IDS = {name: token for token, name in enumerate(VOCABULARY.names)}

CITY = {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}}
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"properties": properties, "required": [*properties][:1], "additionalProperties": False},
        },
    }
    for name, properties in (("weather", CITY), ("time", {}), ("weather_now", CITY))
)
# As a response_template may describe them.
DESCRIBED = (
    CallSyntax(' { "tool" : "', '" , "args" : ', " }", begin="<|tool_call|> [", separator=" ,", end=" ] </tool_call>"),
    CallSyntax("[TOOL_CALLS] ", "[ARGS] ", " </tool_call>"),
)
MARKUPS = [Markup(calls=calls).with_special(IDS) for calls in DESCRIBED]
MARKUPS += [
    replace(family, reasoning=None if family.channels else reasoning).with_special(special)
    for family in KNOWN_MARKUPS.values()
    for reasoning in (None, THINK, BRACKETS)
    for special in ({}, IDS)
    if not (family.channels and reasoning)
]


def outputs(structure: StructuredOutputs | None, seed: int) -> tuple[str, bool]:
    """Return a text that the grammar allows, drawn with a preference for markup; and whether it is cut."""
    assert structure is not None
    draw = random.Random(seed)
    matcher = LLMatcher(TABLES, grammar_of(structure), log_level=0)
    mask = np.zeros((len(VOCABULARY.tokens) + 31) // 32, np.int32)
    data: list[bytes] = []
    for _ in range(100):
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(VOCABULARY.tokens)])
        markup = [token for token in allowed if token > 255 + len(VOCABULARY.names) or token < len(VOCABULARY.names)]
        token = int(draw.choice(markup if markup and draw.random() < 0.7 else [*allowed]))
        if token == EOS:
            return b"".join(data).decode(errors="replace"), False
        assert matcher.try_consume_tokens([token]) == 1
        name = VOCABULARY.tokens[token]
        data.append(MARK.encode() + name if token < len(VOCABULARY.names) else name)
    return b"".join(data).decode(errors="replace"), True


def choices() -> Iterator[ToolChoice]:
    yield ToolChoice()
    yield ToolChoice(needed="required", parallel=False)
    yield ToolChoice(needed="required", names=("time", "weather"))
    yield ToolChoice(needed="none")


@pytest.mark.parametrize("markup", MARKUPS)
def test_what_the_grammar_allows_is_read_as_valid_calls(markup: Markup) -> None:
    for choice in choices():
        calls = ToolCalls(markup, TOOLS, choice)
        structure = calls.structure("prompt", None)
        new_parser = calls.new_parser("prompt", None)
        for seed in range(2):
            text, is_cut = outputs(structure, seed)
            deltas: list[Any] = []
            if new_parser is not None:
                parser = new_parser()
                deltas = [*parser.feed(text), *parser.finish(is_cut)]
            found: list[list[str]] = []
            for kind, piece in deltas:
                assert MARK not in piece
                if kind == "call":
                    assert piece in (choice.names or ("weather", "time", "weather_now"))
                    found.append([piece, ""])
                elif kind == "arguments":
                    found[-1][1] += piece
                elif markup.calls is not None and MARK not in markup.calls.trigger and kind == "content":
                    assert markup.calls.trigger not in piece
            assert not (choice.needed == "none" and found)
            if not is_cut:
                assert found or choice.needed != "required", text
                assert len(found) <= 1 or choice.parallel
            for name, arguments in found if not is_cut else found[:-1]:
                given = json.loads(arguments)
                assert given.keys() <= (set() if name == "time" else {"city", "days"})
                if name != "time":
                    assert given["city"] in ("Paris", "Rome")
                    assert given.get("days") in (None, 1, 2)


def test_tools_need_a_markup_of_calls() -> None:
    with pytest.raises(InvalidRequest, match="--tool-call-parser is none; leave it out, or name one of hermes, "):
        ToolCalls(Markup(THINK), TOOLS, ToolChoice())
    with pytest.raises(InvalidRequest, match="no tool 'f'"):
        ToolCalls(KNOWN_MARKUPS["hermes"], TOOLS, ToolChoice(names=("f",)))


def test_a_call_in_channels_may_follow_an_announcement() -> None:
    structure = ToolCalls(KNOWN_MARKUPS["openai"], TOOLS, ToolChoice(needed="required")).structure("prompt", None)
    assert structure is not None
    announced = "<|channel|>commentary<|message|>Looking.<|end|><|start|>assistant"
    ids = VOCABULARY(f"{announced}<|channel|>commentary to=functions.time<|message|>{{}}")
    matcher = LLMatcher(TABLES, grammar_of(structure), log_level=0)
    assert matcher.try_consume_tokens(ids) == len(ids)


def test_parameters_may_refer_to_definitions_of_their_tool() -> None:
    listed = {"type": "array", "items": {"$ref": "#/$defs/city"}}
    parameters = {"properties": {"cities": listed}, "required": ["cities"], "$defs": {"city": CITY["city"]}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    structure = ToolCalls(KNOWN_MARKUPS["qwen3_coder"], (tool,), ToolChoice(needed="required")).structure(
        "prompt", None
    )
    assert structure is not None
    for city, is_allowed in (("Rome", True), ("Oslo", False)):
        matcher = LLMatcher(TABLES, grammar_of(structure), log_level=0)
        ids = VOCABULARY(f'<tool_call>\n<function=f>\n<parameter=cities>\n["{city}"]')
        assert (matcher.try_consume_tokens(ids) == len(ids)) is is_allowed


def coder_calls(parameters: Any, is_strict: bool) -> ToolCalls:
    function = {"name": "f", "parameters": parameters, "strict": is_strict}
    tool = {"type": "function", "function": function}
    return ToolCalls(KNOWN_MARKUPS["qwen3_coder"], (tool,), ToolChoice(needed="required"), open_arguments=True)


def coder_arguments(calls: ToolCalls, *parameters: tuple[str, str]) -> Any:
    """Return the arguments of a call with these parameters as the client gets them; None if they are not allowed."""
    structure = calls.structure("prompt", None)
    assert structure is not None
    check_structure(structure)
    written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters)
    text = f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"
    matcher = LLMatcher(TABLES, grammar_of(structure), log_level=0)
    ids = VOCABULARY(text)
    if matcher.try_consume_tokens(ids) < len(ids) or not matcher.is_accepting():
        return None
    new_parser = calls.new_parser("prompt", None)
    assert new_parser is not None
    return json.loads("".join(piece for kind, piece in new_parser().feed(text) if kind == "arguments"))


NODE = {"properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/Node"}}, "required": ["v"]}
TREE = {
    "properties": {"n": {"type": "integer"}, "of": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["n"],
    "additionalProperties": False,
}
CODER: list[tuple[str, Any, list[Any], list[Any]]] = [  # schema, parameters and the arguments they become, refused ones
    (
        "a reference at the root",
        {"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"},
        [([("v", "1")], {"v": 1}), ([("v", "1"), ("next", '{"v": 2}')], {"v": 1, "next": {"v": 2}})],
        [[], [("v", "x")], [("v", "1"), ("next", "{}")]],
    ),
    (
        "all of several schemas",
        {"allOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {}, "a": {}}, "required": ["a"]}]},
        [([("a", "5")], {"a": "5"}), ([("a", "x"), ("b", "5")], {"a": "x", "b": 5})],
        [[], [("b", "5")], [("a", "x"), ("c", "5")]],
    ),
    (
        "two limits of one property",
        {"allOf": [{"properties": {"a": {"maximum": 9}}}, {"properties": {"a": {"type": "integer", "minimum": 5}}}]},
        [([("a", "7")], {"a": 7})],
        [[("a", "3")], [("a", "12")]],
    ),
    (
        "one of one schema",
        {"oneOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}]},
        [([("a", "5")], {"a": 5})],
        [[]],
    ),
    (
        "a property that one of the schemas does not allow",
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}, "additionalProperties": False}]},
        [([], {}), ([("b", "1")], {"b": 1})],
        [[("a", "1")], [("c", "1")]],
    ),
    (
        "required names without a schema",
        {"properties": {"a": {"type": "integer"}}, "required": ["b", "a"], "minProperties": 2, "maxProperties": 2},
        [([("a", "1"), ("b", "x")], {"a": 1, "b": "x"})],
        [[], [("a", "1")]],
    ),
    (
        "other names",
        {"properties": {"a": {"const": 1}}, "additionalProperties": {"type": "integer"}},
        [([], {}), ([("a", "1"), ("b", "2"), ("ab", "3")], {"a": 1, "b": 2, "ab": 3})],
        [[("a", "2")], [("b", "x")]],
    ),
    (
        "any object",
        {"type": "object"},
        [([], {}), ([("a", "1"), ("b", "[x")], {"a": 1, "b": "[x"})],
        [[("a", "</parameter>")]],
    ),
    ("no properties", {"type": "object", "properties": {}}, [([], {})], [[("a", "1")]]),
    (
        "a property without values",
        {"properties": {"a": False, "b": {"type": "integer"}}},
        [([], {}), ([("b", "1")], {"b": 1})],
        [[("a", "1")]],
    ),
    (
        "the end of a parameter in a text",
        {"properties": {"a": {"enum": ["</parameter>", "x"]}, "b": {"type": "string", "maxLength": 20}}},
        [
            ([("a", '"</parameter>"'), ("b", '"</parameter>"')], {"a": "</parameter>", "b": "</parameter>"}),
            ([("a", '"x"')], {"a": "x"}),
        ],
        [[("a", "</parameter>")], [("a", "x")]],
    ),
    (
        "one of several texts, or null",
        {"properties": {"a": {"anyOf": [{"enum": ["x", "y"]}, {"type": "null"}]}}},
        [([("a", "null")], {"a": None}), ([("a", '"x"')], {"a": "x"})],
        [[("a", "z")], [("a", '"z"')]],
    ),
    (
        "a reference to the root",
        TREE,
        [([("n", "1"), ("of", '[{"n": 2, "of": [{"n": 3}]}]')], {"n": 1, "of": [{"n": 2, "of": [{"n": 3}]}]})],
        [[("n", "1"), ("of", "[[]]")], [("n", "1"), ("of", "[{}]")]],
    ),
    (
        "a reference to the root by its name",
        TREE
        | {"$id": "https://a.example/b", "properties": {"n": {}, "of": {"items": {"$ref": "https://a.example/b"}}}},
        [([("n", "1"), ("of", '[{"n": 2}]')], {"n": 1, "of": [{"n": 2}]})],
        [[("n", "1"), ("of", "[{}]")], [("n", "1"), ("a", "1")]],
    ),
    (
        "a reference to another property",
        {
            "properties": {
                "a": {"type": "array", "items": {"$ref": "#/properties/b"}},
                "b": {"$defs": {"c": {"const": 1}}, "anyOf": [{"$ref": "#/properties/b/$defs/c"}]},
            }
        },
        [([("a", "[1]"), ("b", "1")], {"a": [1], "b": 1})],
        [[("a", "[2]")], [("b", "2")]],
    ),
    (
        "items of a list in an older dialect",
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "properties": {"a": {"type": "array", "items": [{"const": 1}]}},
        },
        [([("a", "[1]")], {"a": [1]})],
        [[("a", "[2]")]],
    ),
]


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize(("schema", "valid", "invalid"), [case[1:] for case in CODER], ids=[case[0] for case in CODER])
def test_parameters_of_qwen3_coder_match_the_schema(schema: Any, valid: Any, invalid: Any, is_strict: bool) -> None:
    calls = coder_calls(schema, is_strict)
    assert [coder_arguments(calls, *parameters) for parameters, _ in valid] == [arguments for _, arguments in valid]
    assert [parameters for parameters in invalid if coder_arguments(calls, *parameters) is not None] == []


def python_arguments(parameters: Any, text: str) -> Any:
    """Return the arguments of LFM2's call with this text as the client gets them; None if it is not allowed."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    calls = ToolCalls(KNOWN_MARKUPS["lfm2"], (tool,), ToolChoice(needed="required"))
    structure = calls.structure("prompt", None)
    assert structure is not None
    matcher = LLMatcher(TABLES, grammar_of(structure), log_level=0)
    whole = f"<|tool_call_start|>[f({text})]<|tool_call_end|>"
    ids = VOCABULARY(whole)
    if matcher.try_consume_tokens(ids) < len(ids) or not matcher.is_accepting():
        return None
    new_parser = calls.new_parser("prompt", None)
    assert new_parser is not None
    return json.loads("".join(piece for kind, piece in new_parser().feed(whole) if kind == "arguments"))


TRIP = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
        "back": {"type": "boolean"},
        "via": {"type": "array", "items": {"type": ["string", "null"]}},
        "unit": {"enum": ["km", "it's", None]},
        "guest": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "is_child": {"type": "boolean"}, "x": {"type": "null"}},
            "required": ["is_child"],
        },
        "any": {},
        "date-of": {"anyOf": [{"type": "string", "pattern": "^[0-9]{4}$"}, {"type": "boolean"}]},
    },
    "required": ["city", "back"],
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('city="Rome", back=True', {"city": "Rome", "back": True}),
        ("city='it\\'s', days=3,back=False", {"city": "it's", "days": 3, "back": False}),
        ('city="", back=True, via=["a", None, \'b\']', {"city": "", "back": True, "via": ["a", None, "b"]}),
        ('city="", back=True, via=[], unit=None', {"city": "", "back": True, "via": [], "unit": None}),
        ('city="", back=True, unit="it\'s"', {"city": "", "back": True, "unit": "it's"}),
        (
            'city="", back=True, guest={"name": "é\\n", "is_child": False}',
            {"city": "", "back": True, "guest": {"name": "é\n", "is_child": False}},
        ),
        (
            'city="", back=True, guest={"is_child": True, "x": None}, any=True',
            {"city": "", "back": True, "guest": {"is_child": True, "x": None}, "any": True},
        ),
        ("city='', back=True, any=[{'a': None, \"b\": []}]", {"city": "", "back": True, "any": [{"a": None, "b": []}]}),
        ('city="", back=True, date-of="2026"', {"city": "", "back": True, "date-of": "2026"}),
        ('city="", back=True, date-of=False', {"city": "", "back": True, "date-of": False}),
        *(
            (text, None)
            for text in (
                "",
                'city="Rome"',
                "back=True",
                '"Rome", back=True',
                'city=Rome, back="x"',
                'city="", back=1',
                'city="", days=0, back=True',
                'back=True, city=""',
                'city="", back=True, via=[1]',
                'city="", back=True, unit="m"',
                'city="", back=True, guest={}',
                'city="", back=True, guest={"is_child": True, "age": 3}',
                'city="", back=True, date-of="26"',
                'city="", back=True, other=1',
                'city="", back=True, any=[null]',
                'city="", back=True,',
            )
        ),
    ],
)
def test_arguments_in_python_match_the_schema(text: str, expected: Any) -> None:
    assert python_arguments(TRIP, text) == expected


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"properties": {}}, "", {}),
        ({"properties": {}}, "a=1", None),
        ({}, 'a=1, _b="x"', {"a": 1, "_b": "x"}),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "boolean"}}, "b=True", {"b": True}),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "boolean"}}, "b=1", None),
        (TREE, 'n=1, of=[{"n": 2, "of": []}]', {"n": 1, "of": [{"n": 2, "of": []}]}),
        (TREE, 'n=1, of=[{"of": []}]', None),
        ({"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"}, 'v=1, next={"v": 2}', {"v": 1, "next": {"v": 2}}),
        ({"properties": {"a=b": {}}}, 'x={"y": True}', {"x": {"y": True}}),
    ],
)
def test_other_schemas_of_arguments_in_python(schema: Any, text: str, expected: Any) -> None:
    assert python_arguments(schema, text) == expected


def gemma_arguments(parameters: Any, text: str) -> Any:
    """Return the arguments of Gemma's call with this text as the client gets them; None if it is not allowed."""
    markup = KNOWN_MARKUPS["gemma4"]
    allowed = [
        arguments_in(markup.with_special(special), parameters, f"<|tool_call>call:f{{{text}}}<tool_call|>", special)
        for special in ({}, IDS)
    ]
    assert allowed[0] == allowed[1]
    return allowed[0]


def arguments_in(markup: Markup, parameters: Any, text: str, special: Mapping[str, int]) -> Any:
    """Return the arguments of a call in a vocabulary with these special tokens; None if it is not allowed."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    calls = ToolCalls(markup, (tool,), ToolChoice(needed="required"))
    structure = calls.structure("prompt", None)
    assert structure is not None
    pieces = re.split("(" + "|".join(map(re.escape, markup.tokens)) + ")", text) if markup.tokens else [text]
    ids = [token for piece in pieces for token in ([special[piece]] if piece in markup.tokens else VOCABULARY(piece))]
    matcher = LLMatcher(TABLES, grammar_of(structure), log_level=0)
    if matcher.try_consume_tokens(ids) < len(ids) or not matcher.is_accepting():
        return None
    new_parser = calls.new_parser("prompt", None)
    assert new_parser is not None
    marked = "".join(markup.marked(piece) for piece in pieces)
    return json.loads("".join(piece for kind, piece in new_parser().feed(marked) if kind == "arguments"))


Q = '<|"|>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"city:{Q}Rome{Q},back:true", {"city": "Rome", "back": True}),
        (f'city:{Q}it\'s "a" \\n{{<{Q},days:3,back:false', {"city": 'it\'s "a" \\n{<', "days": 3, "back": False}),
        (f"city:{Q}{Q},back:true,via:[{Q}a{Q},null]", {"city": "", "back": True, "via": ["a", None]}),
        (f"city:{Q}{Q},back:true,unit:{Q}it's{Q}", {"city": "", "back": True, "unit": "it's"}),
        (
            f"city:{Q}{Q},back:true,guest:{{name:{Q}é{Q},is_child:false}}",
            {"city": "", "back": True, "guest": {"name": "é", "is_child": False}},
        ),
        (
            f"city:{Q}{Q},back:true,any:[{{a:null,b_c:{Q}x{Q}}}]",
            {"city": "", "back": True, "any": [{"a": None, "b_c": "x"}]},
        ),
        (f'city:{Q}{Q},back:true,date-of:"2026"', {"city": "", "back": True, "date-of": "2026"}),
        *(
            (text, None)
            for text in (
                "",
                f"city:{Q}Rome{Q}",
                "city:Rome,back:true",
                f"city:{Q}{Q},back:True",
                f"city:{Q}{Q},days:0,back:true",
                f"back:true,city:{Q}{Q}",
                f"city:{Q}{Q},back:true,via:[1]",
                f"city:{Q}{Q},back:true,unit:{Q}m{Q}",
                f"city:{Q}{Q},back:true,guest:{{is_child:true,age:3}}",
                f"city:{Q}{Q},back:true,other:1",
            )
        ),
    ],
)
def test_arguments_of_gemma_match_the_schema(text: str, expected: Any) -> None:
    assert gemma_arguments(TRIP, text) == expected


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"properties": {}}, "", {}),
        ({}, f"a:1,_b:{Q}x{Q}", {"a": 1, "_b": "x"}),
        ({"properties": {"a b": {"type": "integer"}}}, "a b:1", {"a b": 1}),
        (TREE, 'n:1,of:[{"n": 2, "of": []}]', {"n": 1, "of": [{"n": 2, "of": []}]}),
        (
            {"properties": {"a": {"type": "object", "properties": {"b,": {}}, "additionalProperties": False}}},
            'a:{"b,": "x"}',
            {"a": {"b,": "x"}},
        ),
    ],
)
def test_other_schemas_of_arguments_of_gemma(schema: Any, text: str, expected: Any) -> None:
    assert gemma_arguments(schema, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<arg_key>city</arg_key><arg_value>\nRome</arg_value>", {"city": "\nRome"}),
        ("\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n",
         {"city": "5", "n": 5}),
        ('<arg_key>city</arg_key><arg_value></arg_value><arg_key>l</arg_key><arg_value>["a"]</arg_value>',
         {"city": "", "l": ["a"]}),
        ("<arg_key>city</arg_key><arg_value>x</arg_value><arg_key>b c</arg_key><arg_value>null</arg_value>",
         {"city": "x", "b c": None}),
        ("<arg_key>n</arg_key><arg_value>5</arg_value>", None),
        ("<arg_key>city</arg_key><arg_value>x</arg_value><arg_key>n</arg_key><arg_value>x</arg_value>", None),
        ("<arg_key>city</arg_key><arg_value>x</arg_value><arg_key>m</arg_key><arg_value>1.5</arg_value>", None),
    ],
)  # fmt: skip
def test_arguments_of_glm_match_the_schema(text: str, expected: Any) -> None:
    schema = {
        "properties": {"city": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}},
        "required": ["city"],
        "additionalProperties": {"type": ["null", "boolean"]},
    }
    for special in ({}, IDS):
        markup = KNOWN_MARKUPS["glm45"].with_special(special)
        assert arguments_in(markup, schema, f"<tool_call>f{text}</tool_call>", special) == expected


def test_a_strict_tool_needs_names_that_python_can_have() -> None:
    parameters = {"properties": {"a=b": {"type": "string"}}, "required": ["a=b"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    with pytest.raises(InvalidRequest, match="'a=b' cannot be a parameter of this model, because of its ="):
        ToolCalls(KNOWN_MARKUPS["lfm2"], (tool,), ToolChoice()).structure("prompt", None)


@pytest.mark.parametrize(
    ("reason", "schema"),
    [
        ("cannot express anyOf", {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}),
        ("cannot express anyOf", {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}),
        ("cannot express patternProperties", {"patternProperties": {"^a": {"type": "integer"}}}),
        ("cannot express enum", {"enum": [{"a": 1}]}),
        ('cannot be enforced: "not"', {"properties": {"a": {}}, "not": {"maxProperties": 0}}),
        ("cannot express anyOf", {"if": {"required": ["a"]}, "then": {"required": ["b"]}}),
        ("cannot express anyOf", {"properties": {"a": {}, "b": {}}, "minProperties": 1}),
        ("minProperties cannot be enforced", {"minProperties": 1}),
        ("maxProperties cannot be enforced", {"additionalProperties": {}, "maxProperties": 1}),
        ("'a>b' cannot be a parameter", {"properties": {"a>b": {"type": "string"}}}),
        ("anyOf is empty", {"properties": {"a": {"enum": []}}}),
        ("'#' refers to itself", {"$ref": "#"}),
        ("which the arguments must match", {"allOf": [{"title": str(n)} for n in range(120)]}),
    ],
    ids=str,
)
def test_what_parameters_do_not_express_is_refused_or_left_to_the_model(reason: str, schema: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"the parameters of 'f': .*{re.escape(reason)}"):
        coder_calls(schema, is_strict=True).structure("prompt", None)
    assert coder_arguments(coder_calls(schema, is_strict=False), ("a", "5")) == {"a": 5}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": False}, "required": ["a"]},
        {"type": "string"},
        {"$ref": "https://a.example/b"},
        {"required": [1]},
        {"minProperties": "1"},
    ],
    ids=str,
)
def test_parameters_that_no_call_can_have_are_refused_where_they_are_strict(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="the parameters of 'f': "):
        coder_calls(schema, is_strict=True).structure("prompt", None)
    assert coder_calls(schema, is_strict=False).structure("prompt", None) is not None


def test_arguments_are_an_object_where_the_dialect_ignores_a_type_beside_a_reference() -> None:
    parameters = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": "#/definitions/a",
        "definitions": {"a": {}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    structure = ToolCalls(KNOWN_MARKUPS["hermes"], (tool,), ToolChoice(needed="required")).structure("prompt", None)
    assert structure is not None
    for arguments, is_allowed in (('{"b": 1}', True), ("1", False)):
        matcher = LLMatcher(TABLES, grammar_of(structure), log_level=0)
        ids = VOCABULARY(f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>')
        assert (matcher.try_consume_tokens(ids) == len(ids)) is is_allowed


@pytest.mark.parametrize("family", ["qwen3_coder", "hermes", "openai"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": 5}}},
        {"properties": {"a": {"type": [{}]}}},
        {"properties": {"a": {"type": "object", "properties": 5}}},
        {"properties": {"a": {"enum": 5}}},
        {"properties": {"a": {}}, "required": 5},
        {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": 5},
        {"properties": 5},
    ],
)
def test_a_schema_of_wrong_types_is_no_internal_error(family: str, parameters: Any) -> None:
    for is_strict in (True, False):
        function = {"name": "f", "parameters": parameters, "strict": is_strict}
        calls = ToolCalls(KNOWN_MARKUPS[family], ({"type": "function", "function": function},), ToolChoice())
        with suppress(InvalidRequest) if is_strict else nullcontext():
            assert calls.structure("prompt", None) is not None


@pytest.mark.parametrize("family", ["qwen3_coder", "hermes"])
def test_a_schema_that_is_nested_too_deeply_is_refused_or_left_to_the_model(family: str) -> None:
    parameters: dict[str, Any] = {}
    for _ in range(900):
        parameters = {"properties": {"a": parameters}}
    for is_strict in (True, False):
        function = {"name": "f", "parameters": parameters, "strict": is_strict}
        calls = ToolCalls(KNOWN_MARKUPS[family], ({"type": "function", "function": function},), ToolChoice())
        with pytest.raises(InvalidRequest, match="nested too deeply") if is_strict else nullcontext():
            assert calls.structure("prompt", None) is not None


@pytest.mark.parametrize("family", KNOWN_MARKUPS)
def test_numbers_that_cannot_be_enforced_leave_the_arguments_to_the_model(family: str) -> None:
    parameters = {"type": "object", "properties": {"id": {"type": "integer", "minimum": 2**60 + 1}}}
    for is_strict in (True, False):
        function = {"name": "f", "parameters": parameters, "strict": is_strict}
        calls = ToolCalls(KNOWN_MARKUPS[family], ({"type": "function", "function": function},), ToolChoice())
        if is_strict:
            with pytest.raises(InvalidRequest, match="'f': a JSON schema with minimum: 1152921504606846977"):
                calls.structure("prompt", None)
        else:
            assert calls.structure("prompt", None) is not None
            assert calls.new_parser("prompt", None) is not None


@pytest.mark.parametrize(("kind", "num_tries"), [("string", 1), ("integer", 2)])
def test_a_refused_grammar_is_tried_without_bounds_of_integers_if_it_has_some(kind: str, num_tries: int) -> None:
    def refuse(structure: StructuredOutputs) -> None:
        raise InvalidRequest("too large")

    function = {"name": "f", "parameters": {"properties": {"a": {"type": kind}}}}
    calls = ToolCalls(KNOWN_MARKUPS["hermes"], ({"type": "function", "function": function},), ToolChoice(), refuse)
    with capture_logs() as lines, pytest.raises(InvalidRequest, match="too large"):
        calls.structure("prompt", None)
    assert [line["event"] for line in lines] == ["a tool's arguments are any object"] * num_tries


@pytest.mark.parametrize("prompt", ["<think>", "a <think>\n", "<think> \n\n"])
def test_reasoning_that_the_prompt_has_begun(prompt: str) -> None:
    new_parser = ToolCalls(replace(KNOWN_MARKUPS["hermes"], reasoning=THINK), (), ToolChoice()).new_parser(prompt, None)
    assert new_parser is not None
    assert new_parser().feed("So.</think>Hi") == [("reasoning", "So."), ("content", "Hi")]


def test_an_answer_of_a_form_is_no_call_that_nothing_announces() -> None:
    calls = ToolCalls(KNOWN_MARKUPS["llama3_json"], TOOLS, ToolChoice())
    text = '{"name": "time", "parameters": {}}'
    for answer, kind in ((None, "call"), (StructuredOutputs(json_object=True), "content")):
        new_parser = calls.new_parser("prompt", answer)
        assert new_parser is not None
        assert new_parser().feed(text)[0].kind == kind


@pytest.mark.parametrize("needed", ["auto", "required"])
@pytest.mark.parametrize("announced", ["", "<|python_tag|>"])
def test_nothing_must_announce_a_call_of_llama(needed: Any, announced: str) -> None:
    structure = ToolCalls(KNOWN_MARKUPS["llama3_json"], TOOLS, ToolChoice(needed=needed)).structure("prompt", None)
    assert structure is not None
    matcher = LLMatcher(TABLES, grammar_of(structure), log_level=0)
    ids = VOCABULARY(announced + '{"name": "time", "parameters": {}}')
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


def test_without_markup_nothing_is_constrained_or_parsed() -> None:
    calls = ToolCalls(Markup(), (), ToolChoice())
    assert calls.structure("prompt", None) is None
    assert calls.new_parser("prompt", None) is None
    answer = StructuredOutputs(regex="a")
    assert calls.structure("prompt", answer) is answer


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (StructuredOutputs(json={"enum": ["a"]}), '"a"'),
        (StructuredOutputs(regex="a/b|\n"), "a/b"),
        (StructuredOutputs(choice=("x", 'y"')), 'y"'),
        (StructuredOutputs(lark='start: "a" other\nother: /b+/'), "abb"),
        (StructuredOutputs(gbnf='root ::= "a" other\nother ::= [0-9]+'), "a12"),
    ],
)
@pytest.mark.parametrize("markup", [replace(KNOWN_MARKUPS["hermes"], reasoning=THINK), KNOWN_MARKUPS["openai"]])
@pytest.mark.parametrize("tools", [(), TOOLS])
def test_an_answer_of_a_form_may_follow_reasoning(
    markup: Markup, answer: StructuredOutputs, text: str, tools: Any
) -> None:
    structure = ToolCalls(markup, tools, ToolChoice()).structure("prompt", answer)
    assert structure is not None
    before = "<think>\nSo.\n</think>\n"
    if markup.channels:
        before = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>"
    for whole, is_allowed in ((before + text, True), (before + "?", False)):
        matcher = LLMatcher(TABLES, grammar_of(structure), log_level=0)
        ids = VOCABULARY(whole)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is is_allowed


def arguments_of(parameters: Any, **options: Any) -> LLMatcher:
    """Return a matcher of the arguments of a required call."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    choice = ToolChoice(needed="required", parallel=False)
    structure = ToolCalls(KNOWN_MARKUPS["hermes"], (tool,), choice, **options).structure("prompt", None)
    assert structure is not None
    return LLMatcher(TABLES, grammar_of(structure), log_level=0)


def is_call(matcher: LLMatcher, arguments: Any) -> bool:
    text = f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    tokens = VOCABULARY(text)
    reader = matcher.deep_copy()
    return reader.try_consume_tokens(tokens) == len(tokens) and reader.is_accepting()


INNER = {"type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("parameters", "declared", "others"),
    [
        (INNER, {"x": 1}, {"x": 1, "y": 2}),
        ({"type": "object", "properties": {"a": INNER}, "required": ["a"]}, {"a": {"x": 1}}, {"a": {"y": 1}}),
        (
            {"type": "object", "properties": {"a": {"type": "array", "items": INNER}}},
            {"a": [{"x": 1}]},
            {"a": [{"y": 1}]},
        ),
        ({"$defs": {"I": INNER}, "properties": {"a": {"$ref": "#/$defs/I"}}}, {"a": {"x": 1}}, {"a": {"z": 1}}),
        ({"properties": {"a": {"anyOf": [INNER, {"type": "null"}]}}}, {"a": {"x": 1}}, {"a": {"z": 1}}),
    ],
    ids=str,
)
def test_objects_have_the_declared_properties_unless_arguments_are_open(
    parameters: Any, declared: Any, others: Any
) -> None:
    matcher = arguments_of(parameters)
    assert is_call(matcher, declared)
    assert not is_call(matcher, others)
    opened = arguments_of(parameters, open_arguments=True)
    assert is_call(opened, declared)
    assert is_call(opened, others)


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ({"type": "object"}, {"a": 1}),
        ({**INNER, "additionalProperties": {"type": "string"}}, {"x": 1, "y": "a"}),
        ({**INNER, "patternProperties": {"^y": {}}}, {"x": 1, "y": "a"}),
        ({**INNER, "required": ["y"]}, {"x": 1, "y": "a"}),
        ({"allOf": [INNER, {"properties": {"y": {"type": "string"}}}]}, {"x": 1, "y": "a"}),
        ({"$defs": {"I": INNER}, "allOf": [{"$ref": "#/$defs/I"}], "properties": {"y": {}}}, {"x": 1, "y": "a"}),
        ({"properties": {"y": {}}, "anyOf": [{"required": ["y"]}, INNER]}, {"y": "a", "x": 1}),
    ],
    ids=str,
)
def test_objects_whose_schema_speaks_of_other_properties_stay_open(parameters: Any, arguments: Any) -> None:
    assert is_call(arguments_of(parameters), arguments)


@pytest.mark.parametrize(
    "keywords",
    [
        {"propertyNames": {"pattern": "^[ab]$"}},
        {"oneOf": [{"minProperties": 1}, {"maxProperties": 9}]},
        {"not": {"propertyNames": {"const": "z"}}},
        {
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
            }
        },
    ],
    ids=str,
)
def test_a_keyword_that_no_grammar_can_have_does_not_cost_a_tool_its_schema(keywords: Any) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], **keywords}
    matcher = arguments_of(parameters)
    assert is_call(matcher, {"a": 1})
    assert not is_call(matcher, {"a": "text"})
    assert not is_call(matcher, {})


@pytest.mark.parametrize(
    ("family", "num_tools", "num_integers"), [("hermes", 120, 3), ("qwen3_coder", 1, 150), ("hermes", 1, 1)]
)
def test_integers_of_many_tools_have_no_bounds_of_their_own(family: str, num_tools: int, num_integers: int) -> None:
    """A grammar has too few expressions for hundreds of bounded integers; the types of arguments stay enforced."""
    properties = {f"n{index}": {"type": "integer"} for index in range(num_integers)}
    parameters = {"properties": properties, "required": [*properties], "additionalProperties": False}
    tools = tuple(
        {"type": "function", "function": {"name": f"f{index}", "parameters": parameters, "strict": True}}
        for index in range(num_tools)
    )
    structure = ToolCalls(KNOWN_MARKUPS[family], tools, ToolChoice(needed="required")).structure("prompt", None)
    assert structure is not None
    assert structure.lark is not None
    check_structure(structure)
    assert structure.lark.count('"integer"') >= num_tools
    assert ("9223372036854775807" in structure.lark) == (num_tools * num_integers == 1)


@pytest.mark.parametrize(("kind", "num_bounded"), [("boolean", 0), ("integer", 1)])
def test_no_grammar_of_a_request_is_tried_twice(kind: str, num_bounded: int) -> None:
    parameters = {"properties": {"a": {"type": kind}, "b": {"type": "array", "uniqueItems": True}}}
    tools = ({"type": "function", "function": {"name": "f", "parameters": parameters}},)
    tried: list[StructuredOutputs] = []

    def check(structure: StructuredOutputs) -> None:
        tried.append(structure)
        check_structure(structure)

    calls = ToolCalls(KNOWN_MARKUPS["hermes"], tools, ToolChoice(), check)
    structure = calls.structure("prompt", None)
    assert structure == calls.structure("prompt", None)
    assert tried[-1] == structure
    assert len(tried) == len(set(tried))
    assert (
        sum("uniqueItems" in str(each.json) and "9223372036854775807" in str(each.json) for each in tried)
        == num_bounded
    )
