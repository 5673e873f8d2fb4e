"""The markup of a model: by its chat template, and by the description in its tokenizer_config.json."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.engine import TextProcessor
from quire.runtime.engine.markup.markup import (
    ANSWER_TAGS,
    BRACKETS,
    COMMAND_THINKING,
    GENERIC_MARKUP,
    KNOWN_MARKUPS,
    MARK,
    RESPONSE_TAGS,
    SEED_THINK,
    THINK,
    THOUGHT,
    AnswerTags,
    CallSyntax,
    Markup,
    Reasoning,
)
from quire.runtime.engine.markup.model_markup import find_markup
from quire.runtime.model import BUNDLED_MODEL
from structlog.testing import capture_logs

HERMES = KNOWN_MARKUPS["hermes"].calls
THINKING = {"open": "<think>", "close": "</think>", "content": "text"}
WHOLE = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
CALLS: dict[str, Any] = {
    "open": "<tool_call>\n", "close": "</tool_call>", "repeats": True, "content": "json", "transform": WHOLE,
}  # fmt: skip
PARAMETERS = r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<think>…</think><answer>…</answer>", ANSWER_TAGS),
        ("<think>…</think><response>…</response>", RESPONSE_TAGS),
        ("<think>…</think><answer>", None),
        ("<answer>…</answer>", None),  # the template of a model without reasoning
    ],
)
def test_the_chat_template_says_how_an_answer_is_tagged(template: str, expected: AnswerTags | None) -> None:
    assert find_markup("auto", template, {}).answer == expected
    assert find_markup("none", template, {}).without_calls().answer == expected


def test_tags_of_an_answer_may_be_special_tokens() -> None:
    markup = find_markup("none", "</think><response></response>", {"<response>": 7})
    assert markup == Markup(THINK, answer=AnswerTags(f"{MARK}<response>", "</response>"), tokens={"<response>": 7})
    assert markup.without_calls() == markup


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<tool_call>\\n' }}", "hermes"),
        ("<tool_call><function=", "qwen3_coder"),
        ("{{ '<tool_call>' + name }}<arg_key>", "glm45"),
        ("<seed:tool_call>\\n<function=", "seed_oss"),
        ("'<|tool_call>call:' + name + '{'", "gemma4"),
        ("<tool_calls>[", "hunyuan_a13b"),
        ('<|START_ACTION|>[ {"tool_call_id": "0", "tool_name": "', "cohere_command3"),
        ('in this format:\n<tool_call>\n[\n  {"name": "f", "arguments": {}}\n]\n</tool_call>', "hermes_list"),
        ("{{- 'in this format:\\n<tool_call>\\n[\\n  {}\\n]\\n</tool_call>' }}", "hermes_list"),
        ('<|start_header_id|>{"name": function name, "parameters": …}', "llama3_json"),
        ("[TOOL_CALLS]", "mistral_list"),
        ("[TOOL_CALLS][ARGS]", "mistral"),
        ("<|tool|>", "phi4_mini_json"),
        ("'<｜tool▁calls▁begin｜>' '```json'", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<|channel|><|message|>", "openai"),
        ("<|start_of_role|> <|tool_call|>", "granite"),
        ("<|start_of_role|> <tool_call>", "hermes"),
        ("'<TOOLCALL>['", "nemotron_json"),
        ("'<|tool_call_start|>['", "lfm2"),
        ("{{ '<function_calls>' + m.function_calls + '</function_calls>' }}", "olmo3"),
        ("plain", None),
    ],
)
def test_the_chat_template_says_which_family_it_is(template: str, expected: str | None) -> None:
    found = find_markup("auto", template, {})
    assert found == (GENERIC_MARKUP if expected is None else KNOWN_MARKUPS[expected])
    thinks = find_markup("auto", template + "</think>", {})
    assert thinks.reasoning == (None if found.channels else THINK)
    assert find_markup("hermes", template, {"[/THINK]": 3}) == replace(
        KNOWN_MARKUPS["hermes"],
        reasoning=replace(BRACKETS, close=f"{MARK}[/THINK]"),
        tokens={"[/THINK]": 3},
    )


@pytest.mark.parametrize(
    ("sign", "reasoning"),
    [("<channel|>", THOUGHT), ("</seed:think>", SEED_THINK), ("<|END_THINKING|>", COMMAND_THINKING)],
)
def test_the_chat_template_says_where_reasoning_ends(sign: str, reasoning: Reasoning) -> None:
    assert find_markup("auto", f"plain {sign}", {}) == replace(GENERIC_MARKUP, reasoning=reasoning)


def test_a_template_without_calls_leaves_the_family_to_the_special_tokens() -> None:
    """The template of LFM2 has no calls: a chat has them as text."""
    tokens = {"<|tool_call_start|>": 10, "<|tool_call_end|>": 11}
    assert find_markup("auto", "List of tools: [", tokens) == KNOWN_MARKUPS["lfm2"].with_special(tokens)
    assert find_markup("auto", "<tool_call>", tokens).calls == KNOWN_MARKUPS["hermes"].calls
    assert find_markup("none", "List of tools: [", tokens).calls is None


def described(fields: Any, template: str = "plain") -> Markup:
    return find_markup("auto", template, {}, {"response_template": {"start_anchor": "<a>", "fields": fields}})


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (CALLS, HERMES),
        ({**CALLS, "close": ["</tool_call>", "<|im_end|>"]}, HERMES),
        (
            {**CALLS, "transform": {"function": {"name": "{content.tool}", "arguments": "{content.args}"}}},
            CallSyntax('<tool_call> { "tool" : "', '" , "args" : ', " } </tool_call>"),
        ),
        (
            {
                "open": "<|START_ACTION|>", "close": "<|END_ACTION|>", "content": "json", "transform_each": True,
                "transform": {"function": {"name": "{tool_name}", "arguments": "{parameters}"}},
            },
            CallSyntax(
                ' { "tool_name" : "', '" , "parameters" : ', " }",
                begin="<|START_ACTION|> [", separator=" ,", end=" ] <|END_ACTION|>",
            ),
        ),
        (
            {"open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>\w+)\[ARGS\]", "content": "json", "transform": NAMED},
            CallSyntax("[TOOL_CALLS] ", "[ARGS] ", ""),
        ),
        (
            {
                "open_pattern": "<｜begin｜>function<｜sep｜>(?P<n>[^\n]+)\n```json\\n?",
                "close_pattern": r"\n?```<｜end｜>", "content": "json",
                "transform": {"function": {"name": "{n}", "arguments": "{content}"}},
            },
            CallSyntax("<｜begin｜>function<｜sep｜>", " ```json ", " ```<｜end｜>"),
        ),
        (
            {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>", "close": "</tool_call>",
                "content": "xml-inline", "content_args": {"tag_pattern": PARAMETERS}, "transform": NAMED,
            },
            KNOWN_MARKUPS["qwen3_coder"].calls,
        ),
    ],
)  # fmt: skip
def test_a_response_template_describes_calls(calls: Any, expected: CallSyntax) -> None:
    assert described({"tool_calls": calls, "content": {"close": "<|im_end|>"}}) == Markup(calls=expected)
    # Missing parts are the family's.
    assert described({"tool_calls": calls}, "[TOOL_CALLS]</think>") == Markup(THINK, expected)


@pytest.mark.parametrize("name", ["thinking", "reasoning", "reasoning_content"])
def test_a_response_template_describes_reasoning(name: str) -> None:
    assert described({name: THINKING}, "<tool_call>") == replace(KNOWN_MARKUPS["hermes"], reasoning=THINK)
    thought = {"open_pattern": r"<\|channel>thought\n?", "close": ["<channel|>"]}
    assert described({name: thought}) == replace(GENERIC_MARKUP, reasoning=Reasoning("<|channel>thought", "<channel|>"))
    marked = find_markup("auto", "", {"<channel|>": 7}, {"response_template": {"fields": {name: thought}}})
    assert marked == replace(
        GENERIC_MARKUP, reasoning=Reasoning("<|channel>thought", f"{MARK}<channel|>"), tokens={"<channel|>": 7}
    )


@pytest.mark.parametrize(
    "field",
    [
        {"tool_calls": {**CALLS, "content": "kv-lines"}},
        {"tool_calls": {**CALLS, "content_args": {"unquoted_keys": True}}},
        {"tool_calls": {**CALLS, "content_args": 5}},
        {"tool_calls": {**CALLS, "transform": None}},
        {"tool_calls": {**CALLS, "transform": {"function": {"name": "call {name}", "arguments": "{content}"}}}},
        {"tool_calls": {**CALLS, "open": ["<tool_call>", "<call>"]}},
        {"tool_calls": {**CALLS, "open": " \n"}},
        {"tool_calls": {**CALLS, "open": "a" * 201}},
        {"tool_calls": {**CALLS, "open": f"{MARK}<tool_call>"}},
        {"tool_calls": {**CALLS, "open": "\ud800"}},
        {"tool_calls": {**CALLS, "open_pattern": "<tool_call>"}},
        {"tool_calls": {**CALLS, "close": 5}},
        {"tool_calls": {**CALLS, "close": []}},
        {"tool_calls": {**CALLS, "open": None, "open_pattern": r"<call>(?P<name>\w+):(?P<id>\d+)"}},
        {"tool_calls": {**CALLS, "open": None, "open_pattern": r"<call>.*?(?P<name>\w+)"}},
        {"tool_calls": {**CALLS, "open": None, "open_pattern": r"<call>(?P<name>\w+)"}},
        {"tool_calls": {**CALLS, "close": None, "close_pattern": "a|b"}},
        {"tool_calls": {**CALLS, "open": None, "open_pattern": "<c(?P<name>("}},
        {"tool_calls": {**CALLS, "content": "xml-inline"}},
        {"thinking": {"open": "<think>"}},
        {"thinking": {"open": "<think>", "close": ["</think>", "<|end|>"]}},
        {"thinking": {"open": "my thoughts", "close": "</think>"}},
        {"thinking": {"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"}},
        {"thinking": {"open_pattern": "<(?P<name>think)>", "close_pattern": "</think>"}},
        {"thinking": {"open": "<think>", "close": None, "close_pattern": "</(?P<n>a)>"}},
        {"content": {"open": "<response>", "close": "</response>"}},
        {"citations": {"open": "<cite>", "close": "</cite>"}},
    ],
)
def test_what_is_no_markup_is_left_to_the_family(field: Any) -> None:
    for template, expected in (("plain", GENERIC_MARKUP), ("[TOOL_CALLS]", KNOWN_MARKUPS["mistral_list"])):
        with capture_logs() as logs:
            assert described(field, template) == expected
        assert [each["reason"].partition(":")[0] for each in logs] == [*field]
        assert logs[0]["source"] == "response_template"


@pytest.mark.parametrize("template", [5, [], "{}", {}, {"fields": []}, {"fields": {"content": None}}])
def test_a_description_that_is_none_is_left_to_the_family(template: Any) -> None:
    for source in ("response_template", "response_schema"):
        with capture_logs() as logs:
            assert find_markup("auto", "<tool_call>", {}, {source: template}) == KNOWN_MARKUPS["hermes"]
        assert len(logs) == 1


def test_a_family_that_is_named_and_channels_go_before_a_description() -> None:
    config = {"response_template": {"fields": {"thinking": THINKING, "tool_calls": CALLS}}}
    assert find_markup("mistral", "", {}, config) == KNOWN_MARKUPS["mistral"]
    assert find_markup("auto", "<|channel|><|message|>", {}, config) == KNOWN_MARKUPS["openai"]
    assert find_markup("auto", "", {}, {"response_template": None}) == GENERIC_MARKUP


PARSED = {"x-parser": "json", "x-parser-args": {"transform": "{type: 'function', function: @}"}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (
            {
                "properties": {
                    "role": {"const": "assistant"},
                    "content": {"type": "string"},
                    "thinking": {"x-regex": r"<think>\s*(.*?)\s*<\/think>"},
                    "tool_calls": {"x-regex-iterator": "<tool_call>(.*?)</tool_call>", "items": PARSED},
                }
            },
            Markup(THINK, HERMES),
        ),
        (
            {
                "x-regex": r"(?:<think>\n?(?P<thinking>.+?)\n?</think>)?\s*(?:<tool_call>(?P<tool_calls>.+?)"
                r"</tool_call>)?\s*(?P<content>.+?)?\s*(?:<\|im_end\|>|$)",
                "properties": {
                    "content": {},
                    "thinking": {},
                    "tool_calls": {"x-regex-iterator": "^(.*)$", "items": PARSED},
                },
            },
            Markup(THINK, HERMES),
        ),
        ({"properties": {"content": {"x-regex": "<response>(.*?)</response>"}}}, GENERIC_MARKUP),
        ({"properties": {"thinking": {"x-regex": "(?:^|<think>)(.*?)</think>"}}}, GENERIC_MARKUP),
        ({"properties": {"tool_calls": {"x-regex-iterator": "<call>(.*?)</call>", "items": 5}}}, GENERIC_MARKUP),
        ({"properties": {"(": {}, "a": 5}, "x-regex": "(?P<a>"}, GENERIC_MARKUP),
    ],
)
def test_a_response_schema_is_read_as_a_template(schema: Any, expected: Markup) -> None:
    with capture_logs() as logs:
        assert find_markup("auto", "plain", {}, {"response_schema": schema}) == expected
    assert bool(logs) == (expected == GENERIC_MARKUP)


def test_a_folder_brings_its_description(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["response_template"] = {"fields": {"thinking": THINKING, "tool_calls": CALLS}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert TextProcessor.load(folder).markup == Markup(THINK, HERMES)
    assert TextProcessor.load(folder, "none").markup == Markup()
