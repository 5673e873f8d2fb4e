"""The JSON of a message: whole, and as the events of a stream."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from ...common.errors import QuireError
from ...common.types import Delta, OutputChunk, Usage
from ...engine.facade import NewParser
from ..http.calls import Call, call_id
from ..http.choices import Choice, Run
from ..http.formats import PromptSize, Status, num_reasoning_tokens
from ..http.logprobs import Vocabulary

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_encode = msgspec.json.encode


class MessageFormat:
    """A message and its events. Implements `Format`.

    Each run of thinking, of text, and each call is a block of its own.
    """

    id_prefix = b"msg_"
    held_bytes = 0

    def __init__(self, call: Call, model: str, vocabulary: Vocabulary) -> None:
        self._id = f"msg_{call.name}"
        self._model = model
        self._max_tokens = call.params.max_tokens
        self._page_size = call.cached_page_size
        self._choice = Choice(None)
        self.choices = [self._choice]
        self.prompt_sizes: Sequence[PromptSize] = ()
        self._num_blocks = 0
        self._num_calls = 0  # calls in events
        self._block = ""  # type of the open block
        self._delta_head = b""  # beginning of the events of the open block
        self._digest = hashlib.sha256()  # digest of the open block of thinking

    def read_with(self, new_parser: NewParser | None) -> None:
        """See `Format.read_with`."""
        self._choice.read_with(new_parser)

    def whole(self, usage: Usage) -> bytes:
        """Return the message."""
        reason, stop = self._stop_reason()
        shown = {"stop_reason": reason, "stop_sequence": stop}
        counted = {**self._input_tokens(usage), "service_tier": "standard", **self._output_tokens(usage)}
        return _encode(self._message(self._content(), counted) | shown)

    def unfinished(self, status: Status, error: QuireError | None) -> None:
        """Return None: a message has no status."""

    def opening(self) -> bytes:
        """Return the events before any generated text."""
        usage = {
            "input_tokens": sum(each.num_tokens for each in self.prompt_sizes),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
            "service_tier": "standard",
        }
        return _event("message_start", message=self._message([], usage)) + PING

    def events(self, index: int, chunk: OutputChunk) -> bytes:
        """Return the events of one chunk."""
        deltas, _ = self._choice.read(chunk)
        return b"".join([self._delta_event(each) for each in deltas])

    def ending(self, usage: Usage) -> bytes:
        """Return the events after the last chunk."""
        reason, stop = self._stop_reason()
        return b"".join(
            (
                self._close(),
                _event(
                    "message_delta",
                    delta={"stop_reason": reason, "stop_sequence": stop},
                    usage={**self._input_tokens(usage), **self._output_tokens(usage)},
                ),
                _event("message_stop"),
            )
        )

    # Events of blocks

    def _delta_event(self, delta: Delta) -> bytes:
        kind, text = delta
        if kind == "call":
            call = self._call(self._num_calls, text)
            self._num_calls += 1
            return self._close() + self._open("tool_use", call, "input_json_delta", "partial_json")
        opened = b""
        if kind == "content" and self._block != "text":
            opened = self._close() + self._open("text", {"type": "text", "text": ""}, "text_delta", "text")
        elif kind == "reasoning" and self._block != "thinking":
            thinking = {"type": "thinking", "thinking": "", "signature": ""}
            opened = self._close() + self._open("thinking", thinking, "thinking_delta", "thinking")
            self._digest = hashlib.sha256()
        if kind == "reasoning":
            self._digest.update(text.encode())
        return b"%b%b%b}}\n\n" % (opened, self._delta_head, _encode(text))

    def _open(self, block: str, content: dict[str, Any], kind: str, field: str) -> bytes:
        index = self._num_blocks
        self._num_blocks += 1
        self._block = block
        self._delta_head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
            % (index, kind.encode(), field.encode())
        )
        return _event("content_block_start", index=index, content_block=content)

    def _close(self) -> bytes:
        """Return the end of the open block, if there is one."""
        if not self._block:
            return b""
        index = self._num_blocks - 1
        end = _event("content_block_stop", index=index)
        if self._block == "thinking":
            signed = {"type": "signature_delta", "signature": self._digest.hexdigest()}
            end = _event("content_block_delta", index=index, delta=signed) + end
        self._block = ""
        return end

    # The message

    def _message(self, content: list[Any], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _content(self) -> list[Any]:
        if self._choice.parser is None:
            text = "".join(self._choice.texts)
            return [{"type": "text", "text": text}] if text else []
        calls = itertools.count()
        return [
            self._call(next(calls), run.name) | {"input": _arguments(run.text)} if run.kind == "call" else _block(run)
            for run in self._choice.runs
        ]

    def _call(self, index: int, name: str) -> dict[str, Any]:
        return {"type": "tool_use", "id": f"toolu_{call_id(self._id, 0, index)}", "name": name, "input": {}}

    def _stop_reason(self) -> tuple[str, str | None]:
        """Return the reason of the end, and the stop sequence that was found."""
        choice = self._choice
        if choice.finish_reason == "length":
            is_full = choice.num_tokens < self._max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens", None
        if choice.num_calls:
            return "tool_use", None
        if isinstance(choice.stop_reason, str):
            return "stop_sequence", choice.stop_reason
        return "end_turn", None

    def _input_tokens(self, usage: Usage) -> dict[str, int]:
        """Return the tokens of the prompt: read from the cache, kept in it by a breakpoint, and others."""
        total = usage.prompt_tokens
        kept = total - total % self._page_size if self._page_size else 0
        created = max(0, kept - usage.cached_tokens)
        return {
            "input_tokens": total - created - usage.cached_tokens,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": usage.cached_tokens,
        }

    def _output_tokens(self, usage: Usage) -> dict[str, Any]:
        details = {"thinking_tokens": num_reasoning_tokens(usage, self.choices)}
        return {"output_tokens": usage.completion_tokens, "output_tokens_details": details}


def _block(run: Run) -> dict[str, str]:
    """Return the block of a run of text or of thinking."""
    text = run.text
    if run.kind == "content":
        return {"type": "text", "text": text}
    return {"type": "thinking", "thinking": text, "signature": hashlib.sha256(text.encode()).hexdigest()}


def _arguments(text: str) -> Any:
    """Return the arguments of a call as they were written; an empty object if the output ended within them."""
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return msgspec.Raw(text.encode())


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **fields}))
