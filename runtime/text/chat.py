"""Chat messages to one prompt, by the template the model's authors wrote.

It must not know models by name. One invariant: a template is foreign code, so it runs only in jinja2's immutable
sandbox, and whatever goes wrong in it is a typed error.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel


class ChatTemplate:
    """A compiled chat template. `special_tokens` (bos_token, eos_token …) are visible to it by name.

    Raises CorruptCheckpoint when the source is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise CorruptCheckpoint(f"the chat template is broken at line {error.lineno}: {error.message}") from error

    @classmethod
    def load(cls, folder: str | Path) -> ChatTemplate:
        """From chat_template.jinja or tokenizer_config.json. Raises UnsupportedModel when the model has no template."""
        config = _tokenizer_config(Path(folder))
        source = _file_source(Path(folder)) or _config_source(config)
        if source is None:
            raise UnsupportedModel(f"{folder} has no chat template; send a plain prompt instead of messages")
        return cls(source, _special_tokens(config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text; it holds its special tokens, so encode it with `add_special_tokens=False`.

        Raises InvalidRequest when the template refuses the messages.
        """
        scope = {
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(scope)
        # A template may raise anything its expressions can: TypeError, ZeroDivisionError, SecurityError …
        except Exception as error:
            raise InvalidRequest(f"the chat template refused these messages: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment templates are written for: transformers' whitespace rules, helpers and filters."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} is not readable JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _file_source(folder: Path) -> str | None:
    try:
        return (folder / "chat_template.jinja").read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{folder / 'chat_template.jinja'} cannot be read: {error}") from error


def _config_source(config: Mapping[str, Any]) -> str | None:
    """One template, or a list of named ones of which `default` is for chat."""
    declared = config.get("chat_template")
    if isinstance(declared, list):
        named = {entry.get("name"): entry.get("template") for entry in declared if isinstance(entry, dict)}
        declared = named.get("default")
    return declared if isinstance(declared, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        declared = config.get(name)
        text = declared.get("content") if isinstance(declared, dict) else declared
        if isinstance(text, str):
            tokens[name] = text
    return tokens
