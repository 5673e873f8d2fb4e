"""`quire serve`: run one server and its engine processes until a signal ends them.

The first SIGTERM or SIGINT drains the server: it refuses new requests, and running ones have `--shutdown-timeout`
seconds to finish. While the model loads, the signal ends the start. A second signal exits immediately, including engine
processes. The exit status after SIGINT is 130. SIGHUP reloads the keys and the certificate. Standard output gets one
line, the ready line, once both ports answer; it is JSON if the logs are. The last line of the log is "stopped".
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from ..cluster import Members, connected_cluster, read_secret
from ..common.config import EngineConfig
from ..common.errors import ConfigError
from ..common.heap import limit_heap
from ..common.logs import log_to_stderr
from ..common.server_config import ServerConfig
from ..common.settings import Settings
from ..common.tuning import favor_event_loop, tune_collector
from ..engine import (
    Core,
    Engine,
    EngineCore,
    TextProcessor,
    check_snapshot_path,
    load_texts,
    prefix_snapshot,
)
from ..model import model_name, model_path, projectors
from ..server import ModelCatalog, Server, check_config, check_ports
from ..server.monitoring import PrometheusObserver
from ..workers import engine_processes
from ..workers.loading import shown_loading, terminal
from .flags import LimitFlags, MachineFlags, MemoryFlags, ModelFolder, SchedulingFlags, ServerFlags, settings_from
from .ready_line import ready_json, ready_line
from .serve_models import open_models
from .stop_signal import StopSignal, run_until_signal

# Engine options that an API server also uses.
TEXT_OPTIONS = (
    "model",
    "embedding_model",
    "tool_call_parser",
    "chat_template",
    "system_prompt",
    "default_sampling",
    "special_tokens_in_content",
    "open_tool_arguments",
)

A = TypeVar("A")
B = TypeVar("B")

_log = structlog.get_logger("quire.server")


def serve(
    model: ModelFolder = None,
    /,
    *,
    memory: MemoryFlags | None = None,
    scheduling: SchedulingFlags | None = None,
    server_flags: ServerFlags | None = None,
    limits: LimitFlags | None = None,
    machines: MachineFlags | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. Raises ModelError or ConfigError if the server cannot start."""
    limit_heap()
    settings = settings_from(model, memory, scheduling, server_flags, limits, machines, takes_models=True)
    _check_machines(settings)
    log_to_stderr(settings.server.log_format, settings.server.log_level)
    if settings.models:
        run_until_signal(lambda stop: _start_and_serve(settings, stop))
        return
    name = settings.server.served_model_name or model_name(model_path(settings.engine.model))
    server = msgspec.structs.replace(settings.server, served_model_name=name)
    settings = msgspec.structs.replace(settings, server=server)
    run_until_signal(lambda stop: _start_and_serve(settings, stop))


async def _start_and_serve(settings: Settings, stop: StopSignal) -> None:
    if settings.server.in_process and settings.server.engine_processes > 1:
        raise ConfigError("engine_processes cannot be above 1 with `in_process`; leave out one of them")
    await check_config(settings.server)
    await check_ports(settings.server)
    if settings.server.prefix_snapshot is not None:
        check_snapshot_path(Path(settings.server.prefix_snapshot))
    async with _open_catalog(settings) as models:
        await _serve_until(stop, models, settings)


@asynccontextmanager
async def _open_catalog(settings: Settings) -> AsyncIterator[ModelCatalog]:
    """Run the engine of the model, or of each model. Raises ModelError or ConfigError."""
    if settings.models:
        async with open_models(settings, open_engine) as catalog:
            yield catalog
    else:
        async with open_engine(settings) as engine:
            yield ModelCatalog.of_one(str(settings.server.served_model_name), engine)


@asynccontextmanager
async def open_engine(settings: Settings, name: str = "engine") -> AsyncIterator[Engine[Core]]:
    """Run an engine with its texts; log lines of its processes have their `name`. Raises ModelError or ConfigError."""
    _log.info("reading the tokenizer", model=settings.engine.model or "bundled demo")
    async with AsyncExitStack() as stack:
        core, (text_processor, encoder_texts) = await _together(
            stack.enter_async_context(_core(settings, name)), asyncio.to_thread(load_texts, settings.engine)
        )
        _warn_of_missing(settings, text_processor)
        engine = Engine(core, text_processor, encoder_texts)
        stack.callback(engine.end_texts)
        yield engine


async def _together(first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B]) -> tuple[A, B]:
    """Run both and return their results. The first error ends the other one, and is raised after that."""
    tasks = asyncio.create_task(first), asyncio.create_task(second)
    try:
        found = await asyncio.gather(*tasks)
        return found[0], found[1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _warn_of_missing(settings: Settings, text_processor: TextProcessor) -> None:
    if text_processor.tokenizer is None:
        _log.warning("the model has no tokenizer: prompts must be token ids")
    for name in projectors(model_path(settings.engine.model)):
        _log.warning(f"{name} is not read: the model takes text only")


@asynccontextmanager
async def _core(settings: Settings, name: str) -> AsyncIterator[Core]:
    """Run the engine, in this process, in others or on other machines; load and save the prefix snapshot."""
    server = settings.server
    if server.engine_hosts is not None:
        secret = read_secret(str(server.secret_file))
        async with connected_cluster(settings, Members(server.engine_hosts), secret) as cluster:
            yield cluster
    elif not server.in_process:
        async with engine_processes(settings, name) as pool:
            yield pool
    else:
        with shown_loading(settings.engine, terminal(server.log_format)) as planned:
            core = await EngineCore.load(settings.engine, on_planned=planned)
        try:
            snapshot = server.prefix_snapshot
            async with nullcontext() if snapshot is None else prefix_snapshot(core, Path(snapshot)):
                yield core
        finally:
            await core.close()


def _check_machines(settings: Settings) -> None:
    """Raise ConfigError for options that are wrong or have no effect with engine hosts, or without them."""
    server = settings.server
    engine = settings.engine
    if server.engine_hosts is None:
        for name in ("secret_file", "engine_hosts_ca"):
            if getattr(server, name) is not None:
                raise ConfigError(f"{name} needs engine_hosts, which is not set")
        return
    if server.secret_file is None:
        raise ConfigError("engine_hosts needs secret_file, the secret of the hosts")
    local = ("in_process", "engine_processes", "prefix_snapshot")
    given = [name for name in local if getattr(server, name) != getattr(ServerConfig(), name)]
    names = [name for name in EngineConfig.__struct_fields__ if name not in TEXT_OPTIONS]
    given += [name for name in names if getattr(engine, name) != getattr(EngineConfig(), name)]
    if given:
        raise ConfigError(f"{given[0]} cannot be set with engine_hosts; set it at `quire engine-host`")
    read_secret(server.secret_file)
    Members(server.engine_hosts)


async def _serve_until(stop: StopSignal, models: ModelCatalog, settings: Settings) -> None:
    info = models.main.info
    stop.cancel_start = None
    server = Server(PrometheusObserver(version("quire"), info.isa, info.threads, info.threads_reason))
    await server.start_models(models, settings.server)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload)
    tune_collector()
    favor_event_loop()
    try:
        json_logs = settings.server.log_format == "json"
        print((ready_json if json_logs else ready_line)(settings, models, server), flush=True)
        await stop.wait()
        await server.drain(settings.server.shutdown_timeout)
    finally:
        await server.close()
