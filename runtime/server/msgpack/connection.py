"""`Connection`: one client's connection: its greeting, its reading and its end.

At its end, every request is detached or failed, the last frame carries the error if there is one, and no task of the
connection remains. Must not import the server or the listening sockets.
"""

from __future__ import annotations

import asyncio
import logging

from structlog.contextvars import bind_contextvars

from ...common.errors import ProtocolError, QuireError
from ...common.logs import new_id
from ...net.acceptor import AcceptedConnection, linger
from ...net.address import TCPAddress
from ...protocol.codec import Decoder
from ...protocol.frames import (
    CLIENT_FRAMES,
    FEATURES,
    HEARTBEAT_NONCE,
    MIN_FRAME_BYTES,
    PROTOCOL_VERSION,
    Hello,
    Ping,
    Welcome,
)
from ...protocol.wire_errors import error_frame
from ..app_context import AppContext
from ..requests.request_log import quire_error
from ..requests.send_buffer import SendBuffer
from ..tenancy.tenant_bytes import PendingInput
from ..tenancy.tenants import FRAMES_PER_REQUEST
from .convert import check_hello
from .request_handler import RequestFrame, RequestHandler
from .watchdog import Watchdog

READ_BYTES = 64 << 10
BYTES_PER_FRAME = 4 << 10  # bytes that count as one frame

TLS_HANDSHAKE = b"\x16\x03"
HTTP_METHODS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"CONNECT ", b"PRI * HTTP")
HTTP_ANSWER = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b\n"


class Connection:
    """`run` serves the client until either side ends the connection.

    One task reads, one writes, and each live request has a task of its own.
    """

    def __init__(self, accepted: AcceptedConnection, context: AppContext) -> None:
        self._accepted = accepted
        self._reader = accepted.reader
        self._writer = writer = accepted.writer
        self._context = context
        self._config = context.config
        self._decoder = Decoder(CLIENT_FRAMES)
        self._send_buffer = SendBuffer(
            writer,
            max_bytes=self._config.max_outgoing_bytes,
            write_timeout_s=self._config.write_timeout_ms / 1000,
        )
        self._pending_input = PendingInput(context.pending.of(None), self._refuse)
        self._handler: RequestHandler | None = None  # handler of frames; None before WELCOME
        self._watchdog: Watchdog | None = None  # likewise
        self._reading: asyncio.Task[None] | None = None
        self._has_ended = False

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """One task per live request."""
        return [] if self._handler is None else self._handler.tasks

    @property
    def unsent_bytes(self) -> int:
        return self._send_buffer.unsent_bytes

    async def run(self, refusal: QuireError | None = None) -> None:
        """Serve the client, or only send `refusal`, then close. Never raises."""
        bind_contextvars(connection=new_id(), peer=_peer(self._writer))
        self._reading = asyncio.create_task(self._read(refusal))
        sending = asyncio.create_task(self._send_buffer.run())
        try:
            await asyncio.wait({self._reading, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._reading.cancel()
            if self._watchdog is not None:
                self._watchdog.stop()
            if self._handler is not None:
                self._handler.leave("slow_reader" if self._send_buffer.is_stuck else "disconnect")
            self._send_buffer.close()
            tasks = [self._reading, sending, *self.tasks]
            try:
                await asyncio.wait(tasks)
                await linger(self._reader, self._writer)
            finally:
                if (limit := self._send_buffer.exceeded) is not None:
                    self._log_slow_reader(limit)
                for task in tasks:
                    task.cancel()
                self._send_buffer.leave()
                self._pending_input.leave()
                self._writer.transport.abort()
                # These objects refer to this connection; without them it is freed now and not by a later garbage
                # collection.
                self._handler = self._watchdog = self._reading = None

    def go_away(self) -> None:
        """Send GOAWAY: the server is draining."""
        if self._handler is not None:
            self._handler.go_away()

    def fail_requests(self, error: QuireError) -> None:
        """End every live request with `error` now."""
        if self._handler is not None:
            self._handler.fail(error)

    def shut_down(self, error: QuireError) -> None:
        """End the connection from the server's side: `error` is the last frame of its requests and its own."""
        self.fail_requests(error)
        self._end(error)

    def abort(self) -> None:
        """Close the connection without sending unsent bytes."""
        self._writer.transport.abort()

    def _end(self, error: QuireError) -> None:
        """Send `error` as the last frame, and handle no further frame. Only the first call has an effect."""
        if self._has_ended:
            return
        self._has_ended = True
        self._send_buffer.send(error_frame(None, error))
        self._send_buffer.close()
        self._decoder = Decoder(CLIENT_FRAMES)  # releases an incomplete frame
        if self._reading is not None:
            self._reading.cancel()

    # Reading

    async def _read(self, refusal: QuireError | None) -> None:
        """Handle frames until the client closes the connection or breaks the protocol."""
        timeout_ms = self._config.handshake_timeout_ms
        too_late = ProtocolError(f"no HELLO within {timeout_ms} ms")
        hello_timer = asyncio.get_running_loop().call_later(timeout_ms / 1000, self._refuse, too_late)
        try:
            if refusal is not None:
                raise refusal
            granted = 0  # frames that may be handled before the turn of the tenant's other connections
            while not self._has_ended and (data := await self._reader.read(READ_BYTES)):
                num_frames = 0
                if self._handler is None and not self._decoder.is_inside_frame:
                    self._check_protocol(data)
                if self._handler is not None:
                    granted -= len(data) // BYTES_PER_FRAME  # decoding a long frame takes the time of many short ones
                    while granted <= 0:
                        granted += await self._handler.turns.wait()
                for frame in self._decoder.feed(data):
                    if self._has_ended:
                        break
                    self._pending_input.set_frame_bytes(self._decoder.num_buffered_bytes)
                    if self._handler is None:
                        self._welcome(check_hello(frame))
                        hello_timer.cancel()
                    else:
                        if granted <= 0:
                            granted += await self._handler.turns.wait()
                        if isinstance(frame, RequestFrame):
                            granted -= FRAMES_PER_REQUEST
                            self._handler.start(frame)
                        else:
                            granted -= 1
                            self._handler.handle(frame)
                    num_frames += 1
                self._pending_input.set_frame_bytes(self._decoder.num_buffered_bytes)
                if self._watchdog is not None:
                    self._watchdog.received(num_frames, self._decoder.is_inside_frame)
        except OSError:
            pass
        except QuireError as error:
            self._refuse(error)
        except Exception as error:
            self._end(quire_error(error, "connection"))
        finally:
            hello_timer.cancel()

    def _check_protocol(self, first_bytes: bytes) -> None:
        """Raise ProtocolError for HTTP and TLS, whose first bytes would be read as the length of a frame."""
        if first_bytes.startswith(TLS_HANDSHAKE):
            raise ProtocolError("the client began a TLS handshake; this port is served without TLS")
        if first_bytes.startswith(HTTP_METHODS):
            context = self._context
            api = f"OpenAI's HTTP API is on {context.openai_address}, " if context.openai_address else ""
            text = (
                f"this port speaks Quire's msgpack frames; {api}"
                f"metrics and probes (HTTP) are on {context.operator_address}"
            )
            self._writer.write(HTTP_ANSWER % (len(text) + 1, text.encode()))
            self._send_buffer.close()  # an ERROR frame would be part of the HTTP answer
            raise ProtocolError(text)

    def _refuse(self, error: QuireError) -> None:
        if self._has_ended:
            return
        self._context.connection_log.write(logging.WARNING, "connection refused", code=error.code, reason=str(error))
        self._end(error)

    def _welcome(self, hello: Hello) -> None:
        """Send WELCOME, and accept requests from now on. Raises Unauthenticated."""
        tenant = self._context.keyring.authenticate(hello.token)
        self._accepted.settle()
        bind_contextvars(tenant=tenant.name)
        self._send_buffer.join(self._context.unsent.of(tenant.name))
        self._pending_input.move_to(self._context.pending.of(tenant.name))
        session = self._context.replays.resume_index.session_name(tenant.name, hello.session)
        features = tuple(feature for feature in FEATURES if feature in hello.features)
        heartbeat = "heartbeat" in features
        self._decoder.max_frame_bytes = min(
            hello.max_frame_bytes, self._config.max_frame_bytes, max(MIN_FRAME_BYTES, self._pending_input.limit)
        )
        self._send_buffer.send(
            Welcome(
                PROTOCOL_VERSION,
                features,
                self._decoder.max_frame_bytes,
                self._context.models.main.name,
                session,
                self._config.heartbeat_ms if heartbeat else None,
                self._context.models.fingerprint if "continue" in features else "",
            )
        )
        self._send_buffer.max_frame_bytes = self._decoder.max_frame_bytes
        handler = self._handler = RequestHandler(self._context, self._send_buffer, tenant, session, features)
        self._watchdog = Watchdog(
            self._config,
            heartbeat=heartbeat,
            idle_since=lambda: handler.idle_since,
            ping=lambda: self._send_buffer.send(Ping(HEARTBEAT_NONCE)),
            on_timeout=self._refuse,
        )

    # The end

    def _log_slow_reader(self, limit: str) -> None:
        tenant = None if self._handler is None else self._handler.tenant.name
        event = "connection closed: the client reads too slowly"
        self._context.connection_log.write(logging.WARNING, event, limit=limit, tenant=tenant)


def _peer(writer: asyncio.StreamWriter) -> str:
    name = writer.get_extra_info("peername")
    return str(TCPAddress(*name[:2])) if isinstance(name, tuple) else "unix"
