"""Start an engine host, and connect to engine hosts, with the options of their commands."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ..client.tls import tls_context
from ..common.config import EngineConfig
from ..common.errors import ConfigError
from ..common.server_config import ServerConfig
from ..common.settings import Settings
from ..common.tuning import tune_collector
from ..engine import CoreInfo, check_snapshot_path, models_digest
from ..model import model_path
from ..model.vision import read_vision
from ..net.address import TCPAddress, parse_tcp_address
from ..net.listen import listen_tcp
from ..net.tls import TLS
from ..workers import engine_processes
from .cluster import Cluster
from .host import EngineHost
from .host_link import MAX_IMAGE_BYTES
from .members import MemberSource
from .remote import Credentials


def listen_address(server: ServerConfig) -> TCPAddress:
    """Return the address of an engine host; port 0 takes a free port. Raises ConfigError."""
    return parse_tcp_address("listen", server.listen, "host:port or [v6]:port", lowest_port=0)


@asynccontextmanager
async def running_host(
    settings: Settings, address: TCPAddress | None, secret: bytes, tls: TLS | None
) -> AsyncIterator[EngineHost]:
    """Run engine processes and offer them. Raises the errors of `EnginePool.launch`, and ConfigError.

    Without an `address` the host does not listen: another system carries its links to `EngineHost.serve`.
    """
    server = settings.server
    if server.prefix_snapshot is not None:
        check_snapshot_path(Path(server.prefix_snapshot))
    digest = models_digest(settings.engine)
    listening = None if address is None else await listen_tcp(address.host, address.port)
    try:
        async with engine_processes(settings) as pool:
            engine = settings.engine
            host = EngineHost(pool, secret, digest, engine.max_num_waiting, engine.max_image_memory)
            if listening is not None:
                host.listen(listening, tls)
            tune_collector()
            try:
                yield host
            finally:
                await host.close()
    finally:
        if listening is not None:
            listening.close()


@asynccontextmanager
async def connected_cluster(settings: Settings, members: MemberSource, secret: bytes) -> AsyncIterator[Cluster]:
    """Use the engine processes of other machines. Raises as `Cluster.connect`."""
    server = settings.server
    engine = settings.engine
    if engine.max_image_memory > MAX_IMAGE_BYTES:
        raise ConfigError(f"max_image_memory must be at most {MAX_IMAGE_BYTES} with engine hosts")
    tls = None if server.engine_hosts_ca is None else tls_context(server.engine_hosts_ca)
    cluster = await Cluster.connect(
        members,
        Credentials(secret, tls),
        models_digest(engine),
        heartbeat_timeout_s=server.engine_heartbeat_timeout_ms / 1000,
        restart_timeout_s=server.engine_restart_timeout_ms / 1000,
    )
    try:
        _check_image_tokens(engine, cluster.info)
        yield cluster
    finally:
        await cluster.close()


def _check_image_tokens(engine: EngineConfig, info: CoreInfo) -> None:
    """Raise ConfigError if this server makes larger images than the hosts accept."""
    if info.images is None or not info.images.block:
        return
    spec = read_vision(model_path(engine.model), engine.max_image_tokens)
    if spec is not None and spec.num_tokens > info.images.num_tokens:
        raise ConfigError(
            f"max_image_tokens: an engine host takes images of {info.images.num_tokens} tokens, this server makes them "
            f"of up to {spec.num_tokens}; set the same at both"
        )
