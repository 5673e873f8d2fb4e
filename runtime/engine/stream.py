"""`Stream`: the chunks of one accepted request on their way from the engine to its reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from ...scheduler import AdmissionEstimate
from ..common.errors import QuireError
from ..common.types import OutputChunk
from .facade import NewParser
from .text import OutputParser


class Stream:
    """The output of one accepted request: written by the engine, read once, by `deliver` or by iterating.

    Implements `facade.Generation`. `put` takes each item but the last one, for which the engine calls `end`. Neither
    waits, so a slow reader cannot delay a step; an iterator's queue holds at most the request's own `n * max_tokens`
    chunks.
    """

    admission: AdmissionEstimate  # set before `Engine.submit` returns the stream

    def __init__(
        self,
        prompt_token_ids: tuple[int, ...],
        seed: int,
        cancel: Callable[[], None],
        new_parser: NewParser | None = None,
        *,
        reads_output: bool = False,
        has_text: Callable[[Sequence[int]], bool] = bool,
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.seed = seed
        self.new_parser = new_parser
        self._has_text = has_text  # whether tokens add text
        self._parsers = OutputParsers(new_parser) if reads_output and new_parser is not None else None
        self._cancel = cancel
        self._on_prefill: Callable[[int], None] | None = None
        self._early: deque[OutputChunk | QuireError] = deque()  # items that came before there was a reader
        self._receive: Callable[[OutputChunk | QuireError], object] = self._early.append
        self.put: Callable[[OutputChunk], object] = self._reading(self._receive)
        self._has_ended = False
        self._has_receiver = False

    @property
    def prompt_has_text(self) -> bool:
        """Whether any token of the prompt adds text."""
        return self._has_text(self.prompt_token_ids)

    def end(self, item: OutputChunk | QuireError, *, is_read: bool = False) -> None:
        """Pass on the last chunk, which has the usage, or the error. Only the first call has an effect.

        `is_read`: a parser has read all of the output's text, including the text that it held back.
        """
        if self._has_ended:
            return
        self._has_ended = True
        put = self.put
        self.put = _ignore
        if is_read or isinstance(item, QuireError):
            self._receive(item)
        else:
            put(item)

    def put_read(self, chunk: OutputChunk) -> None:
        """Pass on a chunk whose text a parser has read."""
        self._receive(chunk)

    def go_on(self, choice: int, parser: OutputParser) -> None:
        """Read an output with a parser that has already read the beginning of its text."""
        assert self._parsers is not None, "the stream reads outputs"
        self._parsers.by_choice[choice] = parser

    def _reading(self, receive: Callable[[OutputChunk | QuireError], object]) -> Callable[[OutputChunk], object]:
        """Return the function that passes chunks to `receive`: itself, unless the stream reads outputs."""
        parsers = self._parsers
        return receive if parsers is None else lambda chunk: receive(parsers.read(chunk))

    def deliver(self, receive: Callable[[OutputChunk | QuireError], object]) -> None:
        """See `facade.Generation.deliver`."""
        if self._has_receiver:
            raise RuntimeError("a stream can be read only once")
        self._has_receiver = True
        while self._early:
            receive(self._early.popleft())
        self._receive = receive
        if not self._has_ended:
            self.put = self._reading(receive)

    def watch_prefill(self, callback: Callable[[int], None]) -> None:
        """See `facade.Generation.watch_prefill`."""
        self._on_prefill = callback

    def note_prefill(self, num_tokens: int) -> None:
        """Report that the first `num_tokens` tokens of the prompt are computed and the rest is not."""
        if self._on_prefill is not None:
            self._on_prefill(min(num_tokens, len(self.prompt_token_ids)))

    def cancel(self) -> None:
        """See `facade.Generation.cancel`."""
        if not self._has_ended:
            self._cancel()

    async def __aiter__(self) -> AsyncGenerator[OutputChunk, None]:
        items: asyncio.Queue[OutputChunk | QuireError] = asyncio.Queue()
        self.deliver(items.put_nowait)
        try:
            while True:
                item = await items.get()
                if isinstance(item, QuireError):
                    try:
                        raise item
                    finally:
                        del item  # the error's traceback holds this frame
                yield item
                if item.usage is not None:
                    return
        finally:
            self.cancel()


class OutputParsers:
    """The parsers of a request's outputs, each made for the first chunk of its output."""

    def __init__(self, new_parser: NewParser) -> None:
        self.by_choice: dict[int, OutputParser] = {}
        self._new_parser = new_parser

    def read(self, chunk: OutputChunk) -> OutputChunk:
        """Return the chunk with the answer as its text, and with reasoning and tool calls as deltas."""
        if (parser := self.by_choice.get(chunk.choice)) is None:
            parser = self.by_choice[chunk.choice] = self._new_parser()
        found = parser.feed(chunk.text)
        if chunk.finish_reason is not None:
            found += parser.finish(is_cut=chunk.finish_reason != "stop")
        text = "".join(delta.text for delta in found if delta.kind == "content")
        deltas = tuple(delta for delta in found if delta.kind != "content")
        return msgspec.structs.replace(chunk, text=text, deltas=deltas or None)


def _ignore(_: OutputChunk) -> None:
    """Drop a chunk after the end."""
