"""KV-cache pages: allocation, page tables, the prefix cache, spilling and snapshots. Imports nothing else of Quire."""

from .arena import KVArena, map_memory
from .exceptions import (
    InvariantViolated,
    OutOfMemory,
    OutOfPages,
    OutOfStates,
    PagerError,
    SnapshotDamaged,
    SnapshotError,
    SnapshotForeign,
    SnapshotMismatch,
    SnapshotTruncated,
    SpillUnavailable,
)
from .invariants import check
from .layout import PAGE_SIZES, KVDtype, KVLayout
from .pager import STATE_INTERVAL, Pager
from .pool import Content
from .prefix import page_keys, root_key
from .snapshot import load_snapshot, prove_writable, save_snapshot
from .spill import PageStore, Spilled, SpillFile
from .states import NoStates, StatePool
from .table import PageTable, images_between

__all__ = [
    "PAGE_SIZES",
    "STATE_INTERVAL",
    "Content",
    "InvariantViolated",
    "KVArena",
    "KVDtype",
    "KVLayout",
    "NoStates",
    "OutOfMemory",
    "OutOfPages",
    "OutOfStates",
    "PageStore",
    "PageTable",
    "Pager",
    "PagerError",
    "SnapshotDamaged",
    "SnapshotError",
    "SnapshotForeign",
    "SnapshotMismatch",
    "SnapshotTruncated",
    "SpillFile",
    "SpillUnavailable",
    "Spilled",
    "StatePool",
    "check",
    "images_between",
    "load_snapshot",
    "map_memory",
    "page_keys",
    "prove_writable",
    "root_key",
    "save_snapshot",
]
