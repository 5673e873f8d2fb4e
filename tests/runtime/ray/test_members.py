"""The view of an API server on Serve's replicas: which hosts it uses, and when they change. Without Ray."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from quire.runtime.ray import members
from quire.runtime.ray.handle_links import ServerLinks
from quire.runtime.ray.members import ServedHosts


def metadata(address: str, bits_id: str = "a", release: str = "new", **changes: object) -> dict[str, Any]:
    return {"address": address, "bits_id": bits_id, "release": release, "secret": "00ff" * 16, **changes}


def served_hosts(**calls: Any) -> ServedHosts:
    return ServedHosts("new", ServerLinks(SimpleNamespace(**calls)), leave_timeout_s=0.0)


async def used(hosts: ServedHosts) -> list[str]:
    return [str(member.address) for member in await hosts.resolve()]


async def chosen(*reported: dict[str, Any]) -> ServedHosts:
    hosts = served_hosts()
    hosts.report(reported)
    await hosts.choose_bits_id()
    return hosts


async def test_a_server_uses_all_hosts_with_the_bits_of_its_release() -> None:
    hosts = await chosen(
        metadata("10.0.0.1:1"), metadata("10.0.0.2:1", release="old"), metadata("10.0.0.3:1", "b", "old")
    )
    assert hosts.bits_id == "a"
    assert await used(hosts) == ["10.0.0.1:1", "10.0.0.2:1"]
    assert {member.secret for member in await hosts.resolve()} == {bytes.fromhex("00ff" * 16)}


async def test_a_server_waits_for_a_host_of_its_release() -> None:
    hosts = served_hosts()
    choosing = asyncio.create_task(hosts.choose_bits_id())
    for reported in ([], [metadata("10.0.0.1:1", "b", "old")]):
        hosts.report(reported)
        await asyncio.sleep(0.01)
        assert not choosing.done()
    hosts.report([metadata("10.0.0.1:1", "b", "old"), metadata("10.0.0.2:1")])
    await choosing
    assert await used(hosts) == ["10.0.0.2:1"]


async def test_servers_choose_alike_where_machines_compute_different_bits() -> None:
    reported = [metadata("10.0.0.1:1", "b"), metadata("10.0.0.2:1", "c"), metadata("10.0.0.3:1", "c")]
    assert {(await chosen(*order)).bits_id for order in (reported, reversed(reported))} == {"c"}
    assert {(await chosen(*order)).bits_id for order in (reported[:2], reversed(reported[:2]))} == {"c"}


async def test_a_change_is_reported_once_and_from_any_thread() -> None:
    hosts = await chosen(metadata("10.0.0.1:1"))
    waiting = asyncio.create_task(hosts.wait_for_change())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    reporting = threading.Thread(target=hosts.report, args=([metadata("10.0.0.2:1")],))
    reporting.start()
    await waiting
    reporting.join()
    assert await used(hosts) == ["10.0.0.2:1"]


async def test_an_update_that_keeps_the_bits_keeps_old_hosts_and_one_that_changes_them_does_not_take_them() -> None:
    hosts = await chosen(metadata("10.0.0.1:1"))
    hosts.report([metadata("10.0.0.2:1", "b", "newer"), metadata("10.0.0.3:1", "a", "newer")])
    await hosts.wait_for_change()
    await asyncio.sleep(0)
    assert await used(hosts) == ["10.0.0.3:1"]


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"address": "10.0.0.9:1"},
        metadata("10.0.0.9:1", secret=5),
        metadata("10.0.0.9:1", secret="no digits"),
        metadata("10.0.0.9"),
        metadata("10.0.0.9:99999"),
        metadata("unix:/tmp/host"),
        metadata("10.0.0.9:1", secret=""),
        metadata("10.0.0.9:1", secret="00ff"),
    ],
)
async def test_a_replica_that_reports_no_host_is_left_out(broken: dict[str, Any]) -> None:
    assert await used(await chosen(broken, metadata("10.0.0.1:1"))) == ["10.0.0.1:1"]


async def test_the_router_of_the_process_reports_to_its_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_listening", None)
    members.report([metadata("10.0.0.1:1")])  # a process that is no API server
    hosts = served_hosts()
    members.listen(hosts)
    members.report([metadata("10.0.0.2:1")])
    await hosts.choose_bits_id()
    assert await used(hosts) == ["10.0.0.2:1"]


class Calls:
    """Serve's handle to hosts that answer nothing."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.num_cancelled = 0
        self.link_down = SimpleNamespace(remote=self._down)

    def options(self, *, stream: bool) -> Calls:
        return self

    def _down(self, address: str, link: str) -> Calls:
        self.addresses.append(address)
        return self

    def __aiter__(self) -> Calls:
        return self

    async def __anext__(self) -> bytes:
        return await asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        self.num_cancelled += 1


async def test_a_host_says_whether_handles_carry_its_links() -> None:
    calls = Calls()
    hosts = ServedHosts("new", ServerLinks(calls), leave_timeout_s=0.0)
    hosts.report([metadata("10.0.0.1/7", host_links="handles"), metadata("10.0.0.2:1"), metadata("10.0.0.3/7")])
    await hosts.choose_bits_id()
    over_handles, over_tcp = await hosts.resolve()
    assert (str(over_handles.address), str(over_tcp.address)) == ("10.0.0.1/7", "10.0.0.2:1")
    assert isinstance(over_handles.address, members.ReplicaAddress)
    _, writer = await over_handles.address.open()
    await asyncio.sleep(0)
    assert (calls.addresses, hosts.links.addresses) == (["10.0.0.1/7"], {"10.0.0.1/7"})
    writer.transport.abort()
    await asyncio.sleep(0.01)
    assert (calls.num_cancelled, hosts.links.addresses) == (1, frozenset())


async def test_a_former_link_that_ends_late_leaves_the_new_one_known() -> None:
    links = ServerLinks(Calls())
    _, former = links.open("10.0.0.1/7")
    await asyncio.sleep(0)  # the calls have begun
    former.transport.abort()
    _, newer = links.open("10.0.0.1/7")
    await asyncio.sleep(0.01)  # the calls of the former one have ended
    assert links.addresses == {"10.0.0.1/7"}
    links.cut("10.0.0.1/7")
    assert newer.is_closing()
    await asyncio.sleep(0.01)
    assert links.addresses == frozenset()


@pytest.mark.parametrize("comes_back", [True, False])
async def test_links_to_a_host_that_has_left_are_cut_after_a_while(
    comes_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "LEAVING_POLL_S", 0.001)
    calls = Calls()
    hosts = ServedHosts("new", ServerLinks(calls), leave_timeout_s=0.05)
    stays = metadata("10.0.0.1/7", host_links="handles")
    leaves = metadata("10.0.0.2/7", host_links="handles")
    hosts.report([stays, leaves])
    await hosts.choose_bits_id()
    for member in await hosts.resolve():
        assert isinstance(member.address, members.ReplicaAddress)
        await member.address.open()
    hosts.report([stays])
    await hosts.wait_for_change()
    if comes_back:
        hosts.report([stays, leaves])
        await hosts.wait_for_change()
        await asyncio.sleep(0.06)
        hosts.report([stays, leaves])
        await hosts.wait_for_change()
        assert hosts.links.addresses == {"10.0.0.1/7", "10.0.0.2/7"}
    else:
        assert hosts.links.addresses == {"10.0.0.1/7", "10.0.0.2/7"}
        while len(hosts.links.addresses) > 1:
            await hosts.wait_for_change()
        assert hosts.links.addresses == {"10.0.0.1/7"}
    for address in hosts.links.addresses:
        hosts.links.cut(address)
    await asyncio.sleep(0.01)


async def test_reports_about_other_hosts_do_not_put_off_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ServedHosts("new", ServerLinks(Calls()), leave_timeout_s=5.0)
    times = [0.0]
    later = asyncio.get_running_loop().call_soon_threadsafe
    monkeypatch.setattr(hosts, "_loop", SimpleNamespace(time=lambda: times[-1], call_soon_threadsafe=later))
    hosts.links.open("10.0.0.2/7")
    linked = []
    for now in (100.0, 104.0, 105.0):
        times.append(now)
        hosts.report([metadata("10.0.0.1/7", host_links="handles")])
        await hosts.wait_for_change()
        linked.append(len(hosts.links.addresses))
    assert linked == [1, 1, 0]
    await asyncio.sleep(0.01)


async def test_a_server_looks_no_more_at_a_host_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "LEAVING_POLL_S", 0.001)
    hosts = ServedHosts("new", ServerLinks(Calls()), leave_timeout_s=0.0)
    hosts.links.open("10.0.0.2/7")
    hosts.report([])
    while hosts.links.addresses:
        await hosts.wait_for_change()
    await hosts.wait_for_change()
    waiting = asyncio.create_task(hosts.wait_for_change())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    hosts.report([])
    await waiting


async def test_a_host_that_leaves_gets_no_further_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "LEAVING_POLL_S", 0.001)
    hosts = ServedHosts("new", ServerLinks(Calls()), leave_timeout_s=60.0)
    leaves = metadata("10.0.0.2/7", host_links="handles")
    hosts.report([leaves])
    await hosts.choose_bits_id()
    (member,) = await hosts.resolve()
    assert isinstance(member.address, members.ReplicaAddress)
    hosts.report([])
    await hosts.wait_for_change()
    await asyncio.sleep(0)
    with pytest.raises(ConnectionRefusedError, match="leaves"):
        await member.address.open()
