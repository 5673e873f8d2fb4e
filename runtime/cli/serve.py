"""`quire serve`: run one server and its engine processes until a signal ends them.

The first SIGTERM or SIGINT drains the server: it refuses new requests, and running ones have `--shutdown-timeout`
seconds to finish. While the model loads, it ends the start. The second exits immediately, engine processes included.
The exit status after SIGINT is 130. SIGHUP reloads the keys and the certificate. Standard output gets one line, the
ready line, once both ports answer.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path

import msgspec
import structlog
import uvloop

from ..common.errors import ConfigError, SnapshotNotSaved
from ..common.logs import log_to_stderr
from ..common.settings import Settings
from ..engine import Core, Engine, EngineCore, EngineInfo, check_snapshot_path, load_texts, prefix_snapshot
from ..model import model_name, model_path, read_spec, weights_text
from ..server import Server, check_config
from ..server.monitoring import PrometheusObserver
from ..workers import EnginePool, HealthTimeouts
from .flags import LimitFlags, MemoryFlags, ModelFolder, SchedulingFlags, ServerFlags, settings_from

GC_OBJECTS = 20_000  # more than before the next collection: what ends leaves no cycles, and a step makes thousands
GIL_INTERVAL_S = 0.0005  # that a thread which renders or tokenizes holds the GIL while the event loop waits for it
CANCEL_TIMEOUT_S = 1.0  # to end a start; a thread that loads a model may not end in time

_log = structlog.get_logger("quire.server")


def serve(
    model: ModelFolder = None,
    /,
    *,
    memory: MemoryFlags | None = None,
    scheduling: SchedulingFlags | None = None,
    server_flags: ServerFlags | None = None,
    limits: LimitFlags | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. Raises ModelError or ConfigError if the server cannot start."""
    settings = settings_from(model, memory, scheduling, server_flags, limits)
    log_to_stderr(settings.server.log_format, settings.server.log_level)
    name = settings.server.served_model_name or model_name(model_path(settings.engine.model))
    server = msgspec.structs.replace(settings.server, served_model_name=name)
    if uvloop.run(_serve(msgspec.structs.replace(settings, server=server))) == signal.SIGINT:
        raise KeyboardInterrupt


async def _serve(settings: Settings) -> signal.Signals:
    """Serve until a signal and return it. A signal that comes while the model loads ends that at once."""
    stop = _StopSignal()
    starting = asyncio.create_task(_start_and_serve(settings, stop))
    stop.cancel_start = starting.cancel
    try:
        await starting
    except asyncio.CancelledError:
        if stop.number is None:
            raise
    assert stop.number is not None, "the server runs until a signal"
    return stop.number


async def _start_and_serve(settings: Settings, stop: _StopSignal) -> None:
    if settings.server.in_process and settings.server.engine_processes > 1:
        raise ConfigError("engine_processes cannot be above 1 with `in_process`; leave out one of them")
    await check_config(settings.server)
    if settings.server.prefix_snapshot is not None:
        check_snapshot_path(Path(settings.server.prefix_snapshot))
    text_processor, encoder_texts = await asyncio.to_thread(load_texts, settings.engine)
    if text_processor.tokenizer is None:
        _log.warning("the model has no tokenizer: prompts must be token ids")
    async with _core(settings) as core:
        await _serve_until(stop, Engine(core, text_processor, encoder_texts), settings)


@asynccontextmanager
async def _core(settings: Settings) -> AsyncIterator[Core]:
    """Run the engine, in this process or in others; load and save the prefix snapshot if there is one."""
    server = settings.server
    if not server.in_process:
        pool = await EnginePool.launch(
            settings.engine,
            HealthTimeouts(server.engine_heartbeat_timeout_ms / 1000, server.stall_timeout_ms / 1000),
            restart_timeout_s=server.engine_restart_timeout_ms / 1000,
            num_processes=server.engine_processes,
            snapshot=server.prefix_snapshot,
            log=(server.log_format, server.log_level),
        )
        try:
            yield pool
        finally:
            await pool.close()
        if lost := [member.lost_snapshot for member in pool.members if member.lost_snapshot is not None]:
            raise SnapshotNotSaved("; ".join(lost))
        return
    core = await EngineCore.load(settings.engine)
    try:
        snapshot = server.prefix_snapshot
        async with nullcontext() if snapshot is None else prefix_snapshot(core, Path(snapshot)):
            yield core
    finally:
        await core.close()


async def _serve_until(stop: _StopSignal, engine: Engine[Core], settings: Settings) -> None:
    info = engine.info
    stop.cancel_start = None
    server = Server(PrometheusObserver(version("quire"), info.isa, info.threads, info.threads_reason))
    await server.start(engine, settings.server)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload)
    gc.freeze()  # collections need not visit what was loaded at start; each visit would stall all streams
    gc.set_threshold(GC_OBJECTS)
    sys.setswitchinterval(GIL_INTERVAL_S)
    try:
        print(_ready_line(settings, engine, server), flush=True)
        await stop.wait()
        await server.drain(settings.server.shutdown_timeout)
    finally:
        await server.close()


def _ready_line(settings: Settings, engine: Engine[Core], server: Server) -> str:
    info, config = engine.info, settings.engine
    scheme = "http" if settings.server.tls_cert is None else "https"
    api = f"api {scheme}://{server.openai_address}/v1  " if server.openai_address else ""
    processes = f"  {info.num_processes} engine processes" if info.num_processes > 1 else ""
    return (
        f"quire ready: clients {server.address}  metrics http://{server.operator_address}/metrics  {api}"
        f"model {config.model or 'bundled demo'} ({_dtypes(settings, info)})  "
        f"{_sizes(info)}  "
        f"{info.threads} threads ({info.threads_reason})  {info.isa}{processes}"
    )


def _dtypes(settings: Settings, info: EngineInfo) -> str:
    config = settings.engine
    if not info.generates:
        return f"encoder, {config.weights}"
    return f"{weights_text(read_spec(model_path(config.model)), config.weights)}, KV {config.kv_cache_dtype}"


def _sizes(info: EngineInfo) -> str:
    pages = f"{info.num_pages} pages of {info.page_size} tokens" if info.generates else ""
    encoder = info.encoder
    if encoder is None:
        return pages
    what = "scores" if encoder.num_labels else f"vectors of {encoder.dimensions}"
    return f"{pages}{'  ' if pages else ''}{what}, texts of up to {encoder.max_model_len} tokens"


class _StopSignal:
    """The first SIGINT or SIGTERM: ends a start, or lets `wait` return. The second exits, also as process 1."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.cancel_start: Callable[[], object] | None = None  # while the model loads
        self._received = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the server can reload

    async def wait(self) -> None:
        await self._received.wait()

    def _on_signal(self, number: signal.Signals) -> None:
        if self.number is not None:
            os._exit(128 + number)
        self.number = number
        self._received.set()
        if self.cancel_start is not None:
            self.cancel_start()
            asyncio.get_running_loop().call_later(CANCEL_TIMEOUT_S, os._exit, 128 + number)
