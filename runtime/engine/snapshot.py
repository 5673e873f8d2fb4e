"""The prefix cache across restarts: loaded from a file before a core serves, saved to it after the core has stopped.

A file that is no snapshot is never overwritten. Pages are loaded only into the build, settings and model that computed
them. The file format is in `pager/snapshot.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path

import structlog

from ...pager import (
    SnapshotDamaged,
    SnapshotError,
    SnapshotMismatch,
    SnapshotTruncated,
    load_snapshot,
    save_snapshot,
)
from ..common.errors import ConfigError
from ..model import fingerprint
from .core import EngineCore

_log = structlog.get_logger("quire.engine")


def check_snapshot_path(path: Path) -> None:
    """Check that a snapshot can be saved at `path`, before a model is loaded. Raises ConfigError."""
    if path.is_dir():
        raise ConfigError(f"prefix_snapshot: {path} is a folder; name a file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"prefix_snapshot: cannot create a file in {path.parent}")


@asynccontextmanager
async def prefix_snapshot(core: EngineCore, path: Path) -> AsyncIterator[None]:
    """Load the prefix cache of `core` from `path`; on leaving, stop the core and save the cache there.

    A snapshot of another model or build, or a truncated or damaged one, is logged, and replaced on leaving. Raises
    ConfigError if the file is no snapshot or the core has no prefix cache. After an exception inside, nothing is saved.
    """
    if core.pager.prefix is None:
        raise ConfigError("prefix_snapshot needs enable_prefix_caching, which is off")
    start = time.perf_counter()
    identity = await asyncio.to_thread(_identity, core)
    _log.info("model fingerprint taken", seconds=_since(start))
    _load(core, path, identity)
    yield
    await core.stop()
    _save(core, path, identity)


def _identity(core: EngineCore) -> bytes:
    """Return a digest of everything that determines the bits of a page."""
    runner, config = core.runner, core.config
    build = (version("quire"), runner.capacity.isa, config.weights, config.kv_cache_dtype, runner.capacity.layout)
    return hashlib.sha256(repr(build).encode() + fingerprint(runner.folder)).digest()


def _load(core: EngineCore, path: Path, identity: bytes) -> None:
    if not path.exists():
        return
    start = time.perf_counter()
    try:
        pages = load_snapshot(path, core.pager, core.runner.arena, identity)
    except (SnapshotMismatch, SnapshotTruncated, SnapshotDamaged) as error:
        _log.warning("prefix snapshot not used, starting cold", path=str(path), reason=str(error))
    except SnapshotError as error:
        raise ConfigError(f"prefix_snapshot {path} would be replaced at the end: {error}") from error
    else:
        _log.info("prefix snapshot loaded", path=str(path), pages=pages, seconds=_since(start))


def _save(core: EngineCore, path: Path, identity: bytes) -> None:
    start = time.perf_counter()
    try:
        pages = save_snapshot(path, core.pager, core.runner.arena, identity)
    except SnapshotError as error:
        _log.error("prefix snapshot not saved", path=str(path), reason=str(error))
    else:
        _log.info("prefix snapshot saved", path=str(path), pages=pages, seconds=_since(start))


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 3)
