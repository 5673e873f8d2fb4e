"""One request of a client, over as many links as it takes: its answers as chunks, its credit, its resuming.

It must not know sockets. One invariant: every token comes exactly once and in order, whatever links were lost between;
the last thing is a chunk with usage or a QuireError.
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
from .link import Answer, Link, Lost
from .links import Links

CREDIT_TOKENS = 1024  # at most so many are under way or unread
RESUME_FOR_S = 60.0  # what servers keep a resumable request by default
FIRST_RETRY_S, LAST_RETRY_S = 0.01, 2.0

OnAccepted = Callable[[Accepted], None]
OnProgress = Callable[[Progress], None]


class TokenStream:
    """`frame` has everything but its credit. Iterate `chunks` once; leaving it early cancels the request. Left between
    two links, it is its server that cancels it, when nobody has resumed it in time.
    """

    def __init__(
        self,
        links: Links,
        frame: Generate,
        on_accepted: OnAccepted | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._links = links
        self._frame = msgspec.structs.replace(frame, credit=CREDIT_TOKENS)
        self._id = frame.request_id
        self._on_accepted = on_accepted
        self._on_progress = on_progress
        self._choices = _Choices()
        self._received = 0  # tokens, of all choices
        self._credited = 0  # of them, those that the reader is done with and the server knows
        self._attempts = 0  # to get another link, since tokens came
        self._give_up_at: float | None = None  # the loop's time; None while a server has it

    async def chunks(self) -> AsyncGenerator[OutputChunk, None]:
        link = await self._links.for_new_requests()
        try:
            inbox = link.ask(self._frame)
            await link.flush()
            while True:
                answer = await inbox.get()
                if isinstance(answer, Lost):
                    link = await self._reconnect(link, answer.reason)
                    inbox = link.ask(Resume(self._id, self._received, CREDIT_TOKENS))
                    self._credited = self._received
                elif isinstance(answer, RequestNotFound) and self._frame.resumable and not self._received:
                    inbox = link.ask(self._frame)  # it never arrived, or nothing came of it
                elif isinstance(answer, QuireError):
                    raise answer
                elif (chunk := self._chunk(answer)) is not None:
                    yield chunk
                    if chunk.usage is not None:
                        return
                    self._grant(link)
        finally:
            link.leave(self._id)

    def _chunk(self, answer: Answer) -> OutputChunk | None:
        """What its reader gets of an answer; None for what callbacks get, and for what comes a second time."""
        match answer:
            case Tokens() if self._choices.has_seen(answer):
                return None
            case Tokens() | Done():
                self._attempts = 0
                self._give_up_at = None
                self._received += len(answer.token_ids) if isinstance(answer, Tokens) else 0
                return self._choices.chunk(answer)
            case Accepted():
                self._give_up_at = None  # its tokens may take long; what breaks again and again is still waited for
                if self._on_accepted is not None:
                    self._on_accepted(answer)
                    self._on_accepted = None  # RESUME is answered with another one
            case Progress():
                if self._on_progress is not None:
                    self._on_progress(answer)
            case _:
                raise ProtocolError(f"{type(answer).__name__} is no answer to GENERATE")
        return None

    def _grant(self, link: Link) -> None:
        """The reader is done with what it got: so much more may come."""
        due = self._received - self._credited
        if 2 * due >= CREDIT_TOKENS:
            self._credited = self._received
            link.send(Credit(self._id, due))

    async def _reconnect(self, lost: Link, reason: QuireError) -> Link:
        """Another link, after longer and longer waits while none brings anything. Raises `reason`, or why there is no
        other, once it is too late or trying again cannot help."""
        while self._frame.resumable and reason.retryable and not self._links.is_closed:
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
                return await self._links.for_session(lost.session)
            except QuireError as error:
                reason = error
        raise reason


class _Choices:
    """What TOKENS leave to be known of one stream's choices: which one DONE ends, and at which token."""

    def __init__(self) -> None:
        self._received: dict[int, int] = {}  # tokens of each choice
        self._ended: set[int] = set()
        self._without_tokens: set[int] = set()  # had TOKENS without any, which only come at a choice's end

    def has_seen(self, answer: Tokens) -> bool:
        """What has no tokens may come a second time after RESUME, which counts tokens."""
        if answer.token_ids:
            return False
        seen = answer.choice in self._without_tokens
        self._without_tokens.add(answer.choice)
        return seen

    def chunk(self, answer: Tokens | Done) -> OutputChunk:
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
        )
