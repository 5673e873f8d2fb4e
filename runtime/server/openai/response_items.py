"""The items of `/v1/responses`: items of the input as messages of a chat, and items of the output as they grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ...common.prompts import shown
from ...common.types import Delta
from ..http.calls import call_id
from ..http.choices import Choice, Run
from ..http.errors import BadRequest
from .tools import EFFORTS, qualified_name

# By kind of run: the prefix of an item's id, and the name of its deltas.
PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}
DELTAS = {"content": "output_text", "reasoning": "reasoning_text", "arguments": "function_call_arguments"}
INPUT_IMAGE = "input_image"
REFERENCE = "item_reference"
# Kinds of items: calls and their outputs, and items that only the server that made them understands.
CALLS = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
}
OUTPUTS = frozenset(f"{kind}_output" for kind in CALLS)
LEFT_OUT = frozenset(
    {
        REFERENCE, "compaction", "web_search_call", "file_search_call", "code_interpreter_call",
        "image_generation_call", "mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response",
        "tool_search_call", "tool_search_output", "additional_tools",
    }
)  # fmt: skip
REASONING_HINTS = frozenset({"summary", "generate_summary"})
TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")


def input_messages(items: list[Any], num_previous: int = 0) -> list[tuple[str, dict[str, Any]]]:
    """Return input items as messages: reasoning and calls become parts of the adjacent message of the assistant.

    Each message comes with its place in the body, to which the first `num_previous` items do not belong. Raises
    BadRequest.
    """
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    for index, item in enumerate(items):
        where = f"input[{index - num_previous}]" if index >= num_previous else "previous_response_id"
        kind = _kind(item)
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if kind == "message":
            message = {"role": item.get("role"), "content": _chat_parts(item.get("content"))}
            if last is not None and message["role"] == "assistant" and "content" not in last:
                last |= message
                places[-1] = where
            else:
                messages.append(message)
        elif kind in OUTPUTS:
            content = _output(item, kind, where)
            name = "id" if kind == "local_shell_call_output" and "call_id" not in item else "call_id"
            messages.append({"role": "tool", "tool_call_id": _text(item, name, where), "content": content})
        elif kind in CALLS or kind == "reasoning":
            if last is None or (kind == "reasoning" and ("content" in last or "tool_calls" in last)):
                last = {"role": "assistant"}
                messages.append(last)
            if kind == "reasoning":
                last["reasoning_content"] = _reasoning(item, where)
            else:
                call = {"id": _text(item, "call_id", where), "type": "function", "function": _function(item, where)}
                last.setdefault("tool_calls", []).append(call)
        elif kind not in LEFT_OUT:
            raise BadRequest(
                f"{where} must be a message, a call, the output of a call or a reasoning item; {shown(kind)} is not "
                "supported",
                "input",
            )
        places += [where] * (len(messages) - len(places))
    return [
        (place, each) for place, each in zip(places, messages, strict=True) if each.keys() & {"content", "tool_calls"}
    ]


def references_in(items: list[Any]) -> dict[int, str]:
    """Return the ids of the items that an input refers to, by the places of the references. Raises BadRequest."""
    return {index: _text(item, "id", f"input[{index}]") for index, item in enumerate(items) if _is_reference(item)}


def name_in(item_id: str) -> str:
    """Return the name of the response that made an item, from the item's id (see `OutputItems` and `listed_items`)."""
    return item_id.split("_")[1] if "_" in item_id else ""


def chat_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields about tools and reasoning in the form of chats. Raises BadRequest."""
    fields: dict[str, Any] = {
        name: values[name]
        for name in ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "enable_thinking")
        if name in values
    }
    match values.get("reasoning", {}):
        case {"effort": effort, **rest} if rest.keys() <= REASONING_HINTS:
            if effort not in (None, *EFFORTS):
                text = f"reasoning.effort must be one of {', '.join(EFFORTS)}, not {shown(effort)}"
                raise BadRequest(text, "reasoning.effort")
            fields |= {} if effort is None else {"reasoning_effort": effort}
        case {**rest} if rest.keys() <= REASONING_HINTS:
            pass
        case other:
            raise BadRequest(
                f'reasoning must be an object such as {{"effort": "low"}}, not {shown(other)}', "reasoning"
            )
    return fields


class OutputItems:
    """The items of a parsed output: each run of its choice is an item. `event` makes a numbered event."""

    def __init__(
        self,
        choice: Choice,
        name: str,
        event: Callable[..., bytes],
        logprobs: Callable[[Run, bool], Any],
        namespaces: Mapping[str, tuple[str, str]],
    ) -> None:
        self._choice = choice
        self._name = name  # name of the response, in the items' ids
        self._event = event
        self._logprobs = logprobs  # logprobs of a run's text, with the tokens' bytes or without
        self._namespaces = namespaces  # function's name for the model -> its namespace and name there
        self._num_begun = 0  # items in events; all but the last have ended

    def shown(self, status: str) -> list[dict[str, Any]]:
        """Return the items; the last one has this status."""
        last = len(self._choice.runs) - 1
        return [self._item(index, status if index == last else "completed") for index in range(last + 1)]

    def events(self, deltas: Sequence[Delta], runs: Sequence[int], logprobs: list[Any]) -> bytes:
        """Return the events of deltas, which the choice has kept in the runs at these indices.

        `logprobs` belong to the text in the deltas.
        """
        events: list[bytes] = []
        for (kind, text), index in zip(deltas, runs, strict=True):
            if index >= self._num_begun:
                events += [self.close("completed"), self._begin(index)]
            if kind == "call":
                continue
            place = self._place(index)
            if kind == "content":
                place["logprobs"] = logprobs
                logprobs = []
            name = DELTAS[kind]
            events.append(self._event(f"response.{name}.delta", **place, delta=text))
        return b"".join(events)

    def close(self, status: str) -> bytes:
        """Return the events that end the last item, if there is one."""
        if not self._num_begun:
            return b""
        index = self._num_begun - 1
        run = self._choice.runs[index]
        place = self._place(index)
        item = self._item(index, status)
        if run.kind == "call":
            named = {"name": item["name"], "arguments": run.text}
            done = self._event("response.function_call_arguments.done", **place, **named)
        else:
            extra = {"logprobs": self._logprobs(run, False)} if run.kind == "content" else {}
            done = self._event(f"response.{DELTAS[run.kind]}.done", **place, text=run.text, **extra)
            done += self._event("response.content_part.done", **place, part=item["content"][0])
        return done + self._event("response.output_item.done", output_index=index, item=item)

    def _begin(self, index: int) -> bytes:
        self._num_begun = index + 1
        item = self._item(index, "in_progress", is_empty=True)
        added = self._event("response.output_item.added", output_index=index, item=item)
        if self._choice.runs[index].kind == "call":
            return added
        part = self._part(index, is_empty=True)
        return added + self._event("response.content_part.added", **self._place(index), part=part)

    def _place(self, index: int) -> dict[str, Any]:
        place = {"item_id": self._id(index), "output_index": index}
        return place if self._choice.runs[index].kind == "call" else {**place, "content_index": 0}

    def _id(self, index: int) -> str:
        return f"{PREFIXES[self._choice.runs[index].kind]}_{self._name}_{index}"

    def _item(self, index: int, status: str, *, is_empty: bool = False) -> dict[str, Any]:
        run = self._choice.runs[index]
        own = {"id": self._id(index), "status": status}
        if run.kind == "call":
            namespace, name = self._namespaces.get(run.name, ("", run.name))
            named = {"call_id": call_id(self._name, 0, index), "name": name, "arguments": "" if is_empty else run.text}
            return {**own, "type": "function_call", **named, **({"namespace": namespace} if namespace else {})}
        content = [] if is_empty else [self._part(index)]
        if run.kind == "reasoning":
            return {**own, "type": "reasoning", "summary": [], "content": content}
        return {**own, "type": "message", "role": "assistant", "content": content}

    def _part(self, index: int, *, is_empty: bool = False) -> dict[str, Any]:
        run = self._choice.runs[index]
        text = "" if is_empty else run.text
        if run.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = [] if is_empty else self._logprobs(run, True)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _kind(item: object) -> str:
    """Return the type of an item, which messages may leave out; empty if it is not a text."""
    kind = item.get("type") if isinstance(item, dict) else ""
    return "message" if kind is None else kind if isinstance(kind, str) else ""


def _is_reference(item: object) -> bool:
    """Return whether an item is a reference, which may leave out its type."""
    if not isinstance(item, dict):
        return False
    kind = item.get("type")
    return kind == REFERENCE or (kind is None and item.keys() - {"type"} == {"id"})


def _function(item: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a call in the form of chats, with any input of a tool as the arguments of a function."""
    kind = item["type"]
    field = CALLS[item["type"]]
    if kind == "function_call":
        name = qualified_name(_text(item, "name", where), item.get("namespace"))
        return {"name": name, "arguments": _text(item, field, where)}
    name = _text(item, "name", where) if kind == "custom_tool_call" else kind.removesuffix("_call")
    given = _text(item, field, where, (str,) if kind == "custom_tool_call" else (dict,))
    return {"name": name, "arguments": msgspec.json.encode({field: given}).decode()}


def _output(item: dict[str, Any], kind: str, where: str) -> Any:
    """Return the output of a call as the content of a message."""
    if kind in ("function_call_output", "custom_tool_call_output"):
        return _chat_parts(_text(item, "output", where, (str, list)))
    output = item.get("output", "")
    return output if isinstance(output, str) else msgspec.json.encode(output).decode()


def _chat_parts(content: Any) -> Any:
    """Return content with its parts of text and images in the form of chats."""
    return [_chat_part(part) for part in content] if isinstance(content, list) else content


def _chat_part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in TEXT_PARTS:
        return {**part, "type": "text"}
    if kind == INPUT_IMAGE:
        return {"type": "image_url", "image_url": {"url": part.get("image_url"), "detail": part.get("detail")}}
    return part


def _text(item: dict[str, Any], name: str, where: str, kinds: tuple[type, ...] = (str,)) -> Any:
    value = item.get(name)
    if type(value) not in kinds:
        allowed = "text" if str in kinds else "an object"
        raise BadRequest(f"{where}: {name} must be {allowed}, not {shown(value)}", "input")
    return value


def _reasoning(item: dict[str, Any], where: str) -> str:
    """Return the text of a reasoning item: its content, or its summary if it has none. Raises BadRequest."""
    texts = {name: _part_texts(item.get(name), f"{where}: {name}") for name in ("content", "summary")}
    return "\n".join(texts["content"] or texts["summary"])


def _part_texts(parts: Any, where: str) -> list[str]:
    """Return the texts of a list of parts, which may be missing. Raises BadRequest."""
    if parts is None:
        return []
    if not isinstance(parts, list):
        raise BadRequest(f"{where} must be a list of parts, not {shown(parts)}", "input")
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
            example = '{"type": "reasoning_text", "text": "…"}'
            raise BadRequest(f"{where}[{index}] must be a part such as {example}, not {shown(part)}", "input")
    return [part["text"] for part in parts]
