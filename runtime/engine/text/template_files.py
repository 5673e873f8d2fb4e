"""The storage of chat templates: files of a folder, the metadata of a GGUF file, or a file that the user names.

The files and their order are transformers': `chat_template.jinja`, then the legacy files of image processors,
then `tokenizer_config.json`. A folder can have several named templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...common.errors import ConfigError, CorruptCheckpoint, ModelError, UnsupportedModel
from .folder_tokenizer import SETTINGS, TOKEN_ROLES, read_settings, token_text
from .gguf_tokenizer import file_vocabulary, read_chat_templates, read_special_texts
from .text_files import read_file, read_json, text_folder

DEFAULT = "default"  # name of a template
TOOL_USE = "tool_use"  # name of a template
FILE = "chat_template.jinja"
FOLDERS = ("additional_chat_templates", "chat_templates")  # folders of templates, one file per name
LEGACY_FILES = ("chat_template.json", "processor_config.json", SETTINGS)  # the first file with a template counts


@dataclass(frozen=True, slots=True)
class TemplateSources:
    """The sources of a model's chat template, and of a separate template for chats with tools."""

    default: str
    tool_use: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # texts that templates can use, by name
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)  # config of the folder; empty for a GGUF file


def read_sources(path: Path, given: Path | None = None) -> TemplateSources:
    """Return the sources in a folder or GGUF file, or the file `given` instead.

    Raises UnsupportedModel if there is no template, CorruptCheckpoint for files that cannot be read, ConfigError if
    `given` cannot be read.
    """
    metadata = file_vocabulary(path)
    if metadata is not None:
        default, tool_use = read_chat_templates(metadata)
        special_tokens = {} if default is None and given is None else read_special_texts(metadata)
        config: dict[str, Any] = {}
    else:
        folder = text_folder(path)
        config = read_json(folder / SETTINGS)
        templates = {} if given else _templates(folder)
        default = templates.get(DEFAULT)
        tool_use = templates.get(TOOL_USE)
        special_tokens = _special_tokens(read_settings(folder))
    if given is not None:
        default = _given(given)
        tool_use = None
    if default is None:
        raise UnsupportedModel(f"{path} has no chat template; send a plain prompt instead of messages")
    return TemplateSources(default, tool_use, special_tokens, config)


def _templates(folder: Path) -> dict[str, str]:
    """Return a folder's templates by name. If none is named `default`, another one is the default."""
    templates: dict[str, str] = {}
    for name in LEGACY_FILES:
        templates = {**_declared(read_json(folder / name).get("chat_template")), **templates}
    for each in FOLDERS:
        for path in sorted((folder / each).glob("*.jinja")):
            if (source := _file_source(path)) is not None:
                templates[path.stem] = source
    if (source := _file_source(folder / FILE)) is not None:
        templates[DEFAULT] = source
    if templates and DEFAULT not in templates:
        others = [source for name, source in templates.items() if name != TOOL_USE]
        templates[DEFAULT] = (others or list(templates.values()))[0]
    return templates


def _declared(value: object) -> dict[str, str]:
    """Return the templates that a file declares: one text, a list of names and templates, or a map of them."""
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list):
        value = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
    if not isinstance(value, dict):
        return {}
    return {name: source for name, source in value.items() if isinstance(name, str) and isinstance(source, str)}


def _given(path: Path) -> str:
    try:
        source = _file_source(path)
    except ModelError as error:
        raise ConfigError(f"chat_template: {error}") from error
    if source is None:
        raise ConfigError(f"chat_template: there is no file {path}")
    return source


def _file_source(path: Path) -> str | None:
    data = read_file(path)
    try:
        return None if data is None else data.decode()
    except ValueError as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error}") from error


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: token_text(settings.get(name)) for name in TOKEN_ROLES}
    return {name: text for name, text in texts.items() if text is not None}
