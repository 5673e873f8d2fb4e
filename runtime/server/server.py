"""`Server`: one engine behind a TCP or unix socket and OpenAI's HTTP API, with metrics and probes on another port.

When `close` returns, no socket is open, no task runs and every accepted request has ended. The engine is closed by its
owner. Must not import models or the scheduler's internals.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from ..common.errors import ConfigError, Overloaded, QuireError, Unavailable
from ..common.memory import machine_memory_bytes
from ..common.server_config import ServerConfig
from ..engine.facade import EngineFacade
from ..net.acceptor import AcceptedConnection, Acceptor, ConnectionLimits
from ..net.listen import ListeningSocket, check_tcp, fit_connections, is_loopback, listen_tcp, listen_unix
from ..net.tls import TLS
from .app_context import AppContext
from .http import HTTPConnection, plain_answer
from .http_ports import OLLAMA, OPENAI, check_http_ports, listen_http, new_routers
from .memory_limits import MemoryLimits
from .models.catalog import ModelCatalog
from .monitoring import (
    ClientLoad,
    ModelOperations,
    OperatorServer,
    PrometheusObserver,
    Readiness,
    RequestStatus,
    StatusCollector,
    VllmNames,
    open_tracer,
)
from .msgpack.connection import Connection
from .requests.live_requests import LiveRequests
from .requests.resume import ReplayStore
from .tenancy.auth import Keyring
from .tenancy.tenant_bytes import EqualShares

CLOSE_TIMEOUT_S = 1.0  # time for clients to read the last frames and close their connections
UNREAD_TIMEOUT_S = 0.1
DRAIN_POLL_S = 0.05
DEFAULT_MODEL_NAME = "quire"
MAX_REFUSALS = 64  # connections beyond max_connections that receive an ERROR; further ones are closed immediately
RESERVED_FILES = 256  # open files for engine processes, operators, the model, snapshots and logs

ClientConnection = Connection | HTTPConnection

_log = structlog.get_logger("quire.server")


class Server:
    """A server from `start` to `close`.

    `observer` exposes the metrics; the caller creates it with build, ISA and threads.
    """

    def __init__(self, observer: PrometheusObserver | None = None) -> None:
        self.observer = observer or PrometheusObserver()
        self.address = ""  # address for clients: `host:port`, `[v6]:port` or `unix:/path`
        self.operator_address = ""
        self.openai_address = ""  # empty: there is no HTTP API
        self.ollama_address = ""  # empty: there is no port for Ollama's clients
        self._connections: dict[ClientConnection, asyncio.Task[None]] = {}
        self._acceptors: list[Acceptor] = []
        self._closing = False
        self._context: AppContext | None = None  # context of a started server
        self._readiness: Readiness | None = None
        self._tls: TLS | None = None
        self._reload_asked = asyncio.Event()
        self._open = contextlib.AsyncExitStack()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def live_requests(self, limit: int = 200) -> list[RequestStatus]:
        """Return the oldest live requests, including requests without a connection."""
        return [] if self._context is None else self._context.requests.oldest(limit)

    async def start(self, engine: EngineFacade, config: ServerConfig) -> None:
        """Serve one model as `start_models`, under its name in `config`."""
        await self.start_models(ModelCatalog.of_one(config.served_model_name or DEFAULT_MODEL_NAME, engine), config)

    async def start_models(self, models: ModelCatalog, config: ServerConfig) -> None:
        """Bind the sockets and serve. Raises ConfigError for an address that is unusable or not allowed."""
        keyring, self._tls = await check_config(config)
        async with contextlib.AsyncExitStack() as opening:
            keyring.check_permissions()
            listening = await _listen(config)
            opening.callback(listening.close)
            operator_listening = await listen_tcp(config.operator_host, config.operator_port)
            opening.callback(operator_listening.close)

            http_listening = await listen_http(config, opening)

            models.set_observer(self.observer)
            texts = EqualShares("texts", "max_text_bytes", lambda: config.max_text_bytes // keyring.num_tenants)
            tracer = open_tracer(config.otlp_traces_endpoint, models.main.name, self.observer.version)
            opening.push_async_callback(tracer.close)
            requests = LiveRequests(models, self.observer, texts, tracer)
            replays = ReplayStore(requests, config, lambda: keyring.num_tenants)
            operator_address = str(operator_listening.address)
            http_addresses = {name: str(each.address) for name, each in http_listening.items()}
            openai_address = http_addresses.get(OPENAI, "")
            context = AppContext(
                models, config, self.observer, keyring, requests, replays, operator_address, openai_address
            )
            readiness = Readiness(models.stats, config.stall_timeout_ms / 1000)
            opening.push_async_callback(_stop, asyncio.create_task(readiness.watch()))
            operators = self._serve_operators(context, readiness, operator_listening, opening)
            max_connections = _connections_per_port(config, num_ports=1 + len(http_listening))
            metrics = operators if config.openai_metrics else None
            routers = await new_routers(context, readiness, metrics, opening)
            for name, socket in http_listening.items():
                self._serve_clients(
                    socket,
                    partial(HTTPConnection, context=context, router=routers[name]),
                    context,
                    max_connections,
                    opening,
                    is_complete=HTTPConnection.can_serve,
                    plain_answer=plain_answer(routers[name].form),
                )
            self._serve_clients(listening, lambda each: Connection(each, context), context, max_connections, opening)
            opening.push_async_callback(context.replays.close)
            opening.push_async_callback(self._close_connections)
            opening.callback(self._stop_accepting)
            memory = MemoryLimits(config)
            opening.push_async_callback(_stop, asyncio.create_task(self._reload_when_asked(keyring, memory)))
            self._open = opening.pop_all()
        self._context = context
        self._readiness = readiness
        self.address = str(listening.address)
        self.operator_address = str(operator_listening.address)
        self.openai_address = openai_address
        self.ollama_address = http_addresses.get(OLLAMA, "")
        _log.info("memory for clients at most", total_bytes=memory.total_bytes, **memory.bytes_by_purpose)
        _log.info(
            "listening",
            address=self.address,
            operator_address=self.operator_address,
            openai_address=self.openai_address,
            ollama_address=self.ollama_address,
            max_connections=max_connections,
        )

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, send GOAWAY, and wait for accepted requests, unsent frames and clients that may resume.

        A request that has not ended after `timeout_s` ends in Unavailable. Connections stay open until `close`, and
        new ones are accepted: they may resume.
        """
        if self._context is None or self._readiness is None:
            return
        self._readiness.leave()
        self._context.leaves_at = asyncio.get_running_loop().time() + timeout_s
        for connection in self._connections:
            connection.go_away()
        _log.info("draining", timeout_s=timeout_s, requests=len(self._context.requests))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._unfinished(self._context):  # noqa: ASYNC110 - no event tells when a socket is empty
                    await asyncio.sleep(DRAIN_POLL_S)
        if unfinished := self._unfinished(self._context):
            _log.warning("the drain was cut", timeout_s=timeout_s, **unfinished)
        self._fail_requests(Unavailable("the server shut down before this request ended; try again"))

    def reload(self) -> None:
        """Read the files of keys and certificate again. A broken file changes nothing.

        All calls during a reading together cause one further reading.
        """
        self._reload_asked.set()

    async def close(self) -> None:
        """Stop listening, end every request and connection with UNAVAILABLE, then the HTTP port. Idempotent."""
        await self._open.aclose()
        self._context = None

    async def _reload_when_asked(self, keyring: Keyring, memory: MemoryLimits) -> None:
        while True:
            await self._reload_asked.wait()
            self._reload_asked.clear()
            try:
                await keyring.reload(lambda num_tenants: memory.check(num_tenants, machine_memory_bytes()))
                if self._tls is not None:
                    await self._tls.reload()
            except OSError as error:  # the file is gone again
                _log.error("files not reloaded", reason=str(error))

    def _serve_operators(
        self,
        context: AppContext,
        readiness: Readiness,
        listening: ListeningSocket,
        opening: contextlib.AsyncExitStack,
    ) -> OperatorServer:
        models = context.models
        config = context.config
        mirror = VllmNames(models.main.name, lambda: models.main.info) if config.metrics_compat == "vllm" else None
        self.observer.watch(
            models.stats,
            lambda: ClientLoad(self.num_connections, context.held_bytes()),
            mirror,
            models.host_statuses,
            models.residency,
        )
        status = StatusCollector(
            models,
            self.observer,
            problem=readiness.problem,
            num_connections=lambda: self.num_connections,
            live_requests=self.live_requests,
        )
        opening.push_async_callback(_stop, asyncio.create_task(status.history.watch()))
        operators = OperatorServer(
            self.observer.registry, readiness, status.collect, listening.socket, ModelOperations(models.residency)
        )
        opening.push_async_callback(operators.close)
        return operators

    def _serve_clients(
        self,
        listening: ListeningSocket,
        connect: Callable[[AcceptedConnection], ClientConnection],
        context: AppContext,
        max_connections: int,
        opening: contextlib.AsyncExitStack,
        is_complete: Callable[[bytearray], bool] | None = None,
        plain_answer: bytes = b"",
    ) -> None:
        config = context.config

        async def serve(accepted: AcceptedConnection) -> None:
            task = asyncio.current_task()
            if self._closing or task is None:  # a TLS handshake may end after the listening socket is closed
                return
            full = Overloaded("the server has as many connections as it allows; retry later")
            connection = connect(accepted)
            self._connections[connection] = task
            try:
                await connection.run(full if accepted.num_open_at_accept > max_connections else None)
            finally:
                del self._connections[connection]

        pending = min(config.max_pending_connections, max(1, max_connections // 2))
        acceptor = Acceptor(
            listening.socket,
            serve,
            ConnectionLimits(max_connections + MAX_REFUSALS, pending, config.max_pending_connections_per_address),
            tls=self._tls,
            handshake_timeout_s=config.handshake_timeout_ms / 1000,
            is_complete=is_complete,
            plain_answer=plain_answer,
            on_refused=self.observer.on_connection_refused,
        )
        self._acceptors.append(acceptor)
        opening.push_async_callback(acceptor.close)

    def _stop_accepting(self) -> None:
        for acceptor in self._acceptors:
            acceptor.stop()

    def _unfinished(self, context: AppContext) -> dict[str, int]:
        """Return the counts that a drain waits for. A running resumable request with a reader counts twice."""
        counts = {
            "requests_of_connections": sum(len(connection.tasks) for connection in self._connections),
            "resumable_or_stored_requests": context.replays.num_running,
            "clients_that_may_resume": context.replays.resume_index.num_awaited,
            "unsent_bytes": sum(connection.unsent_bytes for connection in self._connections),
        }
        return {name: count for name, count in counts.items() if count}

    def _fail_requests(self, error: QuireError) -> None:
        if self._context is not None:
            self._context.replays.fail(error)
        for connection in self._connections:
            connection.fail_requests(error)

    async def _close_connections(self) -> None:
        self._closing = True
        leaving = Unavailable("the server is shutting down")
        self._fail_requests(leaving)
        for connection in list(self._connections):
            connection.shut_down(leaving)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._until_read()
        for connection in self._connections:
            connection.abort()

    async def _until_read(self) -> None:
        """Wait until every connection is closed; abort the ones whose clients read nothing for `UNREAD_TIMEOUT_S`."""
        unsent: dict[ClientConnection, int] = {}
        while self._connections:
            await asyncio.wait(self._connections.values(), timeout=UNREAD_TIMEOUT_S)
            for connection in self._connections:
                left = connection.unsent_bytes
                if left and left == unsent.get(connection):
                    connection.abort()
                unsent[connection] = left


async def check_config(config: ServerConfig) -> tuple[Keyring, TLS | None]:
    """Check settings that need no engine: keys and certificate (returned), limits, address. Raises ConfigError."""
    keyring = Keyring.of(config)
    tls = TLS.of(config)
    MemoryLimits(config).check(keyring.num_tenants, machine_memory_bytes())
    hosts = {} if config.uds is not None else {"host": config.host, "openai_host": config.openai_host}
    for name, host in hosts.items():
        if not config.has_keys and not await is_loopback(host):
            raise ConfigError(
                f"`{name}` {host} is reachable from other machines, which requires `token` or `auth_tokens`; "
                "set one, or listen on 127.0.0.1 or a unix socket (`uds`)"
            )
    return keyring, tls


def _connections_per_port(config: ServerConfig, num_ports: int) -> int:
    """Return the number of clients that may be connected to each port; log a warning if it is lower than configured.

    Raises ConfigError if the limit of open files leaves none.
    """
    reserved = num_ports * MAX_REFUSALS + RESERVED_FILES
    max_connections = fit_connections(num_ports * config.max_connections, reserved) // num_ports
    if max_connections < config.max_connections:
        _log.warning(
            "fewer connections than configured: the limit of open files is too low",
            max_connections=max_connections,
            configured=config.max_connections,
            needed_open_files=num_ports * config.max_connections + reserved,
        )
    return max_connections


async def _listen(config: ServerConfig) -> ListeningSocket:
    if config.uds is not None:
        return listen_unix(Path(config.uds))
    return await listen_tcp(config.host, config.port)


async def check_ports(config: ServerConfig) -> None:
    """Raise ConfigError if a TCP port of the server is in use, before an engine is loaded in vain."""
    if config.uds is None:
        await check_tcp(config.host, config.port)
    await check_tcp(config.operator_host, config.operator_port)
    await check_http_ports(config)


async def _stop(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
