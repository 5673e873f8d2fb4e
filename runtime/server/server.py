"""`Server`: one engine behind a TCP or unix socket, with metrics and probes on the operator's HTTP port.

It must not know models or scheduling; the engine is the facade's protocol and stays its owner's to close. One
invariant: after `close` returns no socket is open, no task runs, and every request it accepted has been cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import structlog

from ..common.config import ServerConfig
from ..common.errors import ConfigError, Overloaded, QuireError, Unavailable
from ..engine.facade import EngineFacade
from ..protocol.address import UnixAddress
from .auth import Keyring
from .connection import Connection
from .listen import BACKLOG, ListeningSocket, allow_open_files, is_loopback, listen_tcp, listen_unix
from .live_requests import LiveRequests
from .monitoring import (
    OperatorServer,
    PrometheusObserver,
    Readiness,
    RequestStatus,
    StatusCollector,
    VllmNames,
    operator_app,
)
from .request_handler import AppContext
from .resume import ReplayStore
from .tls import TLS

CLOSE_TIMEOUT_S = 5.0
DRAIN_POLL_S = 0.05
DEFAULT_MODEL_NAME = "quire"
MAX_REFUSALS = 256  # connections beyond max_connections that are told so; the rest are closed without a word
OTHER_FILES = 256  # that a process has open besides its connections

_log = structlog.get_logger("quire.server")


class Server:
    """`await start(engine, config)`, then `address` and `http_address` say where; `await close()` ends it.

    A given `observer` carries what only its maker knows (build, ISA, threads).
    """

    def __init__(self, observer: PrometheusObserver | None = None) -> None:
        self.observer = observer or PrometheusObserver()
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._closing = False
        self._context: AppContext | None = None  # while started
        self._progress: Readiness | None = None
        self._open = contextlib.AsyncExitStack()
        self._address = ""
        self._http_address = ""
        self._tls: TLS | None = None

    @property
    def address(self) -> str:
        """As clients take it: `host:port`, `[v6]:port` or `unix:/path`."""
        return self._address

    @property
    def http_address(self) -> str:
        return self._http_address

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def live_requests(self, limit: int = 200) -> list[RequestStatus]:
        """The oldest of those that have not ended, those that go on without a connection included."""
        return [] if self._context is None else self._context.requests.oldest(limit)

    async def start(self, engine: EngineFacade, config: ServerConfig) -> None:
        """Bind both sockets and serve. Raises ConfigError for an address that cannot or must not be used."""
        await check_config(config)
        self._tls = TLS.of(config)
        async with contextlib.AsyncExitStack() as opening:
            keyring = Keyring.of(config)
            listening = await _listen(config)
            opening.callback(listening.close)
            http_listening = await listen_tcp(config.http_host, config.http_port)
            opening.callback(http_listening.close)

            model = config.served_model_name or DEFAULT_MODEL_NAME
            mirror = VllmNames(model, lambda: engine.info) if config.metrics_compat == "vllm" else None
            self.observer.watch(engine.stats, lambda: len(self._connections), mirror)
            engine.set_observer(self.observer)
            requests = LiveRequests(engine, self.observer)
            context = AppContext(engine, config, self.observer, keyring, requests, ReplayStore(requests, config))
            progress = Readiness(engine.stats, config.stall_timeout_ms / 1000)
            opening.push_async_callback(_stop, asyncio.create_task(progress.watch()))
            status = StatusCollector(
                engine,
                self.observer,
                model=model,
                problem=progress.problem,
                num_connections=lambda: self.num_connections,
                live_requests=self.live_requests,
            )
            opening.push_async_callback(_stop, asyncio.create_task(status.history.watch()))
            app = operator_app(self.observer.registry, progress, status.collect)
            operator = OperatorServer(app, http_listening.socket)
            opening.push_async_callback(operator.close)
            allow_open_files(config.max_connections + MAX_REFUSALS + OTHER_FILES)
            await self._serve(context, listening, opening)
            self._open = opening.pop_all()
        self._context, self._progress = context, progress
        self._address = str(listening.address)
        self._http_address = str(http_listening.address)
        _log.info("listening", address=self._address, http_address=self._http_address)

    async def drain(self, timeout_s: float) -> None:
        """Accept no request any more, say so to everybody, and wait until the accepted ones have ended, all frames have
        left, and whoever lost its connection before the end has resumed. What has not ended after `timeout_s` ends in
        Unavailable. Connections stay until `close`, also new ones: they may resume.
        """
        if self._context is None or self._progress is None:
            return
        self._progress.leave()
        self._context.leaves_at = asyncio.get_running_loop().time() + timeout_s
        for connection in self._connections:
            connection.go_away()
        _log.info("draining", timeout_s=timeout_s, requests=len(self._context.requests))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._is_busy(self._context):  # noqa: ASYNC110 - sockets tell nobody when they are empty
                    await asyncio.sleep(DRAIN_POLL_S)
        self._fail_requests(Unavailable("the server shut down before this request ended; try again"))

    def reload(self) -> None:
        """Read keys and certificate anew, where there are files of them. A broken file changes nothing."""
        if self._context is not None:
            self._context.keyring.reload()
        if self._tls is not None:
            self._tls.reload()

    async def close(self) -> None:
        """Stop accepting, end every request and every connection with UNAVAILABLE, then the HTTP port. Idempotent."""
        await self._open.aclose()
        self._context = None

    async def _serve(self, context: AppContext, listening: ListeningSocket, opening: contextlib.AsyncExitStack) -> None:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            excess = len(self._connections) - context.config.max_connections
            if excess >= MAX_REFUSALS or self._closing:  # TLS may have shaken hands a moment too long
                writer.transport.abort()
            else:
                self._run(Connection(reader, writer, context), refuse=excess >= 0)

        start: Any = asyncio.start_unix_server if isinstance(listening.address, UnixAddress) else asyncio.start_server
        server: asyncio.Server = await start(
            accept, sock=listening.socket, backlog=BACKLOG, **self._tls_options(context.config)
        )
        opening.push_async_callback(context.replays.close)
        opening.push_async_callback(self._close_connections)
        opening.callback(server.close)

    def _tls_options(self, config: ServerConfig) -> dict[str, Any]:
        if self._tls is None:
            return {}
        return {"ssl": self._tls.context, "ssl_handshake_timeout": config.handshake_timeout_ms / 1000}

    def _run(self, connection: Connection, refuse: bool) -> None:
        full = Overloaded("the server has as many connections as it allows; retry later") if refuse else None
        task = asyncio.create_task(connection.run(full))
        self._connections[connection] = task
        task.add_done_callback(lambda _: self._connections.pop(connection))

    def _is_busy(self, context: AppContext) -> bool:
        connections = self._connections
        return context.replays.is_busy or any(connection.tasks or connection.has_unsent for connection in connections)

    def _fail_requests(self, error: QuireError) -> None:
        if self._context is not None:
            self._context.replays.fail(error)
        for connection in self._connections:
            connection.fail_requests(error)

    async def _close_connections(self) -> None:
        self._closing = True
        leaving = Unavailable("the server is shutting down")
        self._fail_requests(leaving)
        tasks = list(self._connections.values())
        for connection in list(self._connections):
            connection.shut_down(leaving)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
            for task in late:
                await _stop(task)


async def check_config(config: ServerConfig) -> None:
    """What can be told of it without an engine: keys, certificate, who may connect. Raises ConfigError."""
    Keyring.of(config)
    TLS.of(config)
    has_keys = config.token is not None or config.auth_tokens is not None
    if config.uds is None and not has_keys and not await is_loopback(config.host):
        raise ConfigError(
            f"`host` {config.host} is reachable from other machines, which requires `token` or `auth_tokens`; "
            "set one, or listen on 127.0.0.1 or a unix socket (`uds`)"
        )


async def _listen(config: ServerConfig) -> ListeningSocket:
    if config.uds is not None:
        return listen_unix(Path(config.uds))
    return await listen_tcp(config.host, config.port)


async def _stop(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
