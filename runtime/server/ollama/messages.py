"""The messages of Ollama's API as the messages of a chat in OpenAI's form. Fields that a message lacks are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...common.prompts import shown
from ..http.errors import BadRequest

ROLES_HERE = ("system", "user", "assistant", "tool")


def chat_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Return the messages of a body. Calls get ids, which results find by the name of their tool. Raises BadRequest."""
    chat: list[dict[str, Any]] = []
    pending: list[tuple[str, str]] = []  # ids and names of calls without a result
    num_calls = 0
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise BadRequest(f"{where} must be an object, not {shown(message)}", "messages")
        role = _text(message, "role", where)
        if role not in ROLES_HERE:
            raise BadRequest(f"{where}: role must be one of {', '.join(ROLES_HERE)}, not {shown(role)}", "messages")
        text = _text(message, "content", where)
        parts = image_parts(message.get("images") or [], f"{where}: images")
        own: dict[str, Any] = {"role": role, "content": [*parts, {"type": "text", "text": text}] if parts else text}
        if thinking := _text(message, "thinking", where):
            own["reasoning_content"] = thinking
        if role == "assistant" and message.get("tool_calls"):
            calls = _calls(message["tool_calls"], where, num_calls)
            num_calls += len(calls)
            pending = [(call["id"], call["function"]["name"]) for call in calls]
            own["tool_calls"] = calls
        elif role == "tool":
            own["tool_call_id"] = _answered(pending, _text(message, "tool_name", where))
        chat.append(own)
    return chat


def image_parts(images: object, where: str) -> list[dict[str, Any]]:
    """Return images in base64 as parts of a message. Raises BadRequest."""
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise BadRequest(f"{where} must be a list of images in base64, not {shown(images)}", "images")
    return [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{each}"}} for each in images]


def _calls(calls: object, where: str, num_before: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest(
                f'{where}: tool_calls must be such as [{{"function": {{"name": "…", "arguments": {{…}}}}}}], not '
                f"{shown(calls)}",
                "messages",
            )
        if not isinstance(arguments or {}, Mapping):
            raise BadRequest(f"{where}: the arguments of a call must be an object, not {shown(arguments)}", "messages")
        call_id = f"call{num_before + len(found) + 1:05}"
        own = {"name": function["name"], "arguments": arguments or {}}
        found.append({"id": call_id, "type": "function", "function": own})
    return found


def _answered(pending: list[tuple[str, str]], name: str) -> str:
    """Return the id of the call that a result of the tool `name` answers: without a name, the first open one."""
    for index, (call_id, called) in enumerate(pending):
        if not name or called == name:
            del pending[index]
            return call_id
    return "call00000"  # a result without a call


def _text(message: Mapping[str, Any], name: str, where: str) -> str:
    value = message.get(name) or ""
    if not isinstance(value, str):
        raise BadRequest(f"{where}: {name} must be text, not {shown(value)}", "messages")
    return value
