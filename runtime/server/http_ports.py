"""The ports of the HTTP APIs: one with OpenAI's and Anthropic's, and one for Ollama's clients if it is wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import structlog

from ..common.errors import ConfigError
from ..common.server_config import ServerConfig
from ..net.listen import ListeningSocket, check_tcp, listen_tcp
from .anthropic import AnthropicDoor
from .app_context import AppContext
from .http import BodyReader, HTTPRouter
from .http.router import Door
from .monitoring import OperatorServer, Readiness
from .ollama import OllamaDoor
from .openai import OpenAIDoor
from .openai.batch_door import BatchDoor, open_batches

OPENAI, OLLAMA = "openai_port", "ollama_port"  # options of the ports

_log = structlog.get_logger("quire.server")


async def listen_http(config: ServerConfig, opening: contextlib.AsyncExitStack) -> dict[str, ListeningSocket]:
    """Return the listening sockets by their options. Raises ConfigError."""
    if not config.serves_api:
        _log.info("no HTTP API: `uds` without keys lets in this user only; set `token` or `auth_tokens` to have both")
    sockets: dict[str, ListeningSocket] = {}
    for name, port in config.http_ports.items():
        with _naming_port(name):
            sockets[name] = await listen_tcp(config.openai_host, port)
        opening.callback(sockets[name].close)
    return sockets


async def check_http_ports(config: ServerConfig) -> None:
    """Raise ConfigError if a port is in use."""
    for name, port in config.http_ports.items():
        with _naming_port(name):
            await check_tcp(config.openai_host, port)


async def new_routers(
    context: AppContext,
    readiness: Readiness,
    metrics: OperatorServer | None,
    opening: contextlib.AsyncExitStack,
) -> dict[str, HTTPRouter]:
    """Return the router of each port by its option. The port of Ollama's clients has the other APIs, too."""
    bodies = BodyReader()
    opening.callback(bodies.close)
    openai = OpenAIDoor(context, readiness, bodies, metrics)
    doors: list[Door] = [openai, AnthropicDoor(context, bodies)]
    folder = context.config.batch_folder
    if folder is not None and context.config.serves_api:
        worker = await open_batches(context, openai, Path(folder))
        opening.push_async_callback(worker.close)
        doors.append(BatchDoor(worker, bodies))
    ollama = OllamaDoor(context, bodies)
    return {OPENAI: HTTPRouter(context, doors), OLLAMA: HTTPRouter(context, [ollama, *doors])}


@contextlib.contextmanager
def _naming_port(name: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{error}; this is the port of the HTTP API, `{name}`") from None
