"""The connections of one client: the newest one takes new requests, older ones finish theirs.

At most one connection is being opened at a time; callers that need a connection in the meantime wait for that one. The
pool tries the first address that is not in its back-off, then the next.
"""

from __future__ import annotations

import asyncio
import copy
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from ..common.errors import QuireError, Unauthenticated, Unavailable
from ..net.address import Address
from .connection import CONNECT_TIMEOUT_S, ClientConnection

ADDRESS_TIMEOUT_S = 2.0  # time limit of an address while there is another one to try
FIRST_BACK_OFF_S, LAST_BACK_OFF_S = 1.0, 30.0  # pause in which an address that has failed is tried last


@dataclass(slots=True, eq=False)
class _Server:
    """One address, and the record of its failures."""

    address: Address
    num_failures: int = 0  # failures since the address last answered
    retry_at: float = 0.0  # event loop time

    def note_failure(self) -> None:
        wait_s = min(FIRST_BACK_OFF_S * 2**self.num_failures, LAST_BACK_OFF_S)
        self.num_failures += 1
        self.retry_at = asyncio.get_running_loop().time() + wait_s


class ConnectionPool:
    """Open connections of one client, by age and by session."""

    def __init__(self, addresses: Sequence[Address], token: str | None, tls: ssl.SSLContext | None) -> None:
        self.is_closed = False
        self._servers = [_Server(address) for address in addresses]
        self._token = token
        self._tls = tls
        self._connections: list[ClientConnection] = []  # newest last; opening another one removes lost ones
        self._sessions: dict[str, ClientConnection] = {}  # session -> the connection that continues it
        self._opening: asyncio.Task[ClientConnection] | None = None

    @property
    def has_alternatives(self) -> bool:
        """Whether there are several addresses."""
        return len(self._servers) > 1

    async def for_new_requests(self) -> ClientConnection:
        """Return the newest connection, or open one if it is lost or its server is shutting down.

        Raises as `ClientConnection.open`, and Unauthenticated again if that is why the newest connection was lost.
        """
        latest = self._connections[-1] if self._connections else None
        if latest is not None and isinstance(latest.lost, Unauthenticated):
            raise copy.copy(latest.lost)
        if latest is not None and latest.lost is None and not latest.is_leaving:
            return latest
        return await self._joined(self._opening or self._open(latest))

    async def after(self, earlier: ClientConnection, *, same_server: bool) -> ClientConnection:
        """Return the connection on which requests of `earlier`, which is lost or whose server refuses them, continue.

        Its server has the same fingerprint, and with `same_server` is the same server if that can be reached. The
        server may have forgotten the session. Raises as `ClientConnection.open`.
        """
        while self._opening is not None:
            await self._joined(self._opening)  # the opening may be for this session
        successor = self._sessions.get(earlier.session)
        is_leaving = successor is not None and successor.is_leaving and self.has_alternatives
        if successor is None or successor is earlier or successor.lost is not None or is_leaving:
            successor = await self._joined(self._open(earlier, same_server=same_server, same_bits=True))
        return successor

    async def close(self) -> None:
        """Close every connection and stop opening one. Idempotent."""
        self.is_closed = True
        try:
            if self._opening is not None:
                self._opening.cancel()
                await asyncio.wait([self._opening])
        finally:
            await asyncio.gather(*(connection.close() for connection in self._connections))

    def _open(
        self, earlier: ClientConnection | None, *, same_server: bool = False, same_bits: bool = False
    ) -> asyncio.Task[ClientConnection]:
        if self.is_closed:
            raise Unavailable("this client is closed")
        self._opening = asyncio.create_task(self._open_one(earlier, same_server, same_bits))
        # Mark an error as retrieved: the caller may have been cancelled.
        self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._opening

    async def _joined(self, opening: asyncio.Task[ClientConnection]) -> ClientConnection:
        """Wait for a connection that is being opened; cancelling one of several callers does not cancel it."""
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled():  # `close` cancelled the opening; the caller itself was not cancelled
                raise Unavailable("this client is closed") from None
            raise

    async def _open_one(self, earlier: ClientConnection | None, same_server: bool, same_bits: bool) -> ClientConnection:
        try:
            return await self._first_to_answer(earlier, same_server, same_bits)
        finally:
            self._opening = None  # here, because waiting for a finished task does not suspend the caller

    async def _first_to_answer(
        self, earlier: ClientConnection | None, same_server: bool, same_bits: bool
    ) -> ClientConnection:
        """Open a connection in place of `earlier`. With `same_bits`, its requests continue and need the same bits."""
        has_failed = earlier is not None and (same_bits or earlier.is_leaving)
        servers = self._in_order(earlier, has_failed=has_failed, same_server=same_server)
        errors: list[QuireError] = []
        for server in servers:
            timeout_s = CONNECT_TIMEOUT_S if server is servers[-1] else ADDRESS_TIMEOUT_S
            is_same = earlier is not None and server.address == earlier.address
            session = earlier.session if earlier is not None and is_same else None
            try:
                connection = await ClientConnection.open(server.address, self._token, self._tls, session, timeout_s)
            except QuireError as error:
                server.note_failure()
                errors.append(error)
                continue
            server.num_failures = 0
            server.retry_at = 0.0
            fits = earlier is None or connection.fingerprint == earlier.fingerprint
            if fits or not same_bits:
                self._adopt(connection, earlier if fits else None)
                return connection
            errors.append(Unavailable(f"{server.address} serves another build or model, whose output may differ"))
            await connection.close()
        raise _error_of(errors)

    def _in_order(self, earlier: ClientConnection | None, *, has_failed: bool, same_server: bool) -> list[_Server]:
        """Return the servers in the order in which to try them.

        The server of `earlier` is in its back-off if it `has_failed`, but comes first with `same_server`.
        """
        now = asyncio.get_running_loop().time()
        before = next((each for each in self._servers if earlier is not None and each.address == earlier.address), None)
        if before is not None and has_failed and before.retry_at <= now:
            before.note_failure()
        in_order = sorted(self._servers, key=lambda each: each.retry_at if each.retry_at > now else 0.0)
        if before is not None and same_server:
            in_order.remove(before)
            in_order.insert(0, before)
        return in_order

    def _adopt(self, connection: ClientConnection, earlier: ClientConnection | None) -> None:
        """Use `connection` for new requests, and for the requests of `earlier`."""
        for each in self._connections:
            each.close_when_idle()
        self._connections = [each for each in self._connections if each.lost is None] + [connection]
        self._sessions = {name: kept for name, kept in self._sessions.items() if kept.lost is None}
        self._sessions[connection.session] = connection
        if earlier is not None:
            self._sessions[earlier.session] = connection


def _error_of(errors: Sequence[QuireError]) -> QuireError:
    """Return the error of addresses that all failed: retryable if one of them may answer later."""
    if len(errors) == 1 or not any(error.retryable for error in errors):
        return errors[0]
    return Unavailable(f"none of {len(errors)} servers can be used: {'; '.join(map(str, errors))}")
