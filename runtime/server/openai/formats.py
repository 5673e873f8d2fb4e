"""The JSON of chat completions and of completions: whole, and as the events of a stream.

An event is bytes that are made once per request, around the text of the chunk.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec

from ...common.types import OutputChunk, Usage
from .fields import Call
from .logprobs import ChatLogprobs, Columns, CompletionLogprobs, Vocabulary

DONE = b"data: [DONE]\n\n"
END_OF_EVENT = b"\n\n"

_encode = msgspec.json.encode


class Choice:
    """One choice as it grows: what a whole answer needs of it, and its logprobs."""

    def __init__(self, logprobs: ChatLogprobs | CompletionLogprobs | None) -> None:
        self.logprobs = logprobs
        self.texts: list[str] = []
        self.columns: list[Columns] = []
        self.finish_reason = ""

    def piece(self, chunk: OutputChunk) -> Columns | None:
        """Return the chunk's logprobs; None if the request asks for none."""
        if self.logprobs is None or chunk.logprobs is None:
            return None
        return self.logprobs.piece(chunk.logprobs)

    def add(self, chunk: OutputChunk) -> int:
        """Keep the chunk for the whole answer, and return about how many bytes it takes there."""
        self.texts.append(chunk.text)
        self.finish_reason = chunk.finish_reason or ""
        piece = self.piece(chunk)
        if piece is not None:
            self.columns.append(piece)
        return len(chunk.text) + sum(map(len, piece or ()))

    def echo(self, text: str, first: int | None) -> Columns | None:
        """Begin with the text of the prompt, or of its first token, whose id is `first`. Return its logprobs."""
        piece = (
            self.logprobs.first(first) if isinstance(self.logprobs, CompletionLogprobs) and first is not None else None
        )
        self.texts.append(text)
        self.columns += [] if piece is None else [piece]
        return piece

    def whole_logprobs(self) -> bytes:
        return b"null" if self.logprobs is None else self.logprobs.join(self.columns)


class Format:
    """The form of the answer to one request. Subclasses say what differs between chats and completions."""

    id_prefix: bytes
    object_name: bytes
    chunk_name: bytes

    def __init__(self, call: Call, model: str, vocabulary: Vocabulary) -> None:
        ids = b'"id":"%b%b","object":"' % (self.id_prefix, secrets.token_hex(16).encode())
        created = b'","created":%d,"model":%b,"choices":[' % (int(time.time()), _encode(model))
        self._head = b"{" + ids + self.object_name + created
        self._event_head = b"data: {" + ids + self.chunk_name + created
        self._include_usage = call.include_usage
        self._event_end = (b'],"usage":null}' if call.include_usage else b"]}") + END_OF_EVENT
        self._choice_heads = [self._event_head + b'{"index":%d,' % index for index in range(call.num_choices)]
        has_logprobs = call.params.logprobs is not None
        self.choices = [Choice(self._logprobs(vocabulary) if has_logprobs else None) for _ in range(call.num_choices)]

    def whole(self, usage: Usage) -> bytes:
        """Return the whole answer, from the chunks that its choices were given."""
        choices = b",".join(self._whole_choice(index, choice) for index, choice in enumerate(self.choices))
        return self._head + choices + b'],"usage":' + usage_json(usage) + b"}"

    def opening(self) -> bytes:
        """Return the events before any text."""
        return b""

    def events(self, index: int, chunk: OutputChunk) -> bytes:
        """Return the events of one chunk of a choice; nothing if it shows nothing."""
        piece = self.choices[index].piece(chunk)
        events = b""
        if chunk.text or (piece is not None and any(piece)):
            events = self._text_event(index, chunk.text, piece)
        if chunk.finish_reason is not None:
            end = self._no_delta() + b',"logprobs":null,"finish_reason":"%b"}' % chunk.finish_reason.encode()
            events += self._choice_heads[index] + end + self._event_end
        return events

    def echo_event(self, index: int, text: str, first: int | None) -> bytes:
        """Return the event with which a choice begins with its prompt; see `Choice.echo`."""
        return self._text_event(index, text, self.choices[index].echo(text, first))

    def ending(self, usage: Usage) -> bytes:
        """Return the events after the last chunk: the usage if it was asked for, and the end."""
        if not self._include_usage:
            return DONE
        return self._event_head + b'],"usage":' + usage_json(usage) + b"}" + END_OF_EVENT + DONE

    def _text_event(self, index: int, text: str, piece: Columns | None) -> bytes:
        form = self.choices[index].logprobs
        logprobs = b"null" if piece is None or form is None else form.join((piece,))
        shown = self._delta(_encode(text)) + b',"logprobs":' + logprobs + b',"finish_reason":null}'
        return self._choice_heads[index] + shown + self._event_end

    def _logprobs(self, vocabulary: Vocabulary) -> ChatLogprobs | CompletionLogprobs:
        raise NotImplementedError

    def _whole_choice(self, index: int, choice: Choice) -> bytes:
        raise NotImplementedError

    def _delta(self, text: bytes) -> bytes:
        raise NotImplementedError

    def _no_delta(self) -> bytes:
        raise NotImplementedError


class ChatFormat(Format):
    """`chat.completion` and `chat.completion.chunk`."""

    id_prefix = b"chatcmpl-"
    object_name = b"chat.completion"
    chunk_name = b"chat.completion.chunk"

    def opening(self) -> bytes:
        """Return the role of every choice, in order: openai-python appends to its list of choices."""
        role = b'"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}'
        return b"".join(head + role + self._event_end for head in self._choice_heads)

    def _logprobs(self, vocabulary: Vocabulary) -> ChatLogprobs:
        return ChatLogprobs(vocabulary)

    def _whole_choice(self, index: int, choice: Choice) -> bytes:
        message = b'{"role":"assistant","content":%b,"refusal":null}' % _encode("".join(choice.texts))
        form = b'{"index":%d,"message":%b,"logprobs":%b,"finish_reason":"%b"}'
        return form % (index, message, choice.whole_logprobs(), choice.finish_reason.encode())

    def _delta(self, text: bytes) -> bytes:
        return b'"delta":{"content":' + text + b"}"

    def _no_delta(self) -> bytes:
        return b'"delta":{}'


class CompletionFormat(Format):
    """`text_completion`, whole and as a chunk."""

    id_prefix = b"cmpl-"
    object_name = chunk_name = b"text_completion"

    def _logprobs(self, vocabulary: Vocabulary) -> CompletionLogprobs:
        return CompletionLogprobs(vocabulary)

    def _whole_choice(self, index: int, choice: Choice) -> bytes:
        form = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":"%b"}'
        text = _encode("".join(choice.texts))
        return form % (index, text, choice.whole_logprobs(), choice.finish_reason.encode())

    def _delta(self, text: bytes) -> bytes:
        return b'"text":' + text

    def _no_delta(self) -> bytes:
        return b'"text":""'


def usage_json(usage: Usage) -> bytes:
    """Return OpenAI's `usage`."""
    return _encode(
        {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
    )


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Return the tokens of several prompts together."""
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
    )
