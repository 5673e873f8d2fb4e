"""The hosts that `--engine-hosts` names."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from quire.runtime.cluster import Members
from quire.runtime.common.errors import ConfigError


@pytest.mark.parametrize(
    "text", ["", ",", "a", "a:0", "unix:/tmp/a", "dns:a", "dns:unix:/tmp/a", "a:1,b", "dns:a:99999"]
)
def test_addresses_must_have_a_host_and_a_port(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^engine_hosts.*write host:port, .* or dns:name:port"):
        Members(text)


async def test_a_list_is_in_its_order_and_has_each_address_once() -> None:
    members = Members("b:1, a:2,[::1]:3,b:1,")
    assert [str(member.address) for member in await members.resolve()] == ["b:1", "a:2", "[::1]:3"]
    assert not members.may_change


async def test_a_name_stands_for_all_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert host == "hosts"
        return [(socket.AF_INET, 1, 6, "", (f"10.0.0.{last}", port)) for last in (2, 1, 2)]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    members = Members("dns:hosts:7072,a:1")
    found = await members.resolve()
    assert [str(member.address) for member in found] == ["a:1", "10.0.0.2:7072", "10.0.0.1:7072"]
    assert {member.name for member in found} == {"a", "hosts"}, "certificates are for names"
    assert members.may_change


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (("fd00::1", "fd00::2", "10.0.0.1", "10.0.0.2"), ["fd00::1", "fd00::2"]),
        (("10.0.0.1", "fd00::1"), ["10.0.0.1"]),
        (("10.0.0.1", "10.0.0.1", "10.0.0.1", "fd00::1", "fd00::2"), ["fd00::1", "fd00::2"]),
        (("fd00::1", "10.0.0.1", "10.0.0.2"), ["10.0.0.1", "10.0.0.2"]),
        ((), []),
    ],
)
async def test_a_host_with_an_address_of_each_family_is_one_member(
    addresses: tuple[str, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(families[":" in address], 1, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    found = await Members("dns:hosts:7072").resolve()
    assert [member.address.host for member in found] == expected
