"""Reasoning and tool calls of each family: the parser reads every text that the grammar allows, for every division into
pieces."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from quire.runtime.engine.markup.markup import (
    ANSWER_TAGS,
    BRACKETS,
    CHANNEL_TOKENS,
    COMMAND_THINKING,
    KNOWN_MARKUPS,
    MARK,
    RESPONSE_TAGS,
    SEED_THINK,
    THINK,
    THOUGHT,
    CallSyntax,
    Markup,
)
from quire.runtime.engine.markup.markup_parser import ChannelParser, Delta, MarkupParser, OutputParser

Read = list[tuple[str, str]]

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"type": ["string", "null"]}},
    "required": ["city"],
    "additionalProperties": False,
}
PLAN = {"type": "object", "properties": {"days": {"type": "array"}, "a b": {"type": "array"}}}
SCHEMAS: dict[str, Any] = {"weather": WEATHER, "time": {"type": "object", "properties": {}}, "plan": PLAN}
CALL = '{"city": "a }\\" [<b", "days": 2}'
THINKING = replace(KNOWN_MARKUPS["hermes"], reasoning=THINK)

# Text of a family -> its deltas.
SAMPLES: list[tuple[Markup, str, Read]] = [
    (
        THINKING,
        "<think>\nno <tool_call> yet\n</think>\n\nLet me look. \n<tool_call>\n"
        f'{{"name": "weather", "arguments": {CALL}}}\n</tool_call>\n<tool_call>\n{{"name": "time", "arguments": {{}}}}'
        "\n</tool_call>",
        [
            ("reasoning", "no <tool_call> yet"),
            ("content", "Let me look."),
            ("call", "weather"),
            ("arguments", CALL),
            ("call", "time"),
            ("arguments", "{}"),
        ],
    ),
    (THINKING, "Is 1 < 2 a <tool? Yes.\n", [("content", "Is 1 < 2 a <tool? Yes.\n")]),
    (
        KNOWN_MARKUPS["qwen3_coder"],
        'I ask.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew\n"York"\n</parameter>\n<parameter=days>\n2\n'
        "</parameter>\n<parameter=unit>\nnull\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n"
        "</function>\n</tool_call>",
        [
            ("content", "I ask."),
            ("call", "weather"),
            ("arguments", '{"city": "New\\n\\"York\\"", "days": 2, "unit": null}'),
            ("call", "time"),
            ("arguments", "{}"),
        ],
    ),
    (
        replace(KNOWN_MARKUPS["seed_oss"], reasoning=SEED_THINK),
        "<seed:think>So.</seed:think>I ask.\n<seed:tool_call>\n<function=weather>\n<parameter=city>New\n"
        '"York"\n</parameter>\n<parameter=days>2</parameter>\n</function>\n</seed:tool_call>\n'
        "<seed:tool_call>\n<function=time>\n</function>\n</seed:tool_call>",
        [
            ("reasoning", "So."),
            ("content", "I ask."),
            ("call", "weather"),
            ("arguments", '{"city": "New\\n\\"York\\"\\n", "days": 2}'),
            ("call", "time"),
            ("arguments", "{}"),
        ],
    ),
    (
        replace(KNOWN_MARKUPS["glm45"], reasoning=THINK),
        "<think>So.</think>\nI ask.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>\nNew </arg_valu"
        "</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>null</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>",
        [
            ("reasoning", "So."),
            ("content", "I ask."),
            ("call", "weather"),
            ("arguments", '{"city": "\\nNew </arg_valu", "unit": null}'),
            ("call", "time"),
            ("arguments", "{}"),
        ],
    ),
    (  # GLM-4.7 has no white space between tags; a text within JSON may have a tag
        KNOWN_MARKUPS["glm45"],
        '<tool_call>plan<arg_key>days</arg_key><arg_value>["\\"</arg_value>", 2]</arg_value><arg_key>a b</arg_key>'
        "<arg_value>[]</arg_value></tool_call><tool_call>time</tool_call>",
        [
            ("call", "plan"),
            ("arguments", '{"days": ["\\"</arg_value>", 2], "a b": []}'),
            ("call", "time"),
            ("arguments", "{}"),
        ],
    ),
    (
        replace(KNOWN_MARKUPS["gemma4"], reasoning=THOUGHT),
        '<|channel>thought\nSo <x>.\n<channel|>I ask.<|tool_call>call:weather{city:<|"|>a }\\" [<b<|"|>,days:2}'
        "<tool_call|><|tool_call>call:time{}<tool_call|>",
        [
            ("reasoning", "So <x>."),
            ("content", "I ask."),
            ("call", "weather"),
            ("arguments", '{"city": "a }\\\\\\" [<b", "days": 2}'),
            ("call", "time"),
            ("arguments", "{}"),
        ],
    ),
    (
        KNOWN_MARKUPS["gemma4"],
        '<|tool_call>call:plan{ a-b : {c d:[true,null,-2.5e3, <|"|><|"|>],<|"|>e<|"|>:{}}, days:["\\u00e9", []] }'
        "<tool_call|>",
        [
            ("call", "plan"),
            ("arguments", '{"a-b": {"c d": [true, null, -2.5e3, ""], "e": {}}, "days": ["\\u00e9", []]}'),
        ],
    ),
    (
        KNOWN_MARKUPS["hunyuan_a13b"],
        f'<tool_calls>[{{"name": "weather", "arguments": {CALL}}}, {{"name": "time", "arguments": {{}}}}]</tool_calls>',
        [("call", "weather"), ("arguments", CALL), ("call", "time"), ("arguments", "{}")],
    ),
    (
        replace(KNOWN_MARKUPS["hunyuan_a13b"], reasoning=THINK, answer=ANSWER_TAGS),
        f'<think>\nSo.\n</think>\n<answer>\nI </a> ask.\n<tool_calls>[{{"name": "weather", "arguments": {CALL}}}]'
        "</tool_calls>\n</answer>",
        [("reasoning", "So."), ("content", "I </a> ask."), ("call", "weather"), ("arguments", CALL)],
    ),
    (
        replace(KNOWN_MARKUPS["hunyuan_a13b"], reasoning=THINK, answer=ANSWER_TAGS),
        "<think>\n\n</think>\n<answer>\n<answ> 1 < 2\n</answer>\n\n<tool_calls>[{"
        f'"name": "weather", "arguments": {CALL}}}]</tool_calls>',
        [("content", "<answ> 1 < 2"), ("call", "weather"), ("arguments", CALL)],
    ),
    (
        replace(Markup(THINK), answer=RESPONSE_TAGS),
        "<think>\nSo.\n</think>\n\n<response>\nYes, </responses>.\n</response>\n",
        [("reasoning", "So."), ("content", "Yes, </responses>.")],
    ),
    (replace(Markup(THINK), answer=ANSWER_TAGS), "Say </answer>.", [("content", "Say </answer>.")]),
    (
        replace(KNOWN_MARKUPS["cohere_command3"], reasoning=COMMAND_THINKING),
        "<|START_THINKING|>So.<|END_THINKING|><|START_ACTION|>[\n"
        f'    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {CALL}}},\n'
        '    {"tool_call_id": "12", "tool_name": "time", "parameters": {}}\n]<|END_ACTION|>',
        [
            ("reasoning", "So."),
            ("call", "weather"),
            ("arguments", CALL),
            ("call", "time"),
            ("arguments", "{}"),
        ],
    ),
    (  # the id of Mistral Small 3.2
        KNOWN_MARKUPS["mistral"],
        f"[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{CALL}[TOOL_CALLS]time[CALL_ID]123456789[ARGS]{{}}",
        [("call", "weather"), ("arguments", CALL), ("call", "time"), ("arguments", "{}")],
    ),
    (
        KNOWN_MARKUPS["llama3_json"],
        f'{{"name": "weather", "parameters": {CALL}}}; {{"name": "time", "parameters": {{}}}}',
        [("call", "weather"), ("arguments", CALL), ("call", "time"), ("arguments", "{}")],
    ),
    (
        KNOWN_MARKUPS["llama3_json"],
        f'<|python_tag|>{{"name": "weather", "parameters": {CALL}}}',
        [("call", "weather"), ("arguments", CALL)],
    ),
    (
        replace(KNOWN_MARKUPS["mistral"], reasoning=BRACKETS),
        f"[THINK]So.[/THINK]Let me look.[TOOL_CALLS]weather[ARGS]{CALL}[TOOL_CALLS]time[ARGS]{{}}",
        [
            ("reasoning", "So."),
            ("content", "Let me look."),
            ("call", "weather"),
            ("arguments", CALL),
            ("call", "time"),
            ("arguments", "{}"),
        ],
    ),
    (
        KNOWN_MARKUPS["mistral_list"],
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {CALL}}}, {{"name": "time", "arguments": {{}}}}]',
        [("call", "weather"), ("arguments", CALL), ("call", "time"), ("arguments", "{}")],
    ),
    (
        KNOWN_MARKUPS["phi4_mini_json"],
        f'<|tool_call|>[{{"name": "weather", "arguments": {CALL}}}, {{"name":"time","arguments":{{}}}}]<|/tool_call|>',
        [("call", "weather"), ("arguments", CALL), ("call", "time"), ("arguments", "{}")],
    ),
    (
        KNOWN_MARKUPS["granite"],
        f'<|tool_call|>[{{"name": "weather", "arguments": {CALL}}}, {{"name":"time","arguments":{{}}}}]',
        [("call", "weather"), ("arguments", CALL), ("call", "time"), ("arguments", "{}")],
    ),
    (
        replace(KNOWN_MARKUPS["nemotron_json"], reasoning=THINK),
        f'<think>So.</think>\n<TOOLCALL>[{{"name": "weather", "arguments": {CALL}}}, '
        '{"name": "time", "arguments": {}}]</TOOLCALL>',
        [("reasoning", "So."), ("call", "weather"), ("arguments", CALL), ("call", "time"), ("arguments", "{}")],
    ),
    (
        replace(KNOWN_MARKUPS["olmo3"], reasoning=THINK),
        '<think>So.</think>\n<function_calls>weather(city="a }\\" [<b", days=2)\ntime()</function_calls>',
        [("reasoning", "So."), ("call", "weather"), ("arguments", CALL), ("call", "time"), ("arguments", "{}")],
    ),
    (
        KNOWN_MARKUPS["olmo3"],
        'I ask.<function_calls>\nweather(city="Rome", unit=null, on=true, by={"a": [1, false]})\n</function_calls>',
        [
            ("content", "I ask."),
            ("call", "weather"),
            ("arguments", '{"city": "Rome", "unit": null, "on": true, "by": {"a": [1, false]}}'),
        ],
    ),
    (
        KNOWN_MARKUPS["hermes_list"],
        f'<tool_call>\n[\n  {{"name": "weather", "arguments": {CALL}}},\n  {{"name": "time", "arguments": {{}}}}\n]\n'
        "</tool_call>",
        [("call", "weather"), ("arguments", CALL), ("call", "time"), ("arguments", "{}")],
    ),
    (
        KNOWN_MARKUPS["lfm2"],
        'I ask.\n<|tool_call_start|>[weather(city="a }\\" [<b", days=2), time()]<|tool_call_end|>',
        [("content", "I ask."), ("call", "weather"), ("arguments", CALL), ("call", "time"), ("arguments", "{}")],
    ),
    (
        KNOWN_MARKUPS["lfm2"],
        "<|tool_call_start|> [ weather ( city = 'it\\'s \\u00e9\\x41\\n\\d, \\ud83d\\ude00 (1)' , unit=None, on = True,"
        "days=[1, -2.5, (0x1F, 1_000, .5,), []], by={'a': {}, \"b\": False, 3: 'x', }, "
        'text="""a "q" b""", none=\'\', ) ,'
        "time( )\n]<|tool_call_end|>",
        [
            ("call", "weather"),
            (
                "arguments",
                r"""{"city": "it's \u00e9A\n\\d, \ud83d\ude00 (1)", "unit": null, "on": true, """
                r'"days": [1, -2.5, [31, 1000, 0.5], []], "by": {"a": {}, "b": false, "3": "x"}, '
                r'"text": "a \"q\" b", "none": ""}',
            ),
            ("call", "time"),
            ("arguments", "{}"),
        ],
    ),
    (
        replace(KNOWN_MARKUPS["deepseek_v3"], reasoning=THINK),
        "<think>So.</think>I ask.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{CALL}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [
            ("reasoning", "So."),
            ("content", "I ask."),
            ("call", "weather"),
            ("arguments", CALL),
            ("call", "time"),
            ("arguments", "{}"),
        ],
    ),
    (
        KNOWN_MARKUPS["deepseek_v31"],
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{CALL}<｜tool▁call▁end｜><｜tool▁call▁begin｜>time"
        "<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("call", "weather"), ("arguments", CALL), ("call", "time"), ("arguments", "{}")],
    ),
    (
        KNOWN_MARKUPS["openai"],
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + CALL + "<|call|>",
        [("reasoning", "So."), ("content", "Let me look."), ("call", "weather"), ("arguments", CALL)],
    ),
    (
        KNOWN_MARKUPS["openai"],
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>It is late.<|return|>",
        [("reasoning", "So."), ("content", "It is late.")],
    ),
]
SAMPLES.append(
    (
        Markup(calls=CallSyntax("<call> ", " args: ", " </call>")),
        f"I ask. <call> \n weather\nargs: {CALL}\n</call> <call>\r\ntime args:{{}}</call>",
        [("content", "I ask."), ("call", "weather"), ("arguments", CALL), ("call", "time"), ("arguments", "{}")],
    )
)
SPECIAL = (
    *("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|python_tag|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    *("[CALL_ID]", "<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>', "<arg_key>", "</arg_key>"),
    *("<|START_ACTION|>", "<|END_ACTION|>", "<|END_THINKING|>"),
    *CHANNEL_TOKENS,
)
MARKERS = (
    MARK,
    "<tool",
    "</",
    "<think",
    "[TOOL",
    "[ARGS",
    "[/TH",
    "<|",
    "<｜",
    "```",
    "function=",
    "parameter=",
    '"name"',
    "arg_",
    "<seed",
    "<channel",
)


def marked(markup: Markup, text: str, special: Iterable[str] = SPECIAL) -> tuple[Markup, str]:
    """Return markup and text of a vocabulary with these special tokens."""
    found = markup.with_special({name: token for token, name in enumerate(special)})
    for name in found.tokens:
        text = text.replace(name, MARK + name)
    return found, text


def parser(markup: Markup, schemas: dict[str, Any] | None = SCHEMAS, **options: Any) -> OutputParser:
    return ChannelParser(markup, schemas) if markup.channels else MarkupParser(markup, schemas, **options)


def joined(deltas: Iterable[Delta]) -> Read:
    """Return deltas of one kind as one, but each call as its own."""
    read: Read = []
    for kind, text in deltas:
        if read and read[-1][0] == kind != "call":
            read[-1] = (kind, read[-1][1] + text)
        else:
            read.append((kind, text))
    return read


def read(reader: OutputParser, pieces: Iterable[str], *, is_cut: bool = False) -> Read:
    deltas = [delta for piece in pieces for delta in reader.feed(piece)]
    return joined([*deltas, *reader.finish(is_cut)])


BOTH = [
    *SAMPLES,
    *((*marked(markup, text), expected) for markup, text, expected in SAMPLES if marked(markup, "")[0].tokens),
]


def test_every_family_has_a_sample() -> None:
    sampled = [(markup.calls, markup.channels) for markup, _, _ in SAMPLES]
    assert all((family.calls, family.channels) in sampled for family in KNOWN_MARKUPS.values())
    assert {markup.reasoning for markup, _, _ in SAMPLES} >= {THINK, BRACKETS, SEED_THINK, THOUGHT, COMMAND_THINKING}


@pytest.mark.parametrize(("markup", "text", "expected"), BOTH)
def test_every_division_of_a_text_reads_the_same(markup: Markup, text: str, expected: Read) -> None:
    assert read(parser(markup), [text]) == expected
    assert read(parser(markup), text) == expected
    for at in range(1, len(text)):
        assert read(parser(markup), [text[:at], text[at:]]) == expected
    random_cuts = random.Random(7)
    for _ in range(100):
        cuts = sorted(random_cuts.choices(range(len(text)), k=random_cuts.randint(2, 12)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(parser(markup), pieces) == expected


@pytest.mark.parametrize(("markup", "text", "expected"), BOTH)
def test_a_text_that_is_cut_anywhere_shows_no_markup(markup: Markup, text: str, expected: Read) -> None:
    whole = [each for kind, each in expected if kind == "content"]
    for end in range(len(text)):
        found = read(parser(markup), [text[:end]], is_cut=True)
        for (kind, piece), (expected_kind, expected_piece) in zip(found, expected, strict=False):
            assert kind == expected_kind
            assert expected_piece.startswith(piece.rstrip())
        content = "".join(piece for kind, piece in found if kind == "content")
        if not any(marker in each for each in whole for marker in MARKERS):
            assert not any(marker in content for marker in MARKERS), text[:end]


def test_reasoning_may_begin_in_the_prompt() -> None:
    text = "\nSo.\n</think>\n\nHello"
    assert read(parser(THINKING, in_reasoning=True), text) == [("reasoning", "So."), ("content", "Hello")]
    assert read(parser(THINKING, in_reasoning=True), "\nSo. </thi", is_cut=True) == [("reasoning", "So.")]
    assert read(parser(THINKING, in_reasoning=True), "\nSo.\n") == [("reasoning", "So.")], "the model ended it there"


def test_without_tools_no_text_is_a_call() -> None:
    text = "<tool_call>\n{}\n</tool_call>"
    assert read(parser(THINKING, None), text) == [("content", text)]
    text = "<|channel|>commentary to=functions.time<|message|>{}<|call|>"
    assert read(parser(KNOWN_MARKUPS["openai"], None), text) == [("content", "{}")]


def test_json_that_is_no_call_is_an_answer() -> None:
    text = '{"name": 3}'
    assert read(parser(KNOWN_MARKUPS["llama3_json"]), text) == [("content", text)]
    call = '{"name": "weather", "parameters": {}}'
    assert read(parser(KNOWN_MARKUPS["llama3_json"], takes_bare_calls=False), call) == [("content", call)]


def test_what_only_spells_a_special_token_is_text() -> None:
    markup, text = marked(KNOWN_MARKUPS["mistral"], "Write [TOOL_CALLS]. [TOOL_CALLS]time[ARGS]{}")
    text = text.replace(MARK, "", 1)
    assert read(parser(markup), [text]) == [("content", "Write [TOOL_CALLS]."), ("call", "time"), ("arguments", "{}")]
    # A special token where the markup has none is dropped.
    markup, text = marked(replace(KNOWN_MARKUPS["mistral"], reasoning=BRACKETS), "a[/THINK]b")
    assert read(parser(markup), [text]) == [("content", "ab")]


def test_what_no_grammar_allows_ends_in_no_markup() -> None:
    assert read(parser(THINKING), "a <tool_call> b </tool_call>") == [("content", "a")]
    broken = '<tool_call>{"name": "time", "arguments": null}</tool_call>'
    assert read(parser(THINKING), broken) == [("call", "time"), ("arguments", "{}")]
    assert read(parser(KNOWN_MARKUPS["openai"]), "no header") == [("content", "no header")]


def test_only_a_text_that_is_cut_loses_the_beginning_of_markup() -> None:
    assert read(parser(THINKING), ["a <tool_c"]) == [("content", "a <tool_c")]
    assert read(parser(THINKING), ["<thi"]) == [("content", "<thi")]
    assert read(parser(THINKING), ["<thi"], is_cut=True) == []
    assert read(parser(THINKING), [" \n"], is_cut=True) == [("content", " \n")]


def test_calls_in_channels_follow_each_other() -> None:
    call = "<|channel|>commentary to=functions.time<|message|>{}<|call|>"
    text = f"{call}<|start|>assistant{call}"
    assert read(parser(KNOWN_MARKUPS["openai"]), text) == [("call", "time"), ("arguments", "{}")] * 2


def test_much_white_space_is_shown_before_it_ends() -> None:
    reader = parser(THINKING)
    shown = reader.feed("a" + " " * 10_000)
    assert sum(len(delta.text) for delta in shown) > 9_900
    assert read(parser(THINKING), ["a", *[" " * 100] * 10, "b"]) == [("content", "a" + " " * 1000 + "b")]


def test_a_short_answer_that_begins_like_a_header_is_the_answer() -> None:
    for text in ("t", "to", "to=func", "total"):
        assert read(parser(KNOWN_MARKUPS["openai"]), text) == [("content", text)]
    assert read(parser(KNOWN_MARKUPS["openai"]), "<|channel|>analysis") == [], "a header is no answer"


PARAMETERS: dict[str, Any] = {
    "properties": {
        "text": {"type": "string", "description": "any"},
        "one": {"enum": ["a", "1"]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "number": {"type": ["number", "string"]},
        "any": {},
        "short": {"type": "string", "maxLength": 3},
        "list": {"type": "array"},
        "reference": {"$ref": "#/$defs/text"},
        "described": {"$ref": "#/$defs/text", "description": "any"},
        "constant": {"const": "5"},
        "count": {"type": ["integer", "string"]},
        "missing": {"$ref": "#/$defs/missing"},
        "escaped": {"$ref": "#/$defs/a~1b%20~0c"},
    },
    "$defs": {"text": {"type": "string"}, "a/b ~c": {"type": "string"}},
}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("text", "5", "5"),
        ("text", "\n a \n", "\n a \n"),
        ("text", "", ""),
        ("text", "</parameter", "</parameter"),
        ("one", "1", "1"),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("number", "5", 5),
        ("number", "NaN", "NaN"),
        ("number", "five", "five"),
        ("any", '{"a": [1]}', {"a": [1]}),
        ("any", '"quoted"', '"quoted"'),
        ("short", '"abc"', "abc"),
        ("list", "[1, 2]", [1, 2]),
        ("list", "[1, 2", "[1, 2"),
        ("reference", "true", "true"),
        ("described", "true", "true"),
        ("constant", "5", "5"),
        ("unknown", "true", True),
        ("count", "true", "true"),
        ("count", "5.0", "5.0"),
        ("missing", "[1]", [1]),
        ("escaped", "true", "true"),
    ],
)
def test_values_of_parameters_have_the_types_of_the_schema(key: str, value: str, expected: object) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    for pieces in ([text], list(text)):
        (_, (_, arguments)) = read(parser(KNOWN_MARKUPS["qwen3_coder"], {"f": PARAMETERS}), pieces)
        assert json.loads(arguments) == {key: expected}


def test_a_value_may_be_on_the_line_of_its_parameter() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=text>a</parameter>\n</function>\n</tool_call>"
    for at in range(len(text)):
        found = read(parser(KNOWN_MARKUPS["qwen3_coder"], {"f": PARAMETERS}), [text[:at], text[at:]])
        assert found == [("call", "f"), ("arguments", '{"text": "a"}')]


def python_arguments(text: str, *, is_cut: bool = False) -> str:
    """Return the JSON of arguments in Python's syntax, read one character at a time."""
    reader = parser(KNOWN_MARKUPS["lfm2"])
    found = dict(read(reader, f"<|tool_call_start|>[f({text}", is_cut=is_cut))
    return found.get("arguments", "")


def random_value(draw: random.Random, depth: int = 0) -> Any:
    """Return a value of Python whose literals the parser reads."""
    kind = draw.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [random_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 7:
        return {random_value(draw, 9): random_value(draw, depth + 1) for _ in range(draw.randrange(4))}
    texts = ("", "it's", '"', "\\", "a\nb\t", "é\x00😀", "f(x=1)]", "'\\'\"", "\u2028", "-", "True")
    return [draw.randint(-99, 10**20), draw.uniform(-9, 9), 1e-7 * draw.random(), None, draw.random() < 0.5,
            draw.choice(texts)][kind]  # fmt: skip


def as_json(value: Any) -> Any:
    """Return a value with the keys that JSON has in place of Python's."""
    if isinstance(value, list):
        return [as_json(each) for each in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): as_json(each) for key, each in value.items()}
    return value


def test_arguments_in_python_have_the_values_that_python_reads() -> None:
    draw = random.Random(5)
    for _ in range(300):
        values = {f"key_{number}": random_value(draw) for number in range(draw.randrange(4))}
        text = ", ".join(f"{key}={value!r}" for key, value in values.items())
        found = json.loads(python_arguments(f"{text})]<|tool_call_end|>"))
        assert found == as_json(values), text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1, b", '{"a": '),
        ("a=1, 'b'", '{"a": 1'),
        ("a=[1, 2)", '{"a": [1, 2'),
        ("a={1}", '{"a": {"1"'),
        ("a='x' 'y')", '{"a": "x"'),
        ("a==1)", '{"a": '),
        ("5)", ""),
        ("a=1e999, b=nan, c=--1)", '{"a": 1e999, "b": "nan", "c": "--1"}'),
        ("a='\\ud83d', b='\\U00110000\\xzz'" + ")", '{"a": "\\ud83d", "b": "\\\\U00110000\\\\xzz"}'),
        ("a=" + "[" * 5000, '{"a": ' + "[" * 5000),
    ],
)
def test_text_that_is_no_list_of_arguments_adds_nothing(text: str, expected: str) -> None:
    assert python_arguments(text, is_cut=True).startswith(expected)
    assert json.dumps(expected)  # the text has no half characters


def test_three_own_quotes_are_an_empty_text_and_no_longer_quote() -> None:
    markup = KNOWN_MARKUPS["gemma4"]
    text = '<|tool_call>call:f{a:<|"|><|"|><|"|>}<tool_call|>'
    expected = [("call", "f"), ("arguments", '{"a": ""')]
    assert read(parser(markup), [text]) == read(parser(markup), text) == expected


def test_a_call_in_python_without_an_end_has_an_object() -> None:
    assert python_arguments("") == "{}"
    assert python_arguments("", is_cut=True) == ""
    assert python_arguments("a=1") == '{"a": '
