"""`OutputStream`: one request on one connection; it sends the request's chunks as frames, as fast as credit allows.

The engine never waits for a reader. With `credit`, TOKENS are sent while it is above zero, so that it is overdrawn by
less than one chunk. Chunks without credit wait here in msgpack, and their bytes count as unsent output of the
connection. Must not import the connection or the request handler.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from ....scheduler import AdmissionEstimate
from ...common.errors import DeadlineExceeded, QuireError
from ...common.types import OutputChunk
from ...protocol.frames import Done, Error, Progress
from ...protocol.wire_errors import error_frame
from ..monitoring import CancelCause
from ..requests.live_requests import LiveRequest
from ..requests.request_log import quire_error
from ..requests.send_buffer import SendBuffer
from ..tenancy.tenants import FRAMES_PER_TURN, Turns
from .convert import accepted_frame, done_frame, tokens_frame

# Measured bytes of Python objects.
CHUNK_BYTES = 56  # a chunk besides its encoding
STREAM_BYTES = 10 << 10  # a stream that waits for credit, with its request and task
BYTES_PER_FRAME = 1 << 10  # of a waiting chunk, that count as one frame of a turn
READ_SHARE = 32  # a client must take 1 of this many waiting tokens within the credit timeout

encode_chunk = msgspec.msgpack.Encoder().encode
decode_chunk = msgspec.msgpack.Decoder(OutputChunk).decode


class Delivery(NamedTuple):
    """Where and how an output stream sends its frames."""

    request_id: int
    send_buffer: SendBuffer
    credit: int | None  # None: unlimited
    credit_timeout_ms: int
    features: Collection[str]  # negotiated
    turns: Turns  # of the tenant's streams that send output that waited


class OutputStream:
    """The stream of a request that only this connection reads. `run` it in a task, and call `end` after the task.

    The engine's chunks are sent or held as the engine delivers them; the task waits for the end.

    While tokens wait for credit, the client must take one in `READ_SHARE` of them within each credit timeout, else the
    stream ends in DeadlineExceeded.
    """

    def __init__(self, request: LiveRequest, delivery: Delivery) -> None:
        self.request = request
        self.generated = 0  # tokens, sent or not
        self._request_id, self._send_buffer, credit, self._credit_timeout_ms, self._features, self._turns = delivery
        self._credit = math.inf if credit is None else credit
        self._num_sent = 0  # tokens
        self._waiting: deque[bytes] = deque()  # chunks that may not be sent yet, the oldest first
        self._done: Done | None = None
        self._failure: QuireError | None = None
        self._outcome: OutputChunk | QuireError | None = None  # of the request: its last chunk or its error
        self._has_ended = False  # the engine delivers nothing more, or it is not wanted
        self._is_unwanted = False  # tokens without credit are dropped
        self._stopped: QuireError | None = None
        self._awaits_turn = False
        self._changed = asyncio.Event()
        self._reading_timer: asyncio.TimerHandle | None = None  # while tokens wait for credit
        self._reading_goal = 0  # value of `_num_sent` that the client must reach before the timer ends

    async def run(self) -> Done | Error:
        """Send every frame but the last one, which is returned."""
        try:
            await self._deliver()
        except Exception as error:  # a refusal; the traceback holds the prompt
            self._fail(quire_error(error, client_id=self._request_id).with_traceback(None))
        finally:
            self._has_ended = True
            self.request.prefill_watchers.discard(self._send_progress)  # nothing follows the last frame
            self._drop_waiting()
        if (failure := self._stopped or self._failure) is not None:
            return error_frame(self._request_id, failure)
        assert self._done is not None, "a stream ends with an error or its last chunk"
        return self._done

    def grant(self, tokens: int) -> None:
        """Add to the credit."""
        self._credit += tokens
        self.send_waiting()

    def stop(self, error: QuireError) -> None:
        """End soon, in `error`; what waits is dropped."""
        self._stopped = self._stopped or error
        self._credit = -math.inf  # nothing may follow the gap
        self._drop_waiting()
        self._changed.set()

    def shed(self, error: QuireError) -> None:
        """Cancel the request and end in `error`: the client reads too slowly."""
        self.stop(error)
        self.cancel("slow_reader")

    def shut_down(self, error: QuireError) -> None:
        """Cancel the request and take nothing more: its last frame, `error`, is sent by the caller."""
        self._has_ended = True
        self.stop(error)
        self.cancel("shutdown")

    def cancel(self, cause: CancelCause) -> None:
        """End soon: the client does not want the rest."""
        self.discard_unsent()
        self.request.cancel(cause)

    def leave(self, cause: CancelCause) -> None:
        """End soon: the connection is lost."""
        self.cancel(cause)

    def end(self) -> None:
        """Release the request, after the task."""
        self.request.end(self._outcome)

    # Overridden by Subscriber, as are cancel, leave and end

    async def _deliver(self) -> None:
        """Send ACCEPTED and the output; return when all is sent. Raises the engine's refusal."""
        self.request.reader = self
        generation = await self.request.accepted()
        self._send_accepted(generation.admission, generation.seed)
        generation.deliver(self._take)
        del generation  # that holds the prompt
        while not self._has_ended or self._waiting:  # the end follows the tokens that came before it
            await self._wait_for_change()

    @property
    def _num_waiting(self) -> int:
        """The tokens that are generated and not sent."""
        return self.generated - self._num_sent

    # Sending and waiting

    def _take(self, item: OutputChunk | Exception) -> None:
        """Send a chunk, or hold it while it has no credit. Never raises: the engine calls it."""
        if self._has_ended:
            return
        try:
            if isinstance(item, OutputChunk):
                self._take_chunk(item)
            else:
                self._fail(quire_error(item, client_id=self._request_id))
        except Exception as error:
            self._give_up(error)
        if self._has_ended:
            self.request.forget_generation()
            self._changed.set()

    def _take_chunk(self, chunk: OutputChunk) -> None:
        self.generated += len(chunk.token_ids)
        if chunk.usage is not None:
            self._outcome, self._has_ended = chunk, True
        if self._stopped is not None:
            return
        if not self._waiting and self._may_send(chunk):
            self._send(chunk)
        else:
            self._hold(chunk)

    def _fail(self, error: QuireError) -> None:
        """Record the error that ends the request."""
        self._failure, self._has_ended = error, True
        self._outcome = self._outcome or error

    def _give_up(self, error: Exception) -> None:
        """Cancel the request: a frame cannot be sent, most likely because it is longer than the client takes."""
        self.stop(quire_error(error, client_id=self._request_id).with_traceback(None))
        self.request.cancel("client")

    def _send_accepted(self, admission: AdmissionEstimate, seed: int) -> None:
        self._send_buffer.send(accepted_frame(self._request_id, admission, self._features, seed))
        if "progress" in self._features:
            self.request.prefill_watchers.add(self._send_progress)

    def discard_unsent(self) -> None:
        """Stop waiting for credit: drop tokens that have none."""
        self._is_unwanted = True
        self.send_waiting()

    def _may_send(self, chunk: OutputChunk) -> bool:
        return self._is_unwanted or not chunk.token_ids or (self._credit > 0 and not self._send_buffer.is_long)

    def _send(self, chunk: OutputChunk) -> None:
        if self._credit <= 0 and chunk.token_ids:  # unwanted
            chunk = msgspec.structs.replace(chunk, token_ids=(), text="", logprobs=None, deltas=None)
        num_tokens = len(chunk.token_ids)
        self._credit -= num_tokens
        self._num_sent += num_tokens
        if (tokens := tokens_frame(self._request_id, chunk)) is not None:
            self._send_buffer.send(tokens)
        if chunk.usage is not None:
            self._done = done_frame(self._request_id, chunk)
        if self._reading_timer is not None and self._num_sent >= self._reading_goal:
            self._stop_reading_timer()

    def _hold(self, chunk: OutputChunk) -> None:
        data = encode_chunk(chunk)
        self._waiting.append(data)
        self._watch_reader()
        self._send_buffer.hold(self, len(data) + CHUNK_BYTES)

    def send_waiting(self) -> None:
        """Send the waiting chunks that have credit, until much is unsent."""
        granted = FRAMES_PER_TURN
        try:
            while self._waiting and self._may_send(chunk := decode_chunk(self._waiting[0])):
                if granted <= 0:
                    self.send_soon()
                    break
                num_bytes = len(self._waiting.popleft())
                granted -= 1 + num_bytes // BYTES_PER_FRAME
                self._send_buffer.hold(self, -num_bytes - CHUNK_BYTES)
                self._send(chunk)
        except QuireError as error:
            self._give_up(error)
        if self._waiting:
            self._watch_reader()
        self._changed.set()

    def send_soon(self) -> None:
        """Send the waiting chunks that have credit when it is the turn of this stream."""
        if not self._awaits_turn:
            self._awaits_turn = True
            self._turns.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._awaits_turn = False
        self.send_waiting()

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _drop_waiting(self) -> None:
        self._stop_reading_timer()
        self._send_buffer.hold(self, -sum(len(data) + CHUNK_BYTES for data in self._waiting))
        self._waiting.clear()

    # The reader's time limit

    def _watch_reader(self) -> None:
        """Start the timer in which the client must take its share of the waiting tokens, unless it runs."""
        if self._reading_timer is None:
            self._reading_goal = self._num_sent + max(1, self._num_waiting // READ_SHARE)
            timeout_s = self._credit_timeout_ms / 1000
            self._reading_timer = asyncio.get_running_loop().call_later(timeout_s, self._end_slow_reader)
            self._send_buffer.hold(self, STREAM_BYTES)

    def _stop_reading_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None
            self._send_buffer.hold(self, -STREAM_BYTES)

    def _end_slow_reader(self) -> None:
        self._stop_reading_timer()
        if self._credit <= 0:
            self.shed(
                DeadlineExceeded(
                    f"{self._num_waiting} tokens wait for credit, and in {self._credit_timeout_ms} ms the client took "
                    f"fewer than one in {READ_SHARE} of those that waited; grant CREDIT as you read"
                )
            )

    def _send_progress(self, computed_tokens: int, prompt_tokens: int) -> None:
        if not (self._num_sent or self._is_unwanted):
            self._send_buffer.send(Progress(self._request_id, computed_tokens, prompt_tokens))
