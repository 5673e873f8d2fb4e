"""What one welcomed peer asks and is answered: its live requests by id, and the frames that concern them.

It must not know sockets, the greeting or why a connection ends. One invariant: each id that was taken gets exactly one
last frame while the connection lives, and is free again before that frame can be seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

import structlog
from structlog.contextvars import bind_contextvars

from ..common.errors import (
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    QuireError,
    Unauthenticated,
    Unavailable,
)
from ..common.logs import new_id
from ..protocol.codec import MAX_ARRAY_LENGTH, Malformed
from ..protocol.frames import (
    AskStats,
    Cancel,
    Credit,
    Done,
    Error,
    Frame,
    Generate,
    Goaway,
    Hello,
    ListModels,
    Ping,
    Pong,
    Resume,
    Tokenize,
    Tokenized,
)
from ..protocol.wire_errors import error_frame
from .app_context import AppContext
from .convert import duplicate_frame, engine_request, models_frame, stats_frame
from .monitoring import CancelCause
from .output_stream import OutputStream, Source
from .request_log import log_end
from .send_buffer import SendBuffer
from .tenants import Tenant

MAX_QUESTIONS = 32  # of one connection, that are being answered

_log = structlog.get_logger("quire.server")


class _Live(NamedTuple):
    task: asyncio.Task[None]
    delivery: OutputStream | None  # None: a question that is being answered


class RequestHandler:
    """Of one connection, from WELCOME on."""

    def __init__(
        self,
        context: AppContext,
        send_buffer: SendBuffer,
        tenant: Tenant,
        session: str,
        *,
        progress: bool,
    ) -> None:
        self._context = context
        self._send_buffer = send_buffer
        self._tenant = tenant
        self._session = session
        self._progress = progress
        self._live: dict[int, _Live] = {}
        self._last_accepted_id: int | None = None
        self._last_ended_at = asyncio.get_running_loop().time()
        if context.leaves_at is not None:
            self.go_away()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """One per live request."""
        return [live.task for live in self._live.values()]

    @property
    def idle_since(self) -> float | None:
        """The loop's time at which the last live request ended; None while there are some."""
        return None if self._live else self._last_ended_at

    def handle(self, frame: Frame | Malformed) -> None:
        """Raises ProtocolError for what must end the connection."""
        match frame:
            case Generate():
                self._begin(frame)
            case Resume():
                self._resume(frame)
            case Malformed(request_id, error):
                if self._takes(request_id):
                    self._refuse(request_id, error)
            case Cancel(request_id):
                if (delivery := self._delivery(request_id)) is not None:
                    delivery.cancel("client")
            case Credit(request_id, tokens):
                if (delivery := self._delivery(request_id)) is not None:
                    delivery.grant(tokens)
            case Tokenize(request_id):
                if self._takes(request_id):
                    self._ask(frame)
            case ListModels(request_id):
                if self._takes(request_id):
                    name = self._context.config.served_model_name or ""
                    self._answer(request_id, lambda: models_frame(request_id, name, self._context.engine.info))
            case AskStats(request_id):
                if self._takes(request_id):
                    self._answer(request_id, lambda: stats_frame(request_id, self._context.engine.stats()))
            case Ping(nonce):
                self._send_buffer.send(Pong(nonce))
            case Pong():
                pass
            case Hello():
                raise ProtocolError("HELLO came twice")

    def go_away(self) -> None:
        """Say when the server leaves."""
        assert self._context.leaves_at is not None, "the server stays"
        left_s = max(self._context.leaves_at - asyncio.get_running_loop().time(), 0)
        reason = "the server is shutting down; send new requests elsewhere"
        self._send_buffer.send(Goaway(self._last_accepted_id, round(left_s * 1000), reason))

    def leave(self, cause: CancelCause) -> None:
        """The connection is lost; what is resumable stays for a while, the rest is cancelled."""
        for live in self._live.values():
            if live.delivery is not None:
                live.delivery.leave(cause)
            else:
                live.task.cancel()  # a question whose answer nobody reads

    def fail(self, error: QuireError) -> None:
        """End every live request with `error` now, whatever the engine does."""
        for request_id, live in self._live.items():
            live.task.cancel()
            if live.delivery is not None:
                live.delivery.cancel("shutdown")
            self._send_buffer.send(error_frame(request_id, error))
        self._live.clear()

    # Taking requests

    def _begin(self, frame: Generate) -> None:
        """A request that the engine refuses at once never becomes a task: under overload most are refused."""
        if not self._takes(frame.request_id):
            return
        if self._context.leaves_at is not None:
            self._refuse(frame.request_id, Unavailable("the server is shutting down; send this request elsewhere"))
            return
        try:
            source, is_kept = self._source(frame)
        except Exception as error:
            self._send_last(frame.request_id, self._failure(frame.request_id, error))
            return
        self._last_accepted_id = frame.request_id
        self._deliver(frame.request_id, source, frame.credit, paced=is_kept)

    def _resume(self, frame: Resume) -> None:
        if not self._takes(frame.request_id):
            return
        try:
            source = self._context.kept.resume(self._tenant.name, self._session, frame.request_id, frame.next_index)
        except QuireError as error:
            self._send_buffer.send(error_frame(frame.request_id, error))
            return
        self._deliver(frame.request_id, source, frame.credit, paced=True)

    def _source(self, frame: Generate) -> tuple[Source, bool]:
        """Where its chunks come from, and whether that keeps them."""
        request = engine_request(frame, self._tenant.name)
        if not frame.resumable and frame.idempotency_key is None:
            return self._context.requests.submit(self._tenant, frame.request_id, request), False
        follower = self._context.kept.begin(
            self._tenant,
            frame.request_id,
            request,
            session=self._session if frame.resumable else None,
            idempotency_key=frame.idempotency_key,
        )
        return follower, True

    def _takes(self, request_id: int) -> bool:
        """Whether the id is free and there is room; the refusal is sent otherwise. A live request is not touched."""
        if request_id in self._live:
            self._send_buffer.send(duplicate_frame(request_id))
            return False
        if self._tenant.revoked:
            self._refuse(request_id, Unauthenticated("this tenant's keys were revoked"))
            return False
        if len(self._live) >= self._context.config.max_requests_per_connection:
            self._refuse(request_id, Overloaded(f"{len(self._live)} requests are live on this connection"))
            return False
        return True

    def _refuse(self, request_id: int, error: QuireError) -> None:
        """End a request that never reached the engine."""
        self._context.observer.on_rejected(error)
        self._send_last(request_id, error_frame(request_id, error))

    # Answering

    def _deliver(self, request_id: int, source: Source, credit: int | None, *, paced: bool) -> None:
        delivery = OutputStream(
            request_id,
            source,
            self._send_buffer,
            credit=credit,
            credit_timeout_ms=self._context.config.credit_timeout_ms,
            paced=paced,
            progress=self._progress,
        )
        task = self._start(request_id, delivery.run, delivery)
        task.add_done_callback(lambda _: source.end())

    def _ask(self, frame: Tokenize) -> None:
        """Texts wait here in memory, so few may."""
        num_questions = sum(live.delivery is None for live in self._live.values())
        if num_questions >= MAX_QUESTIONS:
            self._refuse(frame.request_id, Overloaded(f"{num_questions} texts are being tokenized on this connection"))
        else:
            self._start(frame.request_id, partial(self._tokenize, frame))

    async def _tokenize(self, frame: Tokenize) -> Tokenized:
        async with self._context.tokenizing:
            token_ids = await self._context.engine.tokenize(frame.text, frame.add_special_tokens)
        if len(token_ids) > MAX_ARRAY_LENGTH:
            raise InvalidRequest(f"the text has {len(token_ids)} tokens; a frame holds at most {MAX_ARRAY_LENGTH}")
        return Tokenized(frame.request_id, token_ids)

    def _answer(self, request_id: int, answer: Callable[[], Frame]) -> None:
        """At once."""
        try:
            frame = answer()
        except Exception as error:
            frame = self._failure(request_id, error)
        self._send_buffer.send(frame)

    def _start(
        self, request_id: int, answer: Callable[[], Coroutine[Any, Any, Frame]], delivery: OutputStream | None = None
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._finish(request_id, answer))
        self._live[request_id] = _Live(task, delivery)
        return task

    async def _finish(self, request_id: int, answer: Callable[[], Coroutine[Any, Any, Frame]]) -> None:
        """The id is free again before the peer can know that its request ended."""
        bind_contextvars(request=new_id())
        try:
            last = await answer()
        except Exception as error:
            last = self._failure(request_id, error)
        del self._live[request_id]
        self._send_last(request_id, last)
        self._last_ended_at = asyncio.get_running_loop().time()

    def _send_last(self, request_id: int, frame: Frame) -> None:
        """Of a request."""
        try:
            self._send_buffer.send(frame)
        except InvalidRequest as error:  # longer than this peer takes
            frame = error_frame(request_id, error)
            self._send_buffer.send(frame)
        if isinstance(frame, Done | Error):
            log_end(frame)

    def _delivery(self, request_id: int) -> OutputStream | None:
        live = self._live.get(request_id)
        return None if live is None else live.delivery

    def _failure(self, request_id: int, error: Exception) -> Error:
        """The frame that ends a request with `error`; what is no QuireError is a bug, and the log's to tell."""
        if not isinstance(error, QuireError):
            _log.error("request failed", client_id=request_id, exc_info=error)
            error = GenerationFailed("an internal error ended this request; see the server's log")
        return error_frame(request_id, error)
