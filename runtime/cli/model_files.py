"""The models that a command names: local files as they are, models on a hub from the cache or by download."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from ..common.config import EngineConfig
from ..common.errors import ConfigError
from ..common.memory import free_memory_bytes
from ..common.server_config import ServerConfig
from ..common.settings import Settings
from ..hub import ModelReference, fetch, headers, parse_reference
from ..hub.transfer import OnBytes

MODEL_OPTIONS = ("model", "embedding_model", "draft_model")  # options that name models


def with_model_files(settings: Settings) -> Settings:
    """Return settings with the paths of models in place of their names on a hub; download what is missing.

    A model keeps its name for clients, unless another is set. Raises as `fetch` of the hub does.
    """
    if settings.models:
        models = tuple(msgspec.structs.replace(each, engine=_with_files(each.engine)) for each in settings.models)
        return msgspec.structs.replace(settings, models=models)
    reference = parse_reference(settings.engine.model or "")
    server = settings.server
    if reference is not None and server.served_model_name is None:
        server = msgspec.structs.replace(server, served_model_name=str(reference))
    return Settings(engine=_with_files(settings.engine), server=server)


def _with_files(engine: EngineConfig) -> EngineConfig:
    """Return options with the paths of models in place of their names on a hub; download what is missing."""
    names = {name: parse_reference(getattr(engine, name) or "") for name in MODEL_OPTIONS}
    paths = {
        name: str(fetch(reference, FreeMemory(engine, reference), TerminalProgress()))
        for name, reference in names.items()
        if reference is not None
    }
    return msgspec.structs.replace(engine, **paths)


@contextmanager
def with_model_headers(settings: Settings) -> Iterator[Settings]:
    """Yield settings as `with_model_files`, but with the headers of models that are not in the cache."""
    with ExitStack() as stack:
        engine = settings.engine
        for name in MODEL_OPTIONS:
            reference = parse_reference(getattr(engine, name) or "")
            if reference is not None:
                memory = FreeMemory(settings.engine, reference, refuses=False)
                path = stack.enter_context(headers(reference, memory))
                engine = msgspec.structs.replace(engine, **{name: str(path)})
        yield Settings(engine=engine, server=settings.server)


def model_files(model: str) -> str:
    """Return the path of a model that a further flag names; download it if it is a name on a hub."""
    return str(with_model_files(Settings(engine=EngineConfig(model=model), server=ServerConfig())).engine.model)


class FreeMemory:
    """Compares the plan of a model with the memory that is free."""

    def __init__(self, engine: EngineConfig, reference: ModelReference, *, refuses: bool = True) -> None:
        self._engine = engine
        self._reference = reference
        self._refuses = refuses

    def fits(self, path: Path) -> bool:
        """Return whether the memory holds the model with its KV cache."""
        total, _ = self._plan(path)
        return total <= free_memory_bytes()

    def check(self, path: Path) -> None:
        """Raise ConfigError if the memory cannot hold the model even with the smallest KV cache."""
        if not self._refuses:
            return
        total, kv = self._plan(path)
        needed = total if self._engine.kv_cache_memory is not None else total - kv
        if needed > (free := free_memory_bytes()):
            raise ConfigError(
                f"{self._reference} needs {needed:,} bytes of memory, {free:,} are free; nothing was downloaded: "
                "choose a smaller model or quantization, or `weights` q8 or q4"
            )

    def _plan(self, path: Path) -> tuple[int, int]:
        """Return the bytes of the plan, and the bytes of its KV cache."""
        # Imported here: the simulation and its libraries, which a start from the cache does not need.
        from ..model.encoder import is_encoder
        from ..tools.planning import PlanTarget, plan_encoder, plan_serving

        engine = msgspec.structs.replace(self._engine, model=str(path), embedding_model=None, draft_model=None)
        if not is_encoder(path):
            plan = plan_serving(Settings(engine=engine, server=ServerConfig()), PlanTarget())
            return plan.total_bytes, plan.capacity.memory.kv_bytes
        engine = msgspec.structs.replace(engine, kv_cache_memory=None, max_model_len=None)
        return plan_encoder(Settings(engine=engine, server=ServerConfig()), PlanTarget()).total_bytes, 0


class TerminalProgress:
    """The progress of downloads on standard error: a bar on a terminal, else one line per model."""

    def note(self, text: str) -> None:
        """Print one line."""
        print(f"quire: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def download(self, name: str, nbytes: int) -> Iterator[OnBytes]:
        """Show the progress of `nbytes` bytes."""
        if not sys.stderr.isatty():
            self.note(f"downloading {name}, {nbytes:,} bytes")
            yield lambda _: None
            return
        from rich import progress
        from rich.console import Console

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(name, total=nbytes)
            yield lambda count: bar.advance(task, count)
