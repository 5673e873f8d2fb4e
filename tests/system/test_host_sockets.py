"""The port of an engine host over real sockets, TLS included; the engines behind it are fakes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import structlog
from quire.runtime.client.tls import tls_context
from quire.runtime.cluster import Credentials, EngineHost
from quire.runtime.cluster.greeting import HELLO_BYTES
from quire.runtime.cluster.host import CONNECTION_LIMITS
from quire.runtime.cluster.host_link import FromHost, HostLeaving, HostReady, HostRestarting
from quire.runtime.cluster.members import Member
from quire.runtime.cluster.remote import HostConnection
from quire.runtime.common.errors import ProtocolError, QuireError, TLSError, Unauthenticated, Unavailable
from quire.runtime.net.address import TCPAddress
from quire.runtime.net.listen import listen_tcp
from quire.runtime.net.tls import TLS
from quire.runtime.protocol.framing import with_prefix
from quire.runtime.workers.engine_link import DropRequest

from tests.runtime.cluster.test_host import FakePool

SECRET = b"sixteen or more bytes"
CERTIFICATES = Path(__file__).parents[1] / "data" / "tls"
CERT = str(CERTIFICATES / "cert.pem")
KEY = str(CERTIFICATES / "key.pem")


@asynccontextmanager
async def listening_host(tls: TLS | None = None) -> AsyncIterator[tuple[EngineHost, Member]]:
    listening = await listen_tcp("127.0.0.1", 0)
    host = EngineHost(FakePool(), SECRET, "digest", 8, 0)  # type: ignore[arg-type]
    host.listen(listening, tls)
    assert isinstance(listening.address, TCPAddress)
    try:
        yield host, Member(listening.address, "localhost")
    finally:
        await host.close()
        listening.close()


async def connect(member: Member, secret: bytes = SECRET, ca: str | None = None) -> HostConnection:
    """Connect, and wait until the host is ready."""
    received: list[FromHost] = []
    tls = None if ca is None else tls_context(ca)
    connection = await HostConnection.open(member, Credentials(secret, tls), received.append, lambda _: None)
    async with asyncio.timeout(30):
        ready = await connection.ready
    assert isinstance(ready, HostReady)
    return connection


async def until_served(host: EngineHost, count: int) -> None:
    async with asyncio.timeout(30):
        while len(host._sessions) != count:
            await asyncio.sleep(0.005)


async def test_api_servers_come_and_go() -> None:
    async with listening_host() as (host, member):
        first, second = [await connect(member) for _ in range(2)]
        await until_served(host, 2)
        await first.kill()
        await until_served(host, 1)
        assert not second.closed.is_set()
        await host.close()
        async with asyncio.timeout(30):
            await second.closed.wait()


async def test_a_wrong_secret_is_refused_by_name_and_disturbs_no_other_api_server() -> None:
    async with listening_host() as (host, member):
        good = await connect(member)
        with pytest.raises(Unauthenticated, match=rf"engine host {member.address}: .* refuses the secret"):
            await connect(member, b"another secret of some bytes")
        assert not good.closed.is_set()
        await until_served(host, 1)
        await good.kill()


async def test_links_with_tls_and_without_it_do_not_meet() -> None:
    async with listening_host(TLS(CERT, KEY)) as (_, member):
        await (await connect(member, ca=CERT)).kill()
        with pytest.raises(QuireError):
            await connect(member)
    async with listening_host() as (_, member):
        with pytest.raises((TLSError, Unavailable)):
            await connect(member, ca=CERT)


async def test_every_message_of_a_host_is_a_sign_of_life_and_a_leaving_one_says_so_first() -> None:
    async with listening_host() as (host, member):
        await host.leave(0)
        received: list[FromHost] = []
        signs = 0

        def note_sign(_: bool) -> None:
            nonlocal signs
            signs += 1

        connection = await HostConnection.open(member, Credentials(SECRET), received.append, note_sign)
        async with asyncio.timeout(30):
            while not received:
                await asyncio.sleep(0.005)
        assert received[0] == HostLeaving()
        assert signs == 1 + len(received)  # HostReady is one of them
        await connection.kill()


async def test_a_host_without_an_engine_process_says_so_first() -> None:
    async with listening_host() as (host, member):
        host.pool.is_ready = False  # type: ignore[attr-defined]
        received: list[FromHost] = []
        connection = await HostConnection.open(member, Credentials(SECRET), received.append, lambda _: None)
        async with asyncio.timeout(30):
            while not received:
                await asyncio.sleep(0.005)
        assert received[0] == HostRestarting(())
        await connection.kill()


async def test_silent_connections_keep_no_api_server_out() -> None:
    async with listening_host() as (host, member):
        address = member.address
        silent = [socket.create_connection((address.host, address.port)) for _ in range(2 * CONNECTION_LIMITS.pending)]
        try:
            good = await connect(member)
            await until_served(host, 1)
            await good.kill()
        finally:
            for each in silent:
                each.close()


async def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.runtime.cluster.host.GREETING_TIMEOUT_S", 0.05)
    async with listening_host() as (_, member):
        reader, writer = await asyncio.open_connection(member.address.host, member.address.port)
        async with asyncio.timeout(30):
            assert len(await reader.read()) == HELLO_BYTES
        writer.close()


async def test_a_host_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.runtime.cluster.remote.LINK_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unavailable, match="no answer"):
        await connect(Member(TCPAddress("127.0.0.1", silent.getsockname()[1]), "localhost"))


async def test_a_certificate_must_be_for_the_name_of_the_host() -> None:
    async with listening_host(TLS(CERT, KEY)) as (_, member):
        with pytest.raises(TLSError):
            await connect(member._replace(name="another.example.org"), ca=CERT)


async def test_a_host_may_get_the_tokens_of_all_requests_of_another_one_at_once() -> None:
    async with listening_host() as (host, member):
        connection = await connect(member)
        for number in range(3):
            connection.link.send(DropRequest(number, None, "x" * (30 << 20)))
        async with asyncio.timeout(30):
            while len(host.pool.calls) < 3:  # type: ignore[attr-defined]
                await asyncio.sleep(0.005)
        assert not connection.closed.is_set()
        await connection.kill()


async def test_a_host_that_breaks_the_protocol_is_named_with_the_reason() -> None:
    async with listening_host() as (host, member):
        connection = await connect(member)
        (session,) = host._sessions.values()
        session.link.send(host._ready)
        async with asyncio.timeout(30):
            await connection.closed.wait()
        assert "introduces itself once" in str(connection.problem)
        await connection.kill()


async def test_only_peers_that_say_something_wrong_are_logged_as_warnings() -> None:
    """Health probes of a load balancer connect and close."""
    async with listening_host() as (_, member):
        with structlog.testing.capture_logs() as log:
            for said in (b"", b"GET / HTTP/1.1\r\n"):
                reader, writer = await asyncio.open_connection(member.address.host, member.address.port)
                writer.write(said)
                writer.write_eof()
                async with asyncio.timeout(30):
                    assert len(await reader.read()) == HELLO_BYTES
                writer.close()
    refused = [line["log_level"] for line in log if line["event"] == "connection refused"]
    assert [level for level in refused if level != "debug"] == ["warning"]


async def test_a_connection_to_another_server_is_closed_and_the_error_names_its_address() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\0" * HELLO_BYTES)
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        writer.close()
        closed.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = TCPAddress(*server.sockets[0].getsockname())
        with pytest.raises(ProtocolError, match=f"^engine host {address}: the peer is no engine host") as refusal:
            await connect(Member(address, "localhost"))
        async with asyncio.timeout(10):
            await closed.wait()
        assert refusal.value.__traceback__ is not None  # the reference to the connection: nothing else closed it


async def test_the_secret_of_a_host_alone_is_used_instead_of_that_of_all() -> None:
    async with listening_host() as (_, member):
        connection = await connect(member._replace(secret=SECRET), b"that of all other hosts")
        await connection.kill()


async def test_nothing_is_received_from_a_host_that_was_given_up() -> None:
    async with listening_host() as (_, member):
        received: list[FromHost] = []
        connection = await HostConnection.open(member, Credentials(SECRET), received.append, lambda _: None)
        async with asyncio.timeout(30):
            await connection.ready
        leaving = with_prefix(msgspec.msgpack.encode(HostLeaving()))
        connection.link.data_received(leaving)
        await connection.kill()
        connection.link.data_received(leaving)
        assert received == [HostLeaving()]


async def test_garbage_after_the_greeting_ends_its_link_only() -> None:
    async with listening_host() as (host, member):
        good = await connect(member)
        bad = await connect(member)
        bad.link._transport.write(b"\0\0\0\x05hello")
        async with asyncio.timeout(30):
            await bad.closed.wait()
        await until_served(host, 1)
        assert not good.closed.is_set()
        await good.kill()
