"""The public names of Quire, installed as `quire/__init__.py`.

All names except the errors are imported at their first use, so `import quire` loads neither numpy nor the kernels.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .runtime.common.errors import (
    Cancelled,
    ConfigError,
    ContextLengthExceeded,
    CorruptCheckpoint,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    MissingDependency,
    MissingTensor,
    ModelError,
    ModelNotFound,
    NotOpen,
    Overloaded,
    ProtocolError,
    Quarantined,
    QuireError,
    QuotaExceeded,
    RequestNotFound,
    SnapshotNotSaved,
    TLSError,
    Unauthenticated,
    Unavailable,
    UnsupportedModel,
    WrongTensor,
)

__all__ = [
    "LLM",
    "Accepted",
    "AsyncClient",
    "Cancelled",
    "ChatOptions",
    "Client",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthExceeded",
    "CorruptCheckpoint",
    "DeadlineExceeded",
    "Delta",
    "GenerateRequest",
    "GenerationFailed",
    "InvalidRequest",
    "MissingDependency",
    "MissingTensor",
    "ModelError",
    "ModelNotFound",
    "NotOpen",
    "OutputChunk",
    "Overloaded",
    "Progress",
    "ProtocolError",
    "Quarantined",
    "QuireError",
    "QuotaExceeded",
    "RequestNotFound",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "ServedModel",
    "SnapshotNotSaved",
    "StructuredOutputs",
    "TLSError",
    "TokenLogprobs",
    "ToolCall",
    "ToolChoice",
    "Unauthenticated",
    "Unavailable",
    "UnsupportedModel",
    "Usage",
    "WrongTensor",
]

if TYPE_CHECKING:
    from .runtime.client.async_client import AsyncClient, RequestOptions
    from .runtime.client.sync_client import Client
    from .runtime.common.types import (
        ChatOptions,
        CompletionOutput,
        Delta,
        OutputChunk,
        RequestOutput,
        SamplingParams,
        StructuredOutputs,
        TokenLogprobs,
        ToolCall,
        ToolChoice,
        Usage,
    )
    from .runtime.engine.facade import GenerateRequest
    from .runtime.llm import LLM
    from .runtime.protocol.frames import Accepted, Progress, ServedModel
else:
    _NAMES = {  # module of `quire.runtime` -> the names that are imported from it at their first use
        "client.async_client": ("AsyncClient", "RequestOptions"),
        "client.sync_client": ("Client",),
        "common.types": (
            "ChatOptions",
            "CompletionOutput",
            "Delta",
            "OutputChunk",
            "RequestOutput",
            "SamplingParams",
            "StructuredOutputs",
            "TokenLogprobs",
            "ToolCall",
            "ToolChoice",
            "Usage",
        ),
        "engine.facade": ("GenerateRequest",),
        "llm": ("LLM",),
        "protocol.frames": ("Accepted", "Progress", "ServedModel"),
    }

    def __getattr__(name: str) -> object:
        for module, names in _NAMES.items():
            if name in names:
                value = getattr(import_module(f".runtime.{module}", __name__), name)
                globals()[name] = value
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
