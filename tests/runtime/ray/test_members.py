"""What an API server learns of Serve's replicas: which hosts it uses, and when they change. Without Ray."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from quire.runtime.ray import members
from quire.runtime.ray.members import ServedHosts


def metadata(address: str, bits_id: str = "a", release: str = "new", **changes: object) -> dict[str, Any]:
    return {"address": address, "bits_id": bits_id, "release": release, "secret": "00ff" * 16, **changes}


async def used(hosts: ServedHosts) -> list[str]:
    return [str(member.address) for member in await hosts.resolve()]


async def chosen(*reported: dict[str, Any]) -> ServedHosts:
    hosts = ServedHosts("new")
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
    hosts = ServedHosts("new")
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
    members.report([metadata("10.0.0.1:1")])  # in a process that is no API server
    hosts = ServedHosts("new")
    members.listen(hosts)
    members.report([metadata("10.0.0.2:1")])
    await hosts.choose_bits_id()
    assert await used(hosts) == ["10.0.0.2:1"]
