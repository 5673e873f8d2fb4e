"""`/v1/responses`: its fields as a request to the engine, its object, and its numbered events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ...common.errors import QuireError
from ...common.prompts import REFUSAL, shown
from ...common.types import OutputChunk, SamplingParams, Usage
from ...engine.facade import EngineInfo, NewParser
from ..http.calls import Call, checked_messages
from ..http.choices import Choice, Run
from ..http.errors import BadRequest
from ..http.fields import Fields
from ..http.formats import PromptSize, Status, num_reasoning_tokens
from ..http.logprobs import MAX_ALTERNATIVES, ChatLogprobs, Columns, Vocabulary, shown_in_delta
from .calls import chat_prompt, with_answer, without_reasoning
from .fields import (
    COMMON,
    TIERS,
    check_supported,
    sampling_fields,
    service_tier,
    stream_option,
)
from .other_fields import HINTS, INSTEAD, UNSUPPORTED
from .response_items import INPUT_IMAGE, OutputItems, chat_fields, input_messages
from .tools import TOOL_FIELDS, check_verbosity, namespaces

RESPONSE_FIELDS = COMMON - {"n", "max_tokens", "logprobs", "logit_bias", "response_format", "stream_options"} | HINTS
RESPONSE_FIELDS |= {"input", "instructions", "max_output_tokens", "text", "store", "background", "previous_response_id"}
RESPONSE_FIELDS |= {"stream_options", "max_tool_calls", "include", "top_logprobs", "service_tier", "reasoning"}
RESPONSE_FIELDS |= TOOL_FIELDS - {"reasoning_effort"}
TEXT_FORMAT = {"type": "text"}
FORMAT_OPTIONS: dict[str, type] = {"description": str, "strict": bool}  # options of a JSON schema, besides its name
UNSUPPORTED_HERE: dict[str, tuple[object, ...]] = {
    **UNSUPPORTED,
    "n": (1,),
    "max_tokens": (),
    "logprobs": (),
    "logit_bias": (),
    "response_format": (TEXT_FORMAT,),  # `text.format` here
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
}
MAX_TOKENS_NAMES = ("max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens")
INSTEAD_HERE = {
    **INSTEAD,
    **dict.fromkeys(MAX_TOKENS_NAMES, "use max_output_tokens"),
    "response_format": "use text.format",
}
RESPONSE_KNOWN = RESPONSE_FIELDS | UNSUPPORTED_HERE.keys()
WITH_LOGPROBS = "message.output_text.logprobs"
# Values of `include` without effect: parts of the output of other servers' tools, parts that the answer always has, and
# encrypted reasoning, which is sent as text.
INCLUDED = (
    WITH_LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url", "file_search_call.results",
    "web_search_call.results", "web_search_call.action.sources", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip

_encode = msgspec.json.encode


def response_call(fields: Fields, info: EngineInfo, tenant: str) -> Call:
    """Return the call of a response, whose input includes the input of the previous one. Raises InvalidRequest."""
    check_supported(fields, RESPONSE_FIELDS, UNSUPPORTED_HERE, INSTEAD_HERE)
    background = fields.get("background", bool, False)
    store = fields.get("store", bool, background)
    if background and not store:
        raise BadRequest("background needs store: true", "background")
    stream_option(fields, "include_usage")  # the last event always has the usage
    fields.get("max_tool_calls", int, 0)  # limit for tools that only other servers have
    placed = _messages(fields)
    messages = checked_messages([each for _, each in placed], info, "input", lambda index: placed[index][0])
    has_limit = "max_output_tokens" in fields.values
    _use_text_format(fields)
    chat = chat_fields(fields.values)
    sampling = without_reasoning(chat, info) | sampling_fields(fields, info)
    sampling["max_tokens"] = fields.get_num_tokens("max_output_tokens", info.max_model_len)
    sampling["logprobs"] = _num_logprobs(fields)
    request = with_answer(
        chat_prompt(chat, messages, tenant),
        chat,
        fields,
        sampling_params=SamplingParams(**sampling),
        fit_max_tokens=not has_limit,
    )
    return Call(
        (request,),
        fields.get("stream", bool, False),
        repeated=_repeated(fields) | {"background": background},
        store=store,
        background=background,
    )


def input_items(given: object) -> list[Any]:
    """Return the field `input` as a list; `response_call` refuses values that are neither text nor a list."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given if isinstance(given, list) else []


def listed_items(items: list[Any], name: str) -> list[dict[str, Any]]:
    """Return input items as `input_items` lists them: with an id, and texts as parts of their content.

    Ids are unique, so that a client can request the items after any of them, and differ from the ids of output items.
    """
    seen: set[str] = set()
    listed = []
    for index, item in enumerate(items):
        given = item.get("id")
        is_usable = isinstance(given, str) and given != "" and given not in seen
        own = {**item, "id": given if is_usable else f"msg_{name}_input_{index}"}
        seen.add(own["id"])
        listed.append(_listed(own))
    return listed


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    if item.setdefault("type", "message") == "message":
        own = {"type": "output_text", "annotations": []} if item["role"] == "assistant" else {"type": "input_text"}
        content = item.get("content") or []
        parts = [{"text": content}] if isinstance(content, str) else content
        item["content"] = [_listed_part(part, own) for part in parts]
    elif item["type"] == "reasoning":
        item.setdefault("summary", [])
    return {"id": item["id"], "status": "completed", **item}


def _listed_part(part: dict[str, Any], of_text: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a message; texts get the fields `of_text`."""
    if part.get("type") == REFUSAL:
        return {"type": REFUSAL, REFUSAL: part[REFUSAL]}
    return {**of_text, "text": part["text"]} if "text" in part else _listed_image(part)


def _listed_image(part: dict[str, Any]) -> dict[str, Any]:
    """Convert a chat-style or response-style image part to response style."""
    url = part["image_url"]
    detail = part.get("detail")
    if isinstance(url, dict):
        url, detail = url["url"], url.get("detail")
    return {"type": INPUT_IMAGE, "image_url": url, "detail": detail or "auto"}


def _num_logprobs(fields: Fields) -> int | None:
    """Return the number of alternatives to show for each token, None for no logprobs. Raises BadRequest."""
    included = fields.get("include", list, [])
    top = fields.get_between("top_logprobs", 0, MAX_ALTERNATIVES, 0)
    if other := [each for each in included if each not in INCLUDED]:
        raise BadRequest(f"include may have {', '.join(INCLUDED)}, not {shown(other[0])}", "include")
    has_logprobs = WITH_LOGPROBS in included
    if top and not has_logprobs:
        raise BadRequest(f"top_logprobs needs include: [{WITH_LOGPROBS!r}]", "top_logprobs")
    return top if has_logprobs else None


def _use_text_format(fields: Fields) -> None:
    """Convert `text.format` to the name and form of chats. Raises BadRequest."""
    text = Fields(fields.get("text", dict, {}))
    given = text.get("format", dict, TEXT_FORMAT)
    check_verbosity(text.values.get("verbosity", "medium"), "text.verbosity")
    if other := sorted(text.values.keys() - {"format", "verbosity"}):
        raise BadRequest(f"text.{other[0]} is not supported; leave it out", f"text.{other[0]}")
    match given:
        case {"type": "json_schema", "name": str(), "schema": schema, **rest} if rest.keys() <= FORMAT_OPTIONS.keys():
            if not isinstance(schema, dict):
                name = "text.format.schema"
                raise BadRequest(f"{name} must be a JSON schema, not {shown(schema)}", name)
            for name, kind in FORMAT_OPTIONS.items():
                Fields(rest).get(name, kind, kind())
            fields.values["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        case {"type": "text" | "json_object" as kind, **rest} if not rest:
            fields.values["response_format"] = {"type": kind}
        case _:
            raise BadRequest(
                'text.format must be {"type": "text"}, {"type": "json_object"} or '
                f'{{"type": "json_schema", "name": …, "schema": {{…}}}}, not {shown(given)}',
                "text.format",
            )


def _messages(fields: Fields) -> list[tuple[str, dict[str, Any]]]:
    """Return instructions and input as the messages of a chat, each after its place in the body. Raises BadRequest."""
    instructions = fields.get("instructions", str, "")
    first = [("instructions", {"role": "system", "content": instructions})] if instructions else []
    given = fields.required("input")
    if isinstance(given, str):
        return [*first, ("input", {"role": "user", "content": given})]
    if not isinstance(given, list) or not given:
        raise BadRequest(f"input must be text or a list of messages, not {shown(given)}", "input")
    messages = first + input_messages(given, fields.num_previous_items)
    if not messages:
        raise BadRequest("input must have a message: reasoning or items that are left out are none", "input")
    return messages


def _repeated(fields: Fields) -> dict[str, Any]:
    """Return the request's fields that its response repeats. Raises BadRequest."""
    fields.get("user", str, "")
    if not all(isinstance(each, str) for each in fields.get("metadata", dict, {}).values()):
        raise BadRequest("metadata must have texts as values", "metadata")
    names = (
        "instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "top_p", "user",
    )  # fmt: skip
    text = {"format": fields.values.get("text", {}).get("format") or TEXT_FORMAT}
    reasoning = {"reasoning": fields.values["reasoning"]} if fields.values.get("reasoning") else {}
    tier = service_tier(fields)
    return {
        **{name: fields.values.get(name) for name in names},
        **reasoning,
        "tools": fields.values.get("tools", []),
        "tool_choice": fields.values.get("tool_choice", "auto"),
        "parallel_tool_calls": fields.values.get("parallel_tool_calls", True),
        "text": text,
        "top_logprobs": fields.values.get("top_logprobs", 0),
        "service_tier": None if tier is None else TIERS[tier][1],
    }


class ResponseFormat:
    """The `response` object and its events. Implements `Format`.

    An event's `sequence_number` follows from the tokens alone: each chunk with text is one event. With a parser, each
    run of reasoning, of text, and each call is an item of its own; without one the only item is the message.
    """

    id_prefix = b"resp_"
    held_bytes = 0

    def __init__(self, call: Call, model: str, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.choices = [Choice(None if call.params.logprobs is None else ChatLogprobs(vocabulary))]
        self.prompt_sizes: Sequence[PromptSize] = ()  # not shown
        self._model = model
        self._id = f"resp_{call.name}"
        self._message_id = f"msg_{call.name}"
        self._created = call.created_s
        params = call.params
        self._repeated = {**call.repeated, "temperature": params.temperature, "top_p": params.top_p}
        self._repeated["metadata"] = call.repeated.get("metadata") or {}
        self._num_events = 0
        self._name = call.name
        self._items: OutputItems | None = None  # items with a parser
        delta = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        self._delta_head = (
            b"event: response.output_text.delta\ndata: " + _encode({"type": "response.output_text.delta", **delta})[:-1]
        )

    def read_with(self, new_parser: NewParser | None) -> None:
        """See `Format.read_with`."""
        self.choices[0].read_with(new_parser)
        if new_parser is not None:
            self._items = OutputItems(
                self.choices[0], self._name, self._event, self._logprobs_of, namespaces(self._repeated.get("tools"))
            )

    def whole(self, usage: Usage) -> bytes:
        """Return the object of the finished response."""
        return _encode(self._response(usage))

    def unfinished(self, status: Status, error: QuireError | None) -> bytes:
        """Return the object of a running, cancelled or failed response, with the output so far."""
        response = self._response(None)
        item_status = "in_progress" if status in ("queued", "in_progress") else "incomplete"
        output = self._output(item_status) if self.choices[0].runs or self.choices[0].texts else []
        failure = None if error is None else {"code": "server_error", "message": str(error)}
        return _encode({**response, "status": status, "error": failure, "output": output})

    def opening(self) -> bytes:
        """Return the events before any text."""
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        started = self._response(None)
        created = self._event("response.created", response=started)
        created += self._event("response.in_progress", response=started)
        if self._items is not None:
            return created
        return b"".join(
            (
                created,
                self._event("response.output_item.added", output_index=0, item=self._message("in_progress", [])),
                self._event("response.content_part.added", **place, part=self._part()),
            )
        )

    def events(self, index: int, chunk: OutputChunk) -> bytes:
        """Return the event of a chunk, and keep its text for the events at the end."""
        choice = self.choices[index]
        deltas, piece = choice.read(chunk)
        runs = choice.keep(deltas, piece)
        self.held_bytes += len(chunk.text) + sum(map(len, piece or ()))
        logprobs = shown_in_delta(choice.shown, self._vocabulary)
        if self._items is not None:
            return self._items.events(deltas, runs, logprobs)
        if not (chunk.text or logprobs):
            return b""
        number = self._num_events
        self._num_events += 1
        return self._delta_head + b',"sequence_number":%d,"delta":%b,"logprobs":%b}\n\n' % (
            number, _encode(chunk.text), _encode(logprobs) if logprobs else b"[]",
        )  # fmt: skip

    def ending(self, usage: Usage) -> bytes:
        """Return the events after the text."""
        response = self._response(usage)
        name = "response.completed" if response["status"] == "completed" else "response.incomplete"
        if self._items is not None:
            return self._items.close(response["status"]) + self._event(name, response=response)
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        text = "".join(self.choices[0].texts)
        message = response["output"][0]
        logprobs = _without_bytes(self.choices[0].columns)
        return b"".join(
            (
                self._event("response.output_text.done", **place, text=text, logprobs=logprobs),
                self._event("response.content_part.done", **place, part=self._part()),
                self._event("response.output_item.done", output_index=0, item=message),
                self._event(name, response=response),
            )
        )

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (
            name.encode(),
            _encode({"type": name, "sequence_number": number, **fields}),
        )

    def _output(self, status: str) -> list[dict[str, Any]]:
        return [self._message(status, [self._part()])] if self._items is None else self._items.shown(status)

    def _message(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {"id": self._message_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self) -> dict[str, Any]:
        """Return the text so far, with its logprobs."""
        text = "".join(self.choices[0].texts)
        logprobs = msgspec.Raw(_joined(self.choices[0].columns))
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs_of(self, run: Run, with_bytes: bool) -> Any:
        return msgspec.Raw(_joined(run.columns)) if with_bytes else _without_bytes(run.columns)

    def _response(self, usage: Usage | None) -> dict[str, Any]:
        """Return the object; with `usage`, the response has ended."""
        is_cut = self.choices[0].finish_reason == "length"
        status = "in_progress" if usage is None else "incomplete" if is_cut else "completed"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": [] if usage is None else self._output(status),
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage, num_reasoning_tokens(usage, self.choices)),
            **self._repeated,
        }


def _usage(usage: Usage, num_reasoning: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _joined(pieces: Iterable[Columns]) -> bytes:
    """Return the logprobs of pieces as one list."""
    return b"[%b]" % b",".join(piece[0] for piece in pieces if piece[0])


def _without_bytes(pieces: Iterable[Columns]) -> list[Any]:
    """Return logprobs in the form of the text events."""
    entries: list[Any] = msgspec.json.decode(_joined(pieces))
    for entry in entries:
        for token in (entry, *entry["top_logprobs"]):
            del token["bytes"]
    return entries
