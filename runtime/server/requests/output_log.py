"""`OutputLog`: the chunks of one request, as long as a reader may need them, and how the request ended.

The engine calls the log with each chunk, and the log calls its readers; no task wakes for a chunk. A log without
retention has one reader, and holds only the chunks that this reader could not write yet. Must not import frames or
`resume`, which decides how long other logs are kept.
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
from ...common.errors import InvalidRequest, Overloaded, QuireError
from ...common.types import FinishReason, OutputChunk, SamplingParams
from ...engine.facade import Generation, NewParser
from ..monitoring import CancelCause
from .live_requests import LiveRequest
from .request_log import quire_error

# Measured bytes of Python objects.
CHUNK_BYTES = 56  # the overhead of a chunk
LOG_BYTES = 4096  # a kept log without chunks, with a session and a key of its own
ENTRY_BYTES = 1024  # a resume entry, with a session of its own
# Bytes reserved for each token that a request may generate, in a chunk of one token.
TOKEN_BYTES = CHUNK_BYTES + 40  # bytes of an encoded token, with 16 bytes of text
LOGPROB_BYTES = 20  # the token's own log probability
TOP_LOGPROB_BYTES = 16  # an alternative

MAX_READERS = 16  # readers of one kept log: requests with its idempotency key, and connections that read stored output

Session = tuple[str, str]  # tenant, name
IdempotencyKey = tuple[str, str]  # tenant, key

encode_chunk = msgspec.msgpack.Encoder().encode
decode_chunk = msgspec.msgpack.Decoder(OutputChunk).decode


@dataclass(eq=False, slots=True)
class ResumeEntry:
    """A request that may be resumed, in a `ResumeIndex`."""

    session: Session
    request_id: int
    log: OutputLog
    reader: LogReader | None
    expiry: asyncio.TimerHandle | None = None  # timer while there is no reader
    was_cut: bool = False  # the client was lost before the end


@dataclass(eq=False, slots=True)
class IdempotencyEntry:
    """A request that answers every later request with its key, in an `IdempotencyIndex`."""

    key: IdempotencyKey
    request_digest: bytes
    log: OutputLog
    expiry: asyncio.TimerHandle | None = None  # once the request has ended


@dataclass(eq=False, slots=True)
class StoredEntry:
    """A request that is kept until it is deleted or expires, in a `StoredIndex`."""

    key: tuple[str, str]  # tenant, id
    fields: bytes  # fields of the HTTP request, as JSON
    log: OutputLog
    expiry: asyncio.TimerHandle | None = None  # once the request has ended

    @property
    def num_bytes(self) -> int:
        return ENTRY_BYTES + len(self.fields)


class LogReader(Protocol):
    """One reader of a log."""

    log: OutputLog
    was_cut: bool  # the connection was lost before the end

    def offer(self, position: int, chunk: OutputChunk) -> bool:
        """Write the newest chunk if its turn has come. Return whether the reader is done with it. Never raises."""

    def hold(self, num_bytes: int) -> None:
        """Count a chunk that waits for this reader in a log without retention."""

    def wake(self) -> None:
        """Note that the request was accepted or has ended."""

    def stop(self, error: QuireError) -> None:
        """End soon, in `error`."""


class Retention(Protocol):
    """The policy that decides how long a log is kept."""

    keeps: bool  # whether chunks are kept after every reader has read them

    def on_change(self, log: OutputLog) -> None:
        """Note that the log's bytes or readers have changed."""

    def on_end(self, log: OutputLog) -> None:
        """Note that the request has ended."""

    def on_cancelled(self, reader: LogReader, cause: CancelCause) -> None:
        """Cancel the request for the client of `reader`, unless other clients want it."""

    def on_reader_ended(self, reader: LogReader, cause: CancelCause) -> None:
        """Note that `reader` has stopped reading."""


class ReadOnce:
    """The retention of a request that only one connection reads: none. Implements `Retention`."""

    keeps = False

    def on_change(self, log: OutputLog) -> None:
        """See `Retention.on_change`."""

    def on_end(self, log: OutputLog) -> None:
        """See `Retention.on_end`."""

    def on_cancelled(self, reader: LogReader, cause: CancelCause) -> None:
        """See `Retention.on_cancelled`."""
        reader.log.request.cancel(cause)

    def on_reader_ended(self, reader: LogReader, cause: CancelCause) -> None:
        """End the request, which has no other reader."""
        reader.log.close()


READ_ONCE = ReadOnce()


def bytes_to_reserve(params: SamplingParams, max_tokens: int) -> int:
    """Return the bytes of a kept log whose request generates `max_tokens` tokens, all outputs together."""
    logprobs = 0 if params.logprobs is None else LOGPROB_BYTES + TOP_LOGPROB_BYTES * params.logprobs
    return LOG_BYTES + max_tokens * (TOKEN_BYTES + logprobs)


class OutputLog:
    """The output of one request, from its submission.

    A log whose `retention` keeps chunks has a task that lasts until the request ends, and counts as at least
    `reserved_bytes` until then. Without retention, the only reader awaits `accept` and calls `deliver`.
    """

    admission: AdmissionEstimate  # once accepted

    def __init__(
        self, request: LiveRequest, retention: Retention = READ_ONCE, tenant: str = "", reserved_bytes: int = 0
    ) -> None:
        self.name = secrets.token_hex(16)  # name of the output, the same in every answer
        self.created_s = int(time.time())
        self.request = request
        self.retention = retention
        self.is_kept = retention.keeps
        self.tenant = tenant
        self.readers: tuple[LogReader, ...] = ()
        self.generated = 0  # tokens
        self.num_chunks = 0
        self.generation: Generation | None = None  # set from acceptance to `deliver`: it holds the prompt
        self.is_accepted = False
        self.seed = 0  # set when accepted, with the parser and the facts about the prompt
        self.new_parser: NewParser | None = None
        self.num_prompt_tokens = 0
        self.prompt_has_text = True
        self.finish_reason: FinishReason | None = None  # reason in the last chunk
        self.error: QuireError | None = None
        self.is_complete = False  # the engine delivers no further chunk, or none is wanted
        self._outcome: OutputChunk | QuireError | None = None  # the request's last chunk or its error
        self._chunks: list[bytes] = []  # the latest of `num_chunks` chunks
        request.reader = self
        # Of a kept log
        self.resume_entries: set[ResumeEntry] = set()
        self.idempotency_entry: IdempotencyEntry | None = None
        self.stored_entry: StoredEntry | None = None
        self._reserved_bytes = reserved_bytes
        self._generated_after = array("Q")  # tokens up to the end of each chunk
        self._output_bytes = LOG_BYTES  # bytes without entries
        if self.is_kept:
            self._was_delivered = asyncio.Event()
            self.task = asyncio.create_task(self._run())
            self.task.add_done_callback(lambda _: self._end_request())

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt, from acceptance to `deliver`."""
        assert self.generation is not None, "accepted and not delivered yet"
        return self.generation.prompt_token_ids

    # Of a kept log

    @property
    def num_references(self) -> int:
        """The number of connections that read the log or may resume it, plus one if it is stored.

        A running request needs one.
        """
        return len(self.readers) + len(self.resume_entries) + (self.stored_entry is not None)

    @property
    def num_bytes(self) -> int:
        output_bytes = self._output_bytes if self.has_ended else max(self._output_bytes, self._reserved_bytes)
        stored_bytes = 0 if self.stored_entry is None else self.stored_entry.num_bytes
        return output_bytes + stored_bytes + ENTRY_BYTES * len(self.resume_entries)

    @property
    def bytes_after_drop(self) -> int:
        """The bytes that remain if the output is dropped: the entry of the idempotency key."""
        return 0 if self.idempotency_entry is None else LOG_BYTES

    def fail(self, error: QuireError) -> None:
        """End with `error` now, independent of the engine."""
        self.task.cancel()
        self._complete()
        self._end(error)

    def drop_output(self, error: QuireError) -> None:
        """Drop the output of an ended request: `error` refuses requests with its key from now on."""
        self.is_accepted = False
        self.finish_reason = None
        self.error = error
        self.num_chunks = 0
        self._chunks.clear()
        del self._generated_after[:]
        self._output_bytes = LOG_BYTES

    async def _run(self) -> None:
        await self.accept()
        self.deliver()
        await self._was_delivered.wait()

    # Readers

    def join(self, reader: LogReader) -> None:
        """Offer all future chunks to `reader`."""
        self.readers += (reader,)
        if self.is_kept:
            self.retention.on_change(self)

    def check_readers(self) -> None:
        """Raise Overloaded if the log has as many readers as it may have."""
        if len(self.readers) >= MAX_READERS:
            raise Overloaded(f"{MAX_READERS} connections read this output already")

    def leave(self, reader: LogReader, cause: CancelCause) -> None:
        """Stop offering chunks to `reader`. Idempotent."""
        if reader in self.readers:
            self.readers = tuple(each for each in self.readers if each is not reader)
            self.retention.on_reader_ended(reader, cause)

    def position_after(self, num_tokens: int) -> int:
        """Return the position of the chunk that follows `num_tokens`. Raises InvalidRequest if no chunk ends there."""
        if num_tokens == 0:
            return 0
        position = bisect_left(self._generated_after, num_tokens)
        if position == len(self._generated_after) or self._generated_after[position] != num_tokens:
            raise InvalidRequest("no TOKENS frame of this request ended there; next_index counts the tokens received")
        return position + 1

    def chunk(self, position: int) -> OutputChunk:
        """Return a chunk that has arrived and was not forgotten."""
        return decode_chunk(self._chunks[position - self.num_chunks])

    def read(self, position: int) -> tuple[OutputChunk, int] | None:
        """Return the chunk at `position` and its bytes, or None if it has not come yet.

        The position after the last chunk has only the end of the stream, for a reader that already received every
        token.
        """
        if position < self.num_chunks:
            return self.chunk(position), len(self._chunks[position - self.num_chunks])
        if self.finish_reason is None or not self.is_kept:
            return None
        return msgspec.structs.replace(self.chunk(position - 1), token_ids=(), text="", logprobs=None, deltas=None), 0

    def forget_first(self) -> int:
        """Drop the first chunk of a log that is not kept, when its only reader is done with it. Return its bytes."""
        return len(self._chunks.pop(0)) + CHUNK_BYTES

    def forget(self) -> None:
        """Drop all chunks, unless the log is kept: the only reader is done with them."""
        if not self.is_kept:
            self._chunks.clear()

    # The engine's side

    async def accept(self) -> None:
        """Wait for the engine's answer; `error` is its refusal."""
        assert self.request.submission is not None, "awaited once, before the end"
        try:
            generation = await self.request.submission
        except Exception as error:
            self.request.note_refused(error)
            self._fail(error)
            return
        self.request.note_accepted(generation)
        self.generation = generation
        self.is_accepted = True
        self.seed = generation.seed
        self.new_parser = generation.new_parser
        self.admission = generation.admission
        self.num_prompt_tokens = len(generation.prompt_token_ids)
        self.prompt_has_text = generation.prompt_has_text
        self._wake_readers()

    def deliver(self) -> None:
        """Begin the engine's delivery of chunks. Idempotent."""
        if (generation := self.generation) is not None:
            self.generation = None
            generation.deliver(self._take)

    def close(self) -> None:
        """End the request, which has no reader."""
        if not self.is_complete:
            self.is_complete = True
            self.request.cancel("client")
        self._end_request()

    def _take(self, item: OutputChunk | Exception) -> None:
        """Log a chunk, or the error that ends the request. Never raises: the engine calls it."""
        if self.is_complete:
            return
        if not isinstance(item, OutputChunk):
            self._fail(item)
            return
        try:
            self.generated += len(item.token_ids)
            if item.usage is not None:
                self._outcome = item
                self._complete()
                self.request.forget_generation()
            if self.is_kept:
                self._keep(item)
            for reader in self.readers:
                if not reader.offer(self.num_chunks, item) and not self.is_kept:
                    self._chunks.append(data := encode_chunk(item))
                    reader.hold(len(data) + CHUNK_BYTES)
            self.num_chunks += 1
            if self.is_kept or item.usage is not None:
                self._note_growth(item)
        except Exception as error:
            self.request.cancel("client")
            self._fail(error)

    def _note_growth(self, last: OutputChunk) -> None:
        """Notify the retention of a chunk, and all readers of the end of the request."""
        if self._output_bytes > self._reserved_bytes:
            self.retention.on_change(self)  # may fail this log if it is too large
        if last.usage is not None and self.error is None:
            self.finish_reason = last.finish_reason
            self._wake_readers()
            self.retention.on_end(self)

    def _keep(self, chunk: OutputChunk) -> None:
        data = encode_chunk(chunk)
        self._chunks.append(data)
        self._generated_after.append(self.generated)
        self._output_bytes += len(data) + CHUNK_BYTES

    def _fail(self, error: Exception) -> None:
        """End with an error of the engine or of this log."""
        self._complete()
        self.request.forget_generation()
        failure = quire_error(error, client_id=self.request.request_id).with_traceback(None)  # no prompt is kept
        self._outcome = self._outcome or failure
        self._end(failure)

    def _complete(self) -> None:
        """Accept no further chunk from the engine."""
        self.is_complete = True
        if self.is_kept:
            self._was_delivered.set()

    def _end(self, error: QuireError) -> None:
        if not self.has_ended:
            self.error = error
            self._wake_readers()
            self.retention.on_end(self)

    def _end_request(self) -> None:
        self.request.end(self._outcome)
        self._outcome = None

    def _wake_readers(self) -> None:
        for reader in self.readers:
            reader.wake()
