"""Replicas as Serve runs them, without Serve: hosts that leave, servers that take over a port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from quire import AsyncClient, SamplingParams, Unavailable
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.net.listen import AddressTaken
from quire.runtime.ray import host_replica, members, server_replica
from quire.runtime.ray.host_replica import HostReplica
from quire.runtime.ray.server_replica import ServerReplica
from quire.scheduler import AdmissionEstimate, NotAccepting, QueueFull

from tests.support.serve_handles import Pieces

PORTS = ("port", "operator_port", "openai_port")
ENGINE = {"weights": "q8", "kv_cache_dtype": "int8", "kv_cache_memory": "8M", "threads": 1}
ARGS: dict[str, Any] = ENGINE | {"listen": "127.0.0.1:0", "shutdown_timeout": 0.1, **dict.fromkeys(PORTS, 0)}
KINDS = (
    SamplingParams(max_tokens=400, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.9, seed=3, repetition_penalty=1.2),
    SamplingParams(max_tokens=300, ignore_eos=True, temperature=0.8, seed=4, n=2),
)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


@pytest.fixture(autouse=True)
def no_changes_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_listening", None)
    for module, name in (
        *((module, "log_to_stderr") for module in (host_replica, server_replica)),
        *((server_replica, name) for name in ("tune_collector", "favor_event_loop")),
    ):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr("quire.runtime.cluster.start.tune_collector", lambda: None)


class FakeServe:
    """Runs replicas, and has a handle to the hosts, whose router reports them since its first call."""

    def __init__(self) -> None:
        self.hosts: list[HostReplica] = []
        self._is_routed = False
        self._started: list[HostReplica] = []
        self._calls_of: dict[Any, int] = defaultdict(int)

    async def start(self, kind: type[Any], *args: Any) -> Any:
        not_collected = type(kind.__name__, (kind,), {"__del__": lambda self: None})  # Serve removes it, too
        replica = not_collected.__new__(not_collected)
        await replica.__init__(*args)
        if kind is HostReplica:
            self.hosts.append(replica)
            self._started.append(replica)
            self.report()
        return replica

    async def stop(self, replica: Any) -> None:
        if replica in self.hosts:
            self.hosts.remove(replica)
            self.report()
        while self._calls_of[replica]:  # the replica leaves as soon as no call is open
            await asyncio.sleep(0.01)
        await type(replica).__base__.__del__(replica)

    def report(self) -> None:
        if self._is_routed:
            members.report([host.record_replica_metadata() for host in self.hosts])

    @property
    def handle(self) -> Any:
        handle = SimpleNamespace(
            wait_until_ready=SimpleNamespace(remote=self._first_call),
            link_down=SimpleNamespace(remote=lambda *call: Pieces(self._link_down(*call))),
            link_up=SimpleNamespace(remote=self._link_up),
        )
        handle.options = lambda *, stream: handle
        return handle

    async def _link_down(self, address: str, link: str) -> AsyncIterator[bytes]:
        replica = self._replica_at(address)
        self._calls_of[replica] += 1
        try:
            async with contextlib.aclosing(replica.link_down(address, link)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._calls_of[replica] -= 1

    async def _link_up(self, address: str, *call: Any) -> bool:
        return await self._replica_at(address).link_up(address, *call)

    def _replica_at(self, address: str) -> HostReplica:
        return next(each for each in self._started if each.record_replica_metadata()["address"] == address)

    async def _first_call(self) -> None:
        self._is_routed = True
        await self.hosts[0].wait_until_ready()
        self.report()


def num_requests(host: HostReplica) -> int:
    return sum(member.load.num_requests for member in host._host.pool.members)


@asynccontextmanager
async def a_server(serve: FakeServe, args: dict[str, Any]) -> AsyncIterator[str]:
    server = await serve.start(ServerReplica, args, serve.handle)
    try:
        yield (await server())["clients"]
    finally:
        await serve.stop(server)


@pytest.mark.usefixtures("forked_engines")
async def test_streams_keep_their_bytes_when_serve_takes_a_host_away() -> None:
    serve = FakeServe()
    for _ in range(2):
        await serve.start(HostReplica, ARGS)
    assert len({host.record_replica_metadata()["secret"] for host in serve.hosts}) == 2
    async with a_server(serve, ARGS) as address, AsyncClient(address) as client:
        wanted = [await client.complete("The module provides", params) for params in KINDS]
        begun = asyncio.Event()
        streams = [
            asyncio.create_task(client.complete("The module provides", params, on_accepted=lambda _: begun.set()))
            for params in KINDS
        ]
        await begun.wait()
        await serve.stop(max(serve.hosts, key=num_requests))  # all are at their prompt's home
        assert [each.outputs for each in await asyncio.gather(*streams)] == [each.outputs for each in wanted]
    (left,) = serve.hosts
    await left.check_health()
    assert (await left.record_autoscaling_stats())["predicted_wait_s"] >= 0
    await serve.stop(left)
    with pytest.raises(NotAccepting, match="closed"):
        await left.check_health()


@pytest.mark.usefixtures("forked_engines")
async def test_what_runs_may_end_over_handles_while_its_replicas_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_replica, "node_address", lambda: "10.1.2.3")
    serve = FakeServe()
    args = {**ARGS, "listen": None, "shutdown_timeout": 60, "host_links": "handles"}
    host = await serve.start(HostReplica, args)
    address = host.record_replica_metadata()["address"]
    assert address.startswith("10.1.2.3/")
    assert host._host.address is None, "it does not listen"
    with pytest.raises(Unavailable, match="no such link"):
        await host.link_up(f"{address}0", "link", 0, b"", 0)
    server = await serve.start(ServerReplica, args, serve.handle)
    async with AsyncClient((await server())["clients"]) as client:
        begun = asyncio.Event()
        stream = asyncio.create_task(client.complete("The", LONG, on_accepted=lambda _: begun.set()))
        await begun.wait()
        await asyncio.gather(serve.stop(host), serve.stop(server))
        assert len((await stream).token_ids) == LONG.max_tokens


@pytest.mark.usefixtures("forked_engines")
async def test_a_server_waits_for_a_port_that_another_one_still_has() -> None:
    serve = FakeServe()
    with socket.create_server(("127.0.0.1", 0)) as former:
        args = ARGS | {"openai_port": former.getsockname()[1]}
        host = await serve.start(HostReplica, args)
        starting = asyncio.create_task(serve.start(ServerReplica, args, serve.handle))
        await asyncio.sleep(0.5)
        assert not starting.done()
    server = await starting
    addresses = await server()
    assert addresses["api"].endswith(f":{args['openai_port']}")
    await serve.stop(server)
    for address in addresses.values():
        name, _, port = address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((name, int(port)))
    await serve.stop(host)


async def test_a_server_does_not_wait_for_a_port_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[Any] = []

    class TakenServer:
        def __init__(self, observer: Any) -> None:
            pass

        async def start(self, engine: Any, config: Any) -> None:
            attempts.append(config)
            raise AddressTaken("port 7 is taken")

    monkeypatch.setattr(server_replica, "Server", TakenServer)
    monkeypatch.setattr(server_replica, "PORT_RETRY_S", 0.001)
    monkeypatch.setattr(server_replica, "TAKEN_MARGIN_S", 0.02)
    info = SimpleNamespace(isa="scalar", threads=1, threads_reason="a test")
    with pytest.raises(AddressTaken, match="port 7 is taken"):
        async with asyncio.timeout(60):
            await server_replica._started(SimpleNamespace(info=info), ServerConfig(shutdown_timeout=0.0))  # type: ignore[arg-type]
    assert len(attempts) > 1


class FakePool:
    """Engine processes with a state that the test gives."""

    predicted_wait_s = 0.5

    def __init__(self, pages_owned: int = 0, pages_total: int = 0, refusal: Exception | None = None) -> None:
        self._pages = SimpleNamespace(pages_owned=pages_owned, pages_total=pages_total)
        self._refusal = refusal

    def check_room(self, tenant: str, count: int) -> None:
        if self._refusal is not None:
            raise self._refusal

    def stats(self) -> Any:
        if self._refusal is not None:
            raise self._refusal
        return self._pages


def host_with(pool: FakePool, address: str = "10.0.0.1:7", kind: Any = "tcp") -> Any:
    """Return a host replica with these engines, which was never started."""
    replica = SimpleNamespace(_host=SimpleNamespace(pool=pool))
    replica._record = members.HostRecord(address, "bits", "release", "00" * 32, kind)
    return replica


async def test_the_load_of_a_host_is_its_wait_and_the_share_of_its_pages_in_use() -> None:
    loads = [
        await HostReplica.record_autoscaling_stats(host_with(pool))
        for pool in (FakePool(3, 12), FakePool(), FakePool(refusal=Unavailable("the engines restart")))
    ]
    assert loads == [
        {"predicted_wait_s": 0.5, "kv_share": 0.25},
        {"predicted_wait_s": 0.5, "kv_share": 0.0},
        {},
    ]


async def test_a_host_is_replaced_if_it_accepts_nothing_any_more_and_not_for_a_full_queue() -> None:
    await HostReplica.check_health(host_with(FakePool()))
    await HostReplica.check_health(host_with(FakePool(refusal=QueueFull("full", AdmissionEstimate(0, 0, 0)))))
    with pytest.raises(NotAccepting, match="the engines cannot be restarted"):
        await HostReplica.check_health(host_with(FakePool(refusal=NotAccepting("the engines cannot be restarted"))))


@pytest.mark.parametrize(
    ("address", "kind", "is_here"), [("a/7", "handles", True), ("b/7", "handles", False), ("a/7", "tcp", False)]
)
def test_a_host_has_links_over_handles_only_under_its_own_address(address: str, kind: str, is_here: bool) -> None:
    with contextlib.nullcontext() if is_here else pytest.raises(Unavailable, match="there is no such link here"):
        HostReplica._check_is_here(host_with(FakePool(), "a/7", kind), address)
