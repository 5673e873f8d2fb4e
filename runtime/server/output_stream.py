"""`OutputStream`: one request on one connection; it sends the request's chunks as frames, as fast as credit allows.

The engine never waits for a reader. With `credit`, TOKENS are sent while it is above zero, so that it is overdrawn by
less than one chunk. Must not import the connection or the request handler.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

import msgspec

from ...scheduler import AdmissionEstimate
from ..common.errors import DeadlineExceeded, GenerationFailed
from ..common.types import OutputChunk
from ..protocol.frames import Done, Progress
from .convert import accepted_frame, done_frame, tokens_frame
from .live_requests import LiveRequest
from .monitoring import CancelCause
from .send_buffer import SendBuffer


class Chunks(Protocol):
    """An accepted request's output: the engine's stream, or a replay of it."""

    @property
    def admission(self) -> AdmissionEstimate: ...
    def __aiter__(self) -> AsyncIterator[OutputChunk]: ...


class Delivery(NamedTuple):
    """Where and how an output stream sends its frames."""

    request_id: int
    send_buffer: SendBuffer
    credit: int | None  # None: unlimited
    credit_timeout_ms: int
    progress: bool  # the client negotiated PROGRESS


class OutputStream:
    """The stream of a request that only this connection reads. `run` it in a task, and call `end` after the task."""

    is_paced = False  # whether chunks may come faster than the client reads, so that sending waits for it

    def __init__(self, request: LiveRequest, delivery: Delivery) -> None:
        self.request = request
        self.generated = 0
        self._request_id, self._send_buffer, credit, self._credit_timeout_ms, self._wants_progress = delivery
        self._credit = math.inf if credit is None else credit
        self._credited = asyncio.Event()
        self._is_unwanted = False

    async def run(self) -> Done:
        """Send every frame but the last one, which is returned. Raises the error that ended the request."""
        chunks = await self.accepted()
        self._send_buffer.send(accepted_frame(self._request_id, chunks.admission))
        if self._wants_progress:
            self.request.prefill_watchers.add(self._send_progress)
        try:
            return await self._send_chunks(chunks)
        finally:
            self.request.prefill_watchers.discard(self._send_progress)  # nothing follows the last frame

    async def _send_chunks(self, chunks: Chunks) -> Done:
        request_id, send = self._request_id, self._send_buffer.send
        done: Done | None = None
        async for chunk in chunks:
            if self._credit <= 0 or self.is_paced:
                chunk = await self._wait_to_send(chunk)
            num_tokens = len(chunk.token_ids)
            self._credit -= num_tokens
            self.generated += num_tokens
            if (tokens := tokens_frame(request_id, chunk)) is not None:
                send(tokens)
            if chunk.usage is not None:
                done = done_frame(request_id, chunk)
        if done is None:
            raise GenerationFailed("the engine ended this stream without a finish reason")
        return done

    def grant(self, tokens: int) -> None:
        """Add to the credit."""
        self._credit += tokens
        self._credited.set()

    def cancel(self, cause: CancelCause) -> None:
        """End soon: the client does not want the rest."""
        self.discard_unsent()
        self.request.cancel(cause)

    def leave(self, cause: CancelCause) -> None:
        """End soon: the connection is lost."""
        self.cancel(cause)

    def end(self) -> None:
        """Release the request, after the task."""
        self.request.end()

    # Overridden by Subscriber, as are cancel, leave and end

    async def accepted(self) -> Chunks:
        """Wait until the engine has accepted the request. Raises its refusal."""
        self.request.reader = self
        return await self.request.accepted()

    # Waiting

    def discard_unsent(self) -> None:
        """Stop waiting for credit: drop tokens that have none."""
        self._is_unwanted = True
        self._credited.set()

    async def _wait_to_send(self, chunk: OutputChunk) -> OutputChunk:
        """Return `chunk` once it may be sent; without its tokens where those are not wanted any more."""
        if self.is_paced:
            await self._send_buffer.wait_until_short()
        while self._credit <= 0 and chunk.token_ids:
            if self._is_unwanted:
                return msgspec.structs.replace(chunk, token_ids=(), text="", logprobs=None)
            await self._wait_for_credit()
        return chunk

    async def _wait_for_credit(self) -> None:
        self._credited.clear()
        try:
            async with asyncio.timeout(self._credit_timeout_ms / 1000):
                await self._credited.wait()
        except TimeoutError:
            self.cancel("slow_reader")
            raise DeadlineExceeded(
                f"{self._credit_timeout_ms} ms passed with tokens to send and no credit; grant CREDIT as you read"
            ) from None

    def _send_progress(self, computed_tokens: int, prompt_tokens: int) -> None:
        if not (self.generated or self._is_unwanted):
            self._send_buffer.send(Progress(self._request_id, computed_tokens, prompt_tokens))
