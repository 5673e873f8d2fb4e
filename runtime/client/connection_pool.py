"""The connections of one client: the newest one takes new requests, older ones finish theirs.

At most one connection is being opened at a time; callers that need a connection in the meantime wait for that one.
"""

from __future__ import annotations

import asyncio
import copy
import ssl

from ..common.errors import Unauthenticated, Unavailable
from ..protocol.address import Address
from .connection import ClientConnection


class ConnectionPool:
    """Open connections of one client, by age and by session."""

    def __init__(self, address: Address, token: str | None, tls: ssl.SSLContext | None) -> None:
        self.is_closed = False
        self._address = address
        self._token = token
        self._tls = tls
        self._connections: list[ClientConnection] = []  # newest last; opening another one removes lost ones
        self._sessions: dict[str, ClientConnection] = {}  # session -> the connection that continues it
        self._opening: asyncio.Task[ClientConnection] | None = None

    async def for_new_requests(self) -> ClientConnection:
        """Return the newest connection, or open one if it is lost or its server is shutting down.

        Raises as `ClientConnection.open`, and Unauthenticated again if that is why the newest connection was lost.
        """
        latest = self._connections[-1] if self._connections else None
        if latest is not None and isinstance(latest.lost, Unauthenticated):
            raise copy.copy(latest.lost)
        if latest is not None and latest.lost is None and not latest.is_leaving:
            return latest
        return await self._open(latest.session if latest is not None and latest.lost is not None else None)

    async def for_session(self, session: str) -> ClientConnection:
        """Return a connection that continues `session`, opened if needed. Raises as `ClientConnection.open`.

        The server may have forgotten the session; RESUME is then answered with NOT_FOUND.
        """
        if self._opening is not None:
            await self._open(session)  # the connection being opened may be for this session
        connection = self._sessions.get(session)
        return connection if connection is not None and connection.lost is None else await self._open(session)

    async def close(self) -> None:
        """Close every connection and stop opening one. Idempotent."""
        self.is_closed = True
        try:
            if self._opening is not None:
                self._opening.cancel()
                await asyncio.wait([self._opening])
        finally:
            await asyncio.gather(*(connection.close() for connection in self._connections))

    async def _open(self, session: str | None) -> ClientConnection:
        if self.is_closed:
            raise Unavailable("this client is closed")
        if self._opening is None:
            self._opening = asyncio.create_task(self._open_one(session))
            self._opening.add_done_callback(self._opened)
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled():  # by `close`; the caller itself was not cancelled
                raise Unavailable("this client is closed") from None
            raise

    async def _open_one(self, session: str | None) -> ClientConnection:
        connection = await ClientConnection.open(self._address, self._token, self._tls, session)
        for earlier in self._connections:
            earlier.close_when_idle()
        self._connections = [earlier for earlier in self._connections if earlier.lost is None] + [connection]
        self._sessions = {name: kept for name, kept in self._sessions.items() if kept.lost is None}
        self._sessions[connection.session] = connection
        if session is not None:
            self._sessions[session] = connection
        return connection

    def _opened(self, task: asyncio.Task[ClientConnection]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # mark as retrieved: the caller may have been cancelled
