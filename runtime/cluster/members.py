"""Which engine hosts there are: a fixed list of addresses, and names whose addresses DNS tells."""

from __future__ import annotations

import asyncio
import socket
from typing import NamedTuple

from ..common.errors import ConfigError
from ..protocol.address import TCPAddress, parse_address

DNS_PREFIX = "dns:"


class Member(NamedTuple):
    """One engine host."""

    address: TCPAddress
    name: str  # for which its certificate must be


class Members:
    """The hosts that `--engine-hosts` names: `host:port`, or `dns:name:port` for every address of a name."""

    def __init__(self, text: str) -> None:
        """Parse addresses that are separated by commas. Raises ConfigError."""
        self.fixed: list[Member] = []
        self._names: list[TCPAddress] = []
        for part in filter(None, map(str.strip, text.split(","))):
            address = parse_address(part.removeprefix(DNS_PREFIX))
            if not isinstance(address, TCPAddress):
                raise ConfigError(f"engine_hosts: {part} is not allowed; write host:port or dns:name:port")
            if part.startswith(DNS_PREFIX):
                self._names.append(address)
            else:
                self.fixed.append(Member(address, address.host))
        if not self.fixed and not self._names:
            raise ConfigError("engine_hosts has no address; write host:port or dns:name:port, separated by commas")

    @property
    def may_change(self) -> bool:
        return bool(self._names)

    async def resolve(self) -> list[Member]:
        """Return the hosts there are now, each once. Raises OSError if a name cannot be resolved."""
        found = list(self.fixed)
        loop = asyncio.get_running_loop()
        for name in self._names:
            addresses = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
            found += [Member(TCPAddress(str(each[0]), name.port), name.host) for *_, each in addresses]
        return list({member.address: member for member in found}.values())
