"""One connection of a client: the handshake, sending frames, and passing answers to the inbox of their request.

Every inbox receives its request's last answer or `ConnectionLost`, and nothing after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import ssl
import time
from typing import Any, NamedTuple

import msgspec

from ..common.errors import InvalidRequest, ProtocolError, QuireError, Unavailable
from ..net.address import Address, UnixAddress
from ..net.connecting import open_tcp, tls_error
from ..protocol.codec import MAX_ARRAY_LENGTH, MAX_ARRAYS, Decoder, Malformed, check_limits, encode
from ..protocol.frames import (
    FEATURES,
    HEARTBEAT_NONCE,
    HEARTBEATS_MISSED,
    MAX_FRAME_BYTES,
    MIN_FRAME_BYTES,
    PROTOCOL_VERSION,
    SERVER_FRAMES,
    Accepted,
    AskScores,
    AskStats,
    AskVectors,
    Cancel,
    Done,
    Error,
    Frame,
    Generate,
    Goaway,
    Hello,
    ListModels,
    Models,
    Ping,
    Pong,
    Progress,
    Resume,
    Scores,
    Stats,
    Tokenize,
    Tokenized,
    Tokens,
    Vectors,
    Welcome,
)
from ..protocol.wire_errors import error_from_frame

CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0  # time for unsent bytes to leave; the server cancels the requests anyway
READ_BYTES = 64 << 10


class ConnectionLost(NamedTuple):
    """The last entry of an inbox when the connection is lost; the request may still be running on the server."""

    reason: QuireError


LastAnswer = Done | Tokenized | Models | Stats | QuireError
Answer = Accepted | Progress | Tokens | Vectors | Scores | LastAnswer | ConnectionLost
Inbox = asyncio.Queue[Answer]


class ClientConnection:
    """An open connection, made by `open`. One task reads from it; callers choose the request ids."""

    def __init__(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.address = address
        self.lost: QuireError | None = None  # why the connection was lost
        self.is_leaving = False  # the server has sent GOAWAY
        self._reader = reader
        self._writer = writer
        self._decoder = Decoder(SERVER_FRAMES, MAX_FRAME_BYTES)
        self._max_frame_bytes = MIN_FRAME_BYTES
        self._inboxes: dict[int, Inbox] = {}
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._next_nonce = HEARTBEAT_NONCE
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._closes_when_idle = False
        self._heartbeat_s = 0.0
        self._silent_intervals = 0
        self._heartbeat: asyncio.TimerHandle | None = None
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(
        cls,
        address: Address,
        token: str | None,
        tls: ssl.SSLContext | None,
        session: str | None = None,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> ClientConnection:
        """Connect and shake hands. Raises Unavailable, Unauthenticated, TLSError or ProtocolError."""
        connection: ClientConnection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = cls(address, *await _connect(address, tls))
                await connection._shake_hands(token, session)
        except BaseException as error:
            if connection is not None:
                await connection.close()
            if isinstance(error, TimeoutError):
                raise Unavailable(f"{address} did not answer within {timeout_s:.0f} s") from None
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                raise tls_error(address, error) from error
            if isinstance(error, OSError):
                raise Unavailable(f"cannot connect to {address}: {_reason(error)}") from error
            raise
        return connection

    @property
    def session(self) -> str:
        return self._welcome.result().session

    @property
    def features(self) -> tuple[str, ...]:
        """The features that the server granted."""
        return self._welcome.result().features

    @property
    def fingerprint(self) -> str:
        """The server's identity for the bits of outputs; empty if the server cannot continue outputs."""
        return self._welcome.result().fingerprint

    def ask(self, frame: Generate | Resume | AskVectors | AskScores | Tokenize | ListModels | AskStats) -> Inbox:
        """Send `frame` and return the inbox of its answers; it holds ConnectionLost if the connection is lost already.

        Raises InvalidRequest if the frame cannot be encoded or exceeds the protocol's limits.
        """
        if isinstance(frame, Generate) and frame.chat is not None and "tools" not in self._welcome.result().features:
            raise InvalidRequest("chat is not supported by this server; use a newer one, or its HTTP API")
        if isinstance(frame, Generate) and frame.prompt_cache_key and "cache_key" not in self.features:
            frame = msgspec.structs.replace(frame, prompt_cache_key="")  # the output is the same without it
        if isinstance(frame, Generate | AskVectors | AskScores) and frame.traceparent and "trace" not in self.features:
            frame = msgspec.structs.replace(frame, traceparent="")
        if isinstance(frame, Generate) and frame.images and "images" not in self._welcome.result().features:
            raise InvalidRequest("this server is of an earlier release, which takes no images")
        if not isinstance(frame, Resume | ListModels | AskStats) and frame.model and "models" not in self.features:
            raise InvalidRequest("this server is of an earlier release, which serves one model; leave out model")
        inbox: Inbox = asyncio.Queue()
        if self.lost is not None:
            inbox.put_nowait(ConnectionLost(copy.copy(self.lost)))
        else:
            data = encode(frame, self._max_frame_bytes)
            if isinstance(frame, Generate | AskVectors | AskScores) and _may_exceed_limits(frame, len(data)):
                check_limits(data)
            self._writer.write(data)
            self._inboxes[frame.request_id] = inbox
        return inbox

    def leave(self, request_id: int) -> None:
        """Drop the request's inbox, and cancel the request if its last answer has not arrived."""
        if self._inboxes.pop(request_id, None) is not None:
            self.send(Cancel(request_id))
        if self._closes_when_idle and not self._inboxes:
            self._writer.close()

    def send(self, frame: Frame) -> None:
        """Send `frame`, or drop it if the connection is lost. Raises InvalidRequest if the frame cannot be encoded."""
        data = encode(frame, self._max_frame_bytes)
        if self.lost is None:
            self._writer.write(data)

    async def flush(self) -> None:
        """Wait until the write buffer has drained.

        A lost connection is not reported here: the answers may contain the server's reason for closing.
        """
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def ping(self) -> float:
        """Return the seconds from PING to PONG. Raises the reason if the connection is lost."""
        if self.lost is not None:
            raise copy.copy(self.lost)
        self._next_nonce += 1
        nonce = self._next_nonce
        answered = self._pings[nonce] = asyncio.get_running_loop().create_future()
        try:
            started = time.perf_counter()  # uvloop's clock has a resolution of a millisecond
            self.send(Ping(nonce))
            await self.flush()
            await answered
            return time.perf_counter() - started
        finally:
            del self._pings[nonce]

    def close_when_idle(self) -> None:
        """Close now if no request is running, else once the last one has ended."""
        self._closes_when_idle = True
        if not self._inboxes:
            self._writer.close()

    async def close(self) -> None:
        """Close within CLOSE_TIMEOUT_S, even if the server does not read. Idempotent, also after a cancelled close."""
        self._lose(Unavailable("this client is closed"))
        self._reading.cancel()
        self._writer.close()
        closed = asyncio.ensure_future(self._writer.wait_closed())
        closed.add_done_callback(lambda task: task.cancelled() or task.exception())  # mark the exception as retrieved
        try:
            await asyncio.wait([self._reading, closed], timeout=CLOSE_TIMEOUT_S)
        finally:
            self._writer.transport.abort()

    async def _shake_hands(self, token: str | None, session: str | None) -> None:
        self.send(Hello((PROTOCOL_VERSION,), token, FEATURES, MAX_FRAME_BYTES, session))
        await self.flush()
        welcome = await self._welcome
        self._max_frame_bytes = welcome.max_frame_bytes
        if welcome.heartbeat_ms is not None:
            self._heartbeat_s = welcome.heartbeat_ms / 1000
            self._await_heartbeat()

    # Reading

    async def _read(self) -> None:
        try:
            while data := await self._reader.read(READ_BYTES):
                self._silent_intervals = 0
                if data.startswith(b"HTTP/") and not self._welcome.done():
                    raise ProtocolError("this is an HTTP port; use the address after `clients` in the ready line")
                for frame in self._decoder.feed(data):
                    self._dispatch(frame)
            self._lose(Unavailable(f"the server closed the connection{self._hint()}"))
        except OSError as error:
            reason = f"the connection to the server was lost: {error.strerror or error}"
            self._lose(Unavailable(reason + self._hint()))
        except QuireError as error:
            self._lose(error)
        self._writer.close()

    def _hint(self) -> str:
        """Return advice for a connection that ends before the server's greeting, empty later and over TLS."""
        if self._welcome.done() or self._writer.get_extra_info("ssl_object") is not None:
            return ""
        return " before its greeting; if the server uses TLS, pass tls="

    def _dispatch(self, frame: Frame | Malformed) -> None:
        match frame:
            case Accepted() | Progress() | Tokens() | Vectors() | Scores():
                if (inbox := self._inboxes.get(frame.request_id)) is not None:  # None: the caller left
                    inbox.put_nowait(frame)
            case Done(request_id) | Tokenized(request_id) | Models(request_id) | Stats(request_id):
                self._end(request_id, frame)
            case Error(None):
                raise error_from_frame(frame)
            case Error(int(request_id)):
                self._end(request_id, error_from_frame(frame))
            case Ping(nonce):
                self.send(Pong(nonce))
            case Pong(nonce):
                if (answered := self._pings.get(nonce)) is not None and not answered.done():
                    answered.set_result(None)
            case Goaway():
                self.is_leaving = True
            case Welcome():
                if self._welcome.done():
                    raise ProtocolError("WELCOME came twice")
                self._welcome.set_result(frame)

    def _end(self, request_id: int, answer: LastAnswer) -> None:
        if (inbox := self._inboxes.pop(request_id, None)) is not None:
            inbox.put_nowait(answer)

    def _await_heartbeat(self) -> None:
        """Close the connection after HEARTBEATS_MISSED intervals without a byte from the server.

        Counting intervals instead of seconds keeps a suspended client from closing a healthy connection.
        """
        if self._silent_intervals == HEARTBEATS_MISSED:
            self._lose(Unavailable(f"the server sent nothing for {HEARTBEATS_MISSED * self._heartbeat_s:.3g} s"))
            self._writer.transport.abort()
            return
        if self._silent_intervals:
            self.send(Ping(HEARTBEAT_NONCE))
        self._silent_intervals += 1
        self._heartbeat = asyncio.get_running_loop().call_later(self._heartbeat_s, self._await_heartbeat)

    def _lose(self, reason: QuireError) -> None:
        """Record why the connection is lost and fail every waiting caller. Only the first reason is kept."""
        if self.lost is not None:
            return
        self.lost = reason
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        for inbox in self._inboxes.values():
            inbox.put_nowait(ConnectionLost(copy.copy(reason)))
        self._inboxes.clear()
        futures: list[asyncio.Future[Any]] = [self._welcome, *self._pings.values()]
        for waiting in futures:
            if not waiting.done():
                waiting.set_exception(copy.copy(reason))
                waiting.exception()  # mark as retrieved: its caller may have been cancelled


def _may_exceed_limits(frame: Generate | AskVectors | AskScores, num_bytes: int) -> bool:
    """Return whether the encoded frame has to be checked with `check_limits`.

    A frame beyond the limits would make the server close the connection of all requests. The check takes three times as
    long as encoding, so frames without maps and too short to hold a too long array skip it.
    """
    has_maps = isinstance(frame, Generate) and bool(frame.messages or frame.params.logit_bias)
    return has_maps or num_bytes > (MAX_ARRAY_LENGTH if isinstance(frame, Generate) else MAX_ARRAYS)


def _reason(error: OSError) -> str:
    """Return the system's text for the error; asyncio replaces it with the address, which the caller names anyway."""
    text = error.strerror or str(error)
    return os.strerror(error.errno) if error.errno and "Connect call failed" in text else text


async def _connect(address: Address, tls: ssl.SSLContext | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(address, UnixAddress):
        return await asyncio.open_unix_connection(address.path)
    return await open_tcp(address, tls)
