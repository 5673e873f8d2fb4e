"""The JSON of Ollama's answers: whole, and as the lines of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from ...common.errors import QuireError
from ...common.types import Delta, OutputChunk, Usage
from ...engine.facade import EmbeddedTexts, NewParser
from ..http.calls import Call
from ..http.choices import Choice
from ..http.formats import PromptSize, Status
from ..http.logprobs import ChatLogprobs, Vocabulary, shown_in_delta

NS_PER_MS = 1_000_000
HELD_ROW_BYTES = 64  # bytes of a vector in an answer, besides the JSON

_encode = msgspec.json.encode


class LineFormat:
    """The answer of a chat, or of a prompt: its JSON has a `message`, or a `response`. Implements `Format`.

    A call is one line, at its end: its arguments are an object. A call whose arguments were cut is left out.
    """

    id_prefix = b""
    held_bytes = 0

    def __init__(self, call: Call, model: str, vocabulary: Vocabulary, *, is_chat: bool) -> None:
        self._started_ns = time.monotonic_ns()
        self._is_chat = is_chat
        self._vocabulary = vocabulary
        self._has_logprobs = call.params.logprobs is not None
        self._choice = Choice(ChatLogprobs(vocabulary) if self._has_logprobs else None)
        self.choices = [self._choice]
        self.prompt_sizes: Sequence[PromptSize] = ()
        self._head = {"model": model, "created_at": time_text(call.created_s)}
        begin = b'"message":{"role":"assistant","content":' if is_chat else b'"response":'
        self._text_head = _encode(self._head)[:-1] + b"," + begin
        self._text_end = (b"}" if is_chat else b"") + b',"done":false'
        self._call_name = ""
        self._arguments: list[str] = []  # texts of the arguments of the open call

    def read_with(self, new_parser: NewParser | None) -> None:
        """See `Format.read_with`."""
        self._choice.read_with(new_parser)

    def whole(self, usage: Usage) -> bytes:
        """Return the whole answer from the chunks of its choice."""
        choice = self._choice
        thinking = "".join(run.text for run in choice.runs if run.kind == "reasoning")
        calls = [call for run in choice.runs if run.kind == "call" and (call := _call(run.name, run.text)) is not None]
        body = self._body("".join(choice.texts), thinking, calls)
        if self._has_logprobs:
            body["logprobs"] = _shown_logprobs(choice)
        return _encode({**self._head, **body, **self._end(usage)})

    def unfinished(self, status: Status, error: QuireError | None) -> None:
        """Return None: an answer has no status."""

    def opening(self) -> bytes:
        """Return no lines: the first one has text."""
        return b""

    def events(self, index: int, chunk: OutputChunk) -> bytes:
        """Return the lines of one chunk."""
        deltas, _ = self._choice.read(chunk)
        logprobs = shown_in_delta(self._choice.shown, self._vocabulary) if self._has_logprobs else []
        lines = [self._line(each, logprobs) for each in deltas]
        if chunk.finish_reason is not None:
            lines.append(self._close_call())
        return b"".join(lines)

    def ending(self, usage: Usage) -> bytes:
        """Return the last line."""
        return _encode({**self._head, **self._body("", "", []), **self._end(usage)}) + b"\n"

    # Lines

    def _line(self, delta: Delta, logprobs: list[dict[str, Any]]) -> bytes:
        """Return the line of a delta, after the line of a call that it ends. Logprobs are taken by the first text."""
        kind, text = delta
        if kind == "arguments":
            self._arguments.append(text)
            return b""
        closed = self._close_call()
        if kind == "call":
            self._call_name = text
            return closed
        if kind == "reasoning":
            return closed + _encode({**self._head, **self._body("", text, []), "done": False}) + b"\n"
        shown = b""
        if logprobs:
            shown = b',"logprobs":' + _encode(logprobs)
            logprobs.clear()
        return b"%b%b%b%b%b}\n" % (closed, self._text_head, _encode(text), self._text_end, shown)

    def _close_call(self) -> bytes:
        """Return the line of the open call, if there is one."""
        if not self._call_name:
            return b""
        call = _call(self._call_name, "".join(self._arguments))
        self._call_name = ""
        self._arguments.clear()
        if call is None:
            return b""
        return _encode({**self._head, **self._body("", "", [call]), "done": False}) + b"\n"

    def _body(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {"response": text, **more}
        if calls:
            more["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": text, **more}}

    def _end(self, usage: Usage) -> dict[str, Any]:
        return {
            "done": True,
            "done_reason": self._choice.finish_reason,
            "total_duration": time.monotonic_ns() - self._started_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(usage.prefill_ms * NS_PER_MS),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(usage.decode_ms * NS_PER_MS),
        }


class VectorsForm:
    """The answer of `/api/embed`, or of `/api/embeddings`, which has one vector. Implements `EmbeddingForm`."""

    advice = "send fewer texts per request"

    def __init__(self, model: str, *, is_one: bool) -> None:
        self._started_ns = time.monotonic_ns()
        self._model = model
        self._is_one = is_one
        self._rows: list[bytes] = []

    def add(self, chunk: EmbeddedTexts) -> int:
        """See `EmbeddingForm.add`."""
        rows = [_encode(row.tolist()) for row in chunk.values]
        self._rows += rows
        return sum(map(len, rows)) + HELD_ROW_BYTES * len(rows)

    def whole(self, prompt_tokens: int) -> bytes:
        """See `EmbeddingForm.whole`."""
        rows = [msgspec.Raw(row) for row in self._rows]
        if self._is_one:
            return _encode({"embedding": rows[0]})
        return _encode(
            {
                "model": self._model,
                "embeddings": rows,
                "total_duration": time.monotonic_ns() - self._started_ns,
                "load_duration": 0,
                "prompt_eval_count": prompt_tokens,
            }
        )


def time_text(seconds: float) -> str:
    """Return a time as the API writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _call(name: str, arguments: str) -> dict[str, Any] | None:
    """Return a whole call; None if the output ended within its arguments."""
    try:
        msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return None
    return {"function": {"name": name, "arguments": msgspec.Raw(arguments.encode())}}


def _shown_logprobs(choice: Choice) -> list[dict[str, Any]]:
    """Return the logprobs of a whole answer without bytes, as the lines have them."""
    tokens = msgspec.json.decode(choice.whole_logprobs())["content"]
    for token in tokens:
        for each in (token, *token["top_logprobs"]):
            del each["bytes"]
    return list(tokens)
