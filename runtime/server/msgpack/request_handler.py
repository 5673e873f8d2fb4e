"""`RequestHandler`: the requests of one connection, by id, and the frames that start, change and end them.

Each accepted id gets exactly one last frame while the connection lives, and is free again before the client can see
that frame. Must not import sockets or the connection.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection, Coroutine, Iterable
from functools import partial
from typing import Any

from structlog.contextvars import bound_contextvars

from ...common.errors import InvalidRequest, Overloaded, ProtocolError, QuireError, Unauthenticated, Unavailable
from ...common.logs import new_id
from ...engine.facade import EngineStats
from ...protocol.codec import MAX_ARRAY_LENGTH, Malformed
from ...protocol.frames import (
    AskScores,
    AskStats,
    AskVectors,
    Cancel,
    Credit,
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
from ...protocol.wire_errors import error_frame
from ..app_context import AppContext
from ..monitoring import CancelCause, note_caller
from ..requests.output_log import OutputLog
from ..requests.output_reader import OutputReader, Pace
from ..requests.request_log import quire_error
from ..requests.resume import Keeping
from ..requests.send_buffer import SendBuffer
from ..tenancy.tenants import Tenant, TenantTotals
from .convert import duplicate_frame, embed_request, engine_request, find_model, models_frame, stats_frame
from .frame_writer import FrameWriter
from .vector_stream import VectorStream

MAX_TEXTS = 32  # texts of one connection that are being tokenized
RequestFrame = Generate | Resume | AskVectors | AskScores | Tokenize  # frames that `start` takes


class RequestHandler:
    """Handles the frames of one connection, from WELCOME on."""

    def __init__(
        self,
        context: AppContext,
        send_buffer: SendBuffer,
        tenant: Tenant,
        session: str,
        features: Collection[str],
    ) -> None:
        self._context = context
        self._send_buffer = send_buffer
        self.tenant = tenant
        self.turns = tenant.frame_turns
        self._session = tenant.name, session
        self._features = features
        self._tasks: dict[int, asyncio.Task[None]] = {}  # request id -> task, for live requests
        self._streams: dict[int, OutputReader | VectorStream] = {}  # streams; TOKENIZE has none
        self._last_accepted_id: int | None = None
        self._last_ended_at = asyncio.get_running_loop().time()
        if context.leaves_at is not None:
            self.go_away()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """One per live request."""
        return list(self._tasks.values())

    @property
    def idle_since(self) -> float | None:
        """The loop's time at which the last live request ended; None while there are some."""
        return None if self._tasks else self._last_ended_at

    def start(self, frame: RequestFrame) -> None:
        """Start the request of a frame. Raises ProtocolError if the frame must end the connection.

        An immediate refusal, the usual case under overload, creates no task.
        """
        request_id = frame.request_id
        is_embedding = isinstance(frame, AskVectors | AskScores)
        if is_embedding and "embeddings" not in self._features:
            raise ProtocolError("EMBED and SCORE need the feature `embeddings` in HELLO")
        note_caller("" if isinstance(frame, Resume | Tokenize) else frame.traceparent)
        with bound_contextvars(request=new_id()):
            if not self._accepts_id(request_id, needs_engine=is_embedding or isinstance(frame, Generate)):
                return
            try:
                match frame:
                    case Generate():
                        reader = self._generate(frame)
                        self._last_accepted_id = request_id
                    case Resume():
                        reader = self._resume(frame)
                    case AskVectors() | AskScores():
                        self._embed(frame)
                        return
                    case Tokenize():
                        self._tokenize(frame)
                        return
            except Exception as error:
                self._send_refusal(request_id, quire_error(error, client_id=request_id))
                return
            writer = FrameWriter(request_id, self._send_buffer, self._features)
            self._start(request_id, partial(writer.play, reader), reader)

    def handle(self, frame: Frame | Malformed) -> None:
        """Handle a frame that starts no request. Raises ProtocolError if it must end the connection."""
        match frame:
            case Malformed(request_id, error):
                if self._accepts_id(request_id):
                    self._refuse(request_id, error)
            case Cancel(request_id):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.cancel("client")
            case Credit(request_id, tokens):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.grant(tokens)
            case ListModels(request_id):
                self._answer(request_id, lambda: models_frame(request_id, self._context.models, self._features))
            case AskStats(request_id):
                self._answer(request_id, lambda: stats_frame(request_id, self._stats()))
            case Ping(nonce):
                self._send_buffer.send(Pong(nonce))
            case Pong():
                pass
            case Hello():
                raise ProtocolError("HELLO came twice")

    def go_away(self) -> None:
        """Send GOAWAY: the server is draining."""
        assert self._context.leaves_at is not None, "the server is not draining"
        left_s = max(self._context.leaves_at - asyncio.get_running_loop().time(), 0)
        reason = "the server is shutting down; send new requests elsewhere"
        self._send_buffer.send(Goaway(self._last_accepted_id, round(left_s * 1000), reason))

    def leave(self, cause: CancelCause) -> None:
        """Leave the live requests: the connection is lost.

        Resumable requests stay for a while, the others are cancelled.
        """
        for request_id, task in self._tasks.items():
            if (stream := self._streams.get(request_id)) is not None:
                stream.leave(cause)
            else:
                task.cancel()

    def fail(self, error: QuireError) -> None:
        """End every live request with `error` now, whatever the engine does."""
        for request_id, task in self._tasks.items():
            task.cancel()
            if (stream := self._streams.get(request_id)) is not None:
                stream.shut_down(error)
            self._send_buffer.send(error_frame(request_id, error))
        self._tasks.clear()
        self._streams.clear()

    # Requests

    def _check_features(self, fields: Iterable[tuple[str, str, object]]) -> None:
        """Raise InvalidRequest for a given field of a feature that was not negotiated."""
        for field_belongs, feature, is_given in fields:
            if is_given and feature not in self._features:
                raise InvalidRequest(f"{field_belongs} to the feature `{feature}`, which HELLO did not request")

    def _generate(self, frame: Generate) -> OutputReader:
        """Submit the request, or find the earlier one with its key. Return its reader. Raises a refusal."""
        self._check_features(
            (
                ("chat belongs", "tools", frame.chat is not None),
                ("generated belongs", "continue", frame.generated is not None or frame.ended),
                ("prompt_cache_key belongs", "cache_key", frame.prompt_cache_key),
                ("images belong", "images", frame.images),
                ("model belongs", "models", frame.model),
                ("traceparent belongs", "trace", frame.traceparent),
            )
        )
        context = self._context
        request_id = frame.request_id
        request = engine_request(frame, self.tenant.name, find_model(context.models, frame.model, "text"))
        pace = self._pace(frame)
        if not frame.resumable and frame.idempotency_key is None:
            return OutputReader(OutputLog(context.requests.submit(self.tenant, request_id, request)), pace)
        keeping = Keeping(frame.idempotency_key, frame.resumable)
        log = context.replays.find(self.tenant, request_id, request, keeping) or context.replays.open(
            self.tenant, request_id, request, keeping
        )
        reader = OutputReader(log, pace)
        if frame.resumable:
            context.replays.resume_index.add(self._session, request_id, reader)
        return reader

    def _resume(self, frame: Resume) -> OutputReader:
        """Return a reader of an earlier request. Raises a refusal."""
        index = self._context.replays.resume_index
        entry = index.find(self._session, frame.request_id)
        reader = OutputReader(entry.log, self._pace(frame), frame.next_index)
        index.attach(entry, reader)
        self._context.requests.log.resumed(self.tenant.name, frame.request_id, frame.next_index)
        return reader

    def _embed(self, frame: AskVectors | AskScores) -> None:
        """Submit the texts. Raises a refusal."""
        self._check_features(
            (("model belongs", "models", frame.model), ("traceparent belongs", "trace", frame.traceparent))
        )
        request = embed_request(frame, self.tenant.name, find_model(self._context.models, frame.model, "vectors"))
        live = self._context.requests.embed(self.tenant, frame.request_id, request)
        writer = FrameWriter(frame.request_id, self._send_buffer, self._features)
        stream = VectorStream(live, writer, self._pace(frame), is_score=isinstance(frame, AskScores))
        self._last_accepted_id = frame.request_id
        self._start(frame.request_id, stream.run, stream)

    def _pace(self, frame: Generate | Resume | AskVectors | AskScores) -> Pace:
        timeout_ms = self._context.config.credit_timeout_ms
        return Pace(self._send_buffer, self.tenant.output_turns, frame.credit, timeout_ms)

    def _tokenize(self, frame: Tokenize) -> None:
        """Answer in a task. Texts wait in memory meanwhile, so their number is limited."""
        num_texts = len(self._tasks) - len(self._streams)
        if num_texts >= MAX_TEXTS:
            self._refuse(frame.request_id, Overloaded(f"{num_texts} texts are being tokenized on this connection"))
            return

        async def tokenized() -> Tokenized:
            self._check_features([("model belongs", "models", frame.model)])
            model = find_model(self._context.models, frame.model, "text" if not frame.model else "any")
            token_ids = await model.model.engine.tokenize(
                frame.text, frame.add_special_tokens, tenant=self.tenant.name, of_encoder=model.is_encoder
            )
            if len(token_ids) > MAX_ARRAY_LENGTH:
                raise InvalidRequest(f"the text has {len(token_ids)} tokens; a frame holds at most {MAX_ARRAY_LENGTH}")
            return Tokenized(frame.request_id, token_ids)

        texts = self._context.requests.texts.of(self.tenant.name)
        try:
            release = texts.reserve(sys.getsizeof(frame.text))
        except QuireError as error:
            self._refuse(frame.request_id, error)
            return
        task = self._start(frame.request_id, tokenized)
        task.add_done_callback(lambda _: release())

    def _stats(self) -> EngineStats | TenantTotals:
        """Return the engine's statistics for an operator or the only tenant, and the own totals of other tenants."""
        if self.tenant.limits.operator or self._context.keyring.num_tenants == 1:
            return self._context.models.stats()
        return self.tenant.totals

    def _answer(self, request_id: int, answer: Callable[[], Frame]) -> None:
        """Send `answer()` immediately."""
        if not self._accepts_id(request_id):
            return
        try:
            frame = answer()
        except Exception as error:
            frame = error_frame(request_id, quire_error(error, client_id=request_id))
        self._send_buffer.send(frame)

    # Beginning and end

    def _accepts_id(self, request_id: int, *, needs_engine: bool = False) -> bool:
        """Return whether a request may start under this id; send the refusal otherwise.

        A draining server refuses requests that need the engine.
        """
        if request_id in self._tasks:
            duplicate = duplicate_frame(request_id)
            self._context.requests.log.refused(self.tenant.name, request_id, duplicate.code)
            self._send_buffer.send(duplicate)
        elif self.tenant.revoked:
            self._refuse(request_id, Unauthenticated("this tenant's keys were revoked"))
        elif len(self._tasks) >= self._context.config.max_requests_per_connection:
            self._refuse(request_id, Overloaded(f"{len(self._tasks)} requests are live on this connection"))
        elif needs_engine and self._context.leaves_at is not None:
            self._refuse(request_id, Unavailable("the server is shutting down; send this request elsewhere"))
        else:
            return True
        return False

    def _refuse(self, request_id: int, error: QuireError) -> None:
        """End a request that never reached the engine."""
        self._context.observer.on_rejected(error)
        self._send_refusal(request_id, error)

    def _send_refusal(self, request_id: int, error: QuireError) -> None:
        self._context.requests.log.refused(self.tenant.name, request_id, error.code, error.retry_after_ms)
        self._send_buffer.send(error_frame(request_id, error))

    def _start(
        self,
        request_id: int,
        answer: Callable[[], Coroutine[Any, Any, Frame]],
        stream: OutputReader | VectorStream | None = None,
    ) -> asyncio.Task[None]:
        task = self._tasks[request_id] = asyncio.create_task(self._run(request_id, answer))
        if stream is not None:
            self._streams[request_id] = stream
            task.add_done_callback(lambda _: stream.end())
        return task

    async def _run(self, request_id: int, answer: Callable[[], Coroutine[Any, Any, Frame]]) -> None:
        """Send the frame that `answer` returns.

        The id is free again before the client can know that its request ended.
        """
        try:
            last = await answer()
        except Exception as error:  # a text failed: a stream returns its error
            last = self._refused_text(request_id, error)
        del self._tasks[request_id]
        self._streams.pop(request_id, None)
        self._send_last(request_id, last)
        self._last_ended_at = asyncio.get_running_loop().time()

    def _refused_text(self, request_id: int, error: Exception) -> Error:
        refusal = quire_error(error, client_id=request_id)
        self._context.requests.log.refused(self.tenant.name, request_id, refusal.code)
        return error_frame(request_id, refusal)

    def _send_last(self, request_id: int, frame: Frame) -> None:
        """Send the last frame of a request."""
        try:
            self._send_buffer.send(frame)
        except InvalidRequest as error:  # longer than this peer accepts
            self._send_buffer.send(error_frame(request_id, error))
