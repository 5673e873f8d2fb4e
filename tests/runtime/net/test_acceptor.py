"""Accepting connections within limits, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.common.logs import MAX_LINES
from quire.runtime.net import acceptor
from quire.runtime.net.acceptor import AcceptedConnection, Acceptor, ConnectionLimits, _address
from quire.runtime.net.listen import ListeningSocket, listen_tcp, listen_unix
from quire.runtime.net.tls import TLS
from structlog.testing import capture_logs

from tests.support.waiting import until

FILES = Path(__file__).resolve().parents[2] / "data" / "tls"


class Port:
    """A port that greets each connection and settles it at its first byte; `renew` renews it instead."""

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.num_served = 0
        self.clients: list[socket.socket] = []

    async def serve(self, accepted: AcceptedConnection) -> None:
        self.num_served += 1
        accepted.writer.write(b"%d" % accepted.num_open_at_accept)
        while data := await accepted.reader.read(1):
            accepted.renew() if data == b"r" else accepted.settle()
            accepted.writer.write(data)

    def accept(self, listening: ListeningSocket, limits: ConnectionLimits, **options: Any) -> Acceptor:
        self.address = listening.socket.getsockname()
        self.acceptor = Acceptor(listening.socket, self.serve, limits, on_refused=self.refusals.append, **options)
        return self.acceptor

    async def connect(self, greeting: bytes, source: str | None = None) -> socket.socket:
        """Return a connection from `source` that was greeted."""
        client = await self.connect_silently(source)
        assert await asyncio.get_running_loop().sock_recv(client, 9) == greeting
        return client

    async def connect_silently(self, source: str | None = None) -> socket.socket:
        client = socket.socket(socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET)
        if source is not None:
            client.bind((source, 0))
        self.clients.append(client)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, self.address)
        return client


async def send(client: socket.socket, data: bytes) -> bytes:
    """Return the echo; nothing from a closed connection."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        await loop.sock_sendall(client, data)
        return await loop.sock_recv(client, 9)
    return b""


Start = Callable[..., Awaitable[Port]]


@pytest.fixture
async def start(logs: object, tmp_path: Path) -> AsyncIterator[Start]:
    ports: list[Port] = []
    sockets: list[ListeningSocket] = []

    async def make(*limits: int, uds: bool = False, **options: Any) -> Port:
        sockets.append(listen_unix(tmp_path / "s") if uds else await listen_tcp("127.0.0.1", 0))
        ports.append(Port())
        ports[-1].accept(sockets[-1], ConnectionLimits(*limits), **options)
        return ports[-1]

    yield make
    for port in ports:
        for client in port.clients:
            client.close()
        await port.acceptor.close()
        assert port.acceptor.num_open == port.acceptor.num_pending == 0
        assert port.acceptor._pending == {}, "no address is kept"
    for listening in sockets:
        listening.close()


async def test_a_connection_beyond_the_limit_is_closed_at_the_accept(start: Start) -> None:
    port = await start(2, 2, 2)
    clients = [await port.connect(b"1"), await port.connect(b"2")]
    refused = await port.connect_silently()
    assert await send(refused, b"x") == b""
    assert (port.refusals, port.num_served) == (["full"], 2)
    clients[0].close()
    await until(lambda: port.acceptor.num_open == 1)
    assert await send(await port.connect(b"2"), b"x") == b"x"


async def test_the_longest_pending_connection_gives_way(start: Start) -> None:
    port = await start(9, 2, 9)
    settled = await port.connect(b"1")
    assert await send(settled, b"x") == b"x"
    silent = [await port.connect(b"2"), await port.connect(b"3")]
    newest = await port.connect(b"4")
    assert await send(silent[0], b"x") == b""
    for client in (settled, silent[1], newest):
        assert await send(client, b"x") == b"x"
    assert port.refusals == ["pending"]
    assert port.acceptor.num_pending == 0


async def test_a_renewed_connection_gives_way_last(start: Start) -> None:
    port = await start(9, 2, 9)
    first = await port.connect(b"1")
    second = await port.connect(b"2")
    assert await send(first, b"r") == b"r"
    await port.connect(b"3")
    assert await send(second, b"x") == b""
    assert await send(first, b"x") == b"x"


async def test_an_address_beyond_its_limit_loses_its_own(start: Start) -> None:
    port = await start(9, 9, 1)
    first = await port.connect(b"1")
    second = await port.connect(b"2")
    assert await send(first, b"x") == b""
    assert await send(second, b"x") == b"x"


async def test_of_several_addresses_the_one_with_the_most_pending_connections_loses_one(start: Start) -> None:
    port = await start(9, 2, 9)
    first = await port.connect(b"1")
    second = await port.connect(b"2")
    single = await port.connect(b"3", "127.0.0.2")
    assert await send(first, b"x") == b""
    for client in (single, second):
        assert await send(client, b"x") == b"x"


async def test_clients_of_a_unix_socket_have_no_limit_per_address(start: Start) -> None:
    port = await start(9, 2, 1, uds=True)
    first = await port.connect(b"1")
    second = await port.connect(b"2")
    assert [await send(first, b"x"), await send(second, b"x")] == [b"x", b"x"]


async def test_silent_tls_handshakes_give_way(start: Start) -> None:
    """Connections are counted and limited before their handshake."""
    port = await start(50, 3, 3, tls=TLS(str(FILES / "cert.pem"), str(FILES / "key.pem")))
    clients = [await port.connect_silently() for _ in range(20)]
    await until(lambda: port.refusals == ["pending"] * 17 and port.acceptor.num_open == 3)
    assert (port.acceptor.num_pending, port.num_served) == (3, 0)
    assert await send(clients[0], b"x") == b""


async def test_connections_that_give_way_in_the_turn_that_accepts_them_are_closed(start: Start) -> None:
    port = await start(50, 3, 3)
    port.clients = [socket.create_connection(port.address) for _ in range(10)]  # no turn of the event loop between them
    await until(lambda: port.refusals == ["pending"] * 7)
    await until(lambda: port.acceptor.num_open == 3)
    for client in port.clients[:7]:
        client.setblocking(False)
        assert await send(client, b"x") == b""


async def test_few_connections_are_accepted_per_turn_of_the_event_loop(start: Start) -> None:
    port = await start(50, 50, 50, 2)
    port.clients = [socket.create_connection(port.address) for _ in range(10)]  # no turn of the event loop between them
    num_open = [0]
    while num_open[-1] < 10:
        await asyncio.sleep(0)
        num_open.append(port.acceptor.num_open)
    assert max(after - before for before, after in itertools.pairwise(num_open)) == 2


async def test_accepts_that_take_long_leave_the_rest_to_the_next_turn(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "ACCEPTS_S", -1.0)  # one takes longer
    port = await start(50, 50, 50, 4)
    port.clients = [socket.create_connection(port.address) for _ in range(6)]  # no turn of the event loop between them
    num_open = [0]
    while num_open[-1] < 6:
        await asyncio.sleep(0)
        num_open.append(port.acceptor.num_open)
    assert max(after - before for before, after in itertools.pairwise(num_open)) == 1


async def test_a_failed_tls_handshake_is_counted(start: Start) -> None:
    port = await start(9, 9, 9, tls=TLS(str(FILES / "cert.pem"), str(FILES / "key.pem")))
    client = await port.connect_silently()
    await send(client, b"GET / HTTP/1.1\r\n\r\n")
    await until(lambda: port.refusals == ["tls"])
    await until(lambda: port.acceptor.num_open == 0)


async def test_a_client_that_ends_its_tls_handshake_is_logged(start: Start) -> None:
    port = await start(9, 9, 9, tls=TLS(str(FILES / "cert.pem"), str(FILES / "key.pem")))
    with capture_logs() as logs:
        (await port.connect_silently()).close()
        await until(lambda: port.refusals == ["tls"])
    assert [(line["event"], line["reason"]) for line in logs] == [
        ("tls handshake failed", "the client ended the handshake")
    ]


async def test_a_tls_handshake_has_a_time_limit(start: Start) -> None:
    tls = TLS(str(FILES / "cert.pem"), str(FILES / "key.pem"))
    port = await start(9, 9, 9, tls=tls, handshake_timeout_s=0.001)
    with capture_logs() as logs:
        await port.connect_silently()
        await until(lambda: port.refusals == ["tls"] and port.acceptor.num_open == 0)
    assert logs[0]["reason"] == "the client began no handshake within 0.001 s"


async def test_a_silent_connection_costs_no_tls_state(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = TLS(str(FILES / "cert.pem"), str(FILES / "key.pem"))
    begun: list[socket.socket] = []

    async def connect_accepted_socket(protocol: object, accepted: socket.socket, **options: object) -> None:
        begun.append(accepted)
        raise ConnectionResetError

    port = await start(9, 9, 9, tls=tls)
    monkeypatch.setattr(asyncio.get_running_loop(), "connect_accepted_socket", connect_accepted_socket)
    client = await port.connect_silently()
    await until(lambda: port.acceptor.num_open == 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert begun == []
    await send(client, b"\x16")
    assert len(begun) == 1


def is_line(data: bytearray) -> bool:
    return data.endswith(b"\n")


async def test_a_connection_is_served_from_its_first_complete_message_on(start: Start) -> None:
    port = await start(9, 9, 9, is_complete=is_line)
    client = await port.connect_silently()
    await until(lambda: port.acceptor.num_open == 1)
    loop = asyncio.get_running_loop()
    for data in (b"a", b"b"):
        await loop.sock_sendall(client, data)
        await until(lambda data=data: next(iter(port.acceptor._open)).first_bytes.data.endswith(data))  # type: ignore[misc]
    assert (port.num_served, port.acceptor.num_pending) == (0, 1)
    await loop.sock_sendall(client, b"\n")
    answer = b""
    async with asyncio.timeout(60):
        while len(answer) < 4:
            answer += await loop.sock_recv(client, 9)
    assert (answer, port.num_served, port.acceptor.num_pending) == (b"1ab\n", 1, 0)
    assert await send(client, b"c") == b"c"


async def test_a_client_that_leaves_before_its_first_message_is_not_served(start: Start) -> None:
    port = await start(9, 9, 9, is_complete=is_line)
    for data in (b"", b"a"):
        client = await port.connect_silently()
        await asyncio.get_running_loop().sock_sendall(client, data)
        await until(lambda: port.acceptor.num_open == 1)
        client.close()
        await until(lambda: port.acceptor.num_open == 0)
    assert (port.num_served, port.refusals) == (0, [])


async def test_a_connection_is_served_when_its_first_message_is_late(start: Start) -> None:
    port = await start(9, 9, 9, is_complete=is_line, handshake_timeout_s=0.001)
    await port.connect(b"1")
    assert port.acceptor.num_pending == 1


async def test_without_a_first_message_the_longest_pending_connection_gives_way(start: Start) -> None:
    port = await start(9, 2, 9, is_complete=is_line)
    clients = [await port.connect_silently() for _ in range(3)]
    await until(lambda: port.refusals == ["pending"])
    assert await send(clients[0], b"\n") == b""
    assert (port.num_served, port.acceptor.num_open) == (0, 2)
    assert (await send(clients[1], b"\n")).startswith(b"2")


async def test_without_a_descriptor_it_tries_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection waits in the system's queue meanwhile."""
    monkeypatch.setattr("quire.runtime.net.acceptor.RETRY_S", 0.001)
    failures = [OSError(errno.EMFILE, "Too many open files")] * 2

    class Listening(socket.socket):
        def accept(self) -> Any:
            if failures:
                raise failures.pop()
            return super().accept()

    listening = Listening(socket.AF_INET)
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    listening.setblocking(False)
    port = Port()
    acceptor = port.accept(ListeningSocket(listening, None), ConnectionLimits(9, 9, 9))  # type: ignore[arg-type]
    assert await send(await port.connect(b"1"), b"x") == b"x"
    assert port.refusals == ["system", "system"]
    await acceptor.close()
    port.clients[0].close()
    listening.close()


async def test_refusals_are_logged_at_a_bounded_rate(start: Start, logs: list[MutableMapping[str, Any]]) -> None:
    port = await start(1, 1, 1)
    await port.connect(b"1")
    for _ in range(MAX_LINES + 5):
        assert await send(await port.connect_silently(), b"x") == b""
    assert len(logs) == MAX_LINES
    assert len(port.refusals) == MAX_LINES + 5


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("2001:db8:1:2:3::4", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        (("::ffff:10.0.0.1", 5, 0, 0), "10.0.0.1"),
        ("", "local"),
    ],
)
def test_the_address_that_is_limited(peer: object, address: str) -> None:
    assert _address(peer) == address
