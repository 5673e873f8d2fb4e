"""Chat templates: rendered as transformers renders them, sandboxed, every failure typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quire.runtime.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel
from quire.runtime.text.chat import ChatTemplate

CHATML = """{% for message in messages %}
    {{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
MESSAGES = [{"role": "user", "content": "<hi>"}]


def test_blocks_leave_no_whitespace_and_nothing_is_escaped() -> None:
    assert ChatTemplate(CHATML).render(MESSAGES) == ("    <|im_start|>user\n<hi><|im_end|>\n<|im_start|>assistant\n")


def test_special_tokens_and_variables_are_visible() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ tone }}", {"bos_token": "<s>"})
    assert template.render(MESSAGES, tone="!") == "<s><hi>!"


def test_json_keeps_unicode() -> None:
    assert ChatTemplate("{{ tools | tojson }}").render([], tools=[{"名": "<é>"}]) == '[{"名": "<é>"}]'


def test_the_jinja_file_wins_over_the_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "config", "eos_token": {"content": "</s>"}})
    )
    assert ChatTemplate.load(tmp_path).render([]) == "config"
    (tmp_path / "chat_template.jinja").write_text("file{{ eos_token }}")
    assert ChatTemplate.load(tmp_path).render([]) == "file</s>"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path).render([]) == "yes"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no chat template"):
        ChatTemplate.load(tmp_path)


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(CorruptCheckpoint, match="line 2"):
        ChatTemplate("\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__()[0] }}",
        "{{ messages.append(1) }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_what_a_template_may_not_do_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refused"):
        ChatTemplate(source).render(MESSAGES)
