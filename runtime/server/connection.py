"""One client's connection: its handshake, its live requests, its end.

It must not know listeners or other connections. One invariant: each request id that was accepted gets exactly one DONE
or ERROR while the connection lives, and when it ends, however it ends, all its requests are cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable

import structlog

from ..config import ServerConfig
from ..engine.facade import EngineFacade, Generation
from ..errors import GenerationFailed, InvalidRequest, Overloaded, ProtocolError, QuireError
from ..wire.codec import Decoder, Malformed
from ..wire.errors import error_frame
from ..wire.frames import (
    CLIENT_FRAMES,
    PROTOCOL_VERSION,
    Cancel,
    Done,
    Error,
    Frame,
    Generate,
    Hello,
    Ping,
    Pong,
    Welcome,
)
from .admission import accepted_frame, check_hello, done_frame, duplicate_frame, engine_request, tokens_frame
from .metrics import CancelCause, PrometheusObserver
from .outbox import Outbox

READ_BYTES = 64 << 10
LINGER_S = 1.0

_log = structlog.get_logger("quire.server")


class Connection:
    """`run` serves the peer until either side ends it. One task reads, one writes, one more per live request."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        engine: EngineFacade,
        config: ServerConfig,
        observer: PrometheusObserver,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._engine = engine
        self._config = config
        self._observer = observer
        self._decoder = Decoder(CLIENT_FRAMES)
        self._outbox = Outbox(
            writer, max_bytes=config.max_outgoing_bytes, write_timeout_s=config.write_timeout_ms / 1000
        )
        self._live: dict[int, _LiveRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None
        self._end_cause: CancelCause = "disconnect"

    async def run(self, refusal: QuireError | None = None) -> None:
        """Serve, or only say `refusal`, then close. Never raises."""
        self._reading = asyncio.create_task(self._converse(refusal))
        sending = asyncio.create_task(self._outbox.run())
        try:
            await asyncio.wait({self._reading, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._reading.cancel()
            self._cancel_requests("slow_reader" if self._outbox.stuck else self._end_cause)
            self._outbox.close()
            try:
                await asyncio.wait({self._reading, sending, *self._tasks})
                await self._linger()
            finally:
                for task in (self._reading, sending, *self._tasks):
                    task.cancel()
                self._writer.transport.abort()

    def shut_down(self, error: QuireError) -> None:
        """End the connection from the server's side: `error` is its last frame."""
        self._end(error, "shutdown")
        if self._reading is not None:
            self._reading.cancel()

    def _end(self, error: QuireError, cause: CancelCause) -> None:
        self._end_cause = cause
        self._outbox.send(error_frame(None, error))
        self._outbox.close()

    # Reading

    async def _converse(self, refusal: QuireError | None) -> None:
        """Read frames until the peer closes or breaks the protocol."""
        try:
            if refusal is not None:
                raise refusal
            async with contextlib.aclosing(self._frames()) as frames:
                if await self._shake_hands(frames):
                    async for frame in frames:
                        self._handle(frame)
        except ConnectionError:
            pass
        except QuireError as error:
            _log.warning("connection refused", code=error.code, reason=str(error), peer=self._peer)
            self._end(error, "disconnect")

    async def _frames(self) -> AsyncGenerator[Frame | Malformed, None]:
        while data := await self._reader.read(READ_BYTES):
            for frame in self._decoder.feed(data):
                yield frame

    async def _shake_hands(self, frames: AsyncIterator[Frame | Malformed]) -> bool:
        """False when the peer left without a word."""
        try:
            async with asyncio.timeout(self._config.handshake_timeout_ms / 1000):
                first = await anext(frames, None)
        except TimeoutError:
            raise ProtocolError(f"no HELLO within {self._config.handshake_timeout_ms} ms") from None
        if first is None:
            return False
        if isinstance(first, Malformed):
            raise ProtocolError("the first frame must be HELLO")
        hello = check_hello(first, self._config.token)
        self._decoder.max_frame_bytes = min(hello.max_frame_bytes, self._config.max_frame_bytes)
        model = self._config.served_model_name or ""
        self._outbox.send(Welcome(PROTOCOL_VERSION, (), self._decoder.max_frame_bytes, model))
        return True

    def _handle(self, frame: Frame | Malformed) -> None:
        match frame:
            case Generate():
                self._begin(frame)
            case Malformed(request_id, error):
                self._refuse(request_id, error)
            case Cancel(request_id):
                if (request := self._live.get(request_id)) is not None:
                    self._cancel(request, "client")
            case Ping(nonce):
                self._outbox.send(Pong(nonce))
            case Hello():
                raise ProtocolError("HELLO came twice")

    @property
    def _peer(self) -> str:
        return str(self._writer.get_extra_info("peername") or "unix")

    # Requests

    def _begin(self, frame: Generate) -> None:
        if len(self._live) >= self._config.max_requests_per_connection and frame.request_id not in self._live:
            self._refuse(frame.request_id, Overloaded(f"{len(self._live)} requests are live on this connection"))
        elif frame.request_id in self._live:
            self._outbox.send(duplicate_frame(frame.request_id))
        else:
            self._submit(frame)

    def _submit(self, frame: Generate) -> None:
        """A request that the engine refuses at once never becomes a task: under overload most are refused."""
        try:
            submission = self._engine.submit(engine_request(frame, tenant=""))
        except Exception as error:
            self._outbox.send(self._failure(frame.request_id, error))
            return
        request = self._live[frame.request_id] = _LiveRequest()
        task = asyncio.create_task(self._serve(frame.request_id, request, submission))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refuse(self, request_id: int, error: InvalidRequest | Overloaded) -> None:
        """End a request that never reached the engine; a live one of the same id is not touched."""
        if request_id in self._live:
            self._outbox.send(duplicate_frame(request_id))
            return
        self._observer.on_rejected(error)
        self._outbox.send(error_frame(request_id, error))

    async def _serve(self, request_id: int, request: _LiveRequest, submission: Awaitable[Generation]) -> None:
        """The id is free again before the peer can know that its request ended."""
        try:
            last = await self._stream(request_id, request, submission)
        finally:
            del self._live[request_id]
        self._outbox.send(last)

    async def _stream(self, request_id: int, request: _LiveRequest, submission: Awaitable[Generation]) -> Done | Error:
        """Forward the request's chunks as they come; the frame that ends it is returned."""
        done: Done | None = None
        try:
            generation = await submission
            request.attach(generation)
            self._outbox.send(accepted_frame(request_id, generation))
            async for chunk in generation:
                if (tokens := tokens_frame(request_id, chunk)) is not None:
                    self._outbox.send(tokens)
                done = done_frame(request_id, chunk)
            if done is None:
                raise GenerationFailed("the engine ended this stream without a finish reason")
        except Exception as error:
            return self._failure(request_id, error)
        return done

    def _failure(self, request_id: int, error: Exception) -> Error:
        """The frame that ends a request with `error`; what is no QuireError is a bug, and the log's to tell."""
        if not isinstance(error, QuireError):
            _log.error("request failed", request_id=request_id, peer=self._peer, exc_info=error)
            error = GenerationFailed("an internal error ended this request; see the server's log")
        return error_frame(request_id, error)

    def _cancel(self, request: _LiveRequest, cause: CancelCause) -> None:
        if request.cancel():
            self._observer.on_cancelled(cause)

    def _cancel_requests(self, cause: CancelCause) -> None:
        for request in self._live.values():
            self._cancel(request, cause)

    # The end

    async def _linger(self) -> None:
        """Closing on unread bytes would reset the connection and could destroy our last frame on its way."""
        if self._writer.is_closing():
            return
        with contextlib.suppress(OSError, TimeoutError):
            self._writer.write_eof()
            async with asyncio.timeout(LINGER_S):
                while await self._reader.read(READ_BYTES):
                    pass


class _LiveRequest:
    """A request from its GENERATE on; it can be cancelled before the engine has answered."""

    def __init__(self) -> None:
        self._generation: Generation | None = None
        self._cancelled = False

    def attach(self, generation: Generation) -> None:
        self._generation = generation
        if self._cancelled:
            generation.cancel()

    def cancel(self) -> bool:
        """True the first time."""
        first, self._cancelled = not self._cancelled, True
        if first and self._generation is not None:
            self._generation.cancel()
        return first
