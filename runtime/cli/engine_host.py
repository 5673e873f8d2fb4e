"""`quire engine-host`: offer the engine processes of this machine to API servers until a signal ends it.

The first SIGTERM or SIGINT announces that the host leaves: running requests have `--shutdown-timeout` seconds to
finish, then the API servers continue them elsewhere. Standard output gets one line, the ready line.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from ..cluster import EngineHost, read_secret
from ..common.errors import ConfigError
from ..common.logs import log_to_stderr
from ..common.settings import Settings
from ..engine import check_snapshot_path, models_digest
from ..protocol.address import TCPAddress, parse_address
from ..server.listen import listen_tcp
from ..server.tls import TLS
from .flags import HostFlags, MemoryFlags, ModelFolder, SchedulingFlags, settings_from
from .serve import engine_processes, tune_collector
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
    secret, tls = read_secret(server.secret_file), TLS.of(server)
    address = parse_address(server.listen, lowest_port=0)
    if not isinstance(address, TCPAddress):
        raise ConfigError(f"listen {server.listen} is not allowed; write host:port")
    log_to_stderr(server.log_format, server.log_level)
    run_until_signal(lambda stop: _serve(settings, address, secret, tls, stop))


async def _serve(settings: Settings, address: TCPAddress, secret: bytes, tls: TLS | None, stop: StopSignal) -> None:
    server = settings.server
    if server.prefix_snapshot is not None:
        check_snapshot_path(Path(server.prefix_snapshot))
    digest = models_digest(settings.engine)
    listening = await listen_tcp(address.host, address.port)
    try:
        async with engine_processes(settings) as pool:
            stop.cancel_start = None
            host = EngineHost(pool, secret, digest, settings.engine.max_num_waiting)
            host.listen(listening.socket, tls)
            tune_collector()
            if tls is not None:
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: asyncio.create_task(tls.reload()))
            try:
                info = pool.info
                print(
                    f"quire engine host ready: {listening.address}  model {settings.engine.model or 'bundled demo'}  "
                    f"{info.num_pages} pages of {info.page_size} tokens  {info.threads} threads  {info.isa}  "
                    f"bits {info.fingerprint}",
                    flush=True,
                )
                await stop.wait()
                await host.leave(server.shutdown_timeout)
            finally:
                await host.close()
    finally:
        listening.close()
