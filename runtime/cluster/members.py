"""The engine hosts of a cluster: a fixed list of addresses, names resolved by DNS, or the report of another system."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from ..common.errors import ConfigError
from ..net.address import TCPAddress, parse_tcp_address

DNS_PREFIX = "dns:"
FORMS = "host:port, [v6]:port or dns:name:port"
RESOLVE_INTERVAL_S = 5.0


class CarriedLink(Protocol):
    """The address of a host that does not listen: another system carries the bytes of its links."""

    def __str__(self) -> str: ...
    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a link. Raises OSError."""


class Member(NamedTuple):
    """One engine host."""

    address: TCPAddress | CarriedLink
    name: str  # name that its certificate must have; for a TCPAddress
    secret: bytes = b""  # secret of this host alone; empty: the shared secret


class MemberSource(Protocol):
    """The source of members: `Members`, or another system that places hosts."""

    @property
    def may_change(self) -> bool: ...
    async def resolve(self) -> list[Member]:
        """Return the present hosts, each once. Raises OSError if they cannot be determined."""

    async def wait_for_change(self) -> None:
        """Return when the hosts may have changed since `resolve`."""


class Members:
    """The hosts that `--engine-hosts` names: `host:port`, or `dns:name:port` for every host of a name."""

    def __init__(self, text: str) -> None:
        """Parse addresses that are separated by commas. Raises ConfigError."""
        self.fixed: list[Member] = []
        self._names: list[TCPAddress] = []
        for part in filter(None, map(str.strip, text.split(","))):
            address = parse_tcp_address("engine_hosts", part.removeprefix(DNS_PREFIX), FORMS)
            if part.startswith(DNS_PREFIX):
                self._names.append(address)
            else:
                self.fixed.append(Member(address, address.host))
        if not self.fixed and not self._names:
            raise ConfigError(f"engine_hosts has no address; write {FORMS}, separated by commas")

    @property
    def may_change(self) -> bool:
        return bool(self._names)

    async def wait_for_change(self) -> None:
        """See `MemberSource.wait_for_change`: DNS has to be queried again."""
        await asyncio.sleep(RESOLVE_INTERVAL_S)

    async def resolve(self) -> list[Member]:
        """Return the present hosts, each once. Raises OSError if a name cannot be resolved."""
        found = list(self.fixed)
        loop = asyncio.get_running_loop()
        for name in self._names:
            addresses = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
            found += [Member(TCPAddress(address, name.port), name.host) for address in _of_one_family(addresses)]
        return list({member.address: member for member in found}.values())


def _of_one_family(found: Iterable[tuple[Any, ...]]) -> list[str]:
    """Return the addresses of the larger family, IPv4 or IPv6, so that a host with an address of each counts once.

    If both are equal, the system's preference decides.
    """
    by_family: dict[int, list[str]] = {}  # addresses by family, in the order of the system's preference
    for family, *_, address in found:
        by_family.setdefault(family, []).append(str(address[0]))
    return max(by_family.values(), key=lambda addresses: len(set(addresses)), default=[])
