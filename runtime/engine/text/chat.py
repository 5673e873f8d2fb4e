"""Chat messages to one prompt, by the template the model's authors wrote.

It must not know models by name. One invariant: a template is foreign code and messages are foreign data, so it runs
only in the sandbox of `sandbox.py`, on copies of bounded size and depth; whatever goes wrong in it is a typed error.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError

from ...common.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel
from .sandbox import Sandbox

MAX_MESSAGES = 4096
MAX_VALUES = 1 << 16  # in all messages together: texts, numbers, lists, maps
MAX_DEPTH = 8  # of lists and maps in a message
MAX_SOURCE_CHARACTERS = 1 << 20
MAX_ERROR_CHARACTERS = 500  # a template's words may quote what was sent
RENDER_TIMEOUT_S = 2.0


class ChatTemplate:
    """A compiled chat template. `special_tokens` (bos_token, eos_token …) are visible to it by name.

    Raises CorruptCheckpoint when the source is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._special_tokens = dict(special_tokens or {})
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise CorruptCheckpoint(f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS}")
        self._sandbox = _sandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise CorruptCheckpoint(f"the chat template is broken at line {error.lineno}: {error.message}") from error
        # The compilers of jinja2 and Python refuse by a dozen types what is nested too deeply.
        except Exception as error:
            raise CorruptCheckpoint(f"the chat template cannot be compiled: {error}") from error

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

        Takes as long as the template, at most RENDER_TIMEOUT_S: call it by `asyncio.to_thread`. Messages are maps with
        text keys, of texts, numbers, booleans, None, lists and maps. Raises InvalidRequest when they are not, or when
        the template refuses them, makes too much of them, or does not end.
        """
        scope = {
            **self._special_tokens,
            **variables,
            "messages": _checked("messages", messages),
            "tools": None if tools is None else _checked("tools", tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._sandbox.run(lambda: self._template.render(scope), RENDER_TIMEOUT_S)
        except TimeoutError:
            raise InvalidRequest(
                f"the chat template took longer than {RENDER_TIMEOUT_S} s for these messages"
            ) from None
        # A template may raise anything its expressions can: TypeError, ZeroDivisionError, SecurityError …
        except Exception as error:
            reason = f"the chat template refused these messages: {error}"[:MAX_ERROR_CHARACTERS]
            raise InvalidRequest(reason) from error


def _checked(what: str, maps: Sequence[Mapping[str, Any]]) -> list[Any]:
    """A copy with lists where tuples were, as templates expect them. Raises InvalidRequest."""
    if not isinstance(maps, list | tuple) or not maps or not all(isinstance(each, Mapping) for each in maps):
        raise InvalidRequest(f'{what} must be a list of at least one map, such as {{"role": "user", "content": "…"}}')
    if len(maps) > MAX_MESSAGES:
        raise InvalidRequest(f"{len(maps)} {what}; at most {MAX_MESSAGES}")
    left = [MAX_VALUES]
    return [_copy(each, MAX_DEPTH, left) for each in maps]


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
    """With the helpers that templates are written for, transformers'."""
    sandbox = Sandbox(filters={"tojson": _to_json})
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    return sandbox


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
