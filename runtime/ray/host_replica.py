"""A Serve replica that is an engine host: `quire engine-host` without a command."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import AsyncGenerator
from typing import Any

from ...scheduler import QueueFull
from ..cluster import listen_address, running_host
from ..common.errors import Unavailable
from ..common.logs import log_to_stderr
from ..net.tls import TLS
from .handle_links import HostLinks
from .members import SECRET_BYTES, HostRecord
from .settings import host_links_of, node_address, reachable, release_of, settings_of


class HostReplica:
    """Serve calls its methods; API servers connect to its own port, or have their links over Serve's handles."""

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start engine processes, and listen unless links come over handles.

        Raises ConfigError, ModelError or Unavailable.
        """
        settings = settings_of(args)
        log_to_stderr(settings.server.log_format, settings.server.log_level)
        kind = host_links_of(args)
        address = listen_address(settings.server) if kind == "tcp" else None
        tls = TLS.of(settings.server) if kind == "tcp" else None
        secret = secrets.token_bytes(SECRET_BYTES)
        async with contextlib.AsyncExitStack() as opening:
            self._host = await opening.enter_async_context(running_host(settings, address, secret, tls))
            self._links = HostLinks(self._host)
            opening.callback(self._links.close)
            if self._host.address is None:
                name = f"{node_address()}/{os.getpid()}-{secrets.token_hex(2)}"
            else:
                name = reachable(str(self._host.address))
            bits_id = self._host.pool.info.fingerprint
            self._record = HostRecord(name, bits_id, release_of(args), secret.hex(), kind)
            self._shutdown_timeout_s = settings.server.shutdown_timeout
            self._open = opening.pop_all()

    async def wait_until_ready(self) -> None:
        """Return immediately, since a replica that can be called is ready."""

    def record_replica_metadata(self) -> dict[str, str]:
        """Return the record with which API servers connect; Serve calls it once."""
        return {name: getattr(self._record, name) for name in HostRecord.__struct_fields__}

    async def link_down(self, address: str, link: str) -> AsyncGenerator[bytes]:
        """Open a link over handles and yield the host's messages. Raises Unavailable."""
        self._check_is_here(address)
        async with contextlib.aclosing(self._links.down(link)) as pieces:
            async for piece in pieces:
                yield piece

    async def link_up(self, address: str, link: str, sequence: int, data: bytes, num_received: int) -> bool:
        """Receive the messages of an API server on its link. Return whether the link continues."""
        self._check_is_here(address)
        return await self._links.up(link, sequence, data, num_received)

    def _check_is_here(self, address: str) -> None:
        """Raise Unavailable for a call to another replica, and where links use TCP."""
        if self._record.host_links != "handles" or address != self._record.address:
            raise Unavailable("there is no such link here")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load that `scaling.HostScaling` reads; empty while the engines restart."""
        try:
            stats = self._host.pool.stats()
        except Unavailable:
            return {}
        kv_share = stats.pages_owned / stats.pages_total if stats.pages_total else 0.0
        return {"predicted_wait_s": self._host.pool.predicted_wait_s, "kv_share": kv_share}

    async def check_health(self) -> None:
        """Raise NotAccepting while engine processes cannot be restarted: then Serve replaces the replica."""
        with contextlib.suppress(QueueFull):
            self._host.pool.check_room("", 1)

    async def __del__(self) -> None:
        """Leave: requests that have not ended after `shutdown_timeout` continue at other hosts."""
        await self._host.leave(self._shutdown_timeout_s)
        await self._open.aclose()
