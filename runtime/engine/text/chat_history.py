"""Chats in a form that a template shows completely, so that no part of a client's chat is missing in the prompt.

Roles change as in other servers: a system message that a template refuses joins the user's first message, calls and
results that a template does not read become text, and consecutive messages are joined where roles must alternate.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from ...common.errors import InvalidRequest
from ..markup.call_text import FUNCTION_TAG, call_example, calls_text
from ..markup.markup import CallSyntax
from .template_abilities import Abilities, ToolsPlace, with_parts

TOOLS_TEXT = "You can call these tools. Each line has a tool's name, and the JSON schema of its arguments:"
CALL_TEXT = "To call a tool, write:"
RESULT = "<tool_response>\n", "\n</tool_response>"  # literals around results in a user's text
ID_LENGTH = 9

_WORD = re.compile("[A-Za-z0-9]+")

Message = dict[str, Any]
Chat = list[Message]


def adapted(chat: Chat, tools: Sequence[Message], abilities: Abilities, syntax: CallSyntax | None) -> Chat:
    """Return the chat in a form that the template reads. `syntax` is the model's syntax of calls, if it is known.

    Raises InvalidRequest if the template cannot show the calls of earlier answers, TemplateTimeout.
    """
    has_calls = any(each.get("tool_calls") for each in chat)
    is_generic = bool(tools) and syntax is not None and syntax.generic
    if has_calls:
        as_text = is_generic or not abilities.reads_calls
        chat = (_with_calls_as_text if as_text else _with_calls)(chat, abilities, syntax or FUNCTION_TAG)
    if any(each.get("role") == "tool" for each in chat):
        chat = _with_results(chat, "user" if is_generic else abilities.result_role)
    if tools and (place := "text" if is_generic else abilities.tools_place) != "variable":
        chat = _with_tools_in_system(chat, tools, place, syntax)
    if any(each.get("role") == "system" for each in chat):
        chat = _with_systems(chat, abilities)
    chat = _joined(chat, abilities)
    if has_calls and abilities.takes_argument_text:
        chat = [_with_argument_text(each) for each in chat]
    return [with_parts(each) for each in chat] if abilities.takes_parts else chat


def check_complete(chat: Chat, text: str) -> None:
    """Raise InvalidRequest if a call or a result is missing in the prompt: a template may skip it in some positions."""
    for message in chat:
        texts = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        texts += [message["content"]] if message.get("role") == "tool" else []
        words = [found.group() for each in texts if isinstance(each, str) and (found := _WORD.search(each))]
        if missing := [word for word in words if word not in text]:
            raise InvalidRequest(f"messages: the chat template leaves out a call or a result with {missing[0][:80]!r}")


# Calls and results


def _with_calls(chat: Chat, abilities: Abilities, syntax: CallSyntax) -> Chat:
    if not abilities.takes_any_id:
        chat = [_with_short_ids(each) for each in chat]
    if not abilities.takes_parallel_calls:
        chat = _one_by_one(chat)
    return [each for message in chat for each in _with_shown_calls(message, abilities, syntax)]


def _with_shown_calls(message: Message, abilities: Abilities, syntax: CallSyntax) -> Chat:
    """Return a message in a form whose content and calls are both shown."""
    calls = message.get("tool_calls")
    content = message.get("content")
    if not calls or abilities.shows_calls(content if isinstance(content, str | None) else "text"):
        return [message]
    only_calls = {**message, "content": abilities.empty_content}
    if not content:
        return [only_calls]
    if abilities.shows_calls_after_text:
        return [{key: value for key, value in message.items() if key != "tool_calls"}, only_calls]
    return [_with_call_text(message, abilities, syntax)]


def _with_calls_as_text(chat: Chat, abilities: Abilities, syntax: CallSyntax) -> Chat:
    return [_with_call_text(each, abilities, syntax) for each in chat]


def _with_call_text(message: Message, abilities: Abilities, syntax: CallSyntax) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not abilities.shows_answers and abilities.takes_users:
        raise InvalidRequest("messages: the chat template shows neither the calls of earlier answers nor their text")
    text = calls_text(syntax, [(each["function"]["name"], each["function"]["arguments"]) for each in calls])
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": _appended(message.get("content"), text, "\n")}


def _with_results(chat: Chat, result_role: str) -> Chat:
    """Return the chat with results in the template's role, or as messages of the user, consecutive ones in one."""
    if result_role == "tool":
        return chat
    if result_role != "user":
        return [
            {"role": result_role, "content": each.get("content")} if each.get("role") == "tool" else each
            for each in chat
        ]
    changed: Chat = []
    before_is_result = False
    for message in chat:
        is_result = message.get("role") == "tool"
        if is_result:
            content = _appended(_appended(RESULT[0], message.get("content"), ""), RESULT[1], "")
            if before_is_result:
                changed[-1] = {**changed[-1], "content": _appended(changed[-1]["content"], content, "\n")}
            else:
                changed.append({"role": "user", "content": content})
        else:
            changed.append(message)
        before_is_result = is_result
    return changed


def _one_by_one(chat: Chat) -> Chat:
    """Return the chat with one call per message, followed by its result."""
    changed: Chat = []
    at = 0
    while at < len(chat):
        message = chat[at]
        at += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            changed.append(message)
            continue
        begin = at
        while at < len(chat) and chat[at].get("role") == "tool":
            at += 1
        results = chat[begin:at]
        for index, call in enumerate(calls):
            own = [each for each in results if each.get("tool_call_id") == call["id"]]
            results = [each for each in results if each.get("tool_call_id") != call["id"]]
            text = message.get("content") if index == 0 else ""
            changed += [{**message, "content": text, "tool_calls": [call]}, *own]
        changed += results
    return changed


def _with_short_ids(message: Message) -> Message:
    """Return a message with ids of calls that have nine letters and digits, as Mistral's templates demand."""
    if message.get("tool_calls"):
        return {**message, "tool_calls": [{**each, "id": _short_id(each["id"])} for each in message["tool_calls"]]}
    if isinstance(message.get("tool_call_id"), str):
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    return message


def _short_id(call_id: str) -> str:
    if len(call_id) == ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    digest = hashlib.sha256(call_id.encode(errors="surrogatepass")).digest()
    return base64.b32encode(digest).decode()[:ID_LENGTH]


def _with_argument_text(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [
        {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}
        for call in calls
    ]
    return {
        **message,
        "tool_calls": [{**call, "function": each} for call, each in zip(calls, functions, strict=True)],
    }


# Tools and roles


def _with_tools_in_system(chat: Chat, tools: Sequence[Message], place: ToolsPlace, syntax: CallSyntax | None) -> Chat:
    """Return the chat with its tools in the system message, which is added if necessary."""
    has_system = chat[0].get("role") == "system"
    system = chat[0] if has_system else {"role": "system", "content": ""}
    functions = [tool["function"] for tool in tools]
    if place == "tools":
        system = {**system, "tools": json.dumps(functions, ensure_ascii=False)}
    elif place == "functions":
        system = {**system, "functions": json.dumps(list(tools), ensure_ascii=False)}
    else:
        lines = [TOOLS_TEXT, *(json.dumps(each, ensure_ascii=False) for each in functions)]
        if syntax is not None:
            lines += ["", CALL_TEXT, call_example(syntax)]
        system = {**system, "content": _appended(system["content"], "\n".join(lines), "\n\n")}
    return [system, *chat[has_system:]]


def _with_systems(chat: Chat, abilities: Abilities) -> Chat:
    """Return the chat with each system message at a place that the template shows, or as text of the user."""
    begin = 1 if chat[0].get("role") == "system" else 0
    num_later = sum(each.get("role") == "system" for each in chat[begin:])
    is_one = num_later == 1 and not (begin and abilities.takes_system)
    if num_later and not (abilities.takes_later_system if is_one else abilities.takes_several_systems):
        later = [{**each, "role": "user"} if each.get("role") == "system" else each for each in chat[begin:]]
        chat = [*chat[:begin], *later]
    if not begin or chat[0].keys() & {"tools", "functions"} or abilities.takes_system:
        return chat
    system, *rest = chat
    if not rest or rest[0].get("role") != "user":
        return [{**system, "role": "user"}, *rest]
    return [{**rest[0], "content": _appended(system["content"], rest[0]["content"], "\n\n")}, *rest[1:]]


def _joined(chat: Chat, abilities: Abilities) -> Chat:
    """Return the chat with consecutive messages joined where the template demands that roles alternate."""
    changed: Chat = []
    for message in chat:
        last = changed[-1] if changed else {}
        role = message.get("role")
        is_repeated = role == last.get("role") and not last.get("tool_calls")
        if is_repeated and (
            (role == "user" and not abilities.takes_repeated_users)
            or (role == "assistant" and not message.get("tool_calls") and not abilities.takes_repeated_answers)
        ):
            changed[-1] = {**last, **message, "content": _appended(last["content"], message["content"], "\n\n")}
        else:
            changed.append(message)
    return changed


def _appended(content: Any, more: Any, separator: str) -> Any:
    """Return two contents as one: texts, or lists of parts."""
    content = content or ""
    more = more or ""
    if isinstance(content, str) and isinstance(more, str):
        return separator.join(each for each in (content, more) if each)
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (content, more)]
    return [*parts[0], *parts[1]]
