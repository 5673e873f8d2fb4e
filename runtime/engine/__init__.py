"""One engine: requests in, streams of text out. The server and `LLM` use it through `facade.EngineFacade`."""

from .bits import models_digest
from .build import load_texts
from .core import Core, CoreListener, LoadedAdapter, Prefilled
from .engine import Engine, LocalEngine
from .engine_core import EngineCore
from .facade import (
    AdapterStatus,
    CoreInfo,
    EmbeddedTexts,
    Embeddings,
    EmbedRequest,
    EmbedStats,
    EncoderInfo,
    EngineFacade,
    EngineInfo,
    EngineObserver,
    EngineStats,
    GenerateRequest,
    Generation,
    HostState,
    HostStatus,
    RequestStats,
    SilentObserver,
    StepStats,
)
from .snapshot import check_snapshot_path, prefix_snapshot
from .stats import sum_stats
from .text import has_tokenizer
from .text_processor import TextProcessor
from .validator import check_images

__all__ = [
    "AdapterStatus",
    "Core",
    "CoreInfo",
    "CoreListener",
    "EmbedRequest",
    "EmbedStats",
    "EmbeddedTexts",
    "Embeddings",
    "EncoderInfo",
    "Engine",
    "EngineCore",
    "EngineFacade",
    "EngineInfo",
    "EngineObserver",
    "EngineStats",
    "GenerateRequest",
    "Generation",
    "HostState",
    "HostStatus",
    "LoadedAdapter",
    "LocalEngine",
    "Prefilled",
    "RequestStats",
    "SilentObserver",
    "StepStats",
    "TextProcessor",
    "check_images",
    "check_snapshot_path",
    "has_tokenizer",
    "load_texts",
    "models_digest",
    "prefix_snapshot",
    "sum_stats",
]
