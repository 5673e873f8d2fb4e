"""Which connections a client keeps, and which server it tries first. Connections and time are fakes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from quire.runtime.client import connection_pool
from quire.runtime.client.connection_pool import FIRST_BACK_OFF_S, ConnectionPool
from quire.runtime.common.errors import QuireError, Unavailable
from quire.runtime.net.address import Address, TCPAddress

A, B = TCPAddress("a", 1), TCPAddress("b", 1)


class FakeConnection:
    def __init__(self, address: Address, number: int, fingerprint: str) -> None:
        self.address = address
        self.session = f"{address} {number}"
        self.fingerprint = fingerprint
        self.lost: QuireError | None = None
        self.is_leaving = False
        self.is_closed = False
        self.closes_when_idle = False

    def close_when_idle(self) -> None:
        self.closes_when_idle = True

    async def close(self) -> None:
        self.is_closed = True


class FakeServers:
    """Take the place of the class `ClientConnection`."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.down: set[Address] = set()
        self.fingerprints: dict[Address, str] = {}
        self.tried: list[Address] = []
        self.opened: list[FakeConnection] = []

    async def open(self, address: Address, *_: object) -> FakeConnection:
        self.tried.append(address)
        await asyncio.sleep(0)
        if address in self.down:
            raise Unavailable(f"{address} is down")
        self.opened.append(FakeConnection(address, len(self.opened), self.fingerprints.get(address, "bits")))
        return self.opened[-1]

    def tried_lately(self) -> list[Address]:
        tried = self.tried
        self.tried = []
        return tried


@pytest.fixture
async def servers(monkeypatch: pytest.MonkeyPatch) -> FakeServers:
    servers = FakeServers()
    monkeypatch.setattr(connection_pool, "ClientConnection", servers)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: servers.now_s)
    return servers


def pool_of(*addresses: Address) -> ConnectionPool:
    return ConnectionPool(addresses, None, None)


async def new(pool: ConnectionPool) -> FakeConnection:
    return cast(FakeConnection, await pool.for_new_requests())


async def after(pool: ConnectionPool, lost: FakeConnection, *, same_server: bool = False) -> FakeConnection:
    return cast(FakeConnection, await pool.after(cast(Any, lost), same_server=same_server))


@pytest.mark.parametrize("same_server", [True, False])
async def test_streams_of_a_lost_connection_go_on_with_one_other(servers: FakeServers, same_server: bool) -> None:
    """Some notice the loss while the other connection is being opened, others later."""
    pool = pool_of(A, B)
    lost = await new(pool)
    lost.lost = Unavailable("cut")
    first = await asyncio.gather(*(after(pool, lost, same_server=same_server) for _ in range(3)))
    later = [await after(pool, lost, same_server=same_server) for _ in range(3)]
    assert {id(each) for each in (*first, *later)} == {id(servers.opened[1])}
    assert servers.opened[1].address == (A if same_server else B)
    assert len(servers.opened) == 2


async def test_streams_of_an_older_connection_follow_over_several_losses(servers: FakeServers) -> None:
    pool = pool_of(A)
    lost = await new(pool)
    for number in range(1, 4):
        lost.lost = Unavailable("cut")
        found = await after(pool, lost, same_server=True)
        assert found is servers.opened[number]
        assert await after(pool, lost) is found
        lost = found
    assert len(servers.opened) == 4


async def test_a_connection_to_a_server_that_leaves_is_closed_when_its_requests_have_ended(
    servers: FakeServers,
) -> None:
    pool = pool_of(A, B)
    leaving = await new(pool)
    leaving.is_leaving = True
    other = await new(pool)
    assert (other.address, leaving.closes_when_idle, other.closes_when_idle) == (B, True, False)
    await pool.close()
    assert [each.is_closed for each in servers.opened] == [True, True]


async def test_a_connection_to_a_server_of_another_model_is_closed(servers: FakeServers) -> None:
    servers.fingerprints[B] = "other bits"
    pool = pool_of(A, B)
    lost = await new(pool)
    lost.lost = Unavailable("cut")
    servers.down = {A}
    with pytest.raises(Unavailable, match="another build or model"):
        await after(pool, lost)
    assert [(each.address, each.is_closed) for each in servers.opened[1:]] == [(B, True)]


async def test_a_back_off_grows_with_each_failure_and_ends_with_an_answer(servers: FakeServers) -> None:
    pool = pool_of(A, B)

    async def lose() -> None:
        (await new(pool)).lost = Unavailable("cut")

    servers.down = {A}
    for wait_s in (FIRST_BACK_OFF_S, 2 * FIRST_BACK_OFF_S, 4 * FIRST_BACK_OFF_S):
        await lose()
        assert servers.tried_lately() == [A, B]
        servers.now_s += wait_s - 0.1
        await lose()
        assert servers.tried_lately() == [B], "A is in its back-off"
        servers.now_s += 0.2
    servers.down = set()
    await lose()
    assert servers.tried_lately() == [A], "it answers again"
    servers.down = {A}
    await lose()
    assert servers.tried_lately() == [A, B]
    servers.now_s += FIRST_BACK_OFF_S + 0.1
    await lose()
    assert servers.tried_lately() == [A, B], "the back-off began anew"
