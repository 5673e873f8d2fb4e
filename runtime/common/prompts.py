"""The forms of prompts that users may pass to `LLM` and to the clients: token ids, lists, a chat's messages and tools.

All functions but `shown` and `image_digest` raise InvalidRequest, which names the fault and what is allowed.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from hashlib import sha256
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import InvalidRequest

UNORDERED_OR_TEXT = (str, bytes, bytearray, Mapping, Set)
TOOL_EXAMPLE = '{"type": "function", "function": {"name": "…", "parameters": {…}}}'
OTHER_SCHEMA = "input_schema"  # name of a tool's parameters in another API
TOOL_PLACE: Callable[[int], str] = "tools[{}]".format  # the name of a tool in errors, by its index
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
EXAMPLE_MESSAGE = '{"role": "user", "content": "Hello"}'
PLACE: Callable[[int], str] = "messages[{}]".format  # name of a message in errors, from its index
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
IMAGE = "image"  # type of a part of a message
REFUSAL = "refusal"  # type of a part of an assistant's message
IMAGE_ROLES = ("user", "tool")  # roles of messages that may have images


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image in a prompt of token ids, as the reference processor prepares it for the model's vision tower.

    It is decoded, resized and cropped or padded. The tower rescales and normalizes it. A processor that splits an image
    into tiles makes one of these per tile.
    """

    position: int  # position in the prompt of the first placeholder token
    tokens: int  # consecutive placeholder tokens
    pixels: npt.NDArray[np.uint8]  # [height, width, 3]
    digest: bytes  # see `image_digest`


def image_digest(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return the sha256 of the shape and the pixels of an image [height, width, 3]."""
    return sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()


def as_token_ids(prompt: object) -> tuple[int, ...]:
    """Return the token ids of any ordered collection of integers, numpy's included."""
    with contextlib.suppress(TypeError):
        if not isinstance(prompt, UNORDERED_OR_TEXT):
            tokens: tuple[Any, ...] = tuple(prompt)  # type: ignore[arg-type]  # TypeError is suppressed
            if not any(isinstance(token, bool) for token in tokens):
                return tuple(map(operator.index, tokens))
    raise InvalidRequest(f"a prompt is text or a sequence of token ids, not {shown(prompt)}")


def as_prompts(prompts: object) -> list[str | tuple[int, ...]]:
    """Return a list of prompts; a single text or a single list of token ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, UNORDERED_OR_TEXT) or not isinstance(prompts, Iterable):
        raise InvalidRequest(f"prompts are text, token ids or a list of those, not {shown(prompts)}")
    items: list[object] = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):  # numpy's integers included
        return [as_token_ids(items)]
    return [item if isinstance(item, str) else as_token_ids(item) for item in items]


def as_documents(query: object, documents: object) -> tuple[str, ...]:
    """Return the documents to score with a query: any ordered collection of texts."""
    if isinstance(query, str) and isinstance(documents, Iterable) and not isinstance(documents, UNORDERED_OR_TEXT):
        texts = tuple(documents)
        if all(isinstance(each, str) for each in texts):
            return texts
    raise InvalidRequest(f"score takes a text and a list of texts, not {shown(query)} and {shown(documents)}")


def chat_messages(messages: object, place: Callable[[int], str] = PLACE) -> tuple[dict[str, Any], ...]:
    """Return the messages of a chat as maps whose `content` is text; OpenAI's text parts are joined with line breaks.

    The content of a message with images stays a list of parts, `{"type": "text", "text": …}` and `{"type": "image"}`.
    A message needs a role, one of ROLES. Content that is missing or None becomes an empty text, or None
    if the message has `tool_calls`. The deprecated role `function` and the field `function_call` get their new names.
    Other keys are for the model's template.
    """
    items = (
        tuple(messages) if isinstance(messages, Iterable) and not isinstance(messages, str | bytes | Mapping) else ()
    )
    if not items or not all(isinstance(item, Mapping) for item in items):
        raise InvalidRequest(
            f"messages must be a list of at least one map such as {EXAMPLE_MESSAGE}, not {shown(messages)}"
        )
    checked = []
    num_calls = 0  # calls in the field `function_call`, which have no ids
    for index, item in enumerate(items):
        num_calls += item.get("function_call") is not None
        checked.append(_message(dict(item), place(index), f"call{num_calls:05}"))
    return tuple(checked)


def chat_tools(tools: object, place: Callable[[int], str] = TOOL_PLACE) -> tuple[dict[str, Any], ...]:
    """Return tools in OpenAI's form, `{"type": "function", "function": {name, description, parameters, strict}}`.

    A tool may also be flat, `{"type": "function", "name": …}`, and may leave out its type.
    """
    if not isinstance(tools, list | tuple) or not all(isinstance(each, Mapping) for each in tools):
        raise InvalidRequest(f"tools must be a list such as [{TOOL_EXAMPLE}], not {shown(tools)}")
    checked = tuple(_tool(each, place(index)) for index, each in enumerate(tools))
    counts = Counter(each["function"]["name"] for each in checked)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise InvalidRequest(f"tools: the name {twice[0]!r} occurs twice")
    return checked


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = tool.get("function")
    if given is None and "name" in tool and OTHER_SCHEMA not in tool:  # flat
        given = {key: value for key, value in tool.items() if key != "type"}
    if tool.get("type") not in (None, "function") or not isinstance(given, Mapping):
        raise InvalidRequest(f"{where} must be a function such as {TOOL_EXAMPLE}, not {shown(tool)}")
    function = {key: value for key, value in given.items() if value is not None}
    if not isinstance(name := function.get("name"), str) or not TOOL_NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}: name must be 1 to 128 letters, digits and characters of _-.:/, not {shown(name)}"
        )
    parameters = function.get("parameters", {})
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InvalidRequest(f"{where}: parameters must be the JSON schema of an object, not {shown(parameters)}")
    for key, kind, allowed in (("description", str, "text"), ("strict", bool, "true or false")):
        if not isinstance(function.get(key, kind()), kind):
            raise InvalidRequest(f"{where}: {key} must be {allowed}, not {shown(function[key])}")
    return {"type": "function", "function": function}


def shown(value: object) -> str:
    """Return the value's `repr`, cut to 80 characters."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} that nests too deeply"
    return text if len(text) <= 80 else f"{text[:80]}…"


def _message(message: dict[str, Any], where: str, called: str) -> dict[str, Any]:
    """Return a message without the fields that serializers write for absent values. `called` is the id of its call."""
    content = message.get("content")
    message = {key: value for key, value in message.items() if value is not None and (key, value) != ("tool_calls", [])}
    if "role" not in message:
        raise InvalidRequest(f"{where} has no 'role'; a message is a map such as {EXAMPLE_MESSAGE}")
    if message["role"] not in ROLES:
        raise InvalidRequest(f"{where}: role must be one of {', '.join(ROLES)}, not {shown(message['role'])}")
    message = _with_new_names(message, where, called)
    if isinstance(content, list | tuple):
        message["content"] = _content(content, message["role"], where)
    elif content is None and message["role"] == "assistant":
        refusal = message.get(REFUSAL)
        message["content"] = refusal if isinstance(refusal, str) else None if "tool_calls" in message else ""
    elif content is None:
        message["content"] = ""
    elif not isinstance(content, str):
        raise InvalidRequest(f"{where}: content must be text or a list of text parts, not {shown(content)}")
    return message


def _with_new_names(message: dict[str, Any], where: str, called: str) -> dict[str, Any]:
    """Return a message with the names that replaced `developer`, `function` and `function_call` in OpenAI's API."""
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    if message["role"] == "function":
        message = {"tool_call_id": called, **message}
    if role != "assistant" or "function_call" not in message:
        return {**message, "role": role}
    call = message.pop("function_call")
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise InvalidRequest(
            f'{where}: function_call must be a map such as {{"name": "…", "arguments": "{{…}}"}}, not {shown(call)}'
        )
    calls = message.get("tool_calls", [{"id": called, "type": "function", "function": dict(call)}])
    return {**message, "role": role, "tool_calls": calls}


def _content(parts: Iterable[object], role: str, where: str) -> str | list[dict[str, Any]]:
    """Return the text of text parts, or the parts if there are images among them."""
    checked = [_part(part, role, f"{where}: content[{index}]") for index, part in enumerate(parts)]
    if all(part["type"] == "text" for part in checked):
        return "\n".join(part["text"] for part in checked)
    if role not in IMAGE_ROLES:
        raise InvalidRequest(
            f"{where}: messages of the roles {' and '.join(IMAGE_ROLES)} may have images, not {role!r}"
        )
    return checked


def _part(part: object, role: str, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise InvalidRequest(f'{where} must be a part such as {{"type": "text", "text": "Hello"}}, not {shown(part)}')
    if kind == IMAGE:
        return {"type": IMAGE}
    if kind not in (("text", REFUSAL) if role == "assistant" else ("text",)):
        raise InvalidRequest(f"{where} is a part of type {shown(kind)}, which is not supported; text and images are")
    if not isinstance(part.get(kind), str):
        raise InvalidRequest(f"{where}: {kind} must be text, not {shown(part.get(kind))}")
    return {"type": "text", "text": part[kind]}
