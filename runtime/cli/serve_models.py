"""The models of `quire serve --config models.toml`: their plans, their sizes together, and their engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import msgspec
import structlog

from ..common.errors import ConfigError, ModelError
from ..common.memory import machine_memory_bytes
from ..common.model_tables import ModelEntry
from ..common.settings import Settings
from ..engine import Core, Engine
from ..engine.planned_engine import PlannedEngine, plan_engine
from ..model import model_path
from ..model.encoder import is_encoder
from ..server import CatalogModel, ManagedEngine, ModelCatalog, Residency, Resident
from ..workers import place

OpenEngine = Callable[[Settings, str], AbstractAsyncContextManager[Engine[Core]]]

_log = structlog.get_logger("quire.server")


@asynccontextmanager
async def open_models(settings: Settings, open_engine: OpenEngine) -> AsyncIterator[ModelCatalog]:
    """Load the models that are loaded at start, and the others when they are needed.

    Raises ModelError, or ConfigError for models that do not fit together.
    """
    limit = settings.server.models_memory
    num_processes = len(place(settings.server.engine_processes))
    planned = [_plan(entry, settings, num_processes) for entry in settings.models]
    residents = []
    for entry, plan in zip(settings.models, planned, strict=True):
        server = msgspec.structs.replace(settings.server, served_model_name=entry.name)
        resident = Resident(
            entry.name,
            _total_bytes(plan, num_processes),
            partial(open_engine, Settings(engine=plan.config, server=server), f"{entry.name}-engine"),
            policy=entry.residency.load or ("start" if limit is None else "first-use"),
            idle_timeout_s=entry.residency.idle_timeout,
            is_pinned=entry.residency.pinned,
        )
        residents.append(resident)
    _check_sizes(residents, limit)
    residency = Residency(residents, limit, settings.server.model_wait_ms / 1000)
    models: list[CatalogModel] = []
    for resident, plan in zip(residents, planned, strict=True):
        resident.facade = ManagedEngine(plan.info, partial(residency.using, resident))
        models.append(CatalogModel(resident.name, resident.facade, resident.name if models else ""))
    await residency.start()
    try:
        yield ModelCatalog(models, settings.aliases, residency)
    finally:
        await residency.close()


def _plan(entry: ModelEntry, settings: Settings, num_processes: int) -> PlannedEngine:
    """Plan the engine of a model. Raises the error with the model's name."""
    memory_bytes = settings.server.models_memory or machine_memory_bytes()
    config = entry.engine
    try:
        if is_encoder(model_path(config.model)):  # other models' sizes of the KV cache and of prompts are not for it
            for name in ("kv_cache_memory", "max_model_len"):
                if getattr(config, name) == getattr(settings.engine, name):
                    config = msgspec.structs.replace(config, **{name: None})
        return plan_engine(config, memory_bytes // num_processes)
    except (ModelError, ConfigError) as error:
        raise type(error)(f"model {entry.name!r}: {error}") from error


def _total_bytes(planned: PlannedEngine, num_processes: int) -> int:
    """Return the bytes of a model's engine processes, which share the size of the KV cache."""
    return planned.total_bytes + (num_processes - 1) * (planned.total_bytes - planned.kv_bytes)


def _check_sizes(residents: list[Resident], limit: int | None) -> None:
    """Log the size of each model. Raises ConfigError if models that are always loaded do not fit."""
    sizes = {resident.name: resident.num_bytes for resident in residents}
    _log.info("memory of models", models_memory=limit, total_bytes=sum(sizes.values()), models=sizes)
    if limit is None:
        return
    for what, chosen in (
        ("that are loaded at start", [each for each in residents if each.policy == "start"]),
        ("that are pinned", [each for each in residents if each.is_pinned]),
    ):
        if (total := sum(each.num_bytes for each in chosen)) > limit:
            names = ", ".join(repr(each.name) for each in chosen)
            raise ConfigError(f"models_memory {limit} is less than the {total} bytes of the models {what}: {names}")
