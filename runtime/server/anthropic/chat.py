"""The messages of Anthropic's API as the messages of a chat in OpenAI's form.

Each message is returned after its place in the body. A field that the API does not have is refused, as Anthropic does.
Fields without effect here are accepted: citations, and the signatures of thinking.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from ...common.prompts import shown
from ..http.errors import BadRequest

EXTRA = "Extra inputs are not permitted"  # Anthropic's words
MAX_BREAKPOINTS = 4  # cache breakpoints of one request
TTL_MS = {"5m": 300_000, "1h": 3_600_000}
DEFAULT_TTL = "5m"
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_COMMON = frozenset({"type", "cache_control"})
# Fields of each type of block.
BLOCKS: dict[str, Set[str]] = {
    "text": _COMMON | {"text", "citations"},
    "image": _COMMON | {"source", "transformations"},
    "document": _COMMON | {"source", "title", "context", "citations"},
    "search_result": _COMMON | {"source", "title", "content", "citations"},
    "thinking": frozenset({"type", "thinking", "signature"}),
    "redacted_thinking": frozenset({"type", "data"}),
    "tool_use": _COMMON | {"id", "name", "input", "caller", "toolset_name"},
    "tool_result": _COMMON | {"tool_use_id", "content", "is_error", "toolset_name"},
}
CONTENT = ("text", "image", "document", "search_result")  # blocks of users' messages and of results
ALLOWED = {
    "user": (*CONTENT, "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}

Placed = tuple[str, dict[str, Any]]  # a message after its place in the body


class Breakpoints:
    """The cache breakpoints of a request."""

    def __init__(self) -> None:
        self._ttls: list[int] = []

    @property
    def pin_ms(self) -> int | None:
        """The longest time that a breakpoint asks for; None without one."""
        return max(self._ttls, default=None)

    def note(self, holder: Mapping[str, Any], where: str) -> None:
        """Note the breakpoint of a block or a tool. Raises BadRequest."""
        given = holder.get("cache_control")
        if given is None:
            return
        place = f"{where}.cache_control" if where else "cache_control"
        if not isinstance(given, Mapping) or given.get("type") != "ephemeral":
            raise BadRequest(f'{place} must be {{"type": "ephemeral"}}, not {shown(given)}', place)
        ttl = DEFAULT_TTL if given.get("ttl") is None else given["ttl"]
        if not isinstance(ttl, str) or ttl not in TTL_MS:
            raise BadRequest(f"{place}.ttl must be {' or '.join(TTL_MS)}, not {shown(ttl)}", place)
        self._ttls.append(TTL_MS[ttl])
        if len(self._ttls) > MAX_BREAKPOINTS:
            raise BadRequest(f"{place}: at most {MAX_BREAKPOINTS} blocks may have cache_control", place)


def chat_messages(system: object, messages: object, breakpoints: Breakpoints) -> list[Placed]:
    """Return the system text and the messages of a body. Raises BadRequest."""
    placed: list[Placed] = []
    if text := _text(system or "", "system", breakpoints):
        placed.append(("system", {"role": "system", "content": text}))
    if not isinstance(messages, list) or not messages:
        raise BadRequest(f"messages must be a list of at least one message, not {shown(messages)}", "messages")
    calls: list[str] = []  # ids of the calls that results may follow
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        read, calls = _message(message, where, calls, breakpoints)
        placed += [(where, each) for each in read]
    if messages[-1]["role"] == "assistant":
        raise BadRequest(
            "messages: the last message is the assistant's, and this server does not continue an answer; end with a "
            "message of the user",
            "messages",
        )
    return placed


def refuse_extra(given: Mapping[str, Any], known: Set[str], where: str) -> None:
    """Raise BadRequest for a field that is not `known`."""
    if extra := sorted(given.keys() - known):
        place = f"{where}.{extra[0][:80]}" if where else extra[0][:80]
        raise BadRequest(f"{place}: {EXTRA}", place)


def _message(
    message: object, where: str, calls: list[str], breakpoints: Breakpoints
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a message as messages of a chat, and the ids of its calls. `calls` are those of the message before."""
    if not isinstance(message, Mapping):
        raise BadRequest(f'{where} must be such as {{"role": "user", "content": "Hello"}}, not {shown(message)}', where)
    refuse_extra(message, frozenset({"role", "content"}), where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ALLOWED:
        raise BadRequest(f"{where}.role must be user, assistant or system, not {shown(role)}", where)
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}], []
    place = f"{where}.content"
    blocks = list(_blocks(content, place, ALLOWED[role], breakpoints))
    if role == "assistant":
        answer = _answer(blocks)
        return [answer], [call["id"] for call in answer.get("tool_calls", ())]
    return _with_results(role, blocks, calls, breakpoints), []


def _blocks(
    content: object, place: str, allowed: Iterable[str], breakpoints: Breakpoints
) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Yield checked blocks, each after its place. Raises BadRequest."""
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{place} must be text or a list of at least one block, not {shown(content)}", place)
    for index, block in enumerate(content):
        where = f"{place}.{index}"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(block, Mapping) or not isinstance(kind, str):
            raise BadRequest(
                f'{where} must be a block such as {{"type": "text", "text": "…"}}, not {shown(block)}', where
            )
        if kind not in allowed:
            raise BadRequest(f"{where}: a block of type {shown(kind)} is not supported here", where)
        refuse_extra(block, BLOCKS[kind], where)
        for name, wanted in _TYPES[kind].items():
            if not isinstance(block.get(name), wanted):
                raise BadRequest(f"{where}.{name} must be {_NAMES[wanted]}, not {shown(block.get(name))}", where)
        breakpoints.note(block, where)
        yield where, block


def _answer(blocks: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return an earlier answer. Redacted thinking has no text that a model could read."""
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for _, block in blocks:
        if block["type"] == "text":
            texts.append({"type": "text", "text": block["text"]})
        elif block["type"] == "thinking":
            thoughts.append(block["thinking"])
        elif block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"id": block["id"], "type": "function", "function": function})
    answer: dict[str, Any] = {"role": "assistant", "content": texts or None}
    if thoughts:
        answer["reasoning_content"] = "\n".join(thoughts)
    return {**answer, "tool_calls": calls} if calls else answer


def _with_results(
    role: str, blocks: Iterable[tuple[str, Mapping[str, Any]]], calls: list[str], breakpoints: Breakpoints
) -> list[dict[str, Any]]:
    """Return the messages of a user's blocks: one for each result, and one for the blocks between results."""
    messages: list[dict[str, Any]] = []
    is_open = False  # more parts join the last message
    for where, block in blocks:
        if block["type"] == "tool_result":
            if block["tool_use_id"] not in calls:
                raise BadRequest(
                    f"{where}: unexpected `tool_use_id` found in `tool_result` blocks: {shown(block['tool_use_id'])}. "
                    "Each `tool_result` block must have a corresponding `tool_use` block in the previous message",
                    where,
                )
            content = _result(block, where, breakpoints)
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
        elif is_open:
            messages[-1]["content"] += _parts(block, where, breakpoints)
        else:
            messages.append({"role": role, "content": _parts(block, where, breakpoints)})
        is_open = block["type"] != "tool_result"
    return messages


def _result(block: Mapping[str, Any], where: str, breakpoints: Breakpoints) -> list[dict[str, Any]]:
    """Return the content of a result. The text of an error begins with a word for it: templates have no field."""
    content = block.get("content")
    if type(block.get("is_error") or False) is not bool:
        raise BadRequest(f"{where}.is_error must be true or false, not {shown(block['is_error'])}", where)
    parts: list[dict[str, Any]] = [{"type": "text", "text": "Error:"}] if block.get("is_error") else []
    if isinstance(content, str):
        return [*parts, {"type": "text", "text": content}]
    for place, each in _blocks(content, f"{where}.content", CONTENT, breakpoints) if content else ():
        parts += _parts(each, place, breakpoints)
    return parts or [{"type": "text", "text": ""}]


def _parts(block: Mapping[str, Any], where: str, breakpoints: Breakpoints) -> list[dict[str, Any]]:
    """Return a block as parts of a message."""
    source: Any = block.get("source")
    if block["type"] == "text":
        return [{"type": "text", "text": block["text"]}]
    if block["type"] == "image":
        return [{"type": "image_url", "image_url": {"url": _image_url(source, f"{where}.source")}}]
    labels = [label for name in ("title", "context") if (label := _label(block, name, where))]
    if block["type"] == "search_result":
        labels.append(source)
        content = block["content"]
    else:
        content = _document(source, f"{where}.source")
    head = [{"type": "text", "text": "\n".join(labels)}] if labels else []
    if isinstance(content, str):
        return [*head, {"type": "text", "text": content}]
    inner = _blocks(content, f"{where}.content", ("text", "image"), breakpoints)
    return head + [part for place, each in inner for part in _parts(each, place, breakpoints)]


def _label(block: Mapping[str, Any], name: str, where: str) -> str:
    label = block.get(name) or ""
    if not isinstance(label, str):
        raise BadRequest(f"{where}.{name} must be text, not {shown(label)}", where)
    return label


def _document(source: Mapping[str, Any], where: str) -> object:
    """Return the text or the blocks of a document."""
    match source:
        case {"type": "text", "data": str(text)}:
            return text
        case {"type": "content", "content": content}:
            return content
    raise BadRequest(f"{where}: documents are text here: their source has the type text or content", where)


def _image_url(source: Mapping[str, Any], where: str) -> str:
    match source:
        case {"type": "base64", "media_type": str(kind), "data": str(data)} if kind in IMAGE_TYPES:
            return f"data:{kind};base64,{data}"
        case {"type": "url", "url": str(url)}:
            return url
    raise BadRequest(
        f"{where} must be base64 data with a media_type of {', '.join(IMAGE_TYPES)}, or a url, not {shown(source)}",
        where,
    )


def _text(content: object, place: str, breakpoints: Breakpoints) -> str:
    """Return text that may be a list of blocks."""
    if isinstance(content, str):
        return content
    return "\n".join(block["text"] for _, block in _blocks(content, place, ("text",), breakpoints))


# Types of the required fields of a block.
_TYPES: dict[str, dict[str, type]] = {
    "text": {"text": str},
    "image": {"source": dict},
    "document": {"source": dict},
    "search_result": {"source": str, "content": list},
    "thinking": {"thinking": str},
    "redacted_thinking": {"data": str},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str},
}
_NAMES: dict[type, str] = {str: "text", dict: "an object", list: "a list"}
