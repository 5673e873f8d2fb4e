"""The files of a model folder that can have chat templates, and a file that a user gives instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.engine.text.chat import ChatTemplate
from quire.runtime.engine.text.template_files import read_sources


def write(folder: Path, **files: Any) -> Path:
    """Write files whose names have two underscores for a slash, and one for a dot before the type."""
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_jinja", ".jinja").replace("_json", ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


ONE = {"chat_template": "one"}
TWO = {"chat_template": "two"}


@pytest.mark.parametrize(
    ("files", "default", "tool_use"),
    [
        ({"chat_template_json": ONE}, "one", None),
        ({"processor_config_json": ONE}, "one", None),
        ({"chat_template_json": ONE, "tokenizer_config_json": TWO}, "one", None),
        ({"chat_template_json": ONE, "processor_config_json": TWO}, "one", None),
        ({"chat_template_jinja": "file", "chat_template_json": ONE, "tokenizer_config_json": TWO}, "file", None),
        ({"tokenizer_config_json": {"chat_template": [{"name": "chat", "template": "named"}]}}, "named", None),
        ({"tokenizer_config_json": {"chat_template": {"chat": "map", "default": "one"}}}, "one", None),
        (
            {
                "tokenizer_config_json": {
                    "chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "rag", "template": "rag"}]
                }
            },
            "rag",
            "tools",
        ),
        ({"tokenizer_config_json": {"chat_template": [{"name": "tool_use", "template": "tools"}]}}, "tools", "tools"),
        ({"chat_templates__default_jinja": "folder", "chat_template_json": ONE}, "folder", None),
        ({"additional_chat_templates__rag_jinja": "rag"}, "rag", None),
        ({"additional_chat_templates__tool_use_jinja": "tools", "chat_template_json": ONE}, "one", "tools"),
    ],
)
def test_where_templates_are(tmp_path: Path, files: dict[str, Any], default: str, tool_use: str | None) -> None:
    sources = read_sources(write(tmp_path, **files))
    assert (sources.default, sources.tool_use) == (default, tool_use)


def test_a_given_file_replaces_the_models_templates_and_keeps_its_tokens(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "chat_template": [{"name": "tool_use", "template": "{{"}]}
    write(tmp_path, tokenizer_config_json=config, chat_template_jinja="{% broken", mine_jinja="{{ bos_token }}!")
    template = ChatTemplate.load(tmp_path, tmp_path / "mine.jinja")
    assert template.render([{"role": "user", "content": "x"}]) == "<s>!"


def test_templates_can_use_the_tokens_of_special_tokens_map(tmp_path: Path) -> None:
    write(tmp_path, special_tokens_map_json={"eos_token": {"content": "</s>"}}, chat_template_jinja="{{ eos_token }}")
    assert ChatTemplate.load(tmp_path).render([{"role": "user", "content": "x"}]) == "</s>"


def test_a_given_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chat_template: there is no file .*none\.jinja"):
        read_sources(tmp_path, tmp_path / "none.jinja")
    (tmp_path / "latin.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template: .*latin\.jinja cannot be read"):
        read_sources(tmp_path, tmp_path / "latin.jinja")
    with pytest.raises(ConfigError, match="must be a regular file"):
        read_sources(tmp_path, tmp_path)
