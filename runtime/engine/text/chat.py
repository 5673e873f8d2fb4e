"""Chat messages to one prompt, by the template of the model.

A template is untrusted code and messages are untrusted data: templates run only in the sandbox of `sandbox.py`, on
copies of the messages that are limited in size and depth. Every failure is a typed error.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError

from ...common.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel
from .gguf_tokenizer import file_vocabulary, read_chat_templates
from .sandbox import Sandbox
from .text_files import read_file, read_json, text_folder

MAX_MESSAGES = 4096
MAX_VALUES = 1 << 16  # texts, numbers, lists and maps in all messages together
MAX_DEPTH = 8  # nested lists and maps in one message
MAX_SCHEMA_DEPTH = 64  # in a tool, in the arguments of a call and in a variable
MESSAGE = "messages: a message"
MAX_SOURCE_CHARACTERS = 1 << 20
MAX_ERROR_CHARACTERS = 500  # a template's error may quote the messages
MAX_INDENT = 16  # of JSON
MAX_DATE_CHARACTERS = 256
RENDER_TIMEOUT_S = 2.0


# Names of variables that a request cannot set.
RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # of a message, in different families
PROBE = "quire_probe"
PROBE_TOOL = {"type": "function", "function": {"name": PROBE, "description": PROBE, "parameters": {"type": "object"}}}
TOOLS_TEXT = "You can call these tools. Each line has a tool's name, and the JSON schema of its arguments:"

ToolsPlace = Literal["variable", "message", "text"]


class ChatTemplate:
    """A compiled chat template, which can use `variables` (bos_token, eos_token, …) by name.

    `tool_source` is that of the template for chats with tools, if it is another one. Raises CorruptCheckpoint if a
    source is not a template.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        *,
        tool_source: str | None = None,
        tokenizer_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.source = source + (tool_source or "")
        self.tokenizer_config = tokenizer_config or {}  # of the folder; empty for a GGUF file
        self._variables = {"tools": None, "add_generation_prompt": True, **(variables or {})}
        self._sandbox = _sandbox()
        self._template = self._compiled(source)
        self._tool_template = self._template if tool_source is None else self._compiled(tool_source)

    def _compiled(self, source: str) -> Template:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise CorruptCheckpoint(f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS}")
        try:
            return self._sandbox.from_string(source)
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
        config: dict[str, Any] = {}
        metadata = file_vocabulary(Path(path))
        if metadata is not None:
            source, tool_source, special_tokens = read_chat_templates(metadata)
        else:
            folder = text_folder(Path(path))
            config = read_json(folder / "tokenizer_config.json")
            source = _file_source(folder / "chat_template.jinja") or _config_source(config, "default")
            tool_file = folder / "additional_chat_templates" / "tool_use.jinja"
            tool_source = _file_source(tool_file) or _config_source(config, "tool_use")
            special_tokens = _special_tokens(config)
        if source is None:
            raise UnsupportedModel(f"{path} has no chat template; send a plain prompt instead of messages")
        return cls(source, special_tokens, tool_source=tool_source, tokenizer_config=config)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text. It includes special tokens, so encode it with `add_special_tokens=False`.

        `tools` are functions in OpenAI's form; `variables` are for the template, such as `enable_thinking`. It may take
        up to RENDER_TIMEOUT_S: call it in a thread. Messages are maps with text keys, of texts, numbers, booleans,
        None, lists and maps. Raises InvalidRequest if they are not, and if the template refuses them, exceeds its
        limits or does not end.
        """
        left = [MAX_VALUES]
        given = {
            key: _copy(value, MAX_SCHEMA_DEPTH, left, "chat_template_kwargs: a variable")
            for key, value in (variables or {}).items()
        }
        if refused := sorted(RESERVED & given.keys()):
            raise InvalidRequest(f"chat_template_kwargs must not have {refused[0]}")
        chat = _checked_copy(messages, left)
        if any(each.get("tool_calls") for each in chat):
            chat = [_with_arguments(each, as_text=self._takes_argument_text, left=left) for each in chat]
            if not self._takes_null:
                chat = [_without_null(each) for each in chat]
        chat = [_with_reasoning(each) for each in chat]
        offered = [_offered(_copy(each, MAX_SCHEMA_DEPTH, left, "tools: a tool")) for each in tools]
        if offered and self._tools_place != "variable":
            chat = _with_tools_in_system(chat, offered, self._tools_place)
        if self._takes_parts:
            chat = [_with_parts(each) for each in chat]
        return self._run(chat, offered or None, given)

    def render_unchanged(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return the prompt text of messages as they are, as sentence-transformers renders them.

        No reply follows unless `add_generation_prompt` is true in `variables`. Raises InvalidRequest.
        """
        chat = _checked_copy(messages, [MAX_VALUES])
        return self._run(chat, None, {"add_generation_prompt": False, **variables})

    def uses(self, variable: str) -> bool:
        """Return whether the template mentions a variable of this name."""
        return variable in self.source

    def _run(self, messages: list[Any], tools: list[Any] | None, given: Mapping[str, Any]) -> str:
        variables = {**self._variables, **given, "messages": messages, "tools": tools}
        template = self._template if tools is None else self._tool_template
        try:
            return self._sandbox.run(lambda: template.render(variables), RENDER_TIMEOUT_S)
        except TimeoutError:
            reason = f"the chat template took longer than {RENDER_TIMEOUT_S} s for these messages"
        # A template can raise whatever its expressions raise: TypeError, ZeroDivisionError, SecurityError, …
        except Exception as error:
            reason = f"the chat template refused these messages: {error}"[:MAX_ERROR_CHARACTERS]
        raise InvalidRequest(reason)  # not within `except`: the other error's traceback holds what the template made

    def _shows(self, needle: str, messages: list[Any], tools: list[Any] | None) -> bool:
        """Return whether the prompt of a trial chat contains `needle`."""
        try:
            return needle in self._run(messages, tools, {})
        except InvalidRequest:
            return False

    @cached_property
    def _tools_place(self) -> ToolsPlace:
        """Where the template reads tools: a variable, a system message's `tools`, or only as a message's text."""
        user = {"role": "user", "content": "a"}
        if self._shows(PROBE, [user], [PROBE_TOOL]):
            return "variable"
        system = {"role": "system", "content": "a", "tools": PROBE}
        return "message" if self._shows(PROBE, [system, user], None) else "text"

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template reads texts only in lists of parts, as those of some models with images do."""
        text = {"role": "user", "content": PROBE}
        shows = partial(self._shows, PROBE, tools=None)
        return self.uses("type") and not shows([text]) and shows([_with_parts(text)])

    @cached_property
    def _takes_argument_text(self) -> bool:
        """Whether the template joins the arguments of a call to texts, instead of writing a map as JSON."""

        def shows(arguments: object) -> bool:
            return self._shows(f'"{PROBE}"', _calling_chat("", arguments), None)

        return not shows({PROBE: "a"}) and shows(json.dumps({PROBE: "a"}))

    @cached_property
    def _takes_null(self) -> bool:
        """Whether the template knows that a message with calls may have null instead of a text.

        Others fail where they read the content as a text or a list, or write the word None.
        """
        arguments: Any = json.dumps({PROBE: "a"}) if self._takes_argument_text else {PROBE: "a"}
        empty, null = _calling_chat("", arguments), _calling_chat(None, arguments)
        if self._takes_parts:
            empty = [_with_parts(each) for each in empty]
            null = [_with_parts(each) for each in null]
        try:
            with_text = self._run(empty, None, {})
        except InvalidRequest:
            return True  # this says nothing of null
        try:
            return self._run(null, None, {}).count("None") <= with_text.count("None")
        except InvalidRequest:
            return False


def _calling_chat(content: str | None, arguments: object) -> list[Any]:
    """Return a trial chat whose last message has a call."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": content, "tool_calls": [call]}]


def _without_null(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is an empty text if it was null beside calls."""
    return {**message, "content": ""} if message.get("tool_calls") and message["content"] is None else message


def _with_arguments(message: dict[str, Any], *, as_text: bool, left: list[int]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as the template reads them. Raises InvalidRequest."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list) or not all(_is_call(each) for each in calls):
        raise InvalidRequest(
            'messages: tool_calls must be a list such as [{"id": "…", "type": "function", "function": {"name": "…", '
            '"arguments": "{…}"}}]'
        )
    copies = []
    for call in calls:
        arguments = call["function"].get("arguments") or "{}"
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        if not isinstance(arguments, dict):
            raise InvalidRequest(
                f"messages: the arguments of a call of {call['function']['name']!r} are not a JSON object"
            )
        arguments = (
            json.dumps(arguments, ensure_ascii=False) if as_text else _copy(arguments, MAX_SCHEMA_DEPTH, left, "a call")
        )
        copies.append({**call, "type": "function", "function": {**call["function"], "arguments": arguments}})
    return {**message, "content": message.get("content"), "tool_calls": copies}


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _parsed(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message that has its reasoning under every name that templates read."""
    given = next((message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)), None)
    return message if given is None else {**dict.fromkeys(REASONING_KEYS, given), **message}


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of parts."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _offered(tool: Any) -> dict[str, Any]:
    """Return a tool as models see it: without `strict`, which is about the grammar."""
    function = {key: value for key, value in tool["function"].items() if key != "strict"}
    return {"type": "function", "function": function}


def _with_tools_in_system(chat: list[Any], tools: list[Any], place: ToolsPlace) -> list[Any]:
    """Return the chat with its tools in the system message, which it may not have yet."""
    has_system = chat[0].get("role") == "system"
    system = chat[0] if has_system else {"role": "system", "content": ""}
    functions = [tool["function"] for tool in tools]
    if place == "message":
        system = {**system, "tools": json.dumps(functions, ensure_ascii=False)}
    else:
        lines = [TOOLS_TEXT, *(json.dumps(each, ensure_ascii=False) for each in functions)]
        system = {**system, "content": f"{system['content']}\n\n{chr(10).join(lines)}".strip()}
    return [system, *chat[has_system:]]


def _checked_copy(messages: Sequence[Mapping[str, Any]], left: list[int]) -> list[Any]:
    """Return a copy with lists instead of tuples, as templates expect. Raises InvalidRequest.

    It has at most `left` values, which are then fewer.
    """
    if (
        not isinstance(messages, list | tuple)
        or not messages
        or not all(isinstance(each, Mapping) for each in messages)
    ):
        raise InvalidRequest('messages must be a list of at least one map, such as {"role": "user", "content": "…"}')
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages: there are {len(messages)}; at most {MAX_MESSAGES} are allowed")
    return [_copy(each, MAX_DEPTH, left, MESSAGE) for each in messages]


def _copy(value: Any, depth: int, left: list[int], what: str) -> Any:
    """Return a copy of what nests up to `depth` levels. Raises InvalidRequest."""
    left[0] -= 1
    if left[0] < 0:
        raise InvalidRequest(f"messages hold more than {MAX_VALUES} values")
    if value is None or isinstance(value, str | int | float):
        return value
    if depth == 0:
        levels = MAX_DEPTH if what == MESSAGE else MAX_SCHEMA_DEPTH
        raise InvalidRequest(f"{what} nests deeper than {levels} levels")
    if isinstance(value, list | tuple):
        return [_copy(item, depth - 1, left, what) for item in value]
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{what} holds a {type(value).__name__}; texts, numbers, lists and maps are allowed")
    if not all(isinstance(key, str) for key in value):
        raise InvalidRequest(f"{what} has a key that is not text")
    return {key: _copy(item, depth - 1, left, what) for key, item in value.items()}


def _sandbox() -> Sandbox:
    """Return a sandbox with the functions that transformers offers to templates."""

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        form: dict[str, Any] = {"ensure_ascii": bool(ensure_ascii), "sort_keys": bool(sort_keys)}
        form["separators"] = None if separators is None else tuple(map(str, separators))
        if indent is None:
            return json.dumps(value, **form)
        if not isinstance(indent, int) or not 0 <= indent <= MAX_INDENT:
            raise TemplateError(f"tojson takes an indent of 0 to {MAX_INDENT}")
        return sandbox.concat(json.JSONEncoder(indent=indent, **form).iterencode(value))

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


def _file_source(path: Path) -> str | None:
    data = read_file(path)
    try:
        return None if data is None else data.decode()
    except ValueError as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error}") from error


def _config_source(config: Mapping[str, Any], name: str) -> str | None:
    """Return the template of this name of a list; a single one is the `default`."""
    declared = config.get("chat_template")
    if isinstance(declared, list):
        named = {entry.get("name"): entry.get("template") for entry in declared if isinstance(entry, dict)}
        declared = named.get(name)
    elif name != "default":
        return None
    return declared if isinstance(declared, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        declared = config.get(name)
        text = declared.get("content") if isinstance(declared, dict) else declared
        if isinstance(text, str):
            tokens[name] = text
    return tokens
