"""Chats with system messages, calls and results are shown completely, independent of the template's roles."""

from __future__ import annotations

from typing import Any

import pytest
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.engine.markup.call_text import call_example, calls_text
from quire.runtime.engine.markup.markup import GENERIC_MARKUP, KNOWN_MARKUPS
from quire.runtime.engine.text import chat, chat_history
from quire.runtime.engine.text.chat import ChatTemplate

ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
ROLE_NAMES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
THREE_ROLES = (  # form of Zephyr and TinyLlama
    "{% for m in messages %}{% if m.role == 'user' %}U {{ m.content }}\n{% elif m.role == 'assistant' %}"
    "A {{ m.content }}\n{% elif m.role == 'system' %}S {{ m.content }}\n{% endif %}{% endfor %}A"
)
NO_SYSTEM = (  # Gemma 2's form
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}" + ALTERNATE + "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
FIRST_SYSTEM = (  # Gemma 3's form
    "{% set ms = messages %}{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% set ms = messages[1:] %}"
    "{% endif %}{% for m in ms %}" + ALTERNATE + "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
ONLY_WITHOUT_TEXT = (  # DeepSeek V3's form
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "call {{ c.function.name + c.function.arguments }}\n{% endfor %}{% else %}{{ m.role }}: {{ m.content }}\n"
    "{% endif %}{% endfor %}"
)
WITHOUT_TEXT_BESIDE = (  # Llama 3.1's form
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('only single tool-calls at once') }}{% endif %}"
    "call {{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}\n"
    "{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
)
ALTERNATING_CALLS = (
    "{% for m in messages %}{% if m.role == 'assistant' and messages[loop.index0 - 1].role != 'user' %}"
    "{{ raise_exception('an answer follows a user') }}{% endif %}{% if 'tool_calls' in m %}"
    "call {{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}\n"
    "{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
)
BARE_KEYS = (  # Gemma 4's form
    "{% for m in messages %}{% for c in m.tool_calls or () %}call:{{ c.function.name }}{{ '{' }}"
    "{% if c.function.arguments is mapping %}{% for key, value in c.function.arguments | dictsort %}"
    "{{ key }}:<{{ value }}>{% endfor %}{% else %}{{ c.function.arguments }}{% endif %}{{ '}' }}\n{% endfor %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
NINE_LETTERS = (  # Mistral's form
    "{% for m in messages %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('9 letters') }}"
    "{% endif %}{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}\n{% endfor %}"
    "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('9 letters') }}{% endif %}"
    "{{ m.role }} {{ m.tool_call_id }}: {{ m.content }}\n{% endfor %}"
)
OLMO3 = (  # OLMo 3's form
    "{% for m in messages %}{% if m.role == 'system' %}S {{ m.content }}{% if m.get('functions', none) is not none %}"
    " <functions>{{ m.functions }}</functions>{% else %} You have no functions.{% endif %}{{ '\n' }}"
    "{% elif m.role in ['user', 'environment'] %}{{ m.role }}: {{ m.content }}\n"
    "{% elif m.role == 'assistant' %}A {{ m.content if m.content is not none }}{% endif %}{% endfor %}"
)
FALCON_H1 = (  # Falcon-H1's form
    "{% if tools %}S {% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "{% for tool in tools %}[{{ tool | tojson }}]{% endfor %}{{ '\n' }}{% endif %}{% for m in messages %}"
    "{% if m.role != 'system' or not tools %}{{ m.role + ': ' + m.content + '\n' }}{% endif %}{% endfor %}"
)
HERMES = KNOWN_MARKUPS["hermes"].calls
CODER = KNOWN_MARKUPS["qwen3_coder"].calls
OWN_TOOLS = (  # a template with tools, calls and results of its own, whose syntax is not known
    "{{ tools | tojson if tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls %}[own {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %};"
    "{% endfor %}"
)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limit of a template, which a busy machine could reach in any test."""
    monkeypatch.setattr(chat, "RENDER_TIMEOUT_S", 120.0)


def call(name: str, arguments: Any, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(content: str, call_id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "Weather?"}
MORE = {"role": "user", "content": "And now?"}
ROME = call("weather", '{"city": "Rome"}')
HISTORY = [SYSTEM, ASK, answer(ROME), result("sunny"), MORE]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
RESULT_TEXT = "<tool_response>\nsunny\n</tool_response>"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            ROLE_NAMES,
            f"system: Be brief.\nuser: Weather?\nassistant: {CALL_TEXT}\ntool: sunny\nuser: And now?\n",
        ),
        (THREE_ROLES, f"S Be brief.\nU Weather?\nA {CALL_TEXT}\nU {RESULT_TEXT}\nU And now?\nA"),
        (
            NO_SYSTEM,
            f"user: Be brief.\n\nWeather?\nassistant: {CALL_TEXT}\nuser: {RESULT_TEXT}\n\nAnd now?\n",
        ),
        (FIRST_SYSTEM, f"Be brief.\nuser: Weather?\nassistant: {CALL_TEXT}\nuser: {RESULT_TEXT}\n\nAnd now?\n"),
        (
            ONLY_WITHOUT_TEXT,
            'system: Be brief.\nuser: Weather?\ncall weather{"city": "Rome"}\ntool: sunny\nuser: And now?\n',
        ),
        (
            WITHOUT_TEXT_BESIDE,
            'system: Be brief.\nuser: Weather?\ncall weather {"city": "Rome"}\ntool: sunny\nuser: And now?\n',
        ),
    ],
)
def test_a_history_is_shown_completely(source: str, text: str) -> None:
    assert ChatTemplate(source).render(HISTORY, syntax=HERMES) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (ONLY_WITHOUT_TEXT, "user: Weather?\nassistant: I look.\ncall weather{}\ntool: sunny\n"),
        (WITHOUT_TEXT_BESIDE, "user: Weather?\nassistant: I look.\ncall weather {}\ntool: sunny\n"),
        (
            ALTERNATING_CALLS,
            "user: Weather?\nassistant: I look.\n<tool_call>\n"
            '{"name": "weather", "arguments": {}}\n</tool_call>\n'
            "tool: sunny\n",
        ),
        (
            FIRST_SYSTEM,
            "user: Weather?\nassistant: I look.\n<tool_call>\n"
            '{"name": "weather", "arguments": {}}\n</tool_call>\n'
            f"user: {RESULT_TEXT}\n",
        ),
    ],
)
def test_the_text_beside_a_call_is_shown(source: str, text: str) -> None:
    messages = [ASK, answer(call("weather", "{}"), content="I look."), result("sunny")]
    assert ChatTemplate(source).render(messages, syntax=HERMES) == text


@pytest.mark.parametrize("content", [None, ""])
def test_calls_are_shown_beside_an_absent_or_empty_text(content: str | None) -> None:
    messages = [ASK, answer(ROME, content=content)]
    assert ChatTemplate(ONLY_WITHOUT_TEXT).render(messages) == 'user: Weather?\ncall weather{"city": "Rome"}\n'


def test_tools_and_results_of_olmo_3_have_its_own_field_and_role() -> None:
    syntax = KNOWN_MARKUPS["olmo3"].calls
    tool = '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}'
    end = 'A <function_calls>weather(city="Rome")</function_calls>environment: sunny\nuser: And now?\n'
    text = ChatTemplate(OLMO3).render(HISTORY, tools=[TOOL], syntax=syntax)
    assert text == f"S Be brief. <functions>[{tool}]</functions>\nuser: Weather?\n{end}"
    assert ChatTemplate(OLMO3).render(HISTORY[1:], syntax=syntax) == f"user: Weather?\n{end}"


def test_a_template_that_shows_tools_and_no_calls_gets_calls_as_text() -> None:
    text = ChatTemplate(FALCON_H1).render(HISTORY, tools=[TOOL], syntax=HERMES)
    tool = '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}'
    assert text == f"S Be brief.\n[{tool}]\nuser: Weather?\nassistant: {CALL_TEXT}\ntool: sunny\nuser: And now?\n"


def test_several_calls_follow_each_other_where_a_message_has_one() -> None:
    calls = answer(call("f", {"a": 1}, "x"), call("g", {}, "y"), content="Both:")
    text = ChatTemplate(WITHOUT_TEXT_BESIDE).render([ASK, calls, result("two", "y"), result("one", "x"), MORE])
    assert text == (
        'user: Weather?\nassistant: Both:\ncall f {"a": 1}\ntool: one\ncall g {}\ntool: two\nuser: And now?\n'
    )


def test_results_in_a_row_are_one_message_of_the_user() -> None:
    calls = answer(call("f", "{}", "x"), call("g", "{}", "y"))
    text = ChatTemplate(FIRST_SYSTEM).render([ASK, calls, result("one", "x"), result("two", "y")], syntax=HERMES)
    assert text.endswith("user: <tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>\n")


def test_ids_of_other_servers_get_nine_letters_where_a_template_demands_them() -> None:
    messages = [ASK, answer(call("f", "{}", "call_0123456789")), result("one", "call_0123456789")]
    lines = ChatTemplate(NINE_LETTERS).render(messages).splitlines()
    call_id = lines[1].split()[0]
    assert len(call_id) == 9
    assert lines[1:] == [f"{call_id} f {{}}", "assistant : ", f"tool {call_id}: one"]
    own = [ASK, answer(call("f", "{}", "abcdefghi")), result("one", "abcdefghi")]
    assert "abcdefghi f {}\n" in ChatTemplate(NINE_LETTERS).render(own)


@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}])
def test_a_template_that_writes_keys_without_quotes_reads_a_map(arguments: Any) -> None:
    lines = ChatTemplate(BARE_KEYS).render([ASK, answer(call("f", arguments)), result("one")]).splitlines()
    assert lines[1] == "call:f{city:<Rome>}"


def test_ids_that_are_left_out_are_given_in_order() -> None:
    without = [{key: value for key, value in call(name, "{}").items() if key != "id"} for name in "fg"]
    results = [{"role": "tool", "content": text} for text in ("one", "two")]
    lines = ChatTemplate(NINE_LETTERS).render([ASK, answer(*without), *results]).splitlines()
    assert lines[1:3] == ["call00001 f {}", "call00002 g {}"]
    assert lines[-2:] == ["tool call00001: one", "tool call00002: two"]


def test_calls_of_several_answers_are_given_different_ids() -> None:
    without = [{key: value for key, value in call(name, "{}").items() if key != "id"} for name in "fgh"]
    turns = [(answer(each), {"role": "tool", "content": "done"}) for each in without]
    lines = ChatTemplate(NINE_LETTERS).render([ASK, *(each for turn in turns for each in turn)]).splitlines()
    assert [line for line in lines if line.startswith("call")] == ["call00001 f {}", "call00002 g {}", "call00003 h {}"]
    assert lines[-1] == "tool call00003: done"


def test_a_result_of_no_call_is_shown_after_the_results_of_calls() -> None:
    calls = answer(call("f", "{}"), call("g", "{}", "c2"))
    results = [result("lost", "c9"), result("two", "c2"), result("one")]
    assert ChatTemplate(WITHOUT_TEXT_BESIDE).render([ASK, calls, *results, MORE]) == (
        "user: Weather?\ncall f {}\ntool: one\ncall g {}\ntool: two\ntool: lost\nuser: And now?\n"
    )


def test_results_of_several_answers_are_messages_of_their_own() -> None:
    second = [answer(call("weather", '{"city": "Oslo"}')), result("rain")]
    assert ChatTemplate(THREE_ROLES).render([*HISTORY, *second], syntax=HERMES) == (
        f"S Be brief.\nU Weather?\nA {CALL_TEXT}\nU {RESULT_TEXT}\nU And now?\n"
        f"A {CALL_TEXT.replace('Rome', 'Oslo')}\nU {RESULT_TEXT.replace('sunny', 'rain')}\nA"
    )


def test_an_answer_after_a_call_does_not_join_the_call() -> None:
    """The template that takes no second answer says so; joined, it would leave out the text of this answer."""
    with pytest.raises(InvalidRequest, match="an answer follows a user"):
        ChatTemplate(ALTERNATING_CALLS).render([ASK, answer(ROME), {"role": "assistant", "content": "I wait."}])


def test_the_template_for_tools_renders_calls_that_the_default_does_not() -> None:
    template = ChatTemplate(ROLE_NAMES, tool_source=WITHOUT_TEXT_BESIDE)
    assert 'call weather {"city": "Rome"}\n' in template.render(HISTORY)
    assert template.render([ASK]) == "user: Weather?\n"


def test_a_template_that_shows_no_answers_refuses_calls() -> None:
    template = ChatTemplate("{{ messages[-1].content }}")
    assert template.render([ASK]) == "Weather?"
    with pytest.raises(InvalidRequest, match="shows neither the calls of earlier answers nor their text"):
        template.render(HISTORY)


def test_calls_that_are_not_shown_at_some_place_are_refused() -> None:
    """Nemotron Nano 2's template leaves out a call in the last message."""
    source = ROLE_NAMES.replace("{{ m.content }}", "{% if m.tool_calls and not loop.last %}"
        "{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}")  # fmt: skip
    template = ChatTemplate(source)
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in template.render([ASK, answer(ROME), result("sunny")])
    with pytest.raises(InvalidRequest, match="leaves out a call or a result with 'weather'"):
        template.render([ASK, answer(ROME)])


def test_content_that_is_null_only_where_a_result_follows() -> None:
    """QwQ's template reads the content of all messages except the last."""
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{{ '' if loop.last else m.content.split('#')[-1] }}"
        "{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    text = ChatTemplate(source).render([ASK, answer(ROME), result("sunny")])
    assert text == 'Weather?{"name": "weather", "arguments": {"city": "Rome"}}sunny'


def test_a_template_that_shows_its_last_system_message_gets_one() -> None:
    source = (  # form of DeepSeek R1's distillations
        "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
        "{% endif %}{% endfor %}{{ ns.s }}\n{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}: "
        "{{ m.content }}\n{% endif %}{% endfor %}"
    )
    late = {"role": "system", "content": "Now in French."}
    chat = [ASK, {"role": "assistant", "content": "Sunny."}, late]
    text = ChatTemplate(source).render([SYSTEM, *chat])
    assert text == "Be brief.\nuser: Weather?\nassistant: Sunny.\nuser: Now in French.\n"
    assert ChatTemplate(source).render(chat) == "Now in French.\nuser: Weather?\nassistant: Sunny.\n"


def test_the_reason_of_a_template_that_refuses_everything_is_told() -> None:
    with pytest.raises(InvalidRequest, match="refused these messages: 'functions' is undefined"):
        ChatTemplate("{{ functions.x }}").render(HISTORY)


def test_system_messages_later_in_a_chat_are_shown() -> None:
    late = {"role": "system", "content": "Now in French."}
    chat = [ASK, {"role": "assistant", "content": "Sunny."}, late, MORE]
    assert ChatTemplate(ROLE_NAMES).render(chat).endswith("system: Now in French.\nuser: And now?\n")
    assert ChatTemplate(FIRST_SYSTEM).render(chat).endswith("user: Now in French.\n\nAnd now?\n")
    assert ChatTemplate(NO_SYSTEM).render([SYSTEM, late, ASK]) == "user: Be brief.\n\nNow in French.\n\nWeather?\n"
    assert ChatTemplate(NO_SYSTEM).render([SYSTEM]) == "user: Be brief.\n"


def test_messages_in_a_row_are_one_where_roles_alternate() -> None:
    answers = [{"role": "assistant", "content": text} for text in ("a", "b")]
    chat = [ASK, MORE, *answers, ASK]
    joined = "user: Weather?\n\nAnd now?\nassistant: a\n\nb\nuser: Weather?\n"
    assert ChatTemplate(FIRST_SYSTEM).render(chat) == joined
    assert ChatTemplate(ROLE_NAMES).render(chat).count("user: ") == 3
    images = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}, ASK]
    assert chat_history._appended(images[0]["content"], "Weather?", "\n\n") == [
        {"type": "text", "text": "a"},
        {"type": "image"},
        {"type": "text", "text": "Weather?"},
    ]


def test_tools_come_with_how_a_call_is_written() -> None:
    declared = '\n{"name": "weather", "parameters": {"type": "object"}}\n\nTo call a tool, write:\n'
    text = ChatTemplate(ROLE_NAMES).render([ASK], [TOOL], syntax=HERMES)
    example = '<tool_call>\n{"name": "TOOL", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>'
    assert text.endswith(f"{declared}{example}\nuser: Weather?\n")
    text = ChatTemplate(NO_SYSTEM).render([SYSTEM, ASK], [TOOL], syntax=CODER)
    example = "<tool_call>\n<function=TOOL>\n<parameter=ARGUMENT>\nVALUE\n</parameter>\n</function>\n</tool_call>"
    assert text.startswith("user: Be brief.\n\nYou can call these tools.")
    assert text.endswith(f"{declared}{example}\n\nWeather?\n")


def test_a_template_that_reads_tools_may_read_nothing_else() -> None:
    """Trial chats use names that no tool has, because such a template shows the names of tools everywhere."""
    source = "{{ tools | tojson if tools else '' }}\n" + FIRST_SYSTEM
    text = ChatTemplate(source).render(HISTORY, [TOOL], syntax=HERMES)
    shown = f"\nBe brief.\nuser: Weather?\nassistant: {CALL_TEXT}\nuser: {RESULT_TEXT}\n\nAnd now?\n"
    assert text.endswith(shown)


def test_texts_are_parts_where_a_template_reads_only_parts() -> None:
    parts = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    text = ChatTemplate(NO_SYSTEM.replace("{{ m.content }}", parts)).render(HISTORY, syntax=HERMES)
    assert text == f"user: Be brief.\n\nWeather?assistant: {CALL_TEXT}user: {RESULT_TEXT}\n\nAnd now?"


def test_a_slow_template_says_nothing_of_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "{% if 'quireprobe' in messages | string %}{% for i in range(99999) %}{% for j in range(99999) %}"
    template = ChatTemplate(slow + "{% endfor %}{% endfor %}{% endif %}" + ROLE_NAMES)
    monkeypatch.setattr(chat, "RENDER_TIMEOUT_S", 0.05)
    with pytest.raises(InvalidRequest, match="longer than"):
        template.render(HISTORY)


CALLS: list[tuple[str, dict[str, Any]]] = [("f", {"city": "Rome"}), ("g", {})]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (
            "hermes",
            '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        ),
        (
            "seed_oss",
            "<seed:tool_call>\n<function=f>\n<parameter=city>Rome</parameter>\n</function>\n</seed:tool_call>\n"
            "<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>",
        ),
        (
            "glm45",
            "<tool_call>f<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>\n<tool_call>g</tool_call>",
        ),
        ("gemma4", '<|tool_call>call:f{city:<|"|>Rome<|"|>}<tool_call|><|tool_call>call:g{}<tool_call|>'),
        (
            "hunyuan_a13b",
            '<tool_calls>[{"name": "f", "arguments": {"city": "Rome"}}, {"name": "g", "arguments": {}}]</tool_calls>',
        ),
        (
            "cohere_command3",
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"city": "Rome"}}, '
            '{"tool_call_id": "1", "tool_name": "g", "parameters": {}}]<|END_ACTION|>',
        ),
        (
            "llama3_json",
            '<|python_tag|>{"name": "f", "parameters": {"city": "Rome"}}; {"name": "g", "parameters": {}}',
        ),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"city": "Rome"}[TOOL_CALLS]g[ARGS]{}'),
        (
            "mistral_list",
            '[TOOL_CALLS][{"name": "f", "arguments": {"city": "Rome"}}, {"name": "g", "arguments": {}}]',
        ),
        (
            "phi4_mini_json",
            '<|tool_call|>[{"name": "f", "arguments": {"city": "Rome"}}, {"name": "g", "arguments": {}}]<|/tool_call|>',
        ),
        (
            "granite",
            '<|tool_call|>[{"name": "f", "arguments": {"city": "Rome"}}, {"name": "g", "arguments": {}}]',
        ),
        (
            "nemotron_json",
            '<TOOLCALL>[{"name": "f", "arguments": {"city": "Rome"}}, {"name": "g", "arguments": {}}]</TOOLCALL>',
        ),
        ("lfm2", '<|tool_call_start|>[f(city="Rome"), g()]<|tool_call_end|>'),
        ("olmo3", '<function_calls>f(city="Rome")\ng()</function_calls>'),
        (
            "hermes_list",
            '<tool_call>[{"name": "f", "arguments": {"city": "Rome"}}, {"name": "g", "arguments": {}}]</tool_call>',
        ),
        (
            "deepseek_v31",
            '<|tool▁calls▁begin|><|tool▁call▁begin|>f<|tool▁sep|>{"city": "Rome"}<|tool▁call▁end|>'
            "<|tool▁call▁begin|>g<|tool▁sep|>{}<|tool▁call▁end|><|tool▁calls▁end|>",
        ),
    ],
)
def test_calls_are_written_as_the_family_writes_them(family: str, text: str) -> None:
    syntax = KNOWN_MARKUPS[family].calls
    assert syntax is not None
    assert calls_text(syntax, CALLS).replace("\uff5c", "|") == text
    assert "TOOL" in call_example(syntax)


def test_a_call_without_a_name_is_text_like_other_calls() -> None:
    syntax = KNOWN_MARKUPS["hermes"].calls
    assert syntax is not None
    written = calls_text(syntax, [("", {"city": "Rome"}), ("g", {})])
    assert written.startswith('<tool_call>\n{"name": "", "arguments": {"city": "Rome"}}\n</tool_call>')
    assert '{"name": "g", "arguments": {}}' in written


def test_a_generic_syntax_is_described_and_used_as_text() -> None:
    """A template whose own syntax cannot be read would ask the model for calls that nothing reads."""
    template = ChatTemplate(OWN_TOOLS)
    described = template.render(HISTORY, [TOOL], syntax=GENERIC_MARKUP.calls)
    assert described == (
        f"system: Be brief.\n\n{chat_history.TOOLS_TEXT}\n"
        '{"name": "weather", "parameters": {"type": "object"}}\n\n'
        f"{chat_history.CALL_TEXT}\n<tool_call>\n"
        '{"name": "TOOL", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>;'
        'user: Weather?;assistant: <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>;'
        "user: <tool_response>\nsunny\n</tool_response>;user: And now?;"
    )
    assert "[own weather" in template.render(HISTORY, syntax=GENERIC_MARKUP.calls)  # no tools: the template's
