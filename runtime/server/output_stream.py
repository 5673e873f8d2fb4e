"""One request as one connection sees it: its source's chunks as frames, as fast as its credit allows.

It must not know where the chunks come from, the engine or what was kept of it. One invariant: the engine never waits
for a reader; with `credit`, TOKENS leave while it is above zero, so that it is overdrawn by less than one chunk.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec

from ...scheduler import AdmissionEstimate
from ..common.errors import DeadlineExceeded, GenerationFailed
from ..common.types import OutputChunk
from ..protocol.frames import Done, Progress
from .convert import accepted_frame, done_frame, tokens_frame
from .monitoring import CancelCause
from .send_buffer import SendBuffer


class Chunks(Protocol):
    @property
    def admission(self) -> AdmissionEstimate: ...
    def __aiter__(self) -> AsyncIterator[OutputChunk]: ...


class Source(Protocol):
    """A request in the engine (`LiveRequest`), or a follower of a kept one (`Subscriber`)."""

    generated: int  # tokens of all choices, counted by whoever iterates
    on_prefill: Callable[[int, int], None] | None  # gets computed and prompt tokens

    async def accepted(self) -> Chunks: ...
    def cancel(self, cause: CancelCause) -> None:
        """The client wants no more of it. Its iteration ends soon."""

    def leave(self, cause: CancelCause) -> None:
        """The client's connection is lost. Its iteration ends soon."""

    def end(self) -> None:
        """Nobody iterates any more. Idempotent."""


class OutputStream:
    """`run` it in a task. `paced`: its chunks may come faster than the peer can read, so it waits for the buffer."""

    def __init__(
        self,
        request_id: int,
        source: Source,
        send_buffer: SendBuffer,
        *,
        credit: int | None,
        credit_timeout_ms: int,
        paced: bool,
        progress: bool,
    ) -> None:
        self.source = source
        self._request_id = request_id
        self._send_buffer = send_buffer
        self._credit = math.inf if credit is None else credit
        self._credit_timeout_ms = credit_timeout_ms
        self._paced = paced
        self._credited = asyncio.Event()
        self._unwanted = False
        self._progress = progress

    async def run(self) -> Done:
        """Send all but the last frame, and return that one. Raises what ended the request otherwise."""
        chunks = await self.source.accepted()
        self._send_buffer.send(accepted_frame(self._request_id, chunks.admission))
        if self._progress:
            self.source.on_prefill = self._send_progress
        try:
            return await self._send_chunks(chunks)
        finally:
            self.source.on_prefill = None  # nothing comes after the last frame

    async def _send_chunks(self, chunks: Chunks) -> Done:
        done: Done | None = None
        request_id, source, send = self._request_id, self.source, self._send_buffer.send
        async for chunk in chunks:
            if self._credit <= 0 or self._paced:
                chunk = await self._through_gate(chunk)
            num_tokens = len(chunk.token_ids)
            self._credit -= num_tokens
            source.generated += num_tokens
            if (tokens := tokens_frame(request_id, chunk)) is not None:
                send(tokens)
            done = done_frame(request_id, chunk)
        if done is None:
            raise GenerationFailed("the engine ended this stream without a finish reason")
        return done

    def grant(self, tokens: int) -> None:
        self._credit += tokens
        self._credited.set()

    def cancel(self, cause: CancelCause) -> None:
        self._forgo()
        self.source.cancel(cause)

    def leave(self, cause: CancelCause) -> None:
        self._forgo()
        self.source.leave(cause)

    def _forgo(self) -> None:
        """What waits for credit is wanted no more."""
        self._unwanted = True
        self._credited.set()

    def _send_progress(self, computed_tokens: int, prompt_tokens: int) -> None:
        if not (self.source.generated or self._unwanted):
            self._send_buffer.send(Progress(self._request_id, computed_tokens, prompt_tokens))

    # Waiting

    async def _through_gate(self, chunk: OutputChunk) -> OutputChunk:
        """`chunk` when it may go out. Nothing but the end of its choice if the client will not have it any more."""
        if self._paced:
            await self._send_buffer.room()
        while self._credit <= 0 and chunk.token_ids:
            if self._unwanted:
                return msgspec.structs.replace(chunk, token_ids=(), text="", logprobs=None)
            await self._credit_comes()
        return chunk

    async def _credit_comes(self) -> None:
        self._credited.clear()
        try:
            async with asyncio.timeout(self._credit_timeout_ms / 1000):
                await self._credited.wait()
        except TimeoutError:
            self.source.cancel("slow_reader")
            raise DeadlineExceeded(
                f"{self._credit_timeout_ms} ms passed with tokens to send and no credit; grant CREDIT as you read"
            ) from None
