"""`Acceptor`: accepts the connections of one listening socket, within limits that apply from the moment of accepting.

A connection is pending until `settle`: during its TLS handshake and until its first complete message. Beyond a limit of
pending connections, the longest pending one is closed, so silent clients cannot keep others out. Where a port defines a
complete message, a client that has sent none costs neither a task nor a stream. Must not import frames, HTTP or
requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal, NamedTuple

import structlog

from ..common.logs import BoundedLog
from ..common.tasks import end_tasks
from .tls import TLS

RETRY_S = 0.5  # pause after the system had no descriptor or memory for a connection
ACCEPTS_S = 0.0002  # accepting time in one turn of the event loop; the next turn continues
READ_LIMIT = 64 << 10
FIRST_READ_BYTES = 4 << 10
LINGER_S = 1.0
HANDSHAKE_BYTE = b"\x16"  # first byte of a TLS client
LOCAL = "local"  # the address of every client of a unix socket
IPV6_SITE_BITS = 64  # an IPv6 host can use any address of its /64, so these count as one

RefusalCause = Literal["full", "pending", "tls", "system"]

_log = structlog.get_logger("quire.server")


class ConnectionLimits(NamedTuple):
    """Limits of one port."""

    open: int  # accepted connections, pending ones included
    pending: int
    pending_per_address: int  # does not apply to a unix socket
    accepts_per_turn: int = 4  # connections accepted before other tasks of the event loop run


class FirstBytes:
    """The first bytes of a client, until `is_complete` or `timeout_s`; then calls `on_end`, with False if it left."""

    def __init__(
        self,
        accepted: socket.socket,
        is_complete: Callable[[bytearray], bool],
        timeout_s: float,
        on_end: Callable[[bool], None],
    ) -> None:
        self.data = bytearray()
        self._loop = asyncio.get_running_loop()
        self._accepted = accepted
        self._is_complete = is_complete
        self._on_end = on_end
        self._timer = self._loop.call_later(timeout_s, self._end, True)
        self._loop.add_reader(accepted.fileno(), self._read)

    def stop(self) -> None:
        """Read nothing more."""
        self._timer.cancel()
        self._loop.remove_reader(self._accepted.fileno())

    def _read(self) -> None:
        try:
            data = self._accepted.recv(FIRST_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self.data += data
        if not data or self._is_complete(self.data):
            self._end(bool(data))

    def _end(self, is_open: bool) -> None:
        self.stop()
        self._on_end(is_open)


class AcceptedConnection:
    """One accepted connection. `reader` and `writer` are set once TLS is established, before it is served."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def __init__(self, acceptor: Acceptor, accepted: socket.socket, address: str, num_open_at_accept: int) -> None:
        self.num_open_at_accept = num_open_at_accept  # connections of the port, this one included
        self.address = address
        self.socket = accepted  # the socket of `transport`, once there is one
        self.first_bytes: FirstBytes | None = None  # first bytes of a connection without a reader
        self.awaited_since = asyncio.get_running_loop().time()  # earliest time of the client's first message
        self.transport: asyncio.WriteTransport | None = None  # the writer's
        self._acceptor = acceptor

    def settle(self) -> None:
        """End the pending state: the first message was complete. Idempotent."""
        self._acceptor.settle(self)

    def renew(self) -> None:
        """Restart the pending time."""
        self._acceptor.renew(self)


class Acceptor:
    """Accepts until `close`. `serve` runs once per connection, in a task; the connection is closed when it returns.

    `on_refused` is called with the cause for each connection that was closed before `serve` or while pending. With
    `is_complete`, a connection without TLS is served when `is_complete` accepts its first bytes, or after
    `handshake_timeout_s`. A connection that is lost before that is not served.
    """

    def __init__(
        self,
        listening: socket.socket,
        serve: Callable[[AcceptedConnection], Awaitable[None]],
        limits: ConnectionLimits,
        *,
        tls: TLS | None = None,
        handshake_timeout_s: float = 10.0,
        is_complete: Callable[[bytearray], bool] | None = None,
        plain_answer: bytes = b"",
        on_refused: Callable[[RefusalCause], None] = lambda _: None,
    ) -> None:
        """Accept clients at once.

        A client that begins no TLS handshake where TLS is required gets the `plain_answer`.
        """
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._serve = serve
        self._limits = limits
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._is_complete = is_complete if tls is None else None
        self._plain_answer = plain_answer
        self._on_refused = on_refused
        self._open: dict[AcceptedConnection, asyncio.Task[None] | None] = {}  # None: until its first bytes
        self._pending: dict[str, dict[AcceptedConnection, None]] = {}  # address -> connections, longest pending first
        self._retry: asyncio.TimerHandle | None = None
        self._warnings = BoundedLog(_log)
        self._start()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_pending(self) -> int:
        return sum(map(len, self._pending.values()))

    def stop(self) -> None:
        """Accept no further connection. Idempotent."""
        self._loop.remove_reader(self._listening.fileno())
        if self._retry is not None:
            self._retry.cancel()

    async def close(self) -> None:
        """Stop, and end every connection within a second."""
        self.stop()
        for connection in list(self._open):
            self._end(connection)
        await end_tasks(filter(None, self._open.values()), "connections")

    # AcceptedConnection

    def settle(self, connection: AcceptedConnection) -> None:
        same_address = self._pending.get(connection.address, {})
        if connection in same_address:
            del same_address[connection]
            if not same_address:
                del self._pending[connection.address]

    def renew(self, connection: AcceptedConnection) -> None:
        same_address = self._pending.get(connection.address, {})
        if connection in same_address:
            same_address[connection] = same_address.pop(connection)

    # Accepting

    def _start(self) -> None:
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        began_s = time.perf_counter()
        for _ in range(self._limits.accepts_per_turn):
            try:
                accepted, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:  # the client left before it was accepted
                continue
            except OSError as error:
                self._pause(error)
                return
            accepted.setblocking(False)
            self._admit(accepted, _address(peer))
            if time.perf_counter() - began_s > ACCEPTS_S:
                return

    def _pause(self, error: OSError) -> None:
        """Leave connections in the system's queue for a while: there is no descriptor or memory for them."""
        self._on_refused("system")
        self._warnings.write(logging.WARNING, "connection not accepted", reason=error.strerror, retry_s=RETRY_S)
        self._loop.remove_reader(self._listening.fileno())
        self._retry = self._loop.call_later(RETRY_S, self._start)

    def _admit(self, accepted: socket.socket, address: str) -> None:
        if len(self._open) >= self._limits.open:
            accepted.close()
            self._on_refused("full")
            self._warnings.write(
                logging.WARNING, "connection refused", reason="too many connections", open=len(self._open)
            )
            return
        connection = AcceptedConnection(self, accepted, address, len(self._open) + 1)
        self._open[connection] = None
        self._pending.setdefault(address, {})[connection] = None
        if self._is_complete is None:
            self._begin(connection)
        else:
            after = partial(self._after_first_bytes, connection)
            connection.first_bytes = FirstBytes(accepted, self._is_complete, self._handshake_timeout_s, after)
        self._limit_pending(address)

    def _begin(self, connection: AcceptedConnection) -> None:
        """Serve the connection in a task of its own."""
        task = self._open[connection] = self._loop.create_task(self._run(connection))
        # Not a `finally` in the task: a task that is cancelled before it begins runs no code.
        task.add_done_callback(lambda _: self._forget(connection))

    def _after_first_bytes(self, connection: AcceptedConnection, is_open: bool) -> None:
        if is_open:
            self._begin(connection)
        else:
            self._forget(connection)

    def _limit_pending(self, newest: str) -> None:
        """Close the longest pending connection of an address beyond its limit, or of the busiest address."""
        if newest != LOCAL and len(self._pending[newest]) > self._limits.pending_per_address:
            self._shed(newest)
        elif self.num_pending > self._limits.pending:
            self._shed(max(self._pending, key=lambda address: len(self._pending[address])))

    def _shed(self, address: str) -> None:
        oldest = next(iter(self._pending[address]))
        self.settle(oldest)
        if oldest.transport is not None:
            oldest.transport.abort()
        else:
            self._end(oldest)
        self._on_refused("pending")
        self._warnings.write(
            logging.WARNING, "pending connection closed for a newer one", peer=address, pending=self.num_pending
        )

    def _end(self, connection: AcceptedConnection) -> None:
        """End the connection's task, or close the connection if it has no task yet."""
        if (task := self._open[connection]) is not None:
            task.cancel()
        elif connection.first_bytes is not None:
            connection.first_bytes.stop()
            self._forget(connection)

    async def _run(self, connection: AcceptedConnection) -> None:
        try:
            if await self._establish(connection):
                await self._serve(connection)
        except asyncio.CancelledError:
            pass  # shed, or closed

    def _forget(self, connection: AcceptedConnection) -> None:
        """Close a connection whose task has ended, or that never had one."""
        if connection.transport is not None:
            connection.transport.abort()
            if (error := connection.reader.exception()) is not None:
                error.__traceback__ = None  # the traceback's frames hold the reader
        else:
            connection.socket.close()
        connection.first_bytes = None
        self.settle(connection)
        del self._open[connection]

    async def _establish(self, connection: AcceptedConnection) -> bool:
        """Set the connection's streams, after the TLS handshake. Return False if the handshake fails."""
        handshake_timeout_s = None if self._tls is None else self._handshake_timeout_s
        try:
            if self._tls is not None and not await self._begins_handshake(connection.socket):
                await self._answer_plainly(connection)
                raise ConnectionAbortedError("the client began no handshake")
            reader = asyncio.StreamReader(READ_LIMIT)
            if connection.first_bytes is not None:
                reader.feed_data(connection.first_bytes.data)
                connection.first_bytes = None
            protocol = asyncio.StreamReaderProtocol(reader)
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol,
                connection.socket,
                ssl=None if self._tls is None else self._tls.context,
                ssl_handshake_timeout=handshake_timeout_s,
            )
        except OSError as error:  # includes ssl.SSLError and timeouts
            self._on_refused("tls")
            reason = str(error) or "the client ended the handshake"
            self._warnings.write(logging.WARNING, "tls handshake failed", peer=connection.address, reason=reason)
            return False
        if self._tls is not None:
            connection.awaited_since = self._loop.time()
        connection.transport = transport
        connection.reader = reader
        connection.writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        return True

    async def _answer_plainly(self, connection: AcceptedConnection) -> None:
        """Send the `plain_answer` to a client without TLS."""
        reader, writer = await asyncio.open_connection(sock=connection.socket)
        connection.transport = writer.transport
        connection.reader = reader
        try:
            writer.write(self._plain_answer)
            await linger(reader, writer)
        finally:
            writer.transport.abort()

    async def _begins_handshake(self, accepted: socket.socket) -> bool:
        """Wait for the client's first byte: until then a TLS connection would cost memory and time.

        Return whether the byte begins a handshake, or there is no `plain_answer`. Raises TimeoutError.
        """
        readable = asyncio.Event()
        self._loop.add_reader(accepted.fileno(), readable.set)
        try:
            async with asyncio.timeout(self._handshake_timeout_s):
                await readable.wait()
        except TimeoutError:
            raise TimeoutError(f"the client began no handshake within {self._handshake_timeout_s:g} s") from None
        finally:
            self._loop.remove_reader(accepted.fileno())
        return not self._plain_answer or accepted.recv(1, socket.MSG_PEEK) in (HANDSHAKE_BYTE, b"")


async def linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read until the client closes: closing with unread bytes would reset the connection and lose the last sent
    bytes."""
    if writer.is_closing():
        return
    with contextlib.suppress(OSError, TimeoutError):
        if writer.can_write_eof():  # TLS cannot
            writer.write_eof()
        async with asyncio.timeout(LINGER_S):
            while await reader.read(READ_LIMIT):
                pass


def _address(peer: object) -> str:
    """Return the client's address, of IPv6 the network of its site."""
    if not isinstance(peer, tuple):
        return LOCAL
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address):
            address = address.ipv4_mapped or address
        if address.version == 6:
            return str(ipaddress.ip_network((address, IPV6_SITE_BITS), strict=False))
        return str(address)
    return str(peer[0])
