"""The greeting of a link between machines: each end proves that it knows the secret, before any message is decoded.

All parts have a fixed size:

    host to server   HELLO: magic, version of Quire padded with zeros, 32 random bytes
    server to host   HELLO of its own, MAC of both
    host to server   outcome (1 byte), and another MAC of both if the outcome is WELCOME

A MAC is the HMAC-SHA256 of its sender's role and both HELLOs. The random bytes make each greeting valid for one
connection, so a replay is refused.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from importlib.metadata import version
from pathlib import Path

from ..common.errors import ConfigError, ProtocolError, QuireError, Unauthenticated

QUIRE_VERSION = version("quire")  # read once, because it comes from a file, and strangers may connect at any rate
GREETING_MAGIC = b"quirelnk"
VERSION_BYTES = 24
RANDOM_BYTES = 32
HELLO_BYTES = len(GREETING_MAGIC) + VERSION_BYTES + RANDOM_BYTES
MAC_BYTES = 32
MIN_SECRET_BYTES = 16
WELCOME, OTHER_VERSION, OTHER_SECRET = range(3)
HOST_ROLE = b"engine host"
SERVER_ROLE = b"API server"


def read_secret(path: str) -> bytes:
    """Return the content of a file without the white space around it. Raises ConfigError if it is too short."""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"secret_file {path} cannot be read: {error.strerror}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"secret_file {path} has {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed")
    return secret


async def greet_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Greet as the host. Raises ConfigError, ProtocolError or Unauthenticated for a peer that must not be served.

    Raises EOFError or OSError if the connection ends.
    """
    ours = _hello()
    _write(writer, ours)
    theirs = await reader.readexactly(HELLO_BYTES)
    try:
        _check_hello(theirs, "API server")
    except ConfigError:
        _write(writer, bytes([OTHER_VERSION]))
        raise
    mac = await reader.readexactly(MAC_BYTES)
    if not hmac.compare_digest(mac, _mac(secret, SERVER_ROLE, ours, theirs)):
        _write(writer, bytes([OTHER_SECRET]))
        raise Unauthenticated("the API server has another secret, or repeats the greeting of another connection")
    _write(writer, bytes([WELCOME]) + _mac(secret, HOST_ROLE, ours, theirs))


async def greet_host(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Greet as the API server. Raises as `greet_server`."""
    theirs = await reader.readexactly(HELLO_BYTES)
    _check_hello(theirs, "engine host")
    ours = _hello()
    _write(writer, ours + _mac(secret, SERVER_ROLE, theirs, ours))
    (outcome,) = await reader.readexactly(1)
    if outcome != WELCOME:
        raise _refusal(outcome)
    if not hmac.compare_digest(await reader.readexactly(MAC_BYTES), _mac(secret, HOST_ROLE, theirs, ours)):
        raise Unauthenticated("the engine host has another secret")


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write `data`, unless the connection is closed."""
    if not writer.is_closing():
        writer.write(data)


def _hello() -> bytes:
    return GREETING_MAGIC + _own_version() + secrets.token_bytes(RANDOM_BYTES)


def _own_version() -> bytes:
    return QUIRE_VERSION.encode()[:VERSION_BYTES].ljust(VERSION_BYTES, b"\0")


def _check_hello(hello: bytes, peer: str) -> None:
    if not hello.startswith(GREETING_MAGIC):
        raise ProtocolError(f"the peer is no {peer} of Quire")
    theirs = hello[len(GREETING_MAGIC) : len(GREETING_MAGIC) + VERSION_BYTES]
    if theirs != _own_version():
        name = theirs.rstrip(b"\0").decode("ascii", "replace")
        raise ConfigError(f"the {peer} runs Quire {name!r}, this is {QUIRE_VERSION}; both must be the same")


def _mac(secret: bytes, role: bytes, host_hello: bytes, server_hello: bytes) -> bytes:
    return hmac.digest(secret, role + host_hello + server_hello, "sha256")


def _refusal(outcome: int) -> QuireError:
    if outcome == OTHER_VERSION:
        return ConfigError("the engine host runs another version of Quire; both must be the same")
    if outcome == OTHER_SECRET:
        return Unauthenticated("the engine host refuses the secret in secret_file")
    return ProtocolError(f"the engine host answered the greeting with {outcome}")
