"""Granite 4 and Nemotron 3: prompts as their templates have them, calls and reasoning as these models write them, and
the sampling parameters that the models recommend."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.engine import TextProcessor
from quire.runtime.engine.markup.call_text import calls_text
from quire.runtime.engine.markup.markup import KNOWN_MARKUPS, THINK
from quire.runtime.engine.markup.markup_parser import MarkupParser
from quire.runtime.engine.markup.model_markup import find_markup
from quire.runtime.engine.text import chat
from quire.runtime.engine.text.chat import ChatTemplate
from quire.runtime.model import BUNDLED_MODEL

GRANITE_4 = r"""{#- Granite 4's form: tools in the system message, results of one turn in one message of the user #}
{%- set before = 'Tools:\n<tools>' %}
{%- set after = '\n</tools>\nA call:\n<tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call>' %}
{%- set ns = namespace(tools='', system='') %}
{%- for tool in tools or [] %}{% set ns.tools = ns.tools + '\n' + (tool | tojson) %}{% endfor %}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}{% endif %}
{%- if ns.tools %}{% set ns.system = (ns.system + '\n\n' if ns.system else '') + before + ns.tools + after %}{% endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + (ns.system or 'You are helpful.') + '<|end_of_text|>\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start_of_role|>assistant<|end_of_role|>' + (message.content if message.content is string else '') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\n' }}{% endif %}
            {{- '<tool_call>\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {%- if tool_call.function.arguments is string %}{{- tool_call.function.arguments }}
            {%- else %}{{- tool_call.function.arguments | tojson }}{% endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end_of_text|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|start_of_role|>user<|end_of_role|>' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|end_of_text|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""

NEMOTRON_3 = r"""{#- Nemotron 3's form: parameters of calls in tags, no earlier reasoning, the prompt begins to think #}
{%- set enable_thinking = enable_thinking if enable_thinking is defined else True %}
{%- set ns = namespace(last_user=-1) %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- for m in turns %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{{- '<|im_start|>system\n' + system }}
{%- if tools is iterable and tools | length > 0 %}
    {{- ('\n\n' if system else '') + '# Tools\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n<function>\n<name>' ~ tool.function.name ~ '</name>' }}
        {%- for name, fields in tool.function.parameters.properties | items %}
            {{- '\n<parameter>\n<name>' ~ name ~ '</name>\n<type>' ~ fields.type ~ '</type>\n</parameter>' }}
        {%- endfor %}
        {{- '\n</function>' }}
    {%- endfor %}
    {{- '\n</tools>\nA call:\n<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>' }}
    {{- '\n</function>\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for m in turns %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content | default('', true) %}
        {%- if m.reasoning_content is string and m.reasoning_content | trim %}
            {%- set content = '<think>\n' ~ m.reasoning_content ~ '\n</think>\n' ~ content %}
        {%- elif '<think>' not in content and '</think>' not in content %}
            {%- set content = '<think></think>' ~ content %}
        {%- endif %}
        {%- if loop.index0 < ns.last_user %}
            {%- set content = '<think></think>' ~ content.split('</think>')[-1] | trim %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' ~ content | trim }}
        {%- if m.tool_calls %}
            {{- '\n' }}
            {%- for tool_call in m.tool_calls %}
                {{- '<tool_call>\n<function=' ~ tool_call.function.name ~ '>\n' }}
                {%- for key, value in tool_call.function.arguments | items %}
                    {%- set is_json = value is mapping or (value is sequence and value is not string) %}
                    {%- set value = value | tojson | safe if is_json else value | string %}
                    {{- '<parameter=' ~ key ~ '>\n' ~ value ~ '\n</parameter>\n' }}
                {%- endfor %}
                {{- '</function>\n</tool_call>\n' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user\n' }}{% endif %}
        {{- '<tool_response>\n' + m.content + '\n</tool_response>\n' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>' + ('\n' if enable_thinking else '</think>') }}
{%- endif %}"""

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "Weather?"}
MORE = {"role": "user", "content": "And now?"}
ROME: dict[str, Any] = {"city": "Rome", "days": 2}
LIMA: dict[str, Any] = {"city": "Lima"}


def answer(content: str | None, **more: Any) -> dict[str, Any]:
    """Return an answer that calls `weather` for Rome and Lima."""
    functions = ({"name": "weather", "arguments": json.dumps(each)} for each in (ROME, LIMA))
    calls = [{"id": f"c{i}", "type": "function", "function": each} for i, each in enumerate(functions)]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


RESULTS = [{"role": "tool", "tool_call_id": f"c{i}", "content": text} for i, text in enumerate(("sunny", "fog"))]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limit of a template, which a busy machine could reach in any test."""
    monkeypatch.setattr(chat, "RENDER_TIMEOUT_S", 120.0)


def test_a_chat_of_granite_4_without_a_system_message_has_its_default() -> None:
    assert ChatTemplate(GRANITE_4).render([ASK]) == (
        "<|start_of_role|>system<|end_of_role|>You are helpful.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Weather?<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>"
    )


@pytest.mark.parametrize(("content", "shown"), [(None, ""), ("I ask.", "I ask.\n")])
def test_calls_and_results_of_granite_4_are_the_templates(content: str | None, shown: str) -> None:
    syntax = find_markup("auto", GRANITE_4, {}).calls
    text = ChatTemplate(GRANITE_4).render([SYSTEM, ASK, answer(content), *RESULTS, MORE], [TOOL], syntax=syntax)
    tool = json.dumps(TOOL)
    assert text == (
        f"<|start_of_role|>system<|end_of_role|>Be brief.\n\nTools:\n<tools>\n{tool}\n</tools>\nA call:\n"
        '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|end_of_text|>\n'
        "<|start_of_role|>user<|end_of_role|>Weather?<|end_of_text|>\n"
        f"<|start_of_role|>assistant<|end_of_role|>{shown}"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Lima"}}\n</tool_call><|end_of_text|>\n'
        "<|start_of_role|>user<|end_of_role|>\n<tool_response>\nsunny\n</tool_response>"
        "\n<tool_response>\nfog\n</tool_response><|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>And now?<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>"
    )


CODED = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\nLima\n</parameter>\n</function>\n"
    "</tool_call>"
)


@pytest.mark.parametrize(("thinks", "end"), [({}, "<think>\n"), ({"enable_thinking": False}, "<think></think>")])
def test_a_prompt_of_nemotron_3_begins_to_think_or_says_that_it_does_not(thinks: dict[str, Any], end: str) -> None:
    assert ChatTemplate(NEMOTRON_3).render([ASK], variables=thinks) == (
        f"<|im_start|>system\n<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n{end}"
    )


def test_nemotron_3_sees_the_reasoning_before_the_calls_of_this_turn_alone() -> None:
    syntax = find_markup("auto", NEMOTRON_3, {}).calls
    turn = [ASK, answer("I ask.", reasoning_content="So."), *RESULTS]
    tools = (
        "# Tools\n<tools>\n<function>\n<name>weather</name>\n<parameter>\n<name>city</name>\n<type>string</type>\n"
        "</parameter>\n<parameter>\n<name>days</name>\n<type>integer</type>\n</parameter>\n</function>\n</tools>\n"
        "A call:\n<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>"
    )
    start = f"<|im_start|>system\nBe brief.\n\n{tools}<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
    results = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nfog\n</tool_response>\n"
    rest = f"I ask.\n{CODED}\n<|im_end|>\n<|im_start|>user\n{results}<|im_end|>\n"
    ask = "<|im_start|>user\nAnd now?<|im_end|>\n"
    prompt = "<|im_start|>assistant\n<think>\n"
    template = ChatTemplate(NEMOTRON_3)
    within = template.render([SYSTEM, *turn], [TOOL], syntax=syntax)
    assert within == f"{start}{prompt}So.\n</think>\n{rest}{prompt}"
    later = template.render([SYSTEM, *turn, MORE], [TOOL], syntax=syntax)
    assert later == f"{start}<|im_start|>assistant\n<think></think>{rest}{ask}{prompt}"


@pytest.mark.parametrize(
    ("template", "family", "thinks"), [(GRANITE_4, "hermes", False), (NEMOTRON_3, "qwen3_coder", True)]
)
def test_the_calls_of_a_prompt_are_read_as_an_output(template: str, family: str, thinks: bool) -> None:
    markup = find_markup("auto", template, {})
    assert (markup.calls, markup.reasoning) == (KNOWN_MARKUPS[family].calls, THINK if thinks else None)
    assert markup.calls is not None
    calls = calls_text(markup.calls, [("weather", ROME), ("weather", LIMA)])
    assert calls in ChatTemplate(template).render([ASK, answer(None), *RESULTS], [TOOL], syntax=markup.calls)
    parser = MarkupParser(markup, {"weather": PARAMETERS}, in_reasoning=thinks)
    text = f"So.\n</think>\n\nI ask.\n{calls}\n" if thinks else f"I ask.\n{calls}\n"
    deltas = [*(delta for letter in text for delta in parser.feed(letter)), *parser.finish(is_cut=False)]
    kinds: dict[str, list[str]] = {}
    for kind, piece in deltas:
        kinds.setdefault(kind, []).append(piece)
    assert "".join(kinds.get("reasoning", ())) == ("So." if thinks else "")
    assert "".join(kinds["content"]) == "I ask."
    assert kinds["call"] == ["weather", "weather"]
    assert "".join(kinds["arguments"]) == json.dumps(ROME) + json.dumps(LIMA)


@pytest.mark.parametrize(
    ("recommended", "sampling"),
    [
        ({"do_sample": True, "temperature": 1.0, "top_p": 1.0}, {"temperature": 1.0, "top_p": 1.0}),  # Nemotron 3
        ({"do_sample": True, "eos_token_id": 100257, "pad_token_id": 100256}, {}),  # Granite 4 recommends nothing
        (
            {"temperature": 0.3, "min_p": 0.15, "repetition_penalty": 1.05},  # LFM2
            {"temperature": 0.3, "min_p": 0.15, "repetition_penalty": 1.05},
        ),
        (
            {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95},  # Gemma 4
            {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
        ),
    ],
)
def test_the_sampling_that_these_models_recommend_is_the_default(
    tmp_path: Path, recommended: dict[str, Any], sampling: dict[str, float]
) -> None:
    folder = Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))
    recommended = {key: value for key, value in recommended.items() if not key.endswith("token_id")}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, **recommended}))
    assert TextProcessor.load(folder).default_sampling == sampling
