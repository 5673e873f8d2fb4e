"""One engine: requests in, streams of text out. `facade` is all that the rooms above may rely on."""

from .core import Core, CoreInfo, CoreListener, EngineCore, Prefilled
from .engine import Engine, LocalEngine
from .facade import (
    EngineFacade,
    EngineInfo,
    EngineObserver,
    EngineStats,
    GenerateRequest,
    Generation,
    RequestStats,
    StepStats,
)
from .snapshot import check_snapshot_path, kept_prefixes
from .text_processor import TextProcessor

__all__ = [
    "Core",
    "CoreInfo",
    "CoreListener",
    "Engine",
    "EngineCore",
    "EngineFacade",
    "EngineInfo",
    "EngineObserver",
    "EngineStats",
    "GenerateRequest",
    "Generation",
    "LocalEngine",
    "Prefilled",
    "RequestStats",
    "StepStats",
    "TextProcessor",
    "check_snapshot_path",
    "kept_prefixes",
]
