"""`Acceptor`: accepts the connections of one listening socket, within limits that count from the accept on.

A connection is pending until `settle`: during its TLS handshake and until its first complete message. Beyond a limit of
pending connections the one that is pending longest is closed, so clients that stay silent cannot keep others out. Must
not import frames, HTTP or requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple

import structlog

from ..common.logs import BoundedLog
from .tls import TLS

RETRY_S = 0.5  # pause after the system had no descriptor or memory for a connection
READ_LIMIT = 64 << 10
LOCAL = "local"  # the address of every client of a unix socket
IPV6_SITE_BITS = 64  # an IPv6 host can use any address of its /64, so these count as one

RefusalCause = Literal["full", "pending", "tls", "system"]

_log = structlog.get_logger("quire.server")


class ConnectionLimits(NamedTuple):
    """Limits of one port."""

    open: int  # accepted connections, pending ones included
    pending: int
    pending_per_address: int  # does not apply to a unix socket
    accepts_per_turn: int = 4  # before other tasks of the event loop run


class AcceptedConnection:
    """One accepted connection. `reader` and `writer` are set once TLS is established, before it is served."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def __init__(self, acceptor: Acceptor, address: str, num_open_at_accept: int) -> None:
        self.num_open_at_accept = num_open_at_accept  # connections of the port, this one included
        self.address = address
        self.transport: asyncio.WriteTransport | None = None  # the writer's
        self._acceptor = acceptor

    def settle(self) -> None:
        """Stop being pending: the first message was complete. Idempotent."""
        self._acceptor.settle(self)

    def renew(self) -> None:
        """Become the connection that is pending for the shortest time."""
        self._acceptor.renew(self)


class Acceptor:
    """Accepts until `close`. `serve` runs once per connection, in a task; the connection is closed when it returns.

    `on_refused` is called with the cause for each connection that was closed before `serve` or while pending.
    """

    def __init__(
        self,
        listening: socket.socket,
        serve: Callable[[AcceptedConnection], Awaitable[None]],
        limits: ConnectionLimits,
        *,
        tls: TLS | None = None,
        handshake_timeout_s: float = 10.0,
        on_refused: Callable[[RefusalCause], None] = lambda _: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._serve = serve
        self._limits = limits
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._on_refused = on_refused
        self._open: dict[AcceptedConnection, asyncio.Task[None]] = {}
        self._pending: dict[str, dict[AcceptedConnection, None]] = {}  # by address, longest pending first
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
        """Stop, and end every connection immediately."""
        self.stop()
        tasks = list(self._open.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

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
        connection = AcceptedConnection(self, address, len(self._open) + 1)
        task = self._open[connection] = self._loop.create_task(self._run(connection, accepted))
        # Not a `finally` in the task: one that is cancelled before it begins runs nothing.
        task.add_done_callback(lambda _: self._forget(connection, accepted))
        self._pending.setdefault(address, {})[connection] = None
        self._limit_pending(address)

    def _limit_pending(self, newest: str) -> None:
        """Close the longest pending connection of an address beyond its limit, or of the address with the most."""
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
            self._open[oldest].cancel()
        self._on_refused("pending")
        self._warnings.write(
            logging.WARNING, "pending connection closed for a newer one", peer=address, pending=self.num_pending
        )

    async def _run(self, connection: AcceptedConnection, accepted: socket.socket) -> None:
        try:
            if await self._establish(connection, accepted):
                await self._serve(connection)
        except asyncio.CancelledError:
            pass  # shed, or closed

    def _forget(self, connection: AcceptedConnection, accepted: socket.socket) -> None:
        """Close a connection whose task has ended."""
        if connection.transport is not None:
            connection.transport.abort()
            if (error := connection.reader.exception()) is not None:
                error.__traceback__ = None  # whose frames hold the reader
        else:
            accepted.close()
        self.settle(connection)
        del self._open[connection]

    async def _establish(self, connection: AcceptedConnection, accepted: socket.socket) -> bool:
        """Set the connection's streams, after the TLS handshake. Return False if the handshake fails."""
        handshake_timeout_s = None if self._tls is None else self._handshake_timeout_s
        try:
            if self._tls is not None:
                await self._first_byte(accepted)
            reader = asyncio.StreamReader(READ_LIMIT)
            protocol = asyncio.StreamReaderProtocol(reader)
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=None if self._tls is None else self._tls.context,
                ssl_handshake_timeout=handshake_timeout_s,
            )
        except OSError as error:  # includes ssl.SSLError and timeouts
            self._on_refused("tls")
            reason = str(error) or "the client ended the handshake"
            self._warnings.write(logging.WARNING, "tls handshake failed", peer=connection.address, reason=reason)
            return False
        connection.transport, connection.reader = transport, reader
        connection.writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        return True

    async def _first_byte(self, accepted: socket.socket) -> None:
        """Wait until the client begins the handshake: until then a TLS connection would cost memory and time.

        Raises TimeoutError.
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
