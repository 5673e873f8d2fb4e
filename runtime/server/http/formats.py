"""`Format`: the interface of an answer in the JSON of one API, whole and as the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from ...common.errors import QuireError
from ...common.types import OutputChunk, Usage
from ...engine.facade import NewParser
from .calls import Call
from .choices import Choice
from .logprobs import Vocabulary

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

TIMINGS = ("queue_ms", "prefill_ms", "decode_ms", "stall_ms")  # timings of `Usage`


class PromptSize(NamedTuple):
    """The tokens of a prompt, and how many of them the engine echoes."""

    num_tokens: int
    num_echoed: int = 0


class Format(Protocol):
    """The JSON of one answer, whole or as events. It receives every chunk of the answer's choices, in order."""

    id_prefix: bytes
    choices: list[Choice]
    prompt_sizes: Sequence[PromptSize]  # sizes of each prompt, before the first event
    held_bytes: int  # bytes of text that the last events of a stream repeat

    def __init__(self, call: Call, model: str, vocabulary: Vocabulary) -> None: ...

    def read_with(self, new_parser: NewParser | None) -> None:
        """Read each choice's text with a parser that `new_parser` makes, before its first chunk."""

    def whole(self, usage: Usage) -> bytes:
        """Return the whole answer from the chunks of its choices."""

    def unfinished(self, status: Status, error: QuireError | None) -> bytes | None:
        """Return the object of an unfinished or failed output; None if the API has no such object."""

    def opening(self) -> bytes:
        """Return the events before any generated text."""

    def events(self, index: int, chunk: OutputChunk) -> bytes:
        """Return the events of one chunk of a choice, which may be none."""

    def ending(self, usage: Usage) -> bytes:
        """Return the events after the last chunk."""


def num_reasoning_tokens(usage: Usage, choices: Sequence[Choice]) -> int:
    """Return the tokens of reasoning: by the engine, or by the parsers where the markers are not single tokens."""
    if usage.reasoning_tokens is not None:
        return usage.reasoning_tokens
    return sum(choice.num_reasoning_tokens for choice in choices)


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Return the total tokens of several prompts, and the longest time of each phase."""
    times: dict[str, Any] = {name: max((getattr(usage, name) for usage in usages), default=0.0) for name in TIMINGS}
    reasoning = [usage.reasoning_tokens for usage in usages if usage.reasoning_tokens is not None]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        reasoning_tokens=sum(reasoning) if reasoning else None,
        **times,
    )
