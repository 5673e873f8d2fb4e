"""`quire serve`: one engine and one server until a signal ends them.

One invariant: the ready line is printed once, after both ports answer, and is the only thing on standard output.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import structlog
import uvloop

from ..config import EngineConfig
from ..engine import Engine, LocalEngine, check_snapshot_path, kept_prefixes
from ..server import PrometheusObserver, Server
from ..settings import Settings


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM. Raises ModelError or ConfigError if it cannot start."""
    _log_to_stderr()
    uvloop.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    stop = _stop_signal()
    snapshot = settings.server.prefix_snapshot
    if snapshot is not None:
        check_snapshot_path(Path(snapshot))
    engine = await Engine.start(settings.engine)
    try:
        async with nullcontext() if snapshot is None else kept_prefixes(engine.core, Path(snapshot)):
            await _serve_until(stop, engine, settings)
    finally:
        await engine.close()


async def _serve_until(stop: asyncio.Event, engine: LocalEngine, settings: Settings) -> None:
    capacity = engine.core.machine.capacity
    cpus = capacity.cpus
    server = Server(PrometheusObserver(version("quire"), capacity.isa, cpus.threads, cpus.reason))
    await server.start(engine, settings.server)
    gc.freeze()  # what was loaded stays: to look through it again and again would stall all streams each time
    try:
        print(_ready_line(settings.engine, engine, server), flush=True)
        await stop.wait()
    finally:
        await server.close()


def _ready_line(config: EngineConfig, engine: LocalEngine, server: Server) -> str:
    machine = engine.core.machine
    return (
        f"quire ready: clients {server.address}  metrics http://{server.http_address}/metrics  "
        f"model {config.model or 'bundled demo'} ({config.weights}, KV {config.kv_cache_dtype})  "
        f"{machine.num_pages} pages of {machine.layout.page_size} tokens  "
        f"{machine.capacity.cpus.threads} threads ({machine.capacity.cpus.reason})  {machine.capacity.isa}"
    )


def _stop_signal() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _log_to_stderr() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
