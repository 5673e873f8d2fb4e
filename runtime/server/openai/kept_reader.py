"""`KeptReader`: what a kept request generates, read from its first chunk for one exchange."""

from __future__ import annotations

import asyncio

from ...common.errors import Cancelled, Overloaded, QuireError
from ...common.types import OutputChunk, Usage
from ..monitoring import CancelCause
from ..requests.replay_buffer import MAX_SUBSCRIBERS, ReplayBuffer
from ..tenancy.tenants import Tenant
from .exchange import Exchange
from .formats import Format, PromptSize
from .running import CallOutput

CHUNKS_PER_TURN = 8  # of one stream of a tenant; each is read and rendered again


class KeptReader:
    """Reads a replay buffer for one exchange, from the first chunk. Implements `replay_buffer.BufferReader`."""

    def __init__(self, buffer: ReplayBuffer, exchange: Exchange, tenant: Tenant) -> None:
        """Begin to read. Raises Overloaded if too many connections do."""
        if len(buffer.subscribers) >= MAX_SUBSCRIBERS:
            raise Overloaded(f"{MAX_SUBSCRIBERS} connections read this output already")
        self.buffer = buffer
        self.was_cut = False
        self.exchange = exchange
        self._turns = tenant.output_turns
        self._stopped: QuireError | None = None
        self._cause: CancelCause = "disconnect"
        self._changed = asyncio.Event()
        self._position = 0  # of the next chunk
        exchange.lives.append(self)
        buffer.subscribers.add(self)
        buffer.owner.on_change(buffer)

    async def accepted(self) -> QuireError | None:
        """Wait until the engine has accepted the request. Return its refusal."""
        while self.buffer.admission is None and self._failure is None:
            await self._wait_for_change()
        return None if self.buffer.admission is not None else self._failure

    async def answer(self, output: CallOutput) -> QuireError | None:
        """Answer with everything that the request generates, or return its refusal or error."""
        try:
            if (refusal := await self.accepted()) is not None:
                return refusal
            output.form.prompt_sizes = [PromptSize(self.buffer.num_prompt_tokens)]
            output.begin([], self.buffer.new_parser)
            return await self._read_all(output)
        finally:
            output.close()

    async def read_present(self, form: Format) -> Usage | None:
        """Add the chunks so far to `form`. Return the usage of a request that has ended."""
        usage = None
        form.read_with(self.buffer.new_parser)
        while self._position < self.buffer.num_chunks and self._stopped is None:
            await self._turns.take()
            for _ in range(CHUNKS_PER_TURN):
                if (chunk := self._next_chunk()) is not None:
                    form.choices[chunk.choice].add(chunk)
                    usage = chunk.usage
        return usage

    async def ended(self) -> None:
        """Wait until the request has ended."""
        while not self.buffer.has_ended and self._stopped is None:
            await self._wait_for_change()

    def end(self) -> None:
        """Stop reading."""
        self.exchange.lives.clear()
        self.buffer.subscribers.discard(self)
        self.buffer.owner.on_subscriber_ended(self, self._cause)

    # BufferReader

    def wake(self) -> None:
        """Note a new chunk, or the end of the request."""
        self._changed.set()

    def stop(self, error: QuireError) -> None:
        """End soon, in `error`."""
        self._stopped = self._stopped or error
        self._changed.set()

    # Cancellable

    def cancel(self, cause: CancelCause) -> None:
        """Stop reading: the connection is lost. The request continues while it is stored or may be retried."""
        self.was_cut = True
        self._cause = cause
        self.stop(Cancelled("the connection was lost"))

    async def _read_all(self, output: CallOutput) -> QuireError | None:
        granted = 0  # chunks that may be sent before it is the turn of the tenant's other streams
        while self._stopped is None:
            if granted <= 0 and self.buffer.num_chunks > self._position + 1:  # a replay
                await self._turns.take()
                granted = CHUNKS_PER_TURN
            elif self.exchange.send_buffer.is_long:
                await self.exchange.send_buffer.wait_until_short()
            elif (chunk := self._next_chunk()) is not None:
                granted -= 1
                if chunk.finish_reason == "cancelled":
                    return Cancelled("the request was cancelled")
                output.take(chunk.choice, chunk)
                if chunk.usage is not None:
                    output.end(chunk.usage)
                    return None
            elif self.buffer.error is not None:
                return self.buffer.error
            else:
                await self._wait_for_change()
        return self._stopped

    @property
    def _failure(self) -> QuireError | None:
        return self._stopped or self.buffer.error

    def _next_chunk(self) -> OutputChunk | None:
        if self._position >= self.buffer.num_chunks:
            return None
        self._position += 1
        return self.buffer.chunk(self._position - 1)

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
