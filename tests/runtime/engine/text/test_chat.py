"""Chat templates: rendered as transformers renders them, in a sandbox, with typed errors."""

from __future__ import annotations

import json
import threading
from os import mkfifo
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.common.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel
from quire.runtime.engine.text import chat, sandbox
from quire.runtime.engine.text.chat import ChatTemplate
from structlog.testing import capture_logs

CHATML = """{% for message in messages %}
    {{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
MESSAGES = [{"role": "user", "content": "<hi>"}]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limit of a template, which a busy machine could reach in any test."""
    monkeypatch.setattr(chat, "RENDER_TIMEOUT_S", 120.0)


def test_blocks_leave_no_whitespace_and_nothing_is_escaped() -> None:
    assert ChatTemplate(CHATML).render(MESSAGES) == ("    <|im_start|>user\n<hi><|im_end|>\n<|im_start|>assistant\n")


def test_special_tokens_are_visible() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ tools }}", {"bos_token": "<s>"})
    assert template.render(MESSAGES) == "<s><hi>None"


def test_json_keeps_unicode() -> None:
    assert ChatTemplate("{{ messages | tojson }}").render([{"名": "<é>"}]) == '[{"名": "<é>"}]'


def test_the_jinja_file_wins_over_the_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "config", "eos_token": {"content": "</s>"}})
    )
    assert ChatTemplate.load(tmp_path).render(MESSAGES) == "config"
    (tmp_path / "chat_template.jinja").write_text("file{{ eos_token }}")
    assert ChatTemplate.load(tmp_path).render(MESSAGES) == "file</s>"


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    mkfifo(tmp_path / "chat_template.jinja")
    with pytest.raises(CorruptCheckpoint, match=r"chat_template\.jinja cannot be read: it must be a regular file"):
        ChatTemplate.load(tmp_path)


def test_the_default_of_several_templates_is_used(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path).render(MESSAGES) == "yes"


def test_the_template_for_tools_of_several_is_used_for_chats_with_tools(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    named = [{"name": "tool_use", "template": "{{ tools[0].function.name }}"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path).render(MESSAGES) == "yes"
    assert ChatTemplate.load(tmp_path).render(MESSAGES, [tool]) == "f"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file {{ tools | length }}")
    assert ChatTemplate.load(tmp_path).render(MESSAGES, [tool]) == "file 1"


def test_a_model_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no chat template"):
        ChatTemplate.load(tmp_path)


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(CorruptCheckpoint, match="line 2"):
        ChatTemplate("\n{% if %}")


@pytest.mark.parametrize("tag", ["{% generation %}", "{%- generation -%}", "{%+ generation +%}", "{%generation%}"])
def test_the_tag_of_training_changes_nothing(tag: str) -> None:
    end = tag.replace("generation", "endgeneration")
    source = "{% for m in messages %}<{{ m.role }}> {% if loop.last %}TAG{{ m.content }}END{% endif %} {% endfor %}"
    messages = [*MESSAGES, {"role": "assistant", "content": "ok"}]
    plain = tag.replace("generation", "if true"), end.replace("endgeneration", "endif")
    expected = ChatTemplate(source.replace("TAG", plain[0]).replace("END", plain[1])).render(messages)
    assert "ok" in expected
    assert ChatTemplate(source.replace("TAG", tag).replace("END", end)).render(messages) == expected


def test_a_variable_of_the_tag_of_training_ends_with_it() -> None:
    block = "{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}"
    source = f"{{% set x = 1 %}}{{% for i in [1, 2] %}}{block}{{% endfor %}}{{{{ x }}}}"
    assert ChatTemplate(source).render(MESSAGES) == "221"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ if .System }}{{ .System }}{{ end }}", "a Go template, as Ollama has, and not Jinja"),
        ("{{- range $i, $_ := .Messages }}{{ .Content }}{{- end }}", "a Go template"),
        ("{{ messages | unheard_of }}", "broken at line 1: No filter named 'unheard_of'"),
        ("{% generation %}{{ x }}", "broken at line 1: Unexpected end of template"),
        ("{% unheard_of %}", "broken at line 1: Encountered unknown tag 'unheard_of'"),
    ],
)
def test_templates_that_cannot_be_used_say_why(source: str, reason: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=reason):
        ChatTemplate(source)


# Limits of templates


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__()[0] }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ ('{0.__class__.__mro__}').format('')[0].x.y }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self._TemplateReference__context.environment.from_string('x') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_forbidden_operations_are_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refused"):
        ChatTemplate(source).render(MESSAGES)


GROW = "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = MORE %}{% endfor %}{{ ns.s }}"
NEST = "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ range(10 ** 9) | list }}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** 9 * 'x' }}",
        "{% set s = ('x' * 10 ** 4) * 10 ** 4 %}",
        "{% set s = 10 ** 4 * ('x' * 10 ** 4) %}",
        "{{ [1] * 10 ** 9 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ ((2 ** 2000) ** 2000) % 7 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%.1000000000f' | format(1.0) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ ('x' | safe).ljust(10 ** 9) }}",
        "{{ 'x'.zfill(width) }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ ['x'] | map('center', 10 ** 9) | list }}",
        "{{ [1] | batch(10 ** 9, 0) | list }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ (1).to_bytes(10 ** 9, 'big') }}",
        "{{ ('a' * 10 ** 6).translate({97: 'b' * 10 ** 6}) }}",
        "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}",
        "{{ ('a' * 10 ** 6) | replace('a', 'b' * 10 ** 6) }}",
        "{{ ('a' * 10 ** 6).join(range(99999) | map('string') | list) }}",
        "{{ range(99999) | join('a' * 10 ** 6) }}",
        GROW.replace("MORE", "ns.s + ns.s"),
        GROW.replace("MORE", "ns.s ~ ns.s"),
        GROW.replace("MORE", "ns.s.replace('x', 'xx')"),
        "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% else %}{{ text }}{% endif %}{% endmacro %}{{ m(40) }}",
        "{% for i in range(99) %}{% set s = 'x' * 10 ** 7 %}{% endfor %}",  # each within the limit
        "{% set ns = namespace(s='x' * 10 ** 6) %}{% for i in range(99) %}{{ ns.s }}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
        NEST + "{{ ns.s }}",
        NEST + "{{ ns.s ~ '' }}",
        NEST + "{{ ns.s | tojson }}",
        NEST + "{{ '%s' % (ns.s,) }}",
        NEST + "{{ '{}'.format(ns.s) }}",
    ],
)
def test_output_beyond_the_size_limit_is_refused_before_it_is_made(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refused"):
        ChatTemplate(source, {"width": 10**9, "text": "x" * 10**5}).render(MESSAGES)


def test_usual_widths_formats_and_sums_are_fine() -> None:
    source = """{{ '%05.1f|%s' % (2.5, 'a') }}|{{ '{:>4}'.format('b') }}|{{ 'c' | center(3) }}|{{ 'in 2024: %s' % 1 }}|
{{- 'x' * 3 + 'y' }}|{{ 2 ** 10 * 3 }}|{{ [1] + [2] }}|{{ 'a\nb' | indent(4) }}|{{ 'a-b'.replace('-', '+') }}|
{{- ['a', 'b'] | join(', ') }}|{{ 1 ~ none ~ [2] }}|{{ 7 % 4 }}|{{ 2.5 * 2 }}|{{ none | default(1700000000, true) }}"""
    expected = "002.5|a|   b| c |in 2024: 1|xxxy|3072|[1, 2]|a\n    b|a+b|a, b|1None[2]|3|5.0|1700000000"
    assert ChatTemplate(source).render(MESSAGES) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% if i in [j] %}{% endif %}{% endfor %}{% endfor %}",
    ],
)
def test_an_endless_template_is_interrupted(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "RENDER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(sandbox, "INTERRUPTS", 5000)  # a busy machine may not run the thread for a while
    before = set(threading.enumerate())
    with capture_logs() as logs, pytest.raises(InvalidRequest, match=r"longer than 0\.05 s"):
        ChatTemplate(source).render(MESSAGES)
    assert set(threading.enumerate()) <= before
    assert logs == []


def test_render_returns_although_the_template_does_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "RENDER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(sandbox, "INTERRUPTS", 1)
    released = threading.Event()
    template = ChatTemplate("{{ wait() }}", {"wait": released.wait})
    with capture_logs() as logs, pytest.raises(InvalidRequest, match="longer than"):
        template.render(MESSAGES)
    released.set()
    assert [entry["event"] for entry in logs] == ["a chat template does not stop; its thread runs on"]


def test_each_run_is_charged_separately() -> None:
    template = ChatTemplate("{{ 'x' * 10 ** 7 }}")
    for _ in range(30):
        assert len(template.render(MESSAGES)) == 10**7


def test_an_error_has_at_most_500_characters() -> None:
    with pytest.raises(InvalidRequest) as error:
        ChatTemplate("{{ raise_exception('x' * 10000) }}").render(MESSAGES)
    assert len(str(error.value)) == 500


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}", "{% if 1 %}" * 500 + "{% endif %}" * 500]
)
def test_a_template_that_nests_too_deeply_cannot_be_compiled(source: str) -> None:
    with pytest.raises(CorruptCheckpoint, match="cannot be compiled"):
        ChatTemplate(source)


def test_a_template_that_is_too_long() -> None:
    with pytest.raises(CorruptCheckpoint, match="1048577 characters; at most 1048576"):
        ChatTemplate("x" * (chat.MAX_SOURCE_CHARACTERS + 1))


# Limits of messages


def nested_lists(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


def nested_maps(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = {"content": value}
    return value


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one map"),
        ("hi", "at least one map"),
        ([["role", "user"]], "at least one map"),
        ([{1: "x"}], "a key that is not text"),
        ([{"content": {2: "x"}}], "a key that is not text"),
        ([{"content": b"x"}], "holds a bytes; texts, numbers"),
        ([{"content": nested_lists(8)}], "nests deeper than 8 levels"),
        ([{"content": nested_lists(10_000)}], "nests deeper than 8 levels"),
        ([nested_maps(9)], "nests deeper than 8 levels"),
        ([nested_maps(10_000)], "nests deeper than 8 levels"),
        ([{"content": [nested_maps(3), [nested_maps(6)]]}], "nests deeper than 8 levels"),
        ([{"role": "user"}] * 4097, "messages: there are 4097; at most 4096 are allowed"),
        ([{"content": ["x"] * 70_000}], "more than 65536 values"),
    ],
)
def test_invalid_messages(messages: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        ChatTemplate(CHATML).render(messages)


def test_values_of_arguments_that_are_text_count() -> None:
    calls = [{"function": {"name": "f", "arguments": json.dumps({"x": [1] * 40_000})}}] * 2
    with pytest.raises(InvalidRequest, match="more than 65536 values"):
        ChatTemplate(CHATML).render([{"role": "assistant", "tool_calls": calls}])


@pytest.mark.parametrize("message", [{"content": nested_lists(7)}, nested_maps(8)], ids=["lists", "maps"])
def test_messages_may_nest_eight_levels_deep(message: dict[str, Any]) -> None:
    assert ChatTemplate("{{ messages | tojson }}").render([message]) == json.dumps([message])


def test_tuples_become_lists() -> None:
    messages = [{"content": ({"type": "text", "text": "a"},)}]
    assert ChatTemplate("{{ messages[0].content + [] }}").render(messages) == "[{'type': 'text', 'text': 'a'}]"


def test_a_template_cannot_change_the_messages() -> None:
    messages = [{"role": "user", "content": "x"}]
    ChatTemplate("{% set m = messages[0] %}{{ m.content }}").render(messages)
    assert messages == [{"role": "user", "content": "x"}]


# Fields that a template keeps

KEEP = "{%% set ns = namespace(kept=[], b='x' * 2000, l=range(300) | list) %%}{%% for i in range(90000) %%}{%% set ns.kept = [ns.kept, %s] %%}{%% endfor %%}"  # noqa: E501


@pytest.mark.parametrize(
    "made",
    [
        "ns.b[1:]",
        "ns.l[:]",
        "ns.b.upper()",
        "ns.b | upper",
        "ns.b | reverse",
        "ns.b | list",
        "ns.b.split('x')",
        "ns.b.encode('utf-32')",
        "ns.l | sort",
        "ns.l | unique | list",
        "range(300) | list",
        "(1,) * 300",
        "ns.l + ns.l",
        "dict(ns.l | map('string') | batch(2))",
        "[" + "1," * 300 + "]",
        "(" + "i," * 300 + ")",
        "{" + "".join(f"{number}: 1," for number in range(300)) + "}",
    ],
)
def test_everything_that_a_template_can_keep_is_charged(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_BYTES_PER_RUN", 1 << 20)
    with pytest.raises(InvalidRequest, match="larger than is allowed"):
        ChatTemplate(KEEP % made).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson(indent=100000) }}",
        "{{ messages | tojson(indent='x' * 100000) }}",
        "{{ ('a\n' * 100000) | indent('y' * 100000) }}",
        "{{ ('a ' * 100000) | wordwrap(1, true, 'y' * 100000) }}",
        "{{ ('a.com ' * 100000) | urlize(target='y' * 100000) }}",
        "{{ [1] | slice(999999) | list | length }}",
        "{{ [1] | batch(999999, 'x') | list | length }}",
        "{{ strftime_now('%Y' * 1000) }}",
        "{{ ((1,) * 9999999) | length }}",
    ],
)
def test_an_argument_does_not_multiply_the_output(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"larger than is allowed|at most 256|indent of 0 to 16"):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ [1, {'a': 2}] | tojson(indent=2) }}", '[\n  1,\n  {\n    "a": 2\n  }\n]'),
        ("{{ messages[0].content[1:-1] }}", "hi"),
        ("{% for a, b in [(1, 2)] %}{{ a ~ b }}{% endfor %}", "12"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ [1, 2, 3] | batch(2) | list }}", "[[1, 2], [3]]"),
        ("{{ [" + "1," * 99 + "] | length }}", "99"),
    ],
)
def test_ordinary_expressions_are_unchanged(source: str, text: str) -> None:
    assert ChatTemplate(source).render(MESSAGES) == text


def test_a_refusal_does_not_keep_what_the_template_made() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        ChatTemplate("{% set kept = 'x' * 1000 %}{{ 1 / 0 }}").render(MESSAGES)
    assert refusal.value.__cause__ is refusal.value.__context__ is None


# Content parts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([[[[[[[["deep"]]]]]]]], "nests deeper than 8 levels"),
        ([{"type": "text", "text": "x"}] * 40_000, "more than 65536 values"),
        ({1: "x"}, "a key that is not text"),
        ([b"bytes"], "holds a bytes"),
    ],
)
def test_hostile_content_parts_are_refused_by_name(content: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ChatTemplate(CHATML).render([{"role": "user", "content": content}])


TOOL = {
    "type": "function",
    "function": {"name": "weather", "strict": True, "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CALLING = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]


def test_a_template_gets_tools_and_variables() -> None:
    template = ChatTemplate("{{ tools | tojson }}{{ enable_thinking }}")
    shown = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    text = json.dumps([{"type": "function", "function": shown}])
    assert template.render(MESSAGES, [TOOL], {"enable_thinking": False}) == f"{text}False"
    with pytest.raises(InvalidRequest, match="must not have messages"):
        template.render(MESSAGES, (), {"messages": []})
    with pytest.raises(InvalidRequest, match="a tool nests deeper than 64 levels"):
        template.render(MESSAGES, [{"type": "function", "function": {"a": nested_lists(64)}}])


def test_the_template_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].function.name }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path)
    assert (template.render(MESSAGES), template.render(MESSAGES, [TOOL])) == ("plain", "weather")
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("file {{ tools[0].function.name }}")
    assert ChatTemplate.load(tmp_path).render(MESSAGES, [TOOL]) == "file weather"


def test_tools_that_a_template_ignores_are_in_the_system_message() -> None:
    every = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    text = ChatTemplate(every).render([{"role": "system", "content": "Be short."}, *MESSAGES], [TOOL])
    assert text.startswith("system: Be short.\n\nYou can call these tools.")
    assert '\n{"name": "weather", "parameters": {"type": "object", "properties": {}}}\n' in text
    assert ChatTemplate(every).render(MESSAGES, [TOOL]).startswith("system: You can call these tools.")
    own = "{% for m in messages %}{{ m.tools }}{% endfor %}"  # Phi-4-mini's form
    assert ChatTemplate(own).render(MESSAGES, [TOOL]).startswith('[{"name": "weather"')


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[1].tool_calls[0].function.name }}{{ messages[1].tool_calls[0].function.arguments | tojson }}",
        "{{ messages[1].tool_calls[0].function.name + messages[1].tool_calls[0].function.arguments }}",
    ],
)
@pytest.mark.parametrize("arguments", ['{"city":"Rome"}', {"city": "Rome"}])
def test_arguments_are_as_the_template_reads_them(source: str, arguments: Any) -> None:
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    messages = [CALLING[0], {**CALLING[1], "tool_calls": [call]}]
    assert ChatTemplate(source).render(messages) == 'weather{"city": "Rome"}'


@pytest.mark.parametrize("arguments", ["[1]", "no JSON", "[" * 100_000])
def test_arguments_must_be_an_object(arguments: str) -> None:
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    with pytest.raises(InvalidRequest, match="messages: the arguments of a call of 'weather'"):
        ChatTemplate(CHATML).render([CALLING[0], {**CALLING[1], "tool_calls": [call]}])
    for calls in ("f", [1], [{"function": {"name": 1}}]):
        with pytest.raises(InvalidRequest, match="messages: tool_calls must be a list"):
            ChatTemplate(CHATML).render([{**CALLING[1], "tool_calls": calls}])


CONTENTS = (
    "{% for m in messages %}<{{ m.role }}>CONTENT{% for call in m.tool_calls %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)
READ_PARTS = (  # forms of Qwen3-VL and Gemma 3
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}"
)
ONLY_PARTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"  # SmolVLM's form


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{{ '' + m.content }}", "weather"),
        ("{{ m.content }}", "weather"),
        (READ_PARTS, "weather"),
        (ONLY_PARTS, "weather"),
        ("{% if m.content is none %}no text, {% else %}{{ m.content }}{% endif %}", "no text, weather"),
        ("{{ m.content or '' }}", "weather"),
    ],
)
def test_a_message_with_calls_may_have_no_content(content: str, text: str) -> None:
    template = ChatTemplate(CONTENTS.replace("CONTENT", content))
    assert template.render(CALLING) == f'<user>?<assistant>{text}{{"city": "Rome"}}'
    without = {key: value for key, value in CALLING[1].items() if key != "content"}
    assert template.render([CALLING[0], without]) == f'<user>?<assistant>{text}{{"city": "Rome"}}'


def test_messages_may_be_rendered_unchanged() -> None:
    template = ChatTemplate("{{ messages[0].content[0].text }}{{ add_generation_prompt }}{{ x }}")
    messages = [{"role": "query", "content": [{"type": "text", "text": "a"}]}]
    assert template.render_unchanged(messages, {"x": 3}) == "aFalse3"
    assert template.render_unchanged(messages, {"add_generation_prompt": True}) == "aTrue"


def test_all_special_tokens_are_visible(tmp_path: Path) -> None:
    names = ("cls_token", "sep_token", "mask_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: f"<{name}>" for name in names}))
    (tmp_path / "chat_template.jinja").write_text("{{ cls_token }}{{ sep_token }}{{ mask_token }}")
    assert ChatTemplate.load(tmp_path).render(MESSAGES) == "<cls_token><sep_token><mask_token>"


def test_reasoning_has_every_name_that_templates_read() -> None:
    template = ChatTemplate("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}")
    assert template.render([{"role": "assistant", "content": "", "reasoning": "So."}]) == "So.So."
