"""Quire's public face, installed as `quire/__init__.py`."""

from .runtime.client import AsyncClient, Client
from .runtime.common.errors import QuireError
from .runtime.common.types import CompletionOutput, OutputChunk, RequestOutput, SamplingParams, TokenLogprobs, Usage
from .runtime.llm import LLM

__all__ = [
    "LLM",
    "AsyncClient",
    "Client",
    "CompletionOutput",
    "OutputChunk",
    "QuireError",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprobs",
    "Usage",
]
