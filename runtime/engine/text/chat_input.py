"""Checked copies of the messages and tools of a chat, in the one form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...common.errors import InvalidRequest

MAX_MESSAGES = 4096
MAX_MESSAGE_VALUES = 1 << 16  # texts, numbers, lists and maps in all messages together
MAX_MESSAGE_DEPTH = 8  # nested lists and maps in one message
MAX_SCHEMA_DEPTH = 64  # depth of a tool, of a call's arguments and of a variable
MESSAGE = "messages: a message"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # keys of a message, in different families


class ValueLimit:
    """A copier of nested values, which together have at most MAX_MESSAGE_VALUES values."""

    def __init__(self) -> None:
        self._left = MAX_MESSAGE_VALUES

    def copy(self, value: Any, depth: int, what: str) -> Any:
        """Return a copy with lists instead of tuples, nested up to `depth` levels. Raises InvalidRequest."""
        self._left -= 1
        if self._left < 0:
            raise InvalidRequest(f"messages hold more than {MAX_MESSAGE_VALUES} values")
        if value is None or isinstance(value, str | int | float):
            return value
        if depth == 0:
            levels = MAX_MESSAGE_DEPTH if what == MESSAGE else MAX_SCHEMA_DEPTH
            raise InvalidRequest(f"{what} nests deeper than {levels} levels")
        if isinstance(value, list | tuple):
            return [self.copy(item, depth - 1, what) for item in value]
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"{what} holds a {type(value).__name__}; texts, numbers, lists and maps are allowed")
        if not all(isinstance(key, str) for key in value):
            raise InvalidRequest(f"{what} has a key that is not text")
        return {key: self.copy(item, depth - 1, what) for key, item in value.items()}

    def copy_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return copies of messages. Raises InvalidRequest."""
        is_list = isinstance(messages, list | tuple) and all(isinstance(each, Mapping) for each in messages)
        if not messages or not is_list:
            raise InvalidRequest(
                'messages must be a list of at least one map, such as {"role": "user", "content": "…"}'
            )
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest(f"messages: there are {len(messages)}; at most {MAX_MESSAGES} are allowed")
        return [self.copy(each, MAX_MESSAGE_DEPTH, MESSAGE) for each in messages]


def checked_messages(messages: Sequence[Mapping[str, Any]], limit: ValueLimit) -> list[Any]:
    """Return copies whose calls have maps as arguments and ids, and whose results have the ids of the calls.

    Reasoning has every name that templates read. Raises InvalidRequest.
    """
    chat = []
    pending: list[str] = []
    num_calls = 0
    for message in limit.copy_messages(messages):
        checked = _with_reasoning(message)
        if checked.get("tool_calls"):
            checked = _with_arguments(checked, limit, num_calls)
            pending = [each["id"] for each in checked["tool_calls"]]
            num_calls += len(pending)
        elif checked.get("role") == "tool" and pending:
            called = checked.get("tool_call_id")
            if called is None:
                checked["tool_call_id"] = called = pending[0]
            if called in pending:
                pending.remove(called)
        chat.append(checked)
    return chat


def offered_tool(tool: Any) -> dict[str, Any]:
    """Return a tool for the prompt: without `strict`, which only concerns the grammar."""
    function = {key: value for key, value in tool["function"].items() if key != "strict"}
    return {"type": "function", "function": function}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    given = next((message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)), None)
    return message if given is None else {**dict.fromkeys(REASONING_KEYS, given), **message}


def _with_arguments(message: dict[str, Any], limit: ValueLimit, num_calls: int) -> dict[str, Any]:
    """Return a message whose calls have maps as arguments, and ids. Raises InvalidRequest."""
    calls = message["tool_calls"]
    if not isinstance(calls, list) or not all(_is_call(each) for each in calls):
        raise InvalidRequest(
            'messages: tool_calls must be a list such as [{"id": "…", "type": "function", "function": {"name": "…", '
            '"arguments": "{…}"}}]'
        )
    copies = []
    for index, call in enumerate(calls, num_calls + 1):
        arguments = call["function"].get("arguments") or "{}"
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        if not isinstance(arguments, dict):
            raise InvalidRequest(
                f"messages: the arguments of a call of {call['function']['name']!r} are not a JSON object"
            )
        function = {**call["function"], "arguments": limit.copy(arguments, MAX_SCHEMA_DEPTH, "a call")}
        call_id = call["id"] if isinstance(call.get("id"), str) and call["id"] else f"call{index:05}"
        copies.append({**call, "id": call_id, "type": "function", "function": function})
    return {**message, "content": message.get("content"), "tool_calls": copies}


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _parsed(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None
