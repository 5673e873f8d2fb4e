"""One generation request of a client: turns answers into chunks, grants credit, and continues after lost connections.

Every token is delivered exactly once and in order, regardless of lost connections and of the number of servers that
served the request; the stream ends with a chunk that has `usage`, or raises a QuireError.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Callable

import msgspec

from ..common.errors import DeadlineExceeded, ProtocolError, QuireError, RequestNotFound, Unavailable
from ..common.types import OutputChunk
from ..protocol.frames import Accepted, Credit, Done, Generate, Progress, Resume, Tokens
from .connection import Answer, ClientConnection, ConnectionLost, Inbox
from .connection_pool import ConnectionPool
from .received import ReceivedOutputs

CREDIT_TOKENS = 1024  # most tokens that are in transit or unread
RESUME_FOR_S = 60.0  # how long servers keep a resumable request by default
FIRST_RETRY_S, LAST_RETRY_S = 0.01, 2.0
MAX_FRUITLESS = 5  # servers lost after accepting the request and before a token: the request may be the cause

OnAccepted = Callable[[Accepted], None]
OnProgress = Callable[[Progress], None]


class TokenStream:
    """The stream of one GENERATE frame. `frame` must have every field except `credit` set. Iterate `chunks` once.

    Leaving the iteration early cancels the request. If the connection is lost at that moment, the server cancels the
    request when its resume time has passed.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        frame: Generate,
        on_accepted: OnAccepted | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._pool = pool
        self._frame = msgspec.structs.replace(frame, credit=CREDIT_TOKENS)
        self._id = frame.request_id
        self._on_accepted = on_accepted
        self._on_progress = on_progress
        self._outputs = ReceivedOutputs()
        self._received = 0  # tokens of all choices since GENERATE
        self._credited = 0  # received tokens for which the server has been given new credit
        self._is_resuming = False
        self._was_accepted = False
        self._num_fruitless = 0  # see MAX_FRUITLESS
        self._attempts = 0  # attempts to continue since the last tokens
        self._give_up_at: float | None = None  # event loop time; None while a server works on the request
        self._deadline = math.inf  # event loop time

    async def chunks(self) -> AsyncGenerator[OutputChunk, None]:
        """Send the request and yield its chunks."""
        connection = await self._pool.for_new_requests()
        if self._frame.deadline_ms is not None:
            self._deadline = asyncio.get_running_loop().time() + self._frame.deadline_ms / 1000
        try:
            inbox = connection.ask(self._frame)
            await connection.flush()
            while True:
                answer = await inbox.get()
                if isinstance(answer, RequestNotFound) and self._is_resuming:
                    inbox = self._ask_again(connection, answer)
                elif isinstance(answer, ConnectionLost | QuireError):
                    lost = connection
                    connection = await self._reconnect(connection, answer)
                    inbox = self._go_on(lost, connection, answer)
                else:
                    chunk = self._chunk(answer)
                    if chunk is not None:
                        yield chunk
                        if chunk.usage is not None:
                            return
                    self._grant(connection)
        finally:
            connection.leave(self._id)

    def _chunk(self, answer: Answer) -> OutputChunk | None:
        """Return the answer as a chunk; None if it goes to a callback or repeats an earlier answer."""
        match answer:
            case Tokens() | Done():
                self._attempts = self._num_fruitless = 0
                self._give_up_at = None
                self._received += len(answer.token_ids) if isinstance(answer, Tokens) else 0
                return self._outputs.receive(answer)
            case Accepted():
                self._give_up_at = None  # the first tokens may take long, so keep `_attempts` until they arrive
                self._was_accepted = True
                self._num_fruitless += not self._is_resuming
                self._outputs.seed = answer.seed if answer.seed is not None else self._outputs.seed
                if self._on_accepted is not None:
                    self._on_accepted(answer)
                    self._on_accepted = None  # each RESUME is answered with another ACCEPTED
            case Progress():
                if self._on_progress is not None:
                    self._on_progress(answer)
            case _:
                raise ProtocolError(f"{type(answer).__name__} is no answer to GENERATE")
        return None

    def _grant(self, connection: ClientConnection) -> None:
        """Grant new credit for the tokens that the caller has consumed, once half of the credit is used."""
        due = self._received - self._credited
        if 2 * due >= CREDIT_TOKENS:
            self._credited = self._received
            connection.send(Credit(self._id, due))

    # After a lost connection, or an error that another server may not have

    def _go_on(
        self, lost: ClientConnection, connection: ClientConnection, answer: ConnectionLost | QuireError
    ) -> Inbox:
        """Ask for the rest of the output on another connection: with RESUME if its server knows the session."""
        is_known = isinstance(answer, ConnectionLost) and connection.session == lost.session
        if not (self._frame.resumable and is_known):
            return self._ask_again(connection, _reason(answer))
        self._is_resuming = True
        self._credited = self._received
        return connection.ask(Resume(self._id, self._received, CREDIT_TOKENS))

    def _ask_again(self, connection: ClientConnection, reason: QuireError) -> Inbox:
        """Send GENERATE for the missing tokens. Raises `reason` if the server cannot continue the output."""
        frame = self._outputs.rest_of(self._frame)
        if frame is None or (frame.generated is not None and "continue" not in connection.features):
            raise reason
        if self._deadline < math.inf:
            left_s = self._deadline - asyncio.get_running_loop().time()
            frame = msgspec.structs.replace(frame, deadline_ms=max(1, math.ceil(left_s * 1000)))
        self._received = self._credited = 0
        self._is_resuming = False
        return connection.ask(frame)

    async def _reconnect(self, connection: ClientConnection, answer: ConnectionLost | QuireError) -> ClientConnection:
        """Return another connection, waiting longer after each attempt that brings no answer.

        Raises the last error once RESUME_FOR_S have passed, or if the request cannot continue.
        """
        reason = _reason(answer)
        while self._may_go_on(answer) and reason.retryable and not self._pool.is_closed:
            now = asyncio.get_running_loop().time()
            if self._give_up_at is None:
                self._give_up_at = now + RESUME_FOR_S
            elif now > self._give_up_at:
                break
            if now > self._deadline:
                raise DeadlineExceeded(f"the request's deadline of {self._frame.deadline_ms} ms passed") from reason
            if self._attempts:
                wait_s = min(FIRST_RETRY_S * 2**self._attempts, LAST_RETRY_S)
                await asyncio.sleep(wait_s * random.uniform(0.5, 1))
            self._attempts += 1
            try:
                return await self._pool.after(connection, same_server=self._frame.resumable and self._attempts == 1)
            except QuireError as error:
                reason = error
        raise reason

    def _may_go_on(self, answer: ConnectionLost | QuireError) -> bool:
        """Return whether the request may continue elsewhere after a retryable error."""
        if self._num_fruitless > MAX_FRUITLESS:
            return False
        if isinstance(answer, ConnectionLost):
            return self._frame.resumable or self._pool.has_alternatives
        # A full queue refuses new requests only; an accepted request waits for room.
        return self._pool.has_alternatives and (self._was_accepted or isinstance(answer, Unavailable))


def _reason(answer: ConnectionLost | QuireError) -> QuireError:
    return answer.reason if isinstance(answer, ConnectionLost) else answer
