"""`quire engine-host`: offer the engine processes of this machine to API servers until a signal ends it.

The first SIGTERM or SIGINT announces that the host leaves: running requests have `--shutdown-timeout` seconds to
finish, then the API servers continue them elsewhere. Standard output gets one line, the ready line.
"""

from __future__ import annotations

import asyncio
import signal

from ..cluster import listen_address, read_secret, running_host
from ..common.errors import ConfigError
from ..common.logs import json_event, log_to_stderr
from ..common.settings import Settings
from ..net.address import TCPAddress
from ..net.tls import TLS
from .flags import HostFlags, MemoryFlags, ModelFolder, SchedulingFlags, settings_from
from .stop_signal import StopSignal, run_until_signal


def engine_host(
    model: ModelFolder = None,
    /,
    *,
    memory: MemoryFlags | None = None,
    scheduling: SchedulingFlags | None = None,
    host: HostFlags | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. Raises ModelError or ConfigError if the host cannot start."""
    settings = settings_from(model, memory, scheduling, host)
    server = settings.server
    if server.secret_file is None:
        raise ConfigError("secret_file is needed; make one with `openssl rand -hex 32`")
    secret = read_secret(server.secret_file)
    tls = TLS.of(server)
    address = listen_address(server)
    log_to_stderr(server.log_format, server.log_level)
    run_until_signal(lambda stop: _serve(settings, address, secret, tls, stop))


async def _serve(settings: Settings, address: TCPAddress, secret: bytes, tls: TLS | None, stop: StopSignal) -> None:
    async with running_host(settings, address, secret, tls) as host:
        stop.cancel_start = None
        if tls is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: asyncio.create_task(tls.reload()))
        info = host.pool.info
        model = settings.engine.model or "bundled demo"
        fields = {"address": str(host.address), "model": model, "pages": info.num_pages, "page_size": info.page_size}
        fields |= {"threads": info.threads, "isa": info.isa, "bits": info.fingerprint}
        print(
            json_event("quire engine host ready", **fields)
            if settings.server.log_format == "json"
            else f"quire engine host ready: {host.address}  model {model}  "
            f"{info.num_pages} pages of {info.page_size} tokens  {info.threads} threads  {info.isa}  "
            f"bits {info.fingerprint}",
            flush=True,
        )
        await stop.wait()
        await host.leave(settings.server.shutdown_timeout)
