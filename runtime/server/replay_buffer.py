"""`ReplayBuffer`: the chunks of one request, kept as they come, and its subscribers, each at its own pace.

A subscriber that starts at a position sees exactly the chunks from there on, and the same end as every other one.
Must not import frames or `resume`, which decides how long a buffer is kept.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ...scheduler import AdmissionEstimate
from ..common.errors import Cancelled, GenerationFailed, InvalidRequest, QuireError
from ..common.types import FinishReason, OutputChunk
from .live_requests import LiveRequest
from .monitoring import CancelCause
from .output_stream import Delivery, OutputStream
from .request_log import quire_error

# Measured bytes of Python objects.
BUFFER_BYTES = 4096  # a buffer without chunks, with a session and a key of its own
CHUNK_BYTES = 120  # a chunk besides its encoding
ENTRY_BYTES = 1024  # a resume entry, with a session of its own

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(OutputChunk).decode

Session = tuple[str, str]  # tenant, name
IdempotencyKey = tuple[str, str]  # tenant, key


@dataclass(eq=False, slots=True)
class ResumeEntry:
    """A request that may be resumed, in a `ResumeIndex`."""

    session: Session
    request_id: int
    buffer: ReplayBuffer
    subscriber: Subscriber | None
    expiry: asyncio.TimerHandle | None = None  # while there is no subscriber
    was_cut: bool = False  # its client was lost before the end


@dataclass(eq=False, slots=True)
class IdempotencyEntry:
    """A request that answers every later request with its key, in an `IdempotencyIndex`."""

    key: IdempotencyKey
    request_digest: bytes
    buffer: ReplayBuffer
    expiry: asyncio.TimerHandle | None = None  # once the request has ended


class Owner(Protocol):
    """Decides how long a buffer is kept."""

    def on_change(self, buffer: ReplayBuffer) -> None:
        """Its bytes or subscribers have changed."""

    def on_end(self, buffer: ReplayBuffer) -> None: ...
    def on_cancelled(self, subscriber: Subscriber, cause: CancelCause) -> None: ...
    def on_subscriber_ended(self, subscriber: Subscriber, cause: CancelCause) -> None: ...


class ReplayBuffer:
    """Reads its request in a task of its own, whether or not a connection reads along."""

    def __init__(self, request: LiveRequest, owner: Owner) -> None:
        self.request = request
        self.owner = owner
        self.subscribers: set[Subscriber] = set()
        self.resume_entries: set[ResumeEntry] = set()
        self.idempotency_entry: IdempotencyEntry | None = None
        self.generated = 0
        self.admission: AdmissionEstimate | None = None
        self.finish_reason: FinishReason | None = None  # of the last chunk
        self.error: QuireError | None = None
        self._chunks: deque[tuple[int, bytes]] = deque()  # (tokens, msgpack)
        self._chunk_bytes = 0  # of all chunks so far
        self._first = 0  # position of _chunks[0]
        self._keeps_read_chunks = True
        request.reader = self
        self.task = asyncio.create_task(self._read())
        self.task.add_done_callback(lambda _: request.end())

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def num_references(self) -> int:
        """The connections that read the stream or may resume it. A running request without any is cancelled."""
        return len(self.subscribers) + len(self.resume_entries)

    @property
    def num_bytes(self) -> int:
        return BUFFER_BYTES + self._chunk_bytes + ENTRY_BYTES * len(self.resume_entries)

    @property
    def num_chunks(self) -> int:
        """The chunks that are held now."""
        return len(self._chunks)

    def position_after(self, num_tokens: int) -> int:
        """Return the position of the chunk that follows `num_tokens`. Raises InvalidRequest if no chunk ends there."""
        position = self._first
        for tokens, _ in self._chunks if num_tokens else ():
            num_tokens -= tokens
            position += 1
            if num_tokens <= 0:
                break
        if num_tokens:
            raise InvalidRequest("no TOKENS frame of this request ended there; next_index counts the tokens received")
        return position

    def chunk(self, position: int) -> OutputChunk | None:
        """Return the chunk at `position`, or None if it has not come yet.

        The position after the last chunk returns only the end of the stream, for a subscriber that already received
        every token.
        """
        index = position - self._first
        if index < len(self._chunks):
            return _decode(self._chunks[index][1])
        if self.finish_reason is None:
            return None
        return msgspec.structs.replace(_decode(self._chunks[-1][1]), token_ids=(), text="", logprobs=None)

    def fail(self, error: QuireError) -> None:
        """End with `error` now, whatever the engine does."""
        self.task.cancel()
        self._end(error)

    def drop_read_chunks(self) -> None:
        """Hold from now on only the chunks that a subscriber has not read."""
        self._keeps_read_chunks = False
        self.trim()

    def trim(self) -> None:
        """Drop the chunks that every subscriber has read, after `drop_read_chunks`."""
        if self._keeps_read_chunks:
            return
        end = self._first + len(self._chunks)
        unread = min((subscriber.position for subscriber in self.subscribers), default=end)
        while self._first < unread:
            self._chunks.popleft()
            self._first += 1

    async def _read(self) -> None:
        try:
            generation = await self.request.accepted()
            self.admission = generation.admission
            self._wake_subscribers()
            async for chunk in generation:
                self._append(chunk)
            if not self.has_ended:
                raise GenerationFailed("the engine ended this stream without a finish reason")
        except Exception as error:
            self._end(copy.copy(quire_error(error)))  # without the traceback, whose frames hold the prompt

    def _append(self, chunk: OutputChunk) -> None:
        data = _encode(chunk)
        self.generated += len(chunk.token_ids)
        self._chunks.append((len(chunk.token_ids), data))
        self._chunk_bytes += len(data) + CHUNK_BYTES
        self._wake_subscribers()
        self.owner.on_change(self)
        if chunk.usage is not None:
            self.finish_reason = chunk.finish_reason
            self.owner.on_end(self)

    def _end(self, error: QuireError) -> None:
        if not self.has_ended:
            self.error = error
            self._wake_subscribers()
            self.owner.on_end(self)

    def _wake_subscribers(self) -> None:
        for subscriber in self.subscribers:
            subscriber.wake()


class Subscriber(OutputStream):
    """The output stream of one connection that reads a replay buffer."""

    is_paced = True

    def __init__(self, buffer: ReplayBuffer, delivery: Delivery, next_index: int = 0) -> None:
        """Start after the first `next_index` tokens. Raises InvalidRequest if no chunk ends there."""
        super().__init__(buffer.request, delivery)
        self.buffer = buffer
        self.position = buffer.position_after(next_index)  # of the next chunk
        self.generated = next_index
        self.was_cut = False  # the connection was lost before the end
        self._stopped: QuireError | None = None
        self._cause: CancelCause = "disconnect"
        self._news = asyncio.Event()
        buffer.subscribers.add(self)
        buffer.owner.on_change(buffer)

    @property
    def admission(self) -> AdmissionEstimate:
        assert self.buffer.admission is not None, "known once `accepted` has returned"
        return self.buffer.admission

    async def accepted(self) -> Subscriber:
        while self.buffer.admission is None:
            await self._wait_for_news()
        return self

    async def __aiter__(self) -> AsyncGenerator[OutputChunk, None]:
        while True:
            if self._stopped is None and (chunk := self.buffer.chunk(self.position)) is not None:
                self.position += 1
                self.buffer.trim()
                yield chunk
                if chunk.usage is not None:
                    return
            else:
                await self._wait_for_news()

    def wake(self) -> None:
        self._news.set()

    def stop(self, error: QuireError) -> None:
        """End this subscriber with `error`; its request goes on."""
        self._stopped = error
        self.wake()

    def cancel(self, cause: CancelCause) -> None:
        """End soon, and cancel the request unless another connection wants it."""
        self.discard_unsent()
        self.buffer.owner.on_cancelled(self, cause)

    def leave(self, cause: CancelCause) -> None:
        self.discard_unsent()
        self.was_cut = True
        self._cause = cause
        self.stop(Cancelled("the connection was lost"))

    def end(self) -> None:
        self.buffer.subscribers.discard(self)
        self.buffer.trim()
        self.buffer.owner.on_subscriber_ended(self, self._cause)

    async def _wait_for_news(self) -> None:
        """Wait for a change. Raises the error that stopped this subscriber or ended the request."""
        if (error := self._stopped or self.buffer.error) is not None:
            raise copy.copy(error)  # each subscriber raises the buffer's error
        self._news.clear()
        await self._news.wait()
