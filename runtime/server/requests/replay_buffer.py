"""`ReplayBuffer`: the chunks of one request, kept as they come, and its subscribers, each at its own pace.

A subscriber that starts at a position sees exactly the chunks from there on, and the same end as every other one.
Must not import frames or `resume`, which decides how long a buffer is kept.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ....scheduler import AdmissionEstimate
from ...common.errors import Cancelled, InvalidRequest, QuireError
from ...common.types import FinishReason, OutputChunk, SamplingParams
from ...engine.facade import NewParser
from ..monitoring import CancelCause
from ..msgpack.output_stream import CHUNK_BYTES, Delivery, OutputStream, decode_chunk, encode_chunk
from .live_requests import LiveRequest
from .request_log import quire_error

# Measured bytes of Python objects.
BUFFER_BYTES = 4096  # a buffer without chunks, with a session and a key of its own
ENTRY_BYTES = 1024  # a resume entry, with a session of its own
# Reserved for each token that a request may generate, as a chunk of its own.
TOKEN_BYTES = CHUNK_BYTES + 40  # its encoding, with 16 bytes of text
LOGPROB_BYTES = 20  # the token's own log probability
TOP_LOGPROB_BYTES = 16  # an alternative

MAX_SUBSCRIBERS = 16  # of one buffer: requests with its idempotency key, and connections that read stored output

Session = tuple[str, str]  # tenant, name
IdempotencyKey = tuple[str, str]  # tenant, key


@dataclass(eq=False, slots=True)
class ResumeEntry:
    """A request that may be resumed, in a `ResumeIndex`."""

    session: Session
    request_id: int
    buffer: ReplayBuffer
    subscriber: BufferReader | None
    expiry: asyncio.TimerHandle | None = None  # while there is no subscriber
    was_cut: bool = False  # its client was lost before the end


@dataclass(eq=False, slots=True)
class IdempotencyEntry:
    """A request that answers every later request with its key, in an `IdempotencyIndex`."""

    key: IdempotencyKey
    request_digest: bytes
    buffer: ReplayBuffer
    expiry: asyncio.TimerHandle | None = None  # once the request has ended


@dataclass(eq=False, slots=True)
class StoredEntry:
    """A request that is kept until it is deleted or expires, in a `StoredIndex`."""

    key: tuple[str, str]  # tenant, id
    fields: bytes  # of the HTTP request, as JSON
    buffer: ReplayBuffer
    expiry: asyncio.TimerHandle | None = None  # once the request has ended

    @property
    def num_bytes(self) -> int:
        return ENTRY_BYTES + len(self.fields)


class BufferReader(Protocol):
    """One reader of a buffer."""

    buffer: ReplayBuffer
    was_cut: bool  # its connection was lost before the end

    def wake(self) -> None:
        """Note a new chunk, or the end of the request."""

    def stop(self, error: QuireError) -> None:
        """End soon, in `error`."""


class Owner(Protocol):
    """Decides how long a buffer is kept."""

    def on_change(self, buffer: ReplayBuffer) -> None:
        """Its bytes or subscribers have changed."""

    def on_end(self, buffer: ReplayBuffer) -> None: ...
    def on_cancelled(self, subscriber: Subscriber, cause: CancelCause) -> None: ...
    def on_subscriber_ended(self, subscriber: BufferReader, cause: CancelCause) -> None: ...


def bytes_to_reserve(params: SamplingParams, max_tokens: int) -> int:
    """Return the bytes of a buffer whose request generates `max_tokens` tokens, all outputs together."""
    logprobs = 0 if params.logprobs is None else LOGPROB_BYTES + TOP_LOGPROB_BYTES * params.logprobs
    return BUFFER_BYTES + max_tokens * (TOKEN_BYTES + logprobs)


class ReplayBuffer:
    """Keeps its request's output, whether or not a connection reads along. Its task lasts until the request ends.

    While the request runs, the buffer counts as at least `reserved_bytes`.
    """

    def __init__(self, request: LiveRequest, owner: Owner, tenant: str, reserved_bytes: int) -> None:
        self.request = request
        self.owner = owner
        self.tenant = tenant
        self.name = secrets.token_hex(16)  # of the output, the same in every answer
        self.created_s = int(time.time())
        self.subscribers: set[BufferReader] = set()
        self.resume_entries: set[ResumeEntry] = set()
        self.idempotency_entry: IdempotencyEntry | None = None
        self.stored_entry: StoredEntry | None = None
        self.generated = 0
        self.admission: AdmissionEstimate | None = None
        self.seed = 0  # with `admission`, as is the parser
        self.new_parser: NewParser | None = None
        self.num_prompt_tokens = 0
        self.finish_reason: FinishReason | None = None  # of the last chunk
        self.error: QuireError | None = None
        self._outcome: OutputChunk | QuireError | None = None  # of the request: its last chunk or its error
        self._reserved_bytes = reserved_bytes
        self._chunks: list[bytes] = []
        self._generated_after = array("Q")  # tokens up to the end of each chunk
        self._output_bytes = BUFFER_BYTES  # without resume entries
        self._was_delivered = asyncio.Event()  # the last chunk or the error; nothing is kept afterwards
        request.reader = self
        self.task = asyncio.create_task(self._read())
        self.task.add_done_callback(self._end_request)

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)

    @property
    def num_references(self) -> int:
        """The connections that read the stream or may resume it, and its storage. A running request needs one."""
        return len(self.subscribers) + len(self.resume_entries) + (self.stored_entry is not None)

    @property
    def num_bytes(self) -> int:
        output_bytes = self._output_bytes if self.has_ended else max(self._output_bytes, self._reserved_bytes)
        stored_bytes = 0 if self.stored_entry is None else self.stored_entry.num_bytes
        return output_bytes + stored_bytes + ENTRY_BYTES * len(self.resume_entries)

    @property
    def bytes_after_drop(self) -> int:
        """The bytes that remain if the output is dropped: those of the idempotency key."""
        return 0 if self.idempotency_entry is None else BUFFER_BYTES

    def position_after(self, num_tokens: int) -> int:
        """Return the position of the chunk that follows `num_tokens`. Raises InvalidRequest if no chunk ends there."""
        if num_tokens == 0:
            return 0
        position = bisect_left(self._generated_after, num_tokens)
        if position == len(self._chunks) or self._generated_after[position] != num_tokens:
            raise InvalidRequest("no TOKENS frame of this request ended there; next_index counts the tokens received")
        return position + 1

    def chunk(self, position: int) -> OutputChunk | None:
        """Return the chunk at `position`, or None if it has not come yet.

        The position after the last chunk returns only the end of the stream, for a subscriber that already received
        every token.
        """
        if position < len(self._chunks):
            return decode_chunk(self._chunks[position])
        if self.finish_reason is None:
            return None
        last = decode_chunk(self._chunks[-1])
        return msgspec.structs.replace(last, token_ids=(), text="", logprobs=None, deltas=None)

    def fail(self, error: QuireError) -> None:
        """End with `error` now, whatever the engine does."""
        self.task.cancel()
        self._was_delivered.set()
        self._end(error)

    def drop_output(self, error: QuireError) -> None:
        """Drop the output of an ended request: `error` answers its key from now on."""
        self.finish_reason, self.error = None, error
        self._chunks.clear()
        del self._generated_after[:]
        self._output_bytes = BUFFER_BYTES

    async def _read(self) -> None:
        try:
            generation = await self.request.accepted()
        except Exception as error:
            self._take(error)
            return
        self.admission, self.seed, self.new_parser = generation.admission, generation.seed, generation.new_parser
        self.num_prompt_tokens = len(generation.prompt_token_ids)
        self._wake_subscribers()
        generation.deliver(self._take)
        del generation  # that holds the prompt
        await self._was_delivered.wait()

    def _take(self, item: OutputChunk | Exception) -> None:
        """Keep a chunk, or the error that ends the request. Never raises: the engine calls it."""
        if self._was_delivered.is_set():
            return
        try:
            if isinstance(item, OutputChunk):
                if item.usage is not None:
                    self._outcome = item
                    self._was_delivered.set()
                self._append(item)
                return
        except Exception as error:
            item = error
            self.request.cancel("client")
        self._was_delivered.set()
        failure = quire_error(item).with_traceback(None)  # whose frames hold the prompt
        self._outcome = self._outcome or failure
        self._end(failure)

    def _append(self, chunk: OutputChunk) -> None:
        data = encode_chunk(chunk)
        self.generated += len(chunk.token_ids)
        self._chunks.append(data)
        self._generated_after.append(self.generated)
        self._output_bytes += len(data) + CHUNK_BYTES
        self._wake_subscribers()
        if self._output_bytes > self._reserved_bytes:
            self.owner.on_change(self)  # may fail this buffer: it may be too large
        if chunk.usage is not None and self.error is None:
            self.finish_reason = chunk.finish_reason
            self.owner.on_end(self)

    def _end(self, error: QuireError) -> None:
        if not self.has_ended:
            self.error = error
            self._wake_subscribers()
            self.owner.on_end(self)

    def _end_request(self, _: asyncio.Task[None]) -> None:
        self.request.end(self._outcome)
        self._outcome = None

    def _wake_subscribers(self) -> None:
        for subscriber in self.subscribers:
            subscriber.wake()


class Subscriber(OutputStream):
    """The output stream of one connection that reads a replay buffer."""

    def __init__(self, buffer: ReplayBuffer, delivery: Delivery, next_index: int = 0) -> None:
        """Start after the first `next_index` tokens. Raises InvalidRequest if no chunk ends there."""
        super().__init__(buffer.request, delivery)
        self.buffer = buffer
        self.position = buffer.position_after(next_index)  # of the next chunk
        self.was_cut = False  # the connection was lost before the end
        self._num_sent = next_index
        self._awaits_output = True  # of the request, not its own turn or credit
        self._cause: CancelCause = "disconnect"
        buffer.subscribers.add(self)
        buffer.owner.on_change(buffer)

    async def _deliver(self) -> None:
        """Send ACCEPTED, and each chunk when it may be sent, until the end or `stop`."""
        while self.buffer.admission is None:
            if self.buffer.error is not None:
                self._fail(self.buffer.error)
            if self._stopped is not None or self._has_ended:
                return
            await self._wait_for_change()
        self._awaits_output = False
        self._send_accepted(self.buffer.admission, self.buffer.seed)
        granted = 0  # chunks that may be sent before it is the turn of the tenant's other streams
        while self._stopped is None:
            if granted <= 0 and self.buffer.num_chunks > self.position + 1:  # a replay
                granted = await self._turns.take()
                continue
            chunk = self.buffer.chunk(self.position)
            if chunk is None:
                if self.buffer.error is not None:
                    self._fail(self.buffer.error)
                    return
                self._awaits_output = True
                await self._wait_for_change()
                self._awaits_output = False
            elif self._send_buffer.is_long:
                await self._send_buffer.wait_until_short()
            elif not self._may_send(chunk):
                self._watch_reader()
                await self._wait_for_change()
            else:
                self.position += 1
                granted -= 1
                self._send(chunk)
                if chunk.usage is not None:
                    return

    @property
    def _num_waiting(self) -> int:
        return self.buffer.generated - self._num_sent

    def wake(self) -> None:
        """Note a new chunk, or the end of the request."""
        if self._awaits_output:
            self._changed.set()

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
        self.buffer.owner.on_subscriber_ended(self, self._cause)
