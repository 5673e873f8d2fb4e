"""`OutputReader`: writes the chunks of an output log, from a position on, as fast as its client's credit allows.

The engine never waits for a reader. With `credit`, tokens are written while it is above zero, so that it is overdrawn
by less than one chunk. Chunks that must wait stay in the log. Must not import frames, formats or connections.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ...common.errors import Cancelled, DeadlineExceeded, QuireError
from ...common.types import OutputChunk, Usage
from ..monitoring import CancelCause
from ..tenancy.tenants import FRAMES_PER_TURN, Turns
from .output_log import OutputLog
from .request_log import quire_error
from .send_buffer import SendBuffer

READER_BYTES = 10 << 10  # measured: a reader that waits for credit, with its request and task
OUTPUT_BYTES_PER_FRAME = 1 << 10  # bytes of a waiting chunk that count as one frame
READ_SHARE = 32  # a client must take 1 of this many waiting tokens within the credit timeout


class Pace(NamedTuple):
    """The limits on the speed of a reader."""

    send_buffer: SendBuffer
    turns: Turns  # turns in which the tenant's readers write waiting output
    credit: int | None = None  # tokens; None: unlimited
    credit_timeout_ms: int = 0
    waits_while_long: bool = True  # chunks wait while too many bytes are unsent
    frames_per_chunk: int = 1  # cost of a chunk in frames


class OutputReader:
    """Reads one log for one client. `start` it once the request is accepted, and call `end` afterwards.

    While tokens wait for credit, the client must take one in `READ_SHARE` of them within each credit timeout, else the
    output ends in DeadlineExceeded. Implements `output_log.LogReader` and `send_buffer.WaitingStream`.
    """

    def __init__(self, log: OutputLog, pace: Pace, next_index: int = 0) -> None:
        """Begin after the first `next_index` tokens. Raises InvalidRequest if no chunk ends there."""
        self.log = log
        self.was_cut = False
        self.usage: Usage | None = None  # usage of the last chunk, once it is written
        self.failure: QuireError | None = None  # once over
        self.is_over = False  # everything is written, or writing has stopped
        self._send_buffer = pace.send_buffer
        self._turns = pace.turns
        self._credit = math.inf if pace.credit is None else pace.credit
        self._credit_timeout_ms = pace.credit_timeout_ms
        self._waits_while_long = pace.waits_while_long
        self._frames_per_chunk = pace.frames_per_chunk
        self._position = log.position_after(next_index)  # position of the next chunk
        self._num_sent = next_index  # tokens
        self._has_started = False
        self._is_open = False  # chunks may be written: from the start to the end or `stop`
        self._write: Callable[[OutputChunk], None] = _ignore
        self._on_over: Callable[[], object] = _ignore
        self._is_unwanted = False  # tokens without credit are dropped
        self._stopped: QuireError | None = None
        self._cause: CancelCause = "disconnect"
        self._awaits_turn = False
        self._held_bytes = 0  # bytes of chunks that wait in a log that is not kept
        self._changed = asyncio.Event()  # the request was accepted or has ended, or the reader is stopped
        self._reading_timer: asyncio.TimerHandle | None = None  # timer while tokens wait for credit
        self._reading_goal = 0  # value of `_num_sent` that the client must reach before the timer ends
        log.join(self)

    @property
    def shows_progress(self) -> bool:
        """Whether the client waits for its first token."""
        return not (self._num_sent or self._is_unwanted)

    @property
    def is_stopped(self) -> bool:
        return self._stopped is not None

    async def accepted(self) -> QuireError | None:
        """Wait until the engine has accepted the request. Return its refusal."""
        if self.log.is_kept:
            await self._until(lambda: self.log.is_accepted or self.log.error is not None)
        else:
            await self.log.accept()
        return None if self.log.is_accepted else self._stopped or self.log.error

    async def ended(self) -> None:
        """Wait until the request has ended."""
        await self._until(lambda: self.log.has_ended)

    async def play(self, write: Callable[[OutputChunk], None]) -> QuireError | None:
        """Write the whole output; return the error that ends it."""
        over = asyncio.Event()
        self.start(write, over.set)
        await over.wait()
        return self.failure

    def start(self, write: Callable[[OutputChunk], None], on_over: Callable[[], object]) -> None:
        """Call `write` with each chunk, then `on_over`."""
        self._write = write
        self._on_over = on_over
        self._has_started = True
        self._is_open = self._stopped is None
        self.log.deliver()
        if self.log.num_chunks > self._position:  # a replay
            self.send_soon()
        else:
            self.send_waiting()
        self._check_over()

    def mute(self) -> None:
        """Read to the end without writing."""
        self._write = _ignore

    def grant(self, tokens: int) -> None:
        """Add to the credit."""
        self._credit += tokens
        self.send_waiting()

    def stop(self, error: QuireError) -> None:
        """End soon, in `error`; drop waiting output."""
        self._stopped = self._stopped or error
        self._is_open = False
        self._drop_waiting()
        self.wake()

    def shed(self, error: QuireError) -> None:
        """Cancel the request and end in `error`: the client reads too slowly."""
        self.stop(error)
        self.cancel("slow_reader")

    def shut_down(self, error: QuireError) -> None:
        """Cancel the request and write nothing more: the caller sends `error`."""
        self.stop(error)
        self._finish()
        self.cancel("shutdown")

    def cancel(self, cause: CancelCause) -> None:
        """End soon: the client cancelled. The request continues if it has other readers."""
        self._discard_unsent()
        self.log.retention.on_cancelled(self, cause)

    def leave(self, cause: CancelCause) -> None:
        """End soon: the connection is lost. A kept request continues."""
        if not self.log.is_kept:
            self.cancel(cause)
            return
        self._discard_unsent()
        self.was_cut = True
        self._cause = cause
        self.stop(Cancelled("the connection was lost"))

    def end(self) -> None:
        """Leave the log. Idempotent."""
        self._write = self._on_over = _ignore
        self.log.leave(self, self._cause)

    # output_log.LogReader

    def offer(self, position: int, chunk: OutputChunk) -> bool:
        """See `LogReader.offer`. Wait if tokens may not be sent now."""
        if position != self._position or not self._is_open:
            return self.is_over or self._stopped is not None
        num_tokens = len(chunk.token_ids)
        if num_tokens and (self._credit <= 0 or (self._waits_while_long and self._send_buffer.is_long)):
            if not self._is_unwanted:
                self._wait()
                return self._stopped is not None  # waiting may exceed a limit
            if self._credit <= 0:
                self._credit = -math.inf  # neither tokens nor text may follow the gap
        if self._credit == -math.inf:
            chunk = msgspec.structs.replace(chunk, token_ids=(), text="", logprobs=None, deltas=None)
            num_tokens = 0
        if self._held_bytes:  # the chunk has waited in a log that is not kept
            self.hold(-self.log.forget_first())
        self._position = position + 1
        self._credit -= num_tokens
        self._num_sent += num_tokens
        try:
            self._write(chunk)
        except Exception as error:
            self._give_up(error)
            return True
        if self._reading_timer is not None and self._num_sent >= self._reading_goal:
            self._stop_reading_timer()
        if chunk.usage is not None:
            self.usage = chunk.usage
            self._finish()
        return True

    def hold(self, num_bytes: int) -> None:
        """See `LogReader.hold`."""
        self._held_bytes += num_bytes
        self._send_buffer.hold(self, num_bytes)

    def wake(self) -> None:
        """See `LogReader.wake`."""
        self._changed.set()
        self._check_over()

    # Writing and waiting

    def send_waiting(self) -> None:
        """Write the waiting chunks that may be sent, until too many bytes are unsent."""
        granted = FRAMES_PER_TURN
        while self._is_open:
            if (read := self.log.read(self._position)) is None:
                break
            if granted <= 0:
                self.send_soon()
                break
            chunk, num_bytes = read
            granted -= self._frames_per_chunk + num_bytes // OUTPUT_BYTES_PER_FRAME
            if not self.offer(self._position, chunk):
                break
        self._check_over()

    def send_soon(self) -> None:
        """Write the waiting chunks when it is the turn of this reader."""
        if not self._awaits_turn:
            self._awaits_turn = True
            self._turns.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._awaits_turn = False
        self.send_waiting()

    def _give_up(self, error: Exception) -> None:
        """End in `error`, most likely because a frame exceeds the client's limit."""
        self.stop(quire_error(error, client_id=self.log.request.request_id).with_traceback(None))
        if not self.log.is_kept:
            self.log.request.cancel("client")

    def _discard_unsent(self) -> None:
        """Stop waiting for credit: drop the waiting tokens."""
        self._is_unwanted = True
        self.send_waiting()

    def _wait(self) -> None:
        if self._credit <= 0:
            self._watch_reader()
        else:
            self._send_buffer.call_when_short(self.send_soon)

    def _drop_waiting(self) -> None:
        self._stop_reading_timer()
        self.log.forget()
        self.hold(-self._held_bytes)

    def _check_over(self) -> None:
        """Finish if the last chunk is written or writing has stopped."""
        if self.is_over or not self._has_started:
            return
        log = self.log
        if self._stopped is not None:
            if log.is_kept or log.is_complete:
                self._finish()
        elif log.error is not None and self._position >= log.num_chunks:
            self._finish()

    def _finish(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._is_open = False
            self.failure = self._stopped or (self.log.error if self.usage is None else None)
            self._drop_waiting()
            self._on_over()

    async def _until(self, is_true: Callable[[], bool]) -> None:
        """Wait until a condition of the log holds, or the reader is stopped."""
        while not (is_true() or self._stopped is not None):
            self._changed.clear()
            await self._changed.wait()

    # The client's time limit

    def _watch_reader(self) -> None:
        """Start the timer in which the client must take its share of the waiting tokens, unless it runs."""
        if self._reading_timer is None:
            self._reading_goal = self._num_sent + max(1, self._num_waiting // READ_SHARE)
            timeout_s = self._credit_timeout_ms / 1000
            self._reading_timer = asyncio.get_running_loop().call_later(timeout_s, self._end_slow_reader)
            self._send_buffer.hold(self, READER_BYTES)

    @property
    def _num_waiting(self) -> int:
        """The tokens that are generated and not sent."""
        return self.log.generated - self._num_sent

    def _stop_reading_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None
            self._send_buffer.hold(self, -READER_BYTES)

    def _end_slow_reader(self) -> None:
        self._stop_reading_timer()
        if self._credit <= 0:
            self.shed(
                DeadlineExceeded(
                    f"{self._num_waiting} tokens wait for credit, and in {self._credit_timeout_ms} ms the client took "
                    f"fewer than one in {READ_SHARE} of those that waited; grant CREDIT as you read"
                )
            )


def _ignore(*_: object) -> None:
    """Do nothing: the reader has not started or has ended."""
