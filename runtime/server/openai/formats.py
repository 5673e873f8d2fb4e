"""The JSON of chat completions and of completions: whole, and as the events of a stream.

Each event is a per-request template filled with the chunk's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...common.errors import QuireError
from ...common.types import Delta, DeltaKind, OutputChunk, Usage
from ...engine.facade import NewParser
from ..http.calls import Call, call_id
from ..http.choices import Choice
from ..http.formats import TIMINGS, PromptSize, Status, num_reasoning_tokens
from ..http.logprobs import ChatLogprobs, Columns, CompletionLogprobs, Vocabulary
from ..http.request_cycle import END_OF_EVENT

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


class ChoiceFormat:
    """The base of chats and completions, whose answers are a list of choices. Implements `Format`."""

    id_prefix: bytes
    object_name: bytes
    chunk_name: bytes
    text_begin: bytes  # part before the text of a chunk
    text_end: bytes  # part after the text of a chunk
    no_text: bytes  # fields of a chunk without text
    held_bytes = 0

    def __init__(self, call: Call, model: str, vocabulary: Vocabulary) -> None:
        self._id = self.id_prefix.decode() + call.name
        self._is_call_named = call.is_call_named
        ids = b'"id":"%b","object":"' % self._id.encode()
        tier = b"" if call.service_tier is None else b',"service_tier":' + _encode(call.service_tier)
        created = b'","created":%d,"model":%b%b,"system_fingerprint":%b,"choices":[' % (
            call.created_s, _encode(model), tier, _encode(f"fp_{call.fingerprint}"),
        )  # fmt: skip
        self._head = b"{" + ids + self.object_name + created
        self._event_head = b"data: {" + ids + self.chunk_name + created
        self._include_usage = call.include_usage
        self._returns_timings = call.returns_timings
        self._event_end = (b'],"usage":null}' if call.include_usage else b"]}") + END_OF_EVENT
        self._shows_usage_so_far = call.shows_usage_so_far
        self._n = call.params.n
        self.prompt_sizes: Sequence[PromptSize] = ()
        self._choice_heads = [self._event_head + b'{"index":%d,' % index for index in range(call.num_choices)]
        self._text_heads = [head + self.text_begin for head in self._choice_heads]
        self._text_end = self.text_end + b',"logprobs":'
        self._choice_end = b',"finish_reason":null}'
        self._returns_token_ids = call.returns_token_ids
        self._shows_stop_reason = call.shows_stop_reason
        has_logprobs = call.params.logprobs is not None
        as_ids = call.shows_tokens_as_ids
        self.choices = [
            Choice(self._logprobs(vocabulary, as_ids) if has_logprobs else None) for _ in range(call.num_choices)
        ]

    def read_with(self, new_parser: NewParser | None) -> None:
        """See `Format.read_with`."""
        for choice in self.choices:
            choice.read_with(new_parser)

    def whole(self, usage: Usage) -> bytes:
        """See `Format.whole`."""
        choices = b",".join(
            self._whole_choice(index, choice)
            + (b"" if choice.prompt is None else b',"prompt_logprobs":' + choice.prompt.json())
            + self._token_ids(list(choice.token_ids))
            + self._stop_reason(choice)
            + b"}"
            for index, choice in enumerate(self.choices)
        )
        return self._head + choices + b'],"usage":' + self._usage_json(usage) + b"}"

    def unfinished(self, status: Status, error: QuireError | None) -> None:
        """Return None: a chat or a completion has no status."""

    def opening(self) -> bytes:
        """See `Format.opening`."""
        return b""

    def events(self, index: int, chunk: OutputChunk) -> bytes:
        """See `Format.events`."""
        choice = self.choices[index]
        deltas, piece = choice.read(chunk)
        events = b""
        if choice.parser is not None:
            events = self._delta_events(index, deltas, piece, chunk.token_ids)
        elif deltas or (piece is not None and any(piece)) or (self._returns_token_ids and chunk.token_ids):
            events = self._text_event(index, chunk.text, piece, chunk.token_ids)
        if chunk.finish_reason is not None:
            end = self.no_text + b',"logprobs":null,"finish_reason":"%b"' % self._finish_reason(choice)
            events += self._choice_heads[index] + end + self._stop_reason(chunk) + b"}" + self._end(index)
        return events

    def ending(self, usage: Usage) -> bytes:
        """Return the events after the last chunk: the usage if it was requested, and the end."""
        if not self._include_usage:
            return DONE
        return self._event_head + b'],"usage":' + self._usage_json(usage) + b"}" + END_OF_EVENT + DONE

    def _usage_json(self, usage: Usage) -> bytes:
        """Return OpenAI's `usage`, with the time of each phase if the request asks for it."""
        fields: dict[str, object] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens(usage, self.choices)},
        }
        if self._returns_timings:
            fields["timings"] = {name: round(getattr(usage, name), 3) for name in TIMINGS}
        return _encode(fields)

    def _delta_events(
        self, index: int, deltas: Sequence[Delta], piece: Columns | None, token_ids: Sequence[int]
    ) -> bytes:
        """Return the events of the deltas that a parser found in a chunk."""
        raise NotImplementedError

    def _finish_reason(self, choice: Choice) -> bytes:
        return choice.finish_reason.encode()

    def _end(self, index: int) -> bytes:
        """Return the end of an event of a choice, with the choice's tokens so far if the request asks for them."""
        return self._usage_end(index) if self._shows_usage_so_far else self._event_end

    def _usage_end(self, index: int) -> bytes:
        size = self.prompt_sizes[index // self._n]
        generated = max(0, self.choices[index].num_tokens - size.num_echoed)
        usage = {"prompt_tokens": size.num_tokens, "completion_tokens": generated}
        return b'],"usage":%b}' % _encode({**usage, "total_tokens": size.num_tokens + generated}) + END_OF_EVENT

    def _text_event(self, index: int, text: str, piece: Columns | None, token_ids: Sequence[int] = ()) -> bytes:
        form = self.choices[index].logprobs
        logprobs = b"null" if piece is None or form is None else form.join((piece,))
        ids = self._token_ids(token_ids) if self._returns_token_ids else b""
        end = self._usage_end(index) if self._shows_usage_so_far else self._event_end
        return b"".join((self._text_heads[index], _encode(text), self._text_end, logprobs, ids, self._choice_end, end))

    def _token_ids(self, token_ids: Sequence[int]) -> bytes:
        """Return vLLM's field of a choice, if the request asks for it."""
        return b',"token_ids":' + _encode(token_ids) if self._returns_token_ids else b""

    def _stop_reason(self, ended: Choice | OutputChunk) -> bytes:
        """Return vLLM's field of a choice that has ended, if the request has fields that OpenAI does not have."""
        return b',"stop_reason":' + _encode(ended.stop_reason) if self._shows_stop_reason else b""

    def _logprobs(self, vocabulary: Vocabulary, as_ids: bool) -> ChatLogprobs | CompletionLogprobs:
        raise NotImplementedError

    def _whole_choice(self, index: int, choice: Choice) -> bytes:
        """Return the fields of a choice, without the last bracket."""
        raise NotImplementedError


class ChatFormat(ChoiceFormat):
    """`chat.completion` and `chat.completion.chunk`."""

    id_prefix = b"chatcmpl-"
    object_name = b"chat.completion"
    chunk_name = b"chat.completion.chunk"
    text_begin = b'"delta":{"content":'
    text_end = b"}"
    no_text = b'"delta":{}'

    def opening(self) -> bytes:
        """Return the role of every choice, in order: openai-python appends to its list of choices."""
        content = b'""' if self.choices[0].parser is None else b"null"
        delta = b'"delta":{"role":"assistant","content":%b,"refusal":null}' % content
        role = delta + b',"logprobs":null,"finish_reason":null}'
        return b"".join(head + role + self._end(index) for index, head in enumerate(self._choice_heads))

    def _delta_events(
        self, index: int, deltas: Sequence[Delta], piece: Columns | None, token_ids: Sequence[int]
    ) -> bytes:
        events = []
        call = self.choices[index].num_calls - sum(delta.kind == "call" for delta in deltas) - 1
        if not deltas and self._returns_token_ids and token_ids:  # no text, but token ids: the content may stay null
            shown = self.no_text + b',"logprobs":null,"finish_reason":null' + self._token_ids(token_ids)
            return self._choice_heads[index] + shown + b"}" + self._end(index)
        for kind, text in deltas:
            call += kind == "call"
            if kind == "content":
                events.append(self._text_event(index, text, piece, token_ids))
                piece = None
            else:
                delta = _reasoning(text) if kind == "reasoning" else self._call_delta(index, call, kind, text)
                shown = b'"delta":%b,"logprobs":null,"finish_reason":null' % _encode(delta)
                events.append(self._choice_heads[index] + shown + self._token_ids(token_ids) + b"}" + self._end(index))
            token_ids = ()
        return b"".join(events)

    def _call_delta(self, index: int, call: int, kind: DeltaKind, text: str) -> dict[str, Any]:
        """Return the beginning of a call, or more of its arguments. Clients concatenate, so each text is sent once."""
        if kind == "arguments":
            return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}
        begun = {"id": call_id(self._id, index, call), "type": "function", "function": {"name": text, "arguments": ""}}
        return {"tool_calls": [{"index": call, **begun}]}

    def _finish_reason(self, choice: Choice) -> bytes:
        """Return `tool_calls` after calls, but `stop` after a call of the requested tool, as OpenAI does."""
        if choice.num_calls and choice.finish_reason == "stop" and not self._is_call_named:
            return b"tool_calls"
        return choice.finish_reason.encode()

    def _logprobs(self, vocabulary: Vocabulary, as_ids: bool) -> ChatLogprobs:
        return ChatLogprobs(vocabulary, as_ids=as_ids)

    def _whole_choice(self, index: int, choice: Choice) -> bytes:
        content = "".join(choice.texts)
        has_content = content or choice.parser is None
        message: dict[str, Any] = {"role": "assistant", "content": content if has_content else None, "refusal": None}
        if reasoning := "".join(run.text for run in choice.runs if run.kind == "reasoning"):
            message |= _reasoning(reasoning)
        if calls := [run for run in choice.runs if run.kind == "call"]:
            message["tool_calls"] = [
                {
                    "id": call_id(self._id, index, number),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.text},
                }
                for number, call in enumerate(calls)
            ]
        form = b'{"index":%d,"message":%b,"logprobs":%b,"finish_reason":"%b"'
        return form % (index, _encode(message), choice.whole_logprobs(), self._finish_reason(choice))


class CompletionFormat(ChoiceFormat):
    """`text_completion`, whole and as a chunk."""

    id_prefix = b"cmpl-"
    object_name = chunk_name = b"text_completion"
    text_begin = b'"text":'
    text_end = b""
    no_text = b'"text":""'

    def opening(self) -> bytes:
        """Return the echo of each choice that begins with its prompt."""
        return b"".join(
            self._text_event(index, *choice.echoed)
            for index, choice in enumerate(self.choices)
            if choice.echoed is not None
        )

    def _logprobs(self, vocabulary: Vocabulary, as_ids: bool) -> CompletionLogprobs:
        return CompletionLogprobs(vocabulary, as_ids=as_ids)

    def _whole_choice(self, index: int, choice: Choice) -> bytes:
        form = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":"%b"'
        text = _encode("".join(choice.texts))
        return form % (index, text, choice.whole_logprobs(), choice.finish_reason.encode())


def _reasoning(text: str) -> dict[str, str]:
    """Return reasoning under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}
