"""One engine: requests in, streams of text out. `facade` is all that the rooms above may rely on."""

from .engine import Engine
from .facade import (
    Admission,
    EngineFacade,
    EngineObserver,
    EngineStats,
    GenerateRequest,
    Generation,
    RequestStats,
    StepStats,
)
from .snapshot import check_snapshot_path, kept_prefixes

__all__ = [
    "Admission",
    "Engine",
    "EngineFacade",
    "EngineObserver",
    "EngineStats",
    "GenerateRequest",
    "Generation",
    "RequestStats",
    "StepStats",
    "check_snapshot_path",
    "kept_prefixes",
]
