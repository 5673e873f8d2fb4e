"""Opening a TCP connection to a name that has several addresses, some of which may be dead (RFC 8305).

uvloop has no such option. The error of a failed TLS handshake says what to do about it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from functools import partial
from typing import Any

from ..common.errors import TLSError
from .address import Address, TCPAddress

NEXT_ADDRESS_S = 0.25  # silence after which the next address of a name is tried as well
OTHER_NAME = (62, 64)  # OpenSSL's codes of a certificate for another host name or IP address
EXPIRED = 10


async def open_tcp(
    address: TCPAddress, tls: ssl.SSLContext | None = None, server_hostname: str | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the address that answers first. Raises the OSError of the first address if all fail.

    `server_hostname` is the name in the server's certificate; None: the host of `address`.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    name = (server_hostname or address.host) if tls else None
    if len(found) == 1:
        return await asyncio.open_connection(address.host, address.port, ssl=tls, server_hostname=name)
    connected = await _first_connected(found)
    try:
        return await asyncio.open_connection(sock=connected, ssl=tls, server_hostname=name)
    except BaseException:
        connected.close()
        raise


def tls_error(address: Address | str, error: ssl.SSLError) -> TLSError:
    """Return the error of a handshake that cannot succeed by a retry, with advice."""
    reason = getattr(error, "reason", None) or str(error)  # only OpenSSL sets it
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = error.verify_message.rstrip(".")
        advice = "pass the file of its CA, or of the certificate itself, as tls="
        if error.verify_code in OTHER_NAME:
            advice = "connect by a name in the certificate"
        elif error.verify_code == EXPIRED:
            advice = "renew it"
        return TLSError(f"the certificate of {address} is not trusted: {reason}; {advice}")
    advice = "; the server may not use TLS: leave out tls=" if reason == "WRONG_VERSION_NUMBER" else ""
    return TLSError(f"no TLS connection to {address}: {reason}{advice}")


async def _first_connected(found: list[tuple[Any, ...]]) -> socket.socket:
    """Return a socket that is connected to one of the addresses that `getaddrinfo` found."""
    untried = deque(found)
    attempts: list[asyncio.Task[socket.socket]] = []
    pending = set[asyncio.Task[socket.socket]]()
    winner: socket.socket | None = None
    try:
        while winner is None and (untried or pending):
            if untried:
                attempts.append(asyncio.create_task(_connected(*untried.popleft())))
                pending.add(attempts[-1])
            patience_s = NEXT_ADDRESS_S if untried else None
            done, pending = await asyncio.wait(pending, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            winner = next((attempt.result() for attempt in done if attempt.exception() is None), None)
        if winner is None:
            raise next(error for attempt in attempts if (error := attempt.exception()) is not None)
        return winner
    finally:  # no await here: a cancelled caller would lose the connected socket
        for attempt in attempts:
            attempt.cancel()
            attempt.add_done_callback(partial(_close_other, winner))


def _close_other(winner: socket.socket | None, attempt: asyncio.Task[socket.socket]) -> None:
    """Close the socket of an attempt that has ended, unless it is the winner."""
    if not attempt.cancelled() and attempt.exception() is None and (opened := attempt.result()) is not winner:
        opened.close()


async def _connected(family: int, kind: int, protocol: int, _: str, address: Any) -> socket.socket:
    opened = socket.socket(family, kind, protocol)
    try:
        opened.setblocking(False)
        await asyncio.get_running_loop().sock_connect(opened, address)
    except BaseException:
        opened.close()
        raise
    return opened
