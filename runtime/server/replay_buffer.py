"""One request whose chunks are kept as they come, and those who follow them, each at its own pace.

It must not know frames, sessions, keys or how long anything is kept. One invariant: whoever follows from a position
sees exactly the chunks from there on and the same end; that one of them leaves is nothing to the others.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec
import structlog

from ...scheduler import AdmissionEstimate
from ..common.errors import Cancelled, GenerationFailed, InvalidRequest, QuireError
from ..common.types import FinishReason, OutputChunk
from .live import LiveRequest
from .monitoring import CancelCause

STREAM_BYTES = 4096  # of a kept stream without chunks: measured, with a session and a key of its own
CHUNK_BYTES = 120  # of a kept chunk besides its encoded self

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(OutputChunk).decode
_log = structlog.get_logger("quire.server")


class Keeper(Protocol):
    """Told of what changes how long a stream is kept."""

    def on_growth(self, stream: ReplayBuffer, num_bytes: int) -> None: ...
    def on_end(self, stream: ReplayBuffer) -> None: ...
    def on_cancelled(self, follower: Subscriber, cause: CancelCause) -> None: ...
    def on_left(self, follower: Subscriber, cause: CancelCause) -> None: ...


class ReplayBuffer:
    """Reads its request in a task of its own, from the first chunk to the last, whoever follows."""

    def __init__(self, live: LiveRequest, keeper: Keeper) -> None:
        self.live = live
        self.keeper = keeper
        self.followers: set[Subscriber] = set()
        self.num_bytes = STREAM_BYTES  # kept on its account, by its keeper's count
        self.finish_reason: FinishReason | None = None  # of the last chunk
        self.error: QuireError | None = None
        self.admission: AdmissionEstimate | None = None
        self._chunks: deque[tuple[int, bytes]] = deque()  # tokens in it, msgpack
        self._first = 0  # position of _chunks[0]
        self._forgotten = False
        live.on_prefill = self._note_prefill
        self.task = asyncio.create_task(self._read())
        self.task.add_done_callback(lambda _: live.end())

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def follow(self, next_index: int = 0) -> Subscriber:
        """From after the first `next_index` tokens. Raises InvalidRequest if no chunk ends there."""
        follower = Subscriber(self, self._position_after(next_index), next_index)
        self.followers.add(follower)
        return follower

    def chunk(self, position: int) -> OutputChunk | None:
        """None: not yet there. After the last one comes its end alone, for whoever has its tokens."""
        index = position - self._first
        if index < len(self._chunks):
            return _decode(self._chunks[index][1])
        if self.finish_reason is None:
            return None
        return msgspec.structs.replace(_decode(self._chunks[-1][1]), token_ids=(), text="", logprobs=None)

    def fail(self, error: QuireError) -> None:
        """End it with `error` now, whatever the engine does."""
        self.task.cancel()
        self._end(error)

    def forget(self) -> None:
        """Hold from now on only what a follower has not yet read."""
        self._forgotten = True
        self.trim()

    def trim(self) -> None:
        if self._forgotten:
            unread = min((follower.position for follower in self.followers), default=self._first + len(self._chunks))
            while self._first < unread:
                self._chunks.popleft()
                self._first += 1

    async def _read(self) -> None:
        try:
            generation = await self.live.accepted()
            self.admission = generation.admission
            self._wake()
            async for chunk in generation:
                self._append(chunk)
            if not self.has_ended:
                raise GenerationFailed("the engine ended this stream without a finish reason")
        except QuireError as error:
            self._end(copy.copy(error))  # without its traceback, whose frames hold the prompt
        except Exception as error:
            _log.error("request failed", exc_info=error)
            self._end(GenerationFailed("an internal error ended this request; see the server's log"))

    def _append(self, chunk: OutputChunk) -> None:
        data = _encode(chunk)
        num_bytes = len(data) + CHUNK_BYTES
        self.live.generated += len(chunk.token_ids)
        self._chunks.append((len(chunk.token_ids), data))
        self._wake()
        self.keeper.on_growth(self, num_bytes)
        if chunk.usage is not None:
            self.finish_reason = chunk.finish_reason
            self.keeper.on_end(self)

    def _end(self, error: QuireError) -> None:
        if not self.has_ended:
            self.error = error
            self._wake()
            self.keeper.on_end(self)

    def _wake(self) -> None:
        for follower in self.followers:
            follower.wake()

    def _note_prefill(self, computed_tokens: int, prompt_tokens: int) -> None:
        for follower in self.followers:
            if follower.on_prefill is not None:
                follower.on_prefill(computed_tokens, prompt_tokens)

    def _position_after(self, num_tokens: int) -> int:
        position = self._first
        for tokens, _ in self._chunks if num_tokens else ():
            num_tokens -= tokens
            position += 1
            if num_tokens <= 0:
                break
        if num_tokens:
            raise InvalidRequest("no TOKENS frame of this request ended there; next_index counts the tokens received")
        return position


class Subscriber:
    """A `delivery.Source`: one reader of a kept stream. `accepted` returns the follower itself."""

    def __init__(self, stream: ReplayBuffer, position: int, generated: int) -> None:
        self.stream = stream
        self.position = position  # of the next chunk
        self.generated = generated
        self.on_prefill: Callable[[int, int], None] | None = None
        self._error: QuireError | None = None
        self.was_cut = False  # its client was lost before the end
        self._cause: CancelCause = "disconnect"
        self._ended = False
        self._awake = asyncio.Event()

    @property
    def admission(self) -> AdmissionEstimate:
        assert self.stream.admission is not None, "known once `accepted` has returned"
        return self.stream.admission

    async def accepted(self) -> Subscriber:
        while self.stream.admission is None:
            await self._news()
        return self

    async def __aiter__(self) -> AsyncGenerator[OutputChunk, None]:
        while True:
            if self._error is None and (chunk := self.stream.chunk(self.position)) is not None:
                self.position += 1
                self.stream.trim()
                yield chunk
                if chunk.usage is not None:
                    return
            else:
                await self._news()

    def wake(self) -> None:
        self._awake.set()

    def stop(self, reason: str) -> None:
        """End this follower; the stream goes on if somebody else wants it."""
        self._error = Cancelled(reason)
        self.wake()

    def cancel(self, cause: CancelCause) -> None:
        self.stream.keeper.on_cancelled(self, cause)

    def leave(self, cause: CancelCause) -> None:
        self._cause = cause
        self.was_cut = True
        self.stop("the connection was lost")

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self.stream.followers.discard(self)
            self.stream.trim()
            self.stream.keeper.on_left(self, self._cause)

    async def _news(self) -> None:
        """Wait for a change. Raises what ended this follower, or the stream, which may have many."""
        if (error := self._error or self.stream.error) is not None:
            raise copy.copy(error)
        self._awake.clear()
        await self._awake.wait()
