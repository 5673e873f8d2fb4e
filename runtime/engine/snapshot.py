"""The prefix cache across restarts: loaded from a file before a core serves, saved to it after the core has stopped.

A file that is not a snapshot is never overwritten. Pages are loaded only into the build, settings and model that
computed them. The file format is in `pager/snapshot.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from ...pager import (
    SnapshotDamaged,
    SnapshotError,
    SnapshotMismatch,
    SnapshotTruncated,
    load_snapshot,
    prove_writable,
    save_snapshot,
)
from ..common.errors import ConfigError, SnapshotNotSaved
from ..model import fingerprint
from .bits import bits_id
from .engine_core import EngineCore

_log = structlog.get_logger("quire.engine")


def check_snapshot_path(path: Path) -> None:
    """Prove that a file can be created at `path`, before a model is loaded. Raises ConfigError."""
    if path.is_dir():
        raise ConfigError(f"prefix_snapshot: {path} is a folder; name a file")
    try:
        prove_writable(path)
    except SnapshotError as error:
        raise ConfigError(f"prefix_snapshot: {error}") from error


@asynccontextmanager
async def prefix_snapshot(
    core: EngineCore, path: Path, progress: Callable[[int], None] = lambda num_bytes: None
) -> AsyncIterator[None]:
    """Load the prefix cache of `core` from `path`; on leaving, stop the core and save the cache there.

    `progress` is called on the event loop with the bytes that are on disk so far. A snapshot of another model or build,
    or a truncated or damaged one, is logged, and replaced on leaving. Raises ConfigError if the file is not a snapshot
    or the core has no prefix cache, SnapshotNotSaved on leaving. After an exception inside, no file is saved.
    """
    if core.pager.prefix is None:
        if core.config.enable_prefix_caching:
            raise ConfigError(
                f"prefix_snapshot needs a prefix cache, which has no room for a state of {core.pager.states.nbytes} "
                "bytes; raise kv_cache_memory or state_cache_memory"
            )
        raise ConfigError("prefix_snapshot needs enable_prefix_caching, which is off")
    start = time.perf_counter()
    identity = await asyncio.to_thread(_identity, core)
    _log.info("model fingerprint taken", seconds=_since(start))
    _load(core, path, identity)
    yield
    await core.stop()
    loop = asyncio.get_running_loop()
    await asyncio.to_thread(
        _save, core, path, identity, lambda num_bytes: loop.call_soon_threadsafe(progress, num_bytes)
    )


def _identity(core: EngineCore) -> bytes:
    return bits_id(core.runner, core.config, fingerprint(core.runner.path))


def _load(core: EngineCore, path: Path, identity: bytes) -> None:
    if not path.exists():
        return
    start = time.perf_counter()
    try:
        pages = load_snapshot(path, core.pager, core.runner.arena, identity, core.runner.state_memory)
    except (SnapshotMismatch, SnapshotTruncated, SnapshotDamaged) as error:
        _log.warning("prefix snapshot not used, starting cold", path=str(path), reason=str(error))
    except SnapshotError as error:
        raise ConfigError(f"prefix_snapshot {path} would be replaced at the end: {error}") from error
    else:
        _log.info("prefix snapshot loaded", path=str(path), pages=pages, seconds=_since(start))


def _save(core: EngineCore, path: Path, identity: bytes, progress: Callable[[int], object]) -> None:
    start = time.perf_counter()
    try:
        pages = save_snapshot(path, core.pager, core.runner.arena, identity, progress, core.runner.state_memory)
    except SnapshotError as error:
        _log.error("prefix snapshot not saved", path=str(path), reason=str(error))
        raise SnapshotNotSaved(str(error)) from error
    else:
        _log.info("prefix snapshot saved", path=str(path), pages=pages, seconds=_since(start))


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 3)
