"""Names with several addresses, some of which do not answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from quire.runtime.net import connecting
from quire.runtime.net.address import TCPAddress
from quire.runtime.net.connecting import open_tcp

NAME = TCPAddress("a.name", 7070)
TIMEOUT_S = 60  # a dead address would use more than that


@pytest.fixture
def dead() -> Iterator[int]:
    """Return a port of 127.0.0.1 that neither accepts nor refuses: its backlog is full."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        yield full.getsockname()[1]


@contextmanager
def refusing() -> Iterator[int]:
    """Yield a port of 127.0.0.1 that refuses connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def resolve_to(ports: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == (NAME.host, NAME.port)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", each)) for each in ports]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)


async def test_an_address_that_does_not_answer_delays_the_next_one_only_shortly(
    dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        with refusing() as refused:
            resolve_to([dead, refused, server.sockets[0].getsockname()[1]], monkeypatch)
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await open_tcp(NAME)
                assert await reader.read() == b"hello"
                writer.close()


async def test_the_error_is_that_of_the_first_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing() as first, refusing() as second:
        resolve_to([first, second], monkeypatch)
        with pytest.raises(ConnectionRefusedError, match=str(first)):
            await open_tcp(NAME)


async def test_a_caller_that_is_cancelled_leaves_no_attempt(dead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to([dead], monkeypatch)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await open_tcp(NAME)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("num_turns", range(16))
async def test_a_caller_that_is_cancelled_at_any_moment_leaves_no_socket_open(
    num_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    class Recorded(socket.socket):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            opened.append(self)

    monkeypatch.setattr(connecting, "NEXT_ADDRESS_S", 0)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        resolve_to([each.getsockname()[1] for each in (one, other)], monkeypatch)
        with monkeypatch.context() as recording:
            recording.setattr(socket, "socket", Recorded)
            connected = asyncio.create_task(open_tcp(NAME))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            connected.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                _, writer = await connected
                writer.close()
                await writer.wait_closed()
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
    assert [each.fileno() for each in opened] == [-1] * len(opened)
