"""Chat messages to one prompt, by the template of the model.

A template is untrusted code and messages are untrusted data: templates run only in the sandbox of `sandbox.py`, on
copies of the messages that are limited in size and depth. Every failure is a typed error.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError

from ...common.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel
from .gguf_tokenizer import file_vocabulary, read_chat_template
from .sandbox import Sandbox
from .tokenizer import text_folder

MAX_MESSAGES = 4096
MAX_VALUES = 1 << 16  # texts, numbers, lists and maps in all messages together
MAX_DEPTH = 8  # nested lists and maps in one message
MAX_SOURCE_CHARACTERS = 1 << 20
MAX_ERROR_CHARACTERS = 500  # a template's error may quote the messages
MAX_INDENT = 16  # of JSON
MAX_DATE_CHARACTERS = 256
RENDER_TIMEOUT_S = 2.0


class ChatTemplate:
    """A compiled chat template, which can use `variables` (bos_token, eos_token, …) by name.

    Raises CorruptCheckpoint if the source is not a template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self._variables = {"tools": None, "add_generation_prompt": True, **(variables or {})}
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise CorruptCheckpoint(f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS}")
        self._sandbox = _sandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise CorruptCheckpoint(f"the chat template is broken at line {error.lineno}: {error.message}") from error
        # The compilers of jinja2 and Python raise a dozen other types for deep nesting.
        except Exception as error:
            raise CorruptCheckpoint(f"the chat template cannot be compiled: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> ChatTemplate:
        """Read a folder's chat_template.jinja or tokenizer_config.json, or the metadata of a GGUF file.

        Raises UnsupportedModel if there is no template.
        """
        metadata = file_vocabulary(Path(path))
        if metadata is not None:
            source, special_tokens = read_chat_template(metadata)
        else:
            folder = text_folder(Path(path))
            config = _tokenizer_config(folder)
            source, special_tokens = _file_source(folder) or _config_source(config), _special_tokens(config)
        if source is None:
            raise UnsupportedModel(f"{path} has no chat template; send a plain prompt instead of messages")
        return cls(source, special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt text. It includes special tokens, so encode it with `add_special_tokens=False`.

        It may take up to RENDER_TIMEOUT_S: call it in a thread. Messages are maps with text keys, of texts, numbers,
        booleans, None, lists and maps. Raises InvalidRequest if they are not, and if the template refuses them, exceeds
        its limits or does not end.
        """
        variables = {**self._variables, "messages": _checked_copy(messages)}
        try:
            return self._sandbox.run(lambda: self._template.render(variables), RENDER_TIMEOUT_S)
        except TimeoutError:
            reason = f"the chat template took longer than {RENDER_TIMEOUT_S} s for these messages"
        # A template can raise whatever its expressions raise: TypeError, ZeroDivisionError, SecurityError, …
        except Exception as error:
            reason = f"the chat template refused these messages: {error}"[:MAX_ERROR_CHARACTERS]
        raise InvalidRequest(reason)  # not within `except`: the other error's traceback holds what the template made


def _checked_copy(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return a copy with lists instead of tuples, as templates expect. Raises InvalidRequest."""
    if (
        not isinstance(messages, list | tuple)
        or not messages
        or not all(isinstance(each, Mapping) for each in messages)
    ):
        raise InvalidRequest('messages must be a list of at least one map, such as {"role": "user", "content": "…"}')
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"{len(messages)} messages; at most {MAX_MESSAGES}")
    left = [MAX_VALUES]
    return [_copy(each, MAX_DEPTH, left) for each in messages]


def _copy(value: Any, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if left[0] < 0:
        raise InvalidRequest(f"messages hold more than {MAX_VALUES} values")
    if value is None or isinstance(value, str | int | float):
        return value
    if depth == 0:
        raise InvalidRequest(f"a message nests deeper than {MAX_DEPTH} levels")
    if isinstance(value, list | tuple):
        return [_copy(item, depth - 1, left) for item in value]
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"a message holds a {type(value).__name__}; texts, numbers, lists and maps are allowed")
    if not all(isinstance(key, str) for key in value):
        raise InvalidRequest("a message has a key that is not text")
    return {key: _copy(item, depth - 1, left) for key, item in value.items()}


def _sandbox() -> Sandbox:
    """Return a sandbox with the functions that transformers offers to templates."""

    def to_json(value: Any, indent: int | None = None) -> str:
        if indent is None:
            return json.dumps(value, ensure_ascii=False)
        if not isinstance(indent, int) or not 0 <= indent <= MAX_INDENT:
            raise TemplateError(f"tojson takes an indent of 0 to {MAX_INDENT}")
        return sandbox.concat(json.JSONEncoder(ensure_ascii=False, indent=indent).iterencode(value))

    sandbox = Sandbox(filters={"tojson": to_json})
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    return sandbox


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_DATE_CHARACTERS:
        raise TemplateError(f"strftime_now takes a pattern of at most {MAX_DATE_CHARACTERS} characters")
    return datetime.datetime.now().strftime(pattern)


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
    """Return the only template, or the one named `default` of a list."""
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
