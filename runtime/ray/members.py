"""The engine hosts that Serve runs, as reported to an API server by Serve's router in its process.

An API server uses hosts with one bits id, so that its streams keep their bytes when they move. During an update there
may be two ids: a new API server waits for hosts of its own release, and an old one keeps the hosts of its bits id.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
import structlog

from ..cluster import Member
from ..common.errors import ConfigError
from ..net.address import TCPAddress, parse_address
from .handle_links import ServerLinks

SECRET_BYTES = 32
LEAVING_POLL_S = 1.0  # pause between two checks whether an API server still needs hosts that leave
HostLinkKind = Literal["tcp", "handles"]

_log = structlog.get_logger("quire.ray")


class HostRecord(msgspec.Struct, frozen=True):
    """The report of a replica with an engine host. Serve passes it to every process with a handle."""

    address: str  # address of the host; with links over handles, any unique name
    bits_id: str
    release: str
    secret: str  # hexadecimal digits; each host has its own secret
    host_links: HostLinkKind = "tcp"

    def member(self, hosts: ServedHosts) -> Member:
        """Return the host as a member of a cluster. Raises ConfigError or ValueError for a broken record."""
        secret = bytes.fromhex(self.secret)
        if len(secret) != SECRET_BYTES:
            raise ValueError("its secret is none of a host")
        if self.host_links == "handles":
            return Member(ReplicaAddress(self.address, hosts), "", secret)
        address = parse_address(self.address)
        if not isinstance(address, TCPAddress):
            raise ValueError("its address is none of a host")
        return Member(address, address.host, secret)


@dataclass(frozen=True)
class ReplicaAddress:
    """A host whose links Serve's handles carry. Implements `cluster.CarriedLink`."""

    name: str
    hosts: ServedHosts

    def __str__(self) -> str:
        return self.name

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a link. Raises ConnectionRefusedError for a replica that leaves.

        The greeting detects a replica that does not answer, as over TCP.
        """
        if not self.hosts.has(self.name):
            raise ConnectionRefusedError("the replica leaves")
        return self.hosts.links.open(self.name)


class ServedHosts:
    """Implements `cluster.MemberSource`. Made on the event loop that uses it.

    Serve does not close a replica that leaves while a call to it is open, and a link over handles is one. So links to
    hosts that leave are closed here: when they have no requests of this API server, or after `leave_timeout_s`.
    """

    may_change = True

    def __init__(self, release: str, links: ServerLinks, leave_timeout_s: float) -> None:
        self.bits_id = ""  # bits_id of the hosts that this API server uses
        self.links = links
        self._leave_timeout_s = leave_timeout_s
        self._leaving: dict[str, float] = {}  # address of a host with a link over handles -> time to cut the link
        self._release = release
        self._records: list[HostRecord] = []
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def report(self, metadata: Iterable[Mapping[str, object]]) -> None:
        """Replace the known hosts by the metadata of all replicas. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._set, [record for each in metadata if (record := self._record(each))])

    def _set(self, records: list[HostRecord]) -> None:
        self._records = records
        cut_at = self._loop.time() + self._leave_timeout_s
        gone = self.links.addresses.difference(record.address for record in records)
        self._leaving = {address: self._leaving.get(address, cut_at) for address in gone}
        self._changed.set()

    def has(self, address: str) -> bool:
        """Return whether Serve runs the host and has not begun to end it."""
        return any(record.address == address for record in self._records)

    async def choose_bits_id(self) -> None:
        """Wait for a host of this release, and use hosts with its bits id from now on: the most frequent one."""
        while not (counts := Counter(each.bits_id for each in self._records if each.release == self._release)):
            await self.wait_for_change()
        self.bits_id = max(counts, key=lambda bits_id: (counts[bits_id], bits_id))

    async def resolve(self) -> list[Member]:
        """See `MemberSource.resolve`."""
        return [record.member(self) for record in self._records if record.bits_id == self.bits_id]

    async def wait_for_change(self) -> None:
        """See `MemberSource.wait_for_change`. Hosts that leave are checked repeatedly."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVING_POLL_S if self._leaving else None):
                await self._changed.wait()
        self._changed.clear()
        now = self._loop.time()
        linked = self.links.addresses
        self._leaving = {address: cut_at for address, cut_at in self._leaving.items() if address in linked}
        for address in [address for address, cut_at in self._leaving.items() if cut_at <= now]:
            self.links.cut(address)

    def _record(self, metadata: Mapping[str, object]) -> HostRecord | None:
        """Return the record in a replica's metadata; None for a replica of a version with another record."""
        try:
            record = msgspec.convert(metadata, HostRecord)
            record.member(self)
        except (ConfigError, ValueError) as error:  # msgspec's errors are ValueErrors
            _log.warning("a replica is left out: it reports no engine host", reason=str(error))
            return None
        return record


_listening: ServedHosts | None = None  # members for the API server in this process


def listen(hosts: ServedHosts) -> None:
    """Pass future reports of Serve's router in this process to `hosts`."""
    global _listening
    _listening = hosts


def report(metadata: Iterable[Mapping[str, object]]) -> None:
    """Pass on the reports of Serve's router. Any thread may call it."""
    if _listening is not None:
        _listening.report(metadata)


def linked_addresses() -> frozenset[str]:
    """Return the addresses of hosts to which this process has links over handles. Any thread may call it."""
    return frozenset() if _listening is None else _listening.links.addresses
