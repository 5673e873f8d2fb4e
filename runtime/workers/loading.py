"""The progress of loading a model: a line of the log with the planned memory, and a bar on a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import structlog

from ...kernels.cgroups import read_system_file
from ..common.config import EngineConfig
from ..common.heap import resident_bytes
from ..common.memory import deciding_limit, free_memory_bytes
from ..model import model_name, model_path
from ..model.files import files_bytes
from ..model.runner import Capacity
from ..model.runner.capacity import EncoderCapacity

INTERVAL_S = 0.1  # pause between two states of the bar
WIDTH = 30  # columns
ERASE_LINE = "\r\x1b[K"

Planned = Callable[[Capacity | EncoderCapacity], None]

_log = structlog.get_logger("quire.engine")


@contextmanager
def shown_loading(config: EngineConfig, bar: TextIO | None = None) -> Iterator[Planned]:
    """Yield a function that logs the plan of the model being loaded. Draw a bar on `bar` from then until the end."""
    ended = threading.Event()
    drawing: list[threading.Thread] = []

    def planned(capacity: Capacity | EncoderCapacity) -> None:
        _log_plan(config, capacity)
        if bar is not None:
            progress = ModelLoading(files_bytes(model_path(config.model)), capacity.memory.total_bytes)
            name = model_name(model_path(config.model))
            drawing.append(threading.Thread(target=_draw, args=(bar, name, progress, ended), daemon=True))
            drawing[0].start()

    try:
        yield planned
    finally:
        ended.set()
        for thread in drawing:
            thread.join()


class ModelLoading:
    """The loaded part of a model, by bytes read from its files and bytes of memory."""

    def __init__(self, file_bytes: int, memory_bytes: int) -> None:
        self._sizes = file_bytes, memory_bytes
        self._before = _read_bytes(), resident_bytes()

    @property
    def share(self) -> float:
        """The loaded part, from 0 to 1."""
        now = _read_bytes(), resident_bytes()
        done = [min(max(0, new - old), size) for new, old, size in zip(now, self._before, self._sizes, strict=True)]
        return sum(done) / max(1, sum(self._sizes))


def bar_line(name: str, share: float) -> str:
    """Return the bar as text that replaces the terminal's line."""
    filled = int(share * WIDTH)
    return f"{ERASE_LINE}loading {name}  [{'#' * filled}{'.' * (WIDTH - filled)}] {share:4.0%}"


def terminal(form: str) -> TextIO | None:
    """Return standard error if a bar may be drawn there: it is a terminal, and the logs are for people."""
    return sys.stderr if form == "console" and sys.stderr.isatty() else None


def _draw(stream: TextIO, name: str, progress: ModelLoading, ended: threading.Event) -> None:
    while not ended.wait(INTERVAL_S):
        print(bar_line(name, progress.share), end="", file=stream, flush=True)
    print(ERASE_LINE, end="", file=stream, flush=True)


def _log_plan(config: EngineConfig, capacity: Capacity | EncoderCapacity) -> None:
    memory = capacity.memory
    fields: dict[str, object] = {}
    problem = None
    if isinstance(capacity, Capacity):
        fields = {
            "kv_cache": capacity.layout.dtype,
            "kv_cache_bytes": capacity.memory.kv_bytes,
            "max_model_len": capacity.max_model_len,
        }
        if capacity.state_layout.nbytes:
            fields |= {"states": capacity.num_states, "states_kept": capacity.num_cached_states}
        problem = capacity.prefix_cache_problem(config)
    _log.info(
        "loading the model",
        model=config.model or "bundled demo",
        weights=", ".join(sorted(memory.weights)),
        weights_bytes=memory.weights_bytes,
        total_bytes=memory.total_bytes,
        **fields,
    )
    if problem is not None:
        _log.warning("the prefix cache is off", reason=problem)
    free = free_memory_bytes()
    if memory.total_bytes > free:
        limit = deciding_limit()
        _log.warning(
            "the model takes more memory than is available",
            total_bytes=memory.total_bytes,
            available_bytes=free,
            limit=None if limit is None else str(limit),
        )


def _read_bytes() -> int:
    """Return the bytes that the process has read from files; 0 if the system does not show them."""
    fields = read_system_file(Path("/proc/self/io")).split()
    return int(fields[1]) if fields else 0
