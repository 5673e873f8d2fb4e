"""The line that `quire serve` prints once its ports answer, as text and as a log event."""

from __future__ import annotations

from typing import Any

from ..common.logs import json_event
from ..common.model_tables import ModelEntry
from ..common.settings import Settings
from ..engine import EngineInfo
from ..model import model_path, read_spec, weights_text
from ..server import CatalogModel, ModelCatalog, Server


def ready_line(settings: Settings, models: ModelCatalog, server: Server) -> str:
    """Return the ready line as text."""
    info = models.main.info
    scheme = "http" if settings.server.tls_cert is None else "https"
    api = f"api {scheme}://{server.openai_address}/v1  " if server.openai_address else ""
    ollama = f"ollama {scheme}://{server.ollama_address}  " if server.ollama_address else ""
    processes = f"  {info.num_processes} engine processes" if info.num_processes > 1 else ""
    served = "  ".join(_served(entry, model, settings) for entry, model in _entries(settings, models))
    return (
        f"quire ready: clients {server.address}  metrics http://{server.operator_address}/metrics  {api}{ollama}"
        f"{served}  {info.threads} threads ({info.threads_reason})  {info.isa}{processes}"
    )


def ready_json(settings: Settings, models: ModelCatalog, server: Server) -> str:
    """Return the ready line as a log event."""
    info = models.main.info
    scheme = "http" if settings.server.tls_cert is None else "https"
    fields = {
        "clients": server.address,
        "metrics": f"http://{server.operator_address}/metrics",
        "api": f"{scheme}://{server.openai_address}/v1" if server.openai_address else None,
        "ollama": f"{scheme}://{server.ollama_address}" if server.ollama_address else None,
        **_fields(*_entries(settings, models)[0], settings),
        "threads": info.threads,
        "threads_reason": info.threads_reason,
        "isa": info.isa,
        "engine_processes": info.num_processes,
    }
    if settings.models:
        fields["models"] = [
            {"name": entry.name, **_fields(entry, model, settings)} for entry, model in _entries(settings, models)
        ]
    return json_event("quire ready", **fields)


def _entries(settings: Settings, models: ModelCatalog) -> list[tuple[ModelEntry, CatalogModel]]:
    """Return the options of each model, and the model."""
    entries = settings.models or (ModelEntry(name="", engine=settings.engine),)
    return list(zip(entries, models.models, strict=True))


def _served(entry: ModelEntry, model: CatalogModel, settings: Settings) -> str:
    name = f"{entry.name}: " if entry.name else ""
    path = entry.engine.model or "bundled demo"
    return f"model {name}{path} {_dtypes(entry, model.info, settings)}  {_sizes(model.info)}"


def _fields(entry: ModelEntry, model: CatalogModel, settings: Settings) -> dict[str, Any]:
    info = model.info
    return {
        "model": entry.engine.model or "bundled demo",
        "dtypes": _dtypes(entry, info, settings).strip("()"),
        "pages": info.num_pages,
        "page_size": info.page_size,
        "max_model_len": info.max_model_len,
    }


def _dtypes(entry: ModelEntry, info: EngineInfo, settings: Settings) -> str:
    config = entry.engine
    hosts = settings.server.engine_hosts
    if hosts is not None:
        return f"at {hosts}"
    if not info.generates:
        return f"(encoder, {config.weights})"
    spec = read_spec(model_path(config.model))
    states = f", states {config.state_dtype}" if spec.has_matrices else ""
    return f"({weights_text(spec, config.weights)}, KV {config.kv_cache_dtype}{states})"


def _sizes(info: EngineInfo) -> str:
    pages = f"{info.num_pages} pages of {info.page_size} tokens" if info.generates else ""
    encoder = info.encoder
    if encoder is None:
        return pages
    what = "scores" if encoder.num_labels else f"vectors of {encoder.dimensions}"
    return f"{pages}{'  ' if pages else ''}{what}, texts of up to {encoder.max_model_len} tokens"
