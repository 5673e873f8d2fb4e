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
]
