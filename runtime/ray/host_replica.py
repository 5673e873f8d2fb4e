"""A Serve replica that is an engine host: `quire engine-host` without a command."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

from ...scheduler import QueueFull
from ..cluster import listen_address, running_host
from ..common.errors import Unavailable
from ..common.logs import log_to_stderr
from ..server.tls import TLS
from .members import SECRET_BYTES, HostRecord
from .settings import reachable, release_of, settings_of


class HostReplica:
    """Serve calls its methods; API servers connect to its own port."""

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start engine processes and listen. Raises ConfigError, ModelError or Unavailable."""
        settings = settings_of(args)
        log_to_stderr(settings.server.log_format, settings.server.log_level)
        address, tls = listen_address(settings.server), TLS.of(settings.server)
        secret = secrets.token_bytes(SECRET_BYTES)
        async with contextlib.AsyncExitStack() as opening:
            self._host = await opening.enter_async_context(running_host(settings, address, secret, tls))
            bits_id = self._host.pool.info.fingerprint
            self._record = HostRecord(reachable(str(self._host.address)), bits_id, release_of(args), secret.hex())
            self._shutdown_timeout_s = settings.server.shutdown_timeout
            self._open = opening.pop_all()

    async def wait_until_ready(self) -> None:
        """Return: a replica that can be called is ready."""

    def record_replica_metadata(self) -> dict[str, str]:
        """Return what API servers need to connect; Serve calls it once."""
        return {name: getattr(self._record, name) for name in HostRecord.__struct_fields__}

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
        """Leave: what has not ended after `shutdown_timeout` goes on at other hosts."""
        await self._host.leave(self._shutdown_timeout_s)
        await self._open.aclose()
