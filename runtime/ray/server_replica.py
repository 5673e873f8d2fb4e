"""A Serve replica that is an API server: `quire serve` without a command, over the engine hosts that Serve runs."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from importlib.metadata import version
from typing import Any

import msgspec
import structlog

from ..cluster import connected_cluster
from ..common.logs import log_to_stderr
from ..common.server_config import ServerConfig
from ..common.settings import Settings
from ..common.tuning import favor_event_loop, tune_collector
from ..engine import Core, Engine, load_texts
from ..model import model_name, model_path
from ..net.listen import AddressTaken
from ..server import Server, check_config
from ..server.monitoring import PrometheusObserver
from .handle_links import ServerLinks
from .members import SECRET_BYTES, ServedHosts, listen
from .settings import reachable, release_of, settings_of

PORT_RETRY_S = 0.2
TAKEN_MARGIN_S = 30.0  # time beyond shutdown_timeout for which a former replica on this machine may keep the ports

_log = structlog.get_logger("quire.ray")


class ServerReplica:
    """Serve calls its methods; clients connect to its own ports."""

    async def __init__(self, args: dict[str, Any], hosts: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        """Connect to engine hosts and listen. `hosts` is Serve's handle to them.

        Waits for a host of the same update. Raises ConfigError, ModelError or Unavailable.
        """
        settings = settings_of(args)
        log_to_stderr(settings.server.log_format, settings.server.log_level)
        self._shutdown_timeout_s = settings.server.shutdown_timeout
        await check_config(settings.server)
        members = ServedHosts(release_of(args), ServerLinks(hosts), settings.server.shutdown_timeout)
        listen(members)
        await hosts.wait_until_ready.remote()  # creates Serve's router in this process, which reports hosts
        await members.choose_bits_id()
        async with contextlib.AsyncExitStack() as opening:
            engine = await self._connect(settings, members, opening)
            name = settings.server.served_model_name or model_name(model_path(settings.engine.model))
            config = msgspec.structs.replace(settings.server, served_model_name=name)
            self._server = await _started(engine, config)
            opening.push_async_callback(self._server.close)
            self._open = opening.pop_all()
        tune_collector()
        favor_event_loop()

    async def _connect(
        self, settings: Settings, members: ServedHosts, opening: contextlib.AsyncExitStack
    ) -> Engine[Core]:
        text_processor, encoder_texts = await asyncio.to_thread(load_texts, settings.engine)
        of_no_host = secrets.token_bytes(SECRET_BYTES)  # random, because each host has its own secret
        cluster = await opening.enter_async_context(connected_cluster(settings, members, of_no_host))
        engine: Engine[Core] = Engine(cluster, text_processor, encoder_texts)
        opening.callback(engine.end_texts)
        return engine

    async def __call__(self, request: object = None) -> dict[str, str]:
        """Return the addresses of this API server."""
        server = self._server
        addresses = {"clients": server.address, "metrics": server.operator_address, "api": server.openai_address}
        return {what: reachable(address) for what, address in addresses.items() if address}

    async def __del__(self) -> None:
        """Leave: requests have `shutdown_timeout` to end; clients with several addresses continue at another server."""
        await self._server.drain(self._shutdown_timeout_s)
        await self._open.aclose()


async def _started(engine: Engine[Core], config: ServerConfig) -> Server:
    """Return a listening server. A former replica on this machine may keep the ports for a while as it drains."""
    info = engine.info
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + config.shutdown_timeout + TAKEN_MARGIN_S
    while True:
        server = Server(PrometheusObserver(version("quire"), info.isa, info.threads, info.threads_reason))
        try:
            await server.start(engine, config)
        except AddressTaken as error:
            if loop.time() > give_up_at:
                raise
            _log.info("waiting for a port", reason=str(error))
            await asyncio.sleep(PORT_RETRY_S)
        else:
            return server
