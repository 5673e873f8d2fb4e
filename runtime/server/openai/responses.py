"""`/v1/responses` without storage: its fields as a request to the engine, its object, and its numbered events."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from ...common.prompts import shown
from ...common.types import OutputChunk, SamplingParams, Usage
from ...engine.facade import EngineInfo, GenerateRequest
from .errors import BadRequest
from .fields import COMMON, HINTS, UNSUPPORTED, Call, Fields, checked_messages, request_fields, sampling_fields
from .formats import Choice, Format
from .logprobs import Vocabulary

FIELDS = COMMON - {"n", "max_tokens", "logprobs", "logit_bias", "stream_options"} | HINTS
FIELDS |= {"input", "instructions", "max_output_tokens", "text"}
UNSUPPORTED_HERE: dict[str, tuple[object, ...]] = {
    **UNSUPPORTED,
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "parallel_tool_calls": (True, False),
    "n": (1,),
    "max_tokens": (),
    "logprobs": (),
    "logit_bias": (),
    "stream_options": ({},),
    "top_logprobs": (0,),
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "truncation": ("disabled",),
}
RESPONSE_KNOWN = FIELDS | UNSUPPORTED_HERE.keys()
TEXT_FORMAT = {"type": "text"}
TEXT_PARTS = ("input_text", "output_text", "text")

_encode = msgspec.json.encode


def response_call(fields: Fields, info: EngineInfo, tenant: str) -> Call:
    """Return the call of a response. Raises InvalidRequest."""
    fields.check_supported(FIELDS, UNSUPPORTED_HERE)
    messages = checked_messages(_messages(fields), "input")
    has_limit = "max_output_tokens" in fields.values
    _use_text_format(fields)
    sampling = sampling_fields(fields, info)
    sampling["max_tokens"] = fields.take("max_output_tokens", int, info.max_model_len)
    request = GenerateRequest(
        prompt=None,
        messages=messages,
        sampling_params=SamplingParams(**sampling),
        tenant=tenant,
        fit_max_tokens=not has_limit,
        **request_fields(fields),
    )
    return Call((request,), fields.take("stream", bool, False), repeated=_repeated(fields))


def _use_text_format(fields: Fields) -> None:
    """Give `text.format` the name and form that it has in chats. Raises BadRequest."""
    text = Fields(fields.take("text", dict, {}))
    given = text.take("format", dict, TEXT_FORMAT)
    if other := sorted(text.values.keys() - {"format"}):
        raise BadRequest(f"text.{other[0]} is not supported; leave it out", f"text.{other[0]}")
    match given:
        case {"type": "json_schema", "schema": schema}:
            fields.values["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        case {"type": "text" | "json_object" as kind}:
            fields.values["response_format"] = {"type": kind}
        case _:
            raise BadRequest(
                'text.format must be {"type": "text"}, {"type": "json_object"} or '
                f'{{"type": "json_schema", "name": …, "schema": {{…}}}}, not {shown(given)}',
                "text.format",
            )


def _messages(fields: Fields) -> list[Any]:
    """Return instructions and input as the messages of a chat."""
    instructions = fields.take("instructions", str, "")
    messages: list[Any] = [{"role": "system", "content": instructions}] if instructions else []
    given = fields.values.get("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise BadRequest(f"input must be text or a list of messages, not {shown(given)}", "input")
    return messages + [_message(item, f"input[{index}]") for index, item in enumerate(given)]


def _message(item: object, where: str) -> dict[str, Any]:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        raise BadRequest(f"{where} must be a message; items of other types are not supported", "input")
    content = item.get("content")
    if isinstance(content, list):
        content = [
            {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in TEXT_PARTS else part
            for part in content
        ]
    return {"role": item.get("role"), "content": content}


def _repeated(fields: Fields) -> dict[str, Any]:
    """Return the request's fields that its response repeats."""
    names = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user")
    text = {"format": fields.values.get("text", {}).get("format") or TEXT_FORMAT}
    return {**{name: fields.values.get(name) for name in names}, "text": text}


class ResponseFormat(Format):
    """The `response` object and its events.

    An event's `sequence_number` follows from the tokens alone: each chunk with text is one event.
    """

    def __init__(self, call: Call, model: str, vocabulary: Vocabulary) -> None:
        self.choices = [Choice(None)]
        self._model = model
        self._id = f"resp_{secrets.token_hex(16)}"
        self._message_id = f"msg_{secrets.token_hex(16)}"
        self._created = int(time.time())
        params = call.params
        self._repeated = {**call.repeated, "temperature": params.temperature, "top_p": params.top_p}
        self._repeated["metadata"] = call.repeated.get("metadata") or {}
        self._num_events = 0
        delta = {"item_id": self._message_id, "output_index": 0, "content_index": 0, "logprobs": []}
        self._delta_head = (
            b"event: response.output_text.delta\ndata: " + _encode({"type": "response.output_text.delta", **delta})[:-1]
        )

    def whole(self, usage: Usage) -> bytes:
        """Return the object of the finished response."""
        return _encode(self._response(usage))

    def opening(self) -> bytes:
        """Return the events before any text."""
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        started = self._response(None)
        return b"".join(
            (
                self._event("response.created", response=started),
                self._event("response.in_progress", response=started),
                self._event("response.output_item.added", output_index=0, item=self._message("in_progress", [])),
                self._event("response.content_part.added", **place, part=_part("")),
            )
        )

    def events(self, index: int, chunk: OutputChunk) -> bytes:
        """Return the event of a chunk, and keep its text for the events at the end."""
        self.choices[index].add(chunk)
        if not chunk.text:
            return b""
        number = self._num_events
        self._num_events += 1
        return self._delta_head + b',"sequence_number":%d,"delta":%b}\n\n' % (number, _encode(chunk.text))

    def ending(self, usage: Usage) -> bytes:
        """Return the events after the text."""
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        response = self._response(usage)
        text, message = "".join(self.choices[0].texts), response["output"][0]
        name = "response.completed" if response["status"] == "completed" else "response.incomplete"
        return b"".join(
            (
                self._event("response.output_text.done", **place, text=text, logprobs=[]),
                self._event("response.content_part.done", **place, part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=message),
                self._event(name, response=response),
            )
        )

    def _event(self, name: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (
            name.encode(),
            _encode({"type": name, "sequence_number": number, **fields}),
        )

    def _message(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {"id": self._message_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, usage: Usage | None) -> dict[str, Any]:
        """Return the object, of a response that has ended if it has `usage`."""
        is_cut = self.choices[0].finish_reason == "length"
        status = "in_progress" if usage is None else "incomplete" if is_cut else "completed"
        text = "".join(self.choices[0].texts)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": [] if usage is None else [self._message(status, [_part(text)])],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            **self._repeated,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
