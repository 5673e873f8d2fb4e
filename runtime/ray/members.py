"""The engine hosts that Serve runs, as an API server learns of them from Serve's router in its process.

An API server uses hosts with one bits id, so that its streams keep their bytes wherever they move. During an update
there may be two: a new API server waits for hosts of its own release, and an old one keeps the hosts of its bits id.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
import structlog

from ..cluster import Member
from ..common.errors import ConfigError
from ..protocol.address import TCPAddress, parse_address

SECRET_BYTES = 32

_log = structlog.get_logger("quire.ray")


class HostRecord(msgspec.Struct, frozen=True):
    """What a replica with an engine host reports of itself. Serve gives it to every process that has a handle."""

    address: str
    bits_id: str
    release: str
    secret: str  # in hexadecimal digits; each host has its own

    def member(self) -> Member:
        """Return the host as a member of a cluster. Raises ConfigError or ValueError for a broken record."""
        address = parse_address(self.address)
        secret = bytes.fromhex(self.secret)
        if not isinstance(address, TCPAddress) or len(secret) != SECRET_BYTES:
            raise ValueError("its address or its secret is none of a host")
        return Member(address, address.host, secret)


class ServedHosts:
    """Implements `cluster.MemberSource`. Made on the event loop that uses it."""

    may_change = True

    def __init__(self, release: str) -> None:
        self.bits_id = ""  # of the hosts that this API server uses
        self._release = release
        self._records: list[HostRecord] = []
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def report(self, metadata: Iterable[Mapping[str, object]]) -> None:
        """Replace what is known by the metadata of all replicas there are. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._set, [record for each in metadata if (record := _record(each))])

    def _set(self, records: list[HostRecord]) -> None:
        self._records = records
        self._changed.set()

    async def choose_bits_id(self) -> None:
        """Wait for a host of this release, and use hosts with its bits id from now on: the most frequent one."""
        while not (counts := Counter(each.bits_id for each in self._records if each.release == self._release)):
            await self.wait_for_change()
        self.bits_id = max(counts, key=lambda bits_id: (counts[bits_id], bits_id))

    async def resolve(self) -> list[Member]:
        """See `MemberSource.resolve`."""
        return [record.member() for record in self._records if record.bits_id == self.bits_id]

    async def wait_for_change(self) -> None:
        """See `MemberSource.wait_for_change`."""
        await self._changed.wait()
        self._changed.clear()


def _record(metadata: Mapping[str, object]) -> HostRecord | None:
    """Return the record in a replica's metadata; None for a replica of a version that reports something else."""
    try:
        record = msgspec.convert(metadata, HostRecord)
        record.member()
    except (ConfigError, ValueError) as error:  # msgspec's errors are ValueErrors
        _log.warning("a replica is left out: it reports no engine host", reason=str(error))
        return None
    return record


_listening: ServedHosts | None = None  # of the API server in this process


def listen(hosts: ServedHosts) -> None:
    """Have `hosts` receive what Serve's router in this process reports from now on."""
    global _listening
    _listening = hosts


def report(metadata: Iterable[Mapping[str, object]]) -> None:
    """Pass on what Serve's router reports. Any thread may call it."""
    if _listening is not None:
        _listening.report(metadata)
