"""One generation request of a client: turns answers into chunks, grants credit and resumes after a lost connection.

Every token is delivered exactly once and in order, however many connections were lost; the stream ends with a chunk
that has `usage`, or raises a QuireError.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Callable

import msgspec

from ..common.errors import ProtocolError, QuireError, RequestNotFound
from ..common.types import OutputChunk
from ..protocol.frames import Accepted, Credit, Done, Generate, Progress, Resume, Tokens
from .connection import Answer, ClientConnection, ConnectionLost
from .connection_pool import ConnectionPool

CREDIT_TOKENS = 1024  # most tokens that are in transit or unread
RESUME_FOR_S = 60.0  # how long servers keep a resumable request by default
FIRST_RETRY_S, LAST_RETRY_S = 0.01, 2.0

OnAccepted = Callable[[Accepted], None]
OnProgress = Callable[[Progress], None]


class TokenStream:
    """The stream of one GENERATE frame. `frame` must have every field set but `credit`. Iterate `chunks` once.

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
        self._choices = _ChoiceTracker()
        self._received = 0  # tokens of all choices
        self._credited = 0  # received tokens for which the server has been given new credit
        self._attempts = 0  # attempts to reconnect since the last tokens
        self._give_up_at: float | None = None  # event loop time; None while a server works on the request

    async def chunks(self) -> AsyncGenerator[OutputChunk, None]:
        """Send the request and yield its chunks."""
        connection = await self._pool.for_new_requests()
        try:
            inbox = connection.ask(self._frame)
            is_resuming = False
            await connection.flush()
            while True:
                answer = await inbox.get()
                if isinstance(answer, ConnectionLost):
                    connection = await self._reconnect(connection, answer.reason)
                    inbox = connection.ask(Resume(self._id, self._received, CREDIT_TOKENS))
                    self._credited = self._received
                    is_resuming = True
                elif isinstance(answer, RequestNotFound) and is_resuming and not self._received:
                    is_resuming = False
                    inbox = connection.ask(self._frame)  # GENERATE was lost, or had no effect yet
                elif isinstance(answer, QuireError):
                    raise answer
                elif (chunk := self._chunk(answer)) is not None:
                    yield chunk
                    if chunk.usage is not None:
                        return
                    self._grant(connection)
        finally:
            connection.leave(self._id)

    def _chunk(self, answer: Answer) -> OutputChunk | None:
        """Return the answer as a chunk; None if it goes to a callback or repeats an earlier answer."""
        match answer:
            case Tokens() if self._choices.has_seen(answer):
                return None
            case Tokens() | Done():
                self._attempts = 0
                self._give_up_at = None
                self._received += len(answer.token_ids) if isinstance(answer, Tokens) else 0
                return self._choices.chunk(answer)
            case Accepted():
                self._give_up_at = None  # the first tokens may take long, so keep `_attempts` until they arrive
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

    async def _reconnect(self, lost: ClientConnection, reason: QuireError) -> ClientConnection:
        """Open another connection, waiting longer after each attempt that brings no answer.

        Raises the last error once RESUME_FOR_S have passed or the error is not retryable.
        """
        while self._frame.resumable and reason.retryable and not self._pool.is_closed:
            now = asyncio.get_running_loop().time()
            if self._give_up_at is None:
                self._give_up_at = now + RESUME_FOR_S
            elif now > self._give_up_at:
                break
            if self._attempts:
                wait_s = min(FIRST_RETRY_S * 2**self._attempts, LAST_RETRY_S)
                await asyncio.sleep(wait_s * random.uniform(0.5, 1))
            self._attempts += 1
            try:
                return await self._pool.for_session(lost.session)
            except QuireError as error:
                reason = error
        raise reason


class _ChoiceTracker:
    """Which choices of a stream have ended and how many tokens each has; DONE names neither."""

    def __init__(self) -> None:
        self._received: dict[int, int] = {}  # choice -> tokens received
        self._ended: set[int] = set()
        self._without_tokens: set[int] = set()  # choices that got TOKENS without ids, which only end a choice

    def has_seen(self, answer: Tokens) -> bool:
        """Return whether TOKENS without ids were received before: RESUME, which counts tokens, repeats them."""
        if answer.token_ids:
            return False
        seen = answer.choice in self._without_tokens
        self._without_tokens.add(answer.choice)
        return seen

    def chunk(self, answer: Tokens | Done) -> OutputChunk:
        """Return the answer as a chunk of its choice; DONE ends the first choice that has not ended."""
        if isinstance(answer, Done):
            choice = next(choice for choice in itertools.count() if choice not in self._ended)
            return OutputChunk(
                first_index=self._received.get(choice, 0),
                token_ids=(),
                text="",
                finish_reason=answer.finish_reason,
                usage=answer.usage,
                choice=choice,
            )
        self._received[answer.choice] = answer.first_index + len(answer.token_ids)
        if answer.finish_reason is not None:
            self._ended.add(answer.choice)
        return OutputChunk(
            first_index=answer.first_index,
            token_ids=answer.token_ids,
            text=answer.text,
            logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            choice=answer.choice,
            cumulative_logprob=answer.cumulative_logprob,
            deltas=answer.deltas,
        )
