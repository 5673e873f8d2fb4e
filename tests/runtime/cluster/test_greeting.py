"""The greeting lets in a peer with the secret, and nothing of another peer is read."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.cluster import greeting, read_secret
from quire.runtime.cluster.greeting import HELLO_BYTES, MAC_BYTES, greet_host, greet_server
from quire.runtime.common.errors import ConfigError, ProtocolError, QuireError, Unauthenticated

SECRET = b"sixteen or more bytes"


class Wire:
    """One direction: a writer whose bytes are read at the other end, and kept."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        self.written = b""

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.written += data
        self.reader.feed_data(data)


async def greet(host_secret: bytes = SECRET, server_secret: bytes = SECRET) -> tuple[list[Any], bytes]:
    """Return the outcomes at the host and at the API server, and the bytes that the API server sent."""
    down = Wire()
    up = Wire()
    host = greet_server(up.reader, down, host_secret)  # type: ignore[arg-type]
    server = greet_host(down.reader, up, server_secret)  # type: ignore[arg-type]
    return await asyncio.gather(host, server, return_exceptions=True), up.written


async def as_host(sent: bytes) -> Any:
    """Return the outcome at a host that has received `sent` and then the end of the connection."""
    up = Wire()
    down = Wire()
    up.write(sent)
    up.reader.feed_eof()
    (outcome,) = await asyncio.gather(
        greet_server(up.reader, down, SECRET),  # type: ignore[arg-type]
        return_exceptions=True,
    )
    return outcome


async def test_both_ends_accept_the_same_secret() -> None:
    outcomes, _ = await greet()
    assert outcomes == [None, None]


async def test_another_secret_is_refused_at_both_ends() -> None:
    (host, server), _ = await greet(server_secret=SECRET + b"!")
    assert isinstance(host, Unauthenticated)
    assert isinstance(server, Unauthenticated)
    assert "refuses the secret" in str(server)


async def test_a_host_without_the_secret_is_refused() -> None:
    async def pretend(reader: asyncio.StreamReader, writer: Wire) -> None:
        writer.write(greeting._hello())
        await reader.readexactly(HELLO_BYTES + MAC_BYTES)
        writer.write(bytes([greeting.WELCOME]) + bytes(MAC_BYTES))

    down = Wire()
    up = Wire()
    _, server = await asyncio.gather(
        pretend(up.reader, down),
        greet_host(down.reader, up, SECRET),  # type: ignore[arg-type]
        return_exceptions=True,
    )
    assert isinstance(server, Unauthenticated)


async def test_both_ends_compare_macs_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a comparison takes must not tell a stranger how much of a MAC is right."""
    compared: list[bytes] = []

    def compare(given: bytes, wanted: bytes) -> bool:
        compared.append(given)
        return given == wanted

    monkeypatch.setattr("hmac.compare_digest", compare)
    outcomes, sent = await greet()
    assert outcomes == [None, None]
    assert compared[0] == sent[-MAC_BYTES:]
    assert len(compared) == 2


async def test_a_greeting_is_good_for_one_connection() -> None:
    _, recorded = await greet()
    assert isinstance(await as_host(recorded), Unauthenticated)


async def test_a_peer_cannot_be_greeted_with_its_own_bytes() -> None:
    """Roles differ: a host's MAC, sent back to it, is not the MAC of an API server."""
    down = Wire()
    up = Wire()
    host = asyncio.create_task(greet_server(up.reader, down, SECRET))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    hello = down.written
    up.write(hello + greeting._mac(SECRET, greeting.HOST_ROLE, hello, hello))
    with pytest.raises(Unauthenticated):
        await host


async def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    down = Wire()
    up = Wire()
    host = asyncio.create_task(greet_server(up.reader, down, SECRET))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    monkeypatch.setattr(greeting, "QUIRE_VERSION", "9.9")
    up.write(greeting._hello() + bytes(MAC_BYTES))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"the API server runs Quire '9\.9'"):
        await host
    assert down.written[-1] == greeting.OTHER_VERSION


async def test_long_versions_keep_the_size_of_the_greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "QUIRE_VERSION", "1.2.3.dev4567+g0123456789abcdef")
    outcomes, _ = await greet()
    assert outcomes == [None, None]


async def test_garbage_is_no_greeting() -> None:
    for sent in (b"GET / HTTP/1.1\r\n" * 9, bytes(200), b"quirelnk" * 20):
        assert isinstance(await as_host(sent), (ProtocolError, ConfigError))
    stranger = await as_host(b"GET / HTTP/1.1\r\n" * 9)
    assert isinstance(stranger, ProtocolError)
    assert str(stranger) == "the peer is no API server of Quire"
    choose = random.Random(1)
    _, good = await greet()
    for _ in range(200):
        changed = bytearray(good)
        changed[choose.randrange(len(good))] ^= 1 << choose.randrange(8)
        outcome = await as_host(bytes(changed[: choose.randrange(len(good) + 1)]))
        assert isinstance(outcome, (QuireError, EOFError))


def test_a_secret_must_be_there_and_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_secret(str(path))
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="has 5 bytes; at least 16"):
        read_secret(str(path))
    path.write_bytes(b"  " + SECRET + b"\n")
    assert read_secret(str(path)) == SECRET
    shortest = b"x" * greeting.MIN_SECRET_BYTES
    path.write_bytes(shortest)
    assert read_secret(str(path)) == shortest
