"""Links that Serve's handles carry, over a handle that calls the host directly. Without Ray."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from quire.runtime.cluster.host_link import LinkConnection
from quire.runtime.common.errors import Unavailable
from quire.runtime.ray import handle_links
from quire.runtime.ray.handle_links import HostLinks, ServerLinks

from tests.support.serve_handles import Pieces

ADDRESS = "10.0.0.1/7"
BIG = random.Random(1).randbytes(300_000)
SMALL_WINDOW = 4096
SMALL_PIECE = 512


class FakeHosts:
    """Serve's handle to one host. `serve` handles a connection of the host."""

    def __init__(self, serve: Callable[[LinkConnection], Awaitable[None]]) -> None:
        self.links = HostLinks(SimpleNamespace(serve=serve))  # type: ignore[arg-type]
        self.down: list[Pieces] = []
        self.num_up = 0  # calls at the same time
        self.calls: list[tuple[Any, ...]] = []
        self.lost: Callable[[], bool] = lambda: False
        self.link_down = SimpleNamespace(remote=self._down)
        self.link_up = SimpleNamespace(remote=self._up)

    def options(self, *, stream: bool) -> FakeHosts:
        assert stream
        return self

    def _down(self, address: str, link: str) -> Pieces:
        assert address == ADDRESS
        self.down.append(Pieces(self.links.down(link)))
        return self.down[-1]

    async def _up(self, address: str, *call: Any) -> bool:
        assert address == ADDRESS
        self.num_up += 1
        assert self.num_up == 1, "one call at a time keeps the order"
        self.calls.append(call)
        await asyncio.sleep(0)
        taken = True if self.lost() else await self.links.up(*call)
        self.num_up -= 1
        return taken


async def settled() -> None:
    """Wait until nothing is left to do at once."""
    for _ in range(2000):
        await asyncio.sleep(0)


class Host:
    """The work of a host with a connection: the test reads and writes."""

    def __init__(self) -> None:
        self.connected: asyncio.Future[LinkConnection] = asyncio.get_running_loop().create_future()
        self.closing = asyncio.Event()

    async def serve(self, connection: LinkConnection) -> None:
        self.connected.set_result(connection)
        await self.closing.wait()


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[FakeHosts, Host, LinkConnection, Any, ServerLinks]]:
    """Yield the handle, both ends and the API server's records; check the cleanup afterwards."""
    host = Host()
    hosts = FakeHosts(host.serve)
    links = ServerLinks(hosts)
    reader, writer = links.open(ADDRESS)
    there = await host.connected
    try:
        yield hosts, host, there, SimpleNamespace(reader=reader, writer=writer), links
    finally:
        host.closing.set()
        writer.transport.abort()
        await settled()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert hosts.links._ends == {}
        assert links.addresses == frozenset()


async def test_both_directions_carry_all_bytes_in_their_order() -> None:
    async with linked() as (hosts, _, there, here, links):
        assert links.addresses == {ADDRESS}
        there.writer.write(b"hello")
        assert await here.reader.readexactly(5) == b"hello"
        here.writer.write(BIG[:7])
        here.writer.write(BIG[7:])
        there.writer.write(BIG)
        assert await asyncio.gather(here.reader.readexactly(len(BIG)), there.reader.readexactly(len(BIG))) == [BIG, BIG]
        assert [sequence for _, sequence, _, _ in hosts.calls] == list(range(len(hosts.calls)))
        assert max(len(data) for _, _, data, _ in hosts.calls) <= handle_links.MAX_PIECE_BYTES


async def test_many_writes_travel_in_one_call() -> None:
    async with linked() as (hosts, _, there, here, _links):
        for number in range(100):
            here.writer.write(bytes([number]))
        assert await there.reader.readexactly(100) == bytes(range(100))
        assert len(hosts.calls) == 1


@pytest.mark.parametrize("is_from_host", [True, False])
async def test_closing_lets_arrive_what_was_written_before(is_from_host: bool) -> None:
    async with linked() as (_, _, there, here, _links):
        sender, receiver = (there, here) if is_from_host else (here, there)
        sender.writer.write(b"last")
        sender.writer.close()
        sender.writer.write(b"too late")
        assert await receiver.reader.read() == b"last"
        assert receiver.writer.is_closing()


async def test_a_host_that_is_done_with_a_connection_closes_it() -> None:
    async with linked() as (_, host, there, here, _links):
        there.writer.write(b"bye")
        host.closing.set()
        assert await here.reader.read() == b"bye"


async def test_a_link_that_is_aborted_at_the_server_cancels_the_call_of_the_host() -> None:
    async with linked() as (hosts, _, there, here, _links):
        here.writer.write(b"never sent")
        here.writer.transport.abort()
        assert here.writer.transport.get_write_buffer_size() == 0
        assert await there.reader.read() == b""
        assert hosts.down[0].is_cancelled


async def test_a_link_that_is_cut_ends_at_both_ends() -> None:
    async with linked() as (_, _, there, here, links):
        links.cut(ADDRESS)
        links.cut("unknown")
        assert (await there.reader.read(), await here.reader.read()) == (b"", b"")


async def test_a_host_that_closes_its_links_ends_them() -> None:
    async with linked() as (hosts, _, there, here, _links):
        hosts.links.close()
        assert (await there.reader.read(), await here.reader.read()) == (b"", b"")


async def test_the_loss_of_the_host_ends_the_link() -> None:
    async with linked() as (hosts, _, _there, here, _links):
        with structlog.testing.capture_logs() as log:
            hosts.down[0].lose(RuntimeError("the replica died\nTraceback of the replica"))
            assert await here.reader.read() == b""
        ended = [(line["host"], line["reason"]) for line in log if line["event"] == "a link over handles ended"]
        assert ended == [(ADDRESS, "RuntimeError: the replica died")]


async def test_a_lost_call_ends_the_link_before_later_bytes_are_used() -> None:
    async with linked() as (hosts, _, there, here, _links):
        here.writer.write(b"one")
        assert await there.reader.readexactly(3) == b"one"
        hosts.lost = lambda: True
        here.writer.write(b"two")
        await settled()
        hosts.lost = lambda: False
        here.writer.write(b"three")
        assert (await there.reader.read(), await here.reader.read()) == (b"", b"")


@pytest.mark.parametrize(
    "call", [(0, b"again", 0), (2, b"early", 0), (1, b"", 1), (1, b"", -1), (1, b"x" * ((64 << 10) + 1), 0)]
)
async def test_a_call_that_is_repeated_early_or_impossible_ends_the_link(call: tuple[int, bytes, int]) -> None:
    async with linked() as (hosts, _, there, here, _links):
        here.writer.write(b"first")
        assert await there.reader.readexactly(5) == b"first"
        assert not await hosts.links.up(hosts.calls[0][0], *call)
        assert (await there.reader.read(), await here.reader.read()) == (b"", b"")


async def test_a_link_that_is_unknown_or_open_already_is_refused() -> None:
    async with linked() as (hosts, *_):
        assert not await hosts.links.up("unknown", 0, b"x", 0)
        with pytest.raises(Unavailable, match="no further link"):
            await anext(hosts.links.down(next(iter(hosts.links._ends))))


async def test_a_host_has_a_limited_number_of_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle_links, "MAX_LINKS", 1)
    async with linked() as (hosts, *_):
        with pytest.raises(Unavailable, match="no further link"):
            await anext(hosts.links.down("another"))


async def test_a_server_that_does_not_read_holds_back_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle_links, "WINDOW_BYTES", SMALL_WINDOW)
    monkeypatch.setattr(handle_links, "ACKNOWLEDGE_BYTES", SMALL_WINDOW // 4)
    monkeypatch.setattr(handle_links, "MAX_PIECE_BYTES", SMALL_PIECE)
    async with linked() as (_, _, there, here, _links):
        here.writer.transport.pause_reading()
        there.writer.write(BIG)
        await settled()
        transport = there.writer.transport
        assert transport.get_write_buffer_size() == len(BIG) - SMALL_WINDOW
        here.writer.transport.resume_reading()
        assert await here.reader.readexactly(len(BIG)) == BIG
        assert transport.get_write_buffer_size() == 0


async def test_a_host_that_closes_is_read_to_its_last_byte_by_a_slow_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle_links, "WINDOW_BYTES", SMALL_WINDOW)
    monkeypatch.setattr(handle_links, "ACKNOWLEDGE_BYTES", SMALL_WINDOW // 4)
    async with linked() as (_, host, there, here, _links):
        here.writer.transport.pause_reading()
        there.writer.write(BIG)
        await settled()
        host.closing.set()
        await settled()
        here.writer.transport.resume_reading()
        assert await here.reader.read() == BIG


async def test_a_host_that_does_not_read_holds_back_the_server() -> None:
    async with linked() as (hosts, _, there, here, _links):
        there.writer.transport.pause_reading()
        here.writer.write(BIG)
        await settled()
        assert len(hosts.calls) == 1
        assert here.writer.transport.get_write_buffer_size() == len(BIG) - handle_links.MAX_PIECE_BYTES
        there.writer.transport.resume_reading()
        assert await there.reader.readexactly(len(BIG)) == BIG


async def test_a_call_that_fails_ends_the_link() -> None:
    async with linked() as (hosts, _, there, here, _links):

        async def fail(*_: Any) -> bool:
            raise RuntimeError("the replica died")

        hosts.link_up = SimpleNamespace(remote=fail)
        here.writer.write(b"x")
        assert (await there.reader.read(), await here.reader.read()) == (b"", b"")
